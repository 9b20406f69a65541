/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn_nccl over a stub of NCCL (stub/nccl), whose ranks are threads that share a device: drawn
 * problems against the undivided one, and a rank that gives up. NCCL has no tags, so this tests
 * that both sides of each pair of ranks post their messages in the same order. CUDA's runtime is a
 * stub too: nothing waits, for the stub's messages are done at once. With FATTN_RCCL all of it is
 * RCCL's, and the runtime HIP's, by the names that nccl_vendor.h gives their functions.
 *
 *     check_nccl [PROBLEMS]
 */
#include <dlfcn.h>

#include "core/distributed/transports/nccl_vendor.h"
#include "fattn/nccl.h"
#include "tests/device.h"
#include "tests/divided.h"
#include "tests/tap.h"

/* --- CUDA's runtime --------------------------------------------------------------------------- */

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    (void)device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    *stream = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)stream, (void)event, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    (void)flags;
    *event = NULL;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)event, (void)stream;
    return cudaSuccess;
}

/* Whether messages are under way, and so not done. */
static bool under_way;

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    (void)event;
    return under_way ? cudaErrorNotReady : cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    (void)error;
    return "an error of the stub";
}

/* --- Ranks ------------------------------------------------------------------------------------ */

static fattn_status open_rank(void *comms, int rank, fattn_transport **transport)
{
    return fattn_nccl_open(((ncclComm_t *)comms)[rank], NULL, transport);
}

/* A rank gives up between start() and wait(), as the library does if it cannot compute: it must not
 * use its communicator again, at which the stub ends the program. */
static void check_given_up(ncclComm_t comm)
{
    fattn_transport *t = NULL;
    bool right = fattn_nccl_open(comm, NULL, &t) == FATTN_OK;
    right = right && t->start(t->user, NULL, 0) == FATTN_OK;
    under_way = true;
    if (right) {
        t->abort(t->user, "it cannot compute");
        right = t->wait(t->user, NULL, 0, 30) == FATTN_RANK_LOST;
    }
    under_way = false;
    tap_check(right, "a rank that gives up does not use its communicator again");
    fattn_nccl_close(t);
}

int main(int argc, char **argv)
{
    static const int numbers[] = {2, 3, 4, 8};
    const int problems = argc > 1 ? atoi(argv[1]) : 10;
    if (!device_named() || device_absent(device_named())) {
        return device_named() ? 0 : (tap_skip_all("FATTN_BACKEND names no device"), 0);
    }
    void *const library = dlopen(NCCL_LIBRARY, RTLD_NOW);
    ncclResult_t (*make)(ncclComm_t *, int, const int *);
    ncclResult_t (*destroy)(ncclComm_t);
    void *const made = library ? dlsym(library, "ncclCommInitAll") : NULL;
    void *const destroyed = library ? dlsym(library, "ncclCommDestroy") : NULL;
    if (!made || !destroyed) {
        printf("Bail out! %s\n", dlerror());
        return 1;
    }
    memcpy(&make, &made, sizeof made);
    memcpy(&destroy, &destroyed, sizeof destroyed);
    ncclComm_t aborted;
    make(&aborted, 1, NULL);
    check_given_up(aborted);
    destroy(aborted);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const int ranks = numbers[i];
        ncclComm_t comms[DIVIDED_RANKS_MAX];
        const divided_transport over = {open_rank, fattn_nccl_close, comms};
        int right = 0, tried = 0;
        make(comms, ranks, NULL);
        while (tried < problems && right == tried) { /* a rank that failed leaves others waiting */
            right += divided_case_is_right(&over, 5, tried++ * 8 + ranks, ranks);
        }
        tap_check(right == problems, "%d ranks: %d of %d drawn problems are right", ranks, right,
                  problems);
        for (int r = 0; r < ranks; r++) {
            destroy(comms[r]);
        }
    }
    fattn_cache_clear();
    dlclose(library);
    return tap_done();
}
