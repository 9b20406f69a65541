/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Softmax of a tile: scores become probabilities. This is what forward and decoding do between
 * their two products: masks and terms, the maximum that weights are relative to, exponentials,
 * their sum, dropout.
 *
 * The general way finds the range of each row's scores first, and takes care of weights that are
 * too small to be multiplied fast. Most tiles need neither, because their scores are near the base
 * that their rows already have. These tiles are computed with the exponential of window.h and
 * without a range; if some score turns out to be outside of the window, the tile is computed again
 * the general way.
 */
#ifndef FATTN_CPU_SOFTEN_H
#define FATTN_CPU_SOFTEN_H

#include "backends/cpu/strip.h"
#include "backends/cpu/terms.h"
#include "backends/cpu/window.h"

/* Stores P of keys j and j + 1, j even, for a vector of rows: floats in their place, or pairs in
 * row j / 2, which no later key reads. Pairs are added to *taken as products take them, rounded. */
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

/* Turns the dot products of steps first .. past - 1 into scores. terms: a literal where speed
 * matters */
INLINE void score_steps_of(panel *pn, unsigned terms, int64_t first, int64_t past)
{
    const fattn_score_rule rule = pn->rule; /* a copy, which no store to x can change */
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        for (int64_t j = first; j < past; j++) {
            float *const x = pn->x + j * pn->br + r;
            fv dscore;
            fv_store(x, fattn_score(&rule, terms, fv_load(x), pair_at(pn, terms, j, r), &dscore));
        }
    }
}

/* Chooses a loop for terms that are only a scale, as where the bias of a tile is 0: a loop that
 * tests for each vector which terms there are took a tenth of the tile's time. */
static void score_steps(panel *pn, unsigned terms, int64_t first, int64_t past)
{
    if (terms == FATTN_SCORE_SCALE) {
        score_steps_of(pn, FATTN_SCORE_SCALE, first, past);
    } else {
        score_steps_of(pn, terms, first, past);
    }
}

/* Whether nothing is masked in the tile but the keys past its end, which are the same for all
 * rows. */
static bool ends_alike(const panel *pn, span s)
{
    return s.common.first == 0 && s.common.past == s.live && !pn->masked;
}

/* Turns the dot products in x into scores. Where masking by the band is all there is to do, keys in
 * the band of every row are skipped: their dot products are their scores. */
static void score_tile(panel *pn, span s)
{
    const bool alike = ends_alike(pn, s);
    if (alike) {
        s.kind = FATTN_TILE_FULL; /* keys past the end are masked below */
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

/* A row's weights are added to PARTIAL_SUMS sums in turn, and after SUMMED_KEYS keys these are
 * added to the total: rounding errors of l reach lse in full, and grow with the length of a sum. */
#define PARTIAL_SUMS 4
#define SUMMED_KEYS 64
_Static_assert(FV_NK % PARTIAL_SUMS == 0, "tiles hold whole steps");

/* The largest and the smallest of each row's scores. */
typedef struct score_range {
    fv most, least;
} score_range;

/* The range of `steps` scores of each row. masked, a literal: some scores may be -inf, and these do
 * not count as small */
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
 * Subnormal probabilities, those below 2^-126, are slow: each product with one takes hundreds of
 * cycles, and so does an exponential that underflows to 0. Steep slopes of ALiBi, biases that stand
 * for masks, and large scores produce whole tiles of them. In a tile that has some, those that
 * round to 0 are set to 0 by a comparison, and all others are computed LIFT times as large; scaling
 * by powers of two is exact, and so is scaling the sums back. Two cases need only the comparison:
 * pairs, since products of pairs treat subnormal operands as 0 anyway, and tiles whose only such
 * scores are masked.
 */
#define LIFT 0x1p32f
#define LEAST_POWER (-150.0f)
#define LEAST_NORMAL (-126.0f)

/* How the weights of a tile are computed. */
typedef enum weighing {
    WEIGHTS_NEAR,     /* in a window around the base of their row (window.h) */
    WEIGHTS_NORMAL,   /* by exp2, all of them in the normal range */
    WEIGHTS_SELECTED, /* the same, but 0 where the weight would be below it */
    WEIGHTS_LIFTED,   /* LIFT times as large, and 0 where the weight rounds to 0 */
} weighing;

/* How the weights of a tile are stored. */
typedef enum weight_form {
    STORED_FLOATS,
    STORED_FLOATS_FOR_PAIRS, /* as floats until dropout rounds them to pairs */
    STORED_PAIRS,
} weight_form;

/* What scores are made weights by: relative to a base, or in the window around one. */
typedef struct weigher {
    fv unit, base;
    window window;
} weigher;

/* The sum of weights as they are (l), and as products take them (taken), which are rounded if they
 * are pairs. */
typedef struct weight_sums {
    fv l, taken;
} weight_sums;

/* Turns the scores of a vector of rows into weights, and returns their sums. how, pairs: literals.
 * With WEIGHTS_NORMAL all exponents are in the normal range, except in rows that have a NaN, where
 * weights do not matter. */
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

/* Turns the scores of rows r .. r + FV_LANES - 1 into weights relative to their new maximum, and
 * adds them to l. most: the largest of these scores; how, pairs: literals. Returns alpha. */
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

/* values[r] = the maximum over the lanes of a dense tile that hold the same row, in each of these
 * lanes. */
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

/* Turns the scores in x into weights. Sets f->lowered to 1 / LIFT if they are lifted, else to 1. In
 * dense tiles the lanes of one row share its maximum. masked: some scores may be -inf; form: a
 * literal. Returns whether some alpha is not 1. */
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
 * Softmax of a tile whose scores are all near the bases that its rows already have. The range of
 * scores is not determined, and the bases stay: m is the largest score of some earlier tile, and
 * weights reach 2^WINDOW_UP instead of 1. Whether all scores are near is known when they have
 * become weights. If some are not, the function returns false, and nothing but x has changed.
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

/* One tile in so many may be predicted wrongly. A wrong prediction costs half the time of a
 * tile. */
#define TILES_A_MISS 8

/* Whether a tile's scores are likely to be near. The answer depends on other rows, so
 * batch-invariant rows may not use it. */
static bool predicts_near(const forward *f, span s)
{
    return FV_NEAR && s.kind == FATTN_TILE_FULL && f->none_small &&
           f->mispredicted * TILES_A_MISS <= f->tiles_done &&
           !(f->panel.p->features & FATTN_BATCH_INVARIANT);
}

/* Multiplies weights by dropout's Z, after l has summed them without it. */
INLINE void drop_tile(panel *pn, span s, bool pairs)
{
    load_dropout(pn, s);
    for (int64_t j = 0; j < s.padded / pn->phases; j += 2) {
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            const int64_t at = j * pn->br + r;
            const fv first = fv_mul(fv_load(pn->x + at), fv_load(pn->z + at));
            const fv second = fv_mul(fv_load(pn->x + at + pn->br), fv_load(pn->z + at + pn->br));
            fv unused = first; /* the sum of Z p is not needed */
            keep_weights(pn->x + r, pn->br, j, first, second, pairs, &unused);
        }
    }
}

#endif
