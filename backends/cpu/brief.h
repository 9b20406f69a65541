/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding few keys: the products of decode.h for rows that all attend to the same keys, in one
 * part, whose scores need no tensor of biases or masks. Such a call takes a microsecond or two, and
 * what decode.h sets up for long contexts and for features took longer than that. Here the scores
 * of a large block of keys, mostly of all keys, are computed first, [keys][rows] as in a dense tile
 * (panel.h), and become probabilities at once.
 *
 * A call that comes after much other work finds nothing in cache, and mostly waits for
 * instructions. So if all sequences have the problem's lengths, the plan holds what its runs need,
 * and they have no items and no panels. The first keys are prefetched before anything is computed;
 * values while their keys' scores are computed; and the next keys, which may belong to another
 * head, while values are added up.
 */
#ifndef FATTN_CPU_BRIEF_H
#define FATTN_CPU_BRIEF_H

#include "backends/cpu/decode.h"

#define BRIEF_KEYS 1024            /* the most keys of a head */
#define BRIEF_BLOCK 256            /* keys that are scored at once */
#define BRIEF_FEW 64               /* so many keys are few wherever they lie */
#define BRIEF_BYTES (8.0 * 0x1p20) /* keys and values of a run that caches are likely to hold */
#define BRIEF_RUN 256              /* so many contiguous bytes are read fast from anywhere */
#define BRIEF_EARLY 32             /* the most keys of a head that are prefetched first */
#define BRIEF_FEATURES                                                                         \
    (FATTN_SCALE | FATTN_CAUSAL | FATTN_WINDOW | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K |     \
     FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS | FATTN_DETERMINISTIC | \
     FATTN_CHECKED | BRIEF_TERMS)
#define BRIEF_TERMS \
    (FATTN_SINK | FATTN_SOFTCAP | FATTN_ALIBI) /* with these, scores are more than dot products */

/* Where the rows of a head begin in the tensors. */
typedef struct brief_place {
    const char *q;
    char *o;
    float *lse;                /* or NULL */
    int64_t lse_first;         /* the index of its first row */
    const float *sink, *slope; /* of its first row, or NULL */
    /* For ALiBi: the position of the first row minus that of the first key. */
    int64_t ahead;
} brief_place;

/* Lays out a worker's scratch in *s, and returns its size:
 *     k, v   [keys] where rows begin
 *     q      in the order of order_queries()
 *     x      [keys of a block][pitch] scores, then weights. A vector has FV_LANES / pitch keys
 *     o      [pitch][dv_pad]
 *     zeros  a row, for keys past the last */
static int64_t brief_layout(const fattn_problem *p, fattn_cpu_brief *s)
{
    arena from = {0};
    s->d_pad = vectors_of(p->dim) * FV_LANES;
    s->dv_pad = vectors_of(p->dim_v) * FV_LANES;
    const int64_t keys = fattn_min64(BRIEF_KEYS, p->seqlen_k + FV_ND); /* padded */
    const int64_t sizes[] = {keys * (int64_t)sizeof(char *), keys * (int64_t)sizeof(char *),
                             FV_LANES * s->d_pad * 4,        FV_LANES * s->dv_pad * 4,
                             BRIEF_BLOCK * FV_LANES * 4,     fattn_max64(s->d_pad, s->dv_pad) * 4};
    int64_t *const at[] = {&s->k, &s->v, &s->q, &s->o, &s->x, &s->zeros};
    for (size_t n = 0; n < sizeof at / sizeof at[0]; n++) {
        *at[n] = from.used;
        (void)carve(&from, sizes[n], 1);
    }
    return from.used;
}

static int64_t brief_scratch(const fattn_problem *p)
{
    fattn_cpu_brief s;
    return brief_layout(p, &s);
}

/* Whether so many keys are few enough. This code reads one head after another, and with several
 * queries a part of a row of values at a time; decode.h reads all heads that are neighbours in
 * memory together. Where memory sets the pace, short parts are slower. */
