/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs that merge their results with o and lse of other keys (run_onto() of a backend), for every
 * row of forward.
 *
 *     check_onto [STEP] [ROW]...
 *
 * STEP: only every STEP-th run of a row; without a common factor with 84, so that all types and
 * dimensions still occur. ROW: only these rows. Some of their runs, and of a CPU's, must merge
 * where they finish rows. FATTN_BACKEND names another device than the CPU.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/plan.h"
#include "tests/device.h"
#include "tests/row.h"
#include "tests/tap.h"

enum { HEADS = 2, ROWS = 150, DIM_MAX = 256, KEYS_MAX = 200 };
enum { COUNT = HEADS * (ROWS > KEYS_MAX ? ROWS : KEYS_MAX) * DIM_MAX, LINES = HEADS * ROWS };

/* Q, K, V: inputs. FIRST: of other keys. SECOND: where a run alone leaves its results. */
enum { Q, K, V, FIRST, SECOND, RESULT, TENSORS };

typedef struct onto_case {
    const fattn_kernel *row;
    fattn_dtype dtype, result;
    int64_t dim, keys, heads_k;
    bool in_place; /* the result takes the place of the first */
} onto_case;

typedef struct memory {
    fattn_device *device;
    void *o[TENSORS];
    float *lse[TENSORS];
    void *workspace;
    size_t workspace_bytes;
} memory;

static uint32_t random_word;

static float draw(float low, float high)
{
    random_word = random_word * 1664525u + 1013904223u;
    return low + (high - low) * (float)(random_word >> 8) * 0x1p-24f;
}

static void must(bool good)
{
    if (!good) {
        tap_bail(fattn_last_reason());
    }
}

static void copy(const memory *m, void *to, const void *from, size_t bytes)
{
    must(!fattn_device_copy(m->device, to, from, bytes, NULL) &&
         !fattn_stream_synchronize(m->device, NULL));
}

static memory take(fattn_device *device)
{
    memory m = {.device = device, .workspace_bytes = 8 << 20};
    for (int t = 0; t < TENSORS; t++) {
        void *lse = NULL;
        must(!fattn_device_malloc(device, COUNT * 4, &m.o[t]));
        must(!fattn_device_malloc(device, LINES * 4, &lse));
        m.lse[t] = lse;
    }
    must(!fattn_device_malloc(device, m.workspace_bytes, &m.workspace));
    return m;
}

static void give(const memory *m)
{
    for (int t = 0; t < TENSORS; t++) {
        fattn_device_free(m->device, m->o[t]);
        fattn_device_free(m->device, m->lse[t]);
    }
    fattn_device_free(m->device, m->workspace);
}

/* Inputs, and a first state of which every fifth row is empty. (A window hides all keys from the
 * run's last rows.) */
static void fill(const memory *m, const onto_case *c)
{
    static union {
        float wide[COUNT];
        uint16_t narrow[COUNT];
    } x;
    static float lse[LINES];
    random_word = 99;
    for (int t = Q; t <= V; t++) {
        for (int n = 0; n < COUNT; n++) {
            const float y = draw(-1, 1);
            if (c->dtype == FATTN_F32) {
                x.wide[n] = y;
            } else {
                x.narrow[n] =
                    c->dtype == FATTN_F16 ? fattn_f16_from_f32(y) : fattn_bf16_from_f32(y);
            }
        }
        copy(m, m->o[t], &x, COUNT * (size_t)fattn_dtype_size(c->dtype));
    }
    for (int line = 0; line < LINES; line++) { /* (head, row); o is (row, head, channel) */
        const bool empty = line % 5 == 0;
        lse[line] = empty ? -INFINITY : draw(-2, 6);
        for (int64_t n = 0; n < c->dim; n++) {
            x.wide[(line % ROWS * HEADS + line / ROWS) * c->dim + n] = empty ? 0 : draw(-1, 1);
        }
    }
    copy(m, m->o[FIRST], x.wide, COUNT * 4);
    copy(m, m->lse[FIRST], lse, LINES * 4);
    memset(&x, 0x7f, sizeof x);
    copy(m, m->o[SECOND], &x, COUNT * 4);
}

