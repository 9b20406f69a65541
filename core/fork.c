/* SPDX-License-Identifier: Apache-2.0 */
#include "core/fork.h"

#include <pthread.h>
#include <stdatomic.h>

static pthread_mutex_t locks[FATTN_FORK_LEVELS] = {
    [FATTN_FORK_DEFAULT] = PTHREAD_MUTEX_INITIALIZER,
    [FATTN_FORK_CACHE] = PTHREAD_MUTEX_INITIALIZER,
    [FATTN_FORK_THREADS] = PTHREAD_MUTEX_INITIALIZER,
    [FATTN_FORK_LOG] = PTHREAD_MUTEX_INITIALIZER,
};
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int registered; /* what pthread_atfork() returned */
static _Atomic(fattn_fork_child) child;
static atomic_bool is_child;

static void before(void)
{
    for (int level = 0; level < FATTN_FORK_LEVELS; level++) {
        pthread_mutex_lock(&locks[level]);
    }
}

static void after(void)
{
    for (int level = FATTN_FORK_LEVELS; level-- > 0;) {
        pthread_mutex_unlock(&locks[level]);
    }
}

static void in_child(void)
{
    const fattn_fork_child act = atomic_load(&child);
    atomic_store(&is_child, true);
    if (act) {
        act();
    }
    after();
}

static void prepare(void) { registered = pthread_atfork(before, after, in_child); }

bool fattn_fork_is_guarded(void)
{
    pthread_once(&once, prepare);
    return registered == 0;
}

/* Registers the handlers before it takes a lock: pthread_atfork() may wait for a fork, which waits
 * for the locks. */
void fattn_fork_lock(fattn_fork_level level)
{
    (void)fattn_fork_is_guarded(); /* fattn_attention() and devices with threads refuse to go on
                                    * without handlers */
    pthread_mutex_lock(&locks[level]);
}

void fattn_fork_unlock(fattn_fork_level level) { pthread_mutex_unlock(&locks[level]); }

void fattn_fork_set_child(fattn_fork_child act) { atomic_store(&child, act); }

bool fattn_fork_is_child(void) { return atomic_load_explicit(&is_child, memory_order_relaxed); }
