/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The position of a consumer warpgroup in backward on Hopper (wgmma_backward.cuh), and the terms of
 * its next tile, which it prepares while products of the current tile run: a bias, a mask, and
 * which pairs dropout keeps. For each tile the main loop calls
 *
 *     wgmma_drop_early, wgmma_drop_late    call dropout's generator, beside two groups of products
 *     wgmma_await_term, wgmma_read_term    load a bias or mask to registers
 *     wgmma_evaluate_term                     evaluates it
 *     wgmma_join_ahead                     combines bits from other lanes; no product runs
 *     wgmma_weigh_fully                    turns the tile's scores into weights
 *
 * at places that depend on the kernel, since registers are short, and some of these values live
 * longer than others.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_AHEAD_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_AHEAD_CUH

#include "backends/cuda/wgmma_backward_block.cuh"
#include "backends/cuda/wgmma_backward_terms.cuh"

/* The position of a warpgroup. Registers are short: values that few tiles need are not here, but
 * are read from the item. */
template <class S> struct wgmma_backward_walk {
    int group, tile;
    int head;            /* of the group */
    int item;            /* index in control.item */
    int full, full_past; /* tiles that need no band mask */
    int tail;            /* the tile with rows of another sequence, or -1 */
    wgmma_ring<S::STAGES> q, q_used;
    wgmma_ring<S::DOUT_STAGES> dout;
    wgmma_ring<S::TERM_RING_STAGES> term;
    float slope;          /* of ALiBi, for the head */
    wgmma_ahead<S> ahead; /* of the tile */
    wgmma_dropout drop;
    uint32_t term_offset; /* of the lane's reads in a staged tile */
    uint32_t ds;          /* offset of the stage of dS: 0 or DS_BYTES */
    int ds_phase;         /* of its barriers */
    bool dq_pending;      /* dQ of the tile before is not computed, or not added, yet */
    uint32_t visits;      /* tiles visited so far; wgmma_visit_at() */
    uint32_t ds_put;      /* address for the lane's first matrix of dS, in stage 0 */
    uint32_t dq_put;      /* address for the lane's first sum of dQ */
};

/* The first query of a warpgroup's part of S^T. */
template <class S> GPU_DEVICE int wgmma_own_query(int group)
{
    return S::IS_PAIR ? group * S::OWN_QUERIES : 0;
}

/* The thread's pairs in tile `tile` of the group's head `head`. */
template <class S>
GPU_DEVICE wgmma_patch wgmma_patch_of(const wgmma_backward_block<S> &b,
                                      const wgmma_backward_walk<S> &walk, int head, int tile)
{
    const wgmma_backward_item &w = b.control->item[walk.item];
    const int t = wgmma_thread();
    const int key = (S::IS_PAIR ? 0 : 64 * walk.group) + wgmma_row(t, 0);
    wgmma_patch at;
    at.b = w.batch;
    at.h = w.head * b.group + head;
    at.i = tile * S::QUERIES + wgmma_own_query<S>(walk.group) + wgmma_column(t, 0);
    at.j = w.block * S::KEYS + key;
    at.queries = w.queries - at.i;
    at.keys = w.keys - key;
    return at;
}

/* Begins a head: reads its slope. */
template <class S>
GPU_DEVICE void wgmma_head_begin(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                 wgmma_backward_walk<S> &walk, int head)
{
    if constexpr (S::KNOWN == FATTN_ALIBI || S::KNOWN == MMA_ANY) {
        if (mma_has<S>(g, FATTN_ALIBI)) {
            const wgmma_backward_item &w = b.control->item[walk.item];
            const float *const slopes = (const float *)g.buffers.alibi_slopes;
            walk.slope = slopes[w.batch * g.problem.alibi_batch_stride + w.head * b.group + head] *
                         g.rule.unit;
        }
    }
}

/* Offset of the lane's reads of a bias or mask in a staged tile, for the first 8 queries. */
template <class S> GPU_DEVICE uint32_t wgmma_term_offset(const fattn_gpu_args &g, int group)
{
    const bool rows = wgmma_term_stride<S>(g.problem)[2] != 0; /* or all queries share one */
    const int lane = mma_lane(), key = 64 * group + wgmma_thread() / 32 * 16;
    if (S::KNOWN == FATTN_BIAS) { /* matrices of 8 queries by 8 keys: keys first */
        const int r = rows ? lane / 16 * 8 + lane % 8 : 0;
        return wgmma_offset(S::QUERIES, (uint32_t)r, (uint32_t)(key + lane / 8 % 2 * 8));
    }
    const int r = rows ? lane : 0; /* of 8 queries by 16 keys */
    return wgmma_offset(S::QUERIES, (uint32_t)r, (uint32_t)(key / 2));
}

