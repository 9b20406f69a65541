/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle's gradients are the derivatives of its forward. In double precision they equal central
 * differences of the loss sum(o * dO) + sum(lse * dLSE) to 1e-6 of the largest entry of the
 * gradient, for every feature, every pair of features and random sets. And the comparator computes
 * the same in every dtype; otherwise its error would be no measure for kernels.
 */
#include <math.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "tests/scenario.h"
#include "tests/tap.h"
#include "tests/worst.h"

/* -------------------------------------------------------------------------------------------------
 * Central differences
 * ---------------------------------------------------------------------------------------------- */

/* Entries that belong to no sequence stay 0 in o and lse, as the scenario set them. */
static double loss(scenario *s)
{
    const tensor *const t = s->tensors;
    if (fattn_naive_execute(&s->forward, &s->buffers) != FATTN_OK) return (double)NAN;
    double sum = 0;
    for (int64_t n = 0; n < t[O].count; n++) sum += tensor_get(&t[O], n) * tensor_get(&t[DOUT], n);
    for (int64_t n = 0; s->backward.features & FATTN_DLSE && n < t[LSE].count; n++) {
        const double lse = tensor_get(&t[LSE], n);
        if (lse != -(double)INFINITY) sum += lse * tensor_get(&t[DLSE_IN], n);
    }
    return sum;
}

/* The largest error of a gradient over its largest entry; truncation (h^2) and rounding (1e-16 / h)
 * both leave about 1e-10. */
static double error_of(scenario *s, tensor_id input, tensor_id output, const tensor *before)
{
    const double h = 2e-5;
    tensor *const x = &s->tensors[input];
    double error = 0, largest = 1e-3;
    for (int64_t n = 0; n < x->count; n++) {
        const double value = tensor_get(x, n);
        tensor_set(x, n, value + h);
        const double above = loss(s);
        tensor_set(x, n, value - h);
        const double below = loss(s);
        tensor_set(x, n, value);
        const double difference = (above - below) / (2 * h);
        const double gradient = tensor_get(&s->tensors[output], n) - tensor_get(before, n);
        error = worst_of(error, fabs(gradient - difference));
        largest = fmax(largest, fabs(gradient));
    }
    return error / largest;
}

static void check_differences(uint32_t traits, unsigned bias_flat, int64_t sq, int64_t sk)
{
    static const struct {
        tensor_id input, output;
        uint32_t bit;
        const char *name;
    } gradients[] = {{Q, DQ, FATTN_OUT_DQ, "dq"},
                     {K, DK, FATTN_OUT_DK, "dk"},
                     {V, DV, FATTN_OUT_DV, "dv"},
                     {BIAS_IN, DBIAS, FATTN_OUT_DBIAS, "dbias"},
                     {SINK_IN, DSINK, FATTN_OUT_DSINK, "dsink"}};
    static scenario s;
    static tensor before[TENSORS];
    char name[256], wrong[128] = "";
    scenario_name(traits, bias_flat, name, sizeof(name));
    bool good = scenario_create(&s, traits, bias_flat, FATTN_F64, sq, sk, traits * 31 + 7);
    memcpy(before, s.tensors, sizeof(before));
    good = good && fattn_naive_execute(&s.forward, &s.buffers) == FATTN_OK &&
           fattn_naive_execute(&s.backward, &s.buffers) == FATTN_OK;
    for (int g = 0; good && g < 5; g++) {
        if (!(s.backward.outputs & gradients[g].bit)) continue;
        const double error =
            error_of(&s, gradients[g].input, gradients[g].output, &before[gradients[g].output]);
        if (!(error <= 1e-6)) {
            snprintf(wrong, sizeof(wrong), ": error of %s is %.2g", gradients[g].name, error);
            good = false;
        }
    }
    tap_check(good, "differences, %lld x %lld: %s%s", (long long)sq, (long long)sk, name, wrong);
}

/* -------------------------------------------------------------------------------------------------
 * The comparator
 * ---------------------------------------------------------------------------------------------- */

/* Loose: enough for any order of at most 64 summands, far too small for a wrong formula. */
static bool close_to(const double *got, const double *want, int64_t slices, int64_t slice,
                     const double *scale, double factor)
{
    for (int64_t n = 0; n < slices * slice; n++)
        if (!(fabs(got[n] - want[n]) <= factor * scale[n / slice]) && got[n] != want[n])
            return false;
    return true;
}

