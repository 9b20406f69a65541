/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on Hopper, for 16-bit types, in the manner of FlashAttention-3 (Shah et al. 2024).
 *
 * A block is persistent: it processes item after item, each a tile of rows of one key/value head.
 * Its warps are specialised. They synchronise only by barriers in shared memory:
 *
 *     the planner     one warp; computes the description of the next item
 *     the copier      one thread; issues the TMA copies of queries, keys and values as soon as a
 *                     pipeline stage is free. With paged keys, it is a warp, or two
 *     the stager      one thread; the same for a bias or mask, in kernels that have only that
 *                     feature of pairs
 *     warpgroups      the consumers, each with 64 rows:
 *
 *         x = Q K^T             of tile n, while
 *         o = o alpha + p V     of the tile before runs
 *         p                     of tile n: online softmax; a row is in the four lanes of a quad
 *
 * The planner is in wgmma_forward_items.cuh, the copier and the stager in wgmma_forward_copies.cuh,
 * and the kernels that run before in wgmma_forward_before.cuh.
 *
 * Tiles of keys are visited from the last to the first. A warpgroup skips those to which none of
 * its rows attends, unless warpgroups ping-pong: then each issues its products after the one before
 * it has issued its own, so that one computes its softmax while another multiplies.
 *
 * A row's reference is raised as in mma_forward.cuh, only if the row's own maximum exceeds it by
 * more than MMA_MARGIN. So a row's results do not depend on the rows beside it.
 *
 * Lean kernels have causal masks, windows, lengths, positions and sinks. The others have the
 * features of pairs: every one, or a single one (mma_terms.cuh).
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_CUH
#define FATTN_CUDA_WGMMA_FORWARD_CUH

#include "backends/cuda/wgmma_forward_copies.cuh"
#include "core/online_softmax.h"

/* If pages divide a tile of keys into so many copies, a second warp issues those of values. */
#define WGMMA_COPIES_APART 8

/* --- The terms of a tile ---------------------------------------------------------------------- */

/* The terms of an item and of the tile that begins with key j0, as mma_terms() reads them. */
template <class S> struct wgmma_tile_terms {
    const mma_item &item;
    const char **bias, **mask;
    gpu_f2 *alibi;
    const int64_t *stride;     /* of the staged bias or mask */
    wgmma_control<S> *control; /* has its barriers */
    uint32_t terms;            /* the address of the ring's first panel */
    uint32_t staged[2];        /* offsets in a panel of the thread's first reads */
    int panel;                 /* the tile's first panel, counting all that go through the ring */
    float *shift;              /* of the thread's two rows: mma_alibi() */
    float factor;              /* of dot products; in a register, to save a load in each tile */
    int j0;
    bool plain; /* the bias is 0, or the mask keeps all pairs: nothing is staged */
};

/* A thread's terms of its two rows, for an item and the current tile. */
typedef struct wgmma_row_terms {
    uint32_t staged[2]; /* wgmma_staged_begin() */
    float shift[2];     /* a summand of all scores of a row: mma_alibi() */
    float factor;       /* as in wgmma_tile_terms */
} wgmma_row_terms;

/* The meaning of a tile's x: x times `factor` are scores, and x times `unit` exponents of 2. */
typedef struct wgmma_scale {
    float factor, unit;
} wgmma_scale;

/* Whether TMA copies the staged bias or mask; if not, the warps fill the panels themselves. */
GPU_DEVICE bool wgmma_is_copied(const mma_item &w) { return w.bias_rows; }

/* The row of a staged panel with the terms of row r: row r itself if warps fill the panel. */
template <class S> GPU_DEVICE int wgmma_staged_row(const mma_item &w, const int64_t *stride, int r)
{
    if (!wgmma_is_copied(w)) {
        return r;
    }
    const gpu_query q = mma_query_from(w, r < w.rows ? r : 0);
    const int heads = stride[1] ? (int)w.group : 1;
    return (stride[2] ? q.i : 0) * heads + (stride[1] ? q.h : 0);
}

/* Offsets in a staged panel of a thread's first reads; `row` is its warp's first row. For a bias,
 * this is a row of the matrices that its warp loads together; for a mask, the thread's own two
 * rows. The number of a chunk changes bits 4 to 6. */
template <class S>
GPU_DEVICE void wgmma_staged_begin(const mma_item &w, const int64_t *stride, int row,
                                   uint32_t from[2])
{
    const int lane = mma_lane();
    if constexpr (S::KNOWN == FATTN_BIAS) {
        const int at = wgmma_staged_row<S>(w, stride, row + lane % 16);
        from[0] = from[1] = (uint32_t)(at * 128 + ((at % 8 ^ lane / 16) << 4));
    } else {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const int at = wgmma_staged_row<S>(w, stride, row + lane / 4 + 8 * h);
            from[h] = (uint32_t)(at * 128 + (at % 8 << 4) + lane % 4 * 2);
        }
    }
}

/* Fills the warp's rows of a panel if TMA cannot copy them, with 0 past the last key. */
template <class S> GPU_DEVICE void wgmma_fill(const wgmma_tile_terms<S> &s)
{
    enum {
        SIZE = 128 / S::TERM_KEYS, /* of an element */
        EACH = 4 / SIZE            /* elements of a word */
    };
    const mma_item &w = s.item;
    const int lane = mma_lane(), first = (mma_warp() - S::FIRST_WARP) * 16;
    __syncwarp(); /* all lanes have read the tile before */
    GPU_ROLLED
    for (int n = 0; n < 16 * S::TERM_PANELS; n++) {
        const int c = n / 16, r = first + n % 16;
        const int j = s.j0 + c * S::TERM_KEYS + EACH * lane, keys = w.keys - j;
        const gpu_query q = mma_query_from(w, r < w.rows ? r : 0);
        const char *const from =
            (const char *)w.staged + (q.h * s.stride[1] + q.i * s.stride[2] + j) * SIZE;
        uint32_t word = 0;
        GPU_UNROLL
        for (int e = 0; e < EACH; e++) {
            const uint32_t x = e >= keys   ? 0
                               : SIZE == 2 ? ((const uint16_t *)from)[e]
                                           : ((const uint8_t *)from)[e];
            word |= x << 8 * SIZE * e;
        }
        mma_put(s.terms + c * S::TERM_BYTES + r * 128 + ((lane / 4 ^ r % 8) << 4) + lane % 4 * 4,
                word);
    }
    __syncwarp();
}

/* Waits for the panels of the tile, and returns their addresses. */
template <class S>
GPU_DEVICE void wgmma_panels_begin(const wgmma_tile_terms<S> &s, uint32_t from[S::TERM_PANELS])
{
    if (!wgmma_is_copied(s.item)) {
        wgmma_fill(s);
    }
    GPU_UNROLL
    for (int c = 0; c < S::TERM_PANELS; c++) {
        const int n = s.panel + c;
        if (wgmma_is_copied(s.item)) {
            wgmma_await(&s.control->term_full[n % S::TERM_RING], n / S::TERM_RING % 2);
        }
        from[c] = s.terms + n % S::TERM_RING * S::TERM_BYTES;
    }
}

/* Releases the panels of the tile, which the warp has read; one lane arrives for each. Returns the
 * number of the next tile's first panel. */
