/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding few keys: decode.h's products for rows that all see the same keys, all of them in one
 * part, where a score is its dot product alone. Such a call takes a microsecond or two, and what
 * decode.h sets up for long contexts and for features took longer than that. Here the scores of
 * all keys are computed first, [keys][rows] as they lie in a dense tile (panel.h), and become
 * probabilities once.
 *
 * A call that comes after much other work finds nothing in cache. So the first keys of the head,
 * and those of the next one, are fetched before anything is computed, and values during the scores.
 */
#ifndef FATTN_CPU_BRIEF_H
#define FATTN_CPU_BRIEF_H

#include "backends/cpu/decode.h"

#define BRIEF_KEYS 256 /* most keys */
#define BRIEF_EARLY 32 /* most keys of a head that are fetched first */
#define BRIEF_FEATURES                                                                         \
    (FATTN_SCALE | FATTN_CAUSAL | FATTN_WINDOW | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K |     \
     FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS | FATTN_DETERMINISTIC | \
     FATTN_CHECKED)

/* A worker's scratch. A vector of scores has FV_LANES / pitch keys. */
typedef struct brief {
    float *q;            /* as order_queries() has it */
    float *x;            /* [keys][pitch] scores, then weights */
    float *o;            /* [pitch][dv_pad] */
    const char **k, **v; /* [keys] rows */
    float *zeros;        /* a row */
} brief;

static void brief_layout(brief *s, const fattn_problem *p, arena *from)
{
    const int64_t d_pad = vectors_of(p->dim) * FV_LANES, dv_pad = vectors_of(p->dim_v) * FV_LANES;
    s->k = carve(from, BRIEF_KEYS, sizeof *s->k);
    s->v = carve(from, BRIEF_KEYS, sizeof *s->v);
    s->q = carve(from, FV_LANES * d_pad, sizeof(float));
    s->o = carve(from, FV_LANES * dv_pad, sizeof(float));
    s->zeros = carve(from, fattn_max64(d_pad, dv_pad), sizeof(float));
    s->x = carve(from, BRIEF_KEYS * FV_LANES, sizeof(float));
}

static int64_t brief_scratch(const fattn_problem *p)
{
    brief s;
    arena from = {0};
    brief_layout(&s, p, &from);
    return from.used;
}

/* Whether all rows of pn see the same keys, at most BRIEF_KEYS of them, and no feature is on that
 * needs more; and in *keys which. */
static bool is_brief(const panel *pn, const fattn_problem *p, fattn_range *keys)
{
    const int64_t last = pn->i1 - 1;
    *keys = fattn_band_rows(&pn->band, pn->i0, pn->i1);
    return !(p->features & ~BRIEF_FEATURES) && p->outputs & FATTN_OUT_O && !pn->rule.terms &&
           pn->pitch <= FV_LANES && keys->first < keys->past &&
           keys->past - keys->first <= BRIEF_KEYS &&
           fattn_band_row(&pn->band, last).first == keys->first &&
           fattn_band_row(&pn->band, pn->i0).past == keys->past;
}

/* to[0 .. n) = x, up to whole vectors. */
INLINE void fill_vectors(float *to, int64_t n, fv x)
{
    for (int64_t c = 0; c < n; c += FV_LANES) {
        fv_store(to + c, x);
    }
}

/* Fetches the rows that are `further` bytes behind those listed. */
APART void brief_fetch(const char *const *rows, int64_t count, int64_t further, int64_t bytes)
{
    for (int64_t j = 0; j < count; j++) {
        const char *const from = rows[j] + further;
        for (int64_t at = 0; at < bytes; at += CACHE_LINE) {
            __builtin_prefetch(from + at);
        }
    }
}

/* Elements from a row to the next one, *g being its head in the group. */
static int64_t next_row(const panel *pn, const fattn_strides *s, int64_t *g)
{
    const bool last = ++*g == pn->group;
    *g = last ? 0 : *g;
    return last ? s->seq - (pn->group - 1) * s->head : s->head;
}

/* The queries, in the order of order_queries(); zeros for rows past the last. */
INLINE void brief_queries_as(fattn_dtype dtype, const panel *pn, float *to)
{
    const fattn_problem *const p = pn->p;
    const int64_t by_two = channels_by_two(p->dim), rows = pn->pitch;
    const char *from = element(pn->buf->q, dtype, row_index(pn, &p->q, 0, pn->hk * pn->group));
    for (int64_t r = 0, g = 0; r < rows; r++) {
        float *at = to + r * 2 * FV_LANES;
        int64_t c = 0;
        for (; c < by_two; c += 2 * FV_LANES, at += rows * 2 * FV_LANES) {
            fv two[2] = {fv_set1(0), fv_set1(0)};
            if (r < pn->rows) {
                load_two(dtype, from, c, two);
            }
            fv_store(at, two[0]);
            fv_store(at + FV_LANES, two[1]);
        }
        at -= r * FV_LANES;
        for (; c < p->dim; c += FV_LANES, at += rows * FV_LANES) {
            const int part = (int)fattn_min64(p->dim - c, FV_LANES);
            fv_store(at,
                     r < pn->rows ? load_as(dtype, from + c * SIZE_OF(dtype), part) : fv_set1(0));
        }
        from += next_row(pn, &p->q, &g) * SIZE_OF(dtype);
    }
}

