/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Element types: their names and sizes, and exact scalar conversions between them.
 *
 * Formats, as 1 sign bit, exponent bits, stored mantissa bits, bias:
 *     f64   11 52 1023
 *     f32    8 23  127
 *     bf16   8  7  127   the upper half of an f32
 *     f16    5 10   15
 *     e4m3   4  3    7   no infinity: only s.1111.111 is special, a NaN; largest finite value 448
 *
 * Narrowing rounds once, to nearest with ties to even, subnormals included, whatever the source: an
 * f64 never passes through f32. What is too large becomes infinite, but e4m3 saturates: every value
 * beyond 448, infinities included, becomes +-448, as CUDA's __NV_SATFINITE does. Widening is exact.
 * A NaN stays a NaN, keeps its sign, and is quiet afterwards; as much of its payload as fits is
 * kept (bf16 to f32 keeps every bit, quiet or not). Integer arithmetic throughout, so neither the
 * rounding mode nor flush-to-zero changes a result.
 */
#ifndef FATTN_CORE_DTYPE_H
#define FATTN_CORE_DTYPE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/host_device.h"
#include "fattn/fattn.h"

/* -------------------------------------------------------------------------------------------------
 * Names and sizes. Tables in the order of fattn_dtype, whose values start at 1.
 * ---------------------------------------------------------------------------------------------- */

/* Bytes an element; 0 for a number that is no fattn_dtype. */
static inline int64_t fattn_dtype_size(fattn_dtype dtype)
{
    static const int64_t sizes[] = {0, 4, 2, 2, 8, 1};
    return dtype >= FATTN_F32 && dtype <= FATTN_E4M3 ? sizes[dtype] : 0;
}

/* "f32"; "unknown" for a number that is no fattn_dtype. */
static inline const char *fattn_dtype_name(fattn_dtype dtype)
{
    static const char *const names[] = {"unknown", "f32", "f16", "bf16", "f64", "e4m3"};
    return names[dtype >= FATTN_F32 && dtype <= FATTN_E4M3 ? dtype : 0];
}

/* -------------------------------------------------------------------------------------------------
 * Bit patterns
 * ---------------------------------------------------------------------------------------------- */

/* The builtin can be used in host and device code; memcpy() of the C library only on the host. */
#if defined(__GNUC__)
#define FATTN_MEMCPY __builtin_memcpy
#else
#define FATTN_MEMCPY memcpy
#endif

FATTN_HD uint32_t fattn_f32_bits(float x)
{
    uint32_t bits;
    FATTN_MEMCPY(&bits, &x, sizeof bits);
    return bits;
}

FATTN_HD float fattn_f32_from_bits(uint32_t bits)
{
    float x;
    FATTN_MEMCPY(&x, &bits, sizeof x);
    return x;
}

FATTN_HD float fattn_f32_infinity(void) { return fattn_f32_from_bits(0x7f800000u); }

FATTN_HD uint64_t fattn_f64_bits(double x)
{
    uint64_t bits;
    FATTN_MEMCPY(&bits, &x, sizeof bits);
    return bits;
}

/* -------------------------------------------------------------------------------------------------
 * The one rounding step
 * ---------------------------------------------------------------------------------------------- */

/* x / 2^n to nearest, ties to even. 1 <= n <= 62 and x < 2^63, so that the sum cannot wrap. */
FATTN_HD uint64_t fattn_shift_rne(uint64_t x, int n)
{
    const uint64_t half = UINT64_C(1) << (n - 1);
    return (x + half - 1 + ((x >> n) & 1)) >> n;
}

/*
 * Rounds a finite magnitude, given as the bit pattern of a format with `mant` mantissa bits and
 * exponent bias `bias`, to a format with fewer mantissa bits and no larger bias. The result's
 * exponent field is taken to be unbounded; the caller compares the result with the largest code.
 * Patterns of one sign have the order of their values, so a carry out of the mantissa correctly
 * gives the next exponent, and a carry out of the subnormals the smallest normal number.
 */
