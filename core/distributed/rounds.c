/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Executing a plan of a group: shares are packed, rounds of messages and pieces go by, results are
 * rounded into the caller's tensors at the end, once every rank has done its part.
 */
#include <string.h>

#include "core/band.h"
#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "core/status.h"

/* Messages of a round: at most five in each lane. */
typedef struct group_of_messages {
    fattn_message at[FATTN_MESSAGES_MAX];
    int count;
} group_of_messages;

enum { BLOCK, GRADIENT, HOME, KINDS };

/* --- Packing ---------------------------------------------------------------------------------- */

/* A tensor of the rank's share as the caller has it. */
typedef struct tensor {
    char *data;
    fattn_strides strides;
    int64_t heads, channels;
    fattn_dtype dtype;
    bool keys; /* rows are keys */
} tensor;

/* Rows of one sequence's run: where they begin in the caller's tensor. */
typedef struct rows {
    int64_t batch, first, count;
} rows;

static rows rows_of(const fattn_group_plan *plan, bool keys, int64_t b, int run)
{
    const fattn_whole *const w = &plan->whole;
    const int64_t length = keys ? fattn_whole_k(w, b) : fattn_whole_q(w, b);
    const int32_t *const starts = keys ? plan->local_k : plan->local_q;
    rows r = {plan->ragged ? 0 : b, plan->ragged ? starts[b] : 0, 0};
    for (int n = 0; n < run; n++) {
        r.first += fattn_split_run(w->split, length, w->ranks, plan->rank, n).count;
    }
    r.count = fattn_split_run(w->split, length, w->ranks, plan->rank, run).count;
    return r;
}

static void round_row(const float *from, fattn_dtype dtype, void *to, int64_t channels)
{
    if (dtype == FATTN_F32) {
        memcpy(to, from, (size_t)channels * sizeof *from);
        return;
    }
    uint16_t *const narrow = to;
    for (int64_t c = 0; c < channels; c++) {
        narrow[c] = dtype == FATTN_F16 ? fattn_f16_from_f32(from[c]) : fattn_bf16_from_f32(from[c]);
    }
}

/* Copies a run between the caller's tensor and packed rows: into them as it is, or f32 out of them,
 * rounded. */
static void copy_run(const fattn_group_plan *plan, const tensor *t, int run, void *packed, bool out)
{
    const int64_t size = fattn_dtype_size(t->dtype);
    const int64_t step = t->channels * (out ? 4 : size);
    char *at = packed;
    for (int64_t b = 0; b < plan->problem.batch; b++) {
        const rows r = rows_of(plan, t->keys, b, run);
        for (int64_t i = 0; i < r.count; i++) {
            char *row =
                t->data + (r.batch * t->strides.batch + (r.first + i) * t->strides.seq) * size;
            for (int64_t h = 0; h < t->heads; h++, at += step, row += t->strides.head * size) {
                if (out) {
                    round_row((const float *)at, t->dtype, row, t->channels);
                } else {
                    memcpy(at, row, (size_t)step);
                }
            }
        }
    }
}

/* lse or dlse: (B, Hq, rows), ragged (Hq, all rows), there and here. */
static void copy_lse(const fattn_group_plan *plan, float *lse, int run, float *packed, bool out)
{
    const int64_t heads = plan->problem.heads_q;
    const int64_t total = plan->ragged ? plan->local.total_q : plan->local.seqlen_q;
    const int64_t run_total = fattn_group_queries(plan, run).rows;
    int64_t before = 0;
    for (int64_t b = 0; b < plan->problem.batch; b++) {
        const rows r = rows_of(plan, false, b, run);
        for (int64_t h = 0; h < heads; h++) {
            float *const there = lse + (r.batch * heads + h) * total + r.first;
            float *const here =
                packed + (plan->ragged ? h * run_total + before : (b * heads + h) * r.count);
            memcpy(out ? there : here, out ? here : there, (size_t)r.count * sizeof *lse);
        }
        before += r.count;
    }
}

