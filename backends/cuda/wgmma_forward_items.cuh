/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Items of forward on Hopper (wgmma_forward.cuh): their rows and keys, the tiles of keys that a
 * scan has found hidden, and the warp that plans them.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_ITEMS_CUH
#define FATTN_CUDA_WGMMA_FORWARD_ITEMS_CUH

#include "backends/cuda/scan.cuh"
#include "backends/cuda/wgmma_forward_block.cuh"
#include "backends/cuda/wgmma_list.cuh"
#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "core/schedule.h"

/* Whether a bias or a mask may hide keys, and has been scanned. */
template <class S> GPU_DEVICE bool wgmma_hides(const fattn_gpu_args &g)
{
    return (mma_has<S>(g, FATTN_BIAS) || mma_has<S>(g, FATTN_MASK)) &&
           wgmma_scans(g.tiling.items, S::ROWS, g.problem.seqlen_k);
}

/* Whether blocks take their items from a counter (wgmma.h). Parts of keys need none if they are of
 * equal size, or each has a block of its own. */
template <class S> GPU_DEVICE bool wgmma_counts(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    if (S::IS_SPLIT) {
        return fattn_cuda_cuts(&g.tiling);
    }
    return gpu_sequences_differ(p) || p.window_left >= 0 || p.window_right >= 0 ||
           wgmma_hides<S>(g);
}

/* Whether warpgroups ping-pong: in the cases in which that was measured to be faster
 * (docs/notes/hopper-forward.md), unless only one warpgroup ever has rows. */
template <class S> GPU_DEVICE bool wgmma_ping_pongs(const fattn_problem &p, int group)
{
    const bool banded = p.window_left >= 0 || p.window_right >= 0;
    const bool alone = S::IS_SPLIT && group * p.seqlen_q <= 64;
    return S::WARPGROUPS > 1 && !alone &&
           (S::WIDTH == 64 ? !banded || S::IS_SPLIT : S::WIDTH < 256);
}

/* The parts of the keys that queries i0 .. i1 - 1 of a sequence attend to, in tiles of `tile` keys,
 * if there are at most `most` of them. */
GPU_DEVICE fattn_parts wgmma_cut_keys(const fattn_band &band, int64_t i0, int64_t i1, int tile,
                                      uint32_t most)
{
    const fattn_range keys = fattn_band_rows(&band, i0, i1);
    const int64_t first = gpu_clamp(keys.first, 0, band.keys) / tile;
    return fattn_schedule_cut(first, (fattn_max64(keys.past, 0) + tile - 1) / tile, most);
}

/* The query of row r, relative to the item's first. */
template <class S> GPU_DEVICE int wgmma_query(const wgmma_block<S> &b, int r)
{
    return b.group == 1 ? r : r / b.group;
}

/* Sets w.tail for the last tile of keys of an item. */
template <class S> GPU_DEVICE void wgmma_item_tail(const fattn_problem &p, wgmma_item &w)
{
    const bool shared = p.features & (FATTN_CU_SEQLENS_K | FATTN_SEQUSED_K | FATTN_PAGED);
    w.tail = shared ? max(w.keys - (w.past - 1) * S::KEYS, 0) : 0;
    w.tail = w.tail < S::KEYS ? w.tail : 0;
}

/* Tiles of keys first .. past - 1. */
typedef struct wgmma_tiles {
    int first, past;
} wgmma_tiles;

/* Sets the keys of an item whose first query is i0. kept: the tiles that are not hidden. Lane n
 * sets those of warpgroup n. */
template <class S>
GPU_DEVICE void wgmma_item_keys(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                const fattn_sequence &seq, int64_t i0, wgmma_tiles kept,
                                wgmma_item &w)
{
    const fattn_problem &p = g.problem;
    const int64_t at = i0 + seq.diagonal, limit = INT64_C(1) << 62;
    w.keys = (int)seq.sk;
    w.first_key = p.window_left < 0 ? MMA_LEFTMOST
                                    : (int)gpu_clamp(at - fattn_min64(p.window_left, limit),
                                                     MMA_LEFTMOST, w.keys);
    w.past_key = p.window_right < 0 ? w.keys
                                    : (int)gpu_clamp(at + fattn_min64(p.window_right, limit) + 1,
                                                     MMA_LEFTMOST, w.keys);
    w.block = max(mma_band_row(w, 0).first / S::KEYS, kept.first);
    const int n = mma_lane(), row = min(64 * n, w.rows - 1);
    const mma_range first = mma_band_row(w, wgmma_query(b, row));
    const mma_range last = mma_band_row(w, wgmma_query(b, min(row + 63, w.rows - 1)));
    const bool exists = n < S::WARPGROUPS && 64 * n < w.rows;
    const int own_past = exists ? min((last.past + S::KEYS - 1) / S::KEYS, kept.past) : 0;
    w.past = max(mma_warp_largest(own_past), w.block);
    if (n < S::WARPGROUPS) {
        w.own_past[n] = b.ping_pong || S::SKIPS ? w.past : max(own_past, w.block);
        w.full[n] = (last.first + S::KEYS - 1) / S::KEYS;
        w.full_past[n] = first.past / S::KEYS;
    }
    wgmma_item_tail<S>(p, w);
}

