/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on Hopper for more than 256 channels, such as latent attention (MLA), which has 576 of
 * keys, of which the first 512 are the values. Sums of 64 rows by 512 channels fill the registers
 * of two warpgroups. So two warpgroups share a tile of rows, each with half of the channels of o,
 * and take turns with the scores, as in FlashMLA (DeepSeek 2025):
 *
 *     x = Q K^T         of tiles 0, 2, .. by one warpgroup, and of tiles 1, 3, .. by the other
 *     p                 of its own tile: online softmax. It stores p in shared memory, for the
 *                       other warpgroup, and each row's reference
 *     o = o alpha + p V of every tile, for its own channels
 *
 * The rest is as in wgmma_forward.cuh: a block is persistent, a warp plans, a thread (with pages
 * smaller than a tile a warp) copies, tiles are visited from the last to the first, and a row's
 * reference is raised only if its own maximum exceeds it by more than MMA_MARGIN.
 *
 * Two blocks of a cluster may share an item, each with 64 of its 128 rows. Each copies every second
 * panel and multicasts it to both, so that L2 reads half as much.
 *
 * Shared memory has room for two tiles. If values are the first channels of keys, each is a tile
 * of both, and tiles alternate between them. Otherwise one is for keys and the other for values.
 * A copy to a tile begins as soon as a set of panels is free, and products begin as soon as one
 * panel has landed.
 */
#ifndef FATTN_CUDA_WGMMA_HALVES_CUH
#define FATTN_CUDA_WGMMA_HALVES_CUH

#include "backends/cuda/wgmma_forward_copies.cuh"
#include "backends/cuda/wgmma_forward_end.cuh"
#include "backends/cuda/wgmma_forward_softmax.cuh"

/* Panels in a set: the channels of o of a warpgroup. Beyond two sets, keys have panels of which no
 * value has channels. */
#define WGMMA_SET_PANELS 4
#define WGMMA_SETS 3

/* W: padded channels of q and k; those of v and o are 512 or fewer. WIDTH_V: those of o that a
 * warpgroup has. BLOCKS: in a cluster, which share an item, each with BLOCK_ROWS of its rows. */
template <class T, int W, wgmma_result RESULT, int BLOCKS>
struct wgmma_halves_shape
    : wgmma_shape<T, W, 64 * WGMMA_SET_PANELS, BLOCKS, WGMMA_HALVES_KEYS, 2, 0, 0, RESULT> {
    enum {
        HALVES = true,
        CLUSTER = BLOCKS,
        WARPS = 8,
        BLOCK_ROWS = WGMMA_HALVES_ROWS,
        QUERY_BYTES = 128 * WGMMA_PANELS(W) * WGMMA_HALVES_ROWS,
        MAY_LIST = false,
        OWN_REGISTERS = 216,
        COPY_REGISTERS = 72
    };
};

/* What the warpgroups of a block tell each other, and the copier. */
template <class S> struct wgmma_halves_state {
    uint64_t full[2][S::PANELS]; /* panels of the two tiles in shared memory */
    uint64_t empty[2][WGMMA_SETS];
    uint64_t weights[2]; /* a warpgroup's weights and references have been stored */
    uint64_t summed;     /* both have ended an item's products */
    uint64_t stated;     /* both have stored their sums l */
    uint64_t ended;      /* the second has stored its part of o, so that the first may go on */
    /* By warpgroup: the references of rows, and at the end their sums l. */
    float row[2][S::BLOCK_ROWS];
};

template <class S> struct wgmma_halves_block : wgmma_block<S> {
    wgmma_halves_state<S> *state;
    uint32_t p;          /* address of the tile of weights */
    int panels_v;        /* panels of values */
    bool keys_have_both; /* values are the first channels of keys */
};

/* Which of the two tiles in shared memory, and the parity of its phase. */
typedef struct wgmma_buffer {
    int number, phase;
} wgmma_buffer;

/* The place of a tile of keys and values or, if they are apart, of one of them, number `own`: 0 for
 * keys, 1 for values. n: counts the block's tiles of keys. */
GPU_DEVICE wgmma_buffer wgmma_buffer_of(bool have_both, int own, int n)
{
    return have_both ? wgmma_buffer{n % 2, n / 2 % 2} : wgmma_buffer{own, n % 2};
}

enum { WGMMA_HALVES_CLEARED = 1 }; /* .. 2: named barriers of one warpgroup each */

/* --- The copier ------------------------------------------------------------------------------- */

