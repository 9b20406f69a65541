/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A strip: a panel in forward or decoding, one register tile wide or several, with the state that
 * it carries from one tile of keys to the next: {m, l} of its rows, and o by columns or by rows.
 * The strips of a block share parts of one scratch.
 */
#ifndef FATTN_CPU_STRIP_H
#define FATTN_CPU_STRIP_H

#include "backends/cpu/hidden.h"
#include "core/schedule.h"

/* How many converted key tiles a thread keeps for its next work item of the same head. Small
 * problems have so few rows per block that the time of converting keys again would be
 * noticeable. */
#define CACHED_TILES 3

/* How many keys and values of a cached tile have been converted. */
typedef struct cached_tile {
    int32_t keys, values;
} cached_tile;

/* The converted tiles that a worker keeps: those of the head of its last item. */
typedef struct cached_head {
    int64_t head; /* its number among all heads of all sequences, from 1 on; 0: none yet */
    cached_tile tile[CACHED_TILES];
} cached_head;

typedef struct forward forward;

/* How the queries and the keys of a tile are arranged for their product. */
typedef struct query_form {
    /* Arranges the queries in scratch when a strip begins. NULL: they are read in their tensor. */
    void (*load)(const forward *f);
    /* Arranges the keys in scratch; the first `copied` are there already. NULL: products read rows
     * of keys. */
    void (*load_keys)(const panel *pn, span s, int64_t copied);
    /* x = their dot products. Where the band hides a pair, the result may be anything. */
    void (*multiply)(const forward *f, span s);
} query_form;

/* The keys and values of a tile: the rows that products read, and room for copies. */
typedef struct key_tile {
    const float **k, **v;   /* [bc] */
    float *k_copy, *v_copy; /* [bc][operand_row(D)], [bc][dv_pad] */
} key_tile;

struct forward {
    panel panel;
    float *m, *l; /* [br] */
    float *lost;  /* [br] what rounding has taken from l, which lse gets back */
    /* [br] the l that o is divided by: the sum of the weights as products take them, rounded if
     * they are pairs. The same array as l where products take floats. */
    float *taken;
    float *ot; /* [dv_pad][br] */

    const query_form *form;
    bool fresh;      /* nothing has been added to ot yet, and it holds anything */
    bool by_rows;    /* o is by rows, [br][dv_pad], in the memory of ot */
    bool one_tile;   /* the strip has one tile of keys */
    bool normalised; /* o has been divided by l */
    bool in_tensor;  /* o is in its tensor already */
    bool sink_waits; /* the sink is not yet part of {m, l, o} */

    /* No weight of the last tile whose range was determined was below the window (window.h). */
    bool none_small;
    /* Tiles so far, below 2^31 as keys are, and those that predicts_near() was wrong about. */
    int32_t tiles_done, mispredicted;

    /* Scratch that the strips share. */
    float lowered; /* what sums of lifted probabilities are scaled back by (soften.h), or 1 */
    float *alpha;  /* [br] */
    float *o;      /* [br][dv_pad] */
    /* [later_rows()] Like the fields below, used by the first strip of a block only. */
    prefetch_row *later;
    key_tile tiles[2];   /* alternate where the next tile is copied during products */
    known_ranges *known; /* [strips of all rows] or NULL */
    cached_head *cache;  /* of the worker */
};

/* Rows of a strip: the fewest whole register tiles that hold the rows of decoding. */
#define STRIP_ROWS ((DECODE_ROWS + TILE_GROUP - 1) / TILE_GROUP * TILE_GROUP)
#define BLOCK_ROWS TILE_ROWS(528) /* most rows of a block */
#define BLOCK_KEYS 128            /* keys of a tile, if they fit */
#define WIDE_ROWS TILE_ROWS(240)  /* most rows of a strip of few keys */
#define STRIPS (BLOCK_ROWS / STRIP_ROWS)
_Static_assert(BLOCK_ROWS % STRIP_ROWS == 0, "blocks are strips");
_Static_assert(STRIP_ROWS <= WIDE_ROWS, "strips have at most WIDE_ROWS rows");

/* --- Scratch ---------------------------------------------------------------------------------- */

