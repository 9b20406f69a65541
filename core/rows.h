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
    const float *plus;                    /* NULL, or what is added to `from`, both f32, with its
                                           * strides; may be `to` */
    fattn_strides to_stride, from_stride; /* in elements */
    fattn_dtype dtype_to;                 /* f32, f16 or bf16 */
    fattn_dtype dtype_from;               /* the same, or f32, which is rounded */
} fattn_rows_args;

/* The same with as few axes as possible: rows that follow each other without gaps are one. */
static inline fattn_rows_args fattn_rows_joined(const fattn_rows_args *args)
{
    fattn_rows_args a = *args;
    if (!a.from) {
        a.from_stride = a.to_stride;
    }
    if (a.heads == 1 || (a.to_stride.head == a.channels && a.from_stride.head == a.channels)) {
        a.channels *= a.heads;
        a.heads = 1;
    }
    if (a.heads == 1 &&
        (a.rows == 1 || (a.to_stride.seq == a.channels && a.from_stride.seq == a.channels))) {
        a.channels *= a.rows;
        a.rows = 1;
    }
    if (a.rows == 1 && a.heads == 1 &&
        (a.batch == 1 || (a.to_stride.batch == a.channels && a.from_stride.batch == a.channels))) {
        a.channels *= a.batch;
        a.batch = 1;
    }
    const int64_t axes[] = {a.batch, a.rows, a.heads};
    int64_t *const strides[][2] = {{&a.to_stride.batch, &a.from_stride.batch},
                                   {&a.to_stride.seq, &a.from_stride.seq},
                                   {&a.to_stride.head, &a.from_stride.head}};
    for (int n = 0; n < 3; n++) {
        if (axes[n] == 1) { /* nobody steps along it */
            *strides[n][0] = *strides[n][1] = 0;
        }
    }
    return a;
}

/* Whether all rows begin at multiples of 16 bytes and are as long, so that a thread of a GPU may
 * take eight channels. */
FATTN_HD bool fattn_rows_by_eights(const fattn_rows_args *a)
{
    const fattn_strides *const t = &a->to_stride, *const f = &a->from_stride;
    const int64_t sizes = a->channels | t->batch | t->seq | t->head | f->batch | f->seq | f->head;
    return sizes % 8 == 0 && ((uintptr_t)a->to | (uintptr_t)a->from | (uintptr_t)a->plus) % 16 == 0;
}

#endif
