/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on tensor cores, for 16-bit types: FlashAttention-2's loop (Dao 2023, algorithm 2) with
 * mma.sync. Its equations are those of simt_backward.cuh.
 *
 * A block owns a tile of keys, with dK and dV in fragments, and walks along the queries that see
 * them, head by head of the group:
 *
 *     S^T = K Q^T        P^T = exp(S^T - lse)               dV += P^T dO
 *     dP^T = V dO^T      dS^T = P^T (dP^T - delta)          dK += dS^T Q         dQ += dS K
 *
 * What limits it is the reading of shared memory, so all five products are cut into parts of 32
 * rows a warp, which lie differently over a tile in each, and P and dS pass through shared memory.
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
    float *lse;    /* in log2 units; +inf for a row without probabilities */
    float *delta;  /* of such a row 0 */
    float *dq;     /* W channels, not yet multiplied by scale */
    float *factor; /* of f32: see split_backward.cuh */
} mma_saved;

template <int W> GPU_DEVICE mma_saved mma_saved_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t rows = (p.features & FATTN_CU_SEQLENS_Q ? 1 : p.batch) * p.heads_q * p.total_q;
    mma_saved saved;
    saved.dq = (float *)g.workspace;
    saved.lse = saved.dq + rows * W;
    saved.delta = saved.lse + rows;
    saved.factor = saved.delta + rows;
    return saved;
}

/* Row n of the problem, of those that may exist. */
typedef struct mma_query {
    fattn_sequence seq;
    int64_t b, at; /* at: in lse */
    gpu_query q;
    bool exists;
} mma_query;

GPU_DEVICE mma_query mma_query_of(const fattn_gpu_args &g, int64_t n)
{
    const fattn_problem &p = g.problem;
    const int64_t head = fattn_quotient(n, p.seqlen_q);
    mma_query row;
    row.b = fattn_quotient(head, p.heads_q);
    row.q.h = (int32_t)(head - row.b * p.heads_q);
    row.q.i = (int32_t)(n - head * p.seqlen_q);
    row.seq = gpu_sequence(g, row.b);
    row.exists = row.q.i < row.seq.sq;
    row.at = gpu_lse_at(p, row.seq, row.b, row.q.h) + row.q.i;
    return row;
}

enum { MMA_QUERY_THREADS = 128 / MMA_BACKWARD_ROWS };

template <int W> GPU_DEVICE void mma_save_row(const fattn_gpu_args &g, const mma_query &row)
{
    const fattn_problem &p = g.problem;
    const mma_saved saved = mma_saved_of<W>(g);
    const int lane = gpu_thread() % MMA_QUERY_THREADS;
    const gpu_tensor o = gpu_tensor_of(g, g.buffers.o, p.dtype_o, FATTN_GPU_QUADS_O, p.dim_v);
    const gpu_tensor dout =
        gpu_tensor_of(g, g.buffers.dout, p.dtype_o, FATTN_GPU_QUADS_DOUT, p.dim_v);
    float sum = 0;
    if (row.exists) {
        const int64_t o_at = gpu_query_at(row.seq, p.o, row.q.i, row.q.h);
        const int64_t dout_at = gpu_query_at(row.seq, p.dout, row.q.i, row.q.h);
        for (int c = 4 * lane; c < o.dim; c += 4 * MMA_QUERY_THREADS) {
            float a[4], b[4];
            gpu_load_quad(o, o_at, c, a);
            gpu_load_quad(dout, dout_at, c, b);
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                sum = fmaf(a[e], b[e], sum);
            }
        }
        for (int c = 4 * lane; c < W; c += 4 * MMA_QUERY_THREADS) {
            const gpu_f4 zeros = {0, 0, 0, 0};
            *(gpu_f4 *)(saved.dq + row.at * W + c) = zeros;
        }
    }
    GPU_UNROLL
    for (int n = 1; n < MMA_QUERY_THREADS; n *= 2) {
        sum += gpu_shfl_xor(sum, n);
    }
    if (row.exists && lane == 0) {
        const float lse = ((const float *)g.buffers.lse)[row.at];
        const bool empty = lse == -fattn_f32_infinity();
        const float dlse = p.features & FATTN_DLSE ? ((const float *)g.buffers.dlse)[row.at] : 0;
        saved.lse[row.at] = empty ? fattn_f32_infinity() : lse * (float)FATTN_LOG2E;
        saved.delta[row.at] = empty ? 0 : sum - dlse;
    }
}

