/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn beyond one device: one problem, divided over ranks that exchange messages.
 *
 * Each rank holds a share of the rows of every sequence, of queries and keys alike, and gets the
 * same share of the results. All ranks plan the *undivided* problem together, and execute the plan,
 * each with its own share, as often as they like:
 *
 *     fattn_group group;
 *     fattn_group_init(&group);
 *     group.transport = transport;                    (of MPI, say: fattn/mpi.h)
 *     group.split = FATTN_SPLIT_ZIGZAG;
 *     fattn_group_plan *plan;
 *     fattn_status status = fattn_group_plan_create(&group, &problem, NULL, NULL, &plan);
 *     if (!status) status = fattn_group_execute(plan, &buffers);
 *
 * The rules of fattn.h about errors, ownership, structs and units hold here too. A group's plan and
 * its transport serve one thread at a time. docs/DISTRIBUTED.md explains how shares travel, and
 * shows how to write a transport.
 *
 * R below is the number of ranks.
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

/* How the rows of a sequence are divided over the ranks. */
typedef enum fattn_split {
    FATTN_SPLIT_CONTIGUOUS = 1, /* rank r has part r of R */
    FATTN_SPLIT_ZIGZAG = 2,     /* parts r and 2R - 1 - r of 2R: equal work under a causal mask */
    FATTN_SPLIT_STRIPED = 3     /* rows r, r + R, r + 2R ... */
} fattn_split;

/* A run of rows: rows first, first + stride, ... of a sequence. */
typedef struct fattn_run {
    int64_t first, count, stride; /* position of the first row; number of rows; distance */
} fattn_run;

/* The number of runs that a rank has of each sequence: 1, or 2 under zigzag; 0 if split is no
 * fattn_split. */
FATTN_API int fattn_split_runs(fattn_split split);

/* Writes run `which` of a rank's share of a sequence of `length` rows. The share consists of its
 * runs, one after another. The function only computes: any process may ask about any rank.
 * FATTN_NULL_POINTER for run; FATTN_INVALID_ARGUMENT unless length is in 0..2^31 - 1, ranks in
 * 1..65536, rank in 0..ranks - 1 and which in 0..fattn_split_runs() - 1. */
FATTN_API fattn_status fattn_split_get_run(fattn_split split, int64_t length, int64_t ranks,
                                           int64_t rank, int which, fattn_run *run);

/* How the queries of a rank attend to the keys that other ranks hold. */
typedef enum fattn_scheme {
    FATTN_SCHEME_AUTO = 0,  /* RING, HEADS or BOTH: the fastest by a model (fattn_group.rate) of
                             * those that take the problem */
    FATTN_SCHEME_RING = 1,  /* ring attention: keys and values travel from rank to rank */
    FATTN_SCHEME_HEADS = 2, /* an all-to-all exchange gives each rank all rows of some heads, and
                             * another returns the results; R divides heads_k */
    FATTN_SCHEME_BOTH = 3,  /* HEADS within groups of ranks, RING between the groups; R and heads_k
                             * have a common divisor that is neither 1 nor R */
    FATTN_SCHEME_REDUCE = 4 /* for a forward of few queries: every rank has all queries and a share
                             * of the keys, and the ranks' (o, lse) are merged; not striped */
} fattn_scheme;

/* ----------------------------------------------------------------------------------------------
 * --- Transports
 * ---------------------------------------------------------------------------------------------- */

/* Rows of bytes, in the same kind of memory as fattn_message.data. The spans of one side of a
 * message do not overlap. */
typedef struct fattn_span {
    void *data;        /* the first row */
    int64_t rows;      /* above 0 */
    int64_t row_bytes; /* above 0 */
    int64_t step;      /* bytes from one row to the next; at least row_bytes if rows is above 1 */
} fattn_span;

