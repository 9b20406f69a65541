/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A block of the forward on matrix units: its shape, the item that it works on, a lane's state of
 * its row, how the row's dot products become scores with every feature, and dropout.
 *
 * A lane has SUMS keys of each SIDE keys of a tile: key j0 + t * SIDE + matrix_row(r) is x[t][r].
 */
#ifndef FATTN_HIP_MATRIX_TERMS_CUH
#define FATTN_HIP_MATRIX_TERMS_CUH

#include "backends/gpu/pairs.cuh"
#include "backends/gpu/parts.cuh"
#include "backends/hip/matrix.cuh"
#include "backends/hip/matrix.h"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* T: matrix_f16 or matrix_bf16. W: channels of q, k and v, padded. R, N: rows and keys of a tile.
 * H: whether registers hold the queries. */
template <class T, int W, int R, int N, bool H, bool LEAN> struct matrix_shape {
    typedef T type;
    enum {
        SIDE = MATRIX_MFMA ? 32 : 16, /* rows per wave */
        WIDTH = W,
        ROWS = R,
        KEYS = N,
        HELD = H,
        IS_LEAN = LEAN,
        /* How many products ahead operands are loaded: as registers allow, and never timed. */
        AHEAD = MATRIX_MFMA ? 4
                : LEAN      ? 2
                            : 1,
        WAVES = R / SIDE,
        THREADS = WAVES * GPU_WAVE,
        DEPTH = matrix<SIDE>::DEPTH,
        SUMS = matrix<SIDE>::SUMS,
        TILES = N / SIDE,    /* tiles of scores */
        HEIGHT = W / SIDE,   /* tiles of o */
        STEPS = W / DEPTH,   /* operands that are summed for scores */
        STEPS_O = N / DEPTH, /* operands that are summed for o */
        VALUES = N * W,      /* the first element of values in LDS, after the keys */
        QUERIES = 2 * N * W,
        ELEMENTS = QUERIES + (H ? 0 : R * W)
    };
    typedef typename matrix<SIDE>::sums sums;
};

/* The item that a block works on. Keys and tiles of keys are below 2^31. */
typedef struct matrix_item {
    gpu_pairs pairs;
    int64_t hk, group;
    int64_t first, i0, i1; /* rows of the group; queries i0 .. i1 - 1 */
    int rows, split;
    int whole;           /* its part is the only one */
    float z_kept;        /* Z of a pair that dropout keeps; pairs.dropout has 1 instead */
    int keys;            /* of the sequence */
    int block, past;     /* tiles of keys block .. past - 1 of the part */
    int full, full_past; /* tiles whose pairs are all inside the band */
} matrix_item;

/* The terms of a row. */
template <bool LEAN> struct matrix_row_terms {
    int64_t bias, mask;    /* element of key 0 */
    float slope, distance; /* of ALiBi; distance: of the lane's first pair from the item's first */
};
template <> struct matrix_row_terms<true> {
};

/* A lane's row. A row that does not exist has the query of the item's last row. */
template <class S> struct matrix_rows : matrix_row_terms<S::IS_LEAN> {
    gpu_query query;
    bool exists;
    int32_t first, past;                           /* the keys in its band */
    fattn_softmax state;                           /* l: over the lane's own keys */
    float top;                                     /* the largest score of the row */
    typename S::sums o[S::HEIGHT];                 /* [channel][row] */
    matrix_operand q[S::HELD ? (int)S::STEPS : 1]; /* the wave's queries */
};

/* The first row of the wave in the item. */
template <class S> GPU_DEVICE int matrix_top(void) { return matrix_thread() / GPU_WAVE * S::SIDE; }

GPU_DEVICE gpu_query matrix_query_of(const matrix_item &w, int r)
{
    const uint32_t group = (uint32_t)w.group;
    const uint32_t number = (uint32_t)(w.first - w.i0 * w.group) + (uint32_t)r;
    gpu_query q;
    q.i = (int32_t)(w.i0 + number / group);
    q.h = (int32_t)(w.hk * group + number % group);
    return q;
}

