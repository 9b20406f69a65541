/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each turn of a plan has for itself: packed rows, and whether these are sent as they are; its
 * heads; and, on a device with memory of its own, a stream, so that turns overlap.
 */
#include <string.h>

#include "core/backend.h"
#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/integer.h"
#include "core/memory.h"
#include "core/problem.h"
#include "core/status.h"

/* --- Packed rows ------------------------------------------------------------------------------ */

/* Whether a tensor's rows can be spans: its heads are adjacent, and rows do not overlap. */
static bool has_rows(const fattn_strides *strides, int64_t heads, int64_t channels)
{
    return strides->head == channels && strides->seq >= heads * channels;
}

fattn_span_rule fattn_group_span_rule(const fattn_group_plan *plan)
{
    const fattn_problem *const l = &plan->local;
    const int64_t q = l->heads_q, k = l->heads_k, dim = l->dim, dim_v = l->dim_v;
    const bool tensors = has_rows(&l->q, q, dim) && has_rows(&l->k, k, dim) &&
                         has_rows(&l->v, k, dim_v) && has_rows(&l->o, q, dim_v);
    const uint32_t unwanted = ~l->outputs;
    const bool gradients = has_rows(&l->dout, q, dim_v) &&
                           (unwanted & FATTN_OUT_DQ || has_rows(&l->dq, q, dim)) &&
                           (unwanted & FATTN_OUT_DK || has_rows(&l->dk, k, dim)) &&
                           (unwanted & FATTN_OUT_DV || has_rows(&l->dv, k, dim_v));
    const bool may = plan->transport.spans && plan->shares.split != FATTN_SPLIT_STRIPED &&
                     tensors && (gradients || !plan->backward);
    return !may                            ? FATTN_NO_SPANS
           : plan->transport.device_memory ? FATTN_LARGE_SPANS
                                           : FATTN_ALL_SPANS;
}

/* Whether each result of a turn is written by one piece, and by no other turn. (A piece without
 * pairs would not write the gradients of its keys.) */
static bool is_single(const fattn_group_plan *plan)
{
    return plan->members > 1 && plan->whole.ranks == 1 && !(plan->gradients && plan->sharing > 1) &&
           fattn_whole_pairs(&plan->whole, 0, 0) > 0;
}

/* Whether forward saves what the members exchange. Forward and backward come to the same answer: a
 * turn is one piece in both, and has keys that no other turn has. */
static bool can_save(const fattn_group_plan *plan)
{
    return plan->shares.saves && plan->single && plan->sharing == 1;
}

/* Bytes of a rank's smallest tensor in a turn, for one run of a sequence of mean length. */
static int64_t span_bytes(const fattn_group_plan *plan)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t runs = plan->shares.ranks * fattn_split_runs(plan->shares.split);
    const int64_t rows = plan->ragged ? p->total_q / p->batch : p->seqlen_q;
    const int64_t keys = plan->ragged ? p->total_k / p->batch : p->seqlen_k;
    const int64_t q = rows / runs * p->heads_q, k = keys / runs * p->heads_k;
    return fattn_min64(q, k) * fattn_min64(p->dim, p->dim_v) * fattn_dtype_size(p->dtype);
}

static bool takes_spans(const fattn_group_plan *plan)
{
    const int64_t large = 1 << 16; /* bytes; smaller copies take longer than copying to messages */
    const fattn_span_rule rule = plan->span_rule;
    return plan->single &&
           (rule == FATTN_ALL_SPANS ||
            (rule == FATTN_LARGE_SPANS && (plan->problem.batch == 1 || span_bytes(plan) >= large)));
}

/* Whether turns should overlap, as measured on two H200. In backward without grouped heads the
 * kernels of two concurrent turns slow each other down by more than idle multiprocessors cost. */
static bool pays_to_overlap(const fattn_group_plan *plan)
{
    return !plan->backward || fattn_problem_group(&plan->problem) > 1;
}

fattn_status fattn_group_make_sets(fattn_group_plan *plan)
{
    plan->single = is_single(plan);
    plan->saves = can_save(plan);
    plan->spans = takes_spans(plan);
    plan->sets = !plan->spans ? 1 : plan->memory ? fattn_min64(plan->turns, 2) : plan->turns;
    plan->key_sets = fattn_min64(plan->sets, fattn_max64(plan->turns / plan->sharing, 1));
    plan->overlaps = plan->transport.device_memory && plan->spans && plan->memory == 0 &&
                     plan->turns > 1 && pays_to_overlap(plan);
    const int64_t all = plan->sets + (plan->saves ? plan->turns : 0);
    const size_t bytes = (size_t)all * sizeof *plan->packed;
    fattn_memory_free(plan->packed);
    plan->packed = fattn_memory_alloc(bytes);
    if (!plan->packed) {
        return fattn_fail_memory((int64_t)bytes, "the plan of a group");
    }
    memset(plan->packed, 0, bytes);
    plan->saved = plan->packed + plan->sets;
    return FATTN_OK;
}

