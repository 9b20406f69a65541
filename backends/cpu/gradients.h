/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gradients that panels share: which of them a run wants, where they are summed, how they are
 * set to zero in its first phase, and how 16-bit ones are rounded and dSink is summed in its last.
 * backward.h says in which order panels add to them in between.
 */
#ifndef FATTN_CPU_GRADIENTS_H
#define FATTN_CPU_GRADIENTS_H

#include "backends/cpu/panel.h"
#include "core/schedule.h"

/* --- What a run consists of ------------------------------------------------------------------- */

static bool wants(const fattn_problem *p, uint32_t outputs) { return p->outputs & outputs; }

/* The number of rows of dk in the workspace: total_k if keys are packed, else seqlen_k per
 * sequence. */
static int64_t key_rows(const fattn_problem *p)
{
    return p->features & FATTN_CU_SEQLENS_K ? p->total_k : p->batch * p->seqlen_k;
}

/* Whether rows of dk or dv are so far apart that those of a tile would share a few lines of the
 * first-level cache (in_place()), and few enough for sums of their own. */
static bool sums_collide(const fattn_problem *p)
{
    const int64_t most = 16 << 20; /* sums: 64 MiB */
    const int64_t rows = key_rows(p), each = p->heads_k * (p->dim + p->dim_v);
    const bool collide = !in_place(FATTN_F32, &p->dk) || !in_place(FATTN_F32, &p->dv);
    return collide && !(p->features & FATTN_ACCUMULATE) && rows <= most / fattn_max64(each, 1);
}

/* Whether dk and dv have 16 bits, so that they are summed elsewhere and rounded. */
static bool are_rounded(const fattn_problem *p)
{
    return fattn_gradient_dtype(p, p->dtype) != FATTN_F32;
}

/* Whether dk and dv are summed in the workspace. stored: stores_keys() */
static bool sums_in_workspace(const fattn_problem *p, bool stored)
{
    return !stored && wants(p, FATTN_OUT_DK | FATTN_OUT_DV) && (are_rounded(p) || sums_collide(p));
}

/* Whether the last row of every sequence attends to all of its keys, by window and chunk. */
static bool last_row_sees_all(const fattn_problem *p)
{
    const bool reaches = p->anchor == FATTN_BOTTOM_RIGHT || p->window_right < 0 ||
                         p->seqlen_q + p->window_right >= p->seqlen_k;
    return !fattn_is_banded(p) ||
           (p->window_left < 0 && !p->chunk && !(p->features & FATTN_POSITIONS) && reaches);
}

/*
 * Whether a panel has all rows of its head, and all keys of the sequence are in tiles that it
 * visits. It then stores its rows of dk and dv, and nothing is summed in the workspace. Not under
 * ALiBi, whose products are lifted (backward_floats.h).
 */
static bool stores_keys(const fattn_problem *p, const fattn_tiling *tiling)
{
    const uint64_t others = FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK | FATTN_CU_SEQLENS_Q |
                            FATTN_SEQUSED_Q | FATTN_ACCUMULATE | FATTN_ALIBI;
    return tiling->q_blocks == 1 && last_row_sees_all(p) && !(p->features & others);
}

/* Whether an entry of dbias sums pairs of different key/value heads or sequences. */
static bool dbias_crosses(const fattn_problem *p)
{
    return wants(p, FATTN_OUT_DBIAS) && (p->dbias_stride[0] == 0 || p->dbias_stride[1] == 0);
}

/* Whether different panels add to one entry of dbias. */
static bool dbias_is_shared(const fattn_problem *p)
{
    return wants(p, FATTN_OUT_DBIAS) && (dbias_crosses(p) || p->dbias_stride[2] == 0);
}

/* Whether different panels add to one entry of dbias, and for different keys. */
static bool dbias_sums_keys(const fattn_problem *p)
{
    return dbias_is_shared(p) && p->dbias_stride[3] == 0;
}

/* Whether panels add to the same memory, and so form chains (backward.h). */
static bool is_chained(const fattn_problem *p)
{
    return wants(p, FATTN_OUT_DK | FATTN_OUT_DV) || dbias_is_shared(p);
}

