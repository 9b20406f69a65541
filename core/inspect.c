/* SPDX-License-Identifier: Apache-2.0 */
/* fattn_inspect(): scores and probabilities, which attention never writes down. */
#include <string.h>

#include "core/abi.h"
#include "core/backend.h"
#include "core/dtype.h"
#include "core/operands.h"
#include "core/problem.h"
#include "core/status.h"

void fattn_inspect_args_init(fattn_inspect_args *args)
{
    memset(args, 0, sizeof *args);
    args->struct_size = sizeof *args;
    args->what = FATTN_SCORES;
}

fattn_status fattn_inspect_refuse(void *impl, const fattn_problem *problem,
                                  const fattn_buffers *buffers, const fattn_inspect_args *args)
{
    (void)impl, (void)problem, (void)buffers, (void)args;
    return fattn_fail(FATTN_UNSUPPORTED,
                      "this backend cannot write scores; devices in host memory can");
}

/* Checks the numbers and fills in defaults. */
static fattn_status complete(const fattn_problem *p, fattn_inspect_args *a)
{
    if (a->what != FATTN_SCORES && a->what != FATTN_PROBABILITIES) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "what is %d, no fattn_inspection", (int)a->what);
    }
    if (a->reserved) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "reserved is %u, not 0", (unsigned)a->reserved);
    }
    if (p->op != FATTN_FORWARD) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "op is backward, and only a forward has scores");
    }
    bool given = false;
    for (int axis = 0; axis < 4; axis++) {
        given = given || a->stride[axis] != 0;
        if (a->stride[axis] < 0 || a->stride[axis] > INT64_MAX / 8) {
            return fattn_fail(FATTN_INVALID_STRIDE, "stride[%d] is %lld, %s", axis,
                              (long long)a->stride[axis],
                              a->stride[axis] < 0 ? "negative" : "whose bytes overflow 63 bits");
        }
    }
    const int64_t extent[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    int64_t stride = 1;
    for (int axis = 3; axis >= 0 && !given; axis--) {
        a->stride[axis] = stride;
        if (__builtin_mul_overflow(stride, extent[axis] ? extent[axis] : 1, &stride) ||
            stride > INT64_MAX / 8) {
            return fattn_fail(FATTN_OVERFLOW, "to has 2^63 bytes or more");
        }
    }
    return FATTN_OK;
}

static fattn_status check_memory(const fattn_problem *p, const fattn_buffers *buffers,
                                 const fattn_inspect_args *a)
{
    const int64_t size = fattn_dtype_size(fattn_statistics_dtype(p));
    const fattn_region to = {
        .base = (uintptr_t)a->to,
        .extent = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k},
        .stride = {a->stride[0] * size, a->stride[1] * size, a->stride[2] * size,
                   a->stride[3] * size},
        .run = size,
    };
    int64_t bytes = 0;
    if (!fattn_region_span(&to, &bytes)) {
        return fattn_fail(FATTN_OVERFLOW, "to spans 2^63 bytes or more");
    }
    if (bytes && !a->to) {
        return fattn_fail(FATTN_NULL_POINTER, "to is NULL");
    }
    if (to.base % (uintptr_t)size) {
        return fattn_fail(FATTN_MISALIGNED, "to is %p, not a multiple of %lld", a->to,
                          (long long)size);
    }
    if (fattn_region_overlaps_itself(&to)) {
        return fattn_fail(FATTN_OVERLAP, "to overlaps itself");
    }
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(p, buffers, operands);
    for (int i = 0; i < count; i++) {
        if (fattn_operand_is_present(&operands[i]) &&
            fattn_regions_overlap(&to, &operands[i].region)) {
            return fattn_fail(FATTN_OVERLAP, "to overlaps %s", operands[i].name);
        }
    }
    return FATTN_OK;
}

fattn_status fattn_inspect(fattn_device *device, const fattn_problem *problem,
                           const fattn_buffers *buffers, const fattn_inspect_args *args)
{
    fattn_problem p;
    fattn_buffers b;
    fattn_inspect_args a;
    fattn_status status = fattn_abi_read(&a, sizeof a, args, "fattn_inspect_args");
    status = status ? status : fattn_problem_normalise(problem, &p);
    status = status ? status : complete(&p, &a);
    p.outputs = 0; /* outputs are not written, and their pointers may be NULL */
    status = status ? status : fattn_buffers_normalise(&p, buffers, &b);
    status = status ? status : fattn_buffers_check_unused(p.op, problem->features, &b);
    status = status ? status : check_memory(&p, &b, &a);
    status = status ? status : fattn_device_acquire(&device);
    if (status) {
        return status;
    }
    if (device->backend->host_memory) {
        status = fattn_buffers_validate(&p, &b);
    }
    status = status ? status : device->backend->inspect(device->impl, &p, &b, &a);
    fattn_device_drop(device);
    return status;
}
