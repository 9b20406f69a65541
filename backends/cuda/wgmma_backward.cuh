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
 *                     shared memory. If two blocks share an item (wgmma_backward_pair.cuh), the
 *                     threads that multiply add their sums themselves; these warps then send dS
 *                     and, in a deterministic run, wait for the block's turn
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
 * exponentiates.
 *
 * Items and the workspace are in wgmma_backward_items.cuh, and the kernels that run before and
 * after in wgmma_backward_rows.cuh.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_CUH

#include "backends/cuda/wgmma_backward_ahead.cuh"
#include "backends/cuda/wgmma_backward_copies.cuh"

/* --- A tile of queries ------------------------------------------------------------------------ */

/* How many rows the sequence has in its last tile. */
template <class S>
GPU_DEVICE int wgmma_tail_rows(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk)
{
    return b.control->item[walk.item].queries % S::QUERIES;
}

/* Whether some rows of a tile belong to another sequence. `tile` may have been read just now, and
 * then takes long to arrive, so it is not used if no tile has such rows. */
template <class S> GPU_DEVICE bool wgmma_is_tail(const wgmma_backward_walk<S> &walk, int tile)
{
    return (!S::SKIPS || walk.tail >= 0) && tile == walk.tail;
}

/* Begins the warpgroup's part of K Q^T, or of V dO^T. */
template <class S>
GPU_DEVICE void wgmma_own_dots(int group, uint32_t keys, uint32_t queries,
                               float x[S::OWN_QUERIES / 8][4])
{
    const uint32_t first_key = S::IS_PAIR ? 0 : group * 64;
    const uint32_t first_query = wgmma_own_query<S>(group);
    wgmma_dots<typename S::type, S::WIDTH, S::KEYS, S::QUERIES, S::OWN_QUERIES, true>(
        wgmma_descriptor(keys + first_key * 128, 0),
        wgmma_descriptor(queries + first_query * 128, 0), x);
}

/* Waits for the queries of the next tile, which is `tile`. */
template <class S>
GPU_DEVICE void wgmma_await_queries(const wgmma_backward_block<S> &b,
                                    const wgmma_backward_walk<S> &walk, int tile)
{
    const uint32_t q = b.q + walk.q.stage * S::QUERY_BYTES;
    wgmma_await(&b.control->q_full[walk.q.stage], walk.q.phase);
    if (wgmma_is_tail<S>(walk, tile)) {
        wgmma_clear<S::QUERIES, S::PANELS>(q, wgmma_tail_rows<S>(b, walk),
                                           WGMMA_CLEARED + walk.group);
    }
}

/* The next tile: `next`, or, in kernels that may skip tiles, the one that the copier has chosen,
 * which is known when its queries have landed. */
template <class S>
GPU_DEVICE wgmma_visit wgmma_await_visit(const wgmma_backward_block<S> &b,
                                         wgmma_backward_walk<S> &walk, wgmma_visit next)
{
    if (!S::SKIPS) {
        return next;
    }
    wgmma_await(&b.control->q_full[walk.q.stage], walk.q.phase);
    next = *wgmma_visit_at<S>(b, walk.visits++);
    walk.ahead.mixed = next.mixed;
    return next;
}

/* Waits for dO of the next tile, which is `tile`. */
template <class S>
GPU_DEVICE void wgmma_await_dout(const wgmma_backward_block<S> &b,
                                 const wgmma_backward_walk<S> &walk, int tile)
{
    const uint32_t dout = b.dout + walk.dout.stage * S::QUERY_BYTES;
    wgmma_await(&b.control->dout_full[walk.dout.stage], walk.dout.phase);
    if (wgmma_is_tail<S>(walk, tile)) {
        wgmma_clear<S::QUERIES, S::PANELS>(dout, wgmma_tail_rows<S>(b, walk),
                                           WGMMA_CLEARED + walk.group);
    }
}

/* Reads a float for each of the thread's columns among columns 8 * FIRST .. 8 * PAST - 1. Running
 * products keep shared memory busy, so that this takes long. As much as registers allow is read
 * early, before another wait. */
template <class S, int FIRST, int PAST>
GPU_DEVICE void wgmma_read_columns(uint32_t from, float y[S::OWN_QUERIES / 8][2])
{
    const int group = (int)threadIdx.x / WGMMA_WARPGROUP - 1;
    const uint32_t first = from + 4 * wgmma_own_query<S>(group) + mma_lane() % 4 * 8;
    GPU_UNROLL
    for (int n = FIRST; n < PAST; n++) {
        uint32_t two[2];
        mma_get<2>(first + 32 * n, two);
        y[n][0] = __int_as_float((int)two[0]);
        y[n][1] = __int_as_float((int)two[1]);
    }
}

/* Begins S^T of the tile whose queries have landed. */
template <class S>
GPU_DEVICE void wgmma_begin_scores(const wgmma_backward_block<S> &b, wgmma_backward_walk<S> &walk,
                                   float x[S::OWN_QUERIES / 8][4])
{
    wgmma_own_dots<S>(walk.group, b.k, b.q + walk.q.stage * S::QUERY_BYTES, x);
    wgmma_step(walk.q);
}

