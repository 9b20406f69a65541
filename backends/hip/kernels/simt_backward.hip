/* SPDX-License-Identifier: Apache-2.0 */
/* Image "simt_backward". */
#include "backends/hip/vendor.h"

#include "backends/gpu/simt_backward.cuh"
