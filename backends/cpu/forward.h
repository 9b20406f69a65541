/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward: a block of queries against a part of its keys, one tile of keys at a time.
 *
 *     S^T = K Q^T         scores, with every feature of score.h
 *     P^T                 online softmax: l, and the factors alpha for what came before
 *     O^T = O^T alpha + V^T P^T
 *
 * A block is divided into strips, panels of one register tile's width. The scores of a strip, its
 * queries and a few rows of the tile fill the first-level cache, where they are contiguous. The
 * tile of keys and values is loaded once, stays in the second-level cache, and serves the strips of
 * a block one after another. (If keys are few, strips are wider, and only their scores stay in the
 * first-level cache.)
 *
 * If the keys of an item are not split, a strip writes o and lse, or merges them with results for
 * other keys (fattn_cpu_run.onto). If they are, each part leaves {m, l, lost, o} in the workspace,
 * and a second phase merges the parts in ascending order (parts.h). This header has what a strip
 * does whatever it multiplies; forward_floats.h and forward_pairs.h have the products. Decoding
 * (decode.h) goes through its keys in the same way, with other products.
 */
#ifndef FATTN_CPU_FORWARD_H
#define FATTN_CPU_FORWARD_H

#include "backends/cpu/ahead.h"
#include "backends/cpu/cost.h"
#include "backends/cpu/mix.h"
#include "backends/cpu/soften.h"

/* What differs between products of floats and of pairs. */
typedef struct forward_kind {
    int64_t step;   /* keys of a tile are rounded up to a multiple of it */
    bool pairs;     /* values may be pairs of bf16 */
    bool sink_last; /* a sink joins after the last key and not before the first */
    /* Products with keys prefetch rows that are needed later (ahead.h); those of pairs do so only
     * where keys are read once. */
    bool prefetches;
    int64_t (*layout)(forward *strips, const fattn_problem *p, const fattn_tiling *tiling,
                      arena *from);   /* returns how many strips there are */
    void (*prepare)(const panel *pn); /* fills the scratch that no item changes */
    const query_form *(*choose_form)(const panel *pn);
    /* Whether computing o by rows pays, and values allow it. one_tile: the strip has one tile of
     * keys. */
    bool (*rows_pay)(const forward *f, bool one_tile);
    /* Loads a tile's keys, and its values if o is wanted. cached: how many of them are there before
     * and after the call. Returns whether values are pairs. */
    bool (*load)(const forward *f, span s, cached_tile *cached);
    /* o = alpha o + P V for a tile. rescale: some row's alpha is not 1; pairs: P and V are pairs of
     * bf16 */
    void (*mix)(forward *f, span s, bool rescale, bool pairs);
} forward_kind;

/* Arranges the queries of a strip, and begins the state of a part. */
INLINE void forward_begin(forward *f, const forward_kind *kind, int64_t split)
{
    panel *const pn = &f->panel;
    pn->step = kind->step;
    f->form = kind->choose_form(pn);
    if (f->form->load) {
        f->form->load(f);
    }
    f->fresh = true;
    f->by_rows = f->one_tile = f->normalised = f->in_tensor = f->none_small = false;
    f->tiles_done = f->mispredicted = 0;
    state_begin(f, split, kind->sink_last);
}

/* x = the scores of a tile. score_tile() masks those that were not multiplied. */
static void forward_scores(forward *f, span s)
{
    f->form->multiply(f, s);
    score_tile(&f->panel, s);
}

/* A tile of keys for a strip. pairs: values are pairs of bf16, and probabilities become pairs */
INLINE void forward_tile(forward *f, const forward_kind *kind, span s, bool pairs)
{
    panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;

    /* 1. Scores. */
    forward_scores(f, s);

    /* 2. Probabilities. */
    const bool drops = p->features & FATTN_DROPOUT;
    const bool masked = s.kind == FATTN_TILE_PARTIAL || seems_masked(pn, s);
    const int64_t keys = (s.live + PARTIAL_SUMS - 1) / PARTIAL_SUMS * PARTIAL_SUMS;
    const bool as_pairs = pairs && !drops; /* otherwise drop_tile() rounds them */
    const bool predicted = !masked && predicts_near(f, s);
    const bool near =
        predicted && (as_pairs ? soften_near(f, keys, true) : soften_near(f, keys, false));
    if (predicted && !near) {
        forward_scores(f, s);
        f->mispredicted++;
    }
    f->tiles_done++;
    const bool rescale = !near && (as_pairs ? soften_tile(f, keys, masked, STORED_PAIRS)
                                   : pairs  ? soften_tile(f, keys, masked, STORED_FLOATS_FOR_PAIRS)
                                            : soften_tile(f, keys, masked, STORED_FLOATS));
    if (!(p->outputs & FATTN_OUT_O)) {
        return;
    }
    fill(pn->x + keys / (1 + as_pairs) * pn->br, (s.padded - keys) / (1 + as_pairs) * pn->br, 0);
    if (drops) {
        drop_tile(pn, s, pairs);
    }

    /* 3. Values. */
    kind->mix(f, s, rescale, pairs);
    f->fresh = false;
}

