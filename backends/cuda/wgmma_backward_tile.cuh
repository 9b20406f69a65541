/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tile of queries in backward on Hopper (wgmma_backward.cuh): its steps, and their order in a
 * kernel whose items have one block.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_TILE_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_TILE_CUH

#include "backends/cuda/wgmma_backward_ahead.cuh"

/* --- A tile of queries ------------------------------------------------------------------------ */

/* Where a tile is in shared memory: addresses of lse and delta, and descriptors of its queries and
 * its dO as the second operands of dK and dV. */
typedef struct wgmma_tile_parts {
    uint32_t lse, delta;
    uint64_t q, dout;
} wgmma_tile_parts;

template <class S>
GPU_DEVICE wgmma_tile_parts wgmma_tile_parts_of(const wgmma_backward_block<S> &b,
                                                const wgmma_backward_walk<S> &walk)
{
    enum { FLOATS = 4 * S::QUERIES, PANEL = S::QUERIES * 128 };
    wgmma_tile_parts part;
    part.lse = b.lse + walk.q_used.stage * FLOATS;
    part.delta = b.delta + walk.dout.stage * FLOATS;
    part.q = wgmma_descriptor(b.q + walk.q_used.stage * S::QUERY_BYTES, PANEL);
    part.dout = wgmma_descriptor(b.dout + walk.dout.stage * S::QUERY_BYTES, PANEL);
    return part;
}

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

/* Begins S^T of the tile whose queries have landed. k: the address of the keys. */
template <class S>
GPU_DEVICE void wgmma_begin_scores(const wgmma_backward_block<S> &b, wgmma_backward_walk<S> &walk,
                                   uint32_t k, float x[S::OWN_QUERIES / 8][4])
{
    wgmma_own_dots<S>(walk.group, k, b.q + walk.q.stage * S::QUERY_BYTES, x);
    wgmma_ring_advance(walk.q);
}

