/* SPDX-License-Identifier: Apache-2.0 */
/* fattn_merge() on the CPU. Memory sets its pace, so it is plain C. */
#include <math.h>

#include "backends/cpu/cpu.h"
#include "backends/cpu/vec_scalar.h" /* for score.h */
#include "core/dtype.h"
#include "core/integer.h"
#include "core/score.h"

#define LN2 0.693147180559945309417f
#define ITEM_ROWS 64     /* the fewest rows of an item, except at the end of a sequence */
#define ITEM_POSITIONS 4 /* the fewest positions of an item */

/* The weight of a state relative to the one with the larger lse: exactly 1 for that one, 0 for an
 * empty state. */
static float weight(float lse, float max)
{
    return lse == -INFINITY ? 0 : exp2f((lse - max) * (float)FATTN_LOG2E);
}

static void store(void *o, fattn_dtype dtype, int64_t c, float x)
{
    if (dtype == FATTN_F32) {
        ((float *)o)[c] = x;
    } else {
        ((uint16_t *)o)[c] = dtype == FATTN_F16 ? fattn_f16_from_f32(x) : fattn_bf16_from_f32(x);
    }
}

/* The states are exchangeable: products and sums are rounded separately, so exchanging them changes
 * no bit. */
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

/* Copies a row whose other state is empty; NULL: both are, and the result is 0. The result may be
 * `from` itself. */
static void copy_row(void *o, fattn_dtype dtype, const float *from, int64_t dim)
{
    for (int64_t c = 0; c < dim; c++) {
        store(o, dtype, c, from ? from[c] : 0);
    }
}

/* A row of a state, and the distance to the next row. */
typedef struct cursor {
    char *o;
    float *lse;
    int64_t o_step, lse_step; /* in bytes, and in floats */
} cursor;

/* Whether the rows of an item are those of consecutive positions or of consecutive heads. */
typedef enum direction { ALONG_POSITIONS, ALONG_HEADS } direction;

static cursor cursor_at(const fattn_state *s, int64_t size, int64_t b, int64_t h, int64_t i,
                        direction along)
{
    const bool by_heads = along == ALONG_HEADS;
    return (cursor){.o = (char *)s->o + fattn_state_row(s, b, h, i) * size,
                    .lse = fattn_state_lse(s, b, h, i),
                    .o_step = (by_heads ? s->strides.head : s->strides.seq) * size,
                    .lse_step = by_heads ? s->lse_head : 1};
}

static void advance(cursor *c)
{
    c->o += c->o_step;
    c->lse += c->lse_step;
}

/* Merges `count` rows, beginning with that of (b, h, i). */
static void merge_rows(const fattn_merge_job *job, int64_t b, int64_t h, int64_t i, int64_t count,
                       direction along)
{
    const int64_t dim = job->dim_v, size = fattn_dtype_size(job->dtype);
    cursor first = cursor_at(&job->first, sizeof(float), b, h, i, along);
    cursor second = cursor_at(&job->second, sizeof(float), b, h, i, along);
    cursor result = cursor_at(&job->result, size, b, h, i, along);
    for (; count > 0; count--, advance(&first), advance(&second), advance(&result)) {
        const float *const o1 = (const void *)first.o, *const o2 = (const void *)second.o;
        const float lse1 = *first.lse, lse2 = *second.lse;
        if (lse1 == -INFINITY && lse2 == -INFINITY) {
            copy_row(result.o, job->dtype, NULL, dim);
            *result.lse = -INFINITY;
        } else if (lse1 == -INFINITY || lse2 == -INFINITY) {
            copy_row(result.o, job->dtype, lse1 == -INFINITY ? o2 : o1, dim);
            *result.lse = lse1 == -INFINITY ? lse2 : lse1;
        } else {
            const float max = lse1 > lse2 ? lse1 : lse2; /* a NaN comes back through its weight */
            const float w1 = weight(lse1, max), w2 = weight(lse2, max);
            merge_row(result.o, job->dtype, o1, w1, o2, w2, dim);
            *result.lse = max + log2f(w1 + w2) * LN2;
        }
    }
}

/* How many positions and heads an item has. */
typedef struct extent {
    int64_t positions, heads;
} extent;

/* Items follow the order of memory. If the heads of a position lie side by side, as in BSHD, an
 * item has all of them, and several positions, since neighbouring positions share cache lines of
 * lse. */
static extent extent_of(const fattn_merge_job *job)
{
    const fattn_strides *const s = &job->first.strides;
    const bool interleaved = job->heads > 1 && s->head < s->seq;
    const int64_t heads = interleaved ? job->heads : 1;
    return (extent){.positions = fattn_max64(ITEM_ROWS / heads, ITEM_POSITIONS), .heads = heads};
}

int64_t fattn_cpu_merge_items(const fattn_merge_job *job)
{
    const extent e = extent_of(job);
    return job->batch * (job->heads / e.heads) * fattn_ceil_div(job->seqlen, e.positions);
}

void fattn_cpu_merge_item(const fattn_merge_job *job, int64_t item)
{
    const extent e = extent_of(job);
    const int64_t blocks = fattn_ceil_div(job->seqlen, e.positions), groups = job->heads / e.heads;
    const int64_t b = item / blocks / groups, h0 = item / blocks % groups * e.heads;
    const int64_t i0 = item % blocks * e.positions;
    const int64_t positions = fattn_min64(e.positions, job->seqlen - i0);
    if (e.heads == 1) {
        merge_rows(job, b, h0, i0, positions, ALONG_POSITIONS);
        return;
    }
    for (int64_t i = i0; i < i0 + positions; i++) {
        merge_rows(job, b, h0, i, e.heads, ALONG_HEADS);
    }
}
