/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the bound on lse is used as keys and channels grow: backend cpu in f32 compared with
 * backend reference in f64 on the same numbers. docs/NUMERICS.md has the figures and the bound's
 * derivation.
 */
#include <math.h>
#include <stdlib.h>

#include "core/dtype.h"
#include "fattn/fattn.h"
#include "tests/random.h"
#include "tests/tap.h"
#include "tests/worst.h"

enum { ROWS = 32 };

/* Sums of uniforms: about normal, of variance 1. */
static double normal(uint64_t *random)
{
    double sum = -6;
    for (int n = 0; n < 12; n++) {
        sum += (double)(random_next(random) >> 40) * 0x1p-24;
    }
    return sum;
}

/* The same rows in both formats: [count]. */
typedef struct numbers {
    float *narrow;
    double *wide;
} numbers;

static numbers numbers_draw(int64_t count, double size, uint64_t *random)
{
    numbers x = {malloc((size_t)count * sizeof(float)), malloc((size_t)count * sizeof(double))};
    for (int64_t n = 0; x.narrow && x.wide && n < count; n++) {
        x.narrow[n] = (float)(size * normal(random));
        x.wide[n] = (double)x.narrow[n];
    }
    return x;
}

static void numbers_free(numbers x)
{
    free(x.narrow);
    free(x.wide);
}

/* A CPU with this instruction set (NULL: the best) and number of threads (0: all that there are).
 * NULL if it has no such instructions. */
static fattn_device *open_cpu(const char *isa, int64_t threads)
{
    fattn_device *device = NULL;
    fattn_device_options options;
    fattn_device_options_init(&options);
    options.isa = isa;
    options.threads = threads;
    (void)fattn_device_open_with("cpu", &options, &device);
    return device;
}

static bool attend(fattn_device *device, fattn_dtype dtype, int64_t keys, int64_t dim,
                   const void *q, const void *k, void *o, void *lse)
{
    fattn_problem problem;
    fattn_buffers buffers;
    fattn_problem_init(&problem);
    problem.dtype = dtype;
    problem.seqlen_q = ROWS;
    problem.seqlen_k = keys;
    problem.dim = dim;
    problem.dim_v = 1;
    problem.features = FATTN_SCALE;
    problem.scale = 1 / sqrt((double)dim);
    problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    fattn_buffers_init(&buffers);
    buffers.q = q;
    buffers.k = buffers.v = k; /* any values for v: keys x 1 */
    buffers.o = o;
    buffers.lse = lse;
    return device && fattn_attention(device, &problem, &buffers, NULL) == FATTN_OK;
}

static bool attend_exactly(int64_t keys, int64_t dim, const double *q, const double *k, double *o,
                           double *lse)
{
    fattn_device *device = NULL;
    const bool done = fattn_device_open("reference", &device) == FATTN_OK &&
                      attend(device, FATTN_F64, keys, dim, q, k, o, lse);
    fattn_device_close(device);
    return done;
}

/* max(1, max_j |scale| sum_c |q_c k_c|) of a row. */
static double scale_of(const double *q, const double *k, int64_t keys, int64_t dim)
{
    double largest = 1;
    for (int64_t j = 0; j < keys; j++) {
        double sum = 0;
        for (int64_t c = 0; c < dim; c++) {
            sum += fabs(q[c] * k[j * dim + c]);
        }
        largest = fmax(largest, sum / sqrt((double)dim));
    }
    return largest;
}

