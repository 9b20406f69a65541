/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn_nccl over a stub of NCCL (stub/nccl), whose ranks are threads that share a device: drawn
 * problems against the undivided one. NCCL has no tags, so this tests that both sides of each pair
 * of ranks post their messages in the same order. CUDA's runtime is a stub too: nothing waits, for
 * the stub's messages are done at once. With FATTN_RCCL all of it is RCCL's, and the runtime HIP's,
 * by the names that nccl_vendor.h gives their functions.
 *
 *     check_nccl [PROBLEMS]
 */
#include <dlfcn.h>
#include <pthread.h>

#include "core/distributed/transports/nccl_vendor.h"
#include "fattn/nccl.h"
#include "tests/device.h"
#include "tests/divided.h"
#include "tests/tap.h"

enum { RANKS_MAX = 8 };

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

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    (void)error;
    return "an error of the stub";
}

/* --- Ranks ------------------------------------------------------------------------------------ */

typedef struct rank {
    pthread_t thread;
    const divided *problem;
    ncclComm_t comm;
    fattn_status status;
    char reason[512];
    divided_share share;
} rank;

static void *run_rank(void *context)
{
    rank *const r = context;
    fattn_transport *transport = NULL;
    r->status = fattn_nccl_open(r->comm, NULL, &transport);
    r->status = r->status ? r->status : divided_run(r->problem, transport, 60, &r->share);
    fattn_last_reason_copy(r->reason, sizeof r->reason);
    fattn_nccl_close(transport);
    return NULL;
}

static bool problem_is_right(ncclComm_t *comms, int64_t index, int ranks)
{
    static rank all[RANKS_MAX];
    divided d;
    char text[256] = "";
    divided_draw(&d, 5, index, ranks);
    bool good = divided_solve(&d, 5, index) == FATTN_OK;
    for (int r = 0; good && r < ranks; r++) {
        all[r] = (rank){.problem = &d, .comm = comms[r]};
        if (pthread_create(&all[r].thread, NULL, run_rank, &all[r])) {
            exit(1);
        }
    }
    for (int r = 0; good && r < ranks; r++) {
        pthread_join(all[r].thread, NULL);
    }
    for (int r = 0; good && r < ranks; r++) {
        snprintf(text, sizeof text, "%.250s", all[r].reason);
        good = !all[r].status && divided_is_right(&d, ranks, r, &all[r].share, text, sizeof text);
    }
    if (!good) {
        char what[256];
        divided_describe(&d, what, sizeof what);
        printf("# case %lld on %d ranks: %s\n#   %s\n", (long long)index, ranks, text, what);
    }
    for (int r = 0; good && r < ranks; r++) {
        divided_share_free(&all[r].share);
    }
    divided_free(&d);
    return good;
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
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const int ranks = numbers[i];
        ncclComm_t comms[RANKS_MAX];
        int right = 0, tried = 0;
        make(comms, ranks, NULL);
        while (tried < problems && right == tried) { /* a rank that failed leaves others waiting */
            right += problem_is_right(comms, tried++ * 8 + ranks, ranks);
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
