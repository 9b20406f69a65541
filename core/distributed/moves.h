/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tensors of a turn, and their rows in three places: in the caller's tensor, which has a share
 * of all heads; packed, for the pieces of the turn; and in the bytes of a message. Rows are copied
 * from one place to another, or listed as spans.
 */
#ifndef FATTN_DISTRIBUTED_MOVES_H
#define FATTN_DISTRIBUTED_MOVES_H

#include "core/distributed/group.h"

enum { FATTN_TENSORS = 7 }; /* at most, of a turn's inputs or results */

/* A tensor, as a share in the caller's memory and as packed rows. */
typedef struct fattn_moved {
    fattn_side side;         /* rows are queries or keys */
    int64_t heads, channels; /* heads of a member in a turn */
    fattn_dtype dtype;       /* of the share */
    char *share;
    fattn_strides strides;
    char *packed[FATTN_RUNS];
    bool rows_last;               /* lse: (B, H, rows), not (B, rows, H, channels) */
    bool sum;                     /* the packed rows are f32, and are rounded into the share */
    bool together;                /* in the packed rows both runs of a sequence are adjacent */
    unsigned skipped;             /* bit n: run n is not copied */
    const char *plus[FATTN_RUNS]; /* NULL, or f32 rows like `packed` that are added to it */
} fattn_moved;

typedef enum fattn_place { FATTN_SHARE, FATTN_PACKED, FATTN_STREAM } fattn_place;

/* Where rows are that are copied or listed. */
typedef struct fattn_spot {
    fattn_place place;
    int64_t first_head; /* of a share */
    char *stream;       /* the tensor's first byte in a message */
} fattn_spot;

/* Spans of a message, as they are listed. */
typedef struct fattn_span_list {
    fattn_span *spans;
    int32_t count;
    int64_t bytes;
} fattn_span_list;

/* List the inputs of a turn, and its results; both return how many there are. Turns that share a
 * key/value head get its keys with the first of them, and return its gradients with the last. If
 * keys are cut into slices, queries are packed for the first slice of a turn, and keys for each. */
int fattn_group_inputs(const fattn_group_plan *plan, const fattn_buffers *buffers, int64_t turn,
                       fattn_moved *list);
int fattn_group_results(const fattn_group_plan *plan, const fattn_buffers *buffers, int64_t turn,
                        fattn_moved *list);

/* Bytes of all rows of a rank in a message; tensors begin at multiples of 64. */
int64_t fattn_group_stream_bytes(const fattn_group_plan *plan, const fattn_moved *tensor,
                                 int64_t rank);

/* Copies that do not depend on each other, as they are collected. */
typedef struct fattn_copies {
    const fattn_group_plan *plan;
    int count;
    fattn_rows_args jobs[FATTN_ROWS_JOBS];
} fattn_copies;

/* Whether copies use lists of rows: plan->share_rows. */
bool fattn_group_lists_rows(const fattn_group_plan *plan);

/* The length of all lists together. */
int64_t fattn_group_listed_rows(const fattn_group_plan *plan);

/* Adds copies of all rows of a rank (of this rank, if they are in a share). If there is no room for
 * another, those added so far are made first. turns: 1; or that many turns from this one, between a
 * share and packed rows, if heads of a row are adjacent and each turn has packed rows of its own.
 */
fattn_status fattn_group_copy(fattn_copies *copies, const fattn_moved *tensor, int64_t rank,
                              const fattn_spot *from, const fattn_spot *to, int64_t turns);

/* Makes the copies that were added. */
fattn_status fattn_group_make_copies(fattn_copies *copies);

/* Adds the rows of a rank to a list, which has room for one span for each run and sequence. Heads
 * of a row are adjacent. */
void fattn_group_list(const fattn_group_plan *plan, const fattn_moved *tensor, int64_t rank,
                      const fattn_spot *at, fattn_span_list *list);

#endif
