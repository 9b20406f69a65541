/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tile of backward with products of pairs. Z P^T and dS^T are their operands, as bf16. A tile is
 * processed in strips of a register tile's columns, whose scores and dP stay in the first-level
 * cache. scale is applied to the sums of dS and not to dS, which it might make subnormal.
 */
#ifndef FATTN_CPU_BACKWARD_PAIRS_H
#define FATTN_CPU_BACKWARD_PAIRS_H

#include "backends/cpu/backward_run.h"
#include "backends/cpu/cost.h"
#include "backends/cpu/pairs.h"

static void backward_pairs_layout(backward *job, const fattn_problem *p, const fattn_tiling *tiling,
                                  arena *from)
{
    const int64_t br = tiling->br, bc = tiling->bc;
    const int64_t k_size = bc * operand_row(p->dim), v_size = bc * operand_row(p->dim_v);
    panel *const pn = &job->panel;

    backward_layout_both(job, p, tiling, TILE_GROUP, from);
    pairs_layout(pn, from);
    /* Keys and values share memory with the sums, which begin when those are no longer needed.
     * Matrix registers need only a few zipped keys at a time, before P and dS, and share theirs. */
    const int64_t sums = bc * fattn_max64(pn->d_pad, pn->dv_pad);
    const int64_t zipped = (PAIRS_COPIED ? FV_LANES : bc / 2) * pn->d_pad;
    job->sums = carve(from, fattn_max64(k_size + v_size, sums), sizeof(float));
    pn->k_copy = job->sums;
    pn->v_copy = from->base ? job->sums + k_size : NULL;
    float *const rounded =
        carve(from, PAIRS_COPIED ? fattn_max64(bc * br, zipped) : bc * br, sizeof(float));
    job->p16 = (uint16_t *)(void *)rounded;
    job->ds16 = from->base ? job->p16 + bc * br : NULL;
    job->k_zipped = PAIRS_COPIED ? rounded : carve(from, zipped, sizeof(float));
    job->k_transposed =
        carve(from, PAIRS_COPIED ? pn->d_pad * transposed_stride(pn) : 0, sizeof(float));
    pn->qt = carve(from, pairs_stride(p->dim) * br, sizeof(float));
    job->dout_t = carve(from, pairs_stride(p->dim_v) * br, sizeof(float));
    job->v_rows = carve(from, bc, sizeof *job->v_rows);
    job->q_zipped = carve(from, br / 2 * pn->d_pad, sizeof(float));
    job->dout_zipped = carve(from, br / 2 * pn->dv_pad, sizeof(float));
    job->p16_rows = carve(from, bc, sizeof *job->p16_rows);
    job->ds16_rows = carve(from, bc, sizeof *job->ds16_rows);
    job->weights = carve(from, bc, sizeof *job->weights);
    job->ds_pairs = carve(from, bc / 2 * TILE_GROUP, sizeof(float));
    job->sum_rows = carve(from, bc, sizeof *job->sum_rows);
    job->rows = carve(from, PAIRS_COPIED ? 0 : AHEAD * br, sizeof *job->rows);
}

static int64_t backward_pairs_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    backward job;
    arena from = {0};
    backward_pairs_layout(&job, p, tiling, &from);
    return from.used;
}

/* --- Rows ------------------------------------------------------------------------------------- */

/* Extends a panel by dead rows to a whole step of rows. */
static void widen(panel *pn)
{
    const int64_t past = (pn->width + PAIRS_ROWS_STEP - 1) / PAIRS_ROWS_STEP * PAIRS_ROWS_STEP;
    panel_rows(pn, 0, pn->width, past, true);
    pn->width = past;
}

/* Loads row r of q, dO or o as pairs; zeros for a dead row. to: [stride] pairs. Returns the OR of
 * all numbers' bits. */
