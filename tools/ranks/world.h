/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of a command with --ranks: processes that mpirun started. Library fattn_mpi is loaded
 * only then, so the tool itself needs no MPI. */
#ifndef FATTN_TOOLS_WORLD_H
#define FATTN_TOOLS_WORLD_H

#include <stdbool.h>

#include "core/distributed/forecast.h"

/* The split for a problem's masks, where none is named. The problem need not be normalised. */
fattn_split split_for(const fattn_problem *problem);

typedef struct world {
    fattn_transport *transport;
    void (*end)(fattn_transport *);
    double timeout;
} world;

/* Connects to the other processes. A wait for one of them takes at most `timeout` seconds. */
fattn_status world_open(world *w, double timeout);
void world_close(world *w);

/* An all-gather: rank r's entry r of `all`, of `bytes` bytes, reaches all ranks. */
fattn_status world_gather(const world *w, void *all, int64_t bytes);

/* Whether all ranks call it with `fine`. A rank that does prints why another one does not. */
bool world_agree(const world *w, bool fine);

#endif
