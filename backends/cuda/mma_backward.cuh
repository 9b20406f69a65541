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
 * dQ is a sum over blocks, which add to it in floats of the workspace: in any order, so that two
 * runs may differ in their last bits, or, ordered, in turn (below). A run is
 *
 *     clear                             zeros for dBias
 *     rows_W                            lse and delta of every row, and zeros for its dQ; and what
 *                                       the items of plain kernels are
 *     mma_backward_variant_type_W_...   dK, dV, dBias, and dQ in the workspace
 *     dq_W                              dQ in its own type
 *     sink_W                            dSink
 */
#ifndef FATTN_CUDA_MMA_BACKWARD_CUH
#define FATTN_CUDA_MMA_BACKWARD_CUH

#include "backends/cuda/mma.h"
#include "backends/cuda/mma_backward_terms.cuh"
#include "backends/cuda/mma_sm80.cuh"
#include "backends/gpu/backward_rows.cuh"
#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* --- Tiles ------------------------------------------------------------------------------------ */

/* T: mma_f16 or mma_bf16. W: channels, padded. N: queries of a tile, BN keys. LEAN kernels know
 * causal masks, windows and lengths, and are ORDERED or not; of the others those for MMA_ANY know
 * everything, and those for one of MMA_OF_PAIRS that and what is lean. */
