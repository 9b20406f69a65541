/* SPDX-License-Identifier: Apache-2.0 */
/* What the mma.sync kernels and mma.c, which plans them, must agree on. */
#ifndef FATTN_CUDA_MMA_H
#define FATTN_CUDA_MMA_H

#include <stdbool.h>
#include <stdint.h>

#include "core/host_device.h"
#include "core/kernel.h"

/*
 * Features of pairs are those that concern single pairs of query and key. A full kernel is compiled
 * once for any combination of them, and once for each feature alone, so that no branches on
 * features interrupt its products: Y(name, its features of pairs, ...).
 */
#define MMA_OF_PAIRS \
    (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK | FATTN_ALIBI | FATTN_SOFTCAP | FATTN_DROPOUT)
#define MMA_ANY UINT64_MAX
#define MMA_RUNS(Y, ...) Y(full, MMA_ANY, __VA_ARGS__) MMA_RUNS_OF_ONE(Y, __VA_ARGS__)
#define MMA_RUNS_OF_ONE(Y, ...)      \
    Y(bias, FATTN_BIAS, __VA_ARGS__) \
    MMA_RUNS_BUT_BIAS(Y, __VA_ARGS__)
#define MMA_RUNS_BUT_BIAS(Y, ...)          \
    Y(mask, FATTN_MASK, __VA_ARGS__)       \
    Y(alibi, FATTN_ALIBI, __VA_ARGS__)     \
    Y(softcap, FATTN_SOFTCAP, __VA_ARGS__) \
    Y(dropout, FATTN_DROPOUT, __VA_ARGS__)

/* Which features a kernel has. */
enum mma_variant {
    MMA_LEAN,         /* causal masks, windows and lengths; forward also pages */
    MMA_ORDERED,      /* backward alone: the same, adding to dQ in a fixed order */
    MMA_ONE_OF_PAIRS, /* MMA_LEAN, and one feature of MMA_OF_PAIRS */
    MMA_EVERYTHING
};

/*
 * The shapes that are compiled: X(run, its features of pairs, width, rows, keys, stages, tiles,
 * warps, blocks). width: the padded channels. rows = 16 * tiles * warps. stages: tiles of keys, and
 * of values, in shared memory. tiles: the 16-row tiles that a warp owns. blocks: how many should
 * fit a multiprocessor. A warp with 32 rows reads keys and values from shared memory half as often
 * as two with 16, but its accumulators leave no registers to spare. At 256 channels they would not
 * fit; there two blocks of one stage, of which one computes while the other starts or ends, beat
 * one block of two. docs/notes/cuda.md has the measurements. The smallest shape of each width fits
 * the 99 KiB of a consumer GPU, which 128 rows of bias for 128 keys would not.
 */
#define MMA_SHAPES(X)                              \
    X(lean, 0, 64, 128, 128, 2, 2, 4, 2)           \
    X(lean, 0, 128, 128, 64, 2, 2, 4, 2)           \
    X(lean, 0, 128, 64, 64, 2, 1, 4, 2)            \
    X(lean, 0, 256, 64, 64, 1, 1, 4, 2)            \
    X(full, MMA_ANY, 64, 128, 128, 2, 2, 4, 2)     \
    MMA_RUNS_BUT_BIAS(X, 64, 128, 128, 2, 2, 4, 2) \
    MMA_RUNS(X, 128, 128, 64, 2, 2, 4, 2)          \
    MMA_RUNS(X, 128, 64, 64, 2, 1, 4, 2)           \
    X(full, MMA_ANY, 256, 128, 64, 2, 1, 8, 1)     \
    X(full, MMA_ANY, 256, 32, 32, 2, 1, 2, 1)

/* Shared memory of a block in bytes: a tile of queries, `stages` tiles of keys and of values, with
 * `width` elements a row, the terms that features have for each row, and the item. */
#define MMA_SHARED(features, width, rows, keys, stages) \
    (2 * (width) * ((rows) + 2 * (stages) * (keys)) + MMA_TERM_BYTES(features, keys) * (rows) + 512)
/* Which forward kernels skip tiles of keys that a bias or a mask hides. (Skipping made the one of
 * 64 channels for every feature slower by 8 %, whatever the features.) */
#define MMA_SKIPS(features, width)                           \
    ((features) == FATTN_BIAS || (features) == FATTN_MASK || \
     ((features) == MMA_ANY && (width) > 64))
#define MMA_KEPT_WORDS 32 /* words with a bit for each tile; if there are more, none is skipped */
#define MMA_TERM_BYTES(features, keys)        \
    ((features) == MMA_ANY       ? 24         \
     : (features) == FATTN_BIAS  ? 2 * (keys) \
     : (features) == FATTN_MASK  ? (keys)     \
     : (features) == FATTN_ALIBI ? 8          \
                                 : 0)

/*
 * Forward of f32: X(run, its features of pairs, width, rows, keys, tiles, warps, blocks). A tile in
 * shared memory has three planes. The smallest shape of each width fits 99 KiB, as above.
 */
#define BF16X3_SHAPES(X)                    \
    X(forward, 0, 64, 128, 64, 2, 4, 2)     \
    X(forward, 0, 64, 64, 64, 1, 4, 3)      \
    X(forward, 0, 128, 128, 64, 1, 8, 1)    \
    X(forward, 0, 128, 64, 32, 1, 4, 2)     \
    X(full, MMA_ANY, 64, 128, 64, 2, 4, 2)  \
    X(full, MMA_ANY, 64, 64, 64, 1, 4, 2)   \
    X(full, MMA_ANY, 128, 128, 64, 1, 8, 1) \
    X(full, MMA_ANY, 128, 64, 32, 1, 4, 2)

