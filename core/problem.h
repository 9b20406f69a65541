/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Validation of problems and buffers. Everything that a caller can get wrong in a problem is found
 * here, with a reason that names the field and its value. The rest of the library gets *normalised*
 * problems and does not check them again.
 *
 * A normalised problem has
 *   - the full struct_size, layout FATTN_STRIDED and every stride filled in (gradients too);
 *   - dtype_o, dtype_kv, dtype_v, dtype_bias and outputs filled in; scale filled in, with
 *     FATTN_SCALE or without;
 *   - window_left and window_right filled in, -1 where unbounded, and window_right 0 with
 *     FATTN_CAUSAL, so that a kernel reads only these two;
 *   - in total_q and total_k the rows of the packed tensors (cu_seqlens), else Sq and Sk;
 *   - block_table_stride filled in; fields whose feature bit is clear at their defaults.
 */
#ifndef FATTN_CORE_PROBLEM_H
#define FATTN_CORE_PROBLEM_H

#include <stdbool.h>

#include "core/host_device.h"
#include "fattn/fattn.h"

/* Totals, lengths, heads and batches stay below 2^31. (Dropout's own bounds are in philox.h.) */
#define FATTN_SIZE_LIMIT ((INT64_C(1) << 31) - 1)

/* Reads a caller's struct of any version into this library's; fields that it lacks get their
 * defaults. Does not check the numbers. */
fattn_status fattn_problem_read(fattn_problem *to, const fattn_problem *from);
fattn_status fattn_buffers_read(fattn_buffers *to, const fattn_buffers *from);

/* Whether pointer_alignment is legal. fattn_problem_normalise() checks it too; fattn_attention(),
 * which replaces it by the alignment of the pointers, checks the caller's value with this. */
fattn_status fattn_problem_check_alignment(const fattn_problem *problem);

/* Validates *in and writes its normal form; in == out is allowed. On failure *out is untouched. */
fattn_status fattn_problem_normalise(const fattn_problem *in, fattn_problem *out);

/* Checks the pointers of one run against a normalised problem: required ones must not be NULL, all
 * must be as aligned as promised, and outputs must overlap nothing. Reads no memory behind the
 * pointers. *out is the full struct. */
fattn_status fattn_buffers_normalise(const fattn_problem *problem, const fattn_buffers *in,
                                     fattn_buffers *out);

/* Refuses a workspace that shares a byte with a tensor. */
fattn_status fattn_buffers_check_workspace(const fattn_problem *problem,
                                           const fattn_buffers *buffers, const void *workspace,
                                           int64_t bytes);

/* Checks the values behind the pointers, which must be host memory: lengths, cu_seqlens, block
 * tables, positions. Kernels rely on it for memory safety. */
fattn_status fattn_buffers_validate(const fattn_problem *problem, const fattn_buffers *buffers);

/* Checks cu_seqlens[0 .. batch]: entries in 0..total and non-decreasing, and no sequence longer
 * than `longest`. `name` is for the reason. */
fattn_status fattn_cu_seqlens_check(const char *name, const int32_t *cu, int64_t batch,
                                    int64_t total, int64_t longest);

/* Without any of these features fattn_buffers_validate() has nothing to check: all sequences have
 * the problem's lengths. */
#define FATTN_VALIDATED                                                            \
    (FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q | FATTN_SEQUSED_K | \
     FATTN_SEQSTART_K | FATTN_POSITIONS | FATTN_PAGED | FATTN_DROPOUT)

/* Fields whose feature bit is clear, and strides that the layout does not read, must be at their
 * defaults. Enums and bits must have been checked before. */
fattn_status fattn_problem_check_unused(const fattn_problem *problem);

/* The same for the buffers of a run. `features` are the caller's: the normal form drops
 * FATTN_DROPOUT if dropout_p is 0. */
fattn_status fattn_buffers_check_unused(fattn_op op, uint64_t features,
                                        const fattn_buffers *buffers);

/* The 8-byte words of fattn_buffers that must be as fattn_buffers_init() fills them, for a fast
 * test in each run: bit n stands for word n. fattn_unused_make() is called once per plan. */
typedef struct fattn_unused {
    uint64_t zero, minus_one;
} fattn_unused;

void fattn_unused_make(fattn_op op, uint64_t features, fattn_unused *unused);

/* Whether fattn_buffers_check_unused() would succeed. */
bool fattn_unused_hold(const fattn_unused *unused, const fattn_buffers *buffers);

/* The dropout threshold t (philox.h): p * 65536 rounded, but 1..65535 for 0 < p < 1; 65536 for p =
 * 1. */
uint32_t fattn_dropout_threshold(double p);

/* Sequence b of a run: its lengths, its place in the tensors, and its positions. */
typedef struct fattn_sequence {
    int64_t sq, sk;       /* rows and keys that exist */
    int64_t slot_k;       /* keys that the sequence has room for; dk and dv are set to 0 past sk */
    int64_t q_row, k_row; /* first row in q and k: cu_seqlens, else 0 */
    int64_t q_batch;  /* index along the batch axis of q, o, dout, dq: b, or 0 with cu_seqlens_q */
    int64_t k_batch;  /* the same for k, v, dk, dv */
    int64_t diagonal; /* off: query i and key j are aligned when j == i + diagonal */
    int64_t q_position; /* position of row 0 for dropout */
    int64_t k_position; /* position of key 0 for dropout and chunks */
} fattn_sequence;

/* For buffers that passed fattn_buffers_validate(). With FATTN_SEQSTART_K key 0 of the result is
 * the first key that exists, the caller's key fattn_start_k(); bias, masks and pages still use the
 * caller's numbers. Otherwise fattn_start_k() is 0. */
int64_t fattn_start_k(const fattn_problem *problem, const fattn_buffers *buffers, int64_t b);
fattn_sequence fattn_sequence_of(const fattn_problem *problem, const fattn_buffers *buffers,
                                 int64_t b);

/* The largest number of keys that a sequence of the run has. */
int64_t fattn_longest_keys(const fattn_problem *problem, const fattn_buffers *buffers);

/* The smallest and the largest number of queries that a sequence of the run has; sequences without
 * queries do not count for the smallest. */
void fattn_query_lengths(const fattn_problem *problem, const fattn_buffers *buffers,
                         int64_t *fewest, int64_t *most);

/* Index in lse and dlse of row 0 of (sequence b, query head h); rows are contiguous. */
int64_t fattn_lse_index(const fattn_problem *problem, const fattn_sequence *sequence, int64_t b,
                        int64_t h);

/* Query heads per key/value head; 1 if there are no heads, so that it can be a divisor. */
FATTN_HD int64_t fattn_problem_group(const fattn_problem *problem)
{
    return problem->heads_k > 0 ? problem->heads_q / problem->heads_k : 1;
}

/* The largest head dimension that any backend takes. */
#define FATTN_PROBLEM_DIM_MAX 576

/* Rows that attend to the keys of one key/value head: the queries of all heads of its group. */
static inline int64_t fattn_problem_rows(const fattn_problem *problem)
{
    return fattn_problem_group(problem) * problem->seqlen_q;
}

/* The type of dq, dk or dv, the gradient of a tensor of type `input`. */
fattn_dtype fattn_gradient_dtype(const fattn_problem *problem, fattn_dtype input);

/* The type of lse, dlse, sinks, slopes and their gradients, and of dbias: f32, or f64 in an f64
 * problem. */
fattn_dtype fattn_statistics_dtype(const fattn_problem *problem);

#endif