/* Begins dP^T of the tile whose dO has landed. */
template <class S>
GPU_DEVICE void wgmma_begin_dp(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk,
                               float dp[S::OWN_QUERIES / 8][4])
{
    wgmma_own_dots<S>(walk.group, b.v, b.dout + walk.dout.stage * S::QUERY_BYTES, dp);
}

/* Turns scores in x into P. */
template <class S>
GPU_DEVICE void wgmma_exponentiate(float unit, const float lse[S::OWN_QUERIES / 8][2],
                                   float x[S::OWN_QUERIES / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < S::OWN_QUERIES / 2; n++) {
        float *const score = &x[n / 4][n % 4];
        *score = mma_exp2(fmaf(*score, unit, -lse[n / 4][n % 2]));
    }
}

/* Turns dP in dp into dS. */
template <class S>
GPU_DEVICE void wgmma_differentiate(const float delta[S::OWN_QUERIES / 8][2],
                                    const float p[S::OWN_QUERIES / 8][4],
                                    float dp[S::OWN_QUERIES / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < S::OWN_QUERIES / 2; n++) {
        float *const element = &dp[n / 4][n % 4];
        *element = p[n / 4][n % 4] * (*element - delta[n / 4][n % 2]);
    }
}

/* Sets scores to -inf for pairs outside the band and for keys that do not exist. */
template <class S>
GPU_DEVICE void wgmma_mask(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk,
                           float x[S::OWN_QUERIES / 8][4])
{
    if (walk.tile < walk.full || walk.tile >= walk.full_past) {
        const wgmma_backward_item &w = b.control->item[walk.item];
        const int t = wgmma_thread();
        const int key = (S::IS_PAIR ? 0 : 64 * walk.group) + wgmma_row(t, 0);
        const int query = (S::IS_PAIR ? S::OWN_QUERIES * walk.group : 0) + wgmma_column(t, 0);
        const int from = key - walk.tile * S::QUERIES - query;
        const int first[2] = {w.first_query + from, w.first_query + from + 8};
        if (walk.tile < walk.full_past && walk.full != INT32_MAX) {
            wgmma_keep_first<S::OWN_QUERIES>(first, x);
        } else {
            const int past[2] = {key < w.keys ? w.past_query + from : -WGMMA_UNBOUNDED,
                                 key + 8 < w.keys ? w.past_query + from + 8 : -WGMMA_UNBOUNDED};
            wgmma_keep<S::OWN_QUERIES>(first, past, x);
        }
    }
}

/* Turns dP in dp into dS with any features, and stores dBias. */
template <class S>
GPU_DEVICE void wgmma_differentiate_any(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                        const wgmma_backward_walk<S> &walk,
                                        const float delta[S::OWN_QUERIES / 8][2],
                                        const float p[S::OWN_QUERIES / 8][4],
                                        float dp[S::OWN_QUERIES / 8][4])
{
    if constexpr (S::IS_LEAN) {
        wgmma_differentiate<S>(delta, p, dp);
    } else {
        const float factor = mma_has<S>(g, FATTN_DROPOUT) ? b.control->dropout.multiplier : 1;
        wgmma_differentiate_fully<S>(g, walk.ahead.dropout_keeps, factor, delta, p, dp);
    }
    if constexpr (S::HAS_DBIAS) {
        if (g.problem.outputs & FATTN_OUT_DBIAS) {
            wgmma_store_dbias<S>(g, wgmma_patch_of<S>(b, walk, walk.head, walk.tile), dp);
        }
    }
}

/* --- Products of a tile ----------------------------------------------------------------------- */

/* Begins the warpgroup's half of dQ^T: 64 channels of PART queries. from: the offset of dS, 0 or
 * DS_BYTES. */
template <class S>
GPU_DEVICE void wgmma_begin_dq(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk,
                               uint32_t from, float dq[S::PART / 8][4])
{
    const int part = walk.group * S::PART;
    const uint32_t k = b.k + part / S::QUERIES * S::KEYS * 128;
    const uint64_t a = wgmma_descriptor(k, 0);
    const uint64_t ds = wgmma_descriptor(b.ds + from + part % S::QUERIES * 128, 0);
    wgmma_fence();
    GPU_UNROLL
    for (int i = 0; i < S::KEYS / 16; i++) {
        const int panel = i / 4, step = i % 4 * WGMMA_CHANNELS;
        const uint64_t k_step = a + i * WGMMA_ROWS;
        const uint64_t ds_step = ds + (panel * S::QUERIES * 128 >> 4) + step;
        if (i == 0) {
            wgmma_product<typename S::type, S::PART>::new_transposed_a(dq, k_step, ds_step);
        } else {
            wgmma_product<typename S::type, S::PART>::transposed_a(dq, k_step, ds_step);
        }
    }
    wgmma_commit();
}

/* If dQ is deferred: wait until both warpgroups have stored dS of this tile, or of the one before,
 * to shared memory. */
template <class S>
GPU_DEVICE void wgmma_await_ds(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk)
{
    wgmma_await(&b.control->ds_full[walk.ds != 0], walk.ds_phase);
}