template <class S> GPU_DEVICE int wgmma_panels_end(const wgmma_tile_terms<S> &s)
{
    if (!wgmma_is_copied(s.item)) {
        return s.panel;
    }
    __syncwarp();
    if (mma_lane() < S::TERM_PANELS) {
        wgmma_arrive(&s.control->term_empty[(s.panel + mma_lane()) % S::TERM_RING]);
    }
    return s.panel + S::TERM_PANELS;
}

/* Calls f(number, pair) for the thread's pairs of biases in a tile that is not plain. Number
 * 2 n + h has those of the thread's columns from 8 n on in its row h. */
template <class S, class F> GPU_DEVICE void wgmma_each_bias(const wgmma_tile_terms<S> &s, F f)
{
    enum { LOADS = S::TERM_KEYS / 16 }; /* of a panel */
    uint32_t from[S::TERM_PANELS];
    wgmma_panels_begin<S>(s, from);
    GPU_UNROLL
    for (int n = 0; n < S::KEYS / 16; n++) {
        uint32_t four[4];
        mma_load(four, (from[n / LOADS] + s.staged[0]) ^ n % LOADS << 5);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            f(4 * n + e, four[e]);
        }
    }
}

/* The same for a mask's bytes. */
template <class S, class F> GPU_DEVICE void wgmma_each_mask(const wgmma_tile_terms<S> &s, F f)
{
    static_assert(S::TERM_PANELS == 1, "a tile is one panel");
    uint32_t from[1];
    wgmma_panels_begin<S>(s, from);
    GPU_UNROLL
    for (int n = 0; n < S::KEYS / 4; n++) {
        f(n, wgmma_get_half(((s.staged[n % 2] + from[0]) ^ n / 4 << 4) + n / 2 % 2 * 8));
    }
}

/* x = factor x + bias, for two scores. x becomes NaN if the bias is -inf and the score is not
 * finite. */
template <class S>
GPU_DEVICE void wgmma_add_pair(float factor, int n, uint32_t pair, float x[S::KEYS / 8][4])
{
    GPU_UNROLL
    for (int e = 0; e < 2; e++) {
        float *const score = x[n / 2] + n % 2 * 2 + e;
        *score = fmaf(*score, factor, mma_bias_at<S::type::DTYPE>(&pair, e));
    }
}

/* A bias of -inf hides its pair, whatever the dot product is. */
template <class S> GPU_DEVICE void wgmma_hide_pair(int n, uint32_t pair, float x[S::KEYS / 8][4])
{
    GPU_UNROLL
    for (int e = 0; e < 2; e++) {
        float *const score = x[n / 2] + n % 2 * 2 + e;
        const float bias = mma_bias_at<S::type::DTYPE>(&pair, e);
        *score = bias == -fattn_f32_infinity() ? bias : *score;
    }
}

/* x = factor x */
template <class S>
GPU_DEVICE void wgmma_multiply(const wgmma_tile_terms<S> &s, float x[S::KEYS / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < S::KEYS / 2; n++) {
        x[n / 4][n % 4] *= s.factor;
    }
}

/* Whether a bias or mask hides all pairs of a warpgroup in a tile that is not plain. */
template <class S> GPU_DEVICE bool wgmma_is_hidden(const wgmma_tile_terms<S> &s, int group)
{
    uint32_t kept = 0;
    if constexpr (S::KNOWN == FATTN_BIAS) {
        const uint32_t hidden = (int)S::type::DTYPE == (int)FATTN_F16 ? 0xfc00fc00u : 0xff80ff80u;
        wgmma_each_bias<S>(s, [&](int, uint32_t pair) { kept |= pair ^ hidden; });
    } else {
        wgmma_each_mask<S>(s, [&](int, uint32_t pair) { kept |= pair; });
    }
    return wgmma_named_all(WGMMA_FORWARD_HIDDEN + group, WGMMA_WARPGROUP, kept == 0);
}

/* Whether some score is NaN. A multiply-add makes only NaN without a sign, which as integers exceed
 * infinity. */
template <class S> GPU_DEVICE bool wgmma_has_nan(const float x[S::KEYS / 8][4])
{
    int most[4];
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        most[e] = __float_as_int(x[0][e]);
        GPU_UNROLL
        for (int n = 1; n + 1 < S::KEYS / 8; n += 2) {
            most[e] = wgmma_larger(most[e], __float_as_int(x[n][e]), __float_as_int(x[n + 1][e]));
        }
        most[e] = max(most[e], __float_as_int(x[S::KEYS / 8 - 1][e]));
    }
    const int all = max(wgmma_larger(most[0], most[1], most[2]), most[3]);
    return all > __float_as_int(fattn_f32_infinity());
}

/* x = factor x, or -inf where the mask hides the pair. */
template <class S>
GPU_DEVICE void wgmma_add_mask(const wgmma_tile_terms<S> &s, float x[S::KEYS / 8][4])
{
    if (s.factor != 1) {
        wgmma_multiply(s, x);
    }
    if (s.plain) {
        return;
    }
    wgmma_each_mask<S>(s, [&](int n, uint32_t pair) {
        float *const score = x[n / 2] + n % 2 * 2;
        score[0] = pair & 0xff ? score[0] : -fattn_f32_infinity();
        score[1] = pair & 0xff00 ? score[1] : -fattn_f32_infinity();
    });
}

/* Sets x and shift so that x + shift = factor x - slope distance. If all of a warp's queries are on
 * one side of the tile's keys, the distance is linear in the column: x gets slope times the column,
 * and shift the rest, which is the same for all of a row. */
template <class S>
GPU_DEVICE void mma_alibi(const wgmma_tile_terms<S> &s, int j0, float factor,
                          float x[1][S::KEYS / 8][4])
{
    const float own = (float)mma_own<S>(), item = mma_distance(s.item, j0);
    float first[2], slope[2];
    bool left = S::KNOWN == FATTN_ALIBI, right = left;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const gpu_f2 row = s.alibi[mma_row<S>(0, h)];
        slope[h] = row.x;
        first[h] = item + row.y;
        const bool tame = fabsf(slope[h] * first[h]) < 0x1p100f;
        left = left && tame && first[h] >= (float)(S::KEYS - 1);
        right = right && tame && first[h] <= 0;
    }
    left = __all_sync(0xffffffffu, left);
    if (left || __all_sync(0xffffffffu, right)) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const float step = left ? slope[h] : -slope[h];
            s.shift[h] = -(step * first[h]);
            mma_each<S>(0, h, x, [&](float &score, int j) {
                score = fmaf(score, factor, fmaf(step, (float)mma_behind<S>(j), step * own));
            });
        }
        return;
    }
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        s.shift[h] = 0;
        mma_each<S>(0, h, x, [&](float &score, int j) {
            const float distance = fabsf(first[h] - own - (float)mma_behind<S>(j));
            score = fmaf(-slope[h], distance, score * factor);
        });
    }
}

/* --- A tile of keys --------------------------------------------------------------------------- */

/* A thread's two rows, which are 8 apart. */
template <class S> struct wgmma_rows {
    fattn_softmax state[2]; /* l: over the thread's own columns */
    float top[2];           /* the largest score in these, or -inf */
    float o[S::WIDTH_V / 8][4];
};

