/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Executing a plan of a group. Shares are packed (exchange.c); in each round messages travel while
 * pieces are computed (attend.c); in FATTN_SCHEME_REDUCE the ranks' results are merged. At the end,
 * when every rank has done its part, results are rounded into the caller's tensors; but results
 * that travel as spans arrive there.
 */
#include <string.h>

#include "core/buffers.h"
#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "core/status.h"

/* The tag of a message is its kind plus KINDS * lane; plus VALUES for values or their gradients, if
 * they do not travel in one message with the keys. */
enum { BLOCK, GRADIENT, HOME, KINDS, VALUES = FATTN_LANES * KINDS };
_Static_assert(2 * VALUES <= FATTN_TAG_MEMBERS, "tags of rounds are apart from the others");

/* --- Sums ------------------------------------------------------------------------------------- */

/* to = from + plus for `count` contiguous floats; NULL stands for zeros. */
static fattn_status move_floats(const fattn_group_plan *plan, void *to, const void *from,
                                const void *plus, int64_t count)
{
    /* As many rows of equal length, which a GPU moves in parallel, and a rest. */
    const int64_t length = 1024, rows = count / length, rest = count - rows * length;
    const fattn_strides strides = {.seq = length};
    const fattn_rows_args many = {.batch = 1,
                                  .rows = rows,
                                  .heads = 1,
                                  .channels = length,
                                  .to = to,
                                  .from = from,
                                  .to_stride = strides,
                                  .from_stride = strides,
                                  .dtype_to = FATTN_F32,
                                  .dtype_from = FATTN_F32,
                                  .plus = plus};
    fattn_rows_args few = many;
    few.rows = 1;
    few.channels = rest;
    few.to = (float *)to + rows * length;
    few.from = from ? (const float *)from + rows * length : NULL;
    few.plus = plus ? (const float *)plus + rows * length : NULL;
    const fattn_status status = rows ? fattn_group_move(plan, &many) : FATTN_OK;
    return status || !rest ? status : fattn_group_move(plan, &few);
}

static fattn_status add(const fattn_group_plan *plan, void *to, const void *from, int64_t count)
{
    return move_floats(plan, to, from, to, count);
}

static fattn_status clear(const fattn_group_plan *plan, void *to, int64_t count)
{
    return move_floats(plan, to, NULL, NULL, count);
}

static int64_t sums_of(const fattn_group_plan *plan, int64_t owner)
{
    return fattn_group_block_sums(plan, owner).bytes / (int64_t)sizeof(float);
}

/* --- Rounds ----------------------------------------------------------------------------------- */

/* A contiguous part of a block. */
typedef struct stretch {
    int64_t at, bytes;
} stretch;

/* The first of some runs of a block. runs, here and below: bit n stands for run n. */
static int first_run(unsigned runs) { return runs == 2 ? 1 : 0; }

/* Where these runs of keys, and of values, are in a block: offsets from block.k[0] and from
 * block.v[0]. */
static void find_keys(const fattn_group_plan *plan, int64_t owner, unsigned runs, stretch found[2])
{
    const fattn_problem *const p = &plan->problem;
    const fattn_block block = fattn_group_block_keys(plan, owner);
    const int n = first_run(runs);
    int64_t rows = 0;
    for (int run = 0; run < plan->k_runs; run++) {
        rows += runs >> run & 1 ? fattn_group_keys(plan, owner, run).rows * p->heads_k : 0;
    }
    found[0] = (stretch){block.k[n], rows * p->dim * fattn_dtype_size(p->dtype_kv)};
    found[1] = (stretch){block.v[n] - block.v[0], rows * p->dim_v * fattn_dtype_size(p->dtype_v)};
}

/* Where these runs of a ragged block, or of gradients, are: one stretch or two, from the beginning
 * of the block. */
static void find_runs(const fattn_group_plan *plan, int64_t owner, unsigned runs, bool sums,
                      stretch found[2])
{
    const fattn_problem *const p = &plan->problem;
    const fattn_block block =
        sums ? fattn_group_block_sums(plan, owner) : fattn_group_block_keys(plan, owner);
    const bool all = runs == 3 || plan->k_runs == 1;
    const int n = first_run(runs);
    found[0] = (stretch){0, runs ? block.bytes : 0};
    found[1] = (stretch){0, 0};
    if (all || runs == 0) {
        return;
    }
    if (plan->ragged) {
        const int64_t end = n ? block.bytes : block.k[1];
        found[0] = (stretch){block.k[n], end - block.k[n]};
        return;
    }
    const int64_t rows = fattn_group_keys(plan, owner, n).rows * p->heads_k;
    found[0] = (stretch){block.k[n], rows * p->dim * (p->outputs & FATTN_OUT_DK ? 4 : 0)};
    found[1] = (stretch){block.v[n], rows * p->dim_v * (p->outputs & FATTN_OUT_DV ? 4 : 0)};
}

