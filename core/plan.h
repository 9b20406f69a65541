/* SPDX-License-Identifier: Apache-2.0 */
/* Making plans inside the library, where tests and tools may name a kernel, a tile and splits. */
#ifndef FATTN_CORE_PLAN_H
#define FATTN_CORE_PLAN_H

#include "core/backend.h"

/* fattn_plan_create with choices made by the caller; NULL and zeros leave them to the environment and
 * the planner. kernel is a row's name. */
fattn_status fattn_plan_create_with(fattn_device *device, const fattn_problem *problem, const char *kernel,
                                    const fattn_wish *wish, fattn_plan **plan);

/* Reference counting, for the one-shot cache. fattn_plan_destroy() gives a reference up. */
fattn_plan *fattn_plan_retain(fattn_plan *plan);

#endif
