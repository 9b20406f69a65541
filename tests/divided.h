/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drawn problems that are divided over ranks: the whole one is computed by the reference backend, a
 * rank's share by a group, and the rank's rows of both are compared. All of a case follows from
 * (seed, index), so ranks in processes of their own need not talk about it.
 */
#ifndef FATTN_TESTS_DIVIDED_H
#define FATTN_TESTS_DIVIDED_H

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "fattn/distributed.h"
#include "tests/device.h"
#include "tests/worst.h"
#include "tools/judge/random.h"

enum { DIVIDED_BATCH = 3, DIVIDED_HEADS = 36 };

/* Tensors: (batch, row, head, channel), BSHD in the whole problem and as the layout says in a
 * share. */
typedef enum divided_id {
    DIVIDED_Q,
    DIVIDED_K,
    DIVIDED_V,
    DIVIDED_O,
    DIVIDED_DOUT,
    DIVIDED_DQ,
    DIVIDED_DK,
    DIVIDED_DV,
    DIVIDED_LSE,
    DIVIDED_DLSE,
    DIVIDED_IDS
} divided_id;

typedef struct divided {
    fattn_problem problem; /* undivided */
    int64_t memory;        /* of a plan, or 0 */
    int64_t turns;         /* that heads take where ranks exchange them */
    bool saves;            /* backward follows a forward that saves rows for it */
    fattn_split split;
    fattn_scheme scheme;
    int32_t cu_q[DIVIDED_BATCH + 1], cu_k[DIVIDED_BATCH + 1]; /* filled in always */
    bool ragged, strided;                                     /* strided: BHSD by strides */
    bool padded; /* BSHD, not ragged: a row of a share has room for one head more */
    char *whole[DIVIDED_IDS];
    float *bias, *dbias; /* (B, Hq, Sq, Sk), some axes of them unused */
    uint8_t *mask;
    float slopes[DIVIDED_HEADS], sink[DIVIDED_HEADS], dsink[DIVIDED_HEADS];
    uint64_t seed, offset;
} divided;

static inline bool divided_has_keys(divided_id id)
{
    return id == DIVIDED_K || id == DIVIDED_V || id == DIVIDED_DK || id == DIVIDED_DV;
}

static inline int64_t divided_heads(const divided *d, divided_id id)
{
    return divided_has_keys(id) ? d->problem.heads_k : d->problem.heads_q;
}

static inline int64_t divided_channels(const divided *d, divided_id id)
{
    const bool wide = id == DIVIDED_V || id == DIVIDED_O || id == DIVIDED_DOUT || id == DIVIDED_DV;
    return id >= DIVIDED_LSE ? 1 : wide ? d->problem.dim_v : d->problem.dim;
}

static inline fattn_dtype divided_dtype(const divided *d, divided_id id)
{
    const bool out = id == DIVIDED_O || id == DIVIDED_DOUT;
    return id >= DIVIDED_LSE                             ? FATTN_F32
           : out && d->problem.dtype_o                   ? d->problem.dtype_o
           : divided_has_keys(id) && d->problem.dtype_kv ? d->problem.dtype_kv
                                                         : d->problem.dtype;
}

/* Rows of the whole problem's tensor, over the batch. */
static inline int64_t divided_rows(const divided *d, divided_id id)
{
    return (divided_has_keys(id) ? d->cu_k : d->cu_q)[d->problem.batch];
}

static inline int64_t divided_count(const divided *d, divided_id id)
{
    return divided_rows(d, id) * divided_heads(d, id) * divided_channels(d, id);
}

/* Element 0 of a row of one head, in the whole problem: lse has heads before rows. */
static inline int64_t divided_at(const divided *d, divided_id id, int64_t b, int64_t i, int64_t h)
{
    const int32_t *const cu = divided_has_keys(id) ? d->cu_k : d->cu_q;
    const int64_t heads = divided_heads(d, id), row = cu[b] + i;
    if (id < DIVIDED_LSE) {
        return (row * heads + h) * divided_channels(d, id);
    }
    return d->ragged ? h * divided_rows(d, id) + row : (b * heads + h) * d->problem.seqlen_q + i;
}

static inline void *divided_memory(size_t bytes)
{
    void *const memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!memory) {
        tap_bail("out of memory");
    }
    memset(memory, 0xff, (bytes + 64) / 64 * 64); /* NaN */
    return memory;
}

static inline void divided_lengths(divided *d, draw_rng *rng)
{
    fattn_problem *const p = &d->problem;
    for (int64_t b = 0; b < p->batch; b++) {
        const bool full = !d->ragged || b == 0;
        d->cu_q[b + 1] =
            d->cu_q[b] + (int32_t)(full ? p->seqlen_q : draw_between(rng, 0, p->seqlen_q));
        d->cu_k[b + 1] =
            d->cu_k[b] + (int32_t)(full ? p->seqlen_k : draw_between(rng, 0, p->seqlen_k));
    }
    if (d->ragged) {
        p->total_q = d->cu_q[p->batch];
        p->total_k = d->cu_k[p->batch];
        p->features |= FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    }
}

