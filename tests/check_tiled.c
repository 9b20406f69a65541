/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The published algorithms compute attention. All schedules are in double, like the oracle, so they
 * must agree with it up to rounding for any tile: for every feature, every pair of features and
 * random sets. Their counts must equal those without arithmetic and those of the model. The rows of
 * backend reference are judged like any kernel, on random cases.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "backends/reference/tiled.h"
#include "core/backend.h"
#include "tests/scenario.h"
#include "tests/tap.h"
#include "tools/judge/judge.h"

/* -------------------------------------------------------------------------------------------------
 * Against the oracle, in f64
 * ---------------------------------------------------------------------------------------------- */

/* Tiles: one for all, one row, one key, and sizes that do not divide the lengths. */
static const fattn_tile tiles[] = {{1, 1}, {100, 100}, {1, 4}, {4, 1}, {5, 3}, {2, 5}};
enum { TILES = sizeof tiles / sizeof tiles[0] };

/* Rounding of double, amplified by a few exponentials; far below what any f32 would reach. */
static const double tolerance = 1e-12;

static const char *outputs_differ(const scenario *got, const scenario *want)
{
    static const struct {
        tensor_id id;
        const char *name;
    } outputs[] = {{O, "o"},   {LSE, "lse"},     {DQ, "dq"},      {DK, "dk"},
                   {DV, "dv"}, {DBIAS, "dbias"}, {DSINK, "dsink"}};
    for (size_t n = 0; n < sizeof outputs / sizeof outputs[0]; n++) {
        const tensor *const a = &got->tensors[outputs[n].id], *const b =
                                                                  &want->tensors[outputs[n].id];
        for (int64_t e = 0; e < a->count; e++) {
            const double x = tensor_get(a, e), y = tensor_get(b, e);
            if (x != y && !(fabs(x - y) <= tolerance * (1 + fabs(y)))) return outputs[n].name;
        }
    }
    return NULL;
}

/* Runs with a workspace that begins as NaN and is followed by guard bytes. Returns NULL, or what is
 * wrong. */
static const char *run(const fattn_problem *p, const fattn_buffers *buffers,
                       fattn_io_schedule schedule, fattn_tile tile, fattn_io_counts *counts)
{
    enum { GUARD = 256 };
    const int64_t bytes = fattn_tiled_workspace(p, schedule, tile);
    if (bytes < 0 || bytes % 256 != 0) return "size of workspace";
    unsigned char *const memory = malloc((size_t)bytes + GUARD);
    if (memory == NULL) return "memory";
    memset(memory, 0xff, (size_t)bytes + GUARD); /* NaN in f64 */
    const fattn_tiled_options options = {.schedule = schedule, .tile = tile};
    *counts = (fattn_io_counts){0};
    fattn_tiled_run(p, buffers, &options, memory, counts);
    bool intact = true;
    for (int n = 0; n < GUARD; n++) intact = intact && memory[bytes + n] == 0xff;
    free(memory);
    return intact ? NULL : "guard of the workspace";
}

static const char *counts_differ(const fattn_problem *p, const fattn_buffers *buffers,
                                 fattn_io_schedule schedule, fattn_tile tile,
                                 const fattn_io_counts *counts)
{
    const fattn_tiled_options options = {.schedule = schedule, .tile = tile, .count_only = true};
    fattn_io_counts alone = {0}, predicted;
    fattn_tiled_run(p, buffers, &options, NULL, &alone);
    fattn_io_predict(p, buffers, schedule, tile, &predicted);
    if (memcmp(&alone, counts, sizeof alone) != 0) return "count without arithmetic";
    if (memcmp(&predicted, counts, sizeof predicted) != 0) return "prediction";
    return NULL;
}

/* Scenarios hold pointers into themselves, so each is rebuilt instead of copied. */
static bool remake(scenario *s, uint32_t traits, unsigned flat, int64_t sq, int64_t sk)
{
    return scenario_create(s, traits, flat, FATTN_F64, sq, sk, traits * 13 + flat);
}

