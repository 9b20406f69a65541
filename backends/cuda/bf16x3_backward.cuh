/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on tensor cores for f32. It uses loop, rows and epilogue of mma_backward.cuh, with
 * elements as sums of three bf16 numbers (mma_bf16x3.cuh). The threads that load queries and dO
 * split them before they store them to shared memory, beside the products of the tile before. P and
 * dS are split by the threads that compute them. A run launches
 *
 *     bf16x3_backward_rows_W_...   lse, delta and factor of every row, and zeros for its dQ
 *     bf16x3_backward_W_...        dK, dV, and dQ in the workspace
 *     bf16x3_backward_dq_W         dQ in the caller's tensor
 *
 * P = 2^(unit x - lse) factor. lse is a float in log2 units, with a relative rounding error of
 * 2^-24. The factor corrects it; otherwise all probabilities of the row would have that error of
 * lse. P is clamped to 1 (lone.cuh).
 */
#ifndef FATTN_CUDA_BF16X3_BACKWARD_CUH
#define FATTN_CUDA_BF16X3_BACKWARD_CUH

#include "backends/cuda/mma_backward.cuh"
#include "backends/cuda/mma_bf16x3.cuh"
#include "backends/gpu/lone.cuh"

/* --- Rows ------------------------------------------------------------------------------------- */

/* Channels c and c + 1 of a row; 0 past the last, and if row is NULL. */
GPU_DEVICE gpu_f2 bf16x3_two(const float *row, int c, int dim)
{
    gpu_f2 two;
    two.x = row && c < dim ? row[c] : 0;
    two.y = row && c + 1 < dim ? row[c + 1] : 0;
    return two;
}

/* o dO^T of a warp's sixteen rows, of which a thread loads rows g and g + 8. Its diagonal gives
 * delta. Products are summed in the same order as for dP, so that a row whose o equals one of its v
 * has a dS of exactly 0 there. Returns whether any element is inexact. */
template <int W, int M>
GPU_DEVICE bool bf16x3_row_dots(const float *const o[2], const float *const dout[2], int dim,
                                float y[M][2][4])
{
    uint32_t lost = 0;
    GPU_UNROLL
    for (int step = 0; step < W / 16; step++) {
        uint32_t a[M][3][4], b[3][4];
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            const int c = 16 * step + e / 2 * 8 + mma_lane() % 4 * 2;
            const gpu_f2 left = bf16x3_two(o[e % 2], c, dim),
                         right = bf16x3_two(dout[e % 2], c, dim);
            uint32_t pair[3];
            lost |= mma_bf16x3(left.x, left.y, pair);
            GPU_UNROLL
            for (int n = 0; n < 3 * M; n++) {
                a[n / 3][n % 3][e] = pair[n % 3];
            }
            lost |= mma_bf16x3(right.x, right.y, pair);
            GPU_UNROLL
            for (int plane = 0; plane < 3; plane++) {
                b[plane][e % 2 * 2 + e / 2] = pair[plane];
            }
        }
        mma_bf16x3_sum<M> sum;
        mma_bf16x3_products<M>(a, b, sum);
        mma_bf16x3_join<M, 1>(sum, 0, y);
    }
    return lost & 0xffffu;
}

