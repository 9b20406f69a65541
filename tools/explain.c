/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn explain`: prints the plan of each problem, and why faster kernels declined; or, with
 * --ranks, how the problem is divided over ranks. */
#include <stdio.h>
#include <string.h>

#include "core/backend.h"
#include "core/memory.h"
#include "core/plan.h"
#include "tools/bench/sweep.h"
#include "tools/commands.h"
#include "tools/ranks/ranks.h"
#include "tools/terminal/terminal.h"

/* Prints the flops that a block mask leaves. They are not part of a plan, which does not know the
 * mask. */
static void print_density(const fattn_plan *plan, const sweep_case *c)
{
    fattn_plan_info info;
    fattn_plan_info_init(&info);
    if (c->problem.features & FATTN_BLOCK_MASK && fattn_plan_get_info(plan, &info) == FATTN_OK) {
        printf("  density    %g of the blocks: %.4g flops\n", c->density, info.flops * c->density);
    }
}

static int print_plan(const fattn_plan *plan, const sweep_case *c)
{
    char none[1];
    const size_t size = fattn_plan_describe(plan, none, sizeof none) + 1;
    char *const text = fattn_memory_alloc(size);
    if (!text) {
        return tool_failure(fattn_fail_memory((int64_t)size, "the description of a plan"));
    }
    fattn_plan_describe(plan, text, size);
    fputs(text, stdout);
    if (size > 1 && text[size - 2] != '\n') {
        putchar('\n');
    }
    fattn_memory_free(text);
    print_density(plan, c);
    return TOOL_OK;
}

/* Prints the sizes of the matrices that fattn_inspect() would write; a plan does not have them. */
static int print_matrices(fattn_device *device, const sweep_case *c)
{
    static const char *const names[] = {
        [FATTN_SCORES] = "scores", [FATTN_PROBABILITIES] = "probabilities"};
    const fattn_problem *const p = &c->problem;
    for (int what = FATTN_SCORES; what <= FATTN_PROBABILITIES; what++) {
        if (!c->inspected[what]) {
            continue;
        }
        if (!device->backend->host_memory) { /* fails with the reason */
            fattn_inspect_args args;
            fattn_inspect_args_init(&args);
            args.what = (fattn_inspection)what;
            return tool_failure(device->backend->inspect(device->impl, p, &c->buffers, &args));
        }
        printf("  inspect    %s: %lld x %lld x %lld x %lld in %s, computed in f64 by one thread\n",
               names[what], (long long)p->batch, (long long)p->heads_q, (long long)p->seqlen_q,
               (long long)p->seqlen_k, p->dtype == FATTN_F64 ? "f64" : "f32");
    }
    return TOOL_OK;
}

/* The plan of one kernel; NULL means the planner's choice. */
static int explain_kernel(fattn_device *device, const sweep_case *c, const char *kernel)
{
    fattn_plan *plan = NULL;
    const fattn_status status = fattn_plan_create_with(device, &c->problem, kernel, NULL, &plan);
    const int code = status == FATTN_OK ? print_plan(plan, c) : tool_failure(status);
    fattn_plan_destroy(plan);
    return code;
}

/* Prints the plan of each kernel that takes the problem, separated by empty lines; and on stderr
 * the reasons of the others. */
static int explain_all(fattn_device *device, const sweep_case *c)
{
    const fattn_kernel *row;
    const char *missing;
    int plans = 0;
    for (int i = 0; (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        fattn_plan *plan = NULL;
        const fattn_status status =
            fattn_plan_create_with(device, &c->problem, row->name, NULL, &plan);
        if (status == FATTN_UNSUPPORTED) {
            fprintf(stderr, "fattn explain: %s\n", fattn_last_reason());
            continue;
        }
        if (status == FATTN_OK && plans++ > 0) {
            putchar('\n');
        }
        const int code = status == FATTN_OK ? print_plan(plan, c) : tool_failure(status);
        fattn_plan_destroy(plan);
        if (code != TOOL_OK) {
            return code;
        }
    }
    return plans > 0 ? TOOL_OK : TOOL_LIBRARY;
}

static int explain(const sweep_case *c)
{
    fattn_device *device = NULL;
    const fattn_status status = sweep_open(c, &device);
    int code = status != FATTN_OK     ? tool_failure(status)
               : sweep_all_kernels(c) ? explain_all(device, c)
                                      : explain_kernel(device, c, c->kernel);
    code = code == TOOL_OK ? print_matrices(device, c) : code;
    fattn_device_close(device);
    return code;
}

int fattn_tool_explain(int argc, char **argv)
{
    sweep s;
    memset(&s, 0, sizeof s);
    sweep_options(&s, SWEEP_EXPLAINS);
    ranks_options ranks;
    memset(&ranks, 0, sizeof ranks);
    _Static_assert((int)RANKS_OPTIONS <= (int)SWEEP_MORE, "room after the sweep's options");
    ranks_rows(&ranks, s.rows + SWEEP_OPTIONS);
    const option_set set = {
        "explain", "The plan that a problem gets: kernel, tiles, splits, workspace, traffic.",
        s.rows, "Lists of values are separated by commas; every combination is explained."};
    const int parsed = options_parse(&set, argc, argv);
    if (parsed != 0) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    if (!sweep_check(&s, "explain") || !ranks_check(&ranks, "explain")) {
        return TOOL_USAGE;
    }
    if (ranks.ranks &&
        (s.device.count || s.kernel.count || s.threads.count || sweep_inspects(&s))) {
        return tool_usage("explain",
                          "--ranks cannot be combined with --device, --kernel, --threads, --scores "
                          "or --probabilities: --rate says how fast a rank is");
    }
    int code = TOOL_OK;
    const int64_t count = sweep_count(&s);
    for (int64_t n = 0; code == TOOL_OK && n < count; n++) {
        sweep_case c;
        sweep_at(&s, n, &c);
        if (n > 0) {
            putchar('\n');
        }
        code = ranks.ranks ? ranks_explain(&ranks, &c) : explain(&c);
    }
    return code;
}
