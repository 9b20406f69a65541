/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The score of a query and a key, computed from their dot product, and its derivative.
 *
 *     x  = dot(q, k)
 *     x *= scale                                        FATTN_SCORE_SCALE
 *     x  = softcap * tanh(x / softcap)                  FATTN_SCORE_CAP
 *     x += bias                                         FATTN_SCORE_BIAS
 *     x -= slope * |i + off - j|                        FATTN_SCORE_ALIBI
 *     x  = keep ? x : -inf                              FATTN_SCORE_KEEP
 *
 * A rounding error of x becomes a relative error of exp(x), so scores have the roundings of the
 * formula and no others. Without cap, bias and ALiBi a run does not even multiply by scale: its
 * scores are dot products, and scale is part of the unit that the exponential takes
 * (online_softmax.h). A pair that is not kept, or has a bias of -inf, is set to -inf by selection,
 * not by addition, so that a masked NaN does not survive.
 *
 * This is a template header over the vocabulary of the unit that includes it:
 *
 *     fv, mv                                         vectors of floats, and of conditions
 *     fv_set1 fv_add fv_sub fv_mul fv_div fv_exp2
 *     fv_muladd(a, b, c)                             a * b + c, in one rounding or two
 *     fv_abs, fv_min(a, b), fv_max(a, b)             a < b ? a : b, a > b ? a : b: b when unordered
 *     fv_lt(a, b), fv_eq(a, b), fv_select(m, a, b)   m ? a : b
 *
 * FATTN_SUFFIX, where defined, is appended to every name of the instance.
 */
#ifndef FATTN_CORE_SCORE_H
#define FATTN_CORE_SCORE_H

#include "core/dtype.h"
#include "core/host_device.h"

#define FATTN_LOG2E 1.44269504088896340736 /* double */
#define FATTN_SCORE_CAP_NEAR 0.625f        /* |x / softcap| below which tanh is a polynomial */

enum {
    FATTN_SCORE_SCALE = 1,
    FATTN_SCORE_CAP = 2,
    FATTN_SCORE_BIAS = 4,
    FATTN_SCORE_ALIBI = 8,
    FATTN_SCORE_KEEP = 16
};

/* The parameters that all pairs of a run share. */
typedef struct fattn_score_rule {
    unsigned terms;   /* FATTN_SCORE_*; a kernel adds KEEP for tiles that need it */
    float unit;       /* a score times this is in log2 units; > 0 */
    float natural;    /* a score times this is in natural units: scale, or 1 */
    float scale;      /* d(scale * dot) / d(dot) */
    float cap;        /* softcap */
    float reciprocal; /* 1 / softcap */
} fattn_score_rule;

/* terms: CAP, BIAS and ALIBI as the problem has them, and SCALE if the run needs natural scores.
 * Scale is folded into the unit if there are no terms and scale * log2 e is above 2^-64: a unit
 * must be > 0, so that the largest score stays the largest and -inf stays -inf, and large enough
 * that an lse in units of the scores does not overflow. Otherwise every score is multiplied by
 * scale. */
FATTN_HD fattn_score_rule fattn_score_rule_make(unsigned terms, double scale, double softcap)
{
    const float folded = (float)(scale * FATTN_LOG2E);
    fattn_score_rule rule;
    rule.terms = terms || !(folded > 0x1p-64f) ? terms | FATTN_SCORE_SCALE : 0;
    rule.unit = rule.terms ? (float)FATTN_LOG2E : folded;
    rule.natural = rule.terms ? 1.0f : (float)scale;
    rule.scale = (float)scale;
    rule.cap = (float)softcap;
    rule.reciprocal = terms & FATTN_SCORE_CAP ? (float)(1.0 / softcap) : 0.0f;
    return rule;
}

#endif

#if defined(FATTN_SUFFIX) || !defined(FATTN_CORE_SCORE_INSTANCE)

#ifdef FATTN_SUFFIX
#define SCORE_PASTE_EXPANDED(name, suffix) name##suffix
#define SCORE_PASTE(name, suffix) SCORE_PASTE_EXPANDED(name, suffix)
#define SCORE_NAME(name) SCORE_PASTE(name, FATTN_SUFFIX)
#else
#define FATTN_CORE_SCORE_INSTANCE
#define SCORE_NAME(name) name
#endif

/* The terms of one pair. Those that the run does not have are not read. */
typedef struct SCORE_NAME(fattn_score_pair) {
    fv bias; /* as the caller gave it */
    fv slope;
    fv distance; /* |i + off - j| */
    mv keep;
} SCORE_NAME(fattn_score_pair);

/*
 * softcap * tanh(x / softcap), and in *dscore its derivative by x, 1 - tanh^2, without
 * cancellation.
 *
 * With y = x / softcap: for |y| < 5/8 tanh(y) = y (1 + z P(z)), z = y^2, P the degree-5
 * interpolation of (tanh(y) / y - 1) / z in the Chebyshev nodes of 0 <= z <= (5/8)^2, whose
 * relative error is 6e-10. The result is then x times a factor; as softcap grows without bound, the
 * factor tends to 1 and the result to x. Elsewhere tanh |y| = 1 - 2 w and 1 - tanh^2 = 4 w (1 - w),
 * w = 1 / (1 + exp(2 |y|)), where an exp that overflows gives w = 0. A NaN fails the comparison and
 * passes through exp.
 *
 * fattn_score_cap_factor() is 1 + z P(z).
 */
