/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The emulator against the host: single instructions against results worked out by hand, compiled
 * kernels against the same computation in C, and each check against a kernel that it must catch.
 *
 * usage: check_emulator [OBJDUMP CODE_OBJECT ...]
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/bench.h"
#include "tests/emulator/number.h"

enum { N = 1000, ROOM = 1024 };

static const emu_schedule schedules[] = {EMU_FORWARD, EMU_REVERSED, EMU_SHUFFLED};

/* ---- single instructions --------------------------------------------------------------------- */

typedef enum vector_kind { VECTOR_BITS, SCALAR_BITS, LANES_MOVED } vector_kind;
enum { ALL, NINE, LATE, NEW, RDNA3, RDNA4 };

typedef struct vector_row {
    vector_kind kind;
    int where;
    const char *text;
    uint64_t result, scc;
    int (*from)(int l, int wave);
} vector_row;

static int inverse(int l, int wave)
{
    for (int s = 0; s < wave; s++)
        if ((s * 5 + 3) % wave == l) return s;
    return -1;
}

/* Sources and results that the list spells by macros. */
#define WAIT
#define SELECT
#define VCC "vcc"
#define WAVE wave

/* The lanes' formulas become functions of their own, one for each line of the list. */
#define JOIN(a, b) a##b
#define NAME(line) JOIN(from_, line)
#define V32(where, text, a, b, c, result)
#define V64(where, text, a, b, c, result)
#define S32(where, text, a, b, result, scc)
#define S64(where, text, a, b, result, scc)
#define LANE(where, text, lane)                \
    static int NAME(__LINE__)(int l, int wave) \
    {                                          \
        (void)wave;                            \
        return lane;                           \
    }
#include "tests/emulator/vectors.inc"
#undef V32
#undef V64
#undef S32
#undef S64
#undef LANE

static const vector_row vector_rows[] = {
#define V32(where, text, a, b, c, result) {VECTOR_BITS, where, text, result, 0, NULL},
#define V64(where, text, a, b, c, result) {VECTOR_BITS, where, text, result, 0, NULL},
#define S32(where, text, a, b, result, scc) {SCALAR_BITS, where, text, result, scc, NULL},
#define S64(where, text, a, b, result, scc) {SCALAR_BITS, where, text, result, scc, NULL},
#define LANE(where, text, lane) {LANES_MOVED, where, text, 0, 0, NAME(__LINE__)},
#include "tests/emulator/vectors.inc"
};

enum { VECTOR_ROWS = sizeof vector_rows / sizeof *vector_rows };

static bool has(const char *arch, int where)
{
    const bool nine = strncmp(arch, "gfx9", 4) == 0, twelve = strncmp(arch, "gfx12", 5) == 0;
    const bool in[] = {[ALL] = true,
                       [NINE] = nine,
                       [LATE] = !nine,
                       [NEW] = strcmp(arch, "gfx950") == 0,
                       [RDNA3] = !nine && !twelve,
                       [RDNA4] = twelve};
    return in[where];
}

static uint64_t expected(const vector_row *row, int lane, int wave)
{
    if (row->kind == VECTOR_BITS) return row->result;
    if (row->kind == SCALAR_BITS) return lane == 0 ? row->result : row->scc;
    const int from = row->from(lane, wave);
    return from >= 0 ? 1000 + (uint64_t)from : from == -1 ? 5000 + (uint64_t)lane : 0;
}

static void check_vectors(bench *b)
{
    const int wave = emu_object_wave(b->object);
    uint64_t *const out = bench_allocate(b, VECTOR_ROWS * 64 * sizeof *out, false);
    const bool ran = LAUNCH(b, "vectors", 1, (uint32_t)wave, out);
    tap_check(ran, "%s: instructions run %s", b->arch, emu_report_text(&b->report));
    int checked = 0, wrong = 0;
    for (int row = 0; ran && row < VECTOR_ROWS; row++) {
        if (!has(b->arch, vector_rows[row].where)) continue;
        checked++;
        for (int lane = 0; lane < wave; lane++) {
            const uint64_t got = out[row * 64 + lane],
                           want = expected(&vector_rows[row], lane, wave);
            if (got == want) continue;
            printf("# %s: lane %d: %#llx, not %#llx\n", vector_rows[row].text, lane,
                   (unsigned long long)got, (unsigned long long)want);
            wrong++;
            break;
        }
    }
    tap_check(checked > 150 && wrong == 0, "%s: %d of %d instructions give what the manuals say",
              b->arch, checked - wrong, checked);
    bench_release(b, out);
}

