/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libamdhip64.so.7 of our own for machines without an AMD GPU: every function that backend "hip"
 * resolves, on host memory, with one device, whose launches the emulator (emulator/) executes. So
 * the code objects that the library ships compute what a test asks for, and an access out of
 * bounds, a value that nobody wrote or a race is a failed launch, told on stderr.
 *
 *     STUB_HIP_ARCH       which processor the device is; default gfx942
 *     STUB_HIP_OBJECT     a code object that is taken instead of the one with a kernel of the name
 *                         of its first: for tests that damage kernels
 *     STUB_HIP_SCHEDULE   forward, reversed or shuffled: how waves take turns; default: each launch
 *                         another
 *     STUB_HIP_MISSING    the result for an image without code for the processor; default 209
 *     STUB_HIP_TRACE      a file to which each launch adds what its first wave ran: trace_begin()
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backends/gpu/args.h"
#include "tests/emulator/emulator.h"

/* A function of the runtime, which no header of ours declares. */
#define CALL(name, ...)                                           \
    __attribute__((visibility("default"))) int name(__VA_ARGS__); \
    int name(__VA_ARGS__)
#define TEXT(name, ...)                                                   \
    __attribute__((visibility("default"))) const char *name(__VA_ARGS__); \
    const char *name(__VA_ARGS__)

/* Results and attributes, by HIP's numbers. */
enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NO_BINARY = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719
};
enum { L2 = 19, MAJOR = 23, MINOR = 61, UNITS = 63, SHARED_MEMORY = 74 };
enum { CODE_MAX = 1 << 24 };         /* bytes */
#define MEMORY_MAX ((size_t)1 << 34) /* bytes, of which the system gives those that are touched */
enum { REGISTERS = 4, DEVICE_POINTER = 3 };

