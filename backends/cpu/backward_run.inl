/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward's items: a panel on its way along its keys, in the order that its chain prescribes; and
 * the tiles that there are.
 */

/* dq of the rows at first. */
static void store_dq(backward *g, int64_t first, float factor)
{
    const panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const fattn_dtype dtype = fattn_gradient_dtype(p);
    transpose(g->dqt + first, pn->br, pn->dp, FV_LANES, g->dq, pn->dp);
    for (int64_t r = first; r < fattn_min64(first + FV_LANES, pn->rows); r++) {
        const int64_t at = query_index(pn, &p->dq, r);
        float *const row = g->dq + (r - first) * pn->dp;
        if (p->features & FATTN_ACCUMULATE) { /* f32, then */
            add_row((float *)pn->buf->dq + at, row, p->dim, factor);
        } else {
            row_store((char *)pn->buf->dq + at * fattn_dtype_size(dtype), dtype, row, p->dim,
                      factor);
        }
    }
}

/* delta of row r of bf16 numbers. Products of pairs drop what is below the normal range, and where
 * a sink has nearly all the weight o may be nothing else. */
static float plain_delta(const panel *pn, int64_t r)
{
    const fattn_problem *const p = pn->p;
    const query_row *const row = &pn->row[r];
    const uint16_t *const o = element(pn->buf->o, p->dtype_o, query_index(pn, &p->o, r));
    const uint16_t *const dout = element(pn->buf->dout, p->dtype_o, query_index(pn, &p->dout, r));
    const float *const dlse = pn->buf->dlse;
    const int64_t at = fattn_lse_index(p, &pn->seq, pn->b, row->h) + row->i;
    float delta = 0;
    for (int64_t c = 0; c < p->dim_v; c++) {
        delta += fattn_bf16_to_f32(dout[c]) * fattn_bf16_to_f32(o[c]);
    }
    return p->features & FATTN_DLSE ? delta - dlse[at] : delta;
}

/* The panel's part of dSink = -sum over its rows of exp(sink - lse) delta, a number a head: in
 * double, as rows may all be alike. */
static void store_dsink(const backward *g, bool pairs, float *parts)
{
    const panel *const pn = &g->panel;
    for (int64_t n = 0; n < pn->group; n++) {
        const int64_t h = pn->hk * pn->group + n;
        const fv sink = fv_set1(((const float *)pn->buf->sink)[h]);
        double sum = 0;
        for (int64_t r = 0; r < pn->rows; r++) {
            const query_row *const row = &pn->row[r];
            if (row->dead || row->h != h) {
                continue;
            }
            float weight[FV_LANES];
            fv_store(weight,
                     fattn_softmax_weight(sink, fv_set1((float)FATTN_LOG2E), fv_set1(g->lse[r])));
            sum -= (double)weight[0] * (pairs ? plain_delta(pn, r) : g->delta[r]);
        }
        parts[n] = (float)sum;
    }
}

/* The panels of a chain have consecutive numbers. */
static int64_t chain_length(const fattn_cpu_run *run)
{
    return dbias_crosses(run->problem) ? run->tiling->items : run->tiling->q_blocks;
}

/*
 * The number of the panel that is handed out as item n. Some heads take turns, a panel each: those
 * of one head, were they at work at the same time, would wait for each other and send dK and dV
 * from cache to cache.
 */
#define HEADS_TOGETHER 16
static int64_t panel_number(const fattn_cpu_run *run, int64_t n)
{
    const int64_t blocks = run->tiling->q_blocks, set = HEADS_TOGETHER * blocks;
    const int64_t begin = n / set * set,
                  heads = fattn_min64(set, run->tiling->items - begin) / blocks;
    const int64_t head = (n - begin) % heads, block = (n - begin) / heads;
    return dbias_crosses(run->problem) ? n : begin + head * blocks + block;
}

/* A panel that adds: everything but the chain. */
INLINE void backward_panel(backward *g, bool pairs, const fattn_cpu_progress *before,
                           fattn_cpu_progress *own)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    int64_t block = 0, past = INT64_MAX;

    pn->step = pairs ? PAIRS_STEP : FV_NK;
    load_numbers(g);
    if (pairs) {
        load_rows_pairs(g);
    } else {
        load_rows(g);
    }
    for (int64_t c = 0; c < pn->dp; c++) {
        fill(g->dqt + c * pn->br, pn->width, 0);
    }
    panel_blocks(pn, &block, &past);
    bias_blocks(pn, NULL, 0, &block, &past);
    if (!wants(p, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS)) {
        past = 0;
    }
    span next;
    for (span s = seen_span(pn, block, true); block < past; block++, s = next) {
        next = seen_span(pn, block + 1, true);
        if (s.kind == FATTN_TILE_EMPTY) {
            continue;
        }
        if (pairs) {
            backward_tile_pairs(g, s, before);
        } else {
            backward_tile(g, s, next, before);
        }
        if (own) {
            fattn_cpu_publish(own, block + 1);
        }
    }
    for (int64_t r = 0; r < pn->rows && wants(p, FATTN_OUT_DQ); r += FV_LANES) {
        store_dq(g, r, pairs ? pn->rule.scale * (g->lowered / LIFT) : 1 / lift_of(p));
    }
}

