/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs before and after backward on Hopper, and where they meet: a workspace in which rows lie
 * in tiles of queries, those of a sequence beginning with one of its own, so that whole tiles of
 * lse, delta and dQ are copied and added to.
 *
 *     wgmma_seen_<name>      what a bias or a mask hides
 *     wgmma_order_<name>     the list of sequences, where lengths are unlike
 *     wgmma_rows_<name>      lse and delta of every row, zeros for its dQ, and what the items are
 *     (wgmma_backward.cuh)
 *     wgmma_dq_<name>        dQ in its own type
 *     wgmma_sink_<name>      dSink
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_ROWS_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_ROWS_CUH

#include "backends/cuda/seen.cuh"
#include "backends/cuda/wgmma_order.cuh"
#include "backends/cuda/wgmma_shift.h"
#include "backends/cuda/wgmma_tile.cuh"
#include "backends/gpu/backward_rows.cuh"

/* T: mma_f16 or mma_bf16. W: channels, padded. N, BN: queries and keys of a tile. RING: stages of
 * queries. FEATURES: those of MMA_OF_PAIRS that the run has, 0 of lean kernels, or MMA_ANY. DBIAS:
 * the run may want dBias. TERM_STAGES: tiles of a bias or mask that is alone, in shared memory.
 * ORDERED: where blocks share items, of deterministic runs. */
template <class T, int W, int N, int BN, int RING, uint64_t FEATURES = 0, bool DBIAS = false,
          int TERM_STAGES = 0, bool ORDERED = false>
struct wgmma_backward_shape {
    typedef T type;
    static constexpr uint64_t KNOWN = FEATURES;
    static constexpr bool IS_ORDERED = ORDERED;
    enum {
        BLOCKS = WGMMA_BACKWARD_BLOCKS(W), /* of an item */
        ITEM_KEYS = BN,
        KEYS = BN / BLOCKS,
        IS_PAIR = BLOCKS > 1, /* then warpgroups share keys, and not channels */
        WIDTH = W,
        PANELS = W / 64,
        QUERIES = N,
        WARPGROUPS = 2,
        WARPS = 4 * WARPGROUPS,
        THREADS = WGMMA_THREADS(WARPGROUPS),
        STAGES = RING,
        DOUT_STAGES = IS_PAIR ? 1 : 2,
        KEY_BYTES = 2 * W * KEYS,
        QUERY_BYTES = 2 * W * N,
        DS_BYTES = 2 * KEYS * N,
        /* Of the other block of an item: its keys in this one's channels of dQ, and two of dS. */
        PEER_KEY_BYTES = IS_PAIR ? KEY_BYTES / 2 : 0,
        PEER_DS_BYTES = IS_PAIR ? 2 * DS_BYTES : 0,
        /* Of S^T and dP^T a warpgroup has so many queries, and of dV and dK so many channels. */
        OWN_QUERIES = IS_PAIR ? N / WARPGROUPS : N,
        OWN_CHANNELS = IS_PAIR ? W / WARPGROUPS : W,
        /* Of 8 queries each: whose lse and delta are read early, as registers allow. */
        LSE_EARLY = OWN_QUERIES <= 64 ? OWN_QUERIES / 8 : 4,
        DELTA_EARLY = OWN_QUERIES <= 64 ? 2 : 0,
        /* Of dQ a warpgroup makes 64 channels of so many queries. */
        PART = IS_PAIR ? N : N * PANELS / WARPGROUPS,
        PART_BYTES = 4 * 64 * PART,
        DQ_BYTES = IS_PAIR ? 0 : WARPGROUPS * PART_BYTES,
        P_BYTES = IS_PAIR ? 2 * DS_BYTES : 0,
        IS_LEAN = FEATURES == 0,
        HAS_DBIAS = DBIAS,
        /* Tiles may be left out of a head's (wgmma_skips). */
        SKIPS = (FEATURES & WGMMA_HIDES) != 0 && (FEATURES == MMA_ANY || !DBIAS),
        /* Of others a mask need not be read. (The same of a bias made random ones 7 to 11 % slower,
         * and those of 0 and -inf 2 to 20 % faster.) */
        KNOWS_PLAIN = SKIPS && FEATURES == FATTN_MASK,
        /* A block mask may hide tiles of one of an item's blocks and not of the other. */
        KNOWS_HALVES = IS_PAIR && FEATURES == FATTN_BLOCK_MASK,
        /* The product that gives dQ of a tile needs dS of both warpgroups. It is issued while the
         * next tile is computed, so that neither waits for the other. Where that was measured to
         * be faster, the warpgroups also take turns in issuing their products. */
        DEFERS =
            !IS_PAIR &&
            (FEATURES == 0 || FEATURES == FATTN_BLOCK_MASK ? W == 64 : FEATURES == FATTN_SOFTCAP),
        TAKES_TURNS = DEFERS && IS_LEAN,
        TERM_RING = TERM_STAGES,
        TERM_PLACES = TERM_STAGES > 1 ? TERM_STAGES : 1,
        IS_STAGED = TERM_STAGES > 0,
        /* A bias or mask that is alone is read row by row from memory, a row a lane. */
        READS_ROWS = IS_PAIR && (FEATURES == FATTN_BIAS || FEATURES == FATTN_MASK),
        TERM_BYTES = WGMMA_TERM_TILE(FEATURES, N, BN),
        BIAS_STEPS = FEATURES == FATTN_BIAS ? OWN_QUERIES / 16 : 1, /* read ahead */
        MASK_WORDS = OWN_QUERIES / 8,
        CALLS = OWN_QUERIES / 16, /* of dropout's generator, a tile */
        /* Of wgmma_shift_apart(): tiles that have 16 MB of q, dO and dQ together, and the least
         * distance. */
        SPREAD = (16 << 20) / (QUERIES * WIDTH * (2 + 2 + 4)),
        LEAST_APART = IS_PAIR ? 1 : 2,
        EARLY_CALLS = W < 256 && FEATURES == FATTN_DROPOUT ? CALLS : CALLS / 2,
        OWN_REGISTERS = 240,
        COPY_REGISTERS = 24
    };
};

