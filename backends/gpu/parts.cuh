/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a row of forward ends: in o and lse, or, where its keys are cut into parts, as {m, l, o} in
 * the workspace, and how those parts become a row. An item's part is m [rows], l [rows], o
 * [rows][Dv], with o not yet divided by l; rows is br, or the few that a key/value head has.
 */
#ifndef FATTN_GPU_PARTS_CUH
#define FATTN_GPU_PARTS_CUH

#include "backends/gpu/pairs.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* The parts of what rows i0 .. i1 - 1 of a sequence see, in tiles of so many keys. */
GPU_DEVICE fattn_parts gpu_parts_of(const fattn_gpu_args &g, const fattn_band &band, int64_t i0,
                                    int64_t i1, int64_t tile)
{
    const fattn_range keys = fattn_band_rows(&band, i0, i1);
    return fattn_schedule_parts(&g.tiling, fattn_quotient(fattn_max64(keys.first, 0), tile),
                                fattn_quotient(fattn_max64(keys.past, 0) + tile - 1, tile));
}

/* A row's place. */
typedef struct gpu_part {
    float *m, *l; /* of a part */
    gpu_tensor o;
    int64_t at; /* of channel 0 in o */
} gpu_part;

/* Row r of an item, as a part. */
GPU_DEVICE gpu_part gpu_part_of(const fattn_gpu_args &g, int64_t item, int r)
{
    const fattn_problem &p = g.problem;
    const int64_t rows =
        fattn_min64(g.tiling.br, fattn_quotient(p.heads_q, p.heads_k) * p.seqlen_q);
    gpu_part part;
    part.m = (float *)g.workspace + item * rows * (2 + p.dim_v) + r;
    part.l = part.m + rows;
    part.o = gpu_tensor_of(g, part.l + rows - r, FATTN_F32, 0, p.dim_v);
    part.at = r * p.dim_v;
    return part;
}

/* The row in o. */
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

/* A channel of o in the end: 0 for an empty row, selected, because its sum may be 0 * inf. */
GPU_DEVICE float gpu_output(fattn_softmax state, float sum)
{
    return state.l == 0 ? 0 : sum * fattn_softmax_normaliser(state);
}

/* Which channels a team of 32 threads merges, and of which row. */
typedef struct gpu_combined {
    gpu_part part; /* the row in its first part */
    int step;      /* floats from there to the next part */
    int64_t c;     /* this thread's channel */
    fattn_work work;
    int64_t number; /* of the row, in its group */
} gpu_combined;

/* Piece n: rows of items, items counted without parts, and channels by 32. */
GPU_DEVICE gpu_combined gpu_combined_of(const fattn_gpu_args &g, int64_t n, int64_t rows)
{
    const int64_t pieces = fattn_max64((g.problem.dim_v + 31) / 32, 1);
    const int64_t row = fattn_quotient(n, pieces), item = fattn_quotient(row, rows);
    const int r = (int)(row - item * rows);
    gpu_combined piece;
    piece.work = fattn_schedule_item(&g.tiling, g.problem.heads_k, item * g.tiling.splits);
    piece.part = gpu_part_of(g, item * g.tiling.splits, r);
    piece.step = (int)(rows * (2 + g.problem.dim_v));
    piece.c = (n - row * pieces) * 32 + gpu_thread() % 32;
    piece.number = piece.work.block * g.tiling.br + r;
    return piece;
}

/* The largest and the sum of what 32 threads have, in all of them. */
GPU_DEVICE float gpu_team_max(float x)
{
    for (int n = 1; n < 32; n *= 2) {
        x = gpu_max(x, gpu_shfl_xor(x, n));
    }
    return x;
}

GPU_DEVICE float gpu_team_sum(float x)
{
    for (int n = 1; n < 32; n *= 2) {
        x += gpu_shfl_xor(x, n);
    }
    return x;
}

/* How many parts a piece has. Divisions take a microsecond together, which decoding shows: there
 * are none where a head is one block of rows that sees all keys of the plan, as most decoding
 * has. */
