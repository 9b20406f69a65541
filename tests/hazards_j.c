/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group J: low precision. */
#include <math.h>

#include "core/dtype.h"
#include "tests/hazard.h"
#include "tests/worst.h"

/* A cache in 8 bits does not make probabilities 8 bits wide: the bound is that of q's type. The
 * values reach the largest number of e4m3, and in half of the cases one key has all of the weight,
 * whose probability of 1 an unfit factor would make too large for a narrow format. */
static void j1(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    static const int64_t dims[] = {16, 64, 128};
    static const int64_t rows[] = {1, 3, 70};
    for (int n = 0; n < 27 * 2; n++) {
        const int64_t keys = 150, dim = dims[n / 3 % 3];
        draw_case c =
            hazard_case(FATTN_FORWARD, dtypes[n % 3], 2, 4, 2, rows[n / 9 % 3], keys, dim);
        c.problem.dtype_kv = FATTN_E4M3;
        c.problem.pointer_alignment = 16;
        c.family = n / 27 ? DRAW_MASSIVE : DRAW_GAUSSIAN;
        if (hazard_build(&c)) {
            for (int64_t at = 0; at < 2 * 2 * keys * dim; at += 7) {
                draw_set(&c, DRAW_V, at, at % 2 ? 448 : -448);
            }
            hazard_judge(&c, 2, "q in %s, %lld rows, D %lld", fattn_dtype_name(dtypes[n % 3]),
                         (long long)rows[n / 9 % 3], (long long)dim);
        }
    }
}

/* Sums over a long context in 8 bits are as good as over a short one. With queries of 0 all keys
 * weigh the same, and o is the mean of values around 1: where an accumulator has 14 bits, what is
 * added last is lost. */
static void j2(void)
{
    static const int64_t lengths[] = {1 << 10, 1 << 13, 1 << 16};
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    static const double units[] = {0x1p-23, 0x1p-11, 0x1p-8};
    enum { DIM = 16 };
    EACH (l, lengths) {
        for (int type = 0; type < 3 && !(hazard_emulated() && l == 2); type++) {
            draw_case c = hazard_case(FATTN_FORWARD, dtypes[type], 1, 1, 1, 1, lengths[l], DIM);
            c.problem.dtype_kv = FATTN_E4M3;
            if (!hazard_build(&c)) {
                continue;
            }
            double mean[DIM] = {0};
            for (int64_t at = 0; at < lengths[l] * DIM; at++) {
                const double step = (double)(at * INT64_C(2654435761) % 32768 / 4096) / 8;
                draw_set(&c, DRAW_V, at, 1 + step);
                mean[at % DIM] += draw_get(&c, DRAW_V, at) / (double)lengths[l];
            }
            for (int64_t n = 0; n < DIM; n++) {
                draw_set(&c, DRAW_Q, n, 0);
            }
            for (int n = 0; n < hazard_place_count; n++) {
                if (!hazard_takes(&hazard_places[n], &c)) {
                    continue;
                }
                hazard_clear_outputs(&c);
                hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                             fattn_last_reason());
                double error = 0;
                for (int64_t channel = 0; channel < DIM; channel++) {
                    const double o = draw_get(&c, DRAW_O, channel);
                    error = worst_of(error, fabs(o - mean[channel]) / mean[channel]);
                }
                hazard_check(error <= 2 * units[type] + 0x1p-20, "%s, %s, %lld keys: error %g",
                             hazard_places[n].kernel->name, fattn_dtype_name(dtypes[type]),
                             (long long)lengths[l], error);
            }
            draw_free(&c);
        }
    }
}

/* Products of f32 are exact to f32: with ten bits of mantissa they would be a thousand times less
 * accurate than demanded here. */
