/* SPDX-License-Identifier: Apache-2.0 */
/* FATTN_ variables of the running program. Include it with _POSIX_C_SOURCE or _GNU_SOURCE. */
#ifndef FATTN_TESTS_ENVIRONMENT_H
#define FATTN_TESTS_ENVIRONMENT_H

#include <stdlib.h>

#include "core/env.h"

/* Sets a variable, or removes it where value is NULL, and has the library read them all again. */
static inline void set_environment(const char *name, const char *value)
{
    if (value) {
        setenv(name, value, 1);
    } else {
        unsetenv(name);
    }
    fattn_env_reload();
}

#endif
