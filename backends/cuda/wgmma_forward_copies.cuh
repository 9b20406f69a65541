/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies of forward on Hopper (wgmma_forward.cuh): what brings tiles of queries, keys and values,
 * and of a bias or mask, to shared memory.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_COPIES_CUH
#define FATTN_CUDA_WGMMA_FORWARD_COPIES_CUH

#include "backends/cuda/wgmma_forward_items.cuh"

/* --- The copier ------------------------------------------------------------------------------- */

/* Keys of a tile that lie in one page: the copier is a warp where these are not all of them. */
template <class S> GPU_DEVICE int wgmma_piece(const fattn_problem &p)
{
    return p.features & FATTN_PAGED ? (int)WGMMA_PIECE((int)p.page_size, S::KEYS) : (int)S::KEYS;
}

/* The page of key j, and its place there. */
typedef struct wgmma_slot {
    int page, row;
} wgmma_slot;

GPU_DEVICE wgmma_slot wgmma_slot_of(const fattn_gpu_args &g, const wgmma_item &w,
                                    const fattn_strides &stride, int j)
{
    const fattn_problem &p = g.problem;
    const uint32_t size = (uint32_t)p.page_size;
    const int32_t *const table = g.buffers.block_table + w.batch * p.block_table_stride;
    wgmma_slot slot;
    slot.page = stride.batch ? (int)gpu_clamp(table[(uint32_t)j / size], 0, p.num_pages - 1) : 0;
    slot.row = (int)((uint32_t)j % size);
    return slot;
}

/* What L2 is to do with keys and values: others need them too, unless a head has one block of rows
 * in all. */
template <class S> GPU_DEVICE uint64_t wgmma_key_policy(const fattn_gpu_args &g)
{
    return S::IS_SPLIT && g.tiling.q_blocks == 1 ? WGMMA_DROP : WGMMA_KEEP;
}

/* Keys or values from key j on, of more than one page: a lane has a piece. Pieces that begin past
 * the last key are left out. */
template <class S, int PANELS>
GPU_DEVICE void wgmma_copy_pieces(const fattn_gpu_args &g, uint32_t to, const wgmma_map *map,
                                  uint64_t *full, uint64_t *empty, int phase, const wgmma_item &w,
                                  const fattn_strides &stride, int j)
{
    static_assert(S::KEYS / WGMMA_PIECE_LEAST <= GPU_WAVE, "a lane has a piece");
    const int piece = wgmma_piece<S>(g.problem), r = mma_lane() * piece;
    const int rows = min(w.keys - j + piece - 1, (int)S::KEYS) / piece * piece;
    wgmma_slot slot = {0, 0};
    if (r < rows) { /* before the place is free: it takes a while */
        slot = wgmma_slot_of(g, w, stride, j + r);
    }
    wgmma_await(empty, phase);
    if (mma_lane() == 0) {
        wgmma_poison(to, PANELS * S::KEYS * 128);
        wgmma_arrive_expect_tx(full, rows * PANELS * 128);
    }
    __syncwarp();
    if (r < rows) {
        GPU_UNROLL
        for (int c = 0; c < PANELS; c++) {
            wgmma_copy(to + (c * S::KEYS + r) * 128, map, full, 64 * c, slot.row,
                       stride.head ? w.k_head : 0, slot.page, wgmma_key_policy<S>(g));
        }
    }
}

/* Tile n of all that go through a ring, of so many panels: keys or values from key j on. PIECES: of
 * more than one page. */
template <class S, int PANELS, bool PIECES>
GPU_DEVICE void wgmma_copy_tile(const fattn_gpu_args &g, uint32_t ring, const wgmma_map *map,
                                uint64_t *full, uint64_t *empty, int n, const wgmma_item &w,
                                const fattn_strides &stride, int j)
{
    enum { BYTES = PANELS * S::KEYS * 128 };
    const int stage = n % S::RING, phase = n / S::RING % 2 ^ 1;
    if constexpr (PIECES) {
        wgmma_copy_pieces<S, PANELS>(g, ring + stage * BYTES, map, &full[stage], &empty[stage],
                                     phase, w, stride, j);
    } else {
        const int head = stride.head ? w.k_head : 0;
        wgmma_slot slot = {stride.batch ? w.k_batch : 0, w.k_row + j};
        wgmma_await(&empty[stage], phase);
        wgmma_poison(ring + stage * BYTES, BYTES);
        wgmma_arrive_expect_tx(&full[stage], BYTES);
        if (g.problem.features & FATTN_PAGED) {
            slot = wgmma_slot_of(g, w, stride, j);
        }
        GPU_UNROLL
        for (int c = 0; c < PANELS; c++) {
            wgmma_copy(ring + stage * BYTES + c * S::KEYS * 128, map, &full[stage], 64 * c,
                       slot.row, head, slot.page, wgmma_key_policy<S>(g));
        }
    }
}

template <class S>
GPU_DEVICE void wgmma_copy_queries(const fattn_gpu_args &g, const wgmma_map *map,
                                   const wgmma_block<S> &b, int n, const wgmma_item &w)
{
    const fattn_strides &stride = g.problem.q;
    const int head = stride.head ? w.q_head : 0;
    wgmma_control<S> &control = *b.control;
    wgmma_await(&control.q_empty, n % 2 ^ 1);
    wgmma_poison(b.q, S::QUERY_BYTES);
    wgmma_arrive_expect_tx(&control.q_full, 128 * S::PANELS * wgmma_places<S>(b.group));
    GPU_UNROLL
    for (int c = 0; c < S::PANELS; c++) {
        wgmma_copy(b.q + c * S::ROWS * 128, map, &control.q_full, 64 * c, 0, w.q_row, head,
                   w.q_batch, WGMMA_DROP);
    }
}

