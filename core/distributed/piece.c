/* SPDX-License-Identifier: Apache-2.0 */
/* The pieces of a divided problem as problems for one device, and the layout of the blocks in which
 * keys travel. */
#include <assert.h>
#include <string.h>

#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/integer.h"

#define BLOCK_ALIGNMENT 64 /* of each tensor in a block; with it kernels are fastest */

/* --- Sizes ------------------------------------------------------------------------------------ */

static fattn_extent extent_of(const fattn_group_plan *plan, fattn_side side, int64_t rank, int run)
{
    const fattn_whole *const whole = &plan->whole;
    const int64_t kinds = fattn_whole_kinds(whole);
    fattn_extent extent = {0, 0};
    for (int64_t b = 0; b < kinds; b++) {
        const int64_t rows = fattn_whole_run(whole, side, b, rank, run).count;
        extent.rows += rows;
        extent.longest = fattn_max64(extent.longest, rows);
    }
    extent.rows *= plan->ragged ? 1 : whole->problem->batch;
    return extent;
}

fattn_extent fattn_group_queries(const fattn_group_plan *plan, int run)
{
    fattn_extent extent = extent_of(plan, FATTN_QUERIES, plan->group, run == FATTN_BOTH ? 0 : run);
    if (run == FATTN_BOTH) {
        const fattn_extent second = extent_of(plan, FATTN_QUERIES, plan->group, 1);
        extent.rows += second.rows;
        extent.longest += second.longest;
    }
    return extent;
}

fattn_extent fattn_group_keys(const fattn_group_plan *plan, int64_t owner, int run)
{
    return extent_of(plan, FATTN_KEYS, owner, run);
}

static int64_t aligned(int64_t bytes)
{
    return (bytes + BLOCK_ALIGNMENT - 1) / BLOCK_ALIGNMENT * BLOCK_ALIGNMENT;
}

/* In a ragged batch a block has its runs one after another. Otherwise both runs of a sequence are
 * adjacent, so that one piece can have both. */
fattn_block fattn_group_block(const fattn_group_plan *plan, int64_t owner, int64_t k_size,
                              int64_t v_size)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t k_row = p->heads_k * p->dim * k_size, v_row = p->heads_k * p->dim_v * v_size;
    fattn_block block = {.bytes = 0};
    if (plan->ragged) {
        for (int n = 0; n < plan->k_runs; n++) {
            const int64_t rows = fattn_group_keys(plan, owner, n).rows;
            block.k[n] = block.bytes;
            block.v[n] = block.k[n] + aligned(rows * k_row);
            block.bytes = block.v[n] + aligned(rows * v_row);
        }
        return block;
    }
    const int64_t rows = fattn_group_key_rows(plan, owner) * p->batch;
    const int64_t first = fattn_group_keys(plan, owner, 0).longest;
    block.v[0] = aligned(rows * k_row);
    block.k[1] = first * k_row;
    block.v[1] = block.v[0] + first * v_row;
    block.bytes = block.v[0] + aligned(rows * v_row);
    return block;
}

int64_t fattn_group_key_rows(const fattn_group_plan *plan, int64_t owner)
{
    int64_t rows = 0;
    for (int n = 0; n < plan->k_runs; n++) {
        rows += fattn_group_keys(plan, owner, n).longest;
    }
    return rows;
}

int64_t fattn_group_query_rows(const fattn_group_plan *plan)
{
    return fattn_group_queries(plan, plan->q_runs == 2 ? FATTN_BOTH : 0).longest;
}

fattn_block fattn_group_block_keys(const fattn_group_plan *plan, int64_t owner)
{
    const fattn_problem *const p = &plan->problem;
    return fattn_group_block(plan, owner, fattn_dtype_size(p->dtype_kv),
                             fattn_dtype_size(p->dtype_v));
}

fattn_block fattn_group_block_sums(const fattn_group_plan *plan, int64_t owner)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t k_size = plan->single ? fattn_dtype_size(p->dtype_kv) : 4;
    const int64_t v_size = plan->single ? fattn_dtype_size(p->dtype_v) : 4;
    return fattn_group_block(plan, owner, p->outputs & FATTN_OUT_DK ? k_size : 0,
                             p->outputs & FATTN_OUT_DV ? v_size : 0);
}

char *fattn_group_own_sum(const fattn_group_plan *plan)
{
    return plan->at.own_sum ? plan->at.own_sum + plan->whole.slice * plan->own_step : NULL;
}

