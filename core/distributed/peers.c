/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport between devices of one process: ranks are threads, and a message is a copy from the
 * sender's memory to the receiver's, which a GPU's copy engine makes while its multiprocessors
 * compute.
 *
 * Both sides of a message enter it into a slot, [from][to][tag], in start(). Once both sides have
 * entered it, the copy is queued on the sender's stream of messages, after the work that was on
 * either side's stream in start(). On a GPU the side that enters the message last queues the copy.
 * On a host queueing it means making it, so the first side that calls wait() does that: between
 * start() and wait() the threads compute. For the threads a message is done as soon as its copy is
 * queued: the streams of both sides wait for the copy, the threads only for each other. The
 * receiver empties the slot. The sender waits for that, because only then may its event be used for
 * another message.
 */
#define _POSIX_C_SOURCE 200809L /* CLOCK_MONOTONIC */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/backend.h"
#include "core/memory.h"
#include "core/status.h"
#include "fattn/distributed.h"

enum { RANKS_MAX = 64 };

typedef enum slot_state {
    SLOT_WAITS, /* for one or both sides */
    SLOT_BUSY,  /* a thread is queueing the copy */
    SLOT_QUEUED,
    SLOT_FAILED /* the copy failed, or one side has withdrawn */
} slot_state;

typedef struct slot {
    const fattn_message *send, *receive; /* NULL until the side has entered its message */
    fattn_event *copied;                 /* the sender's event for this copy; NULL on a host */
    slot_state state;
    int64_t begun, taken; /* messages so far: entered by the sender, taken by the receiver */
} slot;

typedef struct peer {
    fattn_transport table; /* first: what the caller holds is its address */
    fattn_peers *all;
    fattn_device *device;
    fattn_stream messages; /* copies to others */
    fattn_event *computed; /* the work that its messages wait for */
    fattn_event *copied[FATTN_MESSAGES_MAX];
    int64_t number[FATTN_MESSAGES_MAX]; /* slot.begun of each message that the group sends */
    bool broken;
    int holds; /* threads that wait for its stream of messages; under the common mutex */
} peer;

struct fattn_peers {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int32_t ranks, failed; /* failed: the rank that failed first, or -1 */
    char reason[256];
    peer **peers; /* [ranks]: NULL if the rank is not open */
    slot *slots;
};

static slot *slot_of(const fattn_peers *all, int from, int to, int tag)
{
    return &all->slots[((int64_t)from * all->ranks + to) * FATTN_MESSAGE_TAGS + tag];
}

static slot *slot_for(const peer *p, const fattn_message *m)
{
    return m->receive ? slot_of(p->all, m->peer, p->table.rank, m->tag)
                      : slot_of(p->all, p->table.rank, m->peer, m->tag);
}

/* --- Copies ----------------------------------------------------------------------------------- */

static fattn_status stream_wait(const peer *p, fattn_stream stream, const fattn_event *event)
{
    fattn_device *const d = p->device;
    return event ? d->backend->stream_wait(d->impl, stream, event->impl) : FATTN_OK;
}

static fattn_status queue_spans(const peer *from, const slot *s)
{
    const fattn_device *const d = from->device;
    fattn_status status = FATTN_OK;
    for (int32_t n = 0; !status && n < s->send->span_count; n++) {
        const fattn_span *const source = &s->send->spans[n], *const target = &s->receive->spans[n];
        const fattn_row_copy copy = {target->data, source->data, target->step,
                                     source->step, source->rows, source->row_bytes};
        status = d->backend->copy_rows(d->impl, &copy, from->messages);
    }
    return status;
}

static fattn_status queue_copy(const peer *from, const peer *to, const slot *s)
{
    fattn_status status = stream_wait(from, from->messages, from->computed);
    status = status ? status : stream_wait(from, from->messages, to->computed);
    if (!status) {
        status = s->send->span_count
                     ? queue_spans(from, s)
                     : fattn_device_copy(from->device, s->receive->data, s->send->data,
                                         (size_t)s->send->bytes, from->messages);
    }
    return status || !s->copied ? status : fattn_event_record(s->copied, from->messages);
}

