/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one head reads and writes, as formulas of FlashAttention, FlashAttention-2 and standard
 * attention: of its sizes, and of the tiles that are visited, which io_predict.c counts and
 * io_estimate.c estimates.
 */
#ifndef FATTN_CORE_IO_COUNTS_H
#define FATTN_CORE_IO_COUNTS_H

#include "core/io_model.h"

/* Tiles that are visited, the sums over them of their rows, keys and pairs, and the entries of the
 * block mask that were read to decide. */
typedef struct fattn_io_visits {
    double tiles, rows, keys, pairs, entries;
} fattn_io_visits;

typedef struct fattn_io_head {
    const fattn_problem *p;
    fattn_io_schedule schedule;
    bool first;         /* of its group: the one that begins the sums of dK and dV */
    double n, k, d, dv; /* rows, keys and channels */
    double slot_k;      /* keys that the sequence has room for */
    fattn_io_visits v;
    fattn_io_counts *counts; /* to which is added */
} fattn_io_head;

/* A query head; and what backward adds for a key/value head. */
void fattn_io_count_queries(fattn_io_head *head);
void fattn_io_count_keys(fattn_io_head *head);

/* Entries that the visited tiles have in a tensor over pairs: a broadcast axis has one a tile. */
double fattn_io_entries(const fattn_io_visits *visits, const int64_t stride[4]);

/* Entries of dbias, of which a broadcast axis has one. */
double fattn_io_dbias_elements(const fattn_problem *problem);

#endif