static void pack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    const fattn_problem *const p = &plan->local;
    const int64_t hq = p->heads_q, hk = p->heads_k;
    const fattn_block block = fattn_group_block_keys(plan, plan->rank);
    const tensor q = {(char *)b->q, p->q, hq, p->dim, p->dtype, false};
    const tensor k = {(char *)b->k, p->k, hk, p->dim, p->dtype_kv, true};
    const tensor v = {(char *)b->v, p->v, hk, p->dim_v, p->dtype_v, true};
    const tensor o = {b->o, p->o, hq, p->dim_v, p->dtype_o, false};
    const tensor dout = {(char *)b->dout, p->dout, hq, p->dim_v, p->dtype_o, false};
    for (int n = 0; n < plan->runs; n++) {
        copy_run(plan, &q, n, plan->q[n], false);
        copy_run(plan, &k, n, plan->own + block.k[n], false);
        copy_run(plan, &v, n, plan->own + block.v[n], false);
        if (plan->backward) {
            copy_run(plan, &o, n, plan->o[n], false);
            copy_run(plan, &dout, n, plan->dout[n], false);
            copy_lse(plan, b->lse, n, plan->lse[n], false);
            const int64_t queries = fattn_group_queries(plan, n).rows * hq;
            memset(plan->sum[n], 0, (size_t)(queries * p->dim) * sizeof(float));
        }
        if (p->features & FATTN_DLSE) {
            copy_lse(plan, (float *)b->dlse, n, plan->dlse[n], false);
        }
    }
    memset(plan->dsink, 0, (size_t)(plan->whole.ranks * hq) * sizeof(float));
    if (plan->gradients) {
        memset(plan->own_sum, 0, (size_t)fattn_group_block_sums(plan, plan->rank).bytes);
    }
}

static void unpack(const fattn_group_plan *plan, const fattn_buffers *b)
{
    const fattn_problem *const p = &plan->local;
    const fattn_block block = fattn_group_block_sums(plan, plan->rank);
    const tensor o = {b->o, p->o, p->heads_q, p->dim_v, p->dtype_o, false};
    const tensor dq = {b->dq, p->dq, p->heads_q, p->dim, p->dtype, false};
    const tensor dk = {b->dk, p->dk, p->heads_k, p->dim, p->dtype_kv, true};
    const tensor dv = {b->dv, p->dv, p->heads_k, p->dim_v, p->dtype_v, true};
    for (int n = 0; n < plan->runs; n++) {
        if (p->outputs & FATTN_OUT_O) {
            copy_run(plan, &o, n, plan->sum[n], true);
        }
        if (p->outputs & FATTN_OUT_LSE) {
            copy_lse(plan, b->lse, n, plan->lse[n], true);
        }
        if (p->outputs & FATTN_OUT_DQ) {
            copy_run(plan, &dq, n, plan->sum[n], true);
        }
        if (p->outputs & FATTN_OUT_DK) {
            copy_run(plan, &dk, n, plan->own_sum + block.k[n], true);
        }
        if (p->outputs & FATTN_OUT_DV) {
            copy_run(plan, &dv, n, plan->own_sum + block.v[n], true);
        }
    }
    for (int64_t h = 0; p->outputs & FATTN_OUT_DSINK && h < p->heads_q; h++) {
        float sum = 0;
        for (int64_t r = 0; r < plan->whole.ranks; r++) { /* the same order on every rank */
            sum += plan->dsink[r * p->heads_q + h];
        }
        ((float *)b->dsink)[h] = sum;
    }
}

/* --- Pieces ----------------------------------------------------------------------------------- */

static const fattn_plan *plan_of(const fattn_group_plan *plan, const fattn_problem *p)
{
    int64_t n = 0;
    while (memcmp(&plan->pieces[n].problem, p, sizeof *p) != 0) {
        n++; /* planned, by the same walk */
    }
    return plan->pieces[n].plan;
}

/* Adds the part of a piece to what there is of its run of queries. */
static fattn_status merge(const fattn_group_plan *plan, int q_run)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t total = fattn_group_queries(plan, q_run).rows;
    const int64_t batch = plan->ragged ? 1 : p->batch, length = total / batch;
    const fattn_strides strides = {
        .batch = length * p->heads_q * p->dim_v, .seq = p->heads_q * p->dim_v, .head = p->dim_v};
    const fattn_merge_args args = {
        .struct_size = sizeof args,
        .batch = batch,
        .heads = p->heads_q,
        .seqlen = length,
        .dim_v = p->dim_v,
        .o1 = plan->sum[q_run],
        .lse1 = plan->lse[q_run],
        .o2 = plan->part_o,
        .lse2 = plan->part_lse,
        .o = plan->sum[q_run],
        .lse = plan->lse[q_run],
        .o1_stride = strides,
        .o2_stride = strides,
        .o_stride = strides,
    };
    return fattn_merge(plan->device, &args, NULL);
}

