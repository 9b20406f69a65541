/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows without matrix units (simt_forward.cuh, simt_backward.cuh): plain multiply-adds, any
 * GPU, every feature. What is the same for one plan is settled here: which width of slab, how many
 * blocks.
 */
#include <stdio.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"
#include "core/problem.h"

#define SIMT_DIM_MAX 576
#define SIMT_COLUMNS 64 /* of a tile */
#define DECODE_ROWS 16

static void name(fattn_gpu_shape *shape, const char *kernel, int64_t width)
{
    snprintf(shape->entry, sizeof shape->entry, "%s_%d", kernel, (int)width);
}

/* The narrowest slab of channels that holds `dim`, of 64, 128 and 256. */
static int64_t slab_width(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

/* --- Arguments -------------------------------------------------------------------------------- */

/* Whether rows of a tensor begin at multiples of so many bytes: by their strides, and by what is
 * promised of the pointer. */
static bool is_aligned(const fattn_problem *p, const fattn_strides *s, fattn_dtype dtype,
                       int64_t bytes)
{
    const int64_t elements = bytes / fattn_dtype_size(dtype);
    return p->pointer_alignment >= bytes && s->batch % elements == 0 && s->seq % elements == 0 &&
           s->head % elements == 0;
}

void fattn_gpu_args_fill(const fattn_problem *p, const fattn_tiling *tiling, fattn_gpu_args *args)
{
    const unsigned terms = (p->features & FATTN_SINK ? FATTN_SCORE_SCALE : 0) | /* it is natural */
                           (p->features & FATTN_SOFTCAP ? FATTN_SCORE_CAP : 0) |
                           (p->features & FATTN_BIAS ? FATTN_SCORE_BIAS : 0) |
                           (p->features & FATTN_ALIBI ? FATTN_SCORE_ALIBI : 0);
    const fattn_dtype gradient = fattn_gradient_dtype(p, p->dtype);
    const struct {
        unsigned bit;
        const fattn_strides *strides;
        fattn_dtype dtype;
    } tensors[] = {
        {FATTN_GPU_QUADS_Q, &p->q, p->dtype},         {FATTN_GPU_QUADS_K, &p->k, p->dtype},
        {FATTN_GPU_QUADS_V, &p->v, p->dtype},         {FATTN_GPU_QUADS_O, &p->o, p->dtype_o},
        {FATTN_GPU_QUADS_DOUT, &p->dout, p->dtype_o}, {FATTN_GPU_QUADS_DQ, &p->dq, gradient},
        {FATTN_GPU_QUADS_DK, &p->dk, gradient},       {FATTN_GPU_QUADS_DV, &p->dv, gradient},
    };
    args->problem = *p;
    args->tiling = *tiling;
    args->rule = fattn_score_rule_make(terms, p->scale, p->softcap);
    args->dtype_gradient = gradient;
    args->dropout_threshold =
        p->features & FATTN_DROPOUT ? fattn_dropout_threshold(p->dropout_p) : 0;
    args->group = fattn_gpu_group(p);
    args->counters = -1;
    const int64_t sums = fattn_gpu_sums(p, args->sums_stride);
    args->sums = sums > 0 ? tiling->workspace - gpu_floats(sums) : -1;
    args->quads = args->chunks = 0;
    for (size_t n = 0; n < sizeof tensors / sizeof tensors[0]; n++) {
        const fattn_strides *const strides = tensors[n].strides;
        const fattn_dtype dtype = tensors[n].dtype;
        if (is_aligned(p, strides, dtype, 4 * fattn_dtype_size(dtype))) {
            args->quads |= tensors[n].bit;
        }
        if (is_aligned(p, strides, dtype, 16)) {
            args->chunks |= tensors[n].bit;
        }
    }
}

/* --- Forward ---------------------------------------------------------------------------------- */

/* Items, and the slabs of each. */
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

/* Rows of an item that can exist. */
static int64_t item_rows(const fattn_problem *p, const fattn_tiling *t)
{
    const int64_t rows = fattn_gpu_group(p) * p->seqlen_q;
    return rows < t->br ? rows : t->br;
}

/* From so many rows on combine_rows is faster: 2,048 on an H100 (docs/notes/hopper-forward.md). */
#define MANY_ROWS 2048

void fattn_gpu_combine(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    const int64_t blocks = t->splits > 1 ? t->items / t->splits : 0, rows = item_rows(p, t);
    /* Rows of parts then lie at multiples of 16 bytes: there are two floats of each before them. */
    const bool quads = p->dim_v % 4 == 0 && rows % 2 == 0;
    if (quads && blocks * rows >= MANY_ROWS) {
        snprintf(shape->entry, sizeof shape->entry, "combine_rows");
        shape->blocks = blocks * fattn_ceil_div(rows, FATTN_GPU_COMBINE_ROWS);
    } else {
        snprintf(shape->entry, sizeof shape->entry, "combine");
        const int64_t pieces = blocks * rows * fattn_max64(fattn_ceil_div(p->dim_v, 32), 1);
        shape->blocks = fattn_ceil_div(pieces, FATTN_GPU_COMBINE_THREADS / 32);
    }
    shape->threads = FATTN_GPU_COMBINE_THREADS;
    shape->early = true;
}

fattn_split_cost fattn_gpu_split(const fattn_kernel *row, const fattn_problem *p,
                                 const fattn_limits *limits)
{
    (void)row, (void)p;
    return (fattn_split_cost){.keys = 256, .pieces = limits->parallelism};
}

/* m, l and o of every row of every item. */
int64_t fattn_gpu_parts_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    (void)row;
    if (gpu_times(gpu_times(t->items, fattn_ceil_div(p->dim_v, 64)), 2) < 0) {
        return -1;
    }
    if (t->splits == 1) {
        return 0;
    }
    return gpu_floats(gpu_times(gpu_times(t->items, item_rows(p, t)), 2 + p->dim_v));
}

