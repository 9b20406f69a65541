/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tile of backward on tensor cores: its shape, the shared memory and how it is filled, P and dS
 * with the features that a kernel has, and a warp's part of dQ.
 */
#ifndef FATTN_CUDA_MMA_BACKWARD_TILE_CUH
#define FATTN_CUDA_MMA_BACKWARD_TILE_CUH

#include "backends/cuda/mma.h"
#include "backends/cuda/mma_backward_terms.cuh"
#include "backends/cuda/mma_sm80.cuh"
#include "backends/gpu/backward_rows.cuh"
#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* --- Shapes and shared memory ----------------------------------------------------------------- */

/* T: mma_f16 or mma_bf16. W: channels, padded. N, BN: queries and keys of a tile. FEATURES: those
 * of MMA_OF_PAIRS that the run has, or MMA_ANY. */
template <class T, int W, int N, int BN, int WARPS, mma_variant V, uint64_t FEATURES>
struct mma_backward_shape {
    typedef T type;
    static constexpr uint64_t KNOWN = FEATURES;
    static constexpr mma_variant VARIANT = V;
    static_assert((V == MMA_EVERYTHING) == (FEATURES == MMA_ANY), "which are known");
    enum {
        WIDTH = W,
        QUERIES = N,
        KEYS = BN,
        THREADS = 32 * WARPS,
        TILES = 2,                /* tiles of 16 keys that a warp has of S^T and dP^T */
        HIGH = BN / (16 * TILES), /* warps along the keys */
        PART_QUERIES = N / (WARPS / HIGH),
        SUMS_TILES = 2, /* the same for dV and dK */
        SUMS_HIGH = BN / (16 * SUMS_TILES),
        PART_CHANNELS = W / (WARPS / SUMS_HIGH),
        DQ_TILES = 2, /* the same for dQ, with tiles of 16 queries */
        DQ_HIGH = N / (16 * DQ_TILES),
        DQ_CHANNELS = W / (WARPS / DQ_HIGH)
    };
};

/* A visited tile of queries, of one head of the group. */
typedef struct mma_visit {
    int head, tile;
    int kind; /* MMA_BAND ..; unused in lean kernels */
} mma_visit;

/* The description of an item: keys j0 .. of a key/value head, and the queries that attend to
 * them. */
typedef struct mma_job {
    gpu_pairs pairs;
    int64_t hk, group, j0;
    int keys;              /* how many exist from j0 on; may be more than a tile, or none */
    int first, past;       /* tiles of queries first .. past - 1 */
    int full, full_past;   /* those whose pairs are all kept */
    const void *k, *v;     /* key j0 */
    const void *q, *dout;  /* query 0 of the group's first head */
    int64_t at;            /* its index in lse */
    int staging, dbias;    /* mma_staging() and mma_dbias_mode() */
    int64_t number, block; /* number of the item; tile of keys */
    int32_t *turn;         /* the turn that the block holds, of the tile before; or NULL */
    int32_t passed;        /* the value to write to it when passing it on */
    mma_visit step[2];     /* visited tiles by stage; unused in lean kernels */
} mma_job;

/* Lean kernels read the description of the next item before they have finished one. */
template <bool PLAIN> struct mma_backward_next {
    mma_job next;
    int64_t number; /* of next */
};
template <> struct mma_backward_next<false> {
};

template <class S> struct mma_backward_scratch : mma_backward_next<S::VARIANT == MMA_LEAN> {
    alignas(128) uint16_t k[S::KEYS * S::WIDTH], v[S::KEYS * S::WIDTH];
    uint16_t q[2][S::QUERIES * S::WIDTH], dout[2][S::QUERIES * S::WIDTH];
    uint16_t p[S::KEYS * S::QUERIES], ds[S::KEYS * S::QUERIES]; /* [key][query] */
    alignas(16) float lse[2][S::QUERIES], delta[2][S::QUERIES];
    mma_job job;
};

/* A warp's part of dK and dV. */
template <class S> struct mma_sums {
    float dk[S::SUMS_TILES][S::PART_CHANNELS / 8][4], dv[S::SUMS_TILES][S::PART_CHANNELS / 8][4];
};

/* Begins to copy `live` rows from `from` on, and zeros up to ROWS. */
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

/* The same in a loop that is not unrolled. OF_KEYS: the rows are keys in the order of
 * mma_backward_terms.cuh. misaligned: they do not begin at multiples of 16 bytes. */
