/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward by plain multiply-adds: any GPU, any head dimension, every feature, and the same bits
 * from run to run. With the forward
 *
 *     x = score(q . k),  p = exp(x - lse),  o = sum_j Z p v_j
 *
 * and delta_i = sum_c dO_ic o_ic - dlse_i, a pair has
 *
 *     dP  = dO_i . v_j
 *     dS  = p (Z dP - delta_i)       derivative by x
 *     dS' = dS dscore scale          derivative by the dot product
 *
 * and every gradient is a sum over pairs:
 *
 *     dV_j = sum_i Z p dO_i     dK_j = sum_i dS' q_i     dQ_i = sum_j dS' k_j
 *     dBias = sum of dS over the axes that share an entry
 *     dSink_h = -sum_i exp(sink_h - lse_i) delta_i
 *
 * Each entry of a gradient is owned by one block, which visits all of its pairs in ascending order.
 * Nothing is summed across blocks, and no sum depends on the order in which blocks run. The price
 * is that each kernel computes x and dP again: seven products of tiles where five would do, and two
 * more for dBias. A run launches those of these kernels that the wanted gradients need:
 *
 *     simt_backward_rows         delta and lse of every row, into the workspace
 *     simt_backward_lone         lse of rows to which a bias or mask leaves one key
 *     simt_backward_keys_W       dK and dV; per block a tile of keys and W channels
 *     simt_backward_queries_W    dQ; per block a tile of rows and W channels
 *     simt_backward_bias         dBias; per block a tile
 *     simt_backward_sink         dSink; per block a head
 *
 * If a block's registers cannot hold all channels of a gradient, it computes a slab of W of them,
 * and the scores are computed once for each slab.
 */
#ifndef FATTN_GPU_SIMT_BACKWARD_CUH
#define FATTN_GPU_SIMT_BACKWARD_CUH

#include "backends/gpu/lone.cuh"
#include "backends/gpu/tile.cuh"
#include "core/online_softmax.h"
#include "core/schedule.h"

/* --- Rows ------------------------------------------------------------------------------------- */

/* A row, as its pairs use it. */
typedef struct gpu_row {
    gpu_query query; /* h is -1 if its probabilities are 0: it is past the last, or empty */
    float lse, rest; /* lse in units of the scores, as the sum of two floats */
    float delta;
} gpu_row;

/* The workspace: three arrays over all rows, in the order of the operand lse. */
typedef struct gpu_saved {
    float *lse, *rest, *delta;
} gpu_saved;

GPU_DEVICE gpu_saved gpu_saved_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t batch = p.features & FATTN_CU_SEQLENS_Q ? 1 : p.batch;
    const int64_t rows = batch * p.heads_q * p.total_q;
    gpu_saved saved;
    saved.lse = (float *)g.workspace;
    saved.rest = saved.lse + rows;
    saved.delta = saved.rest + rows;
    return saved;
}

GPU_DEVICE bool gpu_is_empty(float lse) { return lse == -fattn_f32_infinity(); }

/* sum_c dO_c o_c of the rows at those elements. It is summed in the order of the sums of dP, so
 * that a row whose o equals one of its v has a dS of exactly 0 there. */
GPU_DEVICE float gpu_row_dot(const gpu_tensor &o, int64_t o_at, const gpu_tensor &dout,
                             int64_t dout_at)
{
    float total = 0;
    for (int c0 = 0; c0 < o.dim; c0 += GPU_CHANNELS) {
        float sum = 0;
        for (int c = c0; c < c0 + GPU_CHANNELS; c += 4) {
            sum = gpu_add_products(o, o_at, dout, dout_at, c, sum);
        }
        total += sum;
    }
    return total;
}

/* Saves lse and delta of query q of the sequence of t. lse is kept as two floats: one float would
 * have an error of 2^-24 lse, and so would all probabilities of the row. The probabilities of an
 * empty row are 0 whatever its dO and dlse are, which are not read. */
GPU_DEVICE void gpu_save_lse_delta(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q)
{
    const fattn_problem &p = g.problem;
    const fattn_sequence &seq = t.seq;
    const gpu_tensor o = gpu_tensor_of(g, g.buffers.o, p.dtype_o, FATTN_GPU_QUADS_O, p.dim_v);
    const gpu_tensor dout =
        gpu_tensor_of(g, g.buffers.dout, p.dtype_o, FATTN_GPU_QUADS_DOUT, p.dim_v);
    const gpu_saved saved = gpu_saved_of(g);
    const int64_t at = gpu_lse_at(p, seq, t.b, q.h) + q.i;
    const float *const dlse = (const float *)g.buffers.dlse;
    const float natural = ((const float *)g.buffers.lse)[at];
    if (gpu_is_empty(natural)) {
        saved.lse[at] = natural;
        return;
    }
    const int32_t key = gpu_hides_keys(p) ? -1 : gpu_band_key(t, q.i);
    const float margin = gpu_lone_margin<1>(g, t, q, key, natural);
    const double exact = (double)natural / g.rule.natural;
    const double rest = exact - (float)exact;
    const float delta =
        gpu_row_dot(o, gpu_query_at(seq, p.o, q.i, q.h), dout, gpu_query_at(seq, p.dout, q.i, q.h));
    saved.lse[at] = (float)exact - margin / g.rule.unit;
    saved.rest[at] = rest == rest ? (float)rest : 0; /* infinities and NaN have none */
    saved.delta[at] = p.features & FATTN_DLSE ? delta - dlse[at] : delta;
}

