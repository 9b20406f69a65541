/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of `fattn bench` share: a row of its table. */
#ifndef FATTN_TOOLS_BENCH_H
#define FATTN_TOOLS_BENCH_H

#include "tools/sweep.h"

enum { BENCH_REPS_MAX = 301 };

typedef struct bench_row {
    const char *device, *kernel, *dir;
    const sweep_case *of;
    double median_ms;
    double gflops, gbytes_s, ceiling, ratio, fed; /* NAN where there is none */
    double cpu;        /* CPU time over wall time: processors in use; NAN on a GPU */
    double cpu_wanted; /* processors that the threads could keep busy */
    int64_t workspace;
    bool exempt; /* a peer may use instructions that the device was told to leave alone */
} bench_row;

typedef struct bench {
    bool json, people; /* people: stdout is a terminal */
    int64_t reps;      /* 0: as many as fit a second */
    int peer;          /* of peer_words: 0 none */
    bool failed;       /* a ratio or a ceiling cannot be true, or a budget was exceeded */
    bool header;       /* has been printed */
    int64_t shared;    /* rows during which units did other work too */
    int64_t starved;   /* rows whose threads did not get the processors that they wanted */
    int64_t rows, peers;
    char checked[1024]; /* the devices whose ceilings were checked, one a line */
} bench;

/* Prints a row, and notes a ratio above 1.02 as a failure unless it is exempt: peers, and decoding,
 * which may fetch from more places at once than a plain read does. */
void bench_report(bench *b, const bench_row *row);

/* The median of n values, which are sorted by it. */
double bench_median(double *x, int n);

/* Seconds since some moment in the past. */
double bench_now(void);

/* `--dir plan`: what planning and the one-shot cache cost, against their budgets. */
fattn_status bench_plan(bench *b, fattn_device *device, const char *device_word,
                        const sweep_case *c);

#endif
