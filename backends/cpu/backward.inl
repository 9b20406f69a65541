/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward: a panel of queries against all of its keys. With the forward
 *
 *     x = score(q . k),  p = exp(x - lse),  o = sum_j Z p v_j
 *
 * and delta = sum_c dO_c o_c - dlse, a tile computes
 *
 *     P^T                from S^T = K Q^T and lse
 *     dP^T = V dO^T
 *     dS^T = P^T (Z dP^T - delta)         of x, and summed into dBias
 *     dS'  = dS slope scale               of the dot product
 *     dQ^T += K^T dS'^T                   kept by the panel, written once
 *     dV   += (Z P)^T dO                  added to memory, rows of keys
 *     dK   += dS'^T Q
 *
 * Sums over queries are the same for any number of threads because panels that add to the same
 * memory do so in the order of their numbers: they form a chain, and each publishes how many key
 * blocks it and all before it are through with. Panels of a chain still run side by side, one key
 * block apart, since only the additions wait. Items are handed out in ascending order, so the first
 * of those at work never waits and the rest follow.
 *
 * A chain is a key/value head of a sequence: all that add to the same dK and dV, or to a dBias
 * whose sums stay within a head. Where dBias is summed over sequences or heads, one chain holds
 * everything. f32 gradients are added up where they are; 16-bit ones in the workspace, and rounded
 * once at the end.
 */

/* --- What a run consists of ------------------------------------------------------------------- */

static bool wants(const fattn_problem *p, uint32_t outputs) { return p->outputs & outputs; }

static bool adds_up_apart(const fattn_problem *p)
{
    return fattn_gradient_dtype(p) != FATTN_F32 && wants(p, FATTN_OUT_DK | FATTN_OUT_DV);
}

/* Rows of dk in the workspace: packed ones as they are, else seqlen_k a sequence. */
static int64_t key_rows(const fattn_problem *p)
{
    return p->features & FATTN_CU_SEQLENS_K ? p->total_k : p->batch * p->seqlen_k;
}

/* Whether pairs of different key/value heads or sequences are summed in one entry of dbias. */
static bool dbias_crosses(const fattn_problem *p)
{
    return wants(p, FATTN_OUT_DBIAS) && (p->dbias_stride[0] == 0 || p->dbias_stride[1] == 0);
}

static bool dbias_is_shared(const fattn_problem *p)
{
    return wants(p, FATTN_OUT_DBIAS) && (dbias_crosses(p) || p->dbias_stride[2] == 0);
}

/* Whether different panels sum different keys in one entry of dbias. */
static bool dbias_sums_keys(const fattn_problem *p)
{
    return dbias_is_shared(p) && p->dbias_stride[3] == 0;
}

static bool is_chained(const fattn_problem *p)
{
    return wants(p, FATTN_OUT_DK | FATTN_OUT_DV) || dbias_is_shared(p);
}

/* What the workers share. */
typedef struct gradients {
    fattn_cpu_progress *progress; /* [items] */
    float *dsink;                 /* [items][group] parts of dsink */
    float *dk, *dv;               /* [key rows][Hk][dp], [dvp]: sums of 16-bit gradients */
} gradients;

/* Lays the shared memory out; returns its size, -1 when that is too large. */
static int64_t gradients_layout(const fattn_problem *p, const fattn_tiling *tiling, char *base,
                                gradients *g)
{
    const int64_t dp = vectors_of(p->dim) * FV_LANES, dvp = vectors_of(p->dim_v) * FV_LANES;
    const int64_t group = p->heads_k ? p->heads_q / p->heads_k : 0;
    const bool apart = adds_up_apart(p);
    const int64_t rows = apart ? fattn_cpu_bytes(key_rows(p), p->heads_k, sizeof(float)) : 0;
    const int64_t sizes[4] = {
        is_chained(p) ? fattn_cpu_bytes(tiling->items, sizeof(fattn_cpu_progress), 1) : 0,
        wants(p, FATTN_OUT_DSINK) ? fattn_cpu_bytes(tiling->items, group, sizeof(float)) : 0,
        apart && wants(p, FATTN_OUT_DK) ? fattn_cpu_bytes(rows, dp, 1) : 0,
        apart && wants(p, FATTN_OUT_DV) ? fattn_cpu_bytes(rows, dvp, 1) : 0,
    };
    void *parts[4];
    int64_t used = 0;
    for (int n = 0; n < 4; n++) {
        if (sizes[n] < 0 || used > INT64_MAX / 4) {
            return -1;
        }
        parts[n] = base ? base + used : NULL;
        used += sizes[n];
    }
    g->progress = parts[0];
    g->dsink = parts[1];
    g->dk = parts[2];
    g->dv = parts[3];
    return used;
}

