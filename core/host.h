/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions for the tables of backends that compute in host memory: memory, rows, streams, events.
 * Work is done when a call returns, NULL is the only stream, and events read a clock.
 */
#ifndef FATTN_CORE_HOST_H
#define FATTN_CORE_HOST_H

#include <stdbool.h>

#include "core/rows.h"
#include "fattn/fattn.h"

bool fattn_host_reads(void *impl, const void *pointer);
fattn_status fattn_host_alloc(void *impl, size_t bytes, void **memory);
fattn_status fattn_host_free(void *impl, void *memory);
fattn_status fattn_host_copy(void *impl, void *dst, const void *src, size_t bytes,
                             fattn_stream stream);
fattn_status fattn_host_copy_rows(void *impl, const fattn_row_copy *copy, fattn_stream stream);
fattn_status fattn_host_stream_create(void *impl, fattn_stream *stream);
fattn_status fattn_host_stream_destroy(void *impl, fattn_stream stream);
fattn_status fattn_host_stream_synchronize(void *impl, fattn_stream stream);
fattn_status fattn_host_event_create(void *impl, void **event);
void fattn_host_event_destroy(void *impl, void *event);
fattn_status fattn_host_event_record(void *impl, void *event, fattn_stream stream);
fattn_status fattn_host_stream_wait(void *impl, fattn_stream stream, void *event);
fattn_status fattn_host_stream_capture(void *impl, fattn_stream stream, uint64_t *capture);
fattn_status fattn_host_capture_mode(void *impl, int *mode);
fattn_status fattn_host_event_synchronize(void *impl, void *event);
fattn_status fattn_host_event_elapsed(void *impl, void *start, void *stop, double *milliseconds);

/* Moves one row after another, on the calling thread. */
fattn_status fattn_host_rows(void *impl, const fattn_rows_args *jobs, int count,
                             fattn_stream stream);

/* Calls inspect() of backend "reference", which reads any host memory. */
fattn_status fattn_host_inspect(void *impl, const fattn_problem *problem,
                                const fattn_buffers *buffers, const fattn_inspect_args *args);

/* A monotonic clock, in seconds. */
double fattn_host_seconds(void);

/* FATTN_INVALID_ARGUMENT for a stream that is not NULL. */
fattn_status fattn_host_stream_check(fattn_stream stream);

#endif
