/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_forward_576": wgmma_<type>_<name> for each shape of wgmma.h whose warpgroups share
 * rows; `clear`, which clears their counter; wgmma_cut_lengths, which cuts sequences of different
 * lengths; and the kernels that merge parts. For sm_90a alone. */
#include "backends/cuda/vendor.h"

#define FATTN_SMALL_QUOTIENTS /* wgmma.c takes no larger problems */
#include "backends/cuda/wgmma_cut.cuh"
#include "backends/cuda/wgmma_halves.cuh"

typedef struct wgmma_halves_maps {
    wgmma_map map[3]; /* q, k, v */
} wgmma_halves_maps;

#define WGMMA_CLUSTER_1
#define WGMMA_CLUSTER_2 GPU_CLUSTER(2)
#define WGMMA_HALVES_ENTRY(name, type, result, width, blocks)                           \
    GPU_KERNEL(WGMMA_THREADS(2), 1)                                                     \
    WGMMA_CLUSTER_##blocks name(const GPU_PARAM fattn_gpu_args g,                       \
                                const GPU_PARAM wgmma_halves_maps maps)                 \
    {                                                                                   \
        wgmma_halves_all<wgmma_halves_shape<type, width, result, blocks>>(g, maps.map); \
    }
#define WGMMA_HALVES_WHOLE(name, width, width_v, blocks)                      \
    WGMMA_HALVES_ENTRY(wgmma_f16_##name, mma_f16, WGMMA_WHOLE, width, blocks) \
    WGMMA_HALVES_ENTRY(wgmma_bf16_##name, mma_bf16, WGMMA_WHOLE, width, blocks)
#define WGMMA_HALVES_PARTS(name, width, width_v, blocks)                      \
    WGMMA_HALVES_ENTRY(wgmma_f16_##name, mma_f16, WGMMA_PARTS, width, blocks) \
    WGMMA_HALVES_ENTRY(wgmma_bf16_##name, mma_bf16, WGMMA_PARTS, width, blocks)
WGMMA_HALVES_SHAPES(WGMMA_HALVES_WHOLE)
WGMMA_HALVES_SPLIT_SHAPES(WGMMA_HALVES_PARTS)
GPU_COMBINE
WGMMA_CUT_KERNELS

GPU_KERNEL(WGMMA_LISTED_MOST, 1) clear(const GPU_PARAM fattn_gpu_args g)
{
    gpu_admit_later();
    gpu_await_earlier();
    if (gpu_thread() == 0) {
        *(unsigned *)g.workspace = 0;
    }
}
