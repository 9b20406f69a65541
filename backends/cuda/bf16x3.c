/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of f32 on tensor cores (bf16x3_forward.cuh, bf16x3_backward.cuh), from Ampere on: what
 * most runs are made of, with aligned rows. Decoding and the other features are left to the SIMT
 * kernels.
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

static void forward_shape(const fattn_tiling *t, int width, fattn_gpu_shape *shape)
{
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

#define BF16X3_FUNCTIONS(width)                                                        \
    static int64_t forward_##width##_bytes(const fattn_problem *p, fattn_tile tile)    \
    {                                                                                  \
        (void)p;                                                                       \
        return BF16X3_SHARED(width, tile.br, tile.bc);                                 \
    }                                                                                  \
    static void forward_##width##_shape(const fattn_problem *p, const fattn_tiling *t, \
                                        fattn_gpu_shape *shape)                        \
    {                                                                                  \
        (void)p;                                                                       \
        forward_shape(t, width, shape);                                                \
    }
BF16X3_FUNCTIONS(64)
BF16X3_FUNCTIONS(128)

/* The shapes of mma.h, most rows first. */
static const fattn_tile forward_64[] = {{128, 64}, {64, 64}, {0, 0}};
static const fattn_tile forward_128[] = {{128, 64}, {64, 32}, {0, 0}};

#define BF16X3_ROW(width)                                                \
    {                                                                    \
        .row = {.name = "bf16x3_forward_" #width,                        \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                      \
                .dtypes = FATTN_DTYPE_BIT(FATTN_F32),                    \
                .features = BF16X3_LEAN,                                 \
                .dim_max = width,                                        \
                .rows_min = BF16X3_ROWS_MIN,                             \
                .align = 16,                                             \
                .must_fit = true,                                        \
                .packs_groups = true,                                    \
                .splits_keys = true,                                     \
                .tiles = forward_##width,                                \
                .fast_bytes = forward_##width##_bytes,                   \
                .workspace = fattn_gpu_parts_workspace},                 \
        .image = "bf16x3_forward", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {forward_##width##_shape, fattn_gpu_combine},          \
    }

/* --- Backward --------------------------------------------------------------------------------- */

static int64_t rows_of(const fattn_problem *p) { return p->batch * p->heads_q * p->seqlen_q; }

static void rows_shape(const fattn_problem *p, const fattn_tiling *t, int width,
                       fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_backward_rows_%d_%dx%d", width, (int)t->br,
             (int)t->bc);
    shape->blocks = fattn_ceil_div(rows_of(p), BF16X3_ROWS_THREADS / 2);
    shape->threads = BF16X3_ROWS_THREADS;
}

static void dq_shape(const fattn_problem *p, int width, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "bf16x3_backward_dq_%d", width);
    shape->blocks =
        p->outputs & FATTN_OUT_DQ ? fattn_ceil_div(rows_of(p), FATTN_GPU_BACKWARD_ROWS) : 0;
    shape->threads = 128;
}

static void keys_shape(const fattn_problem *p, const fattn_tiling *t, int width,
                       fattn_gpu_shape *shape)
{
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
static int64_t backward_workspace(const fattn_problem *p, int width)
{
    const int64_t heads = gpu_times(p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch, p->heads_q);
    return gpu_floats(gpu_times(gpu_times(heads, p->total_q), width + 3));
}

#define BF16X3_BACKWARD_FUNCTIONS(width)                                                       \
    static int64_t backward_##width##_bytes(const fattn_problem *p, fattn_tile tile)           \
    {                                                                                          \
        (void)p;                                                                               \
        return BF16X3_BACKWARD_SHARED(width, tile.br, tile.bc);                                \
    }                                                                                          \
    static int64_t backward_##width##_workspace(const fattn_problem *p, const fattn_tiling *t) \
    {                                                                                          \
        (void)t;                                                                               \
        return backward_workspace(p, width);                                                   \
    }                                                                                          \
    static void backward_##width##_rows(const fattn_problem *p, const fattn_tiling *t,         \
                                        fattn_gpu_shape *shape)                                \
    {                                                                                          \
        rows_shape(p, t, width, shape);                                                        \
    }                                                                                          \
    static void backward_##width##_keys(const fattn_problem *p, const fattn_tiling *t,         \
                                        fattn_gpu_shape *shape)                                \
    {                                                                                          \
        keys_shape(p, t, width, shape);                                                        \
    }                                                                                          \
    static void backward_##width##_dq(const fattn_problem *p, const fattn_tiling *t,           \
                                      fattn_gpu_shape *shape)                                  \
    {                                                                                          \
        (void)t;                                                                               \
        dq_shape(p, width, shape);                                                             \
    }
BF16X3_BACKWARD_FUNCTIONS(64)
BF16X3_BACKWARD_FUNCTIONS(128)

static const fattn_tile backward_64[] = {{32, 128}, {32, 32}, {0, 0}};
static const fattn_tile backward_128[] = {{32, 64}, {32, 32}, {0, 0}};

#define BF16X3_BACKWARD \
    ((BF16X3_LEAN & ~(FATTN_DETERMINISTIC | FATTN_BATCH_INVARIANT)) | FATTN_DLSE | FATTN_ACCUMULATE)

#define BF16X3_BACKWARD_ROW(width)                                                           \
    {                                                                                        \
        .row = {.name = "bf16x3_backward_" #width,                                           \
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),                                         \
                .dtypes = FATTN_DTYPE_BIT(FATTN_F32),                                        \
                .features = BF16X3_BACKWARD,                                                 \
                .dim_max = width,                                                            \
                .align = 16,                                                                 \
                .own_dtype_o = true,                                                         \
                .must_fit = true,                                                            \
                .tiles = backward_##width,                                                   \
                .fast_bytes = backward_##width##_bytes,                                      \
                .workspace = backward_##width##_workspace},                                  \
        .image = "bf16x3_backward", .isa = 80, .needs = "sm_80 or newer",                    \
        .phases = {backward_##width##_rows, backward_##width##_keys, backward_##width##_dq}, \
    }

const fattn_gpu_kernel fattn_cuda_bf16x3[] = {
    BF16X3_ROW(64),           BF16X3_ROW(128),         BF16X3_BACKWARD_ROW(64),
    BF16X3_BACKWARD_ROW(128), {.row = {.name = NULL}},
};
