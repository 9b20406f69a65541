/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn_attention(): a bounded cache of plans behind one mutex. An entry lends its workspace to one
 * call at a time; a second call on the same plan brings its own, so that nothing is shared in
 * secret.
 */
#include <pthread.h>
#include <string.h>

#include "core/abi.h"
#include "core/backend.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/status.h"

#define ENTRIES 32
#define ALIGNMENT_MAX 16 /* what kernels make use of: a larger one would only multiply plans */

typedef struct entry {
    fattn_plan *plan;      /* NULL: free */
    fattn_problem problem; /* as the caller gave it, the alignment apart */
    uint64_t hash;
    uint64_t last_used;
    void *workspace;     /* idle, or NULL while lent or not made yet */
    fattn_stream stream; /* on which the workspace was used last */
} entry;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static entry entries[ENTRIES];       /* under mutex */
static uint64_t now;                 /* under mutex */
static fattn_device *default_device; /* under mutex */

/* What a call holds while it runs. */
typedef struct loan {
    fattn_plan *plan;
    void *workspace;
} loan;

/* FNV-1a over the words of the problem. */
static uint64_t hash_problem(const fattn_device *device, const fattn_problem *problem)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325) ^ (uint64_t)(uintptr_t)device;
    for (size_t at = 0; at + sizeof hash <= sizeof *problem; at += sizeof hash) {
        uint64_t word = 0;
        memcpy(&word, (const char *)problem + at, sizeof word);
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static int64_t alignment_of(const fattn_buffers *b)
{
    const void *const tensors[] = {b->q, b->k, b->v, b->o, b->dout, b->dq, b->dk, b->dv};
    uintptr_t bits = ALIGNMENT_MAX;
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        bits |= (uintptr_t)tensors[i];
    }
    return (int64_t)(bits & (~bits + 1));
}

static fattn_status free_workspace(const fattn_plan *plan, void *workspace)
{
    return workspace ? plan->device->backend->free(plan->device->impl, workspace) : FATTN_OK;
}

static void drop(entry *e)
{
    (void)free_workspace(e->plan, e->workspace); /* of an earlier call: nobody waits for news */
    fattn_plan_destroy(e->plan);
    e->plan = NULL;
    e->workspace = NULL;
}

/* A workspace may follow its own use on the same stream; on another it might still be in use. */
static bool may_lend(const entry *e, fattn_stream stream)
{
    return e->workspace && (e->plan->device->backend->host_memory || e->stream == stream);
}

/* Under mutex. */
static bool borrow_cached(const fattn_device *device, const fattn_problem *problem, uint64_t hash,
                          fattn_stream stream, loan *l)
{
    for (entry *e = entries; e < entries + ENTRIES; e++) {
        if (e->plan && e->hash == hash && e->plan->device == device &&
            memcmp(&e->problem, problem, sizeof *problem) == 0) {
            e->last_used = ++now;
            l->plan = fattn_plan_retain(e->plan);
            l->workspace = NULL;
            if (may_lend(e, stream)) {
                l->workspace = e->workspace;
                e->workspace = NULL;
            }
            return true;
        }
    }
    return false;
}

/* Under mutex: the plan goes where the least recently used one was. */
static void insert(const fattn_problem *problem, uint64_t hash, fattn_plan *plan)
{
    entry *oldest = entries;
    for (entry *e = entries; e < entries + ENTRIES; e++) {
        if (e->plan && e->hash == hash && e->plan->device == plan->device &&
            memcmp(&e->problem, problem, sizeof *problem) == 0) {
            return; /* another thread was faster */
        }
        if (!e->plan || (oldest->plan && e->last_used < oldest->last_used)) {
            oldest = e;
        }
    }
    if (oldest->plan) {
        drop(oldest);
    }
    *oldest = (entry){
        .plan = fattn_plan_retain(plan), .problem = *problem, .hash = hash, .last_used = ++now};
}

