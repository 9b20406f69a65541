/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Features of pairs in backward on Hopper: how a tile's dot products become scores, and which pairs
 * dropout keeps. (A block mask hides whole tiles, which are not visited.)
 *
 * A thread has keys j and j + 8, and two adjacent ones of every eight queries: element 2 h + e of
 * x[n] belongs to key j + 8 h and query i + 8 n + e. A bias or mask is read by a transposing
 * ldmatrix from a tile that the copier has staged in shared memory; a word then has two adjacent
 * queries. Without such a tile, threads read elements one by one.
 *
 * Scores become weights in steps of 16 queries, since registers are short: values read for a step,
 * and the derivatives of a cap, live no longer than the step.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_TERMS_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_TERMS_CUH

#include "backends/cuda/mma_backward_terms.cuh"
#include "backends/cuda/mma_terms.cuh"
#include "backends/cuda/wgmma_backward_items.cuh"
#include "backends/cuda/wgmma_tile.cuh"

/* The thread's pairs in a tile. */
typedef struct wgmma_patch {
    int b, h;          /* sequence, and query head */
    int i, j;          /* the first query, and the first key */
    int queries, keys; /* how many exist from there on; may be 0 or negative */
} wgmma_patch;

/* The terms of a tile's pairs, which are prepared while products of the tile before run. These keep
 * shared memory busy, so that loads from it and exchanges between lanes take long. So other work is
 * always issued before a result is waited for. */
template <class S> struct wgmma_ahead {
    uint32_t dropout_keeps;             /* bit wgmma_dropout_bit(): dropout keeps the pair */
    uint32_t mask_keeps;                /* bit 8 (2 h + e) + n: the mask keeps the pair */
    uint32_t others;                    /* another lane's bits, until they are joined */
    uint32_t mask[S::MASK_WORDS];       /* words of a staged mask */
    uint32_t bias[S::BIAS_STEPS][2][2]; /* in q's type, [step][n][h]: two queries of key h */
    bool large;                         /* some bias is large or infinite */
    bool mixed;                         /* the mask has to be read */
};

/* Whether a bias or mask has to be read for the tile. */
template <class S> GPU_DEVICE bool wgmma_is_mixed(const wgmma_ahead<S> &ahead)
{
    return !S::KNOWS_PLAIN || ahead.mixed;
}

/* The terms that are computed when scores are processed. */
typedef struct wgmma_pairs {
    wgmma_patch at;
    float slope, distance; /* of ALiBi: the slope in log2 units, the first pair's distance */
    int first[2], past[2]; /* queries that attend to key h, relative to the thread's first */
} wgmma_pairs;

/* A thread's state of dropout for an item. */
typedef struct wgmma_dropout {
    fattn_dropout dropout;   /* threshold 0: the item is not aligned to the generator's patches */
    fattn_dropout_rows rows; /* the thread's first rows, in tile 0 of the group's first head */
    uint32_t column;         /* the patch column of its keys */
} wgmma_dropout;

/* --- Bias and mask ---------------------------------------------------------------------------- */

/* Reads the thread's elements of SIZE bytes for its queries from 8 * FIRST to 8 * PAST, and calls
 * visit(n, k, bits) for each; bits are 0 if the pair does not exist. */
template <int SIZE, int FIRST, int PAST, class Visit>
GPU_DEVICE void wgmma_read_elements(const void *data, const int64_t stride[4],
                                    const wgmma_patch &at, const Visit &visit)
{
    const char *const from = (const char *)data + SIZE * (at.b * stride[0] + at.h * stride[1] +
                                                          at.i * stride[2] + at.j * stride[3]);
    GPU_UNROLL
    for (int n = FIRST; n < PAST; n++) {
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            const int r = 8 * n + k % 2, key = 8 * (k / 2);
            const char *const element = from + SIZE * (r * stride[2] + key * stride[3]);
            uint32_t bits = 0;
            if (r < at.queries && key < at.keys) {
                bits = SIZE == 4   ? *(const uint32_t *)element
                       : SIZE == 2 ? *(const uint16_t *)element
                                   : *(const uint8_t *)element;
            }
            visit(n, k, bits);
        }
    }
}

