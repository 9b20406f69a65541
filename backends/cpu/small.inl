/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products for problems so small that forward's transposes are most of the work, or its register
 * tiles would be narrow: with few keys or queries, queries are not turned; with one tile of keys,
 * or few queries, o is not.
 */

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

/* Keys that meet FV_LANES / FEW_AT_ONCE queries at a time: pointers to 16 queries do not fit
 * registers. */
#define FEW_AT_ONCE (FV_LANES > 8 ? 4 : 1)

/* x[j][r] = k[j] . q[r] for nk keys, a literal, and FV_LANES / nk queries. q: rows at q_stride;
 * x: [nk][x_stride] */
INLINE void dot_few_tile(int nk, const float *q, int64_t q_stride, const float *const *k,
                         int64_t dim, float *x, int64_t x_stride)
{
    const int rows = FV_LANES / nk;
    fv sum[FV_LANES];
#pragma GCC unroll 16
    for (int n = 0; n < FV_LANES; n++) {
        sum[n] = fv_set1(0);
    }
    for (int64_t c = 0; c < dim; c += FV_LANES) {
        fv key[FEW_AT_ONCE];
        for (int j = 0; j < nk; j++) {
            key[j] = fv_load(k[j] + c);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const fv query = fv_load(q + r * q_stride + c);
            for (int j = 0; j < nk; j++) {
                sum[j * rows + r] = fv_muladd(key[j], query, sum[j * rows + r]);
            }
        }
    }
    if (nk == 1) {
        fv_store(x, fv_sums(sum));
        return;
    }
    float sums[FV_LANES];
    fv_store(sums, fv_sums(sum));
    for (int j = 0; j < nk; j++) {
        memcpy(x + j * x_stride, sums + j * rows, (size_t)rows * sizeof *x);
    }
}

/* The same for FV_LANES queries and a few keys. */
APART void dot_few_rows(const float *q, int64_t q_stride, const float *const *k, int64_t keys,
                        int64_t dim, float *x, int64_t x_stride)
{
    int64_t j = 0;
#define WHILE_KEYS(nk)                                                                           \
    for (; (nk) <= FEW_AT_ONCE && j + (nk) <= keys; j += (nk)) {                                 \
        for (int64_t r = 0; r < FV_LANES; r += FV_LANES / (nk)) {                                \
            dot_few_tile((nk) <= FEW_AT_ONCE ? (nk) : 1, q + r * q_stride, q_stride, k + j, dim, \
                         x + j * x_stride + r, x_stride);                                        \
        }                                                                                        \
    }
    WHILE_KEYS(4)
    WHILE_KEYS(2)
    WHILE_KEYS(1)
#undef WHILE_KEYS
}

/* FV_LANES rows of q from number r on: where they lie, if they are evenly apart, or copied. */
static const float *some_queries(const panel *pn, int64_t r, int64_t *stride)
{
    const fattn_problem *const p = pn->p;
    if (rows_in_place(pn, p->dim, r) && in_place(p, &p->q)) {
        *stride = p->q.seq;
        return (const float *)pn->buf->q + query_index(pn, &p->q, r);
    }
    load_some_queries(pn, pn->buf->q, &p->q, r, pn->q);
    *stride = pn->dp;
    return pn->q;
}

/* As dot_rows(), from queries where they lie. */
static void dot_lying(const panel *pn, span s)
{
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        int64_t stride;
        const float *const q = some_queries(pn, r, &stride);
        dot_few_rows(q, stride, pn->k, s.live, pn->p->dim, pn->x + r, pn->br);
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
    int64_t stride;
    const float *const q = some_queries(pn, r, &stride);
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

/* --- Rows of o -------------------------------------------------------------------------------- */

/*
 * O can be made by rows, P V instead of V^T P^T, and need not be turned. That takes values that are
 * evenly apart, whole vectors, and a block of whole steps of rows. Where a strip's keys are one
 * tile, nothing is added to o, no factors of rows are needed, and P can be normalised before; its
 * roundings are then others, so a row that may not depend on its neighbours does not get it. Where
 * they are more, it pays for strips whose rows would not fill a register tile.
 */
static void forward_choose_rows(forward *f, bool only)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const bool direct = in_place(p, &p->v), paged = p->features & FATTN_PAGED;
    const bool pays =
        only ? !(p->features & FATTN_BATCH_INVARIANT) : pn->width <= TILE_GROUP - FV_LANES;
    f->only = only;
    f->by_rows = pays && pn->br % FV_NK == 0 && (!direct || (!paged && p->dim_v % FV_LANES == 0));
    if (f->by_rows) {
        f->o = f->ot;
    }
}

/* Whether o of the only tile can be made where it belongs. */
static bool belongs(const forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    return f->only && p->dtype_o == FATTN_F32 && p->dim_v % FV_LANES == 0 && pn->group == 1 &&
           pn->rows >= FV_NK && f->lowered == 1;
}

/* o = beta o + P V, in scratch or where o belongs. beta: factors of rows, NULL for 1 */
static void mix_rows(forward *f, span s, const float *beta)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const int64_t v_stride = in_place(p, &p->v) ? p->v.seq : pn->dvp;
    const int64_t steps = (pn->rows + FV_NK - 1) / FV_NK * FV_NK;
    for (int64_t r = 0; r < pn->width && f->only; r += FV_LANES) {
        scale_rows(pn->x + r, s.live, pn->br, FV_LANES, fattn_softmax_normaliser(state_load(f, r)));
    }
    f->placed = belongs(f);
    product_values(f->placed ? pn->rows : steps, f->fresh, beta, (const float *const *)pn->x_rows,
                   s.live, pn->v[0], v_stride, f->placed ? row_of_o(pn, 0) : f->o,
                   f->placed ? p->o.seq : pn->dvp, p->dim_v);
    if (f->lowered != 1) {
        scale_rows(f->o, steps, pn->dvp, pn->dvp, fv_set1(f->lowered));
    }
}