GPU_DEVICE int64_t gpu_combined_parts(const fattn_gpu_args &g, const gpu_combined &piece,
                                      const fattn_sequence &seq, int64_t group)
{
    const fattn_band band = fattn_band_of(&g.problem, &seq);
    if (g.tiling.q_blocks == 1) {
        const fattn_range keys = fattn_band_rows(&band, 0, seq.sq);
        if (keys.first == 0 && keys.past == g.problem.seqlen_k) {
            return g.tiling.splits;
        }
    }
    const int64_t first = piece.work.block * g.tiling.br;
    const int64_t rows = fattn_min64(seq.sq * group - first, g.tiling.br);
    const fattn_parts parts =
        gpu_parts_of(g, band, fattn_quotient(first, group),
                     fattn_quotient(first + rows - 1, group) + 1, g.tiling.bc);
    return fattn_parts_count(&parts);
}

/* Merges the parts of a piece, 16 at a time, all on their way at once: a thread finds what one part
 * weighs, and then all sum their channel over the parts in ascending order. Returns the sum. */
GPU_DEVICE float gpu_combine_parts(const fattn_gpu_args &g, const gpu_combined &piece,
                                   int64_t parts, fattn_softmax &all)
{
    enum { BATCH = 16 };
    const int lane = gpu_thread() % 32;
    const bool exists = piece.c < g.problem.dim_v;
    float sum = 0;
    all = fattn_softmax_empty();
    for (int64_t first = 0; first < parts; first += BATCH) {
        const int live = (int)fattn_min64(parts - first, BATCH);
        const int64_t at = first * piece.step;
        const float *o = (const float *)piece.part.o.data + piece.part.at + piece.c + at;
        float part[BATCH];
        GPU_UNROLL
        for (int n = 0; n < BATCH; n++, o += piece.step) {
            part[n] = exists && n < live ? *o : 0;
        }
        fattn_softmax own = fattn_softmax_empty();
        if (lane < live) {
            own.m = piece.part.m[at + lane * piece.step];
            own.l = piece.part.l[at + lane * piece.step];
        }
        sum *= fattn_softmax_raise(&all, gpu_team_max(own.m), g.rule.unit);
        const float weight = fattn_softmax_weight(own.m, g.rule.unit, fattn_softmax_base(all));
        fattn_softmax_add(&all, gpu_team_sum(own.l * weight));
        GPU_UNROLL
        for (int n = 0; n < BATCH; n++) {
            sum = fmaf(gpu_shfl(weight, n), part[n], sum);
        }
    }
    return sum;
}

GPU_DEVICE void gpu_combine_piece(const fattn_gpu_args &g, const gpu_combined &piece)
{
    const fattn_problem &p = g.problem;
    const fattn_sequence seq = gpu_sequence(g, piece.work.batch);
    const int64_t group = fattn_quotient(p.heads_q, p.heads_k);
    const int64_t i = fattn_quotient(piece.number, group);
    fattn_softmax all;
    gpu_query q;
    if (i >= seq.sq) {
        return;
    }
    q.i = (int32_t)i;
    q.h = (int32_t)(piece.work.head * group + piece.number - i * group);
    const gpu_part to = gpu_part_output(g, seq, q);
    const int64_t parts = gpu_combined_parts(g, piece, seq, group);
    gpu_await_earlier(); /* the parts */
    if (parts == 1) {
        return; /* the row is where it belongs */
    }
    const float sum = gpu_combine_parts(g, piece, parts, all);
    if (piece.c < p.dim_v && p.outputs & FATTN_OUT_O) {
        gpu_store(to.o.data, p.dtype_o, to.at + piece.c, gpu_output(all, sum));
    }
    if (piece.c == 0) {
        gpu_store_lse(g, seq, piece.work.batch, q, all);
    }
}

GPU_DEVICE void gpu_combine_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t group = fattn_quotient(p.heads_q, p.heads_k);
    const int64_t rows = fattn_min64(g.tiling.br, group * p.seqlen_q);
    const int64_t pieces = fattn_max64((p.dim_v + 31) / 32, 1);
    const int64_t count = fattn_quotient(g.tiling.items, g.tiling.splits) * rows * pieces;
    const int teams = FATTN_GPU_COMBINE_THREADS / 32;
    gpu_admit_later();
    if (gpu_sequences_differ(p)) {
        gpu_await_earlier();
    }
    for (int64_t n = gpu_block() * teams + gpu_thread() / 32; n < count;
         n += gpu_blocks() * teams) {
        gpu_combine_piece(g, gpu_combined_of(g, n, rows));
    }
}

#define GPU_COMBINE                                                                    \
    GPU_KERNEL(FATTN_GPU_COMBINE_THREADS, 6) combine(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                  \
        gpu_combine_all(g);                                                            \
    }

#endif
