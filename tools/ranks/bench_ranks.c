/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ranks/bench_ranks.h"

#include <stdio.h>
#include <string.h>

#include "core/distributed/forecast.h"
#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/feature.h"
#include "core/host.h"
#include "core/integer.h"
#include "core/memory.h"
#include "core/problem.h"
#include "core/status.h"
#include "tools/bench/bench.h"
#include "tools/bench/workload.h"
#include "tools/ranks/world.h"
#include "tools/terminal/terminal.h"

/* The features that need no tensors besides the shares of q, k and v. */
#define DIVIDED             \
    (FATTN_GROUP_FEATURES & \
     ~(FATTN_BIAS | FATTN_ALIBI_BIAS | FATTN_MASK | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K))

enum { SMALL = 64, LARGEST = 32 << 20, LINK_REPS = 9, RATE_REPS = 5, REPS = 7 };

void bench_ranks_rows(bench_ranks *values, option *rows)
{
    values->timeout = 60;
    const option own[BENCH_RANKS_OPTIONS] = {
        {"ranks", "divide sequences over the processes that mpirun\nstarted", OPTION_SWITCH,
         .value = &values->wanted},
        {"scheme", "how ranks share the work; default auto: the fastest", OPTION_CHOICE,
         .value = &values->scheme, .given = &values->any, .words = fattn_scheme_names},
        {"split", "which rows a rank has; default auto: by the masks", OPTION_CHOICE,
         .value = &values->split, .given = &values->any, .words = fattn_split_names},
        {"timeout S", "seconds to wait for other ranks; default 60", OPTION_REAL,
         .value = &values->timeout, .given = &values->any},
        {"saves", "forward saves the rows that ranks exchange, for\nbackward", OPTION_SWITCH,
         .value = &values->saves, .given = &values->any},
    };
    memcpy(rows, own, sizeof own);
}

/* --- A rank's part of a case ------------------------------------------------------------------ */

typedef struct divided_case {
    const world *world;
    fattn_device *device;
    sweep_case local; /* of this rank's rows */
    fattn_problem whole, normal;
    fattn_whole shares;
    fattn_group group;
    workload work;
    void *saved; /* by forward for backward; NULL: nothing */
} divided_case;

/* Something that all ranks do together; time_act() times it from when all begin until all are
 * done. */
typedef fattn_status (*act)(divided_case *c, void *what);

static fattn_status time_act(divided_case *c, act run, void *what, int reps, double *median)
{
    const int32_t ranks = c->world->transport->ranks, rank = c->world->transport->rank;
    double seconds[BENCH_REPS_MAX];
    double *const all = fattn_memory_alloc((size_t)ranks * sizeof *all);
    fattn_status status = all ? FATTN_OK : fattn_fail_memory(ranks * 8, "times");
    for (int n = -1; !status && n < reps; n++) { /* the first one warms up */
        all[rank] = 0;
        status = world_gather(c->world, all, sizeof *all); /* a barrier */
        const double begin = fattn_host_seconds();
        status = status ? status : run(c, what);
        all[rank] = fattn_host_seconds() - begin;
        status = status ? status : world_gather(c->world, all, sizeof *all);
        for (int32_t r = 0; !status && n >= 0 && r < ranks; r++) {
            seconds[n] = r == 0 || all[r] > seconds[n] ? all[r] : seconds[n];
        }
    }
    *median = status ? 0 : bench_median(seconds, reps);
    fattn_memory_free(all);
    return status;
}

/* Each rank sends to one neighbour and receives from the other. */
typedef struct exchange {
    char *data; /* [2][bytes] */
    int64_t bytes;
} exchange;

static fattn_status run_exchange(divided_case *c, void *what)
{
    const exchange *const x = what;
    const fattn_transport *const t = c->world->transport;
    const fattn_message messages[] = {
        {(t->rank + 1) % t->ranks, 0, 0, 0, x->data, x->bytes, NULL},
        {(t->rank + t->ranks - 1) % t->ranks, 0, 1, 0, x->data + x->bytes, x->bytes, NULL},
    };
    const fattn_status status = t->start(t->user, messages, 2);
    return status ? status : t->wait(t->user, messages, 2, c->world->timeout);
}

static fattn_status run_alone(divided_case *c, void *plan)
{
    return fattn_execute(plan, &c->work.buffers, NULL, NULL);
}

static fattn_status run_divided(divided_case *c, void *plan)
{
    return fattn_group_execute_saved(plan, &c->work.buffers, c->saved);
}

/* Measures the link and one rank's attention; the slowest rank counts. The link is timed with
 * blocks as large as those of this problem, attention with a rank's own share. */