template <class S>
GPU_DEVICE void wgmma_await_ds_before(const wgmma_backward_block<S> &b,
                                      const wgmma_backward_walk<S> &walk)
{
    wgmma_await(&b.control->ds_full[walk.ds == 0], walk.ds_phase ^ (walk.ds == 0));
}

/* With ping-pong: lets the other warpgroup issue products. */
template <class S> GPU_DEVICE void wgmma_ping_pong_pass(const wgmma_backward_walk<S> &walk)
{
    if (S::PING_PONGS) {
        wgmma_named_arrive(WGMMA_PING_PONG + (walk.group ^ 1), WGMMA_BOTH);
    }
}

/* Hands this warpgroup's part of dQ to its adder, when that has read the one before. */
template <class S>
GPU_DEVICE void wgmma_put_dq(const wgmma_backward_walk<S> &walk, const float dq[S::PART / 8][4])
{
    wgmma_named_sync(WGMMA_DQ_ADDED + walk.group, WGMMA_WITH_ADDER);
    GPU_UNROLL
    for (int n = 0; n < S::PART / 2; n++) {
        /* channels 8 apart are in adjacent chunks */
        const uint32_t at = n % 4 < 2 ? walk.dq_put : walk.dq_put ^ 32;
        wgmma_put(at + n / 4 * 8 * 256 + n % 2 * 256, dq[n / 4][n % 4]);
    }
    wgmma_publish();
    wgmma_named_arrive(WGMMA_DQ_MADE + walk.group, WGMMA_WITH_ADDER);
}

/* Advances to the stage of the next tile's P and dS. */
template <class S> GPU_DEVICE void wgmma_step_ds(wgmma_backward_walk<S> &walk)
{
    walk.ds_phase ^= walk.ds != 0;
    walk.ds ^= S::DS_BYTES;
}

/* Advances to the next tile, if there are MORE. */
template <class S, bool MORE>
GPU_DEVICE void wgmma_go_on(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                            wgmma_backward_walk<S> &walk, wgmma_visit next)
{
    walk.dq_pending = true;
    walk.tile = next.tile;
    if constexpr (!S::IS_LEAN && MORE) {
        if (next.head != walk.head) {
            walk.head = next.head;
            wgmma_head_begin<S>(g, b, walk, next.head);
        }
    }
}

/* The end of a tile, after the product for dK has been issued. With MORE it issues S^T of the next
 * tile and prepares that tile's terms. The buffer of the queries is released when dK is done. */
template <class S, bool MORE>
GPU_DEVICE void wgmma_end_tile(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                               wgmma_backward_walk<S> &walk, wgmma_visit next,
                               float x[S::OWN_QUERIES / 8][4])
{
    if constexpr (MORE) {
        wgmma_begin_scores<S>(b, walk, x);
        wgmma_ping_pong_pass<S>(walk);
        if (S::KNOWN == FATTN_MASK) {
            wgmma_look_ahead<S>(g, b, walk, next.head, next.tile);
        } else {
            wgmma_read_term<S>(g, b, walk, next.head, next.tile);
        }
        wgmma_drop_late<S>(g, b, walk, next.head, next.tile);
        wgmma_await_dout<S>(b, walk, next.tile);
        if (S::KNOWN != FATTN_MASK) {
            wgmma_look_ahead<S>(g, b, walk, next.head, next.tile);
        }
        wgmma_wait<1>();
    } else {
        wgmma_wait<0>();
    }
    wgmma_release(&b.control->q_empty[walk.q_used.stage]);
    wgmma_step(walk.q_used);
    if constexpr (MORE) {
        wgmma_wait<0>(); /* the compiler does not track products across loop iterations */
        wgmma_join_ahead<S>(g, b, walk);
    }
    wgmma_step_ds<S>(walk);
    wgmma_go_on<S, MORE>(g, b, walk, next);
}

/* One tile of queries. On entry its Q, dO, lse and delta are in shared memory, and x is its S^T,
 * complete. With MORE, x becomes S^T of the next tile, complete too. */
