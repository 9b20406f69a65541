/* SPDX-License-Identifier: Apache-2.0 */
/* What plans, devices, events and the cache report is true: numbers that nothing else in the
 * library depends on, so that an error would go unnoticed. */
#define _POSIX_C_SOURCE 200809L

#include <criterion/criterion.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/backend.h"
#include "core/cache.h"
#include "core/hash.h"
#include "core/plan.h"
#include "tests/environment.h"
#include "tests/unit_small.h"

/* Distinct lengths and dimensions. */
static fattn_problem sample(void)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.batch = 2;
    p.heads_q = 6;
    p.heads_k = 3;
    p.seqlen_q = 40;
    p.seqlen_k = 700;
    p.dim = 24;
    p.dim_v = 16;
    return p;
}

static fattn_plan_info info_of(fattn_device *device, const fattn_problem *p, fattn_plan **plan)
{
    fattn_plan_info info = {.struct_size = sizeof info};
    ANSWERS(fattn_plan_create(device, p, plan), FATTN_OK);
    ANSWERS(fattn_plan_get_info(*plan, &info), FATTN_OK);
    return info;
}

static bool is_near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

/* --- Plans ------------------------------------------------------------------------------------ */

Test(info, numbers_of_a_plan)
{
    fattn_device *const device = unit_device("cpu");
    fattn_problem p = sample();
    fattn_plan *plan = NULL;
    p.features = FATTN_DROPOUT;
    p.dropout_p = 0.1;
    const fattn_plan_info info = info_of(device, &p, &plan);
    const fattn_tiling *const t = &plan->tiling;
    const double heads = 2 * 6, pairs = heads * 40 * 700, kv = 2 * 3;

    cr_assert_str_eq(info.kernel, plan->kernel->name);
    cr_assert_eq(info.br, t->br);
    cr_assert_eq(info.bc, t->bc);
    cr_assert_eq(info.splits, t->splits);
    cr_assert_eq(info.work_items, t->items);
    cr_assert_eq(info.workspace_bytes, t->workspace);
    /* Two products, with a multiplication and an addition per pair and channel. */
    cr_assert(is_near(info.flops, 2 * pairs * (24 + 16)), "%g", info.flops);
    /* A tenth is rounded to 6554 of 65536. */
    cr_assert(is_near(info.effective_dropout, 6554.0 / 65536), "%g", info.effective_dropout);
    const double once = 4 * (heads * 40 * (24 + 16) + kv * 700 * (24 + 16));
    cr_assert(is_near(info.lower_bound_bytes, once), "%g and %g", info.lower_bound_bytes, once);
    /* Scores and probabilities are written and read, and so is the matrix after dropout. */
    cr_assert_geq(info.standard_bytes, once + 4 * 4 * pairs);
    cr_assert_leq(info.standard_bytes, once + 9 * 4 * pairs + 8 * once);
    fattn_plan_destroy(plan);

    /* Without dropout there is no such matrix. If one block holds all rows of a head, and one tile
     * all its keys, each is read once per query head. */
    p.features = 0, p.dropout_p = 0;
    p.heads_k = p.heads_q, p.seqlen_q = 8, p.seqlen_k = 8;
    const fattn_plan_info small = info_of(device, &p, &plan);
    cr_assert_eq(small.effective_dropout, 0);
    cr_assert(is_near(small.predicted_bytes, small.lower_bound_bytes), "%g and %g",
              small.predicted_bytes, small.lower_bound_bytes);
    cr_assert(is_near(small.lower_bound_bytes, 4 * 12 * 8 * (2 * 24 + 2 * 16)));
    fattn_plan_destroy(plan);
    fattn_device_close(device);
}

/* Where rows begin is known when a plan runs. It is made for the last one at the last key, as it is
 * while tokens are generated into a cache: otherwise one thread would be thought enough. */
