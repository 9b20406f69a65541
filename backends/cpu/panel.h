/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A panel: a block of rows of one key/value head that is multiplied with tiles of its keys, one
 * after another. This header has what forward, decoding and backward share: where rows and keys
 * lie, the scratch for them, and the loading of keys. dots.h has dot products of floats, terms.h
 * the other terms of a score.
 *
 * The rows of a panel are numbered r = i * group + g, where i is a query of the sequence and g one
 * of the heads that share the key/value head: neighbouring rows attend to nearly the same keys, and
 * keys are read once for the whole group. A tile of scores is x[j][r], with queries in the lanes.
 * `width` is the number of rows rounded up to vectors; rows past the last are dead: they hold zeros
 * and nobody reads their results.
 *
 * Decoding has few rows, which would leave most lanes empty. Its tiles are dense: rows are rounded
 * up to a power of two, `pitch`, and as many neighbouring keys as fill DECODE_ROWS lanes are placed
 * side by side. Lane r then has row r % pitch and key `phases` * step + r / pitch. The score of key
 * j is at index j * pitch + row of x. The code for both kinds of tile says "row" for a lane and
 * "key" for a step.
 *
 * The keys of a tile are reached through pointers to rows of floats, one per key. They point into
 * the tensor where possible (floats, and a stride that spreads over the cache), else to a copy.
 * Keys past the end point to a row of zeros, so padding in the tensor is never read.
 */
#ifndef FATTN_CPU_PANEL_H
#define FATTN_CPU_PANEL_H

#include <string.h>

#include "backends/cpu/cpu.h"
#include "backends/cpu/product_tile.h"
#include "core/band.h"
#include "core/problem.h"

/* One row: a query of a head. */
typedef struct query_row {
    int64_t i, h;
    int64_t phase; /* which of the keys of a step is its own */
    bool dead;     /* past the last row or, in backward, without probabilities */
    int32_t lone;  /* in backward: the only key that it attends to, below 2^31, or -1 */
} query_row;

/* How scores lie in a tile, as arguments for `dense`: one row in each lane, or dense, as above. */
enum { ROWS_IN_LANES = false, DENSE_TILE = true };

/* Rows of k, then rows of v, that are being copied. `keys` of the `count` rows are of k; `done` are
 * copied. */
typedef struct key_copies {
    const prefetch_row *rows;
    int64_t keys, count, done;
    float *k, *v; /* [bc][d_pad], [bc][dv_pad] */
} key_copies;

/* What may hide a key from a row: a bias of -inf, or a mask of 0. */
typedef enum hider { BIAS_HIDES, MASK_HIDES, HIDERS } hider;

/* Which keys a hider affects. It hides those outside `visible` from all rows of a panel. It changes
 * no row's score for those in `neutral`: the bias is 0, or the mask keeps the pair. */
typedef struct hider_ranges {
    fattn_range visible, neutral;
} hider_ranges;