static const struct {
    int result;
    const char *name, *text;
} results[] = {
    {0, "hipSuccess", "no error"},
    {INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {NOT_INITIALIZED, "hipErrorNotInitialized", "initialization error"},
    {INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_IMAGE, "hipErrorInvalidImage", "device kernel image is invalid"},
    {NO_BINARY, "hipErrorNoBinaryForGpu", "no kernel image is available for execution"},
    {INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {LAUNCH_FAILED, "hipErrorLaunchFailure", "unspecified launch failure"},
};

/* Held through every call: the emulator serves one thread at a time. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static emu_memory *memory; /* NULL before hipInit */
static uint64_t launches;
static _Thread_local int current; /* device */

typedef struct stream {
    int device;
} stream;

typedef struct event {
    struct timespec time;
} event;

/* Of the thread: the last failure of a call that may fail though all is well. */
static _Thread_local int last_error;

static int noted(int result)
{
    last_error = result ? result : last_error;
    return result;
}

CALL(hipGetLastError, void)
{
    const int last = last_error;
    last_error = 0;
    return last;
}

/* --- The device ------------------------------------------------------------------------------- */

static const char *arch(void)
{
    const char *const name = getenv("STUB_HIP_ARCH");
    return name ? name : "gfx942";
}

static int complain(int result, const char *what, const char *why)
{
    fprintf(stderr, "stub hip: %s: %s\n", what, why);
    return result;
}

CALL(hipInit, unsigned flags)
{
    const char *const reason = emu_host_reason();
    if (flags) {
        return INVALID_VALUE;
    }
    if (reason) {
        return complain(NOT_INITIALIZED, "the emulator does not run here", reason);
    }
    pthread_mutex_lock(&mutex);
    if (!memory) {
        memory = emu_memory_create();
    }
    pthread_mutex_unlock(&mutex);
    return memory ? 0 : OUT_OF_MEMORY;
}

static int find_result(int result)
{
    int n = (int)(sizeof results / sizeof results[0]) - 1;
    while (n > 0 && results[n].result != result) {
        n--;
    }
    return n;
}

TEXT(hipGetErrorName, int result) { return results[find_result(result)].name; }
TEXT(hipGetErrorString, int result) { return results[find_result(result)].text; }

CALL(hipGetDeviceCount, int *count)
{
    *count = 1;
    return 0;
}

CALL(hipDeviceGet, int *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? 0 : INVALID_DEVICE;
}

CALL(hipDeviceGetName, char *name, int size, int device)
{
    snprintf(name, (size_t)size, "emulated %s", arch());
    return device == 0 ? 0 : INVALID_DEVICE;
}

CALL(hipDeviceTotalMem, size_t *bytes, int device)
{
    *bytes = MEMORY_MAX;
    return device == 0 ? 0 : INVALID_DEVICE;
}

/* The runtime tells gfx906, gfx908 and gfx90a alike: 9.0. */
CALL(hipDeviceGetAttribute, int *value, int attribute, int device)
{
    const long number = strtol(arch() + strlen("gfx"), NULL, 16);
    *value = attribute == MAJOR   ? (int)(number >> 12 ? 10 + (number >> 8 & 15) : number >> 8)
             : attribute == MINOR ? (int)(number >> 4 & 15)
             : attribute == UNITS ? 4
             : attribute == SHARED_MEMORY ? 65536
             : attribute == L2            ? 4 << 20
                                          : -1;
    return device != 0 ? INVALID_DEVICE : *value < 0 ? INVALID_VALUE : 0;
}

CALL(hipGetDevice, int *device)
{
    *device = current;
    return 0;
}

CALL(hipSetDevice, int device)
{
    current = device == 0 ? device : current;
    return device == 0 ? 0 : INVALID_DEVICE;
}

/* There is no other. */
CALL(hipDeviceEnablePeerAccess, int other, unsigned flags)
{
    (void)other, (void)flags;
    return noted(INVALID_DEVICE);
}

/* --- Modules ---------------------------------------------------------------------------------- */

/* A bundle does not say how long it is: as far as its last entry. */
static size_t size_of_bundle(const unsigned char *bundle)
{
    enum { MAGIC = 24 };
    uint64_t count, entry[3];
    size_t at = MAGIC + sizeof count, size = 0;
    memcpy(&count, bundle + MAGIC, sizeof count);
    for (; count > 0; count--) {
        memcpy(entry, bundle + at, sizeof entry); /* offset, size, length of name */
        at += sizeof entry + entry[2];
        size = entry[0] + entry[1] > size ? entry[0] + entry[1] : size;
    }
    return size;
}

/* The code object of a file; NULL, and said why, when there is none. */
static emu_object *load_file(const char *path)
{
    char why[512] = "cannot be read";
    FILE *const file = fopen(path, "rb");
    char *const bytes = malloc(CODE_MAX);
    const size_t size = file && bytes ? fread(bytes, 1, CODE_MAX, file) : 0;
    emu_object *const object =
        size ? emu_object_load(bytes, size, STUB_OBJDUMP, why, sizeof why) : NULL;
    if (!object) {
        complain(INVALID_IMAGE, path, why);
    }
    if (file) {
        fclose(file);
    }
    free(bytes);
    return object;
}

/* The object, or that of STUB_HIP_OBJECT in its place. */
static emu_object *replace(emu_object *object)
{
    const char *const path = getenv("STUB_HIP_OBJECT");
    emu_object *const other = path ? load_file(path) : NULL;
    if (!path) {
        return object;
    }
    const bool fits =
        other && emu_object_kernels(other) > 0 &&
        emu_object_find(object, emu_kernel_describe(emu_object_kernel(other, 0))->name);
    if (fits || !other) { /* a file that cannot be loaded must not go unnoticed */
        emu_object_unload(object);
        return other;
    }
    emu_object_unload(other);
    return object;
}

CALL(hipModuleLoadData, emu_object **module, const void *image)
{
    char why[512];
    size_t size = 0;
    if (memcmp(image, "__CLANG_OFFLOAD_BUNDLE__", 24) != 0) {
        return INVALID_IMAGE;
    }
    const void *const code = emu_bundle_find(image, size_of_bundle(image), arch(), &size);
    if (!code) {
        const char *const missing = getenv("STUB_HIP_MISSING");
        return noted(missing ? atoi(missing) : NO_BINARY);
    }
    *module = emu_object_load(code, size, STUB_OBJDUMP, why, sizeof why);
    if (!*module) {
        return complain(INVALID_IMAGE, "loading a module", why);
    }
    *module = replace(*module);
    return *module ? 0 : INVALID_IMAGE;
}

CALL(hipModuleUnload, emu_object *module)
{
    emu_object_unload(module);
    return 0;
}

CALL(hipModuleGetFunction, emu_kernel **function, emu_object *module, const char *name)
{
    char why[512];
    *function = emu_object_find(module, name);
    if (!*function) {
        return NOT_FOUND;
    }
    pthread_mutex_lock(&mutex);
    const bool known = emu_kernel_decode(*function, why, sizeof why);
    pthread_mutex_unlock(&mutex);
    return known ? 0 : complain(INVALID_IMAGE, name, why);
}

CALL(hipModuleGetGlobal, void **variable, size_t *bytes, emu_object *module, const char *name)
{
    *variable = emu_object_variable(module, name, bytes);
    return *variable ? 0 : NOT_FOUND;
}

CALL(hipFuncGetAttribute, int *value, int attribute, const emu_kernel *function)
{
    *value = emu_kernel_describe(function)->vgprs;
    return attribute == REGISTERS ? 0 : INVALID_VALUE;
}

/* --- Launches --------------------------------------------------------------------------------- */

static emu_schedule schedule(void)
{
    static const char *const names[] = {"forward", "reversed", "shuffled"};
    const char *const wanted = getenv("STUB_HIP_SCHEDULE");
    for (int n = 0; wanted && n < 3; n++) {
        if (strcmp(wanted, names[n]) == 0) {
            return (emu_schedule)n;
        }
    }
    return (emu_schedule)(launches % 3);
}

/* The arguments one after another, as the kernel's metadata lays them out. */
static void pack(const emu_kernel_info *info, void *const *parameters, char *arguments)
{
    for (int n = 0, given = 0; n < info->arguments; n++) {
        const emu_argument *const a = &info->argument[n];
        if (!a->hidden) {
            memcpy(arguments + a->offset, parameters[given++], (size_t)a->size);
        }
    }
}

static void trace(void *file, uint32_t address) { fprintf(file, "%x\n", address); }

/* A launch in the file of STUB_HIP_TRACE: its kernel's name, then addresses of instructions, in
 * hexadecimal, a line each. NULL where nothing is asked for. */
static FILE *trace_begin(const emu_kernel *kernel)
{
    const char *const path = getenv("STUB_HIP_TRACE");
    FILE *const file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "kernel %s\n", emu_kernel_describe(kernel)->name);
    }
    return file;
}