/* Copies the panels of a tile of keys or values, each as soon as its set is free. PIECES: a warp
 * does so, each lane a piece of 2^shift keys, and none past the last key. Otherwise one thread
 * copies the whole tile. */
template <class S, bool PIECES>
GPU_DEVICE void wgmma_copy_panels(const fattn_gpu_args &g, const wgmma_halves_block<S> &b,
                                  const wgmma_map *map, wgmma_buffer to, int panels,
                                  const wgmma_item &w, const fattn_strides &stride,
                                  const wgmma_piece &piece, int shift)
{
    wgmma_halves_state<S> &state = *b.state;
    const int head = stride.head ? w.k_head : 0, j = piece.tile * S::KEYS;
    const int pieces = PIECES ? (min(w.keys - j, (int)S::KEYS) + (1 << shift) - 1) >> shift : 1;
    const int batch = stride.batch ? piece.page : 0;
    const uint32_t tile = b.k + to.number * S::KEY_BYTES;
    GPU_ROLLED
    for (int c = 0; c < panels; c++) {
        const uint32_t at = tile + c * S::KEYS * 128;
        uint64_t *const full = &state.full[to.number][c];
        if (c % WGMMA_SET_PANELS == 0) {
            wgmma_await(&state.empty[to.number][c / WGMMA_SET_PANELS], to.phase ^ 1);
        }
        const bool copies = c % S::CLUSTER == wgmma_share<S>();
        if (!PIECES || mma_lane() == 0) {
            if (copies) {
                wgmma_poison(at, S::KEYS * 128);
            }
            wgmma_arrive_expect_tx(full, PIECES ? (pieces << shift) * 128 : S::KEYS * 128);
        }
        if (PIECES) {
            __syncwarp();
        }
        if (copies && (!PIECES || mma_lane() < pieces)) {
            const uint32_t own = PIECES ? at + (mma_lane() << shift) * 128 : at;
            if (S::CLUSTER > 1) {
                wgmma_copy_to_both(own, map, full, 64 * c, piece.row, head, batch,
                                   wgmma_key_policy<S>(g));
            } else {
                wgmma_copy(own, map, full, 64 * c, piece.row, head, batch, wgmma_key_policy<S>(g));
            }
        }
    }
}

/* A tile of which one copy brings all keys: they are not paged, or on one page. */
template <class S>
GPU_DEVICE wgmma_piece wgmma_tile_piece(const fattn_gpu_args &g, const wgmma_item &w, int tile)
{
    const fattn_problem &p = g.problem;
    const int j = tile * S::KEYS;
    if (!(p.features & FATTN_PAGED)) {
        return {tile, w.k_batch, w.k_row + j};
    }
    if (tile < 0) {
        return {tile, 0, 0};
    }
    const int number = j / (int)p.page_size;
    const int page = (g.buffers.block_table + w.batch * p.block_table_stride)[number];
    return {tile, min(max(page, 0), (int)p.num_pages - 1), j - number * (int)p.page_size};
}

/* The loop of the copier, as wgmma_copy_all(). PIECES: a tile may have several pages. */
template <class S, bool PIECES>
GPU_DEVICE void wgmma_halves_copy(const fattn_gpu_args &g, const wgmma_map *maps,
                                  const wgmma_halves_block<S> &b)
{
    wgmma_control<S> &control = *b.control;
    const fattn_problem &p = g.problem;
    const bool elected = !PIECES || mma_lane() == 0;
    const bool counts = wgmma_counts<S>(g);
    const int shift = PIECES ? 31 - __clz(WGMMA_PIECE((int)p.page_size, S::KEYS)) : 0;
    wgmma_pages<S> now = {shift, 0, 0, 0}, next = now;
    int used = 0; /* tiles of keys so far */
    for (int n = 0;; n++) {
        const int slot = n % WGMMA_ITEMS;
        wgmma_await(&control.item_full[slot], n / WGMMA_ITEMS % 2);
        const wgmma_item &w = control.item[slot];
        if (!w.exists) {
            return;
        }
        const int last = w.past - w.block - 1;
        now.first = next.first = w.past;
        if (elected) {
            wgmma_copy_queries(g, maps, b, n, w);
        }
        wgmma_piece ahead = {w.past, 0, 0};
        if (!PIECES && last >= 0) {
            ahead = wgmma_tile_piece<S>(g, w, w.past - 1);
        }
        GPU_ROLLED
        for (int left = last; left >= 0; left--, used++) {
            const int tile = w.block + left;
            const wgmma_piece piece = PIECES ? wgmma_piece_of(g, w, tile, now, next) : ahead;
            if (!PIECES) {
                ahead = wgmma_tile_piece<S>(g, w, tile - 1);
            }
            wgmma_copy_panels<S, PIECES>(g, b, maps + 1, wgmma_buffer_of(b.keys_have_both, 0, used),
                                         S::PANELS, w, p.k, piece, shift);
            if (!b.keys_have_both) {
                wgmma_copy_panels<S, PIECES>(g, b, maps + 2, wgmma_buffer_of(false, 1, used),
                                             b.panels_v, w, p.v, piece, shift);
            }
            if (left == min(last, 2) && counts && elected) {
                wgmma_arrive(&control.item_wanted);
            }
        }
        if (last < 0 && counts && elected) {
            wgmma_arrive(&control.item_wanted);
        }
        if (PIECES) {
            __syncwarp(); /* all lanes have read the item */
        }
        if (elected) {
            wgmma_arrive(&control.item_empty[slot]);
        }
    }
}

