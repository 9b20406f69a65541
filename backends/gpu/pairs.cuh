/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything besides the dot product that the score of a pair of query and key depends on: bias,
 * distance, masks, dropout. A feature that a run does not have costs a uniform branch.
 *
 * The rows of a key/value head are numbered r = i * group + g, over the queries i of a sequence and
 * the query heads g that share the key/value head. So all rows of a tile read the same keys.
 */
#ifndef FATTN_GPU_PAIRS_CUH
#define FATTN_GPU_PAIRS_CUH

#include "backends/gpu/element.cuh"
#include "backends/gpu/sequence.cuh"
#include "core/schedule.h"

/* A query of a tile: its position i in the sequence and its head h, -1 for a row that does not
 * exist. */
typedef struct gpu_query {
    int32_t i, h;
} gpu_query;

/* Row `number` of the group of query heads from h0 on. */
GPU_DEVICE gpu_query gpu_query_of(int64_t number, int64_t group, int64_t h0)
{
    gpu_query q;
    q.i = (int32_t)fattn_quotient(number, group);
    q.h = (int32_t)(h0 + number - q.i * group);
    return q;
}

/* The state that all pairs of a sequence share. */
typedef struct gpu_pairs {
    int64_t b;
    fattn_sequence seq;
    fattn_band band;
    fattn_dropout dropout;
} gpu_pairs;

GPU_DEVICE gpu_pairs gpu_pairs_of(const fattn_gpu_args &g, int64_t b)
{
    gpu_pairs t;
    t.b = b;
    t.seq = gpu_sequence(g, b);
    t.band = fattn_band_of(&g.problem, &t.seq);
    if (g.problem.features & FATTN_DROPOUT) {
        t.dropout = gpu_dropout(g);
    }
    return t;
}

/* Returns dropout's multiplier Z and replaces it by 1, for kernels that multiply whole rows by Z
 * and pairs by 1 or 0. */
GPU_DEVICE float gpu_dropout_take(fattn_dropout &dropout)
{
    const float z = dropout.multiplier;
    dropout.multiplier = z == 0 ? 0 : 1;
    return z;
}

/* The queries first .. past - 1 that attend to any of the keys j0 .. j1 - 1. */
GPU_DEVICE fattn_range gpu_queries_of(const gpu_pairs &t, int64_t j0, int64_t j1)
{
    return fattn_band_queries(&t.band, t.seq.sq, j0, j1);
}

/* Element (i, j) of a term with strides (batch, head, query, key). */
GPU_DEVICE int64_t gpu_term_at(const gpu_pairs &t, const int64_t stride[4], gpu_query q, int64_t j)
{
    return t.b * stride[0] + q.h * stride[1] + q.i * stride[2] + j * stride[3];
}

/* Whether the block mask keeps a pair that exists. */
GPU_DEVICE bool gpu_block_keeps(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q, int64_t j)
{
    const fattn_problem &p = g.problem;
    gpu_query block = q;
    block.i = q.i / (int32_t)p.block_m;
    const int64_t at = gpu_term_at(t, p.block_mask_stride, block, (int32_t)j / (int32_t)p.block_n);
    return g.buffers.block_mask[at] != 0;
}

/* Whether the masks keep a pair that exists. */
GPU_DEVICE bool gpu_masks_keep(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q, int64_t j)
{
    const fattn_problem &p = g.problem;
    bool keep = true;
    if (p.features & FATTN_MASK) {
        keep = g.buffers.mask[gpu_term_at(t, p.mask_stride, q, j)] != 0;
    }
    return keep && (!(p.features & FATTN_BLOCK_MASK) || gpu_block_keeps(g, t, q, j));
}

/* The terms of the score of query q and key j. Nothing is read for a pair that does not exist. */
GPU_DEVICE fattn_score_pair gpu_pair(const fattn_gpu_args &g, const gpu_pairs &t, unsigned terms,
                                     gpu_query q, int64_t j)
{
    const fattn_problem &p = g.problem;
    const bool exists = q.h >= 0 && j < t.seq.sk;
    fattn_score_pair pair;
    pair.bias = pair.slope = pair.distance = 0;
    pair.keep = true;
    if (terms & FATTN_SCORE_BIAS && exists) {
        pair.bias = gpu_load(g.buffers.bias, p.dtype_bias, gpu_term_at(t, p.bias_stride, q, j));
    }
    if (terms & FATTN_SCORE_ALIBI && exists) {
        const float *const slopes = (const float *)g.buffers.alibi_slopes;
        pair.slope = slopes[t.b * p.alibi_batch_stride + q.h];
        pair.distance = fv_abs((float)(q.i + t.band.diagonal - j));
    }
    if (terms & FATTN_SCORE_KEEP) {
        const fattn_range keys = fattn_band_row(&t.band, q.i);
        pair.keep = exists && keys.first <= j && j < keys.past && gpu_masks_keep(g, t, q, j);
    }
    return pair;
}

