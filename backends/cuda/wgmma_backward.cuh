/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on Hopper, for 16-bit types, in the manner of FlashAttention-3. Lean kernels have causal
 * masks, windows, lengths and positions. The others have the features of pairs: every one, or a
 * single one (wgmma_backward_ahead.cuh). The equations are those of simt_backward.cuh.
 *
 * A block is persistent: it processes item after item, each a tile of keys of a key/value head. It
 * visits the queries that attend to some of these, head by head of the group. Its warps are
 * specialised, and synchronise by barriers in shared memory (wgmma_backward_block.cuh). Three roles
 * do not multiply (wgmma_backward_copies.cuh):
 *
 *     the taker       one warp; takes the next item from a counter, and finds the tiles of queries
 *                     that a bias or a mask does not hide
 *     the copier      one thread; issues the copies of queries and dO, with lse and delta, and of a
 *                     bias or mask that is the only feature, as soon as a stage is free
 *     two adders      a warp each; they add to dQ in the workspace what a warpgroup has written to
 *                     shared memory, and at the end of an item store dK and dV, which the warpgroup
 *                     has written to the same place (wgmma_hands_over). If two blocks share an
 *                     item (wgmma_backward_pair.cuh), the threads that multiply add their sums
 *                     themselves; these warps then send dS and, in a deterministic run, wait for
 *                     the block's turn
 *     warpgroups      the consumers, with 64 keys each, which are the rows of their products:
 *
 *         S^T = K Q^T             dP^T = V dO^T
 *         P^T = exp(S^T - lse)    dS^T = P^T (dP^T - delta)
 *         dV += P^T dO            dK += dS^T Q                    operands and sums in registers
 *         dQ^T = K^T dS^T         of both warpgroups' keys, through shared memory
 *
 * and each computes half of dQ. For that they synchronise, once a tile. If two blocks share an
 * item, both warpgroups have the block's 64 keys: each computes half of the queries of S^T and
 * dP^T, and half of the channels of dV, dK and dQ, and P^T and dS^T pass through shared memory.
 * Products run in the order in which they are issued, and another is always issued before one is
 * waited for:
 *
 *     S^T            of the next tile, while dK is made
 *     dP^T           while S^T becomes P^T
 *     dV             while dP^T becomes dS^T
 *     dQ^T, dK       when both warpgroups have dS
 *
 * If dQ is deferred (DEFERS), the dQ^T of this list is that of the tile before. Then a warpgroup
 * does not wait for the other's dS of the same tile, and one multiplies while the other
 * exponentiates. Lean kernels of 64 channels also go from item to item without a break
 * (wgmma_backward_chain.cuh).
 *
 * This header has the loops of a warpgroup and of a block; a tile's products are in
 * wgmma_backward_tile.cuh and _pair_tile.cuh, dK and dV leave by wgmma_backward_store.cuh.
 * Items and the workspace are in wgmma_backward_items.cuh, and the kernels that run before and
 * after in wgmma_backward_before.cuh and _rows.cuh.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_CUH

#include "backends/cuda/wgmma_backward_chain.cuh"
#include "backends/cuda/wgmma_backward_copies.cuh"
#include "backends/cuda/wgmma_backward_pair_tile.cuh"
#include "backends/cuda/wgmma_backward_store.cuh"
#include "backends/cuda/wgmma_backward_tile.cuh"

/* --- A warpgroup ------------------------------------------------------------------------------ */