/* Lowers the saved lse of query q of the sequence of t, if a bias or mask leaves it one key. All
 * threads of a wave must call it. */
GPU_DEVICE void gpu_lower_lone(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q)
{
    const gpu_saved saved = gpu_saved_of(g);
    const int64_t at = gpu_lse_at(g.problem, t.seq, t.b, q.h) + q.i;
    const float natural = ((const float *)g.buffers.lse)[at];
    if (gpu_is_empty(natural)) {
        return;
    }
    const float margin = gpu_lone_margin<GPU_WAVE>(g, t, q, gpu_lone_key(g, t, q), natural);
    if (margin > 0 && gpu_thread() % GPU_WAVE == 0) {
        saved.lse[at] -= margin / g.rule.unit;
    }
}

/* --- Pairs ------------------------------------------------------------------------------------ */

/* What a block works on: the rows of some query heads of a sequence, and their keys. */
typedef struct gpu_backward {
    gpu_pairs pairs;
    int64_t hk, h0, group; /* key/value head; query heads h0 .. h0 + group - 1 */
    int64_t rows;          /* of all these heads, numbered as in pairs.cuh */
} gpu_backward;

/* Tiles are square, with so few elements per thread that the registers suffice for two blocks on a
 * multiprocessor. The job is in shared memory, to save more of them. */
typedef gpu_shape<4, 16> gpu_square;

struct gpu_backward_scratch : gpu_scratch<gpu_square> {
    gpu_backward job;
    gpu_row row[GPU_COLS];
    int64_t q_at[GPU_COLS], dout_at[GPU_COLS], k_at[GPU_COLS], v_at[GPU_COLS];
};
static_assert(2 * gpu_backward_scratch::STEP_FLOATS >= GPU_COLS * GPU_COLS, "room for a tile");

/* Sets s.job to query heads h0 .. h0 + group - 1 of sequence b. */
GPU_DEVICE void gpu_open(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t b, int64_t h0,
                         int64_t group)
{
    const fattn_gpu_args &g = gpu_anew(args);
    gpu_sync(); /* the job before may still be read */
    if (gpu_thread() == 0) {
        gpu_backward &f = s.job;
        f.pairs = gpu_pairs_of(g, b);
        f.hk = fattn_quotient(h0, g.group);
        f.h0 = h0;
        f.group = group;
        f.rows = f.pairs.seq.sq * group;
    }
    gpu_sync();
}

/* The inputs of the products. */
GPU_DEVICE gpu_tensor gpu_tensor_q(const fattn_gpu_args &args)
{
    const fattn_gpu_args &g = gpu_anew(args);
    return gpu_tensor_of(g, g.buffers.q, g.problem.dtype, FATTN_GPU_QUADS_Q, g.problem.dim);
}

GPU_DEVICE gpu_tensor gpu_tensor_k(const fattn_gpu_args &args)
{
    const fattn_gpu_args &g = gpu_anew(args);
    return gpu_tensor_of(g, g.buffers.k, g.problem.dtype, FATTN_GPU_QUADS_K, g.problem.dim);
}

GPU_DEVICE gpu_tensor gpu_tensor_v(const fattn_gpu_args &args)
{
    const fattn_gpu_args &g = gpu_anew(args);
    return gpu_tensor_of(g, g.buffers.v, g.problem.dtype, FATTN_GPU_QUADS_V, g.problem.dim_v);
}

GPU_DEVICE gpu_tensor gpu_tensor_dout(const fattn_gpu_args &args)
{
    const fattn_gpu_args &g = gpu_anew(args);
    return gpu_tensor_of(g, g.buffers.dout, g.problem.dtype_o, FATTN_GPU_QUADS_DOUT,
                         g.problem.dim_v);
}

