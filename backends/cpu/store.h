/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores the results of a strip, o and lse, from m, l and o as its products left them: by rows or
 * columns, divided by l or not, in scratch or in the tensor. A row that attends to no key gets
 * zeros.
 */
#ifndef FATTN_CPU_STORE_H
#define FATTN_CPU_STORE_H

#include "backends/cpu/round.h"
#include "backends/cpu/strip.h"

/* Writes lse of the panel's rows. */
static void store_lse(const forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    float *const to = pn->run->buffers->lse;
    int64_t head = 0; /* where lse of a row's head begins */
    if (!(p->outputs & FATTN_OUT_LSE)) {
        return;
    }
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv lse = fattn_softmax_lse(state_for_lse(f, r), fv_set1(pn->rule.natural));
        fv_store(f->alpha + r, lse);
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        if (r == 0 || pn->group > 1) {
            head = fattn_lse_index(p, &pn->seq, pn->b, pn->row[r].h);
        }
        to[head + pn->row[r].i] = f->alpha[r];
    }
}

/* Writes row r of o: from[0 .. dim_v) times factor. */
static void store_row(const panel *pn, int64_t r, const float *from, float factor)
{
    const fattn_problem *const p = pn->p;
    row_store(row_of_o(pn, r), p->dtype_o, from, p->dim_v, factor);
}

/* Writes o of the panel's rows one by one, times f->alpha. in_tensor: it is there already, except
 * for rows that attend to no key */
static void store_each_row(const forward *f, bool in_tensor)
{
    const panel *const pn = &f->panel;
    for (int64_t r = 0; r < pn->rows; r++) {
        if (f->l[r] == 0) { /* zeros, not o times 0: o may hold 0 * inf */
            store_row(pn, r, pn->zeros, 1);
        } else if (!in_tensor) {
            store_row(pn, r, f->o + r * pn->dv_pad, f->alpha[r]);
        }
    }
}

/* Writes o and lse of the panel's rows from m, l and the unnormalised o. */
static void forward_store(forward *f)
{
    const panel *const pn = &f->panel;
    if (pn->p->outputs & FATTN_OUT_O) {
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            fv_store(f->alpha + r, normaliser_of_o(f, r));
        }
        store_each_row(f, false);
    }
    store_lse(f);
}

/* Whether every row attends to a key. Also false if some l is NaN. */
static bool all_attend(const forward *f)
{
    const fv zero = fv_set1(0);
    mv all = fv_eq(zero, zero);
    for (int64_t r = 0; r < f->panel.width; r += FV_LANES) {
        all = mv_and(all, fv_lt(zero, fv_load(f->l + r)));
    }
    return mv_all(all);
}

/* Writes o of all rows, times f->alpha, which holds their normalisers. dim_v is whole vectors, and
 * the rows are evenly spaced in the tensor. */
static void store_even_rows(const forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const int64_t step = p->o.seq * fattn_dtype_size(p->dtype_o);
    char *const to = row_of_o(pn, 0);
    switch (p->dtype_o) {
    case FATTN_F16: rows_store(to, FATTN_F16, step, f->o, f->alpha, pn->rows, p->dim_v); break;
    case FATTN_BF16: rows_store(to, FATTN_BF16, step, f->o, f->alpha, pn->rows, p->dim_v); break;
    default: rows_store(to, FATTN_F32, step, f->o, f->alpha, pn->rows, p->dim_v); break;
    }
}

/* forward_store() for o by rows, which may be normalised, and in its tensor already. */
static void forward_store_rows(forward *f)
{
    const panel *const pn = &f->panel;
    const bool even = pn->group == 1 && pn->p->dim_v % FV_LANES == 0;
    const bool wanted = pn->p->outputs & FATTN_OUT_O;
    for (int64_t r = 0; r < pn->width && !f->in_tensor; r += FV_LANES) {
        fv_store(f->alpha + r, f->normalised ? fv_set1(1) : normaliser_of_o(f, r));
    }
    if (wanted && !(even && all_attend(f))) {
        store_each_row(f, f->in_tensor);
    } else if (wanted && !f->in_tensor) {
        store_even_rows(f);
    }
    store_lse(f);
}

/* to[n] = row r + n of o as bf16 for n < FV_LANES. Transposes pairs of columns, of which there are
 * half as many. */
