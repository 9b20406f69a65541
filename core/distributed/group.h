/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of a group: planning (group.c, piece.c) makes it, execution (exchange.c, rounds.c,
 * attend.c) uses it.
 *
 * Words of this folder. A *run* is rows of a rank at equal distances; a *piece* is a run of queries
 * against a run of keys (split.h); a *visit* says which piece a rank computes next. A *block* is
 * all keys and values of one rank, its *owner*, which travels around the ring; a *lane* is one of
 * the two directions (ring.h). A *turn* is a part of the heads, a *slice* a part of the keys.
 * *Members* are the ranks of a group that share heads; what they send each other is in *slots*, one
 * for each member.
 */
#ifndef FATTN_DISTRIBUTED_GROUP_H
#define FATTN_DISTRIBUTED_GROUP_H

#include "core/abi.h"
#include "core/distributed/forecast.h"
#include "core/rows.h"

/* The features that a group supports. */
#define FATTN_GROUP_FEATURES                                                                \
    (FATTN_CAUSAL | FATTN_WINDOW | FATTN_SCALE | FATTN_SOFTCAP | FATTN_ALIBI | FATTN_SINK | \
     FATTN_BIAS | FATTN_ALIBI_BIAS | FATTN_MASK | FATTN_DROPOUT | FATTN_CU_SEQLENS_Q |      \
     FATTN_CU_SEQLENS_K | FATTN_DLSE | FATTN_DETERMINISTIC)

/* A piece of the undivided problem, as a problem for one device. */
typedef struct fattn_group_piece {
    fattn_problem problem;
    fattn_plan *plan;
} fattn_group_piece;

/* Used as the number of a run of queries: both runs together, as one piece. */
enum { FATTN_BOTH = FATTN_RUNS };

/* A piece that a rank computes: a run of its queries, or both, against a run of an owner's keys. */
typedef struct fattn_visit {
    int64_t owner;
    int q_run, k_run;
} fattn_visit;

/* Byte offsets of each run's keys and values, or of their gradients, in a block. */
typedef struct fattn_block {
    int64_t k[FATTN_RUNS], v[FATTN_RUNS];
    int64_t bytes;
} fattn_block;

/* Rows of a run of a rank: over the whole batch, and in its longest sequence. */
typedef struct fattn_extent {
    int64_t rows, longest;
} fattn_extent;

/* Where the rows with which a turn computes are packed, run by run, whatever the caller's strides
 * are. NULL: not packed, or not needed. */
typedef struct fattn_packed {
    char *q[FATTN_RUNS], *o[FATTN_RUNS], *dout[FATTN_RUNS];
    float *lse[FATTN_RUNS], *dlse[FATTN_RUNS];
    char *sum[FATTN_RUNS]; /* forward: the o so far, backward: dq; f32 sums, in which both runs of a
                            * sequence are adjacent. If the turn is a single piece: its o or dq */
    char *own;             /* the rank's own block of keys and values */
    char *own_sum;         /* gradients of the own block, f32 unless `single`; if turns share keys,
                            * of all slices, `own_step` bytes apart */
} fattn_packed;

/* Which spans may be sent: none, large ones, or any. A GPU's copy engine takes some microseconds
 * for each, a host no time. */
typedef enum fattn_span_rule {
    FATTN_NO_SPANS,
    FATTN_LARGE_SPANS, /* and any if there are few, because the batch is 1 */
    FATTN_ALL_SPANS
} fattn_span_rule;

/* Bytes of an exchange between two members: the most that the results of a turn take, and the size
 * of a member's slot in plan->outward and plan->inward (exchange.c). */
typedef struct fattn_slots {
    int64_t results, outward, inward;
} fattn_slots;

struct fattn_group_plan {
    fattn_transport transport;
    fattn_device *device;
    double timeout;
    fattn_scheme scheme;
    fattn_speed speed; /* for choosing the scheme */

    /* Ranks that share heads are the members of a group; the groups form the ring, and `group` is
     * the number of this rank's group in it. In FATTN_SCHEME_RING each rank is a group. (This
     * rank's number is transport.rank.) */
    int64_t group, member, members;

