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

MMA_ROWS(mma_backward_rows_64, mma_clear_taken<64>, mma_save_row<64>)
MMA_ROWS(mma_backward_rows_128, mma_clear_taken<128>, mma_save_row<128>)
MMA_ROWS(mma_backward_rows_256, mma_clear_taken<256>, mma_save_row<256>)
MMA_ROWS(mma_backward_dq_64, (void), mma_finish_row<64>)
MMA_ROWS(mma_backward_dq_128, (void), mma_finish_row<128>)
MMA_ROWS(mma_backward_dq_256, (void), mma_finish_row<256>)

GPU_KERNEL(256, 1) mma_backward_clear(const GPU_PARAM fattn_gpu_args g)
{
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    const int64_t rows =
        (stride[0] ? p.batch : 1) * (stride[1] ? p.heads_q : 1) * (stride[2] ? p.seqlen_q : 1);
    for (int64_t n = gpu_block(); n < rows; n += gpu_blocks()) {
        mma_clear_dbias(g, n);
    }
}

#define MMA_SINK(name, width)                                                     \
    GPU_KERNEL(256, 1) name(const GPU_PARAM fattn_gpu_args g)                     \
    {                                                                             \
        GPU_SHARED float sums[256];                                               \
        for (int64_t h = gpu_block(); h < g.problem.heads_q; h += gpu_blocks()) { \
            mma_sink_head<width, 256>(g, sums, h);                                \
        }                                                                         \
    }
MMA_SINK(mma_backward_sink_64, 64)
MMA_SINK(mma_backward_sink_128, 128)
MMA_SINK(mma_backward_sink_256, 256)

#endif
