/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of backend "cuda". */
#ifndef FATTN_CUDA_H
#define FATTN_CUDA_H

#include "backends/gpu/gpu.h"

/* Rows of the tensor cores' kernels, best first; the last has no name. Those of Hopper (wgmma.c)
 * are there where the build has code for it. */
extern const fattn_gpu_kernel fattn_cuda_wgmma[];
extern const fattn_gpu_kernel fattn_cuda_mma[];
extern const fattn_gpu_kernel fattn_cuda_bf16x3[]; /* f32, bf16x3.c */
/* And rows of plain multiply-adds (simt_wide.c). */
extern const fattn_gpu_kernel fattn_cuda_wide[];

#endif
