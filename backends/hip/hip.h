/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of backend "hip" share. */
#ifndef FATTN_HIP_HIP_H
#define FATTN_HIP_HIP_H

#include "backends/gpu/gpu.h"

/* Processors by number (gfx942 is 0x942) whose matrix units the kernels support (vendor.h): MFMA on
 * these three, and WMMA from HIP_WMMA on, before HIP_WMMA_PAST. */
enum {
    HIP_GFX90A = 0x90a, /* its matrix units flush subnormal f16 inputs to 0 */
    HIP_GFX942 = 0x942,
    HIP_GFX950 = 0x950,
    HIP_WMMA = 0x1100,
    HIP_WMMA_PAST = 0x1250
};

/* Not a range: gfx90c, between them, is a graphics processor without MFMA. */
static inline bool fattn_hip_has_mfma(int isa)
{
    return isa == HIP_GFX90A || isa == HIP_GFX942 || isa == HIP_GFX950;
}

/* Rows on matrix units (matrix.c, matrix_backward.c), best first; the last has no name. */
extern const fattn_gpu_kernel fattn_hip_matrix[], fattn_hip_matrix_backward[];

#endif
