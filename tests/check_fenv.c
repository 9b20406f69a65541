/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The caller's floating-point environment: backend cpu gives the same bits under any rounding mode
 * and with subnormal numbers flushed to zero, and restores the environment.
 */
#include <fenv.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "fattn/fattn.h"
#include "tests/random.h"
#include "tests/tap.h"

enum { ROWS = 150, DIM = 24, COUNT = ROWS * DIM };

/* --- The control word ------------------------------------------------------------------------- */

#if defined(__SSE__)
static uint64_t control(void) { return _mm_getcsr() & ~0x3fu; } /* without the exception flags */
static void flush_subnormals(void) { _mm_setcsr(_mm_getcsr() | 0x8040); }
#define CAN_FLUSH true
#elif defined(__aarch64__)
static uint64_t control(void)
{
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    return fpcr;
}
static void flush_subnormals(void)
{
    const uint64_t fpcr = control() | UINT64_C(1) << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr));
}
#define CAN_FLUSH true
#else
static uint64_t control(void) { return (uint64_t)fegetround(); }
static void flush_subnormals(void) {}
#define CAN_FLUSH false
#endif

/* --- A problem whose values and gradients are subnormal --------------------------------------- */

typedef struct tensors {
    float q[COUNT], k[COUNT], v[COUNT], o[COUNT], lse[ROWS], dout[COUNT];
    float dq[COUNT], dk[COUNT], dv[COUNT];
} tensors;

static void draw(float *x, int64_t n, float size)
{
    static uint64_t state = 3;
    for (int64_t i = 0; i < n; i++) {
        x[i] = size * ((float)(random_next(&state) >> 40) * 0x1p-23f - 1);
    }
}

static tensors *tensors_make(void)
{
    tensors *const t = calloc(1, sizeof *t);
    if (t) {
        draw(t->q, COUNT, 1);
        draw(t->k, COUNT, 1);
        draw(t->v, COUNT, 0x1p-130f);
        draw(t->dout, COUNT, 1);
    }
    return t;
}

static fattn_status run(fattn_device *device, tensors *t, fattn_op op)
{
    fattn_problem problem;
    fattn_buffers buffers;
    fattn_problem_init(&problem);
    problem.op = op;
    problem.seqlen_q = problem.seqlen_k = ROWS;
    problem.dim = problem.dim_v = DIM;
    problem.features = FATTN_CAUSAL;
    problem.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    fattn_buffers_init(&buffers);
    buffers.q = t->q, buffers.k = t->k, buffers.v = t->v, buffers.o = t->o, buffers.lse = t->lse;
    buffers.dout = t->dout, buffers.dq = t->dq, buffers.dk = t->dk, buffers.dv = t->dv;
    return fattn_attention(device, &problem, &buffers, NULL);
}

static bool any_subnormal(const float *x)
{
    bool any = false;
    for (int i = 0; i < COUNT; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        any = any || ((bits & 0x7f800000) == 0 && (bits & 0x7fffff) != 0);
    }
    return any;
}

int main(void)
{
    static const struct {
        const char *name;
        int rounding;
        bool flush;
    } environments[] = {{"upward", FE_UPWARD, false},
                        {"downward", FE_DOWNWARD, false},
                        {"toward zero", FE_TOWARDZERO, false},
                        {"flush to zero", FE_TONEAREST, true},
                        {"upward and flush to zero", FE_UPWARD, true}};
    fattn_device *device = NULL;
    tensors *const expected = tensors_make(), *const got = malloc(sizeof *got);
    if (!expected || !got || fattn_device_open("cpu", &device) ||
        run(device, expected, FATTN_FORWARD) || run(device, expected, FATTN_BACKWARD)) {
        return 1;
    }
    tap_check(any_subnormal(expected->o), "o has subnormal numbers");

    for (size_t n = 0; n < sizeof environments / sizeof environments[0]; n++) {
        fenv_t plain;
        if (environments[n].flush && !CAN_FLUSH) {
            continue;
        }
        *got = *expected;
        memset(got->o, 0xff, sizeof got->o);
        memset(got->lse, 0xff, sizeof got->lse);
        memset(got->dq, 0xff, sizeof got->dq);
        memset(got->dk, 0xff, sizeof got->dk);
        memset(got->dv, 0xff, sizeof got->dv);
        fegetenv(&plain);
        fesetround(environments[n].rounding);
        if (environments[n].flush) {
            flush_subnormals();
        }
        const uint64_t before = control();
        const fattn_status status[2] = {run(device, got, FATTN_FORWARD),
                                        run(device, got, FATTN_BACKWARD)};
        const uint64_t after = control();
        fesetenv(&plain);
        tap_check(!status[0] && !status[1] && memcmp(got, expected, sizeof *got) == 0,
                  "%s: the same bits", environments[n].name);
        tap_check(after == before, "%s: the caller's environment is as it was",
                  environments[n].name);
    }
    fattn_device_close(device);
    fattn_cache_clear();
    free(expected);
    free(got);
    return tap_done();
}
