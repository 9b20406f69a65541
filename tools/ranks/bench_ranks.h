/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn bench --ranks`: measures problems that are divided over the processes of MPI, next to the
 * forecast, for which it first measures the link and the rate of one rank. */
#ifndef FATTN_TOOLS_BENCH_RANKS_H
#define FATTN_TOOLS_BENCH_RANKS_H

#include "tools/bench/sweep.h"

enum { BENCH_RANKS_OPTIONS = 5 };

typedef struct bench_ranks {
    bool wanted, any; /* any: an option other than --ranks is given */
    int scheme;       /* fattn_scheme */
    int split;        /* fattn_split; 0: chosen by the masks */
    double timeout;
    bool saves;
} bench_ranks;

/* Writes BENCH_RANKS_OPTIONS rows for the parser; their values go into *values. */
void bench_ranks_rows(bench_ranks *values, option *rows);

/* Every rank runs all cases; the first prints a line each. Returns an exit code. */
int bench_ranks_run(const bench_ranks *values, const sweep *s, int64_t reps);

#endif
