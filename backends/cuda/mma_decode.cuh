/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward of few rows on tensor cores, for 16-bit types: decoding. Every key is read once and
 * multiplied by 16 rows at most, so what counts is how many bytes are on their way from memory.
 *
 * A block takes the rows of one key/value head, the queries of all its query heads, along a part of
 * its keys (an item of the schedule). Its warps share the queries alone: warp w meets tiles w,
 * w + WARPS, ... of the part, which it copies by itself into a ring of its own, and waits for
 * nobody until the part is over. Then what the warps have met is merged, in order of the warps.
 */
#ifndef FATTN_CUDA_MMA_DECODE_CUH
#define FATTN_CUDA_MMA_DECODE_CUH

#include "backends/cuda/mma_forward.cuh"

/* T: mma_f16 or mma_bf16. W: channels of q, k and v, padded. BN: keys of a tile. N: warps. STAGES:
 * tiles in a warp's ring. */
template <class T, int W, int BN, int N, int STAGES, bool LEAN> struct mma_decode_shape {
    typedef T type;
    static constexpr uint64_t KNOWN = LEAN ? 0 : MMA_ANY;
    enum {
        WIDTH = W,
        TILES = 1,
        WARP_TILES = 0, /* all warps have the same rows */
        ROWS = MMA_DECODE_ROWS,
        WARPS = N,
        THREADS = 32 * N,
        KEYS = BN,
        OWN = BN / 4,
        NEXT = 4,
        DEPTH = STAGES,
        RING = N * STAGES,
        IS_LEAN = LEAN
    };
};

/* What the warps have met, in shared memory where keys and values were. Rows of o are shifted by
 * eight words against each other, so that the quads of a warp write to different banks. */
template <class S> struct mma_meeting {
    float o[S::WARPS][S::ROWS][S::WIDTH + 8];
    fattn_softmax state[S::WARPS][S::ROWS];
    float factor[S::ROWS], alpha[S::ROWS]; /* what a row's sums are to be multiplied by */
    bool empty[S::ROWS];                   /* the row, and not a part of it, has met nothing */
};

/* --- The order of tiles ----------------------------------------------------------------------- */

/* The tiles of an item's part in the order in which they are met: from `turn` on, and then those
 * before. Parts begin at distances that are powers of two, and blocks run side by side: did all of
 * them begin at the beginning, they would ask the same channels of memory at the same time. */
typedef struct mma_round {
    int first, count, turn;
} mma_round;

GPU_DEVICE mma_round mma_round_of(const mma_item &w, int64_t item)
{
    mma_round round;
    round.first = w.block;
    round.count = w.past > w.block ? w.past - w.block : 0;
    round.turn = (int)((uint64_t)((uint32_t)item * 0x9e3779b9u) * (uint32_t)round.count >> 32);
    return round;
}

/* Number n of them. */
GPU_DEVICE int mma_round_tile(const mma_round &round, int n)
{
    const int at = n + round.turn;
    return round.first + (at < round.count ? at : at - round.count);
}

/* --- Copies ----------------------------------------------------------------------------------- */

/* How a lane copies: chunk `chunk` of rows `row`, `row` + STEP, ... of a tile. Where rows of pages
 * lie it learns from the lanes that looked them up a tile ahead: lane n finds key n % KEYS. */
template <class S> struct mma_reader {
    enum { CHUNKS = S::WIDTH / 8, STEP = GPU_WAVE / CHUNKS };
    const uint16_t *k, *v; /* of the lane's key in pages, or of the lane's chunk in row `row` */
    int chunk, row, bytes_k, bytes_v;
    uint64_t once; /* how L2 treats keys and values */
};

