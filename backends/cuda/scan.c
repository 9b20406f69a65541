/* SPDX-License-Identifier: Apache-2.0 */
/* The launch of a scan kernel, which reads a bias or a mask before forward or backward, and its
 * workspace (scan.h, scan.cuh). */
#include "backends/cuda/scan.h"

#include "backends/cuda/cuda.h"
#include "backends/gpu/sizes.h"

int64_t fattn_cuda_scan_workspace(int64_t items, int64_t k_blocks)
{
    const int64_t bytes = gpu_times(items, SCAN_BYTES(k_blocks));
    return gpu_floats(bytes < 0 ? -1 : bytes / (int64_t)sizeof(float));
}

int64_t fattn_cuda_scan_heads(const fattn_problem *p, const int64_t stride[4])
{
    return (stride[0] ? p->batch : 1) * (stride[1] ? p->heads_k : 1);
}

bool fattn_cuda_scans(const fattn_problem *p, const fattn_tiling *t)
{
    return p->features & (FATTN_BIAS | FATTN_MASK) && t->items > 0 &&
           scan_runs(t->items, p->seqlen_k);
}

int64_t fattn_cuda_forward_workspace(const fattn_kernel *row, const fattn_problem *p,
                                     const fattn_tiling *t)
{
    const int64_t parts = fattn_cuda_parts_workspace(row, p, t);
    if (parts < 0 || !fattn_cuda_scans(p, t)) {
        return parts;
    }
    const int64_t bytes = fattn_cuda_scan_workspace(t->heads * t->q_blocks, t->k_blocks);
    return bytes < 0 || parts > INT64_MAX - bytes ? -1 : parts + bytes;
}

/* A block scans a tile of keys of an item. A bias or mask that heads or sequences share is scanned
 * once. */
void fattn_cuda_scan_shape(const fattn_problem *p, const fattn_tiling *t, int64_t q_blocks,
                           fattn_gpu_shape *shape)
{
    const int64_t *const stride = p->features & FATTN_BIAS ? p->bias_stride : p->mask_stride;
    const int64_t heads = fattn_cuda_scan_heads(p, stride);
    shape->blocks = t->items > 0 ? gpu_times(heads * q_blocks, SCAN_BYTES(t->k_blocks)) : 0;
    shape->threads = SCAN_THREADS;
    shape->early = true;
    shape->resident = true;
}
