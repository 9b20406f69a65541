/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on tensor cores for 16-bit queries, and k and v in e4m3 (mma_forward.cuh). A block widens
 * each tile once, for all of its warps:
 *
 *     copies     bring the stored bytes of the next tile to shared memory
 *     widening   turns those of this one to f16, in tiles of the layout that the products read
 *
 * A thread widens the chunks that it copied itself. So it waits for its own copies alone, and
 * copies to their places again without a barrier. One tile of 16-bit numbers and one of bytes take
 * less shared memory than two of 16 bits. A tile takes two barriers:
 *
 *     K is widened    after the barrier before which all have multiplied the last K
 *     first barrier   all have widened K, and multiplied the last V
 *     V is widened    and the next tile's copies begin
 *     x = Q K^T, p
 *     second barrier  all have widened V, and multiplied K
 *     o += p V
 *
 * Products are of f16, see mma_e4m3.cuh. Each row of x is multiplied by a factor: k_descale, and
 * what undoes the scaling of a row of bf16 queries.
 */
#ifndef FATTN_CUDA_MMA_WIDEN_CUH
#define FATTN_CUDA_MMA_WIDEN_CUH

#include "backends/cuda/mma_e4m3.cuh"
#include "backends/cuda/mma_forward.cuh"
#include "backends/cuda/mma_widen.h"

/* The parameters are those of mma_shape. */
template <int W, int M, int WARPS, int BN, uint64_t FEATURES>
struct mma_widen_shape : mma_shape<mma_e4m3, W, M, WARPS, BN, FEATURES, 1> {
    /* How threads copy: chunks of a stored row, rows from a thread's chunk to its next, and how
     * many chunks it has. */
    enum { CHUNKS = W / 16, STEP = 32 * WARPS / CHUNKS, COUNT = BN / STEP };
    static_assert(STEP == BN / 4,
                  "as mma_widen_to() has it: the rows of a quarter have one swizzle");
};

/* Shared memory. Of mma_scratch, k and v are stages: bytes as copies bring them (mma_widen.h). */
template <class S> struct mma_widen_scratch : mma_scratch<S> {
    alignas(128) uint16_t wide_k[S::KEYS * S::WIDTH], wide_v[S::KEYS * S::WIDTH];
    float factor[S::ROWS]; /* of each row's dot products */
};

/* --- Tiles ------------------------------------------------------------------------------------ */

/* Begins to copy the thread's chunks of tile `block` to stage, which is s.k[0] or s.v[0]. head: key
 * 0 of the head in tensor `all`, unless keys are paged. Keys that do not exist become zeros. */
template <class S>
GPU_DEVICE void mma_widen_copy(const fattn_gpu_args &g, const mma_item &w, uint8_t *stage,
                               const void *all, const void *head, const fattn_strides &stride,
                               int64_t dim, int block)
{
    const int t = gpu_thread_anew(), c = t % S::CHUNKS, r0 = t / S::CHUNKS, j0 = block * S::KEYS;
    const int bytes = mma_stored_bytes<S>(c, (int)dim);
    const uint32_t to = mma_shared(stage) + 16 * t;
    if (g.problem.features & FATTN_PAGED) {
        GPU_ROLLED
        for (int n = 0; n < S::COUNT; n++) {
            const int j = j0 + r0 + n * S::STEP;
            const bool exists = j < w.keys;
            const int64_t at = exists ? gpu_key_at(g, w.pairs.seq, stride, w.pairs.b, w.hk, j) : 0;
            mma_copy(to + 16 * S::THREADS * n, (const uint8_t *)all + at + 16 * c,
                     exists ? bytes : 0);
        }
        return;
    }
    const uint8_t *row = (const uint8_t *)head + (j0 + r0) * stride.seq + 16 * c;
    GPU_UNROLL
    for (int n = 0; n < S::COUNT; n++, row += S::STEP * stride.seq) {
        mma_copy(to + 16 * S::THREADS * n, row, j0 + r0 + n * S::STEP < w.keys ? bytes : 0);
    }
}

/* Begins to copy tile `block` of keys and values. */
template <class S>
GPU_DEVICE void mma_widen_next(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w,
                               int block)
{
    const fattn_problem &p = g.problem;
    mma_widen_copy<S>(g, w, s.k[0], g.buffers.k, w.k, p.k, p.dim, block);
    mma_widen_copy<S>(g, w, s.v[0], g.buffers.v, w.v, p.v, p.dim_v, block);
}