template <class T, int W, int N, int BN, int WARPS, bool LEAN, bool ORDERED, uint64_t FEATURES>
struct mma_backward_shape {
    typedef T type;
    static constexpr uint64_t KNOWN = FEATURES;
    enum {
        IS_LEAN = LEAN,
        IS_ORDERED = ORDERED,
        IS_PLAIN = LEAN && !ORDERED,
        IS_ANY = FEATURES == MMA_ANY,
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

/* A tile of the walk along the queries of every head of a group. */
typedef struct mma_visit {
    int head, tile;
    int kind; /* MMA_BAND ..; not of lean kernels */
} mma_visit;

/* What a block works on: keys j0 .. of a key/value head, and the queries that see them. */
typedef struct mma_job {
    gpu_pairs pairs;
    int64_t hk, group, j0;
    int keys;              /* that exist from j0 on; may be more than a tile, or none */
    int first, past;       /* tiles of queries */
    int full, full_past;   /* those whose pairs are all kept */
    const void *k, *v;     /* key j0 */
    const void *q, *dout;  /* query 0 of the group's first head */
    int64_t at;            /* the same in lse */
    int staging, dbias;    /* of mma_backward_terms.cuh */
    int64_t number, block; /* item, and tile of keys */
    int32_t *turn;         /* of the tile before, or NULL */
    int32_t passed;        /* what it is to become */
    mma_visit step[2];     /* of the walk, but that of lean kernels */
} mma_job;

/* Plain kernels know the item that follows before they are through with one. */
template <bool PLAIN> struct mma_backward_next {
    mma_job next;
    int64_t number; /* of next */
};
template <> struct mma_backward_next<false> {
};

template <class S> struct mma_backward_scratch : mma_backward_next<S::IS_PLAIN> {
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

/* The same of keys, in the order of mma_backward_terms.cuh where OF_KEYS, and of rows that may be
 * `odd`: not begin at multiples of 16 bytes. */
template <class S, int ROWS, bool OF_KEYS>
GPU_DEVICE void mma_copy_slowly(uint16_t *tile, const uint16_t *from, int64_t stride, int dim,
                                int live, bool odd)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread_anew() % CHUNKS;
    const int bytes = mma_chunk_bytes(c, dim);
    GPU_ROLLED
    for (int r = gpu_thread_anew() / CHUNKS; r < ROWS; r += STEP) {
        const int n = OF_KEYS ? mma_key_of(r) : r;
        const uint32_t to = mma_place<S::WIDTH>(mma_shared(tile), r, c);
        if (odd) {
            mma_copy_odd(to, from + n * stride + 8 * c, n < live ? bytes : 0);
        } else {
            mma_copy(to, from + n * stride + 8 * c, n < live ? bytes : 0);
        }
    }
}

/* Keys, or values; lean kernels are not given odd ones. */
template <class S>
GPU_DEVICE void mma_copy_keys(uint16_t *tile, const uint16_t *from, int64_t stride, int dim,
                              int live, bool odd)
{
    if (S::IS_LEAN) {
        mma_copy_rows<S, S::KEYS>(tile, from, stride, dim, live);
    } else {
        mma_copy_slowly<S, S::KEYS, true>(tile, from, stride, dim, live, S::IS_ANY && odd);
    }
}

/* Whether rows of q or dO may begin elsewhere than at multiples of 16 bytes. */
GPU_DEVICE bool mma_is_odd(const fattn_gpu_args &g)
{
    return ~g.chunks & (FATTN_GPU_QUADS_Q | FATTN_GPU_QUADS_DOUT);
}

/* Begins to copy tile `tile` of the queries of the group's head `head`: q, dO, lse and delta. */
template <class S>
GPU_DEVICE void mma_copy_queries(const fattn_gpu_args &g, mma_backward_scratch<S> &s,
                                 const mma_job &job, int stage, int head, int tile)
{
    const fattn_problem &p = g.problem;
    const int64_t i0 = (int64_t)tile * S::QUERIES;
    const int live = (int)fattn_min64(job.pairs.seq.sq - i0, S::QUERIES);
    if (!S::IS_ANY || !mma_is_odd(g)) {
        mma_copy_rows<S, S::QUERIES>(s.q[stage],
                                     (const uint16_t *)job.q + i0 * p.q.seq + head * p.q.head,
                                     p.q.seq, (int)p.dim, live);
        mma_copy_rows<S, S::QUERIES>(
            s.dout[stage], (const uint16_t *)job.dout + i0 * p.dout.seq + head * p.dout.head,
            p.dout.seq, (int)p.dim_v, live);
    } else {
        mma_copy_slowly<S, S::QUERIES, false>(
            s.q[stage], (const uint16_t *)job.q + i0 * p.q.seq + head * p.q.head, p.q.seq,
            (int)p.dim, live, true);
        mma_copy_slowly<S, S::QUERIES, false>(
            s.dout[stage], (const uint16_t *)job.dout + i0 * p.dout.seq + head * p.dout.head,
            p.dout.seq, (int)p.dim_v, live, true);
    }
    /* Rows that do not exist get lse = 0: their q and dO are 0, and so is what comes of them. Where
     * a score may be anything they get +inf, and no probabilities. */
    const int r = gpu_thread_anew();
    if (r < S::QUERIES) {
        const gpu_workspace saved = gpu_workspace_of<S::WIDTH>(g);
        const int64_t at = job.at + head * p.total_q + i0 + r;
        if (S::IS_LEAN || r < live) {
            mma_copy_word(mma_shared(s.lse[stage] + r), saved.lse + at, r < live);
        } else {
            s.lse[stage][r] = fattn_f32_infinity();
        }
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

/* The warp's part of keys times queries, or of values times dO. */
template <class S>
GPU_DEVICE void mma_tile_dots(const uint16_t *keys, int key, const uint16_t *queries, int query,
                              float x[2][S::PART_QUERIES / 8][4])
{
    mma_dots<typename S::type, S::WIDTH, 2, S::PART_QUERIES / 16, S::WIDTH / 16>(
        mma_rows_a<S::WIDTH>(keys, key), mma_rows_b<S::WIDTH>(queries, query), x);
}

/* --- Every feature ---------------------------------------------------------------------------- */

/* What a tile needs of the masks. */
enum {
    MMA_BAND = 1,  /* the band cuts through */
    MMA_BLOCKS = 2 /* or block masks do */
};

/* How bias and masks of such a tile wait. */
template <class S> GPU_DEVICE int mma_mode(const mma_job &job, int kind)
{
    if (!S::IS_ANY) {
        return S::KNOWN == FATTN_BIAS   ? MMA_BIAS_HALVES
               : S::KNOWN == FATTN_MASK ? MMA_MASK_BYTES
                                        : 0;
    }
    return kind & MMA_BLOCKS ? MMA_BIAS_FLOATS | MMA_ONE_BY_ONE : job.staging;
}

/* The thread's pairs in tile `tile` of the queries of the group's head `head`. */
template <class S>
GPU_DEVICE mma_patch mma_patch_of(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    const fattn_problem &p = g.problem;
    const int key = mma_part_key<S>() + mma_lane() / 4 * 4;
    const int query = mma_part_query<S>() + mma_lane() % 4 * 2;
    mma_patch at;
    at.i = (int64_t)tile * S::QUERIES + query;
    at.j = job.j0 + key;
    at.h = (int)(job.hk * job.group) + head;
    at.queries = (int)gpu_clamp(job.pairs.seq.sq - at.i, 0, S::QUERIES);
    at.keys = job.keys - key;
    at.slope = at.distance = 0;
    if (p.features & FATTN_ALIBI) {
        const float *const slopes = (const float *)g.buffers.alibi_slopes;
        at.slope = slopes[job.pairs.b * p.alibi_batch_stride + at.h];
        at.distance = (float)(at.i + job.pairs.band.diagonal - at.j);
    }
    return at;
}

/* Rounded, to shared memory. */
template <class S> GPU_DEVICE void mma_put_tile(uint16_t *tile, float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    const int key = mma_part_key<S>() + mma_lane() / 4, inside = mma_lane() % 4 * 2;
    GPU_UNROLL
    for (int n = 0; n < 4 * N; n++) {
        const int k = n % 4;
        mma_put(mma_place<S::QUERIES>(mma_shared(tile) + 2 * inside,
                                      key + 16 * (k / 2) + 8 * (k % 2),
                                      mma_part_query<S>() / 8 + n / 4),
                S::type::pack(mma_pair<N>(x, n / 4 * 2, k), mma_pair<N>(x, n / 4 * 2 + 1, k)));
    }
}

/* x *= factor of pairs that are kept, and 0 of the others: what is no number stays none. */
template <class S>
GPU_DEVICE void mma_drop(const mma_kept<S> &kept, float factor, float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < 8 * N; n++) {
        mma_pair<N>(x, n / 4, n % 4) *= mma_keeps<S>(kept, n / 4, n % 4) ? factor : 0;
    }
}

/* Dot products in x become P, and dP in dp becomes dS: with dp - delta first, so that what belongs
 * to a query is read when it is needed. */
template <class S>
GPU_DEVICE void mma_subtract_delta(const float *delta, float dp[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < N; n++) {
        const gpu_f2 two = *(const gpu_f2 *)(delta + 8 * n);
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            mma_pair<N>(dp, 2 * n, k) -= two.x;
            mma_pair<N>(dp, 2 * n + 1, k) -= two.y;
        }
    }
}

template <class S>
GPU_DEVICE void mma_exponentiate(float unit, const float *lse, float x[2][S::PART_QUERIES / 8][4],
                                 float dp[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < N; n++) {
        const gpu_f2 two = *(const gpu_f2 *)(lse + 8 * n);
        GPU_UNROLL
        for (int k = 0; k < 8; k++) {
            float &score = mma_pair<N>(x, 2 * n + k / 4, k % 4);
            score = mma_exp2(fmaf(score, unit, -(k / 4 ? two.y : two.x)));
            mma_pair<N>(dp, 2 * n + k / 4, k % 4) *= score;
        }
    }
}

/* Z of dP, and the terms of scores that are arithmetic. */
template <class S>
GPU_DEVICE void mma_meet_terms(const fattn_gpu_args &g, const mma_patch &at, bool slopes,
                               const gpu_pairs &t, const float *delta, mma_kept<S> &kept,
                               float x[2][S::PART_QUERIES / 8][4],
                               float dp[2][S::PART_QUERIES / 8][4])
{
    if (mma_has<S>(g, FATTN_DROPOUT)) {
        kept = mma_keep_pairs<S>(g, t, at);
        mma_drop<S>(kept, t.dropout.multiplier, dp);
    }
    mma_subtract_delta<S>(delta, dp);
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        mma_cap_scores<S>(g.rule, slopes, x, dp);
    }
    if (mma_has<S>(g, FATTN_ALIBI)) {
        mma_add_alibi<S>(at, x);
    }
}

/* dBias. It wants dS without the slopes of a cap, which are then made of dot products anew. */
template <class S>
GPU_DEVICE void mma_meet_dbias(const fattn_gpu_args &g, const mma_backward_scratch<S> &s, int stage,
                               const mma_patch &at, float x[2][S::PART_QUERIES / 8][4],
                               float ds[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < 2 * N; n++) {
        const float four[4] = {mma_pair<N>(ds, n, 0), mma_pair<N>(ds, n, 1), mma_pair<N>(ds, n, 2),
                               mma_pair<N>(ds, n, 3)};
        mma_store_dbias(g, s.job.pairs, at, s.job.dbias, mma_query_step(n), four);
    }
    if (g.rule.terms & FATTN_SCORE_CAP) {
        GPU_UNROLL
        for (int n = 0; n < 8 * N; n++) {
            mma_pair<N>(x, n / 4, n % 4) = 0;
        }
        mma_tile_dots<S>(s.k, mma_part_key<S>(), s.q[stage], mma_part_query<S>(), x);
        mma_scale_tile<S>(g.rule.scale, x);
        mma_cap_tile<S, true>(g.rule, true, x, ds);
    }
}

/* mma_differentiate() with every feature, term by term, so that each branches once; patch(): where
 * the thread's pairs are, made where it is needed. dV waits for the size of Z, so that P Z stays a
 * number that f16 has. */
template <class S, class Patch>
GPU_DEVICE void mma_differentiate_fully(const fattn_gpu_args &g, mma_backward_scratch<S> &s,
                                        int stage, const Patch &patch, int kind,
                                        float x[2][S::PART_QUERIES / 8][4],
                                        float dp[2][S::PART_QUERIES / 8][4])
{
    const gpu_pairs &t = s.job.pairs;
    const int query = mma_part_query<S>() + mma_lane() % 4 * 2, mode = mma_mode<S>(s.job, kind);
    const bool dropout = mma_has<S>(g, FATTN_DROPOUT);
    const bool dbias = S::IS_ANY && g.problem.outputs & FATTN_OUT_DBIAS;
    mma_kept<S> kept = {};
    const bool scales = S::KNOWN == FATTN_BIAS; /* with the addition */
    if (!scales && g.rule.terms & FATTN_SCORE_SCALE) {
        mma_scale_tile<S>(g.rule.scale, x);
    }
    if (dropout || mma_has<S>(g, FATTN_SOFTCAP | FATTN_ALIBI)) {
        mma_meet_terms<S>(g, patch(), !dbias, t, s.delta[stage] + query, kept, x, dp);
    } else {
        mma_subtract_delta<S>(s.delta[stage] + query, dp);
    }
    if (mode) {
        mma_meet_room<S>(s.p, mode, scales ? g.rule.scale : 1, x);
    }
    if (kind & MMA_BAND) {
        mma_keep_band<S>(t.band, patch(), x);
    }
    mma_exponentiate<S>(g.rule.unit, s.lse[stage] + query, x, dp);
    if (mode) {
        gpu_sync(); /* what waited in the room of P and dS is needed no more */
    }
    if (dropout) {
        mma_drop<S>(kept, 1, x);
    }
    mma_put_tile<S>(s.p, x);
    if (dbias) {
        mma_meet_dbias<S>(g, s, stage, patch(), x, dp);
    }
    mma_put_tile<S>(s.ds, dp);
}

/* --- dQ --------------------------------------------------------------------------------------- */

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
    part.to = gpu_workspace_of<S::WIDTH>(g).dq + channel + mma_lane() % 4 * 2 +
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

/* --- Turns ------------------------------------------------------------------------------------
 *
 * Ordered blocks add to the dQ of a tile of queries from the last tile of keys that it sees to the
 * first, each when the one before has. Items are taken from a counter, tiles of keys of a head in
 * that same order: whom a block waits for took its item earlier, so it runs or is through, and
 * waits for nobody later. From the last tile of keys on nobody has to wait in causal runs: blocks
 * come to a tile one after the other anyhow.
 */

template <class S> GPU_DEVICE bool mma_is_ordered(const fattn_gpu_args &g)
{
    return (S::IS_ORDERED || S::IS_ANY) && g.problem.features & FATTN_DETERMINISTIC;
}

template <class S>
GPU_DEVICE int32_t *mma_turn_of(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    const fattn_problem &p = g.problem;
    const int64_t h = job.pairs.b * p.heads_q + job.hk * job.group + head;
    return gpu_workspace_of<S::WIDTH>(g).turns + h * g.tiling.q_blocks + tile;
}

/* Looks at the turn of a tile; what was seen is believed after a fence. */
template <class S>
GPU_DEVICE int32_t mma_turn_peek(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    int32_t turn = -1;
    if (mma_is_ordered<S>(g) && gpu_thread_anew() == 0) {
        turn = mma_peek(mma_turn_of<S>(g, job, head, tile));
    }
    return turn;
}

/* Gives up the turn of the tile before, to which the block has added: all threads have met since.
 * One thread does it. */
GPU_DEVICE void mma_turn_pass(mma_job &job)
{
    mma_fence();
    if (job.turn) {
        mma_poke(job.turn, job.passed);
        job.turn = NULL;
    }
}

/* The same, and waits for that of a tile; `seen`: of mma_turn_peek. It is the turn of the block as
 * many blocks have added as there are tiles of keys behind its own that see the tile (whose last
 * query, there or not, is what mma_job_set() goes by). */
template <class S>
GPU_DEVICE void mma_turn_take(const fattn_gpu_args &g, mma_job &job, int head, int tile,
                              int32_t seen)
{
    if (!mma_is_ordered<S>(g) || gpu_thread_anew() != 0) {
        return;
    }
    const int64_t last = (int64_t)(tile + 1) * S::QUERIES - 1;
    const fattn_range keys = fattn_band_row(&job.pairs.band, last);
    const int32_t own = (int32_t)((keys.past - 1) / S::KEYS - job.block);
    int32_t *const turn = mma_turn_of<S>(g, job, head, tile);
    mma_turn_pass(job);
    if (seen != own) {
        while (mma_peek(turn) != own) {}
        mma_fence();
    }
    job.turn = turn;
    job.passed = own + 1;
}

/* --- Items ------------------------------------------------------------------------------------ */

/* The key/value head of all batches, and the tile of keys, that item `number` is of. Heads of plain
 * kernels take turns as in forward, first tiles first: under a causal mask these are heavy. */
template <class S>
GPU_DEVICE int64_t mma_job_head(const fattn_gpu_args &g, int64_t number, int64_t *block)
{
    const fattn_problem &p = g.problem;
    const int64_t blocks = g.tiling.k_blocks, head = fattn_quotient(number, blocks);
    if (S::IS_PLAIN) {
        const int64_t group = fattn_quotient(p.heads_q, p.heads_k);
        fattn_tiling order;
        order.q_blocks = blocks;
        order.splits = 1;
        order.heads = p.batch * p.heads_k;
        order.together = fattn_max64(fattn_quotient(g.tiling.together, group), 1);
        const fattn_work work = fattn_schedule_item(&order, p.heads_k, number);
        *block = blocks - 1 - work.block;
        return work.batch * p.heads_k + work.head;
    }
    const int64_t at = number - head * blocks;
    *block = mma_is_ordered<S>(g) ? blocks - 1 - at : at; /* the last one first */
    return head;
}

template <class S>
GPU_DEVICE void mma_job_set(const fattn_gpu_args &g, int64_t number, mma_job &job)
{
    const fattn_problem &p = g.problem;
    const int64_t head = mma_job_head<S>(g, number, &job.block);
    const int64_t b = fattn_quotient(head, p.heads_k);
    job.pairs = gpu_pairs_of(g, b);
    const fattn_sequence &seq = job.pairs.seq;
    const fattn_band &band = job.pairs.band;
    job.hk = head - b * p.heads_k;
    job.group = fattn_quotient(p.heads_q, p.heads_k);
    job.j0 = job.block * S::KEYS;
    job.turn = NULL;
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
    if (!S::IS_LEAN) {
        job.staging = p.features & (FATTN_BIAS | FATTN_MASK) ? mma_staging(g) : 0;
        job.dbias = p.outputs & FATTN_OUT_DBIAS ? mma_dbias_mode(g) : 0;
    }
}

GPU_DEVICE int64_t mma_items(const fattn_gpu_args &g)
{
    return g.problem.batch * g.problem.heads_k * g.tiling.k_blocks;
}

/* The next item, after `number`. */
template <class S> GPU_DEVICE int64_t mma_take(const fattn_gpu_args &g, int64_t number)
{
    return mma_is_ordered<S>(g) ? (int64_t)atomicAdd(gpu_workspace_of<S::WIDTH>(g).taken, 1ull)
                                : number + gpu_blocks();
}

/* --- From item to item ------------------------------------------------------------------------
 *
 * Plain kernels have as many blocks as there are multiprocessors, which take items from a counter.
 * What an item is was written to the workspace by the kernel before: finding it takes a thread some
 * ten thousand cycles. In the last tile of an item a block learns what the next one is, and as soon
 * as nobody reads keys, values and the other tile of queries any more, begins to copy.
 */

/* The number of an item that nobody has begun; each block begins with its own number. */
template <class S> GPU_DEVICE int32_t mma_next_take(const fattn_gpu_args &g)
{
    return (int32_t)(gpu_blocks() + (int64_t)atomicAdd(gpu_workspace_of<S::WIDTH>(g).taken, 1ull));
}

template <class S> GPU_DEVICE mma_job *mma_jobs(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_job) == MMA_JOB_BYTES, "what is set aside for it");
    return (mma_job *)gpu_workspace_of<S::WIDTH>(g).turns; /* which such a run does not have */
}

