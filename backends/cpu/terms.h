/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The terms of a tile's scores besides dot products: bias, masks, the band of each row, distances
 * for ALiBi, and the multipliers of dropout.
 */
#ifndef FATTN_CPU_TERMS_H
#define FATTN_CPU_TERMS_H

#include "backends/cpu/panel.h"

/* The index of row r and key j in a tensor with strides (batch, head, query, key). */
static int64_t term_index(const panel *pn, const int64_t stride[4], int64_t r, int64_t j)
{
    return pn->b * stride[0] + pn->row[r].h * stride[1] + pn->row[r].i * stride[2] +
           (pn->start_k + j) * stride[3];
}

/* to[j][r] = pn->term_rows[r][j], a term by rows; 0 past the last row and the last key. */
static void term_transpose(const panel *pn, span s, float *to)
{
    if (pn->phases > 1) {
        for (int64_t j = 0; j < s.padded; j++) {
            for (int64_t r = 0; r < pn->pitch; r++) {
                to[j * pn->pitch + r] = r < pn->rows ? pn->term_rows[r * pn->bc + j] : 0;
            }
        }
        return;
    }
    for (int64_t r = pn->rows; r < pn->width; r++) {
        fill(pn->term_rows + r * pn->bc, s.padded, 0);
    }
    transpose(pn->term_rows, pn->bc, pn->width, s.padded, to, pn->br);
}

/* bias[j] *= slope. Finite values are bounded before and after, as fattn_score_bias() bounds a
 * bias, and so stay finite; -inf is a mask whatever the slope. */
static void scale_bias(float *bias, float slope, int64_t n)
{
    const float limit = 0x1p126f;
    for (int64_t j = 0; j < n; j++) {
        const bool finite = fabsf(bias[j]) < INFINITY && fabsf(slope) < INFINITY;
        const float bounded = fminf(fmaxf(bias[j], -limit), limit) * slope;
        const float product = finite ? fminf(fmaxf(bounded, -limit), limit) : bias[j] * slope;
        bias[j] = bias[j] == -INFINITY ? bias[j] : product;
    }
}

static void load_bias(const panel *pn, span s)
{
    const fattn_problem *const p = pn->p;
    const int64_t step = p->bias_stride[3];
    const bool sloped = p->features & FATTN_ALIBI_BIAS;
    if (!sloped && p->dtype_bias == FATTN_F32 && step == 1 && pn->group == 1 && pn->phases == 1 &&
        pn->rows == pn->width && s.live % FV_LANES == 0) {
        const float *const bias = pn->run->buffers->bias;
        transpose(bias + term_index(pn, p->bias_stride, 0, s.first), p->bias_stride[2], pn->width,
                  s.live, pn->bias, pn->br);
        return;
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        float *const to = pn->term_rows + r * pn->bc;
        const int64_t index = term_index(pn, p->bias_stride, r, s.first);
        fill(to + s.live, s.padded - s.live, 0);
        if (step == 1) {
            row_load(to, p->dtype_bias, element(pn->run->buffers->bias, p->dtype_bias, index),
                     s.live);
        }
        for (int64_t j = 0; j < s.live && step != 1; j++) {
            to[j] =
                (float)fattn_dtype_load(p->dtype_bias, pn->run->buffers->bias, index + j * step);
        }
        if (sloped) {
            scale_bias(to, pn->slope[r], s.live);
        }
    }
    term_transpose(pn, s, pn->bias);
}

/* to[j] = 1 where byte j of the mask, `step` apart, is not 0, else 0. */
INLINE void load_bytes(float *restrict to, const uint8_t *restrict mask, int64_t step, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        to[j] = mask[j * step] ? 1 : 0;
    }
}

/* to[j] = 1 where the mask keeps row r and key j of the tile, else 0. Prefetches the row of the
 * mask half a strip ahead: rows are too far apart for the processor's prefetchers. */
static void load_mask(const panel *pn, span s, int64_t r, float *to)
{
    const int64_t *const stride = pn->p->mask_stride;
    const uint8_t *const mask = pn->run->buffers->mask;
    const uint8_t *const from = mask + term_index(pn, stride, r, s.first);
    if (stride[3] != 1) {
        load_bytes(to, from, stride[3], s.live);
        return;
    }
    const int64_t later = r + pn->width / 2;
    for (int64_t j = 0; j < s.live && later < pn->rows; j += CACHE_LINE) {
        __builtin_prefetch(mask + term_index(pn, stride, later, s.first + j));
    }
    load_bytes(to, from, 1, s.live);
}

/* to[j] = 0 where the block mask does not keep row r and key j of the tile. */
static void drop_blocks(const panel *pn, span s, int64_t r, float *to)
{
    const fattn_problem *const p = pn->p;
    const int64_t *const stride = p->block_mask_stride;
    const uint8_t *const mask = pn->run->buffers->block_mask + pn->b * stride[0] +
                                pn->row[r].h * stride[1] + pn->row[r].i / p->block_m * stride[2];
    const int64_t first = pn->start_k + s.first;
    int64_t past, block = first / p->block_n;
    for (int64_t j = 0; j < s.live; j = past, block++) {
        past = fattn_min64(s.live, (block + 1) * p->block_n - first);
        if (!mask[block * stride[3]]) {
            fill(to + j, past - j, 0);
        }
    }
}

