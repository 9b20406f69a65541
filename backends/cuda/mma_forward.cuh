/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on tensor cores, for 16-bit types: FlashAttention-2 (Dao 2023) with mma.sync.
 *
 * A block takes a tile of rows of one key/value head (an item of the schedule) along a part of its
 * keys; a warp owns 16 * M of the rows, and nothing but keys and values is shared:
 *
 *     x = Q K^T             in fragments; Q is read again for every tile
 *     p                     online softmax; a row lies in the four lanes of a quad
 *     o = o alpha + p V     p rounded to the type of v
 *
 * The next tile of keys and values is copied while this one is worked on. alpha is 1 until a row's
 * maximum rises by more than MMA_RISE since it was last taken as a reference: weights may reach
 * 2^MMA_RISE, which costs nothing in floating point, and most tiles leave o alone. (The sums are
 * relative to a reference m; nothing needs it to be the largest score.)
 *
 * LEAN kernels know causal masks, windows, lengths and pages; the others every feature.
 */
#ifndef FATTN_CUDA_MMA_FORWARD_CUH
#define FATTN_CUDA_MMA_FORWARD_CUH

#include "backends/cuda/mma.h"
#include "backends/cuda/mma_sm80.cuh"
#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

#define MMA_RISE 8.0f

/* T: mma_f16 or mma_bf16. W: channels of q, k and v, padded. M: 16 rows each, of a warp. */
template <class T, int W, int M, int WARPS, int BN, bool LEAN> struct mma_shape {
    typedef T type;
    enum {
        WIDTH = W,
        TILES = M,
        ROWS = 16 * M * WARPS,
        THREADS = 32 * WARPS,
        KEYS = BN,
        IS_LEAN = LEAN
    };
};

/* The item that a block works on. Keys and tiles of keys are below 2^31. */
typedef struct mma_item {
    gpu_pairs pairs;
    int64_t hk, group;
    int64_t first, i0, i1; /* rows of the group; queries i0 .. i1 - 1 */
    int rows, split;
    float kept;          /* Z of a pair that dropout keeps; pairs.dropout says 1 */
    int keys;            /* of the sequence */
    int block, past;     /* tiles of keys that the part has */
    int full, full_past; /* those whose pairs are all inside the band */
    const void *k, *v;   /* key 0, where keys are not in pages */
} mma_item;

/* Tiles, aligned to eight rows of 16 bytes. */
template <class S, int PLANES = S::type::PLANES> struct mma_tiles {
    alignas(128) uint16_t q[S::ROWS * S::WIDTH]; /* in the end o */
    uint16_t k[2][S::KEYS * S::WIDTH], v[2][S::KEYS * S::WIDTH];
};

/* Shared memory. The item is here because accumulators leave no registers for it. */
template <class S> struct mma_scratch : mma_tiles<S> {
    mma_item item;
    gpu_query query[S::ROWS];
    int64_t q_at[S::ROWS], o_at[S::ROWS];  /* where they begin; 0 for rows that do not exist */
    int32_t first[S::ROWS], past[S::ROWS]; /* the keys that a row's band holds */
};

/* What a warp's thread knows of its rows: rows g and g + 8 of each 16. */
template <class S> struct mma_rows {
    fattn_softmax state[S::TILES][2]; /* l: of the thread's own columns */
    float o[S::TILES][S::WIDTH / 8][4];
};

/* Row of the tile that the thread's half `h` of m-tile `m` is. */
template <class S> GPU_DEVICE int mma_row(int m, int h)
{
    return (mma_warp() * S::TILES + m) * 16 + mma_lane() / 4 + 8 * h;
}

/* --- Copies ----------------------------------------------------------------------------------- */

/* Begins to fill a chunk with the first `bytes` from a row, and zeros. (A copy of no bytes does not
 * look at its address.) Lean kernels are given rows that begin at multiples of 16 bytes; `odd` ones
 * are read an element at a time, at once. */