template <class S, int ROWS, bool OF_KEYS>
GPU_DEVICE void mma_copy_slowly(uint16_t *tile, const uint16_t *from, int64_t stride, int dim,
                                int live, bool misaligned)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread_anew() % CHUNKS;
    const int bytes = mma_chunk_bytes(c, dim);
    GPU_ROLLED
    for (int r = gpu_thread_anew() / CHUNKS; r < ROWS; r += STEP) {
        const int n = OF_KEYS ? mma_key_of(r) : r;
        const uint32_t to = mma_place<S::WIDTH>(mma_shared(tile), r, c);
        if (misaligned) {
            mma_copy_misaligned(to, from + n * stride + 8 * c, n < live ? bytes : 0);
        } else {
            mma_copy(to, from + n * stride + 8 * c, n < live ? bytes : 0);
        }
    }
}

/* Begins to copy keys or values. Only kernels for every feature get misaligned ones. */
template <class S>
GPU_DEVICE void mma_copy_keys(uint16_t *tile, const uint16_t *from, int64_t stride, int dim,
                              int live, bool misaligned)
{
    if (mma_is_lean(S::VARIANT)) {
        mma_copy_rows<S, S::KEYS>(tile, from, stride, dim, live);
    } else {
        mma_copy_slowly<S, S::KEYS, true>(tile, from, stride, dim, live,
                                          S::VARIANT == MMA_EVERYTHING && misaligned);
    }
}

/* Whether rows of q or of dO are not aligned to 16 bytes. */
GPU_DEVICE bool mma_is_misaligned(const fattn_gpu_args &g)
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
    if (S::VARIANT != MMA_EVERYTHING || !mma_is_misaligned(g)) {
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
    /* In lean kernels, rows that do not exist get lse = 0: their q and dO are 0, and so are their
     * contributions. With features their scores may have any value, so they get an lse of +inf,
     * which makes their probabilities 0. */
    const int r = gpu_thread_anew();
    if (r < S::QUERIES) {
        const gpu_workspace saved = gpu_workspace_of<S::WIDTH>(g);
        const int64_t at = job.at + head * p.total_q + i0 + r;
        if (mma_is_lean(S::VARIANT) || r < live) {
            mma_copy_word(mma_shared(s.lse[stage] + r), saved.lse + at, r < live);
        } else {
            s.lse[stage][r] = fattn_f32_infinity();
        }
        mma_copy_word(mma_shared(s.delta[stage] + r), saved.delta + at, r < live);
    }
    mma_commit();
}

/* The first key and query of the warp's part of S^T. */
template <class S> GPU_DEVICE int mma_part_key(void)
{
    return mma_warp() % S::HIGH * 16 * S::TILES;
}
template <class S> GPU_DEVICE int mma_part_query(void)
{
    return mma_warp() / S::HIGH * S::PART_QUERIES;
}

/* The first key and channel of the warp's part of dV and dK. */
template <class S> GPU_DEVICE int mma_sums_key(void)
{
    return mma_warp() % S::SUMS_HIGH * 16 * S::SUMS_TILES;
}
template <class S> GPU_DEVICE int mma_sums_channel(void)
{
    return mma_warp() / S::SUMS_HIGH * S::PART_CHANNELS;
}

