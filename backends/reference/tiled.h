/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The published algorithms, line by line, on a machine with two memories: tensors live in slow
 * memory, arithmetic happens on blocks in fast memory, and every element that passes between the
 * two is counted under its tensor's name. core/io_model.h predicts the counts.
 *
 *     FATTN_IO_FLASH1    FlashAttention (Dao, Fu, Ermon, Rudra, Re, 2022, arXiv:2205.14135):
 *                        Algorithms 1, 2 and 5 (forward, block-sparse), Algorithm 4 (backward)
 *     FATTN_IO_FLASH2    FlashAttention-2 (Dao, 2023, arXiv:2307.08691): Algorithms 1 and 2, and
 *                        the skipping of tiles that a causal mask hides (its section 3.1)
 *     FATTN_IO_STANDARD  Algorithms 0 and 3 of the first paper: op by op, each intermediate matrix
 *                        written and read back. Fast memory is granted one operand of N x d and br
 *                        rows of N scores, so that every op reads each operand once: the best case
 *
 * Arithmetic is in double, whatever the tensors hold. What differs from naive.c by more than a few
 * 2^-53 is then a mistake in a schedule and never rounding, and sweeping M does not sweep the
 * accuracy: Algorithm 1 renormalises O at every key block, so in f32 its error would grow with N /
 * Bc.
 *
 * The algorithms keep O, dQ, l and m in slow memory while they change. Those live in the workspace,
 * in double, for the same reason; copying them out at the end is not part of any algorithm and not
 * counted.
 */
#ifndef FATTN_REFERENCE_TILED_H
#define FATTN_REFERENCE_TILED_H

#include <stdbool.h>

#include "core/io_model.h"
#include "fattn/fattn.h"

typedef struct fattn_tiled_options {
    fattn_io_schedule schedule;
    fattn_tile
        tile; /* br queries by bc keys; standard attention has bc = all keys whatever it says */
    bool count_only; /* go the same way through the same accesses, but move and compute nothing */
} fattn_tiled_options;

/* Bytes of workspace, a multiple of 256; -1 when they do not fit in 63 bits. */
int64_t fattn_tiled_workspace(const fattn_problem *problem, fattn_io_schedule schedule,
                              fattn_tile tile);

/* Bytes of fast memory that the blocks of FLASH1 and FLASH2 take, in doubles as they are held
 * here. */
int64_t fattn_tiled_fast_bytes(const fattn_problem *problem, fattn_tile tile);

/*
 * Runs a normalised problem on validated buffers in host memory, and adds what it counts to
 * *counts. Standard attention needs in backward what its forward kept (P, Z ...): it is made again,
 * uncounted.
 *
 * With count_only, workspace may be NULL, of the buffers only lengths and block mask are read, and
 * no output is written.
 */
void fattn_tiled_run(const fattn_problem *problem, const fattn_buffers *buffers,
                     const fattn_tiled_options *options, void *workspace, fattn_io_counts *counts);

#endif
