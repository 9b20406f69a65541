/* SPDX-License-Identifier: Apache-2.0 */
/* fattn_merge() on the CPU: bound by memory, so it is plain C. */
#include <math.h>

#include "backends/cpu/cpu.h"
#include "core/dtype.h"

#define LOG2E 1.44269504088896340736f
#define LN2 0.693147180559945309417f

/* Weight of a state relative to the larger lse: exactly 1 for the larger, 0 for an empty one. */
static float weight(float lse, float max)
{
    return lse == -INFINITY ? 0 : exp2f((lse - max) * LOG2E);
}

static void store(void *o, fattn_dtype dtype, int64_t c, float x)
{
    if (dtype == FATTN_F32) {
        ((float *)o)[c] = x;
    } else {
        ((uint16_t *)o)[c] = dtype == FATTN_F16 ? fattn_f16_from_f32(x) : fattn_bf16_from_f32(x);
    }
}

/* Symmetric in its states: products and sums are apart, so that swapping changes no bit. */
static void merge_row(void *o, fattn_dtype dtype, const float *o1, float w1, const float *o2,
                      float w2, int64_t dim)
{
    const float sum = w1 + w2;
    if (dtype == FATTN_F32) {
        for (int64_t c = 0; c < dim; c++) {
            ((float *)o)[c] = (w1 * o1[c] + w2 * o2[c]) / sum;
        }
        return;
    }
    for (int64_t c = 0; c < dim; c++) {
        store(o, dtype, c, (w1 * o1[c] + w2 * o2[c]) / sum);
    }
}

/* The other state is empty. The result may be this one. */
static void copy_row(void *o, fattn_dtype dtype, const float *from, int64_t dim)
{
    for (int64_t c = 0; c < dim; c++) {
        store(o, dtype, c, from ? from[c] : 0);
    }
}

void fattn_cpu_merge_rows(const fattn_merge_job *job, int64_t item)
{
    const int64_t blocks = (job->seqlen + FATTN_CPU_VERB_ROWS - 1) / FATTN_CPU_VERB_ROWS;
    const int64_t h = item / blocks % job->heads, b = item / blocks / job->heads;
    const int64_t first = item % blocks * FATTN_CPU_VERB_ROWS;
    const int64_t dim = job->dim_v, size = fattn_dtype_size(job->dtype);

    for (int64_t i = first; i < job->seqlen && i < first + FATTN_CPU_VERB_ROWS; i++) {
        const float *const o1 = (float *)job->first.o + fattn_state_row(&job->first, b, h, i);
        const float *const o2 = (float *)job->second.o + fattn_state_row(&job->second, b, h, i);
        void *const o = (char *)job->result.o + fattn_state_row(&job->result, b, h, i) * size;
        const float lse1 = *fattn_state_lse(&job->first, b, h, i);
        const float lse2 = *fattn_state_lse(&job->second, b, h, i);
        float *const lse = fattn_state_lse(&job->result, b, h, i);

        if (lse1 == -INFINITY && lse2 == -INFINITY) {
            copy_row(o, job->dtype, NULL, dim);
            *lse = -INFINITY;
        } else if (lse1 == -INFINITY || lse2 == -INFINITY) {
            copy_row(o, job->dtype, lse1 == -INFINITY ? o2 : o1, dim);
            *lse = lse1 == -INFINITY ? lse2 : lse1;
        } else {
            const float max = lse1 > lse2 ? lse1 : lse2; /* a NaN comes back through its weight */
            const float w1 = weight(lse1, max), w2 = weight(lse2, max);
            merge_row(o, job->dtype, o1, w1, o2, w2, dim);
            *lse = max + log2f(w1 + w2) * LN2;
        }
    }
}
