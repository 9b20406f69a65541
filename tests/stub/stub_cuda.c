/* SPDX-License-Identifier: Apache-2.0 */
/* In five parts: objects, what follows what, the frame of a call, the functions of a backend, those
 * of tests. */
#define _POSIX_C_SOURCE 200809L

#include "tests/stub/stub_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static stub_cuda state = {.devices = 2, .capability = STUB_CAPABILITY, .units = 4, .held = 1};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* held through every call */

stub_cuda *stub_cuda_state(void) { return &state; }

/* --- Objects ---------------------------------------------------------------------------------- */

enum { DEVICES_MAX = 8, STACK_MAX = 64, SHARED_DEFAULT = 49152, CLOCKS = 1024 };

/* How many launches of each stream lie before a point. */
typedef struct clocks {
    int launches[CLOCKS];
} clocks;

/* A handle is the address of its object; memory is found by what it points to. */
typedef struct object {
    struct object *next;
    stub_kind kind;
    struct object *owner; /* a function's module, everything else's context */
    int device;           /* of a context */
    int retained;         /* of a primary context */
    int shared;           /* bytes that a launch of a function may ask for */
    char name[64];        /* of a function */
    int compiled_for;     /* the PTX that a module or function was made from */
    bool by_ptx;          /* the module was compiled here */
    bool recorded;        /* of an event */
    char *memory;
    size_t bytes;
    int number;                 /* of a stream, where it is found in clocks */
    clocks *before;             /* what a stream's or an event's point follows */
    int user, use;              /* of memory: stream and launch of its last use; use 0: none */
    int copier, copied;         /* the same of copies */
    unsigned long long capture; /* that a stream is in, or an event was recorded in */
} object;

static object *objects;
static object primaries[DEVICES_MAX];
static object *capturing; /* a stream, or NULL */
static unsigned long long captures;
static bool capture_broken, initialised;
static _Thread_local int capture_mode;

/* Contexts that are current in this thread; the last is the one. */
static _Thread_local object *stack[STACK_MAX];
static _Thread_local int depth;

static object *current(void) { return depth ? stack[depth - 1] : NULL; }

/* The handle of a stream that was destroyed is the next one's. */
static object *used_streams;

static object *new_object(stub_kind kind)
{
    object *const used = kind == STUB_STREAM ? used_streams : NULL;
    if (!used) {
        return calloc(1, sizeof(object));
    }
    used_streams = used->next;
    memset(used, 0, sizeof *used);
    return used;
}

static int add(stub_kind kind, object *owner, object **made)
{
    object *const o = new_object(kind);
    if (!o) {
        return STUB_OUT_OF_MEMORY;
    }
    o->kind = kind, o->owner = owner, o->next = objects;
    objects = o;
    state.alive[kind]++;
    *made = o;
    return 0;
}

static object *find(stub_kind kind, const void *handle)
{
    object *o = objects;
    while (o && (o->kind != kind || (kind == STUB_MEMORY ? o->memory : (void *)o) != handle)) {
        o = o->next;
    }
    return o;
}

static int drop(object *o)
{
    if (!o) {
        return STUB_INVALID_HANDLE;
    }
    object **link = &objects;
    while (*link != o) {
        link = &(*link)->next;
    }
    *link = o->next;
    state.alive[o->kind]--;
    free(o->before);
    free(o->memory);
    if (o->kind == STUB_STREAM) {
        o->next = used_streams;
        used_streams = o;
    } else {
        free(o);
    }
    return 0;
}

static object *memory_at(const void *address)
{
    const char *const at = address;
    object *o = objects;
    while (o && (o->kind != STUB_MEMORY || at < o->memory || at >= o->memory + o->bytes)) {
        o = o->next;
    }
    return o;
}

bool stub_cuda_owns(const void *address) { return memory_at(address) != NULL; }

/* With a context its modules go, and with a module its functions, which are before it in the list:
 * one that stayed would seem to belong to whichever module has that address next. */
static void drop_owned(const object *owner)
{
    for (object *o = objects, *next; o; o = next) {
        next = o->next;
        if (o->owner == owner) {
            if (o->kind == STUB_MODULE) {
                drop_owned(o);
            }
            drop(o);
        }
    }
}

