/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows of backward on matrix units (matrix_backward.cuh), for f16 and bf16. There is a row
 * for each padded width and kind of unit, since the tiles depend on them: lean rows for the
 * features that most runs have, and full rows for all.
 */
#include "backends/hip/matrix_backward.h"

#include <stdio.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "backends/gpu/sizes.h"
#include "backends/hip/hip.h"
#include "core/dtype.h"

static void keys_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "matrix_backward_%s_%s_%d", kernel->run,
             fattn_dtype_name(p->dtype), kernel->width);
    shape->blocks = p->batch * p->heads_k * t->k_blocks;
    shape->threads = kernel->threads;
}

static int64_t dbias_sums(const fattn_problem *p)
{
    int64_t stride[4];
    return fattn_gpu_dbias_sums(p, stride);
}

/* Clears dbias or, if dbias is summed over axes, its sums in the workspace. */
static void clear_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                        const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const int64_t sums = dbias_sums(p);
    fattn_gpu_backward_clear(kernel, p, t, shape);
    if (sums > 0) {
        snprintf(shape->entry, sizeof shape->entry, "sums_clear");
        shape->blocks = fattn_ceil_div(sums, 256);
    }
}

static void sums_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const int64_t sums = dbias_sums(p), keys = p->dbias_stride[3] ? p->seqlen_k : 1;
    (void)kernel, (void)t;
    snprintf(shape->entry, sizeof shape->entry, "sums_store");
    shape->blocks = sums > 0 ? sums / keys : 0;
    shape->threads = 256;
}

/* If dbias is summed over axes, its sums are at the end of the workspace. */
static int64_t workspace(const fattn_kernel *row, const fattn_problem *p, const fattn_tiling *t)
{
    const int64_t bytes = fattn_gpu_backward_workspace(row, p, t), sums = gpu_floats(dbias_sums(p));
    return bytes < 0 || sums < 0 || bytes > INT64_MAX - sums ? -1 : bytes + sums;
}

/* Fields that all rows have. */
#define MATRIX_ROW(unit, lanes, variant, channels, queries, keys, waves)                          \
    .row.name = unit "_backward_" variant "_" #channels, .row.ops = FATTN_OP_BIT(FATTN_BACKWARD), \
    .row.dim_max = channels, .row.own_dtype_o = true, .row.dropout_max = FATTN_GPU_DROPOUT_MAX,   \
    .row.must_fit = true, .row.tiles = (const fattn_tile[]){{queries, keys}, {0, 0}},             \
    .row.fast_bytes = fattn_gpu_shared_bytes, .row.workspace = workspace,                         \
    .image = "matrix_backward",                                                                   \
    .phases = {clear_shape,           fattn_gpu_backward_rows, keys_shape,                        \
               fattn_gpu_backward_dq, fattn_gpu_backward_sink, sums_shape},                       \
    .width = channels, .threads = (lanes) * (waves),                                              \
    .shared = MATRIX_BACKWARD_SHARED(channels, queries, keys), .run = variant

#define LEAN .row.features = FATTN_GPU_BACKWARD_LEAN
#define FULL \
    .row.features = FATTN_KERNEL_COMMON & ~(FATTN_KERNEL_NOT_BACKWARD | FATTN_DETERMINISTIC)
#define MFMA                                                                       \
    .row.dtypes = FATTN_GPU_HALVES, .isa = HIP_GFX942, .runs = fattn_hip_has_mfma, \
    .needs = "gfx942 or gfx950"
#define MFMA_BF16                                                                             \
    .row.dtypes = FATTN_DTYPE_BIT(FATTN_BF16), .isa = HIP_GFX90A, .isa_past = HIP_GFX90A + 1, \
    .needs = "gfx90a"
#define WMMA                                                                    \
    .row.dtypes = FATTN_GPU_HALVES, .isa = HIP_WMMA, .isa_past = HIP_WMMA_PAST, \
    .needs = "gfx11, gfx1200 or gfx1201"

#define MFMA_LEAN(...) {MATRIX_ROW("mfma", 64, "lean", __VA_ARGS__), LEAN, MFMA},
#define MFMA_FULL(...) {MATRIX_ROW("mfma", 64, "full", __VA_ARGS__), FULL, MFMA},
#define MFMA_BF16_LEAN(...) {MATRIX_ROW("mfma_bf16", 64, "lean", __VA_ARGS__), LEAN, MFMA_BF16},
#define MFMA_BF16_FULL(...) {MATRIX_ROW("mfma_bf16", 64, "full", __VA_ARGS__), FULL, MFMA_BF16},
#define WMMA_LEAN(...) {MATRIX_ROW("wmma", 32, "lean", __VA_ARGS__), LEAN, WMMA},
#define WMMA_FULL(...) {MATRIX_ROW("wmma", 32, "full", __VA_ARGS__), FULL, WMMA},

/* On gfx90a there are no rows for f16, which is left to the SIMT kernels: its matrix units flush
 * subnormal f16 inputs to 0, and dS, unlike P, has no bound and so cannot be scaled up. */
const fattn_gpu_kernel fattn_hip_matrix_backward[] = {
    MATRIX_BACKWARD_MFMA(MFMA_LEAN) MATRIX_BACKWARD_MFMA(MFMA_FULL)
        MATRIX_BACKWARD_MFMA(MFMA_BF16_LEAN) MATRIX_BACKWARD_MFMA(MFMA_BF16_FULL)
            MATRIX_BACKWARD_WMMA(WMMA_LEAN) MATRIX_BACKWARD_WMMA(WMMA_FULL){.row = {.name = NULL}},
};
