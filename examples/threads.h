/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A transport for fattn/distributed.h: ranks are threads of one process, and a message is a copy.
 * It shows what a transport has to do, and lets a program try out groups without MPI.
 *
 * A sender puts the address of its message into a slot. The receiver copies the data and clears the
 * slot. The sender waits until the slot is clear.
 *
 * A program defines _POSIX_C_SOURCE before its first include: this file needs POSIX clocks.
 */
#ifndef FATTN_EXAMPLES_THREADS_H
#define FATTN_EXAMPLES_THREADS_H

#include <fattn/distributed.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { THREADS_MAX = 8 };

typedef struct threads {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int ranks, failed; /* failed: the rank that failed first, or -1 */
    char reason[256];
    fattn_device *device; /* of the messages' memory; NULL: the default device */
    const fattn_message *slots[THREADS_MAX][THREADS_MAX][FATTN_MESSAGE_TAGS]; /* [from][to][tag] */
    struct threads_rank {
        struct threads *all;
        int rank;
    } each[THREADS_MAX];
} threads;

static inline void threads_make(threads *all, int ranks)
{
    memset(all, 0, sizeof *all);
    pthread_mutex_init(&all->mutex, NULL);
    pthread_cond_init(&all->changed, NULL);
    all->ranks = ranks, all->failed = -1;
    for (int r = 0; r < ranks; r++) {
        all->each[r].all = all, all->each[r].rank = r;
    }
}

static inline void threads_free(threads *all)
{
    pthread_cond_destroy(&all->changed);
    pthread_mutex_destroy(&all->mutex);
}

static inline fattn_status threads_start(void *user, const fattn_message *messages, int count)
{
    const struct threads_rank *const own = user;
    pthread_mutex_lock(&own->all->mutex);
    for (int n = 0; n < count; n++) {
        if (!messages[n].receive) {
            own->all->slots[own->rank][messages[n].peer][messages[n].tag] = &messages[n];
        }
    }
    pthread_cond_broadcast(&own->all->changed);
    pthread_mutex_unlock(&own->all->mutex);
    return FATTN_OK;
}

static inline fattn_status threads_wait(void *user, const fattn_message *messages, int count,
                                        double seconds)
{
    const struct threads_rank *const own = user;
    threads *const all = own->all;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    seconds = seconds < 1e9 ? seconds : 1e9; /* 30 years; more may overflow time_t */
    end.tv_sec += (time_t)seconds;
    end.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    end.tv_sec += end.tv_nsec / 1000000000, end.tv_nsec %= 1000000000;
    int late = 0, done[FATTN_MESSAGES_MAX] = {0}, left = count;
    fattn_status copied = FATTN_OK;
    char text[640] = "";
    pthread_mutex_lock(&all->mutex);
    while (left > 0 && all->failed < 0 && !late && !copied) {
        const int before = left;
        for (int n = 0; n < count; n++) {
            const fattn_message *const m = &messages[n];
            const fattn_message **const slot = m->receive ? &all->slots[m->peer][own->rank][m->tag]
                                                          : &all->slots[own->rank][m->peer][m->tag];
            if (done[n] || (m->receive ? !*slot : *slot != NULL)) {
                continue;
            }
            if (m->receive) {
                const size_t bytes = (size_t)m->bytes;
                copied = fattn_device_copy(all->device, m->data, (*slot)->data, bytes, NULL);
                copied = copied ? copied : fattn_stream_synchronize(all->device, NULL);
                if (copied) {
                    snprintf(text, sizeof text, "a message of rank %d cannot be copied: %s",
                             m->peer, fattn_last_reason());
                    break;
                }
                *slot = NULL;
            }
            done[n] = 1, left--;
        }
        if (left < before) {
            pthread_cond_broadcast(&all->changed);
        } else if (!copied) {
            late = pthread_cond_timedwait(&all->changed, &all->mutex, &end) != 0;
        }
    }
    const fattn_status status = copied             ? copied
                                : all->failed >= 0 ? FATTN_RANK_LOST
                                                   : FATTN_RANK_TIMEOUT;
    for (int n = 0; left > 0 && n < count; n++) {
        const fattn_message *const m = &messages[n];
        if (!done[n] && !m->receive) { /* withdrawn: the caller may free the data */
            all->slots[own->rank][m->peer][m->tag] = NULL;
        }
        if (!done[n] && !copied && all->failed >= 0) {
            snprintf(text, sizeof text, "rank %d gave up: %s", all->failed, all->reason);
        } else if (!done[n] && !copied) {
            snprintf(text, sizeof text, "rank %d did not answer in %g s", m->peer, seconds);
        }
    }
    pthread_mutex_unlock(&all->mutex);
    return text[0] ? fattn_transport_fail(status, text) : FATTN_OK;
}

static inline void threads_abort(void *user, const char *reason)
{
    const struct threads_rank *const own = user;
    pthread_mutex_lock(&own->all->mutex);
    if (own->all->failed < 0) {
        own->all->failed = own->rank;
        snprintf(own->all->reason, sizeof own->all->reason, "%s", reason);
    }
    pthread_cond_broadcast(&own->all->changed);
    pthread_mutex_unlock(&own->all->mutex);
}

static inline fattn_transport threads_transport(threads *all, int rank)
{
    return (fattn_transport){.struct_size = sizeof(fattn_transport),
                             .rank = rank,
                             .ranks = all->ranks,
                             .user = &all->each[rank],
                             .start = threads_start,
                             .wait = threads_wait,
                             .abort = threads_abort};
}

#endif