/* --- The workspace ---------------------------------------------------------------------------- */

/* An item: a tile of keys of a key/value head, and the queries that see some of it. */
typedef struct wgmma_backward_item {
    int first, past;             /* tiles of queries */
    int start, peers;            /* the tile it begins with; of shifted items, or 0 */
    int full, full_past;         /* those whose pairs are all kept */
    int keys, owned;             /* of the tile: that exist, and that have gradients */
    int first_query, past_query; /* what the first key is seen by, cut to +-WGMMA_UNBOUNDED */
    int sequence_keys;           /* of the whole sequence */
    int reach;                   /* query i sees no key from i + this on */
    int queries;                 /* of the sequence */
    int q_row, q_batch, k_row, k_batch, head; /* where copies begin; head: of keys */
    int saved;      /* tile of lse, delta and dQ of the first query's first head */
    int block;      /* of keys */
    int tiles;      /* that are visited, of all heads of the group */
    int batch;      /* and what features need besides: */
    int64_t dk, dv; /* elements of the first key's gradients */
    int64_t diagonal, q_position, k_position;
} wgmma_backward_item;

#define WGMMA_UNBOUNDED (1 << 30) /* more than there are queries */

/* How many tiles apart the items of a part begin, in a run whose items are shifted. */
template <class S> GPU_DEVICE int wgmma_apart(const wgmma_backward_item &w)
{
    return wgmma_shift_apart(w.past, w.peers, S::SPREAD, S::LEAST_APART);
}

typedef struct wgmma_saved {
    float *dq;       /* not yet multiplied by scale */
    float *lse;      /* in log2 units; +inf for a row without probabilities */
    float *delta;    /* of such a row 0 */
    int32_t *turns;  /* of ordered runs: one of each tile of dQ */
    unsigned *taken; /* items beyond the first of each block */
    wgmma_backward_item *items;
    uint32_t *visits;   /* of each tile of keys, by heads and sequences: wgmma_visits_of() */
    uint8_t *seen;      /* what a bias or a mask leaves: seen.h, by tiles of queries */
    wgmma_listed *list; /* of sequences, in the place of these two */
    int tiles;          /* of a head */
} wgmma_saved;

/* Items, if all sequences have as many as the longest. */
GPU_DEVICE int64_t wgmma_items_alike(const fattn_gpu_args &g)
{
    return g.problem.batch * g.problem.heads_k * g.tiling.k_blocks;
}

