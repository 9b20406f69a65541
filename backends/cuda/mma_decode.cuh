/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward of few rows on tensor cores, for 16-bit queries, and k and v of the same type or in e4m3:
 * decoding. Every key is read once and multiplied by at most 16 rows, so the number of bytes in
 * flight from memory decides the speed.
 *
 * A block takes an item of the schedule: the rows of one key/value head, that is, the queries of
 * all its query heads, and a part of its keys. Its warps share only the queries. Warp w takes tiles
 * w, w + WARPS, ... of the part, and copies them to a ring buffer of its own. At the end of the
 * part, the warps' sums are merged, in order of the warps.
 */
#ifndef FATTN_CUDA_MMA_DECODE_CUH
#define FATTN_CUDA_MMA_DECODE_CUH

#include "backends/cuda/mma_decode_items.cuh"
#include "backends/cuda/mma_e4m3.cuh"

/* T: mma_f16, mma_bf16 or mma_e4m3. W: channels of q, k and v, padded. BN: keys of a tile. N:
 * warps. STAGES: tiles in a warp's ring. FEATURES: 0 or MMA_ANY. BLOCKS: how many a multiprocessor
 * holds.
 *
 * A round is a tile for each warp. Memory is read fastest if the bytes in flight are close together
 * and no more than it can serve. So in parts of more than FREE_ROUNDS rounds, a barrier keeps the
 * warps in the same round, each with one tile in flight while it uses another. The whole ring is
 * kept in flight in two cases: in shorter parts, if a multiprocessor has one block, because few
 * blocks are left at the end; and in all parts, if one tile of each warp is less than memory can
 * serve, which is 64 KiB per multiprocessor. */
template <class T, int W, int BN, int N, int STAGES, uint64_t FEATURES, int BLOCKS>
struct mma_decode_shape {
    typedef T type;
    static constexpr uint64_t KNOWN = FEATURES;
    static constexpr mma_variant VARIANT = mma_variant_of(FEATURES);
    enum {
        WIDTH = W,
        TILES = 1,
        WARP_TILES = 0, /* all warps have the same rows */
        ROWS = MMA_DECODE_ROWS,
        WARPS = N,
        THREADS = 32 * N,
        KEYS = BN,
        OWN = BN / 4,
        IN_ORDER = false,
        FIRST_WARP = 0,
        NEXT = 4,
        DEPTH = STAGES,
        RING = N * STAGES,
        SIZE = sizeof(typename T::element),                    /* of an element of k and v */
        SPAN = 16 / SIZE,                                      /* channels of a chunk of 16 bytes */
        ITEM = BLOCKS == 1 ? MMA_CUT_ITEM_WIDE : MMA_CUT_ITEM, /* mma_cut.cuh */
        FREE_ROUNDS = BLOCKS * N * 2 * SIZE * BN * W < 65536 ? INT32_MAX
                      : BLOCKS == 1                          ? 96
                                                             : 0
    };
};

/* unscale: what dot products of a row are multiplied by, if queries of bf16 became f16. */
template <class S> struct mma_decode_scratch : mma_scratch<S> {
    float unscale[S::SIZE == 1 ? S::ROWS : 1];
    int64_t next; /* the block's next item */
    mma_cut_batch batch;
};

/* A warp's sums, in shared memory where its first keys were. Rows of o are padded by 8 words, so
 * that the quads of a warp write to different banks. */
template <class S> struct mma_warp_part {
    float o[S::ROWS][S::WIDTH + 8];
    fattn_softmax state[S::ROWS];
};

template <class S> GPU_DEVICE mma_warp_part<S> &mma_part_by(mma_scratch<S> &s, int warp)
{
    static_assert(sizeof(mma_warp_part<S>) <= S::DEPTH * sizeof s.k[0], "a warp has its own place");
    return *(mma_warp_part<S> *)s.k[warp * S::DEPTH];
}

/* --- Copies ----------------------------------------------------------------------------------- */

/* How a lane copies: chunk `chunk` of rows `row`, `row` + STEP, ... of a tile. With pages, lanes
 * look up the addresses of rows one tile ahead, lane n that of key n % KEYS, and exchange them. */
