/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L

#include "core/host.h"

#include <string.h>
#include <time.h>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/memory.h"
#include "core/status.h"

fattn_status fattn_host_stream_check(fattn_stream stream)
{
    if (stream) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "stream is %p: this device has no streams but NULL", stream);
    }
    return FATTN_OK;
}

bool fattn_host_reads(void *impl, const void *pointer)
{
    (void)impl, (void)pointer;
    return true;
}

fattn_status fattn_host_alloc(void *impl, size_t bytes, void **memory)
{
    (void)impl;
    *memory = fattn_memory_alloc_aligned(bytes);
    return *memory ? FATTN_OK : fattn_fail_memory((int64_t)bytes, "device memory");
}

fattn_status fattn_host_free(void *impl, void *memory)
{
    (void)impl;
    fattn_memory_free_aligned(memory);
    return FATTN_OK;
}

fattn_status fattn_host_copy(void *impl, void *dst, const void *src, size_t bytes,
                             fattn_stream stream)
{
    (void)impl;
    const fattn_status status = fattn_host_stream_check(stream);
    if (status == FATTN_OK && bytes > 0) { /* memmove() must not get NULL, even for 0 bytes */
        memmove(dst, src, bytes);
    }
    return status;
}

fattn_status fattn_host_copy_rows(void *impl, const fattn_row_copy *copy, fattn_stream stream)
{
    const bool joined = copy->to_step == copy->bytes && copy->from_step == copy->bytes;
    const int64_t rows = joined ? 1 : copy->rows;
    const size_t bytes = (size_t)(joined ? copy->rows * copy->bytes : copy->bytes);
    fattn_status status = FATTN_OK;
    for (int64_t n = 0; !status && n < rows; n++) {
        status = fattn_host_copy(impl, (char *)copy->to + n * copy->to_step,
                                 (const char *)copy->from + n * copy->from_step, bytes, stream);
    }
    return status;
}

fattn_status fattn_host_stream_create(void *impl, fattn_stream *stream)
{
    (void)impl;
    *stream = NULL;
    return FATTN_OK;
}

fattn_status fattn_host_stream_destroy(void *impl, fattn_stream stream)
{
    (void)impl;
    return fattn_host_stream_check(stream);
}

fattn_status fattn_host_stream_synchronize(void *impl, fattn_stream stream)
{
    (void)impl;
    return fattn_host_stream_check(stream);
}

fattn_status fattn_host_stream_wait(void *impl, fattn_stream stream, void *event)
{
    (void)impl, (void)event;
    return fattn_host_stream_check(stream);
}

fattn_status fattn_host_stream_capture(void *impl, fattn_stream stream, uint64_t *capture)
{
    (void)impl;
    *capture = 0;
    return fattn_host_stream_check(stream);
}

fattn_status fattn_host_capture_mode(void *impl, int *mode)
{
    (void)impl, (void)mode;
    return FATTN_OK;
}

/* An event is the time at which it was recorded; a time of zero means that it has not been. */
fattn_status fattn_host_event_create(void *impl, void **event)
{
    (void)impl;
    struct timespec *const time = fattn_memory_alloc(sizeof *time);
    *event = time;
    if (!time) {
        return fattn_fail_memory(sizeof *time, "an event");
    }
    memset(time, 0, sizeof *time);
    return FATTN_OK;
}

void fattn_host_event_destroy(void *impl, void *event)
{
    (void)impl;
    fattn_memory_free(event);
}

fattn_status fattn_host_event_record(void *impl, void *event, fattn_stream stream)
{
    (void)impl;
    const fattn_status status = fattn_host_stream_check(stream);
    if (status == FATTN_OK) {
        clock_gettime(CLOCK_MONOTONIC, event);
    }
    return status;
}

double fattn_host_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

fattn_status fattn_host_event_synchronize(void *impl, void *event)
{
    (void)impl, (void)event;
    return FATTN_OK;
}

static bool recorded(const struct timespec *time) { return time->tv_sec || time->tv_nsec; }

fattn_status fattn_host_event_elapsed(void *impl, void *start, void *stop, double *milliseconds)
{
    (void)impl;
    const struct timespec *const from = start;
    const struct timespec *const to = stop;
    if (!recorded(from) || !recorded(to)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "%s has not been recorded",
                          recorded(from) ? "stop" : "start");
    }
    *milliseconds =
        1e3 * (double)(to->tv_sec - from->tv_sec) + 1e-6 * (double)(to->tv_nsec - from->tv_nsec);
    return FATTN_OK;
}

static void copy_row(const fattn_rows_args *a, void *to, const void *from, const float *plus)
{
    const size_t bytes = (size_t)(a->channels * fattn_dtype_size(a->dtype_to));
    if (!from) {
        memset(to, 0, bytes);
    } else if (plus && a->dtype_to == FATTN_F32) {
        for (int64_t c = 0; c < a->channels; c++) {
            ((float *)to)[c] = ((const float *)from)[c] + plus[c];
        }
    } else if (a->dtype_from == a->dtype_to) {
        memcpy(to, from, bytes);
    } else {
        const float *const wide = from;
        uint16_t *const narrow = to;
        for (int64_t c = 0; c < a->channels; c++) {
            const float x = plus ? wide[c] + plus[c] : wide[c];
            narrow[c] = a->dtype_to == FATTN_F16 ? fattn_f16_from_f32(x) : fattn_bf16_from_f32(x);
        }
    }
}

static void copy_rows(const fattn_rows_args *a)
{
    const int64_t to_size = fattn_dtype_size(a->dtype_to);
    const int64_t from_size = fattn_dtype_size(a->dtype_from);
    for (int64_t n = 0; n < a->batch * a->rows * a->heads; n++) {
        const int64_t h = n % a->heads, i = n / a->heads % a->rows, b = n / a->heads / a->rows;
        const fattn_strides *const t = &a->to_stride, *const f = &a->from_stride;
        const int64_t to_row = a->to_rows ? a->to_rows[i] : i;
        const int64_t from_row = a->from_rows ? a->from_rows[i] : i;
        const int64_t to = b * t->batch + to_row * t->seq + h * t->head;
        const int64_t from = b * f->batch + from_row * f->seq + h * f->head;
        copy_row(a, (char *)a->to + to * to_size,
                 a->from ? (const char *)a->from + from * from_size : NULL,
                 a->plus ? a->plus + from : NULL);
    }
}

fattn_status fattn_host_rows(void *impl, const fattn_rows_args *jobs, int count,
                             fattn_stream stream)
{
    (void)impl;
    const fattn_status status = fattn_host_stream_check(stream);
    for (int n = 0; !status && n < count; n++) {
        copy_rows(&jobs[n]);
    }
    return status;
}

fattn_status fattn_host_inspect(void *impl, const fattn_problem *problem,
                                const fattn_buffers *buffers, const fattn_inspect_args *args)
{
    (void)impl;
    return fattn_backend_oracle()->inspect(NULL, problem, buffers, args);
}
