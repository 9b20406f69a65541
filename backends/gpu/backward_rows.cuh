/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that run before and after the main backward kernel on matrix units, and the workspace
 * that they share with it: lse and delta of every row, and dQ in floats, to which the blocks of the
 * main kernel add.
 *
 *     clear      zeros for dBias
 *     rows_W     lse and delta of every row, and zeros for its dQ
 *                (the vendor's main kernel: dK, dV, dBias, and dQ in the workspace)
 *     dq_W       dQ in its own type
 *     sink_W     dSink
 *
 * In a packed batch, packed_rows_W and packed_dq_W take the place of rows_W and dq_W, unless the
 * run is deterministic.
 */
#ifndef FATTN_GPU_BACKWARD_ROWS_CUH
#define FATTN_GPU_BACKWARD_ROWS_CUH

#include "backends/gpu/pairs.cuh"
#include "backends/gpu/team.cuh"
#include "core/schedule.h"

/* --- The workspace ---------------------------------------------------------------------------- */

/* For every row, in the order of the operand lse. */
typedef struct gpu_workspace {
    float *lse;    /* in log2 units; +inf for an empty row, whose probabilities are 0 */
    float *delta;  /* 0 for an empty row */
    float *dq;     /* W channels, not yet multiplied by scale */
    float *factor; /* f32 alone: see bf16x3_backward.cuh */

    /* How many items blocks have taken; and, in deterministic runs, how many blocks have added to
     * dQ of each tile of queries of each head. */
    unsigned long long *taken;
    int32_t *turns;
} gpu_workspace;

template <int W> GPU_DEVICE gpu_workspace gpu_workspace_of(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t rows = (p.features & FATTN_CU_SEQLENS_Q ? 1 : p.batch) * p.heads_q * p.total_q;
    gpu_workspace saved;
    saved.dq = (float *)g.workspace;
    saved.lse = saved.dq + rows * W;
    saved.delta = saved.lse + rows;
    saved.factor = saved.delta + rows;
    saved.taken = (unsigned long long *)(saved.delta + rows); /* rows * (W + 2) is even */
    saved.turns = (int32_t *)(saved.taken + 1);
    return saved;
}

/* Row n of the problem, if every head had `rows` rows, p.seqlen_q or more. */
typedef struct gpu_global_row {
    fattn_sequence seq;
    int64_t b, at; /* at: its index in lse */
    gpu_query q;
    bool exists;
} gpu_global_row;

GPU_DEVICE gpu_global_row gpu_global_row_of(const fattn_gpu_args &g, int64_t n, int64_t rows)
{
    const fattn_problem &p = g.problem;
    const int64_t head = fattn_quotient(n, rows);
    gpu_global_row row;
    row.b = fattn_quotient(head, p.heads_q);
    row.q.h = (int32_t)(head - row.b * p.heads_q);
    row.q.i = (int32_t)(n - head * rows);
    row.seq = gpu_sequence(g, row.b);
    row.exists = row.q.i < row.seq.sq;
    row.at = gpu_lse_at(p, row.seq, row.b, row.q.h) + row.q.i;
    return row;
}

/* Row n of fattn_gpu_row_count() in a packed batch. It may belong to no sequence. */
GPU_DEVICE gpu_global_row gpu_packed_row_of(const fattn_gpu_args &g, int64_t n)
{
    const fattn_problem &p = g.problem;
    const int64_t h = fattn_quotient(n, p.total_q), place = n - h * p.total_q;
    gpu_global_row row;
    row.b = gpu_last_begun(p.batch, place, [&](int64_t b) { return g.buffers.cu_seqlens_q[b]; });
    row.seq = gpu_sequence(g, row.b);
    const int64_t i = place - row.seq.q_row;
    row.q.h = (int32_t)h;
    row.q.i = i < 0 ? INT32_MAX : (int32_t)i;
    row.exists = row.q.i < row.seq.sq;
    row.at = gpu_lse_at(p, row.seq, row.b, row.q.h) + row.q.i;
    return row;
}

/* Row n of fattn_gpu_row_count() in any batch. */
GPU_DEVICE gpu_global_row gpu_existing_row_of(const fattn_gpu_args &g, int64_t n)
{
    return g.problem.features & FATTN_CU_SEQLENS_Q ? gpu_packed_row_of(g, n)
                                                   : gpu_global_row_of(g, n, g.problem.seqlen_q);
}

/* sum + the dot product of two pairs of 16-bit elements. */
GPU_DEVICE float gpu_add_pairs(fattn_dtype dtype, uint32_t a, uint32_t b, float sum)
{
    sum = fmaf(gpu_widen(dtype, (uint16_t)a), gpu_widen(dtype, (uint16_t)b), sum);
    return fmaf(gpu_widen(dtype, (uint16_t)(a >> 16)), gpu_widen(dtype, (uint16_t)(b >> 16)), sum);
}

/* This thread's part of sum_c o_c dO_c of a row of W 16-bit channels, which begins at o and dout,
 * both aligned to 16 bytes. All loads are issued before the first product. */
template <int W>
GPU_DEVICE float gpu_row_products(fattn_dtype dtype, const uint16_t *o, const uint16_t *dout)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(W), COUNT = W / (8 * TEAM) };
    gpu_u4 a[COUNT], b[COUNT];
    float sum = 0;
    GPU_UNROLL
    for (int n = 0; n < COUNT; n++) {
        const int c = 8 * (n * TEAM + gpu_thread() % TEAM);
        a[n] = *(const gpu_u4 *)(o + c);
        b[n] = *(const gpu_u4 *)(dout + c);
    }
    GPU_UNROLL
    for (int n = 0; n < COUNT; n++) {
        sum = gpu_add_pairs(dtype, a[n].x, b[n].x, sum);
        sum = gpu_add_pairs(dtype, a[n].y, b[n].y, sum);
        sum = gpu_add_pairs(dtype, a[n].z, b[n].z, sum);
        sum = gpu_add_pairs(dtype, a[n].w, b[n].w, sum);
    }
    return sum;
}

