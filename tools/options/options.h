/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Command-line options from a table. One table says what a subcommand accepts, where the values go
 * and what --help prints. The syntax is that of getopt_long: `--name value` or `--name=value`;
 * lists are comma-separated. An error is one line on stderr. Nothing here allocates.
 */
#ifndef FATTN_TOOLS_OPTIONS_H
#define FATTN_TOOLS_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

enum { OPTION_LIST_MAX = 32, OPTION_WORD_MAX = 64 };

/* The kind of value, and the type that option.value points to. */
typedef enum option_kind {
    OPTION_SWITCH,   /* bool: no value */
    OPTION_TEXT,     /* const char *: any text; points into argv */
    OPTION_INTEGER,  /* int64_t: min..max */
    OPTION_UNSIGNED, /* uint64_t */
    OPTION_REAL,     /* double; inf and nan are accepted; the library refuses them */
    OPTION_CHOICE,   /* int: the index of the value in words */
    OPTION_INTEGERS, /* option_integers: each min..max */
    OPTION_REALS,    /* option_reals */
    OPTION_CHOICES,  /* option_choices */
    OPTION_WORDS,    /* option_words */
    OPTION_SWITCHES, /* option_choices of 0 and 1: `--name` is 1, `--name=0,1` both */
    OPTION_PAIRS     /* option_integers, taken two at a time */
} option_kind;

typedef struct option_integers {
    int count;
    int64_t at[OPTION_LIST_MAX];
} option_integers;

typedef struct option_reals {
    int count;
    double at[OPTION_LIST_MAX];
} option_reals;

typedef struct option_choices {
    int count;
    int at[OPTION_LIST_MAX];
} option_choices;

typedef struct option_words {
    int count;
    char at[OPTION_LIST_MAX][OPTION_WORD_MAX];
} option_words;

/* A row of the table; use designators from .value on. The table ends with {.name = NULL}; a row
 * with an empty name is skipped. */
typedef struct option {
    const char *name; /* without dashes, then a blank and the help's name for its value */
    const char *help; /* one line; further lines after \n */
    option_kind kind;
    void *value;
    bool *given;              /* NULL, or set to true if the option is given */
    const char *const *words; /* choices, ended by NULL */
    int64_t min, max;         /* bounds of integers; both 0: none */
    int length;               /* lists: the exact number of values; 0: 1 to OPTION_LIST_MAX */
} option;

typedef struct option_set {
    const char *command; /* "run" */
    const char *summary; /* the first lines of --help, without the last newline */
    const option *table;
    const char *notes; /* printed after the options, or NULL */
} option_set;

/* Returns 0 if all of argv[1..argc) was parsed, 1 if --help was given and printed to stdout, -1 if
 * something is wrong and was reported. */
int options_parse(const option_set *set, int argc, char **argv);

#endif
