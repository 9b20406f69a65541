/* SPDX-License-Identifier: Apache-2.0 */
/* Backward with products of floats (backward.h). */
#ifndef FATTN_CPU_BACKWARD_FLOATS_H
#define FATTN_CPU_BACKWARD_FLOATS_H

#include "backends/cpu/backward_run.h"
#include "backends/cpu/cost.h"
#include "backends/cpu/dots.h"

/* A stride for rows of n floats that is an odd number of cache lines, so that the elements of a
 * column spread over all sets of the first-level cache. */
static int64_t odd_lines(int64_t n)
{
    const int64_t line = CACHE_LINE / (int64_t)sizeof(float);
    return ((n + line - 1) / line | 1) * line;
}

static void backward_layout(backward *job, const fattn_problem *p, const fattn_tiling *tiling,
                            arena *from)
{
    const int64_t br = tiling->br, bc = tiling->bc;
    panel *const pn = &job->panel;

    backward_layout_both(job, p, tiling, br, from);
    panel_layout_keys(pn, 1, from);
    job->q_stride = odd_lines(pn->d_pad);
    job->dout_stride = odd_lines(pn->dv_pad);
    pn->q = carve(from, br * job->q_stride, sizeof(float));
    pn->qt = carve(from, br * pn->d_pad, sizeof(float));
    job->dout = carve(from, br * job->dout_stride, sizeof(float));
    job->dout_t = carve(from, br * pn->dv_pad, sizeof(float));
    job->out = carve(from, bc, sizeof *job->out);
    job->weight_rows = carve(from, bc, sizeof *job->weight_rows);
    job->discarded = carve(from, fattn_max64(pn->d_pad, pn->dv_pad), sizeof(float));
    job->rows = carve(from, bc + AHEAD * br, sizeof *job->rows);
}

static int64_t backward_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    backward job;
    arena from = {0};
    backward_layout(&job, p, tiling, &from);
    return from.used;
}

/* --- Rows ------------------------------------------------------------------------------------- */

/* delta = sum_c dO_c o_c - dlse for rows r .. r + FV_LANES - 1. Before, job->delta holds dlse;
 * job->dout_t is loaded. The sum runs in the same order as those of dP, so that a row whose o
 * equals one of its v has a dS of exactly 0 there. */
static void load_delta(backward *job, int64_t r)
{
    const panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    for (int64_t n = 0; n < FV_LANES; n++) {
        float *const o = job->o + n * pn->dv_pad;
        if (pn->row[r + n].dead) {
            fill(o, pn->dv_pad, 0);
        } else {
            row_load(o, p->dtype_o,
                     element(pn->run->buffers->o, p->dtype_o, query_index(pn, &p->o, r + n)),
                     p->dim_v);
        }
    }
    transpose(job->o, pn->dv_pad, FV_LANES, pn->dv_pad, job->ot, FV_LANES);

    fv delta = fv_set1(0);
    for (int64_t c = 0; c < p->dim_v; c++) {
        delta = fv_muladd(fv_load(job->ot + c * FV_LANES), fv_load(job->dout_t + c * pn->br + r),
                          delta);
    }
    fv_store(job->delta + r, fv_sub(delta, fv_load(job->delta + r)));
}

/* Loads q, dO, lse and delta of the rows. */
static void load_rows(backward *job)
{
    panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;

    load_lse_and_dlse(job);
    load_queries(pn, pn->run->buffers->q, p->dtype, &p->q, p->dim, pn->q, job->q_stride);
    load_queries(pn, pn->run->buffers->dout, p->dtype_o, &p->dout, p->dim_v, job->dout,
                 job->dout_stride);
    for (int64_t r = 0; r < pn->rows; r++) {
        if (pn->row[r].dead) {
            fill(job->dout + r * job->dout_stride, pn->dv_pad, 0);
        }
    }
    point_rows(pn->x_rows, pn->bc, pn->x, pn->br);
    point_rows(job->dpt_rows, pn->bc, job->dpt, pn->br);
    fill(job->discarded, fattn_max64(pn->d_pad, pn->dv_pad), 0);
    transpose(pn->q, job->q_stride, pn->width, pn->d_pad, pn->qt, pn->br);
    transpose(job->dout, job->dout_stride, pn->width, pn->dv_pad, job->dout_t, pn->br);
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        load_delta(job, r);
    }
    find_nonfinite(job);
}

/* --- A tile ----------------------------------------------------------------------------------- */

/* The power of two that P and dS are multiplied by: distances of ALiBi make them small
 * (soften.h). */
static float lift_of(const fattn_problem *p) { return p->features & FATTN_ALIBI ? LIFT : 1; }

