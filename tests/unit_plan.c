/* SPDX-License-Identifier: Apache-2.0 */
/* Devices, the environment, planning, executing, the one-shot call, and the small public
 * functions. */
#define _POSIX_C_SOURCE 200809L

#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/backend.h"
#include "core/env.h"
#include "core/host.h"
#include "core/memory.h"
#include "core/plan.h"
#include "core/status.h"
#include "fattn/distributed.h"
#include "tests/environment.h"
#include "tests/unit_answers.h"

static fattn_device *open_device(const char *spec)
{
    fattn_device *device = NULL;
    ANSWERS(fattn_device_open(spec, &device), FATTN_OK);
    return device;
}

/* A small forward: 2 x 3 queries on 2 x 4 keys. */
static _Alignas(256) float arrays[4][256];

static fattn_problem small(void)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.batch = 2;
    p.seqlen_q = 3;
    p.seqlen_k = 4;
    p.dim = p.dim_v = 8;
    return p;
}

static fattn_buffers small_buffers(void)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    for (int i = 0; i < 256; i++) {
        arrays[0][i] = sinf((float)i);
        arrays[1][i] = cosf((float)i);
        arrays[2][i] = (float)i;
        arrays[3][i] = NAN;
    }
    b.q = arrays[0], b.k = arrays[1], b.v = arrays[2], b.o = arrays[3];
    return b;
}

static bool written(void)
{
    return !isnan(arrays[3][0]) && !isnan(arrays[3][47]) && isnan(arrays[3][48]);
}

/* --- Status and version ----------------------------------------------------------------------- */

Test(status, every_code_has_its_name)
{
#define NAMED(code) \
    {               \
        code, #code \
    }
    static const struct {
        fattn_status status;
        const char *name;
    } all[] = {
        NAMED(FATTN_OK),
        NAMED(FATTN_INVALID_ARGUMENT),
        NAMED(FATTN_INVALID_STRUCT),
        NAMED(FATTN_INVALID_SHAPE),
        NAMED(FATTN_INVALID_STRIDE),
        NAMED(FATTN_NULL_POINTER),
        NAMED(FATTN_MISALIGNED),
        NAMED(FATTN_OVERLAP),
        NAMED(FATTN_OVERFLOW),
        NAMED(FATTN_INVALID_DATA),
        NAMED(FATTN_UNSUPPORTED),
        NAMED(FATTN_NO_DEVICE),
        NAMED(FATTN_UNKNOWN_DEVICE),
        NAMED(FATTN_DEVICE_ERROR),
        NAMED(FATTN_OUT_OF_MEMORY),
        NAMED(FATTN_BAD_ENVIRONMENT),
        NAMED(FATTN_RANK_LOST),
        NAMED(FATTN_RANK_TIMEOUT),
        NAMED(FATTN_RANKS_DISAGREE),
    };
#undef NAMED
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        cr_assert_str_eq(fattn_status_string(all[i].status), all[i].name);
    }
    cr_assert_str_eq(fattn_status_string((fattn_status)-1), "unknown fattn_status");
    cr_assert_str_eq(fattn_version(), FATTN_VERSION_STRING);
    cr_assert_str_eq(fattn_last_reason(), "");
}

/* --- Environment ------------------------------------------------------------------------------ */

Test(env, bad_values_are_errors_that_name_them)
{
    static const char *const bad[][2] = {
        {"FATTN_VERBOSE", "4"},
        {"FATTN_VERBOSE", "yes"},
        {"FATTN_VERBOSE", ""},
        {"FATTN_NUM_THREADS", "0"},
        {"FATTN_NUM_THREADS", "-1"},
        {"FATTN_NUM_THREADS", "4x"},
        {"FATTN_NUM_THREADS", " 4"},
        {"FATTN_TILE", "64"},
        {"FATTN_TILE", "64,0"},
        {"FATTN_TILE", "64,32,1"},
        {"FATTN_SRAM", "1e6"},
        {"FATTN_SPLITS", "0"},
        {"FATTN_SRAM", "99999999999999999999999"},
        {"FATTN_KERNEL", ""},
        {"FATTN_CPU_ISA", ""},
        {"FATTN_CPU_ISA", "nonsense"}, /* of a backend that is not opened */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        set_environment(bad[i][0], bad[i][1]);
        fattn_device *device = (fattn_device *)arrays;
        ANSWERS(fattn_device_open("reference", &device), FATTN_BAD_ENVIRONMENT);
        cr_assert_null(device);
        REASON_HAS(bad[i][0]);
        REASON_HAS(bad[i][1]);
        set_environment(bad[i][0], NULL);
    }
    char longest[200];
    memset(longest, 'x', sizeof longest);
    longest[199] = '\0';
    set_environment("FATTN_BACKEND", longest);
    fattn_device *device = NULL;
    ANSWERS(fattn_device_open(NULL, &device), FATTN_BAD_ENVIRONMENT);
}

Test(env, values_are_read)
{
    set_environment("FATTN_TILE", "64,32");
    set_environment("FATTN_NUM_THREADS", "7");
    set_environment("FATTN_SRAM", "1048576");
    set_environment("FATTN_SPLITS", "3");
    set_environment("FATTN_CPU_ISA", "scalar");
    const fattn_env *env = NULL;
    ANSWERS(fattn_env_get(&env), FATTN_OK);
    cr_assert_eq(env->tile.br, 64);
    cr_assert_eq(env->tile.bc, 32);
    cr_assert_eq(env->threads, 7);
    cr_assert_eq(env->sram, 1048576);
    cr_assert_eq(env->splits, 3);
    cr_assert_null(env->kernel);
    const char *isa = NULL;
    for (int i = 0; fattn_backend_at(i); i++) {
        const fattn_env_variable *const variable = fattn_backend_at(i)->variable;
        if (variable && strcmp(variable->name, "FATTN_CPU_ISA") == 0) {
            isa = fattn_env_own(variable);
        }
    }
    cr_assert_not_null(isa);
    cr_assert_str_eq(isa, "scalar");
}

/* --- Devices ---------------------------------------------------------------------------------- */

Test(device, specs)
{
    fattn_device *device = (fattn_device *)arrays;
    ANSWERS(fattn_device_open("nonsense", &device), FATTN_UNKNOWN_DEVICE);
    cr_assert_null(device);
    REASON_HAS("nonsense");
    REASON_HAS("reference");
    ANSWERS(fattn_device_open("reference:1", &device), FATTN_NO_DEVICE);
    ANSWERS(fattn_device_open("reference:x", &device), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_device_open("auto:0", &device), FATTN_UNKNOWN_DEVICE);
    REASON_HAS("auto and, with or without :number, ");
    ANSWERS(fattn_device_open("reference:", &device), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_device_open("reference:99999999", &device), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_device_open("", &device), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_device_open("reference", NULL), FATTN_NULL_POINTER);
    set_environment("FATTN_BACKEND", "nonsense");
    ANSWERS(fattn_device_open(NULL, &device), FATTN_UNKNOWN_DEVICE);
    REASON_HAS("FATTN_BACKEND");

    set_environment("FATTN_BACKEND", "reference:0");
    fattn_device *const opened = open_device(NULL);
    fattn_device_info info = {.struct_size = sizeof info};
    ANSWERS(fattn_device_get_info(opened, &info), FATTN_OK);
    cr_assert_str_eq(info.backend, "reference");
    cr_assert_eq(info.host_memory, 1);
    cr_assert_eq(info.struct_size, sizeof info);
    fattn_device_close(opened);
    fattn_device_close(NULL);

    cr_assert_eq(fattn_device_count("reference"), 1);
    cr_assert_eq(fattn_device_count("nonsense"), 0);
    cr_assert_eq(fattn_device_count(NULL), 0);
    cr_assert_not_null(fattn_backend_name(0));
    cr_assert_null(fattn_backend_name(99));
    cr_assert_null(fattn_backend_name(-1));
}

