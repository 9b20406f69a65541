/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward: a block of queries against a part of its keys, one tile of keys at a time.
 *
 *     S^T = K Q^T         scores, with every feature of score.h
 *     P^T                 online softmax; l and the factors alpha for what came before
 *     O^T = O^T alpha + V^T P^T
 *
 * A block is cut into strips, panels of one register tile's width. The scores of a strip, its
 * queries and a few rows of the tile fill the first-level cache and are contiguous there; the
 * strips of a block take turns with a tile of keys and values that is loaded once and stays in the
 * second.
 *
 * With one part a strip ends in o and lse; with several, each leaves {m, l, o} in the workspace
 * and a second phase merges them in ascending order. Decoding (decode.inl) is the same walk with
 * other products.
 */

/* One strip. */
typedef struct forward {
    panel panel;
    float *m, *l; /* [br] */
    float *ot;    /* [dvp][br] */

    bool few;     /* keys: channels are in the lanes of scores, and queries are not turned */
    bool fresh;   /* ot holds nothing yet */
    bool by_rows; /* ot is o: [br][dvp], normalised */
    bool placed;  /* but o lies where it belongs */

    bool narrow;         /* the last tile whose range was looked for had no small weights */
    int64_t met, missed; /* tiles, and those among them that turned out not to be near */

    /* Scratch that the strips share. */
    float lowered;      /* the factor of sums of lifted probabilities, or 1 */
    float *alpha;       /* [br] */
    float *o;           /* [br][dvp] */
    const char **later; /* rows to fetch; of the first strip alone */
} forward;

/* The fewest register tiles that hold the rows of decoding. */
#define STRIP_ROWS ((DECODE_ROWS + TILE_GROUP - 1) / TILE_GROUP * TILE_GROUP)
#define BLOCK_ROWS TILE_ROWS(384) /* most rows of a block */
#define BLOCK_KEYS 128            /* of a tile, if they fit */
#define STRIPS (BLOCK_ROWS / STRIP_ROWS)
_Static_assert(BLOCK_ROWS % STRIP_ROWS == 0, "blocks are strips");

/* `count` strips of br rows. */
static void strips_layout(forward *strips, int64_t count, const fattn_problem *p, int64_t br,
                          int64_t bc, arena *from)
{
    panel_layout(&strips->panel, p, br, bc, from);
    panel_layout_keys(&strips->panel, from);
    strips->panel.q = carve(from, br * strips->panel.dp, sizeof(float));
    strips->panel.x = carve(from, br * bc, sizeof(float));
    strips->alpha = carve(from, br, sizeof(float));
    strips->o = carve(from, br * strips->panel.dvp, sizeof(float));
    for (int64_t n = 0; n < count; n++) {
        forward *const f = &strips[n];
        if (n > 0) {
            *f = strips[0];
        }
        panel_layout_rows(&f->panel, from);
        f->panel.qt = carve(from, br * f->panel.dp, sizeof(float));
        f->m = carve(from, br, sizeof(float));
        f->l = carve(from, br, sizeof(float));
        f->ot = carve(from, br * f->panel.dvp, sizeof(float));
    }
}

/* Rows that a block of keys fetches for later, at most: results and queries, and what fills up the
 * last step. */
static int64_t later_rows(int64_t count, int64_t br, int64_t bc)
{
    return 2 * count * br + count * bc / FV_NK;
}

/* Returns the number of strips of a block. */
static int64_t forward_layout(forward *strips, const fattn_problem *p, const fattn_tiling *tiling,
                              arena *from)
{
    const int64_t br = fattn_min64(tiling->br, STRIP_ROWS), count = tiling->br / br;
    strips_layout(strips, count, p, br, tiling->bc, from);
    strips->later = carve(from, later_rows(count, br, tiling->bc), sizeof *strips->later);
    return count;
}

/* Opens the strips of a block of rows; returns how many have any. */
static int64_t forward_open(forward *strips, int64_t count, const fattn_cpu_run *run,
                            fattn_work work)
{
    int64_t n = 0;
    const int64_t steps = run->problem->seqlen_k / PAIRS_STEP + 1; /* of the longest sequence */
    point_rows(strips->panel.x_rows, fattn_min64(strips->panel.bc, steps * PAIRS_STEP),
               strips->panel.x, strips->panel.br);
    while (n < count && panel_open(&strips[n].panel, run, work.batch, work.head,
                                   work.block * run->tiling->br + n * strips->panel.br, false)) {
        n++;
    }
    return n;
}

static int64_t forward_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    forward strips[STRIPS];
    arena from = {0};
    (void)forward_layout(strips, p, tiling, &from);
    return from.used;
}

/* Floats that one part leaves behind: m, l, o of each strip. */
static int64_t part_size(const fattn_problem *p, const fattn_tiling *tiling)
{
    return tiling->br * (2 + vectors_of(p->dim_v) * FV_LANES);
}

