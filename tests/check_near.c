/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward kernels of the CPU do not search a tile for its largest score if they expect all scores
 * to be near those visited so far; if that proves wrong, they redo the tile (soften.h). With
 * FATTN_BATCH_INVARIANT they always search. So results have the same bits with and without it if
 * every attempt was undone completely, and different bits if one was not. Both are compared with
 * the formula in double. Values of 1 give an o of 1, though products of bf16 pairs take rounded
 * weights, which are up to 2^24 here. Runs on all instruction sets; FATTN_CPU_ISA selects one.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/plan.h"
#include "tests/random.h"
#include "tests/row.h"
#include "tests/tap.h"
#include "tests/worst.h"

/* ROWS is more than one strip, and no strip is so short that the kernel sums scores across lanes,
 * which would change bits. */
enum { ROWS = 88, KEYS = 2048, DIM = 32, TILE = 128, TILES = KEYS / TILE };

typedef struct profile {
    const char *name;
    float (*score)(int64_t j);
    bool tried;  /* some attempt succeeds */
    bool finite; /* all results are finite */
} profile;

static float steady(int64_t j) { return (float)(j % 7); }
static float rising(int64_t j) { return (float)(25 * (j / TILE)); }
static float rising_slowly(int64_t j) { return (float)(j / TILE); }
static float falling(int64_t j) { return (float)(-130 * (j / TILE)); }
static float falling_in_tiles(int64_t j) { return (float)(-125 * (j % TILE == 5)); }
static float hidden(int64_t j) { return j / TILE % 2 && j % TILE == 3 ? -INFINITY : 0; }
static float up_once(int64_t j) { return j >= 9 * TILE + 77 ? 30 : 0; }
static float down_once(int64_t j) { return j == KEYS - 1 ? -0x1p20f : 0; }
static float large(int64_t j) { return 0x1p18f + (float)(j % 3); }
static float infinite(int64_t j) { return j == 3 * TILE + 9 ? INFINITY : 0; }
static float no_number(int64_t j) { return j == 3 * TILE + 9 ? NAN : 0; }

static const profile profiles[] = {
    {"steady", steady, true, true},
    {"rising by 25 a tile", rising, false, true},
    {"rising by 1 a tile", rising_slowly, true, true},
    {"falling by 130 a tile", falling, false, true},
    {"from 0 to -125 in each tile", falling_in_tiles, false, true},
    {"-inf in every other tile", hidden, false, true},
    {"30 from some key on", up_once, true, true},
    {"-2^20 once", down_once, true, true},
    {"2^18", large, false, true},
    {"inf once", infinite, true, false},
    {"NaN once", no_number, true, false},
};

typedef struct tensors {
    float q[ROWS * DIM], k[KEYS * DIM], v[KEYS * DIM]; /* rounded to the dtype */
    uint16_t narrow[ROWS * DIM + 2 * KEYS * DIM];      /* the same as bf16 */
    double o[ROWS * DIM], lse[ROWS];                   /* by the formula */
    float got[2][ROWS * DIM], got_lse[2][ROWS];        /* without and with batch invariance */
} tensors;

static float noise(void)
{
    static uint64_t state = 1;
    return (float)(random_next(&state) >> 40) * 0x1p-23f - 1;
}

static void narrow(float *x, uint16_t *to, int64_t n, bool rounds)
{
    for (int64_t i = 0; i < n; i++) {
        to[i] = fattn_bf16_from_f32(x[i]);
        x[i] = rounds ? fattn_bf16_to_f32(to[i]) : x[i];
    }
}

/* Channel 0 of all queries and values is 1; that of the keys follows the profile. */
static void draw(tensors *t, const profile *of, bool rounds)
{
    for (int64_t i = 0; i < ROWS * DIM; i++) {
        t->q[i] = i % DIM ? 0.25f * noise() : 1;
    }
    for (int64_t i = 0; i < KEYS * DIM; i++) {
        t->k[i] = i % DIM ? 0.25f * noise() : of->score(i / DIM);
        t->v[i] = i % DIM ? noise() : 1;
    }
    narrow(t->q, t->narrow, ROWS * DIM, rounds);
    narrow(t->k, t->narrow + ROWS * DIM, KEYS * DIM, rounds);
    narrow(t->v, t->narrow + (ROWS + KEYS) * DIM, KEYS * DIM, rounds);
}

static void formula(tensors *t)
{
    static double x[KEYS];
    for (int64_t i = 0; i < ROWS; i++) {
        double most = -INFINITY, sum = 0, o[DIM] = {0};
        for (int64_t j = 0; j < KEYS; j++) {
            x[j] = 0;
            for (int64_t c = 0; c < DIM; c++) {
                x[j] += log(2) * (double)t->q[i * DIM + c] * (double)t->k[j * DIM + c];
            }
            most = fmax(most, x[j]);
        }
        for (int64_t j = 0; j < KEYS; j++) {
            const double p = exp(x[j] - most);
            sum += p;
            for (int64_t c = 0; c < DIM; c++) {
                o[c] += p * (double)t->v[j * DIM + c];
            }
        }
        t->lse[i] = most + log(sum);
        for (int64_t c = 0; c < DIM; c++) {
            t->o[i * DIM + c] = o[c] / sum;
        }
    }
}

