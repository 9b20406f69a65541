/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on tensor cores, for 16-bit types: FlashAttention-2 (Dao 2023) with mma.sync.
 *
 * A block takes an item of the schedule, that is, a tile of rows of one key/value head and a part
 * of its keys. A warp owns 16 * M of the rows. Warps share only keys and values:
 *
 *     x = Q K^T             accumulator fragments; Q is read again for every tile
 *     p                     online softmax; a row is in the four lanes of a quad
 *     o = o alpha + p V     p rounded to the type of v
 *
 * The next tile of keys and values is copied while this one is used. Sums are relative to a
 * reference m, which need not be the largest score. It is raised only when a score exceeds it by
 * more than MMA_MARGIN; otherwise alpha is 1, and most tiles do not rescale o. Weights may then
 * reach 2^MMA_MARGIN, which costs no precision in floating point. But the largest weight is no
 * longer exactly 1, and has a rounding error: see mma_rounding().
 *
 * Lean kernels have causal masks, windows, lengths and pages. The others have every feature, or the
 * one that mma_shape names (mma_terms.cuh, which also has the layout of a tile).
 */
#ifndef FATTN_CUDA_MMA_FORWARD_CUH
#define FATTN_CUDA_MMA_FORWARD_CUH

#include "backends/cuda/mma_scan.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* A thread's rows: rows g and g + 8 of each 16. */
template <class S> struct mma_rows {
    fattn_softmax state[S::TILES][2]; /* l: over the thread's own columns */
    float top[S::TILES][2];           /* the largest score in these */
    float o[S::TILES][S::WIDTH / 8][4];
};

/* --- Copies ----------------------------------------------------------------------------------- */

/* Begins to fill a chunk with the first `bytes` of it from a row, and zeros. (A copy of no bytes
 * does not use its address.) Only kernels for every feature get `misaligned` rows, which do not
 * begin at multiples of 16 bytes. These are copied synchronously, an element at a time. */
template <class S>
GPU_DEVICE void mma_fill(uint32_t to, const uint16_t *from, int bytes, bool misaligned)
{
    if (S::VARIANT != MMA_EVERYTHING || !misaligned) {
        mma_copy(to, from, bytes);
    } else {
        mma_copy_misaligned(to, from, bytes);
    }
}

template <class S>
GPU_DEVICE void mma_copy_queries(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const fattn_strides &stride = g.problem.q;
    const int c = gpu_thread() % CHUNKS, r0 = gpu_thread() / CHUNKS;
    const int bytes = mma_chunk_bytes(c, (int)g.problem.dim);
    const uint32_t tile = mma_shared(s.q);
    const uint16_t *const q = (const uint16_t *)g.buffers.q + 8 * c;
    const bool misaligned = !(g.chunks & FATTN_GPU_QUADS_Q);
    if (w.group == 1 && w.rows == S::ROWS && (S::VARIANT != MMA_EVERYTHING || !misaligned)) {
        const uint16_t *row = q + mma_row_at(w, stride, r0);
        GPU_UNROLL
        for (int r = r0; r < r0 + S::ROWS; r += STEP, row += STEP * stride.seq) {
            mma_copy(mma_place<S::WIDTH>(tile, r, c), row, bytes);
        }
    } else {
        GPU_ROLLED
        for (int r = r0; r < S::ROWS; r += STEP) {
            mma_fill<S>(mma_place<S::WIDTH>(tile, r, c), q + mma_row_at(w, stride, r),
                        r < w.rows ? bytes : 0, misaligned);
        }
    }
}

/* Begins to copy this thread's chunk of each row of the tile that begins with key j0. Of these keys
 * `live` exist; the others get zeros. */
template <class S>
GPU_DEVICE void mma_copy_keys(uint32_t to, const uint16_t *keys, int j0, int64_t stride, int dim,
                              int live, bool misaligned)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    static_assert(S::OWN % STEP == 0 || STEP % S::OWN == 0, "a step turns all alike");
    const int c = gpu_thread() % CHUNKS, r0 = gpu_thread() / CHUNKS;
    const int bytes = mma_chunk_bytes(c, dim);
    const uint16_t *row = keys + (j0 + r0) * stride + 8 * c;
    const uint32_t at = mma_key_place<S>(to, r0, c);
    if (live >= S::KEYS && (S::VARIANT != MMA_EVERYTHING || !misaligned)) {
        GPU_UNROLL
        for (int r = 0; r < S::KEYS; r += STEP, row += STEP * stride) {
            mma_copy((at ^ r / S::OWN << 5) + 2 * S::WIDTH * r, row, bytes);
        }
    } else {
        GPU_ROLLED
        for (int r = 0; r < S::KEYS; r += STEP, row += STEP * stride) {
            mma_fill<S>((at ^ r / S::OWN << 5) + 2 * S::WIDTH * r, row, r0 + r < live ? bytes : 0,
                        misaligned);
        }
    }
}