/* Sets s.row, s.q_at and s.dout_at to the rows of a tile. No thread may still read the old ones. */
GPU_DEVICE void gpu_find_rows(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t first)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_backward &f = s.job;
    const fattn_problem &p = g.problem;
    const gpu_saved saved = gpu_saved_of(g);
    for (int r = gpu_thread_anew(); r < GPU_COLS; r += gpu_square::THREADS) {
        gpu_row row;
        row.query = gpu_query_of(first + r, f.group, f.h0);
        row.lse = row.rest = row.delta = 0;
        const bool exists = first + r < f.rows;
        const int64_t at = gpu_lse_at(p, f.pairs.seq, f.pairs.b, row.query.h) + row.query.i;
        if (exists && !gpu_is_empty(saved.lse[at])) {
            row.lse = saved.lse[at], row.rest = saved.rest[at], row.delta = saved.delta[at];
            s.q_at[r] = gpu_query_at(f.pairs.seq, p.q, row.query.i, row.query.h);
            s.dout_at[r] = gpu_query_at(f.pairs.seq, p.dout, row.query.i, row.query.h);
        } else {
            row.query.h = -1;
            s.q_at[r] = s.dout_at[r] = -1;
        }
        s.row[r] = row;
    }
}

GPU_DEVICE void gpu_find_keys(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t j0)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_backward &f = s.job;
    const fattn_problem &p = g.problem;
    const fattn_sequence &seq = f.pairs.seq;
    for (int n = gpu_thread_anew(); n < GPU_COLS; n += gpu_square::THREADS) {
        const bool exists = j0 + n < seq.sk;
        s.k_at[n] = exists ? gpu_key_at(g, seq, p.k, f.pairs.b, f.hk, j0 + n) : -1;
        s.v_at[n] = exists ? gpu_key_at(g, seq, p.v, f.pairs.b, f.hk, j0 + n) : -1;
    }
}

/* How many rows of the tile from row `first` on exist: at least 1 for the tiles visited. */
GPU_DEVICE int gpu_live_rows(const gpu_backward &f, int64_t first)
{
    return (int)gpu_uniform(fattn_min64(GPU_COLS, f.rows - first));
}

/* Finds which terms the scores of a tile have. Returns false if the tile is empty. */
GPU_DEVICE bool gpu_tile_terms(const fattn_gpu_args &args, const gpu_backward &f, int64_t first,
                               int64_t j0, unsigned *terms)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int64_t last = first + gpu_live_rows(f, first) - 1;
    const fattn_tile_kind kind =
        gpu_tile_kind(g, f.pairs, first / f.group, last / f.group + 1, f.h0, f.group, j0,
                      fattn_min64(j0 + GPU_COLS, f.pairs.seq.sk), j0 + GPU_COLS);
    *terms = g.rule.terms | (kind == FATTN_TILE_PARTIAL ? FATTN_SCORE_KEEP : 0);
    return kind != FATTN_TILE_EMPTY;
}

/* Replaces a pair's score x by Z p, and its dP by dS or, if OF_DOT, by dS'. */
template <bool OF_DOT>
GPU_DEVICE void gpu_differentiate(const fattn_gpu_args &g, const gpu_row &row, float z,
                                  float dscore, float *x, float *dp)
{
    const float weight = fattn_softmax_weight(*x - row.lse, g.rule.unit, row.rest);
    const float p = weight > 1 ? 1 : weight; /* lone.cuh; a NaN stays a NaN */
    const float ds = p * (z * *dp - row.delta);
    const bool counts = row.query.h >= 0;
    *x = counts ? z * p : 0;
    *dp = !counts ? 0 : OF_DOT ? ds * dscore * g.rule.scale : ds;
}

/* The same for a row and two adjacent keys with every feature; x holds dot products. */
template <bool OF_DOT>
GPU_DEVICE void gpu_differentiate_two(const fattn_gpu_args &args, const gpu_backward &f,
                                      unsigned terms, const gpu_row &row, int64_t j, float x[2],
                                      float dp[2])
{
    const fattn_gpu_args &g = gpu_anew(args);
    float z[2] = {1, 1};
    if (g.problem.features & FATTN_DROPOUT && row.query.h >= 0) {
        gpu_drop<2>(g, f.pairs, row.query, j, z);
    }
    GPU_UNROLL
    for (int n = 0; n < 2; n++) {
        float dscore;
        const fattn_score_pair pair = gpu_pair(g, f.pairs, terms, row.query, j + n);
        x[n] = fattn_score(&g.rule, terms, x[n], pair, &dscore);
        gpu_differentiate<OF_DOT>(g, row, z[n], dscore, &x[n], &dp[n]);
    }
}

/*
 * The same for a tile: replaces the dot products in x by Z p, and dP in dp by dS or dS'. The rows
 * of the tile are queries or, if KEYS_ARE_ROWS, keys.
 *
 * The features take much code. So that it exists only once, it is in a loop over the thread's
 * elements, which are moved to shared memory because registers cannot be indexed at run time. Tiles
 * without features do not use it.
 */