/* Limits an item to its part of the keys, and returns whether the part exists. i0: the item's first
 * query. A warpgroup's rows may attend to nothing in it. */
template <class S>
GPU_DEVICE bool wgmma_item_part(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                const fattn_sequence &seq, int64_t i0, wgmma_part &part,
                                wgmma_item &w)
{
    const int64_t i1 = i0 + wgmma_query(b, w.rows - 1) + 1;
    const fattn_band band = fattn_band_of(&g.problem, &seq);
    fattn_parts parts;
    if (S::IS_SPLIT && b.control->listed) {
        parts = wgmma_cut_keys(band, i0, i1, S::KEYS, b.control->cut.parts);
    } else {
        parts = gpu_parts_of(g, band, i0, i1, S::KEYS);
    }
    int64_t first, past;
    const bool exists = fattn_schedule_keys(&parts, part.split, &first, &past);
    part.whole = fattn_parts_are_one(&parts);
    __syncwarp(); /* all lanes have read the fields that change now */
    w.block = (int)first;
    w.past = (int)past;
    const int n = mma_lane();
    if (n < S::WARPGROUPS) {
        w.own_past[n] = min(max(w.own_past[n], (int)first), (int)past);
    }
    wgmma_item_tail<S>(g.problem, w);
    return exists;
}

/* Sets the terms of an item, as mma_item_rows() does. */
template <class S>
GPU_DEVICE void wgmma_item_terms(const fattn_gpu_args &g, const wgmma_item &w, int64_t b,
                                 int64_t i0, int group, const fattn_sequence &seq, mma_item &t)
{
    const fattn_problem &p = g.problem;
    t.pairs.b = b;
    if (!S::SKIPS) { /* no feature of kernels that skip tiles needs these */
        t.pairs.seq = seq;
        t.pairs.band = fattn_band_of(&p, &seq);
    }
    t.z_kept = 1;
    if (mma_has<S>(g, FATTN_DROPOUT)) {
        t.pairs.dropout = gpu_dropout(g);
        t.z_kept = gpu_dropout_take(t.pairs.dropout);
    }
    t.hk = w.k_head;
    t.group = group;
    t.i0 = i0;
    t.offset = 0;
    t.rows = w.rows;
    t.keys = w.keys;
    if (S::KNOWN == MMA_ANY) {
        t.bias_rows = p.features & FATTN_BIAS && mma_are_rows(g.buffers.bias, p.bias_stride,
                                                              p.dtype_bias == FATTN_F32 ? 4 : 2);
        t.mask_rows = p.features & FATTN_MASK && mma_are_rows(g.buffers.mask, p.mask_stride, 1);
    }
    if (S::IS_STAGED) {
        const bool bias = S::KNOWN == FATTN_BIAS;
        const int64_t *const stride = wgmma_term_stride<S>(p);
        const int64_t at = b * stride[0] + t.hk * group * stride[1] + i0 * stride[2];
        t.staged = bias ? (const void *)((const uint16_t *)g.buffers.bias + at)
                        : (const void *)(g.buffers.mask + at);
    }
}

/* What the kernel before has made (wgmma.h): the counter of items, the list of sequences, and the
 * cuts of its entries, followed by the same cuts by sequence. */
typedef struct wgmma_lists_at {
    unsigned *counter;
    wgmma_listed *listed;
    wgmma_cut *cuts;
} wgmma_lists_at;

/* The same, behind so many bytes of the workspace. */
GPU_DEVICE wgmma_lists_at wgmma_lists_behind(const fattn_gpu_args &g, int64_t bytes)
{
    wgmma_lists_at at;
    at.counter = (unsigned *)(g.workspace + bytes);
    at.listed = (wgmma_listed *)(g.workspace + bytes + WGMMA_WORKSPACE);
    at.cuts = (wgmma_cut *)(at.listed + g.problem.batch);
    return at;
}