/* The same for paged keys. */
template <class S>
GPU_DEVICE void mma_copy_pages(const fattn_gpu_args &g, const mma_item &w, uint16_t *tile,
                               const void *from, const fattn_strides &stride, int64_t dim, int j0,
                               bool misaligned)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread() % CHUNKS, bytes = mma_chunk_bytes(c, (int)dim);
    GPU_ROLLED
    for (int r = gpu_thread() / CHUNKS; r < S::KEYS; r += STEP) {
        const bool exists = j0 + r < w.keys;
        const int64_t at = exists ? gpu_key_at(g, w.pairs.seq, stride, w.pairs.b, w.hk, j0 + r) : 0;
        mma_fill<S>(mma_key_place<S>(mma_shared(tile), r, c), (const uint16_t *)from + at + 8 * c,
                    exists ? bytes : 0, misaligned);
    }
}

/* Begin to copy tile `block` of keys, and of values. */
template <class S>
GPU_DEVICE void mma_copy_k(const fattn_gpu_args &g, const mma_item &w, uint16_t *tile, int block)
{
    const fattn_problem &p = g.problem;
    const int j0 = block * S::KEYS;
    const bool misaligned = !(g.chunks & FATTN_GPU_QUADS_K);
    if (p.features & FATTN_PAGED) {
        mma_copy_pages<S>(g, w, tile, g.buffers.k, p.k, p.dim, j0, misaligned);
    } else {
        mma_copy_keys<S>(mma_shared(tile), (const uint16_t *)w.k, j0, p.k.seq, (int)p.dim,
                         w.keys - j0, misaligned);
    }
}

template <class S>
GPU_DEVICE void mma_copy_v(const fattn_gpu_args &g, const mma_item &w, uint16_t *tile, int block)
{
    const fattn_problem &p = g.problem;
    const int j0 = block * S::KEYS;
    const bool misaligned = !(g.chunks & FATTN_GPU_QUADS_V);
    if (p.features & FATTN_PAGED) {
        mma_copy_pages<S>(g, w, tile, g.buffers.v, p.v, p.dim_v, j0, misaligned);
    } else {
        mma_copy_keys<S>(mma_shared(tile), (const uint16_t *)w.v, j0, p.v.seq, (int)p.dim_v,
                         w.keys - j0, misaligned);
    }
}

/* --- A tile ----------------------------------------------------------------------------------- */

/* The largest score of each row among the thread's own. */
template <class S>
GPU_DEVICE void mma_largest(const float x[S::TILES][S::KEYS / 8][4], float largest[S::TILES][2])
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            float even = x[m][0][2 * h], odd = x[m][0][2 * h + 1];
            GPU_UNROLL
            for (int n = 1; n < S::KEYS / 8; n++) {
                even = gpu_max(even, x[m][n][2 * h]);
                odd = gpu_max(odd, x[m][n][2 * h + 1]);
            }
            largest[m][h] = gpu_max(even, odd);
        }
    }
}

/* Whether some row of the warp may have a score that exceeds its reference by more than the margin.
 * largest: upper bounds of the scores. */
template <class S>
GPU_DEVICE bool mma_may_raise(float unit, const float largest[S::TILES][2], const mma_rows<S> &rows)
{
    bool raises = false;
    GPU_UNROLL
    for (int n = 0; n < 2 * S::TILES; n++) {
        raises =
            raises || largest[n / 2][n % 2] * unit > rows.state[n / 2][n % 2].m * unit + MMA_MARGIN;
    }
    return __any_sync(0xffffffffu, raises);
}

/* Updates rows.top with the largest scores of a tile, raises the references that these exceed by
 * more than the margin, and rescales the sums. */
