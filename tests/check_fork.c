/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Children of a process that uses the library can use it too: after their parent has computed,
 * while another of its threads opens a device or computes, and in nested forks. They give the
 * parent's results and create threads of their own.
 *
 *     check_fork [CHILDREN]
 */
#define _DEFAULT_SOURCE /* usleep */

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/attend.h"
#include "tests/child.h"
#include "tests/tap.h"

enum { THREADS = 4, SECONDS = 60 /* of a child; a nested one has half of them */ };

static int children = 40;

typedef int (*child_work)(attend *a, uint64_t expected);

/* Whether a child finished in time with the right result. */
static bool works_in_child(child_work work, attend *a, uint64_t expected, unsigned seconds)
{
    const pid_t child = child_start(seconds);
    if (child == 0) {
        _exit(work(a, expected));
    }
    return child_succeeds(child);
}

/* The result, of a child: this process has not used the library then. 0 on failure. */
static uint64_t expect(attend *a)
{
    int ends[2];
    uint64_t expected = 0;
    if (pipe(ends)) {
        return 0;
    }
    const pid_t child = child_start(SECONDS);
    if (child == 0) {
        expected = attend_with(a, NULL);
        _exit(write(ends[1], &expected, sizeof expected) != sizeof expected);
    }
    close(ends[1]);
    const bool whole = read(ends[0], &expected, sizeof expected) == sizeof expected;
    close(ends[0]);
    return child_succeeds(child) && whole ? expected : 0;
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
    return attend_with(a, NULL) != expected ||
           !works_in_child(attend_once, a, expected, SECONDS / 2);
}

/* Allocations of the thread that opens the default device first take a while: the fork comes
 * before it has opened it. */
static sem_t opening;
static atomic_bool slow;

static void *allocate_slowly(void *user, size_t bytes)
{
    (void)user;
    if (atomic_exchange(&slow, false)) {
        sem_post(&opening);
        usleep(200000);
    }
    return malloc(bytes);
}

static void release(void *user, void *memory)
{
    (void)user;
    free(memory);
}

static void *attend_first(void *a) { return attend_with(a, NULL) ? a : NULL; }

static void *ask_first(void *a)
{
    fattn_device_info info;
    fattn_device_info_init(&info);
    return fattn_device_get_info(NULL, &info) ? NULL : a;
}

/* In a process that has not used the library. */
static int fork_beside(void *(*first)(void *), attend *a, uint64_t expected)
{
    fattn_host_allocator slowly;
    fattn_host_allocator_init(&slowly);
    slowly.allocate = allocate_slowly;
    slowly.release = release;
    pthread_t opener;
    sem_init(&opening, 0, 0);
    atomic_store(&slow, true);
    if (fattn_set_host_allocator(&slowly) || pthread_create(&opener, NULL, first, a)) {
        return 1;
    }
    sem_wait(&opening);
    const bool right = works_in_child(attend_once, a, expected, SECONDS / 2);
    void *result = NULL;
    pthread_join(opener, &result);
    return !right || !result;
}

static int fork_beside_attention(attend *a, uint64_t expected)
{
    return fork_beside(attend_first, a, expected);
}

static int fork_beside_info(attend *a, uint64_t expected)
{
    return fork_beside(ask_first, a, expected);
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
        if (!works_in_child(work, a, expected, SECONDS)) {
            return false;
        }
    }
    return true;
}

/* A thread that allocates while another forks leaves AddressSanitizer's allocator locked in the
 * child (gcc 12). */
static void check_first_use(attend *a, uint64_t expected)
{
    static const char attention[] = "a fork beside the first attention of the process";
    static const char opening_device[] = "a fork beside the first opening of the default device";
#ifdef __SANITIZE_ADDRESS__
    (void)a, (void)expected, (void)fork_beside_attention, (void)fork_beside_info;
    tap_skip(attention, "the sanitizer's allocator does not survive it");
    tap_skip(opening_device, "the sanitizer's allocator does not survive it");
#else
    tap_check(works_in_child(fork_beside_attention, a, expected, SECONDS), "%s", attention);
    tap_check(works_in_child(fork_beside_info, a, expected, SECONDS), "%s", opening_device);
#endif
}

int main(int argc, char **argv)
{
    attend a;
    children = argc > 1 ? atoi(argv[1]) : children;
    setenv("FATTN_BACKEND", "cpu", 1);
    setenv("FATTN_NUM_THREADS", "4", 1);
    attend_make(&a, FATTN_BACKWARD, 8, 200, 200, 32);
    const uint64_t expected = expect(&a);

    check_first_use(&a, expected);
    tap_check(expected && attend_with(&a, NULL) == expected, "the parent computes as a child did");
    tap_check(works_in_child(attend_once, &a, expected, SECONDS),
              "a child computes after its parent has");
    tap_check(works_in_child(attend_afresh, &a, expected, SECONDS), "a child gives devices back");
    tap_check(works_in_child(make_threads, &a, expected, SECONDS),
              "a child has %d threads of its own", THREADS);
    tap_check(works_in_child(fork_again, &a, expected, SECONDS), "a child of a child computes");

    pthread_t other;
    const bool started = pthread_create(&other, NULL, attend_on, NULL) == 0;
    tap_check(started && all_succeed(attend_once, &a, expected),
              "%d children compute while another thread of their parent does", children);
    tap_check(started && all_succeed(attend_afresh, &a, expected),
              "%d children give devices back meanwhile", children);
    atomic_store(&stop, true);
    if (started) {
        pthread_join(other, NULL);
    }
    tap_check(attend_with(&a, NULL) == expected, "the parent goes on");
    fattn_cache_clear();
    attend_free(&a);
    return tap_done();
}
