/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport over MPI. Messages are cut into pieces whose size fits an int. Each piece is a
 * request, and requests are tested until all are done, the time is over, or a rank says that it has
 * failed.
 *
 * MPI cannot withdraw a send: after a failure it may still read the sender's memory, where the
 * caller may have put other data. So a message counts as received only when its sender has said, by
 * an empty message, that MPI has finished reading the data.
 *
 * Messages move only while MPI is called. So between start() and wait() a thread calls MPI, if MPI
 * allows calls from other threads (MPI_THREAD_SERIALIZED). The caller is inside fattn during that
 * time, and calls MPI only through this transport.
 */
#define _POSIX_C_SOURCE 199309L /* nanosleep */
#include "fattn/mpi.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if MPI_VERSION < 3
#error "fattn_mpi needs MPI 3 or later"
#endif

enum {
    PIECE = 1 << 30,  /* most bytes of a request */
    PIECES = 64,      /* most pieces of a group: 16 messages of 4 GiB */
    TAG_SENT = 100,   /* plus the tag of a message: MPI has finished reading its data */
    TAG_ABORT = 1000, /* a rank has failed; larger than all other tags */
    REASON = 256,
    NAP = 20000, /* nanoseconds between polls for progress */
    MOVED = 5000 /* a poll that takes longer has moved data, and is repeated without a nap */
};

_Static_assert(FATTN_MESSAGE_TAGS <= TAG_SENT && TAG_SENT + FATTN_MESSAGE_TAGS <= TAG_ABORT,
               "tags of messages differ from those of the transport");

typedef struct transport {
    fattn_transport table; /* first: the caller's pointer is its address */
    MPI_Comm comm;
    fattn_device *device;          /* of the messages' memory; NULL: host memory */
    const fattn_message *messages; /* of the current group */
    /* Requests of pieces, followed by those of messages with TAG_SENT. */
    MPI_Request requests[PIECES + FATTN_MESSAGES_MAX];
    int owner[PIECES + FATTN_MESSAGES_MAX]; /* the message to which a request belongs */
    int pieces, count;
    int unsent[FATTN_MESSAGES_MAX]; /* pieces of a message (not a small one) still to be sent */
    pthread_t thread;
    pthread_mutex_t mutex; /* if there is a thread: for all calls of MPI, and for the next fields */
    pthread_cond_t changed;
    bool has_thread, moving, ends; /* moving: the thread polls the requests; ends: it exits */
    int error;                     /* of a poll by the thread */
    bool broken;                   /* failed before */
    bool told;                     /* the other ranks know of a failure */
    char reason[REASON];           /* of this rank's failure, while others may still receive it */
} transport;

static fattn_status fail(transport *t, fattn_status status, const char *text)
{
    t->broken = true;
    return fattn_transport_fail(status, text);
}

static fattn_status fail_mpi(transport *t, const char *what, int error)
{
    char words[MPI_MAX_ERROR_STRING], text[MPI_MAX_ERROR_STRING + 64];
    int length = 0;
    MPI_Error_string(error, words, &length);
    snprintf(text, sizeof text, "%s: %.*s", what, length, words);
    return fail(t, FATTN_RANK_LOST, text);
}

static fattn_status fail_again(void)
{
    return fattn_transport_fail(FATTN_RANK_LOST, "this transport has failed before");
}

/* Starts the empty message with TAG_SENT: sends it for a message that this rank sends, receives it
 * for one that it receives. */
static int begin_sent(transport *t, int n)
{
    const fattn_message *const m = &t->messages[n];
    MPI_Request *const request = &t->requests[t->count];
    t->owner[t->count++] = n;
    return m->receive ? MPI_Irecv(NULL, 0, MPI_BYTE, m->peer, TAG_SENT + m->tag, t->comm, request)
                      : MPI_Isend(NULL, 0, MPI_BYTE, m->peer, TAG_SENT + m->tag, t->comm, request);
}

/* Lets MPI make progress. *ended is MPI_UNDEFINED once all requests are done. (An array of
 * statuses, because gcc warns that MPICH's MPI_STATUSES_IGNORE is an array without room.) */
