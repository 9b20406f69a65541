/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of a GPU for test programs: what fails is a failed check, and the program goes on.
 */
#ifndef FATTN_TESTS_DEVICE_MEMORY_H
#define FATTN_TESTS_DEVICE_MEMORY_H

#include <stdint.h>
#include <stdlib.h>

#include "fattn/fattn.h"
#include "tests/tap.h"

static inline bool device_good(fattn_status status, const char *what)
{
    if (status) {
        tap_check(false, "%s: %s", what, fattn_last_reason());
    }
    return status == FATTN_OK;
}

static inline void *device_memory(fattn_device *device, size_t bytes)
{
    void *made = NULL;
    device_good(fattn_device_malloc(device, bytes, &made), "memory");
    return made;
}

/* Waits until the copy, in either direction, is through. */
static inline void device_copy(fattn_device *device, void *to, const void *from, size_t bytes)
{
    fattn_stream none = NULL;
    device_good(fattn_device_copy(device, to, from, bytes, none), "copying");
    device_good(fattn_stream_synchronize(device, none), "copying");
}

/* Halves of -0.5 .. 0.5. */
static inline void device_fill(fattn_device *device, void *to, size_t count, uint32_t seed)
{
    uint16_t *const host = malloc(2 * count);
    if (!host) {
        tap_bail("out of memory");
    }
    for (size_t n = 0; n < count; n++) {
        seed = seed * 1664525u + 1013904223u;
        host[n] = (uint16_t)(0x3000 + (seed >> 22) + (seed >> 8 & 1 ? 0x8000 : 0));
    }
    device_copy(device, to, host, 2 * count);
    free(host);
}

#endif
