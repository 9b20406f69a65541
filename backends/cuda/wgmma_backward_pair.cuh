/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on Hopper where two blocks of a cluster share an item, each with half of its keys
 * (wgmma_backward.cuh). Both visit the same queries, and each copies half of the channels of these
 * and of dO for both. They send each other dS: then each makes dQ of half of the channels, of the
 * keys of both. So L2 reads and adds half of what it would for two items.
 *
 * A block that copies waits until both have freed the place. Both make the same products, so that
 * they stay within a tile of each other.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_PAIR_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_PAIR_CUH

#include "backends/cuda/wgmma_backward_block.cuh"

/* The number of the next item, which a warp of each block asks for: the first block takes it and
 * tells the other. begun: items that blocks begin with; n: times that they have asked before. */
template <class S>
GPU_DEVICE int wgmma_take_together(const wgmma_backward_block<S> &b, unsigned *taken, int begun,
                                   int n)
{
    wgmma_backward_control<S> &control = *b.control;
    int number = 0;
    if (mma_lane() == 0 && b.rank == 0) {
        number = (int)atomicAdd(taken, 1u) + begun;
        wgmma_await(&control.peer.number_empty, n % 2 ^ 1);
        wgmma_send_number(1, &control.peer.number, number, &control.peer.number_full);
    } else if (mma_lane() == 0) {
        wgmma_arrive_expect_tx(&control.peer.number_full, sizeof control.peer.number);
        wgmma_await(&control.peer.number_full, n % 2);
        number = *(volatile int *)&control.peer.number;
        wgmma_arrive_in(0, &control.peer.number_empty);
    }
    return __shfl_sync(0xffffffffu, number, 0);
}

/* The half of a tile of rows, by channels, that this block copies for both. */
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

/* The other block's keys, in the channels of dQ that are this one's. */
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

/* Waits for them; n: of items with tiles. Those that the sequence does not have become zeros, as
 * those of the own block do. */
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

/* Sends dS of a tile to the other block when both warpgroups have made it, and announces the bytes
 * that come from there; a warp. sent: how many tiles' before. Its place is free: dS of the tile
 * before came from there after dQ of the last tile but one had been made. */
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

/* Frees a place that both blocks copy to. */
template <class S>
GPU_DEVICE void wgmma_release_in_both(const wgmma_backward_block<S> &b, uint64_t *barrier)
{
    if (mma_lane() == 0) {
        wgmma_arrive(barrier);
        wgmma_arrive_in(b.rank ^ 1, barrier);
    }
}

/* Begins 64 of this block's channels of dQ^T, of all queries and of the keys of both blocks. at:
 * which of the places of dS. */
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

/* Sums of dQ of a tile that are still to be added, and where. */
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
