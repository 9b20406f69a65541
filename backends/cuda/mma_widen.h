/* SPDX-License-Identifier: Apache-2.0 */
/* What forward of k and v in e4m3 (mma_widen.cuh) and mma.c, which plans it, must agree on. */
#ifndef FATTN_CUDA_MMA_WIDEN_H
#define FATTN_CUDA_MMA_WIDEN_H

#include "backends/cuda/mma.h"

/*
 * The shapes that are compiled, for queries of both types: X(run, its features of pairs, width,
 * rows, keys, tiles, warps, blocks), as in mma.h. The widest tiles of 128 rows are widened half as
 * often as those of 64, but leave room for one block. The smallest shape of each width fits the
 * 99 KiB of a consumer GPU. The kernels for every feature have that alone.
 */
#define MMA_WIDEN_SHAPES(X)                      \
    X(e4m3, 0, 64, 128, 128, 2, 4, 2)            \
    X(e4m3, 0, 128, 128, 64, 2, 4, 2)            \
    X(e4m3, 0, 128, 64, 64, 1, 4, 2)             \
    X(e4m3, 0, 256, 128, 64, 1, 8, 1)            \
    X(e4m3, 0, 256, 64, 32, 1, 4, 2)             \
    X(e4m3_full, MMA_ANY, 64, 128, 128, 2, 4, 2) \
    X(e4m3_full, MMA_ANY, 128, 64, 64, 1, 4, 2)  \
    X(e4m3_full, MMA_ANY, 256, 64, 32, 1, 4, 2)

/* Shared memory of a block in bytes: a tile of queries, one of keys and one of values in 16 bits,
 * both also in 8 bits, a factor and the terms that features have for each row, and the item. */
#define MMA_WIDEN_SHARED(features, width, rows, keys) \
    (2 * (width) * ((rows) + 3 * (keys)) + (4 + MMA_TERM_BYTES(features, keys)) * (rows) + 512)

#endif
