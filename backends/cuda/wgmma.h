/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the rows of Hopper's kernels, which plan them, and the kernels must agree on, and how
 * Hopper's matrix units lay out their operands. Plain C, so that a test on the host can check the
 * layouts.
 */
#ifndef FATTN_CUDA_WGMMA_H
#define FATTN_CUDA_WGMMA_H

#include <stdbool.h>
#include <stdint.h>

#include "backends/cuda/mma.h"
#include "backends/cuda/seen.h"
#include "core/host_device.h"
#include "fattn/fattn.h"

/*
 * The shapes that are compiled: X(name, width, width_v, warpgroups, keys, stages), with width and
 * width_v the padded channels of queries and keys and of values, 64 rows a warpgroup, and stages of
 * keys, and of values, in shared memory. docs/notes/hopper-forward.md has the measurements.
 */
#define WGMMA_SHAPES(X)             \
    X(64, 64, 64, 3, 128, 3)        \
    X(96, 96, 96, 3, 96, 2)         \
    X(128, 128, 128, 2, 128, 2)     \
    X(192_128, 192, 128, 2, 128, 2) \
    X(192, 192, 192, 2, 112, 2)     \
    X(256, 256, 256, 2, 64, 2)

/* Of few rows and many keys, which cut keys into parts: the same. Memory bounds them, so that what
 * counts is how much of a copy is under way. */
#define WGMMA_SPLIT_SHAPES(X)         \
    X(split_64, 64, 64, 2, 128, 4)    \
    X(split_128, 128, 128, 2, 128, 2) \
    X(split_256, 256, 256, 2, 64, 2)
#define WGMMA_SPLIT_ROWS 128

/* Of short sequences, whose items do little besides starting and ending: the same, with one
 * warpgroup, so that a multiprocessor has several blocks at a time. */
#define WGMMA_SHORT_SHAPES(X)     \
    X(short_64, 64, 64, 1, 64, 3) \
    X(short_128, 128, 128, 1, 64, 2)
#define WGMMA_SHORT_BLOCKS(width) ((width) == 64 ? 3 : 2)
#define WGMMA_RESIDENT(width, warpgroups) ((warpgroups) == 1 ? WGMMA_SHORT_BLOCKS(width) : 1)

/* A warpgroup that copies and plans, and those that multiply. */
#define WGMMA_THREADS(warpgroups) (128 * ((warpgroups) + 1))

/* Bytes of shared memory: a tile of queries, `stages` of keys and of values, rows of o on their way
 * out, the barriers and the items (wgmma_control), and what aligns the tiles. */
#define WGMMA_SHARED(width, width_v, warpgroups, keys, stages)              \
    (128 * (WGMMA_PANELS(width) * (64 * (warpgroups) + (stages) * (keys)) + \
            WGMMA_PANELS(width_v) * (stages) * (keys)) +                    \
     4 * (warpgroups)*WGMMA_OUT_BYTES + WGMMA_CONTROL + WGMMA_ALIGN)
#define WGMMA_PANELS(width) (((width) + 63) / 64) /* of a tile; see wgmma_offset() */
#define WGMMA_OUT_BYTES 1024                      /* a warp's: 64 channels of 8 rows */
#define WGMMA_CONTROL 1152
#define WGMMA_SPLIT_CONTROL 64 /* what a part of an item's keys is */
#define WGMMA_ALIGN 1024       /* where a pattern of swizzled rows begins */

/*
 * Kernels for features of pairs, for the same runs as in mma.h:
 * X(run, its features of pairs, width, warpgroups, keys, stages, stages of a bias or mask that is
 * alone). A block mask is taken alone. Runs of one warpgroup are for short sequences.
 */
