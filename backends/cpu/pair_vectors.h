/* SPDX-License-Identifier: Apache-2.0 */
/* Products of bf16 pairs in vectors. */
#ifndef FATTN_CPU_PAIR_VECTORS_H
#define FATTN_CPU_PAIR_VECTORS_H

#include "backends/cpu/mix.h"
#include "backends/cpu/pair_rows.h"
#include "backends/cpu/product_pairs.h"

#define PAIRS_STEP FV_NK         /* the number of keys is rounded up to a multiple of it */
#define PAIRS_ROWS_STEP FV_LANES /* likewise the number of rows in backward */
#define PAIRS_COPIED 0           /* rows may be read in their tensors */
#define PAIRS_BLOCK_ROWS 15      /* what a block costs besides its rows, in times of a row */
/* the same where cores share blocks of equal work */
#define PAIRS_SHARED_BLOCK_ROWS PAIRS_BLOCK_ROWS
#define PAIRS_BACKWARD_TILES                                                               \
    {TILE_ROWS(240), 96}, {TILE_ROWS(192), 96}, {TILE_ROWS(144), 96}, {TILE_ROWS(96), 96}, \
        {TILE_ROWS(48), 64},                                                               \
    {                                                                                      \
        TILE_ROWS(16), 32                                                                  \
    }
#define PAIRS_BACKWARD_BLOCK_ROWS 17 /* PAIRS_BLOCK_ROWS of backward */

static void pairs_open(void) {}
static void pairs_close(void) {}

static void pairs_rows(int64_t rows, const bf16_pair *const *a, int64_t a_stride, int64_t depth,
                       const float *b, int64_t b_stride, float *const *c, int64_t c_stride,
                       int64_t columns, prefetch_list later)
{
    (void)a_stride, (void)c_stride;
    const product_of_pairs ab = {
        .a = a, .b = (const void *)b, .b_stride = b_stride, .depth = depth};
    product_rows_pairs(0, rows, ab, c, 0, columns, later);
}

/* to[r] = (row r of a) . (column r of b) for FV_LANES rows of pairs. t: room for their transpose,
 * [depth][FV_LANES] */
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

/* mix_rows() for pairs. P is never lifted, and o is normalised when it is stored, not P. */
static void mix_rows_pairs(forward *f, span s, const float *beta)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const product_of_pairs weighted = {
        .a = pn->x_pairs, .b = pn->v_pairs[0], .b_stride = pn->dv_pad, .depth = (s.live + 1) / 2};
    f->in_tensor = f->normalised = fits_tensor(f);
    if (f->in_tensor) {
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            const fv share = join_sink(f, r);
            fv_store(f->alpha + r, fv_mul(share, normaliser_of_o(f, r)));
        }
        f->sink_waits = false;
        product_results_pairs(pn->rows, f->alpha, weighted, p->dtype_o, row_of_o(pn, 0),
                              p->o.seq * fattn_dtype_size(p->dtype_o), p->dim_v);
        return;
    }
    product_values_pairs(row_steps(pn), f->fresh, beta, weighted, f->o, pn->dv_pad, p->dim_v);
}

/* o = o alpha + P V; alpha: NULL for 1 */
static void pairs_mix(forward *f, span s, const float *alpha)
{
    const panel *const pn = &f->panel;
    const product_of_pairs vp = {
        .a = pn->v_pairs, .b = (const void *)pn->x, .b_stride = pn->br, .depth = s.padded / 2};
    if (f->by_rows) {
        mix_rows_pairs(f, s, alpha);
    } else {
        product_columns_pairs(pn->p->dim_v, f->fresh, alpha, vp, f->ot, pn->br, pn->width);
    }
}

#endif
