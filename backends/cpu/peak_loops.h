/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The peak loops of floats and of memory: `peaks`, best first.
 *
 * Accumulators are separate variables and no array: compilers keep arrays of this size in memory,
 * and a loop that spills measures the cache. There must be at least latency x ports of them (4 x 2
 * on x86, 4 x 4 on the widest Arm cores), and with two operands they must fit the registers.
 */
#ifndef FATTN_CPU_PEAK_LOOPS_H
#define FATTN_CPU_PEAK_LOOPS_H

#include <string.h>

#include "backends/cpu/peak.h"
#include "backends/cpu/product.h"
#include "core/kernel.h"

#if FV_LANES > 1
#define PEAK_LANES FV_LANES
#define PEAK_READ_LANES FV_LANES
typedef fv peak_fv;
typedef uv peak_uv;
static inline peak_fv peak_set1(float x) { return fv_set1(x); }
static inline peak_fv peak_fma(peak_fv a, peak_fv b, peak_fv c) { return fv_muladd(a, b, c); }
static inline peak_uv peak_load(const uint32_t *x) { return uv_load(x); }
static inline peak_uv peak_sum(peak_uv a, peak_uv b) { return uv_add(a, b); }
#define PEAK_FUSED 1
#else
/* Plain C may be compiled to any vectors that every processor of the family has, so the peak of
 * these vectors is its ceiling, and not that of the single float of its vocabulary. */
#define PEAK_READ_LANES 4
typedef uint32_t peak_uv __attribute__((vector_size(16)));
static inline peak_uv peak_load(const uint32_t *x)
{
    peak_uv y;
    memcpy(&y, x, sizeof y);
    return y;
}
static inline peak_uv peak_sum(peak_uv a, peak_uv b) { return a + b; }
#ifdef __FP_FAST_FMAF
/* But C has no way to write a fused product of such vectors. */
#define PEAK_LANES 1
#define PEAK_FUSED 1
typedef float peak_fv;
static inline peak_fv peak_set1(float x) { return x; }
static inline peak_fv peak_fma(peak_fv a, peak_fv b, peak_fv c) { return fmaf(a, b, c); }
#else
#define PEAK_LANES 4
#define PEAK_FUSED 0
typedef float peak_fv __attribute__((vector_size(16)));
static inline peak_fv peak_set1(float x) { return (peak_fv){x, x, x, x}; }
#endif
#endif

#define PEAK_7(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6)
#define PEAK_12(M) PEAK_7(M) M(7) M(8) M(9) M(10) M(11)

#if PEAK_FUSED

#if defined(__x86_64__) || defined(__i386__)
#define PEAK_EACH(M) PEAK_12(M)
#define PEAK_COUNT 12
#else
#define PEAK_EACH(M) PEAK_12(M) M(12) M(13) M(14) M(15)
#define PEAK_COUNT 16
#endif

/* Fused products added to their accumulators, the form that every instruction set has without a
 * copy. They grow slowly, and so stay normal numbers. */
static float peak_compute(int64_t rounds, float factor, float summand)
{
#define START(i) peak_fv a##i = peak_set1((float)(i));
#define STEP(i) a##i = peak_fma(b, c, a##i);
#define TOTAL(i) total = peak_fma(a##i, b, total);
    const peak_fv b = peak_set1(factor), c = peak_set1(summand);
    PEAK_EACH(START)
    for (; rounds > 0; rounds--) {
        PEAK_EACH(STEP)
        PEAK_EACH(STEP)
    }
    peak_fv total = c;
    PEAK_EACH(TOTAL)
#undef START
#undef STEP
#undef TOTAL
    float first;
    memcpy(&first, &total, sizeof first);
    return first;
}

#define PEAK_NAME "fma f32"
#define PEAK_INSTRUCTIONS (2 * PEAK_COUNT)

/* Not with two factors per register: gcc keeps some of the sums of such a loop in memory. */
#if FV_LANES > 1 && FV_FACTORS == 1
#define PEAK_FED_DEPTH 64
#define PEAK_FED_INSTRUCTIONS (FV_NK * FV_NQ * PEAK_FED_DEPTH)
_Static_assert(PEAK_FED_DEPTH *(FV_NK + FV_NQ * FV_LANES) <= FATTN_CPU_PEAK_OPERANDS, "room");