template <class S> GPU_DEVICE void mma_fill(uint32_t to, const uint16_t *from, int bytes, bool odd)
{
    if (S::IS_LEAN || !odd) {
        mma_copy(to, from, bytes);
        return;
    }
    uint32_t pair[4] = {0, 0, 0, 0};
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        if (2 * e < bytes) {
            pair[e / 2] |= (uint32_t)from[e] << 16 * (e % 2);
        }
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pair[0]), "r"(pair[1]),
                 "r"(pair[2]), "r"(pair[3])
                 : "memory");
}

template <class S> GPU_DEVICE void mma_copy_queries(const fattn_gpu_args &g, mma_scratch<S> &s)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread() % CHUNKS;
    const int bytes = mma_chunk_bytes(c, (int)g.problem.dim);
    const uint16_t *const q = (const uint16_t *)g.buffers.q + 8 * c;
    const bool odd = !(g.chunks & FATTN_GPU_QUADS_Q);
    GPU_UNROLL
    for (int n = 0; n < S::ROWS / STEP; n++) {
        const int r = gpu_thread() / CHUNKS + n * STEP;
        mma_fill<S>(mma_place<S::WIDTH>(mma_shared(s.q), r, c), q + s.q_at[r],
                    r < s.item.rows ? bytes : 0, odd);
    }
}

/* Keys of a tile from `row` on, this thread's chunk of them, and zeros past the first `live`. */
template <class S>
GPU_DEVICE void mma_copy_keys(uint32_t to, const uint16_t *row, int64_t stride, int bytes, int live,
                              bool odd)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread() % CHUNKS, r0 = gpu_thread() / CHUNKS;
    if (live >= S::KEYS) {
        GPU_UNROLL
        for (int r = 0; r < S::KEYS; r += STEP, row += STEP * stride) {
            mma_fill<S>(mma_place<S::WIDTH>(to, r0 + r, c), row, bytes, odd);
        }
    } else {
        for (int r = r0; r < S::KEYS; r += STEP, row += STEP * stride) {
            mma_fill<S>(mma_place<S::WIDTH>(to, r, c), row, r < live ? bytes : 0, odd);
        }
    }
}

/* The same from pages. */
template <class S>
GPU_DEVICE void mma_copy_pages(const fattn_gpu_args &g, const mma_item &w, uint16_t *tile,
                               const void *from, const fattn_strides &stride, int64_t dim, int j0,
                               bool odd)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    const int c = gpu_thread() % CHUNKS, bytes = mma_chunk_bytes(c, (int)dim);
    for (int r = gpu_thread() / CHUNKS; r < S::KEYS; r += STEP) {
        const bool exists = j0 + r < w.keys;
        const int64_t at = exists ? gpu_key_at(g, w.pairs.seq, stride, w.pairs.b, w.hk, j0 + r) : 0;
        mma_fill<S>(mma_place<S::WIDTH>(mma_shared(tile), r, c),
                    (const uint16_t *)from + at + 8 * c, exists ? bytes : 0, odd);
    }
}

/* What a thread keeps of an item while it walks along the keys. */
typedef struct mma_walker {
    const uint16_t *k, *v;           /* where the thread begins to copy, in the tile of key 0 */
    int keys, past, full, full_past; /* as in mma_item */
} mma_walker;

template <class S> GPU_DEVICE mma_walker mma_walker_of(const fattn_gpu_args &g, const mma_item &w)
{
    enum { CHUNKS = S::WIDTH / 8 };
    const int c = gpu_thread() % CHUNKS, r = gpu_thread() / CHUNKS;
    mma_walker walker;
    walker.k = (const uint16_t *)w.k + r * g.problem.k.seq + 8 * c;
    walker.v = (const uint16_t *)w.v + r * g.problem.v.seq + 8 * c;
    walker.keys = w.keys;
    walker.past = w.past;
    walker.full = w.full;
    walker.full_past = w.full_past;
    return walker;
}

