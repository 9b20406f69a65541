/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The items of backward: a panel's loop over its keys, in the order that its chain prescribes.
 */
#ifndef FATTN_CPU_BACKWARD_RUN_H
#define FATTN_CPU_BACKWARD_RUN_H

#include "backends/cpu/backward.h"

/* Writes dq of rows first .. first + FV_LANES - 1: those of dqt times `factors`. */
static void store_dq(backward *job, int64_t first, sum_factors factors)
{
    const panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const fattn_dtype dtype = fattn_gradient_dtype(p, p->dtype);
    transpose(job->dqt + first, pn->br, pn->d_pad, FV_LANES, job->dq, pn->d_pad);
    for (int64_t r = first; r < fattn_min64(first + FV_LANES, pn->rows); r++) {
        const int64_t at = query_index(pn, &p->dq, r);
        float *const row = job->dq + (r - first) * pn->d_pad;
        if (factors.first != 1) {
            scale_rows(row, 1, pn->d_pad, pn->d_pad, fv_set1(factors.first));
        }
        if (p->features & FATTN_ACCUMULATE) { /* dq is f32 then */
            add_row((float *)pn->run->buffers->dq + at, row, p->dim, factors.last);
        } else {
            row_store((char *)pn->run->buffers->dq + at * fattn_dtype_size(dtype), dtype, row,
                      p->dim, factors.last);
        }
    }
}

/* The panel's part of dSink = -sum over its rows of exp(sink - lse) delta, one number per head. The
 * sum is in double, since all of its terms may be alike. */
static void store_dsink(const backward *job, float (*delta)(const backward *job, int64_t r),
                        float *parts)
{
    const panel *const pn = &job->panel;
    for (int64_t n = 0; n < pn->group; n++) {
        const int64_t h = pn->hk * pn->group + n;
        const fv sink = fv_set1(((const float *)pn->run->buffers->sink)[h]);
        double sum = 0;
        for (int64_t r = 0; r < pn->rows; r++) {
            const query_row *const row = &pn->row[r];
            if (row->dead || row->h != h) {
                continue;
            }
            float weight[FV_LANES];
            fv_store(weight,
                     fattn_softmax_weight(sink, fv_set1((float)FATTN_LOG2E), fv_set1(job->lse[r])));
            sum -= (double)weight[0] * delta(job, r);
        }
        parts[n] = (float)sum;
    }
}

/* The number of panels in a chain. They have consecutive numbers. */
static int64_t chain_length(const fattn_cpu_run *run)
{
    return dbias_crosses(run->problem) ? run->tiling->items : run->tiling->q_blocks;
}

/*
 * The number of the panel that is handed out as item n. Up to HEADS_TOGETHER heads take turns, a
 * panel each. Panels of one head that ran at the same time would wait for each other, and send dK
 * and dV from cache to cache.
 */
#define HEADS_TOGETHER 16
static int64_t panel_number(const fattn_cpu_run *run, int64_t n)
{
    const int64_t blocks = run->tiling->q_blocks, set = HEADS_TOGETHER * blocks;
    const int64_t begin = n / set * set,
                  heads = fattn_min64(set, run->tiling->items - begin) / blocks;
    const int64_t head = (n - begin) % heads, block = (n - begin) / heads;
    return dbias_crosses(run->problem) ? n : begin + head * blocks + block;
}

/* Places the panel on the rows of item n. Returns false if there are none. */
static bool place_panel(panel *pn, const fattn_cpu_run *run, int64_t n)
{
    const fattn_work work =
        fattn_schedule_item(run->tiling, run->problem->heads_k, panel_number(run, n));
    return panel_place(pn, run, work.batch, work.head, work.block * pn->br, ROWS_IN_LANES);
}

/* While it multiplies, a panel prefetches the rows of dq that it will write, and those of q, dO and
 * o of the panel that its thread probably gets next. Its last AHEAD_TILES tiles before the last one
 * share that; the last tile does it only if it is the only one, since a diagonal may leave little
 * of it. AHEAD: the number of those tensors */
#define AHEAD_TILES 4
#define AHEAD 4

