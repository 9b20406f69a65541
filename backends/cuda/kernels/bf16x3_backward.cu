/* SPDX-License-Identifier: Apache-2.0 */
/* Image "bf16x3_backward": bf16x3_backward_<width>_<queries>x<keys> for each shape of mma.h, and
 * the kernels before and after it. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/bf16x3_backward.cuh"

#define BF16X3_ENTRY(width, queries, keys, warps, tiles, sums, dq)                                \
    GPU_KERNEL(32 * warps, 1)                                                                     \
    bf16x3_backward_##width##_##queries##x##keys(const GPU_PARAM fattn_gpu_args g)                \
    {                                                                                             \
        bf16x3_backward_all<bf16x3_backward_shape<width, queries, keys, warps, tiles, sums, dq>>( \
            g);                                                                                   \
    }                                                                                             \
    GPU_KERNEL(BF16X3_ROWS_THREADS, 1)                                                            \
    bf16x3_backward_rows_##width##_##queries##x##keys(const GPU_PARAM fattn_gpu_args g)           \
    {                                                                                             \
        bf16x3_rows_all<width, tiles>(g);                                                         \
    }
BF16X3_BACKWARD_SHAPES(BF16X3_ENTRY)

GPU_ROWS(bf16x3_backward_dq_64, 64, any, (void), gpu_finish_row)
GPU_ROWS(bf16x3_backward_dq_128, 128, any, (void), gpu_finish_row)

#endif
