/* SPDX-License-Identifier: Apache-2.0 */
/* Failing with a reason: `return fattn_fail(FATTN_INVALID_SHAPE, "dim is %lld ...", ...)`. */
#ifndef FATTN_CORE_STATUS_H
#define FATTN_CORE_STATUS_H

#include "fattn/fattn.h"

#if defined(__GNUC__)
#define FATTN_PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define FATTN_PRINTF(string, first)
#endif

/* Stores the sentence as this thread's reason and returns status. */
fattn_status fattn_fail(fattn_status status, const char *format, ...) FATTN_PRINTF(2, 3);

/* fattn_fail for an allocation of bytes that came back NULL. */
fattn_status fattn_fail_memory(int64_t bytes, const char *what);

#endif
