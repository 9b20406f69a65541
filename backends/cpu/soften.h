/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scores of a tile become probabilities: masks and terms, the maximum that they are relative to,
 * exponentials, their sum, dropout. What forward and decoding do between their two products.
 *
 * The general way finds the range of each row's scores first, and takes care of powers that are too
 * small to be multiplied fast. Most tiles need neither, because their scores are near the base that
 * the rows have already (window.h): they are tried without, and done again where that was wrong.
 */
#ifndef FATTN_CPU_SOFTEN_H
#define FATTN_CPU_SOFTEN_H

#include "backends/cpu/strip.h"
#include "backends/cpu/terms.h"
#include "backends/cpu/window.h"

/* P of keys j and j + 1, j even, of a vector of rows: floats in their place, or pairs in row j / 2,
 * which no later key has use for. Pairs are added to *taken, as products take them. */
INLINE void keep_weights(float *x, int64_t stride, int64_t j, fv first, fv second, bool pairs,
                         fv *taken)
{
#if FV_PAIRS
    if (pairs) {
        const pv rounded = pv_twist(pv_round(first, second));
        pv_store(x + j / 2 * stride, rounded);
        *taken = fv_muladd_pairs(rounded, pv_ones(), *taken);
        return;
    }
#endif
    (void)pairs, (void)taken;
    fv_store(x + j * stride, first);
    fv_store(x + (j + 1) * stride, second);
}

/* Dot products of steps first .. past - 1 become scores. terms: a literal where speed matters */
INLINE void score_steps_of(panel *pn, unsigned terms, int64_t first, int64_t past)
{
    const fattn_score_rule rule = pn->rule; /* which no score is stored into */
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        for (int64_t j = first; j < past; j++) {
            float *const x = pn->x + j * pn->br + r;
            fv dscore;
            fv_store(x, fattn_score(&rule, terms, fv_load(x), pair_at(pn, terms, j, r), &dscore));
        }
    }
}

/* Where a bias of a tile is 0, scores are only scaled: a loop that asks for each vector which terms
 * there are took a tenth of the tile's time. */
static void score_steps(panel *pn, unsigned terms, int64_t first, int64_t past)
{
    if (terms == FATTN_SCORE_SCALE) {
        score_steps_of(pn, FATTN_SCORE_SCALE, first, past);
    } else {
        score_steps_of(pn, terms, first, past);
    }
}

/* Whether all rows keep the same keys of the tile, and nothing is masked but those past the
 * end. */
static bool ends_alike(const panel *pn, span s)
{
    return s.common.first == 0 && s.common.past == s.live && !pn->masked;
}

/* Dot products in x become scores. Where masking is all there is to do, keys in the band of every
 * row are skipped: their dot products are their scores. */
static void score_tile(panel *pn, span s)
{
    const bool alike = ends_alike(pn, s);
    if (alike) {
        s.kind = FATTN_TILE_FULL; /* what is past the end is masked below */
    }
    const unsigned terms = load_terms(pn, s);
    const int64_t steps = s.padded / pn->phases;
    if (terms == FATTN_SCORE_KEEP && !pn->masked && pn->phases == 1 &&
        s.common.first < s.common.past) {
        score_steps(pn, terms, 0, s.common.first);
        score_steps(pn, terms, s.common.past, steps);
    } else if (terms) {
        score_steps(pn, terms, 0, steps);
    }
    if (alike) {
        fill(pn->x + s.live * pn->pitch, (s.padded - s.live) * pn->pitch, -INFINITY);
    }
}

/* Keys whose probabilities are summed apart, and keys after which the sums join: rounding errors of
 * l reach lse in full, and grow with the length of a sum. */
#define PARTIAL_SUMS 4
#define SUMMED_KEYS 64
_Static_assert(FV_NK % PARTIAL_SUMS == 0, "tiles hold whole steps");

/* The largest and the smallest of each row's scores. */
typedef struct score_range {
    fv most, least;
} score_range;

/* masked, a literal: scores of -inf, which are masked ones, do not count as small. */
INLINE score_range range_of(const float *x, int64_t stride, int64_t steps, bool masked)
{
    const fv none = fv_set1(-INFINITY), all = fv_set1(INFINITY);
    score_range part[PARTIAL_SUMS];
    for (int n = 0; n < PARTIAL_SUMS; n++) {
        part[n] = (score_range){.most = none, .least = all};
    }
    for (int64_t j = 0; j < steps; j += PARTIAL_SUMS) {
        for (int n = 0; n < PARTIAL_SUMS; n++) {
            const fv score = fv_load(x + (j + n) * stride);
            const fv low = masked ? fv_select(fv_eq(score, none), all, score) : score;
            part[n].most = fv_max(part[n].most, score);
            part[n].least = fv_min(part[n].least, low);
        }
    }
    for (int n = 1; n < PARTIAL_SUMS; n++) {
        part->most = fv_max(part->most, part[n].most);
        part->least = fv_min(part->least, part[n].least);
    }
    return *part;
}