static gradients gradients_of(const fattn_cpu_run *run)
{
    gradients g;
    (void)gradients_layout(run->problem, run->tiling, run->shared, &g);
    return g;
}

typedef struct backward {
    panel panel;
    gradients shared;
    float *dout, *dot; /* [br][dvp], [dvp][br] */
    float *o, *ot;     /* [FV_LANES][dvp], [dvp][FV_LANES] */
    float *lse, *rest; /* [br] lse in units of the scores, and what its rounding left */
    float *delta;      /* [br] */
    float *dqt, *dq;   /* [dp][br], [br][dp] */
    float *dp;         /* [bc][br] dP, then dS' */
    float **dp_rows;   /* [bc] */
    float *ds;         /* [bc][br] and, transposed, [br][bc]; dbias only */
    float *ds_rows;
    float **out;    /* [bc] rows of dk or dv */
    float *nowhere; /* [max(dp, dvp)] the row of keys past the end */
} backward;

static void backward_layout(backward *g, const fattn_problem *p, const fattn_tiling *tiling,
                            arena *from)
{
    const int64_t br = tiling->br, bc = tiling->bc;
    const int64_t bias = wants(p, FATTN_OUT_DBIAS) ? bc * br : 0;
    panel *const pn = &g->panel;

    panel_layout(pn, p, br, bc, from);
    panel_layout_rows(pn, from);
    g->dout = carve(from, br * pn->dvp, sizeof(float));
    g->dot = carve(from, br * pn->dvp, sizeof(float));
    g->o = carve(from, FV_LANES * pn->dvp, sizeof(float));
    g->ot = carve(from, pn->dvp * FV_LANES, sizeof(float));
    g->lse = carve(from, br, sizeof(float));
    g->rest = carve(from, br, sizeof(float));
    g->delta = carve(from, br, sizeof(float));
    g->dqt = carve(from, br * pn->dp, sizeof(float));
    g->dq = carve(from, br * pn->dp, sizeof(float));
    g->dp = carve(from, bc * br, sizeof(float));
    g->dp_rows = carve(from, bc, sizeof *g->dp_rows);
    g->ds = carve(from, bias, sizeof(float));
    g->ds_rows = carve(from, bias, sizeof(float));
    g->out = carve(from, bc, sizeof *g->out);
    g->nowhere = carve(from, fattn_max64(pn->dp, pn->dvp), sizeof(float));
}

static int64_t backward_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    backward g;
    arena from = {0};
    backward_layout(&g, p, tiling, &from);
    return from.used;
}

static int64_t backward_shared(const fattn_problem *p, const fattn_tiling *tiling)
{
    gradients g;
    return gradients_layout(p, tiling, NULL, &g);
}

/* --- Phase 1: gradients start from zero ------------------------------------------------------- */

/* Element 0 of row j of dk or dv of (sequence, key/value head), in the output or in the
 * workspace. */
static float *sum_row(const panel *pn, void *tensor, const fattn_strides *strides, float *apart,
                      int64_t stride, int64_t j)
{
    if (!adds_up_apart(pn->p)) {
        return (float *)tensor + key_index(pn, strides, j);
    }
    const int64_t row = pn->seq.k_batch * pn->p->seqlen_k + pn->seq.k_row + j;
    return apart + (row * pn->p->heads_k + pn->hk) * stride;
}

/* The part of a panel that rows of keys need. */
static panel keys_of(const fattn_cpu_run *run, int64_t b, int64_t hk)
{
    panel pn = {.p = run->problem, .buf = run->buffers, .b = b, .hk = hk};
    pn.seq = fattn_sequence_of(pn.p, pn.buf, b);
    pn.dp = vectors_of(pn.p->dim) * FV_LANES;
    pn.dvp = vectors_of(pn.p->dim_v) * FV_LANES;
    return pn;
}

static void clear_keys(const panel *pn, void *tensor, const fattn_strides *strides, int64_t dim,
                       float *apart, int64_t stride)
{
    const fattn_dtype dtype = fattn_gradient_dtype(pn->p);
    for (int64_t j = 0; j < pn->seq.slot_k; j++) {
        memset((char *)tensor + key_index(pn, strides, j) * fattn_dtype_size(dtype), 0,
               (size_t)(dim * fattn_dtype_size(dtype)));
        if (adds_up_apart(pn->p) && j < pn->seq.sk) {
            fill(sum_row(pn, tensor, strides, apart, stride, j), stride, 0);
        }
    }
}