/* dQ of a row: from the workspace, times scale, to its place. */
template <int W> GPU_DEVICE void mma_finish_row(const fattn_gpu_args &g, const mma_query &row)
{
    const fattn_problem &p = g.problem;
    const mma_saved saved = mma_saved_of<W>(g);
    const gpu_tensor dq =
        gpu_tensor_of(g, g.buffers.dq, g.dtype_gradient, FATTN_GPU_QUADS_DQ, p.dim);
    if (!row.exists) {
        return;
    }
    const int64_t to = gpu_query_at(row.seq, p.dq, row.q.i, row.q.h);
    for (int c = 4 * (gpu_thread() % MMA_QUERY_THREADS); c < dq.dim; c += 4 * MMA_QUERY_THREADS) {
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

/* Writes channels c and c + 1 of row `at` of a gradient, or adds to them. c is even. */
GPU_DEVICE void mma_store_two(const gpu_tensor &t, int64_t at, int c, bool adds, float x, float y)
{
    const float two[2] = {x, y};
    if (!adds && t.quads && c + 2 <= t.dim && t.dtype != FATTN_F32) {
        *(uint32_t *)((uint16_t *)t.data + at + c) =
            gpu_narrow(t.dtype, x) | (uint32_t)gpu_narrow(t.dtype, y) << 16;
        return;
    }
    GPU_UNROLL
    for (int e = 0; e < 2; e++) {
        if (c + e < t.dim) {
            const float old = adds ? ((const float *)t.data)[at + c + e] : 0;
            gpu_store(t.data, t.dtype, at + c + e, old + two[e]);
        }
    }
}

/* --- Tiles ------------------------------------------------------------------------------------ */

/* T: mma_f16 or mma_bf16. W: channels, padded. N: queries of a tile, BN keys. */
template <class T, int W, int N, int BN, int WARPS> struct mma_backward_shape {
    typedef T type;
    enum {
        WIDTH = W,
        QUERIES = N,
        KEYS = BN,
        THREADS = 32 * WARPS,
        TILES = 2,                /* of 16 keys, of S^T, a warp */
        HIGH = BN / (16 * TILES), /* warps along the keys */
        PART_QUERIES = N / (WARPS / HIGH),
        SUMS_TILES = 2, /* the same of dV and dK */
        SUMS_HIGH = BN / (16 * SUMS_TILES),
        PART_CHANNELS = W / (WARPS / SUMS_HIGH),
        DQ_TILES = 2, /* and of dQ: 16 queries */
        DQ_HIGH = N / (16 * DQ_TILES),
        DQ_CHANNELS = W / (WARPS / DQ_HIGH)
    };
};

/* What a block works on: keys j0 .. of a key/value head, and the queries that see them. */
typedef struct mma_job {
    gpu_pairs pairs;
    int64_t hk, group, j0;
    int keys;             /* that exist from j0 on; may be more than a tile, or none */
    int first, past;      /* tiles of queries */
    int full, full_past;  /* those whose pairs are all kept */
    const void *k, *v;    /* key j0 */
    const void *q, *dout; /* query 0 of the group's first head */
    int64_t at;           /* the same in lse */
} mma_job;

template <class S> struct mma_backward_scratch {
    alignas(128) uint16_t k[S::KEYS * S::WIDTH], v[S::KEYS * S::WIDTH];
    uint16_t q[2][S::QUERIES * S::WIDTH], dout[2][S::QUERIES * S::WIDTH];
    uint16_t p[S::KEYS * S::QUERIES], ds[S::KEYS * S::QUERIES]; /* keys by queries */
    alignas(16) float lse[2][S::QUERIES], delta[2][S::QUERIES];
    mma_job job;
};

/* dK and dV, a warp's part. */
template <class S> struct mma_sums {
    float dk[S::SUMS_TILES][S::PART_CHANNELS / 8][4], dv[S::SUMS_TILES][S::PART_CHANNELS / 8][4];
};

/* Copies `live` rows from `from` on, and zeros up to ROWS. */
template <class S, int ROWS>
GPU_DEVICE void mma_copy_rows(uint16_t *tile, const uint16_t *from, int64_t stride, int dim,
                              int live)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread_anew() % CHUNKS;
    const int bytes = mma_chunk_bytes(c, dim);
    const uint16_t *row = from + gpu_thread_anew() / CHUNKS * stride + 8 * c;
    GPU_UNROLL
    for (int n = 0; n < ROWS / STEP; n++, row += STEP * stride) {
        const int r = gpu_thread_anew() / CHUNKS + n * STEP;
        mma_copy(mma_place<S::WIDTH>(mma_shared(tile), r, c), row, r < live ? bytes : 0);
    }
}

/* Begins to copy tile `tile` of the queries of the group's head `head`: q, dO, lse and delta. */
template <class S>
GPU_DEVICE void mma_copy_queries(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage,
                                 int head, int tile)
{
    const fattn_problem &p = g.problem;
    const mma_job &job = s.job;
    const int64_t i0 = (int64_t)tile * S::QUERIES;
    const int live = (int)fattn_min64(job.pairs.seq.sq - i0, S::QUERIES);
    mma_copy_rows<S, S::QUERIES>(s.q[stage],
                                 (const uint16_t *)job.q + i0 * p.q.seq + head * p.q.head, p.q.seq,
                                 (int)p.dim, live);
    mma_copy_rows<S, S::QUERIES>(s.dout[stage],
                                 (const uint16_t *)job.dout + i0 * p.dout.seq + head * p.dout.head,
                                 p.dout.seq, (int)p.dim_v, live);
    /* Rows that do not exist get lse = 0: their q and dO are 0, and so is what comes of them. */
    const int r = gpu_thread_anew();
    if (r < S::QUERIES) {
        const mma_saved saved = mma_saved_of<S::WIDTH>(g);
        const int64_t at = job.at + head * p.total_q + i0 + r;
        mma_copy_word(mma_shared(s.lse[stage] + r), saved.lse + at, r < live);
        mma_copy_word(mma_shared(s.delta[stage] + r), saved.delta + at, r < live);
    }
    mma_commit();
}

/* Where the warp's part of S^T begins. */
template <class S> GPU_DEVICE int mma_part_key(void)
{
    return mma_warp() % S::HIGH * 16 * S::TILES;
}
template <class S> GPU_DEVICE int mma_part_query(void)
{
    return mma_warp() / S::HIGH * S::PART_QUERIES;
}

/* And that of dV and dK. */
template <class S> GPU_DEVICE int mma_sums_key(void)
{
    return mma_warp() % S::SUMS_HIGH * 16 * S::SUMS_TILES;
}
template <class S> GPU_DEVICE int mma_sums_channel(void)
{
    return mma_warp() / S::SUMS_HIGH * S::PART_CHANNELS;
}

/* Scores of pairs outside the band are selected away. Rows of x are keys. */
template <class S>
GPU_DEVICE void mma_keep_queries(const mma_job &job, int64_t i0,
                                 float x[S::TILES][S::PART_QUERIES / 8][4])
{
    const fattn_band &band = job.pairs.band;
    const int64_t limit = INT64_C(1) << 62;
    const int64_t column = i0 + mma_part_query<S>() + mma_lane() % 4 * 2;
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int key = mma_part_key<S>() + 16 * m + mma_lane() / 4 + 8 * h;
            /* query i sees key j when j - right <= i + diagonal <= j + left */
            const int64_t aligned = job.j0 + key - band.diagonal - column;
            const int64_t first = band.right < 0 ? 0 : aligned - fattn_min64(band.right, limit);
            const int64_t last =
                band.left < 0 ? S::QUERIES : aligned + fattn_min64(band.left, limit);
            const int low = (int)gpu_clamp(key < job.keys ? first : S::QUERIES, -8, S::QUERIES);
            const int high = (int)gpu_clamp(last, -9, S::QUERIES);
            GPU_UNROLL
            for (int n = 0; n < S::PART_QUERIES / 4; n++) {
                const int i = n / 2 * 8 + n % 2;
                float *const score = &x[m][n / 2][2 * h + n % 2];
                *score = low <= i & i <= high ? *score : -fattn_f32_infinity();
            }
        }
    }
}

