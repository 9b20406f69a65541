/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The problems that `bench` and `explain` are asked about: options that take lists, and every
 * combination of their values.
 */
#ifndef FATTN_TOOLS_SWEEP_H
#define FATTN_TOOLS_SWEEP_H

#include "fattn/fattn.h"
#include "tools/options.h"

typedef enum sweep_dir { SWEEP_FWD, SWEEP_BWD, SWEEP_DECODE, SWEEP_PLAN } sweep_dir;

/* The lists as given; those that are empty have one default value. */
typedef struct sweep {
    option_words device, kernel;
    option_choices dir, dtype, causal, layout, bias, mask, alibi;
    option_integers b, hq, hk, sq, sk, d, dv, threads;
    option_reals softcap, dropout;
} sweep;

typedef struct sweep_case {
    const char *device; /* NULL: the default device */
    const char *kernel; /* NULL: the planner's choice */
    sweep_dir dir;
    const char *dtype; /* the words for a report */
    const char *dir_word;
    int64_t threads; /* 0: not asked for */
    bool causal, bias, mask, alibi;
    fattn_problem problem; /* op is FORWARD, except for SWEEP_BWD */
} sweep_case;

enum { SWEEP_OPTIONS = 19 };

/* Writes SWEEP_OPTIONS rows for the parser, whose values go into *s. */
void sweep_options(sweep *s, option *rows);

/* How many cases there are, at least 1, and the n-th of them; the options that come first vary
 * slowest. */
int64_t sweep_count(const sweep *s);
void sweep_at(const sweep *s, int64_t n, sweep_case *c);

/* Lengths and element strides of the bias (1, Hq, Sq, Sk) and the mask (B, 1, Sq, Sk). */
int64_t sweep_bias_count(const fattn_problem *p);
int64_t sweep_mask_count(const fattn_problem *p);

/* Floating-point operations of the matrix products by the usual convention: all pairs, or those
 * under the diagonal, which is half of them for a causal square. */
double sweep_flops(const sweep_case *c);

/* What limits which keys are seen, in a word: "none", "causal", "mask", "causal+mask". */
const char *sweep_mask_word(const sweep_case *c);

#endif
