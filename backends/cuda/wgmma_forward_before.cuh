/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that run before forward on Hopper (wgmma_forward.cuh): they list sequences, or scan a
 * block mask, a bias or a mask for hidden keys.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_BEFORE_CUH
#define FATTN_CUDA_WGMMA_FORWARD_BEFORE_CUH

#include "backends/cuda/wgmma_forward_items.cuh"
#include "backends/cuda/wgmma_list.cuh"

/* --- Sequences -------------------------------------------------------------------------------- */

/* Clears the counter of items, and lists the sequences if that pays. */
GPU_DEVICE void wgmma_clear_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    if (gpu_thread() == 0) {
        *(unsigned *)g.workspace = 0;
    }
    const fattn_problem &p = g.problem;
    if (wgmma_lists(&p, g.tiling.items)) {
        const int queries = (int)g.tiling.br / wgmma_group_of(p);
        wgmma_list_sequences(p, wgmma_lists_behind(g, 0).listed, NULL, [&](int b) {
            const fattn_sequence seq = gpu_sequence(g, b);
            const int blocks = (int)fattn_quotient(seq.sq + queries - 1, queries);
            return wgmma_length{(int)seq.sk, blocks, 1};
        });
    }
}

/* --- Block masks ------------------------------------------------------------------------------ */

/* Scans a block mask, and writes a byte for each tile of keys of each item to the workspace
 * (scan.h). Also clears the counter of items. */
template <class S> GPU_DEVICE void wgmma_blocks_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t bytes = SCAN_BYTES(g.tiling.k_blocks);
    const int group = wgmma_group_of(p), queries = wgmma_tile_rows<S>(group) / group;
    fattn_tiling tiling = g.tiling; /* with the change that wgmma_plan_begin() makes */
    tiling.q_blocks = fattn_quotient(p.seqlen_q + queries - 1, queries);
    gpu_admit_later();
    gpu_await_earlier();
    if (gpu_block() == 0 && gpu_thread() == 0) {
        *(unsigned *)g.workspace = 0;
    }
    for (int64_t n = gpu_block() * WGMMA_BLOCK_THREADS + gpu_thread();
         n < tiling.heads * tiling.q_blocks * bytes; n += gpu_blocks() * WGMMA_BLOCK_THREADS) {
        const int64_t item = fattn_quotient(n, bytes), j0 = (n - item * bytes) * S::KEYS;
        const fattn_work work = fattn_schedule_item(&tiling, p.heads_k, item);
        gpu_pairs t;
        t.b = work.batch;
        t.seq = gpu_sequence(g, work.batch);
        const int64_t i0 = work.block * queries, i1 = fattn_min64(i0 + queries, t.seq.sq);
        gpu_mask_blocks found = {false, false};
        if (i0 < i1 && j0 < t.seq.sk) {
            found = gpu_mask_blocks_of(g, t, i0, i1, work.head * group, group, j0,
                                       fattn_min64(j0 + S::KEYS, t.seq.sk), 0, 1);
        }
        wgmma_bytes_of<S>(g, tiling, work)[n - item * bytes] =
            found.kept * SCAN_KEPT + found.dropped * SCAN_MIXED;
    }
}

/* --- A bias or a mask ------------------------------------------------------------------------- */

/* The same for a bias, or else a mask, in tiles of KEYS keys. */
template <int KEYS> GPU_DEVICE void wgmma_scan_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int queries = (int)g.tiling.br / wgmma_group_of(p);
    fattn_tiling tiling = g.tiling; /* with the change that wgmma_plan_begin() makes */
    tiling.q_blocks = fattn_quotient(p.seqlen_q + queries - 1, queries);
    gpu_admit_later();
    gpu_await_earlier();
    if (gpu_block() == 0 && gpu_thread() == 0) {
        *(unsigned *)g.workspace = 0;
    }
    scan_all<KEYS>(g, tiling, wgmma_bytes(g), [&](int64_t block) {
        fattn_range rows;
        rows.first = block * queries;
        rows.past = fattn_min64(rows.first + queries, p.seqlen_q);
        return rows;
    });
}

#endif