template <class S> struct mma_reader {
    typedef typename S::type::element element;
    enum { CHUNKS = S::WIDTH / S::SPAN, STEP = GPU_WAVE / CHUNKS };
    const element *k, *v; /* the lane's key, with pages; else the lane's chunk of row `row` */
    int chunk, row, bytes_k, bytes_v;
    uint64_t once; /* the L2 policy of keys and values */
};

/* Looks up the address of the lane's key of tile `block` in its page. */
template <class S>
GPU_DEVICE void mma_look_up(const fattn_gpu_args &g, const mma_item &w, mma_reader<S> &at,
                            int block)
{
    static_assert(S::KEYS <= GPU_WAVE, "each key has a lane");
    const fattn_problem &p = g.problem;
    const uint32_t j = (uint32_t)block * S::KEYS + (uint32_t)gpu_thread() % S::KEYS;
    const uint32_t size = (uint32_t)p.page_size, page = j / size, row = j - page * size;
    int64_t entry = 0;
    if (j < (uint32_t)w.keys) {
        entry = g.buffers.block_table[w.pairs.b * p.block_table_stride + page];
        entry = gpu_clamp(entry, 0, p.num_pages - 1);
    }
    typedef typename S::type::element element;
    at.k = (const element *)g.buffers.k + entry * p.k.batch + row * p.k.seq + w.hk * p.k.head;
    at.v = (const element *)g.buffers.v + entry * p.v.batch + row * p.v.seq + w.hk * p.v.head;
}

/* Sets up the lane's copies; `block` is the warp's first tile. */
template <class S>
GPU_DEVICE mma_reader<S> mma_reader_of(const fattn_gpu_args &g, const mma_item &w, int block)
{
    typedef mma_reader<S> reader;
    const fattn_problem &p = g.problem;
    const int lane = gpu_thread() % GPU_WAVE;
    reader at;
    at.chunk = lane % reader::CHUNKS;
    at.row = lane / reader::CHUNKS;
    at.bytes_k = mma_stored_bytes<S>(at.chunk, (int)p.dim);
    at.bytes_v = mma_stored_bytes<S>(at.chunk, (int)p.dim_v);
    at.once = mma_read_once();
    if (p.features & FATTN_PAGED) {
        mma_look_up(g, w, at, block);
    } else {
        typedef typename S::type::element element;
        at.k = (const element *)w.k + at.row * p.k.seq + S::SPAN * at.chunk;
        at.v = (const element *)w.v + at.row * p.v.seq + S::SPAN * at.chunk;
    }
    return at;
}

/* p of lane `lane` of the warp. */
template <class E> GPU_DEVICE const E *mma_pointer_of(const E *p, int lane)
{
    return (const E *)__shfl_sync(0xffffffffu, (unsigned long long)p, lane);
}

/* Begins to copy tile `block`, if the part has it, to stage `place` of the ring. Keys that do not
 * exist become zeros. With pages, it then looks up the warp's next tile. */
template <class S>
GPU_DEVICE void mma_read_tile(const fattn_gpu_args &g, const mma_item &w, mma_scratch<S> &s,
                              mma_reader<S> &at, int place, int block)
{
    typedef mma_reader<S> reader;
    typedef typename reader::element element;
    const fattn_problem &p = g.problem;
    if (block >= w.past) {
        return;
    }
    const int live = w.keys - block * S::KEYS;
    const uint32_t k = mma_shared(s.k[place]), v = mma_shared(s.v[place]);
    if (p.features & FATTN_PAGED) {
        GPU_UNROLL
        for (int n = 0; n < S::KEYS; n += reader::STEP) {
            const int r = at.row + n;
            const element *const from_k = mma_pointer_of(at.k, r) + S::SPAN * at.chunk;
            const element *const from_v = mma_pointer_of(at.v, r) + S::SPAN * at.chunk;
            mma_copy_by(at.once, mma_stored_place<S>(k, r, at.chunk), from_k,
                        r < live ? at.bytes_k : 0);
            mma_copy_by(at.once, mma_stored_place<S>(v, r, at.chunk), from_v,
                        r < live ? at.bytes_v : 0);
        }
        mma_look_up(g, w, at, block + S::WARPS);
        return;
    }
    const element *from_k = at.k + (int64_t)block * S::KEYS * p.k.seq;
    const element *from_v = at.v + (int64_t)block * S::KEYS * p.v.seq;
    GPU_UNROLL
    for (int n = 0; n < S::KEYS; n += reader::STEP) {
        const int r = at.row + n;
        mma_copy_by(at.once, mma_stored_place<S>(k, r, at.chunk), from_k,
                    r < live ? at.bytes_k : 0);
        mma_copy_by(at.once, mma_stored_place<S>(v, r, at.chunk), from_v,
                    r < live ? at.bytes_v : 0);
        from_k += reader::STEP * p.k.seq;
        from_v += reader::STEP * p.v.seq;
    }
}

