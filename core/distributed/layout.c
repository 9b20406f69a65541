/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of a plan: what it has room for, and where. */
#include <string.h>

#include "core/distributed/moves.h"
#include "core/dtype.h"
#include "core/integer.h"
#include "core/memory.h"

/* Takes bytes from memory of which *used are taken. NULL while only the total is computed. */
static void *take_from(char *memory, int64_t *used, int64_t bytes)
{
    char *const at = memory ? memory + *used : NULL;
    *used += (bytes + FATTN_MEMORY_ALIGNMENT - 1) / FATTN_MEMORY_ALIGNMENT * FATTN_MEMORY_ALIGNMENT;
    return at;
}

/* Takes bytes from the plan's memory. */
static void *take(fattn_group_plan *plan, int64_t bytes)
{
    return take_from(plan->memory_at, &plan->bytes, bytes);
}

/* Rows of this rank's queries, times the heads of a turn. */
static int64_t all_queries(const fattn_group_plan *plan)
{
    return fattn_group_queries(plan, plan->q_runs == 2 ? FATTN_BOTH : 0).rows *
           plan->problem.heads_q;
}

/* Takes memory for the rows of a turn's queries, except those that the plan saves. */
static void take_queries(fattn_group_plan *plan, fattn_packed *at)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t size = fattn_dtype_size(p->dtype), size_o = fattn_dtype_size(p->dtype_o);
    const int64_t channels = plan->backward ? p->dim : p->dim_v;
    const int64_t sum = channels * (!plan->single ? 4 : plan->backward ? size : size_o);
    const int64_t first = fattn_group_queries(plan, 0).longest * p->heads_q;
    const bool saves = plan->saves, has_sum = plan->backward || !saves;
    if (!plan->ragged && has_sum) {
        at->sum[0] = take(plan, all_queries(plan) * sum);
        at->sum[1] = at->sum[0] ? at->sum[0] + first * sum : NULL;
    }
    for (int n = 0; n < plan->q_runs; n++) {
        const int64_t rows = fattn_group_queries(plan, n).rows * p->heads_q;
        at->q[n] = plan->direct || saves ? NULL : take(plan, rows * p->dim * size);
        at->lse[n] = saves ? NULL : take(plan, rows * 4);
        at->sum[n] = plan->ragged && has_sum ? take(plan, rows * sum) : at->sum[n];
        if (plan->backward) {
            at->o[n] = plan->direct || saves ? NULL : take(plan, rows * p->dim_v * size_o);
            at->dout[n] = plan->direct ? NULL : take(plan, rows * p->dim_v * size_o);
            at->dlse[n] = take(plan, rows * 4);
        }
    }
}

/* Takes memory for the result of a piece that is merged with others. */
static void take_part(fattn_group_plan *plan)
{
    const bool merges = plan->merges && !plan->backward;
    const int64_t rows = merges ? all_queries(plan) : 0;
    plan->part_o = merges ? take(plan, rows * plan->problem.dim_v * 4) : NULL;
    plan->part_lse = merges ? take(plan, rows * 4) : NULL;
}

/* The most bytes that a block of keys takes, or of the sums of their gradients. */
static int64_t most_of_blocks(const fattn_group_plan *plan,
                              fattn_block (*block)(const fattn_group_plan *, int64_t))
{
    int64_t most = 0;
    for (int64_t r = 0; r < plan->whole.ranks; r++) {
        most = fattn_max64(most, block(plan, r).bytes);
    }
    return most;
}

/* Takes memory for the rank's own block of a turn. */
static void take_own(fattn_group_plan *plan, fattn_packed *at)
{
    const int64_t sums = most_of_blocks(plan, fattn_group_block_sums);
    plan->own_step = plan->sharing > 1 ? sums : 0;
    at->own = plan->keys_direct || plan->saves
                  ? NULL
                  : take(plan, most_of_blocks(plan, fattn_group_block_keys));
    at->own_sum = plan->gradients ? take(plan, plan->own_step ? sums * plan->slices : sums) : NULL;
}