static bool is_context(const object *context)
{
    for (int n = 0; n < DEVICES_MAX; n++) {
        if (context == &primaries[n]) {
            return context->retained > 0;
        }
    }
    return find(STUB_CONTEXT, context) != NULL;
}

/* --- What follows what ------------------------------------------------------------------------ */

/* Work has a number in its stream's clock; a launch follows another when its stream's clocks have
 * come to it, through the stream's own order, events and waits of the host. (That the default
 * stream of a context waits for others, and they for it, is left out: nothing may rely on it.) */
static clocks host;       /* what the host has waited for */
static object *launching; /* the stream of the launch that is being watched */
static int numbers;       /* of streams; begin again after CLOCKS, far from what is still alive */
enum { THREADS_MAX = 256 };
static object own[DEVICES_MAX + THREADS_MAX]; /* streams that have no handle of their own */
static int threads;
static _Thread_local int thread; /* from 1 */

static void merge(clocks *into, const clocks *from)
{
    for (int n = 0; n < CLOCKS; n++) {
        into->launches[n] =
            into->launches[n] > from->launches[n] ? into->launches[n] : from->launches[n];
    }
}

/* The clocks of a stream or an event. */
static clocks *clocks_of(object *o)
{
    if (!o->before) {
        o->before = calloc(1, sizeof *o->before);
        o->number = o->kind == STUB_STREAM ? numbers++ % CLOCKS : 0;
    }
    return o->before;
}

/* The stream of a handle: NULL and 1 one of the device's, 2 one of the thread's. */
static object *stream_of(object *handle)
{
    object *stream = handle;
    if ((uintptr_t)handle == 2) {
        thread = thread ? thread : ++threads % THREADS_MAX + 1;
        stream = &own[DEVICES_MAX + thread - 1];
    } else if ((uintptr_t)handle < 2) {
        stream = &own[current() ? current()->device : 0];
    }
    stream->kind = STUB_STREAM;
    return stream;
}

bool stub_cuda_follows(const void *address)
{
    object *const memory = memory_at(address);
    const clocks *const c = launching ? launching->before : NULL;
    if (!memory || !c) {
        return false;
    }
    const bool follows = !memory->use || memory->use <= c->launches[memory->user];
    memory->user = launching->number;
    memory->use = c->launches[launching->number];
    return follows;
}

/* A copy of memory of a device, which begins behind all that its stream has come to. */
static void mark_copy(const void *address, object *stream)
{
    object *const memory = memory_at(address);
    const clocks *const c = clocks_of(stream);
    if (memory) {
        state.disordered += memory->copied > c->launches[memory->copier];
        memory->copier = stream->number;
        memory->copied = c->launches[stream->number];
    }
}

/* The context of a stream; NULL, 1 and 2 are the current context's own streams. */
static object *context_of(object *stream)
{
    const object *const found = (uintptr_t)stream > 2 ? find(STUB_STREAM, stream) : NULL;
    return found ? found->owner : (uintptr_t)stream > 2 ? NULL : current();
}

/* --- The frame of a call ---------------------------------------------------------------------- */

/* What a call needs or does. One that is told to fail does nothing, except that a RELEASE does its
 * work: a driver reports there what went wrong earlier, in a kernel. */
enum { CONTEXT = 1, WAITS = 2, RELEASE = 4 };
enum { CAPTURE_RELAXED = 2 };

static int late; /* the result of a RELEASE that was told to fail; under mutex */

static int begin(const char *name, unsigned what)
{
    pthread_mutex_lock(&mutex);
    late = 0;
    state.log[state.calls++ % STUB_LOG] = name;
    const bool now = state.fail_at && --state.fail_at == 0;
    if (now || (state.fired && state.fail_on)) {
        state.fired = true;
        if (!(what & RELEASE)) {
            return state.fail_with;
        }
        late = state.fail_with;
    }
    if (!initialised && strcmp(name, "cuInit") != 0) {
        return STUB_NOT_INITIALIZED;
    }
    if (what & CONTEXT && (!current() || !is_context(current()))) {
        return STUB_INVALID_CONTEXT;
    }
    /* Memory, modules and waiting have no place in a graph, unless the thread knows better. */
    if (what & WAITS && capturing && capture_mode != CAPTURE_RELAXED) {
        capture_broken = true;
        return STUB_CAPTURE_UNSUPPORTED;
    }
    return 0;
}

