/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operands of products of bf16 pairs. A pair holds two neighbours along the sum:
 *
 *     S^T = K Q^T      channels 2c, 2c + 1: rows of k as they lie, and q transposed pair by pair
 *     O^T += V^T P^T   keys 2j, 2j + 1: two rows of v zipped, and P rounded as softmax leaves it
 *
 * They use the scratch of a panel of floats, half of it or all. (A few keys meet queries otherwise,
 * as small.h says.)
 */
#ifndef FATTN_CPU_PAIRS_H
#define FATTN_CPU_PAIRS_H

#include "backends/cpu/panel.h"
#include "backends/cpu/product_pairs.h"

#if FV_PAIRS

/* Pairs in a row of dim channels, and in a copy of it: whole vectors. */
static int64_t pairs_of(int64_t dim) { return (dim + 1) / 2; }
static int64_t pairs_stride(int64_t dim) { return vectors_of(pairs_of(dim)) * FV_LANES; }

/* Whether rows of k or v can be read where they lie: not when the last pair would reach past the
 * row, or when they must be whole vectors; and see in_place(). */
static bool pairs_in_place(int64_t dim, const fattn_strides *strides)
{
    return !FV_TILES && dim % 2 == 0 && strides->seq % 2048 != 0;
}

/* to[0 .. n) = from[0 .. n), and zeros up to whole vectors of pairs. */
static void row_copy(void *to, const void *from, int64_t n)
{
    const uint16_t *const x = from;
    uint16_t *const y = to;
    int64_t c = 0;
    for (; c + 2 * FV_LANES <= n; c += 2 * FV_LANES) {
        pv_store(y + c, pv_load(x + c));
    }
    if (c < n) {
        memcpy(y + c, x + c, (size_t)(n - c) * sizeof *x);
        memset(y + n, 0, (size_t)(c + 2 * FV_LANES - n) * sizeof *x);
    }
}

/* FV_LANES rows of q from number r on, `stride` pairs apart: where they lie, if that is `usable`
 * and they are evenly apart, or copied. */
static const void *pairs_of_queries(const panel *pn, int64_t r, bool usable, int64_t *stride)
{
    const fattn_problem *const p = pn->p;
    if (usable && p->q.seq % 2 == 0 && rows_in_place(pn, p->dim, r)) {
        *stride = p->q.seq / 2;
        return element(pn->buf->q, p->dtype, query_index(pn, &p->q, r));
    }
    for (int64_t n = 0; n < FV_LANES; n++) {
        float *const to = pn->q + n * pn->dp;
        if (r + n < pn->rows) {
            row_copy(to, element(pn->buf->q, p->dtype, query_index(pn, &p->q, r + n)), p->dim);
        } else {
            fill(to, pn->dp, 0);
        }
    }
    *stride = pn->dp;
    return pn->q;
}

/* qt[c][r]: pair c of row r, of whole vectors of rows and pairs. */
static void pairs_load_queries(panel *pn)
{
    const int64_t dim = pn->p->dim;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        int64_t stride;
        const void *const from = pairs_of_queries(pn, r, dim % (2 * FV_LANES) == 0, &stride);
        transpose(from, stride, FV_LANES, pairs_of(dim), pn->qt + r, pn->br);
    }
}

/* As keys_lie(). */
static void pairs_lie(const panel *pn, span s, const uint16_t *from, int64_t step,
                      const bf16_pair **rows)
{
    for (int64_t j = 0; j < s.live; j++) {
        rows[j] = (const void *)(from + j * step);
    }
    for (int64_t j = s.live; j < s.padded; j++) {
        rows[j] = (const void *)pn->zeros;
    }
}

/* rows[j] = row of k or v of the tile; copies are [bc][pairs_stride(dim)], of which `copied` are
 * there. Matrix registers take all rows from the copy, so that it has numbers past the last. */
static void pairs_load_keys(const panel *pn, span s, int64_t copied, const void *tensor,
                            const fattn_strides *strides, int64_t dim, float *copy,
                            const bf16_pair **rows)
{
    const bool direct = pairs_in_place(dim, strides);
    const int64_t stride = pairs_stride(dim);
    if (direct && !(pn->p->features & FATTN_PAGED)) {
        const void *const from = element(tensor, pn->p->dtype, key_index(pn, strides, s.first));
        pairs_lie(pn, s, from, strides->seq, rows);
        return;
    }
    for (int64_t j = 0; j < s.padded; j++) {
        float *const to = copy + j * stride;
        const void *row = FV_TILES ? to : pn->zeros;
        if (j < s.live) {
            const void *const from =
                element(tensor, pn->p->dtype, key_index(pn, strides, s.first + j));
            if (!direct && j >= copied) {
                row_copy(to, from, dim);
            }
            row = direct ? from : to;
        } else if (FV_TILES && j >= copied) {
            fill(to, stride, 0);
        }
        rows[j] = row;
    }
}

