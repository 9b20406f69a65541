/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn beyond one device: one problem, divided over ranks that exchange messages.
 *
 * Each rank holds a share of the rows of every sequence, of queries and keys alike, and gets the
 * same share of the results. All ranks make a plan of the *undivided* problem, and execute it with
 * their own shares as often as they like:
 *
 *     fattn_group group;
 *     fattn_group_init(&group);
 *     group.transport = transport;                    (of MPI, say: fattn/mpi.h)
 *     group.split = FATTN_SPLIT_ZIGZAG;
 *     fattn_group_plan *plan;
 *     fattn_status status = fattn_group_plan_create(&group, &problem, NULL, NULL, &plan);
 *     if (!status) status = fattn_group_execute(plan, &buffers);
 *
 * The rules of fattn.h about errors, ownership, structs and units hold here too.
 * docs/DISTRIBUTED.md tells how shares travel, and shows how an engine for messages is written.
 */
#ifndef FATTN_DISTRIBUTED_H
#define FATTN_DISTRIBUTED_H

#include "fattn/fattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ----------------------------------------------------------------------------------------------
 * --- Shares
 * ---------------------------------------------------------------------------------------------- */

/* How the rows of a sequence are divided over R ranks. */
typedef enum fattn_split {
    FATTN_SPLIT_CONTIGUOUS = 1, /* rank r has part r of R */
    FATTN_SPLIT_ZIGZAG = 2,     /* parts r and 2R - 1 - r of 2R: equal work under a causal mask */
    FATTN_SPLIT_STRIPED = 3     /* rows r, r + R, r + 2R ... */
} fattn_split;

/* Rows first, first + stride, ... of a sequence. */
typedef struct fattn_run {
    int64_t first, count, stride; /* position of the first row; how many; from one to the next */
} fattn_run;

/* How many runs a rank has of each sequence: 1, or 2 under zigzag; 0 for any other number. */
FATTN_API int fattn_split_runs(fattn_split split);

/* Run `which` of a rank's share of a sequence of `length` rows. The share is its runs, one after
 * another. Pure: anyone may ask about any rank. FATTN_NULL_POINTER for run; FATTN_INVALID_ARGUMENT
 * unless length is in 0..2^31 - 1, ranks in 1..65536, rank below ranks and which below
 * fattn_split_runs(). */
FATTN_API fattn_status fattn_split_get_run(fattn_split split, int64_t length, int64_t ranks,
                                           int64_t rank, int which, fattn_run *run);

/* How ranks compute attention of their own queries to the keys that other ranks hold. */
typedef enum fattn_scheme {
    FATTN_SCHEME_AUTO = 0,  /* the fastest by forecast: `fattn explain`; not for groups */
    FATTN_SCHEME_RING = 1,  /* keys travel from rank to rank */
    FATTN_SCHEME_HEADS = 2, /* rows are exchanged for heads, all to all, and results back; R divides
                             * heads_k */
    FATTN_SCHEME_BOTH = 3,  /* heads within groups of ranks, a ring over the groups; R and heads_k
                             * have a common divisor that is neither 1 nor R */
    FATTN_SCHEME_REDUCE = 4 /* forward of few queries, which all ranks have: keys are divided, and
                             * (o, lse) of all ranks are merged in a tree; not striped */
} fattn_scheme;

/* ----------------------------------------------------------------------------------------------
 * --- Transports
 * ---------------------------------------------------------------------------------------------- */

/* A message to another rank, or from it. */
typedef struct fattn_message {
    int32_t peer;     /* whom it goes to or comes from; never the rank itself */
    int32_t tag;      /* 0..15; a message is received by the same tag */
    int32_t receive;  /* 1: data is filled; 0: data is sent */
    int32_t reserved; /* 0 */
    void *data;       /* of the host, or of the device (fattn_transport.device_memory) */
    int64_t bytes;    /* above 0, the same on both sides */
} fattn_message;

/* The most messages of a call. */
#define FATTN_MESSAGES_MAX 16

