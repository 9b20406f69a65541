/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows that use no matrix units (simt_forward.cuh, simt_backward.cuh): plain multiply-adds,
 * for any GPU and every feature. This file chooses what a plan fixes: the slab width and the number
 * of blocks.
 */
#include <stdio.h>

#include "backends/gpu/gpu.h"
#include "backends/gpu/sizes.h"

#define SIMT_COLUMNS 64 /* keys of a tile */
#define DECODE_ROWS 16

static void name(fattn_gpu_shape *shape, const char *kernel, int64_t width)
{
    snprintf(shape->entry, sizeof shape->entry, "%s_%d", kernel, (int)width);
}

/* The narrowest slab, of 64, 128 or 256 channels, that holds `dim`; 256 if none does. */
static int64_t slab_width(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

/* --- Forward ---------------------------------------------------------------------------------- */

/* A block for each item and slab. */
static int64_t forward_blocks(const fattn_problem *p, const fattn_tiling *t, int64_t width)
{
    return t->items * fattn_ceil_div(p->dim_v, width);
}

static void forward_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                          const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    const int64_t width = slab_width(p->dim_v);
    name(shape, "simt_forward", width);
    shape->blocks = forward_blocks(p, t, width);
    shape->threads = 256;
}

static void decode_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                         const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    const int64_t width = slab_width(p->dim_v);
    name(shape, "simt_decode", width);
    shape->blocks = forward_blocks(p, t, width);
    shape->threads = 128;
    shape->merges = fattn_gpu_merges(p, t, shape->threads);
}

/* --- Backward --------------------------------------------------------------------------------- */

#define BACKWARD_THREADS 256
#define BACKWARD_SIDE 64  /* rows and keys of a tile */
#define BACKWARD_ROWS 128 /* rows per block of simt_backward_rows */
#define BACKWARD_LONE 8   /* rows per block of simt_backward_lone, if a wave has 32 threads */

static void rows_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel, (void)t;
    snprintf(shape->entry, sizeof shape->entry, "simt_backward_rows");
    shape->blocks = p->batch * p->heads_q * fattn_ceil_div(p->seqlen_q, BACKWARD_ROWS);
    shape->threads = BACKWARD_ROWS;
}

/* Launched if a bias or mask may leave a row only one key. */
static void lone_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel, (void)t;
    snprintf(shape->entry, sizeof shape->entry, "simt_backward_lone");
    shape->blocks = p->features & (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK)
                        ? fattn_ceil_div(p->batch * p->heads_q * p->seqlen_q, BACKWARD_LONE)
                        : 0;
    shape->threads = BACKWARD_THREADS;
}

/* A block for each tile of keys of each key/value head, and each slab of dk and dv. */
static void keys_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    const int64_t dim = fattn_max64(p->dim, p->dim_v), width = slab_width(dim);
    name(shape, "simt_backward_keys", width);
    shape->blocks = p->outputs & (FATTN_OUT_DK | FATTN_OUT_DV)
                        ? p->batch * p->heads_k * t->k_blocks * fattn_ceil_div(dim, width)
                        : 0;
    shape->threads = BACKWARD_THREADS;
}

/* A block for each item and slab of dq. */
static void queries_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                          const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    const int64_t width = slab_width(p->dim);
    name(shape, "simt_backward_queries", width);
    shape->blocks = p->outputs & FATTN_OUT_DQ ? t->items * fattn_ceil_div(p->dim, width) : 0;
    shape->threads = BACKWARD_THREADS;
}

/* A block for each tile of dbias. Axes that it is summed over count once. */
static int64_t bias_blocks(const fattn_problem *p)
{
    const int64_t *const stride = p->dbias_stride;
    const int64_t heads = gpu_times(stride[0] ? p->batch : 1, stride[1] ? p->heads_q : 1);
    return gpu_times(gpu_times(heads, stride[2] ? fattn_ceil_div(p->seqlen_q, BACKWARD_SIDE) : 1),
                     stride[3] ? fattn_ceil_div(p->seqlen_k, BACKWARD_SIDE) : 1);
}

static void bias_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel, (void)t;
    snprintf(shape->entry, sizeof shape->entry, "simt_backward_bias");
    shape->blocks = p->outputs & FATTN_OUT_DBIAS ? bias_blocks(p) : 0;
    shape->threads = BACKWARD_THREADS;
}

static void sink_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel, (void)t;
    snprintf(shape->entry, sizeof shape->entry, "simt_backward_sink");
    shape->blocks = p->outputs & FATTN_OUT_DSINK ? p->heads_q : 0;
    shape->threads = BACKWARD_THREADS;
}

/* Three floats for each row. -1 if this, or a number of blocks that a phase launches, overflows. */
static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    (void)row;
    const int64_t slabs = fattn_ceil_div(fattn_max64(p->dim, p->dim_v), 64);
    const int64_t key_blocks = gpu_times(gpu_times(p->batch, p->heads_k), t->k_blocks);
    const bool countable = gpu_is_countable(p, t) && gpu_times(t->items, slabs) >= 0 &&
                           gpu_times(key_blocks, slabs) >= 0 &&
                           (!(p->outputs & FATTN_OUT_DBIAS) || bias_blocks(p) >= 0);
    return countable ? gpu_floats(gpu_times(gpu_query_rows(p), 3)) : -1;
}

/* --- Tables ----------------------------------------------------------------------------------- */

/* Shared memory is static, fits any GPU, and does not depend on the problem. */
static int64_t tile_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)row, (void)p;
    return 4 * (fattn_max64(32 * (tile.br + tile.bc), 4096) + tile.br * tile.bc) +
           16 * tile.br * 2 + 16 * tile.bc;
}

static const fattn_tile decode_tiles[] = {{DECODE_ROWS, SIMT_COLUMNS}, {0, 0}};
static const fattn_tile square_tiles[] = {{64, SIMT_COLUMNS}, {0, 0}};

const fattn_gpu_kernel fattn_gpu_simt[] = {
    {
        .row = {.name = "simt_decode",
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = FATTN_GPU_FLOATS,
                .dtypes_kv = FATTN_GPU_CACHES,
                .features = FATTN_KERNEL_LAST & ~FATTN_BATCH_INVARIANT,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .rows_max = DECODE_ROWS,
                .packs_groups = true,
                .split = fattn_gpu_split,
                .tiles = decode_tiles,
                .fast_bytes = tile_bytes,
                .workspace = fattn_gpu_decode_workspace},
        .image = "simt_forward",
        .phases = {decode_shape, fattn_gpu_combine},
    },
    {
        .row = {.name = "simt_forward",
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = FATTN_GPU_FLOATS,
                .dtypes_kv = FATTN_GPU_CACHES,
                .features = FATTN_KERNEL_LAST,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .packs_groups = true,
                .split = fattn_gpu_split,
                .tiles = square_tiles,
                .fast_bytes = tile_bytes,
                .workspace = fattn_gpu_parts_workspace},
        .image = "simt_forward",
        .phases = {forward_shape, fattn_gpu_combine},
    },
    {
        .row = {.name = "simt_backward",
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),
                .dtypes = FATTN_GPU_FLOATS,
                .features = FATTN_KERNEL_LAST & ~FATTN_KERNEL_NOT_BACKWARD,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .packs_groups = true,
                .tiles = square_tiles,
                .fast_bytes = tile_bytes,
                .workspace = backward_workspace},
        .image = "simt_backward",
        .phases = {rows_shape, lone_shape, keys_shape, queries_shape, bias_shape, sink_shape},
    },
    {.row = {.name = NULL}},
};