/* Where the band cuts the tile, the product for dQ takes the rows in groups of TILE_GROUP, each
 * with the keys that some row of the group attends to: how many those are in the group of row r. */
static int64_t keys_of_group(const panel *pn, span s, int64_t r)
{
    return keys_attended(pn, s, (r / TILE_GROUP + 1) * TILE_GROUP);
}

/* Turns scores in x and dP in dpt into Z P and dS', both lifted, for the pairs that products read.
 * ds receives dS of all pairs if dbias is wanted. nonfinite, a literal: job->some_nonfinite */
INLINE void differentiate_pairs(backward *job, span s, unsigned terms, bool nonfinite)
{
    panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const bool drops = p->features & FATTN_DROPOUT, keeps_ds = wants(p, FATTN_OUT_DBIAS);
    const fv unit = fv_set1(pn->rule.unit), scale = fv_set1(pn->rule.scale);
    const float lift = lift_of(p);

    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv lse = fv_load(job->lse + r), rest = fv_load(job->rest + r);
        const fv delta = fv_load(job->delta + r);
        const int64_t past = keeps_ds ? s.padded : keys_of_group(pn, s, r);
        for (int64_t j = 0; j < past; j++) {
            const int64_t at = j * pn->br + r;
            const fattn_score_pair pair = pair_at(pn, terms, j, r);
            fv dscore;
            const fv x = fattn_score(&pn->rule, terms, fv_load(pn->x + at), pair, &dscore);
            const fv z = drops ? fv_load(pn->z + at) : fv_set1(1);
            const fv power = fattn_softmax_exponent(fv_sub(x, lse), unit, rest);
            fv weight = fv_exp2_from(power, LEAST_POWER, lift);
            fv ds = fv_mul(weight, fv_sub(fv_mul(z, fv_load(job->dpt + at)), delta));
            if (nonfinite) {
                clear_hidden(terms, pair, &weight, &ds);
            }
            fv_store(pn->x + at, fv_mul(z, weight));
            fv_store(job->dpt + at, fv_mul(fv_mul(ds, dscore), scale));
            if (keeps_ds) {
                fv_store(job->ds + at, fv_mul(fv_set1(1 / lift), ds));
            }
        }
    }
}

static void differentiate_tile(backward *job, span s, unsigned terms)
{
    if (job->some_nonfinite) {
        differentiate_pairs(job, s, terms, true);
    } else {
        differentiate_pairs(job, s, terms, false);
    }
}

/* The least number of register tiles in a product with a tile's keys. */
static int64_t register_tiles(span s, int64_t columns)
{
    return s.padded / FV_NK * ((columns + TILE_GROUP - 1) / TILE_GROUP);
}

/* The least number of them in dot_rows(). */
static int64_t register_tiles_of_dots(const panel *pn, span s)
{
    int64_t tiles = 0, j = 0;
    for (int64_t r = 0; r < pn->width && j < s.padded; r += FV_LANES) {
        const int64_t past = fattn_max64(j, keys_attended(pn, s, r + FV_LANES));
        tiles += (past - j) / FV_NK * ((pn->width - r + TILE_GROUP - 1) / TILE_GROUP);
        j = past;
    }
    return fattn_max64(1, tiles);
}

/* Lists the rows of keys that the next product copies or adds to, to be prefetched by `tiles`
 * register tiles of this one; no rows if they are read in place. */
static int64_t list_keys_later(const backward *job, span s, const void *tensor, fattn_dtype dtype,
                               const fattn_strides *strides, int64_t dim)
{
    const panel *const pn = &job->panel;
    if (in_place(pn->p->dtype, strides)) {
        return 0;
    }
    for (int64_t j = 0; j < s.live; j++) {
        job->rows[j].from = element(tensor, dtype, key_index(pn, strides, s.first + j));
        job->rows[j].bytes = bytes_in_lines(job->rows[j].from, dim * fattn_dtype_size(dtype));
    }
    return fattn_max64(s.live, 0);
}

/* The same as a list that `tiles` register tiles prefetch. */
static prefetch_list prefetch_keys(const backward *job, span s, const void *tensor,
                                   fattn_dtype dtype, const fattn_strides *strides, int64_t dim,
                                   int64_t tiles)
{
    const int64_t count = list_keys_later(job, s, tensor, dtype, strides, dim);
    return spread_rows(job->rows, count, tiles);
}

