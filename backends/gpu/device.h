/* SPDX-License-Identifier: Apache-2.0 */
/* An open device, for the files that implement a GPU backend's table: its context, and the modules
 * loaded into that. */
#ifndef FATTN_GPU_DEVICE_H
#define FATTN_GPU_DEVICE_H

#include <pthread.h>

#include "backends/gpu/gpu.h"

typedef struct fattn_gpu_device {
    const fattn_gpu_vendor *vendor;
    const fattn_gpu_api *api;
    int number; /* the driver's handle */
    gpu_context context;
    bool retained; /* context is the primary one, and has to be released */
    int version;   /* 10 * major + minor */
    int isa;       /* the instruction set, as the vendor numbers them */
    int units;     /* multiprocessors */
    int64_t shared_memory, shared_cache;
    uint64_t mark; /* of fattn_gpu_args */
    pthread_mutex_t mutex;
    gpu_function merge, dropout, rows; /* entries of image "verbs" */
    gpu_module modules[]; /* one for each of the vendor's images, or NULL; mutex guards them */
} fattn_gpu_device;

/* Turns a driver's result into a status, with the driver's own words as the reason. what: what was
 * being done, as in "copying". */
fattn_status fattn_gpu_check(const fattn_gpu_device *device, int result, const char *what);

/* fattn_gpu_enter() makes the device's context current, as nearly every call of the driver needs.
 * fattn_gpu_leave() restores the caller's. fattn_gpu_leave_with() does so after calls that may have
 * failed: it returns `status` if that is a failure, or else the status of leaving. */
fattn_status fattn_gpu_enter(const fattn_gpu_device *device);
fattn_status fattn_gpu_leave(const fattn_gpu_device *device);
fattn_status fattn_gpu_leave_with(const fattn_gpu_device *device, fattn_status status);

/* Refuses a stream of another context. The driver's default streams belong to whichever context is
 * current. */
fattn_status fattn_gpu_check_stream(const fattn_gpu_device *device, fattn_stream stream);

/* Finds a function of an image and makes the driver load it now instead of at its first launch. The
 * device's context must be current. */
fattn_status fattn_gpu_resolve(fattn_gpu_device *device, const char *image, const char *entry,
                               gpu_function *function);

/* The same. If the image has no function `entry`, finds `general` instead, unless that is "". */
fattn_status fattn_gpu_resolve_either(fattn_gpu_device *device, const char *image,
                                      const char *entry, const char *general, bool *is_general,
                                      gpu_function *function);

#endif