/* Prefetches the warp's first keys and values to L2, while earlier work in the stream may still be
 * running. That is safe: a later write to them updates L2. Their addresses must not depend on that
 * work. */
template <class S>
GPU_DEVICE void mma_prefetch_tiles(const fattn_gpu_args &g, const mma_item &w, int first)
{
    typedef typename S::type::element element;
    enum { BYTES = S::SIZE * S::WIDTH, LINES = BYTES < 128 ? 1 : BYTES / 128 };
    enum { STEP = GPU_WAVE / LINES };
    const fattn_problem &p = g.problem;
    const int lane = gpu_thread() % GPU_WAVE, c = lane % LINES * (128 / S::SIZE);
    GPU_ROLLED
    for (int n = 0; n < S::DEPTH - 1; n++) {
        const int block = first + n * S::WARPS;
        GPU_UNROLL
        for (int r = block * S::KEYS + lane / LINES; r < (block + 1) * S::KEYS; r += STEP) {
            if (block < w.past && r < w.keys) {
                mma_prefetch((const element *)w.k + r * p.k.seq + c);
                mma_prefetch((const element *)w.v + r * p.v.seq + c);
            }
        }
    }
}

/* --- Products --------------------------------------------------------------------------------- */

/* x += Q K^T for the tile at `place` of the ring. */
template <class S>
GPU_DEVICE void mma_decode_dots(mma_scratch<S> &s, int place, float x[1][S::KEYS / 8][4])
{
    if constexpr (S::SIZE == 1) {
        mma_e4m3_dots<S>(s.q, s.k[place], x[0]);
    } else {
        mma_dots<typename S::type, S::WIDTH, 1, S::KEYS / 16, S::WIDTH / 16, S::NEXT>(
            mma_rows_a<S::WIDTH>(s.q, 0), mma_key_rows<S>(s.k[place]), x);
    }
}

/* o += P V for the tile at `place` of the ring. */
template <class S>
GPU_DEVICE void mma_decode_mix(mma_scratch<S> &s, int place, const float x[1][S::KEYS / 8][4],
                               float o[1][S::WIDTH / 8][4])
{
    if constexpr (S::SIZE == 1) {
        mma_e4m3_mix<S>(x[0], s.v[place], o[0]);
    } else {
        mma_mix<typename S::type, S::WIDTH, 1, S::WIDTH / 16, S::KEYS / 16, S::NEXT>(
            x, mma_key_columns<S>(s.v[place]), o);
    }
}

/* What a lane multiplies dot products of its two rows, and sums of values, by. Only kernels for
 * e4m3 do: they have FATTN_DESCALE, and scale queries of bf16. */
typedef struct mma_factors {
    float row[2], v;
} mma_factors;

template <class S> GPU_DEVICE mma_factors mma_factors_of(const fattn_gpu_args &g, const mma_item &w)
{
    const fattn_problem &p = g.problem;
    mma_factors factor = {{1, 1}, 1};
    if (S::SIZE == 1 && p.features & FATTN_DESCALE) {
        const int64_t at = w.pairs.b * p.descale_stride[0] + w.hk * p.descale_stride[1];
        factor.row[0] = factor.row[1] = ((const float *)g.buffers.k_descale)[at];
        factor.v = ((const float *)g.buffers.v_descale)[at];
    }
    return factor;
}

/* Turns the item's queries to f16, once they have landed. All threads of the block must call it. */
template <class S>
GPU_DEVICE void mma_decode_queries(const fattn_gpu_args &g, mma_decode_scratch<S> &s,
                                   mma_factors &factor)
{
    if constexpr (S::SIZE == 1) {
        if (g.problem.dtype == FATTN_BF16) {
            mma_e4m3_queries<S>(s.q, s.unscale);
            gpu_sync();
            GPU_UNROLL
            for (int h = 0; h < 2; h++) {
                factor.row[h] *= s.unscale[mma_lane() / 4 + 8 * h];
            }
        }
    }
}

