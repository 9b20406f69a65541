/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies the caller's tensors to the packed rows that a rank computes with, and the results back.
 * In FATTN_SCHEME_RING these are the rank's own rows. If ranks share heads, each *member* of a
 * group of ranks gets the rows of all members for its part of the heads, and returns the results:
 * an all-to-all exchange.
 */
#include "core/distributed/moves.h"
#include "core/integer.h"

/* --- All to all ------------------------------------------------------------------------------- */

/* What the members of a group exchange for a turn. */
typedef enum kind { INPUTS, RESULTS } kind;

static int tensors_of(const fattn_group_plan *plan, const fattn_buffers *b, kind what, int64_t turn,
                      fattn_moved *list)
{
    return what == INPUTS ? fattn_group_inputs(plan, b, turn, list)
                          : fattn_group_results(plan, b, turn, list);
}

/* Their bytes in a message, for a member's rows; 0 if there is no such turn. */
static int64_t bytes_of(const fattn_group_plan *plan, kind what, int64_t turn, int64_t member)
{
    const fattn_buffers none = {.struct_size = sizeof none};
    fattn_moved list[FATTN_TENSORS];
    int64_t bytes = 0;
    const bool there = turn >= 0 && turn < plan->turns;
    const int count = there ? tensors_of(plan, &none, what, turn, list) : 0;
    for (int t = 0; t < count; t++) {
        bytes +=
            fattn_group_stream_bytes(plan, &list[t], fattn_group_rank(plan, plan->group, member));
    }
    return bytes;
}

/* The most bytes over all turns and members: turns that share keys exchange different tensors. */
static int64_t most_bytes(const fattn_group_plan *plan, kind what)
{
    int64_t most = 0;
    for (int64_t m = 0; m < plan->members; m++) {
        for (int64_t turn = 0; turn < plan->turns; turn++) {
            most = fattn_max64(most, bytes_of(plan, what, turn, m));
        }
    }
    return most;
}

/*
 * A message of exchange x has the results of turn x - 2 and, after them, the inputs of turn x.
 * Even and odd exchanges have separate memory, because one is travelling while the other is read or
 * written. Results that have arrived stay until the end, one turn after another; the inputs that
 * came with them are no longer needed when the next results overwrite them.
 *
 * With plan->spans nothing is copied to a message or out of it: inputs travel from the share to the
 * receiver's packed rows of that turn, and results from the packed rows to the receiver's share. A
 * rank's own rows are copied. If each turn has packed rows of its own, the rows of all turns are
 * copied at once, so that a GPU launches one kernel for each tensor.
 */
fattn_slots fattn_group_slots(const fattn_group_plan *plan)
{
    if (plan->members == 1 || plan->spans) {
        return (fattn_slots){0, 0, 0};
    }
    const int64_t in = most_bytes(plan, INPUTS), out = most_bytes(plan, RESULTS);
    const int64_t last = (plan->turns - 1) / 2; /* exchange 2 last has inputs, 2 last + 2 none */
    return (fattn_slots){out, plan->turns > 2 ? in + out : fattn_max64(in, out),
                         last * out + fattn_max64(in, out)};
}

static char *outward_at(const fattn_group_plan *plan, int64_t exchange, int64_t member)
{
    return plan->outward[exchange % 2] + member * plan->slots.outward;
}

static char *inward_at(const fattn_group_plan *plan, int64_t exchange, int64_t member)
{
    const int64_t before = exchange < 2 ? 0 : (exchange - 2) / 2;
    return plan->inward[exchange % 2] + member * plan->slots.inward + before * plan->slots.results;
}

/* The first head, of queries or of keys, that a member computes in a turn. Without other members
 * the buffers already begin at the turn's heads. */
static int64_t first_head(const fattn_group_plan *plan, const fattn_moved *t, int64_t turn,
                          int64_t member)
{
    if (plan->members == 1) {
        return 0;
    }
    return t->side == FATTN_KEYS ? member * plan->heads_k + turn / plan->sharing * t->heads
                                 : member * plan->heads_q + turn * t->heads;
}