template <class S, bool MORE>
GPU_DEVICE void wgmma_backward_tile(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                    float unit, wgmma_backward_walk<S> &walk, wgmma_visit next,
                                    float x[S::QUERIES / 8][4], float dk[S::WIDTH / 8][4],
                                    float dv[S::WIDTH / 8][4])
{
    typedef typename S::type T;
    enum { STEPS = S::QUERIES / 16, FLOATS = 4 * S::QUERIES, COLUMNS = S::QUERIES / 8 };
    wgmma_backward_control<S> &control = *b.control;
    const uint32_t lse_from = b.lse + walk.q_used.stage * FLOATS;
    const uint32_t delta_from = b.delta + walk.dout.stage * FLOATS;
    const uint64_t q = wgmma_descriptor(b.q + walk.q_used.stage * S::QUERY_BYTES, S::QUERIES * 128);
    const uint64_t dout =
        wgmma_descriptor(b.dout + walk.dout.stage * S::QUERY_BYTES, S::QUERIES * 128);
    /* The deferred dQ of the last tile is computed beside dK if there are registers for it. */
    constexpr bool LAST_BESIDE = S::DEFERS && !MORE && S::WIDTH == 64;
    float dp[S::QUERIES / 8][4], dq[S::PART / 8][4], last[S::PART / 8][4];
    float lse[S::QUERIES / 8][2], delta[S::QUERIES / 8][2];
    uint32_t p[STEPS][4], ds[STEPS][4];
    wgmma_read_columns<S, 0, S::LSE_EARLY>(lse_from, lse);
    wgmma_begin_dp<S>(b, walk, dp);
    wgmma_wait<1>();
    wgmma_settle<S::QUERIES / 8>(x);
    if constexpr (S::IS_LEAN) {
        wgmma_mask<S>(b, walk, x);
        wgmma_read_columns<S, S::LSE_EARLY, COLUMNS>(lse_from, lse);
        wgmma_exponentiate<S>(unit, lse, x);
        wgmma_pack<T, S::QUERIES>(x, p);
    } else {
        wgmma_read_columns<S, S::LSE_EARLY, COLUMNS>(lse_from, lse);
        wgmma_weigh_fully<S>(g, b, walk, lse, x, p);
    }
    wgmma_mix<T, STEPS, S::WIDTH>(p, dout, dv);
    wgmma_read_columns<S, 0, S::DELTA_EARLY>(delta_from, delta);
    wgmma_wait<1>();
    wgmma_settle<S::QUERIES / 8>(dp);
    wgmma_read_columns<S, S::DELTA_EARLY, COLUMNS>(delta_from, delta);
    wgmma_differentiate_any<S>(g, b, walk, delta, x, dp);
    wgmma_pack<T, S::QUERIES>(dp, ds);
    if constexpr (S::DEFERS) {
        wgmma_await(&control.ds_empty[walk.ds != 0], walk.ds_phase ^ 1);
    }
    GPU_UNROLL
    for (int n = 0; n < STEPS; n++) {
        wgmma_put_transposed(walk.ds_put + walk.ds + n * 16 * 128, ds[n]);
    }
    wgmma_publish();
    if constexpr (S::DEFERS) {
        __syncwarp();
        wgmma_release(&control.ds_full[walk.ds != 0]);
        if (S::PING_PONGS) {
            wgmma_named_sync(WGMMA_PING_PONG + walk.group, WGMMA_BOTH);
        }
        if (walk.dq_pending) {
            wgmma_await_ds_before<S>(b, walk);
        }
        wgmma_begin_dq<S>(b, walk, walk.ds ^ S::DS_BYTES, dq); /* unused in the first tile */
    } else {
        wgmma_named_sync(WGMMA_DS_MADE, WGMMA_BOTH);
        wgmma_begin_dq<S>(b, walk, walk.ds, dq);
    }
    wgmma_mix<T, STEPS, S::WIDTH>(ds, q, dk);
    if constexpr (MORE) {
        next = wgmma_await_visit<S>(b, walk, next);
        wgmma_drop_early<S>(g, walk, next.head, next.tile);
        wgmma_await_queries<S>(b, walk, next.tile);
        wgmma_await_term<S>(b, walk);
        if (S::KNOWN == FATTN_MASK) { /* for a bias there are no registers yet */
            wgmma_read_term<S>(g, b, walk, next.head, next.tile);
        }
    } else {
        wgmma_ping_pong_pass<S>(walk);
    }
    if constexpr (LAST_BESIDE) {
        wgmma_await_ds<S>(b, walk);
        wgmma_begin_dq<S>(b, walk, walk.ds, last);
        wgmma_wait<2>();
    } else {
        wgmma_wait<1>();
    }
    wgmma_settle<S::PART / 8>(dq);
    if (S::DEFERS && walk.dq_pending) {
        wgmma_release(&control.ds_empty[walk.ds == 0]);
    }
    wgmma_release(&control.dout_empty[walk.dout.stage]);
    wgmma_step(walk.dout);
    if (!S::DEFERS || walk.dq_pending) {
        wgmma_put_dq<S>(walk, dq);
    }
    wgmma_end_tile<S, MORE>(g, b, walk, next, x);
    if constexpr (S::DEFERS && !MORE) {
        if constexpr (!LAST_BESIDE) {
            wgmma_await_ds_before<S>(b, walk);
            wgmma_begin_dq<S>(b, walk, walk.ds ^ S::DS_BYTES, last);
            wgmma_wait<0>();
        }
        wgmma_settle<S::PART / 8>(last);
        wgmma_release(&control.ds_empty[walk.ds == 0]);
        wgmma_put_dq<S>(walk, last);
    }
}

/* --- A tile of an item that two blocks share -------------------------------------------------- */

/* Begins sums += X^T Y for the warpgroup's channels of Y. x, y: tiles [query][key] and
 * [query][channel]. */
template <class S>
GPU_DEVICE void wgmma_pair_mix(uint32_t x, uint32_t y, int group,
                               float sums[S::OWN_CHANNELS / 8][4])
{
    const uint32_t panel = S::QUERIES * 128;
    const uint64_t a = wgmma_descriptor(x, 0);
    const uint64_t b = wgmma_descriptor(y + group * (S::OWN_CHANNELS / 64) * panel, panel);
    wgmma_fence();
    GPU_UNROLL
    for (int i = 0; i < S::QUERIES / 16; i++) {
        wgmma_product<typename S::type, S::OWN_CHANNELS>::transposed_ab(sums, a + i * WGMMA_ROWS,
                                                                        b + i * WGMMA_ROWS);
    }
    wgmma_commit();
}

