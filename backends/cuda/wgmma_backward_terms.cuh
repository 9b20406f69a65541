/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What makes scores of a tile's dot products in backward on Hopper, with every feature but block
 * masks, and which of its pairs dropout keeps.
 *
 * A thread has keys j and j + 8, and of the queries two neighbours in each eight: element 2 h + e
 * of x[n] is of key j + 8 h and query i + 8 n + e. So pairs of neighbouring queries lie in a word
 * where a bias or mask is read by ldmatrix, transposed, from a tile in shared memory that the
 * copier has brought. Without such a tile threads read elements one by one.
 *
 * Scores become weights 16 queries at a time, a step, since registers are short: what is read for
 * a step, and the derivative of a cap, live no longer.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_TERMS_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_TERMS_CUH

#include "backends/cuda/mma_backward_terms.cuh"
#include "backends/cuda/mma_terms.cuh"
#include "backends/cuda/wgmma_backward_rows.cuh"

/* Where the thread's pairs of a tile are. */
typedef struct wgmma_patch {
    int b, h;          /* sequence, and query head */
    int i, j;          /* the first query, and the first key */
    int queries, keys; /* that exist from there on; may be 0 and less */
} wgmma_patch;

/* What is known of a tile's pairs before its scores are looked at. */
template <class S> struct wgmma_pairs {
    wgmma_patch at;
    bool waits;            /* a bias or mask is in shared memory, */
    uint32_t staged;       /* where the lane reads the first 8 queries of it, */
    uint32_t staged_step;  /* and how much further the next 16 of them; 0 where all share one */
    float slope, distance; /* of ALiBi, in log2 units; of the first pair */
    uint32_t keeps;        /* bit 8 (2 h + e) + n: the mask keeps the pair */
    int first[2], past[2]; /* of key h: queries that see it, counted from the thread's first */
};

/* --- Bias and mask ---------------------------------------------------------------------------- */

/* Calls visit(n, k, bits) for the thread's elements of SIZE bytes, of queries 8 * FIRST .. 8 * PAST
 * of the tile; 0 where there is no pair. */
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

/* Biases of a step, of the type of q: word[n][h] has queries 8 n and 8 n + 1 of key h. */
template <class S, int STEP>
GPU_DEVICE void wgmma_bias_words(const fattn_gpu_args &g, const wgmma_pairs<S> &t,
                                 uint32_t word[2][2])
{
    if (S::IS_STAGED && t.waits) {
        uint32_t x[4];
        mma_load_transposed(x, t.staged + STEP * t.staged_step);
        word[0][0] = x[0], word[0][1] = x[1], word[1][0] = x[2], word[1][1] = x[3];
        return;
    }
    word[0][0] = word[0][1] = word[1][0] = word[1][1] = 0;
    wgmma_read_elements<2, 2 * STEP, 2 * STEP + 2>(
        g.buffers.bias, g.problem.bias_stride, t.at,
        [&](int n, int k, uint32_t bits) { word[n % 2][k / 2] |= bits << k % 2 * 16; });
}

/* Whether a bias is 2^126 or more, or infinite; of f16, infinite: a carry out of its exponent. */
template <class S> GPU_DEVICE bool wgmma_bias_large(const uint32_t word[2][2])
{
    const uint32_t one = mma_bf16_larger(0, word[0][0]), two = mma_bf16_larger(one, word[0][1]);
    const uint32_t three = mma_bf16_larger(two, word[1][0]);
    const uint32_t largest = mma_bf16_larger(three, word[1][1]);
    return (largest + ((int)S::type::DTYPE == (int)FATTN_F16 ? 0x04000400u : 0x01800180u)) &
           0x80008000u;
}

/* x becomes scale x + bias, in log2 units, less lse. */
template <class S, int STEP>
GPU_DEVICE void wgmma_add_bias(const fattn_gpu_args &g, const wgmma_pairs<S> &t,
                               const float lse[2][2], float x[2][4])
{
    const fattn_score_rule &rule = g.rule;
    const float unit = rule.unit, whole = rule.scale * rule.unit;
    uint32_t word[2][2];
    wgmma_bias_words<S, STEP>(g, t, word);
    const auto bias_of = [&](int n, int k) {
        return gpu_widen((fattn_dtype)S::type::DTYPE, (uint16_t)(word[n][k / 2] >> k % 2 * 16));
    };
    if (__any_sync(0xffffffffu, wgmma_bias_large<S>(word))) {
        GPU_UNROLL
        for (int n = 0; n < 8; n++) {
            float &score = x[n / 4][n % 4];
            score = mma_biased(score, rule.scale, bias_of(n / 4, n % 4));
            score = fmaf(score, unit, -lse[n / 4][n % 2]);
        }
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        float &score = x[n / 4][n % 4];
        score = fmaf(score, whole, fmaf(bias_of(n / 4, n % 4), unit, -lse[n / 4][n % 2]));
    }
}

