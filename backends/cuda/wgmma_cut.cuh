/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches whose sequences have different lengths, for Hopper's kernels that split keys. One kernel
 * runs before them. It finds how large a part should be, so that the longest sequence does not
 * decide how long the run takes, and lists the sequences (wgmma_list.cuh), those with the largest
 * parts first. Another kernel merges the parts. The idea is that of FlashMLA's scheduler (DeepSeek
 * 2025), but parts do not continue in another sequence.
 */
#ifndef FATTN_CUDA_WGMMA_CUT_CUH
#define FATTN_CUDA_WGMMA_CUT_CUH

#include "backends/cuda/cut.cuh"
#include "backends/cuda/wgmma_forward_items.cuh"
#include "backends/cuda/wgmma_list.cuh"
#include "backends/gpu/combine.cuh"

/* Costs in tiles of keys: the beginning and the end of an item, and merging, to which each row of a
 * part adds; and the fewest keys of a part. Measured on an H200 (docs/notes/hopper-forward.md). */
#define WGMMA_CUT_ITEM 2
#define WGMMA_CUT_MERGE 3
#define WGMMA_CUT_ROW (1 / 2048.0f)
#define WGMMA_CUT_KEYS 256
#define WGMMA_CUT_SIZES (WGMMA_CUT_THREADS / GPU_WAVE) /* that are tried, each by a warp */

/* A sequence's blocks of rows, of all key/value heads, and the tiles of keys of each. */
typedef struct wgmma_cut_length {
    int blocks, tiles;
} wgmma_cut_length;

GPU_DEVICE int wgmma_cut_blocks(const fattn_gpu_args &g, int64_t queries)
{
    return (int)((queries * g.group + g.tiling.br - 1) / g.tiling.br);
}

GPU_DEVICE wgmma_cut_length wgmma_cut_length_of(const fattn_gpu_args &g, int b)
{
    const fattn_problem &p = g.problem;
    const int queries =
        cut_rows(p.features & FATTN_CU_SEQLENS_Q ? g.buffers.cu_seqlens_q : NULL,
                 p.features & FATTN_SEQUSED_Q ? g.buffers.seqused_q : NULL, (int)p.seqlen_q, b);
    return {wgmma_cut_blocks(g, queries) * (int)p.heads_k,
            cut_tiles(g, b, queries, (int)g.tiling.bc)};
}

/* How long a run takes whose parts have `size` tiles, on so many units, in tiles of keys. Longer
 * items begin before shorter ones, so that units are idle at the end for a share of the shortest. A
 * warp computes it. all: the tiles of all blocks. */
GPU_DEVICE float wgmma_cut_cost(const fattn_gpu_args &g, const wgmma_cut_length *length, float all,
                                int size, int units)
{
    int items = 0, slots = 0, longest = 0, shortest = INT32_MAX;
    for (int b = mma_lane(); b < g.problem.batch; b += GPU_WAVE) {
        const wgmma_cut_length own = length[b];
        const int parts = cut_parts(g, own.tiles, size);
        if (own.blocks > 0) {
            const int most = (own.tiles + parts - 1) / parts;
            items += own.blocks * parts;
            slots += parts > 1 ? own.blocks * parts : 0;
            longest = max(longest, most);
            shortest = min(shortest, most);
        }
    }
    items = mma_warp_sum(items);
    slots = mma_warp_sum(slots);
    longest = mma_warp_largest(longest);
    shortest = -mma_warp_largest(-shortest);
    if (slots > wgmma_cut_slots(&g.tiling)) {
        return fattn_f32_infinity();
    }
    const float rounds = (float)items / (float)units, idle = ceilf(rounds) - rounds;
    const float shared =
        all / (float)units + rounds * WGMMA_CUT_ITEM + idle * ((float)shortest + WGMMA_CUT_ITEM);
    const float merged = (float)slots * (float)g.tiling.br * WGMMA_CUT_ROW;
    return fmaxf(shared, (float)(longest + WGMMA_CUT_ITEM)) +
           (slots > 0 ? WGMMA_CUT_MERGE + merged : 0);
}

/* Clears the counter of items, and cuts and lists the sequences. A kernel of one block, which has a
 * thread for each sequence. */