/* A tile of queries, one of keys and one of values, in three planes each; the rest as above. */
#define BF16X3_SHARED(features, width, rows, keys) \
    (6 * (width) * ((rows) + 2 * (keys)) + (4 + MMA_TERM_BYTES(features, keys)) * (rows) + 512)

/*
 * Decoding: X(width, keys, warps, stages). A block takes at most 16 rows and a part of their keys.
 * Each warp has a ring of `stages` tiles of keys and values, of which all but one may be in flight.
 * Two blocks fill a multiprocessor. The smallest shape of each width fits the 99 KiB of a consumer
 * GPU.
 */
#define MMA_DECODE_ROWS 16
#define MMA_DECODE_SHAPES(X) \
    X(64, 16, 4, 5)          \
    X(128, 16, 4, 3)         \
    X(128, 32, 2, 2)         \
    X(256, 16, 2, 3)         \
    X(256, 32, 1, 2)

/* Shared memory of a block in bytes: queries, `keys` keys and as many values of `size` bytes an
 * element, and the item. */
#define MMA_DECODE_SHARED(width, size, keys) \
    (2 * (width) * (MMA_DECODE_ROWS + (size) * (keys)) + 2560)

/*
 * Batches whose sequences differ in their number of keys are cut by all lengths (mma_cut.cuh).
 * MMA_CUT_SIZES sizes of parts are tried: whole sequences, and sizes of which each block that runs
 * at a time gets 2^(k / MMA_CUT_STEPS) parts on average, for k from MMA_CUT_FIRST on. So these are
 * at most 2 * MMA_CUT_ROUNDS parts for each such block. What the beginning and the end of an item
 * cost is given in bytes of keys and values: more if a multiprocessor has one block (WIDE), as then
 * nothing else is read meanwhile. Both were fitted to runs on an H200 (docs/notes/cuda.md).
 */
#define MMA_CUT_MOST 512 /* sequences */
#define MMA_CUT_ROUNDS 4
#define MMA_CUT_SIZES 16
#define MMA_CUT_STEPS 5
#define MMA_CUT_FIRST (-2)
#define MMA_CUT_ITEM 23040
#define MMA_CUT_ITEM_WIDE 204800
#define MMA_CUT_KEYS 256 /* of a part at least */

/* Whether a run cuts its keys so. */
FATTN_HD bool fattn_cuda_cuts(const fattn_tiling *t) { return t->pieces > 0 && t->splits > 1; }

/* Shapes for runs with no more blocks than multiprocessors. A block then has a multiprocessor to
 * itself, and more keys in flight. Multiprocessors with 164 KiB of shared memory have room for the
 * second shape of 128 channels alone, and take the shapes above with 64 and 256 channels. */
#define MMA_DECODE_WIDE_SHAPES(X) \
    X(64, 32, 8, 3)               \
    X(128, 16, 8, 3)              \
    X(128, 32, 2, 4)              \
    X(256, 16, 4, 3)

/*
 * The same for k and v in e4m3: tiles of as many bytes, and so of twice the keys. A warp takes
 * longer for a tile, because it converts it, so the wide shapes of 64 and 256 channels have twice
 * the warps. The kernels for every feature have the smallest shape of each width alone.
 */
#define MMA_DECODE_E4M3_SHAPES(X) \
    X(64, 32, 4, 5)               \
    X(128, 32, 4, 3)              \
    X(128, 16, 4, 5)              \
    X(256, 32, 2, 3)              \
    X(256, 16, 2, 5)
#define MMA_DECODE_E4M3_WIDE_SHAPES(X) \
    X(64, 32, 8, 4)                    \
    X(128, 32, 8, 3)                   \
    X(256, 32, 4, 3)
#define MMA_DECODE_E4M3_FULL_SHAPES(X) \
    X(64, 32, 4, 5)                    \
    X(128, 16, 4, 5)                   \
    X(256, 16, 2, 5)

/* Backward: X(width, queries, keys), with eight warps. */
#define MMA_BACKWARD_THREADS 256
#define MMA_BACKWARD_SHAPES(X) \
    X(64, 128, 128)            \
    X(128, 64, 128)            \
    X(256, 64, 64)

/* Shared memory of a block in bytes: keys and values, two tiles of queries and of dO, P, dS, lse
 * and delta, and the job. */
#define MMA_BACKWARD_SHARED(width, queries, keys) \
    (4 * (width) * ((keys) + 2 * (queries)) + 4 * (queries) * (keys) + 16 * (queries) + 1024)
#define MMA_JOB_BYTES 288 /* of a description of an item of backward, in the workspace */

/*
 * Backward of f32, in three planes: X(width, queries, keys, warps, and the tiles of 16 rows that a
 * warp has of S^T, of dK and dV, and of dQ). Shared memory holds keys and values, two tiles of
 * queries and of dO, P, dS, three floats for each query, and the job.
 */
#define BF16X3_BACKWARD_SHAPES(X) \
    X(64, 32, 128, 8, 2, 2, 1)    \
    X(128, 32, 64, 8, 1, 2, 2)    \
    X(64, 32, 32, 4, 1, 1, 1)     \
    X(128, 32, 32, 4, 1, 1, 1)
#define BF16X3_ROWS_THREADS 128 /* of the kernel before it: two threads a row */
#define BF16X3_BACKWARD_SHARED(width, queries, keys) \
    (12 * (width) * ((keys) + 2 * (queries)) + 12 * (queries) * (keys) + 24 * (queries) + 512)

#endif