/* Dropout's multipliers z of query q and the N keys from j on. One call of the generator serves two
 * adjacent keys, the first at an even position. */
template <int N>
GPU_DEVICE void gpu_drop(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q, int64_t j,
                         float *z)
{
    const fattn_dropout_rows row = fattn_dropout_rows_at(t.seq.q_position, (uint32_t)q.i,
                                                         (uint32_t)(g.problem.batch_offset + t.b),
                                                         (uint32_t)(g.problem.head_offset + q.h));
    const int64_t key = t.seq.k_position + j;
    if (N % 2 || key % 2) {
        for (int n = 0; n < N; n++) {
            z[n] = fattn_dropout_at(&t.dropout, row, key + n);
        }
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < N; n += 2) {
        uint32_t words[4];
        fattn_dropout_words(&t.dropout, row, key + n, words);
        const uint32_t first = (key + n) & 8 ? words[1] : words[0];
        const uint32_t second = (key + n) & 8 ? words[3] : words[2];
        const uint32_t word = fattn_dropout_pick(row, first, second);
        z[n] = fattn_dropout_multiplier(&t.dropout, word, 0);
        z[n + 1] = fattn_dropout_multiplier(&t.dropout, word, 1);
    }
}

/* Whether a thread has found entries of the block mask that keep pairs, and entries that drop
 * them. */
typedef struct gpu_mask_blocks {
    bool kept, dropped;
} gpu_mask_blocks;

/* Searches the block mask for entries that keep, and that drop, pairs of queries i0 .. i1 - 1 of
 * `heads` heads from h0 on and keys j0 .. j1 - 1. Thread `thread` of `threads` returns what it
 * finds in its share of the entries, whose number fits an N. */
template <class N>
GPU_DEVICE gpu_mask_blocks gpu_mask_blocks_of(const fattn_gpu_args &g, const gpu_pairs &t,
                                              int64_t i0, int64_t i1, int64_t h0, N heads,
                                              int64_t j0, int64_t j1, uint32_t thread,
                                              uint32_t threads)
{
    const int64_t *const stride = g.problem.block_mask_stride;
    const uint32_t m = (uint32_t)g.problem.block_m, n = (uint32_t)g.problem.block_n;
    const uint32_t row0 = (uint32_t)i0 / m, rows = (uint32_t)(i1 - 1) / m + 1 - row0;
    const uint32_t key0 = (uint32_t)j0 / n, columns = (uint32_t)(j1 - 1) / n + 1 - key0;
    const uint8_t *from = g.buffers.block_mask + t.b * stride[0] + h0 * stride[1] +
                          row0 * stride[2] + key0 * stride[3];
    gpu_mask_blocks found = {false, false};
    for (N e = (N)thread; e < (N)(heads * rows * columns); e += (N)threads) {
        const N row = sizeof(N) == 4 ? e / columns : (N)fattn_quotient(e, columns);
        const N head = sizeof(N) == 4 && heads == 1 ? 0 : (N)fattn_quotient(row, rows);
        const bool keeps = from[head * stride[1] + (row - head * rows) * stride[2] +
                                (e - row * columns) * stride[3]] != 0;
        found.kept = found.kept || keeps;
        found.dropped = found.dropped || !keeps;
    }
    return found;
}

/* --- Keys that a bias of -inf hides ----------------------------------------------------------- */

/* Searches a bias, `rows` rows of `columns` units from `from` on, for entries other than -inf. A
 * unit is 16 bytes if CHUNKS, or else one element. hidden: the bits of -inf, twice for 16-bit
 * types. Calls found(r, c) for each unit c of row r in which this thread finds one, for the last
 * row perhaps more than once. The block's threads share the rows, and each has several loads in
 * flight. */
