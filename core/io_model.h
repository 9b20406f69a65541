/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slow-memory traffic as formulas: of a tiling, of standard attention, and the lower bound.
 *
 * In two halves, over one set of formulas (io_counts.h). fattn_io_predict() gives the accesses that
 * backends/reference/tiled.c makes and counts, element by element, and agrees with it exactly;
 * `fattn io` prints both. The other functions serve the planner: constant time for any size, in
 * double so that nothing overflows, and for lengths known only at run time they assume sequences of
 * equal length.
 *
 * What counts as slow memory: tensors with a sequence axis. Scalars of a head (ALiBi slope, sink,
 * its gradient) and of a run (seed, lengths, tables) are parameters and not counted.
 */
#ifndef FATTN_CORE_IO_MODEL_H
#define FATTN_CORE_IO_MODEL_H

#include <stdbool.h>

#include "core/kernel.h"
#include "fattn/fattn.h"

/* In which order an execution goes through the score matrix. */
typedef enum fattn_io_schedule {
    FATTN_IO_STANDARD, /* op by op, every intermediate matrix written and read back */
    FATTN_IO_FLASH1,   /* FlashAttention: keys outside, queries inside; visits every tile that the
                        * block mask does not hide */
    FATTN_IO_FLASH2,   /* FlashAttention-2: forward with queries outside; skips hidden tiles too */
    FATTN_IO_SCHEDULES
} fattn_io_schedule;

/* What is read and written. The matrices from S on exist in standard attention only. */
typedef enum fattn_io_tensor {
    FATTN_IO_Q,
    FATTN_IO_K,
    FATTN_IO_V,
    FATTN_IO_O,
    FATTN_IO_L, /* FlashAttention's statistics of a row: sum and maximum ... */
    FATTN_IO_M,
    FATTN_IO_LSE, /* ... and FlashAttention-2's, with delta = rowsum(dO o) - dLSE in backward */
    FATTN_IO_DELTA,
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
    FATTN_IO_Z,  /* the dropout pattern, a byte an entry */
    FATTN_IO_R,  /* what dropout leaves of P */
    FATTN_IO_DP, /* gradients of P and S */
    FATTN_IO_DS,
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

/* Bytes an element of the tensor has in this (normalised) problem, and of all that was counted. The
 * intermediate matrices are taken to be of the problem's dtype. */
double fattn_io_element_bytes(const fattn_problem *problem, fattn_io_tensor tensor);
double fattn_io_counts_bytes(const fattn_problem *problem, const fattn_io_counts *counts);

/* The tile of FlashAttention's Algorithm 1, line 1, for M elements of fast memory: four blocks of
 * bc = ceil(M / 4d) rows fill it, and br = min(bc, d) bounds the scores by M / 4. With D != Dv, d
 * is their mean, rounded up. */
fattn_tile fattn_io_paper_tile(const fattn_problem *problem, int64_t fast_elements);

/* What fattn_tiled_run() will count, from the shapes, the lengths and the block mask alone: for
 * each head a formula, or a loop over tiles where a block mask hides some of them. The problem is
 * normalised and the buffers were validated; of their pointers only lengths and block mask are
 * read. */
void fattn_io_predict(const fattn_problem *problem, const fattn_buffers *buffers,
                      fattn_io_schedule schedule, fattn_tile tile, fattn_io_counts *counts);

/* Bytes that a kernel of FlashAttention-2's loop order moves with tiles of br x bc for the whole
 * (normalised) problem. Forward: every query block once, the keys and values it sees once per block
 * (per packed kv group where packs_groups). Backward: every key block once, the queries that see it
 * once per block. What a window hides counts only where it shares a tile with visible pairs:
 * exactly where the outer block is a multiple of the inner one, else on average. */
double fattn_io_plan_bytes(const fattn_problem *problem, int64_t br, int64_t bc, bool packs_groups);

/* Bytes that standard attention moves, which materialises the score matrix and runs op by op. */
double fattn_io_standard_bytes(const fattn_problem *problem);

/* Bytes of every input read once and every output written once. */
double fattn_io_lower_bound_bytes(const fattn_problem *problem);

/* Multiplications and additions of the matrix products, pairs inside the window only. */
double fattn_io_flops(const fattn_problem *problem);

#endif
