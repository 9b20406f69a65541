/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows of Hopper's kernels (wgmma_forward.cuh, wgmma_backward.cuh), for f16 and bf16. One
 * row a padded width. What they do not take runs on the rows of mma.c.
 */
#include "backends/cuda/wgmma.h"

#include <stddef.h>
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/gpu/args.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"

#define WGMMA_DTYPES (FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))

/* Rows of mma.c skip what block masks rule out, and so does forward here. What a batch-invariant
 * run is computed by must not depend on how long its sequences are, and these rows are for long
 * ones. */
#define WGMMA_NOT (FATTN_BLOCK_MASK | FATTN_BATCH_INVARIANT)
#define WGMMA_FEATURES ((FATTN_GPU_LEAN | FATTN_SINK) & ~WGMMA_NOT)
#define WGMMA_FULL_FEATURES ((FATTN_KERNEL_COMMON & ~WGMMA_NOT) | FATTN_BLOCK_MASK)

/* What rows have in common: of all, of forward, of backward, and around a row. */
#define WGMMA_ANY_ROW(channels) \
    .dtypes = WGMMA_DTYPES, .dim_max = channels, .align = 16, .must_fit = true
#define WGMMA_FORWARD_ROW(channels) \
    WGMMA_ANY_ROW(channels), .ops = FATTN_OP_BIT(FATTN_FORWARD), .packs_groups = true
#define WGMMA_GRADIENT_ROW(channels, cannot_)                                        \
    WGMMA_ANY_ROW(channels), .ops = FATTN_OP_BIT(FATTN_BACKWARD), .cannot = cannot_, \
                             .own_dtype_o = true
#define WGMMA_KERNEL(image_, channels) \
    .image = image_, .isa = 90, .isa_past = 100, .needs = "sm_90", .width = channels

static int64_t workspace(const fattn_kernel *row, const fattn_problem *p, const fattn_tiling *t)
{
    (void)row;
    const int64_t list = p->batch * (int64_t)sizeof(wgmma_listed);
    return WGMMA_WORKSPACE + (wgmma_orders(p, t->items) ? (list + 255) / 256 * 256 : 0);
}

/* --- What they take --------------------------------------------------------------------------- */

enum {
    GROUP_MAX = 128,    /* query heads of a key/value head: a tile has all of a query */
    ROWS_MAX = 1 << 30, /* queries, and keys */
    BLOCKS_MIN = 80, /* fewer leave so much of a GPU idle that rows which split keys are faster */
    SPLIT_KEYS_MIN = 128,
    SPLIT_KEYS_LONG = 1024
};
#define STRIDE_MAX (INT64_C(1) << 39) /* elements */
#define ITEMS_MAX 0x1p31

static int64_t group_of(const fattn_problem *p) { return p->heads_k ? p->heads_q / p->heads_k : 1; }

static bool has_long_stride(const fattn_strides *s)
{
    return s->batch >= STRIDE_MAX || s->seq >= STRIDE_MAX || s->head >= STRIDE_MAX;
}

/* Tensor maps have no axis of stride 0. Where heads or sequences share what they read, the kernel
 * leaves the axis out; rows that share it are not worth that. */
static const char *cannot(const fattn_kernel *row, const fattn_problem *p)
{
    if (group_of(p) > GROUP_MAX) {
        return "takes 128 query heads of a key/value head at most";
    }
    if (p->seqlen_q >= ROWS_MAX || p->total_q >= ROWS_MAX || p->seqlen_k >= ROWS_MAX ||
        p->total_k >= ROWS_MAX) {
        return "counts queries and keys below 2^30";
    }
    if ((double)p->batch * (double)p->heads_k * (double)(group_of(p) * p->seqlen_q / 64 + 1) >=
        ITEMS_MAX) {
        return "counts tiles below 2^31";
    }
    if (p->q.seq == 0 || p->k.seq == 0 || p->v.seq == 0) {
        return "copies no rows of stride 0";
    }
    if (p->q.head == 0 && group_of(p) > 1) {
        return "copies no queries that the heads of a group share";
    }
    if (has_long_stride(&p->q) || has_long_stride(&p->k) || has_long_stride(&p->v)) {
        return "copies by strides below 2^40 bytes";
    }
    if (p->features & FATTN_PAGED &&
        WGMMA_PIECE(p->page_size, row->tiles[0].bc) < WGMMA_PIECE_LEAST) {
        return "copies pages of a multiple of 8 keys";
    }
    if (!(row->features & MMA_OF_PAIRS) && fattn_score_rule_make(0, p->scale, 0).terms) {
        return "takes scales above 0 alone";
    }
    return NULL;
}

static bool sequences_differ(const fattn_problem *p)
{
    return p->features & (FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q |
                          FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS);
}

/* Whether there are blocks of rows enough, and most of them full. */
static bool pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    (void)row, (void)limits;
    const int64_t rows = group_of(p) * p->seqlen_q;
    return rows > 64 &&
           (double)p->batch * (double)p->heads_k * (double)((rows + 127) / 128) >= BLOCKS_MIN;
}

/* Of rows for short sequences: a group's heads are rows of one block. */
static const char *cannot_short(const fattn_kernel *row, const fattn_problem *p)
{
    return group_of(p) > row->tiles[0].br ? "takes 64 query heads of a key/value head at most"
                                          : cannot(row, p);
}

