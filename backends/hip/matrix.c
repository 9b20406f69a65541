/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of the kernels on AMD's matrix units (matrix_forward.cuh), for f16 and bf16: MFMA on
 * gfx90a, gfx942 and gfx950, WMMA on gfx11 and gfx12. One row a padded width, since tiles go with
 * it; lean rows for what most runs are made of, and rows for everything.
 */
#include <stdio.h>

#include "backends/hip/hip.h"
#include "backends/hip/matrix.h"
#include "core/dtype.h"

#define MATRIX_DTYPES (FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))

static void shape_of(const fattn_problem *p, const fattn_tiling *t, const char *variant, int width,
                     fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "matrix_%s_%s_%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", width);
    shape->blocks = t->items;
    shape->threads = 2 * (int)t->br; /* local memory is static */
}

#define MATRIX_PHASE(variant, width)                                                     \
    static void variant##_##width##_shape(const fattn_problem *p, const fattn_tiling *t, \
                                          fattn_gpu_shape *shape)                        \
    {                                                                                    \
        shape_of(p, t, #variant, width, shape);                                          \
    }
MATRIX_PHASE(lean, 64)
MATRIX_PHASE(lean, 128)
MATRIX_PHASE(lean, 256)
MATRIX_PHASE(full, 64)
MATRIX_PHASE(full, 128)
MATRIX_PHASE(full, 256)

/* What belongs to a shape of either unit. */
#define MATRIX_FUNCTIONS(unit, width, rows, keys, held)                            \
    static const fattn_tile unit##_##width##_tiles[] = {{rows, keys}, {0, 0}};     \
    static int64_t unit##_##width##_bytes(const fattn_problem *p, fattn_tile tile) \
    {                                                                              \
        (void)p;                                                                   \
        return MATRIX_SHARED(width, tile.br, tile.bc, held);                       \
    }
#define MFMA_FUNCTIONS(...) MATRIX_FUNCTIONS(mfma, __VA_ARGS__)
#define WMMA_FUNCTIONS(...) MATRIX_FUNCTIONS(wmma, __VA_ARGS__)
MATRIX_MFMA_SHAPES(MFMA_FUNCTIONS)
MATRIX_WMMA_SHAPES(WMMA_FUNCTIONS)

/* Beyond it the few pairs that are kept may be too small beside the others for f16. */
#define MATRIX_DROPOUT_MAX 0.99

#define MATRIX_ROW(unit, variant, width, bytes, bits)             \
    {                                                             \
        .row = {.name = #unit "_" #variant "_" #width,            \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),               \
                .dtypes = MATRIX_DTYPES,                          \
                .features = bits,                                 \
                .dim_max = width,                                 \
                .align = bytes,                                   \
                .dropout_max = MATRIX_DROPOUT_MAX,                \
                .must_fit = true,                                 \
                .packs_groups = true,                             \
                .splits_keys = true,                              \
                .tiles = unit##_##width##_tiles,                  \
                .fast_bytes = unit##_##width##_bytes,             \
                .workspace = fattn_gpu_parts_workspace},          \
        .image = "matrix_forward", unit##_processors,             \
        .phases = {variant##_##width##_shape, fattn_gpu_combine}, \
    }
#define mfma_processors .isa = 0x90a, .isa_past = 0x1000, .needs = "gfx90a, gfx942 or gfx950"
#define wmma_processors .isa = 0x1100, .needs = "gfx11 or gfx12"

#define MATRIX_ROWS(unit)                                    \
    MATRIX_ROW(unit, lean, 64, 16, FATTN_GPU_LEAN),          \
        MATRIX_ROW(unit, lean, 128, 16, FATTN_GPU_LEAN),     \
        MATRIX_ROW(unit, lean, 256, 16, FATTN_GPU_LEAN),     \
        MATRIX_ROW(unit, full, 64, 0, FATTN_KERNEL_COMMON),  \
        MATRIX_ROW(unit, full, 128, 0, FATTN_KERNEL_COMMON), \
        MATRIX_ROW(unit, full, 256, 0, FATTN_KERNEL_COMMON)

const fattn_gpu_kernel fattn_hip_matrix[] = {
    MATRIX_ROWS(mfma),
    MATRIX_ROWS(wmma),
    {.row = {.name = NULL}},
};