/* Of scores in x and dP in dp, P and dS go to shared memory, rounded. */
template <class S>
GPU_DEVICE void mma_differentiate(float unit, mma_backward_scratch<S> &s, int stage,
                                  const float x[2][S::PART_QUERIES / 8][4],
                                  const float dp[2][S::PART_QUERIES / 8][4])
{
    const int query = mma_part_query<S>(), key = mma_part_key<S>() + mma_lane() / 4;
    const int inside = mma_lane() % 4 * 2; /* a chunk of 8 queries */
    GPU_UNROLL
    for (int n = 0; n < S::PART_QUERIES / 8; n++) {
        const gpu_f2 lse = *(const gpu_f2 *)(s.lse[stage] + query + 8 * n + inside);
        const gpu_f2 delta = *(const gpu_f2 *)(s.delta[stage] + query + 8 * n + inside);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            const int m = e / 2, h = e % 2;
            const float p0 = mma_exp2(fmaf(x[m][n][2 * h], unit, -lse.x));
            const float p1 = mma_exp2(fmaf(x[m][n][2 * h + 1], unit, -lse.y));
            const uint32_t at =
                mma_place<S::QUERIES>(2 * inside, key + 16 * m + 8 * h, query / 8 + n);
            mma_put(mma_shared(s.p) + at, S::type::pack(p0, p1));
            mma_put(mma_shared(s.ds) + at, S::type::pack(p0 * (dp[m][n][2 * h] - delta.x),
                                                         p1 * (dp[m][n][2 * h + 1] - delta.y)));
        }
    }
}

