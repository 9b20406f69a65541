/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows of Hopper's forward kernels (wgmma_forward.cuh), for f16 and bf16. There are four
 * families: for short sequences, for few rows, for long sequences, and for every feature. For keys
 * and values in e4m3 there are two: for few rows, and for others. The rows of a family differ in
 * width. Problems that they do not take run on the rows of mma.c.
 */
#include <stddef.h>
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/wgmma_rows.h"
#include "backends/gpu/args.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"
#include "core/problem.h"

/* Batch-invariant problems run on the rows for long sequences, whatever their lengths, because
 * other rows add in another order. Those for every feature do not take such problems: their path
 * for a softcap or ALiBi depends on all rows of a warp. */
#define WGMMA_FULL_FEATURES (FATTN_KERNEL_COMMON & ~FATTN_BATCH_INVARIANT)

static int64_t workspace(const fattn_kernel *row, const fattn_problem *p, const fattn_tiling *t)
{
    (void)row;
    const int64_t list = p->batch * (int64_t)sizeof(wgmma_listed);
    return WGMMA_WORKSPACE + (wgmma_lists(p, t->items) ? (list + 255) / 256 * 256 : 0);
}

/* --- Which problems they take ----------------------------------------------------------------- */

enum {
    GROUP_MAX = 128, /* query heads per key/value head: a tile has all heads of a query */
    SPLIT_KEYS_MIN = 128,
    SPLIT_KEYS_LONG = 1024
};

const char *fattn_wgmma_cannot_forward(const fattn_kernel *row, const fattn_problem *p)
{
    if (p->heads_q == 0) { /* tiles are divided among the heads of a group */
        return "takes no problem without query heads";
    }
    if (fattn_problem_group(p) > GROUP_MAX) {
        return "takes at most 128 query heads per key/value head";
    }
    if ((double)p->batch * (double)p->heads_k * (double)(fattn_problem_rows(p) / 64 + 1) >=
        WGMMA_COUNT_MAX) {
        return "takes fewer than 2^31 tiles of rows";
    }
    if (p->q.head == 0 && fattn_problem_group(p) > 1) {
        return "takes no queries that heads share by a stride of 0";
    }
    if (p->features & FATTN_PAGED &&
        WGMMA_PIECE(p->page_size, row->tiles[0].bc) < WGMMA_PIECE_LEAST) {
        return "takes pages of a multiple of 8 keys";
    }
    return fattn_wgmma_cannot(row, p);
}

/* gpu_sequences_differ() of sequence.cuh for the host; a lint (features.py) keeps the two equal. */
bool fattn_wgmma_sequences_differ(const fattn_problem *p)
{
    return p->features & (FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q |
                          FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS);
}

/* How many blocks of `rows` rows the problem has. */
double fattn_wgmma_blocks_of(const fattn_problem *p, int64_t rows)
{
    return (double)p->batch * (double)p->heads_k *
           (double)fattn_ceil_div(fattn_problem_rows(p), rows);
}

/* With fewer blocks, so many multiprocessors are idle that rows which split keys are faster. */
static double least_blocks(const fattn_limits *limits) { return 0.6 * (double)limits->units; }

/* Whether there are enough blocks of rows, and most of them are full. */
static bool pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    (void)row;
    return p->features & FATTN_BATCH_INVARIANT ||
           (fattn_problem_rows(p) > 64 && fattn_wgmma_blocks_of(p, 128) >= least_blocks(limits));
}

/* Rows for keys and values in e4m3 leave only decoding to others. */
static bool e4m3_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    (void)row;
    (void)limits;
    return p->features & FATTN_BATCH_INVARIANT || fattn_problem_rows(p) > MMA_DECODE_ROWS;
}

/* For rows for short sequences, in which a group's heads are rows of one block. */
static const char *cannot_short(const fattn_kernel *row, const fattn_problem *p)
{
    return fattn_problem_group(p) > row->tiles[0].br
               ? "takes at most 64 query heads per key/value head"
               : fattn_wgmma_cannot_forward(row, p);
}

