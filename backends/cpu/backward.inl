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
 *
 * Here is what a panel holds, and a tile. backward_pairs.inl has a tile of products of pairs,
 * backward_run.inl a panel's way along its keys, gradients.inl how sums begin and end.
 */

typedef struct backward {
    panel panel;
    gradients shared;
    float *dot;        /* [dvp][br] */
    float *o, *ot;     /* [FV_LANES][dvp], [dvp][FV_LANES] */
    float *lse, *rest; /* [br] lse in units of the scores, and what its rounding left */
    float *delta;      /* [br] */
    bool some_lone;    /* a row sees one key */
    float *dqt, *dq;   /* [dp][br], [FV_LANES][dp] */
    float *dp;         /* [bc][br] dP, then dS'; of a strip with pairs */
    float **dp_rows;   /* [bc] */
    float *ds;         /* [bc][br] and, transposed, [br][bc]; dbias only */
    float *ds_rows;
    double *dbias_sums; /* [bc] */

    /* Products of floats. */
    float *dout; /* [br][dout_stride] as panel.q is [br][q_stride] */
    int64_t q_stride, dout_stride;
    float **out;        /* [bc] rows of dk or dv */
    const float **seen; /* [bc] rows of weights, from the first query that sees the key */
    float *nowhere;     /* [max(dp, dvp)] the row of keys past the end */
    prefetch_row *rows; /* [bc] that the next product needs */

    /* Products of pairs, which also take pairs of rows of q, dO and k. */
    const bf16_pair **v_rows;                /* [bc] */
    float *q_zipped, *dout_zipped;           /* [br / 2][dp], [dvp] */
    float *k_zipped, *k_transposed;          /* [bc / 2][dp], [dp][bc / 2] */
    uint16_t *p16, *ds16;                    /* [bc][br] Z P^T, dS^T */
    const bf16_pair **p16_rows, **ds16_rows; /* [bc] */
    const bf16_pair **weights;               /* [bc] those of a product */
    float *ds_pairs;                         /* [bc / 2][strip] of keys */
    float *sums, **sum_rows;                 /* [bc][max(dp, dvp)] what dv or dk gets */
    float lowered, lowered_dv;               /* what lift() owes dS, and Z P^T dO */
} backward;

/* What both kinds of products need; scores and dP are `columns` wide. */
static void backward_layout_both(backward *g, const fattn_problem *p, const fattn_tiling *tiling,
                                 int64_t columns, arena *from)
{
    const int64_t br = tiling->br, bc = tiling->bc;
    const int64_t bias = wants(p, FATTN_OUT_DBIAS) ? bc * br : 0;
    panel *const pn = &g->panel;

    panel_layout(pn, p, br, bc, from);
    panel_layout_rows(pn, from);
    g->o = carve(from, FV_LANES * pn->dvp, sizeof(float));
    g->ot = carve(from, pn->dvp * FV_LANES, sizeof(float));
    g->lse = carve(from, br, sizeof(float));
    g->rest = carve(from, br, sizeof(float));
    g->delta = carve(from, br, sizeof(float));
    g->dqt = carve(from, br * pn->dp, sizeof(float));
    g->dq = carve(from, FV_LANES * pn->dp, sizeof(float));
    pn->x = carve(from, bc * columns, sizeof(float));
    g->dp = carve(from, bc * columns, sizeof(float));
    g->dp_rows = carve(from, bc, sizeof *g->dp_rows);
    g->ds = carve(from, bias, sizeof(float));
    g->ds_rows = carve(from, bias, sizeof(float));
    g->dbias_sums = carve(from, bias ? bc : 0, sizeof(double));
}

static void backward_layout(backward *g, const fattn_problem *p, const fattn_tiling *tiling,
                            arena *from)
{
    const int64_t br = tiling->br, bc = tiling->bc;
    panel *const pn = &g->panel;

    backward_layout_both(g, p, tiling, br, from);
    panel_layout_keys(pn, 1, from);
    g->q_stride = spread(pn->dp);
    g->dout_stride = spread(pn->dvp);
    pn->q = carve(from, br * g->q_stride, sizeof(float));
    pn->qt = carve(from, br * pn->dp, sizeof(float));
    g->dout = carve(from, br * g->dout_stride, sizeof(float));
    g->dot = carve(from, br * pn->dvp, sizeof(float));
    g->out = carve(from, bc, sizeof *g->out);
    g->seen = carve(from, bc, sizeof *g->seen);
    g->nowhere = carve(from, fattn_max64(pn->dp, pn->dvp), sizeof(float));
    g->rows = carve(from, bc, sizeof *g->rows);
}