/* A warp's part of dS K, on its way to dQ in the workspace. */
template <class S> struct mma_dq_part {
    enum { COUNT = S::DQ_TILES * S::DQ_CHANNELS / 4 }; /* pairs of elements */
    float y[S::DQ_TILES][S::DQ_CHANNELS / 8][4];
    float *to; /* the thread's first element */
    int live;  /* rows from there on that exist */
};

/* It goes to row i of the tile, and to that channel. */
template <class S>
GPU_DEVICE void mma_dq_place(const fattn_gpu_args &g, const mma_job &job, int head, int64_t i0,
                             int i, int channel, mma_dq_part<S> &part)
{
    part.live = (int)fattn_min64(job.pairs.seq.sq - i0, S::QUERIES) - i;
    part.to = mma_saved_of<S::WIDTH>(g).dq + channel + mma_lane() % 4 * 2 +
              (job.at + head * g.problem.total_q + i0 + i) * S::WIDTH;
}

template <class S>
GPU_DEVICE void mma_dq_make(const fattn_gpu_args &g, const mma_backward_scratch<S> &s, int head,
                            int64_t i0, mma_dq_part<S> &part)
{
    const int row = mma_warp() % S::DQ_HIGH * 32, i = row + mma_lane() / 4;
    const int channel = mma_warp() / S::DQ_HIGH * S::DQ_CHANNELS;
    mma_times<typename S::type, S::QUERIES, S::WIDTH, 2, S::DQ_CHANNELS / 16, S::KEYS / 16, true>(
        mma_columns_a<S::QUERIES>(s.ds, row / 8), mma_columns_b<S::WIDTH>(s.k, 0, channel / 8),
        part.y, [](int) {});
    mma_dq_place<S>(g, s.job, head, i0, i, channel, part);
}

/* Adds the pairs of slot `slot` of `slots`. */
template <class S> GPU_DEVICE void mma_dq_add(const mma_dq_part<S> &part, int slot, int slots)
{
    enum { COUNT = mma_dq_part<S>::COUNT, ROW = S::DQ_CHANNELS / 8 };
    GPU_UNROLL
    for (int n = slot * COUNT / slots; n < (slot + 1) * COUNT / slots; n++) {
        const int m = n / (2 * ROW), h = n / ROW % 2, c = n % ROW;
        if (16 * m + 8 * h < part.live) {
            mma_add_two(part.to + (16 * m + 8 * h) * S::WIDTH + 8 * c, part.y[m][c][2 * h],
                        part.y[m][c][2 * h + 1]);
        }
    }
}

/* --- A tile of keys --------------------------------------------------------------------------- */

