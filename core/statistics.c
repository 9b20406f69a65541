/* SPDX-License-Identifier: Apache-2.0 */
/* The tensor statistics of FATTN_VERBOSE=3, for finding where a NaN comes from. */
#include <math.h>

#include "core/dtype.h"
#include "core/log.h"
#include "core/memory.h"
#include "core/operands.h"
#include "core/plan.h"
#include "core/status.h"

typedef struct census {
    int64_t count, nans, infinities, zeros;
    double least, greatest; /* of the finite values */
} census;

static void count_run(census *c, const char *elements, int64_t bytes, fattn_dtype dtype)
{
    const int64_t size = fattn_dtype_size(dtype);
    for (int64_t at = 0; at < bytes; at += size) {
        const double x = fattn_dtype_load(dtype, elements + at, 0);
        c->count++;
        c->nans += isnan(x) != 0;
        c->infinities += isinf(x) != 0;
        c->zeros += x == 0;
        if (isfinite(x)) {
            c->least = fmin(c->least, x);
            c->greatest = fmax(c->greatest, x);
        }
    }
}

static census take_census(const fattn_region *r, const char *first, fattn_dtype dtype)
{
    census c = {.least = INFINITY, .greatest = -INFINITY};
    for (int64_t x = 0; x < r->extent[0]; x++) {
        for (int64_t y = 0; y < r->extent[1]; y++) {
            for (int64_t z = 0; z < r->extent[2]; z++) {
                for (int64_t w = 0; w < r->extent[3]; w++) {
                    count_run(&c,
                              first + x * r->stride[0] + y * r->stride[1] + z * r->stride[2] +
                                  w * r->stride[3],
                              r->run, dtype);
                }
            }
        }
    }
    return c;
}

/* Reads the operand in place, or copies its span to the host first. */
static fattn_status log_operand(const fattn_plan *plan, const fattn_operand *operand,
                                fattn_stream stream)
{
    const fattn_backend *const backend = plan->device->backend;
    const char *first = (const char *)operand->region.base;
    int64_t bytes = 0;
    void *copy = NULL;
    fattn_status status = FATTN_OK;
    if (!backend->host_memory && fattn_region_span(&operand->region, &bytes)) {
        copy = fattn_memory_alloc((size_t)bytes);
        if (!copy) {
            return fattn_fail_memory(bytes, "tensor statistics");
        }
        status = backend->copy(plan->device->impl, copy, first, (size_t)bytes, stream);
        status = status ? status : backend->stream_synchronize(plan->device->impl, stream);
        first = copy;
    }
    if (!status) {
        const census c = take_census(&operand->region, first, operand->dtype);
        fattn_log("tensor %s %s: %lld elements, %lld NaN, %lld Inf, %lld zero, finite in %g..%g",
                  operand->name, fattn_dtype_name(operand->dtype), (long long)c.count,
                  (long long)c.nans, (long long)c.infinities, (long long)c.zeros, c.least,
                  c.greatest);
    }
    fattn_memory_free(copy);
    return status;
}

fattn_status fattn_plan_log_tensors(const fattn_plan *plan, const fattn_buffers *buffers,
                                    fattn_stream stream)
{
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(&plan->problem, buffers, operands);
    uint64_t capture = 0;
    fattn_status status =
        plan->device->backend->stream_capture(plan->device->impl, stream, &capture);
    if (status || capture) {
        return status; /* a captured run has not computed anything yet */
    }
    status = plan->device->backend->stream_synchronize(plan->device->impl, stream);
    for (int i = 0; !status && i < count; i++) {
        if (operands[i].dtype && fattn_operand_is_present(&operands[i])) {
            status = log_operand(plan, &operands[i], stream);
        }
    }
    return status;
}