/* Sets scores of pairs outside the band to -inf. Rows of x are keys. */
template <class S>
GPU_DEVICE void mma_apply_band_of_keys(const mma_job &job, int64_t i0,
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
            /* query i attends to key j if j - right <= i + diagonal <= j + left */
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

/* Computes P and dS from scores in x and dP in dp, and stores them rounded to shared memory. */
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

/* The warp's part of K Q^T, or of V dO^T. */
template <class S>
GPU_DEVICE void mma_tile_dots(const uint16_t *keys, int key, const uint16_t *queries, int query,
                              float x[2][S::PART_QUERIES / 8][4])
{
    mma_dots<typename S::type, S::WIDTH, 2, S::PART_QUERIES / 16, S::WIDTH / 16>(
        mma_rows_a<S::WIDTH>(keys, key), mma_rows_b<S::WIDTH>(queries, query), x);
}

/* --- Every feature ---------------------------------------------------------------------------- */

/* Which masks a tile has to apply. */
enum {
    MMA_BAND = 1,  /* part of it is outside the band */
    MMA_BLOCKS = 2 /* block masks hide part of it */
};

/* How the bias and masks of such a tile are staged. */
template <class S> GPU_DEVICE int mma_mode(const mma_job &job, int kind)
{
    if (S::VARIANT != MMA_EVERYTHING) {
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

/* Stores x to shared memory, rounded. */
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

/* Multiplies x by `factor` if dropout keeps the pair, or by 0 if not, so that NaN stays NaN. */
template <class S>
GPU_DEVICE void mma_drop(const mma_dropout_kept<S> &kept, float factor,
                         float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < 8 * N; n++) {
        mma_pair<N>(x, n / 4, n % 4) *= mma_dropout_keeps<S>(kept, n / 4, n % 4) ? factor : 0;
    }
}

/* dP - delta. This comes before the scores are processed, so that delta does not occupy registers
 * meanwhile. */
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

/* Turns scores in x into P, and dP - delta in dp into dS. lse is in log2 units. */
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

/* Applies dropout to dP, subtracts delta, and applies softcap and ALiBi to the scores. */
template <class S>
GPU_DEVICE void mma_apply_terms(const fattn_gpu_args &g, const mma_patch &at, bool times_dscore,
                                const gpu_pairs &t, const float *delta, mma_dropout_kept<S> &kept,
                                float x[2][S::PART_QUERIES / 8][4],
                                float dp[2][S::PART_QUERIES / 8][4])
{
    if (mma_has<S>(g, FATTN_DROPOUT)) {
        kept = mma_dropout_of_pairs<S>(g, t, at);
        mma_drop<S>(kept, t.dropout.multiplier, dp);
    }
    mma_subtract_delta<S>(delta, dp);
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        mma_cap_scores<S>(g.rule, times_dscore, x, dp);
    }
    if (mma_has<S>(g, FATTN_ALIBI)) {
        mma_add_alibi<S>(at, x);
    }
}

/* Stores dBias, which needs dS without the derivatives of the softcap. dS is multiplied by these
 * afterwards; the dot products that they depend on are computed again, in x. */
template <class S>
GPU_DEVICE void mma_store_dbias_tile(const fattn_gpu_args &g, const mma_backward_scratch<S> &s,
                                     int stage, const mma_patch &at,
                                     float x[2][S::PART_QUERIES / 8][4],
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

/* mma_differentiate() with every feature. It is term by term, so that each term branches only once.
 * patch(): computes the positions of the thread's pairs where they are needed. Dropout multiplies P
 * by 0 or 1, so that P stays in the range of f16; dV is multiplied by Z at the end. */
template <class S, class Patch>
GPU_DEVICE void mma_differentiate_fully(const fattn_gpu_args &g, mma_backward_scratch<S> &s,
                                        int stage, const Patch &patch, int kind,
                                        float x[2][S::PART_QUERIES / 8][4],
                                        float dp[2][S::PART_QUERIES / 8][4])
{
    const gpu_pairs &t = s.job.pairs;
    const int query = mma_part_query<S>() + mma_lane() % 4 * 2, mode = mma_mode<S>(s.job, kind);
    const bool dropout = mma_has<S>(g, FATTN_DROPOUT);
    const bool dbias = S::VARIANT == MMA_EVERYTHING && g.problem.outputs & FATTN_OUT_DBIAS;
    mma_dropout_kept<S> kept = {};
    const bool scales = S::KNOWN == FATTN_BIAS; /* the scale is fused with adding the bias */
    if (!scales && g.rule.terms & FATTN_SCORE_SCALE) {
        mma_scale_tile<S>(g.rule.scale, x);
    }
    if (dropout || mma_has<S>(g, FATTN_SOFTCAP | FATTN_ALIBI)) {
        mma_apply_terms<S>(g, patch(), !dbias, t, s.delta[stage] + query, kept, x, dp);
    } else {
        mma_subtract_delta<S>(s.delta[stage] + query, dp);
    }
    if (mode) {
        mma_apply_staged<S>(s.p, mode, scales ? g.rule.scale : 1, x);
    }
    if (kind & MMA_BAND) {
        mma_apply_band_fully<S>(t.band, patch(), x);
    }
    mma_exponentiate<S>(g.rule.unit, s.lse[stage] + query, x, dp);
    if (mode) {
        gpu_sync(); /* all threads have read the terms staged in the room of P and dS */
    }
    if (dropout) {
        mma_drop<S>(kept, 1, x);
    }
    mma_put_tile<S>(s.p, x);
    if (dbias) {
        mma_store_dbias_tile<S>(g, s, stage, patch(), x, dp);
    }
    mma_put_tile<S>(s.ds, dp);
}

/* --- dQ --------------------------------------------------------------------------------------- */

/* A warp's part of dS K, and where it is added to dQ in the workspace. */
template <class S> struct mma_dq_part {
    enum { COUNT = S::DQ_TILES * S::DQ_CHANNELS / 4 }; /* pairs of elements */
    float y[S::DQ_TILES][S::DQ_CHANNELS / 8][4];
    float *to; /* the thread's first element */
    int live;  /* how many rows exist from there on */
};

/* Sets where the part is added: row i of the tile, and that channel. */
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

/* Adds share `slot` of `slots` of the part's pairs of elements to dQ. */
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

#endif
