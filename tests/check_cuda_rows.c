/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which rows of backend "cuda" take which problems on a Hopper device, and what they are given:
 * tensor maps, lists of sequences, counters (a driver without a GPU, stub/).
 */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <stdio.h>
#include <string.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "core/plan.h"
#include "tests/environment.h"
#include "tests/scene.h"

static int64_t maps_seen; /* launches that were given tensor maps */

/* Checks that the maps of q, k and v have the operands' addresses, which the stub stores first. */
static void watch_maps(void **parameters)
{
    const fattn_gpu_args *const args = parameters[0];
    const void *const wanted[] = {args->buffers.q, args->buffers.k, args->buffers.v};
    EACH (n, wanted) {
        const void *address = NULL;
        memcpy(&address, (const char *)parameters[1] + n * FATTN_GPU_MAP_BYTES, sizeof address);
        expect(address == wanted[n], "map %d is of %p, not %p", (int)n, address, wanted[n]);
    }
    maps_seen++;
}

/* Strides that callers use; the stub refuses those that a driver would refuse. */
static void check_map_strides(void)
{
    enum { ROWS = 97, D = 40 };
    static const struct {
        const char *what;
        int64_t batch, heads, group;
        fattn_strides k; /* of k and v, in elements */
    } layouts[] = {
        {"packed rows", 3, 2, 1, {2 * ROWS * D, 2 * D, D}},
        {"heads before rows", 3, 2, 3, {2 * ROWS * D, D, ROWS * D}},
        {"keys that heads share", 3, 2, 1, {ROWS * D, D, 0}},
        {"keys that sequences share", 3, 2, 7, {0, 2 * D, D}},
        {"one of each", 1, 1, 1, {0, D, 0}},
    };
    scene s = {.spec = "cuda:0"};
    expect_begin("strides of tensor maps");
    maps_seen = 0;
    scene_open(&s);
    expect_ok(fattn_device_malloc(s.device, OPERANDS * OPERAND, &s.operands), "memory");
    stub->watch = watch_maps;
    EACH (n, layouts) {
        fattn_plan *plan = NULL;
        fattn_problem p = scene_problem(FORWARD);
        p.layout = FATTN_STRIDED;
        p.batch = layouts[n].batch;
        p.heads_k = layouts[n].heads, p.heads_q = layouts[n].heads * layouts[n].group;
        p.seqlen_q = p.seqlen_k = ROWS;
        p.dim = p.dim_v = D;
        p.q = p.o = (fattn_strides){ROWS * p.heads_q * D, p.heads_q * D, D};
        p.k = p.v = layouts[n].k;
        s.buffers = scene_buffers(s.operands);
        if (expect_ok(fattn_plan_create(s.device, &p, &plan), layouts[n].what)) {
            expect_ok(fattn_execute(plan, &s.buffers, NULL, NULL), layouts[n].what);
        }
        fattn_plan_destroy(plan);
    }
    stub->watch = NULL;
    expect(maps_seen >= (int64_t)(sizeof layouts / sizeof *layouts), "%d launches", (int)maps_seen);
    scene_tear_down(&s);
    tap_check(expect_held(), "tensor maps of %d layouts are what a driver takes",
              (int)(sizeof layouts / sizeof *layouts));
}

/* Problems that a row with tensor maps declines, with the reason. */
static void check_map_refusals(void)
{
    static const struct {
        const char *reason;
        fattn_strides q, k;
        int64_t group;
    } cases[] = {
        {"takes no rows of stride 0", {64, 64, 0}, {0, 0, 0}, 1},
        {"takes no queries that heads share by a stride of 0", {64, 64, 0}, {64, 64, 0}, 2},
        {"takes at most 128 query heads per key/value head", {64 * 129, 64, 64}, {64, 64, 0}, 129},
        {"needs rows aligned to 16 bytes, which those of k are not", {64, 64, 64}, {68, 68, 0}, 1},
        {"takes strides below 2^40 bytes", {64, 64, 64}, {INT64_C(1) << 39, 64, 0}, 1},
    };
    fattn_device *device = NULL;
    expect_begin("refusals of tensor maps");
    expect_ok(fattn_device_open("cuda:0", &device), "opening");
    EACH (n, cases) {
        fattn_plan *plan = NULL;
        fattn_problem p = scene_problem(FORWARD);
        p.layout = FATTN_STRIDED;
        p.batch = 1, p.heads_k = 1, p.heads_q = cases[n].group;
        p.seqlen_q = 1, p.seqlen_k = 80;
        p.q = cases[n].q, p.k = p.v = cases[n].k;
        p.o = (fattn_strides){64 * cases[n].group, 64 * cases[n].group, 64};
        const fattn_status status = fattn_plan_create(device, &p, &plan);
        expect(status == FATTN_UNSUPPORTED && expect_says(cases[n].reason), "\"%s\": %s: %s",
               cases[n].reason, fattn_status_string(status), fattn_last_reason());
        fattn_plan_destroy(plan);
    }
    fattn_device_close(device);
    tap_check(expect_held(), "%d problems are not for tensor maps, and the reason is said",
              (int)(sizeof cases / sizeof *cases));
}

/* A device of an H100's multiprocessors, whose planner is free to choose. */
static fattn_device *open_h100(const char *what)
{
    fattn_device *device = NULL;
    expect_begin(what);
    stub->units = 132;
    set_environment("FATTN_KERNEL", NULL);
    expect_ok(fattn_device_open("cuda:0", &device), "opening");
    return device;
}

static void close_h100(fattn_device *device)
{
    fattn_device_close(device);
    stub->units = 4;
}