/* Whether the sequences of a packed batch are short on average. In tiles of more rows, most rows
 * would not exist. */
static bool are_short_in_mean(const fattn_problem *p)
{
    enum { KEYS_MEAN = 200 };
    return p->features & FATTN_CU_SEQLENS_K && !(p->features & FATTN_PAGED) &&
           p->total_k <= KEYS_MEAN * p->batch;
}

/* Whether the kernels for short sequences pay. They do if starting and ending items takes most of
 * the time, because a row attends to at most keys_short keys. With more keys they pay if there are
 * about as many blocks as multiprocessors, so that keys need not be split. Beyond 64 channels a
 * multiprocessor holds no more warpgroups of these kernels than of others; then they pay only with
 * few blocks, or with heads that fill at most one block. */
static bool are_short(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits,
                      int64_t keys_short)
{
    enum { KEYS_MAX = 1024 };
    const int64_t keys = fattn_cuda_mask_halves_keys(p) ? p->seqlen_k / 2 : p->seqlen_k;
    const int64_t rows = fattn_problem_rows(p);
    const double units = (double)limits->units, blocks = fattn_wgmma_blocks_of(p, 64);
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

/* For rows that split keys, in which a group's heads are rows of one block, as in the kernels that
 * merge the parts. */
static const char *cannot_split(const fattn_kernel *row, const fattn_problem *p)
{
    const char *const why = fattn_wgmma_cannot_forward(row, p);
    return !why && WGMMA_SPLIT_ROWS % fattn_problem_group(p)
               ? "takes 1, 2, 4 ... or 128 query heads per key/value head"
               : why;
}

/* How many keys take as long as the overhead of a part. If a head has several blocks of rows, its
 * keys come from L2, and the sums that are written and read again cost relatively more. */
static int64_t part_keys(const fattn_problem *p)
{
    return fattn_problem_rows(p) > WGMMA_SPLIT_ROWS ? 640 : 256;
}

/* If no sequence is longer, a long one among short ones does not take long enough for the kernel
 * that finds it. */
#define CUT_KEYS_MIN 4096

static fattn_split_cost split_cost(const fattn_kernel *row, const fattn_problem *p,
                                   const fattn_limits *limits)
{
    fattn_split_cost cost = fattn_cuda_split_evenly(row, p, limits);
    cost.keys = part_keys(p);
    cost.pieces = p->seqlen_k < CUT_KEYS_MIN ? 0 : fattn_wgmma_pieces(row, p, limits->units, 2);
    return cost;
}

/* The tile of the kernel that would take the problem without splitting keys: rows and channels. */
typedef struct whole_tile {
    int rows, width;
} whole_tile;

static whole_tile whole_tile_of(const fattn_problem *p)
{
#define FIRST_THAT_FITS(name, channels, channels_v, warpgroups, ...) \
    if (p->dim <= (channels) && p->dim_v <= (channels_v)) {          \
        return (whole_tile){64 * (warpgroups), channels};            \
    }
    if (p->dtype_kv == FATTN_E4M3) {
        WGMMA_E4M3_SHAPES(FIRST_THAT_FITS)
    }
    WGMMA_SHAPES(FIRST_THAT_FITS)
    return (whole_tile){0, 0};
}

/* Whether, at the end of a run of that kernel, so many multiprocessors would be idle that splitting
 * the keys is faster. Only for problems whose rows all attend to about as many keys. The cost of
 * splitting is weighted by 1.15, because the last blocks of the other kernel run 1.15 times as fast
 * when others are idle. */
static bool leaves_idle(const fattn_kernel *row, const fattn_problem *p, int64_t units)
{
    enum { PARTS_MAX = 8 };
    const int64_t keys = p->seqlen_k, rest = part_keys(p);
    const whole_tile tile = whole_tile_of(p);
    const int64_t rows = tile.rows;
    if (tile.width != fattn_gpu_kernel_of(row)->width) {
        return false; /* the kernels differ in padding, so that their times do not compare */
    }
    const int64_t blocks = p->batch * p->heads_k * fattn_ceil_div(fattn_problem_rows(p), rows);
    const double whole =
        (double)(fattn_ceil_div(blocks, units) * rows) * (double)keys / WGMMA_SPLIT_ROWS;
    const bool banded = p->window_right >= 0 && p->seqlen_q > keys / 8;
    const bool alike =
        !banded && p->window_left < 0 && (!fattn_wgmma_sequences_differ(p) || p->batch == 1);
    bool idle = false;
    for (int parts = 2; alike && parts <= PARTS_MAX; parts++) {
        const int64_t rounds = fattn_ceil_div(fattn_kernel_blocks(row, p) * parts, units);
        idle = idle || 1.15 * (double)(rounds * (keys / parts + rest) + rest) < whole;
    }
    return idle;
}

/* Whether splitting keys pays: because a head has one block of rows, so that the run is bound by
 * memory, or because there are too few blocks for the multiprocessors. With short sequences, the
 * kernel that does not split is as fast, unless its tile has more rows than the head. Fewer rows
 * are left to decoding. */
static bool split_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    const int64_t rows = fattn_problem_rows(p), keys = p->seqlen_k;
    const bool one = rows <= WGMMA_SPLIT_ROWS &&
                     (keys >= SPLIT_KEYS_LONG || whole_tile_of(p).rows > WGMMA_SPLIT_ROWS);
    return rows > MMA_DECODE_ROWS && keys >= SPLIT_KEYS_MIN &&
           (one || !pays(row, p, limits) || leaves_idle(row, p, limits->units));
}

