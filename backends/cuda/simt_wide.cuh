/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward by plain multiply-adds with every feature, like simt_forward.cuh, for head dimensions up
 * to 128 and blocks with up to 99 KiB of shared memory. That allows 8 x 8 elements per thread: for
 * 64 multiply-adds it reads 16 numbers, by four instructions, and it reads a line ahead.
 *
 *     x[row][key]     += queries[channel][row] keys[channel][key]         all lines of a step
 *     y[row][channel] += weights[key][row] values[key][channel]           the same code
 *
 * Shared memory holds the queries during an item, and the weights during a tile of keys. Keys and
 * values pass through it in steps of LINES lines, which are double-buffered; during the last step
 * of a tile the first of the next is copied. Copies transpose keys from rows to lines, 4 bytes at a
 * time; values are copied 16 bytes at a time. Sums over a tile of keys begin at zero, so that
 * rounding errors grow with the number of tiles and not with that of keys.
 *
 * The threads of a row are in one warp. It reads the weights that it wrote itself, and the softmax
 * needs no barrier.
 */
#ifndef FATTN_SIMT_WIDE_CUH
#define FATTN_SIMT_WIDE_CUH

#include "backends/cuda/mma_sm80.cuh"
#include "backends/cuda/simt_wide.h"
#include "backends/gpu/forward_rows.cuh"

template <int channels, int rows, int keys, int lines> struct wide_shape {
    enum {
        CHANNELS = channels, /* of q, k and v, padded */
        ROWS = rows,
        KEYS = keys, /* as many as CHANNELS, so that both products have the same shape */
        LINES = lines,
        TX = keys / 8,       /* threads that share a row */
        LINE = channels + 4, /* floats of a line of a step */
        VALUE_STEPS = keys / lines
    };
    static_assert(keys == channels && rows / 8 * TX == WIDE_THREADS, "8 x 8 elements a thread");
};

/* The keys of an item, and its tiles of them. */
typedef struct wide_keys {
    int64_t past;       /* the end of the keys that any row attends to */
    int64_t k_at, v_at; /* the elements of key 0, unless keys are paged */
    int block, block_past;
    int full, full_past;  /* tiles whose pairs are all inside the band */
    int count;            /* keys that exist */
    int whole_k, whole_v; /* how many tiles have all of their keys; -1: cp.async cannot copy them */
} wide_keys;

template <class S> struct wide_scratch {
    alignas(16) float query_lines[WIDE_LINES(S::CHANNELS, S::ROWS)]; /* [channel][row] */
    alignas(16) float weights[WIDE_LINES(S::KEYS, S::ROWS)];         /* [key][row] */
    alignas(16) float step[2][S::LINES * S::LINE];                   /* double-buffered */
    gpu_query query[S::ROWS];
    gpu_forward_job job;
    wide_keys keys;
};

/* A thread's rows. */
template <class S> struct wide_rows {
    fattn_softmax state[8]; /* l: over the thread's own columns */
    float o[8][8];
};

/* The number of a thread among those that have the same rows, and the first of these rows. Adjacent
 * threads have the same columns, threads two apart the same rows, as in tile.cuh. */
template <class S> GPU_DEVICE int wide_tx(void)
{
    return (int)((unsigned)gpu_thread_anew() / 2 % S::TX);
}
template <class S> GPU_DEVICE int wide_row(void)
{
    const unsigned thread = (unsigned)gpu_thread_anew();
    return (int)((thread / (2 * S::TX) * 2 + thread % 2) * 8);
}
/* The n-th of this thread's 8 columns: four adjacent ones in each half of the tile, so that the
 * 16-byte reads of a warp are adjacent. */
template <class S> GPU_DEVICE int wide_column(int n)
{
    return n / 4 * (S::KEYS / 2) + wide_tx<S>() * 4 + n % 4;
}

/* The first key of a tile that a thread copies. */
template <class S> GPU_DEVICE int wide_own_key(void)
{
    const unsigned thread = (unsigned)gpu_thread();
    return (int)(thread / 32 * (S::KEYS / 4) + thread / 8 % 4);
}

