/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The producers of forward on Hopper (wgmma_forward.cuh): they copy tiles of queries, keys and
 * values, and of a bias or mask, to shared memory.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_COPIES_CUH
#define FATTN_CUDA_WGMMA_FORWARD_COPIES_CUH

#include "backends/cuda/wgmma_forward_items.cuh"

/* If pages divide a tile of keys into so many copies, a second warp issues those of values. */
#define WGMMA_COPIES_APART 8

/* --- The copier ------------------------------------------------------------------------------- */

/* The L2 policy of keys and values: other blocks read them too, unless a head has only one block of
 * rows. */
template <class S> GPU_DEVICE uint64_t wgmma_key_policy(const fattn_gpu_args &g)
{
    return S::IS_SPLIT && g.tiling.q_blocks == 1 ? WGMMA_EVICT_FIRST : WGMMA_EVICT_LAST;
}

/* Pieces of tiles of keys, which lanes have looked up in the table of pages. A piece is 2^shift
 * keys of one page; lanes have them in the order of keys. */
template <class S> struct wgmma_pages {
    int shift;
    int first;     /* the tile of lane 0's piece */
    int page, row; /* the first key of this lane's piece */
};

/* The pieces of one tile of keys: lane n has the page, and the row in it, of piece n. */
typedef struct wgmma_piece {
    int tile, page, row;
} wgmma_piece;

/* Looks up the pieces of as many tiles as the lanes suffice for. `tile` is the last of them. */
template <class S>
GPU_DEVICE void wgmma_look_up(const fattn_gpu_args &g, const wgmma_item &w, int tile,
                              wgmma_pages<S> &pages)
{
    const fattn_problem &p = g.problem;
    const uint32_t size = (uint32_t)p.page_size;
    pages.first = max(tile + 1 - GPU_WAVE / (S::KEYS >> pages.shift), 0);
    const uint32_t j = (uint32_t)(pages.first * S::KEYS + (mma_lane() << pages.shift));
    pages.page = 0;
    pages.row = 0;
    if (tile >= 0 && j < (uint32_t)min((tile + 1) * S::KEYS, w.keys)) {
        const uint32_t number = j / size;
        pages.page = (g.buffers.block_table + w.batch * p.block_table_stride)[number];
        pages.row = (int)(j - number * size);
    }
}

/* The pieces of a tile. Tiles are visited from the last to the first, so those before `now` are
 * looked up ahead, in `next`. */
template <class S>
GPU_DEVICE wgmma_piece wgmma_piece_of(const fattn_gpu_args &g, const wgmma_item &w, int tile,
                                      wgmma_pages<S> &now, wgmma_pages<S> &next)
{
    if (tile < now.first) {
        if (tile < next.first) {
            wgmma_look_up<S>(g, w, tile, next);
        }
        now = next;
        wgmma_look_up<S>(g, w, now.first - 1, next);
    }
    const int from = (tile - now.first) * (S::KEYS >> now.shift) + mma_lane();
    wgmma_piece piece;
    piece.tile = tile;
    piece.page = __shfl_sync(0xffffffffu, now.page, from);
    piece.page = min(max(piece.page, 0), (int)g.problem.num_pages - 1);
    piece.row = __shfl_sync(0xffffffffu, now.row, from);
    return piece;
}

/* Waits until stage n % RING of a ring is free, and begins to copy a tile of keys or values to it,
 * PANELS panels of 64 channels. n counts the tiles of the ring. PAGED: a warp does so, each lane a
 * piece of 2^shift keys, and none past the last key. Otherwise one thread copies the whole tile. */
template <class S, int PANELS, bool PAGED>
GPU_DEVICE void wgmma_copy_tile(const fattn_gpu_args &g, uint32_t ring, const wgmma_map *map,
                                uint64_t *full, uint64_t *empty, int n, const wgmma_item &w,
                                const fattn_strides &stride, const wgmma_piece &piece, int shift)
{
    enum { BYTES = PANELS * S::KEYS * 128 };
    const int stage = n % S::RING, head = stride.head ? w.k_head : 0, j = piece.tile * S::KEYS;
    const int pieces = PAGED ? (min(w.keys - j, (int)S::KEYS) + (1 << shift) - 1) >> shift : 1;
    const uint32_t to = ring + stage * BYTES;
    wgmma_await(&empty[stage], n / S::RING % 2 ^ 1);
    if (!PAGED || mma_lane() == 0) {
        wgmma_poison(to, BYTES);
        wgmma_arrive_expect_tx(&full[stage], PAGED ? (pieces << shift) * PANELS * 128 : BYTES);
    }
    if (PAGED) {
        __syncwarp();
    }
    if (!PAGED || mma_lane() < pieces) {
        const int page = PAGED ? piece.page : w.k_batch, row = PAGED ? piece.row : w.k_row + j;
        const uint32_t own = PAGED ? to + (mma_lane() << shift) * 128 : to;
        GPU_UNROLL
        for (int c = 0; c < PANELS; c++) {
            wgmma_copy(own + c * S::KEYS * 128, map, &full[stage], 64 * c, row, head,
                       stride.batch ? page : 0, wgmma_key_policy<S>(g));
        }
    }
}