/* --- Launches --------------------------------------------------------------------------------- */

/* The map of queries has one more axis: the heads of a group, which are adjacent in a tile. A group
 * that is larger than a tile counts as several. */
int fattn_wgmma_forward_maps(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                             const fattn_tiling *t, fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    (void)kernel;
    const int64_t group = fattn_min64(fattn_problem_group(p), t->br);
    maps[0] = fattn_wgmma_map(offsetof(fattn_buffers, q), p->dim);
    fattn_wgmma_axis_add(&maps[0], group, p->q.head, (int)group);
    fattn_wgmma_axis_add(&maps[0], p->total_q, p->q.seq, (int)(t->br / group));
    fattn_wgmma_axis_add(&maps[0], p->heads_q / group, group * p->q.head, 1);
    fattn_wgmma_axis_add(&maps[0], p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch, p->q.batch, 1);
    maps[1] = fattn_wgmma_keys_map(p, offsetof(fattn_buffers, k), p->dim, &p->k, (int)t->bc);
    maps[2] = fattn_wgmma_keys_map(p, offsetof(fattn_buffers, v), p->dim_v, &p->v, (int)t->bc);
    return 3;
}

/* Whether a kernel has to clear the counter of items: wgmma_counts() in device code, except for a
 * bias or mask, where the scan kernel clears it. */
static bool counts(const fattn_problem *p)
{
    return fattn_wgmma_sequences_differ(p) || p->window_left >= 0 || p->window_right >= 0;
}

void fattn_wgmma_clear(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)kernel;
    snprintf(shape->entry, sizeof shape->entry, "clear");
    shape->blocks = counts(p) && t->items > 0;
    shape->threads = wgmma_lists(p, t->items) ? WGMMA_LISTED_MOST : 32;
    shape->early = true;
}

/* Sets everything but the entry. */
static void launch_shape(const fattn_tiling *t, int threads, int shared, fattn_gpu_shape *shape)
{
    shape->blocks = t->items;
    shape->threads = threads;
    shape->shared = shared;
    shape->early = true;
    shape->resident = true;
}

