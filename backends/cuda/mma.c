/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernel rows with mma.sync (mma_decode.cuh, mma_forward.cuh, mma_backward.cuh), for f16 and bf16
 * from Ampere on, and in forward for k and v in e4m3. There is a row for each padded width, since
 * the tiles depend on it: lean rows for the features that most runs have, and full rows for all.
 */
#include <stdio.h>
#include <string.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/mma_widen.h"
#include "backends/gpu/packed.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "core/tensors.h"

/* --- Sizes ------------------------------------------------------------------------------------ */

/* Bounds the rows of a head below 2^31, and items below 2^32: a tile has at least 32 rows, or all
 * rows of the head. The bound on the group keeps a tile's entries of a block mask countable: it has
 * at most 128 by 128 of them, or those of all heads of the group for two queries. */
const char *fattn_cuda_too_large(const fattn_kernel *row, const fattn_problem *p)
{
    const double heads = (double)p->batch * (double)p->heads_k;
    const int64_t group = fattn_problem_group(p);
    const double rows = (double)group * (double)p->seqlen_q;
    (void)row;
    if (group >= 1 << 20) {
        return "takes fewer than 2^20 query heads per key/value head";
    }
    return rows >= 0x1p31 || heads * (rows / 32 + 1) >= 0x1p32
               ? "takes fewer than 2^31 rows per key/value head and 2^32 tiles of rows"
               : NULL;
}

/* Whether 32 bits do not count the items, or, if parts are merged, the pieces of `combine`: the
 * rows of all items, 32 channels at a time. */
static bool parts_are_many(const fattn_problem *p, const fattn_tiling *t)
{
    const double pieces = (double)fattn_ceil_div(p->dim_v, 32) + 1;
    return (double)t->items * (t->splits > 1 ? (double)t->br * pieces : 1) >= 0x1p32;
}

int64_t fattn_cuda_parts_workspace(const fattn_kernel *row, const fattn_problem *p,
                                   const fattn_tiling *t)
{
    return parts_are_many(p, t) ? -1 : fattn_gpu_parts_workspace(row, p, t);
}

static int64_t decode_workspace(const fattn_kernel *row, const fattn_problem *p,
                                const fattn_tiling *t)
{
    return parts_are_many(p, t) ? -1 : fattn_gpu_decode_workspace(row, p, t);
}

/* --- Runs with one feature of pairs ----------------------------------------------------------- */

/* Whether the rows of all inputs begin at multiples of 16 bytes. */
static bool inputs_are_aligned(const fattn_problem *p)
{
    fattn_tensor tensors[FATTN_TENSORS];
    fattn_tensors_of(p, tensors);
    return fattn_tensor_is_aligned(p, &tensors[FATTN_TENSOR_Q], 16) &&
           fattn_tensor_is_aligned(p, &tensors[FATTN_TENSOR_K], 16) &&
           fattn_tensor_is_aligned(p, &tensors[FATTN_TENSOR_V], 16) &&
           (p->op == FATTN_FORWARD || fattn_tensor_is_aligned(p, &tensors[FATTN_TENSOR_DOUT], 16));
}

/* The features of pairs for which p may have a kernel of its own: its features, if the rows of
 * tensors are aligned to 16 bytes and a bias has their dtype; or else MMA_ANY. */
static uint64_t known_features(const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    const bool bias = p->dtype_bias == p->dtype || !(features & FATTN_BIAS);
    return bias && inputs_are_aligned(p) ? features : MMA_ANY;
}

/* --- Forward ---------------------------------------------------------------------------------- */

