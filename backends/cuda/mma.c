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
/* Threads of a block, which goes with the shape. */
static int threads_of(int width, const fattn_tiling *t)
{
#define MMA_THREADS(variant, channels, rows, keys, tiles, warps, blocks) \
    {channels, rows, keys, GPU_LANES * (warps)},
    enum { GPU_LANES = 32 };
    static const struct {
        int width, rows, keys, threads;
    } shapes[] = {MMA_SHAPES(MMA_THREADS)};
    int n = 0;
    while (shapes[n].width != width || shapes[n].rows != t->br || shapes[n].keys != t->bc) {
        n++;
    }
    return shapes[n].threads;
}

static void shape_of(const fattn_problem *p, const fattn_tiling *t, const char *variant, int width,
                     int64_t shared, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_%s_%s_%d_%dx%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", width, (int)t->br, (int)t->bc);
    shape->blocks = t->items;
    shape->threads = threads_of(width, t);
    shape->shared = (int)shared;
}

/* What belongs to a variant and a width. */
#define MMA_FUNCTIONS(variant, width)                                                     \
    static int64_t variant##_##width##_bytes(const fattn_problem *p, fattn_tile tile)     \
    {                                                                                     \
        (void)p;                                                                          \
        return MMA_SHARED(variant, width, tile.br, tile.bc);                              \
    }                                                                                     \
    static void variant##_##width##_shape(const fattn_problem *p, const fattn_tiling *t,  \
                                          fattn_gpu_shape *shape)                         \
    {                                                                                     \
        shape_of(p, t, #variant, width, MMA_SHARED(variant, width, t->br, t->bc), shape); \
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
static const fattn_tile lean_256[] = {{128, 64}, {64, 32}, {0, 0}};
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
static const struct {
    int width, keys, warps, stages;
} decode_shapes[] = {MMA_DECODE_SHAPES(MMA_DECODE_SHAPE)};

static int decode_number(int width, int64_t keys)
{
    int n = 0;
    while (decode_shapes[n].width != width || decode_shapes[n].keys != keys) {
        n++;
    }
    return n;
}

static int64_t decode_bytes(int width, int64_t keys)
{
    const int n = decode_number(width, keys);
    return MMA_DECODE_SHARED(width, keys * decode_shapes[n].warps * decode_shapes[n].stages);
}

static void decode_shape(const fattn_problem *p, const fattn_tiling *t, const char *variant,
                         int width, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_decode_%s_%s_%d_%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", width, (int)t->bc);
    shape->blocks = t->items;
    shape->threads = 32 * decode_shapes[decode_number(width, t->bc)].warps;
    shape->shared = (int)decode_bytes(width, t->bc);
    shape->early = true;
}

#define MMA_DECODE_PHASE(variant, width)                                                \
    static void variant##_decode_##width(const fattn_problem *p, const fattn_tiling *t, \
                                         fattn_gpu_shape *shape)                        \
    {                                                                                   \
        decode_shape(p, t, #variant, width, shape);                                     \
    }
#define MMA_DECODE_FUNCTIONS(width)                                                \
    static int64_t decode_##width##_bytes(const fattn_problem *p, fattn_tile tile) \
    {                                                                              \
        (void)p;                                                                   \
        return decode_bytes(width, tile.bc);                                       \
    }                                                                              \
    MMA_DECODE_PHASE(lean, width)                                                  \
    MMA_DECODE_PHASE(full, width)
MMA_DECODE_FUNCTIONS(64)
MMA_DECODE_FUNCTIONS(128)
MMA_DECODE_FUNCTIONS(256)

/* Tiles of a warp. */
static const fattn_tile decode_64[] = {{MMA_DECODE_ROWS, 16}, {0, 0}};
static const fattn_tile decode_128[] = {{MMA_DECODE_ROWS, 16}, {MMA_DECODE_ROWS, 32}, {0, 0}};
static const fattn_tile decode_256[] = {{MMA_DECODE_ROWS, 16}, {MMA_DECODE_ROWS, 32}, {0, 0}};

/* Warps meet the keys of a row side by side, which its bits would tell; a block mask is for kernels
 * that skip a tile as a block. */
#define MMA_DECODE(bits) ((bits) & ~(FATTN_BATCH_INVARIANT | FATTN_BLOCK_MASK))

#define MMA_DECODE_ROW(variant, width, bits)                         \
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
                .tiles = decode_##width,                             \
                .fast_bytes = decode_##width##_bytes,                \
                .workspace = fattn_gpu_parts_workspace},             \
        .image = "mma_decode", .isa = 80, .needs = "sm_80 or newer", \
        .phases = {variant##_decode_##width, fattn_gpu_combine},     \
    }

/* --- Backward --------------------------------------------------------------------------------- */

static void rows_shape(const fattn_problem *p, const char *entry, int width, fattn_gpu_shape *shape)
{
    const int64_t rows = p->batch * p->heads_q * p->seqlen_q;
    snprintf(shape->entry, sizeof shape->entry, "mma_backward_%s_%d", entry, width);
    shape->blocks = gpu_ceil_div(rows, MMA_BACKWARD_ROWS);
    shape->threads = 128;
}

static void keys_shape(const fattn_problem *p, const fattn_tiling *t, const char *variant,
                       int width, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_backward_%s_%s_%d_%dx%d", variant,
             p->dtype == FATTN_F16 ? "f16" : "bf16", width, (int)t->br, (int)t->bc);
    shape->blocks = p->batch * p->heads_k * t->k_blocks;
    shape->threads = MMA_BACKWARD_THREADS;
    shape->shared = (int)MMA_BACKWARD_SHARED(width, t->br, t->bc);
}

