/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests the judge: the oracle's own results with one wrong number pass below the bound of
 * docs/NUMERICS.md and fail above it. They also fail if the number has another class or was not
 * written. A judge that is too lenient would let every kernel pass.
 */
#include <math.h>
#include <string.h>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/memory.h"
#include "core/plan.h"
#include "core/status.h"
#include "tests/tap.h"
#include "tools/judge/judge.h"

enum { ROW = 2, HEAD = 1, CHANNEL = 3 }; /* the wrong number */

/* A fault in one number of the output. */
typedef enum fault { ADDED, REPLACED, LEFT } fault;

static fattn_backend faulty;
static fattn_status (*right)(const fattn_plan *, const fattn_buffers *, void *, fattn_stream);
static fault kind;
static draw_id where;
static double amount;
static const draw_case *judged;

static fattn_status run(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                        fattn_stream stream)
{
    const draw_tensor *const tensor = &judged->tensors[where];
    const int64_t at = draw_at(judged, where, 0, ROW, HEAD, where == DRAW_LSE ? 0 : CHANNEL);
    fattn_buffers b = *buffers;
    char *const output = draw_pointer(&b, where);
    char before[8];
    memcpy(before, output + at * tensor->size, (size_t)tensor->size);
    const fattn_status status = right(plan, buffers, workspace, stream);
    if (kind == LEFT) {
        memcpy(output + at * tensor->size, before, (size_t)tensor->size);
    } else {
        const double x = kind == ADDED ? fattn_dtype_load(tensor->dtype, output, at) : 0;
        fattn_dtype_store(tensor->dtype, output, at, x + amount);
    }
    return status;
}

/* Whether the judge lets the fault pass. */
static bool passes(fattn_device *device, judge_truth *truth, fault what, draw_id output, double by)
{
    judge_verdict verdict;
    const char *missing = NULL;
    kind = what, where = output, amount = by;
    judge_run(device, device->backend->kernel(device->impl, 0, &missing), judged, truth, &verdict);
    return verdict.outcome == JUDGE_PASSED;
}

/* The largest error that passes, to within a hundredth. */
static double threshold(fattn_device *device, judge_truth *truth, draw_id output)
{
    double low = 0x1p-40, high = 0x1p10;
    while (high / low > 1.01) {
        const double middle = sqrt(low * high);
        *(passes(device, truth, ADDED, output, middle) ? &low : &high) = middle;
    }
    return low;
}

static void check(fattn_device *device, fattn_dtype dtype, fattn_op op, draw_id output)
{
    draw_case c;
    judge_truth truth = {.known = false};
    draw_blank(&c, 5);
    c.problem.op = op;
    c.problem.dtype = dtype;
    c.problem.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    c.problem.heads_q = c.problem.heads_k = 2;
    c.problem.seqlen_q = 8;
    c.problem.seqlen_k = 16;
    c.problem.dim = c.problem.dim_v = 16;
    c.clean = c.aligned_rows = true;
    if (draw_sequences(&c) != 0 || draw_build(&c) != 0 || draw_save(&c) != FATTN_OK) {
        tap_check(false, "a case: %s", fattn_last_reason());
        return;
    }
    judged = &c;
    const char *const name = draw_name(output), *const type = fattn_dtype_name(dtype);
    tap_check(passes(device, &truth, ADDED, output, 0), "%s in %s: the oracle's own passes", name,
              type);

    /* A is the sum of absolute values, u + 2^-22 X the allowed error per term. A unit of the
     * output's last place and the comparator's error are of the same size or smaller. */
    const double a = output == DRAW_O    ? truth.exact.a_o[HEAD]
                     : output == DRAW_DQ ? truth.exact.a_dq[HEAD]
                     : output == DRAW_DK ? truth.exact.a_dk[HEAD]
                                         : truth.exact.a_dv[HEAD];
    const double u = dtype == FATTN_F16 ? 0x1p-11 : dtype == FATTN_BF16 ? 0x1p-8 : 0x1p-22;
    const double loss = (u + 0x1p-22 * truth.exact.x_max[HEAD]) * a;
    const double allowed = threshold(device, &truth, output) / loss;
    tap_check(allowed > 0.5 && allowed < 4.5,
              "%s in %s: errors to %.2f of what terms may lose pass", name, type, allowed);
    tap_check(!passes(device, &truth, REPLACED, output, NAN), "%s in %s: no NaN does", name, type);
    tap_check(!passes(device, &truth, REPLACED, output, INFINITY) &&
                  !passes(device, &truth, REPLACED, output, -INFINITY),
              "%s in %s: no infinity does", name, type);
    tap_check(!passes(device, &truth, LEFT, output, 0), "%s in %s: what was not written does not",
              name, type);
    judge_truth_free(&truth);
    draw_free(&c);
}