/* --- A warpgroup ------------------------------------------------------------------------------ */

/* Begins y += P B, with 64 rows of weights P in shared memory. */
template <class T, int STEPS, int N>
GPU_DEVICE void wgmma_mix_stored(uint64_t p, uint64_t b, float y[N / 8][4])
{
    wgmma_fence();
    GPU_UNROLL
    for (int i = 0; i < STEPS; i++) {
        wgmma_product<T, N>::transposed_b(y, p + i * WGMMA_CHANNELS, b + i * WGMMA_ROWS);
    }
    wgmma_commit();
}

template <class S> GPU_DEVICE void wgmma_rescale(const float alpha[2], wgmma_rows<S> &rows)
{
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH_V / 2; n++) {
        rows.o[n / 4][n % 4] *= alpha[n % 4 / 2];
    }
}

/* Releases a set of panels for the next copy. */
template <class S> GPU_DEVICE void wgmma_release_set(uint64_t *empty)
{
    if (S::CLUSTER > 1) {
        wgmma_release_in_both(wgmma_share<S>(), empty);
    } else {
        wgmma_release(empty);
    }
}

/* Visits the tiles of keys of an item. row: the warp's first in the block's tile; used: the block's
 * tiles of keys before; taken: how often the warpgroup has taken the other one's weights. The steps
 * come first, as closures over its state, and then the loop. Tiles of the item are numbered as
 * visited. */