/* ---- compiled kernels ------------------------------------------------------------------------ */

static void check_saxpy(bench *b)
{
    float *const x = bench_allocate(b, N * sizeof *x, false),
                 *const y = bench_allocate(b, N * sizeof *y, false), was[N];
    for (int i = 0; i < N; i++) x[i] = bench_random_float(), was[i] = y[i] = bench_random_float();
    const struct {
        float *y;
        const float *x;
        float a;
        long long n;
    } arguments = {y, x, 1.7f, N};
    const bool ran = LAUNCH(b, "saxpy", 4, 256, arguments);
    int wrong = 0;
    for (int i = 0; i < N; i++) wrong += !(y[i] == fmaf(1.7f, x[i], was[i]));
    tap_check(ran && wrong == 0, "%s: saxpy, %d wrong %s", b->arch, wrong,
              emu_report_text(&b->report));
    bench_release(b, x);
    bench_release(b, y);
}

/* Numbers of all sizes, subnormal ones and infinities among them. */
static float wild_float(void)
{
    static const float edges[] = {0.0f,      -0.0f,     INFINITY,        -INFINITY,
                                  0x1p-149f, 0x1p-126f, 0x1.fffffep127f, 1};
    const uint32_t bits = bench_random_bits();
    return bits % 16 < 8 ? edges[bits % 8] : float_of(bench_random_bits() & 0xff7fffff);
}

static bool same(double x, double y) { return x == y || (x != x && y != y); }

static void check_divide(bench *b)
{
    float *const x = bench_allocate(b, N * sizeof *x, false),
                 *const y = bench_allocate(b, N * sizeof *y, false), was[N];
    double *const z = bench_allocate(b, N * sizeof *z, false), z_was[N];
    int *const r = bench_allocate(b, N * sizeof *r, false),
               *const d = bench_allocate(b, N * sizeof *d, false), r_was[N];
    for (int i = 0; i < N; i++) {
        x[i] = wild_float(), was[i] = y[i] = wild_float(), z_was[i] = z[i] = wild_float();
        r_was[i] = r[i] = (int)(bench_random_bits() >> 2);
        d[i] = 1 + (int)(bench_random_bits() >> (2 + bench_random_bits() % 28));
    }
    const struct {
        float *y;
        double *z;
        int *r;
        const float *x;
        const int *d;
        int n;
    } arguments = {y, z, r, x, d, N};
    const bool ran = LAUNCH(b, "divide", 4, 256, arguments);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        const unsigned high =
            (unsigned)((unsigned long long)(unsigned)r_was[i] * (unsigned)d[i] >> 32);
        wrong += !same(y[i], was[i] / x[i]);
        wrong += !same(z[i], z_was[i] / x[i]);
        wrong += (unsigned)r[i] != (unsigned)(r_was[i] % d[i]) + high;
    }
    tap_check(ran && wrong == 0, "%s: divisions, %d wrong %s", b->arch, wrong,
              emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, y), bench_release(b, z), bench_release(b, r),
        bench_release(b, d);
}

static void check_halves(bench *b)
{
    uint16_t *const t[4] = {bench_allocate(b, 2 * N, false), bench_allocate(b, 2 * N, false),
                            bench_allocate(b, 2 * N, false), bench_allocate(b, 2 * N, false)};
    uint16_t want_h[N], want_b[N];
    for (int i = 0; i < N; i++) {
        t[0][i] = (uint16_t)half_from_float(bench_random_float());
        t[1][i] = (uint16_t)bf16_from_float(bench_random_float());
        t[2][i] = (uint16_t)half_from_float(bench_random_float());
        t[3][i] = (uint16_t)bf16_from_float(bench_random_float());
        const float h = half_to_float(t[0][i]), x = half_to_float(t[2][i]);
        const float c = bf16_to_float(t[1][i]), y = bf16_to_float(t[3][i]);
        const float product = half_to_float(half_from_float(h * x));
        want_h[i] = (uint16_t)half_from_float(product + half_to_float(half_from_float(y)));
        want_b[i] = (uint16_t)bf16_from_float(c * y + x);
    }
    const struct {
        uint16_t *h, *b;
        const uint16_t *x, *y;
        int n;
    } arguments = {t[0], t[1], t[2], t[3], N};
    const bool ran = LAUNCH(b, "halves", 4, 256, arguments);
    const bool right =
        memcmp(t[0], want_h, sizeof want_h) == 0 && memcmp(t[1], want_b, sizeof want_b) == 0;
    tap_check(ran && right, "%s: f16 and bf16 %s", b->arch, emu_report_text(&b->report));
    for (int n = 0; n < 4; n++) bench_release(b, t[n]);
}

