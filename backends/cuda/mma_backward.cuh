/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on tensor cores, for 16-bit types: FlashAttention-2's loop (Dao 2023, algorithm 2) with
 * mma.sync. Its equations are those of simt_backward.cuh.
 *
 * A block owns a tile of keys, 16 of them a warp, with dK and dV in fragments, and walks along the
 * rows that see them, head by head of the group. Scores are held transposed, keys by queries: what
 * is a C of one product is then an A of the next, and only dS goes through shared memory, once:
 *
 *     S^T = K Q^T        P^T = exp(S^T - lse)               dV += P^T dO
 *     dP^T = V dO^T      dS^T = P^T (dP^T - delta)          dK += dS^T Q         dQ += dS K
 *
 * dQ is a sum over blocks, which add to it in any order, in floats of the workspace: two runs may
 * differ in their last bits. A run is
 *
 *     mma_backward_rows_W       lse and delta of every row, and zeros for its dQ
 *     mma_backward_type_W_...   dK, dV, and dQ in the workspace
 *     mma_backward_dq_W         dQ in its own type
 */
#ifndef FATTN_CUDA_MMA_BACKWARD_CUH
#define FATTN_CUDA_MMA_BACKWARD_CUH

#include "backends/cuda/mma.h"
#include "backends/cuda/mma_sm80.cuh"
#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* --- The workspace ---------------------------------------------------------------------------- */

/* Of every row, in the order of lse. */
typedef struct mma_saved {
    float *lse;   /* in log2 units; +inf for a row without probabilities */
    float *delta; /* of such a row 0 */
    float *dq;    /* W channels, not yet multiplied by scale */
} mma_saved;

template <int W> GPU_DEVICE mma_saved mma_saved_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t rows = (p.features & FATTN_CU_SEQLENS_Q ? 1 : p.batch) * p.heads_q * p.total_q;
    mma_saved saved;
    saved.dq = (float *)g.workspace;
    saved.lse = saved.dq + rows * W;
    saved.delta = saved.lse + rows;
    return saved;
}

/* Row n of the problem, of those that may exist. */
typedef struct mma_row {
    fattn_sequence seq;
    int64_t b, at; /* at: in lse */
    gpu_query q;
    bool exists;
} mma_row;

GPU_DEVICE mma_row mma_row_of(const fattn_gpu_args &g, int64_t n)
{
    const fattn_problem &p = g.problem;
    const int64_t head = fattn_quotient(n, p.seqlen_q);
    mma_row row;
    row.b = fattn_quotient(head, p.heads_q);
    row.q.h = (int32_t)(head - row.b * p.heads_q);
    row.q.i = (int32_t)(n - head * p.seqlen_q);
    row.seq = gpu_sequence(g, row.b);
    row.exists = row.q.i < row.seq.sq;
    row.at = gpu_lse_at(p, row.seq, row.b, row.q.h) + row.q.i;
    return row;
}

enum { MMA_ROW_THREADS = 128 / MMA_BACKWARD_ROWS };

template <int W> GPU_DEVICE void mma_save_row(const fattn_gpu_args &g, const mma_row &row)
{
    const fattn_problem &p = g.problem;
    const mma_saved saved = mma_saved_of<W>(g);
    const int lane = gpu_thread() % MMA_ROW_THREADS;
    const gpu_tensor o = gpu_tensor_of(g, g.buffers.o, p.dtype_o, FATTN_GPU_QUADS_O, p.dim_v);
    const gpu_tensor dout =
        gpu_tensor_of(g, g.buffers.dout, p.dtype_o, FATTN_GPU_QUADS_DOUT, p.dim_v);
    float sum = 0;
    if (row.exists) {
        const int64_t o_at = gpu_query_at(row.seq, p.o, row.q.i, row.q.h);
        const int64_t dout_at = gpu_query_at(row.seq, p.dout, row.q.i, row.q.h);
        for (int c = 4 * lane; c < o.dim; c += 4 * MMA_ROW_THREADS) {
            float a[4], b[4];
            gpu_load_quad(o, o_at, c, a);
            gpu_load_quad(dout, dout_at, c, b);
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                sum = fmaf(a[e], b[e], sum);
            }
        }
        for (int c = 4 * lane; c < W; c += 4 * MMA_ROW_THREADS) {
            const gpu_f4 zeros = {0, 0, 0, 0};
            *(gpu_f4 *)(saved.dq + row.at * W + c) = zeros;
        }
    }
    GPU_UNROLL
    for (int n = 1; n < MMA_ROW_THREADS; n *= 2) {
        sum += gpu_shfl_xor(sum, n);
    }
    if (row.exists && lane == 0) {
        const float lse = ((const float *)g.buffers.lse)[row.at];
        const bool empty = lse == fattn_f32_from_bits(0xff800000u);
        const float dlse = p.features & FATTN_DLSE ? ((const float *)g.buffers.dlse)[row.at] : 0;
        saved.lse[row.at] = empty ? fattn_f32_from_bits(0x7f800000u) : lse * (float)FATTN_LOG2E;
        saved.delta[row.at] = empty ? 0 : sum - dlse;
    }
}

