/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The published algorithms on a whole problem: divides the workspace between the machine's two
 * memories, finds every head in the caller's tensors, and runs the schedule's program on it. See
 * tiled.h.
 */
#include "backends/reference/tiled.h"

#include <string.h>

#include "backends/reference/tiled_machine.h"
#include "core/dtype.h"
#include "core/integer.h"
#include "core/problem.h"

/* -------------------------------------------------------------------------------------------------
 * Memory
 * ---------------------------------------------------------------------------------------------- */

typedef struct piece {
    double **place;
    int64_t extent[3];
    bool wanted;
} piece;

/* Total size of the wanted pieces in doubles, or -1 if their bytes exceed 63 bits. If memory is
 * given, assigns it to the pieces. */
static int64_t cut(const piece *pieces, size_t count, double *memory)
{
    const int64_t most = INT64_MAX / (int64_t)sizeof(double) - 32; /* room for rounding up */
    int64_t total = 0;
    for (size_t n = 0; n < count; n++) {
        int64_t size = pieces[n].wanted;
        for (int axis = 0; axis < 3; axis++) {
            const int64_t extent = pieces[n].extent[axis];
            if (extent > 0 && size > most / extent) return -1;
            size *= extent;
        }
        if (memory != NULL && pieces[n].wanted) *pieces[n].place = memory + total;
        if (total > most - size) return -1;
        total += size;
    }
    return total;
}

static int64_t cut_state(machine *c, double *memory)
{
    const fattn_problem *const p = c->p;
    const bool backward = p->op == FATTN_BACKWARD;
    const bool standard = c->schedule == FATTN_IO_STANDARD, flash1 = c->schedule == FATTN_IO_FLASH1;
    const bool flash2 = c->schedule == FATTN_IO_FLASH2;
    const bool capped = machine_has(c, FATTN_SOFTCAP), drops = machine_has(c, FATTN_DROPOUT);
    const int64_t heads = backward && !standard ? c->group : 1, sq = p->seqlen_q, sk = p->seqlen_k;
    const piece pieces[] = {
        {&c->state.o, {1, sq, p->dim_v}, flash1 && !backward},
        {&c->state.l, {heads, sq, 1}, flash1},
        {&c->state.m, {heads, sq, 1}, flash1},
        {&c->state.dq, {heads, sq, p->dim}, backward},
        {&c->state.delta, {heads, sq, 1}, backward && flash2},
        {&c->state.dk, {1, sk, p->dim}, backward && standard},
        {&c->state.dv, {1, sk, p->dim_v}, backward && standard},
        {&c->state.S, {1, sq, sk}, standard},
        {&c->state.C, {1, sq, sk}, standard && capped},
        {&c->state.P, {1, sq, sk}, standard},
        {&c->state.Z, {1, sq, sk}, standard && drops},
        {&c->state.R, {1, sq, sk}, standard && drops},
        {&c->state.dP, {1, sq, sk}, standard && backward},
        {&c->state.dS, {1, sq, sk}, standard && backward},
        {&c->state.dsink, {1, 1, p->heads_q}, backward},
    };
    return cut(pieces, sizeof pieces / sizeof pieces[0], memory);
}

/* Cuts fast memory into the tiles of a machine, as cut_state() cuts its state. Both return the
 * number of doubles, and with memory NULL do nothing else. */
