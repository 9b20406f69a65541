/* SPDX-License-Identifier: Apache-2.0 */
/* Image "verbs". */
#include "backends/hip/vendor.h"

#include "backends/gpu/peaks.cuh"
#include "backends/gpu/verbs.cuh"