#define WGMMA_FULL_64(X)                        \
    X(full, MMA_ANY, 64, 2, 128, 2, 0)          \
    X(bias, FATTN_BIAS, 64, 3, 128, 2, 4)       \
    X(mask, FATTN_MASK, 64, 3, 128, 2, 3)       \
    X(alibi, FATTN_ALIBI, 64, 2, 128, 2, 0)     \
    X(softcap, FATTN_SOFTCAP, 64, 2, 128, 2, 0) \
    X(dropout, FATTN_DROPOUT, 64, 3, 128, 2, 0) \
    X(short_bias, FATTN_BIAS, 64, 1, 64, 3, 1)  \
    X(short_mask, FATTN_MASK, 64, 1, 64, 3, 1)  \
    X(blocks, FATTN_BLOCK_MASK, 64, 2, 128, 2, 0)
#define WGMMA_FULL_128(X)                        \
    X(full, MMA_ANY, 128, 2, 128, 2, 0)          \
    X(bias, FATTN_BIAS, 128, 2, 128, 2, 3)       \
    X(mask, FATTN_MASK, 128, 2, 128, 2, 3)       \
    X(alibi, FATTN_ALIBI, 128, 2, 128, 2, 0)     \
    X(softcap, FATTN_SOFTCAP, 128, 2, 128, 2, 0) \
    X(dropout, FATTN_DROPOUT, 128, 2, 128, 2, 0) \
    X(short_bias, FATTN_BIAS, 128, 1, 64, 2, 2)  \
    X(short_mask, FATTN_MASK, 128, 1, 64, 2, 2)  \
    X(blocks, FATTN_BLOCK_MASK, 128, 2, 128, 2, 0)
#define WGMMA_FULL_256(X)                       \
    X(full, MMA_ANY, 256, 2, 64, 2, 0)          \
    X(bias, FATTN_BIAS, 256, 2, 64, 2, 1)       \
    X(mask, FATTN_MASK, 256, 2, 64, 2, 1)       \
    X(alibi, FATTN_ALIBI, 256, 2, 64, 2, 0)     \
    X(softcap, FATTN_SOFTCAP, 256, 2, 64, 2, 0) \
    X(dropout, FATTN_DROPOUT, 256, 2, 64, 2, 0) \
    X(blocks, FATTN_BLOCK_MASK, 256, 2, 64, 2, 0)

/* Bytes of shared memory of a staged panel, 128 bytes of each row, and of the control beside it. */
#define WGMMA_TERM_PANEL(features, rows) \
    ((features) == FATTN_BIAS || (features) == FATTN_MASK ? 128 * (rows) : 0)
#define WGMMA_TERM_CONTROL(features, rows)            \
    ((features) == 0             ? 0                  \
     : (features) == MMA_ANY     ? 1536 + 24 * (rows) \
     : (features) == FATTN_ALIBI ? 1536 + 8 * (rows)  \
                                 : 1536)
#define WGMMA_FULL_SHARED(features, width, warpgroups, keys, stages, term_stages) \
    (WGMMA_SHARED(width, width, warpgroups, keys, stages) +                       \
     (term_stages)*WGMMA_TERM_PANEL(features, 64 * (warpgroups)) +                \
     WGMMA_TERM_CONTROL(features, 64 * (warpgroups)))

/* Of the kernel before it that looks at a block mask, as seen.h has it. A lane has a tile. */
#define WGMMA_BLOCK_THREADS 128

/* Whether a bias or a mask is looked at. */
FATTN_HD bool wgmma_looks(int64_t items, int rows, int64_t keys)
{
    return seen_pays(items, rows == 64 ? 256 : SEEN_FEW, keys);
}

/* Keys that one copy brings of a page: powers of two that divide the page and the tile. */
#define WGMMA_PIECE(page, keys) \
    (((page) & -(page)) < ((keys) & -(keys)) ? (page) & -(page) : (keys) & -(keys))
#define WGMMA_PIECE_LEAST 8 /* as the pattern of swizzled rows has */

/* Bytes of workspace: the counter that blocks take their items from where these have unlike numbers
 * of keys, by lengths or by a band. */
#define WGMMA_WORKSPACE 256

/*
 * Sequences in the order in which their items are taken, in the workspace: those of most keys
 * first, or in backward of most queries, so that what is left at the end is small. A sequence has
 * as many items as it has rows, or keys, for. A kernel before makes the list, which takes some 3
 * microseconds: runs of few items do without, and packed batches whose lengths can hardly differ,
 * because they have nearly as many rows and keys as the longest allows.
 */
