/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What Hopper's kernels have in common in which the two blocks of a cluster share items
 * (wgmma_halves.cuh, wgmma_backward_pair.cuh): they take the same items, and a stage that both copy
 * to is free when both have released it.
 */
#ifndef FATTN_CUDA_WGMMA_PAIR_CUH
#define FATTN_CUDA_WGMMA_PAIR_CUH

#include "backends/cuda/wgmma_tile.cuh"

/* The number of an item, which block 0 sends to block 1. Each barrier expects one arrival. */
typedef struct wgmma_sent_number {
    uint64_t full, empty;
    int number;
} wgmma_sent_number;

GPU_DEVICE void wgmma_sent_number_make(wgmma_sent_number &sent)
{
    wgmma_barrier_make(&sent.full, 1);
    wgmma_barrier_make(&sent.empty, 1);
}

/* The number of the next item, for a warp of each block: block 0 takes it from the counter and
 * sends it to block 1. begun: the number of items that clusters begin with without the counter; n:
 * how many calls there have been before. */
GPU_DEVICE int wgmma_take_together(wgmma_sent_number &sent, int rank, unsigned *counter, int begun,
                                   int n)
{
    int number = 0;
    if (mma_lane() == 0 && rank == 0) {
        number = (int)atomicAdd(counter, 1u) + begun;
        wgmma_await(&sent.empty, n % 2 ^ 1);
        wgmma_send_number(1, &sent.number, number, &sent.full);
    } else if (mma_lane() == 0) {
        wgmma_arrive_expect_tx(&sent.full, sizeof sent.number);
        wgmma_await(&sent.full, n % 2);
        number = *(volatile int *)&sent.number;
        wgmma_arrive_in(0, &sent.empty);
    }
    return __shfl_sync(0xffffffffu, number, 0);
}

/* Releases a stage that both blocks copy to. */
GPU_DEVICE void wgmma_release_in_both(int rank, uint64_t *barrier)
{
    if (mma_lane() == 0) {
        wgmma_arrive(barrier);
        wgmma_arrive_in(rank ^ 1, barrier);
    }
}

#endif
