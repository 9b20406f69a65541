/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that a divided problem needs on a rank, computed by one process without the others:
 * that of its shares, and that which fattn_group_plan_create() would allocate. */
#ifndef FATTN_DISTRIBUTED_NEEDS_H
#define FATTN_DISTRIBUTED_NEEDS_H

#include "fattn/distributed.h"

typedef struct fattn_group_needs {
    int64_t tensors;   /* bytes of a rank's shares of all operands */
    int64_t plan;      /* bytes of its plan: fattn_group_plan_bytes() */
    int64_t workspace; /* of these the workspace of kernels */
    int64_t saved;     /* besides: fattn_group_plan_saved_bytes() */
    int64_t turns;     /* of heads */
    int64_t slices;    /* of keys, in each turn */
} fattn_group_needs;

/* The needs of the rank that needs most; of more than 16 ranks only the first, the middle and the
 * last are computed. The group's transport and timeout are not read. */
fattn_status fattn_group_foresee(const fattn_group *group, int64_t ranks,
                                 const fattn_problem *problem, const int32_t *cu_q,
                                 const int32_t *cu_k, fattn_group_needs *needs);

#endif