/* Reads biases of the type of q: word[step][n][h] has two queries of key h. */
template <class S>
GPU_DEVICE void wgmma_bias_words(const fattn_gpu_args &g, const wgmma_patch &at,
                                 uint32_t word[S::BIAS_STEPS][2][2])
{
    GPU_UNROLL
    for (int n = 0; n < 4 * S::BIAS_STEPS; n++) {
        word[n / 4][n / 2 % 2][n % 2] = 0;
    }
    wgmma_read_elements<2, 0, 2 * S::BIAS_STEPS>(
        g.buffers.bias, g.problem.bias_stride, at,
        [&](int n, int k, uint32_t bits) { word[n / 2][n % 2][k / 2] |= bits << k % 2 * 16; });
}

/* Whether a bias has an absolute value of 2^126 or more, or is infinite; for f16, whether it is
 * infinite. An addition to its exponent then carries into the sign bit. */
template <class S> GPU_DEVICE bool wgmma_bias_large(const uint32_t word[S::BIAS_STEPS][2][2])
{
    uint32_t largest = 0;
    GPU_UNROLL
    for (int n = 0; n < 4 * S::BIAS_STEPS; n++) {
        largest = mma_bf16_larger(largest, word[n / 4][n / 2 % 2][n % 2]);
    }
    return (largest + ((int)S::type::DTYPE == (int)FATTN_F16 ? 0x04000400u : 0x01800180u)) &
           0x80008000u;
}

/* x = scale x + bias - lse, in log2 units. CAREFUL: a bias may be large. */
template <class S, bool CAREFUL>
GPU_DEVICE void wgmma_add_bias(const fattn_score_rule &rule, const uint32_t word[2][2],
                               const float lse[2][2], float x[2][4])
{
    const float unit = rule.unit, whole = rule.scale * rule.unit;
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        const int n = e / 4, k = e % 4;
        const uint16_t bits = (uint16_t)(word[n][k / 2] >> k % 2 * 16);
        const float bias = gpu_widen((fattn_dtype)S::type::DTYPE, bits);
        x[n][k] = CAREFUL ? fmaf(mma_biased(x[n][k], rule.scale, bias), unit, -lse[n][k % 2])
                          : fmaf(x[n][k], whole, fmaf(bias, unit, -lse[n][k % 2]));
    }
}

/* x = factor x + a bias of any type, for a step. */
template <int SIZE, int STEP>
GPU_DEVICE void wgmma_add_any_bias(const fattn_gpu_args &g, const wgmma_patch &at, float factor,
                                   float x[2][4])
{
    wgmma_read_elements<SIZE, 2 * STEP, 2 * STEP + 2>(
        g.buffers.bias, g.problem.bias_stride, at, [&](int n, int k, uint32_t bits) {
            const float bias = SIZE == 4 ? fattn_f32_from_bits(bits)
                                         : gpu_widen(g.problem.dtype_bias, (uint16_t)bits);
            x[n % 2][k] = mma_biased(x[n % 2][k], factor, bias);
        });
}

/* Reads the mask of all of the thread's pairs, byte by byte. */
template <class S>
GPU_DEVICE uint32_t wgmma_mask_bits(const fattn_gpu_args &g, const wgmma_patch &at)
{
    uint32_t bits = 0;
    wgmma_read_elements<1, 0, S::OWN_QUERIES / 8>(
        g.buffers.mask, g.problem.mask_stride, at,
        [&](int n, int k, uint32_t byte) { bits |= byte ? 1u << (8 * k + n) : 0; });
    return bits;
}

/* Sets bit 7 of each byte that is not 0, and clears all other bits. */
GPU_DEVICE uint32_t wgmma_set_bytes(uint32_t word)
{
    const uint32_t carried = (word & 0x7f7f7f7fu) + 0x7f7f7f7fu;
    return (carried | word) & 0x80808080u;
}