/* A message to another rank, or from it. */
typedef struct fattn_message {
    int32_t peer;            /* the rank that receives or sends it; never this rank */
    int32_t tag;             /* 0..FATTN_MESSAGE_TAGS - 1; the same on both sides */
    int32_t receive;         /* 1: this rank receives the message into data; 0: it sends data */
    int32_t span_count;      /* 0; or, only if fattn_transport.spans is set, above 0: spans are sent
                              * or received in place of data, which is NULL. Both sides have the
                              * same number, and the n-th spans of both have the same size */
    void *data;              /* host or device memory: fattn_transport.device_memory */
    int64_t bytes;           /* above 0; the same on both sides; of all spans together */
    const fattn_span *spans; /* valid as long as the message; NULL if span_count is 0 */
} fattn_message;

/* The most messages in a call of start() or wait(). */
#define FATTN_MESSAGES_MAX 16

/* The number of tags: 0..15. */
#define FATTN_MESSAGE_TAGS 16

/* The most bytes of a small message, whose data is not used after an error of wait(). */
#define FATTN_MESSAGE_SMALL 64

/*
 * A transport carries messages between ranks: three functions. The library uses it from one thread
 * at a time, and each start() is followed by its wait() before the next start(). The messages of
 * one start() are called a group of messages.
 *
 * What a transport has to do. A message that one rank sends goes to the message that its peer
 * receives with the same tag and the same size. Between two ranks, messages with the same tag
 * arrive in the order in which they were sent. Each message moves as soon as both of its ranks have
 * started it, whether or not the other messages of their groups can move.
 *
 * What it may rely on. In a group no two messages of one direction have the same peer and tag.
 * Every send has its receive, and groups are ordered so that all of them finish even if no send
 * ends before its receive was started; so a transport needs no buffers. It must not rely on the two
 * sides of a message being in the n-th group of both ranks, or in groups of equal size: a rank
 * without messages in a step starts no group.
 */
typedef struct fattn_transport {
    size_t struct_size;  /* sizeof(fattn_transport); set by fattn_transport_init */
    int32_t rank, ranks; /* this rank, 0..ranks - 1, and the number of ranks */
    void *user;          /* first argument of the functions */

    /* Starts all messages of a group, and returns without waiting for them. The array and its data
     * stay valid until wait() returns. If start() fails, wait() is not called, and the rules for
     * messages after an error of wait() hold. */
    fattn_status (*start)(void *user, const fattn_message *messages, int count);

    /* Waits until all messages of the group are done, at most `seconds`. With device_memory it may
     * return earlier: as soon as the stream is certain to complete the messages before work that is
     * queued after the return.
     *
     * It fails when that time has passed, when a peer has failed or is gone, and when the transport
     * fails; it names the rank in the reason, by fattn_transport_fail(). After an error the
     * transport cannot be used again. It must then no longer touch the data of messages of up to
     * FATTN_MESSAGE_SMALL bytes, because the library frees that memory. Until it is closed it may
     * go on reading and writing the data of larger messages: memory of the plan, tensors that are
     * sent, and with spans also tensors that are received. But the receiver's wait() must fail if
     * the data was not sent before the error, because the sender's caller may have changed it
     * since. */
    fattn_status (*wait)(void *user, const fattn_message *messages, int count, double seconds);

    /* Tells all ranks that this one has failed: the wait() that they are in, or their next one,
     * fails. Called after an error of start() or wait(), and between the two if this rank cannot
     * compute: its own wait() must then fail at once. A second call does nothing. */
    void (*abort)(void *user, const char *reason);

    /* With device_memory the data of all messages is memory of the group's device. A message starts
     * after the work that is on the stream when start() is called, and work that is queued after
     * wait() starts after the message. */
    int32_t device_memory; /* 0: data is host memory, and stream is NULL; 1: device memory */
    int32_t spans;         /* 1: the transport also takes messages of spans, so that ranks that
                            * exchange heads need not copy rows to messages and out of them. 0: it
                            * does not */
    fattn_stream stream;   /* of the group's device */
} fattn_transport;

/* Fills *transport with its size and zeros. */
FATTN_API void fattn_transport_init(fattn_transport *transport);

/* For transports: makes reason this thread's fattn_last_reason(), and returns status. The text is
 * copied; NULL becomes a general sentence. */
FATTN_API fattn_status fattn_transport_fail(fattn_status status, const char *reason);