template <class S, int GROUP>
GPU_DEVICE void wgmma_halves_walk(const fattn_gpu_args &g, const wgmma_halves_block<S> &b, int slot,
                                  int row, int used, int &taken, wgmma_rows<S> &rows)
{
    typedef typename S::type T;
    enum { OTHER = 1 - GROUP, STEPS = S::KEYS / 16, VALUE_PANEL = GROUP * WGMMA_SET_PANELS };
    wgmma_control<S> &control = *b.control;
    wgmma_halves_state<S> &state = *b.state;
    const wgmma_item &w = control.item[slot];
    const wgmma_units units = wgmma_units_of<S>(g, wgmma_factors{{1, 1}, 1});
    const wgmma_scale scale = {1, units};
    const int tiles = w.past - w.block, full = w.full[wgmma_share<S>()];
    const int full_past = w.full_past[wgmma_share<S>()];
    const uint64_t q = wgmma_descriptor(b.q, 0), k = wgmma_descriptor(b.k, 0);
    const uint64_t v = wgmma_descriptor(b.k + VALUE_PANEL * S::KEYS * 128, S::KEYS * 128);
    const float shift[2] = {0, 0};
    const bool has_values = b.keys_have_both || VALUE_PANEL < b.panels_v;
    const int item_row = wgmma_share<S>() * S::BLOCK_ROWS + row;
    float x[S::KEYS / 8][4], alpha[2];
    uint32_t p[STEPS][4];
    int first[2], past[2]; /* keys in the two rows' bands, less the thread's column */
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const mma_range keys = mma_band_row(w, wgmma_query(b, item_row + mma_lane() / 4 + 8 * h));
        first[h] = keys.first - mma_lane() % 4 * 2;
        past[h] = keys.past - mma_lane() % 4 * 2;
    }
    const auto begin_scores = [&](int n) {
        const wgmma_buffer at = wgmma_buffer_of(b.keys_have_both, 0, used + n);
        if (GROUP == 1 && !b.keys_have_both) {
            /* Both warpgroups' keys are in one place, and a parity can be waited for only after the
             * phase before, in which the other one's keys land. */
            wgmma_await(&state.weights[OTHER], taken % 2);
        }
        GPU_UNROLL
        for (int c = 0; c < S::PANELS; c++) {
            const uint64_t a = q + (c * S::BLOCK_ROWS * 128 >> 4);
            const uint64_t to = k + ((at.number * S::KEY_BYTES + c * S::KEYS * 128) >> 4);
            wgmma_await(&state.full[at.number][c], at.phase);
            wgmma_fence();
            GPU_UNROLL
            for (int i = 0; i < 4; i++) {
                wgmma_product<T, S::KEYS>::tiles(x, a + i * WGMMA_CHANNELS, to + i * WGMMA_CHANNELS,
                                                 c + i > 0);
            }
        }
        wgmma_commit();
    };
    const auto end_scores = [&](int n) {
        const wgmma_buffer at = wgmma_buffer_of(b.keys_have_both, 0, used + n);
        wgmma_settle<S::KEYS / 8>(x);
        if (!b.keys_have_both) {
            wgmma_release_set<S>(&state.empty[at.number][0]);
            wgmma_release_set<S>(&state.empty[at.number][1]);
        }
        wgmma_release_set<S>(&state.empty[at.number][WGMMA_SETS - 1]);
        if (n + 2 >= tiles) {
            wgmma_release(&control.q_empty);
        }
    };
    /* Waits for the values of a tile, and returns their descriptor. */
    const auto await_values = [&](int n) {
        const wgmma_buffer at = wgmma_buffer_of(b.keys_have_both, 1, used + n);
        GPU_ROLLED
        for (int c = VALUE_PANEL; c < min(VALUE_PANEL + WGMMA_SET_PANELS, b.panels_v); c++) {
            wgmma_await(&state.full[at.number][c], at.phase);
        }
        if (n == 0 && w.tail) {
            wgmma_clear<S::KEYS, WGMMA_SET_PANELS>(b.k + at.number * S::KEY_BYTES +
                                                       VALUE_PANEL * S::KEYS * 128,
                                                   w.tail, WGMMA_HALVES_CLEARED + GROUP);
        }
        return v + (at.number * S::KEY_BYTES >> 4);
    };
    const auto end_output = [&](int n) {
        const wgmma_buffer at = wgmma_buffer_of(b.keys_have_both, 1, used + n);
        wgmma_wait<0>();
        wgmma_settle<S::WIDTH_V / 8>(rows.o);
        if (has_values) {
            wgmma_release_set<S>(&state.empty[at.number][GROUP]);
        }
    };
    /* Turns the scores of a tile into weights, and returns whether references have been raised. */
    const auto weigh = [&](int n) {
        const int block = w.past - 1 - n;
        if (block >= full_past || block < full) {
            const int j = block * S::KEYS;
            const int from[2] = {first[0] - j, first[1] - j}, to[2] = {past[0] - j, past[1] - j};
            wgmma_hide_outside<S::KEYS>(from, to, x);
        }
        const bool raises = wgmma_exceeds_margin<S>(units, scale, shift, x, rows);
        if (raises) {
            wgmma_raise<S>(units, scale, shift, x, rows, alpha);
        }
        wgmma_weigh<S>(units, scale, shift, rows, x);
        wgmma_pack<T, S::KEYS>(x, p);
        return raises;
    };
    /* Stores weights, swizzled like a tile, and references. */
    const auto store_weights = [&]() {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int r = row + mma_lane() / 4 + 8 * h;
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 8; n++) {
                mma_put(b.p + wgmma_chunk_offset(r, n) + mma_lane() % 4 * 4,
                        p[n / 2][n % 2 * 2 + h]);
            }
            if (mma_lane() % 4 == 0) {
                state.row[GROUP][r] = rows.state[h].m;
            }
        }
        wgmma_publish();
        __syncwarp(); /* all lanes have published their stores */
        wgmma_release(&state.weights[GROUP]);
    };
    /* Takes over the references after a tile of the other warpgroup, and begins to add the tile's
     * weights times values to o. */
    const auto take = [&](int n) {
        bool raises = false;
        wgmma_await(&state.weights[OTHER], taken++ % 2);
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const float m = state.row[OTHER][row + mma_lane() / 4 + 8 * h];
            raises = raises || m != rows.state[h].m;
            alpha[h] = fattn_softmax_raise(&rows.state[h], m, units.row[h]);
        }
        if (__any_sync(0xffffffffu, raises)) {
            wgmma_rescale(alpha, rows);
        }
        wgmma_mix_stored<T, STEPS, S::WIDTH_V>(wgmma_descriptor(b.p, 0), await_values(n), rows.o);
    };
    const auto begin_own = [&](int n, bool raises) {
        if (raises) {
            wgmma_rescale(alpha, rows);
        }
        store_weights();
        wgmma_mix<T, STEPS, S::WIDTH_V>(p, await_values(n), rows.o);
    };

    if (tiles <= GROUP) {
        wgmma_release(&control.q_empty);
    }
    int n = 0;
    GPU_ROLLED
    for (; n + 1 < tiles; n += 2) {
        const int own = n + GROUP;
        wgmma_wait<0>(); /* none is in flight: else ptxas waits for scores before it changes o */
        begin_scores(own);
        if constexpr (GROUP == 1) {
            take(n);
        }
        wgmma_wait<GROUP>();
        end_scores(own);
        const bool raises = weigh(own);
        if constexpr (GROUP == 1) {
            end_output(n);
        }
        begin_own(own, raises);
        end_output(own);
        if constexpr (GROUP == 0) {
            take(n + 1);
            end_output(n + 1);
        }
    }
    if (n < tiles) {
        if constexpr (GROUP == 0) {
            begin_scores(n);
            wgmma_wait<0>();
            end_scores(n);
            begin_own(n, weigh(n));
        } else {
            take(n);
        }
        end_output(n);
    }
}