/* Compresses the words of a staged mask. A word that ldmatrix loads has keys 2 c and 2 c + 1,
 * c = lane / 4, of two queries. Word n becomes bit n of each byte. */
template <class S> GPU_DEVICE uint32_t wgmma_mask_pairs(const uint32_t words[S::MASK_WORDS])
{
    uint32_t pairs = 0;
    GPU_UNROLL
    for (int n = 0; n < S::MASK_WORDS; n++) {
        pairs |= wgmma_set_bytes(words[n]) >> (7 - n);
    }
    return pairs;
}

/* The bits of the thread's own keys, from the words of the two lanes that have them. */
GPU_DEVICE uint32_t wgmma_join_pairs(uint32_t lower, uint32_t upper)
{
    const int odd = mma_lane() / 4 % 2 * 8;
    const uint32_t low = lower >> odd, high = upper >> odd; /* bytes 0 and 2: queries e */
    return (low & 0xff) | (low >> 16 & 0xff) << 8 | (high & 0xff) << 16 | (high >> 16 & 0xff) << 24;
}

/* Reads elements of SIZE bytes of a bias or mask for 16 adjacent keys of one query. They are 0 for
 * keys from `keys` on, and if the query does not exist. chunks: 16 bytes may be read at once. */
template <int SIZE>
GPU_DEVICE void wgmma_read_sixteen(const char *from, int64_t stride, bool chunks, bool exists,
                                   int keys, uint32_t words[4 * SIZE])
{
    if (chunks && keys >= 16) {
        GPU_UNROLL
        for (int n = 0; n < SIZE; n++) {
            gpu_u4 four = {0, 0, 0, 0};
            if (exists) {
                four = ((const gpu_u4 *)from)[n];
            }
            words[4 * n] = four.x, words[4 * n + 1] = four.y;
            words[4 * n + 2] = four.z, words[4 * n + 3] = four.w;
        }
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < 4 * SIZE; n++) {
        words[n] = 0;
        GPU_UNROLL
        for (int e = 0; e < 4 / SIZE; e++) {
            const int key = n * (4 / SIZE) + e;
            const char *const element = from + SIZE * key * stride;
            if (exists && key < keys) {
                const uint32_t bits =
                    SIZE == 2 ? *(const uint16_t *)element : *(const uint8_t *)element;
                words[n] |= bits << 8 * SIZE * e;
            }
        }
    }
}

/* A bit for each of 16 bytes that is not 0: bit c for byte c < 8, and bit c + 8 for the others. */
GPU_DEVICE uint32_t wgmma_bits_of_bytes(const uint32_t words[4])
{
    uint32_t bits = 0;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        const uint32_t four = wgmma_set_bytes(words[n]) >> 7;
        bits |= four * 0x01020408u >> 24 << (4 * n + n / 2 * 8);
    }
    return bits;
}

/* Each lane has such bits of one query for the warp's keys. Returns the bits of the thread's own
 * pairs, in the order of wgmma_ahead.mask_keeps. */
GPU_DEVICE uint32_t wgmma_transpose_bits(uint32_t row)
{
    uint32_t own = 0;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        GPU_UNROLL
        for (int e = 0; e < 2; e++) {
            const int query = 8 * n + mma_lane() % 4 * 2 + e;
            const uint32_t other = __shfl_sync(0xffffffffu, row, query);
            own |= (other >> mma_lane() / 4 & 0x00010001u) << (8 * e + n);
        }
    }
    return own;
}

/* --- Dropout ---------------------------------------------------------------------------------- */

/* The bit that tells whether dropout keeps element k of x[n]. Queries e are in half e of the word,
 * so that one shift brings the two bits of a packed pair to the top bits of the halves. */
GPU_DEVICE constexpr int wgmma_dropout_bit(int n, int k) { return 16 * (k % 2) + 2 * n + k / 2; }

