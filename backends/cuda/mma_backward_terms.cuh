/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The features of pairs in tiles of mma_backward.cuh.
 *
 * A thread has four adjacent keys, because the order of keys in a tile makes them so (mma_key_of),
 * and two adjacent ones of every eight queries. The elements of a bias, a mask or a dBias for a
 * query and its four keys are read or written at once.
 *
 * Bias and mask are staged in shared memory while products run. They use the place of P and dS,
 * which do not exist yet, and each thread copies its own elements. These are copied as they are in
 * memory if four of them are adjacent and no block mask hides part of the tile. Otherwise a float
 * is computed for each pair, with a special value for pairs that are not kept.
 */
#ifndef FATTN_CUDA_MMA_BACKWARD_TERMS_CUH
#define FATTN_CUDA_MMA_BACKWARD_TERMS_CUH

#include "backends/cuda/mma.h"
#include "backends/cuda/mma_sm80.cuh"
#include "backends/gpu/pairs.cuh"

/* The key of 32 that is at a place of a tile. Place 16 m + 8 h + g is row g + 8 h of fragment m,
 * which lane group g has; its key is 4 g + 2 m + h. */
GPU_DEVICE int mma_key_of(int place)
{
    return (place & ~31) + place % 8 * 4 + place / 16 % 2 * 2 + place / 8 % 2;
}

/* How the bias and masks of a tile are staged. */
enum {
    MMA_BIAS_FLOATS = 1, /* four floats for each query */
    MMA_BIAS_HALVES = 2, /* four 16-bit elements */
    MMA_MASK_BYTES = 4,
    MMA_ONE_BY_ONE = 8 /* with MMA_BIAS_FLOATS: computed one by one from bias and masks */
};
#define MMA_NAN 0x7fc00000u
#define MMA_NOT_KEPT 0xffffffffu /* another NaN, which marks a pair that is not kept */

/* A thread's pairs: keys j .. j + 3, and queries i + 8 n and i + 8 n + 1 of head h. */
typedef struct mma_patch {
    int64_t i, j;
    int h;
    int queries, keys;     /* how many exist from i and j on; may be 0 or negative */
    float slope, distance; /* of ALiBi; the distance of query i and key j */
} mma_patch;

GPU_DEVICE gpu_query mma_query_at(const mma_patch &at, int r)
{
    gpu_query q;
    q.i = (int32_t)at.i + r;
    q.h = at.h;
    return q;
}

/* The distance of the thread's n-th query from query i. */
GPU_DEVICE int mma_query_step(int n) { return n / 2 * 8 + n % 2; }

/* The element of the thread's n-th query and k-th key: row k % 2 of fragment k / 2. */
template <int N> GPU_DEVICE float &mma_pair(float x[2][N][4], int n, int k)
{
    return x[k / 2][n / 2][2 * (k % 2) + n % 2];
}

/* --- Bias and masks --------------------------------------------------------------------------- */

/* Whether the entries of four keys from a multiple of 4 on may be read at once. */
GPU_DEVICE bool mma_by_fours(const void *data, const int64_t stride[4], int size)
{
    return stride[3] == 1 && (stride[0] | stride[1] | stride[2]) % 4 == 0 &&
           (uintptr_t)data % (4 * size) == 0;
}

/* How bias and mask are staged in tiles of which no block mask hides a part. */
GPU_DEVICE int mma_staging(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const bool bias = p.features & FATTN_BIAS, mask = p.features & FATTN_MASK;
    const bool floats = bias && p.dtype_bias == FATTN_F32;
    const int mode = (mask ? MMA_MASK_BYTES : 0) | (!bias    ? 0
                                                    : floats ? MMA_BIAS_FLOATS
                                                             : MMA_BIAS_HALVES);
    const bool fours = (!bias || mma_by_fours(g.buffers.bias, p.bias_stride, floats ? 4 : 2)) &&
                       (!mask || mma_by_fours(g.buffers.mask, p.mask_stride, 1));
    return fours && !(mask && floats) ? mode : MMA_BIAS_FLOATS | MMA_ONE_BY_ONE;
}

