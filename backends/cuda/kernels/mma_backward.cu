/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_backward": mma_backward_<type>_<width>_<queries>x<keys> for each shape of mma.h. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* Turing has no code here */

#include "backends/cuda/mma_backward.cuh"

#define MMA_ENTRY(name, type, width, queries, keys)                                        \
    GPU_KERNEL(MMA_BACKWARD_THREADS, 1) name(const GPU_PARAM fattn_gpu_args g)             \
    {                                                                                      \
        mma_backward_all<                                                                  \
            mma_backward_shape<type, width, queries, keys, MMA_BACKWARD_THREADS / 32>>(g); \
    }
#define MMA_ENTRIES(width, queries, keys)                                                   \
    MMA_ENTRY(mma_backward_f16_##width##_##queries##x##keys, mma_f16, width, queries, keys) \
    MMA_ENTRY(mma_backward_bf16_##width##_##queries##x##keys, mma_bf16, width, queries, keys)
MMA_BACKWARD_SHAPES(MMA_ENTRIES)

MMA_ROWS(mma_backward_rows_64, mma_save_row<64>)
MMA_ROWS(mma_backward_rows_128, mma_save_row<128>)
MMA_ROWS(mma_backward_rows_256, mma_save_row<256>)
MMA_ROWS(mma_backward_dq_64, mma_finish_row<64>)
MMA_ROWS(mma_backward_dq_128, mma_finish_row<128>)
MMA_ROWS(mma_backward_dq_256, mma_finish_row<256>)

#endif
