/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's peak loops (core/peak.h). Each instruction set compiles its own (peak_loops.h) and
 * lists them in its table; peak.c measures with them.
 */
#ifndef FATTN_CPU_PEAK_H
#define FATTN_CPU_PEAK_H

#include "core/peak.h"

/* The dtypes of kernels and peaks that compute in floats. */
#define FATTN_CPU_DTYPES \
    (FATTN_DTYPE_BIT(FATTN_F32) | FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))

/* How many floats the loops with loaded operands read over and over: 16 KiB, a part of any
 * first-level cache. */
#define FATTN_CPU_PEAK_OPERANDS 4096

typedef struct fattn_cpu_peak {
    fattn_peak row;   /* .measure is fattn_cpu_peak_measure */
    int instructions; /* arithmetic instructions per round */

    /* One of these two is not NULL. They return results so that compilers cannot remove the
     * work. */
    float (*compute)(int64_t rounds, float factor, float summand);
    uint32_t (*read)(const void *data, int64_t bytes);

    /* compute() with operands that are loaded; NULL if an instruction set has no such loop. */
    float (*fed)(int64_t rounds, const float *operands);
    int fed_instructions;
} fattn_cpu_peak;

struct fattn_cpu_team;

/* Measures with all workers of the team at once. Rates of arithmetic are added up. For memory, the
 * bytes of all workers are divided by the time from the first worker's start to the last one's end:
 * the sum of their rates would exceed the memory's bandwidth, since a worker that ends early leaves
 * its share to the others. gauge: the row whose loops measure reading.fed, or NULL */
fattn_peak_reading fattn_cpu_peak_by_all(const struct fattn_cpu_team *team,
                                         const fattn_cpu_peak *peak, const fattn_cpu_peak *gauge,
                                         const void *data, int64_t bytes);

/* fattn_peak.measure of every row: fattn_cpu_peak_by_all() with the team of the device. */
fattn_status fattn_cpu_peak_measure(void *impl, const fattn_peak *peak, const void *data,
                                    int64_t bytes, fattn_peak_reading *reading);

#endif