/* Whether copies of all keys of a head are cached: 16-bit keys, which are converted or transposed.
 * (Floats are copied during products if blocks are large.) This depends on no stride, as the choice
 * of a tile does not. */
static bool caches_tiles(const fattn_problem *p, int64_t bc)
{
    const bool floats = p->dtype_kv == FATTN_F32 && p->dtype_v == FATTN_F32;
    return !floats && p->seqlen_k <= CACHED_TILES * bc;
}

/* How many tiles of keys there is room for copies of. */
static int64_t copied_tiles(const fattn_problem *p, int64_t bc)
{
    return caches_tiles(p, bc) ? fattn_max64((p->seqlen_k + bc - 1) / bc, 1) : 1;
}

/* Whether there is room for a second tile, so that the keys of the next block can be copied while
 * floats of this one are multiplied. Wider heads use that memory for more queries per block. This
 * depends on no stride either. */
static bool copies_meanwhile(const fattn_problem *p, int64_t bc)
{
    const int64_t words = (vectors_of(p->dim) + vectors_of(p->dim_v)) * FV_LANES;
    return !FV_PAIRS && !caches_tiles(p, bc) && bc < p->seqlen_k && words <= 256;
}

static void tiles_layout(forward *f, arena *from)
{
    const panel *const pn = &f->panel;
    f->tiles[0] = f->tiles[1] =
        (key_tile){.k = pn->k, .v = pn->v, .k_copy = pn->k_copy, .v_copy = pn->v_copy};
    if (copies_meanwhile(pn->p, pn->bc)) {
        panel second = *pn;
        panel_layout_keys(&second, 1, from);
        f->tiles[1] = (key_tile){.k = carve(from, second.bc, sizeof *second.k),
                                 .v = carve(from, second.bc, sizeof *second.v),
                                 .k_copy = second.k_copy,
                                 .v_copy = second.v_copy};
    }
}

/* Makes the strips read keys and values from a tile. */
static void use_tile(forward *strips, int64_t count, key_tile tile)
{
    for (int64_t n = 0; n < count; n++) {
        panel *const pn = &strips[n].panel;
        pn->k = tile.k;
        pn->v = tile.v;
        pn->k_copy = tile.k_copy;
        pn->v_copy = tile.v_copy;
    }
}

/* Lays out `count` strips of br rows, with room for copies of some tiles of keys. */
static void strips_layout(forward *strips, int64_t count, const fattn_problem *p, int64_t br,
                          int64_t bc, int64_t tiles, arena *from)
{
    panel_layout(&strips->panel, p, br, bc, from);
    panel_layout_keys(&strips->panel, tiles, from);
    tiles_layout(strips, from);
    /* Wide strips copy no more rows than that at a time. */
    const int64_t some = fattn_min64(br, STRIP_ROWS);
    const int64_t keys = fattn_min64(bc, (p->seqlen_k / 64 + 1) * 64);
    strips->panel.q = carve(from, some * strips->panel.d_pad, sizeof(float));
    strips->panel.x = carve(from, br * keys, sizeof(float));
    strips->alpha = carve(from, br, sizeof(float));
    strips->o = carve(from, some * strips->panel.dv_pad, sizeof(float));
    for (int64_t n = 0; n < count; n++) {
        forward *const f = &strips[n];
        if (n > 0) {
            *f = strips[0];
        }
        panel_layout_rows(&f->panel, from);
        f->panel.qt = carve(from, br * operand_row(p->dim), sizeof(float));
        f->m = carve(from, br, sizeof(float));
        f->l = carve(from, br, sizeof(float));
        f->lost = carve(from, br, sizeof(float));
        f->taken = FV_PAIRS ? carve(from, br, sizeof(float)) : f->l;
        f->ot = carve(from, br * f->panel.dv_pad, sizeof(float));
    }
}

/* The most rows that are prefetched during a block of keys: results and queries, keys and
 * values. */
static int64_t later_rows(int64_t count, int64_t br, int64_t bc) { return 2 * (count * br + bc); }

