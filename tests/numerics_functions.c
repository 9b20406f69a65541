/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors of exp2, log2, the softcap and lse of one instruction set, compared with what the headers
 * promise and docs/NUMERICS.md assumes. Compiled once for each instruction set, with FATTN_ISA and
 * FATTN_VEC as for isa_tmpl.c (unit.h).
 *
 * usage: numerics_functions_<isa> [STEP | --all]
 * Every 61st float of each range, every STEP-th, or every one; compared with double precision.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpuid.h"
#include "backends/cpu/window.h"
#include "tests/random.h"
#include "tests/tap.h"

/* One rounding of f32, relative: half of the distance between 1 and the next number. */
static const double u = 0x1p-24;

typedef struct worst {
    double error;
    float at;
} worst;

static void grow(worst *w, double error, float at)
{
    if (!isnan(w->error) && !(error <= w->error)) { /* NaN is the worst, and stays */
        w->error = error;
        w->at = at;
    }
}

static double ulp(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint64_t exponent = bits >> 52 & 0x7ff, least = 1023 - 126;
    bits = ((exponent < least ? least : exponent) - 23) << 52;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Vectors of neighbouring samples from `first` to `last`, floats of one sign by ascending size. */
typedef struct samples {
    uint32_t next, last, step;
} samples;

static samples samples_of(float first, float last, uint32_t step)
{
    return (samples){fattn_f32_bits(first), fattn_f32_bits(last), step};
}

static bool samples_take(samples *s, float x[FV_LANES])
{
    const bool any = s->next <= s->last;
    for (int n = 0; n < FV_LANES; n++) {
        x[n] = fattn_f32_from_bits(s->next <= s->last ? s->next : s->last);
        s->next += s->step;
    }
    return any;
}

/* 2^x for x in first .. last, in ulp of the result where that is normal, else in 2^-149; where all
 * are, by fv_exp2_normal() too, which must give the same. */
static worst measure_exp2(float first, float last, uint32_t step, bool normal)
{
    samples s = samples_of(first, last, step);
    float x[FV_LANES], y[FV_LANES], z[FV_LANES];
    worst w = {0, 0};
    while (samples_take(&s, x)) {
        fv_store(y, fv_exp2(fv_load(x)));
        fv_store(z, normal ? fv_exp2_normal(fv_load(x)) : fv_load(y));
        for (int n = 0; n < FV_LANES; n++) {
            const double exact = exp2((double)x[n]);
            grow(&w, z[n] != y[n] ? 1e9 : fabs((double)y[n] - exact) / ulp(exact), x[n]);
        }
    }
    return w;
}

/* The same for fv_exp2_from(), which must give exact zeros below the least exponent. */
static worst measure_exp2_from(float first, float last, uint32_t step)
{
    const float least = -150, factor = 0x1p32f;
    samples s = samples_of(first, last, step);
    float x[FV_LANES], y[FV_LANES];
    worst w = {0, 0};
    while (samples_take(&s, x)) {
        fv_store(y, fv_exp2_from(fv_load(x), least, factor));
        for (int n = 0; n < FV_LANES; n++) {
            const double exact = x[n] < least ? 0 : (double)factor * exp2((double)x[n]);
            grow(&w, exact == 0 ? (y[n] != 0) * 1e9 : fabs((double)y[n] - exact) / ulp(exact),
                 x[n]);
        }
    }
    return w;
}

/* Weights of all x in the window of a base, times unit. Checks that all x inside are recognised as
 * such, and none outside; within a step of the ends either is allowed. */
static worst measure_window(float base, float unit, uint32_t step, bool *judged)
{
    const double step_size = ldexp(1, -FV_STEPS);
    worst w = {0, 0};
    window at;
    *judged = window_open(&at, unit, fv_set1(base));
    const uv none = at.ones;
    for (int sign = -1; sign <= 1; sign += 2) {
        samples s = samples_of(sign * 0x1p-126f, sign * FLT_MAX, step);
        float x[FV_LANES], y[FV_LANES];
        while (samples_take(&s, x)) {
            uv place;
            fv_store(y, window_weight(&at, fv_load(x), &place));
            int inside = 0, outside = 0;
            for (int n = 0; n < FV_LANES; n++) {
                const double power = (double)unit * ((double)x[n] - (double)base);
                const double exact = exp2(power);
                inside += power > -WINDOW_DOWN + step_size && power < WINDOW_UP - step_size;
                outside += power < -WINDOW_DOWN - step_size || power > WINDOW_UP + step_size;
                if (inside == n + 1) {
                    grow(&w, fabs((double)y[n] - exact) / ulp(exact), x[n]);
                }
            }
            at.ones = none;
            window_add(&at, place, place);
            const bool holds = window_holds(&at);
            *judged = *judged && (inside < FV_LANES || holds) && (outside == 0 || !holds);
        }
    }
    return w;
}

static worst measure_log2(float first, float last, uint32_t step)
{
    samples s = samples_of(first, last, step);
    float x[FV_LANES], y[FV_LANES];
    worst w = {0, 0};
    while (samples_take(&s, x)) {
        fv_store(y, fv_log2(fv_load(x)));
        for (int n = 0; n < FV_LANES; n++) {
            const double exact = log2((double)x[n]);
            grow(&w, exact == 0 ? (y[n] != 0) * 1e9 : fabs((double)y[n] - exact) / ulp(exact),
                 x[n]);
        }
    }
    return w;
}

/* tanh x and 1 - tanh^2 x: the cap is 1, so that y = x is exact. The relative error of the
 * derivative grows as its exponential's argument does, so it is taken in u (1 + |x|). */
static void measure_cap(float first, float last, uint32_t step, worst *value, worst *slope)
{
    const fattn_score_rule rule = fattn_score_rule_make(FATTN_SCORE_CAP, 1, 1);
    samples s = samples_of(first, last, step);
    float x[FV_LANES], y[FV_LANES], d[FV_LANES];
    while (samples_take(&s, x)) {
        fv derivative;
        fv_store(y, fattn_score_cap(&rule, fv_load(x), &derivative));
        fv_store(d, derivative);
        for (int n = 0; n < FV_LANES; n++) {
            const double exact = tanh((double)x[n]), sech = 1 / cosh((double)x[n]);
            grow(value, fabs((double)y[n] - exact) / fabs(exact) / u, x[n]);
            const double error = fabs((double)d[n] - sech * sech) / (sech * sech);
            grow(slope, error / u / (1 + (double)x[n]), x[n]);
        }
    }
}

/* lse of states with l in 1 .. 2^21 and |m| up to `reach`: the error beyond `ulps` ulp, in
 * 2^-23. */
static worst measure_lse(float reach, double ulps, int64_t count)
{
    uint64_t random_state = 1;
    worst w = {0, 0};
    for (int64_t done = 0; done < count; done += FV_LANES) {
        float m[FV_LANES], l[FV_LANES], y[FV_LANES];
        for (int n = 0; n < FV_LANES; n++) {
            const uint64_t random = random_next(&random_state);
            m[n] = reach * ((float)(random >> 40) * 0x1p-23f - 1);
            l[n] = exp2f((float)(random >> 16 & 0xffffff) * (21 * 0x1p-24f));
        }
        const fattn_softmax state = {.m = fv_load(m), .l = fv_load(l)};
        fv_store(y, fattn_softmax_lse(state, fv_set1(1)));
        for (int n = 0; n < FV_LANES; n++) {
            const double exact = (double)m[n] + log((double)l[n]);
            grow(&w, (fabs((double)y[n] - exact) - ulps * ulp(exact)) / 0x1p-23, m[n]);
        }
    }
    return w;
}

static float exp2_of(float x)
{
    float y[FV_LANES];
    fv_store(y, fv_exp2(fv_set1(x)));
    return y[FV_LANES - 1];
}

static float log2_of(float x)
{
    float y[FV_LANES];
    fv_store(y, fv_log2(fv_set1(x)));
    return y[FV_LANES - 1];
}

static float cap_of(float x, float *slope)
{
    const fattn_score_rule rule = fattn_score_rule_make(FATTN_SCORE_CAP, 1, 30);
    float y[FV_LANES], d[FV_LANES];
    fv derivative;
    fv_store(y, fattn_score_cap(&rule, fv_set1(x), &derivative));
    fv_store(d, derivative);
    *slope = d[0];
    return y[0];
}

static bool same_number(float a, float b)
{
    return isnan(b) ? isnan(a) : fattn_f32_bits(a) == fattn_f32_bits(b);
}

static void check_specials(void)
{
    bool exact = true;
    for (int n = -149; n < 128; n++) {
        exact = exact && exp2_of((float)n) == ldexpf(1, n);
    }
    tap_check(exact, "exp2 is exact at every integer of -149..127");
    tap_check(exp2_of(-INFINITY) == 0 && exp2_of(-1e30f) == 0 && exp2_of(-151) == 0,
              "exp2 of -inf, and of what underflows, is 0");
    tap_check(exp2_of(INFINITY) == INFINITY && exp2_of(1e30f) == INFINITY &&
                  exp2_of(128) == INFINITY,
              "exp2 of inf, and of what overflows, is inf");
    float y[FV_LANES];
    /* The sum is 2^-64 below half way to the next number, and in double half way: to even, up. */
    fv_store(y, fv_fma(fv_set1(0x1.00001p-12f), fv_set1(0x1.ffffep-13f), fv_set1(0x1.000002p0f)));
    tap_check(y[0] == 0x1.000002p0f, "fma rounds once");
    fv_store(y, fv_exp2_normal(fv_set1(NAN)));
    tap_check(isnan(exp2_of(NAN)) && isnan(y[0]) && isnan(log2_of(NAN)), "exp2 and log2 keep NaN");
    fv_store(y, fv_exp2_from(fv_set1(NAN), -150, 0x1p32f));
    tap_check(isnan(y[0]), "lifted exp2 keeps NaN");
    fv_store(y, fv_exp2_from(fv_set1(-INFINITY), -150, 0x1p32f));
    tap_check(y[0] == 0, "lifted exp2 of -inf is 0");
    tap_check(log2_of(0) == -INFINITY && log2_of(1) == 0 && log2_of(INFINITY) == INFINITY,
              "log2 of 0, 1 and inf is -inf, 0 and inf");
    float slope = 1;
    tap_check(isnan(cap_of(NAN, &slope)) && isnan(slope), "the softcap keeps NaN");
    tap_check(cap_of(INFINITY, &slope) == 30 && slope == 0, "the softcap of inf is the cap");
    tap_check(cap_of(-INFINITY, &slope) == -30 && slope == 0,
              "the softcap of -inf is minus the cap");
}

/* The window of base 0 with x in one lane of two vectors and 0 in all others; y: its weight. */
static bool window_of(float x, int lane, float *y)
{
    float lanes[FV_LANES] = {0}, weights[FV_LANES];
    window w;
    uv place, zeros;
    lanes[lane] = x;
    (void)window_open(&w, 1, fv_set1(0));
    (void)window_weight(&w, fv_set1(0), &zeros);
    fv_store(weights, window_weight(&w, fv_load(lanes), &place));
    window_add(&w, lane % 2 ? place : zeros, lane % 2 ? zeros : place);
    window_add(&w, zeros, zeros);
    *y = weights[lane];
    return window_holds(&w);
}

/* All codes of e4m3, also in parts of vectors, and where they are looked up. */
static void check_e4m3(void)
{
    uint8_t codes[256];
    float want[256];
    bool same = true;
    for (int code = 0; code < 256; code++) {
        codes[code] = (uint8_t)code;
        want[code] = fattn_e4m3_to_f32((uint8_t)code);
    }
    for (int code = 0; code < 256; code += FV_LANES) {
        float got[FV_LANES];
        fv_store(got, fv_load_e4m3(codes + code));
        for (int lane = 0; lane < FV_LANES; lane++) {
            same = same && same_number(got[lane], want[code + lane]);
        }
        for (int n = 0; n <= FV_LANES; n++) {
            fv_store(got, fv_load_part_e4m3(codes + code, n));
            for (int lane = 0; lane < FV_LANES; lane++) {
                same = same && same_number(got[lane], lane < n ? want[code + lane] : 0);
            }
        }
    }
#if FV_BYTES
    for (int code = 0; code < 256; code += 4 * FV_LANES) {
        fv block[4];
        uint16_t halves[4 * FV_LANES];
        fv_load_e4m3_block(codes + code, block);
        fv_widen_e4m3(halves, codes + code);
        for (int n = 0; n < 4 * FV_LANES; n++) {
            float got[FV_LANES];
            const int half = n / (2 * FV_LANES), lane = n % (2 * FV_LANES) / 2;
            fv_store(got, block[2 * half + n % 2]);
            same = same && same_number(got[lane], want[code + n]) &&
                   same_number(fattn_bf16_to_f32(halves[n]), want[code + n]);
        }
    }
#endif
    tap_check(same, "every number of e4m3 is loaded as what it is");
}

static void check_window(void)
{
    const float out[] = {-INFINITY, INFINITY, WINDOW_UP + 0.5f, -WINDOW_DOWN - 1,
                         1e30f,     -1e30f,   -0x1p21f,         -FLT_MAX};
    const uint32_t nan[] = {0x7fc00000, 0x7fffffff, 0xffffffff, 0xffc00001};
    bool noticed = true, kept = true, exact = true;
    float y = 0;
    for (int lane = 0; lane < FV_LANES; lane++) {
        for (size_t n = 0; n < sizeof out / sizeof *out; n++) {
            noticed = noticed && !window_of(out[n], lane, &y);
        }
        for (size_t n = 0; n < sizeof nan / sizeof *nan; n++) {
            window_of(fattn_f32_from_bits(nan[n]), lane, &y);
            kept = kept && isnan(y);
        }
        for (int n = -WINDOW_DOWN; n < WINDOW_UP; n++) {
            exact = window_of((float)n, lane, &y) && exact && y == ldexpf(1, n);
        }
    }
    tap_check(noticed, "a window notices each lane that is outside");
    tap_check(kept, "a weight in a window keeps NaN");
    tap_check(exact, "a window holds the integers %d..%d and is exact there", -WINDOW_DOWN,
              WINDOW_UP - 1);
    window w;
    tap_check(!window_open(&w, 1, fv_set1(-INFINITY)) && !window_open(&w, 1, fv_set1(NAN)) &&
                  !window_open(&w, 1, fv_set1(INFINITY)) && !window_open(&w, 1, fv_set1(2e5f)) &&
                  !window_open(&w, 1e5f, fv_set1(0)),
              "bases that are no numbers or large, and large units, have no window");
}

int main(int argc, char **argv)
{
    const char *const lacks = PASTE(fattn_cpuid_, FATTN_ISA)();
    const uint32_t step = argc < 2                        ? 61
                          : strcmp(argv[1], "--all") == 0 ? 1
                                                          : (uint32_t)strtoul(argv[1], NULL, 10);
    if (lacks) {
        printf("1..0 # SKIP this machine lacks %s\n", lacks);
        return 0;
    }
    check_specials();
    check_window();
    check_e4m3();

    worst w = measure_exp2(-0x1p-30f, -126, step, true);
    tap_check(w.error <= 2, "exp2 errs by %.3f ulp on -126..0 (at %.9g)", w.error, (double)w.at);
    w = measure_exp2(-126, -151, step, false);
    tap_check(w.error <= 1, "exp2 errs by %.3f of 2^-149 on -151..-126 (at %.9g)", w.error,
              (double)w.at);
    w = measure_exp2(0x1p-30f, 127.99999f, step, true);
    tap_check(w.error <= 2, "exp2 errs by %.3f ulp on 0..128 (at %.9g)", w.error, (double)w.at);
    w = measure_exp2_from(-0x1p-30f, -1000, step);
    tap_check(w.error <= 2, "lifted exp2 errs by %.3f ulp below 0 (at %.9g)", w.error,
              (double)w.at);
    const float windows[][2] = {{0, 1}, {9.3f, 1.4426950f}, {-99000, 0.18f}};
    for (size_t n = 0; n < sizeof windows / sizeof *windows; n++) {
        bool judged = false;
        w = measure_window(windows[n][0], windows[n][1], step, &judged);
        tap_check(judged && w.error <= 2,
                  "weights of %g times scores in a window around %g err by %.3f ulp (at %.9g)",
                  (double)windows[n][1], (double)windows[n][0], w.error, (double)w.at);
    }
    w = measure_log2(0x1p-126f, 0x1.fffffep127f, step);
    tap_check(w.error <= 2, "log2 errs by %.3f ulp on the normal numbers (at %.9g)", w.error,
              (double)w.at);

    w = measure_lse(64, 0.5, 61000000 / step);
    tap_check(w.error <= 1, "lse errs by 0.5 ulp and %.3f of 2^-23 for |m| < 64 (at %.9g)", w.error,
              (double)w.at);
    w = measure_lse(0x1p15f, 0.501, 61000000 / step);
    tap_check(w.error <= 1, "lse errs by 0.501 ulp and %.3f of 2^-23 for |m| < 2^15 (at %.9g)",
              w.error, (double)w.at);
    w = measure_lse(0x1p40f, 1.5, 61000000 / step);
    tap_check(w.error <= 1, "lse errs by 1.5 ulp and %.3f of 2^-23 for |m| < 2^40 (at %.9g)",
              w.error, (double)w.at);

    worst near = {0, 0}, near_slope = {0, 0}, far = {0, 0}, far_slope = {0, 0};
    measure_cap(0x1p-30f, 0.62499994f, step, &near, &near_slope);
    measure_cap(0.625f, 40, step, &far, &far_slope);
    tap_check(near.error <= 4, "the softcap errs by %.3f u on |y| < 5/8 (at %.9g)", near.error,
              (double)near.at);
    tap_check(far.error <= 4, "the softcap errs by %.3f u on |y| >= 5/8 (at %.9g)", far.error,
              (double)far.at);
    tap_check(near_slope.error <= 4,
              "its derivative errs by %.3f u (1 + |y|) on |y| < 5/8 (at %.9g)", near_slope.error,
              (double)near_slope.at);
    tap_check(far_slope.error <= 4,
              "its derivative errs by %.3f u (1 + |y|) on |y| >= 5/8 (at %.9g)", far_slope.error,
              (double)far_slope.at);
    return tap_done();
}