/* ----------------------------------------------------------------------------------------------
 * --- Devices of one process
 * ---------------------------------------------------------------------------------------------- */

/*
 * Ranks that are threads of one process, each with a device: GPUs of one machine, or the CPU for
 * trying things out. A message is a copy. GPUs that can access each other's memory make it with
 * their copy engines, so that all multiprocessors keep computing.
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

/* Creates the common object of 1..64 ranks. Destroy it with fattn_peers_destroy(). */
FATTN_API fattn_status fattn_peers_create(int32_t ranks, fattn_peers **peers);

/* Destroys it. All of its transports must be closed. NULL is allowed. */
FATTN_API void fattn_peers_destroy(fattn_peers *peers);

/*
 * Opens the transport of a rank. Close it with fattn_peers_close(). `device` is the rank's device,
 * NULL the default one; the transport keeps it open. All ranks' devices are of one backend; several
 * ranks may share a device. `stream` is the one on which the rank's plans compute. On CUDA give a
 * stream of your own: on the default stream, NULL, copies wait for kernels instead of running
 * beside them.
 *
 * Any thread may open a transport; each is used by one thread at a time. A rank that is late delays
 * others only in their wait(). After an error of a group all transports fail, and say which rank
 * failed and why; create a new fattn_peers then.
 */
FATTN_API fattn_status fattn_peers_open(fattn_peers *peers, int32_t rank, fattn_device *device,
                                        fattn_stream stream, fattn_transport **transport);

/* Closes a transport, after waiting for the copies that all ranks have queued. NULL is allowed. */
FATTN_API void fattn_peers_close(fattn_transport *transport);

/* ----------------------------------------------------------------------------------------------
 * --- Groups
 * ---------------------------------------------------------------------------------------------- */

/* A group of 1..65536 ranks (64 at most with fattn_peers_create()) that compute together, and how.
 * All ranks must give the same split, scheme, turns, speeds and saves; either all of them or none
 * limit memory. */
typedef struct fattn_group {
    size_t struct_size;               /* sizeof(fattn_group); set by fattn_group_init */
    const fattn_transport *transport; /* must stay open while plans are made and executed */
    fattn_device *device;             /* of the memory that the transport carries; NULL: default */
    fattn_split split;                /* default FATTN_SPLIT_CONTIGUOUS */
    fattn_scheme scheme;              /* default FATTN_SCHEME_RING */
    double timeout; /* seconds that a step may wait for other ranks, above 0; default 60. It must be
                     * longer than any rank computes in a step, since a rank without work waits that
                     * long */
    int64_t memory; /* most bytes that a plan may own on this rank; 0, the default: no limit. See
                     * fattn_group_plan_create(). With a limit turns of heads do not overlap */
    int64_t turns;  /* FATTN_SCHEME_HEADS and _BOTH: how many parts ("turns") a rank's heads are
                     * computed in, one after another. While one turn is computed, the inputs of the
                     * next and the results of the previous one travel. The plan takes this number,
                     * or the next smaller possible one; more if `memory` requires it. Possible are
                     * the divisors of K, a rank's number of key/value heads, and in
                     * FATTN_SCHEME_HEADS also K times each divisor of heads_q / heads_k. 0, the
                     * default: chosen by sizes and speeds, 8 at most, and in backward, or if
                     * `saves` is set, no more than K */

    /* The speeds by which FATTN_SCHEME_AUTO and the default of `turns` are chosen. 0, the default,
     * stands for 6e14, 3.5e11 and 1e-5 (GPUs with NVLink) if the transport carries device memory,
     * otherwise for 2e12, 1.2e10 and 2e-5 (CPUs in a network of 100 Gbit/s). */
    double rate;      /* operations per second that a rank computes */
    double bandwidth; /* bytes per second that a rank can send and, at the same time, receive */
    double latency;   /* seconds for a message besides its bytes */

    /* 1: forward saves the rows that ranks exchange, so that backward need not exchange them again:
     * see fattn_group_execute_saved(). Set it for the plans of both, which then get the same scheme
     * and turns. It cannot be combined with `memory`. 0, the default: nothing is saved. */
    int32_t saves;
} fattn_group;