/* Adds copies of the listed tensors of a turn between a message and the share (this rank's rows) or
 * the packed rows (the member's rows). */
static fattn_status copy_stream(fattn_copies *copies, const fattn_moved *list, int count,
                                int64_t turn, int64_t member, fattn_place from, fattn_place to,
                                char *stream)
{
    const fattn_group_plan *const plan = copies->plan;
    const bool shares = from == FATTN_SHARE || to == FATTN_SHARE;
    const int64_t rank = fattn_group_rank(plan, plan->group, shares ? plan->member : member);
    fattn_status status = FATTN_OK;
    for (int t = 0; !status && t < count; t++) {
        const int64_t head = first_head(plan, &list[t], turn, member);
        const fattn_spot source = {from, head, stream}, target = {to, head, stream};
        status = fattn_group_copy(copies, &list[t], rank, &source, &target, 1);
        stream += fattn_group_stream_bytes(plan, &list[t], rank);
    }
    return status;
}

/* Adds copies of the rank's own rows of the listed tensors of a turn, or of all turns from the
 * first, between share and packed rows. */
static fattn_status copy_own(fattn_copies *copies, const fattn_moved *list, int count, int64_t turn,
                             int64_t turns, fattn_place from, fattn_place to)
{
    const fattn_group_plan *const plan = copies->plan;
    const int64_t rank = fattn_group_rank(plan, plan->group, plan->member);
    fattn_status status = FATTN_OK;
    for (int t = 0; !status && t < count; t++) {
        const int64_t head = first_head(plan, &list[t], turn, plan->member);
        const fattn_spot source = {from, head, NULL}, target = {to, head, NULL};
        status = fattn_group_copy(copies, &list[t], rank, &source, &target, turns);
    }
    return status;
}

/* Makes the copies that were added; status: of adding them. */
static fattn_status finish(fattn_copies *copies, fattn_status status)
{
    return status ? status : fattn_group_make_copies(copies);
}

fattn_status fattn_group_load_inputs(const fattn_group_plan *plan, const fattn_buffers *b,
                                     int64_t turn)
{
    fattn_moved list[FATTN_TENSORS];
    fattn_copies copies = {.plan = plan};
    const int count = turn < plan->turns ? fattn_group_inputs(plan, b, turn, list) : 0;
    fattn_status status = FATTN_OK;
    for (int64_t m = 0; !status && count && m < plan->members; m++) {
        if (m != plan->member) {
            status = copy_stream(&copies, list, count, turn, m, FATTN_SHARE, FATTN_STREAM,
                                 outward_at(plan, turn, m) + bytes_of(plan, RESULTS, turn - 2, m));
        }
    }
    return finish(&copies, status);
}

fattn_status fattn_group_load_results(const fattn_group_plan *plan, int64_t turn)
{
    const fattn_buffers none = {.struct_size = sizeof none};
    fattn_moved list[FATTN_TENSORS];
    fattn_copies copies = {.plan = plan};
    const int count = turn >= 0 ? fattn_group_results(plan, &none, turn, list) : 0;
    fattn_status status = FATTN_OK;
    for (int64_t m = 0; !status && count && m < plan->members; m++) {
        char *const slot =
            m == plan->member ? inward_at(plan, turn + 2, m) : outward_at(plan, turn + 2, m);
        status = copy_stream(&copies, list, count, turn, m, FATTN_PACKED, FATTN_STREAM, slot);
    }
    return finish(&copies, status);
}

fattn_status fattn_group_store_results(const fattn_group_plan *plan, const fattn_buffers *b)
{
    fattn_copies copies = {.plan = plan};
    fattn_status status = FATTN_OK;
    for (int64_t turn = 0; turn < plan->turns; turn++) {
        fattn_moved list[FATTN_TENSORS];
        const int count = fattn_group_results(plan, b, turn, list);
        for (int64_t m = 0; !status && m < plan->members; m++) {
            status = copy_stream(&copies, list, count, turn, m, FATTN_STREAM, FATTN_SHARE,
                                 inward_at(plan, turn + 2, m));
        }
    }
    return finish(&copies, status);
}

/* --- Spans ------------------------------------------------------------------------------------ */