static bool are_few(const panel *pn, const fattn_problem *p, int64_t keys)
{
    const int64_t key =
        p->dim * fattn_dtype_size(p->dtype_kv) + p->dim_v * fattn_dtype_size(p->dtype_v);
    const double heads = (double)p->batch * (double)p->heads_k;
    const int64_t part = mix_bytes(p, pn->pitch), row = p->dim_v * fattn_dtype_size(p->dtype_v);
    return keys <= BRIEF_KEYS && (keys <= BRIEF_FEW || part >= fattn_min64(row, BRIEF_RUN) ||
                                  heads * (double)keys * (double)key <= BRIEF_BYTES);
}

/* Whether all rows of pn attend to the same keys, which are few, and no feature needs more than
 * this header has. *keys receives the keys. */
static bool is_brief(const panel *pn, const fattn_problem *p, fattn_range *keys)
{
    const int64_t last = pn->i1 - 1;
    *keys = fattn_band_rows(&pn->band, pn->i0, pn->i1);
    return !(p->features & ~BRIEF_FEATURES) && p->outputs & FATTN_OUT_O && pn->pitch <= FV_LANES &&
           keys->first < keys->past && are_few(pn, p, keys->past - keys->first) &&
           fattn_band_row(&pn->band, last).first == keys->first &&
           fattn_band_row(&pn->band, pn->i0).past == keys->past;
}

/* to[0 .. n) = x, up to whole vectors. */
INLINE void fill_vectors(float *to, int64_t n, fv x)
{
    for (int64_t c = 0; c < n; c += FV_LANES) {
        fv_store(to + c, x);
    }
}

/* Prefetches the rows that are `further` bytes behind those listed. */
APART void brief_prefetch(const char *const *rows, int64_t count, int64_t further, int64_t bytes)
{
    for (int64_t j = 0; j < count; j++) {
        const char *const from = rows[j] + further;
        const int64_t past = bytes_in_lines(from, bytes);
        for (int64_t at = 0; at < past; at += CACHE_LINE) {
            __builtin_prefetch(from + at);
        }
    }
}

/* The distance in bytes from a row to the next. *g: the head of the row in its group, updated to
 * that of the next */
INLINE int64_t next_row(int64_t group, int64_t row, int64_t wrap, int64_t *g)
{
    const bool last = ++*g == group;
    *g = last ? 0 : *g;
    return last ? wrap : row;
}

/* Loads the queries in the order of order_queries(); zeros for rows past the last. */
INLINE void brief_queries_as(fattn_dtype dtype, const fattn_problem *p, const fattn_cpu_brief *s,
                             const char *from, float *to)
{
    const int64_t blocks = channels_of_blocks(dtype, p->dim), rows = s->pitch;
    for (int64_t r = 0, g = 0; r < rows; r++) {
        float *at = to + r * 2 * FV_LANES;
        int64_t c = 0;
        for (; c < blocks; c += 2 * FV_LANES, at += rows * 2 * FV_LANES) {
            fv two[BLOCK_MOST] = {fv_set1(0), fv_set1(0)};
            if (r < s->rows) {
                load_block(dtype, from, c, two);
            }
            fv_store(at, two[0]);
            fv_store(at + FV_LANES, two[1]);
        }
        at -= r * FV_LANES;
        for (; c < p->dim; c += FV_LANES, at += rows * FV_LANES) {
            const int part = (int)fattn_min64(p->dim - c, FV_LANES);
            fv_store(at,
                     r < s->rows ? load_as(dtype, from + c * SIZE_OF(dtype), part) : fv_set1(0));
        }
        from += next_row(s->group, s->q_row, s->q_wrap, &g);
    }
}