/* The place of a row in a line of rows. Every four lines are followed by 4 floats of padding, so
 * that threads that write the lines of their columns have few bank conflicts. */
template <class S> GPU_DEVICE constexpr int wide_place(int line, int row)
{
    return line * S::ROWS + line / 4 * 4 + row;
}

GPU_DEVICE void wide_load_four(const float *from, float *x)
{
    const gpu_f4 four = *(const gpu_f4 *)from;
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

/* --- Steps ------------------------------------------------------------------------------------ */

/* The pipeline of steps over all tiles of an item: for each tile channels of keys, then values.
 * While one step is used, the next is copied. All of this stays in registers. */
typedef struct wide_walk {
    int key_steps; /* steps of keys in a tile */
    int past;      /* the end of the tiles */
    int whole_k;   /* as in wide_keys */
    int whole_v;
    int step;            /* the next step to copy, in its tile */
    int tile;            /* its tile */
    int next;            /* the tile after that, or `past` */
    int stage;           /* the buffer that it goes to; the other one is in use */
    int row, column;     /* the thread's first row and column */
    const float *k;      /* the thread's first source: a channel of every fourth key */
    const float *v;      /* and four channels of values */
    uint32_t to_k, to_v; /* their addresses in a step */
} wide_walk;

/* Copies a step of rows that cp.async cannot copy: they are paged, unaligned or not floats. It is
 * synchronous. The first key of the tile is copied in place of keys that do not exist. */
template <class S>
GPU_DEVICE void wide_fetch_slowly(const fattn_gpu_args &g, const wide_scratch<S> &s, int tile,
                                  int first, bool is_key, float *lines)
{
    enum { AT_ONCE = 4, COUNT = S::LINES * S::KEYS / 4 / WIDE_THREADS };
    const fattn_problem &p = g.problem;
    const gpu_forward_job &job = s.job;
    gpu_cache t = is_key ? gpu_cache_k(g) : gpu_cache_v(g);
    t.tensor.dim = is_key || p.outputs & FATTN_OUT_O ? t.tensor.dim : 0;
    const unsigned quads = (is_key ? S::LINES : S::CHANNELS) / 4; /* of a row */
    const int j0 = tile * S::KEYS, row0 = is_key ? 0 : first, c0 = is_key ? first : 0;
    GPU_ROLLED
    for (int batch = 0; batch < COUNT; batch += AT_ONCE) {
        gpu_quad quad[AT_ONCE];
        GPU_UNROLL
        for (int piece = 0; piece < AT_ONCE; piece++) {
            const unsigned n = (batch + piece) * WIDE_THREADS + gpu_thread_anew();
            const int j = j0 + row0 + (int)(n / quads), c = c0 + (int)(n % quads) * 4;
            const int64_t at = gpu_key_at(g, job.pairs.seq, is_key ? p.k : p.v, job.pairs.b, job.hk,
                                          j < s.keys.past ? j : j0);
            quad[piece] = gpu_fetch_quad(t, at, c);
        }
        GPU_UNROLL
        for (int piece = 0; piece < AT_ONCE; piece++) {
            const unsigned n = (batch + piece) * WIDE_THREADS + gpu_thread_anew();
            const int row = (int)(n / quads), c = (int)(n % quads) * 4;
            float x[4];
            gpu_unpack_quad(t, quad[piece], x);
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                lines[is_key ? (c + e) * S::LINE + row : row * S::LINE + c + e] = x[e];
            }
        }
    }
}

/* Begins to copy channels c0 .. of the keys of a tile, one line per channel, with zeros past the
 * last channel. A warp copies eight channels of four keys at a time, without bank conflicts. Unless
 * the tile is WHOLE, the last of its `live` keys is copied in place of keys that do not exist. */
