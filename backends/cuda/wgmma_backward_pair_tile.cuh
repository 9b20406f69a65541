/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tile of queries in backward on Hopper if two blocks share an item (wgmma_backward_pair.cuh).
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_PAIR_TILE_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_PAIR_TILE_CUH

#include "backends/cuda/wgmma_backward_pair.cuh"
#include "backends/cuda/wgmma_backward_tile.cuh"

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
    wgmma_begin_dp<S>(b, walk, b.v, dp);
    wgmma_wait<1>();
    wgmma_settle<S::OWN_QUERIES / 8>(x);
    wgmma_add_pending<S>(b, walk, sums);
    if constexpr (S::IS_LEAN) {
        wgmma_apply_band<S>(b, walk, x);
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
    wgmma_release_in_both(b.rank, &control.dout_empty[walk.dout.stage]);
    wgmma_ring_advance(walk.dout);
    if constexpr (MORE) {
        if constexpr (S::SKIPS) {
            next = wgmma_await_visit<S>(b, walk, next);
        }
        wgmma_await_queries<S>(b, walk, next.tile);
        wgmma_begin_scores<S>(b, walk, b.k, x);
        wgmma_read_term<S>(g, b, walk, next.head, next.tile);
        wgmma_drop_early<S>(g, walk, next.head, next.tile);
    }
    wgmma_await(&control.peer.ds_full[at], walk.ds_phase);
    wgmma_pair_dq<S>(b, walk.group, at, sums.dq);
    wgmma_step_ds<S>(walk);
    wgmma_wait<MORE ? 2 : 1>();
    wgmma_release_in_both(b.rank, &control.q_empty[walk.q_used.stage]);
    wgmma_ring_advance(walk.q_used);
    if constexpr (MORE) {
        wgmma_evaluate_term<S>(g, b, walk, next.head, next.tile);
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

#endif
