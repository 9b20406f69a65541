/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What forward and backward on Hopper share about scores: the factor of dot products, and the
 * memory layout of a bias or mask in kernels that have no other feature of pairs. S: a shape.
 */
#ifndef FATTN_CUDA_WGMMA_TERMS_CUH
#define FATTN_CUDA_WGMMA_TERMS_CUH

#include "backends/cuda/mma_terms.cuh"

/* The factor that turns scores into log2 units. With a sink, which is in natural units, g.rule is
 * for scores in natural units, but lean kernels still use dot products as scores. */
template <class S> GPU_DEVICE float wgmma_unit(const fattn_gpu_args &g)
{
    return S::IS_LEAN && g.rule.terms ? (float)(g.problem.scale * FATTN_LOG2E) : g.rule.unit;
}

/* Strides of the bias or mask, in kernels that have only this feature of pairs. */
template <class S> GPU_DEVICE const int64_t *wgmma_term_stride(const fattn_problem &p)
{
    return S::KNOWN == FATTN_BIAS ? p.bias_stride : p.mask_stride;
}

/* Whether its rows may be read 16 bytes at a time and copied by tensor maps. */
template <class S> GPU_DEVICE bool wgmma_are_rows(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    return S::KNOWN == FATTN_BIAS ? mma_are_rows(g.buffers.bias, p.bias_stride, 2)
                                  : mma_are_rows(g.buffers.mask, p.mask_stride, 1);
}

#endif