/* The address of the staged elements of the thread's first query, BYTES of them. Its other queries
 * follow at a distance of THREADS * BYTES. Bytes of masks are behind the bias. */
template <class S, int BYTES> GPU_DEVICE uint32_t mma_staged_at(const void *room, int mode)
{
    enum { BIAS = S::KEYS * S::QUERIES * 2 };
    const int skip = mode & MMA_BIAS_HALVES && BYTES == 4 ? BIAS : 0;
    return mma_shared(room) + skip + gpu_thread_anew() * BYTES;
}

template <class S>
GPU_DEVICE void mma_stage_singly(const fattn_gpu_args &g, const gpu_pairs &t, const mma_patch &at,
                                 const void *room)
{
    const unsigned terms = g.rule.terms & FATTN_SCORE_BIAS | FATTN_SCORE_KEEP;
    const uint32_t to = mma_staged_at<S, 16>(room, MMA_BIAS_FLOATS);
    GPU_ROLLED
    for (int e = 0; e < S::PART_QUERIES; e++) {
        const int n = e / 4, k = e % 4, r = mma_query_step(n);
        uint32_t word = MMA_NOT_KEPT;
        if (r < at.queries && k < at.keys) {
            const fattn_score_pair pair = gpu_pair(g, t, terms, mma_query_at(at, r), at.j + k);
            const uint32_t bias = pair.bias == pair.bias ? fattn_f32_bits(pair.bias) : MMA_NAN;
            word = pair.keep ? bias : MMA_NOT_KEPT;
        }
        mma_put(to + n * S::THREADS * 16 + 4 * k, word);
    }
}

/* Begins to copy four adjacent entries, SIZE bytes, for each of the thread's queries. Entries that
 * do not exist become zeros. */
template <class S, int SIZE>
GPU_DEVICE void mma_stage_fours(const void *data, const int64_t stride[4], const gpu_pairs &t,
                                const mma_patch &at, const void *room, int mode)
{
    enum { EACH = SIZE / 4 };
    const char *const from =
        (const char *)data + EACH * gpu_term_at(t, stride, mma_query_at(at, 0), at.j);
    const int bytes = EACH * (int)gpu_clamp(at.keys, 0, 4);
    const uint32_t to = mma_staged_at<S, SIZE>(room, mode);
    GPU_UNROLL
    for (int n = 0; n < S::PART_QUERIES / 4; n++) {
        const int r = mma_query_step(n);
        mma_copy_small<SIZE>(to + n * S::THREADS * SIZE, from + EACH * stride[2] * r,
                             r < at.queries ? bytes : 0);
    }
}

/* The same for entries with any strides, copied one by one. */
template <class S, int SIZE>
GPU_DEVICE void mma_stage_scattered(const void *data, const int64_t stride[4], const gpu_pairs &t,
                                    const mma_patch &at, const void *room, int mode)
{
    enum { EACH = SIZE / 4 };
    const uint32_t to = mma_staged_at<S, SIZE>(room, mode);
    GPU_ROLLED
    for (int n = 0; n < S::PART_QUERIES / 4; n++) {
        const int r = mma_query_step(n);
        uint32_t words[EACH] = {};
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            if (r < at.queries && k < at.keys) {
                const char *const from =
                    (const char *)data +
                    EACH * gpu_term_at(t, stride, mma_query_at(at, r), at.j + k);
                const uint32_t bits = EACH == 2 ? *(const uint16_t *)from : *(const uint8_t *)from;
                words[k * EACH / 4] |= bits << k * EACH % 4 * 8;
            }
        }
        GPU_UNROLL
        for (int k = 0; k < EACH; k++) {
            mma_put(to + n * S::THREADS * SIZE + 4 * k, words[k]);
        }
    }
}

/* Begins to stage bias and masks in the room of P and dS. scattered: the four entries of a query
 * are not adjacent, so that kernels for one feature copy them one by one. */
