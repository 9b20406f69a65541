/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward by plain multiply-adds: any GPU, any head dimension, every feature.
 *
 * A block takes a tile of rows of one key/value head (an item of the schedule) along a part of its
 * keys, a tile of keys at a time:
 *
 *     x = Q K^T                scores, with every feature of score.h
 *     p                        online softmax; the sums l stay apart in the TX threads of a row
 *     o = o alpha + p V
 *
 * With one part the item ends in o and lse; with several, each leaves {m, l, o} in the workspace,
 * and gpu_combine merges them in ascending order. Where a block's registers do not hold all
 * channels of o, it computes a slab of W of them, and the scores are computed once for each slab.
 */
#ifndef FATTN_GPU_SIMT_FORWARD_CUH
#define FATTN_GPU_SIMT_FORWARD_CUH

#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "backends/gpu/tile.cuh"
#include "backends/gpu/wide.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* The tile of rows that a block is at. What is the same for all threads leaves their registers. */
typedef struct gpu_forward_job {
    gpu_pairs pairs;
    int64_t hk, group; /* key/value head, and query heads that share it */
    int64_t first, i0, i1;
    int64_t item, split;
    int rows; /* that exist */
    int c0;   /* first channel of the slab */
} gpu_forward_job;

template <class S> struct gpu_forward_scratch : gpu_scratch<S> {
    gpu_forward_job job;
    gpu_query query[S::ROWS];
    int64_t q_at[S::ROWS], k_at[S::COLS], v_at[S::COLS];
    fattn_softmax state[S::PARTS > 1 ? S::TM : 1][S::PARTS > 1 ? S::THREADS : 1]; /* of wide.cuh */
};

/* What one thread knows. */
template <class S, int W> struct gpu_forward {
    fattn_softmax state[S::TM]; /* l: of the thread's own columns */
    typename S::total o[S::TM][W / GPU_TX];
};

/* Turns to an item; false where it has no rows. */
template <class S>
GPU_DEVICE bool gpu_forward_open(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                 int64_t item, int c0)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    gpu_sync(); /* the item before may still be read */
    if (gpu_thread() == 0) {
        const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, item);
        gpu_forward_job &f = s.job;
        f.pairs = gpu_pairs_of(g, work.batch);
        f.hk = work.head;
        f.group = p.heads_q / p.heads_k;
        f.first = work.block * S::ROWS;
        const int64_t rows = fattn_min64(f.pairs.seq.sq * f.group - f.first, S::ROWS);
        f.rows = (int)fattn_max64(rows, 0);
        f.i0 = f.first / f.group;
        f.i1 = (f.first + f.rows - 1) / f.group + 1;
        f.item = item;
        f.split = work.split;
        f.c0 = c0;
    }
    gpu_sync();
    return s.job.rows > 0;
}

/* Which of a tile's `live` rows or keys is read for number n. For one that does not exist this is
 * none, or, where asking costs time, another: its scores are selected away, and its weights are 0
 * like those of the key that stands in for it. */
template <class S> GPU_DEVICE int gpu_forward_stand_in(int n, int live)
{
    return n < live ? n : S::PARTS > 1 ? 0 : -1;
}

/* Rows of the tile; nothing met but the sink, which belongs to the first part. */
template <class S, int W>
GPU_DEVICE void gpu_forward_begin(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                  gpu_forward<S, W> &f)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const gpu_forward_job &job = s.job;
    const int64_t h0 = job.hk * job.group;
    for (int r = gpu_thread(); r < S::ROWS; r += S::THREADS) {
        gpu_query q = gpu_query_of(job.first + r, job.group, h0);
        if (r >= job.rows) {
            q.h = -1;
        }
        s.query[r] = q;
        const int64_t from = gpu_forward_stand_in<S>(r, job.rows);
        const gpu_query real = gpu_query_of(job.first + fattn_max64(from, 0), job.group, h0);
        s.q_at[r] = from < 0 ? -1 : gpu_query_at(job.pairs.seq, p.q, real.i, real.h);
    }
    gpu_sync();
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const int h = s.query[gpu_ty() * S::TM + m].h;
        f.state[m] = fattn_softmax_empty();
        if (p.features & FATTN_SINK && job.split == 0 && h >= 0) {
            const float sink = ((const float *)g.buffers.sink)[h];
            f.state[m] = fattn_softmax_sink(sink);
            if (gpu_tx() != 0) {
                f.state[m].l = 0;
            }
        }
        GPU_UNROLL
        for (int c = 0; c < W / GPU_TX; c++) {
            f.o[m][c] = 0;
        }
    }
}

