/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Online softmax over a tile of keys in forward on Hopper (wgmma_forward.cuh), and dropout.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_SOFTMAX_CUH
#define FATTN_CUDA_WGMMA_FORWARD_SOFTMAX_CUH

#include "backends/cuda/wgmma_forward_items.cuh"
#include "core/online_softmax.h"

/* A thread's two rows, which are 8 apart. */
template <class S> struct wgmma_rows {
    fattn_softmax state[2]; /* l: over the thread's own columns */
    float top[2];           /* the largest score in these, or -inf */
    float o[S::WIDTH_V / 8][4];
};

/* Factors of a thread's two rows, if keys and values are in e4m3 (wgmma_widen.cuh); else 1. */
typedef struct wgmma_factors {
    float row[2]; /* of dot products */
    float v;      /* of sums of values */
} wgmma_factors;

/* The scores of a thread's two rows times these are exponents of 2. The rows differ only if keys
 * and values are in e4m3. */
typedef struct wgmma_units {
    float row[2];
} wgmma_units;

template <class S>
GPU_DEVICE wgmma_units wgmma_units_of(const fattn_gpu_args &g, const wgmma_factors &factor)
{
    const float unit = wgmma_unit<S>(g);
    return S::WIDENS ? wgmma_units{{unit * factor.row[0], unit * factor.row[1]}}
                     : wgmma_units{{unit, unit}};
}

/* A row's reference m, in dot products of stored keys, in the scores of g.rule, which are natural
 * with FATTN_DESCALE. (wgmma_add_sink() makes them natural for a sink.) */
GPU_DEVICE float wgmma_reference(const fattn_gpu_args &g, float m, float factor)
{
    const uint64_t features = g.problem.features & (FATTN_DESCALE | FATTN_SINK);
    const float scale = features == FATTN_DESCALE ? g.rule.scale : 1;
    return m == -fattn_f32_infinity() ? m : m * factor * scale;
}

/* The meaning of a tile's x: x times `factor` are scores, and x times `unit` exponents of 2. */
typedef struct wgmma_scale {
    float factor;
    wgmma_units unit;
} wgmma_scale;

GPU_DEVICE wgmma_scale wgmma_scaled(const wgmma_units &units, float factor)
{
    return {factor, {{units.row[0] * factor, units.row[1] * factor}}};
}

/* Updates `top` with the largest x of a tile. With 256 channels there is no register for it. */
template <class S>
GPU_DEVICE void wgmma_note_top(float x, const wgmma_scale &scale, float shift, float *top)
{
    if constexpr (S::WIDTH_V < 256) {
        const bool shifts = S::KNOWN == MMA_ANY || S::KNOWN == FATTN_ALIBI; /* else by 0 */
        *top = gpu_max(*top, shifts ? x * scale.factor + shift : x * scale.factor);
    }
}

/* Whether some score of a warp's rows may exceed its reference by more than the margin. Floats that
 * are not negative compare like their bits as integers, and one instruction compares three of
 * these. A negative limit counts as exceeded; so does NaN in kernels for a bias, which may hide its
 * pair. Also updates rows.top with the largest score unless all are negative: `largest` is then
 * another one. */
template <class S>
GPU_DEVICE bool wgmma_exceeds_margin(const wgmma_units &units, const wgmma_scale &scale,
                                     const float shift[2], const float x[S::KEYS / 8][4],
                                     wgmma_rows<S> &rows)
{
    enum { N = S::KEYS / 8 };
    bool exceeds = false;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        int even = __float_as_int(x[0][2 * h]), odd = __float_as_int(x[0][2 * h + 1]);
        GPU_UNROLL
        for (int n = 1; n + 1 < N; n += 2) {
            even = wgmma_larger(even, __float_as_int(x[n][2 * h]), __float_as_int(x[n + 1][2 * h]));
            odd = wgmma_larger(odd, __float_as_int(x[n][2 * h + 1]),
                               __float_as_int(x[n + 1][2 * h + 1]));
        }
        even = wgmma_larger(even, __float_as_int(x[N - 1][2 * h]),
                            __float_as_int(x[N - 1][2 * h + 1]));
        const float limit = (rows.state[h].m - shift[h]) * units.row[h] + MMA_MARGIN;
        const float largest = __int_as_float(max(even, odd)), top = largest * scale.unit.row[h];
        exceeds =
            exceeds || !(limit >= 0) || (S::KNOWN == FATTN_BIAS ? !(top <= limit) : top > limit);
        if (largest >= 0) {
            wgmma_note_top<S>(largest, scale, shift[h], &rows.top[h]);
        }
    }
    return __any_sync(0xffffffffu, exceeds);
}

/* wgmma_exceeds_margin() by upper bounds of the scores of the thread's rows. */
template <class S>
GPU_DEVICE bool wgmma_bound_exceeds_margin(const wgmma_units &units, const wgmma_rows<S> &rows,
                                           const float bound[2])
{
    bool exceeds = false;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const float unit = units.row[h];
        exceeds = exceeds || !(bound[h] * unit <= rows.state[h].m * unit + MMA_MARGIN);
    }
    return __any_sync(0xffffffffu, exceeds);
}

