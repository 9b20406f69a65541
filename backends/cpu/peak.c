/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One worker's share of measuring a peak; see peak.h.
 *
 * Loops run in slices so short that most of them are not interrupted, and the median slice counts.
 * Each slice of arithmetic lies between two of the clock, whose faster one is taken to be its
 * clock.
 */
#include "backends/cpu/peak.h"

#include "core/host.h"

enum {
    SLICES = 9,
    CHAIN_ADDS = 1 << 17,         /* 40 microseconds at 3 GHz */
    SLICE_INSTRUCTIONS = 1 << 19, /* 90 microseconds at 3 GHz and two a cycle */
    FED_INSTRUCTIONS = 1 << 17,   /* of each of the loops that are compared */
    READ_MIN = 8 << 20            /* bytes that a measurement of bandwidth reads at least */
};

/* n additions, n a multiple of 16, each of which waits for the one before. The empty assembly hides
 * what is known about x, or the compiler would multiply. Both operands are registers: additions of
 * constants cost nothing on some processors. */
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

/* Results go here, so that no loop is without effect. */
static _Thread_local volatile uint64_t sink_word;
static _Thread_local volatile float sink_float;

static double time_clock(void)
{
    const double start = fattn_host_seconds();
    sink_word = chain(CHAIN_ADDS, 1, 3);
    return CHAIN_ADDS / (fattn_host_seconds() - start);
}

/* Arithmetic instructions a second of a loop, in about `wanted` of them. */
static double time_compute(const fattn_cpu_peak *peak, int64_t wanted)
{
    const int64_t rounds = wanted / peak->instructions;
    const double start = fattn_host_seconds();
    sink_float = peak->compute(rounds, 0.999f, 0.001f);
    return (double)(rounds * peak->instructions) / (fattn_host_seconds() - start);
}

/* The share of them that is left where operands are loaded. Another thread on the core takes loads
 * and cache, which products in registers do not miss. They are timed before and after, as the
 * vector units may still be waking up. */
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

void fattn_cpu_peak_compute(const fattn_cpu_peak *peak, const fattn_cpu_peak *gauge,
                            fattn_peak_reading *reading)
{
    double rate[SLICES], clock[SLICES], issue[SLICES], fed[SLICES];
    _Alignas(64) float operands[FATTN_CPU_PEAK_OPERANDS];

    for (int n = 0; n < FATTN_CPU_PEAK_OPERANDS; n++) {
        operands[n] = (float)(n % 61 - 30) / 61;
    }
    (void)time_compute(peak, SLICE_INSTRUCTIONS); /* wakes the vector units */
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

fattn_cpu_passes fattn_cpu_peak_read(const fattn_cpu_peak *peak, int worker, int workers,
                                     const void *data, int64_t bytes, bool warm_up)
{
    const int64_t part = bytes / workers / 256 * 256;
    const char *const from = (const char *)data + part * worker;
    const int64_t enough = part ? READ_MIN / workers / part + 1 : 0, passes = warm_up ? 1 : enough;
    fattn_cpu_passes read = {.bytes = (double)part * (double)passes, .begun = fattn_host_seconds()};
    for (int64_t i = 0; i < passes; i++) {
        sink_word = peak->read(from, part);
    }
    read.ended = fattn_host_seconds();
    return read;
}