    int64_t memory;           /* the caller's limit, or 0 */
    int64_t wanted;           /* at least this many turns, if heads may take turns */
    int64_t others;           /* turns times slices that another rank needs, or 0 */
    int64_t turns;            /* in how many turns heads are computed; `problem` is one turn's */
    int64_t turn;             /* the turn that is being computed */
    int64_t sharing;          /* consecutive turns that have the same key/value head */
    int64_t slices;           /* parts of the keys; each turn computes a ring for each of them */
    int64_t heads_q, heads_k; /* of a member, in all turns */

    fattn_problem problem; /* undivided, but with the heads of one turn; normalised */
    uint64_t features;     /* as the caller gave them */
    fattn_problem local;   /* this rank's shares, with all heads; normalised */
    fattn_whole shares;    /* how rows are divided over all ranks */
    fattn_whole whole;     /* how rows are divided over the groups, for the current slice */
    fattn_ring ring;
    int q_runs, k_runs;
    int rounds;                       /* rounds of messages per turn, without those of dsink */
    bool ragged, backward, gradients; /* gradients: dk or dv is wanted, so sums travel */
    bool direct;                      /* q, o and dout are used in the caller's tensors */
    bool keys_direct; /* so are the rank's own k and v, which are laid out like a block */
    bool merges;      /* some piece has to be merged with an earlier one */
    bool single;      /* a turn is one piece, which writes results in their final types; else pieces
                       * write and add to f32 sums */
    fattn_span_rule span_rule; /* which spans all ranks can send and receive */
    bool overlaps; /* turns overlap, which takes spans and a set of packed rows for each turn */
    bool saves;    /* forward saves rows for backward: `saved` */
    bool spans;    /* members send rows of tensors as they are, without copying them to messages
                       * first: exchange.c */
    bool together; /* forward begins with both runs of queries as one piece, so their rows are
                    * adjacent in lse */

    fattn_group_piece *pieces; /* the different problems that occur */
    int64_t piece_count;

    /* Of a ragged batch: positions of a piece, and the beginnings of the rank's own shares. */
    int32_t *cu_q, *cu_k, *local_q, *local_k;
    int64_t *rows_before[2]; /* [all ranks + 1]: rows of queries, and of keys, of earlier ranks; if
                              * members exchange heads */
    int64_t *q_offsets, *k_offsets, *wholes_q, *wholes_k;
    /* For a device that has its own memory, else NULL: an array of cu_seqlens for each run of this
     * rank's queries, then for each run of each group's keys, then one of zeros, for pieces without
     * keys. [arrays][batch + 1] */
    int32_t *device_cu;
    /* Lists of rows in memory of the device, for queries and for keys, if members exchange a ragged
     * batch and a turn has one piece; else NULL. For each row of a message, share_rows has its row
     * in this rank's share, and packed_rows its packed row, one member after another. So one job
     * moves a tensor, however many sequences there are. */
    int32_t *share_rows[2], *packed_rows[2];

    /* The plan's memory, and its parts. */
    void *memory_at;
    int64_t bytes, workspace_bytes;
    /* [sets]: turn t uses set t % sets. The first key_sets have keys, and turns that share keys use
     * one of these. From a set to the next it is set_bytes, of their keys key_set_bytes. */
    fattn_packed *packed;
    int64_t sets, key_sets, set_bytes, key_set_bytes;
    /* [turns] if the plan saves: rows in the caller's memory, which forward writes and backward
     * reads. q, o, lse and the own block are there instead of in `packed`. */
    fattn_packed *saved;
    char *saved_at;
    int64_t saved_bytes;
    fattn_packed at;            /* the current turn's */
    float *part_o, *part_lse;   /* the result of the last piece, before it is merged */
    char *lane[FATTN_LANES][2]; /* blocks: this step's and the next one's */
    int64_t own_step;
    /* f32 gradients of travelling blocks: this step's, those being sent and received, and the own
     * block's from the other ranks. */
    char *share[FATTN_LANES], *sending[FATTN_LANES], *arriving[FATTN_LANES], *home[FATTN_LANES];
    float *dsink; /* [all ranks][Hq of a member] */
    fattn_slots slots;
    char *outward[2], *inward[2]; /* [members][slot]: rows to and from the members */
    fattn_span *span_memory;      /* for the messages of an exchange: fattn_group_span_bytes() */
    void *workspace[2];           /* the second for turns that overlap */
    void *answers;                /* device memory for comparing what ranks were given */
    fattn_event *finished;        /* after the last execution, on a device with memory of its own */

