/* SPDX-License-Identifier: Apache-2.0 */
/* In four parts: the cache's data, freeing, borrowing and returning, the public functions. */
#include "core/cache.h"

#include <string.h>

#include "core/abi.h"
#include "core/fork.h"
#include "core/hash.h"
#include "core/memory.h"
#include "core/status.h"

/* The default limits, and the most entries that a caller may ask for. */
#define ENTRIES 32
#define ENTRIES_MOST 4096
#define BYTES INT64_MAX

/* A full cache has one entry per bucket on average. */
#define BUCKETS ENTRIES_MOST

/* A plan gets this many workspaces before calls on different streams share one. It has more if more
 * threads call at once. */
#define WORKSPACES 4

/* --- The cache's data ------------------------------------------------------------------------- */

struct fattn_workspace {
    fattn_workspace *next;
    fattn_plan *plan;    /* retained */
    void *memory;        /* NULL if the plan needs none */
    void *event;         /* recorded after the last use; NULL in host memory */
    fattn_stream stream; /* of the last use */
    const void *thread;  /* of the last use: &here of that thread */
    uint64_t capture;    /* the capture whose graph owns it, or 0 */
};

typedef struct entry {
    struct entry *next;  /* in its bucket, or in a garbage list */
    struct entry *newer; /* its neighbours in the order of last use, or NULL */
    struct entry *older;
    fattn_plan *plan;      /* retained */
    fattn_problem problem; /* as the caller gave it, except for pointer_alignment */
    uint64_t hash;
    fattn_workspace *idle; /* the most recently returned first */
    int made;              /* number of workspaces, idle or lent */
} entry;

/* The mutex FATTN_FORK_CACHE protects all of these. */
static entry *buckets[BUCKETS]; /* chains of entries, by hash */
static entry *newest, *oldest;  /* ends of the list of all entries, in the order of last use */
static fattn_workspace *graphs; /* workspaces that graphs own */
static int64_t entries_most = ENTRIES, bytes_most = BYTES;
static fattn_cache_info counts; /* except graph_bytes, which is summed when asked */

static void lock(void) { fattn_fork_lock(FATTN_FORK_CACHE); }

static void unlock(void) { fattn_fork_unlock(FATTN_FORK_CACHE); }

/* Its address identifies the thread. */
static _Thread_local char here;

/* The hash of the problem's words. The last two lines mix the bits, since the lower ones choose the
 * bucket. */
