/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of plans for use inside the library. Tests and tools can also name a kernel, a tile and
 * splits. */
#ifndef FATTN_CORE_PLAN_H
#define FATTN_CORE_PLAN_H

#include "core/backend.h"

/* fattn_plan_create() with choices by the caller. kernel is a row's name. NULL for kernel or wish,
 * and zeros in wish, leave a choice to the environment and the planner. */
fattn_status fattn_plan_create_with(fattn_device *device, const fattn_problem *problem,
                                    const char *kernel, const fattn_wish *wish, fattn_plan **plan);

/* Adds a reference, for the cache of fattn_attention(). fattn_plan_destroy() drops one. */
fattn_plan *fattn_plan_retain(fattn_plan *plan);

/* Checks the buffers of a run. *checked becomes the caller's struct, or *copy, a normalised
 * copy, if the struct has another size or its addresses alone do not show that all is valid. */
fattn_status fattn_plan_check(const fattn_plan *plan, const fattn_buffers *given,
                              fattn_buffers *copy, const fattn_buffers **checked);

/* Runs a plan on normalised buffers that a kernel can read. workspace may be NULL. */
fattn_status fattn_plan_run(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                            fattn_stream stream);

/* fattn_execute(), but with the backend's run_onto(). The workspace is not checked: it must not be
 * NULL, must be aligned, and must not overlap a tensor. */
fattn_status fattn_execute_onto(const fattn_plan *plan, const fattn_buffers *buffers,
                                const fattn_merge_job *job, void *workspace, fattn_stream stream);

/* Whether the plan's device can read every operand of the run. */
bool fattn_plan_reads(const fattn_plan *plan, const fattn_buffers *buffers);

/* Copies the operands of a run from host memory to the device, runs the plan, copies the outputs
 * back and waits. workspace is device memory, or NULL. */
fattn_status fattn_plan_run_staged(const fattn_plan *plan, const fattn_buffers *buffers,
                                   void *workspace, fattn_stream stream);

/* Waits for the stream, and logs a line for each tensor of a run: the numbers of NaNs, infinities
 * and zeros, and the range of the finite values. */
fattn_status fattn_plan_log_tensors(const fattn_plan *plan, const fattn_buffers *buffers,
                                    fattn_stream stream);

#endif
