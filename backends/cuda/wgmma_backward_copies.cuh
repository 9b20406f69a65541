/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The roles of a block of backward on Hopper that do not multiply (wgmma_backward.cuh): the warp
 * that takes items, the thread that copies tiles to shared memory, and the warps that add dQ to the
 * workspace. If two blocks share an item, the latter send dS to the other block and wait for turns
 * (wgmma_backward_pair.cuh).
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_COPIES_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_COPIES_CUH

#include "backends/cuda/wgmma_backward_pair.cuh"

/* --- The taker -------------------------------------------------------------------------------- */

/* Finds which tiles of queries an item visits, and with which it begins. Called by a warp; each
 * lane has one of 32 tiles. */
template <class S>
GPU_DEVICE void wgmma_find_visits(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                  wgmma_backward_item &w)
{
    const wgmma_scan_results &scan = b.control->scan;
    const int mixes = SCAN_MIXED << (S::KNOWS_HALVES ? b.rank : 0);
    const int words = (int)WGMMA_BACKWARD_WORDS(g.tiling.q_blocks);
    const int64_t first = w.batch * scan.batch + w.head * scan.head + w.block / S::BLOCKS;
    uint32_t *const visits = wgmma_visits_of<S>(g, scan, w);
    int start = w.past, tiles = 0;
    GPU_ROLLED
    for (int n = 0; n < words; n++) {
        const int tile = 32 * n + mma_lane();
        int byte = 0;
        if (w.first <= tile && tile < w.past) {
            byte = scan.bytes ? scan.bytes[first + tile * scan.tile] : SCAN_KEPT | mixes;
        }
        const uint32_t kept = __ballot_sync(0xffffffffu, byte & SCAN_KEPT);
        const uint32_t mixed = __ballot_sync(0xffffffffu, byte & mixes);
        start = kept && start == w.past ? 32 * n + __ffs((int)kept) - 1 : start;
        tiles += __popc(kept);
        if (mma_lane() == 0) {
            visits[n] = kept;
            visits[words + n] = mixed;
        }
    }
    __syncwarp(); /* all lanes have read the item */
    if (mma_lane() == 0) {
        w.start = start;
        w.tiles = tiles * (int)g.group;
    }
}

/* The item that is taken as number `taken`. blocks: how many share an item. */
GPU_DEVICE wgmma_shift wgmma_shift_taken(const fattn_gpu_args &g, int blocks, int taken)
{
    wgmma_shift_run run;
    run.q_blocks = (int)g.tiling.q_blocks;
    run.k_blocks = (int)g.tiling.k_blocks;
    run.heads = (int)(g.problem.batch * g.problem.heads_k);
    run.grid = (int)gpu_blocks() / blocks;
    run.side_by_side = max(wgmma_side_by_side() / blocks, 1);
    return wgmma_is_shifted(g.problem) ? wgmma_shift_of(run, taken) : wgmma_shift_none(taken);
}

/* The number of the next item in the order of taking. */
GPU_DEVICE int wgmma_take(const fattn_gpu_args &g, unsigned *counter)
{
    const int number = mma_lane() == 0 ? (int)atomicAdd(counter, 1u) : 0;
    return __shfl_sync(0xffffffffu, number, 0) +
           (wgmma_is_ordered(g.problem) ? 0 : (int)gpu_blocks());
}

/* The loop of the taker. It takes an item late, when the copies of the one before are about to end.
 * If it took it earlier, it would hold items that other blocks could begin. An item for which the
 * block's current item may have to wait is not taken before that is finished. */
