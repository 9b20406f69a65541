/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which tiles of the score matrix have to be computed: given a window (causal included), chunks,
 * lengths and a block mask, a tile is empty (skipped), full (every pair is kept, no test is needed)
 * or partial.
 *
 * Row i attends to the keys of a half-open range [first, past) whose ends are non-decreasing in i;
 * so the first and the last row describe a block of rows. Arithmetic is 64-bit: rows, keys and
 * diagonals are below 2^43 in size (POSITION_LIMIT in buffers.c), and windows are cut to 2^62.
 */
#ifndef FATTN_CORE_BAND_H
#define FATTN_CORE_BAND_H

#include <stdint.h>

#include "core/host_device.h"
#include "core/integer.h"
#include "core/problem.h"

/* 0 in GPU images whose kernels all decline FATTN_CHUNK, so that they have no code for it. */
#ifndef FATTN_BAND_CHUNKS
#define FATTN_BAND_CHUNKS 1
#endif

typedef enum fattn_tile_kind {
    FATTN_TILE_EMPTY,
    FATTN_TILE_PARTIAL,
    FATTN_TILE_FULL
} fattn_tile_kind;

typedef struct fattn_band {
    int64_t keys;        /* Sk of the sequence */
    int64_t diagonal;    /* row i is aligned with key i + diagonal */
    int64_t left, right; /* -1: unbounded */
#if FATTN_BAND_CHUNKS
    uint32_t chunk;     /* keys per chunk; 0: no chunks */
    uint32_t key_place; /* index of key 0 in its chunk */
    uint32_t row_place; /* index in its chunk of the key that row 0 is aligned with */
#endif
} fattn_band;

typedef struct fattn_range {
    int64_t first, past; /* empty when first >= past */
} fattn_range;

/* The band of a sequence of a normalised problem. */
FATTN_HD fattn_band fattn_band_of(const fattn_problem *p, const fattn_sequence *s)
{
    fattn_band band;
    band.keys = s->sk;
    band.diagonal = s->diagonal;
    band.left = p->window_left;
    band.right = p->window_right;
#if FATTN_BAND_CHUNKS
    band.chunk = (uint32_t)p->chunk;
    band.key_place = band.row_place = 0;
    if (p->chunk) {
        band.key_place = (uint32_t)fattn_modulo(s->k_position, p->chunk);
        band.row_place = (uint32_t)fattn_modulo(s->k_position + s->diagonal, p->chunk);
    }
#endif
    return band;
}

/* How many keys a row attends to on either side of the key that it is aligned with, on average over
 * the rows of a long sequence; -1: all. For decisions that are made from sizes alone. */
typedef struct fattn_reach {
    int64_t left, right;
} fattn_reach;

FATTN_HD fattn_reach fattn_band_reach(const fattn_problem *p)
{
    fattn_reach reach;
    reach.left = p->window_left;
    reach.right = p->window_right;
    if (p->chunk) { /* the mean over all places in a chunk */
        const int64_t left = (p->chunk - 1) / 2, right = p->chunk / 2;
        reach.left = reach.left < 0 ? left : fattn_min64(reach.left, left);
        reach.right = reach.right < 0 ? right : fattn_min64(reach.right, right);
    }
    return reach;
}

/* Whether window or chunk may hide keys from a row of a normalised problem. */
FATTN_HD int fattn_is_banded(const fattn_problem *p)
{
    const fattn_reach reach = fattn_band_reach(p);
    return reach.left >= 0 || reach.right >= 0;
}

#if FATTN_BAND_CHUNKS
/* The index in its chunk of the key that is `n` keys after one with index `place`. n and place are
 * below 2^31, so the division has 32 bits, which is cheap. */
FATTN_HD int64_t fattn_band_place(const fattn_band *band, uint32_t place, int64_t n)
{
    return ((uint32_t)n + place) % band->chunk;
}
#endif