/* The same for a tile that is stored in e4m3, in panels of 128 channels (wgmma_widen.cuh). used:
 * counts panels. */
template <class S, int WIDTH, bool PAGED>
GPU_DEVICE void wgmma_copy_stored(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                  const wgmma_map *map, int &used, const wgmma_item &w,
                                  const fattn_strides &stride, const wgmma_piece &piece, int shift)
{
    wgmma_control<S> &control = *b.control;
    const int head = stride.head ? w.k_head : 0, j = piece.tile * S::KEYS;
    const int pieces = PAGED ? (min(w.keys - j, (int)S::KEYS) + (1 << shift) - 1) >> shift : 1;
    const int page = PAGED ? piece.page : w.k_batch, row = PAGED ? piece.row : w.k_row + j;
    GPU_UNROLL
    for (int c = 0; c < WGMMA_STORED_PANELS(WIDTH); c++, used++) {
        const int stage = used % S::STORED_RING;
        const uint32_t to = b.stored + stage * S::STORED_BYTES;
        wgmma_await(&control.stored_empty[stage], used / S::STORED_RING % 2 ^ 1);
        if (!PAGED || mma_lane() == 0) {
            wgmma_poison(to, S::STORED_BYTES);
            wgmma_arrive_expect_tx(&control.stored_full[stage],
                                   PAGED ? (pieces << shift) * 128 : (int)S::STORED_BYTES);
        }
        if (PAGED) {
            __syncwarp();
        }
        if (!PAGED || mma_lane() < pieces) {
            wgmma_copy(PAGED ? to + (mma_lane() << shift) * 128 : to, map,
                       &control.stored_full[stage], 128 * c, row, head, stride.batch ? page : 0,
                       wgmma_key_policy<S>(g));
        }
    }
}

template <class S>
GPU_DEVICE void wgmma_copy_queries(const fattn_gpu_args &g, const wgmma_map *map,
                                   const wgmma_block<S> &b, int n, const wgmma_item &w)
{
    enum { PANEL = 128 * S::ROWS / S::CLUSTER };
    const fattn_strides &stride = g.problem.q;
    const int rows = wgmma_tile_rows<S>(b.group) / S::CLUSTER;
    int head = w.q_head, query = w.q_row;
    if (S::CLUSTER > 1 && b.group > rows) {
        head = head * S::CLUSTER + wgmma_share<S>();
    } else if (S::CLUSTER > 1) {
        query += wgmma_share<S>() * wgmma_query(b, rows);
    }
    head = stride.head ? head : 0;
    wgmma_control<S> &control = *b.control;
    wgmma_await(&control.q_empty, n % 2 ^ 1);
    wgmma_arrive_expect_tx(&control.q_full, 128 * S::PANELS * rows);
    GPU_UNROLL
    for (int c = 0; c < S::PANELS; c++) {
        wgmma_poison(b.q + c * PANEL, 128 * rows);
        wgmma_copy(b.q + c * PANEL, map, &control.q_full, 64 * c, 0, query, head, w.q_batch,
                   WGMMA_EVICT_FIRST);
    }
}

/* How many tiles of keys of an item are visited. */
template <class S>
GPU_DEVICE int wgmma_tiles_of(const wgmma_block<S> &b, const wgmma_item &w, int slot)
{
    if constexpr (S::SKIPS) {
        return b.control->tiles[slot];
    }
    return w.past - w.block;
}

/* The visited tile before `tile`. */
template <class S>
GPU_DEVICE wgmma_key_tile wgmma_tile_before(const wgmma_block<S> &b, int slot, int tile)
{
    if constexpr (S::SKIPS) {
        return wgmma_tile_below(b.control->bytes[slot], tile);
    }
    return {tile - 1, false};
}

/* The loop of the copier. It copies keys of a tile and then values of the tile before, in the order
 * in which they are consumed. PAGED: a warp does this, in which lane 0 arrives at barriers, or two
 * warps. keys, values: which of them the caller copies. Queries are copied with keys. */
