/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward on AMD's matrix units, for 16-bit types: FlashAttention-2 (Dao 2023), transposed.
 *
 * A block takes an item of the schedule, that is, a tile of rows of one key/value head and a part
 * of its keys. A wave owns SIDE of the rows, and a lane one of them. Waves share only keys and
 * values:
 *
 *     x = K Q^T             a row's scores are in the lanes of a column of x
 *     p                     online softmax, within a lane except for one exchange per tile
 *     o = o alpha + V^T p   p rounded to the type of v, without leaving its registers
 *
 * Keys of the next tile are loaded to registers while values are used, and values while keys are
 * used. Values are transposed when they are stored to LDS. Sums are relative to a reference, which
 * is raised only when a score exceeds it by more than MATRIX_MARGIN; otherwise alpha is 1, and most
 * tiles do not rescale o. Weights may then reach 2^MATRIX_MARGIN, which costs no precision in
 * floating point.
 *
 * For keys past the last of the sequence, the last key is loaded again, and their scores are set to
 * -inf. Channels past the last are zeros.
 *
 * Lean kernels have causal masks, windows, lengths and pages. The others have every feature
 * (matrix_terms.cuh, which also has the layout of a tile).
 */
#ifndef FATTN_HIP_MATRIX_FORWARD_CUH
#define FATTN_HIP_MATRIX_FORWARD_CUH

#include "backends/hip/matrix_terms.cuh"

#define MATRIX_MARGIN 8.0f

/* --- Copies ----------------------------------------------------------------------------------- */

/* The keys or values of an item, as a wave reads them. */
typedef struct matrix_tensor {
    const char *first; /* key 0; with pages, of page 0 */
    int64_t step;      /* distance of successive keys in bytes */
    bool misaligned;   /* rows cannot be read 16 bytes at a time */
    bool padded;       /* it has fewer channels than the kernel */
    bool some;         /* the thread's chunk exists */
} matrix_tensor;

/* What a wave keeps of an item while it visits its keys. */
typedef struct matrix_walker {
    matrix_tensor k, v;
    const int32_t *table;            /* of pages, or NULL */
    int keys, past, full, full_past; /* as in matrix_item */
    int whole_tiles;                 /* how many have all keys; 0 with pages or beyond 2 GiB */
} matrix_walker;

/* How threads fill tiles of keys and of values: four times 16 bytes each. */
template <class S> struct matrix_filled {
    typedef matrix_fill<S::WIDTH, S::KEYS, S::THREADS> keys;
    typedef matrix_transposed_fill<S::SIDE, S::WIDTH, S::KEYS, S::THREADS> values;
    static_assert((int)keys::COUNT == 4 && (int)values::COUNT == 1, "four each");
};

/* Whether a tensor's rows of `dim` channels can be read 16 bytes at a time. */
GPU_DEVICE bool matrix_in_chunks(const fattn_gpu_args &g, unsigned bit, int64_t dim)
{
    return g.chunks & bit && dim % 8 == 0;
}

template <class S>
GPU_DEVICE matrix_tensor matrix_tensor_of(const fattn_gpu_args &g, const matrix_item &w,
                                          const void *data, const fattn_strides &stride,
                                          unsigned bit, int64_t dim, int chunk)
{
    const bool paged = g.problem.features & FATTN_PAGED;
    const int64_t at =
        paged ? w.hk * stride.head : gpu_key_at(g, w.pairs.seq, stride, w.pairs.b, w.hk, 0);
    matrix_tensor t;
    t.first = (const char *)((const uint16_t *)data + at);
    t.step = 2 * stride.seq;
    t.misaligned = !matrix_in_chunks(g, bit, dim);
    t.padded = dim < S::WIDTH;
    t.some = !t.misaligned && 8 * chunk < dim;
    return t;
}

template <class S>
GPU_DEVICE matrix_walker matrix_walker_of(const fattn_gpu_args &g, const matrix_item &w)
{
    typedef matrix_filled<S> F;
    const fattn_problem &p = g.problem;
    matrix_walker at;
    at.k = matrix_tensor_of<S>(g, w, g.buffers.k, p.k, FATTN_GPU_QUADS_K, p.dim, F::keys::chunk());
    at.v = matrix_tensor_of<S>(g, w, g.buffers.v, p.v, FATTN_GPU_QUADS_V, p.dim_v,
                               F::values::chunk(0));
    at.table =
        p.features & FATTN_PAGED ? g.buffers.block_table + w.pairs.b * p.block_table_stride : NULL;
    at.keys = w.keys;
    at.past = w.past;
    at.full = w.full;
    at.full_past = w.full_past;
    const int64_t most = (INT64_C(1) << 31) / S::KEYS; /* offsets within a tile are ints */
    const bool near = 0 <= at.k.step && at.k.step < most && 0 <= at.v.step && at.v.step < most;
    at.whole_tiles = near && !at.table ? at.keys / S::KEYS : 0;
    return at;
}