template <class S>
GPU_DEVICE void mma_raise(float unit, const float largest[S::TILES][2], mma_rows<S> &rows)
{
    GPU_UNROLL
    for (int n = 0; n < 2 * S::TILES; n++) {
        float *const top = &rows.top[n / 2][n % 2];
        *top = gpu_max(*top, largest[n / 2][n % 2]);
    }
    if (!mma_may_raise<S>(unit, largest, rows)) {
        return;
    }
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            fattn_softmax *const state = &rows.state[m][h];
            const float top = mma_quad_max(largest[m][h]); /* the same in all threads of the row */
            const bool raises = top * unit > state->m * unit + MMA_MARGIN;
            const float alpha = fattn_softmax_raise(state, raises ? top : state->m, unit);
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH / 4; n++) {
                rows.o[m][n / 2][2 * h + n % 2] *= alpha;
            }
        }
    }
}

/* Turns scores in x into weights relative to the row's reference, and adds them to l. */
template <class S>
GPU_DEVICE void mma_weigh(float unit, mma_rows<S> &rows, float x[S::TILES][S::KEYS / 8][4])
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const float base = fattn_softmax_base(rows.state[m][h]);
            float even = 0, odd = 0;
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 8; n++) {
                float *const weight = x[m][n] + 2 * h;
                weight[0] = S::type::weight(weight[0], unit, base);
                weight[1] = S::type::weight(weight[1], unit, base);
                even += weight[0];
                odd += weight[1];
            }
            fattn_softmax_add(&rows.state[m][h], even + odd);
        }
    }
}

/* Turns dot products in x, of the tile that begins with key j0, into weights, and adds them to the
 * rows' sums. partial: some pairs are outside the band. next: the tile after it. */
template <class S>
GPU_DEVICE void mma_weights(const fattn_gpu_args &g, mma_scratch<S> &s, float unit, bool partial,
                            int j0, int next, int past, mma_rows<S> &rows,
                            float x[S::TILES][S::KEYS / 8][4])
{
    float largest[S::TILES][2];
    if constexpr (mma_is_lean(S::VARIANT)) {
        mma_score<S>(g, s, partial, j0, x);
    } else {
        mma_terms<S>(g, s, j0, x, largest);
        mma_prefetch_bias<S>(g, s, next, past);
        if (partial) {
            mma_apply_band<S>(s, j0, x);
        }
    }
    /* Batch-invariant rows note their largest score even if no row of the warp may raise its
     * reference. */
    if (S::KNOWN != FATTN_SOFTCAP || g.problem.features & FATTN_BATCH_INVARIANT ||
        mma_may_raise<S>(unit, largest, rows)) {
        mma_largest<S>(x, largest);
        if (S::KNOWN == FATTN_BIAS && (fattn_dtype)S::type::DTYPE == FATTN_BF16) {
            mma_bounded<S>(x, largest);
        }
        mma_raise<S>(unit, largest, rows);
    }
    mma_weigh<S>(unit, rows, x);
    if constexpr (!mma_is_lean(S::VARIANT)) {
        mma_stage<S>(g, s, next, past);
    }
    if (mma_has<S>(g, FATTN_DROPOUT)) {
        mma_drop<S>(g, s, j0, x);
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Sets up the terms of all rows. */
template <class S>
GPU_DEVICE void mma_begin(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w)
{
    for (int r = gpu_thread(); r < S::ROWS; r += S::THREADS) {
        mma_begin_row<S>(g, s, mma_query(w, r), r);
    }
}

/* Sets the rows to their state before the first key. */
template <class S> GPU_DEVICE void mma_rows_empty(mma_rows<S> &rows)
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            rows.state[m][h] = fattn_softmax_empty();
            rows.top[m][h] = rows.state[m][h].m;
        }
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH / 2; n++) {
            rows.o[m][n / 4][n % 4] = 0;
        }
    }
}

/* The first tile from `block` on that the block mask does not hide, or w.past. */
template <class S> GPU_DEVICE int mma_next(const fattn_gpu_args &g, const mma_item &w, int block)
{
    if (mma_has<S>(g, FATTN_BLOCK_MASK)) {
        for (; block < w.past; block++) {
            const int64_t j0 = (int64_t)block * S::KEYS, padded = j0 + S::KEYS;
            if (gpu_tile_kind(g, w.pairs, w.i0, w.i1, w.hk * w.group, w.group, j0,
                              fattn_min64(padded, w.keys), padded) != FATTN_TILE_EMPTY) {
                break;
            }
        }
    }
    return block;
}