/* Tile `block` of keys and values. */
template <class S>
GPU_DEVICE void mma_copy_tile(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_walker &at,
                              int stage, int block)
{
    const fattn_problem &p = g.problem;
    const int c = gpu_thread() % (S::WIDTH / 8), j0 = block * S::KEYS;
    const bool odd_k = !(g.chunks & FATTN_GPU_QUADS_K), odd_v = !(g.chunks & FATTN_GPU_QUADS_V);
    if (p.features & FATTN_PAGED) {
        mma_copy_pages<S>(g, s.item, s.k[stage], g.buffers.k, p.k, p.dim, j0, odd_k);
        mma_copy_pages<S>(g, s.item, s.v[stage], g.buffers.v, p.v, p.dim_v, j0, odd_v);
    } else {
        mma_copy_keys<S>(mma_shared(s.k[stage]), at.k + j0 * p.k.seq, p.k.seq,
                         mma_chunk_bytes(c, (int)p.dim), at.keys - j0, odd_k);
        mma_copy_keys<S>(mma_shared(s.v[stage]), at.v + j0 * p.v.seq, p.v.seq,
                         mma_chunk_bytes(c, (int)p.dim_v), at.keys - j0, odd_v);
    }
    mma_commit();
}

/* --- A tile ----------------------------------------------------------------------------------- */

/* Scores of pairs outside the band are selected away: keys first .. past - 1 of each row stay. */
template <class S>
GPU_DEVICE void mma_keep(const mma_scratch<S> &s, int j0, float x[S::TILES][S::KEYS / 8][4])
{
    const int column = j0 + mma_lane() % 4 * 2;
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int r = mma_row<S>(m, h);
            const int first = s.first[r] - column, past = s.past[r] - column;
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 4; n++) {
                const int j = n / 2 * 8 + n % 2;
                float *const score = &x[m][n / 2][2 * h + n % 2];
                *score = first <= j & j < past ? *score : -fattn_f32_infinity();
            }
        }
    }
}

/* Calls visit(score, j) for the thread's scores of a row, j keys from its first one on. */
template <class S, class Visit>
GPU_DEVICE void mma_each(int m, int h, float x[S::TILES][S::KEYS / 8][4], Visit visit)
{
    GPU_UNROLL
    for (int n = 0; n < S::KEYS / 4; n++) {
        visit(x[m][n / 2][2 * h + n % 2], n / 2 * 8 + n % 2);
    }
}

/* A term of the formula. */
template <unsigned TERM>
GPU_DEVICE void mma_term(const fattn_gpu_args &g, fattn_score_pair pair, float &score)
{
    float slope;
    score = fattn_score(&g.rule, TERM, score, pair, &slope);
}

/* Dot products of a row become scores, term by term, so that what is the same along it is looked up
 * once. Nothing is read for pairs that do not exist. */
