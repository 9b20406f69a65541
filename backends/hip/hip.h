/* SPDX-License-Identifier: Apache-2.0 */
/* What the HIP backend has beside what GPUs share. */
#ifndef FATTN_HIP_HIP_H
#define FATTN_HIP_HIP_H

#include "backends/gpu/gpu.h"

/* Rows for matrix units (matrix.c, matrix_backward.c), best first; the last has no name. */
extern const fattn_gpu_kernel fattn_hip_matrix[], fattn_hip_matrix_backward[];

#endif
