/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn bench --ranks`: problems divided over the processes of MPI, beside what the forecast makes
 * of the link and of the rate of one rank, measured first. */
#ifndef FATTN_TOOLS_BENCH_RANKS_H
#define FATTN_TOOLS_BENCH_RANKS_H

#include "tools/bench/sweep.h"

enum { BENCH_RANKS_OPTIONS = 4 };

typedef struct bench_ranks {
    bool wanted, any; /* any: one of the others is given */
    int scheme;       /* fattn_scheme */
    int split;        /* fattn_split; 0: chosen by the masks */
    double timeout;
} bench_ranks;

/* Writes BENCH_RANKS_OPTIONS rows for the parser; their values go into *values. */
void bench_ranks_rows(bench_ranks *values, option *rows);

/* Every rank runs all cases; the first prints a line each. Returns an exit code. */
int bench_ranks_run(const bench_ranks *values, const sweep *s, int64_t reps);

#endif
