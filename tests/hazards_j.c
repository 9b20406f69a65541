/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group J: low precision. */
#include <math.h>

#include "tests/hazard.h"
#include "tests/worst.h"

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

static const hazard table[] = {
    {"hazard_J1", "probabilities saturated in a format of 8 bits", NULL,
     "no backend takes FATTN_E4M3; every type has an accuracy bound of its own"},
    {"hazard_J2", "an accumulator below f32 collapsed over long contexts", NULL,
     "no backend takes FATTN_E4M3; sums are in f32 in every kernel"},
    {"hazard_J3", "f32 was computed with ten bits of mantissa", j3, NULL},
    {"hazard_J4", "decoding and prefill disagreed", j4, NULL},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
