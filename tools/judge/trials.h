/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs many random cases against every kernel row of a device and reports what they covered. Used
 * by `fattn check` and tests/check_kernels.c. A pair of features that a row never ran is reported
 * with the refusal that explains it, or counts as a gap.
 */
#ifndef FATTN_TOOLS_TRIALS_H
#define FATTN_TOOLS_TRIALS_H

#include "core/feature.h"
#include "tools/judge/judge.h"

enum {
    TRIALS_FEATURES = FATTN_FEATURE_COUNT,
    TRIALS_REASONS = 48,
    TRIALS_PAIR_TIMES = 20,
    TRIALS_TRAITS = 11
};
enum { TRIALS_SOME = 500, TRIALS_ENOUGH = 4000 };

typedef struct trials_reason {
    char text[200]; /* digits as '#' */
    int64_t count;
} trials_reason;

typedef struct trials_row {
    const fattn_kernel *kernel;
    const char *missing; /* NULL, or what the device lacks to run it */
    int64_t passed, failed, declined;
    int64_t wide;     /* runs with more than 4 tiles of scores per head */
    int64_t all_zero; /* runs whose expected outputs are all 0 */
    int64_t excused;  /* elements beyond f32's range, or reached by NaN or infinities */
    int64_t traits[2][TRIALS_TRAITS]; /* runs of each op with each trait of trials.c */
    int64_t seen[TRIALS_FEATURES][TRIALS_FEATURES];
    int64_t declined_pairs[TRIALS_FEATURES][TRIALS_FEATURES];
    int why[TRIALS_FEATURES][TRIALS_FEATURES]; /* index of the latest reason */
    judge_ratios ratios[DRAW_FAMILIES];
    trials_reason reasons[TRIALS_REASONS];
    int reason_count;
} trials_row;

typedef struct trials {
    fattn_device *device;
    const char *command; /* start of the command that repeats a case: "fattn check --device cpu" */
    const char *prefix;  /* of every line: "# " in TAP */
    uint64_t seed;
    int64_t first, count;
    int jobs;
    bool verbose;
    /* NULL, or called with the number of cases judged, and with (0, 0) before a line is printed so
     * that a progress bar can be cleared. Calls never overlap; they may come from any job. */
    void (*progress)(int64_t done, int64_t count);

    trials_row *rows;
    int row_count;
    bool one_row;                    /* a single row was requested by name */
    int64_t passed, failed, skipped; /* cases: one passes if every row that takes it passes */
    int64_t reported;                /* failures, printed or not */
} trials;

/* Lists the device's rows, or only the named one. FATTN_INVALID_ARGUMENT if there is no such
 * row. */
fattn_status trials_open(trials *s, const char *kernel);

void trials_run(trials *s);

/* Findings over all cases. Gaps are no fault of a kernel: more cases are needed. */
typedef struct trials_findings {
    int medians; /* medians of errors above 1.2 times the comparator's */
    int gaps;    /* missing coverage */
} trials_findings;

/* Prints the coverage. Gaps from TRIALS_SOME cases on: a row that ran nothing, or nothing with 3 or
 * more tiles of keys; a feature that a row honours and never ran; a type, dimension or grouping
 * that no row of the device ran. From TRIALS_ENOUGH cases on: medians, pairs of features neither
 * run nor refused, and too few runs over many tiles. With fewer cases the report is the same but
 * finds nothing, because too little was drawn. */
trials_findings trials_report(const trials *s);

void trials_close(trials *s);

#endif
