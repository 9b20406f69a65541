/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork(). A process may fork while another of its threads is inside the library, and the child may
 * call the library at once. So the library's locks live here: handlers of pthread_atfork() take
 * them all before the fork, outermost first, and release them in parent and child. In the child
 * they also reset the state of threads, which do not exist there.
 */
#ifndef FATTN_CORE_FORK_H
#define FATTN_CORE_FORK_H

#include <stdbool.h>

/* The locks. A thread that holds one may take only those that follow it here. */
typedef enum fattn_fork_level {
    FATTN_FORK_DEFAULT, /* the default device */
    FATTN_FORK_CACHE,   /* the plans of fattn_attention() */
    FATTN_FORK_THREADS, /* the threads of the CPU backend */
    FATTN_FORK_LOG,     /* the log callback */
    FATTN_FORK_LEVELS
} fattn_fork_level;

void fattn_fork_lock(fattn_fork_level level);
void fattn_fork_unlock(fattn_fork_level level);

/* Whether the handlers are registered. false: there was no memory for that, and a child may find
 * locks held for ever. */
bool fattn_fork_is_guarded(void);

/* Sets the function that a child calls first, while all locks are held. */
typedef void (*fattn_fork_child)(void);
void fattn_fork_set_child(fattn_fork_child act);

/* Whether this process is a child of one that used the library before it forked. */
bool fattn_fork_is_child(void);

#endif
