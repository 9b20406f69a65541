/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_backward_full_64". For sm_90a alone. */
#include "backends/cuda/wgmma_backward_full.cuh"

WGMMA_BACKWARD_FULL_64(WGMMA_BACKWARD_FULL_ENTRIES)
WGMMA_BACKWARD_FULL_ROWS(64, 64, 128, 3)
