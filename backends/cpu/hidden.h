/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Skips keys that a mask of 0, or a bias of -inf, hides from all rows of a panel: engines pass
 * causal masks and padding as either.
 *
 * When a panel is opened, its rows of the bias are read from both ends. The keys that -inf hides
 * from all rows are never multiplied; the keys inside of those for which the bias is 0 in all rows
 * need no bias. With any other bias this search ends at its first and its last number. A causal
 * mask, a window or padding is described completely by these four numbers, while a table of tiles
 * would grow with Sq Sk. Keys hidden elsewhere are found tile by tile: the test of a tile stops at
 * the first number that is not -inf. Masks are read in the same way: 0 hides a pair, and pairs that
 * are kept need no mask.
 */
#ifndef FATTN_CPU_HIDDEN_H
#define FATTN_CPU_HIDDEN_H

#include "backends/cpu/panel.h"

/* How many numbers of a row are tested at a time. */
#define BIAS_BLOCK (4 * FV_LANES)

static bool bias_is(const panel *pn, int64_t index, float value)
{
    return fattn_dtype_load(pn->p->dtype_bias, pn->run->buffers->bias, index) == value;
}

/* Whether n consecutive numbers, whole vectors, all equal `value`. */
INLINE bool all_are(fattn_dtype dtype, const char *bias, int n, fv value)
{
    mv equal = fv_eq(load_as(dtype, bias, FV_LANES), value);
    for (int c = FV_LANES; c < n; c += FV_LANES) {
        const fv some = load_as(dtype, bias + c * SIZE_OF(dtype), FV_LANES);
        equal = mv_and(equal, fv_eq(some, value));
    }
    return mv_all(equal);
}

/* How many of n consecutive numbers equal `value` at the beginning (or, backwards, at the end), as
 * far as whole vectors can tell. dtype: a literal */
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
    const int64_t last = backwards ? 0 : n - FV_LANES; /* overlaps vectors already tested */
    const bool rest = run > 0 && n - run < FV_LANES;
    return rest && all_are(dtype, bias + last * SIZE_OF(dtype), FV_LANES, value) ? n : run;
}

/* How many of a row's keys first .. past - 1 have a bias of `value` before (or, backwards, after)
 * the first one that has not. row: index of key 0 */
