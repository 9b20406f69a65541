/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts: if the keys of a block of rows are split, each item leaves {m, l, lost, o} of its rows in
 * the workspace. They are merged in ascending order, by a second phase or, in decoding, by the
 * worker that leaves the last part of a block. How many parts a block has follows from the keys
 * that it attends to (core/schedule.h). A block with a single part writes its results at once.
 * Items for parts that a block does not have do nothing.
 */
#ifndef FATTN_CPU_PARTS_H
#define FATTN_CPU_PARTS_H

#include "backends/cpu/store.h"

/* Places the panel on all rows of an item. Returns false if there are none. */
static bool place_item(panel *pn, const fattn_cpu_run *run, int64_t item)
{
    const fattn_work work = fattn_schedule_item(run->tiling, run->problem->heads_k, item);
    pn->br = run->tiling->br;
    return panel_place(pn, run, work.batch, work.head, work.block * pn->br, ROWS_IN_LANES);
}

/* The parts of the keys of a block of rows, from the first rows of `first` to the last ones of
 * `last`. */
static fattn_parts parts_of(const fattn_tiling *tiling, const panel *first, const panel *last)
{
    const fattn_range keys = fattn_band_rows(&first->band, first->i0, last->i1);
    return fattn_schedule_parts(tiling, fattn_max64(0, keys.first) / tiling->bc,
                                (fattn_max64(0, keys.past) + tiling->bc - 1) / tiling->bc);
}

/* Whether an item has rows, and keys in its part; true without a check where nearly all items have.
 * Not inlined, or the panel would occupy the stack during the item. */
APART bool item_exists(const fattn_cpu_run *run, int64_t item)
{
    const bool differ = run->problem->features & (FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_Q);
    const bool blocks_differ = differ && (run->tiling->q_blocks > 1 || run->few_rows);
    panel all;
    int64_t first, past;
    if (run->tiling->splits == 1 && !blocks_differ) {
        return true;
    }
    if (!place_item(&all, run, item)) {
        return false;
    }
    const fattn_parts parts = parts_of(run->tiling, &all, &all);
    const int64_t split = run->tiling->splits == 1 ? 0 : item % run->tiling->splits;
    return fattn_schedule_keys(&parts, split, &first, &past);
}

/* How many floats a part leaves behind: m, l, lost and o of each strip. Of the last strip's o, only
 * the rows that exist. Parts begin at cache lines. */
static int64_t part_size(const fattn_problem *p, const fattn_tiling *tiling)
{
    const int64_t rows = p->heads_k ? p->heads_q / p->heads_k * p->seqlen_q : 0;
    const int64_t o = fattn_min64(rows, tiling->br) * vectors_of(p->dim_v) * FV_LANES;
    const int64_t line = CACHE_LINE / (int64_t)sizeof(float);
    return (3 * tiling->br + o + line - 1) / line * line;
}

/* How many blocks of rows have parts to be merged. */
static int64_t split_blocks(const fattn_tiling *tiling)
{
    return tiling->splits > 1 ? tiling->items / tiling->splits : 0;
}

static int64_t forward_shared(const fattn_problem *p, const fattn_tiling *tiling)
{
    if (tiling->splits == 1) {
        return 0;
    }
    return fattn_cpu_bytes(tiling->items, part_size(p, tiling), sizeof(float));
}

/* Where strip n lies in a part. */
static float *part_of(const forward *f, float *part, int64_t n)
{
    return part + n * f->panel.br * (3 + f->panel.dv_pad);
}

/* The panel's rows are those from row `at` of the strip on. The first ones also fill the lanes past
 * the last row, with which the merge computes. Rows that attend to no key of the part, whose l is
 * 0, leave no o. */
static void forward_keep_part(const forward *f, float *part, int64_t at)
{
    const panel *const pn = &f->panel;
    const size_t lanes = (size_t)(at == 0 ? pn->br : pn->rows) * sizeof(float);
    memcpy(part + at, f->m, lanes);
    memcpy(part + pn->br + at, f->l, lanes);
    memcpy(part + 2 * pn->br + at, f->lost, lanes);
    for (int64_t r = 0; r < pn->rows; r++) {
        if (f->l[r] != 0) {
            memcpy(part + 3 * pn->br + (at + r) * pn->dv_pad, f->o + r * pn->dv_pad,
                   (size_t)pn->dv_pad * sizeof(float));
        }
    }
}