/* The first tile from `block` on that neither the block mask nor the bias or mask hides. */
template <class S>
GPU_DEVICE int mma_next_kept(const fattn_gpu_args &g, const mma_scratch<S> &s, int block)
{
    const mma_item &w = s.item;
    if constexpr (!mma_may_hide<S>()) {
        return mma_next<S>(g, w, block);
    }
    int next = block;
    do {
        block = s.scan ? scan_next_kept(s.kept, next, w.past) : next;
        next = mma_next<S>(g, w, block);
    } while (next != block);
    return next;
}

/* The end of the tiles of the item's part, from `block` on, without the last ones that a bias of
 * -inf hides from all of its rows. All threads of the block must call it. */
template <class S>
GPU_DEVICE int mma_visible_past(const fattn_gpu_args &g, const mma_item &w, int block)
{
    if (block >= w.past) {
        return w.past;
    }
    const int64_t past =
        gpu_visible_past(g, w.pairs, w.i0, w.i1, w.hk * w.group, w.group, block * (int64_t)S::KEYS,
                         fattn_min64((int64_t)w.past * S::KEYS, w.keys));
    return (int)((past + S::KEYS - 1) / S::KEYS);
}

/* Sets up the terms of an item's rows and of its first tile, `block`, which is being copied.
 * Returns the end of its tiles. */
template <class S>
GPU_DEVICE int mma_begin_terms(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w,
                               int block)
{
    int past = w.past;
    if constexpr (!mma_is_lean(S::VARIANT)) {
        if (mma_may_hide<S>() && s.scan) {
            mma_find_kept<S>(s);
        }
        mma_begin(g, s, w);
        if (mma_has<S>(g, FATTN_BIAS) && !(mma_may_hide<S>() && s.scan)) {
            past = mma_visible_past<S>(g, s.item, block + 1);
        }
        mma_stage<S>(g, s, block, past);
    }
    return past;
}

/* Visits the tiles of keys of the item's part. */
template <class S>
GPU_DEVICE void mma_walk(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w,
                         mma_rows<S> &rows)
{
    const float unit = g.rule.unit;
    int block = mma_next<S>(g, w, w.block);
    if (block < w.past) {
        mma_copy_k<S>(g, w, s.k[0], block);
        if (S::RING == 2) {
            mma_copy_v<S>(g, w, s.v[0], block);
        }
    }
    mma_commit();
    const int past = mma_begin_terms<S>(g, s, w, block);
    mma_rows_empty(rows);
    if (block >= past) {
        mma_wait<0>();
        gpu_sync(); /* o is staged where the queries are still being copied to */
    }
    for (int stage = 0; block < past; stage ^= S::RING - 1) {
        const int j0 = block * S::KEYS;
        mma_wait<0>();
        gpu_sync(); /* all threads' copies have landed, and all have read the other tile */
        const bool partial = block < s.item.full || block >= s.item.full_past;
        if (S::RING == 1) {
            mma_copy_v<S>(g, s.item, s.v[0], block);
            mma_commit();
        }
        block = mma_next_kept<S>(g, s, block + 1);
        if (S::RING == 2 && block < past) {
            mma_copy_k<S>(g, s.item, s.k[stage ^ 1], block);
            mma_copy_v<S>(g, s.item, s.v[stage ^ 1], block);
            mma_commit();
        }
        float x[S::TILES][S::KEYS / 8][4] = {};
        mma_dots<typename S::type, S::WIDTH, S::TILES, S::KEYS / 16, S::WIDTH / 16, S::NEXT>(
            mma_rows_a<S::WIDTH>(s.q, mma_warp() * S::TILES * 16), mma_key_rows<S>(s.k[stage]), x);
        mma_weights<S>(g, s, unit, partial, j0, block, past, rows, x);
        if (S::RING == 1) {
            mma_wait<0>();
            gpu_sync(); /* the values have landed, and all threads have read the keys */
            if (block < past) {
                mma_copy_k<S>(g, s.item, s.k[0], block);
                mma_commit();
            }
        }
        mma_mix<typename S::type, S::WIDTH, S::TILES, S::WIDTH / 16, S::KEYS / 16, S::NEXT>(
            x, mma_key_columns<S>(s.v[stage]), rows.o);
    }
}