template <bool OF_DOT, bool KEYS_ARE_ROWS>
GPU_DEVICE void gpu_differentiate_tile(const fattn_gpu_args &g, gpu_backward_scratch &s,
                                       unsigned terms, int64_t j0, float x[gpu_square::TM][GPU_TN],
                                       float dp[gpu_square::TM][GPU_TN])
{
    const gpu_backward &f = s.job;
    const int tx = gpu_tx(), ty = gpu_ty();
    if (!terms && !(g.problem.features & FATTN_DROPOUT)) {
        GPU_UNROLL
        for (int m = 0; m < gpu_square::TM; m++) {
            GPU_UNROLL
            for (int n = 0; n < GPU_TN; n++) {
                const gpu_row &row =
                    s.row[KEYS_ARE_ROWS ? tx * GPU_TN + n : ty * gpu_square::TM + m];
                gpu_differentiate<OF_DOT>(g, row, 1, 1, &x[m][n], &dp[m][n]);
            }
        }
        return;
    }

    enum {
        ALONG = KEYS_ARE_ROWS ? gpu_square::TM : GPU_TN,
        ACROSS = gpu_square::TM * GPU_TN / ALONG
    };                              /* keys of a thread; and queries */
    float *const steps = s.step[0]; /* both steps together have room for a tile */
    gpu_sync();                     /* the products of dp have read them */
    gpu_put_tile<gpu_square>(s.weights, x);
    gpu_put_tile<gpu_square>(steps, dp);
    GPU_ROLLED
    for (int e = 0; e < ALONG * ACROSS; e += 2) {
        const int key = (KEYS_ARE_ROWS ? ty : tx) * ALONG + e % ALONG;
        const int query = (KEYS_ARE_ROWS ? tx : ty) * ACROSS + e / ALONG;
        const int at[2] = {KEYS_ARE_ROWS ? gpu_place<GPU_COLS>(query, key)
                                         : gpu_place<GPU_COLS>(key, query),
                           KEYS_ARE_ROWS ? gpu_place<GPU_COLS>(query, key + 1)
                                         : gpu_place<GPU_COLS>(key + 1, query)};
        float x2[2] = {s.weights[at[0]], s.weights[at[1]]};
        float dp2[2] = {steps[at[0]], steps[at[1]]};
        gpu_differentiate_two<OF_DOT>(g, f, terms, s.row[query], j0 + key, x2, dp2);
        s.weights[at[0]] = x2[0], s.weights[at[1]] = x2[1];
        steps[at[0]] = dp2[0], steps[at[1]] = dp2[1];
    }
    gpu_get_tile<gpu_square>(s.weights, x);
    gpu_get_tile<gpu_square>(steps, dp);
}

/* Writes a thread's sums, or zeros, to channels c0 .. of row `at` of a gradient, or adds them. */
template <int W>
GPU_DEVICE void gpu_store_gradient(const fattn_gpu_args &g, const gpu_tensor &t, int64_t at, int c0,
                                   bool zero, const float sum[W / GPU_TX])
{
    GPU_UNROLL
    for (int u = 0; u < W / GPU_COLS; u++) {
        const int c = c0 + gpu_channel(u);
        float x[4] = {0, 0, 0, 0};
        if (g.problem.features & FATTN_ACCUMULATE) {
            gpu_load_quad(t, at, c, x);
        }
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            x[e] = zero ? x[e] : x[e] + sum[u * 4 + e];
        }
        gpu_store_quad(t, at, c, x);
    }
}

/* --- dK and dV: a tile of keys visits its rows; tiles hold S^T = K Q^T ------------------------ */

/* A thread's sums of dK and dV. */
template <int W> struct gpu_key_sums {
    float dk[gpu_square::TM][W / GPU_TX], dv[gpu_square::TM][W / GPU_TX];
};

template <int W>
GPU_DEVICE void gpu_keys_tile(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t first,
                              int64_t j0, int c0, unsigned outputs, gpu_key_sums<W> &sums)
{
    const fattn_gpu_args &g = gpu_anew(args);
    enum { EARLY = W != 128 && GPU_EARLY(2 * gpu_square::TM * W / GPU_TX) };
    const gpu_backward &f = s.job;
    const int live = gpu_live_rows(f, first);
    unsigned terms;
    if (!gpu_tile_terms(g, f, first, j0, &terms)) {
        return;
    }

    gpu_find_rows(g, s, first);
    float x[gpu_square::TM][GPU_TN] = {}, dp[gpu_square::TM][GPU_TN] = {};
    gpu_dots<gpu_square>(s, gpu_tensor_k(g), s.k_at, gpu_tensor_q(g), s.q_at, x);
    if (outputs & FATTN_OUT_DK) {
        gpu_dots<gpu_square>(s, gpu_tensor_v(g), s.v_at, gpu_tensor_dout(g), s.dout_at, dp);
    }
    gpu_differentiate_tile<true, true>(g, s, terms, j0, x, dp);
    if (outputs & FATTN_OUT_DV) {
        gpu_put_tile<gpu_square>(s.weights, x);
        gpu_mix<gpu_square, W, EARLY>(s, gpu_tensor_dout(g), s.dout_at, live, c0, sums.dv);
    }
    if (outputs & FATTN_OUT_DK) {
        gpu_sync(); /* all threads have read the weights of dV */
        gpu_put_tile<gpu_square>(s.weights, dp);
        gpu_mix<gpu_square, W, EARLY>(s, gpu_tensor_q(g), s.q_at, live, c0, sums.dk);
    }
}

