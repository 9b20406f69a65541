/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary in Advanced SIMD of AArch64 (NEON): 4 lanes, 32 registers. vec_scalar.h defines
 * each word.
 *
 * The register tile is 8 rows by 3 vectors. It takes 24 registers for accumulators, 6 for the
 * vectors of two steps, and one for a pair of factors, one per step. FMLA takes its factor from a
 * lane, so a factor is loaded and never spread: two steps, 48 FMLA, need 6 loads of vectors and 8
 * of pairs.
 */
#ifndef FATTN_CPU_VEC_NEON_H
#define FATTN_CPU_VEC_NEON_H

#include <arm_neon.h>
#include <string.h>

#include "backends/cpu/vec_math.h"

#define FV_LANES 4
#define FV_NQ 3
#define FV_NK 8
#define FV_ND 16
#define FV_STEPS 0
#define FV_NEAR 1
#define FV_UNROLL 1

typedef float32x4_t fv;
typedef uint32x4_t uv;
typedef uint32x4_t mv; /* all bits of a lane, or none */

#define FV_FACTORS 2
typedef float32x2_t ff;
static inline ff ff_set1(float x) { return vdup_n_f32(x); }
static inline ff ff_load(const float *x)
{
    ff pair = vld1_f32(x);
    __asm__("" : "+w"(pair)); /* or gcc loads each lane on its own */
    return pair;
}
static inline fv ff_muladd(ff a, int n, fv b, fv c)
{
    return n == 0 ? vfmaq_lane_f32(c, b, a, 0) : vfmaq_lane_f32(c, b, a, 1);
}

static inline fv fv_set1(float x) { return vdupq_n_f32(x); }
static inline fv fv_load(const float *x) { return vld1q_f32(x); }
static inline fv fv_load_part(const float *x, int n)
{
    fv y = fv_set1(0);
    y = n > 0 ? vld1q_lane_f32(x, y, 0) : y;
    y = n > 1 ? vld1q_lane_f32(x + 1, y, 1) : y;
    y = n > 2 ? vld1q_lane_f32(x + 2, y, 2) : y;
    return n > 3 ? vld1q_lane_f32(x + 3, y, 3) : y;
}
static inline fv fv_load_f16(const uint16_t *x)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
}
static inline fv fv_load_bf16(const uint16_t *x)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16));
}
static inline uint16x4_t load_part_16(const uint16_t *x, int n)
{
    uint16x4_t y = vdup_n_u16(0);
    y = n > 0 ? vld1_lane_u16(x, y, 0) : y;
    y = n > 1 ? vld1_lane_u16(x + 1, y, 1) : y;
    y = n > 2 ? vld1_lane_u16(x + 2, y, 2) : y;
    return n > 3 ? vld1_lane_u16(x + 3, y, 3) : y;
}
static inline fv fv_load_part_f16(const uint16_t *x, int n)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(load_part_16(x, n)));
}
static inline fv fv_load_part_bf16(const uint16_t *x, int n)
{
    return vreinterpretq_f32_u32(vshll_n_u16(load_part_16(x, n), 16));
}
/* Shifting an e4m3 number up to f16's exponent and fraction divides it by 2^8, exactly: f16 has
 * room for its subnormal numbers too. NaN, which would become 480, is replaced. */
