/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Conversions between 16- or 8-bit numbers and float, in forms that compilers vectorise.
 * Independent of the library's own conversions, which this emulator helps to test.
 */
#ifndef FATTN_TESTS_EMULATOR_NUMBER_H
#define FATTN_TESTS_EMULATOR_NUMBER_H

#include <stdint.h>
#include <string.h>

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The exponent is moved by a multiplication, which makes subnormal halves right too: 2^112 carries
 * the bias 15 to 127. */
static inline float half_to_float(uint32_t h)
{
    const uint32_t magnitude = (h & 0x7fff) << 13;
    const uint32_t moved = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t finite = magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : moved;
    return float_of(finite | (h & 0x8000) << 16);
}

/* To nearest, ties to even. Above the subnormal range the rounding is integer arithmetic on the
 * bits; below it, adding 0.5 leaves the half's bits at the end of the sum, rounded by the
 * addition. */
static inline uint32_t half_from_float(float x)
{
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    return sign | (magnitude >= 0x477ff000 ? special : finite);
}

static inline float bf16_to_float(uint32_t b) { return float_of(b << 16); }

static inline uint32_t bf16_from_float(float x)
{
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded;
}

#endif
