/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the rows and keys of a sequence are in memory. Lengths, tables and positions are in device
 * memory, where the host cannot check them. Values out of range are clamped, so that a wrong table
 * gives wrong results but never an access outside the caller's tensors. A deterministic backward
 * whose table is not in order may also not end: Hopper's blocks wait for turns that nobody clears.
 */
#ifndef FATTN_GPU_SEQUENCE_CUH
#define FATTN_GPU_SEQUENCE_CUH

#include "backends/gpu/args.h"
#include "backends/gpu/packed.h"
#include "core/band.h"
#include "core/philox.h"
#include "core/problem.h"

GPU_DEVICE int64_t gpu_clamp(int64_t x, int64_t low, int64_t high)
{
    return fattn_max64(low, fattn_min64(x, high));
}

/* The number of rows of sequence b in a packed tensor of `total` rows, at most `longest`; *first is
 * its first row. */
GPU_DEVICE int64_t gpu_packed(const int32_t *cu, int64_t b, int64_t total, int64_t longest,
                              int64_t *first)
{
    *first = gpu_clamp(cu[b], 0, total);
    return gpu_clamp(cu[b + 1], *first, fattn_min64(total, *first + longest)) - *first;
}

/* The last of `batch` packed sequences that begins at `place` or before it; begin(b): where
 * sequence b begins. */
template <class Begin>
GPU_DEVICE int64_t gpu_last_begun(int64_t batch, int64_t place, const Begin &begin)
{
    int64_t first = 0, past = batch;
    while (past - first > 1) {
        const int64_t middle = (first + past) / 2;
        if (begin(middle) <= place) {
            first = middle;
        } else {
            past = middle;
        }
    }
    return first;
}

/* A tile of a packed batch (packed.h): its sequence, and which of its tiles it is. */
typedef struct gpu_packed_tile {
    int64_t b, block;
} gpu_packed_tile;

/* Tile `number` of `total` packed rows. A block that would be below 0, because the table is not in
 * order, does not exist. */
GPU_DEVICE gpu_packed_tile gpu_packed_tile_of(const int32_t *cu, int64_t batch, int64_t total,
                                              int64_t size, int64_t number)
{
    const auto begin = [&](int64_t b) { return gpu_clamp(cu[b], 0, total) / size + b; };
    gpu_packed_tile tile;
    tile.b = gpu_last_begun(batch, number, begin);
    tile.block = number - begin(tile.b);
    tile.block = tile.block < 0 ? INT32_MAX : tile.block;
    return tile;
}

/* A position or a whole length: values[b] if there is an array, or else `value`. */
GPU_DEVICE int64_t gpu_position(const int64_t *values, int64_t value, int64_t b, int64_t low)
{
    return gpu_clamp(values ? values[b] : value, low, INT64_C(1) << 40);
}

/* Whether lengths or positions are read from memory. If not, all sequences are alike. */
GPU_DEVICE bool gpu_sequences_differ(const fattn_problem &p)
{
    return p.features & (FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K | FATTN_SEQUSED_Q |
                         FATTN_SEQUSED_K | FATTN_PAGED | FATTN_POSITIONS);
}

