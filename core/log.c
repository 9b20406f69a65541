/* SPDX-License-Identifier: Apache-2.0 */
#include "core/log.h"

#include <stdarg.h>
#include <stdio.h>

#include "core/env.h"
#include "core/fork.h"
#include "core/status.h"

static fattn_log_callback log_callback; /* under FATTN_FORK_LOG */
static void *log_user;                  /* under FATTN_FORK_LOG */

void fattn_set_log_callback(fattn_log_callback callback, void *user)
{
    fattn_fork_lock(FATTN_FORK_LOG);
    log_callback = callback;
    log_user = user;
    fattn_fork_unlock(FATTN_FORK_LOG);
}

bool fattn_log_wants(int level)
{
    const fattn_env *env = NULL;
    return fattn_env_get(&env) == FATTN_OK && env->verbose >= level;
}

void fattn_log(const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fattn_text_clean(line);

    fattn_fork_lock(FATTN_FORK_LOG);
    const fattn_log_callback callback = log_callback;
    void *const user = log_user;
    fattn_fork_unlock(FATTN_FORK_LOG);
    if (callback) {
        callback(user, line);
    } else {
        fprintf(stderr, "fattn: %s\n", line);
    }
}
