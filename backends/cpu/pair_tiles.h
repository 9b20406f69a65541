/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of bf16 pairs in matrix registers (vec_amx.h). Their operands are contiguous rows along
 * the sum: k is copied, v transposed.
 */
#ifndef FATTN_CPU_PAIR_TILES_H
#define FATTN_CPU_PAIR_TILES_H

#include "backends/cpu/pair_rows.h"
#include "backends/cpu/strip.h"

#if FV_TILES

#define PAIRS_STEP 32      /* the number of keys is rounded up to a multiple of it: 16 pairs */
#define PAIRS_ROWS_STEP 32 /* likewise the number of rows in backward */
#define PAIRS_COPIED 1     /* operands are whole tiles, so rows are never read in their tensors */

/* What a block costs besides its rows, in times of a row. Products take so little time here that
 * the cost of loading keys, and of adding to dK and dV, must be spread over more rows. Where cores
 * share blocks of equal work, smaller blocks balance better. */
#define PAIRS_BLOCK_ROWS 60
#define PAIRS_SHARED_BLOCK_ROWS 15
#define PAIRS_BACKWARD_TILES \
    {96, 32}, {96, 64}, {384, 128}, {288, 128}, { 192, 128 }
#define PAIRS_BACKWARD_BLOCK_ROWS 0 /* traffic chooses the tile */

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

/* C = A B; a: [rows][depth], of which matrix registers use the first row and the stride; b:
 * [depth][columns], columns: whole vectors; c: [rows][columns], used likewise. */
static void pairs_rows(int64_t rows, const bf16_pair *const *a, int64_t a_stride, int64_t depth,
                       const float *b, int64_t b_stride, float *const *c, int64_t c_stride,
                       int64_t columns, prefetch_list later)
{
    (void)later;
    tiles_product(0, rows, a[0], a_stride, vectors_of(depth) * FV_LANES, b, b_stride, c[0],
                  c_stride, columns);
}

/* C += A^T B, or C = A^T B if fresh. a: [depth][rows]; matrix registers take `transposed`, [rows]
 * [transposed_stride()]. */
static void pairs_columns(const panel *pn, int64_t rows, bool fresh, const bf16_pair *const *a,
                          const float *transposed, int64_t depth, const float *b, int64_t b_stride,
                          float *c, int64_t columns)
{
    (void)a;
    tiles_product(!fresh, vectors_of(rows) * FV_LANES, transposed, transposed_stride(pn), depth, b,
                  b_stride, c, pn->br, columns);
}

/* to[r] = (row r of a) . (column r of b) for FV_LANES rows, summed in the same order as by
 * pairs_rows(). t: scratch, [stride][FV_LANES] */
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

/* ot[c][r] *= alpha[r]; alpha: NULL for 1 */
static void pairs_scale(const panel *pn, const float *alpha, float *ot)
{
    for (int64_t r = 0; alpha && r < pn->width; r += FV_LANES) {
        const fv factor = fv_load(alpha + r);
        if (mv_all(fv_eq(factor, fv_set1(1)))) {
            continue;
        }
        for (int64_t c = 0; c < pn->dv_pad; c++) {
            float *const at = ot + c * pn->br + r;
            fv_store(at, fv_mul(fv_load(at), factor));
        }
    }
}

/* o^T = o^T alpha + V^T P^T; alpha: NULL for 1 */
static void pairs_mix(forward *f, span s, const float *alpha)
{
    const panel *const pn = &f->panel;
    pairs_scale(pn, f->fresh ? NULL : alpha, f->ot);
    pairs_columns(pn, pn->p->dim_v, f->fresh, pn->v_pairs, pn->v_copy, s.padded / 2, pn->x, pn->br,
                  f->ot, pn->width);
}

#endif

#endif
