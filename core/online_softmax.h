/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recurrence of online softmax: a row of scores is met one tile at a time, and all that has
 * been seen of it is {m, l}, its largest score and the sum of 2^(x - m). Every kernel, split and
 * merge of fattn runs these lines. A tile of scores x and values v joins a row by
 *
 *     alpha = raise(&state, unit * the largest x)      m = max(m, x)
 *     p     = weight(x, unit, base(state))             p = 2^(x - m)
 *     add(&state, the sum of p)                        l = alpha l + sum p
 *     o     = alpha o + sum p v
 *
 * In the end the row is o * normaliser(state), and its log-sum-exp is lse(state).
 *
 * The state is in log2 units; scores may come in any unit > 0, log2 e for natural ones, and the
 * fused product in weight() converts them without a rounding of the size of x. (A query multiplied
 * by scale * log2 e in advance would round every one of its products.)
 *
 * -inf and NaN come out as the formula has them because
 *   - base() is 0 where m is -inf: exp2(-inf - (-inf)) would be NaN for a row that has met
 *     nothing but scores of -inf, whose p is 0;
 *   - m may lose a NaN, as every max instruction does, but p keeps it, and with it l and o;
 *   - a row is empty when l == 0, which is false for NaN, and never asked through m.
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
 * FATTN_SUFFIX, where defined, is appended to every name, so that two vocabularies can meet in a
 * unit.
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
#define SOFTMAX_MINUS_INFINITY fv_set1(fattn_f32_from_bits(0xff800000u))

typedef struct SOFTMAX_NAME(fattn_softmax) {
    fv m; /* the largest score met, in log2 units */
    fv l; /* the sum of 2^(x - m) over the scores met */
} SOFTMAX_NAME(fattn_softmax);

/* Nothing met. */
FATTN_HD SOFTMAX_NAME(fattn_softmax) SOFTMAX_NAME(fattn_softmax_empty)(void)
{
    SOFTMAX_NAME(fattn_softmax) state;
    state.m = SOFTMAX_MINUS_INFINITY;
    state.l = fv_set1(0.0f);
    return state;
}

/* 2^(unit x - base). */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_weight)(fv x, fv unit, fv base)
{
    return fv_exp2(fv_fma(x, unit, fv_sub(fv_set1(0.0f), base)));
}

/* One score x met, of a key whose value is 0: a sink. What m loses in rounding l has; for +inf and
 * NaN l is NaN, as in the formula, and a sink of -inf is no key. */
FATTN_HD SOFTMAX_NAME(fattn_softmax) SOFTMAX_NAME(fattn_softmax_sink)(fv x, fv unit)
{
    SOFTMAX_NAME(fattn_softmax) state;
    state.m = fv_mul(x, unit);
    const fv l = SOFTMAX_NAME(fattn_softmax_weight)(x, unit, state.m);
    state.l = fv_select(fv_eq(x, SOFTMAX_MINUS_INFINITY), fv_set1(0.0f), l);
    return state;
}

/* What scores are taken relative to. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_base)(SOFTMAX_NAME(fattn_softmax) state)
{
    return fv_select(fv_eq(state.m, SOFTMAX_MINUS_INFINITY), fv_set1(0.0f), state.m);
}

/* Meets scores of which x is the largest, and returns what all sums so far must be multiplied
 * by. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_raise)(SOFTMAX_NAME(fattn_softmax) * state, fv x)
{
    const fv before = state->m;
    state->m = fv_max(before, x);
    const fv alpha = fv_exp2(fv_sub(before, SOFTMAX_NAME(fattn_softmax_base)(*state)));
    state->l = fv_mul(state->l, alpha);
    return alpha;
}

/* Adds the sum of 2^(x - base) over those scores. */
FATTN_HD void SOFTMAX_NAME(fattn_softmax_add)(SOFTMAX_NAME(fattn_softmax) * state, fv sum)
{
    state->l = fv_add(state->l, sum);
}

/* Joins what two parts of a row have met: into becomes both, and their unnormalised o are to be
 * multiplied by *alpha (into) and *beta (other) and added. Exactly commutative. */
FATTN_HD void SOFTMAX_NAME(fattn_softmax_merge)(SOFTMAX_NAME(fattn_softmax) * into,
                                                SOFTMAX_NAME(fattn_softmax) other, fv *alpha,
                                                fv *beta)
{
    *alpha = SOFTMAX_NAME(fattn_softmax_raise)(into, other.m);
    *beta = fv_exp2(fv_sub(other.m, SOFTMAX_NAME(fattn_softmax_base)(*into)));
    SOFTMAX_NAME(fattn_softmax_add)(into, fv_mul(other.l, *beta));
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
 * The natural logarithm of the sum of exp(x), and -inf for an empty row: (m + log2 l) ln 2, within half
 * an ulp and 2^-23 while it is below 2^14, and within 3/2 ulp beyond. A number of this size in log2
 * units, and its product with a rounded ln 2, would each be off by half an ulp more, so both factors
 * are cut in two. l = 2^n f, f about 1, and m + n = s + e exactly (Knuth's two-sum). The integer part of
 * s, while below 2^15, times the 9 bits of 355/512 is exact, and what remains to be added is small.
 */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_lse)(SOFTMAX_NAME(fattn_softmax) state)
{
    const fv ln2 = fv_set1(0.69314718f), ln2_head = fv_set1(0.693359375f);
    const fv ln2_tail = fv_set1(-2.12194440e-4f); /* ln 2 - 355/512 */
    const fv zero = fv_set1(0.0f), m = state.m, l = state.l;

    const fv n = SOFTMAX_NAME(fattn_softmax_round)(fv_log2(l));
    const fv f = fv_mul(l, fv_exp2(fv_sub(zero, n)));
    const fv s = fv_add(m, n);
    const fv back = fv_sub(s, m);
    const fv e = fv_add(fv_sub(m, fv_sub(s, back)), fv_sub(n, back));
    const fv whole = SOFTMAX_NAME(fattn_softmax_round)(s);
    const fv rest = fv_add(fv_sub(s, whole), fv_add(e, fv_log2(f)));
    const fv small = fv_add(fv_mul(whole, ln2_tail), fv_mul(rest, ln2));
    const fv lse = fv_add(fv_mul(whole, ln2_head), small);
    return fv_select(fv_eq(l, zero), SOFTMAX_MINUS_INFINITY, lse);
}

#undef SOFTMAX_NAME
#undef SOFTMAX_MINUS_INFINITY
#ifdef FATTN_SUFFIX
#undef SOFTMAX_PASTE
#undef SOFTMAX_PASTE_EXPANDED
#endif

#endif
