/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions of devices, streams and events: they check their arguments and call the
 * backend. */
#include <string.h>

#include "core/abi.h"
#include "core/backend.h"
#include "core/cache.h"
#include "core/env.h"
#include "core/log.h"
#include "core/memory.h"
#include "core/status.h"

void fattn_device_options_init(fattn_device_options *options)
{
    memset(options, 0, sizeof *options);
    options->struct_size = sizeof *options;
}

fattn_status fattn_device_options_refuse(const fattn_device_options *options, const char *backend)
{
    const struct {
        const char *name;
        bool given;
    } fields[] = {
        {"threads", options->threads != 0},
        {"isa", options->isa != NULL},
        {"cpus", options->cpus != NULL},
        {"engine", options->engine != FATTN_ENGINE_DEFAULT},
        {"parallel_for", options->parallel_for != NULL},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].given) {
            return fattn_fail(FATTN_UNSUPPORTED, "backend %s has no option %s", backend,
                              fields[i].name);
        }
    }
    return FATTN_OK;
}

/* Refuses options that are wrong on every device. */
static fattn_status check_options(const fattn_device_options *o)
{
    const bool own = o->engine == FATTN_ENGINE_DEFAULT || o->engine == FATTN_ENGINE_OWN;
    if (o->threads < 0 || o->threads > FATTN_THREADS_MAX) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "threads is %lld, not 0..%d",
                          (long long)o->threads, FATTN_THREADS_MAX);
    }
    if (!own && o->engine != FATTN_ENGINE_OPENMP) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "engine is %d, no fattn_engine", (int)o->engine);
    }
    if (o->reserved) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "reserved is %u, not 0", (unsigned)o->reserved);
    }
    if (o->parallel_for && o->engine != FATTN_ENGINE_DEFAULT) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "engine is %d beside a parallel_for, which needs the default engine",
                          (int)o->engine);
    }
    if (!o->parallel_for && o->parallel_user) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "parallel_user is %p without a parallel_for",
                          o->parallel_user);
    }
    if (!o->allocate != !o->release || (!o->allocate && o->allocator_user)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is given without %s",
                          o->allocate  ? "allocate"
                          : o->release ? "release"
                                       : "allocator_user",
                          o->allocate ? "release" : "allocate");
    }
    if (o->cpus && (o->parallel_for || !own)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "cpus is \"%.64s\", but the threads are not the library's own", o->cpus);
    }
    return FATTN_OK;
}

static fattn_status open_on(const fattn_backend *backend, int ordinal,
                            const fattn_device_options *options, fattn_device **device)
{
    fattn_device *const opened = fattn_memory_alloc(sizeof *opened);
    if (!opened) {
        return fattn_fail_memory(sizeof *opened, "a device");
    }
    *opened = (fattn_device){.backend = backend,
                             .ordinal = ordinal,
                             .references = 1,
                             .allocate = options->allocate,
                             .release = options->release,
                             .allocator_user = options->allocator_user};
    const fattn_status status = backend->open(ordinal, options, &opened->impl);
    if (status) {
        fattn_memory_free(opened);
        return status;
    }
    *device = opened;
    return FATTN_OK;
}

/* Opens the first device that can be used, in the order of backends. It skips devices for which
 * this build has no code, that lack an option or do not work. Out of memory ends the search:
 * another device would fail likewise. */
static fattn_status open_auto(const fattn_device_options *options, fattn_device **device)
{
    const fattn_backend *backend;
    fattn_status status = FATTN_OK;
    for (int i = 0; (backend = fattn_backend_at(i)); i++) {
        const int count = backend->by_name ? 0 : backend->count();
        for (int ordinal = 0; ordinal < count; ordinal++) {
            status = open_on(backend, ordinal, options, device);
            if (status == FATTN_OK || status == FATTN_OUT_OF_MEMORY) {
                return status;
            }
            if (fattn_log_wants(1)) {
                fattn_log("auto skips %s:%d: %s", backend->name, ordinal, fattn_last_reason());
            }
        }
    }
    return status ? status : fattn_fail(FATTN_NO_DEVICE, "auto found no device");
}

