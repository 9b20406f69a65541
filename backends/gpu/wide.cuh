/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The products of tile.cuh for a forward that is fast where a multiprocessor has registers for it:
 * a thread owns 8 x 8 elements, so that a multiply-add takes a quarter of a number from shared
 * memory, and not half of one. At half of one, shared memory takes as long as the arithmetic.
 *
 * A tile is 64 rows by two parts of 64 columns; of each part thread (ty, tx) owns rows ty * 8 + m
 * and columns tx * 4 + n. Steps take turns in shared memory as there. Weights do not fit it beside
 * them, and go along with the values: a step of gpu_wide_mix has 16 keys of both.
 */
#ifndef FATTN_GPU_WIDE_CUH
#define FATTN_GPU_WIDE_CUH

#include "backends/gpu/tile.cuh"

struct gpu_wide {
    enum { TM = 8, TY = 8, ROWS = 64, THREADS = 128, PARTS = 2, COLS = 128 };
    /* In memory: a tile is summed by itself, in registers, and looks for these once. */
    typedef volatile float total;
};

/* A line: 64 rows, or columns, of an inner index. */
enum { GPU_WIDE_LINES = gpu_wide::ROWS * GPU_CHANNELS };

/* A step is lines of rows, and after them those of both parts, or W values a key, W <= 128. */
template <> struct gpu_scratch<gpu_wide> {
    alignas(16) float step[2][3 * GPU_WIDE_LINES];
};
static_assert(sizeof(gpu_scratch<gpu_wide>) >= 64 * 64 * 4, "room for a part");

/* A step of N rows on its way, four channels of each that is the thread's. All rows exist. */
template <int N> struct gpu_wide_part {
    enum { EVERY = gpu_wide::THREADS * 4 / GPU_CHANNELS, OWN = N / EVERY };
    gpu_quad quad[OWN];
};

GPU_DEVICE int gpu_wide_row(void)
{
    return (int)((unsigned)gpu_thread_anew() / (GPU_CHANNELS / 4));
}
GPU_DEVICE int gpu_wide_channel(void)
{
    return (int)((unsigned)gpu_thread_anew() % (GPU_CHANNELS / 4) * 4);
}

/* PLAIN: rows of floats whose channels all exist and may be read four at a time. */
template <bool PLAIN> GPU_DEVICE gpu_quad gpu_wide_load(const gpu_tensor &t, int64_t at, int c)
{
    if constexpr (PLAIN) {
        const gpu_u4 four = *(const gpu_u4 *)((const float *)t.data + at + c);
        const gpu_quad quad = {{four.x, four.y, four.z, four.w}};
        return quad;
    } else {
        return gpu_fetch_quad(t, at, c);
    }
}

template <bool PLAIN>
GPU_DEVICE void gpu_wide_unpack(fattn_dtype dtype, const gpu_quad &quad, float x[4])
{
    gpu_unpack_quad(PLAIN ? FATTN_F32 : dtype, quad, x);
}

template <bool PLAIN, int N>
GPU_DEVICE void gpu_wide_fetch(gpu_wide_part<N> &part, const gpu_tensor &t, const int64_t *at,
                               int c0)
{
    const int row = gpu_wide_row(), c = c0 + gpu_wide_channel();
    GPU_UNROLL
    for (int own = 0; own < part.OWN; own++) {
        part.quad[own] = gpu_wide_load<PLAIN>(t, at[row + own * part.EVERY], c);
    }
}

template <bool PLAIN, int N>
GPU_DEVICE void gpu_wide_put(const gpu_wide_part<N> &part, fattn_dtype dtype, float *lines)
{
    const int row = gpu_wide_row(), c = gpu_wide_channel();
    GPU_UNROLL
    for (int own = 0; own < part.OWN; own++) {
        const int n = own * part.EVERY; /* parts follow one another */
        float x[4];
        gpu_wide_unpack<PLAIN>(dtype, part.quad[own], x);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            lines[n / 64 * GPU_WIDE_LINES + gpu_place<64>(c + e, row + n % 64)] = x[e];
        }
    }
}