/* The same for queries of another type than the keys, whose type decides the order of channels. */
APART void brief_queries_mixed(const fattn_problem *p, const fattn_cpu_brief *s, const char *from,
                               float *to)
{
    const int64_t blocks = channels_of_blocks(p->dtype_kv, p->dim), rows = s->pitch;
    const int64_t size = fattn_dtype_size(p->dtype);
    const int block = block_vectors(p->dtype_kv) * FV_LANES;
    for (int64_t r = 0, g = 0; r < rows; r++) {
        float *at = to + r * block;
        int64_t c = 0;
        for (; c < blocks; c += block, at += rows * block) {
            float some[BLOCK_MOST * FV_LANES] = {0};
            if (r < s->rows) {
                row_load(some, p->dtype, from + c * size, block);
            }
            order_block(p->dtype_kv, some, at);
        }
        at -= r * (block - FV_LANES);
        for (; c < p->dim; c += FV_LANES, at += rows * FV_LANES) {
            float one[FV_LANES] = {0};
            if (r < s->rows) {
                row_load(one, p->dtype, from + c * size, fattn_min64(p->dim - c, FV_LANES));
            }
            memcpy(at, one, sizeof one);
        }
        from += next_row(s->group, s->q_row, s->q_wrap, &g);
    }
}

static void brief_queries(const fattn_problem *p, const fattn_cpu_brief *s, const char *from,
                          float *to)
{
    if (p->dtype_kv != p->dtype) {
        brief_queries_mixed(p, s, from, to);
        return;
    }
    switch (p->dtype) {
    case FATTN_F16: brief_queries_as(FATTN_F16, p, s, from, to); break;
    case FATTN_BF16: brief_queries_as(FATTN_BF16, p, s, from, to); break;
    default: brief_queries_as(FATTN_F32, p, s, from, to); break;
    }
}

/* In each lane, the sum or the maximum of the lanes that hold the same row; these are `pitch`
 * apart. */
typedef enum lane_fold { LANE_MAX, LANE_SUM } lane_fold;

INLINE fv fold_lanes(fv x, int64_t pitch, lane_fold fold)
{
    for (int64_t lanes = FV_LANES / 2; lanes >= pitch; lanes /= 2) {
        const fv other = fv_rotate(x, (int)lanes);
        x = fold == LANE_SUM ? fv_add(x, other) : fv_max(x, other);
    }
    return x;
}

/* Turns the dot products of a block of keys, the first of which is number j, into scores. Not
 * inlined, because most problems have none of these terms. */
APART void brief_score(const fattn_problem *p, const fattn_cpu_brief *s, const brief_place *at,
                       int64_t j, float *x, int64_t vectors)
{
    const fattn_score_rule rule = rule_of(p, 1);
    const int64_t keys = FV_LANES / s->pitch; /* of a vector */
    float slope[FV_LANES] = {0}, ahead[FV_LANES] = {0};
    for (int64_t r = 0, g = 0, i = at->ahead - j; at->slope && r < s->rows; r++) {
        for (int64_t key = 0; key < keys; key++) {
            slope[key * s->pitch + r] = at->slope[g];
            ahead[key * s->pitch + r] = (float)(i - key);
        }
        g = g + 1 < s->group ? g + 1 : 0;
        i += g == 0;
    }
    const fv zero = fv_set1(0);
    fattn_score_pair pair = {
        .bias = zero, .slope = fv_load(slope), .distance = zero, .keep = fv_eq(zero, zero)};
    const fv from = fv_load(ahead);
    for (int64_t n = 0; n < vectors; n++) {
        fv dscore;
        float *const to = x + n * FV_LANES;
        pair.distance = fv_abs(fv_sub(from, fv_set1((float)(n * keys))));
        fv_store(to, rule.terms == FATTN_SCORE_SCALE
                         ? fattn_score(&rule, FATTN_SCORE_SCALE, fv_load(to), pair, &dscore)
                         : fattn_score(&rule, rule.terms, fv_load(to), pair, &dscore));
    }
}

/* The sink of each lane's row; -inf, which is none, for rows past the last. */
APART fv brief_sinks(const fattn_cpu_brief *s, const float *sink)
{
    float sinks[FV_LANES];
    for (int64_t lane = 0; lane < FV_LANES; lane++) {
        const int64_t r = lane & (s->pitch - 1);
        sinks[lane] = r < s->rows ? sink[r % s->group] : -INFINITY;
    }
    return fv_load(sinks);
}

/* Turns the scores of a block into weights relative to each row's largest score so far. Multiplied
 * by *lowered, which is 1 or 1 / LIFT, they are the weights of the formula. state: {m, l}, repeated
 * in each lane of a row. fresh: state is empty, and the returned alpha is meaningless. Returns
 * alpha. */
