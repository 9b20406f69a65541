/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a kernel row on a case and judges the result. Values are compared with the oracle within the
 * accuracy bound of docs/NUMERICS.md, and by class (finite, infinite, NaN). Bytes that must not
 * change are compared exactly: inputs, gaps, and rings around every tensor and the workspace.
 */
#ifndef FATTN_TOOLS_JUDGE_H
#define FATTN_TOOLS_JUDGE_H

#include "backends/reference/naive.h"
#include "core/kernel.h"
#include "tools/judge/random_case.h"

/* The expected results of a case, computed when the first row takes it. */
typedef struct judge_truth {
    bool known;
    fattn_problem problem; /* normalised, with the explicit strides of random_image.c */
    fattn_buffers buffers;
    fattn_naive exact, plain; /* the oracle in f64, and the comparator */
} judge_truth;

void judge_truth_free(judge_truth *truth);

/* Histogram of a kernel's error over the comparator's, slice by slice: bin JUDGE_ONE + n holds
 * ratios around 2^(n / 16). Slices where both errors are 0 do not count. */
enum { JUDGE_BINS = 256, JUDGE_ONE = 128 };

typedef struct judge_ratios {
    int64_t count;
    int64_t bins[JUDGE_BINS];
} judge_ratios;

double judge_median(const judge_ratios *ratios);

typedef enum judge_outcome {
    JUDGE_PASSED,
    JUDGE_DECLINED, /* the row does not take the problem; reason says why */
    JUDGE_FAILED,
} judge_outcome;

typedef struct judge_verdict {
    judge_outcome outcome;
    char reason[512];
    int64_t br, bc, splits;
    int64_t tiles;   /* of the score matrix of one head */
    int64_t excused; /* elements not judged: f32 arithmetic itself overflows */
    double worst;    /* largest error over its tolerance */
    bool all_zero;   /* every expected output is 0: the case tests little */
    judge_ratios ratios;
} judge_verdict;

/* kernel NULL: the planner's choice. */
void judge_run(fattn_device *device, const fattn_kernel *kernel, const draw_case *c,
               judge_truth *truth, judge_verdict *verdict);

#endif
