/* SPDX-License-Identifier: Apache-2.0 */
#include "core/io_model.h"

#include <math.h>

#include "core/band.h"
#include "core/dtype.h"
#include "core/problem.h"

/* -------------------------------------------------------------------------------------------------
 * Names and sizes
 * ---------------------------------------------------------------------------------------------- */

const char *fattn_io_tensor_name(fattn_io_tensor tensor)
{
    static const char *const names[FATTN_IO_TENSORS] = {
        [FATTN_IO_Q] = "q",
        [FATTN_IO_K] = "k",
        [FATTN_IO_V] = "v",
        [FATTN_IO_O] = "o",
        [FATTN_IO_L] = "l",
        [FATTN_IO_M] = "m",
        [FATTN_IO_LSE] = "lse",
        [FATTN_IO_DELTA] = "delta",
        [FATTN_IO_DOUT] = "dout",
        [FATTN_IO_DLSE] = "dlse",
        [FATTN_IO_DQ] = "dq",
        [FATTN_IO_DK] = "dk",
        [FATTN_IO_DV] = "dv",
        [FATTN_IO_BIAS] = "bias",
        [FATTN_IO_DBIAS] = "dbias",
        [FATTN_IO_MASK] = "mask",
        [FATTN_IO_BLOCK_MASK] = "block_mask",
        [FATTN_IO_S] = "S",
        [FATTN_IO_C] = "C",
        [FATTN_IO_P] = "P",
        [FATTN_IO_Z] = "Z",
        [FATTN_IO_R] = "R",
        [FATTN_IO_DP] = "dP",
        [FATTN_IO_DS] = "dS",
    };
    return names[tensor];
}

const char *fattn_io_schedule_name(fattn_io_schedule schedule)
{
    static const char *const names[FATTN_IO_SCHEDULES] = {
        [FATTN_IO_STANDARD] = "standard",
        [FATTN_IO_FLASH1] = "flash1",
        [FATTN_IO_FLASH2] = "flash2",
    };
    return names[schedule];
}

fattn_io fattn_io_total(const fattn_io_counts *counts)
{
    fattn_io total = {0, 0};
    for (int t = 0; t < FATTN_IO_TENSORS; t++) {
        total.reads += counts->tensor[t].reads;
        total.writes += counts->tensor[t].writes;
    }
    return total;
}

double fattn_io_element_bytes(const fattn_problem *p, fattn_io_tensor tensor)
{
    switch (tensor) {
    case FATTN_IO_O:
    case FATTN_IO_DOUT: return (double)fattn_dtype_size(p->dtype_o);
    case FATTN_IO_L:
    case FATTN_IO_M:
    case FATTN_IO_LSE:
    case FATTN_IO_DELTA:
    case FATTN_IO_DLSE:
    case FATTN_IO_DBIAS: return (double)fattn_dtype_size(fattn_statistics_dtype(p));
    case FATTN_IO_K: return (double)fattn_dtype_size(p->dtype_kv);
    case FATTN_IO_V: return (double)fattn_dtype_size(p->dtype_v);
    case FATTN_IO_DQ: return (double)fattn_dtype_size(fattn_gradient_dtype(p, p->dtype));
    case FATTN_IO_DK: return (double)fattn_dtype_size(fattn_gradient_dtype(p, p->dtype_kv));
    case FATTN_IO_DV: return (double)fattn_dtype_size(fattn_gradient_dtype(p, p->dtype_v));
    case FATTN_IO_BIAS: return (double)fattn_dtype_size(p->dtype_bias);
    case FATTN_IO_MASK:
    case FATTN_IO_BLOCK_MASK:
    case FATTN_IO_Z: return 1;
    default: return (double)fattn_dtype_size(p->dtype);
    }
}

double fattn_io_counts_bytes(const fattn_problem *problem, const fattn_io_counts *counts)
{
    double bytes = 0;
    for (int t = 0; t < FATTN_IO_TENSORS; t++) {
        const double size = fattn_io_element_bytes(problem, (fattn_io_tensor)t);
        bytes += size * (counts->tensor[t].reads + counts->tensor[t].writes);
    }
    return bytes;
}

