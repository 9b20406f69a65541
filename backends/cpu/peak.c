/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures a peak, on each worker and on all together; see peak.h.
 *
 * Loops run in slices so short that most of them are not interrupted, and the median slice counts.
 * Each slice of arithmetic is preceded and followed by a measurement of the clock frequency, and
 * the higher of the two is taken for the slice.
 */
#include "backends/cpu/peak.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>

#include "backends/cpu/team.h"
#include "core/host.h"

/* --- One worker ------------------------------------------------------------------------------- */

enum {
    SLICES = 9,
    CHAIN_ADDS = 1 << 17,         /* 40 microseconds at 3 GHz */
    SLICE_INSTRUCTIONS = 1 << 19, /* 90 microseconds at 3 GHz and two a cycle */
    FED_INSTRUCTIONS = 1 << 17,   /* in each of the loops that are compared */
    READ_MIN = 8 << 20            /* the least number of bytes read by a measurement of bandwidth */
};

/* n dependent additions. n: a multiple of 16. The empty assembly hides the values from the
 * compiler, which would multiply instead. Both operands are registers, since additions of constants
 * cost nothing on some processors. */
static uint64_t chain(int64_t n, uint64_t x, uint64_t y)
{
#define ADD \
    x += y; \
    __asm__ volatile("" : "+r"(x), "+r"(y));
    for (; n > 0; n -= 16) {
        ADD ADD ADD ADD ADD ADD ADD ADD ADD ADD ADD ADD ADD ADD ADD ADD
    }
#undef ADD
    return x;
}

static double median(double *x, int n)
{
    for (int i = 1; i < n; i++) {
        const double y = x[i];
        int at = i;
        for (; at > 0 && x[at - 1] > y; at--) {
            x[at] = x[at - 1];
        }
        x[at] = y;
    }
    return x[n / 2];
}

/* Results are stored here, so that compilers cannot remove the loops. */
static _Thread_local volatile uint64_t sink_word;
static _Thread_local volatile float sink_float;

/* The clock frequency in Hz, if an addition takes a cycle. */
static double time_clock(void)
{
    const double start = fattn_host_seconds();
    sink_word = chain(CHAIN_ADDS, 1, 3);
    return CHAIN_ADDS / (fattn_host_seconds() - start);
}

/* The arithmetic instructions per second of a loop, measured over about `wanted` of them. */
static double time_compute(const fattn_cpu_peak *peak, int64_t wanted)
{
    const int64_t rounds = wanted / peak->instructions;
    const double start = fattn_host_seconds();
    sink_float = peak->compute(rounds, 0.999f, 0.001f);
    return (double)(rounds * peak->instructions) / (fattn_host_seconds() - start);
}

/* The rate of the loop whose operands are loaded, relative to the loop in registers. Another thread
 * on the same core takes load slots and cache, which only the former needs. The latter is timed
 * before and after, since the vector units may still be powering up. */
static double time_fed(const fattn_cpu_peak *peak, const float *operands)
{
    const int64_t rounds = FED_INSTRUCTIONS / peak->fed_instructions;
    const double before = time_compute(peak, FED_INSTRUCTIONS);
    const double start = fattn_host_seconds();
    sink_float = peak->fed(rounds, operands);
    const double rate = (double)(rounds * peak->fed_instructions) / (fattn_host_seconds() - start);
    const double after = time_compute(peak, FED_INSTRUCTIONS);
    return rate / (after > before ? after : before);
}

/* Measures arithmetic on a worker while the others do the same. */
static void compute(const fattn_cpu_peak *peak, const fattn_cpu_peak *gauge,
                    fattn_peak_reading *reading)
{
    double rate[SLICES], clock[SLICES], issue[SLICES], fed[SLICES];
    _Alignas(64) float operands[FATTN_CPU_PEAK_OPERANDS];

    for (int n = 0; n < FATTN_CPU_PEAK_OPERANDS; n++) {
        operands[n] = (float)(n % 61 - 30) / 61;
    }
    (void)time_compute(peak, SLICE_INSTRUCTIONS); /* powers up the vector units */
    double before = time_clock();
    for (int i = 0; i < SLICES; i++) {
        rate[i] = time_compute(peak, SLICE_INSTRUCTIONS);
        const double after = time_clock();
        clock[i] = after > before ? after : before;
        issue[i] = rate[i] / clock[i];
        fed[i] = gauge ? time_fed(gauge, operands) : 0;
        before = after;
    }
    reading->issue = median(issue, SLICES);
    reading->clock = median(clock, SLICES);
    reading->rate = median(rate, SLICES) * peak->row.lanes * peak->row.flops;
    reading->fed = median(fed, SLICES);
}

typedef struct passes {
    double bytes, begun, ended; /* begun, ended: seconds on a clock that all workers share */
} passes;

typedef enum reading_kind { WARM_UP, MEASURE } reading_kind;

