/* SPDX-License-Identifier: Apache-2.0 */
/*
 * o = alpha o + P V for the values of a tile. o is kept by columns (transposed, with queries in the
 * lanes) or by rows. Rows are for strips with one tile of keys or few queries, where transposing o
 * would be most of the work, or where register tiles would be narrow.
 */
#ifndef FATTN_CPU_MIX_H
#define FATTN_CPU_MIX_H

#include "backends/cpu/product.h"
#include "backends/cpu/soften.h"

/*
 * Sets whether a strip computes o by rows, as P V instead of V^T P^T, which needs no transposition
 * at the end. The product needs values at an even stride and in whole vectors, and a block of whole
 * steps of rows. If a strip's keys are one tile, nothing is added to o, rows need no factors, and P
 * can be normalised before the product. That rounds differently, so batch-invariant rows do without
 * it. With several tiles, rows pay for strips that would not fill a register tile's columns.
 */
static void choose_rows(forward *f, bool one_tile, bool by_rows)
{
    f->one_tile = one_tile;
    f->by_rows = by_rows && f->panel.br % FV_NK == 0;
    if (f->by_rows) {
        f->o = f->ot;
    }
}

/* Whether computing o by rows pays for a strip with several tiles of keys. */
static bool is_narrow(const panel *pn) { return pn->width <= TILE_GROUP - FV_LANES; }

/* Whether the product of a strip's only tile can write o to its tensor directly. */
static bool fits_tensor(const forward *f)
{
    const panel *const pn = &f->panel;
    return f->one_tile && !pn->run->onto && pn->p->dim_v % FV_LANES == 0 && pn->group == 1 &&
           pn->rows >= FV_NK && f->lowered == 1;
}

/* o = beta o + P V by rows, in scratch or in the tensor. beta: factors of rows, NULL for 1 */
static void mix_rows(forward *f, span s, const float *beta)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const product_of weighted = {.a = (const float *const *)pn->x_rows,
                                 .b = pn->v[0],
                                 .b_stride = in_place(p->dtype_v, &p->v) ? p->v.seq : pn->dv_pad,
                                 .depth = s.live};
    for (int64_t r = 0; r < pn->width && f->one_tile; r += FV_LANES) {
        const fv share = join_sink(f, r);
        const fv factor = fv_mul(share, normaliser_of_o(f, r));
        scale_rows(pn->x + r, s.live, pn->br, FV_LANES, factor);
    }
    f->sink_waits = f->sink_waits && !f->one_tile;
    f->normalised = f->one_tile;
    f->in_tensor = fits_tensor(f);
    if (f->in_tensor) {
        product_results(pn->rows, NULL, weighted, p->dtype_o, row_of_o(pn, 0),
                        p->o.seq * fattn_dtype_size(p->dtype_o), p->dim_v);
        return;
    }
    product_values(row_steps(pn), f->fresh, beta, weighted, f->o, pn->dv_pad, p->dim_v);
    if (f->lowered != 1) {
        scale_rows(f->o, row_steps(pn), pn->dv_pad, pn->dv_pad, fv_set1(f->lowered));
    }
}

/* ot = alpha ot + V^T P^T; alpha: NULL for 1 */
static void mix_columns(forward *f, span s, const float *alpha)
{
    const panel *const pn = &f->panel;
    const product_of vp = {.a = pn->v, .b = pn->x, .b_stride = pn->br, .depth = s.padded};
    product_columns(pn->p->dim_v, f->fresh, alpha, vp, f->ot, pn->br, pn->width);
    if (f->lowered != 1) {
        scale_rows(f->ot, pn->p->dim_v, pn->br, pn->width, fv_set1(f->lowered));
    }
}

/* o = alpha o + P V. rescale: some alpha is not 1. If P is lifted (soften.h), alpha is lifted, too,
 * and the result is scaled back as a whole. */
static void mix_values(forward *f, span s, bool rescale)
{
    const panel *const pn = &f->panel;
    if (f->lowered != 1) {
        scale_rows(f->alpha, 1, pn->br, pn->width, fv_set1(LIFT));
    }
    const float *const alpha = rescale || f->lowered != 1 ? f->alpha : NULL;
    if (f->by_rows) {
        mix_rows(f, s, alpha);
    } else {
        mix_columns(f, s, alpha);
    }
}

#endif
