/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operands of products of bf16 pairs. A pair holds two neighbours along the sum:
 *
 *     S^T = K Q^T      channels 2c, 2c + 1: rows of k as they are, and q transposed pair by pair
 *     O^T += V^T P^T   keys 2j, 2j + 1: two rows of v zipped, and P rounded as softmax stores it
 *
 * They use the scratch of a panel of floats, half of it or all. (small_pairs.h arranges operands
 * differently for few keys.)
 */
#ifndef FATTN_CPU_PAIRS_H
#define FATTN_CPU_PAIRS_H

#include "backends/cpu/panel.h"

/* The products: PAIRS_* and pairs_rows(), pairs_columns(), pairs_dots(), pairs_mix(). */
#if FV_TILES
#include "backends/cpu/pair_tiles.h"
#else
#include "backends/cpu/pair_vectors.h"
#endif

/* Scratch for the rows of pairs of a tile. To be called after panel_layout(). */
static void pairs_layout(panel *pn, arena *from)
{
    pn->k_pairs = carve(from, pn->bc, sizeof *pn->k_pairs);
    pn->v_pairs = carve(from, pn->bc / 2, sizeof *pn->v_pairs);
    pn->x_pairs = PAIRS_COPIED ? NULL : carve(from, pn->bc / 2, sizeof *pn->x_pairs);
}

/* Whether rows of k or v can be read in their tensor: not if the last pair would reach past the
 * row, nor if rows must be whole vectors, nor at strides that in_place() excludes. */
static bool pairs_in_place(fattn_dtype dtype, int64_t dim, const fattn_strides *strides)
{
    return dtype == FATTN_BF16 && !PAIRS_COPIED && dim % 2 == 0 && strides->seq % 2048 != 0;
}

/* to[0 .. n) = from[0 .. n), and zeros up to whole vectors of pairs. */
static void row_copy(void *to, const void *from, int64_t n)
{
    const uint16_t *const x = from;
    uint16_t *const y = to;
    int64_t c = 0;
    for (; c + 2 * FV_LANES <= n; c += 2 * FV_LANES) {
        pv_store(y + c, pv_load(x + c));
    }
    if (c < n) {
        memcpy(y + c, x + c, (size_t)(n - c) * sizeof *x);
        memset(y + n, 0, (size_t)(c + 2 * FV_LANES - n) * sizeof *x);
    }
}

/* The same for a row of k or v, which is bf16 or e4m3. */
static void row_copy_keys(fattn_dtype dtype, uint16_t *to, const void *from, int64_t n)
{
    const char *const x = from;
    int64_t c = 0;
    if (dtype == FATTN_BF16) {
        row_copy(to, from, n);
        return;
    }
#if FV_BYTES
    for (; c + 4 * FV_LANES <= n; c += 4 * FV_LANES) {
        fv_widen_e4m3(to + c, (const uint8_t *)x + c);
    }
#endif
    for (; c < n; c += FV_LANES) {
        const int part = (int)fattn_min64(n - c, FV_LANES);
        store_as(FATTN_BF16, to + c, load_as(FATTN_E4M3, x + c, part), part);
    }
    memset(to + n, 0, (size_t)(pairs_stride(n) * 2 - n) * sizeof *to);
}

/* Room for such a row. */
typedef struct wide_row {
    uint16_t channels[FATTN_PROBLEM_DIM_MAX + 2 * FV_LANES];
} wide_row;

/* Prefetches a row of n bf16 into the second-level cache. */
static inline void prefetch_pairs(const uint16_t *row, int64_t n)
{
    const int64_t past = bytes_in_lines(row, n * (int64_t)sizeof *row);
    for (int64_t byte = 0; byte < past; byte += CACHE_LINE) {
        __builtin_prefetch((const char *)row + byte, 0, 2);
    }
}

/* Prefetches the row of another head that belongs to a row of k or v (pn->heads_ahead). */
static inline void prefetch_other_head(const panel *pn, const void *row,
                                       const fattn_strides *strides, int64_t dim)
{
    if (pn->heads_ahead) {
        prefetch_pairs((const uint16_t *)row + pn->heads_ahead * strides->head, dim);
    }
}

/* The same for FV_LANES rows of q from row r on, if each head of q has keys of its own. */
static void prefetch_other_queries(const panel *pn, int64_t r)
{
    const fattn_problem *const p = pn->p;
    if (pn->heads_ahead && pn->group == 1) {
        const uint16_t *const q = (const uint16_t *)pn->run->buffers->q + query_index(pn, &p->q, r);
        const int64_t count = fattn_min64(FV_LANES, pn->rows - r);
        for (int64_t n = 0; n < count; n++) {
            prefetch_pairs(q + n * p->q.seq + pn->heads_ahead * p->q.head, p->dim);
        }
    }
}