/* pn->keep[j][r] = 1 where mask and block mask keep a pair, else 0. */
static void load_masks(const panel *pn, span s)
{
    const uint64_t features = pn->p->features;
    for (int64_t r = 0; r < pn->rows; r++) {
        float *const to = pn->term_rows + r * pn->bc;
        if (features & FATTN_MASK) {
            load_mask(pn, s, r, to);
        } else {
            fill(to, s.live, 1);
        }
        if (features & FATTN_BLOCK_MASK) {
            drop_blocks(pn, s, r, to);
        }
        fill(to + s.live, s.padded - s.live, 0);
    }
    term_transpose(pn, s, pn->keep);
}

/* The band of each row, relative to the tile, and its position for ALiBi. Numbers up to bc are
 * exact in float. A position beyond 2^24 is rounded, as the distance in its score would be
 * anyway. */
static void load_places(const panel *pn, span s)
{
    for (int64_t r = 0; r < pn->width; r++) {
        const int64_t i = pn->row[r].i, begin = s.first + pn->row[r].phase;
        const fattn_range keys = fattn_band_row(&pn->band, i);
        const int64_t past = fattn_min64(keys.past, s.first + s.live);
        const int64_t lo = fattn_max64(0, fattn_min64(s.padded, keys.first - begin));
        const int64_t hi = fattn_max64(0, fattn_min64(s.padded, past - begin));
        pn->lo[r] = (float)lo;
        pn->hi[r] = pn->row[r].dead ? 0 : (float)hi;
        pn->at[r] = (float)(i + pn->band.diagonal - begin);
    }
}

/* Loads the terms of a tile into scratch. Returns which ones its scores have: FATTN_SCORE_*. */
static unsigned load_terms(const panel *pn, span s)
{
    const unsigned terms = (pn->rule.terms & ~(s.unbiased ? FATTN_SCORE_BIAS : 0u)) |
                           (s.kind == FATTN_TILE_PARTIAL ? FATTN_SCORE_KEEP : 0);
    if (terms & FATTN_SCORE_BIAS) {
        load_bias(pn, s);
    }
    if (terms & (FATTN_SCORE_ALIBI | FATTN_SCORE_KEEP)) {
        load_places(pn, s);
    }
    if (pn->masked && terms & FATTN_SCORE_KEEP) {
        load_masks(pn, s);
    }
    return terms;
}

/* The terms of step j of the tile for rows r .. r + FV_LANES - 1. */
INLINE fattn_score_pair pair_at(const panel *pn, unsigned terms, int64_t j, int64_t r)
{
    const fv key = fv_set1((float)(j * pn->phases)), zero = fv_set1(0);
    fattn_score_pair pair = {
        .bias = zero, .slope = zero, .distance = zero, .keep = fv_eq(zero, zero)};
    if (terms & FATTN_SCORE_BIAS) {
        pair.bias = fv_load(pn->bias + j * pn->br + r);
    }
    if (terms & FATTN_SCORE_ALIBI) {
        pair.slope = fv_load(pn->slope + r);
        pair.distance = fv_abs(fv_sub(fv_load(pn->at + r), key));
    }
    if (terms & FATTN_SCORE_KEEP) {
        pair.keep = mv_and(fv_le(fv_load(pn->lo + r), key), fv_lt(key, fv_load(pn->hi + r)));
        if (pn->masked) {
            pair.keep = mv_and(pair.keep, fv_lt(zero, fv_load(pn->keep + j * pn->br + r)));
        }
    }
    return pair;
}

/* pn->z[j][r] = Z of dropout. One call of the generator serves 16 keys, from a multiple of 16 on.
 * In dense tiles, of `pitch` < FV_LANES rows, each key's store overwrites the unused lanes of the
 * one before. */
static void load_dropout(const panel *pn, span s)
{
    const int64_t begin = pn->seq.k_position + s.first, end = begin + s.live;
    for (int64_t r = 0; r < fattn_min64(pn->width, pn->pitch); r += FV_LANES) {
        const fattn_dropout_rows_fv rows = fattn_dropout_rows_at_fv(
            pn->seq.q_position, uv_load(pn->drop_i + r),
            uv_set1((uint32_t)(pn->p->batch_offset + pn->b)), uv_load(pn->drop_h + r));
        for (int64_t block = begin / 16 * 16; block < end; block += 16) {
            fv z[16];
            fattn_dropout_block_fv(&pn->dropout, rows, block, z);
            const int64_t from = fattn_max64(begin, block), to = fattn_min64(end, block + 16);
            for (int64_t j = from; j < to; j++) {
                fv_store(pn->z + (j - begin) * pn->pitch + r, z[j - block]);
            }
        }
        for (int64_t j = s.live; j < s.padded; j++) {
            fv_store(pn->z + j * pn->pitch + r, fv_set1(0));
        }
    }
}

#endif
