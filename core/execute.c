/* SPDX-License-Identifier: Apache-2.0 */
/* Running a plan: the pointers are checked, nothing is decided. */
#include "core/memory.h"
#include "core/plan.h"
#include "core/problem.h"
#include "core/status.h"

fattn_status fattn_plan_run(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                            fattn_stream stream)
{
    const fattn_backend *const backend = plan->device->backend;
    void *const impl = plan->device->impl;
    fattn_status status = FATTN_OK;
    if ((uintptr_t)workspace % FATTN_MEMORY_ALIGNMENT) {
        return fattn_fail(FATTN_MISALIGNED, "workspace is %p, not a multiple of %d", workspace,
                          FATTN_MEMORY_ALIGNMENT);
    }
    if (backend->host_memory && plan->problem.features & FATTN_VALIDATED) {
        status = fattn_buffers_validate(&plan->problem, buffers);
    }
    void *own = NULL;
    if (!status && !workspace && plan->tiling.workspace > 0) {
        status = fattn_device_take(plan->device, (size_t)plan->tiling.workspace, stream, &own);
    }
    if (status) {
        return status;
    }
    status = backend->run(plan, buffers, own ? own : workspace, stream);
    if (own) {
        fattn_reason_hold(status);
        const fattn_status waited = backend->stream_synchronize(impl, stream);
        fattn_reason_let();
        status = status ? status : waited;
        fattn_reason_hold(status);
        const fattn_status freed = fattn_device_give(plan->device, own);
        status = status ? status : freed;
        fattn_reason_let();
    }
    if (!status && plan->logs_tensors) {
        status = fattn_plan_log_tensors(plan, buffers, stream);
    }
    return status;
}

fattn_status fattn_plan_check(const fattn_plan *plan, const fattn_buffers *given,
                              fattn_buffers *copy, const fattn_buffers **checked)
{
    fattn_status status = FATTN_OK;
    *checked = given;
    if (!given || given->struct_size != sizeof *given ||
        !fattn_pointers_are_valid(&plan->pointers, given)) {
        status = fattn_buffers_normalise(&plan->problem, given, copy);
        *checked = copy;
    }
    if (status || fattn_unused_hold(&plan->unused, *checked)) {
        return status;
    }
    return fattn_buffers_check_unused(plan->problem.op, plan->features, *checked);
}

/* Refuses a workspace that overlaps a tensor. */
static fattn_status check_workspace(const fattn_plan *plan, const fattn_buffers *buffers,
                                    const void *workspace)
{
    const int64_t bytes = plan->tiling.workspace;
    if (!workspace || bytes == 0 ||
        fattn_pointers_avoid(&plan->pointers, buffers, workspace, (size_t)bytes)) {
        return FATTN_OK;
    }
    return fattn_buffers_check_workspace(&plan->problem, buffers, workspace, bytes);
}

fattn_status fattn_execute(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                           fattn_stream stream)
{
    if (!plan) {
        return fattn_fail(FATTN_NULL_POINTER, "plan is NULL");
    }
    fattn_buffers copy;
    const fattn_buffers *checked = NULL;
    fattn_status status = fattn_plan_check(plan, buffers, &copy, &checked);
    status = status ? status : check_workspace(plan, checked, workspace);
    return status ? status : fattn_plan_run(plan, checked, workspace, stream);
}

fattn_status fattn_plan_run_then_merge(const fattn_plan *plan, const fattn_buffers *buffers,
                                       const fattn_merge_job *job, void *workspace,
                                       fattn_stream stream)
{
    const fattn_status status = fattn_plan_run(plan, buffers, workspace, stream);
    return status ? status : plan->device->backend->merge(plan->device->impl, job, stream);
}

fattn_status fattn_execute_onto(const fattn_plan *plan, const fattn_buffers *buffers,
                                const fattn_merge_job *job, void *workspace, fattn_stream stream)
{
    fattn_buffers copy;
    const fattn_buffers *checked = NULL;
    const fattn_status status = fattn_plan_check(plan, buffers, &copy, &checked);
    if (status) {
        return status;
    }
    /* The log is about the run's own results, which run_onto() need not write anywhere. */
    return plan->logs_tensors
               ? fattn_plan_run_then_merge(plan, checked, job, workspace, stream)
               : plan->device->backend->run_onto(plan, checked, job, workspace, stream);
}
