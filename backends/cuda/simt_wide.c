/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows of simt_wide.cuh: forward by plain multiply-adds with every feature, for head
 * dimensions up to 128, if a block may have enough shared memory. Other problems are left to the
 * rows of backends/gpu/simt.c.
 */
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/simt_wide.h"

static void shape_of(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_shape *shape)
{
    (void)p;
    snprintf(shape->entry, sizeof shape->entry, "simt_wide_%d", kernel->width);
    shape->blocks = t->items;
    shape->threads = WIDE_THREADS;
    shape->shared = kernel->shared;
}

/* A multiprocessor is fastest with two blocks. Keys take longer here than on tensor cores, so that
 * fewer of them are worth a part. */
static fattn_split_cost split_cost(const fattn_kernel *row, const fattn_problem *p,
                                   const fattn_limits *limits)
{
    fattn_split_cost cost = fattn_cuda_split_forward(row, p, limits);
    cost.units *= 2;
    cost.keys /= 2;
    return cost;
}

#define WIDE_ROW(channels, rows, keys, lines)                        \
    {                                                                \
        .row = {.name = "simt_wide_" #channels,                      \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                  \
                .dtypes = FATTN_GPU_FLOATS,                          \
                .dtypes_kv = FATTN_GPU_CACHES,                       \
                .features = FATTN_KERNEL_COMMON | FATTN_DESCALE,     \
                .dim_max = channels,                                 \
                .rows_min = MMA_DECODE_ROWS + 1,                     \
                .must_fit = true,                                    \
                .packs_groups = true,                                \
                .split = split_cost,                                 \
                .tiles = (const fattn_tile[]){{rows, keys}, {0, 0}}, \
                .fast_bytes = fattn_gpu_shared_bytes,                \
                .workspace = fattn_gpu_parts_workspace},             \
        .image = "simt_wide",                                        \
        FATTN_CUDA_AMPERE,                                           \
        .phases = {shape_of, fattn_gpu_combine},                     \
        .width = channels,                                           \
        .shared = WIDE_SHARED(channels, rows, keys, lines),          \
    },

const fattn_gpu_kernel fattn_cuda_wide[] = {WIDE_SHAPES(WIDE_ROW){.row = {.name = NULL}}};
