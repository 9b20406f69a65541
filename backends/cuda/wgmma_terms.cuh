/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What forward and backward on Hopper both ask about scores, for a shape S that knows its features:
 * what dot products are multiplied by, and how a bias or mask that is alone lies in memory.
 */
#ifndef FATTN_CUDA_WGMMA_TERMS_CUH
#define FATTN_CUDA_WGMMA_TERMS_CUH

#include "backends/cuda/mma_terms.cuh"

/* What scores are multiplied by. With a sink, which is natural, the rule is for natural scores;
 * lean kernels do with dot products all the same. */
template <class S> GPU_DEVICE float wgmma_unit(const fattn_gpu_args &g)
{
    return S::IS_LEAN && g.rule.terms ? (float)(g.problem.scale * FATTN_LOG2E) : g.rule.unit;
}

/* Strides of the bias or mask that the kernel knows to be alone. */
template <class S> GPU_DEVICE const int64_t *wgmma_term_stride(const fattn_problem &p)
{
    return S::KNOWN == FATTN_BIAS ? p.bias_stride : p.mask_stride;
}

/* Whether its rows may be read 16 bytes at a time, and copied as tensor maps want them. */
template <class S> GPU_DEVICE bool wgmma_are_rows(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    return S::KNOWN == FATTN_BIAS ? mma_are_rows(g.buffers.bias, p.bias_stride, 2)
                                  : mma_are_rows(g.buffers.mask, p.mask_stride, 1);
}

#endif