/* dQ of a row: from the workspace, times scale, to its place. */
template <int W> GPU_DEVICE void mma_finish_row(const fattn_gpu_args &g, const mma_row &row)
{
    const fattn_problem &p = g.problem;
    const mma_saved saved = mma_saved_of<W>(g);
    const gpu_tensor dq =
        gpu_tensor_of(g, g.buffers.dq, g.dtype_gradient, FATTN_GPU_QUADS_DQ, p.dim);
    if (!row.exists) {
        return;
    }
    const int64_t to = gpu_query_at(row.seq, p.dq, row.q.i, row.q.h);
    for (int c = 4 * (gpu_thread() % MMA_ROW_THREADS); c < dq.dim; c += 4 * MMA_ROW_THREADS) {
        const gpu_f4 sum = *(const gpu_f4 *)(saved.dq + row.at * W + c);
        const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
        float x[4] = {0, 0, 0, 0};
        if (p.features & FATTN_ACCUMULATE) {
            gpu_load_quad(dq, to, c, x);
        }
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            x[e] = fmaf(sums[e], g.rule.scale, x[e]);
        }
        gpu_store_quad(dq, to, c, x);
    }
}

/* --- Tiles ------------------------------------------------------------------------------------ */

/* T: mma_f16 or mma_bf16. W: channels, padded. N: queries of a tile. dQ of a tile is cut into parts
 * of 32 queries for each warp. */
template <class T, int W, int N, int WARPS> struct mma_backward_shape {
    typedef T type;
    enum {
        WIDTH = W,
        PITCH = W,
        QUERIES = N,
        KEYS = 16 * WARPS,
        THREADS = 32 * WARPS,
        ACROSS = N / 32,              /* parts along the queries */
        PART = W / (WARPS / (N / 32)) /* channels of a part */
    };
};

/* What a block works on: keys j0 .. of a key/value head, and the queries that see them. */
typedef struct mma_job {
    gpu_pairs pairs;
    int64_t hk, group, j0;
    int64_t first, past; /* tiles of queries */
    const uint16_t *k, *v;
    int keys; /* that exist from j0 on; may be more than a tile, or less than 1 */
} mma_job;

template <class S> struct mma_backward_scratch {
    alignas(128) uint16_t k[S::KEYS * S::PITCH], v[S::KEYS * S::PITCH]; /* in the end dk, dv */
    uint16_t q[2][S::QUERIES * S::PITCH], dout[2][S::QUERIES * S::PITCH];
    uint16_t ds[S::KEYS * S::QUERIES];
    alignas(16) float lse[2][S::QUERIES], delta[2][S::QUERIES];
    mma_job job;
};

/* dK and dV of a warp's 16 keys. */
template <class S> struct mma_sums {
    float dk[1][S::WIDTH / 8][4], dv[1][S::WIDTH / 8][4];
};

