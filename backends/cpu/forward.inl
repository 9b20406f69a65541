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
 * second. (Where keys are few, strips are wider: only their scores stay in the first.)
 *
 * With one part a strip ends in o and lse; with several, each leaves {m, l, o} in the workspace
 * and a second phase merges them in ascending order (parts.inl). Decoding (decode.inl) is the same
 * walk with other products.
 */

/* Queries in scratch, and the state of a part. */
INLINE void forward_begin(forward *f, bool paired, int64_t split)
{
    panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    pn->step = paired ? PAIRS_STEP : FV_NK;
    f->form = paired ? choose_pairs_form(pn) : choose_form(pn);
    if (paired && f->form == QUERIES_TURNED) {
        pairs_load_queries(pn);
    } else if (f->form == QUERIES_TURNED) {
        transpose_queries(pn, pn->buf->q, &p->q, pn->q, pn->qt);
    }
    f->fresh = true;
    f->by_rows = f->only = f->normalised = f->placed = f->narrow = false;
    f->met = f->missed = 0;
    /* Relative to a sink that has nearly all weight, products of probabilities and usual values may
     * be too small for pairs. */
    state_begin(f, split, paired);
}

/* x = the scores of a tile. */
INLINE void forward_scores(forward *f, span s, bool paired)
{
    panel *const pn = &f->panel;
    if (paired && f->form == KEYS_BLOCKED) {
        dot_blocked_keys(pn, s);
    } else if (paired) {
        pairs_scores(pn, s);
    } else if (f->form == QUERIES_LYING) {
        dot_lying(pn, s);
    } else if (f->form == QUERIES_BLOCKED) {
        dot_blocks(pn, s, f->fresh);
    } else {
        /* score_tile() masks what is not computed */
        dot_rows(pn, s, true, pn->k, pn->p->dim, pn->qt, pn->x_rows);
    }
    score_tile(pn, s);
}

/* ot = alpha ot + V^T P^T; alpha: NULL for 1 */
static void mix_columns(forward *f, span s, const float *alpha)
{
    const panel *const pn = &f->panel;
    product_columns(pn->p->dim_v, f->fresh, alpha, pn->v, s.padded, pn->x, pn->br, f->ot, pn->br,
                    pn->width);
    if (f->lowered != 1) {
        scale_rows(f->ot, pn->p->dim_v, pn->br, pn->width, fv_set1(f->lowered));
    }
}

/* Values join what o holds. rose: some alpha is not 1 */
static void mix_values(forward *f, span s, bool rose)
{
    const panel *const pn = &f->panel;
    if (f->lowered != 1) {
        scale_rows(f->alpha, 1, pn->br, pn->width, fv_set1(LIFT));
    }
    const float *const alpha = rose || f->lowered != 1 ? f->alpha : NULL;
    if (f->by_rows) {
        mix_rows(f, s, alpha);
    } else {
        mix_columns(f, s, alpha);
    }
}

/* The same, of pairs. alpha: NULL for 1 */
static void mix_pairs(forward *f, span s, const float *alpha)
{
    if (f->by_rows) {
        mix_rows_pairs(f, s, alpha);
    } else {
        pairs_mix(&f->panel, s, f->fresh, alpha, f->ot);
    }
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
    const bool masked = s.kind == FATTN_TILE_PARTIAL || seems_masked(pn, s);
    const int64_t keys = (s.live + PARTIAL_SUMS - 1) / PARTIAL_SUMS * PARTIAL_SUMS;
    const bool stored = pairs && !drops;
    const bool hoped = !masked && expects_near(f, s);
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
        mix_pairs(f, s, rose ? f->alpha : NULL);
    } else {
        mix_values(f, s, rose);
    }
    f->fresh = false;
}

/* Turns to the copies of a tile of keys; returns what of them is there. */
static kept_tile turn_to_copies(forward *strips, int64_t count, int64_t block)
{
    const panel *const pn = &strips->panel;
    if (!keeps_tiles(pn->p, pn->bc)) {
        return (kept_tile){0};
    }
    key_tile tile = *strips->tiles;
    tile.k_copy += block * pn->bc * pn->dp;
    tile.v_copy += block * pn->bc * pn->dvp;
    use_tile(strips, count, tile);
    return strips->kept->tile[block];
}