/* A case to be judged, with a value that is wild. */
static void tiny_case(draw_case *c, uint64_t seed, int64_t keys, double wild)
{
    draw_blank(c, seed);
    c->problem.heads_q = c->problem.heads_k = 2;
    c->problem.seqlen_q = 8;
    c->problem.seqlen_k = keys;
    c->problem.dim = c->problem.dim_v = 16;
    c->clean = c->aligned_rows = true;
    if (draw_sequences(c) != 0 || draw_build(c) != 0) {
        tap_bail("out of memory");
    }
    judged = c;
    draw_set(c, DRAW_V, draw_at(c, DRAW_V, 0, 0, HEAD, CHANNEL), wild);
}

/* An infinity with the wrong sign fails. */
static void check_signs(fattn_device *device)
{
    draw_case c;
    judge_truth truth = {.known = false};
    tiny_case(&c, 6, 1, INFINITY);
    tap_check(passes(device, &truth, REPLACED, DRAW_O, INFINITY) &&
                  !passes(device, &truth, REPLACED, DRAW_O, -INFINITY),
              "an infinity passes with its sign alone");
    judge_truth_free(&truth);
    draw_free(&c);
}

/* Outputs begin as NaN, so a NaN that is expected may be one that nobody wrote. */
static void check_written(fattn_device *device)
{
    draw_case c;
    judge_truth truth = {.known = false};
    tiny_case(&c, 7, 4, NAN);
    tap_check(passes(device, &truth, REPLACED, DRAW_O, NAN) &&
                  !passes(device, &truth, LEFT, DRAW_O, 0),
              "a NaN passes where one belongs, but not one that was there before");
    judge_truth_free(&truth);
    draw_free(&c);
}

/* Each allocation fails in turn: the verdict says what there was no memory for, and a truth that
 * was found in part is neither lost nor taken for a whole one. */
static void check_shortage(fattn_device *device)
{
    draw_case c;
    judge_truth truth = {.known = false};
    judge_verdict verdict;
    const char *missing = NULL;
    bool fine = true, failed = true;
    tiny_case(&c, 8, 4, 1);
    kind = ADDED, where = DRAW_O, amount = 0;
    const fattn_kernel *const row = device->backend->kernel(device->impl, 0, &missing);
    const int64_t alive = fattn_memory_alive();
    int n = 0;
    while (failed) {
        (void)fattn_fail(FATTN_OK, "the reason of another failure");
        (void)fattn_memory_fail_at(++n);
        judge_run(device, row, judged, &truth, &verdict);
        failed = fattn_memory_fail_at(0);
        fine = fine && (!failed || strstr(verdict.reason, "no memory for "));
        if (failed && !strstr(verdict.reason, "no memory for ")) {
            printf("# allocation %d: %s\n", n, verdict.reason);
        }
    }
    fine = fine && verdict.outcome == JUDGE_PASSED && n > 3;
    judge_truth_free(&truth);
    const int64_t lost = fattn_memory_alive() - alive;
    tap_check(fine && lost == 0, "each of %d allocations fails: %d blocks are lost", n - 1,
              (int)lost);
    draw_free(&c);
}

int main(void)
{
    fattn_device *device = NULL;
    if (fattn_device_open("reference", &device) != FATTN_OK) {
        tap_check(false, "the reference: %s", fattn_last_reason());
        return tap_done();
    }
    faulty = *device->backend;
    right = faulty.run;
    faulty.run = run;
    fattn_device fake = *device;
    fake.backend = &faulty;
    fake.references = 1000; /* plans hold references, and must never close it */
    const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < 3; n++) {
        check(&fake, dtypes[n], FATTN_FORWARD, DRAW_O);
        check(&fake, dtypes[n], FATTN_BACKWARD, DRAW_DQ);
        check(&fake, dtypes[n], FATTN_BACKWARD, DRAW_DK);
        check(&fake, dtypes[n], FATTN_BACKWARD, DRAW_DV);
    }
    check_signs(&fake);
    check_written(&fake);
    check_shortage(&fake);
    fattn_device_close(device);
    return tap_done();
}