fattn_status fattn_device_open_with(const char *spec, const fattn_device_options *options,
                                    fattn_device **device)
{
    if (!device) {
        return fattn_fail(FATTN_NULL_POINTER, "device is NULL");
    }
    *device = NULL;
    const fattn_backend *backend = NULL;
    int ordinal = 0;
    fattn_device_options wanted;
    fattn_device_options_init(&wanted);
    fattn_status status = FATTN_OK;
    if (options) {
        status = fattn_abi_read(&wanted, sizeof wanted, options, "fattn_device_options");
        status = status ? status : check_options(&wanted);
    }
    status = status ? status : fattn_backend_find(spec, &backend, &ordinal);
    if (status) {
        return status;
    }
    return backend ? open_on(backend, ordinal, &wanted, device) : open_auto(&wanted, device);
}

fattn_status fattn_device_open(const char *spec, fattn_device **device)
{
    return fattn_device_open_with(spec, NULL, device);
}

fattn_device *fattn_device_retain(fattn_device *device)
{
    __atomic_fetch_add(&device->references, 1, __ATOMIC_RELAXED);
    return device;
}

void fattn_device_drop(fattn_device *device)
{
    if (device && __atomic_fetch_sub(&device->references, 1, __ATOMIC_ACQ_REL) == 1) {
        device->backend->close(device->impl);
        fattn_memory_free(device);
    }
}

void fattn_device_close(fattn_device *device)
{
    if (device) {
        fattn_cache_forget(device);
        fattn_device_drop(device);
    }
}

static fattn_status require(const void *argument, const char *name)
{
    return argument ? FATTN_OK : fattn_fail(FATTN_NULL_POINTER, "%s is NULL", name);
}

