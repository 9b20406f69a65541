/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ranks/ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/distributed/forecast.h"
#include "core/distributed/group.h"
#include "core/distributed/needs.h"
#include "core/feature.h"
#include "core/memory.h"
#include "core/problem.h"
#include "tools/ranks/world.h"
#include "tools/terminal/terminal.h"

void ranks_rows(ranks_options *values, option *rows)
{
    bool *const any = &values->any;
    const option own[RANKS_OPTIONS] = {
        {"ranks N", "divide the problem over N ranks: schedule, balance, forecast", OPTION_INTEGER,
         .value = &values->ranks, .min = 1, .max = 65536},
        {"link B[,S]",
         "bytes per second that a rank sends and receives concurrently, and\n"
         "seconds of latency (default 0)",
         OPTION_REALS, .value = &values->link, .given = any},
        {"rate F", "floating-point operations a second of one rank, as bench measures them",
         OPTION_REAL, .value = &values->rate, .given = any},
        {"row S", "extra seconds per row for merging, in each step after the first (default 0)",
         OPTION_REAL, .value = &values->row, .given = any},
        {"scheme", "how ranks share the work (default auto: the fastest)", OPTION_CHOICE,
         .value = &values->scheme, .given = any, .words = fattn_scheme_names},
        {"split", "which rows a rank has (default auto: by the masks)", OPTION_CHOICE,
         .value = &values->split, .given = any, .words = fattn_split_names},
        {"memory B",
         "most bytes of a rank's plan: heads are then computed in turns, and keys\n"
         "in slices (default: no limit)",
         OPTION_INTEGER, .value = &values->memory, .given = any, .min = 1, .max = INT64_MAX},
        {"saves", "forward saves the rows that ranks exchange, for backward", OPTION_SWITCH,
         .value = &values->saves, .given = any},
    };
    memcpy(rows, own, sizeof own);
}

bool ranks_check(const ranks_options *v, const char *command)
{
    if (v->ranks == 0) {
        return !v->any ||
               (tool_usage(command,
                           "--link, --rate, --row, --scheme, --split, --memory and --saves need "
                           "--ranks"),
                false);
    }
    if (v->link.count == 0 || v->rate == 0) {
        tool_usage(command, "--ranks needs --link and --rate");
        return false;
    }
    const double latency = v->link.count > 1 ? v->link.at[1] : 0;
    if (v->link.count > 2 || !(v->link.at[0] > 0) || !(latency >= 0) || isinf(latency)) {
        tool_usage(command, "--link is a bandwidth above 0, and a latency");
        return false;
    }
    if (!(v->rate > 0) || isinf(v->rate)) {
        tool_usage(command, "--rate is above 0");
        return false;
    }
    if (!(v->row >= 0) || isinf(v->row)) {
        tool_usage(command, "--row is 0 or above");
        return false;
    }
    if (v->saves && v->memory > 0) {
        tool_usage(command, "--saves cannot be combined with --memory");
        return false;
    }
    return true;
}

/* --- Printing --------------------------------------------------------------------------------- */

static void print_rows(const char *what, const fattn_whole *whole,
                       int64_t (*length)(const fattn_whole *, int64_t))
{
    int64_t least = INT64_MAX, most = 0;
    for (int64_t r = 0; r < whole->ranks; r++) {
        int64_t rows = 0;
        for (int64_t b = 0; b < whole->problem->batch; b++) {
            rows += fattn_split_rows(whole->split, length(whole, b), whole->ranks, r);
        }
        least = rows < least ? rows : least;
        most = rows > most ? rows : most;
    }
    if (least == most) {
        printf("%lld %s", (long long)most, what);
    } else {
        printf("%lld to %lld %s", (long long)least, (long long)most, what);
    }
}

/* Prints a line for each step: how many ranks compute in it, the most pairs of one of them, and how
 * many blocks travel. Equal steps share a line. */
