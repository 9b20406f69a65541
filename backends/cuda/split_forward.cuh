/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on tensor cores for f32: mma_forward.cuh, whose rows, scores, softmax and ends these are,
 * with elements as sums of three (mma_split.cuh). Keys and values are split once a tile, on their
 * way to shared memory, by the threads that read them; there is one tile of each, and each is read
 * while the product with the other runs:
 *
 *     read values          x = Q K^T        split values        barrier
 *     read next keys       o += p V         split next keys     barrier
 */
#ifndef FATTN_CUDA_SPLIT_FORWARD_CUH
#define FATTN_CUDA_SPLIT_FORWARD_CUH

#include "backends/cuda/mma_forward.cuh"
#include "backends/cuda/mma_split.cuh"

template <class S> struct mma_tiles<S, 3> {
    alignas(128) uint16_t q[3][S::ROWS * S::WIDTH];
    uint16_t k[3][S::KEYS * S::WIDTH], v[3][S::KEYS * S::WIDTH];
    int32_t odd[S::ROWS]; /* rows whose q three planes do not hold */
};

/* A thread's part of a tile of keys, or of values: chunk c of rows r, r + STEP ... */
template <class S> struct split_part {
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS, COUNT = S::KEYS / STEP };
    mma_eight eight[COUNT];
};

/* Reads it: `live` keys exist from `tile` on, of `dim` channels. */
template <class S>
GPU_DEVICE void split_fetch(split_part<S> &part, const float *tile, int64_t stride, int dim,
                            int live)
{
    typedef split_part<S> P;
    const int c = gpu_thread_anew() % P::CHUNKS, r0 = gpu_thread_anew() / P::CHUNKS;
    const int channels = (int)gpu_clamp(dim - 8 * c, 0, 8);
    const float *from = tile + r0 * stride + 8 * c;
    if (live >= S::KEYS && channels == 8) {
        GPU_UNROLL
        for (int n = 0; n < P::COUNT; n++, from += P::STEP * stride) {
            part.eight[n] = mma_fetch_eight(from, 8);
        }
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < P::COUNT; n++, from += P::STEP * stride) {
        part.eight[n] = mma_fetch_eight(from, r0 + n * P::STEP < live ? channels : 0);
    }
}

/* Puts it into its tile, split; as mma_split, whether something is lost. */
template <class S> GPU_DEVICE bool split_put(uint16_t *tile, const split_part<S> &part)
{
    typedef split_part<S> P;
    const int c = gpu_thread_anew() % P::CHUNKS, r0 = gpu_thread_anew() / P::CHUNKS;
    uint32_t lost = 0;
    GPU_UNROLL
    for (int n = 0; n < P::COUNT; n++) {
        lost |= mma_put_eight(mma_key_place<S>(mma_shared(tile), r0 + n * P::STEP, c),
                              2 * S::KEYS * S::WIDTH, part.eight[n]);
    }
    return lost & 0xffffu;
}

/* The queries; returns whether any row of the thread's is odd. */
template <class S> GPU_DEVICE bool split_queries(const fattn_gpu_args &g, mma_scratch<S> &s)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread() % CHUNKS;
    const int channels = (int)gpu_clamp(g.problem.dim - 8 * c, 0, 8);
    const float *const q = (const float *)g.buffers.q + 8 * c;
    bool any = false;
    for (int r = gpu_thread() / CHUNKS; r < S::ROWS; r += STEP) {
        const mma_eight eight = mma_fetch_eight(q + s.q_at[r], r < s.item.rows ? channels : 0);
        const uint32_t to = mma_place<S::WIDTH>(mma_shared(s.q[0]), r, c);
        if (mma_put_eight(to, 2 * S::ROWS * S::WIDTH, eight) & 0xffffu) {
            s.odd[r] = 1;
            any = true;
        }
    }
    return any;
}

/* --- By plain multiply-adds ------------------------------------------------------------------- */

/* Dot products of all rows, or of odd ones, with the `live` keys from k on. */
template <class S>
GPU_DEVICE void split_plain_dots(const fattn_gpu_args &g, const mma_scratch<S> &s, bool all,
                                 const float *k, int live, float x[S::TILES][S::KEYS / 8][4])
{
    const int64_t stride = g.problem.k.seq;
    const int first = mma_own<S>();
    const float *q[S::TILES][2];
    GPU_UNROLL
    for (int n = 0; n < 2 * S::TILES; n++) {
        const int m = n / 2, h = n % 2, r = mma_row<S>(m, h);
        const bool mine = r < s.item.rows && (all || s.odd[r]);
        q[m][h] = mine ? (const float *)g.buffers.q + s.q_at[r] : NULL;
        GPU_UNROLL
        for (int e = 0; e < S::KEYS / 4; e++) {
            float *const score = &x[m][e / 2][2 * h + e % 2];
            *score = mine ? 0 : *score;
        }
    }
    GPU_ROLLED
    for (int c = 0; c < g.problem.dim; c++) {
        float row[S::TILES][2];
        GPU_UNROLL
        for (int n = 0; n < 2 * S::TILES; n++) {
            row[n / 2][n % 2] = q[n / 2][n % 2] ? q[n / 2][n % 2][c] : 0;
        }
        GPU_UNROLL
        for (int e = 0; e < S::KEYS / 4; e++) {
            const int j = first + e;
            const float key = j < live ? k[j * stride + c] : 0;
            GPU_UNROLL
            for (int n = 0; n < 2 * S::TILES; n++) {
                float *const score = &x[n / 2][e / 2][2 * (n % 2) + e % 2];
                *score = q[n / 2][n % 2] ? fmaf(row[n / 2][n % 2], key, *score) : *score;
            }
        }
    }
}