template <class S> GPU_DEVICE wgmma_saved wgmma_saved_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const bool packed = p.features & FATTN_CU_SEQLENS_Q;
    const int64_t tiles = WGMMA_BACKWARD_TILES(packed, p.total_q, p.batch, S::QUERIES);
    const int64_t rows = (packed ? 1 : p.batch) * p.heads_q * tiles * S::QUERIES;
    wgmma_saved saved;
    saved.dq = (float *)g.workspace;
    saved.lse = saved.dq + rows * S::WIDTH;
    saved.delta = saved.lse + rows;
    saved.turns = (int32_t *)(saved.delta + rows);
    saved.taken = (unsigned *)(saved.turns + WGMMA_BACKWARD_TURNS(rows / S::QUERIES * S::BLOCKS));
    saved.items = (wgmma_backward_item *)(saved.taken + WGMMA_BACKWARD_TAKEN);
    const int64_t items = wgmma_items_alike(g);
    saved.visits = (uint32_t *)(saved.items + items * S::BLOCKS);
    saved.seen =
        (uint8_t *)(saved.visits + items * S::BLOCKS * 2 * WGMMA_BACKWARD_WORDS(g.tiling.q_blocks));
    saved.list = (wgmma_listed *)saved.visits;
    saved.tiles = (int)tiles;
    return saved;
}

/* The first tile of a sequence's query head. That of a packed sequence begins no earlier than the
 * one before ends. */
template <class S>
GPU_DEVICE int wgmma_saved_tile(const fattn_gpu_args &g, const wgmma_saved &saved,
                                const fattn_sequence &seq, int64_t b, int64_t head)
{
    const fattn_problem &p = g.problem;
    if (p.features & FATTN_CU_SEQLENS_Q) {
        return (int)(head * saved.tiles + (int)seq.q_row / S::QUERIES + b);
    }
    return (int)((b * p.heads_q + head) * saved.tiles);
}

/* --- Items ------------------------------------------------------------------------------------ */

/* Whether a kernel before has listed the sequences (wgmma_order.cuh). */
GPU_DEVICE bool wgmma_has_list(const fattn_gpu_args &g)
{
    return wgmma_orders(&g.problem, wgmma_items_alike(g));
}

/* How many items there are: the list of sequences tells, if there is one. */
GPU_DEVICE int wgmma_items_of(const fattn_gpu_args &g, const wgmma_saved &saved)
{
    return (int)(wgmma_has_list(g) ? saved.list[g.problem.batch - 1].past : wgmma_items_alike(g));
}

/* Whether dQ is stored where it is else added to, for nothing else is: keys are one tile. */
template <class S> GPU_DEVICE bool wgmma_stores(const fattn_gpu_args &g)
{
    return !S::IS_PAIR && wgmma_has_one_tile(&g.problem, g.tiling.k_blocks);
}

/* Whether blocks add to dQ in turn. */
GPU_DEVICE bool wgmma_is_ordered(const fattn_problem &p)
{
    return p.features & FATTN_DETERMINISTIC;
}

/* Whether they begin with unlike tiles: in runs without a mask all blocks of a head would begin
 * with the same one. */
GPU_DEVICE bool wgmma_is_shifted(const fattn_problem &p)
{
    return wgmma_is_ordered(p) && !gpu_sequences_differ(p) && p.window_left < 0 &&
           p.window_right < 0;
}

/* Whether all sequences share the bias or mask, while each head has its own. */
GPU_DEVICE bool wgmma_shares_terms(const fattn_problem &p)
{
    const int64_t *const stride = p.features & FATTN_BIAS ? p.bias_stride : p.mask_stride;
    return p.features & (FATTN_BIAS | FATTN_MASK) && stride[0] == 0 && stride[1] != 0;
}

/* Item `number`, with the keys of block `rank` of those that share it; all of these visit the same
 * queries. Heads take turns as in forward, first tiles first: under a causal mask these are heavy.
 * Ordered ones come head by head, last tiles first: in the order of their turns.
 * Where sequences share a bias, those of a head follow one another: then they read it, and add to
 * its gradient, while it is in L2. */
