/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of a block of a SIMT forward kernel, from the schedule to o and lse. An item of the
 * schedule is a tile of rows of one key/value head and a part of its keys. If there is one part,
 * the block writes o and lse; if there are several, each leaves {m, l, o} in the workspace, and
 * they are merged in ascending order (combine.cuh).
 */
#ifndef FATTN_GPU_FORWARD_ROWS_CUH
#define FATTN_GPU_FORWARD_ROWS_CUH

#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* The item that a block works on. It is in shared memory, to save registers. */
typedef struct gpu_forward_job {
    gpu_pairs pairs;
    int64_t hk, group; /* key/value head, and query heads that share it */
    int64_t first, i0, i1;
    int64_t item, split;
    fattn_parts parts;
    int rows;              /* how many exist; 0 if the part does not */
    int c0;                /* first channel of the slab */
    float scale, v_factor; /* of scores and of values: those of the run, with FATTN_DESCALE */
} gpu_forward_job;

/* Sets the scale of the item's scores, rounded once, and the factor of its values. */
GPU_DEVICE void gpu_forward_descale(const fattn_gpu_args &g, gpu_forward_job &f)
{
    const fattn_problem &p = g.problem;
    f.scale = g.rule.scale;
    f.v_factor = 1;
    if (p.features & FATTN_DESCALE) {
        const int64_t at = f.pairs.b * p.descale_stride[0] + f.hk * p.descale_stride[1];
        f.scale = (float)(p.scale * (double)((const float *)g.buffers.k_descale)[at]);
        f.v_factor = ((const float *)g.buffers.v_descale)[at];
    }
}

/* Sets f to an item of at most `most` rows. Returns false if it has no rows or its part does not
 * exist. */
GPU_DEVICE bool gpu_forward_open(const fattn_gpu_args &args, gpu_forward_job &f, int most,
                                 int64_t item, int c0)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    gpu_sync(); /* the item before may still be read */
    if (gpu_thread() == 0) {
        int64_t block, past;
        const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, item);
        f.pairs = gpu_pairs_of(g, work.batch);
        f.hk = work.head;
        f.group = g.group;
        const gpu_item_rows rows = gpu_item_rows_of(work.block, most, f.pairs.seq.sq, f.group);
        f.first = rows.first;
        f.rows = rows.count;
        f.i0 = rows.i0;
        f.i1 = rows.i1;
        f.parts = gpu_parts_of(g, f.pairs.band, f.i0, f.i1, g.tiling.bc);
        f.item = item;
        f.split = work.split;
        if (!fattn_schedule_keys(&f.parts, f.split, &block, &past)) {
            f.rows = 0;
        }
        f.c0 = c0;
        gpu_forward_descale(g, f);
    }
    gpu_sync();
    return f.rows > 0;
}

/* The run's rule with the scale of the item. */
GPU_DEVICE fattn_score_rule gpu_forward_rule(const fattn_gpu_args &g, const gpu_forward_job &job)
{
    fattn_score_rule rule = g.rule;
    rule.scale = job.scale;
    return rule;
}

/* The query of row r of the tile; its h is -1 if the row does not exist. */
GPU_DEVICE gpu_query gpu_forward_query(const gpu_forward_job &job, int r)
{
    gpu_query q = gpu_query_of(job.first + r, job.group, job.hk * job.group);
    if (r >= job.rows) {
        q.h = -1;
    }
    return q;
}

/* The state of a row before its first key: empty but for the sink, which counts in the first part
 * alone. Of the threads that share the row, only the one that `elected` has the sink's l. */
GPU_DEVICE fattn_softmax gpu_forward_start(const fattn_gpu_args &g, const gpu_forward_job &job,
                                           gpu_query q, bool elected)
{
    fattn_softmax state = fattn_softmax_empty();
    if (g.problem.features & FATTN_SINK && job.split == 0 && q.h >= 0) {
        state = fattn_softmax_sink(((const float *)g.buffers.sink)[q.h]);
        if (!elected) {
            state.l = 0;
        }
    }
    return state;
}

/* Where row r is written, in the output or in a part. The thread that `elected` for the row writes
 * its lse, or m and l of the part. */
GPU_DEVICE gpu_part gpu_forward_row(const fattn_gpu_args &g, const gpu_forward_job &job, int r,
                                    gpu_query q, fattn_softmax state, bool elected)
{
    gpu_part part = gpu_part_of(g, job.item, r);
    const bool leaves = elected && job.c0 == 0;
    if (!fattn_parts_are_one(&job.parts)) {
        if (leaves) {
            *part.m = state.m, *part.l = state.l;
        }
        return part;
    }
    if (leaves) {
        gpu_store_lse(g, job.pairs.seq, job.pairs.b, q, state);
    }
    part = gpu_part_output(g, job.pairs.seq, q);
    if (!(g.problem.outputs & FATTN_OUT_O)) {
        part.o.dim = 0;
    }
    return part;
}

/* Writes four channels of a row, whose sums are not yet divided by l, nor multiplied by the factor
 * of the values. */
GPU_DEVICE void gpu_forward_store(const gpu_forward_job &job, const gpu_part &part,
                                  fattn_softmax state, int c, const float sum[4])
{
    float o[4];
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        o[e] = sum[e] * job.v_factor;
        o[e] = fattn_parts_are_one(&job.parts) ? gpu_output(state, o[e]) : o[e];
    }
    gpu_store_quad(part.o, part.at, c, o);
}

#endif