static unsigned load_row_pairs(const panel *pn, const void *tensor, fattn_dtype dtype,
                               const fattn_strides *strides, int64_t r, int64_t dim, float *to,
                               int64_t stride)
{
    const uint16_t *const x = (const uint16_t *)(const void *)to;
    unsigned bits = 0;
    if (pn->row[r].dead) {
        fill(to, stride, 0);
        return 0;
    }
    row_copy(to, element(tensor, dtype, query_index(pn, strides, r)), dim);
    for (int64_t c = 0; c < 2 * stride; c++) {
        bits |= x[c];
    }
    return bits;
}

/* Loads the rows of q or dO, zeros for dead ones, for both directions of sums: along channels,
 * t[c][r], and along rows, zipped[r / 2][c]. rows: scratch, [FV_LANES][pairs_stride(dim)]. Returns
 * the OR of all numbers' bits. */
static unsigned load_both_ways(const panel *pn, const void *tensor, const fattn_strides *strides,
                               int64_t dim, float *rows, float *t, float *zipped)
{
    const int64_t stride = pairs_stride(dim), row = vectors_of(dim) * FV_LANES;
    unsigned bits = 0;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        for (int64_t n = 0; n < FV_LANES; n++) {
            bits |= load_row_pairs(pn, tensor, pn->p->dtype, strides, r + n, dim, rows + n * stride,
                                   stride);
        }
        const uint16_t *const x = (const uint16_t *)(const void *)rows;
        transpose(rows, stride, FV_LANES, stride, t + r, pn->br);
        for (int64_t n = 0; n < FV_LANES; n += 2) {
            row_zip((bf16_pair *)(void *)(zipped + (r + n) / 2 * row), x + 2 * n * stride,
                    x + 2 * (n + 1) * stride, dim);
        }
    }
    return bits;
}

/* pairs *= 2^64, which is exact. pairs: [rows][stride], of which the first n of each row are
 * used */
static void raise_pairs(float *pairs, int64_t rows, int64_t stride, int64_t n)
{
    for (int64_t r = 0; r < rows; r++) {
        uint16_t *const x = (uint16_t *)(void *)(pairs + r * stride);
        for (int64_t c = 0; c < 2 * n; c++) {
            x[c] = fattn_bf16_from_f32(0x1p64f * fattn_bf16_to_f32(x[c]));
        }
    }
}

/*
 * Products of pairs treat subnormal numbers as 0, and a dO below 2^-63 may yield nothing else. If
 * all dO of a panel are that small, they are multiplied by 2^64 and their sums are scaled back. For
 * dS this requires that delta, which holds dlse here, is small as well; otherwise dlse decides the
 * size of dS. bits: OR of the bits of all dO
 */
static void lift(backward *job, unsigned bits)
{
    const panel *const pn = &job->panel;
    const int64_t dim_v = pn->p->dim_v;
    bool small = true;
    job->lowered = job->lowered_dv = 1;
    if (bits & EXPONENT_HIGH) {
        return;
    }
    raise_pairs(job->dout_zipped, pn->width / 2, pn->dv_pad, pn->dv_pad);
    job->lowered_dv = 0x1p-64f;
    for (int64_t r = 0; r < pn->width; r++) {
        small = small && job->delta[r] < 0x1p-63f && job->delta[r] > -0x1p-63f;
    }
    if (small) {
        raise_pairs(job->dout_t, pairs_stride(dim_v), pn->br, pn->width);
        for (int64_t r = 0; r < pn->width; r++) {
            job->delta[r] *= 0x1p64f;
        }
        job->lowered = 0x1p-64f;
    }
}

/* load_delta() for pairs. Dropout may leave only tiny weights in a row of o. delta then decides dS
 * of the other keys, so such an o is multiplied by 2^64. */
