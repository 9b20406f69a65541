/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of numbers: loads and stores in any type, filling, scaling and transposing. Rows of floats
 * in scratch are padded to whole vectors; rows of tensors are not.
 */
#ifndef FATTN_CPU_ROWS_H
#define FATTN_CPU_ROWS_H

#include <string.h>

#include "backends/cpu/unit.h"

/* Two neighbours along a sum. In memory they need only the alignment of one number. */
typedef struct bf16_pair {
    uint16_t first, second;
} bf16_pair;

/* Vectors that hold n numbers. */
static int64_t vectors_of(int64_t n) { return (n + FV_LANES - 1) / FV_LANES; }

/* The stride of rows of n floats as an operand of products: whole vectors, and for matrix
 * registers an odd number of them. Such rows are spread over all sets of the first-level cache. */
static int64_t operand_stride(int64_t n)
{
    return (FV_TILES ? vectors_of(n) | 1 : vectors_of(n)) * FV_LANES;
}

/* The stride of rows of q or k, in floats; a pair of bf16 takes one. */
static int64_t operand_row(int64_t dim) { return operand_stride(FV_PAIRS ? (dim + 1) / 2 : dim); }

/* The part of n numbers that fills whole vectors. A mask, since division of signed numbers is
 * slow. */
static int64_t in_whole_vectors(int64_t n) { return n & -(int64_t)FV_LANES; }

static void fill(float *to, int64_t n, float x)
{
    for (int64_t c = 0; c < n; c++) {
        to[c] = x;
    }
}

/* x *= f for rows of n floats, padded to vectors. */
static void scale_rows(float *x, int64_t rows, int64_t stride, int64_t n, fv f)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < n; c += FV_LANES) {
            fv_store(x + r * stride + c, fv_mul(f, fv_load(x + r * stride + c)));
        }
    }
}

/* fattn_dtype_size() as a constant expression */
#define SIZE_OF(dtype) ((dtype) == FATTN_F32 ? 4 : (dtype) == FATTN_E4M3 ? 1 : 2)

/* The first `part` numbers of a vector, loaded from or stored as dtype, a literal, which is no e4m3
 * in a store. Loads set the other lanes to 0. */
INLINE fv load_as(fattn_dtype dtype, const void *from, int part)
{
    const bool whole = part == FV_LANES;
    switch (dtype) {
    case FATTN_F16: return whole ? fv_load_f16(from) : fv_load_part_f16(from, part);
    case FATTN_BF16: return whole ? fv_load_bf16(from) : fv_load_part_bf16(from, part);
    case FATTN_E4M3: return whole ? fv_load_e4m3(from) : fv_load_part_e4m3(from, part);
    default: return whole ? fv_load(from) : fv_load_part(from, part);
    }
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
    if (part > 0 && part < FV_LANES) { /* with one lane never, as compilers then see */
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
    } else if (dtype == FATTN_BF16) {
        row_load_as(FATTN_BF16, to, from, n);
    } else {
        row_load_as(FATTN_E4M3, to, from, n);
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

/* to = rows of n numbers of dtype, `step` bytes apart, as floats. to: [rows][n]; n: whole vectors;
 * dtype: a literal */
INLINE void rows_load(float *to, fattn_dtype dtype, const char *from, int64_t step, int64_t rows,
                      int64_t n)
{
    for (int64_t r = 0; r < rows; r++, to += n, from += step) {
        for (int64_t c = 0; c < n; c += FV_LANES) {
            fv_store(to + c, load_as(dtype, from + c * SIZE_OF(dtype), FV_LANES));
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
    fv_load_transposed(from, from_stride, x);
    for (int c = 0; c < FV_LANES; c++) {
        fv_store(to + c * to_stride, x[c]);
    }
}

/* The same for a matrix. Its rows and columns are rounded up to vectors. */
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