template <class S>
GPU_DEVICE void wgmma_item_set(const fattn_gpu_args &g, const wgmma_saved &saved, int64_t number,
                               int rank, wgmma_backward_item &w)
{
    const fattn_problem &p = g.problem;
    const int64_t group = fattn_quotient(p.heads_q, p.heads_k), limit = INT64_C(1) << 62;
    fattn_tiling order;
    order.q_blocks = g.tiling.k_blocks;
    order.splits = 1;
    order.heads = p.batch * p.heads_k;
    order.together =
        wgmma_is_ordered(p) ? 1 : fattn_max64(fattn_quotient(g.tiling.together, group), 1);
    wgmma_listed listed = {0, 0, 0, 0};
    if (wgmma_has_list(g)) {
        listed = wgmma_listed_of(saved.list, (int)p.batch, (uint32_t)number);
        order.q_blocks = listed.blocks;
        order.heads = p.heads_k;
        order.together = fattn_min64(order.together, p.heads_k);
    }
    fattn_work work = fattn_schedule_item(&order, p.heads_k, number - listed.first);
    work.batch += listed.sequence;
    if (wgmma_shares_terms(p)) {
        const int64_t n = work.batch * p.heads_k + work.head;
        work.head = fattn_quotient(n, p.batch);
        work.batch = n - work.head * p.batch;
    }
    const fattn_sequence seq = gpu_sequence(g, work.batch);
    const fattn_band band = fattn_band_of(&p, &seq);
    const int64_t block = wgmma_is_ordered(p) ? work.block : order.q_blocks - 1 - work.block;
    const int64_t first_key = block * S::ITEM_KEYS;
    const int64_t past_key = fattn_min64(first_key + S::ITEM_KEYS, seq.sk);
    w.block = (int)block * S::BLOCKS + rank;
    const int64_t j0 = (int64_t)w.block * S::KEYS;
    w.keys = (int)gpu_clamp(seq.sk - j0, 0, S::KEYS);
    w.owned = p.features & FATTN_ACCUMULATE ? w.keys : (int)gpu_clamp(seq.slot_k - j0, 0, S::KEYS);
    w.queries = (int)seq.sq;
    /* Query i sees key j when j - right <= i + diagonal <= j + left. */
    const int64_t aligned = j0 - band.diagonal;
    const int64_t most = WGMMA_UNBOUNDED;
    w.first_query =
        (int)(band.right < 0 ? -most
                             : gpu_clamp(aligned - fattn_min64(band.right, limit), -most, most));
    w.past_query =
        (int)(band.left < 0 ? most
                            : gpu_clamp(aligned + fattn_min64(band.left, limit) + 1, -most, most));
    const fattn_range rows = fattn_band_queries(&band, seq.sq, first_key, past_key);
    const int past = first_key < past_key ? (int)gpu_clamp(rows.past, 0, seq.sq) : 0;
    w.past = (past + S::QUERIES - 1) / S::QUERIES;
    w.first = (int)gpu_clamp(rows.first, 0, (int64_t)w.past * S::QUERIES) / S::QUERIES;
    w.start = w.first;
    w.peers = 0;
    w.tiles = max(w.past - w.first, 0) * (int)group;
    w.sequence_keys = (int)seq.sk;
    w.reach = (int)(band.right < 0 ? most
                                   : gpu_clamp(band.diagonal + fattn_min64(band.right, limit) + 1,
                                               -most, most));
    w.full = w.keys < S::KEYS ? INT32_MAX
                              : (max(w.first_query + S::KEYS - 1, 0) + S::QUERIES - 1) / S::QUERIES;
    w.full_past = w.past_query >= seq.sq ? INT32_MAX : max(w.past_query, 0) / S::QUERIES;
    w.q_row = (int)seq.q_row;
    w.k_row = (int)(seq.k_row + j0);
    w.q_batch = (int)seq.q_batch;
    w.k_batch = (int)seq.k_batch;
    w.head = (int)work.head;
    w.batch = (int)work.batch;
    w.diagonal = band.diagonal;
    w.q_position = seq.q_position;
    w.k_position = seq.k_position;
    w.saved = wgmma_saved_tile<S>(g, saved, seq, work.batch, work.head * group);
    w.dk = gpu_key_at(g, seq, p.dk, work.batch, work.head, j0);
    w.dv = gpu_key_at(g, seq, p.dv, work.batch, work.head, j0);
}

/* Strides of what may hide tiles: of a block mask, which comes alone, a bias, or else a mask. */
GPU_DEVICE const int64_t *wgmma_hiding_stride(const fattn_problem &p)
{
    return p.features & FATTN_BLOCK_MASK ? p.block_mask_stride : seen_stride(p);
}

/* What is known of the tiles that may be left out: where, and elements from one sequence, head of
 * keys and tile of queries to the next. */
typedef struct wgmma_sight {
    const uint8_t *seen; /* the bytes of seen.h, or NULL: nothing has been looked at */
    int64_t batch, head;
    uint32_t *visits; /* wgmma_visits_of() the first item */
    int tile;
} wgmma_sight;