bool fattn_group_ends_turn(const fattn_group_plan *plan)
{
    return plan->whole.slice == plan->slices - 1;
}

unsigned fattn_group_home_runs(const fattn_group_plan *plan, int lane)
{
    return fattn_ring_sums(&plan->ring, lane, plan->group, plan->ring.reach[lane][plan->group]);
}

/* --- Problems --------------------------------------------------------------------------------- */

bool fattn_group_is_first(const fattn_group_plan *plan, int64_t owner, int k_run)
{
    return owner == plan->group && k_run == 0 && plan->whole.slice == 0;
}

fattn_strides fattn_group_packed(int64_t rows, int64_t heads, int64_t channels)
{
    return (fattn_strides){rows * heads * channels, heads * channels, channels};
}

int64_t fattn_group_row(const fattn_group_plan *plan, int q_run)
{
    return q_run == 1 ? fattn_group_queries(plan, 0).longest : 0;
}

/* Sets the strides of a piece, and the alignment of pointers to its first rows. */
static void lay(const fattn_group_plan *plan, int64_t owner, int q_run, int k_run, fattn_problem *p)
{
    const fattn_problem *const l = &plan->local;
    const int64_t q_rows = fattn_group_queries(plan, q_run).longest;
    const int64_t sum_rows = fattn_group_query_rows(plan), row = fattn_group_row(plan, q_run);
    const int64_t k_rows = fattn_group_key_rows(plan, owner);
    const fattn_block keys = fattn_group_block_keys(plan, owner);
    const fattn_block sums = fattn_group_block_sums(plan, owner);
    int64_t offsets = keys.k[k_run] | keys.v[k_run] | BLOCK_ALIGNMENT;
    offsets |= plan->gradients ? sums.k[k_run] | sums.v[k_run] : 0;
    offsets |= plan->keys_direct && owner == plan->group ? l->pointer_alignment : 0;
    offsets |= row * p->heads_q * (plan->backward ? p->dim : p->dim_v) * (int64_t)sizeof(float);
    p->layout = FATTN_STRIDED;
    p->k = p->dk = fattn_group_packed(k_rows, p->heads_k, p->dim);
    p->v = p->dv = fattn_group_packed(k_rows, p->heads_k, p->dim_v);
    p->q = fattn_group_packed(q_rows, p->heads_q, p->dim);
    p->dq = fattn_group_packed(sum_rows, p->heads_q, p->dim);
    p->o = fattn_group_packed(plan->backward ? q_rows : sum_rows, p->heads_q, p->dim_v);
    p->dout = fattn_group_packed(q_rows, p->heads_q, p->dim_v);
    if (plan->direct) {
        /* Heads of later turns begin further on. */
        const int64_t heads = plan->turns > 1 ? p->heads_q : 0;
        offsets |= heads * l->q.head * fattn_dtype_size(p->dtype);
        offsets |= row * l->q.seq * fattn_dtype_size(p->dtype) | l->pointer_alignment;
        p->q = l->q;
        if (plan->backward) {
            const int64_t size = fattn_dtype_size(plan->problem.dtype_o);
            offsets |= row * (l->o.seq | l->dout.seq) * size;
            offsets |= heads * (l->o.head | l->dout.head) * size;
            p->o = l->o;
            p->dout = l->dout;
        }
    }
    const int64_t lowest = offsets & -offsets;
    p->pointer_alignment = fattn_min64(lowest, 16);
}

/* The problem of a piece as far as it does not depend on the piece's rows and keys. Results and
 * gradients are f32 sums, unless the piece is the only one. */
static fattn_problem common(const fattn_group_plan *plan, bool first)
{
    fattn_problem p = plan->problem;
    p.layout = FATTN_BSHD;
    p.q = p.k = p.v = p.o = p.dout = p.dq = p.dk = p.dv = (fattn_strides){0};
    p.total_q = p.total_k = 0;
    p.dtype_bias = p.features & FATTN_BIAS ? p.dtype_bias : FATTN_DTYPE_DEFAULT;
    p.pointer_alignment = 16;
    p.window_left = p.window_right = -1;
    p.head_offset += p.features & FATTN_DROPOUT ? plan->turn * p.heads_q : 0;
    const bool sinks = first && !(plan->whole.all_queries && plan->group > 0);
    p.features &= ~(FATTN_CAUSAL | FATTN_WINDOW | (sinks ? 0 : FATTN_SINK));
    p.features |= FATTN_SCALE | FATTN_POSITIONS;
    if (plan->backward) {
        p.features |= plan->single ? 0 : FATTN_ACCUMULATE;
        p.outputs &= first ? ~0u : ~FATTN_OUT_DSINK;
    } else {
        p.dtype_o = plan->single ? p.dtype_o : FATTN_F32;
        p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    }
    return p;
}