template <class S>
GPU_DEVICE void mma_row_terms(const fattn_gpu_args &g, const mma_scratch<S> &s, unsigned terms,
                              int j0, int m, int h, float x[S::TILES][S::KEYS / 8][4])
{
    const fattn_problem &p = g.problem;
    const gpu_pairs &t = s.item.pairs;
    const gpu_query q = s.query[mma_row<S>(m, h)];
    const int column = j0 + mma_lane() % 4 * 2, live = q.h < 0 ? 0 : s.item.keys - column;
    fattn_score_pair pair = {};
    if (terms & FATTN_SCORE_SCALE) {
        mma_each<S>(m, h, x,
                    [&](float &score, int) { mma_term<FATTN_SCORE_SCALE>(g, pair, score); });
    }
    if (terms & FATTN_SCORE_CAP) {
        mma_each<S>(m, h, x, [&](float &score, int) { mma_term<FATTN_SCORE_CAP>(g, pair, score); });
    }
    if (terms & FATTN_SCORE_BIAS) {
        const int64_t at = gpu_term_at(t, p.bias_stride, q, column), stride = p.bias_stride[3];
        mma_each<S>(m, h, x, [&](float &score, int j) {
            pair.bias = j < live ? gpu_load(g.buffers.bias, p.dtype_bias, at + j * stride) : 0;
            mma_term<FATTN_SCORE_BIAS>(g, pair, score);
        });
    }
    if (terms & FATTN_SCORE_ALIBI && live > 0) {
        const float *const slopes = (const float *)g.buffers.alibi_slopes;
        const int64_t distance = q.i + t.band.diagonal - column;
        const bool is_short = -INT32_MAX / 2 < distance && distance < INT32_MAX / 2;
        pair.slope = slopes[t.b * p.alibi_batch_stride + q.h];
        mma_each<S>(m, h, x, [&](float &score, int j) {
            pair.distance = fv_abs(is_short ? (float)((int)distance - j) : (float)(distance - j));
            mma_term<FATTN_SCORE_ALIBI>(g, pair, score);
        });
    }
    if (terms & FATTN_SCORE_KEEP && p.features & FATTN_MASK) {
        const int64_t at = gpu_term_at(t, p.mask_stride, q, column), stride = p.mask_stride[3];
        mma_each<S>(m, h, x, [&](float &score, int j) {
            pair.keep = j < live && g.buffers.mask[at + j * stride] != 0;
            mma_term<FATTN_SCORE_KEEP>(g, pair, score);
        });
    }
    if (terms & FATTN_SCORE_KEEP && p.features & FATTN_BLOCK_MASK) {
        mma_each<S>(m, h, x, [&](float &score, int j) {
            pair.keep = j < live && gpu_block_keeps(g, t, q, column + j);
            mma_term<FATTN_SCORE_KEEP>(g, pair, score);
        });
    }
}

/* Dot products in x become scores. */
template <class S>
GPU_DEVICE void mma_score(const fattn_gpu_args &g, const mma_scratch<S> &s, bool partial, int j0,
                          float x[S::TILES][S::KEYS / 8][4])
{
    if (!S::IS_LEAN) {
        const unsigned terms = g.rule.terms | (partial ? (unsigned)FATTN_SCORE_KEEP : 0u);
        GPU_UNROLL
        for (int n = 0; n < 2 * S::TILES && terms; n++) {
            mma_row_terms(g, s, terms, j0, n / 2, n % 2, x);
        }
    }
    if (S::IS_LEAN && g.rule.terms) { /* a scale that cannot be part of the unit */
        GPU_UNROLL
        for (int n = 0; n < S::TILES * S::KEYS / 2; n++) {
            x[n / (S::KEYS / 2)][n / 4 % (S::KEYS / 8)][n % 4] *= g.rule.scale;
        }
    }
    if (partial) {
        mma_keep(s, j0, x);
    }
}

GPU_DEVICE float mma_quad_max(float x)
{
    x = gpu_max(x, gpu_shfl_xor(x, 1));
    return gpu_max(x, gpu_shfl_xor(x, 2));
}

GPU_DEVICE float mma_quad_sum(float x)
{
    x += gpu_shfl_xor(x, 1);
    return x + gpu_shfl_xor(x, 2);
}

/* The largest score of each row of the tile, in all threads of the row. */
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
    GPU_UNROLL
    for (int n = 0; n < 2 * S::TILES; n++) {
        largest[n / 2][n % 2] = mma_quad_max(largest[n / 2][n % 2]);
    }
}