template <class S>
GPU_DEVICE void mma_keys_tile(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage,
                              int head, int tile, mma_sums<S> &sums)
{
    typedef typename S::type T;
    enum { P = S::WIDTH, Q = S::QUERIES, N = S::PART_QUERIES / 16, STEPS = S::WIDTH / 16 };
    const int key = mma_part_key<S>(), query = mma_part_query<S>();
    const int64_t i0 = (int64_t)tile * S::QUERIES;
    float x[2][2 * N][4] = {}, dp[2][2 * N][4] = {};
    mma_dots<T, P, 2, N, STEPS>(mma_rows_a<P>(s.k, key), mma_rows_b<P>(s.q[stage], query), x);
    mma_dots<T, P, 2, N, STEPS>(mma_rows_a<P>(s.v, key), mma_rows_b<P>(s.dout[stage], query), dp);
    if (g.rule.terms) { /* a scale that cannot be part of the unit */
        GPU_UNROLL
        for (int n = 0; n < 16 * N; n++) {
            x[n / (8 * N)][n / 4 % (2 * N)][n % 4] *= g.rule.scale;
        }
    }
    if (tile < s.job.full || tile >= s.job.full_past) {
        mma_keep_queries<S>(s.job, i0, x);
    }
    mma_differentiate<S>(g.rule.unit, s, stage, x, dp);
    gpu_sync();

    mma_dq_part<S> part = {};
    mma_dq_make<S>(g, s, head, i0, part);
    /* Additions go out one by one beside the other products: all at once they would wait. */
    enum { SLOTS = S::PART_CHANNELS / 16 * (Q / 16) };
    const int chunk = mma_sums_channel<S>() / 8;
    mma_times<T, Q, P, 2, S::PART_CHANNELS / 16, Q / 16, false>(
        mma_rows_a<Q>(s.p, key), mma_columns_b<P>(s.dout[stage], 0, chunk), sums.dv,
        [&](int i) { mma_dq_add<S>(part, i, 2 * SLOTS); });
    mma_times<T, Q, P, 2, S::PART_CHANNELS / 16, Q / 16, false>(
        mma_rows_a<Q>(s.ds, key), mma_columns_b<P>(s.q[stage], 0, chunk), sums.dk,
        [&](int i) { mma_dq_add<S>(part, SLOTS + i, 2 * SLOTS); });
}

/* Walks along the queries of every head of the group. */
template <class S>
GPU_DEVICE void mma_keys_walk(const fattn_gpu_args &g, mma_backward_scratch<S> &s,
                              mma_sums<S> &sums)
{
    const int first = s.job.first, past = s.job.past;
    int heads = first < past ? (int)s.job.group : 0, head = 0, tile = first, stage = 0;
    if (heads > 0) {
        mma_copy_queries<S>(g, s, 0, 0, first);
    }
    while (head < heads) {
        const int h = head, t = tile;
        if (++tile == past) {
            tile = first;
            head++;
        }
        mma_wait<0>();
        gpu_sync(); /* everyone's copies are here, and everyone is through with the other tile */
        if (head < heads) {
            mma_copy_queries<S>(g, s, stage ^ 1, head, tile);
        }
        mma_keys_tile<S>(g, s, stage, h, t, sums);
        stage ^= 1;
    }
}

/* The warp's part of dk or dv, times `factor`; 0 for keys that are owned and not used. */
template <class S>
GPU_DEVICE void mma_store_keys(const fattn_gpu_args &g, const mma_job &job, const gpu_tensor &t,
                               const fattn_strides &stride, float factor,
                               const float sum[S::SUMS_TILES][S::PART_CHANNELS / 8][4])
{
    const bool adds = g.problem.features & FATTN_ACCUMULATE;
    const fattn_sequence &seq = job.pairs.seq;
    const int channel = mma_sums_channel<S>() + mma_lane() % 4 * 2;
    GPU_UNROLL
    for (int e = 0; e < 2 * S::SUMS_TILES; e++) {
        const int m = e / 2, h = e % 2;
        const int key = mma_sums_key<S>() + 16 * m + mma_lane() / 4 + 8 * h;
        const int64_t j = job.j0 + key;
        const int64_t at = gpu_key_at(g, seq, stride, job.pairs.b, job.hk, j);
        const bool used = key < job.keys;
        if (j >= (adds ? seq.sk : seq.slot_k)) {
            continue;
        }
        GPU_UNROLL
        for (int n = 0; n < S::PART_CHANNELS / 8; n++) {
            mma_store_two(t, at, channel + 8 * n, adds, used ? sum[m][n][2 * h] * factor : 0,
                          used ? sum[m][n][2 * h + 1] * factor : 0);
        }
    }
}

