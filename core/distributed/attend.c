/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the pieces of a step: queries of this rank against keys of an owner, on the group's
 * device. In forward the result of a piece is merged with the result of its queries so far. */
#include <string.h>

#include "core/backend.h"
#include "core/distributed/group.h"
#include "core/dtype.h"
#include "core/plan.h"

/* --- Merging ---------------------------------------------------------------------------------- */

/* The results so far of a run of queries, or of both runs. */
static fattn_state state_of(const fattn_group_plan *plan, int q_run)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t rows = fattn_group_query_rows(plan), row = fattn_group_row(plan, q_run);
    const int64_t length = plan->together ? rows
                           : plan->ragged ? fattn_group_queries(plan, q_run).rows
                                          : fattn_group_queries(plan, q_run).longest;
    const int run = q_run == FATTN_BOTH ? 0 : q_run;
    return (fattn_state){.o = plan->at.sum[run],
                         .lse = plan->together ? plan->at.lse[0] + row : plan->at.lse[run],
                         .strides = fattn_group_packed(rows, p->heads_q, p->dim_v),
                         .lse_batch = p->heads_q * length,
                         .lse_head = length};
}

/* The rows of `run` in the result of the last piece, which has the rows of `q_run`. */
static fattn_state part_of(const fattn_group_plan *plan, int q_run, int run)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t row = q_run == FATTN_BOTH ? fattn_group_row(plan, run) : 0;
    const int64_t length = plan->ragged ? fattn_group_queries(plan, q_run).rows
                                        : fattn_group_queries(plan, q_run).longest;
    fattn_state part = state_of(plan, run);
    part.o = plan->part_o + row * p->heads_q * p->dim_v;
    part.lse = plan->part_lse + row;
    part.lse_batch = p->heads_q * length;
    part.lse_head = length;
    return part;
}

/* The same rows in the caller's tensors. */
static fattn_state result_of(const fattn_group_plan *plan, const fattn_buffers *given, int run)
{
    const fattn_problem *const l = &plan->local;
    const int64_t row = fattn_group_row(plan, run);
    fattn_state result = state_of(plan, run);
    result.o = (char *)given->o + row * l->o.seq * fattn_dtype_size(l->dtype_o);
    result.strides = l->o;
    if (l->outputs & FATTN_OUT_LSE) {
        result.lse = (float *)given->lse + row;
        result.lse_batch = l->heads_q * l->seqlen_q;
        result.lse_head = l->seqlen_q;
    }
    return result;
}

/* The job that merges the rows of `run` (a run, or both) of a piece that has the rows of `q_run`.
 * With `given` the result goes to the caller's tensors. */
static fattn_merge_job job_of(const fattn_group_plan *plan, const fattn_buffers *given, int q_run,
                              int run)
{
    const fattn_extent rows = fattn_group_queries(plan, run);
    const int64_t batch = plan->ragged ? 1 : plan->problem.batch;
    fattn_merge_job job = {
        .batch = batch,
        .heads = plan->problem.heads_q,
        .seqlen = batch ? rows.rows / batch : 0,
        .dim_v = plan->problem.dim_v,
        .first = state_of(plan, run),
        .second = part_of(plan, q_run, run),
        .result = given ? result_of(plan, given, run) : state_of(plan, run),
        .dtype = given ? plan->local.dtype_o : FATTN_F32,
    };
    if (plan->ragged) { /* kernels that merge number rows across all sequences */
        fattn_state *const states[] = {&job.first, &job.second, &job.result};
        for (int n = 0; n < 3; n++) {
            states[n]->strides.batch = states[n]->lse_batch = 0;
        }
    }
    return job;
}

static void note_done(fattn_group_plan *plan, const fattn_buffers *given, int run)
{
    plan->stored_runs |= given ? (run == FATTN_BOTH ? 3u : 1u << run) : 0;
}

