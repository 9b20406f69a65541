/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products for problems so small that forward's transposes are most of the work, or its register
 * tiles would be narrow: with few keys or queries, queries are not turned; with one tile of keys,
 * or few queries, o is not.
 */
#ifndef FATTN_CPU_SMALL_H
#define FATTN_CPU_SMALL_H

#include "backends/cpu/pairs.h"
#include "backends/cpu/strip.h"

/* Keys so few that summing all lanes of each product costs less than arranging queries, and so few
 * that summing four costs less than turning them. */
#define FEW_KEYS(dim) ((FV_LANES > 8 ? 2 : 3) * (dim) / 16)
#define SOME_KEYS(dim) (FV_LANES > 8 ? 6 * (dim) / 16 : 0)

/* How scores want their queries. Sums over lanes round otherwise than those of turned queries,
 * which a row that may not depend on its neighbours can tell. */
static query_form choose_form(const panel *pn)
{
    const fattn_problem *const p = pn->p;
    const int64_t keys = pn->seq.sk;
    if (FV_LANES <= 4 || p->dim % FV_LANES != 0 || p->features & FATTN_BATCH_INVARIANT) {
        return QUERIES_TURNED;
    }
    if (keys <= FEW_KEYS(p->dim)) {
        return QUERIES_LYING;
    }
    return keys <= SOME_KEYS(p->dim) || pn->width <= FV_LANES ? QUERIES_BLOCKED : QUERIES_TURNED;
}

/* --- Channels in the lanes -------------------------------------------------------------------- */

/* Keys that meet queries at a time, three of them four: 16 registers hold twelve sums. Pointers to
 * 16 queries do not fit registers. */
#define FEW_AT_ONCE (FV_LANES > 8 ? 4 : FV_LANES > 4 ? 3 : 1)
#define FEW_ROWS(nk) ((nk) == 3 ? 4 : FV_LANES / (nk))

/* x[j][r] = k[j] . q[r] for nk keys, a literal, and FEW_ROWS(nk) queries. q: rows of dtype, a
 * literal, `step` bytes apart; x: [nk][x_stride] */
INLINE void dot_few_tile(int nk, fattn_dtype dtype, const char *q, int64_t step,
                         const float *const *k, int64_t dim, float *x, int64_t x_stride)
{
    const int rows = FEW_ROWS(nk);
    fv sum[2 * FV_LANES];
#pragma GCC unroll 16
    for (int n = 0; n < nk * rows; n++) {
        sum[n] = fv_set1(0);
    }
    for (int64_t c = 0; c < dim; c += FV_LANES) {
        fv key[4];
        for (int j = 0; j < nk; j++) {
            key[j] = fv_load(k[j] + c);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const fv query = load_as(dtype, q + r * step + c * SIZE_OF(dtype), FV_LANES);
            for (int j = 0; j < nk; j++) {
                sum[j * rows + r] = fv_muladd(key[j], query, sum[j * rows + r]);
            }
        }
    }
    if (nk == 1) {
        fv_store(x, fv_sums(sum));
        return;
    }
#if FV_LANES == 8
    if (nk == 3) {
        for (int j = 0; j < nk; j++) {
            fv_store_sums(x + j * x_stride, sum + j * rows);
        }
        return;
    }
#endif
    float sums[FV_LANES];
    fv_store(sums, fv_sums(sum));
    for (int j = 0; j < nk; j++) {
        memcpy(x + j * x_stride, sums + j * rows, (size_t)rows * sizeof *x);
    }
}