/* Biases and masks, some of which broadcast. */
static inline void divided_scores(divided *d, draw_rng *rng)
{
    fattn_problem *const p = &d->problem;
    /* Strides above 0 do not broadcast, whatever the sizes. */
    const int64_t rows = p->seqlen_q + !p->seqlen_q, keys = p->seqlen_k + !p->seqlen_k;
    const int64_t full[] = {p->heads_q * rows * keys, rows * keys, keys, 1};
    if (d->ragged || d->scheme == FATTN_SCHEME_HEADS || d->scheme == FATTN_SCHEME_BOTH) {
        return;
    }
    p->features |= draw_chance(rng, 4) ? FATTN_BIAS : 0;
    p->features |= draw_chance(rng, 4) ? FATTN_MASK : 0;
    for (int axis = 0; axis < 4; axis++) {
        p->bias_stride[axis] = p->features & FATTN_BIAS && !draw_chance(rng, 4) ? full[axis] : 0;
        p->mask_stride[axis] = p->features & FATTN_MASK && !draw_chance(rng, 4) ? full[axis] : 0;
    }
    if (p->op == FATTN_BACKWARD && p->features & FATTN_BIAS && draw_chance(rng, 2)) {
        p->outputs |= FATTN_OUT_DBIAS;
        for (int axis = 0; axis < 4; axis++) {
            p->dbias_stride[axis] = axis == 2 || !draw_chance(rng, 4) ? full[axis] : 0;
        }
    }
}

static inline void divided_options(divided *d, draw_rng *rng)
{
    fattn_problem *const p = &d->problem;
    const bool striped = d->split == FATTN_SPLIT_STRIPED && d->scheme != FATTN_SCHEME_HEADS;
    static const uint64_t bits[] = {FATTN_CAUSAL, FATTN_WINDOW, FATTN_SOFTCAP, FATTN_SCALE,
                                    FATTN_SINK,   FATTN_ALIBI,  FATTN_DROPOUT};
    for (size_t n = 0; n < sizeof bits / sizeof bits[0]; n++) {
        p->features |= draw_chance(rng, n ? 3 : 2) ? bits[n] : 0;
    }
    p->features &= striped ? ~(FATTN_ALIBI | FATTN_DROPOUT) : ~UINT64_C(0);
    p->features |= p->op == FATTN_BACKWARD && draw_chance(rng, 3) ? FATTN_DLSE : 0;
    if (p->features & FATTN_WINDOW) {
        const bool one_end = striped && d->ragged;
        p->window_left = one_end && p->features & FATTN_CAUSAL ? -1 : draw_between(rng, -1, 20);
        p->window_right = p->features & FATTN_CAUSAL       ? 0
                          : one_end && p->window_left >= 0 ? -1
                                                           : draw_between(rng, -1, 20);
    }
    p->scale = p->features & FATTN_SCALE ? 0.3 : 0;
    p->softcap = p->features & FATTN_SOFTCAP ? 2 : 0;
    p->dropout_p = p->features & FATTN_DROPOUT ? 0.25 : 0;
    p->head_offset = p->features & FATTN_DROPOUT ? draw_between(rng, 0, 3) : 0;
}

/* What devices with memory of their own take of ragged batches, if rows stay divided. */
static inline void divided_without_positions(divided *d)
{
    fattn_problem *const p = &d->problem;
    const uint64_t positions = FATTN_ALIBI | FATTN_DROPOUT | FATTN_WINDOW;
    p->features &= ~(positions | (d->scheme == FATTN_SCHEME_REDUCE ? FATTN_CAUSAL : 0));
    p->window_left = p->window_right = -1;
    p->dropout_p = 0;
    p->head_offset = 0;
    if (p->features & FATTN_CAUSAL) {
        p->seqlen_k = p->seqlen_q;
        p->total_k = p->total_q;
        memcpy(d->cu_k, d->cu_q, sizeof d->cu_k);
    }
}

/* A scheme, and heads that it can divide over so many ranks. */
static inline void divided_scheme(divided *d, int ranks, draw_rng *rng)
{
    fattn_problem *const p = &d->problem;
    p->heads_k = draw_between(rng, 1, 2);
    d->scheme = FATTN_SCHEME_RING;
    if (ranks > 1 && draw_chance(rng, 4)) {
        d->scheme = FATTN_SCHEME_HEADS;
        p->heads_k = ranks <= 4 ? ranks * draw_between(rng, 1, 2) : ranks;
    } else if (ranks % 2 == 0 && ranks > 2 && draw_chance(rng, 3)) {
        d->scheme = FATTN_SCHEME_BOTH;
        p->heads_k = 2 * draw_between(rng, 1, 2);
    } else if (p->op == FATTN_FORWARD && d->split != FATTN_SPLIT_STRIPED && draw_chance(rng, 4)) {
        d->scheme = FATTN_SCHEME_REDUCE;
    }
    p->heads_q = p->heads_k * draw_between(rng, 1, 3);
}