template <class S> GPU_DEVICE wgmma_lists_at wgmma_lists_of(const fattn_gpu_args &g)
{
    return wgmma_lists_behind(g, S::IS_SPLIT ? wgmma_cut_parts_bytes(&g.problem, &g.tiling, g.group)
                                             : 0);
}

/* Item `number` of the list of sequences. The warp searches for the first sequence whose items end
 * after it: first among every 32nd entry, and then among the 32 before the one found. */
template <class S>
GPU_DEVICE fattn_work wgmma_listed_work(const fattn_gpu_args &g, wgmma_control<S> &control,
                                        uint32_t number)
{
    const fattn_problem &p = g.problem;
    const wgmma_lists_at at = wgmma_lists_of<S>(g);
    fattn_tiling tiling = control.tiling;
    const int last = (int)p.batch - 1, lane = mma_lane();
    int first = 0;
    if (last >= GPU_WAVE) {
        const uint32_t ends = at.listed[min(GPU_WAVE * (lane + 1) - 1, last)].past;
        first = GPU_WAVE * __popc(__ballot_sync(0xffffffffu, ends <= number));
    }
    const wgmma_listed entry = at.listed[min(first + lane, last)];
    wgmma_cut cut = {0, 1};
    if (S::IS_SPLIT) {
        cut = at.cuts[min(first + lane, last)];
    }
    const int found = __popc(__ballot_sync(0xffffffffu, entry.past <= number));
    const uint32_t before = __shfl_sync(0xffffffffu, entry.first, found);
    wgmma_listed own;
    own.blocks = __shfl_sync(0xffffffffu, entry.blocks, found);
    wgmma_listed_tiling(own, p.heads_k, tiling);
    if constexpr (S::IS_SPLIT) {
        control.cut.parts = __shfl_sync(0xffffffffu, cut.parts, found);
        control.cut.slot = __shfl_sync(0xffffffffu, cut.slot, found) + number - before;
        tiling.splits = control.cut.parts;
    }
    fattn_work work = fattn_schedule_item(&tiling, p.heads_k, number - before);
    work.batch = __shfl_sync(0xffffffffu, entry.sequence, found);
    return work;
}

/* The block of queries of an item, and its group of query heads. In kernels whose warpgroups share
 * rows, a key/value head may have several groups, which follow each other as blocks do. */
typedef struct wgmma_place {
    int64_t block, head;
} wgmma_place;

template <class S>
GPU_DEVICE wgmma_place wgmma_place_of(const fattn_problem &p, const wgmma_block<S> &b,
                                      const fattn_work &work)
{
    wgmma_place at = {work.block, work.head};
    if constexpr (S::HALVES) {
        const int groups = wgmma_group_of(p) / b.group;
        at.block = fattn_quotient(work.block, groups);
        at.head = work.head * groups + work.block - at.block * groups;
    }
    return at;
}

/* The work of item `number`. If sequences share a bias or mask, and heads do not, the items of all
 * sequences of a head are consecutive, so that it is read from memory once. */
template <class S>
GPU_DEVICE fattn_work wgmma_item_work(const fattn_gpu_args &g, wgmma_control<S> &control,
                                      int64_t number)
{
    const fattn_problem &p = g.problem;
    const fattn_tiling &tiling = control.tiling;
    if ((S::MAY_LIST || S::IS_SPLIT) && control.listed) {
        return wgmma_listed_work<S>(g, control, (uint32_t)number);
    }
    fattn_work work = fattn_schedule_item(&tiling, p.heads_k, number);
    if (mma_has<S>(g, FATTN_BIAS) || mma_has<S>(g, FATTN_MASK)) {
        const int64_t *const stride = mma_has<S>(g, FATTN_BIAS) ? p.bias_stride : p.mask_stride;
        if (stride[0] == 0 && stride[1] != 0) {
            const int64_t n = work.batch * p.heads_k + work.head;
            work.head = fattn_quotient(n, p.batch);
            work.batch = n - work.head * p.batch;
        }
    }
    return work;
}

/* The bytes from the scan (scan.h): the first of all items, and the first of one item. */
GPU_DEVICE uint8_t *wgmma_bytes(const fattn_gpu_args &g)
{
    return (uint8_t *)g.workspace + WGMMA_WORKSPACE;
}

template <class S>
GPU_DEVICE uint8_t *wgmma_bytes_of(const fattn_gpu_args &g, const fattn_tiling &tiling,
                                   const fattn_work &work)
{
    const int64_t *const stride = S::HAS_BLOCKS ? NULL : scan_stride(g.problem);
    return wgmma_bytes(g) + scan_at(tiling, g.problem.heads_k, stride, work);
}