static inline fv fv_load_part_e4m3(const uint8_t *x, int n)
{
    uint8_t some[8] = {0};
    memcpy(some, x, (size_t)n);
    const int16x4_t wide = vget_low_s16(vshll_n_s8(vreinterpret_s8_u8(vld1_u8(some)), 7));
    const uint16x4_t halves = vand_u16(vreinterpret_u16_s16(wide), vdup_n_u16(0xbf80));
    const uint16x4_t magnitude = vand_u16(halves, vdup_n_u16(0x7fff));
    const uint16x4_t nan = vceq_u16(magnitude, vdup_n_u16(0x3f80));
    const uint16x4_t quiet = vand_u16(nan, vdup_n_u16(0x7e00));
    return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(halves, quiet))), 0x1p8f);
}
static inline fv fv_load_e4m3(const uint8_t *x) { return fv_load_part_e4m3(x, FV_LANES); }
static inline fv fv_load_bf16_even(const uint16_t *x)
{
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(x)), 16));
}
static inline fv fv_load_bf16_odd(const uint16_t *x)
{
    const uint32x4_t two = vreinterpretq_u32_u16(vld1q_u16(x));
    return vreinterpretq_f32_u32(vandq_u32(two, vdupq_n_u32(0xffff0000u)));
}
static inline void fv_store(float *to, fv x) { vst1q_f32(to, x); }
static inline void fv_store_part(float *to, fv x, int n)
{
    if (n > 0) {
        vst1q_lane_f32(to, x, 0);
    }
    if (n > 1) {
        vst1q_lane_f32(to + 1, x, 1);
    }
    if (n > 2) {
        vst1q_lane_f32(to + 2, x, 2);
    }
    if (n > 3) {
        vst1q_lane_f32(to + 3, x, 3);
    }
}
static inline void fv_store_f16(uint16_t *to, fv x)
{
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
/* To nearest, ties to even, by adding just under half of the last bit kept; NaN stays NaN,
 * quiet. */
static inline uv fv_bf16_bits(fv x)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vbslq_u32(vceqq_f32(x, x), rounded, quiet);
}
static inline void fv_store_bf16(uint16_t *to, fv x)
{
    vst1_u16(to, vshrn_n_u32(fv_bf16_bits(x), 16));
}

static inline fv fv_add(fv a, fv b) { return vaddq_f32(a, b); }
static inline fv fv_sub(fv a, fv b) { return vsubq_f32(a, b); }
static inline fv fv_mul(fv a, fv b) { return vmulq_f32(a, b); }
static inline fv fv_div(fv a, fv b) { return vdivq_f32(a, b); }
static inline fv fv_abs(fv a) { return vabsq_f32(a); }
static inline fv fv_fma(fv a, fv b, fv c) { return vfmaq_f32(c, a, b); }
static inline fv fv_muladd(fv a, fv b, fv c) { return vfmaq_f32(c, a, b); }
/* FMAX returns NaN if either operand is NaN; the vocabulary requires the second operand. */
static inline fv fv_max(fv a, fv b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline fv fv_min(fv a, fv b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

/* x 2^n, by adding n to the exponent, which must not overflow. */
static inline fv add_exponent(fv x, int32x4_t n)
{
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(n, 23)));
}

/* 2^(a - floor a), from 1 to 2. */
static inline fv exp2_fraction(fv a)
{
    const fv x = fv_sub(a, vrndmq_f32(a));
    fv y = fv_muladd(x, fv_set1(EXP2_C6), fv_set1(EXP2_C5));
    y = fv_muladd(x, y, fv_set1(EXP2_C4));
    y = fv_muladd(x, y, fv_set1(EXP2_C3));
    y = fv_muladd(x, y, fv_set1(EXP2_C2));
    y = fv_muladd(x, y, fv_set1(EXP2_C1));
    return fv_muladd(x, y, fv_set1(1.0f));
}

/*
 * factor 2^a = factor 2^(a - floor a) * 2^(floor a), the latter in two factors, because results
 * reach from 2^-150 to beyond 2^127, for -151 <= a <= 129. The factor is up to 2^32, half of floor
 * a in -76 .. 64. The integer of NaN is 0.
 */
static inline fv exp2_times(fv a, float factor)
{
    const fv fraction = exp2_fraction(a);
    const fv y = factor == 1.0f ? fraction : fv_mul(fraction, fv_set1(factor));
    const int32x4_t n = vcvtmq_s32_f32(a), half = vshrq_n_s32(n, 1);
    return fv_mul(add_exponent(y, half), add_exponent(fv_set1(1.0f), vsubq_s32(n, half)));
}