/* Finds the lane's key of tile `block` in pages. */
template <class S>
GPU_DEVICE void mma_look_up(const fattn_gpu_args &g, const mma_item &w, mma_reader<S> &at,
                            int block)
{
    const fattn_problem &p = g.problem;
    const uint32_t j = (uint32_t)block * S::KEYS + (uint32_t)gpu_thread() % S::KEYS;
    const uint32_t size = (uint32_t)p.page_size, page = j / size, row = j - page * size;
    int64_t entry = 0;
    if (j < (uint32_t)w.keys) {
        entry = g.buffers.block_table[w.pairs.b * p.block_table_stride + page];
        entry = gpu_clamp(entry, 0, p.num_pages - 1);
    }
    at.k = (const uint16_t *)g.buffers.k + entry * p.k.batch + row * p.k.seq + w.hk * p.k.head;
    at.v = (const uint16_t *)g.buffers.v + entry * p.v.batch + row * p.v.seq + w.hk * p.v.head;
}

template <class S>
GPU_DEVICE mma_reader<S> mma_reader_of(const fattn_gpu_args &g, const mma_item &w,
                                       const mma_round &round, int first)
{
    typedef mma_reader<S> reader;
    const fattn_problem &p = g.problem;
    const int lane = gpu_thread() % GPU_WAVE;
    reader at;
    at.chunk = lane % reader::CHUNKS;
    at.row = lane / reader::CHUNKS;
    at.bytes_k = mma_chunk_bytes(at.chunk, (int)p.dim);
    at.bytes_v = mma_chunk_bytes(at.chunk, (int)p.dim_v);
    at.once = mma_read_once();
    if (p.features & FATTN_PAGED) {
        mma_look_up(g, w, at, mma_round_tile(round, first));
    } else {
        at.k = (const uint16_t *)w.k + at.row * p.k.seq + 8 * at.chunk;
        at.v = (const uint16_t *)w.v + at.row * p.v.seq + 8 * at.chunk;
    }
    return at;
}

GPU_DEVICE const uint16_t *mma_pointer_of(const uint16_t *p, int lane)
{
    return (const uint16_t *)__shfl_sync(0xffffffffu, (unsigned long long)p, lane);
}

/* Begins to copy tile number `number`, if there is one, to a place of the ring, with zeros for keys
 * that do not exist, and looks up the warp's next. */
template <class S>
GPU_DEVICE void mma_read_tile(const fattn_gpu_args &g, const mma_item &w, mma_scratch<S> &s,
                              mma_reader<S> &at, const mma_round &round, int place, int number)
{
    typedef mma_reader<S> reader;
    const fattn_problem &p = g.problem;
    if (number >= round.count) {
        return;
    }
    const int block = mma_round_tile(round, number);
    const int live = w.keys - block * S::KEYS;
    const uint32_t k = mma_shared(s.k[place]), v = mma_shared(s.v[place]);
    if (p.features & FATTN_PAGED) {
        GPU_UNROLL
        for (int n = 0; n < S::KEYS; n += reader::STEP) {
            const int r = at.row + n;
            const uint16_t *const from_k = mma_pointer_of(at.k, r) + 8 * at.chunk;
            const uint16_t *const from_v = mma_pointer_of(at.v, r) + 8 * at.chunk;
            mma_copy_by(at.once, mma_key_place<S>(k, r, at.chunk), from_k,
                        r < live ? at.bytes_k : 0);
            mma_copy_by(at.once, mma_key_place<S>(v, r, at.chunk), from_v,
                        r < live ? at.bytes_v : 0);
        }
        mma_look_up(g, w, at, mma_round_tile(round, number + S::WARPS));
        return;
    }
    const uint16_t *from_k = at.k + (int64_t)block * S::KEYS * p.k.seq;
    const uint16_t *from_v = at.v + (int64_t)block * S::KEYS * p.v.seq;
    GPU_UNROLL
    for (int n = 0; n < S::KEYS; n += reader::STEP) {
        const int r = at.row + n;
        mma_copy_by(at.once, mma_key_place<S>(k, r, at.chunk), from_k, r < live ? at.bytes_k : 0);
        mma_copy_by(at.once, mma_key_place<S>(v, r, at.chunk), from_v, r < live ? at.bytes_v : 0);
        from_k += reader::STEP * p.k.seq;
        from_v += reader::STEP * p.v.seq;
    }
}