static void load_delta_pairs(backward *job, int64_t r)
{
    const panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const int64_t stride = pairs_stride(p->dim_v);
    float delta[FV_LANES], lowered[FV_LANES];
    for (int64_t n = 0; n < FV_LANES; n++) {
        float *const to = job->o + n * stride;
        const bool small = !(load_row_pairs(pn, pn->run->buffers->o, p->dtype_o, &p->o, r + n,
                                            p->dim_v, to, stride) &
                             EXPONENT_HIGH);
        lowered[n] = small ? 0x1p-64f : 1;
        if (small) {
            raise_pairs(to, 1, stride, stride);
        }
    }
    pairs_dots(job->o, stride, job->ot, pairs_of(p->dim_v), job->dout_t + r, pn->br, delta);
    fv_store(job->delta + r,
             fv_sub(fv_mul(fv_load(lowered), fv_load(delta)), fv_load(job->delta + r)));
}

static void load_rows_pairs(backward *job)
{
    panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;

    widen(pn);
    load_lse_and_dlse(job);
    (void)load_both_ways(pn, pn->run->buffers->q, &p->q, p->dim, job->dq, pn->qt, job->q_zipped);
    lift(job, load_both_ways(pn, pn->run->buffers->dout, &p->dout, p->dim_v, job->o, job->dout_t,
                             job->dout_zipped));
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        load_delta_pairs(job, r);
    }
    find_nonfinite(job);
    point_rows(pn->x_rows, pn->bc, pn->x, TILE_GROUP);
    point_rows(job->dpt_rows, pn->bc, job->dpt, TILE_GROUP);
    point_rows(job->sum_rows, pn->bc, job->sums, fattn_max64(pn->d_pad, pn->dv_pad));
    for (int64_t j = 0; j < pn->bc; j++) {
        job->p16_rows[j] = (const bf16_pair *)(void *)(job->p16 + j * pn->br);
        job->ds16_rows[j] = (const bf16_pair *)(void *)(job->ds16 + j * pn->br);
    }
}

/* --- A tile ----------------------------------------------------------------------------------- */

/* What a strip needs besides scores and dP. */
typedef struct strip_extras {
    bool drops;     /* dropout */
    bool keeps_ds;  /* dS is stored, for dBias */
    bool nonfinite; /* job->some_nonfinite */
} strip_extras;

/* The keys of a tile as the operand of dQ's product. */
static void load_zipped_keys(const backward *job, span s)
{
    const panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const void *const k = pn->run->buffers->k;
    if (PAIRS_COPIED) {
        pairs_transpose_keys(pn, s, k, FATTN_BF16, &p->k, p->dim, job->k_zipped, job->k_transposed);
    } else {
        pairs_zip_keys(pn, s, false, k, FATTN_BF16, &p->k, p->dim, job->k_zipped, pn->v_pairs);
    }
}

/* How many keys of the tile are multiplied with the strip of rows from r on: those that some row of
 * the strip attends to. All of them with matrix registers, whose steps are wide, and if dBias is
 * wanted, which is written for every pair. */
static int64_t keys_of_strip(const panel *pn, span s, int64_t r)
{
    const bool all = PAIRS_COPIED || wants(pn->p, FATTN_OUT_DBIAS);
    return all ? s.padded : keys_attended(pn, s, r + TILE_GROUP);
}

/* Turns scores and dP of a strip of columns, from `first` on, into Z P, and dS without scale, as
 * bf16. Both are LIFT times as large: a sink or a mask may leave a row only subnormal
 * probabilities, which products of pairs treat as 0. */
