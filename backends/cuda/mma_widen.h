/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What forward of k and v in e4m3 (mma_widen.cuh) and mma.c, which plans it, must agree on; and
 * where its threads read and write what they widen, which a test on the host reads too
 * (tests/check_widen.c).
 */
#ifndef FATTN_CUDA_MMA_WIDEN_H
#define FATTN_CUDA_MMA_WIDEN_H

#include "backends/cuda/mma.h"
#include "core/host_device.h"

/*
 * The shapes that are compiled, for queries of both types: X(run, its features of pairs, width,
 * rows, keys, tiles, warps, blocks), as in mma.h. Tiles of 64 rows are for heads that have no more
 * and for GPUs with 99 KiB of shared memory, which the smallest shape of each width fits. At 256
 * channels, 128 rows leave room for one block. Kernels for every feature have 64 rows alone: with
 * 32 a warp, there are no registers for the features.
 */
#define MMA_WIDEN_SHAPES(X)                     \
    X(e4m3, 0, 64, 128, 128, 2, 4, 2)           \
    X(e4m3, 0, 64, 64, 128, 1, 4, 2)            \
    X(e4m3, 0, 128, 128, 64, 2, 4, 2)           \
    X(e4m3, 0, 128, 64, 64, 1, 4, 2)            \
    X(e4m3, 0, 256, 128, 64, 1, 8, 1)           \
    X(e4m3, 0, 256, 64, 32, 1, 4, 2)            \
    X(e4m3_full, MMA_ANY, 64, 64, 128, 1, 4, 2) \
    X(e4m3_full, MMA_ANY, 128, 64, 64, 1, 4, 2) \
    X(e4m3_full, MMA_ANY, 256, 64, 32, 1, 4, 2)

/* Shared memory of a block in bytes: a tile of queries, one of keys and one of values in 16 bits,
 * both also in 8 bits, a factor and the terms that features have for each row, and the item. */
#define MMA_WIDEN_SHARED(features, width, rows, keys) \
    (2 * (width) * ((rows) + 3 * (keys)) + (4 + MMA_TERM_BYTES(features, keys)) * (rows) + 512)

/*
 * A tile of keys or values as copies bring it: chunk n of thread t, 16 bytes at n * threads + t of
 * the stage, is chunk t % chunks of row t / chunks + n * keys / 4 of the tile, of width / 16 chunks
 * a row. Four steps of a quarter of the keys make a tile. A half of 8 bytes becomes a chunk of 16
 * bytes, which lies where the products read it: see mma_key_place() in mma_terms.cuh.
 *
 * Which half thread t widens first. A store of 16 bytes is made for eight threads at a time. They
 * have even chunks, or odd ones, of one row, of which those eight apart have the same banks. So
 * four threads begin with odd ones. (Threads with rows of 64 channels have two rows, whose swizzle
 * does this.) A load of 8 bytes is made for 16 threads, of which those eight apart have the same
 * banks, if both begin with the same half.
 */
FATTN_HD int mma_widen_turn(int width, int t) { return (t / 8 ^ (width > 64 ? t / 4 : 0)) & 1; }

/* Where it finds half `half`, in its own order, of chunk n: bytes from the begin of the stage. */
FATTN_HD int mma_widen_from(int width, int threads, int t, int n, int half)
{
    return 16 * (n * threads + t) + 8 * (half ^ mma_widen_turn(width, t));
}

/* Where it writes that, widened: bytes from the begin of the tile. */
FATTN_HD int mma_widen_to(int width, int keys, int t, int n, int half)
{
    const int chunks = width / 16, row = t / chunks, swizzle = 2 * n + row % 2;
    const int chunk = 2 * (t % chunks) ^ mma_widen_turn(width, t) ^ half;
    return 2 * width * (row + n * keys / 4) + 16 * (chunk ^ swizzle);
}

#endif
