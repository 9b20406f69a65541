/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_decode": mma_decode_<variant>_<type>_<width>_<keys> for each shape of mma.h. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* Turing has no code here */

#include "backends/cuda/mma_decode.cuh"

enum { lean = true, full = false };

#define MMA_ENTRY(name, type, variant, width, keys, warps, stages)                      \
    GPU_KERNEL(32 * warps, 2) name(const GPU_PARAM fattn_gpu_args g)                    \
    {                                                                                   \
        mma_decode_all<mma_decode_shape<type, width, keys, warps, stages, variant>>(g); \
    }
#define MMA_ENTRIES(width, keys, ...)                                                          \
    MMA_ENTRY(mma_decode_lean_f16_##width##_##keys, mma_f16, lean, width, keys, __VA_ARGS__)   \
    MMA_ENTRY(mma_decode_lean_bf16_##width##_##keys, mma_bf16, lean, width, keys, __VA_ARGS__) \
    MMA_ENTRY(mma_decode_full_f16_##width##_##keys, mma_f16, full, width, keys, __VA_ARGS__)   \
    MMA_ENTRY(mma_decode_full_bf16_##width##_##keys, mma_bf16, full, width, keys, __VA_ARGS__)
MMA_DECODE_SHAPES(MMA_ENTRIES)

GPU_COMBINE

#endif