static fv brief_soften(float *x, int64_t vectors, int64_t pitch, float unit, bool fresh,
                       fattn_softmax *state, float *lowered)
{
    const score_range scores = range_of(x, FV_LANES, vectors, true);
    const fv most = fold_lanes(scores.most, pitch, LANE_MAX);
    weigher w = {.unit = fv_set1(unit)};
    fv alpha = fv_set1(0), sum;
    if (fresh) {
        state->m = most;
    } else {
        alpha = fattn_softmax_raise(state, most, w.unit);
    }
    w.base = fattn_softmax_base(*state);
    const fv power = fattn_softmax_exponent(scores.least, w.unit, w.base);
    *lowered = 1;
    if (mv_all(fv_le(fv_set1(LEAST_NORMAL), power))) {
        sum = weigh_rows(x, FV_LANES, vectors, WEIGHTS_SELECTED, false, &w).l;
    } else {
        *lowered = 1 / LIFT;
        sum = fv_mul(fv_set1(1 / LIFT),
                     weigh_rows(x, FV_LANES, vectors, WEIGHTS_LIFTED, false, &w).l);
    }
    fattn_softmax_add(state, fold_lanes(sum, pitch, LANE_SUM));
    return alpha;
}

/* Writes o and lse of all rows. */
static void brief_store(const fattn_problem *p, const fattn_cpu_brief *s, brief_place to, float *o,
                        fattn_softmax state)
{
    float factor[FV_LANES], l[FV_LANES], lse[FV_LANES] = {0};
    fv_store(factor, fattn_softmax_normaliser(state));
    fv_store(l, state.l);
    if (p->outputs & FATTN_OUT_LSE) {
        fv_store(lse, fattn_softmax_lse(state, fv_set1(s->natural)));
    }
    for (int64_t r = 0, g = 0, i = 0; r < s->rows; r++, o += s->dv_pad) {
        order_channels(p, s->pitch, o);
        if (l[r] == 0) { /* zeros, not o times 0: o may hold 0 * inf */
            fill_vectors(o, s->dv_pad, fv_set1(0));
        }
        row_store(to.o, p->dtype_o, o, p->dim_v, factor[r]);
        if (p->outputs & FATTN_OUT_LSE) {
            to.lse[to.lse_first + g * p->total_q + i] = lse[r];
        }
        to.o += next_row(s->group, s->o_row, s->o_wrap, &g);
        i += g == 0;
    }
}

/* Lists of where each key and each value of a head begins: [keys]. */
typedef struct brief_rows {
    const char **k, **v;
} brief_rows;

static brief_rows brief_rows_of(const fattn_cpu_brief *s, char *scratch)
{
    return (brief_rows){.k = (const char **)(void *)(scratch + s->k),
                        .v = (const char **)(void *)(scratch + s->v)};
}

/* rows[j] += step */
INLINE void shift_rows(const char **rows, int64_t count, int64_t step)
{
    for (int64_t j = 0; j < count; j++) {
        rows[j] += step;
    }
}

/* A key/value head: all of its rows and keys. While a block of keys is scored, its values are
 * prefetched. While these are added up, the keys that come next are prefetched, those of the next
 * block or of the next head. further: the distance in bytes to the keys of the next head, to which
 * the list of keys is moved if it is not 0 */