/* And in the end what all its waves together needed: threads of a work-group, bytes of LDS, cycles
 * of LDS, and how many it would have been without bank conflicts. */
static void trace_end(FILE *file, const emu_kernel *kernel, const emu_launch *launch,
                      const emu_report *report)
{
    if (file) {
        fprintf(file, "end %u %u %llu %llu\n", launch->block[0],
                (unsigned)emu_kernel_describe(kernel)->lds_size + launch->dynamic_lds,
                (unsigned long long)report->lds_cycles,
                (unsigned long long)report->lds_cycles_ideal);
        fclose(file);
    }
}

static int run(emu_kernel *kernel, emu_launch *launch)
{
    emu_report report;
    FILE *const file = trace_begin(kernel);
    launch->trace = file ? trace : NULL;
    launch->trace_to = file;
    launch->count_banks = file != NULL;
    const bool well = emu_launch_run(kernel, launch, memory, &report);
    trace_end(file, kernel, launch, &report);
    return well ? 0
                : complain(LAUNCH_FAILED, emu_kernel_describe(kernel)->name,
                           emu_report_text(&report));
}

/* The words in which blocks of decoding count who has left a part are read before anyone wrote
 * them: whatever they hold, but for a number that memory does not hold by chance, they are no count
 * yet (backends/gpu/combine.cuh). To the emulator the host has written them, and nothing else. */