static fattn_status make_plan(const memory *m, const onto_case *c, fattn_plan **plan)
{
    fattn_problem p;
    fattn_plan_info info;
    fattn_problem_init(&p);
    fattn_plan_info_init(&info);
    p.dtype = c->dtype, p.dtype_o = FATTN_F32, p.features = FATTN_WINDOW;
    p.window_left = c->keys / 2, p.window_right = 3;
    p.anchor = FATTN_TOP_LEFT;
    p.batch = 1, p.heads_q = HEADS, p.heads_k = c->heads_k, p.dim = p.dim_v = c->dim;
    p.seqlen_q = ROWS, p.seqlen_k = c->keys;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    const fattn_status status = fattn_plan_create_with(m->device, &p, c->row->name, NULL, plan);
    must(status || (!fattn_plan_get_info(*plan, &info) &&
                    (size_t)info.workspace_bytes <= m->workspace_bytes));
    return status;
}

/* The buffers of a run alone. */
static fattn_buffers buffers_of(const memory *m)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = m->o[Q], b.k = m->o[K], b.v = m->o[V], b.o = m->o[SECOND], b.lse = m->lse[SECOND];
    return b;
}

/* What is to come of it: a run, and its rows merged with the first by the definition, on the host.
 */
static void expect(const memory *m, const onto_case *c, const fattn_plan *plan, double *o,
                   double *lse)
{
    static float first[COUNT], second[COUNT];
    float lses[2][LINES];
    const size_t count = (size_t)(LINES * c->dim);
    const fattn_buffers b = buffers_of(m);
    fill(m, c);
    must(!fattn_execute(plan, &b, m->workspace, NULL));
    copy(m, first, m->o[FIRST], count * 4);
    copy(m, second, m->o[SECOND], count * 4);
    copy(m, lses[0], m->lse[FIRST], LINES * 4);
    copy(m, lses[1], m->lse[SECOND], LINES * 4);
    for (int line = 0; line < LINES; line++) {
        const double w1 = exp((double)lses[0][line]), w2 = exp((double)lses[1][line]);
        lse[line] = log(w1 + w2);
        for (int64_t n = 0; n < c->dim; n++) {
            const int64_t at = (line % ROWS * HEADS + line / ROWS) * c->dim + n;
            const double sum = w1 * (double)first[at] + w2 * (double)second[at];
            o[at] = w1 + w2 > 0 ? sum / (w1 + w2) : 0;
        }
    }
}

/* A run that merges; true where it left nothing in the place of a run alone. */
static bool run(const memory *m, const onto_case *c, const fattn_plan *plan, float *o, float *lse)
{
    static uint32_t second[COUNT];
    static uint16_t narrow[COUNT];
    const fattn_strides packed = {ROWS * HEADS * c->dim, HEADS * c->dim, c->dim};
    const int to = c->in_place ? FIRST : RESULT;
    const size_t count = (size_t)(LINES * c->dim);
    const fattn_buffers b = buffers_of(m);
    fattn_merge_job job = {
        .batch = 1, .heads = HEADS, .seqlen = ROWS, .dim_v = c->dim, .dtype = c->result};
    job.first = (fattn_state){m->o[FIRST], m->lse[FIRST], packed, LINES, ROWS};
    job.second = (fattn_state){m->o[SECOND], m->lse[SECOND], packed, LINES, ROWS};
    job.result = (fattn_state){m->o[to], m->lse[to], packed, LINES, ROWS};
    fill(m, c);
    must(!fattn_execute_onto(plan, &b, &job, m->workspace, NULL));
    copy(m, lse, m->lse[to], LINES * 4);
    if (c->result == FATTN_F32) {
        copy(m, o, m->o[to], count * 4);
    } else {
        copy(m, narrow, m->o[to], count * 2);
        for (size_t n = 0; n < count; n++) {
            o[n] =
                c->result == FATTN_F16 ? fattn_f16_to_f32(narrow[n]) : fattn_bf16_to_f32(narrow[n]);
        }
    }
    copy(m, second, m->o[SECOND], count * 4);
    bool untouched = true;
    for (size_t n = 0; n < count; n++) {
        untouched = untouched && second[n] == 0x7f7f7f7f;
    }
    return untouched;
}