/* Index of the element, from t.first on, at which key j or, if that does not exist, the last key
 * begins. The same as gpu_key_at(), without the part that all keys share. */
GPU_DEVICE int64_t matrix_key(const fattn_gpu_args &g, const matrix_walker &at,
                              const fattn_strides &stride, int j)
{
    const uint32_t key = j < at.keys ? j : at.keys - 1;
    if (at.table) {
        const uint32_t size = (uint32_t)g.problem.page_size;
        const int64_t page = gpu_clamp(at.table[key / size], 0, g.problem.num_pages - 1);
        return page * stride.batch + key % size * stride.seq;
    }
    return key * stride.seq;
}

/* Loads 16 bytes from a uniform address, in scalar registers, plus an offset, in a vector
 * register. */
GPU_DEVICE matrix_four matrix_get_at(const char *base, uint32_t bytes)
{
    typedef __attribute__((address_space(1))) const char *global;
    global from = (global)gpu_uniform((int64_t)base);
    asm volatile("" : "+s"(from));
    return *(__attribute__((address_space(1))) const matrix_four *)(from + bytes);
}

/* Loads the thread's chunk of rows row, row + STEP, .. of the tile that begins with key j0; zeros
 * if the chunk does not exist. */
template <int STEP>
GPU_DEVICE void matrix_fetch(const fattn_gpu_args &args, const matrix_walker &at,
                             const matrix_tensor &t, const fattn_strides &stride,
                             bool tile_is_whole, int j0, int row, int chunk, matrix_four x[4])
{
    if (t.padded) {
        asm volatile(""); /* forces a branch, as a select would cost time in all runs */
        GPU_UNROLL
        for (int n = 0; n < 4; n++) {
            x[n] = 0;
        }
    }
    if (!t.some) {
        return;
    }
    if (tile_is_whole) {
        const char *from = t.first + j0 * t.step;
        const uint32_t offset = (uint32_t)gpu_anew(row * (int)t.step + 16 * chunk);
        GPU_UNROLL
        for (int n = 0; n < 4; n++, from += STEP * t.step) {
            x[n] = matrix_get_at(from, offset);
        }
        return;
    }
    const fattn_gpu_args &g = gpu_anew(args);
    int64_t from[4];
    row = gpu_anew(row), chunk = gpu_anew(chunk);
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        from[n] = matrix_key(g, at, stride, j0 + row + n * STEP);
    }
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        x[n] = matrix_get((const uint16_t *)t.first + from[n] + 8 * chunk);
    }
}

/* Load keys, or values, of tile `block`, unless matrix_copy_misaligned() has to copy them. */
template <class S>
GPU_DEVICE void matrix_fetch_keys(const fattn_gpu_args &g, const matrix_walker &at, int block,
                                  matrix_four x[4])
{
    typedef typename matrix_filled<S>::keys F;
    const int j0 = block * S::KEYS;
    matrix_fetch<F::STEP>(g, at, at.k, g.problem.k, block < at.whole_tiles, j0, F::row(0),
                          F::chunk(), x);
}

template <class S>
GPU_DEVICE void matrix_fetch_values(const fattn_gpu_args &g, const matrix_walker &at, int block,
                                    matrix_four x[4])
{
    typedef typename matrix_filled<S>::values F;
    const int j0 = block * S::KEYS;
    matrix_fetch<1>(g, at, at.v, g.problem.v, block < at.whole_tiles, j0, F::row(0), F::chunk(0),
                    x);
}

/* Copies N rows of any alignment and number of channels to a tile of WIDTH channels, an element at
 * a time. row(r): the address of row r; put(r, c): the destination of its element c. */
template <int N, int WIDTH, int THREADS, class Row, class Put>
GPU_DEVICE void matrix_copy_misaligned(int dim, Row row, Put put)
{
    GPU_ROLLED
    for (int n = gpu_thread_anew(); n < N * WIDTH; n += THREADS) {
        const int r = n / WIDTH, c = n % WIDTH;
        *put(r, c) = c < dim ? row(r)[c] : 0;
    }
}

