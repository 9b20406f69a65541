/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plan is made for the greatest lengths, and the cost of a run follows the actual ones. Every row
 * that splits keys runs with lengths from 0 to the planned maximum. The workspace is full of NaN
 * before each run, and the changed part is measured: one part per share of the sequence's own keys,
 * none if a single part suffices, and on a CPU little scratch for decoding with few keys, and no o
 * of parts whose keys a mask hides. Results must match the reference. Runs on the backend of
 * FATTN_BACKEND, else on the CPU.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backends/cpu/cpu.h"
#include "core/dtype.h"
#include "core/plan.h"
#include "core/schedule.h"
#include "tests/device.h"
#include "tests/row.h"

enum { B = 2, HQ = 4, HK = 2, SK = 1024, D = 32, ROWS_MAX = 512, SPLITS = 4 };

static uint16_t room[4][B * SK * HQ * D * 2]; /* q, k, v, o; up to 4 bytes per element */
static const int32_t lengths[][B] = {{SK, SK}, {SK, 1},    {0, 0},     {1, 64},    {65, 200},
                                     {500, 0}, {127, 129}, {700, 300}, {1023, 513}};

static const void *put(fattn_device *device, const void *from, size_t bytes, void **list,
                       int *count)
{
    void *memory = NULL;
    if (fattn_device_malloc(device, bytes, &memory) ||
        fattn_device_copy(device, memory, from, bytes, NULL)) {
        tap_bail(fattn_last_reason());
    }
    list[(*count)++] = memory;
    return memory;
}

/* Runs a plan twice on copies of q, k and v, and returns o and the workspace afterwards. The second
 * run finds in the workspace what the first one left there. mask: [B][SK], or NULL */
static fattn_status run_masked(const fattn_plan *plan, const int32_t *used, const uint8_t *mask,
                               void *o, unsigned char *work)
{
    fattn_device *const device = plan->device;
    const fattn_problem *const p = &plan->problem;
    const size_t size = (size_t)fattn_dtype_size(p->dtype);
    const size_t rows = (size_t)(B * p->seqlen_q * p->heads_q * D) * size,
                 keys = B * SK * HK * D * (size_t)fattn_dtype_size(p->dtype_kv);
    const size_t bytes = (size_t)plan->tiling.workspace;
    void *list[8];
    int count = 0;
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = put(device, room[0], rows, list, &count);
    b.k = put(device, room[1], keys, list, &count);
    b.v = put(device, room[2], keys, list, &count);
    b.seqused_k = put(device, used, B * sizeof *used, list, &count);
    b.mask = mask ? put(device, mask, B * SK, list, &count) : NULL;
    b.o = (void *)put(device, o, rows, list, &count);
    memset(work, 0xff, bytes);
    void *const workspace = (void *)put(device, work, bytes, list, &count);
    fattn_status status = fattn_execute(plan, &b, workspace, NULL);
    status = status ? status : fattn_device_copy(device, b.o, o, rows, NULL); /* as it was */
    status = status ? status : fattn_execute(plan, &b, workspace, NULL);
    status = status ? status : fattn_device_copy(device, o, b.o, rows, NULL);
    status = status ? status : fattn_device_copy(device, work, workspace, bytes, NULL);
    status = status ? status : fattn_stream_synchronize(device, NULL);
    while (count > 0) {
        (void)fattn_device_free(device, list[--count]);
    }
    return status;
}

static fattn_status run(const fattn_plan *plan, const int32_t *used, void *o, unsigned char *work)
{
    return run_masked(plan, used, NULL, o, work);
}

static bool is_cpu(const fattn_plan *plan)
{
    return strcmp(plan->device->backend->name, "cpu") == 0;
}

/* Parts that there is room for, before what else is in the workspace: on a CPU, as many as the
 * longest sequence may have, and none where all have one. */
static int64_t parts_room(const fattn_plan *plan, const int32_t *used)
{
    const fattn_tiling *const t = &plan->tiling;
    int32_t longest = 0;
    for (int b = 0; b < B; b++) {
        longest = used[b] > longest ? used[b] : longest;
    }
    const int64_t most = fattn_schedule_most(t, (longest + t->bc - 1) / t->bc);
    return !is_cpu(plan) ? t->items : most == 1 ? 0 : t->items / t->splits * most;
}

/* Bytes that a part takes in the workspace: on a GPU m, l and o of each row. */
static int64_t part_bytes(const fattn_plan *plan)
{
    const fattn_problem *const p = &plan->problem;
    const int64_t rows = HQ / HK * p->seqlen_q, br = plan->tiling.br;
    if (!is_cpu(plan)) {
        return (rows < br ? rows : br) * (2 + D) * 4;
    }
    fattn_tiling many = plan->tiling;
    many.items = 256; /* so that the sum is not rounded; what follows takes less than 64 each */
    return ((const fattn_cpu_kernel *)plan->kernel)->shared(p, &many) / many.items / 64 * 64;
}

