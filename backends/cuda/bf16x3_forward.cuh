/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on tensor cores for f32. It uses rows, scores, softmax and epilogue of mma_forward.cuh,
 * with elements as sums of three bf16 numbers (mma_bf16x3.cuh). The threads that load keys and
 * values split them, once a tile, before they store them to shared memory. There is one tile of
 * each, and each is loaded while the product with the other runs:
 *
 *     load values          x = Q K^T        split values        barrier
 *     load next keys       o += p V         split next keys     barrier
 */
#ifndef FATTN_CUDA_BF16X3_FORWARD_CUH
#define FATTN_CUDA_BF16X3_FORWARD_CUH

#include "backends/cuda/mma_bf16x3.cuh"
#include "backends/cuda/mma_forward.cuh"

template <class S> struct mma_tiles<S, 3> {
    alignas(128) uint16_t q[3][S::ROWS * S::WIDTH];
    uint16_t k[3][S::KEYS * S::WIDTH], v[3][S::KEYS * S::WIDTH];
    int32_t inexact[S::ROWS]; /* whether the row's q is inexact */
};

/* The first tile from `block` on of which some pair is kept, or `past`. */
GPU_DEVICE int bf16x3_kept_from(const uint8_t *bytes, int block, int past)
{
    const uint64_t before = (UINT64_C(1) << 8 * (block % 8)) - 1;
    uint64_t kept = 0;
    if (block < past) {
        kept = scan_kept(scan_eight(bytes, block / 8), block / 8, past) & ~before;
    }
    GPU_ROLLED
    for (int n = block / 8 + 1; !kept && 8 * n < past; n++) {
        block = 8 * n;
        kept = scan_kept(scan_eight(bytes, n), n, past);
    }
    return kept ? block / 8 * 8 + (__ffsll((int64_t)kept) - 1) / 8 : past;
}

/* The first tile from `block` on to compute; if there is none, `past` or a later number. */
template <class S> GPU_DEVICE int bf16x3_next(const mma_scratch<S> &s, int block, int past)
{
    const bool skips = !mma_is_lean(S::VARIANT) && s.scan;
    return skips ? bf16x3_kept_from(s.scan, block, past) : block;
}

/* Whether, as the scan has found, all pairs of a tile have a bias of 0 or are kept by the mask. */
template <class S> GPU_DEVICE bool bf16x3_is_plain(const mma_scratch<S> &s, int block)
{
    return s.scan && !(s.scan[block] & SCAN_MIXED);
}

/* Splits and stores keys or values. Returns whether any is inexact. */
template <class S>
GPU_DEVICE bool bf16x3_put(uint16_t *tile,
                           const mma_bf16x3_part<S::THREADS, S::WIDTH, S::KEYS> &part)
{
    return part.put([tile](int r, int c) { return mma_key_place<S>(mma_shared(tile), r, c); });
}

/* Loads, splits and stores the queries. Returns whether any of the thread's rows is inexact. */
template <class S> GPU_DEVICE bool bf16x3_queries(const fattn_gpu_args &g, mma_scratch<S> &s)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread() % CHUNKS;
    const int channels = (int)gpu_clamp(g.problem.dim - 8 * c, 0, 8);
    const float *const q = (const float *)g.buffers.q + 8 * c;
    bool any = false;
    for (int r = gpu_thread() / CHUNKS; r < S::ROWS; r += STEP) {
        const mma_eight eight =
            mma_fetch_eight(q + mma_row_at(s.item, g.problem.q, r), r < s.item.rows ? channels : 0);
        const uint32_t to = mma_place<S::WIDTH>(mma_shared(s.q[0]), r, c);
        if (mma_put_eight(to, 2 * S::ROWS * S::WIDTH, eight) & 0xffffu) {
            s.inexact[r] = 1;
            any = true;
        }
    }
    return any;
}

/* --- By plain multiply-adds ------------------------------------------------------------------- */