template <class S, bool PAGED>
GPU_DEVICE void wgmma_copy_all(const fattn_gpu_args &g, const wgmma_map *maps,
                               const wgmma_block<S> &b, bool keys, bool values)
{
    static_assert(S::KEYS / WGMMA_PIECE_LEAST <= GPU_WAVE, "a lane has a piece");
    wgmma_control<S> &control = *b.control;
    const fattn_problem &p = g.problem;
    const bool elected = !PAGED || mma_lane() == 0;
    const bool counts = wgmma_counts<S>(g); /* then the planner waits for item_wanted */
    const int shift = PAGED ? 31 - __clz(WGMMA_PIECE((int)p.page_size, S::KEYS)) : 0;
    wgmma_pages<S> now = {shift, 0, 0, 0}, next = now;
    int used = 0;   /* tiles of keys so far; the ring of values is one behind */
    int stored = 0; /* panels in e4m3 so far */
    const auto copy_keys = [&](const wgmma_item &w, const wgmma_piece &piece) {
        if constexpr (S::WIDENS) {
            wgmma_copy_stored<S, S::WIDTH, PAGED>(g, b, maps + 1, stored, w, p.k, piece, shift);
        } else {
            wgmma_copy_tile<S, S::PANELS, PAGED>(g, b.k, maps + 1, control.k_full, control.k_empty,
                                                 used, w, p.k, piece, shift);
        }
    };
    const auto copy_values = [&](const wgmma_item &w, const wgmma_piece &piece) {
        if constexpr (S::WIDENS) {
            wgmma_copy_stored<S, S::WIDTH_V, PAGED>(g, b, maps + 2, stored, w, p.v, piece, shift);
        } else {
            wgmma_copy_tile<S, S::PANELS_V, PAGED>(g, b.v, maps + 2, control.v_full,
                                                   control.v_empty, used - 1, w, p.v, piece, shift);
        }
    };
    for (int n = 0;; n++) {
        const int slot = n % WGMMA_ITEMS;
        wgmma_await(&control.item_full[slot], n / WGMMA_ITEMS % 2);
        const wgmma_item &w = control.item[slot];
        if (!w.exists) {
            return;
        }
        const int last = wgmma_tiles_of(b, w, slot) - 1;
        wgmma_piece piece = {w.past, 0, 0};
        bool mixed = false;
        now.first = next.first = w.past;
        GPU_ROLLED
        for (int left = last; left >= -1; left--) {
            const wgmma_piece before = piece;
            if (left >= 0) {
                const wgmma_key_tile kept = wgmma_tile_before(b, slot, piece.tile);
                piece.tile = kept.tile;
                mixed = kept.mixed;
                if (PAGED) {
                    piece = wgmma_piece_of(g, w, piece.tile, now, next);
                }
            }
            if (left >= 0 && keys) {
                if constexpr (S::SKIPS) { /* warpgroups read it when the keys have landed */
                    wgmma_await(&control.k_empty[used % S::RING], used / S::RING % 2 ^ 1);
                    if (elected) {
                        control.tile[used % S::RING] =
                            mixed ? piece.tile | WGMMA_MIXED : piece.tile;
                    }
                }
                copy_keys(w, piece);
            }
            if (left == min(last, 2) && counts && keys && elected) {
                wgmma_arrive(&control.item_wanted);
            }
            if (left == last) {
                if (keys && elected) {
                    wgmma_copy_queries(g, maps, b, n, w);
                }
            } else if (values) {
                copy_values(w, before);
            }
            used += left >= 0;
        }
        if (PAGED) {
            __syncwarp(); /* all lanes have read the item */
        }
        if (elected) {
            wgmma_arrive(&control.item_empty[slot]);
        }
    }
}

/* --- The stager ------------------------------------------------------------------------------- */

/* The loop of the stager. It copies each mixed tile of a bias or mask, in panels with 128 bytes of
 * each row. Rows are in the order of a tile of queries, with the heads of a group adjacent. Heads
 * or queries that share the bias or mask have one row. */
template <class S>
GPU_DEVICE void wgmma_stage_all(const fattn_gpu_args &g, const wgmma_map *map,
                                const wgmma_block<S> &b)
{
    wgmma_control<S> &control = *b.control;
    const int64_t *const stride = wgmma_term_stride<S>(g.problem);
    const int heads = stride[1] ? b.group : 1;
    const int queries = stride[2] ? wgmma_query(b, wgmma_tile_rows<S>(b.group)) : 1;
    const bool copies = wgmma_are_rows<S>(g);
    const uint64_t policy = stride[0] && stride[1] ? WGMMA_EVICT_FIRST : WGMMA_EVICT_LAST;
    for (int n = 0, used = 0;; n++) {
        wgmma_await(&control.item_full[n % WGMMA_ITEMS], n / WGMMA_ITEMS % 2);
        const wgmma_item &w = control.item[n % WGMMA_ITEMS];
        if (!w.exists) {
            return;
        }
        const mma_item &t = control.terms[n % WGMMA_ITEMS];
        GPU_ROLLED
        for (int left = wgmma_tiles_of(b, w, n % WGMMA_ITEMS), block = w.past; copies && left > 0;
             left--) {
            const wgmma_key_tile kept = wgmma_tile_before(b, n % WGMMA_ITEMS, block);
            block = kept.tile;
            if (!kept.mixed) {
                continue;
            }
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