typedef struct panel {
    const fattn_problem *p;
    const fattn_cpu_run *run;
    int64_t br, bc; /* rows and keys of a tile; br is also the stride between the keys of x */
    int64_t b, hk, group;
    int64_t first, rows; /* number of the first row, and how many there are */
    int64_t width;
    int64_t pitch, phases; /* br and 1 unless tiles are dense */
    int64_t step;          /* keys of a tile are rounded up to a multiple of it */
    int64_t i0, i1;        /* the rows belong to queries i0 .. i1 - 1 */
    fattn_range mask_rows; /* with a block mask: its rows of blocks that have these queries */
    bool ragged;           /* some row within `width` is dead, so its scores are masked */
    bool masked;           /* there is a mask or a block mask */
    int32_t heads_ahead;   /* how far the head is whose rows are prefetched; 0: none is */

    fattn_sequence seq;
    int64_t start_k; /* fattn_start_k() */
    fattn_band band;
    fattn_score_rule rule;
    float v_factor; /* what the values are multiplied by (FATTN_DESCALE), or 1 */
    fattn_dropout dropout;

    /* Scratch. d_pad and dv_pad: D and Dv rounded up to vectors. */
    int64_t d_pad, dv_pad;
    query_row *row;       /* [br] */
    hider_ranges *ranges; /* [HIDERS] set by skip_hidden_blocks() */
    float *slope;         /* [br] of ALiBi */
    uint32_t *drop_i;     /* [br] query and global head, for dropout */
    uint32_t *drop_h;

    /* Scratch that panels of one thread can share. */
    float *at;              /* [br] i + off - (first key of the tile) */
    float *lo, *hi;         /* [br] keys of the tile in the band of a row: lo <= j < hi */
    float **x_rows;         /* [bc] of x */
    float *bias, *keep, *z; /* [bc][br] bias; 1 where masks keep; dropout multipliers */
    float *term_rows;       /* [br][bc] a tile of bias or mask by rows, before it is transposed */
    const float **k, **v;   /* [bc] rows of the tile */
    /* The same as pairs (pairs.h): [bc] rows of k, [bc / 2] of v and of x. x_pairs is NULL where
     * matrix registers multiply pairs. */
    const bf16_pair **k_pairs, **v_pairs, **x_pairs;
    float *zeros; /* [max(d_pad, dv_pad)] */

    /* Scratch that each kernel lays out as its products need it. */
    float *q, *qt;       /* [br][d_pad], [operand_row(D)][br] */
    float *x;            /* [bc][br] scores, then probabilities */
    prefetch_list later; /* what products with keys prefetch */
    /* Keys and values of the next tile, which are copied meanwhile, or NULL. */
    key_copies *next_tile;
    float *k_copy, *v_copy; /* [bc][operand_row(D)], [bc][dv_pad] */
} panel;

/* Does the items that a worker takes, one by one. */
INLINE void each_item(const fattn_cpu_run *run, void *scratch,
                      void (*work)(const fattn_cpu_run *run, int64_t item, void *scratch))
{
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        work(run, item, scratch);
    }
}

/* --- Scratch ---------------------------------------------------------------------------------- */

/* Hands out memory from `base`. If base is NULL, it only counts the bytes. */
typedef struct arena {
    char *base;
    int64_t used;
} arena;

static void *carve(arena *from, int64_t count, size_t size)
{
    void *const block = from->base ? from->base + from->used : NULL;
    from->used += (count * (int64_t)size + 63) / 64 * 64;
    return block;
}

static bool is_masked(const fattn_problem *p)
{
    return p->features & (FATTN_MASK | FATTN_BLOCK_MASK);
}

static bool has_hiders(const fattn_problem *p) { return p->features & (FATTN_BIAS | FATTN_MASK); }

/*
 * Whether products can read the rows of k or v in place. A stride of a multiple of 4 KiB maps all
 * rows of a tile to the same set of the first-level cache, where they evict each other.
 */
static bool in_place(fattn_dtype dtype, const fattn_strides *strides)
{
    return dtype == FATTN_F32 && strides->seq % 1024 != 0;
}

static bool keys_in_place(const fattn_problem *p)
{
    return in_place(p->dtype_kv, &p->k) && in_place(p->dtype_v, &p->v);
}

/* The scratch that panels of one thread share, since it works on one at a time. */
static void panel_layout(panel *pn, const fattn_problem *p, int64_t br, int64_t bc, arena *from)
{
    pn->p = p;
    pn->br = br;
    pn->bc = bc;
    pn->d_pad = vectors_of(p->dim) * FV_LANES;
    pn->dv_pad = vectors_of(p->dim_v) * FV_LANES;
    pn->masked = is_masked(p);
    pn->later = NO_PREFETCH;
    pn->next_tile = NULL;
    pn->heads_ahead = 0;

    pn->at = carve(from, br, sizeof(float));
    pn->lo = carve(from, br, sizeof(float));
    pn->hi = carve(from, br, sizeof(float));
    pn->x_rows = carve(from, bc, sizeof *pn->x_rows);
    pn->bias = carve(from, p->features & FATTN_BIAS ? bc * br : 0, sizeof(float));
    pn->keep = carve(from, pn->masked ? bc * br : 0, sizeof(float));
    pn->z = carve(from, p->features & FATTN_DROPOUT ? bc * br : 0, sizeof(float));
    pn->term_rows =
        carve(from, p->features & FATTN_BIAS || pn->masked ? bc * br : 0, sizeof(float));
    pn->k = carve(from, bc, sizeof *pn->k);
    pn->v = carve(from, bc, sizeof *pn->v);
    pn->zeros = carve(from, fattn_max64(pn->d_pad, pn->dv_pad), sizeof(float));
}

