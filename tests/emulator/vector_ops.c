/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What vector instructions compute, lane by lane, and their table. Operations follow the
 * pseudo-code of the CDNA 3, RDNA 3 and RDNA 4 instruction set manuals. Functions such as exp and
 * rcp are rounded correctly here, where the hardware promises 1 ulp; like the hardware they flush
 * f32 subnormals.
 */
#include <math.h>
#include <stdbool.h>

#include "tests/emulator/number.h"
#include "tests/emulator/vector.h"

#define LANE_OP(name, ...)                                                                   \
    static void name(uint32_t *restrict d, uint32_t *restrict e, const uint32_t *restrict a, \
                     const uint32_t *restrict b, const uint32_t *restrict c, int n)          \
    {                                                                                        \
        (void)d, (void)e, (void)a, (void)b, (void)c;                                         \
        for (int l = 0; l < n; l++) {                                                        \
            __VA_ARGS__;                                                                     \
        }                                                                                    \
    }

/* By the kind of the operands: x y z are the sources as numbers of that kind. */
#define F32_1(name, r) LANE_OP(name, const float x = float_of(a[l]); d[l] = bits_of(r))
#define F32_2(name, r) \
    LANE_OP(name, const float x = float_of(a[l]), y = float_of(b[l]); d[l] = bits_of(r))
#define F32_3(name, r)                                                                    \
    LANE_OP(name, const float x = float_of(a[l]), y = float_of(b[l]), z = float_of(c[l]); \
            d[l] = bits_of(r))
#define F16_1(name, r) \
    LANE_OP(name, const float x = half_to_float(a[l] & 0xffff); d[l] = half_from_float(r))
#define F16_2(name, r)                                                                            \
    LANE_OP(name, const float x = half_to_float(a[l] & 0xffff), y = half_to_float(b[l] & 0xffff); \
            d[l] = half_from_float(r))
#define F16_3(name, r)                                                                            \
    LANE_OP(name, const float x = half_to_float(a[l] & 0xffff), y = half_to_float(b[l] & 0xffff), \
            z = half_to_float(c[l] & 0xffff);                                                     \
            d[l] = r)
#define F64_1(name, r) LANE_OP(name, const double x = get64f(a, l); put64f(d, l, r))
#define F64_2(name, r) \
    LANE_OP(name, const double x = get64f(a, l), y = get64f(b, l); put64f(d, l, r))
#define F64_3(name, r)                                                               \
    LANE_OP(name, const double x = get64f(a, l), y = get64f(b, l), z = get64f(c, l); \
            put64f(d, l, r))
#define U32_1(name, r) LANE_OP(name, const uint32_t x = a[l]; d[l] = (uint32_t)(r))
#define U32_2(name, r) LANE_OP(name, const uint32_t x = a[l], y = b[l]; d[l] = (uint32_t)(r))
#define U32_3(name, r) \
    LANE_OP(name, const uint32_t x = a[l], y = b[l], z = c[l]; d[l] = (uint32_t)(r))
#define I32_2(name, r) \
    LANE_OP(name, const int32_t x = (int32_t)a[l], y = (int32_t)b[l]; d[l] = (uint32_t)(r))
#define I32_3(name, r)                                                                   \
    LANE_OP(name, const int32_t x = (int32_t)a[l], y = (int32_t)b[l], z = (int32_t)c[l]; \
            d[l] = (uint32_t)(r))
#define U16_2(name, r) \
    LANE_OP(name, const uint32_t x = a[l] & 0xffff, y = b[l] & 0xffff; d[l] = (r)&0xffff)
#define U16_3(name, r)                                                                    \
    LANE_OP(name, const uint32_t x = a[l] & 0xffff, y = b[l] & 0xffff, z = c[l] & 0xffff; \
            d[l] = (r)&0xffff)
#define I16_2(name, r) \
    LANE_OP(name, const int32_t x = (int16_t)a[l], y = (int16_t)b[l]; d[l] = (uint32_t)(r)&0xffff)
#define I16_3(name, r)                                                                   \
    LANE_OP(name, const int32_t x = (int16_t)a[l], y = (int16_t)b[l], z = (int16_t)c[l]; \
            d[l] = (uint32_t)(r)&0xffff)
#define U64_1(name, r) LANE_OP(name, const uint64_t x = get64(a, l); put64(d, l, r))

/* Two halves: the same expression for each, of two or of three sources. */
#define PACKED_ONE(name, type, from, to, r)                               \
    static inline uint32_t name##_one(uint32_t p, uint32_t q, uint32_t s) \
    {                                                                     \
        const type x = from(p), y = from(q), z = from(s);                 \
        (void)y, (void)z;                                                 \
        return to(r) & 0xffff;                                            \
    }