/* Moves fields that are uniform, although the compiler cannot know it, to scalar registers. */
GPU_DEVICE void matrix_item_uniform(matrix_item &w)
{
    fattn_sequence &seq = w.pairs.seq;
    fattn_band &band = w.pairs.band;
    int64_t *const wide[] = {&seq.q_row,      &seq.k_row,      &seq.q_batch, &seq.k_batch,
                             &seq.q_position, &seq.k_position, &seq.sq,      &band.keys,
                             &band.diagonal,  &w.first,        &w.i0,        &w.i1};
    int *const words[] = {&w.rows, &w.whole, &w.keys, &w.block, &w.past, &w.full, &w.full_past};
    GPU_UNROLL
    for (int64_t *const field : wide) {
        *field = gpu_uniform(*field);
    }
    GPU_UNROLL
    for (int *const field : words) {
        *field = gpu_uniform(*field);
    }
}

/* The description of item `number`. */
template <class S> GPU_DEVICE matrix_item matrix_item_of(const fattn_gpu_args &g, int64_t number)
{
    const fattn_problem &p = g.problem;
    const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, number);
    matrix_item w;
    w.pairs = gpu_pairs_of(g, work.batch);
    w.z_kept = 1;
    if (p.features & FATTN_DROPOUT) {
        w.z_kept = gpu_dropout_take(w.pairs.dropout);
    }
    w.first = gpu_item_set(g, work, S::ROWS, S::KEYS, w);
    w.keys = (int)w.pairs.seq.sk;
    const fattn_range top = fattn_band_row(&w.pairs.band, w.i0);
    const fattn_range bottom = fattn_band_row(&w.pairs.band, w.i1 - 1);
    w.full = (int)gpu_clamp((bottom.first + S::KEYS - 1) / S::KEYS, 0, INT32_MAX);
    w.full_past = (int)gpu_clamp(top.past / S::KEYS, 0, INT32_MAX);
    matrix_item_uniform(w);
    return w;
}

/* Whether the block mask keeps any pair of the item and the tile of keys. */
template <class S>
GPU_DEVICE bool matrix_block_kept(const fattn_gpu_args &g, const matrix_item &w, int block)
{
    const int64_t j0 = (int64_t)block * S::KEYS, j1 = fattn_min64(j0 + S::KEYS, w.keys);
    return matrix_any(gpu_mask_blocks_of(g, w.pairs, w.i0, w.i1, w.hk * w.group, w.group, j0, j1,
                                         matrix_lane(), GPU_WAVE)
                          .kept);
}

/* The first tile from `block` on that the block mask does not hide, or w.past. */
template <class S>
GPU_DEVICE int matrix_next(const fattn_gpu_args &args, const matrix_item &w, int block)
{
    if constexpr (!S::IS_LEAN) {
        const fattn_gpu_args &g = gpu_anew(args);
        if (g.problem.features & FATTN_BLOCK_MASK) {
            while (block < w.past && !matrix_block_kept<S>(g, w, block)) {
                block++;
            }
        }
    }
    return block;
}

/* The end of the item's tiles from `block` on, without the last ones that a bias hides. */
template <class S>
GPU_DEVICE int matrix_visible_past(const fattn_gpu_args &args, const matrix_item &w, int block)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int64_t keys = fattn_min64((int64_t)w.past * S::KEYS, w.keys);
    const int64_t past = gpu_visible_past(g, w.pairs, w.i0, w.i1, w.hk * w.group, w.group,
                                          (int64_t)block * S::KEYS, keys);
    return gpu_uniform((int)((past + S::KEYS - 1) / S::KEYS));
}

/* --- A lane's elements ------------------------------------------------------------------------ */

/* Calls visit(element, j) for the lane's elements; j: the key, relative to the lane's first. */
template <class S, class Visit>
GPU_DEVICE void matrix_each(typename S::sums x[S::TILES], Visit visit)
{
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        GPU_UNROLL
        for (int r = 0; r < S::SUMS; r++) {
            float element = x[t][r];
            visit(element, t * S::SIDE + matrix_row_step<S::SIDE>(r));
            x[t][r] = element;
        }
    }
}

/* The lane's first key in the tile that begins with key j0. */
template <class S> GPU_DEVICE int matrix_first_key(int j0)
{
    return j0 + matrix_row_first<S::SIDE>();
}

/* The sum of the elements of a vector, by halving. */
template <int N, class V> GPU_DEVICE float matrix_total(V x)
{
    if constexpr (N == 2) {
        return x[0] + x[1];
    } else {
        return matrix_total<N / 2>(x.lo + x.hi);
    }
}