/* Whether the sequences of a packed batch are short in the mean: in tiles of more rows most rows
 * would not exist. */
static bool are_short_in_mean(const fattn_problem *p)
{
    enum { KEYS_MEAN = 200 };
    return p->features & FATTN_CU_SEQLENS_K && !(p->features & FATTN_PAGED) &&
           p->total_k <= KEYS_MEAN * p->batch;
}

/* Whether items are so short that to begin and to end them takes most of the time: a row sees
 * keys_short keys at most. Longer ones pay where there are about as many blocks as multiprocessors,
 * so that keys need not be cut. Past 64 channels a multiprocessor has no more warpgroups of these
 * rows than of others, and only few blocks pay, or heads that fill no more than one block. */
static bool are_short(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits,
                      int64_t keys_short)
{
    enum { KEYS_MAX = 1024 };
    const int64_t keys = fattn_cuda_sees_half(p) ? p->seqlen_k / 2 : p->seqlen_k;
    const int64_t rows = group_of(p) * p->seqlen_q;
    const double units = (double)limits->units;
    const double blocks = (double)p->batch * (double)p->heads_k * (double)((rows + 63) / 64);
    const bool few = blocks <= 1.5 * units;
    return rows > MMA_DECODE_ROWS &&
           (are_short_in_mean(p) ||
            (keys <= keys_short ? few || rows <= 64 || fattn_gpu_kernel_of(row)->width == 64
                                : keys <= KEYS_MAX && few && blocks >= 0.4 * units));
}

static bool short_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    return are_short(row, p, limits, 320);
}

/* Of rows that split keys: a group's heads are rows of one block, as they are for what merges. */
static const char *cannot_split(const fattn_kernel *row, const fattn_problem *p)
{
    const int64_t group = group_of(p);
    return group < 1 || WGMMA_SPLIT_ROWS % group ? "takes groups of 1, 2, 4 .. 128 query heads"
                                                 : cannot(row, p);
}

/* Keys that take as long as the rest of a part does. Where a head has several blocks of rows, its
 * keys come from L2, and sums that are written and read again count for more. */
static int64_t part_keys(const fattn_problem *p)
{
    return group_of(p) * p->seqlen_q > WGMMA_SPLIT_ROWS ? 640 : 256;
}

static fattn_split_cost split_cost(const fattn_kernel *row, const fattn_problem *p,
                                   const fattn_limits *limits)
{
    fattn_split_cost cost = fattn_cuda_split_evenly(row, p, limits);
    cost.keys = part_keys(p);
    return cost;
}

/* Rows of a tile of the kernel that takes the problem whole, or 0 where it has other channels than
 * `width`. */
static int64_t whole_rows(const fattn_problem *p, int width)
{
#define ROWS_OF_FIRST(name, channels, channels_v, warpgroups, ...) \
    if (p->dim <= (channels) && p->dim_v <= (channels_v)) {        \
        return width == (channels) ? 64 * (warpgroups) : 0;        \
    }
    WGMMA_SHAPES(ROWS_OF_FIRST)
    return 0;
}

/* Whether so many multiprocessors idle at the end of a run of that kernel that parts of keys end
 * sooner, where all rows see about as many. Those that are left then run 1.15 times as fast. */
static bool leaves_idle(const fattn_kernel *row, const fattn_problem *p, int64_t units)
{
    enum { PARTS_MAX = 8 };
    const int64_t keys = p->seqlen_k, rest = part_keys(p);
    const int64_t rows = whole_rows(p, fattn_gpu_kernel_of(row)->width);
    if (rows == 0) {
        return false;
    }
    const int64_t blocks = p->batch * p->heads_k * fattn_ceil_div(group_of(p) * p->seqlen_q, rows);
    const double whole =
        (double)(fattn_ceil_div(blocks, units) * rows) * (double)keys / WGMMA_SPLIT_ROWS;
    const bool banded = p->window_right >= 0 && p->seqlen_q > keys / 8;
    const bool alike = !banded && p->window_left < 0 && (!sequences_differ(p) || p->batch == 1);
    bool idle = false;
    for (int parts = 2; alike && parts <= PARTS_MAX; parts++) {
        const int64_t rounds = fattn_ceil_div(fattn_kernel_blocks(row, p) * parts, units);
        idle = idle || 1.15 * (double)(rounds * (keys / parts + rest) + rest) < whole;
    }
    return idle;
}

/* Whether a head has one block of rows, so that memory bounds the run, or blocks are few for so
 * many multiprocessors. With short sequences the kernel that takes them whole does as well, unless
 * its tile has more rows than the head. Decoding takes fewer rows. */
static bool split_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    const int64_t rows = group_of(p) * p->seqlen_q, keys = p->seqlen_k;
    const bool one = rows <= WGMMA_SPLIT_ROWS &&
                     (keys >= SPLIT_KEYS_LONG ||
                      whole_rows(p, fattn_gpu_kernel_of(row)->width) > WGMMA_SPLIT_ROWS);
    return rows > MMA_DECODE_ROWS && keys >= SPLIT_KEYS_MIN &&
           (one || !pays(row, p, limits) || leaves_idle(row, p, limits->units));
}

/* --- Launches --------------------------------------------------------------------------------- */