static const char *schedule_differs(uint32_t traits, unsigned flat, int64_t sq, int64_t sk,
                                    fattn_io_schedule schedule, fattn_tile tile,
                                    const scenario *want)
{
    static scenario got;
    fattn_io_counts counts;
    if (!remake(&got, traits, flat, sq, sk)) return "scenario";
    const char *wrong = run(&got.forward, &got.buffers, schedule, tile, &counts);
    if (wrong == NULL) wrong = counts_differ(&got.forward, &got.buffers, schedule, tile, &counts);
    if (wrong == NULL) wrong = run(&got.backward, &got.buffers, schedule, tile, &counts);
    if (wrong == NULL) wrong = counts_differ(&got.backward, &got.buffers, schedule, tile, &counts);
    return wrong != NULL ? wrong : outputs_differ(&got, want);
}

static void check(uint32_t traits, unsigned flat, int64_t sq, int64_t sk, int which)
{
    static scenario want;
    char name[256], wrong[256] = "";
    scenario_name(traits, flat, name, sizeof name);
    bool good = remake(&want, traits, flat, sq, sk) &&
                fattn_naive_execute(&want.forward, &want.buffers) == FATTN_OK &&
                fattn_naive_execute(&want.backward, &want.buffers) == FATTN_OK;
    for (int s = 0; s < FATTN_IO_SCHEDULES && good; s++) {
        for (int n = 0; n < 2 && good; n++) {
            const fattn_tile tile = tiles[(which + s + 3 * n) % TILES];
            const char *const what =
                schedule_differs(traits, flat, sq, sk, (fattn_io_schedule)s, tile, &want);
            good = what == NULL;
            if (!good) {
                snprintf(wrong, sizeof wrong, ": wrong %s in %s, tile %d x %d", what,
                         fattn_io_schedule_name((fattn_io_schedule)s), (int)tile.br, (int)tile.bc);
            }
        }
    }
    tap_check(good, "%d x %d: %s%s", (int)sq, (int)sk, traits ? name : "plain", wrong);
}

