/* SPDX-License-Identifier: Apache-2.0 */
/* How dK and dV of an item leave a warpgroup in backward on Hopper (wgmma_backward.cuh): it stores
 * them, or hands them over. */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_STORE_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_STORE_CUH

#include "backends/cuda/wgmma_backward_block.cuh"

/* Transposes 4 x 4 words of a quad of lanes: x[k] of lane q becomes x[q] of lane k. */
GPU_DEVICE void wgmma_transpose_quad(uint32_t x[4])
{
    const bool odd = gpu_thread() & 1, high = gpu_thread() & 2;
    GPU_UNROLL
    for (int n = 0; n < 4; n += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[n] : x[n + 1], 1);
        x[n] = odd ? other : x[n];
        x[n + 1] = odd ? x[n + 1] : other;
    }
    GPU_UNROLL
    for (int n = 0; n < 2; n++) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[n] : x[n + 2], 2);
        x[n] = high ? other : x[n];
        x[n + 2] = high ? x[n + 2] : other;
    }
}

/* Stores a row of 16-bit elements with W channels, of which `dim` exist. The row's quad stores 32
 * channels at a time, eight per lane. to: the row; chunks: it begins at a multiple of 16 bytes; h:
 * which of the thread's two rows. */
template <class T, int W>
GPU_DEVICE void wgmma_store_row(uint16_t *to, int dim, bool chunks, bool exists, float factor,
                                bool empty, int h, const float sums[W / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < W / 32; n++) {
        uint32_t x[4];
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            const float *const pair = sums[4 * n + k] + 2 * h;
            x[k] = empty ? 0 : T::pack(pair[0] * factor, pair[1] * factor);
        }
        wgmma_transpose_quad(x);
        const int c = 32 * n + gpu_thread() % 4 * 8, live = dim - c;
        if (exists) {
            gpu_store_eight(to + c, {x[0], x[1], x[2], x[3]}, live, chunks && live >= 8);
        }
    }
}

/* Load and store two adjacent floats of a row, of which the first `live` exist. pairs: they are
 * aligned to 8 bytes, and either both or none exist. */
GPU_DEVICE gpu_f2 wgmma_get_floats(const float *from, int live, bool pairs)
{
    gpu_f2 two = {0, 0};
    if (pairs && live > 0) {
        two = *(const gpu_f2 *)from;
    } else {
        two.x = live > 0 ? from[0] : 0;
        two.y = live > 1 ? from[1] : 0;
    }
    return two;
}

GPU_DEVICE void wgmma_put_floats(float *to, int live, bool pairs, gpu_f2 two)
{
    if (pairs && live > 0) {
        *(gpu_f2 *)to = two;
    } else if (live > 0) {
        to[0] = two.x;
        if (live > 1) {
            to[1] = two.y;
        }
    }
}

/* wgmma_store_row() in floats, which it may add to. It issues 16 loads before the first store. */
template <int W>
GPU_DEVICE void wgmma_store_row_floats(float *to, int dim, bool pairs, float factor, bool empty,
                                       bool adds, int h, const float sums[W / 8][4])
{
    enum { READS = 8 };
    static_assert(W % (8 * READS) == 0, "rounds of reads are full");
    const int own = gpu_thread() % 4 * 2;
    GPU_UNROLL
    for (int m = 0; m < W / 8; m += READS) {
        gpu_f2 there[READS];
        GPU_UNROLL
        for (int k = 0; k < READS; k++) {
            const int c = 8 * (m + k) + own;
            there[k] = wgmma_get_floats(to + c, adds ? dim - c : 0, pairs);
        }
        GPU_UNROLL
        for (int k = 0; k < READS; k++) {
            const int c = 8 * (m + k) + own;
            const float *const sum = sums[m + k] + 2 * h;
            gpu_f2 two;
            two.x = empty ? 0 : sum[0] * factor;
            two.y = empty ? 0 : sum[1] * factor;
            two.x = adds ? there[k].x + two.x : two.x;
            two.y = adds ? there[k].y + two.y : two.y;
            wgmma_put_floats(to + c, dim - c, pairs, two);
        }
    }
}