/* Extent of an axis of dbias. */
static int64_t dbias_extent(const fattn_problem *p, int axis)
{
    const int64_t extent[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    return p->dbias_stride[axis] == 0 ? 1 : extent[axis];
}

static void clear_dbias_row(const fattn_cpu_run *run, int64_t row)
{
    const fattn_problem *const p = run->problem;
    const int64_t rows = dbias_extent(p, 2), heads = dbias_extent(p, 1), keys = dbias_extent(p, 3);
    float *const to = (float *)run->buffers->dbias + row / rows / heads * p->dbias_stride[0] +
                      row / rows % heads * p->dbias_stride[1] + row % rows * p->dbias_stride[2];
    for (int64_t j = 0; j < keys; j++) {
        to[j * p->dbias_stride[3]] = 0;
    }
}

#define CLEAR_ROWS 64 /* of dbias an item */

static int64_t clear_heads(const fattn_problem *p) { return p->batch * p->heads_k; }

static int64_t dbias_rows(const fattn_problem *p)
{
    if (!wants(p, FATTN_OUT_DBIAS) || p->features & FATTN_ACCUMULATE) {
        return 0;
    }
    return dbias_extent(p, 0) * dbias_extent(p, 1) * dbias_extent(p, 2);
}

static int64_t clear_count(const fattn_cpu_run *run)
{
    return clear_heads(run->problem) + (dbias_rows(run->problem) + CLEAR_ROWS - 1) / CLEAR_ROWS;
}

/* A key/value head, or some rows of dbias. */
static void clear_work(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const fattn_problem *const p = run->problem;
    const int64_t heads = clear_heads(p);
    (void)scratch;
    if (item >= heads) {
        const int64_t first = (item - heads) * CLEAR_ROWS;
        const int64_t past = fattn_min64(first + CLEAR_ROWS, dbias_rows(p));
        for (int64_t row = first; row < past; row++) {
            clear_dbias_row(run, row);
        }
        return;
    }

    const panel pn = keys_of(run, item / p->heads_k, item % p->heads_k);
    const gradients g = gradients_of(run);
    const int64_t blocks = run->tiling->q_blocks;
    for (int64_t n = 0; is_chained(p) && n < blocks; n++) {
        fattn_cpu_publish(&g.progress[item * blocks + n], 0);
    }
    if (p->features & FATTN_ACCUMULATE) {
        return;
    }
    if (wants(p, FATTN_OUT_DK)) {
        clear_keys(&pn, run->buffers->dk, &p->dk, p->dim, g.dk, pn.dp);
    }
    if (wants(p, FATTN_OUT_DV)) {
        clear_keys(&pn, run->buffers->dv, &p->dv, p->dim_v, g.dv, pn.dvp);
    }
}

/* --- Phase 2: panels -------------------------------------------------------------------------- */

/* delta = sum_c dO_c o_c - dlse of the rows at r, after g->dot. The sum runs as those of dP do, so
 * that a row whose o is one of its v has a dS of exactly 0 there. */
static void load_delta(backward *g, int64_t r)
{
    const panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    for (int64_t n = 0; n < FV_LANES; n++) {
        float *const o = g->o + n * pn->dvp;
        if (pn->row[r + n].dead) {
            fill(o, pn->dvp, 0);
        } else {
            row_load(o, p->dtype_o, element(pn->buf->o, p->dtype_o, query_index(pn, &p->o, r + n)),
                     p->dim_v);
        }
    }
    transpose(g->o, pn->dvp, FV_LANES, pn->dvp, g->ot, FV_LANES);

    fv delta = fv_set1(0);
    for (int64_t c = 0; c < p->dim_v; c++) {
        delta = fv_muladd(fv_load(g->ot + c * FV_LANES), fv_load(g->dot + c * pn->br + r), delta);
    }
    fv_store(g->delta + r, delta);
    for (int64_t n = r; n < r + FV_LANES && p->features & FATTN_DLSE; n++) {
        const query_row *const row = &pn->row[n];
        if (!row->dead) {
            const float *const dlse = pn->buf->dlse;
            g->delta[n] -= dlse[fattn_lse_index(p, &pn->seq, pn->b, row->h) + row->i];
        }
    }
}

/* lse in units of the scores, in two floats: one would be off by 2^-24 of lse, and all
 * probabilities of the row by as much. */
static void load_lse(backward *g, int64_t r, float natural)
{
    const double exact = (double)natural / g->panel.rule.natural;
    g->lse[r] = (float)exact;
    const double rest = exact - g->lse[r];
    g->rest[r] = rest == rest ? (float)rest : 0; /* infinities and NaN have none */
}

/* Rows q, dO, lse and delta. A row whose lse is -inf has no probabilities: it is dead, like those
 * past the last, and gives 0 whatever its dO and dlse are. */
static void backward_begin(backward *g)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const float *const lse = pn->buf->lse;

    load_queries(pn, pn->buf->q, p->dtype, &p->q, p->dim, pn->q, pn->dp);
    load_queries(pn, pn->buf->dout, p->dtype_o, &p->dout, p->dim_v, g->dout, pn->dvp);
    pn->ragged = pn->rows < pn->width;
    for (int64_t r = 0; r < pn->width; r++) {
        query_row *const row = &pn->row[r];
        const float x = row->dead ? 0 : lse[fattn_lse_index(p, &pn->seq, pn->b, row->h) + row->i];
        if (x == -fattn_f32_infinity()) {
            row->dead = pn->ragged = true;
            fill(g->dout + r * pn->dvp, pn->dvp, 0);
        }
        load_lse(g, r, row->dead ? 0 : x);
    }
    transpose(pn->q, pn->dp, pn->width, pn->dp, pn->qt, pn->br);
    transpose(g->dout, pn->dvp, pn->width, pn->dvp, g->dot, pn->br);
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        load_delta(g, r);
    }
    fill(g->dqt, pn->br * pn->dp, 0);
}

