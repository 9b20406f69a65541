/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a problem is divided over ranks: which rows a rank holds, and which pairs of a query and a
 * key the queries of one rank and the keys of another have. Pure arithmetic, without messages.
 *
 * Each sequence is divided separately, its queries and its keys in the same way. A rank's share of
 * a sequence is one run of rows, or two under zigzag; the rows of a run are `stride` apart. A
 * *piece* is a run of queries against a run of keys, possibly of another rank. In indices within
 * the runs its kept pairs form a band in a rectangle, which a kernel can compute as a window.
 */
#ifndef FATTN_DISTRIBUTED_SPLIT_H
#define FATTN_DISTRIBUTED_SPLIT_H

#include <stdbool.h>

#include "fattn/distributed.h"

enum { FATTN_RUNS = 2 }; /* the most runs of a rank in a sequence */

#define FATTN_RANKS_MAX 65536

/* "auto", which stands for none of them, "contiguous", "zigzag", "striped", and NULL. */
extern const char *const fattn_split_names[];

/* Run `which` of a rank in a sequence of `length` rows. Parts differ by at most one row. */
fattn_run fattn_split_run(fattn_split split, int64_t length, int64_t ranks, int64_t rank,
                          int which);

/* The number of rows that a rank has of such a sequence. */
int64_t fattn_split_rows(fattn_split split, int64_t length, int64_t ranks, int64_t rank);

/* The undivided problem, and how it is divided. */
typedef struct fattn_whole {
    const fattn_problem *problem; /* normalised */
    const int32_t *cu_q, *cu_k;   /* NULL without FATTN_CU_SEQLENS_Q, _K */
    fattn_split split;
    int64_t ranks;
    bool all_queries; /* every rank has all queries: only keys are divided */
    bool halves;      /* a rank's one run of queries counts as two, its halves */
    bool saves;       /* fattn_group.saves */
    /* If `slices` is above 1 each run of keys is cut into that many, and only number `slice` counts
     * as a rank's keys. Number 0 has the most rows. */
    int64_t slice, slices;
} fattn_whole;

/* The lengths of a sequence. */

int64_t fattn_whole_q(const fattn_whole *whole, int64_t sequence);
int64_t fattn_whole_k(const fattn_whole *whole, int64_t sequence);

/* Whether dk or dv is wanted, which are summed over ranks. */
bool fattn_split_has_sums(const fattn_problem *problem);

/* For a ring: sets `halves` if gradients of keys travel and ranks have one run of queries, so that
 * there is something to compute during the last transfer (ring.h). */
void fattn_whole_set_halves(fattn_whole *whole);

/* Which rows of a rank are meant. */
typedef enum fattn_side { FATTN_QUERIES, FATTN_KEYS } fattn_side;

/* How many runs of queries a rank has; and run n of its queries, or keys, in a sequence. */
int fattn_whole_q_runs(const fattn_whole *whole);
fattn_run fattn_whole_run(const fattn_whole *whole, fattn_side side, int64_t sequence, int64_t rank,
                          int n);

/* The rows of all of a rank's runs in a sequence. */
int64_t fattn_whole_rows(const fattn_whole *whole, fattn_side side, int64_t sequence, int64_t rank);

/* The number of sequences that have to be looked at: all in a ragged batch, else 1, because all are
 * alike (0 if batch is 0). */
int64_t fattn_whole_kinds(const fattn_whole *whole);

/* Query i and key j, counted within their runs, are a kept pair if low <= j - i <= high. */
typedef struct fattn_piece {
    fattn_run q, k;
    int64_t low, high;
} fattn_piece;

/* The piece of run q_run of rank `rank` and run k_run of rank `owner` in a sequence. */
fattn_piece fattn_piece_of(const fattn_whole *whole, int64_t sequence, int64_t rank, int q_run,
                           int64_t owner, int k_run);

/* The number of kept pairs, by a closed form; exact below 2^53. */
double fattn_piece_pairs(const fattn_piece *piece);

/* The kept pairs of one query head between the queries of `rank` and the keys of `owner`, over the
 * batch; those of one run of the queries; and whether there are any. */
double fattn_whole_pairs(const fattn_whole *whole, int64_t rank, int64_t owner);
double fattn_whole_run_pairs(const fattn_whole *whole, int64_t rank, int q_run, int64_t owner);
bool fattn_whole_has_pairs(const fattn_whole *whole, int64_t rank, int64_t owner);

#endif
