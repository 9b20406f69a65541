/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_forward": mma_<run>_<type>_<width>_<rows>x<keys> for each shape of mma.h, and the scan
 * kernels that run before them, mma_scan_<keys>. */
#define FATTN_SMALL_QUOTIENTS /* fattn_cuda_too_large() */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/mma_forward.cuh"
#include "backends/gpu/combine.cuh"

#define MMA_ENTRY(name, type, features, width, rows, keys, stages, tiles, warps, blocks)  \
    GPU_KERNEL(32 * warps, blocks) name(const GPU_PARAM fattn_gpu_args g)                 \
    {                                                                                     \
        mma_forward_all<mma_shape<type, width, tiles, warps, keys, features, stages>>(g); \
    }
#define MMA_ENTRIES(run, features, width, rows, keys, ...)                                       \
    MMA_ENTRY(mma_##run##_f16_##width##_##rows##x##keys, mma_f16, features, width, rows, keys,   \
              __VA_ARGS__)                                                                       \
    MMA_ENTRY(mma_##run##_bf16_##width##_##rows##x##keys, mma_bf16, features, width, rows, keys, \
              __VA_ARGS__)
MMA_SHAPES(MMA_ENTRIES)

MMA_SCAN_ENTRY(mma, 32)
MMA_SCAN_ENTRY(mma, 64)
MMA_SCAN_ENTRY(mma, 128)

GPU_COMBINE

#endif