/* --- An item ---------------------------------------------------------------------------------- */

/* Begins to copy the queries. */
template <class S>
GPU_DEVICE void mma_read_queries(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w)
{
    constexpr int threads = S::THREADS, all = S::ROWS * S::WIDTH / 8; /* chunks */
    enum { CHUNKS = S::WIDTH / 8, STEP = (threads < all ? threads : all) / CHUNKS };
    static_assert(S::ROWS % STEP == 0, "a thread copies as many rows as any");
    if (threads > all && gpu_thread() >= all) {
        return;
    }
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

/* Stores the item to shared memory, and sets up the terms of its rows. */
template <class S>
GPU_DEVICE void mma_name_queries(const fattn_gpu_args &g, mma_scratch<S> &s, const mma_item &w)
{
    if (gpu_thread() == 0) {
        s.item = w;
    }
    if constexpr (!mma_is_lean(S::VARIANT)) {
        gpu_sync(); /* the item */
        if (gpu_thread() < S::ROWS) {
            mma_begin_row<S>(g, s, mma_query(w, gpu_thread()), gpu_thread());
        }
    }
}

/* Visits the warp's tiles of the item's part. */
template <class S>
GPU_DEVICE void mma_decode_walk(const fattn_gpu_args &g, mma_decode_scratch<S> &s,
                                const mma_item &w, mma_rows<S> &rows, mma_factors &factor)
{
    const float unit = g.rule.unit;
    const int warp = gpu_thread() / GPU_WAVE, ring = warp * S::DEPTH, first = w.block + warp;
    if (mma_is_lean(S::VARIANT) && !gpu_sequences_differ(g.problem)) {
        mma_prefetch_tiles<S>(g, w, first);
    }
    mma_reader<S> at = mma_reader_of<S>(g, w, first);
    const bool counts = gpu_thread() == 0 && !w.whole && g.counters >= 0;
    gpu_await_earlier(); /* tensors and workspace are read from here on */
    const uint64_t word = counts ? gpu_peek(gpu_counter_of(g, w.pairs.b, w.hk)) : 0;
    GPU_ROLLED
    for (int n = 0; n < S::DEPTH - 1; n++) {
        mma_read_tile<S>(g, w, s, at, ring + n, first + n * S::WARPS);
        if (n == 0) {
            mma_read_queries(g, s, w);
        }
        mma_commit();
    }
    mma_name_queries(g, s, w);
    factor = mma_factors_of<S>(g, w);
    if (counts) { /* while keys are in flight */
        const fattn_parts parts = mma_decode_parts<S>(g, w, w.parts);
        s.item.parts = (int)fattn_parts_count(&parts);
        gpu_count_begin(g, gpu_counter_of(g, w.pairs.b, w.hk), word, g.tiling.splits);
    }
    mma_rows_empty(rows);
    mma_wait<S::DEPTH - 2>();
    gpu_sync(); /* the queries have landed, and the item is visible */
    mma_decode_queries<S>(g, s, factor);
    const bool in_step = (w.past - w.block) / S::WARPS > S::FREE_ROUNDS;
    const int most = in_step ? 2 : S::DEPTH; /* stages of the ring in use */
    int next = first + (S::DEPTH - 1) * S::WARPS, to = S::DEPTH - 1;
    for (int top = w.block, stage = 0; top < w.past; top += S::WARPS) {
        const int block = top + warp, j0 = block * S::KEYS, place = ring + stage;
        const bool partial = block < w.full || w.full_past <= block;
        if (next == block + (S::DEPTH - 1) * S::WARPS) {
            mma_wait<S::DEPTH - 2>();
        } else {
            mma_wait<0>();
        }
        if (in_step) {
            gpu_sync();
        }
        __syncwarp(); /* all lanes' copies have landed, and all have read the tile before */
        if (next < block + most * S::WARPS) {
            mma_read_tile<S>(g, w, s, at, ring + to, next);
            mma_commit();
            next += S::WARPS;
            to = to + 1 == S::DEPTH ? 0 : to + 1;
        }
        stage = stage + 1 == S::DEPTH ? 0 : stage + 1;
        if (block >= w.past) {
            continue;
        }
        float x[1][S::KEYS / 8][4] = {}, largest[1][2];
        mma_decode_dots<S>(s, place, x);
        if constexpr (S::SIZE == 1) {
            mma_each_row<S>([&](int m, int h) {
                mma_each<S>(m, h, x, [&](float &score, int) { score *= factor.row[h]; });
            });
        }
        if constexpr (mma_is_lean(S::VARIANT)) {
            mma_score<S>(g, s, partial, j0, x);
        } else {
            mma_terms<S>(g, s, j0, x, largest);
            if (partial) {
                mma_apply_band<S>(s, j0, x);
            }
        }
        mma_largest<S>(x, largest);
        mma_raise<S>(unit, largest, rows);
        mma_weigh<S>(unit, rows, x);
        if constexpr (!mma_is_lean(S::VARIANT)) {
            if (g.problem.features & FATTN_DROPOUT) {
                mma_drop<S>(g, s, j0, x);
            }
        }
        mma_decode_mix<S>(s, place, x, rows.o);
    }
}

/* Writes the warp's sums to shared memory for the merge. */
template <class S>
GPU_DEVICE void mma_leave_part(const fattn_gpu_args &g, mma_scratch<S> &s, int live,
                               mma_rows<S> &rows, const mma_factors &all)
{
    const int lane = gpu_thread() % GPU_WAVE;
    mma_warp_part<S> &part = mma_part_by(s, gpu_thread() / GPU_WAVE);
    __syncwarp(); /* all lanes have read the keys */
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int r = lane / 4 + 8 * h;
        fattn_softmax state = rows.state[0][h];
        const float base = fattn_softmax_base(state);
        const float added = mma_rounding<S>(g, S::type::weight(rows.top[0][h], g.rule.unit, base));
        state.l = mma_quad_sum(state.l);
        const float factor = mma_part_factor(state.l, mma_reciprocal(state.l + added), added);
        if (r >= live) {
            continue;
        }
        if (lane % 4 == 0) {
            part.state[r] = state;
        }
        if constexpr (S::SIZE == 1) {
            mma_e4m3_leave<S>(part.o[r], rows.o[0], h, factor * all.v);
        } else {
            GPU_UNROLL
            for (int n = 0; n < S::WIDTH / 8; n++) {
                gpu_f2 pair;
                pair.x = rows.o[0][n][2 * h] * factor;
                pair.y = rows.o[0][n][2 * h + 1] * factor;
                *(gpu_f2 *)(part.o[r] + 8 * n + lane % 4 * 2) = pair;
            }
        }
    }
}