/* The same two for rows of a gradient that is summed in its tensor. */
static int64_t list_sums_later(const backward *job, span s, const void *tensor,
                               const fattn_strides *strides, int64_t dim)
{
    const fattn_problem *const p = job->panel.p;
    const bool none = !tensor || are_rounded(p) || sums_in_workspace(p, job->shared.stored);
    return none ? 0 : list_keys_later(job, s, tensor, FATTN_F32, strides, dim);
}
static prefetch_list prefetch_sums(const backward *job, span s, const void *tensor,
                                   const fattn_strides *strides, int64_t dim, int64_t tiles)
{
    return spread_rows(job->rows, list_sums_later(job, s, tensor, strides, dim), tiles);
}

/* How many queries are summed before the sum is added to a gradient: at most MOST_TERMS, and such
 * that n is divided evenly. Equal terms all round the same way, so the error of such a sum grows
 * with its length (dot_parts()). */
#define MOST_TERMS 96
static int64_t terms_of(const panel *pn, int64_t n)
{
    const int64_t most = pn->seq.sk <= PART_KEYS ? PART_TERMS : MOST_TERMS;
    const int64_t parts = (n + most - 1) / most;
    return ((n + parts - 1) / parts + 3) / 4 * 4;
}

/* tensor[j] += sum_r weights[j][r] rows[r] for the keys of the tile, or = if keys are stored.
 * weights: [bc] rows of [br]; apart: where sums are that are not in the tensor, in the workspace
 * (sums_in_workspace()) or, if keys are stored and rounded, in scratch */
static void add_keys(backward *job, span s, float *const *weights, const float *rows,
                     int64_t rows_stride, void *tensor, const fattn_strides *strides, int64_t dim,
                     float *apart, int64_t stride, prefetch_list later)
{
    panel *const pn = &job->panel;
    const bool stored = job->shared.stored, rounded = stored && are_rounded(pn->p);
    const sum_rows sums = rounded
                              ? (sum_rows){apart, stride}
                              : sum_rows_from(pn, stored, tensor, strides, apart, stride, s.first);
    for (int64_t j = 0; j < s.padded; j++) {
        job->out[j] = j < s.live ? sums.first + j * sums.step : job->discarded;
    }
    int64_t j = 0;
    for (int64_t r = 0; r < pn->width && j < s.padded; r += FV_LANES) {
        const int64_t first = j, past = keys_attended(pn, s, r + FV_LANES);
        const int64_t terms = terms_of(pn, pn->width - r);
        /* Only rows from r on attend to these keys. */
        for (int64_t i = r; past > first && i < pn->rows; i += terms) {
            for (j = first; j < past; j++) {
                job->weight_rows[j] = weights[j] + i;
            }
            const product_of sum = {.a = job->weight_rows + first,
                                    .b = rows + i * rows_stride,
                                    .b_stride = rows_stride,
                                    .depth = fattn_min64(terms, pn->rows - i)};
            const bool first_sum = stored && i == r;
            later = product_rows(first_sum ? 0 : 1 / lift_of(pn->p), past - first, sum,
                                 job->out + first, 0, dim, later);
        }
    }
    if (rounded) {
        store_keys(pn, tensor, strides, s.first, s.live, sums.first, sums.step, dim, 1);
    }
}

/* Sets scores and dP that dot_rows() left out to 0. Their weights will be 0, but 0 times what the
 * scratch held could be NaN. */
static void clear_skipped(backward *job, span s)
{
    const panel *const pn = &job->panel;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        for (int64_t j = keys_attended(pn, s, r + FV_LANES); j < s.padded; j++) {
            fv_store(pn->x + j * pn->br + r, fv_set1(0));
            fv_store(job->dpt + j * pn->br + r, fv_set1(0));
        }
    }
}

/* dQ^T += K^T dS'^T. Where the band cuts the tile, one register tile of rows at a time, each with
 * the keys that it attends to. */
static void add_dq(backward *job, span s)
{
    const panel *const pn = &job->panel;
    const bool cut = keys_attended(pn, s, FV_LANES) < s.padded;
    const int64_t step = cut ? TILE_GROUP : pn->width;
    for (int64_t r = 0; r < pn->width; r += step) {
        const product_of kds = {.a = pn->k,
                                .b = job->dpt + r,
                                .b_stride = pn->br,
                                .depth = cut ? keys_of_group(pn, s, r) : s.padded};
        product_columns(pn->p->dim, false, NULL, kds, job->dqt + r, pn->br,
                        fattn_min64(step, pn->width - r));
    }
}

