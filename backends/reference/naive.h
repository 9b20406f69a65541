/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle: attention and its gradients straight from the formulas, in double precision, a whole
 * row of scores at a time. No tiles, no running maximum, no log2 units, and no code shared with
 * what it judges; the public header alone defines what is right. It runs as device "reference" and
 * in every comparison of the tests. It is slow on purpose, and never a fallback.
 *
 * All functions take a *normalised* problem (strides, scale, window and dtypes filled in, causal
 * folded into the window, outputs chosen) and buffers in host memory whose lengths and tables were
 * validated.
 */
#ifndef FATTN_REFERENCE_NAIVE_H
#define FATTN_REFERENCE_NAIVE_H

#include "fattn/fattn.h"

/* Position of one sequence of the batch, and the alignment of its rows and keys. */
typedef struct fattn_naive_sequence {
    int64_t rows, keys;           /* used: Sq_b and Sk_b */
    int64_t start;                /* keys before this one do not exist: seqstart_k */
    int64_t own_rows, own_keys;   /* allotted: Sq, Sk or the differences of cu_seqlens */
    int64_t first_row, first_key; /* its place in packed tensors; 0 without cu_seqlens */
    int64_t q_offset, k_offset;   /* global position of its first row and key */
    int64_t off;                  /* the diagonal passes through local key i + off in row i */
} fattn_naive_sequence;

/*
 * Results, dense and in double. Rows and keys have local indices; sq and sk are the problem's
 * maxima. Entries of unused rows and keys are 0: see sequences[b]. Gradients are those of this call
 * alone, without the values that FATTN_ACCUMULATE adds to. Arrays that the op does not have, and
 * dbias and dsink unless requested, are NULL.
 *
 * a_*: A of the accuracy bound, the maximum over a slice of the same formula with every product and
 * summand made absolute. Maxima skip non-finite values.
 */
typedef struct fattn_naive {
    int64_t batch, heads_q, heads_k, sq, sk, dim, dim_v;
    int64_t bias_extent[4]; /* of dbias: the problem's, but 1 on summed axes */

    fattn_naive_sequence *sequences; /* [b] */

    double *o, *lse; /* [b][hq][sq][dim_v], [b][hq][sq]; in backward the values used */
    double *dq;      /* [b][hq][sq][dim] */
    double *dk, *dv; /* [b][hk][sk][dim], [b][hk][sk][dim_v] */
    double *dbias;   /* [b or 1][hq or 1][sq or 1][sk or 1] */
    double *dsink;   /* [hq] */

    double *a_o, *a_dq;  /* [b][hq] */
    double *a_dk, *a_dv; /* [b][hk] */
    double *a_dbias;     /* [b or 1][hq or 1] */
    double *a_dsink;     /* [hq] */
    double *x_max; /* [b][hq]: max of |lse|, and of |scale| sum_c |q_c k_c| + |bias| + |ALiBi| over
                      kept pairs */
    double *lse_scale; /* [b][hq][sq]: max(1, |sink|, |scale| sum_c |q_c k_c| + |bias| + |ALiBi|) */

    void *memory; /* all of the above */
} fattn_naive;

/* Computes the problem's op. Backward reads o and lse from the buffers, as a kernel does. On
 * failure (FATTN_OUT_OF_MEMORY) *result is all zero; free it with fattn_naive_free() either way. */
fattn_status fattn_naive_run(const fattn_problem *p, const fattn_buffers *buf, fattn_naive *result);

/* The same, but backward computes o and lse itself instead of reading them: the exact derivative of
 * forward in double precision. */
fattn_status fattn_naive_run_pure(const fattn_problem *p, const fattn_buffers *buf,
                                  fattn_naive *result);

void fattn_naive_free(fattn_naive *result);

/* Runs the problem and writes the requested outputs through their strides, rounded once. Writes all
 * of dbias, including zeros where no pair exists. */
fattn_status fattn_naive_execute(const fattn_problem *p, const fattn_buffers *buf);

/* Writes x_ij, -inf where a pair is not kept, or P_ij = exp(x_ij - lse_i), 0 there, of every row
 * and key that exist. args->stride is filled in. */
fattn_status fattn_naive_inspect(const fattn_problem *p, const fattn_buffers *buf,
                                 const fattn_inspect_args *args);