/* Sizes and options for so many ranks: no memory yet. */
static inline void divided_draw(divided *d, uint64_t seed, int64_t index, int ranks)
{
    const bool device = device_named() != NULL; /* with memory of its own, which is less honoured */
    draw_rng stream = draw_stream(seed, index, 7);
    draw_rng *const rng = &stream;
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F32, FATTN_F32, FATTN_F16, FATTN_BF16};
    memset(d, 0, sizeof *d);
    fattn_problem *const p = &d->problem;
    fattn_problem_init(p);
    d->split = (fattn_split)draw_between(rng, 1, 3);
    d->ragged = draw_chance(rng, 3);
    p->op = draw_chance(rng, 2) ? FATTN_BACKWARD : FATTN_FORWARD;
    p->dtype = dtypes[draw_between(rng, 0, 4)];
    p->dtype_o = draw_chance(rng, 2) ? FATTN_F32 : p->dtype;
    p->dtype_kv = p->op == FATTN_FORWARD && draw_chance(rng, 5) && !device
                      ? dtypes[draw_between(rng, 0, 4)]
                      : FATTN_DTYPE_DEFAULT;
    p->anchor = draw_chance(rng, 2) ? FATTN_TOP_LEFT : FATTN_BOTTOM_RIGHT;
    p->layout = draw_chance(rng, 2) ? FATTN_BHSD : FATTN_BSHD;
    p->batch = draw_between(rng, 1, DIVIDED_BATCH);
    divided_scheme(d, ranks, rng);
    p->seqlen_q = draw_between(rng, 0, 70);
    p->seqlen_k = draw_chance(rng, 2) ? p->seqlen_q : draw_between(rng, 0, 70);
    p->dim = draw_between(rng, 1, 24);
    p->dim_v = draw_between(rng, 1, 24);
    p->pointer_alignment = 2;
    d->strided = p->layout == FATTN_BHSD && !d->ragged && draw_chance(rng, 2);
    const bool square = draw_chance(rng, 4); /* what is mostly asked for: causal and nothing else */
    d->split = square ? FATTN_SPLIT_ZIGZAG : d->split;
    p->seqlen_k = square ? p->seqlen_q : p->seqlen_k;
    divided_lengths(d, rng);
    if (square) {
        p->features |= FATTN_CAUSAL | (p->op == FATTN_BACKWARD ? FATTN_DLSE : 0);
    } else {
        divided_options(d, rng);
    }
    if (device && d->ragged && d->scheme != FATTN_SCHEME_HEADS && ranks > 1) {
        divided_without_positions(d);
    }
    p->outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    if (p->op == FATTN_BACKWARD) {
        p->outputs = (uint32_t)draw_between(rng, 1, 7) * FATTN_OUT_DQ;
        p->outputs |= p->features & FATTN_SINK ? FATTN_OUT_DSINK : 0;
    }
    if (!square) {
        divided_scores(d, rng);
    }
    d->seed = draw_bits(rng);
    d->offset = draw_bits(rng);
    d->turns = draw_between(rng, 0, 6);
    d->saves = p->op == FATTN_BACKWARD && draw_chance(rng, 2);
}

/* Entries of a bias or mask. An axis that is summed over has one, whatever its length. */
static inline int64_t divided_scores_count(const divided *d)
{
    const fattn_problem *const p = &d->problem;
    return p->batch * p->heads_q * (p->seqlen_q + !p->seqlen_q) * (p->seqlen_k + !p->seqlen_k);
}

static inline void divided_fill(divided *d, divided_id id, draw_rng *rng)
{
    for (int64_t n = 0; n < divided_count(d, id); n++) {
        fattn_dtype_store(divided_dtype(d, id), d->whole[id], n, draw_normal(rng));
    }
}

static inline void divided_buffers(const divided *d, char *const at[DIVIDED_IDS], float *dsink,
                                   fattn_buffers *b)
{
    fattn_buffers_init(b);
    b->q = at[DIVIDED_Q], b->k = at[DIVIDED_K], b->v = at[DIVIDED_V];
    b->o = at[DIVIDED_O], b->lse = at[DIVIDED_LSE];
    b->dout = at[DIVIDED_DOUT];
    b->dlse = d->problem.features & FATTN_DLSE ? at[DIVIDED_DLSE] : NULL;
    b->dq = at[DIVIDED_DQ], b->dk = at[DIVIDED_DK], b->dv = at[DIVIDED_DV];
    b->dsink = dsink;
    b->bias = d->problem.features & FATTN_BIAS ? d->bias : NULL;
    b->mask = d->problem.features & FATTN_MASK ? d->mask : NULL;
    b->dbias = d->problem.outputs & FATTN_OUT_DBIAS ? d->dbias : NULL;
    b->alibi_slopes = d->problem.features & FATTN_ALIBI ? d->slopes : NULL;
    b->sink = d->problem.features & FATTN_SINK ? d->sink : NULL;
    b->seed = d->problem.features & FATTN_DROPOUT ? d->seed : 0;
    b->offset = d->problem.features & FATTN_DROPOUT ? d->offset : 0;
}