/* Sets the positions and the window of a piece. If its rows are neighbours in the sequence it keeps
 * the window of the undivided problem, with offsets, so that distances and dropout are right too.
 * Striped rows have only masks: their band becomes a window over indices within the runs. */
static void place(const fattn_group_plan *plan, const fattn_piece *piece, int64_t b,
                  fattn_problem *p, fattn_buffers *buffers)
{
    const bool low = plan->problem.window_left >= 0, high = plan->problem.window_right >= 0;
    buffers->q_offset = piece->q.first;
    buffers->k_offset = piece->k.first;
    buffers->whole_q = fattn_whole_q(&plan->whole, b);
    buffers->whole_k = fattn_whole_k(&plan->whole, b);
    p->window_left = plan->problem.window_left;
    p->window_right = plan->problem.window_right;
    if (plan->whole.split == FATTN_SPLIT_STRIPED) {
        buffers->q_offset = high ? piece->high : low ? piece->low : 0;
        buffers->k_offset = 0;
        buffers->whole_q = buffers->whole_k = -1;
        p->anchor = FATTN_TOP_LEFT;
        p->window_right = high ? 0 : -1;
        p->window_left = !low ? -1 : high ? piece->high - piece->low : 0;
    }
    if (low || high) {
        p->features |= FATTN_WINDOW;
    }
}

/* Without bias, mask, ALiBi and dropout positions matter only through the band of kept pairs. */
static bool is_only_masked(const fattn_problem *p)
{
    return !(p->features & (FATTN_ALIBI | FATTN_BIAS | FATTN_MASK | FATTN_DROPOUT));
}

/*
 * Whether both runs of an owner's keys can be one sequence in one piece. Query i attends to keys of
 * the second run up to i + high. If high >= -1, so that the first query attends to all keys before
 * that run, all queries attend to the whole first run, and one bound describes both.
 */
static bool is_joined(const fattn_group_plan *plan, int64_t owner, int q_run)
{
    const fattn_problem *const p = &plan->problem;
    if (plan->ragged || plan->k_runs == 1 || !is_only_masked(p) || p->window_left >= 0) {
        return false;
    }
    const fattn_piece a = fattn_piece_of(&plan->whole, 0, plan->group, q_run, owner, 0);
    const fattn_piece b = fattn_piece_of(&plan->whole, 0, plan->group, q_run, owner, 1);
    /* A second run without pairs may not have been sent (ring.h). */
    return a.q.count > 0 && a.k.count > 0 && fattn_piece_pairs(&b) > 0 &&
           (p->window_right < 0 || b.high >= -1);
}

/* place() for joined keys. */
static void place_joined(const fattn_group_plan *plan, int64_t owner, int q_run, fattn_problem *p,
                         fattn_buffers *buffers)
{
    const fattn_piece a = fattn_piece_of(&plan->whole, 0, plan->group, q_run, owner, 0);
    const fattn_piece b = fattn_piece_of(&plan->whole, 0, plan->group, q_run, owner, 1);
    p->seqlen_k = a.k.count + b.k.count;
    p->anchor = FATTN_TOP_LEFT;
    buffers->whole_q = buffers->whole_k = -1;
    if (plan->problem.window_right >= 0 && b.high < b.k.count - 1) {
        p->features |= FATTN_WINDOW;
        p->window_right = 0;
        buffers->q_offset = a.k.count + b.high;
    }
}

/* Both runs of queries against one or both runs of an owner's keys, each numbered consecutively:
 * query i attends to key j if j - i <= high. */
typedef struct bound {
    int64_t queries, keys, high;
} bound;

/* Clips a bound on j - i to the range in which it makes a difference for a piece: from none of its
 * pairs to all. */
static int64_t clip(int64_t high, const fattn_piece *piece)
{
    return fattn_max64(fattn_min64(high, piece->k.count - 1), -piece->q.count);
}

/* find_joint() for two halves of one run of queries and one run of keys: the bound of the first
 * half holds for both. */
static bool join_halves(const fattn_group_plan *plan, int64_t owner, bound *found)
{
    const fattn_piece a = fattn_piece_of(&plan->whole, 0, plan->group, 0, owner, 0);
    const fattn_piece b = fattn_piece_of(&plan->whole, 0, plan->group, 1, owner, 0);
    *found = (bound){a.q.count + b.q.count, a.k.count, a.high};
    return a.q.count > 0 && fattn_piece_pairs(&a) + fattn_piece_pairs(&b) > 0;
}