INLINE void differentiate_strip(backward *job, span s, int64_t first, int64_t columns,
                                unsigned terms, strip_extras also)
{
    const panel *const pn = &job->panel;
    const fv unit = fv_set1(pn->rule.unit), lowered = fv_set1(job->lowered / LIFT);
    const int64_t keys = keys_of_strip(pn, s, first);
    for (int64_t j = 0; j < keys; j += 2) {
        for (int64_t r = 0; r < columns; r += FV_LANES) {
            const fv lse = fv_load(job->lse + first + r), rest = fv_load(job->rest + first + r);
            const fv delta = fv_load(job->delta + first + r);
            const int64_t to = j * pn->br + first + r;
            fv weight[2], ds[2];
            for (int64_t n = 0; n < 2; n++) {
                const int64_t from = (j + n) * TILE_GROUP + r, at = to + n * pn->br;
                const fattn_score_pair pair = pair_at(pn, terms, j + n, first + r);
                fv dscore;
                const fv x = fattn_score(&pn->rule, terms, fv_load(pn->x + from), pair, &dscore);
                const fv z = also.drops ? fv_load(pn->z + at) : fv_set1(1);
                const fv power = fattn_softmax_exponent(fv_sub(x, lse), unit, rest);
                weight[n] = fv_exp2_from(power, LEAST_POWER, LIFT);
                ds[n] = fv_mul(weight[n], fv_sub(fv_mul(z, fv_load(job->dpt + from)), delta));
                if (also.nonfinite) {
                    clear_hidden(terms, pair, &weight[n], &ds[n]);
                }
                weight[n] = fv_mul(z, weight[n]);
                if (also.keeps_ds) {
                    fv_store(job->ds + at, fv_mul(lowered, ds[n]));
                }
                ds[n] = fv_mul(ds[n], dscore);
            }
            pv_store_rows(job->p16 + to, job->p16 + to + pn->br, pv_round(weight[0], weight[1]));
            const pv rounded = pv_round(ds[0], ds[1]);
            pv_store_rows(job->ds16 + to, job->ds16 + to + pn->br, rounded);
            pv_store(job->ds_pairs + j / 2 * TILE_GROUP + r, pv_twist(rounded));
        }
    }
}

/* A range of a panel's rows, in whole strips. */
typedef struct row_range {
    int64_t first, past;
} row_range;

/* Rows are left out in steps of this size. */
#define TRIM_ROWS (PAIRS_COPIED ? 2 * TILE_GROUP : TILE_GROUP)
_Static_assert(TRIM_ROWS % PAIRS_ROWS_STEP == 0, "products of whole strips");

static bool attends_to_nothing(const panel *pn, span s, int64_t r)
{
    const int64_t past = fattn_min64(r + TRIM_ROWS, pn->rows);
    const int64_t i0 = (pn->first + r) / pn->group, i1 = (pn->first + past - 1) / pn->group + 1;
    return past <= r ||
           fattn_band_tile(&pn->band, i0, i1, s.first, s.first + s.padded) == FATTN_TILE_EMPTY;
}

/* The panel's rows that attend to some key of the tile, at least one strip. Rows at either end are
 * left out if their band ends before the tile or begins after it; not if dBias is wanted, which is
 * written for every row. */
static row_range rows_attending(const panel *pn, span s)
{
    row_range rows = {0, pn->width};
    if (wants(pn->p, FATTN_OUT_DBIAS)) {
        return rows;
    }
    while (rows.first + TRIM_ROWS < rows.past && attends_to_nothing(pn, s, rows.first)) {
        rows.first += TRIM_ROWS;
    }
    for (int64_t r = (rows.past - 1) / TRIM_ROWS * TRIM_ROWS;
         r > rows.first && attends_to_nothing(pn, s, r); r -= TRIM_ROWS) {
        rows.past = r;
    }
    return rows;
}

/* The factors of sums of dS: two where the product of scale and the factors of lift() and LIFT
 * would be subnormal. */
static sum_factors ds_factors(const backward *job)
{
    const float scale = job->panel.rule.scale, lowered = job->lowered / LIFT,
                both = scale * lowered;
    return fabsf(both) < 0x1p-126f ? (sum_factors){lowered, scale} : (sum_factors){1, both};
}

/* tensor[j] += factors sum_r weights[j][r] rows[r] for the keys of the tile and the rows
 * `attending`, once the panel before has added its own; or = if keys are stored. weights: [bc] rows
 * of [br]; rows: zipped */
