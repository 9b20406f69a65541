/* SPDX-License-Identifier: Apache-2.0 */
#include "core/distributed/needs.h"

#include <string.h>

#include "core/backend.h"
#include "core/distributed/group.h"
#include "core/integer.h"
#include "core/memory.h"
#include "core/operands.h"
#include "core/status.h"

/* Of up to ALL_MAX ranks the needs of all are computed, of more ranks only those of SOME, because a
 * plan has to be made for each. */
enum { ALL_MAX = 16, SOME = 3 };

/* Bytes of the rank's operands, without counting broadcast axes; of tensors over pairs those of the
 * rank's rows and all keys. */
static int64_t bytes_of_tensors(const fattn_group_plan *plan)
{
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(&plan->local, NULL, operands);
    int64_t all = 0;
    for (int n = 0; n < count; n++) {
        const fattn_region *const r = &operands[n].region;
        int64_t bytes = r->run;
        for (int axis = 0; axis < 4; axis++) {
            const bool keys = operands[n].kind == FATTN_OPERAND_SCORES && axis == 3;
            const int64_t extent = keys ? plan->problem.seqlen_k : r->extent[axis];
            bytes *= r->stride[axis] ? extent : 1;
        }
        all += fattn_region_is_empty(r) ? 0 : bytes;
    }
    return all;
}

/* The needs of one rank. `others` is the number of turns that another rank needs, or 0; once it is
 * known, the limit of memory need not be tried again. */
static fattn_status ask(const fattn_group *group, int64_t ranks, int64_t rank, int64_t others,
                        const fattn_problem *problem, const int32_t *cu_q, const int32_t *cu_k,
                        fattn_group_needs *needs)
{
    fattn_group_plan *const plan = fattn_memory_alloc(sizeof *plan);
    if (!plan) {
        return fattn_fail_memory(sizeof *plan, "the plan of a group");
    }
    fattn_transport transport = {.rank = (int32_t)rank, .ranks = (int32_t)ranks};
    fattn_device *device = group->device;
    fattn_device_info info;
    fattn_device_info_init(&info);
    fattn_status status = fattn_device_acquire(&device);
    status = status ? status : fattn_device_get_info(device, &info);
    transport.device_memory = !info.host_memory;
    fattn_group_begin_plan(group, &transport, plan);
    plan->device = device;
    plan->memory = others ? 0 : group->memory;
    plan->others = others;
    status = status ? status : fattn_group_describe(plan, problem, cu_q, cu_k);
    status = status ? status : fattn_group_size(plan);
    *needs = (fattn_group_needs){.tensors = status ? 0 : bytes_of_tensors(plan),
                                 .plan = plan->bytes,
                                 .workspace = plan->workspace_bytes,
                                 .saved = fattn_group_plan_saved_bytes(plan),
                                 .turns = plan->turns,
                                 .slices = plan->slices};
    fattn_reason_hold(status);
    fattn_group_plan_destroy(plan);
    fattn_reason_let();
    return status;
}

fattn_status fattn_group_foresee(const fattn_group *group, int64_t ranks,
                                 const fattn_problem *problem, const int32_t *cu_q,
                                 const int32_t *cu_k, fattn_group_needs *needs)
{
    const int64_t asked = ranks <= ALL_MAX ? ranks : SOME;
    int64_t others = 0, most = 0;
    fattn_status status = FATTN_OK;
    /* Repeated if ranks differ in the turns that they need: all take as many as the one that needs
     * most. */
    for (bool again = true; !status && again; others = most) {
        memset(needs, 0, sizeof *needs);
        again = false;
        for (int64_t n = 0; !status && n < asked; n++) {
            const int64_t rank = n * (ranks - 1) / fattn_max64(asked - 1, 1);
            fattn_group_needs own = {0};
            status = ask(group, ranks, rank, others, problem, cu_q, cu_k, &own);
            const int64_t turns = own.turns * own.slices, tensors = needs->tensors;
            again = again || (n > 0 && turns != most);
            most = fattn_max64(turns, most);
            *needs = own.plan > needs->plan || n == 0 ? own : *needs;
            needs->tensors = fattn_max64(own.tensors, tensors);
        }
    }
    return status;
}