static inline fv fv_exp2_normal(fv a) { return add_exponent(exp2_fraction(a), vcvtmq_s32_f32(a)); }

/* FMAX and FMIN keep NaN. At -inf the clamped power, 2^-151, rounds to 0. */
static inline fv fv_exp2(fv a)
{
    return exp2_times(vminq_f32(vmaxq_f32(a, fv_set1(-151.0f)), fv_set1(129.0f)), 1.0f);
}

static inline fv fv_exp2_from(fv a, float least, float factor)
{
    const fv zero = fv_set1(0);
    const uint32x4_t low = vcltq_f32(a, fv_set1(least));
    const fv clamped = vminq_f32(vbslq_f32(low, zero, a), fv_set1(129.0f));
    return vbslq_f32(low, zero, exp2_times(clamped, factor));
}

static inline fv fv_log2(fv a)
{
    float lanes[FV_LANES];
    fv_store(lanes, a);
    log2_lanes(lanes, FV_LANES);
    return fv_load(lanes);
}

static inline mv fv_eq(fv a, fv b) { return vceqq_f32(a, b); }
static inline mv fv_lt(fv a, fv b) { return vcltq_f32(a, b); }
static inline mv fv_le(fv a, fv b) { return vcleq_f32(a, b); }
static inline mv mv_and(mv a, mv b) { return vandq_u32(a, b); }
static inline int mv_all(mv a) { return vminvq_u32(a) != 0; }
static inline fv fv_select(mv m, fv a, fv b) { return vbslq_f32(m, a, b); }

static inline uv uv_set1(uint32_t x) { return vdupq_n_u32(x); }
static inline uv uv_load(const uint32_t *x) { return vld1q_u32(x); }
static inline uv uv_add(uv a, uv b) { return vaddq_u32(a, b); }
static inline uv uv_and(uv a, uv b) { return vandq_u32(a, b); }
static inline uv uv_xor(uv a, uv b) { return veorq_u32(a, b); }
static inline uv uv_shr(uv a, int n) { return vshlq_u32(a, vdupq_n_s32(-n)); }
static inline uv uv_shl(uv a, int n) { return vshlq_u32(a, vdupq_n_s32(n)); }
static inline uv uv_lookup(const uint32_t *table, uv n)
{
    (void)n;
    return vld1q_dup_u32(table);
}
static inline mv uv_eq(uv a, uv b) { return vceqq_u32(a, b); }
static inline uv uv_mulhilo(uv a, uv b, uv *hi)
{
    const uv low = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vget_low_u32(b)));
    const uv high = vreinterpretq_u32_u64(vmull_high_u32(a, b));
    *hi = vuzp2q_u32(low, high);
    return vuzp1q_u32(low, high);
}
static inline fv fv_from_bits(uv a) { return vreinterpretq_f32_u32(a); }
static inline uv uv_bits(fv a) { return vreinterpretq_u32_f32(a); }

static inline __attribute__((always_inline)) void fv_load_transposed(const float *from,
                                                                     int64_t stride, fv x[FV_LANES])
{
    const fv a = fv_load(from), b = fv_load(from + stride);
    const fv c = fv_load(from + 2 * stride), d = fv_load(from + 3 * stride);
    const fv ac_low = vzip1q_f32(a, c), ac_high = vzip2q_f32(a, c);
    const fv bd_low = vzip1q_f32(b, d), bd_high = vzip2q_f32(b, d);
    x[0] = vzip1q_f32(ac_low, bd_low);
    x[1] = vzip2q_f32(ac_low, bd_low);
    x[2] = vzip1q_f32(ac_high, bd_high);
    x[3] = vzip2q_f32(ac_high, bd_high);
}

static inline fv fv_rotate(fv x, int n) { return n == 1 ? vextq_f32(x, x, 1) : vextq_f32(x, x, 2); }

static inline fv fv_sums(const fv x[FV_LANES])
{
    return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
}

#endif