GPU_DEVICE void wgmma_cut_all(const fattn_gpu_args &g)
{
    GPU_SHARED wgmma_cut_length length[WGMMA_LISTED_MOST];
    GPU_SHARED float cost[WGMMA_CUT_SIZES];
    GPU_SHARED int sizes[WGMMA_CUT_SIZES];
    const fattn_problem &p = g.problem;
    const wgmma_lists_at at = wgmma_lists_behind(g, wgmma_cut_parts_bytes(&p, &g.tiling, g.group));
    const int batch = (int)p.batch, b = gpu_thread(), n = b / GPU_WAVE;
    const int units = max((int)g.tiling.pieces / WGMMA_CUT_ROUNDS, 1);
    const int least = max(WGMMA_CUT_KEYS / (int)g.tiling.bc, 1);
    gpu_admit_later();
    gpu_await_earlier();
    if (b < batch) {
        length[b] = wgmma_cut_length_of(g, b);
    }
    gpu_sync();
    /* Warp n tries parts of which each unit has n / 8, and warp 0 whole sequences. */
    float all = 0;
    for (int k = mma_lane(); k < batch; k += GPU_WAVE) {
        all += (float)length[k].blocks * (float)length[k].tiles;
    }
    all = gpu_team_sum<GPU_WAVE>(all);
    const float share = ceilf(all * 8 / (float)(units * max(n, 1)));
    const int size = n == 0 ? 1 << 30 : max((int)fminf(share, (float)(1 << 30)), least);
    const float own_cost = wgmma_cut_cost(g, length, all, size, units);
    if (mma_lane() == 0) {
        cost[n] = own_cost;
        sizes[n] = size;
    }
    gpu_sync();
    const float tried = cost[mma_lane() % WGMMA_CUT_SIZES];
    const int lowest = -mma_warp_largest(-__float_as_int(tried)); /* costs are not negative */
    const int best = __ffs((int)__ballot_sync(0xffffffffu, __float_as_int(tried) == lowest)) - 1;
    const int chosen = sizes[best];
    wgmma_list_sequences(p, at.listed, at.cuts, [&](int k) {
        const int parts = cut_parts(g, length[k].tiles, chosen);
        return wgmma_length{(length[k].tiles + parts - 1) / parts,
                            length[k].blocks / (int)p.heads_k, parts};
    });
    if (b == 0) {
        *at.counter = 0;
    }
}

/* Merges the parts of a row, of which `part` is the first. A warp does so, each lane four adjacent
 * channels out of every 128, of which there are PIECES. The loads of HELD parts are in flight
 * together. Parts are added in ascending order. */
template <int PIECES, int HELD>
GPU_DEVICE void wgmma_merge_row(const fattn_gpu_args &g, const fattn_sequence &seq, int64_t b,
                                gpu_query q, const gpu_part &part, int parts)
{
    const int step = gpu_part_step(g), lane = mma_lane(), dim_v = (int)g.problem.dim_v;
    const float *const o = (const float *)part.o.data + part.at + 4 * lane;
    float sum[PIECES][4] = {};
    fattn_softmax all = fattn_softmax_empty();
    for (int first = 0; first < parts; first += GPU_WAVE) {
        fattn_softmax own = fattn_softmax_empty(); /* of the lane's part */
        if (first + lane < parts) {
            own.m = part.m[(first + lane) * step];
            own.l = part.l[(first + lane) * step];
        }
        const float alpha = fattn_softmax_raise(&all, gpu_team_max<32>(own.m), g.rule.unit);
        const float weight = fattn_softmax_weight(own.m, g.rule.unit, fattn_softmax_base(all));
        fattn_softmax_add(&all, gpu_team_sum<32>(own.l * weight));
        GPU_UNROLL
        for (int n = 0; n < 4 * PIECES; n++) {
            sum[n / 4][n % 4] *= alpha;
        }
        const int live = min(parts - first, GPU_WAVE);
        GPU_ROLLED
        for (int k0 = 0; k0 < live; k0 += HELD) {
            gpu_f4 x[HELD][PIECES];
            GPU_UNROLL
            for (int k = 0; k < HELD; k++) {
                GPU_UNROLL
                for (int n = 0; n < PIECES; n++) {
                    x[k][n] = gpu_f4{0, 0, 0, 0};
                    if (k0 + k < live && 128 * n + 4 * lane < dim_v) {
                        x[k][n] = *(const gpu_f4 *)(o + (first + k0 + k) * step + 128 * n);
                    }
                }
            }
            GPU_UNROLL
            for (int k = 0; k < HELD; k++) {
                const float share = gpu_shfl(weight, k0 + k); /* 0 of parts that do not exist */
                GPU_UNROLL
                for (int n = 0; n < PIECES; n++) {
                    sum[n][0] = fmaf(share, x[k][n].x, sum[n][0]);
                    sum[n][1] = fmaf(share, x[k][n].y, sum[n][1]);
                    sum[n][2] = fmaf(share, x[k][n].z, sum[n][2]);
                    sum[n][3] = fmaf(share, x[k][n].w, sum[n][3]);
                }
            }
        }
    }
    GPU_UNROLL
    for (int n = 0; n < PIECES; n++) {
        gpu_store_row<4, true>(g, seq, b, q, 128 * n + 4 * lane, all, sum[n]);
    }
}

