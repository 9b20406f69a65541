/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of a run's buffers that only groups of ranks need; problem.h has those of every run. */
#ifndef FATTN_CORE_BUFFERS_H
#define FATTN_CORE_BUFFERS_H

#include "fattn/fattn.h"

/* fattn_buffers_normalise() for a backward that has q, k, v, o and lse from elsewhere: they are not
 * checked, and are NULL in *out. */
fattn_status fattn_buffers_normalise_rest(const fattn_problem *problem, const fattn_buffers *in,
                                          fattn_buffers *out);

/* Refuses memory that shares a byte with a tensor. `name` is for the reason. */
fattn_status fattn_buffers_check_apart(const fattn_problem *problem, const fattn_buffers *buffers,
                                       const char *name, const void *memory, int64_t bytes);

#endif