/* stages: 0 if k and v are in e4m3 (mma_widen.h). */
typedef struct mma_shape {
    const char *run;
    uint64_t features;
    int width, rows, keys, stages, tiles, warps, blocks;
} mma_shape;
#define MMA_SHAPE(run, ...) {#run, __VA_ARGS__},
#define MMA_WIDEN_SHAPE(run, features, width, rows, keys, ...) \
    {#run, features, width, rows, keys, 0, __VA_ARGS__},
static const mma_shape mma_shapes[] = {MMA_SHAPES(MMA_SHAPE) MMA_WIDEN_SHAPES(MMA_WIDEN_SHAPE)};

/* The shape compiled for exactly these features, or else the one for any. e4m3: whether k and v are
 * in e4m3. */
static const mma_shape *shape_find(bool e4m3, uint64_t features, int width, fattn_tile tile)
{
    const mma_shape *found = NULL;
    for (size_t n = 0; n < sizeof mma_shapes / sizeof *mma_shapes; n++) {
        const mma_shape *const s = mma_shapes + n;
        const bool fits = s->width == width && s->rows == tile.br && s->keys == tile.bc &&
                          (s->stages == 0) == e4m3;
        const bool knows = s->features == features, any = s->features == MMA_ANY;
        found = fits && (knows || (any && !found)) ? s : found;
    }
    return found;
}

/* known_features() for a full row. Kernels for one feature need a bias or mask that is contiguous
 * along keys. A problem without features of pairs is here because of a sink, which lean kernels do
 * not have. */
static uint64_t full_features(const fattn_problem *p)
{
    const uint64_t features = known_features(p);
    const bool strided = (features == FATTN_BIAS && p->bias_stride[3] != 1) ||
                         (features == FATTN_MASK && p->mask_stride[3] != 1);
    return strided || features == 0 ? MMA_ANY : features;
}

/* The shape of a row's kernel for p. Lean rows have the shapes without features of pairs. */
static const mma_shape *shape_of(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    const uint64_t features = row->features & MMA_OF_PAIRS ? full_features(p) : 0;
    return shape_find(row->caches_alone, features, fattn_gpu_kernel_of(row)->width, tile);
}

static int64_t shape_bytes(const mma_shape *s)
{
    if (s->stages == 0) {
        return MMA_WIDEN_SHARED(s->features, s->width, s->rows, s->keys);
    }
    return MMA_SHARED(s->features, s->width, s->rows, s->keys, s->stages);
}

static int64_t forward_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    return shape_bytes(shape_of(row, p, tile));
}

static void name_entry(char entry[48], const fattn_problem *p, const mma_shape *s)
{
    const char *const dtype = s->stages == 0 ? "" : fattn_dtype_name(p->dtype);
    snprintf(entry, 48, "mma_%s%s%s_%d_%dx%d", s->run, *dtype ? "_" : "", dtype, s->width, s->rows,
             s->keys);
}

/* Whether a scan kernel runs before (scan.h). */
static bool scans(const fattn_kernel *row, const fattn_problem *p, const fattn_tiling *t)
{
    const mma_shape *const s = shape_of(row, p, (fattn_tile){t->br, t->bc});
    return MMA_SKIPS(s->features, s->width) && t->k_blocks <= 32 * MMA_KEPT_WORDS &&
           fattn_cuda_scans(p, t);
}

static int64_t forward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                 const fattn_tiling *t)
{
    return scans(row, p, t) ? fattn_cuda_forward_workspace(row, p, t)
                            : fattn_cuda_parts_workspace(row, p, t);
}

static void scan_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    if (scans(&kernel->row, p, t)) {
        snprintf(shape->entry, sizeof shape->entry, "mma_scan_%d", (int)t->bc);
        fattn_cuda_scan_shape(p, t, t->q_blocks, shape);
    }
}

static void forward_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                          const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const fattn_tile tile = {t->br, t->bc};
    const mma_shape *const s = shape_of(&kernel->row, p, tile);
    name_entry(shape->entry, p, s);
    shape->blocks = t->items;
    shape->threads = 32 * s->warps;
    shape->shared = (int)shape_bytes(s);
    if (s->features != 0 && s->features != MMA_ANY) {
        const mma_shape *const any = shape_find(false, MMA_ANY, s->width, tile);
        name_entry(shape->general, p, any);
        shape->general_shared = (int)shape_bytes(any);
    }
}

/* The cost of a tile in kernels for e4m3, for each of the problem's keys: its rows, whether they
 * exist or not, and what a tile of keys costs beside the products: it is widened, and two barriers
 * follow. That is taken to be as much as 32 rows for 64 keys. */
static double widen_cost(const fattn_kernel *row, const fattn_problem *p,
                         const fattn_limits *limits, fattn_tile tile)
{
    const int64_t rows = fattn_problem_group(p) * p->seqlen_q;
    (void)row;
    (void)limits;
    return (double)fattn_ceil_div(rows, tile.br) * ((double)tile.br + 32.0 * 64 / (double)tile.bc);
}

/* ...: the tiles, shapes of mma.h, most rows first. */
#define MMA_ROW(variant, channels, bytes, bits, ...) \
    MMA_ROW_OF("mma_forward", 0, NULL, variant, channels, bytes, bits, __VA_ARGS__)
