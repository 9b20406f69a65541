/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights 2^(unit (x - base)) for scores in a window around their base. They take three quarters of
 * the instructions of exp2; half an instruction more per weight checks that all scores were in the
 * window.
 *
 *     s = unit x,  M = unit base rounded to steps of 2^-FV_STEPS
 *     t = -(s - M + WINDOW_ORIGIN) WINDOW_SCALE    whose last place is a step
 *     n = s in whole steps                         exactly, from t
 *     weight = 2^(n - M) 2^(s - n) 2^(M - unit base)
 *
 * The first factor comes from the bits of t. The last FV_STEPS bits number the steps within a power
 * of two and select from a table; the bits before them number the powers of two and are added to
 * the exponent of the table's entry. The second factor, with |s - n| <= 2^-(FV_STEPS + 1), is a
 * polynomial. The third is constant for a row, and part of the polynomial's coefficients.
 *
 * The window is s - M from -WINDOW_DOWN to below WINDOW_UP. It maps to the end of the binade from
 * -2^126 to -2^127. There the sign, the exponent and all bits of the mantissa above those of a
 * place in the window are 1, except for bit 24, the second lowest of the exponent. A number with
 * all of these bits and bit 24 is NaN. So the AND of many t has all of these bits if and only if
 * each t is in the window or NaN: scores below or above the window, and infinities, lack some of
 * them. NaN stays NaN in n, in s - n and in the weight.
 */
#ifndef FATTN_CPU_WINDOW_H
#define FATTN_CPU_WINDOW_H

#include "backends/cpu/unit.h"

#define WINDOW_UP 24
#define WINDOW_DOWN 104 /* together 2^WINDOW_BITS */
#define WINDOW_BITS 7

/* |t| < 2^127, and |s - M + WINDOW_ORIGIN| < 2^(24 - FV_STEPS). */
#define WINDOW_SCALE ((float)(1 << FV_STEPS) * 0x1p103f)
#define WINDOW_ORIGIN ((float)(1 << (24 - FV_STEPS)) - WINDOW_UP)
#define WINDOW_ONES (~((UINT32_C(1) << (FV_STEPS + WINDOW_BITS)) - 1) & ~(UINT32_C(1) << 24))

/* Bounds of bases and of units for which all this is exact and in range. */
#define WINDOW_BASE 0x1p17f
#define WINDOW_UNIT 0x1p16f

/* The table's entry for 2^(j / 2^FV_STEPS). A weight adds the bits of t to it, shifted to the
 * exponent. Those have three parts that the entry has to cancel: the two bits above the window,
 * which are 1; WINDOW_DOWN, the number of the power 2^0; and the step j, which is subtracted in the
 * constants below already. */
#define POWER(bits) ((bits) - (UINT32_C(3) << 30) - ((uint32_t)WINDOW_DOWN << 23))
#if FV_STEPS == 5
#define POWERS(a, b, c, d) POWER(a), POWER(b), POWER(c), POWER(d)
#elif FV_STEPS == 3
#define POWERS(a, b, c, d) POWER(a)
#endif
#if FV_STEPS
static const uint32_t window_powers[1 << FV_STEPS] = {
    POWERS(0x3f800000u, 0x3f7ecd87u, 0x3f7daac3u, 0x3f7c980fu),
    POWERS(0x3f7b95c2u, 0x3f7aa43au, 0x3f79c3d3u, 0x3f78f4f0u),
    POWERS(0x3f7837f0u, 0x3f778d3au, 0x3f76f532u, 0x3f767043u),
    POWERS(0x3f75fed7u, 0x3f75a15bu, 0x3f75583fu, 0x3f7523f6u),
    POWERS(0x3f7504f3u, 0x3f74fbafu, 0x3f7508a4u, 0x3f752c4du),
    POWERS(0x3f75672au, 0x3f75b9beu, 0x3f76248cu, 0x3f76a81eu),
    POWERS(0x3f7744fdu, 0x3f77fbb8u, 0x3f78ccdfu, 0x3f79b907u),
    POWERS(0x3f7ac0c7u, 0x3f7be4bau, 0x3f7d257du, 0x3f7e83b3u),
};
#else
static const uint32_t window_powers[1] = {POWER(0x3f800000u)};
#endif