Test(info, positions_are_taken_to_end_with_the_keys)
{
    fattn_device *const device = unit_device("cpu");
    fattn_problem p = sample();
    fattn_plan *plan = NULL;
    p.features = FATTN_POSITIONS | FATTN_WINDOW;
    p.anchor = FATTN_TOP_LEFT;
    p.window_right = 0;
    p.seqlen_q = 1;
    const fattn_plan_info info = info_of(device, &p, &plan);
    cr_assert(is_near(info.flops, 2.0 * 2 * 6 * 700 * (24 + 16)), "%g", info.flops);
    fattn_plan_destroy(plan);
    fattn_device_close(device);
}

/* The number after these words. */
static double number_after(const char *text, const char *words)
{
    const char *const at = strstr(text, words);
    cr_assert_not_null(at, "no \"%s\" in:\n%s", words, text);
    return strtod(at + strlen(words), NULL);
}

Test(info, words_of_a_plan)
{
    fattn_device *const device = unit_device("cpu");
    fattn_problem p = sample();
    fattn_plan *plan = NULL;
    p.features = FATTN_DROPOUT | FATTN_CAUSAL;
    p.dropout_p = 0.25;
    const fattn_plan_info info = info_of(device, &p, &plan);
    const fattn_tiling *const t = &plan->tiling;
    char text[8192], expected[256];
    cr_assert_lt(fattn_plan_describe(plan, text, sizeof text), sizeof text);
    const struct {
        const char *words;
        double value;
    } numbers[] = {
        {"problem    B ", 2},
        {", Hq ", 6},
        {", Hk ", 3},
        {", Sq ", 40},
        {", Sk ", 700},
        {", D ", 24},
        {", Dv ", 16},
        {"tile       ", (double)t->br},
        {" queries x ", (double)t->bc},
        {" keys: ", (double)t->q_blocks},
        {"work       ", (double)t->items},
        {" items, keys in ", (double)t->splits},
        {"workspace  ", (double)t->workspace},
        {"dropout    ", 0.25},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const double got = number_after(text, numbers[i].words);
        cr_assert_eq(got, numbers[i].value, "%s%g is %g in:\n%s", numbers[i].words,
                     numbers[i].value, got, text);
    }
    cr_assert_neq(t->q_blocks, t->k_blocks, "the case says nothing");
    snprintf(expected, sizeof expected, "keys: %lld x %lld blocks a head", (long long)t->q_blocks,
             (long long)t->k_blocks);
    cr_assert_not_null(strstr(text, expected), "%s in:\n%s", expected, text);
    snprintf(expected, sizeof expected,
             "traffic    %.4g bytes; standard attention %.4g, lower bound %.4g\n",
             info.predicted_bytes, info.standard_bytes, info.lower_bound_bytes);
    cr_assert_not_null(strstr(text, expected), "%s in:\n%s", expected, text);
    snprintf(expected, sizeof expected, "arithmetic %.4g flops", info.flops);
    cr_assert_not_null(strstr(text, expected), "%s in:\n%s", expected, text);
    cr_assert_not_null(strstr(text, "features   causal dropout(0.25)\n"), "in:\n%s", text);
    fattn_plan_destroy(plan);

    p.seqlen_q = 0; /* a batch without queries is still the caller's batch */
    info_of(device, &p, &plan);
    fattn_plan_describe(plan, text, sizeof text);
    cr_assert_eq(number_after(text, "problem    B "), 2, "in:\n%s", text);
    cr_assert_eq(number_after(text, ", Sk "), 700, "in:\n%s", text);
    fattn_plan_destroy(plan);
    fattn_device_close(device);
}