Test(device, auto_is_the_best_that_is_no_reference)
{
    fattn_device *device = NULL;
    const fattn_status status = fattn_device_open("auto", &device);
    cr_assert_eq(status, FATTN_OK);
    cr_assert_str_neq(device->backend->name, "reference");
    fattn_device_close(device);
}

Test(device, memory_streams_and_events)
{
    fattn_device *const device = open_device("reference");
    void *memory = arrays;
    ANSWERS(fattn_device_malloc(device, 0, &memory), FATTN_OK);
    cr_assert_null(memory);
    ANSWERS(fattn_device_malloc(device, 1000, &memory), FATTN_OK);
    cr_assert_eq((uintptr_t)memory % 256, 0);
    ANSWERS(fattn_device_free(device, memory), FATTN_OK);
    ANSWERS(fattn_device_malloc(device, SIZE_MAX, &memory), FATTN_OVERFLOW);
    ANSWERS(fattn_device_malloc(device, (size_t)INT64_MAX, &memory), FATTN_OUT_OF_MEMORY);
    ANSWERS(fattn_device_malloc(device, 8, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_device_malloc(device, 1000, &memory), FATTN_OK);
    ANSWERS(fattn_device_copy(device, memory, arrays, 1000, NULL), FATTN_OK);
    cr_assert(memcmp(memory, arrays, 1000) == 0);
    ANSWERS(fattn_device_copy(device, NULL, arrays, 1000, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_device_copy(device, memory, NULL, 1000, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_device_copy(device, NULL, NULL, 0, NULL), FATTN_OK);
    ANSWERS(fattn_device_copy(device, memory, arrays, 8, arrays), FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_device_free(device, memory), FATTN_OK);
    ANSWERS(fattn_device_free(device, NULL), FATTN_OK);

    fattn_stream stream = arrays;
    ANSWERS(fattn_stream_create(device, &stream), FATTN_OK);
    cr_assert_null(stream);
    ANSWERS(fattn_stream_synchronize(device, stream), FATTN_OK);
    ANSWERS(fattn_stream_synchronize(device, arrays), FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_stream_destroy(device, stream), FATTN_OK);
    ANSWERS(fattn_stream_create(device, NULL), FATTN_NULL_POINTER);

    fattn_event *start = NULL;
    fattn_event *stop = NULL;
    double ms = -1;
    ANSWERS(fattn_event_create(device, &start), FATTN_OK);
    ANSWERS(fattn_event_create(device, &stop), FATTN_OK);
    ANSWERS(fattn_event_elapsed(start, stop, &ms), FATTN_INVALID_ARGUMENT);
    REASON_HAS("start");
    ANSWERS(fattn_event_record(start, NULL), FATTN_OK);
    ANSWERS(fattn_event_elapsed(start, stop, &ms), FATTN_INVALID_ARGUMENT);
    REASON_HAS("stop");
    ANSWERS(fattn_event_record(stop, arrays), FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_event_record(stop, NULL), FATTN_OK);
    ANSWERS(fattn_event_elapsed(start, stop, &ms), FATTN_OK);
    cr_assert(ms >= 0 && ms < 10000);
    ANSWERS(fattn_event_elapsed(start, NULL, &ms), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_wait(stop, NULL), FATTN_OK);
    ANSWERS(fattn_event_wait(stop, arrays), FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_event_wait(NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_synchronize(stop), FATTN_OK);
    ANSWERS(fattn_event_synchronize(NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_record(NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_create(device, NULL), FATTN_NULL_POINTER);
    fattn_device *const other = open_device("reference");
    fattn_event *foreign = NULL;
    ANSWERS(fattn_event_create(other, &foreign), FATTN_OK);
    ANSWERS(fattn_event_elapsed(start, foreign, &ms), FATTN_INVALID_ARGUMENT);
    fattn_event_destroy(foreign);
    fattn_event_destroy(start);
    fattn_event_destroy(stop);
    fattn_event_destroy(NULL);
    fattn_device_close(other);
    fattn_device_close(device);
    cr_assert_eq(fattn_memory_alive(), 0);
}

/* --- Plans ------------------------------------------------------------------------------------ */

static char logged[8192];

static void keep_log(void *user, const char *line)
{
    cr_assert_eq(user, arrays);
    strncat(logged, line, sizeof logged - strlen(logged) - 2);
    strcat(logged, "\n");
}

/* Decoding pays for 16 rows only with many keys, for fewer rows always. */
Test(plan, rows_that_pay)
{
    fattn_device *const device = open_device("cpu");
    const struct {
        int64_t rows, keys;
        bool decodes;
    } cases[] = {{16, 4096, true}, {16, 64, false}, {8, 64, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fattn_problem p;
        fattn_problem_init(&p);
        p.seqlen_q = cases[i].rows, p.seqlen_k = cases[i].keys, p.dim = p.dim_v = 64;
        fattn_plan *plan = NULL;
        fattn_plan_info info = {.struct_size = sizeof info};
        ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OK);
        ANSWERS(fattn_plan_get_info(plan, &info), FATTN_OK);
        cr_assert_eq(strstr(info.kernel, "_decode") != NULL, cases[i].decodes, "%lld x %lld: %s",
                     (long long)cases[i].rows, (long long)cases[i].keys, info.kernel);
        fattn_plan_destroy(plan);
    }
    fattn_device_close(device);
}

/* For 9 to 16 rows of bf16, products of pairs pay with many keys unless decoding, whose parts are
 * smaller, would occupy many more cores. */
Test(plan, rows_of_pairs_that_pay)
{
    fattn_device *const device = open_device("cpu");
    const struct {
        int64_t rows, heads, keys, cores;
        bool pays;
    } cases[] = {{8, 64, 4096, 1, false}, {12, 1, 1024, 64, true},  {12, 1, 1025, 1, true},
                 {12, 4, 1025, 2, true},  {12, 4, 1025, 16, false}, {12, 2, 4096, 6, true},
                 {12, 2, 4096, 8, false}, {16, 8, 16384, 64, true}, {17, 1, 4096, 64, true}};
    const fattn_kernel *row = NULL;
    const char *missing = NULL;
    for (int i = 0; (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        for (size_t n = 0; n < sizeof cases / sizeof cases[0] && strstr(row->name, "_pairs"); n++) {
            const fattn_limits limits = {.units = cases[n].cores,
                                         .parallelism = 2 * cases[n].cores};
            fattn_problem p;
            fattn_problem_init(&p);
            p.heads_k = cases[n].heads, p.heads_q = p.heads_k * cases[n].rows;
            p.seqlen_q = 1, p.seqlen_k = cases[n].keys;
            p.dim = p.dim_v = 64;
            cr_assert(!row->pays || row->pays(row, &p, &limits) == cases[n].pays, "%s, case %d",
                      row->name, (int)n);
        }
    }
    fattn_device_close(device);
}

Test(plan, made_asked_and_run)
{
    fattn_device *const device = open_device("reference");
    const fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    fattn_plan *plan = NULL;
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OK);
    ANSWERS(fattn_support(device, &p), FATTN_OK);
    fattn_device_close(device); /* the plan holds it */

    fattn_plan_info info = {.struct_size = sizeof info};
    ANSWERS(fattn_plan_get_info(plan, &info), FATTN_OK);
    cr_assert_str_eq(info.kernel, "naive");
    cr_assert_gt(info.flops, 0);
    ANSWERS(fattn_plan_get_info(plan, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_plan_get_info(NULL, &info), FATTN_NULL_POINTER);
    for (size_t size = 0; size < sizeof info; size++) {
        info.struct_size = size;
        ANSWERS(fattn_plan_get_info(plan, &info), FATTN_INVALID_STRUCT);
    }

    char text[2000];
    const size_t length = fattn_plan_describe(plan, text, sizeof text);
    cr_assert_eq(length, strlen(text));
    cr_assert_not_null(strstr(text, "kernel naive"));
    char cut[10];
    cr_assert_eq(fattn_plan_describe(plan, cut, sizeof cut), length);
    cr_assert_eq(strlen(cut), 9);
    cr_assert_eq(fattn_plan_describe(plan, NULL, 0), length);
    cr_assert_eq(fattn_plan_describe(plan, NULL, 100), length);
    cr_assert_eq(fattn_plan_describe(NULL, NULL, 100), 0);
    cr_assert_eq(fattn_plan_describe(NULL, text, sizeof text), 0);

    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
    cr_assert(written());
    ANSWERS(fattn_execute(NULL, &b, NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_execute(plan, NULL, NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_execute(plan, &b, (char *)arrays + 8, NULL), FATTN_MISALIGNED);
    ANSWERS(fattn_execute(plan, &b, NULL, arrays), FATTN_INVALID_ARGUMENT);
    fattn_plan_destroy(plan);
    fattn_plan_destroy(NULL);
    cr_assert_eq(fattn_memory_alive(), 0);
}

/* In every function that takes a device, NULL is the one of FATTN_BACKEND, opened once. */
Test(device, null_is_the_default_one)
{
    set_environment("FATTN_BACKEND", "reference");
    const fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    static uint8_t keep[32];
    fattn_plan *plan = NULL;
    fattn_event *event = NULL;
    fattn_stream stream = arrays;
    void *memory = NULL;
    fattn_device_info info;
    fattn_device_info_init(&info);
    ANSWERS(fattn_device_get_info(NULL, &info), FATTN_OK);
    cr_assert_str_eq(info.backend, "reference");
    ANSWERS(fattn_device_malloc(NULL, 64, &memory), FATTN_OK);
    ANSWERS(fattn_device_copy(NULL, memory, arrays, 64, NULL), FATTN_OK);
    cr_assert(memcmp(memory, arrays, 64) == 0);
    ANSWERS(fattn_device_free(NULL, memory), FATTN_OK);
    ANSWERS(fattn_stream_create(NULL, &stream), FATTN_OK);
    ANSWERS(fattn_stream_synchronize(NULL, stream), FATTN_OK);
    ANSWERS(fattn_stream_destroy(NULL, stream), FATTN_OK);
    ANSWERS(fattn_event_create(NULL, &event), FATTN_OK);
    ANSWERS(fattn_support(NULL, &p), FATTN_OK);
    ANSWERS(fattn_plan_create(NULL, &p, &plan), FATTN_OK);
    cr_assert_eq(plan->device, event->device, "it is opened once");
    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
    cr_assert(written());
    ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_OK);
    fattn_dropout_args dropout;
    fattn_dropout_args_init(&dropout);
    dropout.batch = dropout.heads = 1, dropout.seqlen_q = 4, dropout.seqlen_k = 8;
    dropout.keep = keep;
    ANSWERS(fattn_dropout_mask(NULL, &dropout, NULL), FATTN_OK);
    cr_assert(keep[0] && keep[31]);
    fattn_merge_args merge;
    fattn_merge_args_init(&merge);
    merge.dim_v = 1; /* of nothing */
    ANSWERS(fattn_merge(NULL, &merge, NULL), FATTN_OK);
    float scores[2 * 3 * 4];
    fattn_inspect_args inspect;
    fattn_inspect_args_init(&inspect);
    inspect.to = scores;
    ANSWERS(fattn_inspect(NULL, &p, &b, &inspect), FATTN_OK);

    fattn_cache_clear(); /* plan and event hold the device */
    ANSWERS(fattn_event_record(event, NULL), FATTN_OK);
    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
    fattn_event_destroy(event);
    fattn_plan_destroy(plan);
    cr_assert_eq(fattn_memory_alive(), 0);

    /* If it does not exist, handles are NULL and the reason names it. */
    set_environment("FATTN_BACKEND", "nonsense");
    plan = (fattn_plan *)arrays, event = (fattn_event *)arrays, stream = memory = arrays;
    ANSWERS(fattn_plan_create(NULL, &p, &plan), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_event_create(NULL, &event), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_stream_create(NULL, &stream), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_device_malloc(NULL, 64, &memory), FATTN_UNKNOWN_DEVICE);
    REASON_HAS("nonsense");
    cr_assert(!plan && !event && !stream && !memory);
    ANSWERS(fattn_device_get_info(NULL, &info), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_support(NULL, &p), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_merge(NULL, &merge, NULL), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_dropout_mask(NULL, &dropout, NULL), FATTN_UNKNOWN_DEVICE);
    ANSWERS(fattn_inspect(NULL, &p, &b, &inspect), FATTN_UNKNOWN_DEVICE);
    set_environment("FATTN_BACKEND", NULL);
    cr_assert_eq(fattn_memory_alive(), 0);
}

Test(plan, refusals)
{
    fattn_device *const device = open_device("reference");
    fattn_problem p = small();
    fattn_plan *plan = (fattn_plan *)arrays;
    ANSWERS(fattn_plan_create(device, &p, NULL), FATTN_NULL_POINTER);
    p.heads_q = -1;
    ANSWERS(fattn_support(device, &p), FATTN_INVALID_SHAPE);
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_INVALID_SHAPE);
    cr_assert_null(plan);
    p = small();
    ANSWERS(fattn_plan_create_with(device, &p, "nonsense", NULL, &plan), FATTN_INVALID_ARGUMENT);
    REASON_HAS("nonsense");
    const fattn_wish splits = {.splits = 4};
    ANSWERS(fattn_plan_create_with(device, &p, NULL, &splits, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("splits");
    set_environment("FATTN_KERNEL", "nonsense");
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_INVALID_ARGUMENT);
    set_environment("FATTN_KERNEL", "naive");
    set_environment("FATTN_TILE", "3,3");
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_UNSUPPORTED);
    set_environment("FATTN_TILE", "x");
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_BAD_ENVIRONMENT);
    fattn_device_close(device);
    cr_assert_eq(fattn_memory_alive(), 0);
}

Test(plan, a_refusal_names_who_takes_the_problem)
{
    set_environment("FATTN_CPU_ISA", "scalar");
    fattn_device *const cpu = open_device("cpu"), *const reference = open_device("reference");
    fattn_problem p = small();
    fattn_plan *plan = NULL;
    p.dim = p.dim_v = 300;
    ANSWERS(fattn_support(cpu, &p), FATTN_UNSUPPORTED);
    REASON_HAS("scalar_forward takes head dimensions to 256, not dim 300, dim_v 300; "
               "row naive of backend reference takes it, slowly");
    p = small();
    p.op = FATTN_BACKWARD;
    ANSWERS(fattn_plan_create_with(cpu, &p, "scalar_forward", NULL, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("scalar_forward computes no backward; row scalar_backward takes it");

    p.dtype = FATTN_F64;
    ANSWERS(fattn_plan_create_with(cpu, &p, "scalar_backward", NULL, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("takes no f64; row naive of backend reference takes it");
    p = small();
    const fattn_wish splits = {.splits = 4};
    ANSWERS(fattn_plan_create_with(reference, &p, NULL, &splits, &plan), FATTN_UNSUPPORTED);
    cr_assert_null(strstr(fattn_last_reason(), "takes it"), "%s", fattn_last_reason());
    fattn_device_close(reference);
    fattn_device_close(cpu);
}

Test(plan, verbose_says_what_and_why)
{
    set_environment("FATTN_VERBOSE", "3");
    fattn_set_log_callback(keep_log, arrays);
    const fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    arrays[1][3] = NAN;
    arrays[2][3] = INFINITY;
    fattn_device *const cpu = open_device("cpu");
    ANSWERS(fattn_attention(cpu, &p, &b, NULL), FATTN_OK);
    cr_assert_not_null(strstr(logged, "plan forward f32"), "%s", logged);
    cr_assert_not_null(strstr(logged, "tensor k f32: 64 elements, 1 NaN, 0 Inf"), "%s", logged);
    cr_assert_not_null(strstr(logged, "tensor v f32: 64 elements, 0 NaN, 1 Inf"), "%s", logged);
    fattn_problem f64 = p;
    fattn_plan *plan = NULL;
    f64.dtype = FATTN_F64;
    ANSWERS(fattn_plan_create(cpu, &f64, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("f64");
    cr_assert_not_null(strstr(logged, "declines: it takes no f64"), "%s", logged);
    fattn_set_log_callback(NULL, NULL);
    fattn_cache_clear();
    fattn_device_close(cpu);
}

/* A tensor in the caller's workspace is refused, at either end of it. */
Test(plan, keeps_tensors_out_of_the_workspace)
{
    fattn_device *const device = open_device("cpu");
    const fattn_problem p = small();
    fattn_buffers b = small_buffers();
    fattn_plan *plan = NULL;
    fattn_plan_info info;
    fattn_plan_info_init(&info);
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OK);
    ANSWERS(fattn_plan_get_info(plan, &info), FATTN_OK);
    const size_t bytes = (size_t)info.workspace_bytes, last = (bytes - 1) / 256 * 256;
    cr_assert_gt(bytes, 0);
    char *const memory = aligned_alloc(256, last + 256 + sizeof arrays[0]);
    b.q = memcpy(memory, arrays[0], sizeof arrays[0]);
    ANSWERS(fattn_execute(plan, &b, memory, NULL), FATTN_OVERLAP);
    REASON_HAS("q lies in the workspace");
    b.q = arrays[0];
    b.o = memory + last;
    ANSWERS(fattn_execute(plan, &b, memory, NULL), FATTN_OVERLAP);
    REASON_HAS("o lies in the workspace");
    b.o = memory + last + 256;
    ANSWERS(fattn_execute(plan, &b, memory, NULL), FATTN_OK);
    free(memory);
    fattn_plan_destroy(plan);
    fattn_device_close(device);
}

/* Keys may have heads where queries have none. */
Test(plan, without_query_heads)
{
    static const uint64_t features[] = {0, FATTN_CAUSAL, FATTN_CU_SEQLENS_Q, FATTN_SEQUSED_Q};
    static const int32_t cu[] = {0, 3, 3}, used[] = {3, 0};
    static float dk[64], dv[64];
    static const char *const backends[] = {"cpu", "reference"};
    for (int n = 0; n < 2 * 2 * 4; n++) {
        fattn_device *const device = open_device(backends[n / 8]);
        fattn_problem p = small();
        fattn_buffers b = small_buffers();
        p.op = n / 4 % 2 ? FATTN_BACKWARD : FATTN_FORWARD;
        p.heads_q = 0, p.heads_k = 1;
        p.features = features[n % 4];
        p.total_q = p.features & FATTN_CU_SEQLENS_Q ? 3 : 0;
        b.cu_seqlens_q = p.features & FATTN_CU_SEQLENS_Q ? cu : NULL;
        b.seqused_q = p.features & FATTN_SEQUSED_Q ? used : NULL;
        b.dk = p.op == FATTN_BACKWARD ? dk : NULL;
        b.dv = p.op == FATTN_BACKWARD ? dv : NULL;
        dk[63] = dv[63] = NAN;
        fattn_plan *plan = NULL;
        fattn_plan_info info = {.struct_size = sizeof info};
        ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OK);
        ANSWERS(fattn_plan_get_info(plan, &info), FATTN_OK);
        cr_assert(isfinite(info.predicted_bytes), "case %d: %g bytes", n, info.predicted_bytes);
        ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
        cr_assert(p.op == FATTN_FORWARD || (dk[63] == 0 && dv[63] == 0));
        fattn_plan_destroy(plan);
        fattn_device_close(device);
    }
}

/* --- The one-shot call ------------------------------------------------------------------------ */

Test(one_shot, plans_once_and_runs)
{
    set_environment("FATTN_BACKEND", "reference");
    const fattn_problem p = small();
    fattn_buffers b = small_buffers();
    ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_OK);
    cr_assert(written());
    const int64_t alive = fattn_memory_alive();
    for (int i = 0; i < 100; i++) {
        ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_OK);
    }
    cr_assert_eq(fattn_memory_alive(), alive, "a cached call allocates nothing that stays");
    for (int i = 0; i < 200; i++) { /* more problems than the cache holds */
        fattn_problem other = p;
        other.seqlen_q = 1 + i % 3;
        other.features = FATTN_SCALE;
        other.scale = i;
        ANSWERS(fattn_attention(NULL, &other, &b, NULL), FATTN_OK);
    }
    cr_assert_leq(fattn_memory_alive(), 2 * 32 + 2, "the cache is bounded");
    ANSWERS(fattn_attention(NULL, NULL, &b, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_attention(NULL, &p, NULL, NULL), FATTN_NULL_POINTER);
    fattn_problem promising = p;
    promising.pointer_alignment = 3;
    ANSWERS(fattn_attention(NULL, &promising, &b, NULL), FATTN_INVALID_ARGUMENT);
    REASON_HAS("pointer_alignment is 3");
    b.q = arrays[0] + 1; /* aligned only to a float, which is all that the call requires */
    ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_OK);
    b.q = (char *)arrays[0] + 1;
    ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_MISALIGNED);
    b.q = NULL;
    ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_NULL_POINTER);
    fattn_cache_clear();
    cr_assert_eq(fattn_memory_alive(), 0);
}

/* Calls for problems `first` .. `past` - 1, which differ in their scale. */
static void attend_scaled(int first, int past)
{
    const fattn_buffers b = small_buffers();
    for (int i = first; i < past; i++) {
        fattn_problem p = small();
        p.features = FATTN_SCALE;
        p.scale = i;
        ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_OK);
    }
}

Test(one_shot, keeps_the_plans_used_last)
{
    set_environment("FATTN_BACKEND", "cpu");
    fattn_cache_options options;
    fattn_cache_info info = {.struct_size = sizeof info};
    fattn_cache_options_init(&options);
    cr_assert_eq(options.entries, 32);
    cr_assert_eq(options.bytes, INT64_MAX);
    options.entries = 4;
    ANSWERS(fattn_cache_set_options(&options), FATTN_OK);
    attend_scaled(0, 4);
    attend_scaled(0, 4);
    attend_scaled(4, 5); /* in the place of 0 */
    attend_scaled(1, 4);
    attend_scaled(0, 1); /* in the place of 4 */
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.hits, 4 + 3);
    cr_assert_eq(info.misses, 4 + 1 + 1);
    cr_assert_eq(info.evictions, 2);
    cr_assert_eq(info.entries, 4);
    cr_assert_gt(info.bytes, 0);
    cr_assert_eq(info.allocations, info.misses);
    cr_assert_eq(info.graph_bytes, 0);
    const int64_t each = info.bytes / 4;

    options.bytes = 2 * each;
    ANSWERS(fattn_cache_set_options(&options), FATTN_OK);
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.bytes, 2 * each);
    cr_assert_eq(info.entries, 4);
    options.entries = 1;
    ANSWERS(fattn_cache_set_options(&options), FATTN_OK);
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.bytes, each);
    cr_assert_eq(info.entries, 1);
    cr_assert_eq(info.evictions, 2 + 3);
    fattn_cache_clear();
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.entries, 0);
    cr_assert_eq(info.bytes, 0);
    cr_assert_eq(info.evictions, 2 + 3);
    cr_assert_eq(fattn_memory_alive(), 0);

    options.entries = 0; /* nothing is cached, and everything works */
    ANSWERS(fattn_cache_set_options(&options), FATTN_OK);
    attend_scaled(0, 3);
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.entries, 0);
    cr_assert_eq(info.bytes, 0);
    fattn_cache_clear();
    cr_assert_eq(fattn_memory_alive(), 0);

    options.entries = -1;
    ANSWERS(fattn_cache_set_options(&options), FATTN_INVALID_ARGUMENT);
    REASON_HAS("-1");
    options.entries = 4097;
    ANSWERS(fattn_cache_set_options(&options), FATTN_INVALID_ARGUMENT);
    options.entries = 1;
    options.bytes = -1;
    ANSWERS(fattn_cache_set_options(&options), FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_cache_set_options(NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_cache_get_info(NULL), FATTN_NULL_POINTER);
    info.struct_size = 1;
    ANSWERS(fattn_cache_get_info(&info), FATTN_INVALID_STRUCT);
    ANSWERS(fattn_cache_set_options(&(fattn_cache_options){.struct_size = 1}),
            FATTN_INVALID_STRUCT);
}

/* Processor time of a call that finds its plan among so many, used in turn; the least of a few. */
static double seconds_among(int problems)
{
    double least = INFINITY;
    for (int pass = 0; pass <= 5 + 256 / problems; pass++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
        attend_scaled(0, problems);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        const double seconds =
            (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
        least = fmin(least, seconds / problems);
    }
    return least;
}

Test(one_shot, finds_a_plan_among_thousands)
{
    set_environment("FATTN_BACKEND", "cpu");
    enum { FEW = 16, ALL = 4096, LEFT = 100 };
    fattn_cache_options options;
    fattn_cache_info info = {.struct_size = sizeof info};
    fattn_cache_options_init(&options);
    options.entries = ALL;
    ANSWERS(fattn_cache_set_options(&options), FATTN_OK);
    const double few = seconds_among(FEW), many = seconds_among(ALL);
    cr_assert_lt(many, 10 * few, "%g us among %d plans, %g among %d", 1e6 * many, ALL, 1e6 * few,
                 FEW);
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.misses, ALL);
    cr_assert_eq(info.entries, ALL);
    const int64_t each = info.bytes / ALL;

    options.entries = LEFT;
    ANSWERS(fattn_cache_set_options(&options), FATTN_OK);
    attend_scaled(ALL - LEFT, ALL);
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.misses, ALL);
    cr_assert_eq(info.evictions, ALL - LEFT);
    cr_assert_eq(info.entries, LEFT);
    cr_assert_eq(info.bytes, LEFT * each);
    fattn_cache_clear();
    cr_assert_eq(fattn_memory_alive(), 0);
}

