/* SPDX-License-Identifier: Apache-2.0 */
/* Clocks, and medians of what they measured. Include it with _POSIX_C_SOURCE or _GNU_SOURCE. */
#ifndef FATTN_BENCH_TIMES_H
#define FATTN_BENCH_TIMES_H

#include <stdlib.h>
#include <time.h>

/* Seconds of a clock. */
static inline double times_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double times_now(void) { return times_of(CLOCK_MONOTONIC); }

static inline int times_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline void times_sort(double *x, int n) { qsort(x, (size_t)n, sizeof *x, times_compare); }

/* Sorts them. Of an even number, the mean of the two in the middle. */
static inline double times_median(double *x, int n)
{
    times_sort(x, n);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

#endif