/* What the planner chooses for the problem. */
static fattn_plan_info plan_info(fattn_device *device, const fattn_problem *p, const char *what)
{
    fattn_plan *plan = NULL;
    fattn_plan_info info = {.struct_size = sizeof info};
    expect_ok(fattn_plan_create(device, p, &plan), what);
    expect_ok(fattn_plan_get_info(plan, &info), what);
    fattn_plan_destroy(plan);
    return info;
}

/* The row that the planner takes for the n-th case. */
static void expect_row(fattn_device *device, size_t n, const fattn_problem *p, const char *row)
{
    const fattn_plan_info info = plan_info(device, p, row);
    expect(strcmp(info.kernel, row) == 0, "case %d: %s, expected %s", (int)n, info.kernel, row);
}

/* Problems without query heads, or without any, are planned by rows that do not divide by a group;
 * those that do say so when they are named. */
static void check_without_heads(void)
{
    static const uint64_t features[] = {0, FATTN_MASK, FATTN_BIAS, FATTN_ALIBI};
    fattn_device *device = open_h100("no query heads");
    fattn_problem p = scene_problem(FORWARD);
    p.layout = FATTN_BHSD;
    EACH (n, features) {
        for (int heads_k = 0; heads_k <= 2; heads_k += 2) {
            p.features = features[n];
            p.heads_q = 0, p.heads_k = heads_k;
            p.dtype_bias = features[n] & FATTN_BIAS ? p.dtype : FATTN_DTYPE_DEFAULT;
            p.mask_stride[2] = features[n] & FATTN_MASK ? 80 : 0;
            p.bias_stride[2] = features[n] & FATTN_BIAS ? 80 : 0;
            p.mask_stride[3] = p.mask_stride[2] > 0, p.bias_stride[3] = p.bias_stride[2] > 0;
            const fattn_plan_info info = plan_info(device, &p, "a plan");
            expect(info.work_items == 0, "case %d: %lld items", (int)n, (long long)info.work_items);
        }
    }
    fattn_device_close(device);
    static const char *const rows[] = {"wgmma_64", "wgmma_short_64", "wgmma_split_64",
                                       "wgmma_full_64"};
    EACH (n, rows) {
        fattn_plan *plan = NULL;
        set_environment("FATTN_KERNEL", rows[n]);
        expect_ok(fattn_device_open("cuda:0", &device), "opening");
        p.features = 0;
        p.heads_q = 0, p.heads_k = 2;
        memset(p.bias_stride, 0, sizeof p.bias_stride);
        memset(p.mask_stride, 0, sizeof p.mask_stride);
        const fattn_status status = fattn_plan_create(device, &p, &plan);
        expect(status == FATTN_UNSUPPORTED && expect_says("takes no problem without query heads"),
               "%s: %s: %s", rows[n], fattn_status_string(status), fattn_last_reason());
        fattn_plan_destroy(plan);
        fattn_device_close(device);
    }
    set_environment("FATTN_KERNEL", NULL);
    stub->units = 4;
    tap_check(expect_held(), "no row of Hopper takes a problem without query heads");
}

/* The rows that the planner takes for caches in e4m3: those of tensor cores if k and v both are, q
 * has 16 bits and rows are aligned, else SIMT. */
static void check_cache_rows(void)
{
    static const struct {
        const char *row;
        fattn_dtype q, k, v;
        int64_t batch, seqlen_q, dim;
        uint64_t features;
    } cases[] = {
        {"mma_decode_e4m3_wide_128", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 1, 1, 128, 0},
        {"mma_decode_e4m3_128", FATTN_BF16, FATTN_E4M3, FATTN_E4M3, 64, 1, 128, 0},
        {"mma_decode_e4m3_64", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 64, 2, 64, FATTN_DESCALE},
        {"mma_decode_e4m3_256", FATTN_BF16, FATTN_E4M3, FATTN_E4M3, 64, 1, 192, FATTN_CAUSAL},
        {"mma_decode_e4m3_full_128", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 64, 1, 96,
         FATTN_SOFTCAP | FATTN_DESCALE},
        {"mma_decode_e4m3_64", FATTN_BF16, FATTN_E4M3, FATTN_E4M3, 64, 1, 64, FATTN_SINK},
        {"mma_decode_lean_128", FATTN_F16, FATTN_F16, FATTN_F16, 64, 1, 128, 0},
        {"mma_decode_lean_64", FATTN_BF16, FATTN_BF16, FATTN_BF16, 64, 1, 64, FATTN_SINK},
        {"simt_decode", FATTN_F16, FATTN_F16, FATTN_E4M3, 64, 1, 128, 0},
        {"simt_decode", FATTN_F32, FATTN_E4M3, FATTN_E4M3, 64, 1, 128, 0},
        {"simt_decode", FATTN_F16, FATTN_F16, FATTN_F16, 64, 1, 128, FATTN_DESCALE},
        {"wgmma_e4m3_128", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 4, 512, 128, FATTN_DESCALE},
        {"wgmma_e4m3_256", FATTN_BF16, FATTN_E4M3, FATTN_E4M3, 4, 512, 192, FATTN_CAUSAL},
        {"wgmma_e4m3_64", FATTN_BF16, FATTN_E4M3, FATTN_E4M3, 4, 512, 64, FATTN_SINK},
        {"wgmma_e4m3_128", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 64, 1, 128, FATTN_BATCH_INVARIANT},
        {"wgmma_e4m3_split_128", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 1, 8, 128, 0},
        {"wgmma_e4m3_split_64", FATTN_BF16, FATTN_E4M3, FATTN_E4M3, 16, 8, 64, FATTN_DESCALE},
        {"wgmma_e4m3_split_256", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 1, 64, 256, FATTN_CAUSAL},
        {"mma_e4m3_full_128", FATTN_BF16, FATTN_E4M3, FATTN_E4M3, 4, 512, 128,
         FATTN_SOFTCAP | FATTN_DESCALE},
        {"mma_e4m3_full_256", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 4, 512, 256, FATTN_ALIBI},
        {"simt_wide_128", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 4, 512, 72, 0}, /* rows of 72 bytes */
        {"simt_wide_128", FATTN_F16, FATTN_F16, FATTN_E4M3, 4, 512, 128, 0},
        {"simt_wide_128", FATTN_F32, FATTN_E4M3, FATTN_E4M3, 4, 512, 128, 0},
        {"simt_forward", FATTN_F16, FATTN_E4M3, FATTN_E4M3, 4, 512, 288, 0},
    };
    fattn_device *const device = open_h100("rows for caches");
    EACH (n, cases) {
        fattn_problem p = scene_problem(FORWARD);
        p.dtype = cases[n].q, p.dtype_kv = cases[n].k, p.dtype_v = cases[n].v;
        p.features = cases[n].features;
        p.softcap = cases[n].features & FATTN_SOFTCAP ? 20 : 0;
        p.batch = cases[n].batch, p.heads_q = 32, p.heads_k = 8;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = 8192;
        p.dim = p.dim_v = cases[n].dim;
        const fattn_plan_info info = plan_info(device, &p, cases[n].row);
        expect(strcmp(info.kernel, cases[n].row) == 0, "case %d: %s, expected %s", (int)n,
               info.kernel, cases[n].row);
    }
    close_h100(device);
    tap_check(expect_held(), "caches of 8 bits go to the rows that take them");
}

