/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Long sequences among many short ones, decoded on a CPU by one plan: keys are cut by the lengths
 * of a run. A long sequence is in about as many parts as it would be alone. Results are those of
 * the reference, and the same for any number of threads. The workspace has room for the parts of
 * any lengths, and hardly grows with the number of sequences. The same of 20 rows a key/value head,
 * which rows that decode take as two blocks, if they do.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/dtype.h"
#include "core/plan.h"
#include "tests/device.h"
#include "tests/worst.h"

enum { B = 96, HQ = 4, HK = 2, D = 32, SQ = 10, LONG = 6000, TOTAL = 24000, ROWS = B * SQ };

_Alignas(16) static char q[ROWS * HQ * D * 4], k[TOTAL * HK * D * 4], v[TOTAL * HK * D * 4];

typedef struct results {
    _Alignas(16) char o[ROWS * HQ * D * 4];
    _Alignas(16) float lse[HQ * ROWS];
} results;

/* Lengths of the sequences of a run. */
typedef struct batch {
    const char *words;
    void (*fill)(int32_t *keys); /* keys[B], 16 each */
    bool is_long;                /* has a sequence of LONG keys */
} batch;

static void first_is_long(int32_t *keys) { keys[0] = LONG; }
static void last_is_long(int32_t *keys) { keys[B - 1] = LONG; }

static void one_alone(int32_t *keys)
{
    memset(keys, 0, B * sizeof *keys);
    keys[1] = LONG;
}

static void three_are_long(int32_t *keys) { keys[0] = LONG, keys[50] = 3000, keys[51] = 1500; }

static void all_are_equal(int32_t *keys)
{
    for (int b = 0; b < B; b++) {
        keys[b] = TOTAL / B;
    }
}

static void none(int32_t *keys) { memset(keys, 0, B * sizeof *keys); }

/* Of 0 to LONG keys, most of them few, differently at each call. */
static void any(int32_t *keys)
{
    static uint32_t state = 1;
    int32_t left = TOTAL;
    for (int b = 0; b < B; b++) {
        state = state * 1664525 + 1013904223;
        const double part = (double)(state >> 8) / (1 << 24);
        const int32_t drawn = (int32_t)(pow(part, 8) * LONG);
        keys[b] = drawn < left ? drawn : left;
        left -= keys[b];
    }
}

static const batch batches[] = {
    {"the first is long", first_is_long, true},
    {"the last is long", last_is_long, true},
    {"one alone", one_alone, true},
    {"three are long", three_are_long, true},
    {"equal ones", all_are_equal, false},
    {"none", none, false},
    {"any lengths", any, false},
    {"any lengths", any, false},
    {"any lengths", any, false},
    {"any lengths", any, false},
};

static fattn_problem problem_of(fattn_dtype dtype, int64_t sequences, int64_t queries)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.dtype = dtype;
    p.batch = sequences, p.heads_q = HQ, p.heads_k = HK, p.dim = p.dim_v = D;
    p.seqlen_q = queries, p.seqlen_k = LONG, p.total_q = sequences * queries, p.total_k = TOTAL;
    p.features = FATTN_CAUSAL | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    return p;
}

/* Runs a plan in a workspace of NaN, and writes nothing behind it. */
static bool run(const fattn_plan *plan, const int32_t *keys, results *to)
{
    int32_t cu_q[B + 1] = {0}, cu_k[B + 1] = {0};
    for (int b = 0; b < B; b++) {
        cu_q[b + 1] = cu_q[b] + (keys[b] > 0 ? (int32_t)plan->problem.seqlen_q : 0);
        cu_k[b + 1] = cu_k[b] + keys[b];
    }
    fattn_buffers buffers;
    fattn_buffers_init(&buffers);
    buffers.q = q, buffers.k = k, buffers.v = v, buffers.o = to->o, buffers.lse = to->lse;
    buffers.cu_seqlens_q = cu_q, buffers.cu_seqlens_k = cu_k;
    const size_t bytes = (size_t)plan->tiling.workspace;
    unsigned char *const workspace = aligned_alloc(256, bytes + 256);
    if (!workspace) {
        return false;
    }
    memset(workspace, 0xff, bytes + 256);
    memset(to, 0x7f, sizeof *to);
    bool ran = fattn_execute(plan, &buffers, workspace, NULL) == FATTN_OK;
    for (int n = 0; n < 256; n++) {
        ran = ran && workspace[bytes + (size_t)n] == 0xff;
    }
    free(workspace);
    return ran;
}