/* Stores rows of a gradient for the tile's keys. at: the element of the first key. */
template <class S>
GPU_DEVICE void wgmma_store_keys(const fattn_gpu_args &g, const wgmma_backward_item &w, int group,
                                 void *to, int64_t at, int64_t stride, int dim, bool chunks,
                                 float factor, const float sums[S::OWN_CHANNELS / 8][4])
{
    enum { N = S::OWN_CHANNELS };
    const int first_key = S::IS_PAIR ? 0 : 64 * group, channel = S::IS_PAIR ? N * group : 0;
    GPU_UNROLL
    for (int h = 0; h < 2; h++) {
        const int key = first_key + wgmma_row(wgmma_thread(), 2 * h);
        const bool exists = key < w.owned, empty = key >= w.keys;
        const int64_t row = at + key * stride + channel;
        if (g.dtype_gradient != FATTN_F32) {
            wgmma_store_row<typename S::type, N>((uint16_t *)to + row, dim - channel, chunks,
                                                 exists, factor, empty, h, sums);
        } else if (exists) {
            const bool pairs = chunks && dim % 2 == 0;
            wgmma_store_row_floats<N>((float *)to + row, dim - channel, pairs, factor, empty,
                                      g.problem.features & FATTN_ACCUMULATE, h, sums);
        }
    }
}

/* What dV is multiplied by at the end: weights times Z might overflow. */
template <class S>
GPU_DEVICE float wgmma_dv_factor(const fattn_gpu_args &g, const wgmma_backward_block<S> &b)
{
    if constexpr (S::IS_LEAN) {
        return 1;
    } else {
        return mma_has<S>(g, FATTN_DROPOUT) ? b.control->dropout.multiplier : 1;
    }
}

/* Stores dK and dV of an item. */
template <class S>
GPU_DEVICE void wgmma_store_item(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                 const wgmma_backward_item &w, int group,
                                 const float dk[S::OWN_CHANNELS / 8][4],
                                 const float dv[S::OWN_CHANNELS / 8][4])
{
    const fattn_problem &p = g.problem;
    if (p.outputs & FATTN_OUT_DV) {
        wgmma_store_keys<S>(g, w, group, g.buffers.dv, w.dv, p.dv.seq, (int)p.dim_v,
                            g.chunks & FATTN_GPU_QUADS_DV, wgmma_dv_factor<S>(g, b), dv);
    }
    if (p.outputs & FATTN_OUT_DK) {
        wgmma_store_keys<S>(g, w, group, g.buffers.dk, w.dk, p.dk.seq, (int)p.dim,
                            g.chunks & FATTN_GPU_QUADS_DK, g.rule.scale, dk);
    }
}

/* --- Handed over ------------------------------------------------------------------------------ */

/* Puts a warpgroup's sums of 64 keys, of which `keys` exist, to shared memory: rounded, as a tile
 * [key][channel]. */
template <class S>
GPU_DEVICE void wgmma_put_rounded(uint32_t to, float factor, int keys,
                                  const float sums[S::OWN_CHANNELS / 8][4])
{
    const int lane = mma_lane(), warp = wgmma_thread() / 32, own = wgmma_row(wgmma_thread(), 0);
    const uint32_t row = (uint32_t)(16 * warp + lane % 16), channel = (uint32_t)(lane / 16 * 8);
    const bool exists[2] = {own < keys, own + 8 < keys}; /* else 0, whatever the sum */
    const uint32_t at = to + wgmma_offset(64, row, channel);
    GPU_UNROLL
    for (int n = 0; n < S::OWN_CHANNELS / 8; n += 2) {
        uint32_t four[4];
        GPU_UNROLL
        for (int k = 0; k < 4; k++) {
            const float *const pair = sums[n + k / 2] + k % 2 * 2;
            four[k] = exists[k % 2] ? S::type::pack(pair[0] * factor, pair[1] * factor) : 0;
        }
        wgmma_put_matrices((at ^ n % 8 * 16) + n / 8 * 64 * 128, four);
    }
}

/* Hands dK and dV of an item to the warpgroup's adder, in the place of its dQ in shared memory:
 * both at once, or one after the other. */
template <class S>
GPU_DEVICE void wgmma_hand_over(const fattn_gpu_args &g, const wgmma_backward_block<S> &b,
                                const wgmma_backward_item &w, int group,
                                const float dk[S::OWN_CHANNELS / 8][4],
                                const float dv[S::OWN_CHANNELS / 8][4])
{
    const uint32_t to = b.dq + group * S::DQ_ROOM;
    const int keys = w.keys - 64 * group;
    GPU_UNROLL
    for (int step = 0; step < S::HAND_STEPS; step++) {
        wgmma_named_sync(WGMMA_DQ_ADDED + group, WGMMA_WITH_ADDER);
        if (step == 0) {
            wgmma_put_rounded<S>(to, wgmma_dv_factor<S>(g, b), keys, dv);
        }
        if (step == S::HAND_STEPS - 1) {
            wgmma_put_rounded<S>(to + S::DK_HANDED, g.rule.scale, keys, dk);
        }
        wgmma_publish();
        wgmma_named_arrive(WGMMA_DQ_MADE + group, WGMMA_WITH_ADDER);
    }
}

#endif