fattn_tile fattn_io_paper_tile(const fattn_problem *problem, int64_t fast_elements)
{
    const int64_t d = fattn_ceil_div(problem->dim + problem->dim_v, 2);
    const int64_t bc = fattn_max64(1, fattn_ceil_div(fast_elements, 4 * d));
    return (fattn_tile){fattn_min64(bc, d), bc};
}

/* -------------------------------------------------------------------------------------------------
 * Counts of a head, for its n rows and k keys
 * ---------------------------------------------------------------------------------------------- */

/* Tiles that are visited, the sums over them of their rows, keys and pairs, and the entries of the
 * block mask that were read to decide. */
typedef struct visits {
    double tiles, rows, keys, pairs, entries;
} visits;

typedef struct head {
    const fattn_problem *p;
    const fattn_buffers *buf;
    fattn_io_schedule schedule;
    fattn_tile tile;
    int64_t b, h;
    fattn_sequence seq;
    double n, k, d, dv;
    visits v;
    fattn_io_counts *counts;
} head;

static bool wants(const head *a, uint32_t output) { return (a->p->outputs & output) != 0; }

static bool has(const head *a, uint64_t feature) { return (a->p->features & feature) != 0; }

static void reads(head *a, fattn_io_tensor tensor, double elements)
{
    a->counts->tensor[tensor].reads += elements;
}

static void writes(head *a, fattn_io_tensor tensor, double elements)
{
    a->counts->tensor[tensor].writes += elements;
}

/* --- Which tiles ------------------------------------------------------------------------------ */

/* Blocks of the mask that first .. first + count, in steps of one entry, touch. */
static double blocks_touched(int64_t first, int64_t count, int64_t block, int64_t stride)
{
    return stride == 0 ? 1 : (double)((first + count - 1) / block - first / block + 1);
}

static bool block_mask_sees(const head *a, int64_t i, int64_t rows, int64_t j, int64_t keys)
{
    const fattn_problem *const p = a->p;
    const int64_t *const stride = p->block_mask_stride;
    const uint8_t *const mask = a->buf->block_mask + a->b * stride[0] + a->h * stride[1];
    for (int64_t bi = i / p->block_m; bi <= (i + rows - 1) / p->block_m; bi++) {
        for (int64_t bj = j / p->block_n; bj <= (j + keys - 1) / p->block_n; bj++) {
            if (mask[bi * stride[2] + bj * stride[3]] != 0) return true;
        }
    }
    return false;
}

/* Adds the tiles of rows i .. i + rows that contain any of the keys first .. end. */
static void visit_row_block(head *a, int64_t i, int64_t rows, int64_t first, int64_t end)
{
    const int64_t bc = a->tile.bc;
    if (first >= end) return;
    if (!has(a, FATTN_BLOCK_MASK)) {
        const int64_t from = first / bc * bc,
                      to = fattn_min64(a->seq.sk, fattn_ceil_div(end, bc) * bc);
        const double tiles = (double)fattn_ceil_div(to - from, bc);
        a->v.tiles += tiles;
        a->v.rows += tiles * (double)rows;
        a->v.keys += (double)(to - from);
        a->v.pairs += (double)rows * (double)(to - from);
        return;
    }
    for (int64_t j = first / bc * bc; j < end; j += bc) {
        const int64_t keys = fattn_min64(bc, a->seq.sk - j);
        a->v.entries += blocks_touched(i, rows, a->p->block_m, a->p->block_mask_stride[2]) *
                        blocks_touched(j, keys, a->p->block_n, a->p->block_mask_stride[3]);
        if (!block_mask_sees(a, i, rows, j, keys)) continue;
        a->v.tiles += 1;
        a->v.rows += (double)rows;
        a->v.keys += (double)keys;
        a->v.pairs += (double)rows * (double)keys;
    }
}