/* Two elements of o. That of a cache in e4m3 has the type of the queries. */
template <class S> GPU_DEVICE uint32_t mma_pack_o(const fattn_gpu_args &g, float lo, float hi)
{
    if constexpr (sizeof(typename S::type::element) == 1) {
        return g.problem.dtype_o == FATTN_BF16 ? mma_bf16::pack(lo, hi) : mma_f16::pack(lo, hi);
    } else {
        return S::type::pack(lo, hi);
    }
}

/* Stores rows of o in the input's type. They are staged where the warp's own queries were, so that
 * whole lines are written. */
template <class S>
GPU_DEVICE void mma_store_lines(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_rows<S> &rows)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = GPU_WAVE / CHUNKS, BATCH = 4 };
    const int lane = mma_lane(), top = mma_warp() * S::TILES * 16, dim = (int)g.problem.dim_v;
    __syncwarp();
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int n = 0; n < 2 * CHUNKS; n++) {
            const int r = mma_row<S>(m, n % 2);
            const float *const pair = rows.o[m][n / 2] + 2 * (n % 2);
            *(uint32_t *)(s.q + r * S::WIDTH + (n / 2 ^ (r & 7)) * 8 + lane % 4 * 2) =
                mma_pack_o<S>(g, pair[0], pair[1]);
        }
    }
    __syncwarp();
    const mma_item w = s.item; /* a copy: for the compiler, the stores might alias it */
    const int c = lane % CHUNKS, live = dim - 8 * c;
    uint16_t *const o = (uint16_t *)g.buffers.o + 8 * c;
    const bool whole = g.chunks & FATTN_GPU_QUADS_O && live >= 8;
    GPU_ROLLED
    for (int n = 0; n < S::TILES * 16; n += BATCH * STEP) {
        gpu_u4 eight[BATCH];
        const int r0 = top + n + lane / CHUNKS;
        GPU_UNROLL
        for (int k = 0; k < BATCH; k++) {
            const int r = r0 + k * STEP;
            eight[k] = *(const gpu_u4 *)(s.q + r * S::WIDTH + (c ^ (r & 7)) * 8);
        }
        GPU_UNROLL
        for (int k = 0; k < BATCH; k++) {
            const int r = r0 + k * STEP;
            uint16_t *const to = o + mma_row_at(w, g.problem.o, r);
            if (r < w.rows) {
                gpu_store_eight(to, eight[k], live, whole);
            }
        }
    }
}

/* Stores rows of o, or of a part, in floats. */
template <class S>
GPU_DEVICE void mma_store_floats(const fattn_gpu_args &g, const mma_scratch<S> &s,
                                 const mma_rows<S> &rows)
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int r = mma_row<S>(m, h);
            float *to = (float *)g.buffers.o + mma_row_at(s.item, g.problem.o, r);
            if (!s.item.whole) {
                const gpu_part part = gpu_part_of(g, s.item.number, r);
                to = (float *)part.o.data + part.at;
            }
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH / 4; n++) {
                const int c = n / 2 * 8 + mma_lane() % 4 * 2 + n % 2;
                if (r < s.item.rows && c < g.problem.dim_v) {
                    to[c] = rows.o[m][n / 2][2 * h + n % 2];
                }
            }
        }
    }
}

/* Stores lse of the rows, or m and l of their parts. All four threads of a row have these; one of
 * them writes. */
template <class S>
GPU_DEVICE void mma_store_states(const fattn_gpu_args &g, const mma_scratch<S> &s,
                                 const mma_rows<S> &rows)
{
    const int mine = mma_lane() % 4, r = mma_row<S>(mine / 2, mine % 2);
    fattn_softmax state = rows.state[0][0];
    GPU_UNROLL
    for (int n = 1; n < 2 * S::TILES; n++) {
        state.m = mine == n ? rows.state[n / 2][n % 2].m : state.m;
        state.l = mine == n ? rows.state[n / 2][n % 2].l : state.l;
    }
    if (mine >= 2 * S::TILES || r >= s.item.rows) {
        return;
    }
    if (!s.item.whole) {
        const gpu_part part = gpu_part_of(g, s.item.number, r);
        *part.m = state.m;
        *part.l = state.l;
    } else {
        gpu_store_lse(g, s.item.pairs.seq, s.item.pairs.b, mma_query(s.item, r), state);
    }
}

/* Adds the sink to the first part, and returns the factor by which to multiply its sums. The sink
 * comes last: as the reference of the row it might make all other weights underflow. */
