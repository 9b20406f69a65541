/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of numbers: loaded from and stored as any type, filled, scaled and transposed. Rows of
 * floats in scratch are padded to whole vectors; those of tensors end where they end.
 */
#ifndef FATTN_CPU_ROWS_H
#define FATTN_CPU_ROWS_H

#include <string.h>

#include "backends/cpu/unit.h"

/* Two neighbours along a sum. Memory of them has the alignment of one. */
typedef struct bf16_pair {
    uint16_t first, second;
} bf16_pair;

/* Vectors that hold n numbers. */
static int64_t vectors_of(int64_t n) { return (n + FV_LANES - 1) / FV_LANES; }

/* Of n numbers, those in whole vectors: a mask, because signed numbers are divided slowly. */
static int64_t in_whole_vectors(int64_t n) { return n & -(int64_t)FV_LANES; }

static void fill(float *to, int64_t n, float x)
{
    for (int64_t c = 0; c < n; c++) {
        to[c] = x;
    }
}

/* x *= f for some rows of floats, padded to vectors. */
static void scale_rows(float *x, int64_t rows, int64_t stride, int64_t n, fv f)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < n; c += FV_LANES) {
            fv_store(x + r * stride + c, fv_mul(f, fv_load(x + r * stride + c)));
        }
    }
}

#define SIZE_OF(dtype) ((dtype) == FATTN_F32 ? 4 : 2) /* fattn_dtype_size() that compilers know */

/* `part` numbers of a vector from and as dtype, a literal; zeros in the other lanes. */
INLINE fv load_as(fattn_dtype dtype, const void *from, int part)
{
    uint16_t some[FV_LANES] = {0};
    if (dtype == FATTN_F32) {
        return part == FV_LANES ? fv_load(from) : fv_load_part(from, part);
    }
    if (part < FV_LANES) {
        memcpy(some, from, (size_t)part * sizeof *some);
        from = some;
    }
    return dtype == FATTN_F16 ? fv_load_f16(from) : fv_load_bf16(from);
}
INLINE void store_as(fattn_dtype dtype, void *to, fv x, int part)
{
    uint16_t some[FV_LANES];
    void *const at = part < FV_LANES ? some : to;
    switch (dtype) {
    case FATTN_F16: fv_store_f16(at, x); break;
    case FATTN_BF16: fv_store_bf16(at, x); break;
    default: part < FV_LANES ? fv_store_part(to, x, part) : fv_store(to, x); return;
    }
    if (part < FV_LANES) {
        memcpy(to, some, (size_t)part * sizeof *some);
    }
}

/* to[0 .. n) = from[0 .. n), and zeros up to whole vectors. */
INLINE void row_load_as(fattn_dtype dtype, float *to, const char *from, int64_t n)
{
    const int64_t whole = in_whole_vectors(n);
    const int part = (int)(n - whole);
    for (int64_t c = 0; c < whole; c += FV_LANES) {
        fv_store(to + c, load_as(dtype, from + c * SIZE_OF(dtype), FV_LANES));
    }
    if (part) {
        fv_store(to + whole, load_as(dtype, from + whole * SIZE_OF(dtype), part));
    }
}
static void row_load(float *to, fattn_dtype dtype, const void *from, int64_t n)
{
    if (dtype == FATTN_F32) {
        row_load_as(FATTN_F32, to, from, n);
    } else if (dtype == FATTN_F16) {
        row_load_as(FATTN_F16, to, from, n);
    } else {
        row_load_as(FATTN_BF16, to, from, n);
    }
}

/* to[0 .. n) = factor * from[0 .. n), rounded once. from is padded to whole vectors. */
INLINE void row_store_as(fattn_dtype dtype, char *to, const float *from, int64_t n, fv factor)
{
    const int64_t whole = in_whole_vectors(n);
    const int part = (int)(n - whole);
    for (int64_t c = 0; c < whole; c += FV_LANES) {
        store_as(dtype, to + c * SIZE_OF(dtype), fv_mul(factor, fv_load(from + c)), FV_LANES);
    }
    if (part) {
        store_as(dtype, to + whole * SIZE_OF(dtype), fv_mul(factor, fv_load(from + whole)), part);
    }
}
static void row_store(void *to, fattn_dtype dtype, const float *from, int64_t n, float factor)
{
    const fv f = fv_set1(factor);
    if (dtype == FATTN_F32) {
        row_store_as(FATTN_F32, to, from, n, f);
    } else if (dtype == FATTN_F16) {
        row_store_as(FATTN_F16, to, from, n, f);
    } else {
        row_store_as(FATTN_BF16, to, from, n, f);
    }
}

#if FV_PAIRS
/* The instruction that rounds to bf16 may take a number below the normal range for 0: where there
 * is a 0 among what it made, and it was not one before, rounding is done again without it. */
static const bf16_pair no_zero = {0xffff, 0xffff};

