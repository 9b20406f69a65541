/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix instructions against products on the host. Element layouts are written here as facts of
 * each shape, independently of the emulator's rule; integers make every sum exact.
 *
 * usage: check_matrix [OBJDUMP CODE_OBJECT ...]
 */
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/bench.h"
#include "tests/emulator/number.h"

enum { SIDE = 32, MAX_K = 32 };

typedef enum element { F16, BF16, F32, F64 } element;

static int k_mfma_16(int l, int n) { return 4 * (l / 16) + n; }
static int k_mfma_32(int l, int n) { return 4 * (l / 32) + n; }
static int k_one_16(int l, int n) { return l / 16 + n; }
static int k_one_32(int l, int n) { return l / 32 + n; }
static int k_wide_16(int l, int n) { return 8 * (l / 16) + n; }
static int k_wide_32(int l, int n) { return 8 * (l / 32) + n; }
static int k_all(int l, int n) { return l - l + n; }
static int row_mfma_16(int l, int r) { return 4 * (l / 16) + r; }
static int row_mfma_32(int l, int r) { return 8 * (r / 4) + 4 * (l / 32) + r % 4; }
static int row_f64(int l, int r) { return 4 * r + l / 16; }
static int row_gfx11(int l, int r) { return 2 * r + l / 16; }
static int row_gfx12(int l, int r) { return 8 * (l / 16) + r; }

typedef struct shape {
    const char *kernel, *arch; /* the beginning of its name */
    element type;
    int side, k, kpl, out; /* elements of A, B and of C in a lane */
    int (*k_of)(int lane, int n);
    int (*row_of)(int lane, int r);
} shape;

static const shape shapes[] = {
    {"f16_16x16x16", "gfx9", F16, 16, 16, 4, 4, k_mfma_16, row_mfma_16},
    {"f16_32x32x8", "gfx9", F16, 32, 8, 4, 16, k_mfma_32, row_mfma_32},
    {"bf16_16x16x16", "gfx9", BF16, 16, 16, 4, 4, k_mfma_16, row_mfma_16},
    {"bf16_32x32x8", "gfx9", BF16, 32, 8, 4, 16, k_mfma_32, row_mfma_32},
    {"f32_16x16x4", "gfx9", F32, 16, 4, 1, 4, k_one_16, row_mfma_16},
    {"f32_32x32x2", "gfx9", F32, 32, 2, 1, 16, k_one_32, row_mfma_32},
    {"f64_16x16x4", "gfx9", F64, 16, 4, 1, 4, k_one_16, row_f64},
    {"f16_16x16x32", "gfx950", F16, 16, 32, 8, 4, k_wide_16, row_mfma_16},
    {"f16_32x32x16", "gfx950", F16, 32, 16, 8, 16, k_wide_32, row_mfma_32},
    {"bf16_16x16x32", "gfx950", BF16, 16, 32, 8, 4, k_wide_16, row_mfma_16},
    {"bf16_32x32x16", "gfx950", BF16, 32, 16, 8, 16, k_wide_32, row_mfma_32},
    {"f16_16x16x16", "gfx11", F16, 16, 16, 16, 8, k_all, row_gfx11},
    {"bf16_16x16x16", "gfx11", BF16, 16, 16, 16, 8, k_all, row_gfx11},
    {"f16_16x16x16", "gfx12", F16, 16, 16, 8, 8, k_wide_16, row_gfx12},
    {"bf16_16x16x16", "gfx12", BF16, 16, 16, 8, 8, k_wide_16, row_gfx12},
};

static void put(void *to, element type, int at, double x)
{
    const uint16_t half =
        (uint16_t)(type == F16 ? half_from_float((float)x) : bf16_from_float((float)x));
    if (type == F64)
        ((double *)to)[at] = x;
    else if (type == F32)
        ((float *)to)[at] = (float)x;
    else
        ((uint16_t *)to)[at] = half;
}

static double get(const void *from, element type, int at)
{
    return type == F64 ? ((const double *)from)[at] : ((const float *)from)[at];
}

typedef struct matrices {
    double a[SIDE][MAX_K], b[MAX_K][SIDE], c[SIDE][SIDE];
    void *lane_a, *lane_b, *lane_c, *lane_d;
} matrices;

static void fill(matrices *m, const shape *s, int lanes)
{
    for (int i = 0; i < SIDE; i++)
        for (int n = 0; n < MAX_K; n++) {
            m->a[i][n] = (int)(bench_random_bits() % 9) - 4;
            m->b[n][i] = (int)(bench_random_bits() % 9) - 4;
            m->c[i][n] = (int)(bench_random_bits() % 9) - 4;
        }
    for (int l = 0; l < lanes; l++) {
        for (int n = 0; n < s->kpl; n++) {
            put(m->lane_a, s->type, l * s->kpl + n, m->a[l % s->side][s->k_of(l, n)]);
            put(m->lane_b, s->type, l * s->kpl + n, m->b[s->k_of(l, n)][l % s->side]);
        }
        for (int r = 0; r < s->out; r++)
            put(m->lane_c, s->type == F64 ? F64 : F32, l * s->out + r,
                m->c[s->row_of(l, r)][l % s->side]);
    }
}