/* The same for FV_LANES queries and a few keys. */
INLINE void dot_few_as(fattn_dtype dtype, const char *q, int64_t step, const float *const *k,
                       int64_t keys, int64_t dim, float *x, int64_t x_stride)
{
    int64_t j = 0;
#define WHILE_KEYS(nk)                                                                       \
    for (; (nk) <= FEW_AT_ONCE && j + (nk) <= keys; j += (nk)) {                             \
        for (int64_t r = 0; r < FV_LANES; r += FEW_ROWS(nk)) {                               \
            dot_few_tile(FV_LANES >= (nk) ? (nk) : 1, dtype, q + r * step, step, k + j, dim, \
                         x + j * x_stride + r, x_stride);                                    \
        }                                                                                    \
    }
    if (FEW_AT_ONCE == 3) {
        WHILE_KEYS(3)
    }
    WHILE_KEYS(4)
    if (FV_LANES > 8 || dtype != FATTN_F32) { /* queries that are converted serve two */
        WHILE_KEYS(2)
    }
    WHILE_KEYS(1)
#undef WHILE_KEYS
}
APART void dot_few_rows(fattn_dtype dtype, const char *q, int64_t step, const float *const *k,
                        int64_t keys, int64_t dim, float *x, int64_t x_stride)
{
    switch (dtype) {
    case FATTN_F16: dot_few_as(FATTN_F16, q, step, k, keys, dim, x, x_stride); break;
    case FATTN_BF16: dot_few_as(FATTN_BF16, q, step, k, keys, dim, x, x_stride); break;
    default: dot_few_as(FATTN_F32, q, step, k, keys, dim, x, x_stride); break;
    }
}

/* FV_LANES rows of dtype, `step` bytes apart. */
typedef struct lying_rows {
    fattn_dtype dtype;
    const char *from;
    int64_t step;
} lying_rows;

/* Rows of q from number r on: where they lie, if they are evenly apart, but not so that all map to
 * one set of the first-level cache, or copied as floats. floats: nothing else is wanted. */
static lying_rows lying_queries(const panel *pn, int64_t r, bool floats)
{
    const fattn_problem *const p = pn->p;
    const int64_t step = p->q.seq * fattn_dtype_size(p->dtype);
    const bool usable = p->dtype == FATTN_F32 || !floats;
    if (usable && rows_in_place(pn, p->dim, r) && step % 4096 != 0) {
        return (lying_rows){p->dtype, element(pn->buf->q, p->dtype, query_index(pn, &p->q, r)),
                            step};
    }
    load_some_queries(pn, pn->buf->q, &p->q, r, pn->q);
    return (lying_rows){FATTN_F32, (const char *)pn->q, pn->dp * (int64_t)sizeof(float)};
}

/* As dot_rows(), from queries where they lie. */
static void dot_lying(const panel *pn, span s)
{
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const lying_rows q = lying_queries(pn, r, false);
        dot_few_rows(q.dtype, q.from, q.step, pn->k, s.live, pn->p->dim, pn->x + r, pn->br);
    }
    fill(pn->x + s.live * pn->br, (s.padded - s.live) * pn->br, 0);
}

/* --- Four channels in a block of lanes -------------------------------------------------------- */

#if FV_LANES > 4
#define BLOCKS_AT_ONCE (FV_LANES > 8 ? 4 : 2) /* keys */

/* x[j][r] = k[j] . q[r] for nk keys, a literal, and FV_LANES queries, of which each fourth shares a
 * vector, a block each: loading repeats a key's channels, and lanes are summed by fours.
 * q: [dim / 4][4][FV_LANES]; x: [nk][x_stride] */
INLINE void dot_blocks_tile(int nk, const float *q, const float *const *k, int64_t dim, float *x,
                            int64_t x_stride)
{
    fv sum[BLOCKS_AT_ONCE][4];
    for (int j = 0; j < nk; j++) {
        for (int n = 0; n < 4; n++) {
            sum[j][n] = fv_set1(0);
        }
    }
    for (int64_t c = 0; c < dim; c += 4, q += 4 * FV_LANES) {
        fv query[4];
        for (int n = 0; n < 4; n++) {
            query[n] = fv_load(q + n * FV_LANES);
        }
        for (int j = 0; j < nk; j++) {
            const fv key = fv_load_four(k[j] + c);
            for (int n = 0; n < 4; n++) {
                sum[j][n] = fv_muladd(key, query[n], sum[j][n]);
            }
        }
    }
    for (int j = 0; j < nk; j++) {
        fv_store(x + j * x_stride, fv_block_sums(sum[j]));
    }
}