/* Copies `live` rows from `from` on, and zeros up to ROWS. */
template <class S, int ROWS>
GPU_DEVICE void mma_copy_rows(uint16_t *tile, const uint16_t *from, int64_t stride, int dim,
                              int live)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread() % CHUNKS;
    const int bytes = (int)gpu_clamp(2 * dim - 16 * c, 0, 16);
    const uint16_t *row = from + gpu_thread() / CHUNKS * stride + 8 * c;
    GPU_UNROLL
    for (int n = 0; n < ROWS / STEP; n++, row += STEP * stride) {
        const int r = gpu_thread() / CHUNKS + n * STEP;
        mma_copy(mma_place<S::PITCH>(mma_shared(tile), r, c), row, r < live ? bytes : 0);
    }
}

/* Begins to copy a tile of queries of head h: q, dO, lse and delta. */
template <class S>
GPU_DEVICE void mma_copy_queries(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage,
                                 int64_t h, int64_t i0)
{
    const fattn_problem &p = g.problem;
    const fattn_sequence &seq = s.job.pairs.seq;
    const int live = (int)fattn_min64(seq.sq - i0, S::QUERIES);
    mma_copy_rows<S, S::QUERIES>(s.q[stage],
                                 (const uint16_t *)g.buffers.q + gpu_query_at(seq, p.q, i0, h),
                                 p.q.seq, (int)p.dim, live);
    mma_copy_rows<S, S::QUERIES>(
        s.dout[stage], (const uint16_t *)g.buffers.dout + gpu_query_at(seq, p.dout, i0, h),
        p.dout.seq, (int)p.dim_v, live);
    const int r = gpu_thread();
    if (r < S::QUERIES) {
        const mma_saved saved = mma_saved_of<S::WIDTH>(g);
        const int64_t at = gpu_lse_at(p, seq, s.job.pairs.b, h) + i0 + r;
        const bool exists = r < live;
        s.lse[stage][r] = exists ? saved.lse[at] : fattn_f32_from_bits(0x7f800000u);
        s.delta[stage][r] = exists ? saved.delta[at] : 0;
    }
    mma_commit();
}

/* Scores of pairs outside the band are selected away. Rows of x are keys. */
template <class S>
GPU_DEVICE void mma_keep_queries(const mma_job &job, int64_t i0, float x[S::QUERIES / 8][4])
{
    const fattn_band &band = job.pairs.band;
    const int64_t limit = INT64_C(1) << 62;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int key = mma_warp() * 16 + mma_lane() / 4 + 8 * h;
        /* query i sees key j when j - right <= i + diagonal <= j + left */
        const int64_t aligned = job.j0 + key - band.diagonal - i0 - mma_lane() % 4 * 2;
        int64_t first = band.right < 0 ? 0 : aligned - fattn_min64(band.right, limit);
        const int64_t last = band.left < 0 ? S::QUERIES : aligned + fattn_min64(band.left, limit);
        first = key < job.keys ? first : S::QUERIES;
        const int low = (int)gpu_clamp(first, -8, S::QUERIES);
        const int high = (int)gpu_clamp(last, -9, S::QUERIES);
        GPU_UNROLL
        for (int n = 0; n < S::QUERIES / 4; n++) {
            const int i = n / 2 * 8 + n % 2;
            float *const score = &x[n / 2][2 * h + n % 2];
            *score = low <= i & i <= high ? *score : fattn_f32_from_bits(0xff800000u);
        }
    }
}

/* Scores in x become P, and dP in dp becomes dS. */
template <class S>
GPU_DEVICE void mma_differentiate(const fattn_gpu_args &g, const mma_backward_scratch<S> &s,
                                  int stage, float x[S::QUERIES / 8][4],
                                  float dp[S::QUERIES / 8][4])
{
    const float unit = g.rule.unit;
    const int column = mma_lane() % 4 * 2;
    GPU_UNROLL
    for (int n = 0; n < S::QUERIES / 8; n++) {
        const gpu_f2 lse = *(const gpu_f2 *)(s.lse[stage] + 8 * n + column);
        const gpu_f2 delta = *(const gpu_f2 *)(s.delta[stage] + 8 * n + column);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            const float p = mma_exp2(fmaf(x[n][e], unit, e % 2 ? -lse.y : -lse.x));
            dp[n][e] = p * (dp[n][e] - (e % 2 ? delta.y : delta.x));
            x[n][e] = p;
        }
    }
}