/* x = factor x + a bias of any type, of a step. */
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

/* The mask of all of the thread's pairs. In a tile a word that ldmatrix brings has keys 2 c and
 * 2 c + 1, c = lane / 4, of two queries: other lanes have the thread's keys. */
template <class S>
GPU_DEVICE uint32_t wgmma_mask_bits(const fattn_gpu_args &g, const wgmma_pairs<S> &t)
{
    enum { COUNT = S::OWN_QUERIES / 8 };
    uint32_t bits = 0;
    if (!S::IS_STAGED || !t.waits) {
        wgmma_read_elements<1, 0, COUNT>(
            g.buffers.mask, g.problem.mask_stride, t.at,
            [&](int n, int k, uint32_t byte) { bits |= byte ? 1u << (8 * k + n) : 0; });
        return bits;
    }
    uint32_t pairs = 0; /* bit n of each byte */
    GPU_UNROLL
    for (int n = 0; n < COUNT; n += 4) {
        uint32_t x[4];
        mma_load_transposed(x, t.staged + n / 2 * t.staged_step);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            const uint32_t carried = (x[e] & 0x7f7f7f7fu) + 0x7f7f7f7fu; /* bit 7: not 0 */
            pairs |= ((carried | x[e]) & 0x80808080u) >> (7 - n - e);
        }
    }
    const int lane = mma_lane(), from = lane / 8 * 4 + lane % 4;
    const uint32_t near = (uint32_t)__shfl_sync(0xffffffffu, (int)pairs, from);
    const uint32_t far = (uint32_t)__shfl_sync(0xffffffffu, (int)pairs, from + 16);
    const int odd = lane / 4 % 2 * 8;
    const uint32_t low = near >> odd, high = far >> odd; /* bytes 0 and 2: queries e */
    return (low & 0xff) | (low >> 16 & 0xff) << 8 | (high & 0xff) << 16 | (high >> 16 & 0xff) << 24;
}

/* --- Dropout ---------------------------------------------------------------------------------- */

/* Which of the thread's pairs dropout keeps: of word n / 8 bit 15 - (2 (n % 8) + e), and 16 more
 * for the second key. */
GPU_DEVICE constexpr int wgmma_kept_bit(int n, int k)
{
    return 15 - (2 * (n % 8) + k % 2) + 16 * (k / 2);
}

template <class S> GPU_DEVICE bool wgmma_keeps(const uint32_t *kept, int n, int k)
{
    return kept[n / 8] >> wgmma_kept_bit(n, k) & 1;
}

/* Bits 15 and 31: whether the halves of a word are at least the threshold, 1 .. 65535. */
GPU_DEVICE uint32_t wgmma_reach(uint32_t word, uint32_t threshold)
{
    const uint32_t rest = (0x8000u - (threshold & 0x7fffu)) * 0x10001u;
    const uint32_t reached = (word & 0x7fff7fffu) + rest; /* but for their upper bits */
    return threshold < 0x8000u ? reached | word : reached & word;
}

/* Where tiles lie on the generator's patches: a call serves rows i and i + 8 and keys c, c + 1,
 * c + 8, c + 9, of which a thread has two keys, and the thread whose keys are their neighbours the
 * others. So each calls it for one of two neighbouring queries, and gives the other its halves. */
template <class S>
GPU_DEVICE void wgmma_keep_together(const fattn_gpu_args &g, const fattn_dropout &dropout,
                                    const wgmma_backward_item &w, const wgmma_patch &at,
                                    uint32_t kept[S::KEPT_WORDS])
{
    const bool odd = mma_lane() / 4 % 2;
    const int64_t key = w.k_position + at.j;
    GPU_UNROLL
    for (int n = 0; n < S::OWN_QUERIES / 8; n += 2) {
        const fattn_dropout_rows rows = fattn_dropout_rows_at(
            w.q_position, (uint32_t)(at.i + 8 * n + odd), (uint32_t)(g.problem.batch_offset + at.b),
            (uint32_t)(g.problem.head_offset + at.h));
        uint32_t words[4];
        fattn_dropout_words(&dropout, rows, key, words);
        GPU_UNROLL
        for (int below = 0; below < 2; below++) {
            const uint32_t near = words[2 * below], far = words[2 * below + 1];
            const uint32_t even_keys = (near & 0xffff) | far << 16;
            const uint32_t odd_keys = near >> 16 | (far & 0xffff0000u);
            const uint32_t mine = odd ? odd_keys : even_keys;
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? even_keys : odd_keys, 4);
            GPU_UNROLL
            for (int e = 0; e < 2; e++) {
                const uint32_t reached =
                    wgmma_reach(odd == (e != 0) ? mine : other, dropout.threshold);
                kept[n / 8] |= (reached & 0x80008000u) >> (2 * ((n + below) % 8) + e);
            }
        }
    }
}

