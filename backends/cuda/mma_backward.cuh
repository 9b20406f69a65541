/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on tensor cores, for 16-bit types: FlashAttention-2's loop (Dao 2023, algorithm 2) with
 * mma.sync. Its equations are those of simt_backward.cuh.
 *
 * A block owns a tile of keys, with dK and dV in accumulator fragments. It visits the queries that
 * attend to them, head by head of the group:
 *
 *     S^T = K Q^T        P^T = exp(S^T - lse)               dV += P^T dO
 *     dP^T = V dO^T      dS^T = P^T (dP^T - delta)          dK += dS^T Q         dQ += dS K
 *
 * Shared-memory reads limit its speed. So all five products are divided into parts of 32 rows per
 * warp, which cover the tile differently in each product, and P and dS pass through shared memory.
 *
 * dQ is a sum over blocks, which add to it in floats of the workspace. They do so in any order, so
 * that two runs may differ in the last bits; or, in deterministic runs, in turn
 * (mma_backward_items.cuh). A run launches
 *
 *     clear                             zeros for dBias
 *     rows_W                            lse and delta of every row, and zeros for its dQ; and the
 *                                       descriptions of the items of lean kernels
 *     mma_backward_variant_type_W_...   dK, dV, dBias, and dQ in the workspace
 *     dq_W                              dQ in its own type
 *     sink_W                            dSink
 */
#ifndef FATTN_CUDA_MMA_BACKWARD_CUH
#define FATTN_CUDA_MMA_BACKWARD_CUH

#include "backends/cuda/mma_backward_items.cuh"

/* --- A tile of keys --------------------------------------------------------------------------- */

/* Computes one tile. word, in thread 0: in a deterministic run the result of mma_turn_peek(); in a
 * lean kernel, if the tile is the item's last, the number of the next item. */
template <class S>
GPU_DEVICE void mma_keys_tile(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage,
                              const int &head, const int &tile, const int &kind, int32_t word,
                              bool last, mma_sums<S> &sums)
{
    typedef typename S::type T;
    enum { P = S::WIDTH, Q = S::QUERIES, N = S::PART_QUERIES / 16 };
    const int key = mma_part_key<S>(), query = mma_part_query<S>();
    const int64_t i0 = (int64_t)tile * S::QUERIES;
    float x[2][2 * N][4] = {}, dp[2][2 * N][4] = {};
    mma_tile_dots<S>(s.k, key, s.q[stage], query, x);
    mma_tile_dots<S>(s.v, key, s.dout[stage], query, dp);
    if (mma_is_lean(S::VARIANT)) {
        mma_turn_take<S>(g, s.job, head, tile, word);
    }
    if constexpr (S::VARIANT == MMA_LEAN) {
        if (gpu_thread_anew() == 0 && last) {
            s.number = word;
        }
    }
    if (mma_is_lean(S::VARIANT)) {
        if (g.rule.terms) { /* a scale that cannot be part of the unit */
            GPU_UNROLL
            for (int n = 0; n < 16 * N; n++) {
                x[n / (8 * N)][n / 4 % (2 * N)][n % 4] *= g.rule.scale;
            }
        }
        if (S::VARIANT == MMA_LEAN ? tile < s.job.full || tile >= s.job.full_past
                                   : kind & MMA_BAND) {
            mma_apply_band_of_keys<S>(s.job, S::VARIANT == MMA_LEAN ? i0 : (int64_t)tile * Q, x);
        }
        mma_differentiate<S>(g.rule.unit, s, stage, x, dp);
    } else {
        const auto patch = [&] { return mma_patch_of<S>(g, s.job, head, tile); };
        mma_wait<1>(); /* for the terms; the next tile may be in flight */
        mma_differentiate_fully<S>(g, s, stage, patch, kind, x, dp);
    }
    gpu_sync();
    if constexpr (S::VARIANT == MMA_LEAN) {
        if (last) {
            mma_next_read<S>(g, s);
        }
    }

    mma_dq_part<S> part = {};
    mma_dq_make<S>(g, s, head, S::VARIANT == MMA_LEAN ? i0 : (int64_t)tile * Q, part);
    if constexpr (S::VARIANT == MMA_LEAN) {
        if (last) {
            mma_next_begin<S>(g, s, stage ^ 1);
        }
    }
    /* The additions to dQ are issued one by one between the other products: all at once, they would
     * stall. */
    enum { SLOTS = S::PART_CHANNELS / 16 * (Q / 16) };
    const int chunk = mma_sums_channel<S>() / 8;
    mma_times<T, Q, P, 2, S::PART_CHANNELS / 16, Q / 16, false>(
        mma_rows_a<Q>(s.p, key), mma_columns_b<P>(s.dout[stage], 0, chunk), sums.dv,
        [&](int i) { mma_dq_add<S>(part, i, 2 * SLOTS); });
    mma_times<T, Q, P, 2, S::PART_CHANNELS / 16, Q / 16, false>(
        mma_rows_a<Q>(s.ds, key), mma_columns_b<P>(s.q[stage], 0, chunk), sums.dk,
        [&](int i) { mma_dq_add<S>(part, SLOTS + i, 2 * SLOTS); });
}