Test(info, the_environment_decides_tiles_and_splits)
{
    fattn_device *const device = unit_device("cpu");
    fattn_problem p = sample();
    fattn_plan *plan = NULL;
    p.seqlen_q = 3000; /* large enough that more memory gives larger tiles */
    set_environment("FATTN_SRAM", "16777216");
    const fattn_plan_info large = info_of(device, &p, &plan);
    fattn_plan_destroy(plan);
    set_environment("FATTN_SRAM", "32768");
    const fattn_plan_info small = info_of(device, &p, &plan);
    fattn_plan_destroy(plan);
    cr_assert_lt(small.br * small.bc, large.br * large.bc, "%lldx%lld, %lldx%lld",
                 (long long)small.br, (long long)small.bc, (long long)large.br,
                 (long long)large.bc);

    set_environment("FATTN_SPLITS", "3");
    p.seqlen_q = 4;
    p.seqlen_k = 8192;
    const fattn_plan_info split = info_of(device, &p, &plan);
    cr_assert_eq(split.splits, 3);
    fattn_plan_destroy(plan);
    p.features |= FATTN_BATCH_INVARIANT;
    ANSWERS(fattn_plan_create(device, &p, &plan), FATTN_UNSUPPORTED);
    const char *const reason = fattn_last_reason();
    cr_assert(strstr(reason, "into 3 parts, as FATTN_SPLITS demands") &&
                  strstr(reason, "FATTN_BATCH_INVARIANT"),
              "%s", reason);
    set_environment("FATTN_SPLITS", "1");
    cr_assert_eq(info_of(device, &p, &plan).splits, 1);
    fattn_plan_destroy(plan);
    fattn_device_close(device);
}

/* --- Devices and events ----------------------------------------------------------------------- */

Test(info, numbers_of_a_device)
{
    set_environment("FATTN_NUM_THREADS", "3");
    fattn_device *const device = unit_device("cpu");
    fattn_device_info info = {.struct_size = sizeof info};
    fattn_limits limits;
    ANSWERS(fattn_device_get_info(device, &info), FATTN_OK);
    device->backend->limits(device->impl, &limits);
    cr_assert_str_eq(info.backend, "cpu");
    cr_assert_eq(info.units, 3);
    cr_assert_eq(info.host_memory, 1);
    cr_assert_eq(info.ordinal, 0);
    cr_assert_eq(info.fast_memory, limits.fast_memory);
    const double pages = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    cr_assert(is_near((double)info.total_memory, pages), "%lld bytes",
              (long long)info.total_memory);
    fattn_device_close(device);
}

/* A clock that is right by a factor of 1000, even across the end of a second. */
Test(info, events_measure_milliseconds)
{
    fattn_device *const device = unit_device("cpu");
    fattn_event *start = NULL, *stop = NULL;
    ANSWERS(fattn_event_create(device, &start), FATTN_OK);
    ANSWERS(fattn_event_create(device, &stop), FATTN_OK);
    for (int i = 0; i < 2; i++) {
        struct timespec begin, end;
        const struct timespec pause = {i, i ? 50 * 1000 * 1000 : 40 * 1000 * 1000};
        double ms = 0;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        ANSWERS(fattn_event_record(start, NULL), FATTN_OK);
        nanosleep(&pause, NULL);
        ANSWERS(fattn_event_record(stop, NULL), FATTN_OK);
        clock_gettime(CLOCK_MONOTONIC, &end);
        const double most = 1e3 * (double)(end.tv_sec - begin.tv_sec) +
                            1e-6 * (double)(end.tv_nsec - begin.tv_nsec);
        ANSWERS(fattn_event_elapsed(start, stop, &ms), FATTN_OK);
        cr_assert(ms >= (i ? 1050 : 40) && ms <= most, "%g ms of %g", ms, most);
    }
    fattn_event_destroy(start);
    fattn_event_destroy(stop);
    fattn_device_close(device);
}

/* --- The cache -------------------------------------------------------------------------------- */

enum { ROWS = 3, KEYS = 4, DIM = 8 };
static _Alignas(256) float q[ROWS * DIM], k[KEYS * DIM], v[KEYS * DIM], o[ROWS * DIM];

static fattn_buffers tensors(void)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    for (int i = 0; i < KEYS * DIM; i++) {
        q[i % (ROWS * DIM)] = sinf((float)i);
        k[i] = cosf((float)(3 * i));
        v[i] = (float)i;
    }
    b.q = q, b.k = k, b.v = v, b.o = o;
    return b;
}