/* Room for copies of the keys of some tiles. To be called after panel_layout(). */
static void panel_layout_keys(panel *pn, int64_t tiles, arena *from)
{
    const fattn_problem *const p = pn->p;
    pn->k_copy =
        carve(from, in_place(p->dtype_kv, &p->k) ? 0 : tiles * pn->bc * operand_row(p->dim),
              sizeof(float));
    pn->v_copy =
        carve(from, in_place(p->dtype_v, &p->v) ? 0 : tiles * pn->bc * pn->dv_pad, sizeof(float));
}

/* Fills the scratch that no item changes. */
static void panel_prepare(const panel *pn)
{
    fill(pn->zeros, fattn_max64(pn->d_pad, pn->dv_pad), 0);
}

/* The scratch that each panel has of its own. To be called after panel_layout(). */
static void panel_layout_rows(panel *pn, arena *from)
{
    pn->row = carve(from, pn->br, sizeof *pn->row);
    pn->ranges = carve(from, has_hiders(pn->p) ? HIDERS : 0, sizeof *pn->ranges);
    pn->slope = carve(from, pn->br, sizeof(float));
    pn->drop_i = carve(from, pn->br, sizeof(uint32_t));
    pn->drop_h = carve(from, pn->br, sizeof(uint32_t));
}

/* Bytes of a tile of keys and values that is read in place: it occupies cache as a copy does. So
 * the bytes of a tile, and with them the choice of its size, do not depend on strides. */
static int64_t keys_in_place_bytes(const fattn_problem *p, const fattn_tiling *tiling)
{
    const int64_t d_pad = vectors_of(p->dim) * FV_LANES, dv_pad = vectors_of(p->dim_v) * FV_LANES;
    return tiling->bc * (int64_t)sizeof(float) *
           ((in_place(p->dtype_kv, &p->k) ? d_pad : 0) +
            (in_place(p->dtype_v, &p->v) ? dv_pad : 0));
}

/* About n rows, as a whole number of register tiles. */
#define TILE_GROUP (FV_LANES * FV_NQ)
#define TILE_ROWS(n) ((n) > TILE_GROUP ? (n) / TILE_GROUP * TILE_GROUP : TILE_GROUP)

/* --- Opening a panel -------------------------------------------------------------------------- */

/* k_factor: what the keys are multiplied by (FATTN_DESCALE), or 1. */
static fattn_score_rule rule_of(const fattn_problem *p, float k_factor)
{
    const bool distances = p->features & FATTN_ALIBI && !(p->features & FATTN_ALIBI_BIAS);
    const unsigned terms =
        (p->features & FATTN_SINK ? FATTN_SCORE_SCALE
                                  : 0) | /* sinks are relative to scaled scores */
        (p->features & FATTN_SOFTCAP ? FATTN_SCORE_CAP : 0) |
        (p->features & FATTN_BIAS ? FATTN_SCORE_BIAS : 0) | (distances ? FATTN_SCORE_ALIBI : 0);
    return fattn_score_rule_make(terms, p->scale * (double)k_factor, p->softcap);
}

static fattn_dropout dropout_of(const fattn_problem *p, const fattn_buffers *buf)
{
    return fattn_dropout_make(fattn_dropout_threshold(p->dropout_p),
                              buf->seed_ptr ? *buf->seed_ptr : buf->seed,
                              buf->offset_ptr ? *buf->offset_ptr : buf->offset);
}

/* Fills in what does not depend on the keys for lanes first .. past - 1. Either all of them are
 * dead or none; a dead lane counts as the panel's first row. */