static int64_t backward_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    backward g;
    arena from = {0};
    backward_layout(&g, p, tiling, &from);
    return from.used;
}

#if FV_PAIRS
static void backward_layout_pairs(backward *g, const fattn_problem *p, const fattn_tiling *tiling,
                                  arena *from)
{
    const int64_t br = tiling->br, bc = tiling->bc;
    const int64_t k_size = bc * pairs_stride(p->dim), v_size = bc * pairs_stride(p->dim_v);
    panel *const pn = &g->panel;

    backward_layout_both(g, p, tiling, TILE_GROUP, from);
    /* Keys and values are done with when sums begin, and matrix registers with zipped keys when
     * they are transposed. */
    const int64_t sums = bc * fattn_max64(pn->dp, pn->dvp), zipped = bc / 2 * pn->dp;
    g->sums = carve(from, fattn_max64(k_size + v_size, sums), sizeof(float));
    pn->k_copy = g->sums;
    pn->v_copy = from->base ? g->sums + k_size : NULL;
    float *const rounded =
        carve(from, FV_TILES ? fattn_max64(bc * br, zipped) : bc * br, sizeof(float));
    g->p16 = (uint16_t *)(void *)rounded;
    g->ds16 = from->base ? g->p16 + bc * br : NULL;
    g->k_zipped = FV_TILES ? rounded : carve(from, zipped, sizeof(float));
    g->k_transposed = carve(from, FV_TILES ? zipped : 0, sizeof(float));
    pn->qt = carve(from, pairs_stride(p->dim) * br, sizeof(float));
    g->dot = carve(from, pairs_stride(p->dim_v) * br, sizeof(float));
    g->v_rows = carve(from, bc, sizeof *g->v_rows);
    g->q_zipped = carve(from, br / 2 * pn->dp, sizeof(float));
    g->dout_zipped = carve(from, br / 2 * pn->dvp, sizeof(float));
    g->p16_rows = carve(from, bc, sizeof *g->p16_rows);
    g->ds16_rows = carve(from, bc, sizeof *g->ds16_rows);
    g->weights = carve(from, bc, sizeof *g->weights);
    g->ds_pairs = carve(from, bc / 2 * TILE_GROUP, sizeof(float));
    g->sum_rows = carve(from, bc, sizeof *g->sum_rows);
}

static int64_t pairs_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    backward g;
    arena from = {0};
    backward_layout_pairs(&g, p, tiling, &from);
    return from.used;
}
#endif

/* --- A tile ----------------------------------------------------------------------------------- */

/* delta, which was dlse, = sum_c dO_c o_c - dlse of the rows at r, after g->dot. The sum runs as
 * those of dP do, so that a row whose o is one of its v has a dS of exactly 0 there. */
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
    fv_store(g->delta + r, fv_sub(delta, fv_load(g->delta + r)));
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

/* lse and dlse, the latter in delta. A row whose lse is -inf has no probabilities: it is dead, like
 * those past the last, and gives 0 whatever its dO and dlse are. */
static void load_numbers(backward *g)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const float *const lse = pn->buf->lse, *const dlse = pn->buf->dlse;

    pn->ragged = pn->rows < pn->width;
    g->some_lone = false;
    for (int64_t r = 0; r < pn->width; r++) {
        query_row *const row = &pn->row[r];
        const int64_t at = row->dead ? 0 : fattn_lse_index(p, &pn->seq, pn->b, row->h) + row->i;
        const float x = row->dead ? 0 : lse[at];
        if (x == -fattn_f32_infinity()) {
            row->dead = pn->ragged = true;
        }
        load_lse(g, r, row->dead ? 0 : x);
        row->lone = row->dead ? -1 : (int32_t)lone_key(pn, r);
        g->some_lone = g->some_lone || row->lone >= 0;
        g->delta[r] = p->features & FATTN_DLSE && !row->dead ? dlse[at] : 0;
    }
}

