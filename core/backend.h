/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A backend is one const table of functions. All entries are set, except that `variable` and
 * `reach` may be NULL. On a machine without the hardware a backend's count() is 0.
 * backends/meson.build lists the backends, best first.
 */
#ifndef FATTN_CORE_BACKEND_H
#define FATTN_CORE_BACKEND_H

#include "core/env.h"
#include "core/kernel.h"
#include "core/merge.h"
#include "core/operands.h"
#include "core/peak.h"
#include "core/problem.h"
#include "core/rows.h"
#include "core/tiling.h"
#include "fattn/fattn.h"

typedef struct fattn_backend fattn_backend;

/* CUDA and HIP have stream handles that are not pointers. NULL and 1 mean the same stream in all
 * threads; 2 means a different stream in each thread. */
#define FATTN_STREAM_PER_THREAD 2

/* A value for capture_mode(): cudaStreamCaptureModeRelaxed, in which the thread may also call
 * functions that cannot be part of a graph. */
#define FATTN_CAPTURE_RELAXED 2

struct fattn_device {
    const fattn_backend *backend;
    void *impl; /* the backend's own state */
    int ordinal;
    int64_t references;             /* atomic */
    fattn_device_allocate allocate; /* the caller's, or NULL */
    fattn_device_release release;
    void *allocator_user;
};

struct fattn_event {
    fattn_device *device;
    void *impl;
};

struct fattn_plan {
    fattn_device *device;
    fattn_problem problem; /* normalised */
    uint64_t features;     /* as the caller gave them */
    int64_t batch;         /* likewise; problem.batch is 0 if there is nothing to compute */
    const fattn_kernel *kernel;
    fattn_tiling tiling;
    const fattn_kernel *few; /* computes sequences with at most few_rows rows per key/value head, */
    int64_t few_rows;        /* which `kernel` leaves out; NULL: `kernel` computes all */
    fattn_tiling few_tiling;
    fattn_pointers pointers; /* what a run checks of its pointers */
    fattn_unused unused;     /* what a run checks of fields that it does not use */
    bool logs_tensors;       /* runs log tensor statistics: FATTN_VERBOSE was 3 */
    void *impl;              /* the backend's own state */
    int64_t references;      /* atomic */
    char *declined;          /* lines "row: reason", one for each better row that declined */
};

struct fattn_backend {
    const char *name;
    bool by_name;     /* opened only by name; "auto" skips it */
    bool host_memory; /* kernels read host memory, so lengths and tables are validated before a
                         run */

    const fattn_env_variable *variable; /* the backend's own environment variable, or NULL */

    int (*count)(void);
    /* options are valid. Fails for options that the backend does not have:
     * fattn_device_options_refuse(). */
    fattn_status (*open)(int ordinal, const fattn_device_options *options, void **impl);
    void (*close)(void *impl);
    void (*describe)(void *impl,
                     fattn_device_info *info); /* all but struct_size, backend, ordinal */
    void (*limits)(void *impl, fattn_limits *limits);

    /* The i-th kernel row, NULL past the last. *missing becomes NULL, or the name of what this
     * device lacks to run it. */
    const fattn_kernel *(*kernel)(void *impl, int i, const char **missing);
    /* The i-th peak loop of the device (peak.h), NULL past the last. */
    const fattn_peak *(*peak)(void *impl, int i);

    /* Loads what plan->kernel needs, into plan->impl. */
    fattn_status (*plan)(fattn_plan *plan);
    /* buffers are normalised; workspace is aligned and large enough. */
    fattn_status (*run)(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                        fattn_stream stream);
    /* Runs a forward that is not ragged and writes o and lse, and merges its result with the state
     * job->first into job->result. job->second is buffers->o and buffers->lse, whose contents are
     * undefined afterwards. */
    fattn_status (*run_onto)(const fattn_plan *plan, const fattn_buffers *buffers,
                             const fattn_merge_job *job, void *workspace, fattn_stream stream);
    void (*release)(fattn_plan *plan);

