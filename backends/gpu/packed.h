/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How kernels number the tiles of a packed batch. A tile has rows of one sequence. If every
 * sequence had as many tiles as the longest, most of them would not exist where lengths differ. So
 * sequence b, whose first row is r, begins with tile r / size + b, and `rows` rows have
 * rows / size + batch tiles, of which at most `batch` do not exist.
 */
#ifndef FATTN_GPU_PACKED_H
#define FATTN_GPU_PACKED_H

#include "core/kernel.h"

FATTN_HD int64_t fattn_gpu_packed_tiles(int64_t rows, int64_t size, int64_t batch)
{
    return rows / size + batch;
}

/* Whether backward numbers its tiles of keys so. Deterministic runs do not: where a table is not in
 * order, some tiles have no number, and others would wait for their turn for ever. */
FATTN_HD bool fattn_gpu_packs_keys(const fattn_problem *p, const fattn_tiling *t)
{
    const uint64_t packed = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    return (p->features & (packed | FATTN_DETERMINISTIC)) == packed &&
           fattn_gpu_packed_tiles(p->total_k, t->bc, p->batch) < p->batch * t->k_blocks;
}

/* The rows that the kernels before and after backward visit, unless it is deterministic (see
 * rows_shape() in backward.c): those of the packed batch, or of all sequences of seqlen_q rows. */
FATTN_HD int64_t fattn_gpu_row_count(const fattn_problem *p)
{
    return p->heads_q * (p->features & FATTN_CU_SEQLENS_Q ? p->total_q : p->batch * p->seqlen_q);
}

/* Tiles of keys of one head of all sequences. */
FATTN_HD int64_t fattn_gpu_key_tiles(const fattn_problem *p, const fattn_tiling *t)
{
    return fattn_gpu_packs_keys(p, t) ? fattn_gpu_packed_tiles(p->total_k, t->bc, p->batch)
                                      : p->batch * t->k_blocks;
}

#endif