/* Updates `top` with the largest x of a tile. With 256 channels there is no register for it. */
template <class S>
GPU_DEVICE void wgmma_note_top(float x, const wgmma_scale &scale, float shift, float *top)
{
    if constexpr (S::WIDTH_V < 256) {
        const bool shifts = S::KNOWN == MMA_ANY || S::KNOWN == FATTN_ALIBI; /* else by 0 */
        *top = gpu_max(*top, shifts ? x * scale.factor + shift : x * scale.factor);
    }
}

/* Whether some score of a warp's rows may exceed its reference by more than the margin. Floats that
 * are not negative compare like their bits as integers, and one instruction compares three of
 * these. A negative limit counts as exceeded; so does NaN in kernels for a bias, which may hide its
 * pair. Also updates rows.top with the largest score; if all are negative, with another one. */
template <class S>
GPU_DEVICE bool wgmma_exceeds_margin(float unit, const wgmma_scale &scale, const float shift[2],
                                     const float x[S::KEYS / 8][4], wgmma_rows<S> &rows)
{
    enum { N = S::KEYS / 8 };
    bool exceeds = false;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        int even = __float_as_int(x[0][2 * h]), odd = __float_as_int(x[0][2 * h + 1]);
        GPU_UNROLL
        for (int n = 1; n + 1 < N; n += 2) {
            even = wgmma_larger(even, __float_as_int(x[n][2 * h]), __float_as_int(x[n + 1][2 * h]));
            odd = wgmma_larger(odd, __float_as_int(x[n][2 * h + 1]),
                               __float_as_int(x[n + 1][2 * h + 1]));
        }
        even = wgmma_larger(even, __float_as_int(x[N - 1][2 * h]),
                            __float_as_int(x[N - 1][2 * h + 1]));
        const float limit = (rows.state[h].m - shift[h]) * unit + MMA_MARGIN;
        const float largest = __int_as_float(max(even, odd)), top = largest * scale.unit;
        exceeds =
            exceeds || !(limit >= 0) || (S::KNOWN == FATTN_BIAS ? !(top <= limit) : top > limit);
        wgmma_note_top<S>(largest, scale, shift[h], &rows.top[h]);
    }
    return __any_sync(0xffffffffu, exceeds);
}

/* Raises the references that scores exceed by more than the margin, and rescales l by alpha. The
 * caller rescales o. */
template <class S>
GPU_DEVICE void wgmma_rise(float unit, const wgmma_scale &scale, const float shift[2],
                           float x[S::KEYS / 8][4], wgmma_rows<S> &rows, float alpha[2])
{
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        fattn_softmax *const state = &rows.state[h];
        float even = x[0][2 * h], odd = x[0][2 * h + 1];
        GPU_UNROLL
        for (int n = 1; n < S::KEYS / 8; n++) {
            even = gpu_max(even, x[n][2 * h]);
            odd = gpu_max(odd, x[n][2 * h + 1]);
        }
        float top = gpu_max(even, odd);
        wgmma_note_top<S>(top, scale, shift[h], &rows.top[h]);
        top = mma_quad_max(top) * scale.factor;
        if (S::KNOWN == FATTN_BIAS && (int)S::type::DTYPE == (int)FATTN_BF16 && scale.factor == 1 &&
            fabsf(top) >= 0x1p126f && fabsf(top) < fattn_f32_infinity()) { /* as in mma_bounded() */
            top = fattn_score_bias(top);
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 4; n++) {
                float *const score = &x[n / 2][2 * h + n % 2];
                *score = fattn_score_bias(*score);
            }
        }
        const bool rises = top * unit > (state->m - shift[h]) * unit + MMA_MARGIN;
        alpha[h] = fattn_softmax_raise(state, rises ? top + shift[h] : state->m, unit);
    }
}

/* Turns scores into weights relative to the row's reference, and adds them to l. */
template <class S>
GPU_DEVICE void wgmma_weigh(float unit, const wgmma_scale &scale, const float shift[2],
                            wgmma_rows<S> &rows, float x[S::KEYS / 8][4])
{
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const float base = fattn_softmax_base(rows.state[h]) - shift[h];
        const float to = base * unit - S::type::LIFT;
        float even = 0, odd = 0;
        GPU_UNROLL
        for (int n = 0; n < S::KEYS / 8; n++) {
            float *const weight = x[n] + 2 * h;
            weight[0] = mma_exp2(fmaf(weight[0], scale.unit, -to));
            weight[1] = mma_exp2(fmaf(weight[1], scale.unit, -to));
            even += weight[0];
            odd += weight[1];
        }
        fattn_softmax_add(&rows.state[h], even + odd);
    }
}

/* --- Dropout ---------------------------------------------------------------------------------- */

/* wgmma_drop() for a tile that is aligned to the generator's patches. A call serves two adjacent
 * keys and the two 8 further, of two rows. */
template <class S, bool SMALL>
GPU_DEVICE void wgmma_drop_patches(const fattn_dropout &dropout, const fattn_dropout_rows &rows,
                                   uint32_t column, uint32_t p[S::KEYS / 16][4])
{
    const uint32_t threshold = dropout.threshold << 16 | dropout.threshold;
    GPU_UNROLL
    for (int n = 0; n < S::KEYS / 16; n++) {
        uint32_t words[4];
        fattn_dropout_patch(&dropout, rows, column + 4 * n, words);
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            p[n][h] &= wgmma_kept<SMALL>(words[2 * h], threshold);
            p[n][2 + h] &= wgmma_kept<SMALL>(words[2 * h + 1], threshold);
        }
    }
}

/* Sets weights that dropout drops to 0, in the tile that begins with key j0. row: the warp's first.
 * o is multiplied by Z at the end, because weights times Z might overflow. */
template <class S>
GPU_DEVICE void wgmma_drop(const fattn_gpu_args &g, const mma_item &w, int row, int j0,
                           uint32_t p[S::KEYS / 16][4])
{
    const gpu_pairs &t = w.pairs;
    const int64_t query = t.seq.q_position + w.i0, key = t.seq.k_position + j0;
    if (w.group != 1 || query % 16 || key % 16) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const gpu_query q = mma_query(w, mma_row<S>(0, h));
            const uint32_t bits = mma_kept_bits<S>(g, t, q, j0);
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 8; n++) {
                p[n / 2][n % 2 * 2 + h] &=
                    (bits >> 2 * n & 1) * 0xffffu | (bits >> 2 * n & 2) * 0x7fff8000u;
            }
        }
        return;
    }
    const fattn_dropout_rows rows = fattn_dropout_rows_at(
        t.seq.q_position, (uint32_t)(w.i0 + row + mma_lane() / 4),
        (uint32_t)(g.problem.batch_offset + t.b), (uint32_t)(g.problem.head_offset + w.hk));
    const uint32_t column = fattn_dropout_column(key + mma_own<S>());
    if (t.dropout.threshold <= WGMMA_SMALL_THRESHOLD) {
        wgmma_drop_patches<S, true>(t.dropout, rows, column, p);
    } else {
        wgmma_drop_patches<S, false>(t.dropout, rows, column, p);
    }
}

/* --- The end of an item ----------------------------------------------------------------------- */

/* Stores eight channels of a row of o. (gpu_store_eight() would do the same, but then ptxas reloads
 * a spilled register between the products of 256 channels.) */