/* Coefficients of 2^f - 1 = f (c0 + f (c1 + ... )). The first set is minimax for |f| <= 1/2, within
 * 2.6e-9 of 2^f in exact arithmetic; the other sets for |f| <= 2^-(FV_STEPS + 1): within 5.3e-8 for
 * 5 steps, 2.5e-8 for 3. */
static const float window_half[] = {0.693147215f,   0.240226528f,   0.0555031055f,
                                    0.00961769297f, 0.00134066439f, 0.000155946782f};
#if FV_STEPS == 5
static const float window_step[] = {0.693157399f, 0.240231819f};
#elif FV_STEPS == 3
static const float window_step[] = {0.693147174f, 0.240257631f, 0.0555106f};
#else
#define window_step window_half
#endif
enum {
    HALF_DEGREE = sizeof window_half / sizeof(float),
    STEP_DEGREE = sizeof window_step / sizeof(float)
};

/* The window of a vector of rows. */
typedef struct window {
    fv unit, scaled;          /* the factor of a score in s and in t */
    fv origin, origin_scaled; /* what is added to s, before and after scaling */
    fv c[1 + STEP_DEGREE];    /* the coefficients of 2^(M - unit base) 2^f - 1 */
    uv ones;                  /* the AND of the bits of all t so far */
} window;

/* Opens the window around a base. Returns false if some base is too large, or its row is empty. */
INLINE bool window_open(window *w, float unit, fv base)
{
    const fv origin = fv_set1(WINDOW_ORIGIN);
    w->unit = fv_set1(unit);
    w->scaled = fv_set1(-unit * WINDOW_SCALE);
    w->origin = fv_fma(base, fv_set1(-unit), origin);
    w->origin_scaled = fv_mul(w->origin, fv_set1(-WINDOW_SCALE));
    w->ones = uv_set1(UINT32_MAX);

    /* M, and the third factor, by (1 + p)^2 = 1 + p (2 + p): M may be off by a whole step where
     * numbers as large as origin are two steps apart. */
    const fv rounded = fv_sub(origin, w->origin);
    const fv f = fv_mul(fv_set1(0.5f), fv_fma(base, fv_set1(-unit), rounded));
    fv p = fv_set1(window_half[HALF_DEGREE - 1]);
    for (int n = HALF_DEGREE - 2; n >= 0; n--) {
        p = fv_fma(f, p, fv_set1(window_half[n]));
    }
    p = fv_mul(f, p);
    w->c[0] = fv_fma(p, p, fv_add(p, p));
    for (int n = 0; n < STEP_DEGREE; n++) {
        w->c[1 + n] = fv_fma(w->c[0], fv_set1(window_step[n]), fv_set1(window_step[n]));
    }
    return unit < WINDOW_UNIT && mv_all(fv_le(fv_abs(rounded), fv_set1(WINDOW_BASE)));
}

/* The weight of x. *place receives the bits of t. */
INLINE fv window_weight(const window *w, fv x, uv *place)
{
    const fv t = fv_fma(x, w->scaled, w->origin_scaled);
    const fv minus_n = fv_fma(t, fv_set1(1 / WINDOW_SCALE), w->origin);
    const fv f = fv_fma(x, w->unit, minus_n);
    *place = uv_bits(t);
    const uv power = uv_add(uv_shl(*place, 23 - FV_STEPS), uv_lookup(window_powers, *place));
    fv p = w->c[STEP_DEGREE];
    for (int n = STEP_DEGREE - 1; n >= 0; n--) {
        p = fv_fma(f, p, w->c[n]);
    }
    return fv_fma(fv_from_bits(power), p, fv_from_bits(power));
}

/* Collects two more places for window_holds(). */
INLINE void window_add(window *w, uv first, uv second)
{
    w->ones = uv_and(w->ones, uv_and(first, second));
}

/* Whether all places collected so far are in the window, or NaN. */
INLINE bool window_holds(const window *w)
{
    const uv ones = uv_set1(WINDOW_ONES);
    return mv_all(uv_eq(uv_and(w->ones, ones), ones));
}

#endif