/* splits: of the keys; 0: those of one tile, of which there is one */
static bool attend(fattn_device *device, const fattn_kernel *row, bool rounds, tensors *t,
                   int which, int64_t rows, int64_t splits)
{
    fattn_problem problem;
    fattn_buffers buffers;
    fattn_plan *plan = NULL;
    fattn_problem_init(&problem);
    problem.dtype = rounds ? FATTN_BF16 : FATTN_F32;
    problem.dtype_o = FATTN_F32;
    problem.seqlen_q = rows;
    problem.seqlen_k = splits ? KEYS : TILE;
    problem.dim = problem.dim_v = DIM;
    problem.features = FATTN_SCALE | (which ? FATTN_BATCH_INVARIANT : 0);
    problem.scale = log(2);
    problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    fattn_buffers_init(&buffers);
    buffers.q = rounds ? (const void *)t->narrow : t->q;
    buffers.k = rounds ? (const void *)(t->narrow + ROWS * DIM) : t->k;
    buffers.v = rounds ? (const void *)(t->narrow + (ROWS + KEYS) * DIM) : t->v;
    buffers.o = t->got[which];
    buffers.lse = t->got_lse[which];
    fattn_wish wish = {.splits = splits ? splits : 1};
    for (const fattn_tile *tile = row->tiles; tile->br; tile++) {
        if (tile->bc == TILE) {
            wish.tile = *tile;
        }
    }
    const bool done =
        fattn_plan_create_with(device, &problem, row->name, &wish, &plan) == FATTN_OK &&
        fattn_execute(plan, &buffers, NULL, NULL) == FATTN_OK;
    fattn_plan_destroy(plan);
    return done;
}

/* The largest error of o, and of lse relative to its size; infinite if one is NaN. */
static double worst(const tensors *t, int which)
{
    double largest = 0;
    for (int64_t i = 0; i < ROWS * DIM + ROWS; i++) {
        const int64_t row = i - ROWS * DIM;
        const double got = row < 0 ? (double)t->got[which][i] : (double)t->got_lse[which][row];
        const double exact = row < 0 ? t->o[i] : t->lse[row];
        const double error = fabs(got - exact) / (row < 0 ? 1 : fmax(1, fabs(exact)));
        largest = worst_of(largest, error);
    }
    return largest;
}

static bool all_nan(const tensors *t, int which)
{
    for (int64_t i = 0; i < ROWS * DIM; i++) {
        if (!isnan(t->got[which][i])) {
            return false;
        }
    }
    return true;
}

/* How far o of values of 1 is from 1. */
static double worst_of_ones(const tensors *t, int which, int64_t rows)
{
    double largest = 0;
    for (int64_t i = 0; i < rows; i++) {
        const double error = fabs((double)t->got[which][i * DIM] - 1);
        largest = worst_of(largest, error);
    }
    return largest;
}

/* Rows of o in all forms: columns and rows, of one part of the keys or of several, and of a single
 * tile. */
static void check_ones(fattn_device *device, const fattn_kernel *row, bool rounds, tensors *t)
{
    static const int64_t rows[] = {ROWS, 30};
    draw(t, &profiles[2], rounds);
    for (int n = 0; n < 6; n++) {
        const int64_t splits = n / 2 * (n / 2 + 1) / 2; /* 0, 1, 3 */
        const bool done = attend(device, row, rounds, t, 0, rows[n % 2], splits);
        const double error = done ? worst_of_ones(t, 0, rows[n % 2]) : INFINITY;
        tap_check(error <= 1e-6, "%s, %d rows, %d splits: o of values of 1 errs by %.3g", row->name,
                  (int)rows[n % 2], (int)splits, error);
    }
}

static void check_row(fattn_device *device, const fattn_kernel *row, tensors *t)
{
    const bool rounds = strstr(row->name, "pairs") != NULL, plain = strstr(row->name, "scalar");
    for (size_t n = 0; n < sizeof profiles / sizeof *profiles; n++) {
        const profile *const of = &profiles[n];
        draw(t, of, rounds);
        formula(t);
        if (!attend(device, row, rounds, t, 0, ROWS, 1) ||
            !attend(device, row, rounds, t, 1, ROWS, 1)) {
            tap_check(false, "%s, scores %s: %s", row->name, of->name, fattn_last_reason());
            continue;
        }
        const bool same = memcmp(t->got[0], t->got[1], sizeof t->got[0]) == 0 &&
                          memcmp(t->got_lse[0], t->got_lse[1], sizeof t->got_lse[0]) == 0;
        if (!of->finite) {
            tap_check(all_nan(t, 0) && all_nan(t, 1), "%s, scores %s: NaN", row->name, of->name);
            continue;
        }
        const double error = worst(t, 0), other = worst(t, 1), least = rounds ? 4e-3 : 1e-6;
        tap_check((error <= least || error <= 2 * other) && same == (plain || !of->tried),
                  "%s, scores %s: %s bits, error %.3g", row->name, of->name,
                  same ? "the same" : "other", error);
    }
    check_ones(device, row, rounds, t);
}

int main(void)
{
    fattn_device *device = NULL;
    tensors *const t = malloc(sizeof *t);
    if (!t || fattn_device_open("cpu", &device)) {
        return 1;
    }
    const fattn_kernel *row;
    for (int at = 0; (row = row_next(device, &at));) {
        if (strstr(row->name, "_forward")) {
            check_row(device, row, t);
        }
    }
    fattn_device_close(device);
    free(t);
    return tap_done();
}
