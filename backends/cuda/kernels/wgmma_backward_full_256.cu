/* SPDX-License-Identifier: Apache-2.0 */
/* Image "wgmma_backward_full_256". For sm_90a alone. */
#include "backends/cuda/wgmma_backward_full.cuh"

WGMMA_BACKWARD_FULL_256(WGMMA_BACKWARD_FULL_PAIRS)
WGMMA_BACKWARD_FULL_ROWS(256, 64, 128, 2)