/* The same products with loaded operands, as in a register tile (product.h), which loads FV_NK
 * factors and FV_NQ vectors for FV_NK FV_NQ products. */
static float peak_compute_fed(int64_t rounds, const float *operands)
{
    const float *const b = operands + FV_NK * PEAK_FED_DEPTH, *a[FV_NK];
    fv sum[FV_NK][FV_NQ], total = fv_set1(0);
    for (int k = 0; k < FV_NK; k++) {
        a[k] = operands + k * PEAK_FED_DEPTH;
        for (int q = 0; q < FV_NQ; q++) {
            sum[k][q] = total;
        }
    }
    for (; rounds > 0; rounds--) {
        for (int64_t r = 0; r < PEAK_FED_DEPTH; r++) {
            rows_steps(FV_NQ, 1, sum, a, r, b, FV_NQ * FV_LANES);
        }
    }
    for (int k = 0; k < FV_NK; k++) {
        for (int q = 0; q < FV_NQ; q++) {
            total = fv_add(total, sum[k][q]);
        }
    }
    float lanes[FV_LANES];
    fv_store(lanes, total);
    return lanes[0];
}
#endif

#else

/* As many products as sums, independent of each other: a chain of both would need more accumulators
 * than there are registers. A factor of 1 leaves the products unchanged. */
static float peak_compute(int64_t rounds, float factor, float summand)
{
#define START(i) peak_fv p##i = peak_set1(1.5f + (i)), s##i = p##i;
#define PRODUCT(i) p##i = p##i * b;
#define SUM(i) s##i = s##i + c;
#define TOTAL(i) total = total + p##i * s##i;
    const peak_fv b = peak_set1((float)(factor > 0)), c = peak_set1(summand);
    PEAK_7(START)
    for (; rounds > 0; rounds--) {
        PEAK_7(PRODUCT)
        PEAK_7(SUM)
        PEAK_7(PRODUCT)
        PEAK_7(SUM)
    }
    peak_fv total = c;
    PEAK_7(TOTAL)
#undef START
#undef PRODUCT
#undef SUM
#undef TOTAL
    return total[0];
}

#define PEAK_NAME "multiply and add f32"
#define PEAK_INSTRUCTIONS 28

#endif

/* Sums whole cache lines as integers, since no bit pattern is slow to add, as subnormal floats
 * are. */
static uint32_t peak_read(const void *data, int64_t bytes)
{
    enum { STEP = 8 * PEAK_READ_LANES };
#define START(i) peak_uv s##i = {0};
#define ADD(i) s##i = peak_sum(s##i, peak_load(x + i * PEAK_READ_LANES));
#define EIGHT(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)
    const uint32_t *x = data;
    EIGHT(START)
    for (int64_t left = bytes / 4; left >= STEP; left -= STEP, x += STEP) {
        EIGHT(ADD)
    }
    const peak_uv low = peak_sum(peak_sum(s0, s1), peak_sum(s2, s3));
    const peak_uv high = peak_sum(peak_sum(s4, s5), peak_sum(s6, s7));
    const peak_uv sum = peak_sum(low, high);
#undef START
#undef ADD
#undef EIGHT
    uint32_t first;
    memcpy(&first, &sum, sizeof first);
    return first;
}

/* Ends with a row whose name is NULL. */
static const fattn_cpu_peak peaks[] = {
    {
        .row = {.name = PEAK_NAME,
                .dtypes = FATTN_CPU_DTYPES,
                .lanes = PEAK_LANES,
                .flops = 1 + PEAK_FUSED,
                .measure = fattn_cpu_peak_measure},
        .instructions = PEAK_INSTRUCTIONS,
        .compute = peak_compute,
#ifdef PEAK_FED_INSTRUCTIONS
        .fed = peak_compute_fed,
        .fed_instructions = PEAK_FED_INSTRUCTIONS,
#endif
    },
    {
        .row = {.name = "read",
                .reads_memory = true,
                .dtypes = FATTN_CPU_DTYPES,
                .lanes = PEAK_READ_LANES,
                .measure = fattn_cpu_peak_measure},
        .read = peak_read,
    },
    {.row = {.name = NULL}},
};

#endif
