/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vector vocabulary of the core's template headers for a GPU thread, in which a vector is one
 * number. The host compiles the same definitions, so a thread's arithmetic for a pair can be tested
 * without a GPU. exp2f, log2f and fmaf are those of the C library or of the vendor's header.
 */
#ifndef FATTN_GPU_SCALAR_H
#define FATTN_GPU_SCALAR_H

#include <stdbool.h>
#if !defined(__HIP__)
#include <math.h>
#endif

#include "core/dtype.h"
#include "core/host_device.h"

typedef float fv;
typedef bool mv;

FATTN_HD fv fv_set1(float x) { return x; }
FATTN_HD fv fv_add(fv a, fv b) { return a + b; }
FATTN_HD fv fv_sub(fv a, fv b) { return a - b; }
FATTN_HD fv fv_mul(fv a, fv b) { return a * b; }
FATTN_HD fv fv_div(fv a, fv b) { return a / b; }
FATTN_HD fv fv_fma(fv a, fv b, fv c) { return fmaf(a, b, c); }
FATTN_HD fv fv_muladd(fv a, fv b, fv c) { return fmaf(a, b, c); }
FATTN_HD fv fv_abs(fv a) { return fattn_f32_from_bits(fattn_f32_bits(a) & INT32_MAX); }
FATTN_HD fv fv_exp2(fv a) { return exp2f(a); }
FATTN_HD fv fv_log2(fv a) { return log2f(a); }

/* Not fminf and fmaxf, which drop a NaN. */
FATTN_HD fv fv_min(fv a, fv b) { return a < b ? a : b; }
FATTN_HD fv fv_max(fv a, fv b) { return a > b ? a : b; }

FATTN_HD mv fv_eq(fv a, fv b) { return a == b; }
FATTN_HD mv fv_lt(fv a, fv b) { return a < b; }
FATTN_HD fv fv_select(mv m, fv a, fv b) { return m ? a : b; }

#endif
