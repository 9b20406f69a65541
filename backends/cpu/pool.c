/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* sched_setaffinity */

#include "backends/cpu/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "core/env.h"
#include "core/fork.h"
#include "core/memory.h"
#include "core/status.h"

/* How long a worker without work spins before it sleeps, in nanoseconds: about as long as waking it
 * takes. A caller spins as long for the end of items that others have begun. */
#define SPIN_NS 30000

/* How long a worker spins at most, in nanoseconds, while a job with nothing left to begin is still
 * running: the job has claimed the processor anyway, and another job is likely to follow it. */
#define TAIL_NS 300000

/* How many others a worker wakes after it has been woken itself. In a virtual machine a thread
 * starts to run 15 to 25 microseconds after it was woken, and waking one takes a microsecond. */
#define EACH_WAKES 8

/* If a thread could not be created, the next attempt is made after so many nanoseconds. */
#define RETRY INT64_C(1000000000)

/* The most jobs at a time that workers help with; further callers work alone. */
#define BOARDS 64

typedef struct worker {
    pthread_t thread;
    fattn_cpu_pool *pool;
    int number; /* from 1 on; the number that it prefers in jobs */
} worker;

struct fattn_cpu_pool {
    fattn_cpu_board boards[BOARDS];
    /* Bit n: board n has a job; spinning workers read it. */
    _Alignas(64) atomic_uint_least64_t posted;
    _Alignas(64) atomic_int spinners; /* workers that are awake and look for work */
    atomic_int sleepers;              /* workers that sleep */
    atomic_int waiters;               /* callers that sleep until a phase ends */
    atomic_int made;                  /* workers created */
    atomic_uint_least64_t owned;      /* bit n: a caller has board n */

    pthread_mutex_t mutex;
    pthread_cond_t work;  /* for sleepers */
    pthread_cond_t done;  /* for waiters */
    int calls;            /* sleepers still to be woken; under mutex */
    bool stop;            /* under mutex */
    int64_t retry;        /* no thread is created before this time; under mutex */
    worker *workers;      /* room for FATTN_THREADS_MAX; under mutex */
    fattn_cpu_set cpus;   /* where workers may run; empty: anywhere */
    int64_t references;   /* under FATTN_FORK_THREADS */
    fattn_cpu_pool *next; /* under FATTN_FORK_THREADS */
};

static fattn_cpu_pool *pools;       /* all of them; under FATTN_FORK_THREADS */
static fattn_cpu_pool *shared_pool; /* under FATTN_FORK_THREADS */

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* --- Waking and sleeping ---------------------------------------------------------------------- */

/*
 * A worker that goes to sleep counts itself as a sleeper, and then checks for work once more. A
 * caller posts its job, and then checks for sleepers. All of these operations are sequentially
 * consistent, so at least one of the two sees the other.
 */

static bool is_wanted(fattn_cpu_pool *pool)
{
    for (uint64_t left = atomic_load(&pool->posted); left; left &= left - 1) {
        if (fattn_cpu_board_wants(&pool->boards[__builtin_ctzll(left)])) {
            return true;
        }
    }
    return false;
}

/* Makes up to `wanted` workers look for work. The first sleeper is woken here, and each worker that
 * wakes up wakes some more, so that the caller can soon go on. */
static void wake(fattn_cpu_pool *pool, int wanted)
{
    if (atomic_load(&pool->sleepers) == 0) {
        return;
    }
    wanted -= atomic_load(&pool->spinners);
    if (wanted <= 0) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    const int sleepers = atomic_load(&pool->sleepers);
    const int calls = (wanted < sleepers ? wanted : sleepers) - 1;
    if (pool->calls < calls) {
        pool->calls = calls;
    }
    pthread_mutex_unlock(&pool->mutex);
    pthread_cond_signal(&pool->work);
}

/* Sleeps until there is work. Returns false when the pool ends. */
static bool sleep_for_work(fattn_cpu_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!pool->stop && !is_wanted(pool)) {
        pool->calls = 0; /* the jobs that they were for are over */
        pthread_cond_wait(&pool->work, &pool->mutex);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    const bool stop = pool->stop;
    const int calls = pool->calls < EACH_WAKES ? pool->calls : EACH_WAKES;
    pool->calls -= calls;
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < calls; i++) {
        pthread_cond_signal(&pool->work);
    }
    return !stop;
}