/* MMA_BAND and MMA_BLOCKS of a tile, or -1 if block masks hide all of it. Deterministic runs never
 * get -1, because blocks take turns at every tile. */
template <class S>
GPU_DEVICE int mma_kind_of(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    const int kind = tile < job.full || tile >= job.full_past ? MMA_BAND : 0;
    if (!mma_has<S>(g, FATTN_BLOCK_MASK)) {
        return kind;
    }
    const int64_t i0 = (int64_t)tile * S::QUERIES,
                  i1 = fattn_min64(i0 + S::QUERIES, job.pairs.seq.sq);
    const int64_t j1 = job.j0 + fattn_min64(job.keys, S::KEYS), h = job.hk * job.group + head;
    const gpu_mask_blocks found =
        gpu_mask_blocks_of(g, job.pairs, i0, i1, h, 1u, job.j0, j1, gpu_thread(), S::THREADS);
    if (!gpu_any(found.kept)) {
        return mma_is_ordered<S>(g) ? kind | MMA_BLOCKS : -1;
    }
    return gpu_any(found.dropped) ? kind | MMA_BLOCKS : kind;
}

/* The first tile from this one on that is not empty, or one with a head past the last. All threads
 * must call it. */
template <class S>
GPU_DEVICE mma_visit mma_seek(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    mma_visit step = {head, tile, 0};
    for (;;) {
        if (step.tile == job.past) {
            step.tile = job.first;
            step.head++;
        }
        if (step.head >= job.group) {
            break;
        }
        step.kind = mma_kind_of<S>(g, job, step.head, step.tile);
        if (step.kind >= 0) {
            break;
        }
        step.tile++;
    }
    return step;
}

/* Visits the queries of every head of the group, in kernels that are not MMA_LEAN. The position of
 * this walk is in shared memory, since registers are short. */
