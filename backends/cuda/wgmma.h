/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What Hopper's kernels and the rows that plan them must agree on, and how the operands of Hopper's
 * warpgroup products (wgmma) are laid out. Plain C, so that a test on the host can check the
 * layouts.
 */
#ifndef FATTN_CUDA_WGMMA_H
#define FATTN_CUDA_WGMMA_H

#include "backends/cuda/mma.h"
#include "backends/cuda/scan.h"
#include "fattn/fattn.h"

/*
 * The shapes that are compiled: X(name, width, width_v, warpgroups, keys, stages). width: the
 * padded channels of queries and keys; width_v: those of values. A warpgroup has 64 rows. stages:
 * pipeline stages of keys, and of values. docs/notes/hopper-forward.md has the measurements.
 */
#define WGMMA_SHAPES(X)             \
    X(64, 64, 64, 3, 128, 3)        \
    X(96, 96, 96, 3, 96, 2)         \
    X(128, 128, 128, 2, 128, 2)     \
    X(192_128, 192, 128, 2, 128, 2) \
    X(192, 192, 192, 2, 112, 2)     \
    X(256, 256, 256, 2, 64, 2)

/* The same for few rows and many keys: these kernels split the keys. They are bound by memory, so
 * that the number of bytes in flight decides their speed. */
#define WGMMA_SPLIT_SHAPES(X)         \
    X(split_64, 64, 64, 2, 128, 4)    \
    X(split_128, 128, 128, 2, 128, 2) \
    X(split_256, 256, 256, 2, 64, 2)
#define WGMMA_SPLIT_ROWS 128

/* The same for short sequences, whose items take most of their time for prologue and epilogue. They
 * have one warpgroup, so that a multiprocessor holds several blocks. */
#define WGMMA_SHORT_SHAPES(X)     \
    X(short_64, 64, 64, 1, 64, 3) \
    X(short_128, 128, 128, 1, 64, 2)
#define WGMMA_SHORT_BLOCKS(width) ((width) == 64 ? 3 : 2)
#define WGMMA_RESIDENT(width, warpgroups) ((warpgroups) == 1 ? WGMMA_SHORT_BLOCKS(width) : 1)

/* The same for keys and values in e4m3 (wgmma_widen.cuh): X(name, width, width_v, warpgroups, keys,
 * stages, stored). stored: pipeline stages of panels of stored bytes, 128 of each key. */
#define WGMMA_E4M3_SHAPES(X)            \
    X(e4m3_64, 64, 64, 3, 128, 2, 4)    \
    X(e4m3_128, 128, 128, 2, 128, 2, 3) \
    X(e4m3_256, 256, 256, 2, 64, 2, 3)
#define WGMMA_E4M3_SPLIT_SHAPES(X)            \
    X(e4m3_split_64, 64, 64, 2, 128, 2, 4)    \
    X(e4m3_split_128, 128, 128, 2, 128, 2, 3) \
    X(e4m3_split_256, 256, 256, 2, 64, 2, 3)

/* The same for more than 256 channels, with two warpgroups that share 64 rows (wgmma_halves.cuh):
 * X(name, width, width_v, blocks). Tiles have 64 keys. Two blocks of a cluster may share an item,
 * each with 64 of its rows. The kernels of the second list may cut keys into parts. */
#define WGMMA_HALVES_SHAPES(X) \
    X(pair_576, 576, 512, 2)   \
    X(576, 576, 512, 1)
#define WGMMA_HALVES_SPLIT_SHAPES(X) \
    X(pair_split_576, 576, 512, 2)   \
    X(split_576, 576, 512, 1)
#define WGMMA_HALVES_ROWS 64
#define WGMMA_HALVES_KEYS 64

#define WGMMA_WARPGROUP 128 /* threads */

/* A producer warpgroup, which copies and plans, and the consumer warpgroups, which multiply. */
#define WGMMA_THREADS(warpgroups) (WGMMA_WARPGROUP * ((warpgroups) + 1))

