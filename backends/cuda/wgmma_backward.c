/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows of Hopper's backward kernels (wgmma_backward.cuh), for f16 and bf16: lean rows, with
 * a row for each width and tile, and full rows, which have every feature. Problems that they do not
 * take run on the rows of mma.c.
 */
#include <stddef.h>
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/wgmma_rows.h"
#include "backends/gpu/args.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "core/tensors.h"

#define WGMMA_GRADIENT_ROW(channels, cannot_)                                        \
    WGMMA_ANY_ROW(channels), .ops = FATTN_OP_BIT(FATTN_BACKWARD), .cannot = cannot_, \
                             .own_dtype_o = true

#define BACKWARD_KEYS_MOST 128 /* keys of a tile, at most */

/* Unlike in forward, heads of a group may share queries, by a stride of 0. */
static const char *cannot_backward(const fattn_kernel *row, const fattn_problem *p)
{
    const int64_t queries = row->tiles[0].br;
    const double rows = (double)p->total_q + (double)p->batch * (double)queries;
    const double keys = (double)p->seqlen_k + BACKWARD_KEYS_MOST;
    if ((double)p->batch * (double)p->heads_q * rows >= WGMMA_COUNT_MAX ||
        (double)p->batch * (double)p->heads_k * keys >= WGMMA_COUNT_MAX) {
        return "takes fewer than 2^31 rows, and keys, over all heads";
    }
    if (p->features & FATTN_SOFTCAP && p->outputs & FATTN_OUT_DBIAS) {
        return "computes no dbias with a softcap";
    }
    return fattn_wgmma_cannot(row, p);
}

/* How many rows the workspace holds, in whole tiles of all heads; -1 on overflow. */
static int64_t workspace_rows(const fattn_problem *p, int64_t queries)
{
    const bool packed = p->features & FATTN_CU_SEQLENS_Q;
    const int64_t tiles = WGMMA_BACKWARD_TILES(packed, p->total_q, p->batch, queries);
    return gpu_times(gpu_times(packed ? 1 : p->batch, p->heads_q), gpu_times(tiles, queries));
}

/* How many blocks share an item. */
static int backward_blocks(const fattn_gpu_kernel *kernel)
{
    return WGMMA_BACKWARD_BLOCKS(kernel->width);
}

static int64_t backward_items(const fattn_problem *p, const fattn_tiling *t)
{
    return gpu_times(gpu_times(p->batch, p->heads_k), t->k_blocks);
}

/* How many bytes the scan kernel writes: one for each tile, and padding (SCAN_BYTES). */
static int64_t scan_bytes(const fattn_problem *p, const fattn_tiling *t)
{
    const int64_t *const stride = p->features & FATTN_BLOCK_MASK ? p->block_mask_stride
                                  : p->features & FATTN_BIAS     ? p->bias_stride
                                                                 : p->mask_stride;
    return wgmma_backward_scans(p, t->q_blocks, t->k_blocks)
               ? fattn_cuda_scan_heads(p, stride) * t->q_blocks * SCAN_BYTES(t->k_blocks)
               : 0;
}

/* Words of workspace for the bits that say which tiles the blocks of items visit, and for the
 * results of the scan; -1 on overflow. */
static int64_t skip_words(const fattn_problem *p, const fattn_tiling *t, int64_t blocks)
{
    const int64_t items = gpu_times(backward_items(p, t), blocks);
    const int64_t bits = gpu_times(items, 2 * WGMMA_BACKWARD_WORDS(t->q_blocks));
    return bits < 0 ? -1 : bits + scan_bytes(p, t) / 4;
}

/* Words of workspace for the list of sequences; 0 if there is none. */
static int64_t list_words(const fattn_problem *p, const fattn_tiling *t)
{
    return wgmma_lists(p, backward_items(p, t)) ? p->batch * (int64_t)sizeof(wgmma_listed) / 4 : 0;
}

