/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions that XLA calls for fattn.jax: attention on the buffers of a compiled program. The
 * program has the fattn_problem as an attribute, and for each argument and result its offset in
 * fattn_buffers. So this file need not know what they mean, and a program may be saved and run in
 * another process.
 */
#include "xla.h"

#include <fattn/fattn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define DEVICES_MAX 64
#define ROOM 4096 /* for a fattn_buffers of this or a later library */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[24];
    fattn_device *device;
} devices[DEVICES_MAX]; /* under mutex; kept open */

static xla_error *fail(const xla_api *api, int code, const char *message)
{
    xla_error_create_args args = {.struct_size = sizeof args, .message = message, .code = code};
    return api->error_create(&args);
}

static xla_error *fail_with_reason(const xla_api *api)
{
    return fail(api, XLA_INVALID_ARGUMENT, fattn_last_reason());
}

static const void *attribute(const xla_call *call, const char *name)
{
    const xla_attributes *const a = &call->attributes;
    for (int64_t i = 0; i < a->size; i++) {
        if (a->names[i]->length == strlen(name) &&
            memcmp(a->names[i]->text, name, a->names[i]->length) == 0) {
            return a->values[i];
        }
    }
    return NULL;
}

/* The device that a program's attribute names; on a GPU, with the ordinal of the running device. */
static xla_error *find_device(const xla_call *call, const xla_text *backend, int on_gpu,
                              fattn_device **device)
{
    xla_device_ordinal_get_args ordinal = {.struct_size = sizeof ordinal, .context = call->context};
    if (on_gpu && call->api->struct_size >= sizeof *call->api) { /* older: the first */
        xla_error *const error = call->api->device_ordinal_get(&ordinal);
        if (error) {
            return error;
        }
    }
    char name[sizeof devices[0].name];
    snprintf(name, sizeof name, on_gpu ? "%.*s:%d" : "%.*s", (int)backend->length, backend->text,
             (int)ordinal.ordinal);
    fattn_status status = FATTN_OK;
    *device = NULL;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < DEVICES_MAX && !*device && !status; i++) {
        if (!devices[i].device) {
            status = fattn_device_open(name, &devices[i].device);
            memcpy(devices[i].name, name, sizeof name);
        }
        if (strcmp(devices[i].name, name) == 0) {
            *device = devices[i].device;
        }
    }
    pthread_mutex_unlock(&mutex);
    if (status) {
        return fail_with_reason(call->api);
    }
    return *device ? NULL : fail(call->api, XLA_INTERNAL, "more devices than are kept open");
}

static void place(unsigned char *buffers, const int64_t *fields, const xla_values *values)
{
    for (int64_t i = 0; i < values->size; i++) {
        memcpy(buffers + fields[i], &((const xla_buffer *)values->values[i])->data, sizeof(void *));
    }
}

static xla_error *run(const xla_call *call, int on_gpu)
{
    const xla_array *const problem = attribute(call, "problem"); /* bytes of a fattn_problem */
    const xla_array *const fields = attribute(call, "fields");   /* offsets in fattn_buffers */
    const xla_text *const backend = attribute(call, "backend");
    const int64_t count = call->arguments.size + call->results.size;
    if (!problem || !fields || !backend || (int64_t)fields->size != count) {
        return fail(call->api, XLA_INVALID_ARGUMENT, "not a call of fattn.jax");
    }
    union {
        fattn_buffers buffers;
        unsigned char bytes[ROOM];
    } memory;
    fattn_buffers_init(&memory.buffers);
    const int64_t *const at = fields->data;
    for (int64_t i = 0; i < count; i++) {
        if (at[i] < 0 || at[i] > (int64_t)(sizeof(fattn_buffers) - sizeof(void *))) {
            return fail(call->api, XLA_INVALID_ARGUMENT, "a field outside fattn_buffers");
        }
    }
    place(memory.bytes, at, &call->arguments);
    place(memory.bytes, at + call->arguments.size, &call->results);

    fattn_device *device = NULL;
    xla_error *error = find_device(call, backend, on_gpu, &device);
    xla_stream_get_args stream = {.struct_size = sizeof stream, .context = call->context};
    if (!error && on_gpu) {
        error = call->api->stream_get(&stream);
    }
    if (error) {
        return error;
    }
    return fattn_attention(device, problem->data, &memory.buffers, stream.stream)
               ? fail_with_reason(call->api)
               : NULL;
}

static xla_error *handle(const xla_call *call, int on_gpu)
{
    if (call->extension && call->extension->type == XLA_METADATA) {
        xla_metadata *const metadata = ((xla_metadata_extension *)call->extension)->metadata;
        metadata->api_version.major = XLA_API_MAJOR;
        metadata->api_version.minor = XLA_API_MINOR;
        return NULL;
    }
    return call->stage == XLA_EXECUTE ? run(call, on_gpu) : NULL;
}

FATTN_API xla_error *fattn_xla_host(const xla_call *call);
FATTN_API xla_error *fattn_xla_gpu(const xla_call *call);

xla_error *fattn_xla_host(const xla_call *call) { return handle(call, 0); }

xla_error *fattn_xla_gpu(const xla_call *call) { return handle(call, 1); }
