/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The matrix products, all of one shape: a register tile of FV_NK rows by up to FV_NQ vectors, to
 * which every step adds a broadcast number times a row of vectors. Rows are given by pointers, so
 * that keys in pages, with any stride and past the end (a row of zeros, or one whose results nobody
 * reads) are the same code. Numbers of rows are multiples of FV_NK unless said otherwise. A tile is
 * summed from zero and then added to what C holds, if anything: rounding errors grow with the
 * length of a tile, not with that of the sequence.
 *
 *     product_rows      C_k  (+)= times sum_r A_k[r] B[r]         A_k contiguous along the sum
 *     product_columns   C[m]  =  C[m] alpha + sum_r A_r[m] B[r]   A_r contiguous along m
 *     product_values    the same, with a factor for each row and not for each column
 *     product_results   C[m]  =  factor sum_r A_r[m] B[r], rounded to the type of a tensor
 *
 * A and B consist of words: floats, or with FATTN_PAIRS defined and _pairs after every name, pairs
 * of bf16 that are neighbours along the sum. depth counts words.
 */

#ifdef FATTN_PAIRS
#define PRODUCT(name) name##_pairs
#define WORD bf16_pair
#define GROUP FV_FACTORS
#define ROW pv
#define ROW_LOAD(x) pv_load(x)
#define FACTORS pf
#define FACTORS_ONE(x) pf_set1(x)
#define FACTORS_LOAD(x) pf_load(x)
#define MULADD(a, n, b, c) pf_muladd(a, n, b, c)

#if FV_FACTORS == 1
typedef pv pf;
static inline pf pf_set1(const void *pair) { return pv_set1(pair); }
static inline pf pf_load(const void *pair) { return pv_set1(pair); }
static inline fv pf_muladd(pf a, int n, pv b, fv c)
{
    (void)n;
    return fv_muladd_pairs(a, b, c);
}
#endif
#else
#define PRODUCT(name) name
#define WORD float
#define GROUP FV_FACTORS
#define ROW fv
#define ROW_LOAD(x) fv_load(x)
#define FACTORS ff
#define FACTORS_ONE(x) ff_set1(*(x))
#define FACTORS_LOAD(x) ff_load(x)
#define MULADD(a, n, b, c) ff_muladd(a, n, b, c)

/* Where a factor must be spread over the lanes first, a group of factors is a single one. ff_muladd
 * adds factor n of the group times b to c. */
#ifndef FV_FACTORS
#define FV_FACTORS 1
typedef fv ff;
static inline ff ff_set1(float x) { return fv_set1(x); }
static inline ff ff_load(const float *x) { return fv_set1(*x); }
static inline fv ff_muladd(ff a, int n, fv b, fv c)
{
    (void)n;
    return fv_muladd(a, b, c);
}
#endif

/* Groups of terms a round. Where registers do not hold the operands of a second group, be it of
 * pairs of factors or because there are 16, gcc would load early or load twice. */
enum { ROWS_UNROLL = FV_FACTORS == 1 && FV_NK > 4 ? 4 : 1 };
_Static_assert(FV_FACTORS <= 2 && FV_NK % FV_FACTORS == 0, "tiles hold whole groups of factors");

/* Rows to fetch into the second-level cache, from number `next` on, `step` of them with each
 * register tile, a line of each at a time: many at once would take the buffers that the tile's own
 * lines need. The few that a product is too short for come first. */
typedef struct prefetch_row {
    const char *from;
    int64_t bytes;
} prefetch_row;
typedef struct prefetch_list {
    const prefetch_row *rows;
    int64_t count, next, step;
    bool goes_on; /* the rows of A after those of this product are those of the next one */
} prefetch_list;

static const prefetch_row no_rows[1];
#define NO_PREFETCH ((prefetch_list){.rows = no_rows})

/* Rows that `tiles` register tiles fetch. */
static prefetch_list spread_rows(const prefetch_row *rows, int64_t count, int64_t tiles)
{
    return (prefetch_list){.rows = rows, .count = count, .step = (count + tiles - 1) / tiles};
}

/* The line at `byte` of each row. */
static inline void prefetch_lines(const prefetch_row *row, const prefetch_row *past, int64_t byte)
{
    for (; row < past; row++) {
        if (byte < row->bytes) {
            __builtin_prefetch(row->from + byte, 0, 2);
        }
    }
}

/* The lines from `byte` on. */
static inline void prefetch_rest(const prefetch_row *row, const prefetch_row *past, int64_t byte)
{
    for (; row < past; row++) {
        for (int64_t at = byte; at < row->bytes; at += CACHE_LINE) {
            __builtin_prefetch(row->from + at, 0, 2);
        }
    }
}

