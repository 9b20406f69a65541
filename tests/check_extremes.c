/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the formula says where numbers are extreme, on each kernel row of the CPU in f32: rows
 * without keys beside rows with infinite values, rows whose lse is -inf, and weights below the
 * normal range. Random problems combine these too seldom. FATTN_CPU_ISA selects an instruction set.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/plan.h"
#include "tests/row.h"
#include "tests/tap.h"
#include "tests/worst.h"

enum { ROWS = 40, KEYS = 300, MOST = 2 * KEYS, DIM = 20 };

typedef struct tensors {
    float q[MOST * DIM], k[MOST * DIM], v[MOST * DIM], o[MOST * DIM], dout[MOST * DIM];
    float dq[MOST * DIM], dk[MOST * DIM], dv[MOST * DIM], lse[MOST], bias[ROWS * ROWS];
} tensors;

static _Alignas(16) tensors t;

static void fill_tensors(void)
{
    for (int n = 0; n < MOST * DIM; n++) {
        t.q[n] = sinf(1.1f * (float)n);
        t.k[n] = sinf(1.3f * (float)n + 1);
        t.v[n] = sinf(1.7f * (float)n + 2);
        t.dout[n] = sinf(1.9f * (float)n + 3);
        t.o[n] = t.dq[n] = t.dk[n] = t.dv[n] = NAN;
    }
}

static fattn_problem problem_of(fattn_op op, int64_t group, int64_t rows, int64_t keys)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.heads_q = group;
    p.seqlen_q = rows;
    p.seqlen_k = keys;
    p.dim = p.dim_v = DIM;
    p.layout = FATTN_BHSD;
    p.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    return p;
}

static bool runs(fattn_device *device, const char *row, const fattn_problem *p)
{
    fattn_plan *plan = NULL;
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = t.q, b.k = t.k, b.v = t.v, b.o = t.o, b.lse = t.lse;
    b.bias = p->features & FATTN_BIAS ? t.bias : NULL;
    if (p->op == FATTN_BACKWARD) {
        b.dout = t.dout, b.dq = t.dq, b.dk = t.dk, b.dv = t.dv;
    }
    const bool ran = fattn_plan_create_with(device, p, row, NULL, &plan) == FATTN_OK &&
                     fattn_execute(plan, &b, NULL, NULL) == FATTN_OK;
    fattn_plan_destroy(plan);
    return ran;
}

static bool zeros(const float *x, int64_t rows)
{
    bool all = true;
    for (int64_t n = 0; n < rows * DIM; n++) {
        all = all && x[n] == 0;
    }
    return all;
}

/* The first rows of a causal problem with more rows than keys see none, and their products with an
 * infinite value are not to be seen. */
static void check_empty_rows(fattn_device *device, const fattn_kernel *row)
{
    static const int64_t rows[] = {3, ROWS};
    bool good = true;
    int ran = 0;
    for (int n = 0; n < 4; n++) {
        const int64_t group = 1 + n / 2, sq = rows[n % 2];
        fattn_problem p = problem_of(FATTN_FORWARD, group, sq, sq - 2);
        p.features = FATTN_CAUSAL;
        fill_tensors();
        for (int c = 0; c < DIM; c++) {
            t.v[c] = INFINITY;
        }
        if ((row->rows_max && group * sq > row->rows_max) || !runs(device, row->name, &p)) {
            continue;
        }
        ran++;
        for (int64_t h = 0; h < group; h++) {
            good = good && zeros(t.o + h * sq * DIM, 2) && t.lse[h * sq] == -INFINITY &&
                   isinf(t.o[(h * sq + 2) * DIM]);
        }
    }
    tap_check(good && ran > 0, "%s: rows without keys are 0 beside infinite values", row->name);
}

/* Weights of 2^-130, below the normal range, of values that are large. */
static void check_small_weights(fattn_device *device, const fattn_kernel *row)
{
    static const int64_t sizes[][2] = {{1, 70}, {1, KEYS}, {ROWS, 70}, {ROWS, KEYS}};
    double worst = 0;
    int ran = 0;
    for (int n = 0; n < 4; n++) {
        const int64_t sq = sizes[n][0], keys = sizes[n][1];
        fattn_problem p = problem_of(FATTN_FORWARD, 1, sq, keys);
        p.features = FATTN_SCALE;
        p.scale = 1;
        memset(&t, 0, sizeof t);
        for (int64_t i = 0; i < sq; i++) {
            t.q[i * DIM] = 1;
        }
        for (int64_t j = 1; j < keys; j++) {
            t.k[j * DIM] = -90.10913347f; /* -130 ln 2 */
            t.v[j * DIM] = 0x1p120f;
        }
        if ((row->rows_max && sq > row->rows_max) || !runs(device, row->name, &p)) {
            continue;
        }
        ran++;
        const double exact = (double)(keys - 1) * exp((double)t.k[DIM]) * 0x1p120;
        for (int64_t i = 0; i < sq; i++) {
            const double error = fabs(t.o[i * DIM] / exact - 1);
            worst = worst_of(worst, error);
        }
    }
    tap_check(ran > 0 && worst <= 1e-4, "%s: weights of 2^-130 count: error %.2g", row->name,
              worst);
}

/* A row whose lse is -inf has no probabilities, however large its scores would be. */
static void check_dead_row(fattn_device *device, const fattn_kernel *row)
{
    const int64_t last = ROWS - 1;
    fattn_problem p = problem_of(FATTN_FORWARD, 1, ROWS, ROWS);
    fill_tensors();
    memset(t.bias, 0, sizeof t.bias);
    p.features = FATTN_BIAS;
    p.bias_stride[2] = ROWS;
    p.bias_stride[3] = 1;
    bool good = runs(device, NULL, &p), finite = true;
    for (int j = 0; j < ROWS; j++) {
        t.bias[last * ROWS + j] = 200;
    }
    t.lse[last] = -INFINITY;
    p.op = FATTN_BACKWARD;
    p.outputs = 0;
    good = good && runs(device, row->name, &p);
    for (int64_t n = 0; n < ROWS * DIM; n++) {
        finite = finite && isfinite(t.dq[n]) && isfinite(t.dk[n]) && isfinite(t.dv[n]);
    }
    tap_check(good && finite && zeros(t.dq + last * DIM, 1),
              "%s: a row whose lse is -inf gives nothing, however large its bias is", row->name);
}

int main(void)
{
    fattn_device *device = NULL;
    const fattn_kernel *row;
    if (fattn_device_open("cpu", &device)) {
        tap_bail(fattn_last_reason());
    }
    for (int at = 0; (row = row_next(device, &at));) {
        if (row->caches_alone) { /* of the sizes that 8 bits hold, hazard_J5 has all */
            continue;
        }
        if (!(row->dtypes & FATTN_DTYPE_BIT(FATTN_F32))) {
            continue;
        }
        if (row->ops & FATTN_OP_BIT(FATTN_FORWARD)) {
            check_empty_rows(device, row);
            check_small_weights(device, row);
        } else {
            check_dead_row(device, row);
        }
    }
    fattn_device_close(device);
    return tap_done();
}
