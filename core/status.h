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

/* Replaces every character that is not printable ASCII by '?'. Reasons and log lines quote text of
 * others (file names, drivers), and end up in terminals and log files. */
void fattn_text_clean(char *text);

/* Cleanup after a failure may fail too, and must not replace the first failure's reason.
 * fattn_reason_hold() with that failure's status keeps its reason until the matching
 * fattn_reason_let(); with FATTN_OK it keeps nothing. Holds nest like brackets; while an outer one
 * keeps a reason, inner ones change nothing. */
void fattn_reason_hold(fattn_status status);
void fattn_reason_let(void);

/* Fails with `status` if value is not in low..high; `name` is for the reason. */
fattn_status fattn_check_range(const char *name, int64_t value, int64_t low, int64_t high,
                               fattn_status status);

/* Fails with FATTN_OUT_OF_MEMORY: there were no `bytes` bytes for `what`. */
fattn_status fattn_fail_memory(int64_t bytes, const char *what);

#endif