/* Elements of D that are not A B + C when rows lie as row_of says. */
static int wrong_elements(const matrices *m, const shape *s, int lanes, int (*row_of)(int, int))
{
    int wrong = 0;
    for (int l = 0; l < lanes; l++)
        for (int r = 0; r < s->out; r++) {
            const int row = row_of(l, r) % s->side, column = l % s->side;
            double want = m->c[row][column];
            for (int n = 0; n < s->k; n++) want += m->a[row][n] * m->b[n][column];
            wrong += !(get(m->lane_d, s->type == F64 ? F64 : F32, l * s->out + r) == want);
        }
    return wrong;
}

static void check_shape(bench *b, const shape *s)
{
    const int lanes = emu_object_wave(b->object);
    const size_t room = 64 * 16 * sizeof(double);
    static matrices m;
    m.lane_a = bench_allocate(b, room, false), m.lane_b = bench_allocate(b, room, false);
    m.lane_c = bench_allocate(b, room, false), m.lane_d = bench_allocate(b, room, true);
    fill(&m, s, lanes);
    const void *const arguments[] = {m.lane_d, m.lane_a, m.lane_b, m.lane_c};
    const bool ran = LAUNCH(b, s->kernel, 1, (uint32_t)lanes, arguments);
    const int wrong = wrong_elements(&m, s, lanes, s->row_of);
    tap_check(ran && wrong == 0 && b->report.executed[EMU_MATRIX] == 1, "%s: %s, %d wrong %s",
              b->arch, s->kernel, wrong, emu_report_text(&b->report));
    /* The map of another shape or generation is not this one. */
    const bool small = s->row_of == row_mfma_16 || s->row_of == row_gfx12;
    const int swapped = wrong_elements(&m, s, lanes, small ? row_f64 : row_mfma_16);
    tap_check(swapped > 0, "%s: %s, another map of rows is seen", b->arch, s->kernel);
    /* An undefined element of A makes a row of D undefined. */
    emu_memory_remove(b->memory, m.lane_a);
    emu_memory_add(b->memory, m.lane_a, room, true);
    emu_memory_define(b->memory, (uint8_t *)m.lane_a + 8, room - 8);
    LAUNCH(b, s->kernel, 1, (uint32_t)lanes, arguments);
    tap_check(!b->report.fault && b->report.undefined > 0, "%s: %s, an undefined element: %s",
              b->arch, s->kernel, b->report.undefined_text);
    bench_release(b, m.lane_a), bench_release(b, m.lane_b);
    bench_release(b, m.lane_c), bench_release(b, m.lane_d);
}

/* gfx90a treats subnormal halves as zeros; the others do not. */
static void check_subnormal(bench *b)
{
    uint16_t *const x = bench_allocate(b, 64 * 4 * sizeof *x, false);
    float *const c = bench_allocate(b, 64 * 16 * sizeof *c, false);
    float *const d = bench_allocate(b, 64 * 16 * sizeof *d, true);
    for (int n = 0; n < 64 * 4; n++) x[n] = 0x0200; /* 2^-15 */
    const void *const arguments[] = {d, x, x, c};
    const bool ran = LAUNCH(b, "f16_16x16x16", 1, 64, arguments);
    const float want = strcmp(b->arch, "gfx90a") == 0 ? 0 : 16 * 0x1p-30f;
    tap_check(ran && d[0] == want, "%s: subnormal halves %s", b->arch, emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, c), bench_release(b, d);
}

/* On gfx11 both halves of a wave must hold A and B. */
static void check_replication(bench *b)
{
    uint16_t *const x = bench_allocate(b, 32 * 16 * sizeof *x, false);
    float *const c = bench_allocate(b, 32 * 8 * sizeof *c, false);
    x[20 * 16 + 3] = 0x3c00;
    const void *const arguments[] = {c, x, x, c};
    const bool ran = LAUNCH(b, "f16_16x16x16", 1, 32, arguments);
    tap_check(!ran && strstr(b->report.fault_text, "lane 20 does not repeat") != NULL,
              "%s: halves that differ: %s", b->arch, b->report.fault_text);
    bench_release(b, x), bench_release(b, c);
}

/* Element n of lane l comes from row n of its block's four, column l of 16. */
static void check_transpose(bench *b)
{
    uint16_t *const x = bench_allocate(b, 256 * sizeof *x, false), want;
    uint16_t *const y = bench_allocate(b, 256 * sizeof *y, true);
    for (int n = 0; n < 256; n++) x[n] = (uint16_t)n;
    const void *const arguments[] = {y, x};
    const bool ran = LAUNCH(b, "transposes", 1, 64, arguments);
    int wrong = 0;
    for (int l = 0; l < 64; l++)
        for (int n = 0; n < 4; n++) {
            want = (uint16_t)(l / 16 * 64 + n * 16 + l % 16);
            wrong += y[4 * l + n] != want;
        }
    tap_check(ran && wrong == 0, "%s: a transposing load, %d wrong %s", b->arch, wrong,
              emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, y);
}

static void check_object(bench *b, const void *bytes, size_t size, const char *objdump)
{
    (void)bytes, (void)size, (void)objdump;
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++)
        if (strncmp(b->arch, shapes[n].arch, strlen(shapes[n].arch)) == 0)
            check_shape(b, &shapes[n]);
    if (strncmp(b->arch, "gfx9", 4) == 0) check_subnormal(b);
    if (strcmp(b->arch, "gfx950") == 0) check_transpose(b);
    if (strncmp(b->arch, "gfx11", 5) == 0) check_replication(b);
}

int main(int argc, char **argv) { return bench_main(argc, argv, check_object); }
