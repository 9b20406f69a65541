/* SPDX-License-Identifier: Apache-2.0 */
/* Entries of the images "wgmma_full_64", "_128", "_256": wgmma_<run>_<type>_<width> for each shape
 * of wgmma.h, the kernel that clears their counter, and those that scan a bias, a mask or a block
 * mask for hidden keys. */
#ifndef FATTN_CUDA_WGMMA_FULL_CUH
#define FATTN_CUDA_WGMMA_FULL_CUH

#include "backends/cuda/vendor.h"

#define FATTN_SMALL_QUOTIENTS /* wgmma.c takes no larger problems */
#include "backends/cuda/wgmma_forward.cuh"
#include "backends/cuda/wgmma_forward_before.cuh"

typedef struct wgmma_full_maps {
    wgmma_map map[4]; /* q, k, v, and a bias or mask if that is the only feature of pairs */
} wgmma_full_maps;

#define WGMMA_FULL_ENTRY(name, type, features, width, warpgroups, keys, stages, term_stages) \
    GPU_KERNEL(WGMMA_THREADS(warpgroups), WGMMA_RESIDENT(width, warpgroups))                 \
    name(const GPU_PARAM fattn_gpu_args g, const GPU_PARAM wgmma_full_maps maps)             \
    {                                                                                        \
        wgmma_forward_all<                                                                   \
            wgmma_shape<type, width, width, warpgroups, keys, stages, features, term_stages, \
                        WGMMA_WHOLE, WGMMA_RESIDENT(width, warpgroups)>>(g, maps.map, NULL); \
    }
#define WGMMA_FULL_ENTRIES(run, features, width, ...)                                  \
    WGMMA_FULL_ENTRY(wgmma_##run##_f16_##width, mma_f16, features, width, __VA_ARGS__) \
    WGMMA_FULL_ENTRY(wgmma_##run##_bf16_##width, mma_bf16, features, width, __VA_ARGS__)

/* The scan of a bias or a mask, which runs instead of `clear`. */
#define WGMMA_SCAN_ENTRY(width, keys) \
    GPU_KERNEL(SCAN_THREADS, 1)       \
    wgmma_scan_##width##_##keys(const GPU_PARAM fattn_gpu_args g) { wgmma_scan_all<keys>(g); }

/* The scan of a block mask. */
#define WGMMA_BLOCKS_ENTRY(width, keys, stages)                                                   \
    GPU_KERNEL(WGMMA_BLOCK_THREADS, 1) wgmma_blocks_##width(const GPU_PARAM fattn_gpu_args g)     \
    {                                                                                             \
        wgmma_blocks_all<wgmma_shape<mma_bf16, width, width, 2, keys, stages, FATTN_BLOCK_MASK>>( \
            g);                                                                                   \
    }

GPU_KERNEL(WGMMA_LISTED_MOST, 1) clear(const GPU_PARAM fattn_gpu_args g) { wgmma_clear_all(g); }

#endif
