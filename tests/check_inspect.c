/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks scores and probabilities of random forwards: with Z the dropout pattern, o is the sum of Z
 * P v; the sink's share and the probabilities of a row sum to 1; and P is exp(x - lse), with o and
 * lse from the oracle. Entries without a pair stay as they were.
 */
#include <math.h>
#include <string.h>

#include "backends/reference/naive.h"
#include "core/memory.h"
#include "core/problem.h"
#include "tests/tap.h"
#include "tests/worst.h"
#include "tools/judge/random_case.h"

enum { CASES = 400, STRIDE = 2 }; /* of keys */

#define UNTOUCHED (-12345.0)

typedef struct looks {
    double *x, *p; /* [b][hq][sq][sk] */
} looks;

static int64_t pair_count(const fattn_problem *p)
{
    return p->batch * p->heads_q * p->seqlen_q * p->seqlen_k;
}

/* One matrix, through strides that leave gaps, as double. */
static fattn_status look(fattn_device *device, const draw_case *c, fattn_inspection what,
                         double *to)
{
    const fattn_problem *const p = &c->problem;
    const fattn_dtype dtype = p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const int64_t n = pair_count(p), item = dtype == FATTN_F64 ? 8 : 4;
    char *const room = fattn_memory_alloc((size_t)(n * item * STRIDE + item));
    if (!room) {
        return FATTN_OUT_OF_MEMORY;
    }
    fattn_inspect_args args;
    fattn_inspect_args_init(&args);
    args.what = what;
    args.to = room;
    args.stride[3] = STRIDE;
    args.stride[2] = STRIDE * p->seqlen_k;
    args.stride[1] = args.stride[2] * p->seqlen_q;
    args.stride[0] = args.stride[1] * p->heads_q;
    for (int64_t at = 0; at < n * STRIDE; at++) {
        dtype == FATTN_F64 ? (void)(((double *)(void *)room)[at] = UNTOUCHED)
                           : (void)(((float *)(void *)room)[at] = (float)UNTOUCHED);
    }
    const fattn_status status = fattn_inspect(device, p, &c->buffers, &args);
    for (int64_t at = 0; at < n; at++) {
        to[at] = fattn_naive_load(room, dtype, at * STRIDE);
    }
    fattn_memory_free(room);
    return status;
}

/* How far a row is from the forward's results, in units of f32 rounding of its inputs. */
static double row_error(const draw_case *c, const fattn_problem *p, const fattn_naive *r,
                        const looks *all, int64_t b, int64_t h, int64_t i)
{
    const fattn_naive_sequence *const s = &r->sequences[b];
    const int64_t row = (b * r->heads_q + h) * r->sq + i;
    const double *const x = all->x + row * r->sk, *const prob = all->p + row * r->sk;
    const double sink = p->features & FATTN_SINK
                            ? fattn_naive_load(c->buffers.sink, fattn_naive_dtype_lse(p), h)
                            : -(double)INFINITY;
    const bool exact = p->dtype == FATTN_F64, empty = r->lse[row] == -(double)INFINITY;
    const double unit = exact ? 0x1p-40 : 0x1p-23;
    double total = exp(sink - (empty ? 0 : r->lse[row])), worst = 0;
    for (int64_t j = 0; j < r->sk; j++) {
        if (j < s->start || j >= s->keys) {
            worst = x[j] == UNTOUCHED && prob[j] == UNTOUCHED ? worst : INFINITY;
            continue;
        }
        const double expected = empty ? 0 : exp(x[j] - r->lse[row]);
        const double error = fabs(prob[j] - expected) / (unit * (2 + fabs(x[j])) + 1e-44);
        worst =
            x[j] == -(double)INFINITY ? (prob[j] == 0 ? worst : INFINITY) : worst_of(worst, error);
        total += prob[j];
    }
    return empty ? worst : worst_of(worst, fabs(total - 1) / (unit * (double)(4 + r->sk)));
}