/*
 * The comparator: the plain formula in f32, with probabilities and dS rounded as operands of matrix
 * products (fattn_naive_dtype_operand()), sums in ascending order of their index, and results
 * rounded once to the dtype of their output. Same contract as fattn_naive_run(); a_*, x_max and
 * lse_scale stay 0.
 */
fattn_status fattn_comparator_run(const fattn_problem *p, const fattn_buffers *buf,
                                  fattn_naive *result);

/* -------------------------------------------------------------------------------------------------
 * What naive.c and comparator.c share: finding and decoding the data, never computing with it
 * ---------------------------------------------------------------------------------------------- */

/* The value at index of an array, and x rounded to dtype. */
double fattn_naive_load(const void *array, fattn_dtype dtype, int64_t index);
double fattn_naive_round(double x, fattn_dtype dtype);

/* The dtype of lse, dlse, sink, slopes, dbias and dsink; that of the gradient of an input; and that
 * to which a kernel may round probabilities and dS: f32 where q, k and v are of several. */
fattn_dtype fattn_naive_dtype_lse(const fattn_problem *p);
fattn_dtype fattn_naive_dtype_grad(const fattn_problem *p, fattn_dtype input);
fattn_dtype fattn_naive_dtype_operand(const fattn_problem *p);

/* Allocates the arrays of the problem's op, all 0, and resolves the sequences. */
fattn_status fattn_naive_allocate(const fattn_problem *p, const fattn_buffers *buf,
                                  fattn_naive *result);

/* One decoded query head of one sequence, and the per-pair terms of one of its rows. */
typedef struct fattn_naive_slice {
    int64_t b, h, hk;
    fattn_naive_sequence seq;

    double *q;         /* [rows][dim] */
    double *k, *kt;    /* [keys][dim] and its transpose [dim][keys] */
    double *v, *vt;    /* [keys][dim_v] and its transpose [dim_v][keys] */
    double *dout;      /* [rows][dim_v]; backward */
    double *dlse;      /* [rows]; backward, 0 without FATTN_DLSE */
    double sink;       /* -inf without FATTN_SINK */
    double bias_slope; /* with FATTN_ALIBI_BIAS, else 1 */

    /* The row loaded last, [keys]. */
    double *keep;  /* 1 if the pair is kept, else 0 */
    double *bias;  /* times bias_slope; 0 without FATTN_BIAS */
    double *alibi; /* -slope * distance; 0 without FATTN_ALIBI, and with FATTN_ALIBI_BIAS */
    double *z;     /* dropout multiplier; 1 without FATTN_DROPOUT */

    void *memory;
} fattn_naive_slice;

/* Allocates for the largest slice of the problem, so that loading cannot fail. */
fattn_status fattn_naive_slice_create(const fattn_problem *p, fattn_naive_slice *slice);
void fattn_naive_slice_free(fattn_naive_slice *slice);

void fattn_naive_slice_load(const fattn_problem *p, const fattn_buffers *buf, int64_t b, int64_t h,
                            fattn_naive_slice *slice);
void fattn_naive_slice_load_row(const fattn_problem *p, const fattn_buffers *buf, int64_t i,
                                fattn_naive_slice *slice);

/* Reads o and lse of the slice from the buffers into result: the inputs of backward. */
void fattn_naive_slice_load_saved(const fattn_problem *p, const fattn_buffers *buf,
                                  const fattn_naive_slice *slice, fattn_naive *result);

/* Index in result->dbias to which a pair adds. */
int64_t fattn_naive_dbias_index(const fattn_problem *p, const fattn_naive *result,
                                const fattn_naive_slice *slice, int64_t i, int64_t j);

/* Philox4x32-10, and the dropout multiplier of a pair at global indices b, h, i, j. threshold is in
 * 0..65536; key is words 0 and 1 of Philox at counter {offset_lo, offset_hi, 0, 0} under the
 * seed. */
void fattn_naive_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);
int64_t fattn_naive_dropout_threshold(double probability);
void fattn_naive_dropout_key(uint64_t seed, uint64_t offset, uint32_t key[2]);
double fattn_naive_dropout(const uint32_t key[2], int64_t threshold, int64_t b, int64_t h,
                           int64_t i, int64_t j);

#endif
