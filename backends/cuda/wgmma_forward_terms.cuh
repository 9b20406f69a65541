/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The terms of a tile in forward on Hopper (wgmma_forward.cuh): how dot products become scores, and
 * how a bias or mask is read that the stager has copied to shared memory.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_TERMS_CUH
#define FATTN_CUDA_WGMMA_FORWARD_TERMS_CUH

#include "backends/cuda/wgmma_forward_items.cuh"

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

/* The terms of tile `block` of keys. plain: as in wgmma_tile_terms. known: the terms of the
 * thread's rows. */
template <class S>
GPU_DEVICE wgmma_tile_terms<S> wgmma_tile_terms_of(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                                   int slot, int block, bool plain, int panel,
                                                   wgmma_row_terms &known)
{
    wgmma_control<S> &control = *b.control;
    wgmma_tile_terms<S> s = {control.terms[slot],
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

/* Sets up the terms of a warp's rows, of which `row` is the first. */
template <class S>
GPU_DEVICE void wgmma_begin_rows(const fattn_gpu_args &g, const wgmma_block<S> &b, int slot,
                                 int row)
{
    if constexpr (S::KNOWN == MMA_ANY || S::KNOWN == FATTN_ALIBI) {
        wgmma_row_terms none = {{0, 0}, {0, 0}, 1};
        wgmma_tile_terms<S> s = wgmma_tile_terms_of(g, b, slot, 0, false, 0, none);
        const int r = row + mma_lane();
        __syncwarp(); /* all lanes have read those of the item before */
        if (mma_lane() < 16) {
            mma_begin_row<S>(g, s, mma_query(s.item, r), r);
        }
        __syncwarp();
    }
}

/* --- A staged bias or mask -------------------------------------------------------------------- */

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

/* --- Scores ----------------------------------------------------------------------------------- */

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
GPU_DEVICE void wgmma_score(const fattn_gpu_args &g, const wgmma_block<S> &b, int slot, int block,
                            bool plain, wgmma_used<S> &used, wgmma_row_terms &known,
                            float x[S::KEYS / 8][4], float bound[1][2])
{
    const wgmma_tile_terms<S> s = wgmma_tile_terms_of(g, b, slot, block, plain, used.terms, known);
    if constexpr (S::KNOWN == FATTN_MASK) {
        wgmma_add_mask(s, x);
        used.terms = s.plain ? used.terms : wgmma_panels_end(s);
    } else {
        if (mma_has<S>(g, FATTN_SOFTCAP)) {
            wgmma_zero_past<S>(s.item.keys, s.j0, x);
        }
        mma_terms<S>(g, s, s.j0, (float(*)[S::KEYS / 8][4]) x, bound);
        mma_prefetch_bias<S>(g, s, block - 1, block > b.control->item[slot].block ? block : 0);
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

#endif