template <class S, bool WHOLE>
GPU_DEVICE void wide_fetch_keys(const fattn_gpu_args &g, const wide_walk &w, int live, int c0,
                                uint32_t to)
{
    const fattn_problem &p = g.problem;
    const float *const from = w.k + w.tile * (S::KEYS * p.k.seq) + c0;
    const int channels = (int)p.dim - c0 - (int)((unsigned)gpu_thread() % 8);
    const int last = live - 1 - wide_own_key<S>();
    GPU_UNROLL
    for (int piece = 0; piece < S::KEYS / 16; piece++) {
        const float *const row = from + (WHOLE ? 4 * piece : min(4 * piece, last)) * p.k.seq;
        GPU_UNROLL
        for (int n = 0; n < S::LINES; n += 8) {
            mma_copy_word(to + w.to_k + 4 * (n * S::LINE + 4 * piece), row + n, n < channels);
        }
    }
}

/* Begins to copy the values of the keys first .. of a tile, one line per key. Channels past the
 * last are not written; they do not affect results. */
template <class S, bool WHOLE>
GPU_DEVICE void wide_fetch_values(const fattn_gpu_args &g, const wide_walk &w, int live, int first,
                                  uint32_t to)
{
    enum { QUADS = S::CHANNELS / 4, EVERY = WIDE_THREADS / QUADS };
    const fattn_problem &p = g.problem;
    const float *const from = w.v + (w.tile * S::KEYS + first) * p.v.seq;
    const int last = live - 1 - first - (int)((unsigned)gpu_thread() / QUADS);
    if ((int)((unsigned)gpu_thread() % QUADS * 4) < p.dim_v) {
        GPU_UNROLL
        for (int piece = 0; piece < S::LINES / EVERY; piece++) {
            const int n = piece * EVERY;
            mma_copy(to + w.to_v + 4 * n * S::LINE, from + (WHOLE ? n : min(n, last)) * p.v.seq,
                     16);
        }
    }
}

template <class S, bool WHOLE>
GPU_DEVICE void wide_fetch(const fattn_gpu_args &g, const wide_scratch<S> &s, const wide_walk &w,
                           int first, bool is_key)
{
    const uint32_t to = (uint32_t)(w.stage * sizeof s.step[0]);
    const int live = WHOLE ? S::KEYS : s.keys.count - w.tile * S::KEYS;
    if (is_key) {
        wide_fetch_keys<S, WHOLE>(g, w, live, first, to);
    } else {
        wide_fetch_values<S, WHOLE>(g, w, live, first, to);
    }
}

/* Begins to copy the next step, if there is one. There are three ways: for a tile with all of its
 * keys, for the last tile, and, if `whole` is -1, for rows that cp.async cannot copy. */
template <class S>
GPU_DEVICE void wide_copy_next(const fattn_gpu_args &g, wide_scratch<S> &s, wide_walk &w)
{
    const bool is_key = w.step < w.key_steps;
    const int first = (is_key ? w.step : w.step - w.key_steps) * S::LINES;
    const int whole = is_key ? w.whole_k : w.whole_v;
    if (w.tile >= w.past) {
        /* none */
    } else if (w.tile < whole) {
        wide_fetch<S, true>(g, s, w, first, is_key);
    } else if (whole < 0) {
        wide_fetch_slowly<S>(g, s, w.tile, first, is_key, s.step[w.stage]);
    } else {
        wide_fetch<S, false>(g, s, w, first, is_key);
    }
    mma_commit();
    w.stage ^= 1;
    if (++w.step == w.key_steps + S::VALUE_STEPS) {
        w.step = 0, w.tile = w.next;
    }
}

/* A line's elements for a thread's 8 rows and 8 columns. */
typedef struct wide_line {
    float a[8], b[8];
} wide_line;

template <class S>
GPU_DEVICE void wide_load_line(const float *rows, const float *columns, wide_line &line)
{
    wide_load_four(rows, line.a), wide_load_four(rows + 4, line.a + 4);
    wide_load_four(columns, line.b), wide_load_four(columns + S::KEYS / 2, line.b + 4);
}