    fattn_status (*merge)(void *impl, const fattn_merge_job *job, fattn_stream stream);
    fattn_status (*dropout_mask)(void *impl, const fattn_dropout_args *args, fattn_stream stream);
    /* Moves rows: `count` jobs, at most FATTN_ROWS_JOBS. */
    fattn_status (*rows)(void *impl, const fattn_rows_args *jobs, int count, fattn_stream stream);
    /* problem and buffers are normalised, outputs is 0, the strides of args are filled in. */
    fattn_status (*inspect)(void *impl, const fattn_problem *problem, const fattn_buffers *buffers,
                            const fattn_inspect_args *args);

    bool (*reads)(void *impl, const void *pointer); /* whether a kernel can read this address */
    /* The core calls fattn_device_take() and _give() instead, which know the caller's allocator. */
    fattn_status (*alloc)(void *impl, size_t bytes, void **memory);
    fattn_status (*free)(void *impl, void *memory);
    fattn_status (*copy)(void *impl, void *dst, const void *src, size_t bytes, fattn_stream stream);
    /* Copies rows of bytes. Both sides are memory of the device, or of another one in its reach. */
    fattn_status (*copy_rows)(void *impl, const fattn_row_copy *copy, fattn_stream stream);
    fattn_status (*stream_create)(void *impl, fattn_stream *stream);
    fattn_status (*stream_destroy)(void *impl, fattn_stream stream);
    fattn_status (*stream_synchronize)(void *impl, fattn_stream stream);
    /* Work queued on the stream from now on waits for the event. */
    fattn_status (*stream_wait)(void *impl, fattn_stream stream, void *event);
    /* The number of the graph capture that the stream is in, which is never used again, or 0. */
    fattn_status (*stream_capture)(void *impl, fattn_stream stream, uint64_t *capture);
    /* Sets what this thread may do while a stream is being captured. *mode becomes the mode before:
     * cudaThreadExchangeStreamCaptureMode(). */
    fattn_status (*capture_mode)(void *impl, int *mode);
    fattn_status (*event_create)(void *impl, void **event);
    void (*event_destroy)(void *impl, void *event);
    fattn_status (*event_record)(void *impl, void *event, fattn_stream stream);
    fattn_status (*event_synchronize)(void *impl, void *event);
    fattn_status (*event_elapsed)(void *impl, void *start, void *stop, double *milliseconds);
    /* Makes copies to memory of another device of the backend direct from now on, if the two
     * devices can do that, and sets *direct. NULL: copies are always direct. */
    fattn_status (*reach)(void *impl, void *other, bool *direct);
};

/* The i-th backend of this build in the order of backends/meson.build, NULL past the last. */
const fattn_backend *fattn_backend_at(int i);

/* The backend "reference", which every build has. Its functions accept NULL for impl. */
const fattn_backend *fattn_backend_oracle(void);

/* Parses a device spec such as "cuda:1"; NULL means FATTN_BACKEND. *backend becomes NULL for
 * "auto". */
fattn_status fattn_backend_find(const char *spec, const fattn_backend **backend, int *ordinal);

/* open() of a backend that has no options about threads: FATTN_UNSUPPORTED if one of these is not
 * at its default; the reason names it. */
fattn_status fattn_device_options_refuse(const fattn_device_options *options, const char *backend);

/* Allocate and free device memory, with the allocator of the device's options if it has one. The
 * memory is for work on the stream. */
fattn_status fattn_device_take(const fattn_device *device, size_t bytes, fattn_stream stream,
                               void **memory);
fattn_status fattn_device_give(const fattn_device *device, void *memory);

/* inspect() of backends whose memory the oracle cannot read: FATTN_UNSUPPORTED. */
fattn_status fattn_inspect_refuse(void *impl, const fattn_problem *problem,
                                  const fattn_buffers *buffers, const fattn_inspect_args *args);

/* Reference counting of devices, for plans. The last reference closes the device. */
fattn_device *fattn_device_retain(fattn_device *device);
void fattn_device_drop(fattn_device *device);

/* Resolves a device argument: if *device is NULL it becomes the default device, which is opened at
 * the first use. Either way the device is retained; fattn_device_drop() releases it. */
fattn_status fattn_device_acquire(fattn_device **device);

/* A run_onto() for any backend: run(), then merge(). */
fattn_status fattn_plan_run_then_merge(const fattn_plan *plan, const fattn_buffers *buffers,
                                       const fattn_merge_job *job, void *workspace,
                                       fattn_stream stream);

#endif