/* An axis that is not left out. */
static void add_axis(fattn_gpu_map *map, int64_t extent, int64_t stride, int box)
{
    const bool shared = stride == 0;
    map->extent[map->axes] = shared || extent < 1 ? 1 : (uint64_t)extent;
    map->stride[map->axes - 1] = shared ? 16 : map->bytes * (uint64_t)stride;
    map->box[map->axes] = (uint32_t)box;
    map->axes++;
}

static fattn_gpu_map map_of(size_t buffer, int64_t dim)
{
    fattn_gpu_map map = {
        .buffer = buffer, .bytes = 2, .axes = 1, .extent = {(uint64_t)dim}, .box = {64}};
    return map;
}

/* Channels, rows, heads, sequences; these are one where rows are packed. */
static fattn_gpu_map plain_map(size_t buffer, int64_t dim, int64_t rows, int64_t heads,
                               int64_t batch, const fattn_strides *s, int box)
{
    fattn_gpu_map map = map_of(buffer, dim);
    add_axis(&map, rows, s->seq, box);
    add_axis(&map, heads, s->head, 1);
    add_axis(&map, batch, s->batch, 1);
    return map;
}

/* Keys or values. */
static fattn_gpu_map keys_map(const fattn_problem *p, size_t buffer, int64_t dim,
                              const fattn_strides *s, int keys)
{
    const int64_t batch = p->features & FATTN_CU_SEQLENS_K ? 1 : p->batch;
    if (p->features & FATTN_PAGED) { /* a page's keys, heads, pages */
        return plain_map(buffer, dim, p->page_size, p->heads_k, p->num_pages, s,
                         (int)WGMMA_PIECE(p->page_size, keys));
    }
    return plain_map(buffer, dim, p->total_k, p->heads_k, batch, s, keys);
}

/* Queries or dO, head by head. */
static fattn_gpu_map rows_map(const fattn_problem *p, size_t buffer, int64_t dim,
                              const fattn_strides *s, int rows)
{
    const int64_t batch = p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch;
    return plain_map(buffer, dim, p->total_q, p->heads_q, batch, s, rows);
}

/* Queries have an axis more: the heads of a group, which lie side by side in a tile. */
static int maps_of(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                   fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    (void)kernel;
    const int64_t group = group_of(p);
    maps[0] = map_of(offsetof(fattn_buffers, q), p->dim);
    add_axis(&maps[0], group, p->q.head, (int)group);
    add_axis(&maps[0], p->total_q, p->q.seq, (int)(t->br / group));
    add_axis(&maps[0], p->heads_k, group * p->q.head, 1);
    add_axis(&maps[0], p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch, p->q.batch, 1);
    maps[1] = keys_map(p, offsetof(fattn_buffers, k), p->dim, &p->k, (int)t->bc);
    maps[2] = keys_map(p, offsetof(fattn_buffers, v), p->dim_v, &p->v, (int)t->bc);
    return 3;
}

/* As wgmma_counts() has it. */
static bool counts(const fattn_problem *p)
{
    return sequences_differ(p) || p->window_left >= 0 || p->window_right >= 0;
}

static void clear_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                        const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    snprintf(shape->entry, sizeof shape->entry, "clear");
    shape->blocks = counts(p) && t->items > 0;
    shape->threads = wgmma_orders(p, t->items) ? WGMMA_ORDERED_MOST : 32;
}

static void forward_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                          const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "wgmma_%s_%s",
             p->dtype == FATTN_F16 ? "f16" : "bf16", kernel->run);
    shape->blocks = t->items;
    shape->threads = WGMMA_THREADS((int)t->br / 64);
    shape->shared = kernel->shared;
    shape->early = true;
    shape->resident = true;
}

static void lean_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    forward_shape(kernel, p, t, shape);
    snprintf(shape->onto, sizeof shape->onto, "wgmma_onto_%s_%s",
             p->dtype == FATTN_F16 ? "f16" : "bf16", kernel->run);
}

/* Items are alike, or as many as blocks. */
static void split_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                        const fattn_tiling *t, fattn_gpu_shape *shape)
{
    forward_shape(kernel, p, t, shape);
    shape->resident = !sequences_differ(p);
}

/* Of rows that take keys whole. */
#define WGMMA_WHOLE_ROW(cannot_, pays_, shape_, name_, channels, channels_v, warpgroups, keys, \
                        stages)                                                                \
    {                                                                                          \
        .row = {.name = "wgmma_" #name_,                                                       \
                WGMMA_FORWARD_ROW(channels),                                                   \
                .features = WGMMA_FEATURES,                                                    \
                .dim_v_max = channels_v,                                                       \
                .tiles = (const fattn_tile[]){{64 * (warpgroups), keys}, {0, 0}},              \
                .cannot = cannot_,                                                             \
                .pays = pays_,                                                                 \
                .fast_bytes = fattn_gpu_shared_bytes,                                          \
                .workspace = workspace},                                                       \
        WGMMA_KERNEL("wgmma_forward", channels),                                               \
        .phases = {clear_shape, shape_},                                                       \
        .maps = maps_of,                                                                       \
        .shared = WGMMA_SHARED(channels, channels_v, warpgroups, keys, stages),                \
        .run = #name_,                                                                         \
    },
#define WGMMA_ROW(...) WGMMA_WHOLE_ROW(cannot, pays, lean_shape, __VA_ARGS__)
#define WGMMA_SHORT_ROW(...) WGMMA_WHOLE_ROW(cannot_short, short_pays, forward_shape, __VA_ARGS__)