/* Scores in x and dP in dp become Z P and dS'; ds gets dS where dbias is wanted. */
static void differentiate_tile(backward *g, span s, unsigned terms)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const bool drops = p->features & FATTN_DROPOUT, keeps_ds = wants(p, FATTN_OUT_DBIAS);
    const fv unit = fv_set1(pn->rule.unit), scale = fv_set1(pn->rule.scale);

    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv lse = fv_load(g->lse + r), rest = fv_load(g->rest + r);
        const fv delta = fv_load(g->delta + r);
        for (int64_t j = 0; j < s.padded; j++) {
            const int64_t at = j * pn->br + r;
            const fattn_score_pair pair = pair_at(pn, terms, j, r);
            fv slope;
            const fv x = fattn_score(&pn->rule, terms, fv_load(pn->x + at), pair, &slope);
            const fv z = drops ? fv_load(pn->z + at) : fv_set1(1);
            const fv weight = fattn_softmax_weight(fv_sub(x, lse), unit, rest);
            const fv ds = fv_mul(weight, fv_sub(fv_mul(z, fv_load(g->dp + at)), delta));
            fv_store(pn->x + at, fv_mul(z, weight));
            fv_store(g->dp + at, fv_mul(fv_mul(ds, slope), scale));
            if (keeps_ds) {
                fv_store(g->ds + at, ds);
            }
        }
    }
}

/* dbias += dS, row by row; a row of sums over keys first sums up its own. */
static void add_dbias(backward *g, span s)
{
    const panel *const pn = &g->panel;
    const int64_t *const stride = pn->p->dbias_stride;
    transpose(g->ds, pn->br, s.padded, pn->width, g->ds_rows, pn->bc);
    for (int64_t r = 0; r < pn->rows; r++) {
        float *const to = (float *)pn->buf->dbias + term_index(pn, stride, r, s.first);
        const float *const ds = g->ds_rows + r * pn->bc;
        if (stride[3] == 0) {
            float sum = 0;
            for (int64_t j = 0; j < s.live; j++) {
                sum += ds[j];
            }
            *to += sum;
            continue;
        }
        for (int64_t j = 0; j < s.live; j++) {
            to[j * stride[3]] += ds[j];
        }
    }
}

/* tensor[j] += weights[j] rows for the keys of the tile. weights: [bc] rows of [br] */
static void add_keys(backward *g, span s, float *const *weights, const float *rows, void *tensor,
                     const fattn_strides *strides, int64_t dim, float *apart, int64_t stride)
{
    panel *const pn = &g->panel;
    for (int64_t j = 0; j < s.padded; j++) {
        g->out[j] =
            j < s.live ? sum_row(pn, tensor, strides, apart, stride, s.first + j) : g->nowhere;
    }
    product_rows(1, s.padded, (const float *const *)weights, pn->width, rows, stride, g->out, dim);
}