/* The row of key j of the tile in k or v as bf16: in its tensor, or in *room. */
static const void *row_of_key(const panel *pn, span s, const void *tensor, fattn_dtype dtype,
                              const fattn_strides *strides, int64_t dim, int64_t j, wide_row *room)
{
    const void *const row = element(tensor, dtype, key_index(pn, strides, s.first + j));
    if (dtype == FATTN_BF16) {
        prefetch_other_head(pn, row, strides, dim);
        return row;
    }
    row_copy_keys(dtype, room->channels, row, dim);
    return room->channels;
}

/* FV_LANES rows of q from row r on, *stride pairs apart: in their tensor, if `usable` allows that
 * and they are evenly spaced, else copied. */
static const void *pairs_of_queries(const panel *pn, int64_t r, bool usable, int64_t *stride)
{
    const fattn_problem *const p = pn->p;
    if (usable && p->q.seq % 2 == 0 && rows_in_place(pn, p->dim, r)) {
        *stride = p->q.seq / 2;
        return element(pn->run->buffers->q, p->dtype, query_index(pn, &p->q, r));
    }
    for (int64_t n = 0; n < FV_LANES; n++) {
        float *const to = pn->q + n * pn->d_pad;
        if (r + n < pn->rows) {
            row_copy(to, element(pn->run->buffers->q, p->dtype, query_index(pn, &p->q, r + n)),
                     p->dim);
        } else {
            fill(to, pn->d_pad, 0);
        }
    }
    *stride = pn->d_pad;
    return pn->q;
}

/* qt[c][r] = pair c of row r of q, for whole vectors of rows and of pairs. */
static void pairs_load_queries(const panel *pn)
{
    const int64_t dim = pn->p->dim;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        int64_t stride;
        const void *const from = pairs_of_queries(pn, r, dim % (2 * FV_LANES) == 0, &stride);
        transpose(from, stride, FV_LANES, pairs_of(dim), pn->qt + r, pn->br);
        prefetch_other_queries(pn, r);
    }
}

/* point_keys() for rows of pairs. */
static void point_pairs(const panel *pn, span s, const uint16_t *from, int64_t step,
                        const bf16_pair **rows)
{
    for (int64_t j = 0; j < s.live; j++) {
        rows[j] = (const void *)(from + j * step);
    }
    for (int64_t j = s.live; j < s.padded; j++) {
        rows[j] = (const void *)pn->zeros;
    }
}

/* rows[j] = the row of key j of the tile in k or v. Copies are [bc][operand_row(dim)], and the
 * first `copied` are there already. Matrix registers read all rows from the copy, so there the rows
 * past the last key are zeros in the copy, too. */
static void pairs_load_keys(const panel *pn, span s, int64_t copied, const void *tensor,
                            fattn_dtype dtype, const fattn_strides *strides, int64_t dim,
                            float *copy, const bf16_pair **rows)
{
    const bool direct = pairs_in_place(dtype, dim, strides);
    const int64_t stride = operand_row(dim);
    if (direct && !(pn->p->features & FATTN_PAGED)) {
        const void *const from = element(tensor, dtype, key_index(pn, strides, s.first));
        point_pairs(pn, s, from, strides->seq, rows);
        return;
    }
    for (int64_t j = 0; j < s.padded; j++) {
        float *const to = copy + j * stride;
        const void *row = PAIRS_COPIED ? to : pn->zeros;
        if (j < s.live) {
            const void *const from = element(tensor, dtype, key_index(pn, strides, s.first + j));
            if (!direct && j >= copied) {
                prefetch_other_head(pn, from, strides, dim);
                row_copy_keys(dtype, (uint16_t *)(void *)to, from, dim);
            }
            row = direct ? from : to;
        } else if (PAIRS_COPIED && j >= copied) {
            fill(to, stride, 0);
        }
        rows[j] = row;
    }
}

/* to[c] = {first[c], second[c]} for n channels and zeros up to whole vectors. */
static void row_zip(bf16_pair *to, const uint16_t *first, const uint16_t *second, int64_t n)
{
    const int64_t whole = n / FV_LANES * FV_LANES;
    for (int64_t c = 0; c < whole; c += FV_LANES) {
        pv_store(to + c, pv_zip(first + c, second + c));
    }
    if (whole < n) {
        const size_t rest = (size_t)(n - whole) * sizeof *first;
        uint16_t last[2][FV_LANES] = {{0}};
        memcpy(last[0], first + whole, rest);
        memcpy(last[1], second + whole, rest);
        pv_store(to + whole, pv_zip(last[0], last[1]));
    }
}

