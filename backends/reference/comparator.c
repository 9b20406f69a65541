/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The comparator of the accuracy bound (docs/NUMERICS.md): the plain formula, without tiles, in
 * f32, with the operands of matrix products rounded to the input dtype. A kernel's error may be a
 * small multiple of this one's. naive.c finds and decodes the data; every sum is written here, in
 * float, in ascending order of its index.
 */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "core/memory.h"
#include "core/status.h"

/* The slice in float, a row's intermediates, and the sums over several slices. */
typedef struct work {
    float *q, *dout;  /* [sq][dim], [sq][dim_v] */
    float *k, *kt;    /* [sk][dim], [dim][sk] */
    float *v, *vt;    /* [sk][dim_v], [dim_v][sk] */
    float *x, *slope; /* [sk]: scores; derivative of the softcap */
    float *dp;        /* [sk] */
    float *o, *dq;    /* [dim_v], [dim] */
    float *dk, *dv;   /* [sk][dim], [sk][dim_v]: of a kv head */
    float *dbias;     /* like dbias */
    float *dsink;     /* [hq] */
    float *memory;
} work;

typedef struct piece {
    float **place;
    int64_t rows, columns;
} piece;

/* Products of extents cannot overflow: lengths are below 2^31, and dbias already exists in
 * double. */
static fattn_status work_create(const fattn_problem *p, const fattn_naive *r, work *w)
{
    *w = (work){0};
    const int64_t *e = r->bias_extent;
    const bool empty = p->batch == 0 || p->heads_q == 0;
    const int64_t sq = empty ? 0 : r->sq, sk = empty ? 0 : r->sk;
    const piece pieces[] = {
        {&w->q, sq, r->dim},
        {&w->dout, sq, r->dim_v},
        {&w->k, sk, r->dim},
        {&w->kt, sk, r->dim},
        {&w->v, sk, r->dim_v},
        {&w->vt, sk, r->dim_v},
        {&w->x, sk, 1},
        {&w->slope, sk, 1},
        {&w->dp, sk, 1},
        {&w->o, 1, r->dim_v},
        {&w->dq, 1, r->dim},
        {&w->dk, sk, r->dim},
        {&w->dv, sk, r->dim_v},
        {&w->dbias, e[0] * e[1], e[2] * e[3]},
        {&w->dsink, p->heads_q, 1},
    };
    size_t total = 1;
    for (size_t n = 0; n < sizeof(pieces) / sizeof(pieces[0]); n++) {
        total += (size_t)(pieces[n].rows * pieces[n].columns);
    }
    w->memory = fattn_memory_alloc(total * sizeof(float));
    if (w->memory == NULL) {
        return fattn_fail_memory((int64_t)(total * sizeof(float)), "the comparator's arrays");
    }
    memset(w->memory, 0, total * sizeof(float));
    float *room = w->memory;
    for (size_t n = 0; n < sizeof(pieces) / sizeof(pieces[0]); n++) {
        *pieces[n].place = room;
        room += pieces[n].rows * pieces[n].columns;
    }
    return FATTN_OK;
}

static void clear(float *sum, int64_t count)
{
    for (int64_t n = 0; n < count; n++) {
        sum[n] = 0;
    }
}

static void narrow(const double *from, int64_t count, float *to)
{
    for (int64_t n = 0; n < count; n++) {
        to[n] = (float)from[n];
    }
}

/* to[n] = factor * from[n], rounded to the dtype of the output. */
static void emit(const float *from, int64_t count, float factor, fattn_dtype dtype, double *to)
{
    for (int64_t n = 0; n < count; n++) {
        to[n] = fattn_naive_round((double)(factor * from[n]), dtype);
    }
}

/* Rounds a probability or dS as a matrix product's operand. */
static float operand(const fattn_problem *p, float x)
{
    const fattn_dtype dtype = fattn_naive_dtype_operand(p);
    return dtype == FATTN_F64 ? x : (float)fattn_naive_round((double)x, dtype);
}