/* The part of the workspace that workers share. */
typedef struct gradients {
    fattn_cpu_progress *progress; /* [items] */
    float *dsink;                 /* [items][group] parts of dsink */
    float *dk, *dv;               /* [Hk][key rows][d_pad], [dv_pad]: sums_in_workspace() */
    bool stored;                  /* stores_keys() */
} gradients;

/* Lays out the shared part of the workspace. Returns its size, or -1 if that is too large. */
static int64_t gradients_layout(const fattn_problem *p, const fattn_tiling *tiling, char *base,
                                gradients *shared)
{
    const int64_t d_pad = vectors_of(p->dim) * FV_LANES, dv_pad = vectors_of(p->dim_v) * FV_LANES;
    const int64_t group = fattn_problem_group(p);
    const bool stored = stores_keys(p, tiling), apart = sums_in_workspace(p, stored);
    const int64_t rows = apart ? fattn_cpu_bytes(key_rows(p), p->heads_k, sizeof(float)) : 0;
    const int64_t sizes[4] = {
        is_chained(p) ? fattn_cpu_bytes(tiling->items, sizeof(fattn_cpu_progress), 1) : 0,
        wants(p, FATTN_OUT_DSINK) ? fattn_cpu_bytes(tiling->items, group, sizeof(float)) : 0,
        apart && wants(p, FATTN_OUT_DK) ? fattn_cpu_bytes(rows, d_pad, 1) : 0,
        apart && wants(p, FATTN_OUT_DV) ? fattn_cpu_bytes(rows, dv_pad, 1) : 0,
    };
    void *parts[4];
    int64_t used = 0;
    for (int n = 0; n < 4; n++) {
        if (sizes[n] < 0 || used > INT64_MAX / 4) {
            return -1;
        }
        parts[n] = base ? base + used : NULL;
        used += sizes[n];
    }
    shared->progress = parts[0];
    shared->dsink = parts[1];
    shared->dk = parts[2];
    shared->dv = parts[3];
    shared->stored = stored;
    return used;
}

static gradients gradients_of(const fattn_cpu_run *run)
{
    gradients shared;
    (void)gradients_layout(run->problem, run->tiling, run->shared, &shared);
    return shared;
}

static int64_t backward_shared(const fattn_problem *p, const fattn_tiling *tiling)
{
    gradients shared;
    return gradients_layout(p, tiling, NULL, &shared);
}

/* --- Phase 1: gradients start from zero ------------------------------------------------------- */

/* Rows of dk or dv for a sequence and key/value head, in the output or in the workspace: element 0
 * of a key, and the number of elements from one key to the next. (Backward has no pages, so keys
 * are evenly spaced.) */
typedef struct sum_rows {
    float *first;
    int64_t step;
} sum_rows;

static sum_rows sum_rows_from(const panel *pn, bool stored, void *tensor,
                              const fattn_strides *strides, float *apart, int64_t stride, int64_t j)
{
    if (!sums_in_workspace(pn->p, stored)) {
        return (sum_rows){(float *)tensor + key_index(pn, strides, j), strides->seq};
    }
    const int64_t row = pn->seq.k_batch * pn->p->seqlen_k + pn->seq.k_row + j;
    return (sum_rows){apart + (pn->hk * key_rows(pn->p) + row) * stride, stride};
}

/* Stores `count` rows of dk or dv, from that of key `first` on: rows of sums, `step` apart, times
 * factor. */
static void store_keys(const panel *pn, void *tensor, const fattn_strides *strides, int64_t first,
                       int64_t count, const float *sums, int64_t step, int64_t dim, float factor)
{
    const fattn_dtype dtype = fattn_gradient_dtype(pn->p, pn->p->dtype);
    const int64_t size = fattn_dtype_size(dtype), stride = strides->seq * size;
    char *const to = (char *)tensor + key_index(pn, strides, first) * size;
    const bool whole = dim % (2 * FV_LANES) == 0;
    for (int64_t j = 0; j < count; j++) {
        if (dtype == FATTN_BF16 && whole) {
            round_row(to + j * stride, sums + j * step, dim, fv_set1(factor));
        } else {
            row_store(to + j * stride, dtype, sums + j * step, dim, factor);
        }
    }
}

