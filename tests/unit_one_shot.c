/* SPDX-License-Identifier: Apache-2.0 */
/* fattn_attention(), and the plans that its cache keeps. */
#define _POSIX_C_SOURCE 200809L

#include <criterion/criterion.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "core/memory.h"
#include "tests/environment.h"
#include "tests/unit_small.h"

Test(one_shot, plans_once_and_runs)
{
    set_environment("FATTN_BACKEND", "reference");
    const fattn_problem p = small_problem();
    fattn_buffers b = small_buffers();
    ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_OK);
    cr_assert(small_written());
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
    b.q = small_arrays[0] + 1; /* aligned only to a float, which is all that the call requires */
    ANSWERS(fattn_attention(NULL, &p, &b, NULL), FATTN_OK);
    b.q = (char *)small_arrays[0] + 1;
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
        fattn_problem p = small_problem();
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
        fattn_problem p = small_problem();
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
