/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The problems of `bench` and `explain`: options that take lists, and every combination of their
 * values.
 */
#ifndef FATTN_TOOLS_SWEEP_H
#define FATTN_TOOLS_SWEEP_H

#include "fattn/fattn.h"
#include "tools/options/problem_options.h"

typedef enum sweep_dir { SWEEP_FWD, SWEEP_BWD, SWEEP_DECODE, SWEEP_PLAN } sweep_dir;

enum { SWEEP_OPTIONS = PROBLEM_OPTIONS + 35, SWEEP_MORE = 8 };

/* The arrays of positions, whose values differ from sequence to sequence. */
enum { SWEEP_Q_OFFSETS, SWEEP_K_OFFSETS, SWEEP_WHOLES_Q, SWEEP_WHOLES_K, SWEEP_PLACES };

/* The lists as given. An empty list stands for its default value. */
typedef struct sweep {
    option_words device, kernel;
    option_choices dir, bias, mask, block_mask, alibi, alibi_bias, sink, descale, dlse, lse, dbias,
        dsink, cu_seqlens_q, cu_seqlens_k, places[SWEEP_PLACES], scores, probabilities;
    option_integers b, hq, hk, sq, sk, d, dv, seqused_q, seqused_k, seqstart_k, page_size, threads;
    option_reals density;
    problem_options problem;
    option rows[SWEEP_OPTIONS + SWEEP_MORE + 1]; /* for the parser; the caller appends its own */
} sweep;

typedef struct sweep_case {
    const char *device; /* NULL: the default device */
    const char *kernel; /* NULL: the planner's choice; "all" is every row that takes it */
    sweep_dir dir;
    const char *dir_word;
    int64_t threads;           /* 0: the device's default */
    double density;            /* share of the blocks of a block mask that are kept */
    int64_t used_q, used_k;    /* with FATTN_SEQUSED_Q, _K: for every sequence */
    int64_t start_k;           /* with FATTN_SEQSTART_K: the same */
    bool places[SWEEP_PLACES]; /* given as an array: half the scalar for every second sequence */
    bool inspected[FATTN_PROBABILITIES + 1]; /* by fattn_inspection: write this matrix too */
    fattn_problem problem;                   /* op is FORWARD, except for SWEEP_BWD */
    fattn_buffers buffers;                   /* positions only */
} sweep_case;

/* What a command does with its cases. */
typedef enum sweep_use { SWEEP_RUNS, SWEEP_EXPLAINS } sweep_use;

/* Fills s->rows. *s must be zeroed, and must not move afterwards: the rows point into it. A command
 * that explains has no direction "plan". */
void sweep_options(sweep *s, sweep_use use);

/* Refuses options that would have no effect; the error names this command. */
bool sweep_check(const sweep *s, const char *command);

/* The number of cases, at least 1, and the n-th of them. The first options vary slowest. */
int64_t sweep_count(const sweep *s);
void sweep_at(const sweep *s, int64_t n, sweep_case *c);

/* Whether some case has this direction. */
bool sweep_has(const sweep *s, sweep_dir dir);

/* Whether some case writes scores or probabilities. */
bool sweep_inspects(const sweep *s);

/* Whether the case is for every kernel of its device that takes the problem (--kernel all). */
bool sweep_all_kernels(const sweep_case *c);

/* Opens the case's device, with its number of threads. Refuses used lengths beyond the rows and
 * keys that sequences have: the library does not check lengths in a GPU's memory. */
fattn_status sweep_open(const sweep_case *c, fattn_device **device);

/* Position `which` (SWEEP_Q_OFFSETS ...) of sequence b. */
int64_t sweep_place(const sweep_case *c, int which, int64_t b);

/* Rows or keys allotted to sequence b. If they are packed, every second sequence is half as
 * long. */
int64_t sweep_length(int64_t longest, bool packed, int64_t b);

/* The first key of sequence b that exists: --seqstart-k, or its number of keys if that is less. */
int64_t sweep_first_key(const sweep_case *c, int64_t b);

/* Element counts of the bias (1, Hq, Sq, Sk), of the mask (B, 1, Sq, Sk) and of the block mask
 * (1, 1, ceil(Sq / M), ceil(Sk / N)). */
int64_t sweep_bias_count(const fattn_problem *p);
int64_t sweep_mask_count(const fattn_problem *p);
int64_t sweep_block_count(const fattn_problem *p);

/* Floating-point operations of the matrix products by the usual convention: all pairs, or half of
 * them for a causal square. Windows, positions and lengths are counted pair by pair, block masks by
 * their density. */
double sweep_flops(const sweep_case *c);

/* The types of k and v, and the bytes of one key and its value. */
fattn_dtype sweep_dtype_k(const fattn_problem *p);
fattn_dtype sweep_dtype_v(const fattn_problem *p);
int64_t sweep_key_bytes(const fattn_problem *p);

/* Bytes of keys and values that lie beyond --seqused-k or before --seqstart-k and are not read. */
double sweep_unread_bytes(const sweep_case *c);

/* The masks as one word: "none", "causal", "mask", "causal+mask". */
const char *sweep_mask_word(const sweep_case *c);

/* All other features, as in "window(128,0)+sink"; "-" if there are none. */
void sweep_words(const sweep_case *c, char *text, size_t size);

#endif
