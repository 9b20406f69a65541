/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that a divided problem takes on a rank, told by one process without the others: what
 * its shares hold, and what fattn_group_plan_create() would reserve beside them. */
#ifndef FATTN_DISTRIBUTED_NEEDS_H
#define FATTN_DISTRIBUTED_NEEDS_H

#include "fattn/distributed.h"

typedef struct fattn_group_needs {
    int64_t tensors;   /* bytes of a rank's shares of all operands */
    int64_t plan;      /* bytes of its plan: fattn_group_plan_bytes() */
    int64_t workspace; /* those among them that are the kernels' own */
    int64_t turns;     /* that heads take */
    int64_t slices;    /* of keys in each of them */
} fattn_group_needs;

/* The most on any of `ranks`; of more than 16, of the first, the middle one and the last. Of the
 * group all is read but transport and timeout. */
fattn_status fattn_group_foresee(const fattn_group *group, int64_t ranks,
                                 const fattn_problem *problem, const int32_t *cu_q,
                                 const int32_t *cu_k, fattn_group_needs *needs);

#endif