void fattn_wgmma_forward(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                         const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "wgmma_%s_%s", fattn_dtype_name(p->dtype),
             kernel->run);
    launch_shape(t, kernel->threads, kernel->shared, shape);
}

static void lean_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    fattn_wgmma_forward(kernel, p, t, shape);
    snprintf(shape->onto, sizeof shape->onto, "wgmma_onto_%s_%s", fattn_dtype_name(p->dtype),
             kernel->run);
}

/* caches: as below. */
#define WGMMA_ROW_THREADS(caches, warpgroups) \
    ((caches) ? WGMMA_E4M3_THREADS(warpgroups) : WGMMA_THREADS(warpgroups))

/* Rows that do not split keys. caches: types of keys and values besides that of queries, or 0. */
#define WGMMA_WHOLE_ROW(file, caches, bits, cannot_, pays_, shape_, bytes, name_, channels, \
                        channels_v, warpgroups, keys)                                       \
    {                                                                                       \
        .row = {.name = "wgmma_" #name_,                                                    \
                WGMMA_FORWARD_ROW(channels),                                                \
                FATTN_CUDA_CACHES(caches),                                                  \
                .features = bits,                                                           \
                .dim_v_max = channels_v,                                                    \
                .tiles = (const fattn_tile[]){{64 * (warpgroups), keys}, {0, 0}},           \
                .cannot = cannot_,                                                          \
                .pays = pays_,                                                              \
                .fast_bytes = fattn_gpu_shared_bytes,                                       \
                .workspace = workspace},                                                    \
        WGMMA_KERNEL(file, channels),                                                       \
        .phases = {fattn_wgmma_clear, shape_},                                              \
        .maps = fattn_wgmma_forward_maps,                                                   \
        .threads = WGMMA_ROW_THREADS(caches, warpgroups),                                   \
        .shared = bytes,                                                                    \
        .run = #name_,                                                                      \
    },
#define WGMMA_ROW(name, channels, channels_v, warpgroups, keys, stages)                           \
    WGMMA_WHOLE_ROW("wgmma_forward", 0, WGMMA_FEATURES | FATTN_BATCH_INVARIANT,                   \
                    fattn_wgmma_cannot_forward, pays, lean_shape,                                 \
                    WGMMA_SHARED(channels, channels_v, warpgroups, keys, stages), name, channels, \
                    channels_v, warpgroups, keys)
#define WGMMA_SHORT_ROW(name, channels, channels_v, warpgroups, keys, stages)                     \
    WGMMA_WHOLE_ROW("wgmma_forward", 0, WGMMA_FEATURES, cannot_short, short_pays,                 \
                    fattn_wgmma_forward,                                                          \
                    WGMMA_SHARED(channels, channels_v, warpgroups, keys, stages), name, channels, \
                    channels_v, warpgroups, keys)
#define WGMMA_E4M3_ROW(name, channels, channels_v, warpgroups, keys, stages, stored)           \
    WGMMA_WHOLE_ROW("wgmma_forward_e4m3", FATTN_DTYPE_BIT(FATTN_E4M3),                         \
                    WGMMA_FEATURES | FATTN_BATCH_INVARIANT | FATTN_DESCALE,                    \
                    fattn_wgmma_cannot_forward, e4m3_pays, fattn_wgmma_forward,                \
                    WGMMA_E4M3_SHARED(channels, channels_v, warpgroups, keys, stages, stored), \
                    name, channels, channels_v, warpgroups, keys)