static void backward_tile(backward *g, span s, const fattn_cpu_progress *before)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const fattn_buffers *const buf = pn->buf;
    const bool needs_ds = wants(p, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DBIAS);

    /* 1. S^T and dP^T. */
    load_keys(pn, s, buf->k, &p->k, p->dim, pn->k_copy, pn->dp, pn->k);
    product_rows(0, s.padded, pn->k, p->dim, pn->qt, pn->br, pn->x_rows, pn->width);
    if (needs_ds) {
        load_keys(pn, s, buf->v, &p->v, p->dim_v, pn->v_copy, pn->dvp, pn->v);
        product_rows(0, s.padded, pn->v, p->dim_v, g->dot, pn->br, g->dp_rows, pn->width);
    } else {
        fill(g->dp, s.padded * pn->br, 0);
    }

    /* 2. Z P^T and dS'^T. */
    const unsigned terms = load_terms(pn, s);
    if (p->features & FATTN_DROPOUT) {
        load_dropout(pn, s);
    }
    differentiate_tile(g, s, terms);

    /* 3. dQ^T += K^T dS'^T. */
    if (wants(p, FATTN_OUT_DQ)) {
        product_columns(p->dim, NULL, pn->k, s.padded, g->dp, pn->br, g->dqt, pn->br, pn->width);
    }

    /* 4. What is shared, when the panel before has added to these keys: to all keys where they
     * share an entry of dbias. */
    if (before) {
        fattn_cpu_wait(before, dbias_sums_keys(p) ? INT64_MAX : s.first / pn->bc + 1);
    }
    if (wants(p, FATTN_OUT_DBIAS)) {
        add_dbias(g, s);
    }
    if (wants(p, FATTN_OUT_DV)) {
        add_keys(g, s, pn->x_rows, g->dout, buf->dv, &p->dv, p->dim_v, g->shared.dv, pn->dvp);
    }
    if (wants(p, FATTN_OUT_DK)) {
        add_keys(g, s, g->dp_rows, pn->q, buf->dk, &p->dk, p->dim, g->shared.dk, pn->dp);
    }
}

static void store_dq(backward *g)
{
    const panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const fattn_dtype dtype = fattn_gradient_dtype(p);
    transpose(g->dqt, pn->br, pn->dp, pn->width, g->dq, pn->dp);
    for (int64_t r = 0; r < pn->rows; r++) {
        const int64_t at = query_index(pn, &p->dq, r);
        float *const row = g->dq + r * pn->dp;
        if (p->features & FATTN_ACCUMULATE) { /* f32, then */
            const float *const old = (const float *)pn->buf->dq + at;
            for (int64_t c = 0; c < p->dim; c++) {
                row[c] += old[c];
            }
        }
        row_store((char *)pn->buf->dq + at * fattn_dtype_size(dtype), dtype, row, p->dim, 1);
    }
}

/* The panel's part of dSink = -sum over its rows of exp(sink - lse) delta, a number a head. */
static void store_dsink(const backward *g, float *parts)
{
    const panel *const pn = &g->panel;
    const float *const sink = pn->buf->sink;
    for (int64_t r = 0; r < pn->rows; r++) {
        const query_row *const row = &pn->row[r];
        if (row->dead) {
            continue;
        }
        float weight[FV_LANES];
        fv_store(weight, fattn_softmax_weight(fv_set1(sink[row->h]), fv_set1((float)FATTN_LOG2E),
                                              fv_set1(g->lse[r])));
        parts[row->h - pn->hk * pn->group] -= weight[0] * g->delta[r];
    }
}

/* The panels of a chain have consecutive numbers. */
static int64_t chain_length(const fattn_cpu_run *run)
{
    return dbias_crosses(run->problem) ? run->tiling->items : run->tiling->q_blocks;
}

/* A panel that adds: everything but the chain. */
static void backward_panel(backward *g, const fattn_cpu_progress *before, fattn_cpu_progress *own)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    int64_t block = 0, past = INT64_MAX;

    backward_begin(g);
    panel_blocks(pn, &block, &past);
    if (!wants(p, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV | FATTN_OUT_DBIAS)) {
        past = 0;
    }
    for (; block < past; block++) {
        const span s = span_of(pn, block);
        if (s.kind == FATTN_TILE_EMPTY) {
            continue;
        }
        backward_tile(g, s, before);
        if (own) {
            fattn_cpu_publish(own, block + 1);
        }
    }
    if (wants(p, FATTN_OUT_DQ)) {
        store_dq(g);
    }
}