/* A warp writes lse, factor, delta and zeros for dQ of rows first .. first + 15 of `count`. */
template <int W, int M>
GPU_DEVICE void bf16x3_save_rows(const fattn_gpu_args &g, int64_t first, int64_t count)
{
    const fattn_problem &p = g.problem;
    const gpu_workspace saved = gpu_workspace_of<W>(g);
    const int below = mma_lane() / 4, inside = mma_lane() % 4;
    gpu_global_row row[2];
    const float *o[2], *dout[2];
    float margin[2];
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int64_t number = first + below + 8 * h;
        row[h] = gpu_existing_row_of(g, fattn_min64(number, count - 1));
        row[h].exists = row[h].exists && number < count;
        const gpu_query q = row[h].q;
        const bool exists = row[h].exists;
        o[h] = exists ? (float *)g.buffers.o + gpu_query_at(row[h].seq, p.o, q.i, q.h) : NULL;
        dout[h] =
            exists ? (float *)g.buffers.dout + gpu_query_at(row[h].seq, p.dout, q.i, q.h) : NULL;
        for (int c = 4 * inside; c < W && exists; c += 16) {
            const gpu_f4 zeros = {0, 0, 0, 0};
            *(gpu_f4 *)(saved.dq + row[h].at * W + c) = zeros;
        }
        gpu_pairs t;
        t.b = row[h].b;
        t.seq = row[h].seq;
        t.band = fattn_band_of(&p, &t.seq);
        margin[h] = gpu_lone_margin<4>(g, t, q, exists ? gpu_band_key(t, q.i) : -1,
                                       exists ? ((const float *)g.buffers.lse)[row[h].at] : 0);
    }
    float y[M][2][4] = {};
    const bool inexact = __any_sync(0xffffffffu, bf16x3_row_dots<W, M>(o, dout, (int)p.dim_v, y));
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        float sum = below % 2 ? y[0][h][2 * h + 1] : y[0][h][2 * h];
        if (!row[h].exists || inside != below / 2) { /* another lane has the diagonal element */
            continue;
        }
        for (int c = 0; inexact && c < p.dim_v; c++) {
            sum = fmaf(o[h][c], dout[h][c], c == 0 ? 0 : sum);
        }
        const int64_t at = row[h].at;
        const float lse = ((const float *)g.buffers.lse)[at];
        const float dlse = p.features & FATTN_DLSE ? ((const float *)g.buffers.dlse)[at] : 0;
        const bool empty = lse == -fattn_f32_infinity();
        const double exact = lse * FATTN_LOG2E, rest = exact - (float)exact;
        saved.lse[at] = empty ? fattn_f32_infinity() : (float)exact - margin[h];
        saved.factor[at] = rest == rest ? exp2f((float)-rest) : 1; /* infinities have no rest */
        saved.delta[at] = empty ? 0 : sum - dlse;
    }
}

template <int W, int M> GPU_DEVICE void bf16x3_rows_all(const fattn_gpu_args &g)
{
    const int64_t count = fattn_gpu_row_count(&g.problem), block = BF16X3_ROWS_THREADS / 2;
    for (int64_t n = gpu_block() * block; n < count; n += gpu_blocks() * block) {
        bf16x3_save_rows<W, M>(g, n + mma_warp() * 16, count);
    }
}

/* --- Tiles ------------------------------------------------------------------------------------ */

/* W: channels, padded. N, BN: queries and keys of a tile. A warp's part has 16 * M rows of S^T,
 * 16 * MS of dK and dV, 16 * MQ of dQ. */
template <int W, int N, int BN, int WARPS, int M, int MS, int MQ> struct bf16x3_backward_shape {
    typedef mma_f32 type;
    static constexpr mma_variant VARIANT = MMA_LEAN;
    enum {
        WIDTH = W,
        QUERIES = N,
        KEYS = BN,
        THREADS = 32 * WARPS,
        TILES = M,
        HIGH = BN / (16 * M),
        PART_QUERIES = N / (WARPS / HIGH),
        SUMS_TILES = MS,
        SUMS_HIGH = BN / (16 * MS),
        PART_CHANNELS = W / (WARPS / SUMS_HIGH),
        DQ_TILES = MQ,
        DQ_HIGH = N / (16 * MQ),
        DQ_CHANNELS = W / (WARPS / DQ_HIGH)
    };
    static_assert(PART_QUERIES % 16 == 0 && PART_CHANNELS % 16 == 0 && DQ_CHANNELS % 16 == 0,
                  "a warp's part is of whole products");
};

template <class S> struct bf16x3_backward_scratch {
    alignas(128) uint16_t k[3][S::KEYS * S::WIDTH], v[3][S::KEYS * S::WIDTH];
    uint16_t q[2][3][S::QUERIES * S::WIDTH], dout[2][3][S::QUERIES * S::WIDTH];
    uint16_t p[3][S::KEYS * S::QUERIES], ds[3][S::KEYS * S::QUERIES]; /* inexact tiles: floats */
    alignas(16) float lse[2][S::QUERIES], factor[2][S::QUERIES], delta[2][S::QUERIES];
    mma_job job;
};

