/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peak loops, which measure the most that a device can do. Each does one thing only, such as fused
 * multiply-adds or reads; a backend has a table of them. `fattn bench` runs one before every
 * repetition of a kernel and reports the kernel's rate as a share of the loop's.
 *
 * A loop can be too slow itself (a spilled accumulator halves it), and would then flatter every
 * kernel. To notice that, a reading also has the clock rate, from a chain of dependent additions of
 * one cycle each or from a GPU's cycle counter: a correct loop issues a whole number of
 * instructions per cycle, or one in a whole number of cycles.
 */
#ifndef FATTN_CORE_PEAK_H
#define FATTN_CORE_PEAK_H

#include <stdbool.h>

#include "fattn/fattn.h"

typedef struct fattn_peak_reading {
    double rate;  /* flops or bytes per second, of all units of the device together */
    double clock; /* Hz; 0 for loops that memory limits */
    double issue; /* instructions per cycle and unit, on GPUs those of 32 lanes; 0 if clock is 0 */
    double fed;   /* rate when a unit also loads the operands from its nearest cache, as a share of
                   * the rate without loads; less if other work shares the unit. 0: unknown */
} fattn_peak_reading;

typedef struct fattn_peak fattn_peak;
struct fattn_peak {
    const char *name;    /* "fma f32" */
    bool reads_memory;   /* true: the rate is bytes read; false: flops */
    uint32_t dtypes;     /* FATTN_DTYPE_BIT(...) of the matrix products that this loop limits; the
                        * first row that fits a kernel counts */
    const char *kernels; /* limits only kernels whose names begin with this; NULL: all */
    int lanes;           /* elements per instruction */
    int flops; /* per lane and instruction: 1 for separate products and sums, 2 for fused ones, 4
                * for fused products of pairs */

    /* Measures for some milliseconds on all units. Loops that read memory read `bytes` bytes of
     * device memory at data: the working set of the kernel, so that both use the same caches. */
    fattn_status (*measure)(void *impl, const fattn_peak *peak, const void *data, int64_t bytes,
                            fattn_peak_reading *reading);
};

#endif