/* The smaller of `least` and |x|, or 1 for 0, lane by lane. */
INLINE fv least_but_zero(fv least, fv x)
{
    return fv_min(fv_select(fv_eq(x, fv_set1(0)), fv_set1(1), fv_abs(x)), least); /* drops NaN */
}
INLINE bool is_normal(fv least) { return mv_all(fv_le(fv_set1(0x1p-126f), least)); }

/* to = bf16 of nq vectors, a literal; an odd one is rounded with itself. Returns `least` and these
 * numbers as pv_least() collects them. */
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

/* A register tile as rows of bf16, `step` bytes apart. */
INLINE void round_tile(char *to, int64_t step, int nq, fv x[FV_NK][FV_NQ])
{
    float rows[FV_NK][FV_NQ * FV_LANES]; /* hardly ever used, or the sums would lie there */
    pv least = pv_set1(&no_zero);
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
#endif

/* A register tile of nq vectors a row becomes rows of dtype, `step` bytes apart; literals. */
INLINE void store_tile(fattn_dtype dtype, char *to, int64_t step, int nq, fv x[FV_NK][FV_NQ])
{
#if FV_PAIRS
    if (dtype == FATTN_BF16) {
        round_tile(to, step, nq, x);
        return;
    }
#endif
#pragma GCC unroll 8
    for (int m = 0; m < FV_NK; m++) {
        for (int q = 0; q < nq; q++) {
            store_as(dtype, to + m * step + q * FV_LANES * SIZE_OF(dtype), x[m][q], FV_LANES);
        }
    }
}

/* to[0 .. n) = bf16 of factor * from[0 .. n), two vectors at a time. False where there is no
 * instruction for it, or where it was wrong. */
INLINE bool row_round(char *to, const float *from, int64_t n, fv factor)
{
#if FV_PAIRS
    pv least = pv_set1(&no_zero);
    for (int64_t c = 0; c < n; c += 2 * FV_LANES) {
        const fv x[2] = {fv_mul(factor, fv_load(from + c)),
                         fv_mul(factor, fv_load(from + c + FV_LANES))};
        least = round_vectors(to + 2 * c, 2, x, least);
    }
    fv smallest = fv_set1(1);
    for (int64_t c = 0; c < n && pv_any_zero(least); c += FV_LANES) {
        smallest = least_but_zero(smallest, fv_mul(factor, fv_load(from + c)));
    }
    return is_normal(smallest);
#else
    (void)to, (void)from, (void)n, (void)factor;
    return false;
#endif
}

/* Rows of n numbers, whole vectors, between an array of floats, [rows][n], and one of dtype, a
 * literal, in which they are `step` bytes apart; factors: [rows], of what is stored. */
INLINE void rows_load(float *to, fattn_dtype dtype, const char *from, int64_t step, int64_t rows,
                      int64_t n)
{
    for (int64_t r = 0; r < rows; r++, to += n, from += step) {
        for (int64_t c = 0; c < n; c += FV_LANES) {
            fv_store(to + c, load_as(dtype, from + c * SIZE_OF(dtype), FV_LANES));
        }
    }
}
INLINE void rows_store(char *to, fattn_dtype dtype, int64_t step, const float *from,
                       const float *factors, int64_t rows, int64_t n)
{
    for (int64_t r = 0; r < rows; r++, to += step, from += n) {
        const fv factor = fv_set1(factors[r]);
        if (dtype == FATTN_BF16 && n % (2 * FV_LANES) == 0 && row_round(to, from, n, factor)) {
            continue;
        }
        for (int64_t c = 0; c < n; c += FV_LANES) {
            const fv x = fv_mul(factor, fv_load(from + c));
            store_as(dtype, to + c * SIZE_OF(dtype), x, FV_LANES);
        }
    }
}

/* rows[n] = row n of an array. */
static void point_rows(float **rows, int64_t count, float *first, int64_t stride)
{
    for (int64_t n = 0; n < count; n++) {
        rows[n] = first + n * stride;
    }
}

static const void *element(const void *array, fattn_dtype dtype, int64_t index)
{
    return (const char *)array + index * fattn_dtype_size(dtype);
}

/* to[c][r] = from[r][c] for a square of FV_LANES x FV_LANES. */
INLINE void transpose_square(const float *from, int64_t from_stride, float *to, int64_t to_stride)
{
    fv x[FV_LANES];
    fv_load_turned(from, from_stride, x);
    for (int c = 0; c < FV_LANES; c++) {
        fv_store(to + c * to_stride, x[c]);
    }
}

/* The same for a matrix, of which rows and columns are rounded up to vectors. */
static void transpose(const float *from, int64_t from_stride, int64_t rows, int64_t columns,
                      float *to, int64_t to_stride)
{
    for (int64_t r = 0; r < rows; r += FV_LANES) {
        for (int64_t c = 0; c < columns; c += FV_LANES) {
            transpose_square(from + r * from_stride + c, from_stride, to + c * to_stride + r,
                             to_stride);
        }
    }
}

#endif
