/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Backward on matrix units, for 16-bit types: FlashAttention-2's loop (Dao 2023, algorithm 2). Its
 * equations are those of simt_backward.cuh.
 *
 * A block owns a tile of keys, with dK and dV in registers. It visits the queries that attend to
 * them, head by head of the group:
 *
 *     S = Q K^T        P = exp(S - lse)          dV^T += dO^T P
 *     dP = dO V^T      dS = P (dP - delta)       dK^T += Q^T dS        dQ += dS K
 *
 * Every product multiplies rows in LDS by columns in registers, in patches (patch.cuh). A wave has
 * some of the keys as columns of S and dP. P and dS, which it computes from them, are columns of
 * dV^T and dK^T without any exchange. Only dQ is a sum over all keys: dS passes through LDS, and
 * each wave computes some channels of dQ. Q and dO are stored to LDS twice, as they are and
 * transposed.
 *
 * Waves of 64 lanes, which have many registers, hold K, V and the transposed K in them; waves of 32
 * leave these in LDS.
 *
 * dQ is a sum over blocks, which add to it in floats of the workspace in any order, so that two
 * runs may differ in their last bits. A run launches
 *
 *     clear                                zeros for dBias
 *     rows_W                               lse and delta of every row, and zeros for its dQ
 *     matrix_backward_variant_type_W       dK, dV, dBias, and dQ in the workspace
 *     dq_W                                 dQ in its own type
 *     sink_W                               dSink
 */
#ifndef FATTN_HIP_MATRIX_BACKWARD_CUH
#define FATTN_HIP_MATRIX_BACKWARD_CUH

#include "backends/gpu/backward_rows.cuh"
#include "backends/gpu/pairs.cuh"
#include "backends/hip/matrix_backward.h"
#include "backends/hip/patch.cuh"

/* --- Shapes ----------------------------------------------------------------------------------- */

/* T: matrix_f16 or matrix_bf16. W: channels, padded. R, N: queries and keys of a tile. C: waves.
 * LEAN kernels have causal masks, windows and lengths, the others every feature. */
template <class T, int W, int R, int N, int C, bool LEAN> struct matrix_backward_shape {
    typedef T type;
    enum {
        IS_LEAN = LEAN,
        WIDTH = W,
        QUERIES = R,
        KEYS = N,
        WAVES = C,
        THREADS = WAVES * GPU_WAVE,
        TILES = N / (16 * WAVES),       /* tiles of 16 keys per wave */
        STEPS = W / PATCH_DEPTH,        /* steps of dot products; patches of channels */
        KEY_STEPS = KEYS / PATCH_DEPTH, /* steps of dQ */
        DQ_TILES = W / 16 / WAVES,      /* tiles of 16 channels of dQ per wave */
        IS_HELD = GPU_WAVE == 64,       /* K and V are in registers */
        IS_APART = IS_HELD && W <= 128, /* the transposed Q and dO have room of their own */
        IS_PACED = IS_APART,            /* there are registers to load operands early */
        ROOM = (IS_APART ? 4 : 2) * QUERIES * W,
        IS_HALVED = THREADS >= 2 * QUERIES / 4 * W / 4, /* half of the waves load Q, half dO */
        LOADED = IS_HALVED ? 1 : 2                      /* tiles, Q or dO, that a thread loads */
    };
    typedef patch_squares<QUERIES, W, IS_HALVED ? THREADS / 2 : THREADS> queries;
    typedef patch_squares<KEYS, W, THREADS> keys;
    static_assert(R == PATCH_DEPTH, "a patch is as high as the tile");
    static_assert(!IS_HELD || KEYS * W <= ROOM, "keys pass through it");
};

template <class S> struct matrix_backward_scratch {
    alignas(128) uint16_t room[S::ROOM];                         /* q, dO; transposed q and dO */
    uint16_t key_room[S::IS_HELD ? 64 : 3 * S::KEYS * S::WIDTH]; /* k, transposed k, v */
    uint16_t ds[S::QUERIES * S::KEYS];                           /* [query][key] */
    alignas(16) float of_rows[2 * S::QUERIES];                   /* lse, then delta */
    gpu_pairs pairs;                                             /* unused in lean kernels */

    GPU_MEMBER uint16_t *keys(int n)
    {
        return S::IS_HELD ? room : key_room + n * S::KEYS * S::WIDTH;
    }
    GPU_MEMBER float *lse() { return of_rows; }
    GPU_MEMBER float *delta() { return of_rows + S::QUERIES; }
    GPU_MEMBER uint16_t *rows(int n) { return room + n * S::QUERIES * S::WIDTH; }
    GPU_MEMBER uint16_t *columns(int n) { return rows(S::IS_APART ? 2 + n : n); }
};

/* What a wave holds of the keys: columns of S, of dP, and of dQ. */
template <class S> struct matrix_held {
    enum { STEPS = S::IS_HELD ? S::STEPS : 1, KEY_STEPS = S::IS_HELD ? S::KEY_STEPS : 1 };
    matrix_operand k[S::TILES][STEPS], v[S::TILES][STEPS], transposed[S::DQ_TILES][KEY_STEPS];
};

/* dK^T and dV^T of the wave's keys. The patches of a tile of keys are consecutive. */
template <class S> struct matrix_key_sums {
    patch dk[S::TILES * S::STEPS], dv[S::TILES * S::STEPS];
};