INLINE void differentiate(const fattn_cpu_run *run, int64_t n, void *scratch, bool pairs)
{
    const fattn_problem *const p = run->problem;
    const int64_t item = panel_number(run, n);
    const fattn_work work = fattn_schedule_item(run->tiling, p->heads_k, item);
    arena from = {.base = scratch};
    backward g;
    panel *const pn = &g.panel;
    if (pairs) {
        backward_layout_pairs(&g, p, run->tiling, &from);
    } else {
        backward_layout(&g, p, run->tiling, &from);
    }
    panel_prepare(pn);
    g.shared = gradients_of(run);

    fattn_cpu_progress *const own = is_chained(p) ? &g.shared.progress[item] : NULL;
    const fattn_cpu_progress *const before = own && item % chain_length(run) != 0 ? own - 1 : NULL;
    const bool has_rows = panel_open(pn, run, work.batch, work.head, work.block * pn->br, false);
    if (has_rows && pairs) {
        widen(pn);
    }
    if (has_rows) {
        backward_panel(&g, pairs, before, own);
    }
    if (wants(p, FATTN_OUT_DSINK)) {
        float *const parts = g.shared.dsink + item * pn->group;
        if (has_rows) {
            store_dsink(&g, pairs, parts);
        } else {
            fill(parts, pn->group, 0);
        }
    }
    if (before) {
        fattn_cpu_wait(before, INT64_MAX);
    }
    if (own) {
        fattn_cpu_publish(own, INT64_MAX);
    }
}

static void backward_item(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    differentiate(run, item, scratch, false);
}

static void backward_work(const fattn_cpu_run *run, void *scratch)
{
    each_item(run, scratch, backward_item);
}

#if FV_PAIRS
static void backward_item_pairs(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    differentiate(run, item, scratch, true);
}

static void backward_work_pairs(const fattn_cpu_run *run, void *scratch)
{
    pairs_open();
    each_item(run, scratch, backward_item_pairs);
    pairs_close();
}
#endif

static int64_t backward_count(const fattn_cpu_run *run) { return run->tiling->items; }

/* --- Tiles ------------------------------------------------------------------------------------ */

/* Large blocks save ways of keys, values and what is added to them through the caches, and copies.
 * Rows of x are an odd number of lines apart. */
static const fattn_tile backward_tiles[] = {
    {TILE_ROWS(240), 96}, {176, 96}, {TILE_ROWS(144), 96}, {TILE_ROWS(96), 96}, {TILE_ROWS(48), 64},
    {TILE_ROWS(16), 32},  {0, 0}};
_Static_assert(176 % FV_LANES == 0, "blocks are whole vectors");

/* What those cost a block, in rows' time. */
static int64_t backward_block_rows(const fattn_problem *p) { return keys_in_place(p) ? 14 : 27; }

static int64_t backward_fast_bytes(const fattn_problem *p, fattn_tile tile)
{
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    return backward_scratch(p, &tiling) + keys_in_place_bytes(p, &tiling);
}

static int64_t backward_workspace(const fattn_problem *p, const fattn_tiling *tiling)
{
    return fattn_cpu_workspace(backward_shared(p, tiling), backward_scratch(p, tiling));
}

#if FV_PAIRS
/* Products in matrix registers take so little time that loading keys and adding to dK and dV must
 * serve more rows. */
static const fattn_tile backward_pairs_tiles[] = {
#if FV_TILES
    {96, 32}, {96, 64}, {384, 128}, {288, 128}, {192, 128},
#else
    {TILE_ROWS(144), 96},
    {TILE_ROWS(96), 96},
    {TILE_ROWS(48), 64},
    {TILE_ROWS(16), 32},
#endif
    {0, 0}};

static int64_t pairs_fast_bytes(const fattn_problem *p, fattn_tile tile)
{
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    return pairs_scratch(p, &tiling);
}

static int64_t pairs_workspace(const fattn_problem *p, const fattn_tiling *tiling)
{
    return fattn_cpu_workspace(backward_shared(p, tiling), pairs_scratch(p, tiling));
}
#endif
