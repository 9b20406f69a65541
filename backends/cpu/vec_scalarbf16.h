/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary in plain C with products of bf16 pairs: that of vec_scalar.h, and the smallest
 * example of the words for pairs. No instruction set uses it; it serves headers that are read alone
 * (vec.h).
 */
#ifndef FATTN_CPU_VEC_SCALARBF16_H
#define FATTN_CPU_VEC_SCALARBF16_H

#include <stdbool.h>
#include <string.h>

#include "backends/cpu/vec_scalar.h"

#define FV_PAIRS 1

/* The first number is the lower half. */
typedef uint32_t pv;

static inline pv pv_load(const void *pairs)
{
    pv x;
    memcpy(&x, pairs, sizeof x);
    return x;
}
static inline pv pv_set1(const void *pair) { return pv_load(pair); }
static inline void pv_store(void *to, pv x) { memcpy(to, &x, sizeof x); }
static inline fv fv_muladd_pairs(pv a, pv b, fv c)
{
    const fv low = fattn_bf16_to_f32((uint16_t)a) * fattn_bf16_to_f32((uint16_t)b);
    return c + low +
           fattn_bf16_to_f32((uint16_t)(a >> 16)) * fattn_bf16_to_f32((uint16_t)(b >> 16));
}

static inline pv pv_ones(void) { return 0x3f803f80; }
static inline pv pv_round(fv first, fv second)
{
    return fattn_bf16_from_f32(first) | (pv)fattn_bf16_from_f32(second) << 16;
}
static inline pv pv_twist(pv rounded) { return rounded; }
static inline void pv_store_rows(uint16_t *first, uint16_t *second, pv rounded)
{
    *first = (uint16_t)rounded;
    *second = (uint16_t)(rounded >> 16);
}
static inline pv pv_zip(const uint16_t *first, const uint16_t *second)
{
    return *first | (pv)*second << 16;
}

/* pv_round() flushes nothing to 0 here. */
static inline pv pv_least(pv a, pv x)
{
    (void)x;
    return a;
}
static inline bool pv_any_zero(pv a)
{
    (void)a;
    return false;
}

#endif