/* Inputs, and what the reference makes of the undivided problem. */
static inline fattn_status divided_solve(divided *d, uint64_t seed, int64_t index)
{
    draw_rng rng = draw_stream(seed, index, 8);
    for (int id = 0; id < DIVIDED_IDS; id++) {
        d->whole[id] = divided_memory((size_t)divided_count(d, (divided_id)id) * 4);
    }
    divided_fill(d, DIVIDED_Q, &rng);
    divided_fill(d, DIVIDED_K, &rng);
    divided_fill(d, DIVIDED_V, &rng);
    divided_fill(d, DIVIDED_DOUT, &rng);
    divided_fill(d, DIVIDED_DLSE, &rng);
    for (int h = 0; h < DIVIDED_HEADS; h++) {
        d->slopes[h] = 0.05f * (float)(h + 1);
        d->sink[h] = (float)draw_normal(&rng);
    }
    const int64_t scores = divided_scores_count(d);
    d->bias = divided_memory((size_t)scores * sizeof *d->bias);
    d->dbias = divided_memory((size_t)scores * sizeof *d->dbias);
    d->mask = divided_memory((size_t)scores);
    for (int64_t n = 0; n < scores; n++) {
        d->bias[n] = (float)draw_normal(&rng);
        d->mask[n] = (uint8_t)draw_between(&rng, 0, 3);
    }
    fattn_problem p = d->problem;
    fattn_buffers b;
    fattn_device *device = NULL;
    p.layout = FATTN_BSHD;
    p.op = FATTN_FORWARD;
    p.features &= ~FATTN_DLSE;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    divided_buffers(d, d->whole, d->dsink, &b);
    b.dlse = NULL;
    b.dbias = NULL;
    b.cu_seqlens_q = d->ragged ? d->cu_q : NULL;
    b.cu_seqlens_k = d->ragged ? d->cu_k : NULL;
    fattn_status status = fattn_device_open("reference", &device);
    status = status ? status : fattn_attention(device, &p, &b, NULL);
    if (!status && d->problem.op == FATTN_BACKWARD) {
        p.op = FATTN_BACKWARD;
        p.features = d->problem.features;
        p.outputs = d->problem.outputs;
        b.dlse = p.features & FATTN_DLSE ? d->whole[DIVIDED_DLSE] : NULL;
        b.dbias = p.outputs & FATTN_OUT_DBIAS ? d->dbias : NULL;
        status = fattn_attention(device, &p, &b, NULL);
    }
    fattn_device_close(device);
    return status;
}

static inline void divided_free(divided *d)
{
    for (int id = 0; id < DIVIDED_IDS; id++) {
        free(d->whole[id]);
    }
    free(d->bias);
    free(d->dbias);
    free(d->mask);
}

/* --- A rank's share --------------------------------------------------------------------------- */

typedef struct divided_share {
    char *at[DIVIDED_IDS];
    float dsink[DIVIDED_HEADS];
    float *bias, *dbias; /* (B, Hq, rows, Sk): the rows of the share */
    uint8_t *mask;
    fattn_group_plan *plan;
    void *saved, *forward_o, *forward_lse; /* of a forward that saves rows, and its plan */
    fattn_group_plan *forward;
} divided_share;

/* Calls visit() for each row of one head of a rank's share, with the indices of its first element
 * in the whole tensor and in the share. */
typedef void divided_visit(const divided *d, divided_id id, int64_t whole, int64_t share,
                           void *context);

static inline int64_t divided_part(const divided *d, divided_id id, int ranks, int rank, int64_t b,
                                   int which, fattn_run *run)
{
    const int32_t *const cu = divided_has_keys(id) ? d->cu_k : d->cu_q;
    if (d->scheme == FATTN_SCHEME_REDUCE && !divided_has_keys(id)) {
        *run = (fattn_run){0, which ? 0 : cu[b + 1] - cu[b], 1};
        return run->count;
    }
    if (which >= fattn_split_runs(d->split) ||
        fattn_split_get_run(d->split, cu[b + 1] - cu[b], ranks, rank, which, run)) {
        return 0;
    }
    return run->count;
}

static inline int64_t divided_share_rows(const divided *d, divided_id id, int ranks, int rank,
                                         int64_t b)
{
    fattn_run run;
    return divided_part(d, id, ranks, rank, b, 0, &run) +
           divided_part(d, id, ranks, rank, b, 1, &run);
}