static void define_counts(const emu_kernel_info *info, const char *arguments)
{
    fattn_gpu_args g;
    const size_t size = (size_t)info->kernarg_size;
    if (strncmp(info->name, "simt_decode", strlen("simt_decode")) != 0) {
        return;
    }
    memset(&g, 0xff, sizeof g);
    memcpy(&g, arguments, size < sizeof g ? size : sizeof g);
    if (g.counters >= 0) {
        emu_memory_define(memory, g.workspace + g.counters,
                          (size_t)(g.problem.batch * g.problem.heads_k) * sizeof(uint64_t));
    }
}

CALL(hipModuleLaunchKernel, emu_kernel *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, stream *on,
     void **parameters, void **extra)
{
    const emu_kernel_info *const info = emu_kernel_describe(function);
    const uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (threads == 0 || threads > (uint64_t)info->max_threads ||
        (uint64_t)grid_x * block_x > UINT32_MAX || grid_x == 0 || grid_y != 1 || grid_z != 1 ||
        (uint64_t)shared + (uint64_t)info->lds_size > 65536 || extra) {
        return INVALID_VALUE;
    }
    char *const arguments = calloc(1, (size_t)info->kernarg_size + 1);
    if (!arguments) {
        return OUT_OF_MEMORY;
    }
    (void)on; /* a launch is through before its call returns */
    pack(info, parameters, arguments);
    pthread_mutex_lock(&mutex);
    define_counts(info, arguments);
    emu_launch launch = {
        .grid = {grid_x, grid_y, grid_z},
        .block = {block_x, block_y, block_z},
        .dynamic_lds = shared,
        .kernarg = arguments,
        .kernarg_size = (size_t)info->kernarg_size,
        .schedule = schedule(),
        .seed = ++launches,
    };
    const int result = run(function, &launch);
    pthread_mutex_unlock(&mutex);
    free(arguments);
    return result;
}

/* --- Memory ----------------------------------------------------------------------------------- */

/* Nobody has written it yet, and the emulator knows. */
CALL(hipMalloc, void **pointer, size_t bytes)
{
    *pointer = NULL;
    if (bytes > MEMORY_MAX || posix_memalign(pointer, 256, bytes ? bytes : 1) != 0) {
        *pointer = NULL;
        return OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&mutex);
    const bool added = emu_memory_add(memory, *pointer, bytes, true);
    pthread_mutex_unlock(&mutex);
    if (!added) {
        free(*pointer);
        *pointer = NULL;
    }
    return added ? 0 : OUT_OF_MEMORY;
}

/* flags 1: fine-grained. No part of the library's own. */
CALL(hipExtMallocWithFlags, void **pointer, size_t bytes, unsigned flags)
{
    const int result = flags == 1 ? hipMalloc(pointer, bytes) : INVALID_VALUE;
    if (!result) {
        pthread_mutex_lock(&mutex);
        (void)emu_memory_refine(memory, *pointer);
        pthread_mutex_unlock(&mutex);
    }
    return result;
}

CALL(hipFree, void *pointer)
{
    if (!pointer) {
        return 0;
    }
    pthread_mutex_lock(&mutex);
    const bool removed = emu_memory_remove(memory, pointer);
    pthread_mutex_unlock(&mutex);
    if (!removed) {
        return INVALID_VALUE;
    }
    free(pointer);
    return 0;
}

/* Either end is within device memory, or all of it host memory. */
static bool may_copy(const void *pointer, size_t bytes)
{
    return emu_memory_holds(memory, pointer, bytes) || !emu_memory_holds(memory, pointer, 1);
}

