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

/* Puts '?' for whatever is not printable ASCII. Reasons and log lines quote what others wrote, and
 * end up in terminals and log files. */
void fattn_text_clean(char *text);

/* Cleaning up after a failure may fail too. Holding with that failure's status keeps its reason
 * until that hold is let go; a hold with FATTN_OK keeps none. Holds nest: each is let go once, and
 * one inside another does not end it. */
void fattn_reason_hold(fattn_status status);
void fattn_reason_let(void);

/* Fails with the status where a number is not in low..high. */
fattn_status fattn_check_range(const char *name, int64_t value, int64_t low, int64_t high,
                               fattn_status status);

/* fattn_fail for an allocation of bytes that came back NULL. */
fattn_status fattn_fail_memory(int64_t bytes, const char *what);

#endif
