/* SPDX-License-Identifier: Apache-2.0 */
/* Image "bf16x3_forward": bf16x3_<run>_<width>_<rows>x<keys> for each shape of mma.h, and the scan
 * kernels that run before them, bf16x3_scan_<keys>. */
#define FATTN_SMALL_QUOTIENTS /* fattn_cuda_too_large() */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/bf16x3_forward.cuh"
#include "backends/gpu/combine.cuh"

#define BF16X3_ENTRY(run, features, width, rows, keys, tiles, warps, blocks)            \
    GPU_KERNEL(32 * warps, blocks)                                                      \
    bf16x3_##run##_##width##_##rows##x##keys(const GPU_PARAM fattn_gpu_args g)          \
    {                                                                                   \
        bf16x3_forward_all<mma_shape<mma_f32, width, tiles, warps, keys, features>>(g); \
    }
BF16X3_SHAPES(BF16X3_ENTRY)

MMA_SCAN_ENTRY(bf16x3, 64)
MMA_SCAN_ENTRY(bf16x3, 32)

GPU_COMBINE

#endif