/* The largest error of a row's lse, in 2^-24 max(1, ...); negative if a run failed. */
static double measure(int64_t keys, int64_t dim, double size)
{
    uint64_t random = (uint64_t)(keys * 1000 + dim);
    float o[ROWS], lse[ROWS];
    double o_exact[ROWS], lse_exact[ROWS], worst = -1;
    fattn_device *const cpu = open_cpu(NULL, 0);
    const numbers q = numbers_draw(ROWS * dim, size, &random);
    const numbers k = numbers_draw(keys * dim, 1, &random);
    if (q.narrow && q.wide && k.narrow && k.wide &&
        attend(cpu, FATTN_F32, keys, dim, q.narrow, k.narrow, o, lse) &&
        attend_exactly(keys, dim, q.wide, k.wide, o_exact, lse_exact)) {
        worst = 0;
        for (int i = 0; i < ROWS; i++) {
            const double error = fabs((double)lse[i] - lse_exact[i]);
            worst =
                worst_of(worst, error / 0x1p-24 / scale_of(q.wide + i * dim, k.wide, keys, dim));
        }
    }
    numbers_free(q);
    numbers_free(k);
    fattn_device_close(cpu);
    return worst;
}

/* By how much lse is off beyond half an ulp of it, in 2^-24. */
static double beyond_half_ulp(float lse, double exact)
{
    const double half = (double)(nextafterf((float)exact, INFINITY) - (float)exact) / 2;
    return (fabs((double)lse - exact) - half) / 0x1p-24;
}

/* The largest error when the first score is not 0 and all others are, for several first scores. */
static double measure_equal(fattn_device *cpu, fattn_dtype dtype, int64_t keys)
{
    static const double first[] = {0.05, 0.1, 0.3, 0.7};
    double worst = -INFINITY;
    for (size_t n = 0; n < sizeof first / sizeof first[0]; n++) {
        float q[ROWS], o[ROWS], lse[ROWS];
        float *const k = calloc((size_t)keys, sizeof *k);
        double score = 0;
        for (int i = 0; i < ROWS; i++) {
            fattn_dtype_store(dtype, q, i, 1);
        }
        if (k) {
            fattn_dtype_store(dtype, k, 0, first[n]);
            score = fattn_dtype_load(dtype, k, 0);
        }
        const bool done = k && attend(cpu, dtype, keys, 1, q, k, o, lse);
        const double exact = log(exp(score) + (double)(keys - 1));
        for (int i = 0; i < ROWS; i++) {
            worst = worst_of(worst, done ? beyond_half_ulp(lse[i], exact) : NAN);
        }
        free(k);
    }
    return worst;
}

/* Scores of deviation `size`. */
typedef struct long_rows {
    double size;
    numbers q, k;
    double lse[ROWS]; /* exact; NaN if there is no memory */
    double unit[ROWS];
} long_rows;

static void long_rows_draw(long_rows *rows, int64_t keys, double size)
{
    uint64_t random = (uint64_t)keys;
    double o[ROWS];
    rows->size = size;
    rows->q = numbers_draw(ROWS, size, &random);
    rows->k = numbers_draw(keys, 1, &random);
    const double *const q = rows->q.wide, *const k = rows->k.wide;
    const bool done =
        q && rows->q.narrow && k && rows->k.narrow && attend_exactly(keys, 1, q, k, o, rows->lse);
    for (int i = 0; i < ROWS; i++) {
        rows->lse[i] = done ? rows->lse[i] : NAN;
        rows->unit[i] = done ? scale_of(q + i, k, keys, 1) : 1;
    }
}

/* The largest error of these rows. */
static double measure_long(fattn_device *cpu, const long_rows *rows, int64_t keys)
{
    float o[ROWS], lse[ROWS];
    double worst = -INFINITY;
    const bool done = attend(cpu, FATTN_F32, keys, 1, rows->q.narrow, rows->k.narrow, o, lse);
    for (int i = 0; i < ROWS; i++) {
        const double error = beyond_half_ulp(lse[i], rows->lse[i]);
        worst = worst_of(worst, done ? error / rows->unit[i] : NAN);
    }
    return worst;
}

/* Tiles of nearly equal sums all round l to the same side, so what is lost has to be given back.
 * Eight threads divide the keys into parts. */
