/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of an item in forward on Hopper (wgmma_forward.cuh): rows of o and lse, parts of them, or
 * rows merged with those of other keys.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_END_CUH
#define FATTN_CUDA_WGMMA_FORWARD_END_CUH

#include "backends/cuda/wgmma_forward_softmax.cuh"

/* Stores eight channels of a row of o. (gpu_store_eight() would do the same, but then ptxas reloads
 * a spilled register between the products of 256 channels.) */
template <class S>
GPU_DEVICE void wgmma_store_eight(const fattn_gpu_args &g, int64_t at, int c, const uint32_t x[4])
{
    const int live = (int)g.problem.dim_v - c;
    uint16_t *const to = (uint16_t *)g.buffers.o + at + c;
    if (live >= 8 && g.chunks & FATTN_GPU_QUADS_O) {
        gpu_u4 eight;
        eight.x = x[0], eight.y = x[1], eight.z = x[2], eight.w = x[3];
        *(gpu_u4 *)to = eight;
        return;
    }
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        if (e < live) {
            to[e] = (uint16_t)(x[e / 2] >> e % 2 * 16);
        }
    }
}

/* Calls store(h) for each of a thread's two rows. Where fewer misses of the instruction cache pay,
 * one piece of code serves both. */
template <class S, class Store> GPU_DEVICE void wgmma_each_row(const Store &store)
{
    if constexpr (S::HALVES || (S::IS_STAGED && S::WARPGROUPS == 1)) {
        GPU_ROLLED
        for (int h = 0; h < 2; h++) {
            store(h);
        }
    } else {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            store(h);
        }
    }
}

/* Stores rows of o in the input's type. A warp stages its sums in shared memory, 64 channels of
 * eight rows at a time, swizzled like a tile, so that eight lanes store 128 bytes of a row. row:
 * the warp's first; factor, empty: of each of the thread's two rows. */
template <class S>
GPU_DEVICE void wgmma_store_pairs(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                  const wgmma_item &w, int row, const float factor[2],
                                  const bool empty[2], const wgmma_rows<S> &rows)
{
    const fattn_strides stride = g.problem.o;
    const int lane = mma_lane(), warp = gpu_thread() / 32 - S::FIRST_WARP;
    const uint32_t out = b.out + warp * WGMMA_OUT_BYTES;
    const uint32_t to = out + lane / 4 * 128 + lane % 4 * 4, swizzle = lane / 4 << 4;
    const uint32_t from = out + lane / 8 * 128;
    const int first = wgmma_first_channel<S>();
    const auto store = [&](int h) {
        const float own = h ? factor[1] : factor[0];
        const bool none = h ? empty[1] : empty[0];
        int64_t at[2];
        bool exists[2];
        GPU_UNROLL
        for (int k = 0; k < 2; k++) { /* rows lane / 8 and 4 later */
            const int r = row + 8 * h + 4 * k + lane / 8, i = wgmma_query(b, r);
            at[k] = w.o + i * stride.seq + (r - i * b.group) * stride.head;
            exists[k] = r < w.rows;
        }
        GPU_UNROLL
        for (int panel = 0; panel < S::PANELS_V; panel++) {
            GPU_UNROLL
            for (int n = 0; n < 8 && 8 * panel + n < S::WIDTH_V / 8; n++) {
                const float *const four = rows.o[8 * panel + n];
                const float x = h ? four[2] : four[0], y = h ? four[3] : four[1];
                const uint32_t word = S::own_type::pack(x * own, y * own);
                mma_put(to + (swizzle ^ n << 4), none ? 0 : word);
            }
            __syncwarp();
            GPU_UNROLL
            for (int k = 0; k < 2; k++) {
                uint32_t x[4];
                mma_get<4>(from + 512 * k + ((lane % 8 ^ (4 * k + lane / 8)) << 4), x);
                if (exists[k]) {
                    wgmma_store_eight<S>(g, at[k], first + 64 * panel + lane % 8 * 8, x);
                }
            }
            __syncwarp();
        }
    };
    wgmma_each_row<S>(store);
}