/* Bytes of shared memory: a tile of queries, `stages` tiles of keys and of values, rows of o that
 * are being stored, the barriers and the items (wgmma_control), and padding to align the tiles. */
#define WGMMA_SHARED(width, width_v, warpgroups, keys, stages)              \
    (128 * (WGMMA_PANELS(width) * (64 * (warpgroups) + (stages) * (keys)) + \
            WGMMA_PANELS(width_v) * (stages) * (keys)) +                    \
     4 * (warpgroups)*WGMMA_OUT_BYTES + WGMMA_CONTROL + WGMMA_ALIGN)
#define WGMMA_PANELS(width) (((width) + 63) / 64) /* of a tile; see wgmma_offset() */
#define WGMMA_OUT_BYTES 1024                      /* for each warp: 64 channels of 8 rows */
#define WGMMA_CONTROL 1152
#define WGMMA_SPLIT_CONTROL 64 /* descriptions of parts of keys */
#define WGMMA_ALIGN 1024       /* the swizzle pattern begins at multiples of this */

/* The same with `stored` panels of bytes in e4m3, and their barriers. */
#define WGMMA_E4M3_SHARED(width, width_v, warpgroups, keys, stages, stored)                       \
    (WGMMA_SHARED(width, width_v, warpgroups, keys, stages) + (stored)*WGMMA_STORED_PANEL(keys) + \
     WGMMA_STORED_CONTROL)
#define WGMMA_E4M3_THREADS(warpgroups) \
    (WGMMA_THREADS(warpgroups) + (WGMMA_WIDENERS(warpgroups) == 4 ? WGMMA_WARPGROUP : 0))
#define WGMMA_STORED_PANEL(keys) (128 * (keys))
#define WGMMA_STORED_PANELS(width) (((width) + 127) / 128) /* of a tile of keys */
#define WGMMA_STORED_CONTROL 64

/* The same for two warpgroups that share rows: a tile of queries, two of keys or values, a tile of
 * weights, and what the warpgroups tell each other. Rows of o are stored by way of the weights. */
#define WGMMA_HALVES_SHARED(width, blocks)                                                     \
    (128 * WGMMA_PANELS(width) * (WGMMA_HALVES_ROWS + 2 * WGMMA_HALVES_KEYS) +                 \
     2 * WGMMA_HALVES_ROWS * WGMMA_HALVES_KEYS + WGMMA_CONTROL + WGMMA_HALVES_CONTROL(width) + \
     ((blocks) > 1 ? WGMMA_SENT : 0) + WGMMA_ALIGN)
#define WGMMA_SENT 24 /* bytes of wgmma_sent_number (wgmma_pair.cuh) */
#define WGMMA_HALVES_CONTROL(width) (16 * WGMMA_PANELS(width) + 88 + 8 * WGMMA_HALVES_ROWS)

/*
 * Kernels for features of pairs, as in mma.h: X(run, its features of pairs, width, warpgroups,
 * keys, stages, stages of a bias or mask if that is its only feature). They take a block mask only
 * without other features of pairs. Runs of one warpgroup are for short sequences.
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

/* Bytes of shared memory of a staged panel of a bias or mask, which has 128 bytes of each row, and
 * of the additional control data. */
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

/* Threads per block of the kernel that scans a block mask (scan.h); each takes a tile. */
#define WGMMA_BLOCK_THREADS 128

/* Whether a bias or a mask is scanned before forward. */
FATTN_HD bool wgmma_scans(int64_t items, int rows, int64_t keys)
{
    return scan_pays(items, rows == 64 ? 256 : SCAN_FEW, keys);
}

/* How many keys one copy brings from a page: the largest power of two that divides the page and the
 * tile. */
#define WGMMA_PIECE(page, keys) \
    (((page) & -(page)) < ((keys) & -(keys)) ? (page) & -(page) : (keys) & -(keys))
#define WGMMA_PIECE_LEAST 8 /* rows of the swizzle pattern */