static void load_slice(const fattn_problem *p, const fattn_naive_slice *s, work *w)
{
    narrow(s->q, s->seq.rows * p->dim, w->q);
    narrow(s->k, s->seq.keys * p->dim, w->k);
    narrow(s->kt, s->seq.keys * p->dim, w->kt);
    narrow(s->v, s->seq.keys * p->dim_v, w->v);
    narrow(s->vt, s->seq.keys * p->dim_v, w->vt);
    if (p->op == FATTN_BACKWARD) {
        narrow(s->dout, s->seq.rows * p->dim_v, w->dout);
    }
}

/* sum[j] = sum_c a_c b_cj */
static void products(const float *a, int64_t channels, const float *b, int64_t keys,
                     float *restrict sum)
{
    clear(sum, keys);
    for (int64_t c = 0; c < channels; c++, b += keys) {
        for (int64_t j = 0; j < keys; j++) {
            sum[j] += a[c] * b[j];
        }
    }
}

static void add(float factor, const float *a, int64_t channels, float *restrict sum)
{
    for (int64_t c = 0; c < channels; c++) {
        sum[c] += factor * a[c];
    }
}

static void scores(const fattn_problem *p, const fattn_naive_slice *s, int64_t i, work *w)
{
    const bool capped = p->features & FATTN_SOFTCAP;
    const float scale = (float)p->scale, softcap = (float)p->softcap;
    products(w->q + i * p->dim, p->dim, w->kt, s->seq.keys, w->x);
    for (int64_t j = 0; j < s->seq.keys; j++) {
        float x = scale * w->x[j], t = 0;
        if (capped) {
            t = tanhf(x / softcap);
            x = softcap * t;
        }
        x += (float)s->bias[j];
        x += (float)s->alibi[j];
        w->x[j] = x;
        w->slope[j] = 1 - t * t;
    }
}

static void forward_row(const fattn_problem *p, const fattn_naive_slice *s, int64_t i, work *w,
                        fattn_naive *r)
{
    const int64_t row = (s->b * p->heads_q + s->h) * p->seqlen_q + i, keys = s->seq.keys;
    const float sink = (float)s->sink;
    scores(p, s, i, w);
    float m = sink;
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] != 0 && w->x[j] > m) {
            m = w->x[j];
        }
    }
    if (m == -INFINITY) {
        m = 0;
    }
    float l = expf(sink - m);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] != 0) {
            l += expf(w->x[j] - m);
        }
    }
    r->lse[row] = l == 0 ? -(double)INFINITY : (double)(m + logf(l));
    if (l == 0) {
        return;
    }

    clear(w->o, p->dim_v);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] != 0) {
            add(operand(p, (float)s->z[j] * (expf(w->x[j] - m) / l)), w->v + j * p->dim_v, p->dim_v,
                w->o);
        }
    }
    emit(w->o, p->dim_v, 1, p->dtype_o, r->o + row * p->dim_v);
}

