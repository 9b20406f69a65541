/* SPDX-License-Identifier: Apache-2.0 */
/* Image "simt_forward". */
#include "backends/hip/vendor.h"

#include "backends/gpu/simt_forward.cuh"