/* Vectors of the next register tile: one alone is slow, so four, say, are not three and one. */
static int64_t tile_vectors(int64_t columns)
{
    const int64_t vectors = vectors_of(columns);
    return vectors == FV_NQ + 1 ? (FV_NQ + 1) / 2 : fattn_min64(vectors, FV_NQ);
}
#endif

/* Tails of a literal width: expands call for nq = 1 .. FV_NQ - 1, and FV_NQ itself. */
_Static_assert(FV_NQ >= 1 && FV_NQ <= 4, "PRODUCT_WIDTHS knows four widths");
#define PRODUCT_WIDTHS(vectors, call)        \
    switch (vectors) {                       \
    case 1: call(1); break;                  \
    case 2: call(2 <= FV_NQ ? 2 : 1); break; \
    case 3: call(3 <= FV_NQ ? 3 : 1); break; \
    default: call(FV_NQ); break;             \
    }

/* Words of a cache line. */
#define LINE (CACHE_LINE / (int64_t)sizeof(WORD))

/* sum += A B of the groups of terms at r, as many as `steps`, a literal. */
INLINE void PRODUCT(rows_steps)(int nq, int steps, fv sum[FV_NK][FV_NQ], const WORD *const *a,
                                int64_t r, const WORD *b, int64_t b_stride)
{
#pragma GCC unroll 4
    for (int step = 0; step < steps; step++, r += GROUP) {
        ROW row[GROUP * FV_NQ];
        for (int n = 0; n < GROUP * nq; n++) {
            row[n] = ROW_LOAD(b + (r + n / nq) * b_stride + n % nq * FV_LANES);
        }
        for (int k = 0; k < FV_NK; k++) {
            const FACTORS factors = FACTORS_LOAD(a[k] + r);
            for (int n = 0; n < GROUP * nq; n++) {
                sum[k][n % nq] = MULADD(factors, n / nq, row[n], sum[k][n % nq]);
            }
        }
    }
}

/* last: lanes of the last vector that C has; FV_LANES for all. ahead: rows of the next tile, which
 * full tiles fetch from the second-level cache meanwhile; and all fetch what they add to, and the
 * rows later .. past - 1. */
