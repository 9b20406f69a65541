/* SPDX-License-Identifier: Apache-2.0 */
/* The cost of a tile, by which the planner compares the tiles of a CPU kernel. Pure functions. */
#ifndef FATTN_CPU_COST_H
#define FATTN_CPU_COST_H

#include "core/tiling.h"

/* The blocks of a kernel. */
typedef struct fattn_cpu_blocks {
    int64_t extra_rows; /* what a block costs besides its rows, in times of a row */
    bool in_order;      /* blocks of a head wait for each other, a tile of keys apart */
    int64_t large;      /* rows of the tile that is only for problems with at least */
    int64_t rounds;     /* so many blocks of it per core; 0: there is no such tile */
} fattn_cpu_blocks;

/* Whether blocks with the same number of rows are assumed to have the same work: not under a causal
 * mask, nor under a mask or bias, which may be causal, too. */
bool fattn_cpu_blocks_are_equal(const fattn_problem *problem);

/* The time of all rows, in no particular unit; bytes of traffic if the number of cores is unknown.
 * INFINITY if the tile is too large for the problem. */
double fattn_cpu_cost(const fattn_problem *problem, const fattn_limits *limits, fattn_tile tile,
                      fattn_cpu_blocks blocks);

/* What splitting the keys costs in decoding, and in forward, whose parts send the sums of a whole
 * block through memory. */
fattn_split_cost fattn_cpu_decode_split(const fattn_kernel *row, const fattn_problem *p,
                                        const fattn_limits *limits);
fattn_split_cost fattn_cpu_forward_split(const fattn_kernel *row, const fattn_problem *p,
                                         const fattn_limits *limits);

#endif