static int64_t forward_shared(const fattn_problem *p, const fattn_tiling *tiling)
{
    if (tiling->splits == 1) {
        return 0;
    }
    return fattn_cpu_bytes(tiling->items, part_size(p, tiling), sizeof(float));
}

/* --- One part --------------------------------------------------------------------------------- */

/* Where a part has strip n. */
static float *part_of(const forward *f, float *part, int64_t n)
{
    return part + n * f->panel.br * (2 + f->panel.dvp);
}

static fattn_softmax state_load(const forward *f, int64_t r)
{
    return (fattn_softmax){.m = fv_load(f->m + r), .l = fv_load(f->l + r)};
}

static void state_store(forward *f, int64_t r, fattn_softmax state)
{
    fv_store(f->m + r, state.m);
    fv_store(f->l + r, state.l);
}

/* Nothing met but the sink, which belongs to the first part. */
static void state_begin(forward *f, int64_t split)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        state_store(f, r, fattn_softmax_empty());
    }
    if (p->features & FATTN_SINK && split == 0) {
        const float *const sink = pn->buf->sink;
        for (int64_t r = 0; r < pn->width; r++) {
            f->alpha[r] = sink[pn->row[r].h];
        }
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            state_store(f, r, fattn_softmax_sink(fv_load(f->alpha + r)));
        }
    }
}

/* Whether keys are so few that summing the lanes of each product costs less than turning queries,
 * which grows with dim. Such sums round otherwise, which a row that may not depend on its
 * neighbours can tell. */
static bool few_keys(const panel *pn)
{
    const fattn_problem *const p = pn->p;
    return FV_LANES >= 8 && pn->seq.sk <= 3 * p->dim / 16 && p->dim % FV_LANES == 0 &&
           !(p->features & FATTN_BATCH_INVARIANT);
}

/* Queries in scratch, and the state of a part. */
INLINE void forward_begin(forward *f, bool paired, int64_t split)
{
    panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    pn->step = paired ? PAIRS_STEP : FV_NK;
    f->few = !paired && few_keys(pn);
    if (paired) {
        pairs_load_queries(pn);
    } else if (!f->few) {
        transpose_queries(pn, pn->buf->q, &p->q, pn->q, pn->qt);
    }
    f->fresh = true;
    f->by_rows = f->placed = f->narrow = false;
    f->met = f->missed = 0;
    state_begin(f, split);
}

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

/* Dot products of steps first .. past - 1 become scores. */
static void score_steps(panel *pn, unsigned terms, int64_t first, int64_t past)
{
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        for (int64_t j = first; j < past; j++) {
            float *const x = pn->x + j * pn->br + r;
            fv slope;
            fv_store(x,
                     fattn_score(&pn->rule, terms, fv_load(x), pair_at(pn, terms, j, r), &slope));
        }
    }
}

/* Whether all rows keep the same keys of the tile, and nothing is masked but those past the
 * end. */
static bool ends_alike(const panel *pn, span s)
{
    return s.kept.first == 0 && s.kept.past == s.live && !pn->masked;
}

/* Dot products in x become scores; those that are scores already, between two edges of a band, are
 * left alone. */
static void score_tile(panel *pn, span s)
{
    const bool alike = ends_alike(pn, s);
    if (alike) {
        s.kind = FATTN_TILE_FULL;
    }
    const unsigned terms = load_terms(pn, s);
    const int64_t steps = s.padded / pn->phases;
    if (terms == FATTN_SCORE_KEEP && !pn->masked && pn->phases == 1 && s.kept.first < s.kept.past) {
        score_steps(pn, terms, 0, s.kept.first);
        score_steps(pn, terms, s.kept.past, steps);
    } else if (terms) {
        score_steps(pn, terms, 0, steps);
    }
    if (alike) {
        fill(pn->x + s.live * pn->pitch, (s.padded - s.live) * pn->pitch, -INFINITY);
    }
}

/* Keys whose probabilities are summed apart, and keys after which the sums join: rounding errors of
 * l reach lse in full, and grow with the length of a sum. */
#define PARTIAL_SUMS 4
#define SUMMED_KEYS 64
_Static_assert(FV_NK % PARTIAL_SUMS == 0, "tiles hold whole steps");

/* The largest and the smallest of each row's scores. */
typedef struct score_range {
    fv most, least;
} score_range;

/* masked, a literal: scores of -inf, which are masked ones, do not count as small. */
INLINE score_range range_of(const float *x, int64_t stride, int64_t steps, bool masked)
{
    const fv none = fv_set1(-INFINITY), all = fv_set1(INFINITY);
    score_range part[PARTIAL_SUMS];
    for (int n = 0; n < PARTIAL_SUMS; n++) {
        part[n] = (score_range){.most = none, .least = all};
    }
    for (int64_t j = 0; j < steps; j += PARTIAL_SUMS) {
        for (int n = 0; n < PARTIAL_SUMS; n++) {
            const fv score = fv_load(x + (j + n) * stride);
            const fv low = masked ? fv_select(fv_eq(score, none), all, score) : score;
            part[n].most = fv_max(part[n].most, score);
            part[n].least = fv_min(part[n].least, low);
        }
    }
    for (int n = 1; n < PARTIAL_SUMS; n++) {
        part->most = fv_max(part->most, part[n].most);
        part->least = fv_min(part->least, part[n].least);
    }
    return *part;
}

