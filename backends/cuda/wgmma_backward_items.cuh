/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The items of backward on Hopper, and the workspace in which they lie beside the rows: these are
 * in tiles of queries, those of a sequence beginning with one of its own, so that whole tiles of
 * lse, delta and dQ are copied and added to.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_ITEMS_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_ITEMS_CUH

#include "backends/cuda/seen.cuh"
#include "backends/cuda/wgmma_backward_shape.cuh"
#include "backends/cuda/wgmma_order.cuh"
#include "backends/cuda/wgmma_shift.h"

/* --- The workspace ---------------------------------------------------------------------------- */

/* An item: a tile of keys of a key/value head, and the queries that see some of it. */
typedef struct wgmma_backward_item {
    int first, past;             /* tiles of queries */
    int start, peers;            /* the tile it begins with; of shifted items, or 0 */
    int full, full_past;         /* those whose pairs are all kept */
    int keys, owned;             /* of the tile: that exist, and that have gradients */
    int first_query, past_query; /* what the first key is seen by, cut to +-WGMMA_UNBOUNDED */
    int sequence_keys;           /* of the whole sequence */
    int reach;                   /* query i sees no key from i + this on */
    int queries;                 /* of the sequence */
    int q_row, q_batch, k_row, k_batch, head; /* where copies begin; head: of keys */
    int saved;      /* tile of lse, delta and dQ of the first query's first head */
    int block;      /* of keys */
    int tiles;      /* that are visited, of all heads of the group */
    int batch;      /* and what features need besides: */
    int64_t dk, dv; /* elements of the first key's gradients */
    int64_t diagonal, q_position, k_position;
} wgmma_backward_item;

#define WGMMA_UNBOUNDED (1 << 30) /* more than there are queries */

/* How many tiles apart the items of a part begin, in a run whose items are shifted. */
template <class S> GPU_DEVICE int wgmma_apart(const wgmma_backward_item &w)
{
    return wgmma_shift_apart(w.past, w.peers, S::SPREAD, S::LEAST_APART);
}

typedef struct wgmma_saved {
    float *dq;       /* not yet multiplied by scale */
    float *lse;      /* in log2 units; +inf for a row without probabilities */
    float *delta;    /* of such a row 0 */
    int32_t *turns;  /* of ordered runs: one of each tile of dQ */
    unsigned *taken; /* items beyond the first of each block */
    wgmma_backward_item *items;
    uint32_t *visits;   /* of each tile of keys, by heads and sequences: wgmma_visits_of() */
    uint8_t *seen;      /* what a bias or a mask leaves: seen.h, by tiles of queries */
    wgmma_listed *list; /* of sequences, in the place of these two */
    int tiles;          /* of a head */
} wgmma_saved;

/* Items, if all sequences have as many as the longest. */
GPU_DEVICE int64_t wgmma_items_alike(const fattn_gpu_args &g)
{
    return g.problem.batch * g.problem.heads_k * g.tiling.k_blocks;
}

template <class S> GPU_DEVICE wgmma_saved wgmma_saved_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const bool packed = p.features & FATTN_CU_SEQLENS_Q;
    const int64_t tiles = WGMMA_BACKWARD_TILES(packed, p.total_q, p.batch, S::QUERIES);
    const int64_t rows = (packed ? 1 : p.batch) * p.heads_q * tiles * S::QUERIES;
    wgmma_saved saved;
    saved.dq = (float *)g.workspace;
    saved.lse = saved.dq + rows * S::WIDTH;
    saved.delta = saved.lse + rows;
    saved.turns = (int32_t *)(saved.delta + rows);
    saved.taken = (unsigned *)(saved.turns + WGMMA_BACKWARD_TURNS(rows / S::QUERIES * S::BLOCKS));
    saved.items = (wgmma_backward_item *)(saved.taken + WGMMA_BACKWARD_TAKEN);
    const int64_t items = wgmma_items_alike(g);
    saved.visits = (uint32_t *)(saved.items + items * S::BLOCKS);
    saved.seen =
        (uint8_t *)(saved.visits + items * S::BLOCKS * 2 * WGMMA_BACKWARD_WORDS(g.tiling.q_blocks));
    saved.list = (wgmma_listed *)saved.visits;
    saved.tiles = (int)tiles;
    return saved;
}

/* The first tile of a sequence's query head. That of a packed sequence begins no earlier than the
 * one before ends. */
template <class S>
GPU_DEVICE int wgmma_saved_tile(const fattn_gpu_args &g, const wgmma_saved &saved,
                                const fattn_sequence &seq, int64_t b, int64_t head)
{
    const fattn_problem &p = g.problem;
    if (p.features & FATTN_CU_SEQLENS_Q) {
        return (int)(head * saved.tiles + (int)seq.q_row / S::QUERIES + b);
    }
    return (int)((b * p.heads_q + head) * saved.tiles);
}

/* --- Items ------------------------------------------------------------------------------------ */

/* Whether a kernel before has listed the sequences (wgmma_order.cuh). */
GPU_DEVICE bool wgmma_has_list(const fattn_gpu_args &g)
{
    return wgmma_orders(&g.problem, wgmma_items_alike(g));
}