/* Takes memory for the blocks that travel. */
static void take_lanes(fattn_group_plan *plan)
{
    const int64_t keys = most_of_blocks(plan, fattn_group_block_keys);
    const int64_t sums = most_of_blocks(plan, fattn_group_block_sums);
    for (int lane = 0; lane < FATTN_LANES; lane++) {
        const int64_t longest = plan->ring.longest[lane];
        plan->lane[lane][0] = longest > 1 ? take(plan, keys) : NULL; /* of step 2 */
        plan->lane[lane][1] = longest > 0 ? take(plan, keys) : NULL;
        if (longest > 0 && plan->gradients) {
            plan->share[lane] = take(plan, sums);
            plan->sending[lane] = longest > 1 ? take(plan, sums) : plan->share[lane];
            plan->arriving[lane] = longest > 1 ? take(plan, sums) : NULL;
            plan->home[lane] = take(plan, sums);
        }
    }
}

/* Sets where the rows are that forward saves: at the same places in forward and in backward. A turn
 * of a plan that saves has one run of queries, and keys of its own. */
static void lay_out_saved(fattn_group_plan *plan)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t rows = all_queries(plan);
    const int64_t keys = most_of_blocks(plan, fattn_group_block_keys);
    int64_t *const used = &plan->saved_bytes;
    *used = 0;
    for (int64_t turn = 0; turn < plan->turns; turn++) {
        fattn_packed *const at = &plan->saved[turn];
        char *const memory = plan->saved_at;
        at->q[0] = take_from(memory, used, rows * p->dim * fattn_dtype_size(p->dtype));
        at->o[0] = take_from(memory, used, rows * p->dim_v * fattn_dtype_size(p->dtype_o));
        at->lse[0] = take_from(memory, used, rows * 4);
        at->own = take_from(memory, used, keys);
    }
}

/* Takes memory for the lists of rows of a ragged batch: of queries, then of keys; for each, first
 * the list of the share. */
static void take_lists(fattn_group_plan *plan)
{
    const int32_t rank = plan->transport.rank;
    int32_t *at = take(plan, fattn_group_listed_rows(plan) * (int64_t)sizeof *at);
    for (int side = 0; at && side < 2; side++) {
        const int64_t *const before = plan->rows_before[side];
        plan->share_rows[side] = at;
        plan->packed_rows[side] = at + before[rank + 1] - before[rank];
        at = plan->packed_rows[side] + before[plan->shares.ranks];
    }
}

void fattn_group_lay_out(fattn_group_plan *plan)
{
    plan->bytes = 0;
    for (int64_t n = 0; n < plan->sets; n++) {
        take_queries(plan, &plan->packed[n]);
    }
    const int64_t queries = plan->bytes;
    for (int64_t n = 0; n < plan->key_sets; n++) {
        take_own(plan, &plan->packed[n]);
    }
    plan->set_bytes = queries / plan->sets;
    plan->key_set_bytes = (plan->bytes - queries) / plan->key_sets;
    if (plan->saves) {
        lay_out_saved(plan);
        if (!plan->backward) { /* all rows that forward moves are saved */
            plan->set_bytes = plan->key_set_bytes = plan->saved_bytes / plan->turns;
        }
    }
    take_part(plan);
    take_lanes(plan);
    plan->at = fattn_group_packed_at(plan, 0);
    plan->dsink = take(plan, plan->shares.ranks * plan->heads_q * 4);
    const int64_t lengths = fattn_group_cu_count(plan) * (plan->problem.batch + 1);
    const bool has_lengths = plan->ragged && plan->transport.device_memory;
    plan->device_cu = has_lengths ? take(plan, lengths * (int64_t)sizeof *plan->device_cu) : NULL;
    if (fattn_group_lists_rows(plan)) {
        take_lists(plan);
    }
    for (int n = 0; n < 2; n++) { /* exchange 1 has neither inputs nor results of a single turn */
        const bool used = plan->members > 1 && (n == 0 || plan->turns > 1);
        plan->outward[n] = used ? take(plan, plan->members * plan->slots.outward) : NULL;
        plan->inward[n] = used ? take(plan, plan->members * plan->slots.inward) : NULL;
    }
    plan->workspace[0] = take(plan, plan->workspace_bytes);
    plan->workspace[1] = plan->overlaps ? take(plan, plan->workspace_bytes) : NULL;
}

void fattn_group_clear_gaps(const fattn_group_plan *plan)
{
    for (int64_t n = 0; n < plan->sets; n++) {
        if (plan->packed[n].own) {
            memset(plan->packed[n].own, 0, (size_t)fattn_group_block_keys(plan, plan->group).bytes);
        }
    }
    for (int n = 0; n < 2; n++) {
        if (plan->outward[n]) {
            memset(plan->outward[n], 0, (size_t)(plan->members * plan->slots.outward));
        }
    }
}