/* The dot products of all rows, or only of inexact ones, with the `live` keys from k on. */
template <class S>
GPU_DEVICE void bf16x3_dots_by_fma(const fattn_gpu_args &g, const mma_scratch<S> &s, bool all,
                                   const float *k, int live, float x[S::TILES][S::KEYS / 8][4])
{
    const float *q[S::TILES][2];
    GPU_UNROLL
    for (int n = 0; n < 2 * S::TILES; n++) {
        const int m = n / 2, h = n % 2, r = mma_row<S>(m, h);
        const bool mine = r < s.item.rows && (all || s.inexact[r]);
        q[m][h] = mine ? (const float *)g.buffers.q + mma_row_at(s.item, g.problem.q, r) : NULL;
        GPU_UNROLL
        for (int e = 0; e < S::KEYS / 4; e++) {
            float *const score = &x[m][e / 2][2 * h + e % 2];
            *score = mine ? 0 : *score;
        }
    }
    const int own = mma_own<S>();
    mma_plain_dots<S::TILES, S::KEYS / 16>(
        q, k, g.problem.k.seq, live, g.problem.dim, [own](int e) { return own + e; }, x);
}

/* o += p V for the `live` values from v on. The warp's weights are staged in its part of the tile
 * of values, which is not used then. */
template <class S>
GPU_DEVICE void bf16x3_add_pv_by_fma(const fattn_gpu_args &g, mma_scratch<S> &s, const float *v,
                                     int live, const float x[S::TILES][S::KEYS / 8][4],
                                     mma_rows<S> &rows)
{
    enum { SLOT = 16 * S::KEYS };
    static_assert(S::THREADS / 32 * SLOT * sizeof(float) <= sizeof s.v, "too small");
    const int column = mma_lane() % 4 * 2, own = mma_own<S>();
    float *const slot = (float *)s.v[0] + mma_warp() * SLOT;
    float *const row = slot + mma_lane() / 4 * S::KEYS;
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        __syncwarp();
        GPU_UNROLL
        for (int e = 0; e < S::KEYS / 2; e++) {
            row[e / 2 % 2 * 8 * S::KEYS + own + e / 4 * 2 + e % 2] = x[m][e / 4][e % 4];
        }
        __syncwarp();
        mma_plain_times<1, S::WIDTH / 16>(row, S::KEYS, 1, live < S::KEYS ? live : S::KEYS,
                                          v + column, g.problem.v.seq,
                                          (int)g.problem.dim_v - column, rows.o + m);
    }
}

/* --- Scores ----------------------------------------------------------------------------------- */

/* mma_terms() for the features that the rows of bf16x3.c have. plain: the bias, or else the mask,
 * changes nothing and is not read. Scores have the same bits as if the bias of 0 were added. */
