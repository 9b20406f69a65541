/* SPDX-License-Identifier: Apache-2.0 */
/* The items of decoding (mma_decode.cuh): which part of which head a block has, and which item it
 * takes next. */
#ifndef FATTN_CUDA_MMA_DECODE_ITEMS_CUH
#define FATTN_CUDA_MMA_DECODE_ITEMS_CUH

#include "backends/cuda/mma_cut.cuh"
#include "backends/cuda/mma_forward.cuh"
#include "backends/gpu/combine.cuh"

/* Whether rows may attend to fewer than all keys of the sequence. */
template <class S> GPU_DEVICE bool mma_sees_band(const fattn_problem &p)
{
    return !mma_is_lean(S::VARIANT) || p.window_left >= 0 || p.window_right >= 0;
}

/* The parts of the keys that the item's rows attend to. If all sequences are cut together, `parts`
 * is the number of this one's. */
template <class S>
GPU_DEVICE fattn_parts mma_decode_parts(const fattn_gpu_args &g, const mma_item &w, int parts)
{
    const fattn_parts own =
        mma_sees_band<S>(g.problem)
            ? gpu_parts_of(g, w.pairs.band, w.i0, w.i1, S::KEYS)
            : fattn_schedule_parts(&g.tiling, 0, (w.keys + (S::KEYS - 1u)) / S::KEYS);
    return fattn_cuda_cuts(&g.tiling) ? fattn_schedule_cut(own.first, own.past, parts) : own;
}

/* Sets the item's part, and with it whether the item has rows. */
template <class S> GPU_DEVICE void mma_decode_part_set(const fattn_gpu_args &g, mma_item &w)
{
    const fattn_parts parts = mma_decode_parts<S>(g, w, w.parts);
    const bool exists = gpu_item_set_part(parts, w);
    w.rows = exists ? (int)gpu_clamp(w.pairs.seq.sq * w.group, 0, S::ROWS) : 0;
}

/* Sets which part of which head item `number` is. Returns how many items there are. */
GPU_DEVICE int64_t mma_decode_place(const fattn_gpu_args &g, const mma_cut_batch &batch,
                                    int64_t number, mma_item &w)
{
    w = mma_item();
    if (fattn_cuda_cuts(&g.tiling)) {
        mma_cut_item item;
        const int64_t items = mma_cut_find(g, batch, number, item);
        w.number = item.slot;
        w.split = item.split;
        w.parts = item.parts;
        w.pairs.b = item.b;
        w.hk = item.hk;
        return items;
    }
    const int64_t head = fattn_quotient(number, g.tiling.splits);
    w.number = number;
    w.split = (int)(number - head * g.tiling.splits);
    w.pairs.b = fattn_quotient(head, g.problem.heads_k);
    w.hk = head - w.pairs.b * g.problem.heads_k;
    return g.tiling.items;
}

/* The rest of mma_item_set() for decoding, where a head has one block of rows. If all rows attend
 * to every key, it takes a short path, because the copies wait for it. */
template <class S> GPU_DEVICE void mma_decode_item_set(const fattn_gpu_args &g, mma_item &w)
{
    const fattn_problem &p = g.problem;
    if (!mma_is_lean(S::VARIANT) || gpu_sequences_differ(p)) {
        gpu_await_earlier(); /* after what depends on the arguments alone */
    }
    if (mma_sees_band<S>(p)) {
        const mma_item at = w;
        const bool cuts = fattn_cuda_cuts(&g.tiling);
        const int64_t head = w.pairs.b * p.heads_k + w.hk;
        mma_item_set<S>(g, cuts ? head * g.tiling.splits : w.number, w);
        if (!cuts) {
            return;
        }
        w.number = at.number;
        w.split = at.split;
        w.parts = at.parts;
    } else {
        w.group = g.group;
        w.pairs.seq = gpu_sequence(g, w.pairs.b);
        mma_item_places<S>(g, w);
        w.keys = w.past_key = (int)w.pairs.seq.sk;
        w.first_key = MMA_LEFTMOST;
        w.full_past = w.keys / S::KEYS;
        w.i1 = w.pairs.seq.sq;
    }
    mma_decode_part_set<S>(g, w);
}

/* Where sequences are cut together, each block begins with the item of its number, and then takes
 * one of the others when it becomes free. A word behind the counters of heads counts how many have
 * been taken, from g.mark on. */
GPU_DEVICE uint64_t *mma_decode_taken(const fattn_gpu_args &g)
{
    return gpu_counter_of(g, g.problem.batch, 0);
}

/* Chooses how the batch is cut. All threads of the block must call it. */
template <class S> GPU_DEVICE void mma_decode_cut(const fattn_gpu_args &g, mma_cut_batch &batch)
{
    gpu_await_earlier();
    const uint64_t word = gpu_thread() == 0 ? gpu_peek(mma_decode_taken(g)) : 0;
    mma_cut_all<S>(g, batch);
    if (gpu_thread() == 0) {
        gpu_count_begin(g, mma_decode_taken(g), word, g.tiling.items);
    }
}

/* The number of the item that the block has after this one, given the count before it took it. Each
 * block also takes an item that does not exist, so that their number is `items` in the end. */
GPU_DEVICE int64_t mma_decode_next(const fattn_gpu_args &g, uint64_t count, int64_t items)
{
    const int64_t taken = (int64_t)(count - g.mark);
    if (taken == items - 1) {
        gpu_poke(mma_decode_taken(g), g.mark);
    }
    return gpu_blocks() + taken;
}

#endif
