/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merging the parts of rows whose keys have been split (parts.cuh): by the block that finishes the
 * last part, or by one of two kernels that run after forward, `combine` and `combine_rows`. All of
 * them add parts in ascending order, so that a row has the same bits whoever merges it.
 */
#ifndef FATTN_GPU_COMBINE_CUH
#define FATTN_GPU_COMBINE_CUH

#include "backends/gpu/parts.cuh"
#include "backends/gpu/team.cuh"

/* --- A row ------------------------------------------------------------------------------------ */

/* The distance of two successive parts, in floats. */
GPU_DEVICE int gpu_part_step(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    return (int)(fattn_min64(g.tiling.br, g.group * p.seqlen_q) * (2 + p.dim_v));
}

/* Reads a thread's channels of a part: the one at o and every 32nd after it or, if QUAD, four
 * adjacent ones aligned to 16 bytes. From o on, `left` channels exist. */
template <int CHANNELS, bool QUAD>
GPU_DEVICE void gpu_part_channels(const float *o, int64_t left, float x[CHANNELS])
{
    if constexpr (QUAD) {
        gpu_f4 four = {0, 0, 0, 0};
        if (left > 0) {
            four = *(const gpu_f4 *)o;
        }
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
        GPU_UNROLL
        for (int u = 0; u < CHANNELS; u++) {
            x[u] = 32 * u < left ? o[32 * u] : 0;
        }
    }
}

/* Merges the parts of a row, of which `part` is the first, in batches of 16. In a batch, each of 16
 * threads computes the weight of one part, and then all threads sum their channels, from c on, over
 * the parts in ascending order. The loads of HELD parts are in flight together. */
template <int CHANNELS, bool QUAD = false>
GPU_DEVICE void gpu_combine_parts(const fattn_gpu_args &g, const gpu_part &part, int64_t c,
                                  int64_t parts, fattn_softmax &all, float sum[CHANNELS])
{
    enum { BATCH = FATTN_GPU_MERGE_PARTS, HELD = QUAD ? BATCH / 2 : BATCH };
    const int lane = gpu_thread() % 32, step = gpu_part_step(g);
    GPU_UNROLL
    for (int u = 0; u < CHANNELS; u++) {
        sum[u] = 0;
    }
    all = fattn_softmax_empty();
    for (int64_t first = 0; first < parts; first += BATCH) {
        const int live = (int)fattn_min64(parts - first, BATCH);
        const int64_t at = first * step;
        const float *o = (const float *)part.o.data + part.at + c + at;
        float own[HELD][CHANNELS];
        const auto fetch = [&](int before) {
            GPU_UNROLL
            for (int n = 0; n < HELD; n++, o += step) {
                const int64_t left = before + n < live ? g.problem.dim_v - c : 0;
                gpu_part_channels<CHANNELS, QUAD>(o, left, own[n]);
            }
        };
        fetch(0);
        fattn_softmax state = fattn_softmax_empty();
        if (lane < live) {
            state.m = part.m[at + lane * step];
            state.l = part.l[at + lane * step];
        }
        const float alpha = fattn_softmax_raise(&all, gpu_team_max<32>(state.m), g.rule.unit);
        const float weight = fattn_softmax_weight(state.m, g.rule.unit, fattn_softmax_base(all));
        fattn_softmax_add(&all, gpu_team_sum<32>(state.l * weight));
        GPU_UNROLL
        for (int u = 0; u < CHANNELS; u++) {
            sum[u] *= alpha;
        }
        GPU_UNROLL
        for (int before = 0; before < BATCH; before += HELD) {
            if (before > 0) {
                if (before >= live) {
                    break;
                }
                fetch(before);
            }
            GPU_UNROLL
            for (int n = 0; n < HELD; n++) {
                const float share = gpu_shfl(weight, before + n);
                GPU_UNROLL
                for (int u = 0; u < CHANNELS; u++) {
                    sum[u] = fmaf(share, own[n][u], sum[u]);
                }
            }
        }
    }
}