/* The rows that the planner takes for more than 256 channels, and into how many parts it cuts the
 * keys: Hopper's own for 16 bits, aligned rows, lean features and groups of heads that fill tiles,
 * else SIMT. */
static void check_halves_rows(void)
{
    static const struct {
        const char *row;
        fattn_dtype dtype;
        int64_t batch, heads_q, heads_k, seqlen_q, dim, dim_v, splits;
        uint64_t features;
    } cases[] = {
        {"wgmma_pair_split_576", FATTN_BF16, 1, 128, 1, 1, 576, 512, 64, 0},
        {"wgmma_pair_split_576", FATTN_BF16, 8, 128, 1, 1, 576, 512, 8, 0},
        {"wgmma_pair_split_576", FATTN_BF16, 8, 16, 1, 8, 576, 512, 8, FATTN_CAUSAL},
        {"wgmma_split_576", FATTN_F16, 8, 64, 1, 1, 576, 512, 16, 0},
        /* Cut by all lengths: one sequence may get all parts, but a part has 256 keys or more. */
        {"wgmma_pair_split_576", FATTN_BF16, 300, 128, 1, 1, 576, 512, 32, FATTN_SEQUSED_K},
        {"wgmma_split_576", FATTN_BF16, 512, 16, 1, 1, 576, 512, 32, FATTN_SEQUSED_K},
        {"wgmma_pair_split_576", FATTN_BF16, 64, 128, 1, 8, 576, 512, 16, FATTN_SEQUSED_K},
        {"wgmma_pair_split_576", FATTN_BF16, 4, 128, 1, 1, 576, 512, 32, FATTN_SEQUSED_K},
        {"wgmma_pair_split_576", FATTN_BF16, 3, 128, 1, 1, 576, 512, 22, FATTN_SEQUSED_K},
        {"wgmma_split_576", FATTN_BF16, 16, 16, 1, 1, 576, 512, 32, FATTN_SEQUSED_K},
        {"wgmma_split_576", FATTN_BF16, 15, 16, 1, 1, 576, 512, 8, FATTN_SEQUSED_K},
        {"wgmma_pair_576", FATTN_BF16, 16, 128, 1, 132, 576, 512, 1, FATTN_SEQUSED_K},
        {"wgmma_pair_576", FATTN_BF16, 513, 128, 1, 1, 576, 512, 1, FATTN_SEQUSED_K},
        {"wgmma_split_576", FATTN_F16, 8, 16, 1, 1, 576, 512, 16, FATTN_SINK},
        {"wgmma_split_576", FATTN_BF16, 1, 16, 1, 4, 576, 512, 64, FATTN_CAUSAL},
        {"wgmma_split_576", FATTN_BF16, 1, 40, 1, 1, 576, 512, 64, 0},
        {"wgmma_576", FATTN_BF16, 1, 40, 1, 4, 576, 512, 1, 0},
        {"wgmma_pair_576", FATTN_BF16, 200, 128, 1, 1, 576, 512, 1, 0},
        {"wgmma_pair_576", FATTN_BF16, 1, 128, 1, 1, 576, 512, 1, FATTN_BATCH_INVARIANT},
        {"wgmma_576", FATTN_BF16, 1, 16, 1, 4, 576, 512, 1, FATTN_BATCH_INVARIANT},
        {"wgmma_pair_576", FATTN_F16, 64, 8, 8, 512, 320, 320, 1, FATTN_CAUSAL},
        {"wgmma_576", FATTN_F16, 512, 8, 8, 64, 320, 320, 1, 0},
        {"simt_forward", FATTN_BF16, 1, 96, 1, 1, 576, 512, 0, 0},
        {"simt_decode", FATTN_BF16, 1, 16, 1, 1, 576, 512, 0, FATTN_SOFTCAP},
        {"simt_decode", FATTN_F32, 1, 16, 1, 1, 576, 512, 0, 0},
        {"simt_decode", FATTN_BF16, 1, 16, 1, 1, 300, 300, 0, 0}, /* rows of 600 bytes */
        {"simt_decode", FATTN_BF16, 1, 16, 1, 1, 576, 520, 0, 0},
        {"mma_full_256", FATTN_BF16, 1, 96, 1, 1, 256, 256, 0, FATTN_SOFTCAP},
        {"wgmma_split_256", FATTN_BF16, 200, 128, 1, 1, 256, 256, 0, 0},
    };
    fattn_device *const device = open_h100("rows for more than 256 channels");
    EACH (n, cases) {
        fattn_problem p = scene_problem(FORWARD);
        p.dtype = cases[n].dtype;
        p.features = cases[n].features;
        p.softcap = cases[n].features & FATTN_SOFTCAP ? 20 : 0;
        p.batch = cases[n].batch, p.heads_q = cases[n].heads_q, p.heads_k = cases[n].heads_k;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = 8192;
        p.dim = cases[n].dim, p.dim_v = cases[n].dim_v;
        const fattn_plan_info info = plan_info(device, &p, cases[n].row);
        expect(strcmp(info.kernel, cases[n].row) == 0, "case %d: %s, expected %s", (int)n,
               info.kernel, cases[n].row);
        expect(cases[n].splits == 0 || info.splits == cases[n].splits,
               "case %d: %lld parts, expected %lld", (int)n, (long long)info.splits,
               (long long)cases[n].splits);
        /* However many sequences are cut, four parts for each unit: at most 264 of 128 rows. */
        const int64_t parts = 264 * 128 * (2 + 512) * (int64_t)sizeof(float), lists = 32 * 1024;
        expect(!(cases[n].features & FATTN_SEQUSED_K) || info.workspace_bytes <= parts + lists,
               "case %d: %lld bytes of workspace", (int)n, (long long)info.workspace_bytes);
    }
    close_h100(device);
    tap_check(expect_held(), "more than 256 channels go to the rows that take them");
}