GPU_DEVICE float mma_add_sink(const fattn_gpu_args &g, const mma_item &w, gpu_query q,
                              fattn_softmax *state)
{
    float alpha, beta;
    if (!(g.problem.features & FATTN_SINK) || w.split != 0 || q.h < 0) {
        return 1;
    }
    const fattn_softmax sink = fattn_softmax_sink(((const float *)g.buffers.sink)[q.h]);
    fattn_softmax_merge(state, sink, g.rule.unit, &alpha, &beta);
    return alpha;
}

/* Selects 0 for o of empty rows, whose sums may be 0 * inf. */
template <class S> GPU_DEVICE void mma_rows_clear(mma_rows<S> &rows)
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH / 2; n++) {
            float *const o = &rows.o[m][n / 4][n % 4];
            *o = rows.state[m][n % 4 / 2].l == 0 ? 0 : *o;
        }
    }
}

/* Writes the rows to o and lse, or their parts to the workspace. v: what sums of values are
 * multiplied by. */
template <class S>
GPU_DEVICE void mma_end(const fattn_gpu_args &g, mma_scratch<S> &s, mma_rows<S> &rows, float v = 1)
{
    const bool whole = s.item.whole;
    bool empty = false;
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            fattn_softmax *const state = &rows.state[m][h];
            const float lower = 1.0f / (1 << S::type::LIFT);
            const float base = fattn_softmax_base(*state);
            const float weight = S::type::weight(rows.top[m][h], g.rule.unit, base);
            const float added = mma_rounding<S>(g, weight) * lower;
            state->l = mma_quad_sum(state->l) * lower;
            float factor = lower * v, alpha = 1; /* not multiplied: alpha may be tiny */
            if (!mma_is_lean(S::VARIANT)) {
                factor *= s.item.z_kept;
                alpha = mma_add_sink(g, s.item, mma_query(s.item, mma_row<S>(m, h)), state);
            }
            const float share =
                mma_reciprocal(fmaf(added, alpha, state->l)); /* l is 0, or about 1 */
            factor *= whole ? share : mma_part_factor(state->l, share, added);
            empty = empty || (whole && state->l == 0); /* a part keeps 0 * NaN for its row */
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH / 4; n++) {
                float *const o = &rows.o[m][n / 2][2 * h + n % 2];
                *o = *o * factor * alpha;
            }
        }
    }
    if (__any_sync(0xffffffffu, empty)) {
        mma_rows_clear<S>(rows);
    }
    mma_store_states<S>(g, s, rows);
    if (!whole || g.problem.dtype_o == FATTN_F32) {
        if (!whole || g.problem.outputs & FATTN_OUT_O) {
            mma_store_floats<S>(g, s, rows);
        }
    } else if (g.problem.outputs & FATTN_OUT_O) {
        if constexpr (S::type::PLANES == 1) { /* o of f32 is f32 */
            mma_store_lines<S>(g, s, rows);
        }
    }
}

/* Sets item `number`: its rows, its part, and the features that all its pairs share. */
template <class S>
GPU_DEVICE void mma_item_rows(const fattn_gpu_args &g, int64_t number, mma_item &w)
{
    const fattn_problem &p = g.problem;
    const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, number);
    w.number = number;
    w.pairs.b = work.batch;
    w.pairs.seq = gpu_sequence(g, work.batch);
    w.pairs.band = fattn_band_of(&p, &w.pairs.seq);
    w.z_kept = 1;
    if (mma_has<S>(g, FATTN_DROPOUT)) {
        w.pairs.dropout = gpu_dropout(g);
        w.z_kept = gpu_dropout_take(w.pairs.dropout);
    }
    w.bias_rows = mma_has<S>(g, FATTN_BIAS) &&
                  mma_are_rows(g.buffers.bias, p.bias_stride, p.dtype_bias == FATTN_F32 ? 4 : 2);
    w.mask_rows = mma_has<S>(g, FATTN_MASK) && mma_are_rows(g.buffers.mask, p.mask_stride, 1);
    const int64_t first = gpu_item_set(g, work, S::ROWS, S::KEYS, w);
    w.offset = (int)(first - w.i0 * w.group);
    if (S::KNOWN == FATTN_BIAS || S::KNOWN == FATTN_MASK) {
        const bool bias = S::KNOWN == FATTN_BIAS;
        const int64_t *const stride = bias ? p.bias_stride : p.mask_stride;
        const int64_t at = w.pairs.b * stride[0] + w.hk * w.group * stride[1] + w.i0 * stride[2];
        w.staged = bias ? (const void *)((const uint16_t *)g.buffers.bias + at)
                        : (const void *)(g.buffers.mask + at);
    }
}