CALL(hipMemcpyAsync, void *dst, const void *src, size_t bytes, int kind, stream *on)
{
    (void)on;
    if (kind != 4) {
        return INVALID_VALUE;
    }
    pthread_mutex_lock(&mutex);
    const bool may = may_copy(dst, bytes) && may_copy(src, bytes);
    if (may) {
        memmove(dst, src, bytes);
        if (emu_memory_holds(memory, dst, bytes)) {
            emu_memory_define(memory, dst, bytes);
        }
    }
    pthread_mutex_unlock(&mutex);
    return may ? 0 : INVALID_VALUE;
}

CALL(hipMemcpy2DAsync, void *dst, size_t dst_step, const void *src, size_t src_step, size_t bytes,
     size_t rows, int kind, stream *on)
{
    int result = bytes <= dst_step && bytes <= src_step ? 0 : INVALID_VALUE;
    for (size_t n = 0; !result && n < rows; n++) {
        result = hipMemcpyAsync((char *)dst + n * dst_step, (const char *)src + n * src_step, bytes,
                                kind, on);
    }
    return result;
}

CALL(hipPointerGetAttribute, void *value, int attribute, const void *pointer)
{
    pthread_mutex_lock(&mutex);
    const bool here = attribute == DEVICE_POINTER && emu_memory_holds(memory, pointer, 1);
    pthread_mutex_unlock(&mutex);
    if (here) {
        memcpy(value, &pointer, sizeof pointer);
    }
    return noted(here ? 0 : INVALID_VALUE);
}

/* --- Streams and events ----------------------------------------------------------------------- */

CALL(hipStreamCreateWithFlags, stream **made, unsigned flags)
{
    *made = flags ? NULL : calloc(1, sizeof **made);
    return flags ? INVALID_VALUE : *made ? 0 : OUT_OF_MEMORY;
}

CALL(hipStreamDestroy, stream *on)
{
    free(on);
    return on ? 0 : INVALID_HANDLE;
}

CALL(hipStreamSynchronize, stream *on)
{
    (void)on;
    return 0;
}

CALL(hipStreamGetDevice, const stream *on, int *device)
{
    *device = on->device;
    return 0;
}

/* What an event is recorded behind is done. */
CALL(hipStreamWaitEvent, stream *on, const event *at, unsigned flags)
{
    (void)on;
    return at && !flags ? 0 : INVALID_HANDLE;
}

/* Nothing is ever captured. */
CALL(hipStreamGetCaptureInfo, stream *on, int *status, unsigned long long *id)
{
    (void)on;
    *status = 0;
    *id = 0;
    return 0;
}

CALL(hipThreadExchangeStreamCaptureMode, int *mode)
{
    static _Thread_local int now;
    const int before = now;
    now = *mode;
    *mode = before;
    return before < 0 || now > 2 ? INVALID_VALUE : 0;
}

CALL(hipEventCreateWithFlags, event **made, unsigned flags)
{
    *made = flags ? NULL : calloc(1, sizeof **made);
    return flags ? INVALID_VALUE : *made ? 0 : OUT_OF_MEMORY;
}

CALL(hipEventDestroy, event *at)
{
    free(at);
    return at ? 0 : INVALID_HANDLE;
}

CALL(hipEventRecord, event *at, stream *on)
{
    (void)on;
    clock_gettime(CLOCK_MONOTONIC, &at->time);
    return 0;
}

CALL(hipEventSynchronize, const event *at) { return at ? 0 : INVALID_HANDLE; }

CALL(hipEventElapsedTime, float *milliseconds, const event *start, const event *stop)
{
    *milliseconds = (float)(stop->time.tv_sec - start->time.tv_sec) * 1e3f +
                    (float)(stop->time.tv_nsec - start->time.tv_nsec) * 1e-6f;
    return 0;
}