/* The thread's parts (lane_at) of the addresses that it reads and writes in LDS. */
typedef struct matrix_places {
    int read_k, read_v, put_k, put_v;
} matrix_places;

template <class S> GPU_DEVICE matrix_places matrix_places_of(void)
{
    typedef matrix_filled<S> F;
    const int k = F::values::place(0);
    matrix_places at;
    at.read_k = matrix_reads<S::SIDE, matrix_row_at<S::WIDTH>>();
    at.read_v = matrix_reads<S::SIDE, matrix_column_at<S::KEYS>>();
    at.put_k = matrix_row_at<S::WIDTH>(F::keys::row(0), F::keys::chunk());
    at.put_v = matrix_column_at<S::KEYS>(8 * F::values::chunk(0), k / 8) + k % 8;
    return at;
}

GPU_DEVICE void matrix_places_anew(matrix_places &at)
{
    at.read_k = gpu_anew(at.read_k), at.read_v = gpu_anew(at.read_v);
    at.put_k = gpu_anew(at.put_k), at.put_v = gpu_anew(at.put_v);
}

/* Store keys, or values, of tile `block` to LDS. */
template <class S>
GPU_DEVICE void matrix_put_keys(const fattn_gpu_args &args, const matrix_walker &at, int block,
                                int lane_at, const matrix_four x[4], uint16_t *tile)
{
    typedef typename matrix_filled<S>::keys F;
    if (at.k.misaligned) {
        const fattn_gpu_args &g = gpu_anew(args);
        matrix_copy_misaligned<S::KEYS, S::WIDTH, S::THREADS>(
            (int)g.problem.dim,
            [&](int r) {
                return (const uint16_t *)at.k.first +
                       matrix_key(g, at, g.problem.k, block * S::KEYS + r);
            },
            [&](int r, int c) { return tile + matrix_row_at<S::WIDTH>(r, c / 8) + c % 8; });
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        matrix_put(matrix_at<matrix_row_at<S::WIDTH>>(tile, lane_at, n * F::STEP, 0), x[n]);
    }
}

template <class S>
GPU_DEVICE void matrix_put_values(const fattn_gpu_args &args, const matrix_walker &at, int block,
                                  int lane_at, const matrix_four x[4], uint16_t *tile)
{
    if (at.v.misaligned) {
        const fattn_gpu_args &g = gpu_anew(args);
        matrix_copy_misaligned<S::KEYS, S::WIDTH, S::THREADS>(
            (int)g.problem.dim_v,
            [&](int r) {
                return (const uint16_t *)at.v.first +
                       matrix_key(g, at, g.problem.v, block * S::KEYS + r);
            },
            [&](int r, int c) {
                const int k = matrix_place<S::SIDE>(r);
                return tile + matrix_column_at<S::KEYS>(c, k / 8) + k % 8;
            });
        return;
    }
    matrix_put_transposed<S::KEYS>(tile, lane_at, x);
}

/* --- Queries ---------------------------------------------------------------------------------- */

/* Row r of the item's queries, or the last row if r does not exist. */
GPU_DEVICE const uint16_t *matrix_query_row(const fattn_gpu_args &g, const matrix_item &w, int r)
{
    const gpu_query q = matrix_query_of(w, r < w.rows ? r : w.rows - 1);
    return (const uint16_t *)g.buffers.q + gpu_query_at(w.pairs.seq, g.problem.q, q.i, q.h);
}

/* Copies all queries of the item, channels from c0 on, to a tile in LDS. */
template <class S, int WIDTH>
GPU_DEVICE void matrix_put_queries(const fattn_gpu_args &g, const matrix_item &w, uint16_t *tile,
                                   int c0)
{
    typedef matrix_fill<WIDTH, S::ROWS, S::THREADS> F;
    const int dim = (int)g.problem.dim - c0;
    if (!matrix_in_chunks(g, FATTN_GPU_QUADS_Q, g.problem.dim)) {
        matrix_copy_misaligned<S::ROWS, WIDTH, S::THREADS>(
            dim, [&](int r) { return matrix_query_row(g, w, r) + c0; },
            [&](int r, int c) { return tile + matrix_row_at<WIDTH>(r, c / 8) + c % 8; });
        return;
    }
    GPU_ROLLED
    for (int n = 0; n < F::COUNT; n++) {
        const int r = F::row(n), c = F::chunk();
        const matrix_four zero = 0;
        matrix_put(tile + matrix_row_at<WIDTH>(r, c),
                   8 * c < dim ? matrix_get(matrix_query_row(g, w, r) + c0 + 8 * c) : zero);
    }
}