/*
 * Whether both runs of queries can be one piece: whether one bound, with the queries of both runs
 * and the keys of both numbered consecutively, keeps exactly the pairs that each run of queries has
 * with each run of keys. That holds for the rank's own keys, where the bound is the diagonal of the
 * share, and for other owners' keys if all queries attend to the same whole runs. A second run of
 * keys without pairs is left out.
 */
static bool find_joint(const fattn_group_plan *plan, int64_t owner, bound *found)
{
    const fattn_problem *const p = &plan->problem;
    if (plan->q_runs == 1 || !plan->direct || !is_only_masked(p) || p->window_left >= 0) {
        return false;
    }
    if (plan->whole.halves) {
        return join_halves(plan, owner, found);
    }
    fattn_piece pieces[FATTN_RUNS][FATTN_RUNS];
    double pairs[FATTN_RUNS] = {0, 0}; /* of each run of keys */
    for (int n = 0; n < FATTN_RUNS * FATTN_RUNS; n++) {
        fattn_piece *const piece = &pieces[n / FATTN_RUNS][n % FATTN_RUNS];
        *piece =
            fattn_piece_of(&plan->whole, 0, plan->group, n / FATTN_RUNS, owner, n % FATTN_RUNS);
        pairs[n % FATTN_RUNS] += fattn_piece_pairs(piece);
        if (piece->q.count == 0 || piece->k.count == 0) {
            return false;
        }
    }
    const int k_runs = pairs[1] > 0 ? 2 : 1;
    const int64_t queries = pieces[0][0].q.count, keys = pieces[0][0].k.count;
    int64_t high = queries + 2 * keys; /* beyond all */
    high += pieces[1][0].q.count + pieces[0][1].k.count;
    for (int n = 0; n < FATTN_RUNS * k_runs; n++) {
        const fattn_piece *const piece = &pieces[n % FATTN_RUNS][n / FATTN_RUNS];
        const int64_t shift = (n / FATTN_RUNS ? keys : 0) - (n % FATTN_RUNS ? queries : 0);
        if (piece->high < piece->k.count - 1 && piece->high > -piece->q.count) {
            high = piece->high + shift;
        }
    }
    for (int n = 0; n < FATTN_RUNS * k_runs; n++) {
        const fattn_piece *const piece = &pieces[n % FATTN_RUNS][n / FATTN_RUNS];
        const int64_t shift = (n / FATTN_RUNS ? keys : 0) - (n % FATTN_RUNS ? queries : 0);
        if (clip(high - shift, piece) != clip(piece->high, piece)) {
            return false;
        }
    }
    *found = (bound){queries + pieces[1][0].q.count,
                     k_runs == 2 ? keys + pieces[0][1].k.count : keys, high};
    return pairs[0] > 0;
}

/* place() for both runs of queries, with the bound that find_joint() found. */
static void place_joint(const bound *joint, fattn_problem *p, fattn_buffers *buffers)
{
    p->seqlen_q = joint->queries;
    p->seqlen_k = joint->keys;
    p->anchor = FATTN_TOP_LEFT;
    buffers->whole_q = buffers->whole_k = -1;
    if (joint->high < joint->keys - 1) {
        p->features |= FATTN_WINDOW;
        p->window_right = 0;
        buffers->q_offset = joint->high;
    }
}

bool fattn_group_visit(const fattn_group_plan *plan, int lane, int64_t step, int n,
                       fattn_visit *visit)
{
    int64_t owners[FATTN_RUNS] = {-1, -1};
    bound joint;
    for (int run = 0; run < plan->q_runs; run++) {
        owners[run] = fattn_ring_work(&plan->ring, lane, plan->group, step, run, plan->q_runs,
                                      plan->gradients);
    }
    const int q_run = n % plan->q_runs;
    const bool both =
        owners[0] >= 0 && owners[0] == owners[1] && find_joint(plan, owners[0], &joint);
    *visit = (fattn_visit){owners[q_run], both ? FATTN_BOTH : q_run, n / plan->q_runs};
    return visit->owner >= 0 && !(both && n > 0);
}

/* --- Ragged batches --------------------------------------------------------------------------- */

/* The arrays of plan->device_cu: runs of queries, runs of keys by their owners, zeros. */
static int64_t cu_of_keys(const fattn_group_plan *plan, int64_t owner, int k_run)
{
    return plan->q_runs + owner * plan->k_runs + k_run;
}