/*
 * Probabilities below 2^-126, the normal range, are slow: each product with one takes hundreds of
 * cycles, and so does a power that becomes 0. Steep slopes of ALiBi, biases that stand for masks,
 * and large scores have whole tiles of them. Where a tile has some, those that round to 0 are
 * selected to 0, and all are taken 2^32 times as large, which is exact, as is lowering their sums.
 * As operands of products of pairs, those below the normal range are 0 anyway; and where all that
 * are below are masked, selecting is enough.
 */
#define LIFT 0x1p32f
#define LEAST_POWER (-150.0f)
#define LEAST_NORMAL (-126.0f)

/* How scores become probabilities relative to a base. Literals: near, `window` says; selected, some
 * are small or masked; lifted, as they are then; stored, as pairs. */
typedef struct weighing {
    bool near, selected, lifted, stored;
    fv unit, base;
    window window;
} weighing;

/* Scores of a vector of rows become probabilities, of which the sum is returned. */
INLINE fv weigh_rows(float *x, int64_t stride, int64_t steps, weighing *w)
{
    const fv zero = fv_set1(0);
    const float from = w->lifted ? LEAST_POWER : LEAST_NORMAL, factor = w->lifted ? LIFT : 1;
    fv sum[PARTIAL_SUMS] = {zero, zero, zero, zero}, total = zero;
    for (int64_t j = 0; j < steps; j += PARTIAL_SUMS) {
        fv weight[PARTIAL_SUMS];
        uv place[PARTIAL_SUMS];
        if (j % SUMMED_KEYS == 0) {
            total = fv_add(total, fv_add(fv_add(sum[0], sum[1]), fv_add(sum[2], sum[3])));
            sum[0] = sum[1] = sum[2] = sum[3] = zero;
        }
        for (int n = 0; n < PARTIAL_SUMS; n++) {
            const fv score = fv_load(x + (j + n) * stride);
            if (w->near) {
                weight[n] = window_weight(&w->window, score, &place[n]);
            } else {
                const fv power = fattn_softmax_exponent(score, w->unit, w->base);
                weight[n] = w->selected ? fv_exp2_from(power, from, factor) : fv_exp2(power);
            }
            sum[n] = fv_add(sum[n], weight[n]);
        }
        for (int n = 0; n < PARTIAL_SUMS; n += 2) {
            if (w->near) {
                window_meet(&w->window, place[n], place[n + 1]);
            }
            keep_weights(x, stride, j + n, weight[n], weight[n + 1], w->stored);
        }
    }
    return fv_add(total, fv_add(fv_add(sum[0], sum[1]), fv_add(sum[2], sum[3])));
}

/* Scores of the rows at r become probabilities relative to the new maximum. most: of the scores.
 * Returns alpha. */
INLINE fv soften_rows(forward *f, int64_t r, fv most, int64_t steps, bool selected, bool lifted,
                      bool stored)
{
    const fv unit = fv_set1(f->panel.rule.unit);
    fattn_softmax state = state_load(f, r);
    const fv alpha = fattn_softmax_raise(&state, most, unit);
    weighing w = {.selected = selected,
                  .lifted = lifted,
                  .stored = stored,
                  .unit = unit,
                  .base = fattn_softmax_base(state)};
    const fv total = weigh_rows(f->panel.x + r, f->panel.br, steps, &w);
    fattn_softmax_add(&state, lifted ? fv_mul(fv_set1(f->lowered), total) : total);
    state_store(f, r, state);
    fv_store(f->alpha + r, alpha);
    return alpha;
}

/* values[r] = the largest of the lanes that hold row r, in all of them. */
static void fold_largest(const panel *pn, float *values)
{
    for (int64_t step = pn->width / 2; step >= pn->pitch; step /= 2) {
        for (int64_t r = 0; r < step; r++) {
            values[r] = values[r] > values[r + step] ? values[r] : values[r + step];
        }
    }
    for (int64_t r = pn->pitch; r < pn->width; r++) {
        values[r] = values[r - pn->pitch];
    }
}

/* Scores in x become probabilities, of which f->lowered tells how they are lifted; lanes of one row
 * share its maximum. masked: some scores may be; stored, multiplied, literals: as pairs. Whether
 * some alpha is not 1. */
