/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The items of backward on tensor cores, each of which is a tile of keys: the turns in which
 * deterministic runs add to dQ, the description of an item, and how a block goes from one to the
 * next.
 */
#ifndef FATTN_CUDA_MMA_BACKWARD_ITEMS_CUH
#define FATTN_CUDA_MMA_BACKWARD_ITEMS_CUH

#include "backends/cuda/mma_backward_tile.cuh"
#include "core/schedule.h"

/* --- Turns ------------------------------------------------------------------------------------
 *
 * In a deterministic run, blocks add to the dQ of a tile of queries in a fixed order: from the last
 * tile of keys that it attends to to the first, each after the one before. There is no deadlock.
 * Items are taken from a counter, the tiles of keys of a head in that same order. So a block only
 * waits for blocks that took their items earlier; these are running or have finished, and they in
 * turn never wait for a later one. The order starts with the last tile of keys because in causal
 * runs blocks then reach a tile one after another anyway, and do not wait.
 */

template <class S> GPU_DEVICE bool mma_is_ordered(const fattn_gpu_args &g)
{
    return (S::VARIANT == MMA_ORDERED || S::VARIANT == MMA_EVERYTHING) &&
           g.problem.features & FATTN_DETERMINISTIC;
}

template <class S>
GPU_DEVICE int32_t *mma_turn_of(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    const fattn_problem &p = g.problem;
    const int64_t h = job.pairs.b * p.heads_q + job.hk * job.group + head;
    return gpu_workspace_of<S::WIDTH>(g).turns + h * g.tiling.q_blocks + tile;
}

/* How many blocks have added to a tile, in thread 0 of a deterministic run; -1 elsewhere. The load
 * is relaxed: a fence must follow before dQ is touched. */
template <class S>
GPU_DEVICE int32_t mma_turn_peek(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    int32_t added = -1;
    if (mma_is_ordered<S>(g) && gpu_thread_anew() == 0) {
        added = mma_peek(mma_turn_of<S>(g, job, head, tile));
    }
    return added;
}

/* Passes on the turn of the tile before. All threads have added to it and then passed a barrier.
 * Called by one thread. */
GPU_DEVICE void mma_turn_pass(mma_job &job)
{
    mma_fence();
    if (job.turn) {
        mma_poke(job.turn, job.passed);
        job.turn = NULL;
    }
}

/* Passes on the turn of the tile before, and waits for that of a tile of queries. added: from
 * mma_turn_peek(). The block's turn has come when as many blocks have added as there are tiles of
 * keys after its own that the tile attends to. (These are computed for the tile's last query, even
 * if that does not exist, as in mma_job_set().) */
template <class S>
GPU_DEVICE void mma_turn_take(const fattn_gpu_args &g, mma_job &job, int head, int tile,
                              int32_t added)
{
    if (!mma_is_ordered<S>(g) || gpu_thread_anew() != 0) {
        return;
    }
    const int64_t last = (int64_t)(tile + 1) * S::QUERIES - 1;
    const fattn_range keys = fattn_band_row(&job.pairs.band, last);
    const int32_t due = (int32_t)((keys.past - 1) / S::KEYS - job.block);
    int32_t *const turn = mma_turn_of<S>(g, job, head, tile);
    mma_turn_pass(job);
    if (added != due) {
        while (mma_peek(turn) != due) {}
        mma_fence();
    }
    job.turn = turn;
    job.passed = due + 1;
}

/* --- Items ------------------------------------------------------------------------------------ */

/* Which tile of keys an item is. */
typedef struct mma_tile_of_keys {
    int64_t b, hk, block;
} mma_tile_of_keys;

/* The tile of item `number`, unless the batch is packed. First tiles come first, since they have
 * the most work under a causal mask; in deterministic runs the last one comes first. In MMA_LEAN
 * kernels the items of heads are interleaved as in forward. */
template <class S>
GPU_DEVICE mma_tile_of_keys mma_padded_tile_of(const fattn_gpu_args &g, int64_t number)
{
    const fattn_problem &p = g.problem;
    const int64_t blocks = g.tiling.k_blocks;
    mma_tile_of_keys tile;
    if (S::VARIANT == MMA_LEAN) {
        const int64_t group = fattn_quotient(p.heads_q, p.heads_k);
        fattn_tiling order;
        order.q_blocks = blocks;
        order.splits = 1;
        order.heads = p.batch * p.heads_k;
        order.together = fattn_max64(fattn_quotient(g.tiling.together, group), 1);
        const fattn_work work = fattn_schedule_item(&order, p.heads_k, number);
        tile.b = work.batch;
        tile.hk = work.head;
        tile.block = blocks - 1 - work.block;
        return tile;
    }
    const int64_t head = fattn_quotient(number, blocks), at = number - head * blocks;
    tile.b = fattn_quotient(head, p.heads_k);
    tile.hk = head - tile.b * p.heads_k;
    tile.block = mma_is_ordered<S>(g) ? blocks - 1 - at : at;
    return tile;
}

