/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector vocabulary of a unit: the header FATTN_VEC, and defaults for the words that it may
 * leave out. vec_scalar.h defines each word. A header that is read alone, by an editor or by
 * tests/lint/alone.py, gets the vocabulary of plain C.
 */
#ifndef FATTN_CPU_VEC_H
#define FATTN_CPU_VEC_H

#ifndef FATTN_VEC
#define FATTN_ISA scalar
#define FATTN_VEC "backends/cpu/vec_scalarbf16.h"
#endif
#include FATTN_VEC

#ifndef FV_PAIRS
#define FV_PAIRS 0
#endif
#ifndef FV_TILES
#define FV_TILES 0
#endif
#ifndef FV_BYTES
#define FV_BYTES 0
#endif

_Static_assert(FV_ND % FV_NK == 0 && FV_ND % FV_LANES == 0, "tiles of keys hold whole steps");

/* Where a multiplication cannot take its factor from a lane of a vector, a "group" of factors is
 * one factor, spread over all lanes. ff_muladd() adds factor n of the group times b to c;
 * pf_muladd() does so for pairs. */
#ifndef FV_FACTORS
#define FV_FACTORS 1
typedef fv ff;
static inline ff ff_set1(float x) { return fv_set1(x); }
static inline ff ff_load(const float *x) { return fv_set1(*x); }
static inline fv ff_muladd(ff a, int n, fv b, fv c)
{
    (void)n;
    return fv_muladd(a, b, c);
}

#if FV_PAIRS
typedef pv pf;
static inline pf pf_set1(const void *pair) { return pv_set1(pair); }
static inline pf pf_load(const void *pair) { return pv_set1(pair); }
static inline fv pf_muladd(pf a, int n, pv b, fv c)
{
    (void)n;
    return fv_muladd_pairs(a, b, c);
}
#endif
#endif

#endif
