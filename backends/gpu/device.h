/* SPDX-License-Identifier: Apache-2.0 */
/* An open device, for the files that implement a GPU backend's table: its context, and what is
 * loaded into it. */
#ifndef FATTN_GPU_DEVICE_H
#define FATTN_GPU_DEVICE_H

#include <pthread.h>

#include "backends/gpu/gpu.h"

typedef struct fattn_gpu_device {
    const fattn_gpu_vendor *vendor;
    const fattn_gpu_api *api;
    int number; /* the driver's handle */
    gpu_context context;
    bool retained; /* the primary context, to be released */
    int version;   /* 10 * major + minor */
    int isa;       /* of the vendor's numbers */
    int units;
    int64_t shared_memory, shared_cache;
    uint64_t mark; /* of fattn_gpu_args */
    pthread_mutex_t mutex;
    gpu_function merge, dropout, rows;
    gpu_module modules[]; /* of the vendor's images, under mutex; NULL: not loaded */
} fattn_gpu_device;

/* The status of a driver's result, with the driver's own words as the reason; what: "copying". */
fattn_status fattn_gpu_check(const fattn_gpu_device *device, int result, const char *what);

/* Makes the device's context current, which nearly every call of the driver needs; leaving restores
 * the caller's. leave_with is for what may have failed: the first failure counts. */
fattn_status fattn_gpu_enter(const fattn_gpu_device *device);
fattn_status fattn_gpu_leave(const fattn_gpu_device *device);
fattn_status fattn_gpu_leave_with(const fattn_gpu_device *device, fattn_status status);

/* Refuses a stream of another context. The driver's own streams belong to whichever is current. */
fattn_status fattn_gpu_check_stream(const fattn_gpu_device *device, fattn_stream stream);

/* Finds a function of an image and has the driver load it now, not at the first launch. In the
 * context. */
fattn_status fattn_gpu_resolve(fattn_gpu_device *device, const char *image, const char *entry,
                               gpu_function *function);

/* The same; where the image has no function of that name, `general`, unless that is "". */
fattn_status fattn_gpu_resolve_either(fattn_gpu_device *device, const char *image,
                                      const char *entry, const char *general, bool *is_general,
                                      gpu_function *function);

#endif