template <class S>
GPU_DEVICE void mma_stage(const fattn_gpu_args &g, const gpu_pairs &t, const mma_patch &at,
                          const void *room, int mode, bool scattered)
{
    const fattn_problem &p = g.problem;
    if (S::VARIANT != MMA_EVERYTHING && scattered) {
        if (mode & MMA_BIAS_HALVES) {
            mma_stage_scattered<S, 8>(g.buffers.bias, p.bias_stride, t, at, room, mode);
        } else {
            mma_stage_scattered<S, 4>(g.buffers.mask, p.mask_stride, t, at, room, mode);
        }
        return;
    }
    if (mode & MMA_ONE_BY_ONE) {
        mma_stage_singly<S>(g, t, at, room);
    } else if (mode & MMA_BIAS_FLOATS) {
        mma_stage_fours<S, 16>(g.buffers.bias, p.bias_stride, t, at, room, mode);
    } else if (mode & MMA_BIAS_HALVES) {
        mma_stage_fours<S, 8>(g.buffers.bias, p.bias_stride, t, at, room, mode);
    }
    if (mode & MMA_MASK_BYTES) {
        mma_stage_fours<S, 4>(g.buffers.mask, p.mask_stride, t, at, room, mode);
    }
}

/* The bias of a query and its k-th key, from staged words. */
template <class S, int WORDS> GPU_DEVICE float mma_bias_of(const uint32_t word[WORDS], int k)
{
    const uint32_t bits = word[k * WORDS / 4];
    return WORDS == 4 ? fattn_f32_from_bits(bits)
                      : gpu_widen((fattn_dtype)S::type::DTYPE, (uint16_t)(bits >> 16 * (k % 2)));
}

/* Clamps scores with a bias to +-2^126, so that finite ones stay finite in log2 units too. An
 * infinite bias replaces the score, since -inf hides the pair whatever its score is. All lanes must
 * call it. The __syncwarp() is for ptxas, which moves no load across a barrier: otherwise it would
 * load all of the bias first, and spill registers for that even where this is not called. */
template <class S, int WORDS>
GPU_DEVICE void mma_bound_sums(uint32_t from, float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < 2 * N; n++) {
        uint32_t word[WORDS];
        __syncwarp();
        mma_get<WORDS>(from + n * S::THREADS * 4 * WORDS, word);
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            const float bias = mma_bias_of<S, WORDS>(word, k);
            float &score = mma_pair<N>(x, n, k);
            score = fattn_score_bias(fabsf(bias) == fattn_f32_infinity() ? bias : score);
        }
    }
}

/* x = factor x + the staged bias. */
template <class S, int MODE>
GPU_DEVICE void mma_add_bias(const void *room, float factor, float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8, WORDS = MODE & MMA_BIAS_HALVES ? 2 : 4 };
    const uint32_t from = mma_staged_at<S, 4 * WORDS>(room, MODE);
    float largest = 0;
    GPU_UNROLL
    for (int n = 0; n < 2 * N; n++) {
        uint32_t word[WORDS];
        mma_get<WORDS>(from + n * S::THREADS * 4 * WORDS, word);
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            const float bias = mma_bias_of<S, WORDS>(word, k);
            const bool keep = !(MODE & MMA_ONE_BY_ONE) || word[k] != MMA_NOT_KEPT;
            float &score = mma_pair<N>(x, n, k);
            score = keep ? fmaf(score, factor, bias) : -fattn_f32_infinity();
            largest = gpu_max(largest, fabsf(bias));
        }
    }
    if (__any_sync(0xffffffffu, largest > 0x1p126f)) {
        mma_bound_sums<S, WORDS>(from, x);
    }
}

/* --- Scores ----------------------------------------------------------------------------------- */

/* fattn_score_cap() with the hardware's exponential and reciprocal. FAR: some scores may be so
 * large that they need these. */