static int poll(transport *t, int *ended)
{
    int which[PIECES + FATTN_MESSAGES_MAX];
    MPI_Status statuses[PIECES + FATTN_MESSAGES_MAX];
    int error = MPI_Testsome(t->count, t->requests, ended, which, statuses);
    for (int n = 0; !error && *ended != MPI_UNDEFINED && n < *ended; n++) {
        const int owner = t->owner[which[n]];
        if (which[n] < t->pieces && t->unsent[owner] > 0 && --t->unsent[owner] == 0) {
            error = begin_sent(t, owner);
        }
    }
    return error;
}

/* --- Progress during computation -------------------------------------------------------------- */

static void lock(transport *t)
{
    if (t->has_thread) {
        pthread_mutex_lock(&t->mutex);
    }
}

static void unlock(transport *t)
{
    if (t->has_thread) {
        pthread_mutex_unlock(&t->mutex);
    }
}

static void *progress(void *context)
{
    transport *const t = context;
    const struct timespec nap = {.tv_nsec = NAP};
    pthread_mutex_lock(&t->mutex);
    while (!t->ends) {
        if (!t->moving) {
            pthread_cond_wait(&t->changed, &t->mutex);
            continue;
        }
        int ended = 0;
        const double begin = MPI_Wtime();
        t->error = poll(t, &ended);
        t->moving = !t->error && ended != MPI_UNDEFINED;
        const bool moved = MPI_Wtime() - begin > 1e-9 * MOVED;
        pthread_mutex_unlock(&t->mutex);
        if (!moved) {
            nanosleep(&nap, NULL);
        }
        pthread_mutex_lock(&t->mutex);
    }
    pthread_mutex_unlock(&t->mutex);
    return NULL;
}

static void set_moving(transport *t, bool moving)
{
    if (t->has_thread) {
        pthread_mutex_lock(&t->mutex);
        t->moving = moving;
        pthread_cond_signal(&t->changed);
        pthread_mutex_unlock(&t->mutex);
    }
}

static void begin_thread(transport *t)
{
    int provided = MPI_THREAD_SINGLE;
    MPI_Query_thread(&provided);
    if (provided < MPI_THREAD_SERIALIZED) {
        return;
    }
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->changed, NULL);
    t->has_thread = true;
    if (pthread_create(&t->thread, NULL, progress,
                       t)) { /* messages then move at the end of a step */
        t->has_thread = false;
        pthread_cond_destroy(&t->changed);
        pthread_mutex_destroy(&t->mutex);
    }
}

static void end_thread(transport *t)
{
    if (t->has_thread) {
        pthread_mutex_lock(&t->mutex);
        t->ends = true;
        pthread_cond_signal(&t->changed);
        pthread_mutex_unlock(&t->mutex);
        pthread_join(t->thread, NULL);
        pthread_cond_destroy(&t->changed);
        pthread_mutex_destroy(&t->mutex);
        t->has_thread = false;
    }
}

/* --- Functions of the transport --------------------------------------------------------------- */

/* MPI copies small messages in the call that sends them. */
static bool is_small(const fattn_message *m) { return m->bytes <= FATTN_MESSAGE_SMALL; }

/* Starts the messages of one direction. */
static fattn_status post(transport *t, const fattn_message *messages, int count, bool receive)
{
    for (int n = 0; n < count; n++) {
        const fattn_message *const m = &messages[n];
        for (int64_t at = 0; at < m->bytes && receive == !!m->receive; at += PIECE) {
            const int bytes = (int)(m->bytes - at < PIECE ? m->bytes - at : PIECE);
            char *const data = (char *)m->data + at;
            if (t->count == PIECES) {
                return fail(t, FATTN_UNSUPPORTED, "messages of a step are larger than 64 GiB");
            }
            MPI_Request *const request = &t->requests[t->count];
            t->owner[t->count] = n;
            const int error =
                m->receive ? MPI_Irecv(data, bytes, MPI_BYTE, m->peer, m->tag, t->comm, request)
                           : MPI_Isend(data, bytes, MPI_BYTE, m->peer, m->tag, t->comm, request);
            if (error) {
                return fail_mpi(t, m->receive ? "MPI_Irecv" : "MPI_Isend", error);
            }
            t->count++;
            t->unsent[n] += !m->receive && !is_small(m);
        }
    }
    return FATTN_OK;
}

