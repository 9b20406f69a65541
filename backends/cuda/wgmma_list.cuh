/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How Hopper's kernels divide a batch of sequences of different lengths into items. A kernel that
 * runs before them lists the sequences (wgmma.h): those with the most keys come first, or in
 * backward those with the most queries. The list tells which sequence an item belongs to.
 */
#ifndef FATTN_CUDA_WGMMA_LIST_CUH
#define FATTN_CUDA_WGMMA_LIST_CUH

#include "backends/cuda/mma_warp.cuh"
#include "backends/cuda/wgmma.h"
#include "core/integer.h"
#include "core/kernel.h"

typedef struct wgmma_length {
    int walked; /* keys that an item visits, or in backward queries */
    int blocks; /* of rows of one head, or in backward of keys */
    int parts;  /* into which the keys of a block of rows are cut: each is an item */
} wgmma_length;

/* Makes the list; of(b) returns the lengths of sequence b. The block has WGMMA_LISTED_MOST threads.
 * Each has a sequence and counts those that come before it. Then the first warp computes prefix
 * sums of their items. cuts: NULL, or where the cuts of list entries go, followed by the same by
 * sequence. */
template <class Of>
GPU_DEVICE void wgmma_list_sequences(const fattn_problem &p, wgmma_listed *list, wgmma_cut *cuts,
                                     const Of &of)
{
    enum { TOGETHER = 8 };
    GPU_SHARED int walked[WGMMA_LISTED_MOST + TOGETHER], parts_of[WGMMA_LISTED_MOST];
    GPU_SHARED wgmma_listed sorted[WGMMA_LISTED_MOST];
    const int batch = (int)p.batch, b = gpu_thread();
    wgmma_length own = {0, 0, 1};
    if (b < batch) {
        own = of(b);
        parts_of[b] = own.parts;
    }
    walked[b] = b < batch ? own.walked : -1;
    if (b < TOGETHER) {
        walked[WGMMA_LISTED_MOST + b] = -1;
    }
    gpu_sync();
    if (b < batch) {
        int before = 0;
        for (int n = 0; n < batch; n += TOGETHER) {
            GPU_UNROLL
            for (int k = n; k < n + TOGETHER; k++) {
                before += walked[k] > own.walked || (walked[k] == own.walked && k < b);
            }
        }
        sorted[before] = {0, 0, b, own.blocks};
    }
    gpu_sync();
    if (b < GPU_WAVE) {
        uint32_t sum = 0, slots = 0;
        for (int n = b; n - b < batch; n += GPU_WAVE) {
            wgmma_listed entry = n < batch ? sorted[n] : wgmma_listed{0, 0, 0, 0};
            const uint32_t parts = n < batch ? (uint32_t)parts_of[entry.sequence] : 0;
            const uint32_t items = (uint32_t)entry.blocks * (uint32_t)p.heads_k * parts;
            entry.past = sum + mma_warp_up_to(items);
            entry.first = entry.past - items;
            sum = __shfl_sync(0xffffffffu, entry.past, GPU_WAVE - 1);
            if (n < batch) {
                list[n] = entry;
            }
            if (cuts) {
                const uint32_t taken = parts > 1 ? items : 0;
                const uint32_t past = slots + mma_warp_up_to(taken);
                slots = __shfl_sync(0xffffffffu, past, GPU_WAVE - 1);
                if (n < batch) {
                    cuts[n] = cuts[batch + entry.sequence] = {past - taken, parts};
                }
            }
        }
    }
}

/* Restricts a tiling to the items of a listed sequence. */
GPU_DEVICE void wgmma_listed_tiling(const wgmma_listed &listed, int64_t heads_k,
                                    fattn_tiling &tiling)
{
    tiling.q_blocks = listed.blocks;
    tiling.heads = heads_k;
    tiling.together = fattn_min64(tiling.together, heads_k);
}

/* The entry of the sequence that item `number` belongs to; the number is below the last entry's
 * `past`. */
GPU_DEVICE wgmma_listed wgmma_listed_of(const wgmma_listed *list, int batch, uint32_t number)
{
    int first = 0, past = batch - 1;
    while (first < past) {
        const int middle = (first + past) / 2;
        if (list[middle].past <= number) {
            first = middle + 1;
        } else {
            past = middle;
        }
    }
    return list[first];
}

#endif
