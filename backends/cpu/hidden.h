/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a bias of -inf or 0 spares: such numbers are how engines write masks.
 *
 * When a panel turns to its keys, its rows of the bias are read from both ends for keys that -inf
 * hides from all rows, and from there on for keys where it is 0 for all of them. The former are
 * never multiplied, the latter need no bias. With any other bias the search ends at its first and
 * its last number. A causal mask, a window or padding is wholly described so, in four numbers,
 * where a table of tiles would grow with Sq Sk. What else is hidden is found tile by tile: the test
 * of a tile stops at the first number that is not -inf.
 */
#ifndef FATTN_CPU_HIDDEN_H
#define FATTN_CPU_HIDDEN_H

#include "backends/cpu/panel.h"

/* Numbers of a row that are tested at a time. */
#define BIAS_BLOCK (4 * FV_LANES)

static bool bias_is(const panel *pn, int64_t index, float value)
{
    return fattn_dtype_load(pn->p->dtype_bias, pn->run->buffers->bias, index) == value;
}

/* Whether n neighbours, whole vectors, are `value`. */
INLINE bool all_are(fattn_dtype dtype, const char *bias, int n, fv value)
{
    mv equal = fv_eq(load_as(dtype, bias, FV_LANES), value);
    for (int c = FV_LANES; c < n; c += FV_LANES) {
        const fv some = load_as(dtype, bias + c * SIZE_OF(dtype), FV_LANES);
        equal = mv_and(equal, fv_eq(some, value));
    }
    return mv_all(equal);
}

/* Of n neighbours, how many at the beginning (or, backwards, the end) are `value`, as far as whole
 * vectors tell. dtype: a literal */
INLINE int64_t equal_numbers(fattn_dtype dtype, const char *bias, int64_t n, fv value,
                             bool backwards)
{
    int64_t run = 0;
    for (int step = BIAS_BLOCK; step >= FV_LANES; step -= BIAS_BLOCK - FV_LANES) {
        for (; run + step <= n; run += step) {
            const int64_t at = backwards ? n - run - step : run;
            if (!all_are(dtype, bias + at * SIZE_OF(dtype), step, value)) {
                break;
            }
        }
    }
    const int64_t last = backwards ? 0 : n - FV_LANES; /* overlaps those before */
    const bool rest = run > 0 && n - run < FV_LANES;
    return rest && all_are(dtype, bias + last * SIZE_OF(dtype), FV_LANES, value) ? n : run;
}

/* Of a row's keys first .. past - 1, how many have that bias before (or, backwards, after) the
 * first that has another. row: index of key 0 */
static int64_t run_of(const panel *pn, int64_t row, int64_t first, int64_t past, float value,
                      bool backwards)
{
    const fattn_dtype dtype = pn->p->dtype_bias;
    const int64_t step = pn->p->bias_stride[3], n = past - first;
    if (n <= 0 || !bias_is(pn, row + (backwards ? past - 1 : first) * step, value)) {
        return 0;
    }
    int64_t run = 1;
    if (step == 1) {
        const char *const from = element(pn->run->buffers->bias, dtype, row + first);
        const fv same = fv_set1(value);
        const int64_t equal =
            dtype == FATTN_F32   ? equal_numbers(FATTN_F32, from, n, same, backwards)
            : dtype == FATTN_F16 ? equal_numbers(FATTN_F16, from, n, same, backwards)
                                 : equal_numbers(FATTN_BF16, from, n, same, backwards);
        run = fattn_max64(run, equal);
    }
    while (run < n && bias_is(pn, row + (backwards ? past - 1 - run : first + run) * step, value)) {
        run++;
    }
    return run;
}

/* How many of a row's keys first .. past - 1 -inf hides at the end. */
static int64_t hidden_after(const panel *pn, int64_t row, int64_t first, int64_t past)
{
    const int64_t hidden = run_of(pn, row, first, past, -INFINITY, false);
    return hidden == past - first ? hidden : run_of(pn, row, first, past, -INFINITY, true);
}

/* Rows of the bias that the panel's rows have: heads and queries that share one count once. Row n
 * is the n-th from the last on. */
typedef struct bias_rows {
    int64_t heads, count;
} bias_rows;

static bias_rows bias_rows_of(const panel *pn)
{
    const int64_t *const stride = pn->p->bias_stride;
    const int64_t heads = stride[1] ? pn->group : 1;
    return (bias_rows){.heads = heads, .count = heads * (stride[2] ? pn->i1 - pn->i0 : 1)};
}

static int64_t bias_row(const panel *pn, bias_rows rows, int64_t n)
{
    const int64_t *const stride = pn->p->bias_stride;
    const int64_t i = rows.heads == 1 ? n : n / rows.heads, h = n - i * rows.heads;
    return pn->b * stride[0] + (pn->hk * pn->group + h) * stride[1] + (pn->i1 - 1 - i) * stride[2] +
           pn->start_k * stride[3];
}

/* What the bias leaves of keys first .. past - 1. A slope may make NaN of 0. The last row comes
 * first: a causal mask hides least from it. The others are then read in the order of memory, which
 * for a bias larger than the caches takes half the time of reading each from both its ends. */