template <bool FAR> GPU_DEVICE float mma_cap(const fattn_score_rule &rule, float x, float *dscore)
{
    const float y = x * rule.reciprocal;
    const float factor = fattn_score_cap_factor(y * y), tanh = y * factor;
    *dscore = fmaf(-tanh, tanh, 1);
    if (FAR) {
        const float size = fabsf(y);
        const float w = mma_reciprocal(1 + mma_exp2(size * (float)(2 * FATTN_LOG2E)));
        *dscore = size >= FATTN_SCORE_CAP_NEAR ? 4 * w * (1 - w) : *dscore;
        return size >= FATTN_SCORE_CAP_NEAR ? copysignf(fmaf(-2 * rule.cap, w, rule.cap), x)
                                            : x * factor;
    }
    return x * factor;
}

/* Caps scores and, if times_dscore, multiplies dp by the derivatives of the cap. */
template <class S, bool FAR>
GPU_DEVICE void mma_cap_tile(const fattn_score_rule &rule, bool times_dscore,
                             float x[2][S::PART_QUERIES / 8][4],
                             float dp[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < 8 * N; n++) {
        float dscore;
        float &score = mma_pair<N>(x, n / 4, n % 4);
        score = mma_cap<FAR>(rule, score, &dscore);
        mma_pair<N>(dp, n / 4, n % 4) *= times_dscore ? dscore : 1;
    }
}

template <class S>
GPU_DEVICE void mma_cap_scores(const fattn_score_rule &rule, bool times_dscore,
                               float x[2][S::PART_QUERIES / 8][4],
                               float dp[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    float largest = 0;
    GPU_UNROLL
    for (int n = 0; n < 8 * N; n++) {
        largest = gpu_max(largest, fabsf(mma_pair<N>(x, n / 4, n % 4)));
    }
    if (largest * rule.reciprocal < FATTN_SCORE_CAP_NEAR) {
        mma_cap_tile<S, false>(rule, times_dscore, x, dp);
    } else {
        mma_cap_tile<S, true>(rule, times_dscore, x, dp);
    }
}

/* Sets scores of pairs outside the band to -inf. */
template <class S>
GPU_DEVICE void mma_apply_band_fully(const fattn_band &band, const mma_patch &at,
                                     float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8, FAR = 1 << 20 }; /* more than a tile */
    const int64_t limit = INT64_C(1) << 62;
    /* query i attends to key j if j - right <= i + diagonal <= j + left */
    const int64_t aligned = at.j - band.diagonal - at.i;
    const int64_t low = aligned - fattn_min64(band.right, limit);
    const int64_t high = aligned + fattn_min64(band.left, limit);
    const int first = band.right < 0 ? -FAR : (int)gpu_clamp(low, -FAR, FAR);
    const int last = band.left < 0 ? FAR : (int)gpu_clamp(high, -FAR, FAR);
    GPU_UNROLL
    for (int k = 0; k < 4; k++) {
        const int from = k < at.keys ? first + k : FAR;
        GPU_UNROLL
        for (int n = 0; n < 2 * N; n++) {
            const int r = mma_query_step(n);
            float &score = mma_pair<N>(x, n, k);
            score = from <= r & r <= last + k ? score : -fattn_f32_infinity();
        }
    }
}

template <class S> GPU_DEVICE void mma_scale_tile(float scale, float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < 8 * N; n++) {
        mma_pair<N>(x, n / 4, n % 4) *= scale;
    }
}

template <class S>
GPU_DEVICE void mma_add_alibi(const mma_patch &at, float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    GPU_UNROLL
    for (int n = 0; n < 8 * N; n++) {
        const float distance = at.distance + (float)(mma_query_step(n / 4) - n % 4);
        float &score = mma_pair<N>(x, n / 4, n % 4);
        score = fmaf(-at.slope, fabsf(distance), score);
    }
}

template <class S>
GPU_DEVICE void mma_keep_bytes(const void *room, int mode, float x[2][S::PART_QUERIES / 8][4])
{
    enum { N = S::PART_QUERIES / 8 };
    const uint32_t from = mma_staged_at<S, 4>(room, mode);
    GPU_UNROLL
    for (int n = 0; n < 2 * N; n++) {
        uint32_t word[1];
        mma_get<1>(from + n * S::THREADS * 4, word);
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            float &score = mma_pair<N>(x, n, k);
            score = word[0] & 0xffu << 8 * k ? score : -fattn_f32_infinity();
        }
    }
}