template <class S>
GPU_DEVICE void mma_keys_walk_fully(const fattn_gpu_args &g, mma_backward_scratch<S> &s,
                                    mma_sums<S> &sums)
{
    const mma_job &job = s.job;
    int stage = 0;
    if (job.first >= job.past) {
        return;
    }
    const mma_visit one = mma_seek<S>(g, job, 0, job.first);
    if (gpu_thread_anew() == 0) {
        s.job.step[0] = one;
    }
    if (one.head < job.group) {
        mma_copy_queries<S>(g, s, job, 0, one.head, one.tile);
    }
    gpu_sync();
    for (; job.step[stage].head < job.group; stage ^= 1) {
        const mma_visit &now = job.step[stage];
        const mma_visit next = mma_seek<S>(g, job, now.head, now.tile + 1);
        mma_wait<0>();
        gpu_sync(); /* all threads' copies have landed, and all have read the other tile */
        if (gpu_thread_anew() == 0) {
            s.job.step[stage ^ 1] = next;
        }
        const int32_t added =
            mma_is_lean(S::VARIANT) ? mma_turn_peek<S>(g, job, now.head, now.tile) : 0;
        if (!mma_is_lean(S::VARIANT)) {
            const int mode = mma_mode<S>(job, now.kind);
            if (mode) {
                mma_stage<S>(g, job.pairs, mma_patch_of<S>(g, job, now.head, now.tile), s.p, mode,
                             job.staging & MMA_ONE_BY_ONE);
            }
            mma_commit();
        }
        if (next.head < job.group) {
            mma_copy_queries<S>(g, s, job, stage ^ 1, next.head, next.tile);
        } else {
            mma_commit(); /* so that the terms are the last group but one */
        }
        if (!mma_is_lean(S::VARIANT)) { /* earlier than lean kernels, since registers are short */
            mma_turn_take<S>(g, s.job, now.head, now.tile, -1);
        }
        mma_keys_tile<S>(g, s, stage, now.head, now.tile, now.kind, added, false, sums);
    }
    if (mma_is_ordered<S>(g)) {
        gpu_sync();
        if (gpu_thread_anew() == 0) {
            mma_turn_pass(s.job);
        }
    }
}

/* Writes eight channels from c on, a multiple of 8, of row `at` of a gradient, or adds to them. x
 * is in shared memory. chunks: rows begin at multiples of 16 bytes. */
template <class S>
GPU_DEVICE void mma_store_chunk(const gpu_tensor &t, int64_t at, int c, bool chunks, bool adds,
                                const float *x)
{
    if (chunks && !adds && c + 8 <= t.dim) {
        const gpu_f4 low = *(const gpu_f4 *)x, high = *(const gpu_f4 *)(x + 4);
        if constexpr (S::type::PLANES == 1) {
            gpu_u4 eight;
            eight.x = S::type::pack(low.x, low.y), eight.y = S::type::pack(low.z, low.w);
            eight.z = S::type::pack(high.x, high.y), eight.w = S::type::pack(high.z, high.w);
            *(gpu_u4 *)((uint16_t *)t.data + at + c) = eight;
        } else {
            gpu_f4 *const to = (gpu_f4 *)((float *)t.data + at + c);
            to[0] = low, to[1] = high;
        }
        return;
    }
    GPU_ROLLED
    for (int e = 0; e < 8 && c + e < t.dim; e++) {
        const float old = adds ? ((const float *)t.data)[at + c + e] : 0;
        gpu_store(t.data, t.dtype, at + c + e, old + x[e]);
    }
}

/* Stores the warp's part of dk or dv, times `factor`. It stages eight rows at a time in its share
 * of `room`. Keys that belong to the sequence but are beyond its used length get 0. The code runs
 * once an item, and is written to be short. */