static void add_keys_pairs(backward *job, span s, row_range attending,
                           const bf16_pair *const *weights, const float *rows, sum_factors factors,
                           void *tensor, const fattn_strides *strides, int64_t dim, float *apart,
                           int64_t stride, const fattn_cpu_progress *before)
{
    const panel *const pn = &job->panel;
    /* Products in vectors leave out the pairs that have no row. */
    const int64_t past = PAIRS_COPIED ? attending.past : fattn_min64(attending.past, pn->rows + 1);
    const int64_t step = fattn_max64(pn->d_pad, pn->dv_pad);
    int64_t j = 0;
    for (int64_t r = attending.first; r < past && j < s.padded; r += TILE_GROUP) {
        /* Only rows from r on attend to these keys. */
        const int64_t first = j, keys = keys_of_strip(pn, s, r);
        for (; j < keys; j++) {
            job->weights[j] = weights[j] + r / 2;
        }
        pairs_rows(j - first, job->weights + first, pn->br / 2, (past - r) / 2,
                   rows + r / 2 * stride, stride, job->sum_rows + first, step, stride, NO_PREFETCH);
    }
    for (; j < s.live; j++) {
        fill(job->sum_rows[j], stride, 0);
    }
    wait_for_turn(job, s, before);
    if (factors.first != 1) {
        scale_rows(job->sums, s.live, step, stride, fv_set1(factors.first));
    }
    if (job->shared.stored) {
        store_keys(pn, tensor, strides, s.first, s.live, job->sums, step, dim, factors.last);
        return;
    }
    const sum_rows to = sum_rows_from(pn, false, tensor, strides, apart, stride, s.first);
    for (j = 0; j < s.live; j++) {
        add_row(to.first + j * to.step, job->sum_rows[j], dim, factors.last);
    }
}

static void backward_tile_pairs(backward *job, span s, span next, const fattn_cpu_progress *before)
{
    (void)next;
    panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const fattn_buffers *const buf = pn->run->buffers;
    const bool needs_ds = wants(p, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DBIAS);
    const bool drops = p->features & FATTN_DROPOUT, keeps_ds = wants(p, FATTN_OUT_DBIAS);

    pairs_load_keys(pn, s, 0, buf->k, FATTN_BF16, &p->k, p->dim, pn->k_copy, pn->k_pairs);
    if (needs_ds) {
        pairs_load_keys(pn, s, 0, buf->v, FATTN_BF16, &p->v, p->dim_v, pn->v_copy, job->v_rows);
        load_zipped_keys(job, s);
    }
    const unsigned terms = load_terms(pn, s);
    if (drops) {
        load_dropout(pn, s);
    }

    /* 1. Strips: S^T and dP^T, Z P^T and dS^T, dQ^T += K^T dS^T. */
    const row_range rows = rows_attending(pn, s);
    const strip_extras extras = {
        .drops = drops, .keeps_ds = keeps_ds, .nonfinite = job->some_nonfinite};
    const int64_t strips = (rows.past - rows.first + TILE_GROUP - 1) / TILE_GROUP;
    const int64_t tiles = s.padded / FV_NK,
                  ahead = PAIRS_COPIED ? 0 : list_rows_ahead(job, job->rows);
    prefetch_list later = spread_rows(job->rows, ahead, strips * tiles);
    for (int64_t r = rows.first; r < rows.past; r += TILE_GROUP) {
        const int64_t columns = fattn_min64(TILE_GROUP, rows.past - r);
        const int64_t keys = keys_of_strip(pn, s, r);
        pairs_rows(keys, pn->k_pairs, operand_row(p->dim), pairs_of(p->dim), pn->qt + r, pn->br,
                   pn->x_rows, TILE_GROUP, columns, later);
        later.next += tiles * later.step;
        if (needs_ds) {
            pairs_rows(keys, job->v_rows, operand_row(p->dim_v), pairs_of(p->dim_v),
                       job->dout_t + r, pn->br, job->dpt_rows, TILE_GROUP, columns, NO_PREFETCH);
        } else {
            fill(job->dpt, s.padded * TILE_GROUP, 0);
        }
        settle_lone(job, s, terms, r, columns, pn->x, TILE_GROUP);
        if (terms || drops || keeps_ds) {
            differentiate_strip(job, s, r, columns, terms, extras);
        } else {
            differentiate_strip(job, s, r, columns, 0, (strip_extras){0});
        }
        if (wants(p, FATTN_OUT_DQ)) {
            pairs_columns(pn, p->dim, false, pn->v_pairs, job->k_transposed, keys / 2,
                          job->ds_pairs, TILE_GROUP, job->dqt + r, columns);
        }
    }

    /* 2. What panels share: dBias, dV, dK. */
    if (keeps_ds) {
        wait_for_turn(job, s, before);
        add_dbias(job, s);
    }
    if (wants(p, FATTN_OUT_DV)) {
        add_keys_pairs(job, s, rows, job->p16_rows, job->dout_zipped,
                       (sum_factors){1, job->lowered_dv / LIFT}, buf->dv, &p->dv, p->dim_v,
                       job->shared.dv, pn->dv_pad, before);
    }
    if (wants(p, FATTN_OUT_DK)) {
        add_keys_pairs(job, s, rows, job->ds16_rows, job->q_zipped, ds_factors(job), buf->dk,
                       &p->dk, p->dim, job->shared.dk, pn->d_pad, before);
    }
}

