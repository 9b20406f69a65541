/* SPDX-License-Identifier: Apache-2.0 */
/* Image "simt_forward". */
#include "backends/cuda/vendor.h"

#include "backends/gpu/simt_forward.cuh"
