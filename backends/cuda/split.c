/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of f32 on tensor cores (split_forward.cuh), from Ampere on: what most runs are made of,
 * with aligned rows. Decoding and the other features are left to the SIMT kernels.
 */
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/mma.h"
#include "core/dtype.h"

#define SPLIT_LEAN                                                                         \
    (FATTN_CAUSAL | FATTN_WINDOW | FATTN_SCALE | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | \
     FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_POSITIONS | FATTN_DETERMINISTIC |           \
     FATTN_BATCH_INVARIANT | FATTN_CHECKED)

/* Below it reading keys is what takes time, and not multiplying them. */
#define SPLIT_ROWS_MIN 17

static void forward_shape(const fattn_tiling *t, int width, fattn_gpu_shape *shape)
{
#define SPLIT_THREADS(channels, rows, keys, tiles, warps, blocks) \
    {channels, rows, keys, 32 * (warps)},
    static const struct {
        int width, rows, keys, threads;
    } shapes[] = {SPLIT_SHAPES(SPLIT_THREADS)};
    int n = 0;
    while (shapes[n].width != width || shapes[n].rows != t->br || shapes[n].keys != t->bc) {
        n++;
    }
    snprintf(shape->entry, sizeof shape->entry, "split_forward_%d_%dx%d", width, (int)t->br,
             (int)t->bc);
    shape->blocks = t->items;
    shape->threads = shapes[n].threads;
    shape->shared = (int)SPLIT_SHARED(width, t->br, t->bc);
}

#define SPLIT_FUNCTIONS(width)                                                         \
    static int64_t forward_##width##_bytes(const fattn_problem *p, fattn_tile tile)    \
    {                                                                                  \
        (void)p;                                                                       \
        return SPLIT_SHARED(width, tile.br, tile.bc);                                  \
    }                                                                                  \
    static void forward_##width##_shape(const fattn_problem *p, const fattn_tiling *t, \
                                        fattn_gpu_shape *shape)                        \
    {                                                                                  \
        (void)p;                                                                       \
        forward_shape(t, width, shape);                                                \
    }
SPLIT_FUNCTIONS(64)
SPLIT_FUNCTIONS(128)

/* The shapes of mma.h, most rows first. */
static const fattn_tile forward_64[] = {{128, 64}, {64, 64}, {0, 0}};
static const fattn_tile forward_128[] = {{128, 64}, {64, 32}, {0, 0}};

#define SPLIT_ROW(width)                                                \
    {                                                                   \
        .row = {.name = "split_forward_" #width,                        \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                     \
                .dtypes = FATTN_DTYPE_BIT(FATTN_F32),                   \
                .features = SPLIT_LEAN,                                 \
                .dim_max = width,                                       \
                .rows_min = SPLIT_ROWS_MIN,                             \
                .align = 16,                                            \
                .packs_groups = true,                                   \
                .splits_keys = true,                                    \
                .tiles = forward_##width,                               \
                .fast_bytes = forward_##width##_bytes,                  \
                .workspace = fattn_gpu_parts_workspace},                \
        .image = "split_forward", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {forward_##width##_shape, fattn_gpu_combine},         \
    }

const fattn_gpu_kernel fattn_cuda_split[] = {
    SPLIT_ROW(64),
    SPLIT_ROW(128),
    {.row = {.name = NULL}},
};
