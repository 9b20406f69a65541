/* SPDX-License-Identifier: Apache-2.0 */
/* What the forward kernels on matrix units and matrix.c, which plans them, must agree on. */
#ifndef FATTN_HIP_MATRIX_H
#define FATTN_HIP_MATRIX_H

/*
 * The shapes of forward: X(width, rows, keys, held). width: the padded channels. held: whether a
 * wave's registers hold its queries. A wave has 32 rows on MFMA and 16 on WMMA, so that a block has
 * two threads per row. The number of keys is such that each thread stages one block of values
 * (matrix_transposed_fill). Keys and values take 32 KiB, so that two blocks fit if LDS, AMD's
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

/* Bytes of LDS of a block: keys, values, and queries unless registers hold them. */
#define MATRIX_SHARED(width, rows, keys, held) (2 * (width) * (2 * (keys) + ((held) ? 0 : (rows))))

#endif
