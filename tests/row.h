/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel rows of a device that this machine can run, one after another:
 *
 *     const fattn_kernel *row;
 *     for (int at = 0; (row = row_next(device, &at));) {
 */
#ifndef FATTN_TESTS_ROW_H
#define FATTN_TESTS_ROW_H

#include "core/backend.h"

/* The first from number *at on, which is then the number behind it; NULL: there are no more. */
static inline const fattn_kernel *row_next(const fattn_device *device, int *at)
{
    const fattn_kernel *row;
    const char *missing = NULL;
    do {
        row = device->backend->kernel(device->impl, (*at)++, &missing);
    } while (row && missing);
    return row;
}

#endif
