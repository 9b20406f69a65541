/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector vocabulary of the CPU kernels in plain C: a vector has one lane. This is the smallest
 * vec_*.h, and it defines what each word must do in all others. Intrinsics appear in these files
 * only.
 *
 *     FV_LANES         lanes of a vector, a power of two up to 16
 *     FV_NQ, FV_NK     shape of the register tile of a matrix product: FV_NQ vectors (of queries or
 *                      channels) by FV_NK rows. FV_NQ * FV_NK accumulators, FV_NQ operands and a
 *                      broadcast must fit the registers
 *     FV_ND            accumulators of a block of dot products over lanes: a multiple of FV_LANES,
 *                      of FV_NK and of 4
 *     FV_STEPS         uv_lookup() selects from a table of 2^FV_STEPS numbers by the low bits of
 *                      each lane: 0, 3 or 5
 *     FV_NEAR          1 where the exponential of window.h is faster than fv_exp2(): where fv_fma
 *                      is an instruction
 *     FV_UNROLL        groups of factors per iteration of product_rows(), 1 or 4. 4 pays where the
 *                      registers can hold the operands of a second group; elsewhere gcc loads them
 *                      early or twice
 *     FV_ROW_MAJOR_KEYS(d), FV_BLOCKED_KEYS(d)
 *                      with more than 4 lanes: the most keys, at d channels, for which products
 *                      with row-major queries pay (summing all lanes of each dot product costs
 *                      less than arranging queries), and those with queries in blocks of four
 *                      channels (summing four lanes costs less than transposing queries;
 *                      small_keys.h)
 *     FV_KEYS_AT_ONCE, FV_BLOCKS_AT_ONCE
 *                      with more than 4 lanes: keys per tile of these two products, 3 or 4, and 2
 *                      or 4
 *     fv uv mv         vectors of float, of uint32_t and of conditions, with equally many lanes
 *     FV_FACTORS       2 where a multiplication can take its factor from a lane; ff is then a pair
 *                      of neighbouring factors, loaded but not spread, with ff_set1, ff_load and
 *                      ff_muladd; pf likewise, for pairs of bf16. Other sets leave these words to
 *                      vec.h
 *     FV_PAIRS         1 where pairs of bf16 can be multiplied. pv is a vector of FV_LANES pairs.
 *                      pv_set1, pv_load and pv_store take memory of any alignment; pv_ones() are
 *                      pairs of 1. pv_round rounds two fv to bf16; pv_store_rows stores its result
 *                      as two rows of FV_LANES, and pv_twist interleaves them into pairs. pv_zip
 *                      makes pairs of two such rows in memory.
 *                      pv_round may flush subnormal numbers to 0. To detect that,
 *                      a = pv_least(a, x) keeps the smallest of all x + x, which have no sign,
 *                      starting from all bits set; pv_any_zero(a) tells whether one was 0.
 *                      fv_muladd_pairs(a, b, c) adds both products of each pair to c; it may treat
 *                      subnormal operands and results as 0
 *     FV_TILES         1 where there are also matrix registers for pairs; vec_amx.h has the words
 *
 * With more than 4 lanes, each group of 4 lanes is a block: fv_load_four(x) is x[0 .. 4) in every
 * block, block b of fv_load_blocks(x, stride) is x[b stride .. b stride + 4), and lane 4 b + n of
 * fv_block_sums(x) is the sum of block b of x[n], n < 4. With 8 lanes, fv_store_sums(to, x) sets
 * to[n] to the sum of all lanes of x[n], n < 4. With 16 lanes, fv_store_blocks() is the inverse of
 * fv_load_blocks(), pv_load_four() is fv_load_four() for pairs, and keep_pointers() steers the
 * compiler.
 *
 * Loads and stores take any alignment. fv_load_e4m3 loads FATTN_E4M3. fv_load_bf16_even and
 * fv_load_bf16_odd load every other one
 * of 2 FV_LANES numbers, starting with the first or the second. The upper halves of fv_bf16_bits(x)
 * are what fv_store_bf16 stores. Functions named `part` access the first n lanes only, 0 <= n <=
 * FV_LANES, and load 0 into the others. exp2 and log2 have an error below 2 ulp and keep NaN; exp2
 * is exact for integers; exp2(-inf) = 0, exp2(+inf) = +inf, log2(1) = 0, log2(0) = -inf, log2(+inf)
 * = +inf. fv_exp2_normal(a) equals fv_exp2(a) for a in -126 .. 127, keeps NaN and is unspecified
 * for other a. fv_exp2_from(a, least, factor) is factor 2^a, or 0 where a < least; factor is a
 * power of two, at least 1. Where its result is 2^-126 or more, no intermediate result is
 * subnormal: subnormal arithmetic takes hundreds of cycles on some processors.
 */
#ifndef FATTN_CPU_VEC_SCALAR_H
#define FATTN_CPU_VEC_SCALAR_H

#include <math.h>
#include <stdint.h>

#include "core/dtype.h"

#define FV_LANES 1
#define FV_NQ 4
#define FV_NK 4
#define FV_ND 4
#define FV_STEPS 0
#define FV_NEAR 0
#define FV_UNROLL 1