/* Where a part of a thread's elements can wait, in shared memory that the products leave free. */
template <class S> GPU_DEVICE float *gpu_forward_room(gpu_forward_scratch<S> &s)
{
    if constexpr (S::PARTS > 1) {
        return s.step[0];
    } else {
        return s.weights;
    }
}

/* Dot products in x become scores, where they depend on no more than a scale, and on whether the
 * band keeps a pair. */
template <class S>
GPU_DEVICE void gpu_forward_keep(const fattn_gpu_args &args, const gpu_forward_scratch<S> &s,
                                 unsigned terms, int64_t j0, float x[S::PARTS][S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int tx = gpu_tx(), ty = gpu_ty();
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const fattn_range keys = fattn_band_row(&s.job.pairs.band, s.query[ty * S::TM + m].i);
        GPU_UNROLL
        for (int n = 0; n < S::PARTS * GPU_TN; n++) {
            const int64_t j = j0 + n / GPU_TN * GPU_COLS + tx * GPU_TN + n % GPU_TN;
            float *const at = &x[n / GPU_TN][m][n % GPU_TN], slope;
            fattn_score_pair pair;
            pair.keep = !(terms & FATTN_SCORE_KEEP) || (keys.first <= j && j < keys.past);
            *at = fattn_score(&g.rule, (terms & FATTN_SCORE_SCALE) | FATTN_SCORE_KEEP, *at, pair,
                              &slope);
        }
    }
}

/* The same with every feature. They take much code, which is there once, in a loop over the
 * thread's elements, which wait in shared memory, because registers cannot be counted through. */
template <class S>
GPU_DEVICE void gpu_forward_score(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                  unsigned terms, int64_t j0, float x[S::PARTS][S::TM][GPU_TN])
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
    float *const room = gpu_forward_room<S>(s);
    gpu_sync(); /* the last step of the products may still be read */
    GPU_UNROLL
    for (int part = 0; part < S::PARTS; part++) {
        gpu_put_tile<S>(room, x[part]);
#pragma unroll 1
        for (int e = 0; e < S::TM * GPU_TN; e++) {
            const int row = gpu_ty() * S::TM + e / GPU_TN, col = gpu_tx() * GPU_TN + e % GPU_TN;
            float *const at = &room[gpu_place<S::ROWS>(col, row)], slope;
            const fattn_score_pair pair =
                gpu_pair(g, s.job.pairs, terms, s.query[row], j0 + part * GPU_COLS + col);
            *at = fattn_score(&g.rule, terms, *at, pair, &slope);
        }
        gpu_get_tile<S>(room, x[part]);
    }
}

/* Scores in x become probabilities relative to the new maximum, and o takes the factor for what
 * came before. */
template <class S, int W>
GPU_DEVICE void gpu_forward_soften(const fattn_gpu_args &args, gpu_forward<S, W> &f,
                                   float x[S::PARTS][S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const float unit = g.rule.unit;
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        float largest = x[0][m][0], sum = 0;
        GPU_UNROLL
        for (int n = 1; n < S::PARTS * GPU_TN; n++) {
            largest = gpu_max(largest, x[n / GPU_TN][m][n % GPU_TN]);
        }
        const float alpha = fattn_softmax_raise(&f.state[m], gpu_row_max(largest), unit);
        const float base = fattn_softmax_base(f.state[m]);
        GPU_UNROLL
        for (int n = 0; n < S::PARTS * GPU_TN; n++) {
            float *const at = &x[n / GPU_TN][m][n % GPU_TN];
            *at = fattn_softmax_weight(*at, unit, base);
            sum += *at;
        }
        fattn_softmax_add(&f.state[m], sum);
        GPU_UNROLL
        for (int c = 0; c < W / GPU_TX; c++) {
            f.o[m][c] *= alpha;
        }
    }
}

