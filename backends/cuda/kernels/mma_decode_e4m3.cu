/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_decode_e4m3": mma_decode_<variant>_<width>_<keys> for each shape of mma.h whose keys
 * and values are in e4m3. Queries are f16 or bf16. */
#define FATTN_SMALL_QUOTIENTS /* fattn_cuda_too_large() */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/mma_decode.cuh"

#define MMA_ENTRY(name, blocks, features, width, keys, warps, stages)                             \
    GPU_KERNEL(32 * warps, blocks)                                                                \
    mma_decode_##name##_##width##_##keys(const GPU_PARAM fattn_gpu_args g)                        \
    {                                                                                             \
        mma_decode_all<mma_decode_shape<mma_e4m3, width, keys, warps, stages, features, blocks>>( \
            g);                                                                                   \
    }
#define MMA_LEAN(...) MMA_ENTRY(e4m3, 2, 0, __VA_ARGS__)
#define MMA_WIDE(...) MMA_ENTRY(e4m3_wide, 1, 0, __VA_ARGS__)
#define MMA_FULL(...) MMA_ENTRY(e4m3_full, 2, MMA_ANY, __VA_ARGS__)
MMA_DECODE_E4M3_SHAPES(MMA_LEAN)
MMA_DECODE_E4M3_WIDE_SHAPES(MMA_WIDE)
MMA_DECODE_E4M3_FULL_SHAPES(MMA_FULL)

GPU_COMBINE

#endif