static int end(int result)
{
    const int answer = result ? result : late;
    pthread_mutex_unlock(&mutex);
    return answer;
}

/* Every function begins with BEGIN and ends with end(result). The header that would declare it is
 * the driver's. */
#define CALL(name, ...)    \
    int name(__VA_ARGS__); \
    int name(__VA_ARGS__)
#define BEGIN(what) int result = begin(__func__, what)

/* --- The functions of a backend --------------------------------------------------------------- */

static const struct {
    int result;
    const char *name, *text;
} errors[] = {
    {STUB_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {STUB_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {STUB_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {STUB_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {STUB_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {STUB_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {STUB_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {STUB_NO_IMAGE, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for the device"},
    {STUB_OLD_DRIVER, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "PTX of a newer toolchain"},
    {STUB_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {STUB_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {STUB_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {STUB_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not while capturing"},
    {STUB_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier call"},
    {STUB_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "work outside the capture"},
    {STUB_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "the default stream"},
};

CALL(cuGetErrorName, int result, const char **name)
{
    for (size_t n = 0; n < sizeof errors / sizeof errors[0]; n++) {
        if (errors[n].result == result) {
            *name = errors[n].name;
            return 0;
        }
    }
    *name = NULL;
    return STUB_INVALID_VALUE;
}

CALL(cuGetErrorString, int result, const char **text)
{
    for (size_t n = 0; n < sizeof errors / sizeof errors[0]; n++) {
        if (errors[n].result == result) {
            *text = errors[n].text;
            return 0;
        }
    }
    *text = NULL;
    return STUB_INVALID_VALUE;
}

CALL(cuInit, unsigned flags)
{
    BEGIN(0);
    if (!result) {
        const char *const old = getenv("STUB_CUDA_OLD");
        state.old = old ? atoi(old) : state.old;
        result = flags ? STUB_INVALID_VALUE : state.devices ? 0 : STUB_NO_DEVICE;
        initialised = !result;
    }
    return end(result);
}

CALL(cuDeviceGetCount, int *count)
{
    BEGIN(0);
    if (!result) {
        *count = state.devices;
    }
    return end(result);
}

CALL(cuDeviceGet, int *device, int ordinal)
{
    BEGIN(0);
    if (!result && (ordinal < 0 || ordinal >= state.devices || ordinal >= DEVICES_MAX)) {
        result = STUB_INVALID_DEVICE;
    }
    if (!result) {
        *device = ordinal;
    }
    return end(result);
}

CALL(cuDeviceGetName, char *name, int size, int device)
{
    BEGIN(0);
    if (!result) {
        snprintf(name, (size_t)size, "stub %d", device);
    }
    return end(result);
}

CALL(cuDeviceTotalMem_v2, size_t *bytes, int device)
{
    BEGIN(0);
    if (!result) {
        *bytes = (size_t)(device + 1) << 30;
    }
    return end(result);
}

static int capability_of(int device) { return device < state.old ? 52 : state.capability; }

/* What a block may ask for, as the programming guide has it for each compute capability. */
static int shared_memory(int device)
{
    const int c = capability_of(device);
    return c < 80 ? 65536 : c == 80 || c == 87 ? 166912 : c < 90 || c >= 120 ? 101376 : 232448;
}

CALL(cuDeviceGetAttribute, int *value, int attribute, int device)
{
    BEGIN(0);
    if (!result) {
        switch (attribute) {
        case 16: *value = state.units; break;
        case 38: *value = 40 << 20; break; /* L2 */
        case 75: *value = capability_of(device) / 10; break;
        case 76: *value = capability_of(device) % 10; break;
        case 97: *value = shared_memory(device); break;
        default: result = STUB_INVALID_VALUE;
        }
    }
    return end(result);
}

CALL(cuDevicePrimaryCtxRetain, object **context, int device)
{
    BEGIN(0);
    if (!result) {
        object *const primary = &primaries[device];
        state.alive[STUB_CONTEXT] += primary->retained++ == 0;
        primary->kind = STUB_CONTEXT;
        primary->device = device;
        *context = primary;
    }
    return end(result);
}

/* What the last user leaves behind stays alive, so that a test sees it. */
CALL(cuDevicePrimaryCtxRelease_v2, int device)
{
    BEGIN(RELEASE);
    if (!result && primaries[device].retained == 0) {
        result = STUB_INVALID_CONTEXT;
    }
    if (!result) {
        state.alive[STUB_CONTEXT] -= --primaries[device].retained == 0;
    }
    return end(result);
}

CALL(cuCtxGetCurrent, object **context)
{
    BEGIN(0);
    if (!result) {
        *context = current();
    }
    return end(result);
}

CALL(cuCtxGetDevice, int *device)
{
    BEGIN(CONTEXT);
    if (!result) {
        *device = current()->device;
    }
    return end(result);
}

CALL(cuCtxPushCurrent_v2, object *context)
{
    BEGIN(0);
    if (!result && (!is_context(context) || depth == STACK_MAX)) {
        result = STUB_INVALID_CONTEXT;
    }
    if (!result) {
        stack[depth++] = context;
    }
    return end(result);
}

CALL(cuCtxPopCurrent_v2, object **context)
{
    BEGIN(RELEASE);
    if (!result && !depth) {
        result = STUB_INVALID_CONTEXT;
    }
    if (!result) {
        *context = stack[--depth];
    }
    return end(result);
}

CALL(cuCtxEnablePeerAccess, object *peer, unsigned flags)
{
    BEGIN(CONTEXT);
    if (!result && (!is_context(peer) || flags)) {
        result = STUB_INVALID_CONTEXT;
    }
    if (!result) {
        state.reaches++;
    }
    return end(result);
}

#ifdef STUB_VIRTUAL
static const bool is_virtual = true;
#else
static const bool is_virtual = false;
#endif

/* The architecture of the code in a fat binary that the device runs. It begins with a magic number,
 * its header's size and how many bytes of entries follow; an entry with its kind (1: PTX, 2:
 * machine code), the sizes of its header and of what follows it, and, 28 bytes in, the
 * architecture. PTX runs on newer chips, machine code on those of its generation, and goes first.
 * Of a build with PTX in the place of machine code (STUB_VIRTUAL), it passes for that too.
 */
static int find_code(const unsigned char *image, int *compiled_for, bool *by_ptx)
{
    static const uint32_t magic = 0xba55ed50;
    uint16_t header, kind;
    uint32_t entry_header, arch;
    uint64_t bytes, size;
    if (memcmp(image, &magic, sizeof magic) != 0) {
        return STUB_INVALID_IMAGE;
    }
    memcpy(&header, image + 6, sizeof header);
    memcpy(&bytes, image + 8, sizeof bytes);
    const unsigned char *entry = image + header, *const stop = entry + bytes;
    int best[3] = {0, 0, 0}; /* of either kind */
    for (; entry < stop; entry += entry_header + size) {
        memcpy(&kind, entry, sizeof kind);
        memcpy(&entry_header, entry + 4, sizeof entry_header);
        memcpy(&size, entry + 8, sizeof size);
        memcpy(&arch, entry + 28, sizeof arch);
        const int chip = capability_of(current()->device), code = (int)arch;
        if (kind == 1 && code <= chip && code > best[1]) {
            best[1] = code;
        }
        if ((kind == 2 || is_virtual) && code <= chip && code > best[2] && code / 10 == chip / 10 &&
            !state.only_ptx) {
            best[2] = code;
        }
    }
    *by_ptx = !best[2];
    *compiled_for = best[2] ? best[2] : best[1];
    return *compiled_for ? 0 : STUB_NO_IMAGE;
}

CALL(cuModuleLoadData, object **module, const void *image)
{
    BEGIN(CONTEXT | WAITS);
    int compiled_for = 0;
    bool by_ptx = false;
    if (!result) {
        result = find_code(image, &compiled_for, &by_ptx);
    }
    if (!result) {
        result = add(STUB_MODULE, current(), module);
    }
    if (!result) {
        state.newest = state.compiled_for ? state.compiled_for : compiled_for;
        (*module)->compiled_for = state.newest;
        (*module)->by_ptx = by_ptx;
    }
    return end(result);
}

CALL(cuModuleUnload, object *module)
{
    BEGIN(CONTEXT | WAITS | RELEASE);
    if (!result && find(STUB_MODULE, module)) {
        drop_owned(module);
    }
    return end(result ? result : drop(find(STUB_MODULE, module)));
}

/* Whether an entry is for one feature: images have none of those as PTX. */
static bool is_machine_code_alone(const char *name)
{
    static const char *const features[] = {"bias_", "mask_", "alibi_", "softcap_", "dropout_"};
    const char *const rest = name + (strncmp(name, "mma_backward_", 13) == 0 ? 13 : 4);
    if (strncmp(name, "mma_", 4) != 0) {
        return false;
    }
    bool alone = false;
    for (size_t n = 0; n < sizeof features / sizeof features[0]; n++) {
        alone = alone || strncmp(rest, features[n], strlen(features[n])) == 0;
    }
    return alone;
}

CALL(cuModuleGetFunction, object **function, object *module, const char *name)
{
    BEGIN(CONTEXT);
    if (!result && (!find(STUB_MODULE, module) || module->owner != current() || !name[0])) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result && module->by_ptx && is_machine_code_alone(name)) {
        result = STUB_NOT_FOUND;
    }
    if (!result) {
        result = add(STUB_FUNCTION, module, function);
    }
    if (!result) {
        (*function)->shared = SHARED_DEFAULT;
        snprintf((*function)->name, sizeof(*function)->name, "%s", name);
        (*function)->compiled_for = module->compiled_for;
    }
    return end(result);
}

CALL(cuFuncGetAttribute, int *value, int attribute, object *function)
{
    BEGIN(CONTEXT);
    if (!result && !find(STUB_FUNCTION, function)) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        switch (attribute) {
        case 4: *value = 64; break; /* registers */
        case 5: *value = function->compiled_for; break;
        case 6:
            *value = capability_of(current()->device);
            break; /* of the machine code, made from PTX or not */
        default: result = STUB_INVALID_VALUE;
        }
    }
    return end(result);
}

CALL(cuFuncSetAttribute, object *function, int attribute, int value)
{
    BEGIN(CONTEXT);
    if (!result && (attribute != 8 || value < 0 || value > shared_memory(current()->device) ||
                    !find(STUB_FUNCTION, function))) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        function->shared = value;
    }
    return end(result);
}

CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, int *blocks, object *function, int block,
     size_t shared)
{
    BEGIN(CONTEXT);
    if (!result && (!find(STUB_FUNCTION, function) || block < 1 || block > 1024 ||
                    shared > (size_t)function->shared)) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        *blocks = state.held;
    }
    return end(result);
}

static int check_launch(const object *function, unsigned grid_x, unsigned block_x, unsigned shared,
                        object *stream, void **parameters)
{
    if (!find(STUB_FUNCTION, function) || function->owner->owner != current() ||
        context_of(stream) != current()) {
        return STUB_INVALID_HANDLE;
    }
    if (grid_x == 0 || grid_x > INT32_MAX || block_x == 0 || block_x > 1024 ||
        shared > (unsigned)function->shared || !parameters || !parameters[0]) {
        return STUB_INVALID_VALUE;
    }
    if (capturing && !stream) {
        capture_broken = true;
        return STUB_CAPTURE_IMPLICIT;
    }
    return 0;
}

static int launched(const object *function, unsigned grid_x, unsigned block_x, unsigned shared,
                    object *stream, void **parameters)
{
    launching = stream_of(stream);
    merge(clocks_of(launching), &host);
    launching->before->launches[launching->number]++;
    if (state.watch) {
        state.watch(parameters);
    }
    launching = NULL;
    const size_t used = strlen(state.launched);
    snprintf(state.launched + used, sizeof state.launched - used, "%s ", function->name);
    state.blocks[state.launches++ % 8] = grid_x;
    state.launch_device = current()->device;
    state.launch_threads = block_x;
    snprintf(state.launch_name, sizeof state.launch_name, "%s", function->name);
#ifdef STUB_RUNS
    return stub_cuda_run(function->name, grid_x, block_x, shared, parameters);
#else
    (void)shared;
    return 0;
#endif
}

/* As cuda.h lays them out. */
typedef struct launch_attribute {
    int number, padding, allowed;
    char rest[60];
} launch_attribute;

typedef struct launch_config {
    unsigned grid[3], block[3], shared;
    object *stream;
    const launch_attribute *attributes;
    unsigned count;
} launch_config;

CALL(cuLaunchKernel, object *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, object *stream,
     void **parameters, void **extra)
{
    BEGIN(CONTEXT);
    if (!result && (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra)) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        result = check_launch(function, grid_x, block_x, shared, stream, parameters);
    }
    if (!result) {
        result = launched(function, grid_x, block_x, shared, stream, parameters);
    }
    return end(result);
}

/* Attribute 6 lets a kernel begin before the one ahead of it has ended. A driver takes it for any
 * kernel; one that was not compiled for 9.0 has no instruction to wait with. */
CALL(cuLaunchKernelEx, const launch_config *config, object *function, void **parameters,
     void **extra)
{
    BEGIN(CONTEXT);
    if (!result && (config->grid[1] != 1 || config->grid[2] != 1 || config->block[1] != 1 ||
                    config->block[2] != 1 || extra || config->count != 1 ||
                    config->attributes->number != 6 || config->attributes->allowed != 1)) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        result = check_launch(function, config->grid[0], config->block[0], config->shared,
                              config->stream, parameters);
    }
    if (!result) {
        result = launched(function, config->grid[0], config->block[0], config->shared,
                          config->stream, parameters);
        state.early++;
        state.unready += function->compiled_for < 90;
    }
    return end(result);
}

CALL(cuMemAlloc_v2, void **memory, size_t bytes)
{
    BEGIN(CONTEXT | WAITS);
    object *made = NULL;
    if (!result) {
        result = bytes ? add(STUB_MEMORY, current(), &made) : STUB_INVALID_VALUE;
    }
    if (!result) {
        made->bytes = bytes;
        made->memory = bytes < SIZE_MAX / 2 ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
        if (!made->memory) {
            drop(made);
            return end(STUB_OUT_OF_MEMORY);
        }
        memset(made->memory, 0xff, bytes); /* NaN */
        *memory = made->memory;
    }
    return end(result);
}

CALL(cuMemFree_v2, void *memory)
{
    BEGIN(CONTEXT | WAITS | RELEASE);
    object *const o = find(STUB_MEMORY, memory);
    if (!result && o && o->use > host.launches[o->user]) {
        state.freed_in_use++;
    }
    return end(result ? result : drop(o));
}

/* What copies have in common: checks of the stream, and the marks of a copy. */
static int begin_copy(int result, object *stream)
{
    if (!result && context_of(stream) != current()) {
        return STUB_INVALID_HANDLE;
    }
    if (!result && capturing && !stream) {
        capture_broken = true;
        return STUB_CAPTURE_IMPLICIT;
    }
    return result;
}

static void note_copy(void *dst, const void *src, object *stream)
{
    clocks *const work = clocks_of(stream_of(stream)); /* which numbers the stream */
    work->launches[stream_of(stream)->number]++;
    mark_copy(src, stream_of(stream));
    mark_copy(dst, stream_of(stream));
}

CALL(cuMemcpyAsync, void *dst, const void *src, size_t bytes, object *stream)
{
    BEGIN(CONTEXT);
    result = begin_copy(result, stream);
    if (!result && !capturing) {
        memmove(dst, src, bytes);
        note_copy(dst, src, stream);
    }
    return end(result);
}

typedef struct copy_side {
    size_t x, y;
    int memory_type;
    void *host, *device, *array;
    size_t step;
} copy_side;

typedef struct copy_config {
    copy_side from, to;
    size_t bytes, rows;
} copy_config;

CALL(cuMemcpy2DAsync_v2, const copy_config *c, object *stream)
{
    BEGIN(CONTEXT);
    result = begin_copy(result, stream);
    const bool fits = c->bytes <= c->from.step && c->bytes <= c->to.step &&
                      c->from.memory_type == 4 && c->to.memory_type == 4;
    result = result ? result : fits ? 0 : STUB_INVALID_VALUE;
    for (size_t n = 0; !result && !capturing && n < c->rows; n++) {
        memcpy((char *)c->to.device + n * c->to.step,
               (const char *)c->from.device + n * c->from.step, c->bytes);
    }
    if (!result && !capturing) {
        note_copy(c->to.device, c->from.device, stream);
    }
    return end(result);
}

/* Memory of the device is found by any address inside. */
CALL(cuPointerGetAttribute, void *value, int attribute, const void *pointer)
{
    BEGIN(CONTEXT);
    const bool moved = state.elsewhere && pointer == state.elsewhere;
    const void *const seen = moved ? (const char *)pointer + 4096 : pointer;
    if (!result) {
        result = attribute == 3 && (moved || stub_cuda_owns(pointer)) ? 0 : STUB_INVALID_VALUE;
    }
    if (!result) {
        memcpy(value, &seen, sizeof seen);
    }
    return end(result);
}

CALL(cuStreamCreate, object **stream, unsigned flags)
{
    BEGIN(CONTEXT);
    (void)flags;
    return end(result ? result : add(STUB_STREAM, current(), stream));
}

CALL(cuStreamDestroy_v2, object *stream)
{
    BEGIN(CONTEXT | RELEASE);
    return end(result ? result : drop(find(STUB_STREAM, stream)));
}

CALL(cuStreamSynchronize, object *stream)
{
    BEGIN(CONTEXT | WAITS);
    if (!result && !context_of(stream)) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result && stream_of(stream)->capture) {
        capture_broken = true;
        result = STUB_CAPTURE_UNSUPPORTED;
    }
    if (!result) {
        merge(&host, clocks_of(stream_of(stream)));
    }
    return end(result);
}

/* A stream that waits for an event of a capture joins the capture. */
CALL(cuStreamWaitEvent, object *stream, object *event, unsigned flags)
{
    BEGIN(CONTEXT);
    if (!result && (!find(STUB_EVENT, event) || !context_of(stream) || flags)) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result && event->recorded && stream_of(stream)->capture != event->capture) {
        const bool joins = event->capture == captures && capturing && !stream_of(stream)->capture;
        capture_broken = capture_broken || !joins;
        result = joins ? 0 : STUB_CAPTURE_ISOLATION;
    }
    if (!result && event->recorded) {
        stream_of(stream)->capture = event->capture;
        merge(clocks_of(stream_of(stream)), clocks_of(event));
    }
    return end(result);
}

CALL(cuStreamGetCaptureInfo, object *stream, int *status, unsigned long long *id)
{
    BEGIN(CONTEXT);
    if (!result && !context_of(stream)) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result && capturing && (uintptr_t)stream < 2) {
        result = STUB_CAPTURE_IMPLICIT;
    }
    if (!result) {
        *status = stream_of(stream)->capture ? 1 + capture_broken : 0;
        *id = stream_of(stream)->capture;
    }
    return end(result);
}

CALL(cuThreadExchangeStreamCaptureMode, int *mode)
{
    BEGIN(0);
    if (!result) {
        const int before = capture_mode;
        capture_mode = *mode;
        *mode = before;
    }
    return end(result);
}

CALL(cuStreamGetCtx, object *stream, object **context)
{
    BEGIN(CONTEXT);
    if (!result && !context_of(stream)) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result) {
        *context = context_of(stream);
    }
    return end(result);
}

CALL(cuEventCreate, object **event, unsigned flags)
{
    BEGIN(CONTEXT);
    (void)flags;
    return end(result ? result : add(STUB_EVENT, current(), event));
}

CALL(cuEventDestroy_v2, object *event)
{
    BEGIN(CONTEXT | RELEASE);
    return end(result ? result : drop(find(STUB_EVENT, event)));
}

CALL(cuEventRecord, object *event, object *stream)
{
    BEGIN(CONTEXT);
    if (!result && (!find(STUB_EVENT, event) || event->owner != context_of(stream))) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result) {
        event->recorded = true;
        event->capture = stream_of(stream)->capture;
        memset(clocks_of(event), 0, sizeof(clocks));
        merge(event->before, clocks_of(stream_of(stream)));
    }
    return end(result);
}

CALL(cuEventSynchronize, object *event)
{
    BEGIN(CONTEXT | WAITS);
    if (!result && !find(STUB_EVENT, event)) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result && event->capture) {
        capture_broken = true;
        result = STUB_CAPTURE_UNSUPPORTED;
    }
    if (!result) {
        merge(&host, clocks_of(event));
    }
    return end(result);
}