/* The same in floats, without staging. */
template <class S>
GPU_DEVICE void wgmma_store_floats(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                   const wgmma_item &w, int row, const float factor[2],
                                   const bool empty[2], const wgmma_rows<S> &rows)
{
    const fattn_strides stride = g.problem.o;
    const int first = wgmma_first_channel<S>();
    wgmma_each_row<S>([&](int h) {
        const float own = h ? factor[1] : factor[0];
        const bool none = h ? empty[1] : empty[0];
        const int r = row + mma_lane() / 4 + 8 * h, i = wgmma_query(b, r);
        const int64_t at = w.o + i * stride.seq + (r - i * b.group) * stride.head;
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH_V / 4; n++) {
            const int c = first + n / 2 * 8 + mma_lane() % 4 * 2 + n % 2;
            const float *const four = rows.o[n / 2];
            const float x = h ? four[2 + n % 2] : four[n % 2];
            if (r < w.rows && c < g.problem.dim_v) {
                ((float *)g.buffers.o)[at + c] = none ? 0 : x * own;
            }
        }
    });
}

/* Stores a part of the rows, not yet divided by l, and its m and l. */
template <class S>
GPU_DEVICE void wgmma_store_part(const fattn_gpu_args &g, const wgmma_item &w, int number, int row,
                                 const float factor[2], const fattn_softmax state[2],
                                 const wgmma_rows<S> &rows)
{
    const bool pairs = g.problem.dim_v % 2 == 0; /* then each part has an even number of floats */
    const int first = wgmma_first_channel<S>();
    wgmma_each_row<S>([&](int h) {
        const float own = h ? factor[1] : factor[0];
        const int r = row + mma_lane() / 4 + 8 * h;
        const gpu_part part = gpu_part_of(g, number, r);
        float *const o = (float *)part.o.data + part.at;
        if (r < w.rows && mma_lane() % 4 == 0 && first == 0) {
            *part.m = h ? state[1].m : state[0].m;
            *part.l = h ? state[1].l : state[0].l;
        }
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH_V / 8; n++) {
            const int c = first + n * 8 + mma_lane() % 4 * 2;
            const float *const four = rows.o[n];
            const gpu_f2 pair = {(h ? four[2] : four[0]) * own, (h ? four[3] : four[1]) * own};
            if (r < w.rows && c < g.problem.dim_v) {
                if (pairs) {
                    *(gpu_f2 *)(o + c) = pair;
                } else {
                    o[c] = pair.x;
                    if (c + 1 < g.problem.dim_v) {
                        o[c + 1] = pair.y;
                    }
                }
            }
        }
    });
}

/* Adds the sink of row r, as mma_add_sink() does, to the first part. The sink is in natural units,
 * to which the row's reference is converted first. */
template <class S>
GPU_DEVICE float wgmma_add_sink(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                const wgmma_item &w, int r, bool first, fattn_softmax *state)
{
    float alpha, beta;
    state->m = S::IS_LEAN ? state->m * g.rule.scale : state->m;
    if (r >= w.rows || !first) {
        return 1;
    }
    const int h = w.q_head * b.group + r - wgmma_query(b, r) * b.group;
    const fattn_softmax sink = fattn_softmax_sink(((const float *)g.buffers.sink)[h]);
    fattn_softmax_merge(state, sink, g.rule.unit, &alpha, &beta);
    return alpha;
}

/* The query of sequence w.batch and the head of row r of an item, in batches that are not
 * ragged. */
template <class S>
GPU_DEVICE gpu_query wgmma_row_query(const wgmma_block<S> &b, const wgmma_item &w, int r)
{
    const int i = wgmma_query(b, r);
    gpu_query q;
    q.i = w.q_row + i;
    q.h = w.q_head * b.group + r - i * b.group;
    return q;
}

/* Prefetches to L2 the 16 rows with which a warp's own will be merged, while it multiplies. */
template <class S>
GPU_DEVICE void wgmma_prefetch_rows(const wgmma_block<S> &b, const wgmma_item &w, int row)
{
    const fattn_state &first = b.onto->first;
    const int lane = mma_lane(), r = row + lane / 2;
    const gpu_query q = wgmma_row_query(b, w, r);
    const float *const o = (const float *)first.o + fattn_state_row(&first, w.batch, q.h, q.i);
    for (int c = lane % 2 * 32; r < w.rows && c < b.onto->dim_v; c += 64) {
        mma_prefetch(o + c);
    }
}

/* Merges row r of the item, the thread's h-th, in kernels that merge rows. On entry its sums times
 * `factor` are o over the item's keys, and lse is that of these keys. On return the sums are o over
 * these keys and those of onto->first. The merged lse is stored. */