/* Stores dK and dV of a tile. Unless gradients are accumulated, keys that belong to a sequence but
 * are beyond its used length get zeros. */
template <int W>
GPU_DEVICE void gpu_keys_store(const fattn_gpu_args &args, const gpu_backward &f, int64_t j0,
                               int c0, unsigned outputs, const gpu_key_sums<W> &sums)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const fattn_sequence &seq = f.pairs.seq;
    const gpu_tensor dk =
        gpu_tensor_of(g, g.buffers.dk, g.dtype_gradient, FATTN_GPU_QUADS_DK, p.dim);
    const gpu_tensor dv =
        gpu_tensor_of(g, g.buffers.dv, g.dtype_gradient, FATTN_GPU_QUADS_DV, p.dim_v);
    GPU_UNROLL
    for (int m = 0; m < gpu_square::TM; m++) {
        const int64_t j = j0 + gpu_ty() * gpu_square::TM + m;
        if (j >= (p.features & FATTN_ACCUMULATE ? seq.sk : seq.slot_k)) {
            continue;
        }
        if (outputs & FATTN_OUT_DK) {
            gpu_store_gradient<W>(g, dk, gpu_key_at(g, seq, p.dk, f.pairs.b, f.hk, j), c0,
                                  j >= seq.sk, sums.dk[m]);
        }
        if (outputs & FATTN_OUT_DV) {
            gpu_store_gradient<W>(g, dv, gpu_key_at(g, seq, p.dv, f.pairs.b, f.hk, j), c0,
                                  j >= seq.sk, sums.dv[m]);
        }
    }
}

/* Key block `block` of (sequence, key/value head) number `head`. */
template <int W>
GPU_DEVICE void gpu_keys_item(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t head,
                              int64_t block, int c0)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const int64_t group = g.group, j0 = block * GPU_COLS;
    const gpu_backward &f = s.job;
    const unsigned outputs = p.outputs & ((c0 < p.dim ? FATTN_OUT_DK : 0) | /* in this slab */
                                          (c0 < p.dim_v ? FATTN_OUT_DV : 0));
    gpu_open(g, s, head / p.heads_k, head % p.heads_k * group, group);
    if (j0 >= f.pairs.seq.slot_k || !outputs) {
        return;
    }

    int64_t first = 0, past = 0; /* queries */
    if (j0 < f.pairs.seq.sk) {
        const int64_t j1 = fattn_min64(j0 + GPU_COLS, f.pairs.seq.sk);
        const fattn_range queries = gpu_queries_of(f.pairs, j0, j1);
        first = gpu_uniform(queries.first), past = gpu_uniform(queries.past);
        if (W < 256 && p.features & FATTN_BIAS) { /* 256 channels leave no registers for it */
            first = gpu_visible_first(g, f.pairs, j0, j1, f.h0, f.group, first, past);
        }
    }
    gpu_key_sums<W> sums;
    GPU_UNROLL
    for (int m = 0; m < gpu_square::TM; m++) {
        GPU_UNROLL
        for (int c = 0; c < W / GPU_TX; c++) {
            sums.dk[m][c] = sums.dv[m][c] = 0;
        }
    }
    if (first < past) {
        gpu_find_keys(g, s, j0);
        past = gpu_uniform(past * f.group); /* rows of all heads */
        for (first = gpu_uniform(first * f.group / GPU_COLS * GPU_COLS); first < past;
             first += GPU_COLS) {
            gpu_keys_tile<W>(g, s, first, j0, c0, outputs, sums);
        }
    }
    gpu_keys_store<W>(g, f, j0, c0, outputs, sums);
}