static bias_ranges bias_ranges_of(const panel *pn, int64_t first, int64_t past)
{
    const bias_rows rows = bias_rows_of(pn);
    const bool sloped = pn->p->features & FATTN_ALIBI_BIAS;
    fattn_range seen = {.first = past, .past = first}, zero = {.first = past, .past = past};
    for (int64_t n = 0; n < rows.count; n++) {
        const int64_t row = bias_row(pn, rows, n == 0 ? 0 : rows.count - n);
        const int64_t before = run_of(pn, row, first, seen.first, -INFINITY, false);
        seen.first = fattn_min64(seen.first, first + before);
        if (n == 0 && !sloped) {
            zero.first = seen.first;
        }
        zero.past = zero.first + run_of(pn, row, zero.first, zero.past, 0, false);
        const int64_t least = fattn_max64(seen.past, seen.first);
        const int64_t after = hidden_after(pn, row, least, past);
        seen.past = past - after > seen.first ? fattn_max64(seen.past, past - after) : seen.past;
        if (seen.first == first && seen.past == past && zero.past <= zero.first) {
            break;
        }
    }
    return (bias_ranges){.seen = seen, .zero = zero};
}

/* What a thread found for the rows of a strip. Heads that share a bias share it. */
typedef struct known_bias {
    int64_t part; /* of which keys of which sequence, from 1 on; 0 at first */
    bias_ranges ranges;
} known_bias;

/* Strips of whose rows a thread remembers the bias: all, where heads share it. */
static int64_t known_strips(const fattn_problem *p, int64_t br)
{
    const bool shared = p->features & FATTN_BIAS && p->bias_stride[1] == 0 && p->heads_k > 1;
    return shared ? (p->seqlen_q * (p->heads_q / p->heads_k) + br - 1) / br : 0;
}

/* Sets the panel's bias_ranges, and drops from key blocks first .. past - 1 those at both ends that
 * the bias hides from all rows. known: NULL, or what the thread knows of the panel's rows; part: as
 * in known_bias */
static void skip_hidden_blocks(panel *pn, known_bias *known, int64_t part, int64_t *first,
                               int64_t *past)
{
    if (!(pn->p->features & FATTN_BIAS) || *first >= *past) {
        return;
    }
    if (known && known->part == part) {
        pn->bias_ranges = known->ranges;
    } else {
        const int64_t end = fattn_band_rows(&pn->band, pn->i0, pn->i1).past;
        pn->bias_ranges = bias_ranges_of(pn, *first * pn->bc, fattn_min64(*past * pn->bc, end));
    }
    if (known) {
        *known = (known_bias){.part = part, .ranges = pn->bias_ranges};
    }
    const fattn_range seen = pn->bias_ranges.seen;
    *first = seen.first / pn->bc;
    *past = seen.first < seen.past ? (seen.past + pn->bc - 1) / pn->bc : *first;
}

/* How many of the keys first .. past - 1 come before those that are hidden from all rows.
 * Prefetches the number with which the test of the next tile begins. */
static int64_t seen_keys(const panel *pn, int64_t first, int64_t past)
{
    const bias_rows rows = bias_rows_of(pn);
    const int64_t next = fattn_min64(past + pn->bc, pn->bias_ranges.seen.past) - 1;
    int64_t seen = first;
    __builtin_prefetch(element(pn->run->buffers->bias, pn->p->dtype_bias,
                               bias_row(pn, rows, 0) + next * pn->p->bias_stride[3]));
    for (int64_t n = 0; n < rows.count && seen < past; n++) {
        seen = past - run_of(pn, bias_row(pn, rows, n), seen, past, -INFINITY, true);
    }
    return seen - first;
}

/* The tile of key block `block` as span_of() has it, without what a bias hides. cut: it may end
 * early; else it is whole or empty. */
static span seen_span(const panel *pn, int64_t block, bool cut)
{
    const bias_ranges *const bias = &pn->bias_ranges;
    span s = span_of(pn, block);
    const int64_t past = s.first + s.live;
    if (s.kind == FATTN_TILE_EMPTY || !(pn->p->features & FATTN_BIAS)) {
        return s;
    }
    s.unbiased = bias->zero.first <= s.first && past <= bias->zero.past;
    if (s.unbiased) {
        return s;
    }
    int64_t live = fattn_min64(past, bias->seen.past) - s.first;
    if (past <= bias->seen.first || live <= 0) {
        live = 0;
    } else {
        live = seen_keys(pn, s.first, s.first + live);
    }
    if (live == 0) {
        s.live = s.padded = 0;
        s.kind = FATTN_TILE_EMPTY;
    } else if (cut && live < s.live) {
        s.live = live;
        s.padded = (live + pn->step - 1) / pn->step * pn->step;
        s.common =
            s.kind == FATTN_TILE_FULL
                ? (fattn_range){.first = 0, .past = live}
                : (fattn_range){.first = s.common.first, .past = fattn_min64(s.common.past, live)};
        s.kind = FATTN_TILE_PARTIAL;
    }
    return s;
}

/* Whether a corner of the loaded bias is -inf, so that others may be. Such scores are masked, not
 * small. */
static bool seems_masked(const panel *pn, span s)
{
    const int64_t last = (s.live - 1) * pn->br, right = pn->rows - 1;
    const float *const bias = pn->bias;
    return pn->p->features & FATTN_BIAS && !s.unbiased &&
           (bias[0] == -INFINITY || bias[right] == -INFINITY || bias[last] == -INFINITY ||
            bias[last + right] == -INFINITY);
}

#endif
