/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 16-bit results below the normal range: each kernel of the CPU rounds them correctly, although the
 * instructions that round to bf16 read such numbers as 0. Runs on all instruction sets;
 * FATTN_CPU_ISA selects one.
 *
 * Queries are 0, so all n keys have the same weight. In even channels all values except the first
 * are 0, so o is exactly 1/n of the first value there; in odd channels all values are equal, and o
 * equals them. If a sink has nearly all the weight, o is as small without such values, and right
 * within an ulp.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/plan.h"
#include "tests/row.h"
#include "tests/tap.h"

enum { MOST_ROWS = 60, MOST_KEYS = 512, MOST_DIM = 128 };

typedef struct tensors {
    uint16_t q[MOST_ROWS * MOST_DIM], k[MOST_KEYS * MOST_DIM], v[MOST_KEYS * MOST_DIM];
    uint16_t o[MOST_ROWS * MOST_DIM];
} tensors;

/* Values of even channels and of odd ones; over MOST_KEYS, the least of the type is left. sink: 0
 * for none */
static const struct {
    const char *name;
    fattn_dtype dtype;
    float first, others, sink;
} types[] = {
    {"bf16", FATTN_BF16, 0x1p-124f, 1, 0},
    {"bf16, all small", FATTN_BF16, 0x1p-124f, 0x1p-90f, 0},
    {"bf16, sink", FATTN_BF16, 0x1p-44f, 0x1p-44f, 60},
    {"f16", FATTN_F16, 0x1p-15f, 1, 0},
};

typedef struct shape {
    int64_t rows, keys, dim;
} shape;

static bool run(fattn_device *device, const fattn_kernel *row, tensors *t, int type, shape s)
{
    const fattn_dtype dtype = types[type].dtype;
    fattn_problem problem;
    fattn_buffers buffers;
    fattn_plan *plan = NULL;
    memset(t, 0, sizeof *t);
    for (int64_t j = 0; j < s.keys; j++) {
        for (int64_t c = 0; c < s.dim; c++) {
            const float even = j == 0 ? types[type].first : 0;
            fattn_dtype_store(dtype, t->v, j * s.dim + c,
                              (double)(c % 2 ? types[type].others : even));
        }
    }
    memset(t->o, 0xff, sizeof t->o);
    fattn_problem_init(&problem);
    problem.dtype = dtype;
    problem.seqlen_q = s.rows;
    problem.seqlen_k = s.keys;
    problem.dim = problem.dim_v = s.dim;
    problem.outputs = FATTN_OUT_O;
    problem.features = types[type].sink != 0 ? FATTN_SINK : 0;
    fattn_buffers_init(&buffers);
    buffers.q = t->q, buffers.k = t->k, buffers.v = t->v, buffers.o = t->o;
    buffers.sink = types[type].sink != 0 ? &types[type].sink : NULL;
    const bool done =
        fattn_plan_create_with(device, &problem, row->name, NULL, &plan) == FATTN_OK &&
        fattn_execute(plan, &buffers, NULL, NULL) == FATTN_OK;
    fattn_plan_destroy(plan);
    return done;
}

static int64_t wrong(const tensors *t, int type, shape s)
{
    const double keys = (double)s.keys, sink = (double)types[type].sink;
    const double total = keys + (sink != 0 ? exp(sink) : 0);
    const double even = (double)types[type].first / total;
    const double odd = (double)types[type].others * (keys / total);
    int64_t count = 0;
    for (int64_t n = 0; n < s.rows * s.dim; n++) {
        const double expected = n % s.dim % 2 ? odd : even;
        const double ulp = sink != 0 ? fmax(expected * 0x1p-7, 0x1p-133) : 0;
        count += !(fabs(fattn_dtype_load(types[type].dtype, t->o, n) - expected) <= ulp);
    }
    return count;
}

static void check_row(fattn_device *device, const fattn_kernel *row, tensors *t, int type)
{
    static const int64_t dims[] = {16, 40, 64, 128}, rows[] = {1, 7, 12, 16, 48, 60};
    enum { DIMS = sizeof dims / sizeof *dims, SHAPES = DIMS * (sizeof rows / sizeof *rows) };
    for (int64_t keys = 1; keys <= MOST_KEYS; keys *= 2) {
        int64_t count = 0;
        int runs = 0;
        for (int n = 0; n < SHAPES; n++) {
            const shape s = {rows[n / DIMS], keys, dims[n % DIMS]};
            if (row->rows_max && s.rows > row->rows_max) {
                continue;
            }
            if (!run(device, row, t, type, s)) {
                tap_check(false, "%s, %s: %s", row->name, types[type].name, fattn_last_reason());
                continue;
            }
            runs++;
            count += wrong(t, type, s);
        }
        tap_check(runs > 0 && count == 0, "%s, %s, %d keys: %d numbers are wrong in %d runs",
                  row->name, types[type].name, (int)keys, (int)count, runs);
    }
}

int main(void)
{
    tensors *const t = malloc(sizeof *t);
    fattn_device *device = NULL;
    if (!t || fattn_device_open("cpu", &device)) {
        return 1;
    }
    const fattn_kernel *row;
    for (int at = 0; (row = row_next(device, &at));) {
        if (row->caches_alone) { /* it stores o as the row of its base does */
            continue;
        }
        for (int type = 0; type < (int)(sizeof types / sizeof *types); type++) {
            if (row->ops & FATTN_OP_BIT(FATTN_FORWARD) &&
                row->dtypes & FATTN_DTYPE_BIT(types[type].dtype)) {
                check_row(device, row, t, type);
            }
        }
    }
    fattn_device_close(device);
    free(t);
    return tap_done();
}
