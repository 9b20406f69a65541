/* SPDX-License-Identifier: Apache-2.0 */
/* Integers over the lanes of a warp: the sum, the largest, and the sum over the lanes up to this
 * one. All lanes must call these functions. */
#ifndef FATTN_CUDA_MMA_WARP_CUH
#define FATTN_CUDA_MMA_WARP_CUH

#include "backends/cuda/vendor.h"

GPU_DEVICE int mma_warp_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }
GPU_DEVICE int mma_warp_largest(int x) { return __reduce_max_sync(0xffffffffu, x); }

GPU_DEVICE uint32_t mma_warp_up_to(uint32_t x)
{
    GPU_UNROLL
    for (int lanes = 1; lanes < GPU_WAVE; lanes *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, x, lanes);
        x += gpu_thread() % GPU_WAVE >= lanes ? other : 0;
    }
    return x;
}

#endif
