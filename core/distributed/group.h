/* SPDX-License-Identifier: Apache-2.0 */
/* A plan of a group from inside: what planning (group.c) makes and execution (rounds.c) uses. */
#ifndef FATTN_DISTRIBUTED_GROUP_H
#define FATTN_DISTRIBUTED_GROUP_H

#include "core/abi.h"
#include "core/distributed/ring.h"

/* A piece of the ring, as a problem for one device. */
typedef struct fattn_group_piece {
    fattn_problem problem;
    fattn_plan *plan;
} fattn_group_piece;

/* Byte offsets of keys and values, or of their gradients, in a block: run by run. */
typedef struct fattn_block {
    int64_t k[FATTN_RUNS], v[FATTN_RUNS];
    int64_t bytes;
} fattn_block;

/* Rows of a run of a rank, over the batch; and in its longest sequence. */
typedef struct fattn_extent {
    int64_t rows, longest;
} fattn_extent;

struct fattn_group_plan {
    fattn_transport transport;
    fattn_device *device;
    double timeout;
    int64_t rank;

    fattn_problem problem; /* undivided, normalised; its strides are the share's */
    uint64_t features;     /* as the caller gave them */
    fattn_problem local;   /* of this rank's shares, normalised */
    fattn_whole whole;
    fattn_ring ring;
    int runs;
    int rounds; /* groups of messages of an execution, those of dsink excepted */
    bool ragged, backward, gradients; /* gradients: of k or v, which travel */

    fattn_group_piece *pieces; /* different ones */
    int64_t piece_count;

    /* Positions of a ragged piece, and the beginnings of the rank's own shares. */
    int32_t *cu_q, *cu_k, *local_q, *local_k;
    int64_t *q_offsets, *k_offsets, *wholes_q, *wholes_k;

    /* Run by run: rows one after another, whatever the caller's strides are. */
    void *memory;
    int64_t bytes;
    char *q[FATTN_RUNS], *o[FATTN_RUNS], *dout[FATTN_RUNS];
    float *lse[FATTN_RUNS], *dlse[FATTN_RUNS];
    float *sum[FATTN_RUNS]; /* f32: o so far; in backward dq */
    float *part_o, *part_lse;
    char *own, *lane[FATTN_LANES][2]; /* blocks: this step's and the next one's */
    char *own_sum;                    /* f32 gradients of the own block */
    char *share[FATTN_LANES], *sending[FATTN_LANES], *arriving[FATTN_LANES], *home[FATTN_LANES];
    float *dsink; /* [ranks][Hq] */
    void *workspace;
};

fattn_extent fattn_group_queries(const fattn_group_plan *plan, int run);
fattn_extent fattn_group_keys(const fattn_group_plan *plan, int64_t owner, int run);

/* The block of an owner, with so many bytes an element of keys and of values. */
fattn_block fattn_group_block(const fattn_group_plan *plan, int64_t owner, int64_t k_size,
                              int64_t v_size);
/* The same of keys and values themselves, and of the gradients that are wanted. */
fattn_block fattn_group_block_keys(const fattn_group_plan *plan, int64_t owner);
fattn_block fattn_group_block_sums(const fattn_group_plan *plan, int64_t owner);

/*
 * The problem of queries of run q_run against keys of run k_run of an owner, and the positions of
 * its buffers. False where they have no pairs. The first piece of each run of queries, against own
 * keys, is there in any case: it is what has the sink, and what rows without keys get their o from.
 */
bool fattn_group_piece_of(const fattn_group_plan *plan, int64_t owner, int q_run, int k_run,
                          fattn_problem *problem, fattn_buffers *buffers);
bool fattn_group_is_first(const fattn_group_plan *plan, int64_t owner, int k_run);

/* Sends `bytes` of `all` + rank * bytes to all ranks, and receives theirs. */
fattn_status fattn_group_gather(const fattn_group_plan *plan, void *all, int64_t bytes);

#endif
