/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop of a warpgroup in backward on Hopper (wgmma_backward.cuh) whose items are chained: the
 * tiles of successive items follow one another as those of a single item do. S^T of an item's first
 * tile is computed beside dK of the last tile of the item before. dQ, which is deferred by a tile,
 * is computed for an item's last tile during the first tile of the next item. So keys are copied
 * long before they are needed, and no product stands alone at either end of an item. That takes
 * several tiles of keys in shared memory.
 *
 * A chain ends if there are no more items, before and after an item without tiles, and after each
 * item of a deterministic run, in which other blocks wait for dQ of the last tile.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_CHAIN_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_CHAIN_CUH

#include "backends/cuda/wgmma_backward_store.cuh"
#include "backends/cuda/wgmma_backward_tile.cuh"

/* Where a warpgroup is among the items of its block. */
template <class S> struct wgmma_chain {
    int number;                         /* of the item */
    int left;                           /* its tiles that are not finished, with the current one */
    wgmma_ring<S::KEY_STAGES> keys;     /* of the tile whose S^T is computed, or is computed next */
    wgmma_ring<S::VALUE_STAGES> values; /* of the item */
    int before; /* stage of the keys of the tile before; -1: there is none */
};

template <class S>
GPU_DEVICE uint32_t wgmma_keys_at(const wgmma_backward_block<S> &b, const wgmma_chain<S> &chain)
{
    return b.k + chain.keys.stage * S::KEY_BYTES;
}

template <class S>
GPU_DEVICE uint32_t wgmma_values_at(const wgmma_backward_block<S> &b, const wgmma_chain<S> &chain)
{
    return b.v + chain.values.stage * S::KEY_BYTES;
}

/* Waits for the keys or values of an item, and zeroes rows that belong to another sequence. */
template <class S>
GPU_DEVICE void wgmma_await_rows(const fattn_gpu_args &g, uint64_t *full, int phase, uint32_t tile,
                                 const wgmma_backward_item &w, int group)
{
    wgmma_await(full, phase);
    if (g.problem.features & (FATTN_CU_SEQLENS_K | FATTN_SEQUSED_K) && w.keys < S::KEYS) {
        wgmma_clear<S::KEYS, S::PANELS>(tile, w.keys, WGMMA_CLEARED + group);
    }
}

template <class S>
GPU_DEVICE void wgmma_await_keys(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                 const wgmma_backward_item &w, int group,
                                 const wgmma_chain<S> &chain)
{
    wgmma_await_rows<S>(g, &b.control->k_full[chain.keys.stage], chain.keys.phase,
                        wgmma_keys_at<S>(b, chain), w, group);
}

template <class S>
GPU_DEVICE void wgmma_await_values(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                   const wgmma_backward_item &w, int group,
                                   const wgmma_chain<S> &chain)
{
    wgmma_await_rows<S>(g, &b.control->v_full[chain.values.stage], chain.values.phase,
                        wgmma_values_at<S>(b, chain), w, group);
}

/* Lets the other warpgroup issue its products: they take turns. */
GPU_DEVICE void wgmma_pass_turn(int group)
{
    wgmma_named_arrive(WGMMA_PING_PONG + (group ^ 1), WGMMA_BOTH);
}

/* Begins a chain with an item that has tiles. */
template <class S>
GPU_DEVICE void wgmma_chain_begin(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                  const wgmma_backward_item &w, wgmma_backward_walk<S> &walk,
                                  wgmma_chain<S> &chain, float x[S::QUERIES / 8][4])
{
    walk.q = walk.q_used;
    wgmma_await_keys<S>(g, b, w, walk.group, chain);
    wgmma_await_queries<S>(b, walk, walk.tile);
    wgmma_begin_scores<S>(b, walk, wgmma_keys_at<S>(b, chain), x);
    wgmma_await_values<S>(g, b, w, walk.group, chain);
    wgmma_await_dout<S>(b, walk, walk.tile);
    wgmma_wait<0>();
}

