/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, streams and events: calls of the driver, each in the device's context. */
#include "backends/gpu/device.h"
#include "core/status.h"

/* True for device memory, and for host memory that the device sees at the same address. */
bool fattn_gpu_reads(void *impl, const void *pointer)
{
    const fattn_gpu_device *const d = impl;
    void *seen = NULL;
    gpu_context own;
    if (d->api->context_push(d->context) != 0) {
        return false;
    }
    const int result = d->api->pointer_attribute(&seen, d->api->device_pointer, pointer);
    (void)d->api->context_pop(&own);
    return result == 0 && seen == pointer;
}

/* Returns from a function that is one driver call in the device's context. */
#define RETURN_CALL(d, call, what)                                                          \
    do {                                                                                    \
        const fattn_status entered = fattn_gpu_enter(d);                                    \
        return entered ? entered                                                            \
                       : fattn_gpu_leave_with(d, fattn_gpu_check(d, (d)->api->call, what)); \
    } while (0)

/* The same for a call that queues work on a stream, which must belong to the device's context.
 * Drivers accept a stream of another context when they wait for it or destroy it. */
#define RETURN_STREAM_CALL(d, stream, call, what)                            \
    do {                                                                     \
        fattn_status status = fattn_gpu_enter(d);                            \
        if (status) {                                                        \
            return status;                                                   \
        }                                                                    \
        status = fattn_gpu_check_stream(d, stream);                          \
        status = status ? status : fattn_gpu_check(d, (d)->api->call, what); \
        return fattn_gpu_leave_with(d, status);                              \
    } while (0)

/* Leaves the context and returns the new object in *result. If leaving fails, it destroys the
 * object by `undo` and leaves *result as it is. */
static fattn_status keep_or_undo(void *impl, fattn_status status, void *thing, void **result,
                                 void (*undo)(void *impl, void *thing))
{
    const fattn_status left = fattn_gpu_leave_with(impl, status);
    if (!left) {
        *result = thing;
    } else if (!status) {
        fattn_reason_hold(left);
        undo(impl, thing);
        fattn_reason_let();
    }
    return left;
}

static void undo_alloc(void *impl, void *memory) { (void)fattn_gpu_free(impl, memory); }

static void undo_stream(void *impl, void *stream) { (void)fattn_gpu_stream_destroy(impl, stream); }

fattn_status fattn_gpu_alloc(void *impl, size_t bytes, void **memory)
{
    const fattn_gpu_device *const d = impl;
    void *made_memory = NULL;
    *memory = NULL;
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    const int result = d->api->memory_alloc(&made_memory, bytes);
    if (result == d->api->out_of_memory) {
        status = fattn_fail_memory((int64_t)bytes, "device memory");
    } else {
        status = fattn_gpu_check(d, result, "allocating memory");
    }
    return keep_or_undo(impl, status, made_memory, memory, undo_alloc);
}

fattn_status fattn_gpu_free(void *impl, void *memory)
{
    const fattn_gpu_device *const d = impl;
    RETURN_CALL(d, memory_free(memory), "freeing memory");
}

fattn_status fattn_gpu_copy(void *impl, void *dst, const void *src, size_t bytes,
                            fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    if (bytes == 0) {
        return FATTN_OK;
    }
    RETURN_STREAM_CALL(d, stream, memory_copy(dst, src, bytes, (gpu_stream)stream), "copying");
}

fattn_status fattn_gpu_copy_rows(void *impl, const fattn_row_copy *copy, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    const fattn_row_copy c = *copy;
    if (c.rows == 1 || (c.to_step == c.bytes && c.from_step == c.bytes)) {
        return fattn_gpu_copy(impl, c.to, c.from, (size_t)(c.rows * c.bytes), stream);
    }
    if (c.rows == 0 || c.bytes == 0) {
        return FATTN_OK;
    }
    if (c.to_step <= INT32_MAX && c.from_step <= INT32_MAX) { /* the most that drivers take */
        RETURN_STREAM_CALL(d, stream,
                           memory_copy_rows(c.to, (size_t)c.to_step, c.from, (size_t)c.from_step,
                                            (size_t)c.bytes, (size_t)c.rows, (gpu_stream)stream),
                           "copying rows");
    }
    fattn_status status = FATTN_OK;
    for (int64_t n = 0; !status && n < c.rows; n++) {
        status = fattn_gpu_copy(impl, (char *)c.to + n * c.to_step,
                                (const char *)c.from + n * c.from_step, (size_t)c.bytes, stream);
    }
    return status;
}

