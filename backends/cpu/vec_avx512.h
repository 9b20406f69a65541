/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary in AVX-512 (F, DQ, BW, VL): 16 lanes, 32 registers. vec_scalar.h says what each
 * word means.
 *
 * The register tile is 8 rows by 3 vectors: 24 accumulators, 3 operands and a broadcast. Every FMA
 * then waits for nothing but one of two ports, and a step of 24 FMAs needs 3 loads and 8
 * broadcasts, within what two load ports deliver.
 */
#ifndef FATTN_CPU_VEC_AVX512_H
#define FATTN_CPU_VEC_AVX512_H

#include <immintrin.h>

#include "backends/cpu/vec_math.h"

#define FV_LANES 16
#define FV_NQ 3
#define FV_NK 8
#define FV_ND 16
#define FV_STEPS 5
#define FV_NEAR 1
#define FV_UNROLL 4
#define FV_ROW_MAJOR_KEYS(d) (2 * (d) / 16)
#define FV_BLOCKED_KEYS(d) (6 * (d) / 16)
#define FV_KEYS_AT_ONCE 4
#define FV_BLOCKS_AT_ONCE 4

typedef __m512 fv;
typedef __m512i uv;
typedef __mmask16 mv;

static inline mv first_lanes(int n) { return (mv)((1u << n) - 1); }

static inline fv fv_set1(float x) { return _mm512_set1_ps(x); }
static inline fv fv_load(const float *x) { return _mm512_loadu_ps(x); }
static inline fv fv_load_part(const float *x, int n)
{
    return _mm512_maskz_loadu_ps(first_lanes(n), x);
}
static inline fv fv_load_f16(const uint16_t *x)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}
static inline fv fv_load_bf16(const uint16_t *x)
{
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline fv fv_load_part_f16(const uint16_t *x, int n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), x));
}
static inline fv fv_load_part_bf16(const uint16_t *x, int n)
{
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
/* Shifting an e4m3 number up to f16's exponent and fraction divides it by 2^8, exactly: f16 has
 * room for its subnormal numbers too. NaN, which would become 480, is replaced. */
static inline fv fv_from_e4m3(__m128i bytes)
{
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80));
    const __m128i negative = _mm_or_si128(bytes, _mm_set1_epi8((char)0x80));
    const mv number = _mm_cmpneq_epi8_mask(negative, _mm_set1_epi8(-1));
    const fv scaled = _mm512_cvtph_ps(halves);
    return _mm512_mask_mul_ps(_mm512_set1_ps(NAN), number, scaled, _mm512_set1_ps(0x1p8f));
}
static inline fv fv_load_e4m3(const uint8_t *x)
{
    return fv_from_e4m3(_mm_loadu_si128((const __m128i *)x));
}
static inline fv fv_load_part_e4m3(const uint8_t *x, int n)
{
    return fv_from_e4m3(_mm_maskz_loadu_epi8(first_lanes(n), x));
}
static inline fv fv_load_bf16_even(const uint16_t *x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(x), 16));
}
static inline fv fv_load_bf16_odd(const uint16_t *x)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32((int)0xffff0000)));
}
static inline void fv_store(float *to, fv x) { _mm512_storeu_ps(to, x); }
static inline void fv_store_part(float *to, fv x, int n)
{
    _mm512_mask_storeu_ps(to, first_lanes(n), x);
}
static inline void fv_store_f16(uint16_t *to, fv x)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
/* To nearest, ties to even, by adding just under half of the last bit kept; NaN stays NaN,
 * quiet. */
static inline uv fv_bf16_bits(fv x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_add_epi32(bits, half);
    const mv nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
}
static inline void fv_store_bf16(uint16_t *to, fv x)
{
    const __m512i upper = _mm512_srli_epi32(fv_bf16_bits(x), 16);
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(upper));
}

