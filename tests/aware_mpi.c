/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes any MPI one that knows memory of the default device, for check_mpi: sends are copied to the
 * host before, and receives to the device after, as an MPI without direct access does. Linked into
 * a program, these functions take the place of MPI's own, which they call by its profiling names.
 */
#include <mpi.h>
#include <stdlib.h>

#include "fattn/fattn.h"

enum { MANY = 256 };

/* Requests under way: of a transport, at most one group. */
typedef struct request {
    MPI_Request id;
    void *host, *device; /* device: where to, or NULL of a send */
    size_t bytes;
} request;

static request requests[MANY];

static request *note(int bytes, void *device)
{
    int n = 0;
    while (n < MANY && requests[n].host) {
        n++;
    }
    void *const host = n < MANY ? malloc((size_t)bytes) : NULL;
    if (!host) {
        abort();
    }
    requests[n] = (request){MPI_REQUEST_NULL, host, device, (size_t)bytes};
    return &requests[n];
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (fattn_device_copy(NULL, to, from, bytes, NULL) || fattn_stream_synchronize(NULL, NULL)) {
        abort();
    }
}

int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *made)
{
    request *const r = note(count, NULL);
    copy(r->host, data, r->bytes);
    const int error = PMPI_Isend(r->host, count, type, to, tag, comm, made);
    r->id = *made;
    return error;
}

int MPI_Irecv(void *data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *made)
{
    request *const r = note(count, data);
    const int error = PMPI_Irecv(r->host, count, type, from, tag, comm, made);
    r->id = *made;
    return error;
}

int MPI_Testsome(int count, MPI_Request all[], int *ended, int which[], MPI_Status statuses[])
{
    MPI_Request before[MANY];
    for (int n = 0; n < count && n < MANY; n++) {
        before[n] = all[n];
    }
    const int error = PMPI_Testsome(count, all, ended, which, statuses);
    for (int e = 0; !error && *ended != MPI_UNDEFINED && e < *ended; e++) {
        for (int n = 0; n < MANY; n++) {
            request *const r = &requests[n];
            if (r->host && r->id == before[which[e]]) {
                if (r->device) {
                    copy(r->device, r->host, r->bytes);
                }
                free(r->host);
                r->host = NULL;
                break;
            }
        }
    }
    return error;
}
