/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_backward": mma_backward_<variant>_<type>_<width>_<queries>x<keys> for each shape of
 * mma.h. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* Turing has no code here */

#include "backends/cuda/mma_backward.cuh"

#define MMA_ENTRY(name, type, width, queries, keys, lean, ordered)                                 \
    GPU_KERNEL(MMA_BACKWARD_THREADS, 1) name(const GPU_PARAM fattn_gpu_args g)                     \
    {                                                                                              \
        mma_backward_all<mma_backward_shape<type, width, queries, keys, MMA_BACKWARD_THREADS / 32, \
                                            lean, ordered>>(g);                                    \
    }
#define MMA_PAIR(variant, width, queries, keys, lean, ordered)                                    \
    MMA_ENTRY(mma_backward_##variant##_f16_##width##_##queries##x##keys, mma_f16, width, queries, \
              keys, lean, ordered)                                                                \
    MMA_ENTRY(mma_backward_##variant##_bf16_##width##_##queries##x##keys, mma_bf16, width,        \
              queries, keys, lean, ordered)
#define MMA_ENTRIES(width, queries, keys)               \
    MMA_PAIR(lean, width, queries, keys, true, false)   \
    MMA_PAIR(ordered, width, queries, keys, true, true) \
    MMA_PAIR(full, width, queries, keys, false, false)
MMA_BACKWARD_SHAPES(MMA_ENTRIES)

GPU_BACKWARD_CLEAR
GPU_BACKWARD_ROWS(64)
GPU_BACKWARD_ROWS(128)
GPU_BACKWARD_ROWS(256)

#endif