#define MMA_WIDEN_ROW(variant, channels, bits, ...)                                                \
    MMA_ROW_OF("mma_forward_e4m3", FATTN_DTYPE_BIT(FATTN_E4M3), widen_cost, variant, channels, 16, \
               (bits) | FATTN_DESCALE, __VA_ARGS__)
#define MMA_ROW_OF(file, caches, price, variant, channels, bytes, bits, ...)         \
    {                                                                                \
        .row = {.name = "mma_" #variant "_" #channels,                               \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                                  \
                .dtypes = FATTN_GPU_HALVES,                                          \
                FATTN_CUDA_CACHES(caches),                                           \
                .features = bits,                                                    \
                .dim_max = channels,                                                 \
                .align = bytes,                                                      \
                .dropout_max = FATTN_GPU_DROPOUT_MAX,                                \
                .must_fit = true,                                                    \
                .packs_groups = true,                                                \
                .split = fattn_cuda_split_forward,                                   \
                .cost = price,                                                       \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},                  \
                .cannot = fattn_cuda_too_large,                                      \
                .fast_bytes = forward_bytes,                                         \
                .workspace = forward_workspace},                                     \
        .image = file, FATTN_CUDA_AMPERE,                                            \
        .phases = {scan_shape, forward_shape, fattn_gpu_combine}, .width = channels, \
    }

/* --- Decoding --------------------------------------------------------------------------------- */

#define MMA_DECODE_SHAPE(channels, keys, warps, stages) {channels, keys, warps, stages},
typedef struct decode_form {
    int width, keys, warps, stages;
} decode_form;
static const decode_form decode_forms[] = {MMA_DECODE_SHAPES(MMA_DECODE_SHAPE)};
static const decode_form wide_forms[] = {MMA_DECODE_WIDE_SHAPES(MMA_DECODE_SHAPE)};
static const decode_form e4m3_forms[] = {MMA_DECODE_E4M3_SHAPES(MMA_DECODE_SHAPE)};
static const decode_form e4m3_wide_forms[] = {MMA_DECODE_E4M3_WIDE_SHAPES(MMA_DECODE_SHAPE)};
static const decode_form e4m3_full_forms[] = {MMA_DECODE_E4M3_FULL_SHAPES(MMA_DECODE_SHAPE)};

/* By the row's `run`. */
static const struct {
    const char *run;
    const decode_form *forms;
} decode_runs[] = {{"lean", decode_forms},         {"full", decode_forms},
                   {"wide", wide_forms},           {"e4m3", e4m3_forms},
                   {"e4m3_wide", e4m3_wide_forms}, {"e4m3_full", e4m3_full_forms}};

static const decode_form *decode_form_of(const fattn_gpu_kernel *kernel, int64_t keys)
{
    int n = 0;
    while (strcmp(kernel->run, decode_runs[n].run) != 0) {
        n++;
    }
    const decode_form *form = decode_runs[n].forms;
    while (form->width != kernel->width || form->keys != keys) {
        form++;
    }
    return form;
}

static int64_t decode_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    const decode_form *const form = decode_form_of(fattn_gpu_kernel_of(row), tile.bc);
    (void)p;
    return MMA_DECODE_SHARED(form->width, row->caches_alone ? 1 : 2,
                             (int64_t)form->keys * form->warps * form->stages);
}

static void decode_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                         const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const decode_form *const form = decode_form_of(kernel, t->bc);
    const char *const dtype = kernel->row.caches_alone ? "" : fattn_dtype_name(p->dtype);
    snprintf(shape->entry, sizeof shape->entry, "mma_decode_%s%s%s_%d_%d", kernel->run,
             *dtype ? "_" : "", dtype, form->width, form->keys);
    shape->blocks = t->items;
    shape->resident = fattn_cuda_cuts(t);
    shape->threads = 32 * form->warps;
    shape->shared = (int)decode_bytes(&kernel->row, p, (fattn_tile){t->br, t->bc});
    shape->early = true;
    shape->merges = fattn_cuda_cuts(t) || fattn_gpu_merges(p, t, shape->threads);
}

/* Lean kernels add a sink when all keys of a row have been summed. */
#define DECODE_LEAN (FATTN_GPU_LEAN | FATTN_SINK)

/* Not batch-invariant: the warps divide a row's keys, so its bits depend on the number of warps.
 * No block masks: other kernels skip whole tiles. */
#define MMA_DECODE(bits) ((bits) & ~(FATTN_BATCH_INVARIANT | FATTN_BLOCK_MASK))

