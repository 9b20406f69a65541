/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much one head reads and writes, as formulas, for FlashAttention, FlashAttention-2 and
 * standard attention. They depend on the head's sizes and on the visited tiles, which io_predict.c
 * counts and io_estimate.c estimates.
 */
#ifndef FATTN_CORE_IO_COUNTS_H
#define FATTN_CORE_IO_COUNTS_H

#include "core/io_model.h"

/* The number of visited tiles; the sums of their rows, keys and pairs; and the entries of the block
 * mask that are read to decide which tiles to visit. */
typedef struct fattn_io_visits {
    double tiles, rows, keys, pairs, entries;
} fattn_io_visits;

typedef struct fattn_io_head {
    const fattn_problem *p;
    fattn_io_schedule schedule;
    bool first;         /* the first query head of its group, which initialises dK and dV */
    double n, k, d, dv; /* rows, keys and channels */
    double slot_k;      /* keys that the sequence has room for */
    fattn_io_visits v;
    fattn_io_counts *counts; /* the counts are added to these */
} fattn_io_head;

/* Add the accesses of a query head; and those that backward has once per key/value head. */
void fattn_io_count_queries(fattn_io_head *head);
void fattn_io_count_keys(fattn_io_head *head);

/* Entries of a tensor over pairs that all visited tiles read: a tile reads one along a broadcast
 * axis. */
double fattn_io_entries(const fattn_io_visits *visits, const int64_t stride[4]);

/* Entries of dbias: one along a summed axis. */
double fattn_io_dbias_elements(const fattn_problem *problem);

#endif