/*
 * An engine that carries messages: three functions. One thread at a time uses a transport, and it
 * has one group of messages under way: start() and wait() take turns.
 *
 * What the engine has to do: a message that one rank sends goes to the message that its peer
 * receives with the same tag, of the same size. Between two ranks, messages of equal tag arrive in
 * the order in which they were sent. Each message moves as soon as both ranks have started it,
 * whatever becomes of the other messages of their groups.
 *
 * What it may rely on: in a group no two messages of one direction have the same peer and tag.
 * Every send has its receive, and groups are ordered so that all of them finish even if no send
 * ends before its receive was started. So an engine needs no buffers. It may not rely on the two
 * sides of a message being in groups of the same number, or of the same size: a rank without
 * messages in a step starts no group.
 */
typedef struct fattn_transport {
    size_t struct_size;  /* sizeof(fattn_transport); set by fattn_transport_init */
    int32_t rank, ranks; /* this rank, 0..ranks - 1, and how many there are */
    void *user;          /* first argument of the functions */

    /* Begins all messages of a group, and returns at once. The array and its data stay as they are
     * until wait() returns. An error of start() leaves messages as one of wait() does, which is not
     * called then. */
    fattn_status (*start)(void *user, const fattn_message *messages, int count);

    /* Waits until all of them are done, `seconds` at most; with device_memory it may return when
     * they are queued before all that the stream gets from then on. An error when that passes, when
     * a peer has given up or is gone, or when the engine fails; the reason names the rank, by
     * fattn_transport_fail(). After an error the transport is of no more use. Once wait() has
     * returned it, the engine no longer touches data of messages of up to 64 bytes, which the
     * library then frees. It may go on reading and writing the data of larger ones, which is memory
     * of the plan or of tensors that it sends, until it is closed. But what was
     * not sent by then is not received: the receiver's wait() fails, for the caller may have other
     * data there. */
    fattn_status (*wait)(void *user, const fattn_message *messages, int count, double seconds);

    /* Tells all ranks that this one has given up, also after an error of start() or wait(): their
     * next wait() fails, or the one that they are in. A second call does nothing. */
    void (*abort)(void *user, const char *reason);

    /* With device_memory all data of messages is memory of the group's device. A message follows
     * what the stream holds when it is started, and what is queued there after wait() follows the
     * message. */
    int32_t device_memory; /* 0: data is host memory, and stream NULL; 1 */
    int32_t reserved;      /* 0 */
    fattn_stream stream;   /* of the group's device */
} fattn_transport;

/* Fills *transport with its size and zeros. */
FATTN_API void fattn_transport_init(fattn_transport *transport);

/* Stores a reason for fattn_last_reason() and returns status, for transports. */
FATTN_API fattn_status fattn_transport_fail(fattn_status status, const char *reason);

/* ----------------------------------------------------------------------------------------------
 * --- Devices of one process
 * ---------------------------------------------------------------------------------------------- */

/*
 * An engine for ranks that are threads of one process, each with a device: GPUs of one machine, and
 * CPUs to try it out. A message is a copy, for which GPUs that reach each other's memory use their
 * copy engines, so that all multiprocessors go on computing.
 *
 *     fattn_peers *peers;
 *     fattn_status status = fattn_peers_create(ranks, &peers);    (once)
 *     ...                                                         (in each thread:)
 *     fattn_transport *transport;
 *     status = fattn_peers_open(peers, rank, device, stream, &transport);
 *     ...                                                         (plans of groups)
 *     fattn_peers_close(transport);
 *     ...                                                         (after all threads:)
 *     fattn_peers_destroy(peers);
 */
typedef struct fattn_peers fattn_peers;

/* Creates an engine for 1..64 ranks. Release it with fattn_peers_destroy(). */
FATTN_API fattn_status fattn_peers_create(int32_t ranks, fattn_peers **peers);

/* Gives an engine up whose transports are closed. NULL is allowed. */
FATTN_API void fattn_peers_destroy(fattn_peers *peers);

