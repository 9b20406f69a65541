/* SPDX-License-Identifier: Apache-2.0 */
/* Fills in the kernel arguments that follow from the plan alone. */
#include "backends/gpu/args.h"

#include "backends/gpu/gpu.h"
#include "backends/gpu/packed.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "core/tensors.h"

/* The tensor's bit in fattn_gpu_args.quads and .chunks. */
static unsigned bit_of(int tensor)
{
    static const unsigned bits[FATTN_TENSORS] = {
        [FATTN_TENSOR_Q] = FATTN_GPU_QUADS_Q,       [FATTN_TENSOR_K] = FATTN_GPU_QUADS_K,
        [FATTN_TENSOR_V] = FATTN_GPU_QUADS_V,       [FATTN_TENSOR_O] = FATTN_GPU_QUADS_O,
        [FATTN_TENSOR_DOUT] = FATTN_GPU_QUADS_DOUT, [FATTN_TENSOR_DQ] = FATTN_GPU_QUADS_DQ,
        [FATTN_TENSOR_DK] = FATTN_GPU_QUADS_DK,     [FATTN_TENSOR_DV] = FATTN_GPU_QUADS_DV,
    };
    return bits[tensor];
}

void fattn_gpu_args_fill(const fattn_problem *p, const fattn_tiling *tiling, fattn_gpu_args *args)
{
    /* A sink is given in natural units, so its scores cannot fold the scale into their unit, and
     * with FATTN_DESCALE the scale differs from item to item. */
    const bool scaled = p->features & (FATTN_SINK | FATTN_DESCALE);
    const unsigned terms = (scaled ? FATTN_SCORE_SCALE : 0) |
                           (p->features & FATTN_SOFTCAP ? FATTN_SCORE_CAP : 0) |
                           (p->features & FATTN_BIAS ? FATTN_SCORE_BIAS : 0) |
                           (p->features & FATTN_ALIBI ? FATTN_SCORE_ALIBI : 0);
    fattn_tensor tensors[FATTN_TENSORS];
    fattn_tensors_of(p, tensors);
    args->problem = *p;
    args->tiling = *tiling;
    args->rule = fattn_score_rule_make(terms, p->scale, p->softcap);
    args->dtype_gradient = fattn_gradient_dtype(p, p->dtype);
    args->dropout_threshold =
        p->features & FATTN_DROPOUT ? fattn_dropout_threshold(p->dropout_p) : 0;
    args->group = fattn_problem_group(p);
    args->counters = -1;
    args->key_tiles = p->op == FATTN_BACKWARD ? fattn_gpu_key_tiles(p, tiling) : 0;
    const int64_t sums = fattn_gpu_dbias_sums(p, args->sums_stride);
    args->sums = sums > 0 ? tiling->workspace - gpu_floats(sums) : -1;
    args->quads = args->chunks = 0;
    for (int n = 0; n < FATTN_TENSORS; n++) {
        const int64_t quad = 4 * fattn_dtype_size(tensors[n].dtype);
        args->quads |= fattn_tensor_is_aligned(p, &tensors[n], quad) ? bit_of(n) : 0;
        args->chunks |= fattn_tensor_is_aligned(p, &tensors[n], 16) ? bit_of(n) : 0;
    }
}