/* dQ, lse and delta of every row, turns, the counter and the descriptions of items, and then which
 * tiles these visit, or the list of sequences. */
static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    const int64_t count = workspace_rows(p, t->br);
    const int64_t rows = gpu_times(count, fattn_gpu_kernel_of(row)->width + 2);
    const int64_t blocks = backward_blocks(fattn_gpu_kernel_of(row));
    const int64_t turns = count < 0 ? 0 : WGMMA_BACKWARD_TURNS(count / t->br * blocks);
    const int64_t items = gpu_times(backward_items(p, t), blocks * WGMMA_BACKWARD_ITEM_BYTES / 4);
    const int64_t skips = wgmma_skips(p) ? skip_words(p, t, blocks) : list_words(p, t);
    if (rows < 0 || items < 0 || skips < 0 || items > INT64_MAX / 4 || skips > INT64_MAX / 4 ||
        rows > INT64_MAX - items - skips - turns - WGMMA_BACKWARD_COUNTER) {
        return -1;
    }
    return gpu_floats(rows + turns + WGMMA_BACKWARD_COUNTER + items + skips);
}

/* Lists the sequences. */
static void list_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "wgmma_list_%s", kernel->run);
    shape->blocks = list_words(p, t) > 0;
    shape->threads = WGMMA_LISTED_MOST;
    shape->early = true;
}

/* One of the kernels before and after, which visits `rows` rows of each head or, in packed batches,
 * the rows of the workspace if these are fewer. */
static void row_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                      int64_t rows, const char *entry, fattn_gpu_shape *shape)
{
    const int64_t of_head = workspace_rows(p, t->br) / fattn_max64(p->heads_q, 1);
    const int64_t all =
        wgmma_visits_packed(p, of_head, rows) ? p->heads_q * of_head : p->batch * p->heads_q * rows;
    snprintf(shape->entry, sizeof shape->entry, "wgmma_%s_%s", entry, kernel->run);
    shape->blocks = fattn_ceil_div(all, FATTN_GPU_BACKWARD_ROWS(kernel->width));
    shape->threads = WGMMA_ROWS_THREADS;
    shape->early = true;
}

static void rows_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    row_shape(kernel, p, t, t->q_blocks * t->br, "rows", shape);
    shape->blocks += shape->blocks == 0; /* it also writes the descriptions of items */
}

static void dq_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_shape *shape)
{
    row_shape(kernel, p, t, p->seqlen_q, "dq", shape);
    shape->blocks = p->outputs & FATTN_OUT_DQ ? shape->blocks : 0;
}

static void sink_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)t;
    snprintf(shape->entry, sizeof shape->entry, "wgmma_sink_%s", kernel->run);
    shape->blocks = p->outputs & FATTN_OUT_DSINK ? p->heads_q : 0;
    shape->threads = WGMMA_SINK_THREADS;
    shape->early = true;
}

static void backward_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                           const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const bool ordered = backward_blocks(kernel) > 1 && p->features & FATTN_DETERMINISTIC;
    snprintf(shape->entry, sizeof shape->entry, "wgmma_backward_%s_%s%s",
             fattn_dtype_name(p->dtype), ordered ? "ordered_" : "", kernel->run);
    shape->cluster = backward_blocks(kernel);
    shape->blocks = backward_items(p, t) * shape->cluster;
    shape->threads = WGMMA_THREADS(2);
    shape->shared = kernel->shared;
    shape->early = true;
    shape->resident = true;
}

/* Whether dK and dV may be stored as boxes of 16-bit elements (wgmma_hands_over). */
static bool stores_boxes(const fattn_problem *p)
{
    fattn_tensor tensors[FATTN_TENSORS];
    fattn_tensors_of(p, tensors);
    return fattn_gradient_dtype(p, p->dtype) != FATTN_F32 &&
           fattn_tensor_is_aligned(p, &tensors[FATTN_TENSOR_DK], 16) &&
           fattn_tensor_is_aligned(p, &tensors[FATTN_TENSOR_DV], 16);
}

