/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend that a test program is to run on: FATTN_BACKEND's, as suite gpu sets it, or NULL,
 * which leaves the choice to the program.
 */
#ifndef FATTN_TESTS_DEVICE_H
#define FATTN_TESTS_DEVICE_H

#include <stdlib.h>

#include "fattn/fattn.h"
#include "tests/tap.h"

static inline const char *device_named(void) { return getenv("FATTN_BACKEND"); }

/* Whether the backend has no device; then prints a skip with the reason. A device that is present
 * but cannot be opened is a failure, not a skip. */
static inline bool device_absent(const char *named)
{
    fattn_device *device = NULL;
    const bool absent = named && fattn_device_open(named, &device) == FATTN_NO_DEVICE;
    fattn_device_close(device);
    if (absent) {
        tap_skip_all(fattn_last_reason());
    }
    return absent;
}

#endif