/* Bytes of workspace for the counter from which blocks take their items. It is used if items differ
 * in their number of keys, because of lengths or a band. */
#define WGMMA_WORKSPACE 256

/*
 * A list of the sequences in the workspace, in the order in which their items are taken. Sequences
 * with the most keys come first (in backward, the most queries), so that the last items are small.
 * A sequence has only as many items as its own rows (or keys) need. A kernel that runs before makes
 * the list, which takes some 3 microseconds. There is none for few items, and for packed batches
 * whose lengths can hardly differ, because their total is close to that of equal lengths.
 */
typedef struct wgmma_listed {
    uint32_t first, past;     /* items first .. past - 1 belong to it */
    int32_t sequence, blocks; /* blocks: of rows of one head, or in backward of keys */
} wgmma_listed;
#define WGMMA_LISTED_MOST 512 /* sequences at most: each has a thread */
#define WGMMA_CUT_THREADS WGMMA_LISTED_MOST
#define WGMMA_CUT_ROUNDS 2 /* pieces for each block, or cluster, that runs at a time */
#define WGMMA_MERGE_ROWS 8 /* that a block merges at a time */
#define WGMMA_MERGE_THREADS (32 * WGMMA_MERGE_ROWS)
#define WGMMA_LISTED_ITEMS 512 /* no list for this many items or fewer */

FATTN_HD bool wgmma_lists(const fattn_problem *p, int64_t items)
{
    const int64_t most_q = p->batch * p->seqlen_q, most_k = p->batch * p->seqlen_k;
    const bool differ = p->features & (FATTN_SEQUSED_Q | FATTN_SEQUSED_K) ||
                        (p->features & FATTN_CU_SEQLENS_Q && p->total_q < most_q - most_q / 8) ||
                        (p->features & FATTN_CU_SEQLENS_K && p->total_k < most_k - most_k / 8);
    return differ && !(p->features & (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK)) &&
           p->batch > 1 && p->batch <= WGMMA_LISTED_MOST && items > WGMMA_LISTED_ITEMS;
}

/*
 * The kernels that split keys may cut those of a batch by the lengths of all sequences. A kernel
 * that runs before them (wgmma_cut.cuh) finds out how large a part should be, and lists the
 * sequences, those with the largest parts first. Behind the parts, the workspace has the counter of
 * items, the list, and the cut of each sequence.
 */
typedef struct wgmma_cut {
    uint32_t slot;  /* in the workspace, of the first part; not used if parts is 1 */
    uint32_t parts; /* into which the keys of each block of rows are cut, at most */
} wgmma_cut;

/* How many parts the workspace has room for. Only sequences that are cut need it. */
FATTN_HD int64_t wgmma_cut_slots(const fattn_tiling *t)
{
    const int64_t blocks = t->heads * t->q_blocks, all = blocks * t->splits;
    return t->items < all ? t->items - blocks : all;
}

/* Bytes of these parts: of each row m, l and o. */
FATTN_HD int64_t wgmma_cut_parts_bytes(const fattn_problem *p, const fattn_tiling *t, int64_t group)
{
    const int64_t most = group * p->seqlen_q, rows = most < t->br ? most : t->br;
    return (wgmma_cut_slots(t) * rows * (2 + p->dim_v) * 4 + 255) / 256 * 256;
}

/*
 * Backward: X(name, width, queries, keys, stages), with the tile's queries and keys, and pipeline
 * stages of queries. Each of two warpgroups has 64 of the 128 keys. docs/notes/hopper-backward.md
 * has the reasons and the measurements.
 */
#define WGMMA_BACKWARD_SHAPES(X) \
    X(short_64, 64, 64, 128, 3)  \
    X(64, 64, 128, 128, 2)       \
    X(128, 128, 64, 128, 3)

/* The same for kernels in which a cluster of two blocks shares an item. Each block has half of the
 * keys, and each of its warpgroups half of the channels. Deterministic runs have a kernel of their
 * own, since the tests for turns would slow others down by 2 to 4 %. */