/* Appends messages to or from the rank of group `peer` that has the same heads as this rank. */
static void add_ring(const fattn_group_plan *plan, fattn_message *messages, int *count,
                     int64_t peer, int tag, fattn_direction direction, char *const data[2],
                     const stretch found[2])
{
    for (int n = 0; n < 2; n++) {
        fattn_group_add_message(messages, count, fattn_group_rank(plan, peer, plan->member),
                                tag + n * VALUES, direction, data[n] + found[n].at, found[n].bytes);
    }
}

/* Appends the messages of these runs of an owner's keys and values. They are two, because the
 * sender may have them in the caller's tensors while the receiver has a block. In ragged batches
 * both have a block, and one message suffices. */
static void add_keys(const fattn_group_plan *plan, fattn_message *messages, int *count,
                     int64_t peer, int tag, fattn_direction direction, const fattn_held *keys,
                     int64_t owner, unsigned runs)
{
    stretch found[2];
    char *const data[] = {keys->k, plan->ragged ? keys->k : keys->v};
    if (plan->ragged) {
        find_runs(plan, owner, runs, false, found);
    } else {
        find_keys(plan, owner, runs, found);
    }
    add_ring(plan, messages, count, peer, tag, direction, data, found);
}

/* Appends the messages of these runs of an owner's gradients. */
static void add_gradients(const fattn_group_plan *plan, fattn_message *messages, int *count,
                          int64_t peer, int tag, fattn_direction direction, char *sums,
                          int64_t owner, unsigned runs)
{
    stretch found[2];
    find_runs(plan, owner, runs, true, found);
    add_ring(plan, messages, count, peer, tag, direction, (char *[]){sums, sums}, found);
}

/* to += from for these runs of an owner's gradients. */
static fattn_status add_sums(const fattn_group_plan *plan, char *to, const char *from,
                             int64_t owner, unsigned runs)
{
    stretch found[2];
    fattn_status status = FATTN_OK;
    find_runs(plan, owner, runs, true, found);
    for (int n = 0; !status && n < 2; n++) {
        status = add(plan, to + found[n].at, from + found[n].at,
                     found[n].bytes / (int64_t)sizeof(float));
    }
    return status;
}

/* sums = 0 for these runs of an owner's gradients. */
static fattn_status clear_sums(const fattn_group_plan *plan, char *sums, int64_t owner,
                               unsigned runs)
{
    stretch found[2];
    fattn_status status = FATTN_OK;
    find_runs(plan, owner, runs, true, found);
    for (int n = 0; !status && n < 2; n++) {
        status = clear(plan, sums + found[n].at, found[n].bytes / (int64_t)sizeof(float));
    }
    return status;
}

/* The keys and values that a rank computes with in step t of a lane. */
static fattn_held keys_of(const fattn_group_plan *plan, const fattn_buffers *given, int lane,
                          int64_t step)
{
    const bool own = step == 0 || step > plan->ring.last_step;
    if (own && plan->keys_direct) {
        return (fattn_held){(char *)given->k, (char *)given->v};
    }
    const int64_t owner =
        own ? plan->group : fattn_ring_owner(&plan->ring, lane, plan->group, step);
    char *const block = own ? plan->at.own : plan->lane[lane][step % 2];
    return block && owner >= 0
               ? (fattn_held){block, block + fattn_group_block_keys(plan, owner).v[0]}
               : (fattn_held){NULL, NULL};
}