fattn_split_cost fattn_cuda_split_evenly(const fattn_kernel *row, const fattn_problem *p,
                                         const fattn_limits *limits)
{
    fattn_split_cost cost = fattn_gpu_split(row, p, limits);
    cost.units = limits->units;
    return cost;
}

bool fattn_cuda_mask_halves_keys(const fattn_problem *p)
{
    return p->window_right >= 0 && p->seqlen_q > p->seqlen_k / 2;
}

/* Under a causal mask about half of the parts have no keys, and the run takes as long as the rows
 * with the most keys. */
fattn_split_cost fattn_cuda_split_forward(const fattn_kernel *row, const fattn_problem *p,
                                          const fattn_limits *limits)
{
    const int64_t share = fattn_cuda_mask_halves_keys(p) ? 2 : 1;
    fattn_split_cost cost = fattn_cuda_split_evenly(row, p, limits);
    cost.units *= share;
    cost.keys *= share;
    return cost;
}

/* Whether wide rows pay, whose blocks have a multiprocessor to themselves: if there are no more
 * blocks than multiprocessors, with 256 channels in 16 bits no more than twice as many
 * (docs/notes/cuda.md). */
static bool wide_pays(const fattn_kernel *row, const fattn_problem *p, const fattn_limits *limits)
{
    const int64_t rounds = row->dim_max == 256 && !row->caches_alone ? 2 : 1;
    return fattn_kernel_blocks(row, p) <= rounds * limits->units;
}

/* Two blocks run on a multiprocessor at a time, or one in wide rows. */
static fattn_split_cost split_decode(const fattn_kernel *row, const fattn_problem *p,
                                     const fattn_limits *limits)
{
    const int64_t blocks = row->pays == wide_pays ? limits->units : 2 * limits->units;
    fattn_split_cost cost = fattn_cuda_split_evenly(row, p, limits);
    cost.pieces = p->batch > 1 && p->batch <= MMA_CUT_MOST ? MMA_CUT_ROUNDS * blocks : 0;
    return cost;
}

/* ...: the tiles of a warp. */
#define TILE_OF(keys)         \
    {                         \
        MMA_DECODE_ROWS, keys \
    }
#define MMA_DECODE_ROW(variant, channels, bits, when, ...) \
    MMA_DECODE_ROW_OF("mma_decode", 0, variant, channels, MMA_DECODE(bits), when, __VA_ARGS__)
/* FATTN_DESCALE costs kernels for e4m3 nothing: they multiply by its factors in any case. */
#define MMA_DECODE_E4M3_ROW(variant, channels, bits, when, ...)                          \
    MMA_DECODE_ROW_OF("mma_decode_e4m3", FATTN_DTYPE_BIT(FATTN_E4M3), variant, channels, \
                      MMA_DECODE(bits) | FATTN_DESCALE, when, __VA_ARGS__)
#define MMA_DECODE_ROW_OF(file, caches, variant, channels, bits, when, ...)            \
    {                                                                                  \
        .row = {.name = "mma_decode_" #variant "_" #channels,                          \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                                    \
                .dtypes = FATTN_GPU_HALVES,                                            \
                FATTN_CUDA_CACHES(caches),                                             \
                .features = bits,                                                      \
                .dim_max = channels,                                                   \
                .rows_max = MMA_DECODE_ROWS,                                           \
                .align = 16,                                                           \
                .dropout_max = FATTN_GPU_DROPOUT_MAX,                                  \
                .packs_groups = true,                                                  \
                .split = split_decode,                                                 \
                .by_lengths = true,                                                    \
                .must_fit = true,                                                      \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},                    \
                .cannot = fattn_cuda_too_large,                                        \
                .fast_bytes = decode_bytes,                                            \
                .workspace = decode_workspace,                                         \
                .pays = when},                                                         \
        .image = file, FATTN_CUDA_AMPERE, .phases = {decode_shape, fattn_gpu_combine}, \
        .width = channels, .run = #variant,                                            \
    }

/* --- Backward --------------------------------------------------------------------------------- */

/* The variant of the kernel for keys that a full row launches: the one compiled for exactly the
 * problem's features, or else the one for any. Kernels for one feature need rows of tensors that
 * are aligned to 16 bytes. A problem without features of pairs is here because of a sink, which
 * does not concern this kernel, so the lean one does. */
