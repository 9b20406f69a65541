/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operands of products of bf16 pairs. A pair holds two neighbours along the sum:
 *
 *     S^T = K Q^T      channels 2c, 2c + 1: rows of k as they lie, and q transposed pair by pair
 *     O^T += V^T P^T   keys 2j, 2j + 1: two rows of v zipped, and P rounded as softmax leaves it
 *
 * They use the scratch of a panel of floats, half of it or all.
 */

#if FV_PAIRS

/* Pairs in a row of dim channels. */
static int64_t pairs_of(int64_t dim) { return (dim + 1) / 2; }

/* Whether rows of k can be read where they lie: not when the last pair would reach past the row, or
 * when they must be whole vectors; and see in_place(). */
static bool pairs_in_place(const fattn_problem *p)
{
    return !FV_TILES && p->dim % 2 == 0 && p->k.seq % 2048 != 0;
}

/* to[0 .. n) = from[0 .. n), and zeros up to whole vectors of pairs. */
static void row_copy(void *to, const void *from, int64_t n)
{
    const int64_t whole = (n + 2 * FV_LANES - 1) / (2 * FV_LANES) * 2 * FV_LANES;
    memcpy(to, from, (size_t)n * sizeof(uint16_t));
    memset((uint16_t *)to + n, 0, (size_t)(whole - n) * sizeof(uint16_t));
}

/* qt[c][r]: pair c of row r. */
static void pairs_load_queries(panel *pn)
{
    const fattn_problem *const p = pn->p;
    for (int64_t r = 0; r < pn->width; r++) {
        float *const to = pn->q + r * pn->dp;
        if (r < pn->rows) {
            row_copy(to, element(pn->buf->q, p->dtype, query_index(pn, &p->q, r)), p->dim);
        } else {
            fill(to, pn->dp, 0);
        }
    }
    transpose(pn->q, pn->dp, pn->width, pairs_of(p->dim), pn->qt, pn->br);
}