/* How many strips a block of rows is divided into. A strip has STRIP_ROWS rows, or more if keys are
 * few: opening a strip would be much of its work then, and the scores take no more room than
 * STRIP_ROWS rows of a whole tile. Strips stay narrow where some tiles of a strip may be skipped,
 * and for batch-invariant rows. */
static int64_t strips_of(const fattn_problem *p, int64_t rows)
{
    const int64_t narrow = rows / STRIP_ROWS;
    const bool stay_narrow =
        fattn_is_banded(p) || p->features & (FATTN_BLOCK_MASK | FATTN_BATCH_INVARIANT);
    int64_t count = stay_narrow ? narrow : 1;
    while (count < narrow && (rows > count * WIDE_ROWS || narrow % count != 0 ||
                              rows * p->seqlen_k > count * STRIP_ROWS * BLOCK_KEYS)) {
        count++;
    }
    return fattn_max64(count, 1);
}

/* Lays out the strips of a block, with room for copies of some tiles of keys. Returns how many
 * there are. */
static int64_t block_layout(forward *strips, const fattn_problem *p, const fattn_tiling *tiling,
                            int64_t tiles, arena *from)
{
    const int64_t count = strips_of(p, tiling->br);
    strips_layout(strips, count, p, tiling->br / count, tiling->bc, tiles, from);
    return count;
}

/* block_layout() for forward, and room for the list of rows that a tile prefetches. */
static int64_t forward_layout(forward *strips, const fattn_problem *p, const fattn_tiling *tiling,
                              arena *from)
{
    const int64_t bc = tiling->bc;
    const int64_t count = block_layout(strips, p, tiling, copied_tiles(p, bc), from);
    const int64_t rows = later_rows(count, strips->panel.br, bc);
    strips->later = carve(from, rows, sizeof *strips->later);
    strips->known = NULL;
    return count;
}

/* Fills the scratch that strips share and no item changes. step: of keys. Returns how many keys a
 * tile has. */
static int64_t strips_prepare(const panel *pn, int64_t step)
{
    const int64_t steps = pn->p->seqlen_k / step + 1; /* of the longest sequence */
    const int64_t keys = fattn_min64(pn->bc, steps * step);
    panel_prepare(pn);
    point_rows(pn->x_rows, keys, pn->x, pn->br);
    return keys;
}

/* Opens the strips of a block of rows. Returns how many have rows. */
static int64_t forward_open(forward *strips, int64_t count, const fattn_cpu_run *run,
                            fattn_work work)
{
    int64_t n = 0;
    while (n < count &&
           panel_open(&strips[n].panel, run, work.batch, work.head,
                      work.block * run->tiling->br + n * strips->panel.br, ROWS_IN_LANES)) {
        n++;
    }
    return n;
}

/* Room for what is found about bias and mask, after forward_layout(). */
static void known_layout(forward *strips, arena *from)
{
    const int64_t known = known_strips(strips->panel.p, strips->panel.br);
    strips->known = known ? carve(from, known, sizeof *strips->known) : NULL;
    for (int64_t n = 0; from->base && n < known; n++) {
        strips->known[n].part = 0;
    }
}

/* For each strip, the part of key block `block` that it attends to. Returns the longest, which
 * contains the others. */
static span spans_of(const forward *strips, int64_t count, int64_t block, span *spans)
{
    span all = {.kind = FATTN_TILE_EMPTY};
    for (int64_t n = 0; n < count; n++) {
        spans[n] = visible_span(&strips[n].panel, block, ENDS_EARLY);
        if (spans[n].kind != FATTN_TILE_EMPTY && spans[n].live > all.live) {
            all = spans[n];
        }
    }
    return all;
}

/* --- State ------------------------------------------------------------------------------------ */

static fattn_softmax state_load(const forward *f, int64_t r)
{
    return (fattn_softmax){.m = fv_load(f->m + r), .l = fv_load(f->l + r)};
}

static void state_store(forward *f, int64_t r, fattn_softmax state)
{
    fv_store(f->m + r, state.m);
    fv_store(f->l + r, state.l);
}

