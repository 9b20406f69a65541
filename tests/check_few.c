/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prompts and single tokens in one batch: on a CPU, the row that decodes computes the sequences of
 * few rows. They get the bits of a batch that has no others, long ones those of a batch of long
 * ones, whatever lengths a run of the plan has, and on any number of threads.
 */
#include <math.h>
#include <string.h>

#include "core/dtype.h"
#include "core/plan.h"
#include "tests/device.h"

enum { B = 5, HQ = 8, HK = 2, D = 32, SQ = 40, SK = 300, THREADS = 3 };
enum { TOKENS = B * SQ, KEYS = B * SK };

/* Queries of each sequence: the short ones come first. */
static const int32_t batches[][B] = {{1, 2, 0, 40, 17}, {1, 2, 1, 1, 2}, {0, 0, 3, 40, 40}, {0}};
static const int32_t keys[B] = {300, 7, 128, 300, 129};

/* A plan promises pointers that are multiples of 16. */
static _Alignas(16) char q[TOKENS * HQ * D * 4], k[KEYS * HK * D * 4], v[KEYS * HK * D * 4];

typedef struct results {
    _Alignas(16) char o[TOKENS * HQ * D * 4];
    float lse[HQ * TOKENS];
} results;

static fattn_problem problem_of(fattn_dtype dtype, int64_t batch, int64_t longest)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.dtype = dtype;
    p.batch = batch, p.heads_q = HQ, p.heads_k = HK, p.dim = p.dim_v = D;
    p.seqlen_q = longest, p.seqlen_k = SK, p.total_q = TOKENS, p.total_k = KEYS;
    p.features = FATTN_CAUSAL | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
    p.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    return p;
}

/* cu[n] = where sequence first + n begins. */
static void begin_at(const int32_t *lengths, int first, int32_t *cu)
{
    int32_t at = 0;
    for (int b = 0; b <= B; b++) {
        if (b >= first) {
            cu[b - first] = at;
        }
        at += b < B ? lengths[b] : 0;
    }
}

/* Runs a plan of the sequences from `first` on, in a workspace of NaN. */
static bool run(const fattn_plan *plan, const int32_t *lengths, int first, results *to)
{
    int32_t cu_q[B + 1], cu_k[B + 1];
    begin_at(lengths, first, cu_q);
    begin_at(keys, first, cu_k);
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = q, b.k = k, b.v = v, b.o = to->o, b.lse = to->lse;
    b.cu_seqlens_q = cu_q, b.cu_seqlens_k = cu_k;
    const size_t bytes = (size_t)plan->tiling.workspace;
    void *const workspace = aligned_alloc(256, bytes + 256);
    if (!workspace) {
        return false;
    }
    memset(workspace, 0xff, bytes);
    memset(to, 0x7f, sizeof *to);
    const bool ran = fattn_execute(plan, &b, workspace, NULL) == FATTN_OK;
    free(workspace);
    return ran;
}

static bool tokens_agree(fattn_dtype dtype, const results *a, const results *b, int64_t first,
                         int64_t past)
{
    const int64_t row = HQ * D * fattn_dtype_size(dtype);
    bool agree =
        memcmp(a->o + first * row, b->o + first * row, (size_t)((past - first) * row)) == 0;
    for (int h = 0; h < HQ; h++) {
        agree = agree && memcmp(a->lse + h * TOKENS + first, b->lse + h * TOKENS + first,
                                (size_t)(past - first) * sizeof *a->lse) == 0;
    }
    return agree;
}

/* The sequences of few rows, which come first. */
static int count_few(const int32_t *lengths, int64_t longest)
{
    int few = 0;
    while (few < B && lengths[few] <= longest) {
        few++;
    }
    return few;
}

static void check_batch(fattn_device *device, const fattn_plan *plan, const fattn_plan *threads,
                        fattn_dtype dtype, const int32_t *lengths)
{
    static results mixed, other;
    const int64_t longest = plan->few_rows / (HQ / HK);
    const int few = count_few(lengths, longest);
    const fattn_problem shorts = problem_of(dtype, few, longest);
    const fattn_problem longs = problem_of(dtype, B - few, SQ);
    const fattn_wish wish = {.tile = {plan->tiling.br, plan->tiling.bc}};
    int32_t cu[B + 1];
    begin_at(lengths, 0, cu);

    tap_check(run(plan, lengths, 0, &mixed) && run(threads, lengths, 0, &other) &&
                  tokens_agree(dtype, &mixed, &other, 0, TOKENS),
              "%s, %d sequences of few rows: threads", fattn_dtype_name(dtype), few);
    fattn_plan *alone = NULL;
    tap_check(!fattn_plan_create(device, &shorts, &alone) && run(alone, lengths, 0, &other) &&
                  tokens_agree(dtype, &mixed, &other, 0, cu[few]),
              "they have the bits of %s", plan->few->name);
    fattn_plan_destroy(alone);
    alone = NULL;
    tap_check(!fattn_plan_create_with(device, &longs, plan->kernel->name, &wish, &alone) &&
                  !alone->few && run(alone, lengths, few, &other) &&
                  tokens_agree(dtype, &mixed, &other, cu[few], cu[B]),
              "others those of %s", plan->kernel->name);
    fattn_plan_destroy(alone);
}

static void check_dtype(fattn_device *device, fattn_dtype dtype)
{
    fattn_problem p = problem_of(dtype, B, SQ);
    const fattn_wish wish = {.workers = THREADS}, cut = {.splits = 2};
    fattn_plan *plan = NULL, *threads = NULL, *other = NULL;
    for (int64_t n = 0; n < TOKENS * HQ * D; n++) {
        fattn_dtype_store(dtype, q, n, sin(0.37 * (double)n));
    }
    for (int64_t n = 0; n < KEYS * HK * D; n++) {
        fattn_dtype_store(dtype, k, n, sin(0.61 * (double)n));
        fattn_dtype_store(dtype, v, n, cos(0.23 * (double)n));
    }
    const bool planned = !fattn_plan_create(device, &p, &plan) &&
                         !fattn_plan_create_with(device, &p, NULL, &wish, &threads);
    const bool few = planned && plan->few && plan->few->rows_max && plan->few_rows >= HQ / HK &&
                     !plan->kernel->rows_max;
    tap_check(few, "%s: %s, and %s for few rows", fattn_dtype_name(dtype),
              planned ? plan->kernel->name : fattn_last_reason(), few ? plan->few->name : "none");
    for (size_t n = 0; few && n < sizeof batches / sizeof batches[0]; n++) {
        check_batch(device, plan, threads, dtype, batches[n]);
    }
    tap_check(!fattn_plan_create_with(device, &p, NULL, &cut, &other) && !other->few,
              "a plan with a wish has one row");
    fattn_plan_destroy(other);
    other = NULL;
    p.features |= FATTN_BATCH_INVARIANT;
    tap_check(!fattn_plan_create(device, &p, &other) && !other->few,
              "a batch-invariant plan has one row");
    fattn_plan_destroy(other);
    fattn_plan_destroy(threads);
    fattn_plan_destroy(plan);
}

int main(void)
{
    fattn_device *device = NULL;
    tap_check(fattn_device_open("cpu", &device) == FATTN_OK, "a device");
    for (fattn_dtype dtype = FATTN_F32; dtype <= FATTN_BF16; dtype++) {
        check_dtype(device, dtype);
    }
    fattn_device_close(device);
    return tap_done();
}
