/* SPDX-License-Identifier: Apache-2.0 */
/* Loads the rows of a panel, and multiplies them with the keys or values of a tile, as floats. */
#ifndef FATTN_CPU_DOTS_H
#define FATTN_CPU_DOTS_H

#include "backends/cpu/panel.h"
#include "backends/cpu/product.h"

/* to[r] = row r of q, o or dout; zeros for rows past the last. to: [width][stride] */
static void load_queries(const panel *pn, const void *tensor, fattn_dtype dtype,
                         const fattn_strides *strides, int64_t dim, float *to, int64_t stride)
{
    for (int64_t r = 0; r < pn->width; r++) {
        if (r < pn->rows) {
            row_load(to + r * stride, dtype, element(tensor, dtype, query_index(pn, strides, r)),
                     dim);
        } else {
            fill(to + r * stride, stride, 0);
        }
    }
}

/* rows[n] = row r + n of q for n < FV_LANES; zeros for rows past the last. rows:
 * [FV_LANES][d_pad] */
static void load_some_queries(const panel *pn, const void *tensor, const fattn_strides *strides,
                              int64_t r, float *rows)
{
    const fattn_dtype dtype = pn->p->dtype;
    const int64_t dim = pn->p->dim;
    if (rows_in_place(pn, dim, r)) {
        const char *const from = element(tensor, dtype, query_index(pn, strides, r));
        const int64_t step = strides->seq * fattn_dtype_size(dtype);
        switch (dtype) {
        case FATTN_F16: rows_load(rows, FATTN_F16, from, step, FV_LANES, dim); break;
        case FATTN_BF16: rows_load(rows, FATTN_BF16, from, step, FV_LANES, dim); break;
        default: rows_load(rows, FATTN_F32, from, step, FV_LANES, dim); break;
        }
        return;
    }
    for (int64_t n = 0; n < FV_LANES; n++) {
        if (r + n < pn->rows) {
            row_load(rows + n * pn->d_pad, dtype,
                     element(tensor, dtype, query_index(pn, strides, r + n)), dim);
        } else {
            fill(rows + n * pn->d_pad, pn->d_pad, 0);
        }
    }
}

/* t[c][r] = channel c of row r of q; zeros for rows past the last. t: [d_pad][br]; rows: scratch,
 * [FV_LANES][d_pad] */
static void transpose_queries(const panel *pn, const void *tensor, const fattn_strides *strides,
                              float *rows, float *t)
{
    const fattn_dtype dtype = pn->p->dtype;
    const int64_t dim = pn->p->dim;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        if (dtype == FATTN_F32 && rows_in_place(pn, dim, r)) {
            transpose((const float *)tensor + query_index(pn, strides, r), strides->seq, FV_LANES,
                      dim, t + r, pn->br);
            continue;
        }
        load_some_queries(pn, tensor, strides, r, rows);
        transpose(rows, pn->d_pad, FV_LANES, pn->d_pad, t + r, pn->br);
    }
}

/* After so many keys, some keys of the next tile are copied: the lines that such a step prefetches
 * arrive before the next step reads them, and stay in cache until then. */
#define COPY_STEP (4 * FV_NK)

/* x[j][r ..] = keys a[j] times the queries in t, COPY_STEP keys at a time. Each step begins by
 * copying those keys of the next tile that `later` has prefetched. Returns what is left to
 * prefetch. */
static prefetch_list dot_copying(const panel *pn, int64_t keys, const float *const *a, int64_t dim,
                                 const float *t, float *const *x, int64_t r, prefetch_list later)
{
    for (int64_t j = 0; j < keys; j += COPY_STEP) {
        const int64_t step = fattn_min64(keys - j, COPY_STEP);
        copy_keys_to(pn, pn->next_tile, later.next);
        later.a_continues = j + step < keys;
        const product_of kq = {.a = a + j, .b = t, .b_stride = pn->br, .depth = dim};
        later = product_rows(0, step, kq, x + j, r, pn->width, later);
    }
    return later;
}

/* Equal terms round the same way at every step of a sum, so the error of such a sum grows with its
 * length and is the same for all keys of a row. Softmax cancels that error, but it shows in
 * backward, and in forward next to a sink. With few keys, where little else rounds, long sums are
 * therefore made in parts. Batch-invariant rows are exempt: their bits may not depend on the number
 * of keys. */
#define PART_KEYS 32
#define PART_TERMS 32

static bool sums_parts(const panel *pn, int64_t dim)
{
    const fattn_problem *const p = pn->p;
    const bool shows = p->op == FATTN_BACKWARD || p->features & FATTN_SINK;
    return shows && pn->seq.sk <= PART_KEYS && dim > PART_TERMS &&
           !(p->features & FATTN_BATCH_INVARIANT);
}

/* product_rows(0, ...) for columns from r on, with sums in parts of PART_TERMS. */
static prefetch_list dot_parts(const panel *pn, int64_t keys, const float *const *a, int64_t dim,
                               const float *t, float *const *x, int64_t r, prefetch_list later)
{
    const float *part[PART_KEYS + FV_NK];
    for (int64_t c = 0; c < dim; c += PART_TERMS) {
        const prefetch_list now = c == 0 ? later : NO_PREFETCH;
        for (int64_t k = 0; k < keys; k++) {
            part[k] = a[k] + c;
        }
        const product_of kq = {.a = part,
                               .b = t + c * pn->br,
                               .b_stride = pn->br,
                               .depth = fattn_min64(dim - c, PART_TERMS)};
        const prefetch_list left = product_rows(c == 0 ? 0 : 1, keys, kq, x, r, pn->width, now);
        later = c == 0 ? left : later;
    }
    return later;
}

/* What dot products are for. Scores may be summed in parts. dP may not: delta, a sum in the order
 * of channels, is subtracted from it. */
typedef enum dot_use { DOTS_FOR_SCORES, DOTS_FOR_DP } dot_use;

/* x[j][r] = a[j] . t[r]. For each vector of rows, products with keys past the last one that these
 * rows attend to are left out; callers mask them. t: [dim][br]; x: rows of [br] */
static void dot_rows(const panel *pn, span s, dot_use use, const float *const *a, int64_t dim,
                     const float *t, float *const *x)
{
    const bool parts = use == DOTS_FOR_SCORES && sums_parts(pn, dim);
    prefetch_list later = pn->later;
    int64_t j = 0;
    for (int64_t r = 0; r < pn->width && j < s.padded; r += FV_LANES) {
        const int64_t past = keys_attended(pn, s, r + FV_LANES);
        if (past <= j) {
            continue;
        }
        const product_of kq = {.a = a + j, .b = t, .b_stride = pn->br, .depth = dim};
        later = parts           ? dot_parts(pn, past - j, a + j, dim, t, x + j, r, later)
                : pn->next_tile ? dot_copying(pn, past - j, a + j, dim, t, x + j, r, later)
                                : product_rows(0, past - j, kq, x + j, r, pn->width, later);
        j = past;
    }
}

#endif