template <int W> GPU_DEVICE void gpu_keys_all(const fattn_gpu_args &g)
{
    GPU_SHARED gpu_backward_scratch s;
    const fattn_problem &p = g.problem;
    const int64_t blocks = g.tiling.k_blocks;
    const int64_t slabs = (fattn_max64(p.dim, p.dim_v) + W - 1) / W;
    for (int64_t n = gpu_block(); n < p.batch * p.heads_k * blocks * slabs; n += gpu_blocks()) {
        const int64_t block = n / gpu_anew(slabs); /* keeps reciprocals out of registers */
        gpu_keys_item<W>(g, s, block / gpu_anew(blocks), block % gpu_anew(blocks),
                         (int)(n % gpu_anew(slabs)) * W);
    }
}

/* --- dQ: a tile of rows visits its keys ------------------------------------------------------- */

template <int W>
GPU_DEVICE void gpu_queries_tile(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t first,
                                 int64_t j0, int c0, float dq[gpu_square::TM][W / GPU_TX])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_backward &f = s.job;
    const int live = (int)gpu_uniform(fattn_min64(GPU_COLS, f.pairs.seq.sk - j0));
    unsigned terms;
    if (!gpu_tile_terms(g, f, first, j0, &terms)) {
        return;
    }

    gpu_find_keys(g, s, j0);
    float x[gpu_square::TM][GPU_TN] = {}, dp[gpu_square::TM][GPU_TN] = {};
    gpu_dots<gpu_square>(s, gpu_tensor_q(g), s.q_at, gpu_tensor_k(g), s.k_at, x);
    gpu_dots<gpu_square>(s, gpu_tensor_dout(g), s.dout_at, gpu_tensor_v(g), s.v_at, dp);
    gpu_differentiate_tile<true, false>(g, s, terms, j0, x, dp);
    gpu_put_tile<gpu_square>(s.weights, dp);
    gpu_mix < gpu_square, W, W<256>(s, gpu_tensor_k(g), s.k_at, live, c0, dq);
}

template <int W>
GPU_DEVICE void gpu_queries_item(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t item,
                                 int c0)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const fattn_work work = fattn_schedule_item(&g.tiling, p.heads_k, item);
    const int64_t group = g.group, first = work.block * GPU_COLS;
    const gpu_backward &f = s.job;
    gpu_open(g, s, work.batch, work.head * group, group);
    if (first >= f.rows) {
        return;
    }
    const int live = gpu_live_rows(f, first);
    gpu_find_rows(g, s, first);
    gpu_sync();

    const int64_t i0 = first / group, i1 = (first + live - 1) / group + 1;
    fattn_range keys = fattn_band_rows(&f.pairs.band, i0, i1);
    if (p.features & FATTN_BIAS) {
        keys.past = gpu_visible_past(g, f.pairs, i0, i1, f.h0, group, keys.first, keys.past);
    }
    float dq[gpu_square::TM][W / GPU_TX] = {};
    const int64_t past = gpu_uniform(keys.past);
    for (int64_t j0 = gpu_uniform(keys.first / GPU_COLS * GPU_COLS); j0 < past; j0 += GPU_COLS) {
        gpu_queries_tile<W>(g, s, first, j0, c0, dq);
    }

    const gpu_tensor to =
        gpu_tensor_of(g, g.buffers.dq, g.dtype_gradient, FATTN_GPU_QUADS_DQ, p.dim);
    GPU_UNROLL
    for (int m = 0; m < gpu_square::TM; m++) {
        const int r = gpu_ty() * gpu_square::TM + m;
        const gpu_query q = gpu_query_of(first + r, group, f.h0);
        if (r < live) {
            gpu_store_gradient<W>(g, to, gpu_query_at(f.pairs.seq, p.dq, q.i, q.h), c0,
                                  s.row[r].query.h < 0, dq[m]);
        }
    }
}

template <int W> GPU_DEVICE void gpu_queries_all(const fattn_gpu_args &g)
{
    GPU_SHARED gpu_backward_scratch s;
    const int64_t slabs = (g.problem.dim + W - 1) / W;
    for (int64_t n = gpu_block(); n < g.tiling.items * slabs; n += gpu_blocks()) {
        gpu_queries_item<W>(g, s, n / slabs, (int)(n % slabs) * W);
    }
}

/* --- dBias: a tile of it visits the axes that it is summed over ------------------------------- */

/* A range of an axis of pairs: all of it if dbias is summed over the axis, or else step `n`. */
GPU_DEVICE fattn_range gpu_axis(int64_t stride, int64_t extent, int64_t step, int64_t n)
{
    fattn_range range;
    range.first = stride ? n * step : 0;
    range.past = stride ? fattn_min64(range.first + step, extent) : extent;
    return range;
}