    /* For turns that overlap: even turns compute on one stream and odd turns on the other, so that
     * the kernels of a turn fill the multiprocessors that those of the turn before leave idle at
     * its end. turn_ready: the inputs of a turn have arrived; turn_done: it has been computed. */
    fattn_stream stream[2];
    fattn_event *turn_ready, *turn_done[2];

    /* State of an execution, like turn, at, saved_at, the slices of `shares` and `whole`, and the
     * positions above. (The pointers `share` and `sending` are swapped, too.) */
    unsigned stored_runs; /* bit n: the o and lse of run n are in the caller's tensors */
    int late;             /* the lane whose `home` has not been added to own_sum yet, or -1 */
};

/*
 * The steps of fattn_group_plan_create() that need no other rank. The first sets the plan's fields
 * as the group and the transport have them, without checking them. Then plan->device is to be set.
 * The second step checks what the caller described; the third finds how many bytes the plan needs,
 * and in how many turns and slices. Destroy the plan even after a failure.
 */
void fattn_group_begin_plan(const fattn_group *group, const fattn_transport *transport,
                            fattn_group_plan *plan);
fattn_status fattn_group_describe(fattn_group_plan *plan, const fattn_problem *problem,
                                  const int32_t *cu_q, const int32_t *cu_k);
fattn_status fattn_group_size(fattn_group_plan *plan);

/* Sets where the parts of the plan's memory are, and how many bytes it takes. While plan->memory_at
 * is NULL all parts are NULL. workspace_bytes must be known. (layout.c) */
void fattn_group_lay_out(fattn_group_plan *plan);

/* Clears the gaps between tensors in host memory, which are sent with them, so that no old contents
 * of the memory travel. */
void fattn_group_clear_gaps(const fattn_group_plan *plan);

/*
 * The plan's scheme (scheme.c). Choose: replaces FATTN_SCHEME_AUTO by the scheme that it stands
 * for. Check: FATTN_UNSUPPORTED if the group does not compute the problem in the plan's scheme.
 * Speed: the group's rate, bandwidth and latency, or their defaults; check_speed() refuses negative
 * and infinite ones.
 */
fattn_status fattn_group_choose_scheme(fattn_group_plan *plan);
fattn_status fattn_group_check_scheme(const fattn_group_plan *plan);
fattn_status fattn_group_check_speed(const fattn_group *group);
fattn_speed fattn_group_speed(const fattn_group *group, const fattn_transport *transport);

/*
 * What each turn has for itself (turns.c). fattn_group_span_rule(): which spans of its tensors this
 * rank can send and receive. A row's heads must be adjacent, rows must not overlap, and rows of
 * lse, which are single numbers, must be adjacent in the group's share.
 *
 * fattn_group_make_sets() decides about `single`, `saves`, `spans` and `overlaps` once the number
 * of turns is known, and how many sets of packed rows there are. One suffices if inputs and results
 * are copied to messages. With spans there are two, one of which is used while the other travels;
 * or, if memory is not limited, a set for each turn, so that no results have to be moved before the
 * next turn, and turns can overlap.
 */
fattn_span_rule fattn_group_span_rule(const fattn_group_plan *plan);
fattn_status fattn_group_make_sets(fattn_group_plan *plan);

/* Where the rows of a turn are packed. */
fattn_packed fattn_group_packed_at(const fattn_group_plan *plan, int64_t turn);

/* The caller's buffers from the current turn's heads on, if ranks do not share heads. (Sinks and
 * slopes are those of all heads.) */
fattn_buffers fattn_group_turn_of(const fattn_group_plan *plan, const fattn_buffers *given);

/* Create and destroy the streams and events of turns that overlap. */
fattn_status fattn_group_make_streams(fattn_group_plan *plan);
void fattn_group_drop_streams(const fattn_group_plan *plan);

/* The stream on which the current turn computes. */
fattn_stream fattn_group_stream(const fattn_group_plan *plan);

