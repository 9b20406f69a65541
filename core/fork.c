/* SPDX-License-Identifier: Apache-2.0 */
#include "core/fork.h"

#include <stdatomic.h>

typedef struct guard {
    _Atomic(pthread_mutex_t *) lock;
    void (*in_child)(void);
    pthread_mutex_t *held; /* by the fork that holds `forking` */
} guard;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int registered; /* what pthread_atfork() returned */
static pthread_mutex_t forking = PTHREAD_MUTEX_INITIALIZER;
static guard guards[FATTN_FORK_LEVELS];
static atomic_bool is_child;

static void before(void)
{
    pthread_mutex_lock(&forking);
    for (guard *g = guards; g < guards + FATTN_FORK_LEVELS; g++) {
        g->held = atomic_load(&g->lock);
        if (g->held) {
            pthread_mutex_lock(g->held);
        }
    }
}

static void after(void)
{
    for (guard *g = guards + FATTN_FORK_LEVELS; g-- > guards;) {
        if (g->held) {
            pthread_mutex_unlock(g->held);
        }
    }
    pthread_mutex_unlock(&forking);
}

static void in_child(void)
{
    atomic_store(&is_child, true);
    for (guard *g = guards; g < guards + FATTN_FORK_LEVELS; g++) {
        if (g->held && g->in_child) {
            g->in_child();
        }
    }
    after();
}

static void prepare(void) { registered = pthread_atfork(before, after, in_child); }

bool fattn_fork_guard(fattn_fork_level level, pthread_mutex_t *lock, void (*child)(void))
{
    guard *const g = &guards[level];
    pthread_once(&once, prepare);
    if (registered != 0) {
        return false;
    }
    if (!atomic_load_explicit(&g->lock, memory_order_acquire)) {
        pthread_mutex_lock(&forking);
        g->in_child = child;
        atomic_store(&g->lock, lock);
        pthread_mutex_unlock(&forking);
    }
    return true;
}

bool fattn_fork_is_child(void) { return atomic_load_explicit(&is_child, memory_order_relaxed); }
