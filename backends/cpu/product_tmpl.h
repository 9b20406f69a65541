/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The matrix products of product.h: a template over what they multiply. Either all parameters are
 * defined, or none, which means floats. The header undefines them at its end.
 *
 *     PRODUCT(name)        the name of a function
 *     WORD                 an element of A and B in memory
 *     ROW, ROW_LOAD        a vector of words
 *     FACTORS, FACTORS_ONE, FACTORS_LOAD
 *                          a group of FV_FACTORS words, of which one or all are loaded
 *     MULADD(a, n, b, c)   adds factor n of a times b to c
 */
#include "backends/cpu/product_tile.h"

#ifndef PRODUCT
#define PRODUCT(name) name
#define WORD float
#define ROW fv
#define ROW_LOAD(x) fv_load(x)
#define FACTORS ff
#define FACTORS_ONE(x) ff_set1(*(x))
#define FACTORS_LOAD(x) ff_load(x)
#define MULADD(a, n, b, c) ff_muladd(a, n, b, c)
#endif

/* Words of a cache line. */
#define LINE (CACHE_LINE / (int64_t)sizeof(WORD))

/* The operands A and B of a product, and how many terms its sums have. */
typedef struct PRODUCT(product_of) {
    const WORD *const *a; /* rows */
    const WORD *b;        /* [depth][b_stride], whole vectors */
    int64_t b_stride, depth;
} PRODUCT(product_of);

/* sum += A B for the terms from r on: `steps` groups of FV_FACTORS. steps: a literal */
INLINE void PRODUCT(rows_steps)(int nq, int steps, fv sum[FV_NK][FV_NQ], const WORD *const *a,
                                int64_t r, const WORD *b, int64_t b_stride)
{
#pragma GCC unroll 4
    for (int step = 0; step < steps; step++, r += FV_FACTORS) {
        ROW row[FV_FACTORS * FV_NQ];
        for (int n = 0; n < FV_FACTORS * nq; n++) {
            row[n] = ROW_LOAD(b + (r + n / nq) * b_stride + n % nq * FV_LANES);
        }
        for (int k = 0; k < FV_NK; k++) {
            const FACTORS factors = FACTORS_LOAD(a[k] + r);
            for (int n = 0; n < FV_FACTORS * nq; n++) {
                sum[k][n % nq] = MULADD(factors, n / nq, row[n], sum[k][n % nq]);
            }
        }
    }
}

/* What a tile of product_rows() prefetches while it multiplies. */
typedef struct PRODUCT(rows_ahead) {
    const WORD *const *a; /* the rows of A of the next tile, which are in the second-level cache */
    const prefetch_row *later, *past;
} PRODUCT(rows_ahead);

/* The first FV_NK rows of A times nq vectors of columns from `column` on, the last of which has
 * `last` lanes. c: rows, which are prefetched, too, where the product is added to them */
INLINE void PRODUCT(rows_tile)(int nq, int last, float times, PRODUCT(product_of) ab,
                               PRODUCT(rows_ahead) ahead, float *const *c, int64_t column)
{
    fv sum[FV_NK][FV_NQ];
    for (int k = 0; k < FV_NK; k++) {
        for (int q = 0; q < nq; q++) {
            sum[k][q] = fv_set1(0);
        }
    }
    int64_t r = 0;
    /* Each iteration advances the FV_NK pointers once for all of its groups: 2 % of a forward at d
     * 128. */
    for (; r + FV_UNROLL * FV_FACTORS <= ab.depth; r += FV_UNROLL * FV_FACTORS) {
        if (r % LINE == 0) {
            for (int k = 0; k < FV_NK && nq > 1; k++) {
                __builtin_prefetch(ahead.a[k] + r);
            }
            for (int q = 0; q < nq && times != 0 && r / LINE < FV_NK; q++) {
                __builtin_prefetch(c[r / LINE] + column + q * FV_LANES, 1);
            }
            prefetch_lines(ahead.later, ahead.past, r * (int64_t)sizeof(WORD));
        }
        PRODUCT(rows_steps)(nq, FV_UNROLL, sum, ab.a, r, ab.b, ab.b_stride);
    }
    for (; r + FV_FACTORS <= ab.depth; r += FV_FACTORS) {
        PRODUCT(rows_steps)(nq, 1, sum, ab.a, r, ab.b, ab.b_stride);
    }
    if (FV_FACTORS > 1 && r < ab.depth) {
        for (int k = 0; k < FV_NK; k++) {
            const FACTORS factor = FACTORS_ONE(ab.a[k] + r);
            for (int q = 0; q < nq; q++) {
                const ROW row = ROW_LOAD(ab.b + r * ab.b_stride + q * FV_LANES);
                sum[k][q] = MULADD(factor, 0, row, sum[k][q]);
            }
        }
    }
    const fv f = fv_set1(times);
    /* Unrolled, or gcc would keep the sums in memory to index them. */
#pragma GCC unroll 8
    for (int k = 0; k < FV_NK; k++) {
        for (int q = 0; q < nq; q++) {
            float *const at = c[k] + column + q * FV_LANES;
            if (q == nq - 1 && last < FV_LANES) {
                const fv before = times != 0 ? fv_load_part(at, last) : fv_set1(0);
                fv_store_part(at, times != 0 ? fv_muladd(f, sum[k][q], before) : sum[k][q], last);
            } else {
                fv_store(at, times != 0 ? fv_muladd(f, sum[k][q], fv_load(at)) : sum[k][q]);
            }
        }
    }
}

