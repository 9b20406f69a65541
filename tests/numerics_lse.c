/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the bound on lse is used as keys and channels grow: backend cpu in f32 compared with
 * backend reference in f64 on the same numbers. docs/NUMERICS.md has the figures and the bound's
 * derivation.
 */
#include <math.h>
#include <stdlib.h>

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

static bool attend(const char *spec, fattn_dtype dtype, int64_t keys, int64_t dim, const void *q,
                   const void *k, void *o, void *lse)
{
    fattn_device *device = NULL;
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
    const bool done = fattn_device_open(spec, &device) == FATTN_OK &&
                      fattn_attention(device, &problem, &buffers, NULL) == FATTN_OK;
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
    const numbers q = numbers_draw(ROWS * dim, size, &random);
    const numbers k = numbers_draw(keys * dim, 1, &random);
    if (q.narrow && q.wide && k.narrow && k.wide &&
        attend("cpu", FATTN_F32, keys, dim, q.narrow, k.narrow, o, lse) &&
        attend("reference", FATTN_F64, keys, dim, q.wide, k.wide, o_exact, lse_exact)) {
        worst = 0;
        for (int i = 0; i < ROWS; i++) {
            const double error = fabs((double)lse[i] - lse_exact[i]);
            worst =
                worst_of(worst, error / 0x1p-24 / scale_of(q.wide + i * dim, k.wide, keys, dim));
        }
    }
    numbers_free(q);
    numbers_free(k);
    return worst;
}

/* Tiles of equal sums round l alike, and errors add up: the largest over several weights, in 2^-24
 * max(1, ...), beyond half an ulp of lse. */
static double measure_equal(int64_t keys)
{
    static const float first[] = {0.05f, 0.1f, 0.3f, 0.7f}; /* the other scores are 0 */
    double worst = 0;
    for (size_t n = 0; n < sizeof first / sizeof first[0]; n++) {
        float q[ROWS], o[ROWS], lse[ROWS];
        float *const k = calloc((size_t)keys, sizeof *k);
        if (k) {
            k[0] = first[n];
        }
        for (int i = 0; i < ROWS; i++) {
            q[i] = 1;
        }
        const bool done = k && attend("cpu", FATTN_F32, keys, 1, q, k, o, lse);
        const double exact = log(exp((double)first[n]) + (double)(keys - 1));
        const double half = (double)(nextafterf((float)exact, INFINITY) - (float)exact) / 2;
        for (int i = 0; i < ROWS; i++) {
            worst = done ? worst_of(worst, (fabs((double)lse[i] - exact) - half) / 0x1p-24) : NAN;
        }
        free(k);
    }
    return worst;
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
    enum {
        LONG = 1 << 17,
        TILE = 64 /* keys of the smallest that the planner takes for so many */
    };
    const double equal = measure_equal(LONG), bound = 8.5 + (double)LONG / TILE;
    tap_check(equal <= bound, "%d keys of equal weight: lse errs by %.1f units beyond half an ulp",
              LONG, equal);
    const double backward = measure_backward();
    tap_check(backward <= 1e-5, "backward uses all bits of lse: P errs by %.2g", backward);
    fattn_cache_clear();
    return tap_done();
}
