/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* isatty */
#include "tools/terminal/terminal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

int tool_usage(const char *command, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "fattn %s: ", command);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return TOOL_USAGE;
}

int tool_exit_code(fattn_status status)
{
    const bool request = status >= FATTN_INVALID_ARGUMENT && status < FATTN_UNSUPPORTED;
    return status == FATTN_OK                           ? TOOL_OK
           : request || status == FATTN_BAD_ENVIRONMENT ? TOOL_USAGE
                                                        : TOOL_LIBRARY;
}

int tool_failure(fattn_status status)
{
    fprintf(stderr, "fattn: %s: %s\n", fattn_status_string(status), fattn_last_reason());
    return tool_exit_code(status);
}

void tool_progress(int64_t done, int64_t count)
{
    enum { WIDTH = 30 };
    if (!isatty(STDERR_FILENO)) {
        return;
    }
    if (count == 0) {
        tool_progress_clear();
        return;
    }
    const int full = (int)((double)WIDTH * (double)done / (double)count);
    fprintf(stderr, "\r\033[K[%.*s%*s] %" PRId64 "/%" PRId64, full,
            "##############################", WIDTH - full, "", done, count);
}

void tool_progress_clear(void)
{
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r\033[K");
    }
}

void tool_json_string(const char *text)
{
    putchar('"');
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\') {
            printf("\\%c", *c);
        } else if ((unsigned char)*c < 0x20) {
            printf("\\u%04x", (unsigned char)*c);
        } else {
            putchar(*c);
        }
    }
    putchar('"');
}