GPU_DEVICE bool wgmma_dropout_keeps(uint32_t bits, int n, int k)
{
    return bits >> wgmma_dropout_bit(n, k) & 1;
}

/* Bits of the generator's calls FIRST .. PAST - 1 for a tile that is aligned to its patches. A call
 * serves rows i and i + 8 and keys c, c + 1, c + 8 and c + 9. A thread has two of these keys, and
 * the thread with the adjacent keys has the others. So each of them makes the calls for one of two
 * adjacent queries. Bit 2 n + h of the lower half is that of the even key, and of the upper half
 * that of the odd key. */
template <class S, bool SMALL, int FIRST, int PAST>
GPU_DEVICE uint32_t wgmma_own_calls(const wgmma_dropout &drop, int head, int tile)
{
    const uint32_t threshold = drop.dropout.threshold << 16 | drop.dropout.threshold;
    fattn_dropout_rows rows = drop.rows;
    rows.h += (uint32_t)head;
    rows.row += (uint32_t)(tile * (S::QUERIES / 2) + 8 * FIRST);
    uint32_t own = 0;
    GPU_UNROLL
    for (int n = 2 * FIRST; n < 2 * PAST; n += 2) {
        uint32_t words[4];
        fattn_dropout_patch(&drop.dropout, rows, drop.column, words);
        rows.row += 8; /* of the next 16 queries */
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            own |= wgmma_dropout_halves<SMALL>(words[k], threshold) & 0x00010001u << (2 * n + k);
        }
    }
    return own;
}

template <class S, int FIRST, int PAST>
GPU_DEVICE uint32_t wgmma_calls(const wgmma_dropout &drop, int head, int tile)
{
    return drop.dropout.threshold <= WGMMA_SMALL_THRESHOLD
               ? wgmma_own_calls<S, true, FIRST, PAST>(drop, head, tile)
               : wgmma_own_calls<S, false, FIRST, PAST>(drop, head, tile);
}

/* The bits of the thread's own pairs: half of those from its calls, and half of those from the
 * other thread's. */
GPU_DEVICE uint32_t wgmma_join_calls(uint32_t own, uint32_t other)
{
    const bool odd = mma_lane() / 4 % 2;
    return odd ? other >> 16 | (own & 0xffff0000u) : (own & 0xffff) | other << 16;
}

/* The bits of the thread's pairs in a tile at any position: one call for each pair. */
template <class S>
GPU_DEVICE uint32_t wgmma_dropout_singly(const fattn_gpu_args &g, const fattn_dropout &dropout,
                                         const wgmma_backward_item &w, const wgmma_patch &at)
{
    uint32_t bits = 0;
    GPU_ROLLED
    for (int pair = 0; pair < S::OWN_QUERIES / 2; pair++) {
        const int n = pair / 4, k = pair % 4;
        const fattn_dropout_rows rows = fattn_dropout_rows_at(
            w.q_position, (uint32_t)(at.i + 8 * n + k % 2),
            (uint32_t)(g.problem.batch_offset + at.b), (uint32_t)(g.problem.head_offset + at.h));
        const int64_t key = w.k_position + at.j + 8 * (k / 2);
        bits |= (uint32_t)(fattn_dropout_at(&dropout, rows, key) != 0) << wgmma_dropout_bit(n, k);
    }
    return bits;
}

/* --- Scores ----------------------------------------------------------------------------------- */

/* Whether all scores are small compared with the cap. */
template <class S>
GPU_DEVICE bool wgmma_cap_near(const fattn_score_rule &rule, const float x[S::OWN_QUERIES / 8][4])
{
    float largest = 0;
    GPU_UNROLL
    for (int n = 0; n < S::OWN_QUERIES / 2; n++) {
        largest = gpu_max(largest, fabsf(x[n / 4][n % 4]));
    }
    return largest * fabsf(rule.scale * rule.reciprocal) < mma_cap_near::BELOW;
}

