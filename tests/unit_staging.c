/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of operands to a device with memory of its own: backend reference behind one. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/host.h"
#include "core/memory.h"
#include "core/plan.h"
#include "core/status.h"
#include "fattn/distributed.h"
#include "tests/environment.h"
#include "tests/unit_small.h"

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
static bool remote_run_fails;   /* after it has queued something */
static float *remote_meanwhile; /* what another thread writes during a run */

static fattn_status remote_run(const fattn_plan *plan, const fattn_buffers *buffers,
                               void *workspace, fattn_stream stream)
{
    remote_works = true;
    if (remote_meanwhile) {
        *remote_meanwhile = 5;
    }
    return remote_run_fails ? fattn_fail(FATTN_DEVICE_ERROR, "the second launch failed")
                            : reference->run(plan, buffers, workspace, stream);
}

static fattn_status remote_rows(void *impl, const fattn_rows_args *jobs, int count,
                                fattn_stream stream)
{
    remote_works = true;
    return reference->rows(impl, jobs, count, stream);
}

static fattn_backend remote_backend;

static fattn_device *open_remote(void)
{
    fattn_device *const device = unit_device("reference");
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
    const fattn_problem p = small_problem();
    const fattn_buffers b = small_buffers();
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OK);
    cr_assert(small_written());
    float expected[256];
    memcpy(expected, small_arrays[3], sizeof expected);

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
            row[0] = i < 24 ? small_arrays[0][batch * 24 + i] : -7;
            row[8] = small_arrays[1][batch * 32 + i];
            row[16] = small_arrays[2][batch * 32 + i];
        }
    }
    sb.q = packed, sb.k = packed + 8, sb.v = packed + 16, sb.o = packed + 24;
    remote_meanwhile = packed + 128; /* q, between rows of o */
    ANSWERS(fattn_attention(device, &s, &sb, NULL), FATTN_OK);
    remote_meanwhile = NULL;
    cr_assert_eq(packed[128], 5);
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
        small_arrays[3][0] = NAN;
        remote_fails_at = n;
        ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OUT_OF_MEMORY);
        cr_assert(isnan(small_arrays[3][0]));
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
    fattn_set_log_callback(small_log, small_arrays);
    ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OK);
    cr_assert_not_null(strstr(small_logged, "tensor o f32: 48 elements, 0 NaN"), "%s",
                       small_logged);
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
    const fattn_problem p = small_problem();
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