INLINE void PRODUCT(rows_tile)(int nq, int last, float times, const WORD *const *a,
                               const WORD *const *ahead, const prefetch_row *later,
                               const prefetch_row *past, int64_t depth, const WORD *b,
                               int64_t b_stride, float *const *c, int64_t column)
{
    fv sum[FV_NK][FV_NQ];
    for (int k = 0; k < FV_NK; k++) {
        for (int q = 0; q < nq; q++) {
            sum[k][q] = fv_set1(0);
        }
    }
    int64_t r = 0;
    /* One step of the FV_NK pointers serves a round: 2 % of a forward at d 128. */
    for (; r + ROWS_UNROLL * GROUP <= depth; r += ROWS_UNROLL * GROUP) {
        if (r % LINE == 0) {
            for (int k = 0; k < FV_NK && nq > 1; k++) {
                __builtin_prefetch(ahead[k] + r);
            }
            for (int q = 0; q < nq && times != 0 && r / LINE < FV_NK; q++) {
                __builtin_prefetch(c[r / LINE] + column + q * FV_LANES, 1);
            }
            prefetch_lines(later, past, r * (int64_t)sizeof(WORD));
        }
        PRODUCT(rows_steps)(nq, ROWS_UNROLL, sum, a, r, b, b_stride);
    }
    for (; r + GROUP <= depth; r += GROUP) {
        PRODUCT(rows_steps)(nq, 1, sum, a, r, b, b_stride);
    }
    if (GROUP > 1 && r < depth) {
        for (int k = 0; k < FV_NK; k++) {
            const FACTORS factor = FACTORS_ONE(a[k] + r);
            for (int q = 0; q < nq; q++) {
                const ROW row = ROW_LOAD(b + r * b_stride + q * FV_LANES);
                sum[k][q] = MULADD(factor, 0, row, sum[k][q]);
            }
        }
    }
    const fv f = fv_set1(times);
    /* Unrolled, or gcc keeps the sums in memory to find them by number. */
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
 * C_k = sum_r A_k[r] B[r], or += `times` times it, where that is not 0, for k < rows and columns
 * from `first` on; register tiles take a step of `later` each. Returns what is left of that.
 * a: [rows][depth] by rows; b: [depth][columns], padded to vectors; c: [rows][columns] by rows, not
 * padded.
 * Not cloned: gcc, told what `times` is, keeps some sums on the stack.
 */
static NOCLONE prefetch_list PRODUCT(product_rows)(float times, int64_t rows, const WORD *const *a,
                                                   int64_t depth, const WORD *b, int64_t b_stride,
                                                   float *const *c, int64_t first, int64_t columns,
                                                   prefetch_list later)
{
    int64_t vectors;
    for (int64_t column = first; column < columns; column += vectors * FV_LANES) {
        const int64_t left = columns - column;
        vectors = tile_vectors(left);
        const int last = (int)fattn_min64(left - (vectors - 1) * FV_LANES, FV_LANES);
        for (int64_t k = 0; k < rows; k += FV_NK) {
            const WORD *const *const ahead =
                a + (k + FV_NK < rows || later.goes_on ? k + FV_NK : k);
            const prefetch_row *const row = later.rows + fattn_min64(later.next, later.count);
            later.next += later.step;
            const prefetch_row *const past = later.rows + fattn_min64(later.next, later.count);
            prefetch_rest(row, past, (depth + LINE - 1) / LINE * CACHE_LINE);
#define TILE(nq)       \
    PRODUCT(rows_tile) \
    (nq, last, times, a + k, ahead, row, past, depth, b + column, b_stride, c + k, column)
            PRODUCT_WIDTHS(vectors, TILE)
#undef TILE
        }
    }
    return later;
}

/* sum[m] = sum_r A_r[first + m] B[r] of nm rows by nq vectors, literals. */
INLINE void PRODUCT(columns_sum)(int nm, int nq, fv sum[][FV_NQ], const WORD *const *a,
                                 int64_t first, int64_t depth, const WORD *b, int64_t b_stride)
{
    const int group = nm < GROUP ? nm : GROUP;
    for (int m = 0; m < nm; m++) {
        for (int q = 0; q < nq; q++) {
            sum[m][q] = fv_set1(0);
        }
    }
    for (int64_t r = 0; r < depth; r++) {
        const WORD *const factors = a[r] + first;
        __builtin_prefetch(factors + nm); /* of the next tile */
        ROW row[FV_NQ];
        for (int q = 0; q < nq; q++) {
            row[q] = ROW_LOAD(b + r * b_stride + q * FV_LANES);
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

/* alpha: of columns, beta: of rows; one of them or none. */
INLINE void PRODUCT(columns_tile)(int nm, int nq, bool fresh, const fv *alpha, const float *beta,
                                  const WORD *const *a, int64_t first, int64_t depth, const WORD *b,
                                  int64_t b_stride, float *c, int64_t c_stride)
{
    fv sum[2 * FV_NK][FV_NQ];
    PRODUCT(columns_sum)(nm, nq, sum, a, first, depth, b, b_stride);
#pragma GCC unroll 16
    for (int m = 0; m < nm; m++) {
        for (int q = 0; q < nq; q++) {
            float *const at = c + m * c_stride + q * FV_LANES;
            if (fresh) {
                fv_store(at, sum[m][q]);
                continue;
            }
            const fv before = fv_load(at);
            fv_store(at, alpha  ? fv_muladd(before, alpha[q], sum[m][q])
                         : beta ? fv_muladd(before, fv_set1(beta[m]), sum[m][q])
                                : fv_add(before, sum[m][q]));
        }
    }
}

/*
 * C[m] = C[m] alpha + sum_r A_r[m] B[r] for m < rows, any number. alpha: NULL for 1. fresh: what C
 * holds counts as 0.
 * a: [depth][rows] by rows; b: [depth][columns], c: [rows][columns], alpha: [columns], padded to
 * vectors.
 */
static void PRODUCT(product_columns)(int64_t rows, bool fresh, const float *alpha,
                                     const WORD *const *a, int64_t depth, const WORD *b,
                                     int64_t b_stride, float *c, int64_t c_stride, int64_t columns)
{
    int64_t vectors;
    for (int64_t column = 0; column < columns; column += vectors * FV_LANES) {
        vectors = tile_vectors(columns - column);
        fv factor[FV_NQ];
        for (int64_t q = 0; alpha && q < vectors; q++) {
            factor[q] = fv_load(alpha + column + q * FV_LANES);
        }
        const fv *const scale = alpha ? factor : NULL;
        int64_t m = 0;
        /* Few sums would wait for themselves, and each line of A come twice. */
        for (; vectors == 1 && m + 2 * FV_NK <= rows; m += 2 * FV_NK) {
            PRODUCT(columns_tile)
            (2 * FV_NK, 1, fresh, scale, NULL, a, m, depth, b + column, b_stride,
             c + m * c_stride + column, c_stride);
        }
        for (; m + FV_NK <= rows; m += FV_NK) {
#define TILE(nq)                                                                                  \
    PRODUCT(columns_tile)                                                                         \
    (FV_NK, nq, fresh, scale, NULL, a, m, depth, b + column, b_stride, c + m * c_stride + column, \
     c_stride)
            PRODUCT_WIDTHS(vectors, TILE)
#undef TILE
        }
        for (; m < rows; m++) {
#define TILE(nq)                                                                              \
    PRODUCT(columns_tile)                                                                     \
    (1, nq, fresh, scale, NULL, a, m, depth, b + column, b_stride, c + m * c_stride + column, \
     c_stride)
            PRODUCT_WIDTHS(vectors, TILE)
#undef TILE
        }
    }
}

/* As product_values(), fresh and whether there is beta being literals, or gcc makes one slow tile
 * for both. */
INLINE void PRODUCT(values_rows)(int64_t rows, bool fresh, const float *beta, const WORD *const *a,
                                 int64_t depth, const WORD *b, int64_t b_stride, float *c,
                                 int64_t c_stride, int64_t columns)
{
    for (int64_t m = 0; m < rows; m += FV_NK) {
        const float *const factors = beta ? beta + m : NULL;
        int64_t vectors;
        for (int64_t column = 0; column < columns; column += vectors * FV_LANES) {
            vectors = tile_vectors(columns - column);
#define TILE(nq)                                                         \
    PRODUCT(columns_tile)                                                \
    (FV_NK, nq, fresh, NULL, factors, a, m, depth, b + column, b_stride, \
     c + m * c_stride + column, c_stride)
            PRODUCT_WIDTHS(vectors, TILE)
#undef TILE
        }
    }
}

/*
 * C[m] = C[m] beta[m] + sum_r A_r[m] B[r] for m < rows, row by row. beta: NULL for 1. fresh: what C
 * holds counts as 0.
 */
APART void PRODUCT(product_values)(int64_t rows, bool fresh, const float *beta,
                                   const WORD *const *a, int64_t depth, const WORD *b,
                                   int64_t b_stride, float *c, int64_t c_stride, int64_t columns)
{
    if (fresh) {
        PRODUCT(values_rows)(rows, true, NULL, a, depth, b, b_stride, c, c_stride, columns);
    } else {
        PRODUCT(values_rows)(rows, false, beta, a, depth, b, b_stride, c, c_stride, columns);
    }
}

/* dtype: a literal; factors: of rows, or NULL */
INLINE void PRODUCT(results_tile)(int nq, const float *factors, const WORD *const *a, int64_t first,
                                  int64_t depth, const WORD *b, int64_t b_stride, fattn_dtype dtype,
                                  char *c, int64_t step)
{
    fv sum[FV_NK][FV_NQ];
    PRODUCT(columns_sum)(FV_NK, nq, sum, a, first, depth, b, b_stride);
#pragma GCC unroll 8
    for (int m = 0; m < FV_NK; m++) {
        for (int q = 0; q < nq; q++) {
            sum[m][q] = factors ? fv_mul(fv_set1(factors[m]), sum[m][q]) : sum[m][q];
        }
    }
    store_tile(dtype, c, step, nq, sum);
}

INLINE void PRODUCT(results_as)(int64_t rows, const float *factors, const WORD *const *a,
                                int64_t depth, const WORD *b, int64_t b_stride, fattn_dtype dtype,
                                char *c, int64_t step, int64_t columns)
{
    for (int64_t next = 0; next < rows; next += FV_NK) {
        const int64_t m = fattn_min64(next, rows - FV_NK);
        const float *const of_rows = factors ? factors + m : NULL;
        int64_t vectors;
        for (int64_t column = 0; column < columns; column += vectors * FV_LANES) {
            char *const to = c + m * step + column * SIZE_OF(dtype);
            vectors = tile_vectors(columns - column);
#define TILE(nq)          \
    PRODUCT(results_tile) \
    (nq, of_rows, a, m, depth, b + column, b_stride, dtype, to, step)
            if (FV_PAIRS && dtype == FATTN_BF16 && vectors > 1) { /* two are rounded at a time */
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
 * C[m] = factors[m] sum_r A_r[m] B[r] for m < rows, any number from FV_NK on, as the last ones can
 * be made twice; factors: NULL for 1.
 * a: [depth][rows] by rows; b: [depth][columns], whole vectors; c: rows of dtype, `step` bytes
 * apart.
 */
APART void PRODUCT(product_results)(int64_t rows, const float *factors, const WORD *const *a,
                                    int64_t depth, const WORD *b, int64_t b_stride,
                                    fattn_dtype dtype, char *c, int64_t step, int64_t columns)
{
#define RESULTS(dtype) \
    PRODUCT(results_as)(rows, factors, a, depth, b, b_stride, dtype, c, step, columns)
    switch (dtype) {
    case FATTN_F16: RESULTS(FATTN_F16); break;
    case FATTN_BF16: RESULTS(FATTN_BF16); break;
    default: RESULTS(FATTN_F32); break;
    }
#undef RESULTS
}

#undef PRODUCT_WIDTHS
#undef LINE
#undef PRODUCT
#undef WORD
#undef GROUP
#undef ROW
#undef ROW_LOAD
#undef FACTORS
#undef FACTORS_ONE
#undef FACTORS_LOAD
#undef MULADD