/* Rows q, dO and delta. */
static void load_rows(backward *g)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;

    load_queries(pn, pn->buf->q, p->dtype, &p->q, p->dim, pn->q, g->q_stride);
    load_queries(pn, pn->buf->dout, p->dtype_o, &p->dout, p->dim_v, g->dout, g->dout_stride);
    for (int64_t r = 0; r < pn->rows; r++) {
        if (pn->row[r].dead) {
            fill(g->dout + r * g->dout_stride, pn->dvp, 0);
        }
    }
    point_rows(pn->x_rows, pn->bc, pn->x, pn->br);
    point_rows(g->dp_rows, pn->bc, g->dp, pn->br);
    fill(g->nowhere, fattn_max64(pn->dp, pn->dvp), 0);
    transpose(pn->q, g->q_stride, pn->width, pn->dp, pn->qt, pn->br);
    transpose(g->dout, g->dout_stride, pn->width, pn->dvp, g->dot, pn->br);
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        load_delta(g, r);
    }
}

/* lse of the rows first .. first + count - 1 whose only key is in the tile becomes its score, as
 * the tile computes it. x: of row `first` */
static void settle_lone(backward *g, span s, unsigned terms, int64_t first, int64_t count,
                        const float *x, int64_t stride)
{
    const panel *const pn = &g->panel;
    for (int64_t r = first; g->some_lone && r < fattn_min64(first + count, pn->rows); r++) {
        const int64_t j = pn->row[r].lone - s.first, lane = (r - first) % FV_LANES;
        if (pn->row[r].lone < 0 || j < 0 || j >= s.live) {
            continue;
        }
        const fv dot = fv_load(x + j * stride + r - first - lane);
        float score[FV_LANES];
        fv slope;
        fv_store(score,
                 fattn_score(&pn->rule, terms, dot, pair_at(pn, terms, j, r - lane), &slope));
        const float difference = fabsf(score[lane] - g->lse[r] - g->rest[r]);
        if (difference <= lone_tolerance(pn, r, pn->row[r].lone, score[lane])) {
            g->lse[r] = score[lane];
            g->rest[r] = 0;
        }
    }
}

/* What P and dS are multiplied by: distances of ALiBi give small ones (soften.inl). */
static float lift_of(const fattn_problem *p) { return p->features & FATTN_ALIBI ? LIFT : 1; }

/* Scores in x and dP in dp become Z P and dS', lifted; ds gets dS where dbias is wanted. */
static void differentiate_tile(backward *g, span s, unsigned terms)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const bool drops = p->features & FATTN_DROPOUT, keeps_ds = wants(p, FATTN_OUT_DBIAS);
    const fv unit = fv_set1(pn->rule.unit), scale = fv_set1(pn->rule.scale);
    const float lift = lift_of(p);

    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv lse = fv_load(g->lse + r), rest = fv_load(g->rest + r);
        const fv delta = fv_load(g->delta + r);
        for (int64_t j = 0; j < s.padded; j++) {
            const int64_t at = j * pn->br + r;
            const fattn_score_pair pair = pair_at(pn, terms, j, r);
            fv slope;
            const fv x = fattn_score(&pn->rule, terms, fv_load(pn->x + at), pair, &slope);
            const fv z = drops ? fv_load(pn->z + at) : fv_set1(1);
            const fv power = fattn_softmax_exponent(fv_sub(x, lse), unit, rest);
            const fv weight = fv_exp2_from(power, LEAST_POWER, lift);
            const fv ds = fv_mul(weight, fv_sub(fv_mul(z, fv_load(g->dp + at)), delta));
            fv_store(pn->x + at, fv_mul(z, weight));
            fv_store(g->dp + at, fv_mul(fv_mul(ds, slope), scale));
            if (keeps_ds) {
                fv_store(g->ds + at, fv_mul(fv_set1(1 / lift), ds));
            }
        }
    }
}

/* to[j stride] += sums[j], which are n. */
static void add_sums(float *to, int64_t stride, const double *sums, int64_t n)
{
    if (stride == 0) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) {
            sum += sums[j];
        }
        *to += (float)sum;
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        to[j * stride] += (float)sums[j];
    }
}

/* dbias += dS. Rows after one another that share their entries are summed in double before, and so
 * are keys that do: equal terms round alike. */
