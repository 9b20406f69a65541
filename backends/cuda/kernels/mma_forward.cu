/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_forward": mma_<variant>_<type>_<width>_<rows>x<keys> for each shape of mma.h. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* Turing has no code here */

#include "backends/cuda/mma_forward.cuh"

enum { lean = true, full = false };

#define MMA_ENTRY(name, type, variant, width, rows, keys, stages, tiles, warps, blocks)  \
    GPU_KERNEL(32 * warps, blocks) name(const GPU_PARAM fattn_gpu_args g)                \
    {                                                                                    \
        mma_forward_all<mma_shape<type, width, tiles, warps, keys, variant, stages>>(g); \
    }
#define MMA_ENTRIES(variant, width, rows, keys, stages, ...)                                      \
    MMA_ENTRY(mma_##variant##_f16_##width##_##rows##x##keys, mma_f16, variant, width, rows, keys, \
              stages, __VA_ARGS__)                                                                \
    MMA_ENTRY(mma_##variant##_bf16_##width##_##rows##x##keys, mma_bf16, variant, width, rows,     \
              keys, stages, __VA_ARGS__)
MMA_SHAPES(MMA_ENTRIES)

GPU_COMBINE

#endif
