/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward by plain multiply-adds: any GPU, any head dimension, every feature.
 *
 * A block takes an item of the schedule, that is, a tile of rows of one key/value head and a part
 * of its keys. It visits these a tile at a time:
 *
 *     x = Q K^T                scores, with every feature of score.h
 *     p                        online softmax; each of a row's TX threads has its own partial l
 *     o = o alpha + p V
 *
 * If the keys are one part, the block writes o and lse. If there are several, each leaves {m, l, o}
 * in the workspace, and they are merged in ascending order: by the last block of a decoded head, or
 * by the kernel `combine`. If a block's registers cannot hold all channels of o, it computes a slab
 * of W of them, and the scores are computed once for each slab.
 */
#ifndef FATTN_GPU_SIMT_FORWARD_CUH
#define FATTN_GPU_SIMT_FORWARD_CUH

#include "backends/gpu/combine.cuh"
#include "backends/gpu/forward_rows.cuh"
#include "backends/gpu/tile.cuh"

typedef gpu_shape<4, 16> gpu_rows_64;
typedef gpu_shape<2, 8> gpu_rows_16; /* decoding */

template <class S> struct gpu_forward_scratch : gpu_scratch<S> {
    gpu_forward_job job;
    gpu_query query[S::ROWS];
    int64_t q_at[S::ROWS], k_at[GPU_COLS], v_at[GPU_COLS];
    int64_t parts; /* how many parts the rows have, if blocks count them */
};

/* A thread's rows. */
template <class S, int W> struct gpu_forward {
    fattn_softmax state[S::TM]; /* l: over the thread's own columns */
    float o[S::TM][W / GPU_TX];
};

/* Sets up the rows of the tile: where they are, and their states before the first key. */
template <class S, int W>
GPU_DEVICE void gpu_forward_begin(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                  gpu_forward<S, W> &f)
{
    const fattn_gpu_args &g = gpu_anew(args);
    for (int r = gpu_thread(); r < S::ROWS; r += S::THREADS) {
        const gpu_query q = gpu_forward_query(s.job, r);
        s.query[r] = q;
        s.q_at[r] = q.h < 0 ? -1 : gpu_query_at(s.job.pairs.seq, g.problem.q, q.i, q.h);
    }
    gpu_sync();
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const gpu_query q = s.query[gpu_ty() * S::TM + m];
        f.state[m] = gpu_forward_start(g, s.job, q, gpu_tx() == 0);
        GPU_UNROLL
        for (int c = 0; c < W / GPU_TX; c++) {
            f.o[m][c] = 0;
        }
    }
}

/* Turns dot products in x into scores that have no terms but the scale and the band. */
template <class S>
GPU_DEVICE void gpu_forward_keep(const fattn_gpu_args &args, const gpu_forward_scratch<S> &s,
                                 unsigned terms, int64_t j0, float x[S::TM][GPU_TN])
{
    const fattn_score_rule rule = gpu_forward_rule(gpu_anew(args), s.job);
    const int tx = gpu_tx(), ty = gpu_ty();
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const fattn_range keys = fattn_band_row(&s.job.pairs.band, s.query[ty * S::TM + m].i);
        GPU_UNROLL
        for (int n = 0; n < GPU_TN; n++) {
            const int64_t j = j0 + tx * GPU_TN + n;
            float dscore;
            fattn_score_pair pair;
            pair.keep = !(terms & FATTN_SCORE_KEEP) || (keys.first <= j && j < keys.past);
            x[m][n] = fattn_score(&rule, (terms & FATTN_SCORE_SCALE) | FATTN_SCORE_KEEP, x[m][n],
                                  pair, &dscore);
        }
    }
}

/* The same with every feature. The features take much code. So that it exists only once, it is in a
 * loop over the thread's elements, which are moved to shared memory because registers cannot be
 * indexed at run time. */
