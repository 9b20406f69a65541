/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_forward_e4m3": wgmma_<type>_<name> for each shape of wgmma.h whose keys and values
 * are in e4m3, where <type> is that of q and o; `clear`, which clears their counter and orders
 * sequences; and the kernels that merge parts. For sm_90a alone. */
#include "backends/cuda/vendor.h"

#define FATTN_SMALL_QUOTIENTS /* wgmma.c takes no larger problems */
#include "backends/cuda/wgmma_cut.cuh"
#include "backends/cuda/wgmma_forward.cuh"
#include "backends/cuda/wgmma_forward_before.cuh"

typedef struct wgmma_e4m3_maps {
    wgmma_map map[3]; /* q, k, v */
} wgmma_e4m3_maps;

#define WGMMA_E4M3_ENTRY(name, type, result, width, width_v, warpgroups, keys, stages, stored) \
    GPU_KERNEL(WGMMA_E4M3_THREADS(warpgroups), 1)                                              \
    name(const GPU_PARAM fattn_gpu_args g, const GPU_PARAM wgmma_e4m3_maps maps)               \
    {                                                                                          \
        wgmma_forward_all<wgmma_shape<mma_f16, width, width_v, warpgroups, keys, stages, 0, 0, \
                                      result, 1, stored, type>>(g, maps.map, NULL);            \
    }
#define WGMMA_E4M3_ENTRIES(name, result, ...)                        \
    WGMMA_E4M3_ENTRY(wgmma_f16_##name, mma_f16, result, __VA_ARGS__) \
    WGMMA_E4M3_ENTRY(wgmma_bf16_##name, mma_bf16, result, __VA_ARGS__)
#define WGMMA_E4M3_WHOLE(name, ...) WGMMA_E4M3_ENTRIES(name, WGMMA_WHOLE, __VA_ARGS__)
#define WGMMA_E4M3_PARTS(name, ...) WGMMA_E4M3_ENTRIES(name, WGMMA_PARTS, __VA_ARGS__)
WGMMA_E4M3_SHAPES(WGMMA_E4M3_WHOLE)
WGMMA_E4M3_SPLIT_SHAPES(WGMMA_E4M3_PARTS)
GPU_COMBINE
WGMMA_CUT_KERNELS

GPU_KERNEL(WGMMA_LISTED_MOST, 1) clear(const GPU_PARAM fattn_gpu_args g) { wgmma_clear_all(g); }