/* Into how many parts decoding may cut the keys of a sequence, and how many items a run may have.
 * If sequences may differ in length, one may have all parts, of which there are four for each block
 * that runs at a time: two for each of 132 multiprocessors or, in wide rows, one. With more rows
 * there are two parts for each multiprocessor. */
static void check_decode_parts(void)
{
    static const struct {
        const char *row;
        int64_t batch, seqlen_q, seqlen_k, dim, splits, items;
        uint64_t features;
    } cases[] = {
        {"mma_decode_lean_128", 64, 1, 131072, 128, 131, 64 * 8 + 2 * 4 * 264, FATTN_SEQUSED_K},
        {"mma_decode_lean_128", 64, 1, 131072, 128, 1, 64 * 8, 0},
        {"mma_decode_lean_128", 64, 1, 1024, 128, 4, 64 * 8 * 4, FATTN_SEQUSED_K},
        {"mma_decode_lean_128", 64, 1, 500, 128, 1, 64 * 8, FATTN_SEQUSED_K},
        {"mma_decode_wide_128", 16, 1, 131072, 128, 66, 16 * 8 + 2 * 4 * 132, FATTN_SEQUSED_K},
        {"mma_decode_lean_128", 512, 1, 131072, 128, 131, 512 * 8 + 2 * 4 * 264, FATTN_SEQUSED_K},
        {"mma_decode_lean_128", 513, 1, 131072, 128, 1, 513 * 8, FATTN_SEQUSED_K},
        {"mma_decode_wide_128", 1, 1, 131072, 128, 16, 8 * 16, FATTN_SEQUSED_K},
        {"mma_decode_wide_256", 33, 1, 131072, 256, 66, 33 * 8 + 2 * 4 * 132, FATTN_SEQUSED_K},
        {"mma_decode_lean_256", 34, 1, 131072, 256, 131, 34 * 8 + 2 * 4 * 264, FATTN_SEQUSED_K},
        {"wgmma_split_128", 64, 8, 131072, 128, 32, 64 * 8 + 2 * 2 * 132, FATTN_SEQUSED_K},
        {"wgmma_split_128", 64, 8, 4095, 128, 1, 64 * 8, FATTN_SEQUSED_K}};
    fattn_device *const device = open_h100("parts of sequences of different lengths");
    EACH (n, cases) {
        fattn_problem p = scene_problem(FORWARD);
        p.dtype = FATTN_BF16;
        p.features = cases[n].features;
        p.batch = cases[n].batch, p.heads_q = 32, p.heads_k = 8;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = cases[n].seqlen_k;
        p.dim = p.dim_v = cases[n].dim;
        const fattn_plan_info info = plan_info(device, &p, "decoding");
        expect(strcmp(info.kernel, cases[n].row) == 0 && info.splits == cases[n].splits &&
                   info.work_items == cases[n].items,
               "case %d: %s, %lld parts, %lld items; expected %s, %lld, %lld", (int)n, info.kernel,
               (long long)info.splits, (long long)info.work_items, cases[n].row,
               (long long)cases[n].splits, (long long)cases[n].items);
    }
    close_h100(device);
    tap_check(expect_held(), "long sequences among many are cut");
}

/* How many rows tiles have over caches in e4m3 on GPUs before Hopper: those of few rows are
 * smaller. */