/* Fills *group with the defaults named above. */
FATTN_API void fattn_group_init(fattn_group *group);

/* A problem divided over a group, and what one rank does for it. */
typedef struct fattn_group_plan fattn_group_plan;

/*
 * Plans a problem on all ranks of a group; every rank calls it. Destroy the plan with
 * fattn_group_plan_destroy(). `problem` describes the undivided problem, but its layout and strides
 * are those of the rank's own share: batch b of q holds the rank's rows of sequence b, one run
 * after another, and likewise k, v, o and the gradients. A ragged batch has both cu_seqlens: pass
 * those of the undivided problem here, in host memory; they are copied. The rank's shares of its
 * sequences are packed too, one after another. For any other batch the two arguments are NULL.
 *
 * Supported: forward and backward, causal masks and windows, scale, soft cap, ALiBi, slopes that
 * multiply a bias, sinks, bias and masks, dropout (the same pattern as on one device), dLSE,
 * FATTN_DETERMINISTIC, GQA and MQA, ragged batches, mixed types. A rank's share of bias, mask and
 * dbias has the rows of its share of q and all keys of the problem, with the rank's own
 * bias_stride, mask_stride and dbias_stride. Ranks may differ in whether bias or mask is broadcast
 * along rows.
 *
 * Refused with FATTN_UNSUPPORTED and the reason:
 *
 * - Always: block masks, seqused, seqstart, pages, positions, chunks, accumulation, batch
 *   invariance, FATTN_CHECKED, f64, fp8; one cu_seqlens without the other; dbias that is summed
 *   over queries (dbias_stride[2] = 0).
 * - Ragged batches: bias and masks; FATTN_SPLIT_STRIPED in a ring with a window that is bounded on
 *   both sides. On devices with memory of their own, in schemes other than FATTN_SCHEME_HEADS:
 *   ALiBi, dropout and windows; a causal mask if some sequence does not have as many keys as
 *   queries; in FATTN_SCHEME_REDUCE any causal mask.
 * - FATTN_SPLIT_STRIPED in a ring: dropout, and ALiBi, unless its slopes multiply a bias.
 * - FATTN_SCHEME_HEADS: a single rank, and a number of ranks that does not divide heads_k.
 * - FATTN_SCHEME_BOTH: ranks and heads_k without a common divisor other than 1 and R.
 * - FATTN_SCHEME_HEADS and _BOTH: bias and masks.
 * - FATTN_SCHEME_REDUCE: backward, and FATTN_SPLIT_STRIPED.
 * - Whatever no kernel of the device supports.
 *
 * If a plan for all heads at once needs more than `memory` on some rank, the heads are computed in
 * several turns, one after another: as few as suffice, and on all ranks as many as on the rank that
 * needs most. These are tried in order:
 *
 * 1. Turns of key/value heads, each with all query heads that share it: up to heads_k of them.
 * 2. In FATTN_SCHEME_RING and _HEADS turns of query heads, up to heads_q. Those that share a
 *    key/value head come one after another; in a ring its keys travel again in each.
 * 3. In FATTN_SCHEME_RING also slices of keys, 2, 4, 8 or 16, with a ring for each slice in each of
 *    heads_q turns.
 *
 * (Where ranks exchange heads, heads_k and heads_q mean those of one rank.) Steps 2 and 3 add in
 * another order, so last bits differ. Turns and slices exist for rings of one sequence (batch 1,
 * not ragged) without dbias, and for FATTN_SCHEME_HEADS and _BOTH. In all other cases, and if they
 * are not enough, the plan is refused with FATTN_OUT_OF_MEMORY.
 *
 * First of all the ranks compare the problem: if they differ, all get FATTN_RANKS_DISAGREE, and
 * each one's reason names the first rank that differs from it. If one rank has an error of its own,
 * such as a wrong argument, the others get FATTN_RANK_LOST with its number, provided that its
 * transport is valid. The group can then make another plan, unless a rank's device does not compute
 * in the kind of memory that the transport carries.
 *
 * The plan owns the memory that it computes in, and serves one execution at a time.
 */
