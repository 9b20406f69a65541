/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The recurrence of online softmax: a row of scores is met one tile at a time, and all that has been
 * seen of it is {m, l}, its largest score and the sum of 2^(x - m). Every kernel, split and merge of
 * fattn runs these lines. A tile of scores x and values v joins a row by
 *
 *     alpha = raise(&state, the largest x)        m = max(m, x)
 *     p     = exp2(x - base(state))
 *     add(&state, the sum of p)                   l = alpha l + sum p
 *     o     = alpha o + sum p v
 *
 * In the end the row is o * normaliser(state), and its log-sum-exp is lse(state).
 *
 * Scores are in log2 units. -inf and NaN come out as the formula has them because
 *   - base() is 0 where m is -inf: exp2(-inf - (-inf)) would be NaN for a row that has met nothing but
 *     scores of -inf, whose p is 0;
 *   - m may lose a NaN, as every max instruction does, but p keeps it, and with it l and o for good;
 *   - a row is empty when l == 0, which is false for NaN, and never asked through m.
 *
 * This is a template header over the vocabulary of the unit that includes it, a lane being a row:
 *
 *     fv, mv                                   vectors of floats, and of conditions
 *     fv_set1 fv_add fv_sub fv_mul fv_div fv_exp2 fv_log2
 *     fv_max(a, b)                             a > b ? a : b, which is b when either is NaN
 *     fv_eq(a, b), fv_select(m, a, b)          m ? a : b
 *
 * FATTN_SUFFIX, where defined, is appended to every name, so that two vocabularies can meet in a unit.
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
#define SOFTMAX_LN2 0.693147180559945309f

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

/* One score x met, of a key whose value is 0: a sink. x - x is 0 for a number and NaN for +inf and NaN,
 * as in the formula; a sink of -inf is no key. */
FATTN_HD SOFTMAX_NAME(fattn_softmax) SOFTMAX_NAME(fattn_softmax_sink)(fv x)
{
    SOFTMAX_NAME(fattn_softmax) state;
    state.m = x;
    state.l = fv_select(fv_eq(x, SOFTMAX_MINUS_INFINITY), fv_set1(0.0f), fv_exp2(fv_sub(x, x)));
    return state;
}

/* What scores are taken relative to. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_base)(SOFTMAX_NAME(fattn_softmax) state)
{
    return fv_select(fv_eq(state.m, SOFTMAX_MINUS_INFINITY), fv_set1(0.0f), state.m);
}

/* Meets scores of which x is the largest, and returns what all sums so far must be multiplied by. */
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

/* The natural logarithm of the sum of exp(x), and -inf for an empty row. */
FATTN_HD fv SOFTMAX_NAME(fattn_softmax_lse)(SOFTMAX_NAME(fattn_softmax) state)
{
    const fv lse = fv_mul(fv_add(state.m, fv_log2(state.l)), fv_set1(SOFTMAX_LN2));
    return fv_select(fv_eq(state.l, fv_set1(0.0f)), SOFTMAX_MINUS_INFINITY, lse);
}

#undef SOFTMAX_NAME
#undef SOFTMAX_MINUS_INFINITY
#undef SOFTMAX_LN2
#ifdef FATTN_SUFFIX
#undef SOFTMAX_PASTE
#undef SOFTMAX_PASTE_EXPANDED
#endif

#endif