/* References rise where scores have risen far, and with them falls what has been summed. */
template <class S>
GPU_DEVICE void mma_rise(float unit, const float largest[S::TILES][2], mma_rows<S> &rows)
{
    bool far = false;
    GPU_UNROLL
    for (int n = 0; n < 2 * S::TILES; n++) {
        far = far || largest[n / 2][n % 2] * unit > rows.state[n / 2][n % 2].m * unit + MMA_RISE;
    }
    if (!__any_sync(0xffffffffu, far)) {
        return;
    }
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            fattn_softmax *const state = &rows.state[m][h];
            const bool rises = largest[m][h] * unit > state->m * unit + MMA_RISE;
            const float alpha = fattn_softmax_raise(state, rises ? largest[m][h] : state->m, unit);
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH / 4; n++) {
                rows.o[m][n / 2][2 * h + n % 2] *= alpha;
            }
        }
    }
}

/* Scores in x become weights relative to the row's reference. */
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

/* mma_drop() wherever the tile lies. */
template <class S>
GPU_DEVICE void mma_drop_singly(const fattn_gpu_args &g, const mma_scratch<S> &s, int j0,
                                float x[S::TILES][S::KEYS / 8][4])
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int n = 0; n < S::KEYS / 4; n++) {
            float *const weight = &x[m][n / 2][2 * (n % 2)];
            const gpu_query q = s.query[mma_row<S>(m, n % 2)];
            float z[2] = {0, 0};
            if (q.h >= 0) {
                gpu_drop<2>(g, s.item.pairs, q, j0 + n / 2 * 8 + mma_lane() % 4 * 2, z);
            }
            weight[0] *= z[0];
            weight[1] *= z[1];
        }
    }
}

/* Weights in x that dropout drops become 0. Z comes last: times it, weights might overflow. One
 * call of the generator serves eight of a thread's pairs, where the tile lies on its patches and
 * rows are queries of one head. */
template <class S>
GPU_DEVICE void mma_drop(const fattn_gpu_args &g, const mma_scratch<S> &s, int j0,
                         float x[S::TILES][S::KEYS / 8][4])
{
    const gpu_pairs &t = s.item.pairs;
    const int64_t row = t.seq.q_position + s.item.i0, key = t.seq.k_position + j0;
    if (s.item.group != 1 || row % 16 || key % 16) {
        mma_drop_singly(g, s, j0, x);
        return;
    }
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        const gpu_query q = s.query[mma_row<S>(m, 0)]; /* its bit 3 is clear */
        const fattn_dropout_rows rows = fattn_dropout_rows_at(
            t.seq.q_position, (uint32_t)q.i, (uint32_t)(g.problem.batch_offset + t.b),
            (uint32_t)(g.problem.head_offset + (q.h < 0 ? 0 : q.h)));
        GPU_UNROLL
        for (int n = 0; n < S::KEYS / 16; n++) {
            uint32_t words[4];
            fattn_dropout_words(&t.dropout, rows, key + 16 * n + mma_lane() % 4 * 2, words);
            GPU_UNROLL
            for (int e = 0; e < 8; e++) { /* keys j, j + 1 and their neighbours 8 on, of two rows */
                const int right = e / 4, below = e / 2 % 2, odd = e % 2;
                x[m][2 * n + right][2 * below + odd] *=
                    fattn_dropout_multiplier(&t.dropout, words[2 * below + right], odd);
            }
        }
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Who the rows are. */
template <class S>
GPU_DEVICE void mma_begin(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w)
{
    const int group = (int)w.group, offset = (int)(w.first - w.i0 * w.group);
    for (int r = gpu_thread(); r < S::ROWS; r += S::THREADS) {
        gpu_query q;
        q.i = (int32_t)(w.i0 + (offset + r) / group);
        q.h = r < w.rows ? (int32_t)(w.hk * group + (offset + r) % group) : -1;
        const fattn_range keys = fattn_band_row(&w.pairs.band, q.i);
        s.query[r] = q;
        s.q_at[r] = q.h < 0 ? 0 : gpu_query_at(w.pairs.seq, g.problem.q, q.i, q.h);
        s.o_at[r] = q.h < 0 ? 0 : gpu_query_at(w.pairs.seq, g.problem.o, q.i, q.h);
        s.first[r] = (int32_t)gpu_clamp(keys.first, 0, INT32_MAX);
        s.past[r] = q.h < 0 ? 0 : (int32_t)gpu_clamp(keys.past, 0, INT32_MAX);
    }
    gpu_sync();
}

/* Nothing met. */
template <class S> GPU_DEVICE void mma_rows_empty(mma_rows<S> &rows)
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            rows.state[m][h] = fattn_softmax_empty();
        }
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH / 2; n++) {
            rows.o[m][n / 4][n % 4] = 0;
        }
    }
}