#define WGMMA_BACKWARD_PAIRS(X) X(256, 256, 64, 128, 2)
#define WGMMA_BACKWARD_BLOCKS(width) ((width) == 256 ? 2 : 1)

/* Bytes of shared memory: a tile of keys and one of values, `stages` tiles of queries, two of dO,
 * two of dS, one of dQ in floats, and lse and delta of each row. */
#define WGMMA_BACKWARD_ALONE_SHARED(width, queries, keys, stages)                           \
    (2 * (width) * (2 * (keys) + (2 + (stages)) * (queries)) + 2 * 2 * (queries) * (keys) + \
     4 * (width) * (queries) + 4 * (2 + (stages)) * (queries))

/* The same if two blocks share an item: half of its keys and values, half of the channels of the
 * other block's keys, `stages` tiles of queries, one of dO, two each of dS, of the other block's dS
 * and of P, and lse and delta of each row. */
#define WGMMA_BACKWARD_PAIR_SHARED(width, queries, keys, stages)                                 \
    (2 * (width) * ((keys) + (keys) / 4 + (1 + (stages)) * (queries)) + 6 * (queries) * (keys) + \
     4 * (1 + (stages)) * (queries))

#define WGMMA_BACKWARD_SHARED(width, queries, keys, stages)              \
    ((WGMMA_BACKWARD_BLOCKS(width) > 1                                   \
          ? WGMMA_BACKWARD_PAIR_SHARED(width, queries, keys, stages)     \
          : WGMMA_BACKWARD_ALONE_SHARED(width, queries, keys, stages)) + \
     WGMMA_BACKWARD_CONTROL + WGMMA_ALIGN)
#define WGMMA_BACKWARD_CONTROL 640
#define WGMMA_VISITS 8 /* a power of two, at least two more than the stages */

/* In lean kernels of 64 channels items are chained (wgmma_backward_chain.cuh). Shared memory then
 * has more tiles of keys and values, for each warpgroup room for 64 rows of dK and dV instead of
 * its part of dQ, and more items. */
#define WGMMA_BACKWARD_CHAINS(width) ((width) == 64)
#define WGMMA_BACKWARD_KEY_STAGES(queries) ((queries) == 64 ? 3 : 2)
#define WGMMA_BACKWARD_VALUE_STAGES(queries) ((queries) == 64 ? 2 : 1)
#define WGMMA_BACKWARD_HANDED(width) (2 * 2 * 64 * (width))
#define WGMMA_BACKWARD_CHAIN_CONTROL 384
#define WGMMA_BACKWARD_CHAIN_SHARED(width, queries, keys)                                  \
    (2 * (width) * (keys) *                                                                \
         (WGMMA_BACKWARD_KEY_STAGES(queries) + WGMMA_BACKWARD_VALUE_STAGES(queries) - 2) + \
     2 * WGMMA_BACKWARD_HANDED(width) - 4 * (width) * (queries) + WGMMA_BACKWARD_CHAIN_CONTROL)
#define WGMMA_BACKWARD_LEAN_SHARED(width, queries, keys, stages) \
    (WGMMA_BACKWARD_SHARED(width, queries, keys, stages) +       \
     (WGMMA_BACKWARD_CHAINS(width) ? WGMMA_BACKWARD_CHAIN_SHARED(width, queries, keys) : 0))

/*
 * Backward with features of pairs: X(run, its features of pairs, whether it may compute dBias,
 * width, queries, keys, stages, stages of a bias or mask if that is its only feature). The terms of
 * scores need registers, so that a tile of 64 channels has half as many queries as in lean kernels.
 * With 256 channels, shared memory has no room for a tile of a bias or mask.
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
/* Bytes of a staged tile of a bias or mask. */
#define WGMMA_TERM_TILE(features, queries, keys)         \
    ((features) == FATTN_BIAS   ? 2 * (queries) * (keys) \
     : (features) == FATTN_MASK ? (queries) * (keys)     \
                                : 0)