static void brief_head(const fattn_problem *p, const fattn_cpu_brief *s, brief_place at,
                       int64_t further, char *scratch)
{
    const brief_rows rows = brief_rows_of(s, scratch);
    float *const q = (float *)(void *)(scratch + s->q);
    float *const o = (float *)(void *)(scratch + s->o);
    float *const x = (float *)(void *)(scratch + s->x), lowered, alpha[FV_LANES];
    fattn_softmax state = fattn_softmax_empty();

    brief_queries(p, s, at.q, q);
    if (at.sink) {
        state = fattn_softmax_sink(brief_sinks(s, at.sink));
    }
    for (int64_t j = 0; j < s->count; j += BRIEF_BLOCK) {
        const int64_t group = FV_LANES * PARTIAL_SUMS;
        const int64_t count = fattn_min64(s->count - j, BRIEF_BLOCK), scores = count * s->pitch;
        const int64_t vectors = (scores + group - 1) / group * PARTIAL_SUMS;
        const bool last = j + count == s->count;
        /* As many keys are prefetched as values are added up, some of them again where fewer are
         * left. */
        const int64_t next = last ? 0 : fattn_min64(j + count, s->count - count);
        const decode_dots d = {.q = q,
                               .q_stride = s->d_pad,
                               .k = {.at = rows.k + j,
                                     .ahead = rows.v + j,
                                     .count = last ? s->padded - j : count,
                                     .dim = p->dim},
                               .x = x,
                               .pitch = s->pitch};
        s->dots(&d);
        if (p->features & BRIEF_TERMS) {
            brief_score(p, s, &at, j, x, (scores + FV_LANES - 1) / FV_LANES);
        }
        fill_vectors(x + scores, vectors * FV_LANES - scores, fv_set1(-INFINITY));
        fv_store(alpha,
                 brief_soften(x, vectors, s->pitch, s->unit, j == 0 && !at.sink, &state, &lowered));
        if (last && further) {
            shift_rows(rows.k, s->count, further);
        }
        const decode_sums sums = {
            .alpha = alpha,
            .fresh = j == 0,
            .lowered = lowered,
            .p = x,
            .pitch = s->pitch,
            .v = {.at = rows.v + j, .ahead = rows.k + next, .count = count, .dim = p->dim_v},
            .o = o,
            .o_stride = s->dv_pad};
        s->mix(&sums);
    }
    brief_store(p, s, at, o, state);
}

/* Consecutive heads. scratch lists the keys and values of the first one. further: the distance in
 * bytes from the keys of the last head to those that probably come next, or 0 */
APART void brief_heads(const fattn_problem *p, const fattn_cpu_brief *s, brief_place at,
                       int64_t heads, int64_t further, char *scratch)
{
    const brief_rows rows = brief_rows_of(s, scratch);
    brief_prefetch(rows.k, fattn_min64(s->count, BRIEF_EARLY), 0, s->k_bytes);
    if (s->padded > s->count) {
        float *const zeros = (float *)(void *)(scratch + s->zeros);
        fill_vectors(zeros, fattn_max64(s->d_pad, s->dv_pad), fv_set1(0));
        for (int64_t j = s->count; j < s->padded; j++) {
            rows.k[j] = rows.v[j] = (const char *)zeros;
        }
    }
    for (; heads > 1; heads--) {
        brief_head(p, s, at, s->k_head, scratch);
        at.q += s->q_group;
        at.o += s->o_group;
        at.lse_first += s->group * p->total_q;
        at.sink += at.sink ? s->group : 0;
        at.slope += at.slope ? s->group : 0;
        shift_rows(rows.v, s->count, s->v_head);
    }
    brief_head(p, s, at, further, scratch);
}

/* Fills in what the heads of a sequence have in common. Returns false if decode_tiles_of() has to
 * compute them. */
static bool brief_of(const panel *pn, const fattn_problem *p, fattn_cpu_brief *s)
{
    fattn_range keys;
    const fattn_score_rule rule = rule_of(p, 1);
    const bool scaled = rule.terms && !(p->features & BRIEF_TERMS);
    if (scaled || !is_brief(pn, p, &keys)) {
        return false;
    }
    const int64_t step = FV_ND / pn->pitch;
    s->group = pn->group;
    s->rows = pn->rows;
    s->pitch = pn->pitch;
    s->first = keys.first;
    s->count = keys.past - keys.first;
    s->padded = (s->count + step - 1) / step * step;
    s->dots = dots_of(p->dtype_kv, pn->rows, pn->pitch);
    s->mix = mix_of(p->dtype_v, pn->rows, pn->pitch);
    s->unit = rule.unit;
    s->natural = rule.natural;
    const int64_t q_size = fattn_dtype_size(p->dtype), o_size = fattn_dtype_size(p->dtype_o);
    const int64_t k_size = fattn_dtype_size(p->dtype_kv), v_size = fattn_dtype_size(p->dtype_v);
    const int64_t others = s->group - 1;
    s->k_bytes = p->dim * k_size;
    s->k_row = p->k.seq * k_size, s->v_row = p->v.seq * v_size;
    s->k_head = p->k.head * k_size, s->v_head = p->v.head * v_size;
    s->q_row = p->q.head * q_size, s->o_row = p->o.head * o_size;
    s->q_wrap = (p->q.seq - others * p->q.head) * q_size;
    s->o_wrap = (p->o.seq - others * p->o.head) * o_size;
    s->q_group = s->group * s->q_row, s->o_group = s->group * s->o_row;
    (void)brief_layout(p, s);
    return true;
}