static void panel_rows(panel *pn, int64_t phase, int64_t first, int64_t past, bool dead)
{
    const fattn_problem *const p = pn->p;
    const int64_t group = pn->group, h0 = pn->hk * group;
    query_row *const row = pn->row;
    int64_t i = pn->i0, g = pn->first - pn->i0 * group;
    for (int64_t r = first; r < past; r++) {
        row[r] = (query_row){.i = i, .h = h0 + g, .phase = phase, .dead = dead};
        if (!dead && ++g == group) {
            g = 0;
            i++;
        }
    }
    if (p->features & FATTN_ALIBI) {
        const float *const slopes = pn->run->buffers->alibi_slopes;
        for (int64_t r = first; r < past; r++) {
            pn->slope[r] = dead ? 0 : slopes[pn->b * p->alibi_batch_stride + row[r].h];
        }
    }
    if (p->features & FATTN_DROPOUT) {
        for (int64_t r = first; r < past; r++) {
            pn->drop_i[r] = (uint32_t)row[r].i;
            pn->drop_h[r] = (uint32_t)(p->head_offset + row[r].h);
        }
    }
}

/* Sets the sequence: where it lies, and where its keys start. */
static void panel_enter(panel *pn, const fattn_cpu_run *run, int64_t b)
{
    pn->run = run;
    pn->b = b;
    pn->seq = fattn_sequence_of(run->problem, run->buffers, b);
    pn->start_k = fattn_start_k(run->problem, run->buffers, b);
}

/* Gives a panel, whose pn->first is set, `rows` rows. */
static void panel_take(panel *pn, int64_t rows, bool dense)
{
    pn->rows = rows;
    pn->width = dense ? pn->br : vectors_of(pn->rows) * FV_LANES;
    pn->pitch = pn->br;
    while (dense && pn->pitch / 2 >= pn->rows) {
        pn->pitch /= 2;
    }
    pn->phases = pn->br / pn->pitch;
    pn->i0 = pn->first / pn->group;
    pn->i1 = (pn->first + pn->rows - 1) / pn->group + 1;
    if (pn->run->problem->features & FATTN_BLOCK_MASK) {
        const int64_t block_m = pn->run->problem->block_m;
        pn->mask_rows =
            (fattn_range){.first = pn->i0 / block_m, .past = (pn->i1 - 1) / block_m + 1};
    }
}

/* Places a panel on rows `first`, first + 1, ... of sequence b and key/value head hk. Needs pn->br.
 * dense: DENSE_TILE or ROWS_IN_LANES. Returns false if the run has no such rows. Writes no
 * scratch. */
static bool panel_place(panel *pn, const fattn_cpu_run *run, int64_t b, int64_t hk, int64_t first,
                        bool dense)
{
    const fattn_problem *const p = run->problem;
    pn->hk = hk;
    pn->group = p->heads_q / p->heads_k;
    panel_enter(pn, run, b);
    pn->first = first;
    const int64_t rows = pn->seq.sq * pn->group;
    if (rows <= pn->first || (run->few_rows && (rows <= run->few_rows) != run->takes_few)) {
        return false;
    }
    panel_take(pn, fattn_min64(pn->br, rows - pn->first), dense);
    pn->ragged = false;
    pn->band = fattn_band_of(p, &pn->seq);
    return true;
}

/* The factor of the panel's keys, or values; 1 without FATTN_DESCALE. */
static float descale_of(const panel *pn, const float *descales)
{
    const fattn_problem *const p = pn->run->problem;
    const int64_t at = pn->b * p->descale_stride[0] + pn->hk * p->descale_stride[1];
    return p->features & FATTN_DESCALE ? descales[at] : 1;
}

