/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What forward prefetches while it multiplies. A product with keys prefetches a few rows with each
 * of its register tiles (product.h); this header decides which rows. Otherwise a worker would wait
 * for memory at the end of an item, at the beginning of the next one and, where keys and values are
 * copied, before each tile of them. Rows to be copied are prefetched first, then copied a few at a
 * time between products (dots.h), into the tile that is not in use. Other keys and values, which
 * are read in place or copied just before their products, are prefetched one tile ahead, but only
 * if a single block of rows reads them: otherwise an earlier block has brought them into a cache.
 */
#ifndef FATTN_CPU_AHEAD_H
#define FATTN_CPU_AHEAD_H

#include "backends/cpu/parts.h"

/* In the PREFETCH_BLOCKS blocks of keys before its last one, an item prefetches the rows of o that
 * it will write, and the queries of the item that its thread probably gets next. Waiting for these
 * took 3 % of the time at N = 1024. */
#define PREFETCH_BLOCKS 4

typedef struct prefetch_plan {
    panel here;          /* placed on all rows of the item; has no scratch */
    int64_t first, last; /* blocks first .. last - 1 share these prefetches */
    int64_t end;         /* the item's blocks of keys end here */
    key_copies copies;   /* of keys and values of the next block */
    bool listed;         /* the rows of the next block are listed in `copies` */
    bool once;           /* this item alone reads its keys, so they are in no cache */
} prefetch_plan;

/* Whether a head has a single block of rows, and no converted tiles are cached. */
static bool reads_keys_once(const fattn_cpu_run *run, const panel *pn)
{
    return pn->seq.sq * pn->group <= run->tiling->br && !caches_tiles(pn->p, pn->bc);
}

/* Whether products take long enough to prefetch for an item whose keys are blocks begin .. end - 1:
 * with a single block of fewer keys, listing the rows takes as long as waiting for them. */
#define PREFETCH_KEYS 64
static bool prefetching_pays(const fattn_problem *p, int64_t begin, int64_t end)
{
    return end - begin > 1 || (end > begin && p->seqlen_k >= PREFETCH_KEYS);
}

/* The last block of keys prefetches nothing, since a diagonal may leave little of it, unless it is
 * the only one. The results of a part stay in the workspace and need no prefetch. */
static void prefetch_plan_open(prefetch_plan *plan, const fattn_cpu_run *run, int64_t item,
                               const panel *pn, int64_t begin, int64_t end)
{
    plan->end = end;
    plan->last = fattn_max64(end - 1, begin + 1);
    plan->first =
        run->tiling->splits > 1 ? plan->last : fattn_max64(begin, plan->last - PREFETCH_BLOCKS);
    plan->once = reads_keys_once(run, pn);
    plan->here = *pn;
    (void)place_item(&plan->here, run, item);
    plan->copies.count = plan->copies.done = 0;
    plan->listed = false;
}

/* Lists the rows that share n of `shares` prefetches. Returns how many. Results come first: the
 * later the queries of the next item are prefetched, the likelier it is that this worker gets that
 * item. */
static int64_t list_share(const prefetch_plan *plan, const fattn_cpu_run *run, int64_t n,
                          int64_t shares, prefetch_row *rows)
{
    const fattn_problem *const p = run->problem;
    const int64_t br = run->tiling->br, item = fattn_cpu_upcoming(run->items);
    const int64_t first = 2 * br * n / shares, past = 2 * br * (n + 1) / shares;
    panel next = plan->here;
    int64_t count =
        list_rows(&plan->here, first, past, run->buffers->o, p->dtype_o, &p->o, p->dim_v, rows);
    if (past > br && item < run->tiling->items && place_item(&next, run, item)) {
        count += list_rows(&next, first - br, past - br, run->buffers->q, p->dtype, &p->q, p->dim,
                           rows + count);
    }
    return count;
}

