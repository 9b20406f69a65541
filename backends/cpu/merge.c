/* SPDX-License-Identifier: Apache-2.0 */
/* fattn_merge() on the CPU: bound by memory, so it is plain C. */
#include <math.h>
#include <string.h>

#include "backends/cpu/cpu.h"

#define LOG2E 1.44269504088896340736f
#define LN2 0.693147180559945309417f

/* Weight of a state relative to the larger lse: exactly 1 for the larger, 0 for an empty one. */
static float weight(float lse, float max)
{
    return lse == -INFINITY ? 0 : exp2f((lse - max) * LOG2E);
}

/* Symmetric in its states: products and sums are apart, so that swapping changes no bit. */
static void merge_row(float *o, const float *o1, float w1, const float *o2, float w2, int64_t dim)
{
    const float sum = w1 + w2;
    for (int64_t c = 0; c < dim; c++) {
        o[c] = (w1 * o1[c] + w2 * o2[c]) / sum;
    }
}

void fattn_cpu_merge_rows(const fattn_merge_args *a, int64_t item)
{
    const int64_t blocks = (a->seqlen + FATTN_CPU_VERB_ROWS - 1) / FATTN_CPU_VERB_ROWS;
    const int64_t h = item / blocks % a->heads, b = item / blocks / a->heads;
    const int64_t first = item % blocks * FATTN_CPU_VERB_ROWS;
    const size_t bytes = (size_t)a->dim_v * sizeof(float);

    for (int64_t i = first; i < a->seqlen && i < first + FATTN_CPU_VERB_ROWS; i++) {
        const int64_t at = (b * a->heads + h) * a->seqlen + i;
        const fattn_strides *const s = &a->o_stride, *const s1 = &a->o1_stride,
                                   *const s2 = &a->o2_stride;
        const float *const o1 = a->o1 + b * s1->batch + i * s1->seq + h * s1->head;
        const float *const o2 = a->o2 + b * s2->batch + i * s2->seq + h * s2->head;
        float *const o = a->o + b * s->batch + i * s->seq + h * s->head;
        const float lse1 = a->lse1[at], lse2 = a->lse2[at];

        if (lse1 == -INFINITY && lse2 == -INFINITY) {
            memset(o, 0, bytes);
            a->lse[at] = -INFINITY;
        } else if (lse1 == -INFINITY || lse2 == -INFINITY) {
            memmove(o, lse1 == -INFINITY ? o2 : o1, bytes);
            a->lse[at] = lse1 == -INFINITY ? lse2 : lse1;
        } else {
            const float max = lse1 > lse2 ? lse1 : lse2; /* a NaN comes back through its weight */
            const float w1 = weight(lse1, max), w2 = weight(lse2, max);
            merge_row(o, o1, w1, o2, w2, a->dim_v);
            a->lse[at] = max + log2f(w1 + w2) * LN2;
        }
    }
}
