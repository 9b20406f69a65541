/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a command with --ranks: processes that mpirun started. Library fattn_mpi is loaded
 * only then, so the tool itself needs no MPI. */
#ifndef FATTN_TOOLS_ENGINE_H
#define FATTN_TOOLS_ENGINE_H

#include <stdbool.h>

#include "fattn/distributed.h"

/* Words for options, in the order of fattn_scheme and of fattn_split. "auto" is the first. */
extern const char *const engine_schemes[], *const engine_splits[];

typedef struct engine {
    fattn_transport *transport;
    void (*end)(fattn_transport *);
    double timeout;
} engine;

/* Connects to the other processes. A wait for one of them takes at most `timeout` seconds. */
fattn_status engine_open(engine *e, double timeout);
void engine_close(engine *e);

/* An all-gather: rank r's entry r of `all`, of `bytes` bytes, reaches all ranks. */
fattn_status engine_gather(const engine *e, void *all, int64_t bytes);

/* Whether all ranks call it with `fine`. A rank that does prints why another one does not. */
bool engine_agree(const engine *e, bool fine);

#endif