/* How many items there are: the list of sequences tells, if there is one. */
GPU_DEVICE int wgmma_items_of(const fattn_gpu_args &g, const wgmma_saved &saved)
{
    return (int)(wgmma_has_list(g) ? saved.list[g.problem.batch - 1].past : wgmma_items_alike(g));
}

/* Whether dQ is stored where it is else added to, for nothing else is: keys are one tile. */
template <class S> GPU_DEVICE bool wgmma_stores(const fattn_gpu_args &g)
{
    return !S::IS_PAIR && wgmma_has_one_tile(&g.problem, g.tiling.k_blocks);
}

/* Whether blocks add to dQ in turn. */
GPU_DEVICE bool wgmma_is_ordered(const fattn_problem &p)
{
    return p.features & FATTN_DETERMINISTIC;
}

/* Whether they begin with unlike tiles: in runs without a mask all blocks of a head would begin
 * with the same one. */
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

/* Item `number`, with the keys of block `rank` of those that share it; all of these visit the same
 * queries. Heads take turns as in forward, first tiles first: under a causal mask these are heavy.
 * Ordered ones come head by head, last tiles first: in the order of their turns.
 * Where sequences share a bias, those of a head follow one another: then they read it, and add to
 * its gradient, while it is in L2. */
template <class S>
GPU_DEVICE void wgmma_item_set(const fattn_gpu_args &g, const wgmma_saved &saved, int64_t number,
                               int rank, wgmma_backward_item &w)
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
        listed = wgmma_listed_of(saved.list, (int)p.batch, (uint32_t)number);
        order.q_blocks = listed.blocks;
        order.heads = p.heads_k;
        order.together = fattn_min64(order.together, p.heads_k);
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
    /* Query i sees key j when j - right <= i + diagonal <= j + left. */
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
    w.saved = wgmma_saved_tile<S>(g, saved, seq, work.batch, work.head * group);
    w.dk = gpu_key_at(g, seq, p.dk, work.batch, work.head, j0);
    w.dv = gpu_key_at(g, seq, p.dv, work.batch, work.head, j0);
}

/* Strides of what may hide tiles: of a block mask, which comes alone, a bias, or else a mask. */
GPU_DEVICE const int64_t *wgmma_hiding_stride(const fattn_problem &p)
{
    return p.features & FATTN_BLOCK_MASK ? p.block_mask_stride : seen_stride(p);
}

/* What is known of the tiles that may be left out: where, and elements from one sequence, head of
 * keys and tile of queries to the next. */
typedef struct wgmma_sight {
    const uint8_t *seen; /* the bytes of seen.h, or NULL: nothing has been looked at */
    int64_t batch, head;
    uint32_t *visits; /* wgmma_visits_of() the first item */
    int tile;
} wgmma_sight;

template <class S> GPU_DEVICE wgmma_sight wgmma_sight_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const wgmma_saved saved = wgmma_saved_of<S>(g);
    const int64_t *const stride = wgmma_hiding_stride(p);
    const bool looks = wgmma_backward_looks(&p, g.tiling.q_blocks, g.tiling.k_blocks);
    fattn_work next = {};
    wgmma_sight sight;
    sight.seen = looks ? saved.seen : NULL;
    next.head = 1;
    sight.head = seen_at(g.tiling, p.heads_k, stride, next);
    next.head = 0, next.batch = 1;
    sight.batch = seen_at(g.tiling, p.heads_k, stride, next);
    sight.tile = (int)SEEN_BYTES(g.tiling.k_blocks);
    sight.visits = saved.visits;
    return sight;
}

/* A bit for each of an item's tiles of queries, which all heads of the group share: whether it
 * visits the tile. As many words follow of whether that is mixed: some pair is hidden, or has a
 * bias; or whether a block mask leaves something of this block's keys. */
template <class S>
GPU_DEVICE uint32_t *wgmma_visits_of(const fattn_gpu_args &g, const wgmma_sight &sight,
                                     const wgmma_backward_item &w)
{
    const int64_t head = (int64_t)w.batch * g.problem.heads_k + w.head;
    const int64_t block = head * g.tiling.k_blocks * S::BLOCKS + w.block;
    return sight.visits + block * 2 * WGMMA_BACKWARD_WORDS(g.tiling.q_blocks);
}

/* Each by a thread, of as few blocks as can do it. */
template <class S> GPU_DEVICE void wgmma_items_set(const fattn_gpu_args &g)
{
    static_assert(sizeof(wgmma_backward_item) == WGMMA_BACKWARD_ITEM_BYTES, "what is set aside");
    const wgmma_saved saved = wgmma_saved_of<S>(g);
    const int64_t items = wgmma_items_of(g, saved);
    const int64_t own = gpu_block() * gpu_threads() + gpu_thread();
    if (own == 0) {
        *saved.taken = 0;
    }
    for (int64_t n = own; n < items * S::BLOCKS; n += gpu_blocks() * gpu_threads()) {
        wgmma_item_set<S>(g, saved, n / S::BLOCKS, (int)(n % S::BLOCKS), saved.items[n]);
    }
}

#endif
