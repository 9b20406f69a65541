/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport over NCCL or RCCL. The messages of a group are one NCCL group of sends and
 * receives, on a stream of their own that waits for the work computed before. NCCL has no tags:
 * between two ranks it pairs sends and receives in their order, which here is the order of tags.
 */
#define _POSIX_C_SOURCE 199309L /* clock_gettime, nanosleep */
#include "fattn/nccl.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/distributed/transports/nccl_vendor.h"

/* The functions of NCCL that are used. */
typedef struct nccl {
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
    ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*receive)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*abort)(ncclComm_t);
    ncclResult_t (*count)(const ncclComm_t, int *);
    ncclResult_t (*rank)(const ncclComm_t, int *);
    ncclResult_t (*device)(const ncclComm_t, int *);
    const char *(*error)(ncclResult_t);
} nccl;

typedef struct transport {
    fattn_transport table; /* first: the caller's pointer is its address */
    nccl nccl;
    void *library;
    ncclComm_t comm;
    int device;
    cudaStream_t stream;        /* of messages */
    cudaEvent_t computed, sent; /* messages wait for computed, later computation for sent */
    bool broken;
} transport;

/* --- Failing ---------------------------------------------------------------------------------- */

static fattn_status fail_cuda(const char *what, cudaError_t error)
{
    char text[256];
    snprintf(text, sizeof text, "%s: %s", what, cudaGetErrorString(error));
    return fattn_transport_fail(FATTN_DEVICE_ERROR, text);
}

static fattn_status fail_nccl(const transport *t, const char *what, ncclResult_t error)
{
    char text[256];
    snprintf(text, sizeof text, "%s: %s", what, t->nccl.error(error));
    return fattn_transport_fail(FATTN_RANK_LOST, text);
}

static fattn_status fail_again(void)
{
    return fattn_transport_fail(FATTN_RANK_LOST, "this transport has failed before");
}

/* Aborts the communicator on this rank. */
static void give_up(void *user, const char *reason)
{
    transport *const t = user;
    (void)reason; /* NCCL cannot tell the other ranks */
    if (!t->broken) {
        t->broken = true;
        t->nccl.abort(t->comm);
    }
}

/* --- Messages --------------------------------------------------------------------------------- */

static fattn_status post(transport *t, const fattn_message *messages, int count)
{
    ncclResult_t error = t->nccl.group_start();
    const char *what = "ncclGroupStart";
    if (error != ncclSuccess) {
        return fail_nccl(t, what, error);
    }
    for (int tag = 0; tag < FATTN_MESSAGE_TAGS; tag++) {
        for (int n = 0; error == ncclSuccess && n < count; n++) {
            const fattn_message *const m = &messages[n];
            const size_t bytes = (size_t)m->bytes;
            if (m->tag != tag) {
                continue;
            }
            what = m->receive ? "ncclRecv" : "ncclSend";
            error = m->receive
                        ? t->nccl.receive(m->data, bytes, ncclInt8, m->peer, t->comm, t->stream)
                        : t->nccl.send(m->data, bytes, ncclInt8, m->peer, t->comm, t->stream);
        }
    }
    const ncclResult_t ended = t->nccl.group_end();
    if (error == ncclSuccess) {
        error = ended;
        what = "ncclGroupEnd";
    }
    return error == ncclSuccess ? FATTN_OK : fail_nccl(t, what, error);
}