/* dS of the warp's keys, rounded, to shared memory, keys by queries. */
template <class S>
GPU_DEVICE void mma_put_ds(mma_backward_scratch<S> &s, const float ds[S::QUERIES / 8][4])
{
    const int key = mma_warp() * 16 + mma_lane() / 4;
    GPU_UNROLL
    for (int n = 0; n < S::QUERIES / 4; n++) {
        const float *const pair = ds[n / 2] + n % 2 * 2;
        const uint32_t at = mma_place<S::QUERIES>(mma_shared(s.ds), key + n % 2 * 8, n / 2);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + mma_lane() % 4 * 4),
                     "r"(S::type::pack(pair[0], pair[1]))
                     : "memory");
    }
}

/* Adds a part of dS K to dQ in the workspace: 32 queries and PART channels for each warp. */
template <class S>
GPU_DEVICE void mma_add_dq(const fattn_gpu_args &g, const mma_backward_scratch<S> &s, int64_t h,
                           int64_t i0)
{
    enum { N = S::PART / 16, STEPS = S::KEYS / 16 };
    const int lane = mma_lane(), row = mma_warp() % S::ACROSS * 32;
    const int chunk = mma_warp() / S::ACROSS * S::PART / 8;
    const uint32_t a_at =
        mma_place<S::QUERIES>(mma_shared(s.ds), lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2);
    const uint32_t b_at = mma_columns_b<S::PITCH>(s.k, 0, chunk);
    float y[2][2 * N][4] = {};
    GPU_UNROLL
    for (int step = 0; step < STEPS; step++) {
        uint32_t a[2][4];
        GPU_UNROLL
        for (int m = 0; m < 2; m++) {
            mma_load_transposed(a[m], mma_step<S::QUERIES>(a_at, step, m));
        }
        GPU_UNROLL
        for (int n = 0; n < N; n++) {
            uint32_t b[4];
            mma_load_transposed(b, mma_step<S::PITCH>(b_at, step, n));
            GPU_UNROLL
            for (int m = 0; m < 2; m++) {
                S::type::multiply(y[m][2 * n], a[m], b);
                S::type::multiply(y[m][2 * n + 1], a[m], b + 2);
            }
        }
    }

    const mma_saved saved = mma_saved_of<S::WIDTH>(g);
    const int64_t first = gpu_lse_at(g.problem, s.job.pairs.seq, s.job.pairs.b, h) + i0;
    const int live = (int)fattn_min64(s.job.pairs.seq.sq - i0, S::QUERIES);
    GPU_UNROLL
    for (int m = 0; m < 2; m++) {
        GPU_UNROLL
        for (int half = 0; half < 2; half++) {
            const int i = row + 16 * m + 8 * half + lane / 4;
            float *const to = saved.dq + (first + i) * S::WIDTH + 8 * chunk + lane % 4 * 2;
            GPU_UNROLL
            for (int n = 0; n < 2 * N && i < live; n++) {
                mma_add_two(to + 8 * n, y[m][n][2 * half], y[m][n][2 * half + 1]);
            }
        }
    }
}

/* --- A tile of keys --------------------------------------------------------------------------- */

/* Whether all pairs of the job's keys and the queries from i0 on are kept. */
template <class S> GPU_DEVICE bool mma_is_partial(const mma_job &job, int64_t i0)
{
    const int64_t i1 = fattn_min64(i0 + S::QUERIES, job.pairs.seq.sq);
    return fattn_band_tile(&job.pairs.band, i0, i1, job.j0, job.j0 + S::KEYS) != FATTN_TILE_FULL;
}

