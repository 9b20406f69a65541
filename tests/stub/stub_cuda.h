/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 of our own for machines without a GPU: every driver function that backend "cuda"
 * resolves, and those that tests call besides (driver.h), on host memory. It keeps what a driver
 * keeps (contexts, modules, memory, streams, events), refuses what a driver refuses, and makes any
 * call fail on request. Launches are checked and recorded; nothing runs, except where the library
 * is built with STUB_RUNS: then each launch is handed to stub_cuda_run.
 *
 * A test reaches all this through the one function that a real driver does not have.
 */
#ifndef FATTN_TESTS_STUB_CUDA_H
#define FATTN_TESTS_STUB_CUDA_H

#include <stdbool.h>
#include <stdint.h>

/* Results, by the driver's numbers. */
enum {
    STUB_INVALID_VALUE = 1,
    STUB_OUT_OF_MEMORY = 2,
    STUB_NOT_INITIALIZED = 3,
    STUB_NO_DEVICE = 100,
    STUB_INVALID_DEVICE = 101,
    STUB_INVALID_IMAGE = 200,
    STUB_INVALID_CONTEXT = 201,
    STUB_NO_IMAGE = 209,
    STUB_OLD_DRIVER = 222, /* for the PTX that it is given */
    STUB_INVALID_HANDLE = 400,
    STUB_NOT_FOUND = 500,
    STUB_LAUNCH_FAILED = 719,
    STUB_CAPTURE_UNSUPPORTED = 900,
    STUB_CAPTURE_INVALIDATED = 901,
    STUB_CAPTURE_ISOLATION = 905,
    STUB_CAPTURE_IMPLICIT = 906
};

/* What can be alive. */
typedef enum stub_kind {
    STUB_CONTEXT, /* made, or a primary one that is retained */
    STUB_MODULE,
    STUB_FUNCTION,
    STUB_MEMORY,
    STUB_STREAM,
    STUB_EVENT,
    STUB_KINDS
} stub_kind;

enum { STUB_LOG = 1024 };

typedef struct stub_cuda {
    /* For the test to set. */
    int devices;      /* default 2 */
    int capability;   /* of every device, 10 * major + minor */
    int old;          /* so many of the first devices are of capability 5.2; also STUB_CUDA_OLD */
    bool only_ptx;    /* it takes no machine code, as with CUDA_FORCE_PTX_JIT=1 */
    int units;        /* multiprocessors; default 4 */
    int held;         /* blocks of a function that a multiprocessor holds; default 1 */
    int compiled_for; /* what images say they were compiled for; 0: the truth */
    int64_t fail_at;  /* this call from now on fails, counting from 1; 0: none */
    bool fail_on;     /* and so do all after it */
    int fail_with;    /* with this result */
    const void
        *elsewhere; /* memory of the host that the device sees, at another address; or NULL */
    /* Is given the parameters of every launch, and must make no call of the driver; or NULL. */
    void (*watch)(void **parameters);

    /* For the test to read. `calls` and the log begin again when the test sets calls to 0. */
    int64_t calls;
    const char *log[STUB_LOG]; /* names of the calls; those that say errors' names do not count */
    bool fired;                /* the call that was to fail has failed */
    char launched[512]; /* names of what was launched, one after the other, until it is full */
    int64_t alive[STUB_KINDS];
    int64_t launches;
    int64_t early;      /* of them, those that might begin before what is ahead of them has ended */
    int64_t unready;    /* of these, those whose code cannot wait for it */
    int64_t disordered; /* copies of memory that might begin before its last copy has ended */
    int64_t reaches;    /* contexts that may reach another's memory */
    int64_t freed_in_use;    /* memory that was freed before the host waited for its last use */
    int newest;              /* what the module that was loaded last was compiled for */
    int launch_device;       /* that the last launch ran on */
    char launch_name[64];    /* its function */
    unsigned launch_threads; /* of each of its blocks */
    unsigned blocks[8];      /* of the last launches: those of number n, from 0 on, at n % 8 */
} stub_cuda;

/* The name under which dlsym finds it. */
stub_cuda *stub_cuda_state(void);

/* Whether an address is in live memory of the device; for a watch. */
bool stub_cuda_owns(const void *address);

/* Marks memory as used by the launch that is being watched. Returns whether that follows its last
 * use, by the order of streams, events and the host's waits. */
bool stub_cuda_follows(const void *address);

/* An encoded tensor map. */
typedef struct stub_map {
    const void *address;
    uint64_t extent[5], stride[4]; /* stride[n] is that of axis n + 1, in bytes */
    uint32_t box[5], axes, bytes;  /* bytes: of an element */
} stub_map;

/* Runs a kernel; returns a result. */
int stub_cuda_run(const char *entry, unsigned blocks, unsigned threads, unsigned shared_bytes,
                  void **parameters);

#endif