template <class S>
GPU_DEVICE void wgmma_store_eight(const fattn_gpu_args &g, int64_t at, int c, const uint32_t x[4])
{
    const int live = (int)g.problem.dim_v - c;
    uint16_t *const to = (uint16_t *)g.buffers.o + at + c;
    if (live >= 8 && g.chunks & FATTN_GPU_QUADS_O) {
        gpu_u4 eight;
        eight.x = x[0], eight.y = x[1], eight.z = x[2], eight.w = x[3];
        *(gpu_u4 *)to = eight;
        return;
    }
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        if (e < live) {
            to[e] = (uint16_t)(x[e / 2] >> e % 2 * 16);
        }
    }
}

/* Stores rows of o in the input's type. A warp stages its sums in shared memory, 64 channels of
 * eight rows at a time, swizzled like a tile, so that eight lanes store 128 bytes of a row. row:
 * the warp's first; factor, empty: of each of the thread's two rows. */
template <class S>
GPU_DEVICE void wgmma_store_pairs(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                  const wgmma_item &w, int row, const float factor[2],
                                  const bool empty[2], const wgmma_rows<S> &rows)
{
    const fattn_strides stride = g.problem.o;
    const int lane = mma_lane(), warp = gpu_thread() / 32 - 4;
    const uint32_t out = b.out + warp * WGMMA_OUT_BYTES;
    const uint32_t to = out + lane / 4 * 128 + lane % 4 * 4, swizzle = lane / 4 << 4;
    const uint32_t from = out + lane / 8 * 128;
    const auto store = [&](int h) {
        const float own = h ? factor[1] : factor[0];
        const bool none = h ? empty[1] : empty[0];
        int64_t at[2];
        bool exists[2];
        GPU_UNROLL
        for (int k = 0; k < 2; k++) { /* rows lane / 8 and 4 later */
            const int r = row + 8 * h + 4 * k + lane / 8, i = wgmma_query(b, r);
            at[k] = w.o + i * stride.seq + (r - i * b.group) * stride.head;
            exists[k] = r < w.rows;
        }
        GPU_UNROLL
        for (int panel = 0; panel < S::PANELS_V; panel++) {
            GPU_UNROLL
            for (int n = 0; n < 8 && 8 * panel + n < S::WIDTH_V / 8; n++) {
                const float *const four = rows.o[8 * panel + n];
                const float x = h ? four[2] : four[0], y = h ? four[3] : four[1];
                const uint32_t word = S::type::pack(x * own, y * own);
                mma_put(to + (swizzle ^ n << 4), none ? 0 : word);
            }
            __syncwarp();
            GPU_UNROLL
            for (int k = 0; k < 2; k++) {
                uint32_t x[4];
                mma_get<4>(from + 512 * k + ((lane % 8 ^ (4 * k + lane / 8)) << 4), x);
                if (exists[k]) {
                    wgmma_store_eight<S>(g, at[k], 64 * panel + lane % 8 * 8, x);
                }
            }
            __syncwarp();
        }
    };
    if constexpr (S::IS_STAGED && S::WARPGROUPS == 1) { /* fewer instruction cache misses */
        GPU_ROLLED
        for (int h = 0; h < 2; h++) {
            store(h);
        }
    } else {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            store(h);
        }
    }
}

/* The same in floats, without staging. */
template <class S>
GPU_DEVICE void wgmma_store_floats(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                   const wgmma_item &w, int row, const float factor[2],
                                   const bool empty[2], const wgmma_rows<S> &rows)
{
    const fattn_strides stride = g.problem.o;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int r = row + mma_lane() / 4 + 8 * h, i = wgmma_query(b, r);
        const int64_t at = w.o + i * stride.seq + (r - i * b.group) * stride.head;
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH_V / 4; n++) {
            const int c = n / 2 * 8 + mma_lane() % 4 * 2 + n % 2;
            if (r < w.rows && c < g.problem.dim_v) {
                ((float *)g.buffers.o)[at + c] =
                    empty[h] ? 0 : rows.o[n / 2][2 * h + n % 2] * factor[h];
            }
        }
    }
}

/* Stores a part of the rows, not yet divided by l, and its m and l. */
template <class S>
GPU_DEVICE void wgmma_store_part(const fattn_gpu_args &g, const wgmma_item &w, int number, int row,
                                 const float factor[2], const fattn_softmax state[2],
                                 const wgmma_rows<S> &rows)
{
    const bool pairs = g.problem.dim_v % 2 == 0; /* then each part has an even number of floats */
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int r = row + mma_lane() / 4 + 8 * h;
        const gpu_part part = gpu_part_of(g, number, r);
        float *const o = (float *)part.o.data + part.at;
        if (r < w.rows && mma_lane() % 4 == 0) {
            *part.m = state[h].m;
            *part.l = state[h].l;
        }
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH_V / 8; n++) {
            const int c = n * 8 + mma_lane() % 4 * 2;
            const gpu_f2 pair = {rows.o[n][2 * h] * factor[h], rows.o[n][2 * h + 1] * factor[h]};
            if (r < w.rows && c < g.problem.dim_v) {
                if (pairs) {
                    *(gpu_f2 *)(o + c) = pair;
                } else {
                    o[c] = pair.x;
                    if (c + 1 < g.problem.dim_v) {
                        o[c + 1] = pair.y;
                    }
                }
            }
        }
    }
}

/* Adds the sink of row r, as mma_add_sink() does, to the first part. The sink is in natural units,
 * to which the row's reference is converted first. */
template <class S>
GPU_DEVICE float wgmma_add_sink(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                const wgmma_item &w, int r, bool first, fattn_softmax *state)
{
    float alpha, beta;
    state->m = S::IS_LEAN ? state->m * g.rule.scale : state->m;
    if (r >= w.rows || !first) {
        return 1;
    }
    const int h = w.q_head * b.group + r - wgmma_query(b, r) * b.group;
    const fattn_softmax sink = fattn_softmax_sink(((const float *)g.buffers.sink)[h]);
    fattn_softmax_merge(state, sink, g.rule.unit, &alpha, &beta);
    return alpha;
}

/* The query of sequence w.batch and the head of row r of an item, in batches that are not
 * ragged. */
template <class S>
GPU_DEVICE gpu_query wgmma_row_query(const wgmma_block<S> &b, const wgmma_item &w, int r)
{
    const int i = wgmma_query(b, r);
    gpu_query q;
    q.i = w.q_row + i;
    q.h = w.q_head * b.group + r - i * b.group;
    return q;
}

/* Prefetches to L2 the 16 rows with which a warp's own will be merged, while it multiplies. */
template <class S>
GPU_DEVICE void wgmma_prefetch_rows(const wgmma_block<S> &b, const wgmma_item &w, int row)
{
    const fattn_state &first = b.onto->first;
    const int lane = mma_lane(), r = row + lane / 2;
    const gpu_query q = wgmma_row_query(b, w, r);
    const float *const o = (const float *)first.o + fattn_state_row(&first, w.batch, q.h, q.i);
    for (int c = lane % 2 * 32; r < w.rows && c < b.onto->dim_v; c += 64) {
        mma_prefetch(o + c);
    }
}

/* Merges row r of the item, the thread's h-th, in kernels that merge rows. On entry its sums times
 * `factor` are o over the item's keys, and lse is that of these keys. On return the sums are o over
 * these keys and those of onto->first. The merged lse is stored. */