typedef struct wgmma_listed {
    uint32_t first, past;     /* items */
    int32_t sequence, blocks; /* items of a head */
} wgmma_listed;
#define WGMMA_ORDERED_MOST 512  /* sequences; a thread has one */
#define WGMMA_ORDERED_ITEMS 512 /* or fewer: no list */

FATTN_HD bool wgmma_orders(const fattn_problem *p, int64_t items)
{
    const int64_t most_q = p->batch * p->seqlen_q, most_k = p->batch * p->seqlen_k;
    const bool differ = p->features & (FATTN_SEQUSED_Q | FATTN_SEQUSED_K) ||
                        (p->features & FATTN_CU_SEQLENS_Q && p->total_q < most_q - most_q / 8) ||
                        (p->features & FATTN_CU_SEQLENS_K && p->total_k < most_k - most_k / 8);
    return differ && !(p->features & (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK)) &&
           p->batch > 1 && p->batch <= WGMMA_ORDERED_MOST && items > WGMMA_ORDERED_ITEMS;
}

/*
 * Of backward: X(name, width, queries, keys, stages), with the tile, and stages of its queries in
 * shared memory. Two warpgroups have 64 of 128 keys each. docs/notes/hopper-backward.md has the
 * reasons and the measurements.
 */
#define WGMMA_BACKWARD_SHAPES(X) \
    X(short_64, 64, 64, 128, 3)  \
    X(64, 64, 128, 128, 3)       \
    X(128, 128, 64, 128, 3)

/* And those of which two blocks share an item: each has half of its keys, of which a warpgroup has
 * half of the channels. Deterministic runs have a kernel of their own: tests for their turns slow
 * others down by 2 to 4 %. */
#define WGMMA_BACKWARD_PAIRS(X) X(256, 256, 64, 128, 2)
#define WGMMA_BACKWARD_BLOCKS(width) ((width) == 256 ? 2 : 1)

/* Bytes of shared memory: keys and values, queries and two tiles of dO, two of dS, one of dQ in
 * floats, lse and delta of each row, the barriers and the item. */
#define WGMMA_BACKWARD_ALONE_SHARED(width, queries, keys, stages)                           \
    (2 * (width) * (2 * (keys) + (2 + (stages)) * (queries)) + 2 * 2 * (queries) * (keys) + \
     4 * (width) * (queries) + 4 * (2 + (stages)) * (queries))

/* Where two blocks share an item: half of its keys and values, and half of the other block's keys,
 * queries and a tile of dO, two of dS, two of the other block's and two of P. */
#define WGMMA_BACKWARD_PAIR_SHARED(width, queries, keys, stages)                                 \
    (2 * (width) * ((keys) + (keys) / 4 + (1 + (stages)) * (queries)) + 6 * (queries) * (keys) + \
     4 * (1 + (stages)) * (queries))

#define WGMMA_BACKWARD_SHARED(width, queries, keys, stages)              \
    ((WGMMA_BACKWARD_BLOCKS(width) > 1                                   \
          ? WGMMA_BACKWARD_PAIR_SHARED(width, queries, keys, stages)     \
          : WGMMA_BACKWARD_ALONE_SHARED(width, queries, keys, stages)) + \
     WGMMA_BACKWARD_CONTROL + WGMMA_ALIGN)
#define WGMMA_BACKWARD_CONTROL 640
#define WGMMA_VISITS 8 /* at least two more than stages, and a power of two */

/*
 * And for features of pairs: X(run, its features of pairs, whether it may want dBias, width,
 * queries, keys, stages, stages of a bias or mask that is alone). Scores with terms need registers,
 * so that a tile of 64 channels has half of the queries that it has without. Beside 256 channels
 * shared memory has no room for a tile of a bias or mask.
 */