/*
 * Opens the transport of a rank. Close it with fattn_peers_close(). device: the rank's; NULL is the
 * default one; all are of one backend, and several ranks may share one. It is held open. stream:
 * the one on which the rank's plans compute; with NULL, the default one, copies wait for kernels on
 * CUDA.
 *
 * A rank that is late holds nobody up before wait(). Any thread may open, and each transport is
 * used by one thread at a time. After an error of a group the engine is of no more use; others are
 * told which rank gave up, and why.
 */
FATTN_API fattn_status fattn_peers_open(fattn_peers *peers, int32_t rank, fattn_device *device,
                                        fattn_stream stream, fattn_transport **transport);

/* Gives a transport up, when the copies of all ranks are done that have been queued. NULL is
 * allowed. */
FATTN_API void fattn_peers_close(fattn_transport *transport);

/* ----------------------------------------------------------------------------------------------
 * --- Groups
 * ---------------------------------------------------------------------------------------------- */

/* Who computes together, and how: 1..65536 ranks (fattn_peers_create(): 64), which all give the
 * same split, scheme and turns, and either all or none a limit of memory. */
typedef struct fattn_group {
    size_t struct_size;               /* sizeof(fattn_group); set by fattn_group_init */
    const fattn_transport *transport; /* open while plans of it are made and executed */
    fattn_device *device;             /* whose memory the transport carries; NULL: the default */
    fattn_split split;                /* default FATTN_SPLIT_CONTIGUOUS */
    fattn_scheme scheme;              /* default FATTN_SCHEME_RING */
    double timeout; /* seconds that a step may wait for others; default 60. An idle rank waits as
                     * long as the busiest computes a step */
    int64_t memory; /* bytes that a plan holds at most on this rank; 0, the default: what it likes.
                     * See fattn_group_plan_create() */
    int64_t turns;  /* that heads take where ranks exchange them (schemes HEADS and BOTH): while one
                     * turn is computed, the inputs of the next one and the results of the one
                     * before travel. As many as this, or the next smaller number that divides a
                     * rank's heads; more where `memory` asks for it. 0, the default: by size, 8 at
                     * most */
} fattn_group;

/* Fills *group with the defaults named above. */
FATTN_API void fattn_group_init(fattn_group *group);

/* A problem divided over a group, and what one rank does for it. */
typedef struct fattn_group_plan fattn_group_plan;