template <class S>
GPU_DEVICE void wgmma_take_items(const fattn_gpu_args &g, const wgmma_backward_block<S> &b)
{
    enum { WORDS = sizeof(wgmma_backward_item) / 4 };
    static_assert(WORDS <= GPU_WAVE, "a lane copies a word");
    wgmma_backward_control<S> &control = *b.control;
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    const fattn_problem &p = g.problem;
    const int items = wgmma_items_of(g, workspace);
    const bool ordered = b.ordered; /* then first items come from the counter too */
    int number = (int)gpu_block() / S::BLOCKS;
    int part = -1;
    if constexpr (!S::IS_LEAN) {
        if (mma_has<S>(g, FATTN_DROPOUT) && mma_lane() == 0) {
            control.dropout = gpu_dropout(g);
        }
    }
    for (int n = 0;; n++) {
        if (n > 0) {
            wgmma_await(&control.item_wanted, (n - 1) % 2);
            if (part >= 0 && b.rank == 0) {
                const int next = wgmma_peek((const int32_t *)workspace.counter);
                if (next < items &&
                    !wgmma_shift_may_take(part, wgmma_shift_taken(g, S::BLOCKS, next))) {
                    wgmma_await(&control.item_empty[wgmma_item_slot<S>(n - 1)],
                                wgmma_item_phase<S>(n - 1));
                }
            }
        }
        if (n > 0 || ordered) {
            const int begun = ordered ? 0 : (int)gpu_blocks() / S::BLOCKS;
            number = S::IS_PAIR ? wgmma_take_together(b.control->peer.item, b.rank,
                                                      workspace.counter, begun, ordered ? n : n - 1)
                                : wgmma_take(g, workspace.counter);
        }
        const int slot = wgmma_item_slot<S>(n);
        wgmma_await(&control.item_empty[slot], wgmma_item_phase<S>(n) ^ 1);
        const bool exists = number < items;
        if (exists) {
            const wgmma_shift shift = wgmma_shift_taken(g, S::BLOCKS, number);
            const uint32_t *const from =
                (const uint32_t *)(workspace.items + shift.item * S::BLOCKS + b.rank);
            part = shift.part;
            if (mma_lane() < WORDS) {
                ((uint32_t *)&control.item[slot])[mma_lane()] = from[mma_lane()];
            }
            __syncwarp();
            if (shift.peers && mma_lane() == 0) {
                wgmma_backward_item &item = control.item[slot];
                item.peers = shift.peers;
                item.start = shift.number * wgmma_apart<S>(item);
            }
            if constexpr (S::SKIPS) {
                if (wgmma_skips(&p)) {
                    wgmma_find_visits<S>(g, b, control.item[slot]);
                }
            }
        }
        control.exists[slot] = exists;
        __syncwarp();
        wgmma_release(&control.item_full[slot]);
        if (!exists) {
            return;
        }
    }
}

/* --- The copier ------------------------------------------------------------------------------- */

/* Begins to copy all channels of a tile of rows. */
template <int PANELS, int ROWS>
GPU_DEVICE void wgmma_copy_panels(uint32_t to, const wgmma_map *map, uint64_t *full, int row,
                                  int head, int batch)
{
    GPU_UNROLL
    for (int c = 0; c < PANELS; c++) {
        wgmma_copy(to + c * ROWS * 128, map, full, 64 * c, row, head, batch, WGMMA_EVICT_LAST);
    }
}

/* Begins to copy keys or values. */
template <class S>
GPU_DEVICE void wgmma_copy_keys(uint32_t to, const wgmma_map *map, uint64_t *full,
                                const wgmma_backward_item &w, const fattn_strides &stride)
{
    wgmma_poison(to, S::KEY_BYTES);
    wgmma_arrive_expect_tx(full, S::KEY_BYTES);
    wgmma_copy_panels<S::PANELS, S::KEYS>(to, map, full, w.k_row, stride.head ? w.head : 0,
                                          stride.batch ? w.k_batch : 0);
}

/* Begins to copy a tile of queries or of dO of query head `head`, and a float for each row. If two
 * blocks share an item, the announced bytes include those that the other block multicasts. */
template <class S>
GPU_DEVICE void wgmma_copy_rows(uint32_t to, const wgmma_map *map, uint32_t floats,
                                const float *from, uint64_t *full, const wgmma_backward_item &w,
                                const fattn_strides &stride, int rank, int head, int tile)
{
    enum { FLOATS = 4 * S::QUERIES, BYTES = S::QUERY_BYTES / S::BLOCKS };
    wgmma_poison(to + rank * BYTES, BYTES);
    wgmma_poison(floats, FLOATS);
    wgmma_arrive_expect_tx(full, S::QUERY_BYTES + FLOATS);
    if (S::IS_PAIR) {
        wgmma_copy_half<S::PANELS, S::QUERIES>(rank, to, map, full, w.q_row + tile * S::QUERIES,
                                               stride.head ? head : 0,
                                               stride.batch ? w.q_batch : 0);
    } else {
        wgmma_copy_panels<S::PANELS, S::QUERIES>(to, map, full, w.q_row + tile * S::QUERIES,
                                                 stride.head ? head : 0,
                                                 stride.batch ? w.q_batch : 0);
    }
    wgmma_copy_bytes(floats, from, FLOATS, full);
}