static void check_cache_tiles(void)
{
    static const struct {
        int64_t br, bc, seqlen_q, dim;
        uint64_t features;
    } cases[] = {
        {64, 64, 5, 128, 0},    /* 20 rows */
        {64, 64, 16, 128, 0},   /* 64 */
        {128, 64, 17, 128, 0},  /* 68 */
        {64, 64, 36, 128, 0},   /* 144: three tiles beat two, */
        {128, 64, 110, 128, 0}, /* 440: but seven do not beat four */
        {128, 64, 512, 128, 0}, /* each key is widened half as often */
        {128, 64, 5, 128, FATTN_BATCH_INVARIANT},
        {64, 128, 5, 64, 0},
        {128, 128, 512, 64, 0},
        {64, 32, 5, 256, 0},
        {128, 64, 512, 256, 0},
    };
    fattn_device *const device = open_h100("tiles for caches");
    EACH (n, cases) {
        char row[32];
        fattn_problem p = scene_problem(FORWARD);
        snprintf(row, sizeof row, "mma_e4m3_%d", (int)cases[n].dim);
        set_environment("FATTN_KERNEL", row);
        p.dtype_kv = p.dtype_v = FATTN_E4M3;
        p.features = cases[n].features;
        p.batch = 64, p.heads_q = 32, p.heads_k = 8;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = 8192;
        p.dim = p.dim_v = cases[n].dim;
        const fattn_plan_info info = plan_info(device, &p, "a tile");
        expect(info.br == cases[n].br && info.bc == cases[n].bc, "case %d: %s, %d by %d", (int)n,
               info.kernel, (int)info.br, (int)info.bc);
    }
    set_environment("FATTN_KERNEL", NULL);
    close_h100(device);
    tap_check(expect_held(), "tiles over caches of 8 bits have as many rows as pay");
}

/* The rows that the planner takes for 16-bit types on an H100. */
static void check_hopper_rows(void)
{
    static const struct {
        const char *row;
        int64_t batch, heads_q, heads_k, seqlen_q, seqlen_k, dim;
        uint64_t features;
        int64_t br; /* of the tile, where the row has several */
    } cases[] = {
        {"wgmma_128", 8, 16, 16, 2048, 2048, 128, FATTN_CAUSAL, 0},
        {"wgmma_64", 8, 16, 16, 2048, 2048, 64, 0, 0},
        {"wgmma_short_64", 128, 12, 12, 197, 197, 64, 0, 0},
        {"wgmma_short_64", 32, 16, 16, 512, 512, 64, FATTN_CAUSAL, 0},
        {"wgmma_64", 32, 16, 16, 512, 512, 64, 0, 0},
        {"wgmma_short_128", 1, 32, 8, 128, 128, 128, FATTN_CAUSAL, 0},
        {"wgmma_128", 128, 16, 16, 128, 128, 128, FATTN_CAUSAL, 0}, /* many blocks */
        {"wgmma_split_64", 64, 64, 8, 16, 512, 64, 0, 0},   /* many, but tiles have 192 rows */
        {"wgmma_short_128", 8, 32, 8, 8, 512, 128, 0, 0},   /* a block for every other unit */
        {"wgmma_split_128", 1, 32, 8, 8, 768, 128, 0, 0},   /* fewer */
        {"wgmma_split_128", 64, 32, 8, 8, 512, 128, 0, 0},  /* more, of few rows */
        {"wgmma_split_128", 512, 1, 1, 100, 512, 96, 0, 0}, /* half of the tile of wgmma_96 */
        {"wgmma_short_128", 64, 32, 8, 8, 256, 128, 0, 0},  /* and few keys */
        {"wgmma_short_128", 512, 16, 16, 17, 17, 128, 0, 0},
        {"wgmma_split_128", 1, 32, 8, 256, 32768, 128, FATTN_CAUSAL, 0},
        {"wgmma_128", 1, 32, 8, 512, 32768, 128, FATTN_CAUSAL,
         0}, /* 128 blocks fill the units once, */
        {"wgmma_split_128", 1, 32, 8, 640, 32768, 128, FATTN_CAUSAL, 0}, /* 160 once and a little */
        {"wgmma_64", 1, 32, 8, 640, 16384, 64, FATTN_CAUSAL, 0}, /* 112, for a tile has more rows */
        {"wgmma_96", 1, 32, 8, 1024, 32768, 80, FATTN_CAUSAL, 0},
        {"mma_decode_wide_128", 1, 32, 8, 1, 8192, 128, 0, 0},
        {"wgmma_full_64", 8, 16, 16, 2048, 2048, 64, FATTN_BIAS, 192},
        {"wgmma_full_64", 32, 16, 16, 512, 512, 64, FATTN_MASK, 64},
        {"wgmma_full_64", 8, 16, 16, 2048, 2048, 64, FATTN_BIAS | FATTN_MASK, 128},
        {"wgmma_full_64", 8, 16, 16, 2048, 2048, 64, FATTN_SOFTCAP, 128},
        {"wgmma_full_128", 1, 16, 16, 512, 512, 128, FATTN_BIAS, 64}, /* few blocks */
        {"wgmma_full_128", 32, 16, 16, 512, 512, 128, FATTN_BIAS, 128},
        {"wgmma_full_256", 8, 16, 16, 2048, 2048, 256, FATTN_MASK, 128},
        {"wgmma_full_256", 1, 8, 8, 512, 512, 256, FATTN_BIAS, 128}, /* 32 blocks, */
        {"wgmma_full_256", 64, 8, 8, 17, 17, 256, FATTN_ALIBI, 128}, /* half of them empty, */
        {"wgmma_full_128", 64, 32, 8, 16, 300, 128, FATTN_ALIBI, 128},
        {"mma_full_128", 64, 32, 8, 16, 128, 128, FATTN_ALIBI, 0}, /* of few keys, */
        {"mma_full_128", 8, 32, 8, 16, 300, 128, FATTN_ALIBI, 0},  /* and few of them */
        {"wgmma_full_128", 256, 16, 16, 32, 32, 128, FATTN_MASK, 64},
        {"wgmma_full_64", 1, 4, 4, 2048, 2048, 64, FATTN_SOFTCAP, 128},
        {"mma_full_64", 1, 1, 1, 2048, 2048, 64, FATTN_SOFTCAP, 0},      /* 16 of many keys */
        {"mma_full_64", 1, 12, 12, 128, 1024, 64, FATTN_ALIBI, 0},       /* 12 are too few at 64, */
        {"wgmma_full_128", 1, 12, 12, 128, 1024, 128, FATTN_ALIBI, 128}, /* enough at 128 */
        /* Batch-invariant problems have one row for all lengths. */
        {"wgmma_128", 8, 32, 8, 2048, 2048, 128, FATTN_CAUSAL | FATTN_BATCH_INVARIANT, 0},
        {"wgmma_128", 1, 32, 8, 1, 8192, 128, FATTN_CAUSAL | FATTN_BATCH_INVARIANT, 0},
        {"wgmma_128", 512, 16, 16, 17, 17, 128, FATTN_BATCH_INVARIANT, 0},
        {"wgmma_64", 1, 8, 8, 1, 17, 64, FATTN_BATCH_INVARIANT, 0},
        {"mma_full_64", 8, 16, 16, 2048, 2048, 64, FATTN_SOFTCAP | FATTN_BATCH_INVARIANT, 0},
    };
    fattn_device *const device = open_h100("Hopper's rows");
    EACH (n, cases) {
        fattn_problem p = scene_problem(FORWARD);
        p.features = cases[n].features;
        p.softcap = cases[n].features & FATTN_SOFTCAP ? 20 : 0;
        p.batch = cases[n].batch;
        p.heads_q = cases[n].heads_q, p.heads_k = cases[n].heads_k;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = cases[n].seqlen_k;
        p.dim = p.dim_v = cases[n].dim;
        p.dtype_bias = cases[n].features & FATTN_BIAS ? p.dtype : FATTN_DTYPE_DEFAULT;
        int64_t *const stride = cases[n].features & FATTN_BIAS ? p.bias_stride : p.mask_stride;
        if (cases[n].features & (FATTN_BIAS | FATTN_MASK)) {
            stride[2] = p.seqlen_k, stride[3] = 1;
        }
        const fattn_plan_info info = plan_info(device, &p, cases[n].row);
        expect(strcmp(info.kernel, cases[n].row) == 0 && (!cases[n].br || info.br == cases[n].br),
               "case %d: %s by %d, expected %s by %d", (int)n, info.kernel, (int)info.br,
               cases[n].row, (int)cases[n].br);
    }
    close_h100(device);
    tap_check(expect_held(), "the planner takes the row that is fastest for %d problems",
              (int)(sizeof cases / sizeof *cases));
}