/* Adds the bias and applies the mask that are staged in the room of P and dS. factor: multiplies
 * the scores before the bias is added; without a bias it has no effect. */
template <class S>
GPU_DEVICE void mma_apply_staged(const void *room, int mode, float factor,
                                 float x[2][S::PART_QUERIES / 8][4])
{
    if (mode & MMA_BIAS_HALVES) {
        mma_add_bias<S, MMA_BIAS_HALVES>(room, factor, x);
    } else if (mode & MMA_ONE_BY_ONE) {
        mma_add_bias<S, MMA_BIAS_FLOATS | MMA_ONE_BY_ONE>(room, factor, x);
    } else if (mode & MMA_BIAS_FLOATS) {
        mma_add_bias<S, MMA_BIAS_FLOATS>(room, factor, x);
    }
    if (mode & MMA_MASK_BYTES) {
        mma_keep_bytes<S>(room, mode, x);
    }
}

/* --- Dropout ---------------------------------------------------------------------------------- */

/* Which of a thread's pairs dropout keeps: bit n % 8 * 4 + k of word n / 8 for its n-th query and
 * k-th key. */
template <class S> struct mma_dropout_kept {
    enum { QUERIES = S::PART_QUERIES / 4, WORDS = (QUERIES + 7) / 8 };
    uint32_t word[WORDS];
};

template <class S> GPU_DEVICE bool mma_dropout_keeps(const mma_dropout_kept<S> &kept, int n, int k)
{
    return kept.word[n / 8] >> (n % 8 * 4 + k) & 1;
}

GPU_DEVICE fattn_dropout_rows mma_dropout_rows(const fattn_gpu_args &g, const gpu_pairs &t,
                                               const mma_patch &at, int n)
{
    return fattn_dropout_rows_at(t.seq.q_position, (uint32_t)(at.i + mma_query_step(n)),
                                 (uint32_t)(g.problem.batch_offset + t.b),
                                 (uint32_t)(g.problem.head_offset + at.h));
}

/* For tiles aligned to the generator's patches. A thread needs half of the numbers that a call
 * makes, and the thread whose keys are 8 further needs the other half. Each of the two makes half
 * of the calls, and they exchange the halves. */
template <class S>
GPU_DEVICE void mma_dropout_together(const fattn_gpu_args &g, const gpu_pairs &t,
                                     const mma_patch &at, mma_dropout_kept<S> &kept)
{
    const bool right = mma_lane() / 8 % 2; /* bit 3 of the keys */
    const int64_t key = t.seq.k_position + at.j + 2 * right;
    GPU_UNROLL
    for (int n = 0; n < mma_dropout_kept<S>::QUERIES; n++) {
        const fattn_dropout_rows rows = mma_dropout_rows(g, t, at, n);
        uint32_t words[4];
        if (n / 2 % 2) { /* the call for query n - 2, 8 rows above, has served this one */
            continue;
        }
        fattn_dropout_words(&t.dropout, rows, key, words);
        GPU_UNROLL
        for (int further = 0; further < 2; further++) {
            const uint32_t a = words[2 * further], b = words[2 * further + 1];
            const uint32_t mine = right ? b : a;
            const uint32_t other = __shfl_xor_sync(0xffffffffu, right ? a : b, 8);
            const uint32_t two[2] = {right ? other : mine, right ? mine : other};
            GPU_UNROLL
            for (int k = 0; k < 4; k++) {
                const uint32_t bits = k % 2 ? two[k / 2] >> 16 : two[k / 2] & 0xffff;
                const int to = n + 2 * further;
                kept.word[to / 8] |= bits >= t.dropout.threshold ? 1u << (to % 8 * 4 + k) : 0;
            }
        }
    }
}

