/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan fixes of the arguments of its kernels. */
#include "backends/gpu/args.h"

#include "backends/gpu/gpu.h"
#include "backends/gpu/sizes.h"
#include "core/dtype.h"
#include "core/problem.h"

/* Whether rows of a tensor begin at multiples of so many bytes: by their strides, and by what is
 * promised of the pointer. */
static bool is_aligned(const fattn_problem *p, const fattn_strides *s, fattn_dtype dtype,
                       int64_t bytes)
{
    const int64_t elements = bytes / fattn_dtype_size(dtype);
    return p->pointer_alignment >= bytes && s->batch % elements == 0 && s->seq % elements == 0 &&
           s->head % elements == 0;
}

void fattn_gpu_args_fill(const fattn_problem *p, const fattn_tiling *tiling, fattn_gpu_args *args)
{
    const unsigned terms = (p->features & FATTN_SINK ? FATTN_SCORE_SCALE : 0) | /* it is natural */
                           (p->features & FATTN_SOFTCAP ? FATTN_SCORE_CAP : 0) |
                           (p->features & FATTN_BIAS ? FATTN_SCORE_BIAS : 0) |
                           (p->features & FATTN_ALIBI ? FATTN_SCORE_ALIBI : 0);
    const fattn_dtype gradient = fattn_gradient_dtype(p, p->dtype);
    const struct {
        unsigned bit;
        const fattn_strides *strides;
        fattn_dtype dtype;
    } tensors[] = {
        {FATTN_GPU_QUADS_Q, &p->q, p->dtype},         {FATTN_GPU_QUADS_K, &p->k, p->dtype},
        {FATTN_GPU_QUADS_V, &p->v, p->dtype},         {FATTN_GPU_QUADS_O, &p->o, p->dtype_o},
        {FATTN_GPU_QUADS_DOUT, &p->dout, p->dtype_o}, {FATTN_GPU_QUADS_DQ, &p->dq, gradient},
        {FATTN_GPU_QUADS_DK, &p->dk, gradient},       {FATTN_GPU_QUADS_DV, &p->dv, gradient},
    };
    args->problem = *p;
    args->tiling = *tiling;
    args->rule = fattn_score_rule_make(terms, p->scale, p->softcap);
    args->dtype_gradient = gradient;
    args->dropout_threshold =
        p->features & FATTN_DROPOUT ? fattn_dropout_threshold(p->dropout_p) : 0;
    args->group = fattn_problem_group(p);
    args->counters = -1;
    const int64_t sums = fattn_gpu_sums(p, args->sums_stride);
    args->sums = sums > 0 ? tiling->workspace - gpu_floats(sums) : -1;
    args->quads = args->chunks = 0;
    for (size_t n = 0; n < sizeof tensors / sizeof tensors[0]; n++) {
        const fattn_strides *const strides = tensors[n].strides;
        const fattn_dtype dtype = tensors[n].dtype;
        if (is_aligned(p, strides, dtype, 4 * fattn_dtype_size(dtype))) {
            args->quads |= tensors[n].bit;
        }
        if (is_aligned(p, strides, dtype, 16)) {
            args->chunks |= tensors[n].bit;
        }
    }
}
