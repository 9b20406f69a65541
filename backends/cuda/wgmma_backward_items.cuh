/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The items of backward on Hopper, and the workspace, which has their descriptions and the lse,
 * delta and dQ of all rows. The rows are in tiles of queries, and each sequence begins with a new
 * tile, so that whole tiles are copied and added to.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_ITEMS_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_ITEMS_CUH

#include "backends/cuda/scan.cuh"
#include "backends/cuda/wgmma_backward_shape.cuh"
#include "backends/cuda/wgmma_list.cuh"
#include "backends/cuda/wgmma_shift.h"

/* --- The workspace ---------------------------------------------------------------------------- */

/* The description of an item: a tile of keys of a key/value head, and the queries that attend to
 * some of it. */
typedef struct wgmma_backward_item {
    int first, past;             /* tiles of queries first .. past - 1 */
    int start, peers;            /* the tile it begins with; items of its part, 0 if not shifted */
    int full, full_past;         /* tiles whose pairs are all kept */
    int keys, owned;             /* keys of the tile that exist, and that have gradients */
    int first_query, past_query; /* queries in the first key's band, to +-WGMMA_UNBOUNDED */
    int sequence_keys;           /* keys of the whole sequence */
    int reach;                   /* query i attends to no key from i + reach on */
    int queries;                 /* of the sequence */
    int q_row, q_batch, k_row, k_batch, head; /* where copies begin; head: key/value head */
    int row_tile;   /* tile of lse, delta and dQ of the group's first head */
    int block;      /* tile of keys */
    int tiles;      /* how many are visited, over all heads of the group */
    int batch;      /* sequence */
    int64_t dk, dv; /* elements of the first key's gradients */
    int64_t diagonal, q_position, k_position;
} wgmma_backward_item;

#define WGMMA_UNBOUNDED (1 << 30) /* more than there are queries */

/* How many tiles apart the items of a part begin, in a run whose items are shifted. */
template <class S> GPU_DEVICE int wgmma_apart(const wgmma_backward_item &w)
{
    return wgmma_shift_apart(w.past, w.peers, S::SPREAD, S::LEAST_APART);
}

typedef struct wgmma_workspace {
    float *dq;         /* not yet multiplied by scale */
    float *lse;        /* in log2 units; +inf for an empty row, whose probabilities are 0 */
    float *delta;      /* 0 for an empty row */
    int32_t *turns;    /* in deterministic runs: how many blocks have added to each tile of dQ */
    unsigned *counter; /* of items */
    wgmma_backward_item *items;
    uint32_t *visits;   /* bits for each tile of keys, head and sequence: wgmma_visits_of() */
    uint8_t *scan;      /* bytes from the scan (scan.h), by tiles of queries */
    wgmma_listed *list; /* the list of sequences, in place of these two */
    int tiles;          /* per head */
} wgmma_workspace;

/* How many items there are if all sequences have as many as the longest. */
GPU_DEVICE int64_t wgmma_items_alike(const fattn_gpu_args &g)
{
    return g.problem.batch * g.problem.heads_k * g.tiling.k_blocks;
}

template <class S> GPU_DEVICE wgmma_workspace wgmma_workspace_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const bool packed = p.features & FATTN_CU_SEQLENS_Q;
    const int64_t tiles = WGMMA_BACKWARD_TILES(packed, p.total_q, p.batch, S::QUERIES);
    const int64_t rows = (packed ? 1 : p.batch) * p.heads_q * tiles * S::QUERIES;
    wgmma_workspace workspace;
    workspace.dq = (float *)g.workspace;
    workspace.lse = workspace.dq + rows * S::WIDTH;
    workspace.delta = workspace.lse + rows;
    workspace.turns = (int32_t *)(workspace.delta + rows);
    workspace.counter =
        (unsigned *)(workspace.turns + WGMMA_BACKWARD_TURNS(rows / S::QUERIES * S::BLOCKS));
    workspace.items = (wgmma_backward_item *)(workspace.counter + WGMMA_BACKWARD_COUNTER);
    const int64_t items = wgmma_items_alike(g);
    workspace.visits = (uint32_t *)(workspace.items + items * S::BLOCKS);
    workspace.scan = (uint8_t *)(workspace.visits +
                                 items * S::BLOCKS * 2 * WGMMA_BACKWARD_WORDS(g.tiling.q_blocks));
    workspace.list = (wgmma_listed *)workspace.visits;
    workspace.tiles = (int)tiles;
    return workspace;
}

/* The first tile of a sequence's query head. A packed sequence's tiles do not overlap those of the
 * sequence before. */
template <class S>
GPU_DEVICE int wgmma_workspace_tile(const fattn_gpu_args &g, const wgmma_workspace &workspace,
                                    const fattn_sequence &seq, int64_t b, int64_t head)
{
    const fattn_problem &p = g.problem;
    if (p.features & FATTN_CU_SEQLENS_Q) {
        return (int)(head * workspace.tiles + (int)seq.q_row / S::QUERIES + b);
    }
    return (int)((b * p.heads_q + head) * workspace.tiles);
}