/* The loop of consumer warpgroup 0 or 1. */
template <class S>
GPU_DEVICE void wgmma_halves_consume(const fattn_gpu_args &g, const wgmma_halves_block<S> &b,
                                     int group)
{
    wgmma_control<S> &control = *b.control;
    wgmma_halves_state<S> &state = *b.state;
    const int row = wgmma_thread() / 32 * 16;
    int used = 0, taken = 0;
    for (int n = 0;; n++) {
        const int slot = n % WGMMA_ITEMS;
        wgmma_await(&control.item_full[slot], n / WGMMA_ITEMS % 2);
        const wgmma_item &w = control.item[slot];
        if (!w.exists) {
            return;
        }
        wgmma_rows<S> rows;
        rows.state[0] = rows.state[1] = fattn_softmax_empty();
        rows.top[0] = rows.top[1] = rows.state[0].m;
        GPU_UNROLL
        for (int c = 0; c < S::WIDTH_V / 2; c++) {
            rows.o[c / 4][c % 4] = 0;
        }
        wgmma_await(&control.q_full, n % 2);
        if (group == 0 && n > 0) {
            wgmma_await(&state.ended, (n - 1) % 2);
        }
        if (group == 0) {
            wgmma_halves_walk<S, 0>(g, b, slot, row, used, taken, rows);
        } else {
            wgmma_halves_walk<S, 1>(g, b, slot, row, used, taken, rows);
        }
        used += w.past - w.block;

        /* Each has the sums l over its own tiles. */
        __syncwarp(); /* all lanes have read the references */
        wgmma_release(&state.summed);
        wgmma_await(&state.summed, n % 2);
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const float l = mma_quad_sum(rows.state[h].l);
            if (mma_lane() % 4 == 0) {
                state.row[group][row + mma_lane() / 4 + 8 * h] = l;
            }
        }
        __syncwarp();
        wgmma_release(&state.stated);
        wgmma_await(&state.stated, n % 2);
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int r = row + mma_lane() / 4 + 8 * h;
            rows.state[h].l = mma_lane() % 4 == 0 ? state.row[0][r] + state.row[1][r] : 0;
        }
        wgmma_end(g, b, slot, wgmma_share<S>() * S::BLOCK_ROWS + row, 1, wgmma_factors{{1, 1}, 1},
                  rows);
        __syncwarp();
        wgmma_release(&control.item_empty[slot]);
        if (group == 1) {
            wgmma_release(&state.ended);
        }
    }
}

/* --- A block ---------------------------------------------------------------------------------- */

/* Whether values are the first channels of keys. */
GPU_DEVICE bool wgmma_keys_have_both(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    return g.buffers.k == g.buffers.v && p.dim_v <= p.dim && p.k.batch == p.v.batch &&
           p.k.seq == p.v.seq && p.k.head == p.v.head;
}