static void check_traits(void)
{
    int which = 0;
    check(0, 0, 7, 9, which);
    for (int a = 0; a < TRAITS; a++) {
        for (int b = 0; b <= a; b++) {
            const uint32_t traits = 1u << a | 1u << b;
            const unsigned patterns = traits & 1u << BIAS ? 16 : 1;
            for (unsigned flat = 0; flat < patterns; flat++) {
                const bool wide = (a + b + (int)flat) % 2;
                check(traits, flat, wide ? 4 : 7, wide ? 9 : 5, which++);
            }
        }
    }
    uint64_t state = 77;
    for (int n = 0; n < 200; n++) {
        uint32_t traits = 0;
        for (int t = 0; t < TRAITS; t++) traits |= (uint32_t)(scenario_random(&state) > 0) << t;
        check(traits, (unsigned)n % 16, n % 2 ? 12 : 8, n % 3 ? 10 : 6, n);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Subsets of the outputs
 * ---------------------------------------------------------------------------------------------- */

/* Every subset of the gradients equals the full set and leaves the others alone. */
static void check_subsets(fattn_io_schedule schedule)
{
    static const tensor_id ids[] = {DQ, DK, DV, DBIAS, DSINK};
    static scenario want, got;
    const uint32_t traits = 1u << BIAS | 1u << SINK | 1u << GQA | 1u << SOFTCAP | 1u << DROPOUT;
    const char *wrong = NULL;
    if (!remake(&want, traits, 4, 7, 9) ||
        fattn_naive_execute(&want.forward, &want.buffers) != FATTN_OK ||
        fattn_naive_execute(&want.backward, &want.buffers) != FATTN_OK) {
        wrong = "oracle";
    }
    for (uint32_t subset = 1; subset < 32 && wrong == NULL; subset++) {
        fattn_io_counts counts;
        if (!remake(&got, traits, 4, 7, 9)) wrong = "scenario";
        got.backward.outputs = subset * FATTN_OUT_DQ;
        if (wrong == NULL) wrong = run(&got.forward, &got.buffers, schedule, tiles[4], &counts);
        if (wrong == NULL) wrong = run(&got.backward, &got.buffers, schedule, tiles[4], &counts);
        if (wrong == NULL) {
            wrong = counts_differ(&got.backward, &got.buffers, schedule, tiles[4], &counts);
        }
        for (int n = 0; n < 5 && wrong == NULL; n++) {
            const tensor *const a = &got.tensors[ids[n]], *const b = &want.tensors[ids[n]];
            for (int64_t e = 0; e < a->count; e++) {
                const double x = tensor_get(a, e), y = subset >> n & 1 ? tensor_get(b, e) : 0;
                if (!(fabs(x - y) <= tolerance * (1 + fabs(y)))) wrong = "gradient";
            }
        }
    }
    tap_check(wrong == NULL, "%s makes any subset of gradients%s%s",
              fattn_io_schedule_name(schedule), wrong ? ": wrong " : "", wrong ? wrong : "");
}

/* -------------------------------------------------------------------------------------------------
 * Values at the edge of what a score can be
 * ---------------------------------------------------------------------------------------------- */

static bool same_class(double x, double y)
{
    if (isnan(y)) return isnan(x);
    if (isinf(y)) return x == y;
    return fabs(x - y) <= 1e-5 * (1 + fabs(y));
}

/* Every bias -FLT_MAX, or -inf, and each kind of sink: o and lse as the oracle has them. (No key
 * and a sink of +inf: o is an empty sum by the formula, which the algorithms divide by a NaN.) */
static void check_extremes(fattn_io_schedule schedule)
{
    static const double biases[] = {-3.4028234663852886e38, -(double)INFINITY, 0};
    static const double sinks[] = {-(double)INFINITY, (double)INFINITY, 1, -1e30};
    static scenario want, got;
    const uint32_t traits = 1u << BIAS | 1u << SINK;
    const char *wrong = NULL;
    for (int n = 0; n < 12 && wrong == NULL; n++) {
        scenario *const both[] = {&want, &got};
        for (int w = 0; w < 2; w++) {
            if (!scenario_create(both[w], traits, 0, FATTN_F32, 7, 5, 3)) wrong = "scenario";
            for (int64_t e = 0; e < both[w]->tensors[BIAS_IN].count; e++) {
                tensor_set(&both[w]->tensors[BIAS_IN], e, biases[n % 3]);
            }
            for (int64_t e = 0; e < both[w]->tensors[SINK_IN].count; e++) {
                tensor_set(&both[w]->tensors[SINK_IN], e, sinks[n / 3]);
            }
        }
        fattn_io_counts counts;
        if (fattn_naive_execute(&want.forward, &want.buffers) != FATTN_OK) wrong = "oracle";
        if (wrong == NULL) wrong = run(&got.forward, &got.buffers, schedule, tiles[4], &counts);
        const bool undefined = isinf(biases[n % 3]) && sinks[n / 3] == (double)INFINITY;
        for (int t = undefined ? LSE : O; t <= LSE && wrong == NULL; t++) {
            for (int64_t e = 0; e < want.tensors[t].count; e++) {
                const double x = tensor_get(&got.tensors[t], e),
                             y = tensor_get(&want.tensors[t], e);
                if (!same_class(x, y)) wrong = t == O ? "o" : "lse";
            }
        }
    }
    tap_check(wrong == NULL, "%s at the ends of the range%s%s", fattn_io_schedule_name(schedule),
              wrong ? ": wrong " : "", wrong ? wrong : "");
}

/* A NaN value behind a bias of -inf, which is equivalent to a mask: the pair is left out of the
 * sums, so the NaN reaches no row. (Standard attention multiplies whole rows of P.) */
static void check_nan_values(fattn_io_schedule schedule)
{
    static scenario want, got;
    const char *wrong = NULL;
    for (int hidden = 3; hidden <= 5 && wrong == NULL; hidden++) { /* of 5 keys, in tiles of 3 */
        scenario *const both[] = {&want, &got};
        for (int w = 0; w < 2; w++) {
            if (!scenario_create(both[w], 1u << BIAS, 7, FATTN_F32, 7, 5, 3)) wrong = "scenario";
            for (int j = 0; j < hidden; j++) {
                tensor_set(&both[w]->tensors[BIAS_IN], j, -(double)INFINITY);
            }
            tensor_set(&both[w]->tensors[V], 0, (double)NAN);
        }
        fattn_io_counts counts;
        if (fattn_naive_execute(&want.forward, &want.buffers) != FATTN_OK) wrong = "oracle";
        if (wrong == NULL) wrong = run(&got.forward, &got.buffers, schedule, tiles[4], &counts);
        for (int64_t e = 0; e < want.tensors[O].count && wrong == NULL; e++) {
            const double x = tensor_get(&got.tensors[O], e), y = tensor_get(&want.tensors[O], e);
            if (!same_class(x, y)) wrong = "o";
        }
        if (isnan(tensor_get(&want.tensors[O], 0))) wrong = "expectation";
    }
    tap_check(wrong == NULL, "%s with NaN among the values%s%s", fattn_io_schedule_name(schedule),
              wrong ? ": wrong " : "", wrong ? wrong : "");
}

/* -------------------------------------------------------------------------------------------------
 * As kernels
 * ---------------------------------------------------------------------------------------------- */

static void check_rows(uint64_t seed, int64_t cases)
{
    fattn_device *device = NULL;
    const char *missing;
    if (fattn_device_open("reference", &device) != FATTN_OK) {
        tap_check(false, "%s", fattn_last_reason());
        return;
    }
    for (int row = 1;; row++) {
        const fattn_kernel *const kernel = device->backend->kernel(device->impl, row, &missing);
        if (kernel == NULL) break;
        int64_t passed = 0, declined = 0;
        char wrong[600] = "";
        for (int64_t n = 0; n < cases && wrong[0] == '\0'; n++) {
            draw_case c;
            judge_truth truth = {0};
            judge_verdict verdict = {.outcome = JUDGE_FAILED, .reason = "no memory"};
            if (draw_problem(&c, seed, n) == 0 && draw_build(&c) == 0 &&
                draw_save(&c) == FATTN_OK) {
                judge_run(device, kernel, &c, &truth, &verdict);
            }
            passed += verdict.outcome == JUDGE_PASSED;
            declined += verdict.outcome == JUDGE_DECLINED;
            if (verdict.outcome == JUDGE_FAILED) {
                snprintf(wrong, sizeof wrong, ": case %d: %s", (int)n, verdict.reason);
            }
            judge_truth_free(&truth);
            draw_free(&c);
        }
        tap_check(wrong[0] == '\0' && passed > cases / 2, "%s: %d passed, %d declined%s",
                  kernel->name, (int)passed, (int)declined, wrong);
    }
    fattn_device_close(device);
}

/* Impossible sizes have no workspace. */
static void check_overflow(void)
{
    static scenario s;
    bool good = remake(&s, 0, 0, 7, 9);
    s.backward.seqlen_q = s.backward.seqlen_k = INT64_C(1) << 40;
    good = good && fattn_tiled_workspace(&s.backward, FATTN_IO_STANDARD, tiles[0]) == -1;
    s.backward.heads_q = INT64_C(1) << 31;
    s.backward.heads_k = 1;
    good = good && fattn_tiled_workspace(&s.backward, FATTN_IO_FLASH1, tiles[0]) == -1;
    tap_check(good, "a workspace past 2^63 bytes is refused");
}

int main(int argc, char **argv)
{
    const int64_t cases = argc > 1 ? strtoll(argv[1], NULL, 10) : 150;
    check_traits();
    for (int s = 0; s < FATTN_IO_SCHEDULES; s++) {
        check_subsets((fattn_io_schedule)s);
        check_extremes((fattn_io_schedule)s);
    }
    check_nan_values(FATTN_IO_FLASH1);
    check_nan_values(FATTN_IO_FLASH2);
    check_overflow();
    check_rows(20260102, cases);
    return tap_done();
}
