/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix instructions: D = A B + C, of tiles spread over the lanes of a wave. Products are exact,
 * and their sum is computed in double and rounded once; silicon rounds in steps that its manuals do
 * not specify.
 *
 * Element layout. A lane holds values of one row of A and of one column of B, both given by its
 * number modulo the side of the tile: kpl values, consecutive in k. Lanes with equal lane / side
 * are a group g.
 *
 *                  k of value n     row of D of sum r
 *   MFMA           kpl * g + n      4 (groups * (r / 4) + g) + r % 4
 *   MFMA, f64      kpl * g + n      groups * r + g
 *   WMMA, gfx11    n, in both       2 r + g
 *   WMMA, gfx12    8 g + n          8 g + r
 *
 * D's column is always lane % side.
 */
#include <math.h>
#include <string.h>

#include "tests/emulator/machine.h"
#include "tests/emulator/number.h"

typedef enum element { F16, BF16, F32, F64 } element;

/* emu_row.data: the side of a square tile, k, the type of A and B. */
#define SHAPE(side, k, type) ((side) | (k) << 8 | (int64_t)(type) << 16)

enum { MAX_SIDE = 32, MAX_K = 32 };

typedef struct tile {
    double a[MAX_K][MAX_SIDE], b[MAX_K][MAX_SIDE], d[MAX_SIDE][MAX_SIDE];
    uint32_t a_known, b_known; /* rows of A, columns of B that are defined, as bits */
} tile;

/* The shape of an instruction, and how its lanes are grouped. */
typedef struct shape {
    int side, k, kpl, groups;
    bool both; /* either half of the wave holds all k */
    bool wmma, flushes;
    element type;
} shape;

/* ---- elements -------------------------------------------------------------------------------- */

static uint32_t columns_of(const shape *s) { return (uint32_t)((UINT64_C(1) << s->side) - 1); }

/* Value n of consecutive lanes, in registers from reg on. */
static void read_lanes(const emu_wave *w, int reg, element type, int n, int lane, int count,
                       double *to)
{
    if (type == F64) {
        const uint32_t *const low = w->v[reg + 2 * n] + lane, *const high =
                                                                  w->v[reg + 2 * n + 1] + lane;
        for (int c = 0; c < count; c++) {
            const uint64_t bits = low[c] | (uint64_t)high[c] << 32;
            memcpy(to + c, &bits, sizeof bits);
        }
        return;
    }
    const uint32_t *const x = w->v[reg + (type == F32 ? n : n / 2)] + lane;
    const int shift = 16 * (n % 2);
    if (type == F32)
        for (int c = 0; c < count; c++) to[c] = float_of(x[c]);
    else if (type == BF16)
        for (int c = 0; c < count; c++) to[c] = bf16_to_float(x[c] >> shift & 0xffff);
    else
        for (int c = 0; c < count; c++) to[c] = half_to_float(x[c] >> shift & 0xffff);
}

/* Lanes all of whose registers are defined. */
static uint64_t known_lanes(const emu_wave *w, int reg, int registers)
{
    uint64_t known = ~UINT64_C(0);
    for (int n = 0; n < registers; n++) known &= w->v_def[reg + n][0] & w->v_def[reg + n][1];
    return known;
}

/* gfx90a treats 16-bit subnormals as zeros. */
static void flush(element type, double *x, int count)
{
    const double least = type == F16 ? 0x1p-14 : 0x1p-126;
    for (int c = 0; c < count; c++) x[c] = fabs(x[c]) < least ? 0 : x[c];
}

/* ---- a product ------------------------------------------------------------------------------- */

/* A or B: x[k][row or column]. Returns which rows or columns are defined. */
static uint32_t read_operand(emu_wave *w, const emu_instr *in, int reg, const shape *s,
                             double (*x)[MAX_SIDE])
{
    const int registers = s->type == F64 ? 2 * s->kpl : s->type == F32 ? s->kpl : s->kpl / 2;
    const uint64_t lanes = known_lanes(w, reg, registers);
    uint32_t known = columns_of(s);
    for (int group = 0; group < s->groups; group++) {
        known &= (uint32_t)(lanes >> group * s->side);
        for (int n = 0; n < s->kpl; n++) {
            double again[MAX_SIDE];
            const bool first = group == 0 || !s->both;
            double *const to = first ? x[(s->both ? 0 : s->kpl * group) + n] : again;
            read_lanes(w, reg, s->type, n, group * s->side, s->side, to);
            if (s->flushes) flush(s->type, to, s->side);
            for (int c = 0; c < s->side && !first; c++)
                if (memcmp(&again[c], &x[n][c], sizeof again[c]) != 0)
                    emu_fault(w, in, "lane %d does not repeat the values of lane %d", c + s->side,
                              c);
        }
    }
    return known;
}

static int row_of(const emu_instr *in, const shape *s, int group, int r)
{
    if (s->wmma) return in->arch_major == 11 ? 2 * r + group : 8 * group + r;
    return s->type == F64 ? s->groups * r + group : 4 * (s->groups * (r / 4) + group) + r % 4;
}

static void multiply(tile *t, const shape *s)
{
    for (int i = 0; i < s->side; i++)
        for (int n = 0; n < s->k; n++)
            for (int j = 0; j < s->side; j++) t->d[i][j] += t->a[n][i] * t->b[n][j];
}