/* Widens the thread's chunks of stage to `tile`. */
template <class S> GPU_DEVICE void mma_widen_tile(const uint8_t *stage, uint16_t *tile)
{
    const int t = gpu_thread_anew();
    const uint32_t from = mma_shared(stage);
    uint32_t eight[2 * S::COUNT][2];
    GPU_UNROLL
    for (int n = 0; n < 2 * S::COUNT; n++) {
        mma_get<2>(from + mma_widen_from(S::WIDTH, S::THREADS, t, n / 2, n % 2), eight[n]);
    }
    GPU_UNROLL
    for (int n = 0; n < 2 * S::COUNT; n++) {
        uint32_t wide[4];
        mma_e4m3_widen<true>(eight[n][0], wide);
        mma_e4m3_widen<true>(eight[n][1], wide + 2);
        gpu_u4 *const to =
            (gpu_u4 *)((char *)tile + mma_widen_to(S::WIDTH, S::KEYS, t, n / 2, n % 2));
        *to = {wide[0], wide[1], wide[2], wide[3]};
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* The item's factor in k_descale or v_descale. */
GPU_DEVICE float mma_widen_descale(const fattn_gpu_args &g, const mma_item &w, const float *factors)
{
    const int64_t *const stride = g.problem.descale_stride;
    return g.problem.features & FATTN_DESCALE ? factors[w.pairs.b * stride[0] + w.hk * stride[1]]
                                              : 1;
}

/* Turns the queries to f16 once they have landed, and sets the factors of the rows. A warp does it
 * for its own rows; the walk's first barrier follows. */
template <class S>
GPU_DEVICE void mma_widen_queries(const fattn_gpu_args &g, mma_widen_scratch<S> &s)
{
    enum { SHARE = S::THREADS / S::ROWS };
    const int r = gpu_thread() / SHARE;
    const bool scales = g.problem.dtype == FATTN_BF16;
    if (scales) {
        mma_e4m3_queries<S>(s.q, s.factor);
    }
    if (gpu_thread() % SHARE == 0) { /* the thread that has set the row's factor */
        const float k = mma_widen_descale(g, s.item, (const float *)g.buffers.k_descale);
        s.factor[r] = scales ? s.factor[r] * k : k;
    }
}

/* Multiplies dot products by their rows' factors, if some run may have others than 1. */
template <class S>
GPU_DEVICE void mma_widen_scale(const fattn_gpu_args &g, const mma_widen_scratch<S> &s,
                                float x[S::TILES][S::KEYS / 8][4])
{
    if (g.problem.dtype == FATTN_BF16 || g.problem.features & FATTN_DESCALE) {
        mma_each_row<S>([&](int m, int h) {
            const float factor = s.factor[mma_row<S>(m, h)];
            mma_each<S>(m, h, x, [&](float &score, int) { score *= factor; });
        });
    }
}

/* Visits the tiles of keys of the item's part. */
template <class S>
GPU_DEVICE void mma_widen_walk(const fattn_gpu_args &g, mma_widen_scratch<S> &s, const mma_item &w,
                               mma_rows<S> &rows)
{
    int block = mma_next<S>(g, w, w.block);
    if (block < w.past) {
        mma_widen_next<S>(g, s, w, block);
    }
    mma_commit();
    const int past = mma_begin_terms<S>(g, s, w, block);
    mma_wait<0>();
    gpu_sync(); /* the queries have landed, and the item is visible */
    mma_widen_queries<S>(g, s);
    mma_rows_empty(rows);
    while (block < past) {
        const int j0 = block * S::KEYS;
        const bool partial = block < s.item.full || block >= s.item.full_past;
        mma_wait<0>();
        mma_widen_tile<S>(s.k[0], s.wide_k);
        gpu_sync(); /* all have widened the keys, and multiplied the values before */
        mma_widen_tile<S>(s.v[0], s.wide_v);
        block = mma_next_kept<S>(g, s, block + 1);
        if (block < past) {
            mma_widen_next<S>(g, s, s.item, block);
            mma_commit();
        }
        const int top = mma_warp() * S::TILES * 16;
        const bool has_rows = top < s.item.rows; /* the warp; or else it only widens */
        float x[S::TILES][S::KEYS / 8][4] = {};
        if (has_rows) {
            mma_dots<typename S::type, S::WIDTH, S::TILES, S::KEYS / 16, S::WIDTH / 16, S::NEXT>(
                mma_rows_a<S::WIDTH>(s.q, top), mma_key_rows<S>(s.wide_k), x);
            mma_widen_scale<S>(g, s, x);
            mma_weights<S>(g, s, g.rule.unit, partial, j0, block, past, rows, x);
        }
        gpu_sync(); /* all have widened the values, and multiplied the keys */
        if (has_rows) {
            mma_mix<typename S::type, S::WIDTH, S::TILES, S::WIDTH / 16, S::KEYS / 16, S::NEXT>(
                x, mma_key_columns<S>(s.wide_v), rows.o);
        }
    }
}

template <class S> GPU_DEVICE void mma_widen_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_widen_scratch<S>) <=
                      MMA_WIDEN_SHARED(S::KNOWN, S::WIDTH, S::ROWS, S::KEYS),
                  "too small");
    extern __shared__ char shared[];
    mma_widen_scratch<S> &s = *(mma_widen_scratch<S> *)shared;
    mma_forward_items<S>(g, s, [&](const mma_item &w, mma_rows<S> &rows) {
        mma_widen_walk<S>(g, s, w, rows);
        return mma_widen_descale(g, s.item, (const float *)g.buffers.v_descale);
    });
}

#endif