/* The description of an item: keys j0 .. of a key/value head, and the queries that attend to
 * them. */
typedef struct matrix_job {
    fattn_band band;
    int64_t b, hk, j0, sq;
    int group, keys;     /* keys: how many exist from j0 on; may be more than a tile, or none */
    int first, past;     /* tiles of queries first .. past - 1 */
    int full, full_past; /* tiles that attend to all keys; for lean kernels */
    float unit;          /* of scores */
    unsigned terms;
    int64_t at, q, dout; /* query 0 of the group's first head in lse, q and dO */
} matrix_job;

/* A visited tile of queries, of one head of the group. */
typedef struct matrix_visit {
    int head, tile;
    fattn_tile_kind kind;
} matrix_visit;

/* The wave's number. The compiler does not know by itself that it is uniform over the wave. */
GPU_DEVICE int matrix_wave(void) { return gpu_uniform(gpu_thread() / GPU_WAVE); }

/* The wave's first key, and its first channel of dQ. */
template <class S> GPU_DEVICE int matrix_wave_key(void) { return matrix_wave() * 16 * S::TILES; }
template <class S> GPU_DEVICE int matrix_wave_channel(void)
{
    return matrix_wave() * 16 * S::DQ_TILES;
}

/* --- Keys ------------------------------------------------------------------------------------- */

/* Loads the operands of 16 * N keys or channels from `row` on to registers, over their full
 * depth. */
template <int CHUNKS, int N, int STEPS>
GPU_DEVICE void matrix_hold(const uint16_t *tile, int row, matrix_operand x[N][STEPS])
{
    const int place = patch_columns_place<CHUNKS>(row, 0);
    GPU_UNROLL
    for (int n = 0; n < N * STEPS; n++) {
        x[n / STEPS][n % STEPS] =
            patch_load<CHUNKS>(tile, place, 16 * (n / STEPS), n % STEPS * PATCH_DEPTH / 8);
    }
}

/* Stores the job's keys or values to a tile, as they are or transposed. by_quads: `squares` has
 * loaded them; otherwise they are read from memory here, an element at a time. */
template <class S, bool TRANSPOSED>
GPU_DEVICE void matrix_stage_keys(const patch_source &t, bool by_quads, typename S::keys &squares,
                                  uint16_t *tile)
{
    if (by_quads) {
        squares.zero_outside(t);
        TRANSPOSED ? squares.put_columns(tile) : squares.put_rows(tile);
    } else {
        patch_copy_misaligned<S::KEYS, S::WIDTH, S::THREADS>(t, [&](int r, int c, uint16_t x) {
            *(TRANSPOSED ? patch_element<S::KEYS>(tile, c, r)
                         : patch_element<S::WIDTH>(tile, r, c)) = x;
        });
    }
}

/* Loads the job's keys, transposed keys and values: into registers, through the room of one of
 * them, or else each into its own tile. */
template <class S>
GPU_DEVICE void matrix_load_keys(const fattn_gpu_args &args, const matrix_job &job,
                                 const fattn_sequence &seq, matrix_backward_scratch<S> &s,
                                 matrix_held<S> &held)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const bool k_square = patch_loads_by_quads(g, FATTN_GPU_QUADS_K, p.k.seq, p.dim);
    const bool v_square = patch_loads_by_quads(g, FATTN_GPU_QUADS_V, p.v.seq, p.dim_v);
    const uint16_t *const k_from =
        (const uint16_t *)g.buffers.k + gpu_key_at(g, seq, p.k, job.b, job.hk, job.j0);
    const uint16_t *const v_from =
        (const uint16_t *)g.buffers.v + gpu_key_at(g, seq, p.v, job.b, job.hk, job.j0);
    const patch_source k = {k_from, p.k.seq, (int)p.dim, job.keys};
    const patch_source v = {v_from, p.v.seq, (int)p.dim_v, job.keys};
    typename S::keys squares;
    squares.fetch(k, k_square);
    matrix_stage_keys<S, false>(k, k_square, squares, s.keys(0));
    if constexpr (S::IS_HELD) {
        gpu_sync();
        matrix_hold<S::WIDTH / 8, S::TILES, S::STEPS>(s.room, matrix_wave_key<S>(), held.k);
        gpu_sync();
    }
    matrix_stage_keys<S, true>(k, k_square, squares, s.keys(1));
    squares.fetch(v, v_square);
    if constexpr (S::IS_HELD) {
        gpu_sync();
        matrix_hold<S::KEYS / 8, S::DQ_TILES, S::KEY_STEPS>(s.room, matrix_wave_channel<S>(),
                                                            held.transposed);
        gpu_sync();
    }
    matrix_stage_keys<S, false>(v, v_square, squares, s.keys(2));
    if constexpr (S::IS_HELD) {
        gpu_sync();
        matrix_hold<S::WIDTH / 8, S::TILES, S::STEPS>(s.room, matrix_wave_key<S>(), held.v);
        gpu_sync();
    }
}

/* --- Queries ---------------------------------------------------------------------------------- */

/* The next tile, between load and store: the thread's part of q and dO, and its lse or delta. */
template <class S> struct matrix_moving {
    typename S::queries part[S::LOADED];
    float row;
    int live;
    bool by_quads, unpadded; /* unpadded: all its rows and channels exist */
};

