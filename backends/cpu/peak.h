/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's peak loops (core/peak.h). Each instruction set compiles its own (peak_loops.h) and
 * lists them in its table; one worker's share of a measurement is here, cpu.c starts the workers
 * and puts the shares together.
 */
#ifndef FATTN_CPU_PEAK_H
#define FATTN_CPU_PEAK_H

#include "core/peak.h"

/* The types of rows of floats. */
#define FATTN_CPU_DTYPES \
    (FATTN_DTYPE_BIT(FATTN_F32) | FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))

/* Floats that loops load over and over: 16 KiB, a part of any first-level cache. */
#define FATTN_CPU_PEAK_OPERANDS 4096

typedef struct fattn_cpu_peak {
    fattn_peak row;   /* .measure is fattn_cpu_peak_measure */
    int instructions; /* arithmetic instructions of a round */

    /* One of the two. Results are returned so that the work cannot be left out. */
    float (*compute)(int64_t rounds, float factor, float summand);
    uint32_t (*read)(const void *data, int64_t bytes);

    /* As compute, with operands that are loaded; NULL where a set has no such loop. */
    float (*fed)(int64_t rounds, const float *operands);
    int fed_instructions;
} fattn_cpu_peak;

/* What a worker computes while the others do the same. gauge: the row whose loops tell
 * reading->fed, or NULL. */
void fattn_cpu_peak_compute(const fattn_cpu_peak *peak, const fattn_cpu_peak *gauge,
                            fattn_peak_reading *reading);

/* A worker reads its part of the data, as often as a measurement takes or, to warm up, once. */
typedef struct fattn_cpu_passes {
    double bytes, begun, ended; /* seconds of a clock that all workers share */
} fattn_cpu_passes;
fattn_cpu_passes fattn_cpu_peak_read(const fattn_cpu_peak *peak, int worker, int workers,
                                     const void *data, int64_t bytes, bool warm_up);

/* Measures with all workers of the device; defined where threads are. */
fattn_status fattn_cpu_peak_measure(void *impl, const fattn_peak *peak, const void *data,
                                    int64_t bytes, fattn_peak_reading *reading);

#endif