/* The sinks, and the slopes, of the heads from `head` on, or NULL. */
static const float *sinks_of(const fattn_problem *p, const fattn_buffers *buffers, int64_t head)
{
    const float *const all = buffers->sink;
    return p->features & FATTN_SINK ? all + head : NULL;
}
static const float *slopes_of(const fattn_problem *p, const fattn_buffers *buffers, int64_t b,
                              int64_t head)
{
    const float *const all = buffers->alibi_slopes;
    return p->features & FATTN_ALIBI ? all + b * p->alibi_batch_stride + head : NULL;
}

/* The distance in bytes from the keys of an item's last head to those of the item that this worker
 * probably takes next; 0 if that is of another sequence. */
static int64_t further_of(const fattn_cpu_run *run, decode_item it, const fattn_cpu_brief *s)
{
    const int64_t item = fattn_cpu_upcoming(run->items);
    if (item >= decode_count(run)) {
        return 0;
    }
    const decode_item next = item_of(run, item);
    return next.piece->b == it.piece->b ? (next.hk - it.hk - it.heads + 1) * s->k_head : 0;
}

/* Computes an item, or returns false if decode_tiles_of() has to. */
static bool brief_item(const fattn_cpu_run *run, decode_item it, void *scratch)
{
    const fattn_problem *const p = run->problem;
    const fattn_buffers *const buffers = run->buffers;
    fattn_cpu_brief s;
    panel pn;
    pn.br = run->tiling->br;
    if (it.piece->splits > 1 || run->tiling->q_blocks > 1) {
        return false;
    }
    (void)panel_place(&pn, run, it.piece->b, it.hk, 0, DENSE_TILE);
    if (!brief_of(&pn, p, &s)) {
        return false;
    }
    char *const at = scratch;
    pn.p = p;
    find_rows(&pn, s.first, s.count, buffers->k, p->dtype_kv, &p->k,
              (const char **)(void *)(at + s.k));
    find_rows(&pn, s.first, s.count, buffers->v, p->dtype_v, &p->v,
              (const char **)(void *)(at + s.v));
    const int64_t head = it.hk * pn.group;
    const brief_place place = {.q = element(buffers->q, p->dtype, row_index(&pn, &p->q, 0, head)),
                               .o = (char *)buffers->o +
                                    row_index(&pn, &p->o, 0, head) * fattn_dtype_size(p->dtype_o),
                               .lse = buffers->lse,
                               .sink = sinks_of(p, buffers, head),
                               .slope = slopes_of(p, buffers, it.piece->b, head),
                               .ahead = pn.band.diagonal - s.first,
                               .lse_first = fattn_lse_index(p, &pn.seq, it.piece->b, head)};
    brief_heads(p, &s, place, it.heads, further_of(run, it, &s), at);
    return true;
}

/* --- Runs without items ----------------------------------------------------------------------- */

static bool brief_plan(const fattn_problem *p, const fattn_tiling *tiling, fattn_cpu_brief *brief)
{
    const fattn_buffers none = {0}; /* lengths are the problem's, so nothing is read from it */
    const fattn_cpu_run run = {.problem = p, .buffers = &none, .tiling = tiling};
    panel pn;
    pn.br = tiling->br;
    if (p->features & FATTN_VALIDATED || p->batch == 0 || p->heads_k == 0 || tiling->q_blocks > 1 ||
        !panel_place(&pn, &run, 0, 0, 0, DENSE_TILE)) {
        return false;
    }
    const fattn_parts parts = parts_of(tiling, &pn, &pn);
    return fattn_parts_are_one(&parts) && brief_of(&pn, p, brief);
}