/* The dropout pattern's factor of a pair; 1 without dropout. */
static double kept(const draw_case *c, const fattn_problem *p, const fattn_naive_sequence *s,
                   int64_t b, int64_t h, int64_t i, int64_t j)
{
    const fattn_buffers *const buffers = &c->buffers;
    uint32_t key[2];
    if (!(p->features & FATTN_DROPOUT)) {
        return 1;
    }
    fattn_naive_dropout_key(buffers->seed_ptr ? *buffers->seed_ptr : buffers->seed,
                            buffers->offset_ptr ? *buffers->offset_ptr : buffers->offset, key);
    return fattn_naive_dropout(key, fattn_naive_dropout_threshold(p->dropout_p),
                               b + p->batch_offset, h + p->head_offset, i + s->q_offset,
                               j + s->k_offset);
}

/* o of a row, only from probabilities and the dropout pattern. */
static double output_error(const draw_case *c, const fattn_problem *p, const fattn_naive *r,
                           const looks *all, int64_t b, int64_t h, int64_t i)
{
    const fattn_naive_sequence *const s = &r->sequences[b];
    const int64_t row = (b * r->heads_q + h) * r->sq + i, hk = h / (r->heads_q / r->heads_k);
    const double unit = p->dtype == FATTN_F64 ? 0x1p-40 : 0x1p-22;
    const int64_t at = b * p->descale_stride[0] + hk * p->descale_stride[1];
    const double factor = p->features & FATTN_DESCALE ? draw_get(c, DRAW_V_DESCALE, at) : 1;
    double worst = 0;
    for (int64_t channel = 0; channel < r->dim_v; channel++) {
        double sum = 0, most = 0;
        for (int64_t j = s->start; j < s->keys; j++) {
            const double v = factor * draw_get(c, DRAW_V, draw_at(c, DRAW_V, b, j, hk, channel));
            const double z = kept(c, p, s, b, h, i, j);
            sum += z * all->p[row * r->sk + j] * v;
            most = fmax(most, z * fabs(v));
        }
        const double error = fabs(sum - r->o[row * r->dim_v + channel]);
        worst = worst_of(worst, error / (unit * most * (double)(4 + r->sk) + 1e-300));
    }
    return worst;
}

/* The error of the worst row. */
static double case_error(const draw_case *c, const looks *all)
{
    const fattn_problem spelled = draw_spelled(c);
    fattn_problem p;
    fattn_naive r;
    double worst = 0;
    if (fattn_problem_normalise(&spelled, &p) != FATTN_OK ||
        fattn_naive_run(&p, &c->buffers, &r) != FATTN_OK) {
        return INFINITY;
    }
    for (int64_t b = 0; b < r.batch; b++) {
        for (int64_t h = 0; h < r.heads_q; h++) {
            for (int64_t i = 0; i < r.sequences[b].rows; i++) {
                worst = worst_of(worst, row_error(c, &p, &r, all, b, h, i));
                worst = worst_of(worst, output_error(c, &p, &r, all, b, h, i));
            }
        }
    }
    fattn_naive_free(&r);
    return worst;
}

