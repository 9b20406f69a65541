/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The problems that `bench` and `explain` are asked about: options that take lists, and every
 * combination of their values.
 */
#ifndef FATTN_TOOLS_SWEEP_H
#define FATTN_TOOLS_SWEEP_H

#include "fattn/fattn.h"
#include "tools/problem_options.h"

typedef enum sweep_dir { SWEEP_FWD, SWEEP_BWD, SWEEP_DECODE, SWEEP_PLAN } sweep_dir;

enum { SWEEP_OPTIONS = PROBLEM_OPTIONS + 27, SWEEP_MORE = 4 };

/* The lists as given; those that are empty have one default value. */
typedef struct sweep {
    option_words device, kernel;
    option_choices dir, bias, dtype_bias, mask, block_mask, alibi, sink, dlse, lse, dbias, dsink,
        cu_seqlens_q, cu_seqlens_k;
    option_integers b, hq, hk, sq, sk, d, dv, seqused_q, seqused_k, page_size, threads;
    option_reals density;
    problem_options problem;
    option rows[SWEEP_OPTIONS + SWEEP_MORE + 1]; /* for the parser; the caller's own come last */
} sweep;

typedef struct sweep_case {
    const char *device; /* NULL: the default device */
    const char *kernel; /* NULL: the planner's choice */
    sweep_dir dir;
    const char *dir_word;
    int64_t threads;        /* 0: not asked for */
    double density;         /* share of the blocks of a block mask that are kept */
    int64_t used_q, used_k; /* of every sequence, with FATTN_SEQUSED_Q and _K */
    fattn_problem problem;  /* op is FORWARD, except for SWEEP_BWD */
    fattn_buffers buffers;  /* positions */
} sweep_case;

/* Fills s->rows. *s is all zero, and stays where it is. */
void sweep_options(sweep *s);

/* Refuses options without effect, reported as of this command. */
bool sweep_check(const sweep *s, const char *command);

/* How many cases there are, at least 1, and the n-th of them; the options that come first vary
 * slowest. */
int64_t sweep_count(const sweep *s);
void sweep_at(const sweep *s, int64_t n, sweep_case *c);

/* Rows or keys that sequence b owns. Where they are packed, every second one is half as long. */
int64_t sweep_length(int64_t longest, bool packed, int64_t b);

/* Lengths and element strides of the bias (1, Hq, Sq, Sk) and the mask (B, 1, Sq, Sk), and of the
 * block mask (1, 1, ceil(Sq / M), ceil(Sk / N)). */
int64_t sweep_bias_count(const fattn_problem *p);
int64_t sweep_mask_count(const fattn_problem *p);
int64_t sweep_block_count(const fattn_problem *p);

/* Floating-point operations of the matrix products by the usual convention: all pairs, or those
 * under the diagonal, which is half of them for a causal square. Windows, positions and lengths are
 * counted pair by pair, block masks by their density. */
double sweep_flops(const sweep_case *c);

/* Keys and values that are there and not read, in bytes: beyond --seqused-k. */
double sweep_unread_bytes(const sweep_case *c);

/* What limits which keys are seen, in a word: "none", "causal", "mask", "causal+mask". */
const char *sweep_mask_word(const sweep_case *c);

/* Everything else that the problem has, "window(128,0)+sink"; "-" where there is nothing. */
void sweep_words(const sweep_case *c, char *text, size_t size);

#endif