#define WGMMA_BACKWARD_FULL(X, width, keys, stages, term_stages)     \
    X(full, MMA_ANY, true, width, 64, keys, stages, 0)               \
    X(bias, FATTN_BIAS, false, width, 64, keys, stages, term_stages) \
    X(dbias, FATTN_BIAS, true, width, 64, keys, stages, term_stages) \
    X(mask, FATTN_MASK, false, width, 64, keys, stages, term_stages) \
    X(alibi, FATTN_ALIBI, false, width, 64, keys, stages, 0)         \
    X(softcap, FATTN_SOFTCAP, false, width, 64, keys, stages, 0)     \
    X(dropout, FATTN_DROPOUT, false, width, 64, keys, stages, 0)     \
    X(blocks, FATTN_BLOCK_MASK, false, width, 64, keys, stages, 0)
#define WGMMA_BACKWARD_FULL_64(X) WGMMA_BACKWARD_FULL(X, 64, 128, 3, 1)
#define WGMMA_BACKWARD_FULL_128(X) WGMMA_BACKWARD_FULL(X, 128, 128, 3, 1)
#define WGMMA_BACKWARD_FULL_256(X) WGMMA_BACKWARD_FULL(X, 256, 128, 2, 0)
/* Bytes of a staged tile. */
#define WGMMA_TERM_TILE(features, queries, keys)         \
    ((features) == FATTN_BIAS   ? 2 * (queries) * (keys) \
     : (features) == FATTN_MASK ? (queries) * (keys)     \
                                : 0)
#define WGMMA_BACKWARD_FULL_SHARED(features, width, queries, keys, stages, term_stages) \
    (WGMMA_BACKWARD_SHARED(width, queries, keys, stages) +                              \
     (term_stages)*WGMMA_TERM_TILE(features, queries, keys))

/* Threads of a block of the kernels before and after it. */
#define WGMMA_ROWS_THREADS 128
#define WGMMA_SINK_THREADS 256

/* Tiles that the queries of a head take in the workspace. Packed sequences begin with a tile of
 * their own, and each may leave one of which the next has a part. */
#define WGMMA_BACKWARD_TILES(packed, total, batch, queries) \
    ((packed) ? (total) / (queries) + (batch) : ((total) + (queries)-1) / (queries))

/* Whether the kernels before and after visit the rows of a packed batch as they lie in the
 * workspace, `of_head` of each head, and not `rows` of each sequence. */
FATTN_HD bool wgmma_visits_packed(const fattn_problem *p, int64_t of_head, int64_t rows)
{
    return p->features & FATTN_CU_SEQLENS_Q && of_head < p->batch * rows;
}

#define WGMMA_BACKWARD_ITEM_BYTES 128 /* of what an item is, in the workspace */
#define WGMMA_BACKWARD_TURNS(tiles) (((tiles) + 3) / 4 * 4) /* words there for their turns */
#define WGMMA_BACKWARD_TAKEN 4 /* words there for the counter of items */
#define WGMMA_BACKWARD_WORDS(q_blocks) (((q_blocks) + 31) / 32) /* of bits of an item's tiles */

/*
 * Whether an item of backward leaves out tiles of queries that a block mask, a bias or a mask hides
 * from all of its keys. Ordered items wait for their turns at every tile, and dBias is stored tile
 * by tile: these leave none out.
 */
#define WGMMA_HIDES (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK)
FATTN_HD bool wgmma_skips(const fattn_problem *p)
{
    return p->features & WGMMA_HIDES && !(p->features & FATTN_DETERMINISTIC) &&
           !(p->outputs & FATTN_OUT_DBIAS);
}

/* Whether each head has one tile of keys, of which every query sees some. */
FATTN_HD bool wgmma_has_one_tile(const fattn_problem *p, int64_t k_blocks)
{
    const uint64_t unlike = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q |
                            FATTN_SEQUSED_K | FATTN_POSITIONS | WGMMA_HIDES;
    const bool seen =
        p->window_right < 0 || p->anchor == FATTN_TOP_LEFT || p->seqlen_q <= p->seqlen_k;
    return k_blocks == 1 && p->window_left < 0 && seen && !(p->features & unlike);
}