/* --- Items ------------------------------------------------------------------------------------ */

/* Whether there is a list of sequences (wgmma_list.cuh). */
GPU_DEVICE bool wgmma_has_list(const fattn_gpu_args &g)
{
    return wgmma_lists(&g.problem, wgmma_items_alike(g));
}

/* How many items there are; from the list of sequences, if there is one. */
GPU_DEVICE int wgmma_items_of(const fattn_gpu_args &g, const wgmma_workspace &workspace)
{
    return (int)(wgmma_has_list(g) ? workspace.list[g.problem.batch - 1].past
                                   : wgmma_items_alike(g));
}

/* Whether dQ is stored instead of added to. It is if the keys are one tile, so that only one block
 * writes to it. */
template <class S> GPU_DEVICE bool wgmma_stores(const fattn_gpu_args &g)
{
    return !S::IS_PAIR && wgmma_has_one_tile(&g.problem, g.tiling.k_blocks);
}

/* Whether blocks add to dQ in turn. */
GPU_DEVICE bool wgmma_is_ordered(const fattn_problem &p)
{
    return p.features & FATTN_DETERMINISTIC;
}

/* Whether items are shifted, so that they begin with different tiles: without a mask, all items of
 * a head would begin with the same tile (wgmma_shift.h). */
GPU_DEVICE bool wgmma_is_shifted(const fattn_problem &p)
{
    return wgmma_is_ordered(p) && !gpu_sequences_differ(p) && p.window_left < 0 &&
           p.window_right < 0;
}

/* Whether all sequences share the bias or mask, while each head has its own. */
GPU_DEVICE bool wgmma_shares_terms(const fattn_problem &p)
{
    const int64_t *const stride = p.features & FATTN_BIAS ? p.bias_stride : p.mask_stride;
    return p.features & (FATTN_BIAS | FATTN_MASK) && stride[0] == 0 && stride[1] != 0;
}

/* Sets the description of item `number`, with the keys of block `rank` of those that share it. All
 * of these visit the same queries. The items of heads are interleaved as in forward, first tiles
 * first, since they have the most work under a causal mask. In deterministic runs they are head by
 * head, last tiles first, in the order of their turns. If sequences share a bias, the items of all
 * sequences of a head are consecutive, so that they read it, and add to its gradient, while it is
 * in L2. */
template <class S>
GPU_DEVICE void wgmma_backward_item_set(const fattn_gpu_args &g, const wgmma_workspace &workspace,
                                        int64_t number, int rank, wgmma_backward_item &w)
{
    const fattn_problem &p = g.problem;
    const int64_t group = fattn_quotient(p.heads_q, p.heads_k), limit = INT64_C(1) << 62;
    fattn_tiling order;
    order.q_blocks = g.tiling.k_blocks;
    order.splits = 1;
    order.heads = p.batch * p.heads_k;
    order.together =
        wgmma_is_ordered(p) ? 1 : fattn_max64(fattn_quotient(g.tiling.together, group), 1);
    wgmma_listed listed = {0, 0, 0, 0};
    if (wgmma_has_list(g)) {
        listed = wgmma_listed_of(workspace.list, (int)p.batch, (uint32_t)number);
        wgmma_listed_tiling(listed, p.heads_k, order);
    }
    fattn_work work = fattn_schedule_item(&order, p.heads_k, number - listed.first);
    work.batch += listed.sequence;
    if (wgmma_shares_terms(p)) {
        const int64_t n = work.batch * p.heads_k + work.head;
        work.head = fattn_quotient(n, p.batch);
        work.batch = n - work.head * p.batch;
    }
    const fattn_sequence seq = gpu_sequence(g, work.batch);
    const fattn_band band = fattn_band_of(&p, &seq);
    const int64_t block = wgmma_is_ordered(p) ? work.block : order.q_blocks - 1 - work.block;
    const int64_t first_key = block * S::ITEM_KEYS;
    const int64_t past_key = fattn_min64(first_key + S::ITEM_KEYS, seq.sk);
    w.block = (int)block * S::BLOCKS + rank;
    const int64_t j0 = (int64_t)w.block * S::KEYS;
    w.keys = (int)gpu_clamp(seq.sk - j0, 0, S::KEYS);
    w.owned = p.features & FATTN_ACCUMULATE ? w.keys : (int)gpu_clamp(seq.slot_k - j0, 0, S::KEYS);
    w.queries = (int)seq.sq;
    /* Query i attends to key j if j - right <= i + diagonal <= j + left. */
    const int64_t aligned = j0 - band.diagonal;
    const int64_t most = WGMMA_UNBOUNDED;
    w.first_query =
        (int)(band.right < 0 ? -most
                             : gpu_clamp(aligned - fattn_min64(band.right, limit), -most, most));
    w.past_query =
        (int)(band.left < 0 ? most
                            : gpu_clamp(aligned + fattn_min64(band.left, limit) + 1, -most, most));
    const fattn_range rows = fattn_band_queries(&band, seq.sq, first_key, past_key);
    const int past = first_key < past_key ? (int)gpu_clamp(rows.past, 0, seq.sq) : 0;
    w.past = (past + S::QUERIES - 1) / S::QUERIES;
    w.first = (int)gpu_clamp(rows.first, 0, (int64_t)w.past * S::QUERIES) / S::QUERIES;
    w.start = w.first;
    w.peers = 0;
    w.tiles = max(w.past - w.first, 0) * (int)group;
    w.sequence_keys = (int)seq.sk;
    w.reach = (int)(band.right < 0 ? most
                                   : gpu_clamp(band.diagonal + fattn_min64(band.right, limit) + 1,
                                               -most, most));
    w.full = w.keys < S::KEYS ? INT32_MAX
                              : (max(w.first_query + S::KEYS - 1, 0) + S::QUERIES - 1) / S::QUERIES;
    w.full_past = w.past_query >= seq.sq ? INT32_MAX : max(w.past_query, 0) / S::QUERIES;
    w.q_row = (int)seq.q_row;
    w.k_row = (int)(seq.k_row + j0);
    w.q_batch = (int)seq.q_batch;
    w.k_batch = (int)seq.k_batch;
    w.head = (int)work.head;
    w.batch = (int)work.batch;
    w.diagonal = band.diagonal;
    w.q_position = seq.q_position;
    w.k_position = seq.k_position;
    w.row_tile = wgmma_workspace_tile<S>(g, workspace, seq, work.batch, work.head * group);
    w.dk = gpu_key_at(g, seq, p.dk, work.batch, work.head, j0);
    w.dv = gpu_key_at(g, seq, p.dv, work.batch, work.head, j0);
}