/* Fills in what each row of a placed panel needs. */
static void panel_fill(panel *pn)
{
    const fattn_problem *const p = pn->run->problem;
    pn->rule = rule_of(p, descale_of(pn, pn->run->buffers->k_descale));
    pn->v_factor = descale_of(pn, pn->run->buffers->v_descale);
    if (p->features & FATTN_DROPOUT) {
        pn->dropout = dropout_of(p, pn->run->buffers);
    }
    for (int64_t r = 0, phase = 0; r < pn->width; r += pn->pitch, phase++) {
        const int64_t past = fattn_min64(r + pn->pitch, pn->width);
        panel_rows(pn, phase, r, r + pn->rows, false);
        panel_rows(pn, phase, r + pn->rows, past, true);
    }
}

/* panel_place() and panel_fill(). */
static bool panel_open(panel *pn, const fattn_cpu_run *run, int64_t b, int64_t hk, int64_t first,
                       bool dense)
{
    const bool has_rows = panel_place(pn, run, b, hk, first, dense);
    if (has_rows) {
        panel_fill(pn);
    }
    return has_rows;
}

/* The number of rows, rounded up to whole steps of products. */
static int64_t row_steps(const panel *pn) { return (pn->rows + FV_NK - 1) / FV_NK * FV_NK; }

/* The index of the first channel of query i and head h in q, o, dout or dq. */
static int64_t row_index(const panel *pn, const fattn_strides *s, int64_t i, int64_t h)
{
    return pn->seq.q_batch * s->batch + (pn->seq.q_row + i) * s->seq + h * s->head;
}

/* The same for row r. */
static int64_t query_index(const panel *pn, const fattn_strides *s, int64_t r)
{
    return row_index(pn, s, pn->row[r].i, pn->row[r].h);
}

/* The index of the first channel of key j in k, v, dk or dv. */
static int64_t key_index(const panel *pn, const fattn_strides *s, int64_t j)
{
    const fattn_problem *const p = pn->p;
    if (p->features & FATTN_PAGED) {
        const int32_t *const table = pn->run->buffers->block_table + pn->b * p->block_table_stride;
        j += pn->start_k;
        return table[j / p->page_size] * s->batch + j % p->page_size * s->seq + pn->hk * s->head;
    }
    return pn->seq.k_batch * s->batch + (pn->seq.k_row + j) * s->seq + pn->hk * s->head;
}

/* Lists those of the rows first .. past - 1 of a panel that exist, as they lie in q or o, with n
 * numbers each. Returns how many. */
static int64_t list_rows(const panel *pn, int64_t first, int64_t past, const void *tensor,
                         fattn_dtype dtype, const fattn_strides *strides, int64_t n,
                         prefetch_row *rows)
{
    const int64_t begin = fattn_max64(0, first);
    const int64_t count = fattn_max64(0, fattn_min64(past, pn->rows) - begin);
    int64_t i = (pn->first + begin) / pn->group, g = (pn->first + begin) % pn->group;
    for (int64_t r = 0; r < count; r++) {
        rows[r].from = element(tensor, dtype, row_index(pn, strides, i, pn->hk * pn->group + g));
        rows[r].bytes = bytes_in_lines(rows[r].from, n * fattn_dtype_size(dtype));
        if (++g == pn->group) {
            g = 0;
            i++;
        }
    }
    return count;
}

/* Whether rows r .. r + FV_LANES - 1 exist, consist of whole vectors and are evenly spaced in their
 * tensor. Then transposing can read or write them there. */
static bool rows_in_place(const panel *pn, int64_t dim, int64_t r)
{
    return dim % FV_LANES == 0 && pn->group == 1 && r + FV_LANES <= pn->rows;
}

/* --- Keys ------------------------------------------------------------------------------------- */

/* Rows of a key/value head that decoding takes at a time: the lanes of a dense tile. */
#define DECODE_ROWS 16
_Static_assert(DECODE_ROWS % FV_LANES == 0, "lanes of a dense tile are whole vectors");
_Static_assert(DECODE_ROWS % FV_ND == 0, "dense tiles hold whole steps of keys");

/* Whether the first-level cache, of at least 32 KB, holds the queries of a dense tile and some
 * keys. Decoding reads all of its queries for every few keys: with 576 channels, 13 rows take 1.35
 * times as long as in the forward kernel. */