/* Stores a part of P^T or dS^T, rounded, to a tile [query][key]. */
template <class S>
GPU_DEVICE void wgmma_pair_put(uint32_t to, const uint32_t pairs[S::OWN_QUERIES / 16][4])
{
    GPU_UNROLL
    for (int n = 0; n < S::OWN_QUERIES / 16; n++) {
        wgmma_put_transposed(to + n * 16 * 128, pairs[n]);
    }
    wgmma_publish();
}

/* Adds the sums of the tile before to dQ; in a deterministic run, when their turn has come. */
template <class S>
GPU_DEVICE void wgmma_add_pending(const wgmma_backward_block<S> &b,
                                  const wgmma_backward_walk<S> &walk,
                                  const wgmma_pair_sums<S> &sums)
{
    if (b.ordered && walk.dq_pending) {
        wgmma_named_sync(WGMMA_MAY_ADD + (walk.ds == 0), WGMMA_ALL_WITH_ADDER);
    }
    wgmma_add_sums<S>(sums);
}

/* In a deterministic run, tells the adder that the sums have been added. */
template <class S>
GPU_DEVICE void wgmma_pending_added(const wgmma_backward_block<S> &b,
                                    const wgmma_backward_walk<S> &walk)
{
    if (b.ordered && walk.dq_pending) {
        wgmma_named_arrive(WGMMA_ADDED + (walk.ds == 0), WGMMA_ALL_WITH_ADDER);
    }
}

/* Goes from a tile's S^T to dS in shared memory, and computes P and dV in between. A warpgroup has
 * S^T and dP^T of half of the queries; for dV of its channels it also reads the other warpgroup's
 * half of P. sums: dQ of the tile before, which is added while dP is computed. */
template <class S>
GPU_DEVICE void wgmma_pair_ds(const fattn_gpu_args &g, const wgmma_backward_block<S> &b, float unit,
                              wgmma_backward_walk<S> &walk, const wgmma_pair_sums<S> &sums,
                              float x[S::OWN_QUERIES / 8][4], float dv[S::OWN_CHANNELS / 8][4])
{
    typedef typename S::type T;
    enum { FLOATS = 4 * S::QUERIES, COLUMNS = S::OWN_QUERIES / 8 };
    const uint32_t dout = b.dout + walk.dout.stage * S::QUERY_BYTES;
    float dp[S::OWN_QUERIES / 8][4];
    float lse[COLUMNS][2], delta[COLUMNS][2];
    uint32_t pairs[S::OWN_QUERIES / 16][4];
    wgmma_read_columns<S, 0, COLUMNS>(b.lse + walk.q_used.stage * FLOATS, lse);
    wgmma_begin_dp<S>(b, walk, dp);
    wgmma_wait<1>();
    wgmma_settle<S::OWN_QUERIES / 8>(x);
    wgmma_add_pending<S>(b, walk, sums);
    if constexpr (S::IS_LEAN) {
        wgmma_mask<S>(b, walk, x);
        wgmma_exponentiate<S>(unit, lse, x);
        wgmma_pack<T, S::OWN_QUERIES>(x, pairs);
    } else {
        wgmma_weigh_fully<S>(g, b, walk, lse, x, pairs);
    }
    wgmma_pair_put<S>(walk.ds_put + walk.ds + (b.p - b.ds), pairs);
    wgmma_pending_added<S>(b, walk);
    wgmma_named_sync(WGMMA_P_MADE, WGMMA_BOTH);
    wgmma_pair_mix<S>(b.p + walk.ds, dout, walk.group, dv);
    wgmma_read_columns<S, 0, COLUMNS>(b.delta + walk.dout.stage * FLOATS, delta);
    wgmma_wait<1>();
    wgmma_settle<S::OWN_QUERIES / 8>(dp);
    wgmma_differentiate_any<S>(g, b, walk, delta, x, dp);
    wgmma_pack<T, S::OWN_QUERIES>(dp, pairs);
    wgmma_pair_put<S>(walk.ds_put + walk.ds, pairs);
}

/* One tile, as above, of an item that two blocks share. The products after dV are in the order dK,
 * S^T of the next tile, dQ. While the first two run, dS of the other block arrives, and dO of the
 * next tile replaces this one's, as it has only one stage. sums: on entry dQ of the tile before, on
 * return dQ of this tile; dq_to: where dQ of the head's first tile is added.
 */
