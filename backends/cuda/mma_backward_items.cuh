/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The items of backward on tensor cores, each a tile of keys: in whose turn ordered ones add to dQ,
 * what an item is, and how a block comes from one to the next.
 */
#ifndef FATTN_CUDA_MMA_BACKWARD_ITEMS_CUH
#define FATTN_CUDA_MMA_BACKWARD_ITEMS_CUH

#include "backends/cuda/mma_backward_tile.cuh"
#include "core/schedule.h"

/* --- Turns ------------------------------------------------------------------------------------
 *
 * Ordered blocks add to the dQ of a tile of queries from the last tile of keys that it sees to the
 * first, each when the one before has. Items are taken from a counter, tiles of keys of a head in
 * that same order: whom a block waits for took its item earlier, so it runs or is through, and
 * waits for nobody later. From the last tile of keys on nobody has to wait in causal runs: blocks
 * come to a tile one after the other anyhow.
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

/* How many blocks have added to a tile, by one thread, of ordered runs; believed after a fence. */
template <class S>
GPU_DEVICE int32_t mma_turn_peek(const fattn_gpu_args &g, const mma_job &job, int head, int tile)
{
    int32_t added = -1;
    if (mma_is_ordered<S>(g) && gpu_thread_anew() == 0) {
        added = mma_peek(mma_turn_of<S>(g, job, head, tile));
    }
    return added;
}

/* Gives up the turn of the tile before, to which the block has added: all threads have passed a
 * barrier since. One thread does it. */
GPU_DEVICE void mma_turn_pass(mma_job &job)
{
    mma_fence();
    if (job.turn) {
        mma_poke(job.turn, job.passed);
        job.turn = NULL;
    }
}

/* The same, and waits for the turn of a tile of queries; added: of mma_turn_peek(). Tiles of keys
 * add to it from the last that sees it to the first: the block is due when as many have added as
 * lie behind its own. (The tile's last query, there or not, is what mma_job_set() goes by.) */
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

/* The key/value head of all batches, and the tile of keys, that item `number` is of. Heads of plain
 * kernels take turns as in forward, first tiles first: under a causal mask these are heavy. */
template <class S>
GPU_DEVICE int64_t mma_job_head(const fattn_gpu_args &g, int64_t number, int64_t *block)
{
    const fattn_problem &p = g.problem;
    const int64_t blocks = g.tiling.k_blocks, head = fattn_quotient(number, blocks);
    if (S::VARIANT == MMA_LEAN) {
        const int64_t group = fattn_quotient(p.heads_q, p.heads_k);
        fattn_tiling order;
        order.q_blocks = blocks;
        order.splits = 1;
        order.heads = p.batch * p.heads_k;
        order.together = fattn_max64(fattn_quotient(g.tiling.together, group), 1);
        const fattn_work work = fattn_schedule_item(&order, p.heads_k, number);
        *block = blocks - 1 - work.block;
        return work.batch * p.heads_k + work.head;
    }
    const int64_t at = number - head * blocks;
    *block = mma_is_ordered<S>(g) ? blocks - 1 - at : at; /* the last one first */
    return head;
}

template <class S>
GPU_DEVICE void mma_job_set(const fattn_gpu_args &g, int64_t number, mma_job &job)
{
    const fattn_problem &p = g.problem;
    const int64_t head = mma_job_head<S>(g, number, &job.block);
    const int64_t b = fattn_quotient(head, p.heads_k);
    job.pairs = gpu_pairs_of(g, b);
    const fattn_sequence &seq = job.pairs.seq;
    const fattn_band &band = job.pairs.band;
    job.hk = head - b * p.heads_k;
    job.group = fattn_quotient(p.heads_q, p.heads_k);
    job.j0 = job.block * S::KEYS;
    job.turn = NULL;
    job.keys = (int)gpu_clamp(seq.sk - job.j0, 0, INT32_MAX);

    const int64_t j1 = job.j0 + S::KEYS, h0 = job.hk * job.group, limit = INT64_C(1) << 62;
    const fattn_range rows = gpu_queries_of(job.pairs, job.j0, fattn_min64(j1, seq.sk));
    job.first = (int)(rows.first / S::QUERIES);
    job.past = job.keys > 0 ? (int)((rows.past + S::QUERIES - 1) / S::QUERIES) : 0;
    /* The first query that sees key j1 - 1, and the last that sees key j0. */
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

GPU_DEVICE int64_t mma_items(const fattn_gpu_args &g)
{
    return g.problem.batch * g.problem.heads_k * g.tiling.k_blocks;
}

/* The next item, after `number`. */
template <class S> GPU_DEVICE int64_t mma_take(const fattn_gpu_args &g, int64_t number)
{
    return mma_is_ordered<S>(g) ? (int64_t)atomicAdd(gpu_workspace_of<S::WIDTH>(g).taken, 1ull)
                                : number + gpu_blocks();
}

/* --- From item to item ------------------------------------------------------------------------
 *
 * Lean kernels have as many blocks as there are multiprocessors, which take items from a counter.
 * What an item is was written to the workspace by the kernel before: finding it takes a thread some
 * ten thousand cycles. In the last tile of an item a block learns what the next one is, and as soon
 * as nobody reads keys, values and the other tile of queries any more, begins to copy.
 */

/* The number of an item that nobody has begun; each block begins with its own number. */
template <class S> GPU_DEVICE int32_t mma_next_take(const fattn_gpu_args &g)
{
    return (int32_t)(gpu_blocks() + (int64_t)atomicAdd(gpu_workspace_of<S::WIDTH>(g).taken, 1ull));
}

template <class S> GPU_DEVICE mma_job *mma_jobs(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_job) == MMA_JOB_BYTES, "what is set aside for it");
    return (mma_job *)gpu_workspace_of<S::WIDTH>(g).turns; /* which such a run does not have */
}

/* Writes down what the items of a run are, each by a thread; nobody has begun any. */
template <class S> GPU_DEVICE void mma_write_jobs(const fattn_gpu_args &g)
{
    gpu_clear_taken<S::WIDTH>(g);
    if (g.problem.features & FATTN_DETERMINISTIC) {
        return;
    }
    mma_job *const jobs = mma_jobs<S>(g);
    const int64_t step = gpu_blocks() * gpu_threads();
    for (int64_t n = gpu_block() * gpu_threads() + gpu_thread(); n < mma_items(g); n += step) {
        memset(jobs + n, 0, sizeof jobs[n]); /* copied whole, with what such a run leaves open */
        mma_job_set<S>(g, n, jobs[n]);
    }
}

/* Begins to copy item s.number to s.next; without tiles where there is none. */
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

/* Waits until s.next is here and nobody reads keys and values, and begins to copy what it starts
 * with. */
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

/* All of this at once, for the first item and after those without tiles. */
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
