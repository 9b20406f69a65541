/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary in Advanced SIMD with BF16: that of vec_neon.h, and products of pairs.
 *
 * BFDOT works as FMLA does on twice the terms, and takes its pair from a lane as FMLA takes its
 * factor, so the register tile and its loads are those of vec_neon.h. (BFMMLA multiplies twice as
 * much again, 2 by 4 numbers with 4 by 2, but needs rows and columns interleaved two by two.)
 */
#ifndef FATTN_CPU_VEC_NEONBF16_H
#define FATTN_CPU_VEC_NEONBF16_H

#include <stdbool.h>
#include <string.h>

#include "backends/cpu/vec_neon.h"

#define FV_PAIRS 1

typedef uint16x8_t pv;

static inline pv pv_set1(const void *pair)
{
    uint32_t word;
    memcpy(&word, pair, sizeof word);
    return vreinterpretq_u16_u32(vdupq_n_u32(word));
}
static inline pv pv_load(const void *pairs) { return vld1q_u16(pairs); }
static inline void pv_store(void *to, pv x) { vst1q_u16(to, x); }
static inline fv fv_muladd_pairs(pv a, pv b, fv c)
{
    return vbfdotq_f32(c, vreinterpretq_bf16_u16(a), vreinterpretq_bf16_u16(b));
}

typedef uint16x4_t pf;
static inline pf pf_set1(const void *pair)
{
    uint32_t word;
    memcpy(&word, pair, sizeof word);
    return vreinterpret_u16_u32(vdup_n_u32(word));
}
static inline pf pf_load(const void *pairs)
{
    pf two = vld1_u16(pairs);
    __asm__("" : "+w"(two)); /* as in ff_load() */
    return two;
}
static inline fv pf_muladd(pf a, int n, pv b, fv c)
{
    const bfloat16x4_t two = vreinterpret_bf16_u16(a);
    const bfloat16x8_t with = vreinterpretq_bf16_u16(b);
    return n == 0 ? vbfdotq_lane_f32(c, with, two, 0) : vbfdotq_lane_f32(c, with, two, 1);
}

/* Without the barrier, gcc 12 would encode this constant as an immediate of f16. */
static inline pv pv_ones(void)
{
    uint32x4_t pairs = vdupq_n_u32(0x3f803f80);
    __asm__("" : "+w"(pairs));
    return vreinterpretq_u16_u32(pairs);
}
static inline pv pv_round(fv first, fv second)
{
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
}
static inline pv pv_least(pv a, pv x) { return vminq_u16(a, vshlq_n_u16(x, 1)); }
static inline bool pv_any_zero(pv a) { return vminvq_u16(a) == 0; }
static inline pv pv_twist(pv rounded)
{
    return vzip1q_u16(rounded, vextq_u16(rounded, rounded, 4));
}
static inline void pv_store_rows(uint16_t *first, uint16_t *second, pv rounded)
{
    vst1_u16(first, vget_low_u16(rounded));
    vst1_u16(second, vget_high_u16(rounded));
}
static inline pv pv_zip(const uint16_t *first, const uint16_t *second)
{
    const uint16x4_t low = vld1_u16(first), high = vld1_u16(second);
    return vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high));
}

#endif