/* Writes the row of query q from such sums: o, and lse by the thread that has channel 0. */
template <int CHANNELS, bool QUAD = false>
GPU_DEVICE void gpu_store_row(const fattn_gpu_args &g, const fattn_sequence &seq, int64_t b,
                              gpu_query q, int64_t c, fattn_softmax all, const float sum[CHANNELS])
{
    const fattn_problem &p = g.problem;
    const gpu_part to = gpu_part_output(g, seq, q);
    float o[CHANNELS];
    GPU_UNROLL
    for (int u = 0; u < CHANNELS; u++) {
        o[u] = gpu_output(all, sum[u]);
    }
    if constexpr (QUAD) {
        if (p.outputs & FATTN_OUT_O) {
            gpu_store_quad(to.o, to.at, (int)c, o);
        }
    } else {
        GPU_UNROLL
        for (int u = 0; u < CHANNELS; u++) {
            if (c + 32 * u < p.dim_v && p.outputs & FATTN_OUT_O) {
                gpu_store(to.o.data, p.dtype_o, to.at + c + 32 * u, o[u]);
            }
        }
    }
    if (c == 0) {
        gpu_store_lse(g, seq, b, q, all);
    }
}

/* --- Merging by the last block ---------------------------------------------------------------- */

/*
 * Blocks with parts of the same rows count in a word of the workspace how many of them have
 * finished. The last one merges all parts, which costs less than another kernel. Which block is
 * last varies from run to run; the result does not depend on it.
 *
 * A workspace may hold anything when a run begins. A count begins at g.mark, a number that memory
 * is unlikely to hold by chance, and the last block restores it. A block that begins and finds no
 * valid count writes the mark. So every block has written or read a valid count before it counts.
 *
 * The word may therefore be read before anything has written it, which tools such as initcheck of
 * compute-sanitizer report. This cannot be avoided without another launch: only a word that all
 * blocks read shows which one is last, any block may be the first to read it, and clearing it
 * earlier takes a launch. A program that wants no such report clears its workspace once: the last
 * block leaves a count that the next run recognises.
 */
GPU_DEVICE uint64_t *gpu_counter_of(const fattn_gpu_args &g, int64_t b, int64_t hk)
{
    return (uint64_t *)(g.workspace + g.counters) + (b * g.problem.heads_k + hk);
}

/* One thread of each of `most` blocks calls this before the block counts. word: gpu_peek() of the
 * counter, which the caller reads early, because that takes long. */
GPU_DEVICE void gpu_count_begin(const fattn_gpu_args &g, uint64_t *counter, uint64_t word,
                                int64_t most)
{
    if (word - g.mark >= (uint64_t)most) {
        gpu_compare_and_swap(counter, word, g.mark);
    }
}

/* Counts this block, which has written its part. Returns whether it is the last of `most`. All
 * threads of the block must call it. */
GPU_DEVICE bool gpu_count_end(const fattn_gpu_args &g, uint64_t *counter, int64_t most)
{
    bool last = false;
    gpu_sync_memory(); /* all threads have written their share of the part */
    if (gpu_thread() == 0) {
        last = gpu_count(counter) - g.mark == (uint64_t)most - 1;
        if (last) {
            gpu_poke(counter, g.mark);
        }
    }
    last = gpu_any(last);
    if (last) {
        gpu_sync_memory(); /* the other blocks' parts are visible */
    }
    return last;
}

/* Merges the parts of rows 0 .. rows - 1 of a key/value head that has one block of rows. item: the
 * number of the first part's item. */