/* Whether the bias or mask is staged by TMA. The host has checked its strides; this checks the
 * alignment of its address. */
template <class S> GPU_DEVICE bool wgmma_is_staged(const fattn_gpu_args &g)
{
    const void *const data =
        S::KNOWN == FATTN_BIAS ? (const void *)g.buffers.bias : (const void *)g.buffers.mask;
    return S::IS_STAGED && (uintptr_t)data % 16 == 0;
}

/* Whether its rows may be read 16 bytes at a time. */
template <class S> GPU_DEVICE bool wgmma_has_chunks(const fattn_gpu_args &g)
{
    return S::READS_ROWS && wgmma_are_rows<S>(g);
}

/* Begins to copy a tile of it, in rows of 128 bytes; only one row if queries share it. */
template <class S>
GPU_DEVICE void wgmma_copy_term(const fattn_gpu_args &g, uint32_t to, const wgmma_map *map,
                                uint64_t *full, const wgmma_backward_item &w, int head, int tile)
{
    enum { COLUMNS = S::KNOWN == FATTN_BIAS ? 64 : 128 };
    const int64_t *const stride = wgmma_term_stride<S>(g.problem);
    const int rows = stride[2] ? S::QUERIES : 1;
    wgmma_poison(to, S::TERM_BYTES);
    wgmma_arrive_expect_tx(full, rows * 128 * (S::KEYS / COLUMNS));
    GPU_UNROLL
    for (int c = 0; c < S::KEYS / COLUMNS; c++) {
        wgmma_copy(to + c * S::QUERIES * 128, map, full, w.block * S::KEYS + c * COLUMNS,
                   stride[2] ? tile * S::QUERIES : 0, stride[1] ? head : 0, stride[0] ? w.batch : 0,
                   WGMMA_EVICT_LAST);
    }
}

/* The copier's position. */
template <class S> struct wgmma_copies {
    wgmma_ring<S::STAGES> q;
    wgmma_ring<S::DOUT_STAGES> dout;
    wgmma_ring<S::TERM_RING_STAGES> term;
    wgmma_ring<S::KEY_STAGES> keys;
    wgmma_ring<S::VALUE_STAGES> values;
    uint32_t visits; /* tiles of queries so far */
};