/* x += lines of rows times lines of columns. first: the first line, already loaded. */
template <class S>
GPU_DEVICE void wide_multiply(const float *rows, const float *columns, const wide_line &first,
                              float x[8][8])
{
    enum { UNROLL = 8 }; /* 9 KB of code */
    wide_line line[2];
    line[0] = first;
    GPU_ROLLED
    for (int n = 0; n < S::LINES; n += UNROLL) {
        GPU_UNROLL
        for (int u = 0; u < UNROLL; u++) {
            const wide_line &now = line[u % 2];
            if (u + 1 < UNROLL || n + UNROLL < S::LINES) {
                wide_load_line<S>(rows + wide_place<S>(u + 1, 0), columns + (u + 1) * S::LINE,
                                  line[(u + 1) % 2]);
            }
            GPU_UNROLL
            for (int e = 0; e < 64; e++) { /* back and forth: 2 % faster than row by row */
                const int n = e / 8, m = n % 2 ? 7 - e % 8 : e % 8;
                x[m][n] = fmaf(now.a[m], now.b[n], x[m][n]);
            }
        }
        rows += wide_place<S>(UNROLL, 0), columns += UNROLL * S::LINE;
    }
}

/* --- Scores ----------------------------------------------------------------------------------- */

/* Stores the thread's elements to lines of rows. */
template <class S> GPU_DEVICE void wide_put(float *lines, const float x[8][8])
{
    float *const to = lines + wide_row<S>();
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        float *const line = to + wide_place<S>(wide_column<S>(n), 0);
        gpu_f4 four;
        four.x = x[0][n], four.y = x[1][n], four.z = x[2][n], four.w = x[3][n];
        *(gpu_f4 *)line = four;
        four.x = x[4][n], four.y = x[5][n], four.z = x[6][n], four.w = x[7][n];
        *(gpu_f4 *)(line + 4) = four;
    }
}

/* The inverse. */
template <class S> GPU_DEVICE void wide_get(const float *lines, float x[8][8])
{
    const float *const from = lines + wide_row<S>();
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        const float *const line = from + wide_place<S>(wide_column<S>(n), 0);
        GPU_UNROLL
        for (int m = 0; m < 8; m++) {
            x[m][n] = line[m];
        }
    }
}

/* Turns dot products in x into scores that have no terms but the scale and the band. */
template <class S>
GPU_DEVICE void wide_scale_and_band(const fattn_gpu_args &g, const wide_scratch<S> &s,
                                    unsigned terms, int64_t j0, float x[8][8])
{
    const fattn_score_rule rule = gpu_forward_rule(g, s.job);
    GPU_UNROLL
    for (int m = 0; m < 8; m++) {
        const fattn_range keys = fattn_band_row(&s.job.pairs.band, s.query[wide_row<S>() + m].i);
        const int first = (int)gpu_clamp(keys.first - j0, 0, S::KEYS);
        const int past = (int)gpu_clamp(keys.past - j0, 0, S::KEYS);
        GPU_UNROLL
        for (int n = 0; n < 8; n++) {
            const int j = wide_column<S>(n);
            fattn_score_pair pair;
            float dscore;
            pair.keep = !(terms & FATTN_SCORE_KEEP) || (first <= j && j < past);
            x[m][n] = fattn_score(&rule, (terms & FATTN_SCORE_SCALE) | FATTN_SCORE_KEEP, x[m][n],
                                  pair, &dscore);
        }
    }
}

/* The same with every feature, in a loop over the thread's elements, which are moved to shared
 * memory because registers cannot be indexed at run time. */
template <class S>
GPU_DEVICE void wide_score(const fattn_gpu_args &g, wide_scratch<S> &s, unsigned terms, int64_t j0,
                           float x[8][8])
{
    const unsigned few = FATTN_SCORE_SCALE | FATTN_SCORE_KEEP;
    if (!terms) {
        return;
    }
    if (!(terms & ~few) && !(g.problem.features & (FATTN_MASK | FATTN_BLOCK_MASK))) {
        wide_scale_and_band<S>(g, s, terms, j0, x);
        return;
    }
    const fattn_score_rule rule = gpu_forward_rule(g, s.job);
    wide_put<S>(s.weights, x);
    GPU_ROLLED
    for (int e = 0; e < 64; e++) {
        const int row = wide_row<S>() + e / 8, col = wide_column<S>(e % 8);
        float *const at = &s.weights[wide_place<S>(col, row)], dscore;
        const fattn_score_pair pair = gpu_pair(g, s.job.pairs, terms, s.query[row], j0 + col);
        *at = fattn_score(&rule, terms, *at, pair, &dscore);
    }
    wide_get<S>(s.weights, x);
}

