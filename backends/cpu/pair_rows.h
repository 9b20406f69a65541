/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of bf16 pairs: their sizes, and where a panel keeps them. */
#ifndef FATTN_CPU_PAIR_ROWS_H
#define FATTN_CPU_PAIR_ROWS_H

#include "backends/cpu/panel.h"

/* The number of pairs in a row of dim channels, and in a copy of it, which is whole vectors. */
static int64_t pairs_of(int64_t dim) { return (dim + 1) / 2; }
static int64_t pairs_stride(int64_t dim) { return vectors_of(pairs_of(dim)) * FV_LANES; }

/* The stride of rows of pairs of keys, one row a channel, for matrix registers (pairs.h). A tile of
 * such rows, and scratch for transposing it, fit in the memory of bc rows as floats. */
static int64_t transposed_stride(const panel *pn) { return operand_stride(pn->bc / 2); }

#endif