/* A tile of queries, of the group's head `head`, in global memory. */
typedef struct bf16x3_queries {
    const float *q, *dout;
    int64_t i0;
    int live;
} bf16x3_queries;

template <class S>
GPU_DEVICE bf16x3_queries bf16x3_queries_at(const fattn_gpu_args &g, const mma_job &job, int head,
                                            int tile)
{
    const fattn_problem &p = g.problem;
    bf16x3_queries t;
    t.i0 = (int64_t)tile * S::QUERIES;
    t.live = (int)fattn_min64(job.pairs.seq.sq - t.i0, S::QUERIES);
    t.q = (const float *)job.q + t.i0 * p.q.seq + head * p.q.head;
    t.dout = (const float *)job.dout + t.i0 * p.dout.seq + head * p.dout.head;
    return t;
}

/* A thread's part of a tile of q and dO, in registers between load and store. */
template <class S> struct bf16x3_moving {
    mma_bf16x3_part<S::THREADS, S::WIDTH, S::QUERIES> q, dout;
};

/* Begins to load a tile. Rows that do not exist get lse = 0: their q and dO are 0, and so are their
 * contributions. */
template <class S>
GPU_DEVICE void bf16x3_fetch(const fattn_gpu_args &g, bf16x3_backward_scratch<S> &s, int stage,
                             int head, int tile, bf16x3_moving<S> &moving)
{
    const fattn_problem &p = g.problem;
    const bf16x3_queries t = bf16x3_queries_at<S>(g, s.job, head, tile);
    moving.q.fetch(t.q, p.q.seq, p.dim, t.live);
    moving.dout.fetch(t.dout, p.dout.seq, p.dim_v, t.live);
    const int r = gpu_thread_anew();
    if (r < S::QUERIES) {
        const gpu_workspace saved = gpu_workspace_of<S::WIDTH>(g);
        const int64_t at = s.job.at + head * p.total_q + t.i0 + r;
        mma_copy_word(mma_shared(s.lse[stage] + r), saved.lse + at, r < t.live);
        mma_copy_word(mma_shared(s.factor[stage] + r), saved.factor + at, r < t.live);
        mma_copy_word(mma_shared(s.delta[stage] + r), saved.delta + at, r < t.live);
    }
    mma_commit();
}

template <class S>
GPU_DEVICE bool bf16x3_put(bf16x3_backward_scratch<S> &s, int stage, const bf16x3_moving<S> &moving)
{
    const uint32_t q = mma_shared(s.q[stage]), dout = mma_shared(s.dout[stage]);
    const bool inexact = moving.q.put([q](int r, int c) { return mma_place<S::WIDTH>(q, r, c); });
    return moving.dout.put([dout](int r, int c) { return mma_place<S::WIDTH>(dout, r, c); }) ||
           inexact;
}

/* --- A tile of keys and one of queries -------------------------------------------------------- */

/* A warp's part of S^T and dP^T. */
template <class S>
GPU_DEVICE void bf16x3_dots(const bf16x3_backward_scratch<S> &s, int stage,
                            float x[S::TILES][S::PART_QUERIES / 8][4],
                            float dp[S::TILES][S::PART_QUERIES / 8][4])
{
    enum { P = S::WIDTH, M = S::TILES, N = S::PART_QUERIES / 16, STEPS = S::WIDTH / 16 };
    enum { K_BYTES = 2 * S::KEYS * P, Q_BYTES = 2 * S::QUERIES * P };
    const int key = mma_part_key<S>(), query = mma_part_query<S>();
    mma_bf16x3_dots<P, M, N, STEPS>(mma_rows_a<P>(s.k[0], key), K_BYTES,
                                    mma_rows_b<P>(s.q[stage][0], query), Q_BYTES, x);
    mma_bf16x3_dots<P, M, N, STEPS>(mma_rows_a<P>(s.v[0], key), K_BYTES,
                                    mma_rows_b<P>(s.dout[stage][0], query), Q_BYTES, dp);
}

