/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary in AVX-512 with BF16: that of vec_avx512.h, and products of pairs.
 *
 * vdpbf16ps takes twice the terms of an FMA, but has a longer latency: at two a cycle it needs 16
 * to 20 accumulators, and the 24 of vec_avx512.h's register tile are enough.
 */
#ifndef FATTN_CPU_VEC_AVX512BF16_H
#define FATTN_CPU_VEC_AVX512BF16_H

#include <stdbool.h>
#include <string.h>

#include "backends/cpu/vec_avx512.h"

#define FV_PAIRS 1

typedef __m512i pv;

static inline pv pv_set1(const void *pair)
{
    int word;
    memcpy(&word, pair, sizeof word);
    return _mm512_set1_epi32(word);
}
static inline pv pv_load(const void *pairs) { return _mm512_loadu_si512(pairs); }
static inline void pv_store(void *to, pv x) { _mm512_storeu_si512(to, x); }
/* Makes the compiler advance these two pointers. gcc would otherwise keep a pointer for each row,
 * more than there are registers. */
static inline void keep_pointers(const char **a, const char **b)
{
    __asm__("" : "+r"(*a), "+r"(*b));
}

static inline pv pv_load_four(const void *pairs)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128(pairs));
}
static inline fv fv_muladd_pairs(pv a, pv b, fv c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}

static inline pv pv_ones(void) { return _mm512_set1_epi32(0x3f803f80); }
static inline pv pv_round(fv first, fv second)
{
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}
static inline pv pv_least(pv a, pv x) { return _mm512_min_epu16(a, _mm512_add_epi16(x, x)); }
static inline bool pv_any_zero(pv a) { return _mm512_testn_epi16_mask(a, a) != 0; }
static inline pv pv_twist(pv rounded)
{
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i above = _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16);
    return _mm512_permutexvar_epi16(_mm512_or_si512(lane, above), rounded);
}
static inline void pv_store_rows(uint16_t *first, uint16_t *second, pv rounded)
{
    _mm256_storeu_si256((__m256i *)first, _mm512_castsi512_si256(rounded));
    _mm256_storeu_si256((__m256i *)second, _mm512_extracti64x4_epi64(rounded, 1));
}
static inline pv pv_zip(const uint16_t *first, const uint16_t *second)
{
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)second));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

#endif