/* Strides of what may hide tiles: a block mask, which has no other feature beside it, a bias, or
 * else a mask. */
GPU_DEVICE const int64_t *wgmma_hiding_stride(const fattn_problem &p)
{
    return p.features & FATTN_BLOCK_MASK ? p.block_mask_stride : scan_stride(p);
}

/* The results of the scan: their first byte, and the distances in bytes of successive sequences,
 * key/value heads and tiles of queries. */
typedef struct wgmma_scan_results {
    const uint8_t *bytes; /* NULL if there was no scan */
    int64_t batch, head;
    uint32_t *visits; /* wgmma_visits_of() the first item */
    int tile;
} wgmma_scan_results;

template <class S> GPU_DEVICE wgmma_scan_results wgmma_scan_results_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    const int64_t *const stride = wgmma_hiding_stride(p);
    const bool scanned = wgmma_backward_scans(&p, g.tiling.q_blocks, g.tiling.k_blocks);
    fattn_work next = {};
    wgmma_scan_results scan;
    scan.bytes = scanned ? workspace.scan : NULL;
    next.head = 1;
    scan.head = scan_at(g.tiling, p.heads_k, stride, next);
    next.head = 0, next.batch = 1;
    scan.batch = scan_at(g.tiling, p.heads_k, stride, next);
    scan.tile = (int)SCAN_BYTES(g.tiling.k_blocks);
    scan.visits = workspace.visits;
    return scan;
}

/* Words with a bit for each tile of queries: whether the item visits it, which all heads of the
 * group share. Behind them are as many words with a bit for each mixed tile, in which some pair is
 * hidden or has a bias; or, with a block mask, for each tile in which some of this block's keys are
 * kept. */
template <class S>
GPU_DEVICE uint32_t *wgmma_visits_of(const fattn_gpu_args &g, const wgmma_scan_results &scan,
                                     const wgmma_backward_item &w)
{
    const int64_t head = (int64_t)w.batch * g.problem.heads_k + w.head;
    const int64_t block = head * g.tiling.k_blocks * S::BLOCKS + w.block;
    return scan.visits + block * 2 * WGMMA_BACKWARD_WORDS(g.tiling.q_blocks);
}

/* Writes the descriptions of all items, one per thread, in the first blocks of the grid, and clears
 * the counter. */
template <class S> GPU_DEVICE void wgmma_items_set(const fattn_gpu_args &g)
{
    static_assert(sizeof(wgmma_backward_item) == WGMMA_BACKWARD_ITEM_BYTES, "what is set aside");
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    const int64_t items = wgmma_items_of(g, workspace);
    const int64_t own = gpu_block() * gpu_threads() + gpu_thread();
    if (own == 0) {
        *workspace.counter = 0;
    }
    for (int64_t n = own; n < items * S::BLOCKS; n += gpu_blocks() * gpu_threads()) {
        wgmma_backward_item_set<S>(g, workspace, n / S::BLOCKS, (int)(n % S::BLOCKS),
                                   workspace.items[n]);
    }
}

#endif