/* A panel with only what rows of keys need. */
static panel keys_of(const fattn_cpu_run *run, int64_t b, int64_t hk)
{
    panel pn = {.p = run->problem, .hk = hk};
    panel_enter(&pn, run, b);
    pn.d_pad = vectors_of(pn.p->dim) * FV_LANES;
    pn.dv_pad = vectors_of(pn.p->dim_v) * FV_LANES;
    return pn;
}

/* Rows of keys are cleared and rounded in chunks, since there may be fewer heads than workers. */
#define CHUNK_KEYS 256

static int64_t chunks_of(const fattn_problem *p)
{
    return (p->seqlen_k + CHUNK_KEYS - 1) / CHUNK_KEYS;
}

/* Clears a chunk of keys: their sums, or their rows of the output if no sum will be rounded to
 * them. Keys before the first one (FATTN_SEQSTART_K) belong to the first chunk. stored: those of
 * the sequence are left out */
static void clear_keys(const panel *pn, bool stored, int64_t first, void *tensor,
                       const fattn_strides *strides, int64_t dim, float *apart, int64_t stride)
{
    const fattn_dtype dtype = fattn_gradient_dtype(pn->p, pn->p->dtype);
    const int64_t past = fattn_min64(first + CHUNK_KEYS, pn->seq.slot_k);
    const int64_t size = fattn_dtype_size(dtype);
    /* Keys that have a sum in the workspace. */
    const int64_t sums = sums_in_workspace(pn->p, stored) ? pn->seq.sk : 0;
    const int64_t kept = stored ? pn->seq.sk : 0;
    const sum_rows none = {0};
    const sum_rows to =
        sums ? sum_rows_from(pn, stored, tensor, strides, apart, stride, first) : none;
    for (int64_t j = first == 0 ? -pn->start_k : first; j < past; j++) {
        if (j >= 0 && j < sums) {
            fill(to.first + (j - first) * to.step, stride, 0);
        } else if (j < 0 || j >= kept) {
            memset((char *)tensor + key_index(pn, strides, j) * size, 0, (size_t)(dim * size));
        }
    }
}