static void *attend_often(void *argument)
{
    const fattn_buffers *const b = argument;
    for (int i = 0; i < 300; i++) {
        fattn_problem p = small();
        p.seqlen_q = 1 + i % 3;
        p.features = i % 40 < 20 ? 0 : FATTN_SCALE;
        p.scale = i % 40 < 20 ? 0 : i % 40;
        if (fattn_attention(NULL, &p, b, NULL) != FATTN_OK) {
            return argument;
        }
        if (i % 97 == 0) {
            fattn_cache_clear();
        }
    }
    return NULL;
}

Test(one_shot, from_many_threads)
{
    set_environment("FATTN_BACKEND", "cpu");
    static _Alignas(256) float outputs[8][256];
    fattn_buffers b[8];
    pthread_t threads[8];
    for (int t = 0; t < 8; t++) {
        b[t] = small_buffers();
        b[t].o = outputs[t];
        pthread_create(&threads[t], NULL, attend_often, &b[t]);
    }
    for (int t = 0; t < 8; t++) {
        void *failed = NULL;
        pthread_join(threads[t], &failed);
        cr_assert_null(failed);
        cr_assert(memcmp(outputs[t], outputs[0], sizeof outputs[0]) == 0);
    }
    fattn_cache_clear();
    cr_assert_eq(fattn_memory_alive(), 0);
}

