/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary of vec_avx512bf16.h, lookups in tables of bytes, which all processors with AMX
 * have, and matrix products of bf16 pairs in AMX, whose registers are tiles of 16 rows of 64 bytes.
 *
 * A product of two tiles takes 16 cycles, and loading a tile takes eight. Six tiles hold sums (2 by
 * 3) and two hold operands: seven loads for six products.
 */
#ifndef FATTN_CPU_VEC_AMX_H
#define FATTN_CPU_VEC_AMX_H

#include <stdbool.h>

#include "backends/cpu/vec_avx512bf16.h"
#include "backends/cpu/vec_vbmi.h"

#define FV_TILES 1

/* A compiler barrier: the intrinsics do not tell compilers, or not fully, which memory tiles and
 * their shapes are loaded from and stored to. */
static inline void tiles_access(const void *at) { __asm__ volatile("" : : "r"(at) : "memory"); }

/* A thread uses tiles between these two calls. Outside of them the system need not save tile
 * registers. */
static inline void tiles_open(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int n = 0; n < 8; n++) {
        shape.row_bytes[n] = 64;
        shape.rows[n] = 16;
    }
    tiles_access(&shape);
    _tile_loadconfig(&shape);
}
static inline void tiles_close(void) { _tile_release(); }

/*
 * C (+)= A B: C is nm <= 2 by nq <= 3 tiles, floats; depth, a multiple of 16, counts pairs.
 * a: [16 nm][depth] pairs; b: [depth][16 nq] pairs; strides in bytes.
 */
static inline void tiles_multiply(int nm, int nq, int add, const void *a, int64_t a_stride,
                                  int64_t depth, const void *b, int64_t b_stride, float *c,
                                  int64_t c_stride)
{
    const char *from = a, *with = b;
    const int64_t down = 16 * a_stride;
    char *const to = (char *)c, *const below = to + 16 * c_stride;
    const bool two = nm > 1, second = nq > 1, third = nq > 2;

    tiles_access(a);
    tiles_access(b);
    tiles_access(c);
#define EACH_SUM(call)            \
    call(0, to);                  \
    if (second) {                 \
        call(1, to + 64);         \
    }                             \
    if (third) {                  \
        call(2, to + 128);        \
    }                             \
    if (two) {                    \
        call(3, below);           \
        if (second) {             \
            call(4, below + 64);  \
        }                         \
        if (third) {              \
            call(5, below + 128); \
        }                         \
    }
#define LOAD(n, at) _tile_loadd(n, at, c_stride)
#define ZERO(n, at) _tile_zero(n)
#define STORE(n, at) _tile_stored(n, at, c_stride)
    if (add) {
        EACH_SUM(LOAD)
    } else {
        EACH_SUM(ZERO)
    }
    for (; depth > 0; depth -= 16, from += 64, with += 16 * b_stride) {
        _tile_loadd(6, from, a_stride);
        _tile_loadd(7, with, b_stride);
        _tile_dpbf16ps(0, 6, 7);
        if (second) {
            _tile_loadd(7, with + 64, b_stride);
            _tile_dpbf16ps(1, 6, 7);
        }
        if (third) {
            _tile_loadd(7, with + 128, b_stride);
            _tile_dpbf16ps(2, 6, 7);
        }
        if (!two) {
            continue;
        }
        _tile_loadd(6, from + down, a_stride);
        if (third) {
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(7, with + 64, b_stride);
        }
        if (second) {
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, with, b_stride);
        }
        _tile_dpbf16ps(3, 6, 7);
    }
    EACH_SUM(STORE)
    tiles_access(c);
#undef EACH_SUM
#undef LOAD
#undef ZERO
#undef STORE
}

/* Six products per round and no loads: each sum depends on nothing but itself. */
static inline void tiles_spin(int64_t rounds)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (; rounds > 0; rounds--) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 7);
    }
}

#endif