/* The state of row r over all warps, and the factor of each warp's sums. Warps are added in
 * order. */
template <class S>
GPU_DEVICE fattn_softmax mma_merge_warps(const fattn_gpu_args &g, mma_scratch<S> &s, int r,
                                         float factor[S::WARPS])
{
    const float lower = 1.0f / (1 << S::type::LIFT);
    fattn_softmax all = fattn_softmax_empty();
    GPU_UNROLL
    for (int warp = 0; warp < S::WARPS; warp++) {
        all.m = gpu_max(all.m, mma_part_by(s, warp).state[r].m);
    }
    const float base = fattn_softmax_base(all);
    GPU_UNROLL
    for (int warp = 0; warp < S::WARPS; warp++) {
        const fattn_softmax part = mma_part_by(s, warp).state[r];
        factor[warp] = fattn_softmax_weight(part.m, g.rule.unit, base) * lower;
        fattn_softmax_add(&all, part.l * factor[warp]);
    }
    return all;
}

/* Writes row r, which is query q, to o and lse or to a part. */
template <class S>
GPU_DEVICE void mma_store_row(const fattn_gpu_args &g, mma_scratch<S> &s, gpu_query q, int r)
{
    const mma_item &w = s.item;
    const bool whole = w.whole;
    const gpu_part to = whole ? gpu_part_output(g, w.pairs.seq, q) : gpu_part_of(g, w.number, r);
    float factor[S::WARPS];
    fattn_softmax all = mma_merge_warps(g, s, r, factor);
    float sums[S::WIDTH / GPU_WAVE]; /* loaded before the branch for a sink */
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH / GPU_WAVE; n++) {
        sums[n] = 0;
        GPU_UNROLL
        for (int warp = 0; warp < S::WARPS; warp++) {
            const float *const o = mma_part_by(s, warp).o[r];
            sums[n] += o[n * GPU_WAVE + gpu_thread() % GPU_WAVE] * factor[warp];
        }
    }
    const float alpha = mma_add_sink(g, w, q, &all);
    const float last =
        (mma_is_lean(S::VARIANT) ? 1 : w.z_kept) * (whole ? fattn_softmax_normaliser(all) : 1);
    if (gpu_thread() % GPU_WAVE == 0 && whole) {
        gpu_store_lse(g, w.pairs.seq, w.pairs.b, q, all);
    } else if (gpu_thread() % GPU_WAVE == 0) {
        *to.m = all.m;
        *to.l = all.l;
    }
    if (whole && !(g.problem.outputs & FATTN_OUT_O)) {
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH / GPU_WAVE; n++) {
        const int c = n * GPU_WAVE + gpu_thread() % GPU_WAVE;
        /* Selected: a sum may be 0 * inf. */
        const float o = whole && all.l == 0 ? 0 : sums[n] * last * alpha;
        if (c >= g.problem.dim_v) {
            continue;
        }
        if constexpr (S::SIZE == 1) { /* the type of products need not be that of o */
            gpu_store(to.o.data, to.o.dtype, to.at + c, o);
        } else if (to.o.dtype == FATTN_F32) {
            ((float *)to.o.data)[to.at + c] = o;
        } else {
            ((uint16_t *)to.o.data)[to.at + c] = (uint16_t)S::type::pack(o, 0);
        }
    }
}