template <class S, bool MORE>
GPU_DEVICE void wgmma_pair_tile(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                float unit, wgmma_backward_walk<S> &walk, wgmma_visit next,
                                float *dq_to, wgmma_pair_sums<S> &sums,
                                float x[S::OWN_QUERIES / 8][4], float dk[S::OWN_CHANNELS / 8][4],
                                float dv[S::OWN_CHANNELS / 8][4])
{
    static_assert(!S::IS_STAGED, "there is no room for a bias or mask");
    wgmma_backward_control<S> &control = *b.control;
    const uint32_t q = b.q + walk.q_used.stage * S::QUERY_BYTES;
    const int at = walk.ds != 0;
    wgmma_pair_ds<S>(g, b, unit, walk, sums, x, dv);
    __syncwarp();
    wgmma_release(&control.ds_full[at]);
    wgmma_named_sync(WGMMA_DS_MADE, WGMMA_BOTH);
    wgmma_pair_mix<S>(b.ds + walk.ds, q, walk.group, dk);
    wgmma_wait<1>();
    wgmma_release_in_both<S>(b, &control.dout_empty[walk.dout.stage]);
    wgmma_step(walk.dout);
    if constexpr (MORE) {
        if constexpr (S::SKIPS) {
            next = wgmma_await_visit<S>(b, walk, next);
        }
        wgmma_await_queries<S>(b, walk, next.tile);
        wgmma_begin_scores<S>(b, walk, x);
        wgmma_read_term<S>(g, b, walk, next.head, next.tile);
        wgmma_drop_early<S>(g, walk, next.head, next.tile);
    }
    wgmma_await(&control.peer.ds_full[at], walk.ds_phase);
    wgmma_pair_dq<S>(b, walk.group, at, sums.dq);
    wgmma_step_ds<S>(walk);
    wgmma_wait<MORE ? 2 : 1>();
    wgmma_release_in_both<S>(b, &control.q_empty[walk.q_used.stage]);
    wgmma_step(walk.q_used);
    if constexpr (MORE) {
        wgmma_look_ahead<S>(g, b, walk, next.head, next.tile);
        wgmma_drop_late<S>(g, b, walk, next.head, next.tile);
        wgmma_await_dout<S>(b, walk, next.tile);
    }
    wgmma_wait<0>(); /* as in wgmma_end_tile() */
    wgmma_settle<S::PART / 8>(sums.dq);
    if constexpr (MORE) {
        wgmma_join_ahead<S>(g, b, walk);
    }
    sums.to = dq_to + (int64_t)walk.tile * (S::QUERIES * S::WIDTH);
    wgmma_go_on<S, MORE>(g, b, walk, next);
}

/* --- A warpgroup ------------------------------------------------------------------------------ */

/* Sets the walk to the beginning of an item. */
template <class S>
GPU_DEVICE void wgmma_walk_begin(const fattn_problem &p, const wgmma_backward_item &w, int item,
                                 wgmma_backward_walk<S> &walk)
{
    const bool shared = p.features & (FATTN_CU_SEQLENS_Q | FATTN_SEQUSED_Q);
    walk.item = item;
    walk.tile = w.start;
    walk.head = 0;
    walk.dq_pending = false;
    walk.full = w.full;
    walk.full_past = w.full_past;
    walk.tail = shared && w.queries % S::QUERIES ? w.queries / S::QUERIES : -1;
}

template <class S>
GPU_DEVICE void wgmma_walk_set(const fattn_gpu_args &g, const wgmma_backward_block<S> &b, int group,
                               wgmma_backward_walk<S> &walk)
{
    const int t = wgmma_thread(), lane = t % 32, warp = t / 32;
    walk.group = group;
    walk.q = walk.q_used = {0, 0};
    walk.dout = {0, 0};
    walk.term = {0, 0};
    walk.visits = 0;
    walk.ds = 0;
    walk.ds_phase = 0;
    /* The lane's row in the matrices of 8 keys by 8 queries that stmatrix stores, keys first. */
    const int query = lane % 8 + lane / 16 * 8, key = 16 * warp + lane / 8 % 2 * 8;
    const int first_query = S::IS_PAIR ? group * S::OWN_QUERIES : 0;
    const int first_key = S::IS_PAIR ? 0 : 64 * group;
    walk.ds_put = b.ds + wgmma_offset(S::QUERIES, (uint32_t)(first_query + query),
                                      (uint32_t)(first_key + key));
    const int channel = wgmma_row(t, 0), row = group * S::PART % S::QUERIES + wgmma_column(t, 0);
    walk.dq_put = b.dq + group * S::PART / S::QUERIES * S::QUERIES * 256 +
                  4 * wgmma_sum_offset(S::QUERIES, (uint32_t)row, (uint32_t)channel);
    if (S::IS_STAGED) {
        walk.term_offset = wgmma_term_offset<S>(g, group);
    }
}

/* Transposes 4 x 4 words of a quad of lanes: x[k] of lane q becomes x[q] of lane k. */
GPU_DEVICE void wgmma_transpose_quad(uint32_t x[4])
{
    const bool odd = gpu_thread() & 1, high = gpu_thread() & 2;
    GPU_UNROLL
    for (int n = 0; n < 4; n += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[n] : x[n + 1], 1);
        x[n] = odd ? other : x[n];
        x[n + 1] = odd ? x[n + 1] : other;
    }
    GPU_UNROLL
    for (int n = 0; n < 2; n++) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[n] : x[n + 2], 2);
        x[n] = high ? other : x[n];
        x[n + 2] = high ? x[n + 2] : other;
    }
}

/* Stores a row of 16-bit elements with W channels, of which `dim` exist. The row's quad stores 32
 * channels at a time, eight per lane. to: the row; chunks: it begins at a multiple of 16 bytes; h:
 * which of the thread's two rows. */
