/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything about a problem except its sizes and tensors, as command-line options. One table gives
 * an option the same name, syntax and meaning in every subcommand. `run` takes one value of each;
 * `bench` and `explain` take lists and combine them.
 */
#ifndef FATTN_TOOLS_PROBLEM_OPTIONS_H
#define FATTN_TOOLS_PROBLEM_OPTIONS_H

#include "core/feature.h"
#include "tools/options/options.h"

/* In the order of the help. Each feature has one; its row is empty if core/feature.h gives the
 * feature no option. */
enum {
    PROBLEM_DTYPE,
    PROBLEM_DTYPE_KV,
    PROBLEM_DTYPE_V,
    PROBLEM_DTYPE_O,
    PROBLEM_DTYPE_BIAS,
    PROBLEM_LAYOUT,
    PROBLEM_FEATURES, /* bit 0 and so on */
    PROBLEM_ANCHOR = PROBLEM_FEATURES + FATTN_FEATURE_COUNT,
    PROBLEM_Q_OFFSET,
    PROBLEM_K_OFFSET,
    PROBLEM_WHOLE_Q,
    PROBLEM_WHOLE_K,
    PROBLEM_BATCH_OFFSET,
    PROBLEM_HEAD_OFFSET,
    PROBLEM_BLOCK_SIZE,
    PROBLEM_POINTER_ALIGNMENT,
    PROBLEM_OPTIONS
};

/* The option of a feature. */
#define PROBLEM_OF(feature) (PROBLEM_FEATURES + __builtin_ctzll(feature))

/* Features that depend on the diagonal, and so on its anchor and on positions. */
uint64_t problem_on_diagonal(void);

/* Writes "--causal, --window or --alibi" for a set of features. Returns text. */
const char *problem_feature_options(uint64_t features, char *text, size_t size);

typedef union option_list {
    int count; /* first member of every list */
    option_integers integers;
    option_reals reals;
    option_choices choices;
} option_list;

typedef struct problem_options {
    option_list list[PROBLEM_OPTIONS]; /* count 0: not given */
} problem_options;

/* Writes PROBLEM_OPTIONS rows for the parser, some of them empty; their values go into *values.
 * single: each takes one value, for arrays that the command reads. */
void problem_options_rows(problem_options *values, bool single, option *rows);

/* The number of values given for an option; a pair counts as one. */
int problem_options_count(const problem_options *values, int which);

/* Writes the at[which]-th value of each given option to the problem and the buffers, and leaves
 * other fields alone. Skips an option whose feature this problem does not have. Before the call,
 * problem->features must hold the features that other options set. */
void problem_options_apply(const problem_options *values, const int64_t at[PROBLEM_OPTIONS],
                           fattn_problem *problem, fattn_buffers *buffers);

/* Refuses options that would have no effect; the error names this command. present: the union of
 * the features that other options set in any of the problems. */
bool problem_options_check(const problem_options *values, const char *command, uint64_t present,
                           bool forward, bool backward);

/* The forward that writes o and lse for a backward. */
fattn_problem problem_forward_of(const fattn_problem *backward);

#endif