/* Appends the messages that travel in a lane while step t is computed (ring.h). */
static void add_messages(const fattn_group_plan *plan, const fattn_buffers *given, int lane,
                         int64_t step, fattn_message *messages, int *count)
{
    const fattn_ring *const ring = &plan->ring;
    const fattn_ring_messages m = fattn_ring_step(ring, lane, plan->group, step);
    const int64_t held_of = step ? fattn_ring_owner(ring, lane, plan->group, step) : plan->group;
    const int64_t next = fattn_ring_owner(ring, lane, plan->group, step + 1);
    const int64_t before = fattn_ring_owner(ring, lane, plan->group, step - 1);
    const int tag = lane * KINDS;
    if (m.send_to >= 0) {
        const fattn_held keys = keys_of(plan, given, lane, step);
        add_keys(plan, messages, count, m.send_to, tag + BLOCK, FATTN_SEND, &keys, held_of,
                 fattn_ring_keys(ring, lane, held_of, step + 1));
    }
    if (m.receive_from >= 0) {
        const fattn_held keys = keys_of(plan, given, lane, step + 1);
        add_keys(plan, messages, count, m.receive_from, tag + BLOCK, FATTN_RECEIVE, &keys, next,
                 fattn_ring_keys(ring, lane, next, step + 1));
    }
    if (plan->gradients && m.gradient_to >= 0) {
        add_gradients(plan, messages, count, m.gradient_to,
                      tag + (m.gradient_to == before ? HOME : GRADIENT), FATTN_SEND,
                      plan->sending[lane], before, fattn_ring_sums(ring, lane, before, step - 1));
    }
    if (plan->gradients && m.gradient_from >= 0) {
        add_gradients(plan, messages, count, m.gradient_from, tag + GRADIENT, FATTN_RECEIVE,
                      plan->arriving[lane], held_of,
                      fattn_ring_sums(ring, lane, held_of, step - 1));
    }
    if (plan->gradients && m.home_from >= 0) {
        add_gradients(plan, messages, count, m.home_from, tag + HOME, FATTN_RECEIVE,
                      plan->home[lane], plan->group, fattn_group_home_runs(plan, lane));
    }
}

static fattn_status compute(fattn_group_plan *plan, const fattn_buffers *given, int64_t step)
{
    fattn_status status = FATTN_OK;
    for (int lane = 0; !status && lane < FATTN_LANES; lane++) {
        const bool own = step == 0 || step > plan->ring.last_step;
        const int64_t owner = fattn_ring_owner(&plan->ring, lane, plan->group, step);
        char *const sums = own ? fattn_group_own_sum(plan) : plan->share[lane];
        if (!own && owner >= 0 && plan->gradients) {
            status = clear_sums(plan, sums, owner, fattn_ring_sums(&plan->ring, lane, owner, step));
        }
        const fattn_held keys = keys_of(plan, given, lane, step);
        status = status ? status : fattn_group_attend(plan, given, lane, step, &keys, sums);
    }
    return status;
}

/* After a round: adds the sums that arrived to this rank's shares, which are sent in the next
 * round. If gradients are rounded right after the last round, a sum that came home in that round is
 * added while rounding (plan->late) instead of here. */
static fattn_status collect(fattn_group_plan *plan, int64_t step)
{
    fattn_status status = FATTN_OK;
    for (int lane = 0; !status && plan->gradients && lane < FATTN_LANES; lane++) {
        const fattn_ring_messages m = fattn_ring_step(&plan->ring, lane, plan->group, step);
        if (m.gradient_from >= 0) {
            const int64_t owner = fattn_ring_owner(&plan->ring, lane, plan->group, step);
            status = add_sums(plan, plan->share[lane], plan->arriving[lane], owner,
                              fattn_ring_sums(&plan->ring, lane, owner, step - 1));
        }
        const bool rounded = plan->direct && plan->turn % plan->sharing == plan->sharing - 1;
        if (m.home_from >= 0 && rounded && plan->late < 0 && step == plan->rounds - 1) {
            plan->late = lane;
        } else if (!status && m.home_from >= 0) {
            status = add_sums(plan, fattn_group_own_sum(plan), plan->home[lane], plan->group,
                              fattn_group_home_runs(plan, lane));
        }
        char *const sent = plan->sending[lane]; /* the same buffer if the lane has one step */
        plan->sending[lane] = plan->share[lane];
        plan->share[lane] = sent;
    }
    return status;
}