template <class S>
GPU_DEVICE void wgmma_merge_row(const wgmma_block<S> &b, const wgmma_item &w, int r, int h,
                                float lse, float factor, wgmma_rows<S> &rows)
{
    const fattn_merge_job &job = *b.onto;
    const gpu_query q = wgmma_row_query(b, w, r);
    const bool exists = r < w.rows;
    const float other = exists ? *fattn_state_lse(&job.first, w.batch, q.h, q.i) : lse;
    const gpu_weights weights = gpu_weights_of(other, lse);
    const float sum = weights.first + weights.second, share = sum == 0 ? 0 : 1 / sum;
    const float own = weights.no_second ? 0 : weights.second * share * factor;
    const float others = weights.first * share;
    const float *const o =
        (const float *)job.first.o + fattn_state_row(&job.first, w.batch, q.h, q.i);
    const int c = mma_lane() % 4 * 2;
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH_V / 8; n++) {
        gpu_f2 x = {0, 0};
        if (exists && !weights.no_first && 8 * n + c < job.dim_v) {
            x = *(const gpu_f2 *)(o + 8 * n + c);
        }
        float *const pair = rows.o[n] + 2 * h;
        pair[0] = weights.no_second ? x.x : fmaf(pair[0], own, others * x.x);
        pair[1] = weights.no_second ? x.y : fmaf(pair[1], own, others * x.y);
    }
    __syncwarp(); /* all lanes have read the old lse, which the new one may overwrite */
    if (exists && mma_lane() % 4 == 0) {
        *fattn_state_lse(&job.result, w.batch, q.h, q.i) = weights.lse;
    }
}

/* Writes rows to o and lse, or parts to the workspace. row: the warp's first; z_kept: Z of a pair
 * that dropout keeps. */
template <class S>
GPU_DEVICE void wgmma_end(const fattn_gpu_args &g, const wgmma_block<S> &b, int place, int row,
                          float z_kept, wgmma_rows<S> &rows)
{
    const fattn_problem &p = g.problem;
    const wgmma_item &w = b.control->item[place];
    wgmma_part part = {0, 0, true};
    if constexpr (S::IS_SPLIT) {
        part = b.control->part[place];
    }
    fattn_softmax states[2];
    float factor[2];
    bool empty[2];
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const float lower = 1.0f / (1 << S::type::LIFT);
        const int r = row + mma_lane() / 4 + 8 * h;
        fattn_softmax state = rows.state[h];
        const float base = fattn_softmax_base(state);
        float added =
            mma_rounding<S>(g, S::type::weight(rows.top[h], wgmma_unit<S>(g), base)) * lower;
        state.l = mma_quad_sum(state.l) * lower;
        if (p.features & FATTN_SINK) {
            const float alpha = wgmma_add_sink(g, b, w, r, part.split == 0, &state);
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH_V / 4; n++) { /* not in factor: alpha may be tiny */
                rows.o[n / 2][2 * h + n % 2] *= alpha;
            }
            added *= alpha;
        }
        states[h] = state;
        empty[h] = state.l == 0;
        const float share = mma_reciprocal(state.l + added); /* l is 0, or about 1 */
        factor[h] = lower * z_kept * (part.whole ? share : mma_part_factor(state.l, share, added));
        if constexpr (S::MERGES) {
            const float lse = fattn_softmax_lse(state, g.rule.natural);
            wgmma_merge_row(b, w, r, h, lse, factor[h], rows);
            factor[h] = 1;
            empty[h] = false;
        } else if (p.outputs & FATTN_OUT_LSE && part.whole && r < w.rows && mma_lane() % 4 == 0) {
            const int i = wgmma_query(b, r);
            ((float *)g.buffers.lse)[w.lse + (r - i * b.group) * p.total_q + i] =
                fattn_softmax_lse(state, g.rule.natural);
        }
    }
    if (!part.whole) {
        wgmma_store_part<S>(g, w, part.number, row, factor, states, rows);
        return;
    }
    if (!(p.outputs & FATTN_OUT_O)) {
        return;
    }
    if (p.dtype_o == FATTN_F32) {
        wgmma_store_floats(g, b, w, row, factor, empty, rows);
    } else {
        wgmma_store_pairs(g, b, w, row, factor, empty, rows);
    }
}

/* --- A warpgroup ------------------------------------------------------------------------------ */

/* How many tiles a warpgroup has consumed from each ring. */
template <class S> struct wgmma_used {
    int k, v, terms;

    GPU_DEVICE int stage(int n) { return n % S::RING; }
    GPU_DEVICE int phase(int n) { return n / S::RING % 2; }
};

/* The terms of tile `block` of keys. plain: as in wgmma_tile_terms. known: the terms of the
 * thread's rows. */
template <class S>
GPU_DEVICE wgmma_tile_terms<S> wgmma_tile_terms_of(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                                   int place, int block, bool plain, int panel,
                                                   wgmma_row_terms &known)
{
    wgmma_control<S> &control = *b.control;
    wgmma_tile_terms<S> s = {control.terms[place],
                             NULL,
                             NULL,
                             NULL,
                             NULL,
                             &control,
                             b.terms,
                             {known.staged[0], known.staged[1]},
                             panel,
                             known.shift,
                             known.factor,
                             block * S::KEYS,
                             plain};
    if constexpr (S::KNOWN == MMA_ANY) {
        s.bias = control.bias;
        s.mask = control.mask;
    }
    if constexpr (S::KNOWN == MMA_ANY || S::KNOWN == FATTN_ALIBI) {
        s.alibi = control.alibi;
    }
    if constexpr (S::IS_STAGED) {
        s.stride = wgmma_term_stride<S>(g.problem);
    }
    return s;
}

/* Sets dot products with keys that do not exist to 0, in the tile that begins with key j0. They are
 * of arbitrary data, and the softcap would take another path if one is large. */
template <class S> GPU_DEVICE void wgmma_zero_past(int keys, int j0, float x[S::KEYS / 8][4])
{
    if (!fattn_tile_is_whole(j0, S::KEYS, keys)) {
        const int past = keys - j0 - mma_own<S>();
        GPU_UNROLL
        for (int n = 0; n < S::KEYS / 2; n++) {
            float *const score = &x[n / 4][n % 4];
            *score = n / 4 * 8 + n % 2 < past ? *score : 0;
        }
    }
}

/* Turns dot products in x, of tile `block` of keys, into scores. bound: as in mma_terms(). Kernels
 * for a bias do not call this. */
template <class S>
GPU_DEVICE void wgmma_score(const fattn_gpu_args &g, const wgmma_block<S> &b, int place, int block,
                            bool plain, wgmma_used<S> &used, wgmma_row_terms &known,
                            float x[S::KEYS / 8][4], float bound[1][2])
{
    const wgmma_tile_terms<S> s = wgmma_tile_terms_of(g, b, place, block, plain, used.terms, known);
    if constexpr (S::KNOWN == FATTN_MASK) {
        wgmma_add_mask(s, x);
        used.terms = s.plain ? used.terms : wgmma_panels_end(s);
    } else {
        if (mma_has<S>(g, FATTN_SOFTCAP)) {
            wgmma_zero_past<S>(s.item.keys, s.j0, x);
        }
        mma_terms<S>(g, s, s.j0, (float(*)[S::KEYS / 8][4]) x, bound);
        mma_prefetch_bias<S>(g, s, block - 1, block > b.control->item[place].block ? block : 0);
    }
}