/* The same for a row of any dtype, alignment and number of channels. */
template <int W> GPU_DEVICE float gpu_row_delta(const fattn_gpu_args &g, const gpu_global_row &row)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(W) };
    const fattn_problem &p = g.problem;
    const unsigned both = FATTN_GPU_QUADS_O | FATTN_GPU_QUADS_DOUT;
    const gpu_tensor o = gpu_tensor_of(g, g.buffers.o, p.dtype_o, FATTN_GPU_QUADS_O, p.dim_v);
    const gpu_tensor dout =
        gpu_tensor_of(g, g.buffers.dout, p.dtype_o, FATTN_GPU_QUADS_DOUT, p.dim_v);
    const int64_t o_at = gpu_query_at(row.seq, p.o, row.q.i, row.q.h);
    const int64_t dout_at = gpu_query_at(row.seq, p.dout, row.q.i, row.q.h);
    float sum = 0;
    if ((g.chunks & both) == both && o.dim == W && o.dtype != FATTN_F32) {
        const uint16_t *const from = (const uint16_t *)o.data + o_at;
        const uint16_t *const dfrom = (const uint16_t *)dout.data + dout_at;
        return o.dtype == FATTN_F16 ? gpu_row_products<W>(FATTN_F16, from, dfrom)
                                    : gpu_row_products<W>(FATTN_BF16, from, dfrom);
    }
    for (int c = 4 * (gpu_thread() % TEAM); c < o.dim; c += 4 * TEAM) {
        sum = gpu_add_products(o, o_at, dout, dout_at, c, sum);
    }
    return sum;
}

/* A team of threads writes a row's lse in log2 units, its delta, and zeros for its dQ. In
 * deterministic runs the first row of a tile also clears the tile's turn. */
template <int W> GPU_DEVICE void gpu_prepare_row(const fattn_gpu_args &g, const gpu_global_row &row)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(W) };
    const fattn_problem &p = g.problem;
    const gpu_workspace saved = gpu_workspace_of<W>(g);
    const int lane = gpu_thread() % TEAM;
    const float lse = row.exists && lane == 0 ? ((const float *)g.buffers.lse)[row.at] : 0;
    float sum = 0;
    if (row.exists) {
        GPU_UNROLL
        for (int c = 4 * lane; c < W; c += 4 * TEAM) {
            const gpu_f4 zeros = {0, 0, 0, 0};
            *(gpu_f4 *)(saved.dq + row.at * W + c) = zeros;
        }
        sum = gpu_row_delta<W>(g, row);
    }
    sum = gpu_team_sum<TEAM>(sum);
    if (p.features & FATTN_DETERMINISTIC && lane == 0 && row.q.i % g.tiling.br == 0) {
        const int64_t head = row.b * p.heads_q + row.q.h;
        saved.turns[head * g.tiling.q_blocks + row.q.i / g.tiling.br] = 0;
    }
    if (row.exists && lane == 0) {
        const bool empty = lse == -fattn_f32_infinity();
        const float dlse = p.features & FATTN_DLSE ? ((const float *)g.buffers.dlse)[row.at] : 0;
        saved.lse[row.at] = empty ? fattn_f32_infinity() : lse * (float)FATTN_LOG2E;
        saved.delta[row.at] = empty ? 0 : sum - dlse;
    }
}