FATTN_HD uint64_t fattn_pattern_round(uint64_t magnitude, int mant, int bias, int to_mant,
                                      int to_bias)
{
    const int field = (int)(magnitude >> mant);
    const uint64_t unit = UINT64_C(1) << mant;
    const uint64_t significand = (magnitude & (unit - 1)) | (field ? unit : 0);
    const int exponent = (field ? field : 1) - bias + to_bias; /* in the new format, if >= 1 */
    const int drop = mant - to_mant;

    if (exponent >= 1) {
        return fattn_shift_rne(((uint64_t)(exponent - 1) << mant) + significand, drop);
    }
    /* A subnormal of the new format: every exponent below 1 drops one bit more. The significand is
     * below 2^(mant + 1), so shifts past mant + 1 leave less than half a unit. */
    const int shift = drop + 1 - exponent;
    return shift > mant + 1 ? 0 : fattn_shift_rne(significand, shift);
}

/*
 * The code of any magnitude in the narrower format. `overflow` is the code of whatever is too
 * large, `nan` the quiet NaN without payload; the upper end of the payload is kept.
 */
FATTN_HD uint32_t fattn_pattern_narrow(uint64_t magnitude, int mant, int bias, int to_mant,
                                       int to_bias, uint32_t overflow, uint32_t nan)
{
    const uint64_t infinity = (uint64_t)(2 * bias + 1) << mant;
    if (magnitude > infinity) {
        const uint32_t payload = (UINT32_C(1) << (to_mant - 1)) - 1;
        return nan | ((uint32_t)(magnitude >> (mant - to_mant)) & payload);
    }
    const uint64_t code = fattn_pattern_round(magnitude, mant, bias, to_mant, to_bias);
    return code < overflow ? (uint32_t)code : overflow;
}

/* The same for an f32 and an f64. The caller adds the sign. */
FATTN_HD uint32_t fattn_f32_narrow(float x, int mant, int bias, uint32_t overflow, uint32_t nan)
{
    return fattn_pattern_narrow(fattn_f32_bits(x) & INT32_MAX, 23, 127, mant, bias, overflow, nan);
}

FATTN_HD uint32_t fattn_f64_narrow(double x, int mant, int bias, uint32_t overflow, uint32_t nan)
{
    return fattn_pattern_narrow(fattn_f64_bits(x) & INT64_MAX, 52, 1023, mant, bias, overflow, nan);
}

/* 1 for a negative number, -0 and a negative NaN. */
FATTN_HD uint32_t fattn_f32_sign(float x) { return fattn_f32_bits(x) >> 31; }

FATTN_HD uint32_t fattn_f64_sign(double x) { return (uint32_t)(fattn_f64_bits(x) >> 63); }

/* -------------------------------------------------------------------------------------------------
 * Narrowing
 * ---------------------------------------------------------------------------------------------- */

FATTN_HD float fattn_f32_from_f64(double x)
{
    const uint32_t code = fattn_f64_narrow(x, 23, 127, 0x7f800000u, 0x7fc00000u);
    return fattn_f32_from_bits(fattn_f64_sign(x) << 31 | code);
}

FATTN_HD uint16_t fattn_f16_from_f32(float x)
{
    return (uint16_t)(fattn_f32_sign(x) << 15 | fattn_f32_narrow(x, 10, 15, 0x7c00u, 0x7e00u));
}

FATTN_HD uint16_t fattn_f16_from_f64(double x)
{
    return (uint16_t)(fattn_f64_sign(x) << 15 | fattn_f64_narrow(x, 10, 15, 0x7c00u, 0x7e00u));
}

FATTN_HD uint16_t fattn_bf16_from_f32(float x)
{
    return (uint16_t)(fattn_f32_sign(x) << 15 | fattn_f32_narrow(x, 7, 127, 0x7f80u, 0x7fc0u));
}

