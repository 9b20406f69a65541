/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary in AVX2 with FMA and F16C: 8 lanes, 16 registers. vec_scalar.h says what each word
 * means. The register tile is 4 rows by 3 vectors: 12 accumulators, 3 operands and a broadcast.
 */
#ifndef FATTN_CPU_VEC_AVX2_H
#define FATTN_CPU_VEC_AVX2_H

#include <immintrin.h>
#include <string.h>

#include "backends/cpu/vec_math.h"

#define FV_LANES 8
#define FV_NQ 3
#define FV_NK 4
#define FV_ND 8
#define FV_STEPS 3
#define FV_NEAR 1
#define FV_UNROLL 1
#define FV_ROW_MAJOR_KEYS(d) (3 * (d) / 16)
#define FV_BLOCKED_KEYS(d) 0
#define FV_KEYS_AT_ONCE 3
#define FV_BLOCKS_AT_ONCE 2

typedef __m256 fv;
typedef __m256i uv;
typedef __m256 mv; /* all bits of a lane, or none */

/* All bits of the first n lanes. */
static inline __m256i first_lanes(int n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
}

static inline fv fv_set1(float x) { return _mm256_set1_ps(x); }
static inline fv fv_load(const float *x) { return _mm256_loadu_ps(x); }
static inline fv fv_load_part(const float *x, int n)
{
    return _mm256_maskload_ps(x, first_lanes(n));
}
static inline fv fv_load_f16(const uint16_t *x)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}
static inline fv fv_load_bf16(const uint16_t *x)
{
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* The first n of 8 numbers, and zeros. From four on, two loads that overlap have them all. */
static inline __m128i load_part_16(const uint16_t *x, int n)
{
    uint64_t low = 0, high = 0;
    uint32_t two = 0;
    if (n == FV_LANES) {
        return _mm_loadu_si128((const __m128i *)x);
    }
    if (n >= 4) {
        memcpy(&low, x, sizeof low);
        memcpy(&high, x + n - 4, sizeof high);
        high = high >> 16 * (7 - n) >> 16;
    } else if (n >= 2) {
        memcpy(&two, x, sizeof two);
        low = two | (n == 3 ? (uint64_t)x[2] << 32 : 0);
    } else if (n == 1) {
        low = x[0];
    }
    return _mm_set_epi64x((int64_t)high, (int64_t)low);
}
static inline fv fv_load_part_f16(const uint16_t *x, int n)
{
    return _mm256_cvtph_ps(load_part_16(x, n));
}
static inline fv fv_load_part_bf16(const uint16_t *x, int n)
{
    const __m256i wide = _mm256_cvtepu16_epi32(load_part_16(x, n));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
/* Shifting an e4m3 number up to f16's exponent and fraction divides it by 2^8, exactly: f16 has
 * room for its subnormal numbers too. NaN, which would become 480, is replaced. */
static inline fv fv_from_e4m3(__m128i bytes)
{
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    const __m128i halves = _mm_and_si128(wide, _mm_set1_epi16((short)0xbf80));
    const __m128i magnitude = _mm_and_si128(halves, _mm_set1_epi16(0x7fff));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
    const __m128i quiet = _mm_and_si128(nan, _mm_set1_epi16(0x7e00));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(halves, quiet)), _mm256_set1_ps(0x1p8f));
}
static inline fv fv_load_e4m3(const uint8_t *x)
{
    return fv_from_e4m3(_mm_loadl_epi64((const __m128i *)x));
}
static inline fv fv_load_part_e4m3(const uint8_t *x, int n)
{
    uint8_t some[FV_LANES] = {0};
    memcpy(some, x, (size_t)n);
    return fv_load_e4m3(some);
}
static inline fv fv_load_bf16_even(const uint16_t *x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)x), 16));
}
static inline fv fv_load_bf16_odd(const uint16_t *x)
{
    const __m256i two = _mm256_loadu_si256((const __m256i *)x);
    return _mm256_castsi256_ps(_mm256_and_si256(two, _mm256_set1_epi32((int)0xffff0000)));
}
static inline void fv_store(float *to, fv x) { _mm256_storeu_ps(to, x); }
static inline void fv_store_part(float *to, fv x, int n)
{
    _mm256_maskstore_ps(to, first_lanes(n), x);
}
static inline void fv_store_f16(uint16_t *to, fv x)
{
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
/* To nearest, ties to even, by adding just under half of the last bit kept; NaN stays NaN,
 * quiet. */
static inline uv fv_bf16_bits(fv x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, nan);
}
static inline void fv_store_bf16(uint16_t *to, fv x)
{
    const __m256i upper = _mm256_srli_epi32(fv_bf16_bits(x), 16);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(halves));
}

static inline fv fv_add(fv a, fv b) { return _mm256_add_ps(a, b); }
static inline fv fv_sub(fv a, fv b) { return _mm256_sub_ps(a, b); }
static inline fv fv_mul(fv a, fv b) { return _mm256_mul_ps(a, b); }
static inline fv fv_div(fv a, fv b) { return _mm256_div_ps(a, b); }
static inline fv fv_abs(fv a) { return _mm256_andnot_ps(fv_set1(-0.0f), a); }
static inline fv fv_fma(fv a, fv b, fv c) { return _mm256_fmadd_ps(a, b, c); }
static inline fv fv_muladd(fv a, fv b, fv c) { return _mm256_fmadd_ps(a, b, c); }
static inline fv fv_max(fv a, fv b) { return _mm256_max_ps(a, b); }
static inline fv fv_min(fv a, fv b) { return _mm256_min_ps(a, b); }

/* x 2^n, by adding n to the exponent, which must not overflow. */
static inline fv add_exponent(fv x, __m256i n)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
}

