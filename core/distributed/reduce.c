/* SPDX-License-Identifier: Apache-2.0 */
/* FATTN_SCHEME_REDUCE: all ranks have all queries, each against its share of the keys; their
 * results are merged. */
#include "core/distributed/group.h"

/* Tags. Nothing else travels during a reduction. */
enum { TAG_O, TAG_LSE };

/* What trade() does: either or both. */
enum { SENDS = 1, RECEIVES = 2 };

/* Sends (o, lse) to a rank, receives its (o, lse) into o and lse, or both. */
static fattn_status trade(const fattn_group_plan *plan, int64_t peer, int what, void *o, float *lse)
{
    const int64_t rows = fattn_group_queries(plan, 0).rows * plan->problem.heads_q;
    const int64_t bytes = rows * plan->problem.dim_v * (int64_t)sizeof(float);
    fattn_message messages[4];
    int count = 0;
    if (what & SENDS) {
        fattn_group_add_message(messages, &count, peer, TAG_O, FATTN_SEND, plan->at.sum[0], bytes);
        fattn_group_add_message(messages, &count, peer, TAG_LSE, FATTN_SEND, plan->at.lse[0],
                                rows * 4);
    }
    if (what & RECEIVES) {
        fattn_group_add_message(messages, &count, peer, TAG_O, FATTN_RECEIVE, o, bytes);
        fattn_group_add_message(messages, &count, peer, TAG_LSE, FATTN_RECEIVE, lse, rows * 4);
    }
    return fattn_group_carry(plan, messages, count);
}

/*
 * Merges the results of all ranks, on all ranks, by recursive doubling: the first 2^n ranks, for
 * the largest such n, exchange results with the rank at distance 1, then 2, then 4 and so on. Each
 * rank beyond them first sends its result to one of them, and at the end receives the merged one.
 * Merging commutes exactly, so all ranks end with the same bits.
 */
fattn_status fattn_group_reduce(fattn_group_plan *plan, const fattn_buffers *given)
{
    const int64_t ranks = plan->whole.ranks, rank = plan->group;
    int64_t inner = 1;
    while (inner * 2 <= ranks) {
        inner *= 2;
    }
    const bool outer = rank >= inner;
    const int64_t partner = outer ? rank - inner : rank + inner;
    fattn_status status = FATTN_OK;
    if (partner < ranks) {
        status = trade(plan, partner, outer ? SENDS : RECEIVES, plan->part_o, plan->part_lse);
        status = status || outer ? status : fattn_group_merge(plan, NULL, 0);
    }
    for (int64_t away = 1; !status && !outer && away < inner; away *= 2) {
        status = trade(plan, rank ^ away, SENDS | RECEIVES, plan->part_o, plan->part_lse);
        const bool last = plan->direct && inner == ranks && away * 2 == inner;
        status = status ? status : fattn_group_merge(plan, last ? given : NULL, 0);
    }
    if (!status && partner < ranks) {
        status = trade(plan, partner, outer ? RECEIVES : SENDS, plan->at.sum[0], plan->at.lse[0]);
    }
    return status;
}
