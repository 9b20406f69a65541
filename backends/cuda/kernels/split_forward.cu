/* SPDX-License-Identifier: Apache-2.0 */
/* Image "split_forward": split_forward_<width>_<rows>x<keys> for each shape of mma.h. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* Turing has no code here */

#include "backends/cuda/split_forward.cuh"

#define SPLIT_ENTRY(width, rows, keys, tiles, warps, blocks)                       \
    GPU_KERNEL(32 * warps, blocks)                                                 \
    split_forward_##width##_##rows##x##keys(const GPU_PARAM fattn_gpu_args g)      \
    {                                                                              \
        split_forward_all<mma_shape<mma_f32, width, tiles, warps, keys, true>>(g); \
    }
SPLIT_SHAPES(SPLIT_ENTRY)

GPU_KERNEL(128, 1) combine(const GPU_PARAM fattn_gpu_args g) { gpu_combine_all(g); }

#endif