typedef float fv;
typedef uint32_t uv;
typedef int mv;

static inline fv fv_set1(float x) { return x; }
static inline fv fv_load(const float *x) { return *x; }
static inline fv fv_load_part(const float *x, int n) { return n ? *x : 0.0f; }
static inline fv fv_load_f16(const uint16_t *x) { return fattn_f16_to_f32(*x); }
static inline fv fv_load_bf16(const uint16_t *x) { return fattn_bf16_to_f32(*x); }
static inline fv fv_load_part_f16(const uint16_t *x, int n) { return n ? fv_load_f16(x) : 0.0f; }
static inline fv fv_load_part_bf16(const uint16_t *x, int n) { return n ? fv_load_bf16(x) : 0.0f; }
static inline fv fv_load_e4m3(const uint8_t *x) { return fattn_e4m3_to_f32(*x); }
static inline fv fv_load_part_e4m3(const uint8_t *x, int n) { return n ? fv_load_e4m3(x) : 0.0f; }
static inline fv fv_load_bf16_even(const uint16_t *x) { return fattn_bf16_to_f32(x[0]); }
static inline fv fv_load_bf16_odd(const uint16_t *x) { return fattn_bf16_to_f32(x[1]); }
static inline void fv_store(float *to, fv x) { *to = x; }
static inline void fv_store_f16(uint16_t *to, fv x) { *to = fattn_f16_from_f32(x); }
static inline void fv_store_bf16(uint16_t *to, fv x) { *to = fattn_bf16_from_f32(x); }
static inline uv fv_bf16_bits(fv x) { return (uv)fattn_bf16_from_f32(x) << 16; }
static inline void fv_store_part(float *to, fv x, int n)
{
    if (n) {
        *to = x;
    }
}

static inline fv fv_add(fv a, fv b) { return a + b; }
static inline fv fv_sub(fv a, fv b) { return a - b; }
static inline fv fv_mul(fv a, fv b) { return a * b; }
static inline fv fv_div(fv a, fv b) { return a / b; }
static inline fv fv_abs(fv a) { return fabsf(a); }
static inline fv fv_exp2(fv a) { return exp2f(a); }
static inline fv fv_exp2_normal(fv a) { return fv_exp2(a); }
static inline fv fv_exp2_from(fv a, float least, float factor)
{
    return a < least ? 0 : a < -126 ? (float)((double)factor * exp2((double)a)) : factor * exp2f(a);
}
static inline fv fv_log2(fv a) { return log2f(a); }

/* A function call where the processor has no such instruction, so hot loops avoid it there
 * (FV_NEAR). */
static inline fv fv_fma(fv a, fv b, fv c) { return fmaf(a, b, c); }

/* a * b + c with one rounding or two, whichever is faster. */
static inline fv fv_muladd(fv a, fv b, fv c)
{
#ifdef __FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* The second operand when either is NaN, as on x86. */
static inline fv fv_max(fv a, fv b) { return a > b ? a : b; }
static inline fv fv_min(fv a, fv b) { return a < b ? a : b; }

static inline mv fv_eq(fv a, fv b) { return a == b; }
static inline mv fv_lt(fv a, fv b) { return a < b; }
static inline mv fv_le(fv a, fv b) { return a <= b; }
static inline mv mv_and(mv a, mv b) { return a & b; }
static inline int mv_all(mv a) { return a; }
static inline fv fv_select(mv m, fv a, fv b) { return m ? a : b; }

static inline uv uv_set1(uint32_t x) { return x; }
static inline uv uv_load(const uint32_t *x) { return *x; }
static inline uv uv_add(uv a, uv b) { return a + b; }
static inline uv uv_and(uv a, uv b) { return a & b; }
static inline uv uv_xor(uv a, uv b) { return a ^ b; }
static inline uv uv_shr(uv a, int n) { return a >> n; }
static inline uv uv_shl(uv a, int n) { return a << n; }
static inline uv uv_lookup(const uint32_t *table, uv n)
{
    (void)n;
    return *table;
}
static inline mv uv_eq(uv a, uv b) { return a == b; }
static inline uv uv_mulhilo(uv a, uv b, uv *hi)
{
    const uint64_t product = (uint64_t)a * b;
    *hi = (uint32_t)(product >> 32);
    return (uint32_t)product;
}
static inline fv fv_from_bits(uv a) { return fattn_f32_from_bits(a); }
static inline uv uv_bits(fv a) { return fattn_f32_bits(a); }

/* Lane r of x[c] is from[r * stride + c]. */
static inline void fv_load_transposed(const float *from, int64_t stride, fv x[FV_LANES])
{
    (void)stride;
    x[0] = *from;
}

/* Lane r of the result is lane (r + n) % FV_LANES of x. n: a power of two below FV_LANES */
static inline fv fv_rotate(fv x, int n)
{
    (void)n;
    return x;
}

/* Lane n of the result is the sum over the lanes of x[n]. */
static inline fv fv_sums(const fv x[FV_LANES]) { return x[0]; }

#endif