/* Loads the wave's queries to registers as operands, through the room of keys and values. */
template <class S>
GPU_DEVICE void matrix_hold_queries(const fattn_gpu_args &g, const matrix_item &w, uint16_t *tile,
                                    matrix_rows<S> &rows)
{
    enum { PIECE = S::WIDTH < 128 ? S::WIDTH : 128, STEPS = PIECE / S::DEPTH };
    static_assert(S::ROWS * PIECE <= S::ELEMENTS, "too small");
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH / PIECE; n++) {
        gpu_sync();
        matrix_put_queries<S, PIECE>(g, w, tile, n * PIECE);
        gpu_sync();
        GPU_UNROLL
        for (int step = 0; step < STEPS; step++) {
            rows.q[n * STEPS + step] =
                matrix_load<S::SIDE, matrix_row_at<PIECE>>(tile, matrix_top<S>(), step);
        }
    }
}

/* --- A tile ----------------------------------------------------------------------------------- */

/* x = K Q^T. lane_at: matrix_reads() of keys. */
template <class S>
GPU_DEVICE void matrix_dots(const uint16_t *tile, int lane_at, const matrix_rows<S> &rows,
                            typename S::sums x[S::TILES])
{
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        x[t] = 0;
    }
    GPU_UNROLL
    for (int step = 0; step < S::STEPS; step++) {
        matrix_operand q;
        if constexpr (S::HELD) {
            q = rows.q[step];
        } else {
            q = matrix_load<S::SIDE, matrix_row_at<S::WIDTH>>(tile + S::QUERIES, lane_at,
                                                              matrix_top<S>(), step);
        }
        GPU_UNROLL
        for (int t = 0; t < S::TILES; t++) {
            const matrix_operand k =
                matrix_load<S::SIDE, matrix_row_at<S::WIDTH>>(tile, lane_at, t * S::SIDE, step);
            matrix_multiply<typename S::type, S::SIDE>(k, q, x[t]);
        }
    }
    static_assert(S::HELD || S::TILES == 1, "every product has a query of its own");
    matrix_pace<S::STEPS * S::TILES, S::AHEAD, S::HELD ? 1 : 2>();
}

/* The largest score of the row in the tile. */
template <class S> GPU_DEVICE float matrix_largest(const typename S::sums x[S::TILES])
{
    float largest = x[0][0];
    GPU_UNROLL
    for (int n = 1; n < S::TILES * S::SUMS; n++) {
        largest = gpu_max(largest, x[n / S::SUMS][n % S::SUMS]);
    }
    return matrix_column_max<S::SIDE>(largest);
}

/* Updates rows.top with the largest score of the row in a tile, raises the references that scores
 * exceed by more than the margin, and rescales the sums. */
template <class S> GPU_DEVICE void matrix_raise(float unit, float largest, matrix_rows<S> &rows)
{
    rows.top = gpu_max(rows.top, largest);
    const bool raises = largest * unit > rows.state.m * unit + MATRIX_MARGIN;
    if (!matrix_any(raises)) {
        return;
    }
    const float alpha = fattn_softmax_raise(&rows.state, raises ? largest : rows.state.m, unit);
    GPU_UNROLL
    for (int t = 0; t < S::HEIGHT; t++) {
        rows.o[t] *= alpha;
    }
}

/* Turns scores in x into weights relative to the row's reference, and adds them to l. */
template <class S>
GPU_DEVICE void matrix_weigh(float unit, matrix_rows<S> &rows, typename S::sums x[S::TILES])
{
    const float shift = fattn_softmax_base(rows.state) * unit - S::type::LIFT;
    const matrix_pair units = unit, shifts = -shift;
    GPU_UNROLL
    for (int n = 0; n < S::TILES * S::SUMS / 2; n++) {
        const int t = 2 * n / S::SUMS, r = 2 * n % S::SUMS;
        const matrix_pair scores = {x[t][r], x[t][r + 1]};
        const matrix_pair exponents = __builtin_elementwise_fma(scores, units, shifts);
        x[t][r] = __builtin_amdgcn_exp2f(exponents[0]);
        x[t][r + 1] = __builtin_amdgcn_exp2f(exponents[1]);
    }
    typename S::sums sum = x[0];
    GPU_UNROLL
    for (int t = 1; t < S::TILES; t++) {
        sum += x[t];
    }
    fattn_softmax_add(&rows.state, matrix_total<S::SUMS>(sum));
}