INLINE bool soften_tile(forward *f, int64_t steps, bool masked, bool stored, bool multiplied)
{
    const panel *const pn = &f->panel;
    const fv unit = fv_set1(pn->rule.unit), one = fv_set1(1);
    mv normal = fv_eq(one, one), narrow = normal, steady = normal;
    float least[STRIP_ROWS];
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const score_range scores = masked ? range_of(pn->x + r, pn->br, steps, true)
                                          : range_of(pn->x + r, pn->br, steps, false);
        fv_store(f->alpha + r, scores.most);
        fv_store(least + r, scores.least);
    }
    if (pn->phases > 1) {
        fold_largest(pn, f->alpha);
    }
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fattn_softmax met = {.m = fv_max(fv_load(f->m + r), fv_load(f->alpha + r))};
        const fv base = fattn_softmax_base(met);
        const fv power = fattn_softmax_exponent(fv_load(least + r), unit, base);
        normal = mv_and(normal, fv_le(fv_set1(LEAST_NORMAL), power));
        narrow = mv_and(narrow, fv_le(fv_set1(-WINDOW_DOWN), power));
    }
    const bool lifted = !mv_all(normal) && !multiplied, selected = masked || !mv_all(normal);
    f->narrow = mv_all(narrow);
    f->lowered = lifted ? 1 / LIFT : 1;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv most = fv_load(f->alpha + r);
        const fv alpha = lifted     ? soften_rows(f, r, most, steps, true, true, stored)
                         : selected ? soften_rows(f, r, most, steps, true, false, stored)
                                    : soften_rows(f, r, most, steps, false, false, stored);
        steady = mv_and(steady, fv_eq(alpha, one));
    }
    return !mv_all(steady);
}

/*
 * Where all scores of a tile are near the bases that their rows already have, the largest and the
 * smallest need not be looked for, and the bases can stay, m then being the largest score of some
 * earlier tile: probabilities are up to 2^WINDOW_UP instead of 1. Whether all are near is known
 * once they are probabilities. If they are not, nothing but x has changed.
 */
INLINE bool soften_near(forward *f, int64_t steps, bool stored)
{
    const panel *const pn = &f->panel;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        weighing w = {.near = true, .stored = stored};
        if (!window_open(&w.window, pn->rule.unit, fv_load(f->m + r))) {
            return false;
        }
        fv_store(f->alpha + r, weigh_rows(pn->x + r, pn->br, steps, &w));
        if (!window_holds(&w.window)) {
            return false;
        }
    }
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        fattn_softmax state = state_load(f, r);
        fattn_softmax_add(&state, fv_load(f->alpha + r));
        state_store(f, r, state);
    }
    f->lowered = 1;
    return true;
}

/* Tiles for each of which one may turn out not to be near, which costs half of its time. */
#define TILES_A_MISS 8

/* Whether a tile's scores are likely to be near. That depends on other rows, which may not be. */
static bool expects_near(const forward *f, span s)
{
    return FV_NEAR && s.kind == FATTN_TILE_FULL && f->narrow &&
           f->missed * TILES_A_MISS <= f->met && !(f->panel.p->features & FATTN_BATCH_INVARIANT);
}

/* p = Z p, after l has seen p. */
INLINE void drop_tile(panel *pn, span s, bool pairs)
{
    load_dropout(pn, s);
    for (int64_t j = 0; j < s.padded / pn->phases; j += 2) {
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            const int64_t at = j * pn->br + r;
            const fv first = fv_mul(fv_load(pn->x + at), fv_load(pn->z + at));
            const fv second = fv_mul(fv_load(pn->x + at + pn->br), fv_load(pn->z + at + pn->br));
            keep_weights(pn->x + r, pn->br, j, first, second, pairs);
        }
    }
}

/* x *= f for some rows of floats, padded to vectors. */
static void scale_rows(float *x, int64_t rows, int64_t stride, int64_t n, fv f)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < n; c += FV_LANES) {
            fv_store(x + r * stride + c, fv_mul(f, fv_load(x + r * stride + c)));
        }
    }
}

