/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores results: register tiles, rows and columns of floats, rounded to the type of a tensor.
 * Units that multiply pairs round two vectors to bf16 at a time.
 */
#ifndef FATTN_CPU_ROUND_H
#define FATTN_CPU_ROUND_H

#include "backends/cpu/rows.h"

/* store_tile() vector by vector, with store_as(). */
INLINE void tile_store_as(fattn_dtype dtype, char *to, int64_t step, int nq, fv x[FV_NK][FV_NQ])
{
#pragma GCC unroll 8
    for (int m = 0; m < FV_NK; m++) {
        for (int q = 0; q < nq; q++) {
            store_as(dtype, to + m * step + q * FV_LANES * SIZE_OF(dtype), x[m][q], FV_LANES);
        }
    }
}

/* pairs[n] = columns 2n and 2n + 1 side by side, multiplied by factor and rounded to bf16, for n <
 * FV_LANES. */
INLINE void columns_store(const float *from, int64_t stride, fv factor, float *pairs)
{
    for (int n = 0; n < FV_LANES; n++) {
        const float *const two = from + 2 * n * stride;
        const uv first = fv_bf16_bits(fv_mul(factor, fv_load(two)));
        const uv second = fv_bf16_bits(fv_mul(factor, fv_load(two + stride)));
        const uv pair = uv_xor(uv_shr(first, 16), uv_and(second, uv_set1(0xffff0000)));
        fv_store(pairs + n * FV_LANES, fv_from_bits(pair));
    }
}

#if FV_PAIRS

/* The instruction that rounds to bf16 may flush subnormal numbers to 0. Where a result is 0 and its
 * operand was not, the numbers are rounded again without that instruction. */
static const bf16_pair largest = {0xffff, 0xffff};

/* The smaller of `least` and |x| in each lane, with 1 in place of an x that is 0. */
INLINE fv least_but_zero(fv least, fv x)
{
    /* fv_min() drops NaN */
    return fv_min(fv_select(fv_eq(x, fv_set1(0)), fv_set1(1), fv_abs(x)), least);
}
INLINE bool is_normal(fv least) { return mv_all(fv_le(fv_set1(0x1p-126f), least)); }

/* to = nq vectors rounded to bf16. If nq is odd, the last vector is paired with itself. nq: a
 * literal. Returns the minimum that pv_least() collects of `least` and these numbers. */
INLINE pv round_vectors(void *to, int nq, const fv *x, pv least)
{
    uint16_t *const at = to;
    for (int q = 0; q < nq; q += 2) {
        const bool two = q + 1 < nq;
        const pv rounded = pv_round(x[q], two ? x[q + 1] : x[q]);
        if (two) {
            pv_store(at + q * FV_LANES, rounded);
        } else {
            pv_store_rows(at + q * FV_LANES, at + q * FV_LANES, rounded);
        }
        least = pv_least(least, rounded);
    }
    return least;
}

/* tile_store_as() of bf16. */
INLINE void round_tile(char *to, int64_t step, int nq, fv x[FV_NK][FV_NQ])
{
    /* Used only in the rare case below, so that x stays in registers. */
    float rows[FV_NK][FV_NQ * FV_LANES];
    pv least = pv_set1(&largest);
#pragma GCC unroll 8
    for (int m = 0; m < FV_NK; m++) {
        least = round_vectors(to + m * step, nq, x[m], least);
    }
    if (!pv_any_zero(least)) {
        return;
    }
    fv smallest = fv_set1(1);
#pragma GCC unroll 8
    for (int m = 0; m < FV_NK; m++) {
        for (int q = 0; q < nq; q++) {
            smallest = least_but_zero(smallest, x[m][q]);
        }
    }
    if (is_normal(smallest)) {
        return;
    }
#pragma GCC unroll 8
    for (int m = 0; m < FV_NK; m++) {
        for (int q = 0; q < nq; q++) {
            fv_store(rows[m] + q * FV_LANES, x[m][q]);
        }
    }
    for (int m = 0; m < FV_NK; m++) {
        row_store(to + m * step, FATTN_BF16, rows[m], nq * FV_LANES, 1);
    }
}

/* to[0 .. n) = bf16 of factor * from[0 .. n); n: whole pairs of vectors */
INLINE void round_row(char *to, const float *from, int64_t n, fv factor)
{
    pv least = pv_set1(&largest);
    for (int64_t c = 0; c < n; c += 2 * FV_LANES) {
        const fv x[2] = {fv_mul(factor, fv_load(from + c)),
                         fv_mul(factor, fv_load(from + c + FV_LANES))};
        least = round_vectors(to + 2 * c, 2, x, least);
    }
    fv smallest = fv_set1(1);
    for (int64_t c = 0; c < n && pv_any_zero(least); c += FV_LANES) {
        smallest = least_but_zero(smallest, fv_mul(factor, fv_load(from + c)));
    }
    if (!is_normal(smallest)) {
        row_store_as(FATTN_BF16, to, from, n, factor);
    }
}

/* columns_store() */
INLINE void round_columns(const float *from, int64_t stride, fv factor, float *pairs)
{
    pv least = pv_set1(&largest);
    for (int n = 0; n < FV_LANES; n++) {
        const fv first = fv_mul(factor, fv_load(from + 2 * n * stride));
        const fv second = fv_mul(factor, fv_load(from + (2 * n + 1) * stride));
        const pv rounded = pv_round(first, second);
        pv_store(pairs + n * FV_LANES, pv_twist(rounded));
        least = pv_least(least, rounded);
    }
    fv smallest = fv_set1(1);
    for (int n = 0; n < 2 * FV_LANES && pv_any_zero(least); n++) {
        smallest = least_but_zero(smallest, fv_mul(factor, fv_load(from + n * stride)));
    }
    if (!is_normal(smallest)) {
        columns_store(from, stride, factor, pairs);
    }
}

#else

INLINE void round_tile(char *to, int64_t step, int nq, fv x[FV_NK][FV_NQ])
{
    tile_store_as(FATTN_BF16, to, step, nq, x);
}
INLINE void round_row(char *to, const float *from, int64_t n, fv factor)
{
    row_store_as(FATTN_BF16, to, from, n, factor);
}
INLINE void round_columns(const float *from, int64_t stride, fv factor, float *pairs)
{
    columns_store(from, stride, factor, pairs);
}

#endif

/* Stores a register tile of nq vectors per row as rows of dtype, `step` bytes apart. dtype, nq:
 * literals. Rounds bf16 two vectors at a time where the unit can. */
INLINE void store_tile(fattn_dtype dtype, char *to, int64_t step, int nq, fv x[FV_NK][FV_NQ])
{
    if (dtype == FATTN_BF16) {
        round_tile(to, step, nq, x);
    } else {
        tile_store_as(dtype, to, step, nq, x);
    }
}

/* Stores rows of n floats, whole vectors, times factors[r], as rows of dtype, `step` bytes apart.
 * from: [rows][n]; factors: [rows]; dtype: a literal */
INLINE void rows_store(char *to, fattn_dtype dtype, int64_t step, const float *from,
                       const float *factors, int64_t rows, int64_t n)
{
    for (int64_t r = 0; r < rows; r++, to += step, from += n) {
        const fv factor = fv_set1(factors[r]);
        if (dtype == FATTN_BF16 && n % (2 * FV_LANES) == 0) {
            round_row(to, from, n, factor);
        } else {
            row_store_as(dtype, to, from, n, factor);
        }
    }
}

#endif
