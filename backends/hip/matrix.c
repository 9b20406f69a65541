/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows on AMD's matrix units (matrix_forward.cuh), for f16 and bf16: MFMA on gfx90a, gfx942
 * and gfx950, WMMA on gfx11 and gfx12. One row a padded width, since tiles go with it; lean rows
 * for what most runs are made of, and rows for everything.
 */
#include <stdio.h>

#include "backends/hip/hip.h"
#include "backends/hip/matrix.h"
#include "core/dtype.h"

static void shape_of(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "matrix_%s_%s_%d", kernel->run,
             fattn_dtype_name(p->dtype), kernel->width);
    shape->blocks = t->items;
    shape->threads = 2 * (int)t->br; /* local memory is static */
}

#define MATRIX_ROW(unit, least, beyond, words, variant, bytes, bits, channels, rows, keys, held) \
    {                                                                                            \
        .row = {.name = unit "_" variant "_" #channels,                                          \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                                              \
                .dtypes = FATTN_GPU_HALVES,                                                      \
                .features = bits,                                                                \
                .dim_max = channels,                                                             \
                .align = bytes,                                                                  \
                .dropout_max = FATTN_GPU_DROPOUT_MAX,                                            \
                .must_fit = true,                                                                \
                .packs_groups = true,                                                            \
                .split = fattn_gpu_split,                                                        \
                .tiles = (const fattn_tile[]){{rows, keys}, {0, 0}},                             \
                .fast_bytes = fattn_gpu_shared_bytes,                                            \
                .workspace = fattn_gpu_parts_workspace},                                         \
        .image = "matrix_forward",                                                               \
        .isa = least,                                                                            \
        .isa_past = beyond,                                                                      \
        .needs = words,                                                                          \
        .phases = {shape_of, fattn_gpu_combine},                                                 \
        .width = channels,                                                                       \
        .shared = MATRIX_SHARED(channels, rows, keys, held),                                     \
        .run = variant,                                                                          \
    },

#define MFMA_ROW(...) \
    MATRIX_ROW("mfma", HIP_MFMA, HIP_MFMA_PAST, "gfx90a, gfx942 or gfx950", __VA_ARGS__)
#define WMMA_ROW(...) \
    MATRIX_ROW("wmma", HIP_WMMA, HIP_WMMA_PAST, "gfx11, gfx1200 or gfx1201", __VA_ARGS__)
#define MFMA_LEAN(...) MFMA_ROW("lean", 16, FATTN_GPU_LEAN, __VA_ARGS__)
#define MFMA_FULL(...) MFMA_ROW("full", 0, FATTN_KERNEL_COMMON, __VA_ARGS__)
#define WMMA_LEAN(...) WMMA_ROW("lean", 16, FATTN_GPU_LEAN, __VA_ARGS__)
#define WMMA_FULL(...) WMMA_ROW("full", 0, FATTN_KERNEL_COMMON, __VA_ARGS__)

const fattn_gpu_kernel fattn_hip_matrix[] = {
    MATRIX_MFMA_SHAPES(MFMA_LEAN) MATRIX_MFMA_SHAPES(MFMA_FULL) MATRIX_WMMA_SHAPES(WMMA_LEAN)
        MATRIX_WMMA_SHAPES(WMMA_FULL){.row = {.name = NULL}},
};