#define WGMMA_SPLIT_ROW(name_, channels, channels_v, warpgroups, keys, stages)                  \
    {                                                                                           \
        .row = {.name = "wgmma_" #name_,                                                        \
                WGMMA_FORWARD_ROW(channels),                                                    \
                .features = WGMMA_FEATURES,                                                     \
                .tiles = (const fattn_tile[]){{WGMMA_SPLIT_ROWS, keys}, {0, 0}},                \
                .cannot = cannot_split,                                                         \
                .pays = split_pays,                                                             \
                .split = split_cost,                                                            \
                .fast_bytes = fattn_gpu_shared_bytes,                                           \
                .workspace = fattn_cuda_parts_workspace},                                       \
        WGMMA_KERNEL("wgmma_forward", channels),                                                \
        .phases = {split_shape, fattn_gpu_combine},                                             \
        .maps = maps_of,                                                                        \
        .shared =                                                                               \
            WGMMA_SHARED(channels, channels_v, warpgroups, keys, stages) + WGMMA_SPLIT_CONTROL, \
        .run = #name_,                                                                          \
    },

/* --- Forward with every feature --------------------------------------------------------------- */

typedef struct full_run {
    const char *name;
    uint64_t features; /* of pairs */
    int width, rows, shared;
} full_run;

#define FULL_RUN(run, bits, channels, warpgroups, keys, ...) \
    {#run, bits, channels, 64 * (warpgroups),                \
     WGMMA_FULL_SHARED(bits, channels, warpgroups, keys, __VA_ARGS__)},
static const full_run full_runs[] = {WGMMA_FULL_64(FULL_RUN) WGMMA_FULL_128(FULL_RUN)
                                         WGMMA_FULL_256(FULL_RUN)};

/* Whether a tensor map takes a bias or mask of so many bytes an element. The address is the
 * kernel's question. */
static bool maps_term(const int64_t stride[4], int64_t bytes, int64_t group)
{
    bool maps = stride[3] == 1;
    for (int n = 0; n < 3; n++) {
        maps = maps && stride[n] * bytes % 16 == 0 && stride[n] < STRIDE_MAX / group;
    }
    return maps;
}

/* The features of pairs that the run's kernel knows to be there, and no others. */
static uint64_t known_features(const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    const bool tame = p->scale > 0x1p-100 && p->scale < 0x1p100; /* and so times log2 e */
    const bool rows = features == FATTN_BIAS ? tame && p->dtype_bias == p->dtype &&
                                                   maps_term(p->bias_stride, 2, group_of(p))
                      : features == FATTN_MASK ? maps_term(p->mask_stride, 1, group_of(p))
                                               : true;
    return rows ? features : MMA_ANY;
}

/* The run that takes the problem by tiles of so many rows, or NULL. */
static const full_run *run_of(const fattn_gpu_kernel *kernel, const fattn_problem *p, int64_t rows)
{
    const uint64_t features = known_features(p);
    const full_run *any = NULL;
    for (size_t n = 0; n < sizeof full_runs / sizeof *full_runs; n++) {
        const full_run *const run = full_runs + n;
        const bool fits = run->width == kernel->width && run->rows == rows && group_of(p) <= rows;
        if (fits && run->features == features) {
            return run;
        }
        any = fits && run->features == MMA_ANY ? run : any;
    }
    return any;
}

/* Tiles of queries of all heads, as the kernel has them: of whole queries. */
static int64_t full_items(const fattn_problem *p, const fattn_tiling *t)
{
    const int64_t queries = t->br / group_of(p);
    return gpu_times(gpu_times(p->batch, p->heads_k), fattn_ceil_div(p->seqlen_q, queries));
}

/* Whether the run is one for short sequences. If a bias or mask hides keys, a row sees fewer than
 * there are. */
static bool full_is_short(const fattn_kernel *row, const fattn_problem *p,
                          const fattn_limits *limits)
{
    return run_of(fattn_gpu_kernel_of(row), p, 64) && are_short(row, p, limits, 512);
}

static double full_cost(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits,
                        fattn_tile tile)
{
    return (tile.br == 64) == full_is_short(row, p, limits) ? 0 : 1;
}

static int64_t full_fast_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    const full_run *const run = run_of(fattn_gpu_kernel_of(row), p, tile.br);
    return run ? run->shared : -1;
}

#define FULL_LOOKS (FATTN_BIAS | FATTN_MASK | FATTN_BLOCK_MASK) /* that a kernel before looks at */

/* A block mask beside another feature of pairs runs on the rows of mma.c, which skip what it rules
 * out too. */
static const char *cannot_full(const fattn_kernel *row, const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    const double tiles = (double)p->batch * (double)p->heads_k *
                         (double)(group_of(p) * p->seqlen_q / 64 + 1) *
                         (double)(p->seqlen_k / row->tiles[0].bc + 8);
    if (features & FATTN_BLOCK_MASK && features != FATTN_BLOCK_MASK) {
        return "takes a block mask without a feature of single pairs";
    }
    if (features & FULL_LOOKS && tiles >= ITEMS_MAX) {
        return "counts tiles of a bias or mask below 2^31";
    }
    return cannot(row, p);
}

