/* SPDX-License-Identifier: Apache-2.0 */
/* Small functions of 64-bit integers. */
#ifndef FATTN_CORE_INTEGER_H
#define FATTN_CORE_INTEGER_H

#include <stdint.h>

#include "core/host_device.h"

FATTN_HD int64_t fattn_min64(int64_t a, int64_t b) { return a < b ? a : b; }

FATTN_HD int64_t fattn_max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* a / b rounded up; a >= 0, b > 0. Cannot overflow. */
FATTN_HD int64_t fattn_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* a / b rounded down; b > 0. */
FATTN_HD int64_t fattn_floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

/* a mod b, at least 0; b > 0. */
FATTN_HD int64_t fattn_modulo(int64_t a, int64_t b)
{
    const int64_t rest = a % b;
    return rest < 0 ? rest + b : rest;
}

#endif
