/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of a ring as problems for one device, and the blocks that keys travel in. */
#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/integer.h"

#define BLOCK_ALIGNMENT 64 /* of each tensor in a block, which is what kernels like best */

/* --- Sizes ------------------------------------------------------------------------------------ */

static fattn_extent extent_of(const fattn_group_plan *plan, bool keys, int64_t rank, int run)
{
    const fattn_whole *const whole = &plan->whole;
    const int64_t kinds = fattn_whole_kinds(whole);
    fattn_extent extent = {0, 0};
    for (int64_t b = 0; b < kinds; b++) {
        const int64_t rows = fattn_whole_run(whole, keys, b, rank, run).count;
        extent.rows += rows;
        extent.longest = fattn_max64(extent.longest, rows);
    }
    extent.rows *= plan->ragged ? 1 : whole->problem->batch;
    return extent;
}

fattn_extent fattn_group_queries(const fattn_group_plan *plan, int run)
{
    fattn_extent extent = extent_of(plan, false, plan->rank, run == FATTN_BOTH ? 0 : run);
    if (run == FATTN_BOTH) {
        const fattn_extent second = extent_of(plan, false, plan->rank, 1);
        extent.rows += second.rows;
        extent.longest += second.longest;
    }
    return extent;
}

fattn_extent fattn_group_keys(const fattn_group_plan *plan, int64_t owner, int run)
{
    return extent_of(plan, true, owner, run);
}

static int64_t aligned(int64_t bytes)
{
    return (bytes + BLOCK_ALIGNMENT - 1) / BLOCK_ALIGNMENT * BLOCK_ALIGNMENT;
}

/* A ragged block has its runs one after another; in another, the runs of a sequence lie side by
 * side, so that a piece may have both. */
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
    const uint32_t outputs = plan->problem.outputs;
    return fattn_group_block(plan, owner, outputs & FATTN_OUT_DK ? 4 : 0,
                             outputs & FATTN_OUT_DV ? 4 : 0);
}

char *fattn_group_own_sum(const fattn_group_plan *plan)
{
    return plan->own_sum ? plan->own_sum + plan->whole.slice * plan->own_step : NULL;
}

bool fattn_group_ends_turn(const fattn_group_plan *plan)
{
    return plan->whole.slice == plan->slices - 1;
}

unsigned fattn_group_home_runs(const fattn_group_plan *plan, int lane)
{
    return fattn_ring_sums(&plan->ring, lane, plan->rank, plan->ring.reach[lane][plan->rank]);
}

/* --- Problems --------------------------------------------------------------------------------- */

bool fattn_group_is_first(const fattn_group_plan *plan, int64_t owner, int k_run)
{
    return owner == plan->rank && k_run == 0 && plan->whole.slice == 0;
}

fattn_strides fattn_group_packed(int64_t rows, int64_t heads, int64_t channels)
{
    return (fattn_strides){rows * heads * channels, heads * channels, channels};
}

/* Where q, o and dout are those of the caller, the piece's are where its run begins. */
int64_t fattn_group_row(const fattn_group_plan *plan, int q_run)
{
    return q_run == 1 ? fattn_group_queries(plan, 0).longest : 0;
}

/* The strides of a piece, and the alignment that pointers to its first rows have. */
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
    offsets |= plan->keys_direct && owner == plan->rank ? l->pointer_alignment : 0;
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

/* What all pieces have in common: results and gradients in f32. */
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
    const bool sinks = first && !(plan->whole.all_queries && plan->rank > 0);
    p.features &= ~(FATTN_CAUSAL | FATTN_WINDOW | (sinks ? 0 : FATTN_SINK));
    p.features |= FATTN_SCALE | FATTN_POSITIONS;
    if (plan->backward) {
        p.features |= FATTN_ACCUMULATE;
        p.outputs &= first ? ~0u : ~FATTN_OUT_DSINK;
    } else {
        p.dtype_o = FATTN_F32;
        p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    }
    return p;
}

/* Where a piece stands. Neighbouring rows keep the undivided problem's own words, so that distances
 * and dropout are right too. Striped rows are only masked: their band becomes a window in numbers
 * of the runs. */
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

/* Neither bias nor distances nor dropout: what is left of positions is a band. */
static bool is_only_masked(const fattn_problem *p)
{
    return !(p->features & (FATTN_ALIBI | FATTN_BIAS | FATTN_MASK | FATTN_DROPOUT));
}

/*
 * Both runs of an owner's keys as one sequence. Query i sees keys of the second run up to i + high.
 * If the first query sees the key before that run, all see the whole first run, which lies before
 * it; so no key of it is lost where the runs are joined.
 */
static bool is_joined(const fattn_group_plan *plan, int64_t owner, int q_run)
{
    const fattn_problem *const p = &plan->problem;
    if (plan->ragged || plan->k_runs == 1 || !is_only_masked(p) || p->window_left >= 0) {
        return false;
    }
    const fattn_piece a = fattn_piece_of(&plan->whole, 0, plan->rank, q_run, owner, 0);
    const fattn_piece b = fattn_piece_of(&plan->whole, 0, plan->rank, q_run, owner, 1);
    /* A second run without pairs may not have travelled (ring.h). */
    return a.q.count > 0 && a.k.count > 0 && fattn_piece_pairs(&b) > 0 &&
           (p->window_right < 0 || b.high >= -1);
}

