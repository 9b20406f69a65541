/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What fattn_attention() keeps between calls: plans, found by device and problem, and for each plan
 * the workspaces that its calls have used. A call borrows a plan with a workspace, queues its work,
 * and gives both back. The cache is of the process, and may be used by many threads.
 *
 * A call returns before a GPU has done its work, so a workspace comes back while it is in use. Each
 * has an event, recorded behind its last use, and the stream of the next call waits for it. Handles
 * do not identify streams: one handle is a different stream in each thread, and handles of
 * destroyed streams are used again.
 *
 * A call on a stream that is being captured into a graph gets a workspace that the graph keeps for
 * ever, because the library cannot know when the graph is replayed for the last time. Events order
 * the calls of one capture inside the graph, so these calls share a workspace.
 */
#ifndef FATTN_CORE_CACHE_H
#define FATTN_CORE_CACHE_H

#include "core/plan.h"

typedef struct fattn_workspace fattn_workspace;

/* What a call holds while it runs. */
typedef struct fattn_loan {
    fattn_plan *plan;
    uint64_t hash;          /* of device and problem */
    void *workspace;        /* memory, or NULL where the plan needs none */
    fattn_workspace *owner; /* of the memory and the event, or NULL */
    uint64_t capture;       /* that the stream is in, or 0 */
} fattn_loan;

/* problem is whole and unused fields are as the caller left them: plans are found by comparing. */
fattn_status fattn_cache_borrow(fattn_device *device, const fattn_problem *problem,
                                fattn_stream stream, fattn_loan *loan);

/* After a run of that status on the stream. Returns status, or the first failure after it. */
fattn_status fattn_cache_return(fattn_loan *loan, fattn_stream stream, fattn_status status);

/* Frees the plans and workspaces that are not in use. */
void fattn_cache_empty(void);

/* The same of a device's. */
void fattn_cache_forget(const fattn_device *device);

#endif