/* Rescales o, by columns, from the sum of rounded weights to l, the sum of exact ones. */
static void restore_scale(const forward *f)
{
    const panel *const pn = &f->panel;
    for (int64_t r = 0; r < pn->width && f->taken != f->l; r += FV_LANES) {
        const fv factor = fv_mul(fv_load(f->l + r), normaliser_of_sums(f, r));
        scale_rows(f->ot + r, pn->dv_pad, pn->br, FV_LANES, factor);
    }
}

/* Stores strip n of a part, or its rows from row `at` on, in a slot of the workspace, where the
 * merge reads it. */
static void forward_leave_part(const forward *f, const fattn_cpu_run *run, int64_t slot, int64_t n,
                               int64_t at)
{
    const int64_t size = part_size(run->problem, run->tiling);
    forward_keep_part(f, part_of(f, (float *)run->shared + slot * size, n), at);
}

/* --- Merging ---------------------------------------------------------------------------------- */

/* {m, l, lost, o} of the panel = those of a part. */
static void take_part(forward *f, const float *part)
{
    const panel *const pn = &f->panel;
    const size_t lanes = (size_t)pn->br * sizeof(float);
    memcpy(f->m, part, lanes);
    memcpy(f->l, part + pn->br, lanes);
    memcpy(f->lost, part + 2 * pn->br, lanes);
    f->taken = f->l;
    for (int64_t r = 0; r < pn->rows; r++) {
        float *const o = f->o + r * pn->dv_pad;
        if (f->l[r] == 0) {
            fill(o, pn->dv_pad, 0);
        } else {
            memcpy(o, part + 3 * pn->br + r * pn->dv_pad, (size_t)pn->dv_pad * sizeof(float));
        }
    }
}

/* Merges a part into {m, l, lost, o} of the panel. other: the same of the part. A row that attends
 * to no key of the part stays as it is: its alpha would be 1. */
static void merge_part(forward *f, const float *other)
{
    const panel *const pn = &f->panel;
    const float *const m = other, *const l = m + pn->br, *const lost = l + pn->br;
    const float *const o = lost + pn->br;
    float *const alpha = f->alpha, *const beta = pn->at;

    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        fattn_softmax state = state_load(f, r);
        const fattn_softmax part = {.m = fv_load(m + r), .l = fv_load(l + r)};
        fv a, b;
        const fv now = fattn_softmax_merge(&state, part, fv_set1(pn->rule.unit), &a, &b);
        add_lost(f, r, a, fv_fma(b, fv_load(lost + r), now));
        state_store(f, r, state);
        fv_store(alpha + r, a);
        fv_store(beta + r, b);
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        if (l[r] == 0) {
            continue;
        }
        const fv a = fv_set1(alpha[r]), b = fv_set1(beta[r]);
        for (int64_t c = 0; c < pn->dv_pad; c += FV_LANES) {
            float *const at = f->o + r * pn->dv_pad + c;
            fv_store(at, fv_fma(b, fv_load(o + r * pn->dv_pad + c), fv_mul(a, fv_load(at))));
        }
    }
}

/* Merges the parts of a block, `splits` of them from slot `slot` on. */
static void merge_parts(const fattn_cpu_run *run, fattn_work work, int64_t slot, int64_t splits,
                        void *scratch)
{
    const int64_t size = part_size(run->problem, run->tiling);
    arena from = {.base = scratch};
    forward strips[STRIPS];
    const int64_t room = block_layout(strips, run->problem, run->tiling, 1, &from);
    const int64_t count = forward_open(strips, room, run, work);

    panel_prepare(&strips->panel);
    for (int64_t n = 0; n < count; n++) {
        forward *const f = &strips[n];
        const float *const parts = part_of(f, (float *)run->shared + slot * size, n);
        take_part(f, parts);
        for (int64_t split = 1; split < splits; split++) {
            merge_part(f, parts + split * size);
        }
        if (run->onto) {
            forward_merge_rows(f);
        } else {
            forward_store(f);
        }
    }
}

static void merge_block(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const int64_t first = item * run->tiling->splits;
    panel all; /* rows of the block */
    if (!place_item(&all, run, first)) {
        return;
    }
    const fattn_parts there = parts_of(run->tiling, &all, &all);
    const int64_t splits = fattn_parts_count(&there);
    if (splits > 1) {
        merge_parts(run, fattn_schedule_item(run->tiling, run->problem->heads_k, first), first,
                    splits, scratch);
    }
}

static void merge_work(const fattn_cpu_run *run, void *scratch)
{
    each_item(run, scratch, merge_block);
}

static int64_t merge_count(const fattn_cpu_run *run) { return split_blocks(run->tiling); }

#endif
