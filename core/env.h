/* SPDX-License-Identifier: Apache-2.0 */
/* The FATTN_* environment variables: env.c has a table of them, and reads them once, at the first
 * use of the library; and OMP_NUM_THREADS, which it reads with them. */
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
    /* The first number in OMP_NUM_THREADS, 0 when unset. It is OpenMP's variable: a wrong value is
     * no error here. */
    int64_t openmp_threads;
} fattn_env;

/* Gives the parsed environment. If a variable has a wrong value, this fails every time, with
 * FATTN_BAD_ENVIRONMENT and a reason that names variable and value. */
fattn_status fattn_env_get(const fattn_env **env);

/* An environment variable of one backend, whose value is a word. */
typedef struct fattn_env_variable {
    const char *name;
    /* Whether the variable may have this value on any machine. If not, writes into `expected` what
     * it may have, for the sentence "NAME is "value", not EXPECTED". A value that only this machine
     * does not support is refused later, when a device is opened. */
    bool (*takes)(const char *value, char *expected, size_t size);
} fattn_env_variable;

/* The value of a backend's variable (backend.h), after fattn_env_get(); NULL if it is unset. */
const char *fattn_env_own(const fattn_env_variable *variable);

/* For tests and the tool, which change variables: reads the environment again. No other thread may
 * be inside the library. */
void fattn_env_reload(void);

#endif