/* Turns dot products in x into capped scores, and computes the derivatives of the cap. NEAR:
 * wgmma_cap_near() is true. */
template <bool NEAR>
GPU_DEVICE void wgmma_cap(const fattn_score_rule &rule, float x[2][4], float derivative[2][4])
{
    const float pace = rule.scale * rule.reciprocal;
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        float &score = x[n / 4][n % 4], &slope = derivative[n / 4][n % 4];
        if (NEAR) {
            const float y = score * pace, z = y * y;
            float poly = fmaf(mma_cap_near::C2, z, mma_cap_near::C1);
            poly = fmaf(poly, z, mma_cap_near::C0);
            const float tanh = y * fmaf(poly, z, 1);
            slope = fmaf(-tanh, tanh, 1);
            score = tanh * rule.cap;
        } else {
            score = mma_cap<true>(rule, score * rule.scale, &slope);
        }
    }
}

/* x = factor x - base - slope distance, the exponents of 2. The distance comes last and is fused,
 * so that the -inf of a pair that a bias hides stays, even if slope * distance overflows. */
template <int STEP>
GPU_DEVICE void wgmma_add_alibi(const wgmma_pairs &t, float factor, const float base[2][2],
                                float x[2][4])
{
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        const int k = n % 4, r = 8 * (2 * STEP + n / 4) + k % 2 - 8 * (k / 2);
        const float size = fabsf(t.distance + (float)r);
        x[n / 4][k] = fmaf(-t.slope, size, fmaf(x[n / 4][k], factor, -base[n / 4][k % 2]));
    }
}

/* Turns dot products of a step into the exponents of 2 of P. CAREFUL: wgmma_is_careful(). */
template <class S, int STEP, bool CAREFUL>
GPU_DEVICE void wgmma_step_terms(const fattn_gpu_args &g, const wgmma_ahead<S> &ahead,
                                 const wgmma_pairs &t, const float lse[2][2], float x[2][4],
                                 float derivative[2][4])
{
    const fattn_score_rule &rule = g.rule;
    if constexpr (S::KNOWN == FATTN_BIAS) {
        wgmma_add_bias<S, CAREFUL>(rule, ahead.bias[STEP], lse, x);
        return;
    }
    if constexpr (S::KNOWN == FATTN_ALIBI) {
        wgmma_add_alibi<STEP>(t, rule.scale * rule.unit, lse, x);
        return;
    }
    float factor = rule.terms & FATTN_SCORE_SCALE ? rule.scale : 1;
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        wgmma_cap<!CAREFUL>(rule, x, derivative);
        factor = 1;
    }
    if constexpr (S::KNOWN == MMA_ANY) {
        if (g.problem.features & FATTN_BIAS) {
            if (g.problem.dtype_bias == FATTN_F32) {
                wgmma_add_any_bias<4, STEP>(g, t.at, factor, x);
            } else {
                wgmma_add_any_bias<2, STEP>(g, t.at, factor, x);
            }
            factor = 1;
        }
        if (g.problem.features & FATTN_ALIBI) {
            wgmma_add_alibi<STEP>(t, factor * rule.unit, lse, x);
            return;
        }
    }
    factor *= rule.unit;
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        x[n / 4][n % 4] = fmaf(x[n / 4][n % 4], factor, -lse[n / 4][n % 2]);
    }
}

/* Computes P of a step from dot products in x. p: P with dropout, rounded. x becomes P times the
 * derivative of a cap, the factor of dP - delta. PARTIAL: some pairs are outside the band or do not
 * exist. MIXED: wgmma_is_mixed(). */