template <bool CHUNKS, class Found>
GPU_DEVICE void gpu_search_rows(const char *from, uint32_t rows, uint32_t columns, int size,
                                const int64_t stride[4], uint32_t hidden, const Found &found)
{
    enum { READS = 4 };
    const uint32_t threads = (uint32_t)gpu_threads(), thread = (uint32_t)gpu_thread_anew();
    const uint32_t lanes = columns < threads ? columns : threads, step = threads / lanes;
    const int64_t across = CHUNKS ? 16 : size * stride[3], down = size * stride[2];
    for (uint32_t c = thread % lanes; c < columns; c += lanes) {
        for (uint32_t r = thread / lanes; r < rows; r += READS * step) {
            gpu_u4 x[READS];
            GPU_UNROLL
            for (int n = 0; n < READS; n++) {
                const char *const at =
                    from + c * across + fattn_min64(r + n * step, rows - 1) * down;
                if (CHUNKS) {
                    x[n] = *(const gpu_u4 *)at;
                } else {
                    x[n].x = size == 4 ? *(const uint32_t *)at : *(const uint16_t *)at * 65537u;
                    x[n].y = x[n].z = x[n].w = hidden;
                }
            }
            GPU_UNROLL
            for (int n = 0; n < READS; n++) {
                if ((x[n].x ^ hidden) | (x[n].y ^ hidden) | (x[n].z ^ hidden) | (x[n].w ^ hidden)) {
                    found((int)fattn_min64(r + n * step, rows - 1), (int)c);
                }
            }
        }
    }
}

/* Calls found(i, j) wherever this thread finds a bias other than -inf among queries i0 .. i1 - 1 of
 * heads h0 .. h0 + group - 1 and keys j0 .. j1 - 1: it belongs to query i0 + i and to one of the
 * keys from j0 + j to the next multiple of 8. Queries or heads that share a bias are searched
 * once. */
template <class Found>
GPU_DEVICE void gpu_find_visible(const fattn_gpu_args &g, const gpu_pairs &t, int64_t i0,
                                 int64_t i1, int64_t h0, int64_t group, int64_t j0, int64_t j1,
                                 const Found &found)
{
    const fattn_dtype dtype = g.problem.dtype_bias;
    const int64_t *const stride = g.problem.bias_stride;
    const int size = dtype == FATTN_F32 ? 4 : 2, chunk = size == 4 ? 2 : 3; /* log2 of its keys */
    const uint32_t hidden = dtype == FATTN_F32   ? 0xff800000u
                            : dtype == FATTN_F16 ? 0xfc00fc00u
                                                 : 0xff80ff80u;
    gpu_query q;
    q.i = (int32_t)i0, q.h = (int32_t)h0;
    const char *from = (const char *)g.buffers.bias + size * gpu_term_at(t, stride, q, j0);
    const bool chunks = stride[3] == 1 && (j0 | (j1 - j0)) % 8 == 0 &&
                        (((int64_t)from | size * stride[1] | size * stride[2]) & 15) == 0;
    const uint32_t heads = stride[1] ? (uint32_t)group : 1, columns = (uint32_t)(j1 - j0);
    const uint32_t rows = stride[2] ? (uint32_t)(i1 - i0) : 1;
    for (uint32_t h = 0; h < heads; h++, from += size * stride[1]) {
        if (chunks) {
            gpu_search_rows<true>(from, rows, columns >> chunk, size, stride, hidden,
                                  [&](int r, int c) { found(r, c << chunk); });
        } else {
            gpu_search_rows<false>(from, rows, columns, size, stride, hidden, found);
        }
    }
}

/* The largest x, 0 .. most, of the block's threads, all of which must call it. A binary search. */
GPU_DEVICE int gpu_largest(int x, int most)
{
    int least = 0;
    while (least < most) {
        const int middle = least + (most - least) / 2;
        if (gpu_any(x > middle)) {
            least = middle + 1;
        } else {
            most = middle;
        }
    }
    return least;
}

/*
 * Cuts off the last of keys first .. past - 1 that a bias of -inf hides from all rows of a tile, as
 * a causal mask given as a bias does. Returns the new end: a multiple of 64, or first or past. If
 * the bias hides nothing there, all threads read the same one element of it. Otherwise they search
 * the last row, and then the other rows behind that row's last key. All threads of the block must
 * call it.
 */
GPU_DEVICE int64_t gpu_visible_past(const fattn_gpu_args &g, const gpu_pairs &t, int64_t i0,
                                    int64_t i1, int64_t h0, int64_t group, int64_t first,
                                    int64_t past)
{
    enum { UNIT = 64 };
    const fattn_problem &p = g.problem;
    gpu_query last;
    last.i = (int32_t)(i1 - 1);
    last.h = (int32_t)h0;
    if (first >= past ||
        gpu_load(g.buffers.bias, p.dtype_bias, gpu_term_at(t, p.bias_stride, last, past - 1)) !=
            -fattn_f32_infinity()) {
        return past;
    }
    const int64_t base = first / UNIT;
    const int units = (int)((past - 1) / UNIT + 1 - base);
    int visible = 0; /* units of 64 keys, from that of `first` to the last with a visible key */
    int64_t from = first;
    const auto found = [&](int, int j) {
        const int unit = (int)((from + j) / UNIT - base);
        visible = unit < visible ? visible : unit + 1;
    };
    gpu_find_visible(g, t, i1 - 1, i1, h0, group, from, past, found);
    visible = gpu_largest(visible, units);
    from = fattn_max64((base + visible) * UNIT, first);
    if (from < past && i1 - i0 > 1) {
        gpu_find_visible(g, t, i0, i1 - 1, h0, group, from, past, found);
        visible = gpu_largest(visible, units);
    }
    return gpu_uniform(gpu_clamp((base + visible) * UNIT, first, past));
}