static void j3(void)
{
    enum { LENGTH = 48 };
    static const int64_t dims[] = {16, 64, 128, 256};
    EACH (d, dims) {
        draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, LENGTH, LENGTH, dims[d]);
        judge_truth truth = {0};
        judge_verdict v;
        if (!hazard_build(&c)) {
            continue;
        }
        judge_run(hazard_places[0].device, NULL, &c, &truth, &v); /* computes the oracle's result */
        hazard_check(truth.known, "the oracle has no answer: %s", v.reason);
        for (int n = 0; n < hazard_place_count && truth.known; n++) {
            double error = 0, largest = 0;
            if (!hazard_takes(&hazard_places[n], &c)) {
                continue;
            }
            hazard_check(hazard_run(&hazard_places[n], &c, NULL) == FATTN_OK, "%s",
                         fattn_last_reason());
            for (int64_t at = 0; at < LENGTH * dims[d]; at++) {
                error = worst_of(error, fabs(draw_get(&c, DRAW_O, at) - truth.exact.o[at]));
                largest = fmax(largest, fabs(truth.exact.o[at]));
            }
            hazard_check(error <= 0x1p-19 * largest, "%s, D %lld: error %g of %g",
                         hazard_places[n].kernel->name, (long long)dims[d], error, largest);
        }
        judge_truth_free(&truth);
        draw_free(&c);
    }
}

/* A decoding step gives the same row as a prefill, within the rounding of o, whichever kernels the
 * planner takes for the two. */
static void check_steps(fattn_device *device, const char *backend, fattn_dtype dtype, double ulp)
{
    enum { LENGTH = 300, DIM = 64 };
    draw_case c = hazard_case(FATTN_FORWARD, dtype, 1, 1, 1, LENGTH, LENGTH, DIM);
    c.problem.features = FATTN_CAUSAL;
    c.problem.pointer_alignment = 1;
    fattn_plan *plan = NULL;
    if (!hazard_build(&c) || !hazard_check(!fattn_plan_create(device, &c.problem, &plan) &&
                                               !hazard_execute(plan, &c.buffers),
                                           "%s: %s", backend, fattn_last_reason())) {
        draw_free(&c);
        return;
    }
    fattn_plan_destroy(plan);
    for (int64_t row = 0; row < LENGTH; row += row < 20 ? 1 : 13) {
        draw_case step = hazard_case(FATTN_FORWARD, dtype, 1, 1, 1, 1, row + 1, DIM);
        step.problem.features = FATTN_CAUSAL;
        step.problem.pointer_alignment = 1;
        plan = NULL;
        if (hazard_build(&step)) {
            const int64_t size = c.tensors[DRAW_Q].size;
            step.buffers.q = (const char *)c.buffers.q + row * DIM * size;
            step.buffers.k = c.buffers.k, step.buffers.v = c.buffers.v;
            hazard_check(!fattn_plan_create(device, &step.problem, &plan) &&
                             !hazard_execute(plan, &step.buffers),
                         "%s: %s", backend, fattn_last_reason());
            const double lse = draw_get(&c, DRAW_LSE, row), other = draw_get(&step, DRAW_LSE, 0);
            hazard_check(fabs(lse - other) <= 1e-5 * (1 + fabs(lse)),
                         "%s: lse of row %lld is %g, of the step %g", backend, (long long)row, lse,
                         other);
            double difference = 0, largest = 0;
            for (int64_t n = 0; n < DIM; n++) {
                const double o = draw_get(&c, DRAW_O, row * DIM + n);
                difference = worst_of(difference, fabs(o - draw_get(&step, DRAW_O, n)));
                largest = fmax(largest, fabs(o));
            }
            hazard_check(difference <= 2 * ulp * largest, "%s: row %lld differs by %g of %g",
                         backend, (long long)row, difference, largest);
            fattn_plan_destroy(plan);
        }
        draw_free(&step);
    }
    draw_free(&c);
}

static void j4(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        if (n > 0 && hazard_places[n].device == hazard_places[n - 1].device) {
            continue;
        }
        check_steps(hazard_places[n].device, hazard_places[n].backend, FATTN_F32, 0x1p-20);
        check_steps(hazard_places[n].device, hazard_places[n].backend, FATTN_F16, 0x1p-10);
        check_steps(hazard_places[n].device, hazard_places[n].backend, FATTN_BF16, 0x1p-7);
    }
}

/* All codes of e4m3, in a cache that is decoded from queries of size `size`; or, if `nan`, one NaN
 * in the keys of a head and one in the values of the other. */