GPU_DEVICE void gpu_merge_rows(const fattn_gpu_args &g, const fattn_sequence &seq, int64_t b,
                               int64_t hk, int rows, int64_t item, int64_t parts)
{
    enum { CHANNELS = FATTN_GPU_MERGE_CHANNELS / 32 };
    const int slabs = (int)((g.problem.dim_v + 32 * CHANNELS - 1) / (32 * CHANNELS));
    for (int n = gpu_thread() / 32; n < rows * slabs; n += gpu_threads() / 32) {
        const int r = n / slabs;
        const int64_t c = (n - r * slabs) * 32 * CHANNELS + gpu_thread() % 32;
        float sum[CHANNELS];
        fattn_softmax all;
        gpu_combine_parts<CHANNELS>(g, gpu_part_of(g, item, r), c, parts, all, sum);
        gpu_store_row<CHANNELS>(g, seq, b, gpu_query_of(r, g.group, hk * g.group), c, all, sum);
    }
}

/* --- Merging by a kernel of its own ----------------------------------------------------------- */

/* What 32 threads of `combine` merge: 32 channels of one row. */
typedef struct gpu_combined {
    gpu_part part; /* the row in its first part */
    int64_t c;     /* this thread's channel */
    fattn_work work;
    int64_t number; /* of the row, in its key/value head */
} gpu_combined;

/* Piece n of the work. Pieces run over blocks of rows, rows, and 32 channels at a time, the last
 * one fastest. */
GPU_DEVICE gpu_combined gpu_combined_of(const fattn_gpu_args &g, int64_t n, int64_t rows)
{
    const int64_t pieces = (g.problem.dim_v + 31) / 32;
    const int64_t row = fattn_quotient(n, pieces), item = fattn_quotient(row, rows);
    const int r = (int)(row - item * rows);
    gpu_combined piece;
    piece.work = fattn_schedule_item(&g.tiling, g.problem.heads_k, item * g.tiling.splits);
    piece.part = gpu_part_of(g, item * g.tiling.splits, r);
    piece.c = (n - row * pieces) * 32 + gpu_thread() % 32;
    piece.number = piece.work.block * g.tiling.br + r;
    return piece;
}

/* How many parts a block of rows has. The divisions take a microsecond together, and are left out
 * if a head is one block of rows that attends to all keys of the plan. */
GPU_DEVICE int64_t gpu_combined_parts(const fattn_gpu_args &g, int64_t block,
                                      const fattn_sequence &seq)
{
    const fattn_band band = fattn_band_of(&g.problem, &seq);
    if (g.tiling.q_blocks == 1) {
        const fattn_range keys = fattn_band_rows(&band, 0, seq.sq);
        if (keys.first == 0 && keys.past == g.problem.seqlen_k) {
            return g.tiling.splits;
        }
    }
    const int64_t first = block * g.tiling.br;
    const int64_t rows = fattn_min64(seq.sq * g.group - first, g.tiling.br);
    const fattn_parts parts =
        gpu_parts_of(g, band, fattn_quotient(first, g.group),
                     fattn_quotient(first + rows - 1, g.group) + 1, g.tiling.bc);
    return fattn_parts_count(&parts);
}

/* Merges a piece. The caller has found what depends on the arguments alone; lengths, and then the
 * parts, are read only after earlier kernels are done. */
GPU_DEVICE void gpu_combine_piece(const fattn_gpu_args &g, const gpu_combined &piece)
{
    const int64_t i = fattn_quotient(piece.number, g.group);
    if (gpu_sequences_differ(g.problem)) {
        gpu_await_earlier();
    }
    const fattn_sequence seq = gpu_sequence(g, piece.work.batch);
    fattn_softmax all;
    gpu_query q;
    float sum[1];
    if (i >= seq.sq) {
        return;
    }
    q.i = (int32_t)i;
    q.h = (int32_t)(piece.work.head * g.group + piece.number - i * g.group);
    const int64_t parts = gpu_combined_parts(g, piece.work.block, seq);
    gpu_await_earlier(); /* the parts */
    if (parts == 1) {
        return; /* the row has been written to the output */
    }
    gpu_combine_parts<1>(g, piece.part, piece.c, parts, all, sum);
    gpu_store_row<1>(g, seq, piece.work.batch, q, piece.c, all, sum);
}

