/* SPDX-License-Identifier: Apache-2.0 */
/* Making plans: validate the problem, choose the first kernel row that takes it, divide it into
 * tiles, load the kernel. */
#include "core/plan.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/abi.h"
#include "core/dtype.h"
#include "core/env.h"
#include "core/feature.h"
#include "core/integer.h"
#include "core/io_model.h"
#include "core/log.h"
#include "core/memory.h"
#include "core/problem.h"
#include "core/status.h"

/* Lines "row: why it declined", truncated if there are too many. */
typedef struct declined {
    char text[4096];
    size_t used;
} declined;

static void note(declined *notes, const char *kernel, const char *why)
{
    if (notes->used < sizeof notes->text) {
        notes->used += (size_t)snprintf(notes->text + notes->used, sizeof notes->text - notes->used,
                                        "%s: %s\n", kernel, why);
    }
    if (fattn_log_wants(2)) {
        fattn_log("%s declines: it %s", kernel, why);
    }
}

/* Why this row is not chosen; NULL if it is. */
static const char *declines(const fattn_kernel *row, const fattn_problem *problem,
                            const char *missing, bool named, int64_t splits,
                            const fattn_limits *limits, char *text, size_t size)
{
    if (missing) {
        snprintf(text, size, "needs %s", missing);
        return text;
    }
    if (row->by_name && !named) {
        return "runs only when FATTN_KERNEL names it";
    }
    const char *const why = fattn_kernel_declines(row, problem, text, size);
    if (!why && !fattn_kernel_fits(row, problem, limits->fast_memory)) {
        snprintf(text, size, "has no tile for %lld bytes of fast memory",
                 (long long)limits->fast_memory);
        return text;
    }
    if (!why && row->pays && !named && !row->pays(row, problem, limits)) {
        snprintf(text, size, "does not pay for %lld x %lld heads of %lld rows and %lld keys",
                 (long long)problem->batch, (long long)fattn_kernel_heads(row, problem),
                 (long long)fattn_kernel_rows(row, problem), (long long)problem->seqlen_k);
        return text;
    }
    if (why || splits <= 1 || problem->op != FATTN_FORWARD) {
        return why;
    }
    if (row->split && !(problem->features & FATTN_BATCH_INVARIANT)) {
        return NULL;
    }
    snprintf(text, size, "cannot cut the keys into %lld parts, as FATTN_SPLITS demands%s",
             (long long)splits, row->split ? ": with FATTN_BATCH_INVARIANT they stay in one" : "");
    return text;
}

/* The row that a plan for the problem would choose, or NULL. */
static const fattn_kernel *first_row(const fattn_device *device, const fattn_problem *problem,
                                     const fattn_limits *limits)
{
    const fattn_kernel *row = NULL;
    const char *missing = NULL;
    for (int i = 0; (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        char text[256];
        if (!declines(row, problem, missing, false, 0, limits, text, sizeof text)) {
            return row;
        }
    }
    return NULL;
}

/* For a problem that the named row, or every row, declines: writes "; row R takes it" with another
 * row of the device, or else the oracle's. Writes nothing if no row takes it. */
static void name_taker(const fattn_plan *plan, bool named, const fattn_limits *limits, char *text,
                       size_t size)
{
    const fattn_backend *const oracle = fattn_backend_oracle();
    const fattn_kernel *row = named ? first_row(plan->device, &plan->problem, limits) : NULL;
    if (row) {
        snprintf(text, size, "; row %s takes it", row->name);
    } else if (oracle != plan->device->backend) {
        const char *missing = NULL;
        char why[256];
        row = oracle->kernel(NULL, 0, &missing);
        if (!fattn_kernel_declines(row, &plan->problem, why, sizeof why)) {
            snprintf(text, size, "; row %s of backend %s takes it, slowly", row->name,
                     oracle->name);
        }
    }
}

/* Finds the row for plan->problem. If all rows decline, the reason is that of the last row that
 * computes the op, is not by_name and can run here: it takes everything that the backend can do, so
 * its reason tells the caller most. */
static fattn_status choose_kernel(fattn_plan *plan, const char *wanted, int64_t splits,
                                  const fattn_limits *limits, declined *notes)
{
    const fattn_backend *const backend = plan->device->backend;
    const fattn_kernel *row = NULL;
    const char *missing = NULL;
    char reason[320] = "";
    /* How near a row came to being chosen: the failure gives the reason of the nearest. */
    enum nearness { NO_ROW, NOT_MEANT, CANNOT_RUN, DECLINES } nearest = NO_ROW;
    for (int i = 0; (row = backend->kernel(plan->device->impl, i, &missing)); i++) {
        if (wanted && strcmp(wanted, row->name) != 0) {
            continue;
        }
        char text[256];
        const char *const why = declines(row, &plan->problem, missing, wanted != NULL, splits,
                                         limits, text, sizeof text);
        if (!why) {
            plan->kernel = row;
            return FATTN_OK;
        }
        note(notes, row->name, why);
        const bool meant = wanted || (!row->by_name && row->ops & FATTN_OP_BIT(plan->problem.op));
        const enum nearness now = !meant ? NOT_MEANT : missing ? CANNOT_RUN : DECLINES;
        if (now >= nearest) {
            nearest = now;
            snprintf(reason, sizeof reason, "%s %s", row->name, why);
        }
    }
    if (nearest == NO_ROW) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "backend %s has no kernel \"%.64s\"; fattn info lists them",
                          backend->name, wanted ? wanted : "");
    }
    char taker[128] = "";
    if (splits <= 1) { /* else the splits may be what is declined, not the problem */
        name_taker(plan, wanted != NULL, limits, taker, sizeof taker);
    }
    return fattn_fail(FATTN_UNSUPPORTED, "backend %s has no kernel for the problem: %s%s",
                      backend->name, reason, taker);
}

