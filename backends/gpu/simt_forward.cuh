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
#include "core/online_softmax.h"
#include "core/schedule.h"

template <class S> struct gpu_forward_scratch : gpu_scratch<S> {
    gpu_query query[S::ROWS];
    int64_t q_at[S::ROWS], k_at[GPU_COLS], v_at[GPU_COLS];
};

/* A tile on its way: what one thread knows. */
template <class S, int W> struct gpu_forward {
    gpu_pairs pairs;
    gpu_tensor q, k, v;
    int64_t hk, group; /* key/value head, and query heads that share it */
    int64_t first, i0, i1;
    int rows;
    int c0;                     /* first channel of the slab */
    fattn_softmax state[S::TM]; /* l: of the thread's own columns */
    float o[S::TM][W / GPU_TX];
};

/* Rows of the tile; nothing met but the sink, which belongs to the first part. */
template <class S, int W>
GPU_DEVICE void gpu_forward_begin(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                  gpu_forward<S, W> &f, int64_t split)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const int64_t h0 = f.hk * f.group;
    gpu_sync(); /* the item before may still be read */
    for (int r = gpu_thread(); r < S::ROWS; r += S::THREADS) {
        gpu_query q = gpu_query_of(f.first + r, f.group, h0);
        if (r >= f.rows) {
            q.h = -1;
        }
        s.query[r] = q;
        s.q_at[r] = q.h < 0 ? -1 : gpu_query_at(f.pairs.seq, p.q, q.i, q.h);
    }
    gpu_sync();
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const int h = s.query[gpu_ty() * S::TM + m].h;
        f.state[m] = fattn_softmax_empty();
        if (p.features & FATTN_SINK && split == 0 && h >= 0) {
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

/* Dot products in x become scores. */
template <class S, int W>
GPU_DEVICE void gpu_forward_score(const fattn_gpu_args &args, const gpu_forward_scratch<S> &s,
                                  const gpu_forward<S, W> &f, unsigned terms, int64_t j0,
                                  float x[S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int tx = gpu_tx(), ty = gpu_ty();
    if (!terms) {
        return;
    }
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const gpu_query q = s.query[ty * S::TM + m];
        GPU_UNROLL
        for (int n = 0; n < GPU_TN; n++) {
            float slope;
            const fattn_score_pair pair = gpu_pair(g, f.pairs, terms, q, j0 + tx * GPU_TN + n);
            x[m][n] = fattn_score(&g.rule, terms, x[m][n], pair, &slope);
        }
    }
}

/* Scores in x become probabilities relative to the new maximum, and o takes the factor for what
 * came before. With dropout x becomes Z p, after l has seen p. */
template <class S, int W>
GPU_DEVICE void gpu_forward_soften(const fattn_gpu_args &args, const gpu_forward_scratch<S> &s,
                                   gpu_forward<S, W> &f, int64_t j0, float x[S::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int tx = gpu_tx(), ty = gpu_ty();
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

        const gpu_query q = s.query[ty * S::TM + m];
        if (g.problem.features & FATTN_DROPOUT && q.h >= 0) {
            float z[GPU_TN];
            gpu_drop<GPU_TN>(g, f.pairs, q, j0 + tx * GPU_TN, z);
            GPU_UNROLL
            for (int n = 0; n < GPU_TN; n++) {
                x[m][n] *= z[n];
            }
        }
    }
}

/* One tile of keys: j0 .. past - 1. */
template <class S, int W>
GPU_DEVICE void gpu_forward_tile(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                 gpu_forward<S, W> &f, int64_t j0, int64_t past)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const int live = (int)(past - j0);
    const fattn_tile_kind kind =
        gpu_tile_kind(g, f.pairs, f.i0, f.i1, f.hk * f.group, f.group, j0, past, j0 + GPU_COLS);
    if (kind == FATTN_TILE_EMPTY) {
        return;
    }
    const unsigned terms = g.rule.terms | (kind == FATTN_TILE_PARTIAL ? FATTN_SCORE_KEEP : 0);

    for (int n = gpu_thread(); n < GPU_COLS; n += S::THREADS) {
        s.k_at[n] = n < live ? gpu_key_at(g, f.pairs.seq, p.k, f.pairs.b, f.hk, j0 + n) : -1;
        s.v_at[n] = n < live ? gpu_key_at(g, f.pairs.seq, p.v, f.pairs.b, f.hk, j0 + n) : -1;
    }
    float x[S::TM][GPU_TN] = {};
    gpu_dots<S>(s, f.q, s.q_at, f.k, s.k_at, x);
    gpu_forward_score<S, W>(g, s, f, terms, j0, x);
    gpu_forward_soften<S, W>(g, s, f, j0, x);
    if (p.outputs & FATTN_OUT_O) {
        gpu_put_tile<S>(s.weights, x);
        gpu_mix<S, W, true>(s, f.v, s.v_at, live, f.c0, f.o);
    }
}

