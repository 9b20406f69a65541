/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner's half of the I/O model: all sequences are taken to have the mean length, and sums
 * over blocks have a closed form.
 */
#include <math.h>

#include "core/band.h"
#include "core/integer.h"
#include "core/io_counts.h"
#include "core/problem.h"

/* Lengths of the mean sequence, and its window: row i attends to the keys i + low .. i + high, and
 * the rows j - high .. j - low attend to key j. Positions are known only when a plan runs; here the
 * last row is taken to be aligned with the last key, as when tokens are generated. */
typedef struct extent {
    double batch, n, k;
    double low, high; /* infinite where unbounded */
} extent;

static double mean_length(int64_t longest, int64_t total, int64_t batch, bool packed)
{
    if (!packed || batch == 0) {
        return (double)longest;
    }
    return (double)fattn_min64(longest, fattn_ceil_div(total, batch));
}

static extent extent_of(const fattn_problem *p)
{
    extent e = {.batch = (double)p->batch};
    e.n = mean_length(p->seqlen_q, p->total_q, p->batch, p->features & FATTN_CU_SEQLENS_Q);
    e.k = mean_length(p->seqlen_k, p->total_k, p->batch,
                      (p->features & FATTN_CU_SEQLENS_K) && !(p->features & FATTN_PAGED));
    const bool at_end = p->anchor == FATTN_BOTTOM_RIGHT || p->features & FATTN_POSITIONS;
    const double diagonal = at_end ? e.k - e.n : 0;
    const fattn_reach reach = fattn_band_reach(p);
    e.low = reach.left < 0 ? -(double)INFINITY : diagonal - (double)reach.left;
    e.high = reach.right < 0 ? (double)INFINITY : diagonal + (double)reach.right;
    return e;
}

static double clip(double x, double limit) { return x > 0 ? (x < limit ? x : limit) : 0; }

/* Sum over t = 0 .. count - 1 of start + t step, each cut to 0 .. limit. step > 0; start may be
 * infinite. */
static double sum_clipped(double start, double step, double count, double limit)
{
    const double below = clip(floor(-start / step) + 1, count); /* terms that are at most 0 */
    const double above = fmax(below, clip(ceil((limit - start) / step), count)); /* below limit */
    const double inside = above - below;
    const double linear = inside > 0 ? inside * (start + step * (below + above - 1) / 2) : 0;
    return linear + (count - above) * limit;
}

static double ceil_to(double x, double unit) { return ceil(x / unit) * unit; }

/* The mean over t of what rounding x = start + t step up to a multiple of `unit` adds. Modulo unit
 * the x are spread evenly over the residues start + n gcd(step, unit); if step is a multiple of
 * unit they all have the same residue. */
static double mean_excess(double start, double step, double unit)
{
    double a = step, g = unit;
    if (!isfinite(start)) {
        return 0;
    }
    if (floor(step) != step) {
        return (unit - 1) / 2; /* packed blocks begin between positions */
    }
    while (a > 0) {
        const double rest = fmod(g, a);
        g = a;
        a = rest;
    }
    return ceil_to(start, g) - start + (unit - g) / 2;
}

/*
 * The `outer` positions are cut into blocks of `step`; position x needs the `inner` positions
 * x + low .. x + high. Returns the sum over blocks of the inner positions that a block needs, in
 * whole tiles of `unit`: a range is extended down and up to multiples of unit. Exact if step is a
 * multiple of unit.
 */
static double sum_of_spans(double outer, double step, double inner, double low, double high,
                           double unit)
{
    const double full = floor(outer / step), rest = outer - full * step;
    const double blocks = rest > 0 ? full + 1 : full;
    const double end = step + high;
    double ends = sum_clipped(end + mean_excess(end, step, unit), step, full, inner);
    if (rest > 0) {
        ends += isfinite(high) ? clip(ceil_to(outer + high, unit), inner) : inner;
    }

    /* Blocks whose range begins past the last position need nothing: rounding down must not give
     * them the last tile. */
    const double seeing = clip(ceil((inner - low) / step), blocks);
    const double begin = low - mean_excess(-low, step, unit);
    const double begins = sum_clipped(begin, step, seeing, inner) + (blocks - seeing) * inner;
    return ends - begins;
}

static double kept_pairs(const extent *e)
{
    return sum_of_spans(e->n, 1, e->k, e->low, e->high, 1);
}

/* A head of the mean sequence, without its visits. */
static fattn_io_head mean_head(const fattn_problem *p, const extent *e, fattn_io_schedule schedule,
                               fattn_io_counts *counts)
{
    fattn_io_head a = {.p = p, .schedule = schedule, .counts = counts, .first = true};
    a.n = e->n;
    a.k = a.slot_k = e->k;
    a.d = (double)p->dim;
    a.dv = (double)p->dim_v;
    if (p->features & FATTN_BLOCK_MASK) {
        a.v.entries = ceil(e->n / (double)p->block_m) * ceil(e->k / (double)p->block_n);
    }
    return a;
}