INLINE void rows_of_pairs(const forward *f, int64_t r, char *to, int64_t step)
{
    const panel *const pn = &f->panel;
    const fv factor = fv_load(f->alpha + r);
    for (int64_t c = 0; c < pn->p->dim_v; c += 2 * FV_LANES, to += sizeof(fv)) {
        _Alignas(64) float pairs[FV_LANES * FV_LANES];
        fv x[FV_LANES];
        round_columns(f->ot + c * pn->br + r, pn->br, factor, pairs);
        fv_load_transposed(pairs, FV_LANES, x);
        for (int n = 0; n < FV_LANES; n++) {
            fv_store((float *)(void *)(to + n * step), x[n]);
        }
    }
}

/* to[n] = row r + n of o for n < FV_LANES, transposed from columns. dtype: a literal; stride: in
 * elements */
INLINE void rows_of_columns(const forward *f, int64_t r, fattn_dtype dtype, void *to,
                            int64_t stride)
{
    const panel *const pn = &f->panel;
    const int64_t size = fattn_dtype_size(dtype);
    const bool pairs = FV_LANES > 1 && dtype == FATTN_BF16 && pn->p->dim_v % (2 * FV_LANES) == 0;
    fv_store(f->alpha + r, normaliser_of_o(f, r));
    if (pairs) {
        rows_of_pairs(f, r, to, stride * size);
    }
    for (int64_t c = 0; c < pn->p->dim_v && !pairs; c += FV_LANES) {
        char *at = (char *)to + c * size;
        fv x[FV_LANES];
        fv_load_transposed(f->ot + c * pn->br + r, pn->br, x);
        for (int n = 0; n < FV_LANES; n++, at += stride * size) {
            store_as(dtype, at, fv_mul(fv_set1(f->alpha[r + n]), x[n]), FV_LANES);
        }
    }
    for (int n = 0; n < FV_LANES; n++) {
        if (f->l[r + n] == 0) { /* o may hold 0 * inf */
            memset((char *)to + n * stride * size, 0, (size_t)(pn->p->dim_v * size));
        }
    }
}

/* forward_store() for o by columns, where keys are not split. */
static void forward_store_columns(forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    for (int64_t r = 0; r < pn->width && p->outputs & FATTN_OUT_O; r += FV_LANES) {
        if (rows_in_place(pn, p->dim_v, r)) {
            void *const to = row_of_o(pn, r);
            switch (p->dtype_o) {
            case FATTN_F16: rows_of_columns(f, r, FATTN_F16, to, p->o.seq); break;
            case FATTN_BF16: rows_of_columns(f, r, FATTN_BF16, to, p->o.seq); break;
            default: rows_of_columns(f, r, FATTN_F32, to, p->o.seq); break;
            }
            continue;
        }
        rows_of_columns(f, r, FATTN_F32, f->o, pn->dv_pad);
        for (int64_t n = 0; n < fattn_min64(FV_LANES, pn->rows - r); n++) {
            store_row(pn, r + n, f->o + n * pn->dv_pad, 1);
        }
    }
    store_lse(f);
}

/* --- Merging with what the rows have already ------------------------------------------------- */

/* Row r of the earlier o, with which this run's results are merged. */
static const float *row_before(const panel *pn, int64_t r)
{
    const fattn_state *const from = &pn->run->onto->first;
    return (const float *)from->o + fattn_state_row(from, pn->b, pn->row[r].h, pn->row[r].i);
}

/* Prefetches slice n of `parts` of the strip's rows of the earlier o, with which this run's results
 * will be merged, into the second-level cache. */
static void prefetch_earlier_o(const panel *pn, int64_t n, int64_t parts)
{
    const int64_t bytes = pn->p->dim_v * (int64_t)sizeof(float);
    for (int64_t r = pn->rows * n / parts; r < pn->rows * (n + 1) / parts; r++) {
        const char *const row = (const char *)row_before(pn, r);
        for (int64_t at = 0; at < bytes; at += CACHE_LINE) {
            __builtin_prefetch(row + at, 0, 2);
        }
    }
}

/* The {m, l} that stand for a log-sum-exp, in natural units. */
static fattn_softmax state_of_lse(fv lse)
{
    const fv none = fv_set1(-INFINITY);
    return (fattn_softmax){.m = lse, .l = fv_select(fv_eq(lse, none), fv_set1(0), fv_set1(1))};
}