static void check_codes(fattn_dtype dtype, int64_t rows, int64_t dim, double size, bool nan)
{
    enum { HEADS = 2, KEYS = 300 };
    draw_case c = hazard_case(FATTN_FORWARD, dtype, 1, 4 * HEADS, HEADS, rows, KEYS, dim);
    c.problem.dtype_kv = c.problem.dtype_v = FATTN_E4M3;
    c.problem.features = FATTN_SCALE;
    c.problem.scale = 0x1p-12 / size;
    if (!hazard_build(&c)) {
        return;
    }
    for (int64_t n = 0; n < 4 * HEADS * rows * dim; n++) {
        draw_set(&c, DRAW_Q, n, size * draw_get(&c, DRAW_Q, n));
    }
    for (int64_t n = 0; n < HEADS * KEYS * dim; n++) {
        const uint8_t code = (uint8_t)(n + n / 256 * 7), other = (uint8_t)(n * 37 + n / 256 * 11);
        draw_set(&c, DRAW_K, n, fattn_e4m3_to_f32((code & 0x7f) == 0x7f ? 0 : code));
        draw_set(&c, DRAW_V, n, fattn_e4m3_to_f32((other & 0x7f) == 0x7f ? 0 : other));
    }
    if (nan) {
        draw_set(&c, DRAW_K, draw_at(&c, DRAW_K, 0, 77, 0, dim - 3), NAN);
        draw_set(&c, DRAW_V, draw_at(&c, DRAW_V, 0, 201, 1, 5), NAN);
    }
    hazard_judge(&c, 2, "%lld rows, D %lld, q of %g%s", (long long)rows, (long long)dim, size,
                 nan ? ", a NaN" : "");
}

/* Every second query is 2^60 in its first channel and 0 elsewhere, and keys are 0 in that channel.
 * What brings queries of bf16 into the range of f16 must not take the others' numbers from them. */
static void check_unlike(int64_t dim)
{
    enum { ROWS = 20, KEYS = 300 };
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_BF16, 1, 1, 1, ROWS, KEYS, dim);
    c.problem.dtype_kv = c.problem.dtype_v = FATTN_E4M3;
    if (!hazard_build(&c)) {
        return;
    }
    for (int64_t i = 0; i < ROWS; i += 2) {
        for (int64_t channel = 0; channel < dim; channel++) {
            draw_set(&c, DRAW_Q, draw_at(&c, DRAW_Q, 0, i, 0, channel), channel ? 0 : 0x1p60);
        }
    }
    for (int64_t j = 0; j < KEYS; j++) {
        draw_set(&c, DRAW_K, draw_at(&c, DRAW_K, 0, j, 0, 0), 0);
    }
    hazard_judge(&c, 2, "unlike rows, D %lld", (long long)dim);
}

/* Kernels move the bits of e4m3 to where a wider type has them. Subnormal numbers and NaN need care
 * there; and so do queries of bf16 where products are of f16. */
static void j5(void)
{
    static const int64_t dims[] = {16, 64, 128, 256};
    EACH (d, dims) {
        for (int n = 0; n < 2; n++) {
            check_codes(FATTN_F32, 1, dims[d], 1, n);
            check_codes(FATTN_F16, 1, dims[d], 1, n);
            check_codes(FATTN_BF16, 4, dims[d], 1, n);
            check_codes(n ? FATTN_F16 : FATTN_BF16, 5, dims[d], 1, n); /* more rows than decoding */
        }
        check_codes(FATTN_BF16, 1, dims[d], 0x1p-100, false);
        check_codes(FATTN_BF16, 1, dims[d], 0x1p100, false);
        check_unlike(dims[d]);
    }
}

static const hazard table[] = {
    {"hazard_J1", "probabilities saturated in a format of 8 bits", j1, NULL},
    {"hazard_J2", "an accumulator below f32 collapsed over long contexts", j2, NULL},
    {"hazard_J3", "f32 was computed with ten bits of mantissa", j3, NULL},
    {"hazard_J4", "decoding and prefill disagreed", j4, NULL},
    {"hazard_J5", "some numbers of 8 bits were converted wrongly", j5, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