static inline void divided_each(const divided *d, divided_id id, int ranks, int rank,
                                divided_visit *visit, void *context)
{
    const int64_t heads = divided_heads(d, id), channels = divided_channels(d, id);
    const bool heads_first = id >= DIVIDED_LSE || d->problem.layout == FATTN_BHSD;
    const int64_t places = heads + (d->padded && !heads_first); /* of a row */
    int64_t total = 0, before = 0;
    for (int64_t b = 0; b < d->problem.batch; b++) {
        total += divided_share_rows(d, id, ranks, rank, b);
    }
    for (int64_t b = 0; b < d->problem.batch; b++) {
        const int64_t own = divided_share_rows(d, id, ranks, rank, b);
        int64_t at = 0;
        for (int which = 0; which < 2; which++) {
            fattn_run run;
            const int64_t count = divided_part(d, id, ranks, rank, b, which, &run);
            for (int64_t i = 0; i < count; i++, at++) {
                for (int64_t h = 0; h < heads; h++) {
                    const int64_t there = divided_at(d, id, b, run.first + i * run.stride, h);
                    const int64_t here = !heads_first ? (before + at) * places + h
                                         : d->ragged  ? h * total + before + at
                                                      : (b * heads + h) * own + at;
                    visit(d, id, there, here * channels, context);
                }
            }
        }
        before += own;
    }
}

static inline void divided_copy(const divided *d, divided_id id, int64_t whole, int64_t share,
                                void *context)
{
    const int64_t size = fattn_dtype_size(divided_dtype(d, id));
    memcpy((char *)context + share * size, d->whole[id] + whole * size,
           (size_t)(divided_channels(d, id) * size));
}

typedef struct divided_error {
    const char *share;
    double error, most; /* largest difference and value */
} divided_error;

static inline void divided_compare(const divided *d, divided_id id, int64_t whole, int64_t share,
                                   void *context)
{
    divided_error *const e = context;
    for (int64_t c = 0; c < divided_channels(d, id); c++) {
        const double a = fattn_dtype_load(divided_dtype(d, id), d->whole[id], whole + c);
        const double b = fattn_dtype_load(divided_dtype(d, id), e->share, share + c);
        const double error = a == b ? 0 : fabs(a - b); /* -inf in rows without keys */
        e->error = worst_of(e->error, error);
        e->most = fabs(a) > e->most && !isinf(a) ? fabs(a) : e->most;
    }
}

/* --- Biases and masks of a share -------------------------------------------------------------- */

static inline int64_t divided_score(const int64_t stride[4], int64_t b, int64_t h, int64_t i,
                                    int64_t j)
{
    return b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
}

/* The strides of a share, which broadcasts like the whole. */
static inline void divided_share_strides(const divided *d, int64_t rows, int64_t stride[4])
{
    const fattn_problem *const p = &d->problem;
    const int64_t keys = p->seqlen_k + !p->seqlen_k;
    const int64_t full[] = {p->heads_q * rows * keys, rows * keys, keys, 1};
    for (int axis = 0; axis < 4; axis++) {
        stride[axis] = stride[axis] ? full[axis] : 0;
    }
}

/* Copies the rows of a share out of bias and mask, or compares those of dbias: the largest
 * difference. `local` has the strides of the share. */
static inline double divided_each_score(const divided *d, int ranks, int rank,
                                        const fattn_problem *local, divided_share *share,
                                        bool compare)
{
    const fattn_problem *const p = &d->problem;
    double error = 0;
    int64_t at = 0;
    for (int which = 0; which < 2; which++) {
        fattn_run run;
        const int64_t count = divided_part(d, DIVIDED_Q, ranks, rank, 0, which, &run);
        const int64_t keys = compare && p->dbias_stride[3] == 0 ? 1 : p->seqlen_k;
        for (int64_t n = 0; n < count * p->batch * p->heads_q * keys; n++) {
            const int64_t j = n % keys, i = n / keys % count;
            const int64_t h = n / keys / count % p->heads_q;
            const int64_t b = n / keys / count / p->heads_q;
            const int64_t row = run.first + i * run.stride;
            if (compare) {
                const float mine =
                    share->dbias[divided_score(local->dbias_stride, b, h, at + i, j)];
                const float whole = d->dbias[divided_score(p->dbias_stride, b, h, row, j)];
                const double off = fabs((double)mine - (double)whole);
                error = worst_of(error, off);
                continue;
            }
            share->bias[divided_score(local->bias_stride, b, h, at + i, j)] =
                d->bias[divided_score(p->bias_stride, b, h, row, j)];
            share->mask[divided_score(local->mask_stride, b, h, at + i, j)] =
                d->mask[divided_score(p->mask_stride, b, h, row, j)];
        }
        at += count;
    }
    return error;
}

