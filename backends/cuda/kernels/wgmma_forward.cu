/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_forward": wgmma_<type>_<name> for each shape of wgmma.h; wgmma_onto_<type>_<name>,
 * which merge rows with o and lse of other keys; `clear`, which clears their counter and orders
 * sequences; and the kernels that merge parts. For sm_90a alone. */
#include "backends/cuda/vendor.h"

#define FATTN_SMALL_QUOTIENTS /* wgmma.c takes no larger problems */
#include "backends/cuda/wgmma_cut.cuh"
#include "backends/cuda/wgmma_forward.cuh"
#include "backends/cuda/wgmma_forward_before.cuh"

typedef struct wgmma_maps {
    wgmma_map map[3]; /* q, k, v */
} wgmma_maps;

#define WGMMA_ENTRY(name, type, result, width, width_v, warpgroups, keys, stages)       \
    GPU_KERNEL(WGMMA_THREADS(warpgroups), 1)                                            \
    name(const GPU_PARAM fattn_gpu_args g, const GPU_PARAM wgmma_maps maps)             \
    {                                                                                   \
        wgmma_forward_all<                                                              \
            wgmma_shape<type, width, width_v, warpgroups, keys, stages, 0, 0, result>>( \
            g, maps.map, NULL);                                                         \
    }
#define WGMMA_ONTO_ENTRY(name, type, width, width_v, warpgroups, keys, stages)                \
    GPU_KERNEL(WGMMA_THREADS(warpgroups), 1)                                                  \
    name(const GPU_PARAM fattn_gpu_args g, const GPU_PARAM wgmma_maps maps,                   \
         const GPU_PARAM fattn_merge_job onto)                                                \
    {                                                                                         \
        wgmma_forward_all<                                                                    \
            wgmma_shape<type, width, width_v, warpgroups, keys, stages, 0, 0, WGMMA_MERGED>>( \
            g, maps.map, &onto);                                                              \
    }
#define WGMMA_ENTRIES(name, ...)                                       \
    WGMMA_ENTRY(wgmma_f16_##name, mma_f16, WGMMA_WHOLE, __VA_ARGS__)   \
    WGMMA_ENTRY(wgmma_bf16_##name, mma_bf16, WGMMA_WHOLE, __VA_ARGS__) \
    WGMMA_ONTO_ENTRY(wgmma_onto_f16_##name, mma_f16, __VA_ARGS__)      \
    WGMMA_ONTO_ENTRY(wgmma_onto_bf16_##name, mma_bf16, __VA_ARGS__)
#define WGMMA_SHORT_ENTRY(name, type, width, width_v, warpgroups, keys, stages)                    \
    GPU_KERNEL(WGMMA_THREADS(warpgroups), WGMMA_SHORT_BLOCKS(width))                               \
    name(const GPU_PARAM fattn_gpu_args g, const GPU_PARAM wgmma_maps maps)                        \
    {                                                                                              \
        wgmma_forward_all<wgmma_shape<type, width, width_v, warpgroups, keys, stages, 0, 0,        \
                                      WGMMA_WHOLE, WGMMA_SHORT_BLOCKS(width)>>(g, maps.map, NULL); \
    }
#define WGMMA_SHORT_ENTRIES(name, ...)                        \
    WGMMA_SHORT_ENTRY(wgmma_f16_##name, mma_f16, __VA_ARGS__) \
    WGMMA_SHORT_ENTRY(wgmma_bf16_##name, mma_bf16, __VA_ARGS__)
#define WGMMA_SPLIT_ENTRIES(name, ...)                               \
    WGMMA_ENTRY(wgmma_f16_##name, mma_f16, WGMMA_PARTS, __VA_ARGS__) \
    WGMMA_ENTRY(wgmma_bf16_##name, mma_bf16, WGMMA_PARTS, __VA_ARGS__)
WGMMA_SHAPES(WGMMA_ENTRIES)
WGMMA_SHORT_SHAPES(WGMMA_SHORT_ENTRIES)
WGMMA_SPLIT_SHAPES(WGMMA_SPLIT_ENTRIES)
GPU_COMBINE
WGMMA_CUT_KERNELS

GPU_KERNEL(WGMMA_LISTED_MOST, 1) clear(const GPU_PARAM fattn_gpu_args g) { wgmma_clear_all(g); }
