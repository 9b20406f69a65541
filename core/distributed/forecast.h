/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model of how long a divided problem takes, from a rank's rate of computing and its link's
 * bandwidth and latency; and of which scheme is the fastest. It assumes that every rank computes at
 * the same rate, whatever the shape, and that all links are equally fast.
 */
#ifndef FATTN_DISTRIBUTED_FORECAST_H
#define FATTN_DISTRIBUTED_FORECAST_H

#include "core/distributed/ring.h"

typedef struct fattn_speed {
    double flops;     /* per second and rank */
    double bandwidth; /* bytes per second that a rank can send and, at the same time, receive */
    double latency;   /* seconds per message */
    double row;       /* additional seconds per query row in each step after the first: mostly for
                       * merging */
    double units;     /* multiprocessors that wait at the end of each turn for the last of them; 0
                       * with spans, whose turns mostly overlap, and on CPUs with small items */
} fattn_speed;

typedef struct fattn_forecast {
    fattn_scheme scheme;
    int64_t head_ranks;             /* ranks that share the heads: 1 in a ring */
    int64_t turns;                  /* of heads: 1 in a ring */
    int64_t steps;                  /* of the ring, that with the own block included */
    double least_pairs, most_pairs; /* pairs of the rank that has fewest, and most; all heads */
    double least_bytes, most_bytes; /* bytes sent by the rank that sends fewest, and most */
    double computing, transferring; /* seconds of the rank that computes, or transfers, longest */
    double seconds;                 /* in all, with transfers during computation */
    double efficiency;              /* time of one rank / (ranks * seconds) */
} fattn_forecast;

/* "auto", "ring", "heads", "both", "reduce", and NULL. */
extern const char *const fattn_scheme_names[];

/* The split that suits the masks of a normalised problem: zigzag under a causal mask without a
 * window, else contiguous parts, which let a window reach only neighbours. */
fattn_split fattn_split_choose(const fattn_problem *problem);

/* Why a scheme does not support a problem; NULL if it does. */
const char *fattn_scheme_declines(const fattn_whole *whole, fattn_scheme scheme);

/* The number of ranks that share the heads: 1 in a ring. The scheme must support the problem. */
int64_t fattn_scheme_members(const fattn_whole *whole, fattn_scheme scheme);

/* Whether the heads of a rank can be computed in this number of turns. It must divide the number of
 * key/value heads; in FATTN_SCHEME_RING and _HEADS several turns may also share a key/value
 * head. */
bool fattn_scheme_can_turn(fattn_scheme scheme, int64_t heads_q, int64_t heads_k, int64_t turns);

/* The problem by which scheme and turns are chosen: that of `whole`; or, if it saves, its backward
 * with all gradients, which is written to *problem, so that forward and backward come to the same
 * choice. */
fattn_whole fattn_whole_to_choose_by(const fattn_whole *whole, fattn_problem *problem);

/* The number of turns if memory does not require more: `wanted`, or with 0 a number that follows
 * from the sizes and the speed, rounded down to a possible one. */
int64_t fattn_scheme_turns(const fattn_whole *whole, fattn_scheme scheme, const fattn_speed *speed,
                           int64_t wanted);

/* Whether there are too few queries to divide. Then, and only then, the tool and
 * fattn_forecast_make() choose FATTN_SCHEME_REDUCE, which needs all queries on every rank. */
bool fattn_scheme_reduces(fattn_op op, int64_t queries, int64_t ranks);

/* Writes the forecast of a scheme; for FATTN_SCHEME_AUTO that of the fastest one.
 * FATTN_UNSUPPORTED, with the reason, if the scheme does not support the problem. */
fattn_status fattn_forecast_make(const fattn_whole *whole, fattn_scheme scheme,
                                 const fattn_speed *speed, fattn_forecast *forecast);

#endif