template <class S> GPU_DEVICE wgmma_sight wgmma_sight_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const wgmma_saved saved = wgmma_saved_of<S>(g);
    const int64_t *const stride = wgmma_hiding_stride(p);
    const bool looks = wgmma_backward_looks(&p, g.tiling.q_blocks, g.tiling.k_blocks);
    fattn_work next = {};
    wgmma_sight sight;
    sight.seen = looks ? saved.seen : NULL;
    next.head = 1;
    sight.head = seen_at(g.tiling, p.heads_k, stride, next);
    next.head = 0, next.batch = 1;
    sight.batch = seen_at(g.tiling, p.heads_k, stride, next);
    sight.tile = (int)SEEN_BYTES(g.tiling.k_blocks);
    sight.visits = saved.visits;
    return sight;
}

/* A bit for each of an item's tiles of queries, which all heads of the group share: whether it
 * visits the tile. As many words follow of whether that is mixed: some pair is hidden, or has a
 * bias; or whether a block mask leaves something of this block's keys. */
template <class S>
GPU_DEVICE uint32_t *wgmma_visits_of(const fattn_gpu_args &g, const wgmma_sight &sight,
                                     const wgmma_backward_item &w)
{
    const int64_t head = (int64_t)w.batch * g.problem.heads_k + w.head;
    const int64_t block = head * g.tiling.k_blocks * S::BLOCKS + w.block;
    return sight.visits + block * 2 * WGMMA_BACKWARD_WORDS(g.tiling.q_blocks);
}

/* Each by a thread, of as few blocks as can do it. */
template <class S> GPU_DEVICE void wgmma_items_set(const fattn_gpu_args &g)
{
    static_assert(sizeof(wgmma_backward_item) == WGMMA_BACKWARD_ITEM_BYTES, "what is set aside");
    const wgmma_saved saved = wgmma_saved_of<S>(g);
    const int64_t items = wgmma_items_of(g, saved);
    const int64_t own = gpu_block() * gpu_threads() + gpu_thread();
    if (own == 0) {
        *saved.taken = 0;
    }
    for (int64_t n = own; n < items * S::BLOCKS; n += gpu_blocks() * gpu_threads()) {
        wgmma_item_set<S>(g, saved, n / S::BLOCKS, (int)(n % S::BLOCKS), saved.items[n]);
    }
}

/* --- Rows ------------------------------------------------------------------------------------- */

/* Writes lse and delta of one row to the workspace, and zeros to its row of dQ there. Rows past the
 * sequence, up to the end of its last tile, get an lse of +inf, which makes their weights 0. */
template <class S>
GPU_DEVICE void wgmma_prepare_row(const fattn_gpu_args &g, const gpu_global_row &row)
{
    const fattn_problem &p = g.problem;
    const wgmma_saved saved = wgmma_saved_of<S>(g);
    const int lane = gpu_thread() % GPU_ROW_THREADS;
    const int tile = wgmma_saved_tile<S>(g, saved, row.seq, row.b, row.q.h);
    const int64_t at = (int64_t)tile * S::QUERIES + row.q.i;
    const bool inside = row.q.i < (row.seq.sq + S::QUERIES - 1) / S::QUERIES * S::QUERIES;
    float lse = -fattn_f32_infinity(), sum = 0;
    if (inside && !wgmma_stores<S>(g)) {
        GPU_UNROLL
        for (int c = 4 * lane; c < S::WIDTH; c += 4 * GPU_ROW_THREADS) {
            const gpu_f4 zeros = {0, 0, 0, 0};
            *(gpu_f4 *)(saved.dq + at * S::WIDTH + c) = zeros;
        }
    }
    if (row.exists) {
        lse = ((const float *)g.buffers.lse)[row.at];
        sum = gpu_row_delta<S::WIDTH>(g, row);
    }
    sum = gpu_team_sum<GPU_ROW_THREADS>(sum);
    if (wgmma_is_ordered(p) && inside && lane == 0 && row.q.i % S::QUERIES == 0) {
        for (int n = 0; n < S::BLOCKS; n++) {
            saved.turns[at / S::QUERIES * S::BLOCKS + n] = 0;
        }
    }
    if (inside && lane == 0) {
        const bool empty = lse == -fattn_f32_infinity();
        const float dlse =
            p.features & FATTN_DLSE && row.exists ? ((const float *)g.buffers.dlse)[row.at] : 0;
        saved.lse[at] = empty ? fattn_f32_infinity() : lse * (float)FATTN_LOG2E;
        saved.delta[at] = empty ? 0 : sum - dlse;
    }
}