template <class S>
GPU_DEVICE void gpu_forward_score(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                  unsigned terms, int64_t j0, float x[S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const unsigned few = FATTN_SCORE_SCALE | FATTN_SCORE_KEEP;
    if (!terms) {
        return;
    }
    if (!(terms & ~few) && !(g.problem.features & (FATTN_MASK | FATTN_BLOCK_MASK))) {
        gpu_forward_keep<S>(g, s, terms, j0, x);
        return;
    }
    gpu_sync(); /* the weights of the tile before may still be read */
    gpu_put_tile<S>(s.weights, x);
    const fattn_score_rule rule = gpu_forward_rule(g, s.job);
    GPU_ROLLED
    for (int e = 0; e < S::TM * GPU_TN; e++) {
        const int row = gpu_ty() * S::TM + e / GPU_TN, col = gpu_tx() * GPU_TN + e % GPU_TN;
        float *const at = &s.weights[gpu_place<S::ROWS>(col, row)], dscore;
        const fattn_score_pair pair = gpu_pair(g, s.job.pairs, terms, s.query[row], j0 + col);
        *at = fattn_score(&rule, terms, *at, pair, &dscore);
    }
    gpu_get_tile<S>(s.weights, x);
}

/* Turns scores in x into weights relative to the new maximum, and rescales o to it. */
template <class S, int W>
GPU_DEVICE void gpu_forward_soften(const fattn_gpu_args &args, gpu_forward<S, W> &f,
                                   float x[S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const float unit = g.rule.unit;
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        float largest = x[m][0], sum = 0;
        GPU_UNROLL
        for (int n = 1; n < GPU_TN; n++) {
            largest = gpu_max(largest, x[m][n]);
        }
        const float alpha = fattn_softmax_raise(&f.state[m], gpu_row_max(largest), unit);
        const float base = fattn_softmax_base(f.state[m]);
        GPU_UNROLL
        for (int n = 0; n < GPU_TN; n++) {
            x[m][n] = fattn_softmax_weight(x[m][n], unit, base);
            sum += x[m][n];
        }
        fattn_softmax_add(&f.state[m], sum);
        GPU_UNROLL
        for (int c = 0; c < W / GPU_TX; c++) {
            f.o[m][c] *= alpha;
        }
    }
}

/* With dropout, turns p in x into Z p. l has been summed from p. */
template <class S>
GPU_DEVICE void gpu_forward_drop(const fattn_gpu_args &args, gpu_forward_scratch<S> &s, int64_t j0,
                                 float x[S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    if (!(g.problem.features & FATTN_DROPOUT)) {
        return;
    }
    gpu_sync(); /* the weights of the tile before may still be read */
    gpu_put_tile<S>(s.weights, x);
    GPU_ROLLED
    for (int m = 0; m < S::TM; m++) {
        const int row = gpu_ty() * S::TM + m, col = gpu_tx() * GPU_TN;
        if (s.query[row].h >= 0) {
            float z[GPU_TN];
            gpu_drop<GPU_TN>(g, s.job.pairs, s.query[row], j0 + col, z);
            GPU_UNROLL
            for (int n = 0; n < GPU_TN; n++) {
                s.weights[gpu_place<S::ROWS>(col + n, row)] *= z[n];
            }
        }
    }
    gpu_get_tile<S>(s.weights, x);
}

/* Visits one tile of keys, j0 .. past - 1. */
template <class S, int W>
GPU_DEVICE void gpu_forward_tile(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                 gpu_forward<S, W> &f, int64_t j0, int64_t past)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const gpu_forward_job &job = s.job;
    const gpu_pairs &pairs = job.pairs;
    const int live = (int)gpu_uniform(past - j0);
    const fattn_tile_kind kind = gpu_tile_kind(g, pairs, job.i0, job.i1, job.hk * job.group,
                                               job.group, j0, past, j0 + GPU_COLS);
    if (kind == FATTN_TILE_EMPTY) {
        return;
    }
    const unsigned terms = g.rule.terms | (kind == FATTN_TILE_PARTIAL ? FATTN_SCORE_KEEP : 0);

    for (int n = gpu_thread(); n < GPU_COLS; n += S::THREADS) {
        s.k_at[n] = n < live ? gpu_key_at(g, pairs.seq, p.k, pairs.b, job.hk, j0 + n) : -1;
        s.v_at[n] = n < live ? gpu_key_at(g, pairs.seq, p.v, pairs.b, job.hk, j0 + n) : -1;
    }
    const gpu_tensor q = gpu_tensor_of(g, g.buffers.q, p.dtype, FATTN_GPU_QUADS_Q, p.dim);
    const gpu_cache k = gpu_cache_k(g), v = gpu_cache_v(g);
    float x[S::TM][GPU_TN] = {};
    gpu_dots<S>(s, q, s.q_at, k, s.k_at, x);
    gpu_forward_score<S>(g, s, terms, j0, x);
    gpu_forward_soften<S, W>(g, f, x);
    if (!(p.outputs & FATTN_OUT_O)) {
        return;
    }
    gpu_forward_drop<S>(g, s, j0, x);
    gpu_put_tile<S>(s.weights, x);
    gpu_mix<S, W, true>(s, v, s.v_at, live, job.c0, f.o);
}

template <class S, int W>
GPU_DEVICE void gpu_forward_end(const fattn_gpu_args &args, const gpu_forward_scratch<S> &s,
                                gpu_forward<S, W> &f)
{
    const fattn_gpu_args &g = gpu_anew(args);
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const int r = gpu_ty() * S::TM + m;
        const gpu_query q = s.query[r];
        fattn_softmax state = f.state[m];
        state.l = gpu_row_sum(state.l);
        if (q.h < 0) {
            continue;
        }
        const gpu_part part = gpu_forward_row(g, s.job, r, q, state, gpu_tx() == 0);
        GPU_UNROLL
        for (int u = 0; u < W / GPU_COLS; u++) {
            gpu_forward_store(s.job, part, state, s.job.c0 + gpu_channel(u), &f.o[m][u * 4]);
        }
    }
}