/*
 * For turns that overlap; otherwise these do nothing. Begin is called before the messages of a turn
 * are started: the turn waits for its inputs, but not for the turn before it, whose results are
 * among the messages. End is called when its pieces are queued. Follow is called after the last
 * turn or an error: what comes next on the transport's stream waits for all turns.
 */
fattn_status fattn_group_begin_turn(const fattn_group_plan *plan);
fattn_status fattn_group_end_turn(const fattn_group_plan *plan);
fattn_status fattn_group_follow_turns(const fattn_group_plan *plan);

/* The rows of a run of this rank's queries, or of both runs; and of a run of an owner's keys. */
fattn_extent fattn_group_queries(const fattn_group_plan *plan, int run);
fattn_extent fattn_group_keys(const fattn_group_plan *plan, int64_t owner, int run);

/* The rows of all runs of an owner's keys in the longest sequence; the same for own queries. */
int64_t fattn_group_key_rows(const fattn_group_plan *plan, int64_t owner);
int64_t fattn_group_query_rows(const fattn_group_plan *plan);
/* The first row of a run of queries, or of both, within the share of a sequence. */
int64_t fattn_group_row(const fattn_group_plan *plan, int q_run);

/* The strides of contiguous (batch, rows, heads, channels). */
fattn_strides fattn_group_packed(int64_t rows, int64_t heads, int64_t channels);

/* The layout of an owner's block, for k_size and v_size bytes per element. */
fattn_block fattn_group_block(const fattn_group_plan *plan, int64_t owner, int64_t k_size,
                              int64_t v_size);
/* The same for keys and values, and for those gradients that are wanted: f32, or of a single piece
 * in their own types. */
fattn_block fattn_group_block_keys(const fattn_group_plan *plan, int64_t owner);
fattn_block fattn_group_block_sums(const fattn_group_plan *plan, int64_t owner);

/* The n-th visit of a step in a lane, of at most q_runs * k_runs. Visits to the first run of keys
 * come first. False if there is none, or if an earlier visit with both runs includes it. */
bool fattn_group_visit(const fattn_group_plan *plan, int lane, int64_t step, int n,
                       fattn_visit *visit);

/*
 * Whether a visit has something to compute. It has nothing if the piece has no pairs, or no output
 * depends on it, or the piece of run 0 has both runs of keys and so includes it. The first piece of
 * each run of queries, against the rank's own keys, is always computed: it adds the sink, and gives
 * rows without keys their o.
 */
bool fattn_group_has_piece(const fattn_group_plan *plan, const fattn_visit *visit);

/* Makes the problem of a visit that has a piece, and buffers in which only the positions are set.
 * The positions of a ragged batch may be in the plan's arrays, until the next piece is made. */
void fattn_group_make_piece(fattn_group_plan *plan, const fattn_visit *visit,
                            fattn_problem *problem, fattn_buffers *buffers);
bool fattn_group_is_first(const fattn_group_plan *plan, int64_t owner, int k_run);

/* How many arrays plan->device_cu has; and writes all of them to host memory. */
int64_t fattn_group_cu_count(const fattn_group_plan *plan);
void fattn_group_write_cu(const fattn_group_plan *plan, int32_t *cu);

/* The gradients of the own block, of the current slice. */
char *fattn_group_own_sum(const fattn_group_plan *plan);

/* Whether the current slice of keys is the last. */
bool fattn_group_ends_turn(const fattn_group_plan *plan);

/* The rank that is this member of this group. */
int64_t fattn_group_rank(const fattn_group_plan *plan, int64_t group, int64_t member);

/* Where an owner's keys and values are in this rank's memory. */
typedef struct fattn_held {
    char *k, *v;
} fattn_held;

/* Computes the pieces of a step in a lane; adds gradients of keys and values to `sums`. */
fattn_status fattn_group_attend(fattn_group_plan *plan, const fattn_buffers *given, int lane,
                                int64_t step, const fattn_held *keys, char *sums);

/* Merges the plan's part_o and part_lse, which have the rows of a run or of both, with the results
 * of these queries so far. If the outcome is final, `given` has the caller's tensors, to which it
 * is written; else it is NULL. */
fattn_status fattn_group_merge(fattn_group_plan *plan, const fattn_buffers *given, int q_run);

