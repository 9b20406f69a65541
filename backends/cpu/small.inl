/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products for problems so small that forward's transposes are most of the work: with few keys,
 * queries are not turned; with one tile of keys, o is not.
 */

/* --- Few keys --------------------------------------------------------------------------------- */

/* Whether keys are so few that summing the lanes of each product costs less than turning queries,
 * which grows with dim. Such sums round otherwise, which a row that may not depend on its
 * neighbours can tell. */
static bool few_keys(const panel *pn)
{
    const fattn_problem *const p = pn->p;
    return FV_LANES >= 8 && pn->seq.sk <= 3 * p->dim / 16 && p->dim % FV_LANES == 0 &&
           !(p->features & FATTN_BATCH_INVARIANT);
}

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

/* As dot_rows(), from queries where they lie. */
static void dot_few(const panel *pn, span s)
{
    const fattn_problem *const p = pn->p;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const bool direct = rows_in_place(pn, p->dim, r) && in_place(p, &p->q);
        if (!direct) {
            load_some_queries(pn, pn->buf->q, &p->q, r, pn->q);
        }
        dot_few_rows(direct ? (const float *)pn->buf->q + query_index(pn, &p->q, r) : pn->q,
                     direct ? p->q.seq : pn->dp, pn->k, s.live, p->dim, pn->x + r, pn->br);
    }
    fill(pn->x + s.live * pn->br, (s.padded - s.live) * pn->br, 0);
}

/* --- One tile of keys ------------------------------------------------------------------------- */

/*
 * Where a strip's keys are one tile, nothing is added to o and no factors of rows are needed: o can
 * be made by rows, P V instead of V^T P^T, and need not be turned. That takes values that are
 * evenly apart, whole vectors, and a block of whole steps of rows. Its roundings are others, so a
 * row that may not depend on its neighbours does not get it.
 */
static void forward_choose_rows(forward *f)
{
    const fattn_problem *const p = f->panel.p;
    const bool direct = in_place(p, &p->v), paged = p->features & FATTN_PAGED;
    f->by_rows = f->panel.br % FV_NK == 0 && !(p->features & FATTN_BATCH_INVARIANT) &&
                 (!direct || (!paged && p->dim_v % FV_LANES == 0));
    if (f->by_rows) {
        f->o = f->ot;
    }
}

/* o = P V, from nothing, where o lies or in scratch: P is normalised before. */
static void mix_rows(forward *f, span s)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const int64_t v_stride = in_place(p, &p->v) ? p->v.seq : pn->dvp;
    const int64_t rows = (pn->rows + FV_NK - 1) / FV_NK * FV_NK;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        scale_rows(pn->x + r, s.live, pn->br, FV_LANES, fattn_softmax_normaliser(state_load(f, r)));
    }
    f->placed = p->dtype_o == FATTN_F32 && p->dim_v % FV_LANES == 0 && pn->group == 1 &&
                pn->rows == rows && f->lowered == 1;
    float *const o = f->placed ? row_of_o(pn, 0) : f->o;
    const int64_t o_stride = f->placed ? p->o.seq : pn->dvp;
    product_columns(rows, true, NULL, (const float *const *)pn->x_rows, s.live, pn->v[0], v_stride,
                    o, o_stride, p->dim_v);
    if (f->lowered != 1) {
        scale_rows(f->o, rows, pn->dvp, pn->dvp, fv_set1(f->lowered));
    }
}