/* A batch may mix prompts and single tokens. If sequences may differ in their number of queries,
 * those with few queries get the row that a plan for them alone would choose, provided that it is a
 * row for few rows (rows_max). Their number of keys is not known yet, so the row must pay even for
 * FEW_KEYS keys. */
static fattn_status leave_few(fattn_plan *plan, const fattn_limits *limits)
{
    enum { FEW_KEYS = 64 };
    const fattn_problem *const p = &plan->problem;
    const int64_t group = fattn_problem_group(p);
    const bool differ = p->features & (FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_Q);
    if (!differ || p->heads_q == 0 || p->batch == 0) {
        return FATTN_OK;
    }
    fattn_problem few = *p;
    few.seqlen_q = fattn_min64(p->seqlen_q, plan->kernel->leaves_few / group);
    few.seqlen_k = fattn_min64(p->seqlen_k, FEW_KEYS);
    for (; few.seqlen_q > 0; few.seqlen_q--) {
        const fattn_kernel *const row = first_row(plan->device, &few, limits);
        if (row && row->rows_max) {
            const fattn_wish wish = {.workers = plan->tiling.workers};
            few.seqlen_k = p->seqlen_k;
            plan->few = row;
            plan->few_rows = group * few.seqlen_q;
            return fattn_tiling_choose(&few, limits, row, &wish, &plan->few_tiling);
        }
    }
    return FATTN_OK;
}

static fattn_limits device_limits(const fattn_device *device, const fattn_env *env)
{
    fattn_limits limits;
    memset(&limits, 0, sizeof limits);
    device->backend->limits(device->impl, &limits);
    if (env->sram) {
        limits.fast_memory = env->sram;
    }
    return limits;
}

/* Without queries there is nothing to compute, however many heads there are: outputs with a batch
 * axis are empty, and the others are 0 as they are for batch 0. So backends get batch 0, and loop
 * over nothing. If runs validate lengths, seqlen_q 0 does not count as "no queries" while total_q
 * is above 0, because cu_seqlens_q may contradict it and has to be checked. */
static void drop_empty_batch(fattn_problem *p, bool validates)
{
    const int64_t queries = validates ? p->total_q : p->seqlen_q;
    const bool keys = p->heads_k > 0 && p->total_k > 0 && p->batch > 0;
    const bool writes_keys = keys && p->outputs & (FATTN_OUT_DK | FATTN_OUT_DV);
    if ((queries == 0 || p->heads_q == 0) && !writes_keys && p->dbias_stride[0] == 0) {
        p->batch = 0;
    }
}

/* Makes all decisions: fills plan->problem, kernel and tiling. Loads nothing. */
static fattn_status decide(fattn_plan *plan, const fattn_problem *problem, const char *kernel,
                           const fattn_wish *wish, declined *notes)
{
    const fattn_env *env = NULL;
    fattn_status status = fattn_env_get(&env);
    status = status ? status : fattn_problem_normalise(problem, &plan->problem);
    if (status) {
        return status;
    }
    plan->features = problem->features;
    plan->batch = plan->problem.batch;
    drop_empty_batch(&plan->problem,
                     plan->device->backend->host_memory || plan->problem.features & FATTN_CHECKED);
    const fattn_wish chosen = {
        .tile = wish && wish->tile.br ? wish->tile : env->tile,
        .splits = plan->problem.op != FATTN_FORWARD ? 0 /* only a forward has splits */
                  : wish && wish->splits            ? wish->splits
                                                    : env->splits,
        .workers = wish ? wish->workers : 0,
    };
    const fattn_limits limits = device_limits(plan->device, env);
    status = choose_kernel(plan, kernel ? kernel : env->kernel, chosen.splits, &limits, notes);
    if (status) {
        return status;
    }
    status = fattn_tiling_choose(&plan->problem, &limits, plan->kernel, &chosen, &plan->tiling);
    return status || chosen.tile.br || chosen.splits ? status : leave_few(plan, &limits);
}