/* The sums in the order of the kernel's tree. */
static bool sums_right(const float *y, const float *x)
{
    for (int g = 0; g < 4; g++) {
        float room[256];
        memcpy(room, x + 256 * g, sizeof room);
        for (int width = 128; width > 0; width /= 2)
            for (int t = 0; t < width; t++) room[t] += room[t + width];
        if (!(y[g] == room[0])) return false;
    }
    return true;
}

static void check_sums(bench *b)
{
    float *const x = bench_allocate(b, 4 * 256 * sizeof *x, false), *const y = bench_allocate(
                                                                        b, 4 * sizeof *y, true);
    for (int i = 0; i < 4 * 256; i++) x[i] = bench_random_float();
    const struct {
        float *y;
        const float *x;
    } arguments = {y, x};
    const bool ran = LAUNCH(b, "sum_whole", 4, 256, arguments);
    tap_check(ran && sums_right(y, x), "%s: sums through LDS, schedule %d %s", b->arch, b->schedule,
              emu_report_text(&b->report));
    LAUNCH(b, "sum_without_a_barrier", 4, 256, arguments);
    tap_check(b->report.race > 0, "%s: a missing barrier is a race, schedule %d: %s", b->arch,
              b->schedule, b->report.race_text);
    bench_release(b, x);
    bench_release(b, y);
}

static void check_agreement(bench *b)
{
    int *const x = bench_allocate(b, 32 * sizeof *x, false);
    int *const y = bench_allocate(b, 32 * sizeof *y, true);
    for (int t = 0; t < 32; t++) x[t] = t / 2;
    const void *const arguments[] = {y, x};
    tap_check(LAUNCH(b, "agrees", 1, 32, arguments) && y[5] == 5, "%s: lanes that agree %s",
              b->arch, emu_report_text(&b->report));
    x[7] = 99;
    tap_check(!LAUNCH(b, "agrees", 1, 32, arguments) && b->report.race == 1,
              "%s: lanes that do not: %s", b->arch, b->report.race_text);
    bench_release(b, x), bench_release(b, y);
}

static void check_counts(bench *b)
{
    unsigned *const x = bench_allocate(b, 1024 * sizeof *x, false), *const h = bench_allocate(
                                                                        b, 16 * sizeof *h, false);
    unsigned *const largest = bench_allocate(b, sizeof *largest, false), want[16] = {0}, most = 0;
    float *const total = bench_allocate(b, sizeof *total, false), sum = 0;
    for (int i = 0; i < 1024; i++) {
        x[i] = bench_random_bits();
        want[x[i] % 16]++;
        sum += (float)(x[i] % 16);
        most = x[i] > most ? x[i] : most;
    }
    const struct {
        unsigned *h;
        float *total;
        unsigned *largest;
        const unsigned *x;
    } arguments = {h, total, largest, x};
    const bool ran = LAUNCH(b, "counts", 4, 256, arguments);
    tap_check(ran && memcmp(h, want, sizeof want) == 0 && *largest == most && *total == sum,
              "%s: atomics %s", b->arch, emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, h), bench_release(b, largest), bench_release(b, total);
}

static void check_dynamic_lds(bench *b)
{
    enum { BLOCK = 200 };
    int *const x = bench_allocate(b, 3 * BLOCK * sizeof *x, false), *const y = bench_allocate(
                                                                        b, 3 * BLOCK * sizeof *y,
                                                                        true);
    for (int i = 0; i < 3 * BLOCK; i++) x[i] = i;
    const struct {
        int *y;
        const int *x;
        int n;
    } arguments = {y, x, BLOCK};
    b->dynamic_lds = BLOCK * sizeof *x;
    const bool ran = LAUNCH(b, "reverse", 3, 256, arguments);
    int wrong = 0;
    for (int i = 0; i < 3 * BLOCK; i++) wrong += y[i] != i / BLOCK * BLOCK + BLOCK - 1 - i % BLOCK;
    tap_check(ran && wrong == 0, "%s: LDS of the launch's size %s", b->arch,
              emu_report_text(&b->report));
    b->dynamic_lds -= 4;
    const bool short_ran = LAUNCH(b, "reverse", 3, 256, arguments);
    tap_check(!short_ran && b->report.fault, "%s: LDS one element short is a fault: %s", b->arch,
              b->report.fault_text);
    b->dynamic_lds = 0;
    bench_release(b, x);
    bench_release(b, y);
}

