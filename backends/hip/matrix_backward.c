/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of backward on matrix units (matrix_backward.cuh), for f16 and bf16. One row a padded
 * width and kind of unit, since tiles go with them; lean rows for what most runs are made of, and
 * rows for everything.
 */
#include "backends/hip/matrix_backward.h"

#include <stdio.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "backends/gpu/sizes.h"
#include "backends/hip/hip.h"

#define BACKWARD_DTYPES (FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))

static void keys_shape(const fattn_problem *p, const fattn_tiling *t, const char *variant,
                       int width, int threads, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "matrix_backward_%s_%s_%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", width);
    shape->blocks = p->batch * p->heads_k * t->k_blocks;
    shape->threads = threads;
}

/* dbias, where it is summed over axes, is at the end of the workspace. */
static int64_t with_sums(const fattn_problem *p, int64_t bytes)
{
    int64_t stride[4];
    const int64_t sums = gpu_floats(fattn_gpu_sums(p, stride));
    return bytes < 0 || sums < 0 || bytes > INT64_MAX - sums ? -1 : bytes + sums;
}

static int64_t sums_of(const fattn_problem *p)
{
    int64_t stride[4];
    return fattn_gpu_sums(p, stride);
}

static void clear_shape(const fattn_problem *p, const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const int64_t sums = sums_of(p);
    fattn_gpu_backward_clear(p, t, shape);
    if (sums > 0) {
        snprintf(shape->entry, sizeof shape->entry, "sums_clear");
        shape->blocks = fattn_ceil_div(sums, 256);
    }
}

static void sums_shape(const fattn_problem *p, const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const int64_t sums = sums_of(p), keys = p->dbias_stride[3] ? p->seqlen_k : 1;
    (void)t;
    snprintf(shape->entry, sizeof shape->entry, "sums_store");
    shape->blocks = sums > 0 ? sums / keys : 0;
    shape->threads = 256;
}

#define BACKWARD_FUNCTIONS(width)                                                              \
    static int64_t backward_##width##_bytes(const fattn_problem *p, fattn_tile tile)           \
    {                                                                                          \
        (void)p;                                                                               \
        return MATRIX_BACKWARD_SHARED(width, tile.br, tile.bc);                                \
    }                                                                                          \
    static int64_t backward_##width##_workspace(const fattn_problem *p, const fattn_tiling *t) \
    {                                                                                          \
        return with_sums(p, fattn_gpu_backward_workspace_##width(p, t));                       \
    }
BACKWARD_FUNCTIONS(64)
BACKWARD_FUNCTIONS(128)
BACKWARD_FUNCTIONS(256)

#define BACKWARD_KEYS(name, variant, width, threads)                                        \
    static void name(const fattn_problem *p, const fattn_tiling *t, fattn_gpu_shape *shape) \
    {                                                                                       \
        keys_shape(p, t, variant, width, threads, shape);                                   \
    }
#define BACKWARD_SHAPE(kind, wave, width, queries, keys, waves)              \
    static const fattn_tile kind##_##width[] = {{queries, keys}, {0, 0}};    \
    BACKWARD_KEYS(kind##_lean_keys_##width, "lean", width, (wave) * (waves)) \
    BACKWARD_KEYS(kind##_full_keys_##width, "full", width, (wave) * (waves))
#define MFMA_SHAPE(...) BACKWARD_SHAPE(mfma, 64, __VA_ARGS__)
#define WMMA_SHAPE(...) BACKWARD_SHAPE(wmma, 32, __VA_ARGS__)
MATRIX_BACKWARD_MFMA(MFMA_SHAPE)
MATRIX_BACKWARD_WMMA(WMMA_SHAPE)

#define BACKWARD_FULL (FATTN_KERNEL_COMMON & ~(FATTN_GPU_NOT_BACKWARD | FATTN_DETERMINISTIC))

/* Beyond it the few pairs that are kept may be too small beside the others for f16. */
#define BACKWARD_DROPOUT_MAX 0.99

#define BACKWARD_ROW(label, kind, variant, width, bits, types, least, beyond, words)  \
    {                                                                                 \
        .row = {.name = label #variant "_" #width,                                    \
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),                                  \
                .dtypes = types,                                                      \
                .features = bits,                                                     \
                .dim_max = width,                                                     \
                .own_dtype_o = true,                                                  \
                .adds_dbias = true,                                                   \
                .dropout_max = BACKWARD_DROPOUT_MAX,                                  \
                .must_fit = true,                                                     \
                .tiles = kind##_##width,                                              \
                .fast_bytes = backward_##width##_bytes,                               \
                .workspace = backward_##width##_workspace},                           \
        .image = "matrix_backward", .isa = least, .isa_past = beyond, .needs = words, \
        .phases = {clear_shape,                                                       \
                   fattn_gpu_backward_rows_##width,                                   \
                   kind##_##variant##_keys_##width,                                   \
                   fattn_gpu_backward_dq_##width,                                     \
                   fattn_gpu_backward_sink_##width,                                   \
                   sums_shape},                                                       \
    }
#define MFMA_ROW(variant, width, bits)                                                        \
    BACKWARD_ROW("mfma_backward_", mfma, variant, width, bits, BACKWARD_DTYPES, 0x942, 0xa00, \
                 "gfx942 or gfx950")
#define MFMA_BF16_ROW(variant, width, bits)                                                      \
    BACKWARD_ROW("mfma_bf16_backward_", mfma, variant, width, bits, FATTN_DTYPE_BIT(FATTN_BF16), \
                 0x90a, 0x942, "gfx90a")
#define WMMA_ROW(variant, width, bits)                                                     \
    BACKWARD_ROW("wmma_backward_", wmma, variant, width, bits, BACKWARD_DTYPES, 0x1100, 0, \
                 "gfx11 or gfx12")

/* gfx90a takes subnormal halves for zeros, and dS, unlike P, cannot be made larger, since it has no
 * bound: f16 is left to the SIMT kernels there. */
const fattn_gpu_kernel fattn_hip_matrix_backward[] = {
    MFMA_ROW(lean, 64, FATTN_GPU_BACKWARD_LEAN),
    MFMA_ROW(lean, 128, FATTN_GPU_BACKWARD_LEAN),
    MFMA_ROW(lean, 256, FATTN_GPU_BACKWARD_LEAN),
    MFMA_ROW(full, 64, BACKWARD_FULL),
    MFMA_ROW(full, 128, BACKWARD_FULL),
    MFMA_ROW(full, 256, BACKWARD_FULL),
    MFMA_BF16_ROW(lean, 64, FATTN_GPU_BACKWARD_LEAN),
    MFMA_BF16_ROW(lean, 128, FATTN_GPU_BACKWARD_LEAN),
    MFMA_BF16_ROW(lean, 256, FATTN_GPU_BACKWARD_LEAN),
    MFMA_BF16_ROW(full, 64, BACKWARD_FULL),
    MFMA_BF16_ROW(full, 128, BACKWARD_FULL),
    MFMA_BF16_ROW(full, 256, BACKWARD_FULL),
    WMMA_ROW(lean, 64, FATTN_GPU_BACKWARD_LEAN),
    WMMA_ROW(lean, 128, FATTN_GPU_BACKWARD_LEAN),
    WMMA_ROW(full, 64, BACKWARD_FULL),
    WMMA_ROW(full, 128, BACKWARD_FULL),
    {.row = {.name = NULL}},
};