/*
 * C_k = sum_r A_k[r] B[r] where times is 0, else C_k += times sum_r A_k[r] B[r], for k < rows and
 * columns first .. columns - 1. Each register tile prefetches one step of `later`; what is left of
 * it is returned.
 * a: rows of [depth]; c: rows of floats, not padded.
 * Not cloned: in a clone for a known `times`, gcc keeps some sums on the stack. Unused in units of
 * pairs that have no products of floats.
 */
static NOCLONE __attribute__((unused)) prefetch_list
PRODUCT(product_rows)(float times, int64_t rows, PRODUCT(product_of) ab, float *const *c,
                      int64_t first, int64_t columns, prefetch_list later)
{
    int64_t vectors;
    for (int64_t column = first; column < columns; column += vectors * FV_LANES) {
        const int64_t left = columns - column;
        vectors = tile_vectors(left);
        const int last = (int)fattn_min64(left - (vectors - 1) * FV_LANES, FV_LANES);
        for (int64_t k = 0; k < rows; k += FV_NK) {
            const bool more = k + FV_NK < rows || later.a_continues;
            PRODUCT(rows_ahead) ahead = {.a = ab.a + (more ? k + FV_NK : k)};
            PRODUCT(product_of) tile = ab;
            tile.a = ab.a + k;
            tile.b = ab.b + column;
            ahead.later = later.rows + fattn_min64(later.next, later.count);
            later.next += later.step;
            ahead.past = later.rows + fattn_min64(later.next, later.count);
            prefetch_rest(ahead.later, ahead.past, (ab.depth + LINE - 1) / LINE * CACHE_LINE);
#define TILE(nq) PRODUCT(rows_tile)(nq, last, times, tile, ahead, c + k, column)
            PRODUCT_WIDTHS(vectors, TILE)
#undef TILE
        }
    }
    return later;
}

/* sum[m] = sum_r A_r[first + m] B[r] for nm rows by nq vectors. nm, nq: literals */
INLINE void PRODUCT(columns_sum)(int nm, int nq, fv sum[][FV_NQ], PRODUCT(product_of) ab,
                                 int64_t first)
{
    const int group = nm < FV_FACTORS ? nm : FV_FACTORS;
    for (int m = 0; m < nm; m++) {
        for (int q = 0; q < nq; q++) {
            sum[m][q] = fv_set1(0);
        }
    }
    for (int64_t r = 0; r < ab.depth; r++) {
        const WORD *const factors = ab.a[r] + first;
        __builtin_prefetch(factors + nm); /* of the next tile */
        ROW row[FV_NQ];
        for (int q = 0; q < nq; q++) {
            row[q] = ROW_LOAD(ab.b + r * ab.b_stride + q * FV_LANES);
        }
        for (int m = 0; m < nm; m += group) {
            const FACTORS factor =
                group == 1 ? FACTORS_ONE(factors + m) : FACTORS_LOAD(factors + m);
            for (int n = 0; n < group * nq; n++) {
                fv *const at = &sum[m + n / nq][n % nq];
                *at = MULADD(factor, n / nq, row[n % nq], *at);
            }
        }
    }
}