/* The same by plain multiply-adds. */
template <class S>
GPU_DEVICE void bf16x3_dots_by_fma(const fattn_gpu_args &g, const mma_job &job,
                                   const bf16x3_queries &t,
                                   float x[S::TILES][S::PART_QUERIES / 8][4],
                                   float dp[S::TILES][S::PART_QUERIES / 8][4])
{
    enum { M = S::TILES, N = S::PART_QUERIES / 16 };
    const fattn_problem &p = g.problem;
    const float *k[M][2], *v[M][2];
    GPU_UNROLL
    for (int n = 0; n < 2 * M; n++) {
        const int key = mma_part_key<S>() + 8 * n + mma_lane() / 4;
        k[n / 2][n % 2] = key < job.keys ? (const float *)job.k + key * p.k.seq : NULL;
        v[n / 2][n % 2] = key < job.keys ? (const float *)job.v + key * p.v.seq : NULL;
    }
    const int first = mma_part_query<S>() + mma_lane() % 4 * 2;
    const auto column = [first](int e) { return first + e / 2 * 8 + e % 2; };
    mma_plain_dots<M, N>(k, t.q, p.q.seq, t.live, p.dim, column, x);
    mma_plain_dots<M, N>(v, t.dout, p.dout.seq, t.live, p.dim_v, column, dp);
}

/* 2^x times a row's factor, and at most 1. */
GPU_DEVICE float bf16x3_weight(float x, float factor)
{
    const float weight = mma_exp2(x) * factor;
    return weight > 1 ? 1 : weight; /* a NaN stays a NaN */
}

/* Computes P and dS from scores in x and dP in dp, and stores them to shared memory: as planes or,
 * if the tile is inexact, as floats. */
template <class S>
GPU_DEVICE void bf16x3_differentiate(float unit, bf16x3_backward_scratch<S> &s, int stage,
                                     bool inexact, const float x[S::TILES][S::PART_QUERIES / 8][4],
                                     const float dp[S::TILES][S::PART_QUERIES / 8][4])
{
    enum { BYTES = 2 * S::KEYS * S::QUERIES };
    const int query = mma_part_query<S>(), key = mma_part_key<S>() + mma_lane() / 4;
    const int inside = mma_lane() % 4 * 2; /* a chunk of 8 queries */
    GPU_UNROLL
    for (int n = 0; n < S::PART_QUERIES / 8; n++) {
        const int i = query + 8 * n + inside;
        const gpu_f2 lse = *(const gpu_f2 *)(s.lse[stage] + i);
        const gpu_f2 factor = *(const gpu_f2 *)(s.factor[stage] + i);
        const gpu_f2 delta = *(const gpu_f2 *)(s.delta[stage] + i);
        GPU_UNROLL
        for (int e = 0; e < 2 * S::TILES; e++) {
            const int m = e / 2, h = e % 2, j = key + 8 * e;
            const float *const x_pair = x[m][n] + 2 * h, *const dp_pair = dp[m][n] + 2 * h;
            const float p0 = bf16x3_weight(fmaf(x_pair[0], unit, -lse.x), factor.x);
            const float p1 = bf16x3_weight(fmaf(x_pair[1], unit, -lse.y), factor.y);
            const float ds0 = p0 * (dp_pair[0] - delta.x), ds1 = p1 * (dp_pair[1] - delta.y);
            if (inexact) {
                float *const p_to = (float *)s.p + j * S::QUERIES + i;
                float *const ds_to = (float *)s.ds + j * S::QUERIES + i;
                p_to[0] = p0, p_to[1] = p1;
                ds_to[0] = ds0, ds_to[1] = ds1;
                continue;
            }
            const uint32_t at = mma_place<S::QUERIES>(2 * inside, j, query / 8 + n);
            uint32_t p[3], ds[3];
            mma_bf16x3(p0, p1, p);
            mma_bf16x3(ds0, ds1, ds);
            GPU_UNROLL
            for (int plane = 0; plane < 3; plane++) {
                mma_put(mma_shared(s.p) + plane * BYTES + at, p[plane]);
                mma_put(mma_shared(s.ds) + plane * BYTES + at, ds[plane]);
            }
        }
    }
}

/* dQ += dS K, dV += P^T dO, dK += dS^T Q. The additions to dQ are issued one by one between the
 * other products: all at once, they would stall. */