/* Makes the strips use the cached copies of a tile of keys; returns how many of its keys and values
 * are converted already. */
static cached_tile use_cached_copies(forward *strips, int64_t count, int64_t block)
{
    const panel *const pn = &strips->panel;
    if (!caches_tiles(pn->p, pn->bc)) {
        return (cached_tile){0};
    }
    key_tile tile = *strips->tiles;
    tile.k_copy += block * pn->bc * operand_row(pn->p->dim);
    tile.v_copy += block * pn->bc * pn->dv_pad;
    use_tile(strips, count, tile);
    return strips->cache->tile[block];
}

/* Loads a tile of keys and values. Returns whether its values are pairs. */
INLINE bool load_tile(forward *strips, const forward_kind *kind, int64_t count, int64_t block,
                      span s)
{
    cached_tile cached = use_cached_copies(strips, count, block);
    const panel *const pn = &strips->panel;
    const bool pairs = kind->load(strips, s, &cached);
    if (caches_tiles(pn->p, pn->bc)) {
        strips->cache->tile[block] = cached;
    }
    return kind->pairs && pairs;
}

/* A tile of keys for all strips. The item has the tiles first .. past - 1. loaded: the keys and
 * values of the tile are there already. The earlier o, if there is one to merge with, is prefetched
 * meanwhile. */
INLINE void forward_block(forward *strips, int64_t count, int64_t block, int64_t first,
                          int64_t past, const forward_kind *kind, bool loaded)
{
    span spans[STRIPS];
    const span all = spans_of(strips, count, block, spans);
    const bool pairs = all.live && !loaded && load_tile(strips, kind, count, block, all);
    for (int64_t n = 0; n < count; n++) {
        if (strips->panel.run->onto) {
            prefetch_earlier_o(&strips[n].panel, block - first, past - first);
        }
        if (spans[n].kind != FATTN_TILE_EMPTY) {
            forward_tile(&strips[n], kind, spans[n], pairs);
        }
    }
}

/* Begins the strips of an item, and narrows their key blocks to what they attend to. room: how many
 * strips a block may have. Returns the key blocks that some strip attends to. */
INLINE fattn_range begin_strips(forward *strips, int64_t count, int64_t room,
                                const fattn_cpu_run *run, fattn_work work, const fattn_parts *parts,
                                const forward_kind *kind)
{
    const int64_t head = work.batch * run->problem->heads_k + work.head + 1;
    const int64_t part = work.batch * run->tiling->splits + work.split + 1;
    fattn_range blocks = {.first = INT64_MAX, .past = 0};
    if (strips->cache->head != head) {
        *strips->cache = (cached_head){.head = head};
    }
    for (int64_t n = 0; n < count; n++) {
        int64_t first, past;
        forward_begin(&strips[n], kind, work.split);
        (void)fattn_schedule_keys(parts, work.split, &first, &past);
        panel_blocks(&strips[n].panel, &first, &past);
        known_ranges *const known = strips->known ? &strips->known[work.block * room + n] : NULL;
        skip_hidden_blocks(&strips[n].panel, known, part, &first, &past);
        blocks.first = fattn_min64(blocks.first, first);
        blocks.past = fattn_max64(blocks.past, past);
        if (fattn_parts_are_one(parts)) {
            const bool one_tile = past - first <= 1;
            choose_rows(&strips[n], one_tile, kind->rows_pay(&strips[n], one_tile));
        }
    }
    return blocks;
}

/* Stores the results of strip n, merges them with earlier ones, or leaves them as a part of the
 * item. */
INLINE void end_strip(forward *f, const fattn_cpu_run *run, int64_t item, int64_t n, bool whole)
{
    const panel *const pn = &f->panel;
    if (f->fresh) {
        fill(f->ot, pn->br * pn->dv_pad, 0);
    }
    join_sinks(f);
    if (!whole) {
        restore_scale(f);
        transpose(f->ot, pn->br, pn->dv_pad, pn->width, f->o, pn->dv_pad);
        forward_leave_part(f, run, item, n, 0);
    } else if (run->onto && f->by_rows) {
        forward_merge_rows(f);
    } else if (run->onto) {
        forward_merge_columns(f);
    } else if (f->by_rows) {
        forward_store_rows(f);
    } else {
        forward_store_columns(f);
    }
}

/* How far the head is whose rows are prefetched while those of this head are copied: the head of
 * the item that this worker probably gets next, or 0. Only for rows that lie pages apart, which the
 * processor's own prefetchers do not foresee, and whose heads are neighbours. */
APART int32_t heads_ahead(const fattn_cpu_run *run, fattn_work work)
{
    const fattn_problem *const p = run->problem;
    const int64_t item = fattn_cpu_upcoming(run->items);
    if (p->dtype_kv != FATTN_BF16 || p->k.seq % 2048 != 0 || p->k.head >= p->k.seq) {
        return 0;
    }
    if (run->tiling->workers == 1) {
        return work.head + 1 < p->heads_k ? 1 : 0;
    }
    if (item >= run->tiling->items) {
        return 0;
    }
    const fattn_work next = fattn_schedule_item(run->tiling, p->heads_k, item);
    return next.batch == work.batch ? (int32_t)(next.head - work.head) : 0;
}