/* Starts all messages, and then the receipt of TAG_SENT for those that this rank receives. */
static fattn_status post_all(transport *t, const fattn_message *messages, int count)
{
    t->messages = messages;
    t->count = t->error = 0;
    memset(t->unsent, 0, sizeof t->unsent);
    /* Receives first, so that MPI can put data directly where it belongs. */
    fattn_status status = post(t, messages, count, true);
    status = status ? status : post(t, messages, count, false);
    t->pieces = t->count;
    for (int n = 0; !status && n < count; n++) {
        const int error = messages[n].receive && !is_small(&messages[n]) ? begin_sent(t, n) : 0;
        status = error ? fail_mpi(t, "MPI_Irecv", error) : FATTN_OK;
    }
    return status;
}

/* Cancels receives. MPI keeps messages that are already moving, and sends, which cannot be
 * cancelled. */
static void give_up(transport *t, const fattn_message *messages)
{
    for (int n = 0; n < t->count; n++) {
        if (t->requests[n] == MPI_REQUEST_NULL) {
            continue;
        }
        if (messages[t->owner[n]].receive) {
            MPI_Cancel(&t->requests[n]);
            for (int turn = 0, ended = 0; !ended && turn < 1000; turn++) {
                MPI_Test(&t->requests[n], &ended, MPI_STATUS_IGNORE);
            }
        } else {
            MPI_Request_free(&t->requests[n]);
        }
    }
    t->count = 0;
}

static fattn_status start(void *user, const fattn_message *messages, int count)
{
    transport *const t = user;
    if (t->broken) {
        return fail_again();
    }
    /* MPI has no streams, so data must have been computed before it is sent. */
    fattn_status status =
        t->device ? fattn_stream_synchronize(t->device, t->table.stream) : FATTN_OK;
    if (status) {
        t->broken = true;
        return status;
    }
    lock(t);
    status = post_all(t, messages, count);
    if (status) {
        give_up(t, messages);
    }
    unlock(t);
    if (!status) {
        set_moving(t, true);
    }
    return status;
}

/* Fails with another rank's reason if that rank has said that it failed; else FATTN_OK. */
static fattn_status hear(transport *t)
{
    int there = 0;
    MPI_Status from;
    char reason[REASON] = "", text[REASON + 64];
    const int error = MPI_Iprobe(MPI_ANY_SOURCE, TAG_ABORT, t->comm, &there, &from);
    if (error) {
        return fail_mpi(t, "MPI_Iprobe", error);
    }
    if (!there) {
        return FATTN_OK;
    }
    MPI_Recv(reason, REASON, MPI_CHAR, from.MPI_SOURCE, TAG_ABORT, t->comm, MPI_STATUS_IGNORE);
    reason[REASON - 1] = '\0';
    t->told = true;
    snprintf(text, sizeof text, "rank %d gave up: %s", from.MPI_SOURCE, reason);
    return fail(t, FATTN_RANK_LOST, text);
}

static fattn_status wait(void *user, const fattn_message *messages, int count, double seconds)
{
    (void)count;
    static const struct timespec nap = {.tv_nsec = NAP};
    transport *const t = user;
    const double end = MPI_Wtime() + seconds;
    fattn_status status = FATTN_OK;
    set_moving(t, false); /* from here on the calling thread polls */
    if (t->broken) {      /* this rank has given up since start() */
        status = fail_again();
    } else if (t->error) {
        status = fail_mpi(t, "MPI_Testsome", t->error);
    }
    for (int64_t turn = 0; !status; turn++) {
        int ended = 0;
        const int error = poll(t, &ended);
        if (error) {
            status = fail_mpi(t, "MPI_Testsome", error);
        } else if (ended == MPI_UNDEFINED) { /* no request is left */
            return FATTN_OK;
        } else if (MPI_Wtime() > end) {
            int n = 0;
            while (n < t->count - 1 && t->requests[n] == MPI_REQUEST_NULL) {
                n++;
            }
            char text[96];
            snprintf(text, sizeof text, "rank %d did not answer in %g s",
                     messages[t->owner[n]].peer, seconds);
            status = fail(t, FATTN_RANK_TIMEOUT, text);
        } else {
            status = hear(t);
        }
        if (!status && turn > 1000) {
            nanosleep(&nap, NULL); /* ranks may share processors */
        }
    }
    give_up(t, messages);
    return status;
}

