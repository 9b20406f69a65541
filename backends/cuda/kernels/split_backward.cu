/* SPDX-License-Identifier: Apache-2.0 */
/* Image "split_backward": split_backward_<width>_<queries>x<keys> for each shape of mma.h, and what
 * runs before and after. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* Turing has no code here */

#include "backends/cuda/split_backward.cuh"

#define SPLIT_ENTRY(width, queries, keys, warps, tiles, sums, dq)                                  \
    GPU_KERNEL(32 * warps, 1)                                                                      \
    split_backward_##width##_##queries##x##keys(const GPU_PARAM fattn_gpu_args g)                  \
    {                                                                                              \
        split_backward_all<split_backward_shape<width, queries, keys, warps, tiles, sums, dq>>(g); \
    }                                                                                              \
    GPU_KERNEL(SPLIT_ROWS_THREADS, 1)                                                              \
    split_backward_rows_##width##_##queries##x##keys(const GPU_PARAM fattn_gpu_args g)             \
    {                                                                                              \
        split_rows_all<width, tiles>(g);                                                           \
    }
SPLIT_BACKWARD_SHAPES(SPLIT_ENTRY)

MMA_ROWS(split_backward_dq_64, (void), mma_finish_row<64>)
MMA_ROWS(split_backward_dq_128, (void), mma_finish_row<128>)

#endif
