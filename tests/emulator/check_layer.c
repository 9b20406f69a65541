/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layer over matrix units (layer.hip) against products on the host, of integers that f16, bf16
 * and f32 hold exactly.
 *
 * usage: check_layer [OBJDUMP CODE_OBJECT ...]
 */
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/bench.h"
#include "tests/emulator/number.h"

enum { KEYS = 64, WIDTH = 64, SIDE = 32 };

typedef struct arguments {
    float *s, *o, *of_s;
    uint16_t *q, *k, *v;
} arguments;

/* x[row][channel] of -1, 0 and 1, as integers and as the kernel takes them: sums of 64 products are
 * small enough for bf16. */
static void draw(int x[][WIDTH], uint16_t *to, int rows, bool f16)
{
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < WIDTH; c++) {
            x[i][c] = (int)(bench_random_bits() % 3) - 1;
            to[i * WIDTH + c] =
                (uint16_t)(f16 ? half_from_float((float)x[i][c]) : bf16_from_float((float)x[i][c]));
        }
}

static int wrong_elements(const arguments *a, int side, int q[][WIDTH], int k[][WIDTH],
                          int v[][WIDTH])
{
    int wrong = 0;
    for (int i = 0; i < side; i++) {
        int s[KEYS] = {0}, largest = -KEYS, sum = 0;
        for (int j = 0; j < KEYS; j++) {
            for (int c = 0; c < WIDTH; c++) s[j] += q[i][c] * k[j][c];
            wrong += a->s[i * KEYS + j] != (float)s[j];
            largest = s[j] > largest ? s[j] : largest;
            sum += s[j];
        }
        wrong += a->of_s[i] != (float)largest;
        wrong += a->of_s[side + i] != (float)sum;
        for (int c = 0; c < WIDTH; c++) {
            int o = 0;
            for (int j = 0; j < KEYS; j++) o += s[j] * v[j][c];
            wrong += a->o[i * WIDTH + c] != (float)o;
        }
    }
    return wrong;
}

static void check_kernel(bench *b, const char *kernel, bool f16, int side)
{
    static int q[SIDE][WIDTH], k[KEYS][WIDTH], v[KEYS][WIDTH];
    const size_t floats = (size_t)side * WIDTH * sizeof(float);
    const arguments a = {
        .s = bench_allocate(b, floats, true),
        .o = bench_allocate(b, floats, true),
        .of_s = bench_allocate(b, 2 * (size_t)side * sizeof(float), true),
        .q = bench_allocate(b, sizeof q / 2, false),
        .k = bench_allocate(b, sizeof k / 2, false),
        .v = bench_allocate(b, sizeof v / 2, false),
    };
    draw(q, a.q, side, f16);
    draw(k, a.k, KEYS, f16);
    draw(v, a.v, KEYS, f16);
    const bool ran = LAUNCH(b, kernel, 1, (uint32_t)emu_object_wave(b->object), a);
    const int wrong = wrong_elements(&a, side, q, k, v);
    tap_check(ran && wrong == 0, "%s: %s, %d wrong %s", b->arch, kernel, wrong,
              emu_report_text(&b->report));
    tap_check(ran && b->report.lds_cycles == b->report.lds_cycles_ideal,
              "%s: %s waits for no bank: %d cycles of LDS, %d without conflicts", b->arch, kernel,
              (int)b->report.lds_cycles, (int)b->report.lds_cycles_ideal);
    bench_release(b, a.s), bench_release(b, a.o), bench_release(b, a.of_s);
    bench_release(b, a.q), bench_release(b, a.k), bench_release(b, a.v);
}

static void check_object(bench *b, const void *bytes, size_t size, const char *objdump)
{
    (void)bytes, (void)size, (void)objdump;
    check_kernel(b, "f16_16", true, 16);
    check_kernel(b, "bf16_16", false, 16);
    if (emu_object_wave(b->object) == 64) {
        check_kernel(b, "f16_32", true, 32);
        check_kernel(b, "bf16_32", false, 32);
    }
}

int main(int argc, char **argv) { return bench_main(argc, argv, check_object); }
