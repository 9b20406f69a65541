/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A vendor's driver as a table of functions, filled at run time from a shared library that may be
 * absent. The driver interfaces of CUDA and HIP have the same shape; numbers that differ between
 * them are in the table too.
 *
 * Handles are opaque. Device pointers are `void *`, which on 64-bit machines has the representation
 * of either vendor's own type. A result of 0 is success.
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

/* A tensor map: how the copy engine (TMA) sees a tensor. bytes: of an element, 1 or 2. extent and
 * box: of the tensor and of one copy, innermost axis first. stride: in bytes, of all axes but the
 * innermost. A copy writes zeros for elements outside the tensor, and swizzles 128-byte rows. */
enum { FATTN_GPU_MAP_AXES = 5, FATTN_GPU_MAP_BYTES = 128 };

typedef struct fattn_gpu_map {
    size_t buffer; /* offset of its pointer in fattn_buffers */
    bool optional; /* if the tensor is not aligned to 16 bytes, kernels do not use the map */
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
    /* Peer access: lets copies and kernels of the current context access memory of another. */
    int (*context_reach)(gpu_context other, unsigned flags);

    int (*module_load)(gpu_module *module, const void *image);
    int (*module_unload)(gpu_module module);
    int (*module_function)(gpu_function *function, gpu_module module, const char *name);
    int (*function_get)(int *value, int attribute, gpu_function function);
    int (*function_set)(gpu_function function, int attribute, int value);
    /* Occupancy: how many blocks of that many threads and bytes of shared memory a multiprocessor
     * holds. NULL if the driver cannot tell. */
    int (*function_blocks)(int *blocks, gpu_function function, int threads, size_t shared_bytes);
    int (*launch)(gpu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                  gpu_stream stream, void **parameters, void **extra);
    /* Programmatic dependent launch: the kernel may start while the one before it in the stream
     * still runs, and waits for that itself. NULL if the driver has no such launch. */
    int (*launch_early)(gpu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        gpu_stream stream, void **parameters, void **extra);

    /* map_encode() writes a tensor map, FATTN_GPU_MAP_BYTES aligned to 64. map_move() changes the
     * address of its tensor. NULL if the driver has no tensor maps. */
    int (*map_encode)(void *encoded, const fattn_gpu_map *map, void *address);
    int (*map_move)(void *encoded, void *address);

    int (*memory_alloc)(void **memory, size_t bytes);
    int (*memory_free)(void *memory);
    int (*memory_copy)(void *dst, const void *src, size_t bytes, gpu_stream stream);
    /* Copies `rows` rows of `bytes` bytes, which begin dst_step and src_step bytes apart. */
    int (*memory_copy_rows)(void *dst, size_t dst_step, const void *src, size_t src_step,
                            size_t bytes, size_t rows, gpu_stream stream);
    int (*pointer_attribute)(void *value, int attribute, const void *pointer);

    int (*stream_create)(gpu_stream *stream, unsigned flags);
    int (*stream_destroy)(gpu_stream stream);
    int (*stream_synchronize)(gpu_stream stream);
    int (*stream_context)(gpu_stream stream, gpu_context *context);

    int (*stream_wait)(gpu_stream stream, gpu_event event, unsigned flags);
    /* status 0: the stream is not being captured; id: of the capture, never used again */
    int (*stream_capture)(gpu_stream stream, int *status, unsigned long long *id);
    int (*capture_mode)(int *mode); /* exchanges this thread's mode with *mode */

    int (*event_create)(gpu_event *event, unsigned flags);
    int (*event_destroy)(gpu_event event);
    int (*event_record)(gpu_event event, gpu_stream stream);
    int (*event_synchronize)(gpu_event event);
    int (*event_elapsed)(float *milliseconds, gpu_event start, gpu_event stop);

    /* Numbers of results. */
    int out_of_memory, no_device, no_image, no_function;
    int bad_image; /* another result for an image without code for the device, or no_image again */
    /* Numbers of attributes: of a device, of a function, of a pointer. */
    int units, major, minor, shared_memory, shared_cache;
    int registers, dynamic_shared;
    int compiled_for; /* the architecture of the PTX that a function was made from, 10 * major +
                       * minor; a driver may have made the machine code from older PTX */
    int early_isa;    /* the least such architecture that has programmatic dependent launch */
    int device_pointer;

    int64_t blocks_max, threads_max; /* of a launch */
} fattn_gpu_api;

#endif
