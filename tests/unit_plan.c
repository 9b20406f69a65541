/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: which row takes a problem, what is refused and what is said. */
#define _POSIX_C_SOURCE 200809L

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/memory.h"
#include "core/plan.h"
#include "tests/environment.h"
#include "tests/unit_small.h"

/* Decoding pays for 16 rows only with many keys, for fewer rows always. */
Test(plan, rows_that_pay)
{
    fattn_device *const device = unit_device("cpu");
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

/* With 16 lanes, 9 to 16 rows are decoded where forward would copy the keys: not a short causal
 * prompt, but one whose rows all attend to the same keys, and one with many keys before it. */
Test(plan, short_prompts_are_not_decoded)
{
    fattn_device *const device = unit_device("cpu");
    const struct {
        int64_t rows, keys;
        uint64_t features;
        bool pays;
    } cases[] = {
        {16, 16, FATTN_CAUSAL, false}, {12, 12, FATTN_CAUSAL, false}, {16, 16, 0, true},
        {16, 128, FATTN_CAUSAL, true}, {12, 64, FATTN_CAUSAL, true},  {8, 8, FATTN_CAUSAL, true}};
    const fattn_kernel *row = NULL;
    const char *missing = NULL;
    for (int i = 0; (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        const bool wide = strcmp(row->name, "avx512_decode") == 0;
        for (size_t n = 0; n < sizeof cases / sizeof cases[0] && wide; n++) {
            const fattn_limits limits = {.units = 1, .parallelism = 2};
            fattn_problem given, p;
            fattn_problem_init(&given);
            given.dtype = FATTN_F16;
            given.features = cases[n].features;
            given.heads_q = given.heads_k = 32;
            given.seqlen_q = cases[n].rows, given.seqlen_k = cases[n].keys;
            given.dim = given.dim_v = 64;
            ANSWERS(fattn_problem_normalise(&given, &p), FATTN_OK);
            cr_assert(row->pays(row, &p, &limits) == cases[n].pays, "case %d", (int)n);
        }
    }
    fattn_device_close(device);
}

/* For 9 to 16 rows of bf16, products of pairs pay with many keys unless decoding, whose parts are
 * smaller, would occupy many more cores. */
Test(plan, rows_of_pairs_that_pay)
{
    fattn_device *const device = unit_device("cpu");
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
    fattn_device *const device = unit_device("reference");
    const fattn_problem p = small_problem();
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
    cr_assert(small_written());
    ANSWERS(fattn_execute(NULL, &b, NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_execute(plan, NULL, NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_execute(plan, &b, (char *)small_arrays + 8, NULL), FATTN_MISALIGNED);
    ANSWERS(fattn_execute(plan, &b, NULL, small_arrays), FATTN_INVALID_ARGUMENT);
    fattn_plan_destroy(plan);
    fattn_plan_destroy(NULL);
    cr_assert_eq(fattn_memory_alive(), 0);
}

Test(plan, refusals)
{
    fattn_device *const device = unit_device("reference");
    fattn_problem p = small_problem();
    fattn_plan *plan = (fattn_plan *)small_arrays;
    ANSWERS(fattn_plan_create(device, &p, NULL), FATTN_NULL_POINTER);
    p.heads_q = -1;
    ANSWERS(fattn_support(device, &p), FATTN_INVALID_SHAPE);
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_INVALID_SHAPE);
    cr_assert_null(plan);
    p = small_problem();
    ANSWERS(fattn_plan_create_with(device, &p, "nonsense", NULL, &plan), FATTN_INVALID_ARGUMENT);
    REASON_HAS("nonsense");
    const fattn_wish splits = {.splits = 4};
    ANSWERS(fattn_plan_create_with(device, &p, NULL, &splits, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("FATTN_SPLITS");
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
    fattn_device *const cpu = unit_device("cpu"), *const reference = unit_device("reference");
    fattn_problem p = small_problem();
    fattn_plan *plan = NULL;
    p.dtype = FATTN_F64;
    ANSWERS(fattn_support(cpu, &p), FATTN_UNSUPPORTED);
    REASON_HAS("scalar_forward takes no f64; row naive of backend reference takes it, slowly");
    p = small_problem();
    p.op = FATTN_BACKWARD;
    ANSWERS(fattn_plan_create_with(cpu, &p, "scalar_forward", NULL, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("scalar_forward computes no backward; row scalar_backward takes it");

    p.dtype = FATTN_F64;
    ANSWERS(fattn_plan_create_with(cpu, &p, "scalar_backward", NULL, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("takes no f64; row naive of backend reference takes it");
    p = small_problem();
    const fattn_wish splits = {.splits = 4};
    ANSWERS(fattn_plan_create_with(reference, &p, NULL, &splits, &plan), FATTN_UNSUPPORTED);
    cr_assert_null(strstr(fattn_last_reason(), "takes it"), "%s", fattn_last_reason());
    fattn_device_close(reference);
    fattn_device_close(cpu);
}

Test(plan, verbose_says_what_and_why)
{
    set_environment("FATTN_VERBOSE", "3");
    fattn_set_log_callback(small_log, small_arrays);
    const fattn_problem p = small_problem();
    const fattn_buffers b = small_buffers();
    small_arrays[1][3] = NAN;
    small_arrays[2][3] = INFINITY;
    fattn_device *const cpu = unit_device("cpu");
    ANSWERS(fattn_attention(cpu, &p, &b, NULL), FATTN_OK);
    cr_assert_not_null(strstr(small_logged, "plan forward f32"), "%s", small_logged);
    cr_assert_not_null(strstr(small_logged, "tensor k f32: 64 elements, 1 NaN, 0 Inf"), "%s",
                       small_logged);
    cr_assert_not_null(strstr(small_logged, "tensor v f32: 64 elements, 0 NaN, 1 Inf"), "%s",
                       small_logged);
    fattn_problem f64 = p;
    fattn_plan *plan = NULL;
    f64.dtype = FATTN_F64;
    ANSWERS(fattn_plan_create(cpu, &f64, &plan), FATTN_UNSUPPORTED);
    REASON_HAS("f64");
    cr_assert_not_null(strstr(small_logged, "declines: it takes no f64"), "%s", small_logged);
    fattn_set_log_callback(NULL, NULL);
    fattn_cache_clear();
    fattn_device_close(cpu);
}

/* A tensor in the caller's workspace is refused, at either end of it. */
Test(plan, keeps_tensors_out_of_the_workspace)
{
    fattn_device *const device = unit_device("cpu");
    const fattn_problem p = small_problem();
    fattn_buffers b = small_buffers();
    fattn_plan *plan = NULL;
    fattn_plan_info info;
    fattn_plan_info_init(&info);
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OK);
    ANSWERS(fattn_plan_get_info(plan, &info), FATTN_OK);
    const size_t bytes = (size_t)info.workspace_bytes, last = (bytes - 1) / 256 * 256;
    cr_assert_gt(bytes, 0);
    char *const memory = aligned_alloc(256, last + 256 + sizeof small_arrays[0]);
    b.q = memcpy(memory, small_arrays[0], sizeof small_arrays[0]);
    ANSWERS(fattn_execute(plan, &b, memory, NULL), FATTN_OVERLAP);
    REASON_HAS("q overlaps the workspace");
    b.q = small_arrays[0];
    b.o = memory + last;
    ANSWERS(fattn_execute(plan, &b, memory, NULL), FATTN_OVERLAP);
    REASON_HAS("o overlaps the workspace");
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
        fattn_device *const device = unit_device(backends[n / 8]);
        fattn_problem p = small_problem();
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

/* Asks each kernel row whether it pays, and how many rows share a key head. */
Test(plan, no_heads_are_a_plan_of_each_type)
{
    static const fattn_dtype types[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    fattn_device *device = NULL;
    cr_assert_eq(fattn_device_open("cpu", &device), FATTN_OK);
    for (int n = 0; n < 6; n++) {
        const fattn_buffers b = small_buffers();
        fattn_problem p = small_problem();
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