template <class S>
GPU_DEVICE void bf16x3_terms(const fattn_gpu_args &g, const mma_scratch<S> &s, bool plain, int j0,
                             float x[S::TILES][S::KEYS / 8][4])
{
    const uint64_t features = g.problem.features;
    const bool bias = features & FATTN_BIAS, alibi = features & FATTN_ALIBI;
    const float factor = g.rule.terms & FATTN_SCORE_SCALE ? g.rule.scale : 1;
    if (bias && !plain) {
        mma_bias_any<S>(g, s, j0, factor, x);
    } else if ((bias || !alibi) && factor != 1) {
        mma_each_row<S>([&](int m, int h) {
            mma_each<S>(m, h, x, [&](float &score, int) { score *= factor; });
        });
    }
    if (alibi) {
        mma_alibi<S>(s, j0, bias ? 1 : factor, x);
    }
    if (features & FATTN_MASK && (bias || !plain)) {
        mma_mask_any<S>(g, s, j0, x);
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Visits the tiles of keys of the item's part. */
template <class S>
GPU_DEVICE void bf16x3_walk(const fattn_gpu_args &g, mma_scratch<S> &s, mma_rows<S> &rows)
{
    enum { Q_BYTES = 2 * S::ROWS * S::WIDTH, K_BYTES = 2 * S::KEYS * S::WIDTH };
    const fattn_problem &p = g.problem;
    const float unit = g.rule.unit;
    const float *const k = (const float *)s.item.k, *const v = (const float *)s.item.v;
    const int keys = s.item.keys;
    int past = s.item.past;
    mma_bf16x3_part<S::THREADS, S::WIDTH, S::KEYS> part;
    int block = bf16x3_next<S>(s, s.item.block, past);

    for (int r = gpu_thread(); r < S::ROWS; r += S::THREADS) {
        s.inexact[r] = 0;
    }
    gpu_sync();
    mma_rows_empty(rows);
    if (block >= past) {
        return;
    }
    part.fetch(k + (int64_t)block * S::KEYS * p.k.seq, p.k.seq, p.dim, keys - block * S::KEYS);
    if constexpr (!mma_is_lean(S::VARIANT)) {
        mma_begin(g, s, s.item);
        if (mma_has<S>(g, FATTN_BIAS) && !s.scan) {
            past = mma_visible_past<S>(g, s.item, block + 1);
        }
    }
    const bool inexact_q = gpu_any(bf16x3_queries<S>(g, s));
    bool inexact = bf16x3_put<S>(s.k[0], part);
    for (int next; block < past; block = next) {
        const int j0 = block * S::KEYS, live = keys - j0;
        const float *const tile_k = k + j0 * p.k.seq, *const tile_v = v + j0 * p.v.seq;
        const bool inexact_k =
            gpu_any(inexact); /* a barrier: keys are stored, and all have read the values */
        part.fetch(tile_v, p.v.seq, p.dim_v, live);
        float x[S::TILES][S::KEYS / 8][4] = {}, largest[S::TILES][2];
        mma_bf16x3_dots<S::WIDTH, S::TILES, S::KEYS / 16, S::WIDTH / 16, S::NEXT>(
            mma_rows_a<S::WIDTH>(s.q[0], mma_warp() * S::TILES * 16), Q_BYTES,
            mma_key_rows<S>(s.k[0]), K_BYTES, x);
        if (inexact_q || inexact_k) {
            bf16x3_dots_by_fma<S>(g, s, inexact_k, tile_k, live, x);
        }
        inexact = bf16x3_put<S>(s.v[0], part);
        const bool partial = block < s.item.full || block >= s.item.full_past;
        if constexpr (mma_is_lean(S::VARIANT)) {
            mma_score<S>(g, s, partial, j0, x);
        } else {
            bf16x3_terms<S>(g, s, bf16x3_is_plain<S>(s, block), j0, x);
            if (partial) {
                mma_apply_band<S>(s, j0, x);
            }
        }
        mma_largest<S>(x, largest);
        mma_raise<S>(unit, largest, rows);
        mma_weigh<S>(unit, rows, x);
        if (mma_has<S>(g, FATTN_DROPOUT)) {
            mma_drop<S>(g, s, j0, x);
        }
        const bool inexact_v =
            gpu_any(inexact); /* a barrier: values are stored, and all have read the keys */
        next = bf16x3_next<S>(s, block + 1, past);
        if (next < past) {
            const int ahead = (next - block) * S::KEYS;
            part.fetch(tile_k + ahead * p.k.seq, p.k.seq, p.dim, live - ahead);
            if (!mma_is_lean(S::VARIANT) && !bf16x3_is_plain<S>(s, next)) {
                mma_prefetch_bias<S>(g, s, next, past);
            }
        }
        if (inexact_v) {
            bf16x3_add_pv_by_fma<S>(g, s, tile_v, live, x, rows);
        } else {
            mma_bf16x3_mix<S::WIDTH, S::TILES, S::WIDTH / 16, S::KEYS / 16, S::NEXT>(
                x, mma_key_columns<S>(s.v[0]), K_BYTES, rows.o);
        }
        inexact = next < past && bf16x3_put<S>(s.k[0], part);
    }
}

template <class S>
GPU_DEVICE void bf16x3_forward_item(const fattn_gpu_args &g, mma_scratch<S> &s, int64_t item)
{
    gpu_sync(); /* the item before may still be read */
    if (gpu_thread() == 0) {
        mma_item_set<S>(g, item, s.item);
        if (!mma_is_lean(S::VARIANT)) {
            s.scan = mma_scan_of<S>(g, s.item);
        }
    }
    gpu_sync();
    if (s.item.rows > 0) {
        mma_rows<S> rows;
        bf16x3_walk(g, s, rows);
        mma_end(g, s, rows);
    }
}

template <class S> GPU_DEVICE void bf16x3_forward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_scratch<S>) <= BF16X3_SHARED(S::KNOWN, S::WIDTH, S::ROWS, S::KEYS),
                  "too small");
    extern __shared__ char shared[];
    mma_scratch<S> &s = *(mma_scratch<S> *)shared;
    if (!mma_is_lean(S::VARIANT)) {
        gpu_await_earlier(); /* launched early */
    }
    for (int64_t item = gpu_block(); item < g.tiling.items; item += gpu_blocks()) {
        bf16x3_forward_item<S>(g, s, item);
    }
}

#endif