/* Merges the parts of set n of rows, where an item of `rows` rows has `of` sets. Each warp has a
 * row. */
GPU_DEVICE void wgmma_merge_set(const fattn_gpu_args &g, const wgmma_lists_at &at, int64_t n,
                                int64_t of, int64_t rows)
{
    const fattn_problem &p = g.problem;
    const int64_t block = fattn_quotient(n, of), set = n - block * of;
    const int r = (int)set * WGMMA_MERGE_ROWS + gpu_thread() / GPU_WAVE;
    const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, block * g.tiling.splits);
    const wgmma_cut cut = at.cuts[p.batch + work.batch]; /* behind those of list entries */
    const fattn_sequence seq = gpu_sequence(g, work.batch);
    const int64_t before = work.block * g.tiling.br; /* rows of the head before the block's */
    const int64_t exist = fattn_min64(rows, seq.sq * g.group - before);
    if (cut.parts == 1 || r >= exist) {
        return;
    }
    const fattn_band band = fattn_band_of(&p, &seq);
    const int64_t i0 = fattn_quotient(before, g.group);
    const int64_t i1 = fattn_quotient(before + exist - 1, g.group) + 1;
    const fattn_parts keys = wgmma_cut_keys(band, i0, i1, (int)g.tiling.bc, cut.parts);
    const int64_t parts = fattn_parts_count(&keys), blocks = wgmma_cut_blocks(g, seq.sq);
    if (parts == 1) {
        return; /* the rows have been written to the output */
    }
    /* The number of the block's first part, in the order of fattn_schedule_item(). */
    const int64_t item =
        cut.slot + (work.head * blocks + blocks - 1 - work.block) * (int64_t)cut.parts;
    const gpu_query q = gpu_query_of(before + r, g.group, work.head * g.group);
    const gpu_part first = gpu_part_of(g, item, r);
    if (p.dim_v > 256) {
        wgmma_merge_row<4, 4>(g, seq, work.batch, q, first, (int)parts);
    } else {
        wgmma_merge_row<2, 8>(g, seq, work.batch, q, first, (int)parts);
    }
}

GPU_DEVICE void wgmma_merge_all(const fattn_gpu_args &g)
{
    const int64_t rows = fattn_min64(g.tiling.br, g.group * g.problem.seqlen_q);
    const int64_t of = (rows + WGMMA_MERGE_ROWS - 1) / WGMMA_MERGE_ROWS;
    const int64_t count = g.tiling.heads * g.tiling.q_blocks * of;
    const wgmma_lists_at at =
        wgmma_lists_behind(g, wgmma_cut_parts_bytes(&g.problem, &g.tiling, g.group));
    gpu_admit_later();
    gpu_await_earlier();
    for (int64_t n = gpu_block(); n < count; n += gpu_blocks()) {
        wgmma_merge_set(g, at, n, of, rows);
    }
}

#define WGMMA_CUT_KERNELS                                                                \
    GPU_KERNEL(WGMMA_CUT_THREADS, 1) wgmma_cut_lengths(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                    \
        wgmma_cut_all(g);                                                                \
    }                                                                                    \
    GPU_KERNEL(WGMMA_MERGE_THREADS, 2) wgmma_merge_cut(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                    \
        wgmma_merge_all(g);                                                              \
    }

#endif