static void draw_inputs(const fattn_problem *p)
{
    const fattn_dtype cached = p->dtype_kv ? p->dtype_kv : p->dtype;
    for (int n = 0; n < 3; n++) {
        for (int64_t at = 0; at < B * SK * HQ * D; at++) {
            fattn_dtype_store(n ? cached : p->dtype, room[n], at, sin(1.7 * (double)at + n));
        }
    }
}

static fattn_problem problem_of(const fattn_kernel *row, fattn_dtype dtype)
{
    const int64_t group = HQ / HK;
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = FATTN_FORWARD;
    p.dtype = dtype;
    p.dtype_kv = row->caches_alone ? FATTN_E4M3 : FATTN_DTYPE_DEFAULT;
    p.batch = B, p.heads_q = HQ, p.heads_k = HK;
    p.seqlen_q = row->rows_min > group ? (row->rows_min + group - 1) / group : 1;
    p.seqlen_k = SK, p.dim = p.dim_v = D;
    p.features = FATTN_SEQUSED_K;
    return p;
}

/* The number of parts that a run with these lengths must leave in the workspace. */
static int64_t parts_wanted(const fattn_plan *plan, const int32_t *used)
{
    const fattn_tiling *const t = &plan->tiling;
    int64_t wanted = 0;
    for (int b = 0; b < B; b++) {
        const fattn_parts parts = fattn_schedule_parts(t, 0, (used[b] + t->bc - 1) / t->bc);
        const int64_t count = fattn_parts_count(&parts);
        wanted += count > 1 ? count * t->heads / B * t->q_blocks : 0;
    }
    return wanted;
}

static void check_row(fattn_device *device, fattn_device *reference, const fattn_kernel *row,
                      fattn_dtype dtype)
{
    const fattn_problem p = problem_of(row, dtype);
    const char *const type = fattn_dtype_name(dtype);
    const fattn_wish wish = {.splits = SPLITS};
    fattn_plan *plan = NULL, *oracle = NULL;
    if (p.seqlen_q * HQ * D * B > (int64_t)sizeof room[0] / 4 ||
        fattn_plan_create_with(device, &p, row->name, &wish, &plan)) {
        tap_check(false, "%s: %s", row->name, fattn_last_reason());
        return;
    }
    /* |o| is below 1: the rounding of o, of P, and of f32's products of 16-bit parts on a GPU. */
    const double bound = dtype == FATTN_F32 ? 0x1p-16 : dtype == FATTN_F16 ? 0x1p-9 : 0x1p-6;
    draw_inputs(&p);
    tap_check(fattn_plan_create(reference, &p, &oracle) == FATTN_OK && plan->tiling.splits > 1,
              "%s in %s cuts %d keys into parts", row->name, type, (int)SK);
    const int64_t size = part_bytes(plan);
    const int64_t elements = B * p.seqlen_q * HQ * D;
    unsigned char *const work = malloc((size_t)plan->tiling.workspace + 1);
    int64_t wrong = 0, left = 0, wanted = 0, differ = 0;
    for (size_t n = 0; work && oracle && n < sizeof lengths / sizeof lengths[0]; n++) {
        static uint16_t truth[sizeof room[0] / 2];
        wrong += run(oracle, lengths[n], truth, work) != FATTN_OK;
        memset(room[3], 0xff, sizeof room[3]);
        wrong += run(plan, lengths[n], room[3], work) != FATTN_OK;
        for (int64_t at = 0; at < elements; at++) {
            const double error =
                fattn_dtype_load(p.dtype, room[3], at) - fattn_dtype_load(p.dtype, truth, at);
            wrong += !(fabs(error) <= bound);
        }
        int64_t here = 0;
        for (int64_t item = 0; item < parts_room(plan, lengths[n]); item++) {
            bool touched = false;
            for (int64_t byte = item * size; byte < (item + 1) * size; byte++) {
                touched = touched || work[byte] != 0xff;
            }
            here += touched;
        }
        left += here;
        wanted += parts_wanted(plan, lengths[n]);
        differ += here != parts_wanted(plan, lengths[n]);
    }
    tap_check(differ == 0 && left > 0, "%s in %s: %lld parts left of %lld", row->name, type,
              (long long)left, (long long)wanted);
    tap_check(wrong == 0, "%s in %s: results are those of the reference", row->name, type);
    free(work);
    fattn_plan_destroy(plan);
    fattn_plan_destroy(oracle);
}

/* Decoding 32 keys needs room for two heads' queries, results, scores and row pointers, but not for
 * a tile of 64 keys for 16 rows or for prefetching the next one. */
