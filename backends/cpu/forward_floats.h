/* SPDX-License-Identifier: Apache-2.0 */
/* Forward by products of floats (forward.h). */
#ifndef FATTN_CPU_FORWARD_FLOATS_H
#define FATTN_CPU_FORWARD_FLOATS_H

#include "backends/cpu/dots.h"
#include "backends/cpu/forward.h"
#include "backends/cpu/small_keys.h"

static void load_transposed(const forward *f)
{
    const panel *const pn = &f->panel;
    transpose_queries(pn, pn->run->buffers->q, &pn->p->q, pn->q, pn->qt);
}

static void multiply_transposed(const forward *f, span s)
{
    const panel *const pn = &f->panel;
    dot_rows(pn, s, DOTS_FOR_SCORES, pn->k, pn->p->dim, pn->qt, pn->x_rows);
}

static const query_form *choose_form(const panel *pn)
{
    static const query_form transposed = {.load = load_transposed, .multiply = multiply_transposed};
#if FV_LANES > 4
    const query_form *const small = choose_small_form(pn);
    return small ? small : &transposed;
#else
    (void)pn;
    return &transposed;
#endif
}

static bool rows_pay_floats(const forward *f, bool one_tile)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const bool direct = in_place(p->dtype_v, &p->v), paged = p->features & FATTN_PAGED;
    const bool pays = one_tile ? !(p->features & FATTN_BATCH_INVARIANT) : is_narrow(pn);
    return pays && (!direct || (!paged && p->dim_v % FV_LANES == 0));
}

static void prepare_floats(const panel *pn) { (void)strips_prepare(pn, FV_NK); }

static bool load_floats(const forward *f, span s, cached_tile *cached)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    load_keys(pn, s, cached->keys, pn->run->buffers->k, p->dtype_kv, &p->k, p->dim, pn->k_copy,
              pn->d_pad, pn->k, NULL);
    cached->keys = (int32_t)fattn_max64(cached->keys, s.live);
    if (p->outputs & FATTN_OUT_O) {
        load_keys(pn, s, cached->values, pn->run->buffers->v, p->dtype_v, &p->v, p->dim_v,
                  pn->v_copy, pn->dv_pad, pn->v, NULL);
        cached->values = (int32_t)fattn_max64(cached->values, s.live);
    }
    return false;
}

static void mix_floats(forward *f, span s, bool rescale, bool pairs)
{
    (void)pairs;
    mix_values(f, s, rescale);
}

static const forward_kind forward_floats = {
    .step = FV_NK,
    .prefetches = true,
    .layout = forward_layout,
    .prepare = prepare_floats,
    .choose_form = choose_form,
    .rows_pay = rows_pay_floats,
    .load = load_floats,
    .mix = mix_floats,
};

static void forward_work(const fattn_cpu_run *run, void *scratch)
{
    forward_items(run, scratch, &forward_floats);
}

static int64_t forward_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    return forward_items_scratch(p, tiling, &forward_floats);
}

/* What a block costs besides its rows, in times of a row: opening it, which counts if keys are few,
 * and copying each tile of keys, or bringing keys that are read in place into the caches again. */
static double forward_cost(const fattn_kernel *row, const fattn_problem *p,
                           const fattn_limits *limits, fattn_tile tile)
{
    (void)row;
    const int64_t opening = 40 / fattn_max64(p->seqlen_k, 1), copying = keys_in_place(p) ? 5 : 40;
    return blocks_cost(p, limits, tile, opening + copying);
}

static int64_t forward_fast_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)row;
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    const int64_t tiles = 1 + copies_meanwhile(p, tile.bc);
    return tile_scratch(p, &tiling, &forward_floats) + keys_in_place_bytes(p, &tiling) * tiles;
}

static int64_t forward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                 const fattn_tiling *tiling)
{
    (void)row;
    return fattn_cpu_workspace_of_one(forward_shared(p, tiling), forward_scratch(p, tiling));
}

#endif