static int backward_maps(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                         const fattn_tiling *t, fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    const int keys = (int)t->bc / backward_blocks(kernel);
    maps[0] = fattn_wgmma_rows_map(p, offsetof(fattn_buffers, q), p->dim, &p->q, (int)t->br);
    maps[1] = fattn_wgmma_keys_map(p, offsetof(fattn_buffers, k), p->dim, &p->k, keys);
    maps[2] = fattn_wgmma_keys_map(p, offsetof(fattn_buffers, v), p->dim_v, &p->v, keys);
    maps[3] =
        fattn_wgmma_rows_map(p, offsetof(fattn_buffers, dout), p->dim_v, &p->dout, (int)t->br);
    if (backward_blocks(kernel) > 1) {
        return 4;
    }
    maps[4] = maps[1], maps[5] = maps[2]; /* in their places, if the kernel does not use them */
    if (stores_boxes(p)) {
        maps[4] = fattn_wgmma_keys_map(p, offsetof(fattn_buffers, dk), p->dim, &p->dk, 64);
        maps[5] = fattn_wgmma_keys_map(p, offsetof(fattn_buffers, dv), p->dim_v, &p->dv, 64);
    }
    return 6;
}

/* With 64 channels there are tiles of 64 and of 128 queries. Whether tiles of 64 pay: long
 * sequences take 1.16 times as long with them, but short ones less time, since fewer rows do not
 * exist, and a causal mask leaves out more tiles. docs/notes/hopper-backward.md has the times. */
static bool has_few_queries(const fattn_problem *p)
{
    const bool packed = p->features & FATTN_CU_SEQLENS_Q;
    const bool halved = fattn_cuda_mask_halves_keys(p);
    const int64_t queries = packed ? p->total_q / fattn_max64(p->batch, 1) : p->seqlen_q;
    const int64_t small = fattn_ceil_div(queries, 64) * 64,
                  large = fattn_ceil_div(queries, 128) * 128;
    if (queries <= 128) {
        return true;
    }
    if (packed) { /* in the mean */
        return queries <= (halved ? 256 : 200);
    }
    return p->seqlen_k <= 512 && (halved ? 8 * small <= 7 * large : 4 * small <= 3 * large);
}

static bool backward_pays(const fattn_kernel *row, const fattn_problem *p,
                          const fattn_limits *limits)
{
    (void)limits;
    const bool small = fattn_gpu_kernel_of(row)->width == 64 && row->tiles[0].br == 64;
    return !small || has_few_queries(p);
}

#define WGMMA_BACKWARD_ROW(name_, channels, queries, keys, stages)                      \
    {                                                                                   \
        .row = {.name = "wgmma_backward_" #name_,                                       \
                WGMMA_GRADIENT_ROW(channels, cannot_backward),                          \
                .features = FATTN_GPU_BACKWARD_LEAN | FATTN_SINK | FATTN_DETERMINISTIC, \
                .tiles = (const fattn_tile[]){{queries, keys}, {0, 0}},                 \
                .pays = backward_pays,                                                  \
                .fast_bytes = fattn_gpu_shared_bytes,                                   \
                .workspace = backward_workspace},                                       \
        WGMMA_KERNEL("wgmma_backward", channels),                                       \
        .phases = {list_shape, rows_shape, backward_shape, dq_shape, sink_shape},       \
        .maps = backward_maps,                                                          \
        .shared = WGMMA_BACKWARD_LEAN_SHARED(channels, queries, keys, stages),          \
        .run = #name_,                                                                  \
    },

/* --- Backward with every feature -------------------------------------------------------------- */

typedef struct backward_run {
    const char *name;
    uint64_t features; /* of pairs */
    bool dbias;        /* whether it computes dBias */
    int width, shared, stages_of_term;
} backward_run;

