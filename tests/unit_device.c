/* SPDX-License-Identifier: Apache-2.0 */
/* Devices: opening, memory, streams and events, the default one, merging, dropout masks. */
#define _POSIX_C_SOURCE 200809L

#include <criterion/criterion.h>
#include <string.h>

#include "core/backend.h"
#include "core/memory.h"
#include "core/plan.h"
#include "tests/environment.h"
#include "tests/unit_small.h"

Test(device, specs)
{
    fattn_device *device = (fattn_device *)small_arrays;
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
    fattn_device *const opened = unit_device(NULL);
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
    ANSWERS(fattn_device_open("nonsense", &device), FATTN_UNKNOWN_DEVICE);
    const fattn_status status = fattn_device_open("auto", &device);
    cr_assert_eq(status, FATTN_OK);
    REASON_HAS("nonsense"); /* what goes well leaves the reason alone */
    cr_assert_str_neq(device->backend->name, "reference");
    fattn_device_close(device);
}

Test(device, memory_streams_and_events)
{
    fattn_device *const device = unit_device("reference");
    void *memory = small_arrays;
    ANSWERS(fattn_device_malloc(device, 0, &memory), FATTN_OK);
    cr_assert_null(memory);
    ANSWERS(fattn_device_malloc(device, 1000, &memory), FATTN_OK);
    cr_assert_eq((uintptr_t)memory % 256, 0);
    ANSWERS(fattn_device_free(device, memory), FATTN_OK);
    ANSWERS(fattn_device_malloc(device, SIZE_MAX, &memory), FATTN_OVERFLOW);
    ANSWERS(fattn_device_malloc(device, (size_t)INT64_MAX, &memory), FATTN_OUT_OF_MEMORY);
    ANSWERS(fattn_device_malloc(device, 8, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_device_malloc(device, 1000, &memory), FATTN_OK);
    ANSWERS(fattn_device_copy(device, memory, small_arrays, 1000, NULL), FATTN_OK);
    cr_assert(memcmp(memory, small_arrays, 1000) == 0);
    ANSWERS(fattn_device_copy(device, NULL, small_arrays, 1000, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_device_copy(device, memory, NULL, 1000, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_device_copy(device, NULL, NULL, 0, NULL), FATTN_OK);
    ANSWERS(fattn_device_copy(device, memory, small_arrays, 8, small_arrays),
            FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_device_free(device, memory), FATTN_OK);
    ANSWERS(fattn_device_free(device, NULL), FATTN_OK);

    fattn_stream stream = small_arrays;
    ANSWERS(fattn_stream_create(device, &stream), FATTN_OK);
    cr_assert_null(stream);
    ANSWERS(fattn_stream_synchronize(device, stream), FATTN_OK);
    ANSWERS(fattn_stream_synchronize(device, small_arrays), FATTN_INVALID_ARGUMENT);
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
    ANSWERS(fattn_event_record(stop, small_arrays), FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_event_record(stop, NULL), FATTN_OK);
    ANSWERS(fattn_event_elapsed(start, stop, &ms), FATTN_OK);
    cr_assert(ms >= 0 && ms < 10000);
    ANSWERS(fattn_event_elapsed(start, NULL, &ms), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_wait(stop, NULL), FATTN_OK);
    ANSWERS(fattn_event_wait(stop, small_arrays), FATTN_INVALID_ARGUMENT);
    ANSWERS(fattn_event_wait(NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_synchronize(stop), FATTN_OK);
    ANSWERS(fattn_event_synchronize(NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_record(NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_event_create(device, NULL), FATTN_NULL_POINTER);
    fattn_device *const other = unit_device("reference");
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

/* In every function that takes a device, NULL is the one of FATTN_BACKEND, opened once. */
Test(device, null_is_the_default_one)
{
    set_environment("FATTN_BACKEND", "reference");
    const fattn_problem p = small_problem();
    const fattn_buffers b = small_buffers();
    static uint8_t keep[32];
    fattn_plan *plan = NULL;
    fattn_event *event = NULL;
    fattn_stream stream = small_arrays;
    void *memory = NULL;
    fattn_device_info info;
    fattn_device_info_init(&info);
    ANSWERS(fattn_device_get_info(NULL, &info), FATTN_OK);
    cr_assert_str_eq(info.backend, "reference");
    ANSWERS(fattn_device_malloc(NULL, 64, &memory), FATTN_OK);
    ANSWERS(fattn_device_copy(NULL, memory, small_arrays, 64, NULL), FATTN_OK);
    cr_assert(memcmp(memory, small_arrays, 64) == 0);
    ANSWERS(fattn_device_free(NULL, memory), FATTN_OK);
    ANSWERS(fattn_stream_create(NULL, &stream), FATTN_OK);
    ANSWERS(fattn_stream_synchronize(NULL, stream), FATTN_OK);
    ANSWERS(fattn_stream_destroy(NULL, stream), FATTN_OK);
    ANSWERS(fattn_event_create(NULL, &event), FATTN_OK);
    ANSWERS(fattn_support(NULL, &p), FATTN_OK);
    ANSWERS(fattn_plan_create(NULL, &p, &plan), FATTN_OK);
    cr_assert_eq(plan->device, event->device, "it is opened once");
    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
    cr_assert(small_written());
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
    plan = (fattn_plan *)small_arrays, event = (fattn_event *)small_arrays,
    stream = memory = small_arrays;
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

static fattn_merge_args merge_args(void)
{
    static float lse[3][4];
    fattn_merge_args a = {.struct_size = sizeof a, .batch = 1, .heads = 2, .seqlen = 2, .dim_v = 8};
    (void)small_buffers();
    for (int i = 0; i < 4; i++) {
        lse[0][i] = (float)i;
        lse[1][i] = i == 2 ? -INFINITY : 1;
    }
    a.o1 = small_arrays[0], a.o2 = small_arrays[1], a.o = small_arrays[3];
    a.lse1 = lse[0], a.lse2 = lse[1], a.lse = lse[2];
    a.o1_stride = a.o2_stride = a.o_stride = (fattn_strides){32, 16, 8};
    return a;
}

Test(merge, refusals)
{
    fattn_device *const device = unit_device("reference");
    fattn_merge_args a = merge_args();
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OK);
    cr_assert_eq(small_arrays[3][8],
                 small_arrays[0][8]); /* head 1, row 0: lse2 is -inf, o1 alone counts */
    ANSWERS(fattn_merge(device, NULL, NULL), FATTN_NULL_POINTER);
    ANSWERS(fattn_merge(device, &a, small_arrays), FATTN_INVALID_ARGUMENT);
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
    a = merge_args(), a.o = small_arrays[0] + 8;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("o overlaps o1: o and lse may only be exactly o1 and lse1");
    a = merge_args(), a.o = small_arrays[1] + 8;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    a = merge_args(), a.lse = (float *)a.lse2 + 1;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("lse overlaps lse2");
    a = merge_args(), a.o_stride.seq = 4;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("o overlaps itself");
    a = merge_args(), a.lse = small_arrays[3];
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERLAP);
    REASON_HAS("o overlaps lse");
    a = merge_args(), a.o1_stride.head = -8;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_INVALID_STRIDE);
    REASON_HAS("o1_stride.head is -8, negative");
    a = merge_args(), a.o1_stride.head = a.o1_stride.batch = INT64_MAX / 9, a.batch = 100;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERFLOW);
    a = merge_args(), a.heads = a.seqlen = 2147483647, a.batch = 0;
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OVERFLOW);
    a = merge_args(), a.o = small_arrays[0], a.lse = (float *)a.lse1; /* in place */
    ANSWERS(fattn_merge(device, &a, NULL), FATTN_OK);
    fattn_device_close(device);
}

Test(dropout_mask, refusals)
{
    fattn_device *const device = unit_device("reference");
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