/* Asks L2 for the keys and values that the warp begins with, while what the stream holds before may
 * still be at work: who writes them later writes them there. Where they lie has to be known. */
template <class S>
GPU_DEVICE void mma_expect_tiles(const fattn_gpu_args &g, const mma_item &w, const mma_round &round,
                                 int warp)
{
    enum { LINES = 2 * S::WIDTH / 128, STEP = GPU_WAVE / LINES };
    const fattn_problem &p = g.problem;
    const int lane = gpu_thread() % GPU_WAVE, c = lane % LINES * 64;
    GPU_ROLLED
    for (int n = warp; n < round.count && n < (S::DEPTH - 1) * S::WARPS; n += S::WARPS) {
        const int block = mma_round_tile(round, n);
        GPU_UNROLL
        for (int r = block * S::KEYS + lane / LINES; r < (block + 1) * S::KEYS; r += STEP) {
            if (r < w.keys) {
                mma_prefetch((const uint16_t *)w.k + r * p.k.seq + c);
                mma_prefetch((const uint16_t *)w.v + r * p.v.seq + c);
            }
        }
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Begins to copy the queries. */
template <class S>
GPU_DEVICE void mma_read_queries(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w)
{
    enum { CHUNKS = S::WIDTH / 8, STEP = S::THREADS / CHUNKS };
    static_assert(S::ROWS % STEP == 0, "a thread copies as many rows as any");
    const int group = (int)w.group, c = gpu_thread() % CHUNKS;
    const int bytes = mma_chunk_bytes(c, (int)g.problem.dim);
    GPU_UNROLL
    for (int n = 0; n < S::ROWS / STEP; n++) {
        const int r = n * STEP + gpu_thread() / CHUNKS, i = r / group;
        const uint16_t *const from =
            (const uint16_t *)g.buffers.q + 8 * c +
            gpu_query_at(w.pairs.seq, g.problem.q, i, w.hk * group + r - i * group);
        mma_copy(mma_place<S::WIDTH>(mma_shared(s.q), r, c), from, r < w.rows ? bytes : 0);
    }
}

/* The item, for those who look for it later, and what features need of its rows. */
template <class S>
GPU_DEVICE void mma_name_queries(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w)
{
    if (gpu_thread() == 0) {
        s.item = w;
    }
    if constexpr (!S::IS_LEAN) {
        gpu_sync(); /* the item */
        if (gpu_thread() < S::ROWS) {
            mma_begin_row(g, s, mma_query(w, gpu_thread()), gpu_thread());
        }
    }
}

/* Meets the warp's tiles of the item's part. */
template <class S>
GPU_DEVICE void mma_decode_walk(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w,
                                int64_t item, mma_rows<S> &rows)
{
    const float unit = g.rule.unit;
    const int warp = gpu_thread() / GPU_WAVE, ring = warp * S::DEPTH;
    const mma_round round = mma_round_of(w, item);
    if (S::IS_LEAN && !gpu_sequences_differ(g.problem)) {
        mma_expect_tiles<S>(g, w, round, warp);
    }
    mma_reader<S> at = mma_reader_of<S>(g, w, round, warp);
    gpu_await_earlier(); /* tensors are read from here on */
    GPU_ROLLED
    for (int n = 0; n < S::DEPTH - 1; n++) {
        mma_read_tile<S>(g, w, s, at, round, ring + n, warp + n * S::WARPS);
        if (n == 0) {
            mma_read_queries(g, s, w);
        }
        mma_commit();
    }
    mma_name_queries(g, s, w);
    mma_rows_empty(rows);
    mma_wait<S::DEPTH - 2>();
    gpu_sync(); /* the queries are here, and who they are */
    for (int n = warp, stage = 0; n < round.count; n += S::WARPS) {
        const int block = mma_round_tile(round, n), j0 = block * S::KEYS;
        const int place = ring + stage, free = stage == 0 ? ring + S::DEPTH - 1 : place - 1;
        const bool partial = block < w.full || w.full_past <= block;
        mma_wait<S::DEPTH - 2>();
        __syncwarp(); /* every lane's copies are here, and every lane is through with the last */
        mma_read_tile<S>(g, w, s, at, round, free, n + (S::DEPTH - 1) * S::WARPS);
        mma_commit();
        float x[1][S::KEYS / 8][4] = {}, largest[1][2];
        mma_dots<typename S::type, S::WIDTH, 1, S::KEYS / 16, S::WIDTH / 16, S::NEXT>(
            mma_rows_a<S::WIDTH>(s.q, 0), mma_key_rows<S>(s.k[place]), x);
        if constexpr (S::IS_LEAN) {
            mma_score<S>(g, s, partial, j0, x);
        } else {
            mma_terms<S>(g, s, j0, x, largest);
            if (partial) {
                mma_keep<S>(s, j0, x);
            }
        }
        mma_largest<S>(x, largest);
        mma_rise<S>(unit, largest, rows);
        mma_weigh<S>(unit, rows, x);
        if constexpr (!S::IS_LEAN) {
            if (g.problem.features & FATTN_DROPOUT) {
                mma_drop<S>(g, s, j0, x);
            }
        }
        mma_mix<typename S::type, S::WIDTH, 1, S::WIDTH / 16, S::KEYS / 16, S::NEXT>(
            x, mma_key_columns<S>(s.v[place]), rows.o);
        stage = stage + 1 == S::DEPTH ? 0 : stage + 1;
    }
}

/* What all warps have met in row r. Their parts are added in order of the warps. */
template <class S>
GPU_DEVICE fattn_softmax mma_met_row(const fattn_gpu_args &g, const mma_meeting<S> &met, int r)
{
    fattn_softmax all = fattn_softmax_empty();
    GPU_UNROLL
    for (int warp = 0; warp < S::WARPS; warp++) {
        all.m = gpu_max(all.m, met.state[warp][r].m);
    }
    const float base = fattn_softmax_base(all);
    GPU_UNROLL
    for (int warp = 0; warp < S::WARPS; warp++) {
        const fattn_softmax part = met.state[warp][r];
        fattn_softmax_add(&all, part.l * fattn_softmax_weight(part.m, g.rule.unit, base));
    }
    return all;
}

/* The warps' sums, relative to what all of them have met. */
template <class S>
GPU_DEVICE void mma_meet(const fattn_gpu_args &g, int live, mma_rows<S> &rows, mma_meeting<S> &met)
{
    const float lower = 1.0f / (1 << S::type::LIFT);
    const int warp = gpu_thread() / GPU_WAVE, lane = gpu_thread() % GPU_WAVE;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        fattn_softmax *const state = &rows.state[0][h];
        state->l = mma_quad_sum(state->l) * lower;
        if (lane % 4 == 0) {
            met.state[warp][mma_row<S>(0, h)] = *state;
        }
    }
    gpu_sync();
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int r = mma_row<S>(0, h);
        if (r >= live) {
            continue;
        }
        const float base = fattn_softmax_base(mma_met_row(g, met, r));
        const float factor = fattn_softmax_weight(rows.state[0][h].m, g.rule.unit, base) * lower;
        GPU_UNROLL
        for (int n = 0; n < S::WIDTH / 8; n++) {
            gpu_f2 pair;
            pair.x = rows.o[0][n][2 * h] * factor;
            pair.y = rows.o[0][n][2 * h + 1] * factor;
            *(gpu_f2 *)(met.o[warp][r] + 8 * n + lane % 4 * 2) = pair;
        }
    }
}