/* Turns weights p in shared memory into Z p. */
template <class S>
GPU_DEVICE void wide_drop(const fattn_gpu_args &g, wide_scratch<S> &s, int64_t j0)
{
    GPU_ROLLED
    for (int e = 0; e < 16; e++) {
        const int row = wide_row<S>() + e / 2, col = wide_column<S>(e % 2 * 4);
        if (s.query[row].h >= 0) {
            float z[4];
            gpu_drop<4>(g, s.job.pairs, s.query[row], j0 + col, z);
            GPU_UNROLL
            for (int n = 0; n < 4; n++) {
                s.weights[wide_place<S>(col + n, row)] *= z[n];
            }
        }
    }
}

/* Turns scores in x into weights; alpha is the factor for the sums so far. */
template <class S>
GPU_DEVICE void wide_soften(float unit, fattn_softmax state[8], float x[8][8], float alpha[8])
{
    GPU_UNROLL
    for (int m = 0; m < 8; m++) {
        float largest = x[m][0], sum = 0;
        GPU_UNROLL
        for (int n = 1; n < 8; n++) {
            largest = gpu_max(largest, x[m][n]);
        }
        GPU_UNROLL
        for (int n = S::TX; n > 1; n /= 2) {
            largest = gpu_max(largest, gpu_shfl_xor(largest, n));
        }
        alpha[m] = fattn_softmax_raise(&state[m], largest, unit);
        const float base = fattn_softmax_base(state[m]);
        GPU_UNROLL
        for (int n = 0; n < 8; n++) {
            x[m][n] = fattn_softmax_weight(x[m][n], unit, base);
            sum += x[m][n];
        }
        fattn_softmax_add(&state[m], sum);
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Loads the queries as lines, with zeros for rows and channels that do not exist, and sets the rows
 * to their state before the first key. */
template <class S>
GPU_DEVICE void wide_begin(const fattn_gpu_args &g, wide_scratch<S> &s, wide_rows<S> &f)
{
    const fattn_problem &p = g.problem;
    const gpu_forward_job &job = s.job;
    for (int r = gpu_thread(); r < S::ROWS; r += WIDE_THREADS) {
        s.query[r] = gpu_forward_query(job, r);
    }
    gpu_sync();
    const gpu_tensor q = gpu_tensor_of(g, g.buffers.q, p.dtype, FATTN_GPU_QUADS_Q, p.dim);
    GPU_ROLLED
    for (int n = gpu_thread(); n < S::ROWS * S::CHANNELS / 4; n += WIDE_THREADS) {
        const int r = n / (S::CHANNELS / 4), c = n % (S::CHANNELS / 4) * 4;
        const gpu_query at = s.query[r];
        float x[4];
        gpu_load_quad(q, at.h < 0 ? -1 : gpu_query_at(job.pairs.seq, p.q, at.i, at.h), c, x);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            s.query_lines[wide_place<S>(c + e, r)] = x[e];
        }
    }
    GPU_UNROLL
    for (int m = 0; m < 8; m++) {
        f.state[m] = gpu_forward_start(g, job, s.query[wide_row<S>() + m], wide_tx<S>() == 0);
        GPU_UNROLL
        for (int n = 0; n < 8; n++) {
            f.o[m][n] = 0;
        }
    }
}

/* Sets s.keys for the item. Called by one thread. */
template <class S> GPU_DEVICE void wide_keys_set(const fattn_gpu_args &g, wide_scratch<S> &s)
{
    const fattn_problem &p = g.problem;
    const gpu_forward_job &job = s.job;
    const fattn_range top = fattn_band_row(&job.pairs.band, job.i0);
    const fattn_range bottom = fattn_band_row(&job.pairs.band, job.i1 - 1);
    int64_t block, block_past;
    (void)fattn_schedule_keys(&job.parts, job.split, &block, &block_past);
    wide_keys &keys = s.keys;
    keys.past = bottom.past;
    keys.block = (int)block;
    keys.block_past = (int)block_past;
    keys.full = (int)gpu_clamp((bottom.first + S::KEYS - 1) / S::KEYS, 0, block_past);
    keys.full_past = (int)gpu_clamp(top.past / S::KEYS, 0, block_past);
    keys.count = (int)job.pairs.seq.sk;
    keys.whole_k = keys.whole_v = -1;
    keys.k_at = keys.v_at = 0;
    if (p.features & FATTN_PAGED) {
        return;
    }
    if (p.dtype_kv == FATTN_F32) {
        keys.whole_k = keys.count / S::KEYS;
        keys.k_at = gpu_key_at(g, job.pairs.seq, p.k, job.pairs.b, job.hk, 0);
    }
    if (p.dtype_v == FATTN_F32 && g.chunks & FATTN_GPU_QUADS_V && p.dim_v % 4 == 0 &&
        p.outputs & FATTN_OUT_O) {
        keys.whole_v = keys.count / S::KEYS;
        keys.v_at = gpu_key_at(g, job.pairs.seq, p.v, job.pairs.b, job.hk, 0);
    }
}

/* The first tile from t on that is not empty, and in *terms the terms of its scores. All threads
 * must call it. */
template <class S>
GPU_DEVICE int wide_next_tile(const fattn_gpu_args &g, const wide_scratch<S> &s, int t,
                              unsigned *terms)
{
    const gpu_forward_job &job = s.job;
    const wide_keys &keys = s.keys;
    bool keep = t < keys.full || t >= keys.full_past;
    if (g.problem.features & (FATTN_MASK | FATTN_BLOCK_MASK)) {
        keep = true;
        for (; t < keys.block_past; t++) {
            const int64_t j0 = (int64_t)t * S::KEYS;
            if (gpu_tile_kind(g, job.pairs, job.i0, job.i1, job.hk * job.group, job.group, j0,
                              fattn_min64(j0 + S::KEYS, keys.past),
                              j0 + S::KEYS) != FATTN_TILE_EMPTY) {
                break;
            }
        }
    }
    *terms = g.rule.terms | (keep ? FATTN_SCORE_KEEP : 0);
    return t;
}

template <class S>
GPU_DEVICE void wide_walk_begin(const fattn_gpu_args &g, wide_scratch<S> &s, int tile, wide_walk &w)
{
    const fattn_problem &p = g.problem;
    const unsigned thread = (unsigned)gpu_thread(), quads = S::CHANNELS / 4;
    const int key = wide_own_key<S>(), channel = (int)(thread % 8);
    const int row = (int)(thread / quads), first = (int)(thread % quads * 4);
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(s.step);
    w.key_steps = ((int)p.dim + S::LINES - 1) / S::LINES;
    w.past = w.next = s.keys.block_past;
    w.whole_k = s.keys.whole_k, w.whole_v = s.keys.whole_v;
    w.step = w.stage = 0, w.tile = tile;
    w.row = wide_row<S>(), w.column = wide_tx<S>() * 4;
    w.k = (const float *)g.buffers.k + s.keys.k_at + key * p.k.seq + channel;
    w.v = (const float *)g.buffers.v + s.keys.v_at + row * p.v.seq + first;
    w.to_k = to + 4 * (channel * S::LINE + key);
    w.to_v = to + 4 * (row * S::LINE + first);
}

/* x += the product of lines of rows with the next `steps` steps of the pipeline. */
template <class S>
GPU_DEVICE void wide_product(const fattn_gpu_args &g, wide_scratch<S> &s, wide_walk &w,
                             const float *rows, int steps, float x[8][8])
{
    GPU_ROLLED
    for (int n = 0; n < steps; n++) {
        mma_wait<0>();
        gpu_sync(); /* the step has landed, and all threads have read the one before */
        const float *const lines = rows + wide_place<S>(n * S::LINES, 0) + w.row;
        const float *const columns = s.step[w.stage ^ 1] + w.column;
        wide_line first;
        wide_load_line<S>(lines, columns, first);
        wide_copy_next<S>(g, s, w);
        wide_multiply<S>(lines, columns, first, x);
    }
}

/* Visits all tiles of an item. */
template <class S>
GPU_DEVICE void wide_walk_keys(const fattn_gpu_args &g, wide_scratch<S> &s, wide_rows<S> &f)
{
    const fattn_problem &p = g.problem;
    unsigned terms;
    int t = wide_next_tile<S>(g, s, s.keys.block, &terms);
    wide_walk w;
    wide_walk_begin<S>(g, s, t, w);
    if (p.features & FATTN_BIAS) {
        const gpu_forward_job &job = s.job;
        const int64_t keys = fattn_min64((int64_t)w.past * S::KEYS, s.keys.past);
        const int64_t past = gpu_visible_past(g, job.pairs, job.i0, job.i1, job.hk * job.group,
                                              job.group, (int64_t)t * S::KEYS, keys);
        w.past = (int)((past + S::KEYS - 1) / S::KEYS);
    }
    if (t >= w.past) {
        return;
    }
    wide_copy_next<S>(g, s, w);
    while (t < w.past) {
        const int64_t j0 = (int64_t)t * S::KEYS;
        float x[8][8] = {}, y[8][8] = {}, alpha[8];
        wide_product<S>(g, s, w, s.query_lines, w.key_steps, x);
        wide_score<S>(g, s, terms, j0, x);
        wide_soften<S>(g.rule.unit, f.state, x, alpha);
        wide_put<S>(s.weights, x);
        if (p.features & FATTN_DROPOUT) {
            wide_drop<S>(g, s, j0);
        }
        t = w.next = wide_next_tile<S>(g, s, t + 1, &terms);
        wide_product<S>(g, s, w, s.weights, S::VALUE_STEPS, y);
        GPU_UNROLL
        for (int m = 0; m < 8; m++) {
            GPU_UNROLL
            for (int n = 0; n < 8; n++) {
                f.o[m][n] = fmaf(f.o[m][n], alpha[m], y[m][n]);
            }
        }
    }
    mma_wait<0>();
}

/* Writes the rows to o and lse, or their parts to the workspace. */
template <class S>
GPU_DEVICE void wide_end(const fattn_gpu_args &g, const wide_scratch<S> &s, wide_rows<S> &f)
{
    GPU_UNROLL
    for (int m = 0; m < 8; m++) {
        const int r = wide_row<S>() + m;
        const gpu_query q = s.query[r];
        fattn_softmax state = f.state[m];
        GPU_UNROLL
        for (int n = S::TX; n > 1; n /= 2) {
            state.l += gpu_shfl_xor(state.l, n);
        }
        if (q.h < 0) {
            continue;
        }
        const gpu_part part = gpu_forward_row(g, s.job, r, q, state, wide_tx<S>() == 0);
        GPU_UNROLL
        for (int u = 0; u < 2; u++) {
            gpu_forward_store(s.job, part, state, wide_column<S>(u * 4), &f.o[m][u * 4]);
        }
    }
}

template <class S>
GPU_DEVICE void wide_item(const fattn_gpu_args &g, wide_scratch<S> &s, int64_t item)
{
    wide_rows<S> f;
    if (!gpu_forward_open(g, s.job, S::ROWS, item, 0)) {
        return;
    }
    if (gpu_thread() == 0) {
        wide_keys_set<S>(g, s);
    }
    wide_begin<S>(g, s, f);
    wide_walk_keys<S>(g, s, f);
    wide_end<S>(g, s, f);
}

template <class S> GPU_DEVICE void wide_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(wide_scratch<S>) <= WIDE_SHARED(S::CHANNELS, S::ROWS, S::KEYS, S::LINES),
                  "too small");
    extern __shared__ char shared[];
    wide_scratch<S> &s = *(wide_scratch<S> *)shared;
    for (int64_t n = gpu_block(); n < g.tiling.items; n += gpu_blocks()) {
        wide_item<S>(g, s, n);
    }
}

#endif