static uint64_t hash_problem(const fattn_device *device, const fattn_problem *problem)
{
    uint64_t hash = FATTN_HASH_BEGIN ^ (uint64_t)(uintptr_t)device;
    for (size_t at = 0; at + sizeof hash <= sizeof *problem; at += sizeof hash) {
        uint64_t word = 0;
        memcpy(&word, (const char *)problem + at, sizeof word);
        hash = fattn_hash_step(hash, word);
    }
    hash = (hash ^ hash >> 32) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

/* The next five functions need the mutex. */

/* The chain of entries with that hash. */
static entry **bucket_of(uint64_t hash) { return &buckets[hash % BUCKETS]; }

/* Inserts an entry as the newest in the order of last use. */
static void attach(entry *e)
{
    e->newer = NULL;
    e->older = newest;
    *(newest ? &newest->newer : &oldest) = e;
    newest = e;
}

/* Removes an entry from the order of last use. */
static void detach(entry *e)
{
    *(e->newer ? &e->newer->older : &newest) = e->older;
    *(e->older ? &e->older->newer : &oldest) = e->newer;
}

/* Finds an entry, or NULL, and makes it the newest. */
static entry *find(const fattn_device *device, const fattn_problem *problem, uint64_t hash)
{
    entry *e = *bucket_of(hash);
    while (e && !(e->hash == hash && e->plan->device == device &&
                  memcmp(&e->problem, problem, sizeof *problem) == 0)) {
        e = e->next;
    }
    if (e) {
        detach(e);
        attach(e);
    }
    return e;
}

/* The entry of the loan's plan; NULL if it has been evicted meanwhile. */
static entry *entry_of(const fattn_loan *loan)
{
    entry *e = *bucket_of(loan->hash);
    while (e && e->plan != loan->plan) {
        e = e->next;
    }
    return e;
}

/* --- Freeing ---------------------------------------------------------------------------------- */

/* What is to be freed. Functions collect it while they hold the mutex, and dispose() frees it after
 * they have released the mutex: the driver may wait, and a caller's allocator may do anything. */
typedef struct garbage {
    entry *entries;
    fattn_workspace *workspaces;
} garbage;

static fattn_workspace *take(fattn_workspace **link)
{
    fattn_workspace *const w = *link;
    *link = w->next;
    w->next = NULL;
    return w;
}

static void discard_workspace(garbage *out, fattn_workspace *w)
{
    w->next = out->workspaces;
    out->workspaces = w;
}

/* Removes an entry. Its lent workspaces find no entry when they are returned, and are freed then.
 * Needs the mutex. */
static void evict_entry(garbage *out, entry *e)
{
    entry **link = bucket_of(e->hash);
    while (*link != e) {
        link = &(*link)->next;
    }
    *link = e->next;
    detach(e);
    while (e->idle) {
        discard_workspace(out, take(&e->idle));
    }
    counts.bytes -= e->made * e->plan->tiling.workspace;
    counts.entries--;
    e->next = out->entries;
    out->entries = e;
}

/* Removes the oldest entries until the limit holds. Needs the mutex. */
static void trim_entries(garbage *out)
{
    while (counts.entries > entries_most) {
        evict_entry(out, oldest);
        counts.evictions++;
    }
}

/* Removes idle workspaces of the device (NULL: of all devices), those of the oldest entries first,
 * until at most `most` bytes are left. Needs the mutex. */
static void trim_bytes(garbage *out, const fattn_device *device, int64_t most)
{
    for (entry *e = oldest; e && counts.bytes > most; e = e->newer) {
        while (e->idle && (!device || e->plan->device == device) && counts.bytes > most) {
            counts.bytes -= e->plan->tiling.workspace;
            e->made--;
            discard_workspace(out, take(&e->idle));
        }
    }
}

/* While any thread captures a stream, drivers refuse to allocate, load and wait, in case a graph
 * should depend on that. No graph depends on the cache, so this allows it for the calling thread.
 * *mode is the previous mode, for restore_capture(). */
static fattn_status relax_capture(const fattn_device *device, int *mode)
{
    *mode = FATTN_CAPTURE_RELAXED;
    return device->backend->capture_mode(device->impl, mode);
}

/* Restores the mode. Returns status, or else the failure to restore. */
static fattn_status restore_capture(const fattn_device *device, int mode, fattn_status status)
{
    fattn_reason_hold(status);
    const fattn_status restored = device->backend->capture_mode(device->impl, &mode);
    fattn_reason_let();
    return status ? status : restored;
}

/* Waits for the last use of a workspace and frees it. Returns status, or else the first failure
 * here. */
static fattn_status free_workspace(fattn_workspace *w, fattn_status status)
{
    fattn_device *const device = w->plan->device;
    const fattn_backend *const backend = device->backend;
    int mode;
    fattn_reason_hold(status);
    const bool relaxed = relax_capture(device, &mode) == FATTN_OK;
    if (w->event) {
        const fattn_status waited = backend->event_synchronize(device->impl, w->event);
        status = status ? status : waited;
        backend->event_destroy(device->impl, w->event);
    }
    fattn_reason_hold(status);
    const fattn_status freed = w->memory ? fattn_device_give(device, w->memory) : FATTN_OK;
    fattn_reason_let();
    status = status ? status : freed;
    status = relaxed ? restore_capture(device, mode, status) : status;
    fattn_reason_let();
    fattn_plan_destroy(w->plan);
    fattn_memory_free(w);
    return status;
}

/* Frees what was collected. Failures are ignored: the calls that used these objects have
 * returned. */
static void dispose(garbage *out)
{
    while (out->workspaces) {
        (void)free_workspace(take(&out->workspaces), FATTN_OK);
    }
    while (out->entries) {
        entry *const e = out->entries;
        out->entries = e->next;
        fattn_plan_destroy(e->plan);
        fattn_memory_free(e);
    }
}

/* --- Borrowing and returning ------------------------------------------------------------------ */

/* Whether the stream is probably the one on which the workspace was used last, so that waiting for
 * its event costs nothing. */
static bool is_near(const fattn_workspace *w, fattn_stream stream)
{
    return w->stream == stream &&
           ((uintptr_t)stream != FATTN_STREAM_PER_THREAD || w->thread == &here);
}

/* Takes the idle workspace that suits a call on the stream best. NULL: the call has to make one.
 * Needs the mutex. */
static fattn_workspace *lend(entry *e, fattn_stream stream)
{
    fattn_workspace **last = NULL;
    for (fattn_workspace **link = &e->idle; *link; link = &(*link)->next) {
        if (e->plan->device->backend->host_memory || is_near(*link, stream)) {
            return take(link);
        }
        last = link;
    }
    return last && e->made >= WORKSPACES ? take(last) : NULL;
}

/* The same for a call that is being captured. */
static fattn_workspace *lend_graph(const fattn_plan *plan, uint64_t capture)
{
    for (fattn_workspace **link = &graphs; *link; link = &(*link)->next) {
        if ((*link)->plan == plan && (*link)->capture == capture) {
            return take(link);
        }
    }
    return NULL;
}

/* Allocates device memory. If there is none, frees the device's idle workspaces and tries again. */
static fattn_status allocate(const fattn_device *device, size_t bytes, fattn_stream stream,
                             void **memory)
{
    fattn_status status = fattn_device_take(device, bytes, stream, memory);
    garbage out = {NULL, NULL};
    if (status == FATTN_OUT_OF_MEMORY) {
        lock();
        trim_bytes(&out, device, 0);
        unlock();
    }
    if (out.workspaces) {
        dispose(&out);
        status = fattn_device_take(device, bytes, stream, memory);
    }
    return status;
}

/* Makes a workspace for the plan. */
static fattn_status make_workspace(fattn_plan *plan, fattn_stream stream, uint64_t capture,
                                   fattn_workspace **made)
{
    const fattn_device *const device = plan->device;
    const int64_t bytes = plan->tiling.workspace;
    fattn_workspace *const w = fattn_memory_alloc(sizeof *w);
    fattn_status status = FATTN_OK;
    if (!w) {
        return fattn_fail_memory(sizeof *w, "the owner of a workspace");
    }
    *w = (fattn_workspace){.plan = fattn_plan_retain(plan), .capture = capture};
    int mode;
    status = relax_capture(device, &mode);
    if (!status) {
        if (bytes > 0 && !device->backend->host_memory) {
            status = device->backend->event_create(device->impl, &w->event);
        }
        if (bytes > 0 && !status) {
            status = allocate(device, (size_t)bytes, stream, &w->memory);
        }
        status = restore_capture(device, mode, status);
    }
    if (status) {
        return free_workspace(w, status);
    }
    *made = w;
    return FATTN_OK;
}

/* Makes a plan and an entry for it, which insert() puts into the cache. */
static fattn_status make_entry(fattn_device *device, const fattn_problem *problem, uint64_t hash,
                               entry **made)
{
    int mode;
    entry *const e = fattn_memory_alloc(sizeof *e);
    if (!e) {
        return fattn_fail_memory(sizeof *e, "an entry of the cache");
    }
    *e = (entry){.problem = *problem, .hash = hash};
    fattn_status status = relax_capture(device, &mode);
    if (!status) {
        status = restore_capture(device, mode, fattn_plan_create(device, problem, &e->plan));
    }
    if (status) {
        fattn_plan_destroy(e->plan);
        fattn_memory_free(e);
        return status;
    }
    *made = e;
    return FATTN_OK;
}

/* Puts a new entry into the cache. If another thread has inserted the same problem meanwhile, or
 * the cache keeps no entries, the new entry goes to garbage instead. Returns the entry to use,
 * which may be in garbage. Needs the mutex. */
static entry *insert(entry *made, garbage *out)
{
    entry *const e = find(made->plan->device, &made->problem, made->hash);
    const bool kept = !e && entries_most > 0;
    entry **const list = kept ? bucket_of(made->hash) : &out->entries;
    made->next = *list;
    *list = made;
    if (kept) {
        attach(made);
        counts.entries++;
        trim_entries(out);
    }
    return e ? e : made;
}

/* Lends an idle workspace of the plan, if there is one. Otherwise counts a new one and sets *make:
 * the caller makes it after it has released the mutex. Needs the mutex. */
static void borrow_workspace(entry *e, fattn_stream stream, fattn_loan *loan, bool *make,
                             garbage *out)
{
    const int64_t bytes = loan->plan->tiling.workspace;
    if (loan->capture) {
        loan->owner = lend_graph(loan->plan, loan->capture);
        *make = !loan->owner;
    } else if (bytes > 0) {
        loan->owner = lend(e, stream);
        *make = !loan->owner;
    }
    counts.allocations += *make && bytes > 0;
    if (*make && !loan->capture && entry_of(loan)) {
        e->made++;
        counts.bytes += bytes;
        trim_bytes(out, NULL, bytes_most);
    }
}

static fattn_status borrow(fattn_device *device, const fattn_problem *problem, fattn_stream stream,
                           fattn_loan *loan, bool *make)
{
    const uint64_t hash = hash_problem(device, problem);
    garbage out = {NULL, NULL};
    loan->hash = hash;
    lock();
    entry *e = find(device, problem, hash);
    counts.hits += e != NULL;
    counts.misses += e == NULL;
    if (!e) {
        unlock();
        const fattn_status status = make_entry(device, problem, hash, &e);
        if (status) {
            return status;
        }
        lock();
        e = insert(e, &out);
    }
    loan->plan = fattn_plan_retain(e->plan);
    borrow_workspace(e, stream, loan, make, &out);
    unlock();
    dispose(&out);
    return FATTN_OK;
}

/* Puts a workspace where the next call finds it. NULL for one that could not be made. Returns
 * whether it is kept; if not, it is no longer counted, and the caller frees it. */
static bool put_back(const fattn_loan *loan, fattn_workspace *w)
{
    lock();
    fattn_workspace **list = NULL;
    entry *const e = loan->capture ? NULL : entry_of(loan);
    if (loan->capture) {
        list = &graphs;
    } else if (e && w && counts.bytes <= bytes_most) {
        list = &e->idle;
    } else if (e) {
        e->made--;
        counts.bytes -= loan->plan->tiling.workspace;
    }
    if (list && w) {
        w->next = *list;
        *list = w;
    }
    unlock();
    return list != NULL;
}

/* Makes the stream wait for the workspace's last use, unless that was on the same stream. Equal
 * handles prove that only for the driver's two global streams. */
static fattn_status follow(const fattn_workspace *w, fattn_stream stream)
{
    const fattn_device *const device = w->plan->device;
    const bool same = (uintptr_t)stream < FATTN_STREAM_PER_THREAD && w->stream == stream;
    return !w->event || same ? FATTN_OK
                             : device->backend->stream_wait(device->impl, stream, w->event);
}

fattn_status fattn_cache_borrow(fattn_device *device, const fattn_problem *problem,
                                fattn_stream stream, fattn_loan *loan)
{
    bool make = false;
    *loan = (fattn_loan){.plan = NULL};
    fattn_status status = device->backend->stream_capture(device->impl, stream, &loan->capture);
    status = status ? status : borrow(device, problem, stream, loan, &make);
    if (status) {
        return status;
    }
    if (make) {
        status = make_workspace(loan->plan, stream, loan->capture, &loan->owner);
    } else if (loan->owner) {
        status = follow(loan->owner, stream);
    }
    loan->workspace = loan->owner ? loan->owner->memory : NULL;
    if (status) {
        const bool reusable = put_back(loan, loan->owner);
        if (!reusable && loan->owner) {
            (void)free_workspace(loan->owner, status);
        }
        fattn_plan_destroy(loan->plan);
    }
    return status;
}

/* Records the workspace's event after its use. If that fails, waits for the stream instead. */
static fattn_status mark(fattn_workspace *w, fattn_stream stream)
{
    const fattn_device *const device = w->plan->device;
    w->stream = stream;
    w->thread = &here;
    fattn_status status =
        w->event ? device->backend->event_record(device->impl, w->event, stream) : FATTN_OK;
    if (status) {
        fattn_reason_hold(status);
        (void)device->backend->stream_synchronize(device->impl, stream);
        fattn_reason_let();
    }
    return status;
}

fattn_status fattn_cache_return(fattn_loan *loan, fattn_stream stream, fattn_status status)
{
    fattn_workspace *const w = loan->owner;
    if (w) {
        fattn_reason_hold(status);
        const fattn_status marked = mark(w, stream);
        status = status ? status : marked;
        if (marked && loan->capture) {
            w->capture = 0; /* later calls cannot wait for it, so none may find it */
        }
        const bool reusable = (!marked || loan->capture) && put_back(loan, w);
        if (!reusable && marked) {
            (void)put_back(loan, NULL);
        }
        status = reusable ? status : free_workspace(w, status);
        fattn_reason_let();
    }
    fattn_plan_destroy(loan->plan);
    return status;
}

/* Removes the entries of a device, or with NULL of all devices. */
static void forget(const fattn_device *device)
{
    garbage out = {NULL, NULL};
    lock();
    for (entry *e = oldest, *newer; e; e = newer) {
        newer = e->newer;
        if (!device || e->plan->device == device) {
            evict_entry(&out, e);
        }
    }
    unlock();
    dispose(&out);
}

void fattn_cache_empty(void) { forget(NULL); }

void fattn_cache_forget(const fattn_device *device) { forget(device); }

/* --- The public functions --------------------------------------------------------------------- */

void fattn_cache_options_init(fattn_cache_options *options)
{
    *options =
        (fattn_cache_options){.struct_size = sizeof *options, .entries = ENTRIES, .bytes = BYTES};
}

fattn_status fattn_cache_set_options(const fattn_cache_options *options)
{
    fattn_cache_options wanted;
    const fattn_status status =
        fattn_abi_read(&wanted, sizeof wanted, options, "fattn_cache_options");
    garbage out = {NULL, NULL};
    if (status) {
        return status;
    }
    if (wanted.entries < 0 || wanted.entries > ENTRIES_MOST || wanted.bytes < 0) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "the cache's entries are %lld and its bytes %lld: 0..%d entries, and at "
                          "least 0 bytes, can be kept",
                          (long long)wanted.entries, (long long)wanted.bytes, ENTRIES_MOST);
    }
    lock();
    entries_most = wanted.entries;
    bytes_most = wanted.bytes;
    trim_entries(&out);
    trim_bytes(&out, NULL, bytes_most);
    unlock();
    dispose(&out);
    return FATTN_OK;
}

void fattn_cache_info_init(fattn_cache_info *info)
{
    *info = (fattn_cache_info){.struct_size = sizeof *info};
}

fattn_status fattn_cache_get_info(fattn_cache_info *info)
{
    lock();
    fattn_cache_info now = counts;
    for (const fattn_workspace *w = graphs; w; w = w->next) {
        now.graph_bytes += w->plan->tiling.workspace;
    }
    unlock();
    return fattn_abi_write(info, &now, sizeof now, "fattn_cache_info");
}