/* Whether a kernel before looks for such tiles. */
FATTN_HD bool wgmma_backward_looks(const fattn_problem *p, int64_t q_blocks, int64_t k_blocks)
{
    enum { FEW = 16 }; /* tiles, of which it would hardly save one */
    const bool pays = q_blocks * k_blocks > FEW &&
                      p->batch * p->heads_k * q_blocks * SEEN_BYTES(k_blocks) < INT64_C(1) << 31;
    return wgmma_skips(p) && (pays || p->features & FATTN_BLOCK_MASK);
}

/*
 * Sums of dQ are floats in the workspace, tile by tile. In a tile 64 channels of all rows follow
 * one another, 256 bytes a row, and chunk c of 32 bytes of row r lies at c ^ (r / 2 % 4): then a
 * warp, whose lanes hold 8 channels of every other row of 8, writes to 32 banks of shared memory at
 * once.
 * Offset in floats of channel c of row r in a tile of `rows`:
 */
FATTN_HD uint32_t wgmma_sum_offset(uint32_t rows, uint32_t r, uint32_t c)
{
    const uint32_t chunk = c % 64 / 8;
    return c / 64 * rows * 64 + r * 64 + (chunk ^ (r / 2 % 4)) * 8 + c % 8;
}

/* The same where threads of a warpgroup add their own sums, four at a time: element 4 k + e of a
 * product of 64 channels by the rows, of thread t, lies at (128 k + t) * 4 + e. */
FATTN_HD uint32_t wgmma_own_sum_offset(uint32_t rows, uint32_t r, uint32_t c)
{
    const uint32_t t = c % 64 / 16 * 32 + c % 8 * 4 + r % 8 / 2;
    return c / 64 * rows * 64 + (r / 8 * 128 + t) * 4 + c % 16 / 8 * 2 + r % 2;
}

/*
 * A tile in shared memory is cut into panels of 64 channels. A panel has a row of 128 bytes for
 * each row of the tile, and chunk c of 16 bytes of row r lies at c ^ (r % 8): the swizzle of 128
 * bytes, which copies write and products read. The last panel may be wider than what products read
 * of it: of 96 channels it has 32, and zeros behind them, which cost nothing but their place.
 * Offset of channel c of row r in a tile of `rows`:
 */
FATTN_HD uint32_t wgmma_offset(uint32_t rows, uint32_t r, uint32_t c)
{
    const uint32_t chunk = c % 64 / 8;
    return c / 64 * rows * 128 + r * 128 + ((chunk ^ (r % 8)) << 4) + c % 8 * 2;
}

/*
 * Descriptor of an operand in such a tile that begins at address `at` of shared memory: eight rows
 * are 1024 bytes, and where the channels are summed over no other distance counts. Where the rows
 * are summed over, `panel` bytes lie between a panel and the next. 16 channels further it is
 * WGMMA_CHANNELS more, until a panel ends; 16 rows further, WGMMA_ROWS.
 */
FATTN_HD uint64_t wgmma_descriptor(uint32_t at, uint32_t panel)
{
    const uint64_t swizzled = UINT64_C(1) << 62, eight_rows = (uint64_t)(1024 >> 4) << 32;
    return swizzled | eight_rows | (uint64_t)(panel >> 4) << 16 | (at & 0x3ffff) >> 4;
}
#define WGMMA_CHANNELS (32 >> 4)
#define WGMMA_ROWS (2048 >> 4)

/* Element n of a product's 64 rows that thread t of a warpgroup holds: its row and its column. As
 * pairs of 16 bits, elements 8 s .. 8 s + 7 are the thread's part of columns 16 s .. 16 s + 15 as
 * the first operand of another product. */
FATTN_HD int wgmma_row(int t, int n) { return t / 32 * 16 + t % 32 / 4 + n % 4 / 2 * 8; }

FATTN_HD int wgmma_column(int t, int n) { return n / 4 * 8 + t % 4 * 2 + n % 2; }

#endif