/* An item: a block of queries against a part of its keys. */
INLINE void forward_item(const fattn_cpu_run *run, int64_t item, forward *strips, int64_t room,
                         const forward_kind *kind)
{
    const fattn_work work = fattn_schedule_item(run->tiling, run->problem->heads_k, item);
    const int64_t count = forward_open(strips, room, run, work);
    if (count == 0) {
        return;
    }
    const fattn_parts parts = parts_of(run->tiling, &strips->panel, &strips[count - 1].panel);
    const int32_t further = kind->pairs && kind->prefetches ? heads_ahead(run, work) : 0;
    for (int64_t n = 0; further && n < count; n++) {
        strips[n].panel.heads_ahead = further;
    }
    const fattn_range blocks = begin_strips(strips, count, room, run, work, &parts, kind);
    prefetch_plan ahead;
    const bool prefetches = kind->prefetches &&
                            prefetching_pays(run->problem, blocks.first, blocks.past) &&
                            run->problem->outputs & FATTN_OUT_O &&
                            (!kind->pairs || reads_keys_once(run, &strips->panel));
    if (prefetches) {
        prefetch_plan_open(&ahead, run, item, &strips->panel, blocks.first, blocks.past);
    }
    for (int64_t block = blocks.first; block < blocks.past; block++) {
        const bool loaded = prefetches && begin_block(&ahead, strips, count, run, block);
        forward_block(strips, count, block, blocks.first, blocks.past, kind, loaded);
    }
    for (int64_t n = 0; n < count; n++) {
        end_strip(&strips[n], run, item, n, fattn_parts_are_one(&parts));
    }
}

/* The items of a worker. Strips are laid out once, in scratch; each item begins with a copy of that
 * layout. */
INLINE void forward_items(const fattn_cpu_run *run, void *scratch, const forward_kind *kind)
{
    forward strips[STRIPS];
    cached_head cache = {0};
    arena from = {.base = scratch};
    forward *const laid = carve(&from, STRIPS, sizeof *laid);
    const int64_t room = kind->layout(laid, run->problem, run->tiling, &from);
    known_layout(laid, &from);
    laid->cache = &cache;
    kind->prepare(&laid->panel);
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        if (item_exists(run, item)) {
            memcpy(strips, laid, (size_t)room * sizeof *laid);
            forward_item(run, item, strips, room, kind);
        }
    }
}

static int64_t forward_count(const fattn_cpu_run *run) { return run->tiling->items; }

/* Bytes of scratch that a worker uses during each tile. */
INLINE int64_t tile_scratch(const fattn_problem *p, const fattn_tiling *tiling,
                            const forward_kind *kind)
{
    forward strips[STRIPS];
    arena from = {0};
    (void)kind->layout(strips, p, tiling, &from);
    return from.used;
}

/* Bytes of all scratch of a worker. */
INLINE int64_t forward_items_scratch(const fattn_problem *p, const fattn_tiling *tiling,
                                     const forward_kind *kind)
{
    forward strips[STRIPS];
    arena from = {0};
    (void)carve(&from, STRIPS, sizeof *strips);
    (void)kind->layout(strips, p, tiling, &from);
    known_layout(strips, &from);
    return from.used;
}

/* --- Tiles ------------------------------------------------------------------------------------ */

/* The tiles that the planner chooses from. A block should have so many rows that loading its keys
 * pays, and still leave several blocks for each core; the sizes between serve to divide rows
 * evenly. */
#define BLOCK_TILES(keys)                                                                         \
    {TILE_ROWS(48), keys}, {TILE_ROWS(96), keys}, {TILE_ROWS(144), keys}, {TILE_ROWS(192), keys}, \
        {TILE_ROWS(240), keys}, {TILE_ROWS(288), keys}, {TILE_ROWS(384), keys},                   \
    {                                                                                             \
        BLOCK_ROWS, keys                                                                          \
    }
static const fattn_tile forward_tiles[] = {BLOCK_TILES(BLOCK_KEYS),
                                           {TILE_ROWS(48), 64},
#if FV_LANES > 1 && FV_LANES < 16
                                           {TILE_ROWS(24), 64},
#endif
                                           {TILE_ROWS(16), 32},
                                           {0, 0}};

/* The cost of tiles (cost.h). extra_rows: what a block costs besides its rows, in times of a row.
 * The largest blocks are for problems with at least four of them per core. */
static double blocks_cost(const fattn_problem *p, const fattn_limits *limits, fattn_tile tile,
                          int64_t extra_rows)
{
    const fattn_cpu_blocks blocks = {.extra_rows = extra_rows, .large = BLOCK_ROWS, .rounds = 4};
    return fattn_cpu_cost(p, limits, tile, blocks);
}

#endif
