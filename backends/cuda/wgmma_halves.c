/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows of Hopper's forward kernels for more than 256 channels, such as latent attention
 * (wgmma_halves.cuh), for f16 and bf16: some whose kernels may cut the keys into parts, and some
 * for many rows, and for batch-invariant problems. Of each kind, the first has two blocks for an
 * item. They have the features of the lean rows of wgmma.c.
 */

#include "backends/cuda/cuda.h"
#include "backends/cuda/wgmma_rows.h"
#include "core/integer.h"
#include "core/problem.h"

#define PART_KEYS 256 /* fewer do not pay */

/* How many blocks share an item, and its rows. */
static int cluster_of(const fattn_kernel *row)
{
    return (int)(row->tiles[0].br / WGMMA_HALVES_ROWS);
}

/* An item has all heads of some queries, or all its rows are heads of one query. Where two blocks
 * share an item, the same holds for the rows of each block. */
static const char *cannot(const fattn_kernel *row, const fattn_problem *p)
{
    const char *const why = fattn_wgmma_cannot_forward(row, p);
    if (why) {
        return why; /* there may be no heads */
    }
    const int64_t group = fattn_problem_group(p), rows = row->tiles[0].br;
    if (cluster_of(row) == 1) {
        return group > rows && group % rows
                   ? "takes at most 64 query heads per key/value head, or 128"
                   : NULL;
    }
    return (group < rows ? WGMMA_HALVES_ROWS % group : group % rows)
               ? "takes 1, 2, 4 ... or 128 query heads per key/value head"
               : NULL;
}

/* The kernels that merge parts count a head's rows in blocks of 64. */
static const char *cannot_split(const fattn_kernel *row, const fattn_problem *p)
{
    const char *const why = cannot(row, p);
    const int64_t group = fattn_problem_group(p);
    return !why && group < WGMMA_HALVES_ROWS && WGMMA_HALVES_ROWS % group &&
                   fattn_problem_rows(p) > WGMMA_HALVES_ROWS
               ? "takes 1, 2, 4 ... or 128 query heads per key/value head, or at most 64 rows"
               : why;
}

/* Narrower problems are left to other rows, and problems of up to 64 rows to one block. With one
 * block or two, a row's result has the same bits, so batch-invariant problems may choose by the
 * number of queries. */
static bool pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    (void)limits;
    return (p->dim > 256 || p->dim_v > 256) &&
           (cluster_of(row) == 1 || fattn_problem_rows(p) > WGMMA_HALVES_ROWS);
}

/* The pieces into which a run cuts the keys of all sequences, or 0. As measured on an H200, that
 * pays from 4 sequences on with 128 rows each, and from 16 with fewer rows. */
static int64_t pieces_of(const fattn_kernel *row, const fattn_problem *p,
                         const fattn_limits *limits)
{
    const int64_t cluster = cluster_of(row);
    return fattn_wgmma_pieces(row, p, limits->units / cluster, cluster > 1 ? 4 : 16);
}

/* Whether there are so few blocks that cutting the keys may pay, or sequences may differ. */
static bool split_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    return pays(row, p, limits) && p->seqlen_k >= 2 * WGMMA_HALVES_KEYS &&
           ((p->seqlen_k >= 2 * PART_KEYS && pieces_of(row, p, limits) > 0) ||
            fattn_wgmma_blocks_of(p, WGMMA_HALVES_ROWS) < 3 * (double)limits->units);
}

/* A part has at least two tiles of keys, one for each warpgroup's scores. */
static fattn_split_cost split_cost(const fattn_kernel *row, const fattn_problem *p,
                                   const fattn_limits *limits)
{
    fattn_split_cost cost = fattn_cuda_split_evenly(row, p, limits);
    cost.keys = PART_KEYS;
    cost.pieces = pieces_of(row, p, limits);
    const double pairs = fattn_wgmma_blocks_of(p, row->tiles[0].br) *
                         (double)fattn_ceil_div(p->seqlen_k, 2 * WGMMA_HALVES_KEYS);
    cost.units /= cluster_of(row);
    cost.units = pairs < (double)cost.units ? (int64_t)pairs : cost.units;
    return cost;
}

static int64_t workspace(const fattn_kernel *row, const fattn_problem *p, const fattn_tiling *t)
{
    (void)row;
    (void)p;
    (void)t;
    return WGMMA_WORKSPACE;
}

/* The maps of a block's rows. */
static int maps(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    fattn_tiling own = *t;
    own.br = WGMMA_HALVES_ROWS;
    return fattn_wgmma_forward_maps(kernel, p, &own, maps);
}

static void share_items(const fattn_gpu_kernel *kernel, fattn_gpu_shape *shape)
{
    shape->cluster = cluster_of(&kernel->row);
    shape->blocks *= shape->cluster;
}

static void whole_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                        const fattn_tiling *t, fattn_gpu_shape *shape)
{
    fattn_wgmma_forward(kernel, p, t, shape);
    share_items(kernel, shape);
}

static void split_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                        const fattn_tiling *t, fattn_gpu_shape *shape)
{
    fattn_wgmma_split(kernel, p, t, shape);
    share_items(kernel, shape);
}

/* ...: fields of fattn_kernel. */
#define WGMMA_HALVES_ROW(name_, channels, channels_v, blocks, more_shared, ...)                  \
    .row = {.name = "wgmma_" #name_,                                                             \
            WGMMA_FORWARD_ROW(channels),                                                         \
            .dim_v_max = channels_v,                                                             \
            .tiles =                                                                             \
                (const fattn_tile[]){{WGMMA_HALVES_ROWS * (blocks), WGMMA_HALVES_KEYS}, {0, 0}}, \
            .fast_bytes = fattn_gpu_shared_bytes,                                                \
            __VA_ARGS__},                                                                        \
    WGMMA_KERNEL("wgmma_forward_576", channels), .maps = maps, .threads = WGMMA_THREADS(2),      \
    .shared = WGMMA_HALVES_SHARED(channels, blocks) + (more_shared), .run = #name_
#define WGMMA_HALVES_PARTS(name, channels, channels_v, blocks)                                \
    {WGMMA_HALVES_ROW(name, channels, channels_v, blocks, WGMMA_SPLIT_CONTROL,                \
                      .features = WGMMA_FEATURES, .cannot = cannot_split, .pays = split_pays, \
                      .split = split_cost, .by_lengths = true,                                \
                      .workspace = fattn_wgmma_parts_workspace),                              \
     .phases = {fattn_wgmma_cut, split_shape, fattn_wgmma_merge}},
#define WGMMA_HALVES_WHOLE(name, channels, channels_v, blocks)                              \
    {WGMMA_HALVES_ROW(name, channels, channels_v, blocks, 0,                                \
                      .features = WGMMA_FEATURES | FATTN_BATCH_INVARIANT, .cannot = cannot, \
                      .pays = pays, .workspace = workspace),                                \
     .phases = {fattn_wgmma_clear, whole_shape}},

const fattn_gpu_kernel fattn_cuda_wgmma_halves[] = {WGMMA_HALVES_SPLIT_SHAPES(
    WGMMA_HALVES_PARTS) WGMMA_HALVES_SHAPES(WGMMA_HALVES_WHOLE){.row = {.name = NULL}}};