template <class S>
GPU_DEVICE void mma_keys_tile(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage,
                              int64_t h, int64_t i0, bool partial, mma_sums<S> &sums)
{
    typedef typename S::type T;
    enum { P = S::PITCH, N = S::QUERIES / 16, STEPS = S::WIDTH / 16 };
    float x[1][2 * N][4] = {}, dp[1][2 * N][4] = {};
    const int row = mma_warp() * 16;
    mma_dots<T, P, 1, N, STEPS>(mma_rows_a<P>(s.k, row), mma_rows_b<P>(s.q[stage], 0), x);
    mma_dots<T, P, 1, N, STEPS>(mma_rows_a<P>(s.v, row), mma_rows_b<P>(s.dout[stage], 0), dp);
    if (g.rule.terms) { /* a scale that cannot be part of the unit */
        GPU_UNROLL
        for (int n = 0; n < 8 * N; n++) {
            x[0][n / 4][n % 4] *= g.rule.scale;
        }
    }
    if (partial) {
        mma_keep_queries<S>(s.job, i0, x[0]);
    }
    mma_differentiate<S>(g, s, stage, x[0], dp[0]);
    mma_put_ds<S>(s, dp[0]);
    mma_mix<T, P, 1, STEPS, N>(x, mma_columns_b<P>(s.dout[stage], 0, 0), sums.dv);
    mma_mix<T, P, 1, STEPS, N>(dp, mma_columns_b<P>(s.q[stage], 0, 0), sums.dk);
    gpu_sync(); /* dS of all warps */
    mma_add_dq<S>(g, s, h, i0);
}

/* Walks along the queries of every head of the group. */
template <class S>
GPU_DEVICE void mma_keys_walk(const fattn_gpu_args &g, mma_backward_scratch<S> &s,
                              mma_sums<S> &sums)
{
    const int64_t h0 = s.job.hk * s.job.group, first = s.job.first;
    const int64_t tiles = s.job.past - first, count = tiles * s.job.group;
    int64_t head = h0, tile = 0;
    if (count > 0) {
        mma_copy_queries<S>(g, s, 0, h0, first * S::QUERIES);
    }
    for (int64_t n = 0; n < count; n++) {
        const int64_t h = head, i0 = (first + tile) * S::QUERIES;
        const int stage = (int)(n % 2);
        if (++tile == tiles) {
            tile = 0;
            head++;
        }
        mma_wait<0>();
        gpu_sync(); /* everyone's copies are here, and everyone is through with the other tile */
        if (n + 1 < count) {
            mma_copy_queries<S>(g, s, stage ^ 1, head, (first + tile) * S::QUERIES);
        }
        mma_keys_tile<S>(g, s, stage, h, i0, mma_is_partial<S>(s.job, i0), sums);
    }
}

/* dk or dv, times `factor`, of the warp's keys; 0 for keys that the sequence owns and does not
 * use. */
template <class S>
GPU_DEVICE void mma_store_keys(const fattn_gpu_args &g, const mma_job &job, const gpu_tensor &t,
                               const fattn_strides &stride, float factor,
                               const float sum[S::WIDTH / 8][4])
{
    const bool adds = g.problem.features & FATTN_ACCUMULATE;
    const fattn_sequence &seq = job.pairs.seq;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int key = mma_warp() * 16 + mma_lane() / 4 + 8 * h;
        const int64_t j = job.j0 + key;
        const int64_t at = gpu_key_at(g, seq, stride, job.pairs.b, job.hk, j);
        if (j >= (adds ? seq.sk : seq.slot_k)) {
            continue;
        }
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH / 8; n++) {
            const int c = 8 * n + mma_lane() % 4 * 2;
            float x[2] = {sum[n][2 * h] * factor, sum[n][2 * h + 1] * factor};
            x[0] = key < job.keys ? x[0] : 0;
            x[1] = key < job.keys ? x[1] : 0;
            if (!adds && t.quads && t.dtype != FATTN_F32 && c + 2 <= t.dim) {
                *(uint32_t *)((uint16_t *)t.data + at + c) = S::type::pack(x[0], x[1]);
                continue;
            }
            GPU_UNROLL
            for (int e = 0; e < 2; e++) {
                if (c + e < t.dim) {
                    const float old = adds ? ((const float *)t.data)[at + c + e] : 0;
                    gpu_store(t.data, t.dtype, at + c + e, old + x[e]);
                }
            }
        }
    }
}

