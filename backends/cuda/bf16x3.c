/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows of f32 on tensor cores (bf16x3_forward.cuh, bf16x3_backward.cuh), from Ampere on:
 * what most runs are made of, with aligned rows. Decoding and the other features are left to the
 * SIMT kernels.
 */
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/mma.h"
#include "backends/gpu/args.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"

#define BF16X3_LEAN (FATTN_GPU_LEAN & ~FATTN_PAGED)

/* --- Forward ---------------------------------------------------------------------------------- */

/* Below it reading keys is what takes time, and not multiplying them. */
#define BF16X3_ROWS_MIN 17

static int64_t forward_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)p;
    return BF16X3_SHARED(fattn_gpu_kernel_of(row)->width, tile.br, tile.bc);
}

static void forward_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                          const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const int width = kernel->width;
    (void)p;
#define BF16X3_THREADS(channels, rows, keys, tiles, warps, blocks) \
    {channels, rows, keys, 32 * (warps)},
    static const struct {
        int width, rows, keys, threads;
    } shapes[] = {BF16X3_SHAPES(BF16X3_THREADS)};
    int n = 0;
    while (shapes[n].width != width || shapes[n].rows != t->br || shapes[n].keys != t->bc) {
        n++;
    }
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_forward_%d_%dx%d", width, (int)t->br,
             (int)t->bc);
    shape->blocks = t->items;
    shape->threads = shapes[n].threads;
    shape->shared = (int)BF16X3_SHARED(width, t->br, t->bc);
}

/* ...: the tiles, shapes of mma.h, most rows first. */
#define BF16X3_ROW(channels, ...)                                        \
    {                                                                    \
        .row = {.name = "bf16x3_forward_" #channels,                     \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                      \
                .dtypes = FATTN_DTYPE_BIT(FATTN_F32),                    \
                .features = BF16X3_LEAN,                                 \
                .dim_max = channels,                                     \
                .rows_min = BF16X3_ROWS_MIN,                             \
                .align = 16,                                             \
                .must_fit = true,                                        \
                .packs_groups = true,                                    \
                .split = fattn_gpu_split,                                \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},      \
                .cannot = fattn_cuda_too_large,                          \
                .fast_bytes = forward_bytes,                             \
                .workspace = fattn_cuda_parts_workspace},                \
        .image = "bf16x3_forward", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {forward_shape, fattn_gpu_combine}, .width = channels, \
    }

/* --- Backward --------------------------------------------------------------------------------- */

static int64_t rows_of(const fattn_problem *p) { return p->batch * p->heads_q * p->seqlen_q; }

static void rows_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_backward_rows_%d_%dx%d", kernel->width,
             (int)t->br, (int)t->bc);
    shape->blocks = fattn_ceil_div(rows_of(p), BF16X3_ROWS_THREADS / 2);
    shape->threads = BF16X3_ROWS_THREADS;
}

static void dq_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_shape *shape)
{
    (void)t;
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_backward_dq_%d", kernel->width);
    shape->blocks =
        p->outputs & FATTN_OUT_DQ ? fattn_ceil_div(rows_of(p), FATTN_GPU_BACKWARD_ROWS) : 0;
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
    shape->blocks = p->batch * p->heads_k * t->k_blocks;
    shape->threads = shapes[n].threads;
    shape->shared = (int)BF16X3_BACKWARD_SHARED(width, t->br, t->bc);
}

/* dQ, lse in two floats, and delta of every row. */
static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    const int width = fattn_gpu_kernel_of(row)->width;
    (void)t;
    const int64_t heads = gpu_times(p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch, p->heads_q);
    return gpu_floats(gpu_times(gpu_times(heads, p->total_q), width + 3));
}

#define BF16X3_BACKWARD \
    ((BF16X3_LEAN & ~(FATTN_DETERMINISTIC | FATTN_BATCH_INVARIANT)) | FATTN_DLSE | FATTN_ACCUMULATE)

#define BF16X3_BACKWARD_ROW(channels, ...)                                \
    {                                                                     \
        .row = {.name = "bf16x3_backward_" #channels,                     \
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),                      \
                .dtypes = FATTN_DTYPE_BIT(FATTN_F32),                     \
                .features = BF16X3_BACKWARD,                              \
                .dim_max = channels,                                      \
                .align = 16,                                              \
                .own_dtype_o = true,                                      \
                .must_fit = true,                                         \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},       \
                .fast_bytes = backward_bytes,                             \
                .workspace = backward_workspace},                         \
        .image = "bf16x3_backward", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {rows_shape, keys_shape, dq_shape}, .width = channels,  \
    }

const fattn_gpu_kernel fattn_cuda_bf16x3[] = {
    BF16X3_ROW(64, {128, 64}, {64, 64}),
    BF16X3_ROW(128, {128, 64}, {64, 32}),
    BF16X3_BACKWARD_ROW(64, {32, 128}, {32, 32}),
    BF16X3_BACKWARD_ROW(128, {32, 64}, {32, 32}),
    {.row = {.name = NULL}},
};