/* Whether a row of half as many channels would be too narrow. */
static bool needs_width(const fattn_kernel *row, const fattn_problem *p)
{
    const int half = fattn_gpu_kernel_of(row)->width / 2;
    return p->dim > half || p->dim_v > half;
}

/* Whether these kernels take less time than those of mma.c although their blocks leave most
 * multiprocessors idle. Theirs is proportional to the keys; that of mma.c, which cuts keys into
 * parts and merges them, to keys times blocks, beside a constant. Where the two lines meet was
 * fitted to runs of up to 95 blocks (docs/notes/hopper-forward.md). */
static bool few_pay(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    const bool narrow = fattn_gpu_kernel_of(row)->width == 64;
    const int64_t rows = group_of(p) * p->seqlen_q;
    const double blocks = (double)p->batch * (double)p->heads_k * (double)((rows + 127) / 128);
    const double enough = (double)limits->units * (narrow ? 0.36 : 0.33);
    return rows > 64 && (double)p->seqlen_k * (enough - blocks) <= (narrow ? 32e3 : 42e3);
}

/* The same where heads have so few rows that half of a block is empty. Up to 128 channels this pays
 * where there are keys for more than one tile. */
static bool few_rows_pay(const fattn_kernel *row, const fattn_problem *p)
{
    const int64_t rows = group_of(p) * p->seqlen_q;
    return rows > MMA_DECODE_ROWS && rows <= 64 &&
           (p->seqlen_k > 128 || (fattn_gpu_kernel_of(row)->width > 128 && needs_width(row, p))) &&
           (double)p->batch * (double)p->heads_k >= BLOCKS_MIN;
}

/* Where blocks of a block mask are no multiples of a tile, most tiles are kept in part. These are
 * slow: 3 times the time of the rows of mma.c. */
static bool full_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    const fattn_tile *tile = row->tiles;
    while (full_fast_bytes(row, p, *tile) < 0) {
        tile++;
    }
    const bool blocks = p->features & FATTN_BLOCK_MASK;
    const bool whole =
        !blocks || (p->block_m * group_of(p) % tile->br == 0 && p->block_n % tile->bc == 0);
    return whole && (few_pay(row, p, limits) || few_rows_pay(row, p) || pays(row, p, limits) ||
                     full_is_short(row, p, limits));
}

/* The counter, and the order of sequences, or what a bias, a mask or a block mask leaves of each
 * item's keys. */
static int64_t full_workspace(const fattn_kernel *row, const fattn_problem *p,
                              const fattn_tiling *t)
{
    if (!(p->features & FULL_LOOKS)) {
        return workspace(row, p, t);
    }
    const int64_t bytes = fattn_cuda_seen_workspace(full_items(p, t), t->k_blocks);
    return bytes < 0 || bytes > INT64_MAX - WGMMA_WORKSPACE ? -1 : WGMMA_WORKSPACE + bytes;
}

static void seen_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "wgmma_seen_%d_%d", kernel->width, (int)t->bc);
    fattn_cuda_seen_shape(p, t, fattn_ceil_div(p->seqlen_q, t->br / group_of(p)), shape);
    /* One at least clears the counter, unless there is no batch. */
    shape->blocks = fattn_max64(shape->blocks, t->items > 0);
}

static void full_begin_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                             const fattn_tiling *t, fattn_gpu_shape *shape)
{
    if (p->features & (FATTN_BIAS | FATTN_MASK) && wgmma_looks(t->items, (int)t->br, p->seqlen_k)) {
        seen_shape(kernel, p, t, shape);
    } else if (p->features & FATTN_BLOCK_MASK) {
        snprintf(shape->entry, sizeof shape->entry, "wgmma_blocks_%d", kernel->width);
        const int64_t tiles = gpu_times(full_items(p, t), SEEN_BYTES(t->k_blocks));
        shape->blocks = fattn_ceil_div(tiles, WGMMA_BLOCK_THREADS);
        shape->threads = WGMMA_BLOCK_THREADS;
        shape->early = true;
    } else {
        clear_shape(kernel, p, t, shape);
    }
}

static void full_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const full_run *const run = run_of(kernel, p, t->br);
    snprintf(shape->entry, sizeof shape->entry, "wgmma_%s_%s_%d", run->name,
             p->dtype == FATTN_F16 ? "f16" : "bf16", kernel->width);
    shape->blocks = t->items;
    shape->threads = WGMMA_THREADS(run->rows / 64);
    shape->shared = run->shared;
    shape->early = true;
    shape->resident = true;
}

/* The bias or the mask, in rows of 128 bytes; its other axes are added to this. */
static fattn_gpu_map term_map(const fattn_problem *p, uint64_t feature)
{
    const bool bias = feature == FATTN_BIAS;
    fattn_gpu_map map = map_of(bias ? offsetof(fattn_buffers, bias) : offsetof(fattn_buffers, mask),
                               p->seqlen_k > 1 ? p->seqlen_k : 1);
    map.optional = true;
    map.bytes = bias ? 2 : 1;
    map.box[0] = 128 / map.bytes;
    return map;
}

/* The maps of forward, and one of the bias or mask where that is the only feature of pairs. Where
 * heads or queries share a bias or mask, its rows are copied once for all of them. */