#define BACKWARD_RUN(run, bits, dbias, channels, queries, keys, stages, term_stages) \
    {#run,                                                                           \
     bits,                                                                           \
     dbias,                                                                          \
     channels,                                                                       \
     WGMMA_BACKWARD_FULL_SHARED(bits, channels, queries, keys, stages, term_stages), \
     term_stages},
static const backward_run backward_runs[] = {WGMMA_BACKWARD_FULL_64(
    BACKWARD_RUN) WGMMA_BACKWARD_FULL_128(BACKWARD_RUN) WGMMA_BACKWARD_FULL_256(BACKWARD_RUN)};

/* Whether a run's kernel is compiled for exactly the problem's features. Kernels for a bias need
 * one of the problem's dtype, and those that stage a bias or mask need strides that a tensor map
 * can describe. */
static bool run_knows(const backward_run *run, const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    const bool dbias = p->outputs & FATTN_OUT_DBIAS, copies = run->stages_of_term > 0;
    if (run->features != features || run->dbias != dbias) {
        return false;
    }
    return features == FATTN_BIAS
               ? p->dtype_bias == p->dtype &&
                     (!copies || fattn_wgmma_term_is_mapped(p->bias_stride, 2, 1))
               : features != FATTN_MASK || !copies ||
                     fattn_wgmma_term_is_mapped(p->mask_stride, 1, 1);
}

/* The run for exactly the problem's features, or else the one for any. */
static const backward_run *backward_run_of(const fattn_gpu_kernel *kernel, const fattn_problem *p)
{
    const backward_run *found = NULL;
    for (size_t n = 0; n < sizeof backward_runs / sizeof *backward_runs; n++) {
        const backward_run *const run = backward_runs + n;
        const bool fits = run->width == kernel->width;
        const bool knows = run_knows(run, p), any = run->features == MMA_ANY;
        found = fits && (knows || (any && !found)) ? run : found;
    }
    return found;
}

static int64_t backward_full_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)tile;
    return backward_run_of(fattn_gpu_kernel_of(row), p)->shared;
}

/* Scans a bias or mask, lists the sequences, or clears dBias: no run needs two of these. */
static void backward_begin_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                                 const fattn_tiling *t, fattn_gpu_shape *shape)
{
    if (wgmma_backward_scans(p, t->q_blocks, t->k_blocks)) {
        fattn_cuda_scan_shape(p, t, t->q_blocks, shape);
        snprintf(shape->entry, sizeof shape->entry, "wgmma_scan_%s", kernel->run);
        if (p->features & FATTN_BLOCK_MASK) { /* each thread scans a tile */
            shape->blocks = fattn_ceil_div(scan_bytes(p, t), shape->threads);
        }
        return;
    }
    if (list_words(p, t) > 0) {
        list_shape(kernel, p, t, shape);
        return;
    }
    fattn_gpu_backward_clear(kernel, p, t, shape);
    snprintf(shape->entry, sizeof shape->entry, "wgmma_clear_dbias");
}

static void backward_full_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                                const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const backward_run *const run = backward_run_of(kernel, p);
    backward_shape(kernel, p, t, shape);
    snprintf(shape->entry, sizeof shape->entry, "wgmma_backward_%s_%s_%d", run->name,
             fattn_dtype_name(p->dtype), kernel->width);
    shape->shared = run->shared;
}

/* The maps of backward, and one of the bias or mask, as in full_maps() of wgmma.c. */
static int backward_full_maps(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                              const fattn_tiling *t, fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    const int count = backward_maps(kernel, p, t, maps);
    const backward_run *const run = backward_run_of(kernel, p);
    if (run->stages_of_term == 0) {
        return count;
    }
    const int64_t *const stride = run->features == FATTN_BIAS ? p->bias_stride : p->mask_stride;
    fattn_gpu_map *const map = &maps[count];
    *map = fattn_wgmma_term_map(p, run->features);
    fattn_wgmma_axis_add(map, p->seqlen_q, stride[2], stride[2] ? (int)t->br : 1);
    fattn_wgmma_axis_add(map, p->heads_q, stride[1], 1);
    fattn_wgmma_axis_add(map, p->batch, stride[0], 1);
    return count + 1;
}

