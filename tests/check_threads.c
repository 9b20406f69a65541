/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bits of a result do not depend on the number of threads: random problems on every row of
 * backend cpu with 1, 2, 3, 4 and 7 threads, forward and backward, with every tile of the row and
 * with the splits and outputs of the case. The program also checks that this many threads exist and
 * that each of them uses CPU time.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/env.h"
#include "core/memory.h"
#include "core/plan.h"
#include "tests/attend.h"
#include "tests/row.h"
#include "tests/tap.h"
#include "tools/judge/random_case.h"

static const int thread_counts[] = {1, 2, 3, 4, 7};
enum { COUNTS = sizeof thread_counts / sizeof thread_counts[0], SEED = 20 };
static fattn_device *devices[COUNTS];
static long extra; /* threads of the process that are not ours: sanitizers have some */

/* Copies of all images of a case, for one run to write into. */
typedef struct world {
    unsigned char *images[DRAW_IDS];
    fattn_buffers buffers;
} world;

static void world_make(world *w, const draw_case *c)
{
    w->buffers = c->buffers;
    for (int n = 0; n < c->image_count; n++) {
        const size_t size = (size_t)c->images[n].size;
        w->images[n] = fattn_memory_alloc_aligned(size);
        if (!w->images[n]) {
            tap_bail("out of memory");
        }
        memcpy(w->images[n], c->images[n].bytes, size);
    }
    for (int id = 0; id < DRAW_IDS; id++) {
        const draw_tensor *const t = &c->tensors[id];
        if (t->present) {
            draw_point(&w->buffers, (draw_id)id, w->images[t->image] + t->offset);
        }
    }
}

static void world_free(world *w, const draw_case *c)
{
    for (int n = 0; n < c->image_count; n++) {
        fattn_memory_free_aligned(w->images[n]);
    }
}

static bool world_equals(const world *a, const world *b, const draw_case *c)
{
    bool equal = true;
    for (int n = 0; n < c->image_count; n++) {
        equal = equal && memcmp(a->images[n], b->images[n], (size_t)c->images[n].size) == 0;
    }
    return equal;
}

/* Uses all threads of the device, however small the case. */
static fattn_status run(const draw_case *c, int n, const char *kernel, fattn_wish wish, world *w)
{
    fattn_plan *plan = NULL;
    wish.workers = thread_counts[n];
    fattn_status status = fattn_plan_create_with(devices[n], &c->problem, kernel, &wish, &plan);
    world_make(w, c);
    status = status ? status : fattn_execute(plan, &w->buffers, NULL, NULL);
    fattn_plan_destroy(plan);
    return status;
}

/* Runs the case with this tile if the row takes it. Returns whether all thread counts gave the same
 * bytes. */
static bool same_bits(const draw_case *c, const char *kernel, const fattn_wish *wish,
                      int64_t *compared)
{
    world first, other;
    const bool taken = run(c, 0, kernel, *wish, &first) == FATTN_OK;
    bool same = true;
    for (int n = 1; taken && n < COUNTS; n++) {
        const fattn_status status = run(c, n, kernel, *wish, &other);
        same = same && status == FATTN_OK && world_equals(&first, &other, c);
        world_free(&other, c);
        ++*compared;
    }
    world_free(&first, c);
    return same;
}

static void check_row(const fattn_kernel *row, int64_t cases)
{
    int64_t compared = 0, different = 0;
    cases *= row->caches_alone ? 20 : 1; /* it takes one draw of many */
    for (int64_t index = 0; index < cases; index++) {
        draw_case c;
        if (draw_problem(&c, SEED, index) || draw_build(&c) || draw_save(&c)) {
            tap_bail("out of memory");
        }
        for (const fattn_tile *tile = row->tiles; tile->br; tile++) {
            const fattn_wish wish = {.tile = *tile, .splits = c.splits};
            if (!same_bits(&c, row->name, &wish, &compared)) {
                printf("# %s, case %d of seed %d, tile %d,%d\n", row->name, (int)index, SEED,
                       (int)tile->br, (int)tile->bc);
                different++;
            }
        }
        draw_free(&c);
    }
    tap_check(different == 0 && compared > 0,
              "%s: the same bits with 1, 2, 3, 4 and 7 threads in %d runs", row->name,
              (int)compared);
}

/* --- How many there are ----------------------------------------------------------------------- */

enum {
    WORK = 10000000,
    PATIENCE = 1000
}; /* CPU time required of each thread (ns), and most runs to reach it */

/* A device with n threads, by environment or options, gets a problem large enough for all. */
static void check_count(int n, bool by_environment)
{
    fattn_device_options options;
    fattn_device *device = NULL;
    attend a;
    char text[16];
    int busy = 0;
    bool told = true;
    fattn_device_options_init(&options);
    options.threads = by_environment ? n + 1 : n; /* which the environment overrides */
    snprintf(text, sizeof text, "%d", n);
    if (by_environment) {
        setenv("FATTN_NUM_THREADS", text, 1);
    }
    fattn_env_reload();
    attend_make(&a, FATTN_BACKWARD, 16, 256, 256, 64);
    bool right = fattn_device_open_with("cpu", &options, &device) == FATTN_OK;
    unsetenv("FATTN_NUM_THREADS");
    fattn_env_reload();
    fattn_device_info info = {.struct_size = sizeof info};
    right = right && fattn_device_get_info(device, &info) == FATTN_OK && info.units == n;
    for (int runs = 0; right && busy < n && told && runs < PATIENCE; runs++) {
        right = attend_with(&a, device) != 0;
        busy = process_busy(WORK);
        told = process_busy(0) > 0;
    }
    const char *const by = by_environment ? "FATTN_NUM_THREADS" : "an option";
    tap_check(right && info.units == n, "%d threads by %s", n, by);
    tap_check(process_threads_are(n + extra), "%d threads by %s in the process", n, by);
    if (told) {
        tap_check(busy == n, "%d threads by %s: %d at work", n, by, busy);
    } else {
        tap_skip("threads at work", "the system does not say how long a thread has run");
    }
    fattn_cache_clear();
    fattn_device_close(device);
    attend_free(&a);
}

int main(int argc, char **argv)
{
    const int64_t cases = argc > 1 ? atoll(argv[1]) : 100;
    extra = process_extra();
    for (int n = 0; n < COUNTS; n++) {
        check_count(thread_counts[n], n % 2 == 0);
    }
    for (int n = 0; n < COUNTS; n++) {
        fattn_device_options options;
        fattn_device_options_init(&options);
        options.threads = thread_counts[n];
        if (fattn_device_open_with("cpu", &options, &devices[n])) {
            return 1;
        }
    }
    const fattn_kernel *row;
    for (int at = 0; (row = row_next(devices[0], &at));) {
        check_row(row, cases);
    }
    for (int n = 0; n < COUNTS; n++) {
        fattn_device_close(devices[n]);
    }
    return tap_done();
}
