/* SPDX-License-Identifier: Apache-2.0 */
/* Merges two states of a row, that is, o and lse over different keys. Used by a kernel of its own
 * (verbs.cuh), and by forward kernels that merge rows as they finish them (wgmma_forward.cuh). */
#ifndef FATTN_GPU_MERGE_CUH
#define FATTN_GPU_MERGE_CUH

#include "backends/gpu/scalar.h"
#include "core/merge.h"

/* Weight of a state relative to the larger lse: exactly 1 for the larger, 0 for an empty one. */
GPU_DEVICE float gpu_merge_weight(float lse, float largest)
{
    return lse == -fattn_f32_infinity() ? 0 : exp2f((lse - largest) * (float)FATTN_LOG2E);
}

/* The weights of two states, and the lse of both. */
typedef struct gpu_weights {
    float first, second, lse;
    bool no_first, no_second; /* the state is empty */
} gpu_weights;

GPU_DEVICE gpu_weights gpu_weights_of(float lse1, float lse2)
{
    const float empty = -fattn_f32_infinity();
    const float largest = lse1 > lse2 ? lse1 : lse2; /* a NaN reaches lse through its weight */
    gpu_weights w;
    w.no_first = lse1 == empty, w.no_second = lse2 == empty;
    w.first = gpu_merge_weight(lse1, largest), w.second = gpu_merge_weight(lse2, largest);
    w.lse = w.no_first    ? lse2
            : w.no_second ? lse1
                          : largest + log2f(w.first + w.second) * 0.693147180559945309417f;
    return w;
}

GPU_DEVICE float gpu_merged(const gpu_weights &w, float x1, float x2)
{
    return w.no_first    ? (w.no_second ? 0 : x2)
           : w.no_second ? x1
                         : (w.first * x1 + w.second * x2) / (w.first + w.second);
}

#endif