/* Finds the factors by which rows are multiplied before they are added: those of the earlier rows
 * are returned, those of the panel's rows, whose o is normalised or not, are f->alpha. Writes lse
 * of the merged results. */
static float *weigh_rows_before(forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_merge_job *const job = pn->run->onto;
    /* Scratch for scores, which are no longer needed. */
    float *const first = pn->at, *const lse = pn->lo;
    const fv log2e = fv_set1((float)FATTN_LOG2E), one = fv_set1(1);
    for (int64_t r = 0; r < pn->width; r++) {
        lse[r] =
            r < pn->rows ? *fattn_state_lse(&job->first, pn->b, pn->row[r].h, pn->row[r].i) : 0;
    }
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv own_lse = fattn_softmax_lse(state_for_lse(f, r), fv_set1(pn->rule.natural));
        fattn_softmax both = state_of_lse(fv_load(lse + r));
        fv a, b;
        fattn_softmax_merge(&both, state_of_lse(own_lse), log2e, &a, &b);
        const fv factor = fattn_softmax_normaliser(both);
        fv_store(first + r, fv_mul(a, factor));
        fv_store(f->alpha + r,
                 fv_mul(fv_mul(b, factor), f->normalised ? one : normaliser_of_o(f, r)));
        fv_store(lse + r, fattn_softmax_lse(both, one));
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        *fattn_state_lse(&job->result, pn->b, pn->row[r].h, pn->row[r].i) = lse[r];
    }
    return first;
}

/* Writes row r of the merged o: `first` times the earlier row, plus `own`, [dv_pad], which is
 * already multiplied. empty: this run has no keys for the row, and `own` is not read, since it may
 * hold 0 * inf. An earlier state without keys holds zeros. */
static void merge_row(const panel *pn, int64_t r, float *own, bool empty, float first)
{
    const fattn_merge_job *const job = pn->run->onto;
    const int64_t n = pn->p->dim_v, whole = in_whole_vectors(n);
    const float *const before = row_before(pn, r);
    char *const to =
        (char *)job->result.o + fattn_state_row(&job->result, pn->b, pn->row[r].h, pn->row[r].i) *
                                    fattn_dtype_size(job->dtype);
    if (empty) {
        memcpy(own, before, (size_t)n * sizeof *own);
        row_store(to, job->dtype, own, n, 1);
        return;
    }
    float *const at = job->dtype == FATTN_F32 ? (float *)(void *)to : own;
    for (int64_t c = 0; c < whole; c += FV_LANES) {
        fv_store(at + c, fv_fma(fv_set1(first), fv_load(before + c), fv_load(own + c)));
    }
    for (int64_t c = whole; c < n; c++) {
        at[c] = first * before[c] + own[c];
    }
    if (at == own) {
        row_store(to, job->dtype, own, n, 1);
    }
}

/* forward_store() with a merge, for o by rows, which may be normalised. */
static void forward_merge_rows(forward *f)
{
    const panel *const pn = &f->panel;
    const float *const first = weigh_rows_before(f);
    for (int64_t r = 0; r < pn->rows; r++) {
        float *const own = f->o + r * pn->dv_pad;
        scale_rows(own, 1, pn->dv_pad, pn->dv_pad, fv_set1(f->alpha[r]));
        merge_row(pn, r, own, f->l[r] == 0, first[r]);
    }
}

/* forward_store_columns() with a merge. */
static void forward_merge_columns(forward *f)
{
    const panel *const pn = &f->panel;
    const float *const first = weigh_rows_before(f);
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        for (int64_t c = 0; c < pn->p->dim_v; c += FV_LANES) {
            fv x[FV_LANES];
            fv_load_transposed(f->ot + c * pn->br + r, pn->br, x);
            for (int n = 0; n < FV_LANES; n++) {
                fv_store(f->o + n * pn->dv_pad + c, fv_mul(fv_set1(f->alpha[r + n]), x[n]));
            }
        }
        for (int64_t n = 0; n < fattn_min64(FV_LANES, pn->rows - r); n++) {
            merge_row(pn, r + n, f->o + n * pn->dv_pad, f->l[r + n] == 0, first[r + n]);
        }
    }
}

#endif