template <class S>
GPU_DEVICE void bf16x3_products(const bf16x3_backward_scratch<S> &s, int stage, int row,
                                int channel, mma_dq_part<S> &part, mma_sums<S> &sums)
{
    enum { P = S::WIDTH, Q = S::QUERIES, M = S::SUMS_TILES, N = S::PART_CHANNELS / 16 };
    enum { K_BYTES = 2 * S::KEYS * P, Q_BYTES = 2 * Q * P, P_BYTES = 2 * S::KEYS * Q };
    enum { SLOTS = N * (Q / 16) };
    const int key = mma_sums_key<S>(), chunk = mma_sums_channel<S>() / 8;
    mma_bf16x3_times<Q, P, S::DQ_TILES, S::DQ_CHANNELS / 16, S::KEYS / 16, true>(
        mma_columns_a<Q>(s.ds[0], row / 8), P_BYTES, mma_columns_b<P>(s.k[0], 0, channel / 8),
        K_BYTES, part.y, [](int) {});
    mma_bf16x3_times<Q, P, M, N, Q / 16, false>(
        mma_rows_a<Q>(s.p[0], key), P_BYTES, mma_columns_b<P>(s.dout[stage][0], 0, chunk), Q_BYTES,
        sums.dv, [&](int i) { mma_dq_add<S>(part, i, 2 * SLOTS); });
    mma_bf16x3_times<Q, P, M, N, Q / 16, false>(
        mma_rows_a<Q>(s.ds[0], key), P_BYTES, mma_columns_b<P>(s.q[stage][0], 0, chunk), Q_BYTES,
        sums.dk, [&](int i) { mma_dq_add<S>(part, SLOTS + i, 2 * SLOTS); });
}

/* The same by plain multiply-adds. */
template <class S>
GPU_DEVICE void bf16x3_plain_products(const fattn_gpu_args &g, const bf16x3_backward_scratch<S> &s,
                                      const bf16x3_queries &t, int row, int channel,
                                      mma_dq_part<S> &part, mma_sums<S> &sums)
{
    enum { Q = S::QUERIES, M = S::SUMS_TILES, N = S::PART_CHANNELS / 16 };
    const fattn_problem &p = g.problem;
    const int inside = mma_lane() % 4 * 2, below = mma_lane() / 4;
    const int keys = s.job.keys < S::KEYS ? s.job.keys : S::KEYS;
    const float *const weights = (const float *)s.p, *const changes = (const float *)s.ds;
    const int down = (mma_sums_key<S>() + below) * Q, c = mma_sums_channel<S>() + inside;
    channel += inside;
    mma_plain_times<S::DQ_TILES, S::DQ_CHANNELS / 16>(changes + row + below, 1, Q, keys,
                                                      (const float *)s.job.k + channel, p.k.seq,
                                                      (int)p.dim - channel, part.y);
    mma_plain_times<M, N>(weights + down, Q, 1, t.live, t.dout + c, p.dout.seq, (int)p.dim_v - c,
                          sums.dv);
    mma_plain_times<M, N>(changes + down, Q, 1, t.live, t.q + c, p.q.seq, (int)p.dim - c, sums.dk);
    mma_dq_add<S>(part, 0, 1);
}

template <class S>
GPU_DEVICE void bf16x3_keys_tile(const fattn_gpu_args &g, bf16x3_backward_scratch<S> &s, int stage,
                                 int head, int tile, bool inexact, mma_sums<S> &sums)
{
    const bf16x3_queries t = bf16x3_queries_at<S>(g, s.job, head, tile);
    float x[S::TILES][S::PART_QUERIES / 8][4] = {}, dp[S::TILES][S::PART_QUERIES / 8][4] = {};
    if (inexact) {
        bf16x3_dots_by_fma<S>(g, s.job, t, x, dp);
    } else {
        bf16x3_dots<S>(s, stage, x, dp);
    }
    if (g.rule.terms) { /* a scale that cannot be part of the unit */
        GPU_UNROLL
        for (int n = 0; n < S::TILES * S::PART_QUERIES / 2; n++) {
            x[n / (S::PART_QUERIES / 2)][n / 4 % (S::PART_QUERIES / 8)][n % 4] *= g.rule.scale;
        }
    }
    if (tile < s.job.full || tile >= s.job.full_past) {
        mma_apply_band_of_keys<S>(s.job, t.i0, x);
    }
    bf16x3_differentiate<S>(g.rule.unit, s, stage, inexact, x, dp);
    gpu_sync();

    const int row = mma_warp() % S::DQ_HIGH * 16 * S::DQ_TILES;
    const int channel = mma_warp() / S::DQ_HIGH * S::DQ_CHANNELS;
    mma_dq_part<S> part = {};
    mma_dq_place<S>(g, s.job, head, t.i0, row + mma_lane() / 4, channel, part);
    if (inexact) {
        bf16x3_plain_products<S>(g, s, t, row, channel, part, sums);
    } else {
        bf16x3_products<S>(s, stage, row, channel, part, sums);
    }
}