/* to[c] = {first[c], second[c]} for n channels and zeros up to whole vectors. */
static void row_zip(bf16_pair *to, const uint16_t *first, const uint16_t *second, int64_t n)
{
    const int64_t whole = n / FV_LANES * FV_LANES;
    for (int64_t c = 0; c < whole; c += FV_LANES) {
        pv_store(to + c, pv_zip(first + c, second + c));
    }
    if (whole < n) {
        const size_t rest = (size_t)(n - whole) * sizeof *first;
        uint16_t last[2][FV_LANES] = {{0}};
        memcpy(last[0], first + whole, rest);
        memcpy(last[1], second + whole, rest);
        pv_store(to + whole, pv_zip(last[0], last[1]));
    }
}

/* to[j / 2] = rows j and j + 1 of k or v, zipped, at a stride of dim in whole vectors; and, for
 * matrix registers, transposed: [stride][bc / 2]. copied: they are there. */
static void pairs_zip_keys(const panel *pn, span s, bool copied, const void *tensor,
                           const fattn_strides *strides, int64_t dim, float *to, float *transposed,
                           const bf16_pair **zipped)
{
    const int64_t stride = vectors_of(dim) * FV_LANES;
    for (int64_t j = 0; j < s.padded; j += 2) {
        bf16_pair *const pairs = (bf16_pair *)(void *)(to + j / 2 * stride);
        zipped[j / 2] = pairs;
        if (copied) {
            continue;
        }
        const void *rows[2] = {pn->zeros, pn->zeros};
        for (int64_t n = 0; n < 2 && j + n < s.live; n++) {
            rows[n] = element(tensor, pn->p->dtype, key_index(pn, strides, s.first + j + n));
        }
        row_zip(pairs, rows[0], rows[1], dim);
    }
    if (FV_TILES && !copied) {
        transpose(to, stride, s.padded / 2, stride, transposed, pn->bc / 2);
    }
}

/* Pairs of v take half of v_copy; in the other they are transposed, [dvp][bc / 2]. */
static float *values_transposed(const panel *pn) { return pn->v_copy + pn->bc / 2 * pn->dvp; }

/* Bits of a bf16 that are all clear below 2^-63. */
#define EXPONENT_HIGH 0x6000

/* Pairs of rows of v; copied: they are there. False where all values of the tile are so small that
 * their products with probabilities could be subnormal, which products of pairs drop; but for a row
 * whose bits may not depend on values that others alone see. */
static bool pairs_load_values(const panel *pn, span s, bool copied)
{
    const fattn_problem *const p = pn->p;
    uint16_t bits = 0;
    pairs_zip_keys(pn, s, copied, pn->buf->v, &p->v, p->dim_v, pn->v_copy, values_transposed(pn),
                   pn->v_pairs);
    for (int64_t j = 0; j < s.padded / 2 && !(bits & EXPONENT_HIGH); j++) {
        for (int64_t c = 0; c < p->dim_v; c++) {
            bits |= pn->v_pairs[j][c].first | pn->v_pairs[j][c].second;
        }
    }
    return bits & EXPONENT_HIGH || p->features & FATTN_BATCH_INVARIANT;
}

#if FV_TILES

/* Products in matrix registers take contiguous rows along the sum: k as copied, v transposed. */
static void pairs_open(void) { tiles_open(); }
static void pairs_close(void) { tiles_close(); }

/* C (+)= A B for whole tiles; a: [rows][depth], b: [depth][columns]. */
static void tiles_product(int add, int64_t rows, const void *a, int64_t a_stride, int64_t depth,
                          const float *b, int64_t b_stride, float *c, int64_t c_stride,
                          int64_t columns)
{
    for (int64_t column = 0; column < columns; column += 48) {
        const int nq = (int)fattn_min64(columns - column, 48) / 16;
        for (int64_t row = 0; row < rows; row += 32) {
            const int nm = (int)fattn_min64(rows - row, 32) / 16;
            tiles_multiply(nm, nq, add, (const bf16_pair *)a + row * a_stride, 4 * a_stride, depth,
                           b + column, 4 * b_stride, c + row * c_stride + column, 4 * c_stride);
        }
    }
}

/* C = A B; a: [rows][depth] by rows, of which matrix registers take the first and a_stride;
 * b: [depth][columns], columns whole vectors; c: [rows][columns], likewise. */
static void pairs_rows(int64_t rows, const bf16_pair *const *a, int64_t a_stride, int64_t depth,
                       const float *b, int64_t b_stride, float *const *c, int64_t c_stride,
                       int64_t columns)
{
    tiles_product(0, rows, a[0], a_stride, vectors_of(depth) * FV_LANES, b, b_stride, c[0],
                  c_stride, columns);
}

/* C += A^T B, or = where `fresh`; a: [depth][rows] by rows, and transposed, which is what matrix
 * registers take. */
static void pairs_columns(const panel *pn, int64_t rows, bool fresh, const bf16_pair *const *a,
                          const float *transposed, int64_t depth, const float *b, int64_t b_stride,
                          float *c, int64_t columns)
{
    (void)a;
    tiles_product(!fresh, vectors_of(rows) * FV_LANES, transposed, pn->bc / 2, depth, b, b_stride,
                  c, pn->br, columns);
}