/* Rows of dbias. */
static int64_t clear_rows(const fattn_problem *p)
{
    const int64_t *const stride = p->dbias_stride;
    return gpu_times(gpu_times(stride[0] ? p->batch : 1, stride[1] ? p->heads_q : 1),
                     stride[2] ? p->seqlen_q : 1);
}

static void clear_shape(const fattn_problem *p, const fattn_tiling *t, fattn_gpu_shape *shape)
{
    (void)t;
    const bool sums = p->outputs & FATTN_OUT_DBIAS && !(p->features & FATTN_ACCUMULATE);
    snprintf(shape->entry, sizeof shape->entry, "mma_backward_clear");
    shape->blocks = sums ? clear_rows(p) : 0;
    shape->threads = 256;
}

static void sink_shape(const fattn_problem *p, int width, fattn_gpu_shape *shape)
{
    snprintf(shape->entry, sizeof shape->entry, "mma_backward_sink_%d", width);
    shape->blocks = p->outputs & FATTN_OUT_DSINK ? p->heads_q : 0;
    shape->threads = 256;
}

/* dQ, lse and delta of every row; of an ordered run a count of items, of two words, and the turn of
 * every tile of queries. What is counted besides must be countable. */
static int64_t backward_workspace(const fattn_problem *p, const fattn_tiling *t, int width)
{
    const int64_t heads = gpu_times(p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch, p->heads_q);
    const int64_t turns = p->features & FATTN_DETERMINISTIC
                              ? gpu_times(gpu_times(p->batch, p->heads_q), t->q_blocks)
                              : 0;
    const int64_t rows = gpu_times(gpu_times(heads, p->total_q), width + 2);
    const bool countable = (!(p->outputs & FATTN_OUT_DBIAS) || clear_rows(p) >= 0) && rows >= 0 &&
                           turns >= 0 && rows <= INT64_MAX - turns - 2;
    return countable ? gpu_floats(rows + turns + 2) : -1;
}

/* What belongs to a width, and to a variant of it. */
#define MMA_BACKWARD_FUNCTIONS(width)                                                          \
    static int64_t backward_##width##_bytes(const fattn_problem *p, fattn_tile tile)           \
    {                                                                                          \
        (void)p;                                                                               \
        return MMA_BACKWARD_SHARED(width, tile.br, tile.bc);                                   \
    }                                                                                          \
    static int64_t backward_##width##_workspace(const fattn_problem *p, const fattn_tiling *t) \
    {                                                                                          \
        return backward_workspace(p, t, width);                                                \
    }                                                                                          \
    static void backward_##width##_rows(const fattn_problem *p, const fattn_tiling *t,         \
                                        fattn_gpu_shape *shape)                                \
    {                                                                                          \
        (void)t;                                                                               \
        rows_shape(p, "rows", width, shape);                                                   \
        shape->blocks += shape->blocks == 0; /* what counts items is cleared there too */      \
    }                                                                                          \
    static void backward_##width##_dq(const fattn_problem *p, const fattn_tiling *t,           \
                                      fattn_gpu_shape *shape)                                  \
    {                                                                                          \
        (void)t;                                                                               \
        rows_shape(p, "dq", width, shape);                                                     \
        shape->blocks = p->outputs & FATTN_OUT_DQ ? shape->blocks : 0;                         \
    }                                                                                          \
    static void backward_##width##_sink(const fattn_problem *p, const fattn_tiling *t,         \
                                        fattn_gpu_shape *shape)                                \
    {                                                                                          \
        (void)t;                                                                               \
        sink_shape(p, width, shape);                                                           \
    }