static void add_dbias(backward *g, span s)
{
    const panel *const pn = &g->panel;
    const int64_t *const stride = pn->p->dbias_stride;
    const bool shared = stride[2] == 0 || stride[3] == 0;
    const bool sloped = pn->p->features & FATTN_ALIBI_BIAS;
    double *const sums = g->dbias_sums;
    bool fresh = true;
    transpose(g->ds, pn->br, s.padded, pn->width, g->ds_rows, pn->bc);
    for (int64_t r = 0; r < pn->rows; r++) {
        float *const ds = g->ds_rows + r * pn->bc;
        const int64_t at = term_index(pn, stride, r, s.first);
        for (int64_t j = 0; sloped && j < s.live; j++) { /* x += slope bias */
            ds[j] *= pn->slope[r];
        }
        float *const to = (float *)pn->buf->dbias + at;
        if (!shared) {
            for (int64_t j = 0; j < s.live; j++) {
                to[j * stride[3]] += ds[j];
            }
            continue;
        }
        for (int64_t j = 0; j < s.live; j++) {
            sums[j] = fresh ? ds[j] : sums[j] + ds[j];
        }
        fresh = r + 1 == pn->rows || term_index(pn, stride, r + 1, s.first) != at;
        if (fresh) {
            add_sums(to, stride[3], sums, s.live);
        }
    }
}

/* Register tiles of a product of a tile's keys, at least. */
static int64_t register_tiles(span s, int64_t columns)
{
    return s.padded / FV_NK * ((columns + TILE_GROUP - 1) / TILE_GROUP);
}

/* What a product of `tiles` register tiles fetches for the next one, where rows of keys are a page
 * apart: those that will be copied or added to. */
static prefetch_list fetch_keys(const backward *g, span s, const void *tensor, fattn_dtype dtype,
                                const fattn_strides *strides, int64_t dim, int64_t tiles)
{
    const panel *const pn = &g->panel;
    if (in_place(pn->p, strides)) {
        return NO_PREFETCH;
    }
    for (int64_t j = 0; j < s.live; j++) {
        g->rows[j].from = element(tensor, dtype, key_index(pn, strides, s.first + j));
        g->rows[j].bytes = dim * fattn_dtype_size(dtype);
    }
    return spread_rows(g->rows, fattn_max64(s.live, 0), tiles);
}

/* The same for sums that lie in a gradient. */
static prefetch_list fetch_sums(const backward *g, span s, const void *tensor,
                                const fattn_strides *strides, int64_t dim, int64_t tiles)
{
    const bool none = !tensor || adds_up_apart(g->panel.p);
    return none ? NO_PREFETCH : fetch_keys(g, s, tensor, FATTN_F32, strides, dim, tiles);
}

/* The most queries that are summed before a gradient is added to, and an even part of n that is no
 * more: equal terms round alike, so the error of such a sum grows with its length (dot_parts()). */
#define MOST_TERMS 96
static int64_t terms_of(const panel *pn, int64_t n)
{
    const int64_t most = pn->seq.sk <= PART_KEYS ? PART_TERMS : MOST_TERMS;
    const int64_t parts = (n + most - 1) / most;
    return ((n + parts - 1) / parts + 3) / 4 * 4;
}

/* tensor[j] += weights[j] rows for the keys of the tile. weights: [bc] rows of [br] */
static void add_keys(backward *g, span s, float *const *weights, const float *rows,
                     int64_t rows_stride, void *tensor, const fattn_strides *strides, int64_t dim,
                     float *apart, int64_t stride, prefetch_list later)
{
    panel *const pn = &g->panel;
    for (int64_t j = 0; j < s.padded; j++) {
        g->out[j] =
            j < s.live ? sum_row(pn, tensor, strides, apart, stride, s.first + j) : g->nowhere;
    }
    int64_t j = 0;
    for (int64_t r = 0; r < pn->width && j < s.padded; r += FV_LANES) {
        const int64_t first = j, past = keys_seen(pn, s, r + FV_LANES);
        const int64_t terms = terms_of(pn, pn->width - r);
        /* Only rows from r on see them. */
        for (int64_t i = r; past > first && i < pn->width; i += terms) {
            for (j = first; j < past; j++) {
                g->seen[j] = weights[j] + i;
            }
            later = product_rows(1 / lift_of(pn->p), past - first, g->seen + first,
                                 fattn_min64(terms, pn->width - i), rows + i * rows_stride,
                                 rows_stride, g->out + first, 0, dim, later);
        }
    }
}

/* Where scores and dP are not computed they are 0, for what comes of them is multiplied by 0. */
static void clear_unseen(backward *g, span s)
{
    const panel *const pn = &g->panel;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        for (int64_t j = keys_seen(pn, s, r + FV_LANES); j < s.padded; j++) {
            fv_store(pn->x + j * pn->br + r, fv_set1(0));
            fv_store(g->dp + j * pn->br + r, fv_set1(0));
        }
    }
}