/* o += V^T p, where p is x rounded to the type of v. */
template <class S>
GPU_DEVICE void matrix_add_pv(const uint16_t *tile, int lane_at, const typename S::sums x[S::TILES],
                              typename S::sums o[S::HEIGHT])
{
    GPU_UNROLL
    for (int u = 0; u < S::STEPS_O; u++) {
        uint32_t pair[4];
        GPU_UNROLL
        for (int n = 0; n < 4; n++) {
            const int at = 8 * u + 2 * n;
            pair[n] = S::type::pack_weights(x[at / S::SUMS][at % S::SUMS],
                                            x[at / S::SUMS][at % S::SUMS + 1]);
        }
        const matrix_operand p = matrix_as_operand(pair);
        GPU_UNROLL
        for (int t = 0; t < S::HEIGHT; t++) {
            const matrix_operand v =
                matrix_load<S::SIDE, matrix_column_at<S::KEYS>>(tile, lane_at, t * S::SIDE, u);
            matrix_multiply<typename S::type, S::SIDE>(v, p, o[t]);
        }
    }
    matrix_pace<S::STEPS_O * S::HEIGHT, S::AHEAD>();
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Sets the lane's row to its state before the first key, and loads the queries. */
template <class S>
GPU_DEVICE void matrix_begin(const fattn_gpu_args &g, const matrix_item &w, uint16_t *tile,
                             matrix_rows<S> &rows)
{
    const int r = matrix_top<S>() + matrix_column<S::SIDE>();
    rows.query = matrix_query_of(w, r < w.rows ? r : w.rows - 1);
    const fattn_range keys = fattn_band_row(&w.pairs.band, rows.query.i);
    rows.exists = r < w.rows;
    rows.first = (int32_t)gpu_clamp(keys.first, 0, INT32_MAX);
    rows.past = rows.exists ? (int32_t)gpu_clamp(keys.past, 0, INT32_MAX) : 0;
    rows.state = fattn_softmax_empty();
    rows.top = rows.state.m;
    GPU_UNROLL
    for (int t = 0; t < S::HEIGHT; t++) {
        rows.o[t] = 0;
    }
    if constexpr (S::HELD) {
        matrix_hold_queries<S>(g, w, tile, rows);
    } else {
        matrix_put_queries<S, S::WIDTH>(g, w, tile + S::QUERIES, 0);
    }
    if constexpr (!S::IS_LEAN) {
        matrix_begin_terms<S>(g, w, rows);
    }
}

/* Computes the weights of the tile that begins with key j0, in x. lane_at: matrix_reads() of keys;
 * partial: part of the tile is outside the band. */
template <class S>
GPU_DEVICE void matrix_weights(const fattn_gpu_args &g, const matrix_item &w, const uint16_t *keys,
                               int lane_at, bool partial, int j0, float unit, matrix_rows<S> &rows,
                               typename S::sums x[S::TILES])
{
    matrix_dots<S>(keys, lane_at, rows, x);
    if constexpr (S::IS_LEAN) {
        matrix_score<S>(g, x);
    } else {
        matrix_terms<S>(g, w, rows, j0, x);
    }
    if (partial) {
        matrix_apply_band<S>(rows, j0, x);
    }
    matrix_raise<S>(unit, matrix_largest<S>(x), rows);
    matrix_weigh<S>(unit, rows, x);
    if constexpr (!S::IS_LEAN) {
        if (gpu_anew(g).problem.features & FATTN_DROPOUT) {
            matrix_drop<S>(g, w, rows, j0, x);
        }
    }
}

/* Visits the keys of the item's part. */
template <class S>
GPU_DEVICE void matrix_walk(const fattn_gpu_args &g, const matrix_item &w, uint16_t *tile,
                            matrix_rows<S> &rows)
{
    const float unit = gpu_anew(g.rule.unit);
    matrix_walker at = matrix_walker_of<S>(g, w);
    /* Waves without rows, which most blocks have when decoding, only load. */
    const bool busy = gpu_uniform(matrix_top<S>()) < w.rows;
    matrix_places places = matrix_places_of<S>();
    matrix_four k[4]; /* keys of the next tile, being loaded */
    int block = matrix_next<S>(g, w, w.block);
    if (block < at.past) {
        matrix_fetch_keys<S>(g, at, block, k);
    }
    matrix_begin<S>(g, w, tile, rows);
    if constexpr (!S::IS_LEAN) {
        if (gpu_anew(g).problem.features & FATTN_BIAS && block + 1 < at.past) {
            at.past = matrix_visible_past<S>(g, w, block + 1);
        }
    }
    gpu_sync();
    while (block < at.past) {
        const bool partial = block < at.full || block >= at.full_past;
        const int j0 = block * S::KEYS;
        matrix_places_anew(places);
        matrix_put_keys<S>(g, at, block, places.put_k, k, tile);
        gpu_sync(); /* the keys are stored, and all threads have read the values of the last tile */
        matrix_four v[4];
        matrix_fetch_values<S>(g, at, block, v);
        typename S::sums x[S::TILES];
        if (busy) {
            matrix_weights<S>(g, w, tile, places.read_k, partial, j0, unit, rows, x);
        }
        matrix_put_values<S>(g, at, block, places.put_v, v, tile + S::VALUES);
        gpu_sync(); /* the values are stored, and all threads have read the keys */
        block = matrix_next<S>(g, w, block + 1);
        if (block < at.past) {
            matrix_fetch_keys<S>(g, at, block, k);
        }
        if (busy) {
            matrix_add_pv<S>(tile + S::VALUES, places.read_v, x, rows.o);
        }
    }
}

/* Stores rows of o in the input's type. They are staged in the wave's own part of LDS, PIECE
 * channels at a time, so that whole lines are written. o_at: the element of the lane's row. */
template <class S>
GPU_DEVICE void matrix_store_lines(const fattn_gpu_args &g, const matrix_item &w, int64_t o_at,
                                   uint16_t *tile, const matrix_rows<S> &rows)
{
    enum {
        PIECE = S::WIDTH < 128 ? S::WIDTH : 128,
        CHUNKS = PIECE / 8,
        UNITS = PIECE / S::DEPTH,
        OWN = S::SIDE * PIECE
    };
    static_assert(S::WAVES * OWN <= S::ELEMENTS, "too small");
    uint16_t *const wave_tile = tile + matrix_thread() / GPU_WAVE * OWN;
    const int dim = (int)g.problem.dim_v, lane = matrix_lane();
    gpu_sync(); /* all threads have read keys and values */
    GPU_UNROLL
    for (int piece = 0; piece < S::WIDTH / PIECE; piece++) {
        GPU_UNROLL
        for (int u = 0; u < UNITS; u++) {
            matrix_put_sums<S::SIDE, matrix_row_at<PIECE>>(
                wave_tile, u, matrix_round_o<S>(rows.o, piece * UNITS + u));
        }
        matrix_wave_sync();
        for (int n = lane; n < S::SIDE * CHUNKS; n += GPU_WAVE) {
            const int r = n / CHUNKS, c = n % CHUNKS;
            const int64_t to = matrix_from(o_at, r);
            const matrix_four x = matrix_get_sums<S::SIDE, matrix_row_at<PIECE>>(wave_tile, r, c);
            if (matrix_top<S>() + r < w.rows) {
                matrix_store((uint16_t *)g.buffers.o + to, piece * PIECE + 8 * c, dim, x);
            }
        }
        matrix_wave_sync();
    }
}

/* Stores rows of o, or of a part, in floats. */
template <class S>
GPU_DEVICE void matrix_store_floats(const fattn_gpu_args &g, const matrix_item &w, int64_t item,
                                    int64_t o_at, const matrix_rows<S> &rows)
{
    const int r = matrix_top<S>() + matrix_column<S::SIDE>(), dim = (int)g.problem.dim_v;
    if (!rows.exists) {
        return;
    }
    float *to = (float *)g.buffers.o + o_at;
    if (!w.whole) {
        const gpu_part part = gpu_part_of(g, item, r);
        to = (float *)part.o.data + part.at;
    }
    GPU_UNROLL
    for (int n = 0; n < S::HEIGHT * S::SUMS; n++) {
        const int c = n / S::SUMS * S::SIDE + matrix_row<S::SIDE>(n % S::SUMS);
        if (c < dim) {
            to[c] = rows.o[n / S::SUMS][n % S::SUMS];
        }
    }
}

/* Stores lse of the row, or m and l of its part. All lanes of the row have these; one writes. */
template <class S>
GPU_DEVICE void matrix_store_state(const fattn_gpu_args &g, const matrix_item &w, int64_t item,
                                   const matrix_rows<S> &rows)
{
    if (!rows.exists || matrix_lane() >= S::SIDE) {
        return;
    }
    if (!w.whole) {
        const gpu_part part = gpu_part_of(g, item, matrix_top<S>() + matrix_lane());
        *part.m = rows.state.m;
        *part.l = rows.state.l;
    } else {
        gpu_store_lse(g, w.pairs.seq, w.pairs.b, rows.query, rows.state);
    }
}

/* The rounding error of the weight of the row's largest score. p has weights rounded to 16 bits,
 * and l sums weights that are not rounded. If one key dominates the row, o would have the relative
 * error of its weight. So o is divided by l plus this; lse is computed from l alone. 0 with
 * dropout, which may have dropped the weight. */
template <class S>
GPU_DEVICE float matrix_rounding(const fattn_gpu_args &g, const matrix_rows<S> &rows)
{
    typedef typename S::type T;
    if (!S::IS_LEAN && g.problem.features & FATTN_DROPOUT) {
        return 0;
    }
    const float shift = fattn_softmax_base(rows.state) * g.rule.unit - T::LIFT;
    const float weight = __builtin_amdgcn_exp2f(fmaf(rows.top, g.rule.unit, -shift));
    return gpu_widen(T::DTYPE, (uint16_t)T::pack_weights(weight, 0)) - weight;
}

/* Writes rows to o and lse, or their parts to the workspace. */
template <class S>
GPU_DEVICE void matrix_end(const fattn_gpu_args &args, const matrix_item &w, int64_t item,
                           uint16_t *tile, matrix_rows<S> &rows)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const bool whole = w.whole;
    const float lower = 1.0f / (1 << S::type::LIFT);
    fattn_softmax *const state = &rows.state;
    const float added = matrix_rounding<S>(g, rows) * lower;
    state->l = matrix_column_sum<S::SIDE>(state->l) * lower;
    float factor = lower, alpha = 1; /* not multiplied: alpha may be tiny */
    if constexpr (!S::IS_LEAN) {
        factor *= w.z_kept;
        alpha = matrix_add_sink(g, w, rows.query, state);
    }
    fattn_softmax rounded = *state;
    fattn_softmax_add(&rounded, added * alpha);
    const float share = fattn_softmax_normaliser(rounded);
    factor *= whole ? share : added == 0 ? 1 : state->l * share;
    GPU_UNROLL
    for (int t = 0; t < S::HEIGHT; t++) { /* selects 0: a sum may be 0 * inf */
        const typename S::sums o = rows.o[t] * factor * alpha, zero = 0;
        rows.o[t] = state->l == 0 ? zero : o;
    }
    matrix_store_state<S>(g, w, item, rows);
    if (!whole || g.problem.outputs & FATTN_OUT_O) {
        const int64_t o_at = gpu_query_at(w.pairs.seq, g.problem.o, rows.query.i, rows.query.h);
        if (!whole || g.problem.dtype_o == FATTN_F32) {
            matrix_store_floats<S>(g, w, item, o_at, rows);
        } else {
            matrix_store_lines<S>(g, w, o_at, tile, rows);
        }
    }
}

template <class S>
GPU_DEVICE void matrix_forward_item(const fattn_gpu_args &args, uint16_t *tile, int64_t item)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const matrix_item w = matrix_item_of<S>(g, item);
    gpu_sync(); /* the item before may still be read */
    if (w.rows > 0) {
        matrix_rows<S> rows;
        matrix_walk<S>(g, w, tile, rows);
        matrix_end<S>(g, w, item, tile, rows);
    }
}

template <class S> GPU_DEVICE void matrix_forward_all(const fattn_gpu_args &g)
{
    static_assert(S::ELEMENTS * 2 == MATRIX_SHARED(S::WIDTH, S::ROWS, S::KEYS, S::HELD), "agrees");
    GPU_SHARED alignas(16) uint16_t tile[S::ELEMENTS];
    for (int64_t item = gpu_block(); item < gpu_anew(g).tiling.items; item += gpu_blocks()) {
        matrix_forward_item<S>(g, tile, item);
    }
}

#endif
