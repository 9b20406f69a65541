/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "reference": what every other kernel is compared with. Row "naive" is the oracle in
 * double precision; the device runs it unless FATTN_KERNEL names another row. It alone shares no
 * code with what it judges. The rows "tiled_*" are the published algorithms with the plan's tile,
 * and the oracle judges them like any kernel; the small verbs are the core's.
 */
#include <math.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "backends/reference/tiled.h"
#include "core/backend.h"
#include "core/dtype.h"
#include "core/host.h"
#include "core/status.h"

/* The oracle has no tiles: one block covers the whole matrix. */
static const fattn_tile whole[] = {{INT64_C(1) << 31, INT64_C(1) << 31}, {0, 0}};

static int64_t no_fast_bytes(const fattn_kernel *row, const fattn_problem *problem, fattn_tile tile)
{
    (void)row, (void)problem, (void)tile;
    return 0;
}

static int64_t no_workspace(const fattn_kernel *row, const fattn_problem *problem,
                            const fattn_tiling *tiling)
{
    (void)row, (void)problem, (void)tiling;
    return 0;
}

static fattn_status run_naive(const fattn_plan *made, const fattn_buffers *buffers, void *workspace)
{
    (void)workspace;
    return fattn_naive_execute(&made->problem, buffers);
}

/* Square, wide and tall tiles, and one that leaves a remainder everywhere. */
static const fattn_tile tiled_menu[] = {{64, 64}, {64, 256}, {128, 32}, {16, 16}, {7, 13}, {0, 0}};

static int64_t tiled_fast_bytes(const fattn_kernel *row, const fattn_problem *problem,
                                fattn_tile tile)
{
    (void)row;
    return fattn_tiled_fast_bytes(problem, tile);
}

typedef struct row {
    fattn_kernel kernel;
    fattn_status (*run)(const fattn_plan *made, const fattn_buffers *buffers, void *workspace);
    fattn_io_schedule schedule; /* of the rows "tiled_*" */
} row;

/* The kernel comes first in its row. */
static const row *row_of(const fattn_kernel *kernel) { return (const row *)kernel; }

static int64_t tiled_workspace(const fattn_kernel *kernel, const fattn_problem *problem,
                               const fattn_tiling *tiling)
{
    return fattn_tiled_workspace(problem, row_of(kernel)->schedule,
                                 (fattn_tile){tiling->br, tiling->bc});
}

static fattn_status run_tiled(const fattn_plan *made, const fattn_buffers *buffers, void *workspace)
{
    const fattn_tiled_options options = {.schedule = row_of(made->kernel)->schedule,
                                         .tile = {made->tiling.br, made->tiling.bc}};
    fattn_io_counts counts = {0};
    fattn_tiled_run(&made->problem, buffers, &options, workspace, &counts);
    return FATTN_OK;
}

enum {
    both_ops = FATTN_OP_BIT(FATTN_FORWARD) | FATTN_OP_BIT(FATTN_BACKWARD),
    /* No f64: the judge has nothing more accurate than an f64 result. */
    tiled_dtypes =
        FATTN_DTYPE_BIT(FATTN_F32) | FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16),
    naive_dtypes = tiled_dtypes | FATTN_DTYPE_BIT(FATTN_F64),
    naive_dtypes_kv = tiled_dtypes | FATTN_DTYPE_BIT(FATTN_E4M3)
};

#define TILED_ROW(row_name, io)                      \
    {                                                \
        .kernel = {.name = row_name,                 \
                   .ops = both_ops,                  \
                   .dtypes = tiled_dtypes,           \
                   .features = FATTN_KERNEL_COMMON,  \
                   .dim_max = FATTN_PROBLEM_DIM_MAX, \
                   .by_name = true,                  \
                   .tiles = tiled_menu,              \
                   .fast_bytes = tiled_fast_bytes,   \
                   .workspace = tiled_workspace},    \
        .run = run_tiled, .schedule = io             \
    }

static const row rows[] = {
    {.kernel = {.name = "naive",
                .ops = both_ops,
                .dtypes = naive_dtypes,
                .dtypes_kv = naive_dtypes_kv,
                .any_bias = true,
                .features = FATTN_KERNEL_LAST | FATTN_SEQSTART_K | FATTN_ALIBI_BIAS,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .tiles = whole,
                .fast_bytes = no_fast_bytes,
                .workspace = no_workspace},
     .run = run_naive},
    TILED_ROW("tiled_flash1", FATTN_IO_FLASH1),
    TILED_ROW("tiled_flash2", FATTN_IO_FLASH2),
};
#define ROW_COUNT ((int)(sizeof rows / sizeof rows[0]))

static int count(void) { return 1; }

static fattn_status open(int ordinal, const fattn_device_options *options, void **impl)
{
    (void)ordinal;
    *impl = NULL;
    return fattn_device_options_refuse(options, "reference");
}

static void close(void *impl) { (void)impl; }

static void describe(void *impl, fattn_device_info *info)
{
    (void)impl;
    strcpy(info->name, "double precision on one thread");
    strcpy(info->isa, "portable C");
    info->units = 1;
}

static void limits(void *impl, fattn_limits *limits)
{
    (void)impl;
    *limits = (fattn_limits){.fast_memory = 32768, .parallelism = 1};
}