/* The same with as many blocks, on a device of half as many multiprocessors: 40 leave few of them
 * idle. */
static void check_half_a_device(void)
{
    static const char *const rows[] = {"wgmma_split_128", "wgmma_128"};
    fattn_problem p = scene_problem(FORWARD);
    p.features = 0;
    p.batch = 1, p.heads_q = p.heads_k = 5;
    p.seqlen_q = 1024, p.seqlen_k = 2048;
    p.dim = p.dim_v = 128;
    EACH (n, rows) {
        fattn_device *device = open_h100("half of an H100");
        fattn_device_close(device);
        stub->units /= (int)n + 1;
        expect_ok(fattn_device_open("cuda:0", &device), "opening");
        expect_row(device, n, &p, rows[n]);
        close_h100(device);
        tap_check(expect_held(), "how many blocks pay follows from the multiprocessors, here %d",
                  132 / ((int)n + 1));
    }
}

/* Of a causal problem without keys too, a kernel before clears the counter by which items are
 * taken, whatever hides pairs. */
static void check_cleared(void)
{
    static const struct {
        uint64_t features;
        const char *before;
    } cases[] = {{0, "clear"}, {FATTN_BLOCK_MASK, "wgmma_blocks_64"}, {FATTN_ALIBI, "clear"}};
    EACH (n, cases) {
        fattn_problem p = scene_problem(FORWARD);
        fattn_plan *plan = NULL;
        fattn_device *const device = open_h100("no keys");
        fattn_buffers b = scene_buffers(scene_memory);
        p.features = FATTN_CAUSAL | cases[n].features;
        p.batch = 1, p.heads_q = p.heads_k = 4;
        p.seqlen_q = 128, p.seqlen_k = 0;
        p.block_m = p.block_n = cases[n].features & FATTN_BLOCK_MASK ? 128 : 0;
        b.block_mask = cases[n].features & FATTN_BLOCK_MASK ? b.dout : NULL;
        b.alibi_slopes = cases[n].features & FATTN_ALIBI ? b.dout : NULL;
        b.dout = b.dq = b.dk = b.dv = NULL;
        memset(stub->launched, 0, sizeof stub->launched);
        expect_ok(fattn_plan_create(device, &p, &plan), "a plan");
        expect_ok(fattn_execute(plan, &b, NULL, NULL), "a run");
        expect(strstr(stub->launched, cases[n].before), "case %d launched %s", (int)n,
               stub->launched);
        fattn_plan_destroy(plan);
        close_h100(device);
    }
    tap_check(expect_held(), "a kernel before clears the counter of items, also without keys");
}

/* Which row takes a packed batch, and whether a kernel before lists its sequences: this depends on
 * the longest of them, their mean and their number. */
