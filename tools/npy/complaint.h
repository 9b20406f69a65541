/* SPDX-License-Identifier: Apache-2.0 */
/* Why a file cannot be read or written: one line that begins with its path. */
#ifndef FATTN_TOOLS_COMPLAINT_H
#define FATTN_TOOLS_COMPLAINT_H

#include "core/status.h"

/* The buffer for a reason, and the path with which the reason begins. */
typedef struct complaint {
    const char *path;
    char *text; /* [size] */
    size_t size;
} complaint;

/* Writes "<path>: <sentence>", truncated to size and always terminated. Returns -1. */
int complaint_write(const complaint *to, const char *format, ...) FATTN_PRINTF(2, 3);

/* Functions return this instead of -1 if nothing is wrong with the file, but there is no memory. */
#define COMPLAINT_NO_MEMORY (-2)

/* Writes that there is no memory for `what`. Returns COMPLAINT_NO_MEMORY. */
int complaint_no_memory(const complaint *to, const char *what);

#endif