/* Whether part n of what a thread loads belongs to dO. */
template <class S> GPU_DEVICE bool matrix_is_dout(int n)
{
    return S::IS_HALVED ? matrix_wave() >= S::WAVES / 2 : n != 0;
}

/* Rows of q and dO. */
typedef struct matrix_queries {
    patch_source q, dout;
    int64_t at; /* in lse */
    bool by_quads;
} matrix_queries;

template <class S>
GPU_DEVICE matrix_queries matrix_queries_at(const fattn_gpu_args &g, const matrix_job &job,
                                            const matrix_visit &visit)
{
    const fattn_problem &p = g.problem;
    const int64_t i0 = (int64_t)visit.tile * S::QUERIES;
    const int live = gpu_uniform((int)fattn_min64(job.sq - i0, S::QUERIES));
    matrix_queries t;
    const int64_t q = job.q + visit.head * p.q.head + i0 * p.q.seq;
    const int64_t dout = job.dout + visit.head * p.dout.head + i0 * p.dout.seq;
    t.q = {(const uint16_t *)g.buffers.q + q, p.q.seq, (int)p.dim, live};
    t.dout = {(const uint16_t *)g.buffers.dout + dout, p.dout.seq, (int)p.dim_v, live};
    t.at = job.at + visit.head * p.total_q + i0;
    t.by_quads = patch_loads_by_quads(g, FATTN_GPU_QUADS_Q, p.q.seq, p.dim) &&
                 patch_loads_by_quads(g, FATTN_GPU_QUADS_DOUT, p.dout.seq, p.dim_v);
    return t;
}

template <class S>
GPU_DEVICE void matrix_backward_fetch(const fattn_gpu_args &args, const matrix_job &job,
                                      const matrix_visit &visit, matrix_moving<S> &moving)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const matrix_queries t = matrix_queries_at<S>(g, job, visit);
    moving.live = t.q.live;
    moving.by_quads = t.by_quads;
    moving.unpadded = t.q.live == S::QUERIES && t.q.dim == S::WIDTH && t.dout.dim == S::WIDTH;
    GPU_UNROLL
    for (int n = 0; n < S::LOADED; n++) {
        moving.part[n].fetch(matrix_is_dout<S>(n) ? t.dout : t.q, t.by_quads);
    }
    /* Rows that do not exist get an lse of +inf, which makes their probabilities 0. */
    const gpu_workspace saved = gpu_workspace_of<S::WIDTH>(g);
    const int r = (int)(patch_thread() % S::QUERIES);
    const bool of_delta = gpu_thread_anew() >= S::QUERIES;
    moving.row = of_delta ? 0 : fattn_f32_infinity();
    if (gpu_thread_anew() < 2 * S::QUERIES && r < t.q.live) {
        moving.row = (of_delta ? saved.delta : saved.lse)[t.at + r];
    }
}

template <class S, bool TRANSPOSED>
GPU_DEVICE void matrix_put(const fattn_gpu_args &args, const matrix_job &job,
                           const matrix_visit &visit, matrix_moving<S> &moving,
                           matrix_backward_scratch<S> &s)
{
    const fattn_gpu_args &g = gpu_anew(args);
    if (!moving.by_quads) {
        const matrix_queries t = matrix_queries_at<S>(g, job, visit);
        GPU_UNROLL
        for (int n = 0; n < 2; n++) {
            patch_copy_misaligned<S::QUERIES, S::WIDTH, S::THREADS>(
                n ? t.dout : t.q, [&](int r, int c, uint16_t x) {
                    *(TRANSPOSED ? patch_element<S::QUERIES>(s.columns(n), c, r)
                                 : patch_element<S::WIDTH>(s.rows(n), r, c)) = x;
                });
        }
    } else {
        GPU_UNROLL
        for (int n = 0; n < S::LOADED; n++) {
            const bool of_dout = matrix_is_dout<S>(n);
            if (!moving.unpadded) {
                const int64_t dim = of_dout ? g.problem.dim_v : g.problem.dim;
                moving.part[n].zero_outside({nullptr, 0, (int)dim, moving.live});
            }
            if (TRANSPOSED) {
                moving.part[n].put_columns(s.columns(of_dout));
            } else {
                moving.part[n].put_rows(s.rows(of_dout));
            }
        }
    }
    if (!TRANSPOSED && gpu_thread_anew() < 2 * S::QUERIES) {
        /* Every NaN becomes the one that patch_pack() keeps. */
        const bool is_nan = moving.row != moving.row;
        s.of_rows[gpu_thread_anew()] = is_nan ? __builtin_nanf("") : moving.row;
    }
}

/* 2^x by the instruction alone, which returns 0 for subnormal results. */
GPU_DEVICE float matrix_exp2(float x) { return __builtin_amdgcn_exp2f(x); }

/* --- Pairs ------------------------------------------------------------------------------------ */

/* x += products of rows in LDS and keys, which are held in registers or are in LDS. */
template <class S>
GPU_DEVICE void matrix_backward_dots(const uint16_t *rows, const uint16_t *keys,
                                     const matrix_operand held[S::TILES][matrix_held<S>::STEPS],
                                     patch x[S::TILES])
{
    enum { CHUNKS = S::WIDTH / 8 };
    const int row = patch_rows_place<CHUNKS>(0);
    const int key = patch_columns_place<CHUNKS>(matrix_wave_key<S>(), 0);
    GPU_UNROLL
    for (int n = 0; n < S::STEPS; n++) {
        const int chunk = n * PATCH_DEPTH / 8;
        if (!S::IS_PACED) {
            patch_pause(n);
        }
        const patch_rows a = patch_load_rows<CHUNKS>(rows, row, 0, chunk);
        GPU_UNROLL
        for (int t = 0; t < S::TILES; t++) {
            if constexpr (S::IS_HELD) {
                patch_add<typename S::type>(x[t], a, held[t][n]);
            } else {
                patch_add<typename S::type>(x[t], a, patch_load<CHUNKS>(keys, key, 16 * t, chunk));
            }
        }
    }
}