/* The same for some keys. */
APART void dot_blocks_rows(const float *q, const float *const *k, int64_t keys, int64_t dim,
                           float *x, int64_t x_stride)
{
    int64_t j = 0;
    for (; j + BLOCKS_AT_ONCE <= keys; j += BLOCKS_AT_ONCE) {
        dot_blocks_tile(BLOCKS_AT_ONCE, q, k + j, dim, x + j * x_stride, x_stride);
    }
    for (; j < keys; j++) {
        dot_blocks_tile(1, q, k + j, dim, x + j * x_stride, x_stride);
    }
}

/* pn->qt = FV_LANES rows of q from number r on, as dot_blocks_tile() wants them. */
static void load_blocks(const panel *pn, int64_t r)
{
    const lying_rows rows = lying_queries(pn, r, true);
    const float *const q = (const void *)rows.from;
    const int64_t stride = rows.step / (int64_t)sizeof *q;
    for (int64_t c = 0; c < pn->p->dim; c += 4) {
#pragma GCC unroll 4
        for (int64_t n = 0; n < 4; n++) {
            fv_store(pn->qt + (c + n) * FV_LANES, fv_load_blocks(q + n * stride + c, 4 * stride));
        }
    }
}

/* As dot_rows(). first: of the strip's tiles */
static void dot_blocks(const panel *pn, span s, bool first)
{
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        if (first || pn->width > FV_LANES) {
            load_blocks(pn, r);
        }
        dot_blocks_rows(pn->qt, pn->k, s.live, pn->p->dim, pn->x + r, pn->br);
    }
    fill(pn->x + s.live * pn->br, (s.padded - s.live) * pn->br, 0);
}
#else
#define dot_blocks(pn, s, first) ((void)(pn), (void)(s), (void)(first))
#endif

/* --- Keys of pairs in blocks of lanes --------------------------------------------------------- */

#if FV_PAIR_VECTORS && FV_LANES > 4
#define BLOCK_PAIRS 4                        /* of a key, */
#define VECTOR_KEYS (FV_LANES / BLOCK_PAIRS) /* which share a vector */
#define BLOCK_BYTES (BLOCK_PAIRS * sizeof(bf16_pair))
#define KEY_VECTORS 4 /* that meet queries at a time */

/* Keys so few, and queries so many, that arranging keys costs less than turning queries. */
#define BLOCKED_KEYS 32

/* As choose_form(), but the same for all rows of a sequence, whose copies of keys may be kept. */
static query_form choose_pairs_form(const panel *pn)
{
    const fattn_problem *const p = pn->p;
    const int64_t keys = pn->seq.sk, queries = pn->seq.sq * pn->group;
    const bool few = keys <= BLOCKED_KEYS && 2 * keys <= queries && FV_LANES < queries;
    const bool whole = p->dim % (2 * BLOCK_PAIRS) == 0;
    return few && whole && !(p->features & FATTN_BATCH_INVARIANT) ? KEYS_BLOCKED : QUERIES_TURNED;
}

/* Blocks of a tile's keys in pn->k_copy; copied: they are there.
 * k_copy: [vectors of keys][dim / 8][VECTOR_KEYS] */