/* Visits the tiles of an item. n counts items with tiles. */
template <class S>
GPU_DEVICE void wgmma_backward_tiles(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                     const wgmma_backward_item &w, int n,
                                     wgmma_backward_walk<S> &walk, float dk[S::OWN_CHANNELS / 8][4],
                                     float dv[S::OWN_CHANNELS / 8][4])
{
    wgmma_backward_control<S> &control = *b.control;
    const float unit = wgmma_unit<S>(g);
    const bool shared = g.problem.features & (FATTN_CU_SEQLENS_K | FATTN_SEQUSED_K);
    const int tail = shared ? w.keys : S::KEYS;
    float x[S::OWN_QUERIES / 8][4];
    wgmma_own_dq own;
    if (S::IS_PAIR) {
        own = wgmma_own_dq_of<S>(g, w, b.rank, walk.group);
    }
    wgmma_pair_sums<S>
        sums; /* zeros for the first tile: adding them costs less than a test for it */
    if (S::IS_PAIR) {
        sums.to = own.to + (int64_t)w.start * (S::QUERIES * S::WIDTH);
        GPU_UNROLL
        for (int n = 0; n < S::PART / 2; n++) {
            sums.dq[n / 4][n % 4] = 0;
        }
    }
    wgmma_head_begin<S>(g, b, walk, 0);
    wgmma_drop_begin<S>(g, b, walk);
    wgmma_drop_early<S>(g, walk, 0, w.start);
    wgmma_await(&control.k_full[0], n % 2);
    wgmma_await(&control.v_full[0], n % 2);
    if (tail < S::KEYS) {
        wgmma_clear<S::KEYS, S::PANELS>(b.k, tail, WGMMA_CLEARED + walk.group);
        wgmma_clear<S::KEYS, S::PANELS>(b.v, tail, WGMMA_CLEARED + walk.group);
    }
    if (S::IS_PAIR) {
        wgmma_await_peer_keys<S>(b, w, walk.group, n, shared);
    }
    wgmma_await_visit<S>(b, walk, {w.start, 0, true});
    wgmma_await_queries<S>(b, walk, walk.tile);
    wgmma_begin_scores<S>(b, walk, b.k, x);
    wgmma_await_term<S>(b, walk);
    wgmma_read_term<S>(g, b, walk, 0, w.start);
    wgmma_evaluate_term<S>(g, b, walk, 0, w.start);
    wgmma_drop_late<S>(g, b, walk, 0, w.start);
    wgmma_await_dout<S>(b, walk, walk.tile);
    wgmma_wait<0>(); /* as at the end of a tile */
    wgmma_join_ahead<S>(g, b, walk);
    GPU_ROLLED
    for (int left = w.tiles; left > 1; left--) {
        const int tile = wgmma_next_tile(w, walk.tile), before = walk.head;
        const bool last = tile == w.start;
        const wgmma_visit next = {tile, before + last, true};
        if constexpr (S::IS_PAIR) {
            wgmma_pair_tile<S, true>(g, b, unit, walk, next, own.to, sums, x, dk, dv);
            own.to += (S::SKIPS ? walk.head != before : last) ? own.next : 0;
        } else {
            wgmma_backward_tile<S, true>(g, b, unit, walk, next, x, dk, dv);
        }
    }
    if constexpr (S::IS_PAIR) {
        wgmma_pair_tile<S, false>(g, b, unit, walk, {0, 0, 0}, own.to, sums, x, dk, dv);
        wgmma_add_pending<S>(b, walk, sums);
        wgmma_pending_added<S>(b, walk);
    } else {
        wgmma_backward_tile<S, false>(g, b, unit, walk, {0, 0, 0}, x, dk, dv);
    }
    wgmma_release(&control.k_empty[0]);
    wgmma_settle<S::OWN_CHANNELS / 8>(dk);
    wgmma_settle<S::OWN_CHANNELS / 8>(dv);
}

/* The loop of consumer warpgroup `group`. */
template <class S>
GPU_DEVICE void wgmma_backward_consume(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                       int group)
{
    enum { N = S::OWN_CHANNELS };
    wgmma_backward_control<S> &control = *b.control;
    const fattn_problem &p = g.problem;
    wgmma_backward_walk<S> walk;
    int used = 0; /* items that had tiles */
    wgmma_walk_set<S>(g, b, group, walk);
    for (int n = 0;; n++) {
        float dk[N / 8][4], dv[N / 8][4];
        const int slot = wgmma_item_slot<S>(n);
        wgmma_await(&control.item_full[slot], wgmma_item_phase<S>(n));
        if (!control.exists[slot]) {
            break;
        }
        const wgmma_backward_item &w = control.item[slot];
        GPU_UNROLL
        for (int c = 0; c < N / 2; c++) {
            dk[c / 4][c % 4] = dv[c / 4][c % 4] = 0;
        }
        wgmma_settle<N / 8>(dk);
        wgmma_settle<N / 8>(dv);
        wgmma_walk_begin<S>(p, w, slot, walk);
        if (w.tiles > 0) {
            wgmma_backward_tiles<S>(g, b, w, used++, walk, dk, dv);
        }
        if (wgmma_hands_over<S>(g, w, group)) {
            wgmma_hand_over<S>(g, b, w, group, dk, dv);
        } else {
            wgmma_store_item<S>(g, b, w, group, dk, dv);
        }
        __syncwarp();
        wgmma_release(&control.item_empty[slot]);
    }
    if (!S::IS_PAIR) {
        wgmma_named_sync(WGMMA_DQ_ADDED + group, WGMMA_WITH_ADDER); /* matches the last arrival */
    }
}

/* --- A block ---------------------------------------------------------------------------------- */

/* Sets the addresses of the tiles. */
template <class S> GPU_DEVICE wgmma_backward_block<S> wgmma_backward_block_of(char *shared)
{
    wgmma_backward_block<S> b;
    b.k = (mma_shared(shared) + WGMMA_ALIGN - 1) & ~(WGMMA_ALIGN - 1u);
    b.v = b.k + S::KEY_STAGES * S::KEY_BYTES;
    b.q = b.v + S::VALUE_STAGES * S::KEY_BYTES;
    b.dout = b.q + S::STAGES * S::QUERY_BYTES;
    b.ds = b.dout + S::DOUT_STAGES * S::QUERY_BYTES;
    b.dq = b.ds + 2 * S::DS_BYTES;
    b.p = b.dq + S::DQ_BYTES;
    b.peer_k = b.p + S::P_BYTES;
    b.peer_ds = b.peer_k + S::PEER_KEY_BYTES;
    b.terms = b.peer_ds + S::PEER_DS_BYTES;
    b.lse = b.terms + S::TERM_RING * S::TERM_BYTES;
    b.delta = b.lse + S::STAGES * 4 * S::QUERIES;
    const uint32_t control = b.delta + S::DOUT_STAGES * 4 * S::QUERIES - mma_shared(shared);
    b.control = (wgmma_backward_control<S> *)(shared + control);
    return b;
}