template <class S>
GPU_DEVICE void mma_store_keys(const fattn_gpu_args &g, const mma_job &job, float *room,
                               const gpu_tensor &t, bool chunks, const fattn_strides &stride,
                               float factor,
                               const float sum[S::SUMS_TILES][S::PART_CHANNELS / 8][4])
{
    enum { CHUNKS = S::PART_CHANNELS / 8 };
    const bool adds = g.problem.features & FATTN_ACCUMULATE;
    const fattn_sequence &seq = job.pairs.seq;
    const int64_t from = gpu_key_at(g, seq, stride, job.pairs.b, job.hk, job.j0);
    const int owned = (int)fattn_min64((adds ? seq.sk : seq.slot_k) - job.j0, S::KEYS);
    const int row = mma_lane() / 4;
    room += mma_warp() * 8 * S::PART_CHANNELS;
    GPU_UNROLL
    for (int e = 0; e < 2 * S::SUMS_TILES; e++) {
        GPU_UNROLL
        for (int n = 0; n < CHUNKS; n++) {
            gpu_f2 two;
            two.x = sum[e / 2][n][e % 2 * 2] * factor;
            two.y = sum[e / 2][n][e % 2 * 2 + 1] * factor;
            *(gpu_f2 *)(room + 8 * (row * CHUNKS + (n ^ row % CHUNKS)) + mma_lane() % 4 * 2) = two;
        }
        __syncwarp();
        GPU_ROLLED
        for (int n = mma_lane(); n < 8 * CHUNKS; n += GPU_WAVE) {
            const int r = n / CHUNKS, c = n % CHUNKS, place = mma_sums_key<S>() + 8 * e + r;
            const int key = mma_is_lean(S::VARIANT) ? place : mma_key_of(place);
            float *const x = room + 8 * (r * CHUNKS + (c ^ r % CHUNKS));
            if (key >= job.keys) {
                *(gpu_f4 *)x = *(gpu_f4 *)(x + 4) = gpu_f4{0, 0, 0, 0};
            }
            if (key < owned) {
                mma_store_chunk<S>(t, from + key * stride.seq, mma_sums_channel<S>() + 8 * c,
                                   chunks, adds, x);
            }
        }
        __syncwarp();
    }
}

/* Stores dK and dV of an item, staged in the room of P and dS. */
template <class S, class Scratch>
GPU_DEVICE void mma_store_sums(const fattn_gpu_args &g, Scratch &s, const mma_sums<S> &sums)
{
    static_assert(sizeof s.p + sizeof s.ds >= S::THREADS * S::PART_CHANNELS, "8 rows a warp");
    const fattn_problem &p = g.problem;
    const mma_job &job = s.job;
    float *const room = (float *)s.p;
    gpu_sync(); /* all threads have read P and dS */
    if (p.outputs & FATTN_OUT_DK) {
        const gpu_tensor dk =
            gpu_tensor_of(g, g.buffers.dk, g.dtype_gradient, FATTN_GPU_QUADS_DK, p.dim);
        mma_store_keys<S>(g, job, room, dk, g.chunks & FATTN_GPU_QUADS_DK, p.dk, g.rule.scale,
                          sums.dk);
    }
    if (p.outputs & FATTN_OUT_DV) {
        const gpu_tensor dv =
            gpu_tensor_of(g, g.buffers.dv, g.dtype_gradient, FATTN_GPU_QUADS_DV, p.dim_v);
        const bool dropout = !mma_is_lean(S::VARIANT) && p.features & FATTN_DROPOUT;
        mma_store_keys<S>(g, job, room, dv, g.chunks & FATTN_GPU_QUADS_DV, p.dv,
                          dropout ? job.pairs.dropout.multiplier : 1, sums.dv);
    }
}

/* Skips the first tiles of queries of the item that a bias hides from all of its keys. Not for
 * deterministic runs, in which blocks take turns at every tile. */
template <class S>
GPU_DEVICE void mma_skip_hidden(const fattn_gpu_args &g, mma_backward_scratch<S> &s)
{
    const mma_job &job = s.job;
    const int64_t j1 = job.j0 + fattn_min64(job.keys, S::KEYS), sq = job.pairs.seq.sq;
    const int64_t first = gpu_visible_first(g, job.pairs, job.j0, j1, job.hk * job.group, job.group,
                                            (int64_t)job.first * S::QUERIES,
                                            fattn_min64((int64_t)job.past * S::QUERIES, sq));
    gpu_sync(); /* all threads have read s.job */
    if (gpu_thread_anew() == 0) {
        s.job.first = first < sq ? (int)(first / S::QUERIES) : job.past;
    }
    gpu_sync();
}