/* Begins dP^T of the tile whose dO has landed. v: the address of the values. */
template <class S>
GPU_DEVICE void wgmma_begin_dp(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk,
                               uint32_t v, float dp[S::OWN_QUERIES / 8][4])
{
    wgmma_own_dots<S>(walk.group, v, b.dout + walk.dout.stage * S::QUERY_BYTES, dp);
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
GPU_DEVICE void wgmma_apply_band(const wgmma_backward_block<S> &b,
                                 const wgmma_backward_walk<S> &walk, float x[S::OWN_QUERIES / 8][4])
{
    if (walk.tile < walk.full || walk.tile >= walk.full_past) {
        const wgmma_backward_item &w = b.control->item[walk.item];
        const int t = wgmma_thread();
        const int key = (S::IS_PAIR ? 0 : 64 * walk.group) + wgmma_row(t, 0);
        const int query = (S::IS_PAIR ? S::OWN_QUERIES * walk.group : 0) + wgmma_column(t, 0);
        const int from = key - walk.tile * S::QUERIES - query;
        const int first[2] = {w.first_query + from, w.first_query + from + 8};
        if (walk.tile < walk.full_past && walk.full != INT32_MAX) {
            wgmma_hide_before<S::OWN_QUERIES>(first, x);
        } else {
            const int past[2] = {key < w.keys ? w.past_query + from : -WGMMA_UNBOUNDED,
                                 key + 8 < w.keys ? w.past_query + from + 8 : -WGMMA_UNBOUNDED};
            wgmma_hide_outside<S::OWN_QUERIES>(first, past, x);
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

/* Begins the warpgroup's half of dQ^T: 64 channels of PART queries. k: the address of the keys;
 * from: the offset of dS, 0 or DS_BYTES. */
template <class S>
GPU_DEVICE void wgmma_begin_dq(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk,
                               uint32_t k, uint32_t from, float dq[S::PART / 8][4])
{
    const int part = walk.group * S::PART;
    const uint64_t a = wgmma_descriptor(k + part / S::QUERIES * S::KEYS * 128, 0);
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

/* --- Terms of the next tile ------------------------------------------------------------------- */

/* What is done for the next tile while dQ and dK are computed: waits for its queries, and begins to
 * prepare its terms. Returns which tile it is. */
template <class S>
GPU_DEVICE wgmma_visit wgmma_prepare_early(const fattn_gpu_args &g,
                                           const wgmma_backward_block<S> &b,
                                           wgmma_backward_walk<S> &walk, wgmma_visit next)
{
    next = wgmma_await_visit<S>(b, walk, next);
    wgmma_drop_early<S>(g, walk, next.head, next.tile);
    wgmma_await_queries<S>(b, walk, next.tile);
    wgmma_await_term<S>(b, walk);
    if (S::KNOWN == FATTN_MASK) { /* for a bias there are no registers yet */
        wgmma_read_term<S>(g, b, walk, next.head, next.tile);
    }
    return next;
}

/* And while its S^T is: prepares its terms up to wgmma_join_ahead(), and waits for its dO. */
template <class S>
GPU_DEVICE void wgmma_prepare_late(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                   wgmma_backward_walk<S> &walk, wgmma_visit next)
{
    if (S::KNOWN == FATTN_MASK) {
        wgmma_evaluate_term<S>(g, b, walk, next.head, next.tile);
    } else {
        wgmma_read_term<S>(g, b, walk, next.head, next.tile);
    }
    wgmma_drop_late<S>(g, b, walk, next.head, next.tile);
    wgmma_await_dout<S>(b, walk, next.tile);
    if (S::KNOWN != FATTN_MASK) {
        wgmma_evaluate_term<S>(g, b, walk, next.head, next.tile);
    }
}

/* --- Steps of a tile -------------------------------------------------------------------------- */

/* Begins dP^T, turns S^T in x into P, begins dV += P^T dO, and waits for dP^T. p: P, rounded; x
 * becomes the factor of dP - delta. delta: of some columns, as registers allow. values: the address
 * of the values. */
template <class S>
GPU_DEVICE void wgmma_weigh_tile(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                 float unit, const wgmma_backward_walk<S> &walk,
                                 const wgmma_tile_parts &part, uint32_t values,
                                 float x[S::QUERIES / 8][4], uint32_t p[S::QUERIES / 16][4],
                                 float dp[S::QUERIES / 8][4], float delta[S::QUERIES / 8][2],
                                 float dv[S::WIDTH / 8][4])
{
    typedef typename S::type T;
    enum { STEPS = S::QUERIES / 16, COLUMNS = S::QUERIES / 8 };
    float lse[S::QUERIES / 8][2];
    wgmma_read_columns<S, 0, S::LSE_EARLY>(part.lse, lse);
    wgmma_begin_dp<S>(b, walk, values, dp);
    wgmma_wait<1>();
    wgmma_settle<S::QUERIES / 8>(x);
    if constexpr (S::IS_LEAN) {
        wgmma_apply_band<S>(b, walk, x);
        wgmma_read_columns<S, S::LSE_EARLY, COLUMNS>(part.lse, lse);
        wgmma_exponentiate<S>(unit, lse, x);
        wgmma_pack<T, S::QUERIES>(x, p);
    } else {
        wgmma_read_columns<S, S::LSE_EARLY, COLUMNS>(part.lse, lse);
        wgmma_weigh_fully<S>(g, b, walk, lse, x, p);
    }
    wgmma_mix<T, STEPS, S::WIDTH>(p, part.dout, dv);
    wgmma_read_columns<S, 0, S::DELTA_EARLY>(part.delta, delta);
    wgmma_wait<1>();
    wgmma_settle<S::QUERIES / 8>(dp);
}

/* Turns dP^T in dp into dS^T: rounded, in ds. */
template <class S>
GPU_DEVICE void
wgmma_differentiate_tile(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                         const wgmma_backward_walk<S> &walk, const wgmma_tile_parts &part,
                         const float x[S::QUERIES / 8][4], float dp[S::QUERIES / 8][4],
                         float delta[S::QUERIES / 8][2], uint32_t ds[S::QUERIES / 16][4])
{
    wgmma_read_columns<S, S::DELTA_EARLY, S::QUERIES / 8>(part.delta, delta);
    wgmma_differentiate_any<S>(g, b, walk, delta, x, dp);
    wgmma_pack<typename S::type, S::QUERIES>(dp, ds);
}

/* Puts dS^T to shared memory for dQ. Unless dQ is deferred, the warpgroups meet. */
template <class S>
GPU_DEVICE void wgmma_put_ds(const wgmma_backward_block<S> &b, const wgmma_backward_walk<S> &walk,
                             const uint32_t ds[S::QUERIES / 16][4])
{
    wgmma_backward_control<S> &control = *b.control;
    if constexpr (S::DEFERS) {
        wgmma_await(&control.ds_empty[walk.ds != 0], walk.ds_phase ^ 1);
    }
    GPU_UNROLL
    for (int n = 0; n < S::QUERIES / 16; n++) {
        wgmma_put_transposed(walk.ds_put + walk.ds + n * 16 * 128, ds[n]);
    }
    wgmma_publish();
    if constexpr (S::DEFERS) {
        __syncwarp();
        wgmma_release(&control.ds_full[walk.ds != 0]);
    } else {
        wgmma_named_sync(WGMMA_DS_MADE, WGMMA_BOTH);
    }
}

/* --- A tile ----------------------------------------------------------------------------------- */

/* The end of a tile, after the product for dK has been issued. With MORE it issues S^T of the next
 * tile and prepares that tile's terms. The buffer of the queries is released when dK is done. */
template <class S, bool MORE>
GPU_DEVICE void wgmma_end_tile(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                               wgmma_backward_walk<S> &walk, wgmma_visit next,
                               float x[S::OWN_QUERIES / 8][4])
{
    if constexpr (MORE) {
        wgmma_begin_scores<S>(b, walk, b.k, x);
        wgmma_prepare_late<S>(g, b, walk, next);
        wgmma_wait<1>();
    } else {
        wgmma_wait<0>();
    }
    wgmma_release(&b.control->q_empty[walk.q_used.stage]);
    wgmma_ring_advance(walk.q_used);
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
    enum { STEPS = S::QUERIES / 16 };
    wgmma_backward_control<S> &control = *b.control;
    const wgmma_tile_parts part = wgmma_tile_parts_of<S>(b, walk);
    /* The deferred dQ of the last tile is computed beside dK if there are registers for it. */
    constexpr bool LAST_BESIDE = S::DEFERS && !MORE && S::WIDTH == 64;
    float dp[S::QUERIES / 8][4], dq[S::PART / 8][4], last[S::PART / 8][4];
    float delta[S::QUERIES / 8][2];
    uint32_t p[STEPS][4], ds[STEPS][4];
    wgmma_weigh_tile<S>(g, b, unit, walk, part, b.v, x, p, dp, delta, dv);
    wgmma_differentiate_tile<S>(g, b, walk, part, x, dp, delta, ds);
    wgmma_put_ds<S>(b, walk, ds);
    if (S::DEFERS && walk.dq_pending) {
        wgmma_await_ds_before<S>(b, walk);
    }
    /* If deferred, that of the tile before; unused in the first tile. */
    wgmma_begin_dq<S>(b, walk, b.k, S::DEFERS ? walk.ds ^ S::DS_BYTES : walk.ds, dq);
    wgmma_mix<typename S::type, STEPS, S::WIDTH>(ds, part.q, dk);
    if constexpr (MORE) {
        next = wgmma_prepare_early<S>(g, b, walk, next);
    }
    if constexpr (LAST_BESIDE) {
        wgmma_await_ds<S>(b, walk);
        wgmma_begin_dq<S>(b, walk, b.k, walk.ds, last);
        wgmma_wait<2>();
    } else {
        wgmma_wait<1>();
    }
    wgmma_settle<S::PART / 8>(dq);
    if (S::DEFERS && walk.dq_pending) {
        wgmma_release(&control.ds_empty[walk.ds == 0]);
    }
    wgmma_release(&control.dout_empty[walk.dout.stage]);
    wgmma_ring_advance(walk.dout);
    if (!S::DEFERS || walk.dq_pending) {
        wgmma_put_dq<S>(walk, dq);
    }
    wgmma_end_tile<S, MORE>(g, b, walk, next, x);
    if constexpr (S::DEFERS && !MORE) {
        if constexpr (!LAST_BESIDE) {
            wgmma_await_ds_before<S>(b, walk);
            wgmma_begin_dq<S>(b, walk, b.k, walk.ds ^ S::DS_BYTES, last);
            wgmma_wait<0>();
        }
        wgmma_settle<S::PART / 8>(last);
        wgmma_release(&control.ds_empty[walk.ds == 0]);
        wgmma_put_dq<S>(walk, last);
    }
}

#endif
