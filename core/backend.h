/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a backend is to the core: one const table, every entry filled in but `variable` and `reach`,
 * which not every backend has. A machine without the hardware has a backend whose count() is 0.
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

/* Handles of a driver's own streams: NULL and 1 are the same for all threads, 2 is another in each.
 */
#define FATTN_STREAM_PER_THREAD 2

/* For capture_mode: also what might not belong into a graph. */
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
    int64_t batch;         /* likewise; problem.batch is 0 where there is nothing to compute */
    const fattn_kernel *kernel;
    fattn_tiling tiling;
    const fattn_kernel *few; /* computes the sequences that `kernel` leaves, or NULL: */
    int64_t few_rows;        /* those with at most so many rows of a key/value head */
    fattn_tiling few_tiling;
    int64_t pieces, few_pieces; /* of each kernel's runs (tiling.h) */
    fattn_pointers pointers;    /* of a run */
    fattn_unused unused;        /* likewise */
    bool logs_tensors;          /* of each run */
    void *impl;                 /* the backend's own state */
    int64_t references;         /* atomic */
    char *declined;             /* a line for each better row: why it declined */
};

struct fattn_backend {
    const char *name;
    bool by_name;     /* "auto" passes it over */
    bool host_memory; /* kernels read host memory, so that lengths and tables are validated before
                         run */

    const fattn_env_variable *variable; /* of its own, or NULL */

    int (*count)(void);
    /* options are valid; fattn_device_options_refuse() says no to those of other backends. */
    fattn_status (*open)(int ordinal, const fattn_device_options *options, void **impl);
    void (*close)(void *impl);
    void (*describe)(void *impl,
                     fattn_device_info *info); /* all but struct_size, backend, ordinal */
    void (*limits)(void *impl, fattn_limits *limits);

    /* The i-th kernel row, NULL past the last. *missing is NULL, or what this device lacks to run
     * it. */
    const fattn_kernel *(*kernel)(void *impl, int i, const char **missing);
    /* The i-th peak loop of the device (peak.h), NULL past the last. */
    const fattn_peak *(*peak)(void *impl, int i);

    /* Loads what plan->kernel needs, into plan->impl. */
    fattn_status (*plan)(fattn_plan *plan);
    /* buffers are normalised. workspace is aligned and large enough. */
    fattn_status (*run)(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                        fattn_stream stream);
    /* The same of a forward that is not ragged, with o and lse, and merges them with those that the
     * rows have already: job->result becomes job->first and the run's. job->second is where
     * buffers->o and lse are, of which nothing is promised then. */
    fattn_status (*run_onto)(const fattn_plan *plan, const fattn_buffers *buffers,
                             const fattn_merge_job *job, void *workspace, fattn_stream stream);
    void (*release)(fattn_plan *plan);

    fattn_status (*merge)(void *impl, const fattn_merge_job *job, fattn_stream stream);
    fattn_status (*dropout_mask)(void *impl, const fattn_dropout_args *args, fattn_stream stream);
    fattn_status (*rows)(void *impl, const fattn_rows_args *args, fattn_stream stream);
    /* problem and buffers are normalised, outputs is 0, strides of args filled in */
    fattn_status (*inspect)(void *impl, const fattn_problem *problem, const fattn_buffers *buffers,
                            const fattn_inspect_args *args);

    bool (*reads)(void *impl, const void *pointer); /* can a kernel read this address? */
    fattn_status (*alloc)(void *impl, size_t bytes, void **memory); /* core: fattn_device_take() */
    fattn_status (*free)(void *impl, void *memory);
    fattn_status (*copy)(void *impl, void *dst, const void *src, size_t bytes, fattn_stream stream);
    fattn_status (*stream_create)(void *impl, fattn_stream *stream);
    fattn_status (*stream_destroy)(void *impl, fattn_stream stream);
    fattn_status (*stream_synchronize)(void *impl, fattn_stream stream);
    /* Work queued on the stream from now on waits for the event. */
    fattn_status (*stream_wait)(void *impl, fattn_stream stream, void *event);
    /* Which capture into a graph the stream is in: a number never used again, or 0 for none. */
    fattn_status (*stream_capture)(void *impl, fattn_stream stream, uint64_t *capture);
    /* Sets what this thread may do while a stream is being captured, and gives what it might. */
    fattn_status (*capture_mode)(void *impl, int *mode);
    fattn_status (*event_create)(void *impl, void **event);
    void (*event_destroy)(void *impl, void *event);
    fattn_status (*event_record)(void *impl, void *event, fattn_stream stream);
    fattn_status (*event_synchronize)(void *impl, void *event);
    fattn_status (*event_elapsed)(void *impl, void *start, void *stop, double *milliseconds);
    /* Copies to memory of another device of the backend go there directly from now on, if the two
     * can. NULL: they always do. */
    fattn_status (*reach)(void *impl, void *other);
};

/* The i-th backend of this build in the order of backends/meson.build, NULL past the last. */
const fattn_backend *fattn_backend_at(int i);

/* The one that every build has and "auto" passes over; its verbs take NULL for a device. */
const fattn_backend *fattn_backend_oracle(void);

/* Parses a device spec ("cuda:1"; NULL: the environment's choice) and says which device it means.
 * *backend is NULL for "auto". */
fattn_status fattn_backend_find(const char *spec, const fattn_backend **backend, int *ordinal);

/* For backends without options: FATTN_UNSUPPORTED, naming the first that is not at its default. */
fattn_status fattn_device_options_refuse(const fattn_device_options *options, const char *backend);

/* Memory of the device, by the caller's functions where there are any. For work on the stream. */
fattn_status fattn_device_take(const fattn_device *device, size_t bytes, fattn_stream stream,
                               void **memory);
fattn_status fattn_device_give(const fattn_device *device, void *memory);

/* inspect() of backends whose memory the oracle cannot read. */
fattn_status fattn_inspect_refuse(void *impl, const fattn_problem *problem,
                                  const fattn_buffers *buffers, const fattn_inspect_args *args);

/* Reference counting of devices, for plans. The last reference closes the device. */
fattn_device *fattn_device_retain(fattn_device *device);
void fattn_device_drop(fattn_device *device);

/* What a device argument means: *device, or the default device where it is NULL, which is opened at
 * the first use. Retained either way, for fattn_device_drop(). */
fattn_status fattn_device_acquire(fattn_device **device);

/* A run_onto() of two passes: run() and merge(). */
fattn_status fattn_plan_run_then_merge(const fattn_plan *plan, const fattn_buffers *buffers,
                                       const fattn_merge_job *job, void *workspace,
                                       fattn_stream stream);

#endif
