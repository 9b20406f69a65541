/* SPDX-License-Identifier: Apache-2.0 */
/* The row type and helpers that the files of `fattn bench` share. */
#ifndef FATTN_TOOLS_BENCH_H
#define FATTN_TOOLS_BENCH_H

#include "tools/bench/sweep.h"

enum { BENCH_REPS_MAX = 301 };

typedef struct bench_row {
    const char *device, *kernel, *dir;
    const sweep_case *of;
    double median_ms;
    double gflops, gbytes_s, ceiling, ratio, fed; /* NAN: not measured */
    double cpu;        /* CPU time over wall time: processors used; NAN on a GPU */
    double cpu_wanted; /* processors that the threads can use */
    int64_t workspace;
    bool exempt; /* a peer may use instructions that are disabled for the device */
} bench_row;

typedef struct bench {
    bool json, people; /* people: stdout is a terminal */
    int64_t reps;      /* 0: as many as fit in a second */
    int peer;          /* index into peer_words; 0: none */
    bool failed;       /* a ratio or ceiling is implausible, or a budget was exceeded */
    bool header;       /* the header has been printed */
    int64_t shared;    /* rows whose cores other work shared */
    int64_t starved;   /* rows whose threads waited for processors */
    int64_t rows, peers;
    int64_t processors; /* of the last device; 0: nothing was timed */
    char checked[1024]; /* devices with checked ceilings, one per line */
} bench;

/* Prints a row. A ratio above 1.02 is a failure unless the row is exempt: peers are, and so are
 * decoding, whose reads can outrun a plain read, and planning, whose ceiling is a budget. */
void bench_report(bench *b, const bench_row *row);

/* The median of n values; sorts them. */
double bench_median(double *x, int n);

/* `--dir plan`: the cost of planning and of the one-shot cache, compared with their budgets. */
fattn_status bench_plan(bench *b, fattn_device *device, const char *device_word,
                        const sweep_case *c);

#endif