static void check_tables(bench *b)
{
    int *const y = bench_allocate(b, 64 * sizeof *y, true);
    const bool ran = LAUNCH(b, "tables", 1, 64, y);
    size_t size = 0;
    int *const variable = emu_object_variable(b->object, "a_variable", &size);
    tap_check(ran && y[5] == 62 && variable != NULL && size == sizeof(int) && *variable == 42,
              "%s: variables of the object %s", b->arch, emu_report_text(&b->report));
    bench_release(b, y);
}

static void check_privates(bench *b)
{
    int *const x = bench_allocate(b, 64 * sizeof *x, false);
    int *const y = bench_allocate(b, 64 * sizeof *y, true), wrong = 0;
    for (int t = 0; t < 64; t++) x[t] = 7 * t;
    const void *const arguments[] = {y, x};
    const bool ran = LAUNCH(b, "privates", 1, 64, arguments);
    for (int t = 0; t < 64; t++) wrong += y[t] != x[t] + (x[t] % 40) * (x[t] % 40);
    if (strcmp(b->arch, "gfx90a") == 0)
        tap_check(!ran && strstr(b->report.fault_text, "scratch is not emulated") != NULL, "%s: %s",
                  b->arch, b->report.fault_text);
    else
        tap_check(ran && wrong == 0, "%s: scratch, %d wrong %s", b->arch, wrong,
                  emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, y);
}

static void check_generic(bench *b)
{
    int *const x = bench_allocate(b, 64 * sizeof *x, false);
    int *const y = bench_allocate(b, 128 * sizeof *y, true), wrong = 0;
    for (int t = 0; t < 64; t++) x[t] = t;
    const void *const arguments[] = {y, x};
    const bool ran = LAUNCH(b, "generic", 1, 64, arguments);
    for (int t = 0; t < 64; t++) {
        wrong += y[t] != (t % 2 ? 1000 : 0) + 63 - t;
        wrong += x[63 - t] != (t % 2 ? 63 - t : -t); /* written by even lanes */
        wrong += y[64 + t] != (t % 2 ? 1000 + t : t - 63);
    }
    tap_check(ran && wrong == 0, "%s: generic pointers, %d wrong %s", b->arch, wrong,
              emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, y);
}

static void check_buffer(bench *b)
{
    enum { INSIDE = 50 };
    int *const x = bench_allocate(b, INSIDE * sizeof *x, false);
    int *const y = bench_allocate(b, (256 + 64) * sizeof *y, false), wrong = 0;
    for (int t = 0; t < INSIDE; t++) x[t] = 100 + t;
    const struct {
        int *y, *x, n;
    } arguments = {y, x, INSIDE * (int)sizeof *x};
    const bool ran = LAUNCH(b, "buffer", 1, 64, arguments);
    for (int t = 0; t < 64; t++) {
        wrong += y[t] != (t < INSIDE ? 101 + t : 0);
        wrong += y[256 + t] != (t < INSIDE ? 100 + t : 0);
    }
    tap_check(ran && wrong == 0, "%s: buffers, %d wrong %s", b->arch, wrong,
              emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, y);
}

static void check_to_lds(bench *b)
{
    int *const x = bench_allocate(b, 64 * sizeof *x, false);
    int *const y = bench_allocate(b, 64 * sizeof *y, true), wrong = 0;
    for (int t = 0; t < 64; t++) x[t] = t;
    const void *const arguments[] = {y, x};
    const bool ran = LAUNCH(b, "to_lds", 1, 64, arguments);
    for (int t = 0; t < 64; t++) wrong += y[t] != 63 - t;
    tap_check(ran && wrong == 0, "%s: loads to LDS, %d wrong %s", b->arch, wrong,
              emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, y);
}

/* ---- what must be caught --------------------------------------------------------------------- */

static void check_bounds(bench *b)
{
    float *const x = bench_allocate(b, N * sizeof *x, false), *const y = bench_allocate(
                                                                  b, N * sizeof *y, false);
    const struct {
        float *y;
        const float *x;
        float a;
        long long n;
    } arguments = {y, x, 1.7f, N + 1};
    const bool ran = LAUNCH(b, "saxpy", 4, 256, arguments);
    tap_check(!ran &&
                  strstr(b->report.fault_text, "0 bytes after the end of a region of 4000") != NULL,
              "%s: one element too many: %s", b->arch, b->report.fault_text);
    bench_release(b, x);
    bench_release(b, y);
}