/* Eight of the lane's sums of o, from 8 n on, rounded, as an argument of matrix_put_sums(). */
template <class S> GPU_DEVICE matrix_operand matrix_round_o(const typename S::sums *x, int n)
{
    uint32_t pair[4];
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        const int at = 8 * n + 2 * e;
        pair[e] = S::type::pack(x[at / S::SUMS][at % S::SUMS], x[at / S::SUMS][at % S::SUMS + 1]);
    }
    return matrix_as_operand(pair);
}

/* Stores channels c .. c + 7 of a row that begins at `row`, if they are below dim. */
GPU_DEVICE void matrix_store(uint16_t *row, int c, int dim, matrix_four x)
{
    uint16_t *const to = row + c;
    if (c + 8 <= dim && (uintptr_t)to % 16 == 0) {
        matrix_put(to, x);
        return;
    }
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        if (c + e < dim) {
            to[e] = (uint16_t)(x[e / 2] >> 16 * (e % 2));
        }
    }
}

/* --- Scores ----------------------------------------------------------------------------------- */

/* Turns dot products in x into scores, in lean kernels. */
template <class S>
GPU_DEVICE void matrix_score(const fattn_gpu_args &args, typename S::sums x[S::TILES])
{
    if (args.rule.terms) { /* a scale that cannot be folded into the unit */
        const float scale = gpu_anew(gpu_anew(args).rule.scale);
        GPU_UNROLL
        for (int t = 0; t < S::TILES; t++) {
            x[t] *= scale;
        }
    }
}

/* Sets scores of pairs outside the band to -inf. */
template <class S>
GPU_DEVICE void matrix_apply_band(const matrix_rows<S> &rows, int j0, typename S::sums x[S::TILES])
{
    const int first_key = matrix_first_key<S>(j0), first = rows.first - first_key,
              past = rows.past - first_key;
    matrix_each<S>(x, [&](float &score, int j) {
        score = first <= j && j < past ? score : -fattn_f32_infinity();
    });
}

/* Sets up the terms of the row. */
template <class S>
GPU_DEVICE void matrix_begin_terms(const fattn_gpu_args &g, const matrix_item &w,
                                   matrix_rows<S> &rows)
{
    const fattn_problem &p = g.problem;
    rows.bias = rows.mask = 0;
    rows.slope = rows.distance = 0;
    if (p.features & FATTN_BIAS) {
        rows.bias = gpu_term_at(w.pairs, p.bias_stride, rows.query, 0);
    }
    if (p.features & FATTN_MASK) {
        rows.mask = gpu_term_at(w.pairs, p.mask_stride, rows.query, 0);
    }
    if (p.features & FATTN_ALIBI) {
        const float *const slopes = (const float *)g.buffers.alibi_slopes;
        rows.slope = slopes[w.pairs.b * p.alibi_batch_stride + rows.query.h];
        rows.distance = (float)((int)(rows.query.i - w.i0) - matrix_first_key<S>(0));
    }
}

/* x = factor x + bias. Keys past the last one read the bias of the last. */
template <class S, class Bias>
GPU_DEVICE void matrix_bias(const fattn_gpu_args &g, const matrix_item &w,
                            const matrix_rows<S> &rows, int j0, float factor,
                            typename S::sums x[S::TILES], Bias bias)
{
    const int first_key = matrix_first_key<S>(j0), last = w.keys - 1;
    const int64_t stride = g.problem.bias_stride[3];
    matrix_each<S>(x, [&](float &score, int j) {
        const int key = first_key + j < last ? first_key + j : last;
        score = fattn_score_biased(score * factor, bias(rows.bias + key * stride));
    });
}

/* Sets bit r of word t to keeps(key of x[t][r]). */
template <class S, class Keeps>
GPU_DEVICE void matrix_bits(int j0, uint32_t bits[S::TILES], Keeps keeps)
{
    const int first_key = matrix_first_key<S>(j0);
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        bits[t] = 0;
    }
    GPU_ROLLED
    for (int r = 0; r < S::SUMS; r++) {
        GPU_UNROLL
        for (int t = 0; t < S::TILES; t++) {
            bits[t] |= (uint32_t)keeps(first_key + t * S::SIDE + matrix_row_step<S::SIDE>(r)) << r;
        }
    }
}

template <class S>
GPU_DEVICE void matrix_select(const uint32_t bits[S::TILES], float other,
                              typename S::sums x[S::TILES])
{
    GPU_UNROLL
    for (int n = 0; n < S::TILES * S::SUMS; n++) {
        const int t = n / S::SUMS, r = n % S::SUMS;
        x[t][r] = bits[t] >> r & 1 ? x[t][r] : other;
    }
}

