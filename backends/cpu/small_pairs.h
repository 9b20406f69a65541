/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of bf16 pairs for problems with few keys, in vectors of more than four lanes: keys are
 * arranged in blocks of lanes, and queries are read row by row.
 */
#ifndef FATTN_CPU_SMALL_PAIRS_H
#define FATTN_CPU_SMALL_PAIRS_H

#include "backends/cpu/pairs.h"
#include "backends/cpu/strip.h"

#if FV_LANES > 4

#define BLOCK_PAIRS 4                        /* pairs of a key in a block of lanes */
#define VECTOR_KEYS (FV_LANES / BLOCK_PAIRS) /* keys that share a vector */
#define BLOCK_BYTES (BLOCK_PAIRS * sizeof(bf16_pair))
#define KEY_VECTORS 4 /* the most vectors of keys in a tile of products */

/* Copies the keys of a tile to pn->k_copy in blocks: [vectors of keys][dim / 8][VECTOR_KEYS].
 * copied: how many keys are there already. If these are not all, all are copied again. */
static void load_blocked_keys(const panel *pn, span s, int64_t copied)
{
    const fattn_problem *const p = pn->p;
    const int64_t steps = p->dim / (2 * BLOCK_PAIRS);
    const int64_t keys = (s.live + VECTOR_KEYS - 1) / VECTOR_KEYS * VECTOR_KEYS;
    for (int64_t j = 0; j < keys && copied < s.live; j++) {
        wide_row room;
        const char *from = (const char *)pn->zeros;
        char *to = (char *)(pn->k_copy + j / VECTOR_KEYS * steps * FV_LANES);
        if (j < s.live) {
            from = row_of_key(pn, s, pn->run->buffers->k, p->dtype_kv, &p->k, p->dim, j, &room);
        }
        to += j % VECTOR_KEYS * (int64_t)BLOCK_BYTES;
        for (int64_t c = 0; c < steps; c++, from += BLOCK_BYTES, to += sizeof(pv)) {
            memcpy(to, from, BLOCK_BYTES);
        }
    }
}

/* x[j][r] = k[j] . q[r] for nv vectors of keys and nr queries, literals. q: rows `step` bytes
 * apart; k: blocks; x: [nv * VECTOR_KEYS][x_stride] */
INLINE void dot_key_tile(int nv, int nr, const char *q, int64_t step, const float *k, int64_t steps,
                         float *x, int64_t x_stride)
{
    const int half = nr / 2;
    const char *low = q, *high = q + half * step;
    fv sum[KEY_VECTORS][8];
    for (int v = 0; v < nv; v++) {
        for (int r = 0; r < nr; r++) {
            sum[v][r] = fv_set1(0);
        }
    }
    for (int64_t c = 0; c < steps; c++, low += BLOCK_BYTES, high += BLOCK_BYTES) {
        pv keys[KEY_VECTORS];
        keep_pointers(&low, &high);
        for (int v = 0; v < nv; v++) {
            keys[v] = pv_load(k + (v * steps + c) * FV_LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < nr; r++) {
            const pv query = pv_load_four((r < half ? low : high) + r % half * step);
            for (int v = 0; v < nv; v++) {
                sum[v][r] = fv_muladd_pairs(keys[v], query, sum[v][r]);
            }
        }
    }
    for (int v = 0; v < nv; v++) {
        for (int r = 0; r < nr; r += 4) {
            fv_store_blocks(x + v * VECTOR_KEYS * x_stride + r, x_stride,
                            fv_block_sums(sum[v] + r));
        }
    }
}

/* The same for FV_LANES queries and any number of vectors of keys. */
APART void dot_key_blocks(int64_t vectors, const char *q, int64_t step, const float *k,
                          int64_t steps, float *x, int64_t x_stride)
{
    for (int64_t v = 0; v < vectors; v += KEY_VECTORS) {
        const float *const keys = k + v * steps * FV_LANES;
        float *const to = x + v * VECTOR_KEYS * x_stride;
#define QUERIES(nv, nr)                                                          \
    for (int64_t r = 0; r < FV_LANES; r += (nr)) {                               \
        dot_key_tile(nv, nr, q + r * step, step, keys, steps, to + r, x_stride); \
    }
        switch (vectors - v) {
        case 1: QUERIES(1, 8) break;
        case 2: QUERIES(2, 8) break;
        case 3: QUERIES(3, 8) break;
        default: QUERIES(4, 4) break;
        }
#undef QUERIES
    }
}

/* pairs_scores() with keys in blocks. */
static void multiply_blocked_keys(const forward *f, span s)
{
    const panel *const pn = &f->panel;
    const fattn_problem *const p = pn->p;
    const int64_t vectors = (s.live + VECTOR_KEYS - 1) / VECTOR_KEYS;
    const int64_t keys = vectors * VECTOR_KEYS;
    for (int64_t r = 0; r < pn->width; r += FV_LANES) {
        int64_t stride;
        const char *const q = pairs_of_queries(pn, r, p->q.seq % 2048 != 0, &stride);
        dot_key_blocks(vectors, q, stride * (int64_t)sizeof(bf16_pair), pn->k_copy,
                       p->dim / (2 * BLOCK_PAIRS), pn->x + r, pn->br);
    }
    fill(pn->x + keys * pn->br, (s.padded - keys) * pn->br, 0);
}

/* The most keys for which arranging keys costs less than transposing queries, if there are enough
 * queries. */
#define BLOCKED_KEYS 32

/* choose_small_form() for pairs. The choice is the same for all rows of a sequence, since copies of
 * keys may be cached. */
static const query_form *choose_small_pairs_form(const panel *pn)
{
    static const query_form blocked_keys = {.load_keys = load_blocked_keys,
                                            .multiply = multiply_blocked_keys};
    const fattn_problem *const p = pn->p;
    const int64_t keys = pn->seq.sk, queries = pn->seq.sq * pn->group;
    const bool few = keys <= BLOCKED_KEYS && 2 * keys <= queries && FV_LANES < queries;
    const bool whole = p->dim % (2 * BLOCK_PAIRS) == 0;
    return few && whole && !(p->features & FATTN_BATCH_INVARIANT) ? &blocked_keys : NULL;
}

#endif

#endif
