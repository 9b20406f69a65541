/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The I/O model: slow-memory traffic as formulas, of a tiling, of standard attention, and the lower
 * bound.
 *
 * It has two halves that share formulas (io_counts.h). fattn_io_predict() gives the accesses that
 * backends/reference/tiled.c makes and counts, element by element, and agrees with it exactly;
 * `fattn io` prints both. The other functions serve the planner: they take constant time for any
 * size, compute in double so that nothing overflows, and assume sequences of equal length if
 * lengths are known only at run time.
 *
 * Slow memory holds the tensors with a sequence axis. Scalars of a head (ALiBi slope, sink and its
 * gradient) and of a run (seed, lengths, tables) are parameters and are not counted.
 */
#ifndef FATTN_CORE_IO_MODEL_H
#define FATTN_CORE_IO_MODEL_H

#include <stdbool.h>

#include "core/kernel.h"
#include "fattn/fattn.h"

/* The order in which an algorithm computes the score matrix. */
typedef enum fattn_io_schedule {
    FATTN_IO_STANDARD, /* op by op, every intermediate matrix written and read back */
    FATTN_IO_FLASH1,   /* FlashAttention: keys outside, queries inside; visits every tile that the
                        * block mask does not hide */
    FATTN_IO_FLASH2,   /* FlashAttention-2: forward with queries outside; skips hidden tiles too */
    FATTN_IO_SCHEDULES
} fattn_io_schedule;

/* The tensors that are read and written. Those from S on exist only in standard attention. */
typedef enum fattn_io_tensor {
    FATTN_IO_Q,
    FATTN_IO_K,
    FATTN_IO_V,
    FATTN_IO_O,
    FATTN_IO_L,     /* the sums of rows, FlashAttention */
    FATTN_IO_M,     /* the maxima of rows, FlashAttention */
    FATTN_IO_LSE,   /* the statistics of rows, FlashAttention-2 */
    FATTN_IO_DELTA, /* rowsum(dO o) - dLSE, backward of FlashAttention-2 */
    FATTN_IO_DOUT,
    FATTN_IO_DLSE,
    FATTN_IO_DQ,
    FATTN_IO_DK,
    FATTN_IO_DV,
    FATTN_IO_BIAS,
    FATTN_IO_DBIAS,
    FATTN_IO_MASK,
    FATTN_IO_BLOCK_MASK,
    FATTN_IO_S,  /* scores */
    FATTN_IO_C,  /* capped scores, kept for backward */
    FATTN_IO_P,  /* probabilities */
    FATTN_IO_Z,  /* the dropout pattern, one byte per entry */
    FATTN_IO_R,  /* P after dropout */
    FATTN_IO_DP, /* the gradient of P */
    FATTN_IO_DS, /* the gradient of S */
    FATTN_IO_TENSORS
} fattn_io_tensor;

/* Elements; exact while below 2^53. */
typedef struct fattn_io {
    double reads, writes;
} fattn_io;

typedef struct fattn_io_counts {
    fattn_io tensor[FATTN_IO_TENSORS];
} fattn_io_counts;

/* "q", "dS" and so on. Static. */
const char *fattn_io_tensor_name(fattn_io_tensor tensor);
const char *fattn_io_schedule_name(fattn_io_schedule schedule);

fattn_io fattn_io_total(const fattn_io_counts *counts);

/* Bytes per element of the tensor in this (normalised) problem, and of everything that was counted.
 * The intermediate matrices are taken to have the problem's dtype. */
double fattn_io_element_bytes(const fattn_problem *problem, fattn_io_tensor tensor);
double fattn_io_counts_bytes(const fattn_problem *problem, const fattn_io_counts *counts);

/* The tile of FlashAttention's Algorithm 1, line 1, for M elements of fast memory: four blocks of
 * bc = ceil(M / 4d) rows fill it, and br = min(bc, d) bounds the scores by M / 4. With D != Dv, d
 * is their mean, rounded up. */
fattn_tile fattn_io_paper_tile(const fattn_problem *problem, int64_t fast_elements);

/* Predicts what fattn_tiled_run() counts, from the shapes, the lengths and the block mask alone:
 * for each head by a formula, or by a loop over tiles if there is a block mask. The problem must be
 * normalised and the buffers validated; of their pointers only lengths and block mask are read. */
void fattn_io_predict(const fattn_problem *problem, const fattn_buffers *buffers,
                      fattn_io_schedule schedule, fattn_tile tile, fattn_io_counts *counts);

/* Bytes that a kernel with FlashAttention-2's loop order moves for the whole (normalised) problem
 * with tiles of br x bc. Forward reads every query block once, and for each of them (each packed kv
 * group's with packs_groups) the keys and values that it attends to. Backward reads every key block
 * once, and for each of them the queries that attend to it. Hidden pairs count only if they share a
 * tile with visible ones: exactly if the outer block is a multiple of the inner one, else on
 * average. */
double fattn_io_plan_bytes(const fattn_problem *problem, int64_t br, int64_t bc, bool packs_groups);

/* Bytes that standard attention moves: it materialises the score matrix and runs op by op. */
double fattn_io_standard_bytes(const fattn_problem *problem);

/* Bytes of every input read once and every output written once. A block mask is not counted. */
double fattn_io_lower_bound_bytes(const fattn_problem *problem);

/* Multiplications and additions of the matrix products; only pairs inside the window count. */
double fattn_io_flops(const fattn_problem *problem);

#endif