/* Tiles of keys of an item. */
template <class S>
GPU_DEVICE int wgmma_tiles_of(const wgmma_block<S> &b, const wgmma_item &w, int place)
{
    if constexpr (S::HAS_BLOCKS) {
        return b.control->tiles[place];
    }
    return w.past - w.block;
}

/* The tile that comes before `tile` where a block mask rules some out. Who multiplies reads which
 * it is once tile k of all that go through the ring is there. */
template <class S>
GPU_DEVICE int wgmma_next_tile(const wgmma_block<S> &b, int place, int k, int tile, bool speaks)
{
    wgmma_control<S> &control = *b.control;
    const uint32_t *const words = control.words[place];
    const int next = wgmma_tile_below(words, tile), stage = k % S::RING;
    const bool mixed = words[next / 32 * 2 + 1] >> next % 32 & 1;
    wgmma_await(&control.k_empty[stage], k / S::RING % 2 ^ 1);
    if (speaks) {
        control.tile[stage] = mixed ? next | WGMMA_MIXED : next;
    }
    return next;
}

/* Keys of a tile, then values of the one before: in the order in which they are needed. Where the
 * copier is a warp, its first lane speaks. */
template <class S, bool PIECES>
GPU_DEVICE void wgmma_copy_all(const fattn_gpu_args &g, const wgmma_map *maps,
                               const wgmma_block<S> &b)
{
    wgmma_control<S> &control = *b.control;
    const fattn_problem &p = g.problem;
    const bool speaks = !PIECES || mma_lane() == 0;
    int k = 0, v = 0;
    for (int n = 0;; n++) {
        wgmma_await(&control.item_full[n % WGMMA_ITEMS], n / WGMMA_ITEMS % 2);
        const wgmma_item &w = control.item[n % WGMMA_ITEMS];
        if (!w.exists) {
            return;
        }
        const int last = wgmma_tiles_of(b, w, n % WGMMA_ITEMS) - 1;
        int tile = w.past;
        GPU_ROLLED
        for (int left = last; left >= -1; left--) {
            int j = (w.block + left) * S::KEYS, before = j + S::KEYS;
            if constexpr (S::HAS_BLOCKS) {
                before = tile * S::KEYS;
                tile = left < 0 ? 0 : wgmma_next_tile(b, n % WGMMA_ITEMS, k, tile, speaks);
                j = tile * S::KEYS;
            }
            if (left >= 0) {
                wgmma_copy_tile<S, S::PANELS, PIECES>(g, b.k, maps + 1, control.k_full,
                                                      control.k_empty, k++, w, p.k, j);
            }
            if (left == min(last, 2) && speaks) {
                wgmma_arrive(&control.item_wanted);
            }
            if (left == last) {
                if (speaks) {
                    wgmma_copy_queries(g, maps, b, n, w);
                }
            } else {
                wgmma_copy_tile<S, S::PANELS_V, PIECES>(g, b.v, maps + 2, control.v_full,
                                                        control.v_empty, v++, w, p.v, before);
            }
        }
        if (PIECES) {
            __syncwarp(); /* all have read the item */
        }
        if (speaks) {
            wgmma_arrive(&control.item_empty[n % WGMMA_ITEMS]);
        }
    }
}

/* --- The stager ------------------------------------------------------------------------------- */

/* Copies each tile of a bias or mask, in panels of 128 bytes of each row: heads of a group side by
 * side as in a tile of queries. Heads or queries that share what they read have one row. */
template <class S>
GPU_DEVICE void wgmma_stage_all(const fattn_gpu_args &g, const wgmma_map *map,
                                const wgmma_block<S> &b)
{
    wgmma_control<S> &control = *b.control;
    const int64_t *const stride = wgmma_term_stride<S>(g.problem);
    const int heads = stride[1] ? b.group : 1;
    const int queries = stride[2] ? wgmma_query(b, wgmma_places<S>(b.group)) : 1;
    const bool copies = wgmma_are_rows<S>(g);
    const uint64_t policy = stride[0] && stride[1] ? WGMMA_DROP : WGMMA_KEEP;
    for (int n = 0, used = 0;; n++) {
        wgmma_await(&control.item_full[n % WGMMA_ITEMS], n / WGMMA_ITEMS % 2);
        const wgmma_item &w = control.item[n % WGMMA_ITEMS];
        if (!w.exists) {
            return;
        }
        const mma_item &t = control.terms[n % WGMMA_ITEMS];
        GPU_ROLLED
        for (int block = w.past - 1; copies && block >= w.block; block--) {
            GPU_UNROLL
            for (int c = 0; c < S::TERM_PANELS; c++, used++) {
                const int stage = used % S::TERM_RING;
                wgmma_await(&control.term_empty[stage], used / S::TERM_RING % 2 ^ 1);
                wgmma_poison(b.terms + stage * S::TERM_BYTES, S::TERM_BYTES);
                wgmma_arrive_expect_tx(&control.term_full[stage], 128 * queries * heads);
                wgmma_copy(b.terms + stage * S::TERM_BYTES, map, &control.term_full[stage],
                           block * S::KEYS + c * S::TERM_KEYS, 0, stride[2] ? (int)t.i0 : 0,
                           stride[1] ? (int)t.hk : 0, stride[0] ? (int)t.pairs.b : 0, policy);
            }
        }
        wgmma_arrive(&control.item_empty[n % WGMMA_ITEMS]);
    }
}

#endif
