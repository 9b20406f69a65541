/* SPDX-License-Identifier: Apache-2.0 */
/* Image "simt_wide": simt_wide_<channels> for each shape of simt_wide.h. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/simt_wide.cuh"
#include "backends/gpu/combine.cuh"

#define WIDE_ENTRY(channels, rows, keys, lines)                                        \
    GPU_KERNEL(WIDE_THREADS, 2) simt_wide_##channels(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                  \
        wide_all<wide_shape<channels, rows, keys, lines>>(g);                          \
    }
WIDE_SHAPES(WIDE_ENTRY)

GPU_COMBINE

#endif