/* lse of row r, or m and l of its part, and what its sums are to be multiplied by. */
template <class S>
GPU_DEVICE void mma_meet_row(const fattn_gpu_args &g, const mma_item &w, gpu_query q, int64_t item,
                             int r, mma_meeting<S> &met)
{
    const bool whole = g.tiling.splits == 1;
    fattn_softmax all = mma_met_row(g, met, r);
    met.alpha[r] = S::IS_LEAN ? 1 : mma_meet_sink(g, w, q, &all);
    met.factor[r] = (S::IS_LEAN ? 1 : w.kept) * (whole ? fattn_softmax_normaliser(all) : 1);
    met.empty[r] = whole && all.l == 0;
    if (whole) {
        gpu_store_lse(g, w.pairs.seq, w.pairs.b, q, all);
    } else {
        const gpu_part part = gpu_part_of(g, item, r);
        *part.m = all.m;
        *part.l = all.l;
    }
}

/* Row r in o, or in a part. */
template <class S>
GPU_DEVICE void mma_store_met(const fattn_gpu_args &g, const mma_item &w, gpu_query q, int64_t item,
                              int r, const mma_meeting<S> &met)
{
    const bool whole = g.tiling.splits == 1;
    const gpu_part to = whole ? gpu_part_output(g, w.pairs.seq, q) : gpu_part_of(g, item, r);
    const float factor = met.factor[r], alpha = met.alpha[r];
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH; n += GPU_WAVE) {
        const int c = n + gpu_thread() % GPU_WAVE;
        float o = 0;
        GPU_UNROLL
        for (int warp = 0; warp < S::WARPS; warp++) {
            o += met.o[warp][r][c];
        }
        o = met.empty[r] ? 0 : o * factor * alpha; /* selected: a sum may be 0 * inf */
        if (c >= g.problem.dim_v) {
            continue;
        }
        if (to.o.dtype == FATTN_F32) {
            ((float *)to.o.data)[to.at + c] = o;
        } else {
            ((uint16_t *)to.o.data)[to.at + c] = (uint16_t)S::type::pack(o, 0);
        }
    }
}