/* A tile of keys. next: the tile after it, whose keys are prefetched */
static void backward_tile(backward *job, span s, span next, const fattn_cpu_progress *before)
{
    panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const fattn_buffers *const buf = pn->run->buffers;
    const bool needs_ds = wants(p, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DBIAS);

    /* 1. S^T and dP^T. */
    load_keys(pn, s, 0, buf->k, p->dtype_kv, &p->k, p->dim, pn->k_copy, pn->d_pad, pn->k, NULL);
    const int64_t tiles = register_tiles_of_dots(pn, s);
    int64_t count = needs_ds ? list_keys_later(job, s, buf->v, p->dtype, &p->v, p->dim_v)
                             : list_sums_later(job, s, buf->dv, &p->dv, p->dim_v);
    count += list_rows_ahead(job, job->rows + count);
    pn->later = spread_rows(job->rows, count, tiles);
    dot_rows(pn, s, DOTS_FOR_SCORES, pn->k, p->dim, pn->qt, pn->x_rows);
    if (needs_ds) {
        load_keys(pn, s, 0, buf->v, p->dtype_v, &p->v, p->dim_v, pn->v_copy, pn->dv_pad, pn->v,
                  NULL);
        pn->later = prefetch_sums(job, s, buf->dv, &p->dv, p->dim_v, tiles);
        dot_rows(pn, s, DOTS_FOR_DP, pn->v, p->dim_v, job->dout_t, job->dpt_rows);
    } else {
        fill(job->dpt, s.padded * pn->br, 0);
    }
    clear_skipped(job, s);

    /* 2. Z P^T and dS'^T. */
    const unsigned terms = load_terms(pn, s);
    if (p->features & FATTN_DROPOUT) {
        load_dropout(pn, s);
    }
    settle_lone(job, s, terms, 0, pn->width, pn->x, pn->br);
    differentiate_tile(job, s, terms);

    /* 3. dQ^T += K^T dS'^T. */
    if (wants(p, FATTN_OUT_DQ)) {
        add_dq(job, s);
    }

    /* 4. What panels share: dBias, dV, dK. */
    wait_for_turn(job, s, before);
    if (wants(p, FATTN_OUT_DBIAS)) {
        add_dbias(job, s);
    }
    if (wants(p, FATTN_OUT_DV)) {
        add_keys(job, s, pn->x_rows, job->dout, job->dout_stride, buf->dv, &p->dv, p->dim_v,
                 job->shared.stored ? pn->v_copy : job->shared.dv, pn->dv_pad,
                 prefetch_sums(job, s, buf->dk, &p->dk, p->dim, register_tiles(s, p->dim_v)));
    }
    if (wants(p, FATTN_OUT_DK)) {
        add_keys(
            job, s, job->dpt_rows, pn->q, job->q_stride, buf->dk, &p->dk, p->dim,
            job->shared.stored ? pn->k_copy : job->shared.dk, pn->d_pad,
            prefetch_keys(job, next, buf->k, p->dtype, &p->k, p->dim, register_tiles(s, p->dim)));
    }
}

/* --- Items ------------------------------------------------------------------------------------ */

static sum_factors dq_factors(const backward *job)
{
    return (sum_factors){1, 1 / lift_of(job->panel.p)};
}
static float delta_of(const backward *job, int64_t r) { return job->delta[r]; }

static const backward_kind backward_floats = {
    .step = FV_NK,
    .layout = backward_layout,
    .load = load_rows,
    .tile = backward_tile,
    .dq_factors = dq_factors,
    .delta = delta_of,
};

static void backward_item(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    differentiate(run, item, scratch, &backward_floats);
}

static void backward_work(const fattn_cpu_run *run, void *scratch)
{
    each_item(run, scratch, backward_item);
}

/* With large blocks, keys, values and their gradients pass through the caches less often, and less
 * is copied. The rows of x are an odd number of cache lines apart. */
static const fattn_tile backward_tiles[] = {
    {TILE_ROWS(240), 96}, {176, 96}, {TILE_ROWS(144), 96}, {TILE_ROWS(96), 96}, {TILE_ROWS(48), 64},
    {TILE_ROWS(16), 32},  {0, 0}};
_Static_assert(176 % FV_LANES == 0, "blocks are whole vectors");

static double backward_cost(const fattn_kernel *row, const fattn_problem *p,
                            const fattn_limits *limits, fattn_tile tile)
{
    (void)row;
    const fattn_cpu_blocks blocks = {.extra_rows = keys_in_place(p) ? 14 : 27, .in_order = true};
    return fattn_cpu_cost(p, limits, tile, blocks);
}

static int64_t backward_fast_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)row;
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    return backward_scratch(p, &tiling) + keys_in_place_bytes(p, &tiling);
}

static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *tiling)
{
    (void)row;
    return fattn_cpu_workspace_of_one(backward_shared(p, tiling), backward_scratch(p, tiling));
}

#endif