static const char *run_of(const fattn_problem *p)
{
#define MMA_RUN(name, bits, ...) {#name, bits},
    static const struct {
        const char *name;
        uint64_t features;
    } runs[] = {{"lean", 0}, MMA_RUNS(MMA_RUN, )};
    const bool ordered = p->features & FATTN_DETERMINISTIC;
    const uint64_t features = ordered || p->outputs & FATTN_OUT_DBIAS ? MMA_ANY : known_features(p);
    const char *found = NULL;
    for (size_t n = 0; n < sizeof runs / sizeof *runs; n++) {
        const bool knows = runs[n].features == features, any = runs[n].features == MMA_ANY;
        found = knows || (any && !found) ? runs[n].name : found;
    }
    return found;
}

static int64_t backward_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)p;
    return MMA_BACKWARD_SHARED(fattn_gpu_kernel_of(row)->width, tile.br, tile.bc);
}

static void keys_shape(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    const char *const run = strcmp(kernel->run, "full") == 0 ? run_of(p) : kernel->run;
    snprintf(shape->entry, sizeof shape->entry, "mma_backward_%s_%s_%d_%dx%d", run,
             fattn_dtype_name(p->dtype), kernel->width, (int)t->br, (int)t->bc);
    shape->blocks = p->heads_k * fattn_gpu_key_tiles(p, t);
    shape->resident = strcmp(run, "lean") == 0;
    shape->threads = MMA_BACKWARD_THREADS;
    shape->shared = (int)MMA_BACKWARD_SHARED(kernel->width, t->br, t->bc);
    if (run != kernel->run && !shape->resident) {
        snprintf(shape->general, sizeof shape->general, "mma_backward_full_%s_%d_%dx%d",
                 fattn_dtype_name(p->dtype), kernel->width, (int)t->br, (int)t->bc);
        shape->general_shared = shape->shared;
    }
}

/* The common workspace and, unless the run is deterministic, the descriptions of its items. */
static int64_t backward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                  const fattn_tiling *t)
{
    const int64_t bytes = fattn_gpu_backward_workspace(row, p, t);
    const int64_t items = gpu_times(p->heads_k, fattn_gpu_key_tiles(p, t));
    const int64_t jobs =
        p->features & FATTN_DETERMINISTIC ? 0 : gpu_floats(gpu_times(items, MMA_JOB_BYTES / 4));
    return bytes < 0 || jobs < 0 || jobs > INT64_MAX - bytes ? -1 : bytes + jobs;
}

#define MMA_BACKWARD_ORDERED (FATTN_GPU_BACKWARD_LEAN | FATTN_DETERMINISTIC)
#define MMA_BACKWARD_FULL (FATTN_KERNEL_COMMON & ~FATTN_KERNEL_NOT_BACKWARD)

#define MMA_BACKWARD_ROW(label, variant, channels, bytes, bits, ...)              \
    {                                                                             \
        .row = {.name = label,                                                    \
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),                              \
                .dtypes = FATTN_GPU_HALVES,                                       \
                .features = bits,                                                 \
                .dim_max = channels,                                              \
                .align = bytes,                                                   \
                .own_dtype_o = true,                                              \
                .adds_dbias = true,                                               \
                .dropout_max = FATTN_GPU_DROPOUT_MAX,                             \
                .must_fit = true,                                                 \
                .tiles = (const fattn_tile[]){__VA_ARGS__, {0, 0}},               \
                .fast_bytes = backward_bytes,                                     \
                .workspace = backward_workspace},                                 \
        .image = "mma_backward", FATTN_CUDA_AMPERE,                               \
        .phases = {fattn_gpu_backward_clear, fattn_gpu_backward_rows, keys_shape, \
                   fattn_gpu_backward_dq, fattn_gpu_backward_sink},               \
        .width = channels, .run = #variant,                                       \
    }

