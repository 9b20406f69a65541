/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merging as backends do it (fattn_backend.merge): for fattn_merge(), and for problems that are
 * divided over ranks, which also merge into the output's dtype and into part of a longer lse.
 */
#ifndef FATTN_CORE_MERGE_H
#define FATTN_CORE_MERGE_H

#include <stdbool.h>

#include "core/host_device.h"
#include "fattn/fattn.h"

/* A result over some keys: o (B, S, H, Dv), and lse (B, H, S), whose rows are contiguous. */
typedef struct fattn_state {
    void *o; /* f32; of the result fattn_merge_job.dtype */
    float *lse;
    fattn_strides strides;       /* of o, in elements */
    int64_t lse_batch, lse_head; /* strides of lse */
} fattn_state;

/* Merges first and second into result, which may be one of them, with the same strides; it is f32
 * then. */
typedef struct fattn_merge_job {
    int64_t batch, heads, seqlen, dim_v;
    fattn_state first, second, result;
    fattn_dtype dtype; /* of the result's o: f32, f16 or bf16 */
} fattn_merge_job;

/* Index of a row's first element in o, and address of its lse. */
FATTN_HD int64_t fattn_state_row(const fattn_state *s, int64_t b, int64_t h, int64_t i)
{
    return b * s->strides.batch + i * s->strides.seq + h * s->strides.head;
}

FATTN_HD float *fattn_state_lse(const fattn_state *s, int64_t b, int64_t h, int64_t i)
{
    return s->lse + b * s->lse_batch + h * s->lse_head + i;
}

/* Whether all rows of o begin at multiples of four elements, with pointers aligned to match, and
 * their lengths are multiples of four, so that a GPU thread can merge four channels at a time. */
FATTN_HD bool fattn_merge_by_fours(const fattn_merge_job *job)
{
    const fattn_strides *const a = &job->first.strides, *const b = &job->second.strides;
    const fattn_strides *const c = &job->result.strides;
    const int64_t sizes = job->dim_v | a->batch | a->seq | a->head | b->batch | b->seq | b->head |
                          c->batch | c->seq | c->head;
    const uintptr_t places = (uintptr_t)job->first.o | (uintptr_t)job->second.o;
    const uintptr_t size = job->dtype == FATTN_F32 ? 16 : 8;
    return sizes % 4 == 0 && places % 16 == 0 && (uintptr_t)job->result.o % size == 0;
}

#endif
