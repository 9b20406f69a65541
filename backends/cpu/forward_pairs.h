/* SPDX-License-Identifier: Apache-2.0 */
/* Forward by products of bf16 pairs (forward.h). */
#ifndef FATTN_CPU_FORWARD_PAIRS_H
#define FATTN_CPU_FORWARD_PAIRS_H

#include "backends/cpu/forward.h"
#include "backends/cpu/pairs.h"
#include "backends/cpu/small_pairs.h"

static void load_transposed_pairs(const forward *f) { pairs_load_queries(&f->panel); }

static void load_rows_of_pairs(const panel *pn, span s, int64_t copied)
{
    const fattn_problem *const p = pn->p;
    pairs_load_keys(pn, s, copied, pn->run->buffers->k, p->dtype_kv, &p->k, p->dim, pn->k_copy,
                    pn->k_pairs);
}

static void multiply_pairs(const forward *f, span s) { pairs_scores(&f->panel, s); }

static const query_form *choose_pairs_form(const panel *pn)
{
    static const query_form transposed = {
        .load = load_transposed_pairs, .load_keys = load_rows_of_pairs, .multiply = multiply_pairs};
#if FV_LANES > 4
    const query_form *const small = PAIRS_COPIED ? NULL : choose_small_pairs_form(pn);
    return small ? small : &transposed;
#else
    (void)pn;
    return &transposed;
#endif
}

static int64_t layout_pairs(forward *strips, const fattn_problem *p, const fattn_tiling *tiling,
                            arena *from)
{
    const int64_t count = forward_layout(strips, p, tiling, from);
    pairs_layout(&strips->panel, from);
    for (int64_t n = 1; n < count; n++) {
        strips[n].panel.k_pairs = strips->panel.k_pairs;
        strips[n].panel.v_pairs = strips->panel.v_pairs;
        strips[n].panel.x_pairs = strips->panel.x_pairs;
    }
    return count;
}

static void prepare_pairs(const panel *pn)
{
    const int64_t keys = strips_prepare(pn, PAIRS_STEP);
    for (int64_t j = 0; pn->x_pairs && j < keys / 2; j++) {
        pn->x_pairs[j] = (const void *)pn->x_rows[j];
    }
}

/* Values are always copies here. P, which is rounded to bf16, is not normalised before the product,
 * so a row of o is the same either way, and batch-invariant rows need no exception. */
static bool rows_pay_pairs(const forward *f, bool one_tile)
{
    return (one_tile || is_narrow(&f->panel)) && !PAIRS_COPIED;
}

/* Loads a tile as forward_kind.load does. Values of which all are too small for products of pairs
 * are loaded as floats. */
static bool load_pairs(const forward *f, span s, cached_tile *cached)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const bool values = p->outputs & FATTN_OUT_O;
    f->form->load_keys(pn, s, cached->keys);
    const bool pairs = values && pairs_load_values(pn, s, cached->values == s.live);
    if (values && !pairs) {
        load_keys(pn, s, 0, pn->run->buffers->v, p->dtype_v, &p->v, p->dim_v, pn->v_copy,
                  pn->dv_pad, pn->v, NULL);
    }
    cached->keys = (int32_t)fattn_max64(cached->keys, s.live);
    cached->values = (int32_t)(pairs ? s.live : 0);
    return pairs;
}

static void mix_pairs(forward *f, span s, bool rescale, bool pairs)
{
    if (pairs) {
        pairs_mix(f, s, rescale ? f->alpha : NULL);
    } else {
        mix_values(f, s, rescale);
    }
}

/* The sink joins last. Relative to a sink with nearly all of the weight, products of probabilities
 * and ordinary values could be subnormal, which products of pairs treat as 0. */
static const forward_kind forward_pairs = {
    .step = PAIRS_STEP,
    .pairs = true,
    .sink_last = true,
    .prefetches = !PAIRS_COPIED,
    .layout = layout_pairs,
    .prepare = prepare_pairs,
    .choose_form = choose_pairs_form,
    .rows_pay = rows_pay_pairs,
    .load = load_pairs,
    .mix = mix_pairs,
};