CALL(cuEventElapsedTime, float *milliseconds, object *start, object *stop)
{
    BEGIN(CONTEXT | WAITS);
    if (!result && (!find(STUB_EVENT, start) || !find(STUB_EVENT, stop) || !start->recorded ||
                    !stop->recorded)) {
        result = STUB_INVALID_HANDLE;
    }
    if (!result) {
        *milliseconds = 0.5f;
    }
    return end(result);
}

/* What the driver's manual asks of a tensor map. */
CALL(cuTensorMapEncodeTiled, void *map, int type, uint32_t axes, void *address,
     const uint64_t *extent, const uint64_t *stride, const uint32_t *box, const uint32_t *step,
     int interleave, int swizzle, int promotion, int fill)
{
    BEGIN(0);
    const uint32_t bytes = type ? 2 : 1;
    const bool known =
        type >= 0 && type <= 1 && interleave == 0 && swizzle == 3 && promotion == 3 && fill == 0;
    bool fits = (uintptr_t)map % 64 == 0 && (uintptr_t)address % 16 == 0 && axes >= 1 &&
                axes <= 5 && bytes * box[0] <= 128 && bytes * box[0] % 16 == 0;
    for (uint32_t n = 0; fits && n < axes; n++) {
        fits = extent[n] >= 1 && extent[n] <= UINT64_C(1) << 32 && box[n] >= 1 && box[n] <= 256 &&
               step[n] == 1;
        fits = fits && (n == 0 || (stride[n - 1] > 0 && stride[n - 1] % 16 == 0 &&
                                   stride[n - 1] < UINT64_C(1) << 40));
    }
    if (!result && !(known && fits)) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        stub_map made = {.address = address, .axes = axes, .bytes = bytes};
        memcpy(made.extent, extent, axes * sizeof *extent);
        memcpy(made.stride, stride, (axes - 1) * sizeof *stride);
        memcpy(made.box, box, axes * sizeof *box);
        memset(map, 0, 128);
        memcpy(map, &made, sizeof made);
    }
    return end(result);
}