/* Where product_columns() and product_values() add a tile to C, and how they scale C before. */
typedef struct PRODUCT(column_sums) {
    bool fresh;        /* C is overwritten and not read */
    const fv *alpha;   /* [nq] factors of the old C, one per column; or NULL */
    const float *beta; /* [nm] one per row; or NULL, as at least one of the two is */
    float *c;          /* [nm][c_stride] */
    int64_t c_stride;
} PRODUCT(column_sums);

/* C for nm rows from `first` on by nq vectors. nm, nq: literals */
INLINE void PRODUCT(columns_tile)(int nm, int nq, PRODUCT(product_of) ab, int64_t first,
                                  PRODUCT(column_sums) to)
{
    fv sum[2 * FV_NK][FV_NQ];
    PRODUCT(columns_sum)(nm, nq, sum, ab, first);
#pragma GCC unroll 16
    for (int m = 0; m < nm; m++) {
        for (int q = 0; q < nq; q++) {
            float *const at = to.c + m * to.c_stride + q * FV_LANES;
            if (to.fresh) {
                fv_store(at, sum[m][q]);
                continue;
            }
            const fv before = fv_load(at);
            fv_store(at, to.alpha  ? fv_muladd(before, to.alpha[q], sum[m][q])
                         : to.beta ? fv_muladd(before, fv_set1(to.beta[m]), sum[m][q])
                                   : fv_add(before, sum[m][q]));
        }
    }
}

/*
 * C[m] = C[m] alpha + sum_r A_r[m] B[r] for m < rows, any number. alpha: NULL for 1. fresh: C is
 * overwritten and not read.
 * a: rows of [rows]; c: [rows][columns], alpha: [columns], padded to vectors.
 */
static void PRODUCT(product_columns)(int64_t rows, bool fresh, const float *alpha,
                                     PRODUCT(product_of) ab, float *c, int64_t c_stride,
                                     int64_t columns)
{
    int64_t vectors;
    for (int64_t column = 0; column < columns; column += vectors * FV_LANES) {
        vectors = tile_vectors(columns - column);
        fv factor[FV_NQ];
        for (int64_t q = 0; alpha && q < vectors; q++) {
            factor[q] = fv_load(alpha + column + q * FV_LANES);
        }
        PRODUCT(product_of) tile = ab;
        tile.b = ab.b + column;
        PRODUCT(column_sums)
        to = {.fresh = fresh, .alpha = alpha ? factor : NULL, .c_stride = c_stride};
        int64_t m = 0;
#define TILE(nm, nq)                  \
    to.c = c + m * c_stride + column; \
    PRODUCT(columns_tile)(nm, nq, tile, m, to)
#define ROWS_TILE(nq) TILE(FV_NK, nq)
#define ROW_TILE(nq) TILE(1, nq)
        /* A tile of one vector by FV_NK rows has too few sums to hide the latency of a
         * multiply-add. Twice as many rows do, and their factors share a cache line of A. */
        for (; vectors == 1 && m + 2 * FV_NK <= rows; m += 2 * FV_NK) {
            TILE(2 * FV_NK, 1);
        }
        for (; m + FV_NK <= rows; m += FV_NK) {
            PRODUCT_WIDTHS(vectors, ROWS_TILE)
        }
        for (; m < rows; m++) {
            PRODUCT_WIDTHS(vectors, ROW_TILE)
        }
#undef ROW_TILE
#undef ROWS_TILE
#undef TILE
    }
}

/* product_values() with literal `fresh` and with beta either NULL or not: otherwise gcc makes one
 * slow tile for both. */