static void forward_pairs_work(const fattn_cpu_run *run, void *scratch)
{
    pairs_open();
    forward_items(run, scratch, &forward_pairs);
    pairs_close();
}

static int64_t forward_pairs_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    return forward_items_scratch(p, tiling, &forward_pairs);
}

/* Whether forward keeps the cores busy: there are many heads, or so few keys that the parts of
 * decoding, which are smaller, would occupy no more cores or too few more. (For 9 to 16 rows
 * decoding takes 1.7 times as long.) */
static bool keeps_cores_busy(const fattn_problem *p, const fattn_limits *limits)
{
    const int64_t keys = fattn_cpu_forward_split(NULL, p, limits).keys;
    const int64_t parts = fattn_max64(1, p->seqlen_k / keys);
    return p->seqlen_k <= 1024 || 5.0 * (double)p->batch * (double)p->heads_k * (double)parts >=
                                      3.0 * (double)limits->units;
}

/* Whether decoding with floats (decode.h) is faster: for few rows, or to occupy all cores. */
static bool decoding_pays(const fattn_problem *p, const fattn_limits *limits)
{
    const int64_t rows = fattn_problem_rows(p);
    return decode_queries_fit(p) &&
           (rows <= DECODE_ROWS / 2 || (rows <= DECODE_ROWS && !keeps_cores_busy(p, limits)));
}

/* With few keys, products of pairs save less than arranging their operands costs. The cost is lower
 * where keys are arranged in blocks and queries are read in place (small_pairs.h). */
static bool forward_pairs_pay(const fattn_kernel *row, const fattn_problem *p,
                              const fattn_limits *limits)
{
    (void)row;
    const int64_t group = fattn_problem_group(p);
    const bool keys_blocked = FV_LANES > 4 && p->dim % 8 == 0 && p->seqlen_q * group > FV_LANES;
    const int64_t few = PAIRS_COPIED ? 12 : keys_blocked ? 2 : 4;
    return p->features & FATTN_BATCH_INVARIANT || (p->seqlen_k > few && !decoding_pays(p, limits));
}

/* Matrix registers gain from more keys in a tile, since the sums of o come and go less often. */
#define WIDE_KEYS (2 * BLOCK_KEYS)
#define WIDEST_KEYS (4 * BLOCK_KEYS)
#if FV_TILES
static const fattn_tile forward_pairs_tiles[] = {BLOCK_TILES(WIDEST_KEYS), BLOCK_TILES(WIDE_KEYS),
                                                 BLOCK_TILES(BLOCK_KEYS),  {TILE_ROWS(48), 64},
                                                 {TILE_ROWS(16), 32},      {0, 0}};
#else
#define forward_pairs_tiles forward_tiles
#endif

/* Whether a tile pays: a wide one if there are more keys than in a usual one, and the widest if
 * they fill two and no diagonal cuts them. */
static bool tile_pays(const fattn_problem *p, fattn_tile tile)
{
    return tile.bc <= BLOCK_KEYS || (tile.bc <= WIDE_KEYS && p->seqlen_k > BLOCK_KEYS) ||
           (p->seqlen_k >= 2 * WIDEST_KEYS && !fattn_is_banded(p));
}

static double forward_pairs_cost(const fattn_kernel *row, const fattn_problem *p,
                                 const fattn_limits *limits, fattn_tile tile)
{
    (void)row;
    const bool shared = limits->units > 1 && fattn_cpu_blocks_are_equal(p);
    return tile_pays(p, tile)
               ? blocks_cost(p, limits, tile, shared ? PAIRS_SHARED_BLOCK_ROWS : PAIRS_BLOCK_ROWS)
               : INFINITY;
}

static int64_t forward_pairs_fast_bytes(const fattn_kernel *row, const fattn_problem *p,
                                        fattn_tile tile)
{
    (void)row;
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    return tile_scratch(p, &tiling, &forward_pairs) + keys_in_place_bytes(p, &tiling);
}

static int64_t forward_pairs_workspace(const fattn_kernel *row, const fattn_problem *p,
                                       const fattn_tiling *tiling)
{
    (void)row;
    return fattn_cpu_workspace_of_one(forward_shared(p, tiling), forward_pairs_scratch(p, tiling));
}

#endif