/* A block mask is scanned tile by tile, once for all heads of a group. */
static const char *cannot_backward_full(const fattn_kernel *row, const fattn_problem *p)
{
    if (!(p->features & FATTN_BLOCK_MASK)) {
        return cannot_backward(row, p);
    }
    if ((p->features & MMA_OF_PAIRS) != FATTN_BLOCK_MASK) {
        return "takes a block mask without bias, mask, ALiBi, softcap or dropout";
    }
    if (p->features & FATTN_DETERMINISTIC) {
        return "takes no block mask in deterministic runs";
    }
    const fattn_tile tile = row->tiles[0];
    if (p->block_m % tile.br ||
        p->block_n % (tile.bc / backward_blocks(fattn_gpu_kernel_of(row)))) {
        return "takes block masks whose blocks are multiples of its tile";
    }
    if (p->block_mask_stride[1] != 0 && fattn_problem_group(p) > 1) {
        return "takes block masks that the query heads of a key/value head share";
    }
    const double tiles = (double)p->batch * (double)p->heads_k *
                         (double)(p->seqlen_q / row->tiles[0].br + 1) *
                         (double)(p->seqlen_k / row->tiles[0].bc + 8);
    if (tiles >= WGMMA_COUNT_MAX) {
        return "takes fewer than 2^31 tiles of a block mask";
    }
    return cannot_backward(row, p);
}

/* A row of more channels has smaller blocks of keys, so that it could take block masks that a
 * narrower row declines. It does not pay for problems of so few channels. */
static bool backward_full_pays(const fattn_kernel *row, const fattn_problem *p,
                               const fattn_limits *limits)
{
    (void)limits;
    return !(p->features & FATTN_BLOCK_MASK) || fattn_wgmma_needs_width(row, p);
}

/* fattn_gpu_backward_workspace() checks that the rows of dbias, which a kernel clears, do not
 * overflow. */
static int64_t backward_full_workspace(const fattn_kernel *row, const fattn_problem *p,
                                       const fattn_tiling *t)
{
    const int64_t common = fattn_gpu_backward_workspace(row, p, t);
    return common < 0 ? -1 : backward_workspace(row, p, t);
}

#define WGMMA_BACKWARD_FULL_ROW(channels, keys)                                                  \
    {                                                                                            \
        .row = {.name = "wgmma_backward_full_" #channels,                                        \
                WGMMA_GRADIENT_ROW(channels, cannot_backward_full),                              \
                .features = FATTN_KERNEL_COMMON & ~FATTN_KERNEL_NOT_BACKWARD,                    \
                .adds_dbias = true,                                                              \
                .dropout_max = FATTN_GPU_DROPOUT_MAX,                                            \
                .tiles = (const fattn_tile[]){{64, keys}, {0, 0}},                               \
                .pays = backward_full_pays,                                                      \
                .fast_bytes = backward_full_bytes,                                               \
                .workspace = backward_full_workspace},                                           \
        WGMMA_KERNEL("wgmma_backward_full_" #channels, channels),                                \
        .phases = {backward_begin_shape, rows_shape, backward_full_shape, dq_shape, sink_shape}, \
        .maps = backward_full_maps, .run = "full_" #channels,                                    \
    }

const fattn_gpu_kernel fattn_cuda_wgmma_backward[] = {WGMMA_BACKWARD_SHAPES(WGMMA_BACKWARD_ROW)
                                                          WGMMA_BACKWARD_PAIRS(WGMMA_BACKWARD_ROW)
                                                              WGMMA_BACKWARD_FULL_ROW(64, 128),
                                                      WGMMA_BACKWARD_FULL_ROW(128, 128),
                                                      WGMMA_BACKWARD_FULL_ROW(256, 128),
                                                      {.row = {.name = NULL}}};