static void block_keys(const panel *pn, span s, bool copied)
{
    const fattn_problem *const p = pn->p;
    const int64_t steps = p->dim / (2 * BLOCK_PAIRS);
    const int64_t keys = (s.live + VECTOR_KEYS - 1) / VECTOR_KEYS * VECTOR_KEYS;
    for (int64_t j = 0; j < keys && !copied; j++) {
        const char *from = (const char *)pn->zeros;
        char *to = (char *)(pn->k_copy + j / VECTOR_KEYS * steps * FV_LANES);
        if (j < s.live) {
            from = element(pn->buf->k, p->dtype, key_index(pn, &p->k, s.first + j));
        }
        to += j % VECTOR_KEYS * (int64_t)BLOCK_BYTES;
        for (int64_t c = 0; c < steps; c++, from += BLOCK_BYTES, to += sizeof(pv)) {
            memcpy(to, from, BLOCK_BYTES);
        }
    }
}

/* x[j][r] = k[j] . q[r] for nv vectors of keys and nr queries, literals. q: rows `step` bytes
 * apart; k: blocks; x: [nv * VECTOR_KEYS][x_stride] */
INLINE void dot_key_tile(int nv, int nr, const char *q, int64_t step, const float *k, int64_t steps,
                         float *x, int64_t x_stride)
{
    const int half = nr / 2;
    const char *low = q, *high = q + half * step;
    fv sum[KEY_VECTORS][8];
    for (int v = 0; v < nv; v++) {
        for (int r = 0; r < nr; r++) {
            sum[v][r] = fv_set1(0);
        }
    }
    for (int64_t c = 0; c < steps; c++, low += BLOCK_BYTES, high += BLOCK_BYTES) {
        pv keys[KEY_VECTORS];
        keep_pointers(&low, &high);
        for (int v = 0; v < nv; v++) {
            keys[v] = pv_load(k + (v * steps + c) * FV_LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < nr; r++) {
            const pv query = pv_load_four((r < half ? low : high) + r % half * step);
            for (int v = 0; v < nv; v++) {
                sum[v][r] = fv_muladd_pairs(keys[v], query, sum[v][r]);
            }
        }
    }
    for (int v = 0; v < nv; v++) {
        for (int r = 0; r < nr; r += 4) {
            fv_store_blocks(x + v * VECTOR_KEYS * x_stride + r, x_stride,
                            fv_block_sums(sum[v] + r));
        }
    }
}

/* The same for FV_LANES queries and some vectors of keys. */
APART void dot_key_blocks(int64_t vectors, const char *q, int64_t step, const float *k,
                          int64_t steps, float *x, int64_t x_stride)
{
    for (int64_t v = 0; v < vectors; v += KEY_VECTORS) {
        const float *const keys = k + v * steps * FV_LANES;
        float *const to = x + v * VECTOR_KEYS * x_stride;
#define QUERIES(nv, nr)                                                          \
    for (int64_t r = 0; r < FV_LANES; r += (nr)) {                               \
        dot_key_tile(nv, nr, q + r * step, step, keys, steps, to + r, x_stride); \
    }
        switch (vectors - v) {
        case 1: QUERIES(1, 8) break;
        case 2: QUERIES(2, 8) break;
        case 3: QUERIES(3, 8) break;
        default: QUERIES(4, 4) break;
        }
#undef QUERIES
    }
}

/* As pairs_scores(). */
static void dot_blocked_keys(const panel *pn, span s)
{
    const fattn_problem *const p = pn->p;
    const int64_t vectors = (s.live + VECTOR_KEYS - 1) / VECTOR_KEYS;
    const int64_t keys = vectors * VECTOR_KEYS;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        int64_t stride;
        const char *const q = pairs_of_queries(pn, r, p->q.seq % 2048 != 0, &stride);
        dot_key_blocks(vectors, q, stride * (int64_t)sizeof(bf16_pair), pn->k_copy,
                       p->dim / (2 * BLOCK_PAIRS), pn->x + r, pn->br);
    }
    fill(pn->x + keys * pn->br, (s.padded - keys) * pn->br, 0);
}
#else
#define choose_pairs_form(pn) ((void)(pn), QUERIES_TURNED)
#define block_keys(pn, s, copied) ((void)(pn), (void)(s), (void)(copied))
#define dot_blocked_keys(pn, s) ((void)(pn), (void)(s))
#endif