template <class T, int W>
GPU_DEVICE void wgmma_store_row(uint16_t *to, int dim, bool chunks, bool exists, float factor,
                                bool empty, int h, const float sums[W / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < W / 32; n++) {
        uint32_t x[4];
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            const float *const pair = sums[4 * n + k] + 2 * h;
            x[k] = empty ? 0 : T::pack(pair[0] * factor, pair[1] * factor);
        }
        wgmma_transpose_quad(x);
        const int c = 32 * n + gpu_thread() % 4 * 8, live = dim - c;
        if (exists) {
            gpu_store_eight(to + c, {x[0], x[1], x[2], x[3]}, live, chunks && live >= 8);
        }
    }
}

/* Load and store two adjacent floats of a row, of which the first `live` exist. pairs: they are
 * aligned to 8 bytes, and either both or none exist. */
GPU_DEVICE gpu_f2 wgmma_get_floats(const float *from, int live, bool pairs)
{
    gpu_f2 two = {0, 0};
    if (pairs && live > 0) {
        two = *(const gpu_f2 *)from;
    } else {
        two.x = live > 0 ? from[0] : 0;
        two.y = live > 1 ? from[1] : 0;
    }
    return two;
}

GPU_DEVICE void wgmma_put_floats(float *to, int live, bool pairs, gpu_f2 two)
{
    if (pairs && live > 0) {
        *(gpu_f2 *)to = two;
    } else if (live > 0) {
        to[0] = two.x;
        if (live > 1) {
            to[1] = two.y;
        }
    }
}

/* wgmma_store_row() in floats, which it may add to. It issues 16 loads before the first store. */
template <int W>
GPU_DEVICE void wgmma_store_row_floats(float *to, int dim, bool pairs, float factor, bool empty,
                                       bool adds, int h, const float sums[W / 8][4])
{
    enum { READS = 8 };
    static_assert(W % (8 * READS) == 0, "rounds of reads are full");
    const int own = gpu_thread() % 4 * 2;
    GPU_UNROLL
    for (int m = 0; m < W / 8; m += READS) {
        gpu_f2 there[READS];
        GPU_UNROLL
        for (int k = 0; k < READS; k++) {
            const int c = 8 * (m + k) + own;
            there[k] = wgmma_get_floats(to + c, adds ? dim - c : 0, pairs);
        }
        GPU_UNROLL
        for (int k = 0; k < READS; k++) {
            const int c = 8 * (m + k) + own;
            const float *const sum = sums[m + k] + 2 * h;
            gpu_f2 two;
            two.x = empty ? 0 : sum[0] * factor;
            two.y = empty ? 0 : sum[1] * factor;
            two.x = adds ? there[k].x + two.x : two.x;
            two.y = adds ? there[k].y + two.y : two.y;
            wgmma_put_floats(to + c, dim - c, pairs, two);
        }
    }
}

/* Stores rows of a gradient for the tile's keys. at: the element of the first key. */
template <class S>
GPU_DEVICE void wgmma_store_keys(const fattn_gpu_args &g, const wgmma_backward_item &w, int group,
                                 void *to, int64_t at, int64_t stride, int dim, bool chunks,
                                 float factor, const float sums[S::OWN_CHANNELS / 8][4])
{
    enum { N = S::OWN_CHANNELS };
    const int first_key = S::IS_PAIR ? 0 : 64 * group, channel = S::IS_PAIR ? N * group : 0;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int key = first_key + wgmma_row(wgmma_thread(), 2 * h);
        const bool exists = key < w.owned, empty = key >= w.keys;
        const int64_t row = at + key * stride + channel;
        if (g.dtype_gradient != FATTN_F32) {
            wgmma_store_row<typename S::type, N>((uint16_t *)to + row, dim - channel, chunks,
                                                 exists, factor, empty, h, sums);
        } else if (exists) {
            const bool pairs = chunks && dim % 2 == 0;
            wgmma_store_row_floats<N>((float *)to + row, dim - channel, pairs, factor, empty,
                                      g.problem.features & FATTN_ACCUMULATE, h, sums);
        }
    }
}

/* Where a thread adds its own sums of dQ. */
typedef struct wgmma_own_dq {
    float *to;    /* its first element in the head's first tile */
    int64_t next; /* distance from a head to the next */
} wgmma_own_dq;

template <class S>
GPU_DEVICE wgmma_own_dq wgmma_own_dq_of(const fattn_gpu_args &g, const wgmma_backward_item &w,
                                        int rank, int group)
{
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    wgmma_own_dq own;
    own.to = workspace.dq + (int64_t)w.row_tile * (S::QUERIES * S::WIDTH) +
             (rank * S::WARPGROUPS + group) * (S::PART * 64) + wgmma_thread() * 4;
    own.next = (int64_t)workspace.tiles * (S::QUERIES * S::WIDTH);
    return own;
}

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
    wgmma_await(&control.k_full, n % 2);
    wgmma_await(&control.v_full, n % 2);
    if (tail < S::KEYS) {
        wgmma_clear<S::KEYS, S::PANELS>(b.k, tail, WGMMA_CLEARED + walk.group);
        wgmma_clear<S::KEYS, S::PANELS>(b.v, tail, WGMMA_CLEARED + walk.group);
    }
    if (S::IS_PAIR) {
        wgmma_await_peer_keys<S>(b, w, walk.group, n, shared);
    }
    wgmma_await_visit<S>(b, walk, {w.start, 0, true});
    wgmma_await_queries<S>(b, walk, walk.tile);
    wgmma_begin_scores<S>(b, walk, x);
    wgmma_await_term<S>(b, walk);
    wgmma_read_term<S>(g, b, walk, 0, w.start);
    wgmma_look_ahead<S>(g, b, walk, 0, w.start);
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
    wgmma_release(&control.keys_empty);
    wgmma_settle<S::OWN_CHANNELS / 8>(dk);
    wgmma_settle<S::OWN_CHANNELS / 8>(dv);
}