static int print_steps(const fattn_whole *whole)
{
    fattn_ring ring;
    const fattn_status status = fattn_ring_make(whole, &ring);
    if (status) {
        return tool_failure(status);
    }
    char last[128] = "";
    int64_t from = 0;
    /* Backward has one more step, during which the last sums of gradients travel. */
    const bool gradients = whole->problem->op == FATTN_BACKWARD;
    const int64_t last_step = ring.last_step + (gradients && ring.last_step > 0);
    for (int64_t step = 0; step <= last_step + 1; step++) {
        int64_t busy = 0, blocks = 0;
        double most = 0;
        for (int64_t r = 0; step <= last_step && r < whole->ranks; r++) {
            double pairs = 0;
            for (int lane = 0; lane < FATTN_LANES; lane++) {
                for (int n = 0, runs = fattn_whole_q_runs(whole); n < runs; n++) {
                    const int64_t owner = fattn_ring_work(&ring, lane, r, step, n, runs, gradients);
                    pairs += owner >= 0 ? fattn_whole_run_pairs(whole, r, n, owner) : 0;
                }
                blocks += fattn_ring_step(&ring, lane, r, step).send_to >= 0;
            }
            busy += pairs > 0;
            most = pairs > most ? pairs : most;
        }
        char line[128] = "";
        if (step <= last_step) {
            snprintf(line, sizeof line,
                     "%lld ranks compute, at most %.6g pairs per head; %lld blocks sent",
                     (long long)busy, most, (long long)blocks);
        }
        if (strcmp(line, last) != 0) {
            if (step > from + 1) {
                printf("  steps %3lld-%-3lld %s\n", (long long)from, (long long)step - 1, last);
            } else if (step > 0) {
                printf("  step  %3lld     %s\n", (long long)from, last);
            }
            memcpy(last, line, sizeof last);
            from = step;
        }
    }
    fattn_ring_free(&ring);
    return TOOL_OK;
}

/* Prints the memory that a rank needs with the kernels of the case's device, or why this device
 * cannot plan the case. */
static void print_needs(const ranks_options *v, const sweep_case *c, const fattn_whole *whole,
                        const fattn_forecast *f)
{
    fattn_group group;
    fattn_group_needs needs;
    fattn_group_init(&group);
    group.split = whole->split;
    group.scheme = f->scheme;
    group.memory = v->memory;
    group.saves = v->saves;
    group.rate = v->rate;
    group.bandwidth = v->link.at[0];
    group.latency = v->link.count > 1 ? v->link.at[1] : 0;
    fattn_status status = fattn_device_open(c->device, &group.device);
    status = status ? status
                    : fattn_group_foresee(&group, whole->ranks, &c->problem, whole->cu_q,
                                          whole->cu_k, &needs);
    if (status) {
        printf("  memory       no plan here: %s\n", fattn_last_reason());
    } else {
        const double tensors = (double)needs.tensors, plan = (double)needs.plan;
        printf("  memory       %lld bytes of tensors a rank, and %lld of its plan: %.3f of the "
               "tensors\n",
               (long long)needs.tensors, (long long)needs.plan,
               tensors > 0 ? (tensors + plan) / tensors : 1);
        printf("  plan         %lld bytes of buffers, %lld of workspace; turns of heads: %lld, "
               "slices of keys: %lld\n",
               (long long)(needs.plan - needs.workspace), (long long)needs.workspace,
               (long long)needs.turns, (long long)needs.slices);
        if (needs.saved > 0) {
            printf("  saved        %lld bytes, by forward for backward\n", (long long)needs.saved);
        }
    }
    fattn_device_close(group.device);
}

