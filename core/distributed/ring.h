/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The schedule of ring attention. Every rank keeps its queries; a block, which is all keys and
 * values of one rank, travels from neighbour to neighbour. A block travels in two lanes, up (to
 * rank + 1) and down (to rank - 1), as far as some rank needs it: without masks up through all
 * ranks, with a window only to those that the window reaches, with a causal mask over contiguous
 * parts never to a rank before the owner.
 *
 * In step t a rank computes with the block that has made t hops up and with the one that has made t
 * hops down; in step 0 with its own. Meanwhile the blocks of step t + 1 arrive and those of step t
 * are sent on. So a lane needs two buffers. A message is sent and received in the same step, so no
 * rank waits for a message of another step, in whatever order messages move.
 *
 * In backward the f32 gradients of a block follow it one step behind: a rank computes its share,
 * adds the sum that arrived meanwhile, and sends the new sum after the block in the next step. The
 * last rank that the block reaches sends the sum home to the block's owner, which adds it to its
 * own share. So the order of additions follows from the schedule and does not depend on timing.
 *
 * If a block has two runs of keys, each run travels only as far as some rank needs it, and its sum
 * only from the first rank that has added to it. (With zigzag and a causal mask later ranks do not
 * need the second run.)
 *
 * While the last sums travel home there is no block left to compute with. So each rank's first run
 * of queries postpones its part of the own block until then; a rank with one run takes its first
 * half (split.h). That is never slower, whatever the link: the f32 sums that travel home are no
 * smaller than the keys that travel in step 0.
 */
#ifndef FATTN_DISTRIBUTED_RING_H
#define FATTN_DISTRIBUTED_RING_H

#include "core/distributed/split.h"

enum { FATTN_UP, FATTN_DOWN, FATTN_LANES };

typedef struct fattn_ring {
    int64_t ranks;
    int64_t last_step;                 /* the most hops of any block */
    int64_t longest[FATTN_LANES];      /* the most hops in each lane */
    const int32_t *reach[FATTN_LANES]; /* [ranks]: hops that each owner's block makes */
    /* [ranks]: the first and the last hop at which a rank computes with a run of each owner's keys;
     * 0 and -1 if none does. */
    const int32_t *near[FATTN_LANES][FATTN_RUNS], *far[FATTN_LANES][FATTN_RUNS];
    bool trims; /* runs travel separately: one that is not needed, or whose sum is 0, does not */
} fattn_ring;

/* The runs of an owner's block that travel to its hops-th rank, bit n for run n: those that are
 * needed there or later. And the runs of its sum that leave that rank: those to which a rank has
 * added. */
unsigned fattn_ring_keys(const fattn_ring *ring, int lane, int64_t owner, int64_t hops);
unsigned fattn_ring_sums(const fattn_ring *ring, int lane, int64_t owner, int64_t hops);

/* Makes the schedule. If every rank has all queries, no block travels. Free it with
 * fattn_ring_free(). FATTN_OUT_OF_MEMORY is the only error. */
fattn_status fattn_ring_make(const fattn_whole *whole, fattn_ring *ring);
void fattn_ring_free(fattn_ring *ring);

/* The rank that is `hops` hops from a rank in a lane. */
int64_t fattn_ring_neighbour(const fattn_ring *ring, int lane, int64_t rank, int64_t hops);

/* The owner of the block that a rank has in a lane at step t; -1 if it has none. In step 0 only
 * lane FATTN_UP has a block: the rank's own. */
int64_t fattn_ring_owner(const fattn_ring *ring, int lane, int64_t rank, int64_t step);

/* The owner of the keys with which a run of queries is computed at step t in a lane; -1 if there
 * are none. With gradients step last_step + 1 has work too. */
int64_t fattn_ring_work(const fattn_ring *ring, int lane, int64_t rank, int64_t step, int q_run,
                        int q_runs, bool gradients);

/* The messages of a rank in a lane while it computes step t: their peers, or -1 if there is no such
 * message. Only backward has gradients; their last messages travel in step last_step + 1. */
typedef struct fattn_ring_messages {
    int64_t send_to, receive_from; /* the block of step t; the block of step t + 1 */
    int64_t gradient_to;           /* the sum of step t - 1, to the next rank or to its owner */
    int64_t gradient_from;         /* the sum to which this rank's share of step t is added */
    int64_t home_from;             /* the other ranks' sum of this rank's own block */
} fattn_ring_messages;

fattn_ring_messages fattn_ring_step(const fattn_ring *ring, int lane, int64_t rank, int64_t step);

/* The number of additional messages for which the group of step last_step has room, on any rank. It
 * has the fewest of all computing steps: no blocks, and at most six of gradients, three in each
 * lane or six in one. */
int fattn_ring_room(const fattn_ring *ring, bool gradients);

#endif
