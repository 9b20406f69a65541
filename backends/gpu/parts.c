/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What forward rows share that cut the keys into parts: the cost of a part, the workspace for their
 * results, and the choice of the kernel that merges these (combine.cuh).
 */
#include <stdio.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "backends/gpu/sizes.h"
#include "core/problem.h"

/* How many rows an item has at most. */
static int64_t item_rows(const fattn_problem *p, const fattn_tiling *t)
{
    const int64_t rows = fattn_problem_rows(p);
    return rows < t->br ? rows : t->br;
}

/* From this many rows on, combine_rows is faster than combine, as measured on an H100
 * (docs/notes/hopper-forward.md). AMD's GPUs use the same number, unmeasured. */
#define MANY_ROWS 2048

void fattn_gpu_combine(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    const int64_t blocks = t->splits > 1 ? t->items / t->splits : 0, rows = item_rows(p, t);
    /* Then o of a part begins at a multiple of 16 bytes, behind two floats for each row. */
    const bool quads = p->dim_v % 4 == 0 && rows % 2 == 0;
    if (quads && blocks * rows >= MANY_ROWS) {
        snprintf(shape->entry, sizeof shape->entry, "combine_rows");
        shape->blocks = blocks * fattn_ceil_div(rows, FATTN_GPU_COMBINE_ROWS);
    } else {
        snprintf(shape->entry, sizeof shape->entry, "combine");
        const int64_t pieces = blocks * rows * fattn_ceil_div(p->dim_v, 32);
        shape->blocks = fattn_ceil_div(pieces, FATTN_GPU_COMBINE_THREADS / 32);
    }
    shape->threads = FATTN_GPU_COMBINE_THREADS;
    shape->early = true;
}

fattn_split_cost fattn_gpu_split(const fattn_kernel *row, const fattn_problem *p,
                                 const fattn_limits *limits)
{
    (void)row, (void)p;
    return (fattn_split_cost){.keys = 256, .pieces = limits->parallelism};
}

/* m, l and o of every row of every item. -1 also if the blocks of SIMT kernels, one for each item
 * and slab of channels, cannot be counted. */
int64_t fattn_gpu_parts_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    (void)row;
    if (gpu_times(gpu_times(t->items, fattn_ceil_div(p->dim_v, 64)), 2) < 0) {
        return -1;
    }
    if (t->splits == 1) {
        return 0;
    }
    return gpu_floats(gpu_times(gpu_times(t->items, item_rows(p, t)), 2 + p->dim_v));
}

int64_t fattn_gpu_decode_workspace(const fattn_kernel *row, const fattn_problem *p,
                                   const fattn_tiling *t)
{
    const int64_t parts = fattn_gpu_parts_workspace(row, p, t);
    const int64_t heads = gpu_times(t->heads, t->q_blocks);
    const int64_t counters = gpu_floats(gpu_times(heads < 0 ? -1 : heads + 1, 2));
    return parts <= 0                                     ? parts
           : counters < 0 || parts > INT64_MAX - counters ? -1
                                                          : parts + counters;
}

/* A block that merges makes rounds, and waits for memory once in each. A second kernel makes these
 * rounds in parallel blocks, but its launch takes as long as two or three rounds. */
bool fattn_gpu_merges(const fattn_problem *p, const fattn_tiling *t, int threads)
{
    enum { ROUNDS = 3 };
    const int64_t pieces = item_rows(p, t) * fattn_ceil_div(p->dim_v, FATTN_GPU_MERGE_CHANNELS);
    const int64_t rounds = gpu_times(fattn_ceil_div(pieces, threads / 32),
                                     fattn_ceil_div(t->splits, FATTN_GPU_MERGE_PARTS));
    return t->splits > 1 && rounds >= 0 && rounds <= ROUNDS;
}
