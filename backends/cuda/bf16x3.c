/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows for f32 on tensor cores (bf16x3_forward.cuh, bf16x3_backward.cuh), from Ampere on.
 * They need aligned rows and have the lean features; forward also has most features of pairs.
 * Decoding and the other features are left to the SIMT kernels.
 */
#include <stdio.h>
#include <string.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/scan.h"
#include "backends/gpu/args.h"
#include "backends/gpu/packed.h"
#include "backends/gpu/sizes.h"

#define BF16X3_LEAN (FATTN_GPU_LEAN & ~FATTN_PAGED)
/* No softcap: its approximation on these kernels is not as accurate as f32. */
#define BF16X3_FULL \
    (BF16X3_LEAN | FATTN_SINK | (MMA_OF_PAIRS & ~(FATTN_SOFTCAP | FATTN_BLOCK_MASK)))

/* --- Forward ---------------------------------------------------------------------------------- */

typedef struct bf16x3_shape {
    const char *run;
    uint64_t features; /* of pairs */
    int width, rows, keys, tiles, warps, blocks;
} bf16x3_shape;
#define BF16X3_SHAPE(run, ...) {#run, __VA_ARGS__},
static const bf16x3_shape forward_shapes[] = {BF16X3_SHAPES(BF16X3_SHAPE)};

/* The row's shape with this tile. */
static const bf16x3_shape *shape_of(const fattn_kernel *row, int64_t rows, int64_t keys)
{
    const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(row);
    const bf16x3_shape *s = forward_shapes;
    while (strcmp(s->run, kernel->run) != 0 || s->width != kernel->width || s->rows != rows ||
           s->keys != keys) {
        s++;
    }
    return s;
}

static int64_t forward_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    const bf16x3_shape *const s = shape_of(row, tile.br, tile.bc);
    (void)p;
    return BF16X3_SHARED(s->features, s->width, s->rows, s->keys);
}

static void scan_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    if (fattn_cuda_scans(p, t)) {
        snprintf(shape->entry, sizeof shape->entry, "bf16x3_scan_%d", (int)t->bc);
        fattn_cuda_scan_shape(p, t, t->q_blocks, shape);
    }
}

static void forward_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                          const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const bf16x3_shape *const s = shape_of(&kernel->row, t->br, t->bc);
    (void)p;
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_%s_%d_%dx%d", s->run, s->width, s->rows,
             s->keys);
    shape->blocks = t->items;
    shape->threads = 32 * s->warps;
    shape->shared = (int)BF16X3_SHARED(s->features, s->width, s->rows, s->keys);
    shape->early = s->features != 0;
}

/* A multiprocessor holds two blocks of 64 channels, or one of more. If the blocks fill the device
 * once, splitting the keys would only add the merge. */
static fattn_split_cost forward_split(const fattn_kernel *row, const fattn_problem *p,
                                      const fattn_limits *limits)
{
    fattn_split_cost cost = fattn_cuda_split_forward(row, p, limits);
    cost.units *= row->dim_max == 64 ? 2 : 1;
    return cost;
}

/* ...: the tiles, shapes of mma.h, most rows first. */
#define BF16X3_ROW(run_, channels, bits, ...)                                                      \
    {                                                                                              \
        .row = {.name = "bf16x3_" #run_ "_" #channels,                                             \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                                                \
                .dtypes = FATTN_DTYPE_BIT(FATTN_F32),                                              \
                .features = bits,                                                                  \
                .dim_max = channels,                                                               \
                .dropout_max = FATTN_GPU_DROPOUT_MAX,                                              \
                .rows_min = MMA_DECODE_ROWS + 1,                                                   \
                .align = 16,                                                                       \
                .must_fit = true,                                                                  \
                .packs_groups = true,                                                              \
                .split = forward_split,                                                            \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},                                \
                .cannot = fattn_cuda_too_large,                                                    \
                .fast_bytes = forward_bytes,                                                       \
                .workspace = fattn_cuda_forward_workspace},                                        \
        .image = "bf16x3_forward", FATTN_CUDA_AMPERE,                                              \
        .phases = {scan_shape, forward_shape, fattn_gpu_combine}, .width = channels, .run = #run_, \
    }

/* --- Backward --------------------------------------------------------------------------------- */

static void rows_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_backward_rows_%d_%dx%d", kernel->width,
             (int)t->br, (int)t->bc);
    shape->blocks = fattn_ceil_div(fattn_gpu_row_count(p), BF16X3_ROWS_THREADS / 2);
    shape->threads = BF16X3_ROWS_THREADS;
}

static void dq_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_shape *shape)
{
    (void)t;
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_backward_dq_%d", kernel->width);
    shape->blocks =
        p->outputs & FATTN_OUT_DQ
            ? fattn_ceil_div(fattn_gpu_row_count(p), FATTN_GPU_BACKWARD_ROWS(kernel->width))
            : 0;
    shape->threads = 128;
}

static int64_t backward_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)p;
    return BF16X3_BACKWARD_SHARED(fattn_gpu_kernel_of(row)->width, tile.br, tile.bc);
}

static void keys_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const int width = kernel->width;
#define BF16X3_BACKWARD_THREADS(channels, queries, keys, warps, ...) \
    {channels, queries, keys, 32 * (warps)},
    static const struct {
        int width, queries, keys, threads;
    } shapes[] = {BF16X3_BACKWARD_SHAPES(BF16X3_BACKWARD_THREADS)};
    int n = 0;
    while (shapes[n].width != width || shapes[n].queries != t->br || shapes[n].keys != t->bc) {
        n++;
    }
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_backward_%d_%dx%d", width, (int)t->br,
             (int)t->bc);
    shape->blocks = p->heads_k * fattn_gpu_key_tiles(p, t);
    shape->threads = shapes[n].threads;
    shape->shared = (int)BF16X3_BACKWARD_SHARED(width, t->br, t->bc);
}

/* dQ, lse with its factor, and delta of every row. */
static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    const int width = fattn_gpu_kernel_of(row)->width;
    return gpu_is_countable(p, t) ? gpu_floats(gpu_times(gpu_query_rows(p), width + 3)) : -1;
}

#define BF16X3_BACKWARD_ROW(channels, ...)                               \
    {                                                                    \
        .row = {.name = "bf16x3_backward_" #channels,                    \
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),                     \
                .dtypes = FATTN_DTYPE_BIT(FATTN_F32),                    \
                .features = FATTN_GPU_BACKWARD_LEAN,                     \
                .dim_max = channels,                                     \
                .align = 16,                                             \
                .own_dtype_o = true,                                     \
                .must_fit = true,                                        \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},      \
                .fast_bytes = backward_bytes,                            \
                .workspace = backward_workspace},                        \
        .image = "bf16x3_backward", FATTN_CUDA_AMPERE,                   \
        .phases = {rows_shape, keys_shape, dq_shape}, .width = channels, \
    }

const fattn_gpu_kernel fattn_cuda_bf16x3[] = {
    BF16X3_ROW(forward, 64, BF16X3_LEAN, {128, 64}, {64, 64}),
    BF16X3_ROW(forward, 128, BF16X3_LEAN, {128, 64}, {64, 32}),
    BF16X3_ROW(full, 64, BF16X3_FULL, {128, 64}, {64, 64}),
    BF16X3_ROW(full, 128, BF16X3_FULL, {128, 64}, {64, 32}),
    BF16X3_BACKWARD_ROW(64, {32, 128}, {32, 32}),
    BF16X3_BACKWARD_ROW(128, {32, 64}, {32, 32}),
    {.row = {.name = NULL}},
};