static int64_t cut_fast(machine *c, double *memory)
{
    const int64_t d = c->p->dim, dv = c->p->dim_v, br = c->br, bc = c->bc;
    const bool backward = c->p->op == FATTN_BACKWARD;
    const piece pieces[] = {
        {&c->q_i, {1, br, d}, true},
        {&c->o_i, {1, br, dv}, true},
        {&c->k_j, {1, bc, d}, true},
        {&c->v_j, {1, bc, dv}, true},
        {&c->dout_i, {1, br, dv}, backward},
        {&c->dq_i, {1, br, d}, backward},
        {&c->dk_j, {1, bc, d}, backward},
        {&c->dv_j, {1, bc, dv}, backward},
        {&c->l_i, {1, br, 1}, true},
        {&c->m_i, {1, br, 1}, true},
        {&c->l_ij, {1, br, 1}, true},
        {&c->m_ij, {1, br, 1}, true},
        {&c->lse_i, {1, br, 1}, true},
        {&c->delta_i, {1, br, 1}, backward},
        {&c->dlse_i, {1, br, 1}, backward},
        {&c->s_ij, {1, br, bc}, true},
        {&c->keep_ij, {1, br, bc}, true},
        {&c->slope_ij, {1, br, bc}, true},
        {&c->z_ij, {1, br, bc}, true},
        {&c->bias_ij, {1, br, bc}, machine_has(c, FATTN_BIAS)},
        {&c->mask_ij, {1, br, bc}, machine_has(c, FATTN_MASK)},
        {&c->ds_ij, {1, br, bc}, backward},
    };
    return cut(pieces, sizeof pieces / sizeof pieces[0], memory);
}

/* Clips tiles that are larger than the problem, which changes no count. */
static machine machine_for(const fattn_problem *p, fattn_io_schedule schedule, fattn_tile t)
{
    const int64_t rows = p->seqlen_q > 0 ? p->seqlen_q : 1,
                  keys = p->seqlen_k > 0 ? p->seqlen_k : 1;
    machine c = {.p = p, .schedule = schedule};
    c.br = fattn_min64(t.br, rows);
    c.bc = schedule == FATTN_IO_STANDARD ? keys : fattn_min64(t.bc, keys);
    c.group = fattn_problem_group(p);
    return c;
}

static int64_t bytes_of(int64_t doubles) { return doubles < 0 ? -1 : (doubles + 31) / 32 * 256; }

int64_t fattn_tiled_workspace(const fattn_problem *problem, fattn_io_schedule schedule,
                              fattn_tile tile_)
{
    machine c = machine_for(problem, schedule, tile_);
    const int64_t state = bytes_of(cut_state(&c, NULL)), fast = bytes_of(cut_fast(&c, NULL));
    return state < 0 || fast < 0 || state > INT64_MAX - fast ? -1 : state + fast;
}

int64_t fattn_tiled_fast_bytes(const fattn_problem *problem, fattn_tile tile_)
{
    machine c = machine_for(problem, FATTN_IO_FLASH2, tile_);
    return bytes_of(cut_fast(&c, NULL));
}

/* -------------------------------------------------------------------------------------------------
 * Heads
 * ---------------------------------------------------------------------------------------------- */

static matrix tensor_of_rows(const machine *c, fattn_io_tensor name, const void *base,
                             fattn_dtype dtype, const fattn_strides *stride, int64_t width)
{
    return (matrix){.name = name,
                    .dtype = dtype,
                    .base = (void *)(uintptr_t)base, /* inputs are only read */
                    .origin = c->seq.q_batch * stride->batch + c->seq.q_row * stride->seq +
                              c->h * stride->head,
                    .width = width,
                    .pitch = stride->seq};
}

static matrix tensor_of_keys(const machine *c, fattn_io_tensor name, const void *base,
                             fattn_dtype dtype, const fattn_strides *stride, int64_t width)
{
    const int64_t head = c->h / c->group * stride->head;
    matrix a = {.name = name,
                .dtype = dtype,
                .base = (void *)(uintptr_t)base,
                .origin = head,
                .width = width,
                .pitch = stride->seq};
    if (machine_has(c, FATTN_PAGED)) {
        a.pages = c->buf->block_table + c->b * c->p->block_table_stride;
        a.page_size = c->p->page_size;
        a.page_pitch = stride->batch;
    } else {
        a.origin += c->seq.k_batch * stride->batch + c->seq.k_row * stride->seq;
    }
    return a;
}

static matrix statistics(const machine *c, fattn_io_tensor name, const void *base)
{
    return (matrix){.name = name,
                    .dtype = fattn_statistics_dtype(c->p),
                    .base = (void *)(uintptr_t)base,
                    .origin = fattn_lse_index(c->p, &c->seq, c->b, c->h),
                    .width = 1,
                    .pitch = 1};
}