static void check_long_rows(void)
{
    enum { LONG = 1 << 17, LONGEST = 1 << 20 };
    static const char *const isas[] = {"scalar", "avx2", "avx512",  "avx512bf16",
                                       "amx",    "neon", "neonbf16"};
    const double bound = 8.5;
    long_rows rows[2];
    long_rows_draw(&rows[0], LONGEST, 0.01);
    long_rows_draw(&rows[1], LONGEST, 1);
    for (size_t n = 0; n < 2 * sizeof isas / sizeof isas[0]; n++) {
        const char *const isa = isas[n / 2];
        const int threads = n % 2 == 0 ? 1 : 8;
        fattn_device *const cpu = open_cpu(isa, threads);
        if (!cpu) {
            continue;
        }
        const double f32 = measure_equal(cpu, FATTN_F32, LONG);
        const double bf16 = measure_equal(cpu, FATTN_BF16, LONG);
        tap_check(f32 <= bound && bf16 <= bound,
                  "%s, threads %d, %d keys of equal weight: lse errs by %.1f units beyond half an "
                  "ulp, in bf16 by %.1f",
                  isa, threads, LONG, f32, bf16);
        for (int t = 0; t < 2; t++) {
            const double worst = measure_long(cpu, &rows[t], LONGEST);
            tap_check(worst <= bound, "%s, threads %d, %d keys, size %g: %.1f units", isa, threads,
                      LONGEST, rows[t].size, worst);
        }
        fattn_device_close(cpu);
    }
    for (int t = 0; t < 2; t++) {
        numbers_free(rows[t].q);
        numbers_free(rows[t].k);
    }
}

/* Backward takes lse as it is given, in more bits than a float of it in units of the scores has:
 * that one would be off by 2^-24 of lse, and all probabilities of the row by as much. Returns the
 * largest relative error of dV, where dO is 1 and dV therefore P. */
static double measure_backward(void)
{
    enum { KEYS = 8, DIM = 8 };
    static float q[DIM] = {1}, k[KEYS * DIM], v[KEYS * DIM], o[DIM], dout[DIM] = {1};
    float dv[KEYS * DIM], lse = 60011.3f;
    double worst = 0;
    fattn_problem problem;
    fattn_buffers b;
    fattn_problem_init(&problem);
    problem.op = FATTN_BACKWARD;
    problem.seqlen_q = 1;
    problem.seqlen_k = KEYS;
    problem.dim = problem.dim_v = DIM;
    problem.features = FATTN_SCALE;
    problem.scale = 0.75;
    problem.outputs = FATTN_OUT_DV;
    fattn_buffers_init(&b);
    b.q = q, b.k = k, b.v = v, b.o = o, b.dout = dout, b.lse = &lse, b.dv = dv;
    for (int j = 0; j < KEYS; j++) {
        k[j * DIM] = (float)(80000 + j);
    }
    if (fattn_attention(NULL, &problem, &b, NULL)) {
        return INFINITY;
    }
    for (int j = 0; j < KEYS; j++) {
        const double p = exp(0.75 * (double)k[j * DIM] - (double)lse);
        worst = worst_of(worst, fabs(dv[j * DIM] - p) / p);
    }
    return worst;
}

int main(void)
{
    static const double sizes[] = {0.01, 1, 30};
    static const int64_t dims[] = {1, 16, 128}, keys[] = {16, 2048, 16384};
    for (int n = 0; n < 27; n++) {
        const double size = sizes[n / 9], bound = 8 + (double)dims[n / 3 % 3] / 2;
        const int64_t dim = dims[n / 3 % 3], count = keys[n % 3];
        if (count > 2980 * dim) { /* e^8: half an ulp of lse is most of the bound */
            continue;
        }
        const double worst = measure(count, dim, size);
        tap_check(worst >= 0 && worst <= bound,
                  "size %g, D %lld, Sk %lld: lse errs by %.2f of the %.1f units allowed", size,
                  (long long)dim, (long long)count, worst, bound);
    }
    check_long_rows();
    const double backward = measure_backward();
    tap_check(backward <= 1e-5, "backward uses all bits of lse: P errs by %.2g", backward);
    fattn_cache_clear();
    return tap_done();
}