#define MMA_BACKWARD_KEYS(variant, width)                                             \
    static void variant##_keys_##width(const fattn_problem *p, const fattn_tiling *t, \
                                       fattn_gpu_shape *shape)                        \
    {                                                                                 \
        keys_shape(p, t, #variant, width, shape);                                     \
    }
MMA_BACKWARD_FUNCTIONS(64)
MMA_BACKWARD_FUNCTIONS(128)
MMA_BACKWARD_FUNCTIONS(256)
MMA_BACKWARD_KEYS(lean, 64)
MMA_BACKWARD_KEYS(lean, 128)
MMA_BACKWARD_KEYS(lean, 256)
MMA_BACKWARD_KEYS(ordered, 64)
MMA_BACKWARD_KEYS(ordered, 128)
MMA_BACKWARD_KEYS(ordered, 256)
MMA_BACKWARD_KEYS(full, 64)
MMA_BACKWARD_KEYS(full, 128)
MMA_BACKWARD_KEYS(full, 256)

static const fattn_tile backward_64[] = {{128, 128}, {0, 0}};
static const fattn_tile backward_128[] = {{64, 128}, {0, 0}};
static const fattn_tile backward_256[] = {{64, 64}, {0, 0}};

#define MMA_NOT_BACKWARD (FATTN_PAGED | FATTN_BATCH_INVARIANT)
#define MMA_BACKWARD_ORDERED ((MMA_LEAN & ~MMA_NOT_BACKWARD) | FATTN_DLSE | FATTN_ACCUMULATE)
#define MMA_BACKWARD_LEAN (MMA_BACKWARD_ORDERED & ~FATTN_DETERMINISTIC)
#define MMA_BACKWARD_FULL (FATTN_FEATURES_ALL & ~MMA_NOT_BACKWARD)

#define MMA_BACKWARD_ROW(label, variant, width, bytes, bits)                     \
    {                                                                            \
        .row = {.name = label,                                                   \
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),                             \
                .dtypes = MMA_DTYPES,                                            \
                .features = bits,                                                \
                .dim_max = width,                                                \
                .align = bytes,                                                  \
                .own_dtype_o = true,                                             \
                .adds_dbias = true,                                              \
                .dropout_max = MMA_DROPOUT_MAX,                                  \
                .must_fit = true,                                                \
                .tiles = backward_##width,                                       \
                .fast_bytes = backward_##width##_bytes,                          \
                .workspace = backward_##width##_workspace},                      \
        .image = "mma_backward", .isa = 80, .needs = "sm_80 or newer",           \
        .phases = {clear_shape, backward_##width##_rows, variant##_keys_##width, \
                   backward_##width##_dq, backward_##width##_sink},              \
    }

const fattn_gpu_kernel fattn_cuda_mma[] = {
    MMA_DECODE_ROW(lean, 64, MMA_LEAN),
    MMA_DECODE_ROW(lean, 128, MMA_LEAN),
    MMA_DECODE_ROW(lean, 256, MMA_LEAN),
    MMA_DECODE_ROW(full, 64, FATTN_FEATURES_ALL),
    MMA_DECODE_ROW(full, 128, FATTN_FEATURES_ALL),
    MMA_DECODE_ROW(full, 256, FATTN_FEATURES_ALL),
    MMA_ROW(lean, 64, 16, MMA_LEAN),
    MMA_ROW(lean, 128, 16, MMA_LEAN),
    MMA_ROW(lean, 256, 16, MMA_LEAN),
    MMA_ROW(full, 64, 0, FATTN_FEATURES_ALL),
    MMA_ROW(full, 128, 0, FATTN_FEATURES_ALL),
    MMA_ROW(full, 256, 0, FATTN_FEATURES_ALL),
    MMA_BACKWARD_ROW("mma_backward_64", lean, 64, 16, MMA_BACKWARD_LEAN),
    MMA_BACKWARD_ROW("mma_backward_128", lean, 128, 16, MMA_BACKWARD_LEAN),
    MMA_BACKWARD_ROW("mma_backward_256", lean, 256, 16, MMA_BACKWARD_LEAN),
    MMA_BACKWARD_ROW("mma_backward_ordered_64", ordered, 64, 16, MMA_BACKWARD_ORDERED),
    MMA_BACKWARD_ROW("mma_backward_ordered_128", ordered, 128, 16, MMA_BACKWARD_ORDERED),
    MMA_BACKWARD_ROW("mma_backward_ordered_256", ordered, 256, 16, MMA_BACKWARD_ORDERED),
    MMA_BACKWARD_ROW("mma_backward_full_64", full, 64, 0, MMA_BACKWARD_FULL),
    MMA_BACKWARD_ROW("mma_backward_full_128", full, 128, 0, MMA_BACKWARD_FULL),
    MMA_BACKWARD_ROW("mma_backward_full_256", full, 256, 0, MMA_BACKWARD_FULL),
    {.row = {.name = NULL}},
};