#define WGMMA_PARTS_ROW(file, caches, bits, bytes, name_, channels, keys)        \
    {                                                                            \
        .row = {.name = "wgmma_" #name_,                                         \
                WGMMA_FORWARD_ROW(channels),                                     \
                FATTN_CUDA_CACHES(caches),                                       \
                .features = bits,                                                \
                .tiles = (const fattn_tile[]){{WGMMA_SPLIT_ROWS, keys}, {0, 0}}, \
                .cannot = cannot_split,                                          \
                .pays = split_pays,                                              \
                .split = split_cost,                                             \
                .by_lengths = true,                                              \
                .fast_bytes = fattn_gpu_shared_bytes,                            \
                .workspace = fattn_wgmma_parts_workspace},                       \
        WGMMA_KERNEL(file, channels),                                            \
        .phases = {fattn_wgmma_cut, fattn_wgmma_split, fattn_wgmma_merge},       \
        .maps = fattn_wgmma_forward_maps,                                        \
        .threads = WGMMA_ROW_THREADS(caches, WGMMA_SPLIT_ROWS / 64),             \
        .shared = (bytes) + WGMMA_SPLIT_CONTROL,                                 \
        .run = #name_,                                                           \
    },
#define WGMMA_SPLIT_ROW(name, channels, channels_v, warpgroups, keys, stages)                     \
    WGMMA_PARTS_ROW("wgmma_forward", 0, WGMMA_FEATURES,                                           \
                    WGMMA_SHARED(channels, channels_v, warpgroups, keys, stages), name, channels, \
                    keys)
#define WGMMA_E4M3_SPLIT_ROW(name, channels, channels_v, warpgroups, keys, stages, stored)     \
    WGMMA_PARTS_ROW("wgmma_forward_e4m3", FATTN_DTYPE_BIT(FATTN_E4M3),                         \
                    WGMMA_FEATURES | FATTN_DESCALE,                                            \
                    WGMMA_E4M3_SHARED(channels, channels_v, warpgroups, keys, stages, stored), \
                    name, channels, keys)

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

/* The features of pairs for which p may have a kernel of its own: its features, or else MMA_ANY. */
static uint64_t known_features(const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    /* Then scale * log2 e is a normal number. */
    const bool is_normal = p->scale > 0x1p-100 && p->scale < 0x1p100;
    const int64_t group = fattn_problem_group(p);
    const bool is_known =
        features == FATTN_BIAS ? is_normal && p->dtype_bias == p->dtype &&
                                     fattn_wgmma_term_is_mapped(p->bias_stride, 2, group)
        : features == FATTN_MASK ? fattn_wgmma_term_is_mapped(p->mask_stride, 1, group)
                                 : true;
    return is_known ? features : MMA_ANY;
}

/* The run that takes the problem in tiles of `rows` rows: the one compiled for exactly its
 * features, or else the one for any, or NULL. */
static const full_run *run_of(const fattn_gpu_kernel *kernel, const fattn_problem *p, int64_t rows)
{
    const uint64_t features = known_features(p);
    const full_run *found = NULL;
    for (size_t n = 0; n < sizeof full_runs / sizeof *full_runs; n++) {
        const full_run *const run = full_runs + n;
        const bool fits =
            run->width == kernel->width && run->rows == rows && fattn_problem_group(p) <= rows;
        const bool knows = run->features == features, any = run->features == MMA_ANY;
        found = fits && (knows || (any && !found)) ? run : found;
    }
    return found;
}

/* Tiles of queries of all heads. A tile has all heads of a query. */
static int64_t full_items(const fattn_problem *p, int64_t rows)
{
    const int64_t queries = rows / fattn_problem_group(p);
    return gpu_times(gpu_times(p->batch, p->heads_k), fattn_ceil_div(p->seqlen_q, queries));
}

/* Tiles of keys of all of those; -1 on overflow. */
static int64_t full_tiles(const fattn_problem *p, int64_t rows, int64_t keys)
{
    return gpu_times(full_items(p, rows), SCAN_BYTES(fattn_ceil_div(p->seqlen_k, keys)));
}

/* Whether the run is one for short sequences. These have up to 512 keys here, not 320, because a
 * bias or mask usually hides some. */
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

#define SCANNED_MAX (INT64_C(1) << 32) /* tiles that the scan kernel can count */

/* A block mask together with another feature of pairs runs on the rows of mma.c, which skip the
 * tiles that it hides too. */