FATTN_HD uint16_t fattn_bf16_from_f64(double x)
{
    return (uint16_t)(fattn_f64_sign(x) << 15 | fattn_f64_narrow(x, 7, 127, 0x7f80u, 0x7fc0u));
}

FATTN_HD uint8_t fattn_e4m3_from_f32(float x)
{
    return (uint8_t)(fattn_f32_sign(x) << 7 | fattn_f32_narrow(x, 3, 7, 0x7eu, 0x7fu));
}

FATTN_HD uint8_t fattn_e4m3_from_f64(double x)
{
    return (uint8_t)(fattn_f64_sign(x) << 7 | fattn_f64_narrow(x, 3, 7, 0x7eu, 0x7fu));
}

/* -------------------------------------------------------------------------------------------------
 * Widening. A normal number moves its mantissa up and its exponent over to the other bias; a
 * subnormal is an integer times a power of two, where both factors and the product are normal f32
 * numbers or 0.
 * ---------------------------------------------------------------------------------------------- */

FATTN_HD float fattn_f16_to_f32(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x >> 15) << 31, magnitude = x & 0x7fffu;

    if (magnitude < 0x0400u) {
        return fattn_f32_from_bits(sign | fattn_f32_bits((float)magnitude * 0x1p-24f));
    }
    if (magnitude < 0x7c00u) {
        return fattn_f32_from_bits(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
    }
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0;
    return fattn_f32_from_bits(sign | 0x7f800000u | quiet | (magnitude & 0x3ffu) << 13);
}

FATTN_HD float fattn_bf16_to_f32(uint16_t x) { return fattn_f32_from_bits((uint32_t)x << 16); }

FATTN_HD float fattn_e4m3_to_f32(uint8_t x)
{
    const uint32_t sign = (uint32_t)(x >> 7) << 31, magnitude = x & 0x7fu;

    if (magnitude < 0x08u) {
        return fattn_f32_from_bits(sign | fattn_f32_bits((float)magnitude * 0x1p-9f));
    }
    if (magnitude < 0x7fu) {
        return fattn_f32_from_bits(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
    }
    return fattn_f32_from_bits(sign | 0x7fc00000u);
}

/* -------------------------------------------------------------------------------------------------
 * Elements of an array of any type, for code where speed does not matter
 * ---------------------------------------------------------------------------------------------- */

/* array[index], exactly. dtype is a valid one; array is aligned for it. */
static inline double fattn_dtype_load(fattn_dtype dtype, const void *array, int64_t index)
{
    switch (dtype) {
    case FATTN_F32: return (double)((const float *)array)[index];
    case FATTN_F16: return (double)fattn_f16_to_f32(((const uint16_t *)array)[index]);
    case FATTN_BF16: return (double)fattn_bf16_to_f32(((const uint16_t *)array)[index]);
    case FATTN_E4M3: return (double)fattn_e4m3_to_f32(((const uint8_t *)array)[index]);
    case FATTN_DTYPE_DEFAULT: /* is filled in before */
    case FATTN_F64: break;
    }
    return ((const double *)array)[index];
}

/* array[index] = x, rounded once. */
static inline void fattn_dtype_store(fattn_dtype dtype, void *array, int64_t index, double x)
{
    switch (dtype) {
    case FATTN_F32: ((float *)array)[index] = fattn_f32_from_f64(x); return;
    case FATTN_F16: ((uint16_t *)array)[index] = fattn_f16_from_f64(x); return;
    case FATTN_BF16: ((uint16_t *)array)[index] = fattn_bf16_from_f64(x); return;
    case FATTN_E4M3: ((uint8_t *)array)[index] = fattn_e4m3_from_f64(x); return;
    case FATTN_DTYPE_DEFAULT: /* is filled in before */
    case FATTN_F64: break;
    }
    ((double *)array)[index] = x;
}

#endif
