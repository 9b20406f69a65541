/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/job.h"

/* The parts of a board's state (job.h). */
#define HELPER UINT64_C(1) /* one helper inside */
#define HELPERS (OWNER - 1)
#define OWNER (UINT64_C(1) << 22)
#define INSIDE (HELPERS | OWNER)
#define DRAINING (UINT64_C(1) << 23)
#define PHASE (UINT64_C(1) << 24)
#define OVER UINT64_C(255) /* the phase of a job that is over */
#define GENERATION (UINT64_C(1) << 32)

void fattn_cpu_job_run_alone(fattn_cpu_job *job)
{
    for (int phase = 0; phase < job->phases; phase++) {
        job->work(job->context, phase, FATTN_CPU_OWNER);
    }
}

static uint64_t phase_of(uint64_t state) { return state / PHASE & 255; }

static bool lets_in(fattn_cpu_board *board, uint64_t state, bool owner)
{
    const uint64_t room = (uint64_t)atomic_load_explicit(&board->helpers, memory_order_relaxed);
    return !(state & DRAINING) && phase_of(state) != OVER && (owner || (state & HELPERS) < room);
}

/* Takes a number for a helper: `wanted`, if no other helper has it. A free one exists, since the
 * helpers inside, and those about to leave, are fewer than the numbers. */
static int take_number(fattn_cpu_job *job, int wanted)
{
    for (int number = wanted < job->workers ? wanted : 1;;
         number = number % (job->workers - 1) + 1) {
        const uint64_t bit = UINT64_C(1) << (number - 1) % 64;
        if (!(atomic_fetch_or_explicit(&job->taken[(number - 1) / 64], bit, memory_order_acquire) &
              bit)) {
            return number;
        }
    }
}

/* Released with a barrier: the next worker with this number writes to the same scratch. */
static void release_number(fattn_cpu_job *job, int number)
{
    atomic_fetch_and_explicit(&job->taken[(number - 1) / 64], ~(UINT64_C(1) << (number - 1) % 64),
                              memory_order_release);
}

void fattn_cpu_board_post(fattn_cpu_board *board, fattn_cpu_job *job)
{
    const uint64_t state = atomic_load(&board->state);
    for (int n = 0; n < FATTN_THREADS_MAX / 64; n++) {
        atomic_init(&job->taken[n], 0);
    }
    atomic_store_explicit(&board->helpers, job->workers - 1, memory_order_relaxed);
    board->job = job;
    atomic_store(&board->state, (state / GENERATION + 1) * GENERATION);
}

fattn_cpu_visit fattn_cpu_board_work(fattn_cpu_board *board, int worker)
{
    const bool owner = worker == FATTN_CPU_OWNER;
    const uint64_t unit = owner ? OWNER : HELPER;
    uint64_t state = atomic_load(&board->state);
    do {
        if (!lets_in(board, state, owner)) {
            return FATTN_CPU_REFUSED;
        }
    } while (!atomic_compare_exchange_weak(&board->state, &state, state + unit));

    fattn_cpu_job *const job = board->job;
    const int phase = (int)phase_of(state);
    const int number = owner ? FATTN_CPU_OWNER : take_number(job, worker);
    const bool last_phase = phase + 1 == job->phases;
    job->work(job->context, phase, number);
    if (!owner) {
        release_number(job, number);
    }

    uint64_t next;
    bool alone;
    state = atomic_load(&board->state);
    do {
        const uint64_t opened = last_phase ? OVER : (uint64_t)phase + 1;
        alone = (state & INSIDE) == unit;
        next = alone ? state / GENERATION * GENERATION + opened * PHASE : (state - unit) | DRAINING;
    } while (!atomic_compare_exchange_weak(&board->state, &state, next));
    return !alone ? FATTN_CPU_LEFT : last_phase ? FATTN_CPU_FINISHED : FATTN_CPU_ENDED;
}

bool fattn_cpu_board_wants(fattn_cpu_board *board)
{
    return lets_in(board, atomic_load(&board->state), false);
}

bool fattn_cpu_board_over(fattn_cpu_board *board)
{
    return phase_of(atomic_load(&board->state)) == OVER;
}

bool fattn_cpu_board_draining(fattn_cpu_board *board)
{
    return atomic_load(&board->state) & DRAINING;
}
