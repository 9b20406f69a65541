/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner: (problem, limits, kernel row) -> tile, splits, work list, workspace, predicted
 * traffic. It is a pure function of its arguments and queries no machine: the plan for an H100 can
 * be tested on a laptop. Nothing in it depends on the number of threads, which the backend adds to
 * the plan afterwards; only tests set it here.
 */
#ifndef FATTN_CORE_TILING_H
#define FATTN_CORE_TILING_H

#include "core/kernel.h"

/* What a backend says about a device. */
typedef struct fattn_limits {
    int64_t fast_memory;  /* bytes that a tile may occupy */
    int64_t parallelism;  /* pieces of work that run at the same time */
    int64_t shared_cache; /* bytes of cache between slow memory and all fast memory; 0: unknown */
    int64_t units;        /* units that should get equal shares of the work; 0: unknown */
    bool by_lengths;      /* runs know all lengths before they start, so that kernels for few rows
                           * can cut keys by them */
} fattn_limits;

/* Choices that the environment or a test has made; 0 leaves a choice to the planner. */
typedef struct fattn_wish {
    fattn_tile tile; /* FATTN_TILE */
    int64_t splits;  /* FATTN_SPLITS; forward only */
    int workers;     /* tests: threads of a CPU's plan, however small the problem is */
} fattn_wish;

/*
 * Plans the problem for a kernel. FATTN_UNSUPPORTED if the kernel does not have the wished tile,
 * FATTN_OVERFLOW if a size passes 2^63.
 *
 * If sequences may differ in their lengths, a run may cut the keys of all of them together into
 * tiling->pieces pieces. A run, or a kernel of it, knows the actual lengths, so it cuts a long
 * sequence among many short ones as it would cut it alone, into at most tiling->splits parts. The
 * work list has room for each block of rows and twice as many parts as pieces, however large batch
 * is. If pieces is 0, each sequence is cut by its own length.
 */
fattn_status fattn_tiling_choose(const fattn_problem *problem, const fattn_limits *limits,
                                 const fattn_kernel *kernel, const fattn_wish *wish,
                                 fattn_tiling *tiling);

#endif
