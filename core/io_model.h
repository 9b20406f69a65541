/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slow-memory traffic as formulas: of a tiling, of standard attention, and the lower bound. Counts are
 * in elements as backends/reference/tiled.c counts them, access by access, and agree with it exactly;
 * the planner and `fattn io` turn them into bytes.
 */
#ifndef FATTN_CORE_IO_MODEL_H
#define FATTN_CORE_IO_MODEL_H

#include <stdbool.h>

#include "fattn/fattn.h"

typedef struct fattn_io {
    double reads, writes; /* exact while below 2^53 */
} fattn_io;

/* Bytes that a kernel of FlashAttention-2's loop order moves with tiles of br x bc for the whole
 * (normalised) problem: every query block once, the keys and values it sees once per block (per packed
 * kv group where packs_groups). Fractions of blocks that masks hide are not counted. */
double fattn_io_plan_bytes(const fattn_problem *problem, int64_t br, int64_t bc, bool packs_groups);

/* Bytes that standard attention moves, which materialises the score matrix and runs op by op. */
double fattn_io_standard_bytes(const fattn_problem *problem);

/* Bytes of every input read once and every output written once. */
double fattn_io_lower_bound_bytes(const fattn_problem *problem);

/* Multiplications and additions of the matrix products, kept pairs only. */
double fattn_io_flops(const fattn_problem *problem);

#endif
