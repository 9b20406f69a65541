/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the vocabularies with several lanes: the polynomial of exp2, and log2 lane by lane. */
#ifndef FATTN_CPU_VEC_MATH_H
#define FATTN_CPU_VEC_MATH_H

#include <math.h>
#include <stdint.h>

/*
 * 2^x on [0, 1) as 1 + x (c1 + x (c2 + ... )): minimax in relative error, 2.0e-9 in exact
 * arithmetic, 6.5e-8 in f32 with FMA. The constant is exactly 1, so that exp2 is exact at every
 * integer.
 */
#define EXP2_C1 0.693147063f
#define EXP2_C2 0.240229309f
#define EXP2_C3 0.0554852821f
#define EXP2_C4 0.00967545155f
#define EXP2_C5 0.0012467847f
#define EXP2_C6 0.000216129149f

/* log2 is needed once per row, not once per score: the C library is accurate and fast enough. */
static inline void log2_lanes(float *x, int lanes)
{
    for (int n = 0; n < lanes; n++) {
        x[n] = log2f(x[n]);
    }
}

#endif