/* Lists those keys and values of the next block that are copied. Returns how many. */
static int64_t list_keys(prefetch_plan *plan, const panel *pn, span next, const key_tile *tile,
                         prefetch_row *rows)
{
    const fattn_problem *const p = pn->p;
    const fattn_buffers *const buf = pn->run->buffers;
    key_copies *const c = &plan->copies;
    *c = (key_copies){.rows = rows, .k = tile->k_copy, .v = tile->v_copy};
    plan->listed = next.live > 0;
    if (plan->listed) {
        c->keys = load_keys(pn, next, 0, buf->k, p->dtype_kv, &p->k, p->dim, c->k, pn->d_pad,
                            tile->k, rows);
        c->count = c->keys + load_keys(pn, next, 0, buf->v, p->dtype_v, &p->v, p->dim_v, c->v,
                                       pn->dv_pad, tile->v, rows + c->keys);
    }
    return c->count;
}

/* Lists the rows of k or v of a tile of keys, where they lie. Returns how many. */
static int64_t list_tile(const panel *pn, span s, const void *tensor, fattn_dtype dtype,
                         const fattn_strides *strides, int64_t dim, prefetch_row *rows)
{
    const bool paged = pn->p->features & FATTN_PAGED;
    const int64_t bytes = dim * fattn_dtype_size(dtype);
    const int64_t step = strides->seq * fattn_dtype_size(dtype);
    const char *from = element(tensor, dtype, key_index(pn, strides, s.first));
    for (int64_t j = 0; j < s.live; j++, from += step) {
        if (paged) {
            from = element(tensor, dtype, key_index(pn, strides, s.first + j));
        }
        rows[j] = (prefetch_row){.from = from, .bytes = bytes_in_lines(from, bytes)};
    }
    return s.live;
}

/* Makes the strips use the tile of a block, and finishes its copies. Returns whether its keys are
 * in it. */
static bool take_tile(prefetch_plan *plan, forward *strips, int64_t count, int64_t block)
{
    copy_keys_to(&strips->panel, &plan->copies, plan->copies.count);
    use_tile(strips, count, strips->tiles[block % 2]);
    return plan->listed;
}

/* Begins a block of keys: takes its tile, and lists the rows that the strips prefetch, and copy for
 * the next block, during their products with keys. Returns whether the tile already holds its keys
 * and values. */
static bool begin_block(prefetch_plan *plan, forward *strips, int64_t count,
                        const fattn_cpu_run *run, int64_t block)
{
    const bool loaded = take_tile(plan, strips, count, block);
    const panel *const pn = &strips->panel;
    const int64_t n = block - plan->first, shares = plan->last - plan->first;
    const int64_t tiles = count * pn->bc / FV_NK;
    prefetch_row *const rows = strips->later;
    const bool copies = copies_meanwhile(pn->p, pn->bc) && !keys_in_place(pn->p);
    span spans[STRIPS], next = {.live = 0}, none = {.live = 0};
    if (block + 1 < plan->end && (copies || plan->once)) {
        next = spans_of(strips, count, block + 1, spans);
    }
    int64_t total =
        list_keys(plan, pn, copies ? next : none, &strips->tiles[(block + 1) % 2], rows);
    if (next.live > 0 && !copies) {
        const fattn_problem *const p = pn->p;
        const fattn_buffers *const buf = pn->run->buffers;
        total = list_tile(pn, next, buf->k, p->dtype_kv, &p->k, p->dim, rows);
        total += list_tile(pn, next, buf->v, p->dtype_v, &p->v, p->dim_v, rows + total);
    }
    if (0 <= n && n < shares) {
        total += list_share(plan, run, n, shares, rows + total);
    }
    prefetch_list later = spread_rows(rows, total, tiles);
    for (int64_t s = 0; s < count; s++) {
        strips[s].panel.next_tile = plan->copies.count ? &plan->copies : NULL;
        strips[s].panel.later = later;
        later.next += tiles / count * later.step;
    }
    return loaded;
}

#endif