/* --- Staging: backend reference behind memory of its own -------------------------------------- */

/* Allocations of the remote device; it cannot read any other memory. */
static struct {
    char *first;
    size_t bytes;
} remote[64];
static int remote_fails_at; /* the n-th allocation from now fails */

static bool remote_reads(void *impl, const void *pointer)
{
    (void)impl;
    for (int i = 0; i < 64; i++) {
        if (remote[i].first && (const char *)pointer >= remote[i].first &&
            (const char *)pointer < remote[i].first + remote[i].bytes) {
            return true;
        }
    }
    return false;
}

static fattn_status remote_alloc(void *impl, size_t bytes, void **memory)
{
    if (remote_fails_at > 0 && --remote_fails_at == 0) {
        *memory = NULL;
        return FATTN_OUT_OF_MEMORY;
    }
    const fattn_status status = fattn_host_alloc(impl, bytes, memory);
    for (int i = 0; !status && i < 64; i++) {
        if (!remote[i].first) {
            remote[i].first = *memory;
            remote[i].bytes = bytes;
            return status;
        }
    }
    return status;
}

static bool remote_works; /* what was queued uses memory until somebody waits */
static bool remote_early; /* memory was freed before */

static fattn_status remote_free(void *impl, void *memory)
{
    remote_early = remote_early || remote_works;
    for (int i = 0; i < 64; i++) {
        if (remote[i].first == memory) {
            remote[i].first = NULL;
        }
    }
    return fattn_host_free(impl, memory);
}