/* The problem as a rank describes it. */
static inline fattn_problem divided_local(const divided *d, int ranks, int rank)
{
    fattn_problem p = d->problem;
    const int64_t own = divided_share_rows(d, DIVIDED_Q, ranks, rank, 0);
    const int64_t rows = own + !own;
    divided_share_strides(d, rows, p.bias_stride);
    divided_share_strides(d, rows, p.mask_stride);
    divided_share_strides(d, rows, p.dbias_stride);
    fattn_strides *const strides[] = {&p.q, &p.k, &p.v, &p.o, &p.dout, &p.dq, &p.dk, &p.dv};
    for (int id = DIVIDED_Q; (d->strided || d->padded) && id <= DIVIDED_DV; id++) {
        const int64_t channels = divided_channels(d, (divided_id)id);
        const int64_t heads = divided_heads(d, (divided_id)id) + d->padded;
        const int64_t one = channels * divided_share_rows(d, (divided_id)id, ranks, rank, 0);
        p.layout = FATTN_STRIDED;
        *strides[id] = (fattn_strides){.batch = heads * one,
                                       .seq = d->padded ? heads * channels : channels,
                                       .head = d->padded ? channels : one};
    }
    return p;
}

/* Tensors of a share in the memory of a device that has its own. */
typedef struct divided_mirror {
    void *host[24], *device[24];
    size_t bytes[24];
    int count;
} divided_mirror;

static inline fattn_status divided_to_device(divided_mirror *m, const void **field, size_t bytes)
{
    const int n = m->count;
    if (!*field || !bytes) {
        return FATTN_OK;
    }
    m->host[n] = (void *)*field, m->bytes[n] = bytes;
    fattn_status status = fattn_device_malloc(NULL, bytes, &m->device[n]);
    status = status ? status : fattn_device_copy(NULL, m->device[n], *field, bytes, NULL);
    *field = m->device[n];
    m->count++;
    return status;
}

static inline fattn_status divided_all_to_device(const divided *d, divided_mirror *m,
                                                 fattn_buffers *b)
{
    const void **const fields[] = {&b->q,
                                   &b->k,
                                   &b->v,
                                   (const void **)&b->o,
                                   &b->dout,
                                   (const void **)&b->dq,
                                   (const void **)&b->dk,
                                   (const void **)&b->dv,
                                   (const void **)&b->lse,
                                   &b->dlse};
    const size_t scores = (size_t)divided_scores_count(d);
    fattn_status status = FATTN_OK;
    for (int id = 0; !status && id < DIVIDED_IDS; id++) {
        status = divided_to_device(m, fields[id], (size_t)divided_count(d, (divided_id)id) * 4);
    }
    status = status ? status : divided_to_device(m, &b->bias, scores * 4);
    status = status ? status : divided_to_device(m, (const void **)&b->mask, scores);
    status = status ? status : divided_to_device(m, (const void **)&b->dbias, scores * 4);
    status = status ? status : divided_to_device(m, &b->alibi_slopes, sizeof d->slopes);
    status = status ? status : divided_to_device(m, &b->sink, sizeof d->sink);
    return status ? status : divided_to_device(m, (const void **)&b->dsink, sizeof d->dsink);
}

/* Copies results back if all went well. Inputs have not changed. */
static inline fattn_status divided_from_device(divided_mirror *m, fattn_status status)
{
    for (int n = 0; n < m->count; n++) {
        if (!status) {
            status = fattn_device_copy(NULL, m->host[n], m->device[n], m->bytes[n], NULL);
            status = status ? status : fattn_stream_synchronize(NULL, NULL);
        }
        fattn_device_free(NULL, m->device[n]);
    }
    return status;
}

/* Runs a forward that saves rows for the backward with these buffers, which then lack q, k, v, o
 * and lse. *saved: where the rows are. */
static inline fattn_status divided_save(const divided *d, const fattn_group *group,
                                        const fattn_problem *backward, size_t bytes,
                                        divided_mirror *mirror, divided_share *share,
                                        fattn_buffers *b, const void **saved)
{
    const size_t o_bytes = (size_t)divided_count(d, DIVIDED_O) * 4;
    const size_t lse_bytes = (size_t)divided_count(d, DIVIDED_LSE) * 4;
    fattn_problem p = *backward;
    fattn_buffers f = *b;
    p.op = FATTN_FORWARD;
    p.features &= ~FATTN_DLSE;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    f.dout = f.dlse = NULL;
    f.dq = f.dk = f.dv = NULL;
    f.dsink = NULL;
    f.o = share->forward_o = divided_memory(o_bytes);
    f.lse = share->forward_lse = divided_memory(lse_bytes);
    *saved = share->saved = divided_memory(bytes);
    fattn_status status = FATTN_OK;
    if (group->transport->device_memory) {
        status = divided_to_device(mirror, (const void **)&f.o, o_bytes);
        status = status ? status : divided_to_device(mirror, (const void **)&f.lse, lse_bytes);
        status = status ? status : divided_to_device(mirror, saved, bytes);
    }
    status = status ? status
                    : fattn_group_plan_create(group, &p, d->ragged ? d->cu_q : NULL,
                                              d->ragged ? d->cu_k : NULL, &share->forward);
    if (!status && fattn_group_plan_saved_bytes(share->forward) != (int64_t)bytes) {
        return fattn_transport_fail(FATTN_INVALID_SHAPE, "forward saves more or less");
    }
    b->q = b->k = b->v = NULL;
    b->o = NULL;
    b->lse = NULL;
    return status ? status : fattn_group_execute_saved(share->forward, &f, (void *)*saved);
}