/* The same in a packed batch, where heads are not interleaved. No run is deterministic here. */
template <class S>
GPU_DEVICE mma_tile_of_keys mma_packed_tile_of(const fattn_gpu_args &g, int64_t number)
{
    const fattn_problem &p = g.problem;
    const int64_t head = fattn_quotient(number, g.key_tiles), at = number - head * g.key_tiles;
    const gpu_packed_tile of =
        gpu_packed_tile_of(g.buffers.cu_seqlens_k, p.batch, p.total_k, S::KEYS, at);
    mma_tile_of_keys tile;
    tile.b = of.b;
    tile.hk = head;
    tile.block = fattn_min64(of.block, g.tiling.k_blocks); /* that one does not exist */
    return tile;
}

template <class S> GPU_DEVICE mma_tile_of_keys mma_tile_of(const fattn_gpu_args &g, int64_t number)
{
    return fattn_gpu_packs_keys(&g.problem, &g.tiling) ? mma_packed_tile_of<S>(g, number)
                                                       : mma_padded_tile_of<S>(g, number);
}

template <class S>
GPU_DEVICE void mma_job_set(const fattn_gpu_args &g, const mma_tile_of_keys &tile, mma_job &job)
{
    const fattn_problem &p = g.problem;
    const int64_t b = tile.b;
    job.pairs = gpu_pairs_of(g, b);
    const fattn_sequence &seq = job.pairs.seq;
    const fattn_band &band = job.pairs.band;
    job.hk = tile.hk;
    job.block = tile.block;
    job.group = fattn_quotient(p.heads_q, p.heads_k);
    job.j0 = job.block * S::KEYS;
    job.turn = NULL;
    job.keys = (int)gpu_clamp(seq.sk - job.j0, 0, INT32_MAX);

    const int64_t j1 = job.j0 + S::KEYS, h0 = job.hk * job.group, limit = INT64_C(1) << 62;
    const fattn_range rows = gpu_queries_of(job.pairs, job.j0, fattn_min64(j1, seq.sk));
    job.first = (int)(rows.first / S::QUERIES);
    job.past = job.keys > 0 ? (int)((rows.past + S::QUERIES - 1) / S::QUERIES) : 0;
    /* The first query that attends to key j1 - 1, and the last that attends to key j0. */
    const int64_t low =
        band.right < 0 ? 0 : j1 - 1 - band.diagonal - fattn_min64(band.right, limit);
    const int64_t high =
        band.left < 0 ? limit : job.j0 - band.diagonal + fattn_min64(band.left, limit);
    job.full =
        j1 > seq.sk ? INT32_MAX : (int)gpu_clamp((low + S::QUERIES - 1) / S::QUERIES, 0, INT32_MAX);
    job.full_past =
        high >= seq.sq - 1 ? INT32_MAX : (int)gpu_clamp((high + 1) / S::QUERIES, 0, INT32_MAX);

    typedef typename S::type::element element;
    job.k = (const element *)g.buffers.k + gpu_key_at(g, seq, p.k, b, job.hk, job.j0);
    job.v = (const element *)g.buffers.v + gpu_key_at(g, seq, p.v, b, job.hk, job.j0);
    job.q = (const element *)g.buffers.q + gpu_query_at(seq, p.q, 0, h0);
    job.dout = (const element *)g.buffers.dout + gpu_query_at(seq, p.dout, 0, h0);
    job.at = gpu_lse_at(p, seq, b, h0);
    if (!mma_is_lean(S::VARIANT)) {
        job.staging = p.features & (FATTN_BIAS | FATTN_MASK) ? mma_staging(g) : 0;
        job.dbias = p.outputs & FATTN_OUT_DBIAS ? mma_dbias_mode(g) : 0;
    }
}

GPU_DEVICE int64_t mma_items(const fattn_gpu_args &g) { return g.problem.heads_k * g.key_tiles; }

/* The number of the block's next item after `number`. */
template <class S> GPU_DEVICE int64_t mma_take(const fattn_gpu_args &g, int64_t number)
{
    return mma_is_ordered<S>(g) ? (int64_t)atomicAdd(gpu_workspace_of<S::WIDTH>(g).taken, 1ull)
                                : number + gpu_blocks();
}

