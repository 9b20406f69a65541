/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward by mma.sync (mma_forward.cuh, bf16x3_forward.cuh) skips the tiles of keys that a bias or
 * a mask hides. This header has the scan kernel that runs before it (scan.cuh), and how its results
 * are read.
 */
#ifndef FATTN_CUDA_MMA_SCAN_CUH
#define FATTN_CUDA_MMA_SCAN_CUH

#include "backends/cuda/mma_terms.cuh"
#include "backends/cuda/scan.cuh"

/* Whether kernels of such a shape skip tiles that a bias or a mask hides. */
template <class S> GPU_DEVICE constexpr bool mma_may_hide()
{
    return MMA_SKIPS(S::KNOWN, S::WIDTH);
}

/* The first byte of the scan's results, at the end of the workspace, behind the parts of keys. */
GPU_DEVICE uint8_t *mma_scan_bytes(const fattn_gpu_args &g)
{
    const fattn_tiling &t = g.tiling;
    return (uint8_t *)g.workspace + t.workspace - t.heads * t.q_blocks * SCAN_BYTES(t.k_blocks);
}

/* The bytes of an item. NULL if there was no scan (scan.c), or if there are too many tiles. */
template <class S> GPU_DEVICE const uint8_t *mma_scan_of(const fattn_gpu_args &g, const mma_item &w)
{
    if (!(g.problem.features & (FATTN_BIAS | FATTN_MASK)) ||
        !scan_runs(g.tiling.items, g.problem.seqlen_k) ||
        (S::type::PLANES == 1 && g.tiling.k_blocks > 32 * MMA_KEPT_WORDS)) {
        return NULL;
    }
    fattn_work work;
    work.batch = w.pairs.b;
    work.head = w.hk;
    work.block = (w.i0 * w.group + w.offset) / S::ROWS;
    return mma_scan_bytes(g) + scan_at(g.tiling, g.problem.heads_k, scan_stride(g.problem), work);
}

/* The scan kernel. It scans all heads of the group for the queries of an item. */
template <int KEYS> GPU_DEVICE void mma_scan_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    scan_all<KEYS>(g, g.tiling, mma_scan_bytes(g), [&](int64_t block) {
        const gpu_item_rows rows =
            gpu_item_rows_of(block, (int)g.tiling.br, g.problem.seqlen_q, g.group);
        const fattn_range queries = {rows.i0, rows.i1};
        return queries;
    });
}

/* Writes a bit for each of an item's tiles to shared memory: whether some pair is kept. All threads
 * call it; a barrier has to follow before the bits are read. */
template <class S> GPU_DEVICE void mma_find_kept(mma_scratch<S> &s)
{
    GPU_ROLLED
    for (int n = mma_warp(); 32 * n < s.item.past; n += S::THREADS / GPU_WAVE) {
        const int tile = 32 * n + mma_lane();
        const bool kept = tile < s.item.past && s.scan[tile] & SCAN_KEPT;
        const uint32_t bits = __ballot_sync(0xffffffffu, kept);
        if (mma_lane() == 0) {
            s.kept[n] = bits;
        }
    }
}

/* The scan kernel as an entry of an image. */
#define MMA_SCAN_ENTRY(name, keys)                                                   \
    GPU_KERNEL(SCAN_THREADS, 2) name##_scan_##keys(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                \
        mma_scan_all<keys>(g);                                                       \
    }

#endif