template <class S, int STEP, bool PARTIAL, bool MIXED, bool CAREFUL>
GPU_DEVICE void wgmma_step_weights(const fattn_gpu_args &g, const wgmma_ahead<S> &ahead,
                                   const wgmma_pairs &t, const float lse[2][2], float x[2][4],
                                   uint32_t p[4])
{
    float derivative[2][4] = {};
    wgmma_step_terms<S, STEP, CAREFUL>(g, ahead, t, lse, x, derivative);
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        const int n = 2 * STEP + e / 4, k = e % 4, r = 8 * n + k % 2;
        float &score = x[e / 4][k];
        if (MIXED && mma_has<S>(g, FATTN_MASK)) {
            score = ahead.mask_keeps >> (8 * k + n) & 1 ? score : -fattn_f32_infinity();
        }
        if (PARTIAL) {
            const bool sees = t.first[k / 2] <= r && r < t.past[k / 2];
            score = sees ? score : -fattn_f32_infinity();
        }
        score = mma_exp2(score);
    }
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        const int n = 2 * STEP + e / 2, k = e % 2 * 2;
        p[e] = S::type::pack(x[e / 2][k], x[e / 2][k + 1]);
        if (mma_has<S>(g, FATTN_DROPOUT)) {
            const uint32_t keeps = ahead.dropout_keeps << (15 - wgmma_dropout_bit(n, k));
            p[e] = wgmma_drop_halves<typename S::type>(p[e], keeps);
        }
    }
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        GPU_UNROLL
        for (int e = 0; e < 8; e++) {
            x[e / 4][e % 4] *= derivative[e / 4][e % 4];
        }
    }
}

/* The same for all steps. */
template <class S, bool PARTIAL, bool MIXED, bool CAREFUL, int STEP = 0>
GPU_DEVICE void wgmma_weigh_steps(const fattn_gpu_args &g, const wgmma_ahead<S> &ahead,
                                  const wgmma_pairs &t, const float lse[S::OWN_QUERIES / 8][2],
                                  float x[S::OWN_QUERIES / 8][4], uint32_t p[][4])
{
    if constexpr (STEP < S::OWN_QUERIES / 16) {
        wgmma_step_weights<S, STEP, PARTIAL, MIXED, CAREFUL>(g, ahead, t, lse + 2 * STEP,
                                                             x + 2 * STEP, p[STEP]);
        wgmma_weigh_steps<S, PARTIAL, MIXED, CAREFUL, STEP + 1>(g, ahead, t, lse, x, p);
    }
}

/* Whether some pairs of the warp need the slower path. The kernel for every feature always takes
 * it, to keep its code short. */
template <class S>
GPU_DEVICE bool wgmma_is_careful(const fattn_score_rule &rule, const wgmma_ahead<S> &ahead,
                                 const float x[S::OWN_QUERIES / 8][4])
{
    if constexpr (S::KNOWN == FATTN_BIAS) {
        return __any_sync(0xffffffffu, ahead.large);
    }
    if constexpr (S::KNOWN == FATTN_SOFTCAP) {
        return __any_sync(0xffffffffu, !wgmma_cap_near<S>(rule, x));
    }
    return S::KNOWN == MMA_ANY;
}

/* Computes P of a tile from dot products in x: rounded, in p; and in x, the factor of dP -
 * delta. */
template <class S, bool PARTIAL>
GPU_DEVICE void wgmma_weigh(const fattn_gpu_args &g, const wgmma_ahead<S> &ahead,
                            const wgmma_pairs &t, const float lse[S::OWN_QUERIES / 8][2],
                            float x[S::OWN_QUERIES / 8][4], uint32_t p[][4])
{
    if constexpr (S::KNOWS_PLAIN) {
        if (!ahead.mixed) {
            wgmma_weigh_steps<S, PARTIAL, false, false>(g, ahead, t, lse, x, p);
            return;
        }
    }
    if (wgmma_is_careful<S>(g.rule, ahead, x)) {
        wgmma_weigh_steps<S, PARTIAL, true, true>(g, ahead, t, lse, x, p);
    } else {
        wgmma_weigh_steps<S, PARTIAL, true, false>(g, ahead, t, lse, x, p);
    }
}

/* Turns dP in dp into dS. keeps: wgmma_ahead.dropout_keeps. factor: Z of a pair that dropout keeps.
 * Other pairs are multiplied by 0, not set to 0, so that NaN stays NaN. */
