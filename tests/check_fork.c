/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Children of a process that uses the library can use it too: after their parent has computed,
 * while another of its threads computes, and in nested forks. They give the parent's results and
 * create threads of their own.
 *
 *     check_fork [CHILDREN]
 */
#define _DEFAULT_SOURCE /* usleep */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/attend.h"
#include "tests/tap.h"

enum { THREADS = 4, PATIENCE = 60 /* seconds */ };

static int children = 40;

typedef int (*child_work)(attend *a, uint64_t expected);

/* Whether a child finished in time with the right result. A child that hangs is killed. */
static bool child_succeeds(child_work work, attend *a, uint64_t expected)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        _exit(work(a, expected));
    }
    int status = 0;
    for (int tenths = 0; child > 0 && tenths < PATIENCE * 10000; tenths++) {
        if (waitpid(child, &status, WNOHANG) == child) {
            return WIFEXITED(status) && WEXITSTATUS(status) == 0;
        }
        usleep(100);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return false;
}

static int attend_once(attend *a, uint64_t expected) { return attend_with(a, NULL) != expected; }

/* Closes everything and opens it again. */
static int attend_afresh(attend *a, uint64_t expected)
{
    const bool right = attend_with(a, NULL) == expected;
    fattn_cache_clear();
    return !right || attend_with(a, NULL) != expected;
}

static int make_threads(attend *a, uint64_t expected)
{
    const bool alone = process_threads_are(1);
    const bool right = attend_with(a, NULL) == expected;
    return !alone || !right || !process_threads_are(THREADS);
}

static int fork_again(attend *a, uint64_t expected)
{
    return attend_with(a, NULL) != expected || !child_succeeds(attend_once, a, expected);
}

static atomic_bool stop;

static void *attend_on(void *user)
{
    attend a;
    (void)user;
    attend_make(&a, FATTN_FORWARD, 8, 200, 200, 32);
    while (!atomic_load(&stop)) {
        (void)attend_with(&a, NULL);
    }
    attend_free(&a);
    return NULL;
}

static bool all_succeed(child_work work, attend *a, uint64_t expected)
{
    for (int n = 0; n < children; n++) {
        if (!child_succeeds(work, a, expected)) {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv)
{
    attend a;
    children = argc > 1 ? atoi(argv[1]) : children;
    setenv("FATTN_BACKEND", "cpu", 1);
    setenv("FATTN_NUM_THREADS", "4", 1);
    attend_make(&a, FATTN_BACKWARD, 8, 200, 200, 32);
    const uint64_t expected = attend_with(&a, NULL);

    tap_check(expected && child_succeeds(attend_once, &a, expected),
              "a child computes after its parent has");
    tap_check(child_succeeds(attend_afresh, &a, expected), "a child gives devices back");
    tap_check(child_succeeds(make_threads, &a, expected), "a child has %d threads of its own",
              THREADS);
    tap_check(child_succeeds(fork_again, &a, expected), "a child of a child computes");

    pthread_t other;
    const bool started = pthread_create(&other, NULL, attend_on, NULL) == 0;
    tap_check(started && all_succeed(attend_once, &a, expected),
              "%d children compute while another thread of their parent does", children);
    tap_check(started && all_succeed(attend_afresh, &a, expected), "and give devices back");
    atomic_store(&stop, true);
    if (started) {
        pthread_join(other, NULL);
    }
    tap_check(attend_with(&a, NULL) == expected, "the parent goes on");
    fattn_cache_clear();
    attend_free(&a);
    return tap_done();
}
