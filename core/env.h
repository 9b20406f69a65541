/* SPDX-License-Identifier: Apache-2.0 */
/* The FATTN_* environment variables: read once, at the first use of the library, from one table. */
#ifndef FATTN_CORE_ENV_H
#define FATTN_CORE_ENV_H

#include "core/kernel.h"

#define FATTN_THREADS_MAX 1024 /* of a device; a multiple of 64 */

typedef struct fattn_env {
    const char *backend; /* FATTN_BACKEND, NULL when unset; checked where devices are opened */
    const char *kernel;  /* FATTN_KERNEL, NULL when unset; checked where plans are made */
    fattn_tile tile;     /* FATTN_TILE, {0, 0} when unset */
    int64_t threads;     /* FATTN_NUM_THREADS, 0 when unset */
    int64_t sram;        /* FATTN_SRAM in bytes, 0 when unset */
    int64_t splits;      /* FATTN_SPLITS, 0 when unset */
    int verbose;         /* FATTN_VERBOSE, 0..3 */
} fattn_env;

/* The parsed environment; FATTN_BAD_ENVIRONMENT, naming the variable and its value, as long as one
 * of them is wrong. */
fattn_status fattn_env_get(const fattn_env **env);

/* A backend's own variable, whose value is a word. */
typedef struct fattn_env_variable {
    const char *name;
    /* Whether it may have this value. If not, writes what it may have, as in "FATTN_X is "y", not
     * the name of a z". What this machine lacks is refused where a device is opened. */
    bool (*takes)(const char *value, char *expected, size_t size);
} fattn_env_variable;

/* The value of a backend's variable (backend.h), after fattn_env_get(); NULL when unset. */
const char *fattn_env_own(const fattn_env_variable *variable);

/* Tests only: reads the environment again. No other thread may be inside the library. */
void fattn_env_reload(void);

#endif