static const fattn_kernel *kernel(void *impl, int i, const char **missing)
{
    (void)impl;
    *missing = NULL;
    return i >= 0 && i < ROW_COUNT ? &rows[i].kernel : NULL;
}

/* No peaks: the oracle's speed is not measured. */
static const fattn_peak *peak(void *impl, int i)
{
    (void)impl, (void)i;
    return NULL;
}

static fattn_status plan(fattn_plan *made)
{
    (void)made;
    return FATTN_OK;
}

static fattn_status run(const fattn_plan *made, const fattn_buffers *buffers, void *workspace,
                        fattn_stream stream)
{
    const row *const chosen = row_of(made->kernel);
    const fattn_status status = fattn_host_stream_check(stream);
    return status ? status : chosen->run(made, buffers, workspace);
}

static void release(fattn_plan *made) { (void)made; }

/* --- Merge and dropout in double precision ---------------------------------------------------- */

/* Weight of a state: exp(lse - max); 0 for an empty state, whose o is not read. */
static double weight(double lse, double max) { return lse == -INFINITY ? 0 : exp(lse - max); }

static void merge_row(const fattn_merge_job *job, int64_t b, int64_t h, int64_t i)
{
    const double lse1 = *fattn_state_lse(&job->first, b, h, i);
    const double lse2 = *fattn_state_lse(&job->second, b, h, i);
    const double max = lse1 > lse2 || lse2 != lse2 ? lse1 : lse2;
    const double w1 = weight(lse1, max);
    const double w2 = weight(lse2, max);
    const double sum = w1 + w2;
    const float *const o1 = (float *)job->first.o + fattn_state_row(&job->first, b, h, i);
    const float *const o2 = (float *)job->second.o + fattn_state_row(&job->second, b, h, i);
    const int64_t at = fattn_state_row(&job->result, b, h, i);
    for (int64_t c = 0; c < job->dim_v; c++) {
        const double part1 = lse1 == -INFINITY ? 0 : w1 * o1[c];
        const double part2 = lse2 == -INFINITY ? 0 : w2 * o2[c];
        fattn_dtype_store(job->dtype, job->result.o, at + c, sum == 0 ? 0 : (part1 + part2) / sum);
    }
    *fattn_state_lse(&job->result, b, h, i) = sum == 0 ? -INFINITY : (float)(max + log(sum));
}

static fattn_status merge(void *impl, const fattn_merge_job *job, fattn_stream stream)
{
    (void)impl;
    const fattn_status status = fattn_host_stream_check(stream);
    for (int64_t b = 0; !status && b < job->batch; b++) {
        for (int64_t h = 0; h < job->heads; h++) {
            for (int64_t i = 0; i < job->seqlen; i++) {
                merge_row(job, b, h, i);
            }
        }
    }
    return status;
}

static fattn_status dropout_mask(void *impl, const fattn_dropout_args *a, fattn_stream stream)
{
    (void)impl;
    const fattn_status status = fattn_host_stream_check(stream);
    const int64_t threshold = fattn_naive_dropout_threshold(a->p);
    uint32_t key[2];
    fattn_naive_dropout_key(a->seed, a->offset, key);
    uint8_t *keep = a->keep;
    for (int64_t b = 0; !status && b < a->batch; b++) {
        for (int64_t h = 0; h < a->heads; h++) {
            for (int64_t i = 0; i < a->seqlen_q; i++) {
                for (int64_t j = 0; j < a->seqlen_k; j++) {
                    *keep++ =
                        fattn_naive_dropout(key, threshold, b + a->batch_offset, h + a->head_offset,
                                            i + a->q_offset, j + a->k_offset) != 0;
                }
            }
        }
    }
    return status;
}

static fattn_status inspect(void *impl, const fattn_problem *p, const fattn_buffers *buffers,
                            const fattn_inspect_args *args)
{
    (void)impl;
    return fattn_naive_inspect(p, buffers, args);
}

const fattn_backend fattn_backend_reference = {
    .name = "reference",
    .by_name = true,
    .host_memory = true,
    .count = count,
    .open = open,
    .close = close,
    .describe = describe,
    .limits = limits,
    .kernel = kernel,
    .peak = peak,
    .plan = plan,
    .run = run,
    .run_onto = fattn_plan_run_then_merge,
    .release = release,
    .merge = merge,
    .dropout_mask = dropout_mask,
    .rows = fattn_host_rows,
    .inspect = inspect,
    .reads = fattn_host_reads,
    .alloc = fattn_host_alloc,
    .free = fattn_host_free,
    .copy = fattn_host_copy,
    .copy_rows = fattn_host_copy_rows,
    .stream_create = fattn_host_stream_create,
    .stream_destroy = fattn_host_stream_destroy,
    .stream_synchronize = fattn_host_stream_synchronize,
    .stream_wait = fattn_host_stream_wait,
    .stream_capture = fattn_host_stream_capture,
    .capture_mode = fattn_host_capture_mode,
    .event_create = fattn_host_event_create,
    .event_destroy = fattn_host_event_destroy,
    .event_record = fattn_host_event_record,
    .event_synchronize = fattn_host_event_synchronize,
    .event_elapsed = fattn_host_event_elapsed,
};