/* In numbers of the joined keys, as in place(). */
static void place_joined(const fattn_group_plan *plan, int64_t owner, int q_run, fattn_problem *p,
                         fattn_buffers *buffers)
{
    const fattn_piece a = fattn_piece_of(&plan->whole, 0, plan->rank, q_run, owner, 0);
    const fattn_piece b = fattn_piece_of(&plan->whole, 0, plan->rank, q_run, owner, 1);
    p->seqlen_k = a.k.count + b.k.count;
    p->anchor = FATTN_TOP_LEFT;
    buffers->whole_q = buffers->whole_k = -1;
    if (plan->problem.window_right >= 0 && b.high < b.k.count - 1) {
        p->features |= FATTN_WINDOW;
        p->window_right = 0;
        buffers->q_offset = a.k.count + b.high;
    }
}

/* Both runs of queries against keys of an owner, from run 0 on: query i sees key j where j - i <=
 * high. */
typedef struct bound {
    int64_t queries, keys, high;
} bound;

/* What a bound of j - i says of a piece: whether it is none of its pairs, all, or which. */
static int64_t clip(int64_t high, const fattn_piece *piece)
{
    return fattn_max64(fattn_min64(high, piece->k.count - 1), -piece->q.count);
}

/* Halves of one run of queries against the one run of keys: the second half's bound is the first's,
 * as many rows further on. */
static bool join_halves(const fattn_group_plan *plan, int64_t owner, bound *found)
{
    const fattn_piece a = fattn_piece_of(&plan->whole, 0, plan->rank, 0, owner, 0);
    const fattn_piece b = fattn_piece_of(&plan->whole, 0, plan->rank, 1, owner, 0);
    *found = (bound){a.q.count + b.q.count, a.k.count, a.high};
    return a.q.count > 0 && fattn_piece_pairs(&a) + fattn_piece_pairs(&b) > 0;
}

/*
 * Whether one bound over both runs of queries and keys, numbered through, says the same of each
 * pair of runs as their own: of own keys, where it is the diagonal of the share; and of others',
 * where all queries see the same whole runs. Of those, the second may be seen by nobody.
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
        *piece = fattn_piece_of(&plan->whole, 0, plan->rank, n / FATTN_RUNS, owner, n % FATTN_RUNS);
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

/* In numbers of the share's queries and the joined keys. */
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
        owners[run] = fattn_ring_work(&plan->ring, lane, plan->rank, step, run, plan->q_runs,
                                      plan->gradients);
    }
    const int q_run = n % plan->q_runs;
    const bool both =
        owners[0] >= 0 && owners[0] == owners[1] && find_joint(plan, owners[0], &joint);
    *visit = (fattn_visit){owners[q_run], both ? FATTN_BOTH : q_run, n / plan->q_runs};
    return visit->owner >= 0 && !(both && n > 0);
}

/* The same for each sequence of a ragged batch: into the plan's arrays. */
static void place_ragged(const fattn_group_plan *plan, int64_t owner, int q_run, int k_run,
                         bool no_keys, fattn_problem *p, fattn_buffers *buffers)
{
    plan->cu_q[0] = plan->cu_k[0] = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const fattn_piece piece = fattn_piece_of(&plan->whole, b, plan->rank, q_run, owner, k_run);
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

bool fattn_group_piece_of(const fattn_group_plan *plan, const fattn_visit *visit, fattn_problem *p,
                          fattn_buffers *buffers)
{
    const int64_t owner = visit->owner;
    const int q_run = visit->q_run, k_run = visit->k_run;
    const bool first = fattn_group_is_first(plan, owner, k_run);
    if (plan->problem.outputs == FATTN_OUT_DSINK && !first) {
        return false; /* dsink is all of the first pieces */
    }
    if (q_run == FATTN_BOTH) {
        bound joint = {0, 0, 0};
        const bool found = find_joint(plan, owner, &joint);
        *p = common(plan, first);
        fattn_buffers_init(buffers);
        lay(plan, owner, q_run, k_run, p);
        place_joint(&joint, p, buffers);
        return found;
    }
    const bool joined = is_joined(plan, owner, q_run);
    const fattn_extent q = fattn_group_queries(plan, q_run);
    const fattn_extent k = fattn_group_keys(plan, owner, k_run);
    const int64_t kinds = fattn_whole_kinds(&plan->whole);
    double pairs = 0;
    for (int64_t b = 0; b < kinds; b++) {
        const fattn_piece piece = fattn_piece_of(&plan->whole, b, plan->rank, q_run, owner, k_run);
        pairs += fattn_piece_pairs(&piece);
    }
    if (q.rows == 0 || (joined ? k_run > 0 : pairs == 0 && !first)) {
        return false;
    }
    *p = common(plan, first);
    p->seqlen_q = q.longest;
    p->seqlen_k = pairs > 0 ? k.longest : 0;
    fattn_buffers_init(buffers);
    if (plan->ragged) {
        p->total_q = q.rows;
        p->total_k = pairs > 0 ? k.rows : 0;
        place_ragged(plan, owner, q_run, k_run, pairs == 0, p, buffers);
    } else if (joined) {
        lay(plan, owner, q_run, k_run, p);
        place_joined(plan, owner, q_run, p, buffers);
        return true;
    } else {
        lay(plan, owner, q_run, k_run, p);
        const fattn_piece piece = fattn_piece_of(&plan->whole, 0, plan->rank, q_run, owner, k_run);
        place(plan, &piece, 0, p, buffers);
        p->bias_stride[3] *= piece.k.stride;
        p->mask_stride[3] *= piece.k.stride;
        p->dbias_stride[3] *= piece.k.stride;
    }
    /* An empty band is no window that a problem can have, and a full one needs none. */
    if (pairs == 0 || (!plan->ragged && pairs == (double)q.longest * (double)k.longest)) {
        p->features &= ~FATTN_WINDOW;
        p->window_left = p->window_right = -1;
    }
    return true;
}