/* The visits of a head: blocks of `rows` rows go over tiles of `keys` keys, in backward the other
 * way round. */
static void mean_visits(fattn_io_visits *v, const extent *e, bool forward, double rows, double keys)
{
    if (e->n == 0 || e->k == 0) {
        return;
    }
    const double seen = forward ? sum_of_spans(e->n, rows, e->k, e->low, e->high, keys)
                                : sum_of_spans(e->k, keys, e->n, -e->high, -e->low, rows);
    const double outer = forward ? e->n : e->k, step = forward ? rows : keys;
    v->pairs = outer * seen / ceil(outer / step); /* as if all blocks had the mean number of keys */
    v->rows = forward ? v->pairs / keys : seen;
    v->keys = forward ? seen : v->pairs / rows;
    v->tiles = seen / (forward ? keys : rows);
}

static void scale_counts(fattn_io_counts *counts, double factor)
{
    for (int t = 0; t < FATTN_IO_TENSORS; t++) {
        counts->tensor[t].reads *= factor;
        counts->tensor[t].writes *= factor;
    }
}

double fattn_io_plan_bytes(const fattn_problem *p, int64_t br, int64_t bc, bool packs_groups)
{
    const extent e = extent_of(p);
    const double heads_q = (double)p->heads_q, heads_k = (double)p->heads_k;
    const double group = (double)fattn_max64(fattn_problem_group(p), 1); /* 0: no query heads */
    fattn_io_counts of_queries = {0}, of_keys = {0};
    fattn_io_head a = mean_head(p, &e, FATTN_IO_FLASH2, &of_queries);
    if (p->op == FATTN_FORWARD) {
        /* A packed block holds br / G positions of all G heads. */
        mean_visits(&a.v, &e, true, (double)br / (packs_groups ? group : 1), (double)bc);
        fattn_io_count_queries(&a);
        if (packs_groups) {
            of_queries.tensor[FATTN_IO_K].reads /= group;
            of_queries.tensor[FATTN_IO_V].reads /= group;
        }
    } else {
        mean_visits(&a.v, &e, false, (double)br, (double)bc);
        fattn_io_count_queries(&a);
        a.counts = &of_keys;
        fattn_io_count_keys(&a);
    }
    scale_counts(&of_queries, e.batch * heads_q);
    scale_counts(&of_keys, e.batch * heads_k);
    return fattn_io_counts_bytes(p, &of_queries) + fattn_io_counts_bytes(p, &of_keys);
}

double fattn_io_standard_bytes(const fattn_problem *p)
{
    const extent e = extent_of(p);
    const double first = (double)p->heads_k, others = (double)p->heads_q - first;
    double bytes = 0;
    /* Heads differ in whether they are the first of their group. */
    for (int h = 0; h < 2 && p->heads_q > 0; h++) {
        fattn_io_counts counts = {0};
        fattn_io_head a = mean_head(p, &e, FATTN_IO_STANDARD, &counts);
        a.first = h == 0;
        a.v.tiles = 1, a.v.rows = e.n, a.v.keys = e.k, a.v.pairs = e.n * e.k;
        fattn_io_count_queries(&a);
        bytes += (h == 0 ? first : others) * fattn_io_counts_bytes(p, &counts);
    }
    return e.batch * bytes;
}

/* --- Lower bound ------------------------------------------------------------------------------ */

static void reads(fattn_io_counts *counts, fattn_io_tensor tensor, double elements)
{
    counts->tensor[tensor].reads += elements;
}

static void writes(fattn_io_counts *counts, fattn_io_tensor tensor, double elements)
{
    counts->tensor[tensor].writes += elements;
}

/* The number of distinct (batch entry, head) slices of a tensor: a broadcast axis counts as 1. */
static double copies(const fattn_problem *p, int64_t stride_batch, bool packed, int64_t heads,
                     int64_t stride_head)
{
    const double batches = stride_batch != 0 || packed ? (double)p->batch : p->batch > 0;
    return batches * (stride_head != 0 ? (double)heads : heads > 0);
}

static double row_copies(const fattn_problem *p, const fattn_strides *stride)
{
    return copies(p, stride->batch, p->features & FATTN_CU_SEQLENS_Q, p->heads_q, stride->head);
}

/* Distinct keys of all sequences if `seen` keys of each are read; pages may be shared. */
static double distinct_keys(const fattn_problem *p, const fattn_strides *stride, double seen)
{
    if (p->features & FATTN_PAGED) {
        const double slots = (double)p->num_pages * (double)p->page_size;
        return fmin(slots, seen * (double)p->batch) *
               (stride->head != 0 ? (double)p->heads_k : p->heads_k > 0);
    }
    return seen *
           copies(p, stride->batch, p->features & FATTN_CU_SEQLENS_K, p->heads_k, stride->head);
}

