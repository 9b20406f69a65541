/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public door: everything a caller can get wrong in a problem is found here, with a reason that
 * names the field and its value. Behind it every problem is *normalised* and nothing is checked
 * again.
 *
 * A normalised problem has
 *   - the full struct_size, layout FATTN_STRIDED and every stride filled in (gradients too);
 *   - dtype_o, dtype_bias and outputs filled in; scale filled in, with FATTN_SCALE or without;
 *   - window_left and window_right filled in, -1 where unbounded, with causal folded in (right 0),
 *     so that a kernel looks at these two alone;
 *   - total_q, total_k: rows of the packed tensor (cu_seqlens), else Sq and Sk;
 *   - block_table_stride filled in; fields whose feature bit is clear at their defaults.
 */
#ifndef FATTN_CORE_PROBLEM_H
#define FATTN_CORE_PROBLEM_H

#include <stdbool.h>

#include "core/host_device.h"
#include "fattn/fattn.h"

/* Totals, lengths, heads and batches stay below 2^31. (Dropout's own bounds are in philox.h.) */
#define FATTN_SIZE_LIMIT ((INT64_C(1) << 31) - 1)

/* Reads a caller's struct of any version into this library's; later fields are at their defaults.
 * The numbers in it are not checked yet. */
fattn_status fattn_problem_read(fattn_problem *to, const fattn_problem *from);
fattn_status fattn_buffers_read(fattn_buffers *to, const fattn_buffers *from);

/* Whether pointer_alignment is legal. Normalising includes it; fattn_attention(), which goes by the
 * pointers, asks for it alone. */
fattn_status fattn_problem_check_alignment(const fattn_problem *problem);

/* Validates *in and writes its normal form; in == out is allowed. On failure *out is untouched. */
fattn_status fattn_problem_normalise(const fattn_problem *in, fattn_problem *out);

/* Checks the pointers of one run against a normalised problem: required ones present, as aligned as
 * promised, outputs that overlap nothing. Reads no memory behind the pointers. *out is the full
 * struct. */
fattn_status fattn_buffers_normalise(const fattn_problem *problem, const fattn_buffers *in,
                                     fattn_buffers *out);

/* Refuses a workspace in which a tensor has a byte. */
fattn_status fattn_buffers_check_workspace(const fattn_problem *problem,
                                           const fattn_buffers *buffers, const void *workspace,
                                           int64_t bytes);

/* Checks what lies behind the pointers, which must be host memory: lengths, cu_seqlens, block
 * tables, positions. Kernels rely on it for memory safety. */
fattn_status fattn_buffers_validate(const fattn_problem *problem, const fattn_buffers *buffers);

/* cu_seqlens[0 .. batch]: not negative, not decreasing, within total rows, no length above
 * longest. */
fattn_status fattn_cu_seqlens_check(const char *name, const int32_t *cu, int64_t batch,
                                    int64_t total, int64_t longest);

/* Features without which fattn_buffers_validate() finds nothing to check: all sequences have the
 * problem's lengths. */
#define FATTN_VALIDATED                                                            \
    (FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q | FATTN_SEQUSED_K | \
     FATTN_SEQSTART_K | FATTN_POSITIONS | FATTN_PAGED | FATTN_DROPOUT)

/* The fields that belong to a clear bit, and strides that the layout does not read, are at their
 * defaults. Enums and bits were checked. */
fattn_status fattn_problem_check_unused(const fattn_problem *problem);

/* The same of the buffers of a run, with `features` as the caller gave them: the normal form drops
 * FATTN_DROPOUT where dropout_p is 0. */
fattn_status fattn_buffers_check_unused(fattn_op op, uint64_t features,
                                        const fattn_buffers *buffers);

/* Which words of fattn_buffers a run has to leave as fattn_buffers_init() fills them, made when its
 * plan is: bit n is the word of 8 bytes with number n. */
typedef struct fattn_unused {
    uint64_t zero, minus_one;
} fattn_unused;

void fattn_unused_make(fattn_op op, uint64_t features, fattn_unused *unused);

/* Whether fattn_buffers_check_unused() finds nothing. */
bool fattn_unused_hold(const fattn_unused *unused, const fattn_buffers *buffers);

/* The dropout threshold of SEMANTICS: t = p * 65536 rounded, 1..65535 for 0 < p < 1; 65536 for p
 * = 1. */
uint32_t fattn_dropout_threshold(double p);

/* Sequence b of a run: how many rows it has, where they lie, and where they stand. */
typedef struct fattn_sequence {
    int64_t sq, sk; /* rows and keys that exist */
    int64_t slot_k; /* keys the sequence owns, of which the first sk exist: dk, dv are 0 past sk */
    int64_t q_row, k_row; /* first row in q and k: cu_seqlens, else 0 */
    int64_t q_batch;  /* index along the batch axis of q, o, dout, dq: b, or 0 with cu_seqlens_q */
    int64_t k_batch;  /* the same for k, v, dk, dv */
    int64_t diagonal; /* off: query i and key j are aligned when j == i + diagonal */
    int64_t q_position; /* position of row 0 for dropout */
    int64_t k_position;
} fattn_sequence;

/* Both for buffers that passed fattn_buffers_validate. With FATTN_SEQSTART_K a sequence begins with
 * its first key that exists, the caller's key fattn_start_k(); bias, masks and pages go by the
 * caller's numbers. Otherwise the first key is key 0. */
int64_t fattn_start_k(const fattn_problem *problem, const fattn_buffers *buffers, int64_t b);
fattn_sequence fattn_sequence_of(const fattn_problem *problem, const fattn_buffers *buffers,
                                 int64_t b);

/* The most keys that a sequence of the run has. */
int64_t fattn_longest_keys(const fattn_problem *problem, const fattn_buffers *buffers);

/* The fewest queries that a sequence of the run has, apart from those without any, and the most. */
void fattn_query_lengths(const fattn_problem *problem, const fattn_buffers *buffers,
                         int64_t *fewest, int64_t *most);

/* Index in lse and dlse of row 0 of (sequence b, query head h); rows follow one another. */
int64_t fattn_lse_index(const fattn_problem *problem, const fattn_sequence *sequence, int64_t b,
                        int64_t h);

/* Query heads of a key/value head; 1 where there are no heads, which it may divide. */
FATTN_HD int64_t fattn_problem_group(const fattn_problem *problem)
{
    return problem->heads_k > 0 ? problem->heads_q / problem->heads_k : 1;
}

/* The largest head dimension that any backend takes. */
#define FATTN_PROBLEM_DIM_MAX 576

/* Rows that see the keys of one key/value head: the queries of its group. */
static inline int64_t fattn_problem_rows(const fattn_problem *problem)
{
    return fattn_problem_group(problem) * problem->seqlen_q;
}

/* The type of dq, dk or dv, the gradient of a tensor of type `input`. */
fattn_dtype fattn_gradient_dtype(const fattn_problem *problem, fattn_dtype input);

/* The type of lse, dlse, sinks, slopes and their gradients, and of dbias: f32, or f64 in an f64
 * problem. */
fattn_dtype fattn_statistics_dtype(const fattn_problem *problem);

/* Whether k or v has another type than q. */
bool fattn_problem_is_mixed(const fattn_problem *problem);

#endif
