/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward kernels on matrix units add to dQ in a workspace. This file has the phases that run
 * before and after them (backward_rows.cuh), and the size of that workspace.
 */
#include <stdio.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "backends/gpu/packed.h"
#include "backends/gpu/sizes.h"

/* How many rows dbias has. Axes that it is summed over count once. */
static int64_t dbias_rows(const fattn_problem *p)
{
    const int64_t *const stride = p->dbias_stride;
    return gpu_times(gpu_times(stride[0] ? p->batch : 1, stride[1] ? p->heads_q : 1),
                     stride[2] ? p->seqlen_q : 1);
}

void fattn_gpu_backward_clear(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                              const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel, (void)t;
    const bool clears = p->outputs & FATTN_OUT_DBIAS && !(p->features & FATTN_ACCUMULATE);
    snprintf(shape->entry, sizeof shape->entry, "clear");
    shape->blocks = clears ? dbias_rows(p) : 0;
    shape->threads = 256;
}

int64_t fattn_gpu_dbias_sums(const fattn_problem *p, int64_t stride[4])
{
    const int64_t extents[] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    int64_t count = 1;
    bool summed = false;
    for (int axis = 3; axis >= 0; axis--) {
        const bool summed_over = p->dbias_stride[axis] == 0;
        stride[axis] = summed_over ? 0 : count;
        count = summed_over ? count : gpu_times(count, extents[axis]);
        summed = summed || (summed_over && extents[axis] > 1);
    }
    return p->outputs & FATTN_OUT_DBIAS && summed ? count : 0;
}

/* The workspace holds dQ (`width` floats), lse and delta of every row, and then the 64-bit counter
 * of items. A deterministic run also has a 32-bit turn for every tile of queries. -1 if this, or a
 * number of blocks that the phases launch, overflows. */
int64_t fattn_gpu_backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                     const fattn_tiling *t)
{
    const int width = fattn_gpu_kernel_of(row)->width;
    const int64_t turns = p->features & FATTN_DETERMINISTIC
                              ? gpu_times(gpu_times(p->batch, p->heads_q), t->q_blocks)
                              : 0;
    const int64_t rows = gpu_times(gpu_query_rows(p), width + 2);
    const bool countable = gpu_is_countable(p, t) &&
                           (!(p->outputs & FATTN_OUT_DBIAS) || dbias_rows(p) >= 0) && rows >= 0 &&
                           turns >= 0 && rows <= INT64_MAX - turns - 2;
    return countable ? gpu_floats(rows + turns + 2) : -1;
}

static void rows_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p, const char *entry,
                       fattn_gpu_shape *shape)
{
    /* Deterministic runs visit as many rows for each sequence as the longest has: where a table is
     * not in order, some turns would not be cleared, and blocks would wait for them for ever. */
    const bool packed =
        (p->features & (FATTN_CU_SEQLENS_Q | FATTN_DETERMINISTIC)) == FATTN_CU_SEQLENS_Q;
    const int64_t rows = packed ? fattn_gpu_row_count(p) : p->batch * p->heads_q * p->seqlen_q;
    snprintf(shape->entry, sizeof shape->entry, "%s%s_%d", packed ? "packed_" : "", entry,
             kernel->width);
    shape->blocks = fattn_ceil_div(rows, FATTN_GPU_BACKWARD_ROWS(kernel->width));
    shape->threads = 128;
}

void fattn_gpu_backward_rows(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                             const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)t;
    rows_shape(kernel, p, "rows", shape);
    shape->blocks += shape->blocks == 0; /* the kernel also clears the counter of items */
}

void fattn_gpu_backward_dq(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                           const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)t;
    rows_shape(kernel, p, "dq", shape);
    shape->blocks = p->outputs & FATTN_OUT_DQ ? shape->blocks : 0;
}

void fattn_gpu_backward_sink(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                             const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)t;
    snprintf(shape->entry, sizeof shape->entry, "sink_%d", kernel->width);
    shape->blocks = p->outputs & FATTN_OUT_DSINK ? p->heads_q : 0;
    shape->threads = 256;
}
