/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a problem may be besides its sizes and tensors, as options of the command line: one table,
 * so that an option has one name, one syntax and one meaning in every subcommand. `run` takes a
 * value of each; `bench` and `explain` take lists and go through them.
 */
#ifndef FATTN_TOOLS_PROBLEM_OPTIONS_H
#define FATTN_TOOLS_PROBLEM_OPTIONS_H

#include "fattn/fattn.h"
#include "tools/options.h"

/* In the order of the table. */
enum {
    PROBLEM_DTYPE,
    PROBLEM_DTYPE_O,
    PROBLEM_LAYOUT,
    PROBLEM_CAUSAL,
    PROBLEM_ANCHOR,
    PROBLEM_WINDOW,
    PROBLEM_SCALE,
    PROBLEM_SOFTCAP,
    PROBLEM_DROPOUT,
    PROBLEM_Q_OFFSET,
    PROBLEM_K_OFFSET,
    PROBLEM_WHOLE_Q,
    PROBLEM_WHOLE_K,
    PROBLEM_BATCH_OFFSET,
    PROBLEM_HEAD_OFFSET,
    PROBLEM_BLOCK_SIZE,
    PROBLEM_DETERMINISTIC,
    PROBLEM_BATCH_INVARIANT,
    PROBLEM_ACCUMULATE,
    PROBLEM_CHECKED,
    PROBLEM_OPTIONS
};

typedef union option_list {
    int count; /* every list begins with it */
    option_integers integers;
    option_reals reals;
    option_choices choices;
} option_list;

typedef struct problem_options {
    option_list list[PROBLEM_OPTIONS]; /* count 0: not given */
} problem_options;

/* Writes PROBLEM_OPTIONS rows for the parser, whose values go into *values. single: one value
 * each. */
void problem_options_rows(problem_options *values, bool single, option *rows);

/* How many values an option was given; a pair is one. */
int problem_options_count(const problem_options *values, int which);

/* Sets what was given, the at[which]-th value of each, and leaves the rest alone. What needs a
 * feature that this problem does not have is not set; features that other options bring are in
 * problem->features before. */
void problem_options_apply(const problem_options *values, const int64_t at[PROBLEM_OPTIONS],
                           fattn_problem *problem, fattn_buffers *buffers);

/* Refuses options that would be without effect, reported as of this command. present: features
 * that other options bring, of any of the problems that will be. */
bool problem_options_check(const problem_options *values, const char *command, uint64_t present,
                           bool forward, bool backward);

#endif