/* Whether a piece of both runs has to be merged run by run, because each run has its own result. */
static bool are_apart(const fattn_group_plan *plan, int q_run)
{
    return q_run == FATTN_BOTH && !plan->together;
}

/* Whether a piece may be merged by its kernel. A CPU's kernels do not merge ragged batches. */
static bool may_merge_in_kernel(const fattn_group_plan *plan, int q_run)
{
    return !are_apart(plan, q_run) && !(plan->ragged && !plan->transport.device_memory);
}

fattn_status fattn_group_merge(fattn_group_plan *plan, const fattn_buffers *given, int q_run)
{
    const bool apart = are_apart(plan, q_run);
    fattn_status status = FATTN_OK;
    for (int n = 0; !status && n < (apart ? 2 : 1); n++) {
        const int run = apart ? n : q_run;
        const fattn_merge_job job = job_of(plan, given, q_run, run);
        status = plan->device->backend->merge(plan->device->impl, &job, plan->transport.stream);
        note_done(plan, given, run);
    }
    return status;
}

/* --- Pieces ----------------------------------------------------------------------------------- */

static const fattn_plan *plan_of(const fattn_group_plan *plan, const fattn_problem *p)
{
    int64_t n = 0;
    while (memcmp(&plan->pieces[n].problem, p, sizeof *p) != 0) {
        n++; /* ends: make_pieces() has planned every piece */
    }
    return plan->pieces[n].plan;
}

/* Points bias, mask and dbias to the piece's first row and key. They have the rows of the share and
 * all keys of the problem. */
static void shift_scores(const fattn_group_plan *plan, const fattn_buffers *given, int64_t owner,
                         int q_run, int k_run, fattn_buffers *b)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t row = fattn_group_row(plan, q_run);
    const int64_t key = fattn_whole_run(&plan->whole, FATTN_KEYS, 0, owner, k_run).first;
    if (p->features & FATTN_BIAS) {
        b->bias = (const char *)given->bias + (row * p->bias_stride[2] + key * p->bias_stride[3]) *
                                                  fattn_dtype_size(p->dtype_bias);
    }
    if (p->features & FATTN_MASK) {
        b->mask = given->mask + row * p->mask_stride[2] + key * p->mask_stride[3];
    }
    if (p->outputs & FATTN_OUT_DBIAS) {
        b->dbias = (float *)given->dbias + row * p->dbias_stride[2] + key * p->dbias_stride[3];
    }
}

static void *at_row(const void *tensor, int64_t row, const fattn_strides *strides,
                    fattn_dtype dtype)
{
    return (char *)tensor + row * strides->seq * fattn_dtype_size(dtype);
}