/* Copies the rank's own inputs or results of a turn; or, if each turn has packed rows, inputs of
 * all turns with the first turn, and results of all turns with the last one. */
static fattn_status copy_turns(const fattn_group_plan *plan, const fattn_buffers *b, kind what,
                               int64_t turn)
{
    fattn_moved list[FATTN_TENSORS];
    fattn_copies copies = {.plan = plan};
    const bool all = plan->sets == plan->turns, there = turn >= 0 && turn < plan->turns;
    const bool moves = there && (!all || turn == (what == INPUTS ? 0 : plan->turns - 1));
    const int64_t first = all ? 0 : turn, turns = all ? plan->turns : 1;
    const int count = moves ? tensors_of(plan, b, what, first, list) : 0;
    const fattn_status status =
        what == INPUTS ? copy_own(&copies, list, count, first, turns, FATTN_SHARE, FATTN_PACKED)
                       : copy_own(&copies, list, count, first, turns, FATTN_PACKED, FATTN_SHARE);
    return finish(&copies, status);
}

fattn_status fattn_group_copy_inputs(const fattn_group_plan *plan, const fattn_buffers *b,
                                     int64_t turn)
{
    return copy_turns(plan, b, INPUTS, turn);
}

fattn_status fattn_group_copy_results(const fattn_group_plan *plan, const fattn_buffers *b,
                                      int64_t turn)
{
    return copy_turns(plan, b, RESULTS, turn);
}

/* The most spans of a message: one for each sequence and run of each tensor. */
static int64_t most_spans(const fattn_group_plan *plan)
{
    const fattn_buffers none = {.struct_size = sizeof none};
    fattn_moved list[FATTN_TENSORS];
    const int64_t tensors = fattn_group_inputs(plan, &none, 0, list) +
                            fattn_group_results(plan, &none, plan->sharing - 1, list);
    return tensors * fattn_split_runs(plan->shares.split) * plan->problem.batch;
}

int64_t fattn_group_span_bytes(const fattn_group_plan *plan)
{
    const int64_t messages = fattn_min64(FATTN_MESSAGES_MAX, 2 * (plan->members - 1));
    return plan->spans ? messages * most_spans(plan) * (int64_t)sizeof(fattn_span) : 0;
}

/* Adds the spans of a turn's tensors, if there is such a turn. Either the rank's share, for the
 * heads of a member, or the packed rows of that member. */
static void list_spans(const fattn_group_plan *plan, const fattn_buffers *b, kind what,
                       int64_t turn, int64_t member, fattn_place place, fattn_span_list *spans)
{
    fattn_moved list[FATTN_TENSORS];
    const bool there = turn >= 0 && turn < plan->turns;
    const int count = there ? tensors_of(plan, b, what, turn, list) : 0;
    const int64_t rows_of = place == FATTN_SHARE ? plan->member : member;
    const int64_t rank = fattn_group_rank(plan, plan->group, rows_of);
    for (int t = 0; t < count; t++) {
        const fattn_spot at = {place, first_head(plan, &list[t], turn, member), NULL};
        fattn_group_list(plan, &list[t], rank, &at, spans);
    }
}

/* Appends a message of exchange x to or from a member, as spans. */
static void add_spans(const fattn_group_plan *plan, const fattn_buffers *b, int64_t x,
                      int64_t member, fattn_direction direction, fattn_message *messages,
                      int *count)
{
    const bool receives = direction == FATTN_RECEIVE;
    fattn_span_list l = {.spans = plan->span_memory + *count * most_spans(plan)};
    list_spans(plan, b, RESULTS, x - 2, member, receives ? FATTN_SHARE : FATTN_PACKED, &l);
    list_spans(plan, b, INPUTS, x, member, receives ? FATTN_PACKED : FATTN_SHARE, &l);
    fattn_group_add_message(messages, count, fattn_group_rank(plan, plan->group, member),
                            FATTN_TAG_MEMBERS, direction, NULL, l.bytes);
    if (l.bytes > 0) {
        messages[*count - 1].spans = l.spans;
        messages[*count - 1].span_count = l.count;
    }
}

