/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What fattn_attention() keeps between calls: plans, found by device and problem, and for each plan
 * the workspaces that its calls have used. A call borrows a plan and a workspace, queues its work,
 * and returns both. There is one cache per process; any number of threads may use it.
 *
 * A call returns before a GPU has done its work, so a workspace is returned while it is still in
 * use. Each workspace has an event, recorded after its last use, and the stream of the next call
 * waits for that event. The stream's handle cannot replace the event: the per-thread handle is a
 * different stream in each thread, and drivers reuse the handles of destroyed streams.
 *
 * A call on a stream that is being captured into a graph gets a workspace that belongs to the graph
 * for ever, because the library cannot know when the graph is replayed for the last time. Calls in
 * one capture share it: events order them inside the graph.
 */
#ifndef FATTN_CORE_CACHE_H
#define FATTN_CORE_CACHE_H

#include "core/plan.h"

typedef struct fattn_workspace fattn_workspace;

/* What a call has borrowed. */
typedef struct fattn_loan {
    fattn_plan *plan;
    uint64_t hash;          /* of device and problem */
    void *workspace;        /* memory; NULL if the plan needs none */
    fattn_workspace *owner; /* of the memory and its event; NULL if there is none */
    uint64_t capture;       /* the graph capture that the stream is in, or 0 */
} fattn_loan;

/* Finds or makes the plan and a workspace. problem is this library's full struct, with unused
 * fields as the caller left them: plans are found by comparing all bytes. */
fattn_status fattn_cache_borrow(fattn_device *device, const fattn_problem *problem,
                                fattn_stream stream, fattn_loan *loan);

/* Returns the loan after a run on the stream, whose status is given. The result is that status, or
 * else the first failure of the return itself. */
fattn_status fattn_cache_return(fattn_loan *loan, fattn_stream stream, fattn_status status);

/* Frees the plans and workspaces that are not in use. */
void fattn_cache_empty(void);

/* The same for those of one device. */
void fattn_cache_forget(const fattn_device *device);

#endif
