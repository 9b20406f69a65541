/* SPDX-License-Identifier: Apache-2.0 */
/* The larger of two errors. NaN is the largest of all and stays, where fmax() and plain comparisons
 * lose it, and with it the fault that a test was to find. */
#ifndef FATTN_TESTS_WORST_H
#define FATTN_TESTS_WORST_H

static inline double worst_of(double worst, double error)
{
    return worst != worst || error <= worst ? worst : error;
}

#endif