/* C, which may be a constant, before the product; which lanes of register r are defined. */
static void read_sums(const emu_wave *w, const emu_instr *in, tile *t, const shape *s,
                      uint64_t *known)
{
    const emu_operand *const c = &in->src[2];
    const element wide = s->type == F64 ? F64 : F32;
    const int registers = s->type == F64 ? 2 : 1;
    for (int r = 0; r < s->side / s->groups; r++) {
        known[r] =
            c->kind == VECTOR ? known_lanes(w, c->reg + registers * r, registers) : ~UINT64_C(0);
        for (int group = 0; group < s->groups; group++) {
            double *const to = t->d[row_of(in, s, group, r)];
            if (c->kind == VECTOR)
                read_lanes(w, c->reg, wide, r, group * s->side, s->side, to);
            else
                for (int n = 0; n < s->side; n++) to[n] = float_of((uint32_t)c->bits);
        }
    }
}

static void write_sums(emu_wave *w, const emu_instr *in, const tile *t, const shape *s,
                       const uint64_t *known)
{
    const int registers = s->type == F64 ? 2 : 1;
    for (int r = 0; r < s->side / s->groups; r++) {
        uint32_t d[2][LANES];
        uint64_t def = 0;
        for (int group = 0; group < s->groups; group++) {
            const int row = row_of(in, s, group, r), lane = group * s->side;
            for (int n = 0; n < s->side; n++) {
                uint64_t bits;
                memcpy(&bits, &t->d[row][n], sizeof bits);
                d[0][lane + n] = s->type == F64 ? (uint32_t)bits : bits_of((float)t->d[row][n]);
                d[1][lane + n] = (uint32_t)(bits >> 32);
            }
            if (t->a_known >> row & 1) def |= (uint64_t)t->b_known << lane;
        }
        for (int n = 0; n < registers; n++)
            emu_vector_write(w, in->dst[0].reg + registers * r + n, d[n], all_lanes(w),
                             def & known[r], def & known[r]);
    }
}

static void run_matrix(emu_wave *w, const emu_instr *in)
{
    const int64_t data = in->row->data;
    const emu_modifiers *const m = &in->mod;
    if (m->cbsz != 0 || m->abid != 0 || m->blgp != 0 || m->neg_lo != 0 || m->neg_hi != 0) {
        emu_fault(w, in, "a modifier of a matrix instruction that is not known");
        return;
    }
    if (w->lanes == 32 && exec_mask(w) != all_lanes(w)) {
        emu_fault(w, in, "multiplies matrices without all lanes");
        return;
    }
    shape s = {.side = (int)(data & 0xff), .k = (int)(data >> 8 & 0xff)};
    s.type = (element)(data >> 16);
    s.groups = w->lanes / s.side;
    s.wmma = w->lanes == 32;
    s.both = s.wmma && in->arch_major == 11;
    s.kpl = s.both ? s.k : s.k / s.groups;
    s.flushes = w->group->machine->flushes_halves && s.type <= BF16;
    tile t;
    uint64_t known[MAX_SIDE];
    t.a_known = read_operand(w, in, in->src[0].reg, &s, t.a);
    t.b_known = read_operand(w, in, in->src[1].reg, &s, t.b);
    read_sums(w, in, &t, &s, known);
    multiply(&t, &s);
    write_sums(w, in, &t, &s, known);
}

/* ---- the table ------------------------------------------------------------------------------- */

#define ROW(name, side, k, type)                                                            \
    {                                                                                       \
        name, "r=rrr", run_matrix, EMU_MATRIX, NULL, NULL, SHAPE(side, k, type), HALF_ALONE \
    }

static const emu_row rows[] = {
    /* gfx90a */
    ROW("v_mfma_f32_16x16x16f16", 16, 16, F16),
    ROW("v_mfma_f32_32x32x8f16", 32, 8, F16),
    ROW("v_mfma_f32_16x16x16bf16_1k", 16, 16, BF16),
    ROW("v_mfma_f32_32x32x8bf16_1k", 32, 8, BF16),
    ROW("v_mfma_f32_16x16x4f32", 16, 4, F32),
    ROW("v_mfma_f32_32x32x2f32", 32, 2, F32),
    ROW("v_mfma_f64_16x16x4f64", 16, 4, F64),
    /* gfx942 */
    ROW("v_mfma_f32_16x16x16_f16", 16, 16, F16),
    ROW("v_mfma_f32_32x32x8_f16", 32, 8, F16),
    ROW("v_mfma_f32_16x16x16_bf16", 16, 16, BF16),
    ROW("v_mfma_f32_32x32x8_bf16", 32, 8, BF16),
    ROW("v_mfma_f32_16x16x4_f32", 16, 4, F32),
    ROW("v_mfma_f32_32x32x2_f32", 32, 2, F32),
    ROW("v_mfma_f64_16x16x4_f64", 16, 4, F64),
    /* gfx950 */
    ROW("v_mfma_f32_16x16x32_f16", 16, 32, F16),
    ROW("v_mfma_f32_32x32x16_f16", 32, 16, F16),
    ROW("v_mfma_f32_16x16x32_bf16", 16, 32, BF16),
    ROW("v_mfma_f32_32x32x16_bf16", 32, 16, BF16),
    /* gfx11 and gfx12 */
    ROW("v_wmma_f32_16x16x16_f16", 16, 16, F16),
    ROW("v_wmma_f32_16x16x16_bf16", 16, 16, BF16),
};

const emu_table emu_matrix_table = {rows, sizeof rows / sizeof *rows};