/* Processes the item of s.job, in kernels that are not MMA_LEAN. */
template <class S>
GPU_DEVICE void mma_backward_item(const fattn_gpu_args &g, mma_backward_scratch<S> &s)
{
    const fattn_problem &p = g.problem;
    const mma_job &job = s.job;
    if (job.j0 >= job.pairs.seq.slot_k) {
        return;
    }
    if (mma_has<S>(g, FATTN_BIAS) && !mma_is_ordered<S>(g)) {
        mma_skip_hidden<S>(g, s);
    }
    mma_sums<S> sums = {};
    mma_copy_keys<S>(s.k, (const uint16_t *)job.k, p.k.seq, (int)p.dim, job.keys,
                     !(g.chunks & FATTN_GPU_QUADS_K));
    mma_copy_keys<S>(s.v, (const uint16_t *)job.v, p.v.seq, (int)p.dim_v, job.keys,
                     !(g.chunks & FATTN_GPU_QUADS_V));
    mma_keys_walk_fully<S>(g, s, sums);
    mma_wait<0>();
    mma_store_sums<S>(g, s, sums);
}

/* Visits the queries in MMA_LEAN kernels. stage: of the item's first tile; on return, of the next
 * item's first tile. */
template <class S>
GPU_DEVICE void mma_keys_walk(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int &stage,
                              mma_sums<S> &sums)
{
    const int first = s.job.first, past = s.job.past, heads = (int)s.job.group;
    int head = 0, tile = first;
    while (head < heads) {
        const int h = head, t = tile;
        if (++tile == past) {
            tile = first;
            head++;
        }
        int32_t number = 0; /* of the next item; in thread 0 */
        mma_wait<0>();
        gpu_sync(); /* all threads' copies have landed, and all have read the other tile */
        if (head < heads) {
            mma_copy_queries<S>(g, s, s.job, stage ^ 1, head, tile);
        } else if (gpu_thread_anew() == 0) {
            number = mma_next_take<S>(g);
        }
        mma_keys_tile<S>(g, s, stage, h, t, 0, number, head == heads, sums);
        stage ^= 1;
    }
}

/* Processes the items of an MMA_LEAN kernel. */
template <class S>
GPU_DEVICE void mma_backward_stream(const fattn_gpu_args &g, mma_backward_scratch<S> &s)
{
    enum { WORDS = sizeof(mma_job) / 4 };
    int stage = 0;
    mma_next_fetch<S>(g, s, gpu_block(), stage);
    while (s.number < mma_items(g)) {
        if (gpu_thread_anew() < WORDS) {
            ((uint32_t *)&s.job)[gpu_thread_anew()] = ((uint32_t *)&s.next)[gpu_thread_anew()];
        }
        gpu_sync(); /* the item */
        mma_sums<S> sums = {};
        if (s.job.first < s.job.past) {
            mma_keys_walk<S>(g, s, stage, sums);
        } else {
            mma_next_fetch<S>(g, s, gpu_thread_anew() == 0 ? mma_next_take<S>(g) : 0, stage);
        }
        mma_store_sums<S>(g, s, sums);
        gpu_sync(); /* all threads have read the item */
    }
}

template <class S> GPU_DEVICE void mma_backward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_backward_scratch<S>) <=
                      MMA_BACKWARD_SHARED(S::WIDTH, S::QUERIES, S::KEYS),
                  "too small");
    extern __shared__ char shared[];
    mma_backward_scratch<S> &s = *(mma_backward_scratch<S> *)shared;
    if constexpr (S::VARIANT == MMA_LEAN) {
        mma_backward_stream<S>(g, s);
        return;
    }
    const int64_t items = mma_items(g);
    if (gpu_thread() == 0) {
        s.job.number = gpu_block() - gpu_blocks();
    }
    do {            /* the number is in shared memory, to save a register */
        gpu_sync(); /* the item before may still be read */
        if (gpu_thread() == 0) {
            const int64_t number = mma_take<S>(g, s.job.number);
            s.job.number = number;
            if (number < items) {
                mma_job_set<S>(g, mma_tile_of<S>(g, number), s.job);
            }
        }
        gpu_sync();
        if (s.job.number < items) {
            mma_backward_item<S>(g, s);
        }
    } while (s.job.number < items);
}

#endif