/* Goes from a tile to the next one of the item, or to the first of the next item. After that
 * chain.left is 0 if the chain ends here. Returns the tile. */
template <class S>
GPU_DEVICE int wgmma_chain_next(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                wgmma_backward_walk<S> &walk, wgmma_chain<S> &chain)
{
    if (chain.left > 1) {
        chain.left--;
        return wgmma_next_tile(b.control->item[walk.item], walk.tile);
    }
    chain.number++;
    chain.left = 0;
    if (!b.ordered) {
        const wgmma_backward_item *const w = wgmma_item_await<S>(b, chain.number);
        if (w && w->tiles > 0) {
            chain.left = w->tiles;
            wgmma_ring_advance(chain.keys);
            wgmma_walk_begin<S>(g.problem, *w, wgmma_item_slot<S>(chain.number), walk);
        }
    }
    return walk.tile;
}

/* One tile of queries, as wgmma_backward_tile(), and dQ of the tile before. On return x is S^T of
 * the next tile, if the chain goes on. */
template <class S>
GPU_DEVICE void wgmma_chained_tile(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                   float unit, wgmma_backward_walk<S> &walk, wgmma_chain<S> &chain,
                                   float x[S::QUERIES / 8][4], float dk[S::WIDTH / 8][4],
                                   float dv[S::WIDTH / 8][4])
{
    enum { STEPS = S::QUERIES / 16 };
    wgmma_backward_control<S> &control = *b.control;
    const wgmma_tile_parts part = wgmma_tile_parts_of<S>(b, walk);
    const bool last = chain.left == 1, begun = chain.before >= 0;
    const int stage = chain.keys.stage, before = begun ? chain.before : 0;
    float dp[S::QUERIES / 8][4], dq[S::PART / 8][4];
    float delta[S::QUERIES / 8][2];
    uint32_t p[STEPS][4], ds[STEPS][4];
    wgmma_weigh_tile<S>(g, b, unit, walk, part, wgmma_values_at<S>(b, chain), x, p, dp, delta, dv);
    if (last) {
        wgmma_release(&control.v_empty[chain.values.stage]);
        wgmma_ring_advance(chain.values);
    }
    wgmma_differentiate_tile<S>(g, b, walk, part, x, dp, delta, ds);
    wgmma_put_ds<S>(b, walk, ds);
    wgmma_named_sync(WGMMA_PING_PONG + walk.group, WGMMA_BOTH);
    if (begun) {
        wgmma_await_ds_before<S>(b, walk);
    }
    /* Of the tile before; unused in the first tile of a chain. */
    wgmma_begin_dq<S>(b, walk, b.k + before * S::KEY_BYTES, walk.ds ^ S::DS_BYTES, dq);
    wgmma_mix<typename S::type, STEPS, S::WIDTH>(ds, part.q, dk);
    const int next = wgmma_chain_next<S>(g, b, walk, chain);
    const bool more = chain.left > 0;
    walk.q = walk.q_used;
    wgmma_ring_advance(walk.q);
    if (more && !last) {
        wgmma_await_queries<S>(b, walk, next);
    }
    wgmma_wait<1>();
    wgmma_settle<S::PART / 8>(dq);
    wgmma_release(&control.dout_empty[walk.dout.stage]);
    wgmma_ring_advance(walk.dout);
    if (begun) {
        wgmma_release(&control.ds_empty[walk.ds == 0]);
        if (before != stage) {
            wgmma_release(&control.k_empty[before]);
        }
        wgmma_put_dq<S>(walk, dq);
    }
    chain.before = stage;
    /* The next item's keys may take the place of those of this dQ, when both warpgroups have
     * released them. For that the other one may need its turn. */
    if (last) {
        wgmma_pass_turn(walk.group);
    }
    if (more && last) {
        wgmma_await_keys<S>(g, b, control.item[walk.item], walk.group, chain);
        wgmma_await_queries<S>(b, walk, next);
    }
    /* At the end of a chain this product is not used. A branch around it would serialise all. */
    wgmma_own_dots<S>(walk.group, wgmma_keys_at<S>(b, chain), b.q + walk.q.stage * S::QUERY_BYTES,
                      x);
    if (!last) {
        wgmma_pass_turn(walk.group);
    }
    if (more) {
        wgmma_await_dout<S>(b, walk, next);
        if (last) {
            wgmma_await_values<S>(g, b, control.item[walk.item], walk.group, chain);
        }
    }
    wgmma_wait<1>();
    wgmma_release(&control.q_empty[walk.q_used.stage]);
    wgmma_ring_advance(walk.q_used);
    wgmma_wait<0>(); /* the compiler does not track products across loop iterations */
    wgmma_step_ds<S>(walk);
    walk.tile = next;
}