static double largest(const double *x, int64_t count)
{
    double maximum = 0;
    for (int64_t n = 0; n < count; n++) maximum = fmax(maximum, x[n]);
    return maximum;
}

/* NULL, or what differs. */
static const char *comparator_differs(const fattn_problem *p, const fattn_buffers *buf)
{
    fattn_naive want, got;
    const double u = p->dtype == FATTN_BF16 ? 0x1p-8 : p->dtype == FATTN_F16 ? 0x1p-11 : 0;
    if (fattn_naive_run(p, buf, &want) != FATTN_OK) return "the oracle failed";
    if (fattn_comparator_run(p, buf, &got) != FATTN_OK) {
        fattn_naive_free(&want);
        return "the comparator failed";
    }
    const int64_t q = p->batch * p->heads_q, k = p->batch * p->heads_k;
    const double x = largest(want.x_max, q), f = 4 * u + 64 * 0x1p-23 * (1 + x);
    const int64_t *const e = want.bias_extent;
    const char *what = NULL;
    if (p->op == FATTN_FORWARD) {
        if (!close_to(got.o, want.o, q, p->seqlen_q * p->dim_v, want.a_o, f)) what = "o";
        if (!close_to(got.lse, want.lse, q * p->seqlen_q, 1, want.lse_scale, 64 * 0x1p-24))
            what = "lse";
    } else {
        if (!close_to(got.dq, want.dq, q, p->seqlen_q * p->dim, want.a_dq, f)) what = "dq";
        if (!close_to(got.dk, want.dk, k, p->seqlen_k * p->dim, want.a_dk, f)) what = "dk";
        if (!close_to(got.dv, want.dv, k, p->seqlen_k * p->dim_v, want.a_dv, f)) what = "dv";
        if (want.dbias != NULL &&
            !close_to(got.dbias, want.dbias, e[0] * e[1], e[2] * e[3], want.a_dbias, f))
            what = "dbias";
        if (want.dsink != NULL && !close_to(got.dsink, want.dsink, p->heads_q, 1, want.a_dsink, f))
            what = "dsink";
    }
    fattn_naive_free(&want);
    fattn_naive_free(&got);
    return what;
}

static void check_comparator(uint32_t traits, unsigned bias_flat, int64_t sq, int64_t sk)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    static const char *const names[] = {"f32", "f16", "bf16"};
    static scenario s;
    char name[256];
    const char *what = NULL, *in = "";
    scenario_name(traits, bias_flat, name, sizeof(name));
    for (int d = 0; d < 3 && what == NULL; d++) {
        in = names[d];
        if (!scenario_create(&s, traits, bias_flat, dtypes[d], sq, sk, traits * 17 + 3))
            what = "scenario";
        if (what == NULL) what = comparator_differs(&s.forward, &s.buffers);
        if (what == NULL && fattn_naive_execute(&s.forward, &s.buffers) != FATTN_OK)
            what = "forward";
        if (what == NULL) what = comparator_differs(&s.backward, &s.buffers);
    }
    tap_check(what == NULL, "comparator, %lld x %lld: %s%s%s%s%s", (long long)sq, (long long)sk,
              name, what != NULL ? ": wrong " : "", what != NULL ? what : "",
              what != NULL ? " in " : "", what != NULL ? in : "");
}

/* -------------------------------------------------------------------------------------------------
 * Which sets of features
 * ---------------------------------------------------------------------------------------------- */

static void check(uint32_t traits, unsigned bias_flat, bool wide)
{
    const int64_t sq = wide ? 4 : 6, sk = wide ? 7 : 4; /* 6 x 4 has empty rows when causal */
    check_differences(traits, bias_flat, sq, sk);
    check_comparator(traits, bias_flat, sq, sk);
}

int main(void)
{
    check(0, 0, true);
    check(0, 0, false);
    for (int a = 0; a < TRAITS; a++)
        for (int b = 0; b <= a; b++) {
            const uint32_t traits = 1u << a | 1u << b;
            const unsigned patterns = traits & 1u << BIAS ? 16 : 1;
            for (unsigned flat = 0; flat < patterns; flat++)
                check(traits, flat, (a + b + flat) % 2);
        }
    uint64_t state = 2026;
    for (int n = 0; n < 100; n++) {
        uint32_t traits = 0;
        for (int t = 0; t < TRAITS; t++) traits |= (uint32_t)(scenario_random(&state) > 0) << t;
        check(traits, (unsigned)n % 16, n / 16 % 2);
    }
    check((1u << TRAITS) - 1, 0, true);
    return tap_done();
}
