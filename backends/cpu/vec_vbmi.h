/* SPDX-License-Identifier: Apache-2.0 */
/*
 * e4m3 by looking up 64 numbers at a time in tables of 128 bytes, which AVX-512 VBMI does in one
 * instruction. Every number of e4m3 is one of bf16, so two tables have the upper and the lower byte
 * of each magnitude as bf16, and the sign moves from bit to bit. With conversions by f16 instead
 * (vec_avx512.h), 16 numbers take nine instructions; here 64 take eight, and NaN needs no more.
 */
#ifndef FATTN_CPU_VEC_VBMI_H
#define FATTN_CPU_VEC_VBMI_H

#include "backends/cpu/vec_avx512.h"

#define FV_BYTES 1

/* Byte SHIFT / 8 of the magnitudes with exponent field E, 1 .. 15, as bf16, whose exponents have
 * 120 more. Those with field 0 are multiples of 2^-9. The last of all is NaN. */
#define E4M3_BYTE(pattern, SHIFT) ((pattern) >> (SHIFT)&0xff)
#define E4M3_NUMBER(E, m, SHIFT) E4M3_BYTE(((E) + 120) << 7 | (m) << 4, SHIFT)
#define E4M3_SEVEN(E, SHIFT)                                                          \
    E4M3_NUMBER(E, 0, SHIFT), E4M3_NUMBER(E, 1, SHIFT), E4M3_NUMBER(E, 2, SHIFT),     \
        E4M3_NUMBER(E, 3, SHIFT), E4M3_NUMBER(E, 4, SHIFT), E4M3_NUMBER(E, 5, SHIFT), \
        E4M3_NUMBER(E, 6, SHIFT)
#define E4M3_EIGHT(E, SHIFT) E4M3_SEVEN(E, SHIFT), E4M3_NUMBER(E, 7, SHIFT)
#define E4M3_TABLE(SHIFT)                                                                   \
    {                                                                                       \
        0, E4M3_NUMBER(-2, 0, SHIFT), E4M3_NUMBER(-1, 0, SHIFT), E4M3_NUMBER(-1, 4, SHIFT), \
            E4M3_NUMBER(0, 0, SHIFT), E4M3_NUMBER(0, 2, SHIFT), E4M3_NUMBER(0, 4, SHIFT),   \
            E4M3_NUMBER(0, 6, SHIFT), E4M3_EIGHT(1, SHIFT), E4M3_EIGHT(2, SHIFT),           \
            E4M3_EIGHT(3, SHIFT), E4M3_EIGHT(4, SHIFT), E4M3_EIGHT(5, SHIFT),               \
            E4M3_EIGHT(6, SHIFT), E4M3_EIGHT(7, SHIFT), E4M3_EIGHT(8, SHIFT),               \
            E4M3_EIGHT(9, SHIFT), E4M3_EIGHT(10, SHIFT), E4M3_EIGHT(11, SHIFT),             \
            E4M3_EIGHT(12, SHIFT), E4M3_EIGHT(13, SHIFT), E4M3_EIGHT(14, SHIFT),            \
            E4M3_SEVEN(15, SHIFT), E4M3_BYTE(0x7fc0, SHIFT)                                 \
    }
static const uint8_t e4m3_lower[128] = E4M3_TABLE(0), e4m3_upper[128] = E4M3_TABLE(8);

/* halves = 64 numbers as bf16, in order: numbers 0 .. 31, and 32 .. 63. */
static inline void e4m3_halves(const uint8_t *x, __m512i halves[2])
{
    /* Unpacking takes eight bytes of each 16, so those that belong together are moved there. */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(x));
    const __m512i lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(e4m3_lower), codes,
                                                   _mm512_loadu_si512(e4m3_lower + 64));
    const __m512i upper = _mm512_permutex2var_epi8(_mm512_loadu_si512(e4m3_upper), codes,
                                                   _mm512_loadu_si512(e4m3_upper + 64));
    /* upper | (codes & 0x80) */
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    const __m512i with_sign = _mm512_ternarylogic_epi64(upper, codes, sign, 0xf8);
    halves[0] = _mm512_unpacklo_epi8(lower, with_sign);
    halves[1] = _mm512_unpackhi_epi8(lower, with_sign);
}

/* to = 64 numbers: of 0 .. 31 the even and the odd ones, then the same of the others. */
static inline void fv_load_e4m3_block(const uint8_t *x, fv to[4])
{
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
    __m512i halves[2];
    e4m3_halves(x, halves);
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(halves[0], 16));
    to[1] = _mm512_castsi512_ps(_mm512_and_si512(halves[0], odd));
    to[2] = _mm512_castsi512_ps(_mm512_slli_epi32(halves[1], 16));
    to[3] = _mm512_castsi512_ps(_mm512_and_si512(halves[1], odd));
}

/* to[0 .. 64) = x[0 .. 64) as bf16 */
static inline void fv_widen_e4m3(uint16_t *to, const uint8_t *x)
{
    __m512i halves[2];
    e4m3_halves(x, halves);
    _mm512_storeu_si512(to, halves[0]);
    _mm512_storeu_si512(to + 32, halves[1]);
}

#endif
