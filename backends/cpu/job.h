/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job is a sequence of phases that several workers go through together. A job is posted on a
 * board, where workers find it. The last worker to leave a phase opens the next one, and no worker
 * waits for one that has not come. So one thread alone can finish a job, and threads may come and
 * go at any time.
 *
 * The state of a board is one word, so that entering and leaving take one atomic instruction each:
 *     generation (32 bits) | phase (8) | draining (1) | owner inside (1) | helpers inside (22)
 * A worker leaves a phase when it finds no more items to begin. From then on the phase is draining,
 * and no worker enters it. When a job is over, its phase is OVER (job.c).
 *
 * Boards outlive their jobs: a helper that comes late finds another generation, or a phase that is
 * over, and touches nothing else. While a helper is inside, the phase cannot end, so the job
 * exists.
 */
#ifndef FATTN_CPU_JOB_H
#define FATTN_CPU_JOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/env.h"

/* The number of the worker that posted a job; helpers have numbers from 1 on. */
#define FATTN_CPU_OWNER 0

typedef struct fattn_cpu_job {
    /* Begins the items of a phase until none are left, finishes those that it began, and
     * returns. */
    void (*work)(void *context, int phase, int worker);
    void *context;
    int phases;  /* fewer than 255 */
    int workers; /* at a time, 1 .. FATTN_THREADS_MAX; work() gets numbers below it */
    atomic_uint_least64_t taken[FATTN_THREADS_MAX / 64]; /* bit n - 1: a helper has number n */
} fattn_cpu_job;

/* Runs all phases of a job on the calling thread, as its owner. */
void fattn_cpu_job_run_alone(fattn_cpu_job *job);

typedef struct fattn_cpu_board {
    _Alignas(64) atomic_uint_least64_t state;
    atomic_int helpers; /* how many there is room for */
    fattn_cpu_job *job; /* valid for workers inside */
} fattn_cpu_board;

/* The outcome of fattn_cpu_board_work(). */
typedef enum fattn_cpu_visit {
    FATTN_CPU_REFUSED, /* did not enter: there was nothing to begin, or no room */
    FATTN_CPU_LEFT,    /* left while others were still inside */
    FATTN_CPU_ENDED,   /* was the last to leave, and opened the next phase */
    FATTN_CPU_FINISHED /* was the last to leave the last phase: the job is over */
} fattn_cpu_visit;

/* Posts a job on a board that has none, or whose job is over. */
void fattn_cpu_board_post(fattn_cpu_board *board, fattn_cpu_job *job);

/* Enters the open phase, works, and leaves. worker: FATTN_CPU_OWNER, of which there may be one at a
 * time, and for whom there is always room; or the number that a helper prefers, from 1 on. A thread
 * should prefer the same number in every job, since scratch belongs to numbers: what it wrote to
 * its scratch last is then in its processor's cache. */
fattn_cpu_visit fattn_cpu_board_work(fattn_cpu_board *board, int worker);

/* Whether a helper would be let in now. */
bool fattn_cpu_board_wants(fattn_cpu_board *board);

/* Whether the job on the board is over. */
bool fattn_cpu_board_over(fattn_cpu_board *board);

/* Whether a worker has left the phase that is open, while others are still inside. */
bool fattn_cpu_board_draining(fattn_cpu_board *board);

/* Tells the core that this is a spin loop. */
static inline void fattn_cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* yield is a no-op on most cores */
#endif
}

#endif