static int print_forecast(const fattn_whole *whole, const fattn_forecast *f)
{
    printf("over %lld ranks: scheme %s, rows %s\n", (long long)whole->ranks,
           fattn_scheme_names[f->scheme], fattn_split_names[whole->split]);
    printf("  shares       ");
    if (f->scheme == FATTN_SCHEME_REDUCE) {
        printf("all queries");
    } else {
        print_rows("queries", whole, fattn_whole_q);
    }
    printf(", ");
    print_rows("keys", whole, fattn_whole_k);
    printf(" a rank\n");
    if (f->head_ranks > 1) {
        printf("  heads        over %lld ranks: %lld query heads and %lld key/value heads each, in "
               "%lld turns\n",
               (long long)f->head_ranks, (long long)(whole->problem->heads_q / f->head_ranks),
               (long long)(whole->problem->heads_k / f->head_ranks), (long long)f->turns);
    }
    int code = TOOL_OK;
    if (f->scheme != FATTN_SCHEME_REDUCE && f->head_ranks < whole->ranks) {
        fattn_whole group = *whole;
        group.ranks /= f->head_ranks;
        if (f->head_ranks == 1) {
            fattn_whole_set_halves(&group);
        }
        code = print_steps(&group);
    }
    printf("  balance      %.6g: a rank has %.6g to %.6g pairs\n",
           f->most_pairs > 0 ? f->least_pairs / f->most_pairs : 1, f->least_pairs, f->most_pairs);
    printf("  transfers    %.6g to %.6g bytes sent by a rank\n", f->least_bytes, f->most_bytes);
    printf("  forecast     %.4g s: computation %.4g s, transfers %.4g s\n", f->seconds,
           f->computing, f->transferring);
    printf("  efficiency   %.3f of %lld times one rank\n", f->efficiency, (long long)whole->ranks);
    return code;
}

/* --- The command ------------------------------------------------------------------------------ */

/* cu_seqlens of the case's packed sequences; NULL without memory. */
static int32_t *beginnings(const sweep_case *c, int64_t longest)
{
    int32_t *const cu = fattn_memory_alloc((size_t)(c->problem.batch + 1) * sizeof *cu);
    int64_t at = 0;
    for (int64_t b = 0; cu && b <= c->problem.batch; b++) {
        cu[b] = (int32_t)at;
        at += b < c->problem.batch ? sweep_length(longest, true, b) : 0;
    }
    return cu;
}

static fattn_status forecast(const ranks_options *v, fattn_whole *whole, fattn_forecast *f)
{
    const uint64_t others = whole->problem->features & ~FATTN_GROUP_FEATURES;
    if (others) {
        return fattn_fail(FATTN_UNSUPPORTED, "groups do not support %s",
                          fattn_feature_name(__builtin_ctzll(others)));
    }
    whole->split = v->split ? (fattn_split)v->split : fattn_split_choose(whole->problem);
    const fattn_speed speed = {.flops = v->rate,
                               .bandwidth = v->link.at[0],
                               .latency = v->link.count > 1 ? v->link.at[1] : 0,
                               .row = v->row};
    return fattn_forecast_make(whole, (fattn_scheme)v->scheme, &speed, f);
}

int ranks_explain(const ranks_options *v, const sweep_case *c)
{
    fattn_problem p;
    fattn_forecast f;
    int32_t *cu_q = NULL, *cu_k = NULL;
    fattn_status status = fattn_problem_normalise(&c->problem, &p);
    fattn_whole whole = {.problem = &p, .ranks = v->ranks, .saves = v->saves};
    if (!status && p.features & FATTN_CU_SEQLENS_Q) {
        whole.cu_q = cu_q = beginnings(c, p.seqlen_q);
        status = cu_q ? FATTN_OK : fattn_fail_memory((p.batch + 1) * 4, "cu_seqlens_q");
    }
    if (!status && p.features & FATTN_CU_SEQLENS_K) {
        whole.cu_k = cu_k = beginnings(c, p.seqlen_k);
        status = cu_k ? FATTN_OK : fattn_fail_memory((p.batch + 1) * 4, "cu_seqlens_k");
    }
    status = status ? status : forecast(v, &whole, &f);
    const int code = status ? tool_failure(status) : print_forecast(&whole, &f);
    if (code == TOOL_OK) {
        print_needs(v, c, &whole, &f);
    }
    fattn_memory_free(cu_q);
    fattn_memory_free(cu_k);
    return code;
}