/* The loop of consumer warpgroup `group`. */
template <class S>
GPU_DEVICE void wgmma_backward_work(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                    int group)
{
    enum { N = S::OWN_CHANNELS };
    wgmma_backward_control<S> &control = *b.control;
    const fattn_problem &p = g.problem;
    wgmma_backward_walk<S> walk;
    int used = 0; /* items that had tiles */
    wgmma_walk_set<S>(g, b, group, walk);
    if (group == 1) {
        wgmma_ping_pong_pass<S>(walk); /* warpgroup 0 begins */
    }
    for (int n = 0;; n++) {
        float dk[N / 8][4], dv[N / 8][4];
        wgmma_await(&control.item_full[n % 2], n / 2 % 2);
        if (!control.exists[n % 2]) {
            break;
        }
        const wgmma_backward_item &w = control.item[n % 2];
        GPU_UNROLL
        for (int c = 0; c < N / 2; c++) {
            dk[c / 4][c % 4] = dv[c / 4][c % 4] = 0;
        }
        wgmma_settle<N / 8>(dk);
        wgmma_settle<N / 8>(dv);
        wgmma_walk_begin<S>(p, w, n % 2, walk);
        if (w.tiles > 0) {
            wgmma_backward_tiles<S>(g, b, w, used++, walk, dk, dv);
        }
        if (p.outputs & FATTN_OUT_DV) {
            float z_kept = 1; /* applied at the end: weights times Z might overflow */
            if constexpr (!S::IS_LEAN) {
                z_kept = mma_has<S>(g, FATTN_DROPOUT) ? control.dropout.multiplier : 1;
            }
            wgmma_store_keys<S>(g, w, group, g.buffers.dv, w.dv, p.dv.seq, (int)p.dim_v,
                                g.chunks & FATTN_GPU_QUADS_DV, z_kept, dv);
        }
        if (p.outputs & FATTN_OUT_DK) {
            wgmma_store_keys<S>(g, w, group, g.buffers.dk, w.dk, p.dk.seq, (int)p.dim,
                                g.chunks & FATTN_GPU_QUADS_DK, g.rule.scale, dk);
        }
        __syncwarp();
        wgmma_release(&control.item_empty[n % 2]);
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
    b.v = b.k + S::KEY_BYTES;
    b.q = b.v + S::KEY_BYTES;
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
    for (int n = 0; n < 2; n++) {
        wgmma_barrier_make(&control.item_full[n], 1);
        wgmma_barrier_make(&control.item_empty[n], S::WARPS + 1 + ADDERS);
    }
    wgmma_barrier_make(&control.item_wanted, 1);
    wgmma_barrier_make(&control.k_full, 1);
    wgmma_barrier_make(&control.v_full, 1);
    wgmma_barrier_make(&control.keys_empty, S::WARPS);
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
        wgmma_barrier_make(&control.peer.number_full, 1);
        wgmma_barrier_make(&control.peer.number_empty, 1);
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
    static_assert(sizeof(wgmma_backward_control<S>) <= WGMMA_BACKWARD_CONTROL, "too small");
    extern __shared__ char shared[];
    wgmma_backward_block<S> b = wgmma_backward_block_of<S>(wgmma_own_memory(shared));
    b.rank = S::IS_PAIR ? wgmma_rank() : 0;
    b.group = (int)fattn_quotient(g.problem.heads_q, g.problem.heads_k);
    b.waits = wgmma_is_staged<S>(g);
    b.chunks = wgmma_has_chunks<S>(g);
    b.ordered = S::IS_PAIR && S::IS_LEAN ? S::IS_ORDERED : wgmma_is_ordered(g.problem);
    gpu_admit_later();
    if (gpu_thread() == 0) {
        wgmma_barriers_of<S>(*b.control);
        if (S::SKIPS) {
            b.control->scan = wgmma_scan_results_of<S>(g);
        }
        for (int n = 0; n < (b.waits ? 5 : 4); n++) {
            wgmma_prefetch(maps + n);
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
                wgmma_add_all<S>(g, b, warp - WGMMA_ADDER);
            }
        }
    } else {
        wgmma_take_registers<S::OWN_REGISTERS>();
        wgmma_backward_work<S>(g, b, group - 1);
    }
    if (S::IS_PAIR) {
        wgmma_sync_blocks<S>(); /* the other block may still access this one's barriers */
    }
}

#endif
