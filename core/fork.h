/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fork may happen while another thread is inside the library, and its child may call at once. So
 * the locks that are held for a while live here: a fork takes them all, outermost first, and gives
 * them back on both sides; and what threads have left behind in a child is put in order.
 */
#ifndef FATTN_CORE_FORK_H
#define FATTN_CORE_FORK_H

#include <stdbool.h>

/* A thread that holds one may take those that follow. */
typedef enum fattn_fork_level {
    FATTN_FORK_DEFAULT, /* of the default device */
    FATTN_FORK_CACHE,   /* of fattn_attention()'s plans */
    FATTN_FORK_THREADS, /* the backend's that has threads */
    FATTN_FORK_LOG,
    FATTN_FORK_LEVELS
} fattn_fork_level;

void fattn_fork_lock(fattn_fork_level level);
void fattn_fork_unlock(fattn_fork_level level);

/* Whether forks take the locks. false: there was no memory to register that, and a child may find
 * them held for ever. */
bool fattn_fork_is_guarded(void);

/* What a child does first, while it holds all locks. */
typedef void (*fattn_fork_child)(void);
void fattn_fork_set_child(fattn_fork_child act);

/* Whether this process is a child of one that used the library before it forked. */
bool fattn_fork_is_child(void);

#endif