/* Clears the counter of items, before the main kernel takes any. */
template <int W> GPU_DEVICE void gpu_clear_taken(const fattn_gpu_args &g)
{
    if (gpu_block() == 0 && gpu_thread() == 0) {
        *gpu_workspace_of<W>(g).taken = 0;
    }
}

/* dQ of a row of exactly W channels. All loads of its sums are issued before the first store. */
template <int W, class Sums>
GPU_DEVICE void gpu_finish_whole(const gpu_tensor &dq, int64_t to, const Sums &sums_of, float scale)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(W), COUNT = W / (4 * TEAM) };
    const int lane = gpu_thread() % TEAM;
    gpu_f4 sum[COUNT];
    GPU_UNROLL
    for (int n = 0; n < COUNT; n++) {
        sum[n] = sums_of(4 * (n * TEAM + lane));
    }
    GPU_UNROLL
    for (int n = 0; n < COUNT; n++) {
        const float x[4] = {sum[n].x * scale, sum[n].y * scale, sum[n].z * scale, sum[n].w * scale};
        gpu_store_quad(dq, to, 4 * (n * TEAM + lane), x);
    }
}

/* Writes dQ of a row that exists, as its sums times scale. sums_of(c): the sums of channels
 * c .. c + 3 in the workspace. */
template <int W, class Sums>
GPU_DEVICE void gpu_finish_sums(const fattn_gpu_args &g, const gpu_global_row &row,
                                const Sums &sums_of)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(W) };
    const fattn_problem &p = g.problem;
    const gpu_tensor dq =
        gpu_tensor_of(g, g.buffers.dq, g.dtype_gradient, FATTN_GPU_QUADS_DQ, p.dim);
    const int64_t to = gpu_query_at(row.seq, p.dq, row.q.i, row.q.h);
    if (dq.dim == W && !(p.features & FATTN_ACCUMULATE)) {
        gpu_finish_whole<W>(dq, to, sums_of, g.rule.scale);
        return;
    }
    for (int c = 4 * (gpu_thread() % TEAM); c < dq.dim; c += 4 * TEAM) {
        const gpu_f4 sum = sums_of(c);
        const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
        float x[4] = {0, 0, 0, 0};
        if (p.features & FATTN_ACCUMULATE) {
            gpu_load_quad(dq, to, c, x);
        }
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            x[e] = fmaf(sums[e], g.rule.scale, x[e]);
        }
        gpu_store_quad(dq, to, c, x);
    }
}

template <int W> GPU_DEVICE void gpu_finish_row(const fattn_gpu_args &g, const gpu_global_row &row)
{
    const gpu_workspace saved = gpu_workspace_of<W>(g);
    if (row.exists) {
        gpu_finish_sums<W>(g, row,
                           [&](int c) { return *(const gpu_f4 *)(saved.dq + row.at * W + c); });
    }
}

/* --- dBias and dSink -------------------------------------------------------------------------- */

/* Clears row n of dbias. Axes that it is summed over have one row. */
GPU_DEVICE void gpu_clear_dbias(const fattn_gpu_args &g, int64_t n)
{
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    const int64_t rows = stride[2] ? p.seqlen_q : 1, heads = stride[1] ? p.heads_q : 1;
    const int64_t head = fattn_quotient(n, rows), b = fattn_quotient(head, heads);
    float *const row = (float *)g.buffers.dbias + b * stride[0] + (head - b * heads) * stride[1] +
                       (n - head * rows) * stride[2];
    for (int64_t j = gpu_thread(); j < (stride[3] ? p.seqlen_k : 1); j += gpu_threads()) {
        row[j * stride[3]] = 0;
    }
}

GPU_DEVICE void gpu_clear_dbias_rows(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t *const stride = p.dbias_stride;
    const int64_t rows =
        (stride[0] ? p.batch : 1) * (stride[1] ? p.heads_q : 1) * (stride[2] ? p.seqlen_q : 1);
    for (int64_t n = gpu_block(); n < rows; n += gpu_blocks()) {
        gpu_clear_dbias(g, n);
    }
}

/* dSink of a head: each thread sums some rows, and a tree adds the threads' sums. lse is in log2
 * units. find(seq, b): the index at which lse and delta of the head begin in a sequence. */
template <int THREADS, class Find>
GPU_DEVICE void gpu_sink_head(const fattn_gpu_args &g, const float *lse, const float *delta,
                              int64_t h, float *sums, const Find &find)
{
    const float sink = ((const float *)g.buffers.sink)[h];
    float sum = 0;
    for (int64_t b = 0; b < g.problem.batch; b++) {
        const fattn_sequence seq = gpu_sequence(g, b);
        const int64_t at = find(seq, b);
        for (int64_t i = gpu_thread(); i < seq.sq; i += THREADS) {
            const float weight = exp2f(fmaf(sink, (float)FATTN_LOG2E, -lse[at + i]));
            sum -= weight * delta[at + i];
        }
    }
    gpu_store_dsink<THREADS>(g, sums, h, sum);
}