/*
 * Probabilities below 2^-126, the normal range, are slow: each product with one takes hundreds of
 * cycles, and so does a power that becomes 0. Steep slopes of ALiBi, biases that stand for masks,
 * and large scores have whole tiles of them. Where a tile has some, those that round to 0 are
 * selected to 0, and all are taken LIFT times as large, which is exact, as is lowering their sums.
 * As operands of products of pairs, those below the normal range are 0 anyway; and where all that
 * are below are masked, selecting is enough.
 */
#define LIFT 0x1p32f
#define LEAST_POWER (-150.0f)
#define LEAST_NORMAL (-126.0f)

/* How the weights of a tile are computed. */
typedef enum weighing {
    WEIGHTS_NEAR,     /* in a window around the base of their row (window.h) */
    WEIGHTS_NORMAL,   /* as powers, all of them in the normal range */
    WEIGHTS_SELECTED, /* the same, and 0 for scores below */
    WEIGHTS_LIFTED,   /* LIFT times as large, and 0 for scores that round to 0 */
} weighing;

/* How they are stored. */
typedef enum weight_form {
    STORED_FLOATS,
    STORED_FLOATS_FOR_PAIRS, /* dropout rounds them to pairs */
    STORED_PAIRS,
} weight_form;

/* Scores become weights relative to a base, or in a window. */
typedef struct weigher {
    fv unit, base;
    window window;
} weigher;

/* The sums of weights: as they are, and as products take them. */
typedef struct weight_sums {
    fv l, taken;
} weight_sums;

/* Scores of a vector of rows become probabilities, of which the sums are returned. how, pairs:
 * literals. Powers of WEIGHTS_NORMAL are so but in rows that have a NaN, where they do not
 * matter. */
INLINE weight_sums weigh_rows(float *x, int64_t stride, int64_t steps, weighing how, bool pairs,
                              weigher *w)
{
    const fv zero = fv_set1(0);
    const bool lifted = how == WEIGHTS_LIFTED;
    const float from = lifted ? LEAST_POWER : LEAST_NORMAL, factor = lifted ? LIFT : 1;
    fv sum[PARTIAL_SUMS] = {zero, zero, zero, zero}, taken[PARTIAL_SUMS / 2] = {zero, zero};
    fv total = zero;
    for (int64_t j = 0; j < steps; j += PARTIAL_SUMS) {
        fv weight[PARTIAL_SUMS];
        uv place[PARTIAL_SUMS];
        if (j % SUMMED_KEYS == 0) {
            total = fv_add(total, fv_add(fv_add(sum[0], sum[1]), fv_add(sum[2], sum[3])));
            sum[0] = sum[1] = sum[2] = sum[3] = zero;
        }
        for (int n = 0; n < PARTIAL_SUMS; n++) {
            const fv score = fv_load(x + (j + n) * stride);
            if (how == WEIGHTS_NEAR) {
                weight[n] = window_weight(&w->window, score, &place[n]);
            } else {
                const fv power = fattn_softmax_exponent(score, w->unit, w->base);
                weight[n] = how == WEIGHTS_NORMAL ? fv_exp2_normal(power)
                                                  : fv_exp2_from(power, from, factor);
            }
            sum[n] = fv_add(sum[n], weight[n]);
        }
        for (int n = 0; n < PARTIAL_SUMS; n += 2) {
            if (how == WEIGHTS_NEAR) {
                window_add(&w->window, place[n], place[n + 1]);
            }
            keep_weights(x, stride, j + n, weight[n], weight[n + 1], pairs, &taken[n / 2]);
        }
    }
    const fv l = fv_add(total, fv_add(fv_add(sum[0], sum[1]), fv_add(sum[2], sum[3])));
    return (weight_sums){l, pairs ? fv_add(taken[0], taken[1]) : l};
}

/* Scores of the rows at r become probabilities relative to the new maximum. most: of the scores;
 * how, pairs: literals. Returns alpha. */
INLINE fv soften_rows(forward *f, int64_t r, fv most, int64_t steps, weighing how, bool pairs)
{
    const fv unit = fv_set1(f->panel.rule.unit);
    fattn_softmax state = state_load(f, r);
    const fv alpha = fattn_softmax_raise(&state, most, unit);
    weigher w = {.unit = unit, .base = fattn_softmax_base(state)};
    weight_sums sums = weigh_rows(f->panel.x + r, f->panel.br, steps, how, pairs, &w);
    if (how == WEIGHTS_LIFTED) {
        sums.l = sums.taken = fv_mul(fv_set1(f->lowered), sums.l);
    }
    add_taken(f, r, alpha, sums.taken);
    add_lost(f, r, alpha, fattn_softmax_add(&state, sums.l));
    state_store(f, r, state);
    fv_store(f->alpha + r, alpha);
    return alpha;
}