static void log_plan(const fattn_plan *plan)
{
    const fattn_problem *const p = &plan->problem;
    const fattn_tiling *const t = &plan->tiling;
    fattn_log("plan %s %s B%lld H%lld/%lld S%lldx%lld D%lld/%lld: %s, tile %lldx%lld, %lld splits, "
              "%lld bytes of workspace, pointer alignment %lld",
              p->op == FATTN_FORWARD ? "forward" : "backward", fattn_dtype_name(p->dtype),
              (long long)plan->batch, (long long)p->heads_q, (long long)p->heads_k,
              (long long)p->seqlen_q, (long long)p->seqlen_k, (long long)p->dim,
              (long long)p->dim_v, plan->kernel->name, (long long)t->br, (long long)t->bc,
              (long long)t->splits, (long long)t->workspace, (long long)p->pointer_alignment);
}

static fattn_status create(fattn_device *device, const fattn_problem *problem, const char *kernel,
                           const fattn_wish *wish, fattn_plan **plan)
{
    declined notes;
    notes.used = 0;
    notes.text[0] = '\0';
    fattn_plan made = {.device = device, .references = 1};
    fattn_status status = decide(&made, problem, kernel, wish, &notes);
    if (status) {
        return status;
    }
    const size_t length = notes.used < sizeof notes.text ? notes.used : sizeof notes.text - 1;
    fattn_plan *const p = fattn_memory_alloc(sizeof *p + length + 1);
    if (!p) {
        return fattn_fail_memory((int64_t)(sizeof *p + length + 1), "a plan");
    }
    *p = made;
    fattn_pointers_make(&p->problem, &p->pointers);
    fattn_unused_make(p->problem.op, p->features, &p->unused);
    p->logs_tensors = fattn_log_wants(3);
    p->declined = (char *)(p + 1);
    memcpy(p->declined, notes.text, length);
    p->declined[length] = '\0';
    status = device->backend->plan(p);
    if (status) {
        fattn_memory_free(p);
        return status;
    }
    fattn_device_retain(device);
    if (fattn_log_wants(1)) {
        log_plan(p);
    }
    *plan = p;
    return FATTN_OK;
}

fattn_status fattn_plan_create_with(fattn_device *device, const fattn_problem *problem,
                                    const char *kernel, const fattn_wish *wish, fattn_plan **plan)
{
    if (!plan) {
        return fattn_fail(FATTN_NULL_POINTER, "plan is NULL");
    }
    *plan = NULL;
    fattn_status status = fattn_device_acquire(&device);
    if (!status) {
        status = create(device, problem, kernel, wish, plan);
        fattn_device_drop(device);
    }
    return status;
}

fattn_status fattn_plan_create(fattn_device *device, const fattn_problem *problem,
                               fattn_plan **plan)
{
    return fattn_plan_create_with(device, problem, NULL, NULL, plan);
}

fattn_plan *fattn_plan_retain(fattn_plan *plan)
{
    __atomic_fetch_add(&plan->references, 1, __ATOMIC_RELAXED);
    return plan;
}

void fattn_plan_destroy(fattn_plan *plan)
{
    if (plan && __atomic_fetch_sub(&plan->references, 1, __ATOMIC_ACQ_REL) == 1) {
        plan->device->backend->release(plan);
        fattn_device_drop(plan->device);
        fattn_memory_free(plan);
    }
}

fattn_status fattn_support(fattn_device *device, const fattn_problem *problem)
{
    fattn_status status = fattn_device_acquire(&device);
    if (status) {
        return status;
    }
    declined notes;
    notes.used = 0;
    notes.text[0] = '\0';
    fattn_plan plan = {.device = device};
    status = decide(&plan, problem, NULL, NULL, &notes);
    fattn_device_drop(device);
    return status;
}

/* --- Asking a plan ---------------------------------------------------------------------------- */