/* Whether both sides have the same spans, if any. */
static bool spans_agree(const fattn_message *a, const fattn_message *b)
{
    bool agree = a->span_count == b->span_count;
    for (int32_t n = 0; agree && n < a->span_count; n++) {
        agree =
            a->spans[n].rows == b->spans[n].rows && a->spans[n].row_bytes == b->spans[n].row_bytes;
    }
    return agree;
}

/* Notes that a rank has failed, unless one did before. Called with the mutex. */
static void note_failure(const peer *p, const char *reason)
{
    fattn_peers *const all = p->all;
    if (all->failed < 0) {
        all->failed = p->table.rank;
        snprintf(all->reason, sizeof all->reason, "%s", reason ? reason : "");
    }
    pthread_cond_broadcast(&all->changed);
}

/* Queues the copy of a message if both sides have entered it, and sets *queued. Called with the
 * mutex, which it releases while it queues the copy, because on a host that makes the copy. So if
 * *queued is set, anything may have changed meanwhile, and the caller must check again. */
static fattn_status queue_if_ready(const peer *p, const fattn_message *m, bool *queued)
{
    fattn_peers *const all = p->all;
    slot *const s = slot_for(p, m);
    const int from = m->receive ? m->peer : p->table.rank;
    const int to = m->receive ? p->table.rank : m->peer;
    if (!s->send || !s->receive || s->state != SLOT_WAITS) {
        return FATTN_OK;
    }
    *queued = true;
    if (s->send->bytes != s->receive->bytes || !spans_agree(s->send, s->receive)) {
        const char *const as = s->send->bytes == s->receive->bytes ? ", in other spans" : "";
        const fattn_status differ = fattn_fail(
            FATTN_RANKS_DISAGREE, "rank %d sends %lld bytes, and rank %d receives %lld%s", from,
            (long long)s->send->bytes, to, (long long)s->receive->bytes, as);
        s->state = SLOT_FAILED;
        note_failure(p, fattn_last_reason());
        return differ;
    }
    s->state = SLOT_BUSY;
    pthread_mutex_unlock(&all->mutex);
    const fattn_status status = queue_copy(all->peers[from], all->peers[to], s);
    pthread_mutex_lock(&all->mutex);
    s->state = status ? SLOT_FAILED : SLOT_QUEUED;
    if (status) {
        note_failure(p, fattn_last_reason()); /* before the other rank finds the slot */
    }
    pthread_cond_broadcast(&all->changed);
    return status;
}

/* Withdraws this rank's messages that are not done; waits for copies that are being queued. */
static void take_back(const peer *p, const fattn_message *messages, const bool *done, int count)
{
    for (int n = 0; n < count; n++) {
        const fattn_message *const m = &messages[n];
        slot *const s = slot_for(p, m);
        const fattn_message **const side = m->receive ? &s->receive : &s->send;
        if (done[n] || *side != m) {
            continue;
        }
        while (s->state == SLOT_BUSY) {
            pthread_cond_wait(&p->all->changed, &p->all->mutex);
        }
        s->state = s->state == SLOT_QUEUED ? SLOT_FAILED : s->state;
        s->copied = NULL; /* its rank may be closed next */
        *side = NULL;
    }
}

/* Waits for the copies that a rank has queued. Called with the mutex, which it releases while it
 * waits; `holds` keeps the rank's stream from being destroyed. */
static void settle(fattn_peers *all, int32_t rank)
{
    peer *const p = all->peers[rank];
    if (!p || !p->messages) {
        return;
    }
    p->holds++;
    pthread_mutex_unlock(&all->mutex);
    (void)fattn_stream_synchronize(p->device, p->messages);
    pthread_mutex_lock(&all->mutex);
    p->holds--;
    pthread_cond_broadcast(&all->changed);
}

