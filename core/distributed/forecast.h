/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long a divided problem takes, from the rate at which a rank computes and the bandwidth and
 * latency of its link; and which scheme is the fastest. A model, not a measurement: every rank
 * computes at the same rate whatever the shape, and every link is as fast as any other.
 */
#ifndef FATTN_DISTRIBUTED_FORECAST_H
#define FATTN_DISTRIBUTED_FORECAST_H

#include "core/distributed/ring.h"

typedef struct fattn_speed {
    double flops;     /* a second, of one rank */
    double bandwidth; /* bytes a second that a rank sends, and receives, at a time */
    double latency;   /* seconds of a message */
    double row;       /* seconds that a row of queries takes besides, in each step after the first:
                       * merging, mostly */
} fattn_speed;

typedef struct fattn_forecast {
    fattn_scheme scheme;
    int64_t head_ranks;             /* ranks that share the heads: 1 in a ring */
    int64_t turns;                  /* that heads take: 1 in a ring */
    int64_t steps;                  /* of the ring, its own block included */
    double least_pairs, most_pairs; /* of a rank, all query heads */
    double least_bytes, most_bytes; /* that a rank sends */
    double computing, transferring; /* seconds of the rank that has most of it */
    double seconds;                 /* all of it, transfers beside computation */
    double efficiency;              /* time of one rank / (ranks * seconds) */
} fattn_forecast;

/* "ring", "heads", "both", "reduce"; "auto". Static. */
const char *fattn_scheme_name(fattn_scheme scheme);

/* Which division suits the masks of a normalised problem: zigzag where they are causal and nothing
 * else, else contiguous parts, of which a window reaches only neighbours. */
fattn_split fattn_split_choose(const fattn_problem *problem);

/* Why a scheme cannot be had for a problem; NULL where it can. */
const char *fattn_scheme_declines(const fattn_whole *whole, fattn_scheme scheme);

/* Ranks that share the heads: 1 in a ring. The scheme is one that can be had. */
int64_t fattn_scheme_members(const fattn_whole *whole, fattn_scheme scheme);

/* Whether the heads of a rank can take so many turns. Turns divide the heads of keys; in a ring,
 * and where heads are all that ranks exchange, several turns may also share a head of keys. */
bool fattn_scheme_can_turn(fattn_scheme scheme, int64_t heads_q, int64_t heads_k, int64_t turns);

/* How many they take, unless memory asks for more: as many as are wanted, or by size where that is
 * 0; the next smaller number that can be had. */
int64_t fattn_scheme_turns(const fattn_whole *whole, fattn_scheme scheme, int64_t wanted);

/* Foretells a scheme; FATTN_UNSUPPORTED, with the reason, for one that cannot be had. */
fattn_status fattn_forecast_make(const fattn_whole *whole, fattn_scheme scheme,
                                 const fattn_speed *speed, fattn_forecast *forecast);

#endif
