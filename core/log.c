/* SPDX-License-Identifier: Apache-2.0 */
#include "core/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

#include "core/env.h"
#include "core/fork.h"
#include "core/status.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static fattn_log_callback log_callback; /* under mutex */
static void *log_user;                  /* under mutex */

/* Where a fork cannot be guarded, for want of memory, opening a device says so. */
static void lock(void)
{
    (void)fattn_fork_guard(FATTN_FORK_LOG, &mutex, NULL);
    pthread_mutex_lock(&mutex);
}

void fattn_set_log_callback(fattn_log_callback callback, void *user)
{
    lock();
    log_callback = callback;
    log_user = user;
    pthread_mutex_unlock(&mutex);
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

    lock();
    const fattn_log_callback callback = log_callback;
    void *const user = log_user;
    pthread_mutex_unlock(&mutex);
    if (callback) {
        callback(user, line);
    } else {
        fprintf(stderr, "fattn: %s\n", line);
    }
}