static void backward_work(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const fattn_problem *const p = run->problem;
    const fattn_work work = fattn_schedule_item(run->tiling, p->heads_k, item);
    arena from = {.base = scratch};
    backward g;
    panel *const pn = &g.panel;
    backward_layout(&g, p, run->tiling, &from);
    g.shared = gradients_of(run);

    fattn_cpu_progress *const own = is_chained(p) ? &g.shared.progress[item] : NULL;
    const fattn_cpu_progress *const before = own && item % chain_length(run) != 0 ? own - 1 : NULL;
    const bool has_rows = panel_open(pn, run, work.batch, work.head, work.block * pn->br);
    if (has_rows) {
        for (int64_t j = 0; j < pn->bc; j++) {
            g.dp_rows[j] = g.dp + j * pn->br;
        }
        fill(g.nowhere, fattn_max64(pn->dp, pn->dvp), 0);
        backward_panel(&g, before, own);
    }
    if (wants(p, FATTN_OUT_DSINK)) {
        float *const parts = g.shared.dsink + item * pn->group;
        fill(parts, pn->group, 0);
        if (has_rows) {
            store_dsink(&g, parts);
        }
    }
    if (before) {
        fattn_cpu_wait(before, INT64_MAX);
    }
    if (own) {
        fattn_cpu_publish(own, INT64_MAX);
    }
}

static int64_t backward_count(const fattn_cpu_run *run) { return run->tiling->items; }

/* --- Phase 3: rounding, and the sums of dSink ------------------------------------------------- */

static void round_keys(const panel *pn, void *tensor, const fattn_strides *strides, int64_t dim,
                       float *apart, int64_t stride)
{
    const fattn_dtype dtype = fattn_gradient_dtype(pn->p);
    for (int64_t j = 0; j < pn->seq.sk; j++) {
        row_store((char *)tensor + key_index(pn, strides, j) * fattn_dtype_size(dtype), dtype,
                  sum_row(pn, tensor, strides, apart, stride, j), dim, 1);
    }
}

/* dsink of head h: the parts of its panels in the order of their numbers. */
static void sum_dsink(const fattn_cpu_run *run, const gradients *g, int64_t h)
{
    const fattn_problem *const p = run->problem;
    const int64_t group = p->heads_q / p->heads_k, blocks = run->tiling->q_blocks;
    float *const dsink = run->buffers->dsink;
    float sum = p->features & FATTN_ACCUMULATE ? dsink[h] : 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t first = (b * p->heads_k + h / group) * blocks;
        for (int64_t n = 0; n < blocks; n++) {
            sum += g->dsink[(first + n) * group + h % group];
        }
    }
    dsink[h] = sum;
}

static int64_t finish_heads(const fattn_problem *p)
{
    return adds_up_apart(p) ? p->batch * p->heads_k : 0;
}

static int64_t finish_count(const fattn_cpu_run *run)
{
    const fattn_problem *const p = run->problem;
    return finish_heads(p) + (wants(p, FATTN_OUT_DSINK) ? p->heads_q : 0);
}

static void finish_work(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const fattn_problem *const p = run->problem;
    const gradients g = gradients_of(run);
    const int64_t heads = finish_heads(p);
    (void)scratch;
    if (item >= heads) {
        sum_dsink(run, &g, item - heads);
        return;
    }
    const panel pn = keys_of(run, item / p->heads_k, item % p->heads_k);
    if (wants(p, FATTN_OUT_DK)) {
        round_keys(&pn, run->buffers->dk, &p->dk, p->dim, g.dk, pn.dp);
    }
    if (wants(p, FATTN_OUT_DV)) {
        round_keys(&pn, run->buffers->dv, &p->dv, p->dim_v, g.dv, pn.dvp);
    }
}

/* --- Tiles ------------------------------------------------------------------------------------ */

static const fattn_tile backward_tiles[] = {
    {TILE_ROWS(144), 96}, {TILE_ROWS(96), 96}, {TILE_ROWS(48), 64}, {TILE_ROWS(16), 32}, {0, 0}};

static int64_t backward_fast_bytes(const fattn_problem *p, fattn_tile tile)
{
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    return backward_scratch(p, &tiling) + keys_in_place_bytes(p, &tiling);
}

static int64_t backward_workspace(const fattn_problem *p, const fattn_tiling *tiling)
{
    return fattn_cpu_workspace(backward_shared(p, tiling), backward_scratch(p, tiling),
                               tiling->items);
}