/* Part `at` of an array of states, each rows x width. */
static matrix state_of(fattn_io_tensor name, double *base, int64_t at, int64_t rows, int64_t width)
{
    return (matrix){.name = name,
                    .dtype = FATTN_F64,
                    .base = base,
                    .origin = at * rows * width,
                    .width = width,
                    .pitch = width};
}

static void find_tensors(machine *c)
{
    const fattn_problem *const p = c->p;
    const fattn_buffers *const buf = c->buf;
    const fattn_dtype gradient = fattn_gradient_dtype(p, p->dtype);
    c->q = tensor_of_rows(c, FATTN_IO_Q, buf->q, p->dtype, &p->q, p->dim);
    c->k = tensor_of_keys(c, FATTN_IO_K, buf->k, p->dtype, &p->k, p->dim);
    c->v = tensor_of_keys(c, FATTN_IO_V, buf->v, p->dtype, &p->v, p->dim_v);
    c->o = tensor_of_rows(c, FATTN_IO_O, buf->o, p->dtype_o, &p->o, p->dim_v);
    c->lse = statistics(c, FATTN_IO_LSE, buf->lse);
    if (p->op == FATTN_FORWARD) return;
    c->dout = tensor_of_rows(c, FATTN_IO_DOUT, buf->dout, p->dtype_o, &p->dout, p->dim_v);
    c->dlse = statistics(c, FATTN_IO_DLSE, buf->dlse);
    c->dq = tensor_of_rows(c, FATTN_IO_DQ, buf->dq, gradient, &p->dq, p->dim);
    c->dk = tensor_of_keys(c, FATTN_IO_DK, buf->dk, gradient, &p->dk, p->dim);
    c->dv = tensor_of_keys(c, FATTN_IO_DV, buf->dv, gradient, &p->dv, p->dim_v);
}

static void find_states(machine *c)
{
    const fattn_problem *const p = c->p;
    const int64_t sq = p->seqlen_q, sk = p->seqlen_k;
    const bool own_part = p->op == FATTN_BACKWARD && c->schedule != FATTN_IO_STANDARD;
    const int64_t g = own_part ? c->h % c->group : 0;
    c->o_state = state_of(FATTN_IO_O, c->state.o, 0, sq, p->dim_v);
    c->l = state_of(FATTN_IO_L, c->state.l, g, sq, 1);
    c->m = state_of(FATTN_IO_M, c->state.m, g, sq, 1);
    c->dq_state = state_of(FATTN_IO_DQ, c->state.dq, g, sq, p->dim);
    c->delta = state_of(FATTN_IO_DELTA, c->state.delta, g, sq, 1);
    c->dk_state = state_of(FATTN_IO_DK, c->state.dk, 0, sk, p->dim);
    c->dv_state = state_of(FATTN_IO_DV, c->state.dv, 0, sk, p->dim_v);

    const int64_t keys = c->seq.sk; /* score rows are contiguous, one per row of this sequence */
    c->S = state_of(FATTN_IO_S, c->state.S, 0, sq, keys);
    c->C = state_of(FATTN_IO_C, c->state.C, 0, sq, keys);
    c->P = state_of(FATTN_IO_P, c->state.P, 0, sq, keys);
    c->Z = state_of(FATTN_IO_Z, c->state.Z, 0, sq, keys);
    c->R = state_of(FATTN_IO_R, c->state.R, 0, sq, keys);
    c->dP = state_of(FATTN_IO_DP, c->state.dP, 0, sq, keys);
    c->dS = state_of(FATTN_IO_DS, c->state.dS, 0, sq, keys);
}

void fattn_machine_select(machine *c, int64_t b, int64_t h)
{
    c->b = b;
    c->h = h;
    c->seq = fattn_sequence_of(c->p, c->buf, b);
    find_tensors(c);
    find_states(c);
}

/* -------------------------------------------------------------------------------------------------
 * The problem
 * ---------------------------------------------------------------------------------------------- */