/* The same of another type than the keys, whose order it is. */
APART void brief_queries_mixed(const panel *pn, float *to)
{
    const fattn_problem *const p = pn->p;
    const int64_t by_two = channels_by_two(p->dim), rows = pn->pitch;
    const int64_t size = fattn_dtype_size(p->dtype);
    const bool apart = p->dtype_kv == FATTN_BF16;
    const char *from = element(pn->buf->q, p->dtype, row_index(pn, &p->q, 0, pn->hk * pn->group));
    for (int64_t r = 0, g = 0; r < rows; r++) {
        float *at = to + r * 2 * FV_LANES;
        int64_t c = 0;
        for (; c < by_two; c += 2 * FV_LANES, at += rows * 2 * FV_LANES) {
            float two[2 * FV_LANES] = {0};
            if (r < pn->rows) {
                row_load(two, p->dtype, from + c * size, 2 * FV_LANES);
            }
            for (int64_t lane = 0; lane < FV_LANES; lane++) {
                at[lane] = apart ? two[2 * lane] : two[lane];
                at[lane + FV_LANES] = apart ? two[2 * lane + 1] : two[lane + FV_LANES];
            }
        }
        at -= r * FV_LANES;
        for (; c < p->dim; c += FV_LANES, at += rows * FV_LANES) {
            float one[FV_LANES] = {0};
            if (r < pn->rows) {
                row_load(one, p->dtype, from + c * size, fattn_min64(p->dim - c, FV_LANES));
            }
            memcpy(at, one, sizeof one);
        }
        from += next_row(pn, &p->q, &g) * size;
    }
}

static void brief_queries(const panel *pn, float *to)
{
    if (pn->p->dtype_kv != pn->p->dtype) {
        brief_queries_mixed(pn, to);
        return;
    }
    switch (pn->p->dtype) {
    case FATTN_F16: brief_queries_as(FATTN_F16, pn, to); break;
    case FATTN_BF16: brief_queries_as(FATTN_BF16, pn, to); break;
    default: brief_queries_as(FATTN_F32, pn, to); break;
    }
}

/* In each lane, the sum or the largest of those lanes that hold the same row: pitch apart. Sums of
 * the lanes of a row may differ by what they round. */
INLINE fv fold_lanes(fv x, int64_t pitch, bool sum)
{
    float twice[2 * FV_LANES];
    fv_store(twice, x);
    fv_store(twice + FV_LANES, x);
    for (int64_t lane = pitch; lane < FV_LANES; lane += pitch) {
        const fv other = fv_load(twice + lane);
        x = sum ? fv_add(x, other) : fv_max(x, other);
    }
    return x;
}

/* Scores become weights relative to the largest of each row, times *lowered those of the formula.
 * Returns {m, l} in each lane of a row. */
static fattn_softmax brief_soften(float *x, int64_t vectors, int64_t pitch, float unit,
                                  float *lowered)
{
    const score_range scores = range_of(x, FV_LANES, vectors, true);
    fattn_softmax state = {.m = fold_lanes(scores.most, pitch, false)};
    weigher w = {.unit = fv_set1(unit), .base = fattn_softmax_base(state)};
    const fv power = fattn_softmax_exponent(scores.least, w.unit, w.base);
    *lowered = 1;
    if (mv_all(fv_le(fv_set1(LEAST_NORMAL), power))) {
        state.l = weigh_rows(x, FV_LANES, vectors, WEIGHTS_SELECTED, false, &w);
    } else {
        *lowered = 1 / LIFT;
        state.l =
            fv_mul(fv_set1(1 / LIFT), weigh_rows(x, FV_LANES, vectors, WEIGHTS_LIFTED, false, &w));
    }
    state.l = fold_lanes(state.l, pitch, true);
    return state;
}

/* Writes o and lse of all rows. */
static void brief_store(const panel *pn, float *o, fattn_softmax state)
{
    const fattn_problem *const p = pn->p;
    float factor[FV_LANES], l[FV_LANES], lse[FV_LANES] = {0};
    fv_store(factor, fattn_softmax_normaliser(state));
    fv_store(l, state.l);
    if (p->outputs & FATTN_OUT_LSE) {
        fv_store(lse, fattn_softmax_lse(state, fv_set1(pn->rule.natural)));
    }
    const int64_t size = fattn_dtype_size(p->dtype_o), head = pn->hk * pn->group;
    char *to = (char *)pn->buf->o + row_index(pn, &p->o, 0, head) * size;
    for (int64_t r = 0, g = 0, i = 0; r < pn->rows; r++) {
        float *const row = o + r * pn->dv_pad;
        order_channels(pn, row);
        if (l[r] == 0) { /* selected: o may hold 0 * inf */
            fill_vectors(row, pn->dv_pad, fv_set1(0));
        }
        row_store(to, p->dtype_o, row, p->dim_v, factor[r]);
        if (p->outputs & FATTN_OUT_LSE) {
            const int64_t at = fattn_lse_index(p, &pn->seq, pn->b, head + g) + i;
            ((float *)pn->buf->lse)[at] = lse[r];
        }
        to += next_row(pn, &p->o, &g) * size;
        i += g == 0;
    }
}