/* After an error: waits for copies of small messages, which must be over when wait() returns. */
static void settle_small(const peer *p, const fattn_message *messages, int count)
{
    for (int n = 0; n < count; n++) {
        if (messages[n].bytes <= FATTN_MESSAGE_SMALL) {
            settle(p->all, messages[n].receive ? messages[n].peer : p->table.rank);
        }
    }
}

/* After an error of start() or wait(): withdraws the messages of the group that are not done.
 * Called with the mutex. */
static void give_back(peer *p, const fattn_message *messages, const bool *done, int count,
                      fattn_status status)
{
    p->broken = true;
    take_back(p, messages, done, count);
    fattn_reason_hold(status);
    settle_small(p, messages, count);
    fattn_reason_let();
}

static fattn_status start(void *user, const fattn_message *messages, int count)
{
    peer *const p = user;
    fattn_peers *const all = p->all;
    if (p->broken) {
        return fattn_fail(FATTN_RANK_LOST, "this transport has failed before");
    }
    fattn_status status = p->computed ? fattn_event_record(p->computed, p->table.stream) : FATTN_OK;
    pthread_mutex_lock(&all->mutex);
    for (int n = 0; n < count && !status; n++) {
        const fattn_message *const m = &messages[n];
        slot *const s = slot_for(p, m);
        if (m->receive ? s->receive : s->send) {
            status = fattn_fail(FATTN_INVALID_ARGUMENT, "two messages have tag %d and rank %d",
                                (int)m->tag, (int)m->peer);
        } else if (m->receive) {
            s->receive = m;
        } else {
            s->send = m;
            s->copied = p->copied[n];
            p->number[n] = ++s->begun;
        }
    }
    for (int n = 0; n < count && !status && p->messages; n++) {
        bool queued;
        status = queue_if_ready(p, &messages[n], &queued);
    }
    if (status) {
        const bool done[FATTN_MESSAGES_MAX] = {false};
        give_back(p, messages, done, count, status);
    }
    pthread_cond_broadcast(&all->changed);
    pthread_mutex_unlock(&all->mutex);
    return status;
}

/* --- Waiting ---------------------------------------------------------------------------------- */

/* Whether a message is done for this side. If so, its stream waits for the copy, and the receiver
 * empties the slot. */
static bool take(const peer *p, const fattn_message *m, int n, fattn_status *status)
{
    slot *const s = slot_for(p, m);
    if (!m->receive && s->taken >= p->number[n]) {
        *status = stream_wait(p, p->table.stream, p->copied[n]);
        return true;
    }
    if (s->state == SLOT_FAILED) {
        *status = fattn_fail(FATTN_RANK_LOST, "rank %d took a message back", (int)m->peer);
    }
    if (!m->receive || s->state != SLOT_QUEUED) {
        return false;
    }
    *status = stream_wait(p, p->table.stream, s->copied);
    s->send = s->receive = NULL;
    s->copied = NULL;
    s->state = SLOT_WAITS;
    s->taken++;
    pthread_cond_broadcast(&p->all->changed);
    return true;
}

/* The time `seconds` from now. It is limited to 10^9 s (30 years), since more would overflow a
 * 32-bit time_t. */
static struct timespec later(double seconds)
{
    struct timespec end;
    seconds = seconds < 1e9 ? seconds : 1e9;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += (time_t)seconds;
    end.tv_nsec += (long)((seconds - (double)(time_t)seconds) * 1e9);
    end.tv_sec += end.tv_nsec / 1000000000, end.tv_nsec %= 1000000000;
    return end;
}

/* Fails a wait(): another rank has failed, or the time has passed. */
static fattn_status fail_waiting(const fattn_peers *all, const fattn_message *missing,
                                 double seconds)
{
    if (all->failed >= 0) {
        return fattn_fail(FATTN_RANK_LOST, "rank %d gave up: %s", (int)all->failed, all->reason);
    }
    return fattn_fail(FATTN_RANK_TIMEOUT, "rank %d did not answer in %g s", (int)missing->peer,
                      seconds);
}