/* Row r of o where it belongs. */
static void *row_of_o(const panel *pn, int64_t r)
{
    const fattn_problem *const p = pn->p;
    return (char *)pn->buf->o + query_index(pn, &p->o, r) * fattn_dtype_size(p->dtype_o);
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

/* x = the scores of a tile. */
INLINE void forward_scores(forward *f, span s, bool paired)
{
    panel *const pn = &f->panel;
    if (paired) {
        pairs_scores(pn, s);
    } else if (f->few) {
        dot_few(pn, s);
    } else {
        /* score_tile() masks what is not computed */
        dot_rows(pn, s, pn->k, pn->p->dim, pn->qt, pn->x_rows);
    }
    score_tile(pn, s);
}

/* pairs: probabilities and values are pairs, which takes `paired`: queries and keys are. */
INLINE void forward_tile(forward *f, span s, bool paired, bool pairs)
{
    panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;

    /* 1. Scores. */
    forward_scores(f, s, paired);

    /* 2. Probabilities. */
    const bool drops = p->features & FATTN_DROPOUT;
    const bool masked = s.kind == FATTN_TILE_PARTIAL;
    const int64_t keys = (s.live + PARTIAL_SUMS - 1) / PARTIAL_SUMS * PARTIAL_SUMS;
    const bool stored = pairs && !drops;
    const bool hoped = expects_near(f, s);
    const bool near = hoped && (stored ? soften_near(f, keys, true) : soften_near(f, keys, false));
    if (hoped && !near) {
        forward_scores(f, s, paired);
        f->missed++;
    }
    f->met++;
    const bool rose = !near && (stored ? soften_tile(f, keys, masked, true, true)
                                       : soften_tile(f, keys, masked, false, pairs));
    if (!(p->outputs & FATTN_OUT_O)) {
        return;
    }
    fill(pn->x + keys / (1 + stored) * pn->br, (s.padded - keys) / (1 + stored) * pn->br, 0);
    if (drops) {
        drop_tile(pn, s, pairs);
    }

    /* 3. Values. */
    if (pairs) {
        pairs_mix(pn, s, f->fresh, rose ? f->alpha : NULL, f->ot);
    } else if (f->by_rows) {
        mix_rows(f, s);
    } else {
        if (f->lowered != 1) {
            scale_rows(f->alpha, 1, pn->br, pn->width, fv_set1(LIFT));
        }
        product_columns(p->dim_v, f->fresh, rose || f->lowered != 1 ? f->alpha : NULL, pn->v,
                        s.padded, pn->x, pn->br, f->ot, pn->br, pn->width);
        if (f->lowered != 1) {
            scale_rows(f->ot, p->dim_v, pn->br, pn->width, fv_set1(f->lowered));
        }
    }
    f->fresh = false;
}

/* Writes lse of the panel's rows. */
static void store_lse(const forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    float *const to = pn->buf->lse;
    int64_t head = 0; /* where lse of a row's head begins */
    if (!(p->outputs & FATTN_OUT_LSE)) {
        return;
    }
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fv lse = fattn_softmax_lse(state_load(f, r), fv_set1(pn->rule.natural));
        fv_store(f->alpha + r, lse);
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        if (r == 0 || pn->group > 1) {
            head = fattn_lse_index(p, &pn->seq, pn->b, pn->row[r].h);
        }
        to[head + pn->row[r].i] = f->alpha[r];
    }
}

/* Writes o, of which from is row r, times factor. */
static void store_row(const panel *pn, int64_t r, const float *from, float factor)
{
    const fattn_problem *const p = pn->p;
    row_store(row_of_o(pn, r), p->dtype_o, from, p->dim_v, factor);
}

/* Writes o and lse of the panel's rows from m, l and the unnormalised o. */
static void forward_store(forward *f)
{
    const panel *const pn = &f->panel;
    if (pn->p->outputs & FATTN_OUT_O) {
        for (int64_t r = 0; r < pn->width; r += FV_LANES) {
            fv_store(f->alpha + r, fattn_softmax_normaliser(state_load(f, r)));
        }
        for (int64_t r = 0; r < pn->rows; r++) {
            const bool empty = f->l[r] == 0; /* selected: o may hold 0 * inf */
            store_row(pn, r, empty ? pn->zeros : f->o + r * pn->dvp, f->alpha[r]);
        }
    }
    store_lse(f);
}

/* Whether each row has met a key; false also for a NaN. */
static bool all_met(const forward *f)
{
    const fv zero = fv_set1(0);
    mv met = fv_eq(zero, zero);
    for (int64_t r = 0; r < f->panel.width; r += FV_LANES) {
        met = mv_and(met, fv_lt(zero, fv_load(f->l + r)));
    }
    return mv_all(met);
}

/* Writes o of all rows, whole vectors evenly apart, from f->o as it is. */
static void store_rows_alike(const forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const int64_t step = p->o.seq * fattn_dtype_size(p->dtype_o);
    char *const to = row_of_o(pn, 0);
    switch (p->dtype_o) {
    case FATTN_F16: rows_store(to, FATTN_F16, step, f->o, pn->rows, p->dim_v); break;
    case FATTN_BF16: rows_store(to, FATTN_BF16, step, f->o, pn->rows, p->dim_v); break;
    default: rows_store(to, FATTN_F32, step, f->o, pn->rows, p->dim_v); break;
    }
}

/* The same from o as mix_rows() left it. */
static void forward_store_rows(const forward *f)
{
    const panel *const pn = &f->panel;
    const bool alike = pn->group == 1 && pn->p->dim_v % FV_LANES == 0;
    const bool wanted = pn->p->outputs & FATTN_OUT_O;
    if (wanted && all_met(f) && (alike || f->placed)) {
        if (!f->placed) {
            store_rows_alike(f);
        }
    } else {
        for (int64_t r = 0; r < pn->rows && wanted; r++) {
            const bool empty = f->l[r] == 0;
            if (empty || !f->placed) {
                store_row(pn, r, empty ? pn->zeros : f->o + r * pn->dvp, 1);
            }
        }
    }
    store_lse(f);
}

/* to[n] = row r + n of o for n < FV_LANES, from squares of columns. dtype: a literal; stride: in
 * elements */