/* A head: all its rows and keys. */
static void brief_head(panel *pn, const brief *s, fattn_range keys)
{
    const fattn_problem *const p = pn->p;
    const int64_t count = keys.past - keys.first, step = FV_ND / pn->pitch;
    const int64_t padded = (count + step - 1) / step * step;
    const int64_t group = FV_LANES * PARTIAL_SUMS, scores = count * pn->pitch;
    const int64_t vectors = (scores + group - 1) / group * PARTIAL_SUMS;
    float alpha[FV_LANES], lowered;

    brief_queries(pn, s->q);
    const decode_rows k = {.at = s->k, .ahead = s->v, .count = padded, .dim = p->dim};
    const decode_dots d = {.q = s->q, .q_stride = pn->d_pad, .k = k, .x = s->x, .pitch = pn->pitch};
    decode_scores(p->dtype_kv, d);
    fill(s->x + scores, vectors * FV_LANES - scores, -INFINITY);
    const fattn_softmax state = brief_soften(s->x, vectors, pn->pitch, pn->rule.unit, &lowered);
    fv_store(alpha, fv_set1(0));
    fill_vectors(s->o, pn->pitch * pn->dv_pad, fv_set1(0));
    const decode_sums sums = {.alpha = alpha,
                              .lowered = lowered,
                              .p = s->x,
                              .pitch = pn->pitch,
                              .v = {.at = s->v, .ahead = s->v, .count = count, .dim = p->dim_v},
                              .o = s->o,
                              .o_stride = pn->dv_pad};
    decode_mix(p->dtype_v, sums);
    brief_store(pn, s->o, state);
}

/* Does an item, or returns false where it takes decode_part(). */
static bool brief_item(const fattn_cpu_run *run, decode_item it, void *scratch)
{
    const fattn_problem *const p = run->problem;
    fattn_range keys;
    panel pn;
    pn.br = run->tiling->br;
    if (!panel_place(&pn, run, it.b, it.hk, 0, true)) {
        return true;
    }
    pn.rule = rule_of(p);
    if (!is_brief(&pn, p, &keys)) {
        return false;
    }
    const fattn_parts parts = parts_of(run->tiling, &pn, &pn);
    if (!fattn_parts_are_one(&parts)) {
        return false;
    }
    if (it.split > 0) {
        return true;
    }
    arena from = {.base = scratch};
    brief s;
    brief_layout(&s, p, &from);
    pn.p = p;
    pn.d_pad = vectors_of(p->dim) * FV_LANES;
    pn.dv_pad = vectors_of(p->dim_v) * FV_LANES;
    const int64_t count = keys.past - keys.first, size = fattn_dtype_size(p->dtype_kv);
    const int64_t padded = (count + FV_ND - 1) / FV_ND * FV_ND, bytes = p->dim * size;
    const int64_t early = fattn_min64(count, BRIEF_EARLY);
    fill_vectors(s.zeros, fattn_max64(pn.d_pad, pn.dv_pad), fv_set1(0));
    for (int64_t j = count; j < padded; j++) {
        s.k[j] = s.v[j] = (const char *)s.zeros;
    }
    for (int64_t n = 0; n < it.heads; n++, pn.hk++) {
        find_rows(&pn, keys.first, count, run->buffers->k, p->dtype_kv, &p->k, s.k);
        find_rows(&pn, keys.first, count, run->buffers->v, p->dtype_v, &p->v, s.v);
        if (n == 0) {
            brief_fetch(s.k, early, 0, bytes);
        }
        if (n + 1 < it.heads) {
            brief_fetch(s.k, early, p->k.head * size, bytes);
        }
        brief_head(&pn, &s, keys);
    }
    return true;
}

static void decode_work(const fattn_cpu_run *run, void *scratch)
{
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        const decode_item it = item_of(run, item);
        if (!brief_item(run, it, scratch)) {
            decode_part(run, it, scratch);
        }
    }
}

static int64_t brief_or_decode_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    return fattn_max64(decode_scratch(p, tiling), brief_scratch(p));
}

static int64_t decode_workspace(const fattn_kernel *row, const fattn_problem *p,
                                const fattn_tiling *tiling)
{
    (void)row;
    return fattn_cpu_workspace(forward_shared(p, tiling), brief_or_decode_scratch(p, tiling));
}

#endif