static void check_drawn(const char *backend)
{
    fattn_device *device = NULL;
    int compared = 0, wrong = 0, refused = 0;
    tap_check(fattn_device_open(backend, &device) == FATTN_OK, "%s opens", backend);
    for (int64_t index = 0; index < CASES; index++) {
        draw_case c;
        if (draw_problem(&c, 11, index) != 0 || draw_build(&c) != 0) {
            tap_bail("out of memory");
        }
        const int64_t n = pair_count(&c.problem);
        if (c.problem.op == FATTN_FORWARD && c.family != DRAW_WILD && n <= 1 << 20) {
            char text[512];
            looks all = {.x = fattn_memory_alloc((size_t)n * 8 + 8),
                         .p = fattn_memory_alloc((size_t)n * 8 + 8)};
            const bool done = all.x && all.p && look(device, &c, FATTN_SCORES, all.x) == FATTN_OK &&
                              look(device, &c, FATTN_PROBABILITIES, all.p) == FATTN_OK;
            const double error = done ? case_error(&c, &all) : 0;
            compared++;
            refused += !done;
            const bool right = error <= 1; /* false for NaN */
            wrong += !right;
            if (!done || !right) {
                draw_describe(&c, text, sizeof text);
                printf("# %s: %s\n", text, done ? "wrong" : fattn_last_reason());
                printf("# error %g\n", error);
            }
            fattn_memory_free(all.x);
            fattn_memory_free(all.p);
        }
        draw_free(&c);
    }
    fattn_device_close(device);
    tap_check(wrong == 0 && refused == 0 && compared > CASES / 4,
              "%s: %d of %d drawn forwards are wrong, %d refused", backend, wrong, compared,
              refused);
}

/* Four heads of two queries and three keys. */
typedef struct small {
    fattn_problem p;
    fattn_buffers b;
    fattn_inspect_args args;
    _Alignas(16) float q[8];
    _Alignas(16) float k[4];
    _Alignas(16) float v[4];
    float to[64];
} small;

static void small_init(small *s)
{
    memset(s, 0, sizeof *s);
    fattn_problem_init(&s->p);
    fattn_buffers_init(&s->b);
    fattn_inspect_args_init(&s->args);
    s->p.heads_q = 4, s->p.seqlen_q = 2, s->p.seqlen_k = 3;
    s->p.dim = s->p.dim_v = 1;
    s->b.q = s->q, s->b.k = s->k, s->b.v = s->v;
    s->args.to = s->to;
}

static void refuse(const char *what, fattn_status expected, const small *s)
{
    const fattn_status status = fattn_inspect(NULL, &s->p, &s->b, &s->args);
    tap_check(status == expected, "%s: %s", what,
              status ? fattn_last_reason() : fattn_status_string(status));
}

static void check_refusals(void)
{
    small s;
    small_init(&s);
    refuse("no outputs are needed", FATTN_OK, &s);
    s.args.what = (fattn_inspection)3;
    refuse("what", FATTN_INVALID_ARGUMENT, &s);
    small_init(&s);
    s.args.reserved = 1;
    refuse("reserved", FATTN_INVALID_ARGUMENT, &s);
    small_init(&s);
    s.args.struct_size = 8;
    refuse("struct_size", FATTN_INVALID_STRUCT, &s);
    small_init(&s);
    s.p.op = FATTN_BACKWARD;
    refuse("backward", FATTN_INVALID_ARGUMENT, &s);
    small_init(&s);
    s.args.to = NULL;
    refuse("NULL", FATTN_NULL_POINTER, &s);
    small_init(&s);
    s.args.to = (char *)s.to + 1;
    refuse("alignment", FATTN_MISALIGNED, &s);
    small_init(&s);
    s.args.to = s.k;
    refuse("over k", FATTN_OVERLAP, &s);
    small_init(&s);
    s.args.stride[3] = 1;
    refuse("a row over another", FATTN_OVERLAP, &s);
    small_init(&s);
    s.args.stride[0] = -1;
    refuse("a negative stride", FATTN_INVALID_STRIDE, &s);
    small_init(&s);
    for (int axis = 0; axis < 4; axis++) {
        s.args.stride[axis] = INT64_MAX / 8;
    }
    refuse("far strides", FATTN_OVERFLOW, &s);
    small_init(&s);
    int32_t used = 4;
    s.p.features = FATTN_SEQUSED_K, s.b.seqused_k = &used;
    refuse("lengths", FATTN_INVALID_DATA, &s);
}

int main(void)
{
    check_drawn("reference");
    check_drawn("cpu");
    check_refusals();
    return tap_done();
}