static void give_reason(void *user, const char *reason)
{
    transport *const t = user;
    if (t->told) {
        return;
    }
    set_moving(t, false);
    t->broken = t->told = true;
    snprintf(t->reason, REASON, "%s", reason ? reason : "no reason given");
    for (int r = 0; r < t->table.ranks; r++) {
        MPI_Request request = MPI_REQUEST_NULL;
        if (r != t->table.rank &&
            !MPI_Isend(t->reason, REASON, MPI_CHAR, r, TAG_ABORT, t->comm, &request)) {
            MPI_Request_free(&request);
        }
    }
}

static bool is_running(void)
{
    int begun = 0, ended = 0;
    MPI_Initialized(&begun);
    MPI_Finalized(&ended);
    return begun && !ended;
}

fattn_status fattn_mpi_open(MPI_Comm comm, fattn_transport **opened)
{
    return fattn_mpi_open_device(comm, NULL, NULL, opened);
}

fattn_status fattn_mpi_open_device(MPI_Comm comm, fattn_device *device, fattn_stream stream,
                                   fattn_transport **opened)
{
    if (!opened) {
        return fattn_transport_fail(FATTN_NULL_POINTER, "transport is NULL");
    }
    *opened = NULL;
    if (!is_running() || comm == MPI_COMM_NULL) {
        return fattn_transport_fail(FATTN_INVALID_ARGUMENT,
                                    is_running() ? "comm is MPI_COMM_NULL"
                                                 : "MPI is not initialised, or finalised");
    }
    transport *const t = malloc(sizeof *t);
    if (!t) {
        return fattn_transport_fail(FATTN_OUT_OF_MEMORY, "no memory for a transport");
    }
    memset(t, 0, sizeof *t);
    MPI_Errhandler usual; /* which by default ends the program */
    MPI_Comm_get_errhandler(comm, &usual);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    const int error = MPI_Comm_dup(comm, &t->comm);
    MPI_Comm_set_errhandler(comm, usual);
    MPI_Errhandler_free(&usual);
    fattn_status status = error ? fail_mpi(t, "MPI_Comm_dup", error) : FATTN_OK;
    if (status) {
        free(t);
        return status;
    }
    MPI_Comm_set_errhandler(t->comm, MPI_ERRORS_RETURN);
    int rank = 0, ranks = 0;
    MPI_Comm_rank(t->comm, &rank);
    MPI_Comm_size(t->comm, &ranks);
    t->table = (fattn_transport){.struct_size = sizeof t->table,
                                 .rank = rank,
                                 .ranks = ranks,
                                 .user = t,
                                 .start = start,
                                 .wait = wait,
                                 .abort = give_reason,
                                 .device_memory = device != NULL,
                                 .stream = stream};
    t->device = device;
    begin_thread(t);
    *opened = &t->table;
    return FATTN_OK;
}

void fattn_mpi_close(fattn_transport *table)
{
    transport *const t = (transport *)table;
    if (!t) {
        return;
    }
    end_thread(t);
    if (t->broken) {
        return; /* MPI may still be sending t->reason, so the memory stays */
    }
    MPI_Comm_free(&t->comm);
    free(t);
}

fattn_status fattn_mpi_begin(fattn_transport **opened)
{
    int initialised = 0, finalised = 0, provided = 0;
    if (!opened) {
        return fattn_transport_fail(FATTN_NULL_POINTER, "transport is NULL");
    }
    *opened = NULL;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    if (!initialised && !finalised &&
        MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided)) {
        return fattn_transport_fail(FATTN_DEVICE_ERROR, "MPI cannot be initialised");
    }
    return fattn_mpi_open(MPI_COMM_WORLD, opened);
}

void fattn_mpi_end(fattn_transport *table)
{
    const bool broken = table && ((transport *)table)->broken;
    fattn_mpi_close(table);
    if (!broken) {
        MPI_Finalize();
    }
}
