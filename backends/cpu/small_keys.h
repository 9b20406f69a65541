/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of queries and keys for problems of few keys or few queries, in vectors of more than
 * four lanes: transposing queries would be most of the work, or register tiles would be narrow. Two
 * forms leave channels in the lanes.
 */
#ifndef FATTN_CPU_SMALL_KEYS_H
#define FATTN_CPU_SMALL_KEYS_H

#include "backends/cpu/dots.h"
#include "backends/cpu/strip.h"

#if FV_LANES > 4

/* --- Channels in the lanes -------------------------------------------------------------------- */

/* Queries of a tile of products of nk keys: with three keys four, as 16 registers hold twelve sums.
 * Pointers to 16 queries do not fit registers. */
#define FEW_ROWS(nk) ((nk) == 3 ? 4 : FV_LANES / (nk))

/* x[j][r] = k[j] . q[r] for nk keys, a literal, and FEW_ROWS(nk) queries. q: rows of dtype, a
 * literal, `step` bytes apart; x: [nk][x_stride] */
INLINE void dot_few_tile(int nk, fattn_dtype dtype, const char *q, int64_t step,
                         const float *const *k, int64_t dim, float *x, int64_t x_stride)
{
    const int rows = FEW_ROWS(nk);
    fv sum[2 * FV_LANES];
#pragma GCC unroll 16
    for (int n = 0; n < nk * rows; n++) {
        sum[n] = fv_set1(0);
    }
    for (int64_t c = 0; c < dim; c += FV_LANES) {
        fv key[4];
        for (int j = 0; j < nk; j++) {
            key[j] = fv_load(k[j] + c);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const fv query = load_as(dtype, q + r * step + c * SIZE_OF(dtype), FV_LANES);
            for (int j = 0; j < nk; j++) {
                sum[j * rows + r] = fv_muladd(key[j], query, sum[j * rows + r]);
            }
        }
    }
    if (nk == 1) {
        fv_store(x, fv_sums(sum));
        return;
    }
#if FV_LANES == 8
    if (nk == 3) {
        for (int j = 0; j < nk; j++) {
            fv_store_sums(x + j * x_stride, sum + j * rows);
        }
        return;
    }
#endif
    float sums[FV_LANES];
    fv_store(sums, fv_sums(sum));
    for (int j = 0; j < nk; j++) {
        memcpy(x + j * x_stride, sums + j * rows, (size_t)rows * sizeof *x);
    }
}

/* The same for FV_LANES queries and a few keys. */
INLINE void dot_few_as(fattn_dtype dtype, const char *q, int64_t step, const float *const *k,
                       int64_t keys, int64_t dim, float *x, int64_t x_stride)
{
    int64_t j = 0;
#define WHILE_KEYS(nk)                                                                       \
    for (; (nk) <= FV_KEYS_AT_ONCE && j + (nk) <= keys; j += (nk)) {                         \
        for (int64_t r = 0; r < FV_LANES; r += FEW_ROWS(nk)) {                               \
            dot_few_tile(FV_LANES >= (nk) ? (nk) : 1, dtype, q + r * step, step, k + j, dim, \
                         x + j * x_stride + r, x_stride);                                    \
        }                                                                                    \
    }
    if (FV_KEYS_AT_ONCE == 3) {
        WHILE_KEYS(3)
    }
    WHILE_KEYS(4)
    if (FV_KEYS_AT_ONCE > 3 || dtype != FATTN_F32) { /* queries that are converted serve two */
        WHILE_KEYS(2)
    }
    WHILE_KEYS(1)
#undef WHILE_KEYS
}
APART void dot_few_rows(fattn_dtype dtype, const char *q, int64_t step, const float *const *k,
                        int64_t keys, int64_t dim, float *x, int64_t x_stride)
{
    switch (dtype) {
    case FATTN_F16: dot_few_as(FATTN_F16, q, step, k, keys, dim, x, x_stride); break;
    case FATTN_BF16: dot_few_as(FATTN_BF16, q, step, k, keys, dim, x, x_stride); break;
    default: dot_few_as(FATTN_F32, q, step, k, keys, dim, x, x_stride); break;
    }
}

/* FV_LANES rows of dtype, `step` bytes apart. */
typedef struct even_rows {
    fattn_dtype dtype;
    const char *from;
    int64_t step;
} even_rows;

/* Rows of q from number r on: where they lie, if they are evenly apart, but not so that all map to
 * one set of the first-level cache, or copied as floats. floats: nothing else is wanted. */
