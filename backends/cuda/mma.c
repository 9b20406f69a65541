/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of the mma.sync kernels (mma_forward.cuh), for f16 and bf16 from Ampere on. One row a
 * padded width, since tiles go with it; a lean one for what most runs are made of, and one for
 * everything.
 */
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/mma.h"
#include "core/dtype.h"

#define MMA_DTYPES (FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))
#define MMA_LEAN                                                                               \
    (FATTN_CAUSAL | FATTN_WINDOW | FATTN_SCALE | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K |     \
     FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS | FATTN_DETERMINISTIC | \
     FATTN_BATCH_INVARIANT | FATTN_CHECKED)

/* Threads of a block, which goes with the shape. */
static int threads_of(int width, const fattn_tiling *t)
{
#define MMA_THREADS(variant, channels, rows, keys, tiles, warps, blocks) \
    {channels, rows, keys, GPU_LANES * (warps)},
    enum { GPU_LANES = 32 };
    static const struct {
        int width, rows, keys, threads;
    } shapes[] = {MMA_SHAPES(MMA_THREADS)};
    int n = 0;
    while (shapes[n].width != width || shapes[n].rows != t->br || shapes[n].keys != t->bc) {
        n++;
    }
    return shapes[n].threads;
}

static void shape_of(const fattn_problem *p, const fattn_tiling *t, const char *variant, int width,
                     fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_%s_%s_%d_%dx%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", width, (int)t->br, (int)t->bc);
    shape->blocks = t->items;
    shape->threads = threads_of(width, t);
    shape->shared = (int)MMA_SHARED(width, t->br, t->bc);
}

/* What belongs to a variant and a width. */
#define MMA_FUNCTIONS(variant, width)                                                    \
    static int64_t variant##_##width##_bytes(const fattn_problem *p, fattn_tile tile)    \
    {                                                                                    \
        (void)p;                                                                         \
        return MMA_SHARED(width, tile.br, tile.bc);                                      \
    }                                                                                    \
    static void variant##_##width##_shape(const fattn_problem *p, const fattn_tiling *t, \
                                          fattn_gpu_shape *shape)                        \
    {                                                                                    \
        shape_of(p, t, #variant, width, shape);                                          \
    }
MMA_FUNCTIONS(lean, 64)
MMA_FUNCTIONS(lean, 128)
MMA_FUNCTIONS(lean, 256)
MMA_FUNCTIONS(full, 64)
MMA_FUNCTIONS(full, 128)
MMA_FUNCTIONS(full, 256)

/* The shapes of mma.h, most rows first. */
static const fattn_tile lean_64[] = {{128, 128}, {0, 0}};
static const fattn_tile lean_128[] = {{128, 64}, {0, 0}};
static const fattn_tile lean_256[] = {{128, 64}, {64, 32}, {0, 0}};
static const fattn_tile full_64[] = {{64, 64}, {0, 0}};
static const fattn_tile full_128[] = {{64, 64}, {0, 0}};
static const fattn_tile full_256[] = {{64, 32}, {0, 0}};

#define MMA_ROW(variant, width, bytes, bits)                          \
    {                                                                 \
        .row = {.name = "mma_" #variant "_" #width,                   \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                   \
                .dtypes = MMA_DTYPES,                                 \
                .features = bits,                                     \
                .dim_max = width,                                     \
                .align = bytes,                                       \
                .packs_groups = true,                                 \
                .splits_keys = true,                                  \
                .tiles = variant##_##width,                           \
                .fast_bytes = variant##_##width##_bytes,              \
                .workspace = fattn_gpu_parts_workspace},              \
        .image = "mma_forward", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {variant##_##width##_shape, fattn_gpu_combine},     \
    }

const fattn_gpu_kernel fattn_cuda_mma[] = {
    MMA_ROW(lean, 64, 16, MMA_LEAN),
    MMA_ROW(lean, 128, 16, MMA_LEAN),
    MMA_ROW(lean, 256, 16, MMA_LEAN),
    MMA_ROW(full, 64, 0, FATTN_FEATURES_ALL),
    MMA_ROW(full, 128, 0, FATTN_FEATURES_ALL),
    MMA_ROW(full, 256, 0, FATTN_FEATURES_ALL),
    {.row = {.name = NULL}},
};
