/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on Hopper, for 16-bit types, in the manner of FlashAttention-3 (Shah et al. 2024).
 *
 * A block is persistent: it processes item after item, each a tile of rows of one key/value head.
 * Its warps are specialised. They synchronise only by barriers in shared memory:
 *
 *     the planner     one warp; computes the description of the next item
 *     the copier      one thread; issues the TMA copies of queries, keys and values as soon as a
 *                     pipeline stage is free. With paged keys, it is a warp, or two
 *     the stager      one thread; the same for a bias or mask, in kernels that have only that
 *                     feature of pairs
 *     the wideners    two or four warps; they convert keys and values that are stored in e4m3, in
 *                     kernels for such caches (wgmma_widen.cuh)
 *     warpgroups      the consumers, each with 64 rows:
 *
 *         x = Q K^T             of tile n, while
 *         o = o alpha + p V     of the tile before runs
 *         p                     of tile n: online softmax; a row is in the four lanes of a quad
 *
 * The planner is in wgmma_forward_items.cuh, and the copier and the stager are in
 * wgmma_forward_copies.cuh. This header has the loops of a warpgroup; its steps are in
 * wgmma_forward_terms.cuh (scores), _softmax.cuh and _end.cuh (o and lse). The kernels that run
 * before are in wgmma_forward_before.cuh.
 *
 * Tiles of keys are visited from the last to the first. A warpgroup skips those to which none of
 * its rows attends, unless warpgroups ping-pong: then each issues its products after the one before
 * it has issued its own, so that one computes its softmax while another multiplies.
 *
 * A row's reference is raised as in mma_forward.cuh, only if the row's own maximum exceeds it by
 * more than MMA_MARGIN. So a row's results do not depend on the rows beside it.
 *
 * Lean kernels have causal masks, windows, lengths, positions and sinks. The others have the
 * features of pairs: every one, or a single one (mma_terms.cuh).
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_CUH
#define FATTN_CUDA_WGMMA_FORWARD_CUH

#include "backends/cuda/wgmma_forward_copies.cuh"
#include "backends/cuda/wgmma_forward_end.cuh"
#include "backends/cuda/wgmma_forward_softmax.cuh"
#include "backends/cuda/wgmma_forward_terms.cuh"
#include "backends/cuda/wgmma_widen.cuh"

/* --- A warpgroup ------------------------------------------------------------------------------ */

/* With ping-pong: waits until this warpgroup may issue products; and lets the next one do so. */
template <class S> GPU_DEVICE void wgmma_ping_pong_begin(const wgmma_block<S> &b, int group)
{
    if (b.ping_pong) {
        wgmma_named_sync(WGMMA_FORWARD_PING_PONG + group, WGMMA_PING_PONG_THREADS);
    }
}

template <class S> GPU_DEVICE void wgmma_ping_pong_end(const wgmma_block<S> &b, int group)
{
    if (b.ping_pong) {
        wgmma_named_arrive(WGMMA_FORWARD_PING_PONG + (group + 1) % S::WARPGROUPS,
                           WGMMA_PING_PONG_THREADS);
    }
}

/* Skips tiles of keys to which none of the warpgroup's rows attends. */
template <class S>
GPU_DEVICE void wgmma_skip(const wgmma_block<S> &b, int tiles, wgmma_used<S> &used)
{
    wgmma_control<S> &control = *b.control;
    for (; tiles > 0; tiles--) {
        wgmma_await(&control.k_full[used.stage(used.k)], used.phase(used.k));
        wgmma_release(&control.k_empty[used.stage(used.k++)]);
        wgmma_await(&control.v_full[used.stage(used.v)], used.phase(used.v));
        wgmma_release(&control.v_empty[used.stage(used.v++)]);
    }
}

/* Visits the tiles of keys to which the warpgroup's rows attend, from the last to the first. The
 * steps of a tile come first, as closures over its state, and then four passes. */
