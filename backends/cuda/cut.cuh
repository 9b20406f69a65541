/* SPDX-License-Identifier: Apache-2.0 */
/* Lengths of a batch's sequences, for kernels that cut the keys by all of them: mma_cut.cuh and
 * wgmma_cut.cuh. They are those of gpu_sequence(), in fewer instructions, which every block runs
 * for every sequence; a wrong table of lengths gives another cut, and no wrong access. */
#ifndef FATTN_CUDA_CUT_CUH
#define FATTN_CUDA_CUT_CUH

#include "backends/gpu/args.h"
#include "core/integer.h"

/* How many rows sequence b has. Sequences may be packed or not, and use fewer rows than they
 * have. */
GPU_DEVICE int cut_rows(const int32_t *cu, const int32_t *used, int longest, int b)
{
    const int own = cu ? min(max(cu[b + 1] - cu[b], 0), longest) : longest;
    return used ? min(max(used[b], 0), own) : own;
}

/* The tiles of keys of sequence b, or as many as its queries see through a window. */
GPU_DEVICE int cut_tiles(const fattn_gpu_args &g, int b, int queries, int tile)
{
    const fattn_problem &p = g.problem;
    int keys =
        cut_rows(p.features & FATTN_CU_SEQLENS_K ? g.buffers.cu_seqlens_k : NULL,
                 p.features & FATTN_SEQUSED_K ? g.buffers.seqused_k : NULL, (int)p.seqlen_k, b);
    if (p.window_left >= 0 && p.window_right >= 0) {
        const int64_t left = fattn_min64(p.window_left, keys);
        const int64_t right = fattn_min64(p.window_right, keys);
        keys = (int)fattn_min64(keys, left + right + queries);
    }
    return (int)((keys + (tile - 1u)) / (uint32_t)tile);
}

/* Into how many parts so many tiles are cut, if a part has at most `size`. A sequence without keys
 * is a part, too. */
GPU_DEVICE int cut_parts(const fattn_gpu_args &g, int tiles, int size)
{
    return min(max((int)((uint32_t)(tiles + size - 1) / (uint32_t)size), 1), (int)g.tiling.splits);
}

#endif
