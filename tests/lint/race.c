/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that add to one sum: under a reduction, or, with RACE defined, in a race. Shows that
 * ThreadSanitizer, as tools/test sets it up, reports a race and understands OpenMP's barriers.
 */
#include <stdio.h>

int main(void)
{
    int values[1000]; /* written in one region, read in the next: ordered by the barrier alone */
    int sum = 0;
#pragma omp parallel for num_threads(4)
    for (int i = 0; i < 1000; i++) values[i] = i % 7;

#ifdef RACE
#pragma omp parallel for num_threads(4) schedule(static, 1)
    for (int i = 0; i < 1000; i++) sum += values[i];
#else
#pragma omp parallel for num_threads(4) schedule(static, 1) reduction(+ : sum)
    for (int i = 0; i < 1000; i++) sum += values[i];
#endif
    return printf("%d\n", sum) < 0;
}
