/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fork may happen while another thread is inside the library, and its child may call at once. So
 * locks that callers hold for a while are taken before a fork and given back after it, on both
 * sides, outermost first; and what threads have left behind in a child is put in order.
 */
#ifndef FATTN_CORE_FORK_H
#define FATTN_CORE_FORK_H

#include <pthread.h>
#include <stdbool.h>

/* In the order in which they are taken. */
typedef enum fattn_fork_level {
    FATTN_FORK_DEFAULT, /* of the default device */
    FATTN_FORK_CACHE,   /* of fattn_attention()'s plans */
    FATTN_FORK_THREADS, /* the backend's that has threads */
    FATTN_FORK_LOG,
    FATTN_FORK_LEVELS
} fattn_fork_level;

/* To be called before the first use of the lock, and as often as is convenient. in_child, which may
 * be NULL, is called in children while they hold the lock. false: there is no memory for it. */
bool fattn_fork_guard(fattn_fork_level level, pthread_mutex_t *lock, void (*in_child)(void));

/* Whether this process is a child of one that used the library before it forked. */
bool fattn_fork_is_child(void);

#endif