/* Copies the tiles of an item. maps: q, k, v, dO, and a bias or mask if that is staged. */
template <class S>
GPU_DEVICE void wgmma_copy_item(const fattn_gpu_args &g, const wgmma_map *maps,
                                const wgmma_backward_block<S> &b, const wgmma_backward_item &w,
                                wgmma_copies<S> &at)
{
    wgmma_backward_control<S> &control = *b.control;
    const fattn_problem &p = g.problem;
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    const uint32_t *const visits =
        S::SKIPS && wgmma_skips(&p) ? wgmma_visits_of<S>(g, control.scan, w) : NULL;
    const int words = (int)WGMMA_BACKWARD_WORDS(g.tiling.q_blocks);
    int head = w.head * b.group, tile = w.start;
    int64_t row = (int64_t)w.row_tile * S::QUERIES; /* the head's first */
    wgmma_await(&control.k_empty[at.keys.stage], at.keys.phase ^ 1);
    wgmma_copy_keys<S>(b.k + at.keys.stage * S::KEY_BYTES, maps + 1, &control.k_full[at.keys.stage],
                       w, p.k);
    wgmma_ring_advance(at.keys);
    GPU_ROLLED
    for (int n = 0; n < w.tiles; n++) {
        wgmma_await(&control.q_empty[at.q.stage], at.q.phase ^ 1);
        const bool mixed = !(S::KNOWS_PLAIN || S::KNOWS_HALVES) || !visits ||
                           visits[words + tile / 32] >> tile % 32 & 1;
        if (S::SKIPS) {
            *wgmma_visit_at<S>(b, at.visits++) = {tile, head - w.head * b.group, mixed};
        }
        wgmma_copy_rows<S>(b.q + at.q.stage * S::QUERY_BYTES, maps,
                           b.lse + at.q.stage * 4 * S::QUERIES,
                           workspace.lse + row + tile * S::QUERIES, &control.q_full[at.q.stage], w,
                           p.q, b.rank, head, tile);
        if (n == 0) {
            if (S::CHAINS) {
                wgmma_await(&control.v_empty[at.values.stage], at.values.phase ^ 1);
            }
            wgmma_copy_keys<S>(b.v + at.values.stage * S::KEY_BYTES, maps + 2,
                               &control.v_full[at.values.stage], w, p.v);
            wgmma_ring_advance(at.values);
            if (S::IS_PAIR) {
                wgmma_copy_peer_keys<S>(b, maps + 1, w, p.k);
            }
        }
        if constexpr (S::IS_STAGED) {
            if (b.staged && mixed) {
                wgmma_await(&control.term_empty[at.term.stage], at.term.phase ^ 1);
                wgmma_copy_term<S>(g, b.terms + at.term.stage * S::TERM_BYTES, maps + 6,
                                   &control.term_full[at.term.stage], w, head, tile);
                wgmma_ring_advance(at.term);
            }
        }
        wgmma_await(&control.dout_empty[at.dout.stage], at.dout.phase ^ 1);
        wgmma_copy_rows<S>(b.dout + at.dout.stage * S::QUERY_BYTES, maps + 3,
                           b.delta + at.dout.stage * 4 * S::QUERIES,
                           workspace.delta + row + tile * S::QUERIES,
                           &control.dout_full[at.dout.stage], w, p.dout, b.rank, head, tile);
        wgmma_ring_advance(at.q);
        wgmma_ring_advance(at.dout);
        tile = S::SKIPS && visits ? wgmma_next_visit(w, visits, tile) : wgmma_next_tile(w, tile);
        if (tile == w.start) {
            head++;
            row += (int64_t)workspace.tiles * S::QUERIES;
        }
    }
}