static fattn_status measure_speed(divided_case *c, fattn_speed *speed)
{
    const fattn_problem *const p = &c->local.problem;
    const int64_t rows = fattn_ceil_div(c->whole.seqlen_k, c->shares.ranks); /* on every rank */
    const int64_t block = p->batch * rows * p->heads_k * sweep_key_bytes(p);
    const int64_t bytes = block < SMALL ? SMALL : block > LARGEST ? LARGEST : block;
    exchange x = {.data = fattn_memory_alloc((size_t)(2 * bytes)), .bytes = SMALL};
    fattn_plan *plan = NULL;
    double small = 0, large = 0, alone = 0;
    fattn_status status = x.data ? FATTN_OK : fattn_fail_memory(2 * bytes, "a block of keys");
    if (!status && c->world->transport->ranks > 1) {
        memset(x.data, 0, (size_t)(2 * bytes));
        status = time_act(c, run_exchange, &x, LINK_REPS, &small);
        x.bytes = bytes;
        status = status ? status : time_act(c, run_exchange, &x, LINK_REPS, &large);
    }
    status = status ? status : fattn_plan_create(c->device, p, &plan);
    status = status ? status : time_act(c, run_alone, plan, RATE_REPS, &alone);
    if (!status) {
        speed->latency = small;
        speed->bandwidth = large > small ? (double)bytes / (large - small) : 1e30;
        speed->flops = sweep_flops(&c->local) / alone;
    }
    fattn_plan_destroy(plan);
    if (!status) { /* after a failure messages may still use the memory */
        fattn_memory_free(x.data);
    }
    return status;
}

static fattn_status allocate_saved(divided_case *c, const fattn_group_plan *plan)
{
    const int64_t bytes = fattn_group_plan_saved_bytes(plan);
    return bytes > 0 ? fattn_device_malloc(c->device, (size_t)bytes, &c->saved) : FATTN_OK;
}

/* Computes o and lse, which backward reads. */
static fattn_status run_forward(divided_case *c)
{
    fattn_group_plan *plan;
    const fattn_problem p = problem_forward_of(&c->whole);
    fattn_status status = fattn_group_plan_create(&c->group, &p, NULL, NULL, &plan);
    status = status ? status : allocate_saved(c, plan);
    status = status ? status : run_divided(c, plan);
    if (!status) {
        fattn_group_plan_destroy(plan);
    }
    return status;
}

/* --- A case ----------------------------------------------------------------------------------- */

/* *most: the bytes of the largest plan. Ranks differ, because their pieces do. */
static fattn_status find_bytes(const divided_case *c, const fattn_group_plan *plan, int64_t *most)
{
    const int32_t ranks = c->world->transport->ranks;
    int64_t *const all = fattn_memory_alloc((size_t)ranks * sizeof *all);
    if (!all) {
        return fattn_fail_memory(ranks * (int64_t)sizeof *all, "the bytes of plans");
    }
    all[c->world->transport->rank] = fattn_group_plan_bytes(plan);
    const fattn_status status = world_gather(c->world, all, sizeof *all);
    *most = 0;
    for (int32_t r = 0; !status && r < ranks; r++) {
        *most = fattn_max64(*most, all[r]);
    }
    fattn_memory_free(all);
    return status;
}

static void print_row(const divided_case *c, const fattn_forecast *f, const fattn_speed *speed,
                      double seconds, int64_t bytes)
{
    const fattn_problem *const p = &c->whole;
    static bool header;
    if (!header) {
        puts(
            "dir\tdtype\tmask\tB\tHq\tHk\tSq\tSk\tD\tranks\tscheme\tsplit\tmedian_ms\tgflops_rank\t"
            "link_mb_s\tlatency_us\trate_gflops\tforecast_ms\tover_forecast\tplan_bytes");
        header = true;
    }
    sweep_case whole = c->local;
    whole.problem = c->whole;
    const double flops = sweep_flops(&whole) / (double)c->shares.ranks;
    printf("%s\t%s\t%s\t%lld\t%lld\t%lld\t%lld\t%lld\t%lld\t%lld\t%s\t%s\t", c->local.dir_word,
           fattn_dtype_name(p->dtype), sweep_mask_word(&whole), (long long)p->batch,
           (long long)p->heads_q, (long long)p->heads_k, (long long)p->seqlen_q,
           (long long)p->seqlen_k, (long long)p->dim, (long long)c->shares.ranks,
           fattn_scheme_names[f->scheme], fattn_split_names[c->shares.split]);
    printf("%.6g\t%.5g\t%.5g\t%.4g\t%.5g\t%.6g\t%.3f\t%lld\n", 1e3 * seconds,
           1e-9 * flops / seconds, 1e-6 * speed->bandwidth, 1e6 * speed->latency,
           1e-9 * speed->flops, 1e3 * f->seconds, seconds / f->seconds, (long long)bytes);
    fflush(stdout);
}