/* Writes down what the items of a run are, each by a thread; nobody has begun any. */
template <class S> GPU_DEVICE void mma_write_jobs(const fattn_gpu_args &g)
{
    gpu_clear_taken<S::WIDTH>(g);
    if (g.problem.features & FATTN_DETERMINISTIC) {
        return;
    }
    mma_job *const jobs = mma_jobs<S>(g);
    const int64_t step = gpu_blocks() * gpu_threads();
    for (int64_t n = gpu_block() * gpu_threads() + gpu_thread(); n < mma_items(g); n += step) {
        memset(jobs + n, 0, sizeof jobs[n]); /* copied whole, with what such a run leaves open */
        mma_job_set<S>(g, n, jobs[n]);
    }
}

/* Begins to copy item s.number to s.next; without tiles where there is none. */
template <class S>
GPU_DEVICE void mma_next_read(const fattn_gpu_args &g, mma_backward_scratch<S> &s)
{
    enum { WORDS = sizeof(mma_job) / 4 };
    static_assert(sizeof(mma_job) % 4 == 0 && WORDS <= S::THREADS, "a thread copies a word");
    const int n = gpu_thread_anew();
    if (n < WORDS && s.number < mma_items(g)) {
        mma_copy_word(mma_shared(&s.next) + 4 * n,
                      (const uint32_t *)(mma_jobs<S>(g) + s.number) + n, true);
    } else if (n == 0) {
        s.next.first = s.next.past = 0;
    }
    mma_commit();
}