/* Waits for a staged bias or mask of the next tile. */
template <class S>
GPU_DEVICE void wgmma_await_term(const wgmma_backward_block<S> &b,
                                 const wgmma_backward_walk<S> &walk)
{
    if constexpr (S::IS_STAGED) {
        if (b.staged && wgmma_is_mixed<S>(walk.ahead)) {
            wgmma_await(&b.control->term_full[walk.term.stage], walk.term.phase);
        }
    }
}

/* For warps with 32 queries and 16 keys: each lane begins to read one query's part of a bias or
 * mask. */
template <class S>
GPU_DEVICE void wgmma_read_row(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                               wgmma_backward_walk<S> &walk, int head, int tile)
{
    const fattn_problem &p = g.problem;
    const wgmma_backward_item &w = b.control->item[walk.item];
    const int64_t *const stride = wgmma_term_stride<S>(p);
    const int i = tile * S::QUERIES + wgmma_own_query<S>(walk.group) + mma_lane();
    const int key = wgmma_thread() / 32 * 16;
    const int64_t at = w.batch * stride[0] + (w.head * b.group + head) * stride[1] + i * stride[2] +
                       (w.block * S::KEYS + key) * stride[3];
    if constexpr (S::KNOWN == FATTN_BIAS) {
        wgmma_read_sixteen<2>((const char *)g.buffers.bias + 2 * at, stride[3], b.chunks,
                              i < w.queries, w.keys - key, walk.ahead.bias[0][0]);
    } else {
        wgmma_read_sixteen<1>((const char *)g.buffers.mask + at, stride[3], b.chunks, i < w.queries,
                              w.keys - key, walk.ahead.mask);
    }
}

/* Turns such rows of a bias into the biases of the thread's own pairs. It goes through the room of
 * the warp's part of P, which is not computed yet. */
template <class S>
GPU_DEVICE void wgmma_transpose_bias(const wgmma_backward_block<S> &b,
                                     const wgmma_backward_walk<S> &walk,
                                     uint32_t bias[S::BIAS_STEPS][2][2])
{
    static_assert(S::BIAS_STEPS == 2, "32 queries");
    const uint32_t lane = (uint32_t)mma_lane(), key = threadIdx.x % WGMMA_WARPGROUP / 32 * 16;
    const uint32_t query = (uint32_t)wgmma_own_query<S>(walk.group), to = b.p + walk.ds;
    GPU_UNROLL
    for (uint32_t n = 0; n < 2; n++) { /* 8 keys */
        wgmma_put_four(to + wgmma_offset(S::QUERIES, query + lane, key + 8 * n), bias[n][0]);
    }
    __syncwarp();
    GPU_UNROLL
    for (uint32_t n = 0; n < 2; n++) { /* 16 queries; matrices as in wgmma_term_offset() */
        const uint32_t row = query + 16 * n + lane / 16 * 8 + lane % 8;
        mma_load_transposed(bias[n][0], to + wgmma_offset(S::QUERIES, row, key + lane / 8 % 2 * 8));
    }
}

/* Begins to read a bias or mask, except a mask that is not staged, for tile `tile` of the group's
 * head `head`. */
template <class S>
GPU_DEVICE void wgmma_read_term(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                wgmma_backward_walk<S> &walk, int head, int tile)
{
    wgmma_ahead<S> &ahead = walk.ahead;
    const uint32_t step = wgmma_term_stride<S>(g.problem)[2] ? 16 * 128 : 0;
    const uint32_t from = b.terms + walk.term.stage * S::TERM_BYTES + walk.term_offset;
    if (!wgmma_is_mixed<S>(ahead)) {
        return;
    }
    if constexpr (S::READS_ROWS) {
        wgmma_read_row<S>(g, b, walk, head, tile);
    } else if constexpr (S::KNOWN == FATTN_BIAS) {
        if (S::IS_STAGED && b.staged) {
            GPU_UNROLL
            for (int n = 0; n < S::OWN_QUERIES / 16; n++) {
                mma_load_transposed(ahead.bias[n][0], from + n * step);
            }
        } else {
            wgmma_bias_words<S>(g, wgmma_patch_of<S>(b, walk, head, tile), ahead.bias);
        }
    } else if constexpr (S::IS_STAGED) {
        GPU_UNROLL
        for (int n = 0; n < S::MASK_WORDS / 4; n++) {
            if (b.staged) {
                mma_load_transposed(ahead.mask + 4 * n, from + 2 * n * step);
            }
        }
    }
}

