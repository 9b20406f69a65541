/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that visit rows before and after backward on Hopper, and share the workspace with it
 * (wgmma_backward_items.cuh). Those of wgmma_backward_before.cuh run earlier.
 *
 *     wgmma_rows_<name>      lse and delta of every row, zeros for its dQ, and the descriptions of
 *                            items
 *     (wgmma_backward.cuh)
 *     wgmma_dq_<name>        dQ in its own type
 *     wgmma_sink_<name>      dSink
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_ROWS_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_ROWS_CUH

#include "backends/cuda/wgmma_backward_items.cuh"
#include "backends/gpu/backward_rows.cuh"

/* --- Rows before ------------------------------------------------------------------------------ */

/* Writes lse and delta of one row to the workspace, and zeros to its row of dQ there. Rows past the
 * sequence, up to the end of its last tile, get an lse of +inf, which makes their weights 0. */
template <class S>
GPU_DEVICE void wgmma_prepare_row(const fattn_gpu_args &g, const gpu_global_row &row)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(S::WIDTH) };
    const fattn_problem &p = g.problem;
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    const int lane = gpu_thread() % TEAM;
    const int tile = wgmma_workspace_tile<S>(g, workspace, row.seq, row.b, row.q.h);
    const int64_t at = (int64_t)tile * S::QUERIES + row.q.i;
    const bool inside = row.q.i < (row.seq.sq + S::QUERIES - 1) / S::QUERIES * S::QUERIES;
    float lse = -fattn_f32_infinity(), sum = 0;
    if (inside && !wgmma_stores<S>(g)) {
        GPU_UNROLL
        for (int c = 4 * lane; c < S::WIDTH; c += 4 * TEAM) {
            const gpu_f4 zeros = {0, 0, 0, 0};
            *(gpu_f4 *)(workspace.dq + at * S::WIDTH + c) = zeros;
        }
    }
    if (row.exists) {
        lse = ((const float *)g.buffers.lse)[row.at];
        sum = gpu_row_delta<S::WIDTH>(g, row);
    }
    sum = gpu_team_sum<TEAM>(sum);
    if (wgmma_is_ordered(p) && inside && lane == 0 && row.q.i % S::QUERIES == 0) {
        for (int n = 0; n < S::BLOCKS; n++) {
            workspace.turns[at / S::QUERIES * S::BLOCKS + n] = 0;
        }
    }
    if (inside && lane == 0) {
        const bool empty = lse == -fattn_f32_infinity();
        const float dlse =
            p.features & FATTN_DLSE && row.exists ? ((const float *)g.buffers.dlse)[row.at] : 0;
        workspace.lse[at] = empty ? fattn_f32_infinity() : lse * (float)FATTN_LOG2E;
        workspace.delta[at] = empty ? 0 : sum - dlse;
    }
}

/* The last packed sequence that begins at tile `tile` of a head or before it. Sequence b begins
 * with tile q_row / QUERIES + b. Called by a warp. */
template <class S> GPU_DEVICE int wgmma_sequence_of(const fattn_gpu_args &g, int tile)
{
    const fattn_problem &p = g.problem;
    int first = 0, count = (int)p.batch; /* it is one of `count` sequences from `first` on */
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

/* Calls visit(row) for `rows` rows of each head of each sequence or, in packed batches, for the
 * rows of the workspace if these are fewer. The rows of a warp are in one tile. */
template <class S, class Visit>
GPU_DEVICE void wgmma_visit_rows(const fattn_gpu_args &g, int64_t rows, const Visit &visit)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(S::WIDTH), BLOCK = WGMMA_ROWS_THREADS / TEAM };
    static_assert(S::QUERIES % BLOCK == 0, "so are those of a block");
    const fattn_problem &p = g.problem;
    const int64_t of_head = (int64_t)wgmma_workspace_of<S>(g).tiles * S::QUERIES;
    if (!wgmma_visits_packed(&p, of_head, rows)) {
        gpu_visit_rows<S::WIDTH, WGMMA_ROWS_THREADS>(g, rows, visit);
        return;
    }
    for (int64_t n = gpu_block() * BLOCK; n < p.heads_q * of_head; n += gpu_blocks() * BLOCK) {
        const int64_t head = fattn_quotient(n, of_head);
        const int64_t place = n - head * of_head + gpu_thread() / TEAM;
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

template <class S> GPU_DEVICE void wgmma_rows_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    wgmma_items_set<S>(g);
    wgmma_visit_rows<S>(g, g.tiling.q_blocks * S::QUERIES,
                        [&](const gpu_global_row &row) { wgmma_prepare_row<S>(g, row); });
}

/* --- Rows after ------------------------------------------------------------------------------- */

/* The sums of channels c .. c + 3 of row r of a tile of dQ. */
template <class S> GPU_DEVICE gpu_f4 wgmma_sums_of(const float *sums, int r, int c)
{
    if (!S::IS_PAIR) {
        return *(const gpu_f4 *)(sums + wgmma_sum_offset(S::QUERIES, (uint32_t)r, (uint32_t)c));
    }
    const float *const first = sums + wgmma_own_sum_offset(S::QUERIES, (uint32_t)r, (uint32_t)c);
    gpu_f4 four; /* adjacent channels belong to threads four apart */
    four.x = first[0], four.y = first[16], four.z = first[32], four.w = first[48];
    return four;
}

/* Writes dQ of a row in its own type: the sums times the scale, added to dQ with
 * FATTN_ACCUMULATE. */
template <class S>
GPU_DEVICE void wgmma_finish_row(const fattn_gpu_args &g, const gpu_global_row &row)
{
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    if (!row.exists) {
        return;
    }
    const int tile =
        wgmma_workspace_tile<S>(g, workspace, row.seq, row.b, row.q.h) + row.q.i / S::QUERIES;
    const float *const sums = workspace.dq + (int64_t)tile * S::QUERIES * S::WIDTH;
    const int r = row.q.i % S::QUERIES;
    gpu_finish_sums<S::WIDTH>(g, row, [&](int c) { return wgmma_sums_of<S>(sums, r, c); });
}

template <class S> GPU_DEVICE void wgmma_dq_all(const fattn_gpu_args &g)
{
    gpu_admit_later();
    gpu_await_earlier();
    wgmma_visit_rows<S>(g, g.problem.seqlen_q,
                        [&](const gpu_global_row &row) { wgmma_finish_row<S>(g, row); });
}

/* --- Sinks ------------------------------------------------------------------------------------ */

template <class S> GPU_DEVICE void wgmma_sink_all(const fattn_gpu_args &g)
{
    GPU_SHARED float sums[WGMMA_SINK_THREADS];
    gpu_admit_later();
    gpu_await_earlier();
    const wgmma_workspace workspace = wgmma_workspace_of<S>(g);
    for (int64_t h = gpu_block(); h < g.problem.heads_q; h += gpu_blocks()) {
        gpu_sink_head<WGMMA_SINK_THREADS>(
            g, workspace.lse, workspace.delta, h, sums, [&](const fattn_sequence &seq, int64_t b) {
                return (int64_t)wgmma_workspace_tile<S>(g, workspace, seq, b, h) * S::QUERIES;
            });
    }
}

#endif