/* A bit for each of the thread's keys in the tile that begins with key j0: whether the block mask
 * keeps it in row r. */
template <class S>
GPU_DEVICE uint32_t wgmma_block_bits(const fattn_gpu_args &g, const mma_item &item, int j0, int r)
{
    const fattn_problem &p = g.problem;
    const gpu_query q = mma_query(item, r);
    if (q.h < 0) {
        return 0;
    }
    const int64_t *const stride = p.block_mask_stride;
    const uint8_t *const row = g.buffers.block_mask + item.pairs.b * stride[0] + q.h * stride[1] +
                               (uint32_t)q.i / (uint32_t)p.block_m * stride[2];
    uint32_t bits = 0;
    GPU_ROLLED
    for (int n = 0; n < S::OWN; n++) {
        const uint32_t key = (uint32_t)(j0 + mma_own<S>() + mma_behind<S>(n));
        if (key < (uint32_t)item.keys && row[key / (uint32_t)p.block_n * stride[3]]) {
            bits |= 1u << n;
        }
    }
    return bits;
}

/* Turns dot products in x into scores, in kernels for a block mask alone. The mask keeps all pairs
 * of the tile or, if it is mixed, some. */
template <class S>
GPU_DEVICE void wgmma_score_blocks(const fattn_gpu_args &g, const mma_item &item, bool mixed,
                                   int block, float x[S::KEYS / 8][4])
{
    float(*const tile)[S::KEYS / 8][4] = (float(*)[S::KEYS / 8][4]) x;
    if (g.rule.terms & FATTN_SCORE_SCALE) {
        GPU_UNROLL
        for (int n = 0; n < S::KEYS / 2; n++) {
            x[n / 4][n % 4] *= g.rule.scale;
        }
    }
    if (mixed) {
        GPU_UNROLL
        for (int h = 0; h < 2; h++) {
            const uint32_t bits = wgmma_block_bits<S>(g, item, block * S::KEYS, mma_row<S>(0, h));
            mma_select<S>(bits, -fattn_f32_infinity(), 0, h, tile);
        }
    }
}

/* wgmma_exceeds_margin() by upper bounds of the scores of the thread's rows. */
template <class S>
GPU_DEVICE bool wgmma_bound_exceeds_margin(float unit, const wgmma_rows<S> &rows,
                                           const float bound[2])
{
    bool exceeds = false;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        exceeds = exceeds || !(bound[h] * unit <= rows.state[h].m * unit + MMA_MARGIN);
    }
    return __any_sync(0xffffffffu, exceeds);
}

/* With ping-pong: waits until this warpgroup may issue products; and lets the next one do so. */
template <class S> GPU_DEVICE void wgmma_ping_pong_begin(const wgmma_block<S> &b, int group)
{
    if (b.ping_pong) {
        wgmma_named_sync(WGMMA_FORWARD_PING_PONG + group, WGMMA_PING_PONG_THREADS);
    }
}

template <class S> GPU_DEVICE void wgmma_ping_pong_end(const wgmma_block<S> &b, int group)
{
    if (b.ping_pong) {
        wgmma_named_arrive(WGMMA_FORWARD_PING_PONG + (group + 1) % S::WARPGROUPS,
                           WGMMA_PING_PONG_THREADS);
    }
}

/* Skips tiles of keys to which none of the warpgroup's rows attends. */
template <class S>
GPU_DEVICE void wgmma_skip(const wgmma_block<S> &b, int tiles, wgmma_used<S> &used)
{
    wgmma_control<S> &control = *b.control;
    for (; tiles > 0; tiles--) {
        wgmma_await(&control.k_full[used.stage(used.k)], used.phase(used.k));
        wgmma_release(&control.k_empty[used.stage(used.k++)]);
        wgmma_await(&control.v_full[used.stage(used.v)], used.phase(used.v));
        wgmma_release(&control.v_empty[used.stage(used.v++)]);
    }
}

