/* SPDX-License-Identifier: Apache-2.0 */
#include "core/abi.h"

#include <string.h>

#include "core/status.h"

/* A struct_size above this is garbage, not a future version; nothing that far is read. */
#define STRUCT_SIZE_MAX 65536

static fattn_status check_size(const void *caller, const char *name, size_t *size)
{
    if (!caller) {
        return fattn_fail(FATTN_NULL_POINTER, "%s is NULL", name);
    }
    memcpy(size, caller, sizeof *size);
    if (*size < sizeof *size || *size > STRUCT_SIZE_MAX) {
        return fattn_fail(FATTN_INVALID_STRUCT, "%s->struct_size is %zu, not sizeof(%s)", name,
                          *size, name);
    }
    return FATTN_OK;
}

fattn_status fattn_abi_read(void *to, size_t size, const void *from, const char *name)
{
    size_t given = 0;
    const fattn_status status = check_size(from, name, &given);
    if (status) {
        return status;
    }
    const unsigned char *const bytes = from;
    for (size_t i = size; i < given; i++) {
        if (bytes[i]) {
            return fattn_fail(
                FATTN_INVALID_STRUCT,
                "%s->struct_size is %zu, this library knows %zu bytes, and byte %zu is in use",
                name, given, size, i);
        }
    }
    memset(to, 0, size);
    memcpy(to, from, given < size ? given : size);
    memcpy(to, &size, sizeof size);
    return FATTN_OK;
}

fattn_status fattn_abi_write(void *to, const void *from, size_t size, const char *name)
{
    size_t given = 0;
    const fattn_status status = check_size(to, name, &given);
    if (status) {
        return status;
    }
    const size_t known = given < size ? given : size;
    memset(to, 0, given);
    memcpy((char *)to + sizeof(size_t), (const char *)from + sizeof(size_t),
           known - sizeof(size_t));
    memcpy(to, &given, sizeof given);
    return FATTN_OK;
}