/*
 * Plans a problem on all ranks of a group; every rank calls it. `problem` is the undivided one,
 * but for its layout and strides, which are those of the rank's own share: batch b of q holds the
 * rank's rows of sequence b, one run after another, and likewise k, v, o and the gradients. A
 * ragged batch has both cu_seqlens, given here for the undivided problem as host memory and
 * copied; its shares are packed likewise, the share of one sequence behind that of another.
 *
 * Honoured: forward and backward, causal masks and windows, scale, soft cap, ALiBi, slopes that
 * multiply a bias, sinks, bias and masks, dropout (bit for bit that of one device), dLSE,
 * FATTN_DETERMINISTIC, groups of heads, ragged batches, mixed types. A rank's share of bias, mask
 * and dbias has the rows of its share of q, and all keys of the problem; bias_stride, mask_stride
 * and dbias_stride are its own. Bias and mask may be broadcast along rows on some ranks, and on
 * others not.
 *
 * Refused with FATTN_UNSUPPORTED and the reason:
 *
 * - Everywhere: block masks, seqused, seqstart, pages, positions, chunks, accumulation, batch
 *   invariance, FATTN_CHECKED, f64, fp8; one cu_seqlens without the other; dbias that is summed
 *   over queries (dbias_stride[2] = 0).
 * - Ragged batches: bias and masks; devices with memory of their own; rows that are
 *   FATTN_SPLIT_STRIPED in a ring, with a window that has two ends.
 * - FATTN_SPLIT_STRIPED in a ring: dropout, and ALiBi, unless its slopes multiply a bias.
 * - FATTN_SCHEME_HEADS: a single rank, and a number of ranks that does not divide heads_k.
 * - FATTN_SCHEME_BOTH: ranks and heads_k without a common divisor other than 1 and R.
 * - FATTN_SCHEME_HEADS and _BOTH: bias and masks.
 * - FATTN_SCHEME_REDUCE: backward, and FATTN_SPLIT_STRIPED.
 * - Whatever no kernel of the device takes.
 *
 * Where a rank has less `memory` than a plan for all heads at once takes, heads take turns, with as
 * few as suffice. All ranks take as many as the one that needs most. In this order:
 *
 * 1. Turns of key/value heads, each with all query heads that share it: up to heads_k of them.
 * 2. In FATTN_SCHEME_RING and _HEADS turns of query heads, up to heads_q. Those that share a
 *    key/value head come one after another; in a ring its keys travel again in each.
 * 3. In FATTN_SCHEME_RING also slices of keys, 2, 4, 8 or 16, with a ring for each slice in each of
 *    heads_q turns.
 *
 * (Where ranks exchange heads, heads_k and heads_q mean those of one rank.) Steps 2 and 3 add in
 * another order, so last bits differ. All this is for rings of one sequence (batch 1, not ragged)
 * without dbias, and for FATTN_SCHEME_HEADS and _BOTH. Elsewhere, and where it is not enough, the
 * plan is refused with FATTN_OUT_OF_MEMORY.
 *
 * Before anything else the ranks compare the problem: FATTN_RANKS_DISAGREE names the first that
 * has another. Where one has an error of its own, of its arguments say, the others get
 * FATTN_RANK_LOST with its number, as long as the group says how it is reached: transport and its
 * fields. The group can then make another plan.
 *
 * The plan holds the memory that it computes in, and serves one execution at a time.
 */
FATTN_API fattn_status fattn_group_plan_create(const fattn_group *group,
                                               const fattn_problem *problem,
                                               const int32_t *cu_seqlens_q,
                                               const int32_t *cu_seqlens_k,
                                               fattn_group_plan **plan);

/* NULL is allowed. Waits until executions no longer use the plan's memory. After an error of
 * fattn_group_execute() close the engine first: it may still use that memory, and keys and values
 * that it was sending. */
FATTN_API void fattn_group_plan_destroy(fattn_group_plan *plan);

/* Bytes of memory that the plan holds on this rank; 0 for NULL. */
FATTN_API int64_t fattn_group_plan_bytes(const fattn_group_plan *plan);

/*
 * Runs a plan on all ranks; every rank calls it, with its own shares, in memory of the group's
 * device. On a device with memory of its own the call may return before the work is done: wait for
 * the transport's stream before reading results. lse is (B, Hq, rows of the share), ragged (Hq,
 * all rows of the shares). Backward takes o and lse as forward gave them. cu_seqlens are those of
 * the plan and NULL here; sink, slopes, seed and offset are the same on all ranks. dsink is the
 * whole sum on every rank.
 *
 * Results do not depend on time: the same ranks give the same bits in every run, in backward on a
 * GPU with FATTN_DETERMINISTIC.
 *
 * Errors: those of fattn_execute(); FATTN_RANK_LOST and FATTN_RANK_TIMEOUT, after which the
 * transport is of no more use. On an error, also one of another rank, outputs are untouched, with
 * these exceptions:
 *
 * - A rank that was done before another one failed returns FATTN_OK, with all of its outputs.
 * - dbias may be written in part: it is too large to be held twice.
 * - In FATTN_SCHEME_RING, where heads take turns, outputs of earlier turns are written.
 *
 * After an error the caller may change its tensors. But the k and v that it gave may still be sent
 * from where they are, so they are freed after the engine is closed, like the plan. In memory of a
 * device they are not changed before that either.
 */
FATTN_API fattn_status fattn_group_execute(fattn_group_plan *plan, const fattn_buffers *buffers);

#ifdef __cplusplus
}
#endif
#endif