/* Visits the tiles of keys to which the warpgroup's rows attend. */
template <class S>
GPU_DEVICE void wgmma_walk(const fattn_gpu_args &g, const wgmma_block<S> &b, int place, int group,
                           int row, wgmma_used<S> &used, wgmma_rows<S> &rows)
{
    typedef typename S::type T;
    wgmma_control<S> &control = *b.control;
    const wgmma_item &w = control.item[place];
    const float unit = wgmma_unit<S>(g);
    const int last_block = w.block, full = w.full[group], full_past = w.full_past[group];
    const uint64_t q = wgmma_descriptor(b.q + group * 64 * 128, 0);
    const uint64_t k = wgmma_descriptor(b.k, 0), v = wgmma_descriptor(b.v, S::KEYS * 128);
    float x[S::KEYS / 8][4], alpha[2], bound[1][2];
    uint32_t p[S::KEYS / 16][4], pairs[S::READS_EARLY ? S::KEYS / 4 : 1];
    int first[2], past[2], block = w.own_past[group] - 1;
    int left = 0; /* how many tiles follow this one, in kernels that skip tiles */
    bool mixed = false;
    wgmma_row_terms known = {{0, 0}, {0, 0}, 1};
    if constexpr (S::IS_STAGED) {
        known.factor = wgmma_own(g.rule.terms & FATTN_SCORE_SCALE ? g.rule.scale : 1);
        wgmma_staged_begin<S>(control.terms[place], wgmma_term_stride<S>(g.problem), row,
                              known.staged);
    }
    const auto read_tile = [&]() {
        if constexpr (S::SKIPS) {
            const int tile = control.tile[used.stage(used.k)];
            block = tile & INT32_MAX;
            mixed = tile < 0;
        }
    };
    if constexpr (S::SKIPS) {
        left = control.tiles[place] - 1;
        wgmma_await(&control.k_full[used.stage(used.k)], used.phase(used.k));
        read_tile();
    }
    if constexpr (S::TESTS_TILES) {
        if (S::KEYS < S::ROWS || !control.bytes[place]) {
            while (left > 0 && mixed) {
                const wgmma_tile_terms<S> s =
                    wgmma_tile_terms_of(g, b, place, block, false, used.terms, known);
                if (!wgmma_is_hidden(s, group)) {
                    break;
                }
                used.terms = wgmma_panels_end(s);
                wgmma_ping_pong_begin(b, group);
                wgmma_ping_pong_end(b, group);
                wgmma_skip(b, 1, used);
                left--;
                wgmma_await(&control.k_full[used.stage(used.k)], used.phase(used.k));
                read_tile();
            }
        }
    }
    const auto ends = [&]() { return S::SKIPS ? left == 0 : block == last_block; };
    int tail = block == w.past - 1 ? w.tail : 0;

    const auto clear = [&]() {
        if (tail) {
            wgmma_clear<S::KEYS, S::PANELS_V>(b.v + used.stage(used.v) * S::VALUE_BYTES, tail,
                                              WGMMA_FORWARD_CLEARED + group);
            tail = 0;
        }
    };

    wgmma_await(&control.k_full[used.stage(used.k)], used.phase(used.k));
    wgmma_ping_pong_begin(b, group);
    wgmma_dots<T, S::WIDTH, S::ROWS, S::KEYS, S::KEYS, false>(
        q, k + used.stage(used.k) * (S::KEY_BYTES >> 4), x);
    wgmma_ping_pong_end(b, group);
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int r = row + mma_lane() / 4 + 8 * h;
        const mma_range keys = mma_band_row(w, wgmma_query(b, r));
        first[h] = keys.first - mma_lane() % 4 * 2;
        past[h] = keys.past - mma_lane() % 4 * 2;
    }
    /* In a tile whose bias is 0, x stays dot products: the scale is applied with the unit. */
    const auto scale = [&]() {
        const bool raw = S::KNOWN == FATTN_BIAS && !mixed;
        return raw ? wgmma_scale{known.factor, unit * known.factor} : wgmma_scale{1, unit};
    };
    const auto end_bias = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS) {
            used.terms =
                wgmma_panels_end(wgmma_tile_terms_of(g, b, place, block, false, used.terms, known));
        }
    };
    /* Reads the bias before the products are issued. */
    const auto read_bias = [&]() {
        if constexpr (S::READS_EARLY) {
            if (mixed) {
                wgmma_each_bias(wgmma_tile_terms_of(g, b, place, block, false, used.terms, known),
                                [&](int n, uint32_t pair) { pairs[n] = pair; });
                end_bias();
            }
        }
    };
    const auto each_bias = [&](auto f) {
        if constexpr (S::READS_EARLY) {
            GPU_UNROLL
            for (int n = 0; n < S::KEYS / 4; n++) {
                f(n, pairs[n]);
            }
        } else {
            wgmma_each_bias(wgmma_tile_terms_of(g, b, place, block, false, used.terms, known), f);
        }
    };
    const auto add_bias = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS) {
            if (mixed) {
                each_bias(
                    [&](int n, uint32_t pair) { wgmma_add_pair<S>(known.factor, n, pair, x); });
            }
        }
    };
    const auto rise = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS) {
            if (mixed && __any_sync(0xffffffffu, wgmma_has_nan<S>(x))) {
                each_bias([&](int n, uint32_t pair) { wgmma_hide_pair<S>(n, pair, x); });
            }
        }
        wgmma_rise<S>(unit, scale(), known.shift, x, rows, alpha);
    };
    /* Releases the bias after rise(), which may read it again. */
    const auto end_terms = [&]() {
        if constexpr (S::KNOWN == FATTN_BIAS && !S::READS_EARLY) {
            if (mixed) {
                end_bias();
            }
        }
    };
    const auto score = [&]() {
        if constexpr (S::HAS_BLOCKS) {
            wgmma_score_blocks<S>(g, control.terms[place], mixed, block, x);
        } else if constexpr (S::KNOWN == FATTN_BIAS) {
            add_bias();
        } else if constexpr (!S::IS_LEAN) {
            wgmma_score(g, b, place, block, S::SKIPS && !mixed, used, known, x, bound);
        }
        if (block >= full_past || block < full) {
            const int j = block * S::KEYS;
            const int from[2] = {first[0] - j, first[1] - j}, to[2] = {past[0] - j, past[1] - j};
            if (block < full) {
                wgmma_keep<S::KEYS>(from, to, x);
            } else {
                wgmma_keep_past<S::KEYS>(to, x);
            }
        }
    };
    const auto drop = [&]() {
        if constexpr (!S::IS_LEAN) {
            if (mma_has<S>(g, FATTN_DROPOUT)) {
                wgmma_drop<S>(g, control.terms[place], row, block * S::KEYS, p);
            }
        }
    };

    read_bias();
    wgmma_wait<0>();
    wgmma_settle<S::KEYS / 8>(x);
    wgmma_release(&control.k_empty[used.stage(used.k++)]);
    if (ends()) {
        wgmma_release(&control.q_empty);
    }
    score();
    rise();
    wgmma_weigh<S>(unit, scale(), known.shift, rows, x);
    wgmma_pack<T, S::KEYS>(x, p);
    drop();
    end_terms();
    GPU_ROLLED
    while (S::SKIPS ? left > 0 : block > last_block) {
        block--;
        left--;
        wgmma_await(&control.k_full[used.stage(used.k)], used.phase(used.k));
        read_tile();
        read_bias();
        wgmma_ping_pong_begin(b, group);
        wgmma_dots<T, S::WIDTH, S::ROWS, S::KEYS, S::KEYS, false>(
            q, k + used.stage(used.k) * (S::KEY_BYTES >> 4), x);
        wgmma_await(&control.v_full[used.stage(used.v)], used.phase(used.v));
        clear();
        wgmma_mix<T, S::KEYS / 16, S::WIDTH_V>(p, v + used.stage(used.v) * (S::VALUE_BYTES >> 4),
                                               rows.o);
        wgmma_ping_pong_end(b, group);
        wgmma_wait<1>();
        wgmma_settle<S::KEYS / 8>(x);
        wgmma_release(&control.k_empty[used.stage(used.k++)]);
        if (ends()) {
            wgmma_release(&control.q_empty);
        }
        score();
        const bool rises = S::KNOWN == FATTN_SOFTCAP
                               ? wgmma_bound_exceeds_margin<S>(unit, rows, bound[0])
                               : wgmma_exceeds_margin<S>(unit, scale(), known.shift, x, rows);
        if (rises) {
            rise();
        }
        wgmma_weigh<S>(unit, scale(), known.shift, rows, x);
        wgmma_wait<0>();
        wgmma_settle<S::WIDTH_V / 8>(rows.o);
        wgmma_release(&control.v_empty[used.stage(used.v++)]);
        wgmma_pack<T, S::KEYS>(x, p);
        drop();
        end_terms();
        if (rises) {
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH_V / 2; n++) {
                rows.o[n / 4][n % 4] *= alpha[n % 4 / 2];
            }
        }
    }
    wgmma_await(&control.v_full[used.stage(used.v)], used.phase(used.v));
    clear();
    wgmma_mix<T, S::KEYS / 16, S::WIDTH_V>(p, v + used.stage(used.v) * (S::VALUE_BYTES >> 4),
                                           rows.o);
    wgmma_wait<0>();
    wgmma_settle<S::WIDTH_V / 8>(rows.o);
    wgmma_release(&control.v_empty[used.stage(used.v++)]);
}

/* Sets up the terms of a warp's rows, of which `row` is the first. */
template <class S>
GPU_DEVICE void wgmma_begin_rows(const fattn_gpu_args &g, const wgmma_block<S> &b, int place,
                                 int row)
{
    if constexpr (S::KNOWN == MMA_ANY || S::KNOWN == FATTN_ALIBI) {
        wgmma_row_terms none = {{0, 0}, {0, 0}, 1};
        wgmma_tile_terms<S> s = wgmma_tile_terms_of(g, b, place, 0, false, 0, none);
        const int r = row + mma_lane();
        __syncwarp(); /* all lanes have read those of the item before */
        if (mma_lane() < 16) {
            mma_begin_row<S>(g, s, mma_query(s.item, r), r);
        }
        __syncwarp();
    }
}