INLINE void rows_of_columns(const forward *f, int64_t r, fattn_dtype dtype, void *to,
                            int64_t stride)
{
    const panel *const pn = &f->panel;
    const int64_t size = fattn_dtype_size(dtype);
    fv_store(f->alpha + r, fattn_softmax_normaliser(state_load(f, r)));
    for (int64_t c = 0; c < pn->p->dim_v; c += FV_LANES) {
        char *at = (char *)to + c * size;
        fv x[FV_LANES];
        fv_load_turned(f->ot + c * pn->br + r, pn->br, x);
        for (int n = 0; n < FV_LANES; n++, at += stride * size) {
            store_as(dtype, at, fv_mul(fv_set1(f->alpha[r + n]), x[n]));
        }
    }
    for (int n = 0; n < FV_LANES; n++) {
        if (f->l[r + n] == 0) { /* o may hold 0 * inf */
            memset((char *)to + n * stride * size, 0, (size_t)(pn->p->dim_v * size));
        }
    }
}

/* As forward_store(), from o as columns, where there are no parts to meet. */
static void forward_store_columns(forward *f)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    for (int64_t r = 0; r < pn->width && p->outputs & FATTN_OUT_O; r += FV_LANES) {
        if (rows_in_place(pn, p->dim_v, r)) {
            void *const to = row_of_o(pn, r);
            switch (p->dtype_o) {
            case FATTN_F16: rows_of_columns(f, r, FATTN_F16, to, p->o.seq); break;
            case FATTN_BF16: rows_of_columns(f, r, FATTN_BF16, to, p->o.seq); break;
            default: rows_of_columns(f, r, FATTN_F32, to, p->o.seq); break;
            }
            continue;
        }
        rows_of_columns(f, r, FATTN_F32, f->o, pn->dvp);
        for (int64_t n = 0; n < fattn_min64(FV_LANES, pn->rows - r); n++) {
            store_row(pn, r + n, f->o + n * pn->dvp, 1);
        }
    }
    store_lse(f);
}

static void forward_keep_part(const forward *f, float *part)
{
    const panel *const pn = &f->panel;
    memcpy(part, f->m, (size_t)pn->br * sizeof(float));
    memcpy(part + pn->br, f->l, (size_t)pn->br * sizeof(float));
    memcpy(part + 2 * pn->br, f->o, (size_t)(pn->rows * pn->dvp) * sizeof(float));
}

/* Key blocks first .. past - 1 of those that the panel's rows may see. */
static void panel_blocks(const panel *pn, int64_t *first, int64_t *past)
{
    const fattn_range keys = fattn_band_rows(&pn->band, pn->i0, pn->i1);
    *first = fattn_max64(*first, keys.first / pn->bc);
    *past = fattn_min64(*past, (fattn_max64(0, keys.past) + pn->bc - 1) / pn->bc);
}

/* --- What comes next -------------------------------------------------------------------------- */

/* Blocks of keys that share what is fetched for later. */
#define PREFETCH_BLOCKS 4

/* Tiles of keys among which an item has its results, and the queries of the one that this thread
 * may do next, fetched: waiting for them took 3 % of N 1024. */
typedef struct prefetch_plan {
    panel here, next;   /* their rows alone */
    int64_t first, end; /* blocks of keys */
} prefetch_plan;

/* The last block fetches nothing: a diagonal may leave little of it. Items are handed out in order,
 * and take as long as others. */
static void prefetch_plan_open(prefetch_plan *plan, const fattn_cpu_run *run, int64_t item,
                               const panel *pn, int64_t begin, int64_t end)
{
    const fattn_tiling *const tiling = run->tiling;
    const int64_t heads = run->problem->heads_k;
    const fattn_work here = fattn_schedule_item(tiling, heads, item);
    plan->end = end - 1;
    plan->first = fattn_max64(begin, plan->end - PREFETCH_BLOCKS);
    plan->here = plan->next = *pn;
    plan->here.br = plan->next.br = tiling->br;
    (void)panel_place(&plan->here, run, here.batch, here.head, here.block * tiling->br, false);
    plan->next.rows = 0;
    if (item + run->threads < tiling->items) {
        const fattn_work next = fattn_schedule_item(tiling, heads, item + run->threads);
        (void)panel_place(&plan->next, run, next.batch, next.head, next.block * tiling->br, false);
    }
}

/* rows[n] = where in q or o the rows of part n of `parts` of a panel are. Returns how many. */
static int64_t list_rows(const panel *pn, int64_t n, int64_t parts, const void *tensor,
                         fattn_dtype dtype, const fattn_strides *strides, const char **rows)
{
    const int64_t all = fattn_max64(0, pn->rows);
    const int64_t first = all * n / parts, count = all * (n + 1) / parts - first;
    int64_t i = (pn->first + first) / pn->group, g = (pn->first + first) % pn->group;
    for (int64_t r = 0; r < count; r++) {
        rows[r] = element(tensor, dtype, row_index(pn, strides, i, pn->hk * pn->group + g));
        if (++g == pn->group) {
            g = 0;
            i++;
        }
    }
    return count;
}

