/* SPDX-License-Identifier: Apache-2.0 */
/*
 * XLA's foreign function interface, as much of it as a handler needs: the binary interface of
 * version 0.x, whose structs begin with their size and grow at their end. Written down here so that
 * building the wheel needs no JAX; tests/python/test_jax.py compares it with the header that jaxlib
 * brings.
 */
#ifndef FATTN_PYTHON_XLA_H
#define FATTN_PYTHON_XLA_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_METADATA = 1 };                            /* extensions */
enum { XLA_INVALID_ARGUMENT = 3, XLA_INTERNAL = 13 }; /* codes of errors */
enum { XLA_EXECUTE = 3 };                             /* stages */
enum { XLA_API_MAJOR = 0, XLA_API_MINOR = 1 }; /* the oldest version with what is used here */

typedef struct xla_error xla_error;
typedef struct xla_context xla_context;

typedef struct xla_extension {
    size_t struct_size;
    int type;
    struct xla_extension *next;
} xla_extension;

typedef struct xla_api_version {
    size_t struct_size;
    xla_extension *extension;
    int major, minor; /* set by the handler when it is asked for metadata */
} xla_api_version;

typedef struct xla_metadata {
    size_t struct_size;
    xla_api_version api_version;
    uint32_t traits;
} xla_metadata;

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

typedef struct xla_error_create_args {
    size_t struct_size;
    xla_extension *extension;
    const char *message;
    int code;
} xla_error_create_args;

typedef struct xla_stream_get_args {
    size_t struct_size;
    xla_extension *extension;
    xla_context *context;
    void *stream; /* set by XLA */
} xla_stream_get_args;

typedef struct xla_device_ordinal_get_args {
    size_t struct_size;
    xla_extension *extension;
    xla_context *context;
    int32_t ordinal; /* set by XLA */
} xla_device_ordinal_get_args;

typedef struct xla_api {
    size_t struct_size;
    xla_extension *extension;
    xla_api_version version;
    const void *internal;
    xla_error *(*error_create)(xla_error_create_args *args);
    void *unused1[3]; /* errors' text and end, registering */
    xla_error *(*stream_get)(xla_stream_get_args *args);
    void *unused2[12]; /* types, state, memory, threads, futures, runs */
    xla_error *(*device_ordinal_get)(xla_device_ordinal_get_args *args);
} xla_api;

typedef struct xla_buffer {
    size_t struct_size;
    xla_extension *extension;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer;

typedef struct xla_values { /* arguments, or results */
    size_t struct_size;
    xla_extension *extension;
    int64_t size;
    int *types;
    void **values; /* xla_buffer, all of them */
} xla_values;

typedef struct xla_text {
    const char *text;
    size_t length;
} xla_text;

typedef struct xla_array {
    int dtype;
    size_t size;
    void *data;
} xla_array;

typedef struct xla_attributes {
    size_t struct_size;
    xla_extension *extension;
    int64_t size;
    int *types;
    xla_text **names; /* in alphabetical order */
    void **values;    /* xla_array or xla_text, as their types say */
} xla_attributes;

typedef struct xla_call {
    size_t struct_size;
    xla_extension *extension;
    const xla_api *api;
    xla_context *context;
    int stage;
    xla_values arguments, results;
    xla_attributes attributes;
} xla_call;

#endif
