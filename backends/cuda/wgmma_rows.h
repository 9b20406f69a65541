/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the rows of Hopper's forward kernels (wgmma.c) and those of its backward kernels
 * (wgmma_backward.c) share: fields, bounds, and the tensor maps by which both copy (wgmma_maps.c).
 */
#ifndef FATTN_CUDA_WGMMA_ROWS_H
#define FATTN_CUDA_WGMMA_ROWS_H

#include "backends/cuda/cuda.h"
#include "backends/cuda/wgmma.h"

/* What rows have in common: fields of a row, and those around it. */
#define WGMMA_ANY_ROW(channels) \
    .dtypes = FATTN_GPU_HALVES, .dim_max = channels, .align = 16, .must_fit = true
#define WGMMA_KERNEL(image_, channels) \
    .image = image_, .isa = 90, .isa_past = 100, .needs = "sm_90", .width = channels

#define WGMMA_COUNT_MAX 0x1p31 /* items, rows of all heads, and tiles that are looked at */

/* Whether a row of half as many channels would be too narrow: half of this one's products would be
 * of zeros if it took what the other declines. */
static inline bool fattn_wgmma_needs_width(const fattn_kernel *row, const fattn_problem *p)
{
    const int width = fattn_gpu_kernel_of(row)->width;
    return width == 64 || p->dim > width / 2 || p->dim_v > width / 2;
}

/* Why a row of either takes no such lengths, strides or scale, or NULL. */
const char *fattn_wgmma_cannot(const fattn_kernel *row, const fattn_problem *problem);

/* Whether a map takes a bias or mask of so many bytes an element, with a stride of `group` heads.
 * Whether its address is a multiple of 16 is known only when it runs: the kernel asks. */
bool fattn_wgmma_term_is_mapped(const int64_t stride[4], int64_t bytes, int64_t group);

/* A map of `dim` channels, 64 to a box, of what lies at that offset of fattn_buffers; and of the
 * bias or mask, in rows of 128 bytes. Their other axes are appended: one of stride 0, which all
 * share, has one element. */
fattn_gpu_map fattn_wgmma_map(size_t buffer, int64_t dim);
fattn_gpu_map fattn_wgmma_term_map(const fattn_problem *problem, uint64_t feature);
void fattn_wgmma_axis_add(fattn_gpu_map *map, int64_t extent, int64_t stride, int box);

/* Maps of keys or values, and of queries or dO head by head, with so many of them in a box. */
fattn_gpu_map fattn_wgmma_keys_map(const fattn_problem *problem, size_t buffer, int64_t dim,
                                   const fattn_strides *strides, int keys);
fattn_gpu_map fattn_wgmma_rows_map(const fattn_problem *problem, size_t buffer, int64_t dim,
                                   const fattn_strides *strides, int rows);

#endif
