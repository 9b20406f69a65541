/* SPDX-License-Identifier: Apache-2.0 */
/* `fattn explain --ranks`: how a problem is divided over ranks, and a forecast of its time. */
#ifndef FATTN_TOOLS_RANKS_H
#define FATTN_TOOLS_RANKS_H

#include "tools/bench/sweep.h"

enum { RANKS_OPTIONS = 8 };

typedef struct ranks_options {
    int64_t ranks; /* 0: not given */
    int scheme;    /* fattn_scheme */
    int split;     /* fattn_split; 0: chosen by the masks */
    option_reals link;
    double rate, row;
    int64_t memory; /* most bytes of a rank's plan; 0: not given */
    bool saves;
    bool any; /* an option other than --ranks is given */
} ranks_options;

/* Writes RANKS_OPTIONS rows for the parser; their values go into *values. */
void ranks_rows(ranks_options *values, option *rows);

/* Refuses options that would have no effect, and numbers that make no sense. */
bool ranks_check(const ranks_options *values, const char *command);

/* Prints how a case is divided, and returns an exit code. */
int ranks_explain(const ranks_options *values, const sweep_case *c);

#endif
