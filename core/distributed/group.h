/* SPDX-License-Identifier: Apache-2.0 */
/* A plan of a group from inside: what planning (group.c) makes and execution (exchange.c, rounds.c,
 * attend.c) uses. */
#ifndef FATTN_DISTRIBUTED_GROUP_H
#define FATTN_DISTRIBUTED_GROUP_H

#include "core/abi.h"
#include "core/distributed/forecast.h"
#include "core/rows.h"

/* A piece of the ring, as a problem for one device. */
typedef struct fattn_group_piece {
    fattn_problem problem;
    fattn_plan *plan;
} fattn_group_piece;

/* In place of a run of queries: both are one piece. */
enum { FATTN_BOTH = FATTN_RUNS };

/* A piece that a rank computes: a run of its queries, or both, against a run of an owner's keys. */
typedef struct fattn_visit {
    int64_t owner;
    int q_run, k_run;
} fattn_visit;

/* Byte offsets of keys and values, or of their gradients, in a block: of each run. */
typedef struct fattn_block {
    int64_t k[FATTN_RUNS], v[FATTN_RUNS];
    int64_t bytes;
} fattn_block;

/* Rows of a run of a rank, over the batch; and in its longest sequence. */
typedef struct fattn_extent {
    int64_t rows, longest;
} fattn_extent;

/* Bytes of an exchange between two members: the most results of a turn, and what each member has in
 * plan->outward and plan->inward (exchange.c). */
typedef struct fattn_slots {
    int64_t results, outward, inward;
} fattn_slots;

struct fattn_group_plan {
    fattn_transport transport;
    fattn_device *device;
    double timeout;
    fattn_scheme scheme;

    /* Ranks that share heads are the members of a group; groups form the ring, and `rank` is this
     * rank's group there. In a ring alone each rank is a group. */
    int64_t rank, member, members;

    int64_t memory;           /* the caller's limit, or 0 */
    int64_t wanted;           /* turns at least, where heads may take turns */
    int64_t others;           /* turns times slices that another rank needs, or 0 */
    int64_t turns;            /* that heads take: `problem` has those of one */
    int64_t turn;             /* the one under way */
    int64_t sharing;          /* turns in a row that have the same head of keys */
    int64_t slices;           /* of keys, in each of which a turn is a ring; `whole` has one */
    int64_t heads_q, heads_k; /* of a member, in all turns */

    fattn_problem problem; /* undivided but for its heads, which are a turn's; normalised */
    uint64_t features;     /* as the caller gave them */
    fattn_problem local;   /* of this rank's shares, with all heads, normalised */
    fattn_whole shares;    /* over all ranks */
    fattn_whole whole;     /* over the groups */
    fattn_ring ring;
    int q_runs, k_runs;
    int rounds; /* groups of messages of an execution, those of dsink excepted */
    bool ragged, backward, gradients; /* gradients: of k or v, which travel */
    bool direct;                      /* q, o and dout are read where the caller has them */
    bool keys_direct; /* and so are the own keys and values, which lie as in a block */
    bool merges;      /* some piece is not the first of its queries */
    bool together; /* forward begins with both runs of queries as one piece: lse has their rows side
                    * by side */

    fattn_group_piece *pieces; /* different ones */
    int64_t piece_count;

    /* Positions of a ragged piece, and the beginnings of the rank's own shares. */
    int32_t *cu_q, *cu_k, *local_q, *local_k;
    int64_t *q_offsets, *k_offsets, *wholes_q, *wholes_k;

    /* Run by run: rows one after another, whatever the caller's strides are. */
    void *memory_at;
    int64_t bytes, workspace_bytes;
    char *q[FATTN_RUNS], *o[FATTN_RUNS], *dout[FATTN_RUNS];
    float *lse[FATTN_RUNS], *dlse[FATTN_RUNS];
    float *sum[FATTN_RUNS]; /* f32: o so far; in backward dq; runs of a sequence side by side */
    float *part_o, *part_lse;
    char *own, *lane[FATTN_LANES][2]; /* blocks: this step's and the next one's */
    char *own_sum;                    /* f32 gradients of the own block; of all slices, where
                                       * turns share keys, one `own_step` bytes behind another */
    int64_t own_step;
    char *share[FATTN_LANES], *sending[FATTN_LANES], *arriving[FATTN_LANES], *home[FATTN_LANES];
    float *dsink; /* [all ranks][Hq of a member] */
    fattn_slots slots;
    char *outward[2], *inward[2]; /* [members][slot]: rows that go to members, and come */
    void *workspace;
    void *answers;         /* in device memory, to compare ranks */
    fattn_event *finished; /* behind the last execution, on a device with memory of its own */

    /* Of an execution: runs of queries whose o and lse are the caller's already; and the lane whose
     * home is yet to be added to the own sums, or -1. */
    unsigned done;
    int late;
};

/*
 * The steps of fattn_group_plan_create() that need no other rank, on a zeroed plan with a transport
 * (its rank and number of ranks), device, scheme, memory, wanted, and of shares split, ranks and
 * all_queries: what the caller described, and then how many bytes the plan takes, in how many turns
 * and slices. The plan is to be destroyed in any case.
 */
fattn_status fattn_group_describe(fattn_group_plan *plan, const fattn_problem *problem,
                                  const int32_t *cu_q, const int32_t *cu_k);
fattn_status fattn_group_size(fattn_group_plan *plan);