/* The state that lse is taken from. o is divided by l as it is: its sums lost to the same side. */
static fattn_softmax state_for_lse(const forward *f, int64_t r)
{
    fattn_softmax state = state_load(f, r);
    state.l = fv_add(state.l, fv_load(f->lost + r));
    return state;
}

/* lost = alpha lost + lost now */
static void add_lost(forward *f, int64_t r, fv alpha, fv lost)
{
    fv_store(f->lost + r, fv_fma(alpha, fv_load(f->lost + r), lost));
}

/*
 * Products of pairs take weights rounded to bf16, and o is divided by the sum of the rounded ones.
 * Weights may be relative to less than the largest score (soften.h), so a weight may be any number;
 * where one key has nearly all the weight, dividing by the exact sum would give o the rounding
 * error of that weight. lse uses the sum of the exact weights.
 */
static fv normaliser_of_sums(const forward *f, int64_t r)
{
    return fattn_softmax_normaliser((fattn_softmax){.l = fv_load(f->taken + r)});
}

/* The same with the factor of the values. */
static fv normaliser_of_o(const forward *f, int64_t r)
{
    return fv_mul(fv_set1(f->panel.v_factor), normaliser_of_sums(f, r));
}

/* taken = alpha taken + sum */
static void add_taken(forward *f, int64_t r, fv alpha, fv sum)
{
    if (f->taken != f->l) {
        fv_store(f->taken + r, fv_add(fv_mul(alpha, fv_load(f->taken + r)), sum));
    }
}

/* The sinks of rows r .. r + FV_LANES - 1. */
static fv sinks_at(const panel *pn, int64_t r)
{
    const float *const sink = pn->run->buffers->sink;
    float sinks[FV_LANES];
    for (int64_t n = 0; n < FV_LANES; n++) {
        sinks[n] = sink[pn->row[r + n].h];
    }
    return fv_load(sinks);
}

/* The state before the first key: empty, or one sink, which belongs to the first part. last: the
 * sink joins at the end instead. */
static void state_begin(forward *f, int64_t split, bool last)
{
    const panel *const pn = &f->panel;
    const bool sink = pn->p->features & FATTN_SINK && split == 0;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        const fattn_softmax state =
            sink && !last ? fattn_softmax_sink(sinks_at(pn, r)) : fattn_softmax_empty();
        state_store(f, r, state);
        fv_store(f->lost + r, fv_set1(0));
        fv_store(f->taken + r, state.l);
    }
    f->sink_waits = sink && last;
}

/* Merges a waiting sink into {m, l} of rows r .. r + FV_LANES - 1. Returns the factor for their
 * o. */
static fv join_sink(forward *f, int64_t r)
{
    const panel *const pn = &f->panel;
    fattn_softmax state = state_load(f, r);
    fv share = fv_set1(1), weight;
    if (f->sink_waits) {
        const fattn_softmax sink = fattn_softmax_sink(sinks_at(pn, r));
        const fv lost = fattn_softmax_merge(&state, sink, fv_set1(pn->rule.unit), &share, &weight);
        add_lost(f, r, share, lost);
        add_taken(f, r, share, fv_mul(sink.l, weight));
        state_store(f, r, state);
    }
    return share;
}

/* The same for all rows and their o, which is by columns or by rows. */
static void join_sinks(forward *f)
{
    const panel *const pn = &f->panel;
    for (int64_t r = 0; r < pn->width && f->sink_waits; r += FV_LANES) {
        const fv share = join_sink(f, r);
        fv_store(f->alpha + r, share);
        if (!f->by_rows) {
            scale_rows(f->ot + r, pn->dv_pad, pn->br, FV_LANES, share);
        }
    }
    for (int64_t r = 0; r < pn->rows && f->sink_waits && f->by_rows; r++) {
        scale_rows(f->o + r * pn->dv_pad, 1, pn->dv_pad, pn->dv_pad, fv_set1(f->alpha[r]));
    }
    f->sink_waits = false;
}

/* Where row r of o lies in its tensor. */
static void *row_of_o(const panel *pn, int64_t r)
{
    const fattn_problem *const p = pn->p;
    return (char *)pn->run->buffers->o + query_index(pn, &p->o, r) * fattn_dtype_size(p->dtype_o);
}

#endif