/* o += p V for the `live` values from v on. Weights of a warp pass through its part of the tile of
 * values, which nobody reads. */
template <class S>
GPU_DEVICE void split_plain_mix(const fattn_gpu_args &g, mma_scratch<S> &s, const float *v,
                                int live, const float x[S::TILES][S::KEYS / 8][4],
                                mma_rows<S> &rows)
{
    enum { SLOT = 16 * S::KEYS };
    static_assert(S::THREADS / 32 * SLOT * sizeof(float) <= sizeof s.v, "too small");
    float *const slot = (float *)s.v[0] + mma_warp() * SLOT;
    const int top = mma_lane() / 4, column = mma_lane() % 4 * 2, dim = (int)g.problem.dim_v;
    const int own = mma_own<S>();
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        __syncwarp();
        GPU_UNROLL
        for (int e = 0; e < S::KEYS / 2; e++) {
            const int key = own + e / 4 * 2 + e % 2;
            slot[(top + e / 2 % 2 * 8) * S::KEYS + key] = x[m][e / 4][e % 4];
        }
        __syncwarp();
        GPU_ROLLED
        for (int j = 0; j < S::KEYS && j < live; j++) {
            const float *const row = v + j * g.problem.v.seq;
            GPU_UNROLL
            for (int e = 0; e < S::WIDTH / 4; e++) {
                const int c = e / 2 * 8 + column + e % 2;
                const float value = c < dim ? row[c] : 0;
                float *const o = rows.o[m][e / 2] + e % 2;
                o[0] = fmaf(slot[top * S::KEYS + j], value, o[0]);
                o[2] = fmaf(slot[(top + 8) * S::KEYS + j], value, o[2]);
            }
        }
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Meets the keys of the item's part. */
template <class S>
GPU_DEVICE void split_walk(const fattn_gpu_args &g, mma_scratch<S> &s, mma_rows<S> &rows)
{
    enum { Q_BYTES = 2 * S::ROWS * S::WIDTH, K_BYTES = 2 * S::KEYS * S::WIDTH };
    const fattn_problem &p = g.problem;
    const float unit = g.rule.unit;
    const float *const k = (const float *)s.item.k, *const v = (const float *)s.item.v;
    const int past = s.item.past, keys = s.item.keys;
    split_part<S> part;
    int block = s.item.block;

    for (int r = gpu_thread(); r < S::ROWS; r += S::THREADS) {
        s.odd[r] = 0;
    }
    mma_begin(g, s, s.item);
    mma_rows_empty(rows);
    if (block >= past) {
        return;
    }
    split_fetch<S>(part, k + (int64_t)block * S::KEYS * p.k.seq, p.k.seq, (int)p.dim,
                   keys - block * S::KEYS);
    const bool odd_q = gpu_any(split_queries<S>(g, s));
    bool odd = split_put<S>(s.k[0], part);
    for (; block < past; block++) {
        const int j0 = block * S::KEYS, live = keys - j0;
        const float *const tile_k = k + j0 * p.k.seq, *const tile_v = v + j0 * p.v.seq;
        const bool odd_k = gpu_any(odd); /* keys are here, and everyone is through with values */
        split_fetch<S>(part, tile_v, p.v.seq, (int)p.dim_v, live);
        float x[S::TILES][S::KEYS / 8][4] = {}, largest[S::TILES][2];
        mma_split_dots<S::WIDTH, S::TILES, S::KEYS / 16, S::WIDTH / 16, S::NEXT>(
            mma_rows_a<S::WIDTH>(s.q[0], mma_warp() * S::TILES * 16), Q_BYTES,
            mma_key_rows<S>(s.k[0]), K_BYTES, x);
        if (odd_q || odd_k) {
            split_plain_dots<S>(g, s, odd_k, tile_k, live, x);
        }
        odd = split_put<S>(s.v[0], part);
        mma_score<S>(g, s, block < s.item.full || block >= s.item.full_past, j0, x);
        mma_largest<S>(x, largest);
        mma_rise<S>(unit, largest, rows);
        mma_weigh<S>(unit, rows, x);
        const bool odd_v = gpu_any(odd); /* values are here, and everyone is through with keys */
        if (block + 1 < past) {
            split_fetch<S>(part, tile_k + S::KEYS * p.k.seq, p.k.seq, (int)p.dim, live - S::KEYS);
        }
        if (odd_v) {
            split_plain_mix<S>(g, s, tile_v, live, x, rows);
        } else {
            mma_split_mix<S::WIDTH, S::TILES, S::WIDTH / 16, S::KEYS / 16, S::NEXT>(
                x, mma_key_columns<S>(s.v[0]), K_BYTES, rows.o);
        }
        odd = block + 1 < past && split_put<S>(s.k[0], part);
    }
}

template <class S>
GPU_DEVICE void split_forward_item(const fattn_gpu_args &g, mma_scratch<S> &s, int64_t item)
{
    gpu_sync(); /* the item before may still be read */
    if (gpu_thread() == 0) {
        mma_item_set<S>(g, item, s.item);
    }
    gpu_sync();
    if (s.item.rows > 0) {
        mma_rows<S> rows;
        split_walk(g, s, rows);
        mma_end(g, s, rows, item);
    }
}

template <class S> GPU_DEVICE void split_forward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_scratch<S>) <= SPLIT_SHARED(S::WIDTH, S::ROWS, S::KEYS), "too small");
    extern __shared__ char shared[];
    mma_scratch<S> &s = *(mma_scratch<S> *)shared;
    for (int64_t item = gpu_block(); item < g.tiling.items; item += gpu_blocks()) {
        split_forward_item<S>(g, s, item);
    }
}

#endif