template <class S>
GPU_DEVICE void wgmma_merge_row(const wgmma_block<S> &b, const wgmma_item &w, int r, int h,
                                float lse, float factor, wgmma_rows<S> &rows)
{
    const fattn_merge_job &job = *b.onto;
    const gpu_query q = wgmma_row_query(b, w, r);
    const bool exists = r < w.rows;
    const float other = exists ? *fattn_state_lse(&job.first, w.batch, q.h, q.i) : lse;
    const gpu_weights weights = gpu_weights_of(other, lse);
    const float sum = weights.first + weights.second, share = sum == 0 ? 0 : 1 / sum;
    const float own = weights.no_second ? 0 : weights.second * share * factor;
    const float others = weights.first * share;
    const float *const o =
        (const float *)job.first.o + fattn_state_row(&job.first, w.batch, q.h, q.i);
    const int c = mma_lane() % 4 * 2;
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH_V / 8; n++) {
        gpu_f2 x = {0, 0};
        if (exists && !weights.no_first && 8 * n + c < job.dim_v) {
            x = *(const gpu_f2 *)(o + 8 * n + c);
        }
        float *const pair = rows.o[n] + 2 * h;
        pair[0] = weights.no_second ? x.x : fmaf(pair[0], own, others * x.x);
        pair[1] = weights.no_second ? x.y : fmaf(pair[1], own, others * x.y);
    }
    __syncwarp(); /* all lanes have read the old lse, which the new one may overwrite */
    if (exists && mma_lane() % 4 == 0) {
        *fattn_state_lse(&job.result, w.batch, q.h, q.i) = weights.lse;
    }
}

/* Writes rows to o and lse, or parts to the workspace. row: the warp's first; z_kept: Z of a pair
 * that dropout keeps. */
template <class S>
GPU_DEVICE void wgmma_end(const fattn_gpu_args &g, const wgmma_block<S> &b, int slot, int row,
                          float z_kept, const wgmma_factors &factors, wgmma_rows<S> &rows)
{
    const fattn_problem &p = g.problem;
    const wgmma_item &w = b.control->item[slot];
    wgmma_part part = {0, 0, true};
    if constexpr (S::IS_SPLIT) {
        part = b.control->part[slot];
    }
    fattn_softmax states[2];
    float factor[2];
    bool empty[2];
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const float lower = 1.0f / (1 << S::type::LIFT);
        const int r = row + mma_lane() / 4 + 8 * h;
        fattn_softmax state = rows.state[h];
        const float base = fattn_softmax_base(state);
        const float unit = wgmma_units_of<S>(g, factors).row[h];
        float added = mma_rounding<S>(g, S::type::weight(rows.top[h], unit, base)) * lower;
        state.l = mma_quad_sum(state.l) * lower;
        if constexpr (S::WIDENS) {
            state.m = wgmma_reference(g, state.m, factors.row[h]);
        }
        if (p.features & FATTN_SINK) {
            const float alpha = wgmma_add_sink(g, b, w, r, part.split == 0, &state);
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH_V / 4; n++) { /* not in factor: alpha may be tiny */
                rows.o[n / 2][2 * h + n % 2] *= alpha;
            }
            added *= alpha;
        }
        states[h] = state;
        empty[h] = state.l == 0;
        const float share = mma_reciprocal(state.l + added); /* l is 0, or about 1 */
        factor[h] = lower * z_kept * (part.whole ? share : mma_part_factor(state.l, share, added));
        factor[h] = S::WIDENS ? factor[h] * factors.v : factor[h];
        if constexpr (S::MERGES) {
            const float lse = fattn_softmax_lse(state, g.rule.natural);
            wgmma_merge_row(b, w, r, h, lse, factor[h], rows);
            factor[h] = 1;
            empty[h] = false;
        } else if (p.outputs & FATTN_OUT_LSE && part.whole && r < w.rows && mma_lane() % 4 == 0 &&
                   wgmma_first_channel<S>() == 0) {
            const int i = wgmma_query(b, r);
            ((float *)g.buffers.lse)[w.lse + (r - i * b.group) * p.total_q + i] =
                fattn_softmax_lse(state, g.rule.natural);
        }
    }
    if (!part.whole) {
        wgmma_store_part<S>(g, w, part.number, row, factor, states, rows);
        return;
    }
    if (!(p.outputs & FATTN_OUT_O)) {
        return;
    }
    if (p.dtype_o == FATTN_F32) {
        wgmma_store_floats(g, b, w, row, factor, empty, rows);
    } else {
        wgmma_store_pairs(g, b, w, row, factor, empty, rows);
    }
}

#endif
