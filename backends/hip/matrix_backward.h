/* SPDX-License-Identifier: Apache-2.0 */
/* What matrix_backward.c, which plans them, and the backward kernels on matrix units must agree
 * on. */
#ifndef FATTN_HIP_MATRIX_BACKWARD_H
#define FATTN_HIP_MATRIX_BACKWARD_H

/*
 * The shapes that are compiled: X(width, queries, keys, waves), with width the padded channels. The
 * waves share the keys. Registers of waves of 64 lanes hold K, V and gradients of 16 keys of 128
 * channels so that two waves fit a SIMD; those of 32 lanes 16 keys' gradients, and of 256 channels
 * none.
 */
#define MATRIX_BACKWARD_MFMA(X) \
    X(64, 32, 128, 4)           \
    X(128, 32, 128, 8)          \
    X(256, 32, 64, 4)
#define MATRIX_BACKWARD_WMMA(X) \
    X(64, 16, 64, 4)            \
    X(128, 16, 64, 4)

/* Of a block's LDS, at most: what is no tile, which is lse and delta of rows and the item. */
#define MATRIX_BACKWARD_REST 1024

/* Bytes of LDS of a block. MFMA, whose tiles have 32 queries: 4 tiles of queries, with
 * 256 channels 2, and dS. WMMA: 2 of queries, 3 of keys, and dS. */
#define MATRIX_BACKWARD_SHARED(width, queries, keys)                      \
    (((queries) == 32 ? 2 * ((width) > 128 ? 2 : 4) * (queries) * (width) \
                      : 2 * (2 * (queries) + 3 * (keys)) * (width)) +     \
     2 * (queries) * (keys) + MATRIX_BACKWARD_REST)

#endif
