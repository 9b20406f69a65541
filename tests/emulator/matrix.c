/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix instructions: D = A B + C, of tiles spread over the lanes of a wave. Products are
 * exact and their sum is made in double and rounded once; silicon rounds in steps that its
 * manuals do not tell.
 *
 * Where elements lie: a lane holds values of one row of A and one column of B, both by its number
 * modulo the side of the tile. With kpl values a lane, which are consecutive in k:
 *   MFMA          k = kpl * (lane / side) + n          D row: 4 (groups * (r / 4) + lane / side) +
 *   r % 4 MFMA, f64     the same                             D row: groups * r + lane / side WMMA,
 *   gfx11   k = n, in both halves of the wave    D row: 2 r + lane / 16 WMMA, gfx12   k = 8 (lane /
 *   16) + n                D row: 8 (lane / 16) + r
 * and D's column is lane % side always.
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
    double a[MAX_SIDE][MAX_K], b[MAX_K][MAX_SIDE], d[MAX_SIDE][MAX_SIDE];
    bool row_known[MAX_SIDE], column_known[MAX_SIDE]; /* of A, of B */
} tile;

/* ---- elements -------------------------------------------------------------------------------- */

/* Value n of a lane, in registers from reg on, and whether it is defined. */
static double element_at(const emu_wave *w, int reg, element type, int lane, int n, bool *known)
{
    if (type == F64) {
        const uint64_t bits = w->v[reg + 2 * n][lane] | (uint64_t)w->v[reg + 2 * n + 1][lane] << 32;
        double x;
        memcpy(&x, &bits, sizeof x);
        for (int r = 2 * n; r < 2 * n + 2; r++)
            *known &= lane_in(w->v_def[reg + r][0] & w->v_def[reg + r][1], lane);
        return x;
    }
    if (type == F32) {
        *known &= lane_in(w->v_def[reg + n][0] & w->v_def[reg + n][1], lane);
        return float_of(w->v[reg + n][lane]);
    }
    const uint32_t half = w->v[reg + n / 2][lane] >> 16 * (n % 2) & 0xffff;
    *known &= lane_in(w->v_def[reg + n / 2][n % 2], lane);
    return type == F16 ? half_to_float(half) : bf16_to_float(half);
}

/* gfx90a takes subnormals of 16 bits for zeros. */
static double taken(const emu_wave *w, element type, double x)
{
    const double least = type == F16 ? 0x1p-14 : 0x1p-126;
    const bool flushes = w->group->machine->flushes_halves && type <= BF16;
    return flushes && fabs(x) < least ? 0 : x;
}

/* ---- a product ------------------------------------------------------------------------------- */

static void read_tiles(emu_wave *w, const emu_instr *in, tile *t, int side, int k, element type)
{
    const bool wmma = w->lanes == 32, both = wmma && in->arch_major == 11;
    const int kpl = both ? k : k * side / w->lanes;
    for (int n = 0; n < side; n++) t->row_known[n] = t->column_known[n] = true;
    for (int lane = 0; lane < w->lanes; lane++) {
        const int at = lane % side, first = both ? 0 : kpl * (lane / side);
        for (int n = 0; n < kpl; n++) {
            const double a =
                taken(w, type, element_at(w, in->src[0].reg, type, lane, n, &t->row_known[at]));
            const double b =
                taken(w, type, element_at(w, in->src[1].reg, type, lane, n, &t->column_known[at]));
            const bool again = both && lane >= side;
            if (again && (memcmp(&t->a[at][n], &a, sizeof a) || memcmp(&t->b[n][at], &b, sizeof b)))
                emu_fault(w, in, "lane %d does not repeat the values of lane %d", lane, at);
            t->a[at][first + n] = a;
            t->b[first + n][at] = b;
        }
    }
}

static int row_of(const emu_wave *w, const emu_instr *in, int side, element type, int lane, int r)
{
    const int group = lane / side, groups = w->lanes / side;
    if (w->lanes == 32) return in->arch_major == 11 ? 2 * r + group : 8 * group + r;
    return type == F64 ? groups * r + group : 4 * (groups * (r / 4) + group) + r % 4;
}

static void multiply(tile *t, int side, int k)
{
    for (int i = 0; i < side; i++)
        for (int n = 0; n < k; n++)
            for (int j = 0; j < side; j++) t->d[i][j] += t->a[i][n] * t->b[n][j];
}

/* C, which may be a constant, before the product; then D. */
static void read_sums(const emu_wave *w, const emu_instr *in, tile *t, int side, element type,
                      uint64_t *known)
{
    const emu_operand *const c = &in->src[2];
    const element wide = type == F64 ? F64 : F32;
    for (int r = 0; r < side * side / w->lanes; r++) {
        known[r] = 0;
        for (int lane = 0; lane < w->lanes; lane++) {
            bool def = true;
            const double x = c->kind == VECTOR ? element_at(w, c->reg, wide, lane, r, &def)
                                               : float_of((uint32_t)c->bits);
            t->d[row_of(w, in, side, type, lane, r)][lane % side] = x;
            known[r] |= (uint64_t)def << lane;
        }
    }
}

static void write_sums(emu_wave *w, const emu_instr *in, const tile *t, int side, element type,
                       const uint64_t *known)
{
    const int registers = type == F64 ? 2 : 1;
    for (int r = 0; r < side * side / w->lanes; r++) {
        uint32_t d[2][LANES];
        uint64_t def = known[r];
        for (int lane = 0; lane < w->lanes; lane++) {
            const int row = row_of(w, in, side, type, lane, r), column = lane % side;
            const double x = t->d[row][column];
            uint64_t bits;
            memcpy(&bits, &x, sizeof bits);
            d[0][lane] = type == F64 ? (uint32_t)bits : bits_of((float)x);
            d[1][lane] = (uint32_t)(bits >> 32);
            if (!t->row_known[row] || !t->column_known[column]) def &= ~(UINT64_C(1) << lane);
        }
        for (int n = 0; n < registers; n++)
            emu_vector_write(w, in->dst[0].reg + registers * r + n, d[n], all_lanes(w), def, def);
    }
}

static void run_matrix(emu_wave *w, const emu_instr *in)
{
    const int side = (int)(in->row->data & 0xff), k = (int)(in->row->data >> 8 & 0xff);
    const element type = (element)(in->row->data >> 16);
    const emu_modifiers *const m = &in->mod;
    if (m->cbsz != 0 || m->abid != 0 || m->blgp != 0 || m->neg_lo != 0 || m->neg_hi != 0) {
        emu_fault(w, in, "a modifier of a matrix instruction that is not known");
        return;
    }
    if (w->lanes == 32 && exec_mask(w) != all_lanes(w)) {
        emu_fault(w, in, "multiplies matrices without all lanes");
        return;
    }
    tile t;
    uint64_t known[MAX_SIDE * MAX_SIDE / 32];
    read_tiles(w, in, &t, side, k, type);
    read_sums(w, in, &t, side, type, known);
    multiply(&t, side, k);
    write_sums(w, in, &t, side, type, known);
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
