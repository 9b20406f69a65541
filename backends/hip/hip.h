/* SPDX-License-Identifier: Apache-2.0 */
/* What the HIP backend has beside what GPUs share. */
#ifndef FATTN_HIP_HIP_H
#define FATTN_HIP_HIP_H

#include "backends/gpu/gpu.h"

/* Processors by number, as gfx942 is 0x942, with matrix units of a kind that the kernels know
 * (vendor.h): WMMA from one on and up to another, MFMA these three. */
enum {
    HIP_GFX90A = 0x90a, /* which takes subnormal halves for 0 */
    HIP_GFX942 = 0x942,
    HIP_GFX950 = 0x950,
    HIP_WMMA = 0x1100,
    HIP_WMMA_PAST = 0x1250
};

/* gfx90c, between them, is a graphics processor without such units. */
static inline bool fattn_hip_has_mfma(int isa)
{
    return isa == HIP_GFX90A || isa == HIP_GFX942 || isa == HIP_GFX950;
}

/* Rows for matrix units (matrix.c, matrix_backward.c), best first; the last has no name. */
extern const fattn_gpu_kernel fattn_hip_matrix[], fattn_hip_matrix_backward[];

#endif