static const char *cannot_full(const fattn_kernel *row, const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    if (features & FATTN_BLOCK_MASK && features != FATTN_BLOCK_MASK) {
        return "takes a block mask without bias, mask, ALiBi, softcap or dropout";
    }
    const char *const why = fattn_wgmma_cannot_forward(row, p);
    for (const fattn_tile *tile = row->tiles; !why && features & WGMMA_HIDES && tile->br; tile++) {
        const bool has_run = run_of(fattn_gpu_kernel_of(row), p, tile->br);
        const int64_t tiles = has_run ? full_tiles(p, tile->br, tile->bc) : 0;
        if (tiles < 0 || tiles >= SCANNED_MAX) {
            return "takes fewer than 2^32 tiles of a bias or mask";
        }
    }
    return why;
}

/* Whether these kernels take less time than those of mma.c, although their blocks may leave most
 * multiprocessors idle. Their time is proportional to the keys. That of mma.c, which splits keys
 * and merges the parts, is proportional to keys times blocks, plus a constant. The point where the
 * two are equal was fitted to runs of up to 95 blocks (docs/notes/hopper-forward.md). If heads have
 * so few rows that half of each block is empty, these kernels pay with many blocks; up to 128
 * channels, also only with keys for more than one tile. */
static bool full_blocks_pay(const fattn_kernel *row, const fattn_problem *p,
                            const fattn_limits *limits)
{
    const int width = fattn_gpu_kernel_of(row)->width;
    const double enough = (double)limits->units * (width == 64 ? 0.36 : 0.33);
    if (fattn_problem_rows(p) > 64) {
        return (double)p->seqlen_k * (enough - fattn_wgmma_blocks_of(p, 128)) <=
               (width == 64 ? 32e3 : 42e3);
    }
    const bool wide = width > 128 && fattn_wgmma_needs_width(row, p);
    return fattn_problem_rows(p) > MMA_DECODE_ROWS && (p->seqlen_k > 128 || wide) &&
           fattn_wgmma_blocks_of(p, 64) >= least_blocks(limits);
}

/* If the blocks of a block mask are not multiples of a tile, most tiles are partial, and take 3
 * times as long as on the rows of mma.c. A row of more channels has smaller tiles, so that it may
 * pay where a narrower one does not. Without a block mask, a wider row never pays if a narrower one
 * would do. */
static bool full_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    const fattn_tile *tile = row->tiles;
    while (full_fast_bytes(row, p, *tile) < 0) {
        tile++;
    }
    const bool suits =
        p->features & FATTN_BLOCK_MASK
            ? p->block_m * fattn_problem_group(p) % tile->br == 0 && p->block_n % tile->bc == 0
            : fattn_wgmma_needs_width(row, p);
    return suits && (full_blocks_pay(row, p, limits) || full_is_short(row, p, limits));
}

/* The counter of items, followed by the list of sequences, or by the results of the scan of a bias,
 * mask or block mask. */
static int64_t full_workspace(const fattn_kernel *row, const fattn_problem *p,
                              const fattn_tiling *t)
{
    if (!(p->features & WGMMA_HIDES)) {
        return workspace(row, p, t);
    }
    const int64_t bytes = fattn_cuda_scan_workspace(full_items(p, t->br), t->k_blocks);
    return bytes < 0 || bytes > INT64_MAX - WGMMA_WORKSPACE ? -1 : WGMMA_WORKSPACE + bytes;
}