int64_t fattn_gpu_decode_workspace(const fattn_kernel *row, const fattn_problem *p,
                                   const fattn_tiling *t)
{
    const int64_t parts = fattn_gpu_parts_workspace(row, p, t);
    const int64_t counters = gpu_floats(gpu_times(t->items / t->splits, 2));
    return parts <= 0                                     ? parts
           : counters < 0 || parts > INT64_MAX - counters ? -1
                                                          : parts + counters;
}

/* One block that merges waits for memory once a turn. A second kernel, whose blocks take their
 * turns side by side, instead waits for its launch, which lasts two or three turns. */
bool fattn_gpu_merges(const fattn_problem *p, const fattn_tiling *t, int threads)
{
    enum { TURNS = 3 };
    const int64_t pieces =
        item_rows(p, t) * fattn_max64(fattn_ceil_div(p->dim_v, FATTN_GPU_MERGE_CHANNELS), 1);
    const int64_t turns = gpu_times(fattn_ceil_div(pieces, threads / 32),
                                    fattn_ceil_div(t->splits, FATTN_GPU_MERGE_PARTS));
    return t->splits > 1 && turns >= 0 && turns <= TURNS;
}

/* --- Backward --------------------------------------------------------------------------------- */

#define BACKWARD_THREADS 256
#define BACKWARD_SIDE 64  /* of its tiles */
#define BACKWARD_ROWS 128 /* of a block of simt_backward_rows */
#define BACKWARD_LONE 8   /* of one of simt_backward_lone, where a wave is 32 threads */

static void rows_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel, (void)t;
    snprintf(shape->entry, sizeof shape->entry, "simt_backward_rows");
    shape->blocks = p->batch * p->heads_q * fattn_ceil_div(p->seqlen_q, BACKWARD_ROWS);
    shape->threads = BACKWARD_ROWS;
}

/* Rows of which a bias or mask may leave one key. */
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

/* Key blocks of every key/value head, and slabs of dk and dv. */
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

/* Items, and slabs of dq. */
static void queries_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                          const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    const int64_t width = slab_width(p->dim);
    name(shape, "simt_backward_queries", width);
    shape->blocks = p->outputs & FATTN_OUT_DQ ? t->items * fattn_ceil_div(p->dim, width) : 0;
    shape->threads = BACKWARD_THREADS;
}

/* Tiles of dbias. */
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

/* Three numbers a row. What is counted besides must be countable. */
static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    (void)row;
    const int64_t heads = gpu_times(p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch, p->heads_q);
    const int64_t slabs = fattn_ceil_div(fattn_max64(p->dim, p->dim_v), 64);
    const int64_t key_blocks = gpu_times(gpu_times(p->batch, p->heads_k), t->k_blocks);
    const bool countable = gpu_times(t->items, slabs) >= 0 && gpu_times(key_blocks, slabs) >= 0 &&
                           gpu_times(gpu_times(p->batch, p->heads_q), p->seqlen_q) >= 0 &&
                           (!(p->outputs & FATTN_OUT_DBIAS) || bias_blocks(p) >= 0);
    return countable ? gpu_floats(gpu_times(gpu_times(heads, p->total_q), 3)) : -1;
}

int64_t fattn_gpu_shared_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)p, (void)tile;
    return fattn_gpu_kernel_of(row)->shared;
}

/* --- Tables ----------------------------------------------------------------------------------- */

/* Shared memory is static, below what every GPU has, and the same for every problem. */
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
                .features = FATTN_KERNEL_LAST & ~FATTN_BATCH_INVARIANT,
                .dim_max = SIMT_DIM_MAX,
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
                .features = FATTN_KERNEL_LAST,
                .dim_max = SIMT_DIM_MAX,
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
                .features = FATTN_KERNEL_LAST & ~FATTN_GPU_NOT_BACKWARD,
                .dim_max = SIMT_DIM_MAX,
                .packs_groups = true,
                .tiles = square_tiles,
                .fast_bytes = tile_bytes,
                .workspace = backward_workspace},
        .image = "simt_backward",
        .phases = {rows_shape, lone_shape, keys_shape, queries_shape, bias_shape, sink_shape},
    },
    {.row = {.name = NULL}},
};
