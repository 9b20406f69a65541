/* SPDX-License-Identifier: Apache-2.0 */
/* What matrix.c, which plans them, and the kernels on matrix units must agree on. */
#ifndef FATTN_HIP_MATRIX_H
#define FATTN_HIP_MATRIX_H

/*
 * The shapes of forward: X(width, rows, keys, held), with width the padded channels, and held
 * whether a wave's registers hold its queries. A wave has 32 rows on MFMA and 16 on WMMA, so that a
 * block has two threads a row; tiles of keys are such that each thread stages one block of values
 * (matrix_transposed_fill). Keys and values of 32 KiB leave room for two blocks where LDS, AMD's
 * shared memory, has 64 KiB.
 */
#define MATRIX_MFMA_SHAPES(X) \
    X(64, 128, 128, 1)        \
    X(128, 128, 64, 1)        \
    X(256, 128, 32, 1)
#define MATRIX_WMMA_SHAPES(X) \
    X(64, 64, 64, 1)          \
    X(128, 64, 32, 1)         \
    X(256, 64, 16, 0)

/* Bytes of LDS of a block: keys, values, and queries that are not held. */
#define MATRIX_SHARED(width, rows, keys, held) (2 * (width) * (2 * (keys) + ((held) ? 0 : (rows))))

#endif