/* What tile `block` is. */
template <class S>
GPU_DEVICE fattn_tile_kind mma_kind(const fattn_gpu_args &g, const mma_item &w,
                                    const mma_walker &at, int block)
{
    if (!S::IS_LEAN && g.problem.features & (FATTN_MASK | FATTN_BLOCK_MASK)) {
        const int64_t j0 = (int64_t)block * S::KEYS, padded = j0 + S::KEYS;
        return gpu_tile_kind(g, w.pairs, w.i0, w.i1, w.hk * w.group, w.group, j0,
                             fattn_min64(padded, w.keys), padded);
    }
    return at.full <= block && block < at.full_past ? FATTN_TILE_FULL : FATTN_TILE_PARTIAL;
}

/* The first tile from `block` on that is not empty, or at.past. */
template <class S>
GPU_DEVICE int mma_next(const fattn_gpu_args &g, const mma_item &w, const mma_walker &at, int block,
                        fattn_tile_kind *kind)
{
    while (block < at.past) {
        *kind = mma_kind<S>(g, w, at, block);
        if (S::IS_LEAN || *kind != FATTN_TILE_EMPTY) {
            break;
        }
        block++;
    }
    return block;
}

/* Meets the keys of the item's part. */
template <class S>
GPU_DEVICE void mma_walk(const fattn_gpu_args &g, mma_scratch<S> &s, mma_rows<S> &rows)
{
    const float unit = g.rule.unit;
    const mma_walker at = mma_walker_of<S>(g, s.item);
    fattn_tile_kind kind = FATTN_TILE_EMPTY;
    int block = mma_next<S>(g, s.item, at, s.item.block, &kind);
    if (block < at.past) {
        mma_copy_tile<S>(g, s, at, 0, block);
    }
    mma_begin(g, s, s.item);
    mma_copy_queries(g, s);
    mma_commit();
    mma_rows_empty(rows);
    if (block >= at.past) {
        mma_wait<0>();
        gpu_sync(); /* o leaves where the queries are still on their way to */
    }
    for (int stage = 0; block < at.past; stage ^= 1) {
        const bool partial = kind == FATTN_TILE_PARTIAL;
        const int j0 = block * S::KEYS;
        block = mma_next<S>(g, s.item, at, block + 1, &kind);
        mma_wait<0>();
        gpu_sync(); /* everyone's copies are here, and everyone is through with the other tile */
        if (block < at.past) {
            mma_copy_tile<S>(g, s, at, stage ^ 1, block);
        }
        float x[S::TILES][S::KEYS / 8][4] = {}, largest[S::TILES][2];
        mma_dots<typename S::type, S::WIDTH, S::TILES, S::KEYS / 16, S::WIDTH / 16>(
            mma_rows_a<S::WIDTH>(s.q, mma_warp() * S::TILES * 16),
            mma_rows_b<S::WIDTH>(s.k[stage], 0), x);
        mma_score<S>(g, s, partial, j0, x);
        mma_largest<S>(x, largest);
        mma_rise<S>(unit, largest, rows);
        mma_weigh<S>(unit, rows, x);
        if (!S::IS_LEAN && g.problem.features & FATTN_DROPOUT) {
            mma_drop<S>(g, s, j0, x);
        }
        mma_mix<typename S::type, S::WIDTH, S::TILES, S::WIDTH / 16, S::KEYS / 16>(
            x, mma_columns_b<S::WIDTH>(s.v[stage], 0, 0), rows.o);
    }
}