/* Writes the rows to o and lse, or their parts to the workspace. The block that finishes last
 * merges the parts. */
template <class S>
GPU_DEVICE void mma_decode_end(const fattn_gpu_args &g, mma_scratch<S> &s, mma_rows<S> &rows,
                               const mma_factors &factor)
{
    const mma_item &w = s.item;
    const int live = w.rows;
    mma_leave_part(g, s, live, rows, factor);
    gpu_sync();
    for (int r = gpu_thread() / GPU_WAVE; r < live; r += S::WARPS) {
        mma_store_row(g, s, mma_query(w, r), r);
    }
    if (!w.whole && g.counters >= 0 &&
        gpu_count_end(g, gpu_counter_of(g, w.pairs.b, w.hk), w.parts)) {
        gpu_merge_rows(g, w.pairs.seq, w.pairs.b, w.hk, live, w.number - w.split, w.parts);
    }
}

/* Computes item n, and returns the number of the block's next one. It sets `items`, the number of
 * items that exist. */
template <class S>
GPU_DEVICE int64_t mma_decode_item(const fattn_gpu_args &g, mma_decode_scratch<S> &s, int64_t n,
                                   int64_t &items)
{
    mma_item w;
    const bool cuts = fattn_cuda_cuts(&g.tiling);
    items = mma_decode_place(g, s.batch, cuts ? n : gpu_item_of(g, n), w);
    if (n >= items) {
        return n;
    }
    mma_decode_item_set<S>(g, w);
    gpu_sync(); /* the item before may still be read */
    uint64_t count = 0;
    if (cuts && gpu_thread() == 0) {
        /* Its latency passes while keys arrive. */
        count = atomicAdd((unsigned long long *)mma_decode_taken(g), 1ull);
    }
    if (w.rows > 0) {
        mma_rows<S> rows;
        mma_factors factor;
        mma_decode_walk(g, s, w, rows, factor);
        mma_decode_end(g, s, rows, factor);
    }
    if (!cuts) {
        return n + gpu_blocks();
    }
    if (gpu_thread() == 0) {
        s.next = mma_decode_next(g, count, items);
    }
    gpu_sync();
    return s.next;
}

template <class S> GPU_DEVICE void mma_decode_all(const fattn_gpu_args &g)
{
    static_assert(sizeof(mma_decode_scratch<S>) <=
                      MMA_DECODE_SHARED(S::WIDTH, S::SIZE, S::KEYS * S::RING),
                  "too small");
    extern __shared__ char shared[];
    mma_decode_scratch<S> &s = *(mma_decode_scratch<S> *)shared;
    gpu_admit_later();
    if (fattn_cuda_cuts(&g.tiling)) {
        mma_decode_cut<S>(g, s.batch);
    }
    int64_t items = g.tiling.items;
    for (int64_t n = gpu_block(); n < items;) {
        n = mma_decode_item<S>(g, s, n, items);
    }
}

#endif