typedef struct tally {
    int cases, right, merged;
} tally;

static void check_case(const memory *m, const onto_case *c, tally *all)
{
    static float o[COUNT];
    static double truth[COUNT];
    float lse[LINES];
    double truth_lse[LINES];
    fattn_plan *plan;
    if (make_plan(m, c, &plan)) {
        return; /* the row declines */
    }
    expect(m, c, plan, truth, truth_lse);
    const bool merged = run(m, c, plan, o, lse);
    const double bound = c->result == FATTN_F32 ? 2e-6 : c->result == FATTN_F16 ? 1e-3 : 8e-3;
    bool good = true;
    for (int64_t n = 0; n < LINES * c->dim; n++) {
        good = good && fabs(truth[n] - (double)o[n]) <= bound;
    }
    for (int n = 0; n < LINES; n++) {
        const double x = (double)lse[n];
        good = good && (truth_lse[n] == x || fabs(truth_lse[n] - x) <= 4e-6);
    }
    if (!good) {
        printf("# %s: dtype %d, result %d, %lld channels, %lld keys, %lld heads of keys%s\n",
               c->row->name, (int)c->dtype, (int)c->result, (long long)c->dim, (long long)c->keys,
               (long long)c->heads_k, c->in_place ? ", in place" : "");
    }
    all->cases++;
    all->right += good;
    all->merged += merged;
    fattn_plan_destroy(plan);
}

static void check_row(const memory *m, const fattn_kernel *row, int step, tally *all)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    static const int64_t dims[] = {8, 37, 64, 96, 128, 192, 256}, keys[] = {3, KEYS_MAX};
    for (int n = 0; n < 7 * 3 * 2 * 2; n += step) {
        onto_case c = {.row = row, .dtype = dtypes[n % 3], .dim = dims[n / 3 % 7]};
        c.keys = keys[n / 21 % 2];
        c.result = n / 42 ? c.dtype : FATTN_F32;
        c.heads_k = n % 2 ? HEADS : HEADS / 2;
        c.in_place = c.result == FATTN_F32 && n % 4 < 2;
        check_case(m, &c, all);
    }
}

static bool is_named(const fattn_kernel *row, int count, char **names)
{
    bool named = count == 0;
    for (int n = 0; n < count; n++) {
        named = named || strcmp(row->name, names[n]) == 0;
    }
    return named;
}

int main(int argc, char **argv)
{
    const fattn_kernel *row;
    fattn_device *device;
    tally all = {0, 0, 0};
    const bool sparse = argc > 1 && atoi(argv[1]) > 0;
    const int step = sparse ? atoi(argv[1]) : 1;
    argc -= sparse, argv += sparse;
    if (device_absent(device_named())) {
        return 0;
    }
    must(!fattn_device_open(device_named() ? device_named() : "cpu", &device));
    const memory m = take(device);
    for (int at = 0; (row = row_next(device, &at));) {
        if (row->ops & FATTN_OP_BIT(FATTN_FORWARD) && is_named(row, argc - 1, argv + 1)) {
            check_row(&m, row, step, &all);
        }
    }
    give(&m);
    fattn_device_close(device);
    tap_check(all.right == all.cases && all.cases > 0,
              "%d of %d runs merge their rows with those of other keys", all.right, all.cases);
    if (argc > 1 || !device_named()) {
        tap_check(all.merged > 0, "%d of them where they finish the rows", all.merged);
    }
    return tap_done();
}