/* Sets scores of pairs outside the band to -inf. */
template <class S>
GPU_DEVICE void matrix_apply_band(const matrix_job &job, int64_t i0, patch x[S::TILES])
{
    enum { FAR = 1 << 20 }; /* more than a tile */
    const fattn_band &band = job.band;
    const int64_t limit = INT64_C(1) << 62;
    /* query i attends to key j if j - right <= i + diagonal <= j + left */
    const int64_t aligned = job.j0 - band.diagonal - i0;
    const int64_t low = aligned - fattn_min64(band.right, limit);
    const int64_t high = aligned + fattn_min64(band.left, limit);
    const int first = gpu_uniform(band.right < 0 ? -FAR : (int)gpu_clamp(low, -FAR, FAR));
    const int last = gpu_uniform(band.left < 0 ? FAR : (int)gpu_clamp(high, -FAR, FAR));
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        const int key = matrix_wave_key<S>() + 16 * t + patch_column();
        const int from = key < job.keys ? first + key - patch_row() : FAR;
        const int to = last + key - patch_row();
        GPU_UNROLL
        for (int e = 0; e < 8; e++) {
            const bool keep = from <= e & e <= to;
            patch_set(x[t], e, keep ? patch_get(x[t], e) : -fattn_f32_infinity());
        }
    }
}

/* Turns scores in x into P, and dP in dp into dS. */
template <class S>
GPU_DEVICE void matrix_differentiate(const fattn_gpu_args &args, const matrix_job &job,
                                     const matrix_visit &visit, matrix_backward_scratch<S> &s,
                                     patch x[S::TILES], patch dp[S::TILES])
{
    const fattn_gpu_args &g = gpu_anew(args);
    if (job.terms) { /* a scale that cannot be folded into the unit */
        GPU_UNROLL
        for (int n = 0; n < 8 * S::TILES; n++) {
            patch_set(x[n / 8], n % 8, patch_get(x[n / 8], n % 8) * g.rule.scale);
        }
    }
    if (visit.kind == FATTN_TILE_PARTIAL) {
        matrix_apply_band<S>(job, (int64_t)visit.tile * S::QUERIES, x);
    }
    const int row = patch_row();
    matrix_floats lse[2], delta[2];
    GPU_UNROLL
    for (int n = 0; n < 2; n++) {
        lse[n] = *(const matrix_floats *)&s.lse()[row + 4 * n];
        delta[n] = *(const matrix_floats *)&s.delta()[row + 4 * n];
    }
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        GPU_UNROLL
        for (int t = 0; t < S::TILES; t++) {
            const float p = matrix_exp2(fmaf(patch_get(x[t], e), job.unit, -lse[e / 4][e % 4]));
            patch_set(x[t], e, p);
            patch_set(dp[t], e, p * (patch_get(dp[t], e) - delta[e / 4][e % 4]));
        }
    }
}

/* --- Every feature ---------------------------------------------------------------------------- */

/* Writes or adds ds of a pair to dBias. Before the run, entries are 0 or the values to accumulate
 * to. If dBias is summed over axes, the sums are in the workspace: gpu_add() has no effect on
 * fine-grained (coherent) memory, which the caller's may be. */
GPU_DEVICE void matrix_store_dbias(const fattn_gpu_args &g, const gpu_pairs &t, gpu_query q,
                                   int64_t j, float ds)
{
    const fattn_problem &p = g.problem;
    if (g.sums >= 0) {
        gpu_add((float *)(g.workspace + g.sums) + gpu_term_at(t, g.sums_stride, q, j), ds);
    } else {
        float *const to = (float *)g.buffers.dbias + gpu_term_at(t, p.dbias_stride, q, j);
        *to = p.features & FATTN_ACCUMULATE ? *to + ds : ds;
    }
}

/* How many entries dBias has. Axes that it is summed over count once. */
GPU_DEVICE int64_t matrix_sums(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    return (stride[0] ? p.batch : 1) * (stride[1] ? p.heads_q : 1) * (stride[2] ? p.seqlen_q : 1) *
           (stride[3] ? p.seqlen_k : 1);
}

/* Clears the sums. */
GPU_DEVICE void matrix_sums_clear(const fattn_gpu_args &g)
{
    float *const sums = (float *)(g.workspace + g.sums);
    const int64_t count = matrix_sums(g), step = gpu_blocks() * gpu_threads();
    for (int64_t n = gpu_block() * gpu_threads() + gpu_thread(); n < count; n += step) {
        sums[n] = 0;
    }
}