/* Computes dQ of the last tile of a chain. */
template <class S>
GPU_DEVICE void wgmma_chain_end(const wgmma_backward_block<S> &b, wgmma_backward_walk<S> &walk,
                                wgmma_chain<S> &chain)
{
    wgmma_backward_control<S> &control = *b.control;
    float dq[S::PART / 8][4];
    wgmma_await_ds_before<S>(b, walk);
    wgmma_begin_dq<S>(b, walk, b.k + chain.before * S::KEY_BYTES, walk.ds ^ S::DS_BYTES, dq);
    wgmma_wait<0>();
    wgmma_settle<S::PART / 8>(dq);
    wgmma_release(&control.ds_empty[walk.ds == 0]);
    wgmma_release(&control.k_empty[chain.before]);
    wgmma_put_dq<S>(walk, dq);
    wgmma_ring_advance(chain.keys);
    chain.before = -1;
}

/* The loop of consumer warpgroup `group`. */
template <class S>
GPU_DEVICE void wgmma_chain_consume(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                    int group)
{
    enum { N = S::WIDTH };
    wgmma_backward_control<S> &control = *b.control;
    const float unit = wgmma_unit<S>(g);
    wgmma_backward_walk<S> walk;
    wgmma_chain<S> chain = {0, 0, {0, 0}, {0, 0}, -1};
    const wgmma_backward_item *w;
    wgmma_walk_set<S>(g, b, group, walk);
    if (group == 1) {
        wgmma_pass_turn(group); /* warpgroup 0 begins */
    }
    while ((w = wgmma_item_await<S>(b, chain.number))) {
        float x[S::QUERIES / 8][4];
        chain.left = w->tiles;
        wgmma_walk_begin<S>(g.problem, *w, wgmma_item_slot<S>(chain.number), walk);
        if (chain.left > 0) {
            wgmma_chain_begin<S>(g, b, *w, walk, chain, x);
        } else {
            chain.number++;
        }
        do {
            float dk[N / 8][4], dv[N / 8][4];
            const int slot = walk.item;
            GPU_UNROLL
            for (int c = 0; c < N / 2; c++) {
                dk[c / 4][c % 4] = dv[c / 4][c % 4] = 0;
            }
            wgmma_settle<N / 8>(dk);
            wgmma_settle<N / 8>(dv);
            GPU_ROLLED
            for (bool last = chain.left == 0; !last;) {
                last = chain.left == 1;
                wgmma_chained_tile<S>(g, b, unit, walk, chain, x, dk, dv);
            }
            wgmma_settle<N / 8>(dk);
            wgmma_settle<N / 8>(dv);
            const bool hands_over = wgmma_hands_over<S>(g, control.item[slot], group);
            if (hands_over) {
                wgmma_hand_over<S>(g, b, control.item[slot], group, dk, dv);
            }
            if (chain.left == 0 && chain.before >= 0) {
                wgmma_chain_end<S>(b, walk, chain);
            }
            if (!hands_over) {
                wgmma_store_item<S>(g, b, control.item[slot], group, dk, dv);
            }
            __syncwarp();
            wgmma_release(&control.item_empty[slot]);
        } while (chain.left > 0);
    }
    wgmma_named_sync(WGMMA_DQ_ADDED + group, WGMMA_WITH_ADDER); /* matches the last arrival */
}

#endif