/* --- From item to item ------------------------------------------------------------------------
 *
 * Lean kernels have as many blocks as there are multiprocessors, which take items from a counter.
 * The kernel before them has written the descriptions of the items to the workspace, because
 * computing one takes a thread some ten thousand cycles. During the last tile of an item, a block
 * reads the description of its next item. It begins to copy that item's tiles as soon as no thread
 * reads keys, values and the other tile of queries any more.
 */

/* Takes the number of the next item. The first item of each block is its own number. */
template <class S> GPU_DEVICE int32_t mma_next_take(const fattn_gpu_args &g)
{
    return (int32_t)(gpu_blocks() + (int64_t)atomicAdd(gpu_workspace_of<S::WIDTH>(g).taken, 1ull));
}

template <class S> GPU_DEVICE mma_job *mma_jobs(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_job) == MMA_JOB_BYTES, "what is set aside for it");
    return (mma_job *)gpu_workspace_of<S::WIDTH>(g).turns; /* such a run has no turns */
}

/* Writes the descriptions of all items, one per thread, and clears the counter. tile_of(n): the
 * tile of item n. */
template <class S, class TileOf>
GPU_DEVICE void mma_write_jobs_of(const fattn_gpu_args &g, const TileOf &tile_of)
{
    gpu_clear_taken<S::WIDTH>(g);
    if (g.problem.features & FATTN_DETERMINISTIC) {
        return;
    }
    mma_job *const jobs = mma_jobs<S>(g);
    const int64_t step = gpu_blocks() * gpu_threads();
    for (int64_t n = gpu_block() * gpu_threads() + gpu_thread(); n < mma_items(g); n += step) {
        memset(jobs + n, 0, sizeof jobs[n]); /* it is copied whole, with fields that are not set */
        mma_job_set<S>(g, tile_of(n), jobs[n]);
    }
}

/* That of a batch whose queries are not packed, and of one whose queries are. */
template <class S> GPU_DEVICE void mma_write_jobs(const fattn_gpu_args &g)
{
    mma_write_jobs_of<S>(g, [&](int64_t n) { return mma_padded_tile_of<S>(g, n); });
}

template <class S> GPU_DEVICE void mma_write_packed_jobs(const fattn_gpu_args &g)
{
    mma_write_jobs_of<S>(g, [&](int64_t n) { return mma_tile_of<S>(g, n); });
}

/* Begins to copy the description of item s.number to s.next. If there is no such item, s.next gets
 * no tiles. */
template <class S>
GPU_DEVICE void mma_next_read(const fattn_gpu_args &g, mma_backward_scratch<S> &s)
{
    enum { WORDS = sizeof(mma_job) / 4 };
    static_assert(sizeof(mma_job) % 4 == 0 && WORDS <= S::THREADS, "a thread copies a word");
    const int n = gpu_thread_anew();
    if (n < WORDS && s.number < mma_items(g)) {
        mma_copy_word(mma_shared(&s.next) + 4 * n,
                      (const uint32_t *)(mma_jobs<S>(g) + s.number) + n, true);
    } else if (n == 0) {
        s.next.first = s.next.past = 0;
    }
    mma_commit();
}

/* Waits until s.next has landed and no thread reads keys and values, and begins to copy its keys,
 * its values and its first tile of queries. */
template <class S>
GPU_DEVICE void mma_next_begin(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int stage)
{
    const fattn_problem &p = g.problem;
    const mma_job &next = s.next;
    mma_wait<0>();
    gpu_sync();
    if (next.first < next.past) {
        mma_copy_slowly<S, S::KEYS, false>(s.k, (const uint16_t *)next.k, p.k.seq, (int)p.dim,
                                           next.keys, false);
        mma_copy_slowly<S, S::KEYS, false>(s.v, (const uint16_t *)next.v, p.v.seq, (int)p.dim_v,
                                           next.keys, false);
        mma_copy_queries<S>(g, s, next, stage, 0, next.first);
    }
}

/* All of this in one go, for the first item and after items without tiles. */
template <class S>
GPU_DEVICE void mma_next_fetch(const fattn_gpu_args &g, mma_backward_scratch<S> &s, int64_t number,
                               int stage)
{
    if (gpu_thread_anew() == 0) {
        s.number = number;
    }
    gpu_sync();
    mma_next_read<S>(g, s);
    mma_next_begin<S>(g, s, stage);
}

#endif
