/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of fattn_merge() (core/merge.h), fattn_dropout_mask() and copies of rows
 * (core/rows.h). All are memory-bound. */
#ifndef FATTN_GPU_VERBS_CUH
#define FATTN_GPU_VERBS_CUH

#include "backends/gpu/element.cuh"
#include "backends/gpu/merge.cuh"
#include "core/philox.h"
#include "core/rows.h"
#include "core/schedule.h"

/* Adjacent channels, loaded and stored as one vector. */
template <class T, int width>
struct alignas(sizeof(T) * width > 16 ? 16 : sizeof(T) * width) gpu_channels {
    T at[width];
};

/* Merges `width` channels, from o1 and o2 to element `to` of the result. */
template <int width>
GPU_DEVICE void gpu_merge_channels(const fattn_merge_job &job, const gpu_weights &w,
                                   const float *o1, const float *o2, int64_t to)
{
    typedef gpu_channels<float, width> wide;
    const wide x1 = *(const wide *)o1, x2 = *(const wide *)o2;
    wide sum;
    for (int c = 0; c < width; c++) {
        sum.at[c] = gpu_merged(w, x1.at[c], x2.at[c]);
    }
    if (job.dtype == FATTN_F32) {
        *(wide *)((float *)job.result.o + to) = sum;
        return;
    }
    gpu_channels<uint16_t, width> narrow;
    for (int c = 0; c < width; c++) {
        narrow.at[c] = gpu_narrow(job.dtype, sum.at[c]);
    }
    *(gpu_channels<uint16_t, width> *)((uint16_t *)job.result.o + to) = narrow;
}

/*
 * Merges row n of [batch][heads][seqlen]. Its channels are divided among a few adjacent threads,
 * `lane` being this one's number. The output may be one of the inputs: a thread reads each element
 * before it writes it, and lse is written after a barrier, when all threads have read it.
 */
template <int width> GPU_DEVICE void gpu_merge_row(const fattn_merge_job &job, int64_t n, int lane)
{
    enum { LANES = FATTN_GPU_VERB_THREADS / FATTN_GPU_MERGE_ROWS };
    const int64_t line = fattn_quotient(n, job.seqlen), i = n - line * job.seqlen;
    const int64_t b = fattn_quotient(line, job.heads), h = line - b * job.heads;
    const bool exists = b < job.batch;
    float lse1 = 0, lse2 = 0;
    if (exists) {
        lse1 = *fattn_state_lse(&job.first, b, h, i);
        lse2 = *fattn_state_lse(&job.second, b, h, i);
    }
    gpu_sync();
    if (!exists) {
        return;
    }
    const gpu_weights w = gpu_weights_of(lse1, lse2);
    const float *const o1 = (const float *)job.first.o + fattn_state_row(&job.first, b, h, i);
    const float *const o2 = (const float *)job.second.o + fattn_state_row(&job.second, b, h, i);
    const int64_t to = fattn_state_row(&job.result, b, h, i);
    for (int64_t c = (int64_t)lane * width; c < job.dim_v; c += LANES * width) {
        gpu_merge_channels<width>(job, w, o1 + c, o2 + c, to + c);
    }
    if (lane == 0) {
        *fattn_state_lse(&job.result, b, h, i) = w.lse;
    }
}

template <int width> GPU_DEVICE void gpu_merge_states(const fattn_merge_job &job)
{
    const int64_t rows = job.batch * job.heads * job.seqlen;
    const int lanes = FATTN_GPU_VERB_THREADS / FATTN_GPU_MERGE_ROWS, own = gpu_thread() / lanes;
    for (int64_t n = gpu_block() * FATTN_GPU_MERGE_ROWS; n < rows;
         n += gpu_blocks() * FATTN_GPU_MERGE_ROWS) {
        gpu_merge_row<width>(job, n + own, gpu_thread() % lanes);
    }
}

/* Writes row n of the dropout mask. A thread takes 16 keys at a time. */
GPU_DEVICE void gpu_dropout_row(const fattn_dropout_args &a, const fattn_dropout &dropout,
                                int64_t n)
{
    const int64_t i = n % a.seqlen_q, h = n / a.seqlen_q % a.heads, b = n / a.seqlen_q / a.heads;
    const int64_t begin = a.k_offset, end = begin + a.seqlen_k;
    const fattn_dropout_rows row = fattn_dropout_rows_at(
        a.q_offset, (uint32_t)i, (uint32_t)(a.batch_offset + b), (uint32_t)(a.head_offset + h));
    for (int64_t block = begin / 16 + gpu_thread(); block * 16 < end; block += gpu_threads()) {
        float z[16];
        fattn_dropout_block(&dropout, row, block * 16, z);
        for (int c = 0; c < 16; c++) {
            const int64_t j = block * 16 + c;
            if (begin <= j && j < end) {
                a.keep[n * a.seqlen_k + j - begin] = z[c] != 0;
            }
        }
    }
}