/* dbias = 0. An axis that is summed over has one entry. */
static fattn_status clear_dbias(const fattn_group_plan *plan, float *dbias)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t *const stride = p->dbias_stride;
    const int64_t keys = stride[3] ? p->seqlen_k : 1;
    const fattn_strides strides = {.batch = stride[1], .seq = stride[2], .head = stride[3]};
    fattn_status status = FATTN_OK;
    for (int64_t b = 0; !status && b < (stride[0] ? p->batch : 1); b++) {
        const fattn_rows_args args = {.batch = stride[1] ? p->heads_q : 1,
                                      .rows = plan->local.seqlen_q,
                                      .heads = stride[3] == 1 ? 1 : keys,
                                      .channels = stride[3] == 1 ? keys : 1,
                                      .to = dbias + b * stride[0],
                                      .to_stride = strides,
                                      .dtype_to = FATTN_F32,
                                      .dtype_from = FATTN_F32};
        status = fattn_group_move(plan, &args);
    }
    return status;
}

/* Clears the sums to which pieces add. */
static fattn_status begin(const fattn_group_plan *plan, const fattn_buffers *given)
{
    const fattn_problem *const p = &plan->problem;
    const bool begins = plan->whole.slice == 0;
    const bool dsink = p->outputs & FATTN_OUT_DSINK && !plan->single;
    fattn_status status = plan->turn == 0 && begins && dsink
                              ? clear(plan, plan->dsink, plan->transport.ranks * plan->heads_q)
                              : FATTN_OK;
    const int both = plan->q_runs == 2 && !plan->ragged ? FATTN_BOTH : 0;
    const bool sums = plan->backward && !plan->single;
    for (int n = 0; !status && begins && sums && n < (both ? 1 : plan->q_runs); n++) {
        const int64_t rows = fattn_group_queries(plan, both ? both : n).rows * p->heads_q;
        status = clear(plan, plan->at.sum[n], rows * p->dim);
    }
    if (!status && sums && plan->gradients && plan->turn % plan->sharing == 0) {
        status = clear(plan, fattn_group_own_sum(plan), sums_of(plan, plan->group));
    }
    return status || !(p->outputs & FATTN_OUT_DBIAS) ? status : clear_dbias(plan, given->dbias);
}

/* Whether the first messages send packed keys, so that packing must come before them. */
static bool sends_packed(const fattn_group_plan *plan)
{
    return plan->ring.last_step > 0 && !plan->keys_direct;
}

/* Tells all ranks of an error, if there is one. */
static fattn_status tell(const fattn_group_plan *plan, fattn_status status)
{
    if (status) {
        plan->transport.abort(plan->transport.user, fattn_last_reason());
    }
    return status;
}

static fattn_status start(const fattn_group_plan *plan, const fattn_message *messages, int count)
{
    const fattn_transport *const t = &plan->transport;
    return count ? t->start(t->user, messages, count) : FATTN_OK;
}

/* Waits for messages that were started. status: of the work since then; all ranks are told of an
 * error before this rank waits. */
static fattn_status await(const fattn_group_plan *plan, const fattn_message *messages, int count,
                          fattn_status status)
{
    const fattn_transport *const t = &plan->transport;
    (void)tell(plan, status);
    fattn_reason_hold(status);
    const fattn_status waited = count ? t->wait(t->user, messages, count, plan->timeout) : FATTN_OK;
    fattn_reason_let();
    return status ? status : waited;
}

static fattn_status go_round(fattn_group_plan *plan, const fattn_buffers *given, int64_t step)
{
    const bool exchanges = plan->members > 1 && step == plan->ring.last_step;
    /* At most seven in each lane: keys and values sent and received, and three sums; or ten in one
     * lane if runs of sums travel separately too (fattn_ring.trims). */
    fattn_message messages[FATTN_MESSAGES_MAX];
    int count = 0;
    for (int lane = 0; lane < FATTN_LANES; lane++) {
        add_messages(plan, given, lane, step, messages, &count);
    }
    if (exchanges) {
        fattn_group_begin_exchange(plan, given, plan->turn + 1, messages, &count);
    }
    fattn_status status = step == 0 ? fattn_group_begin_turn(plan) : FATTN_OK;
    status = status ? status : start(plan, messages, count);
    const bool started = !status;
    if (step == 0) { /* while the first messages travel */
        status = status || sends_packed(plan) ? status : fattn_group_pack(plan, given);
        status = status ? status : begin(plan, given);
    }
    status = status ? status : compute(plan, given, step);
    status = status ? status : fattn_group_end_turn(plan);
    if (exchanges && !status) {
        status = plan->spans ? fattn_group_copy_inputs(plan, given, plan->turn + 2)
                             : fattn_group_load_inputs(plan, given, plan->turn + 2);
    }
    status = started ? await(plan, messages, count, status) : status;
    return status ? status : collect(plan, step);
}