/* All heads add to dbias in place, so it is zeroed once, as a whole. */
static void initialise_dbias(machine *c)
{
    const fattn_problem *const p = c->p;
    if (!machine_wants(c, FATTN_OUT_DBIAS) || machine_has(c, FATTN_ACCUMULATE)) return;
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    int64_t extent[4];
    for (int axis = 0; axis < 4; axis++)
        extent[axis] = p->dbias_stride[axis] != 0 ? pairs[axis] : 1;
    for (int64_t b = 0; b < extent[0]; b++) {
        for (int64_t h = 0; h < extent[1]; h++) {
            const matrix slice = {.name = FATTN_IO_DBIAS,
                                  .dtype = fattn_statistics_dtype(p),
                                  .base = c->buf->dbias,
                                  .origin = b * p->dbias_stride[0] + h * p->dbias_stride[1],
                                  .width = 1,
                                  .pitch = p->dbias_stride[3]};
            for (int64_t i = 0; i < extent[2]; i++) {
                matrix row = slice;
                row.origin += i * p->dbias_stride[2];
                fattn_machine_fill(c, &row, 0, extent[3], 0);
            }
        }
    }
}

/* dSink has one scalar per head, summed over the batch and written once, at the end. */
static void return_dsink(machine *c)
{
    if (!c->compute || !machine_wants(c, FATTN_OUT_DSINK)) return;
    const matrix sums = state_of(FATTN_IO_TENSORS, c->state.dsink, 0, c->p->heads_q, 1);
    const matrix out = {
        .dtype = fattn_statistics_dtype(c->p), .base = c->buf->dsink, .width = 1, .pitch = 1};
    fattn_machine_publish(c, &sums, &out, c->p->heads_q, machine_has(c, FATTN_ACCUMULATE));
}

static void run_forward(machine *c)
{
    static void (*const programs[FATTN_IO_SCHEDULES])(machine *) = {
        [FATTN_IO_STANDARD] = fattn_tiled_standard_forward,
        [FATTN_IO_FLASH1] = fattn_tiled_flash1_forward,
        [FATTN_IO_FLASH2] = fattn_tiled_flash2_forward,
    };
    for (int64_t b = 0; b < c->p->batch; b++) {
        for (int64_t h = 0; h < c->p->heads_q; h++) {
            fattn_machine_select(c, b, h);
            programs[c->schedule](c);
        }
    }
}

static void run_backward(machine *c)
{
    static void (*const programs[FATTN_IO_SCHEDULES])(machine *, int64_t, int64_t) = {
        [FATTN_IO_STANDARD] = fattn_tiled_standard_backward,
        [FATTN_IO_FLASH1] = fattn_tiled_flash1_backward,
        [FATTN_IO_FLASH2] = fattn_tiled_flash2_backward,
    };
    for (int64_t h = 0; h < c->p->heads_q && c->compute; h++) c->state.dsink[h] = 0;
    initialise_dbias(c);
    for (int64_t b = 0; b < c->p->batch; b++) {
        for (int64_t h = 0; h < c->p->heads_q; h += c->group) programs[c->schedule](c, b, h);
    }
    return_dsink(c);
}

static void set_dropout(machine *c)
{
    if (!machine_has(c, FATTN_DROPOUT)) return;
    const fattn_buffers *const buf = c->buf;
    const uint32_t threshold = fattn_dropout_threshold(c->p->dropout_p);
    c->dropout = fattn_dropout_make(threshold, buf->seed_ptr != NULL ? *buf->seed_ptr : buf->seed,
                                    buf->offset_ptr != NULL ? *buf->offset_ptr : buf->offset);
    c->z_kept =
        threshold < 65536 ? 65536.0 / (65536 - threshold) : 0; /* in double, like all arithmetic */
}

void fattn_tiled_run(const fattn_problem *problem, const fattn_buffers *buffers,
                     const fattn_tiled_options *options, void *workspace, fattn_io_counts *counts)
{
    machine c = machine_for(problem, options->schedule, options->tile);
    c.buf = buffers;
    c.compute = !options->count_only;
    c.counts = counts;
    if (c.compute) {
        set_dropout(&c);
        double *const state = workspace;
        cut_state(&c, state);
        cut_fast(&c, state + bytes_of(cut_state(&c, NULL)) / (int64_t)sizeof(double));
    }
    (problem->op == FATTN_FORWARD ? run_forward : run_backward)(&c);
}
