/* SPDX-License-Identifier: Apache-2.0 */
/* Why a file cannot be read or written: one line that begins with its path. */
#ifndef FATTN_TOOLS_COMPLAINT_H
#define FATTN_TOOLS_COMPLAINT_H

#include "core/status.h"

/* Where a reason goes, and the path that it begins with. */
typedef struct complaint {
    const char *path;
    char *text; /* [size] */
    size_t size;
} complaint;

/* Writes "<path>: <sentence>", cut to size and always terminated. Returns -1. */
int complaint_write(const complaint *to, const char *format, ...) FATTN_PRINTF(2, 3);

/* What functions return instead where the file is good, and memory is short. */
#define COMPLAINT_NO_MEMORY (-2)

/* Writes that there is no memory for `what`. Returns COMPLAINT_NO_MEMORY. */
int complaint_no_memory(const complaint *to, const char *what);

#endif
