/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding few keys (brief.h), which random problems seldom are: most have features that it leaves
 * to decode.h. Small problems of all layouts, types, groups and lengths are judged as in
 * check_kernels: once with lengths from the problem, so that a run has no work items, and once with
 * lengths given at run time. Runs on all instruction sets; FATTN_CPU_ISA selects one.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu.h"
#include "core/plan.h"
#include "tests/random.h"
#include "tests/row.h"
#include "tests/tap.h"
#include "tools/judge/judge.h"

enum { CASES = 240 };

static int64_t some(uint64_t *state, int64_t low, int64_t high)
{
    return low + (int64_t)(random_next(state) >> 33) % (high - low + 1);
}

static void draw(draw_case *c, int n)
{
    static const int64_t dims[] = {8, 20, 33, 39, 64, 72, 83};
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_E4M3};
    static const uint64_t features[] = {0, 0, FATTN_CAUSAL, FATTN_WINDOW, FATTN_SEQUSED_K};
    static const uint64_t terms[] = {
        0, 0, FATTN_SINK, FATTN_SOFTCAP, FATTN_ALIBI, FATTN_SINK | FATTN_SOFTCAP | FATTN_ALIBI};
    uint64_t state = (uint64_t)n + 1;
    draw_blank(c, (uint64_t)n);
    fattn_problem *const p = &c->problem;
    (void)some(&state, 0, 1);
    p->batch = some(&state, 1, 3);
    p->heads_k = some(&state, 1, 3);
    p->heads_q = p->heads_k * some(&state, 1, n % 3 ? 8 : 16);
    p->features = features[some(&state, 0, 4)];
    p->seqlen_q = p->features & (FATTN_CAUSAL | FATTN_WINDOW) ? 1 : some(&state, 1, 2);
    p->seqlen_k = some(&state, 1, n % 4 ? 40 : n % 8 ? 256 : 700);
    p->window_left = p->features & FATTN_WINDOW ? some(&state, 0, 30) : -1;
    p->dim = dims[some(&state, 0, 6)];
    p->dim_v = dims[some(&state, 0, 6)];
    p->dtype = dtypes[some(&state, 0, 2)];
    p->dtype_kv = n % 5 > 1 ? p->dtype : n % 5 ? FATTN_E4M3 : dtypes[some(&state, 0, 3)];
    p->dtype_v = n % 6 ? p->dtype_kv : dtypes[some(&state, 0, 3)];
    p->layout = n % 2 ? FATTN_BSHD : FATTN_BHSD;
    p->features |= terms[some(&state, 0, 5)];
    p->softcap = p->features & FATTN_SOFTCAP ? (double)some(&state, 1, 30) : 0;
    p->alibi_batch_stride = p->features & FATTN_ALIBI && n % 2 ? p->heads_q : 0;
    p->outputs = n % 3 ? FATTN_OUT_O | FATTN_OUT_LSE : FATTN_OUT_O;
    c->family = n % 7 == 6 ? DRAW_WILD : DRAW_GAUSSIAN;
}

/* Whether runs of a plan by this row have no items. */
static bool without_items(fattn_device *device, const fattn_kernel *row, const fattn_problem *p)
{
    const fattn_cpu_kernel *const kernel = (const fattn_cpu_kernel *)row;
    fattn_cpu_brief brief;
    fattn_plan *plan = NULL;
    if (fattn_plan_create_with(device, p, row->name, NULL, &plan)) {
        return false;
    }
    const bool found = kernel->brief_plan(&plan->problem, &plan->tiling, &brief);
    fattn_plan_destroy(plan);
    return found;
}

static void check_row(fattn_device *device, const fattn_kernel *row)
{
    int failed = 0, judged = 0, brief = 0;
    for (int n = 0; n < CASES; n++) {
        draw_case c;
        judge_truth truth = {0};
        judge_verdict v;
        draw(&c, n);
        if (draw_sequences(&c) || draw_build(&c)) {
            printf("Bail out! no case %d\n", n);
            exit(1);
        }
        judge_run(device, row, &c, &truth, &v);
        if (v.outcome == JUDGE_FAILED && failed++ == 0) {
            char text[512];
            draw_describe(&c, text, sizeof text);
            printf("# case %d, %s: %s\n", n, text, v.reason);
        }
        judged += v.outcome != JUDGE_DECLINED;
        brief += without_items(device, row, &c.problem);
        judge_truth_free(&truth);
        draw_free(&c);
    }
    const int least = row->caches_alone ? CASES / 8 : CASES / 2;
    tap_check(failed == 0 && judged > least, "%s: %d of %d cases fail", row->name, failed, judged);
    tap_check(brief > 0 && brief < judged, "%s: %d of them run without items", row->name, brief);
}

int main(void)
{
    fattn_device *device = NULL;
    const fattn_kernel *row;
    setenv("FATTN_NUM_THREADS", "1", 1);
    if (fattn_device_open("cpu", &device)) {
        tap_bail(fattn_last_reason());
    }
    for (int at = 0; (row = row_next(device, &at));) {
        if (((const fattn_cpu_kernel *)row)->brief_plan) {
            check_row(device, row);
        }
    }
    fattn_device_close(device);
    return tap_done();
}
