/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU as a device of a backend: calls of the driver, functions of images, opening and closing,
 * and the list of kernel rows. */
#define _POSIX_C_SOURCE 200809L

#include "backends/gpu/device.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/memory.h"
#include "core/status.h"

/* --- Calls of the driver ---------------------------------------------------------------------- */

static fattn_status check(const fattn_gpu_vendor *vendor, const fattn_gpu_api *api, int result,
                          const char *what)
{
    const char *name = NULL, *text = NULL;
    if (result == 0) {
        return FATTN_OK;
    }
    (void)api->error_name(result, &name);
    (void)api->error_string(result, &text);
    const fattn_status status = result == api->out_of_memory ? FATTN_OUT_OF_MEMORY
                                : result == api->no_device   ? FATTN_NO_DEVICE
                                : result == api->no_image    ? FATTN_UNSUPPORTED
                                                             : FATTN_DEVICE_ERROR;
    return fattn_fail(status, "%s: %s failed with %d, %s: %s", vendor->name, what, result,
                      name ? name : "no name", text ? text : "no text");
}

fattn_status fattn_gpu_check(const fattn_gpu_device *d, int result, const char *what)
{
    return check(d->vendor, d->api, result, what);
}

fattn_status fattn_gpu_enter(const fattn_gpu_device *d)
{
    return fattn_gpu_check(d, d->api->context_push(d->context), "entering the context");
}

fattn_status fattn_gpu_leave(const fattn_gpu_device *d)
{
    gpu_context own;
    return fattn_gpu_check(d, d->api->context_pop(&own), "leaving the context");
}

fattn_status fattn_gpu_leave_with(const fattn_gpu_device *d, fattn_status status)
{
    if (status) {
        gpu_context own;
        (void)d->api->context_pop(&own); /* the reason stays that of the failure */
        return status;
    }
    return fattn_gpu_leave(d);
}

fattn_status fattn_gpu_check_stream(const fattn_gpu_device *d, fattn_stream stream)
{
    gpu_context context = NULL;
    if ((uintptr_t)stream <= FATTN_STREAM_PER_THREAD) {
        return FATTN_OK;
    }
    const fattn_status status = fattn_gpu_check(
        d, d->api->stream_context((gpu_stream)stream, &context), "asking for the stream's context");
    if (!status && context != d->context) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "stream is %p: it belongs to another context",
                          stream);
    }
    return status;
}

/* --- Functions of images ---------------------------------------------------------------------- */

/* Loads the image of that name, if it is not loaded yet. The caller holds the mutex and has made
 * the context current. */
static fattn_status load_locked(fattn_gpu_device *d, const char *name, gpu_module *module)
{
    const fattn_gpu_image *const images = d->vendor->images;
    int n = 0;
    while (n < d->vendor->image_count && strcmp(images[n].name, name) != 0) {
        n++;
    }
    assert(n < d->vendor->image_count);
    if (!d->modules[n]) {
        const int result = d->api->module_load(&d->modules[n], images[n].bytes);
        if (result == d->api->no_image || result == d->api->bad_image) {
            return fattn_fail(FATTN_UNSUPPORTED,
                              "%s: this build has no code for a device of version %d.%d: it has %s",
                              d->vendor->name, d->version / 10, d->version % 10,
                              d->vendor->targets);
        }
        if (result) {
            d->modules[n] = NULL;
            return fattn_gpu_check(d, result, "loading a module");
        }
    }
    *module = d->modules[n];
    return FATTN_OK;
}

/* Finds an entry of an image. If the image has none of that name, finds `general` instead, unless
 * that is "". */
static fattn_status find_entry(fattn_gpu_device *d, const char *image, const char *entry,
                               const char *general, bool *is_general, gpu_function *function)
{
    gpu_module module = NULL;
    pthread_mutex_lock(&d->mutex);
    const fattn_status status = load_locked(d, image, &module);
    pthread_mutex_unlock(&d->mutex);
    if (status) {
        return status;
    }
    int result = d->api->module_function(function, module, entry);
    *is_general = result == d->api->no_function && general[0];
    if (*is_general) {
        result = d->api->module_function(function, module, general);
    }
    if (result == d->api->no_function) {
        return fattn_fail(FATTN_UNSUPPORTED,
                          "%s: image %s has no function %s for a device of version %d.%d",
                          d->vendor->name, image, entry, d->version / 10, d->version % 10);
    }
    return fattn_gpu_check(d, result, "finding a function");
}