static inline bool decode_queries_fit(const fattn_problem *p)
{
    enum { FLOATS_MOST = 7168 };
    return fattn_min64(fattn_problem_rows(p), DECODE_ROWS) * p->dim <= FLOATS_MOST;
}

/* The keys of a tile that some row of a panel may attend to. */
typedef struct span {
    int64_t first;  /* the key of x[0] */
    int64_t live;   /* how many of its keys exist */
    int64_t padded; /* how many are computed: live rounded up to whole steps */
    fattn_tile_kind kind;
    /* Keys in the band of every row, counted from `first`; masks may still hide some. */
    fattn_range common;
    bool unbiased;    /* the bias is 0 */
    bool only_masked; /* without the mask, the tile would be full */
} span;

/* How many keys of the tile, in whole steps of products, the rows before `past` attend to. Where
 * the band cuts a tile on the right, products stop there. */
static int64_t keys_attended(const panel *pn, span s, int64_t past)
{
    const int64_t last = fattn_min64(past, pn->rows) - 1;
    const int64_t live = fattn_band_row(&pn->band, pn->row[last].i).past - s.first;
    return fattn_max64(0, fattn_min64((live + FV_NK - 1) / FV_NK * FV_NK, s.padded));
}

/* What the block mask of head h leaves of blocks first .. past - 1 of keys. */
static fattn_tile_kind masked_kind(const panel *pn, int64_t h, fattn_range blocks)
{
    const int64_t *const stride = pn->p->block_mask_stride;
    const uint8_t *const mask = pn->run->buffers->block_mask + pn->b * stride[0] + h * stride[1];
    bool kept = false, dropped = false;
    for (int64_t bi = pn->mask_rows.first; bi < pn->mask_rows.past; bi++) {
        for (int64_t bj = blocks.first; bj < blocks.past; bj++) {
            const bool keeps = mask[bi * stride[2] + bj * stride[3]];
            kept = kept || keeps;
            dropped = dropped || !keeps;
        }
    }
    return !kept ? FATTN_TILE_EMPTY : dropped ? FATTN_TILE_PARTIAL : FATTN_TILE_FULL;
}

/* The blocks of a block mask that have keys first .. past - 1. Keys are below 2^31; divisions of
 * 64 bits are slow on some processors. */
static fattn_range mask_blocks(const fattn_problem *p, int64_t first, int64_t past)
{
    const uint32_t keys = (uint32_t)fattn_min64(p->block_n, UINT32_MAX);
    return (fattn_range){.first = (uint32_t)first / keys, .past = (uint32_t)(past - 1) / keys + 1};
}

/* The span of key block `block`. It ends no later than the last key in the band of any row. */
static span span_of(const panel *pn, int64_t block)
{
    const fattn_problem *const p = pn->p;
    const int64_t j0 = block * pn->bc;
    const int64_t past = fattn_min64(j0 + pn->bc, fattn_band_rows(&pn->band, pn->i0, pn->i1).past);
    span s = {.first = j0, .live = past - j0, .kind = FATTN_TILE_EMPTY};
    s.padded = (s.live + pn->step - 1) / pn->step * pn->step;
    if (s.live <= 0) {
        return s;
    }

    bool masked = p->features & FATTN_MASK;
    s.kind = fattn_band_tile(&pn->band, pn->i0, pn->i1, j0, j0 + s.padded);
    if (s.kind != FATTN_TILE_EMPTY && p->features & FATTN_BLOCK_MASK) {
        const fattn_range blocks = mask_blocks(p, j0 + pn->start_k, past + pn->start_k);
        const int64_t first = pn->hk * pn->group;
        const int64_t heads = p->block_mask_stride[1] ? pn->group : 1;
        bool kept = false;
        for (int64_t h = first; h < first + heads && !(kept && masked); h++) {
            const fattn_tile_kind kind = masked_kind(pn, h, blocks);
            kept = kept || kind != FATTN_TILE_EMPTY;
            masked = masked || kind != FATTN_TILE_FULL;
        }
        if (!kept) {
            s.kind = FATTN_TILE_EMPTY;
        }
    }
    if (s.kind == FATTN_TILE_FULL && (masked || pn->ragged)) {
        s.kind = FATTN_TILE_PARTIAL;
        s.only_masked = !pn->ragged && !(p->features & FATTN_BLOCK_MASK);
    }
    s.common.first = fattn_max64(0, fattn_band_row(&pn->band, pn->i1 - 1).first - j0);
    s.common.past = fattn_min64(s.padded, fattn_band_row(&pn->band, pn->i0).past - j0);
    return s;
}