static int full_maps(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    const int count = maps_of(kernel, p, t, maps);
    const uint64_t features = run_of(kernel, p, t->br)->features;
    if (features != FATTN_BIAS && features != FATTN_MASK) {
        return count;
    }
    const int64_t *const stride = features == FATTN_BIAS ? p->bias_stride : p->mask_stride;
    const int64_t group = group_of(p);
    fattn_gpu_map *const map = &maps[count];
    *map = term_map(p, features);
    add_axis(map, group, stride[1], stride[1] ? (int)group : 1);
    add_axis(map, p->seqlen_q, stride[2], stride[2] ? (int)(t->br / group) : 1);
    add_axis(map, p->heads_k, group * stride[1], 1);
    add_axis(map, p->batch, stride[0], 1);
    return count + 1;
}

/* Last, its tiles: those of WGMMA_FULL_64 and so on. */
#define WGMMA_FULL_ROW(channels, ...)                                                              \
    {                                                                                              \
        .row = {.name = "wgmma_full_" #channels,                                                   \
                WGMMA_FORWARD_ROW(channels),                                                       \
                .features = WGMMA_FULL_FEATURES,                                                   \
                .dropout_max = FATTN_CUDA_DROPOUT_MAX,                                             \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},                                \
                .cannot = cannot_full,                                                             \
                .pays = full_pays,                                                                 \
                .cost = full_cost,                                                                 \
                .fast_bytes = full_fast_bytes,                                                     \
                .workspace = full_workspace},                                                      \
        WGMMA_KERNEL("wgmma_full_" #channels, channels), .phases = {full_begin_shape, full_shape}, \
        .maps = full_maps,                                                                         \
    }

/* --- Backward --------------------------------------------------------------------------------- */

#define BACKWARD_KEYS_MOST 128 /* of a tile */
#define ROWS_MOST 0x1p31       /* of all heads, whole tiles of them */

/* As forward has it, of dO too; but heads of a group may share their queries. */
static const char *cannot_backward(const fattn_kernel *row, const fattn_problem *p)
{
    const int64_t queries = row->tiles[0].br;
    if (p->seqlen_q >= ROWS_MAX || p->total_q >= ROWS_MAX || p->seqlen_k >= ROWS_MAX ||
        p->total_k >= ROWS_MAX) {
        return "counts queries and keys below 2^30";
    }
    const double rows = (double)p->total_q + (double)p->batch * (double)queries;
    const double keys = (double)p->seqlen_k + BACKWARD_KEYS_MOST;
    if ((double)p->batch * (double)p->heads_q * rows >= ROWS_MOST ||
        (double)p->batch * (double)p->heads_k * keys >= ROWS_MOST) {
        return "counts rows and keys of all heads below 2^31";
    }
    if (p->q.seq == 0 || p->k.seq == 0 || p->v.seq == 0 || p->dout.seq == 0) {
        return "copies no rows of stride 0";
    }
    if (has_long_stride(&p->q) || has_long_stride(&p->k) || has_long_stride(&p->v) ||
        has_long_stride(&p->dout)) {
        return "copies by strides below 2^40 bytes";
    }
    if (!(row->features & MMA_OF_PAIRS) && fattn_score_rule_make(0, p->scale, 0).terms) {
        return "takes scales above 0 alone";
    }
    if (p->features & FATTN_SOFTCAP && p->outputs & FATTN_OUT_DBIAS) {
        return "makes no dbias beside a softcap";
    }
    return NULL;
}

/* Rows of the tiles of all heads in the workspace; -1 on overflow. */
static int64_t saved_rows(const fattn_problem *p, int64_t queries)
{
    const bool packed = p->features & FATTN_CU_SEQLENS_Q;
    const int64_t tiles = WGMMA_BACKWARD_TILES(packed, p->total_q, p->batch, queries);
    return gpu_times(gpu_times(packed ? 1 : p->batch, p->heads_q), gpu_times(tiles, queries));
}

/* Blocks that share an item. */
static int backward_blocks(const fattn_gpu_kernel *kernel)
{
    return WGMMA_BACKWARD_BLOCKS(kernel->width);
}

static int64_t backward_items(const fattn_problem *p, const fattn_tiling *t)
{
    return gpu_times(gpu_times(p->batch, p->heads_k), t->k_blocks);
}

/* Tiles that a kernel before looks at, those past the last of some keys too. */
static int64_t tiles_seen(const fattn_problem *p, const fattn_tiling *t)
{
    const int64_t *const stride = p->features & FATTN_BLOCK_MASK ? p->block_mask_stride
                                  : p->features & FATTN_BIAS     ? p->bias_stride
                                                                 : p->mask_stride;
    return wgmma_backward_looks(p, t->q_blocks, t->k_blocks)
               ? fattn_cuda_seen_heads(p, stride) * t->q_blocks * SEEN_BYTES(t->k_blocks)
               : 0;
}

/* The bits of items, of each of their blocks, and a byte for each of those tiles: in units of four
 * bytes, -1 on overflow. */
static int64_t skip_words(const fattn_problem *p, const fattn_tiling *t, int64_t blocks)
{
    const int64_t items = gpu_times(backward_items(p, t), blocks);
    const int64_t bits = gpu_times(items, 2 * WGMMA_BACKWARD_WORDS(t->q_blocks));
    return bits < 0 ? -1 : bits + tiles_seen(p, t) / 4;
}