template <class S>
GPU_DEVICE void wgmma_walk(const fattn_gpu_args &g, const wgmma_block<S> &b, int slot, int group,
                           int row, const wgmma_factors &factor, wgmma_used<S> &used,
                           wgmma_rows<S> &rows)
{
    typedef typename S::type T;
    wgmma_control<S> &control = *b.control;
    const wgmma_item &w = control.item[slot];
    const wgmma_units units = wgmma_units_of<S>(g, factor);
    const int last_block = w.block, full = w.full[group], full_past = w.full_past[group];
    const uint64_t q = wgmma_descriptor(b.q + group * 64 * 128, 0);
    const uint64_t k = wgmma_descriptor(b.k, 0), v = wgmma_descriptor(b.v, S::KEYS * 128);
    float x[S::KEYS / 8][4], alpha[2], bound[1][2];
    uint32_t p[S::KEYS / 16][4], pairs[S::READS_EARLY ? S::KEYS / 4 : 1];
    int first[2], past[2]; /* keys in the two rows' bands, less the thread's column */
    int block = w.own_past[group] - 1;
    int left = 0; /* how many tiles follow this one, in kernels that skip tiles */
    int tail = 0; /* as in wgmma_item, until the values have been cleared */
    bool mixed = false;
    wgmma_row_terms known = {{0, 0}, {0, 0}, 1};
    if constexpr (S::IS_STAGED) {
        known.factor = wgmma_own(g.rule.terms & FATTN_SCORE_SCALE ? g.rule.scale : 1);
        wgmma_staged_begin<S>(control.terms[slot], wgmma_term_stride<S>(g.problem), row,
                              known.staged);
    }
    const auto read_tile = [&]() {
        if constexpr (S::SKIPS) {
            const int tile = control.tile[used.stage(used.k)];
            block = tile & INT32_MAX;
            mixed = tile < 0;
        }
    };
    const auto await_keys = [&]() {
        wgmma_await(&control.k_full[used.stage(used.k)], used.phase(used.k));
    };
    const auto begin_scores = [&]() {
        wgmma_dots<T, S::WIDTH, S::ROWS, S::KEYS, S::KEYS, false>(
            q, k + used.stage(used.k) * (S::KEY_BYTES >> 4), x);
    };
    const auto end_scores = [&]() {
        wgmma_settle<S::KEYS / 8>(x);
        wgmma_release(&control.k_empty[used.stage(used.k++)]);
        if (S::SKIPS ? left == 0 : block == last_block) {
            wgmma_release(&control.q_empty);
        }
    };
    const auto await_values = [&]() {
        wgmma_await(&control.v_full[used.stage(used.v)], used.phase(used.v));
    };
    const auto begin_output = [&]() {
        if (tail) {
            wgmma_clear<S::KEYS, S::PANELS_V>(b.v + used.stage(used.v) * S::VALUE_BYTES, tail,
                                              WGMMA_FORWARD_CLEARED + group);
            tail = 0;
        }
        wgmma_mix<T, S::KEYS / 16, S::WIDTH_V, S::PART_V>(
            p, v + used.stage(used.v) * (S::VALUE_BYTES >> 4), rows.o);
    };
    const auto end_output = [&]() {
        wgmma_settle<S::WIDTH_V / 8>(rows.o);
        wgmma_release(&control.v_empty[used.stage(used.v++)]);
    };
    /* In a tile whose bias is 0, x stays dot products: the scale is applied with the unit. */
    const auto scale = [&]() {
        const bool raw = S::KNOWN == FATTN_BIAS && !mixed;
        return raw ? wgmma_scaled(units, known.factor) : wgmma_scale{1, units};
    };
    const auto end_bias = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS) {
            used.terms =
                wgmma_panels_end(wgmma_tile_terms_of(g, b, slot, block, false, used.terms, known));
        }
    };
    /* Reads the bias before the products are issued. */
    const auto read_bias = [&]() {
        if constexpr (S::READS_EARLY) {
            if (mixed) {
                wgmma_each_bias(wgmma_tile_terms_of(g, b, slot, block, false, used.terms, known),
                                [&](int n, uint32_t pair) { pairs[n] = pair; });
                end_bias();
            }
        }
    };
    const auto each_bias = [&](auto f) {
        if constexpr (S::READS_EARLY) {
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 4; n++) {
                f(n, pairs[n]);
            }
        } else {
            wgmma_each_bias(wgmma_tile_terms_of(g, b, slot, block, false, used.terms, known), f);
        }
    };
    const auto add_bias = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS) {
            if (mixed) {
                each_bias(
                    [&](int n, uint32_t pair) { wgmma_add_pair<S>(known.factor, n, pair, x); });
            }
        }
    };
    const auto raise = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS) {
            if (mixed && __any_sync(0xffffffffu, wgmma_has_nan<S>(x))) {
                each_bias([&](int n, uint32_t pair) { wgmma_hide_pair<S>(n, pair, x); });
            }
        }
        wgmma_raise<S>(units, scale(), known.shift, x, rows, alpha);
    };
    /* Releases the bias after raise(), which may read it again. */
    const auto end_terms = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS && !S::READS_EARLY) {
            if (mixed) {
                end_bias();
            }
        }
    };
    const auto find_bands = [&]() {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int r = row + mma_lane() / 4 + 8 * h;
            const mma_range keys = mma_band_row(w, wgmma_query(b, r));
            first[h] = keys.first - mma_lane() % 4 * 2;
            past[h] = keys.past - mma_lane() % 4 * 2;
        }
    };
    const auto score = [&]() {
        if constexpr (S::HAS_BLOCKS) {
            wgmma_score_blocks<S>(g, control.terms[slot], mixed, block, x);
        } else if constexpr (S::KNOWN == FATTN_BIAS) {
            add_bias();
        } else if constexpr (!S::IS_LEAN) {
            wgmma_score(g, b, slot, block, S::SKIPS && !mixed, used, known, x, bound);
        }
        if (block >= full_past || block < full) {
            const int j = block * S::KEYS;
            const int from[2] = {first[0] - j, first[1] - j}, to[2] = {past[0] - j, past[1] - j};
            if (block < full) {
                wgmma_hide_outside<S::KEYS>(from, to, x);
            } else {
                wgmma_hide_from<S::KEYS>(to, x);
            }
        }
    };
    const auto drop = [&]() {
        if constexpr (!S::IS_LEAN) {
            if (mma_has<S>(g, FATTN_DROPOUT)) {
                wgmma_drop<S>(g, control.terms[slot], row, block * S::KEYS, p);
            }
        }
    };

    /* Pass 1: the last tile of which the warpgroup's rows may attend to something. */
    if constexpr (S::SKIPS) {
        left = control.tiles[slot] - 1;
        await_keys();
        read_tile();
    }
    if constexpr (S::TESTS_TILES) {
        if (S::KEYS < S::ROWS || !control.bytes[slot]) {
            while (left > 0 && mixed) {
                const wgmma_tile_terms<S> s =
                    wgmma_tile_terms_of(g, b, slot, block, false, used.terms, known);
                if (!wgmma_is_hidden(s, group)) {
                    break;
                }
                used.terms = wgmma_panels_end(s);
                wgmma_ping_pong_begin(b, group);
                wgmma_ping_pong_end(b, group);
                wgmma_skip(b, 1, used);
                left--;
                await_keys();
                read_tile();
            }
        }
    }
    tail = block == w.past - 1 ? w.tail : 0;

    /* Pass 2: its scores and weights. */
    await_keys();
    wgmma_ping_pong_begin(b, group);
    begin_scores();
    wgmma_ping_pong_end(b, group);
    find_bands();
    read_bias();
    wgmma_wait<0>();
    end_scores();
    score();
    raise();
    wgmma_weigh<S>(units, scale(), known.shift, rows, x);
    wgmma_pack<T, S::KEYS>(x, p);
    drop();
    end_terms();

    /* Pass 3: the tiles before, down to the first: scores beside o of the tile after it. */
    GPU_ROLLED
    while (S::SKIPS ? left > 0 : block > last_block) {
        block--;
        left--;
        await_keys();
        read_tile();
        read_bias();
        wgmma_ping_pong_begin(b, group);
        begin_scores();
        await_values();
        begin_output();
        wgmma_ping_pong_end(b, group);
        wgmma_wait<1>();
        end_scores();
        score();
        const bool raises = S::KNOWN == FATTN_SOFTCAP
                                ? wgmma_bound_exceeds_margin<S>(units, rows, bound[0])
                                : wgmma_exceeds_margin<S>(units, scale(), known.shift, x, rows);
        if (raises) {
            raise();
        }
        wgmma_weigh<S>(units, scale(), known.shift, rows, x);
        wgmma_wait<0>();
        end_output();
        wgmma_pack<T, S::KEYS>(x, p);
        drop();
        end_terms();
        if (raises) {
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH_V / 2; n++) {
                rows.o[n / 4][n % 4] *= alpha[n % 4 / 2];
            }
        }
    }

    /* Pass 4: o of the first tile. */
    await_values();
    begin_output();
    wgmma_wait<0>();
    end_output();
}

