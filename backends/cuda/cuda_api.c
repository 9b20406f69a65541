/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "cuda": NVIDIA's driver, opened at its first use. The library links nothing of CUDA, so
 * it also starts on machines without the driver, and finds no devices there.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "backends/cuda/cuda.h"

#define LIBRARY "libcuda.so.1"

/* The parameters of cuMemcpy2DAsync. */
typedef struct copy_side {
    size_t x, y;
    int memory_type;
    const void *host, *device;
    void *array;
    size_t step;
} copy_side;

typedef struct copy_config {
    copy_side from, to;
    size_t bytes, rows;
} copy_config;

enum { MEMORY_UNIFIED = 4 }; /* the addresses say where the memory is */

static int (*copy_with)(const copy_config *config, gpu_stream stream);

static int memory_copy_rows(void *dst, size_t dst_step, const void *src, size_t src_step,
                            size_t bytes, size_t rows, gpu_stream stream)
{
    const copy_config config = {
        .from = {.memory_type = MEMORY_UNIFIED, .device = src, .step = src_step},
        .to = {.memory_type = MEMORY_UNIFIED, .device = dst, .step = dst_step},
        .bytes = bytes,
        .rows = rows,
    };
    return copy_with(&config, stream);
}

static fattn_gpu_api api = {
    .out_of_memory = 2,
    .no_device = 100,
    .no_image = 209,
    .no_function = 500,
    .bad_image = 209,
    .units = 16,
    .major = 75,
    .minor = 76,
    .shared_memory = 97, /* that a block may opt in to */
    .shared_cache = 38,  /* L2 */
    .registers = 4,
    .dynamic_shared = 8,
    .compiled_for = 5, /* CU_FUNC_ATTRIBUTE_PTX_VERSION; BINARY_VERSION would be the chip's */
    .early_isa = 90,   /* griddepcontrol */
    .device_pointer = 3,
    .memory_copy_rows = memory_copy_rows,
    .blocks_max = INT32_MAX,
    .threads_max = INT64_MAX,
};

/* A name with a suffix, _v2, is the current signature: the driver keeps an older one under the
 * plain name. */
#define AT(field) offsetof(fattn_gpu_api, field)
static const struct {
    const char *name;
    size_t at;
} symbols[] = {
    {"cuInit", AT(init)},
    {"cuGetErrorName", AT(error_name)},
    {"cuGetErrorString", AT(error_string)},
    {"cuDeviceGetCount", AT(device_count)},
    {"cuDeviceGet", AT(device_get)},
    {"cuDeviceGetName", AT(device_name)},
    {"cuDeviceTotalMem_v2", AT(device_memory)},
    {"cuDeviceGetAttribute", AT(device_attribute)},
    {"cuDevicePrimaryCtxRetain", AT(primary_retain)},
    {"cuDevicePrimaryCtxRelease_v2", AT(primary_release)},
    {"cuCtxGetCurrent", AT(context_current)},
    {"cuCtxGetDevice", AT(context_device)},
    {"cuCtxPushCurrent_v2", AT(context_push)},
    {"cuCtxPopCurrent_v2", AT(context_pop)},
    {"cuCtxEnablePeerAccess", AT(context_reach)},
    {"cuModuleLoadData", AT(module_load)},
    {"cuModuleUnload", AT(module_unload)},
    {"cuModuleGetFunction", AT(module_function)},
    {"cuFuncGetAttribute", AT(function_get)},
    {"cuFuncSetAttribute", AT(function_set)},
    {"cuLaunchKernel", AT(launch)},
    {"cuMemAlloc_v2", AT(memory_alloc)},
    {"cuMemFree_v2", AT(memory_free)},
    {"cuMemcpyAsync", AT(memory_copy)},
    {"cuPointerGetAttribute", AT(pointer_attribute)},
    {"cuStreamCreate", AT(stream_create)},
    {"cuStreamDestroy_v2", AT(stream_destroy)},
    {"cuStreamSynchronize", AT(stream_synchronize)},
    {"cuStreamGetCtx", AT(stream_context)},
    {"cuStreamWaitEvent", AT(stream_wait)},
    {"cuStreamGetCaptureInfo", AT(stream_capture)},
    {"cuThreadExchangeStreamCaptureMode", AT(capture_mode)},
    {"cuEventCreate", AT(event_create)},
    {"cuEventDestroy_v2", AT(event_destroy)},
    {"cuEventRecord", AT(event_record)},
    {"cuEventSynchronize", AT(event_synchronize)},
    {"cuEventElapsedTime", AT(event_elapsed)},
};

/* cuLaunchKernelEx (CUDA 11.8 and newer) takes the arguments of cuLaunchKernel in a struct, and
 * launch attributes. */
typedef struct launch_attribute {
    int number;
    int32_t padding;
    union {
        int allowed;
        char bytes[64];
    } value;
} launch_attribute;

typedef struct launch_config {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    gpu_stream stream;
    launch_attribute *attributes;
    unsigned count;
} launch_config;

enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

static int (*launch_with)(const launch_config *config, gpu_function function, void **parameters,
                          void **extra);