/* Rows in o and lse, or their parts in the workspace. */
template <class S, int W>
GPU_DEVICE void gpu_forward_end(const fattn_gpu_args &args, const gpu_forward_scratch<S> &s,
                                gpu_forward<S, W> &f, int64_t item)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int ty = gpu_ty();
    const bool speaks = gpu_tx() == 0 && f.c0 == 0; /* for the row */
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        const int r = ty * S::TM + m;
        const gpu_query q = s.query[r];
        fattn_softmax state = f.state[m];
        state.l = gpu_row_sum(state.l);
        if (q.h < 0) {
            continue;
        }
        gpu_part part = gpu_part_of(g, item, r);
        if (g.tiling.splits > 1) {
            if (speaks) {
                *part.m = state.m, *part.l = state.l;
            }
        } else {
            part = gpu_part_output(g, f.pairs.seq, q);
            if (speaks) {
                gpu_store_lse(g, f.pairs.seq, f.pairs.b, q, state);
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
            gpu_store_quad(part.o, part.at, f.c0 + gpu_channel(u), o);
        }
    }
}

template <class S, int W>
GPU_DEVICE void gpu_forward_item(const fattn_gpu_args &args, gpu_forward_scratch<S> &s,
                                 int64_t item, int c0)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, item);
    gpu_forward<S, W> f;
    f.pairs = gpu_pairs_of(g, work.batch);
    f.hk = work.head;
    f.group = p.heads_q / p.heads_k;
    f.first = work.block * S::ROWS;
    const int64_t rows = f.pairs.seq.sq * f.group - f.first;
    if (rows <= 0) {
        return;
    }
    f.rows = rows < S::ROWS ? (int)rows : S::ROWS;
    f.i0 = f.first / f.group;
    f.i1 = (f.first + f.rows - 1) / f.group + 1;
    f.c0 = c0;
    f.q = gpu_tensor_of(g, g.buffers.q, p.dtype, FATTN_GPU_QUADS_Q, p.dim);
    f.k = gpu_tensor_of(g, g.buffers.k, p.dtype, FATTN_GPU_QUADS_K, p.dim);
    f.v = gpu_tensor_of(g, g.buffers.v, p.dtype, FATTN_GPU_QUADS_V, p.dim_v);
    gpu_forward_begin<S, W>(g, s, f, work.split);

    int64_t block, past;
    const fattn_range keys = fattn_band_rows(&f.pairs.band, f.i0, f.i1);
    fattn_schedule_keys(&g.tiling, work.split, &block, &past);
    block = fattn_max64(block, keys.first / GPU_COLS);
    for (; block < past && block * GPU_COLS < keys.past; block++) {
        const int64_t j0 = block * GPU_COLS;
        gpu_forward_tile<S, W>(g, s, f, j0, fattn_min64(j0 + GPU_COLS, keys.past));
    }
    gpu_forward_end<S, W>(g, s, f, item);
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
