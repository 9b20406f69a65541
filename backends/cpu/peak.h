/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's peak loops (core/peak.h). Each instruction set compiles its own (peak_loops.h) and
 * lists them in its table; peak.c measures with them.
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

struct fattn_cpu_team;

/* Measures with all workers of the team at once. Rates of arithmetic are added up. Bytes are
 * divided by the time from the first worker's beginning to the last one's end: added rates would
 * exceed what the memory has, since a worker that ends early leaves its share to the others.
 * gauge: the row whose loops tell reading.fed, or NULL. */
fattn_peak_reading fattn_cpu_peak_by_all(const struct fattn_cpu_team *team,
                                         const fattn_cpu_peak *peak, const fattn_cpu_peak *gauge,
                                         const void *data, int64_t bytes);

/* The measure of every row: the same with the team of a device. */
fattn_status fattn_cpu_peak_measure(void *impl, const fattn_peak *peak, const void *data,
                                    int64_t bytes, fattn_peak_reading *reading);

#endif