static bool remote_breaks; /* queued work fails */

static fattn_status remote_synchronize(void *impl, fattn_stream stream)
{
    remote_works = false;
    if (remote_breaks) {
        return fattn_fail(FATTN_DEVICE_ERROR, "the remote device broke");
    }
    return fattn_host_stream_synchronize(impl, stream);
}

static fattn_status remote_wait(void *impl, void *event)
{
    remote_works = false;
    return fattn_host_event_synchronize(impl, event);
}

static const fattn_backend *reference;
static bool remote_run_fails; /* after it has queued something */

static fattn_status remote_run(const fattn_plan *plan, const fattn_buffers *buffers,
                               void *workspace, fattn_stream stream)
{
    remote_works = true;
    return remote_run_fails ? fattn_fail(FATTN_DEVICE_ERROR, "the second launch failed")
                            : reference->run(plan, buffers, workspace, stream);
}

static fattn_status remote_rows(void *impl, const fattn_rows_args *args, fattn_stream stream)
{
    remote_works = true;
    return reference->rows(impl, args, stream);
}

static fattn_backend remote_backend;

static fattn_device *open_remote(void)
{
    fattn_device *const device = open_device("reference");
    reference = device->backend;
    remote_backend = *reference;
    remote_backend.host_memory = false;
    remote_backend.run = remote_run;
    remote_backend.rows = remote_rows;
    remote_backend.event_synchronize = remote_wait;
    remote_backend.reads = remote_reads;
    remote_backend.alloc = remote_alloc;
    remote_backend.free = remote_free;
    remote_backend.stream_synchronize = remote_synchronize;
    device->backend = &remote_backend;
    return device;
}