FATTN_HD fv SCORE_NAME(fattn_score_cap_factor)(fv z)
{
    fv poly = fv_set1(0.002292744715571307f);
    poly = fv_muladd(poly, z, fv_set1(-0.008343945405831792f));
    poly = fv_muladd(poly, z, fv_set1(0.0217689186069157f));
    poly = fv_muladd(poly, z, fv_set1(-0.05395925956936714f));
    poly = fv_muladd(poly, z, fv_set1(0.13333303556857562f));
    poly = fv_muladd(poly, z, fv_set1(-0.33333333172139035f));
    return fv_muladd(poly, z, fv_set1(1.0f));
}

FATTN_HD fv SCORE_NAME(fattn_score_cap)(const fattn_score_rule *rule, fv x, fv *dscore)
{
    const fv one = fv_set1(1.0f), two = fv_set1(2.0f), zero = fv_set1(0.0f);
    const fv y = fv_mul(x, fv_set1(rule->reciprocal));
    const fv size = fv_abs(y);

    const fv factor = SCORE_NAME(fattn_score_cap_factor)(fv_mul(y, y));
    const fv near = fv_mul(x, factor);
    const fv tanh_near = fv_mul(y, factor);
    const fv dscore_near = fv_sub(one, fv_mul(tanh_near, tanh_near));

    const fv e = fv_exp2(fv_mul(size, fv_set1((float)(2.0 * FATTN_LOG2E))));
    const fv w = fv_div(one, fv_add(one, e));
    const fv size_far = fv_mul(fv_set1(rule->cap), fv_sub(one, fv_mul(two, w)));
    const fv far = fv_select(fv_lt(x, zero), fv_sub(zero, size_far), size_far);
    const fv dscore_far = fv_mul(fv_mul(fv_set1(4.0f), w), fv_sub(one, w));

    const mv is_near = fv_lt(size, fv_set1(FATTN_SCORE_CAP_NEAR));
    *dscore = fv_select(is_near, dscore_near, dscore_far);
    return fv_select(is_near, near, far);
}

FATTN_HD fv SCORE_NAME(fattn_score_clamp)(fv bias)
{
    const fv limit = fv_set1(0x1p126f);
    return fv_max(fv_sub(fv_set1(0.0f), limit), fv_min(limit, bias));
}

/* Clamps a finite bias to +-2^126, so that it is finite in log2 units too. */
FATTN_HD fv SCORE_NAME(fattn_score_bias)(fv bias)
{
    const fv infinity = fv_set1(fattn_f32_infinity());
    return fv_select(fv_eq(fv_abs(bias), infinity), bias, SCORE_NAME(fattn_score_clamp)(bias));
}

/* x + bias, with a finite bias clamped. An infinite bias replaces x: -inf hides a pair as a mask
 * does, whatever x is, and +inf makes the row NaN, whatever x is. */
FATTN_HD fv SCORE_NAME(fattn_score_biased)(fv x, fv bias)
{
    const fv infinity = fv_set1(fattn_f32_infinity());
    const fv sum = fv_add(x, SCORE_NAME(fattn_score_clamp)(bias));
    return fv_select(fv_eq(fv_abs(bias), infinity), bias, sum);
}

/* The score of a pair from its dot product, and in *dscore d(score) / d(scale * dot): 1 without a
 * cap. terms: rule->terms, and KEEP where the tile needs it. */
FATTN_HD fv SCORE_NAME(fattn_score)(const fattn_score_rule *rule, unsigned terms, fv x,
                                    SCORE_NAME(fattn_score_pair) pair, fv *dscore)
{
    *dscore = fv_set1(1.0f);
    if (terms & FATTN_SCORE_SCALE) {
        x = fv_mul(x, fv_set1(rule->scale));
    }
    if (terms & FATTN_SCORE_CAP) {
        x = SCORE_NAME(fattn_score_cap)(rule, x, dscore);
    }
    if (terms & FATTN_SCORE_BIAS) {
        x = SCORE_NAME(fattn_score_biased)(x, pair.bias);
    }
    if (terms & FATTN_SCORE_ALIBI) {
        x = fv_sub(x, fv_mul(pair.slope, pair.distance));
        if (terms & FATTN_SCORE_BIAS) { /* a bias of -inf stays: the slope may be infinite */
            const fv none = fv_set1(-fattn_f32_infinity());
            x = fv_select(fv_eq(pair.bias, none), none, x);
        }
    }
    if (terms & FATTN_SCORE_KEEP) {
        x = fv_select(pair.keep, x, fv_set1(-fattn_f32_infinity()));
    }
    return x;
}

#undef SCORE_NAME
#ifdef FATTN_SUFFIX
#undef SCORE_PASTE
#undef SCORE_PASTE_EXPANDED
#endif

#endif