/* A tile of keys, or -1. mixed: the feature changes something in it, because it drops some pair or
 * is a bias other than 0. */
typedef struct wgmma_key_tile {
    int tile;
    bool mixed;
} wgmma_key_tile;

/* The last tile below `past` of which something is kept. */
GPU_DEVICE wgmma_key_tile wgmma_tile_below(const uint8_t *bytes, int past)
{
    wgmma_key_tile last = {past - 1, true};
    if (!bytes) {
        return last;
    }
    last.tile = -1;
    GPU_ROLLED
    for (int n = (past - 1) >> 3; past > 0 && n >= 0; n--) {
        const uint64_t eight = scan_eight(bytes, n), kept = scan_kept(eight, n, past);
        if (kept) {
            const int byte = 7 - __clzll((int64_t)kept) / 8;
            last.tile = 8 * n + byte;
            last.mixed = eight >> 8 * byte & SCAN_MIXED;
            return last;
        }
    }
    return last;
}

/* The range of tiles from the first to the last of which something is kept, for the kernel with all
 * features. */
GPU_DEVICE wgmma_tiles wgmma_kept_ends(const uint8_t *bytes, int tiles)
{
    wgmma_tiles kept = {0, wgmma_tile_below(bytes, tiles).tile + 1};
    GPU_ROLLED
    while (kept.first < kept.past && !(bytes[kept.first] & SCAN_KEPT)) {
        kept.first++;
    }
    return kept;
}

/* Sets how many tiles of an item are not hidden. If there are none, the item becomes empty. */
template <class S>
GPU_DEVICE void wgmma_item_tiles(const wgmma_block<S> &b, const uint8_t *bytes, int slot,
                                 wgmma_item &w)
{
    int tiles = bytes ? 0 : w.past - w.block;
    GPU_ROLLED
    for (int n = w.block / 8; bytes && 8 * n < w.past; n++) {
        const uint64_t before = w.block <= 8 * n ? 0 : (UINT64_C(1) << 8 * (w.block - 8 * n)) - 1;
        tiles += __popcll(scan_kept(scan_eight(bytes, n), n, w.past) & ~before);
    }
    b.control->bytes[slot] = bytes;
    b.control->tiles[slot] = tiles;
    __syncwarp(); /* all lanes have read the fields that change now */
    if (tiles == 0) {
        w.past = w.block;
        if (mma_lane() < S::WARPGROUPS) {
            w.own_past[mma_lane()] = w.block;
        }
    }
}

/* Sets the description of item `number`. Returns whether it has rows, and whether its part exists.
 * All lanes write the same values. */
template <class S>
GPU_DEVICE bool wgmma_item_set(const fattn_gpu_args &g, const wgmma_block<S> &b, int64_t number,
                               int slot)
{
    wgmma_item &w = b.control->item[slot];
    const fattn_problem &p = g.problem;
    const bool cuts = S::IS_SPLIT && b.control->listed;
    number = S::IS_SPLIT && !cuts ? gpu_item_of(g, number) : number;
    const fattn_work work = wgmma_item_work<S>(g, *b.control, number);
    wgmma_tiles kept = {0, INT32_MAX};
    if (S::KNOWN == MMA_ANY && wgmma_hides<S>(g)) {
        kept = wgmma_kept_ends(wgmma_bytes_of<S>(g, b.control->tiling, work),
                               (int)b.control->tiling.k_blocks);
    }
    fattn_sequence &seq = b.control->seq;
    if (gpu_sequences_differ(p)) {
        seq = gpu_sequence(g, work.batch);
    } else { /* its other fields are the same for all sequences */
        seq.q_batch = seq.k_batch = work.batch;
    }
    wgmma_forget();
    const int tile_rows = wgmma_tile_rows<S>(b.group);
    const wgmma_place at = wgmma_place_of<S>(p, b, work);
    const int64_t i0 = at.block * wgmma_query(b, tile_rows);
    const int64_t head = at.head * b.group;
    w.rows = (int)gpu_clamp((seq.sq - i0) * b.group, 0, tile_rows);
    if (w.rows == 0) {
        return false;
    }
    wgmma_item_keys(g, b, seq, i0, kept, w);
    if constexpr (S::IS_SPLIT) {
        wgmma_part &part = b.control->part[slot];
        part.number = cuts ? (int)b.control->cut.slot : (int)number;
        part.split = (int)work.split;
        if (!wgmma_item_part(g, b, seq, i0, part, w)) {
            return false;
        }
    }
    if constexpr (S::SKIPS) {
        const bool scanned = S::HAS_BLOCKS || wgmma_hides<S>(g);
        wgmma_item_tiles(b, scanned ? wgmma_bytes_of<S>(g, b.control->tiling, work) : NULL, slot,
                         w);
    }
    w.q_row = (int)(seq.q_row + i0);
    w.k_row = (int)seq.k_row;
    w.batch = (int)work.batch;
    w.q_batch = p.q.batch ? (int)seq.q_batch : 0;
    w.k_batch = (int)seq.k_batch;
    w.q_head = (int)at.head;
    w.k_head = (int)work.head;
    w.o = gpu_query_at(seq, p.o, i0, head);
    w.lse = gpu_lse_at(p, seq, work.batch, head) + i0;
    if constexpr (!S::IS_LEAN) {
        wgmma_item_terms<S>(g, w, work.batch, i0, b.group, seq, b.control->terms[slot]);
    }
    return true;
}