template <class S>
GPU_DEVICE void mma_store_sums(const fattn_gpu_args &g, const mma_job &job, const mma_sums<S> &sums)
{
    const fattn_problem &p = g.problem;
    if (p.outputs & FATTN_OUT_DK) {
        const gpu_tensor dk =
            gpu_tensor_of(g, g.buffers.dk, g.dtype_gradient, FATTN_GPU_QUADS_DK, p.dim);
        mma_store_keys<S>(g, job, dk, p.dk, g.rule.scale, sums.dk);
    }
    if (p.outputs & FATTN_OUT_DV) {
        const gpu_tensor dv =
            gpu_tensor_of(g, g.buffers.dv, g.dtype_gradient, FATTN_GPU_QUADS_DV, p.dim_v);
        mma_store_keys<S>(g, job, dv, p.dv, 1, sums.dv);
    }
}

template <class S>
GPU_DEVICE void mma_job_set(const fattn_gpu_args &g, int64_t number, mma_job &job)
{
    const fattn_problem &p = g.problem;
    const int64_t head = fattn_quotient(number, g.tiling.k_blocks);
    const int64_t b = fattn_quotient(head, p.heads_k);
    job.pairs = gpu_pairs_of(g, b);
    const fattn_sequence &seq = job.pairs.seq;
    const fattn_band &band = job.pairs.band;
    job.hk = head - b * p.heads_k;
    job.group = fattn_quotient(p.heads_q, p.heads_k);
    job.j0 = (number - head * g.tiling.k_blocks) * S::KEYS;
    job.keys = (int)gpu_clamp(seq.sk - job.j0, 0, INT32_MAX);

    const int64_t j1 = job.j0 + S::KEYS, h0 = job.hk * job.group, limit = INT64_C(1) << 62;
    const fattn_range rows = gpu_queries_of(job.pairs, job.j0, fattn_min64(j1, seq.sk));
    job.first = (int)(rows.first / S::QUERIES);
    job.past = job.keys > 0 ? (int)((rows.past + S::QUERIES - 1) / S::QUERIES) : 0;
    /* The first query that sees key j1 - 1, and the last that sees key j0. */
    const int64_t low =
        band.right < 0 ? 0 : j1 - 1 - band.diagonal - fattn_min64(band.right, limit);
    const int64_t high =
        band.left < 0 ? limit : job.j0 - band.diagonal + fattn_min64(band.left, limit);
    job.full =
        j1 > seq.sk ? INT32_MAX : (int)gpu_clamp((low + S::QUERIES - 1) / S::QUERIES, 0, INT32_MAX);
    job.full_past =
        high >= seq.sq - 1 ? INT32_MAX : (int)gpu_clamp((high + 1) / S::QUERIES, 0, INT32_MAX);

    typedef typename S::type::element element;
    job.k = (const element *)g.buffers.k + gpu_key_at(g, seq, p.k, b, job.hk, job.j0);
    job.v = (const element *)g.buffers.v + gpu_key_at(g, seq, p.v, b, job.hk, job.j0);
    job.q = (const element *)g.buffers.q + gpu_query_at(seq, p.q, 0, h0);
    job.dout = (const element *)g.buffers.dout + gpu_query_at(seq, p.dout, 0, h0);
    job.at = gpu_lse_at(p, seq, b, h0);
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
    mma_sums<S> sums = {};
    mma_copy_rows<S, S::KEYS>(s.k, (const uint16_t *)job.k, p.k.seq, (int)p.dim, job.keys);
    mma_copy_rows<S, S::KEYS>(s.v, (const uint16_t *)job.v, p.v.seq, (int)p.dim_v, job.keys);
    mma_keys_walk<S>(g, s, sums);
    mma_wait<0>();
    mma_store_sums<S>(g, job, sums);
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

/* The kernels before and after: mma_save_row or mma_finish_row for all rows. */
#define MMA_ROWS(name, visit)                                                         \
    GPU_KERNEL(128, 1) name(const GPU_PARAM fattn_gpu_args g)                         \
    {                                                                                 \
        const fattn_problem &p = g.problem;                                           \
        const int64_t count = p.batch * p.heads_q * p.seqlen_q;                       \
        const int64_t block = 128 / MMA_QUERY_THREADS;                                \
        for (int64_t n = gpu_block() * block; n < count; n += gpu_blocks() * block) { \
            const int64_t number = n + gpu_thread() / MMA_QUERY_THREADS;              \
            mma_query row = mma_query_of(g, fattn_min64(number, count - 1));          \
            row.exists = row.exists && number < count;                                \
            visit(g, row);                                                            \
        }                                                                             \
    }

#endif