Test(staging, host_memory_on_a_device_of_its_own)
{
    fattn_device *const device = open_remote();
    const fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OK);
    cr_assert(written());
    float expected[256];
    memcpy(expected, arrays[3], sizeof expected);

    /* q, k, v and o as slices of one array, which is one range to copy. */
    static _Alignas(256) float packed[2 * 4 * 4 * 8];
    fattn_problem s = p;
    fattn_buffers sb = b;
    s.layout = FATTN_STRIDED;
    s.q = s.k = s.v = s.o = (fattn_strides){128, 32, 8};
    for (int i = 0; i < 256; i++) {
        packed[i] = -7;
    }
    for (int batch = 0; batch < 2; batch++) {
        for (int i = 0; i < 4 * 8; i++) {
            float *const row = packed + batch * 128 + i / 8 * 32 + i % 8;
            row[0] = i < 24 ? arrays[0][batch * 24 + i] : -7;
            row[8] = arrays[1][batch * 32 + i];
            row[16] = arrays[2][batch * 32 + i];
        }
    }
    sb.q = packed, sb.k = packed + 8, sb.v = packed + 16, sb.o = packed + 24;
    ANSWERS(fattn_attention(device, &s, &sb, NULL), FATTN_OK);
    for (int batch = 0; batch < 2; batch++) {
        for (int i = 0; i < 4 * 8; i++) {
            const float got = packed[batch * 128 + i / 8 * 32 + 24 + i % 8];
            cr_assert_eq(got, i < 24 ? expected[batch * 24 + i] : -7);
        }
    }

    /* What is read lies behind o, so that one range has both, and o still comes back. */
    static float joined[2 * 3 * 8 + 1];
    fattn_problem j = p;
    fattn_buffers jb = b;
    j.features |= FATTN_ALIBI;
    joined[0] = NAN;
    jb.o = joined, jb.alibi_slopes = joined + 2 * 3 * 8;
    ANSWERS(fattn_attention(device, &j, &jb, NULL), FATTN_OK);
    cr_assert_eq(joined[0], expected[0]); /* the slope is 0 */

    for (int n = 1; n <= 4; n++) { /* the device runs out of memory half-way */
        arrays[3][0] = NAN;
        remote_fails_at = n;
        ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OUT_OF_MEMORY);
        cr_assert(isnan(arrays[3][0]));
    }
    remote_fails_at = 0;
    remote_breaks = true;
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_DEVICE_ERROR);
    REASON_HAS("broke");
    remote_breaks = false;
    remote_run_fails = true;
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_DEVICE_ERROR);
    REASON_HAS("the second launch");
    remote_run_fails = false;
    cr_assert_not(remote_early);

    fattn_cache_clear(); /* a plan knows from the beginning whether its runs are logged */
    set_environment("FATTN_VERBOSE", "3");
    fattn_set_log_callback(keep_log, arrays);
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OK);
    cr_assert_not_null(strstr(logged, "tensor o f32: 48 elements, 0 NaN"), "%s", logged);
    set_environment("FATTN_VERBOSE", NULL);
    fattn_cache_clear();
    fattn_device_close(device);
    cr_assert_eq(fattn_memory_alive(), 0);
}

static fattn_status carry_none(void *user, const fattn_message *messages, int count)
{
    (void)user, (void)messages, (void)count;
    return FATTN_OK;
}

static fattn_status await_none(void *user, const fattn_message *messages, int count, double seconds)
{
    (void)seconds;
    return carry_none(user, messages, count);
}

static void give_up_none(void *user, const char *reason) { (void)user, (void)reason; }

/* A group of one rank. Its memory is not freed while an execution may be at work that has returned,
 * failed or not. */
Test(staging, memory_of_a_group_outlasts_its_work)
{
    const fattn_problem p = small();
    fattn_buffers b = small_buffers();
    fattn_transport one;
    fattn_group group;
    fattn_transport_init(&one);
    one.ranks = 1, one.device_memory = 1;
    one.start = carry_none, one.wait = await_none, one.abort = give_up_none;
    fattn_group_init(&group);
    group.transport = &one;
    group.device = open_remote();
    for (int fails = 0; fails < 2; fails++) {
        fattn_group_plan *plan = NULL;
        ANSWERS(fattn_group_plan_create(&group, &p, NULL, NULL, &plan), FATTN_OK);
        remote_run_fails = fails;
        ANSWERS(fattn_group_execute(plan, &b), fails ? FATTN_DEVICE_ERROR : FATTN_OK);
        cr_assert(remote_works);
        fattn_group_plan_destroy(plan);
        cr_assert_not(remote_early);
    }
    fattn_device_close(group.device);
    cr_assert_eq(fattn_memory_alive(), 0);
}

/* --- Messages that quote others --------------------------------------------------------------- */

static void count_strangers(void *user, const char *line)
{
    int *const told = user;
    told[0] += strstr(line, "FATTN_NUM_THREAD") != NULL && strstr(line, "FATTN_BAKEND") != NULL;
    told[1] += strstr(line, "FATTN_TILE") != NULL || strstr(line, "MY_FATTN") != NULL;
    for (const char *c = line; *c; c++) {
        told[2] += *c < ' ' || *c > '~';
    }
}