/* Raises the references that scores exceed by more than the margin, and rescales l by alpha. The
 * caller rescales o. A row for which wgmma_exceeds_margin() would be false, because only others of
 * its warp exceed their margin, is left with the same bits as by that function, rows.top too. */
template <class S>
GPU_DEVICE void wgmma_raise(const wgmma_units &units, const wgmma_scale &scale,
                            const float shift[2], float x[S::KEYS / 8][4], wgmma_rows<S> &rows,
                            float alpha[2])
{
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        fattn_softmax *const state = &rows.state[h];
        const float unit = units.row[h];
        float even = x[0][2 * h], odd = x[0][2 * h + 1];
        GPU_UNROLL
        for (int n = 1; n < S::KEYS / 8; n++) {
            even = gpu_max(even, x[n][2 * h]);
            odd = gpu_max(odd, x[n][2 * h + 1]);
        }
        const float own = gpu_max(even, odd);
        float top = mma_quad_max(own) * scale.factor;
        if (S::KNOWN == FATTN_BIAS && (int)S::type::DTYPE == (int)FATTN_BF16 && scale.factor == 1 &&
            fabsf(top) >= 0x1p126f && fabsf(top) < fattn_f32_infinity()) { /* as in mma_bounded() */
            top = fattn_score_bias(top);
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 4; n++) {
                float *const score = &x[n / 2][2 * h + n % 2];
                *score = fattn_score_bias(*score);
            }
        }
        const float limit = (state->m - shift[h]) * unit + MMA_MARGIN;
        const bool raises = top * unit > limit;
        if (own >= 0 || raises || !(limit >= 0)) {
            wgmma_note_top<S>(own, scale, shift[h], &rows.top[h]);
        }
        alpha[h] = fattn_softmax_raise(state, raises ? top + shift[h] : state->m, unit);
    }
}

/* Turns scores into weights relative to the row's reference, and adds them to l. */
template <class S>
GPU_DEVICE void wgmma_weigh(const wgmma_units &units, const wgmma_scale &scale,
                            const float shift[2], wgmma_rows<S> &rows, float x[S::KEYS / 8][4])
{
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const float base = fattn_softmax_base(rows.state[h]) - shift[h];
        const float to = base * units.row[h] - S::type::LIFT;
        float even = 0, odd = 0;
        GPU_UNROLL
        for (int n = 0; n < S::KEYS / 8; n++) {
            float *const weight = x[n] + 2 * h;
            weight[0] = mma_exp2(fmaf(weight[0], scale.unit.row[h], -to));
            weight[1] = mma_exp2(fmaf(weight[1], scale.unit.row[h], -to));
            even += weight[0];
            odd += weight[1];
        }
        fattn_softmax_add(&rows.state[h], even + odd);
    }
}

/* --- Dropout ---------------------------------------------------------------------------------- */

/* wgmma_drop() for a tile that is aligned to the generator's patches. A call serves two adjacent
 * keys and the two 8 further, of two rows. */
template <class S, bool SMALL>
GPU_DEVICE void wgmma_drop_patches(const fattn_dropout &dropout, const fattn_dropout_rows &rows,
                                   uint32_t column, uint32_t p[S::KEYS / 16][4])
{
    const uint32_t threshold = dropout.threshold << 16 | dropout.threshold;
    GPU_UNROLL
    for (int n = 0; n < S::KEYS / 16; n++) {
        uint32_t words[4];
        fattn_dropout_patch(&dropout, rows, column + 4 * n, words);
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            p[n][h] &= wgmma_dropout_halves<SMALL>(words[2 * h], threshold);
            p[n][2 + h] &= wgmma_dropout_halves<SMALL>(words[2 * h + 1], threshold);
        }
    }
}

/* Sets weights that dropout drops to 0, in the tile that begins with key j0. row: the warp's first.
 * o is multiplied by Z at the end, because weights times Z might overflow. */
template <class S>
GPU_DEVICE void wgmma_drop(const fattn_gpu_args &g, const mma_item &w, int row, int j0,
                           uint32_t p[S::KEYS / 16][4])
{
    const gpu_pairs &t = w.pairs;
    const int64_t query = t.seq.q_position + w.i0, key = t.seq.k_position + j0;
    if (w.group != 1 || query % 16 || key % 16) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const gpu_query q = mma_query(w, mma_row<S>(0, h));
            const uint32_t bits = mma_dropout_bits<S>(g, t, q, j0);
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 8; n++) {
                p[n / 2][n % 2 * 2 + h] &=
                    (bits >> 2 * n & 1) * 0xffffu | (bits >> 2 * n & 2) * 0x7fff8000u;
            }
        }
        return;
    }
    const fattn_dropout_rows rows = fattn_dropout_rows_at(
        t.seq.q_position, (uint32_t)(w.i0 + row + mma_lane() / 4),
        (uint32_t)(g.problem.batch_offset + t.b), (uint32_t)(g.problem.head_offset + w.hk));
    const uint32_t column = fattn_dropout_column(key + mma_own<S>());
    if (t.dropout.threshold <= WGMMA_SMALL_THRESHOLD) {
        wgmma_drop_patches<S, true>(t.dropout, rows, column, p);
    } else {
        wgmma_drop_patches<S, false>(t.dropout, rows, column, p);
    }
}

#endif