static void check_few_keys(fattn_device *device, const fattn_kernel *row)
{
    enum { MOST = 4096 };
    static const int32_t few[B] = {32, 32};
    fattn_problem p = problem_of(row, FATTN_F32);
    fattn_plan *plan = NULL;
    p.heads_q = HK;
    if (fattn_plan_create_with(device, &p, row->name, NULL, &plan)) {
        tap_check(false, "%s: %s", row->name, fattn_last_reason());
        return;
    }
    int64_t changed = 0;
    unsigned char *const work = malloc((size_t)plan->tiling.workspace + 1);
    const bool ran = work && run(plan, few, room[3], work) == FATTN_OK;
    for (int64_t line = 0; ran && line < plan->tiling.workspace; line += 64) {
        int64_t byte = line;
        while (byte < line + 64 && work[byte] == 0xff) {
            byte++;
        }
        changed += byte < line + 64 ? 64 : 0;
    }
    tap_check(ran && changed > 0 && changed <= MOST, "%s: %lld bytes of scratch for 32 keys",
              row->name, (long long)changed);
    free(work);
    fattn_plan_destroy(plan);
}

/* How many parts have some byte of o in the workspace. */
static int64_t parts_with_o(const fattn_plan *plan, const unsigned char *work)
{
    const int64_t size = part_bytes(plan), state = 3 * plan->tiling.br * 4; /* m, l, lost */
    int64_t parts = 0;
    for (int64_t part = 0; part < parts_room(plan, lengths[0]); part++) {
        int64_t byte = state;
        while (byte < size && work[part * size + byte] == 0xff) {
            byte++;
        }
        parts += byte < size;
    }
    return parts;
}

/* A mask keeps some keys of one sequence, all in one part, and none of the other. Other parts
 * leave no o, and the results have the bits of a plan with a single part. */
static void check_hidden_parts(fattn_device *device, const fattn_kernel *row)
{
    static uint8_t mask[B * SK];
    static float whole[B * HQ * D];
    float *const o = (float *)(void *)room[3], *const k = (float *)(void *)room[1];
    const fattn_wish cut = {.splits = SPLITS}, uncut = {.splits = 1};
    fattn_problem p = problem_of(row, FATTN_F32);
    fattn_plan *parts = NULL, *one = NULL;
    p.features |= FATTN_MASK;
    p.mask_stride[0] = SK, p.mask_stride[3] = 1;
    if (fattn_plan_create_with(device, &p, row->name, &cut, &parts) ||
        fattn_plan_create_with(device, &p, row->name, &uncut, &one)) {
        tap_check(false, "%s: %s", row->name, fattn_last_reason());
        fattn_plan_destroy(parts);
        return;
    }
    draw_inputs(&p);
    memset(mask + 600, 1, 70);
    unsigned char *const work = malloc((size_t)parts->tiling.workspace + 1);
    unsigned char *const other = malloc((size_t)one->tiling.workspace + 1);
    bool ran = work && other, same = true;
    int64_t with_o = 0;
    for (int poisoned = 0; ran && poisoned < 2; poisoned++) {
        k[(610 * HK + 1) * D] = poisoned ? NAN : 0; /* of the second head: its scores become NaN */
        ran = run_masked(parts, lengths[0], mask, o, work) == FATTN_OK &&
              run_masked(one, lengths[0], mask, whole, other) == FATTN_OK;
        with_o = parts_with_o(parts, work);
        for (int n = 0; n < B * HQ * D; n++) {
            same = same && (isnan(o[n]) ? isnan(whole[n]) && poisoned
                                        : memcmp(&o[n], &whole[n], sizeof *o) == 0);
        }
    }
    tap_check(ran && with_o == HK, "%s: %lld parts with o, where a mask leaves keys in %d",
              row->name, (long long)with_o, (int)HK);
    tap_check(ran && same, "%s: parts without keys change no bit", row->name);
    free(work);
    free(other);
    fattn_plan_destroy(parts);
    fattn_plan_destroy(one);
}

int main(void)
{
    const char *const named = device_named();
    if (device_absent(named)) {
        return 0;
    }
    fattn_device *device = NULL, *reference = NULL;
    if (fattn_device_open(named ? named : "cpu", &device) ||
        fattn_device_open("reference", &reference)) {
        tap_bail(fattn_last_reason());
    }
    const fattn_kernel *row;
    for (int at = 0; (row = row_next(device, &at));) {
        if (!row->split || !(row->ops & FATTN_OP_BIT(FATTN_FORWARD))) {
            continue;
        }
        for (fattn_dtype dtype = FATTN_F32; dtype <= FATTN_BF16; dtype++) {
            if (row->dtypes & FATTN_DTYPE_BIT(dtype)) {
                check_row(device, reference, row, dtype);
            }
        }
        if (!named && strstr(row->name, "_decode")) {
            check_few_keys(device, row);
            check_hidden_parts(device, row);
        }
    }
    fattn_device_close(device);
    fattn_device_close(reference);
    return tap_done();
}