/* --- Executing -------------------------------------------------------------------------------- */

/* The caller's buffers, checked against the rank's own shares. */
static fattn_status check(const fattn_group_plan *plan, const fattn_buffers *given,
                          fattn_buffers *checked)
{
    fattn_buffers b;
    fattn_status status = fattn_buffers_read(&b, given);
    if (!status && (b.cu_seqlens_q || b.cu_seqlens_k)) {
        status = fattn_fail(FATTN_INVALID_ARGUMENT,
                            "%s is set: a group takes its lengths when it is planned",
                            b.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k");
    }
    if (status) {
        return status;
    }
    b.cu_seqlens_q = plan->local_q;
    b.cu_seqlens_k = plan->local_k;
    status = plan->saves && plan->backward ? fattn_buffers_normalise_rest(&plan->local, &b, checked)
                                           : fattn_buffers_normalise(&plan->local, &b, checked);
    return status ? status : fattn_buffers_check_unused(plan->local.op, plan->features, checked);
}

/* Checks where rows are saved, and tells the plan. */
static fattn_status take_saved(fattn_group_plan *plan, const fattn_buffers *checked, void *saved)
{
    enum { ALIGNMENT = 64 };
    const int64_t bytes = plan->saved_bytes;
    if (!plan->saves) {
        return FATTN_OK;
    }
    if (!saved) {
        return fattn_fail(FATTN_NULL_POINTER,
                          "saved is NULL: a plan that saves %lld bytes runs by "
                          "fattn_group_execute_saved()",
                          (long long)bytes);
    }
    if ((uintptr_t)saved % ALIGNMENT) {
        return fattn_fail(FATTN_MISALIGNED, "saved is %p, not a multiple of %d bytes", saved,
                          (int)ALIGNMENT);
    }
    if (plan->saved_at != saved) {
        plan->saved_at = saved;
        fattn_group_lay_out(plan);
    }
    return fattn_buffers_check_apart(&plan->local, checked, "saved", saved, bytes);
}

/* Sums dSink of each head over the ranks that have rows of it, in the same order on every rank. */
static fattn_status sum_dsink(const fattn_group_plan *plan, float *dsink)
{
    const int64_t heads = plan->heads_q;
    fattn_status status = clear(plan, dsink, heads * plan->members);
    for (int64_t m = 0; m < plan->members; m++) {
        for (int64_t r = 0; !status && r < plan->whole.ranks; r++) {
            const float *const from = plan->dsink + fattn_group_rank(plan, r, m) * heads;
            status = add(plan, dsink + m * heads, from, heads);
        }
    }
    return status;
}

static fattn_status go_rounds(fattn_group_plan *plan, const fattn_buffers *b)
{
    fattn_status status = sends_packed(plan) ? fattn_group_pack(plan, b) : FATTN_OK;
    plan->stored_runs = 0;
    plan->late = -1;
    for (int64_t step = 0; !status && step < plan->rounds; step++) {
        status = go_round(plan, b, step);
    }
    return status;
}

/* The last messages of an execution: outputs are written only after them, unless they arrive as
 * spans. */
static fattn_status gather_dsink(const fattn_group_plan *plan)
{
    const int64_t bytes = plan->heads_q * (int64_t)sizeof(float);
    const bool dsink = plan->problem.outputs & FATTN_OUT_DSINK;
    return dsink ? fattn_group_gather(plan, plan->dsink, bytes) : FATTN_OK;
}

/* Computes a turn if ranks do not share heads, against a slice of keys or all keys. */
static fattn_status execute_turn(fattn_group_plan *plan, const fattn_buffers *given)
{
    const fattn_buffers b = fattn_group_turn_of(plan, given);
    fattn_status status = go_rounds(plan, &b);
    if (!status && plan->whole.all_queries) {
        status = fattn_group_reduce(plan, &b);
    }
    if (!status && plan->turn == plan->turns - 1 && fattn_group_ends_turn(plan)) {
        status = gather_dsink(plan);
    }
    return status ? status : fattn_group_unpack(plan, &b);
}

/* Computes a turn if members exchange heads: meanwhile the results of the previous turn and the
 * inputs of the next one travel. */
static fattn_status execute_exchanged_turn(fattn_group_plan *plan, const fattn_buffers *b)
{
    const int64_t before = plan->turn - 1;
    fattn_status status = plan->spans ? fattn_group_copy_results(plan, b, before)
                                      : fattn_group_load_results(plan, before);
    status = status ? status : go_rounds(plan, b);
    return status ? status : fattn_group_end_exchange(plan, b, plan->turn + 1);
}

/* An exchange of spans during which the rank copies its own rows: the inputs of all sets of packed
 * rows before the first turn, or results after the last one. */
static fattn_status exchange_spans(const fattn_group_plan *plan, const fattn_buffers *b,
                                   int64_t exchange)
{
    fattn_message messages[FATTN_MESSAGES_MAX];
    int count = 0;
    fattn_group_begin_exchange(plan, b, exchange, messages, &count);
    fattn_status status = start(plan, messages, count);
    if (status) {
        return status;
    }
    for (int64_t turn = 0; !status && exchange == 0 && turn < plan->sets; turn++) {
        status = fattn_group_copy_inputs(plan, b, turn);
    }
    if (!status && exchange > 0) {
        status = fattn_group_copy_results(plan, b, plan->turns - 1);
    }
    status = await(plan, messages, count, status);
    return status ? status : fattn_group_end_exchange(plan, b, exchange);
}

static fattn_status begin_exchanges(const fattn_group_plan *plan, const fattn_buffers *b)
{
    if (plan->spans) {
        return exchange_spans(plan, b, 0);
    }
    fattn_status status = fattn_group_load_inputs(plan, b, 0);
    status = status ? status : fattn_group_exchange(plan, b, 0);
    return status ? status : fattn_group_load_inputs(plan, b, 1);
}

static fattn_status end_exchanges(const fattn_group_plan *plan, const fattn_buffers *b)
{
    const int64_t last = plan->turns - 1;
    if (plan->spans) {
        fattn_status status = fattn_group_follow_turns(plan);
        status = status ? status : exchange_spans(plan, b, last + 2);
        return status ? status : gather_dsink(plan);
    }
    fattn_status status = fattn_group_load_results(plan, last);
    status = status ? status : fattn_group_exchange(plan, b, last + 2);
    status = status ? status : gather_dsink(plan);
    return status ? status : fattn_group_store_results(plan, b);
}

/* Records the event after the execution's work, even if it failed: the plan's memory is in use
 * until then. */
static fattn_status finish(const fattn_group_plan *plan, fattn_status status)
{
    const fattn_stream stream = plan->transport.stream;
    if (!plan->finished) {
        return status;
    }
    fattn_reason_hold(status);
    const bool noted = fattn_group_follow_turns(plan) == FATTN_OK &&
                       fattn_event_record(plan->finished, stream) == FATTN_OK;
    const fattn_status ended = noted ? FATTN_OK : fattn_stream_synchronize(plan->device, stream);
    fattn_reason_let();
    return status ? status : ended;
}

fattn_status fattn_group_execute(fattn_group_plan *plan, const fattn_buffers *buffers)
{
    return fattn_group_execute_saved(plan, buffers, NULL);
}

fattn_status fattn_group_execute_saved(fattn_group_plan *plan, const fattn_buffers *buffers,
                                       void *saved)
{
    if (!plan) {
        return fattn_fail(FATTN_NULL_POINTER, "plan is NULL");
    }
    fattn_buffers b;
    fattn_status status = check(plan, buffers, &b);
    status = status ? status : take_saved(plan, &b, saved);
    const bool exchanged = plan->members > 1, dsink = plan->problem.outputs & FATTN_OUT_DSINK;
    status = status || !exchanged ? status : begin_exchanges(plan, &b);
    for (plan->turn = 0; !status && plan->turn < plan->turns; plan->turn++) {
        plan->at = fattn_group_packed_at(plan, plan->turn);
        for (int64_t slice = 0; !status && slice < plan->slices; slice++) {
            plan->shares.slice = plan->whole.slice = slice;
            status = (exchanged ? execute_exchanged_turn : execute_turn)(plan, &b);
        }
    }
    status = status || !exchanged ? status : end_exchanges(plan, &b);
    status = status || !dsink ? status : sum_dsink(plan, b.dsink);
    return finish(plan, tell(plan, status));
}
