/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Failing thread creation and memory allocation, and threads that are cancelled: this program's
 * pthread_create() and malloc() fail on request. Results must equal those without failures, and the
 * process must survive. Each case runs in a process of its own.
 */
#define _GNU_SOURCE /* dladdr, RTLD_NEXT */

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "tests/attend.h"
#include "tests/child.h"
#include "tests/tap.h"

enum { THREADS = 8 };

/* --- What fails ------------------------------------------------------------------------------- */

static atomic_int fail_from; /* the first thread that cannot be made, counting from 1; 0: none */
static atomic_int fail_once; /* only that one */
static atomic_int asked;     /* threads requested so far */

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                   void *argument)
{
    static int (*_Atomic next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        atomic_load(&next);
    if (!create) {
        *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
        atomic_store(&next, create);
    }
    const int number = atomic_fetch_add(&asked, 1) + 1, from = atomic_load(&fail_from);
    if (from && (atomic_load(&fail_once) ? number == from : number >= from)) {
        return EAGAIN;
    }
    return create(thread, attributes, start, argument);
}

typedef enum victim { NOBODY, OPENMP, EVERYBODY } victim;
static _Atomic victim starved;

/* Whether an allocation by the caller at this address must fail. */
static bool starves(const void *caller)
{
    Dl_info at;
    const victim who = atomic_load(&starved);
    const bool starving =
        who == EVERYBODY || (who == OPENMP && dladdr(caller, &at) && at.dli_fname &&
                             (strstr(at.dli_fname, "libgomp") || strstr(at.dli_fname, "libomp")));
    if (starving) {
        errno = ENOMEM; /* the C library relies on it */
    }
    return starving;
}

/* The C library's own functions, under its internal names. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *memory, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size)
{
    return starves(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return starves(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    return starves(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return starves(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
}

/* --- Cases ------------------------------------------------------------------------------------ */

static uint64_t *expected; /* shared with the children */

static bool in_a_child(bool (*succeeds)(int n), int n)
{
    const pid_t child = child_start(60);
    if (child == 0) {
        _exit(!succeeds(n));
    }
    return child_succeeds(child);
}

static void make_problem(attend *a) { attend_make(a, FATTN_BACKWARD, 16, 150, 150, 32); }

static bool nothing_fails(int n)
{
    attend a;
    make_problem(&a);
    *expected = attend_with(&a, NULL);
    return *expected && process_threads_are(n);
}

static bool creation_fails(int n)
{
    attend a;
    make_problem(&a);
    atomic_store(&fail_from, n);
    const bool right = attend_with(&a, NULL) == *expected && process_threads_are(n);
    const int before = atomic_load(&asked);
    const bool again = attend_with(&a, NULL) == *expected && process_threads_are(n);
    return right && again && atomic_load(&asked) <= before + 1; /* not at every call again */
}

/* The library tries to create threads again after a while. */
static bool creation_recovers(int n)
{
    attend a;
    make_problem(&a);
    atomic_store(&fail_from, n);
    atomic_store(&fail_once, 1);
    const bool right = attend_with(&a, NULL) == *expected && process_threads_are(n);
    sleep(2);
    return right && attend_with(&a, NULL) == *expected && process_threads_are(THREADS);
}

/* LLVM's runtime allocates memory on first use and ends the process if there is none
 * (docs/BUILDING.md). Here it has been used before. */
static bool openmp_starves(int n)
{
    attend a;
    (void)n;
#ifdef _OPENMP
    if (dlsym(RTLD_DEFAULT, "__kmpc_fork_call")) {
        (void)omp_get_max_threads();
    }
#endif
    make_problem(&a);
    atomic_store(&starved, OPENMP);
    return attend_with(&a, NULL) == *expected;
}

/* With plan and workspace present, a run allocates nothing except for threads. */
static bool everybody_starves(int n)
{
    attend a;
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_plan_info info = {.struct_size = sizeof info};
    void *workspace = NULL;
    make_problem(&a);
    bool right = attend_with(&a, NULL) == *expected; /* forward's results are there */
    fattn_cache_clear();                             /* and the threads are gone */
    right = right && fattn_device_open("cpu", &device) == FATTN_OK &&
            fattn_plan_create(device, &a.problem, &plan) == FATTN_OK &&
            fattn_plan_get_info(plan, &info) == FATTN_OK &&
            posix_memalign(&workspace, 256, (size_t)info.workspace_bytes + 256) == 0;
    if (right) {
        atomic_store(&fail_from, n);
        atomic_store(&starved, EVERYBODY);
        right = fattn_execute(plan, &a.buffers, workspace, NULL) == FATTN_OK;
        atomic_store(&starved, NOBODY);
    }
    return right && attend_hash(&a) == *expected;
}

static void *attend_until_cancelled(void *a)
{
    while (attend_with(a, NULL)) {
        pthread_testcancel();
    }
    return NULL;
}

/* A thread that is cancelled finishes its run; others go on. */
static bool callers_are_cancelled(int n)
{
    attend cancelled, a;
    make_problem(&cancelled);
    make_problem(&a);
    bool right = attend_with(&a, NULL) == *expected; /* device and plans are there */
    for (int i = 0; right && i < n; i++) {
        pthread_t caller;
        right = pthread_create(&caller, NULL, attend_until_cancelled, &cancelled) == 0;
        if (right) {
            usleep((useconds_t)(300 + 7 * i));
            pthread_cancel(caller);
            pthread_join(caller, NULL);
            right = attend_with(&a, NULL) == *expected;
        }
    }
    return right;
}

int main(void)
{
    setenv("FATTN_BACKEND", "cpu", 1);
    setenv("FATTN_NUM_THREADS", "8", 1);
    expected =
        mmap(NULL, sizeof *expected, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (expected == MAP_FAILED) {
        return 1;
    }
    tap_check(in_a_child(nothing_fails, THREADS), "%d threads where nothing fails", THREADS);
    for (int n = 1; n < THREADS; n++) {
        tap_check(in_a_child(creation_fails, n), "thread %d and all after it cannot be made", n);
    }
    tap_check(in_a_child(creation_recovers, 3), "thread 3 cannot be made at first");
    tap_check(in_a_child(openmp_starves, 0), "OpenMP's runtime gets no memory");
    tap_check(in_a_child(everybody_starves, 0), "every allocation fails while a plan runs");
    tap_check(in_a_child(everybody_starves, 1),
              "every allocation fails while a plan runs, and no thread can be made");
    tap_check(in_a_child(callers_are_cancelled, 100), "callers are cancelled in their runs");
    return tap_done();
}