static visits visits_of(head *a)
{
    const bool skips = a->schedule == FATTN_IO_FLASH2;
    const bool dense = !has(a, FATTN_BLOCK_MASK) && (!skips || !fattn_is_banded(a->p));
    const fattn_band band = fattn_band_of(a->p, &a->seq);
    a->v = (visits){0, 0, 0, 0, 0};
    if (dense) {
        const double tr = (double)fattn_ceil_div(a->seq.sq, a->tile.br);
        const double tc = (double)fattn_ceil_div(a->seq.sk, a->tile.bc);
        return (visits){tr * tc, tc * a->n, tr * a->k, a->n * a->k, 0};
    }
    for (int64_t i = 0; i < a->seq.sq; i += a->tile.br) {
        const int64_t rows = fattn_min64(a->tile.br, a->seq.sq - i);
        const fattn_range keys = fattn_band_rows(&band, i, i + rows);
        visit_row_block(a, i, rows, skips ? keys.first : 0, skips ? keys.past : a->seq.sk);
    }
    return a->v;
}

/* Entries that the visited tiles have in a tensor over pairs: a broadcast axis has one a tile. */
static double entries(const visits *v, const int64_t stride[4])
{
    if (stride[2] != 0) return stride[3] != 0 ? v->pairs : v->rows;
    return stride[3] != 0 ? v->keys : v->tiles;
}

static void score_counts(head *a)
{
    if (has(a, FATTN_BIAS)) reads(a, FATTN_IO_BIAS, entries(&a->v, a->p->bias_stride));
    if (has(a, FATTN_MASK)) reads(a, FATTN_IO_MASK, entries(&a->v, a->p->mask_stride));
    reads(a, FATTN_IO_BLOCK_MASK, a->v.entries);
}

static void dbias_counts(head *a)
{
    if (!wants(a, FATTN_OUT_DBIAS)) return;
    reads(a, FATTN_IO_DBIAS, entries(&a->v, a->p->dbias_stride));
    writes(a, FATTN_IO_DBIAS, entries(&a->v, a->p->dbias_stride));
}

/* --- FlashAttention --------------------------------------------------------------------------- */

/* O is initialised, and read and written again at each of the Tc key blocks; with l, m and Q that
 * is Tc (3 N d + 4 N) beside K, V and the first 3 N d. */
static void flash1_forward(head *a)
{
    score_counts(a);
    reads(a, FATTN_IO_K, a->k * a->d);
    reads(a, FATTN_IO_V, a->k * a->dv);
    reads(a, FATTN_IO_Q, a->v.rows * a->d);
    reads(a, FATTN_IO_O, a->v.rows * a->dv);
    reads(a, FATTN_IO_L, a->v.rows);
    reads(a, FATTN_IO_M, a->v.rows);
    writes(a, FATTN_IO_O, (a->n + a->v.rows) * a->dv);
    writes(a, FATTN_IO_L, a->n + a->v.rows);
    writes(a, FATTN_IO_M, a->n + a->v.rows);
}

/* What a query head adds to backward beside the tensors of its kv head, key_counts(). */
static void flash1_backward(head *a)
{
    const double sink = wants(a, FATTN_OUT_DSINK) ? a->n : 0, rows = a->v.rows + sink;
    score_counts(a);
    dbias_counts(a);
    reads(a, FATTN_IO_Q, a->v.rows * a->d);
    reads(a, FATTN_IO_O, rows * a->dv);
    reads(a, FATTN_IO_DOUT, rows * a->dv);
    reads(a, FATTN_IO_L, rows);
    reads(a, FATTN_IO_M, rows);
    if (has(a, FATTN_DLSE)) reads(a, FATTN_IO_DLSE, rows);
    if (!wants(a, FATTN_OUT_DQ)) return;
    reads(a, FATTN_IO_DQ, a->v.rows * a->d);
    writes(a, FATTN_IO_DQ, (a->n + a->v.rows) * a->d);
}

