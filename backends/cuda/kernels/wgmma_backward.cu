/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_backward": for each shape of wgmma.h wgmma_backward_<type>_<name>, and the kernels
 * before and after it. For sm_90a alone. */
#include "backends/cuda/vendor.h"

#define FATTN_SMALL_QUOTIENTS /* cannot_backward() of wgmma_backward.c */
#include "backends/cuda/wgmma_backward.cuh"
#include "backends/cuda/wgmma_backward_before.cuh"
#include "backends/cuda/wgmma_backward_rows.cuh"

typedef struct wgmma_backward_maps {
    wgmma_map map[6]; /* q, k, v, dO, dK, dV */
} wgmma_backward_maps;

#define WGMMA_BACKWARD_ENTRY(cluster, name, type, ...)                                       \
    GPU_KERNEL(WGMMA_THREADS(2), 1)                                                          \
    cluster name(const GPU_PARAM fattn_gpu_args g, const GPU_PARAM wgmma_backward_maps maps) \
    {                                                                                        \
        wgmma_backward_all<wgmma_backward_shape<type, __VA_ARGS__>>(g, maps.map);            \
    }
#define WGMMA_BACKWARD_BOTH(cluster, name, ...)                                    \
    WGMMA_BACKWARD_ENTRY(cluster, wgmma_backward_f16_##name, mma_f16, __VA_ARGS__) \
    WGMMA_BACKWARD_ENTRY(cluster, wgmma_backward_bf16_##name, mma_bf16, __VA_ARGS__)
#define WGMMA_BACKWARD_ROWS(name, ...)                                                    \
    GPU_KERNEL(WGMMA_LISTED_MOST, 1) wgmma_list_##name(const GPU_PARAM fattn_gpu_args g)  \
    {                                                                                     \
        wgmma_list_all<wgmma_backward_shape<mma_bf16, __VA_ARGS__>>(g);                   \
    }                                                                                     \
    GPU_KERNEL(WGMMA_ROWS_THREADS, 1) wgmma_rows_##name(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                     \
        wgmma_rows_all<wgmma_backward_shape<mma_bf16, __VA_ARGS__>>(g);                   \
    }                                                                                     \
    GPU_KERNEL(WGMMA_ROWS_THREADS, 1) wgmma_dq_##name(const GPU_PARAM fattn_gpu_args g)   \
    {                                                                                     \
        wgmma_dq_all<wgmma_backward_shape<mma_bf16, __VA_ARGS__>>(g);                     \
    }                                                                                     \
    GPU_KERNEL(WGMMA_SINK_THREADS, 1) wgmma_sink_##name(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                     \
        wgmma_sink_all<wgmma_backward_shape<mma_bf16, __VA_ARGS__>>(g);                   \
    }
#define WGMMA_BACKWARD_ALONE(name, ...)      \
    WGMMA_BACKWARD_BOTH(, name, __VA_ARGS__) \
    WGMMA_BACKWARD_ROWS(name, __VA_ARGS__)
#define WGMMA_BACKWARD_PAIR(name, ...)                                                  \
    WGMMA_BACKWARD_BOTH(GPU_CLUSTER(2), name, __VA_ARGS__)                              \
    WGMMA_BACKWARD_BOTH(GPU_CLUSTER(2), ordered_##name, __VA_ARGS__, 0, false, 0, true) \
    WGMMA_BACKWARD_ROWS(name, __VA_ARGS__)
WGMMA_BACKWARD_SHAPES(WGMMA_BACKWARD_ALONE)
WGMMA_BACKWARD_PAIRS(WGMMA_BACKWARD_PAIR)