/* Writes or adds row n of the sums to dBias. */
GPU_DEVICE void matrix_store_dbias_row(const fattn_gpu_args &g, int64_t n)
{
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    const int64_t rows = stride[2] ? p.seqlen_q : 1, heads = stride[1] ? p.heads_q : 1;
    const int64_t keys = stride[3] ? p.seqlen_k : 1;
    const int64_t head = fattn_quotient(n, rows), b = fattn_quotient(head, heads);
    const float *const from = (const float *)(g.workspace + g.sums) + n * keys;
    float *const to = (float *)g.buffers.dbias + b * stride[0] + (head - b * heads) * stride[1] +
                      (n - head * rows) * stride[2];
    for (int64_t j = gpu_thread(); j < keys; j += gpu_threads()) {
        float *const entry = to + j * stride[3];
        *entry = p.features & FATTN_ACCUMULATE ? *entry + from[j] : from[j];
    }
}

/* Computes P and dS of query q, which is row r of its tile, and key j, with every feature. x: the
 * dot product, and then P; dp: dP, and then dS. */
template <class S>
GPU_DEVICE void matrix_differentiate_pair(const fattn_gpu_args &args, unsigned terms,
                                          matrix_backward_scratch<S> &s, int r, gpu_query q,
                                          int64_t j, float *x, float *dp)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const gpu_pairs &t = s.pairs;
    const bool exists = q.h >= 0 && j < t.seq.sk;
    float z = 1, dscore;
    if (g.problem.features & FATTN_DROPOUT && exists) {
        gpu_drop<1>(g, t, q, j, &z);
    }
    const fattn_score_pair pair = gpu_pair(g, t, terms, q, j);
    const float score = fattn_score(&g.rule, terms, *x, pair, &dscore);
    const float p = matrix_exp2(fmaf(score, g.rule.unit, -s.lse()[r]));
    const float ds = p * (z * *dp - s.delta()[r]);
    if (g.problem.outputs & FATTN_OUT_DBIAS && exists) {
        matrix_store_dbias(g, t, q, j, ds);
    }
    /* P is multiplied by 1 or 0, and dV by Z at the end, so that P stays in the range of f16. A NaN
     * stays a NaN in a dropped pair, as in P Z. */
    *x = p * (z != 0 ? 1 : 0);
    *dp = ds * dscore;
}

/* matrix_differentiate() with every feature. The features take much code. So that it exists only
 * once, it is in a loop that rotates the thread's elements through its first register. */
template <class S>
GPU_DEVICE void matrix_differentiate_fully(const fattn_gpu_args &g, const matrix_job &job,
                                           const matrix_visit &visit, matrix_backward_scratch<S> &s,
                                           patch x[S::TILES], patch dp[S::TILES])
{
    enum { COUNT = 8 * S::TILES };
    const unsigned terms = g.rule.terms | (visit.kind == FATTN_TILE_PARTIAL ? FATTN_SCORE_KEEP : 0);
    const int64_t i0 = (int64_t)visit.tile * S::QUERIES;
    GPU_ROLLED
    for (int n = 0; n < COUNT; n++) {
        const int r = patch_row() + n % 8;
        const int key = matrix_wave_key<S>() + n / 8 * 16 + patch_column();
        gpu_query q;
        q.i = (int32_t)i0 + r;
        q.h = q.i < job.sq ? (int32_t)job.hk * job.group + visit.head : -1;
        float first = patch_get(x[0], 0), dfirst = patch_get(dp[0], 0);
        matrix_differentiate_pair<S>(g, terms, s, r, q, job.j0 + key, &first, &dfirst);
        GPU_UNROLL
        for (int m = 1; m < COUNT; m++) {
            patch_set(x[(m - 1) / 8], (m - 1) % 8, patch_get(x[m / 8], m % 8));
            patch_set(dp[(m - 1) / 8], (m - 1) % 8, patch_get(dp[m / 8], m % 8));
        }
        patch_set(x[S::TILES - 1], 7, first);
        patch_set(dp[S::TILES - 1], 7, dfirst);
    }
}

/* --- Sums ------------------------------------------------------------------------------------- */

/* sums += products of transposed rows in LDS, whose rows are channels, and the wave's P or dS. */
template <class S>
GPU_DEVICE void matrix_add_products(const uint16_t *columns, const patch_packed x[S::TILES],
                                    patch sums[S::TILES * S::STEPS])
{
    enum { CHUNKS = S::QUERIES / 8 };
    const int place = patch_rows_place<CHUNKS>(0);
    matrix_operand weights[S::TILES];
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        weights[t] = patch_as_operand(x[t]);
    }
    GPU_UNROLL
    for (int n = 0; n < S::STEPS; n++) {
        if (!S::IS_PACED) {
            patch_pause(n);
        }
        const patch_rows a = patch_load_rows<CHUNKS>(columns, place, n * PATCH_DEPTH, 0);
        GPU_UNROLL
        for (int t = 0; t < S::TILES; t++) {
            patch_add<typename S::type>(sums[t * S::STEPS + n], a, weights[t]);
        }
    }
}

