/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a kernel row on a case and judges what comes out: against the oracle within the accuracy
 * bound of docs/NUMERICS.md, element by element in class (finite, infinite, NaN), and byte by byte
 * in what must not change: inputs, gaps, rings around every tensor and the workspace.
 */
#ifndef FATTN_TOOLS_JUDGE_H
#define FATTN_TOOLS_JUDGE_H

#include "backends/reference/naive.h"
#include "core/kernel.h"
#include "tools/judge/random_case.h"

/* What a case should give, computed at the first row that takes it. */
typedef struct judge_truth {
    bool known;
    fattn_problem problem; /* normalised, strides as random_image.c spells them */
    fattn_buffers buffers;
    fattn_naive exact, plain; /* float64 and the comparator */
} judge_truth;

void judge_truth_free(judge_truth *truth);

/* How often a kernel's error was so many times the comparator's, slice by slice: 2^(n / 16) in bin
 * JUDGE_ONE + n. Slices where both are exact do not count. */
enum { JUDGE_BINS = 256, JUDGE_ONE = 128 };

typedef struct judge_ratios {
    int64_t count;
    int64_t bins[JUDGE_BINS];
} judge_ratios;

double judge_median(const judge_ratios *ratios);

typedef enum judge_outcome {
    JUDGE_PASSED,
    JUDGE_DECLINED, /* the row does not take the problem: a reason */
    JUDGE_FAILED,
} judge_outcome;

typedef struct judge_verdict {
    judge_outcome outcome;
    char reason[512];
    int64_t br, bc, splits;
    int64_t tiles;   /* of the score matrix of one head */
    int64_t excused; /* elements where f32 arithmetic itself leaves its range */
    double worst;    /* largest error over its tolerance */
    bool all_zero;   /* every expected output is 0: the case says little */
    judge_ratios ratios;
} judge_verdict;

/* kernel NULL: whatever the planner takes. */
void judge_run(fattn_device *device, const fattn_kernel *kernel, const draw_case *c,
               judge_truth *truth, judge_verdict *verdict);

#endif
