/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of features: for each one its names, its numbers in fattn_problem with their defaults
 * and bounds, and its option in the tool `fattn`. Validation, reasons, fattn_plan_describe(), JSON,
 * the options of `fattn` and the random problems of `fattn check` read these rows. A new feature
 * that consists of a bit and some numbers needs one row here, and kernels that honour it.
 */
#ifndef FATTN_CORE_FEATURE_H
#define FATTN_CORE_FEATURE_H

#include <stdbool.h>
#include <stddef.h>

#include "fattn/fattn.h"

enum { FATTN_FEATURE_COUNT = __builtin_popcountll(FATTN_FEATURES_ALL), FATTN_FEATURE_FIELDS = 4 };

typedef enum fattn_field_kind {
    FATTN_FIELD_INTEGER,
    FATTN_FIELD_REAL,
    FATTN_FIELD_DTYPE
} fattn_field_kind;

typedef struct fattn_feature_field {
    const char *name; /* in fattn_problem; NULL after the last */
    size_t offset;
    fattn_field_kind kind;
    int64_t usual;     /* its value without the feature: the default */
    int64_t low, high; /* bounds of an integer with the feature; both 0: problem.c has the rule */
} fattn_feature_field;

typedef struct fattn_feature {
    uint64_t bit;
    const char *constant; /* "FATTN_WINDOW" */
    const char *name;     /* "window" */
    const char *option;   /* "window L,R", without dashes; NULL if the table cannot describe it */
    const char *help;     /* of the option; \n begins a new line */
    int values;           /* how many of the fields are the option's value, and are printed */
    bool zero_is_none;    /* 0 as the option's value turns the feature off */
    bool on_diagonal; /* depends on the alignment of queries with keys: on anchor and positions */
    fattn_feature_field fields[FATTN_FEATURE_FIELDS + 1];
} fattn_feature;

/* The row of bit 0 .. FATTN_FEATURE_COUNT - 1. */
const fattn_feature *fattn_feature_row(int bit);

/* The name of feature bit `bit`, as in "cu_seqlens_q"; NULL past the last. */
const char *fattn_feature_name(int bit);

/* The value of a field of a problem: an integer or dtype, or a real number. */
int64_t fattn_feature_integer(const fattn_problem *problem, const fattn_feature_field *field);
double fattn_feature_real(const fattn_problem *problem, const fattn_feature_field *field);

/* Writes the feature's value in brackets, as in "(128,0)", or nothing where it has none. Returns
 * text. */
const char *fattn_feature_value(const fattn_problem *problem, int bit, char *text, size_t size);

#endif
