/* SPDX-License-Identifier: Apache-2.0 */
/* Image "mma_backward": mma_backward_<run>_<type>_<width>_<queries>x<keys> for each shape of mma.h
 * and each run: lean, ordered, and those of MMA_RUNS. */
#include "backends/cuda/vendor.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 /* for Turing the image is empty */

#include "backends/cuda/mma_backward.cuh"

#define MMA_ENTRY(name, type, width, queries, keys, variant, features)                             \
    GPU_KERNEL(MMA_BACKWARD_THREADS, 1) name(const GPU_PARAM fattn_gpu_args g)                     \
    {                                                                                              \
        mma_backward_all<mma_backward_shape<type, width, queries, keys, MMA_BACKWARD_THREADS / 32, \
                                            variant, features>>(g);                                \
    }
#define MMA_PAIR(run, features, variant, width, queries, keys)                                  \
    MMA_ENTRY(mma_backward_##run##_f16_##width##_##queries##x##keys, mma_f16, width, queries,   \
              keys, variant, features)                                                          \
    MMA_ENTRY(mma_backward_##run##_bf16_##width##_##queries##x##keys, mma_bf16, width, queries, \
              keys, variant, features)
#define MMA_ENTRIES(...)                                 \
    MMA_PAIR(lean, 0, MMA_LEAN, __VA_ARGS__)             \
    MMA_PAIR(ordered, 0, MMA_ORDERED, __VA_ARGS__)       \
    MMA_PAIR(full, MMA_ANY, MMA_EVERYTHING, __VA_ARGS__) \
    MMA_RUNS_OF_ONE(MMA_PAIR, MMA_ONE_OF_PAIRS, __VA_ARGS__)
MMA_BACKWARD_SHAPES(MMA_ENTRIES)

/* The descriptions of items do not depend on the type, so bf16 stands for both. */
#define MMA_ROWS_SHAPE(width, queries, keys) \
    mma_backward_shape<mma_bf16, width, queries, keys, MMA_BACKWARD_THREADS / 32, MMA_LEAN, 0>
#define MMA_ROWS(width, ...)                                                       \
    GPU_BACKWARD_ROWS(width, (mma_write_jobs<MMA_ROWS_SHAPE(width, __VA_ARGS__)>), \
                      (mma_write_packed_jobs<MMA_ROWS_SHAPE(width, __VA_ARGS__)>))
GPU_BACKWARD_CLEAR
MMA_BACKWARD_SHAPES(MMA_ROWS)

#endif