/* The keys that row i attends to: first <= j < past, with 0 <= first and past <= keys. */
FATTN_HD fattn_range fattn_band_row(const fattn_band *band, int64_t i)
{
    const int64_t limit = INT64_C(1) << 62;
    const int64_t at = i + band->diagonal;
    fattn_range keys;
    keys.first = band->left < 0 ? 0 : fattn_max64(0, at - fattn_min64(band->left, limit));
    keys.past = band->right < 0 ? band->keys
                                : fattn_min64(band->keys, at + fattn_min64(band->right, limit) + 1);
#if FATTN_BAND_CHUNKS
    if (band->chunk) {
        const int64_t chunk = at - fattn_band_place(band, band->row_place, i);
        keys.first = fattn_max64(keys.first, chunk);
        keys.past = fattn_min64(keys.past, chunk + band->chunk);
    }
#endif
    return keys;
}

/* The keys that any of the rows i0 .. i1 - 1 attends to. i0 < i1. */
FATTN_HD fattn_range fattn_band_rows(const fattn_band *band, int64_t i0, int64_t i1)
{
    fattn_range keys;
    keys.first = fattn_band_row(band, i0).first;
    keys.past = fattn_band_row(band, i1 - 1).past;
    return keys;
}

/* The inverse: of rows 0 .. rows - 1 those that attend to any of the keys j0 .. j1 - 1. j0 < j1. */
FATTN_HD fattn_range fattn_band_queries(const fattn_band *band, int64_t rows, int64_t j0,
                                        int64_t j1)
{
    const int64_t limit = INT64_C(1) << 62;
    const int64_t low = j0 - band->diagonal, high = j1 - band->diagonal; /* aligned with the keys */
    fattn_range queries;
    queries.first = band->right < 0 ? 0 : fattn_max64(0, low - fattn_min64(band->right, limit));
    queries.past = band->left < 0 ? rows : fattn_min64(rows, high + fattn_min64(band->left, limit));
#if FATTN_BAND_CHUNKS
    if (band->chunk) {
        const int64_t before = fattn_band_place(band, band->key_place, j0);
        const int64_t after = band->chunk - fattn_band_place(band, band->key_place, j1 - 1);
        queries.first = fattn_max64(queries.first, low - before);
        queries.past = fattn_min64(queries.past, high - 1 + after);
    }
#endif
    return queries;
}

/* The kind of the tile of rows i0 .. i1 - 1 and keys j0 .. j1 - 1. Keys at or past band->keys do
 * not exist. */
FATTN_HD fattn_tile_kind fattn_band_tile(const fattn_band *band, int64_t i0, int64_t i1, int64_t j0,
                                         int64_t j1)
{
    const fattn_range top = fattn_band_row(band, i0), bottom = fattn_band_row(band, i1 - 1);
    if (top.first >= j1 || bottom.past <= j0 || top.first >= bottom.past) {
        return FATTN_TILE_EMPTY;
    }
    return bottom.first <= j0 && j1 <= top.past ? FATTN_TILE_FULL : FATTN_TILE_PARTIAL;
}

/* Whether all `width` keys of the tile that begins at key j0 < keys exist. Kernels count keys in 32
 * bits; j0 + width may be 2^31, which no int holds, so it is not computed. */
FATTN_HD int fattn_tile_is_whole(int32_t j0, int32_t width, int32_t keys)
{
    return keys - j0 >= width;
}

/* One head's block mask: the entry of pair (i, j) is
 * mask[(i / rows) * stride_i + (j / keys) * stride_j]. */
typedef struct fattn_block_mask {
    const uint8_t *mask;
    int64_t stride_i, stride_j;
    int64_t rows, keys; /* of a block */
} fattn_block_mask;

/* The kind of the tile of rows i0 .. i1 - 1 and keys j0 .. j1 - 1 under the block mask. i0 < i1,
 * j0 < j1, and all of these rows and keys exist. */
FATTN_HD fattn_tile_kind fattn_block_mask_tile(const fattn_block_mask *m, int64_t i0, int64_t i1,
                                               int64_t j0, int64_t j1)
{
    int kept = 0, dropped = 0;
    for (int64_t bi = i0 / m->rows; bi <= (i1 - 1) / m->rows; bi++) {
        for (int64_t bj = j0 / m->keys; bj <= (j1 - 1) / m->keys; bj++) {
            if (m->mask[bi * m->stride_i + bj * m->stride_j]) {
                kept = 1;
            } else {
                dropped = 1;
            }
        }
    }
    return !kept ? FATTN_TILE_EMPTY : dropped ? FATTN_TILE_PARTIAL : FATTN_TILE_FULL;
}

#endif
