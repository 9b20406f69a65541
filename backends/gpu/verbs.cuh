/* SPDX-License-Identifier: Apache-2.0 */
/* fattn_merge() and fattn_dropout_mask() on a GPU, a block a row, and rows that move (core/rows.h),
 * some channels a thread; bound by memory. */
#ifndef FATTN_GPU_VERBS_CUH
#define FATTN_GPU_VERBS_CUH

#include "backends/gpu/args.h"
#include "core/philox.h"
#include "core/rows.h"

/* Weight of a state relative to the larger lse: exactly 1 for the larger, 0 for an empty one. */
GPU_DEVICE float gpu_merge_weight(float lse, float largest)
{
    return lse == -fattn_f32_infinity() ? 0 : exp2f((lse - largest) * (float)FATTN_LOG2E);
}

/* Row n of (batch, head, row). The output may be one of the inputs: a thread reads each element
 * that it writes before, and lse is written when all have read it. */
GPU_DEVICE void gpu_merge_row(const fattn_merge_args &a, int64_t n)
{
    const float empty = -fattn_f32_infinity();
    const int64_t i = n % a.seqlen, h = n / a.seqlen % a.heads, b = n / a.seqlen / a.heads;
    const fattn_strides &s1 = a.o1_stride, &s2 = a.o2_stride, &s = a.o_stride;
    const float *const o1 = a.o1 + b * s1.batch + i * s1.seq + h * s1.head;
    const float *const o2 = a.o2 + b * s2.batch + i * s2.seq + h * s2.head;
    float *const o = a.o + b * s.batch + i * s.seq + h * s.head;
    const float lse1 = a.lse1[n], lse2 = a.lse2[n];
    const float largest = lse1 > lse2 ? lse1 : lse2; /* a NaN comes back through its weight */
    const float w1 = gpu_merge_weight(lse1, largest), w2 = gpu_merge_weight(lse2, largest);
    gpu_sync();
    for (int64_t c = gpu_thread(); c < a.dim_v; c += gpu_threads()) {
        o[c] = lse1 == empty && lse2 == empty ? 0
               : lse1 == empty                ? o2[c]
               : lse2 == empty                ? o1[c]
                                              : (w1 * o1[c] + w2 * o2[c]) / (w1 + w2);
    }
    if (gpu_thread() == 0) {
        a.lse[n] = lse1 == empty   ? lse2
                   : lse2 == empty ? lse1
                                   : largest + log2f(w1 + w2) * 0.693147180559945309417f;
    }
}

/* Row n of the pattern, 16 keys a thread at a time. */
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

/* Channels that lie side by side, loaded and stored as a whole. */
template <class T, int width>
struct alignas(sizeof(T) * width > 16 ? 16 : sizeof(T) * width) gpu_channels {
    T at[width];
};

/* Elements to and from, of 32 bits or the bits of a 16-bit type. */
template <class To, class From, int width>
GPU_DEVICE void gpu_move(const fattn_rows_args &a, int64_t to, int64_t from)
{
    typedef gpu_channels<To, width> to_channels;
    typedef gpu_channels<From, width> from_channels;
    to_channels *const out = (to_channels *)((To *)a.to + to);
    to_channels x = {};
    if (a.from) {
        const from_channels y = *(const from_channels *)((const From *)a.from + from);
        if (a.add) {
            x = *out;
        }
        for (int c = 0; c < width; c++) {
            if constexpr (sizeof(To) == 2 && sizeof(From) == 4) {
                x.at[c] = a.dtype_to == FATTN_F16 ? fattn_f16_from_f32(y.at[c])
                                                  : fattn_bf16_from_f32(y.at[c]);
            } else {
                x.at[c] = (To)(a.add ? x.at[c] + y.at[c] : y.at[c]);
            }
        }
    }
    *out = x;
}

template <int width> GPU_DEVICE void gpu_move_rows(const fattn_rows_args &a)
{
    const fattn_strides &t = a.to_stride, &f = a.from_stride;
    const int64_t pieces = a.channels / width;
    const int64_t count = a.batch * a.rows * a.heads * pieces;
    for (int64_t n = (int64_t)gpu_block() * gpu_threads() + gpu_thread(); n < count;
         n += (int64_t)gpu_blocks() * gpu_threads()) {
        const int64_t c = n % pieces * width, row = n / pieces;
        const int64_t h = row % a.heads, i = row / a.heads % a.rows, b = row / a.heads / a.rows;
        const int64_t to = b * t.batch + i * t.seq + h * t.head + c;
        const int64_t from = b * f.batch + i * f.seq + h * f.head + c;
        if (a.dtype_to == FATTN_F32) {
            gpu_move<float, float, width>(a, to, from);
        } else if (a.dtype_from == FATTN_F32) {
            gpu_move<uint16_t, float, width>(a, to, from);
        } else {
            gpu_move<uint16_t, uint16_t, width>(a, to, from);
        }
    }
}

GPU_KERNEL(128, 1) rows(const GPU_PARAM fattn_rows_args a)
{
    if (fattn_rows_by_eights(&a)) {
        gpu_move_rows<8>(a);
    } else {
        gpu_move_rows<1>(a);
    }
}

GPU_KERNEL(128, 1) merge(const GPU_PARAM fattn_merge_args a)
{
    const int64_t rows = a.batch * a.heads * a.seqlen;
    for (int64_t n = gpu_block(); n < rows; n += gpu_blocks()) {
        gpu_merge_row(a, n);
    }
}

GPU_KERNEL(128, 1) dropout_mask(const GPU_PARAM fattn_gpu_dropout_args g)
{
    const fattn_dropout_args &a = g.args;
    const fattn_dropout dropout = fattn_dropout_make(g.threshold, a.seed, a.offset);
    const int64_t rows = a.batch * a.heads * a.seqlen_q;
    for (int64_t n = gpu_block(); n < rows; n += gpu_blocks()) {
        gpu_dropout_row(a, dropout, n);
    }
}

#endif
