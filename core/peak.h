/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a device can do at best, measured: loops that do one thing only, as rows of a backend's
 * table. `fattn bench` runs one before every repetition of a kernel and reports the kernel as a
 * share of it.
 *
 * A loop can be wrong too (a spilled accumulator halves it), and then flatters every kernel. So a
 * reading also holds the clock, from a chain of dependent additions that take one cycle each or
 * from a GPU's counter of cycles, and the loop must reach a whole number of instructions a cycle,
 * or one in a whole number of cycles.
 */
#ifndef FATTN_CORE_PEAK_H
#define FATTN_CORE_PEAK_H

#include <stdbool.h>

#include "fattn/fattn.h"

typedef struct fattn_peak_reading {
    double rate;  /* flops or bytes a second, all units of the device together */
    double clock; /* Hz; 0 for loops that memory limits */
    double issue; /* instructions a cycle and unit, on GPUs of 32 lanes; 0 like clock */
    double fed;   /* share of its products that a unit still makes when it loads their operands from
                   * its nearest cache; less where other work has a part of the unit. 0: unknown */
} fattn_peak_reading;

typedef struct fattn_peak fattn_peak;
struct fattn_peak {
    const char *name;  /* "fma f32" */
    bool reads_memory; /* the rate is bytes of data read; else flops */
    uint32_t dtypes;   /* FATTN_DTYPE_BIT(...): whose matrix products this limits. First row wins */
    const char *kernels; /* limits those alone whose names begin so; NULL: all */
    int lanes;           /* elements an instruction works on */
    int flops; /* a lane and instruction: 1 when products and sums are apart, 2 when fused, 4 when
                * of pairs */

    /* Takes some milliseconds on all units. data is bytes of device memory, read by loops that read
     * memory; the working set of the kernel itself, so that both meet the same caches. */
    fattn_status (*measure)(void *impl, const fattn_peak *peak, const void *data, int64_t bytes,
                            fattn_peak_reading *reading);
};

#endif