static void brief_run(const fattn_cpu_brief *s, const fattn_problem *p,
                      const fattn_buffers *buffers, void *scratch)
{
    brief_place at = {
        .q = buffers->q, .o = buffers->o, .lse = buffers->lse, .sink = sinks_of(p, buffers, 0)};
    const char *k = (const char *)buffers->k + s->first * s->k_row;
    const char *v = (const char *)buffers->v + s->first * s->v_row;
    const char **const k_rows = (const char **)(void *)((char *)scratch + s->k);
    const char **const v_rows = (const char **)(void *)((char *)scratch + s->v);
    const int64_t k_batch = p->k.batch * fattn_dtype_size(p->dtype_kv);
    for (int64_t b = 1;; b++) {
        const int64_t further = b < p->batch ? k_batch - (p->heads_k - 1) * s->k_head : 0;
        if (p->features & FATTN_ALIBI) {
            at.slope = slopes_of(p, buffers, b - 1, 0);
            at.ahead = fattn_sequence_of(p, buffers, b - 1).diagonal - s->first;
        }
        k_rows[0] = k, v_rows[0] = v;
        for (int64_t j = 1; j < s->count; j++) { /* one after another, in the fewest instructions */
            k_rows[j] = k_rows[j - 1] + s->k_row;
            v_rows[j] = v_rows[j - 1] + s->v_row;
        }
        brief_heads(p, s, at, p->heads_k, further, scratch);
        if (b == p->batch) {
            return;
        }
        at.q += p->q.batch * fattn_dtype_size(p->dtype);
        at.o += p->o.batch * fattn_dtype_size(p->dtype_o);
        at.lse_first += p->heads_q * p->total_q;
        k += k_batch;
        v += p->v.batch * fattn_dtype_size(p->dtype_v);
    }
}

/* --- Items ------------------------------------------------------------------------------------ */

static void decode_work(const fattn_cpu_run *run, void *scratch)
{
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        const decode_item it = item_of(run, item);
        if (!brief_item(run, it, scratch)) {
            decode_tiles_of(run, it, scratch);
        }
    }
}

static int64_t brief_or_decode_scratch(const fattn_problem *p, const fattn_tiling *tiling)
{
    return fattn_max64(decode_scratch(p, tiling), brief_scratch(p));
}

static int64_t decode_workspace(const fattn_kernel *row, const fattn_problem *p,
                                const fattn_tiling *tiling)
{
    (void)row;
    return fattn_cpu_workspace_of_one(decode_shared(p, tiling), brief_or_decode_scratch(p, tiling));
}

/* The entry of decoding in a table of kernels. Arguments: what types k and v may have, as fields of
 * its row. */
#define DECODE_KERNEL(...)                                                                    \
    {                                                                                         \
        .row = {.name = KERNEL_NAME("decode"),                                                \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                                           \
                .dtypes = FATTN_CPU_DTYPES,                                                   \
                __VA_ARGS__,                                                                  \
                .any_bias = true,                                                             \
                .features = FATTN_CPU_FEATURES & ~FATTN_BATCH_INVARIANT,                      \
                .dim_max = FATTN_PROBLEM_DIM_MAX,                                             \
                .rows_max = DECODE_ROWS_MOST,                                                 \
                .packs_groups = true,                                                         \
                .pays = decode_pays,                                                          \
                .tiles = decode_tiles,                                                        \
                .split = fattn_cpu_decode_split,                                              \
                .fast_bytes = decode_fast_bytes,                                              \
                .workspace = decode_workspace},                                               \
        .scratch = brief_or_decode_scratch, .shared = decode_shared, .begin = begin_pieces,   \
        .phases = {{decode_count, decode_work, FATTN_CPU_SEVERAL}}, .brief_plan = brief_plan, \
        .brief_run = brief_run,                                                               \
    }

#endif