/* With dropout, p become Z p, after l has seen p. */
template <class S>
GPU_DEVICE void gpu_forward_drop(const fattn_gpu_args &args, gpu_forward_scratch<S> &s, int64_t j0,
                                 float x[S::PARTS][S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    float *const room = gpu_forward_room<S>(s);
    if (!(g.problem.features & FATTN_DROPOUT)) {
        return;
    }
    gpu_sync(); /* as above */
    GPU_UNROLL
    for (int part = 0; part < S::PARTS; part++) {
        gpu_put_tile<S>(room, x[part]);
#pragma unroll 1
        for (int m = 0; m < S::TM; m++) {
            const int row = gpu_ty() * S::TM + m, col = gpu_tx() * GPU_TN;
            if (s.query[row].h >= 0) {
                float z[GPU_TN];
                gpu_drop<GPU_TN>(g, s.job.pairs, s.query[row], j0 + part * GPU_COLS + col, z);
                GPU_UNROLL
                for (int n = 0; n < GPU_TN; n++) {
                    room[gpu_place<S::ROWS>(col + n, row)] *= z[n];
                }
            }
        }
        gpu_get_tile<S>(room, x[part]);
    }
}

/* The state waits in shared memory while products need registers. */
template <class S, int W>
GPU_DEVICE void gpu_forward_put_state(gpu_forward_scratch<S> &s, const gpu_forward<S, W> &f)
{
    GPU_UNROLL
    for (int m = 0; m < S::TM && S::PARTS > 1; m++) {
        s.state[m][gpu_thread_anew()] = f.state[m];
    }
}

template <class S, int W>
GPU_DEVICE void gpu_forward_get_state(const gpu_forward_scratch<S> &s, gpu_forward<S, W> &f)
{
    GPU_UNROLL
    for (int m = 0; m < S::TM && S::PARTS > 1; m++) {
        f.state[m] = s.state[m][gpu_thread_anew()];
    }
}

/* One tile of keys: j0 .. past - 1. */
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
                                               job.group, j0, past, j0 + S::COLS);
    if (kind == FATTN_TILE_EMPTY) {
        return;
    }
    const unsigned terms = g.rule.terms | (kind == FATTN_TILE_PARTIAL ? FATTN_SCORE_KEEP : 0);

    for (int n = gpu_thread(); n < S::COLS; n += S::THREADS) {
        const int64_t j = gpu_forward_stand_in<S>(n, live);
        s.k_at[n] = j < 0 ? -1 : gpu_key_at(g, pairs.seq, p.k, pairs.b, job.hk, j0 + j);
        s.v_at[n] = j < 0 ? -1 : gpu_key_at(g, pairs.seq, p.v, pairs.b, job.hk, j0 + j);
    }
    const gpu_tensor q = gpu_tensor_of(g, g.buffers.q, p.dtype, FATTN_GPU_QUADS_Q, p.dim);
    const gpu_tensor k = gpu_tensor_of(g, g.buffers.k, p.dtype, FATTN_GPU_QUADS_K, p.dim);
    const gpu_tensor v = gpu_tensor_of(g, g.buffers.v, p.dtype, FATTN_GPU_QUADS_V, p.dim_v);
    float x[S::PARTS][S::TM][GPU_TN] = {};
    if constexpr (S::PARTS > 1) {
        gpu_wide_dots(s, q, s.q_at, k, s.k_at, x);
    } else {
        gpu_dots<S>(s, q, s.q_at, k, s.k_at, x[0]);
    }
    gpu_forward_score<S>(g, s, terms, j0, x);
    gpu_forward_get_state<S, W>(s, f);
    gpu_forward_soften<S, W>(g, f, x);
    gpu_forward_put_state<S, W>(s, f);
    if (!(p.outputs & FATTN_OUT_O)) {
        return;
    }
    gpu_forward_drop<S>(g, s, j0, x);
    if constexpr (S::PARTS > 1) {
        gpu_wide_mix<W>(s, x, v, s.v_at, live, f.o);
    } else {
        gpu_put_tile<S>(s.weights, x[0]);
        gpu_mix<S, W, true>(s, v, s.v_at, live, job.c0, f.o);
    }
}