/* sum += dS of a tile of head h. */
GPU_DEVICE void gpu_bias_tile(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t i0,
                              int64_t j0, float sum[gpu_square::TM][GPU_TN])
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_backward &f = s.job;
    unsigned terms;
    if (!gpu_tile_terms(g, f, i0, j0, &terms)) {
        return;
    }
    gpu_sync(); /* the tile before may still be read */
    gpu_find_rows(g, s, i0);
    gpu_find_keys(g, s, j0);
    float x[gpu_square::TM][GPU_TN] = {}, dp[gpu_square::TM][GPU_TN] = {};
    gpu_dots<gpu_square>(s, gpu_tensor_q(g), s.q_at, gpu_tensor_k(g), s.k_at, x);
    gpu_dots<gpu_square>(s, gpu_tensor_dout(g), s.dout_at, gpu_tensor_v(g), s.v_at, dp);
    gpu_differentiate_tile<false, false>(g, s, terms, j0, x, dp);
    GPU_UNROLL
    for (int m = 0; m < gpu_square::TM; m++) {
        GPU_UNROLL
        for (int n = 0; n < GPU_TN; n++) {
            sum[m][n] += dp[m][n];
        }
    }
}

/* Reduces the tile in s.weights along the axes that dbias is summed over. Sums over rows end in row
 * 0, sums over columns in column 0. */
GPU_DEVICE void gpu_bias_fold(const fattn_problem &p, gpu_backward_scratch &s)
{
    for (int axis = 2; axis < 4; axis++) {
        for (int half = GPU_COLS / 2; half > 0 && p.dbias_stride[axis] == 0; half /= 2) {
            gpu_sync();
            for (int n = gpu_thread_anew(); n < half * GPU_COLS; n += gpu_square::THREADS) {
                const int near = n / GPU_COLS, along = n % GPU_COLS;
                float *const to = s.weights + (axis == 2 ? gpu_place<GPU_COLS>(along, near)
                                                         : gpu_place<GPU_COLS>(near, along));
                *to += s.weights[axis == 2 ? gpu_place<GPU_COLS>(along, near + half)
                                           : gpu_place<GPU_COLS>(near + half, along)];
            }
        }
    }
}

/* A tile of dbias: batch entry eb, head eh, tile ei of rows and tile ej of keys. Each is 0 on an
 * axis that dbias is summed over. */
GPU_DEVICE void gpu_bias_item(const fattn_gpu_args &args, gpu_backward_scratch &s, int64_t eb,
                              int64_t eh, int64_t ei, int64_t ej)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_backward &f = s.job;
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    const fattn_range batch = gpu_axis(stride[0], p.batch, 1, eb);
    const fattn_range heads = gpu_axis(stride[1], p.heads_q, 1, eh);
    const fattn_range rows = gpu_axis(stride[2], p.seqlen_q, GPU_COLS, ei);
    const fattn_range keys = gpu_axis(stride[3], p.seqlen_k, GPU_COLS, ej);

    float sum[gpu_square::TM][GPU_TN] = {};
    for (int64_t b = batch.first; b < batch.past; b++) {
        for (int64_t h = heads.first; h < heads.past; h++) {
            gpu_open(g, s, b, h, 1);
            for (int64_t i0 = rows.first; i0 < fattn_min64(rows.past, f.rows); i0 += GPU_COLS) {
                const fattn_range attended =
                    fattn_band_rows(&f.pairs.band, i0, i0 + gpu_live_rows(f, i0));
                const int64_t low = fattn_max64(keys.first, attended.first / GPU_COLS * GPU_COLS);
                const int64_t past = fattn_min64(keys.past, attended.past);
                for (int64_t j0 = low; j0 < past; j0 += GPU_COLS) {
                    gpu_bias_tile(g, s, i0, j0, sum);
                }
            }
        }
    }

    gpu_sync();
    gpu_put_tile<gpu_square>(s.weights, sum);
    gpu_bias_fold(p, s);
    gpu_sync();
    const int64_t tall = stride[2] ? rows.past - rows.first : 1;
    const int64_t broad = stride[3] ? keys.past - keys.first : 1;
    float *const to = (float *)g.buffers.dbias + eb * stride[0] + eh * stride[1] +
                      rows.first * stride[2] + keys.first * stride[3];
    for (int n = gpu_thread_anew(); n < tall * GPU_COLS; n += gpu_square::THREADS) {
        const int r = n / GPU_COLS, c = n % GPU_COLS;
        if (c < broad) {
            float *const at = to + r * stride[2] + c * stride[3];
            const float total = s.weights[gpu_place<GPU_COLS>(c, r)];
            *at = p.features & FATTN_ACCUMULATE ? *at + total : total;
        }
    }
}

GPU_DEVICE void gpu_bias_all(const fattn_gpu_args &g)
{
    GPU_SHARED gpu_backward_scratch s;
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    const int64_t batch = stride[0] ? p.batch : 1, heads = stride[1] ? p.heads_q : 1;
    const int64_t tall = stride[2] ? (p.seqlen_q + GPU_COLS - 1) / GPU_COLS : 1;
    const int64_t broad = stride[3] ? (p.seqlen_k + GPU_COLS - 1) / GPU_COLS : 1;
    for (int64_t n = gpu_block(); n < batch * heads * tall * broad; n += gpu_blocks()) {
        const int64_t row = n / broad;
        gpu_bias_item(g, s, row / tall / heads, row / tall % heads, row % tall, n % broad);
    }
}