/* Wherever they lie. */
template <class S>
GPU_DEVICE void wgmma_keep_singly(const fattn_gpu_args &g, const fattn_dropout &dropout,
                                  const wgmma_backward_item &w, const wgmma_patch &at,
                                  uint32_t kept[S::KEPT_WORDS])
{
    static_assert(S::KEPT_WORDS == 1, "numbers of pairs");
    GPU_ROLLED
    for (int pair = 0; pair < S::OWN_QUERIES / 2; pair++) {
        const int n = pair / 4, k = pair % 4;
        const fattn_dropout_rows rows = fattn_dropout_rows_at(
            w.q_position, (uint32_t)(at.i + 8 * n + k % 2),
            (uint32_t)(g.problem.batch_offset + at.b), (uint32_t)(g.problem.head_offset + at.h));
        const int64_t key = w.k_position + at.j + 8 * (k / 2);
        kept[0] |= (uint32_t)(fattn_dropout_at(&dropout, rows, key) != 0) << wgmma_kept_bit(n, k);
    }
}

template <class S>
GPU_DEVICE void wgmma_keep_pairs(const fattn_gpu_args &g, const fattn_dropout &dropout,
                                 const wgmma_backward_item &w, const wgmma_patch &at,
                                 uint32_t kept[S::KEPT_WORDS])
{
    GPU_UNROLL
    for (int n = 0; n < S::KEPT_WORDS; n++) {
        kept[n] = 0;
    }
    if ((w.q_position | w.k_position) % 16 == 0) {
        wgmma_keep_together<S>(g, dropout, w, at, kept);
    } else {
        wgmma_keep_singly<S>(g, dropout, w, at, kept);
    }
}

/* --- Scores ----------------------------------------------------------------------------------- */

/* Dot products become capped scores over cap, times unit; derivative: of the cap. As mma_cap(), of
 * which the polynomial for sizes below 0.3 is, from fewer terms. */
GPU_DEVICE void wgmma_cap(const fattn_score_rule &rule, float x[2][4], float derivative[2][4])
{
    const float pace = rule.scale * rule.reciprocal;
    float largest = 0;
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        largest = gpu_max(largest, fabsf(x[n / 4][n % 4]));
    }
    if (__any_sync(0xffffffffu, !(largest * fabsf(pace) < 0.3f))) {
        GPU_UNROLL
        for (int n = 0; n < 8; n++) {
            float &score = x[n / 4][n % 4];
            score = mma_cap<true>(rule, score * rule.scale, &derivative[n / 4][n % 4]);
        }
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        float &score = x[n / 4][n % 4];
        const float y = score * pace, z = y * y;
        float poly = fmaf(-0.0511326762267774f, z, 0.1332387352065708f);
        poly = fmaf(poly, z, -0.33333286129904245f);
        const float tanh = y * fmaf(poly, z, 1);
        derivative[n / 4][n % 4] = fmaf(-tanh, tanh, 1);
        score = tanh * rule.cap;
    }
}

/* x = factor x - slope distance, as arguments of 2^: unit: of x; base: what is subtracted. */
template <class S, int STEP>
GPU_DEVICE void wgmma_add_alibi(const wgmma_pairs<S> &t, float factor, const float base[2][2],
                                float x[2][4])
{
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        const int k = n % 4, r = 8 * (2 * STEP + n / 4) + k % 2 - 8 * (k / 2);
        const float size = fabsf(t.distance + (float)r);
        x[n / 4][k] = fmaf(x[n / 4][k], factor, fmaf(-t.slope, size, -base[n / 4][k % 2]));
    }
}

