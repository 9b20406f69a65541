/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Laws of the recurrence and of the score in the scalar vocabulary, on which every kernel relies.
 * Exact laws compare bits; laws up to rounding state a bound.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/vec_scalar.h"
#include "core/online_softmax.h"
#include "core/score.h"
#include "tests/random.h"
#include "tests/tap.h"
#include "tests/worst.h"

enum { KEYS = 96, TRIALS = 2000 };
static const float log2e = (float)FATTN_LOG2E;

/* --- Numbers ---------------------------------------------------------------------------------- */

static uint64_t random_state = 7;

static uint32_t random_bits(void) { return (uint32_t)(random_next(&random_state) >> 33); }

/* 0 .. n - 1 */
static int random_below(int n) { return (int)(random_bits() % (uint32_t)n); }

/* -size .. size */
static float random_float(float size) { return size * ((float)random_bits() * 0x1p-30f - 1); }

static bool same_bits(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

/* --- A row, visited in tiles ------------------------------------------------------------------ */

/* A row with values of one channel. */
typedef struct row {
    fattn_softmax state;
    float o;
} row;

static row row_empty(void) { return (row){fattn_softmax_empty(), 0}; }

/* Adds keys first .. past - 1, as a kernel does. */
static void row_meet(row *r, const float *x, const float *v, int first, int past)
{
    float largest = x[first], sum = 0, mixed = 0;
    for (int j = first + 1; j < past; j++) {
        largest = fv_max(largest, x[j]);
    }
    const float alpha = fattn_softmax_raise(&r->state, largest, log2e);
    const float base = fattn_softmax_base(r->state);
    for (int j = first; j < past; j++) {
        const float p = fattn_softmax_weight(x[j], log2e, base);
        sum += p;
        mixed += p * v[j];
    }
    fattn_softmax_add(&r->state, sum);
    r->o = r->o * alpha + mixed;
}

static row row_merge(row a, const row *b)
{
    float alpha, beta;
    fattn_softmax_merge(&a.state, b->state, log2e, &alpha, &beta);
    a.o = a.o * alpha + b->o * beta;
    return a;
}

/* Splits the keys at random positions. */
static row row_in_tiles(const float *x, const float *v, int n)
{
    row r = row_empty();
    for (int first = 0; first < n;) {
        const int past = first + 1 + random_below(n - first);
        row_meet(&r, x, v, first, past);
        first = past;
    }
    return r;
}

static float row_result(const row *r) { return r->o * fattn_softmax_normaliser(r->state); }

static float row_lse(const row *r) { return fattn_softmax_lse(r->state, 1); }

static void draw_row(float *x, float *v, float size)
{
    for (int j = 0; j < KEYS; j++) {
        x[j] = random_float(size);
        v[j] = random_float(1);
    }
}

/* The formula in double. */
static void exact_row(const float *x, const float *v, int n, double *o, double *lse)
{
    double m = -INFINITY, l = 0;
    *o = 0;
    for (int j = 0; j < n; j++) {
        m = x[j] > m ? x[j] : m;
    }
    for (int j = 0; j < n; j++) {
        l += exp(x[j] - m);
        *o += exp(x[j] - m) * v[j];
    }
    *o /= l;
    *lse = m + log(l);
}

/* --- Laws of the recurrence ------------------------------------------------------------------- */

static void check_tiles(void)
{
    float worst_o = 0, worst_lse = 0;
    for (int t = 0; t < TRIALS; t++) {
        float x[KEYS], v[KEYS];
        double o, lse;
        const float size = t % 2 ? 3 : 80;
        draw_row(x, v, size);
        exact_row(x, v, KEYS, &o, &lse);
        const row r = row_in_tiles(x, v, KEYS);
        const float error_o = fabsf(row_result(&r) - (float)o);
        const float error_lse = (float)(fabs(row_lse(&r) - lse) / fmax(1, fabs(lse)));
        worst_o = !(error_o <= worst_o) ? error_o : worst_o;
        worst_lse = !(error_lse <= worst_lse) ? error_lse : worst_lse;
    }
    tap_check(worst_o <= 1e-6f, "tiles cut anywhere give the formula's o: error %.2g", worst_o);
    tap_check(worst_lse <= 4e-7f, "and its lse: relative error %.2g", worst_lse);
}

static void check_order(void)
{
    double worst = 0;
    for (int t = 0; t < TRIALS; t++) {
        float x[KEYS], v[KEYS];
        draw_row(x, v, 20);
        row up = row_empty(), down = row_empty();
        for (int j = 0; j < KEYS; j += 8) {
            row_meet(&up, x, v, j, j + 8);
            row_meet(&down, x, v, KEYS - 8 - j, KEYS - j);
        }
        const float error = fabsf(row_result(&up) - row_result(&down));
        worst = worst_of(worst, error);
    }
    tap_check(worst <= 1e-6f, "tiles in any order give one answer: %.2g apart", worst);
}

static void check_merge(void)
{
    int commutes = 0, neutral = 0;
    double worst = 0;
    for (int t = 0; t < TRIALS; t++) {
        float x[KEYS], v[KEYS];
        draw_row(x, v, 20);
        const row whole = row_in_tiles(x, v, KEYS), nothing = row_empty();
        const row a = row_in_tiles(x, v, 32), b = row_in_tiles(x + 32, v + 32, 32),
                  c = row_in_tiles(x + 64, v + 64, 32);
        const row ab = row_merge(a, &b), ba = row_merge(b, &a), bc = row_merge(b, &c);
        const row left = row_merge(ab, &c), right = row_merge(a, &bc);
        const row before = row_merge(nothing, &a), after = row_merge(a, &nothing);
        commutes += same_bits(ab.state.m, ba.state.m) && same_bits(ab.state.l, ba.state.l) &&
                    same_bits(ab.o, ba.o);
        neutral += same_bits(before.state.l, a.state.l) && same_bits(before.o, a.o) &&
                   same_bits(after.state.l, a.state.l) && same_bits(after.o, a.o) &&
                   same_bits(before.state.m, a.state.m) && same_bits(after.state.m, a.state.m);
        const float error = fmaxf(fabsf(row_result(&left) - row_result(&right)),
                                  fabsf(row_result(&left) - row_result(&whole)));
        worst = worst_of(worst, error);
    }
    tap_check(commutes == TRIALS, "merging commutes, bit for bit: %d of %d", commutes, TRIALS);
    tap_check(neutral == TRIALS, "the empty state is the identity, bit for bit: %d of %d", neutral,
              TRIALS);
    tap_check(worst <= 1e-6f, "merging is associative up to rounding: %.2g", worst);

    const row nothing = row_empty(), still = row_merge(nothing, &nothing);
    tap_check(row_lse(&still) == -INFINITY && row_result(&still) == 0,
              "two empty states are the empty state");
}

static void check_shift(void)
{
    double worst = 0;
    int shifted = 0;
    for (int t = 0; t < TRIALS; t++) {
        float x[KEYS], y[KEYS], v[KEYS];
        const float c = ldexpf(t % 4 < 2 ? 1 : -1, 10 + t % 8);
        draw_row(x, v, 4);
        for (int j = 0; j < KEYS; j++) {
            x[j] = rintf(x[j] * 64) / 64; /* exact after the shift too */
            y[j] = x[j] + c;
        }
        const row a = row_in_tiles(x, v, KEYS), b = row_in_tiles(y, v, KEYS);
        const float error = fabsf(row_result(&a) - row_result(&b));
        worst = !(error <= worst) ? error : worst;
        shifted += fabsf(row_lse(&b) - row_lse(&a) - c) <= fabsf(c) * 0x1p-22f;
    }
    tap_check(worst <= 1e-6f, "a constant added to all scores changes nothing: %.2g", worst);
    tap_check(shifted == TRIALS, "but lse, by that constant: %d of %d", shifted, TRIALS);
}

/* --- NaN and infinities ----------------------------------------------------------------------- */

static void check_infinities(void)
{
    int clean = 0, empty = 0, kept = 0, infinite = 0;
    for (int t = 0; t < TRIALS; t++) {
        float x[KEYS], v[KEYS];
        draw_row(x, v, 20);
        const int first = random_below(KEYS);
        float masked[KEYS];
        memcpy(masked, x, sizeof x);
        for (int j = 0; j < first; j++) {
            masked[j] = -INFINITY;
        }
        row r = row_empty();
        for (int j = 0; j < KEYS; j += 8) {
            row_meet(&r, masked, v, j, j + 8);
        }
        double o, lse;
        exact_row(x + first, v + first, KEYS - first, &o, &lse);
        clean += fabs(row_result(&r) - o) <= 1e-6 && fabs(row_lse(&r) - lse) <= 1e-5;

        for (int j = 0; j < KEYS; j++) {
            masked[j] = -INFINITY;
        }
        r = row_in_tiles(masked, v, KEYS);
        empty += row_lse(&r) == -INFINITY && row_result(&r) == 0 && r.state.l == 0;

        const int at = random_below(KEYS);
        memcpy(masked, x, sizeof x);
        for (int j = 0; t % 2 && j < KEYS; j++) {
            masked[j] = -INFINITY;
        }
        masked[at] = NAN;
        r = row_in_tiles(masked, v, KEYS);
        kept += isnan(row_lse(&r)) && isnan(row_result(&r));

        masked[at] = INFINITY;
        r = row_in_tiles(masked, v, KEYS);
        infinite += isnan(row_lse(&r)) && isnan(row_result(&r));
    }
    tap_check(clean == TRIALS, "leading scores of -inf are no keys: %d of %d", clean, TRIALS);
    tap_check(empty == TRIALS, "a row of -inf is empty: %d of %d", empty, TRIALS);
    tap_check(kept == TRIALS, "a NaN stays, wherever it is: %d of %d", kept, TRIALS);
    tap_check(infinite == TRIALS, "inf - inf is NaN, as in the formula: %d of %d", infinite,
              TRIALS);
}

static void check_sink(void)
{
    int joined = 0;
    for (int t = 0; t < TRIALS; t++) {
        float x[KEYS], v[KEYS];
        draw_row(x, v, 20);
        const float sink = random_float(30);
        row with = {fattn_softmax_sink(sink), 0};
        row_meet(&with, x, v, 1, KEYS);
        x[0] = sink;
        v[0] = 0;
        double o, lse;
        exact_row(x, v, KEYS, &o, &lse);
        joined += fabs(row_result(&with) - o) <= 1e-6 && fabs(row_lse(&with) - lse) <= 1e-5;
    }
    tap_check(joined == TRIALS, "a sink is one more key of value 0: %d of %d", joined, TRIALS);

    const fattn_softmax absent = fattn_softmax_sink(-INFINITY);
    tap_check(absent.l == 0 && absent.m == -INFINITY, "a sink of -inf is no key");
    tap_check(isnan(fattn_softmax_lse(fattn_softmax_sink(NAN), 1)), "a sink of NaN is NaN");
    tap_check(isnan(fattn_softmax_lse(fattn_softmax_sink(INFINITY), 1)),
              "a sink of inf is inf - inf");
    double worst = 0;
    for (int t = 0; t < TRIALS; t++) {
        const float sink = random_float(t % 2 ? 1 : 1e4f);
        const float lse = fattn_softmax_lse(fattn_softmax_sink(sink), 1);
        const float error = fabsf(lse - sink) / fmaxf(1, fabsf(sink));
        worst = worst_of(worst, error);
    }
    tap_check(worst <= 0x1p-23f, "alone it is its own lse: %.2g", worst);
}

/* From m and l as they are. */
static void check_lse(void)
{
    double worst = 0, worst_large = 0;
    for (int t = 0; t < 100 * TRIALS; t++) {
        const float size = ldexpf(1, random_below(36) - 8);
        const fattn_softmax state = {.m = random_float(size),
                                     .l = ldexpf(1 + fabsf(random_float(1)), random_below(30))};
        const float natural = t % 2 ? 1 : 1 + fabsf(random_float(1)); /* inexact products */
        const double exact = (double)state.m * natural + log(state.l);
        const double ulp = ldexp(1, ilogb(exact) - 23);
        const double share = fabs(fattn_softmax_lse(state, natural) - exact) / (ulp / 2 + 0x1p-23);
        double *const kept = size < 0x1p14f ? &worst : &worst_large;
        *kept = worst_of(*kept, share);
    }
    tap_check(worst <= 1, "lse of {m, l} is within half an ulp and 2^-23: %.4f of it", worst);
    tap_check(worst_large <= 3, "and within 3/2 ulp where it is large: %.4f halves", worst_large);
}

/* --- The score -------------------------------------------------------------------------------- */

static fattn_score_pair no_pair(void)
{
    return (fattn_score_pair){.bias = NAN, .slope = NAN, .distance = NAN, .keep = 0};
}

static void check_cap(void)
{
    double worst = 0, worst_dscore = 0;
    for (int t = 0; t < 100 * TRIALS; t++) {
        const float cap = ldexpf(1 + fabsf(random_float(1)), random_below(20) - 4);
        const float x = random_float(cap * ldexpf(1, random_below(12) - 8));
        const fattn_score_rule rule = fattn_score_rule_make(FATTN_SCORE_CAP, 1, cap);
        float dscore;
        const double capped = fattn_score(&rule, rule.terms, x, no_pair(), &dscore);
        const double tanh_x = tanh((double)x / cap), cosh_x = cosh((double)x / cap);
        const double error = fabs(capped - cap * tanh_x) / fabs(cap * tanh_x);
        const double error_dscore = fabs(dscore * cosh_x * cosh_x - 1) / fmax(1, fabs(x / cap));
        worst = x != 0 ? worst_of(worst, error) : worst;
        worst_dscore = worst_of(worst_dscore, error_dscore);
    }
    tap_check(worst <= 4e-7, "softcap is softcap tanh(x / softcap): relative error %.2g", worst);
    tap_check(worst_dscore <= 1e-6, "and its derivative 1 / cosh^2, to its last digits: %.2g",
              worst_dscore);

    int same = 0;
    const double caps[] = {1e12, 1e30, 1e38, 1e300};
    for (int t = 0; t < TRIALS; t++) {
        const fattn_score_rule rule = fattn_score_rule_make(FATTN_SCORE_CAP, 1, caps[t % 4]);
        const float x = random_float(100);
        float dscore;
        same += same_bits(fattn_score(&rule, rule.terms, x, no_pair(), &dscore), x) && dscore == 1;
    }
    tap_check(same == TRIALS, "a huge softcap is none: %d of %d", same, TRIALS);

    const fattn_score_rule rule = fattn_score_rule_make(FATTN_SCORE_CAP, 1, 30);
    float dscore;
    tap_check(fattn_score(&rule, rule.terms, INFINITY, no_pair(), &dscore) == 30 && dscore == 0,
              "inf is capped");
    tap_check(fattn_score(&rule, rule.terms, -INFINITY, no_pair(), &dscore) == -30 && dscore == 0,
              "-inf is capped");
    tap_check(isnan(fattn_score(&rule, rule.terms, NAN, no_pair(), &dscore)), "NaN is not");
}

static void check_terms(void)
{
    float dscore;
    const fattn_score_rule plain = fattn_score_rule_make(0, 0.25, 0);
    tap_check(plain.terms == 0 && same_bits(plain.unit, (float)(0.25 * FATTN_LOG2E)),
              "without terms scale is part of the unit");
    const double scales[] = {0, -1, -1e-30, 1e-300};
    for (int n = 0; n < 4; n++) {
        const fattn_score_rule rule = fattn_score_rule_make(0, scales[n], 0);
        tap_check(rule.terms == FATTN_SCORE_SCALE && same_bits(rule.unit, log2e) &&
                      same_bits(fattn_score(&rule, rule.terms, 3, no_pair(), &dscore),
                                3 * (float)scales[n]),
                  "scale %g is multiplied with: a unit must be > 0", scales[n]);
    }

    const fattn_score_rule bias = fattn_score_rule_make(FATTN_SCORE_BIAS, 1, 0);
    const struct {
        float bias, expected;
    } clamps[] = {{3, 3},
                  {-3, -3},
                  {FLT_MAX, 0x1p126f},
                  {-FLT_MAX, -0x1p126f},
                  {INFINITY, INFINITY},
                  {-INFINITY, -INFINITY}};
    for (int n = 0; n < 6; n++) {
        fattn_score_pair pair = no_pair();
        pair.bias = clamps[n].bias;
        tap_check(fattn_score(&bias, bias.terms, 0, pair, &dscore) == clamps[n].expected,
                  "a bias of %g counts as %g", clamps[n].bias, clamps[n].expected);
    }
    fattn_score_pair poisoned = no_pair();
    tap_check(isnan(fattn_score(&bias, bias.terms, 0, poisoned, &dscore)), "a bias of NaN stays");
    tap_check(fattn_score(&bias, bias.terms | FATTN_SCORE_KEEP, 0, poisoned, &dscore) == -INFINITY,
              "what is not kept is -inf, were it NaN");
    poisoned.keep = 1;
    tap_check(isnan(fattn_score(&bias, bias.terms | FATTN_SCORE_KEEP, 0, poisoned, &dscore)),
              "what is kept stays NaN");

    const fattn_score_rule alibi = fattn_score_rule_make(FATTN_SCORE_ALIBI, 0.5, 0);
    const fattn_score_pair far = {.bias = NAN, .slope = 0.25f, .distance = 12, .keep = 0};
    tap_check(fattn_score(&alibi, alibi.terms, 8, far, &dscore) == 1 && dscore == 1,
              "ALiBi subtracts slope times distance from the scaled product");
}

int main(void)
{
    check_tiles();
    check_order();
    check_merge();
    check_shift();
    check_infinities();
    check_sink();
    check_lse();
    check_cap();
    check_terms();
    return tap_done();
}
