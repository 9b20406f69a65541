/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job is a sequence of phases that several workers go through together. A board is where a job is
 * posted. The workers on a board work, the last to leave a phase opens the next one, and no worker
 * waits for one that has not come. So one thread can finish everything, and threads may come and go
 * at any time.
 *
 * The state of a board is one word, so that coming and going take one instruction each:
 *     generation (32 bits) | phase (8) | draining (1) | owner inside (1) | helpers inside (22)
 * A worker leaves a phase when it has no more items to begin. Then the phase is draining, and no
 * worker enters it any more. The phase of a job that is over is BOARD_OVER.
 *
 * Boards outlive their jobs: a helper that is late finds another generation, or a phase that is
 * over, and touches nothing else. While it is inside, the phase cannot end, so the job is there.
 */
#ifndef FATTN_CPU_JOB_H
#define FATTN_CPU_JOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/env.h"

typedef struct fattn_cpu_job {
    /* Takes what there is to begin in a phase, and returns when it has done that. */
    void (*work)(void *context, int phase, int worker);
    void *context;
    int phases;  /* below 255 */
    int workers; /* at a time, 1 .. FATTN_THREADS_MAX: work() gets numbers below it */
    atomic_uint_least64_t taken[FATTN_THREADS_MAX / 64]; /* numbers that helpers have */
} fattn_cpu_job;

typedef struct fattn_cpu_board {
    _Alignas(64) atomic_uint_least64_t state;
    atomic_int helpers; /* that there is room for */
    fattn_cpu_job *job; /* of whom is inside */
} fattn_cpu_board;

/* What became of going to work. */
typedef enum fattn_cpu_visit {
    FATTN_CPU_REFUSED, /* there was nothing to begin, or no room */
    FATTN_CPU_LEFT,    /* others are still at it */
    FATTN_CPU_ENDED,   /* was the last: the next phase is open */
    FATTN_CPU_FINISHED /* was the last of the last phase */
} fattn_cpu_visit;

/* Puts a job on a board that has none, or whose job is over. */
void fattn_cpu_board_post(fattn_cpu_board *board, fattn_cpu_job *job);

#define FATTN_CPU_OWNER 0

/* Enters the phase that is open, works, and leaves. worker: FATTN_CPU_OWNER, who always finds room,
 * and there may be one at a time; or the number that a helper would like, from 1 on. It should be
 * the same in every job, because scratch goes by numbers: what a number's scratch held last is then
 * in the cache of the processor that has it next. */
fattn_cpu_visit fattn_cpu_board_work(fattn_cpu_board *board, int worker);

/* Whether a helper would be let in now. */
bool fattn_cpu_board_wants(fattn_cpu_board *board);

bool fattn_cpu_board_over(fattn_cpu_board *board);

/* Whether a worker has left the phase that is open, while others are still inside. */
bool fattn_cpu_board_draining(fattn_cpu_board *board);

/* Tells the core that this is a loop that waits for another. */
static inline void fattn_cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* yield is a no-op on most cores */
#endif
}

#endif