static void check_packed_rows(void)
{
    static const struct {
        const char *row;
        int64_t batch, longest, mean, dim;
        bool orders;
    } cases[] = {
        {"wgmma_128", 8, 4096, 2048, 128, true},
        {"wgmma_128", 8, 2048, 2040, 128, false},   /* alike */
        {"wgmma_128", 513, 2048, 1024, 128, false}, /* too many */
        {"wgmma_128", 2, 2048, 1024, 128, false},   /* few items */
        {"wgmma_64", 64, 2048, 300, 64, true},
        {"wgmma_short_64", 64, 2048, 150, 64, true},
        {"wgmma_short_128", 64, 2048, 150, 128, true},
    };
    fattn_device *const device = open_h100("packed batches");
    EACH (n, cases) {
        fattn_problem p = scene_problem(FORWARD);
        p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = cases[n].batch;
        p.heads_q = p.heads_k = 16;
        p.seqlen_q = p.seqlen_k = cases[n].longest;
        p.total_q = p.total_k = cases[n].mean * cases[n].batch;
        p.dim = p.dim_v = cases[n].dim;
        fattn_plan *plan = NULL;
        expect_ok(fattn_plan_create(device, &p, &plan), cases[n].row);
        const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(plan->kernel);
        fattn_gpu_shape shape = {.blocks = 0};
        kernel->phases[0](kernel, &plan->problem, &plan->tiling, &shape);
        expect(strcmp(kernel->row.name, cases[n].row) == 0 &&
                   (shape.threads > 32) == cases[n].orders,
               "case %d: %s, %d threads before", (int)n, kernel->row.name, shape.threads);
        expect(plan->tiling.workspace >= 256 + (cases[n].orders ? 16 * p.batch : 0),
               "case %d: %lld bytes", (int)n, (long long)plan->tiling.workspace);
        fattn_plan_destroy(plan);
    }
    for (int alike = 0; alike < 2; alike++) {
        fattn_problem p = scene_problem(BACKWARD);
        p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = 16;
        p.heads_q = p.heads_k = 16;
        p.seqlen_q = p.seqlen_k = 2048;
        p.total_q = p.total_k = alike ? 16 * 2048 : 16 * 700;
        p.dim = p.dim_v = 128;
        fattn_plan *plan = NULL;
        expect_ok(fattn_plan_create(device, &p, &plan), "packed backward");
        const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(plan->kernel);
        fattn_gpu_shape shapes[2] = {{.blocks = 0}, {.blocks = 0}};
        kernel->phases[0](kernel, &plan->problem, &plan->tiling, &shapes[0]);
        kernel->phases[1](kernel, &plan->problem, &plan->tiling, &shapes[1]);
        const int64_t rows = alike ? p.total_q : (p.total_q / 64 + p.batch) * 64;
        expect(strcmp(kernel->row.name, "wgmma_backward_128") == 0 && shapes[0].blocks == !alike &&
                   shapes[1].blocks == p.heads_q * rows / 16,
               "%s: %lld and %lld blocks before", kernel->row.name, (long long)shapes[0].blocks,
               (long long)shapes[1].blocks);
        fattn_plan_destroy(plan);
    }
    close_h100(device);
    tap_check(expect_held(), "rows of packed batches, and when their sequences are put in order");
}

/* Groups of 33 heads, of whose tiles of 64 rows each has one query: 2^32 of them, or a few less. */
static void check_looked_tiles(void)
{
    fattn_device *const device = open_h100("tiles that are looked at");
    for (int many = 0; many < 2; many++) {
        fattn_problem p = scene_problem(FORWARD);
        p.features = FATTN_MASK | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = many ? 8192 : 8191;
        p.heads_k = 8, p.heads_q = 8 * 33;
        p.seqlen_q = 64, p.seqlen_k = 65536;
        p.total_q = 64 * p.batch, p.total_k = 200 * p.batch;
        p.mask_stride[2] = p.seqlen_k, p.mask_stride[3] = 1;
        expect_row(device, (size_t)many, &p, many ? "mma_full_64" : "wgmma_full_64");
    }
    close_h100(device);
    tap_check(expect_held(), "a kernel that looks at a mask counts 2^32 - 1 tiles at most");
}

/* Which tile lean backward has on an H100: that of 64 queries where a larger one would be empty for
 * the most part, or sequences are short. */
static void check_backward_rows(void)
{
    static const struct {
        const char *row;
        int64_t seqlen_q, seqlen_k, dim, mean; /* mean: of a packed batch, or 0 */
        uint64_t features;
    } cases[] = {
        {"wgmma_backward_short_64", 17, 17, 64, 0, 0},
        {"wgmma_backward_short_64", 128, 4096, 64, 0, FATTN_DETERMINISTIC},
        {"wgmma_backward_short_64", 192, 192, 64, 0, 0},
        {"wgmma_backward_64", 192, 2048, 64, 0, 0}, /* keys are many */
        {"wgmma_backward_64", 256, 256, 64, 0, 0},  /* no row is empty */
        {"wgmma_backward_64", 320, 320, 64, 0, 0},
        {"wgmma_backward_short_64", 320, 320, 64, 0, FATTN_CAUSAL},
        {"wgmma_backward_short_64", 448, 448, 64, 0, FATTN_CAUSAL},
        {"wgmma_backward_64", 448, 2048, 64, 0, FATTN_CAUSAL},
        {"wgmma_backward_64", 512, 512, 64, 0, FATTN_CAUSAL},
        {"wgmma_backward_short_64", 2048, 512, 64, 200, FATTN_CU_SEQLENS_Q},
        {"wgmma_backward_64", 2048, 512, 64, 256, FATTN_CU_SEQLENS_Q},
        {"wgmma_backward_short_64", 2048, 512, 64, 256, FATTN_CU_SEQLENS_Q | FATTN_CAUSAL},
        {"wgmma_backward_64", 2048, 512, 64, 320, FATTN_CU_SEQLENS_Q | FATTN_CAUSAL},
        {"wgmma_backward_128", 17, 17, 72, 0, 0},
        {"wgmma_backward_256", 17, 17, 136, 0, 0},
    };
    fattn_device *const device = open_h100("rows of backward");
    EACH (n, cases) {
        fattn_problem p = scene_problem(BACKWARD);
        p.features = cases[n].features;
        p.batch = 64, p.heads_q = p.heads_k = 16;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = cases[n].seqlen_k;
        p.total_q = cases[n].mean * p.batch;
        p.dim = p.dim_v = cases[n].dim;
        expect_row(device, n, &p, cases[n].row);
    }
    close_h100(device);
    tap_check(expect_held(), "rows of lean backward, in %d problems",
              (int)(sizeof cases / sizeof *cases));
}

