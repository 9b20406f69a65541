/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks that a command runs on: processes that a launcher of MPI started. Library fattn_mpi is
 * loaded when they are asked for, so that the tool needs no MPI. */
#ifndef FATTN_TOOLS_ENGINE_H
#define FATTN_TOOLS_ENGINE_H

#include <stdbool.h>

#include "fattn/distributed.h"

/* Words for options: the place of each is its fattn_scheme or fattn_split. "auto" is the first. */
extern const char *const engine_schemes[], *const engine_splits[];

typedef struct engine {
    fattn_transport *transport;
    void (*end)(fattn_transport *);
    double timeout;
} engine;

/* Joins the other processes; a wait for one of them takes `timeout` seconds at most. */
fattn_status engine_open(engine *e, double timeout);
void engine_close(engine *e);

/* Fills entry r of `all` with what rank r has in its own entry. */
fattn_status engine_gather(const engine *e, void *all, int64_t bytes);

/* Whether all ranks have come so far; a rank that has prints why another has not. */
bool engine_agree(const engine *e, bool fine);

#endif