/* Rows in o and lse, or their parts in the workspace. */
template <class S, int W>
GPU_DEVICE void gpu_forward_end(const fattn_gpu_args &args, const gpu_forward_scratch<S> &s,
                                gpu_forward<S, W> &f)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_forward_job &job = s.job;
    const int ty = gpu_ty();
    const bool speaks = gpu_tx() == 0 && job.c0 == 0; /* for the row */
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const int r = ty * S::TM + m;
        const gpu_query q = s.query[r];
        fattn_softmax state = f.state[m];
        state.l = gpu_row_sum(state.l);
        if (q.h < 0) {
            continue;
        }
        gpu_part part = gpu_part_of(g, job.item, r);
        if (g.tiling.splits > 1) {
            if (speaks) {
                *part.m = state.m, *part.l = state.l;
            }
        } else {
            part = gpu_part_output(g, job.pairs.seq, q);
            if (speaks) {
                gpu_store_lse(g, job.pairs.seq, job.pairs.b, q, state);
            }
            if (!(g.problem.outputs & FATTN_OUT_O)) {
                continue;
            }
        }
        GPU_UNROLL
        for (int u = 0; u < W / GPU_COLS; u++) {
            float o[4];
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                o[e] =
                    g.tiling.splits > 1 ? f.o[m][u * 4 + e] : gpu_output(state, f.o[m][u * 4 + e]);
            }
            gpu_store_quad(part.o, part.at, job.c0 + gpu_channel(u), o);
        }
    }
}

template <class S, int W>
GPU_DEVICE void gpu_forward_item(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                 int64_t item, int c0)
{
    const fattn_gpu_args &g = gpu_anew(args);
    gpu_forward<S, W> f;
    if (!gpu_forward_open(g, s, item, c0)) {
        return;
    }
    gpu_forward_begin<S, W>(g, s, f);
    gpu_forward_put_state<S, W>(s, f);

    int64_t block, past;
    const fattn_range keys = fattn_band_rows(&s.job.pairs.band, s.job.i0, s.job.i1);
    fattn_schedule_keys(&g.tiling, s.job.split, &block, &past);
    block = fattn_max64(block, keys.first / S::COLS);
    for (; block < past && block * S::COLS < keys.past; block++) {
        const int64_t j0 = block * S::COLS;
        gpu_forward_tile<S, W>(g, s, f, j0, fattn_min64(j0 + S::COLS, keys.past));
    }
    gpu_forward_get_state<S, W>(s, f);
    gpu_forward_end<S, W>(g, s, f);
}

/* Slabs of an item follow one another, since they read the same keys. */
template <class S, int W> GPU_DEVICE void gpu_forward_all(const fattn_gpu_args &g)
{
    GPU_SHARED gpu_forward_scratch<S> s;
    const int64_t slabs = (g.problem.dim_v + W - 1) / W;
    for (int64_t n = gpu_block(); n < g.tiling.items * slabs; n += gpu_blocks()) {
        gpu_forward_item<S, W>(g, s, n / slabs, (int)(n % slabs) * W);
    }
}

/* --- Entries: simt.c chooses among them by name ----------------------------------------------- */

#define GPU_FORWARD(name, shape, blocks, width)                               \
    GPU_KERNEL(shape::THREADS, blocks) name(const GPU_PARAM fattn_gpu_args g) \
    {                                                                         \
        gpu_forward_all<shape, width>(g);                                     \
    }

typedef gpu_shape<4, 16> gpu_rows_64;
typedef gpu_shape<2, 8> gpu_rows_16;

GPU_FORWARD(simt_forward_64, gpu_rows_64, 2, 64)
GPU_FORWARD(simt_forward_128, gpu_rows_64, 2, 128)
GPU_FORWARD(simt_forward_256, gpu_rows_64, 1, 256)
GPU_FORWARD(simt_decode_64, gpu_rows_16, 1, 64)
GPU_FORWARD(simt_decode_128, gpu_rows_16, 1, 128)
GPU_FORWARD(simt_decode_256, gpu_rows_16, 1, 256)

GPU_COMBINE

#endif