/* Words of the list of sequences. */
static int64_t list_words(const fattn_problem *p, const fattn_tiling *t)
{
    return wgmma_orders(p, backward_items(p, t)) ? p->batch * (int64_t)sizeof(wgmma_listed) / 4 : 0;
}

/* dQ, lse and delta of every row, what the items are, and which tiles they leave out, or the list
 * of sequences. */
static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    const int64_t saved = saved_rows(p, t->br);
    const int64_t rows = gpu_times(saved, fattn_gpu_kernel_of(row)->width + 2);
    const int64_t blocks = backward_blocks(fattn_gpu_kernel_of(row));
    const int64_t turns = saved < 0 ? 0 : WGMMA_BACKWARD_TURNS(saved / t->br * blocks);
    const int64_t items = gpu_times(backward_items(p, t), blocks * WGMMA_BACKWARD_ITEM_BYTES / 4);
    const int64_t skips = wgmma_skips(p) ? skip_words(p, t, blocks) : list_words(p, t);
    if (rows < 0 || items < 0 || skips < 0 || items > INT64_MAX / 4 || skips > INT64_MAX / 4 ||
        rows > INT64_MAX - items - skips - turns - WGMMA_BACKWARD_TAKEN) {
        return -1;
    }
    return gpu_floats(rows + turns + WGMMA_BACKWARD_TAKEN + items + skips);
}

/* Lists the sequences. */
static void order_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                        const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "wgmma_order_%s", kernel->run);
    shape->blocks = list_words(p, t) > 0;
    shape->threads = WGMMA_ORDERED_MOST;
    shape->early = true;
}

/* One of the kernels before and after, for so many rows of each head, or all that the workspace has
 * of packed ones. */
static void row_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                      int64_t rows, const char *entry, fattn_gpu_shape *shape)
{
    const int64_t of_head = saved_rows(p, t->br) / fattn_max64(p->heads_q, 1);
    const int64_t all =
        wgmma_visits_packed(p, of_head, rows) ? p->heads_q * of_head : p->batch * p->heads_q * rows;
    snprintf(shape->entry, sizeof shape->entry, "wgmma_%s_%s", entry, kernel->run);
    shape->blocks = fattn_ceil_div(all, FATTN_GPU_BACKWARD_ROWS);
    shape->threads = WGMMA_ROWS_THREADS;
    shape->early = true;
}

static void rows_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    row_shape(kernel, p, t, t->q_blocks * t->br, "rows", shape);
    shape->blocks += shape->blocks == 0; /* which makes the items */
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
             p->dtype == FATTN_F16 ? "f16" : "bf16", ordered ? "ordered_" : "", kernel->run);
    shape->together = backward_blocks(kernel);
    shape->blocks = backward_items(p, t) * shape->together;
    shape->threads = WGMMA_THREADS(2);
    shape->shared = kernel->shared;
    shape->early = true;
    shape->resident = true;
}

static int backward_maps(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                         const fattn_tiling *t, fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    const int keys = (int)t->bc / backward_blocks(kernel);
    maps[0] = rows_map(p, offsetof(fattn_buffers, q), p->dim, &p->q, (int)t->br);
    maps[1] = keys_map(p, offsetof(fattn_buffers, k), p->dim, &p->k, keys);
    maps[2] = keys_map(p, offsetof(fattn_buffers, v), p->dim_v, &p->v, keys);
    maps[3] = rows_map(p, offsetof(fattn_buffers, dout), p->dim_v, &p->dout, (int)t->br);
    return 4;
}

/* At 64 channels there are tiles of 64 queries and of 128. Long sequences take 1.16 times as long
 * with the former; in short ones more is saved, for there are fewer rows without a query, and the
 * first product of an item, which is not used, is smaller. */
static bool has_few_queries(const fattn_problem *p)
{
    const int64_t queries =
        p->features & FATTN_CU_SEQLENS_Q ? p->total_q / fattn_max64(p->batch, 1) : p->seqlen_q;
    const int64_t small = fattn_ceil_div(queries, 64) * 64,
                  large = fattn_ceil_div(queries, 128) * 128;
    const bool few = queries <= 320 || (fattn_cuda_sees_half(p) && queries <= 512);
    return (few && p->seqlen_k <= 512) || 7 * small <= 6 * large;
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
        .phases = {order_shape, rows_shape, backward_shape, dq_shape, sink_shape},      \
        .maps = backward_maps,                                                          \
        .shared = WGMMA_BACKWARD_SHARED(channels, queries, keys, stages),               \
        .run = #name_,                                                                  \
    },

/* --- Backward with every feature -------------------------------------------------------------- */

typedef struct backward_run {
    const char *name;
    uint64_t features; /* of pairs */
    bool dbias;        /* which it may want */
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

/* Whether a run's kernel takes the problem: it is for everything, or knows the features to be
 * there, and no others. Kernels for a bias know its type, and those that have it copied want
 * strides for that. */
static bool run_takes(const backward_run *run, const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    const bool dbias = p->outputs & FATTN_OUT_DBIAS, copies = run->stages_of_term > 0;
    if (run->features == MMA_ANY) {
        return true;
    }
    if (run->features != features || run->dbias != dbias) {
        return false;
    }
    return features == FATTN_BIAS
               ? p->dtype_bias == p->dtype && (!copies || maps_term(p->bias_stride, 2, 1))
               : features != FATTN_MASK || !copies || maps_term(p->mask_stride, 1, 1);
}

/* The last that takes it: the first of a width is for everything. */
static const backward_run *backward_run_of(const fattn_gpu_kernel *kernel, const fattn_problem *p)
{
    const backward_run *found = NULL;
    for (size_t n = 0; n < sizeof backward_runs / sizeof *backward_runs; n++) {
        const backward_run *const run = backward_runs + n;
        found = run->width == kernel->width && run_takes(run, p) ? run : found;
    }
    return found;
}

static int64_t backward_full_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)tile;
    return backward_run_of(fattn_gpu_kernel_of(row), p)->shared;
}