/* What the strips' products of keys fetch in a block. */
static void list_prefetches(forward *strips, int64_t count, const prefetch_plan *plan,
                            int64_t block)
{
    const panel *const pn = &strips->panel;
    const fattn_problem *const p = pn->p;
    const int64_t n = block - plan->first, parts = plan->end - plan->first;
    const int64_t tiles = count * pn->bc / FV_NK;
    const char **const rows = strips->later;
    int64_t total = 0;
    if (0 <= n && n < parts) {
        total += list_rows(&plan->here, n, parts, pn->buf->o, p->dtype_o, &p->o, rows);
        total += list_rows(&plan->next, n, parts, pn->buf->q, p->dtype, &p->q, rows + total);
    }
    const int64_t step = (total + tiles - 1) / tiles;
    for (; total < tiles * step; total++) {
        rows[total] = rows[0];
    }
    for (int64_t s = 0; s < count; s++) {
        strips[s].panel.later = (prefetch_list){.rows = rows,
                                                .bytes = p->dim * fattn_dtype_size(p->dtype),
                                                .next = s * (tiles / count) * step,
                                                .step = step};
    }
}

/* A tile of keys for all strips. */
INLINE void forward_block(forward *strips, int64_t count, int64_t block, bool paired)
{
    const panel *const pn = &strips->panel;
    const fattn_problem *const p = pn->p;
    span spans[STRIPS], all = {.kind = FATTN_TILE_EMPTY};
    for (int64_t n = 0; n < count; n++) {
        spans[n] = span_of(&strips[n].panel, block);
        if (spans[n].kind != FATTN_TILE_EMPTY && spans[n].live > all.live) {
            all = spans[n];
        }
    }
    const bool values = all.live && p->outputs & FATTN_OUT_O;
    if (paired && all.live) {
        pairs_load_keys(pn, all, pn->buf->k, &p->k, p->dim, pn->k_copy, pn->k_pairs);
    } else if (all.live) {
        load_keys(pn, all, pn->buf->k, &p->k, p->dim, pn->k_copy, pn->dp, pn->k);
    }
    const bool pairs = paired && values && pairs_load_values(pn, all);
    if (values && !pairs) {
        load_keys(pn, all, pn->buf->v, &p->v, p->dim_v, pn->v_copy, pn->dvp, pn->v);
    }
    for (int64_t n = 0; n < count; n++) {
        if (spans[n].kind != FATTN_TILE_EMPTY) {
            forward_tile(&strips[n], spans[n], paired, pairs);
        }
    }
}

/* Leaves strip n of a part where the merge finds it, or writes its results. part: of the item */
static void forward_end(forward *f, const fattn_cpu_run *run, int64_t item, int64_t n)
{
    if (run->tiling->splits > 1) {
        float *const parts = (float *)run->shared;
        const int64_t size = part_size(run->problem, run->tiling);
        forward_keep_part(f, part_of(f, parts + item * size, n));
    } else {
        forward_store(f);
    }
}

INLINE void attention(const fattn_cpu_run *run, int64_t item, void *scratch, bool paired)
{
    const fattn_work work = fattn_schedule_item(run->tiling, run->problem->heads_k, item);
    arena from = {.base = scratch};
    forward strips[STRIPS];
    const int64_t count =
        forward_open(strips, forward_layout(strips, run->problem, run->tiling, &from), run, work);
    int64_t first, past, begin = INT64_MAX, end = 0;

    for (int64_t n = 0; n < count; n++) {
        forward_begin(&strips[n], paired, work.split);
        fattn_schedule_keys(run->tiling, work.split, &first, &past);
        panel_blocks(&strips[n].panel, &first, &past);
        begin = fattn_min64(begin, first);
        end = fattn_max64(end, past);
        if (!paired && run->tiling->splits == 1 && past - first <= 1) {
            forward_choose_rows(&strips[n]);
        }
    }
    prefetch_plan ahead;
    const bool fetches = !paired && end - begin > 1 && run->tiling->splits == 1 &&
                         run->problem->outputs & FATTN_OUT_O;
    if (fetches) {
        prefetch_plan_open(&ahead, run, item, &strips->panel, begin, end);
    }
    for (int64_t block = begin; block < end; block++) {
        if (fetches) {
            list_prefetches(strips, count, &ahead, block);
        }
        forward_block(strips, count, block, paired);
    }

    for (int64_t n = 0; n < count; n++) {
        forward *const f = &strips[n];
        const panel *const pn = &f->panel;
        if (f->fresh) {
            fill(f->ot, pn->br * pn->dvp, 0);
        }
        if (run->tiling->splits > 1) {
            transpose(f->ot, pn->br, pn->dvp, pn->width, f->o, pn->dvp);
            forward_end(f, run, item, n);
        } else if (f->by_rows) {
            forward_store_rows(f);
        } else {
            forward_store_columns(f);
        }
    }
}