/* Evaluates the bias or mask that has been read, or reads a mask that is not staged. */
template <class S>
GPU_DEVICE void wgmma_evaluate_term(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                    wgmma_backward_walk<S> &walk, int head, int tile)
{
    wgmma_ahead<S> &ahead = walk.ahead;
    const bool staged = S::IS_STAGED && b.staged;
    if (!wgmma_is_mixed<S>(ahead)) {
        return;
    }
    if constexpr (S::KNOWN == FATTN_BIAS) {
        if constexpr (S::READS_ROWS) {
            wgmma_transpose_bias<S>(b, walk, ahead.bias);
        }
        ahead.large = wgmma_bias_large<S>(ahead.bias);
    }
    if constexpr (S::KNOWN == FATTN_MASK && S::READS_ROWS) {
        ahead.mask_keeps = wgmma_transpose_bits(wgmma_bits_of_bytes(ahead.mask));
        return;
    }
    uint32_t pairs = 0;
    if (staged) {
        if constexpr (S::KNOWN == FATTN_MASK) {
            pairs = wgmma_mask_pairs<S>(ahead.mask);
        }
        __syncwarp();
        wgmma_release(&b.control->term_empty[walk.term.stage]);
        wgmma_ring_advance(walk.term);
    }
    if (!S::IS_LEAN && mma_has<S>(g, FATTN_MASK)) {
        if (staged) {
            const int from = mma_lane() / 8 * 4 + mma_lane() % 4; /* whose keys c / 2 are */
            ahead.mask_keeps = (uint32_t)__shfl_sync(0xffffffffu, (int)pairs, from);
            ahead.others = (uint32_t)__shfl_sync(0xffffffffu, (int)pairs, from + 16);
        } else {
            ahead.mask_keeps = wgmma_mask_bits<S>(g, wgmma_patch_of<S>(b, walk, head, tile));
        }
    }
}

/* Whether the run has dropout. */
template <class S> GPU_DEVICE bool wgmma_drops(const fattn_gpu_args &g)
{
    constexpr bool MAY = S::KNOWN == FATTN_DROPOUT || S::KNOWN == MMA_ANY;
    static_assert(!MAY || S::OWN_QUERIES <= 64, "a bit for each pair");
    return MAY && mma_has<S>(g, FATTN_DROPOUT);
}

/* Sets up dropout for an item. */
template <class S>
GPU_DEVICE void wgmma_drop_begin(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                 wgmma_backward_walk<S> &walk)
{
    if (wgmma_drops<S>(g)) {
        const wgmma_backward_item &w = b.control->item[walk.item];
        const wgmma_patch at = wgmma_patch_of<S>(b, walk, 0, 0);
        const bool together = (w.q_position | w.k_position) % 16 == 0;
        walk.drop.dropout = b.control->dropout;
        walk.drop.dropout.threshold = together ? walk.drop.dropout.threshold : 0;
        walk.drop.column = fattn_dropout_column(w.k_position + at.j);
        walk.drop.rows = fattn_dropout_rows_at(w.q_position, (uint32_t)(at.i + mma_lane() / 4 % 2),
                                               (uint32_t)(g.problem.batch_offset + at.b),
                                               (uint32_t)(g.problem.head_offset + at.h));
    }
}

/* Find which pairs of a tile dropout keeps. The generator is called while products run: EARLY_CALLS
 * times beside one group of them, and the other times beside the next group. */
template <class S>
GPU_DEVICE void wgmma_drop_early(const fattn_gpu_args &g, wgmma_backward_walk<S> &walk, int head,
                                 int tile)
{
    if (wgmma_drops<S>(g) && walk.drop.dropout.threshold) {
        walk.ahead.dropout_keeps = wgmma_calls<S, 0, S::EARLY_CALLS>(walk.drop, head, tile);
    }
}

template <class S>
GPU_DEVICE void wgmma_drop_late(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                wgmma_backward_walk<S> &walk, int head, int tile)
{
    if (wgmma_drops<S>(g)) {
        wgmma_ahead<S> &ahead = walk.ahead;
        if (walk.drop.dropout.threshold) {
            ahead.dropout_keeps |= wgmma_calls<S, S::EARLY_CALLS, S::CALLS>(walk.drop, head, tile);
            ahead.others = __shfl_xor_sync(0xffffffffu, ahead.dropout_keeps, 4);
        } else {
            ahead.dropout_keeps =
                wgmma_dropout_singly<S>(g, b.control->dropout, b.control->item[walk.item],
                                        wgmma_patch_of<S>(b, walk, head, tile));
        }
    }
}