/* --- FlashAttention-2 ------------------------------------------------------------------------- */

static void flash2_forward(head *a)
{
    score_counts(a);
    reads(a, FATTN_IO_Q, a->n * a->d);
    reads(a, FATTN_IO_K, a->v.keys * a->d);
    reads(a, FATTN_IO_V, a->v.keys * a->dv);
    writes(a, FATTN_IO_O, a->n * a->dv);
    if (wants(a, FATTN_OUT_LSE)) writes(a, FATTN_IO_LSE, a->n);
}

static void flash2_backward(head *a)
{
    const double sink = wants(a, FATTN_OUT_DSINK) ? a->n : 0;
    score_counts(a);
    dbias_counts(a);
    reads(a, FATTN_IO_O, a->n * a->dv);
    reads(a, FATTN_IO_DOUT, (a->n + a->v.rows) * a->dv);
    if (has(a, FATTN_DLSE)) reads(a, FATTN_IO_DLSE, a->n);
    writes(a, FATTN_IO_DELTA, a->n);
    reads(a, FATTN_IO_Q, a->v.rows * a->d);
    reads(a, FATTN_IO_LSE, a->v.rows + sink);
    reads(a, FATTN_IO_DELTA, a->v.rows + sink);
    if (!wants(a, FATTN_OUT_DQ)) return;
    reads(a, FATTN_IO_DQ, a->v.rows * a->d);
    writes(a, FATTN_IO_DQ, (a->n + a->v.rows) * a->d);
}

/* K, V, dK and dV of a kv head. `cleared` keys of those it has room for are set to 0 beforehand. */
static void key_gradient(head *a, fattn_io_tensor tensor, double width)
{
    const double slot = (double)a->seq.slot_k;
    const double cleared = a->schedule == FATTN_IO_FLASH2 ? slot - a->k : slot;
    writes(a, tensor, a->k * width);
    if (has(a, FATTN_ACCUMULATE)) {
        reads(a, tensor, a->k * width);
    } else {
        writes(a, tensor, cleared * width);
    }
}

static void key_counts(head *a)
{
    reads(a, FATTN_IO_K, a->k * a->d);
    reads(a, FATTN_IO_V, a->k * a->dv);
    if (wants(a, FATTN_OUT_DK)) key_gradient(a, FATTN_IO_DK, a->d);
    if (wants(a, FATTN_OUT_DV)) key_gradient(a, FATTN_IO_DV, a->dv);
}

/* --- Standard attention ----------------------------------------------------------------------- */

/* Elementwise ops between the (capped) scores and softmax. */
static int score_ops(const fattn_problem *p)
{
    const bool masked = (p->features & (FATTN_MASK | FATTN_BLOCK_MASK)) != 0 || fattn_is_banded(p);
    return ((p->features & FATTN_BIAS) != 0) + ((p->features & FATTN_ALIBI) != 0) + masked;
}

/* Bias, mask and block mask are read, and dbias is written, in bands of br rows by all keys. */
static void standard_forward(head *a)
{
    const double nn = a->n * a->k, ops = score_ops(a->p);
    const bool capped = has(a, FATTN_SOFTCAP), drops = has(a, FATTN_DROPOUT);
    score_counts(a);
    reads(a, FATTN_IO_Q, a->n * a->d);
    reads(a, FATTN_IO_K, a->k * a->d);
    reads(a, FATTN_IO_V, a->k * a->dv);
    writes(a, FATTN_IO_O, a->n * a->dv);
    if (wants(a, FATTN_OUT_LSE)) writes(a, FATTN_IO_LSE, a->n);

    /* Each op reads what the one before wrote: the product S, the cap C, the others S again. */
    writes(a, FATTN_IO_S, nn * (1 + ops));
    reads(a, FATTN_IO_S, nn * (1 + ops));
    if (capped) writes(a, FATTN_IO_C, nn);
    if (capped) reads(a, FATTN_IO_C, nn);
    writes(a, FATTN_IO_P, nn);
    reads(a, FATTN_IO_P, nn); /* by dropout, or by P V */
    if (!drops) return;
    writes(a, FATTN_IO_Z, nn);
    writes(a, FATTN_IO_R, nn);
    reads(a, FATTN_IO_R, nn);
}

