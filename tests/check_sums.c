/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sums of equal terms, which round alike, on each backward kernel of the CPU: dBias over keys and
 * over rows, dSink over rows, sequences and what was there before. docs/NUMERICS.md promises that
 * they are summed in double within a block; in float a hundred thirds are off by several units in
 * the last place.
 *
 * Queries are 0 and lse is 0, so that each probability is exactly 1; dO is 0 and dLSE is a third,
 * so that each entry of dS is.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/plan.h"
#include "tests/tap.h"
#include "tests/worst.h"

enum { MOST = 200, DIM = 8, BATCH = 3, HEADS = 2 };
static const float third = 1.0f / 3;

/* The sums of a case. */
typedef enum sum { OVER_KEYS, OVER_ROWS, SINKS, SINKS_ON_TOP } sum;
static const char *const sum_names[] = {"dBias over keys", "dBias over rows", "dSink",
                                        "dSink on top of what was there"};

typedef struct tensors {
    float q[BATCH * MOST * HEADS * DIM], k[BATCH * MOST * HEADS * DIM];
    float v[BATCH * MOST * HEADS * DIM], o[BATCH * MOST * HEADS * DIM];
    float dout[BATCH * MOST * HEADS * DIM], dq[BATCH * MOST * HEADS * DIM];
    float lse[BATCH * HEADS * MOST], dlse[BATCH * HEADS * MOST];
    float bias[MOST], sink[HEADS], dbias[BATCH * HEADS * MOST], dsink[HEADS];
} tensors;

static void describe(fattn_problem *p, sum what, int64_t rows, int64_t keys)
{
    fattn_problem_init(p);
    p->op = FATTN_BACKWARD;
    p->batch = BATCH;
    p->heads_q = p->heads_k = HEADS;
    p->seqlen_q = rows;
    p->seqlen_k = keys;
    p->dim = p->dim_v = DIM;
    p->features = FATTN_DLSE | (what <= OVER_ROWS ? FATTN_BIAS : FATTN_SINK) |
                  (what == SINKS_ON_TOP ? FATTN_ACCUMULATE : 0);
    p->outputs = FATTN_OUT_DQ | (what <= OVER_ROWS ? FATTN_OUT_DBIAS : FATTN_OUT_DSINK);
    if (what == OVER_KEYS || what == OVER_ROWS) {
        const int64_t length = what == OVER_KEYS ? rows : keys;
        p->dbias_stride[0] = HEADS * length;
        p->dbias_stride[1] = length;
        p->dbias_stride[what == OVER_KEYS ? 2 : 3] = 1;
    }
}

static fattn_buffers point(tensors *t, sum what)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    memset(t, 0, sizeof *t);
    for (int n = 0; n < BATCH * HEADS * MOST; n++) {
        t->dlse[n] = third;
    }
    t->dsink[0] = t->dsink[1] = 1000;
    b.q = t->q, b.k = t->k, b.v = t->v, b.o = t->o, b.dout = t->dout, b.dq = t->dq;
    b.lse = t->lse, b.dlse = t->dlse;
    if (what <= OVER_ROWS) {
        b.bias = t->bias, b.dbias = t->dbias;
    } else {
        b.sink = t->sink, b.dsink = t->dsink;
    }
    return b;
}

/* The largest error in units in the last place; infinity if the problem does not run. */
static double distance(fattn_device *device, const char *kernel, tensors *t, sum what, int64_t n,
                       int64_t *blocks)
{
    const int64_t rows = what == OVER_KEYS ? 3 : n, keys = what == OVER_KEYS ? n : 5;
    fattn_problem p;
    fattn_plan *plan = NULL;
    describe(&p, what, rows, keys);
    const fattn_buffers b = point(t, what);
    double worst = 0;
    if (fattn_plan_create_with(device, &p, kernel, NULL, &plan) != FATTN_OK ||
        fattn_execute(plan, &b, NULL, NULL) != FATTN_OK) {
        printf("# %s\n", fattn_last_reason());
        fattn_plan_destroy(plan);
        return INFINITY;
    }
    const int64_t block = what == OVER_KEYS ? plan->tiling.bc : plan->tiling.br;
    *blocks = (n + block - 1) / block;
    fattn_plan_destroy(plan);
    const int64_t sums = what == OVER_KEYS   ? BATCH * HEADS * rows
                         : what == OVER_ROWS ? BATCH * HEADS * keys
                                             : HEADS;
    const double terms = (double)(what >= SINKS ? BATCH * n : n);
    const double exact = terms * (double)third + (what == SINKS_ON_TOP ? 1000 : 0);
    const float *const got = what <= OVER_ROWS ? t->dbias : t->dsink;
    const double ulp = (double)(nextafterf((float)exact, INFINITY) - (float)exact);
    for (int64_t i = 0; i < sums; i++) {
        const double off = fabs((double)got[i] - exact) / ulp;
        worst = worst_of(worst, off);
    }
    return worst;
}

static void check_row(fattn_device *device, const char *kernel, tensors *t)
{
    static const int64_t counts[] = {47, 48, 95, 96, 100, 128, 200};
    for (sum what = OVER_KEYS; what <= SINKS_ON_TOP; what++) {
        double most = 0;
        bool fine = true;
        for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
            int64_t blocks = 0;
            const double off = distance(device, kernel, t, what, counts[n], &blocks);
            /* Each block's sum is rounded, and so is its addition if it is made in float. */
            fine = fine && off <= 0.5 * (double)(blocks + 1);
            most = worst_of(most, off);
        }
        tap_check(fine, "%s: %s is off by %.2f units", kernel, sum_names[what], most);
    }
}

int main(void)
{
    fattn_device *device = NULL;
    tensors *const t = malloc(sizeof *t);
    if (!t || fattn_device_open("cpu", &device) != FATTN_OK) {
        tap_check(false, "the CPU: %s", fattn_last_reason());
        free(t);
        return tap_done();
    }
    const fattn_kernel *row;
    const char *missing = NULL;
    for (int i = 0; (row = device->backend->kernel(device->impl, i, &missing)); i++) {
        if (!(row->ops & FATTN_OP_BIT(FATTN_BACKWARD)) ||
            !(row->dtypes & FATTN_DTYPE_BIT(FATTN_F32))) {
            continue;
        }
        if (missing) {
            tap_skip(row->name, missing);
        } else {
            check_row(device, row->name, t);
        }
    }
    fattn_device_close(device);
    free(t);
    return tap_done();
}
