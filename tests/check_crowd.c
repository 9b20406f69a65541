/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many callers: concurrently, one after another, and alternating between problems of different
 * widths. The process keeps the same few threads, and its memory does not grow.
 *
 * usage: check_crowd [TURNS]
 */
#define _DEFAULT_SOURCE /* usleep */

#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "core/plan.h"
#include "tests/attend.h"
#include "tests/tap.h"

enum { THREADS = 8, CALLERS = 8, VISITORS = 400 };

/* Allowed growth of the process's memory in KiB: thread heaps come and go. */
enum { SLACK = 4096 };

static uint64_t expected;
static long extra; /* threads of the process that are not ours: sanitizers have some */

static void make_problem(attend *a) { attend_make(a, FATTN_BACKWARD, 16, 120, 120, 32); }

/* --- At a time -------------------------------------------------------------------------------- */

static atomic_int calling, wrong;

static void *call_often(void *turns)
{
    attend a;
    make_problem(&a);
    for (int n = 0; n < *(const int *)turns; n++) {
        atomic_fetch_add(&wrong, attend_with(&a, NULL) != expected);
    }
    attend_free(&a);
    atomic_fetch_sub(&calling, 1);
    return NULL;
}

static void check_callers(int turns)
{
    pthread_t callers[CALLERS];
    int started = 0;
    long most = 0;
    atomic_store(&calling, CALLERS);
    for (; started < CALLERS; started++) {
        if (pthread_create(&callers[started], NULL, call_often, &turns) != 0) {
            tap_bail("no thread");
        }
    }
    while (atomic_load(&calling) > 0) {
        const long threads = process_status("Threads") - extra;
        most = threads > most ? threads : most;
        usleep(500);
    }
    for (int n = 0; n < started; n++) {
        pthread_join(callers[n], NULL);
    }
    tap_check(atomic_load(&wrong) == 0, "%d callers at a time: %d wrong results", CALLERS,
              atomic_load(&wrong));
    /* This thread, the callers, and the workers of one pool. */
    tap_check(most <= 1 + CALLERS + THREADS - 1, "%d callers with %d threads: at most %ld threads",
              CALLERS, THREADS, most);
}

/* --- One after another ------------------------------------------------------------------------ */

static void *call_once(void *a)
{
    atomic_fetch_add(&wrong, attend_with(a, NULL) != expected);
    return NULL;
}

static void check_visitors(void)
{
    attend a;
    long memory = 0, tasks = 0;
    make_problem(&a);
    for (int n = 0; n < VISITORS; n++) {
        pthread_t visitor;
        if (n == VISITORS / 10 && process_threads_are(THREADS + extra)) {
            memory = process_status("VmRSS");
            tasks = process_tasks();
        }
        if (pthread_create(&visitor, NULL, call_once, &a) != 0) {
            tap_bail("no thread");
        }
        pthread_join(visitor, NULL);
    }
    memory = process_status("VmRSS") - memory;
    tap_check(atomic_load(&wrong) == 0, "%d threads, one after another", VISITORS);
    tap_check(process_threads_are(THREADS + extra) && process_tasks() == tasks,
              "the threads of the process are the same");
    tap_check(memory < SLACK, "its memory grows by %ld KiB", memory);
    attend_free(&a);
}

/* --- Widths ----------------------------------------------------------------------------------- */

/* Problems of 8 and of 2 items, on as many threads. */
static void check_widths(int turns)
{
    attend wide, narrow;
    attend *const both[] = {&wide, &narrow};
    fattn_device *device = NULL;
    fattn_plan *plans[2] = {NULL, NULL};
    void *workspaces[2] = {NULL, NULL};
    const int widths[2] = {8, 2};
    attend_make(&wide, FATTN_FORWARD, 8, 20, 20, 16);
    attend_make(&narrow, FATTN_FORWARD, 2, 20, 20, 16);
    bool right = fattn_device_open("cpu", &device) == FATTN_OK;
    for (int i = 0; right && i < 2; i++) {
        const fattn_wish wish = {.workers = widths[i]};
        right =
            fattn_plan_create_with(device, &both[i]->problem, NULL, &wish, &plans[i]) == FATTN_OK &&
            fattn_device_malloc(device, (size_t)plans[i]->tiling.workspace, &workspaces[i]) ==
                FATTN_OK;
    }
    long memory = 0, tasks = 0;
    for (int n = 0; right && n < turns; n++) {
        right =
            fattn_execute(plans[n % 2], &both[n % 2]->buffers, workspaces[n % 2], NULL) == FATTN_OK;
        if (n == turns / 10) {
            memory = process_status("VmRSS");
            tasks = process_tasks();
        }
    }
    memory = process_status("VmRSS") - memory;
    tap_check(right, "%d turns of %d threads and %d", turns, widths[0], widths[1]);
    tap_check(process_tasks() == tasks, "the threads of the process are the same");
    tap_check(memory < SLACK, "its memory grows by %ld KiB", memory);
    for (int i = 0; i < 2; i++) {
        fattn_device_free(device, workspaces[i]);
        fattn_plan_destroy(plans[i]);
        attend_free(both[i]);
    }
    fattn_device_close(device);
}

int main(int argc, char **argv)
{
    const int turns = argc > 1 ? atoi(argv[1]) : 100000;
    attend a;
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); /* two huge pages would be as much as SLACK */
    extra = process_extra();
    setenv("FATTN_BACKEND", "cpu", 1);
    setenv("FATTN_NUM_THREADS", "8", 1);
    make_problem(&a);
    expected = attend_with(&a, NULL);
    attend_free(&a);
    check_callers(turns < 4000 ? 2 : turns / 2000);
    check_visitors();
    check_widths(turns);
    fattn_cache_clear();
    return tap_done();
}