/* --- The planner ------------------------------------------------------------------------------ */

/* Sets what all items share. */
template <class S>
GPU_DEVICE void wgmma_plan_begin(const fattn_gpu_args &g, const wgmma_block<S> &b)
{
    fattn_tiling &tiling = b.control->tiling;
    const int queries = wgmma_query(b, wgmma_tile_rows<S>(b.group));
    tiling = g.tiling; /* its q_blocks has blocks of br rows; here they have whole queries */
    tiling.q_blocks = fattn_quotient(g.problem.seqlen_q + queries - 1, queries);
    if constexpr (S::HALVES) {
        tiling.q_blocks *= wgmma_group_of(g.problem) / b.group;
    }
    tiling.items = tiling.heads * tiling.q_blocks * (S::IS_SPLIT ? tiling.splits : 1);
    b.control->listed =
        S::IS_SPLIT ? fattn_cuda_cuts(&g.tiling) : wgmma_lists(&g.problem, g.tiling.items);
    if ((S::MAY_LIST || S::IS_SPLIT) && b.control->listed) {
        tiling.items = wgmma_lists_of<S>(g).listed[g.problem.batch - 1].past;
    }
    if (!gpu_sequences_differ(g.problem)) {
        b.control->seq = gpu_sequence(g, 0);
    }
    if constexpr (S::IS_STAGED) {
        for (int n = 0; n < WGMMA_ITEMS; n++) {
            b.control->terms[n].bias_rows = wgmma_are_rows<S>(g);
        }
    }
    wgmma_forget();
}

/* The loop of the planner. It takes the number of an item late, when the copies of the item before
 * are about to end. If it took it earlier, it would hold items that other blocks could begin. */
template <class S> GPU_DEVICE void wgmma_plan(const fattn_gpu_args &g, const wgmma_block<S> &b)
{
    wgmma_control<S> &control = *b.control;
    const bool counts = wgmma_counts<S>(g);
    wgmma_plan_begin(g, b);
    const unsigned begun = (unsigned)(gpu_blocks() / S::CLUSTER);
    const unsigned items = (unsigned)control.tiling.items;
    unsigned number = (unsigned)(gpu_block() / S::CLUSTER);
    unsigned *const counter = wgmma_lists_of<S>(g).counter;
    int taken = 0; /* from the counter */
    const auto next = [&]() {
        if constexpr (S::CLUSTER > 1) {
            return counts ? (unsigned)wgmma_take_together(control.sent, wgmma_rank(), counter,
                                                          (int)begun, taken++)
                          : number + begun;
        }
        unsigned other = 0;
        if (counts && mma_lane() == 0) {
            other = atomicAdd(counter, 1u);
        }
        return begun + (counts ? (unsigned)__shfl_sync(0xffffffffu, (int)other, 0) : number);
    };
    for (int n = 0;; n++) {
        wgmma_item &w = control.item[n % WGMMA_ITEMS];
        if (n > 0 && counts) {
            wgmma_await(&control.item_wanted, (n - 1) % 2);
        }
        number = n > 0 ? next() : number;
        wgmma_await(&control.item_empty[n % WGMMA_ITEMS], n / WGMMA_ITEMS % 2 ^ 1);
        while (number < items && !wgmma_item_set(g, b, number, n % WGMMA_ITEMS)) {
            number = next();
        }
        w.exists = number < items;
        __syncwarp();
        wgmma_release(&control.item_full[n % WGMMA_ITEMS]);
        if (number >= items) {
            return;
        }
    }
}

#endif