/* Rows in o and lse, or their parts in the workspace. */
template <class S>
GPU_DEVICE void mma_decode_end(const fattn_gpu_args &g, mma_scratch<S> &s, mma_rows<S> &rows,
                               int64_t item)
{
    static_assert(sizeof(mma_meeting<S>) <= sizeof s.k + sizeof s.v, "too small");
    mma_meeting<S> &met = *(mma_meeting<S> *)s.k;
    const mma_item &w = s.item;
    gpu_sync(); /* everyone is through with keys and values */
    mma_meet(g, w.rows, rows, met);
    if (gpu_thread() < w.rows) {
        mma_meet_row(g, w, mma_query(w, gpu_thread()), item, gpu_thread(), met);
    }
    gpu_sync();
    if (g.tiling.splits > 1 || g.problem.outputs & FATTN_OUT_O) {
        for (int r = gpu_thread() / GPU_WAVE; r < w.rows; r += S::WARPS) {
            mma_store_met(g, w, mma_query(w, r), item, r, met);
        }
    }
}

template <class S>
GPU_DEVICE void mma_decode_item(const fattn_gpu_args &g, mma_scratch<S> &s, int64_t item)
{
    mma_item w;
    mma_item_set<S>(g, item, w);
    gpu_sync(); /* the item before may still be read */
    if (w.rows > 0) {
        mma_rows<S> rows;
        mma_decode_walk(g, s, w, item, rows);
        mma_decode_end(g, s, rows, item);
    }
}

template <class S> GPU_DEVICE void mma_decode_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_scratch<S>) <= MMA_DECODE_SHARED(S::WIDTH, S::KEYS * S::RING),
                  "too small");
    extern __shared__ char shared[];
    mma_scratch<S> &s = *(mma_scratch<S> *)shared;
    gpu_admit_later();
    if (gpu_sequences_differ(g.problem) || !S::IS_LEAN) {
        gpu_await_earlier();
    }
    for (int64_t item = gpu_block(); item < g.tiling.items; item += gpu_blocks()) {
        mma_decode_item<S>(g, s, item);
    }
}

#endif