/* to[c] = {channel c of key j of the tile, channel c of key j + 1}; keys past the end are zeros. */
static void zip_keys(const panel *pn, span s, int64_t j, const void *tensor, fattn_dtype dtype,
                     const fattn_strides *strides, int64_t dim, bf16_pair *to)
{
    wide_row room[2];
    const void *rows[2] = {pn->zeros, pn->zeros};
    for (int64_t n = 0; n < 2 && j + n < s.live; n++) {
        rows[n] = row_of_key(pn, s, tensor, dtype, strides, dim, j + n, &room[n]);
    }
    row_zip(to, rows[0], rows[1], dim);
}

/* zipped[j / 2] = keys j and j + 1 of a tile of k or v zipped, in `to`, at a stride of dim rounded
 * up to vectors. copied: they are there already */
static void pairs_zip_keys(const panel *pn, span s, bool copied, const void *tensor,
                           fattn_dtype dtype, const fattn_strides *strides, int64_t dim, float *to,
                           const bf16_pair **zipped)
{
    const int64_t stride = vectors_of(dim) * FV_LANES;
    for (int64_t j = 0; j < s.padded; j += 2) {
        bf16_pair *const pairs = (bf16_pair *)(void *)(to + j / 2 * stride);
        zipped[j / 2] = pairs;
        if (!copied) {
            zip_keys(pn, s, j, tensor, dtype, strides, dim, pairs);
        }
    }
}

/* The same transposed, for matrix registers: to[c][j / 2], at the stride transposed_stride(). some:
 * scratch, [FV_LANES][dim rounded up to vectors] */
static void pairs_transpose_keys(const panel *pn, span s, const void *tensor, fattn_dtype dtype,
                                 const fattn_strides *strides, int64_t dim, float *some, float *to)
{
    const int64_t stride = vectors_of(dim) * FV_LANES;
    for (int64_t j = 0; j < s.padded; j += 2 * FV_LANES) {
        for (int64_t n = 0; n < FV_LANES; n++) {
            bf16_pair *const pairs = (bf16_pair *)(void *)(some + n * stride);
            zip_keys(pn, s, j + 2 * n, tensor, dtype, strides, dim, pairs);
        }
        transpose(some, stride, FV_LANES, stride, to + j / 2, transposed_stride(pn));
    }
}

/* Bits of a bf16 that are all 0 if its size is below 2^-63. */
#define EXPONENT_HIGH 0x6000

static bool some_large(const bf16_pair *row, int64_t n)
{
    for (int64_t c = 0; c < n; c++) {
        if ((row[c].first | row[c].second) & EXPONENT_HIGH) {
            return true;
        }
    }
    return false;
}

/* Loads pairs of rows of v; copied: they are there already. Returns false if all values of the tile
 * are so small that their products with probabilities could be subnormal, which products of pairs
 * treat as 0. For batch-invariant rows it returns true always: their bits may not depend on values
 * that only other rows attend to. */
static bool pairs_load_values(const panel *pn, span s, bool copied)
{
    const fattn_problem *const p = pn->p;
    const void *const v = pn->run->buffers->v;
    const int64_t stride = transposed_stride(pn);
    if (!PAIRS_COPIED) {
        pairs_zip_keys(pn, s, copied, v, p->dtype_v, &p->v, p->dim_v, pn->v_copy, pn->v_pairs);
    } else if (!copied) {
        pairs_transpose_keys(pn, s, v, p->dtype_v, &p->v, p->dim_v,
                             pn->v_copy + pn->dv_pad * stride, pn->v_copy);
    }
    const int64_t rows = PAIRS_COPIED ? p->dim_v : s.padded / 2;
    const int64_t pairs = PAIRS_COPIED ? s.padded / 2 : p->dim_v;
    bool large = copied || p->features & FATTN_BATCH_INVARIANT;
    for (int64_t r = 0; r < rows && !large; r++) {
        const void *const row =
            PAIRS_COPIED ? pn->v_copy + r * stride : (const void *)pn->v_pairs[r];
        large = some_large(row, pairs);
    }
    return large;
}

/* x[j][r] = k[j] . q[r] */
static void pairs_scores(const panel *pn, span s)
{
    const int64_t dim = pn->p->dim;
    pairs_rows(s.padded, pn->k_pairs, operand_row(dim), pairs_of(dim), pn->qt, pn->br, pn->x_rows,
               pn->br, pn->width, pn->later);
}

#endif