static fattn_status borrow(fattn_device *device, const fattn_problem *problem, fattn_stream stream,
                           loan *l)
{
    const uint64_t hash = hash_problem(device, problem);
    pthread_mutex_lock(&mutex);
    const bool cached = borrow_cached(device, problem, hash, stream, l);
    pthread_mutex_unlock(&mutex);
    if (!cached) {
        l->workspace = NULL;
        const fattn_status status = fattn_plan_create(device, problem, &l->plan);
        if (status) {
            return status;
        }
        pthread_mutex_lock(&mutex);
        insert(problem, hash, l->plan);
        pthread_mutex_unlock(&mutex);
    }
    if (l->workspace || l->plan->tiling.workspace == 0) {
        return FATTN_OK;
    }
    const fattn_status status =
        device->backend->alloc(device->impl, (size_t)l->plan->tiling.workspace, &l->workspace);
    if (status) {
        fattn_plan_destroy(l->plan);
    }
    return status;
}

/* The workspace goes back to its plan's entry, or is freed when the entry has one again or is
 * gone. Returns status, or the first failure after it. */
static fattn_status give_back(loan *l, fattn_stream stream, fattn_status status)
{
    pthread_mutex_lock(&mutex);
    for (entry *e = entries; l->workspace && e < entries + ENTRIES; e++) {
        if (e->plan == l->plan && !e->workspace) {
            e->workspace = l->workspace;
            e->stream = stream;
            l->workspace = NULL;
        }
    }
    pthread_mutex_unlock(&mutex);
    if (l->workspace) {
        fattn_reason_hold(status);
        const fattn_status waited =
            l->plan->device->backend->stream_synchronize(l->plan->device->impl, stream);
        status = status ? status : waited;
        fattn_reason_hold(status);
        const fattn_status freed = free_workspace(l->plan, l->workspace);
        status = status ? status : freed;
        fattn_reason_let();
    }
    fattn_plan_destroy(l->plan);
    return status;
}

static fattn_status attend(fattn_device *device, const fattn_problem *problem,
                           const fattn_buffers *buffers, fattn_stream stream)
{
    fattn_problem wanted;
    fattn_buffers given;
    fattn_status status = fattn_abi_read(&wanted, sizeof wanted, problem, "fattn_problem");
    status = status ? status : fattn_abi_read(&given, sizeof given, buffers, "fattn_buffers");
    if (status) {
        return status;
    }
    wanted.pointer_alignment = alignment_of(&given);
    loan l;
    status = borrow(device, &wanted, stream, &l);
    if (status) {
        return status;
    }
    if (!fattn_pointers_hold(&l.plan->pointers, &given)) {
        status = fattn_buffers_normalise(&l.plan->problem, &given, &given);
    }
    if (!status && (device->backend->host_memory || fattn_plan_reads(l.plan, &given))) {
        status = fattn_plan_run(l.plan, &given, l.workspace, stream);
    } else if (!status) {
        status = fattn_plan_run_staged(l.plan, &given, l.workspace, stream);
    }
    return give_back(&l, stream, status);
}

/* The device of FATTN_BACKEND, opened at the first use; retained for the caller. */
static fattn_status open_default(fattn_device **device)
{
    pthread_mutex_lock(&mutex);
    fattn_status status = FATTN_OK;
    if (!default_device) {
        status = fattn_device_open(NULL, &default_device);
    }
    if (!status) {
        *device = fattn_device_retain(default_device);
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

fattn_status fattn_attention(fattn_device *device, const fattn_problem *problem,
                             const fattn_buffers *buffers, fattn_stream stream)
{
    if (device) {
        return attend(device, problem, buffers, stream);
    }
    fattn_status status = open_default(&device);
    if (!status) {
        status = attend(device, problem, buffers, stream);
        fattn_device_close(device);
    }
    return status;
}

void fattn_cache_clear(void)
{
    pthread_mutex_lock(&mutex);
    for (entry *e = entries; e < entries + ENTRIES; e++) {
        if (e->plan) {
            drop(e);
        }
    }
    fattn_device *const device = default_device;
    default_device = NULL;
    pthread_mutex_unlock(&mutex);
    fattn_device_close(device);
}
