/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recurrence of online softmax (Milakov and Gimelshein, 2018; FlashAttention-2, Algorithm 1).
 * The scores of a row come one tile at a time, and the row's state is {m, l}: the largest score so
 * far and the sum of 2^(unit (x - m)). Every kernel, split and merge of fattn uses these functions,
 * except for weight() in tensor-core kernels: their scores have 16-bit inputs, so that one
 * multiply-add is accurate enough. A tile of scores x and values v is added to a row by
 *
 *     alpha = raise(&state, the largest x, unit)       m = max(m, x)
 *     p     = weight(x, unit, base(state))             p = 2^(unit (x - m))
 *     add(&state, the sum of p)                        l = alpha l + sum p
 *     o     = alpha o + sum p v
 *
 * At the end the row is o * normaliser(state), and its log-sum-exp is lse(state, natural).
 *
 * A score times `unit` is in log2 units: unit is log2 e for natural scores, and > 0. m is one of
 * the scores, so it has no rounding of its own, and the largest key weighs exactly 1 however large
 * its score is. Only differences are rounded, and they are small where the weight is not. (A query
 * multiplied by scale * log2 e in advance would round every one of its products.) Any m near the
 * maximum is as good: CPU kernels raise m only when a score exceeds it by a margin (soften.h).
 *
 * -inf and NaN give what the formula gives because
 *   - base() is 0 where m is -inf: exp2(-inf - (-inf)) would be NaN for a row whose scores so far
 *     are all -inf, whose p is 0;
 *   - m may lose a NaN, as every max instruction does, but p keeps it, and with it l and o;
 *   - a row is empty when l == 0, which is false for NaN; m does not decide it.
 *
 * This is a template header over the vocabulary of the unit that includes it, a lane being a row:
 *
 *     fv, mv                                   vectors of floats, and of conditions
 *     fv_set1 fv_add fv_sub fv_mul fv_div
 *     fv_fma(a, b, c)                          a * b + c with one rounding
 *     fv_exp2 fv_log2                          exp2 of an integer is exact
 *     fv_max(a, b)                             a > b ? a : b, which is b when either is NaN
 *     fv_eq(a, b), fv_select(m, a, b)          m ? a : b
 *
 * FATTN_SUFFIX, where defined, is appended to every name, so that a unit can use two
 * vocabularies.
 */
#if defined(FATTN_SUFFIX) || !defined(FATTN_CORE_ONLINE_SOFTMAX_H)

#include "core/dtype.h"
#include "core/host_device.h"

#ifdef FATTN_SUFFIX
#define SOFTMAX_PASTE_EXPANDED(name, suffix) name##suffix
#define SOFTMAX_PASTE(name, suffix) SOFTMAX_PASTE_EXPANDED(name, suffix)
#define SOFTMAX_NAME(name) SOFTMAX_PASTE(name, FATTN_SUFFIX)
#else
#define FATTN_CORE_ONLINE_SOFTMAX_H
#define SOFTMAX_NAME(name) name
#endif
#define SOFTMAX_MINUS_INFINITY fv_set1(-fattn_f32_infinity())

typedef struct SOFTMAX_NAME(fattn_softmax) {
    fv m; /* the largest score so far */
    fv l; /* the sum of 2^(unit (x - m)) over the scores so far */
} SOFTMAX_NAME(fattn_softmax);

/* The state before any score. */
FATTN_HD SOFTMAX_NAME(fattn_softmax) SOFTMAX_NAME(fattn_softmax_empty)(void)
{
    SOFTMAX_NAME(fattn_softmax) state;
    state.m = SOFTMAX_MINUS_INFINITY;
    state.l = fv_set1(0.0f);
    return state;
}

/* The exponent of a weight: 0 for x == base, whatever their size. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_exponent)(fv x, fv unit, fv base)
{
    return fv_mul(fv_sub(x, base), unit);
}

/* 2^(unit (x - base)): 1 for x == base. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_weight)(fv x, fv unit, fv base)
{
    return fv_exp2(SOFTMAX_NAME(fattn_softmax_exponent)(x, unit, base));
}

/* The state after one score x, of a key whose value is 0: a sink. x - x is 0 for a number and NaN
 * for +inf and NaN, as in the formula; a sink of -inf is no key. */
FATTN_HD SOFTMAX_NAME(fattn_softmax) SOFTMAX_NAME(fattn_softmax_sink)(fv x)
{
    SOFTMAX_NAME(fattn_softmax) state;
    state.m = x;
    state.l = fv_select(fv_eq(x, SOFTMAX_MINUS_INFINITY), fv_set1(0.0f), fv_exp2(fv_sub(x, x)));
    return state;
}

