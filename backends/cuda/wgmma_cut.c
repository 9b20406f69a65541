/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For Hopper's rows whose kernels cut the keys of a batch by the lengths of all sequences
 * (wgmma_cut.cuh): how many pieces there are, the workspace, and the kernels before and after.
 */
#include <stdio.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/wgmma_rows.h"
#include "backends/gpu/sizes.h"
#include "core/integer.h"
#include "core/problem.h"

/* Whether sequences may differ and can be cut, in tiles of br rows. The kernel that merges reads
 * four floats of a part at a time. */
static bool can_cut(const fattn_problem *p, int64_t br)
{
    const uint64_t differ =
        FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q | FATTN_SEQUSED_K;
    const int64_t rows = fattn_min64(fattn_problem_rows(p), br);
    return p->features & differ && p->batch <= WGMMA_LISTED_MOST && p->dim_v % 4 == 0 &&
           rows % 2 == 0;
}

/* A part then has half of the work of a unit. Cutting does not pay if a sequence alone has so many
 * blocks of rows, or if there are few sequences, each of which has many parts in any case. */
int64_t fattn_wgmma_pieces(const fattn_kernel *row, const fattn_problem *p, int64_t units,
                           int64_t fewest)
{
    const int64_t pieces = WGMMA_CUT_ROUNDS * units, br = row->tiles[0].br;
    const bool pays = can_cut(p, br) && p->batch >= fewest &&
                      p->heads_k * fattn_ceil_div(fattn_problem_rows(p), br) < pieces;
    return pays ? pieces : 0;
}

int64_t fattn_wgmma_parts_workspace(const fattn_kernel *row, const fattn_problem *p,
                                    const fattn_tiling *t)
{
    if (!fattn_cuda_cuts(t)) {
        return fattn_cuda_parts_workspace(row, p, t);
    }
    fattn_tiling slots = *t;
    slots.items = wgmma_cut_slots(t);
    const int64_t parts = fattn_cuda_parts_workspace(row, p, &slots);
    const int64_t listed = p->batch * (int64_t)(sizeof(wgmma_listed) + 2 * sizeof(wgmma_cut));
    const int64_t more = WGMMA_WORKSPACE + fattn_ceil_div(listed, 256) * 256;
    return parts < 0 || parts > INT64_MAX - more ? -1 : parts + more;
}

void fattn_wgmma_cut(const fattn_gpu_kernel *kernel, const fattn_problem *p, const fattn_tiling *t,
                     fattn_gpu_shape *shape)
{
    (void)kernel, (void)p;
    snprintf(shape->entry, sizeof shape->entry, "wgmma_cut_lengths");
    shape->blocks = fattn_cuda_cuts(t) && t->items > 0;
    shape->threads = WGMMA_CUT_THREADS;
    shape->early = true;
}

/* If lengths differ and are not cut together, each item has a block of its own; otherwise a
 * resident grid takes them. */
void fattn_wgmma_split(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    fattn_wgmma_forward(kernel, p, t, shape);
    shape->resident = fattn_cuda_cuts(t) || !fattn_wgmma_sequences_differ(p);
}

void fattn_wgmma_merge(const fattn_gpu_kernel *kernel, const fattn_problem *p,
                       const fattn_tiling *t, fattn_gpu_shape *shape)
{
    fattn_gpu_combine(kernel, p, t, shape);
    if (fattn_cuda_cuts(t)) {
        const int64_t rows = fattn_min64(fattn_problem_rows(p), t->br);
        snprintf(shape->entry, sizeof shape->entry, "wgmma_merge_cut");
        shape->blocks = t->heads * t->q_blocks * fattn_ceil_div(rows, WGMMA_MERGE_ROWS);
        shape->threads = WGMMA_MERGE_THREADS;
    }
}