/* Sets the sizes of this rank's share. all_queries: only keys are divided. */
static void take_share(divided_case *c, bool all_queries)
{
    fattn_problem *const p = &c->local.problem;
    const int64_t rank = c->world->transport->rank;
    c->shares.all_queries = all_queries;
    p->seqlen_q = fattn_whole_rows(&c->shares, FATTN_QUERIES, 0, rank);
    p->seqlen_k = fattn_whole_rows(&c->shares, FATTN_KEYS, 0, rank);
}

static fattn_status describe(divided_case *c, const bench_ranks *v, const sweep_case *of)
{
    const uint64_t others = of->problem.features & ~DIVIDED;
    c->whole = of->problem;
    c->local = *of;
    if (others) {
        return fattn_fail(FATTN_UNSUPPORTED, "--ranks does not measure problems with %s",
                          fattn_feature_name(__builtin_ctzll(others)));
    }
    const fattn_status status = fattn_problem_normalise(&c->whole, &c->normal);
    c->shares = (fattn_whole){
        .problem = &c->normal, .ranks = c->world->transport->ranks, .saves = v->saves};
    c->shares.split = v->split ? (fattn_split)v->split : fattn_split_choose(&c->normal);
    fattn_group_init(&c->group);
    c->group.transport = c->world->transport;
    c->group.device = c->device;
    c->group.split = c->shares.split;
    c->group.timeout = v->timeout;
    c->group.saves = v->saves;
    return status;
}

static fattn_status bench_one(divided_case *c, const bench_ranks *v, const sweep_case *of,
                              int64_t reps)
{
    fattn_speed speed = {.flops = 1};
    fattn_forecast f;
    fattn_group_plan *plan = NULL;
    double seconds = 0;
    int64_t bytes = 0;
    fattn_status status = describe(c, v, of);
    if (status) {
        return status;
    }
    const bool reduces = fattn_scheme_reduces(c->whole.op, c->whole.seqlen_q, c->shares.ranks);
    take_share(c, v->scheme == FATTN_SCHEME_REDUCE || (v->scheme == FATTN_SCHEME_AUTO && reduces));
    status = workload_create(c->device, &c->local, &c->work);
    status = status ? status : measure_speed(c, &speed);
    status = status ? status : fattn_forecast_make(&c->shares, (fattn_scheme)v->scheme, &speed, &f);
    /* Measurements differ from rank to rank, and so may forecasts: all take the first rank's. */
    const int64_t all_bytes = c->shares.ranks * (int64_t)sizeof f;
    fattn_forecast *const all = fattn_memory_alloc((size_t)all_bytes);
    status = status || all ? status : fattn_fail_memory(all_bytes, "forecasts");
    if (!status) {
        all[c->world->transport->rank] = f;
        status = world_gather(c->world, all, sizeof *all);
    }
    if (!status) {
        f = all[0];
        c->group.scheme = f.scheme;
        c->group.turns = f.turns;
    }
    fattn_memory_free(all);
    status = status || c->whole.op == FATTN_FORWARD ? status : run_forward(c);
    status = status ? status : fattn_group_plan_create(&c->group, &c->whole, NULL, NULL, &plan);
    status = status || c->saved ? status : allocate_saved(c, plan);
    status = status ? status : time_act(c, run_divided, plan, reps ? (int)reps : REPS, &seconds);
    status = status ? status : find_bytes(c, plan, &bytes);
    if (!status && c->world->transport->rank == 0) {
        print_row(c, &f, &speed, seconds, bytes);
    }
    if (!status) { /* after a failure messages may still use the plan's memory */
        fattn_group_plan_destroy(plan);
        fattn_device_free(c->device, c->saved);
    }
    return status;
}

int bench_ranks_run(const bench_ranks *v, const sweep *s, int64_t reps)
{
    world w;
    fattn_status status = world_open(&w, v->timeout);
    for (int64_t n = 0, count = sweep_count(s); !status && n < count; n++) {
        divided_case c;
        sweep_case of;
        memset(&c, 0, sizeof c);
        c.world = &w;
        sweep_at(s, n, &of);
        status = sweep_open(&of, &c.device);
        status = status ? status : bench_one(&c, v, &of, reps);
        workload_free(&c.work);
        fattn_device_close(c.device);
    }
    const int code = status ? tool_failure(status) : TOOL_OK;
    world_close(&w);
    return code;
}
