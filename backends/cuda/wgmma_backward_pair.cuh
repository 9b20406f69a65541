/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on Hopper in which the two blocks of a cluster share an item, each with half of its keys
 * (wgmma_backward.cuh). Both visit the same queries. Each copies half of the channels of q and dO,
 * and multicasts them to both. They send each other dS, and then each computes half of the channels
 * of dQ, over the keys of both. So L2 reads and adds half as much as for two separate items.
 *
 * A block copies to a stage when both blocks have released it. Both compute the same products, so
 * that they stay within a tile of each other.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_PAIR_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_PAIR_CUH

#include "backends/cuda/wgmma_backward_block.cuh"

/* Multicasts this block's half of the channels of a tile of rows to both blocks. */
template <int PANELS, int ROWS>
GPU_DEVICE void wgmma_copy_half(int rank, uint32_t to, const wgmma_map *map, uint64_t *full,
                                int row, int head, int batch)
{
    GPU_UNROLL
    for (int n = 0; n < PANELS / 2; n++) {
        const int c = rank * (PANELS / 2) + n;
        wgmma_copy_to_both(to + c * ROWS * 128, map, full, 64 * c, row, head, batch,
                           WGMMA_EVICT_LAST);
    }
}

/* Begins to copy the other block's keys, in this block's channels of dQ. */
template <class S>
GPU_DEVICE void wgmma_copy_peer_keys(const wgmma_backward_block<S> &b, const wgmma_map *map,
                                     const wgmma_backward_item &w, const fattn_strides &stride)
{
    enum { PANELS = S::PANELS / S::BLOCKS };
    uint64_t *const full = &b.control->peer.k_full;
    wgmma_poison(b.peer_k, S::PEER_KEY_BYTES);
    wgmma_arrive_expect_tx(full, S::PEER_KEY_BYTES);
    GPU_UNROLL
    for (int c = 0; c < PANELS; c++) {
        wgmma_copy(b.peer_k + c * S::KEYS * 128, map, full, 64 * (b.rank * PANELS + c),
                   w.k_row + (b.rank ? -S::KEYS : S::KEYS), stride.head ? w.head : 0,
                   stride.batch ? w.k_batch : 0, WGMMA_EVICT_LAST);
    }
}

/* Waits for them. n counts items with tiles. Keys that do not exist become zeros, as in the block's
 * own keys. */
template <class S>
GPU_DEVICE void wgmma_await_peer_keys(const wgmma_backward_block<S> &b,
                                      const wgmma_backward_item &w, int group, int n, bool shared)
{
    wgmma_await(&b.control->peer.k_full, n % 2);
    const int live = max(w.sequence_keys - (w.block ^ 1) * S::KEYS, 0);
    if (shared && live < S::KEYS) {
        wgmma_clear<S::KEYS, S::PANELS / S::BLOCKS>(b.peer_k, live, WGMMA_CLEARED + group);
    }
}

/* Sends dS of a tile to the other block when both warpgroups have computed it, and announces the
 * bytes that come from there. Called by a warp. sent: how many tiles it has sent before. The
 * destination is free: the other block sent dS of the tile before only after it had computed dQ of
 * the last tile but one. */
template <class S> GPU_DEVICE void wgmma_send_ds(const wgmma_backward_block<S> &b, uint32_t sent)
{
    wgmma_backward_control<S> &control = *b.control;
    const int at = sent % 2, phase = sent / 2 % 2;
    wgmma_await(&control.ds_full[at], phase);
    if (mma_lane() == 0) {
        wgmma_arrive_expect_tx(&control.peer.ds_full[at], S::DS_BYTES);
        wgmma_send(b.rank ^ 1, b.peer_ds + at * S::DS_BYTES, b.ds + at * S::DS_BYTES, S::DS_BYTES,
                   &control.peer.ds_full[at]);
    }
    __syncwarp();
}

/* Begins the product for 64 of this block's channels of dQ^T, for all queries and over the keys of
 * both blocks. at: the stage of dS. */
template <class S>
GPU_DEVICE void wgmma_pair_dq(const wgmma_backward_block<S> &b, int group, int at,
                              float dq[S::PART / 8][4])
{
    typedef wgmma_product<typename S::type, S::PART> product;
    const uint32_t panel = S::KEYS * 128, ds = at * S::DS_BYTES;
    const int own_panel = b.rank * (S::PANELS / S::BLOCKS) + group;
    const uint64_t k = wgmma_descriptor(b.k + own_panel * panel, 0);
    const uint64_t peer_k = wgmma_descriptor(b.peer_k + group * panel, 0);
    const uint64_t own_ds = wgmma_descriptor(b.ds + ds, 0);
    const uint64_t peer_ds = wgmma_descriptor(b.peer_ds + ds, 0);
    wgmma_fence();
    product::new_transposed_a(dq, k, own_ds);
    GPU_UNROLL
    for (int i = 1; i < S::KEYS / 16; i++) {
        product::transposed_a(dq, k + i * WGMMA_ROWS, own_ds + i * WGMMA_CHANNELS);
    }
    GPU_UNROLL
    for (int i = 0; i < S::KEYS / 16; i++) {
        product::transposed_a(dq, peer_k + i * WGMMA_ROWS, peer_ds + i * WGMMA_CHANNELS);
    }
    wgmma_commit();
}

/* A thread's sums of dQ of a tile that are not added yet, and the address to add them to. */
template <class S> struct wgmma_pair_sums {
    float *to;
    float dq[S::PART / 8][4];
};

template <class S> GPU_DEVICE void wgmma_add_sums(const wgmma_pair_sums<S> &sums)
{
    GPU_UNROLL
    for (int n = 0; n < S::PART / 8; n++) {
        mma_add_four(sums.to + n * 512, sums.dq[n]);
    }
}

#endif
