/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What forward fetches while it multiplies: a product of keys asks for a few rows with each of its
 * register tiles (product.inl), and here is decided which. Memory that nobody has asked for would
 * be waited for at the end of an item and at the beginning of the next.
 */

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