/* Spins for a while, looking for work. Returns whether there is some. */
static bool spin_for_work(fattn_cpu_pool *pool)
{
    int64_t time = now(), until = time + SPIN_NS;
    const int64_t patience = time + TAIL_NS;
    bool found = false;
    atomic_fetch_add(&pool->spinners, 1);
    do {
        for (int i = 0; i < 32 && !found; i++) {
            fattn_cpu_pause();
            found = is_wanted(pool);
        }
        time = now();
        if (time < patience && atomic_load_explicit(&pool->posted, memory_order_relaxed)) {
            until = time + SPIN_NS;
        }
    } while (!found && time < until);
    atomic_fetch_sub(&pool->spinners, 1);
    return found;
}

/* --- Workers ---------------------------------------------------------------------------------- */

/* Works on a board, and wakes those who wait for the outcome. number: as in
 * fattn_cpu_board_work() */
static fattn_cpu_visit visit(fattn_cpu_pool *pool, fattn_cpu_board *board, int number)
{
    const fattn_cpu_visit visit = fattn_cpu_board_work(board, number);
    if (visit == FATTN_CPU_ENDED) {
        wake(pool, atomic_load(&board->helpers));
    }
    if ((visit == FATTN_CPU_ENDED || visit == FATTN_CPU_FINISHED) && atomic_load(&pool->waiters)) {
        pthread_mutex_lock(&pool->mutex); /* by now, every waiter that has counted itself sleeps */
        pthread_mutex_unlock(&pool->mutex);
        pthread_cond_broadcast(&pool->done);
    }
    return visit;
}

/* Helps with one of the posted jobs, starting its search at another board each time. Returns
 * whether there was any work. */
static bool help(const worker *own, int *first)
{
    fattn_cpu_pool *const pool = own->pool;
    const uint64_t posted = atomic_load(&pool->posted);
    const int from = *first = (*first + 1) % BOARDS;
    bool helped = false;
    for (int i = 0; i < BOARDS && posted && !helped; i++) {
        const int n = (from + i) % BOARDS;
        if (posted >> n & 1) {
            helped = visit(pool, &pool->boards[n], own->number) != FATTN_CPU_REFUSED;
        }
    }
    return helped;
}

#ifdef __linux__
/* Names the calling worker, and lets it run where workers may: until then it has the affinity of
 * the thread that created it. */
static void settle(const fattn_cpu_set *cpus)
{
    fattn_cpu_set own = {{0}};
    (void)prctl(PR_SET_NAME, "fattn", 0, 0, 0);
    fattn_cpu_set_own(&own);
    if (fattn_cpu_set_count(cpus) > 0 && memcmp(&own, cpus, sizeof own) != 0) {
        (void)sched_setaffinity(0, sizeof cpus->bits, (const cpu_set_t *)(const void *)cpus->bits);
    }
}
#else
static void settle(const fattn_cpu_set *cpus) { (void)cpus; }
#endif

static void *work(void *of)
{
    const worker *const own = of;
    fattn_cpu_pool *const pool = own->pool;
    int first = 0;
    settle(&pool->cpus);
    do {
        while (help(own, &first) || spin_for_work(pool)) {}
    } while (sleep_for_work(pool));
    return NULL;
}

/* Creates a worker; under mutex. Workers block all signals, which are for the program's own
 * threads. */
static bool make_worker(fattn_cpu_pool *pool)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int made = atomic_load(&pool->made);
    worker *const w = &pool->workers[made];
    w->pool = pool;
    w->number = made + 1;
    const int failed = pthread_create(&w->thread, NULL, work, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) {
        atomic_fetch_add(&pool->made, 1);
    }
    return !failed;
}

/* Creates workers until there are `wanted`, or as many as the system allows. */
static void make_workers(fattn_cpu_pool *pool, int wanted)
{
    if (atomic_load_explicit(&pool->made, memory_order_relaxed) >= wanted) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(&pool->made) < wanted && now() >= pool->retry) {
        if (!make_worker(pool)) {
            pool->retry = now() + RETRY;
        }
    }
    pthread_mutex_unlock(&pool->mutex);
}

/* --- Callers ---------------------------------------------------------------------------------- */

/* Takes a board for the caller. Returns NULL if none is free. */
static fattn_cpu_board *take_board(fattn_cpu_pool *pool, uint64_t *bit)
{
    uint64_t owned = atomic_load(&pool->owned);
    do {
        if (!~owned) {
            return NULL;
        }
        *bit = ~owned & (owned + 1);
    } while (!atomic_compare_exchange_weak(&pool->owned, &owned, owned | *bit));
    return &pool->boards[__builtin_ctzll(*bit)];
}