/* Runs one piece. job: how its result is merged, or NULL. */
static fattn_status attend(fattn_group_plan *plan, const fattn_buffers *given,
                           const fattn_visit *visit, const fattn_held *keys, char *sums,
                           const fattn_merge_job *job)
{
    const int64_t owner = visit->owner;
    const int q_run = visit->q_run, k_run = visit->k_run, run = q_run == FATTN_BOTH ? 0 : q_run;
    fattn_problem p;
    fattn_buffers b;
    fattn_group_make_piece(plan, visit, &p, &b);
    const bool merges = !plan->backward && !fattn_group_is_first(plan, owner, k_run);
    const fattn_block block = fattn_group_block_keys(plan, owner);
    const fattn_block gradients = fattn_group_block_sums(plan, owner);
    const int64_t row = fattn_group_row(plan, q_run);
    b.q = plan->direct ? at_row(given->q, row, &p.q, p.dtype) : plan->at.q[run];
    b.k = keys->k + block.k[k_run];
    b.v = keys->v + block.v[k_run] - block.v[0];
    b.o = merges ? (void *)plan->part_o : plan->at.sum[run];
    b.lse = merges ? plan->part_lse : plan->at.lse[run];
    const int64_t head = plan->member * plan->heads_q + plan->turn * p.heads_q; /* the first */
    b.alibi_slopes = given->alibi_slopes ? (const float *)given->alibi_slopes + head : NULL;
    b.sink = p.features & FATTN_SINK ? (const float *)given->sink + head : NULL;
    shift_scores(plan, given, owner, q_run, k_run, &b);
    if (p.features & FATTN_DROPOUT) { /* the bit is clear if dropout_p is 0 */
        b.seed = given->seed;
        b.offset = given->offset;
        b.seed_ptr = given->seed_ptr;
        b.offset_ptr = given->offset_ptr;
    }
    if (plan->backward) {
        const bool both = q_run == FATTN_BOTH;
        b.o = plan->direct ? at_row(given->o, row, &p.o, p.dtype_o) : plan->at.o[run];
        b.dout = plan->direct ? at_row(given->dout, row, &p.dout, p.dtype_o) : plan->at.dout[run];
        b.lse = both ? given->lse : plan->at.lse[run];
        b.dlse = !(p.features & FATTN_DLSE) ? NULL : both ? given->dlse : plan->at.dlse[run];
        b.dq = plan->at.sum[run];
        b.dk = plan->gradients ? sums + gradients.k[k_run] : NULL;
        b.dv = plan->gradients ? sums + gradients.v[k_run] : NULL;
        b.dsink = plan->dsink + plan->transport.rank * plan->heads_q + plan->turn * p.heads_q;
    }
    const fattn_stream stream = fattn_group_stream(plan);
    void *const workspace = plan->workspace[plan->overlaps ? plan->turn % 2 : 0];
    return job ? fattn_execute_onto(plan_of(plan, &p), &b, job, workspace, stream)
               : fattn_execute(plan_of(plan, &p), &b, workspace, stream);
}

static bool has_piece(const fattn_group_plan *plan, int lane, int64_t step, int n,
                      fattn_visit *visit)
{
    return fattn_group_visit(plan, lane, step, n, visit) && fattn_group_has_piece(plan, visit);
}

/* Whether this piece is the last one with its queries, and no message follows it. Its results can
 * then be written to the caller's tensors. */
static bool is_last(const fattn_group_plan *plan, int lane, int64_t step, int n, int q_run)
{
    const int most = plan->q_runs * plan->k_runs;
    bool last = plan->direct && !plan->whole.all_queries && step == plan->ring.last_step &&
                fattn_group_ends_turn(plan);
    for (int m = lane * most + n + 1; last && m < FATTN_LANES * most; m++) {
        fattn_visit visit;
        last = !has_piece(plan, m / most, step, m % most, &visit) ||
               (q_run != FATTN_BOTH && visit.q_run != FATTN_BOTH && visit.q_run != q_run);
    }
    return last;
}

fattn_status fattn_group_attend(fattn_group_plan *plan, const fattn_buffers *given, int lane,
                                int64_t step, const fattn_held *keys, char *sums)
{
    fattn_status status = FATTN_OK;
    for (int n = 0; !status && n < plan->q_runs * plan->k_runs; n++) {
        fattn_visit visit;
        if (!has_piece(plan, lane, step, n, &visit)) {
            continue;
        }
        const bool merges =
            !plan->backward && !fattn_group_is_first(plan, visit.owner, visit.k_run);
        const bool last = merges && is_last(plan, lane, step, n, visit.q_run);
        const fattn_buffers *const results = last ? given : NULL;
        if (!merges) {
            status = attend(plan, given, &visit, keys, sums, NULL);
        } else if (!may_merge_in_kernel(plan, visit.q_run)) {
            status = attend(plan, given, &visit, keys, sums, NULL);
            status = status ? status : fattn_group_merge(plan, results, visit.q_run);
        } else {
            const fattn_merge_job job = job_of(plan, results, visit.q_run, visit.q_run);
            status = attend(plan, given, &visit, keys, sums, &job);
            note_done(plan, results, visit.q_run);
        }
    }
    return status;
}