/* x += a step. */
GPU_DEVICE void gpu_wide_dots_step(const float *lines, float x[2][8][4])
{
    const int tx = gpu_tx(), ty = gpu_ty();
    GPU_UNROLL
    for (int c = 0; c < GPU_CHANNELS; c++) {
        float a[8], b[2][4];
        gpu_pick<64, 8>(lines, c, ty * 8, a);
        gpu_pick<64, 4>(lines + GPU_WIDE_LINES, c, tx * 4, b[0]);
        gpu_pick<64, 4>(lines + 2 * GPU_WIDE_LINES, c, tx * 4, b[1]);
        GPU_UNROLL
        for (int m = 0; m < 8; m++) {
            GPU_UNROLL
            for (int n = 0; n < 8; n++) {
                x[n / 4][m][n % 4] = fmaf(a[m], b[n / 4][n % 4], x[n / 4][m][n % 4]);
            }
        }
    }
}

template <bool PLAIN>
GPU_DEVICE void gpu_wide_dots_of(gpu_scratch<gpu_wide> &s, const gpu_tensor &a, const int64_t *a_at,
                                 const gpu_tensor &b, const int64_t *b_at, float x[2][8][4])
{
    gpu_wide_part<gpu_wide::ROWS> a_part;
    gpu_wide_part<gpu_wide::COLS> b_part;
    int turn = 0;
#pragma unroll 1
    for (int c0 = -GPU_CHANNELS; c0 < a.dim; c0 += GPU_CHANNELS, turn ^= 1) {
        const bool more = c0 + GPU_CHANNELS < a.dim;
        if (more) {
            gpu_wide_fetch<PLAIN>(a_part, a, a_at, c0 + GPU_CHANNELS);
            gpu_wide_fetch<PLAIN>(b_part, b, b_at, c0 + GPU_CHANNELS);
        }
        if (c0 >= 0) {
            gpu_wide_dots_step(s.step[turn ^ 1], x);
        }
        if (more) {
            gpu_wide_put<PLAIN>(a_part, a.dtype, s.step[turn]);
            gpu_wide_put<PLAIN>(b_part, b.dtype, s.step[turn] + GPU_WIDE_LINES);
            gpu_sync();
        }
    }
}

/* gpu_dots. Which loads there are is asked once. */
GPU_DEVICE void gpu_wide_dots(gpu_scratch<gpu_wide> &s, const gpu_tensor &a, const int64_t *a_at,
                              const gpu_tensor &b, const int64_t *b_at, float x[2][8][4])
{
    gpu_sync();
    if (a.dtype == FATTN_F32 && a.quads && b.quads && a.dim % GPU_CHANNELS == 0) {
        gpu_wide_dots_of<true>(s, a, a_at, b, b_at, x);
    } else {
        gpu_wide_dots_of<false>(s, a, a_at, b, b_at, x);
    }
}

/* Writes the weights of keys 16 step .. 16 step + 15: of four threads of a row, one part of theirs.
 * Registers cannot be counted through. */
GPU_DEVICE void gpu_wide_put_weights(const float x[2][8][4], int step, float *lines)
{
    const int tx = gpu_tx(), ty = gpu_ty();
    if (tx / 4 != step % 4) {
        return;
    }
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        float column[8];
        GPU_UNROLL
        for (int m = 0; m < 8; m++) {
            const float first = x[0][m][n], second = x[1][m][n];
            column[m] = step < 4 ? first : second;
        }
        gpu_put<64, 8>(lines, tx % 4 * 4 + n, ty * 8, column);
    }
}