/* values[r] = the largest of the lanes that hold row r, in all of them. */
static void fold_largest(const panel *pn, float *values)
{
    for (int64_t step = pn->width / 2; step >= pn->pitch; step /= 2) {
        for (int64_t r = 0; r < step; r++) {
            values[r] = values[r] > values[r + step] ? values[r] : values[r + step];
        }
    }
    for (int64_t r = pn->pitch; r < pn->width; r++) {
        values[r] = values[r - pn->pitch];
    }
}

/* Scores in x become probabilities; f->lowered is 1 / LIFT where they are lifted. Lanes of one row
 * share its maximum. masked: some scores may be; form: a literal. Returns whether some alpha is not
 * 1. */
INLINE bool soften_tile(forward *f, int64_t steps, bool masked, weight_form form)
{
    const panel *const pn = &f->panel;
    const fv unit = fv_set1(pn->rule.unit), one = fv_set1(1);
    const bool pairs = form == STORED_PAIRS;
    mv normal = fv_eq(one, one), none_small = normal, unchanged = normal;
    float least[WIDE_ROWS];
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const score_range scores = masked ? range_of(pn->x + r, pn->br, steps, true)
                                          : range_of(pn->x + r, pn->br, steps, false);
        fv_store(f->alpha + r, scores.most);
        fv_store(least + r, scores.least);
    }
    if (pn->phases > 1) {
        fold_largest(pn, f->alpha);
    }
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fattn_softmax raised = {.m = fv_max(fv_load(f->m + r), fv_load(f->alpha + r))};
        const fv base = fattn_softmax_base(raised);
        const fv power = fattn_softmax_exponent(fv_load(least + r), unit, base);
        normal = mv_and(normal, fv_le(fv_set1(LEAST_NORMAL), power));
        none_small = mv_and(none_small, fv_le(fv_set1(-WINDOW_DOWN), power));
    }
    const bool lifted = !mv_all(normal) && form == STORED_FLOATS;
    const bool selected = masked || !mv_all(normal);
    f->none_small = mv_all(none_small);
    f->lowered = lifted ? 1 / LIFT : 1;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv most = fv_load(f->alpha + r);
        const fv alpha = lifted     ? soften_rows(f, r, most, steps, WEIGHTS_LIFTED, pairs)
                         : selected ? soften_rows(f, r, most, steps, WEIGHTS_SELECTED, pairs)
                                    : soften_rows(f, r, most, steps, WEIGHTS_NORMAL, pairs);
        unchanged = mv_and(unchanged, fv_eq(alpha, one));
    }
    return !mv_all(unchanged);
}

/*
 * Where all scores of a tile are near the bases that their rows already have, the largest and the
 * smallest need not be looked for, and the bases can stay, m then being the largest score of some
 * earlier tile: probabilities are up to 2^WINDOW_UP instead of 1. Whether all are near is known
 * once they are probabilities. If they are not, nothing but x has changed.
 */
INLINE bool soften_near(forward *f, int64_t steps, bool pairs)
{
    const panel *const pn = &f->panel;
    float taken[WIDE_ROWS];
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        weigher w;
        if (!window_open(&w.window, pn->rule.unit, fv_load(f->m + r))) {
            return false;
        }
        const weight_sums sums = weigh_rows(pn->x + r, pn->br, steps, WEIGHTS_NEAR, pairs, &w);
        fv_store(f->alpha + r, sums.l);
        fv_store(taken + r, sums.taken);
        if (!window_holds(&w.window)) {
            return false;
        }
    }
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        fattn_softmax state = state_load(f, r);
        add_taken(f, r, fv_set1(1), fv_load(taken + r));
        add_lost(f, r, fv_set1(1), fattn_softmax_add(&state, fv_load(f->alpha + r)));
        state_store(f, r, state);
    }
    f->lowered = 1;
    return true;
}

/* Tiles for each of which one may be predicted wrongly, which costs half of its time. */
#define TILES_A_MISS 8

/* Whether a tile's scores are likely to be near. The answer depends on other rows, which a
 * batch-invariant row may not. */
static bool predicts_near(const forward *f, span s)
{
    return FV_NEAR && s.kind == FATTN_TILE_FULL && f->none_small &&
           f->mispredicted * TILES_A_MISS <= f->tiles_done &&
           !(f->panel.p->features & FATTN_BATCH_INVARIANT);
}

/* p = Z p, after l has seen p. */
INLINE void drop_tile(panel *pn, span s, bool pairs)
{
    load_dropout(pn, s);
    for (int64_t j = 0; j < s.padded / pn->phases; j += 2) {
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            const int64_t at = j * pn->br + r;
            const fv first = fv_mul(fv_load(pn->x + at), fv_load(pn->z + at));
            const fv second = fv_mul(fv_load(pn->x + at + pn->br), fv_load(pn->z + at + pn->br));
            fv unused = first; /* l has seen p, and what is rounded here is Z p */
            keep_weights(pn->x + r, pn->br, j, first, second, pairs, &unused);
        }
    }
}

#endif
