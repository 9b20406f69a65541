/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_full_64". For sm_90a alone. */
#include "backends/cuda/wgmma_full.cuh"

WGMMA_FULL_64(WGMMA_FULL_ENTRIES)
WGMMA_SCAN_ENTRY(64, 128)
WGMMA_SCAN_ENTRY(64, 64)
WGMMA_BLOCKS_ENTRY(64, 128, 2)