/* The last packed sequence that begins with tile `tile` of a head, or before it: sequence b begins
 * with tile q_row / QUERIES + b. A warp asks. */
template <class S> GPU_DEVICE int wgmma_sequence_of(const fattn_gpu_args &g, int tile)
{
    const fattn_problem &p = g.problem;
    int first = 0, count = (int)p.batch; /* it is one of these */
    while (count > 1) {
        const int step = (count + GPU_WAVE - 1) / GPU_WAVE, own = mma_lane() * step;
        const int64_t row =
            gpu_clamp(g.buffers.cu_seqlens_q[first + min(own, count - 1)], 0, p.total_q);
        const bool begun = own < count && row / S::QUERIES + first + own <= tile;
        const int last = max(__popc(__ballot_sync(0xffffffffu, begun)) - 1, 0) * step;
        first += last;
        count = min(step, count - last);
    }
    return first;
}

/* Calls visit(row) for `rows` rows of all heads, or, if these are fewer, for all that the workspace
 * has of packed ones. Rows of a warp are of one tile. */
template <class S, class Visit>
GPU_DEVICE void wgmma_visit_rows(const fattn_gpu_args &g, int64_t rows, const Visit &visit)
{
    enum { BLOCK = WGMMA_ROWS_THREADS / GPU_ROW_THREADS };
    static_assert(S::QUERIES % BLOCK == 0, "so are those of a block");
    const fattn_problem &p = g.problem;
    const int64_t of_head = (int64_t)wgmma_saved_of<S>(g).tiles * S::QUERIES;
    if (!wgmma_visits_packed(&p, of_head, rows)) {
        gpu_visit_rows<WGMMA_ROWS_THREADS>(g, rows, visit);
        return;
    }
    for (int64_t n = gpu_block() * BLOCK; n < p.heads_q * of_head; n += gpu_blocks() * BLOCK) {
        const int64_t head = fattn_quotient(n, of_head);
        const int64_t place = n - head * of_head + gpu_thread() / GPU_ROW_THREADS;
        gpu_global_row row;
        row.b = wgmma_sequence_of<S>(g, (int)place / S::QUERIES);
        row.seq = gpu_sequence(g, row.b);
        const int64_t i = place - (row.seq.q_row / S::QUERIES + row.b) * S::QUERIES;
        row.q.h = (int32_t)head;
        row.q.i = i < 0 ? INT32_MAX : (int32_t)i; /* below 0 if the table is not in order */
        row.exists = row.q.i < row.seq.sq;
        row.at = gpu_lse_at(p, row.seq, row.b, row.q.h) + row.q.i;
        visit(row);
    }
}

/* Channels c .. c + 3 of row r of a tile of dQ. */
template <class S> GPU_DEVICE gpu_f4 wgmma_sums_of(const float *sums, int r, int c)
{
    if (!S::IS_PAIR) {
        return *(const gpu_f4 *)(sums + wgmma_sum_offset(S::QUERIES, (uint32_t)r, (uint32_t)c));
    }
    const float *const first = sums + wgmma_own_sum_offset(S::QUERIES, (uint32_t)r, (uint32_t)c);
    gpu_f4 four; /* neighbours are four threads apart */
    four.x = first[0], four.y = first[16], four.z = first[32], four.w = first[48];
    return four;
}

/* dQ of a row: its sums times the scale, added to dQ with FATTN_ACCUMULATE, in dQ's own type. */
template <class S>
GPU_DEVICE void wgmma_finish_row(const fattn_gpu_args &g, const gpu_global_row &row)
{
    const wgmma_saved saved = wgmma_saved_of<S>(g);
    if (!row.exists) {
        return;
    }
    const int tile = wgmma_saved_tile<S>(g, saved, row.seq, row.b, row.q.h) + row.q.i / S::QUERIES;
    const float *const sums = saved.dq + (int64_t)tile * S::QUERIES * S::WIDTH;
    const int r = row.q.i % S::QUERIES;
    gpu_finish_sums<S::WIDTH>(g, row, [&](int c) { return wgmma_sums_of<S>(sums, r, c); });
}

