/* SPDX-License-Identifier: Apache-2.0 */
/* Image "matrix_backward": matrix_backward_<variant>_<type>_<width> for each shape of
 * matrix_backward.h, and the kernels before and after it. */
#include "backends/hip/vendor.h"

#if MATRIX_MFMA || MATRIX_WMMA /* for other processors the image is empty */

#include "backends/hip/matrix_backward.cuh"

/* On MFMA, two waves should fit a SIMD if registers allow it; on gfx950 they miss it by one. */
#if MATRIX_MFMA && !defined(__gfx950__)
#define MATRIX_WAVES(width, lean) (lean && width < 256 ? 2 : 1)
#else
#define MATRIX_WAVES(width, lean) 1
#endif

#define MATRIX_ENTRY(name, type, width, queries, keys, waves, lean)                             \
    GPU_KERNEL(waves *GPU_WAVE, 1)                                                              \
    GPU_WAVES(MATRIX_WAVES(width, lean)) name(const GPU_PARAM fattn_gpu_args g)                 \
    {                                                                                           \
        matrix_backward_all<matrix_backward_shape<type, width, queries, keys, waves, lean>>(g); \
    }
#define MATRIX_PAIR(type, width, ...)                                                            \
    MATRIX_ENTRY(matrix_backward_lean_##type##_##width, matrix_##type, width, __VA_ARGS__, true) \
    MATRIX_ENTRY(matrix_backward_full_##type##_##width, matrix_##type, width, __VA_ARGS__, false)
#if defined(__gfx90a__) /* it has no rows for f16 (matrix_backward.c) */
#define MATRIX_ENTRIES(...) MATRIX_PAIR(bf16, __VA_ARGS__)
#else
#define MATRIX_ENTRIES(...) MATRIX_PAIR(f16, __VA_ARGS__) MATRIX_PAIR(bf16, __VA_ARGS__)
#endif
#if MATRIX_MFMA
MATRIX_BACKWARD_MFMA(MATRIX_ENTRIES)
#else
MATRIX_BACKWARD_WMMA(MATRIX_ENTRIES)
#endif

GPU_BACKWARD_CLEAR

GPU_KERNEL(256, 1) sums_clear(const GPU_PARAM fattn_gpu_args g) { matrix_sums_clear(g); }

GPU_KERNEL(256, 1) sums_store(const GPU_PARAM fattn_gpu_args g)
{
    const int64_t keys = g.problem.dbias_stride[3] ? g.problem.seqlen_k : 1;
    const int64_t rows = fattn_quotient(matrix_sums(g), keys); /* not launched without keys */
    for (int64_t n = gpu_block(); n < rows; n += gpu_blocks()) {
        matrix_store_dbias_row(g, n);
    }
}

/* (void): there is no counter of items, since these kernels have no deterministic runs. */
GPU_BACKWARD_ROWS(64, (void), (void))
GPU_BACKWARD_ROWS(128, (void), (void))
#if MATRIX_MFMA /* WMMA has no kernel rows of this width */
GPU_BACKWARD_ROWS(256, (void), (void))
#endif

#endif