/* Rows of o of the input's type leave through the place of the warp's own queries, so that whole
 * lines are written. */
template <class S>
GPU_DEVICE void mma_store_lines(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_rows<S> &rows)
{
    enum { CHUNKS = S::WIDTH / 8 };
    const int lane = mma_lane(), top = mma_warp() * S::TILES * 16, dim = (int)g.problem.dim_v;
    __syncwarp();
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int n = 0; n < 2 * CHUNKS; n++) {
            const int r = mma_row<S>(m, n % 2);
            const float *const pair = rows.o[m][n / 2] + 2 * (n % 2);
            *(uint32_t *)(s.q + r * S::WIDTH + (n / 2 ^ r & 7) * 8 + lane % 4 * 2) =
                S::type::pack(pair[0], pair[1]);
        }
    }
    __syncwarp();
    for (int n = lane; n < S::TILES * 16 * CHUNKS; n += GPU_WAVE) {
        const int r = top + n / CHUNKS, c = n % CHUNKS, live = dim - 8 * c;
        const uint16_t *const from = s.q + r * S::WIDTH + (c ^ r & 7) * 8;
        uint16_t *const to = (uint16_t *)g.buffers.o + s.o_at[r] + 8 * c;
        if (r >= s.item.rows || live <= 0) {
            continue;
        }
        if (live >= 8 && (uintptr_t)to % 16 == 0) {
            *(gpu_u4 *)to = *(const gpu_u4 *)from;
        } else {
            for (int e = 0; e < 8 && e < live; e++) {
                to[e] = from[e];
            }
        }
    }
}

/* In floats, pairs of channels: o itself, or a part of it. */
template <class S>
GPU_DEVICE void mma_store_floats(const fattn_gpu_args &g, const mma_scratch<S> &s, int64_t item,
                                 const mma_rows<S> &rows)
{
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int r = mma_row<S>(m, h);
            float *to = (float *)g.buffers.o + s.o_at[r];
            if (g.tiling.splits > 1) {
                const gpu_part part = gpu_part_of(g, item, r);
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

/* lse of the rows, or m and l of their parts: of the four threads that know a row one speaks. */
template <class S>
GPU_DEVICE void mma_store_states(const fattn_gpu_args &g, const mma_scratch<S> &s, int64_t item,
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
    if (g.tiling.splits > 1) {
        const gpu_part part = gpu_part_of(g, item, r);
        *part.m = state.m;
        *part.l = state.l;
    } else {
        gpu_store_lse(g, s.item.pairs.seq, s.item.pairs.b, s.query[r], state);
    }
}

/* The sink, which belongs to the first part. It comes last: were it the reference of the row,
 * weights might be too small to be told apart. Returns what sums are to be multiplied by. */
GPU_DEVICE float mma_meet_sink(const fattn_gpu_args &g, const mma_item &w, gpu_query q,
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

/* Rows in o and lse, or their parts in the workspace. */
template <class S>
GPU_DEVICE void mma_end(const fattn_gpu_args &g, mma_scratch<S> &s, mma_rows<S> &rows, int64_t item)
{
    const bool whole = g.tiling.splits == 1;
    GPU_UNROLL
    for (int m = 0; m < S::TILES; m++) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            fattn_softmax *const state = &rows.state[m][h];
            const float lower = 1.0f / (1 << S::type::LIFT);
            state->l = mma_quad_sum(state->l) * lower;
            float factor = lower, alpha = 1; /* apart: alpha may be as small as numbers can be */
            if (!S::IS_LEAN) {
                factor *= s.item.kept;
                alpha = mma_meet_sink(g, s.item, s.query[mma_row<S>(m, h)], state);
            }
            factor *= whole ? fattn_softmax_normaliser(*state) : 1;
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH / 4; n++) { /* 0 selected: a sum may be 0 * inf */
                float *const o = &rows.o[m][n / 2][2 * h + n % 2];
                *o = state->l == 0 ? 0 : *o * factor * alpha;
            }
        }
    }
    mma_store_states<S>(g, s, item, rows);
    if (!whole || g.problem.dtype_o == FATTN_F32) {
        if (!whole || g.problem.outputs & FATTN_OUT_O) {
            mma_store_floats<S>(g, s, item, rows);
        }
    } else if (g.problem.outputs & FATTN_OUT_O) {
        if constexpr (S::type::PLANES == 1) { /* o of f32 is f32 */
            mma_store_lines<S>(g, s, rows);
        }
    }
}

