/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A vendor's driver as a table of functions, filled at run time from a shared library that may be
 * absent. CUDA's driver interface and HIP's have the same shape; where their numbers differ, the
 * number is in the table too.
 *
 * Handles are opaque. Device pointers are `void *`, which has the representation of either vendor's
 * own type on the 64-bit machines that GPUs are found in. A result of 0 is success.
 */
#ifndef FATTN_GPU_API_H
#define FATTN_GPU_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct gpu_context_handle *gpu_context;
typedef struct gpu_module_handle *gpu_module;
typedef struct gpu_function_handle *gpu_function;
typedef struct gpu_stream_handle *gpu_stream;
typedef struct gpu_event_handle *gpu_event;

/* A tensor as a copy engine is told of it: bytes of an element, 1 or 2; extents and what one copy
 * brings of them, innermost first, and the bytes from one to the next along the others. Where a
 * copy leaves the tensor it brings zeros. Rows of 128 bytes are swizzled. */
enum { FATTN_GPU_MAP_AXES = 5, FATTN_GPU_MAP_BYTES = 128 };

typedef struct fattn_gpu_map {
    size_t buffer; /* offset of its pointer in fattn_buffers */
    bool optional; /* kernels do without it where the tensor is not at a multiple of 16 bytes */
    unsigned bytes, axes;
    uint64_t extent[FATTN_GPU_MAP_AXES], stride[FATTN_GPU_MAP_AXES - 1];
    uint32_t box[FATTN_GPU_MAP_AXES];
} fattn_gpu_map;

typedef struct fattn_gpu_api {
    int (*init)(unsigned flags);
    int (*error_name)(int result, const char **name);
    int (*error_string)(int result, const char **text);

    int (*device_count)(int *count);
    int (*device_get)(int *device, int ordinal);
    int (*device_name)(char *name, int size, int device);
    int (*device_memory)(size_t *bytes, int device);
    int (*device_attribute)(int *value, int attribute, int device);

    int (*primary_retain)(gpu_context *context, int device);
    int (*primary_release)(int device);
    int (*context_current)(gpu_context *context);
    int (*context_device)(int *device); /* of the current context */
    int (*context_push)(gpu_context context);
    int (*context_pop)(gpu_context *context);
    /* Lets the current context's copies and kernels reach memory of another's. */
    int (*context_reach)(gpu_context other, unsigned flags);

    int (*module_load)(gpu_module *module, const void *image);
    int (*module_unload)(gpu_module module);
    int (*module_function)(gpu_function *function, gpu_module module, const char *name);
    int (*function_get)(int *value, int attribute, gpu_function function);
    int (*function_set)(gpu_function function, int attribute, int value);
    /* How many blocks of so many threads and bytes of shared memory a unit holds at a time. NULL
     * where the driver does not say. */
    int (*function_blocks)(int *blocks, gpu_function function, int threads, size_t shared_bytes);
    int (*launch)(gpu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                  gpu_stream stream, void **parameters, void **extra);
    /* The same for a kernel that may start while the one before it in the stream runs, and waits
     * for it by itself. NULL where the driver knows no such launch. */
    int (*launch_early)(gpu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        gpu_stream stream, void **parameters, void **extra);

    /* Writes a tensor map, FATTN_GPU_MAP_BYTES at a multiple of 64; and moves one to another
     * address. NULL where the driver knows none. */
    int (*map_encode)(void *encoded, const fattn_gpu_map *map, void *address);
    int (*map_move)(void *encoded, void *address);

    int (*memory_alloc)(void **memory, size_t bytes);
    int (*memory_free)(void *memory);
    int (*memory_copy)(void *dst, const void *src, size_t bytes, gpu_stream stream);
    int (*pointer_attribute)(void *value, int attribute, const void *pointer);

    int (*stream_create)(gpu_stream *stream, unsigned flags);
    int (*stream_destroy)(gpu_stream stream);
    int (*stream_synchronize)(gpu_stream stream);
    int (*stream_context)(gpu_stream stream, gpu_context *context);

    int (*stream_wait)(gpu_stream stream, gpu_event event, unsigned flags);
    /* status 0: the stream is not being captured; id is that of the capture, for ever */
    int (*stream_capture)(gpu_stream stream, int *status, unsigned long long *id);
    int (*capture_mode)(int *mode); /* of this thread, exchanged */

    int (*event_create)(gpu_event *event, unsigned flags);
    int (*event_destroy)(gpu_event event);
    int (*event_record)(gpu_event event, gpu_stream stream);
    int (*event_synchronize)(gpu_event event);
    int (*event_elapsed)(float *milliseconds, gpu_event start, gpu_event stop);

    /* Numbers of results. */
    int out_of_memory, no_device, no_image, no_function;
    int bad_image; /* what a loader says of an image without code for the device, where that is not
                    * no_image; else no_image too */
    /* Numbers of attributes: of a device, of a function, of a pointer. */
    int units, major, minor, shared_memory, shared_cache;
    int registers, dynamic_shared;
    int compiled_for; /* the PTX that a function was made from, 10 * major + minor. Machine code
                       * that a driver makes of older PTX has only what that PTX says */
    int early_isa;    /* the least of those whose functions wait by themselves */
    int device_pointer;

    int64_t blocks_max, threads_max; /* of a launch */
} fattn_gpu_api;

#endif
