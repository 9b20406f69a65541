/* SPDX-License-Identifier: Apache-2.0 */
#include "core/abi.h"

#include <string.h>

#include "core/status.h"

/* A struct_size above this is taken for an error, not for a future version, and is not read. */
#define STRUCT_SIZE_MAX 65536

static size_t last_size(const fattn_abi *abi)
{
    size_t last = 0;
    for (int i = 0; i < FATTN_ABI_VERSIONS && abi->sizes[i]; i++) {
        last = abi->sizes[i];
    }
    return last;
}

/* Reads the caller's struct_size. It must be the size of a version, or above that of the last. */
static fattn_status check_size(const void *caller, const fattn_abi *abi, size_t *size)
{
    const size_t last = last_size(abi);
    if (!caller) {
        return fattn_fail(FATTN_NULL_POINTER, "%s is NULL", abi->name);
    }
    memcpy(size, caller, sizeof *size);
    if (*size == 0) {
        return fattn_fail(FATTN_INVALID_STRUCT, "%s->struct_size is 0; call %s_init() first",
                          abi->name, abi->name);
    }
    bool known = false;
    for (int i = 0; i < FATTN_ABI_VERSIONS && abi->sizes[i]; i++) {
        known = known || *size == abi->sizes[i];
    }
    if (!known && (*size < last || *size > STRUCT_SIZE_MAX)) {
        return fattn_fail(FATTN_INVALID_STRUCT,
                          "%s->struct_size is %zu, the size of no version; this library has %zu",
                          abi->name, *size, last);
    }
    return FATTN_OK;
}

/* Refuses a larger struct unless the bytes that this library does not know are zero. */
static fattn_status check_tail(const void *caller, const char *name, size_t given, size_t size)
{
    const unsigned char *const bytes = caller;
    for (size_t i = size; i < given; i++) {
        if (bytes[i]) {
            return fattn_fail(
                FATTN_INVALID_STRUCT,
                "%s->struct_size is %zu, this library knows %zu bytes, and byte %zu is in use",
                name, given, size, i);
        }
    }
    return FATTN_OK;
}

fattn_status fattn_abi_read_grown(void *to, const fattn_abi *abi, const void *from)
{
    const size_t size = last_size(abi);
    size_t given = 0;
    fattn_status status = check_size(from, abi, &given);
    status = status ? status : check_tail(from, abi->name, given, size);
    if (status) {
        return status;
    }
    if (given < size) {
        abi->init(to);
    }
    memcpy(to, from, given < size ? given : size);
    memcpy(to, &size, sizeof size);
    return FATTN_OK;
}

fattn_status fattn_abi_read(void *to, size_t size, const void *from, const char *name)
{
    const fattn_abi abi = {.name = name, .sizes = {size}};
    return fattn_abi_read_grown(to, &abi, from);
}

fattn_status fattn_abi_write(void *to, const void *from, size_t size, const char *name)
{
    const fattn_abi abi = {.name = name, .sizes = {size}};
    size_t given = 0;
    const fattn_status status = check_size(to, &abi, &given);
    if (status) {
        return status;
    }
    memset(to, 0, given);
    memcpy((char *)to + sizeof given, (const char *)from + sizeof given, size - sizeof given);
    memcpy(to, &given, sizeof given);
    return FATTN_OK;
}