/* The scan of a bias, mask or block mask, or else `clear`. Each of them clears the counter. */
static void full_begin_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                             const fattn_tiling *t, fattn_gpu_shape *shape)
{
    if (p->features & (FATTN_BIAS | FATTN_MASK) && wgmma_scans(t->items, (int)t->br, p->seqlen_k)) {
        snprintf(shape->entry, sizeof shape->entry, "wgmma_scan_%d_%d", kernel->width, (int)t->bc);
        fattn_cuda_scan_shape(p, t, fattn_ceil_div(p->seqlen_q, t->br / fattn_problem_group(p)),
                              shape);
    } else if (p->features & FATTN_BLOCK_MASK) {
        snprintf(shape->entry, sizeof shape->entry, "wgmma_blocks_%d", kernel->width);
        shape->blocks = fattn_ceil_div(full_tiles(p, t->br, t->bc), WGMMA_BLOCK_THREADS);
        shape->threads = WGMMA_BLOCK_THREADS;
        shape->early = true;
    } else {
        fattn_wgmma_clear(kernel, p, t, shape);
        return;
    }
    shape->blocks = fattn_max64(shape->blocks, t->items > 0); /* also if there are no keys */
}

static void full_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const full_run *const run = run_of(kernel, p, t->br);
    snprintf(shape->entry, sizeof shape->entry, "wgmma_%s_%s_%d", run->name,
             fattn_dtype_name(p->dtype), kernel->width);
    launch_shape(t, WGMMA_THREADS((int)t->br / 64), run->shared, shape);
}

/* The maps of forward, and one of the bias or mask if that is the only feature of pairs. If heads
 * or queries share a bias or mask, its rows are copied once for all of them. */
static int full_maps(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_map maps[FATTN_GPU_MAPS])
{
    const int count = fattn_wgmma_forward_maps(kernel, p, t, maps);
    const uint64_t features = run_of(kernel, p, t->br)->features;
    if (features != FATTN_BIAS && features != FATTN_MASK) {
        return count;
    }
    const int64_t *const stride = features == FATTN_BIAS ? p->bias_stride : p->mask_stride;
    const int64_t group = fattn_problem_group(p);
    fattn_gpu_map *const map = &maps[count];
    *map = fattn_wgmma_term_map(p, features);
    fattn_wgmma_axis_add(map, group, stride[1], stride[1] ? (int)group : 1);
    fattn_wgmma_axis_add(map, p->seqlen_q, stride[2], stride[2] ? (int)(t->br / group) : 1);
    fattn_wgmma_axis_add(map, p->heads_k, group * stride[1], 1);
    fattn_wgmma_axis_add(map, p->batch, stride[0], 1);
    return count + 1;
}

/* ...: its tiles, those of WGMMA_FULL_64 and so on. */
#define WGMMA_FULL_ROW(channels, ...)                                                              \
    {                                                                                              \
        .row = {.name = "wgmma_full_" #channels,                                                   \
                WGMMA_FORWARD_ROW(channels),                                                       \
                .features = WGMMA_FULL_FEATURES,                                                   \
                .dropout_max = FATTN_GPU_DROPOUT_MAX,                                              \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},                                \
                .cannot = cannot_full,                                                             \
                .pays = full_pays,                                                                 \
                .cost = full_cost,                                                                 \
                .fast_bytes = full_fast_bytes,                                                     \
                .workspace = full_workspace},                                                      \
        WGMMA_KERNEL("wgmma_full_" #channels, channels), .phases = {full_begin_shape, full_shape}, \
        .maps = full_maps,                                                                         \
    }

const fattn_gpu_kernel fattn_cuda_wgmma[] = {
    WGMMA_SHORT_SHAPES(WGMMA_SHORT_ROW) WGMMA_SPLIT_SHAPES(WGMMA_SPLIT_ROW) WGMMA_SHAPES(WGMMA_ROW)
        WGMMA_E4M3_SPLIT_SHAPES(WGMMA_E4M3_SPLIT_ROW) WGMMA_E4M3_SHAPES(WGMMA_E4M3_ROW)
            WGMMA_FULL_ROW(64, {192, 128}, {128, 128}, {64, 64}),
    WGMMA_FULL_ROW(128, {128, 128}, {64, 64}),
    WGMMA_FULL_ROW(256, {128, 64}),
    {.row = {.name = NULL}}};
