/* SPDX-License-Identifier: Apache-2.0 */
/* What the HIP backend has beside what GPUs share. */
#ifndef FATTN_HIP_HIP_H
#define FATTN_HIP_HIP_H

#include "backends/gpu/gpu.h"

/* Processors by number, as gfx942 is 0x942: from which on, and up to which, there are matrix units
 * of a kind that the kernels know (vendor.h). */
enum {
    HIP_MFMA = 0x90a,
    HIP_MFMA_F16 = 0x942, /* whose halves may be subnormal */
    HIP_MFMA_PAST = 0xa00,
    HIP_WMMA = 0x1100,
    HIP_WMMA_PAST = 0x1250
};

/* Rows for matrix units (matrix.c, matrix_backward.c), best first; the last has no name. */
extern const fattn_gpu_kernel fattn_hip_matrix[], fattn_hip_matrix_backward[];

#endif