/* Computes the wave's channels of dQ, and adds them to the workspace. */
template <class S>
GPU_DEVICE void matrix_add_dq(const fattn_gpu_args &args, const matrix_job &job,
                              const matrix_visit &visit, matrix_backward_scratch<S> &s,
                              const matrix_held<S> &held)
{
    enum { CHUNKS = S::KEYS / 8 };
    const int row = patch_rows_place<CHUNKS>(0);
    const int channel = patch_columns_place<CHUNKS>(matrix_wave_channel<S>(), 0);
    patch dq[S::DQ_TILES];
    GPU_UNROLL
    for (int t = 0; t < S::DQ_TILES; t++) {
        patch_clear(dq[t]);
    }
    patch_rows rows[S::IS_PACED ? S::KEY_STEPS : 1]; /* all of them are loaded first */
    GPU_UNROLL
    for (int n = 0; n < S::KEY_STEPS && S::IS_PACED; n++) {
        rows[n] = patch_load_rows<CHUNKS>(s.ds, row, 0, n * PATCH_DEPTH / 8);
    }
    GPU_UNROLL
    for (int n = 0; n < S::KEY_STEPS; n++) {
        const int chunk = n * PATCH_DEPTH / 8;
        patch_pause(n);
        const patch_rows a = S::IS_PACED ? rows[n] : patch_load_rows<CHUNKS>(s.ds, row, 0, chunk);
        GPU_UNROLL
        for (int t = 0; t < S::DQ_TILES; t++) {
            if constexpr (S::IS_HELD) {
                patch_add<typename S::type>(dq[t], a, held.transposed[t][n]);
            } else {
                patch_add<typename S::type>(dq[t], a,
                                            patch_load<CHUNKS>(s.keys(1), channel, 16 * t, chunk));
            }
        }
    }

    const fattn_gpu_args &g = gpu_anew(args);
    const int64_t i0 = (int64_t)visit.tile * S::QUERIES;
    const int64_t first = job.at + visit.head * g.problem.total_q + i0;
    const int live = gpu_uniform((int)fattn_min64(job.sq - i0, S::QUERIES));
    float *const to = gpu_workspace_of<S::WIDTH>(g).dq + first * S::WIDTH +
                      (patch_row() * S::WIDTH + matrix_wave_channel<S>() + patch_column());
    const int live_rows = live - patch_row();
    if (live == S::QUERIES) {
        GPU_UNROLL
        for (int n = 0; n < 8 * S::DQ_TILES; n++) {
            gpu_add(to + n % 8 * S::WIDTH + 16 * (n / 8), patch_get(dq[n / 8], n % 8));
        }
        return;
    }
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        if (e < live_rows) {
            GPU_UNROLL
            for (int t = 0; t < S::DQ_TILES; t++) {
                gpu_add(to + e * S::WIDTH + 16 * t, patch_get(dq[t], e));
            }
        }
    }
}

/* --- The main loop ---------------------------------------------------------------------------- */

/* Whether a tile is empty, partial or full. All threads must call it. */
template <class S>
GPU_DEVICE fattn_tile_kind matrix_kind(const fattn_gpu_args &args, const matrix_job &job,
                                       const gpu_pairs &t, int head, int tile)
{
    if (S::IS_LEAN) {
        return job.full <= tile && tile < job.full_past ? FATTN_TILE_FULL : FATTN_TILE_PARTIAL;
    }
    const fattn_gpu_args &g = gpu_anew(args);
    const int64_t i0 = (int64_t)tile * S::QUERIES, i1 = fattn_min64(i0 + S::QUERIES, job.sq);
    const int64_t j1 = job.j0 + S::KEYS;
    const fattn_tile_kind kind = gpu_tile_kind(g, t, i0, i1, job.hk * job.group + head, 1, job.j0,
                                               fattn_min64(j1, job.band.keys), j1);
    return (fattn_tile_kind)gpu_uniform(kind);
}

/* The first tile from this one on that is not empty, or one with a head past the last. */
template <class S>
GPU_DEVICE matrix_visit matrix_seek(const fattn_gpu_args &g, const matrix_job &job,
                                    const gpu_pairs &t, int head, int tile)
{
    matrix_visit visit = {head, tile, FATTN_TILE_EMPTY};
    for (;; visit.tile++) {
        if (visit.tile >= job.past) {
            visit.tile = job.first;
            visit.head++;
        }
        if (visit.head >= job.group) {
            return visit;
        }
        visit.kind = matrix_kind<S>(g, job, t, visit.head, visit.tile);
        if (visit.kind != FATTN_TILE_EMPTY) {
            return visit;
        }
    }
}

/* Computes P and dS of the wave's keys, rounded, and stores dS to LDS. */
template <class S>
GPU_DEVICE void matrix_backward_weights(const fattn_gpu_args &g, const matrix_job &job,
                                        const matrix_visit &visit, matrix_backward_scratch<S> &s,
                                        const matrix_held<S> &held, patch_packed p[S::TILES],
                                        patch_packed ds[S::TILES])
{
    typedef typename S::type T;
    patch x[S::TILES], dp[S::TILES];
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        patch_clear(x[t]);
        patch_clear(dp[t]);
    }
    matrix_backward_dots<S>(s.rows(0), s.keys(0), held.k, x);
    matrix_backward_dots<S>(s.rows(1), s.keys(2), held.v, dp);
    if (S::IS_PACED) {
        patch_pace<4 * S::STEPS, 4, S::TILES>();
    }
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        patch_finish(x[t]);
        patch_finish(dp[t]);
    }
    if (S::IS_LEAN) {
        matrix_differentiate<S>(g, job, visit, s, x, dp);
    } else {
        matrix_differentiate_fully<S>(g, job, visit, s, x, dp);
    }
    const int place = patch_store_place<S::KEYS / 8>(matrix_wave_key<S>() + patch_column());
    GPU_UNROLL
    for (int t = 0; t < S::TILES; t++) {
        p[t] = patch_pack<T, !S::IS_LEAN>(x[t]);
        ds[t] = patch_pack<T, !S::IS_LEAN>(dp[t]);
        patch_store<S::KEYS / 8>(s.ds, place, 2 * t, ds[t]);
    }
}

