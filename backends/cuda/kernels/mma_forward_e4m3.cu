/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_forward_e4m3": mma_<run>_<width>_<rows>x<keys> for each shape of mma_widen.h, and the
 * scan kernels that run before them. Queries are f16 or bf16. */
#define FATTN_SMALL_QUOTIENTS /* fattn_cuda_too_large() */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/mma_widen.cuh"
#include "backends/gpu/combine.cuh"

#define MMA_ENTRY(run, features, width, rows, keys, tiles, warps, blocks)       \
    GPU_KERNEL(32 * warps, blocks)                                              \
    mma_##run##_##width##_##rows##x##keys(const GPU_PARAM fattn_gpu_args g)     \
    {                                                                           \
        mma_widen_all<mma_widen_shape<width, tiles, warps, keys, features>>(g); \
    }
MMA_WIDEN_SHAPES(MMA_ENTRY)

MMA_SCAN_ENTRY(mma, 32)
MMA_SCAN_ENTRY(mma, 64)

GPU_COMBINE

#endif