/* The loop of consumer warpgroup `group`. */
template <class S>
GPU_DEVICE void wgmma_consume(const fattn_gpu_args &g, const wgmma_block<S> &b, int group)
{
    wgmma_control<S> &control = *b.control;
    const int row = group * 64 + wgmma_thread() / 32 * 16;
    wgmma_used<S> used = {0, 0, 0};
    if (b.ping_pong && group == S::WARPGROUPS - 1) {
        /* The first one begins. */
        wgmma_named_arrive(WGMMA_FORWARD_PING_PONG, WGMMA_PING_PONG_THREADS);
    }
    for (int n = 0;; n++) {
        wgmma_await(&control.item_full[n % WGMMA_ITEMS], n / WGMMA_ITEMS % 2);
        const int slot = n % WGMMA_ITEMS;
        const wgmma_item &w = control.item[slot];
        if (!w.exists) {
            return;
        }
        float z_kept = 1;
        if constexpr (!S::IS_LEAN) {
            z_kept = control.terms[slot].z_kept;
            wgmma_begin_rows(g, b, slot, row);
        }
        wgmma_rows<S> rows;
        rows.state[0] = rows.state[1] = fattn_softmax_empty();
        rows.top[0] = rows.top[1] = rows.state[0].m;
        GPU_UNROLL
        for (int c = 0; c < S::WIDTH_V / 2; c++) {
            rows.o[c / 4][c % 4] = 0;
        }
        if constexpr (S::MERGES) {
            wgmma_prefetch_rows(b, w, row);
        }
        wgmma_await(&control.q_full, n % 2);
        wgmma_factors factor = {{1, 1}, 1};
        if constexpr (S::WIDENS) {
            factor = wgmma_own_queries(g, b, w, group, row);
        }
        if (!S::SKIPS) {
            wgmma_skip<S>(b, w.past - w.own_past[group], used);
        }
        if (w.own_past[group] > w.block) {
            wgmma_walk<S>(g, b, slot, group, row, factor, used, rows);
        } else {
            wgmma_release(&control.q_empty);
        }
        wgmma_end(g, b, slot, row, z_kept, factor, rows);
        __syncwarp();
        wgmma_release(&control.item_empty[n % WGMMA_ITEMS]);
    }
}

