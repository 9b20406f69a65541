/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of backend "cuda" share: its tables of kernel rows, and functions of rows. */
#ifndef FATTN_CUDA_H
#define FATTN_CUDA_H

#include "backends/gpu/gpu.h"

/* Rows on tensor cores, best first; the last has no name. Those of Hopper (wgmma.c,
 * wgmma_halves.c, wgmma_backward.c) exist only if the build has code for it. */
extern const fattn_gpu_kernel fattn_cuda_wgmma[], fattn_cuda_wgmma_halves[];
extern const fattn_gpu_kernel fattn_cuda_wgmma_backward[];
extern const fattn_gpu_kernel fattn_cuda_mma[];
extern const fattn_gpu_kernel fattn_cuda_bf16x3[]; /* f32, bf16x3.c */
/* Rows of plain multiply-adds (simt_wide.c). */
extern const fattn_gpu_kernel fattn_cuda_wide[];

/* For rows whose kernels divide only 32-bit numbers (FATTN_SMALL_QUOTIENTS): why they cannot take a
 * problem that is too large, or NULL; and the workspace of forward rows, -1 if a given number of
 * splits makes too many parts. The planner's own choice never does. */
const char *fattn_cuda_too_large(const fattn_kernel *row, const fattn_problem *problem);
int64_t fattn_cuda_parts_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                   const fattn_tiling *tiling);

/* A scan kernel runs before forward or backward. It reads the bias or the mask, and finds the tiles
 * that need no work (scan.h, scan.cuh). This sets its shape except its entry. q_blocks: tiles of
 * queries of a key/value head. */
void fattn_cuda_scan_shape(const fattn_problem *problem, const fattn_tiling *tiling,
                           int64_t q_blocks, fattn_gpu_shape *shape);

/* How many key/value heads, over all sequences, have a bias or mask of their own, given its
 * strides. */
int64_t fattn_cuda_scan_heads(const fattn_problem *problem, const int64_t stride[4]);

/* Workspace for the results of a scan of `items` items; -1 on overflow. */
int64_t fattn_cuda_scan_workspace(int64_t items, int64_t k_blocks);

/* Whether a scan kernel runs before forward by mma.sync, for f32 too; and the workspace of these
 * rows: parts of keys, and the results of the scan behind them, -1 on overflow (mma_scan.cuh). */
bool fattn_cuda_scans(const fattn_problem *problem, const fattn_tiling *tiling);
int64_t fattn_cuda_forward_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                     const fattn_tiling *tiling);

/* Fields of rows that need Ampere or newer. */
#define FATTN_CUDA_AMPERE .isa = 80, .needs = "sm_80 or newer"

/* Fields of rows whose keys and values have the types `bits` and not that of queries; 0: that of
 * queries alone. */
#define FATTN_CUDA_CACHES(bits) .dtypes_kv = (bits), .caches_alone = (bits) != 0

/* How finely keys are split: so that the parts fill whole rounds of all multiprocessors. */
fattn_split_cost fattn_cuda_split_evenly(const fattn_kernel *row, const fattn_problem *p,
                                         const fattn_limits *limits);

/* Whether a causal mask leaves queries about half of the keys on average: there are at least half
 * as many queries as keys. */
bool fattn_cuda_mask_halves_keys(const fattn_problem *p);

/* fattn_cuda_split_evenly() for a row that takes many queries, perhaps under a causal mask. */
fattn_split_cost fattn_cuda_split_forward(const fattn_kernel *row, const fattn_problem *p,
                                          const fattn_limits *limits);

#endif
