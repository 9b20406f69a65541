/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding in batches whose sequences have different numbers of keys. A plan knows only the largest
 * number. If each sequence were cut by its own length, a long one among many would run alone at the
 * end, and parts that are there for it alone would be empty in all others.
 *
 * So each block reads the lengths of all sequences, tries some sizes of parts, and takes the best
 * one for this batch. All blocks choose the same. Items are numbered by parts, those of more than
 * half of the size first, and then by key/value heads, so that blocks that run at the same time
 * read the keys of all heads. A kernel that does this once, before, would take longer to launch
 * than a block takes to do it (docs/notes/cuda.md).
 */
#ifndef FATTN_CUDA_MMA_CUT_CUH
#define FATTN_CUDA_MMA_CUT_CUH

#include "backends/cuda/cut.cuh"
#include "backends/cuda/mma_terms.cuh"
#include "backends/cuda/mma_warp.cuh"
#include "backends/gpu/team.cuh"

/* What a block knows of the batch. */
typedef struct mma_cut_batch {
    /* First the tiles of keys of each sequence, where 65,535 stands for all above. Then the number
     * of its parts, and MMA_CUT_LONG if these come first. */
    uint16_t of[MMA_CUT_MOST];
    int best[MMA_CUT_SIZES]; /* of each warp: the lowest cost, and in its last bits which size */
} mma_cut_batch;

#define MMA_CUT_LONG 0x8000

/* An item: the part of a sequence's keys, of at most `parts`, for one key/value head. */
typedef struct mma_cut_item {
    int b, hk, split, parts;
    int64_t slot; /* of the part in the workspace */
} mma_cut_item;

/*
 * How long a run takes whose parts have at most `size` tiles, in tiles of one of the `blocks` that
 * run at a time. share: the tiles of all, divided by these. item: what an item costs besides its
 * tiles. A warp computes it.
 *
 * Parts that are alike run in rounds, and the last round has blocks that are idle. If parts differ,
 * the last ones end 0.4 of the largest part later than the first ones, on average. The mean part,
 * divided by the largest, tells how alike they are. While some blocks are idle, the others read
 * faster, so that this time counts half.
 */
GPU_DEVICE float mma_cut_cost(const fattn_gpu_args &g, const mma_cut_batch &batch, float blocks,
                              float share, float item, int size)
{
    int parts = 0, longest = 0;
    GPU_ROLLED
    for (int b = mma_lane(); b < g.problem.batch; b += GPU_WAVE) {
        parts += cut_parts(g, batch.of[b], size);
        longest = max(longest, (int)batch.of[b]);
    }
    parts = mma_warp_sum(parts);
    const float most = (float)min(mma_warp_largest(longest), size);
    const float rounds = (float)(parts * (int)g.problem.heads_k) / blocks;
    const float busy = share + rounds * item, alike = share / (rounds * most);
    const float idle = ceilf(rounds) - rounds, weight = alike * alike * alike * alike;
    const float end = most * (0.4f + weight * (idle - 0.4f));
    return busy + 0.5f * fmaxf(end, most + item - busy);
}