/* --- A block ---------------------------------------------------------------------------------- */

/* If the heads of a group do not divide a tile, no copy writes its last rows of queries, and this
 * sets them to 0. The softcap takes another path for a whole warp if one dot product is large, and
 * that must not depend on the previous contents of shared memory. */
template <class S>
GPU_DEVICE void wgmma_clear_unused_rows(const fattn_gpu_args &g, const wgmma_block<S> &b)
{
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        for (int r = wgmma_tile_rows<S>(b.group) + gpu_thread() / 8; r < S::ROWS;
             r += S::THREADS / 8) {
            GPU_UNROLL
            for (int c = 0; c < S::PANELS; c++) {
                wgmma_zero(b.q + (c * S::ROWS + r) * 128 + gpu_thread() % 8 * 16);
            }
        }
        wgmma_publish();
    }
}

/* The kernel. onto: the state with which shapes that merge rows merge the results. */
template <class S>
GPU_DEVICE void wgmma_forward_all(const fattn_gpu_args &g, const wgmma_map *maps,
                                  const fattn_merge_job *onto)
{
    static_assert(sizeof(wgmma_control<S>) <= WGMMA_CONTROL +
                                                  WGMMA_TERM_CONTROL(S::KNOWN, S::ROWS) +
                                                  (S::IS_SPLIT ? WGMMA_SPLIT_CONTROL : 0) +
                                                  (S::WIDENS ? WGMMA_STORED_CONTROL : 0),
                  "too small");
    static_assert(S::OWN_REGISTERS % 8 == 0 && S::COPY_REGISTERS >= 24, "as setmaxnreg wants them");
    extern __shared__ char shared[];
    wgmma_block<S> b;
    b.q = (mma_shared(shared) + WGMMA_ALIGN - 1) & ~(WGMMA_ALIGN - 1u);
    b.k = b.q + S::QUERY_BYTES;
    b.v = b.k + S::RING * S::KEY_BYTES;
    b.terms = b.v + S::RING * S::VALUE_BYTES;
    b.stored = b.terms + S::TERM_RING * S::TERM_BYTES;
    b.out = b.stored + S::STORED_RING * S::STORED_BYTES;
    b.control =
        (wgmma_control<S> *)(shared + (b.out + S::WARPS * WGMMA_OUT_BYTES - mma_shared(shared)));
    b.group = wgmma_group_of(g.problem);
    b.ping_pong = wgmma_ping_pongs<S>(g.problem, b.group);
    b.onto = onto;
    wgmma_control<S> &control = *b.control;
    const bool paged = g.problem.features & FATTN_PAGED;
    const int piece = paged ? (int)WGMMA_PIECE((int)g.problem.page_size, S::KEYS) : S::KEYS;
    const bool apart = !S::WIDENS && S::PANELS * (S::KEYS / piece) >= WGMMA_COPIES_APART;
    constexpr int wideners = S::WIDENS ? S::WIDENERS : 0;
    if (gpu_thread() == 0) {
        for (int n = 0; n < WGMMA_ITEMS; n++) {
            wgmma_barrier_make(&control.item_full[n], 1);
            wgmma_barrier_make(&control.item_empty[n],
                               S::WARPS + 1 + S::IS_STAGED + apart + wideners);
        }
        wgmma_barrier_make(&control.item_wanted, 1);
        wgmma_barrier_make(&control.q_full, 1);
        wgmma_barrier_make(&control.q_empty, S::WARPS);
        for (int n = 0; n < S::RING; n++) {
            wgmma_barrier_make(&control.k_full[n], S::WIDENS ? wideners : 1);
            wgmma_barrier_make(&control.k_empty[n], S::WARPS);
            wgmma_barrier_make(&control.v_full[n], S::WIDENS ? wideners : 1);
            wgmma_barrier_make(&control.v_empty[n], S::WARPS);
        }
        if constexpr (S::IS_STAGED) {
            for (int n = 0; n < S::TERM_RING; n++) {
                wgmma_barrier_make(&control.term_full[n], 1);
                wgmma_barrier_make(&control.term_empty[n], S::WARPS);
            }
        }
        if constexpr (S::WIDENS) {
            for (int n = 0; n < S::STORED_RING; n++) {
                wgmma_barrier_make(&control.stored_full[n], 1);
                wgmma_barrier_make(&control.stored_empty[n], wideners);
            }
        }
        wgmma_barriers_made();
    }
    if constexpr (!S::IS_LEAN) {
        wgmma_clear_unused_rows(g, b);
    }
    if (S::IS_SPLIT) {
        gpu_admit_later(); /* the kernel that merges parts */
    }
    gpu_sync();
    const int group = wgmma_group();
    if (group == 0) {
        wgmma_give_registers<S::COPY_REGISTERS>();
        static_assert(WGMMA_COPIER == 0, "its threads are the block's first");
        if (gpu_thread() < (paged ? GPU_WAVE : 1)) {
            wgmma_prefetch(maps);
            wgmma_prefetch(maps + 1);
            wgmma_prefetch(maps + 2);
            gpu_await_earlier();
            if (paged) {
                wgmma_copy_all<S, true>(g, maps, b, true, !apart);
            } else {
                wgmma_copy_all<S, false>(g, maps, b, true, true);
            }
        } else if (gpu_thread() / GPU_WAVE == WGMMA_PLANNER) {
            gpu_await_earlier();
            wgmma_plan(g, b);
        } else if (gpu_thread() / GPU_WAVE == WGMMA_VALUE_COPIER && apart) {
            gpu_await_earlier();
            wgmma_copy_all<S, true>(g, maps, b, false, true);
        }
        if constexpr (S::WIDENS && S::FIRST_GROUP == 1) {
            if (gpu_thread() / GPU_WAVE >= WGMMA_WIDENER) {
                wgmma_widen_all(b, gpu_thread() / GPU_WAVE - WGMMA_WIDENER);
            }
        }
        if constexpr (S::IS_STAGED) {
            if (gpu_thread() == GPU_WAVE * WGMMA_STAGER) {
                wgmma_prefetch(maps + 3);
                gpu_await_earlier();
                wgmma_stage_all(g, maps + 3, b);
            }
        }
    } else if (S::FIRST_GROUP > 1 && group == 1) {
        wgmma_give_registers<S::COPY_REGISTERS>();
        if constexpr (S::WIDENS) {
            wgmma_widen_all(b, gpu_thread() / GPU_WAVE - 4);
        }
    } else {
        wgmma_take_registers<S::OWN_REGISTERS>();
        wgmma_consume(g, b, group - S::FIRST_GROUP);
    }
}

#endif