Test(env, misspelt_names_are_told_once)
{
    int told[3] = {0};
    fattn_device *device = NULL;
    fattn_set_log_callback(count_strangers, told);
    setenv("FATTN_NUM_THREAD", "4", 1);
    setenv("FATTN_BAKEND\033", "cpu", 1);
    setenv("MY_FATTN_THING", "1", 1);
    set_environment("FATTN_TILE", "64,64");
    ANSWERS(fattn_device_open("reference", &device), FATTN_OK);
    fattn_device_close(device);
    cr_assert_eq(told[0], 0, "not at FATTN_VERBOSE 0");
    set_environment("FATTN_VERBOSE", "1");
    for (int n = 0; n < 3; n++) {
        ANSWERS(fattn_device_open("reference", &device), FATTN_OK);
        fattn_device_close(device);
    }
    cr_assert(told[0] == 1 && told[1] == 0 && told[2] == 0, "told %d times, %d known, %d controls",
              told[0], told[1], told[2]);
    unsetenv("FATTN_NUM_THREAD");
    unsetenv("FATTN_BAKEND\033");
    set_environment("FATTN_VERBOSE", NULL);
    fattn_set_log_callback(NULL, NULL);
}

Test(status, reasons_are_printable)
{
    fattn_device *device = NULL;
    ANSWERS(fattn_device_open("cp\033[2Ju\n\x9b\x7f", &device), FATTN_UNKNOWN_DEVICE);
    REASON_HAS("cp?[2Ju???");
    for (const char *c = fattn_last_reason(); *c; c++) {
        cr_assert(*c >= ' ' && *c <= '~');
    }
}

/* --- Allocators of the caller's --------------------------------------------------------------- */

static int64_t hooks_made, hooks_freed; /* calls of the caller's functions */
static int hooks_user;                  /* the pointer they receive */
static bool hooks_wrong;
static size_t hooks_shift; /* offset from the promised alignment */
static int64_t hooks_left; /* calls until memory runs out; 0: never */

static void *hook_host(void *user, size_t bytes)
{
    hooks_wrong = hooks_wrong || user != &hooks_user || bytes == 0;
    __atomic_fetch_add(&hooks_made, 1, __ATOMIC_RELAXED);
    return malloc(bytes);
}

static void hook_host_free(void *user, void *memory)
{
    hooks_wrong = hooks_wrong || user != &hooks_user || !memory;
    __atomic_fetch_add(&hooks_freed, 1, __ATOMIC_RELAXED);
    free(memory);
}

static void *hook_device(void *user, size_t bytes, fattn_stream stream)
{
    hooks_wrong = hooks_wrong || user != &hooks_user || stream;
    if (hooks_left && --hooks_left == 0) {
        return NULL;
    }
    hooks_made++;
    char *const memory = aligned_alloc(256, (bytes + 511) / 256 * 256);
    return memory + hooks_shift;
}

static void hook_device_free(void *user, void *memory)
{
    hooks_wrong = hooks_wrong || user != &hooks_user;
    hooks_freed++;
    free((char *)memory - hooks_shift);
}

static fattn_device_options hooked_options(void)
{
    fattn_device_options options;
    fattn_device_options_init(&options);
    options.allocate = hook_device, options.release = hook_device_free;
    options.allocator_user = &hooks_user;
    return options;
}

Test(allocators, of_the_host)
{
    fattn_host_allocator allocator = {.struct_size = sizeof allocator,
                                      .allocate = hook_host,
                                      .release = hook_host_free,
                                      .user = &hooks_user};
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_OK);
    const fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    fattn_device *const device = open_device("cpu");
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OK);
    cr_assert_gt(hooks_made, 3);
    ANSWERS(fattn_set_host_allocator(NULL), FATTN_INVALID_ARGUMENT);
    REASON_HAS("in use");
    fattn_cache_clear();
    fattn_device_close(device);
    cr_assert_eq(hooks_freed, hooks_made);
    cr_assert_not(hooks_wrong);
    ANSWERS(fattn_set_host_allocator(NULL), FATTN_OK);
    const int64_t made = hooks_made;
    fattn_device_close(open_device("cpu"));
    cr_assert_eq(hooks_made, made);
    allocator.release = NULL;
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_NULL_POINTER);
    REASON_HAS("release");
    allocator.allocate = NULL;
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_NULL_POINTER);
    allocator.struct_size = 3;
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_INVALID_STRUCT);
}

/* What fattn_attention() keeps goes with its device, and other devices keep theirs. */
Test(allocators, of_a_device_that_is_closed)
{
    fattn_device_options options = hooked_options();
    const fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    fattn_cache_info info;
    fattn_cache_info_init(&info);
    fattn_device *closed = NULL, *const other = open_device("cpu");
    ANSWERS(fattn_device_open_with("cpu", &options, &closed), FATTN_OK);
    ANSWERS(fattn_attention(other, &p, &b, NULL), FATTN_OK);
    ANSWERS(fattn_attention(closed, &p, &b, NULL), FATTN_OK);
    cr_assert_eq(hooks_made, 1);
    fattn_device_close(closed);
    cr_assert_eq(hooks_freed, 1);
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.entries, 1);
    fattn_device_close(other);
    cr_assert_eq(fattn_memory_alive(), 0);
}

Test(allocators, of_a_device)
{
    fattn_device_options options = hooked_options();
    const fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    void *memory = NULL;
    ANSWERS(fattn_device_open_with("cpu", &options, &device), FATTN_OK);
    ANSWERS(fattn_device_malloc(device, 100, &memory), FATTN_OK);
    cr_assert_eq(hooks_made, 1);
    ANSWERS(fattn_device_free(device, memory), FATTN_OK);
    cr_assert_eq(hooks_freed, 1);
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OK);
    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
    cr_assert_eq(hooks_made, 2);
    cr_assert_eq(hooks_freed, 2);
    for (int i = 0; i < 3; i++) { /* one workspace */
        ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OK);
    }
    cr_assert_eq(hooks_made, 3);
    fattn_cache_clear();
    cr_assert_eq(hooks_freed, 3);
    hooks_left = 1;
    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OUT_OF_MEMORY);
    REASON_HAS("the device's allocate() gave NULL for ");
    hooks_left = 1;
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OUT_OF_MEMORY);
    hooks_shift = 64;
    ANSWERS(fattn_device_malloc(device, 100, &memory), FATTN_MISALIGNED);
    cr_assert_null(memory);
    cr_assert_eq(hooks_freed, hooks_made);
    cr_assert_not(hooks_wrong);
    hooks_shift = 0;
    fattn_plan_destroy(plan);
    fattn_device_close(device);
    fattn_cache_clear();
    cr_assert_eq(fattn_memory_alive(), 0);
    options.release = NULL;
    ANSWERS(fattn_device_open_with("cpu", &options, &device), FATTN_INVALID_ARGUMENT);
    REASON_HAS("release");
    options.allocate = NULL;
    ANSWERS(fattn_device_open_with("cpu", &options, &device), FATTN_INVALID_ARGUMENT);
    REASON_HAS("allocator_user");
}

/* --- Merge and dropout ------------------------------------------------------------------------ */

static fattn_merge_args merge_args(void)
{
    static float lse[3][4];
    fattn_merge_args a = {.struct_size = sizeof a, .batch = 1, .heads = 2, .seqlen = 2, .dim_v = 8};
    (void)small_buffers();
    for (int i = 0; i < 4; i++) {
        lse[0][i] = (float)i;
        lse[1][i] = i == 2 ? -INFINITY : 1;
    }
    a.o1 = arrays[0], a.o2 = arrays[1], a.o = arrays[3];
    a.lse1 = lse[0], a.lse2 = lse[1], a.lse = lse[2];
    a.o1_stride = a.o2_stride = a.o_stride = (fattn_strides){32, 16, 8};
    return a;
}