/* Reads a worker's part of the data, as often as a measurement takes or, to warm up, once. */
static passes read_part(const fattn_cpu_peak *peak, int worker, int workers, const void *data,
                        int64_t bytes, reading_kind kind)
{
    const int64_t part = bytes / workers / 256 * 256;
    const char *const from = (const char *)data + part * worker;
    const int64_t enough = part ? READ_MIN / workers / part + 1 : 0;
    const int64_t times = kind == WARM_UP ? 1 : enough;
    passes read = {.bytes = (double)part * (double)times, .begun = fattn_host_seconds()};
    for (int64_t i = 0; i < times; i++) {
        sink_word = peak->read(from, part);
    }
    read.ended = fattn_host_seconds();
    return read;
}

/* --- All together ----------------------------------------------------------------------------- */

/* Gathers workers that measure together, in one word. Its lower half counts those that have come.
 * Its upper half is 0 until the group is closed, and then their number. */
typedef struct rendezvous {
    atomic_uint_least64_t state;
} rendezvous;
#define CLOSED (UINT64_C(1) << 32)

/* Waits until `expected` workers have come, or for a tenth of a second, since some may not exist.
 * Returns how many have come, and in *number this worker's number among them. Returns 0 to a worker
 * that comes too late. */
static int gather(rendezvous *m, int expected, int *number)
{
    const double until = fattn_host_seconds() + 0.1;
    uint64_t state = atomic_load(&m->state), next;
    do {
        if (state >= CLOSED) {
            return 0;
        }
        next = state + 1 == (uint64_t)expected ? (state + 1) * (CLOSED + 1) : state + 1;
    } while (!atomic_compare_exchange_weak(&m->state, &state, next));
    *number = (int)state;
    while ((state = atomic_load(&m->state)) < CLOSED) {
        if (fattn_host_seconds() > until) {
            (void)atomic_compare_exchange_strong(&m->state, &state, state * (CLOSED + 1));
        } else {
            sched_yield();
        }
    }
    return (int)(state / CLOSED);
}

static void add(_Atomic double *sum, double x)
{
    double at = atomic_load(sum);
    while (!atomic_compare_exchange_weak(sum, &at, at + x)) {}
}

static void lower_to(_Atomic double *least, double x)
{
    double at = atomic_load(least);
    while (x < at && !atomic_compare_exchange_weak(least, &at, x)) {}
}

static void raise_to(_Atomic double *most, double x)
{
    double at = atomic_load(most);
    while (x > at && !atomic_compare_exchange_weak(most, &at, x)) {}
}

typedef struct measurement {
    const fattn_cpu_peak *peak, *gauge;
    const void *data;
    int64_t bytes;
    int workers; /* the most workers there may be */
    rendezvous *first, *second;
    _Atomic double *rate, *clock, *issue, *fed; /* sums */
    _Atomic double *begun, *ended;
} measurement;

static void work_compute(void *context, int phase, int worker)
{
    const measurement *const m = context;
    fattn_peak_reading own = {0};
    int number = 0;
    (void)phase, (void)worker;
    if (gather(m->first, m->workers, &number)) {
        compute(m->peak, m->gauge, &own);
        add(m->rate, own.rate);
        add(m->clock, own.clock);
        add(m->issue, own.issue);
        add(m->fed, own.fed);
    }
}

static void work_read(void *context, int phase, int worker)
{
    const measurement *const m = context;
    int number = 0, again = 0;
    (void)phase, (void)worker;
    const int here = gather(m->first, m->workers, &number);
    if (here) {
        (void)read_part(m->peak, number, here, m->data, m->bytes, WARM_UP);
        (void)gather(m->second, here, &again);
        const passes own = read_part(m->peak, number, here, m->data, m->bytes, MEASURE);
        lower_to(m->begun, own.begun);
        raise_to(m->ended, own.ended);
        add(m->rate, own.bytes);
    }
}

fattn_peak_reading fattn_cpu_peak_by_all(const fattn_cpu_team *team, const fattn_cpu_peak *peak,
                                         const fattn_cpu_peak *gauge, const void *data,
                                         int64_t bytes)
{
    rendezvous first = {0}, second = {0};
    _Atomic double rate = 0, clock = 0, issue = 0, fed = 0, begun = INFINITY, ended = 0;
    measurement m = {.peak = peak,
                     .gauge = gauge,
                     .data = data,
                     .bytes = bytes,
                     .workers = team->threads,
                     .first = &first,
                     .second = &second,
                     .rate = &rate,
                     .clock = &clock,
                     .issue = &issue,
                     .fed = &fed,
                     .begun = &begun,
                     .ended = &ended};
    fattn_cpu_job job = {.work = peak->row.reads_memory ? work_read : work_compute,
                         .context = &m,
                         .phases = 1,
                         .workers = m.workers};
    fattn_cpu_team_run(team, &job);
    const double here = (double)(atomic_load(&first.state) / CLOSED);
    fattn_peak_reading reading = {
        .rate = rate, .clock = clock / here, .issue = issue / here, .fed = fed / here};
    if (peak->row.reads_memory) {
        reading.rate = rate > 0 ? rate / (ended - begun) : 0;
    }
    return reading;
}