/* Which block masks Hopper's backward takes, and where the rest goes. */
static void check_block_mask_rows(void)
{
    static const struct {
        const char *row;
        int64_t heads_k, dim, block_m, block_n, head_stride;
        uint64_t others;
    } cases[] = {
        {"wgmma_backward_full_64", 16, 64, 64, 128, 0, 0},
        {"wgmma_backward_full_128", 16, 128, 128, 128, 256, FATTN_CAUSAL},
        {"wgmma_backward_full_128", 4, 128, 128, 128, 0, 0},
        {"wgmma_backward_full_256", 16, 256, 64, 64, 0, 0},  /* tiles of a block's keys */
        {"mma_backward_full_128", 4, 128, 128, 128, 256, 0}, /* heads of a group have their own */
        {"mma_backward_full_128", 16, 128, 128, 64, 0, 0},   /* tiles are hidden in part */
        {"mma_backward_full_128", 16, 128, 128, 128, 0, FATTN_DETERMINISTIC},
        {"mma_backward_full_128", 16, 128, 128, 128, 0, FATTN_DROPOUT},
    };
    fattn_device *const device = open_h100("block masks");
    EACH (n, cases) {
        fattn_problem p = scene_problem(BACKWARD);
        const int64_t stride[4] = {0, cases[n].head_stride, 16, 1};
        p.features = FATTN_BLOCK_MASK | cases[n].others;
        p.dropout_p = cases[n].others & FATTN_DROPOUT ? 0.1 : 0;
        p.batch = 8, p.heads_q = 16, p.heads_k = cases[n].heads_k;
        p.seqlen_q = p.seqlen_k = 2048;
        p.dim = p.dim_v = cases[n].dim;
        p.block_m = cases[n].block_m, p.block_n = cases[n].block_n;
        memcpy(p.block_mask_stride, stride, sizeof stride);
        expect_row(device, n, &p, cases[n].row);
    }
    close_h100(device);
    tap_check(expect_held(), "block masks of %d problems go to the rows that take them",
              (int)(sizeof cases / sizeof *cases));
}

/* Whether keys are cut into parts, of f32 on an H100. */
static void check_f32_splits(void)
{
    static const struct {
        int64_t batch, heads, seqlen, dim;
        uint64_t features;
        bool splits;
    } cases[] = {
        {4, 16, 512, 64, 0, false},             /* 256 blocks of 128 rows, two a multiprocessor */
        {2, 16, 1024, 64, 0, false},            /* 256 */
        {1, 8, 2048, 128, 0, false},            /* 128, one a multiprocessor */
        {1, 8, 512, 64, 0, true},               /* 32 */
        {1, 4, 1024, 128, 0, true},             /* 32 */
        {4, 16, 512, 64, FATTN_SOFTCAP, false}, /* 512 of 64 rows, of simt_wide_64 */
        {1, 16, 512, 64, FATTN_SOFTCAP, true},  /* 128 */
    };
    fattn_device *const device = open_h100("parts of f32");
    EACH (n, cases) {
        fattn_problem p = scene_problem(FORWARD);
        p.dtype = FATTN_F32;
        p.features = cases[n].features;
        p.softcap = cases[n].features & FATTN_SOFTCAP ? 20 : 0;
        p.batch = cases[n].batch;
        p.heads_q = p.heads_k = cases[n].heads;
        p.seqlen_q = p.seqlen_k = cases[n].seqlen;
        p.dim = p.dim_v = cases[n].dim;
        const fattn_plan_info info = plan_info(device, &p, "a case");
        expect((info.splits > 1) == cases[n].splits, "case %d: %s, %d parts", (int)n, info.kernel,
               (int)info.splits);
    }
    close_h100(device);
    tap_check(expect_held(),
              "f32 cuts keys where blocks leave multiprocessors idle, and only there");
}

/* A ragged batch may have more rows, counted as if all its sequences were as long as the longest
 * may be, than 63 bits can say. */
static void check_counts(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_BF16};
    fattn_device *const device = open_h100("counts of rows");
    EACH (n, dtypes) {
        fattn_plan *plan = NULL;
        fattn_problem p = scene_problem(BACKWARD);
        p.dtype = dtypes[n];
        p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = INT64_C(1) << 29, p.heads_q = p.heads_k = 128;
        p.seqlen_q = p.total_q = p.total_k = INT32_MAX, p.seqlen_k = 1;
        const fattn_status status = fattn_plan_create(device, &p, &plan);
        expect(status == FATTN_OVERFLOW, "%d: %s, %s", (int)n, fattn_status_string(status),
               status ? fattn_last_reason() : plan->kernel->name);
        fattn_plan_destroy(plan);
    }
    close_h100(device);
    tap_check(expect_held(), "rows that cannot be counted are refused");
}

int main(void)
{
    if (scene_lacks_stub()) {
        return tap_done();
    }
    if (scene_begin_hopper()) {
        check_map_strides();
        check_map_refusals();
        check_without_heads();
        check_hopper_rows();
        check_cache_rows();
        check_halves_rows();
        check_decode_parts();
        check_cache_tiles();
        check_half_a_device();
        check_cleared();
        check_packed_rows();
        check_looked_tiles();
        check_backward_rows();
        check_block_mask_rows();
        check_f32_splits();
    } else {
        tap_skip("rows of Hopper's own instructions", fattn_last_reason());
    }
    scene_end_hopper();
    check_counts();
    return tap_done();
}