static void standard_key_gradient(head *a, fattn_io_tensor tensor, double elements)
{
    const bool first = a->h % fattn_problem_group(a->p) == 0;
    writes(a, tensor, elements);
    if (!first) reads(a, tensor, elements);
}

static void standard_backward(head *a)
{
    const double nn = a->n * a->k;
    const bool drops = has(a, FATTN_DROPOUT);
    if (wants(a, FATTN_OUT_DV)) {
        reads(a, drops ? FATTN_IO_R : FATTN_IO_P, nn);
        reads(a, FATTN_IO_DOUT, a->n * a->dv);
        standard_key_gradient(a, FATTN_IO_DV, a->k * a->dv);
    }
    if (!wants(a, FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DBIAS | FATTN_OUT_DSINK)) return;
    reads(a, FATTN_IO_DOUT, a->n * a->dv);
    reads(a, FATTN_IO_V, a->k * a->dv);
    writes(a, FATTN_IO_DP, drops ? 2 * nn : nn);
    reads(a, FATTN_IO_DP, drops ? 2 * nn : nn);
    if (drops) reads(a, FATTN_IO_Z, nn);
    reads(a, FATTN_IO_P, nn);
    writes(a, FATTN_IO_DS, nn);
    if (has(a, FATTN_DLSE)) reads(a, FATTN_IO_DLSE, a->n);
    if (wants(a, FATTN_OUT_DSINK)) reads(a, FATTN_IO_LSE, a->n);
    if (wants(a, FATTN_OUT_DBIAS)) reads(a, FATTN_IO_DS, nn);
    dbias_counts(a);
    if (has(a, FATTN_SOFTCAP) && wants(a, FATTN_OUT_DQ | FATTN_OUT_DK)) {
        reads(a, FATTN_IO_DS, nn);
        reads(a, FATTN_IO_C, nn);
        writes(a, FATTN_IO_DS, nn);
    }
    if (wants(a, FATTN_OUT_DQ)) {
        reads(a, FATTN_IO_DS, nn);
        reads(a, FATTN_IO_K, a->k * a->d);
        writes(a, FATTN_IO_DQ, a->n * a->d);
    }
    if (wants(a, FATTN_OUT_DK)) {
        reads(a, FATTN_IO_DS, nn);
        reads(a, FATTN_IO_Q, a->n * a->d);
        standard_key_gradient(a, FATTN_IO_DK, a->k * a->d);
    }
}

/* Keys past the used ones are set to 0, once a kv head. */
static void standard_key_counts(head *a)
{
    const double unused = has(a, FATTN_ACCUMULATE) ? 0 : (double)a->seq.slot_k - a->k;
    if (wants(a, FATTN_OUT_DK)) writes(a, FATTN_IO_DK, unused * a->d);
    if (wants(a, FATTN_OUT_DV)) writes(a, FATTN_IO_DV, unused * a->dv);
}

/* In standard attention a tile is br rows of all keys; the block mask is read for each. */
static visits standard_visits(const head *a)
{
    const fattn_problem *const p = a->p;
    const double bands = (double)fattn_ceil_div(a->seq.sq, a->tile.br);
    visits v = {bands, a->n, bands * a->k, a->n * a->k, 0};
    if (a->seq.sk == 0) return (visits){0, 0, 0, 0, 0};
    for (int64_t i = 0; i < a->seq.sq && has(a, FATTN_BLOCK_MASK) && p->op == FATTN_FORWARD;
         i += a->tile.br) {
        const int64_t rows = fattn_min64(a->tile.br, a->seq.sq - i);
        v.entries += blocks_touched(i, rows, p->block_m, p->block_mask_stride[2]) *
                     blocks_touched(0, a->seq.sk, p->block_n, p->block_mask_stride[3]);
    }
    return v;
}