/*
 * Cuts off the first of queries first .. past - 1 from which a bias of -inf hides all keys
 * j0 .. j1 - 1 of a tile. Returns the new beginning: a multiple of 64, or first or past. The search
 * begins with key j0, and goes on with the other keys before that key's first query. All threads of
 * the block must call it.
 */
GPU_DEVICE int64_t gpu_visible_first(const fattn_gpu_args &g, const gpu_pairs &t, int64_t j0,
                                     int64_t j1, int64_t h0, int64_t group, int64_t first,
                                     int64_t past)
{
    enum { UNIT = 64 };
    const fattn_problem &p = g.problem;
    gpu_query q;
    q.i = (int32_t)first;
    q.h = (int32_t)h0;
    if (first >= past || j0 >= j1 ||
        gpu_load(g.buffers.bias, p.dtype_bias, gpu_term_at(t, p.bias_stride, q, j0)) !=
            -fattn_f32_infinity()) {
        return first;
    }
    const int64_t end = (past - 1) / UNIT + 1;
    const int units = (int)(end - first / UNIT);
    int visible =
        0; /* units of 64 queries, from the first with a visible key to that of past - 1 */
    const auto found = [&](int i, int) {
        const int unit = (int)(end - (first + i) / UNIT);
        visible = unit > visible ? unit : visible;
    };
    gpu_find_visible(g, t, first, past, h0, group, j0, j0 + 1, found);
    visible = gpu_largest(visible, units);
    const int64_t rest = fattn_min64((end - visible) * UNIT, past);
    if (first < rest && j1 - j0 > 1) {
        gpu_find_visible(g, t, first, rest, h0, group, j0, j1, found);
        visible = gpu_largest(visible, units);
    }
    return gpu_uniform(gpu_clamp((end - visible) * UNIT, first, past));
}

/* --- Tiles ------------------------------------------------------------------------------------ */

/* Whether a tile is empty, partial or full: queries i0 .. i1 - 1 of heads h0 .. h0 + group - 1,
 * and keys j0 .. j1 - 1. Keys are computed up to padded - 1, of which those from j1 on do not
 * exist. All threads of the block must call it. */
GPU_DEVICE fattn_tile_kind gpu_tile_kind(const fattn_gpu_args &g, const gpu_pairs &t, int64_t i0,
                                         int64_t i1, int64_t h0, int64_t group, int64_t j0,
                                         int64_t j1, int64_t padded)
{
    const fattn_problem &p = g.problem;
    const fattn_tile_kind kind = fattn_band_tile(&t.band, i0, i1, j0, padded);
    if (kind == FATTN_TILE_EMPTY || !(p.features & (FATTN_MASK | FATTN_BLOCK_MASK))) {
        return kind;
    }
    if (p.features & FATTN_BLOCK_MASK &&
        !gpu_any(gpu_mask_blocks_of(g, t, i0, i1, h0, group, j0, j1, gpu_thread(), gpu_threads())
                     .kept)) {
        return FATTN_TILE_EMPTY;
    }
    return FATTN_TILE_PARTIAL;
}

/* Reduces the threads' sums by a tree over `sums`, a float for each thread, and writes the total to
 * dSink of head h or adds it. A block may call it for several heads. */
template <int THREADS>
GPU_DEVICE void gpu_store_dsink(const fattn_gpu_args &g, float *sums, int64_t h, float sum)
{
    gpu_sync(); /* the sums of the head before may still be read */
    sums[gpu_thread()] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        gpu_sync();
        if (gpu_thread() < half) {
            sums[gpu_thread()] += sums[gpu_thread() + half];
        }
    }
    if (gpu_thread() == 0) {
        float *const dsink = (float *)g.buffers.dsink;
        dsink[h] = g.problem.features & FATTN_ACCUMULATE ? dsink[h] + sums[0] : sums[0];
    }
}

#endif