/* to[r] = row r of a . column r of b, summed as pairs_rows() sums; FV_LANES of them. t: scratch,
 * [stride][FV_LANES] */
static void pairs_dots(const float *a, int64_t stride, float *t, int64_t depth, const float *b,
                       int64_t b_stride, float *to)
{
    float square[16 * 16];
    (void)t, (void)depth;
    tiles_product(0, 16, a, stride, stride, b, b_stride, square, 16, 16);
    for (int64_t r = 0; r < 16; r++) {
        to[r] = square[17 * r];
    }
}

static void pairs_scale(const panel *pn, const float *alpha, float *ot)
{
    for (int64_t r = 0; alpha && r < pn->width; r += FV_LANES) {
        const fv factor = fv_load(alpha + r);
        if (mv_all(fv_eq(factor, fv_set1(1)))) {
            continue;
        }
        for (int64_t c = 0; c < pn->dvp; c++) {
            float *const at = ot + c * pn->br + r;
            fv_store(at, fv_mul(fv_load(at), factor));
        }
    }
}

/* ot = ot alpha + V^T P^T; fresh: what ot holds counts as 0 */
static void pairs_mix(const panel *pn, span s, bool fresh, const float *alpha, float *ot)
{
    pairs_scale(pn, fresh ? NULL : alpha, ot);
    pairs_columns(pn, pn->p->dim_v, fresh, pn->v_pairs, values_transposed(pn), s.padded / 2, pn->x,
                  pn->br, ot, pn->width);
}

#else

static void pairs_open(void) {}
static void pairs_close(void) {}

static void pairs_rows(int64_t rows, const bf16_pair *const *a, int64_t a_stride, int64_t depth,
                       const float *b, int64_t b_stride, float *const *c, int64_t c_stride,
                       int64_t columns)
{
    (void)a_stride, (void)c_stride;
    const product_of_pairs ab = {
        .a = a, .b = (const void *)b, .b_stride = b_stride, .depth = depth};
    product_rows_pairs(0, rows, ab, c, 0, columns, NO_PREFETCH);
}

static void pairs_dots(const float *a, int64_t stride, float *t, int64_t depth, const float *b,
                       int64_t b_stride, float *to)
{
    fv sum = fv_set1(0);
    transpose(a, stride, FV_LANES, stride, t, FV_LANES);
    for (int64_t c = 0; c < depth; c++) {
        sum = fv_muladd_pairs(pv_load(t + c * FV_LANES), pv_load(b + c * b_stride), sum);
    }
    fv_store(to, sum);
}

static void pairs_columns(const panel *pn, int64_t rows, bool fresh, const bf16_pair *const *a,
                          const float *transposed, int64_t depth, const float *b, int64_t b_stride,
                          float *c, int64_t columns)
{
    (void)transposed;
    const product_of_pairs ab = {
        .a = a, .b = (const void *)b, .b_stride = b_stride, .depth = depth};
    product_columns_pairs(rows, fresh, NULL, ab, c, pn->br, columns);
}

/* ot = ot alpha + V^T P^T; fresh: what ot holds counts as 0 */
static void pairs_mix(const panel *pn, span s, bool fresh, const float *alpha, float *ot)
{
    const product_of_pairs vp = {
        .a = pn->v_pairs, .b = (const void *)pn->x, .b_stride = pn->br, .depth = s.padded / 2};
    product_columns_pairs(pn->p->dim_v, fresh, alpha, vp, ot, pn->br, pn->width);
}

#endif

/* x[j][r] = k[j] . q[r] */
static void pairs_scores(const panel *pn, span s)
{
    const int64_t dim = pn->p->dim;
    pairs_rows(s.padded, pn->k_pairs, pairs_stride(dim), pairs_of(dim), pn->qt, pn->br, pn->x_rows,
               pn->br, pn->width);
}

#else

/* The table has no row that would ask for pairs, and what is left of the question is nothing. */
#define pairs_load_queries(pn) ((void)(pn))
#define pairs_load_keys(pn, s, copied, tensor, strides, dim, copy, rows) ((void)(pn), (void)(s))
#define pairs_load_values(pn, s, copied) ((void)(pn), (void)(s), (void)(copied), false)
#define pairs_scores(pn, s) ((void)(pn), (void)(s))
#define pairs_mix(pn, s, fresh, alpha, ot) \
    ((void)(pn), (void)(s), (void)(fresh), (void)(alpha), (void)(ot))

#endif

/* P of keys j and j + 1, j even, of a vector of rows: floats in their place, or pairs in row j / 2,
 * which no later key has use for. */
INLINE void keep_weights(float *x, int64_t stride, int64_t j, fv first, fv second, bool pairs)
{
#if FV_PAIRS
    if (pairs) {
        pv_store(x + j / 2 * stride, pv_twist(pv_round(first, second)));
        return;
    }
#endif
    (void)pairs;
    fv_store(x + j * stride, first);
    fv_store(x + (j + 1) * stride, second);
}

#endif