#define WGMMA_BACKWARD_FULL_SHARED(features, width, queries, keys, stages, term_stages) \
    (WGMMA_BACKWARD_SHARED(width, queries, keys, stages) +                              \
     (term_stages)*WGMMA_TERM_TILE(features, queries, keys))

/* Threads per block of the kernels that run before and after the main one. */
#define WGMMA_ROWS_THREADS 128
#define WGMMA_SINK_THREADS 256

/* How many tiles the queries of a head take in the workspace. Each packed sequence begins with a
 * tile of its own, which takes at most one more tile for each sequence. */
#define WGMMA_BACKWARD_TILES(packed, total, batch, queries) \
    ((packed) ? (total) / (queries) + (batch) : ((total) + (queries)-1) / (queries))

/* Whether the kernels before and after visit the rows of a packed batch in the order of the
 * workspace, `of_head` rows for each head, instead of `rows` rows for each sequence: whichever are
 * fewer. */
FATTN_HD bool wgmma_visits_packed(const fattn_problem *p, int64_t of_head, int64_t rows)
{
    return p->features & FATTN_CU_SEQLENS_Q && of_head < p->batch * rows;
}

#define WGMMA_BACKWARD_ITEM_BYTES 128 /* of the description of an item in the workspace */
#define WGMMA_BACKWARD_TURNS(tiles) (((tiles) + 3) / 4 * 4) /* words of workspace for turns */
#define WGMMA_BACKWARD_COUNTER 4 /* words of workspace for the counter of items */
#define WGMMA_BACKWARD_WORDS(q_blocks) (((q_blocks) + 31) / 32) /* words with a bit for each tile */

/*
 * Whether an item of backward skips tiles of queries that a block mask, a bias or a mask hides from
 * all of its keys. Deterministic runs do not, because blocks take turns at every tile; nor do runs
 * with dBias, which is stored tile by tile.
 */
#define WGMMA_HIDES (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK)
FATTN_HD bool wgmma_skips(const fattn_problem *p)
{
    return p->features & WGMMA_HIDES && !(p->features & FATTN_DETERMINISTIC) &&
           !(p->outputs & FATTN_OUT_DBIAS);
}

/* Whether each head has one tile of keys, and every query attends to some of it. */
FATTN_HD bool wgmma_has_one_tile(const fattn_problem *p, int64_t k_blocks)
{
    const uint64_t unlike = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q |
                            FATTN_SEQUSED_K | FATTN_POSITIONS | WGMMA_HIDES;
    const bool reached =
        p->window_right < 0 || p->anchor == FATTN_TOP_LEFT || p->seqlen_q <= p->seqlen_k;
    return k_blocks == 1 && p->window_left < 0 && reached && !(p->features & unlike);
}

/* Whether a scan kernel runs before backward to find such tiles. */
FATTN_HD bool wgmma_backward_scans(const fattn_problem *p, int64_t q_blocks, int64_t k_blocks)
{
    enum { FEW = 16 }; /* with so few tiles, it would hardly save one */
    const bool pays = q_blocks * k_blocks > FEW &&
                      p->batch * p->heads_k * q_blocks * SCAN_BYTES(k_blocks) < INT64_C(1) << 31;
    return wgmma_skips(p) && (pays || p->features & FATTN_BLOCK_MASK);
}

/*
 * Sums of dQ are floats in the workspace, tile by tile. A tile has panels of 64 channels, with 256
 * bytes for each row. It is swizzled: chunk c of 32 bytes of row r is at c ^ (r / 2 % 4). So a
 * warp, whose lanes hold 8 channels of every other row of 8, writes to 32 banks of shared memory at
 * once. Offset in floats of channel c of row r in a tile of `rows`:
 */
FATTN_HD uint32_t wgmma_sum_offset(uint32_t rows, uint32_t r, uint32_t c)
{
    const uint32_t chunk = c % 64 / 8;
    return c / 64 * rows * 64 + r * 64 + (chunk ^ (r / 2 % 4)) * 8 + c % 8;
}

