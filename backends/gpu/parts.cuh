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
    const int64_t rows = fattn_min64(g.tiling.br, p.heads_q / p.heads_k * p.seqlen_q);
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

/* Merges the parts of row r of an item, item counted without parts, in ascending order. A block a
 * row. */
GPU_DEVICE void gpu_combine_row(const fattn_gpu_args &g, int64_t item, int r)
{
    const fattn_problem &p = g.problem;
    const int64_t first = item * g.tiling.splits;
    const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, first);
    const fattn_sequence seq = gpu_sequence(g, work.batch);
    const int64_t group = p.heads_q / p.heads_k, number = work.block * g.tiling.br + r;
    if (number >= seq.sq * group) {
        return;
    }
    const gpu_query q = gpu_query_of(number, group, work.head * group);
    const gpu_part to = gpu_part_output(g, seq, q);

    for (int c = gpu_thread(); c < fattn_max64(p.dim_v, 1); c += gpu_threads()) {
        fattn_softmax state = fattn_softmax_empty();
        float o = 0;
        for (int64_t split = 0; split < g.tiling.splits; split++) {
            const gpu_part part = gpu_part_of(g, first + split, r);
            fattn_softmax other;
            float alpha, beta;
            other.m = *part.m;
            other.l = *part.l;
            fattn_softmax_merge(&state, other, g.rule.unit, &alpha, &beta);
            o = fmaf(beta, ((const float *)part.o.data)[part.at + c], alpha * o);
        }
        if (p.outputs & FATTN_OUT_O) {
            gpu_store(to.o.data, p.dtype_o, to.at + c, gpu_output(state, o));
        }
        if (c == 0) {
            gpu_store_lse(g, seq, work.batch, q, state);
        }
    }
}

GPU_DEVICE void gpu_combine_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t rows = fattn_min64(g.tiling.br, p.heads_q / p.heads_k * p.seqlen_q);
    const int64_t count = g.tiling.items / g.tiling.splits * rows;
    for (int64_t n = gpu_block(); n < count; n += gpu_blocks()) {
        gpu_combine_row(g, n / rows, (int)(n % rows));
    }
}

#endif