/* Runs the share of one rank. */
static inline fattn_status divided_run(const divided *d, const fattn_transport *transport,
                                       double timeout, divided_share *share)
{
    static const divided_id inputs[] = {DIVIDED_Q,    DIVIDED_K, DIVIDED_V,  DIVIDED_DOUT,
                                        DIVIDED_DLSE, DIVIDED_O, DIVIDED_LSE};
    const int ranks = transport->ranks, rank = transport->rank;
    const bool backward = d->problem.op == FATTN_BACKWARD;
    memset(share, 0, sizeof *share);
    for (int id = 0; id < DIVIDED_IDS; id++) {
        share->at[id] = divided_memory((size_t)divided_count(d, (divided_id)id) * 4);
    }
    for (int n = 0; n < (backward ? 7 : 3); n++) {
        divided_each(d, inputs[n], ranks, rank, divided_copy, share->at[inputs[n]]);
    }
    const fattn_problem p = divided_local(d, ranks, rank);
    const int64_t scores = divided_scores_count(d);
    share->bias = divided_memory((size_t)scores * sizeof *share->bias);
    share->dbias = divided_memory((size_t)scores * sizeof *share->dbias);
    share->mask = divided_memory((size_t)scores);
    if (p.features & (FATTN_BIAS | FATTN_MASK)) {
        divided_each_score(d, ranks, rank, &p, share, false);
    }
    fattn_group group;
    fattn_group_init(&group);
    group.transport = transport;
    group.split = d->split;
    group.scheme = d->scheme;
    group.memory = d->memory;
    group.turns = d->turns;
    group.saves = d->saves && d->memory == 0;
    group.timeout = timeout;
    fattn_buffers b;
    divided_buffers(d, share->at, share->dsink, &b);
    b.bias = b.bias ? share->bias : NULL;
    b.mask = b.mask ? share->mask : NULL;
    b.dbias = b.dbias ? share->dbias : NULL;
    divided_mirror mirror = {.count = 0};
    fattn_status status = FATTN_OK;
    if (transport->device_memory) {
        status = divided_all_to_device(d, &mirror, &b);
    }
    if (!status) {
        status = fattn_group_plan_create(&group, &p, d->ragged ? d->cu_q : NULL,
                                         d->ragged ? d->cu_k : NULL, &share->plan);
    }
    const int64_t bytes = fattn_group_plan_saved_bytes(share->plan);
    const void *saved = NULL;
    if (!status && backward && bytes > 0) {
        status = divided_save(d, &group, &p, (size_t)bytes, &mirror, share, &b, &saved);
    }
    for (int n = 0; !status && n < 1 + (int)(d->seed & 1); n++) { /* a plan serves again */
        status = fattn_group_execute_saved(share->plan, &b, (void *)saved);
    }
    return divided_from_device(&mirror, status);
}

/* After a failure, call it only once the transport is closed: until then that may still use the
 * memory of messages. */
static inline void divided_share_free(divided_share *share)
{
    fattn_group_plan_destroy(share->plan);
    fattn_group_plan_destroy(share->forward);
    free(share->saved);
    free(share->forward_o);
    free(share->forward_lse);
    for (int id = 0; id < DIVIDED_IDS; id++) {
        free(share->at[id]);
    }
    free(share->bias);
    free(share->dbias);
    free(share->mask);
}

/* Whether a rank's results are those of the undivided problem; says what is not. */
static inline bool divided_is_right(const divided *d, int ranks, int rank, divided_share *share,
                                    char *text, size_t size)
{
    static const struct {
        divided_id id;
        uint32_t output;
        const char *name;
    } outputs[] = {{DIVIDED_O, FATTN_OUT_O, "o"},
                   {DIVIDED_LSE, FATTN_OUT_LSE, "lse"},
                   {DIVIDED_DQ, FATTN_OUT_DQ, "dq"},
                   {DIVIDED_DK, FATTN_OUT_DK, "dk"},
                   {DIVIDED_DV, FATTN_OUT_DV, "dv"}};
    /* f32 sums in another order; 16-bit kernels round P and dS to 8 or 11 bits. */
    const double unit = d->problem.dtype == FATTN_F32   ? 2e-5
                        : d->problem.dtype == FATTN_F16 ? 0x1p-8
                                                        : 0x1p-5;
    for (size_t n = 0; n < sizeof outputs / sizeof outputs[0]; n++) {
        if (d->problem.outputs & outputs[n].output) {
            divided_error e = {share->at[outputs[n].id], 0, 1};
            divided_each(d, outputs[n].id, ranks, rank, divided_compare, &e);
            if (!(e.error <= unit * e.most)) {
                snprintf(text, size, "%s of rank %d is off by %g, its largest value being %g",
                         outputs[n].name, rank, e.error, e.most);
                return false;
            }
        }
    }
    if (d->problem.outputs & FATTN_OUT_DBIAS) {
        const fattn_problem p = divided_local(d, ranks, rank);
        const double most = fmax(1, (double)(p.dbias_stride[3] ? 1 : p.seqlen_k)) * 4;
        const double error = divided_each_score(d, ranks, rank, &p, share, true);
        if (!(error <= unit * most)) {
            snprintf(text, size, "dbias of rank %d is off by %g", rank, error);
            return false;
        }
    }
    for (int64_t h = 0; d->problem.outputs & FATTN_OUT_DSINK && h < d->problem.heads_q; h++) {
        const double most = fmax(1, (double)divided_rows(d, DIVIDED_Q)) * 2;
        if (!(fabs((double)share->dsink[h] - (double)d->dsink[h]) <= unit * most)) {
            snprintf(text, size, "dsink of rank %d is %g, not %g", rank, (double)share->dsink[h],
                     (double)d->dsink[h]);
            return false;
        }
    }
    return true;
}