/* Appends the messages of exchange x: to the member `distance` after this one, and from the member
 * `distance` before it. */
static void add_exchange(const fattn_group_plan *plan, const fattn_buffers *b, int64_t x,
                         int64_t distance, fattn_message *messages, int *count)
{
    const int64_t members = plan->members, own = plan->member;
    const int64_t to = (own + distance) % members, from = (own - distance + members) % members;
    if (plan->spans) {
        add_spans(plan, b, x, to, FATTN_SEND, messages, count);
        add_spans(plan, b, x, from, FATTN_RECEIVE, messages, count);
        return;
    }
    const int64_t sent = bytes_of(plan, RESULTS, x - 2, to) + bytes_of(plan, INPUTS, x, own);
    const int64_t received = bytes_of(plan, RESULTS, x - 2, own) + bytes_of(plan, INPUTS, x, from);
    fattn_group_add_message(messages, count, fattn_group_rank(plan, plan->group, to),
                            FATTN_TAG_MEMBERS, FATTN_SEND, outward_at(plan, x, to), sent);
    fattn_group_add_message(messages, count, fattn_group_rank(plan, plan->group, from),
                            FATTN_TAG_MEMBERS, FATTN_RECEIVE, inward_at(plan, x, from), received);
}

/* With how many members messages can be exchanged in the group of messages of a computing step. */
static int64_t members_beside(const fattn_group_plan *plan)
{
    return fattn_ring_room(&plan->ring, plan->gradients) / 2;
}

void fattn_group_begin_exchange(const fattn_group_plan *plan, const fattn_buffers *b,
                                int64_t exchange, fattn_message *messages, int *count)
{
    for (int64_t d = 1; d < plan->members && d <= members_beside(plan); d++) {
        add_exchange(plan, b, exchange, d, messages, count);
    }
}

/* Carries the messages of an exchange with the members from `distance` on. */
static fattn_status carry_from(const fattn_group_plan *plan, const fattn_buffers *b,
                               int64_t exchange, int64_t distance)
{
    fattn_status status = FATTN_OK;
    while (!status && distance < plan->members) {
        fattn_message messages[FATTN_MESSAGES_MAX];
        int count = 0;
        for (; count + 2 <= FATTN_MESSAGES_MAX && distance < plan->members; distance++) {
            add_exchange(plan, b, exchange, distance, messages, &count);
        }
        status = fattn_group_carry(plan, messages, count);
    }
    return status;
}

fattn_status fattn_group_end_exchange(const fattn_group_plan *plan, const fattn_buffers *b,
                                      int64_t exchange)
{
    return carry_from(plan, b, exchange, 1 + members_beside(plan));
}

fattn_status fattn_group_exchange(const fattn_group_plan *plan, const fattn_buffers *b,
                                  int64_t exchange)
{
    return carry_from(plan, b, exchange, 1);
}

/* --- Packing ---------------------------------------------------------------------------------- */

fattn_status fattn_group_pack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    fattn_moved list[FATTN_TENSORS];
    fattn_copies copies = {.plan = plan};
    if (plan->spans) {
        return FATTN_OK; /* inputs arrive packed */
    }
    const int count = fattn_group_inputs(plan, b, plan->turn, list);
    fattn_status status = copy_own(&copies, list, count, plan->turn, 1, FATTN_SHARE, FATTN_PACKED);
    for (int64_t m = 0; !status && m < plan->members; m++) {
        if (m != plan->member) {
            status = copy_stream(&copies, list, count, plan->turn, m, FATTN_STREAM, FATTN_PACKED,
                                 inward_at(plan, plan->turn, m) +
                                     bytes_of(plan, RESULTS, plan->turn - 2, plan->member));
        }
    }
    return finish(&copies, status);
}

fattn_status fattn_group_unpack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    fattn_moved list[FATTN_TENSORS];
    fattn_copies copies = {.plan = plan};
    const int count = fattn_group_results(plan, b, plan->turn, list);
    return finish(&copies,
                  copy_own(&copies, list, count, plan->turn, 1, FATTN_PACKED, FATTN_SHARE));
}