static inline fv fv_add(fv a, fv b) { return _mm512_add_ps(a, b); }
static inline fv fv_sub(fv a, fv b) { return _mm512_sub_ps(a, b); }
static inline fv fv_mul(fv a, fv b) { return _mm512_mul_ps(a, b); }
static inline fv fv_div(fv a, fv b) { return _mm512_div_ps(a, b); }
static inline fv fv_abs(fv a) { return _mm512_abs_ps(a); }
static inline fv fv_fma(fv a, fv b, fv c) { return _mm512_fmadd_ps(a, b, c); }
static inline fv fv_muladd(fv a, fv b, fv c) { return _mm512_fmadd_ps(a, b, c); }
static inline fv fv_max(fv a, fv b) { return _mm512_max_ps(a, b); }
static inline fv fv_min(fv a, fv b) { return _mm512_min_ps(a, b); }

/* 2^(a - floor a) */
static inline fv exp2_fraction(fv a)
{
    const fv x = _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    fv y = fv_muladd(x, fv_set1(EXP2_C6), fv_set1(EXP2_C5));
    y = fv_muladd(x, y, fv_set1(EXP2_C4));
    y = fv_muladd(x, y, fv_set1(EXP2_C3));
    y = fv_muladd(x, y, fv_set1(EXP2_C2));
    y = fv_muladd(x, y, fv_set1(EXP2_C1));
    return fv_muladd(x, y, fv_set1(1.0f));
}

/* 2^a = 2^(a - floor a) scaled by floor a: both steps are one instruction, and both take
 * infinities, NaN and results below the normal range as they come. */
static inline fv fv_exp2(fv a) { return _mm512_scalef_ps(exp2_fraction(a), a); }

static inline fv fv_exp2_normal(fv a) { return fv_exp2(a); }

