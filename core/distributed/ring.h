/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ring: every rank keeps its queries, and blocks of keys (all that one rank owns) travel from
 * neighbour to neighbour. A block goes up (to rank + 1) and down (to rank - 1) as far as some rank
 * needs it, and no further: without masks up through all ranks, with a window only to those that
 * the window reaches, with a causal mask over contiguous parts never to a rank before the owner.
 *
 * In step t a rank computes with the block that has come t hops up, and with the one that has come
 * t hops down; in step 0 with its own. While it does, the blocks of step t + 1 arrive and those of
 * step t go on. So a lane has two buffers, and what one rank sends in a step its neighbour
 * receives in the same step: no rank waits for a message of another step, whatever the order.
 *
 * In backward the f32 gradients of a block follow it one step behind: a rank computes its share,
 * adds the sum that arrived meanwhile and sends it after the block, in the next step. The last
 * rank that the block reaches sends the sum home to its owner, which adds it to its own share. So
 * the order of additions follows from the schedule and does not depend on time.
 *
 * Of a block with two runs of keys each travels only as far as some rank needs it, and its sum only
 * from the first rank that has added to it. (Under zigzag and a causal mask later ranks do not need
 * the second run.)
 *
 * While sums travel home there is no block left to compute with. So the first run of queries of
 * each rank leaves its part of the own block until then; where ranks have one run, it counts as two
 * halves (split.h). That is never slower, whatever the link: the f32 sums that travel home are no
 * smaller than the keys that travel in step 0.
 */
#ifndef FATTN_DISTRIBUTED_RING_H
#define FATTN_DISTRIBUTED_RING_H

#include "core/distributed/split.h"

enum { FATTN_UP, FATTN_DOWN, FATTN_LANES };

typedef struct fattn_ring {
    int64_t ranks;
    int64_t last_step;                 /* the longest way of a block */
    int64_t longest[FATTN_LANES];      /* of each lane */
    const int32_t *reach[FATTN_LANES]; /* [ranks]: hops that the block of each owner makes */
    /* [ranks]: the first and the last hop at which a rank computes with a run of each owner's keys;
     * 0 and -1 where none does. */
    const int32_t *near[FATTN_LANES][FATTN_RUNS], *far[FATTN_LANES][FATTN_RUNS];
    bool trims; /* a run travels by itself where the other one is not needed, or its sum 0 */
} fattn_ring;

/* Which runs of an owner's block arrive at its hops-th rank, bit n for run n: those that are needed
 * there or later. And which runs of its sum leave that rank: those that a rank has added to. */
unsigned fattn_ring_keys(const fattn_ring *ring, int lane, int64_t owner, int64_t hops);
unsigned fattn_ring_sums(const fattn_ring *ring, int lane, int64_t owner, int64_t hops);

/* Where the blocks go; nowhere where every rank has all queries. FATTN_OUT_OF_MEMORY, or done; to
 * be freed by fattn_ring_free(). */
fattn_status fattn_ring_make(const fattn_whole *whole, fattn_ring *ring);
void fattn_ring_free(fattn_ring *ring);

/* rank + hops up the ring, or down it. */
int64_t fattn_ring_neighbour(const fattn_ring *ring, int lane, int64_t rank, int64_t hops);

/* Who owns the block that a rank has in a lane at step t; -1 where it has none. Step 0 has a block
 * in lane FATTN_UP only: the rank's own. */
int64_t fattn_ring_owner(const fattn_ring *ring, int lane, int64_t rank, int64_t step);

/* Whose keys a run of queries is computed with at step t in a lane; -1 where there are none. With
 * gradients step last_step + 1 has work too. */
int64_t fattn_ring_work(const fattn_ring *ring, int lane, int64_t rank, int64_t step, int q_run,
                        int q_runs, bool gradients);

/* What goes from and to a rank in a lane while it computes step t; peers are -1 where nothing
 * does. Gradients are those of backward alone, whose last messages go in step last_step + 1. */
typedef struct fattn_ring_messages {
    int64_t send_to, receive_from; /* the block of step t; the block of step t + 1 */
    int64_t gradient_to;           /* the sum of step t - 1, to the next rank or home */
    int64_t gradient_from;         /* the sum that this rank's share of step t is added to */
    int64_t home_from;             /* the whole sum of this rank's own block */
} fattn_ring_messages;

fattn_ring_messages fattn_ring_step(const fattn_ring *ring, int lane, int64_t rank, int64_t step);

/* How many messages of others the group of step last_step has room for, on any rank. Of the steps
 * that compute it has the fewest: no blocks, and of gradients three in each lane at most, or six in
 * one. */
int fattn_ring_room(const fattn_ring *ring, bool gradients);

#endif