/* --- Rows of o -------------------------------------------------------------------------------- */

/*
 * O can be made by rows, P V instead of V^T P^T, and need not be turned. That takes values that are
 * evenly apart, whole vectors, and a block of whole steps of rows. Where a strip's keys are one
 * tile, nothing is added to o, no factors of rows are needed, and P can be normalised before; its
 * roundings are then others, so a row that may not depend on its neighbours does not get it. Where
 * they are more, it pays for strips whose rows would not fill a register tile. Of pairs there are
 * copies of values, and P, which is rounded to bf16, is left as it is: a row of o is the same
 * either way.
 */
static void forward_choose_rows(forward *f, bool only, bool paired)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const bool direct = in_place(p, &p->v), paged = p->features & FATTN_PAGED;
    const bool pays = only ? paired || !(p->features & FATTN_BATCH_INVARIANT)
                           : pn->width <= TILE_GROUP - FV_LANES;
    const bool fits = paired ? !FV_TILES : !direct || (!paged && p->dim_v % FV_LANES == 0);
    f->only = only;
    f->by_rows = pays && fits && pn->br % FV_NK == 0;
    if (f->by_rows) {
        f->o = f->ot;
    }
}

/* Whether o of the only tile can be made where it belongs. */
static bool belongs(const forward *f)
{
    const panel *const pn = &f->panel;
    return f->only && pn->p->dim_v % FV_LANES == 0 && pn->group == 1 && pn->rows >= FV_NK &&
           f->lowered == 1;
}

/* o = beta o + P V, in scratch or where o belongs. beta: factors of rows, NULL for 1 */
static void mix_rows(forward *f, span s, const float *beta)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const product_of weighted = {.a = (const float *const *)pn->x_rows,
                                 .b = pn->v[0],
                                 .b_stride = in_place(p, &p->v) ? p->v.seq : pn->dvp,
                                 .depth = s.live};
    for (int64_t r = 0; r < pn->width && f->only; r += FV_LANES) {
        const fv share = meet_sink(f, r);
        const fv factor = fv_mul(share, fattn_softmax_normaliser(state_load(f, r)));
        scale_rows(pn->x + r, s.live, pn->br, FV_LANES, factor);
    }
    f->sink_waits = f->sink_waits && !f->only;
    f->normalised = f->only;
    f->placed = belongs(f);
    if (f->placed) {
        product_results(pn->rows, NULL, weighted, p->dtype_o, row_of_o(pn, 0),
                        p->o.seq * fattn_dtype_size(p->dtype_o), p->dim_v);
        return;
    }
    product_values(row_steps(pn), f->fresh, beta, weighted, f->o, pn->dvp, p->dim_v);
    if (f->lowered != 1) {
        scale_rows(f->o, row_steps(pn), pn->dvp, pn->dvp, fv_set1(f->lowered));
    }
}

#if FV_PAIR_VECTORS
/* The same, of pairs. */
static void mix_rows_pairs(forward *f, span s, const float *beta)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const product_of_pairs weighted = {
        .a = pn->x_pairs, .b = pn->v_pairs[0], .b_stride = pn->dvp, .depth = (s.live + 1) / 2};
    f->placed = f->normalised = belongs(f);
    if (f->placed) {
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            const fv share = meet_sink(f, r);
            fv_store(f->alpha + r, fv_mul(share, fattn_softmax_normaliser(state_load(f, r))));
        }
        f->sink_waits = false;
        product_results_pairs(pn->rows, f->alpha, weighted, p->dtype_o, row_of_o(pn, 0),
                              p->o.seq * fattn_dtype_size(p->dtype_o), p->dim_v);
        return;
    }
    product_values_pairs(row_steps(pn), f->fresh, beta, weighted, f->o, pn->dvp, p->dim_v);
}
#else
#define mix_rows_pairs(f, s, beta) ((void)(f), (void)(s), (void)(beta))
#endif

#endif