static even_rows even_queries(const panel *pn, int64_t r, bool floats)
{
    const fattn_problem *const p = pn->p;
    const int64_t step = p->q.seq * fattn_dtype_size(p->dtype);
    const bool usable = p->dtype == FATTN_F32 || !floats;
    if (usable && rows_in_place(pn, p->dim, r) && step % 4096 != 0) {
        return (even_rows){p->dtype,
                           element(pn->run->buffers->q, p->dtype, query_index(pn, &p->q, r)), step};
    }
    load_some_queries(pn, pn->run->buffers->q, &p->q, r, pn->q);
    return (even_rows){FATTN_F32, (const char *)pn->q, pn->d_pad * (int64_t)sizeof(float)};
}

/* As dot_rows(), from queries where they lie. */
static void multiply_row_major(const forward *f, span s)
{
    const panel *const pn = &f->panel;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const even_rows q = even_queries(pn, r, false);
        dot_few_rows(q.dtype, q.from, q.step, pn->k, s.live, pn->p->dim, pn->x + r, pn->br);
    }
    fill(pn->x + s.live * pn->br, (s.padded - s.live) * pn->br, 0);
}

/* --- Four channels in a block of lanes -------------------------------------------------------- */

/* x[j][r] = k[j] . q[r] for nk keys, a literal, and FV_LANES queries, of which each fourth shares a
 * vector, a block each: loading repeats a key's channels, and lanes are summed by fours.
 * q: [dim / 4][4][FV_LANES]; x: [nk][x_stride] */
INLINE void dot_blocks_tile(int nk, const float *q, const float *const *k, int64_t dim, float *x,
                            int64_t x_stride)
{
    fv sum[FV_BLOCKS_AT_ONCE][4];
    for (int j = 0; j < nk; j++) {
        for (int n = 0; n < 4; n++) {
            sum[j][n] = fv_set1(0);
        }
    }
    for (int64_t c = 0; c < dim; c += 4, q += 4 * FV_LANES) {
        fv query[4];
        for (int n = 0; n < 4; n++) {
            query[n] = fv_load(q + n * FV_LANES);
        }
        for (int j = 0; j < nk; j++) {
            const fv key = fv_load_four(k[j] + c);
            for (int n = 0; n < 4; n++) {
                sum[j][n] = fv_muladd(key, query[n], sum[j][n]);
            }
        }
    }
    for (int j = 0; j < nk; j++) {
        fv_store(x + j * x_stride, fv_block_sums(sum[j]));
    }
}

/* The same for some keys. */
APART void dot_blocks_rows(const float *q, const float *const *k, int64_t keys, int64_t dim,
                           float *x, int64_t x_stride)
{
    int64_t j = 0;
    for (; j + FV_BLOCKS_AT_ONCE <= keys; j += FV_BLOCKS_AT_ONCE) {
        dot_blocks_tile(FV_BLOCKS_AT_ONCE, q, k + j, dim, x + j * x_stride, x_stride);
    }
    for (; j < keys; j++) {
        dot_blocks_tile(1, q, k + j, dim, x + j * x_stride, x_stride);
    }
}

/* pn->qt = FV_LANES rows of q from number r on, as dot_blocks_tile() wants them. */
static void load_blocks(const panel *pn, int64_t r)
{
    const even_rows rows = even_queries(pn, r, true);
    const float *const q = (const void *)rows.from;
    const int64_t stride = rows.step / (int64_t)sizeof *q;
    for (int64_t c = 0; c < pn->p->dim; c += 4) {
#pragma GCC unroll 4
        for (int64_t n = 0; n < 4; n++) {
            fv_store(pn->qt + (c + n) * FV_LANES, fv_load_blocks(q + n * stride + c, 4 * stride));
        }
    }
}

/* As dot_rows(). One vector of queries stays in its blocks from the strip's first tile on. */
static void multiply_blocked(const forward *f, span s)
{
    const panel *const pn = &f->panel;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        if (f->fresh || pn->width > FV_LANES) {
            load_blocks(pn, r);
        }
        dot_blocks_rows(pn->qt, pn->k, s.live, pn->p->dim, pn->x + r, pn->br);
    }
    fill(pn->x + s.live * pn->br, (s.padded - s.live) * pn->br, 0);
}

/* --- The choice ------------------------------------------------------------------------------- */

/* The form for a strip, or NULL where transposed queries are best. Sums over lanes round otherwise
 * than those of transposed queries, which a row that may not depend on its neighbours can tell. */
static const query_form *choose_small_form(const panel *pn)
{
    static const query_form row_major = {.multiply = multiply_row_major};
    static const query_form blocked = {.multiply = multiply_blocked};
    const fattn_problem *const p = pn->p;
    const int64_t keys = pn->seq.sk;
    if (p->dim % FV_LANES != 0 || p->features & FATTN_BATCH_INVARIANT) {
        return NULL;
    }
    if (keys <= FV_ROW_MAJOR_KEYS(p->dim)) {
        return &row_major;
    }
    return keys <= FV_BLOCKED_KEYS(p->dim) || pn->width <= FV_LANES ? &blocked : NULL;
}

#endif

#endif
