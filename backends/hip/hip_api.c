/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backend "hip": AMD's runtime, opened at its first use. The library links nothing of ROCm, so it
 * also starts on machines without it, and finds no devices there.
 *
 * Each thread has a current device in HIP, and a current context in CUDA's driver interface. Here a
 * context is a device's number plus 1, so that device 0 is not NULL. To enter a context is to make
 * its device current.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backends/hip/hip.h"

/* Newest first. The functions used here have the same signatures, and the same numbers, in all of
 * them. */
static const char *const libraries[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};

#define COPY_DEFAULT 4 /* hipMemcpyDefault: the direction follows from the pointers */
#define NOT_SUPPORTED 801

/* The table of gpu_api.h, and HIP functions whose signatures differ from those in it. */
typedef struct hip_api {
    fattn_gpu_api gpu;
    const char *(*error_name)(int result);
    const char *(*error_string)(int result);
    int (*device_current)(int *device);
    int (*device_set)(int device);
    int (*device_reach)(int other, unsigned flags);
    int (*pointer_attribute)(void *value, int attribute, const void *pointer);
    int (*module_load)(gpu_module *module, const void *image);
    int (*last_error)(void); /* clears it */
    int (*module_variable)(void **variable, size_t *bytes, gpu_module module, const char *name);
    int (*copy)(void *dst, const void *src, size_t bytes, int kind, gpu_stream stream);
    int (*copy_rows)(void *dst, size_t dst_step, const void *src, size_t src_step, size_t bytes,
                     size_t rows, int kind, gpu_stream stream);
    int (*stream_device)(gpu_stream stream, int *device);
    int (*stream_device_old)(gpu_stream stream);
} hip_api;

static hip_api hip;

/* --- Functions of gpu_api.h over HIP ---------------------------------------------------------- */

static int error_name(int result, const char **name)
{
    *name = hip.error_name(result);
    return 0;
}

static int error_string(int result, const char **text)
{
    *text = hip.error_string(result);
    return 0;
}

static gpu_context context_of(int device) { return (gpu_context)((uintptr_t)device + 1); }

static int device_of(gpu_context context) { return (int)((uintptr_t)context - 1); }

static int primary_retain(gpu_context *context, int device)
{
    *context = context_of(device);
    return 0;
}

static int primary_release(int device)
{
    (void)device;
    return 0;
}

/* There are no contexts but those of devices, so the caller has none to take over. */
static int context_current(gpu_context *context)
{
    *context = NULL;
    return 0;
}

/* A stack for each thread: the device that was current before each context_push(). */
enum { DEPTH_MAX = 8 };
static _Thread_local int before[DEPTH_MAX];
static _Thread_local int depth;

static int context_push(gpu_context context)
{
    if (depth == DEPTH_MAX) {
        return NOT_SUPPORTED;
    }
    int result = hip.device_current(&before[depth]);
    result = result ? result : hip.device_set(device_of(context));
    depth += result == 0;
    return result;
}

static int context_pop(gpu_context *context)
{
    int device = 0;
    const int result = hip.device_current(&device);
    *context = context_of(device);
    depth--;
    const int back = hip.device_set(before[depth]);
    return result ? result : back;
}

/* Returns a result that may be a failure by which HIP answers a question. Such a failure is
 * cleared, so that the caller's next hipGetLastError() does not return it. */
static int answer(int result)
{
    if (result && hip.last_error) {
        (void)hip.last_error();
    }
    return result;
}

/* It fails if the devices reach each other already. */
static int context_reach(gpu_context other, unsigned flags)
{
    return answer(hip.device_reach(device_of(other), flags));
}

/* It fails for host memory that the runtime does not know. */
static int pointer_attribute(void *value, int attribute, const void *pointer)
{
    return answer(hip.pointer_attribute(value, attribute, pointer));
}

/* It fails if an image has no code for the processor. */
static int module_load(gpu_module *module, const void *image)
{
    return answer(hip.module_load(module, image));
}

/* Not needed: a launch may use all of LDS, AMD's shared memory, without opting in. */
static int function_set(gpu_function function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return 0;
}

static int memory_copy(void *dst, const void *src, size_t bytes, gpu_stream stream)
{
    return hip.copy(dst, src, bytes, COPY_DEFAULT, stream);
}

