/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward of lone rows: rows that attend to one key. Their probability is 1 and lse is the score.
 * But backward computes the score anew, perhaps in another order, and lse was rounded by 2^-24 of
 * its size: with scores of 100 the difference made a probability of 1 + 1e-5. If rounding explains
 * the difference, backward takes its own score for lse, and the probability is exactly 1.
 *
 * If the difference is larger, lse holds more than this key: a sink, or the keys of other shards.
 */
#ifndef FATTN_CPU_LONE_H
#define FATTN_CPU_LONE_H

#include "backends/cpu/hidden.h"
#include "backends/cpu/terms.h"

/* The first key from j on whose block the block mask keeps for row r, or past. */
static int64_t next_block(const panel *pn, int64_t r, int64_t j, int64_t past)
{
    const fattn_problem *const p = pn->p;
    const int64_t *const stride = p->block_mask_stride;
    const uint8_t *const mask = pn->run->buffers->block_mask + pn->b * stride[0] +
                                pn->row[r].h * stride[1] + pn->row[r].i / p->block_m * stride[2];
    while (j < past && !mask[j / p->block_n * stride[3]]) {
        j = (j / p->block_n + 1) * p->block_n;
    }
    return fattn_min64(j, past);
}

/* The first key from j on that row r attends to, or past. */
static int64_t next_key(const panel *pn, int64_t r, int64_t j, int64_t past)
{
    const fattn_problem *const p = pn->p;
    for (int64_t before = -1; j != before && j < past;) {
        before = j;
        for (int by = 0; by < HIDERS; by++) {
            if (has_hider(p, by)) {
                const int64_t row = term_index(pn, hider_stride(p, by), r, 0);
                j += run_of(pn, by, row, j, past, HIDDEN_RUN, AT_FIRST);
            }
        }
        if (p->features & FATTN_BLOCK_MASK) {
            j = next_block(pn, r, j, past);
        }
    }
    return j;
}

/* Whether row r attends to keys j and j + 1, if only a bias may hide them. A quick test, true for
 * most rows at their first two keys. */
static bool attends_to_both(const panel *pn, int64_t r, int64_t j)
{
    const fattn_problem *const p = pn->p;
    const int64_t at = term_index(pn, p->bias_stride, r, j), next = at + p->bias_stride[3];
    if (p->features & (FATTN_MASK | FATTN_BLOCK_MASK)) {
        return false;
    }
    if (p->dtype_bias == FATTN_F32) {
        const float *const bias = pn->run->buffers->bias;
        return bias[at] != -INFINITY && bias[next] != -INFINITY;
    }
    return !bias_is(pn, at, -INFINITY) && !bias_is(pn, next, -INFINITY);
}

/* The only key that row r attends to, or -1 if it attends to none or to several. */
static int64_t lone_key(const panel *pn, int64_t r)
{
    const fattn_range keys = fattn_band_row(&pn->band, pn->row[r].i);
    if (keys.first >= keys.past) {
        return -1;
    }
    if (!(pn->p->features & (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK))) {
        return keys.past - keys.first == 1 ? keys.first : -1;
    }
    if (keys.past - keys.first > 1 && pn->p->features & FATTN_BIAS &&
        attends_to_both(pn, r, keys.first)) {
        return -1;
    }
    const int64_t key = next_key(pn, r, keys.first, keys.past);
    const bool lone = key < keys.past && next_key(pn, r, key + 1, keys.past) == keys.past;
    return lone ? key : -1;
}

/* sum_c |q_c k_c| for row r and key j. */
static float size_of_products(const panel *pn, int64_t r, int64_t j)
{
    const fattn_problem *const p = pn->p;
    const fattn_dtype dtype = p->dtype;
    const char *const q = element(pn->run->buffers->q, dtype, query_index(pn, &p->q, r));
    const char *const k = element(pn->run->buffers->k, dtype, key_index(pn, &p->k, j));
    const int64_t size = fattn_dtype_size(dtype);
    fv sum = fv_set1(0);
    for (int64_t c = 0; c < p->dim; c += FV_LANES) {
        const int part = (int)fattn_min64(p->dim - c, FV_LANES);
        const fv a = fv_abs(load_as(dtype, q + c * size, part));
        sum = fv_add(sum, fv_mul(a, fv_abs(load_as(dtype, k + c * size, part))));
    }
    float lanes[FV_LANES], total = 0;
    fv_store(lanes, sum);
    for (int n = 0; n < FV_LANES; n++) {
        total += lanes[n];
    }
    return total;
}

/*
 * By how much rounding may make a score x of row r and key j differ from lse. In a sum of D
 * products of one sign and size X the error is e X sqrt(D / 12) on average, and the other terms of
 * a score and lse add a few e X. Twice that is allowed, which changes no probability by more than
 * its bound. Nothing is allowed where X overflows.
 */
static float lone_tolerance(const panel *pn, int64_t r, int64_t j, float x)
{
    const fattn_problem *const p = pn->p;
    const float share = 0x1p-24f * (4 + (float)p->dim / 32);
    float size = share * fabsf(x) * pn->rule.natural +
                 share * fabsf(pn->rule.scale) * size_of_products(pn, r, j);
    if (p->features & FATTN_BIAS) {
        const int64_t at = term_index(pn, p->bias_stride, r, j);
        const double bias = fabs(fattn_dtype_load(p->dtype_bias, pn->run->buffers->bias, at));
        size += share * (float)fmin(bias, 0x1p126);
    }
    if (p->features & FATTN_ALIBI) {
        size += share * fabsf(pn->slope[r] * (float)(pn->row[r].i + pn->band.diagonal - j));
    }
    return size < INFINITY ? size / pn->rule.natural : 0;
}

#endif
