/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of queries and keys for problems with few keys or few queries, in vectors of more than
 * four lanes. Transposing queries would be most of the work there, or register tiles would be
 * narrow. Two forms of these products keep channels in the lanes.
 */
#ifndef FATTN_CPU_SMALL_KEYS_H
#define FATTN_CPU_SMALL_KEYS_H

#include "backends/cpu/dots.h"
#include "backends/cpu/strip.h"

#if FV_LANES > 4

/* --- Channels in the lanes -------------------------------------------------------------------- */

/* Queries per tile of products with nk keys. With three keys there are four queries, as 16
 * registers can hold twelve sums. Pointers to 16 queries would not fit the registers. */
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
    /* Converting a query pays more if it serves two keys. */
    if (FV_KEYS_AT_ONCE > 3 || dtype != FATTN_F32) {
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

/* Evenly spaced rows of dtype, FV_LANES of them, `step` bytes apart. */
typedef struct even_rows {
    fattn_dtype dtype;
    const char *from;
    int64_t step;
} even_rows;

/* FV_LANES rows of q from row r on: in their tensor, if they are evenly spaced and not at a stride
 * that maps all of them to one set of the first-level cache, else copied as floats. floats: other
 * types are copied, too */
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

/* dot_rows() with row-major queries. */
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

/* x[j][r] = k[j] . q[r] for nk keys, a literal, and FV_LANES queries. Every fourth query shares a
 * vector, with a block each. Loading a key repeats its four channels in all blocks; sums over the
 * lanes of a block give the dot products.
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

/* pn->qt = FV_LANES rows of q from row r on, as dot_blocks_tile() reads them. */
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

/* dot_rows() with queries in blocks. A strip of one vector of queries keeps them in blocks from its
 * first tile on. */
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

/* The form for a strip, or NULL if transposed queries are best. Sums over lanes round differently
 * from sums of transposed queries, so batch-invariant rows cannot use them. */
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
