/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libnccl.so.2 whose ranks are threads; with FATTN_RCCL a librccl.so.1. Like NCCL it pairs sends
 * and receives of two ranks in their order, without tags, and it insists on equal sizes. A group is
 * done when ncclGroupEnd() returns. Memory is that of the default device.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/distributed/transports/nccl_vendor.h"
#include "fattn/nccl.h"

enum { RANKS = 8, OPERATIONS = 64 };

typedef struct operation {
    const void *from;
    void *to;
    size_t bytes;
    int peer;
    ncclComm_t comm;
    bool done;
} operation;

struct ncclComm {
    int rank, ranks;
    bool aborted; /* tests destroy it all the same, so that later uses are noticed */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static operation *sends[RANKS][RANKS][OPERATIONS]; /* [from][to], oldest first */
static int counts[RANKS][RANKS];
static _Thread_local operation group[OPERATIONS];
static _Thread_local int grouped;

/* Ends the program if the communicator was aborted: NCCL has freed it. */
static void check_use(const struct ncclComm *comm)
{
    if (comm->aborted) {
        fputs("stub_nccl: a communicator is used after ncclCommAbort()\n", stderr);
        abort();
    }
}

#pragma GCC visibility push(default)

/* NCCL's header declares them without prototypes. */
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices)
{
    (void)devices;
    for (int r = 0; r < count; r++) {
        comms[r] = malloc(sizeof *comms[r]);
        if (!comms[r]) {
            return ncclSystemError;
        }
        *comms[r] = (struct ncclComm){r, count, false};
    }
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    check_use(comm);
    comm->aborted = true;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    check_use(comm);
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    check_use(comm);
    *count = comm->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    check_use(comm);
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    check_use(comm);
    *device = 0;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t error)
{
    return error == ncclInvalidUsage ? "sizes differ" : "an error of the stub";
}

ncclResult_t ncclGroupStart(void)
{
    grouped = 0;
    return ncclSuccess;
}

static ncclResult_t add(operation o)
{
    check_use(o.comm);
    if (grouped == OPERATIONS) {
        return ncclInvalidArgument;
    }
    group[grouped++] = o;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    (void)stream;
    return type != ncclInt8 ? ncclInvalidArgument
                            : add((operation){data, NULL, count, peer, comm, false});
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    (void)stream;
    return type != ncclInt8 ? ncclInvalidArgument
                            : add((operation){NULL, data, count, peer, comm, false});
}

/* The oldest send to this rank fills a receive. */
static ncclResult_t receive(operation *o)
{
    operation **const queue = sends[o->peer][o->comm->rank];
    int *const count = &counts[o->peer][o->comm->rank];
    operation *const sent = queue[0];
    if (sent->bytes != o->bytes) {
        return ncclInvalidUsage;
    }
    if (fattn_device_copy(NULL, o->to, sent->from, o->bytes, NULL) ||
        fattn_stream_synchronize(NULL, NULL)) {
        return ncclUnhandledCudaError;
    }
    for (int n = 1; n < *count; n++) {
        queue[n - 1] = queue[n];
    }
    (*count)--;
    sent->done = o->done = true;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t result = ncclSuccess;
    int left = grouped;
    pthread_mutex_lock(&mutex);
    for (int n = 0; n < grouped; n++) {
        operation *const o = &group[n];
        if (o->from) {
            sends[o->comm->rank][o->peer][counts[o->comm->rank][o->peer]++] = o;
        }
    }
    pthread_cond_broadcast(&changed);
    while (left > 0 && result == ncclSuccess) {
        left = 0;
        bool moved = false;
        for (int n = 0; n < grouped && result == ncclSuccess; n++) {
            operation *const o = &group[n];
            bool blocked = false; /* by an earlier receive from the same rank */
            for (int m = 0; m < n; m++) {
                blocked = blocked || (group[m].to && !group[m].done && group[m].peer == o->peer);
            }
            if (o->to && !o->done && !blocked && counts[o->peer][o->comm->rank] > 0) {
                result = receive(o);
                moved = true;
            }
            left += !o->done;
        }
        if (moved) {
            pthread_cond_broadcast(&changed);
        } else if (left > 0) {
            pthread_cond_wait(&changed, &mutex);
        }
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

#pragma GCC visibility pop
