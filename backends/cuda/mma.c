/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of the mma.sync kernels (mma_decode.cuh, mma_forward.cuh, mma_backward.cuh), for f16 and
 * bf16 from Ampere on. One row a padded width, since tiles go with it; lean rows for what most runs
 * are made of, and rows for everything.
 */
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/mma.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"

#define MMA_DTYPES (FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))

/* --- Runs with one feature of pairs ----------------------------------------------------------- */

static bool has_chunks(const fattn_strides *s)
{
    return s->batch % 8 == 0 && s->seq % 8 == 0 && s->head % 8 == 0;
}

/* The features of pairs that a kernel for p may know: its own, if rows of tensors begin at
 * multiples of 16 bytes and a bias has their type. */
static uint64_t known_features(const fattn_problem *p)
{
    const uint64_t features = p->features & MMA_OF_PAIRS;
    const bool aligned = p->pointer_alignment >= 16 && has_chunks(&p->q) && has_chunks(&p->k) &&
                         has_chunks(&p->v) && (p->op == FATTN_FORWARD || has_chunks(&p->dout));
    const bool bias = p->dtype_bias == p->dtype || !(features & FATTN_BIAS);
    return aligned && bias ? features : MMA_ANY;
}

/* --- Forward ---------------------------------------------------------------------------------- */

typedef struct mma_shape {
    const char *run;
    uint64_t features;
    int width, rows, keys, stages, tiles, warps, blocks;
} mma_shape;
#define MMA_SHAPE(run, ...) {#run, __VA_ARGS__},
static const mma_shape mma_shapes[] = {MMA_SHAPES(MMA_SHAPE)};

/* The shape that knows these features, or else that which is for all. */
static const mma_shape *shape_find(uint64_t features, int width, fattn_tile tile)
{
    const mma_shape *any = NULL;
    for (size_t n = 0; n < sizeof mma_shapes / sizeof *mma_shapes; n++) {
        const mma_shape *const s = mma_shapes + n;
        if (s->width == width && s->rows == tile.br && s->keys == tile.bc) {
            if (s->features == features) {
                return s;
            }
            any = s->features == MMA_ANY ? s : any;
        }
    }
    return any;
}

/* Lean rows' features are 0. Kernels for one feature want a bias's or mask's entries along keys to
 * be neighbours; one without features has a sink, of which lean ones know nothing. */
static uint64_t lean_features(const fattn_problem *p)
{
    (void)p;
    return 0;
}

static uint64_t full_features(const fattn_problem *p)
{
    const uint64_t features = known_features(p);
    const bool apart = (features == FATTN_BIAS && p->bias_stride[3] != 1) ||
                       (features == FATTN_MASK && p->mask_stride[3] != 1);
    return apart || features == 0 ? MMA_ANY : features;
}

static int64_t shape_bytes(const mma_shape *s)
{
    return MMA_SHARED(s->features, s->width, s->rows, s->keys, s->stages);
}

static void shape_of(const fattn_problem *p, const fattn_tiling *t, const mma_shape *s,
                     fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_%s_%s_%d_%dx%d", s->run,
             p->dtype == FATTN_F16 ? "f16" : "bf16", s->width, s->rows, s->keys);
    shape->blocks = t->items;
    shape->threads = 32 * s->warps;
    shape->shared = (int)shape_bytes(s);
}

