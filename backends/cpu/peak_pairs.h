/* SPDX-License-Identifier: Apache-2.0 */
/* The peak loops of products of bf16 pairs, written as those of peak_loops.h: `peaks`, best
 * first. */
#ifndef FATTN_CPU_PEAK_PAIRS_H
#define FATTN_CPU_PEAK_PAIRS_H

#include <string.h>

#include "backends/cpu/peak.h"
#include "backends/cpu/unit.h"
#include "core/kernel.h"

/* Products of pairs have a longer latency, so there are 24 accumulators. */
#define PEAK_8(M, n) M(n##0) M(n##1) M(n##2) M(n##3) M(n##4) M(n##5) M(n##6) M(n##7)
#define PEAK_24(M) PEAK_8(M, 1) PEAK_8(M, 2) PEAK_8(M, 3)

static float peak_compute_pairs(int64_t rounds, float factor, float summand)
{
#define START(i) fv a##i = fv_set1((float)(i));
#define STEP(i) a##i = fv_muladd_pairs(b, c, a##i);
#define TOTAL(i) total = fv_add(total, a##i);
    const pv b = pv_round(fv_set1(factor), fv_set1(factor));
    const pv c = pv_round(fv_set1(summand), fv_set1(summand));
    PEAK_24(START)
    for (; rounds > 0; rounds--) {
        PEAK_24(STEP)
    }
    fv total = fv_set1(0);
    PEAK_24(TOTAL)
#undef START
#undef STEP
#undef TOTAL
    float lanes[FV_LANES];
    fv_store(lanes, total);
    return lanes[0];
}

#if FV_TILES
static float peak_compute_tiles(int64_t rounds, float factor, float summand)
{
    tiles_open();
    tiles_spin(rounds);
    tiles_close();
    return factor + summand;
}
#endif

/* Ends with a row whose name is NULL. */
static const fattn_cpu_peak peaks[] = {
#if FV_TILES
    /* A product of tiles computes one of its 16 rows per cycle: 16 sums of 32 products each. */
    {
        .row = {.name = "tiles bf16",
                .dtypes = FATTN_DTYPE_BIT(FATTN_BF16),
                .lanes = 16,
                .flops = 64,
                .measure = fattn_cpu_peak_measure},
        .instructions = 6 * 16,
        .compute = peak_compute_tiles,
    },
#endif
    {
        .row = {.name = "pairs bf16",
                .dtypes = FATTN_DTYPE_BIT(FATTN_BF16),
                .lanes = FV_LANES,
                .flops = 4,
                .measure = fattn_cpu_peak_measure},
        .instructions = 24,
        .compute = peak_compute_pairs,
    },
    {.row = {.name = NULL}},
};

#endif