/* A query for a function's registers makes the driver load it. */
fattn_status fattn_gpu_resolve_either(fattn_gpu_device *d, const char *image, const char *entry,
                                      const char *general, bool *is_general, gpu_function *function)
{
    int registers = 0;
    const fattn_status status = find_entry(d, image, entry, general, is_general, function);
    return status
               ? status
               : fattn_gpu_check(d, d->api->function_get(&registers, d->api->registers, *function),
                                 "loading a function");
}

fattn_status fattn_gpu_resolve(fattn_gpu_device *d, const char *image, const char *entry,
                               gpu_function *function)
{
    bool is_general;
    return fattn_gpu_resolve_either(d, image, entry, "", &is_general, function);
}

/* --- The device ------------------------------------------------------------------------------- */

int fattn_gpu_count(const fattn_gpu_vendor *vendor)
{
    const char *why = NULL;
    const fattn_gpu_api *const api = vendor->api(&why);
    int count = 0;
    return api && api->device_count(&count) == 0 && count > 0 ? count : 0;
}

/* Takes the caller's current context if it is one of this device, or else the primary context. */
static fattn_status find_context(fattn_gpu_device *d)
{
    int number = -1;
    d->context = NULL;
    fattn_status status =
        fattn_gpu_check(d, d->api->context_current(&d->context), "asking for the context");
    if (!status && d->context) {
        status =
            fattn_gpu_check(d, d->api->context_device(&number), "asking for the context's device");
    }
    if (status || (d->context && number == d->number)) {
        return status;
    }
    status = fattn_gpu_check(d, d->api->primary_retain(&d->context, d->number),
                             "retaining the primary context");
    d->retained = status == FATTN_OK;
    return status;
}

static fattn_status find_attributes(fattn_gpu_device *d)
{
    const fattn_gpu_api *const api = d->api;
    int major = 0, minor = 0, shared = 0, cache = 0;
    const struct {
        int *value, attribute;
    } wanted[] = {{&major, api->major},
                  {&minor, api->minor},
                  {&d->units, api->units},
                  {&shared, api->shared_memory},
                  {&cache, api->shared_cache}};
    fattn_status status = FATTN_OK;
    for (size_t n = 0; !status && n < sizeof wanted / sizeof wanted[0]; n++) {
        status = fattn_gpu_check(
            d, api->device_attribute(wanted[n].value, wanted[n].attribute, d->number),
            "asking for an attribute");
    }
    d->version = 10 * major + minor;
    d->shared_memory = shared;
    d->shared_cache = cache;
    return status;
}

/* Loads image "verbs" and finds its functions. The loaded image also tells the device's instruction
 * set. */
static fattn_status load_verbs(fattn_gpu_device *d)
{
    gpu_module module = NULL;
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    status = load_locked(d, "verbs", &module); /* no lock: no other thread has the device yet */
    status = status ? status
                    : fattn_gpu_check(d, d->vendor->isa(module, d->version, &d->isa),
                                      "asking for the instruction set");
    status = status ? status : fattn_gpu_resolve(d, "verbs", "merge", &d->merge);
    status = status ? status : fattn_gpu_resolve(d, "verbs", "dropout_mask", &d->dropout);
    status = status ? status : fattn_gpu_resolve(d, "verbs", "rows", &d->rows);
    return fattn_gpu_leave_with(d, status);
}

/* A number that memory is unlikely to hold by chance, whichever process has used it before. */
static uint64_t draw_mark(const void *some)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t x = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    x ^= (uint64_t)(uintptr_t)some << 20 ^ (uint64_t)getpid() << 48;
    for (int n = 0; n < 3; n++) { /* xor-shift and multiply by an odd number: a bijection */
        x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
    }
    return x ^ x >> 32;
}

