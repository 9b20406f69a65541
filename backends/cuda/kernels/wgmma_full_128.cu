/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_full_128". For sm_90a alone. */
#include "backends/cuda/wgmma_full.cuh"

WGMMA_FULL_128(WGMMA_FULL_ENTRIES)
WGMMA_SCAN_ENTRY(128, 128)
WGMMA_SCAN_ENTRY(128, 64)
WGMMA_BLOCKS_ENTRY(128, 128, 2)