/* Visits the queries of every head of the group. */
template <class S>
GPU_DEVICE void matrix_backward_walk(const fattn_gpu_args &g, const matrix_job &job,
                                     matrix_backward_scratch<S> &s, const matrix_held<S> &held,
                                     matrix_key_sums<S> &sums)
{
    matrix_moving<S> moving;
    patch_packed p[S::TILES], ds[S::TILES];
    matrix_visit now = matrix_seek<S>(g, job, s.pairs, 0, job.first);
    if (now.head < job.group) {
        matrix_backward_fetch<S>(g, job, now, moving);
    }
    while (now.head < job.group) {
        const matrix_visit next = matrix_seek<S>(g, job, s.pairs, now.head, now.tile + 1);
        const bool ahead = next.head < job.group;
        matrix_put<S, false>(g, job, now, moving, s);
        if (S::IS_APART) {
            matrix_put<S, true>(g, job, now, moving, s);
        }
        gpu_sync();
        if (S::IS_APART && ahead) {
            matrix_backward_fetch<S>(g, job, next, moving);
        }
        matrix_backward_weights<S>(g, job, now, s, held, p, ds);
        if (!S::IS_APART) {
            gpu_sync(); /* all threads have read the rows */
            matrix_put<S, true>(g, job, now, moving, s);
            if (ahead) {
                matrix_backward_fetch<S>(g, job, next, moving);
            }
        }
        gpu_sync();
        /* dQ comes first, because its additions branch: otherwise the compiler issues products
         * after the branches, while their operands occupy registers. */
        matrix_add_dq<S>(g, job, now, s, held);
        matrix_add_products<S>(s.columns(1), p, sums.dv);
        matrix_add_products<S>(s.columns(0), ds, sums.dk);
        if (S::IS_PACED) {
            patch_pace<4 * S::STEPS, 4, S::TILES>();
        }
        gpu_sync();
        now = next;
    }
}

/* --- Items ------------------------------------------------------------------------------------ */

/* Stores the wave's part of dk or dv, times `factor`. Keys that belong to the sequence but are
 * beyond its used length get 0. The loop moves the patches through the first one. */
template <class S>
GPU_DEVICE void matrix_store_keys(const fattn_gpu_args &args, const matrix_job &job,
                                  const fattn_sequence &seq, const gpu_tensor &t,
                                  const fattn_strides &stride, float factor,
                                  patch sums[S::TILES * S::STEPS])
{
    const bool adds = args.problem.features & FATTN_ACCUMULATE;
    GPU_ROLLED
    for (int n = 0; n < S::TILES * S::STEPS; n++) {
        const int key = matrix_wave_key<S>() + n / S::STEPS * 16 + patch_column();
        const int64_t j = job.j0 + key;
        const int64_t at = gpu_key_at(gpu_anew(args), seq, stride, job.b, job.hk, j);
        GPU_UNROLL
        for (int m = 0; m < 2; m++) {
            const int c = n % S::STEPS * PATCH_DEPTH + patch_row() + 4 * m;
            float x[4] = {0, 0, 0, 0};
            if (j < (adds ? seq.sk : seq.slot_k)) {
                if (adds) {
                    gpu_load_quad(t, at, c, x);
                }
                GPU_UNROLL
                for (int e = 0; e < 4; e++) {
                    const float sum = patch_get(sums[0], 4 * m + e);
                    x[e] = key < job.keys ? fmaf(sum, factor, x[e]) : x[e];
                }
                gpu_store_quad(t, at, c, x);
            }
        }
        GPU_UNROLL
        for (int m = 1; m < S::TILES * S::STEPS; m++) {
            sums[m - 1] = sums[m];
        }
    }
}

/* Stores dK and dV of a job. It overwrites the sums. */
template <class S>
GPU_DEVICE void matrix_store_sums(const fattn_gpu_args &args, const matrix_job &job,
                                  const matrix_backward_scratch<S> &s, matrix_key_sums<S> &sums)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const fattn_problem &p = g.problem;
    const fattn_sequence seq = gpu_sequence(g, job.b);
    if (p.outputs & FATTN_OUT_DK) {
        const gpu_tensor dk =
            gpu_tensor_of(g, g.buffers.dk, g.dtype_gradient, FATTN_GPU_QUADS_DK, p.dim);
        matrix_store_keys<S>(g, job, seq, dk, p.dk, g.rule.scale, sums.dk);
    }
    if (p.outputs & FATTN_OUT_DV) {
        const gpu_tensor dv =
            gpu_tensor_of(g, g.buffers.dv, g.dtype_gradient, FATTN_GPU_QUADS_DV, p.dim_v);
        const bool dropout = !S::IS_LEAN && p.features & FATTN_DROPOUT;
        matrix_store_keys<S>(g, job, seq, dv, p.dv, dropout ? s.pairs.dropout.multiplier : 1,
                             sums.dv);
    }
}

