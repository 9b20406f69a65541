/* SPDX-License-Identifier: Apache-2.0 */
/* Entries of the images "wgmma_backward_full_64", "_128", "_256": for each shape of wgmma.h
 * wgmma_backward_<run>_<type>_<width>, and the kernels before and after them. */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_FULL_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_FULL_CUH

#include "backends/cuda/vendor.h"

#define FATTN_SMALL_QUOTIENTS /* cannot_backward() of wgmma_backward.c */
#include "backends/cuda/wgmma_backward.cuh"
#include "backends/cuda/wgmma_backward_before.cuh"
#include "backends/cuda/wgmma_backward_rows.cuh"

typedef struct wgmma_backward_full_maps {
    /* q, k, v, dO, dK, dV, and a bias or mask if that is the only feature of pairs */
    wgmma_map map[7];
} wgmma_backward_full_maps;

#define WGMMA_BACKWARD_FULL_ENTRY(cluster, name, type, features, dbias, width, queries, keys,     \
                                  stages, term_stages)                                            \
    GPU_KERNEL(WGMMA_THREADS(2), 1)                                                               \
    cluster name(const GPU_PARAM fattn_gpu_args g, const GPU_PARAM wgmma_backward_full_maps maps) \
    {                                                                                             \
        wgmma_backward_all<wgmma_backward_shape<type, width, queries, keys, stages, features,     \
                                                dbias, term_stages>>(g, maps.map);                \
    }
#define WGMMA_BACKWARD_FULL_BOTH(cluster, run, features, dbias, width, ...)                     \
    WGMMA_BACKWARD_FULL_ENTRY(cluster, wgmma_backward_##run##_f16_##width, mma_f16, features,   \
                              dbias, width, __VA_ARGS__)                                        \
    WGMMA_BACKWARD_FULL_ENTRY(cluster, wgmma_backward_##run##_bf16_##width, mma_bf16, features, \
                              dbias, width, __VA_ARGS__)
#define WGMMA_BACKWARD_FULL_ENTRIES(...) WGMMA_BACKWARD_FULL_BOTH(, __VA_ARGS__)
#define WGMMA_BACKWARD_FULL_PAIRS(...) WGMMA_BACKWARD_FULL_BOTH(GPU_CLUSTER(2), __VA_ARGS__)

/* The kernels before and after, which depend only on the width. */
#define WGMMA_BACKWARD_FULL_ROWS(width, queries, keys, stages)                                    \
    GPU_KERNEL(SCAN_THREADS, 1) wgmma_scan_full_##width(const GPU_PARAM fattn_gpu_args g)         \
    {                                                                                             \
        wgmma_backward_scan_all<wgmma_backward_shape<mma_bf16, width, queries, keys, stages>>(g); \
    }                                                                                             \
    GPU_KERNEL(WGMMA_LISTED_MOST, 1) wgmma_list_full_##width(const GPU_PARAM fattn_gpu_args g)    \
    {                                                                                             \
        wgmma_list_all<wgmma_backward_shape<mma_bf16, width, queries, keys, stages>>(g);          \
    }                                                                                             \
    GPU_KERNEL(WGMMA_ROWS_THREADS, 1) wgmma_rows_full_##width(const GPU_PARAM fattn_gpu_args g)   \
    {                                                                                             \
        wgmma_rows_all<wgmma_backward_shape<mma_bf16, width, queries, keys, stages>>(g);          \
    }                                                                                             \
    GPU_KERNEL(WGMMA_ROWS_THREADS, 1) wgmma_dq_full_##width(const GPU_PARAM fattn_gpu_args g)     \
    {                                                                                             \
        wgmma_dq_all<wgmma_backward_shape<mma_bf16, width, queries, keys, stages>>(g);            \
    }                                                                                             \
    GPU_KERNEL(WGMMA_SINK_THREADS, 1) wgmma_sink_full_##width(const GPU_PARAM fattn_gpu_args g)   \
    {                                                                                             \
        wgmma_sink_all<wgmma_backward_shape<mma_bf16, width, queries, keys, stages>>(g);          \
    }

GPU_KERNEL(256, 1) wgmma_clear_dbias(const GPU_PARAM fattn_gpu_args g) { gpu_clear_dbias_rows(g); }

#endif