Test(merge, refusals)
{
    fattn_device *const device = open_device("reference");
    fattn_merge_args a = merge_args();
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OK);
    cr_assert_eq(arrays[3][8], arrays[0][8]); /* head 1, row 0: lse2 is -inf, o1 alone counts */
    ANSWERS(fattn_merge(device, NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_merge(device, &a, arrays), FATTN_INVALID_ARGUMENT);
    a.batch = -1;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_INVALID_SHAPE);
    a = merge_args(), a.dim_v = 0;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_INVALID_SHAPE);
    a = merge_args(), a.o2 = NULL;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_NULL_POINTER);
    a = merge_args(), a.lse1 = NULL;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_NULL_POINTER);
    a = merge_args(), a.o1 = (const float *)((const char *)a.o1 + 2);
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_MISALIGNED);
    a = merge_args(), a.o = arrays[0] + 8;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("o overlaps o1: o and lse may only be o1 and lse1 themselves");
    a = merge_args(), a.o = arrays[1] + 8;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    a = merge_args(), a.lse = (float *)a.lse2 + 1;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("lse overlaps lse2");
    a = merge_args(), a.o_stride.seq = 4;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("o overlaps itself");
    a = merge_args(), a.lse = arrays[3];
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("o overlaps lse");
    a = merge_args(), a.o1_stride.head = -8;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_INVALID_STRIDE);
    REASON_HAS("o1_stride.head is -8, negative");
    a = merge_args(), a.o1_stride.head = a.o1_stride.batch = INT64_MAX / 9, a.batch = 100;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERFLOW);
    a = merge_args(), a.heads = a.seqlen = 2147483647, a.batch = 0;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERFLOW);
    a = merge_args(), a.o = arrays[0], a.lse = (float *)a.lse1; /* in place */
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OK);
    fattn_device_close(device);
}

Test(dropout_mask, refusals)
{
    fattn_device *const device = open_device("reference");
    uint8_t keep[64];
    const fattn_dropout_args sound = {.struct_size = sizeof sound,
                                      .batch = 1,
                                      .heads = 2,
                                      .seqlen_q = 4,
                                      .seqlen_k = 8,
                                      .p = 0.5,
                                      .keep = keep};
    fattn_dropout_args a = sound;
    ANSWERS(fattn_dropout_mask(device, &a, NULL), FATTN_OK);
    ANSWERS(fattn_dropout_mask(device, NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_dropout_mask(device, &a, keep), FATTN_INVALID_ARGUMENT);
    a.keep = NULL;
    ANSWERS(fattn_dropout_mask(device, &a, NULL), FATTN_NULL_POINTER);
    a = sound, a.p = NAN;
    ANSWERS(fattn_dropout_mask(device, &a, NULL), FATTN_INVALID_ARGUMENT);
    a = sound, a.seqlen_q = -1;
    ANSWERS(fattn_dropout_mask(device, &a, NULL), FATTN_INVALID_SHAPE);
    a = sound, a.q_offset = INT64_C(1) << 33;
    ANSWERS(fattn_dropout_mask(device, &a, NULL), FATTN_INVALID_SHAPE);
    a = sound, a.heads = a.seqlen_q = a.seqlen_k = 2147483647;
    ANSWERS(fattn_dropout_mask(device, &a, NULL), FATTN_OVERFLOW);
    fattn_device_close(device);
}

/* Asks each kernel row whether it pays, and how many rows share a key head. */
Test(plan, no_heads_are_a_plan_of_each_type)
{
    static const fattn_dtype types[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    fattn_device *device = NULL;
    cr_assert_eq(fattn_device_open("cpu", &device), FATTN_OK);
    for (int n = 0; n < 6; n++) {
        const fattn_buffers b = small_buffers();
        fattn_problem p = small();
        fattn_plan *plan = NULL;
        p.heads_q = p.heads_k = 0;
        p.dtype = types[n / 2];
        p.features |= n % 2 ? FATTN_BATCH_INVARIANT : 0;
        ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OK);
        ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
        fattn_plan_destroy(plan);
    }
    fattn_device_close(device);
}

/* Packed rows take little memory, yet batch x heads x queries may be any number; sanitizers detect
 * overflows. */
Test(plan, more_work_than_63_bits)
{
    fattn_device *device = NULL;
    cr_assert_eq(fattn_device_open("cpu", &device), FATTN_OK);
    const int64_t sizes[] = {1, 1 << 10, 1 << 20, 2147483647};
    int refused = 0;
    for (int n = 0; n < 4 * 4 * 4 * 2; n++) {
        fattn_problem p;
        fattn_problem_init(&p);
        p.op = n % 2 ? FATTN_BACKWARD : FATTN_FORWARD;
        p.dtype = FATTN_BF16;
        p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.total_q = p.total_k = 100;
        p.dim = p.dim_v = 64;
        p.batch = sizes[n / 2 % 4], p.heads_q = p.heads_k = sizes[n / 8 % 4];
        p.seqlen_q = p.seqlen_k = sizes[n / 32];
        const fattn_status status = fattn_support(device, &p);
        cr_assert(status == FATTN_OK || status == FATTN_OVERFLOW, "%s", fattn_last_reason());
        refused += status != FATTN_OK;
    }
    cr_assert(refused > 0 && refused < 128);
    fattn_device_close(device);
}

/* --- Allocation failure ----------------------------------------------------------------------- */

static fattn_status everything(void)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_event *event = NULL;
    void *memory = NULL;
    fattn_problem p = small();
    const fattn_buffers b = small_buffers();
    fattn_status status = fattn_device_open("cpu", &device);
    status = status ? status : fattn_device_malloc(device, 100, &memory);
    status = status ? status : fattn_event_create(device, &event);
    status = status ? status : fattn_plan_create(device, &p, &plan);
    status = status ? status : fattn_execute(plan, &b, NULL, NULL);
    status = status ? status : fattn_attention(device, &p, &b, NULL);
    fattn_event_destroy(event);
    if (device) {
        fattn_device_free(device, memory);
    }
    fattn_plan_destroy(plan);
    fattn_device_close(device);
    fattn_cache_clear();
    return status;
}

Test(memory, the_nth_allocation_fails_and_nothing_leaks)
{
    cr_assert_eq(everything(), FATTN_OK, "%s", fattn_last_reason());
    cr_assert_eq(fattn_memory_alive(), 0);
    int64_t n = 1;
    for (; n < 1000; n++) {
        fattn_memory_fail_at(n);
        const fattn_status status = everything();
        const int failed = fattn_memory_fail_at(0);
        cr_assert_eq(fattn_memory_alive(), 0, "allocation %lld leaks", (long long)n);
        if (!failed) {
            cr_assert_eq(status, FATTN_OK);
            break;
        }
        cr_assert_eq(status, FATTN_OUT_OF_MEMORY, "allocation %lld: %s", (long long)n,
                     fattn_status_string(status));
        REASON_HAS("no memory");
    }
    cr_assert(n > 5 && n < 1000);
}

Test(memory, absurd_sizes)
{
    cr_assert_null(fattn_memory_alloc_aligned(SIZE_MAX));
    void *const none = fattn_memory_alloc(0);
    cr_assert_not_null(none);
    fattn_memory_free(none);
    fattn_memory_free(NULL);
    fattn_memory_free_aligned(NULL);
}