INLINE void PRODUCT(values_rows)(int64_t rows, bool fresh, const float *beta,
                                 PRODUCT(product_of) ab, float *c, int64_t c_stride,
                                 int64_t columns)
{
    for (int64_t m = 0; m < rows; m += FV_NK) {
        int64_t vectors;
        for (int64_t column = 0; column < columns; column += vectors * FV_LANES) {
            vectors = tile_vectors(columns - column);
            PRODUCT(product_of) tile = ab;
            tile.b = ab.b + column;
            const PRODUCT(column_sums) to = {.fresh = fresh,
                                             .beta = beta ? beta + m : NULL,
                                             .c = c + m * c_stride + column,
                                             .c_stride = c_stride};
#define TILE(nq) PRODUCT(columns_tile)(FV_NK, nq, tile, m, to)
            PRODUCT_WIDTHS(vectors, TILE)
#undef TILE
        }
    }
}

/*
 * C[m] = C[m] beta[m] + sum_r A_r[m] B[r] for m < rows. beta: NULL for 1. fresh: C is overwritten
 * and not read.
 */
APART void PRODUCT(product_values)(int64_t rows, bool fresh, const float *beta,
                                   PRODUCT(product_of) ab, float *c, int64_t c_stride,
                                   int64_t columns)
{
    if (fresh) {
        PRODUCT(values_rows)(rows, true, NULL, ab, c, c_stride, columns);
    } else {
        PRODUCT(values_rows)(rows, false, beta, ab, c, c_stride, columns);
    }
}

/* Rows first .. first + FV_NK - 1 of product_results(). dtype: a literal; factors: those of these
 * rows, or NULL; c: rows `step` bytes apart */
INLINE void PRODUCT(results_tile)(int nq, const float *factors, PRODUCT(product_of) ab,
                                  int64_t first, fattn_dtype dtype, char *c, int64_t step)
{
    fv sum[FV_NK][FV_NQ];
    PRODUCT(columns_sum)(FV_NK, nq, sum, ab, first);
#pragma GCC unroll 8
    for (int m = 0; m < FV_NK; m++) {
        for (int q = 0; q < nq; q++) {
            sum[m][q] = factors ? fv_mul(fv_set1(factors[m]), sum[m][q]) : sum[m][q];
        }
    }
    store_tile(dtype, c, step, nq, sum);
}

INLINE void PRODUCT(results_as)(fattn_dtype dtype, int64_t rows, const float *factors,
                                PRODUCT(product_of) ab, char *c, int64_t step, int64_t columns)
{
    for (int64_t next = 0; next < rows; next += FV_NK) {
        const int64_t m = fattn_min64(next, rows - FV_NK);
        const float *const of_rows = factors ? factors + m : NULL;
        int64_t vectors;
        for (int64_t column = 0; column < columns; column += vectors * FV_LANES) {
            char *const to = c + m * step + column * SIZE_OF(dtype);
            PRODUCT(product_of) tile = ab;
            tile.b = ab.b + column;
            vectors = tile_vectors(columns - column);
#define TILE(nq) PRODUCT(results_tile)(nq, of_rows, tile, m, dtype, to, step)
            if (FV_PAIRS && dtype == FATTN_BF16 && vectors > 1) { /* rounded two at a time */
                vectors = 2;
                TILE(2 <= FV_NQ ? 2 : 1);
                continue;
            }
            PRODUCT_WIDTHS(vectors, TILE)
#undef TILE
        }
    }
}

/*
 * C[m] = factors[m] sum_r A_r[m] B[r] for m < rows. rows: any number from FV_NK on, since the last
 * tile may compute rows again that it shares with the one before. factors: NULL for 1.
 * a: rows of [rows]; columns: whole vectors; c: rows of dtype, `step` bytes apart.
 */
APART void PRODUCT(product_results)(int64_t rows, const float *factors, PRODUCT(product_of) ab,
                                    fattn_dtype dtype, char *c, int64_t step, int64_t columns)
{
#define RESULTS(dtype) PRODUCT(results_as)(dtype, rows, factors, ab, c, step, columns)
    switch (dtype) {
    case FATTN_F16: RESULTS(FATTN_F16); break;
    case FATTN_BF16: RESULTS(FATTN_BF16); break;
    default: RESULTS(FATTN_F32); break;
    }
#undef RESULTS
}

#undef LINE
#undef PRODUCT
#undef WORD
#undef ROW
#undef ROW_LOAD
#undef FACTORS
#undef FACTORS_ONE
#undef FACTORS_LOAD
#undef MULADD