int64_t fattn_group_cu_count(const fattn_group_plan *plan)
{
    return cu_of_keys(plan, plan->whole.ranks, 0) + 1;
}

static void write_cu(const fattn_group_plan *plan, fattn_side side, int64_t rank, int run,
                     int32_t *cu)
{
    cu[0] = 0;
    for (int64_t b = 0; b < plan->problem.batch; b++) {
        const fattn_run rows = fattn_whole_run(&plan->whole, side, b, rank, run);
        cu[b + 1] = cu[b] + (int32_t)rows.count;
    }
}

void fattn_group_write_cu(const fattn_group_plan *plan, int32_t *cu)
{
    const int64_t step = plan->problem.batch + 1;
    for (int n = 0; n < plan->q_runs; n++) {
        write_cu(plan, FATTN_QUERIES, plan->group, n, cu + n * step);
    }
    for (int64_t owner = 0; owner < plan->whole.ranks; owner++) {
        for (int n = 0; n < plan->k_runs; n++) {
            write_cu(plan, FATTN_KEYS, owner, n, cu + cu_of_keys(plan, owner, n) * step);
        }
    }
    memset(cu + (fattn_group_cu_count(plan) - 1) * step, 0, (size_t)step * sizeof *cu);
}

/* A bound on j - i that is right for all sequences of a piece; scheme.c has refused problems that
 * have none. If a sequence keeps all its pairs, or none, any bound in a range is right for it. */
static int64_t common_bound(const fattn_group_plan *plan, int64_t owner, int q_run, int k_run)
{
    int64_t least = INT64_MIN, most = INT64_MAX;
    for (int64_t b = 0; b < plan->problem.batch; b++) {
        const fattn_piece piece = fattn_piece_of(&plan->whole, b, plan->group, q_run, owner, k_run);
        const int64_t all = piece.k.count - 1, none = -piece.q.count;
        if (piece.q.count == 0 || piece.k.count == 0) {
            continue;
        }
        least = piece.high > none ? fattn_max64(least, fattn_min64(piece.high, all)) : least;
        most = piece.high < all ? fattn_min64(most, fattn_max64(piece.high, none)) : most;
    }
    assert(least <= most);
    return least > INT64_MIN ? least : fattn_min64(most, 0);
}

/* place() for a ragged batch on a device with memory of its own. */
static void place_on_device(const fattn_group_plan *plan, int64_t owner, int q_run, int k_run,
                            bool no_keys, fattn_problem *p, fattn_buffers *buffers)
{
    const int64_t step = plan->problem.batch + 1;
    const int64_t keys = no_keys ? fattn_group_cu_count(plan) - 1 : cu_of_keys(plan, owner, k_run);
    buffers->cu_seqlens_q = plan->device_cu ? plan->device_cu + q_run * step : NULL;
    buffers->cu_seqlens_k = plan->device_cu ? plan->device_cu + keys * step : NULL;
    if (plan->whole.ranks == 1) { /* whole sequences, with the window of the undivided problem */
        p->window_left = plan->problem.window_left;
        p->window_right = plan->problem.window_right;
        p->features |= p->window_left >= 0 || p->window_right >= 0 ? FATTN_WINDOW : 0;
        return;
    }
    p->anchor = FATTN_TOP_LEFT;
    if (plan->problem.window_right >= 0) {
        p->features |= FATTN_WINDOW;
        p->window_right = 0;
        buffers->q_offset = common_bound(plan, owner, q_run, k_run);
    }
}

/* place() for each sequence of a ragged batch, into the plan's arrays. */
static void place_ragged(fattn_group_plan *plan, int64_t owner, int q_run, int k_run, bool no_keys,
                         fattn_problem *p, fattn_buffers *buffers)
{
    if (plan->transport.device_memory) {
        place_on_device(plan, owner, q_run, k_run, no_keys, p, buffers);
        return;
    }
    plan->cu_q[0] = plan->cu_k[0] = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const fattn_piece piece = fattn_piece_of(&plan->whole, b, plan->group, q_run, owner, k_run);
        place(plan, &piece, b, p, buffers);
        plan->cu_q[b + 1] = plan->cu_q[b] + (int32_t)piece.q.count;
        plan->cu_k[b + 1] = plan->cu_k[b] + (no_keys ? 0 : (int32_t)piece.k.count);
        plan->q_offsets[b] = buffers->q_offset;
        plan->k_offsets[b] = buffers->k_offset;
        plan->wholes_q[b] = buffers->whole_q;
        plan->wholes_k[b] = buffers->whole_k;
    }
    buffers->q_offset = buffers->k_offset = 0;
    buffers->whole_q = buffers->whole_k = -1;
    buffers->cu_seqlens_q = plan->cu_q;
    buffers->cu_seqlens_k = plan->cu_k;
    buffers->q_offsets = plan->q_offsets;
    buffers->k_offsets = plan->k_offsets;
    buffers->wholes_q = plan->wholes_q;
    buffers->wholes_k = plan->wholes_k;
}