/* y += a step: weights of 16 keys, and W channels of their values. */
template <int W> GPU_DEVICE void gpu_wide_mix_step(const float *lines, float y[8][W / GPU_TX])
{
    const int ty = gpu_ty();
    const float *const values = lines + GPU_WIDE_LINES + gpu_channel(0);
    GPU_UNROLL
    for (int j = 0; j < GPU_CHANNELS; j++) {
        float weight[8];
        gpu_pick<64, 8>(lines, j, ty * 8, weight);
        GPU_UNROLL
        for (int u = 0; u < W / GPU_COLS; u++) {
            const gpu_f4 v = *(const gpu_f4 *)(values + j * W + u * GPU_COLS);
            GPU_UNROLL
            for (int m = 0; m < 8; m++) {
                y[m][u * 4] = fmaf(weight[m], v.x, y[m][u * 4]);
                y[m][u * 4 + 1] = fmaf(weight[m], v.y, y[m][u * 4 + 1]);
                y[m][u * 4 + 2] = fmaf(weight[m], v.z, y[m][u * 4 + 2]);
                y[m][u * 4 + 3] = fmaf(weight[m], v.w, y[m][u * 4 + 3]);
            }
        }
    }
}

template <bool PLAIN, int W>
GPU_DEVICE void gpu_wide_mix_of(gpu_scratch<gpu_wide> &s, const float x[2][8][4],
                                const gpu_tensor &t, const int64_t *at, int live,
                                float y[8][W / GPU_TX])
{
    enum { QUADS = W / 4, OWN = GPU_CHANNELS * QUADS / gpu_wide::THREADS };
    gpu_quad quad[OWN];
    int turn = 0;
#pragma unroll 1
    for (int j0 = -GPU_CHANNELS; j0 < live; j0 += GPU_CHANNELS, turn ^= 1) {
        const int next = j0 + GPU_CHANNELS;
        if (next < live) {
            const unsigned thread = (unsigned)gpu_thread_anew();
            GPU_UNROLL
            for (int own = 0; own < OWN; own++) {
                const unsigned n = own * gpu_wide::THREADS + thread;
                quad[own] = gpu_wide_load<PLAIN>(t, at[next + n / QUADS], (int)(n % QUADS * 4));
            }
        }
        if (j0 >= 0) {
            gpu_wide_mix_step<W>(s.step[turn ^ 1], y);
        }
        if (next < live) {
            float *const values = s.step[turn] + GPU_WIDE_LINES + gpu_thread_anew() * 4;
            gpu_wide_put_weights(x, next / GPU_CHANNELS, s.step[turn]);
            GPU_UNROLL
            for (int own = 0; own < OWN; own++) {
                float v[4];
                gpu_f4 four;
                gpu_wide_unpack<PLAIN>(t.dtype, quad[own], v);
                four.x = v[0], four.y = v[1], four.z = v[2], four.w = v[3];
                *(gpu_f4 *)(values + own * gpu_wide::THREADS * 4) = four;
            }
            gpu_sync();
        }
    }
}

/* gpu_mix from channel 0 on, with the weights in x: y[row][channel] += sum over the first `live`
 * columns of x[row][col] t[at[col]][channel]. */
template <int W>
GPU_DEVICE void gpu_wide_mix(gpu_scratch<gpu_wide> &s, const float x[2][8][4], const gpu_tensor &t,
                             const int64_t *at, int live, gpu_wide::total y[8][W / GPU_TX])
{
    float sum[8][W / GPU_TX] = {};
    gpu_sync();
    if (t.dtype == FATTN_F32 && t.quads && t.dim == W) {
        gpu_wide_mix_of<true, W>(s, x, t, at, live, sum);
    } else {
        gpu_wide_mix_of<false, W>(s, x, t, at, live, sum);
    }
    GPU_UNROLL
    for (int m = 0; m < 8; m++) {
        GPU_UNROLL
        for (int c = 0; c < W / GPU_TX; c++) {
            y[m][c] = y[m][c] + sum[m][c];
        }
    }
}

#endif
