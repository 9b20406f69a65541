/* SPDX-License-Identifier: Apache-2.0 */
/* Image "matrix_forward": matrix_<variant>_<type>_<width> for each shape of matrix.h. */
#include "backends/hip/vendor.h"

#if MATRIX_MFMA || MATRIX_WMMA /* for other processors the image is empty */

#include "backends/gpu/combine.cuh"
#include "backends/hip/matrix_forward.cuh"

/* On MFMA, two waves should fit a SIMD if registers allow it. On WMMA more fit anyway. */
#define MATRIX_WAVES(width, lean) (MATRIX_MFMA && lean && width < 256 ? 2 : 1)

#define MATRIX_ENTRY(name, type, width, rows, keys, held, lean)                   \
    GPU_KERNEL(2 * rows, 2)                                                       \
    GPU_WAVES(MATRIX_WAVES(width, lean)) name(const GPU_PARAM fattn_gpu_args g)   \
    {                                                                             \
        matrix_forward_all<matrix_shape<type, width, rows, keys, held, lean>>(g); \
    }
#define MATRIX_ENTRIES(width, ...)                                                \
    MATRIX_ENTRY(matrix_lean_f16_##width, matrix_f16, width, __VA_ARGS__, true)   \
    MATRIX_ENTRY(matrix_lean_bf16_##width, matrix_bf16, width, __VA_ARGS__, true) \
    MATRIX_ENTRY(matrix_full_f16_##width, matrix_f16, width, __VA_ARGS__, false)  \
    MATRIX_ENTRY(matrix_full_bf16_##width, matrix_bf16, width, __VA_ARGS__, false)
#if MATRIX_MFMA
MATRIX_MFMA_SHAPES(MATRIX_ENTRIES)
#else
MATRIX_WMMA_SHAPES(MATRIX_ENTRIES)
#endif

GPU_COMBINE

#endif