/* Waits until s.next is here and nobody reads keys and values, and begins to copy what it starts
 * with. */
template <class S>
GPU_DEVICE void mma_next_begin(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage)
{
    const fattn_problem &p = g.problem;
    const mma_job &next = s.next;
    mma_wait<0>();
    gpu_sync();
    if (next.first < next.past) {
        mma_copy_slowly<S, S::KEYS, false>(s.k, (const uint16_t *)next.k, p.k.seq, (int)p.dim,
                                           next.keys, false);
        mma_copy_slowly<S, S::KEYS, false>(s.v, (const uint16_t *)next.v, p.v.seq, (int)p.dim_v,
                                           next.keys, false);
        mma_copy_queries<S>(g, s, next, stage, 0, next.first);
    }
}

/* All of this at once, for the first item and after those without tiles. */
template <class S>
GPU_DEVICE void mma_next_fetch(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int64_t number,
                               int stage)
{
    if (gpu_thread_anew() == 0) {
        s.number = number;
    }
    gpu_sync();
    mma_next_read<S>(g, s);
    mma_next_begin<S>(g, s, stage);
}

/* --- A tile of keys --------------------------------------------------------------------------- */

template <class S>
GPU_DEVICE void mma_keys_tile(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage,
                              const int &head, const int &tile, const int &kind, int32_t turn,
                              bool last, mma_sums<S> &sums)
{
    typedef typename S::type T;
    enum { P = S::WIDTH, Q = S::QUERIES, N = S::PART_QUERIES / 16 };
    const int key = mma_part_key<S>(), query = mma_part_query<S>();
    const int64_t i0 = (int64_t)tile * S::QUERIES;
    float x[2][2 * N][4] = {}, dp[2][2 * N][4] = {};
    mma_tile_dots<S>(s.k, key, s.q[stage], query, x);
    mma_tile_dots<S>(s.v, key, s.dout[stage], query, dp);
    if (S::IS_LEAN) {
        mma_turn_take<S>(g, s.job, head, tile, turn);
    }
    if constexpr (S::IS_PLAIN) {
        if (gpu_thread_anew() == 0 && last) {
            s.number = turn;
        }
    }
    if (S::IS_LEAN) {
        if (g.rule.terms) { /* a scale that cannot be part of the unit */
            GPU_UNROLL
            for (int n = 0; n < 16 * N; n++) {
                x[n / (8 * N)][n / 4 % (2 * N)][n % 4] *= g.rule.scale;
            }
        }
        if (S::IS_PLAIN ? tile < s.job.full || tile >= s.job.full_past : kind & MMA_BAND) {
            mma_keep_queries<S>(s.job, S::IS_PLAIN ? i0 : (int64_t)tile * Q, x);
        }
        mma_differentiate<S>(g.rule.unit, s, stage, x, dp);
    } else {
        const auto patch = [&] { return mma_patch_of<S>(g, s.job, head, tile); };
        mma_wait<1>(); /* for the terms; the next tile may be on its way */
        mma_differentiate_fully<S>(g, s, stage, patch, kind, x, dp);
    }
    gpu_sync();
    if constexpr (S::IS_PLAIN) {
        if (last) {
            mma_next_read<S>(g, s);
        }
    }

    mma_dq_part<S> part = {};
    mma_dq_make<S>(g, s, head, S::IS_PLAIN ? i0 : (int64_t)tile * Q, part);
    if constexpr (S::IS_PLAIN) {
        if (last) {
            mma_next_begin<S>(g, s, stage ^ 1);
        }
    }
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

/* MMA_BAND and MMA_BLOCKS of a tile, or -1 where block masks leave nothing of it (and no block
 * waits for a turn). */
template <class S>
GPU_DEVICE int mma_kind_of(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    const fattn_problem &p = g.problem;
    const int kind = tile < job.full || tile >= job.full_past ? MMA_BAND : 0;
    if (!mma_has<S>(g, FATTN_BLOCK_MASK)) {
        return kind;
    }
    const int64_t *const stride = p.block_mask_stride;
    const int m = (int)p.block_m, n = (int)p.block_n, i0 = tile * S::QUERIES, j0 = (int)job.j0;
    const int i1 = i0 + (int)fattn_min64(job.pairs.seq.sq - i0, S::QUERIES);
    const int j1 = j0 + (int)fattn_min64(job.keys, S::KEYS);
    const int columns = (j1 - 1) / n - j0 / n + 1, count = ((i1 - 1) / m - i0 / m + 1) * columns;
    const uint8_t *const from = g.buffers.block_mask + job.pairs.b * stride[0] +
                                (job.hk * job.group + head) * stride[1] + i0 / m * stride[2] +
                                j0 / n * stride[3];
    bool kept = false, dropped = false;
    for (int e = gpu_thread(); e < count; e += S::THREADS) {
        const bool keeps = from[e / columns * stride[2] + e % columns * stride[3]] != 0;
        kept = kept || keeps;
        dropped = dropped || !keeps;
    }
    if (!gpu_any(kept)) {
        return mma_is_ordered<S>(g) ? kind | MMA_BLOCKS : -1;
    }
    return gpu_any(dropped) ? kind | MMA_BLOCKS : kind;
}

/* The first tile from this one on that is not empty, or a head past the last. All threads ask. */
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

/* Walks along the queries of every head of the group, in kernels that are not plain: where the walk
 * is lies in shared memory, since registers are short. */
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
        gpu_sync(); /* everyone's copies are here, and everyone is through with the other tile */
        if (gpu_thread_anew() == 0) {
            s.job.step[stage ^ 1] = next;
        }
        const int32_t turn = S::IS_LEAN ? mma_turn_peek<S>(g, job, now.head, now.tile) : 0;
        if (!S::IS_LEAN) {
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
        if (!S::IS_LEAN) { /* no register is left to do it later, when nobody would wait for it */
            mma_turn_take<S>(g, s.job, now.head, now.tile, -1);
        }
        mma_keys_tile<S>(g, s, stage, now.head, now.tile, now.kind, turn, false, sums);
    }
    if (mma_is_ordered<S>(g)) {
        gpu_sync();
        if (gpu_thread_anew() == 0) {
            mma_turn_pass(s.job);
        }
    }
}