/* Loads a tile's keys, and values where they are wanted. Returns whether the latter are pairs. */
INLINE bool load_tile(forward *strips, int64_t count, int64_t block, span s, bool paired)
{
    kept_tile kept = turn_to_copies(strips, count, block);
    const panel *const pn = &strips->panel;
    const fattn_problem *const p = pn->p;
    const bool values = p->outputs & FATTN_OUT_O;
    if (paired && strips->form == KEYS_BLOCKED) {
        block_keys(pn, s, kept.keys >= s.live);
    } else if (paired) {
        pairs_load_keys(pn, s, kept.keys, pn->buf->k, &p->k, p->dim, pn->k_copy, pn->k_pairs);
    } else {
        load_keys(pn, s, kept.keys, pn->buf->k, &p->k, p->dim, pn->k_copy, pn->dp, pn->k, NULL);
    }
    /* Pairs of values past the last are zeros. */
    const bool pairs = paired && values && pairs_load_values(pn, s, kept.values == s.live);
    if (values && !pairs) {
        const int64_t copied = paired ? 0 : kept.values;
        load_keys(pn, s, copied, pn->buf->v, &p->v, p->dim_v, pn->v_copy, pn->dvp, pn->v, NULL);
    }
    if (keeps_tiles(p, pn->bc)) {
        kept.keys = (int32_t)fattn_max64(kept.keys, s.live);
        kept.values = (int32_t)(pairs ? s.live : paired ? 0 : fattn_max64(kept.values, s.live));
        strips->kept->tile[block] = kept;
    }
    return pairs;
}

/* A tile of keys for all strips. loaded: its keys and values are there. */
INLINE void forward_block(forward *strips, int64_t count, int64_t block, bool paired, bool loaded)
{
    span spans[STRIPS];
    const span all = spans_of(strips, count, block, spans);
    const bool pairs = all.live && !loaded && load_tile(strips, count, block, all, paired);
    for (int64_t n = 0; n < count; n++) {
        if (spans[n].kind != FATTN_TILE_EMPTY) {
            forward_tile(&strips[n], spans[n], paired, pairs);
        }
    }
}

/* A block of queries; room: strips there are for it. */
INLINE void attention(const fattn_cpu_run *run, int64_t item, forward *strips, int64_t room,
                      bool paired)
{
    const fattn_work work = fattn_schedule_item(run->tiling, run->problem->heads_k, item);
    if (work.split > 0 && !has_part(run, item, work.split)) {
        return;
    }
    const int64_t count = forward_open(strips, room, run, work);
    if (count == 0) {
        return;
    }
    const fattn_parts parts = parts_of(run->tiling, &strips->panel, &strips[count - 1].panel);
    const bool whole = fattn_parts_are_one(&parts);
    int64_t first, past, begin = INT64_MAX, end = 0;
    const int64_t head = work.batch * run->problem->heads_k + work.head + 1;
    const int64_t part = work.batch * run->tiling->splits + work.split + 1;
    if (strips->kept->head != head) {
        *strips->kept = (kept_head){.head = head};
    }

    for (int64_t n = 0; n < count; n++) {
        forward_begin(&strips[n], paired, work.split);
        (void)fattn_schedule_keys(&parts, work.split, &first, &past);
        panel_blocks(&strips[n].panel, &first, &past);
        known_bias *const known = strips->known ? &strips->known[work.block * room + n] : NULL;
        bias_blocks(&strips[n].panel, known, part, &first, &past);
        begin = fattn_min64(begin, first);
        end = fattn_max64(end, past);
        if (whole) {
            forward_choose_rows(&strips[n], past - first <= 1, paired);
        }
    }
    prefetch_plan ahead;
    const bool fetches = !paired && end - begin > 1 && run->tiling->splits == 1 &&
                         run->problem->outputs & FATTN_OUT_O;
    if (fetches) {
        prefetch_plan_open(&ahead, run, item, &strips->panel, begin, end);
    }
    for (int64_t block = begin; block < end; block++) {
        const bool loaded = fetches && turn_to_block(&ahead, strips, count, run, block);
        forward_block(strips, count, block, paired, loaded);
    }

    for (int64_t n = 0; n < count; n++) {
        forward *const f = &strips[n];
        const panel *const pn = &f->panel;
        if (f->fresh) {
            fill(f->ot, pn->br * pn->dvp, 0);
        }
        meet_sinks(f);
        if (!whole) {
            transpose(f->ot, pn->br, pn->dvp, pn->width, f->o, pn->dvp);
            forward_leave_part(f, run, item, n);
        } else if (f->by_rows) {
            forward_store_rows(f);
        } else {
            forward_store_columns(f);
        }
    }
}