/* The same if the threads of a warpgroup add their own sums, four at a time: element 4 k + e of
 * thread t, of a product of 64 channels by the rows, is at (128 k + t) * 4 + e. */
FATTN_HD uint32_t wgmma_own_sum_offset(uint32_t rows, uint32_t r, uint32_t c)
{
    const uint32_t t = c % 64 / 16 * 32 + c % 8 * 4 + r % 8 / 2;
    return c / 64 * rows * 64 + (r / 8 * 128 + t) * 4 + c % 16 / 8 * 2 + r % 2;
}

/*
 * A tile in shared memory has panels of 64 channels. A panel has 128 bytes for each row of the
 * tile, and chunk c of 16 bytes of row r is at c ^ (r % 8). This is the 128-byte swizzle, which TMA
 * writes and wgmma reads. Products may read only the first channels of the last panel: with 96
 * channels, these are 32, and behind them are zeros, which cost nothing but their room.
 *
 * Offsets in bytes: of chunk c of row r of a panel, and of channel c of row r in a tile of `rows`.
 */
FATTN_HD uint32_t wgmma_chunk_offset(uint32_t r, uint32_t c)
{
    return r * 128 + ((c ^ (r % 8)) << 4);
}

FATTN_HD uint32_t wgmma_offset(uint32_t rows, uint32_t r, uint32_t c)
{
    return c / 64 * rows * 128 + wgmma_chunk_offset(r, c % 64 / 8) + c % 8 * 2;
}

/*
 * How warps widen stored panels of 128 channels in e4m3, in wgmma_widen.cuh, to panels of 64
 * channels. A lane takes chunk `chunk`, or 4 + `chunk`, of 16 channels of keys row, row +
 * WGMMA_WIDENED * (the number of warps), ..., and stores it as two chunks of 8 channels. Eight
 * lanes have four chunks of two keys, whose numbers differ in bits 0 and 2, so that they access all
 * banks at once, when they load as well as when they store.
 */
#define WGMMA_WIDENERS(warpgroups) ((warpgroups) < 3 ? 4 : 2)
#define WGMMA_WIDENED 8 /* keys that a warp widens at once */
typedef struct wgmma_widener {
    int row, chunk;
} wgmma_widener;

FATTN_HD wgmma_widener wgmma_widener_of(int warp, int lane)
{
    wgmma_widener own;
    own.row = WGMMA_WIDENED * warp + (lane / 8 ^ (lane / 4 % 2 ? 5 : 0));
    own.chunk = lane % 4;
    return own;
}

/*
 * The wgmma descriptor of an operand in such a tile that begins at shared-memory address `at`.
 * Eight rows are 1024 bytes apart. If channels are summed over, no other distance matters; if rows
 * are, panels are `panel` bytes apart. The descriptor of 16 channels further, within a panel, is
 * larger by WGMMA_CHANNELS; that of 16 rows further, by WGMMA_ROWS.
 */
FATTN_HD uint64_t wgmma_descriptor(uint32_t at, uint32_t panel)
{
    const uint64_t swizzled = UINT64_C(1) << 62, eight_rows = (uint64_t)(1024 >> 4) << 32;
    return swizzled | eight_rows | (uint64_t)(panel >> 4) << 16 | (at & 0x3ffff) >> 4;
}
#define WGMMA_CHANNELS (32 >> 4)
#define WGMMA_ROWS (2048 >> 4)

/* Row and column of accumulator element n of thread t of a warpgroup, in a product of 64 rows.
 * Rounded to 16-bit pairs, elements 8 s .. 8 s + 7 are the thread's fragment of columns
 * 16 s .. 16 s + 15 as the first operand of another product. */
FATTN_HD int wgmma_row(int t, int n) { return t / 32 * 16 + t % 32 / 4 + n % 4 / 2 * 8; }

FATTN_HD int wgmma_column(int t, int n) { return n / 4 * 8 + t % 4 * 2 + n % 2; }

#endif