/* Reads the lengths, and cuts the sequences. All threads of the block must call it. */
template <class S> GPU_DEVICE void mma_cut_all(const fattn_gpu_args &g, mma_cut_batch &batch)
{
    enum { LEAST = MMA_CUT_KEYS / S::KEYS };
    const int sequences = (int)g.problem.batch, warp = gpu_thread() / GPU_WAVE;
    bool some = false;
    GPU_ROLLED
    for (int b = gpu_thread(); b < sequences; b += S::THREADS) {
        const int tiles = cut_tiles(g, b, (int)g.problem.seqlen_q, S::KEYS);
        batch.of[b] = (uint16_t)min(tiles, UINT16_MAX);
        some = some || batch.of[b] > LEAST;
    }
    /* If no sequence is worth more than a part, nothing is tried. */
    int size = LEAST;
    if (gpu_any(some)) {
        int all = 0, longest = 1;
        GPU_ROLLED
        for (int b = mma_lane(); b < sequences; b += GPU_WAVE) {
            all += batch.of[b];
            longest = max(longest, (int)batch.of[b]);
        }
        longest = mma_warp_largest(longest);
        /* With no more blocks than planned, the work list has room for the parts of any size. */
        const float blocks = (float)fattn_min64(gpu_blocks(), g.tiling.pieces / MMA_CUT_ROUNDS);
        const float share = (float)mma_warp_sum(all) * (float)g.problem.heads_k / blocks;
        const float item =
            (float)S::ITEM / (float)(2 * S::SIZE * S::WIDTH * S::KEYS); /* in tiles */
        const auto size_of = [&](int n) {
            const float rounds = exp2f((float)(MMA_CUT_FIRST + n - 1) / MMA_CUT_STEPS);
            return n == 0 ? longest : max((int)fminf(ceilf(share / rounds), UINT16_MAX), LEAST);
        };
        int best = INT32_MAX;
        GPU_ROLLED
        for (int n = warp; n < MMA_CUT_SIZES; n += S::WARPS) {
            const float cost = mma_cut_cost(g, batch, blocks, share, item, size_of(n));
            best = min(best, (__float_as_int(cost) & -MMA_CUT_SIZES) | n);
        }
        if (mma_lane() == 0) {
            batch.best[warp] = best;
        }
        gpu_sync();
        best = mma_lane() < S::WARPS ? batch.best[mma_lane()] : INT32_MAX;
        size = size_of(-mma_warp_largest(-best) & (MMA_CUT_SIZES - 1));
    }
    GPU_ROLLED
    for (int b = gpu_thread(); b < sequences; b += S::THREADS) {
        const int tiles = batch.of[b], parts = cut_parts(g, tiles, size);
        batch.of[b] = (uint16_t)(parts | (parts > 1 || 2 * tiles > size ? MMA_CUT_LONG : 0));
    }
    gpu_sync();
}

/* Finds item `number`. Returns how many items there are. All threads of a warp must call it. */
GPU_DEVICE int64_t mma_cut_find(const fattn_gpu_args &g, const mma_cut_batch &batch, int64_t number,
                                mma_cut_item &item)
{
    const int sequences = (int)g.problem.batch, heads = (int)g.problem.heads_k;
    /* The parts of a sequence are counted in the lower half of a word if they come first, and else
     * in the upper half. */
    const auto count = [&](int b) {
        const uint32_t parts = batch.of[b];
        return parts & MMA_CUT_LONG ? parts ^ MMA_CUT_LONG : parts << 16;
    };
    uint32_t own = 0;
    GPU_ROLLED
    for (int b = mma_lane(); b < sequences; b += GPU_WAVE) {
        own += count(b);
    }
    const uint32_t past = mma_warp_up_to(own);
    const uint32_t all = __shfl_sync(0xffffffffu, past, GPU_WAVE - 1);
    const uint32_t part = (uint32_t)number / (uint32_t)heads;
    uint32_t before = past - own + (all << 16);
    int b_found = -1, first = 0;
    GPU_ROLLED
    for (int b = mma_lane(); b < sequences; b += GPU_WAVE) {
        const uint32_t counted = count(b), begin = counted >> 16 ? before >> 16 : before & 0xffff;
        if (part - begin < (counted >> 16) + (counted & 0xffff)) {
            b_found = b;
            first = (int)begin;
        }
        before += counted;
    }
    const uint32_t finder = __ballot_sync(0xffffffffu, b_found >= 0);
    const int lane = max(__ffs((int)finder) - 1, 0);
    item.b = max(__shfl_sync(0xffffffffu, b_found, lane), 0);
    first = __shfl_sync(0xffffffffu, first, lane);
    item.hk = (int)(number - (int64_t)part * heads);
    item.split = (int)part - first;
    item.parts = batch.of[item.b] & (MMA_CUT_LONG - 1);
    item.slot = (int64_t)first * heads + item.hk * item.parts + item.split;
    return (int64_t)((all & 0xffff) + (all >> 16)) * heads;
}

#endif