/* Rows of k. */
static void pairs_load_keys(const panel *pn, span s)
{
    const fattn_problem *const p = pn->p;
    const bool direct = pairs_in_place(p);
    const int64_t stride = vectors_of(pairs_of(p->dim)) * FV_LANES;
    for (int64_t j = 0; j < s.padded; j++) {
        const void *row = pn->zeros;
        if (j < s.live) {
            const void *const from =
                element(pn->buf->k, p->dtype, key_index(pn, &p->k, s.first + j));
            float *const copy = pn->k_copy + j * stride;
            if (!direct) {
                row_copy(copy, from, p->dim);
            }
            row = direct ? from : copy;
        }
        pn->k_pairs[j] = row;
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

/* Pairs of v take half of v_copy; in the other they are transposed, [dvp][bc / 2]. */
static float *values_transposed(const panel *pn) { return pn->v_copy + pn->bc / 2 * pn->dvp; }

/* Bits of a bf16 that are all clear below 2^-63. */
#define EXPONENT_HIGH 0x6000

/* Pairs of rows of v. False where all values of the tile are so small that their products with
 * probabilities could be subnormal, which products of pairs drop. */
static bool pairs_load_values(const panel *pn, span s)
{
    const fattn_problem *const p = pn->p;
    uint16_t bits = 0;
    for (int64_t j = 0; j < s.padded; j += 2) {
        const void *rows[2] = {pn->zeros, pn->zeros};
        for (int64_t n = 0; n < 2 && j + n < s.live; n++) {
            rows[n] = element(pn->buf->v, p->dtype, key_index(pn, &p->v, s.first + j + n));
        }
        bf16_pair *const to = (bf16_pair *)(void *)(pn->v_copy + j / 2 * pn->dvp);
        row_zip(to, rows[0], rows[1], p->dim_v);
        for (int64_t c = 0; c < p->dim_v; c++) {
            bits |= to[c].first | to[c].second;
        }
        pn->v_pairs[j / 2] = to;
    }
    if (FV_TILES) {
        transpose(pn->v_copy, pn->dvp, s.padded / 2, pn->dvp, values_transposed(pn), pn->bc / 2);
    }
    return bits & EXPONENT_HIGH;
}

#if FV_TILES

/* Products in matrix registers take contiguous rows along the sum: k as copied, v transposed. */
static void pairs_open(void) { tiles_open(); }
static void pairs_close(void) { tiles_close(); }

/* C (+)= A B for whole tiles; a: [rows][depth], b: [depth][columns] with the strides of c. */
static void tiles_product(int add, int64_t rows, const void *a, int64_t a_stride, int64_t depth,
                          const float *b, float *c, int64_t stride, int64_t columns)
{
    for (int64_t column = 0; column < columns; column += 48) {
        const int nq = (int)fattn_min64(columns - column, 48) / 16;
        for (int64_t row = 0; row < rows; row += 32) {
            const int nm = (int)fattn_min64(rows - row, 32) / 16;
            tiles_multiply(nm, nq, add, (const bf16_pair *)a + row * a_stride, 4 * a_stride, depth,
                           b + column, 4 * stride, c + row * stride + column, 4 * stride);
        }
    }
}

static void pairs_scores(const panel *pn, span s)
{
    const int64_t depth = vectors_of(pairs_of(pn->p->dim)) * FV_LANES;
    tiles_product(0, s.padded, pn->k_copy, depth, depth, pn->qt, pn->x, pn->br, pn->width);
}

static void pairs_mix(const panel *pn, span s, const float *alpha, float *ot)
{
    for (int64_t r = 0; alpha && r < pn->width; r += FV_LANES) {
        const fv factor = fv_load(alpha + r);
        if (mv_all(fv_eq(factor, fv_set1(1)))) {
            continue;
        }
        for (int64_t c = 0; c < pn->dvp; c++) {
            float *const at = ot + c * pn->br + r;
            fv_store(at, fv_mul(fv_load(at), factor));
        }
    }
    tiles_product(1, pn->dvp, values_transposed(pn), pn->bc / 2, s.padded / 2, pn->x, ot, pn->br,
                  pn->width);
}

#else

static void pairs_open(void) {}
static void pairs_close(void) {}

/* x[j][r] = k[j] . q[r] */
static void pairs_scores(const panel *pn, span s)
{
    product_rows_pairs(0, s.padded, pn->k_pairs, pairs_of(pn->p->dim), (const void *)pn->qt, pn->br,
                       pn->x_rows, pn->width);
}

/* ot = ot alpha + V^T P^T */
static void pairs_mix(const panel *pn, span s, const float *alpha, float *ot)
{
    product_columns_pairs(pn->p->dim_v, alpha, pn->v_pairs, s.padded / 2, (const void *)pn->x,
                          pn->br, ot, pn->br, pn->width);
}

#endif

#else

/* The table has no row that would ask for pairs, and what is left of the question is nothing. */
#define pairs_load_queries(pn) ((void)(pn))
#define pairs_load_keys(pn, s) ((void)(pn), (void)(s))
#define pairs_load_values(pn, s) ((void)(pn), (void)(s), false)
#define pairs_scores(pn, s) ((void)(pn), (void)(s))
#define pairs_mix(pn, s, alpha, ot) ((void)(pn), (void)(s), (void)(alpha), (void)(ot))

#endif

/* P of keys j and j + 1, j even, of a vector of rows: floats in their place, or pairs in row j / 2,
 * which no later key has use for. */
INLINE void keep_weights(float *x, int64_t stride, int64_t j, fv first, fv second, bool pairs)
{
#if FV_PAIRS
    if (pairs) {
        pv_store(x + j / 2 * stride, pv_join(first, second));
        return;
    }
#endif
    (void)pairs;
    fv_store(x + j * stride, first);
    fv_store(x + (j + 1) * stride, second);
}