static fattn_status attend(const fattn_group_plan *plan, const fattn_buffers *given, int64_t owner,
                           int q_run, int k_run, const char *keys, char *sums)
{
    fattn_problem p;
    fattn_buffers b;
    if (!fattn_group_piece_of(plan, owner, q_run, k_run, &p, &b)) {
        return FATTN_OK;
    }
    const bool first = fattn_group_is_first(plan, owner, k_run);
    const bool merges = !plan->backward && !first;
    const fattn_block block = fattn_group_block_keys(plan, owner);
    const fattn_block gradients = fattn_group_block_sums(plan, owner);
    b.q = plan->q[q_run];
    b.k = keys + block.k[k_run];
    b.v = keys + block.v[k_run];
    b.o = plan->backward ? plan->o[q_run] : merges ? (void *)plan->part_o : plan->sum[q_run];
    b.lse = merges ? plan->part_lse : plan->lse[q_run];
    b.alibi_slopes = given->alibi_slopes;
    b.sink = p.features & FATTN_SINK ? given->sink : NULL;
    b.seed = given->seed;
    b.offset = given->offset;
    b.seed_ptr = given->seed_ptr;
    b.offset_ptr = given->offset_ptr;
    if (plan->backward) {
        b.dout = plan->dout[q_run];
        b.dlse = p.features & FATTN_DLSE ? plan->dlse[q_run] : NULL;
        b.dq = plan->sum[q_run];
        b.dk = plan->gradients ? sums + gradients.k[k_run] : NULL;
        b.dv = plan->gradients ? sums + gradients.v[k_run] : NULL;
        b.dsink = plan->dsink + plan->rank * p.heads_q;
    }
    const fattn_status status = fattn_execute(plan_of(plan, &p), &b, plan->workspace, NULL);
    return !status && merges ? merge(plan, q_run) : status;
}

static fattn_status attend_block(const fattn_group_plan *plan, const fattn_buffers *given,
                                 int64_t owner, const char *keys, char *sums)
{
    fattn_status status = FATTN_OK;
    for (int n = 0; !status && n < plan->runs * plan->runs; n++) {
        /* The first piece of a run of queries comes first. */
        status = attend(plan, given, owner, n % plan->runs, n / plan->runs, keys, sums);
    }
    return status;
}

/* --- Rounds ----------------------------------------------------------------------------------- */

static void add_message(group_of_messages *group, int64_t peer, int tag, bool receive, void *data,
                        int64_t bytes)
{
    if (peer >= 0 && bytes > 0) {
        group->at[group->count++] = (fattn_message){(int32_t)peer, tag, receive, 0, data, bytes};
    }
}

/* What goes and comes in a lane while step t is computed (ring.h). */
static void add_messages(const fattn_group_plan *plan, int lane, int64_t step,
                         group_of_messages *group)
{
    const fattn_ring *const ring = &plan->ring;
    const fattn_ring_messages m = fattn_ring_step(ring, lane, plan->rank, step);
    const int64_t held = step ? fattn_ring_owner(ring, lane, plan->rank, step) : plan->rank;
    const int64_t next = fattn_ring_owner(ring, lane, plan->rank, step + 1);
    const int64_t before = fattn_ring_owner(ring, lane, plan->rank, step - 1);
    const int tag = lane * KINDS;
    if (m.send_to >= 0) {
        char *const keys = step ? plan->lane[lane][step % 2] : plan->own;
        add_message(group, m.send_to, tag + BLOCK, false, keys,
                    fattn_group_block_keys(plan, held).bytes);
    }
    if (m.receive_from >= 0) {
        add_message(group, m.receive_from, tag + BLOCK, true, plan->lane[lane][(step + 1) % 2],
                    fattn_group_block_keys(plan, next).bytes);
    }
    if (plan->gradients && m.gradient_to >= 0) {
        add_message(group, m.gradient_to, tag + (m.gradient_to == before ? HOME : GRADIENT), false,
                    plan->sending[lane], fattn_group_block_sums(plan, before).bytes);
    }
    if (plan->gradients && m.gradient_from >= 0) {
        add_message(group, m.gradient_from, tag + GRADIENT, true, plan->arriving[lane],
                    fattn_group_block_sums(plan, held).bytes);
    }
    if (plan->gradients && m.home_from >= 0) {
        add_message(group, m.home_from, tag + HOME, true, plan->home[lane],
                    fattn_group_block_sums(plan, plan->rank).bytes);
    }
}