fattn_status fattn_gpu_stream_create(void *impl, fattn_stream *stream)
{
    const fattn_gpu_device *const d = impl;
    gpu_stream made_stream = NULL;
    *stream = NULL;
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    status = fattn_gpu_check(d, d->api->stream_create(&made_stream, 0), "creating a stream");
    return keep_or_undo(impl, status, made_stream, stream, undo_stream);
}

fattn_status fattn_gpu_stream_destroy(void *impl, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    if (!stream) { /* the default stream cannot be destroyed */
        return FATTN_OK;
    }
    RETURN_CALL(d, stream_destroy((gpu_stream)stream), "destroying a stream");
}

fattn_status fattn_gpu_stream_synchronize(void *impl, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    RETURN_CALL(d, stream_synchronize((gpu_stream)stream), "waiting for a stream");
}

fattn_status fattn_gpu_stream_wait(void *impl, fattn_stream stream, void *event)
{
    const fattn_gpu_device *const d = impl;
    RETURN_STREAM_CALL(d, stream, stream_wait((gpu_stream)stream, event, 0),
                       "letting a stream wait for an event");
}

/* The default stream cannot be captured, and a query about it fails while another one is. */
fattn_status fattn_gpu_stream_capture(void *impl, fattn_stream stream, uint64_t *capture)
{
    const fattn_gpu_device *const d = impl;
    int capturing = 0;
    unsigned long long id = 0;
    *capture = 0;
    if ((uintptr_t)stream < FATTN_STREAM_PER_THREAD) {
        return FATTN_OK;
    }
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    status = fattn_gpu_check_stream(d, stream);
    status = status
                 ? status
                 : fattn_gpu_check(d, d->api->stream_capture((gpu_stream)stream, &capturing, &id),
                                   "asking whether a stream is captured");
    *capture = capturing ? id : 0;
    return fattn_gpu_leave_with(d, status);
}

/* The mode belongs to the thread, whichever context is current. */
fattn_status fattn_gpu_capture_mode(void *impl, int *mode)
{
    const fattn_gpu_device *const d = impl;
    return fattn_gpu_check(d, d->api->capture_mode(mode), "setting the mode of captures");
}

fattn_status fattn_gpu_event_create(void *impl, void **event)
{
    const fattn_gpu_device *const d = impl;
    gpu_event made_event = NULL;
    *event = NULL;
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    status = fattn_gpu_check(d, d->api->event_create(&made_event, 0), "creating an event");
    return keep_or_undo(impl, status, made_event, event, fattn_gpu_event_destroy);
}

void fattn_gpu_event_destroy(void *impl, void *event)
{
    const fattn_gpu_device *const d = impl;
    gpu_context own;
    if (d->api->context_push(d->context) == 0) {
        (void)d->api->event_destroy(event);
        (void)d->api->context_pop(&own);
    }
}

fattn_status fattn_gpu_event_record(void *impl, void *event, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    RETURN_STREAM_CALL(d, stream, event_record(event, (gpu_stream)stream), "recording an event");
}

fattn_status fattn_gpu_event_synchronize(void *impl, void *event)
{
    const fattn_gpu_device *const d = impl;
    RETURN_CALL(d, event_synchronize(event), "waiting for an event");
}

fattn_status fattn_gpu_event_elapsed(void *impl, void *start, void *stop, double *milliseconds)
{
    const fattn_gpu_device *const d = impl;
    float elapsed = 0;
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    status = fattn_gpu_check(d, d->api->event_synchronize(start), "waiting for an event");
    status = status ? status
                    : fattn_gpu_check(d, d->api->event_synchronize(stop), "waiting for an event");
    status =
        status ? status
               : fattn_gpu_check(d, d->api->event_elapsed(&elapsed, start, stop), "timing events");
    if (!status) {
        *milliseconds = (double)elapsed;
    }
    return fattn_gpu_leave_with(d, status);
}
