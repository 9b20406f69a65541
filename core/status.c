/* SPDX-License-Identifier: Apache-2.0 */
#include "core/status.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Long enough for a sentence with a name and three 64-bit numbers. */
static _Thread_local char reason[512];
static _Thread_local int holds;   /* calls of fattn_reason_hold() without their let */
static _Thread_local int kept_by; /* the number of the hold that keeps the reason; 0: none does */

static const struct {
    fattn_status status;
    const char *name;
} statuses[] = {
    {FATTN_OK, "FATTN_OK"},
    {FATTN_INVALID_ARGUMENT, "FATTN_INVALID_ARGUMENT"},
    {FATTN_INVALID_STRUCT, "FATTN_INVALID_STRUCT"},
    {FATTN_INVALID_SHAPE, "FATTN_INVALID_SHAPE"},
    {FATTN_INVALID_STRIDE, "FATTN_INVALID_STRIDE"},
    {FATTN_NULL_POINTER, "FATTN_NULL_POINTER"},
    {FATTN_MISALIGNED, "FATTN_MISALIGNED"},
    {FATTN_OVERLAP, "FATTN_OVERLAP"},
    {FATTN_OVERFLOW, "FATTN_OVERFLOW"},
    {FATTN_INVALID_DATA, "FATTN_INVALID_DATA"},
    {FATTN_UNSUPPORTED, "FATTN_UNSUPPORTED"},
    {FATTN_NO_DEVICE, "FATTN_NO_DEVICE"},
    {FATTN_UNKNOWN_DEVICE, "FATTN_UNKNOWN_DEVICE"},
    {FATTN_DEVICE_ERROR, "FATTN_DEVICE_ERROR"},
    {FATTN_OUT_OF_MEMORY, "FATTN_OUT_OF_MEMORY"},
    {FATTN_BAD_ENVIRONMENT, "FATTN_BAD_ENVIRONMENT"},
    {FATTN_RANK_LOST, "FATTN_RANK_LOST"},
    {FATTN_RANK_TIMEOUT, "FATTN_RANK_TIMEOUT"},
    {FATTN_RANKS_DISAGREE, "FATTN_RANKS_DISAGREE"},
};

const char *fattn_status_string(fattn_status status)
{
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++) {
        if (statuses[i].status == status) {
            return statuses[i].name;
        }
    }
    return "unknown fattn_status";
}

const char *fattn_last_reason(void) { return reason; }

size_t fattn_last_reason_copy(char *text, size_t size)
{
    const size_t length = strlen(reason);
    if (text && size) {
        const size_t kept = length < size ? length : size - 1;
        memcpy(text, reason, kept);
        text[kept] = '\0';
    }
    return length;
}

const char *fattn_version(void) { return FATTN_VERSION_STRING; }

void fattn_text_clean(char *text)
{
    for (; *text; text++) {
        *text = *text < ' ' || *text > '~' ? '?' : *text;
    }
}

fattn_status fattn_fail(fattn_status status, const char *format, ...)
{
    va_list arguments;
    if (kept_by) {
        return status;
    }
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    fattn_text_clean(reason);
    return status;
}

void fattn_reason_hold(fattn_status status)
{
    holds++;
    kept_by = status && !kept_by ? holds : kept_by;
}

void fattn_reason_let(void)
{
    assert(holds > 0);
    kept_by = kept_by == holds ? 0 : kept_by;
    holds--;
}

fattn_status fattn_check_range(const char *name, int64_t value, int64_t low, int64_t high,
                               fattn_status status)
{
    return value >= low && value <= high
               ? FATTN_OK
               : fattn_fail(status, "%s is %lld, not in %lld..%lld", name, (long long)value,
                            (long long)low, (long long)high);
}

fattn_status fattn_fail_memory(int64_t bytes, const char *what)
{
    return fattn_fail(FATTN_OUT_OF_MEMORY, "no memory for %lld bytes of %s", (long long)bytes,
                      what);
}