/* Waits while others are still at work in a phase with nothing left to begin. */
static void wait_for_others(fattn_cpu_pool *pool, fattn_cpu_board *board)
{
    const int64_t until = now() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (!fattn_cpu_board_draining(board)) {
                return;
            }
            fattn_cpu_pause();
        }
    } while (now() < until);
    int state = 0; /* a caller that is cancelled in its sleep would take the mutex along */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->waiters, 1);
    while (fattn_cpu_board_draining(board)) {
        pthread_cond_wait(&pool->done, &pool->mutex);
    }
    atomic_fetch_sub(&pool->waiters, 1);
    pthread_mutex_unlock(&pool->mutex);
    pthread_setcancelstate(state, NULL);
}

void fattn_cpu_pool_run(fattn_cpu_pool *pool, fattn_cpu_job *job)
{
    uint64_t bit = 0;
    make_workers(pool, job->workers - 1);
    fattn_cpu_board *const board =
        atomic_load_explicit(&pool->made, memory_order_relaxed) ? take_board(pool, &bit) : NULL;
    if (!board) {
        fattn_cpu_job_run_alone(job);
        return;
    }
    fattn_cpu_board_post(board, job);
    atomic_fetch_or(&pool->posted, bit);
    wake(pool, job->workers - 1);
    while (!fattn_cpu_board_over(board)) {
        const fattn_cpu_visit became = visit(pool, board, FATTN_CPU_OWNER);
        if (became == FATTN_CPU_LEFT || became == FATTN_CPU_REFUSED) {
            wait_for_others(pool, board);
        }
    }
    atomic_fetch_and(&pool->posted, ~bit);
    atomic_fetch_and(&pool->owned, ~bit);
}

/* --- Pools ------------------------------------------------------------------------------------ */

/* Sets a pool to the state without workers and callers. Its place in the list, and what was set
 * when it was made, stay. */
static void reset(fattn_cpu_pool *pool)
{
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    atomic_init(&pool->posted, 0);
    atomic_init(&pool->owned, 0);
    atomic_init(&pool->spinners, 0);
    atomic_init(&pool->sleepers, 0);
    atomic_init(&pool->waiters, 0);
    atomic_init(&pool->made, 0);
    for (int i = 0; i < BOARDS; i++) {
        atomic_init(&pool->boards[i].state, 0);
        atomic_init(&pool->boards[i].helpers, 0);
    }
    pool->calls = 0;
    pool->stop = false;
    pool->retry = 0;
}

/* The child of a fork has one thread, and does not continue what the other threads of its parent
 * were doing. */
static void reset_all(void)
{
    for (fattn_cpu_pool *pool = pools; pool; pool = pool->next) {
        reset(pool);
    }
}

static fattn_status make(const fattn_cpu_set *cpus, fattn_cpu_pool **made)
{
    const size_t size = sizeof(fattn_cpu_pool) + FATTN_THREADS_MAX * sizeof(worker);
    fattn_cpu_pool *const pool = fattn_memory_alloc_aligned(size);
    if (!pool) {
        return fattn_fail_memory((int64_t)size, "a device's threads");
    }
    pool->workers = (worker *)(pool + 1);
    pool->cpus = *cpus;
    pool->references = 1;
    pool->next = pools;
    reset(pool);
    pools = pool;
    *made = pool;
    return FATTN_OK;
}

fattn_status fattn_cpu_pool_open(const fattn_cpu_set *cpus, bool shared, fattn_cpu_pool **opened)
{
    if (!fattn_fork_is_guarded()) {
        return fattn_fail(FATTN_OUT_OF_MEMORY, "a handler of forks could not be registered");
    }
    fattn_fork_set_child(reset_all);
    fattn_fork_lock(FATTN_FORK_THREADS);
    fattn_cpu_pool *pool = shared ? shared_pool : NULL;
    fattn_status status = FATTN_OK;
    if (pool) {
        pool->references++;
    } else {
        status = make(cpus, &pool);
    }
    if (shared) {
        shared_pool = pool;
    }
    fattn_fork_unlock(FATTN_FORK_THREADS);
    *opened = pool;
    return status;
}

/* Ends a pool, which has no callers any more and is no longer in the list that a fork resets. */
static void end(fattn_cpu_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    pthread_mutex_unlock(&pool->mutex);
    pthread_cond_broadcast(&pool->work);
    for (int i = 0; i < atomic_load(&pool->made); i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->mutex);
    fattn_memory_free_aligned(pool);
}

void fattn_cpu_pool_close(fattn_cpu_pool *pool)
{
    fattn_fork_lock(FATTN_FORK_THREADS);
    const bool last = --pool->references == 0;
    if (last) {
        fattn_cpu_pool **at = &pools;
        while (*at != pool) {
            at = &(*at)->next;
        }
        *at = pool->next;
        shared_pool = shared_pool == pool ? NULL : shared_pool;
    }
    fattn_fork_unlock(FATTN_FORK_THREADS);
    if (last) {
        end(pool);
    }
}
