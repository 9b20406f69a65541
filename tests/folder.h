/* SPDX-License-Identifier: Apache-2.0 */
/* An empty folder for the files of a test, which removes it: in TMPDIR, or else in /tmp. Include it
 * with _XOPEN_SOURCE 700 or _GNU_SOURCE. */
#ifndef FATTN_TESTS_FOLDER_H
#define FATTN_TESTS_FOLDER_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { FOLDER_PATH = 512 };

/* False if it cannot be made; then path is what was tried. */
static inline bool folder_make(char path[FOLDER_PATH], const char *program)
{
    const char *const base = getenv("TMPDIR");
    const int length = snprintf(path, FOLDER_PATH, "%s/%s-XXXXXX", base ? base : "/tmp", program);
    return length < FOLDER_PATH && mkdtemp(path) != NULL;
}

#endif