/* 2^(a - floor a), and *whole = floor a. For NaN, *whole is -2^31, which the shift in
 * add_exponent() turns into 0. */
static inline fv exp2_fraction(fv a, __m256i *whole)
{
    const fv low = _mm256_floor_ps(a), x = fv_sub(a, low);
    fv y = fv_muladd(x, fv_set1(EXP2_C6), fv_set1(EXP2_C5));
    y = fv_muladd(x, y, fv_set1(EXP2_C4));
    y = fv_muladd(x, y, fv_set1(EXP2_C3));
    y = fv_muladd(x, y, fv_set1(EXP2_C2));
    y = fv_muladd(x, y, fv_set1(EXP2_C1));
    *whole = _mm256_cvtps_epi32(low);
    return fv_muladd(x, y, fv_set1(1.0f));
}

/* factor 2^a = factor 2^(a - floor a) * 2^(floor a), the latter in two factors, because results
 * reach from 2^-150 to beyond 2^127. */
static inline fv exp2_times(fv a, float factor)
{
    __m256i n;
    const fv fraction = exp2_fraction(a, &n);
    const fv y = factor == 1.0f ? fraction : fv_mul(fraction, fv_set1(factor));
    const __m256i half = _mm256_srai_epi32(n, 1), rest = _mm256_sub_epi32(n, half);
    return fv_mul(add_exponent(y, half), add_exponent(fv_set1(1.0f), rest));
}

static inline fv fv_exp2_normal(fv a)
{
    __m256i n;
    const fv fraction = exp2_fraction(a, &n);
    return add_exponent(fraction, n);
}

/* Clamping keeps NaN: max and min return their second operand then. At -inf the clamped power,
 * 2^-151, rounds to 0. */
static inline fv fv_exp2(fv a)
{
    return exp2_times(fv_min(fv_set1(129.0f), fv_max(fv_set1(-151.0f), a)), 1.0f);
}

static inline fv fv_exp2_from(fv a, float least, float factor)
{
    const fv low = _mm256_cmp_ps(a, fv_set1(least), _CMP_LT_OQ);
    const fv clamped = fv_min(fv_set1(129.0f), _mm256_andnot_ps(low, a));
    return _mm256_andnot_ps(low, exp2_times(clamped, factor));
}

static inline fv fv_log2(fv a)
{
    float lanes[FV_LANES];
    fv_store(lanes, a);
    log2_lanes(lanes, FV_LANES);
    return fv_load(lanes);
}

static inline mv fv_eq(fv a, fv b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
static inline mv fv_lt(fv a, fv b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline mv fv_le(fv a, fv b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
static inline mv mv_and(mv a, mv b) { return _mm256_and_ps(a, b); }
static inline int mv_all(mv a) { return _mm256_movemask_ps(a) == 0xff; }
static inline fv fv_select(mv m, fv a, fv b) { return _mm256_blendv_ps(b, a, m); }

static inline uv uv_set1(uint32_t x) { return _mm256_set1_epi32((int)x); }
static inline uv uv_load(const uint32_t *x) { return _mm256_loadu_si256((const __m256i *)x); }
static inline uv uv_add(uv a, uv b) { return _mm256_add_epi32(a, b); }
static inline uv uv_and(uv a, uv b) { return _mm256_and_si256(a, b); }
static inline uv uv_xor(uv a, uv b) { return _mm256_xor_si256(a, b); }
static inline uv uv_shr(uv a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline uv uv_shl(uv a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
static inline uv uv_lookup(const uint32_t *table, uv n)
{
    return _mm256_permutevar8x32_epi32(uv_load(table), n);
}
static inline mv uv_eq(uv a, uv b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)); }
static inline uv uv_mulhilo(uv a, uv b, uv *hi)
{
    const uv even = _mm256_mul_epu32(a, b);
    const uv odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    *hi = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
static inline fv fv_from_bits(uv a) { return _mm256_castsi256_ps(a); }
static inline uv uv_bits(fv a) { return _mm256_castps_si256(a); }

static inline fv fv_load_four(const float *x) { return _mm256_broadcast_ps((const __m128 *)x); }
static inline fv fv_load_blocks(const float *from, int64_t stride)
{
    const fv one = _mm256_castps128_ps256(_mm_loadu_ps(from));
    return _mm256_insertf128_ps(one, _mm_loadu_ps(from + stride), 1);
}

/* Four columns at a time, as in vec_avx512.h. */
static inline __attribute__((always_inline)) void fv_load_transposed(const float *from,
                                                                     int64_t stride, fv x[FV_LANES])
{
    for (int c = 0; c < 8; c += 4) {
        __m256 y[4];
        for (int r = 0; r < 4; r++) {
            y[r] = fv_load_blocks(from + r * stride + c, 4 * stride);
        }
        const __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(y[0], y[1]));
        const __m256d high = _mm256_castps_pd(_mm256_unpackhi_ps(y[0], y[1]));
        const __m256d low2 = _mm256_castps_pd(_mm256_unpacklo_ps(y[2], y[3]));
        const __m256d high2 = _mm256_castps_pd(_mm256_unpackhi_ps(y[2], y[3]));
        x[c] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, low2));
        x[c + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, low2));
        x[c + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high, high2));
        x[c + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high, high2));
    }
}

static inline fv fv_rotate(fv x, int n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_permutevar8x32_ps(x, _mm256_add_epi32(lane, _mm256_set1_epi32(n)));
}

static inline fv fv_block_sums(const fv x[4])
{
    return _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
}

static inline void fv_store_sums(float *to, const fv x[4])
{
    const fv sums = fv_block_sums(x);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}

static inline fv fv_sums(const fv x[FV_LANES])
{
    const fv low = fv_block_sums(x), high = fv_block_sums(x + 4);
    return fv_add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

#endif
