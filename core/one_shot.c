/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fattn_attention(), which runs a plan from the cache with a workspace from the cache; and the
 * default device.
 */
#include "core/backend.h"
#include "core/cache.h"
#include "core/fork.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/status.h"

#define ALIGNMENT_MAX 16 /* kernels make no use of more, which would only multiply plans */

static fattn_device *default_device; /* under FATTN_FORK_DEFAULT */

static int64_t alignment_of(const fattn_buffers *b)
{
    const void *const tensors[] = {b->q, b->k, b->v, b->o, b->dout, b->dq, b->dk, b->dv};
    uintptr_t bits = ALIGNMENT_MAX;
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        bits |= (uintptr_t)tensors[i];
    }
    return (int64_t)(bits & (~bits + 1));
}

static fattn_status run(const fattn_loan *loan, const fattn_buffers *buffers, fattn_stream stream)
{
    fattn_buffers copy;
    const fattn_buffers *b = NULL;
    const fattn_plan *const plan = loan->plan;
    const fattn_status status = fattn_plan_check(plan, buffers, &copy, &b);
    if (status) {
        return status;
    }
    if (plan->device->backend->host_memory || fattn_plan_reads(plan, b)) {
        return fattn_plan_run(plan, b, loan->workspace, stream);
    }
    if (loan->capture) {
        return fattn_fail(FATTN_INVALID_ARGUMENT,
                          "buffers are in host memory, and the stream is being captured: a graph "
                          "cannot copy them and wait");
    }
    return fattn_plan_run_staged(plan, b, loan->workspace, stream);
}

static fattn_status attend(fattn_device *device, const fattn_problem *problem,
                           const fattn_buffers *buffers, fattn_stream stream)
{
    fattn_problem wanted;
    fattn_buffers given;
    fattn_status status = fattn_problem_read(&wanted, problem);
    status = status ? status : fattn_problem_check_alignment(&wanted);
    status = status ? status : fattn_buffers_read(&given, buffers);
    if (status) {
        return status;
    }
    wanted.pointer_alignment = alignment_of(&given);
    fattn_loan loan;
    status = fattn_cache_borrow(device, &wanted, stream, &loan);
    return status ? status : fattn_cache_return(&loan, stream, run(&loan, &given, stream));
}

fattn_status fattn_device_acquire(fattn_device **device)
{
    if (*device) {
        fattn_device_retain(*device);
        return FATTN_OK;
    }
    fattn_fork_lock(FATTN_FORK_DEFAULT);
    fattn_status status = FATTN_OK;
    if (!default_device) {
        status = fattn_device_open(NULL, &default_device);
    }
    if (!status) {
        *device = fattn_device_retain(default_device);
    }
    fattn_fork_unlock(FATTN_FORK_DEFAULT);
    return status;
}

fattn_status fattn_attention(fattn_device *device, const fattn_problem *problem,
                             const fattn_buffers *buffers, fattn_stream stream)
{
    if (!fattn_fork_is_guarded()) {
        return fattn_fail(FATTN_OUT_OF_MEMORY, "a handler of forks could not be registered");
    }
    if (device) {
        return attend(device, problem, buffers, stream);
    }
    fattn_status status = fattn_device_acquire(&device);
    if (!status) {
        status = attend(device, problem, buffers, stream);
        fattn_device_drop(device);
    }
    return status;
}

void fattn_cache_clear(void)
{
    fattn_cache_empty();
    fattn_fork_lock(FATTN_FORK_DEFAULT);
    fattn_device *const device = default_device;
    default_device = NULL;
    fattn_fork_unlock(FATTN_FORK_DEFAULT);
    fattn_device_drop(device);
}
