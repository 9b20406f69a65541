/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_full_256". For sm_90a alone. */
#include "backends/cuda/wgmma_full.cuh"

WGMMA_FULL_256(WGMMA_FULL_ENTRIES)
WGMMA_SCAN_ENTRY(256, 64)
WGMMA_BLOCKS_ENTRY(256, 64, 2)