/* For tiles at any position: one call for each pair. */
template <class S>
GPU_DEVICE void mma_dropout_singly(const fattn_gpu_args &g, const gpu_pairs &t, const mma_patch &at,
                                   mma_dropout_kept<S> &kept)
{
    GPU_UNROLL
    for (int word = 0; word < mma_dropout_kept<S>::WORDS; word++) {
        GPU_ROLLED
        for (int bit = 0; bit < 4 * mma_dropout_kept<S>::QUERIES && bit < 32; bit++) {
            const fattn_dropout_rows rows = mma_dropout_rows(g, t, at, 8 * word + bit / 4);
            const int64_t key = t.seq.k_position + at.j + bit % 4;
            kept.word[word] |= (uint32_t)(fattn_dropout_at(&t.dropout, rows, key) != 0) << bit;
        }
    }
}

template <class S>
GPU_DEVICE mma_dropout_kept<S> mma_dropout_of_pairs(const fattn_gpu_args &g, const gpu_pairs &t,
                                                    const mma_patch &at)
{
    mma_dropout_kept<S> kept = {};
    if ((t.seq.q_position | t.seq.k_position) % 16 == 0) {
        mma_dropout_together<S>(g, t, at, kept);
    } else {
        mma_dropout_singly<S>(g, t, at, kept);
    }
    return kept;
}

/* --- dBias ------------------------------------------------------------------------------------ */

/* How entries of dbias are written. */
enum {
    MMA_DBIAS_FOURS = 1, /* four keys at once */
    MMA_DBIAS_ADDED = 2  /* by atomic additions: several blocks add to them */
};

/* Whether an axis of dbias is summed over. */
GPU_DEVICE bool mma_dbias_shared(const fattn_problem &p)
{
    const int64_t *const stride = p.dbias_stride;
    return (stride[0] == 0 && p.batch > 1) || (stride[1] == 0 && p.heads_q > 1) ||
           (stride[2] == 0 && p.seqlen_q > 1) || stride[3] == 0;
}

GPU_DEVICE int mma_dbias_mode(const fattn_gpu_args &g)
{
    const bool fours = mma_by_fours(g.buffers.dbias, g.problem.dbias_stride, 4);
    return (fours ? MMA_DBIAS_FOURS : 0) | (mma_dbias_shared(g.problem) ? MMA_DBIAS_ADDED : 0);
}

/* Writes or adds dS of a query, r after the thread's first, and its four keys. Before the run,
 * entries are 0 or the values to accumulate to. (Atomic additions flush subnormal numbers to 0.) */
GPU_DEVICE void mma_store_dbias(const fattn_gpu_args &g, const gpu_pairs &t, const mma_patch &at,
                                int mode, int r, const float ds[4])
{
    const fattn_problem &p = g.problem;
    const bool adds = p.features & FATTN_ACCUMULATE;
    float *const to =
        (float *)g.buffers.dbias + gpu_term_at(t, p.dbias_stride, mma_query_at(at, r), at.j);
    if (p.dbias_stride[3] == 0) { /* summed over the keys of the warp */
        float sum = ds[0] + ds[1] + (ds[2] + ds[3]);
        GPU_UNROLL
        for (int n = 4; n < GPU_WAVE; n *= 2) {
            sum += gpu_shfl_xor(sum, n);
        }
        if (mma_lane() < 4 && r < at.queries) {
            mma_add_one(to, sum);
        }
    } else if (r >= at.queries) {
        return;
    } else if (mode & MMA_DBIAS_FOURS && at.keys >= 4 && mode & MMA_DBIAS_ADDED) {
        mma_add_four(to, ds);
    } else if (mode & MMA_DBIAS_FOURS && at.keys >= 4 && !adds) {
        gpu_f4 four;
        four.x = ds[0], four.y = ds[1], four.z = ds[2], four.w = ds[3];
        *(gpu_f4 *)to = four;
    } else {
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            float *const entry = to + k * p.dbias_stride[3];
            if (k < at.keys && mode & MMA_DBIAS_ADDED) {
                mma_add_one(entry, ds[k]);
            } else if (k < at.keys) {
                *entry = adds ? *entry + ds[k] : ds[k];
            }
        }
    }
}

#endif