/* Writes eight channels from c on, a multiple of 8, of row `at` of a gradient, or adds to them. x
 * lies in shared memory. chunks: rows begin at multiples of 16 bytes. */
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

/* The warp's part of dk or dv, times `factor`, eight rows at a time through its share of `room`; 0
 * for keys that are owned and not used. The code is run once an item, and has to be short. */
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
            const int key = S::IS_LEAN ? place : mma_key_of(place);
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

/* dK and dV of an item, through the room of P and dS. */
template <class S, class Scratch>
GPU_DEVICE void mma_store_sums(const fattn_gpu_args &g, Scratch &s, const mma_sums<S> &sums)
{
    static_assert(sizeof s.p + sizeof s.ds >= S::THREADS * S::PART_CHANNELS, "8 rows a warp");
    const fattn_problem &p = g.problem;
    const mma_job &job = s.job;
    float *const room = (float *)s.p;
    gpu_sync(); /* everyone is through with P and dS */
    if (p.outputs & FATTN_OUT_DK) {
        const gpu_tensor dk =
            gpu_tensor_of(g, g.buffers.dk, g.dtype_gradient, FATTN_GPU_QUADS_DK, p.dim);
        mma_store_keys<S>(g, job, room, dk, g.chunks & FATTN_GPU_QUADS_DK, p.dk, g.rule.scale,
                          sums.dk);
    }
    if (p.outputs & FATTN_OUT_DV) {
        const gpu_tensor dv =
            gpu_tensor_of(g, g.buffers.dv, g.dtype_gradient, FATTN_GPU_QUADS_DV, p.dim_v);
        const bool dropout = !S::IS_LEAN && p.features & FATTN_DROPOUT;
        mma_store_keys<S>(g, job, room, dv, g.chunks & FATTN_GPU_QUADS_DV, p.dv,
                          dropout ? job.pairs.dropout.multiplier : 1, sums.dv);
    }
}

