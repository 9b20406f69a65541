/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_decode": mma_decode_<variant>_<type>_<width>_<keys> for each shape of mma.h. */
#define FATTN_SMALL_QUOTIENTS /* fattn_cuda_too_large() */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/mma_decode.cuh"

#define MMA_ENTRY(name, blocks, type, features, width, keys, warps, stages)                      \
    GPU_KERNEL(32 * warps, blocks) name(const GPU_PARAM fattn_gpu_args g)                        \
    {                                                                                            \
        mma_decode_all<mma_decode_shape<type, width, keys, warps, stages, features, blocks>>(g); \
    }
#define MMA_ENTRIES(name, blocks, features, width, keys, ...)                                     \
    MMA_ENTRY(mma_decode_##name##_f16_##width##_##keys, blocks, mma_f16, features, width, keys,   \
              __VA_ARGS__)                                                                        \
    MMA_ENTRY(mma_decode_##name##_bf16_##width##_##keys, blocks, mma_bf16, features, width, keys, \
              __VA_ARGS__)
#define MMA_BOTH(...)                    \
    MMA_ENTRIES(lean, 2, 0, __VA_ARGS__) \
    MMA_ENTRIES(full, 2, MMA_ANY, __VA_ARGS__)
#define MMA_WIDE(...) MMA_ENTRIES(wide, 1, 0, __VA_ARGS__)
MMA_DECODE_SHAPES(MMA_BOTH)
MMA_DECODE_WIDE_SHAPES(MMA_WIDE)

GPU_COMBINE

#endif