static int memory_copy_rows(void *dst, size_t dst_step, const void *src, size_t src_step,
                            size_t bytes, size_t rows, gpu_stream stream)
{
    return hip.copy_rows(dst, dst_step, src, src_step, bytes, rows, COPY_DEFAULT, stream);
}

/* ROCm 5 has only the older of the two functions. */
static int stream_context(gpu_stream stream, gpu_context *context)
{
    int device = -1;
    const int result = hip.stream_device ? hip.stream_device(stream, &device) : 0;
    *context = context_of(hip.stream_device ? device : hip.stream_device_old(stream));
    return result;
}

static hip_api hip = {
    .gpu =
        {
            .error_name = error_name,
            .error_string = error_string,
            .primary_retain = primary_retain,
            .primary_release = primary_release,
            .context_current = context_current,
            .context_push = context_push,
            .context_pop = context_pop,
            .context_reach = context_reach,
            .module_load = module_load,
            .function_set = function_set,
            .pointer_attribute = pointer_attribute,
            .memory_copy = memory_copy,
            .memory_copy_rows = memory_copy_rows,
            .stream_context = stream_context,
            .out_of_memory = 2,
            .no_device = 100,
            .no_image = 209,
            .no_function = 500,
            .bad_image = 200, /* hipErrorInvalidImage; ROCm 7 returns it */
            .units = 63,
            .major = 23,
            .minor = 61,
            .shared_memory = 74, /* per block */
            .shared_cache = 19,  /* L2 */
            .registers = 4,
            .dynamic_shared = 8,
            .device_pointer = 3,
            .blocks_max = INT32_MAX,
            .threads_max = UINT32_MAX, /* a dispatch counts them in 32 bits; so does gpu_blocks() */
        },
};

/* --- The runtime ------------------------------------------------------------------------------ */