#define PACKED_2(name, type, from, to, r)                              \
    PACKED_ONE(name, type, from, to, r)                                \
    LANE_OP(name, d[l] = name##_one(a[l] & 0xffff, b[l] & 0xffff, 0) | \
                         name##_one(a[l] >> 16, b[l] >> 16, 0) << 16)
#define PACKED_3(name, type, from, to, r)                                          \
    PACKED_ONE(name, type, from, to, r)                                            \
    LANE_OP(name, d[l] = name##_one(a[l] & 0xffff, b[l] & 0xffff, c[l] & 0xffff) | \
                         name##_one(a[l] >> 16, b[l] >> 16, c[l] >> 16) << 16)

static inline uint64_t get64(const uint32_t *a, int l)
{
    return a[l] | (uint64_t)a[LANES + l] << 32;
}

static inline void put64(uint32_t *d, int l, uint64_t x)
{
    d[l] = (uint32_t)x;
    d[LANES + l] = (uint32_t)(x >> 32);
}

static inline double get64f(const uint32_t *a, int l)
{
    const uint64_t bits = get64(a, l);
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline void put64f(uint32_t *d, int l, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    put64(d, l, bits);
}

/* ---- moves and bits -------------------------------------------------------------------------- */

static inline uint32_t ones(uint32_t x)
{
    x -= x >> 1 & 0x55555555;
    x = (x & 0x33333333) + (x >> 2 & 0x33333333);
    return ((x + (x >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24;
}

static inline uint32_t reversed(uint32_t x)
{
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    x = (x >> 8 & 0x00ff00ff) | (x & 0x00ff00ff) << 8;
    return x >> 16 | x << 16;
}

/* Zeros above the highest one; all ones for 0, as in hardware. */
static inline uint32_t leading(uint32_t x)
{
    uint32_t n = 0;
    if (x == 0) return UINT32_MAX;
    for (; (x & 0x80000000) == 0; x <<= 1) n++;
    return n;
}

static inline uint32_t leading_signs(uint32_t x)
{
    const uint32_t flipped = x ^ (uint32_t)((int32_t)x >> 31);
    return flipped == 0 ? UINT32_MAX : leading(flipped);
}

static inline uint32_t low_bits(uint32_t n)
{
    return n >= 32 ? UINT32_MAX : (UINT32_C(1) << n) - 1;
}

static inline uint32_t signed_field(uint32_t x, uint32_t offset, uint32_t width)
{
    if (width == 0) return 0;
    const uint32_t field = x >> offset & low_bits(width);
    const uint32_t sign = UINT32_C(1) << (width - 1);
    return offset + width >= 32 ? (uint32_t)((int32_t)x >> offset) : (field ^ sign) - sign;
}

/* One byte of v_perm_b32: 0..3 of y, 4..7 of x, 8..11 signs of halves, 12 zero, above it 255. */
static inline uint32_t chosen_byte(uint32_t x, uint32_t y, uint32_t selector)
{
    const uint64_t both = (uint64_t)x << 32 | y;
    if (selector < 8) return both >> 8 * selector & 0xff;
    if (selector < 12) return both >> (16 * (selector - 8) + 15) & 1 ? 0xff : 0;
    return selector == 12 ? 0 : 0xff;
}

static inline uint32_t permuted(uint32_t x, uint32_t y, uint32_t s)
{
    return chosen_byte(x, y, s & 0xff) | chosen_byte(x, y, s >> 8 & 0xff) << 8 |
           chosen_byte(x, y, s >> 16 & 0xff) << 16 | chosen_byte(x, y, s >> 24) << 24;
}

U32_1(mov, x)
U64_1(mov64, x)
U32_1(not, ~x)
U32_1(bfrev, reversed(x))
U32_1(clz, leading(x))
U32_1(cls, leading_signs(x))
U32_1(ctz, x == 0 ? UINT32_MAX : ones((x & -x) - 1))
U32_2(bcnt, ones(x) + y)
LANE_OP(cndmask, d[l] = c[l] ? b[l] : a[l])
U32_2(and, x &y)
U32_2(or, x | y)
U32_2(xor, x ^ y)
U32_2(xnor, ~(x ^ y))
U32_2(lshlrev, y << (x & 31))
U32_2(lshrrev, y >> (x & 31))
I32_2(ashrrev, y >> (x & 31))
U32_3(and_or, (x & y) | z)
U32_3(or3, x | y | z)
U32_3(xor3, x ^ y ^ z)
U32_3(xad, (x ^ y) + z)
U32_3(lshl_or, x << (y & 31) | z)
U32_3(lshl_add, (x << (y & 31)) + z)
U32_3(add_lshl, (x + y) << (z & 31))
U32_3(bfe_u, x >> (y & 31) & low_bits(z & 31))
U32_3(bfe_i, signed_field(x, y & 31, z & 31))
U32_3(bfi, (x & y) | (~x & z))
U32_2(bfm, low_bits(x & 31) << (y & 31))
U32_3(alignbit, ((uint64_t)x << 32 | y) >> (z & 31))
U32_3(alignbyte, ((uint64_t)x << 32 | y) >> 8 * (z & 3))
U32_3(perm, permuted(x, y, z))
U32_2(mbcnt_lo, ones(x &low_bits((uint32_t)l)) + y)
U32_2(mbcnt_hi, (l < 32 ? 0 : ones(x & low_bits((uint32_t)l - 32))) + y)
LANE_OP(lshlrev64, put64(d, l, get64(b, l) << (a[l] & 63)))
LANE_OP(lshrrev64, put64(d, l, get64(b, l) >> (a[l] & 63)))
LANE_OP(ashrrev64, put64(d, l, (uint64_t)((int64_t)get64(b, l) >> (a[l] & 63))))
LANE_OP(lshl_add64, put64(d, l, (get64(a, l) << (b[l] & 7)) + get64(c, l)))
LANE_OP(pk_mov, d[l] = a[l]; d[LANES + l] = b[l])
LANE_OP(pack, d[l] = (a[l] & 0xffff) | b[l] << 16)

/* ---- integers -------------------------------------------------------------------------------- */

#define LESS(x, y) ((x) < (y) ? (x) : (y))
#define MORE(x, y) ((x) > (y) ? (x) : (y))
#define MIDDLE(x, y, z) MORE(LESS(x, y), LESS(MORE(x, y), z))

U32_2(add, x + y)
U32_2(sub, x - y)
U32_2(subrev, y - x)
U32_3(add3, x + y + z)
U32_2(mul_lo, x *y)
U32_2(mul_hi_u, (uint64_t)x *y >> 32)
I32_2(mul_hi_i, (int64_t)x *y >> 32)
U32_2(mul_u24, (x & 0xffffff) * (y & 0xffffff))
U32_2(mul_hi_u24, (uint64_t)(x & 0xffffff) * (y & 0xffffff) >> 32)
U32_2(mul_i24, signed_field(x, 0, 24) * signed_field(y, 0, 24))
U32_3(mad_u24, (x & 0xffffff) * (y & 0xffffff) + z)
U32_3(mad_i24, signed_field(x, 0, 24) * signed_field(y, 0, 24) + z)
U32_2(min_u, LESS(x, y))
U32_2(max_u, MORE(x, y))
I32_2(min_i, LESS(x, y))
I32_2(max_i, MORE(x, y))
U32_3(min3_u, LESS(LESS(x, y), z))
U32_3(max3_u, MORE(MORE(x, y), z))
I32_3(min3_i, LESS(LESS(x, y), z))
I32_3(max3_i, MORE(MORE(x, y), z))
U32_3(med3_u, MIDDLE(x, y, z))
I32_3(med3_i, MIDDLE(x, y, z))
U32_3(maxmin_u, LESS(MORE(x, y), z))
I32_3(maxmin_i, LESS(MORE(x, y), z))
U32_3(minmax_u, MORE(LESS(x, y), z))
I32_3(minmax_i, MORE(LESS(x, y), z))
U32_3(sad, (x > y ? x - y : y - x) + z)

/* Carries: e is the carry out, source c the carry in. */
LANE_OP(add_co, const uint64_t r = (uint64_t)a[l] + b[l]; d[l] = (uint32_t)r; e[l] = r >> 32 & 1)
LANE_OP(sub_co, const uint64_t r = (uint64_t)a[l] - b[l]; d[l] = (uint32_t)r; e[l] = r >> 32 & 1)
LANE_OP(subrev_co, const uint64_t r = (uint64_t)b[l] - a[l]; d[l] = (uint32_t)r; e[l] = r >> 32 & 1)
LANE_OP(addc_co, const uint64_t r = (uint64_t)a[l] + b[l] + c[l]; d[l] = (uint32_t)r;
        e[l] = r >> 32 & 1)
LANE_OP(subb_co, const uint64_t r = (uint64_t)a[l] - b[l] - c[l]; d[l] = (uint32_t)r;
        e[l] = r >> 32 & 1)
LANE_OP(subbrev_co, const uint64_t r = (uint64_t)b[l] - a[l] - c[l]; d[l] = (uint32_t)r;
        e[l] = r >> 32 & 1)
LANE_OP(mad64_u, const uint64_t p = (uint64_t)a[l] * b[l], r = p + get64(c, l); put64(d, l, r);
        e[l] = r < p)
LANE_OP(mad64_i, const int64_t p = (int64_t)(int32_t)a[l] * (int32_t)b[l];
        const uint64_t r = (uint64_t)p + get64(c, l); put64(d, l, r);
        e[l] = (p < 0) != (r < (uint64_t)p))

U16_2(add16, x + y)
U16_2(sub16, x - y)
U16_2(subrev16, y - x)
U16_2(mul16, x *y)
U16_3(mad16, x *y + z)
U16_2(min_u16, LESS(x, y))
U16_2(max_u16, MORE(x, y))
I16_2(min_i16, LESS(x, y))
I16_2(max_i16, MORE(x, y))
U16_3(min3_u16, LESS(LESS(x, y), z))
U16_3(max3_u16, MORE(MORE(x, y), z))
I16_3(min3_i16, LESS(LESS(x, y), z))
I16_3(max3_i16, MORE(MORE(x, y), z))
U16_3(med3_u16, MIDDLE(x, y, z))
I16_3(med3_i16, MIDDLE(x, y, z))
U16_2(lshlrev16, y << (x & 15))
U16_2(lshrrev16, y >> (x & 15))
I16_2(ashrrev16, y >> (x & 15))
U16_2(and16, x &y)
U16_2(or16, x | y)
U16_2(xor16, x ^ y)
LANE_OP(not16, d[l] = ~a[l] & 0xffff)
LANE_OP(mov16, d[l] = a[l] & 0xffff)
LANE_OP(cndmask16, d[l] = (c[l] ? b[l] : a[l]) & 0xffff)
LANE_OP(mad_u32_u16, d[l] = (a[l] & 0xffff) * (b[l] & 0xffff) + c[l])
LANE_OP(mad_i32_i16, d[l] = (uint32_t)((int16_t)a[l] * (int16_t)b[l]) + c[l])
LANE_OP(widen_i16, d[l] = (uint32_t)(int32_t)(int16_t)a[l])
LANE_OP(widen_u16, d[l] = a[l] & 0xffff)

#define LOW16(x) (x)
#define SIGNED16(x) (int16_t)(x)
#define RAW(x) (uint32_t)(x)
PACKED_2(pk_add_u16, uint32_t, LOW16, RAW, x + y)
PACKED_2(pk_sub_u16, uint32_t, LOW16, RAW, x - y)
PACKED_2(pk_mul_u16, uint32_t, LOW16, RAW, x *y)
PACKED_3(pk_mad_u16, uint32_t, LOW16, RAW, x *y + z)
PACKED_2(pk_min_u16, uint32_t, LOW16, RAW, LESS(x, y))
PACKED_2(pk_max_u16, uint32_t, LOW16, RAW, MORE(x, y))
PACKED_2(pk_min_i16, int32_t, SIGNED16, RAW, LESS(x, y))
PACKED_2(pk_max_i16, int32_t, SIGNED16, RAW, MORE(x, y))
PACKED_2(pk_lshl_b16, uint32_t, LOW16, RAW, y << (x & 15))
PACKED_2(pk_lshr_b16, uint32_t, LOW16, RAW, y >> (x & 15))
PACKED_2(pk_ashr_i16, int32_t, SIGNED16, RAW, y >> (x & 15))

/* ---- f32 ------------------------------------------------------------------------------------- */

/* The number, if the other one is NaN; -0 is below +0. */
static inline float least(float x, float y)
{
    const uint32_t either = bits_of(x) | bits_of(y);
    return x != x ? y : y != y ? x : x < y ? x : y < x ? y : float_of(either);
}

static inline float most(float x, float y)
{
    const uint32_t both = bits_of(x) & bits_of(y);
    return x != x ? y : y != y ? x : x > y ? x : y > x ? y : float_of(both);
}

/* The variants that return NaN if a source is NaN. */
static inline float minimum(float x, float y) { return x != x || y != y ? x + y : least(x, y); }
static inline float maximum(float x, float y) { return x != x || y != y ? x + y : most(x, y); }

static inline float middle(float x, float y, float z)
{
    if (x != x || y != y || z != z) return least(least(x, y), z);
    return most(least(x, y), least(most(x, y), z));
}

/* Special function units flush subnormals in sources and results. */
static inline float flushed(float x)
{
    return (bits_of(x) & 0x7f800000) == 0 ? float_of(bits_of(x) & 0x80000000) : x;
}

static inline float once(double x) { return flushed((float)x); }
static inline double in(float x) { return flushed(x); }

static inline float legacy(float x, float y) { return x == 0 || y == 0 ? 0 : x * y; }

static inline float frexp_mantissa(float x)
{
    int exponent;
    return isfinite(x) ? frexpf(x, &exponent) : x;
}

static inline uint32_t frexp_exponent(double x)
{
    int exponent = 0;
    if (isfinite(x)) frexp(x, &exponent);
    return (uint32_t)exponent;
}

/* Below 1 even if rounding would give 1. */
static inline float fraction(float x)
{
    const float f = x - floorf(x);
    return f >= 1 ? 0x1.fffffep-1f : f;
}

static inline uint32_t to_u32(double x)
{
    return !(x > 0) ? 0 : x >= 4294967295.0 ? UINT32_MAX : (uint32_t)x;
}

static inline uint32_t to_i32(double x)
{
    return x != x               ? 0
           : x >= 2147483647.0  ? INT32_MAX
           : x <= -2147483648.0 ? (uint32_t)INT32_MIN
                                : (uint32_t)(int32_t)x;
}

F32_2(add_f32, x + y)
F32_2(sub_f32, x - y)
F32_2(subrev_f32, y - x)
F32_2(mul_f32, x *y)
F32_2(mul_legacy_f32, legacy(x, y))
F32_3(fma_f32, fmaf(x, y, z))
LANE_OP(mad_f32, const float p = float_of(a[l]) * float_of(b[l]);
        d[l] = bits_of(p + float_of(c[l])))
F32_2(min_f32, least(x, y))
F32_2(max_f32, most(x, y))
F32_2(minimum_f32, minimum(x, y))
F32_2(maximum_f32, maximum(x, y))
F32_3(min3_f32, least(least(x, y), z))
F32_3(max3_f32, most(most(x, y), z))
F32_3(minimum3_f32, minimum(minimum(x, y), z))
F32_3(maximum3_f32, maximum(maximum(x, y), z))
F32_3(med3_f32, middle(x, y, z))
F32_3(maxmin_f32, least(most(x, y), z))
F32_3(minmax_f32, most(least(x, y), z))
F32_1(exp_f32, once(exp2(in(x))))
F32_1(log_f32, once(log2(in(x))))
F32_1(rcp_f32, once(1 / in(x)))
F32_1(rsq_f32, once(1 / sqrt(in(x))))
F32_1(sqrt_f32, once(sqrt(in(x))))
F32_1(sin_f32, once(sin(in(x)*6.283185307179586)))
F32_1(cos_f32, once(cos(in(x)*6.283185307179586)))
F32_1(floor_f32, floorf(x))
F32_1(ceil_f32, ceilf(x))
F32_1(trunc_f32, truncf(x))
F32_1(rndne_f32, rintf(x))
F32_1(fract_f32, fraction(x))
F32_1(mant_f32, frexp_mantissa(x))
LANE_OP(exp_i32_f32, d[l] = frexp_exponent(float_of(a[l])))
LANE_OP(ldexp_f32, d[l] = bits_of(ldexpf(float_of(a[l]), (int32_t)b[l])))

LANE_OP(cvt_f32_i32, d[l] = bits_of((float)(int32_t)a[l]))
LANE_OP(cvt_f32_u32, d[l] = bits_of((float)a[l]))
LANE_OP(cvt_i32_f32, d[l] = to_i32(float_of(a[l])))
LANE_OP(cvt_u32_f32, d[l] = to_u32(float_of(a[l])))
LANE_OP(cvt_rpi, d[l] = to_i32(floor((double)float_of(a[l]) + 0.5)))
LANE_OP(cvt_flr, d[l] = to_i32(floorf(float_of(a[l]))))
LANE_OP(ubyte0, d[l] = bits_of((float)(a[l] & 0xff)))
LANE_OP(ubyte1, d[l] = bits_of((float)(a[l] >> 8 & 0xff)))
LANE_OP(ubyte2, d[l] = bits_of((float)(a[l] >> 16 & 0xff)))
LANE_OP(ubyte3, d[l] = bits_of((float)(a[l] >> 24)))

/* Division in steps: scale numerator or denominator away from subnormals, iterate, undo the scale,
 * fix special cases. e says that the quotient's scale must be undone. */
static inline int exponent_of(float x) { return (int)(bits_of(x) >> 23 & 0xff); }
static inline bool is_subnormal(double x) { return x != 0 && fabs(x) < 0x1p-126; }

static inline float div_scale(float x, float den, float num, uint32_t *undo)
{
    *undo = 0;
    if (den == 0 || num == 0) return NAN;
    const bool is_den = bits_of(x) == bits_of(den), is_num = bits_of(x) == bits_of(num);
    if (exponent_of(num) - exponent_of(den) >= 96) {
        *undo = 1;
        return is_den ? ldexpf(x, 64) : x;
    }
    if (is_subnormal(den)) return ldexpf(x, 64);
    const bool tiny_reciprocal = is_subnormal(1 / (double)den);
    if (is_subnormal((double)num / den)) {
        *undo = 1;
        return tiny_reciprocal ? (is_den ? ldexpf(x, -64) : x) : is_num ? ldexpf(x, 64) : x;
    }
    if (tiny_reciprocal) return ldexpf(x, -64);
    return exponent_of(num) <= 23 ? ldexpf(x, 64) : x;
}

static inline float div_fixup(float q, float den, float num)
{
    const bool negative = (bits_of(den) ^ bits_of(num)) >> 31;
    const float sign = negative ? -1.0f : 1.0f;
    if (num != num || den != den) return num + den;
    if ((den == 0 && num == 0) || (isinf(den) && isinf(num))) return NAN;
    if (den == 0 || isinf(num)) return sign * INFINITY;
    if (isinf(den) || num == 0) return sign * 0.0f;
    if (q != q) return sign * INFINITY; /* the earlier steps overflowed */
    if (exponent_of(num) - exponent_of(den) < -150) return sign * 0.0f;
    return copysignf(q, sign);
}

/* In double, so that a subnormal quotient is rounded once. */
static inline float div_fmas(float x, float y, float z, uint32_t undo)
{
    const double q = (double)x * y + z;
    return undo == 0 ? fmaf(x, y, z) : (float)ldexp(q, exponent_of(z) > 127 ? 64 : -64);
}

LANE_OP(div_scale_f32,
        d[l] = bits_of(div_scale(float_of(a[l]), float_of(b[l]), float_of(c[l]), &e[l])))
LANE_OP(div_fmas_f32,
        d[l] = bits_of(div_fmas(float_of(a[l]), float_of(b[l]), float_of(c[l]), e[l])))
F32_3(div_fixup_f32, div_fixup(x, y, z))

/* ---- f16, bf16 and mixed --------------------------------------------------------------------- */

/* Rounds double to half once: the intermediate float has the same sign, and its last bit is set if
 * bits were lost (round to odd), so that the second rounding is correct. */
static inline uint32_t half_from_double(double x)
{
    const float near = (float)x;
    uint32_t bits = bits_of(near);
    if ((double)near != x && x == x) {
        if (fabs((double)near) > fabs(x)) bits--;
        bits |= 1;
    }
    return half_from_float(float_of(bits));
}

static inline uint32_t half_toward_zero(float x)
{
    const uint32_t near = half_from_float(x);
    const float back = half_to_float(near);
    if (isinf(back) && !isinf(x)) return near - 1;
    return fabsf(back) > fabsf(x) ? near - 1 : near;
}

static inline uint32_t half_fma(float x, float y, float z)
{
    return half_from_double((double)x * y + z);
}

F16_2(add_f16, x + y)
F16_2(sub_f16, x - y)
F16_2(subrev_f16, y - x)
F16_2(mul_f16, x *y)
F16_3(fma_f16, half_fma(x, y, z))
F16_2(min_f16, least(x, y))
F16_2(max_f16, most(x, y))
F16_2(minimum_f16, minimum(x, y))
F16_2(maximum_f16, maximum(x, y))
F16_3(min3_f16, half_from_float(least(least(x, y), z)))
F16_3(max3_f16, half_from_float(most(most(x, y), z)))
F16_3(med3_f16, half_from_float(middle(x, y, z)))
F16_3(maxmin_f16, half_from_float(least(most(x, y), z)))
F16_3(minmax_f16, half_from_float(most(least(x, y), z)))
F16_1(exp_f16, exp2f(x))
F16_1(log_f16, log2f(x))
F16_1(rcp_f16, 1 / x)
F16_1(rsq_f16, 1 / sqrtf(x))
F16_1(sqrt_f16, sqrtf(x))
F16_1(floor_f16, floorf(x))
F16_1(ceil_f16, ceilf(x))
F16_1(trunc_f16, truncf(x))
F16_1(rndne_f16, rintf(x))
F16_1(fract_f16, fraction(x))
LANE_OP(ldexp_f16, d[l] = half_from_double(ldexp(half_to_float(a[l] & 0xffff), (int16_t)b[l])))
LANE_OP(cvt_f32_f16, d[l] = bits_of(half_to_float(a[l] & 0xffff)))
LANE_OP(cvt_f16_f32, d[l] = half_from_float(float_of(a[l])))
LANE_OP(cvt_f16_u16, d[l] = half_from_float((float)(a[l] & 0xffff)))
LANE_OP(cvt_f16_i16, d[l] = half_from_float((float)(int16_t)a[l]))
LANE_OP(cvt_u16_f16, const uint32_t x = to_u32(half_to_float(a[l] & 0xffff));
        d[l] = LESS(x, 0xffff))
LANE_OP(cvt_i16_f16, const int32_t x = (int32_t)to_i32(half_to_float(a[l] & 0xffff));
        d[l] = (uint32_t)MIDDLE(x, -32768, 32767) & 0xffff)
LANE_OP(cvt_pkrtz, d[l] = half_toward_zero(float_of(a[l])) | half_toward_zero(float_of(b[l])) << 16)
LANE_OP(cvt_pk_bf16, d[l] = bf16_from_float(float_of(a[l])) | bf16_from_float(float_of(b[l])) << 16)
LANE_OP(cvt_pk_f16, d[l] = half_from_float(float_of(a[l])) | half_from_float(float_of(b[l])) << 16)
LANE_OP(cvt_pk_u16, d[l] = LESS(a[l], 0xffff) | LESS(b[l], 0xffff) << 16)
LANE_OP(cvt_pk_i16, const int32_t x = (int32_t)a[l], y = (int32_t)b[l];
        d[l] = ((uint32_t)MIDDLE(x, -32768, 32767) & 0xffff) | (uint32_t)MIDDLE(y, -32768, 32767)
                                                                   << 16)

LANE_OP(mix_f16, d[l] = half_from_double((double)float_of(a[l]) * float_of(b[l]) + float_of(c[l])))

PACKED_2(pk_add_f16, float, half_to_float, half_from_float, x + y)
PACKED_2(pk_mul_f16, float, half_to_float, half_from_float, x *y)
PACKED_3(pk_fma_f16, float, half_to_float, half_from_double, (double)x *y + z)
PACKED_2(pk_min_f16, float, half_to_float, half_from_float, least(x, y))
PACKED_2(pk_max_f16, float, half_to_float, half_from_float, most(x, y))
PACKED_2(pk_minimum_f16, float, half_to_float, half_from_float, minimum(x, y))
PACKED_2(pk_maximum_f16, float, half_to_float, half_from_float, maximum(x, y))

LANE_OP(pk_add_f32,
        for (int h = l; h <= LANES + l; h += LANES) d[h] = bits_of(float_of(a[h]) + float_of(b[h])))
LANE_OP(pk_mul_f32,
        for (int h = l; h <= LANES + l; h += LANES) d[h] = bits_of(float_of(a[h]) * float_of(b[h])))
LANE_OP(pk_fma_f32, for (int h = l; h <= LANES + l; h += LANES)
                        d[h] = bits_of(fmaf(float_of(a[h]), float_of(b[h]), float_of(c[h]))))

/* Sums of two products, rounded once. */
LANE_OP(dot2_f16,
        d[l] = bits_of((float)((double)half_to_float(a[l] & 0xffff) * half_to_float(b[l] & 0xffff) +
                               (double)half_to_float(a[l] >> 16) * half_to_float(b[l] >> 16) +
                               float_of(c[l]))))
LANE_OP(dot2_bf16,
        d[l] = bits_of((float)((double)bf16_to_float(a[l] & 0xffff) * bf16_to_float(b[l] & 0xffff) +
                               (double)bf16_to_float(a[l] >> 16) * bf16_to_float(b[l] >> 16) +
                               float_of(c[l]))))

/* ---- f64 ------------------------------------------------------------------------------------- */

static inline int exponent64_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (int)(bits >> 52 & 0x7ff);
}

static inline bool is_subnormal64(double x) { return x != 0 && fabs(x) < 0x1p-1022; }

static inline double div_scale64(double x, double den, double num, uint32_t *undo)
{
    *undo = 0;
    if (den == 0 || num == 0) return NAN;
    const bool is_den = memcmp(&x, &den, sizeof x) == 0, is_num = memcmp(&x, &num, sizeof x) == 0;
    if (exponent64_of(num) - exponent64_of(den) >= 768) {
        *undo = 1;
        return is_den ? ldexp(x, 128) : x;
    }
    if (is_subnormal64(den)) return ldexp(x, 128);
    const bool tiny_reciprocal = is_subnormal64(1 / den);
    if (is_subnormal64(num / den)) {
        *undo = 1;
        return tiny_reciprocal ? (is_den ? ldexp(x, -128) : x) : is_num ? ldexp(x, 128) : x;
    }
    if (tiny_reciprocal) return ldexp(x, -128);
    return exponent64_of(num) <= 53 ? ldexp(x, 128) : x;
}

static inline double div_fixup64(double q, double den, double num)
{
    const double sign = signbit(den) != signbit(num) ? -1 : 1;
    if (num != num || den != den) return num + den;
    if ((den == 0 && num == 0) || (isinf(den) && isinf(num))) return NAN;
    if (den == 0 || isinf(num)) return sign * INFINITY;
    if (isinf(den) || num == 0) return sign * 0.0;
    if (q != q) return sign * INFINITY;
    return exponent64_of(num) - exponent64_of(den) < -1075 ? sign * 0.0 : copysign(q, sign);
}

static inline double least64(double x, double y) { return x != x ? y : y != y ? x : x < y ? x : y; }
static inline double most64(double x, double y) { return x != x ? y : y != y ? x : x > y ? x : y; }

F64_2(add_f64, x + y)
F64_2(mul_f64, x *y)
F64_3(fma_f64, fma(x, y, z))
F64_2(min_f64, least64(x, y))
F64_2(max_f64, most64(x, y))
F64_1(rcp_f64, 1 / x)
F64_1(rsq_f64, 1 / sqrt(x))
F64_1(sqrt_f64, sqrt(x))
F64_1(floor_f64, floor(x))
F64_1(ceil_f64, ceil(x))
F64_1(trunc_f64, trunc(x))
F64_1(rndne_f64, rint(x))
F64_1(fract_f64, x - floor(x))
LANE_OP(ldexp_f64, put64f(d, l, ldexp(get64f(a, l), (int32_t)b[l])))
LANE_OP(exp_i32_f64, d[l] = frexp_exponent(get64f(a, l)))
LANE_OP(cvt_f64_f32, put64f(d, l, float_of(a[l])))
LANE_OP(cvt_f64_i32, put64f(d, l, (int32_t)a[l]))
LANE_OP(cvt_f64_u32, put64f(d, l, a[l]))
LANE_OP(cvt_f32_f64, d[l] = bits_of((float)get64f(a, l)))
LANE_OP(cvt_i32_f64, d[l] = to_i32(get64f(a, l)))
LANE_OP(cvt_u32_f64, d[l] = to_u32(get64f(a, l)))
LANE_OP(div_scale_f64, put64f(d, l, div_scale64(get64f(a, l), get64f(b, l), get64f(c, l), &e[l])))
LANE_OP(div_fmas_f64, const double q = fma(get64f(a, l), get64f(b, l), get64f(c, l));
        put64f(d, l, e[l] == 0 ? q : ldexp(q, exponent64_of(get64f(c, l)) > 1023 ? 128 : -128)))
F64_3(div_fixup_f64, div_fixup64(x, y, z))

/* ---- the table ------------------------------------------------------------------------------- */

#define VALU(name, form, op, ...)                                   \
    {                                                               \
        name, form, emu_vector_run, EMU_VALU, op, NULL, __VA_ARGS__ \
    }
#define V(name, form, op) VALU(name, form, op, DEF_ALL, HALF_ALONE)
#define VD(name, form, op, rule) VALU(name, form, op, rule, HALF_ALONE)
#define VK(name, form, op) VALU(name, form, op, DEF_ALL, HALF_KEEPS)
#define T(name, form, op)                                               \
    {                                                                   \
        name, form, emu_vector_run, EMU_TRANS, op, NULL, DEF_ALL, false \
    }

static const emu_row rows[] = {
    VD("v_mov_b32", "u=u", mov, DEF_HALVES),
    VD("v_mov_b64", "q=q", mov64, DEF_HALVES),
    V("v_mov_b16", "w=w", mov16),
    VD("v_accvgpr_read_b32", "u=u", mov, DEF_HALVES),
    VD("v_accvgpr_write_b32", "u=u", mov, DEF_HALVES),
    VD("v_accvgpr_mov_b32", "u=u", mov, DEF_HALVES),
    VD("v_pk_mov_b32", "k=kk", pk_mov, DEF_PACK),
    VD("v_not_b32", "u=u", not, DEF_HALVES),
    V("v_not_b16", "w=w", not16),
    V("v_bfrev_b32", "u=u", bfrev),
    V("v_ffbh_u32", "u=u", clz),
    V("v_clz_i32_u32", "u=u", clz),
    V("v_ffbh_i32", "u=u", cls),
    V("v_cls_i32", "u=u", cls),
    V("v_ffbl_b32", "u=u", ctz),
    V("v_ctz_i32_b32", "u=u", ctz),
    V("v_bcnt_u32_b32", "u=uu", bcnt),
    VD("v_cndmask_b32", "u=uum|u=uu~", cndmask, DEF_SELECT),
    V("v_cndmask_b16", "w=wwm|w=ww~", cndmask16),
    VD("v_and_b32", "u=uu", and, DEF_AND),
    VD("v_or_b32", "u=uu", or, DEF_HALVES),
    VD("v_xor_b32", "u=uu", xor, DEF_HALVES),
    VD("v_xnor_b32", "u=uu", xnor, DEF_HALVES),
    VD("v_lshlrev_b32", "u=uu", lshlrev, DEF_SHIFT_LEFT),
    VD("v_lshrrev_b32", "u=uu", lshrrev, DEF_SHIFT_RIGHT),
    VD("v_ashrrev_i32", "u=uu", ashrrev, DEF_SHIFT_ARITHMETIC),
    VD("v_and_or_b32", "u=uuu", and_or, DEF_AND_OR),
    VD("v_or3_b32", "u=uuu", or3, DEF_HALVES),
    VD("v_xor3_b32", "u=uuu", xor3, DEF_HALVES),
    V("v_xad_u32", "u=uuu", xad),
    VD("v_lshl_or_b32", "u=uuu", lshl_or, DEF_SHIFT_OR),
    V("v_lshl_add_u32", "u=uuu", lshl_add),
    V("v_add_lshl_u32", "u=uuu", add_lshl),
    VD("v_bfe_u32", "u=uuu", bfe_u, DEF_FIELD),
    VD("v_bfe_i32", "u=uuu", bfe_i, DEF_FIELD),
    VD("v_bfi_b32", "u=uuu", bfi, DEF_INSERT),
    V("v_bfm_b32", "u=uu", bfm),
    VD("v_alignbit_b32", "u=uuu", alignbit, DEF_ALIGN_16),
    V("v_alignbyte_b32", "u=uuu", alignbyte),
    VD("v_perm_b32", "u=uuu", perm, DEF_PERM),
    V("v_mbcnt_lo_u32_b32", "u=uu", mbcnt_lo),
    V("v_mbcnt_hi_u32_b32", "u=uu", mbcnt_hi),
    V("v_lshlrev_b64", "q=uq", lshlrev64),
    V("v_lshrrev_b64", "q=uq", lshrrev64),
    V("v_ashrrev_i64", "q=uq", ashrrev64),
    VD("v_lshl_add_u64", "q=quq", lshl_add64, DEF_SUM),
    VD("v_pack_b32_f16", "u=hh", pack, DEF_PACK),

    V("v_add_u32", "u=uu", add),
    V("v_add_nc_u32", "u=uu", add),
    V("v_add_i32", "u=uu", add),
    V("v_add_nc_i32", "u=uu", add),
    V("v_sub_u32", "u=uu", sub),
    V("v_sub_nc_u32", "u=uu", sub),
    V("v_sub_i32", "u=uu", sub),
    V("v_sub_nc_i32", "u=uu", sub),
    V("v_subrev_u32", "u=uu", subrev),
    V("v_subrev_nc_u32", "u=uu", subrev),
    V("v_add3_u32", "u=uuu", add3),
    V("v_mul_lo_u32", "u=uu", mul_lo),
    V("v_mul_hi_u32", "u=uu", mul_hi_u),
    V("v_mul_hi_i32", "u=uu", mul_hi_i),
    V("v_mul_u32_u24", "u=uu", mul_u24),
    V("v_mul_hi_u32_u24", "u=uu", mul_hi_u24),
    V("v_mul_i32_i24", "u=uu", mul_i24),
    V("v_mad_u32_u24", "u=uuu", mad_u24),
    V("v_mad_i32_i24", "u=uuu", mad_i24),
    V("v_min_u32", "u=uu", min_u),
    V("v_max_u32", "u=uu", max_u),
    V("v_min_i32", "u=uu", min_i),
    V("v_max_i32", "u=uu", max_i),
    V("v_min3_u32", "u=uuu", min3_u),
    V("v_max3_u32", "u=uuu", max3_u),
    V("v_min3_i32", "u=uuu", min3_i),
    V("v_max3_i32", "u=uuu", max3_i),
    V("v_med3_u32", "u=uuu", med3_u),
    V("v_med3_i32", "u=uuu", med3_i),
    V("v_maxmin_u32", "u=uuu", maxmin_u),
    V("v_maxmin_i32", "u=uuu", maxmin_i),
    V("v_minmax_u32", "u=uuu", minmax_u),
    V("v_minmax_i32", "u=uuu", minmax_i),
    V("v_sad_u32", "u=uuu", sad),
    V("v_add_co_u32", "um=uu", add_co),
    V("v_sub_co_u32", "um=uu", sub_co),
    V("v_subrev_co_u32", "um=uu", subrev_co),
    V("v_addc_co_u32", "um=uum", addc_co),
    V("v_add_co_ci_u32", "um=uum", addc_co),
    V("v_subb_co_u32", "um=uum", subb_co),
    V("v_sub_co_ci_u32", "um=uum", subb_co),
    V("v_subbrev_co_u32", "um=uum", subbrev_co),
    V("v_subrev_co_ci_u32", "um=uum", subbrev_co),
    VD("v_mad_u64_u32", "qm=uuq", mad64_u, DEF_SUM),
    VD("v_mad_co_u64_u32", "qm=uuq", mad64_u, DEF_SUM),
    VD("v_mad_i64_i32", "qm=uuq", mad64_i, DEF_SUM),
    VD("v_mad_co_i64_i32", "qm=uuq", mad64_i, DEF_SUM),

    V("v_add_u16", "w=ww", add16),
    VK("v_add_nc_u16", "w=ww", add16),
    V("v_sub_u16", "w=ww", sub16),
    VK("v_sub_nc_u16", "w=ww", sub16),
    V("v_subrev_u16", "w=ww", subrev16),
    V("v_mul_lo_u16", "w=ww", mul16),
    VK("v_mad_u16", "w=www", mad16),
    V("v_min_u16", "w=ww", min_u16),
    V("v_max_u16", "w=ww", max_u16),
    V("v_min_i16", "w=ww", min_i16),
    V("v_max_i16", "w=ww", max_i16),
    VK("v_min3_u16", "w=www", min3_u16),
    VK("v_max3_u16", "w=www", max3_u16),
    VK("v_min3_i16", "w=www", min3_i16),
    VK("v_max3_i16", "w=www", max3_i16),
    VK("v_med3_u16", "w=www", med3_u16),
    VK("v_med3_i16", "w=www", med3_i16),
    V("v_lshlrev_b16", "w=ww", lshlrev16),
    V("v_lshrrev_b16", "w=ww", lshrrev16),
    V("v_ashrrev_i16", "w=ww", ashrrev16),
    V("v_and_b16", "w=ww", and16),
    V("v_or_b16", "w=ww", or16),
    V("v_xor_b16", "w=ww", xor16),
    V("v_mad_u32_u16", "u=wwu", mad_u32_u16),
    V("v_mad_i32_i16", "u=wwu", mad_i32_i16),
    V("v_cvt_i32_i16", "u=w", widen_i16),
    V("v_cvt_u32_u16", "u=w", widen_u16),
    VD("v_pk_add_u16", "i=ii", pk_add_u16, DEF_HALVES),
    VD("v_pk_add_i16", "i=ii", pk_add_u16, DEF_HALVES),
    VD("v_pk_sub_u16", "i=ii", pk_sub_u16, DEF_HALVES),
    VD("v_pk_sub_i16", "i=ii", pk_sub_u16, DEF_HALVES),
    VD("v_pk_mul_lo_u16", "i=ii", pk_mul_u16, DEF_HALVES),
    VD("v_pk_mad_u16", "i=iii", pk_mad_u16, DEF_HALVES),
    VD("v_pk_mad_i16", "i=iii", pk_mad_u16, DEF_HALVES),
    VD("v_pk_min_u16", "i=ii", pk_min_u16, DEF_HALVES),
    VD("v_pk_max_u16", "i=ii", pk_max_u16, DEF_HALVES),
    VD("v_pk_min_i16", "i=ii", pk_min_i16, DEF_HALVES),
    VD("v_pk_max_i16", "i=ii", pk_max_i16, DEF_HALVES),
    VD("v_pk_lshlrev_b16", "i=ii", pk_lshl_b16, DEF_HALVES),
    VD("v_pk_lshrrev_b16", "i=ii", pk_lshr_b16, DEF_HALVES),
    VD("v_pk_ashrrev_i16", "i=ii", pk_ashr_i16, DEF_HALVES),

    V("v_add_f32", "f=ff", add_f32),
    V("v_sub_f32", "f=ff", sub_f32),
    V("v_subrev_f32", "f=ff", subrev_f32),
    V("v_mul_f32", "f=ff", mul_f32),
    V("v_mul_legacy_f32", "f=ff", mul_legacy_f32),
    V("v_mul_dx9_zero_f32", "f=ff", mul_legacy_f32),
    V("v_fma_f32", "f=fff", fma_f32),
    V("v_fmac_f32", "f=ff+", fma_f32),
    V("v_fmamk_f32", "f=fff", fma_f32),
    V("v_fmaak_f32", "f=fff", fma_f32),
    V("v_mad_f32", "f=fff", mad_f32),
    V("v_mac_f32", "f=ff+", mad_f32),
    V("v_madmk_f32", "f=fff", mad_f32),
    V("v_madak_f32", "f=fff", mad_f32),
    V("v_min_f32", "f=ff", min_f32),
    V("v_max_f32", "f=ff", max_f32),
    V("v_min_num_f32", "f=ff", min_f32),
    V("v_max_num_f32", "f=ff", max_f32),
    V("v_minimum_f32", "f=ff", minimum_f32),
    V("v_maximum_f32", "f=ff", maximum_f32),
    V("v_min3_f32", "f=fff", min3_f32),
    V("v_max3_f32", "f=fff", max3_f32),
    V("v_min3_num_f32", "f=fff", min3_f32),
    V("v_max3_num_f32", "f=fff", max3_f32),
    V("v_minimum3_f32", "f=fff", minimum3_f32),
    V("v_maximum3_f32", "f=fff", maximum3_f32),
    V("v_med3_f32", "f=fff", med3_f32),
    V("v_med3_num_f32", "f=fff", med3_f32),
    V("v_maxmin_f32", "f=fff", maxmin_f32),
    V("v_maxmin_num_f32", "f=fff", maxmin_f32),
    V("v_minmax_f32", "f=fff", minmax_f32),
    V("v_minmax_num_f32", "f=fff", minmax_f32),
    T("v_exp_f32", "f=f", exp_f32),
    T("v_log_f32", "f=f", log_f32),
    T("v_rcp_f32", "f=f", rcp_f32),
    T("v_rcp_iflag_f32", "f=f", rcp_f32),
    T("v_rsq_f32", "f=f", rsq_f32),
    T("v_sqrt_f32", "f=f", sqrt_f32),
    T("v_sin_f32", "f=f", sin_f32),
    T("v_cos_f32", "f=f", cos_f32),
    V("v_floor_f32", "f=f", floor_f32),
    V("v_ceil_f32", "f=f", ceil_f32),
    V("v_trunc_f32", "f=f", trunc_f32),
    V("v_rndne_f32", "f=f", rndne_f32),
    V("v_fract_f32", "f=f", fract_f32),
    V("v_frexp_mant_f32", "f=f", mant_f32),
    V("v_frexp_exp_i32_f32", "u=f", exp_i32_f32),
    V("v_ldexp_f32", "f=fu", ldexp_f32),
    V("v_cvt_f32_i32", "f=u", cvt_f32_i32),
    V("v_cvt_f32_u32", "f=u", cvt_f32_u32),
    V("v_cvt_i32_f32", "u=f", cvt_i32_f32),
    V("v_cvt_u32_f32", "u=f", cvt_u32_f32),
    V("v_cvt_rpi_i32_f32", "u=f", cvt_rpi),
    V("v_cvt_nearest_i32_f32", "u=f", cvt_rpi),
    V("v_cvt_flr_i32_f32", "u=f", cvt_flr),
    V("v_cvt_floor_i32_f32", "u=f", cvt_flr),
    V("v_cvt_f32_ubyte0", "f=w", ubyte0),
    V("v_cvt_f32_ubyte1", "f=w", ubyte1),
    V("v_cvt_f32_ubyte2", "f=u", ubyte2),
    V("v_cvt_f32_ubyte3", "f=u", ubyte3),
    V("v_div_scale_f32", "fm=fff", div_scale_f32),
    V("v_div_fmas_f32", "f=fff~", div_fmas_f32),
    V("v_div_fixup_f32", "f=fff", div_fixup_f32),

    V("v_add_f16", "h=hh", add_f16),
    V("v_sub_f16", "h=hh", sub_f16),
    V("v_subrev_f16", "h=hh", subrev_f16),
    V("v_mul_f16", "h=hh", mul_f16),
    VK("v_fma_f16", "h=hhh", fma_f16),
    V("v_fmac_f16", "h=hh+", fma_f16),
    V("v_fmamk_f16", "h=hhh", fma_f16),
    V("v_fmaak_f16", "h=hhh", fma_f16),
    V("v_min_f16", "h=hh", min_f16),
    V("v_max_f16", "h=hh", max_f16),
    V("v_min_num_f16", "h=hh", min_f16),
    V("v_max_num_f16", "h=hh", max_f16),
    V("v_minimum_f16", "h=hh", minimum_f16),
    V("v_maximum_f16", "h=hh", maximum_f16),
    VK("v_min3_f16", "h=hhh", min3_f16),
    VK("v_max3_f16", "h=hhh", max3_f16),
    VK("v_min3_num_f16", "h=hhh", min3_f16),
    VK("v_max3_num_f16", "h=hhh", max3_f16),
    VK("v_med3_f16", "h=hhh", med3_f16),
    VK("v_med3_num_f16", "h=hhh", med3_f16),
    VK("v_maxmin_f16", "h=hhh", maxmin_f16),
    VK("v_maxmin_num_f16", "h=hhh", maxmin_f16),
    VK("v_minmax_f16", "h=hhh", minmax_f16),
    VK("v_minmax_num_f16", "h=hhh", minmax_f16),
    T("v_exp_f16", "h=h", exp_f16),
    T("v_log_f16", "h=h", log_f16),
    T("v_rcp_f16", "h=h", rcp_f16),
    T("v_rsq_f16", "h=h", rsq_f16),
    T("v_sqrt_f16", "h=h", sqrt_f16),
    V("v_floor_f16", "h=h", floor_f16),
    V("v_ceil_f16", "h=h", ceil_f16),
    V("v_trunc_f16", "h=h", trunc_f16),
    V("v_rndne_f16", "h=h", rndne_f16),
    V("v_fract_f16", "h=h", fract_f16),
    V("v_ldexp_f16", "h=hw", ldexp_f16),
    V("v_cvt_f32_f16", "f=h", cvt_f32_f16),
    V("v_cvt_f16_f32", "h=f", cvt_f16_f32),
    V("v_cvt_f16_u16", "h=w", cvt_f16_u16),
    V("v_cvt_f16_i16", "h=w", cvt_f16_i16),
    V("v_cvt_u16_f16", "w=h", cvt_u16_f16),
    V("v_cvt_i16_f16", "w=h", cvt_i16_f16),
    V("v_cvt_pkrtz_f16_f32", "u=ff", cvt_pkrtz),
    V("v_cvt_pk_rtz_f16_f32", "u=ff", cvt_pkrtz),
    V("v_cvt_pk_bf16_f32", "u=ff", cvt_pk_bf16),
    V("v_cvt_pk_f16_f32", "u=ff", cvt_pk_f16),
    V("v_cvt_pk_u16_u32", "u=uu", cvt_pk_u16),
    V("v_cvt_pk_i16_i32", "u=uu", cvt_pk_i16),
    V("v_fma_mix_f32", "f=xxx", fma_f32),
    V("v_mad_mix_f32", "f=xxx", mad_f32),
    VK("v_fma_mixlo_f16", "h=xxx", mix_f16),
    VK("v_mad_mixlo_f16", "h=xxx", mix_f16),
    {"v_fma_mixhi_f16", "h=xxx", emu_vector_run, EMU_VALU, mix_f16, NULL, DEF_ALL, HALF_HIGH},
    {"v_mad_mixhi_f16", "h=xxx", emu_vector_run, EMU_VALU, mix_f16, NULL, DEF_ALL, HALF_HIGH},
    VD("v_pk_add_f16", "p=pp", pk_add_f16, DEF_HALVES),
    VD("v_pk_mul_f16", "p=pp", pk_mul_f16, DEF_HALVES),
    VD("v_pk_fma_f16", "p=ppp", pk_fma_f16, DEF_HALVES),
    VD("v_pk_fmac_f16", "p=pp+", pk_fma_f16, DEF_HALVES),
    VD("v_pk_min_f16", "p=pp", pk_min_f16, DEF_HALVES),
    VD("v_pk_max_f16", "p=pp", pk_max_f16, DEF_HALVES),
    VD("v_pk_min_num_f16", "p=pp", pk_min_f16, DEF_HALVES),
    VD("v_pk_max_num_f16", "p=pp", pk_max_f16, DEF_HALVES),
    VD("v_pk_minimum_f16", "p=pp", pk_minimum_f16, DEF_HALVES),
    VD("v_pk_maximum_f16", "p=pp", pk_maximum_f16, DEF_HALVES),
    VD("v_pk_add_f32", "k=kk", pk_add_f32, DEF_HALVES),
    VD("v_pk_mul_f32", "k=kk", pk_mul_f32, DEF_HALVES),
    VD("v_pk_fma_f32", "k=kkk", pk_fma_f32, DEF_HALVES),
    V("v_dot2_f32_f16", "f=ppf", dot2_f16),
    V("v_dot2c_f32_f16", "f=pp+", dot2_f16),
    V("v_dot2acc_f32_f16", "f=pp+", dot2_f16),
    V("v_dot2_f32_bf16", "f=ppf", dot2_bf16),
    V("v_dot2c_f32_bf16", "f=pp+", dot2_bf16),
    V("v_dot2acc_f32_bf16", "f=pp+", dot2_bf16),

    V("v_add_f64", "d=dd", add_f64),
    V("v_mul_f64", "d=dd", mul_f64),
    V("v_fma_f64", "d=ddd", fma_f64),
    V("v_fmac_f64", "d=dd+", fma_f64),
    V("v_min_f64", "d=dd", min_f64),
    V("v_max_f64", "d=dd", max_f64),
    V("v_min_num_f64", "d=dd", min_f64),
    V("v_max_num_f64", "d=dd", max_f64),
    T("v_rcp_f64", "d=d", rcp_f64),
    T("v_rsq_f64", "d=d", rsq_f64),
    T("v_sqrt_f64", "d=d", sqrt_f64),
    V("v_floor_f64", "d=d", floor_f64),
    V("v_ceil_f64", "d=d", ceil_f64),
    V("v_trunc_f64", "d=d", trunc_f64),
    V("v_rndne_f64", "d=d", rndne_f64),
    V("v_fract_f64", "d=d", fract_f64),
    V("v_ldexp_f64", "d=du", ldexp_f64),
    V("v_frexp_exp_i32_f64", "u=d", exp_i32_f64),
    V("v_cvt_f64_f32", "d=f", cvt_f64_f32),
    V("v_cvt_f64_i32", "d=u", cvt_f64_i32),
    V("v_cvt_f64_u32", "d=u", cvt_f64_u32),
    V("v_cvt_f32_f64", "f=d", cvt_f32_f64),
    V("v_cvt_i32_f64", "u=d", cvt_i32_f64),
    V("v_cvt_u32_f64", "u=d", cvt_u32_f64),
    V("v_div_scale_f64", "dm=ddd", div_scale_f64),
    V("v_div_fmas_f64", "d=ddd~", div_fmas_f64),
    V("v_div_fixup_f64", "d=ddd", div_fixup_f64),
};

const emu_table emu_vector_table = {rows, sizeof rows / sizeof *rows};