/* Visits the queries of every head of the group. */
template <class S>
GPU_DEVICE void bf16x3_keys_walk(const fattn_gpu_args &g, bf16x3_backward_scratch<S> &s,
                                 bool inexact_keys, mma_sums<S> &sums)
{
    const int first = s.job.first, past = s.job.past;
    int heads = first < past ? (int)s.job.group : 0, head = 0, tile = first, stage = 0;
    bool inexact = false;
    bf16x3_moving<S> moving;
    if (heads > 0) {
        bf16x3_fetch<S>(g, s, 0, 0, first, moving);
        inexact = bf16x3_put<S>(s, 0, moving);
    }
    while (head < heads) {
        const int h = head, t = tile;
        if (++tile == past) {
            tile = first;
            head++;
        }
        mma_wait<0>();
        /* A barrier: all threads' parts are stored, and all have read the other tile. */
        const bool plainly = gpu_any(inexact || inexact_keys);
        if (head < heads) {
            bf16x3_fetch<S>(g, s, stage ^ 1, head, tile, moving);
        }
        bf16x3_keys_tile<S>(g, s, stage, h, t, plainly, sums);
        stage ^= 1;
        inexact = head < heads && bf16x3_put<S>(s, stage, moving);
    }
}

/* Loads, splits and stores all keys of the job, or its values. Returns whether any is inexact. */
template <class S>
GPU_DEVICE bool bf16x3_put_keys(uint16_t *tile, const void *from, int64_t stride, int64_t dim,
                                int live)
{
    mma_bf16x3_part<S::THREADS, S::WIDTH, S::KEYS> part;
    part.fetch((const float *)from, stride, dim, live);
    return part.put([tile](int r, int c) { return mma_place<S::WIDTH>(mma_shared(tile), r, c); });
}

template <class S>
GPU_DEVICE void bf16x3_backward_item(const fattn_gpu_args &g, bf16x3_backward_scratch<S> &s,
                                     int64_t number)
{
    const fattn_problem &p = g.problem;
    gpu_sync(); /* the item before may still be read */
    if (gpu_thread() == 0) {
        mma_job_set<S>(g, mma_tile_of<S>(g, number), s.job);
    }
    gpu_sync();
    const mma_job &job = s.job;
    if (job.j0 >= job.pairs.seq.slot_k) {
        return;
    }
    mma_sums<S> sums = {};
    bool inexact = bf16x3_put_keys<S>(s.k[0], job.k, p.k.seq, p.dim, job.keys);
    inexact = bf16x3_put_keys<S>(s.v[0], job.v, p.v.seq, p.dim_v, job.keys) || inexact;
    bf16x3_keys_walk<S>(g, s, inexact, sums);
    mma_store_sums<S>(g, s, sums);
}

template <class S> GPU_DEVICE void bf16x3_backward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(bf16x3_backward_scratch<S>) <=
                      BF16X3_BACKWARD_SHARED(S::WIDTH, S::QUERIES, S::KEYS),
                  "too small");
    extern __shared__ char shared[];
    bf16x3_backward_scratch<S> &s = *(bf16x3_backward_scratch<S> *)shared;
    const int64_t items = mma_items(g);
    for (int64_t n = gpu_block(); n < items; n += gpu_blocks()) {
        bf16x3_backward_item<S>(g, s, n);
    }
}

#endif
