/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows on AMD's matrix units (matrix_forward.cuh), for f16 and bf16: MFMA on gfx90a, gfx942
 * and gfx950, WMMA on gfx11 and gfx12. There is a row for each padded width, since the tiles depend
 * on it: lean rows for the features that most runs have, and full rows for all.
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
    shape->threads = 2 * (int)t->br; /* LDS is static */
}

/* Fields that all rows have. */
#define MATRIX_ROW(unit, variant, channels, rows, keys, held)                                 \
    .row.name = unit "_" variant "_" #channels, .row.ops = FATTN_OP_BIT(FATTN_FORWARD),       \
    .row.dtypes = FATTN_GPU_HALVES, .row.dim_max = channels,                                  \
    .row.dropout_max = FATTN_GPU_DROPOUT_MAX, .row.must_fit = true, .row.packs_groups = true, \
    .row.split = fattn_gpu_split, .row.tiles = (const fattn_tile[]){{rows, keys}, {0, 0}},    \
    .row.fast_bytes = fattn_gpu_shared_bytes, .row.workspace = fattn_gpu_parts_workspace,     \
    .image = "matrix_forward", .phases = {shape_of, fattn_gpu_combine}, .width = channels,    \
    .shared = MATRIX_SHARED(channels, rows, keys, held), .run = variant

#define LEAN .row.features = FATTN_GPU_LEAN, .row.align = 16
#define FULL .row.features = FATTN_KERNEL_COMMON
#define MFMA .isa = HIP_GFX90A, .runs = fattn_hip_has_mfma, .needs = "gfx90a, gfx942 or gfx950"
#define WMMA .isa = HIP_WMMA, .isa_past = HIP_WMMA_PAST, .needs = "gfx11, gfx1200 or gfx1201"

#define MFMA_LEAN(...) {MATRIX_ROW("mfma", "lean", __VA_ARGS__), LEAN, MFMA},
#define MFMA_FULL(...) {MATRIX_ROW("mfma", "full", __VA_ARGS__), FULL, MFMA},
#define WMMA_LEAN(...) {MATRIX_ROW("wmma", "lean", __VA_ARGS__), LEAN, WMMA},
#define WMMA_FULL(...) {MATRIX_ROW("wmma", "full", __VA_ARGS__), FULL, WMMA},

const fattn_gpu_kernel fattn_hip_matrix[] = {
    MATRIX_MFMA_SHAPES(MFMA_LEAN) MATRIX_MFMA_SHAPES(MFMA_FULL) MATRIX_WMMA_SHAPES(WMMA_LEAN)
        MATRIX_WMMA_SHAPES(WMMA_FULL){.row = {.name = NULL}},
};