/* Strips are laid out once, and each item begins with what they were then. */
INLINE void attend(const fattn_cpu_run *run, void *scratch, bool paired)
{
    forward laid[STRIPS], strips[STRIPS];
    kept_head kept = {0};
    arena from = {.base = scratch};
    const int64_t room = forward_layout(laid, run->problem, run->tiling, &from);
    known_layout(laid, &from);
    laid->kept = &kept;
    strips_prepare(&laid->panel);
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        memcpy(strips, laid, (size_t)room * sizeof *laid);
        attention(run, item, strips, room, paired);
    }
}

static void forward_work(const fattn_cpu_run *run, void *scratch) { attend(run, scratch, false); }

#if FV_PAIRS
static void pairs_work(const fattn_cpu_run *run, void *scratch)
{
    pairs_open();
    attend(run, scratch, true);
    pairs_close();
}
#endif

static int64_t forward_count(const fattn_cpu_run *run) { return run->tiling->items; }

/* --- Tiles ------------------------------------------------------------------------------------ */

/* Blocks of as many rows as are worth the keys they load, where they leave cores some to share, and
 * smaller ones, among which the planner finds even shares. */
#define FORWARD_ROUNDS 4
#define BLOCK_TILES                                                                               \
    {TILE_ROWS(48), BLOCK_KEYS}, {TILE_ROWS(96), BLOCK_KEYS}, {TILE_ROWS(144), BLOCK_KEYS},       \
        {TILE_ROWS(192), BLOCK_KEYS}, {TILE_ROWS(240), BLOCK_KEYS}, {TILE_ROWS(288), BLOCK_KEYS}, \
        {TILE_ROWS(384), BLOCK_KEYS},                                                             \
    {                                                                                             \
        BLOCK_ROWS, BLOCK_KEYS                                                                    \
    }
static const fattn_tile forward_tiles[] = {BLOCK_TILES,
                                           {TILE_ROWS(48), 64},
#if FV_LANES > 1 && FV_LANES < 16
                                           {TILE_ROWS(24), 64},
#endif
                                           {TILE_ROWS(16), 32},
                                           {0, 0}};

/* What opening a block costs, which shows where keys are few, and copying a tile of keys, or the
 * ways of keys in place through the caches, in rows' time. */
static int64_t forward_block_rows(const fattn_problem *p)
{
    return 40 / fattn_max64(p->seqlen_k, 1) + (keys_in_place(p) ? 5 : 40);
}

#if FV_PAIRS
/* With fewer keys, products of pairs save less than it takes to arrange their operands, which is
 * less where queries come as they lie (small.inl). */
static bool pairs_pay(const fattn_problem *p)
{
    const int64_t group = p->heads_k ? p->heads_q / p->heads_k : 0;
    const bool blocked = FV_LANES > 4 && p->dim % 8 == 0 && p->seqlen_q * group > FV_LANES;
    const int64_t few = FV_TILES ? 12 : blocked ? 2 : 4;
    return p->seqlen_k > few || p->features & FATTN_BATCH_INVARIANT;
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
    const int64_t tiles = 1 + copies_meanwhile(p, tile.bc);
    return block_scratch(p, &tiling) + keys_in_place_bytes(p, &tiling) * tiles;
}

static int64_t forward_workspace(const fattn_problem *p, const fattn_tiling *tiling)
{
    return fattn_cpu_workspace(forward_shared(p, tiling), forward_scratch(p, tiling));
}