/* What is subtracted from scores: m, and 0 as long as m is -inf. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_base)(SOFTMAX_NAME(fattn_softmax) state)
{
    return fv_select(fv_eq(state.m, SOFTMAX_MINUS_INFINITY), fv_set1(0.0f), state.m);
}

/* Raises m to x, the largest of some new scores, if x is larger, and rescales l. Returns the factor
 * by which the caller must multiply o. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_raise)(SOFTMAX_NAME(fattn_softmax) * state, fv x, fv unit)
{
    const fv before = state->m;
    state->m = fv_max(before, x);
    const fv base = SOFTMAX_NAME(fattn_softmax_base)(*state);
    const fv alpha = SOFTMAX_NAME(fattn_softmax_weight)(before, unit, base);
    state->l = fv_mul(state->l, alpha);
    return alpha;
}

/* Adds the sum of a tile's weights. Returns the rounding error, the exact sum minus l (Knuth's
 * two-sum): if tiles have nearly equal sums, their errors have the same sign and add up. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_add)(SOFTMAX_NAME(fattn_softmax) * state, fv sum)
{
    const fv before = state->l;
    state->l = fv_add(before, sum);
    const fv added = fv_sub(state->l, before);
    return fv_add(fv_sub(before, fv_sub(state->l, added)), fv_sub(sum, added));
}

/* Merges two parts of a row: `into` becomes the state of both. Their unnormalised o are to be
 * multiplied by *alpha (into) and *beta (other) and added. Exactly commutative. Returns the
 * rounding error of l, as add() does. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_merge)(SOFTMAX_NAME(fattn_softmax) * into,
                                              SOFTMAX_NAME(fattn_softmax) other, fv unit, fv *alpha,
                                              fv *beta)
{
    *alpha = SOFTMAX_NAME(fattn_softmax_raise)(into, other.m, unit);
    const fv base = SOFTMAX_NAME(fattn_softmax_base)(*into);
    *beta = SOFTMAX_NAME(fattn_softmax_weight)(other.m, unit, base);
    return SOFTMAX_NAME(fattn_softmax_add)(into, fv_mul(other.l, *beta));
}

/* 1 / l, and 0 for an empty row. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_normaliser)(SOFTMAX_NAME(fattn_softmax) state)
{
    const fv zero = fv_set1(0.0f);
    return fv_select(fv_eq(state.l, zero), zero, fv_div(fv_set1(1.0f), state.l));
}

/* x to the nearest integer, for |x| <= 2^22: there the sum has no bits for a fraction. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_round)(fv x)
{
    const fv magic = fv_set1(0x1.8p23f);
    return fv_sub(fv_add(x, magic), magic);
}

/*
 * The natural logarithm of the sum of exp(x), natural m + ln l, and -inf for an empty row; its
 * error is at most half an ulp plus 2^-23. natural: a score times this is in natural units.
 *
 * Let l = 2^n f with f about 1. An integer n times 355/512, which has 9 bits and is nearly ln 2, is
 * exact, and the rest of ln l is small. So large numbers are added only once. The rounding errors
 * of that sum (by Knuth's two-sum) and of the product natural m are added back.
 */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_lse)(SOFTMAX_NAME(fattn_softmax) state, fv natural)
{
    const fv ln2 = fv_set1(0.69314718f), ln2_head = fv_set1(0.693359375f);
    const fv ln2_tail = fv_set1(-2.12194440e-4f); /* ln 2 - 355/512 */
    const fv zero = fv_set1(0.0f), m = state.m, l = state.l;

    const fv n = SOFTMAX_NAME(fattn_softmax_round)(fv_log2(l));
    const fv f = fv_mul(l, fv_exp2(fv_sub(zero, n)));
    const fv small = fv_add(fv_mul(n, ln2_tail), fv_mul(fv_log2(f), ln2));

    const fv a = fv_mul(m, natural), b = fv_mul(n, ln2_head);
    const fv lost = fv_fma(m, natural, fv_sub(zero, a));
    const fv sum = fv_add(a, b), back = fv_sub(sum, a);
    const fv error = fv_add(fv_sub(a, fv_sub(sum, back)), fv_sub(b, back));
    const fv lse = fv_add(sum, fv_add(fv_add(error, lost), small));
    return fv_select(fv_eq(l, zero), SOFTMAX_MINUS_INFINITY, lse);
}

#undef SOFTMAX_NAME
#undef SOFTMAX_MINUS_INFINITY
#ifdef FATTN_SUFFIX
#undef SOFTMAX_PASTE
#undef SOFTMAX_PASTE_EXPANDED
#endif

#endif
