/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the rows of Hopper's forward kernels (wgmma.c, wgmma_halves.c) and those of its backward
 * kernels (wgmma_backward.c) share: fields, bounds, and the tensor maps by which both copy
 * (wgmma_maps.c).
 */
#ifndef FATTN_CUDA_WGMMA_ROWS_H
#define FATTN_CUDA_WGMMA_ROWS_H

#include "backends/cuda/cuda.h"
#include "backends/cuda/wgmma.h"

/* Fields that all these rows have: those of fattn_kernel, and of fattn_gpu_kernel around it. */
#define WGMMA_ANY_ROW(channels) \
    .dtypes = FATTN_GPU_HALVES, .dim_max = channels, .align = 16, .must_fit = true
#define WGMMA_KERNEL(image_, channels) \
    .image = image_, .isa = 90, .isa_past = 100, .needs = "sm_90", .width = channels

/* The same for forward, and the features of its lean rows. Some of these take
 * FATTN_BATCH_INVARIANT, too. */
#define WGMMA_FORWARD_ROW(channels) \
    WGMMA_ANY_ROW(channels), .ops = FATTN_OP_BIT(FATTN_FORWARD), .packs_groups = true
#define WGMMA_FEATURES ((FATTN_GPU_LEAN & ~FATTN_BATCH_INVARIANT) | FATTN_SINK)

#define WGMMA_COUNT_MAX 0x1p31 /* bound of items, of rows of all heads, and of scanned tiles */

/* Whether a row of half as many channels would be too narrow. If not, this row would spend half of
 * its products on zeros, so it leaves to mma.c what the narrower one declines. */
static inline bool fattn_wgmma_needs_width(const fattn_kernel *row, const fattn_problem *p)
{
    const int width = fattn_gpu_kernel_of(row)->width;
    return width == 64 || p->dim > width / 2 || p->dim_v > width / 2;
}

/* For forward rows: why one cannot take the problem, or NULL; how many blocks of `rows` rows the
 * problem has; whether sequences may differ in lengths or positions; the kernel that clears the
 * counter of items, and the forward kernel of a row; and the maps of queries, keys and values. */
const char *fattn_wgmma_cannot_forward(const fattn_kernel *row, const fattn_problem *problem);
double fattn_wgmma_blocks_of(const fattn_problem *problem, int64_t rows);
bool fattn_wgmma_sequences_differ(const fattn_problem *problem);
fattn_gpu_phase fattn_wgmma_clear, fattn_wgmma_forward;
fattn_gpu_maps fattn_wgmma_forward_maps;

/* For those that split keys (wgmma_cut.c): the number of pieces into which a run cuts the keys of
 * all sequences, on so many units that each hold a block or a cluster, or 0 if each sequence is cut
 * by its own length, as always if there are fewer than `fewest`; the workspace; the kernel that
 * cuts, the forward kernel, and the one that merges. */
int64_t fattn_wgmma_pieces(const fattn_kernel *row, const fattn_problem *problem, int64_t units,
                           int64_t fewest);
int64_t fattn_wgmma_parts_workspace(const fattn_kernel *row, const fattn_problem *problem,
                                    const fattn_tiling *tiling);
fattn_gpu_phase fattn_wgmma_cut, fattn_wgmma_split, fattn_wgmma_merge;

/* Why a row cannot take the problem's lengths, strides or scale, or NULL. */
const char *fattn_wgmma_cannot(const fattn_kernel *row, const fattn_problem *problem);

/* Whether a tensor map can describe a bias or mask of `bytes` bytes per element, with an axis that
 * steps by `group` heads. Its address must also be a multiple of 16, which the kernel checks. */
bool fattn_wgmma_term_is_mapped(const int64_t stride[4], int64_t bytes, int64_t group);

/* fattn_wgmma_map() begins a map of the tensor whose pointer is at that offset of fattn_buffers:
 * its first axis has `dim` channels, 64 in a box. fattn_wgmma_term_map() begins one of the bias or
 * mask, with boxes of 128 bytes along keys. fattn_wgmma_axis_add() appends another axis; one of
 * stride 0 gets one element. */
fattn_gpu_map fattn_wgmma_map(size_t buffer, int64_t dim);
fattn_gpu_map fattn_wgmma_term_map(const fattn_problem *problem, uint64_t feature);
void fattn_wgmma_axis_add(fattn_gpu_map *map, int64_t extent, int64_t stride, int box);

/* Maps of keys or values with `keys` of them in a box, and of queries or dO of single heads with
 * `rows` of them in a box. */
fattn_gpu_map fattn_wgmma_keys_map(const fattn_problem *problem, size_t buffer, int64_t dim,
                                   const fattn_strides *strides, int keys);
fattn_gpu_map fattn_wgmma_rows_map(const fattn_problem *problem, size_t buffer, int64_t dim,
                                   const fattn_strides *strides, int rows);

#endif
