/* SPDX-License-Identifier: Apache-2.0 */
/* Allocators of the caller's, and what happens when memory runs out. */

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/memory.h"
#include "core/plan.h"
#include "tests/unit_small.h"

static int64_t hooks_made, hooks_freed; /* calls of the caller's functions */
static int hooks_user;                  /* the pointer they receive */
static bool hooks_wrong;
static size_t hooks_shift; /* offset from the promised alignment */
static int64_t hooks_left; /* calls until memory runs out; 0: never */
static bool hooks_starve;  /* the host has no memory */

static void *hook_host(void *user, size_t bytes)
{
    hooks_wrong = hooks_wrong || user != &hooks_user || bytes == 0;
    if (hooks_starve) {
        return NULL;
    }
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

static fattn_host_allocator hooked_allocator(void)
{
    return (fattn_host_allocator){.struct_size = sizeof(fattn_host_allocator),
                                  .allocate = hook_host,
                                  .release = hook_host_free,
                                  .user = &hooks_user};
}

Test(allocators, of_the_host)
{
    fattn_host_allocator allocator = hooked_allocator();
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_OK);
    const fattn_problem p = small_problem();
    const fattn_buffers b = small_buffers();
    fattn_device *const device = unit_device("cpu");
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
    fattn_device_close(unit_device("cpu"));
    cr_assert_eq(hooks_made, made);
    allocator.release = NULL;
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_NULL_POINTER);
    REASON_HAS("release");
    allocator.allocate = NULL;
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_NULL_POINTER);
    allocator.struct_size = 3;
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_INVALID_STRUCT);
}

Test(allocators, reasons_name_the_bytes)
{
    const fattn_host_allocator allocator = hooked_allocator();
    ANSWERS(fattn_set_host_allocator(&allocator), FATTN_OK);
    const fattn_problem p = small_problem();
    const fattn_buffers b = small_buffers();
    fattn_device *const device = unit_device("cpu"), *const oracle = unit_device("reference");
    fattn_plan *plan = NULL;
    fattn_inspect_args args;
    fattn_inspect_args_init(&args);
    float scores[2 * 3 * 4];
    args.to = scores;
    hooks_starve = true;
    ANSWERS(fattn_inspect(device, &p, &b, &args), FATTN_OUT_OF_MEMORY);
    REASON_HAS(" bytes of ");
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_OUT_OF_MEMORY);
    REASON_HAS(" bytes of ");
    hooks_starve = false;
    ANSWERS(fattn_plan_create(oracle, &p, &plan), FATTN_OK);
    hooks_starve = true;
    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OUT_OF_MEMORY);
    REASON_HAS(" bytes of ");
    fattn_plan_destroy(plan);
    fattn_device_close(device);
    fattn_device_close(oracle);
    cr_assert_eq(hooks_freed, hooks_made);
}

/* What fattn_attention() keeps goes with its device, and other devices keep theirs. */
Test(allocators, of_a_device_that_is_closed)
{
    fattn_device_options options = hooked_options();
    const fattn_problem p = small_problem();
    const fattn_buffers b = small_buffers();
    fattn_cache_info info;
    fattn_cache_info_init(&info);
    fattn_device *closed = NULL, *const other = unit_device("cpu");
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
    const fattn_problem p = small_problem();
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

static fattn_status everything(void)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_event *event = NULL;
    void *memory = NULL;
    fattn_problem p = small_problem();
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