static void check_undefined(bench *b)
{
    int *const x = bench_allocate(b, 256 * sizeof *x, false), *const y = bench_allocate(
                                                                  b, 256 * sizeof *y, true);
    struct {
        int *y;
        const int *x;
        int written;
    } arguments = {y, x, 256};
    tap_check(LAUNCH(b, "forgets", 1, 256, arguments), "%s: LDS that is written %s", b->arch,
              emu_report_text(&b->report));
    arguments.written = 255;
    tap_check(!LAUNCH(b, "forgets", 1, 256, arguments) && b->report.undefined == 1,
              "%s: LDS that one lane did not write: %s", b->arch, b->report.undefined_text);
    int *const workspace = bench_allocate(b, 256 * sizeof *workspace, true);
    struct {
        int *y, *workspace;
        int n;
    } more = {y, workspace, 200};
    tap_check(!LAUNCH(b, "reads_workspace", 1, 256, more) && b->report.undefined > 0,
              "%s: undefined memory: %s", b->arch, b->report.undefined_text);
    emu_memory_define(b->memory, workspace + 200, 56 * sizeof *workspace);
    tap_check(LAUNCH(b, "reads_workspace", 1, 256, more), "%s: memory that the host wrote %s",
              b->arch, emu_report_text(&b->report));
    bench_release(b, x), bench_release(b, y), bench_release(b, workspace);
}

/* A store and a load of 64 lanes: 2 groups of 32 lanes each, and `stride` lanes on a bank; on
 * gfx950 one group and 64 banks. */
static void check_banks(bench *b)
{
    static const int strides[][3] = {{1, 1, 1}, {2, 2, 2}, {4, 4, 4}, {32, 32, 32}, {33, 1, 1}};
    const bool wide = strcmp(b->arch, "gfx950") == 0;
    int *const y = bench_allocate(b, 64 * sizeof *y, true), wrong = 0;
    for (size_t n = 0; n < sizeof strides / sizeof *strides; n++) {
        const struct {
            int *y;
            int stride;
        } arguments = {y, strides[n][0]};
        const bool ran = LAUNCH(b, "strided", 1, 64, arguments);
        const uint64_t groups = wide ? 2 : 4, want = groups * (uint64_t)strides[n][1];
        const bool right = b->report.lds_cycles == want && b->report.lds_cycles_ideal == groups;
        if (!ran || !right)
            printf("# stride %d: %llu cycles, ideally %llu\n", strides[n][0],
                   (unsigned long long)b->report.lds_cycles,
                   (unsigned long long)b->report.lds_cycles_ideal);
        wrong += !ran || !right;
    }
    tap_check(wrong == 0, "%s: bank conflicts %s", b->arch, emu_report_text(&b->report));
    bench_release(b, y);
}

static void check_refusals(bench *b, const void *bytes, size_t size, const char *objdump)
{
    int *const y = bench_allocate(b, sizeof *y, false);
    b->limit = 10000;
    tap_check(!LAUNCH(b, "endless", 1, 1, y) && b->report.fault, "%s: an endless loop: %s", b->arch,
              b->report.fault_text);
    b->limit = 0;
    tap_check(!LAUNCH(b, "endless", 1, 2000, y) && b->report.fault,
              "%s: too large a work-group: %s", b->arch, b->report.fault_text);
    bench_release(b, y);
    char why[256] = "";
    emu_object *const none = emu_object_load(bytes, size / 2, objdump, why, sizeof why);
    tap_check(none == NULL && why[0] != '\0', "%s: half a code object: %s", b->arch, why);
    emu_object_unload(none);
}

/* ---- the program ----------------------------------------------------------------------------- */

static void check_object(bench *b, const void *bytes, size_t size, const char *objdump)
{
    if (emu_object_find(b->object, "vectors") != NULL) {
        check_vectors(b);
        return;
    }
    check_saxpy(b);
    check_divide(b);
    check_halves(b);
    for (size_t n = 0; n < sizeof schedules / sizeof *schedules; n++) {
        b->schedule = schedules[n];
        check_sums(b);
        check_counts(b);
    }
    b->schedule = EMU_FORWARD;
    check_agreement(b);
    check_dynamic_lds(b);
    check_tables(b);
    check_privates(b);
    check_generic(b);
    check_buffer(b);
    if (strncmp(b->arch, "gfx9", 4) == 0) check_to_lds(b);
    check_bounds(b);
    check_undefined(b);
    check_banks(b);
    check_refusals(b, bytes, size, objdump);
}

int main(int argc, char **argv) { return bench_main(argc, argv, check_object); }
