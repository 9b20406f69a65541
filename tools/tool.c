/* SPDX-License-Identifier: Apache-2.0 */
/* How the subcommands report; see tool.h. */
#include "tools/tool.h"

#include <stdarg.h>
#include <stdio.h>

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

int tool_failure(fattn_status status)
{
    fprintf(stderr, "fattn: %s: %s\n", fattn_status_string(status), fattn_last_reason());
    return TOOL_LIBRARY;
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
