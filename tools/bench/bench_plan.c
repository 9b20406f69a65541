/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn bench --dir plan`: the fixed costs of the library; see bench.h. */
#include <math.h>

#include "core/host.h"
#include "core/plan.h"
#include "tools/bench/bench.h"
#include "tools/bench/workload.h"

static const double plan_budget_ms = 0.020;     /* to create a plan */
static const double one_shot_budget_ms = 0.001; /* added by a cached one-shot call */

enum { CALLS = 64 }; /* one-shot calls per repetition */

static fattn_status time_planning(fattn_device *device, const sweep_case *c, int reps, double *ms)
{
    double times[BENCH_REPS_MAX];
    for (int i = 0; i < reps; i++) {
        fattn_plan *plan;
        const double start = fattn_host_seconds();
        const fattn_status status =
            fattn_plan_create_with(device, &c->problem, c->kernel, NULL, &plan);
        times[i] = 1e3 * (fattn_host_seconds() - start);
        if (status != FATTN_OK) {
            return status;
        }
        fattn_plan_destroy(plan);
    }
    *ms = bench_median(times, reps);
    return FATTN_OK;
}

/* Alternates both ways to run a problem, so that disturbances affect them equally. */
static fattn_status compare_calls(fattn_device *device, const fattn_problem *p,
                                  const fattn_plan *plan, const fattn_buffers *buffers,
                                  void *workspace, int reps, double *added_ms)
{
    double added[BENCH_REPS_MAX];
    fattn_status status = fattn_attention(device, p, buffers, NULL);
    for (int i = 0; status == FATTN_OK && i < reps; i++) {
        const double start = fattn_host_seconds();
        for (int n = 0; status == FATTN_OK && n < CALLS; n++) {
            status = fattn_execute(plan, buffers, workspace, NULL);
        }
        const double middle = fattn_host_seconds();
        for (int n = 0; status == FATTN_OK && n < CALLS; n++) {
            status = fattn_attention(device, p, buffers, NULL);
        }
        added[i] = 1e3 * ((fattn_host_seconds() - middle) - (middle - start)) / CALLS;
    }
    *added_ms = bench_median(added, reps);
    return status;
}

/* Shrinks the case to one query and one key, so that the call itself dominates the time. */
static fattn_status time_one_shot(fattn_device *device, const sweep_case *c, int reps,
                                  double *added_ms)
{
    sweep_case small = *c;
    fattn_problem *const p = &small.problem;
    p->batch = p->heads_q = p->heads_k = p->seqlen_q = p->seqlen_k = 1;
    p->dim = p->dim_v = 8;

    fattn_plan *plan = NULL;
    workload w = {0};
    void *workspace = NULL;
    fattn_plan_info info = {.struct_size = sizeof info};
    fattn_status status = fattn_plan_create(device, p, &plan);
    if (status == FATTN_OK) {
        status = fattn_plan_get_info(plan, &info);
    }
    if (status == FATTN_OK) {
        status = fattn_device_malloc(device, (size_t)info.workspace_bytes, &workspace);
    }
    if (status == FATTN_OK) {
        status = workload_create(device, &small, &w);
    }
    if (status == FATTN_OK) {
        status = compare_calls(device, p, plan, &w.buffers, workspace, reps, added_ms);
    }
    workload_free(&w);
    fattn_device_free(device, workspace);
    fattn_plan_destroy(plan);
    fattn_cache_clear();
    return status;
}

fattn_status bench_plan(bench *b, fattn_device *device, const char *device_word,
                        const sweep_case *c)
{
    const int reps = b->reps ? (int)b->reps : BENCH_REPS_MAX;
    double plan_ms, added_ms;
    fattn_status status = time_planning(device, c, reps, &plan_ms);
    if (status == FATTN_OK) {
        status = time_one_shot(device, c, reps, &added_ms);
    }
    if (status != FATTN_OK) {
        return status;
    }
    bench_row row = {.device = device_word, .kernel = c->kernel ? c->kernel : "best", .of = c};
    row.gflops = row.gbytes_s = row.fed = row.cpu = NAN;
    row.exempt = true;
    row.dir = "plan";
    row.median_ms = plan_ms;
    row.ceiling = plan_budget_ms;
    row.ratio = plan_ms / plan_budget_ms;
    bench_report(b, &row);
    row.dir = "one-shot";
    row.median_ms = added_ms;
    row.ceiling = one_shot_budget_ms;
    row.ratio = added_ms / one_shot_budget_ms;
    bench_report(b, &row);
    return FATTN_OK;
}