static inline fv fv_exp2_from(fv a, float least, float factor)
{
    const mv above = _mm512_cmp_ps_mask(a, fv_set1(least), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(above, fv_mul(exp2_fraction(a), fv_set1(factor)), a);
}

/*
 * a = 2^n m with 3/4 <= m < 3/2, and ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= 1/5, whose
 * series is cut where the next term is 1e-8 of the sum. m - 1 is exact, and the rounding errors of
 * m + 1, of the quotient and of 2 / ln 2 are put back: n and log2 m may nearly cancel. The
 * instructions give -inf, +inf and NaN for 0, +inf, and NaN or a < 0.
 */
static inline fv fv_log2(fv a)
{
    const fv one = fv_set1(1.0f), factor = fv_set1(2.88539004f), factor_rest = fv_set1(3.8519e-8f);
    const fv m = _mm512_getmant_ps(a, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_nan);
    const fv low = _mm512_getexp_ps(a);
    const fv n = _mm512_mask_add_ps(low, _mm512_cmp_ps_mask(m, one, _CMP_LT_OQ), low, one);
    const fv top = fv_sub(m, one), sum = fv_add(m, one), lost = fv_sub(m, fv_sub(sum, one));
    const fv reciprocal = fv_div(one, sum), s = fv_mul(top, reciprocal), z = fv_mul(s, s);
    const fv s_rest = fv_mul(_mm512_fnmadd_ps(s, lost, _mm512_fnmadd_ps(s, sum, top)), reciprocal);
    fv y = fv_muladd(z, fv_set1(0.320598898f), fv_set1(0.412198583f));
    y = fv_muladd(z, y, fv_set1(0.577078016f));
    y = fv_mul(z, fv_muladd(z, y, fv_set1(0.961796694f)));
    const fv rest = fv_muladd(s_rest, factor, fv_mul(s, fv_add(y, factor_rest)));
    return fv_add(fv_muladd(s, factor, n), rest);
}

static inline mv fv_eq(fv a, fv b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline mv fv_lt(fv a, fv b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline mv fv_le(fv a, fv b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
static inline mv mv_and(mv a, mv b) { return (mv)(a & b); }
static inline int mv_all(mv a) { return a == 0xffff; }
static inline fv fv_select(mv m, fv a, fv b) { return _mm512_mask_blend_ps(m, b, a); }

static inline uv uv_set1(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline uv uv_load(const uint32_t *x) { return _mm512_loadu_si512(x); }
static inline uv uv_add(uv a, uv b) { return _mm512_add_epi32(a, b); }
static inline uv uv_and(uv a, uv b) { return _mm512_and_si512(a, b); }
static inline uv uv_xor(uv a, uv b) { return _mm512_xor_si512(a, b); }
static inline uv uv_shr(uv a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
static inline uv uv_shl(uv a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
static inline uv uv_lookup(const uint32_t *table, uv n)
{
    return _mm512_permutex2var_epi32(uv_load(table), n, uv_load(table + 16));
}
static inline mv uv_eq(uv a, uv b) { return _mm512_cmpeq_epi32_mask(a, b); }
static inline uv uv_mulhilo(uv a, uv b, uv *hi)
{
    const uv even = _mm512_mul_epu32(a, b);
    const uv odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    *hi = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    return _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}
static inline fv fv_from_bits(uv a) { return _mm512_castsi512_ps(a); }
static inline uv uv_bits(fv a) { return _mm512_castps_si512(a); }

static inline fv fv_load_four(const float *x) { return _mm512_broadcast_f32x4(_mm_loadu_ps(x)); }

static inline fv fv_rotate(fv x, int n)
{
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(n)), x);
}

/* Insertions from memory run on either of two ports, shuffles on one only. */
static inline fv fv_load_blocks(const float *from, int64_t stride)
{
    const fv one = _mm512_castps128_ps512(_mm_loadu_ps(from));
    const fv two = _mm512_insertf32x4(one, _mm_loadu_ps(from + stride), 1);
    const fv three = _mm512_insertf32x4(two, _mm_loadu_ps(from + 2 * stride), 2);
    return _mm512_insertf32x4(three, _mm_loadu_ps(from + 3 * stride), 3);
}

static inline void fv_store_blocks(float *to, int64_t stride, fv x)
{
    _mm_storeu_ps(to, _mm512_castps512_ps128(x));
    _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(x, 1));
    _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(x, 3));
}

/* Four columns at a time: rows that are 4 apart fill a vector, which is transposed within its
 * blocks of 128 bits. */
static inline __attribute__((always_inline)) void fv_load_transposed(const float *from,
                                                                     int64_t stride, fv x[FV_LANES])
{
    for (int c = 0; c < 16; c += 4) {
        __m512 y[4];
        for (int r = 0; r < 4; r++) {
            y[r] = fv_load_blocks(from + r * stride + c, 4 * stride);
        }
        const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(y[0], y[1]));
        const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(y[0], y[1]));
        const __m512d low2 = _mm512_castps_pd(_mm512_unpacklo_ps(y[2], y[3]));
        const __m512d high2 = _mm512_castps_pd(_mm512_unpackhi_ps(y[2], y[3]));
        x[c] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, low2));
        x[c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, low2));
        x[c + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, high2));
        x[c + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, high2));
    }
}

/* In each block of 128 bits: the sums of lanes 0 and 2 and of lanes 1 and 3, a's two, then b's. A
 * shuffle has one port, a blend two. */
static inline fv join_pairs(fv a, fv b)
{
    return fv_add(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}

static inline fv fv_block_sums(const fv x[4])
{
    const fv a = join_pairs(x[0], x[1]), b = join_pairs(x[2], x[3]);
    return fv_add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* The sums of blocks 0 and 2 and of blocks 1 and 3: a's two, then b's. */
static inline fv join_blocks(fv a, fv b)
{
    return fv_add(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}

static inline fv fv_sums(const fv x[FV_LANES])
{
    const fv low = join_blocks(fv_block_sums(x), fv_block_sums(x + 4));
    const fv high = join_blocks(fv_block_sums(x + 8), fv_block_sums(x + 12));
    return fv_add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

#endif