/* --- Items ------------------------------------------------------------------------------------ */

/* delta of row r, computed from its bf16 numbers one by one. Products of pairs treat subnormal
 * numbers as 0, and o may have nothing else if a sink has nearly all the weight. */
static float plain_delta(const backward *job, int64_t r)
{
    const panel *const pn = &job->panel;
    const fattn_problem *const p = pn->p;
    const query_row *const row = &pn->row[r];
    const uint16_t *const o = element(pn->run->buffers->o, p->dtype_o, query_index(pn, &p->o, r));
    const uint16_t *const dout =
        element(pn->run->buffers->dout, p->dtype_o, query_index(pn, &p->dout, r));
    const float *const dlse = pn->run->buffers->dlse;
    const int64_t at = fattn_lse_index(p, &pn->seq, pn->b, row->h) + row->i;
    float delta = 0;
    for (int64_t c = 0; c < p->dim_v; c++) {
        delta += fattn_bf16_to_f32(dout[c]) * fattn_bf16_to_f32(o[c]);
    }
    return p->features & FATTN_DLSE ? delta - dlse[at] : delta;
}

static const backward_kind backward_pairs = {
    .step = PAIRS_STEP,
    .layout = backward_pairs_layout,
    .load = load_rows_pairs,
    .tile = backward_tile_pairs,
    .dq_factors = ds_factors,
    .delta = plain_delta,
};

static void backward_pairs_item(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    differentiate(run, item, scratch, &backward_pairs);
}

static void backward_pairs_work(const fattn_cpu_run *run, void *scratch)
{
    pairs_open();
    each_item(run, scratch, backward_pairs_item);
    pairs_close();
}

static const fattn_tile backward_pairs_tiles[] = {PAIRS_BACKWARD_TILES, {0, 0}};

static double backward_pairs_cost(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_limits *limits, fattn_tile tile)
{
    (void)row;
    const fattn_cpu_blocks blocks = {.extra_rows = PAIRS_BACKWARD_BLOCK_ROWS, .in_order = true};
    return fattn_cpu_cost(p, limits, tile, blocks);
}

static int64_t backward_pairs_fast_bytes(const fattn_kernel *row, const fattn_problem *p,
                                         fattn_tile tile)
{
    (void)row;
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    return backward_pairs_scratch(p, &tiling);
}

static int64_t backward_pairs_workspace(const fattn_kernel *row, const fattn_problem *p,
                                        const fattn_tiling *tiling)
{
    (void)row;
    return fattn_cpu_workspace_of_one(backward_shared(p, tiling),
                                      backward_pairs_scratch(p, tiling));
}

#endif
