/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scheme of a plan: what a group does not support in a scheme, and which scheme
 * FATTN_SCHEME_AUTO stands for.
 */
#include <math.h>
#include <string.h>

#include "core/distributed/forecast.h"
#include "core/distributed/group.h"
#include "core/status.h"

/* Whether the pieces of a ragged batch need no positions: whether in each piece one bound on
 * distances holds for the indices of all sequences, whatever their lengths. Under a causal mask it
 * does if queries and keys are divided at the same rows. */
static bool have_common_bounds(const fattn_group_plan *plan, fattn_scheme scheme)
{
    const fattn_problem *const p = &plan->problem;
    const size_t bytes = (size_t)(p->batch + 1) * sizeof(int32_t);
    if (p->features & (FATTN_ALIBI | FATTN_DROPOUT) || p->window_left >= 0) {
        return false;
    }
    return p->window_right < 0 || (p->window_right == 0 && scheme != FATTN_SCHEME_REDUCE &&
                                   memcmp(plan->shares.cu_q, plan->shares.cu_k, bytes) == 0);
}

/* Why a group does not compute the problem in a scheme that itself supports it; NULL if it does. */
static const char *refusal(const fattn_group_plan *plan, fattn_scheme scheme)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t members = fattn_scheme_members(&plan->shares, scheme);
    const bool striped = plan->shares.split == FATTN_SPLIT_STRIPED && plan->shares.ranks > members;
    const bool scores = p->features & (FATTN_BIAS | FATTN_MASK);
    if (plan->ragged && plan->transport.device_memory && plan->shares.ranks > members &&
        !have_common_bounds(plan, scheme)) {
        return "on devices with memory of their own, rings support a ragged batch without ALiBi, "
               "dropout and windows, and under a causal mask with as many keys as queries in each "
               "sequence; scheme \"heads\" supports all";
    }
    if (scores && plan->ragged) {
        return "groups support no bias or mask with a ragged batch";
    }
    if (scores && members > 1) {
        return "schemes that exchange heads support no bias or mask";
    }
    if (p->outputs & FATTN_OUT_DBIAS && p->dbias_stride[2] == 0) {
        return "groups do not support a dbias that is summed over queries";
    }
    if (striped && scheme == FATTN_SCHEME_REDUCE) {
        return "scheme \"reduce\" does not support striped rows";
    }
    if (striped && p->features & (FATTN_DROPOUT | FATTN_ALIBI) &&
        !(p->features & FATTN_ALIBI_BIAS && !(p->features & FATTN_DROPOUT))) {
        return "striped rows support no dropout or ALiBi, which need neighbouring positions";
    }
    if (striped && plan->ragged && p->window_left >= 0 && p->window_right >= 0) {
        return "striped rows of a ragged batch support no window that is bounded on both sides";
    }
    return NULL;
}

fattn_status fattn_group_check_scheme(const fattn_group_plan *plan)
{
    const char *const why = fattn_scheme_declines(&plan->shares, plan->scheme);
    if (why) {
        return fattn_fail(FATTN_UNSUPPORTED, "scheme \"%s\" %s", fattn_scheme_names[plan->scheme],
                          why);
    }
    const char *const refused = refusal(plan, plan->scheme);
    return refused ? fattn_fail(FATTN_UNSUPPORTED, "%s", refused) : FATTN_OK;
}

fattn_status fattn_group_check_speed(const fattn_group *g)
{
    const struct {
        const char *name;
        double value;
    } all[] = {{"rate", g->rate}, {"bandwidth", g->bandwidth}, {"latency", g->latency}};
    for (int n = 0; n < 3; n++) {
        if (!(all[n].value >= 0) || isinf(all[n].value)) {
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %g, not a number from 0 on",
                              all[n].name, all[n].value);
        }
    }
    return FATTN_OK;
}

/* All ranks must find the same number of turns, also on GPUs with different numbers of
 * multiprocessors. So units is that of an H100 for all. */
fattn_speed fattn_group_speed(const fattn_group *g, const fattn_transport *t)
{
    const fattn_speed gpus = {.flops = 6e14, .bandwidth = 3.5e11, .latency = 1e-5};
    const fattn_speed cpus = {.flops = 2e12, .bandwidth = 1.2e10, .latency = 2e-5};
    fattn_speed speed = t->device_memory ? gpus : cpus;
    speed.units = t->device_memory && !t->spans ? 132 : 0;
    speed.flops = g->rate > 0 ? g->rate : speed.flops;
    speed.bandwidth = g->bandwidth > 0 ? g->bandwidth : speed.bandwidth;
    speed.latency = g->latency > 0 ? g->latency : speed.latency;
    return speed;
}

static bool takes(const fattn_group_plan *plan, fattn_scheme scheme)
{
    return !fattn_scheme_declines(&plan->shares, scheme) && !refusal(plan, scheme);
}

/* fattn_speed.row of a GPU: what merging costs in a ring, and in backward sums in f32. Measured on
 * two H200 (docs/notes/distributed.md). */
static double seconds_of_row(const fattn_problem *p)
{
    return p->op == FATTN_BACKWARD ? 2e-11 * (double)p->heads_k * (double)(p->dim + p->dim_v)
                                   : 7e-12 * (double)p->heads_q * (double)p->dim_v;
}

fattn_status fattn_group_choose_scheme(fattn_group_plan *plan)
{
    fattn_problem problem;
    const fattn_whole by = fattn_whole_to_choose_by(&plan->shares, &problem);
    const fattn_problem *const p = by.problem;
    fattn_speed speed = plan->speed;
    if (plan->scheme != FATTN_SCHEME_AUTO) {
        return FATTN_OK;
    }
    /* The runs of a ragged batch are pieces of their own, so that three times as many rows are
     * merged. */
    speed.row = plan->transport.device_memory ? seconds_of_row(p) * (plan->ragged ? 3 : 1) : 0;
    plan->scheme = FATTN_SCHEME_RING; /* its reason is given if no scheme takes the problem */
    double least = INFINITY;
    for (fattn_scheme s = FATTN_SCHEME_RING; s <= FATTN_SCHEME_BOTH && p->batch > 0; s++) {
        fattn_forecast forecast;
        if (!takes(plan, s)) {
            continue;
        }
        const fattn_status status = fattn_forecast_make(&by, s, &speed, &forecast);
        if (status) {
            return status;
        }
        if (forecast.seconds < least) {
            least = forecast.seconds;
            plan->scheme = s;
        }
    }
    return FATTN_OK;
}

fattn_scheme fattn_group_plan_scheme(const fattn_group_plan *plan)
{
    return plan ? plan->scheme : FATTN_SCHEME_AUTO;
}