/* Turns dot products in x into scores, term by term, except for the band. */
template <class S>
GPU_DEVICE void matrix_terms(const fattn_gpu_args &args, const matrix_item &w,
                             const matrix_rows<S> &rows, int j0, typename S::sums x[S::TILES])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const unsigned terms = g.rule.terms;
    const fattn_problem &p = g.problem;
    const int first_key = matrix_first_key<S>(j0), last = w.keys - 1;
    float factor = terms & FATTN_SCORE_SCALE ? g.rule.scale : 1; /* not yet applied to x */
    if (terms & FATTN_SCORE_CAP) {
        matrix_each<S>(x, [&](float &score, int) {
            float dscore;
            score = fattn_score_cap(&g.rule, score * factor, &dscore);
        });
        factor = 1;
    }
    if (terms & FATTN_SCORE_BIAS) {
        const void *const bias = g.buffers.bias;
        if (p.dtype_bias == FATTN_F32) {
            matrix_bias<S>(g, w, rows, j0, factor, x,
                           [&](int64_t at) { return ((const float *)bias)[at]; });
        } else {
            matrix_bias<S>(g, w, rows, j0, factor, x, [&](int64_t at) {
                return gpu_widen(p.dtype_bias, ((const uint16_t *)bias)[at]);
            });
        }
        factor = 1;
    }
    if (terms & FATTN_SCORE_ALIBI) {
        /* Integers are subtracted, so that distances up to 2^24 are exact at any position. The
         * difference is converted in two halves, as there is no conversion of 64 bits. The product
         * is fused, so that the -inf of a hidden pair stays. */
        const int64_t item = w.i0 + w.pairs.band.diagonal - j0;
        const float high = (float)(int)(item >> 24), low = (float)(int)(item & 0xffffff);
        const float distance = fmaf(high, 0x1p24f, low) + rows.distance;
        matrix_each<S>(x, [&](float &score, int j) {
            score = fmaf(-rows.slope, fv_abs(distance - (float)j), score * factor);
        });
        factor = 1;
    }
    if (factor != 1) {
        const float copy = gpu_anew(factor);
        GPU_UNROLL
        for (int t = 0; t < S::TILES; t++) {
            x[t] *= copy;
        }
    }
    if (p.features & FATTN_MASK) {
        const uint8_t *const mask = g.buffers.mask;
        matrix_each<S>(x, [&](float &score, int j) {
            const int key = first_key + j < last ? first_key + j : last;
            score = mask[rows.mask + key * p.mask_stride[3]] ? score : -fattn_f32_infinity();
        });
    }
    if (p.features & FATTN_BLOCK_MASK) {
        uint32_t bits[S::TILES];
        matrix_bits<S>(j0, bits, [&](int j) {
            return gpu_block_keeps(g, w.pairs, rows.query, j < last ? j : last);
        });
        matrix_select<S>(bits, -fattn_f32_infinity(), x);
    }
}

/* Sets weights in x that dropout drops to 0. o is multiplied by Z at the end, because weights times
 * Z might overflow. */
template <class S>
GPU_DEVICE void matrix_drop(const fattn_gpu_args &args, const matrix_item &w,
                            const matrix_rows<S> &rows, int j0, typename S::sums x[S::TILES])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_pairs &t = w.pairs;
    const fattn_dropout_rows row = fattn_dropout_rows_at(
        t.seq.q_position, (uint32_t)rows.query.i, (uint32_t)(g.problem.batch_offset + t.b),
        (uint32_t)(g.problem.head_offset + rows.query.h));
    uint32_t bits[S::TILES];
    matrix_bits<S>(j0, bits, [&](int j) {
        return fattn_dropout_at(&t.dropout, row, t.seq.k_position + j) != 0;
    });
    matrix_select<S>(bits, 0, x);
}

/* Adds the sink to the first part, and returns the factor by which to multiply its sums. The sink
 * comes last: as the reference of the row it might make all other weights underflow. */
GPU_DEVICE float matrix_add_sink(const fattn_gpu_args &g, const matrix_item &w, gpu_query q,
                                 fattn_softmax *state)
{
    float alpha, beta;
    if (!(g.problem.features & FATTN_SINK) || w.split != 0) {
        return 1;
    }
    const fattn_softmax sink = fattn_softmax_sink(((const float *)g.buffers.sink)[q.h]);
    fattn_softmax_merge(state, sink, g.rule.unit, &alpha, &beta);
    return alpha;
}

#endif