/* Item `number`. */
template <class S>
GPU_DEVICE void mma_item_set(const fattn_gpu_args &g, int64_t number, mma_item &w)
{
    const fattn_problem &p = g.problem;
    const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, number);
    w.pairs = gpu_pairs_of(g, work.batch);
    w.kept = 1;
    if (p.features & FATTN_DROPOUT) {
        w.kept = w.pairs.dropout.multiplier;
        w.pairs.dropout.multiplier = w.kept == 0 ? 0 : 1;
    }
    w.hk = work.head;
    w.split = (int)work.split;
    w.group = fattn_quotient(p.heads_q, p.heads_k);
    w.first = work.block * S::ROWS;
    w.rows = (int)gpu_clamp(w.pairs.seq.sq * w.group - w.first, 0, S::ROWS);
    w.i0 = fattn_quotient(w.first, w.group);
    w.i1 = fattn_quotient(w.first + w.rows - 1, w.group) + 1;
    w.keys = (int)w.pairs.seq.sk;

    int64_t first, past;
    const fattn_range top = fattn_band_row(&w.pairs.band, w.i0);
    const fattn_range bottom = fattn_band_row(&w.pairs.band, w.i1 - 1);
    fattn_schedule_keys(&g.tiling, work.split, &first, &past);
    w.block = (int)gpu_clamp(top.first / S::KEYS, first, past);
    w.past = (int)gpu_clamp((bottom.past + S::KEYS - 1) / S::KEYS, 0, past);
    w.full = (int)gpu_clamp((bottom.first + S::KEYS - 1) / S::KEYS, 0, INT32_MAX);
    w.full_past = (int)gpu_clamp(top.past / S::KEYS, 0, INT32_MAX);
    if (!(p.features & FATTN_PAGED)) {
        typedef typename S::type::element element;
        w.k = (const element *)g.buffers.k + gpu_key_at(g, w.pairs.seq, p.k, w.pairs.b, w.hk, 0);
        w.v = (const element *)g.buffers.v + gpu_key_at(g, w.pairs.seq, p.v, w.pairs.b, w.hk, 0);
    }
}

template <class S>
GPU_DEVICE void mma_forward_item(const fattn_gpu_args &g, mma_scratch<S> &s, int64_t item)
{
    gpu_sync(); /* the item before may still be read */
    if (gpu_thread() == 0) {
        mma_item_set<S>(g, item, s.item);
    }
    gpu_sync();
    if (s.item.rows > 0) {
        mma_rows<S> rows;
        mma_walk(g, s, rows);
        mma_end(g, s, rows, item);
    }
}

template <class S> GPU_DEVICE void mma_forward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_scratch<S>) <= MMA_SHARED(S::WIDTH, S::ROWS, S::KEYS), "too small");
    extern __shared__ char shared[];
    mma_scratch<S> &s = *(mma_scratch<S> *)shared;
    for (int64_t item = gpu_block(); item < g.tiling.items; item += gpu_blocks()) {
        mma_forward_item<S>(g, s, item);
    }
}

#endif