static int launch_early(gpu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        gpu_stream stream, void **parameters, void **extra)
{
    launch_attribute attribute = {.number = PROGRAMMATIC_STREAM_SERIALIZATION};
    attribute.value.allowed = 1;
    const launch_config config = {grid_x,  grid_y,       grid_z, block_x,    block_y,
                                  block_z, shared_bytes, stream, &attribute, 1};
    return launch_with(&config, function, parameters, extra);
}

/* Values of the enumerations that cuTensorMapEncodeTiled (CUDA 12) takes. */
enum {
    MAP_UINT8 = 0,
    MAP_UINT16 = 1,
    MAP_INTERLEAVE_NONE = 0,
    MAP_SWIZZLE_128 = 3,
    MAP_L2_256 = 3,
    MAP_ZEROS = 0
};

static int (*encode_tiled)(void *encoded, int type, uint32_t axes, void *address,
                           const uint64_t *extent, const uint64_t *stride, const uint32_t *box,
                           const uint32_t *step, int interleave, int swizzle, int promotion,
                           int fill);

static int map_encode(void *encoded, const fattn_gpu_map *map, void *address)
{
    static const uint32_t step[FATTN_GPU_MAP_AXES] = {1, 1, 1, 1, 1};
    return encode_tiled(encoded, map->bytes == 1 ? MAP_UINT8 : MAP_UINT16, map->axes, address,
                        map->extent, map->stride, map->box, step, MAP_INTERLEAVE_NONE,
                        MAP_SWIZZLE_128, MAP_L2_256, MAP_ZEROS);
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char absent[192]; /* why there is no driver; empty if there is one */

/* Finds a function that the library cannot do without. */
static bool find(void *library, const char *name, void *function)
{
    void *const symbol = dlsym(library, name);
    if (!symbol) {
        snprintf(absent, sizeof absent, LIBRARY " is too old: it has no %s", name);
        return false;
    }
    memcpy(function, &symbol, sizeof symbol);
    return true;
}

/* The driver is never closed, because its threads may still run. */
static void load(void)
{
    void *const library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(absent, sizeof absent, "no driver: %s", dlerror());
        return;
    }
    for (size_t n = 0; n < sizeof symbols / sizeof symbols[0]; n++) {
        if (!find(library, symbols[n].name, (char *)&api + symbols[n].at)) {
            return;
        }
    }
    if (!find(library, "cuMemcpy2DAsync_v2", &copy_with)) {
        return;
    }
    void *const launch = dlsym(library, "cuLaunchKernelEx");
    if (launch) {
        memcpy(&launch_with, &launch, sizeof launch);
        api.launch_early = launch_early;
    }
    void *const blocks = dlsym(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    memcpy(&api.function_blocks, &blocks, sizeof blocks);
    void *const encode = dlsym(library, "cuTensorMapEncodeTiled");
    void *const move = dlsym(library, "cuTensorMapReplaceAddress");
    if (encode && move) {
        memcpy(&encode_tiled, &encode, sizeof encode);
        memcpy(&api.map_move, &move, sizeof move);
        api.map_encode = map_encode;
    }
    const int result = api.init(0);
    if (result) {
        const char *name = NULL;
        (void)api.error_name(result, &name);
        snprintf(absent, sizeof absent, "cuInit failed with %d, %s", result,
                 name ? name : "no name");
    }
}

static const fattn_gpu_api *find_api(const char **why)
{
    pthread_once(&once, load);
    *why = absent;
    return absent[0] ? NULL : &api;
}

static int find_isa(gpu_module module, int version, int *isa)
{
    (void)module;
    *isa = version;
    return 0;
}

#define FATTN_CUDA_IMAGE(name) extern const unsigned char fattn_cuda_image_##name[];
#include "backends/cuda/images.inc"
#undef FATTN_CUDA_IMAGE

static const fattn_gpu_kernel *const tables[] = {
#ifdef FATTN_CUDA_WGMMA
    fattn_cuda_wgmma, fattn_cuda_wgmma_halves, fattn_cuda_wgmma_backward,
#endif
    fattn_cuda_mma,   fattn_cuda_bf16x3,       fattn_cuda_wide,           fattn_gpu_simt, NULL};

static const fattn_gpu_image images[] = {
#define FATTN_CUDA_IMAGE(name) {#name, fattn_cuda_image_##name},
#include "backends/cuda/images.inc"
#undef FATTN_CUDA_IMAGE
};

static const fattn_gpu_vendor vendor = {
    .name = "cuda",
    .isa_format = "sm_%d",
    .targets = FATTN_CUDA_TARGETS,
    .api = find_api,
    .isa = find_isa,
    .tables = tables,
    .images = images,
    .image_count = sizeof images / sizeof *images,
};

static int count(void) { return fattn_gpu_count(&vendor); }

static fattn_status open(int ordinal, const fattn_device_options *options, void **impl)
{
    const fattn_status status = fattn_device_options_refuse(options, "cuda");
    return status ? status : fattn_gpu_open(&vendor, ordinal, impl);
}

const fattn_backend fattn_backend_cuda = {
    .name = "cuda",
    .count = count,
    .open = open,
    FATTN_GPU_VERBS,
};