/* Dot products of a step become the arguments of 2^ that P is. */
template <class S, int STEP>
GPU_DEVICE void wgmma_step_terms(const fattn_gpu_args &g, const wgmma_pairs<S> &t,
                                 const float lse[2][2], float x[2][4], float derivative[2][4])
{
    const fattn_score_rule &rule = g.rule;
    if constexpr (S::KNOWN == FATTN_BIAS) {
        wgmma_add_bias<S, STEP>(g, t, lse, x);
        return;
    }
    if constexpr (S::KNOWN == FATTN_ALIBI) {
        wgmma_add_alibi<S, STEP>(t, rule.scale * rule.unit, lse, x);
        return;
    }
    float factor = rule.terms & FATTN_SCORE_SCALE ? rule.scale : 1;
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        wgmma_cap(rule, x, derivative);
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
            wgmma_add_alibi<S, STEP>(t, factor * rule.unit, lse, x);
            return;
        }
    }
    factor *= rule.unit;
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        x[n / 4][n % 4] = fmaf(x[n / 4][n % 4], factor, -lse[n / 4][n % 2]);
    }
}

/* P of a step of dot products in x, and in p without what dropout drops, rounded. x becomes P times
 * the derivative of a cap: what dP - delta is to be multiplied by. PARTIAL: not all pairs are. */
template <class S, int STEP, bool PARTIAL>
GPU_DEVICE void wgmma_step_weights(const fattn_gpu_args &g, const wgmma_pairs<S> &t,
                                   const uint32_t *kept, const float lse[2][2], float x[2][4],
                                   uint32_t p[4])
{
    float derivative[2][4] = {};
    wgmma_step_terms<S, STEP>(g, t, lse, x, derivative);
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        const int n = 2 * STEP + e / 4, k = e % 4, r = 8 * n + k % 2;
        float &score = x[e / 4][k];
        if (mma_has<S>(g, FATTN_MASK)) {
            score = t.keeps >> (8 * k + n) & 1 ? score : -fattn_f32_infinity();
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
        float low = x[e / 2][k], high = x[e / 2][k + 1];
        if (mma_has<S>(g, FATTN_DROPOUT)) {
            low = wgmma_keeps<S>(kept, n, k) ? low : 0;
            high = wgmma_keeps<S>(kept, n, k + 1) ? high : 0;
        }
        p[e] = S::type::pack(low, high);
    }
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        GPU_UNROLL
        for (int e = 0; e < 8; e++) {
            x[e / 4][e % 4] *= derivative[e / 4][e % 4];
        }
    }
}

/* The same of all steps. */
template <class S, bool PARTIAL, int STEP = 0>
GPU_DEVICE void wgmma_weigh_steps(const fattn_gpu_args &g, const wgmma_pairs<S> &t,
                                  const uint32_t *kept, const float lse[S::OWN_QUERIES / 8][2],
                                  float x[S::OWN_QUERIES / 8][4], uint32_t p[][4])
{
    if constexpr (STEP < S::OWN_QUERIES / 16) {
        wgmma_step_weights<S, STEP, PARTIAL>(g, t, kept, lse + 2 * STEP, x + 2 * STEP, p[STEP]);
        wgmma_weigh_steps<S, PARTIAL, STEP + 1>(g, t, kept, lse, x, p);
    }
}

/* dP becomes dS; factor: Z of a pair that dropout keeps. */
template <class S>
GPU_DEVICE void wgmma_differentiate_fully(const fattn_gpu_args &g, const uint32_t *kept,
                                          float factor, const float delta[S::OWN_QUERIES / 8][2],
                                          const float p[S::OWN_QUERIES / 8][4],
                                          float dp[S::OWN_QUERIES / 8][4])
{
    const bool dropout = mma_has<S>(g, FATTN_DROPOUT);
    GPU_UNROLL
    for (int e = 0; e < S::OWN_QUERIES / 2; e++) {
        const int n = e / 4, k = e % 4;
        float &element = dp[n][k];
        if (dropout) {
            element = wgmma_keeps<S>(kept, n, k) ? element : 0;
            element = fmaf(element, factor, -delta[n][k % 2]);
        } else {
            element -= delta[n][k % 2];
        }
        element *= p[n][k];
    }
}

/* --- dBias ------------------------------------------------------------------------------------ */

/* dS of the thread's pairs. Entries are 0 before, or what they are to be added to. (Atomic
 * additions lose what is below the normal numbers.) */
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
        float sum = ds[n][e % 2] + ds[n][2 + e % 2]; /* of the warp's keys */
        GPU_UNROLL
        for (int lane = 4; lane < GPU_WAVE; lane *= 2) {
            sum += gpu_shfl_xor(sum, lane);
        }
        if (mma_lane() < 4 && r < at.queries) {
            mma_add_one(to + r * stride[2], sum);
        }
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