/* Sets the addresses of its keys and values. Pages are looked up when they are copied. */
template <class S> GPU_DEVICE void mma_item_places(const fattn_gpu_args &g, mma_item &w)
{
    typedef typename S::type::element element;
    const fattn_problem &p = g.problem;
    if (!(p.features & FATTN_PAGED)) {
        w.k = (const element *)g.buffers.k + gpu_key_at(g, w.pairs.seq, p.k, w.pairs.b, w.hk, 0);
        w.v = (const element *)g.buffers.v + gpu_key_at(g, w.pairs.seq, p.v, w.pairs.b, w.hk, 0);
    }
}

/* Sets its keys: the band of its first query, and the tiles that are full. */
template <class S> GPU_DEVICE void mma_item_keys(const fattn_gpu_args &g, mma_item &w)
{
    const int64_t at = w.i0 + w.pairs.band.diagonal, limit = INT64_C(1) << 62;
    const int64_t left = w.pairs.band.left, right = w.pairs.band.right;
    w.keys = (int)w.pairs.seq.sk;
    w.first_key = left < 0 ? MMA_LEFTMOST
                           : (int)gpu_clamp(at - fattn_min64(left, limit), MMA_LEFTMOST, w.keys);
    w.past_key = right < 0
                     ? w.keys
                     : (int)gpu_clamp(at + fattn_min64(right, limit) + 1, MMA_LEFTMOST, w.keys);
    const int last = (int)(w.i1 - 1 - w.i0);
    const mma_range top = mma_band_row(w, 0), bottom = mma_band_row(w, last);
    w.full = (int)((bottom.first + (S::KEYS - 1u)) / S::KEYS);
    w.full_past = top.past / S::KEYS;
    mma_item_places<S>(g, w);
}

template <class S>
GPU_DEVICE void mma_item_set(const fattn_gpu_args &g, int64_t number, mma_item &w)
{
    mma_item_rows<S>(g, number, w);
    mma_item_keys<S>(g, w);
}

/* Processes an item. Every thread computes the item's description itself, to begin copies as early
 * as possible. walk visits the tiles of keys, and returns what mma_end() multiplies by. */
template <class S, class Walk>
GPU_DEVICE void mma_forward_item(const fattn_gpu_args &g, mma_scratch<S> &s, int64_t number,
                                 const Walk &walk)
{
    mma_item w;
    mma_item_rows<S>(g, number, w);
    gpu_sync();        /* the item before may still be read */
    if (w.rows == 0) { /* as most items of a batch of unlike lengths */
        if (gpu_thread() == 0) {
            s.item.number = number;
        }
        gpu_sync();
        return;
    }
    mma_copy_queries<S>(g, s, w);
    mma_item_keys<S>(g, w);
    if (gpu_thread() == 0) {
        s.item = w;
        if (mma_may_hide<S>()) {
            s.scan = mma_scan_of<S>(g, w);
        }
    }
    if (!mma_is_lean(S::VARIANT)) {
        gpu_sync(); /* the item */
    }
    mma_rows<S> rows;
    const float v = walk(w, rows);
    mma_end(g, s, rows, v);
}

template <class S, class Walk>
GPU_DEVICE void mma_forward_items(const fattn_gpu_args &g, mma_scratch<S> &s, const Walk &walk)
{
    for (int64_t n = gpu_block(); n < g.tiling.items; n = s.item.number + gpu_blocks()) {
        mma_forward_item<S>(g, s, n, walk);
    }
}

template <class S> GPU_DEVICE void mma_forward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_scratch<S>) <=
                      MMA_SHARED(S::KNOWN, S::WIDTH, S::ROWS, S::KEYS, S::RING),
                  "too small");
    extern __shared__ char shared[];
    mma_scratch<S> &s = *(mma_scratch<S> *)shared;
    mma_forward_items<S>(g, s, [&](const mma_item &w, mma_rows<S> &rows) {
        mma_walk(g, s, w, rows);
        return 1.0f;
    });
}

#endif
