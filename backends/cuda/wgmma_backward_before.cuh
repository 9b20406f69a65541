/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that run before those of wgmma_backward_rows.cuh, where items differ:
 *
 *     wgmma_scan_<name>      scans a bias, a mask or a block mask for hidden tiles
 *     wgmma_list_<name>     the list of sequences, if lengths differ
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_BEFORE_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_BEFORE_CUH

#include "backends/cuda/wgmma_backward_items.cuh"

/* --- The scan --------------------------------------------------------------------------------- */

/* The byte of a tile for a block mask, which all heads of a group share: SCAN_KEPT if anything is
 * kept, and SCAN_MIXED << n if keys of the item's block n are. Blocks of the mask are multiples of
 * these tiles. */
template <class S>
GPU_DEVICE int wgmma_block_mask_byte(const fattn_gpu_args &g, const fattn_work &work,
                                     int64_t k_block)
{
    const fattn_problem &p = g.problem;
    const int64_t i0 = work.block * S::QUERIES, head = work.head * g.group;
    gpu_pairs pairs;
    int byte = 0;
    pairs.b = work.batch;
    for (int n = 0; n < S::BLOCKS; n++) {
        const int64_t j0 = k_block * S::ITEM_KEYS + n * S::KEYS;
        if (i0 < p.seqlen_q && j0 < p.seqlen_k &&
            gpu_mask_blocks_of(g, pairs, i0, i0 + 1, head, 1, j0, j0 + 1, 0, 1).kept) {
            byte |= SCAN_KEPT | SCAN_MIXED << n;
        }
    }
    return byte;
}

/* Scans a block mask, a bias, or else a mask, and writes the bytes of all tiles to the
 * workspace. */
template <class S> GPU_DEVICE void wgmma_backward_scan_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const fattn_tiling &tiling = g.tiling;
    const int64_t *const stride = wgmma_hiding_stride(p);
    uint8_t *const results = wgmma_workspace_of<S>(g).scan;
    gpu_admit_later();
    gpu_await_earlier();
    if (!(p.features & FATTN_BLOCK_MASK)) {
        scan_all<S::ITEM_KEYS>(g, tiling, results, [&](int64_t block) {
            fattn_range rows;
            rows.first = block * S::QUERIES;
            rows.past = fattn_min64(rows.first + S::QUERIES, p.seqlen_q);
            return rows;
        });
        return;
    }
    const int64_t heads = stride[1] ? p.heads_k : 1, batches = stride[0] ? p.batch : 1;
    const int64_t bytes = SCAN_BYTES(tiling.k_blocks);
    for (int64_t n = gpu_block() * gpu_threads() + gpu_thread();
         n < batches * heads * tiling.q_blocks * bytes; n += gpu_blocks() * gpu_threads()) {
        const int64_t item = fattn_quotient(n, bytes), head = fattn_quotient(item, tiling.q_blocks);
        fattn_work work = {};
        work.batch = fattn_quotient(head, heads);
        work.head = head - work.batch * heads;
        work.block = item - head * tiling.q_blocks;
        results[scan_at(tiling, p.heads_k, stride, work) + n - item * bytes] =
            (uint8_t)wgmma_block_mask_byte<S>(g, work, n - item * bytes);
    }
}

/* --- The list of sequences -------------------------------------------------------------------- */

/* Lists the sequences. A sequence also has items for keys beyond its used length, whose gradients
 * are set to zero. */
template <class S> GPU_DEVICE void wgmma_list_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    wgmma_list_sequences(g.problem, wgmma_workspace_of<S>(g).list, NULL, [&](int b) {
        const fattn_sequence seq = gpu_sequence(g, b);
        const int64_t keys = fattn_max64(seq.sk, seq.slot_k);
        return wgmma_length{(int)seq.sq, (int)((keys + S::ITEM_KEYS - 1) / S::ITEM_KEYS), 1};
    });
}

#endif