static fattn_plan_info info_of(const fattn_plan *plan)
{
    const fattn_problem *const p = &plan->problem;
    const fattn_tiling *const t = &plan->tiling;
    fattn_plan_info info = {
        .br = t->br,
        .bc = t->bc,
        .splits = t->splits,
        .work_items = t->items,
        .workspace_bytes = t->workspace,
        .predicted_bytes = t->traffic,
        .standard_bytes = fattn_io_standard_bytes(p),
        .lower_bound_bytes = fattn_io_lower_bound_bytes(p),
        .flops = fattn_io_flops(p),
        .effective_dropout =
            p->features & FATTN_DROPOUT ? fattn_dropout_threshold(p->dropout_p) / 65536.0 : 0,
    };
    strncpy(info.kernel, plan->kernel->name, sizeof info.kernel - 1);
    return info;
}

void fattn_plan_info_init(fattn_plan_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

fattn_status fattn_plan_get_info(const fattn_plan *plan, fattn_plan_info *info)
{
    if (!plan || !info) {
        return fattn_fail(FATTN_NULL_POINTER, "%s is NULL", plan ? "info" : "plan");
    }
    const fattn_plan_info known = info_of(plan);
    return fattn_abi_write(info, &known, sizeof known, "fattn_plan_info");
}

/* snprintf at the end of text; *used is the length of the whole text, as if it were not
 * truncated. */
static void append(char *text, size_t size, size_t *used, const char *format, ...)
    FATTN_PRINTF(4, 5);

static void append(char *text, size_t size, size_t *used, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const size_t room = *used < size ? size - *used : 0;
    *used += (size_t)vsnprintf(room ? text + *used : NULL, room, format, arguments);
    va_end(arguments);
}

size_t fattn_plan_describe(const fattn_plan *plan, char *text, size_t size)
{
    size_t used = 0;
    size = text ? size : 0;
    if (size) {
        text[0] = '\0';
    }
    if (!plan) {
        return 0;
    }
    const fattn_problem *const p = &plan->problem;
    const fattn_tiling *const t = &plan->tiling;
    const fattn_plan_info info = info_of(plan);
    append(text, size, &used, "%s in %s", p->op == FATTN_FORWARD ? "forward" : "backward",
           fattn_dtype_name(p->dtype));
    if (p->dtype_kv != p->dtype || p->dtype_v != p->dtype) {
        append(text, size, &used, " (k in %s, v in %s)", fattn_dtype_name(p->dtype_kv),
               fattn_dtype_name(p->dtype_v));
    }
    append(text, size, &used, " on %s: kernel %s\n", plan->device->backend->name, info.kernel);
    append(text, size, &used,
           "  problem    B %lld, Hq %lld, Hk %lld, Sq %lld, Sk %lld, D %lld, Dv %lld\n",
           (long long)plan->batch, (long long)p->heads_q, (long long)p->heads_k,
           (long long)p->seqlen_q, (long long)p->seqlen_k, (long long)p->dim, (long long)p->dim_v);
    append(text, size, &used, "  features  ");
    for (int bit = 0; fattn_feature_name(bit); bit++) {
        if (p->features >> bit & 1) {
            char value[64];
            append(text, size, &used, " %s%s", fattn_feature_name(bit),
                   fattn_feature_value(p, bit, value, sizeof value));
        }
    }
    append(text, size, &used, "%s\n", p->features ? "" : " none");
    append(text, size, &used, "  tile       %lld queries x %lld keys: %lld x %lld blocks a head\n",
           (long long)t->br, (long long)t->bc, (long long)t->q_blocks, (long long)t->k_blocks);
    append(text, size, &used, "  work       %lld items, keys in %lld split%s of %lld blocks\n",
           (long long)t->items, (long long)t->splits, t->splits == 1 ? "" : "s",
           (long long)t->split_blocks);
    if (plan->few) {
        append(text, size, &used,
               "  few rows   %s for sequences of at most %lld queries, keys in at most %lld "
               "splits\n",
               plan->few->name, (long long)(plan->few_rows / fattn_problem_group(p)),
               (long long)plan->few_tiling.splits);
    }
    append(text, size, &used, "  workspace  %lld bytes\n", (long long)t->workspace);
    append(text, size, &used,
           "  traffic    %.4g bytes; standard attention %.4g, lower bound %.4g\n",
           info.predicted_bytes, info.standard_bytes, info.lower_bound_bytes);
    append(text, size, &used, "  arithmetic %.4g flops\n", info.flops);
    if (p->features & FATTN_DROPOUT) {
        append(text, size, &used, "  dropout    %.17g after rounding\n", info.effective_dropout);
    }
    for (const char *line = plan->declined; *line;) {
        const size_t length = strcspn(line, "\n");
        append(text, size, &used, "  declined   %.*s\n", (int)length, line);
        line += length + (line[length] == '\n');
    }
    return used;
}
