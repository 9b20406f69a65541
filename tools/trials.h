/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many drawn cases against every kernel row of a device, and what they covered: behind `fattn
 * check` and tests/check_kernels.c. A row that exists is judged; a pair of features that a row was
 * never seen with is listed, with the refusal that explains it, or counts as a gap.
 */
#ifndef FATTN_TOOLS_TRIALS_H
#define FATTN_TOOLS_TRIALS_H

#include "tools/judge.h"

enum { TRIALS_FEATURES = 21, TRIALS_REASONS = 48, TRIALS_PAIR_TIMES = 20, TRIALS_SIGHTS = 10 };
enum { TRIALS_SOME = 500, TRIALS_ENOUGH = 4000 };

typedef struct trials_reason {
    char text[200]; /* digits as '#' */
    int64_t count;
} trials_reason;

typedef struct trials_row {
    const fattn_kernel *kernel;
    const char *missing; /* NULL, or what the device lacks to run it */
    int64_t passed, failed, declined;
    int64_t wide;     /* runs over more than 4 tiles of a head's scores */
    int64_t all_zero; /* runs that had to give nothing but zeros */
    int64_t excused;  /* elements out of f32's range, or reached by NaN and infinities */
    int64_t sights[2][TRIALS_SIGHTS]; /* runs of each op that were what trials.c names */
    int64_t seen[TRIALS_FEATURES][TRIALS_FEATURES];
    int64_t declined_pairs[TRIALS_FEATURES][TRIALS_FEATURES];
    int why[TRIALS_FEATURES][TRIALS_FEATURES]; /* a reason's index; the latest */
    judge_ratios ratios[DRAW_FAMILIES];
    trials_reason reasons[TRIALS_REASONS];
    int reason_count;
} trials_row;

typedef struct trials {
    fattn_device *device;
    const char *command; /* how to see one case again: "fattn check --device cpu" */
    const char *prefix;  /* of every line: "# " in TAP */
    uint64_t seed;
    int64_t first, count;
    int jobs;
    bool verbose;
    bool progress; /* a bar on stderr */

    trials_row *rows;
    int row_count;
    bool one_row;                    /* of the device's, named */
    int64_t passed, failed, skipped; /* cases: a case passes when every row that takes it does */
    int64_t told;                    /* failures, printed or not */
} trials;

/* Lists the device's rows, or the one that is named. FATTN_INVALID_ARGUMENT when there is none. */
fattn_status trials_open(trials *s, const char *kernel);

void trials_run(trials *s);

/* What the cases say together. Gaps are no kernel's fault: they say that more should be drawn. */
typedef struct trials_findings {
    int medians; /* of errors, above 1.2 of the comparator's */
    int gaps;    /* in what was covered */
} trials_findings;

/* Prints what was covered. Gaps from TRIALS_SOME cases on: a row that took none, or none of 3 tiles
 * of keys and more, a feature that a row honours and never saw, and a type, dimension or grouping
 * that no row of the device saw. From TRIALS_ENOUGH on: medians, and as gaps pairs neither seen nor
 * refused, too few runs over many tiles. Fewer cases print the same and find nothing: too
 * little was drawn to say. */
trials_findings trials_report(const trials *s);

void trials_close(trials *s);

#endif
