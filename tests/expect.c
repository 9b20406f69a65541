/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/expect.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fattn/fattn.h"

static const char *running = "";
static int wrong;

void expect_begin(const char *check) { running = check, wrong = 0; }

bool expect(bool holds, const char *format, ...)
{
    if (!holds) {
        va_list arguments;
        wrong++;
        printf("# %s: ", running);
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf("\n");
    }
    return holds;
}

bool expect_ok(fattn_status status, const char *what)
{
    return expect(status == FATTN_OK, "%s: %s: %s", what, fattn_status_string(status),
                  fattn_last_reason());
}

bool expect_held(void) { return wrong == 0; }

bool expect_says(const char *words) { return strstr(fattn_last_reason(), words) != NULL; }