void fattn_device_info_init(fattn_device_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

fattn_status fattn_device_get_info(const fattn_device *device, fattn_device_info *info)
{
    fattn_device *opened = NULL;
    fattn_status status = require(info, "info");
    if (!status && !device) {
        status = fattn_device_acquire(&opened);
        device = opened;
    }
    if (status) {
        return status;
    }
    fattn_device_info known;
    memset(&known, 0, sizeof known);
    strncpy(known.backend, device->backend->name, sizeof known.backend - 1);
    known.ordinal = device->ordinal;
    known.host_memory = device->backend->host_memory;
    device->backend->describe(device->impl, &known);
    fattn_device_drop(opened);
    return fattn_abi_write(info, &known, sizeof known, "fattn_device_info");
}

fattn_status fattn_device_take(const fattn_device *device, size_t bytes, fattn_stream stream,
                               void **memory)
{
    if (!device->allocate) {
        return device->backend->alloc(device->impl, bytes, memory);
    }
    *memory = device->allocate(device->allocator_user, bytes, stream);
    if (!*memory) {
        return fattn_fail(FATTN_OUT_OF_MEMORY, "the device's allocate() gave NULL for %zu bytes",
                          bytes);
    }
    if ((uintptr_t)*memory % FATTN_MEMORY_ALIGNMENT) {
        const fattn_status status =
            fattn_fail(FATTN_MISALIGNED, "the device's allocate() gave %p, not a multiple of %d",
                       *memory, FATTN_MEMORY_ALIGNMENT);
        device->release(device->allocator_user, *memory);
        *memory = NULL;
        return status;
    }
    return FATTN_OK;
}

fattn_status fattn_device_give(const fattn_device *device, void *memory)
{
    if (!device->release) {
        return device->backend->free(device->impl, memory);
    }
    device->release(device->allocator_user, memory);
    return FATTN_OK;
}

fattn_status fattn_device_malloc(fattn_device *device, size_t bytes, void **memory)
{
    fattn_status status = require(memory, "memory");
    if (status) {
        return status;
    }
    *memory = NULL;
    if (bytes > INT64_MAX) {
        return fattn_fail(FATTN_OVERFLOW, "bytes is %zu, 2^63 or more", bytes);
    }
    status = fattn_device_acquire(&device);
    if (!status) {
        status = bytes ? fattn_device_take(device, bytes, NULL, memory) : FATTN_OK;
        fattn_device_drop(device);
    }
    return status;
}

fattn_status fattn_device_free(fattn_device *device, void *memory)
{
    if (!memory) {
        return FATTN_OK;
    }
    fattn_status status = fattn_device_acquire(&device);
    if (!status) {
        status = fattn_device_give(device, memory);
        fattn_device_drop(device);
    }
    return status;
}

fattn_status fattn_device_copy(fattn_device *device, void *dst, const void *src, size_t bytes,
                               fattn_stream stream)
{
    fattn_status status = bytes ? require(dst, "dst") : FATTN_OK;
    status = status || !bytes ? status : require(src, "src");
    status = status ? status : fattn_device_acquire(&device);
    if (!status) {
        status = device->backend->copy(device->impl, dst, src, bytes, stream);
        fattn_device_drop(device);
    }
    return status;
}

fattn_status fattn_stream_create(fattn_device *device, fattn_stream *stream)
{
    fattn_status status = require(stream, "stream");
    if (status) {
        return status;
    }
    *stream = NULL;
    status = fattn_device_acquire(&device);
    if (!status) {
        status = device->backend->stream_create(device->impl, stream);
        fattn_device_drop(device);
    }
    return status;
}

fattn_status fattn_stream_destroy(fattn_device *device, fattn_stream stream)
{
    if (!stream) {
        return FATTN_OK;
    }
    fattn_status status = fattn_device_acquire(&device);
    if (!status) {
        status = device->backend->stream_destroy(device->impl, stream);
        fattn_device_drop(device);
    }
    return status;
}

fattn_status fattn_stream_synchronize(fattn_device *device, fattn_stream stream)
{
    fattn_status status = fattn_device_acquire(&device);
    if (!status) {
        status = device->backend->stream_synchronize(device->impl, stream);
        fattn_device_drop(device);
    }
    return status;
}

fattn_status fattn_event_create(fattn_device *device, fattn_event **event)
{
    fattn_status status = require(event, "event");
    if (status) {
        return status;
    }
    *event = NULL;
    status = fattn_device_acquire(&device);
    if (status) {
        return status;
    }
    fattn_event *const created = fattn_memory_alloc(sizeof *created);
    if (!created) {
        fattn_device_drop(device);
        return fattn_fail_memory(sizeof *created, "an event");
    }
    status = device->backend->event_create(device->impl, &created->impl);
    if (status) {
        fattn_memory_free(created);
        fattn_device_drop(device);
        return status;
    }
    created->device = device; /* retained until the event is destroyed */
    *event = created;
    return FATTN_OK;
}

void fattn_event_destroy(fattn_event *event)
{
    if (event) {
        event->device->backend->event_destroy(event->device->impl, event->impl);
        fattn_device_drop(event->device);
        fattn_memory_free(event);
    }
}

fattn_status fattn_event_record(fattn_event *event, fattn_stream stream)
{
    const fattn_status status = require(event, "event");
    return status ? status
                  : event->device->backend->event_record(event->device->impl, event->impl, stream);
}

fattn_status fattn_event_wait(fattn_event *event, fattn_stream stream)
{
    const fattn_status status = require(event, "event");
    return status ? status
                  : event->device->backend->stream_wait(event->device->impl, stream, event->impl);
}

fattn_status fattn_event_synchronize(fattn_event *event)
{
    const fattn_status status = require(event, "event");
    return status ? status
                  : event->device->backend->event_synchronize(event->device->impl, event->impl);
}

fattn_status fattn_event_elapsed(fattn_event *start, fattn_event *stop, double *milliseconds)
{
    fattn_status status = require(start, "start");
    status = status ? status : require(stop, "stop");
    status = status ? status : require(milliseconds, "milliseconds");
    if (status) {
        return status;
    }
    if (start->device != stop->device) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "start and stop are events of two devices");
    }
    return start->device->backend->event_elapsed(start->device->impl, start->impl, stop->impl,
                                                 milliseconds);
}