/* Finds the tiles of queries that attend to every key of the job; none, if keys are missing. */
template <class S> GPU_DEVICE void matrix_find_full(matrix_job &job)
{
    const int64_t limit = INT64_C(1) << 62, beyond = (int64_t)job.past * S::QUERIES;
    const fattn_band &band = job.band;
    /* query i attends to key j if j - right <= i + diagonal <= j + left */
    const int64_t low = job.j0 + S::KEYS - 1 - band.diagonal - fattn_min64(band.right, limit);
    const int64_t high = job.j0 - band.diagonal + fattn_min64(band.left, limit);
    const int64_t first = band.right < 0 ? 0 : gpu_clamp(low, 0, beyond);
    const int64_t past = band.left < 0 ? beyond : gpu_clamp(high + 1, 0, beyond);
    job.full = gpu_uniform((int)((first + S::QUERIES - 1) / S::QUERIES));
    job.full_past = gpu_uniform(job.keys >= S::KEYS ? (int)(past / S::QUERIES) : 0);
}

template <class S>
GPU_DEVICE matrix_job matrix_job_of(const fattn_gpu_args &g, const gpu_pairs &t, int64_t hk,
                                    int64_t block)
{
    const fattn_problem &p = g.problem;
    matrix_job job;
    job.b = t.b;
    job.hk = hk;
    job.group = gpu_uniform((int)g.group);
    job.band.keys = gpu_uniform(t.band.keys);
    job.band.diagonal = gpu_uniform(t.band.diagonal);
    job.band.left = t.band.left;
    job.band.right = t.band.right;
    job.sq = gpu_uniform(t.seq.sq);
    job.j0 = block * S::KEYS;
    job.keys = gpu_uniform((int)gpu_clamp(t.seq.sk - job.j0, 0, INT32_MAX));
    const fattn_range rows = gpu_queries_of(t, job.j0, fattn_min64(job.j0 + S::KEYS, t.seq.sk));
    const int past = (int)((rows.past + S::QUERIES - 1) / S::QUERIES);
    job.first = gpu_uniform((int)(rows.first / S::QUERIES));
    job.past = gpu_uniform(job.keys > 0 ? past : 0);
    matrix_find_full<S>(job);
    job.unit = g.rule.unit;
    job.terms = g.rule.terms;
    const int64_t h0 = hk * job.group;
    job.at = gpu_uniform(gpu_lse_at(p, t.seq, t.b, h0));
    job.q = gpu_uniform(gpu_query_at(t.seq, p.q, 0, h0));
    job.dout = gpu_uniform(gpu_query_at(t.seq, p.dout, 0, h0));
    return job;
}

/* Skips the first tiles of queries that a bias hides from all keys of the job. */
template <class S>
GPU_DEVICE void matrix_skip_hidden(const fattn_gpu_args &args, const gpu_pairs &t, matrix_job &job)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int64_t j1 = job.j0 + fattn_min64(job.keys, S::KEYS);
    const int64_t past = fattn_min64((int64_t)job.past * S::QUERIES, job.sq);
    const int64_t first = gpu_visible_first(g, t, job.j0, j1, job.hk * job.group, job.group,
                                            (int64_t)job.first * S::QUERIES, past);
    job.first = gpu_uniform(first < past ? (int)(first / S::QUERIES) : job.past);
}

/* Tile `block` of the keys of (sequence, key/value head) number `head`. */
template <class S>
GPU_DEVICE void matrix_backward_item(const fattn_gpu_args &args, matrix_backward_scratch<S> &s,
                                     int64_t head, int64_t block)
{
    const fattn_gpu_args &g = gpu_anew(args);
    const int64_t b = gpu_uniform(fattn_quotient(head, g.problem.heads_k));
    const gpu_pairs pairs = gpu_pairs_of(g, b);
    matrix_job job = matrix_job_of<S>(g, pairs, head - b * g.problem.heads_k, block);
    if (job.j0 >= pairs.seq.slot_k) {
        return;
    }
    if (!S::IS_LEAN) {
        if (gpu_thread_anew() == 0) {
            s.pairs = pairs;
        }
        gpu_sync();
        if (g.problem.features & FATTN_BIAS && job.first < job.past) {
            matrix_skip_hidden<S>(g, s.pairs, job);
        }
    }
    matrix_held<S> held;
    if (job.first < job.past) {
        matrix_load_keys<S>(g, job, pairs.seq, s, held);
    }
    matrix_key_sums<S> sums;
    GPU_UNROLL
    for (int n = 0; n < S::TILES * S::STEPS; n++) {
        patch_clear(sums.dk[n]);
        patch_clear(sums.dv[n]);
    }
    if (job.first < job.past) {
        matrix_backward_walk<S>(g, job, s, held, sums);
    }
    matrix_store_sums<S>(g, job, s, sums);
}

template <class S> GPU_DEVICE void matrix_backward_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(matrix_backward_scratch<S>) <=
                      MATRIX_BACKWARD_SHARED(S::WIDTH, S::QUERIES, S::KEYS),
                  "too small");
    GPU_SHARED matrix_backward_scratch<S> s;
    const auto items = [&] {
        const fattn_gpu_args &now = gpu_anew(g);
        return now.problem.batch * now.problem.heads_k * now.tiling.k_blocks;
    };
    for (int64_t n = gpu_block(); n < items(); n += gpu_blocks()) {
        const int64_t blocks = gpu_anew(g).tiling.k_blocks;
        const int64_t head = gpu_uniform(fattn_quotient(n, blocks));
        matrix_backward_item<S>(g, s, head, n - head * blocks);
        gpu_sync(); /* all threads have read what is in LDS */
    }
}

#endif