/* Queries that see any of the keys j0 .. j1 - 1. */
GPU_DEVICE fattn_range mma_queries_of(const gpu_pairs &pairs, int64_t j0, int64_t j1)
{
    const int64_t limit = INT64_C(1) << 62;
    const fattn_band &band = pairs.band;
    const int64_t low = j0 - band.diagonal, high = j1 - band.diagonal; /* aligned with the keys */
    fattn_range rows;
    rows.first = band.right < 0 ? 0 : fattn_max64(0, low - fattn_min64(band.right, limit));
    rows.past = band.left < 0 ? pairs.seq.sq
                              : fattn_min64(pairs.seq.sq, high + fattn_min64(band.left, limit));
    return rows;
}

template <class S>
GPU_DEVICE void mma_job_set(const fattn_gpu_args &g, int64_t number, mma_job &job)
{
    const fattn_problem &p = g.problem;
    const int64_t head = fattn_quotient(number, g.tiling.k_blocks);
    const int64_t b = fattn_quotient(head, p.heads_k);
    job.pairs = gpu_pairs_of(g, b);
    const fattn_sequence &seq = job.pairs.seq;
    job.hk = head - b * p.heads_k;
    job.group = fattn_quotient(p.heads_q, p.heads_k);
    job.j0 = (number - head * g.tiling.k_blocks) * S::KEYS;
    job.keys = (int)gpu_clamp(seq.sk - job.j0, -1, INT32_MAX);
    const fattn_range rows =
        mma_queries_of(job.pairs, job.j0, fattn_min64(job.j0 + S::KEYS, seq.sk));
    job.first = rows.first / S::QUERIES;
    job.past = job.keys > 0 ? fattn_max64(job.first, (rows.past + S::QUERIES - 1) / S::QUERIES)
                            : job.first;
    job.k = (const uint16_t *)g.buffers.k + gpu_key_at(g, seq, p.k, b, job.hk, job.j0);
    job.v = (const uint16_t *)g.buffers.v + gpu_key_at(g, seq, p.v, b, job.hk, job.j0);
}

template <class S>
GPU_DEVICE void mma_backward_item(const fattn_gpu_args &g, mma_backward_scratch<S> &s,
                                  int64_t number)
{
    const fattn_problem &p = g.problem;
    gpu_sync(); /* the item before may still be read */
    if (gpu_thread() == 0) {
        mma_job_set<S>(g, number, s.job);
    }
    gpu_sync();
    const mma_job &job = s.job;
    if (job.j0 >= job.pairs.seq.slot_k) {
        return;
    }
    mma_sums<S> sums;
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH / 2; n++) {
        sums.dk[0][n / 4][n % 4] = sums.dv[0][n / 4][n % 4] = 0;
    }
    mma_copy_rows<S, S::KEYS>(s.k, job.k, p.k.seq, (int)p.dim, job.keys);
    mma_copy_rows<S, S::KEYS>(s.v, job.v, p.v.seq, (int)p.dim_v, job.keys);
    mma_keys_walk<S>(g, s, sums);
    mma_wait<0>();
    if (p.outputs & FATTN_OUT_DK) {
        const gpu_tensor dk =
            gpu_tensor_of(g, g.buffers.dk, g.dtype_gradient, FATTN_GPU_QUADS_DK, p.dim);
        mma_store_keys<S>(g, job, dk, p.dk, g.rule.scale, sums.dk[0]);
    }
    if (p.outputs & FATTN_OUT_DV) {
        const gpu_tensor dv =
            gpu_tensor_of(g, g.buffers.dv, g.dtype_gradient, FATTN_GPU_QUADS_DV, p.dim_v);
        mma_store_keys<S>(g, job, dv, p.dv, 1, sums.dv[0]);
    }
}

template <class S> GPU_DEVICE void mma_backward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_backward_scratch<S>) <=
                      MMA_BACKWARD_SHARED(S::WIDTH, S::QUERIES, S::KEYS),
                  "too small");
    extern __shared__ char shared[];
    mma_backward_scratch<S> &s = *(mma_backward_scratch<S> *)shared;
    const int64_t items = g.problem.batch * g.problem.heads_k * g.tiling.k_blocks;
    for (int64_t n = gpu_block(); n < items; n += gpu_blocks()) {
        mma_backward_item<S>(g, s, n);
    }
}

#endif