static fattn_status compute(const fattn_group_plan *plan, const fattn_buffers *given, int64_t step)
{
    fattn_status status = FATTN_OK;
    for (int lane = 0; !status && lane < FATTN_LANES; lane++) {
        const int64_t owner = fattn_ring_owner(&plan->ring, lane, plan->rank, step);
        if (owner < 0) {
            continue;
        }
        char *const sums = step ? plan->share[lane] : plan->own_sum;
        if (step && plan->gradients) {
            memset(sums, 0, (size_t)fattn_group_block_sums(plan, owner).bytes);
        }
        status =
            attend_block(plan, given, owner, step ? plan->lane[lane][step % 2] : plan->own, sums);
    }
    return status;
}

/* to += from, gradients of a block. */
static void add(const fattn_group_plan *plan, int64_t owner, char *to, const char *from)
{
    const int64_t count = fattn_group_block_sums(plan, owner).bytes / (int64_t)sizeof(float);
    float *const sum = (float *)to;
    const float *const more = (const float *)from;
    for (int64_t n = 0; n < count; n++) {
        sum[n] += more[n];
    }
}

/* What has arrived is added; what was computed goes on in the next round. */
static void collect(fattn_group_plan *plan, int64_t step)
{
    for (int lane = 0; plan->gradients && lane < FATTN_LANES; lane++) {
        const fattn_ring_messages m = fattn_ring_step(&plan->ring, lane, plan->rank, step);
        if (m.gradient_from >= 0) {
            const int64_t owner = fattn_ring_owner(&plan->ring, lane, plan->rank, step);
            add(plan, owner, plan->share[lane], plan->arriving[lane]);
        }
        if (m.home_from >= 0) {
            add(plan, plan->rank, plan->own_sum, plan->home[lane]);
        }
        char *const sent = plan->sending[lane];
        plan->sending[lane] = plan->share[lane];
        plan->share[lane] = sent;
    }
}

static fattn_status go_round(fattn_group_plan *plan, const fattn_buffers *given, int64_t step)
{
    const fattn_transport *const t = &plan->transport;
    group_of_messages group = {.count = 0};
    for (int lane = 0; lane < FATTN_LANES; lane++) {
        add_messages(plan, lane, step, &group);
    }
    fattn_status status = group.count ? t->start(t->user, group.at, group.count) : FATTN_OK;
    const bool started = !status && group.count;
    status = status ? status : compute(plan, given, step);
    if (status) {
        t->abort(t->user, fattn_last_reason());
    }
    if (started) {
        fattn_reason_hold(status);
        const fattn_status waited = t->wait(t->user, group.at, group.count, plan->timeout);
        fattn_reason_let();
        if (waited && !status) {
            t->abort(t->user, fattn_last_reason());
        }
        status = status ? status : waited;
    }
    if (!status) {
        collect(plan, step);
    }
    return status;
}

/* --- The act ---------------------------------------------------------------------------------- */

/* The caller's buffers, checked against the rank's own shares. */
static fattn_status check(const fattn_group_plan *plan, const fattn_buffers *given,
                          fattn_buffers *checked)
{
    fattn_buffers b;
    fattn_status status = fattn_buffers_read(&b, given);
    if (!status && (b.cu_seqlens_q || b.cu_seqlens_k)) {
        status = fattn_fail(FATTN_INVALID_ARGUMENT,
                            "%s is set: the lengths of a group are those of its plan",
                            b.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k");
    }
    if (status) {
        return status;
    }
    b.cu_seqlens_q = plan->local_q;
    b.cu_seqlens_k = plan->local_k;
    status = fattn_buffers_normalise(&plan->local, &b, checked);
    return status ? status : fattn_buffers_check_unused(plan->local.op, plan->features, checked);
}

fattn_status fattn_group_execute(fattn_group_plan *plan, const fattn_buffers *buffers)
{
    if (!plan) {
        return fattn_fail(FATTN_NULL_POINTER, "plan is NULL");
    }
    fattn_buffers b;
    fattn_status status = check(plan, buffers, &b);
    if (status) {
        plan->transport.abort(plan->transport.user, fattn_last_reason());
        return status;
    }
    pack(plan, &b);
    for (int64_t step = 0; !status && step < plan->rounds; step++) {
        status = go_round(plan, &b, step);
    }
    if (!status && plan->problem.outputs & FATTN_OUT_DSINK) {
        status =
            fattn_group_gather(plan, plan->dsink, plan->problem.heads_q * (int64_t)sizeof(float));
    }
    if (!status) {
        unpack(plan, &b);
    }
    return status;
}