static void backward_row(const fattn_problem *p, const fattn_naive_slice *s, int64_t i, work *w,
                         fattn_naive *r)
{
    const int64_t row = (s->b * p->heads_q + s->h) * p->seqlen_q + i, keys = s->seq.keys;
    const float *q = w->q + i * p->dim, *dout = w->dout + i * p->dim_v;
    const float lse = (float)r->lse[row];
    if (lse == -INFINITY) {
        return;
    }

    float delta = 0;
    for (int64_t c = 0; c < p->dim_v; c++) {
        delta += dout[c] * (float)r->o[row * p->dim_v + c];
    }
    delta -= (float)s->dlse[i];
    w->dsink[s->h] -= expf((float)s->sink - lse) * delta;

    scores(p, s, i, w);
    products(dout, p->dim_v, w->vt, keys, w->dp);
    clear(w->dq, p->dim);
    for (int64_t j = 0; j < keys; j++) {
        if (s->keep[j] == 0) {
            continue;
        }
        const float prob = expf(w->x[j] - lse), z = (float)s->z[j];
        add(operand(p, prob * z), dout, p->dim_v, w->dv + j * p->dim_v);

        const float ds = prob * (z * w->dp[j] - delta);
        if (r->dbias != NULL) {
            w->dbias[fattn_naive_dbias_index(p, r, s, i, j)] += (float)s->bias_slope * ds;
        }
        const float ds_operand = operand(p, ds * w->slope[j]);
        add(ds_operand, w->k + j * p->dim, p->dim, w->dq);
        add(ds_operand, q, p->dim, w->dk + j * p->dim);
    }
    emit(w->dq, p->dim, (float)p->scale, fattn_naive_dtype_grad(p, p->dtype), r->dq + row * p->dim);
}

static void run_group(const fattn_problem *p, const fattn_buffers *buf, int64_t b, int64_t hk,
                      fattn_naive_slice *s, work *w, fattn_naive *r)
{
    const int64_t group = p->heads_q / p->heads_k, kv = b * p->heads_k + hk;
    const bool backward = p->op == FATTN_BACKWARD;
    const fattn_dtype dtype_dk = fattn_naive_dtype_grad(p, p->dtype_kv);
    const fattn_dtype dtype_dv = fattn_naive_dtype_grad(p, p->dtype_v);
    clear(w->dk, p->seqlen_k * p->dim);
    clear(w->dv, p->seqlen_k * p->dim_v);
    for (int64_t h = hk * group; h < (hk + 1) * group; h++) {
        fattn_naive_slice_load(p, buf, b, h, s);
        load_slice(p, s, w);
        if (backward) {
            fattn_naive_slice_load_saved(p, buf, s, r);
        }
        for (int64_t i = 0; i < s->seq.rows; i++) {
            fattn_naive_slice_load_row(p, buf, i, s);
            if (backward) {
                backward_row(p, s, i, w, r);
            } else {
                forward_row(p, s, i, w, r);
            }
        }
    }
    if (!backward) {
        return;
    }
    const int64_t first = kv * p->seqlen_k;
    emit(w->dk, p->seqlen_k * p->dim, (float)p->scale, dtype_dk, r->dk + first * p->dim);
    emit(w->dv, p->seqlen_k * p->dim_v, 1, dtype_dv, r->dv + first * p->dim_v);
}

/* The frame of run() in naive.c around other work: one that took its steps from either file by
 * pointers would have more lines than the two share. */
fattn_status fattn_comparator_run(const fattn_problem *p, const fattn_buffers *buf,
                                  fattn_naive *result)
{
    fattn_naive_slice slice = {0};
    work w = {0};
    fattn_naive *r = result;
    fattn_status status = fattn_naive_allocate(p, buf, r);
    if (status == FATTN_OK) {
        status = fattn_naive_slice_create(p, &slice);
    }
    if (status == FATTN_OK) {
        status = work_create(p, r, &w);
    }
    if (status == FATTN_OK) {
        for (int64_t b = 0; p->heads_q > 0 && b < p->batch; b++) {
            for (int64_t hk = 0; hk < p->heads_k; hk++) {
                run_group(p, buf, b, hk, &slice, &w, r);
            }
        }
        const int64_t *e = r->bias_extent;
        if (r->dbias != NULL) {
            emit(w.dbias, e[0] * e[1] * e[2] * e[3], 1, FATTN_F32, r->dbias);
        }
        if (r->dsink != NULL) {
            emit(w.dsink, p->heads_q, 1, FATTN_F32, r->dsink);
        }
    }
    fattn_memory_free(w.memory);
    fattn_naive_slice_free(&slice);
    if (status != FATTN_OK) {
        fattn_naive_free(r);
    }
    return status;
}
