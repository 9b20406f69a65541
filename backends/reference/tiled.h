/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The published algorithms, line by line, on a machine with two memories. Tensors are in slow
 * memory, arithmetic works on blocks in fast memory, and every element that moves between the two
 * is counted under its tensor's name. core/io_model.h predicts the counts.
 *
 *     FATTN_IO_FLASH1    FlashAttention (Dao, Fu, Ermon, Rudra, Re, 2022, arXiv:2205.14135):
 *                        Algorithms 1, 2 and 5 (forward, block-sparse), Algorithm 4 (backward)
 *     FATTN_IO_FLASH2    FlashAttention-2 (Dao, 2023, arXiv:2307.08691): Algorithms 1 and 2, and
 *                        the skipping of tiles that a causal mask hides (its section 3.1)
 *     FATTN_IO_STANDARD  Algorithms 0 and 3 of the first paper: op by op, each intermediate matrix
 *                        written and read back. Fast memory holds one operand of N x d and br rows
 *                        of N scores, so that every op reads each operand once: the best case
 *
 * Arithmetic is in double, whatever the dtype of the tensors. A difference from naive.c of more
 * than a few 2^-53 is then an error in a schedule, not rounding; and sweeping M does not change the
 * accuracy. (Algorithm 1 renormalises O at every key block: in f32 its error would grow with N /
 * Bc.)
 *
 * The algorithms keep O, dQ, l and m in slow memory while they change. Here these live in the
 * workspace, in double, for the same reason. Copying them out at the end is part of no algorithm
 * and is not counted.
 */
#ifndef FATTN_REFERENCE_TILED_H
#define FATTN_REFERENCE_TILED_H

#include <stdbool.h>

#include "core/io_model.h"
#include "fattn/fattn.h"

typedef struct fattn_tiled_options {
    fattn_io_schedule schedule;
    fattn_tile tile; /* br queries by bc keys; standard attention ignores bc and uses all keys */
    bool count_only; /* count the same accesses without moving or computing anything */
} fattn_tiled_options;

/* Bytes of workspace, a multiple of 256; -1 if they exceed 63 bits. */
int64_t fattn_tiled_workspace(const fattn_problem *problem, fattn_io_schedule schedule,
                              fattn_tile tile);

/* Bytes of fast memory that the blocks of FLASH1 and FLASH2 take, held in doubles. */
int64_t fattn_tiled_fast_bytes(const fattn_problem *problem, fattn_tile tile);

/*
 * Runs a normalised problem on validated buffers in host memory and adds its counts to *counts.
 * Backward of standard attention needs the matrices that its forward kept (P, Z ...): they are
 * recomputed, uncounted.
 *
 * With count_only, workspace may be NULL; of the buffers only lengths and the block mask are read;
 * no output is written.
 */
void fattn_tiled_run(const fattn_problem *problem, const fattn_buffers *buffers,
                     const fattn_tiled_options *options, void *workspace, fattn_io_counts *counts);

#endif