/* Looks for tiles to leave out, clears dBias, or lists the sequences; no run wants two of these. */
static void backward_begin_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                                 const fattn_tiling *t, fattn_gpu_shape *shape)
{
    if (wgmma_backward_looks(p, t->q_blocks, t->k_blocks)) {
        fattn_cuda_seen_shape(p, t, t->q_blocks, shape);
        snprintf(shape->entry, sizeof shape->entry, "wgmma_seen_%s", kernel->run);
        if (p->features & FATTN_BLOCK_MASK) { /* a tile is a thread's */
            shape->blocks = fattn_ceil_div(tiles_seen(p, t), shape->threads);
        }
        return;
    }
    if (list_words(p, t) > 0) {
        order_shape(kernel, p, t, shape);
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
             p->dtype == FATTN_F16 ? "f16" : "bf16", kernel->width);
    shape->shared = run->shared;
}

/* The maps of backward, and one of the bias or mask, as full_maps(). */
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
    *map = term_map(p, run->features);
    add_axis(map, p->seqlen_q, stride[2], stride[2] ? (int)t->br : 1);
    add_axis(map, p->heads_q, stride[1], 1);
    add_axis(map, p->batch, stride[0], 1);
    return count + 1;
}

/* A block mask is looked at tile by tile, once for all heads of a group. */
static const char *cannot_backward_full(const fattn_kernel *row, const fattn_problem *p)
{
    if (!(p->features & FATTN_BLOCK_MASK)) {
        return cannot_backward(row, p);
    }
    if ((p->features & MMA_OF_PAIRS) != FATTN_BLOCK_MASK) {
        return "takes a block mask without a feature of single pairs";
    }
    if (p->features & FATTN_DETERMINISTIC) {
        return "takes no block mask in deterministic runs";
    }
    const fattn_tile tile = row->tiles[0];
    if (p->block_m % tile.br ||
        p->block_n % (tile.bc / backward_blocks(fattn_gpu_kernel_of(row)))) {
        return "takes block masks of whole tiles";
    }
    if (p->block_mask_stride[1] != 0 && group_of(p) > 1) {
        return "takes block masks that the heads of a group share";
    }
    const double tiles = (double)p->batch * (double)p->heads_k *
                         (double)(p->seqlen_q / row->tiles[0].br + 1) *
                         (double)(p->seqlen_k / row->tiles[0].bc + 8);
    if (tiles >= ITEMS_MAX) {
        return "counts tiles of a block mask below 2^31";
    }
    return cannot_backward(row, p);
}

/* A row of more channels has smaller tiles, into which block masks fit that this width's own row
 * declines; but half of its products would be of zeros. */
static bool backward_full_pays(const fattn_kernel *row, const fattn_problem *p,
                               const fattn_limits *limits)
{
    (void)limits;
    return !(p->features & FATTN_BLOCK_MASK) || fattn_gpu_kernel_of(row)->width == 64 ||
           needs_width(row, p);
}

/* Entries of dbias must be countable for what clears them. */
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
                .features = FATTN_KERNEL_COMMON & ~FATTN_GPU_NOT_BACKWARD,                       \
                .adds_dbias = true,                                                              \
                .dropout_max = FATTN_CUDA_DROPOUT_MAX,                                           \
                .tiles = (const fattn_tile[]){{64, keys}, {0, 0}},                               \
                .pays = backward_full_pays,                                                      \
                .fast_bytes = backward_full_bytes,                                               \
                .workspace = backward_full_workspace},                                           \
        WGMMA_KERNEL("wgmma_backward_full_" #channels, channels),                                \
        .phases = {backward_begin_shape, rows_shape, backward_full_shape, dq_shape, sink_shape}, \
        .maps = backward_full_maps, .run = "full_" #channels,                                    \
    }

const fattn_gpu_kernel fattn_cuda_wgmma[] = {
    WGMMA_SHORT_SHAPES(WGMMA_SHORT_ROW) WGMMA_SPLIT_SHAPES(WGMMA_SPLIT_ROW) WGMMA_SHAPES(WGMMA_ROW)
        WGMMA_FULL_ROW(64, {192, 128}, {128, 128}, {64, 64}),
    WGMMA_FULL_ROW(128, {128, 128}, {64, 64}),
    WGMMA_FULL_ROW(256, {128, 64}),
    WGMMA_BACKWARD_SHAPES(WGMMA_BACKWARD_ROW) WGMMA_BACKWARD_PAIRS(WGMMA_BACKWARD_ROW)
        WGMMA_BACKWARD_FULL_ROW(64, 128),
    WGMMA_BACKWARD_FULL_ROW(128, 128),
    WGMMA_BACKWARD_FULL_ROW(256, 128),
    {.row = {.name = NULL}}};