/* Calls visit(of(n)) for rows n = 0 .. count - 1, in blocks of THREADS threads. */
template <int W, int THREADS, class Of, class Visit>
GPU_DEVICE void gpu_visit(int64_t count, const Of &of, const Visit &visit)
{
    enum { TEAM = FATTN_GPU_ROW_THREADS(W), BLOCK = THREADS / TEAM };
    for (int64_t n = gpu_block() * BLOCK; n < count; n += gpu_blocks() * BLOCK) {
        const int64_t number = n + gpu_thread() / TEAM;
        gpu_global_row row = of(fattn_min64(number, count - 1));
        row.exists = row.exists && number < count;
        visit(row);
    }
}

/* Calls visit() for rows 0 .. rows - 1 of all heads of all sequences. */
template <int W, int THREADS, class Visit>
GPU_DEVICE void gpu_visit_rows(const fattn_gpu_args &g, int64_t rows, const Visit &visit)
{
    gpu_visit<W, THREADS>(
        g.problem.batch * g.problem.heads_q * rows,
        [&](int64_t n) { return gpu_global_row_of(g, n, rows); }, visit);
}

/* Calls visit() for all rows of fattn_gpu_row_count() in a packed batch, in one that is not packed,
 * and in any. */
template <int W, int THREADS, class Visit>
GPU_DEVICE void gpu_visit_packed(const fattn_gpu_args &g, const Visit &visit)
{
    gpu_visit<W, THREADS>(
        fattn_gpu_row_count(&g.problem), [&](int64_t n) { return gpu_packed_row_of(g, n); }, visit);
}

template <int W, int THREADS, class Visit>
GPU_DEVICE void gpu_visit_padded(const fattn_gpu_args &g, const Visit &visit)
{
    gpu_visit_rows<W, THREADS>(g, g.problem.seqlen_q, visit);
}

template <int W, int THREADS, class Visit>
GPU_DEVICE void gpu_visit_any(const fattn_gpu_args &g, const Visit &visit)
{
    gpu_visit<W, THREADS>(
        fattn_gpu_row_count(&g.problem), [&](int64_t n) { return gpu_existing_row_of(g, n); },
        visit);
}

template <int W> GPU_DEVICE void gpu_sink_all(const fattn_gpu_args &g)
{
    GPU_SHARED float sums[256];
    const gpu_workspace saved = gpu_workspace_of<W>(g);
    for (int64_t h = gpu_block(); h < g.problem.heads_q; h += gpu_blocks()) {
        gpu_sink_head<256>(
            g, saved.lse, saved.delta, h, sums,
            [&](const fattn_sequence &seq, int64_t b) { return gpu_lse_at(g.problem, seq, b, h); });
    }
}

/* --- Entries ---------------------------------------------------------------------------------- */

/* A kernel that first calls `besides`, and then visit() for every row. batch: packed, padded or
 * any. */
#define GPU_ROWS(name, width, batch, besides, visit)                                             \
    GPU_KERNEL(128, 1) name(const GPU_PARAM fattn_gpu_args g)                                    \
    {                                                                                            \
        besides(g);                                                                              \
        gpu_visit_##batch<width, 128>(g,                                                         \
                                      [&](const gpu_global_row &row) { visit<width>(g, row); }); \
    }

/* The kernels of a width; backward.c chooses among them by name. first and first_packed: what the
 * first of them does before the main kernel takes items, at least gpu_clear_taken; (void) if it
 * takes none. Packed batches have kernels of their own, because code for both kinds would slow the
 * other down. */
#define GPU_BACKWARD_ROWS(width, first, first_packed)                           \
    GPU_ROWS(rows_##width, width, padded, first, gpu_prepare_row)               \
    GPU_ROWS(packed_rows_##width, width, packed, first_packed, gpu_prepare_row) \
    GPU_ROWS(dq_##width, width, padded, (void), gpu_finish_row)                 \
    GPU_ROWS(packed_dq_##width, width, packed, (void), gpu_finish_row)          \
    GPU_KERNEL(256, 1) sink_##width(const GPU_PARAM fattn_gpu_args g) { gpu_sink_all<width>(g); }

/* The kernel that serves all widths. */
#define GPU_BACKWARD_CLEAR \
    GPU_KERNEL(256, 1) clear(const GPU_PARAM fattn_gpu_args g) { gpu_clear_dbias_rows(g); }

#endif