GPU_DEVICE void gpu_combine_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t rows = fattn_min64(g.tiling.br, g.group * p.seqlen_q);
    const int64_t pieces = (p.dim_v + 31) / 32;
    const int64_t count = fattn_quotient(g.tiling.items, g.tiling.splits) * rows * pieces;
    const int teams = FATTN_GPU_COMBINE_THREADS / 32;
    gpu_admit_later();
    for (int64_t n = gpu_block() * teams + gpu_thread() / 32; n < count;
         n += gpu_blocks() * teams) {
        gpu_combine_piece(g, gpu_combined_of(g, n, rows));
    }
}

/* --- Merging many rows ------------------------------------------------------------------------ */

/* Finding out which row to merge takes longer than merging it. So a block merges several rows of
 * one item: set n, where an item of `rows` rows has `of` sets. o of a part begins at a multiple of
 * 16 bytes (parts.c). */
GPU_DEVICE void gpu_combine_set(const fattn_gpu_args &g, int64_t n, int64_t of, int64_t rows)
{
    const int64_t block = fattn_quotient(n, of), item = block * g.tiling.splits;
    const int64_t first = (n - block * of) * FATTN_GPU_COMBINE_ROWS;
    const fattn_work work = fattn_schedule_item(&g.tiling, g.problem.heads_k, item);
    if (gpu_sequences_differ(g.problem)) {
        gpu_await_earlier();
    }
    const fattn_sequence seq = gpu_sequence(g, work.batch);
    const int64_t before = work.block * g.tiling.br; /* rows of the head before the block's */
    const int64_t exist = fattn_min64(rows, seq.sq * g.group - before);
    const int past = (int)fattn_min64(exist, first + FATTN_GPU_COMBINE_ROWS);
    if (first >= past) {
        return;
    }
    const int64_t parts = gpu_combined_parts(g, work.block, seq);
    gpu_await_earlier(); /* the parts */
    if (parts == 1) {
        return;
    }
    for (int r = (int)first + gpu_thread() / 32; r < past; r += FATTN_GPU_COMBINE_THREADS / 32) {
        const gpu_part part = gpu_part_of(g, item, r);
        const gpu_query q = gpu_query_of(before + r, g.group, work.head * g.group);
        for (int64_t c0 = 0; c0 < g.problem.dim_v; c0 += 128) {
            const int64_t c = c0 + gpu_thread() % 32 * 4; /* may be past the last channel */
            float sum[4];
            fattn_softmax all;
            gpu_combine_parts<4, true>(g, part, c, parts, all, sum);
            gpu_store_row<4, true>(g, seq, work.batch, q, c, all, sum);
        }
    }
}

GPU_DEVICE void gpu_combine_rows(const fattn_gpu_args &g)
{
    const int64_t rows = fattn_min64(g.tiling.br, g.group * g.problem.seqlen_q);
    const int64_t of = (rows + FATTN_GPU_COMBINE_ROWS - 1) / FATTN_GPU_COMBINE_ROWS;
    const int64_t count = fattn_quotient(g.tiling.items, g.tiling.splits) * of;
    gpu_admit_later();
    for (int64_t n = gpu_block(); n < count; n += gpu_blocks()) {
        gpu_combine_set(g, n, of, rows);
    }
}

#define GPU_COMBINE                                                                         \
    GPU_KERNEL(FATTN_GPU_COMBINE_THREADS, 6) combine(const GPU_PARAM fattn_gpu_args g)      \
    {                                                                                       \
        gpu_combine_all(g);                                                                 \
    }                                                                                       \
    GPU_KERNEL(FATTN_GPU_COMBINE_THREADS, 4) combine_rows(const GPU_PARAM fattn_gpu_args g) \
    {                                                                                       \
        gpu_combine_rows(g);                                                                \
    }

#endif