/* Copies `width` elements and converts them from From to To: float, or uint16_t for the bits of a
 * 16-bit type. Without a source it writes zeros. */
template <class To, class From, int width>
GPU_DEVICE void gpu_move(const fattn_rows_args &a, int64_t to, int64_t from)
{
    typedef gpu_channels<To, width> to_channels;
    typedef gpu_channels<From, width> from_channels;
    to_channels *const out = (to_channels *)((To *)a.to + to);
    to_channels x = {};
    if (a.from) {
        from_channels y = *(const from_channels *)((const From *)a.from + from);
        if constexpr (sizeof(From) == 4) {
            if (a.plus) {
                const from_channels z = *(const from_channels *)(a.plus + from);
                for (int c = 0; c < width; c++) {
                    y.at[c] += z.at[c];
                }
            }
        }
        for (int c = 0; c < width; c++) {
            if constexpr (sizeof(To) == 2 && sizeof(From) == 4) {
                x.at[c] = gpu_narrow(a.dtype_to, y.at[c]);
            } else {
                x.at[c] = (To)y.at[c];
            }
        }
    }
    *out = x;
}

/* Moves piece n of a job, `width` channels. */
template <int width> GPU_DEVICE void gpu_move_piece(const fattn_rows_args &a, int64_t n)
{
    const fattn_strides &t = a.to_stride, &f = a.from_stride;
    const int64_t pieces = a.channels / width, rows = a.batch * a.rows * a.heads;
    int64_t to = n * width, from = to;
    if (n >= rows * pieces) {
        return;
    }
    if (rows > 1 || a.to_rows || a.from_rows) {
        const int64_t row = fattn_quotient(n, pieces), c = (n - row * pieces) * width;
        const int64_t line = fattn_quotient(row, a.heads), h = row - line * a.heads;
        const int64_t b = fattn_quotient(line, a.rows), i = line - b * a.rows;
        const int64_t to_row = a.to_rows ? a.to_rows[i] : i;
        const int64_t from_row = a.from_rows ? a.from_rows[i] : i;
        to = b * t.batch + to_row * t.seq + h * t.head + c;
        from = b * f.batch + from_row * f.seq + h * f.head + c;
    }
    if (a.dtype_to == FATTN_F32) {
        gpu_move<float, float, width>(a, to, from);
    } else if (a.dtype_from == FATTN_F32) {
        gpu_move<uint16_t, float, width>(a, to, from);
    } else {
        gpu_move<uint16_t, uint16_t, width>(a, to, from);
    }
}

GPU_KERNEL(FATTN_GPU_VERB_THREADS, 1) rows(const GPU_PARAM fattn_rows_jobs g)
{
    for (int64_t block = gpu_block(); block < g.ends[g.count - 1]; block += gpu_blocks()) {
        int job = 0;
        int64_t first = 0; /* block of the job */
        for (; block >= g.ends[job]; job++) {
            first = g.ends[job];
        }
        const fattn_rows_args &a = g.jobs[job];
        const int64_t n = (block - first) * gpu_threads() + gpu_thread();
        switch (fattn_rows_width(&a)) {
        case 16: gpu_move_piece<16>(a, n); break;
        case 8: gpu_move_piece<8>(a, n); break;
        default: gpu_move_piece<1>(a, n);
        }
    }
}

GPU_KERNEL(FATTN_GPU_VERB_THREADS, 1) merge(const GPU_PARAM fattn_merge_job job)
{
    if (fattn_merge_by_fours(&job)) {
        gpu_merge_states<4>(job);
    } else {
        gpu_merge_states<1>(job);
    }
}

GPU_KERNEL(FATTN_GPU_VERB_THREADS, 1) dropout_mask(const GPU_PARAM fattn_gpu_dropout_args g)
{
    const fattn_dropout_args &a = g.args;
    const fattn_dropout dropout = fattn_dropout_make(g.threshold, a.seed, a.offset);
    const int64_t rows = a.batch * a.heads * a.seqlen_q;
    for (int64_t n = gpu_block(); n < rows; n += gpu_blocks()) {
        gpu_dropout_row(a, dropout, n);
    }
}

#endif