/* Combines bits from other lanes, when the products of the tile before are complete. */
template <class S>
GPU_DEVICE void wgmma_join_ahead(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                 wgmma_backward_walk<S> &walk)
{
    wgmma_ahead<S> &ahead = walk.ahead;
    if (wgmma_drops<S>(g) && walk.drop.dropout.threshold) {
        ahead.dropout_keeps = wgmma_join_calls(ahead.dropout_keeps, ahead.others);
    }
    if (S::IS_STAGED && S::KNOWN == FATTN_MASK && b.staged && wgmma_is_mixed<S>(ahead)) {
        ahead.mask_keeps = wgmma_join_pairs(ahead.mask_keeps, ahead.others);
    }
}

/* Computes P of a tile from scores in x: rounded, in p; and in x, the factor of dP - delta. */
template <class S>
GPU_DEVICE void
wgmma_weigh_fully(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                  const wgmma_backward_walk<S> &walk, const float lse[S::OWN_QUERIES / 8][2],
                  float x[S::OWN_QUERIES / 8][4], uint32_t p[S::OWN_QUERIES / 16][4])
{
    const wgmma_backward_item &w = b.control->item[walk.item];
    wgmma_pairs t = {};
    t.at = wgmma_patch_of<S>(b, walk, walk.head, walk.tile);
    if (mma_has<S>(g, FATTN_ALIBI)) {
        t.slope = walk.slope;
        t.distance = (float)(t.at.i + w.diagonal - t.at.j);
    }
    const bool hidden = S::KNOWS_HALVES && !walk.ahead.mixed;
    if (hidden || walk.tile < walk.full || walk.tile >= walk.full_past ||
        (walk.tile + 1) * S::QUERIES > w.queries) {
        const int from = t.at.j - w.block * S::KEYS - t.at.i;
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const bool exists = 8 * h < t.at.keys && !hidden;
            const int past = exists ? w.past_query + from + 8 * h : -WGMMA_UNBOUNDED;
            t.first[h] = w.first_query + from + 8 * h;
            t.past[h] = min(past, t.at.queries);
        }
        wgmma_weigh<S, true>(g, walk.ahead, t, lse, x, p);
    } else {
        wgmma_weigh<S, false>(g, walk.ahead, t, lse, x, p);
    }
}

/* Sets the walk to the beginning of an item. */
template <class S>
GPU_DEVICE void wgmma_walk_begin(const fattn_problem &p, const wgmma_backward_item &w, int item,
                                 wgmma_backward_walk<S> &walk)
{
    const bool shared = p.features & (FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_Q);
    walk.item = item;
    walk.tile = w.start;
    walk.head = 0;
    walk.dq_pending = false;
    walk.full = w.full;
    walk.full_past = w.full_past;
    walk.tail = shared && w.queries % S::QUERIES ? w.queries / S::QUERIES : -1;
}

template <class S>
GPU_DEVICE void wgmma_walk_set(const fattn_gpu_args &g, const wgmma_backward_block<S> &b, int group,
                               wgmma_backward_walk<S> &walk)
{
    const int t = wgmma_thread(), lane = t % 32, warp = t / 32;
    walk.group = group;
    walk.q = walk.q_used = {0, 0};
    walk.dout = {0, 0};
    walk.term = {0, 0};
    walk.visits = 0;
    walk.ds = 0;
    walk.ds_phase = 0;
    /* The lane's row in the matrices of 8 keys by 8 queries that stmatrix stores, keys first. */
    const int query = lane % 8 + lane / 16 * 8, key = 16 * warp + lane / 8 % 2 * 8;
    const int first_query = S::IS_PAIR ? group * S::OWN_QUERIES : 0;
    const int first_key = S::IS_PAIR ? 0 : 64 * group;
    walk.ds_put = b.ds + wgmma_offset(S::QUERIES, (uint32_t)(first_query + query),
                                      (uint32_t)(first_key + key));
    const int channel = wgmma_row(t, 0), row = group * S::PART % S::QUERIES + wgmma_column(t, 0);
    walk.dq_put = b.dq + group * S::PART / S::QUERIES * S::QUERIES * 256 +
                  group * (S::DQ_ROOM - S::PART_BYTES) +
                  4 * wgmma_sum_offset(S::QUERIES, (uint32_t)row, (uint32_t)channel);
    if (S::IS_STAGED) {
        walk.term_offset = wgmma_term_offset<S>(g, group);
    }
}

#endif