/* --- dSink: a head ---------------------------------------------------------------------------- */

template <int THREADS>
GPU_DEVICE void gpu_sink_head(const fattn_gpu_args &g, float *sums, int64_t h)
{
    const fattn_problem &p = g.problem;
    const gpu_saved saved = gpu_saved_of(g);
    const float sink = ((const float *)g.buffers.sink)[h];
    float sum = 0;
    for (int64_t n = gpu_thread(); n < p.batch * p.seqlen_q; n += THREADS) {
        const int64_t b = n / p.seqlen_q, i = n % p.seqlen_q;
        const fattn_sequence seq = gpu_sequence(g, b);
        const int64_t at = gpu_lse_at(p, seq, b, h) + i;
        if (i < seq.sq && !gpu_is_empty(saved.lse[at])) {
            const float weight = /* with a sink, scores and lse are in natural units */
                fattn_softmax_weight(sink, (float)FATTN_LOG2E, saved.lse[at]);
            sum -= weight * saved.delta[at];
        }
    }
    gpu_store_dsink<THREADS>(g, sums, h, sum);
}

/* --- Entries: simt.c chooses among them by name ----------------------------------------------- */

#define GPU_KEYS(name, width)                                                 \
    GPU_KERNEL(gpu_square::THREADS, 2) name(const GPU_PARAM fattn_gpu_args g) \
    {                                                                         \
        gpu_keys_all<width>(g);                                               \
    }
#define GPU_QUERIES(name, width)                                              \
    GPU_KERNEL(gpu_square::THREADS, 2) name(const GPU_PARAM fattn_gpu_args g) \
    {                                                                         \
        gpu_queries_all<width>(g);                                            \
    }

GPU_KEYS(simt_backward_keys_64, 64)
GPU_KEYS(simt_backward_keys_128, 128)
/* One block per multiprocessor: its sums alone take 128 registers a thread. */
GPU_KERNEL(gpu_square::THREADS, 1) simt_backward_keys_256(const GPU_PARAM fattn_gpu_args g)
{
    gpu_keys_all<256>(g);
}
GPU_QUERIES(simt_backward_queries_64, 64)
GPU_QUERIES(simt_backward_queries_128, 128)
GPU_QUERIES(simt_backward_queries_256, 256)

GPU_KERNEL(gpu_square::THREADS, 2) simt_backward_bias(const GPU_PARAM fattn_gpu_args g)
{
    gpu_bias_all(g);
}

/* One thread per row. */
GPU_KERNEL(128, 1) simt_backward_rows(const GPU_PARAM fattn_gpu_args g)
{
    const fattn_problem &p = g.problem;
    const int64_t chunks = (p.seqlen_q + 127) / 128;
    for (int64_t n = gpu_block(); n < p.batch * p.heads_q * chunks; n += gpu_blocks()) {
        const int64_t head = n / chunks, b = head / p.heads_q;
        const gpu_pairs t = gpu_pairs_of(g, b);
        const int64_t i = n % chunks * 128 + gpu_thread();
        gpu_query q;
        q.i = (int32_t)i, q.h = (int32_t)(head % p.heads_q);
        if (i < t.seq.sq) {
            gpu_save_lse_delta(g, t, q);
        }
    }
}

/* One wave per row. */
GPU_KERNEL(gpu_square::THREADS, 1) simt_backward_lone(const GPU_PARAM fattn_gpu_args g)
{
    enum { WAVES = gpu_square::THREADS / GPU_WAVE };
    const fattn_problem &p = g.problem;
    const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    for (int64_t n = gpu_block() * WAVES + gpu_thread() / GPU_WAVE; n < rows;
         n += gpu_blocks() * WAVES) {
        const int64_t head = n / p.seqlen_q, b = head / p.heads_q;
        const gpu_pairs t = gpu_pairs_of(g, b);
        gpu_query q;
        q.i = (int32_t)(n - head * p.seqlen_q), q.h = (int32_t)(head - b * p.heads_q);
        if (q.i < t.seq.sq) {
            gpu_lower_lone(g, t, q);
        }
    }
}

GPU_KERNEL(256, 1) simt_backward_sink(const GPU_PARAM fattn_gpu_args g)
{
    GPU_SHARED float sums[256];
    for (int64_t h = gpu_block(); h < g.problem.heads_q; h += gpu_blocks()) {
        gpu_sink_head<256>(g, sums, h);
    }
}

#endif