/* Lists the share of the next tile, at most AHEAD br rows. Returns how many. */
APART int64_t list_rows_ahead(const backward *job, prefetch_row *rows)
{
    const panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const fattn_buffers *const buf = pn->run->buffers;
    if (job->share < 0 || job->share >= job->shares) {
        return 0;
    }
    const int64_t first = pn->br * job->share / job->shares;
    const int64_t past = pn->br * (job->share + 1) / job->shares;
    int64_t count = 0;
    if (wants(p, FATTN_OUT_DQ)) {
        count = list_rows(pn, first, past, buf->dq, fattn_gradient_dtype(p, p->dtype), &p->dq,
                          p->dim, rows);
    }
    const int64_t item = fattn_cpu_upcoming(pn->run->items);
    panel next = *pn;
    if (item < pn->run->tiling->items && place_panel(&next, pn->run, item)) {
        count += list_rows(&next, first, past, buf->q, p->dtype, &p->q, p->dim, rows + count);
        count +=
            list_rows(&next, first, past, buf->dout, p->dtype_o, &p->dout, p->dim_v, rows + count);
        count += list_rows(&next, first, past, buf->o, p->dtype_o, &p->o, p->dim_v, rows + count);
    }
    return count;
}

/* What differs between products of floats and of pairs. */
typedef struct backward_kind {
    int64_t step; /* keys of a tile are rounded up to a multiple of it */
    void (*layout)(backward *job, const fattn_problem *p, const fattn_tiling *tiling, arena *from);
    void (*load)(backward *job); /* loads what a panel needs of its rows */
    void (*tile)(backward *job, span s, span next, const fattn_cpu_progress *before);
    sum_factors (*dq_factors)(const backward *job); /* what dqt is multiplied by */
    float (*delta)(const backward *job, int64_t r); /* of a row, for dSink */
} backward_kind;

/* All tiles of a panel. before, own: the progress of the panel before it in its chain, and its own,
 * or NULL */
INLINE void backward_panel(backward *job, const backward_kind *kind,
                           const fattn_cpu_progress *before, fattn_cpu_progress *own)
{
    panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    int64_t block = 0, past = INT64_MAX;

    pn->step = kind->step;
    kind->load(job);
    for (int64_t c = 0; c < pn->d_pad; c++) {
        fill(job->dqt + c * pn->br, pn->width, 0);
    }
    panel_blocks(pn, &block, &past);
    skip_hidden_blocks(pn, NULL, 0, &block, &past);
    if (!wants(p, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS)) {
        past = 0;
    }
    const int64_t last = fattn_max64(past - 1, block + 1);
    job->shares = fattn_min64(last - block, AHEAD_TILES);
    span next;
    for (span s = visible_span(pn, block, ENDS_EARLY); block < past; block++, s = next) {
        job->share = block - last + job->shares;
        next = visible_span(pn, block + 1, ENDS_EARLY);
        if (s.kind == FATTN_TILE_EMPTY) {
            continue;
        }
        kind->tile(job, s, next, before);
        if (own) {
            fattn_cpu_publish(own, block + 1);
        }
    }
    for (int64_t r = 0; r < pn->rows && wants(p, FATTN_OUT_DQ); r += FV_LANES) {
        store_dq(job, r, kind->dq_factors(job));
    }
}

INLINE void differentiate(const fattn_cpu_run *run, int64_t n, void *scratch,
                          const backward_kind *kind)
{
    const fattn_problem *const p = run->problem;
    const int64_t item = panel_number(run, n);
    arena from = {.base = scratch};
    backward job;
    panel *const pn = &job.panel;
    kind->layout(&job, p, run->tiling, &from);
    panel_prepare(pn);
    job.shared = gradients_of(run);

    fattn_cpu_progress *const own = is_chained(p) ? &job.shared.progress[item] : NULL;
    const fattn_cpu_progress *const before = own && item % chain_length(run) != 0 ? own - 1 : NULL;
    const bool has_rows = place_panel(pn, run, n);
    if (has_rows) {
        panel_fill(pn);
        backward_panel(&job, kind, before, own);
    }
    if (wants(p, FATTN_OUT_DSINK)) {
        float *const parts = job.shared.dsink + item * pn->group;
        if (has_rows) {
            store_dsink(&job, kind->delta, parts);
        } else {
            fill(parts, pn->group, 0);
        }
    }
    if (before) {
        fattn_cpu_wait(before, INT64_MAX);
    }
    if (own) {
        fattn_cpu_publish(own, INT64_MAX);
    }
}

static int64_t backward_count(const fattn_cpu_run *run) { return run->tiling->items; }

#endif
