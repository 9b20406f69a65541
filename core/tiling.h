/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner: (problem, limits, kernel row) -> tile, splits, work list, workspace, predicted
 * traffic. A pure function of its arguments, which queries no machine: the plan for an H100 can be
 * tested on a laptop. No result depends on the number of worker threads: the backend adds it to the
 * plan, and only tests wish for one here.
 */
#ifndef FATTN_CORE_TILING_H
#define FATTN_CORE_TILING_H

#include "core/kernel.h"

/* What a backend says about a device. */
typedef struct fattn_limits {
    int64_t fast_memory;  /* bytes a tile may occupy */
    int64_t parallelism;  /* pieces of work that it takes side by side */
    int64_t shared_cache; /* bytes between slow memory and all of fast memory; 0: none is known */
    int64_t units;        /* that are kept busy with equal shares; 0: unknown */
    bool by_lengths;      /* runs know all lengths before they begin, and rows for few rows cut keys
                           * by those (fattn_tiling_pieces) */
} fattn_limits;

/* What the environment or a test wants instead; 0 leaves the choice to the planner. */
typedef struct fattn_wish {
    fattn_tile tile; /* FATTN_TILE */
    int64_t splits;  /* FATTN_SPLITS; of a forward, a backward has none */
    int workers;     /* tests: of a CPU's plan, however small the problem is */
} fattn_wish;

/* FATTN_UNSUPPORTED when the menu lacks the wished tile, FATTN_OVERFLOW when a size passes 2^63. */
fattn_status fattn_tiling_choose(const fattn_problem *problem, const fattn_limits *limits,
                                 const fattn_kernel *kernel, const fattn_wish *wish,
                                 fattn_tiling *tiling);

/*
 * Pieces of work that every run of the plan cuts the keys of all its sequences into, by the lengths
 * that they have: a long sequence among many short ones is cut, as it would be alone. About so many
 * parts are merged, and always fewer than twice as many, whatever batch is; the workspace has room
 * for those. 0: each sequence is cut by its own length, into at most tiling->splits parts.
 */
int64_t fattn_tiling_pieces(const fattn_problem *problem, const fattn_limits *limits,
                            const fattn_kernel *kernel, const fattn_wish *wish);

#endif