/* --- The piece of a visit --------------------------------------------------------------------- */

/* Pairs of the piece over the batch: those that the masks keep, and all. */
typedef struct pair_counts {
    double kept, all;
} pair_counts;

static pair_counts count_pairs(const fattn_group_plan *plan, const fattn_visit *visit)
{
    const int64_t kinds = fattn_whole_kinds(&plan->whole);
    pair_counts pairs = {0, 0};
    for (int64_t b = 0; b < kinds; b++) {
        const fattn_piece piece =
            fattn_piece_of(&plan->whole, b, plan->group, visit->q_run, visit->owner, visit->k_run);
        pairs.kept += fattn_piece_pairs(&piece);
        pairs.all += (double)piece.q.count * (double)piece.k.count;
    }
    return pairs;
}

bool fattn_group_has_piece(const fattn_group_plan *plan, const fattn_visit *visit)
{
    const bool first = fattn_group_is_first(plan, visit->owner, visit->k_run);
    if (plan->problem.outputs == FATTN_OUT_DSINK && !first) {
        return false; /* the first pieces compute all of dsink */
    }
    if (visit->q_run == FATTN_BOTH) {
        return true; /* fattn_group_visit() found pairs */
    }
    if (fattn_group_queries(plan, visit->q_run).rows == 0) {
        return false;
    }
    return is_joined(plan, visit->owner, visit->q_run) ? visit->k_run == 0
                                                       : first || count_pairs(plan, visit).kept > 0;
}

static void make_joint(const fattn_group_plan *plan, const fattn_visit *visit, fattn_problem *p,
                       fattn_buffers *buffers)
{
    bound joint = {0, 0, 0};
    const bool found = find_joint(plan, visit->owner, &joint);
    assert(found);
    (void)found;
    lay(plan, visit->owner, visit->q_run, visit->k_run, p);
    place_joint(&joint, p, buffers);
}

void fattn_group_make_piece(fattn_group_plan *plan, const fattn_visit *visit, fattn_problem *p,
                            fattn_buffers *buffers)
{
    const int64_t owner = visit->owner;
    const int q_run = visit->q_run, k_run = visit->k_run;
    assert(fattn_group_has_piece(plan, visit));
    *p = common(plan, fattn_group_is_first(plan, owner, k_run));
    fattn_buffers_init(buffers);
    if (q_run == FATTN_BOTH) {
        make_joint(plan, visit, p, buffers);
        return;
    }
    const pair_counts pairs = count_pairs(plan, visit);
    const fattn_extent q = fattn_group_queries(plan, q_run);
    const fattn_extent k = fattn_group_keys(plan, owner, k_run);
    p->seqlen_q = q.longest;
    p->seqlen_k = pairs.kept > 0 ? k.longest : 0;
    if (plan->ragged) {
        p->total_q = q.rows;
        p->total_k = pairs.kept > 0 ? k.rows : 0;
        place_ragged(plan, owner, q_run, k_run, pairs.kept == 0, p, buffers);
    } else if (is_joined(plan, owner, q_run)) {
        lay(plan, owner, q_run, k_run, p);
        place_joined(plan, owner, q_run, p, buffers);
        return;
    } else {
        lay(plan, owner, q_run, k_run, p);
        const fattn_piece piece = fattn_piece_of(&plan->whole, 0, plan->group, q_run, owner, k_run);
        place(plan, &piece, 0, p, buffers);
        p->bias_stride[3] *= piece.k.stride;
        p->mask_stride[3] *= piece.k.stride;
        p->dbias_stride[3] *= piece.k.stride;
    }
    /* A window cannot express an empty band, and a full band needs no window. */
    if (pairs.kept == 0 || (pairs.kept == pairs.all && !(plan->ragged && plan->whole.ranks == 1))) {
        p->features &= ~FATTN_WINDOW;
        p->window_left = p->window_right = -1;
    }
}