/* The extent of an axis of dbias; 1 where it is broadcast. */
static int64_t dbias_extent(const fattn_problem *p, int axis)
{
    const int64_t extent[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    return p->dbias_stride[axis] == 0 ? 1 : extent[axis];
}

static void clear_dbias_row(const fattn_cpu_run *run, int64_t row)
{
    const fattn_problem *const p = run->problem;
    const int64_t rows = dbias_extent(p, 2), heads = dbias_extent(p, 1), keys = dbias_extent(p, 3);
    float *const to = (float *)run->buffers->dbias + row / rows / heads * p->dbias_stride[0] +
                      row / rows % heads * p->dbias_stride[1] + row % rows * p->dbias_stride[2];
    for (int64_t j = 0; j < keys; j++) {
        to[j * p->dbias_stride[3]] = 0;
    }
}

#define CLEAR_ROWS 64 /* rows of dbias per item */

/* The number of chunks of all heads. Each head has at least one, which also clears its progress. */
static int64_t clear_chunks(const fattn_problem *p)
{
    return p->batch * p->heads_k * fattn_max64(1, chunks_of(p));
}

static int64_t dbias_rows(const fattn_problem *p)
{
    if (!wants(p, FATTN_OUT_DBIAS) || p->features & FATTN_ACCUMULATE || dbias_extent(p, 3) == 0) {
        return 0; /* an empty dbias may be NULL, on which pointer arithmetic is undefined */
    }
    return dbias_extent(p, 0) * dbias_extent(p, 1) * dbias_extent(p, 2);
}

static int64_t clear_count(const fattn_cpu_run *run)
{
    return clear_chunks(run->problem) + (dbias_rows(run->problem) + CLEAR_ROWS - 1) / CLEAR_ROWS;
}

/* Clears a chunk of a key/value head, or some rows of dbias. */
static void clear_item(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const fattn_problem *const p = run->problem;
    const int64_t chunks = clear_chunks(p);
    (void)scratch;
    if (item >= chunks) {
        const int64_t first = (item - chunks) * CLEAR_ROWS;
        const int64_t past = fattn_min64(first + CLEAR_ROWS, dbias_rows(p));
        for (int64_t row = first; row < past; row++) {
            clear_dbias_row(run, row);
        }
        return;
    }

    const int64_t heads = p->batch * p->heads_k, head = item % heads;
    const int64_t first = item / heads * CHUNK_KEYS;
    const panel pn = keys_of(run, head / p->heads_k, head % p->heads_k);
    const gradients shared = gradients_of(run);
    const int64_t blocks = run->tiling->q_blocks;
    for (int64_t n = 0; is_chained(p) && first == 0 && n < blocks; n++) {
        fattn_cpu_publish(&shared.progress[head * blocks + n], 0);
    }
    if (p->features & FATTN_ACCUMULATE) {
        return;
    }
    if (wants(p, FATTN_OUT_DK)) {
        clear_keys(&pn, shared.stored, first, run->buffers->dk, &p->dk, p->dim, shared.dk,
                   pn.d_pad);
    }
    if (wants(p, FATTN_OUT_DV)) {
        clear_keys(&pn, shared.stored, first, run->buffers->dv, &p->dv, p->dim_v, shared.dv,
                   pn.dv_pad);
    }
}

static void clear_work(const fattn_cpu_run *run, void *scratch)
{
    each_item(run, scratch, clear_item);
}

/* --- Phase 3: rounding, and the sums of dSink ------------------------------------------------- */

static void round_keys(const panel *pn, int64_t first, void *tensor, const fattn_strides *strides,
                       int64_t dim, float *apart, int64_t stride)
{
    const int64_t past = fattn_min64(first + CHUNK_KEYS, pn->seq.sk);
    const sum_rows from = sum_rows_from(pn, false, tensor, strides, apart, stride, first);
    store_keys(pn, tensor, strides, first, past - first, from.first, from.step, dim, 1);
}

/* dsink of head h: the sum of the parts of its panels, in the order of their numbers. */
static void sum_dsink(const fattn_cpu_run *run, const gradients *shared, int64_t h)
{
    const fattn_problem *const p = run->problem;
    const int64_t group = p->heads_q / p->heads_k, blocks = run->tiling->q_blocks;
    float *const dsink = run->buffers->dsink;
    double sum = p->features & FATTN_ACCUMULATE ? dsink[h] : 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t first = (b * p->heads_k + h / group) * blocks;
        for (int64_t n = 0; n < blocks; n++) {
            sum += shared->dsink[(first + n) * group + h % group];
        }
    }
    dsink[h] = (float)sum;
}

static int64_t finish_chunks(const fattn_cpu_run *run)
{
    const fattn_problem *const p = run->problem;
    return sums_in_workspace(p, stores_keys(p, run->tiling)) ? p->batch * p->heads_k * chunks_of(p)
                                                             : 0;
}

static int64_t finish_count(const fattn_cpu_run *run)
{
    const fattn_problem *const p = run->problem;
    return finish_chunks(run) + (wants(p, FATTN_OUT_DSINK) ? p->heads_q : 0);
}

static void finish_item(const fattn_cpu_run *run, int64_t item, void *scratch)
{
    const fattn_problem *const p = run->problem;
    const gradients shared = gradients_of(run);
    const int64_t chunks = finish_chunks(run), heads = p->batch * p->heads_k;
    (void)scratch;
    if (item >= chunks) {
        sum_dsink(run, &shared, item - chunks);
        return;
    }
    const int64_t head = item % heads, first = item / heads * CHUNK_KEYS;
    const panel pn = keys_of(run, head / p->heads_k, head % p->heads_k);
    if (wants(p, FATTN_OUT_DK)) {
        round_keys(&pn, first, run->buffers->dk, &p->dk, p->dim, shared.dk, pn.d_pad);
    }
    if (wants(p, FATTN_OUT_DV)) {
        round_keys(&pn, first, run->buffers->dv, &p->dv, p->dim_v, shared.dv, pn.dv_pad);
    }
}

static void finish_work(const fattn_cpu_run *run, void *scratch)
{
    each_item(run, scratch, finish_item);
}

#endif
