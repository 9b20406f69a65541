/* SPDX-License-Identifier: Apache-2.0 */
/* The exact half of the I/O model: counts the tiles that each head visits and applies the formulas
 * of io_counts.h. */
#include "core/band.h"
#include "core/integer.h"
#include "core/io_counts.h"
#include "core/problem.h"

/* One head of one sequence, and the algorithm that computes it. */
typedef struct walk {
    const fattn_problem *p;
    fattn_io_schedule schedule;
    fattn_tile tile;
    fattn_sequence seq;
    fattn_block_mask mask;
} walk;

/* Entries of the block mask for the rows (or keys) first .. first + count - 1, along one axis. */
static double blocks_touched(int64_t first, int64_t count, int64_t block, int64_t stride)
{
    return stride == 0 ? 1 : (double)((first + count - 1) / block - first / block + 1);
}

/* Adds the tiles of rows i .. i + rows - 1 that contain any of the keys first .. end - 1. */
static void visit_row_block(const walk *w, int64_t i, int64_t rows, int64_t first, int64_t end,
                            fattn_io_visits *v)
{
    const int64_t bc = w->tile.bc;
    if (first >= end) {
        return;
    }
    if (!w->mask.mask) {
        const int64_t from = first / bc * bc,
                      to = fattn_min64(w->seq.sk, fattn_ceil_div(end, bc) * bc);
        const double tiles = (double)fattn_ceil_div(to - from, bc);
        v->tiles += tiles;
        v->rows += tiles * (double)rows;
        v->keys += (double)(to - from);
        v->pairs += (double)rows * (double)(to - from);
        return;
    }
    for (int64_t j = first / bc * bc; j < end; j += bc) {
        const int64_t keys = fattn_min64(bc, w->seq.sk - j);
        v->entries += blocks_touched(i, rows, w->mask.rows, w->mask.stride_i) *
                      blocks_touched(j, keys, w->mask.keys, w->mask.stride_j);
        if (fattn_block_mask_tile(&w->mask, i, i + rows, j, j + keys) != FATTN_TILE_EMPTY) {
            v->tiles += 1;
            v->rows += (double)rows;
            v->keys += (double)keys;
            v->pairs += (double)rows * (double)keys;
        }
    }
}

static fattn_io_visits flash_visits(const walk *w)
{
    const bool skips = w->schedule == FATTN_IO_FLASH2;
    const bool dense = !w->mask.mask && (!skips || !fattn_is_banded(w->p));
    const int64_t sq = w->seq.sq, sk = w->seq.sk;
    if (dense) {
        const double tr = (double)fattn_ceil_div(sq, w->tile.br);
        const double tc = (double)fattn_ceil_div(sk, w->tile.bc);
        return (fattn_io_visits){tr * tc, tc * (double)sq, tr * (double)sk, (double)sq * (double)sk,
                                 0};
    }
    fattn_io_visits v = {0, 0, 0, 0, 0};
    const fattn_band band = fattn_band_of(w->p, &w->seq);
    for (int64_t i = 0; i < sq; i += w->tile.br) {
        const int64_t rows = fattn_min64(w->tile.br, sq - i);
        const fattn_range keys = fattn_band_rows(&band, i, i + rows);
        visit_row_block(w, i, rows, skips ? keys.first : 0, skips ? keys.past : sk, &v);
    }
    return v;
}

/* In standard attention a tile is br rows of all keys; the block mask is read for each. */
static fattn_io_visits standard_visits(const walk *w)
{
    const int64_t sq = w->seq.sq, sk = w->seq.sk;
    const double bands = (double)fattn_ceil_div(sq, w->tile.br);
    fattn_io_visits v = {bands, (double)sq, bands * (double)sk, (double)sq * (double)sk, 0};
    if (sk == 0) {
        return (fattn_io_visits){0, 0, 0, 0, 0};
    }
    for (int64_t i = 0; i < sq && w->mask.mask && w->p->op == FATTN_FORWARD; i += w->tile.br) {
        const int64_t rows = fattn_min64(w->tile.br, sq - i);
        v.entries += blocks_touched(i, rows, w->mask.rows, w->mask.stride_i) *
                     blocks_touched(0, sk, w->mask.keys, w->mask.stride_j);
    }
    return v;
}

/* The block mask of a head; its address is NULL where there is none. */
static fattn_block_mask mask_of(const fattn_problem *p, const fattn_buffers *buffers, int64_t b,
                                int64_t h)
{
    const int64_t *const stride = p->block_mask_stride;
    return (fattn_block_mask){
        .mask = p->features & FATTN_BLOCK_MASK ? buffers->block_mask + b * stride[0] + h * stride[1]
                                               : NULL,
        .stride_i = stride[2],
        .stride_j = stride[3],
        .rows = p->block_m,
        .keys = p->block_n,
    };
}

void fattn_io_predict(const fattn_problem *p, const fattn_buffers *buffers,
                      fattn_io_schedule schedule, fattn_tile tile, fattn_io_counts *counts)
{
    *counts = (fattn_io_counts){0};
    walk w = {.p = p, .schedule = schedule, .tile = tile};
    fattn_io_head a = {.p = p, .schedule = schedule, .counts = counts};
    a.d = (double)p->dim;
    a.dv = (double)p->dim_v;
    if (p->outputs & FATTN_OUT_DBIAS && !(p->features & FATTN_ACCUMULATE)) {
        counts->tensor[FATTN_IO_DBIAS].writes += fattn_io_dbias_elements(p); /* it begins with 0 */
    }
    for (int64_t b = 0; b < p->batch; b++) {
        w.seq = fattn_sequence_of(p, buffers, b);
        a.n = (double)w.seq.sq;
        a.k = (double)w.seq.sk;
        a.slot_k = (double)w.seq.slot_k;
        for (int64_t h = 0; h < p->heads_q; h++) {
            w.mask = mask_of(p, buffers, b, h);
            a.v = schedule == FATTN_IO_STANDARD ? standard_visits(&w) : flash_visits(&w);
            a.first = h % fattn_problem_group(p) == 0;
            fattn_io_count_queries(&a);
            if (a.first) {
                fattn_io_count_keys(&a);
            }
        }
    }
}
