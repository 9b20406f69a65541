/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory for a problem, filled with random numbers for a benchmark. */
#ifndef FATTN_TOOLS_WORKLOAD_H
#define FATTN_TOOLS_WORKLOAD_H

#include "tools/bench/sweep.h"

enum { WORKLOAD_BLOCKS = 28 };

typedef struct workload {
    fattn_device *device;
    fattn_buffers buffers;        /* every input and output of the case's forward and backward */
    int64_t keys_bytes;           /* k and v together: v follows k in memory */
    void *block[WORKLOAD_BLOCKS]; /* device memory */
    int blocks;
} workload;

/* Inputs depend on the shapes alone: uniform in (-1, 1), including gradients. Call workload_free
 * even after a failure. */
fattn_status workload_create(fattn_device *device, const sweep_case *c, workload *w);
void workload_free(workload *w);

#endif
