/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Vector comparisons: v_cmp_<relation>_<type> writes a bit for each lane, v_cmpx_ writes EXEC. The
 * names are a product of relations and types, so the table is made of both.
 */
#include <math.h>

#include "tests/emulator/number.h"
#include "tests/emulator/vector.h"

static inline uint64_t wide(const uint32_t *a, int l)
{
    return a[l] | (uint64_t)a[LANES + l] << 32;
}

static inline double wide_float(const uint32_t *a, int l)
{
    const uint64_t bits = wide(a, l);
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define AS_f16(a, l) half_to_float(a[l] & 0xffff)
#define AS_f32(a, l) float_of(a[l])
#define AS_f64(a, l) wide_float(a, l)
#define AS_i16(a, l) ((int16_t)a[l])
#define AS_u16(a, l) ((uint16_t)a[l])
#define AS_i32(a, l) ((int32_t)a[l])
#define AS_u32(a, l) (a[l])
#define AS_i64(a, l) ((int64_t)wide(a, l))
#define AS_u64(a, l) (wide(a, l))
#define TYPE_f16 float
#define TYPE_f32 float
#define TYPE_f64 double
#define TYPE_i16 int16_t
#define TYPE_u16 uint16_t
#define TYPE_i32 int32_t
#define TYPE_u32 uint32_t
#define TYPE_i64 int64_t
#define TYPE_u64 uint64_t

#define DEFINE(relation, type, truth)                                                     \
    static void relation##_##type(uint32_t *restrict d, uint32_t *restrict e,             \
                                  const uint32_t *restrict a, const uint32_t *restrict b, \
                                  const uint32_t *restrict c, int n)                      \
    {                                                                                     \
        (void)d, (void)c;                                                                 \
        for (int l = 0; l < n; l++) {                                                     \
            const TYPE_##type x = AS_##type(a, l), y = AS_##type(b, l);                   \
            e[l] = (truth);                                                               \
        }                                                                                 \
    }

#define ORDERED (x == x && y == y)

/* X(relation, type, truth) */
#define INTEGER_RELATIONS(X, type) \
    X(lt, type, x < y)             \
    X(eq, type, x == y)            \
    X(le, type, x <= y)            \
    X(gt, type, x > y)             \
    X(ne, type, x != y)            \
    X(ge, type, x >= y)

#define FLOAT_RELATIONS(X, type)    \
    X(lt, type, x < y)              \
    X(eq, type, x == y)             \
    X(le, type, x <= y)             \
    X(gt, type, x > y)              \
    X(lg, type, x<y || x> y)        \
    X(ge, type, x >= y)             \
    X(o, type, ORDERED)             \
    X(u, type, !ORDERED)            \
    X(nge, type, !(x >= y))         \
    X(nlg, type, !(x < y || x > y)) \
    X(ngt, type, !(x > y))          \
    X(nle, type, !(x <= y))         \
    X(neq, type, !(x == y))         \
    X(nlt, type, !(x < y))

#define ALL_RELATIONS(FLOAT, INTEGER, X) \
    FLOAT(X, f16)                        \
    FLOAT(X, f32)                        \
    FLOAT(X, f64)                        \
    INTEGER(X, i16)                      \
    INTEGER(X, u16)                      \
    INTEGER(X, i32)                      \
    INTEGER(X, u32)                      \
    INTEGER(X, i64)                      \
    INTEGER(X, u64)

ALL_RELATIONS(FLOAT_RELATIONS, INTEGER_RELATIONS, DEFINE)

/* The class of a number as a bit: signalling and quiet NaN, -inf, -normal, -subnormal, -0, and the
 * positive ones upward. */
static uint32_t class_bit(uint32_t sign, bool zero_exponent, bool top_exponent, bool fraction,
                          bool quiet)
{
    if (top_exponent && fraction) return quiet ? 2 : 1;
    const int rank = top_exponent ? 3 : !zero_exponent ? 2 : fraction ? 1 : 0;
    return UINT32_C(1) << (sign ? 5 - rank : 6 + rank);
}

static void class_f32(uint32_t *restrict d, uint32_t *restrict e, const uint32_t *restrict a,
                      const uint32_t *restrict b, const uint32_t *restrict c, int n)
{
    (void)d, (void)c;
    for (int l = 0; l < n; l++) {
        const uint32_t x = a[l], exponent = x >> 23 & 0xff;
        e[l] =
            (class_bit(x >> 31, exponent == 0, exponent == 0xff, (x & 0x7fffff) != 0, x >> 22 & 1) &
             b[l]) != 0;
    }
}

static void class_f16(uint32_t *restrict d, uint32_t *restrict e, const uint32_t *restrict a,
                      const uint32_t *restrict b, const uint32_t *restrict c, int n)
{
    (void)d, (void)c;
    for (int l = 0; l < n; l++) {
        const uint32_t x = a[l], exponent = x >> 10 & 0x1f;
        e[l] =
            (class_bit(x >> 15 & 1, exponent == 0, exponent == 0x1f, (x & 0x3ff) != 0, x >> 9 & 1) &
             b[l]) != 0;
    }
}

static void class_f64(uint32_t *restrict d, uint32_t *restrict e, const uint32_t *restrict a,
                      const uint32_t *restrict b, const uint32_t *restrict c, int n)
{
    (void)d, (void)c;
    for (int l = 0; l < n; l++) {
        const uint64_t x = wide(a, l), exponent = x >> 52 & 0x7ff;
        const bool fraction = (x & UINT64_C(0xfffffffffffff)) != 0;
        e[l] = (class_bit((uint32_t)(x >> 63), exponent == 0, exponent == 0x7ff, fraction,
                          x >> 51 & 1) &
                b[l]) != 0;
    }
}

/* ---- the table ------------------------------------------------------------------------------- */

#define FORM_f16 "hh"
#define FORM_f32 "ff"
#define FORM_f64 "dd"
#define FORM_i16 "ww"
#define FORM_u16 "ww"
#define FORM_i32 "uu"
#define FORM_u32 "uu"
#define FORM_i64 "qq"
#define FORM_u64 "qq"

#define PLAIN(name, form, op)                                                    \
    {                                                                            \
        name, "m=" form, emu_vector_run, EMU_VALU, op, NULL, DEF_ALL, HALF_ALONE \
    }
/* gfx9 writes a mask beside EXEC. */
#define EXEC(name, form, op)                                                             \
    {                                                                                    \
        name, "m=" form "|=" form, emu_vector_compare_exec, EMU_VALU, op, NULL, DEF_ALL, \
            HALF_ALONE                                                                   \
    }

#define ROWS(relation, type, truth)                                      \
    PLAIN("v_cmp_" #relation "_" #type, FORM_##type, relation##_##type), \
        EXEC("v_cmpx_" #relation "_" #type, FORM_##type, relation##_##type),

static const emu_row rows[] = {
    /* clang-format off */
    ALL_RELATIONS(FLOAT_RELATIONS, INTEGER_RELATIONS, ROWS)
    /* clang-format on */
    PLAIN("v_cmp_class_f32", "fu", class_f32),
    EXEC("v_cmpx_class_f32", "fu", class_f32),
    PLAIN("v_cmp_class_f16", "hu", class_f16),
    EXEC("v_cmpx_class_f16", "hu", class_f16),
    PLAIN("v_cmp_class_f64", "du", class_f64),
    EXEC("v_cmpx_class_f64", "du", class_f64),
};

const emu_table emu_compare_table = {rows, sizeof rows / sizeof *rows};