/* Merges the results of all ranks, on all ranks: FATTN_SCHEME_REDUCE (reduce.c). If the outcome is
 * final, `given` has the caller's tensors, to which it is written. */
fattn_status fattn_group_reduce(fattn_group_plan *plan, const fattn_buffers *given);

/* Tags of messages outside of rounds; smaller ones are those of rounds.c and reduce.c. */
enum { FATTN_TAG_MEMBERS = 14, FATTN_TAG_GATHER = 15 };
_Static_assert(FATTN_TAG_GATHER < FATTN_MESSAGE_TAGS, "a transport has this tag");

/* The values of fattn_message.receive. */
typedef enum fattn_direction { FATTN_SEND, FATTN_RECEIVE } fattn_direction;

/* Appends a message; does nothing if bytes is 0. */
void fattn_group_add_message(fattn_message *messages, int *count, int64_t peer, int tag,
                             fattn_direction direction, void *data, int64_t bytes);

/* The runs of the own block for which other ranks return gradients in a lane: bit n for run n. */
unsigned fattn_group_home_runs(const fattn_group_plan *plan, int lane);

/* Starts messages and waits for them. The caller tells the other ranks of an error. */
fattn_status fattn_group_carry(const fattn_group_plan *plan, const fattn_message *messages,
                               int count);

/* Moves rows on the group's device. */
fattn_status fattn_group_move(const fattn_group_plan *plan, const fattn_rows_args *args);

/* Packs the caller's tensors for the current turn, and the other members' rows from their slots,
 * unless they arrive packed. And the reverse for results, if there are no other members. */
fattn_status fattn_group_pack(const fattn_group_plan *plan, const fattn_buffers *buffers);
fattn_status fattn_group_unpack(const fattn_group_plan *plan, const fattn_buffers *buffers);

/*
 * Exchanges between the members of a group, if it has several (exchange.c). Exchange x carries the
 * inputs of turn x and the results of turn x - 2, if there are such turns. Inputs are loaded into
 * slots from the caller's tensors, results from the packed rows of the last turn. At the end all
 * results are stored into the caller's tensors.
 *
 * With spans nothing is loaded or stored. Only the rank's own rows are copied, by the next two
 * functions: inputs of a turn to the packed rows, results from there. If each turn has packed rows
 * of its own, the first turn stands for the inputs of all turns, and the last one for all results.
 */
fattn_status fattn_group_copy_inputs(const fattn_group_plan *plan, const fattn_buffers *buffers,
                                     int64_t turn);
fattn_status fattn_group_copy_results(const fattn_group_plan *plan, const fattn_buffers *buffers,
                                      int64_t turn);
fattn_slots fattn_group_slots(const fattn_group_plan *plan);
/* Fills in plan->share_rows and plan->packed_rows. (moves.c) */
fattn_status fattn_group_list_rows(const fattn_group_plan *plan);
/* Bytes of plan->span_memory: spans of the messages of one start(). 0 without plan->spans. */
int64_t fattn_group_span_bytes(const fattn_group_plan *plan);
fattn_status fattn_group_load_inputs(const fattn_group_plan *plan, const fattn_buffers *buffers,
                                     int64_t turn);
fattn_status fattn_group_load_results(const fattn_group_plan *plan, int64_t turn);
fattn_status fattn_group_store_results(const fattn_group_plan *plan, const fattn_buffers *buffers);

/* Appends the messages of an exchange that travel while the pieces of a step are computed: as many
 * as that step's group has room for. fattn_group_end_exchange() carries the others. */
void fattn_group_begin_exchange(const fattn_group_plan *plan, const fattn_buffers *buffers,
                                int64_t exchange, fattn_message *messages, int *count);
fattn_status fattn_group_end_exchange(const fattn_group_plan *plan, const fattn_buffers *buffers,
                                      int64_t exchange);

/* Carries a whole exchange, while nothing is computed. */
fattn_status fattn_group_exchange(const fattn_group_plan *plan, const fattn_buffers *buffers,
                                  int64_t exchange);

/* An all-gather: sends `bytes` bytes at `all` + rank * bytes to all ranks, and receives theirs. */
fattn_status fattn_group_gather(const fattn_group_plan *plan, void *all, int64_t bytes);

#endif
