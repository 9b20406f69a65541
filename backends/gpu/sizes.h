/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic for counts of blocks and bytes, in which -1 means overflow. */
#ifndef FATTN_GPU_SIZES_H
#define FATTN_GPU_SIZES_H

#include "core/integer.h"
#include "core/tiling.h"
#include "fattn/fattn.h"

/* a * b, -1 on overflow or when a factor is -1. */
static inline int64_t gpu_times(int64_t a, int64_t b)
{
    int64_t product;
    return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product) ? -1 : product;
}

/* Bytes for `count` floats, rounded up to a multiple of 256; -1 on overflow. */
static inline int64_t gpu_floats(int64_t count)
{
    return count < 0 || count > INT64_MAX / 8 ? -1 : fattn_ceil_div(count * 4, 256) * 256;
}

/* Rows of queries in all heads, over the batch: backward's workspace has some floats for each of
 * them. -1 on overflow. */
static inline int64_t gpu_query_rows(const fattn_problem *p)
{
    const int64_t batch = p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch; /* of total_q rows */
    return gpu_times(gpu_times(batch, p->heads_q), p->total_q);
}

/* Whether backward's counts do not overflow: the rows of all heads, as if every sequence had the
 * most queries, and the tiles of keys. */
static inline bool gpu_is_countable(const fattn_problem *p, const fattn_tiling *t)
{
    return gpu_times(gpu_times(p->batch, p->heads_q), p->seqlen_q) >= 0 &&
           gpu_times(gpu_times(p->batch, p->heads_k), t->k_blocks) >= 0;
}

#endif
