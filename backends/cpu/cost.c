/* SPDX-License-Identifier: Apache-2.0 */
#include "backends/cpu/cost.h"

#include <math.h>

#include "core/integer.h"
#include "core/io_model.h"
#include "core/problem.h"

bool fattn_cpu_blocks_are_equal(const fattn_problem *p)
{
    return p->window_right != 0 && !(p->features & (FATTN_MASK | FATTN_BIAS));
}

/*
 * The time at which the last processor finishes its blocks, in times of a row. This is the sum of
 * two estimates, and so twice the time. First estimate: processors take blocks in rounds, and the
 * last round may have room for the short blocks at the ends of heads. Second estimate: processors
 * finish half a block apart, since they are not equally fast and blocks are not equally long. If
 * blocks have unequal work, as under a causal mask, only the second estimate is used, with half of
 * the work: twice (all / 2 / units + apart).
 */
static double time_of_rows(const fattn_problem *p, const fattn_cpu_blocks *blocks, int64_t units,
                           int64_t br)
{
    const int64_t rows = fattn_problem_rows(p), heads = p->batch * p->heads_k;
    const int64_t extra = blocks->extra_rows, rest = rows % br, rests = rest ? heads : 0;
    const double all =
        (double)heads * ((double)rows + (double)fattn_ceil_div(rows, br) * (double)extra);
    const double apart = (double)(br + extra) / 2;
    if (!fattn_cpu_blocks_are_equal(p)) {
        return all / (double)units + 2 * apart;
    }
    int64_t whole = 0;
    if (__builtin_mul_overflow(heads, rows / br, &whole) || whole > INT64_MAX / 2) {
        /* With so many rounds, the last one does not matter. */
        return 2 * all / (double)units + apart;
    }
    const int64_t rounds = fattn_ceil_div(whole, units);
    const int64_t room = rounds * units - whole;
    const int64_t more = rests > room ? fattn_ceil_div(rests - room, units) : 0;
    return (double)rounds * (double)(br + extra) + (double)more * (double)(rest + extra) +
           all / (double)units + apart;
}

/* What waiting adds to time_of_rows(), doubled as that is. If blocks go in order, those of one head
 * that run at the same time start one after another, a tile of keys apart. */
static double time_in_order(const fattn_problem *p, const fattn_cpu_blocks *blocks, int64_t units,
                            fattn_tile tile)
{
    const int64_t rows = fattn_problem_rows(p), heads = p->batch * p->heads_k;
    const int64_t most = heads > 0 && heads < units ? units / heads : 1;
    const int64_t together = fattn_min64(fattn_ceil_div(rows, tile.br), most);
    const int64_t tiles = fattn_ceil_div(p->seqlen_k, tile.bc);
    if (!blocks->in_order || together < 2 || tiles < 1) {
        return 0;
    }
    const double block = (double)(fattn_min64(tile.br, rows) + blocks->extra_rows);
    return 2 * block * (double)(together - 1) / (double)tiles;
}

/* Whether a problem has too few blocks per core for the largest tile: one block that is late would
 * keep the other cores waiting. */
static bool leaves_few(const fattn_problem *p, const fattn_limits *limits, int64_t br,
                       const fattn_cpu_blocks *blocks)
{
    return br == blocks->large && (double)p->batch * (double)p->heads_q * (double)p->seqlen_q <
                                      (double)blocks->rounds * (double)limits->units * (double)br;
}

double fattn_cpu_cost(const fattn_problem *problem, const fattn_limits *limits, fattn_tile tile,
                      fattn_cpu_blocks blocks)
{
    /* The time, in times of a key, that loading and storing the sums of a tile takes. */
    const double sums = 16;
    if (leaves_few(problem, limits, tile.br, &blocks)) {
        return INFINITY;
    }
    if (limits->units == 0) {
        return fattn_io_plan_bytes(problem, tile.br, tile.bc, true);
    }
    return (time_of_rows(problem, &blocks, limits->units, tile.br) +
            time_in_order(problem, &blocks, limits->units, tile)) *
           (1 + sums / (double)tile.bc);
}

/* Parts of decoding have small sums, and its items cover several heads, so there are few items:
 * more pieces than usual. */
fattn_split_cost fattn_cpu_decode_split(const fattn_kernel *row, const fattn_problem *p,
                                        const fattn_limits *limits)
{
    (void)row, (void)p;
    return (fattn_split_cost){.keys = 512, .pieces = 16 * limits->parallelism};
}

fattn_split_cost fattn_cpu_forward_split(const fattn_kernel *row, const fattn_problem *p,
                                         const fattn_limits *limits)
{
    (void)row, (void)p;
    return (fattn_split_cost){.keys = 2048, .pieces = limits->parallelism};
}
