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
    panel here;         /* all rows of the item, nothing but the rows */
    int64_t first, end; /* blocks of keys */
} prefetch_plan;

/* Turns to all rows of an item; false when there are none. */
static bool place_item(panel *pn, const fattn_cpu_run *run, int64_t item)
{
    const fattn_work work = fattn_schedule_item(run->tiling, run->problem->heads_k, item);
    pn->br = run->tiling->br;
    return panel_place(pn, run, work.batch, work.head, work.block * pn->br, false);
}

/* The last block fetches nothing: a diagonal may leave little of it. */
static void prefetch_plan_open(prefetch_plan *plan, const fattn_cpu_run *run, int64_t item,
                               const panel *pn, int64_t begin, int64_t end)
{
    plan->end = end - 1;
    plan->first = fattn_max64(begin, plan->end - PREFETCH_BLOCKS);
    plan->here = *pn;
    (void)place_item(&plan->here, run, item);
}

/* Lists the rows first .. past - 1 of a panel, those that it has, as they lie in q or o, n numbers
 * each. Returns how many. */
static int64_t list_rows(const panel *pn, int64_t first, int64_t past, const void *tensor,
                         fattn_dtype dtype, const fattn_strides *strides, int64_t n,
                         prefetch_row *rows)
{
    const int64_t begin = fattn_max64(0, first);
    const int64_t count = fattn_max64(0, fattn_min64(past, pn->rows) - begin);
    int64_t i = (pn->first + begin) / pn->group, g = (pn->first + begin) % pn->group;
    for (int64_t r = 0; r < count; r++) {
        rows[r].from = element(tensor, dtype, row_index(pn, strides, i, pn->hk * pn->group + g));
        rows[r].bytes = n * fattn_dtype_size(dtype);
        if (++g == pn->group) {
            g = 0;
            i++;
        }
    }
    return count;
}

/* Lists what part n of `parts` fetches; returns how many rows. Results come first, because who asks
 * late for the next item is seldom told a wrong one. */
static int64_t list_part(const prefetch_plan *plan, const fattn_cpu_run *run, int64_t n,
                         int64_t parts, prefetch_row *rows)
{
    const fattn_problem *const p = run->problem;
    const int64_t br = run->tiling->br, item = fattn_cpu_upcoming(run);
    const int64_t first = 2 * br * n / parts, past = 2 * br * (n + 1) / parts;
    panel next = plan->here;
    int64_t count =
        list_rows(&plan->here, first, past, run->buffers->o, p->dtype_o, &p->o, p->dim_v, rows);
    if (past > br && item < run->tiling->items && place_item(&next, run, item)) {
        count += list_rows(&next, first - br, past - br, run->buffers->q, p->dtype, &p->q, p->dim,
                           rows + count);
    }
    return count;
}

/* What the strips' products of keys fetch in a block. */
static void list_prefetches(forward *strips, int64_t count, const prefetch_plan *plan,
                            const fattn_cpu_run *run, int64_t block)
{
    const int64_t n = block - plan->first, parts = plan->end - plan->first;
    const int64_t tiles = count * strips->panel.bc / FV_NK;
    prefetch_row *const rows = strips->later;
    int64_t total = 0 <= n && n < parts ? list_part(plan, run, n, parts, rows) : 0;
    const int64_t step = (total + tiles - 1) / tiles;
    for (; total < tiles * step; total++) {
        rows[total].bytes = 0;
    }
    for (int64_t s = 0; s < count; s++) {
        strips[s].panel.later =
            (prefetch_list){.rows = rows, .next = s * (tiles / count) * step, .step = step};
    }
}