FATTN_API fattn_status fattn_group_plan_create(const fattn_group *group,
                                               const fattn_problem *problem,
                                               const int32_t *cu_seqlens_q,
                                               const int32_t *cu_seqlens_k,
                                               fattn_group_plan **plan);

/* Destroys a plan, after waiting until its executions no longer use its memory. NULL is allowed.
 * After an error of fattn_group_execute() close the transport first: it may still use that memory,
 * and tensors (fattn_group_execute()). */
FATTN_API void fattn_group_plan_destroy(fattn_group_plan *plan);

/* The scheme of a plan: the one that was chosen if the group has FATTN_SCHEME_AUTO. NULL gives
 * FATTN_SCHEME_AUTO. */
FATTN_API fattn_scheme fattn_group_plan_scheme(const fattn_group_plan *plan);

/* Bytes of memory that the plan owns on this rank; 0 for NULL. */
FATTN_API int64_t fattn_group_plan_bytes(const fattn_group_plan *plan);

/* Bytes that forward saves for backward on this rank: about the size of its shares of q, k, v, o
 * and lse. The plans of both return the same number. It is 0 for NULL, without fattn_group.saves,
 * in schemes other than FATTN_SCHEME_HEADS, and with more turns than a rank has key/value heads. */
FATTN_API int64_t fattn_group_plan_saved_bytes(const fattn_group_plan *plan);

/*
 * Runs a plan on all ranks. Every rank calls it, with its own shares, in memory of the group's
 * device. On a device with memory of its own the call may return before the work is done: wait for
 * the transport's stream before reading results. lse is (B, Hq, rows of the share); in a ragged
 * batch (Hq, all rows of the shares). Backward takes o and lse as forward wrote them. cu_seqlens
 * were given to the plan and must be NULL here; sink, slopes, seed and offset must be the same on
 * all ranks. Every rank gets the whole sum in dsink.
 *
 * Results do not depend on timing: with the same number of ranks every run gives the same bits, in
 * backward on a GPU only with FATTN_DETERMINISTIC.
 *
 * Errors are those of fattn_execute(), and FATTN_RANK_LOST and FATTN_RANK_TIMEOUT. After an error
 * the transport cannot be used again. Outputs are then untouched, even if the error was another
 * rank's, with these exceptions:
 *
 * - A rank that had finished before another one failed returns FATTN_OK, with all of its outputs.
 * - dbias may be written in part: it is too large to be held twice.
 * - A rank whose own device fails in the last step may have written some rows of its outputs.
 * - In FATTN_SCHEME_RING with several turns of heads, the outputs of earlier turns are written.
 * - In FATTN_SCHEME_HEADS, if the transport takes spans, results go straight into outputs, which
 *   may therefore be written in part, until the transport is closed.
 *
 * After an error the transport may still be sending k and v, or with spans sending any input and
 * receiving any output. Free these, and destroy the plan, only after the transport is closed.
 * Tensors in host memory may be changed at once; those in device memory only after that, too.
 */
FATTN_API fattn_status fattn_group_execute(fattn_group_plan *plan, const fattn_buffers *buffers);

/*
 * fattn_group_execute() for a plan that saves, whose fattn_group_plan_saved_bytes() is above 0. Any
 * other plan runs as with fattn_group_execute(), and `saved` is not used.
 *
 * `saved` has that many bytes, in memory of the group's device, is aligned to 64, and does not
 * overlap the buffers. Forward writes this rank's heads of q, k, v, o and lse there, with the rows
 * of all ranks. Backward reads them from there, any number of times. So it exchanges only dout,
 * dlse and gradients, and does not read q, k, v, o and lse of `buffers`, which may be NULL. It must
 * be the backward of that forward: the problems differ only in op, outputs, FATTN_DLSE,
 * FATTN_DETERMINISTIC and the layout of dout and gradients, and the groups are equal. After an
 * error of forward the contents of `saved` are undefined; until the transport is closed it may
 * still be read and written.
 */
FATTN_API fattn_status fattn_group_execute_saved(fattn_group_plan *plan,
                                                 const fattn_buffers *buffers, void *saved);

#ifdef __cplusplus
}
#endif
#endif