/* What a block mask leaves of a tile of an item, in a byte that all heads of a group share: whether
 * anything, and, SEEN_MIXED << n, whether something of the keys of the item's block n. Blocks of
 * the mask are as large as these, or larger. */
template <class S>
GPU_DEVICE int wgmma_left_of_block(const fattn_gpu_args &g, const fattn_work &work, int64_t k_block)
{
    const fattn_problem &p = g.problem;
    const int64_t i0 = work.block * S::QUERIES, head = work.head * g.group;
    gpu_pairs pairs;
    int left = 0;
    pairs.b = work.batch;
    for (int n = 0; n < S::BLOCKS; n++) {
        const int64_t j0 = k_block * S::ITEM_KEYS + n * S::KEYS;
        if (i0 < p.seqlen_q && j0 < p.seqlen_k &&
            gpu_mask_blocks_of(g, pairs, i0, i0 + 1, head, 1, j0, j0 + 1, 0, 1).kept) {
            left |= SEEN_KEPT | SEEN_MIXED << n;
        }
    }
    return left;
}

/* What a block mask, a bias, or else a mask does in each tile, in the workspace. */
template <class S> GPU_DEVICE void wgmma_backward_seen_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const fattn_tiling &tiling = g.tiling;
    const int64_t *const stride = wgmma_hiding_stride(p);
    uint8_t *const seen = wgmma_saved_of<S>(g).seen;
    gpu_admit_later();
    gpu_await_earlier();
    if (!(p.features & FATTN_BLOCK_MASK)) {
        seen_all<S::ITEM_KEYS>(g, tiling, seen, [&](int64_t block) {
            fattn_range rows;
            rows.first = block * S::QUERIES;
            rows.past = fattn_min64(rows.first + S::QUERIES, p.seqlen_q);
            return rows;
        });
        return;
    }
    const int64_t heads = stride[1] ? p.heads_k : 1, batches = stride[0] ? p.batch : 1;
    const int64_t bytes = SEEN_BYTES(tiling.k_blocks);
    for (int64_t n = gpu_block() * gpu_threads() + gpu_thread();
         n < batches * heads * tiling.q_blocks * bytes; n += gpu_blocks() * gpu_threads()) {
        const int64_t item = fattn_quotient(n, bytes), head = fattn_quotient(item, tiling.q_blocks);
        fattn_work work = {};
        work.batch = fattn_quotient(head, heads);
        work.head = head - work.batch * heads;
        work.block = item - head * tiling.q_blocks;
        seen[seen_at(tiling, p.heads_k, stride, work) + n - item * bytes] =
            (uint8_t)wgmma_left_of_block<S>(g, work, n - item * bytes);
    }
}

/* Lists the sequences. An item also stores zeros for keys that a sequence has room for, but does
 * not use. */
template <class S> GPU_DEVICE void wgmma_order_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    wgmma_order(g.problem, wgmma_saved_of<S>(g).list, [&](int b) {
        const fattn_sequence seq = gpu_sequence(g, b);
        const int64_t keys = fattn_max64(seq.sk, seq.slot_k);
        return wgmma_length{(int)seq.sq, (int)((keys + S::ITEM_KEYS - 1) / S::ITEM_KEYS)};
    });
}

template <class S> GPU_DEVICE void wgmma_rows_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    wgmma_items_set<S>(g);
    wgmma_visit_rows<S>(g, g.tiling.q_blocks * S::QUERIES,
                        [&](const gpu_global_row &row) { wgmma_prepare_row<S>(g, row); });
}

template <class S> GPU_DEVICE void wgmma_sink_all(const fattn_gpu_args &g)
{
    GPU_SHARED float sums[WGMMA_SINK_THREADS];
    gpu_admit_later();
    gpu_await_earlier();
    const wgmma_saved saved = wgmma_saved_of<S>(g);
    for (int64_t h = gpu_block(); h < g.problem.heads_q; h += gpu_blocks()) {
        gpu_sink_head<WGMMA_SINK_THREADS>(
            g, saved.lse, saved.delta, h, sums, [&](const fattn_sequence &seq, int64_t b) {
                return (int64_t)wgmma_saved_tile<S>(g, saved, seq, b, h) * S::QUERIES;
            });
    }
}

template <class S> GPU_DEVICE void wgmma_dq_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    wgmma_visit_rows<S>(g, g.problem.seqlen_q,
                        [&](const gpu_global_row &row) { wgmma_finish_row<S>(g, row); });
}

#endif
