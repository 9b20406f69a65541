/* SPDX-License-Identifier: Apache-2.0 */
/* What the backward kernels on matrix units and matrix_backward.c, which plans them, must agree
 * on. */
#ifndef FATTN_HIP_MATRIX_BACKWARD_H
#define FATTN_HIP_MATRIX_BACKWARD_H

/*
 * The shapes that are compiled: X(width, queries, keys, waves). width: the padded channels. The
 * keys are divided among the waves. The registers of a wave of 64 lanes hold K, V and the gradients
 * of 16 keys of 128 channels, and two such waves fit a SIMD. Those of a wave of 32 lanes hold only
 * the gradients of 16 keys, and not those of 256 channels.
 */
#define MATRIX_BACKWARD_MFMA(X) \
    X(64, 32, 128, 4)           \
    X(128, 32, 128, 8)          \
    X(256, 32, 64, 4)
#define MATRIX_BACKWARD_WMMA(X) \
    X(64, 16, 64, 4)            \
    X(128, 16, 64, 4)

/* Bytes of a block's LDS that are not tiles, at most: lse and delta of rows, and the item. */
#define MATRIX_BACKWARD_REST 1024

/* Bytes of LDS of a block. MFMA, whose tiles have 32 queries: 4 tiles of queries (2 with 256
 * channels), and dS. WMMA: 2 tiles of queries, 3 of keys, and dS. */
#define MATRIX_BACKWARD_SHARED(width, queries, keys)                      \
    (((queries) == 32 ? 2 * ((width) > 128 ? 2 : 4) * (queries) * (width) \
                      : 2 * (2 * (queries) + 3 * (keys)) * (width)) +     \
     2 * (queries) * (keys) + MATRIX_BACKWARD_REST)

#endif
