/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who holds which rows of a problem that is divided over ranks, and which pairs of a query and a
 * key the rows of two ranks have in common. Pure arithmetic: nothing is stored, no rank is asked.
 *
 * Each sequence is divided by itself, its queries and its keys in the same way. A rank's share of a
 * sequence is one run of rows, or two under zigzag; the rows of a run are `stride` apart. A *piece*
 * is a run of queries against a run of keys, possibly of another rank. In numbers within the runs
 * it is a rectangle crossed by a band, which is all that a kernel has to know.
 */
#ifndef FATTN_DISTRIBUTED_SPLIT_H
#define FATTN_DISTRIBUTED_SPLIT_H

#include <stdbool.h>

#include "fattn/distributed.h"

enum { FATTN_RUNS = 2 }; /* the most runs of a rank in a sequence */

#define FATTN_RANKS_MAX 65536

/* "contiguous", "zigzag", "striped". Static. */
const char *fattn_split_name(fattn_split split);

/* Run `which` of a rank in a sequence of `length` rows. Parts differ by at most one row. */
fattn_run fattn_split_run(fattn_split split, int64_t length, int64_t ranks, int64_t rank,
                          int which);

/* Rows that a rank has of such a sequence. */
int64_t fattn_split_rows(fattn_split split, int64_t length, int64_t ranks, int64_t rank);

/* The lengths of the sequences of the undivided problem. */
typedef struct fattn_whole {
    const fattn_problem *problem; /* normalised */
    const int32_t *cu_q, *cu_k;   /* NULL without FATTN_CU_SEQLENS_Q, _K */
    fattn_split split;
    int64_t ranks;
    bool all_queries; /* which every rank has: only keys are divided */
    bool halves;      /* a rank's one run of queries counts as two, one behind the other */
    /* With `slices` above 1 each run of keys is cut into so many, of which only number `slice` is
     * meant. Number 0 has the most rows. */
    int64_t slice, slices;
} fattn_whole;

int64_t fattn_whole_q(const fattn_whole *whole, int64_t sequence);
int64_t fattn_whole_k(const fattn_whole *whole, int64_t sequence);

/* Whether gradients of keys or values are wanted, which are summed over ranks. */
bool fattn_split_has_sums(const fattn_problem *problem);

/* For a ring: queries count as halves where gradients of keys travel and ranks have one run of
 * them, so that there is something to compute beside the last transfer (ring.h). */
void fattn_whole_set_halves(fattn_whole *whole);

/* Run n of a rank's queries, or keys, in a sequence; and how many runs of queries a rank has. */
int fattn_whole_q_runs(const fattn_whole *whole);
fattn_run fattn_whole_run(const fattn_whole *whole, bool keys, int64_t sequence, int64_t rank,
                          int n);

/* Rows of all of them. */
int64_t fattn_whole_rows(const fattn_whole *whole, bool keys, int64_t sequence, int64_t rank);

/* Sequences of different lengths, or 1 where all are equal: what is true of one is true of all. */
int64_t fattn_whole_kinds(const fattn_whole *whole);

/* Row i and key j, counted within their runs, are a pair when low <= j - i <= high. */
typedef struct fattn_piece {
    fattn_run q, k;
    int64_t low, high;
} fattn_piece;

/* The piece of run q_run of rank `rank` and run k_run of rank `owner` in a sequence. */
fattn_piece fattn_piece_of(const fattn_whole *whole, int64_t sequence, int64_t rank, int q_run,
                           int64_t owner, int k_run);

/* How many pairs it has; the closed form, exact while below 2^53. */
double fattn_piece_pairs(const fattn_piece *piece);

/* Pairs of one query head between the queries of one rank and the keys of another, over the batch;
 * those of one run of the queries; and whether there are any. */
double fattn_whole_pairs(const fattn_whole *whole, int64_t rank, int64_t owner);
double fattn_whole_run_pairs(const fattn_whole *whole, int64_t rank, int q_run, int64_t owner);
bool fattn_whole_has_pairs(const fattn_whole *whole, int64_t rank, int64_t owner);

#endif