/* Narrows the range of key blocks first .. past - 1 to those that the panel's rows may attend
 * to. */
static void panel_blocks(const panel *pn, int64_t *first, int64_t *past)
{
    const fattn_range keys = fattn_band_rows(&pn->band, pn->i0, pn->i1);
    *first = fattn_max64(*first, keys.first / pn->bc);
    *past = fattn_min64(*past, (fattn_max64(0, keys.past) + pn->bc - 1) / pn->bc);
}

/* --- Loading keys ----------------------------------------------------------------------------- */

/* How many rows ahead of the one that is copied are prefetched. Without this, rows a page apart
 * would arrive one by one. */
#define COPIED_AHEAD 4

/* rows[j] = the row of key j of the tile in k or v. Rows are `step` floats apart, the first at
 * `from`. */
static void point_keys(const panel *pn, span s, const float *from, int64_t step, const float **rows)
{
    for (int64_t j = 0; j < s.live; j++) {
        rows[j] = from + j * step;
    }
    for (int64_t j = s.live; j < s.padded; j++) {
        rows[j] = pn->zeros;
    }
}

/* rows[j] = the row of key j of the tile in k or v, as floats. The first `copied` copies are there
 * already. later: NULL, or a list that receives the rows to copy instead of them being copied.
 * Returns how many rows are copies. */
static int64_t load_keys(const panel *pn, span s, int64_t copied, const void *tensor,
                         fattn_dtype dtype, const fattn_strides *strides, int64_t dim, float *copy,
                         int64_t copy_stride, const float **rows, prefetch_row *later)
{
    const bool direct = in_place(dtype, strides), paged = pn->p->features & FATTN_PAGED;
    const int64_t step = strides->seq * fattn_dtype_size(dtype);
    const int64_t bytes = dim * fattn_dtype_size(dtype);
    const char *from = element(tensor, dtype, key_index(pn, strides, s.first));
    if (direct && !paged) {
        point_keys(pn, s, (const float *)(const void *)from, strides->seq, rows);
        return 0;
    }
    for (int64_t j = 0; j < s.padded; j++, from += step) {
        if (j >= s.live) {
            rows[j] = pn->zeros;
            continue;
        }
        if (paged) {
            from = element(tensor, dtype, key_index(pn, strides, s.first + j));
        }
        if (direct) {
            rows[j] = (const float *)(const void *)from;
            continue;
        }
        rows[j] = copy + j * copy_stride;
        if (j < copied) {
            continue;
        }
        if (later) {
            later[j] = (prefetch_row){.from = from, .bytes = bytes_in_lines(from, bytes)};
            continue;
        }
        const char *const ahead = from + COPIED_AHEAD * step;
        const int64_t past = bytes_in_lines(ahead, bytes);
        for (int64_t byte = 0; byte < past; byte += CACHE_LINE) {
            __builtin_prefetch(ahead + byte);
        }
        row_load(copy + j * copy_stride, dtype, from, dim);
    }
    return direct ? 0 : s.live;
}

/* Makes the copies up to number past - 1 that are not yet made. */
static void copy_keys_to(const panel *pn, key_copies *c, int64_t past)
{
    const fattn_problem *const p = pn->p;
    for (past = fattn_min64(past, c->count); c->done < past; c->done++) {
        const int64_t value = c->done - c->keys;
        row_load(value < 0 ? c->k + c->done * pn->d_pad : c->v + value * pn->dv_pad,
                 value < 0 ? p->dtype_kv : p->dtype_v, c->rows[c->done].from,
                 value < 0 ? p->dim : p->dim_v);
    }
}

#endif