/* What belongs to a variant and a width. */
#define MMA_FUNCTIONS(variant, width)                                                    \
    static int64_t variant##_##width##_bytes(const fattn_problem *p, fattn_tile tile)    \
    {                                                                                    \
        return shape_bytes(shape_find(variant##_features(p), width, tile));              \
    }                                                                                    \
    static void variant##_##width##_shape(const fattn_problem *p, const fattn_tiling *t, \
                                          fattn_gpu_shape *shape)                        \
    {                                                                                    \
        const fattn_tile tile = {t->br, t->bc};                                          \
        shape_of(p, t, shape_find(variant##_features(p), width, tile), shape);           \
    }
MMA_FUNCTIONS(lean, 64)
MMA_FUNCTIONS(lean, 128)
MMA_FUNCTIONS(lean, 256)
MMA_FUNCTIONS(full, 64)
MMA_FUNCTIONS(full, 128)
MMA_FUNCTIONS(full, 256)

/* The shapes of mma.h, most rows first. */
static const fattn_tile lean_64[] = {{128, 128}, {0, 0}};
static const fattn_tile lean_128[] = {{128, 64}, {64, 64}, {0, 0}};
static const fattn_tile lean_256[] = {{64, 64}, {0, 0}};
static const fattn_tile full_64[] = {{128, 128}, {0, 0}};
static const fattn_tile full_128[] = {{128, 64}, {64, 64}, {0, 0}};
static const fattn_tile full_256[] = {{128, 64}, {32, 32}, {0, 0}};

/* Beyond it the few pairs that are kept may be too small beside the others for f16. */
#define MMA_DROPOUT_MAX 0.99

#define MMA_ROW(variant, width, bytes, bits)                          \
    {                                                                 \
        .row = {.name = "mma_" #variant "_" #width,                   \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                   \
                .dtypes = MMA_DTYPES,                                 \
                .features = bits,                                     \
                .dim_max = width,                                     \
                .align = bytes,                                       \
                .dropout_max = MMA_DROPOUT_MAX,                       \
                .must_fit = true,                                     \
                .packs_groups = true,                                 \
                .splits_keys = true,                                  \
                .tiles = variant##_##width,                           \
                .fast_bytes = variant##_##width##_bytes,              \
                .workspace = fattn_gpu_parts_workspace},              \
        .image = "mma_forward", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {variant##_##width##_shape, fattn_gpu_combine},     \
    }

/* --- Decoding --------------------------------------------------------------------------------- */

#define MMA_DECODE_SHAPE(channels, keys, warps, stages) {channels, keys, warps, stages},
typedef struct decode_form {
    int width, keys, warps, stages;
} decode_form;
static const decode_form lean_forms[] = {MMA_DECODE_SHAPES(MMA_DECODE_SHAPE)};
static const decode_form *const full_forms = lean_forms;
static const decode_form wide_forms[] = {MMA_DECODE_WIDE_SHAPES(MMA_DECODE_SHAPE)};

static const decode_form *decode_form_of(const decode_form *form, int width, int64_t keys)
{
    while (form->width != width || form->keys != keys) {
        form++;
    }
    return form;
}

static int64_t decode_bytes(const decode_form *form)
{
    return MMA_DECODE_SHARED(form->width, (int64_t)form->keys * form->warps * form->stages);
}

static void decode_shape(const fattn_problem *p, const char *variant, const decode_form *form,
                         const fattn_tiling *t, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_decode_%s_%s_%d_%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", form->width, form->keys);
    shape->blocks = t->items;
    shape->threads = 32 * form->warps;
    shape->shared = (int)decode_bytes(form);
    shape->early = true;
    shape->merges = fattn_gpu_merges(p, t, shape->threads);
}

#define MMA_DECODE_FUNCTIONS(variant, width)                                                 \
    static int64_t variant##_decode_##width##_bytes(const fattn_problem *p, fattn_tile tile) \
    {                                                                                        \
        (void)p;                                                                             \
        return decode_bytes(decode_form_of(variant##_forms, width, tile.bc));                \
    }                                                                                        \
    static void variant##_decode_##width(const fattn_problem *p, const fattn_tiling *t,      \
                                         fattn_gpu_shape *shape)                             \
    {                                                                                        \
        decode_shape(p, #variant, decode_form_of(variant##_forms, width, t->bc), t, shape);  \
    }
MMA_DECODE_FUNCTIONS(lean, 64)
MMA_DECODE_FUNCTIONS(lean, 128)
MMA_DECODE_FUNCTIONS(lean, 256)
MMA_DECODE_FUNCTIONS(full, 64)
MMA_DECODE_FUNCTIONS(full, 128)
MMA_DECODE_FUNCTIONS(full, 256)
MMA_DECODE_FUNCTIONS(wide, 64)
MMA_DECODE_FUNCTIONS(wide, 128)
MMA_DECODE_FUNCTIONS(wide, 256)

/* Tiles of a warp. */
static const fattn_tile decode_64[] = {{MMA_DECODE_ROWS, 16}, {0, 0}};
static const fattn_tile decode_128[] = {{MMA_DECODE_ROWS, 16}, {MMA_DECODE_ROWS, 32}, {0, 0}};
static const fattn_tile decode_256[] = {{MMA_DECODE_ROWS, 16}, {MMA_DECODE_ROWS, 32}, {0, 0}};
static const fattn_tile wide_64[] = {{MMA_DECODE_ROWS, 32}, {0, 0}};
static const fattn_tile wide_128[] = {{MMA_DECODE_ROWS, 16}, {MMA_DECODE_ROWS, 32}, {0, 0}};
static const fattn_tile wide_256[] = {{MMA_DECODE_ROWS, 16}, {0, 0}};

/* Warps meet the keys of a row side by side, which its bits would tell; a block mask is for kernels
 * that skip a tile as a block. */
#define MMA_DECODE(bits) ((bits) & ~(FATTN_BATCH_INVARIANT | FATTN_BLOCK_MASK))

#define MMA_DECODE_ROW(variant, width, menu, bits, alone)            \
    {                                                                \
        .row = {.name = "mma_decode_" #variant "_" #width,           \
                .ops = FATTN_OP_BIT(FATTN_FORWARD),                  \
                .dtypes = MMA_DTYPES,                                \
                .features = MMA_DECODE(bits),                        \
                .dim_max = width,                                    \
                .rows_max = MMA_DECODE_ROWS,                         \
                .align = 16,                                         \
                .dropout_max = MMA_DROPOUT_MAX,                      \
                .packs_groups = true,                                \
                .splits_keys = true,                                 \
                .split_keys = 256,                                   \
                .splits_evenly = true,                               \
                .must_fit = true,                                    \
                .tiles = menu,                                       \
                .fast_bytes = variant##_decode_##width##_bytes,      \
                .workspace = fattn_gpu_decode_workspace,             \
                .one_round = alone},                                 \
        .image = "mma_decode", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {variant##_decode_##width, fattn_gpu_combine},     \
    }

/* --- Backward --------------------------------------------------------------------------------- */

/* Which of the full kernels, or lean, a run is for. Those of one feature want rows of tensors at
 * multiples of 16 bytes. A run without features is lean but for a sink, of which keys know
 * nothing. */
static const char *run_of(const fattn_problem *p)
{
#define MMA_RUN(name, bits, ...) {#name, bits},
    static const struct {
        const char *name;
        uint64_t features;
    } runs[] = {MMA_RUNS(MMA_RUN, )};
    const uint64_t features = known_features(p);
    const bool knows = !(p->features & FATTN_DETERMINISTIC) && !(p->outputs & FATTN_OUT_DBIAS);
    if (knows && !features) {
        return "lean";
    }
    for (size_t n = 1; knows && n < sizeof runs / sizeof *runs; n++) {
        if (runs[n].features == features) {
            return runs[n].name;
        }
    }
    return runs[0].name;
}

static void keys_shape(const fattn_problem *p, const fattn_tiling *t, const char *variant,
                       int width, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_backward_%s_%s_%d_%dx%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", width, (int)t->br, (int)t->bc);
    shape->blocks = p->batch * p->heads_k * t->k_blocks;
    shape->resident = strcmp(variant, "lean") == 0;
    shape->threads = MMA_BACKWARD_THREADS;
    shape->shared = (int)MMA_BACKWARD_SHARED(width, t->br, t->bc);
}

/* A workspace, and what the items of a run are, unless it is ordered. */
static int64_t with_jobs(const fattn_problem *p, const fattn_tiling *t, int64_t bytes)
{
    const int64_t items = gpu_times(gpu_times(p->batch, p->heads_k), t->k_blocks);
    const int64_t jobs =
        p->features & FATTN_DETERMINISTIC ? 0 : gpu_floats(gpu_times(items, MMA_JOB_BYTES / 4));
    return bytes < 0 || jobs < 0 || jobs > INT64_MAX - bytes ? -1 : bytes + jobs;
}

/* What belongs to a width, and to a variant of it. */
#define MMA_BACKWARD_BYTES(width)                                                              \
    static int64_t backward_##width##_bytes(const fattn_problem *p, fattn_tile tile)           \
    {                                                                                          \
        (void)p;                                                                               \
        return MMA_BACKWARD_SHARED(width, tile.br, tile.bc);                                   \
    }                                                                                          \
    static int64_t backward_##width##_workspace(const fattn_problem *p, const fattn_tiling *t) \
    {                                                                                          \
        return with_jobs(p, t, fattn_gpu_backward_workspace_##width(p, t));                    \
    }
#define MMA_BACKWARD_KEYS(variant, run, width)                                        \
    static void variant##_keys_##width(const fattn_problem *p, const fattn_tiling *t, \
                                       fattn_gpu_shape *shape)                        \
    {                                                                                 \
        keys_shape(p, t, run, width, shape);                                          \
    }
MMA_BACKWARD_BYTES(64)
MMA_BACKWARD_BYTES(128)
MMA_BACKWARD_BYTES(256)
MMA_BACKWARD_KEYS(lean, "lean", 64)
MMA_BACKWARD_KEYS(lean, "lean", 128)
MMA_BACKWARD_KEYS(lean, "lean", 256)
MMA_BACKWARD_KEYS(ordered, "ordered", 64)
MMA_BACKWARD_KEYS(ordered, "ordered", 128)
MMA_BACKWARD_KEYS(ordered, "ordered", 256)
MMA_BACKWARD_KEYS(full, run_of(p), 64)
MMA_BACKWARD_KEYS(full, run_of(p), 128)
MMA_BACKWARD_KEYS(full, run_of(p), 256)

static const fattn_tile backward_64[] = {{128, 128}, {0, 0}};
static const fattn_tile backward_128[] = {{64, 128}, {0, 0}};
static const fattn_tile backward_256[] = {{64, 64}, {0, 0}};

#define MMA_BACKWARD_ORDERED (FATTN_GPU_BACKWARD_LEAN | FATTN_DETERMINISTIC)
#define MMA_BACKWARD_FULL (FATTN_KERNEL_COMMON & ~FATTN_GPU_NOT_BACKWARD)

#define MMA_BACKWARD_ROW(label, variant, width, bytes, bits)                  \
    {                                                                         \
        .row = {.name = label,                                                \
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),                          \
                .dtypes = MMA_DTYPES,                                         \
                .features = bits,                                             \
                .dim_max = width,                                             \
                .align = bytes,                                               \
                .own_dtype_o = true,                                          \
                .adds_dbias = true,                                           \
                .dropout_max = MMA_DROPOUT_MAX,                               \
                .must_fit = true,                                             \
                .tiles = backward_##width,                                    \
                .fast_bytes = backward_##width##_bytes,                       \
                .workspace = backward_##width##_workspace},                   \
        .image = "mma_backward", .isa = 80, .needs = "sm_80 or newer",        \
        .phases = {fattn_gpu_backward_clear, fattn_gpu_backward_rows_##width, \
                   variant##_keys_##width, fattn_gpu_backward_dq_##width,     \
                   fattn_gpu_backward_sink_##width},                          \
    }

const fattn_gpu_kernel fattn_cuda_mma[] = {
    MMA_DECODE_ROW(wide, 64, wide_64, FATTN_GPU_LEAN, true),
    MMA_DECODE_ROW(lean, 64, decode_64, FATTN_GPU_LEAN, false),
    MMA_DECODE_ROW(wide, 128, wide_128, FATTN_GPU_LEAN, true),
    MMA_DECODE_ROW(lean, 128, decode_128, FATTN_GPU_LEAN, false),
    MMA_DECODE_ROW(wide, 256, wide_256, FATTN_GPU_LEAN, true),
    MMA_DECODE_ROW(lean, 256, decode_256, FATTN_GPU_LEAN, false),
    MMA_DECODE_ROW(full, 64, decode_64, FATTN_KERNEL_COMMON, false),
    MMA_DECODE_ROW(full, 128, decode_128, FATTN_KERNEL_COMMON, false),
    MMA_DECODE_ROW(full, 256, decode_256, FATTN_KERNEL_COMMON, false),
    MMA_ROW(lean, 64, 16, FATTN_GPU_LEAN),
    MMA_ROW(lean, 128, 16, FATTN_GPU_LEAN),
    MMA_ROW(lean, 256, 16, FATTN_GPU_LEAN),
    MMA_ROW(full, 64, 0, FATTN_KERNEL_COMMON),
    MMA_ROW(full, 128, 0, FATTN_KERNEL_COMMON),
    MMA_ROW(full, 256, 0, FATTN_KERNEL_COMMON),
    MMA_BACKWARD_ROW("mma_backward_64", lean, 64, 16, FATTN_GPU_BACKWARD_LEAN),
    MMA_BACKWARD_ROW("mma_backward_128", lean, 128, 16, FATTN_GPU_BACKWARD_LEAN),
    MMA_BACKWARD_ROW("mma_backward_256", lean, 256, 16, FATTN_GPU_BACKWARD_LEAN),
    MMA_BACKWARD_ROW("mma_backward_ordered_64", ordered, 64, 16, MMA_BACKWARD_ORDERED),
    MMA_BACKWARD_ROW("mma_backward_ordered_128", ordered, 128, 16, MMA_BACKWARD_ORDERED),
    MMA_BACKWARD_ROW("mma_backward_ordered_256", ordered, 256, 16, MMA_BACKWARD_ORDERED),
    MMA_BACKWARD_ROW("mma_backward_full_64", full, 64, 0, MMA_BACKWARD_FULL),
    MMA_BACKWARD_ROW("mma_backward_full_128", full, 128, 0, MMA_BACKWARD_FULL),
    MMA_BACKWARD_ROW("mma_backward_full_256", full, 256, 0, MMA_BACKWARD_FULL),
    {.row = {.name = NULL}},
};