static inline void divided_describe(const divided *d, char *text, size_t size)
{
    const fattn_problem *const p = &d->problem;
    snprintf(text, size,
             "%s %s scheme %d split %d B%lld H%lld/%lld S%lldx%lld D%lld/%lld features %llx "
             "window %lld,%lld anchor %d layout %d outputs %x",
             p->op == FATTN_FORWARD ? "forward" : "backward", fattn_dtype_name(p->dtype),
             (int)d->scheme, (int)d->split, (long long)p->batch, (long long)p->heads_q,
             (long long)p->heads_k, (long long)p->seqlen_q, (long long)p->seqlen_k,
             (long long)p->dim, (long long)p->dim_v, (unsigned long long)p->features,
             (long long)p->window_left, (long long)p->window_right, (int)p->anchor, (int)p->layout,
             p->outputs);
}

/* --- Ranks that are threads ------------------------------------------------------------------- */

enum { DIVIDED_RANKS_MAX = 10 };

/* How a rank's thread opens and closes its transport. */
typedef struct divided_transport {
    fattn_status (*open)(void *context, int rank, fattn_transport **transport);
    void (*close)(fattn_transport *transport);
    void *context;
} divided_transport;

typedef struct divided_rank {
    pthread_t thread;
    const divided *problem;
    const divided_transport *over;
    int rank;
    fattn_status status;
    char reason[512];
    divided_share share;
} divided_rank;

static inline void *divided_run_rank(void *context)
{
    divided_rank *const r = context;
    fattn_transport *transport = NULL;
    r->status = r->over->open(r->over->context, r->rank, &transport);
    r->status = r->status ? r->status : divided_run(r->problem, transport, 60, &r->share);
    fattn_last_reason_copy(r->reason, sizeof r->reason);
    r->over->close(transport);
    return NULL;
}

/* Runs a problem that has been solved over such a transport; prints what is wrong. Rank r has
 * problems[r]: they differ at most in their layouts. */
static inline bool divided_over_is_right(const divided_transport *over,
                                         const divided *const *problems, int64_t index, int ranks)
{
    static divided_rank all[DIVIDED_RANKS_MAX];
    char text[256] = "";
    bool good = true;
    for (int r = 0; r < ranks; r++) {
        all[r] = (divided_rank){.problem = problems[r], .over = over, .rank = r};
        if (pthread_create(&all[r].thread, NULL, divided_run_rank, &all[r])) {
            tap_bail("no thread");
        }
    }
    for (int r = 0; r < ranks; r++) {
        pthread_join(all[r].thread, NULL);
    }
    for (int r = 0; good && r < ranks; r++) {
        snprintf(text, sizeof text, "%.250s", all[r].reason);
        good = !all[r].status &&
               divided_is_right(problems[r], ranks, r, &all[r].share, text, sizeof text);
    }
    if (!good) {
        char what[256];
        divided_describe(problems[0], what, sizeof what);
        printf("# case %lld on %d ranks: %s\n#   %s\n", (long long)index, ranks, text, what);
    }
    for (int r = 0; r < ranks; r++) {
        divided_share_free(&all[r].share);
    }
    return good;
}

/* The same for a drawn problem. */
static inline bool divided_case_is_right(const divided_transport *over, uint64_t seed,
                                         int64_t index, int ranks)
{
    divided d;
    const divided *problems[DIVIDED_RANKS_MAX];
    for (int r = 0; r < ranks; r++) {
        problems[r] = &d;
    }
    divided_draw(&d, seed, index, ranks);
    const bool solved = divided_solve(&d, seed, index) == FATTN_OK;
    if (!solved) {
        printf("# case %lld: %s\n", (long long)index, fattn_last_reason());
    }
    const bool good = solved && divided_over_is_right(over, problems, index, ranks);
    divided_free(&d);
    return good;
}

#endif