static void forward_work(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    attention(run, item, scratch, false);
}

#if FV_PAIRS
static void pairs_work(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    pairs_open();
    attention(run, item, scratch, true);
    pairs_close();
}
#endif

static int64_t forward_count(const fattn_cpu_run *run) { return run->tiling->items; }

/* --- Merging the parts ------------------------------------------------------------------------ */

/* {m, l, o} of the panel becomes that of both; other: m, l, o of a part. */
static void merge_part(forward *f, const float *other)
{
    const panel *const pn = &f->panel;
    const float *const m = other, *const l = m + pn->br, *const o = l + pn->br;
    float *const alpha = f->alpha, *const beta = pn->at;

    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        fattn_softmax state = state_load(f, r);
        const fattn_softmax part = {.m = fv_load(m + r), .l = fv_load(l + r)};
        fv a, b;
        fattn_softmax_merge(&state, part, fv_set1(pn->rule.unit), &a, &b);
        state_store(f, r, state);
        fv_store(alpha + r, a);
        fv_store(beta + r, b);
    }
    for (int64_t r = 0; r < pn->rows; r++) {
        const fv a = fv_set1(alpha[r]), b = fv_set1(beta[r]);
        for (int64_t c = 0; c < pn->dvp; c += FV_LANES) {
            float *const at = f->o + r * pn->dvp + c;
            fv_store(at, fv_fma(b, fv_load(o + r * pn->dvp + c), fv_mul(a, fv_load(at))));
        }
    }
}

static void merge_work(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const fattn_tiling *const tiling = run->tiling;
    const int64_t size = part_size(run->problem, tiling), first = item * tiling->splits;
    const fattn_work work = fattn_schedule_item(tiling, run->problem->heads_k, first);
    float *const shared = (float *)run->shared;
    arena from = {.base = scratch};
    forward strips[STRIPS];
    const int64_t count =
        forward_open(strips, forward_layout(strips, run->problem, tiling, &from), run, work);

    for (int64_t n = 0; n < count; n++) {
        forward *const f = &strips[n];
        const panel *const pn = &f->panel;
        const float *const parts = part_of(f, shared + first * size, n);
        memcpy(f->m, parts, (size_t)pn->br * sizeof(float));
        memcpy(f->l, parts + pn->br, (size_t)pn->br * sizeof(float));
        memcpy(f->o, parts + 2 * pn->br, (size_t)(pn->rows * pn->dvp) * sizeof(float));
        for (int64_t split = 1; split < tiling->splits; split++) {
            merge_part(f, parts + split * size);
        }
        forward_store(f);
    }
}

static int64_t merge_count(const fattn_cpu_run *run)
{
    return run->tiling->splits > 1 ? run->tiling->items / run->tiling->splits : 0;
}

/* --- Tiles ------------------------------------------------------------------------------------ */

/* Blocks of as many rows as are worth the keys they load, and smaller ones, among which the planner
 * finds shares for all cores. */
#define BLOCK_TILES                                                                               \
    {TILE_ROWS(48), BLOCK_KEYS}, {TILE_ROWS(96), BLOCK_KEYS}, {TILE_ROWS(144), BLOCK_KEYS},       \
        {TILE_ROWS(192), BLOCK_KEYS}, {TILE_ROWS(240), BLOCK_KEYS}, {TILE_ROWS(288), BLOCK_KEYS}, \
    {                                                                                             \
        BLOCK_ROWS, BLOCK_KEYS                                                                    \
    }
static const fattn_tile forward_tiles[] = {
    BLOCK_TILES, {TILE_ROWS(48), 64}, {TILE_ROWS(16), 32}, {0, 0}};

/* What copying a tile of keys costs, or the ways of keys in place through the caches, in rows'
 * time. */
static int64_t forward_block_rows(const fattn_problem *p)
{
    return in_place(p, &p->k) && in_place(p, &p->v) ? 10 : 40;
}

#if FV_PAIRS
/* What products of pairs save with few keys is less than what turning queries and values, and o
 * back, takes: products of floats need not turn them. */
static bool pairs_pay(const fattn_problem *p)
{
    return p->seqlen_k > 12 || p->features & FATTN_BATCH_INVARIANT;
}

/* Products in matrix registers take so little time that loading keys must serve more rows. */
static int64_t pairs_block_rows(const fattn_problem *p)
{
    (void)p;
    return FV_TILES ? 60 : 15;
}
#endif

static int64_t forward_fast_bytes(const fattn_problem *p, fattn_tile tile)
{
    const fattn_tiling tiling = {.br = tile.br, .bc = tile.bc};
    return forward_scratch(p, &tiling) + keys_in_place_bytes(p, &tiling);
}

static int64_t forward_workspace(const fattn_problem *p, const fattn_tiling *tiling)
{
    return fattn_cpu_workspace(forward_shared(p, tiling), forward_scratch(p, tiling),
                               tiling->items);
}