/* fattn_sequence_of() for unchecked lengths and positions. */
GPU_DEVICE fattn_sequence gpu_sequence(const fattn_gpu_args &g, int64_t b)
{
    const fattn_problem &p = g.problem;
    const fattn_buffers &buf = g.buffers;
    if (!gpu_sequences_differ(p)) {
        fattn_sequence same;
        same.q_row = same.k_row = same.q_position = same.k_position = 0;
        same.q_batch = same.k_batch = b;
        same.sq = p.seqlen_q;
        same.sk = same.slot_k = p.seqlen_k;
        same.diagonal = p.anchor == FATTN_BOTTOM_RIGHT ? p.seqlen_k - p.seqlen_q : 0;
        return same;
    }
    const bool paged = p.features & FATTN_PAGED;
    fattn_sequence s;
    int64_t own_q = p.seqlen_q, own_k = p.seqlen_k, whole_q = -1, whole_k = -1;

    s.q_row = s.k_row = 0;
    s.q_batch = s.k_batch = b;
    if (p.features & FATTN_CU_SEQLENS_Q) {
        own_q = gpu_packed(buf.cu_seqlens_q, b, p.total_q, p.seqlen_q, &s.q_row);
        s.q_batch = 0;
    }
    if (p.features & FATTN_CU_SEQLENS_K) {
        own_k =
            gpu_packed(buf.cu_seqlens_k, b, paged ? INT32_MAX : p.total_k, p.seqlen_k, &s.k_row);
        s.k_batch = 0;
        if (paged) {
            s.k_row = 0;
        }
    }
    if (paged && p.num_pages == 0) {
        own_k = 0;
    }
    s.sq = p.features & FATTN_SEQUSED_Q ? gpu_clamp(buf.seqused_q[b], 0, own_q) : own_q;
    s.sk = p.features & FATTN_SEQUSED_K ? gpu_clamp(buf.seqused_k[b], 0, own_k) : own_k;
    s.slot_k = own_k;

    s.q_position = s.k_position = 0;
    if (p.features & FATTN_POSITIONS) {
        const int64_t low = -(INT64_C(1) << 40);
        s.q_position = gpu_position(buf.q_offsets, buf.q_offset, b, low);
        s.k_position = gpu_position(buf.k_offsets, buf.k_offset, b, low);
        whole_q = gpu_position(buf.wholes_q, buf.whole_q, b, -1);
        whole_k = gpu_position(buf.wholes_k, buf.whole_k, b, -1);
    }
    s.diagonal = s.q_position - s.k_position;
    if (p.anchor == FATTN_BOTTOM_RIGHT) {
        s.diagonal += (whole_k < 0 ? s.sk : whole_k) - (whole_q < 0 ? s.sq : whole_q);
    }
    return s;
}

/* Index of the element of q, o, dq or dO at which row i of query head h begins. */
GPU_DEVICE int64_t gpu_query_at(const fattn_sequence &s, const fattn_strides &stride, int64_t i,
                                int64_t h)
{
    return s.q_batch * stride.batch + (s.q_row + i) * stride.seq + h * stride.head;
}

/* Index of the element of k, v, dk or dv at which key j of key/value head hk of sequence b begins.
 * Keys are below 2^31, so that the divisions can be of 32 bits, which are cheap. */
GPU_DEVICE int64_t gpu_key_at(const fattn_gpu_args &g, const fattn_sequence &s,
                              const fattn_strides &stride, int64_t b, int64_t hk, int64_t j)
{
    const fattn_problem &p = g.problem;
    if (p.features & FATTN_PAGED) {
        const uint32_t key = (uint32_t)j, size = (uint32_t)p.page_size;
        const int32_t entry = g.buffers.block_table[b * p.block_table_stride + key / size];
        return gpu_clamp(entry, 0, p.num_pages - 1) * stride.batch + key % size * stride.seq +
               hk * stride.head;
    }
    return s.k_batch * stride.batch + (s.k_row + j) * stride.seq + hk * stride.head;
}

/* Index in lse, dlse and delta of row 0 of query head h of sequence b. */
GPU_DEVICE int64_t gpu_lse_at(const fattn_problem &p, const fattn_sequence &s, int64_t b, int64_t h)
{
    return (p.features & FATTN_CU_SEQLENS_Q ? h : b * p.heads_q + h) * p.total_q + s.q_row;
}

GPU_DEVICE fattn_dropout gpu_dropout(const fattn_gpu_args &g)
{
    const fattn_buffers &buf = g.buffers;
    return fattn_dropout_make(g.dropout_threshold, buf.seed_ptr ? *buf.seed_ptr : buf.seed,
                              buf.offset_ptr ? *buf.offset_ptr : buf.offset);
}

#endif