/* Of a run of this rank's queries, or of both. */
fattn_extent fattn_group_queries(const fattn_group_plan *plan, int run);
fattn_extent fattn_group_keys(const fattn_group_plan *plan, int64_t owner, int run);

/* Keys of an owner in the longest sequence, of all runs; and this rank's queries. */
int64_t fattn_group_key_rows(const fattn_group_plan *plan, int64_t owner);
int64_t fattn_group_query_rows(const fattn_group_plan *plan);
/* The first row of a run of queries, or of both, within the share of a sequence. */
int64_t fattn_group_row(const fattn_group_plan *plan, int q_run);

/* Rows of heads and channels without gaps; so many rows from one sequence to the next. */
fattn_strides fattn_group_packed(int64_t rows, int64_t heads, int64_t channels);

/* The block of an owner, with so many bytes an element of keys and of values. */
fattn_block fattn_group_block(const fattn_group_plan *plan, int64_t owner, int64_t k_size,
                              int64_t v_size);
/* The same of keys and values themselves, and of the gradients that are wanted. */
fattn_block fattn_group_block_keys(const fattn_group_plan *plan, int64_t owner);
fattn_block fattn_group_block_sums(const fattn_group_plan *plan, int64_t owner);

/* The n-th of the q_runs * k_runs that a step has in a lane at most: the first of a run of queries
 * come first. False where there is none, or where it is part of one before. */
bool fattn_group_visit(const fattn_group_plan *plan, int lane, int64_t step, int n,
                       fattn_visit *visit);

/*
 * The problem of a visit, and the positions of its buffers. False where it has no pairs, or none
 * that an output depends on, or where those of both runs of keys are one piece, that of run 0. The
 * first piece of each run of queries, against own keys, is there in any case: it is what has the
 * sink, and what rows without keys get their o from.
 */
bool fattn_group_piece_of(const fattn_group_plan *plan, const fattn_visit *visit,
                          fattn_problem *problem, fattn_buffers *buffers);
bool fattn_group_is_first(const fattn_group_plan *plan, int64_t owner, int k_run);

/* The gradients of the own block, of the slice under way. */
char *fattn_group_own_sum(const fattn_group_plan *plan);

/* Whether this is the last slice of keys. */
bool fattn_group_ends_turn(const fattn_group_plan *plan);

/* The rank that is a member of a group. */
int64_t fattn_group_rank(const fattn_group_plan *plan, int64_t group, int64_t member);

/* Where keys and values of an owner lie. */
typedef struct fattn_held {
    char *k, *v;
} fattn_held;

/* Computes the pieces of a step in a lane; gradients of keys are added to `sums`. */
fattn_status fattn_group_attend(fattn_group_plan *plan, const fattn_buffers *given, int lane,
                                int64_t step, const fattn_held *keys, char *sums);

/* Merges the plan's part with what there is of its queries: a run, or both. `given` has the results
 * where these are final, and is NULL else. */
fattn_status fattn_group_merge(fattn_group_plan *plan, const fattn_buffers *given, int q_run);

/* What distinguishes messages between two ranks; those below are a round's. */
enum { FATTN_TAG_MEMBERS = 14, FATTN_TAG_GATHER = 15 };

/* Adds a message of any size, also of none. */
void fattn_group_add_message(fattn_message *messages, int *count, int64_t peer, int tag,
                             bool receive, void *data, int64_t bytes);

/* Which runs of the own block's sum come home in a lane: bit n for run n. */
unsigned fattn_group_home_runs(const fattn_group_plan *plan, int lane);

/* Starts messages and waits for them; if that fails, all ranks are told. */
fattn_status fattn_group_carry(const fattn_group_plan *plan, const fattn_message *messages,
                               int count);

/* Moves rows on the group's device. */
fattn_status fattn_group_move(const fattn_group_plan *plan, const fattn_rows_args *args);

/* The caller's tensors into packed rows, of the turn under way; other members' rows are in slots.
 * And results back, where there are no other members. */
fattn_status fattn_group_pack(const fattn_group_plan *plan, const fattn_buffers *buffers);
fattn_status fattn_group_unpack(const fattn_group_plan *plan, const fattn_buffers *buffers);

/*
 * Exchanges between members, where there are other ones (exchange.c): exchange x carries inputs of
 * turn x and results of turn x - 2, each if there is such a turn. Inputs are loaded into slots from
 * the caller's tensors; results from what the last turn packed, and all of them are stored at the
 * end.
 */
fattn_slots fattn_group_slots(const fattn_group_plan *plan);
fattn_status fattn_group_load_inputs(const fattn_group_plan *plan, const fattn_buffers *buffers,
                                     int64_t turn);
fattn_status fattn_group_load_results(const fattn_group_plan *plan, int64_t turn);
fattn_status fattn_group_store_results(const fattn_group_plan *plan, const fattn_buffers *buffers);

/* The messages of an exchange that go beside the pieces of a step; and the others, with nothing
 * beside them: all with `whole`. */
void fattn_group_exchange_beside(const fattn_group_plan *plan, int64_t exchange,
                                 fattn_message *messages, int *count);
fattn_status fattn_group_exchange(const fattn_group_plan *plan, int64_t exchange, bool whole);

/* Sends `bytes` of `all` + rank * bytes to all ranks, and receives theirs. */
fattn_status fattn_group_gather(const fattn_group_plan *plan, void *all, int64_t bytes);

#endif