static bool agree(fattn_dtype dtype, const results *a, const results *truth)
{
    double worst = 0;
    for (int64_t n = 0; n < ROWS * HQ * D; n++) {
        const double x = fattn_dtype_load(dtype, a->o, n), y = fattn_dtype_load(dtype, truth->o, n);
        worst = worst_of(worst, memcmp(&x, &y, sizeof x) ? fabs(x - y) : 0);
    }
    for (int n = 0; n < HQ * ROWS; n++) {
        const bool same = memcmp(&a->lse[n], &truth->lse[n], sizeof a->lse[n]) == 0;
        worst = worst_of(worst, same ? 0 : fabs((double)a->lse[n] - (double)truth->lse[n]));
    }
    return worst < (dtype == FATTN_F32 ? 1e-5 : 1e-2);
}

static void check_dtype(fattn_device *device, fattn_device *reference, fattn_dtype dtype,
                        int64_t queries)
{
    static results got, other, truth;
    const fattn_problem p = problem_of(dtype, B, queries),
                        many = problem_of(dtype, 10 * B, queries);
    const fattn_wish one = {.workers = 1}, three = {.workers = 3}, uncut = {.splits = 1};
    const char *const type = fattn_dtype_name(dtype);
    fattn_plan *plan = NULL, *threads = NULL, *oracle = NULL, *wide = NULL, *whole = NULL;
    const bool planned = !fattn_plan_create_with(device, &p, NULL, &one, &plan) &&
                         !fattn_plan_create_with(device, &p, NULL, &three, &threads) &&
                         !fattn_plan_create_with(device, &many, NULL, &one, &wide) &&
                         !fattn_plan_create_with(device, &p, NULL, &uncut, &whole) &&
                         !fattn_plan_create(reference, &p, &oracle);
    const bool decodes = planned && plan->kernel->rows_max > 0;
    tap_check(decodes || queries * (HQ / HK) > 16, "%s, %d queries: %s", type, (int)queries,
              planned ? plan->kernel->name : fattn_last_reason());
    tap_check(!decodes || plan->tiling.splits >= LONG / 512,
              "a sequence of a plan for %d may be in %d parts", (int)B,
              planned ? (int)plan->tiling.splits : 0);
    tap_check(planned && wide->tiling.workspace - plan->tiling.workspace < 9 * B * 1024,
              "ten times as many sequences want less than a kilobyte each");
    for (size_t n = 0; planned && n < sizeof batches / sizeof batches[0]; n++) {
        int32_t keys[B];
        for (int b = 0; b < B; b++) {
            keys[b] = 16;
        }
        batches[n].fill(keys);
        tap_check(run(plan, keys, &got) && run(oracle, keys, &truth) && agree(dtype, &got, &truth),
                  "%s: o and lse", batches[n].words);
        tap_check(run(threads, keys, &other) && !memcmp(&got, &other, sizeof got),
                  "and on three threads");
        tap_check(!decodes || !batches[n].is_long || dtype != FATTN_F32 ||
                      (run(whole, keys, &other) && memcmp(&got, &other, sizeof got)),
                  "from several parts: one part has other bits");
    }
    fattn_plan_destroy(plan);
    fattn_plan_destroy(threads);
    fattn_plan_destroy(oracle);
    fattn_plan_destroy(wide);
    fattn_plan_destroy(whole);
}

int main(void)
{
    fattn_device *device = NULL, *reference = NULL;
    tap_check(fattn_device_open("cpu", &device) == FATTN_OK &&
                  fattn_device_open("reference", &reference) == FATTN_OK,
              "devices");
    for (fattn_dtype dtype = FATTN_F32; dtype <= FATTN_BF16; dtype++) {
        for (int64_t n = 0; n < (int64_t)TOTAL * HK * D; n++) {
            fattn_dtype_store(dtype, k, n, sin(0.61 * (double)n));
            fattn_dtype_store(dtype, v, n, cos(0.23 * (double)n));
        }
        for (int64_t n = 0; n < (int64_t)ROWS * HQ * D; n++) {
            fattn_dtype_store(dtype, q, n, sin(0.37 * (double)n));
        }
        check_dtype(device, reference, dtype, 1);
        check_dtype(device, reference, dtype, SQ);
    }
    fattn_device_close(device);
    fattn_device_close(reference);
    return tap_done();
}
