/* SPDX-License-Identifier: Apache-2.0 */
/* Butterfly reductions: the sum, or the maximum, over TEAM adjacent threads of a wave (a power of
 * two). All of them get the result. */
#ifndef FATTN_GPU_TEAM_CUH
#define FATTN_GPU_TEAM_CUH

#include "backends/gpu/args.h"

template <int TEAM> GPU_DEVICE float gpu_team_sum(float x)
{
    GPU_UNROLL
    for (int n = 1; n < TEAM; n *= 2) {
        x += gpu_shfl_xor(x, n);
    }
    return x;
}

/* A NaN may be dropped. */
template <int TEAM> GPU_DEVICE float gpu_team_max(float x)
{
    GPU_UNROLL
    for (int n = 1; n < TEAM; n *= 2) {
        x = gpu_max(x, gpu_shfl_xor(x, n));
    }
    return x;
}

template <int TEAM> GPU_DEVICE int32_t gpu_team_max(int32_t x)
{
    GPU_UNROLL
    for (int n = 1; n < TEAM; n *= 2) {
        const float bits = gpu_shfl_xor(fattn_f32_from_bits((uint32_t)x), n);
        const int32_t other = (int32_t)fattn_f32_bits(bits);
        x = other > x ? other : x;
    }
    return x;
}

#endif