fattn_status fattn_gpu_open(const fattn_gpu_vendor *vendor, int ordinal, void **impl)
{
    const char *why = NULL;
    const fattn_gpu_api *const api = vendor->api(&why);
    int count = 0;
    if (!api) {
        return fattn_fail(FATTN_NO_DEVICE, "%s: no device: %s", vendor->name, why);
    }
    fattn_status status = check(vendor, api, api->device_count(&count), "counting devices");
    if (status) {
        return status;
    }
    if (ordinal >= count) {
        return fattn_fail(FATTN_NO_DEVICE, "%s: there is no device %d: the driver counts %d",
                          vendor->name, ordinal, count);
    }
    const size_t bytes =
        sizeof(fattn_gpu_device) + (size_t)vendor->image_count * sizeof(gpu_module);
    fattn_gpu_device *const d = fattn_memory_alloc(bytes);
    if (!d) {
        return fattn_fail_memory(bytes, "a GPU device");
    }
    memset(d, 0, bytes);
    d->vendor = vendor;
    d->api = api;
    d->mark = draw_mark(d);
    pthread_mutex_init(&d->mutex, NULL);
    status = fattn_gpu_check(d, api->device_get(&d->number, ordinal), "finding a device");
    status = status ? status : find_attributes(d);
    status = status ? status : find_context(d);
    status = status ? status : load_verbs(d);
    if (status) {
        fattn_gpu_close(d);
        return status;
    }
    *impl = d;
    return FATTN_OK;
}

void fattn_gpu_close(void *impl)
{
    fattn_gpu_device *const d = impl;
    gpu_context own;
    if (d->context && d->api->context_push(d->context) == 0) {
        for (int n = 0; n < d->vendor->image_count; n++) {
            if (d->modules[n]) {
                (void)d->api->module_unload(d->modules[n]);
            }
        }
        (void)d->api->context_pop(&own);
    }
    if (d->retained) {
        (void)d->api->primary_release(d->number);
    }
    pthread_mutex_destroy(&d->mutex);
    fattn_memory_free(d);
}

void fattn_gpu_describe(void *impl, fattn_device_info *info)
{
    const fattn_gpu_device *const d = impl;
    size_t memory = 0;
    (void)d->api->device_name(info->name, sizeof info->name, d->number);
    info->name[sizeof info->name - 1] = '\0';
    snprintf(info->isa, sizeof info->isa, d->vendor->isa_format, d->isa);
    info->units = d->units;
    info->fast_memory = d->shared_memory;
    if (d->api->device_memory(&memory, d->number) == 0) {
        info->total_memory = (int64_t)memory;
    }
}

/* Two blocks on a multiprocessor hide each other's latencies. */
void fattn_gpu_limits(void *impl, fattn_limits *limits)
{
    const fattn_gpu_device *const d = impl;
    *limits = (fattn_limits){.fast_memory = d->shared_memory,
                             .parallelism = 2 * (int64_t)d->units,
                             .shared_cache = d->shared_cache,
                             .units = d->units};
}

/* A failure is no error: the devices reach each other already, or cannot, and then the driver
 * copies between them by another path. */
fattn_status fattn_gpu_reach(void *impl, void *other, bool *direct)
{
    enum { ALREADY = 704 }; /* in CUDA and HIP */
    const fattn_gpu_device *const d = impl, *const to = other;
    const fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    const int result = d->api->context_reach(to->context, 0);
    *direct = result == 0 || result == ALREADY;
    return fattn_gpu_leave(d);
}

/* --- Kernel rows ------------------------------------------------------------------------------ */

int64_t fattn_gpu_shared_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)p, (void)tile;
    return fattn_gpu_kernel_of(row)->shared;
}

bool fattn_gpu_kernel_runs(const fattn_gpu_kernel *kernel, int isa)
{
    return isa >= kernel->isa && (!kernel->isa_past || isa < kernel->isa_past) &&
           (!kernel->runs || kernel->runs(isa));
}

const fattn_kernel *fattn_gpu_kernel_at(void *impl, int i, const char **missing)
{
    const fattn_gpu_device *const d = impl;
    for (const fattn_gpu_kernel *const *table = d->vendor->tables; *table; table++) {
        for (const fattn_gpu_kernel *kernel = *table; kernel->row.name; kernel++) {
            if (i-- == 0) {
                *missing = !fattn_gpu_kernel_runs(kernel, d->isa) ? kernel->needs
                           : kernel->maps && !d->api->map_encode  ? "a driver with tensor maps"
                                                                  : NULL;
                return &kernel->row;
            }
        }
    }
    return NULL;
}