/* dQ^T += K^T dS'^T, of a tile that the band cuts a register tile of rows at a time. */
static void add_queries(backward *g, span s)
{
    const panel *const pn = &g->panel;
    const bool cut = keys_seen(pn, s, FV_LANES) < s.padded;
    const int64_t step = cut ? TILE_GROUP : pn->width;
    for (int64_t r = 0; r < pn->width; r += step) {
        product_columns(pn->p->dim, false, NULL, pn->k, keys_seen(pn, s, r + step), g->dp + r,
                        pn->br, g->dqt + r, pn->br, fattn_min64(step, pn->width - r));
    }
}

/* Waits until the panel before has added to the keys of the tile: to all keys where they share an
 * entry of dbias. */
static void wait_for(const backward *g, span s, const fattn_cpu_progress *before)
{
    if (before) {
        const bool all = dbias_sums_keys(g->panel.p);
        fattn_cpu_wait(before, all ? INT64_MAX : s.first / g->panel.bc + 1);
    }
}

/* next: the tile after it */
static void backward_tile(backward *g, span s, span next, const fattn_cpu_progress *before)
{
    panel *const pn = &g->panel;
    const fattn_problem *const p = pn->p;
    const fattn_buffers *const buf = pn->buf;
    const bool needs_ds = wants(p, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DBIAS);

    /* 1. S^T and dP^T. */
    load_keys(pn, s, 0, buf->k, &p->k, p->dim, pn->k_copy, pn->dp, pn->k, NULL);
    const int64_t tiles = register_tiles(s, pn->width);
    pn->later = needs_ds ? fetch_keys(g, s, buf->v, p->dtype, &p->v, p->dim_v, tiles)
                         : fetch_sums(g, s, buf->dv, &p->dv, p->dim_v, tiles);
    dot_rows(pn, s, true, pn->k, p->dim, pn->qt, pn->x_rows);
    if (needs_ds) {
        load_keys(pn, s, 0, buf->v, &p->v, p->dim_v, pn->v_copy, pn->dvp, pn->v, NULL);
        pn->later = fetch_sums(g, s, buf->dv, &p->dv, p->dim_v, tiles);
        dot_rows(pn, s, false, pn->v, p->dim_v, g->dot, g->dp_rows);
    } else {
        fill(g->dp, s.padded * pn->br, 0);
    }
    clear_unseen(g, s);

    /* 2. Z P^T and dS'^T. */
    const unsigned terms = load_terms(pn, s);
    if (p->features & FATTN_DROPOUT) {
        load_dropout(pn, s);
    }
    settle_lone(g, s, terms, 0, pn->width, pn->x, pn->br);
    differentiate_tile(g, s, terms);

    /* 3. dQ^T += K^T dS'^T. */
    if (wants(p, FATTN_OUT_DQ)) {
        add_queries(g, s);
    }

    /* 4. What is shared. */
    wait_for(g, s, before);
    if (wants(p, FATTN_OUT_DBIAS)) {
        add_dbias(g, s);
    }
    if (wants(p, FATTN_OUT_DV)) {
        add_keys(g, s, pn->x_rows, g->dout, g->dout_stride, buf->dv, &p->dv, p->dim_v, g->shared.dv,
                 pn->dvp, fetch_sums(g, s, buf->dk, &p->dk, p->dim, register_tiles(s, p->dim_v)));
    }
    if (wants(p, FATTN_OUT_DK)) {
        add_keys(g, s, g->dp_rows, pn->q, g->q_stride, buf->dk, &p->dk, p->dim, g->shared.dk,
                 pn->dp,
                 fetch_keys(g, next, buf->k, p->dtype, &p->k, p->dim, register_tiles(s, p->dim)));
    }
}

/* to += factor from */
static void add_row(float *to, const float *from, int64_t n, float factor)
{
    const fv f = fv_set1(factor);
    int64_t c = 0;
    for (; c + FV_LANES <= n; c += FV_LANES) {
        fv_store(to + c, fv_muladd(f, fv_load(from + c), fv_load(to + c)));
    }
    if (c < n) {
        const int part = (int)(n - c);
        const fv sum = fv_muladd(f, fv_load(from + c), fv_load_part(to + c, part));
        fv_store_part(to + c, sum, part);
    }
}
