/* SPDX-License-Identifier: Apache-2.0 */
/* What a tile costs a row of the CPU, by which the planner compares those of its menu. Pure. */
#ifndef FATTN_CPU_COST_H
#define FATTN_CPU_COST_H

#include "core/tiling.h"

/* The blocks of a row. */
typedef struct fattn_cpu_blocks {
    int64_t extra_rows; /* rows' time that a block costs besides that of its own */
    bool in_order;      /* blocks of a head follow one another, a tile of keys apart */
    int64_t large;      /* rows of a tile that is for problems of at least so many blocks a core, */
    int64_t rounds;     /* or of any size where it is 0 */
} fattn_cpu_blocks;

/* Whether blocks of equally many rows are taken to have equal work: not under a causal mask, nor
 * under a mask or bias, which may be causal, too. */
bool fattn_cpu_blocks_are_equal(const fattn_problem *problem);

/* The time of rows, in no unit; bytes of traffic where the cores are not known. INFINITY where the
 * tile is too large for the problem. */
double fattn_cpu_cost(const fattn_problem *problem, const fattn_limits *limits, fattn_tile tile,
                      fattn_cpu_blocks blocks);

/* What parts of the keys cost decoding, and forward, whose parts send the sums of a block through
 * memory. */
fattn_split_cost fattn_cpu_decode_split(const fattn_kernel *row, const fattn_problem *p,
                                        const fattn_limits *limits);
fattn_split_cost fattn_cpu_forward_split(const fattn_kernel *row, const fattn_problem *p,
                                         const fattn_limits *limits);

#endif