/* -------------------------------------------------------------------------------------------------
 * Counts of a problem
 * ---------------------------------------------------------------------------------------------- */

typedef void (*part)(head *);

static const struct {
    part forward;                 /* of a query head */
    part backward, backward_keys; /* of a query head, and of a kv head */
} parts[FATTN_IO_SCHEDULES] = {
    [FATTN_IO_STANDARD] = {standard_forward, standard_backward, standard_key_counts},
    [FATTN_IO_FLASH1] = {flash1_forward, flash1_backward, key_counts},
    [FATTN_IO_FLASH2] = {flash2_forward, flash2_backward, key_counts},
};

/* dbias begins with 0, but for broadcast axes, which are single entries. */
static double dbias_elements(const fattn_problem *p)
{
    const int64_t pairs[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    double elements = 1;
    for (int axis = 0; axis < 4; axis++) {
        elements *= p->dbias_stride[axis] != 0 ? (double)pairs[axis] : 1;
    }
    return elements;
}

void fattn_io_predict(const fattn_problem *problem, const fattn_buffers *buffers,
                      fattn_io_schedule schedule, fattn_tile tile, fattn_io_counts *counts)
{
    *counts = (fattn_io_counts){0};
    head a = {.p = problem, .buf = buffers, .schedule = schedule, .tile = tile, .counts = counts};
    const bool backward = problem->op == FATTN_BACKWARD;
    const int64_t group = fattn_problem_group(problem);
    a.d = (double)problem->dim;
    a.dv = (double)problem->dim_v;
    if (wants(&a, FATTN_OUT_DBIAS) && !has(&a, FATTN_ACCUMULATE)) {
        writes(&a, FATTN_IO_DBIAS, dbias_elements(problem));
    }
    for (a.b = 0; a.b < problem->batch; a.b++) {
        a.seq = fattn_sequence_of(problem, buffers, a.b);
        a.n = (double)a.seq.sq;
        a.k = (double)a.seq.sk;
        for (a.h = 0; a.h < problem->heads_q; a.h++) {
            a.v = schedule == FATTN_IO_STANDARD ? standard_visits(&a) : visits_of(&a);
            (backward ? parts[schedule].backward : parts[schedule].forward)(&a);
            if (backward && a.h % group == 0) parts[schedule].backward_keys(&a);
        }
    }
}

/* -------------------------------------------------------------------------------------------------
 * Estimates for the planner: the same counts with sums over blocks in closed form
 * ---------------------------------------------------------------------------------------------- */

/* Lengths of the mean sequence, and the window around its diagonal: row i sees the keys
 * i + low .. i + high, and key j is seen by the rows j - high .. j - low. Positions come when a
 * plan runs; until then the last row is taken to be at the last key, as while tokens are
 * generated. */
typedef struct extent {
    double batch, n, k;
    double low, high; /* infinite where unbounded */
} extent;

static double mean_length(int64_t longest, int64_t total, int64_t batch, bool packed)
{
    if (!packed || batch == 0) return (double)longest;
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
    const double below = clip(floor(-start / step) + 1, count); /* so many are at most 0 ... */
    const double above = fmax(below, clip(ceil((limit - start) / step), count)); /* ... or less */
    const double inside = above - below;
    const double linear = inside > 0 ? inside * (start + step * (below + above - 1) / 2) : 0;
    return linear + (count - above) * limit;
}

static double ceil_to(double x, double unit) { return ceil(x / unit) * unit; }

/* The mean of what rounding x up to a multiple of `unit` adds, for x = start + t step. They fall on
 * the multiples of gcd(step, unit) past start alike; when step is a multiple of unit, all on the
 * same. */
static double mean_excess(double start, double step, double unit)
{
    double a = step, g = unit;
    if (!isfinite(start)) return 0;
    if (floor(step) != step) return (unit - 1) / 2; /* packed blocks begin between positions */
    while (a > 0) {
        const double rest = fmod(g, a);
        g = a;
        a = rest;
    }
    return ceil_to(start, g) - start + (unit - g) / 2;
}

/*
 * Blocks of `step` of the `outer` positions, each of which sees the `inner` positions from its own
 * + low to its own + high: the sum over blocks of what they see, in whole tiles of `unit`. What
 * begins at x is read from the multiple of unit below, what ends at x up to the one above. Exact
 * where step is a multiple of unit.
 */
static double sum_of_spans(double outer, double step, double inner, double low, double high,
                           double unit)
{
    const double full = floor(outer / step), rest = outer - full * step;
    const double blocks = rest > 0 ? full + 1 : full;
    const double end = step + high;
    double ends = sum_clipped(end + mean_excess(end, step, unit), step, full, inner);
    if (rest > 0) ends += isfinite(high) ? clip(ceil_to(outer + high, unit), inner) : inner;

    /* Blocks that begin past the last position see nothing; the tile below it must not count. */
    const double seeing = clip(ceil((inner - low) / step), blocks);
    const double begin = low - mean_excess(-low, step, unit);
    const double begins = sum_clipped(begin, step, seeing, inner) + (blocks - seeing) * inner;
    return ends - begins;
}

static double kept_pairs(const extent *e)
{
    return sum_of_spans(e->n, 1, e->k, e->low, e->high, 1);
}

/* A head of the mean sequence. */
static head mean_head(const fattn_problem *p, const extent *e, fattn_io_schedule schedule,
                      fattn_io_counts *counts)
{
    head a = {.p = p, .schedule = schedule, .counts = counts};
    a.n = e->n;
    a.k = e->k;
    a.seq.slot_k = (int64_t)e->k;
    a.d = (double)p->dim;
    a.dv = (double)p->dim_v;
    if (p->features & FATTN_BLOCK_MASK) {
        a.v.entries = ceil(e->n / (double)p->block_m) * ceil(e->k / (double)p->block_n);
    }
    return a;
}

/* Visits of row blocks of `step` positions that take in keys by bc, or the other way round. */
static void mean_visits(visits *v, const extent *e, bool forward, double rows, double keys)
{
    if (e->n == 0 || e->k == 0) return;
    const double seen = forward ? sum_of_spans(e->n, rows, e->k, e->low, e->high, keys)
                                : sum_of_spans(e->k, keys, e->n, -e->high, -e->low, rows);
    const double outer = forward ? e->n : e->k, step = forward ? rows : keys;
    v->pairs = outer * seen / ceil(outer / step); /* blocks see as much on average */
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
    head a = mean_head(p, &e, FATTN_IO_FLASH2, &of_queries);
    if (p->op == FATTN_FORWARD) {
        /* A packed block holds br / G positions of all G heads. */
        mean_visits(&a.v, &e, true, (double)br / (packs_groups ? group : 1), (double)bc);
        flash2_forward(&a);
        if (packs_groups) {
            of_queries.tensor[FATTN_IO_K].reads /= group;
            of_queries.tensor[FATTN_IO_V].reads /= group;
        }
    } else {
        mean_visits(&a.v, &e, false, (double)br, (double)bc);
        flash2_backward(&a);
        a.counts = &of_keys;
        key_counts(&a);
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
        head a = mean_head(p, &e, FATTN_IO_STANDARD, &counts);
        a.h = h;
        a.v.tiles = 1, a.v.rows = e.n, a.v.keys = e.k, a.v.pairs = e.n * e.k;
        (p->op == FATTN_FORWARD ? standard_forward : standard_backward)(&a);
        bytes += (h == 0 ? first : others) * fattn_io_counts_bytes(p, &counts);
    }
    return e.batch * bytes;
}

/* --- Lower bound ------------------------------------------------------------------------------ */

/* Copies that a tensor has along batch and heads: 1 where it is broadcast. */
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

/* Keys of all sequences, `seen` of each; pages may be shared, so that there are fewer. */
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

static void bound_inputs(head *a, const extent *e)
{
    const fattn_problem *const p = a->p;
    /* Of rows and keys, those that see any, and those that any sees. */
    const double rows = e->k > 0 ? sum_of_spans(e->k, e->k, e->n, -e->high, -e->low, 1) : 0;
    const double keys = e->n > 0 ? sum_of_spans(e->n, e->n, e->k, e->low, e->high, 1) : 0;
    const visits seen = {rows > 0 && keys > 0, rows, keys, kept_pairs(e), 0};
    reads(a, FATTN_IO_Q, own(rows, p->q.seq) * row_copies(p, &p->q) * a->d);
    reads(a, FATTN_IO_K, distinct_keys(p, &p->k, own(keys, p->k.seq)) * a->d);
    reads(a, FATTN_IO_V, distinct_keys(p, &p->v, own(keys, p->v.seq)) * a->dv);
    if (has(a, FATTN_BIAS)) {
        reads(a, FATTN_IO_BIAS,
              entries(&seen, p->bias_stride) *
                  copies(p, p->bias_stride[0], false, p->heads_q, p->bias_stride[1]));
    }
    if (has(a, FATTN_MASK)) {
        reads(a, FATTN_IO_MASK,
              entries(&seen, p->mask_stride) *
                  copies(p, p->mask_stride[0], false, p->heads_q, p->mask_stride[1]));
    }
    if (p->op == FATTN_FORWARD) return;
    const double statistics = rows * e->batch * (double)p->heads_q;
    reads(a, FATTN_IO_O, own(rows, p->o.seq) * row_copies(p, &p->o) * a->dv);
    reads(a, FATTN_IO_DOUT, own(rows, p->dout.seq) * row_copies(p, &p->dout) * a->dv);
    reads(a, FATTN_IO_LSE, statistics);
    if (has(a, FATTN_DLSE)) reads(a, FATTN_IO_DLSE, statistics);
}

/* An output is written; with FATTN_ACCUMULATE a gradient is read too. */
static void bound_output(head *a, bool wanted, fattn_io_tensor tensor, double elements)
{
    if (!wanted) return;
    writes(a, tensor, elements);
    if (has(a, FATTN_ACCUMULATE)) reads(a, tensor, elements);
}

double fattn_io_lower_bound_bytes(const fattn_problem *p)
{
    const extent e = extent_of(p);
    const double rows = e.batch * (double)p->heads_q * e.n;
    const double keys = e.batch * (double)p->heads_k * e.k;
    fattn_io_counts counts = {0};
    head a = mean_head(p, &e, FATTN_IO_FLASH2, &counts);
    bound_inputs(&a, &e);
    bound_output(&a, wants(&a, FATTN_OUT_O), FATTN_IO_O, rows * a.dv);
    bound_output(&a, wants(&a, FATTN_OUT_LSE), FATTN_IO_LSE, rows);
    bound_output(&a, wants(&a, FATTN_OUT_DQ), FATTN_IO_DQ, rows * a.d);
    bound_output(&a, wants(&a, FATTN_OUT_DK), FATTN_IO_DK, keys * a.d);
    bound_output(&a, wants(&a, FATTN_OUT_DV), FATTN_IO_DV, keys * a.dv);
    bound_output(&a, wants(&a, FATTN_OUT_DBIAS), FATTN_IO_DBIAS, dbias_elements(p));
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
        if (p->outputs & need_dp) a_pair += dv;
        if (p->outputs & FATTN_OUT_DV) a_pair += dv;
        if (p->outputs & FATTN_OUT_DQ) a_pair += d;
        if (p->outputs & FATTN_OUT_DK) a_pair += d;
    }
    return 2 * a_pair * kept_pairs(&e) * e.batch * (double)p->heads_q;
}
