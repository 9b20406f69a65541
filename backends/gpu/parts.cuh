/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of an item of forward, its part of their keys, and where they are written. A row whose
 * keys are one part is written to o and lse. If its keys are cut into parts, each part leaves
 * {m, l, o} in the workspace, and the parts are merged (combine.cuh). An item's part is m [rows],
 * l [rows], o [rows][Dv], with o not yet divided by l; rows is br, or all rows of a key/value head
 * if these are fewer.
 */
#ifndef FATTN_GPU_PARTS_CUH
#define FATTN_GPU_PARTS_CUH

#include "backends/gpu/pairs.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* The parts of the keys that queries i0 .. i1 - 1 of a sequence attend to, in tiles of `tile`
 * keys. */
GPU_DEVICE fattn_parts gpu_parts_of(const fattn_gpu_args &g, const fattn_band &band, int64_t i0,
                                    int64_t i1, int64_t tile)
{
    const fattn_range keys = fattn_band_rows(&band, i0, i1);
    const int64_t first = gpu_clamp(keys.first, 0, band.keys);
    return fattn_schedule_parts(&g.tiling, fattn_quotient(first, tile),
                                fattn_quotient(fattn_max64(keys.past, 0) + tile - 1, tile));
}

/* The rows of an item: rows first .. first + count - 1 of a key/value head. They are of queries
 * i0 .. i1 - 1, of all query heads that share the key/value head. */
typedef struct gpu_item_rows {
    int64_t first, i0, i1;
    int count; /* rows that exist; if 0, i0 and i1 are as for one row */
} gpu_item_rows;

/* Block `block` of at most `most` rows. The sequence has sq queries of `group` heads. */
GPU_DEVICE gpu_item_rows gpu_item_rows_of(int64_t block, int most, int64_t sq, int64_t group)
{
    gpu_item_rows rows;
    rows.first = block * most;
    rows.count = (int)gpu_clamp(sq * group - rows.first, 0, most);
    rows.i0 = fattn_quotient(rows.first, group);
    rows.i1 = fattn_quotient(rows.first + fattn_max64(rows.count, 1) - 1, group) + 1;
    return rows;
}

/* A part of the keys that an item's rows attend to, in tiles of keys. */
typedef struct gpu_item_part {
    int block, past; /* tiles block .. past - 1 */
    bool exists;     /* true for part 0 even without keys: its rows have results all the same */
    bool whole;      /* it is the only part */
} gpu_item_part;

/* Part number `split`. block == past if it has no keys. */
GPU_DEVICE gpu_item_part gpu_item_part_of(const fattn_parts &parts, int64_t split)
{
    int64_t first, past;
    gpu_item_part part;
    part.exists = fattn_schedule_keys(&parts, split, &first, &past);
    part.block = (int)first;
    part.past = (int)past;
    part.whole = fattn_parts_are_one(&parts);
    return part;
}

/* Sets the part of an item of a kernel on matrix units. Returns whether the part exists. */
template <class Item> GPU_DEVICE bool gpu_item_set_part(const fattn_parts &parts, Item &w)
{
    const gpu_item_part part = gpu_item_part_of(parts, w.split);
    w.block = part.block;
    w.past = part.past;
    w.whole = part.whole;
    return part.exists;
}

/* Sets the head of such an item, its rows (at most `most`), and its part, in tiles of `tile` keys.
 * The caller has set its sequence and band. Returns the number of its first row in the head. */
template <class Item>
GPU_DEVICE int64_t gpu_item_set(const fattn_gpu_args &g, const fattn_work &work, int most, int tile,
                                Item &w)
{
    w.hk = work.head;
    w.split = (int)work.split;
    w.group = g.group;
    const gpu_item_rows rows = gpu_item_rows_of(work.block, most, w.pairs.seq.sq, w.group);
    w.i0 = rows.i0;
    w.i1 = rows.i1;
    const fattn_parts parts = gpu_parts_of(g, w.pairs.band, w.i0, w.i1, tile);
    w.rows = gpu_item_set_part(parts, w) ? rows.count : 0;
    return rows.first;
}

/* The item of work number n: first come the first parts of all blocks of rows, then the second
 * parts, and so on. Short sequences have only first parts, which so go to different
 * multiprocessors. */
GPU_DEVICE int64_t gpu_item_of(const fattn_gpu_args &g, int64_t n)
{
    if (g.tiling.splits == 1 || g.tiling.items > UINT32_MAX) {
        return n;
    }
    const uint32_t splits = (uint32_t)g.tiling.splits, blocks = (uint32_t)g.tiling.items / splits;
    const uint32_t split = (uint32_t)n / blocks;
    return ((uint32_t)n - split * blocks) * splits + split;
}

/* Where a row is written: in the output, or in a part. */
typedef struct gpu_part {
    float *m, *l; /* NULL in the output */
    gpu_tensor o;
    int64_t at; /* the row's channel 0 in o */
} gpu_part;

/* Row r of an item's part. */
GPU_DEVICE gpu_part gpu_part_of(const fattn_gpu_args &g, int64_t item, int r)
{
    const fattn_problem &p = g.problem;
    const int64_t rows = fattn_min64(g.tiling.br, g.group * p.seqlen_q);
    gpu_part part;
    part.m = (float *)g.workspace + item * rows * (2 + p.dim_v) + r;
    part.l = part.m + rows;
    part.o = gpu_tensor_of(g, part.l + rows - r, FATTN_F32, 0, p.dim_v);
    part.at = r * p.dim_v;
    return part;
}

/* The row of query q in the output. */
GPU_DEVICE gpu_part gpu_part_output(const fattn_gpu_args &g, const fattn_sequence &seq, gpu_query q)
{
    const fattn_problem &p = g.problem;
    gpu_part part;
    part.m = part.l = NULL;
    part.o = gpu_tensor_of(g, g.buffers.o, p.dtype_o, FATTN_GPU_QUADS_O, p.dim_v);
    part.at = gpu_query_at(seq, p.o, q.i, q.h);
    return part;
}

GPU_DEVICE void gpu_store_lse(const fattn_gpu_args &g, const fattn_sequence &seq, int64_t b,
                              gpu_query q, fattn_softmax state)
{
    if (g.problem.outputs & FATTN_OUT_LSE) {
        float *const lse = (float *)g.buffers.lse;
        lse[gpu_lse_at(g.problem, seq, b, q.h) + q.i] = fattn_softmax_lse(state, g.rule.natural);
    }
}

/* A channel of the final o. For an empty row it selects 0, because the sum may be 0 * inf. */
GPU_DEVICE float gpu_output(fattn_softmax state, float sum)
{
    return state.l == 0 ? 0 : sum * fattn_softmax_normaliser(state);
}

#endif
