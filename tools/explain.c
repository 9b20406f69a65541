/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn explain`: prints the plan of each problem, and why faster kernels declined; or how it is
 * divided over ranks. */
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "core/plan.h"
#include "tools/bench/sweep.h"
#include "tools/commands.h"
#include "tools/ranks/ranks.h"
#include "tools/terminal/terminal.h"

static int print_plan(const fattn_plan *plan)
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
    return TOOL_OK;
}

static int explain(const sweep_case *c)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_status status = fattn_device_open(c->device, &device);
    if (status == FATTN_OK) {
        status = fattn_plan_create_with(device, &c->problem, c->kernel, NULL, &plan);
    }
    const int code = status == FATTN_OK ? print_plan(plan) : tool_failure(status);
    fattn_plan_destroy(plan);
    fattn_device_close(device);
    return code;
}

int fattn_tool_explain(int argc, char **argv)
{
    sweep s;
    memset(&s, 0, sizeof s);
    sweep_options(&s);
    ranks_options ranks;
    memset(&ranks, 0, sizeof ranks);
    option table[SWEEP_OPTIONS + RANKS_OPTIONS];
    s.rows[SWEEP_OPTIONS - 1] = (option){.name = NULL}; /* --threads: plans do not depend on them */
    memcpy(table, s.rows, (SWEEP_OPTIONS - 1) * sizeof *table);
    ranks_rows(&ranks, table + SWEEP_OPTIONS - 1);
    table[SWEEP_OPTIONS - 1 + RANKS_OPTIONS] = (option){.name = NULL};
    const option_set set = {
        "explain", "The plan that a problem gets: kernel, tiles, splits, workspace, traffic.",
        table, "Lists of values are separated by commas; every combination is explained."};
    const int parsed = options_parse(&set, argc, argv);
    if (parsed != 0) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    if (!sweep_check(&s, "explain") || !ranks_check(&ranks, "explain")) {
        return TOOL_USAGE;
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