static fattn_status wait(void *user, const fattn_message *messages, int count, double seconds)
{
    peer *const p = user;
    fattn_peers *const all = p->all;
    const struct timespec end = later(seconds);
    bool done[FATTN_MESSAGES_MAX] = {false}, late = false;
    fattn_status status = FATTN_OK;
    int left = count;
    pthread_mutex_lock(&all->mutex);
    while (left > 0 && !status && all->failed < 0) {
        bool moved = false;
        for (int n = 0; n < count && !status; n++) {
            status = done[n] ? FATTN_OK : queue_if_ready(p, &messages[n], &moved);
        }
        for (int n = 0; n < count && !status && all->failed < 0; n++) {
            if (!done[n] && take(p, &messages[n], n, &status)) {
                done[n] = moved = true;
                left--;
            }
        }
        if (!moved && !status && late) {
            break;
        }
        if (!moved && !status) { /* the mutex was held throughout, so no change can be missed */
            late = pthread_cond_timedwait(&all->changed, &all->mutex, &end) != 0;
        }
    }
    for (int n = 0; n < count && left > 0 && !status; n++) {
        status = done[n] ? FATTN_OK : fail_waiting(all, &messages[n], seconds);
    }
    if (status) {
        give_back(p, messages, done, count, status);
    }
    pthread_mutex_unlock(&all->mutex);
    return status;
}

static void give_up(void *user, const char *reason)
{
    peer *const p = user;
    pthread_mutex_lock(&p->all->mutex);
    note_failure(p, reason);
    p->broken = true;
    pthread_mutex_unlock(&p->all->mutex);
}

/* --- Opening ---------------------------------------------------------------------------------- */

fattn_status fattn_peers_create(int32_t ranks, fattn_peers **peers)
{
    pthread_condattr_t clock;
    if (!peers) {
        return fattn_fail(FATTN_NULL_POINTER, "peers is NULL");
    }
    *peers = NULL;
    if (ranks < 1 || ranks > RANKS_MAX) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "ranks is %d, not in 1..%d", (int)ranks,
                          RANKS_MAX);
    }
    const size_t slots = (size_t)ranks * (size_t)ranks * FATTN_MESSAGE_TAGS * sizeof(slot);
    fattn_peers *const all = fattn_memory_alloc(sizeof *all);
    slot *const places = fattn_memory_alloc(slots);
    peer **const open = fattn_memory_alloc((size_t)ranks * sizeof *open);
    if (!all || !places || !open) {
        fattn_memory_free(all);
        fattn_memory_free(places);
        fattn_memory_free(open);
        return fattn_fail_memory((int64_t)slots, "the slots of messages");
    }
    memset(places, 0, slots);
    memset(open, 0, (size_t)ranks * sizeof *open);
    *all = (fattn_peers){.ranks = ranks, .failed = -1, .peers = open, .slots = places};
    pthread_mutex_init(&all->mutex, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&all->changed, &clock);
    pthread_condattr_destroy(&clock);
    *peers = all;
    return FATTN_OK;
}

void fattn_peers_destroy(fattn_peers *peers)
{
    if (!peers) {
        return;
    }
    pthread_cond_destroy(&peers->changed);
    pthread_mutex_destroy(&peers->mutex);
    fattn_memory_free(peers->slots);
    fattn_memory_free(peers->peers);
    fattn_memory_free(peers);
}

/* Creates the stream and events of a rank whose device has memory of its own. */
static fattn_status make_queue(peer *p)
{
    fattn_status status = fattn_stream_create(p->device, &p->messages);
    status = status ? status : fattn_event_create(p->device, &p->computed);
    for (int n = 0; n < FATTN_MESSAGES_MAX && !status; n++) {
        status = fattn_event_create(p->device, &p->copied[n]);
    }
    return status;
}