template <class S>
GPU_DEVICE void wgmma_copy_backward(const fattn_gpu_args &g, const wgmma_map *maps,
                                    const wgmma_backward_block<S> &b)
{
    wgmma_backward_control<S> &control = *b.control;
    wgmma_copies<S> at = {{0, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, 0};
    const wgmma_backward_item *w;
    for (int n = 0; (w = wgmma_item_await<S>(b, n)); n++) {
        if (w->tiles > 0) {
            wgmma_copy_item<S>(g, maps, b, *w, at);
        }
        wgmma_arrive(&control.item_wanted);
        wgmma_arrive(&control.item_empty[wgmma_item_slot<S>(n)]);
    }
}

/* --- The adders ------------------------------------------------------------------------------- */

/* The turn of an item at a tile of dQ: how many blocks add to the tile before it. In a
 * deterministic run, blocks add from the last tile of keys that the queries attend to to the first,
 * each after the one before. There is no deadlock: a block only waits for blocks that took their
 * items earlier, which are running or have finished and never wait for a later one. The number of
 * blocks before is that of the tiles of keys after its own to which the tile attends, computed for
 * the tile's last query even if that does not exist. Shifted items visit all tiles; they add part
 * by part, in the order of wgmma_shift.h. */
template <class S> GPU_DEVICE int32_t wgmma_own_turn(const wgmma_backward_item &w, int tile)
{
    if (w.peers) {
        const int apart = wgmma_apart<S>(w), number = w.start / apart;
        const int before = w.block / S::BLOCKS - number; /* items of earlier parts */
        return before + wgmma_shift_turn(number, w.peers, apart, tile);
    }
    const int past = min((tile + 1) * S::QUERIES - 1 + w.reach, w.sequence_keys);
    return (past - 1) / S::ITEM_KEYS - w.block / S::BLOCKS;
}

/* What an adder adds or stores of a tile: the halves of warpgroups `group` to `past` - 1. */
typedef struct wgmma_adder {
    int group, past;
    bool stores; /* no other block adds to it */
} wgmma_adder;

/* Releases the adder's part of dQ in shared memory, when it has been read. */
GPU_DEVICE void wgmma_free_dq(wgmma_adder adder)
{
    if (mma_lane() == 0) {
        wgmma_await_read();
    }
    __syncwarp();
    GPU_ROLLED
    for (int n = adder.group; n < adder.past; n++) {
        wgmma_named_arrive(WGMMA_DQ_ADDED + n, WGMMA_WITH_ADDER);
    }
}

/* Adds a tile of dQ when it has been computed. Only then is address() called. */
template <class S, class Address>
GPU_DEVICE void wgmma_add_tile(const wgmma_backward_block<S> &b, wgmma_adder adder,
                               const Address &address)
{
    GPU_ROLLED
    for (int n = adder.group; n < adder.past; n++) {
        wgmma_named_sync(WGMMA_DQ_MADE + n, WGMMA_WITH_ADDER);
        if (mma_lane() == 0) {
            float *const to = address() + n * (S::PART * 64);
            const uint32_t from = b.dq + n * S::DQ_ROOM;
            if (adder.stores) {
                wgmma_replace(to, from, S::PART_BYTES, WGMMA_EVICT_LAST);
            } else {
                wgmma_add(to, from, S::PART_BYTES, WGMMA_EVICT_LAST);
            }
        }
        __syncwarp();
    }
}

/* Stores dK or dV of an item that warpgroup n has handed over. from: 64 rows in shared memory. */
template <class S>
GPU_DEVICE void wgmma_store_boxes(const wgmma_map *map, const fattn_strides &stride, uint32_t from,
                                  const wgmma_backward_item &w, int n)
{
    GPU_UNROLL
    for (int c = 0; c < S::PANELS; c++) {
        wgmma_store_box(map, from + c * 64 * 128, 64 * c, w.k_row + 64 * n,
                        stride.head ? w.head : 0, stride.batch ? w.k_batch : 0);
    }
}

/* Stores dK and dV of an item, if warpgroup n hands them over: both at once, or one after the
 * other. */
template <class S>
GPU_DEVICE void wgmma_store_handed(const fattn_gpu_args &g, const wgmma_map *maps,
                                   const wgmma_backward_block<S> &b, const wgmma_backward_item &w,
                                   int n)
{
    const fattn_problem &p = g.problem;
    if (!wgmma_hands_over<S>(g, w, n)) {
        return;
    }
    GPU_UNROLL
    for (int step = 0; step < S::HAND_STEPS; step++) {
        const uint32_t from = b.dq + n * S::DQ_ROOM;
        wgmma_named_sync(WGMMA_DQ_MADE + n, WGMMA_WITH_ADDER);
        if (mma_lane() == 0) {
            if (step == 0 && p.outputs & FATTN_OUT_DV) {
                wgmma_store_boxes<S>(maps + 5, p.dv, from, w, n);
            }
            if (step == S::HAND_STEPS - 1 && p.outputs & FATTN_OUT_DK) {
                wgmma_store_boxes<S>(maps + 4, p.dk, from + S::DK_HANDED, w, n);
            }
            wgmma_await_read();
        }
        __syncwarp();
        wgmma_named_arrive(WGMMA_DQ_ADDED + n, WGMMA_WITH_ADDER);
    }
}

/* Waits until `own` blocks have added to the tile of dQ. Called by a warp. */
GPU_DEVICE void wgmma_await_turn(const int32_t *turn, int32_t own)
{
    if (mma_lane() == 0) {
        while (wgmma_peek(turn) != own) {}
    }
    __syncwarp();
}

/* The same in turn, for the adder of even or of odd tiles. It waits for the turn before the tile
 * has been computed, which costs nothing if the blocks before are ahead. */
template <class S>
GPU_DEVICE void wgmma_add_in_turn(const wgmma_backward_block<S> &b, wgmma_adder adder, int odd,
                                  float *to, int32_t *turn, int32_t own)
{
    wgmma_await_turn(turn, own);
    wgmma_named_sync(WGMMA_NEXT_DUE + odd, WGMMA_ADDERS);
    wgmma_add_tile<S>(b, adder, [&] { return to; });
    wgmma_named_arrive(WGMMA_NEXT_DUE + (odd ^ 1), WGMMA_ADDERS);
    wgmma_free_dq(adder);
    if (mma_lane() == 0) {
        wgmma_await_added();
        mma_fence();
        mma_poke(turn, own + 1);
    }
    __syncwarp();
}

/* The loop of adder 0 or 1. Each adds the part of one warpgroup. In a deterministic run each adds
 * every other tile, because adding a tile in turn and passing on the turn takes longer than
 * computing it. The first and last operations on named barriers pair up: the adder arrives once
 * before the first tile, and that is waited for after the last. */
template <class S>
GPU_DEVICE void wgmma_add_all(const fattn_gpu_args &g, const wgmma_map *maps,
                              const wgmma_backward_block<S> &b, int number)
{
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    const bool ordered = wgmma_is_ordered(g.problem);
    const wgmma_adder adder = {ordered ? 0 : number, ordered ? (int)S::WARPGROUPS : number + 1,
                               wgmma_stores<S>(g)};
    const wgmma_backward_item *w;
    int odd = 0;         /* parity of the next tile */
    uint32_t visits = 0; /* tiles so far */
    if (!ordered || number == 0) {
        wgmma_free_dq(adder);
    } else {
        wgmma_named_arrive(WGMMA_NEXT_DUE, WGMMA_ADDERS);
    }
    for (int n = 0; (w = wgmma_item_await<S>(b, n)); n++) {
        int first = w->row_tile; /* the head's first tile */
        int tile = w->start;
        GPU_ROLLED
        for (int left = w->tiles; left > 0; left--) {
            const auto address = [&](int64_t n) {
                return workspace.dq + n * (S::QUERIES * S::WIDTH);
            };
            const int64_t at = first + tile;
            if (!ordered) {
                if (S::CHAINS && left == 1) {
                    wgmma_store_handed<S>(g, maps, b, *w, number);
                }
                wgmma_add_tile<S>(b, adder, [&] {
                    const wgmma_visit visit = *wgmma_visit_at<S>(b, visits);
                    return address(
                        S::SKIPS ? w->row_tile + visit.head * workspace.tiles + visit.tile : at);
                });
                wgmma_free_dq(adder);
            } else if (odd == number) {
                wgmma_add_in_turn<S>(b, adder, odd, address(at), workspace.turns + at,
                                     wgmma_own_turn<S>(*w, tile));
            }
            odd ^= 1;
            visits++;
            tile = wgmma_next_tile(*w, tile);
            first += tile == w->start ? workspace.tiles : 0;
        }
        if (!ordered && !S::CHAINS) {
            wgmma_store_handed<S>(g, maps, b, *w, number);
        }
        __syncwarp();
        wgmma_release(&b.control->item_empty[wgmma_item_slot<S>(n)]);
    }
    if (ordered && odd == number) {
        wgmma_named_sync(WGMMA_NEXT_DUE + odd, WGMMA_ADDERS);
    }
    if (mma_lane() == 0) {
        wgmma_await_added();
    }
}

/* The loop of adder 0 or 1 if two blocks share an item. Adder 0 sends dS of even tiles, adder 1 of
 * odd ones. The threads that multiply add to dQ themselves. In a deterministic run the adder then
 * waits for the block's turn, lets the threads add to the tile and, when all have, passes the turn
 * to the next block. */
template <class S>
GPU_DEVICE void wgmma_await_turns(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                  int number)
{
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    const wgmma_backward_item *w;
    uint32_t tiles = 0;
    for (int n = 0; (w = wgmma_item_await<S>(b, n)); n++) {
        int first = w->row_tile, tile = w->start;
        GPU_ROLLED
        for (int left = w->tiles; left > 0; left--) {
            const int odd = tiles % 2;
            if (odd == number) {
                wgmma_send_ds<S>(b, tiles);
            }
            if (b.ordered && odd == number) {
                int32_t *const turn = workspace.turns + (first + tile) * S::BLOCKS + b.rank;
                const int32_t own = wgmma_own_turn<S>(*w, tile);
                wgmma_await_turn(turn, own);
                wgmma_named_arrive(WGMMA_MAY_ADD + odd, WGMMA_ALL_WITH_ADDER);
                wgmma_named_sync(WGMMA_ADDED + odd, WGMMA_ALL_WITH_ADDER);
                if (mma_lane() == 0) {
                    mma_fence();
                    mma_poke(turn, own + 1);
                }
                __syncwarp();
            }
            tiles++;
            tile = wgmma_next_tile(*w, tile);
            first += tile == w->start ? workspace.tiles : 0;
        }
        __syncwarp();
        wgmma_release(&b.control->item_empty[wgmma_item_slot<S>(n)]);
    }
}

#endif
