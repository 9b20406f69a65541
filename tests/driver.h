/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Direct calls to NVIDIA's driver for tests: contexts that a caller makes current, captured
 * streams, graphs. They go to the same library that backend "cuda" opens, either a driver or the
 * stub (stub/).
 */
#ifndef FATTN_TESTS_DRIVER_H
#define FATTN_TESTS_DRIVER_H

#include "backends/gpu/gpu_api.h"
#include "tests/stub/stub_cuda.h"

typedef struct driver_graph_handle *driver_graph;
typedef struct driver_exec_handle *driver_exec;

/* A result of 0 is success. */
typedef struct driver {
    int (*context_create)(gpu_context *context, unsigned flags, int device); /* makes it current */
    int (*context_destroy)(gpu_context context);
    int (*context_set)(gpu_context context);
    int (*context_get)(gpu_context *context);
    int (*primary_retain)(gpu_context *context, int device);
    int (*primary_release)(int device);
    int (*stream_create)(gpu_stream *stream,
                         unsigned flags); /* 1: does not wait for the default stream */
    int (*stream_destroy)(gpu_stream stream);
    int (*capture_begin)(gpu_stream stream,
                         int mode); /* 0: unsafe calls are errors in all threads */
    int (*capture_end)(gpu_stream stream, driver_graph *graph);

    /* NULL with the stub. */
    int (*graph_make)(driver_exec *exec, driver_graph graph, unsigned long long flags);
    int (*graph_launch)(driver_exec exec, gpu_stream stream);
    int (*graph_exec_destroy)(driver_exec exec);
    int (*graph_destroy)(driver_graph graph);

    stub_cuda *stub; /* NULL with a driver */
    bool (*stub_owns)(const void *address);
    bool (*stub_follows)(const void *address);
} driver;

/* NULL where there is no libcuda.so.1. */
const driver *driver_open(void);

#endif