static int64_t bias_run(const panel *pn, int64_t row, int64_t first, int64_t past, float value,
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

/* Whether one of 32 bytes of a mask is 0 (or, unless `kept`, is not). */
INLINE bool some_differ(const uint8_t *mask, bool kept)
{
    const uint64_t ones = UINT64_C(0x0101010101010101);
    uint64_t eight, some = 0;
    for (int c = 0; c < 32; c += 8) {
        memcpy(&eight, mask + c, sizeof eight);
        some |= kept ? (eight - ones) & ~eight & ones << 7 : eight;
    }
    return some != 0;
}

/* How many of a row's keys first .. past - 1 the mask keeps (or, unless `kept`, hides) before (or,
 * backwards, after) the first one that it does not. row: index of key 0 */
static int64_t mask_run(const panel *pn, int64_t row, int64_t first, int64_t past, bool kept,
                        bool backwards)
{
    const int64_t step = pn->p->mask_stride[3], n = past - first;
    const uint8_t *const mask = pn->run->buffers->mask + row + first * step;
    int64_t run = 0;
    while (step == 1 && run + 32 <= n &&
           !some_differ(mask + (backwards ? n - run - 32 : run), kept)) {
        run += 32;
    }
    while (run < n && (mask[(backwards ? n - 1 - run : run) * step] != 0) == kept) {
        run++;
    }
    return run;
}

static bool has_hider(const fattn_problem *p, int by)
{
    return p->features & (by == BIAS_HIDES ? FATTN_BIAS : FATTN_MASK);
}

static const int64_t *hider_stride(const fattn_problem *p, int by)
{
    return by == BIAS_HIDES ? p->bias_stride : p->mask_stride;
}

/* A run of keys that are hidden, or of keys whose score the hider does not change. */
typedef enum run_kind { HIDDEN_RUN, NEUTRAL_RUN } run_kind;

/* At which end of a range of keys a run is counted. */
typedef enum run_end { AT_FIRST, AT_LAST } run_end;

/* The length of such a run among a row's keys first .. past - 1. row: index of key 0 */
static int64_t run_of(const panel *pn, int by, int64_t row, int64_t first, int64_t past,
                      run_kind kind, run_end end)
{
    const bool backwards = end == AT_LAST;
    return by == BIAS_HIDES
               ? bias_run(pn, row, first, past, kind == HIDDEN_RUN ? -INFINITY : 0, backwards)
               : mask_run(pn, row, first, past, kind == NEUTRAL_RUN, backwards);
}

/* How many of a row's keys first .. past - 1 are hidden at the end. */
static int64_t hidden_after(const panel *pn, int by, int64_t row, int64_t first, int64_t past)
{
    const int64_t hidden = run_of(pn, by, row, first, past, HIDDEN_RUN, AT_FIRST);
    return hidden == past - first ? hidden : run_of(pn, by, row, first, past, HIDDEN_RUN, AT_LAST);
}

/* How many rows of the hider belong to the rows of a panel: heads, or queries, that share one count
 * once. They are numbered from the last one to the first. */
typedef struct hider_rows {
    int64_t heads, count;
} hider_rows;

static hider_rows hider_rows_of(const panel *pn, int by)
{
    const int64_t *const stride = hider_stride(pn->p, by);
    const int64_t heads = stride[1] ? pn->group : 1;
    return (hider_rows){.heads = heads, .count = heads * (stride[2] ? pn->i1 - pn->i0 : 1)};
}

static int64_t hider_row(const panel *pn, int by, hider_rows rows, int64_t n)
{
    const int64_t *const stride = hider_stride(pn->p, by);
    const int64_t i = rows.heads == 1 ? n : n / rows.heads, h = n - i * rows.heads;
    return pn->b * stride[0] + (pn->hk * pn->group + h) * stride[1] + (pn->i1 - 1 - i) * stride[2] +
           pn->start_k * stride[3];
}

/* The ranges of keys first .. past - 1 that the hider leaves visible, and neutral. (Times a slope,
 * a bias of 0 may become NaN, so it is not neutral then.) The last row comes first, because a
 * causal mask hides least from it. The other rows follow in the order of memory, which for a bias
 * larger than the caches takes half the time of reading each of them from both ends. */
static hider_ranges ranges_of(const panel *pn, int by, int64_t first, int64_t past)
{
    const hider_rows rows = hider_rows_of(pn, by);
    const bool sloped = by == BIAS_HIDES && pn->p->features & FATTN_ALIBI_BIAS;
    fattn_range visible = {.first = past, .past = first}, neutral = {.first = past, .past = past};
    for (int64_t n = 0; n < rows.count; n++) {
        const int64_t row = hider_row(pn, by, rows, n == 0 ? 0 : rows.count - n);
        const int64_t before = run_of(pn, by, row, first, visible.first, HIDDEN_RUN, AT_FIRST);
        visible.first = fattn_min64(visible.first, first + before);
        if (n == 0 && !sloped) {
            neutral.first = visible.first;
        }
        neutral.past =
            neutral.first + run_of(pn, by, row, neutral.first, neutral.past, NEUTRAL_RUN, AT_FIRST);
        const int64_t least = fattn_max64(visible.past, visible.first);
        const int64_t after = hidden_after(pn, by, row, least, past);
        visible.past =
            past - after > visible.first ? fattn_max64(visible.past, past - after) : visible.past;
        if (visible.first == first && visible.past == past && neutral.past <= neutral.first) {
            break;
        }
    }
    return (hider_ranges){.visible = visible, .neutral = neutral};
}

/* The ranges that a thread has found for the rows of a strip. Heads that share a bias or mask share
 * them. */
typedef struct known_ranges {
    /* Which part of the keys of which sequence they are for, from 1 on; 0: none yet. */
    int64_t part;
    hider_ranges ranges[HIDERS];
} known_ranges;

/* Whether the same keys are hidden in all heads: they share the bias, the mask, or both. */
static bool heads_share_hiders(const fattn_problem *p)
{
    bool shared = has_hiders(p);
    for (int by = 0; by < HIDERS; by++) {
        shared = shared && (!has_hider(p, by) || hider_stride(p, by)[1] == 0);
    }
    return shared;
}

/* For how many strips a thread keeps the ranges: for all, where heads share them. */
static int64_t known_strips(const fattn_problem *p, int64_t br)
{
    const bool shared = p->heads_k > 1 && heads_share_hiders(p);
    return shared ? (p->seqlen_q * (p->heads_q / p->heads_k) + br - 1) / br : 0;
}

/* Sets the panel's ranges, and narrows the range of key blocks first .. past - 1 by those at both
 * ends that are hidden from all rows. known: NULL, or what the thread knows of the panel's rows;
 * part: as in known_ranges */
static void skip_hidden_blocks(panel *pn, known_ranges *known, int64_t part, int64_t *first,
                               int64_t *past)
{
    if (!has_hiders(pn->p) || *first >= *past) {
        return;
    }
    const int64_t end = fattn_band_rows(&pn->band, pn->i0, pn->i1).past;
    for (int by = 0; by < HIDERS && *first < *past; by++) {
        hider_ranges *const ranges = &pn->ranges[by];
        if (!has_hider(pn->p, by)) {
            continue;
        }
        *ranges = known && known->part == part
                      ? known->ranges[by]
                      : ranges_of(pn, by, *first * pn->bc, fattn_min64(*past * pn->bc, end));
        const fattn_range visible = ranges->visible;
        *first = visible.first / pn->bc;
        *past = visible.first < visible.past ? (visible.past + pn->bc - 1) / pn->bc : *first;
    }
    if (known) {
        known->part = part;
        memcpy(known->ranges, pn->ranges, sizeof known->ranges);
    }
}

/* How many of the keys first .. past - 1 are left without those at the end that are hidden from all
 * rows. Prefetches the number with which the test of the next tile begins. */
static int64_t visible_keys(const panel *pn, int by, int64_t first, int64_t past)
{
    const hider_rows rows = hider_rows_of(pn, by);
    const int64_t next = fattn_min64(past + pn->bc, pn->ranges[by].visible.past) - 1;
    const int64_t later = hider_row(pn, by, rows, 0) + next * hider_stride(pn->p, by)[3];
    __builtin_prefetch(by == BIAS_HIDES ? element(pn->run->buffers->bias, pn->p->dtype_bias, later)
                                        : (const char *)pn->run->buffers->mask + later);
    int64_t visible = first;
    for (int64_t n = 0; n < rows.count && visible < past; n++) {
        visible =
            past - run_of(pn, by, hider_row(pn, by, rows, n), visible, past, HIDDEN_RUN, AT_LAST);
    }
    return visible - first;
}

/* What becomes of a tile whose last keys are hidden from all rows. */
typedef enum tile_end { ENDS_EARLY, STAYS_WHOLE } tile_end;

/* The tile of key block `block` by span_of(). It is empty if all of its keys are hidden; if it
 * ENDS_EARLY, it has no hidden keys at its end. */
static span visible_span(const panel *pn, int64_t block, tile_end end)
{
    span s = span_of(pn, block);
    const int64_t past = s.first + s.live;
    int64_t live = s.live;
    for (int by = 0; by < HIDERS && s.kind != FATTN_TILE_EMPTY && live > 0; by++) {
        const hider_ranges *const ranges = &pn->ranges[by];
        if (!has_hider(pn->p, by)) {
            continue;
        }
        if (ranges->neutral.first <= s.first && past <= ranges->neutral.past) {
            s.unbiased = s.unbiased || by == BIAS_HIDES;
            s.kind = by == MASK_HIDES && s.only_masked ? FATTN_TILE_FULL : s.kind;
            continue;
        }
        live = fattn_min64(live, ranges->visible.past - s.first);
        live = past <= ranges->visible.first || live <= 0
                   ? 0
                   : visible_keys(pn, by, s.first, s.first + live);
    }
    if (live <= 0) {
        s.live = s.padded = 0;
        s.kind = FATTN_TILE_EMPTY;
    } else if (end == ENDS_EARLY && live < s.live) {
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

/* Whether a corner of the loaded bias is -inf: then other numbers may be, too. Such scores are
 * masked, not small. */
static bool seems_masked(const panel *pn, span s)
{
    const int64_t last = (s.live - 1) * pn->br, right = pn->rows - 1;
    const float *const bias = pn->bias;
    return pn->p->features & FATTN_BIAS && !s.unbiased &&
           (bias[0] == -INFINITY || bias[right] == -INFINITY || bias[last] == -INFINITY ||
            bias[last + right] == -INFINITY);
}

#endif