const fattn_gpu_kernel fattn_cuda_mma[] = {
    MMA_DECODE_ROW(wide, 64, DECODE_LEAN, wide_pays, TILE_OF(32)),
    MMA_DECODE_ROW(lean, 64, DECODE_LEAN, NULL, TILE_OF(16)),
    MMA_DECODE_ROW(wide, 128, DECODE_LEAN, wide_pays, TILE_OF(16), TILE_OF(32)),
    MMA_DECODE_ROW(lean, 128, DECODE_LEAN, NULL, TILE_OF(16), TILE_OF(32)),
    MMA_DECODE_ROW(wide, 256, DECODE_LEAN, wide_pays, TILE_OF(16)),
    MMA_DECODE_ROW(lean, 256, DECODE_LEAN, NULL, TILE_OF(16), TILE_OF(32)),
    MMA_DECODE_ROW(full, 64, FATTN_KERNEL_COMMON, NULL, TILE_OF(16)),
    MMA_DECODE_ROW(full, 128, FATTN_KERNEL_COMMON, NULL, TILE_OF(16), TILE_OF(32)),
    MMA_DECODE_ROW(full, 256, FATTN_KERNEL_COMMON, NULL, TILE_OF(16), TILE_OF(32)),
    MMA_DECODE_E4M3_ROW(e4m3_wide, 64, DECODE_LEAN, wide_pays, TILE_OF(32)),
    MMA_DECODE_E4M3_ROW(e4m3, 64, DECODE_LEAN, NULL, TILE_OF(32)),
    MMA_DECODE_E4M3_ROW(e4m3_wide, 128, DECODE_LEAN, wide_pays, TILE_OF(32)),
    MMA_DECODE_E4M3_ROW(e4m3, 128, DECODE_LEAN, NULL, TILE_OF(32), TILE_OF(16)),
    MMA_DECODE_E4M3_ROW(e4m3_wide, 256, DECODE_LEAN, wide_pays, TILE_OF(32)),
    MMA_DECODE_E4M3_ROW(e4m3, 256, DECODE_LEAN, NULL, TILE_OF(32), TILE_OF(16)),
    MMA_DECODE_E4M3_ROW(e4m3_full, 64, FATTN_KERNEL_COMMON, NULL, TILE_OF(32)),
    MMA_DECODE_E4M3_ROW(e4m3_full, 128, FATTN_KERNEL_COMMON, NULL, TILE_OF(16)),
    MMA_DECODE_E4M3_ROW(e4m3_full, 256, FATTN_KERNEL_COMMON, NULL, TILE_OF(16)),
    MMA_ROW(lean, 64, 16, FATTN_GPU_LEAN, {128, 128}),
    MMA_ROW(lean, 128, 16, FATTN_GPU_LEAN, {128, 64}, {64, 64}),
    MMA_ROW(lean, 256, 16, FATTN_GPU_LEAN, {64, 64}),
    MMA_ROW(full, 64, 0, FATTN_KERNEL_COMMON, {128, 128}),
    MMA_ROW(full, 128, 0, FATTN_KERNEL_COMMON, {128, 64}, {64, 64}),
    MMA_ROW(full, 256, 0, FATTN_KERNEL_COMMON, {128, 64}, {32, 32}),
    MMA_WIDEN_ROW(e4m3, 64, FATTN_GPU_LEAN, {128, 128}, {64, 128}),
    MMA_WIDEN_ROW(e4m3, 128, FATTN_GPU_LEAN, {128, 64}, {64, 64}),
    MMA_WIDEN_ROW(e4m3, 256, FATTN_GPU_LEAN, {128, 64}, {64, 32}),
    MMA_WIDEN_ROW(e4m3_full, 64, FATTN_KERNEL_COMMON, {64, 128}),
    MMA_WIDEN_ROW(e4m3_full, 128, FATTN_KERNEL_COMMON, {64, 64}),
    MMA_WIDEN_ROW(e4m3_full, 256, FATTN_KERNEL_COMMON, {64, 32}),
    MMA_BACKWARD_ROW("mma_backward_64", lean, 64, 16, FATTN_GPU_BACKWARD_LEAN, {128, 128}),
    MMA_BACKWARD_ROW("mma_backward_128", lean, 128, 16, FATTN_GPU_BACKWARD_LEAN, {64, 128}),
    MMA_BACKWARD_ROW("mma_backward_256", lean, 256, 16, FATTN_GPU_BACKWARD_LEAN, {64, 64}),
    MMA_BACKWARD_ROW("mma_backward_ordered_64", ordered, 64, 16, MMA_BACKWARD_ORDERED, {128, 128}),
    MMA_BACKWARD_ROW("mma_backward_ordered_128", ordered, 128, 16, MMA_BACKWARD_ORDERED, {64, 128}),
    MMA_BACKWARD_ROW("mma_backward_ordered_256", ordered, 256, 16, MMA_BACKWARD_ORDERED, {64, 64}),
    MMA_BACKWARD_ROW("mma_backward_full_64", full, 64, 0, MMA_BACKWARD_FULL, {128, 128}),
    MMA_BACKWARD_ROW("mma_backward_full_128", full, 128, 0, MMA_BACKWARD_FULL, {64, 128}),
    MMA_BACKWARD_ROW("mma_backward_full_256", full, 256, 0, MMA_BACKWARD_FULL, {64, 64}),
    {.row = {.name = NULL}},
};
