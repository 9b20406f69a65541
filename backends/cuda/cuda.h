/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of backend "cuda". */
#ifndef FATTN_CUDA_H
#define FATTN_CUDA_H

#include "backends/gpu/gpu.h"

/* Rows of the tensor cores' kernels, best first; the last has no name. Those of Hopper (wgmma.c,
 * wgmma_backward.c) are there where the build has code for it. */
extern const fattn_gpu_kernel fattn_cuda_wgmma[], fattn_cuda_wgmma_backward[];
extern const fattn_gpu_kernel fattn_cuda_mma[];
extern const fattn_gpu_kernel fattn_cuda_bf16x3[]; /* f32, bf16x3.c */
/* And rows of plain multiply-adds (simt_wide.c). */
extern const fattn_gpu_kernel fattn_cuda_wide[];

/* What rows cannot take whose kernels divide 32-bit numbers alone (FATTN_SMALL_QUOTIENTS), and the
 * workspace of such forward rows, -1 where parts are too many: none for the planner's own. */
const char *fattn_cuda_too_large(const fattn_kernel *row, const fattn_problem *problem);
int64_t fattn_cuda_parts_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                   const fattn_tiling *tiling);

/* The shape, but for its entry, of a kernel that looks at a bias, or else a mask, before forward or
 * backward (seen.cuh). q_blocks: tiles of queries of a key/value head. */
void fattn_cuda_seen_shape(const fattn_problem *problem, const fattn_tiling *tiling,
                           int64_t q_blocks, fattn_gpu_shape *shape);

/* How many key/value heads of all sequences have their own of what has such strides. */
int64_t fattn_cuda_seen_heads(const fattn_problem *problem, const int64_t stride[4]);

/* Workspace for what such a kernel finds out about tiles of keys of so many items; -1 on
 * overflow. */
int64_t fattn_cuda_seen_workspace(int64_t items, int64_t k_blocks);

/* Whether such a kernel runs before forward by mma.sync, for f32 too; and the workspace of these
 * rows: parts of keys, and behind them what it finds out, -1 on overflow (mma_seen.cuh). */
bool fattn_cuda_looks(const fattn_problem *problem, const fattn_tiling *tiling);
int64_t fattn_cuda_forward_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                     const fattn_tiling *tiling);

/* Fields of rows from Ampere on. */
#define FATTN_CUDA_AMPERE .isa = 80, .needs = "sm_80 or newer"

/* What parts of the keys cost: they fill rounds of all multiprocessors. */
fattn_split_cost fattn_cuda_split_evenly(const fattn_kernel *row, const fattn_problem *p,
                                         const fattn_limits *limits);

/* Whether a mask is causal, and queries so many that they see half of the keys in the mean. */
bool fattn_cuda_sees_half(const fattn_problem *p);

/* fattn_cuda_split_evenly() of a row that many queries take, under a causal mask too. */
fattn_split_cost fattn_cuda_split_forward(const fattn_kernel *row, const fattn_problem *p,
                                          const fattn_limits *limits);

#endif
