/* SPDX-License-Identifier: Apache-2.0 */
/* Reasons about files; see complaint.h. */
#include "tools/npy/complaint.h"

#include <stdarg.h>
#include <stdio.h>

int complaint_write(const complaint *to, const char *format, ...)
{
    if (to->size == 0) {
        return -1;
    }
    const int path = snprintf(to->text, to->size, "%s: ", to->path);
    if (path >= 0 && (size_t)path < to->size) {
        va_list list;
        va_start(list, format);
        vsnprintf(to->text + path, to->size - (size_t)path, format, list);
        va_end(list);
    }
    /* Paths and headers are quoted: whatever they hold, a reason stays one line. */
    for (char *c = to->text; *c; c++) {
        if ((unsigned char)*c < ' ' || *c == '\x7f') {
            *c = '?';
        }
    }
    return -1;
}

int complaint_no_memory(const complaint *to, const char *what)
{
    complaint_write(to, "out of memory for %s", what);
    return COMPLAINT_NO_MEMORY;
}