/* Enters the rank, and makes copies between its device and those of the other ranks direct. */
static fattn_status join(peer *p, int32_t rank)
{
    fattn_peers *const all = p->all;
    const fattn_backend *const backend = p->device->backend;
    fattn_status status = FATTN_OK;
    pthread_mutex_lock(&all->mutex);
    if (all->peers[rank]) {
        status = fattn_fail(FATTN_INVALID_ARGUMENT, "rank %d is already open", (int)rank);
    }
    for (int32_t r = 0; !status && r < all->ranks; r++) {
        const peer *const other = all->peers[r];
        if (!other) {
            continue;
        }
        if (other->device->backend != backend) {
            status =
                fattn_fail(FATTN_INVALID_ARGUMENT, "rank %d has a device of backend %s, not %s",
                           (int)r, other->device->backend->name, backend->name);
        } else if (backend->reach && other->device->ordinal != p->device->ordinal) {
            bool there = false, back = false;
            status = backend->reach(p->device->impl, other->device->impl, &there);
            status = status ? status : backend->reach(other->device->impl, p->device->impl, &back);
            /* Otherwise the driver stages copies, which is not promised for rows. */
            p->table.spans = p->table.spans && there && back;
        }
    }
    all->peers[rank] = status ? all->peers[rank] : p;
    pthread_mutex_unlock(&all->mutex);
    return status;
}

fattn_status fattn_peers_open(fattn_peers *peers, int32_t rank, fattn_device *device,
                              fattn_stream stream, fattn_transport **transport)
{
    if (!peers || !transport) {
        return fattn_fail(FATTN_NULL_POINTER, "%s is NULL", peers ? "transport" : "peers");
    }
    *transport = NULL;
    if (rank < 0 || rank >= peers->ranks) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "rank is %d, not in 0..%d", (int)rank,
                          (int)peers->ranks - 1);
    }
    peer *const p = fattn_memory_alloc(sizeof *p);
    if (!p) {
        return fattn_fail_memory(sizeof *p, "a transport");
    }
    *p = (peer){.all = peers, .table = {.struct_size = sizeof p->table, .rank = rank}};
    fattn_status status = fattn_device_acquire(&device);
    if (!status) {
        p->device = device;
        const bool own = !p->device->backend->host_memory;
        p->table.ranks = peers->ranks;
        p->table.user = p;
        p->table.start = start, p->table.wait = wait, p->table.abort = give_up;
        p->table.device_memory = own;
        p->table.spans = true;
        p->table.stream = own ? stream : NULL;
        status = own ? make_queue(p) : FATTN_OK;
        status = status ? status : join(p, rank);
    }
    if (status) {
        fattn_reason_hold(status);
        fattn_peers_close(&p->table);
        fattn_reason_let();
        return status;
    }
    *transport = &p->table;
    return FATTN_OK;
}

/* Waits until no copy uses the rank's memory, and no other thread waits for its stream. */
static void leave(const peer *p)
{
    fattn_peers *const all = p->all;
    pthread_mutex_lock(&all->mutex);
    if (all->peers[p->table.rank] == p) {
        for (int32_t r = 0; r < all->ranks; r++) {
            settle(all, r);
        }
        all->peers[p->table.rank] = NULL;
    }
    while (p->holds > 0) {
        pthread_cond_wait(&all->changed, &all->mutex);
    }
    pthread_mutex_unlock(&all->mutex);
}

void fattn_peers_close(fattn_transport *transport)
{
    peer *const p = (peer *)transport;
    if (!p) {
        return;
    }
    leave(p);
    for (int n = 0; n < FATTN_MESSAGES_MAX; n++) {
        fattn_event_destroy(p->copied[n]);
    }
    fattn_event_destroy(p->computed);
    if (p->messages) {
        (void)fattn_stream_destroy(p->device, p->messages);
    }
    if (p->device) {
        fattn_device_drop(p->device);
    }
    fattn_memory_free(p);
}