/* The item of s.job. */
template <class S>
GPU_DEVICE void mma_backward_item(const fattn_gpu_args &g, mma_backward_scratch<S> &s)
{
    const fattn_problem &p = g.problem;
    const mma_job &job = s.job;
    if (job.j0 >= job.pairs.seq.slot_k) {
        return;
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

/* The same in plain kernels; stage: of the first tile, and of that of the next item. */
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
        int32_t number = 0; /* as one thread knows it */
        mma_wait<0>();
        gpu_sync(); /* everyone's copies are here, and everyone is through with the other tile */
        if (head < heads) {
            mma_copy_queries<S>(g, s, s.job, stage ^ 1, head, tile);
        } else if (gpu_thread_anew() == 0) {
            number = mma_next_take<S>(g);
        }
        mma_keys_tile<S>(g, s, stage, h, t, 0, number, head == heads, sums);
        stage ^= 1;
    }
}

/* The items of a plain kernel. */
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
        gpu_sync(); /* everyone is through with it */
    }
}

template <class S> GPU_DEVICE void mma_backward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_backward_scratch<S>) <=
                      MMA_BACKWARD_SHARED(S::WIDTH, S::QUERIES, S::KEYS),
                  "too small");
    extern __shared__ char shared[];
    mma_backward_scratch<S> &s = *(mma_backward_scratch<S> *)shared;
    if constexpr (S::IS_PLAIN) {
        mma_backward_stream<S>(g, s);
        return;
    }
    const int64_t items = mma_items(g);
    if (gpu_thread() == 0) {
        s.job.number = gpu_block() - gpu_blocks();
    }
    do {            /* the number lies where it takes no register */
        gpu_sync(); /* the item before may still be read */
        if (gpu_thread() == 0) {
            const int64_t number = mma_take<S>(g, s.job.number);
            s.job.number = number;
            if (number < items) {
                mma_job_set<S>(g, number, s.job);
            }
        }
        gpu_sync();
        if (s.job.number < items) {
            mma_backward_item<S>(g, s);
        }
    } while (s.job.number < items);
}

#endif