static double own(double length, int64_t stride) { return stride != 0 ? length : length > 0; }

static void bound_inputs(const fattn_problem *p, const extent *e, fattn_io_counts *counts)
{
    const double d = (double)p->dim, dv = (double)p->dim_v;
    /* The rows that attend to any key, and the keys that any row attends to. */
    const double rows = e->k > 0 ? sum_of_spans(e->k, e->k, e->n, -e->high, -e->low, 1) : 0;
    const double keys = e->n > 0 ? sum_of_spans(e->n, e->n, e->k, e->low, e->high, 1) : 0;
    const fattn_io_visits seen = {rows > 0 && keys > 0, rows, keys, kept_pairs(e), 0};
    reads(counts, FATTN_IO_Q, own(rows, p->q.seq) * row_copies(p, &p->q) * d);
    reads(counts, FATTN_IO_K, distinct_keys(p, &p->k, own(keys, p->k.seq)) * d);
    reads(counts, FATTN_IO_V, distinct_keys(p, &p->v, own(keys, p->v.seq)) * dv);
    if (p->features & FATTN_BIAS) {
        reads(counts, FATTN_IO_BIAS,
              fattn_io_entries(&seen, p->bias_stride) *
                  copies(p, p->bias_stride[0], false, p->heads_q, p->bias_stride[1]));
    }
    if (p->features & FATTN_MASK) {
        reads(counts, FATTN_IO_MASK,
              fattn_io_entries(&seen, p->mask_stride) *
                  copies(p, p->mask_stride[0], false, p->heads_q, p->mask_stride[1]));
    }
    if (p->op == FATTN_FORWARD) {
        return;
    }
    const double statistics = rows * e->batch * (double)p->heads_q;
    reads(counts, FATTN_IO_O, own(rows, p->o.seq) * row_copies(p, &p->o) * dv);
    reads(counts, FATTN_IO_DOUT, own(rows, p->dout.seq) * row_copies(p, &p->dout) * dv);
    reads(counts, FATTN_IO_LSE, statistics);
    if (p->features & FATTN_DLSE) {
        reads(counts, FATTN_IO_DLSE, statistics);
    }
}

/* An output is written; with FATTN_ACCUMULATE a gradient is read too. */
static void bound_output(const fattn_problem *p, fattn_io_counts *counts, uint32_t output,
                         fattn_io_tensor tensor, double elements)
{
    if (!(p->outputs & output)) {
        return;
    }
    writes(counts, tensor, elements);
    if (p->features & FATTN_ACCUMULATE) {
        reads(counts, tensor, elements);
    }
}

double fattn_io_lower_bound_bytes(const fattn_problem *p)
{
    const extent e = extent_of(p);
    const double rows = e.batch * (double)p->heads_q * e.n;
    const double keys = e.batch * (double)p->heads_k * e.k;
    fattn_io_counts counts = {0};
    const double d = (double)p->dim, dv = (double)p->dim_v;
    bound_inputs(p, &e, &counts);
    bound_output(p, &counts, FATTN_OUT_O, FATTN_IO_O, rows * dv);
    bound_output(p, &counts, FATTN_OUT_LSE, FATTN_IO_LSE, rows);
    bound_output(p, &counts, FATTN_OUT_DQ, FATTN_IO_DQ, rows * d);
    bound_output(p, &counts, FATTN_OUT_DK, FATTN_IO_DK, keys * d);
    bound_output(p, &counts, FATTN_OUT_DV, FATTN_IO_DV, keys * dv);
    bound_output(p, &counts, FATTN_OUT_DBIAS, FATTN_IO_DBIAS, fattn_io_dbias_elements(p));
    return fattn_io_counts_bytes(p, &counts);
}

/* Products over D and Dv: forward S = QK^T and O = PV; backward S again, dP = dO V^T, dV, dQ,
 * dK. */
double fattn_io_flops(const fattn_problem *p)
{
    const extent e = extent_of(p);
    const double d = (double)p->dim, dv = (double)p->dim_v;
    const uint32_t need_dp = ~(uint32_t)FATTN_OUT_DV;
    double a_pair = d + dv;
    if (p->op == FATTN_BACKWARD) {
        a_pair = d;
        if (p->outputs & need_dp) {
            a_pair += dv;
        }
        if (p->outputs & FATTN_OUT_DV) {
            a_pair += dv;
        }
        if (p->outputs & FATTN_OUT_DQ) {
            a_pair += d;
        }
        if (p->outputs & FATTN_OUT_DK) {
            a_pair += d;
        }
    }
    return 2 * a_pair * kept_pairs(&e) * e.batch * (double)p->heads_q;
}