static fattn_status start(void *user, const fattn_message *messages, int count)
{
    transport *const t = user;
    int before = 0;
    if (t->broken) {
        return fail_again();
    }
    cudaError_t error = cudaGetDevice(&before);
    error = error ? error : cudaSetDevice(t->device);
    error = error ? error : cudaEventRecord(t->computed, t->table.stream);
    error = error ? error : cudaStreamWaitEvent(t->stream, t->computed, 0);
    fattn_status status = error ? fail_cuda("waiting for what is computed", error) : FATTN_OK;
    status = status ? status : post(t, messages, count);
    error = status ? cudaSuccess : cudaEventRecord(t->sent, t->stream);
    cudaSetDevice(before);
    return error ? fail_cuda("cudaEventRecord", error) : status;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Waits until the messages are done, the communicator fails, or the time has passed. NCCL does not
 * say which of them is late. */
static fattn_status watch(transport *t, const fattn_message *messages, int count, double seconds)
{
    static const struct timespec nap = {.tv_nsec = 20000};
    const double begin = now();
    for (;;) {
        const cudaError_t error = cudaEventQuery(t->sent);
        ncclResult_t async = ncclSuccess;
        if (error == cudaSuccess) {
            return FATTN_OK;
        }
        if (error != cudaErrorNotReady) {
            return fail_cuda("cudaEventQuery", error);
        }
        const ncclResult_t asked = t->nccl.async_error(t->comm, &async);
        if (asked != ncclSuccess || async != ncclSuccess) {
            return fail_nccl(t, "a message", asked != ncclSuccess ? asked : async);
        }
        const double waited = now() - begin;
        if (waited > seconds) {
            char text[96];
            snprintf(text, sizeof text, "no answer in %g s to %d messages to and from rank %d%s",
                     seconds, count, messages[0].peer, count > 1 ? " and others" : "");
            return fattn_transport_fail(FATTN_RANK_TIMEOUT, text);
        }
        if (waited > 1e-3) { /* no naps for short messages */
            nanosleep(&nap, NULL);
        }
    }
}

static fattn_status wait(void *user, const fattn_message *messages, int count, double seconds)
{
    transport *const t = user;
    int before = 0;
    if (t->broken) { /* this rank has given up since start(), which freed the communicator */
        return fail_again();
    }
    cudaError_t error = cudaGetDevice(&before);
    error = error ? error : cudaSetDevice(t->device);
    fattn_status status = error ? fail_cuda("cudaSetDevice", error) : FATTN_OK;
    status = status ? status : watch(t, messages, count, seconds);
    error = status ? cudaSuccess : cudaStreamWaitEvent(t->table.stream, t->sent, 0);
    cudaSetDevice(before);
    return error ? fail_cuda("cudaStreamWaitEvent", error) : status;
}

/* --- Opening ---------------------------------------------------------------------------------- */

static fattn_status load(transport *t)
{
    nccl *const n = &t->nccl;
    const struct {
        const char *name;
        void *function; /* where to put it */
    } functions[] = {
        {"ncclGroupStart", &n->group_start},
        {"ncclGroupEnd", &n->group_end},
        {"ncclSend", &n->send},
        {"ncclRecv", &n->receive},
        {"ncclCommAbort", &n->abort},
        {"ncclCommGetAsyncError", &n->async_error},
        {"ncclCommCount", &n->count},
        {"ncclCommUserRank", &n->rank},
        {"ncclCommCuDevice", &n->device},
        {"ncclGetErrorString", &n->error},
    };
    t->library = dlopen(NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!t->library) {
        return fattn_transport_fail(FATTN_NO_DEVICE, dlerror());
    }
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *const found = dlsym(t->library, functions[i].name);
        if (!found) {
            return fattn_transport_fail(FATTN_NO_DEVICE, dlerror());
        }
        memcpy(functions[i].function, &found, sizeof found);
    }
    return FATTN_OK;
}

/* Creates the stream and events on the communicator's device. The stream has the highest priority,
 * so that messages start before kernels. */
static fattn_status make_stream(transport *t)
{
    int before = 0, least = 0, greatest = 0;
    cudaError_t error = cudaGetDevice(&before);
    error = error ? error : cudaSetDevice(t->device);
    error = error ? error : cudaDeviceGetStreamPriorityRange(&least, &greatest);
    error =
        error ? error : cudaStreamCreateWithPriority(&t->stream, cudaStreamNonBlocking, greatest);
    error = error ? error : cudaEventCreateWithFlags(&t->computed, cudaEventDisableTiming);
    error = error ? error : cudaEventCreateWithFlags(&t->sent, cudaEventDisableTiming);
    cudaSetDevice(before);
    return error ? fail_cuda("making a stream for messages", error) : FATTN_OK;
}

fattn_status fattn_nccl_open(ncclComm_t comm, fattn_stream stream, fattn_transport **opened)
{
    if (!opened) {
        return fattn_transport_fail(FATTN_NULL_POINTER, "transport is NULL");
    }
    *opened = NULL;
    transport *const t = calloc(1, sizeof *t);
    if (!t) {
        return fattn_transport_fail(FATTN_OUT_OF_MEMORY, "no memory for a transport");
    }
    int rank = 0, ranks = 0;
    t->comm = comm;
    fattn_status status = load(t);
    if (!status) {
        ncclResult_t error = t->nccl.rank(comm, &rank);
        error = error ? error : t->nccl.count(comm, &ranks);
        error = error ? error : t->nccl.device(comm, &t->device);
        status = error ? fail_nccl(t, "a communicator", error) : make_stream(t);
    }
    t->table = (fattn_transport){.struct_size = sizeof t->table,
                                 .rank = rank,
                                 .ranks = ranks,
                                 .user = t,
                                 .start = start,
                                 .wait = wait,
                                 .abort = give_up,
                                 .device_memory = 1,
                                 .stream = stream};
    if (status) {
        fattn_nccl_close(&t->table);
        return status;
    }
    *opened = &t->table;
    return FATTN_OK;
}

void fattn_nccl_close(fattn_transport *table)
{
    transport *const t = (transport *)table;
    if (!t) {
        return;
    }
    if (t->sent) {
        cudaEventDestroy(t->sent);
    }
    if (t->computed) {
        cudaEventDestroy(t->computed);
    }
    if (t->stream) {
        cudaStreamDestroy(t->stream);
    }
    if (t->library) {
        dlclose(t->library);
    }
    free(t);
}
