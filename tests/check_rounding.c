/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results of 16 bits below the normal range: rounded like others, whatever makes them, though the
 * instructions that round to bf16 take such numbers for 0.
 *
 * Queries are 0, so that all n keys weigh the same, and but for the first one their values are 0 in
 * each even channel: o is there 1/n of that value, exactly, and 1 in the others.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "fattn/fattn.h"
#include "tests/tap.h"

enum { MOST_ROWS = 60, MOST_KEYS = 512, MOST_DIM = 128 };

typedef struct tensors {
    uint16_t q[MOST_ROWS * MOST_DIM], k[MOST_KEYS * MOST_DIM], v[MOST_KEYS * MOST_DIM];
    uint16_t o[MOST_ROWS * MOST_DIM];
} tensors;

typedef struct shape {
    int64_t rows, keys, dim;
} shape;

static fattn_status run(fattn_device *device, tensors *t, fattn_dtype dtype, shape s, float value)
{
    fattn_problem problem;
    fattn_buffers buffers;
    memset(t, 0, sizeof *t);
    for (int64_t j = 0; j < s.keys; j++) {
        for (int64_t c = 0; c < s.dim; c++) {
            const float x = c % 2 ? 1 : j == 0 ? value : 0;
            fattn_dtype_store(dtype, t->v, j * s.dim + c, x);
        }
    }
    memset(t->o, 0xff, sizeof t->o);
    fattn_problem_init(&problem);
    problem.dtype = dtype;
    problem.seqlen_q = s.rows;
    problem.seqlen_k = s.keys;
    problem.dim = problem.dim_v = s.dim;
    fattn_buffers_init(&buffers);
    buffers.q = t->q, buffers.k = t->k, buffers.v = t->v, buffers.o = t->o;
    problem.outputs = FATTN_OUT_O;
    return fattn_attention(device, &problem, &buffers, NULL);
}

static int64_t wrong(const tensors *t, fattn_dtype dtype, shape s, float value)
{
    int64_t count = 0;
    for (int64_t n = 0; n < s.rows * s.dim; n++) {
        const double expected = n % s.dim % 2 ? 1 : (double)value / (double)s.keys;
        count += fattn_dtype_load(dtype, t->o, n) != expected;
    }
    return count;
}

int main(void)
{
    static const int64_t dims[] = {16, 40, 64, 128}, rows[] = {1, 7, 12, 16, 48, 60};
    tensors *const t = malloc(sizeof *t);
    fattn_device *device = NULL;
    if (!t || fattn_device_open("cpu", &device)) {
        return 1;
    }
    for (int half = 0; half < 2; half++) {
        const fattn_dtype dtype = half ? FATTN_F16 : FATTN_BF16;
        const float value = half ? 0x1p-15f : 0x1p-124f; /* over 512: the least of either type */
        for (int64_t keys = 1; keys <= MOST_KEYS; keys *= 2) {
            int64_t count = 0, runs = 0;
            for (size_t n = 0; n < sizeof dims / sizeof *dims * (sizeof rows / sizeof *rows); n++) {
                const shape s = {rows[n % 6], keys, dims[n / 6]};
                const bool ran = run(device, t, dtype, s, value) == FATTN_OK;
                runs += ran;
                count += ran ? wrong(t, dtype, s, value) : 0;
            }
            tap_check(runs == 24 && count == 0, "%s, %d keys: %d numbers are wrong",
                      half ? "f16" : "bf16", (int)keys, (int)count);
        }
    }
    fattn_device_close(device);
    fattn_cache_clear();
    free(t);
    return tap_done();
}
