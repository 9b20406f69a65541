/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moving rows of a tensor: copying them, rounding them, adding to them or setting them to zero.
 * Problems that are divided over ranks need it. Every backend has two functions: rows() takes
 * several jobs, which a GPU does with one kernel; copy_rows() copies rows of bytes, if possible
 * without multiprocessors.
 */
#ifndef FATTN_CORE_ROWS_H
#define FATTN_CORE_ROWS_H

#include <stdbool.h>

#include "core/host_device.h"
#include "fattn/fattn.h"

/* A job: to = from, to = from + plus, or to = 0, for rows (B, S, H, C) with contiguous channels.
 * `to` and `from` do not overlap. */
typedef struct fattn_rows_args {
    int64_t batch, rows, heads, channels;
    void *to;
    const void *from;                     /* NULL: zeros */
    const float *plus;                    /* NULL, or added to `from`: both are f32 then, and have
                                           * the same strides; may be `to` */
    fattn_strides to_stride, from_stride; /* in elements */
    fattn_dtype dtype_to;                 /* f32, f16 or bf16 */
    fattn_dtype dtype_from;               /* dtype_to, or f32, which is then rounded */
    /* In memory of the device, or NULL. Row i is row to_rows[i] of `to`, and row from_rows[i] of
     * `from` and `plus`. */
    const int32_t *to_rows, *from_rows;
} fattn_rows_args;

/* The jobs of a call do not depend on each other: they may run in any order. Parameters of a kernel
 * may take 4 KiB; those of 16 jobs take 2.2. */
enum { FATTN_ROWS_JOBS = 16 };

/* What a GPU gets. Blocks from ends[n - 1] to ends[n] move the rows of job n. */
typedef struct fattn_rows_jobs {
    int64_t count;
    fattn_rows_args jobs[FATTN_ROWS_JOBS];
    int64_t ends[FATTN_ROWS_JOBS];
} fattn_rows_jobs;

/* A copy of `rows` rows of `bytes` bytes, which begin to_step and from_step bytes apart. The two
 * sides do not overlap. */
typedef struct fattn_row_copy {
    void *to;
    const void *from;
    int64_t to_step, from_step, rows, bytes;
} fattn_row_copy;

/* The same move with as few axes as possible: axes without gaps between their rows are joined. */
static inline fattn_rows_args fattn_rows_joined(const fattn_rows_args *args)
{
    fattn_rows_args a = *args;
    const bool listed = a.to_rows || a.from_rows;
    if (!a.from) {
        a.from_stride = a.to_stride;
    }
    if (a.heads == 1 || (a.to_stride.head == a.channels && a.from_stride.head == a.channels)) {
        a.channels *= a.heads;
        a.heads = 1;
    }
    if (a.heads == 1 && !listed &&
        (a.rows == 1 || (a.to_stride.seq == a.channels && a.from_stride.seq == a.channels))) {
        a.channels *= a.rows;
        a.rows = 1;
    }
    if (a.rows == 1 && a.heads == 1 && !listed &&
        (a.batch == 1 || (a.to_stride.batch == a.channels && a.from_stride.batch == a.channels))) {
        a.channels *= a.batch;
        a.batch = 1;
    }
    const int64_t axes[] = {a.batch, a.rows, a.heads};
    int64_t *const strides[][2] = {{&a.to_stride.batch, &a.from_stride.batch},
                                   {&a.to_stride.seq, &a.from_stride.seq},
                                   {&a.to_stride.head, &a.from_stride.head}};
    for (int n = 0; n < 3; n++) {
        if (axes[n] == 1 && !(n == 1 && listed)) { /* a stride that is not used */
            *strides[n][0] = *strides[n][1] = 0;
        }
    }
    return a;
}

/* How many channels a GPU thread moves: 16 or 8 if the number of channels is a multiple of that,
 * all strides are multiples of eight and all pointers of 16 bytes; else 1. */
FATTN_HD int fattn_rows_width(const fattn_rows_args *a)
{
    const fattn_strides *const t = &a->to_stride, *const f = &a->from_stride;
    const int64_t sizes = a->channels | t->batch | t->seq | t->head | f->batch | f->seq | f->head;
    const uintptr_t pointers = (uintptr_t)a->to | (uintptr_t)a->from | (uintptr_t)a->plus;
    return sizes % 8 != 0 || pointers % 16 != 0 ? 1 : a->channels % 16 == 0 ? 16 : 8;
}

#endif