/* The loop of consumer warpgroup `group`. */
template <class S>
GPU_DEVICE void wgmma_work(const fattn_gpu_args &g, const wgmma_block<S> &b, int group)
{
    wgmma_control<S> &control = *b.control;
    const int row = group * 64 + wgmma_thread() / 32 * 16;
    wgmma_used<S> used = {0, 0, 0};
    if (b.ping_pong && group == S::WARPGROUPS - 1) {
        /* The first one begins. */
        wgmma_named_arrive(WGMMA_FORWARD_PING_PONG, WGMMA_PING_PONG_THREADS);
    }
    for (int n = 0;; n++) {
        wgmma_await(&control.item_full[n % WGMMA_ITEMS], n / WGMMA_ITEMS % 2);
        const int place = n % WGMMA_ITEMS;
        const wgmma_item &w = control.item[place];
        if (!w.exists) {
            return;
        }
        float z_kept = 1;
        if constexpr (!S::IS_LEAN) {
            z_kept = control.terms[place].z_kept;
            wgmma_begin_rows(g, b, place, row);
        }
        wgmma_rows<S> rows;
        rows.state[0] = rows.state[1] = fattn_softmax_empty();
        rows.top[0] = rows.top[1] = rows.state[0].m;
        GPU_UNROLL
        for (int c = 0; c < S::WIDTH_V / 2; c++) {
            rows.o[c / 4][c % 4] = 0;
        }
        if constexpr (S::MERGES) {
            wgmma_prefetch_rows(b, w, row);
        }
        wgmma_await(&control.q_full, n % 2);
        if (!S::SKIPS) {
            wgmma_skip<S>(b, w.past - w.own_past[group], used);
        }
        if (w.own_past[group] > w.block) {
            wgmma_walk<S>(g, b, place, group, row, used, rows);
        } else {
            wgmma_release(&control.q_empty);
        }
        wgmma_end(g, b, place, row, z_kept, rows);
        __syncwarp();
        wgmma_release(&control.item_empty[n % WGMMA_ITEMS]);
    }
}

/* --- A block ---------------------------------------------------------------------------------- */

/* If the heads of a group do not divide a tile, no copy writes its last rows of queries, and this
 * sets them to 0. The softcap takes another path for a whole warp if one dot product is large, and
 * that must not depend on the previous contents of shared memory. */
template <class S>
GPU_DEVICE void wgmma_clear_places(const fattn_gpu_args &g, const wgmma_block<S> &b)
{
    if (mma_has<S>(g, FATTN_SOFTCAP)) {
        for (int r = wgmma_places<S>(b.group) + gpu_thread() / 8; r < S::ROWS;
             r += S::THREADS / 8) {
            GPU_UNROLL
            for (int c = 0; c < S::PANELS; c++) {
                wgmma_zero(b.q + (c * S::ROWS + r) * 128 + gpu_thread() % 8 * 16);
            }
        }
        wgmma_publish();
    }
}

/* The kernel. onto: the state with which shapes that merge rows merge the results. */
template <class S>
GPU_DEVICE void wgmma_forward_all(const fattn_gpu_args &g, const wgmma_map *maps,
                                  const fattn_merge_job *onto)
{
    static_assert(sizeof(wgmma_control<S>) <= WGMMA_CONTROL +
                                                  WGMMA_TERM_CONTROL(S::KNOWN, S::ROWS) +
                                                  (S::IS_SPLIT ? WGMMA_SPLIT_CONTROL : 0),
                  "too small");
    static_assert(S::OWN_REGISTERS % 8 == 0 && S::COPY_REGISTERS >= 24, "as setmaxnreg wants them");
    extern __shared__ char shared[];
    wgmma_block<S> b;
    b.q = (mma_shared(shared) + WGMMA_ALIGN - 1) & ~(WGMMA_ALIGN - 1u);
    b.k = b.q + S::QUERY_BYTES;
    b.v = b.k + S::RING * S::KEY_BYTES;
    b.terms = b.v + S::RING * S::VALUE_BYTES;
    b.out = b.terms + S::TERM_RING * S::TERM_BYTES;
    b.control =
        (wgmma_control<S> *)(shared + (b.out + S::WARPS * WGMMA_OUT_BYTES - mma_shared(shared)));
    b.group = wgmma_group_of(g.problem);
    b.ping_pong = wgmma_ping_pongs<S>(g.problem, b.group);
    b.onto = onto;
    wgmma_control<S> &control = *b.control;
    const bool paged = g.problem.features & FATTN_PAGED;
    const int piece = paged ? (int)WGMMA_PIECE((int)g.problem.page_size, S::KEYS) : S::KEYS;
    const bool apart = S::PANELS * (S::KEYS / piece) >= WGMMA_COPIES_APART;
    if (gpu_thread() == 0) {
        for (int n = 0; n < WGMMA_ITEMS; n++) {
            wgmma_barrier_make(&control.item_full[n], 1);
            wgmma_barrier_make(&control.item_empty[n], S::WARPS + 1 + S::IS_STAGED + apart);
        }
        wgmma_barrier_make(&control.item_wanted, 1);
        wgmma_barrier_make(&control.q_full, 1);
        wgmma_barrier_make(&control.q_empty, S::WARPS);
        for (int n = 0; n < S::RING; n++) {
            wgmma_barrier_make(&control.k_full[n], 1);
            wgmma_barrier_make(&control.k_empty[n], S::WARPS);
            wgmma_barrier_make(&control.v_full[n], 1);
            wgmma_barrier_make(&control.v_empty[n], S::WARPS);
        }
        if constexpr (S::IS_STAGED) {
            for (int n = 0; n < S::TERM_RING; n++) {
                wgmma_barrier_make(&control.term_full[n], 1);
                wgmma_barrier_make(&control.term_empty[n], S::WARPS);
            }
        }
        wgmma_barriers_made();
    }
    if constexpr (!S::IS_LEAN) {
        wgmma_clear_places(g, b);
    }
    if (S::IS_SPLIT) {
        gpu_admit_later(); /* the kernel that merges parts */
    }
    gpu_sync();
    const int group = wgmma_group();
    if (group == 0) {
        wgmma_give_registers<S::COPY_REGISTERS>();
        static_assert(WGMMA_COPIER == 0, "its threads are the block's first");
        if (gpu_thread() < (paged ? GPU_WAVE : 1)) {
            wgmma_prefetch(maps);
            wgmma_prefetch(maps + 1);
            wgmma_prefetch(maps + 2);
            gpu_await_earlier();
            if (paged) {
                wgmma_copy_all<S, true>(g, maps, b, true, !apart);
            } else {
                wgmma_copy_all<S, false>(g, maps, b, true, true);
            }
        } else if (gpu_thread() / GPU_WAVE == WGMMA_PLANNER) {
            gpu_await_earlier();
            wgmma_plan(g, b);
        } else if (gpu_thread() / GPU_WAVE == WGMMA_VALUE_COPIER && apart) {
            gpu_await_earlier();
            wgmma_copy_all<S, true>(g, maps, b, false, true);
        }
        if constexpr (S::IS_STAGED) {
            if (gpu_thread() == GPU_WAVE * WGMMA_STAGER) {
                wgmma_prefetch(maps + 3);
                gpu_await_earlier();
                wgmma_stage_all(g, maps + 3, b);
            }
        }
    } else {
        wgmma_take_registers<S::OWN_REGISTERS>();
        wgmma_work(g, b, group - 1);
    }
}

#endif