template <class S>
GPU_DEVICE wgmma_halves_block<S> wgmma_halves_block_of(const fattn_gpu_args &g, char *shared)
{
    wgmma_halves_block<S> b;
    b.q = (mma_shared(shared) + WGMMA_ALIGN - 1) & ~(WGMMA_ALIGN - 1u);
    b.k = b.v = b.q + S::QUERY_BYTES;
    b.p = b.terms = b.stored = b.out = b.k + 2 * S::KEY_BYTES;
    const uint32_t state = b.p + 2 * S::BLOCK_ROWS * S::KEYS - mma_shared(shared);
    b.state = (wgmma_halves_state<S> *)(shared + state);
    b.control = (wgmma_control<S> *)(b.state + 1);
    b.group = min(wgmma_group_of(g.problem), (int)S::ROWS);
    b.ping_pong = false;
    b.onto = NULL;
    b.panels_v = WGMMA_PANELS((int)g.problem.dim_v);
    b.keys_have_both = wgmma_keys_have_both(g);
    return b;
}

/* A block of forward. maps: of q, k and v. */
template <class S> GPU_DEVICE void wgmma_halves_all(const fattn_gpu_args &g, const wgmma_map *maps)
{
    static_assert(sizeof(wgmma_control<S>) <= WGMMA_CONTROL +
                                                  (S::IS_SPLIT ? WGMMA_SPLIT_CONTROL : 0) +
                                                  (S::CLUSTER > 1 ? WGMMA_SENT : 0),
                  "too small");
    static_assert(sizeof(wgmma_halves_state<S>) <= WGMMA_HALVES_CONTROL(S::WIDTH), "too small");
    extern __shared__ char shared[];
    const wgmma_halves_block<S> b = wgmma_halves_block_of<S>(g, wgmma_own_memory(shared));
    wgmma_control<S> &control = *b.control;
    wgmma_halves_state<S> &state = *b.state;
    const bool pieces = g.problem.features & FATTN_PAGED && g.problem.page_size % S::KEYS != 0;
    if (gpu_thread() == 0) {
        for (int n = 0; n < WGMMA_ITEMS; n++) {
            wgmma_barrier_make(&control.item_full[n], 1);
            wgmma_barrier_make(&control.item_empty[n], S::WARPS + 1);
        }
        wgmma_barrier_make(&state.summed, S::WARPS);
        wgmma_barrier_make(&state.stated, S::WARPS);
        wgmma_barrier_make(&state.ended, 4);
        wgmma_barrier_make(&control.item_wanted, 1);
        wgmma_barrier_make(&control.q_full, 1);
        wgmma_barrier_make(&control.q_empty, S::WARPS);
        for (int n = 0; n < 2; n++) {
            for (int c = 0; c < S::PANELS; c++) {
                wgmma_barrier_make(&state.full[n][c], 1);
            }
            for (int c = 0; c < WGMMA_SETS; c++) {
                wgmma_barrier_make(&state.empty[n][c], 4 * S::CLUSTER);
            }
            wgmma_barrier_make(&state.weights[n], 4);
        }
        if constexpr (S::CLUSTER > 1) {
            wgmma_sent_number_make(control.sent);
        }
        wgmma_barriers_made();
    }
    if (S::IS_SPLIT) {
        gpu_admit_later(); /* the kernel that merges parts */
    }
    if (S::CLUSTER > 1) {
        wgmma_cluster_sync();
    } else {
        gpu_sync();
    }
    const int group = wgmma_group();
    if (group == 0) {
        wgmma_give_registers<S::COPY_REGISTERS>();
        static_assert(WGMMA_COPIER == 0, "its threads are the block's first");
        if (gpu_thread() < (pieces ? GPU_WAVE : 1)) {
            wgmma_prefetch(maps);
            wgmma_prefetch(maps + 1);
            wgmma_prefetch(maps + 2);
            gpu_await_earlier();
            if (pieces) {
                wgmma_halves_copy<S, true>(g, maps, b);
            } else {
                wgmma_halves_copy<S, false>(g, maps, b);
            }
        } else if (gpu_thread() / GPU_WAVE == WGMMA_PLANNER) {
            gpu_await_earlier();
            wgmma_plan(g, b);
        }
    } else {
        wgmma_take_registers<S::OWN_REGISTERS>();
        wgmma_halves_consume<S>(g, b, group - 1);
    }
    if (S::CLUSTER > 1) {
        wgmma_cluster_sync(); /* the other block may still access this one's barriers */
    }
}

#endif