template <class S>
GPU_DEVICE void wgmma_differentiate_fully(const fattn_gpu_args &g, uint32_t keeps, float factor,
                                          const float delta[S::OWN_QUERIES / 8][2],
                                          const float p[S::OWN_QUERIES / 8][4],
                                          float dp[S::OWN_QUERIES / 8][4])
{
    const bool dropout = mma_has<S>(g, FATTN_DROPOUT);
    const uint32_t bits = dropout ? wgmma_anew(keeps) : 0;
    GPU_UNROLL
    for (int e = 0; e < S::OWN_QUERIES / 2; e++) {
        const int n = e / 4, k = e % 4;
        float &element = dp[n][k];
        if (dropout) {
            const float z = wgmma_dropout_keeps(bits, n, k) ? factor : 0;
            element = fmaf(element, z, -delta[n][k % 2]);
        } else {
            element -= delta[n][k % 2];
        }
        element *= p[n][k];
    }
}

/* --- dBias ------------------------------------------------------------------------------------ */

/* Writes dS of the thread's pairs, all of which exist, to a dBias that is contiguous along keys.
 * ADDED: by atomic additions. A warp writes 32 bytes of a row at once. */
template <class S, bool ADDED>
GPU_DEVICE void wgmma_store_dbias_rows(float *to, int64_t stride,
                                       const float ds[S::OWN_QUERIES / 8][4])
{
    GPU_UNROLL
    for (int e = 0; e < S::OWN_QUERIES / 4; e++) {
        float *const row = to + (e / 2 * 8 + e % 2) * stride;
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const float sum = ds[e / 2][2 * h + e % 2];
            if (ADDED) {
                mma_add_one(row + 8 * h, sum);
            } else {
                row[8 * h] = sum;
            }
        }
    }
}

/* Writes or adds dS of the thread's pairs. Before the run, entries are 0 or the values to
 * accumulate to. (Atomic additions flush subnormal numbers to 0.) */
template <class S>
GPU_DEVICE void wgmma_store_dbias(const fattn_gpu_args &g, const wgmma_patch &at,
                                  const float ds[S::OWN_QUERIES / 8][4])
{
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    const bool adds = p.features & FATTN_ACCUMULATE, shared = mma_dbias_shared(p);
    float *const to = (float *)g.buffers.dbias + at.b * stride[0] + at.h * stride[1] +
                      at.i * stride[2] + at.j * stride[3];
    GPU_UNROLL
    for (int e = 0; e < S::OWN_QUERIES / 4 && stride[3] == 0; e++) {
        const int n = e / 2, r = 8 * n + e % 2;
        float sum = ds[n][e % 2] + ds[n][2 + e % 2]; /* to be summed over the warp's keys */
        GPU_UNROLL
        for (int lane = 4; lane < GPU_WAVE; lane *= 2) {
            sum += gpu_shfl_xor(sum, lane);
        }
        if (mma_lane() < 4 && r < at.queries) {
            mma_add_one(to + r * stride[2], sum);
        }
    }
    if (stride[3] == 1 && at.queries > S::OWN_QUERIES - 7 && at.keys > 8 && (shared || !adds)) {
        if (shared) {
            wgmma_store_dbias_rows<S, true>(to, stride[2], ds);
        } else {
            wgmma_store_dbias_rows<S, false>(to, stride[2], ds);
        }
        return;
    }
    GPU_UNROLL
    for (int e = 0; e < S::OWN_QUERIES / 2 && stride[3] != 0; e++) {
        const int n = e / 4, k = e % 4, r = 8 * n + k % 2, key = 8 * (k / 2);
        float *const entry = to + r * stride[2] + key * stride[3];
        if (r < at.queries && key < at.keys) {
            if (shared) {
                mma_add_one(entry, ds[n][k]);
            } else {
                *entry = adds ? *entry + ds[n][k] : ds[n][k];
            }
        }
    }
}

#endif