template <class S> GPU_DEVICE void wgmma_barriers_of(wgmma_backward_control<S> &control)
{
    enum { ADDERS = 2 };
    for (int n = 0; n < S::ITEM_RING; n++) {
        wgmma_barrier_make(&control.item_full[n], 1);
        wgmma_barrier_make(&control.item_empty[n], S::WARPS + 1 + ADDERS);
    }
    wgmma_barrier_make(&control.item_wanted, 1);
    for (int n = 0; n < S::KEY_STAGES; n++) {
        wgmma_barrier_make(&control.k_full[n], 1);
        wgmma_barrier_make(&control.k_empty[n], S::WARPS);
    }
    for (int n = 0; n < S::VALUE_STAGES; n++) {
        wgmma_barrier_make(&control.v_full[n], 1);
        if (S::CHAINS) {
            wgmma_barrier_make(&control.v_empty[n], S::WARPS);
        }
    }
    for (int n = 0; n < S::STAGES; n++) {
        wgmma_barrier_make(&control.q_full[n], 1);
        wgmma_barrier_make(&control.q_empty[n], S::WARPS * S::BLOCKS);
    }
    for (int n = 0; n < 2; n++) {
        wgmma_barrier_make(&control.dout_full[n], 1);
        wgmma_barrier_make(&control.dout_empty[n], S::WARPS * S::BLOCKS);
        wgmma_barrier_make(&control.ds_full[n], S::WARPS);
        wgmma_barrier_make(&control.ds_empty[n], S::WARPS);
        if (S::IS_PAIR) {
            wgmma_barrier_make(&control.peer.ds_full[n], 1);
        }
        if (S::IS_STAGED) {
            wgmma_barrier_make(&control.term_full[n], 1);
            wgmma_barrier_make(&control.term_empty[n], S::WARPS);
        }
    }
    if (S::IS_PAIR) {
        wgmma_barrier_make(&control.peer.k_full, 1);
        wgmma_sent_number_make(control.peer.item);
    }
    wgmma_barriers_made();
}

/* Waits for all threads of an item's blocks. */
template <class S> GPU_DEVICE void wgmma_sync_blocks(void)
{
    if (S::IS_PAIR) {
        wgmma_cluster_sync();
    } else {
        gpu_sync();
    }
}

template <class S>
GPU_DEVICE void wgmma_backward_all(const fattn_gpu_args &g, const wgmma_map *maps)
{
    static_assert(sizeof(wgmma_backward_control<S>) <=
                      WGMMA_BACKWARD_CONTROL + (S::CHAINS ? WGMMA_BACKWARD_CHAIN_CONTROL : 0),
                  "too small");
    extern __shared__ char shared[];
    wgmma_backward_block<S> b = wgmma_backward_block_of<S>(wgmma_own_memory(shared));
    b.rank = S::IS_PAIR ? wgmma_rank() : 0;
    b.group = (int)fattn_quotient(g.problem.heads_q, g.problem.heads_k);
    b.staged = wgmma_is_staged<S>(g);
    b.chunks = wgmma_has_chunks<S>(g);
    b.ordered = S::IS_PAIR && S::IS_LEAN ? S::IS_ORDERED : wgmma_is_ordered(g.problem);
    gpu_admit_later();
    if (gpu_thread() == 0) {
        wgmma_barriers_of<S>(*b.control);
        if (S::SKIPS) {
            b.control->scan = wgmma_scan_results_of<S>(g);
        }
        for (int n = 0; n < 4; n++) {
            wgmma_prefetch(maps + n);
        }
        if (b.staged) {
            wgmma_prefetch(maps + 6);
        }
    }
    wgmma_sync_blocks<S>();
    const int group = wgmma_group();
    if (group == 0) {
        wgmma_give_registers<S::COPY_REGISTERS>();
        const int warp = gpu_thread() / GPU_WAVE;
        gpu_await_earlier();
        if (gpu_thread() == GPU_WAVE * WGMMA_BACKWARD_COPIER) {
            wgmma_copy_backward<S>(g, maps, b);
        } else if (warp == WGMMA_TAKER) {
            wgmma_take_items<S>(g, b);
        } else if (warp >= WGMMA_ADDER) {
            if constexpr (S::IS_PAIR) {
                wgmma_await_turns<S>(g, b, warp - WGMMA_ADDER);
            } else {
                wgmma_add_all<S>(g, maps, b, warp - WGMMA_ADDER);
            }
        }
    } else {
        wgmma_take_registers<S::OWN_REGISTERS>();
        if constexpr (S::CHAINS) {
            wgmma_chain_consume<S>(g, b, group - 1);
        } else {
            wgmma_backward_consume<S>(g, b, group - 1);
        }
    }
    if (S::IS_PAIR) {
        wgmma_sync_blocks<S>(); /* the other block may still access this one's barriers */
    }
}

#endif