fattn_packed fattn_group_packed_at(const fattn_group_plan *plan, int64_t turn)
{
    fattn_packed at = plan->packed[turn % plan->sets];
    const fattn_packed *const keys = &plan->packed[turn / plan->sharing % plan->key_sets];
    at.own = keys->own;
    at.own_sum = keys->own_sum;
    if (plan->saves) {
        const fattn_packed *const saved = &plan->saved[turn];
        at.q[0] = saved->q[0];
        at.lse[0] = saved->lse[0];
        at.own = saved->own;
        (plan->backward ? at.o : at.sum)[0] = saved->o[0];
    }
    return at;
}

/* --- Heads ------------------------------------------------------------------------------------ */

static void shift(void *pointer, int64_t elements, fattn_dtype dtype)
{
    char *at;
    memcpy(&at, pointer, sizeof at);
    if (at) {
        at += elements * fattn_dtype_size(dtype);
        memcpy(pointer, &at, sizeof at);
    }
}

fattn_buffers fattn_group_turn_of(const fattn_group_plan *plan, const fattn_buffers *given)
{
    const fattn_problem *const l = &plan->local;
    const int64_t q = plan->turn * plan->problem.heads_q;
    const int64_t k = plan->turn / plan->sharing * plan->problem.heads_k;
    fattn_buffers b = *given;
    shift(&b.q, q * l->q.head, l->dtype);
    shift(&b.k, k * l->k.head, l->dtype_kv);
    shift(&b.v, k * l->v.head, l->dtype_v);
    shift(&b.o, q * l->o.head, l->dtype_o);
    shift(&b.dout, q * l->dout.head, l->dtype_o);
    shift(&b.dq, q * l->dq.head, l->dtype);
    shift(&b.dk, k * l->dk.head, l->dtype_kv);
    shift(&b.dv, k * l->dv.head, l->dtype_v);
    shift(&b.lse, q * l->seqlen_q, FATTN_F32);
    shift(&b.dlse, q * l->seqlen_q, FATTN_F32);
    shift(&b.bias, q * l->bias_stride[1], l->dtype_bias);
    b.mask += b.mask ? q * l->mask_stride[1] : 0;
    return b;
}

/* --- Streams ---------------------------------------------------------------------------------- */

fattn_status fattn_group_make_streams(fattn_group_plan *plan)
{
    fattn_status status =
        plan->overlaps ? fattn_event_create(plan->device, &plan->turn_ready) : FATTN_OK;
    for (int n = 0; !status && plan->overlaps && n < 2; n++) {
        status = fattn_stream_create(plan->device, &plan->stream[n]);
        status = status ? status : fattn_event_create(plan->device, &plan->turn_done[n]);
    }
    return status;
}

void fattn_group_drop_streams(const fattn_group_plan *plan)
{
    for (int n = 0; n < 2; n++) {
        if (plan->stream[n]) {
            (void)fattn_stream_destroy(plan->device, plan->stream[n]);
        }
        fattn_event_destroy(plan->turn_done[n]);
    }
    fattn_event_destroy(plan->turn_ready);
}

fattn_stream fattn_group_stream(const fattn_group_plan *plan)
{
    return plan->overlaps ? plan->stream[plan->turn % 2] : plan->transport.stream;
}

static fattn_status wait_for(const fattn_group_plan *plan, fattn_stream stream,
                             const fattn_event *event)
{
    return plan->device->backend->stream_wait(plan->device->impl, stream, event->impl);
}

fattn_status fattn_group_begin_turn(const fattn_group_plan *plan)
{
    const fattn_stream messages = plan->transport.stream;
    if (!plan->overlaps) {
        return FATTN_OK;
    }
    fattn_status status = fattn_event_record(plan->turn_ready, messages);
    status = status ? status : wait_for(plan, fattn_group_stream(plan), plan->turn_ready);
    return status || plan->turn == 0
               ? status
               : wait_for(plan, messages, plan->turn_done[(plan->turn - 1) % 2]);
}

fattn_status fattn_group_end_turn(const fattn_group_plan *plan)
{
    return plan->overlaps
               ? fattn_event_record(plan->turn_done[plan->turn % 2], fattn_group_stream(plan))
               : FATTN_OK;
}

fattn_status fattn_group_follow_turns(const fattn_group_plan *plan)
{
    fattn_status first = FATTN_OK;
    for (int n = 0; plan->overlaps && n < 2; n++) {
        fattn_reason_hold(first);
        fattn_status status = fattn_event_record(plan->turn_done[n], plan->stream[n]);
        status = status ? status : wait_for(plan, plan->transport.stream, plan->turn_done[n]);
        status = status ? fattn_stream_synchronize(plan->device, plan->stream[n]) : FATTN_OK;
        fattn_reason_let();
        first = first ? first : status;
    }
    return first;
}