CALL(cuTensorMapReplaceAddress, void *map, void *address)
{
    BEGIN(0);
    if (!result && ((uintptr_t)map % 64 || !address || (uintptr_t)address % 16)) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        memcpy(map, &address, sizeof address);
    }
    return end(result);
}

/* --- The functions of tests ------------------------------------------------------------------- */

CALL(cuCtxCreate_v2, object **context, unsigned flags, int device)
{
    BEGIN(0);
    if (!result && (flags || device < 0 || device >= state.devices || depth == STACK_MAX)) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        result = add(STUB_CONTEXT, NULL, context);
    }
    if (!result) {
        (*context)->device = device;
        stack[depth++] = *context;
    }
    return end(result);
}

/* What lives in it goes with it; it is the test that looks before. */
CALL(cuCtxDestroy_v2, object *context)
{
    BEGIN(RELEASE);
    if (!result && find(STUB_CONTEXT, context)) {
        depth -= current() == context;
        drop_owned(context);
    }
    return end(result ? result : drop(find(STUB_CONTEXT, context)));
}

CALL(cuCtxSetCurrent, object *context)
{
    BEGIN(0);
    if (!result && context && !is_context(context)) {
        result = STUB_INVALID_CONTEXT;
    }
    if (!result) {
        depth -= depth > 0;
        if (context) {
            stack[depth++] = context;
        }
    }
    return end(result);
}

CALL(cuStreamBeginCapture_v2, object *stream, int mode)
{
    BEGIN(CONTEXT);
    if (!result && (mode || capturing || !find(STUB_STREAM, stream))) {
        result = STUB_INVALID_VALUE;
    }
    if (!result) {
        capturing = stream;
        stream->capture = ++captures;
        capture_broken = false;
    }
    return end(result);
}

/* The graph is a name without a thing. */
CALL(cuStreamEndCapture, object *stream, void **graph)
{
    BEGIN(CONTEXT);
    if (!result) {
        result = capturing != stream ? STUB_INVALID_VALUE
                 : capture_broken    ? STUB_CAPTURE_INVALIDATED
                                     : 0;
        capturing = capturing == stream ? NULL : capturing;
        for (object *o = objects; o; o = o->next) { /* with all streams that joined */
            o->capture = o->kind == STUB_STREAM && !capturing ? 0 : o->capture;
        }
    }
    *graph = result ? NULL : stream;
    return end(result);
}