#define AT(field) offsetof(hip_api, field)
static const struct {
    const char *name;
    size_t at;
    bool optional;
} symbols[] = {
    {"hipInit", AT(gpu.init), false},
    {"hipGetErrorName", AT(error_name), false},
    {"hipGetErrorString", AT(error_string), false},
    {"hipGetDeviceCount", AT(gpu.device_count), false},
    {"hipDeviceGet", AT(gpu.device_get), false},
    {"hipDeviceGetName", AT(gpu.device_name), false},
    {"hipDeviceTotalMem", AT(gpu.device_memory), false},
    {"hipDeviceGetAttribute", AT(gpu.device_attribute), false},
    {"hipGetDevice", AT(gpu.context_device), false},
    {"hipGetDevice", AT(device_current), false},
    {"hipSetDevice", AT(device_set), false},
    {"hipDeviceEnablePeerAccess", AT(device_reach), false},
    {"hipGetLastError", AT(last_error), true},
    {"hipModuleLoadData", AT(module_load), false},
    {"hipModuleUnload", AT(gpu.module_unload), false},
    {"hipModuleGetFunction", AT(gpu.module_function), false},
    {"hipModuleGetGlobal", AT(module_variable), false},
    {"hipFuncGetAttribute", AT(gpu.function_get), false},
    {"hipModuleLaunchKernel", AT(gpu.launch), false},
    {"hipMalloc", AT(gpu.memory_alloc), false},
    {"hipFree", AT(gpu.memory_free), false},
    {"hipMemcpyAsync", AT(copy), false},
    {"hipMemcpy2DAsync", AT(copy_rows), false},
    {"hipPointerGetAttribute", AT(pointer_attribute), false},
    {"hipStreamCreateWithFlags", AT(gpu.stream_create), false},
    {"hipStreamDestroy", AT(gpu.stream_destroy), false},
    {"hipStreamSynchronize", AT(gpu.stream_synchronize), false},
    {"hipStreamGetDevice", AT(stream_device), true},
    {"hipGetStreamDeviceId", AT(stream_device_old), true},
    {"hipStreamWaitEvent", AT(gpu.stream_wait), false},
    {"hipStreamGetCaptureInfo", AT(gpu.stream_capture), false},
    {"hipThreadExchangeStreamCaptureMode", AT(gpu.capture_mode), false},
    {"hipEventCreateWithFlags", AT(gpu.event_create), false},
    {"hipEventDestroy", AT(gpu.event_destroy), false},
    {"hipEventRecord", AT(gpu.event_record), false},
    {"hipEventSynchronize", AT(gpu.event_synchronize), false},
    {"hipEventElapsedTime", AT(gpu.event_elapsed), false},
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char absent[256]; /* why there is no runtime; empty if there is one */

/* Finds the runtime's functions in a library, or writes to `absent` which one it lacks. */
static bool resolve(void *library, const char *name)
{
    for (size_t n = 0; n < sizeof symbols / sizeof symbols[0]; n++) {
        void *const symbol = dlsym(library, symbols[n].name);
        if (!symbol && !symbols[n].optional) {
            snprintf(absent, sizeof absent, "%s does not fit: it has no %s", name, symbols[n].name);
            return false;
        }
        memcpy((char *)&hip + symbols[n].at, &symbol, sizeof symbol);
    }
    if (!hip.stream_device && !hip.stream_device_old) {
        snprintf(absent, sizeof absent, "%s does not fit: it has no hipStreamGetDevice", name);
        return false;
    }
    return true;
}

/* Opens the first library that has all functions. If none has, `absent` says what the last library
 * found lacks or, if none was found, why the newest could not be opened. */
static bool open_library(void)
{
    for (size_t n = 0; n < sizeof libraries / sizeof libraries[0]; n++) {
        void *const library = dlopen(libraries[n], RTLD_NOW | RTLD_LOCAL);
        if (library && resolve(library, libraries[n])) {
            absent[0] = '\0';
            return true;
        }
        if (library) {
            dlclose(library);
        } else if (n == 0) {
            snprintf(absent, sizeof absent, "no runtime: %s", dlerror());
        }
    }
    return false;
}

/* The runtime is never closed, because its threads may still run. */
static void load(void)
{
    if (!open_library()) {
        return;
    }
    const int result = hip.gpu.init(0);
    if (result) {
        snprintf(absent, sizeof absent, "hipInit failed with %d, %s", result,
                 hip.error_name(result));
    }
}

static const fattn_gpu_api *find_api(const char **why)
{
    pthread_once(&once, load);
    *why = absent;
    return absent[0] ? NULL : &hip.gpu;
}

/* Attributes do not tell gfx908 from gfx90a. The code that the runtime chose has the name of its
 * processor in fattn_target: "gfx90a" is 0x90a. */
static int find_isa(gpu_module module, int version, int *isa)
{
    char target[16] = "";
    void *variable = NULL;
    size_t bytes = 0;
    (void)version;
    int result = hip.module_variable(&variable, &bytes, module, "fattn_target");
    result = result ? result : memory_copy(target, variable, sizeof target, NULL);
    result = result ? result : hip.gpu.stream_synchronize(NULL);
    *isa = (int)strtol(target + strlen("gfx"), NULL, 16);
    return result;
}

/* --- The backend ------------------------------------------------------------------------------ */

#define FATTN_HIP_IMAGE(name) extern const unsigned char fattn_hip_image_##name[];
#include "backends/hip/images.inc"
#undef FATTN_HIP_IMAGE

static const fattn_gpu_kernel *const tables[] = {fattn_hip_matrix, fattn_hip_matrix_backward,
                                                 fattn_gpu_simt, NULL};

static const fattn_gpu_image images[] = {
#define FATTN_HIP_IMAGE(name) {#name, fattn_hip_image_##name},
#include "backends/hip/images.inc"
#undef FATTN_HIP_IMAGE
};

static const fattn_gpu_vendor vendor = {
    .name = "hip",
    .isa_format = "gfx%x",
    .targets = FATTN_HIP_TARGETS,
    .api = find_api,
    .isa = find_isa,
    .tables = tables,
    .images = images,
    .image_count = sizeof images / sizeof *images,
};

static int count(void) { return fattn_gpu_count(&vendor); }

static fattn_status open(int ordinal, const fattn_device_options *options, void **impl)
{
    const fattn_status status = fattn_device_options_refuse(options, "hip");
    return status ? status : fattn_gpu_open(&vendor, ordinal, impl);
}

const fattn_backend fattn_backend_hip = {
    .name = "hip",
    .count = count,
    .open = open,
    FATTN_GPU_VERBS,
};