/* Whether blocks count the finished parts of the rows, so that the last one merges them. */
template <class S>
GPU_DEVICE bool gpu_forward_counts(const fattn_gpu_args &g, const gpu_forward_job &job)
{
    return S::ROWS == gpu_rows_16::ROWS && g.counters >= 0 && !fattn_parts_are_one(&job.parts);
}

/* Merges the parts if this is the last block. A block is one slab of one part. */
template <class S>
GPU_DEVICE void gpu_forward_merge(const fattn_gpu_args &g, const gpu_forward_scratch<S> &s,
                                  int64_t slabs)
{
    const gpu_forward_job &job = s.job;
    if (gpu_forward_counts<S>(g, job) &&
        gpu_count_end(g, gpu_counter_of(g, job.pairs.b, job.hk), s.parts * slabs)) {
        gpu_merge_rows(g, job.pairs.seq, job.pairs.b, job.hk, job.rows, job.item - job.split,
                       s.parts);
    }
}

template <class S, int W>
GPU_DEVICE void gpu_forward_item(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                 int64_t item, int c0, int64_t slabs)
{
    const fattn_gpu_args &g = gpu_anew(args);
    gpu_forward<S, W> f;
    if (!gpu_forward_open(g, s.job, S::ROWS, item, c0)) {
        return;
    }
    if (gpu_forward_counts<S>(g, s.job) && gpu_thread() == 0) {
        uint64_t *const counter = gpu_counter_of(g, s.job.pairs.b, s.job.hk);
        s.parts = fattn_parts_count(&s.job.parts);
        gpu_count_begin(g, counter, gpu_peek(counter), s.parts * slabs);
    }
    gpu_forward_begin<S, W>(g, s, f);

    int64_t block, past;
    fattn_range keys = fattn_band_rows(&s.job.pairs.band, s.job.i0, s.job.i1);
    (void)fattn_schedule_keys(&s.job.parts, s.job.split, &block, &past);
    keys.past = fattn_min64(keys.past, past * GPU_COLS);
    if (g.problem.features & FATTN_BIAS) {
        const gpu_forward_job &job = s.job;
        keys.past = gpu_visible_past(g, job.pairs, job.i0, job.i1, job.hk * job.group, job.group,
                                     block * GPU_COLS, keys.past);
    }
    for (; block * GPU_COLS < keys.past; block++) {
        const int64_t j0 = block * GPU_COLS;
        gpu_forward_tile<S, W>(g, s, f, j0, fattn_min64(j0 + GPU_COLS, keys.past));
    }
    gpu_forward_end<S, W>(g, s, f);
    gpu_forward_merge<S>(gpu_anew(args), s, slabs);
}

/* The slabs of an item are consecutive, since they read the same keys. */
template <class S, int W> GPU_DEVICE void gpu_forward_all(const fattn_gpu_args &g)
{
    GPU_SHARED gpu_forward_scratch<S> s;
    const int64_t slabs = (g.problem.dim_v + W - 1) / W;
    for (int64_t n = gpu_block(); n < g.tiling.items * slabs; n += gpu_blocks()) {
        gpu_forward_item<S, W>(g, s, gpu_item_of(g, n / slabs), (int)(n % slabs) * W, slabs);
    }
}

/* --- Entries: simt.c chooses among them by name ----------------------------------------------- */

#define GPU_FORWARD(name, shape, blocks, width)                               \
    GPU_KERNEL(shape::THREADS, blocks) name(const GPU_PARAM fattn_gpu_args g) \
    {                                                                         \
        gpu_forward_all<shape, width>(g);                                     \
    }

GPU_FORWARD(simt_forward_64, gpu_rows_64, 2, 64)
GPU_FORWARD(simt_forward_128, gpu_rows_64, 2, 128)
GPU_FORWARD(simt_forward_256, gpu_rows_64, 1, 256)
GPU_FORWARD(simt_decode_64, gpu_rows_16, 4, 64)
GPU_FORWARD(simt_decode_128, gpu_rows_16, 3, 128)
GPU_FORWARD(simt_decode_256, gpu_rows_16, 3, 256)

GPU_COMBINE

#endif
