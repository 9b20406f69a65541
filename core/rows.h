/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of a tensor on their way from one place to another: copied, rounded, added or set to zero. A
 * verb of every backend, for what is divided over ranks.
 */
#ifndef FATTN_CORE_ROWS_H
#define FATTN_CORE_ROWS_H

#include <stdbool.h>

#include "core/host_device.h"
#include "fattn/fattn.h"

/* Rows (B, S, H, C), whose channels lie side by side. `to` and `from` do not overlap. */
typedef struct fattn_rows_args {
    int64_t batch, rows, heads, channels;
    void *to;
    const void *from;                     /* NULL: zeros */
    fattn_strides to_stride, from_stride; /* in elements */
    fattn_dtype dtype_to;                 /* f32, f16 or bf16 */
    fattn_dtype dtype_from;               /* the same, or f32, which is rounded */
    bool add;                             /* to += from, both f32 */
} fattn_rows_args;

/* Whether all rows begin at multiples of 16 bytes and are as long, so that a thread of a GPU may
 * take eight channels. */
FATTN_HD bool fattn_rows_by_eights(const fattn_rows_args *a)
{
    const fattn_strides *const t = &a->to_stride, *const f = &a->from_stride;
    const int64_t sizes = a->channels | t->batch | t->seq | t->head | f->batch | f->seq | f->head;
    return sizes % 8 == 0 && ((uintptr_t)a->to | (uintptr_t)a->from) % 16 == 0;
}

#endif
