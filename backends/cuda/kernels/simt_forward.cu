/* SPDX-License-Identifier: Apache-2.0 */
/* Image "simt_forward". */
#include "backends/cuda/vendor.h"

#include "backends/gpu/simt_forward.cuh"

GPU_FORWARD(simt_wide_64, gpu_wide, 2, 64)
GPU_FORWARD(simt_wide_128, gpu_wide, 2, 128)