/* o of the problem through the cache; false if it differs from a plan of its own. */
static bool attend(fattn_device *device, const fattn_problem *p)
{
    const fattn_buffers b = tensors();
    float cached[ROWS * DIM];
    fattn_plan *plan = NULL;
    ANSWERS(fattn_attention(device, p, &b, NULL), FATTN_OK);
    memcpy(cached, o, sizeof cached);
    ANSWERS(fattn_plan_create(device, p, &plan), FATTN_OK);
    ANSWERS(fattn_execute(plan, &b, NULL, NULL), FATTN_OK);
    fattn_plan_destroy(plan);
    return memcmp(cached, o, sizeof cached) == 0;
}

static uint64_t word_of(double x)
{
    uint64_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

/* As the cache computes it: were it another hash, the problems below would not collide. */
static uint64_t hash_in_cache(fattn_device *device, const fattn_problem *p)
{
    fattn_loan loan;
    ANSWERS(fattn_cache_borrow(device, p, NULL, &loan), FATTN_OK);
    const uint64_t hash = loan.hash;
    ANSWERS(fattn_cache_return(&loan, NULL, FATTN_OK), FATTN_OK);
    return hash;
}

/* Two problems with one hash. The words of scale and softcap follow each other, so for another
 * scale some word gives the same hash; one in a few of these is a valid softcap. */
Test(cache, one_hash_is_not_one_problem)
{
    set_environment("FATTN_BACKEND", "cpu");
    fattn_device *const device = unit_device("cpu");
    fattn_problem one;
    fattn_problem_init(&one);
    one.seqlen_q = ROWS, one.seqlen_k = KEYS, one.dim = one.dim_v = DIM;
    one.features = FATTN_SCALE | FATTN_SOFTCAP;
    one.scale = 0.5, one.softcap = 2;
    _Static_assert(offsetof(fattn_problem, softcap) ==
                       offsetof(fattn_problem, scale) + sizeof(double),
                   "neighbours");
    uint64_t hash = FATTN_HASH_BEGIN ^ (uint64_t)(uintptr_t)device;
    for (size_t at = 0; at < offsetof(fattn_problem, scale); at += sizeof hash) {
        uint64_t word;
        memcpy(&word, (const char *)&one + at, sizeof word);
        hash = fattn_hash_step(hash, word);
    }
    const uint64_t wanted = fattn_hash_step(hash, word_of(one.scale)) ^ word_of(one.softcap);
    int tried = 0;
    for (int i = 1; tried < 8; i++) {
        fattn_problem other = one;
        other.scale = 1.0 / (1 + i);
        const uint64_t word = wanted ^ fattn_hash_step(hash, word_of(other.scale));
        memcpy(&other.softcap, &word, sizeof word);
        if (other.softcap >= 1e-3 && other.softcap < 1e30) {
            tried++;
            cr_assert_eq(hash_in_cache(device, &one), hash_in_cache(device, &other));
            cr_assert(attend(device, &one));
            cr_assert(attend(device, &other), "scale %g, softcap %g", other.scale, other.softcap);
        }
        cr_assert_lt(i, 100000);
    }
    fattn_cache_clear();
    fattn_device_close(device);
}

Test(cache, what_is_there_is_used_again)
{
    fattn_device *const device = unit_device("cpu"), *const other = unit_device("reference");
    fattn_cache_info info = {.struct_size = sizeof info};
    const fattn_buffers b = tensors();
    fattn_problem p;
    fattn_problem_init(&p);
    p.seqlen_q = ROWS, p.seqlen_k = KEYS, p.dim = p.dim_v = DIM;
    for (int i = 0; i < 10; i++) {
        ANSWERS(fattn_attention(device, &p, &b, NULL), FATTN_OK);
    }
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.misses, 1);
    cr_assert_eq(info.hits, 9);
    cr_assert_eq(info.entries, 1);
    cr_assert_leq(info.allocations, 1);

    ANSWERS(fattn_attention(other, &p, &b, NULL), FATTN_OK); /* of another device it is another */
    ANSWERS(fattn_cache_get_info(&info), FATTN_OK);
    cr_assert_eq(info.misses, 2);
    cr_assert_eq(info.entries, 2);
    fattn_cache_clear();
    fattn_device_close(device);
    fattn_device_close(other);
}
