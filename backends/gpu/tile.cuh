/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products of tiles by plain multiply-adds, for the SIMT kernels.
 *
 * A tile is ROWS x COLS; its threads form a grid of TY rows by TX = 16 columns, and thread (ty, tx)
 * owns the elements of rows ty * TM + m and columns tx * 4 + n, in registers. Two products are all
 * that attention needs:
 *
 *     gpu_dots   x[row][col] += sum over channels of a[row] b[col]            Q K^T, dO V^T, ...
 *     gpu_mix    y[row][c]   += sum over cols of weight[col][row] t[col][c]   P V, dS K, ...
 *
 * Both split the summed index into steps that fit shared memory, where operands are floats and the
 * summed index comes first. Steps are double-buffered: one is loaded from memory while the one
 * before is used, with one barrier per step. A thread reads four rows at a time. The row index is
 * swizzled, that is, xor'ed with bits of the summed index, so that writing four channels of a row,
 * which go to four lines, has no bank conflicts. Shared memory does not grow with the head
 * dimension: queries too are read again for every tile, from the cache, which costs 1/TX of the
 * time of the products.
 */
#ifndef FATTN_GPU_TILE_CUH
#define FATTN_GPU_TILE_CUH

#include "backends/gpu/element.cuh"

enum {
    GPU_TX = 16,
    GPU_TN = 4,
    GPU_COLS = GPU_TX * GPU_TN,
    GPU_CHANNELS = 16,    /* channels in a step of gpu_dots */
    GPU_MIX_FLOATS = 2048 /* floats in a step of gpu_mix */
};

/* Column and row of a thread. Threads 2 n and 2 n + 1 share a column, and threads two apart share a
 * row: shared memory serves 16-byte reads in half the passes if such threads read one address. */
GPU_DEVICE int gpu_tx(void) { return gpu_thread_anew() % (2 * GPU_TX) / 2; }
GPU_DEVICE int gpu_ty(void)
{
    const int thread = gpu_thread_anew();
    return thread / (2 * GPU_TX) * 2 + thread % 2;
}

template <int tm, int ty> struct gpu_shape {
    enum { TM = tm, TY = ty, ROWS = tm * ty, THREADS = GPU_TX * ty };
};

/* Shared memory of the products. Kernels add their own. */
template <class S> struct gpu_scratch {
    enum {
        DOT_FLOATS = (S::ROWS + GPU_COLS) * GPU_CHANNELS,
        STEP_FLOATS = DOT_FLOATS > GPU_MIX_FLOATS ? DOT_FLOATS : GPU_MIX_FLOATS
    };
    alignas(16) float step[2][STEP_FLOATS];        /* double-buffered */
    alignas(16) float weights[GPU_COLS * S::ROWS]; /* [col][row], placed by gpu_place */
};

/* Swizzled index of `row` in line `inner` of an array of lines of ROWS floats. Four rows from a
 * multiple of 4 on stay adjacent. */
template <int ROWS> GPU_DEVICE int gpu_place(int inner, int row)
{
    const int swizzle = (inner & 12) * 2 | (inner & 16) / 4;
    return inner * ROWS + (row ^ (swizzle & (ROWS - 4)));
}

/* x = rows row .. row + N - 1 of line inner. N is 1, 2 or a multiple of 4, and row a multiple of
 * N. */
template <int ROWS, int N>
GPU_DEVICE void gpu_pick(const float *lines, int inner, int row, float *x)
{
    if constexpr (N >= 4) {
        GPU_UNROLL
        for (int n = 0; n < N; n += 4) {
            const gpu_f4 four = *(const gpu_f4 *)(lines + gpu_place<ROWS>(inner, row + n));
            x[n] = four.x, x[n + 1] = four.y, x[n + 2] = four.z, x[n + 3] = four.w;
        }
    } else if constexpr (N == 2) {
        const gpu_f2 two = *(const gpu_f2 *)(lines + gpu_place<ROWS>(inner, row));
        x[0] = two.x, x[1] = two.y;
    } else {
        x[0] = lines[gpu_place<ROWS>(inner, row)];
    }
}

/* The inverse. */
template <int ROWS, int N> GPU_DEVICE void gpu_put(float *lines, int inner, int row, const float *x)
{
    if constexpr (N >= 4) {
        GPU_UNROLL
        for (int n = 0; n < N; n += 4) {
            gpu_f4 four;
            four.x = x[n], four.y = x[n + 1], four.z = x[n + 2], four.w = x[n + 3];
            *(gpu_f4 *)(lines + gpu_place<ROWS>(inner, row + n)) = four;
        }
    } else {
        GPU_UNROLL
        for (int n = 0; n < N; n++) {
            lines[gpu_place<ROWS>(inner, row + n)] = x[n];
        }
    }
}

/* Writes the thread's own elements, weights[col][row]. */
template <class S> GPU_DEVICE void gpu_put_tile(float *weights, const float x[S::TM][GPU_TN])
{
    const int tx = gpu_tx(), ty = gpu_ty();
    GPU_UNROLL
    for (int n = 0; n < GPU_TN; n++) {
        float column[S::TM];
        GPU_UNROLL
        for (int m = 0; m < S::TM; m++) {
            column[m] = x[m][n];
        }
        gpu_put<S::ROWS, S::TM>(weights, tx * GPU_TN + n, ty * S::TM, column);
    }
}

/* The inverse. */
template <class S> GPU_DEVICE void gpu_get_tile(const float *weights, float x[S::TM][GPU_TN])
{
    const int tx = gpu_tx(), ty = gpu_ty();
    GPU_UNROLL
    for (int n = 0; n < GPU_TN; n++) {
        float column[S::TM];
        gpu_pick<S::ROWS, S::TM>(weights, tx * GPU_TN + n, ty * S::TM, column);
        GPU_UNROLL
        for (int m = 0; m < S::TM; m++) {
            x[m][n] = column[m];
        }
    }
}

/* A thread's registers for a step of gpu_dots between its load (gpu_dots_fetch: channels c0 .. of
 * rows at[row]) and its store to shared memory (gpu_dots_put: lines[c][row]). */
template <int ROWS, int THREADS> struct gpu_dots_part {
    enum { QUADS = ROWS * GPU_CHANNELS / 4, PIECES = (QUADS + THREADS - 1) / THREADS };
    gpu_quad quad[PIECES];
};

template <int ROWS, int THREADS, class Tensor>
GPU_DEVICE void gpu_dots_fetch(gpu_dots_part<ROWS, THREADS> &part, const Tensor &t,
                               const int64_t *at, int c0)
{
    const int thread = gpu_thread_anew();
    GPU_UNROLL
    for (int piece = 0; piece < part.PIECES; piece++) {
        const int n = piece * THREADS + thread, row = n / (GPU_CHANNELS / 4);
        if (part.QUADS % THREADS == 0 || row < ROWS) {
            part.quad[piece] = gpu_fetch_quad(t, at[row], c0 + n % (GPU_CHANNELS / 4) * 4);
        }
    }
}

template <int ROWS, int THREADS, class Tensor>
GPU_DEVICE void gpu_dots_put(const gpu_dots_part<ROWS, THREADS> &part, const Tensor &t,
                             float *lines)
{
    const int thread = gpu_thread_anew();
    GPU_UNROLL
    for (int piece = 0; piece < part.PIECES; piece++) {
        const int n = piece * THREADS + thread, row = n / (GPU_CHANNELS / 4);
        if (part.QUADS % THREADS == 0 || row < ROWS) {
            float x[4];
            gpu_unpack_quad(t, part.quad[piece], x);
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                lines[gpu_place<ROWS>(n % (GPU_CHANNELS / 4) * 4 + e, row)] = x[e];
            }
        }
    }
}

/* x += the products of one step, whose lines of b follow its lines of a. The step is summed by
 * itself first, as in gpu_mix_step. */
template <class S> GPU_DEVICE void gpu_dots_step(const float *lines, float x[S::TM][GPU_TN])
{
    const int tx = gpu_tx(), ty = gpu_ty();
    float sum[S::TM][GPU_TN] = {};
    GPU_UNROLL
    for (int c = 0; c < GPU_CHANNELS; c++) {
        float ax[S::TM], bx[GPU_TN];
        gpu_pick<S::ROWS, S::TM>(lines, c, ty * S::TM, ax);
        gpu_pick<GPU_COLS, GPU_TN>(lines + S::ROWS * GPU_CHANNELS, c, tx * GPU_TN, bx);
        GPU_UNROLL
        for (int m = 0; m < S::TM; m++) {
            GPU_UNROLL
            for (int n = 0; n < GPU_TN; n++) {
                sum[m][n] = fmaf(ax[m], bx[n], sum[m][n]);
            }
        }
    }
    GPU_UNROLL
    for (int m = 0; m < S::TM; m++) {
        GPU_UNROLL
        for (int n = 0; n < GPU_TN; n++) {
            x[m][n] += sum[m][n];
        }
    }
}

/* x[row][col] += a[row] . b[col], over all channels. a_at [ROWS] and b_at [COLS]: the elements at
 * which rows begin. Each thread has finished with s.step before it comes here; the barrier at the
 * start waits for the others, and also makes a_at and b_at visible. B: gpu_tensor or gpu_cache. */
template <class S, class B>
GPU_DEVICE void gpu_dots(gpu_scratch<S> &s, const gpu_tensor &a, const int64_t *a_at, const B &b,
                         const int64_t *b_at, float x[S::TM][GPU_TN])
{
    gpu_dots_part<S::ROWS, S::THREADS> a_part;
    gpu_dots_part<GPU_COLS, S::THREADS> b_part;
    int stage = 0;
    gpu_sync();
    GPU_ROLLED
    for (int c0 = -GPU_CHANNELS; c0 < a.dim; c0 += GPU_CHANNELS, stage ^= 1) {
        const bool more = c0 + GPU_CHANNELS < a.dim;
        if (more) {
            gpu_dots_fetch(a_part, a, a_at, c0 + GPU_CHANNELS);
            gpu_dots_fetch(b_part, b, b_at, c0 + GPU_CHANNELS);
        }
        if (c0 >= 0) {
            gpu_dots_step<S>(s.step[stage ^ 1], x);
        }
        if (more) {
            gpu_dots_put(a_part, a, s.step[stage]);
            gpu_dots_put(b_part, b, s.step[stage] + S::ROWS * GPU_CHANNELS);
            gpu_sync();
        }
    }
}

/* A thread owns channels c0 + gpu_channel(u) + 0 .. 3 of a slab of W, for u < W / 64. */
GPU_DEVICE int gpu_channel(int u) { return u * GPU_COLS + gpu_tx() * 4; }

/* y += the sum of a step's rows of W channels, weighted by lines j0 .. of weights. A step is summed
 * by itself first, so that rounding errors grow with the number of steps and not with that of
 * rows. */
template <class S, int W>
GPU_DEVICE void gpu_mix_step(const float *rows, const float *weights, int j0,
                             float y[S::TM][W / GPU_TX])
{
    const int ty = gpu_ty(), first = gpu_channel(0);
    GPU_UNROLL
    for (int u = 0; u < W / GPU_COLS; u++) {
        float sum[S::TM][4] = {};
        GPU_UNROLL
        for (int j = 0; j < GPU_MIX_FLOATS / W; j++) {
            float weight[S::TM];
            gpu_pick<S::ROWS, S::TM>(weights, j0 + j, ty * S::TM, weight);
            const gpu_f4 v = *(const gpu_f4 *)(rows + j * W + first + u * GPU_COLS);
            GPU_UNROLL
            for (int m = 0; m < S::TM; m++) {
                sum[m][0] = fmaf(weight[m], v.x, sum[m][0]);
                sum[m][1] = fmaf(weight[m], v.y, sum[m][1]);
                sum[m][2] = fmaf(weight[m], v.z, sum[m][2]);
                sum[m][3] = fmaf(weight[m], v.w, sum[m][3]);
            }
        }
        GPU_UNROLL
        for (int m = 0; m < S::TM; m++) {
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                y[m][u * 4 + e] += sum[m][e];
            }
        }
    }
}

/* A thread's registers for a step of gpu_mix: rows at[0 .. STEP - 1] from channel c0 on. */
template <class S, int W> struct gpu_mix_part {
    enum { STEP = GPU_MIX_FLOATS / W, PIECES = GPU_MIX_FLOATS / 4 / S::THREADS };
    gpu_quad quad[PIECES];
};

template <class S, int W, class Tensor>
GPU_DEVICE void gpu_mix_fetch(gpu_mix_part<S, W> &part, const Tensor &t, const int64_t *at, int c0)
{
    const int thread = gpu_thread_anew();
    GPU_UNROLL
    for (int piece = 0; piece < part.PIECES; piece++) {
        const int n = piece * S::THREADS + thread;
        part.quad[piece] = gpu_fetch_quad(t, at[n / (W / 4)], c0 + n % (W / 4) * 4);
    }
}

template <class S, int W, class Tensor>
GPU_DEVICE void gpu_mix_put(const gpu_mix_part<S, W> &part, const Tensor &t, float *rows)
{
    const int thread = gpu_thread_anew();
    GPU_UNROLL
    for (int piece = 0; piece < part.PIECES; piece++) {
        float x[4];
        gpu_f4 four;
        gpu_unpack_quad(t, part.quad[piece], x);
        four.x = x[0], four.y = x[1], four.z = x[2], four.w = x[3];
        *(gpu_f4 *)(rows + (piece * S::THREADS + thread) * 4) = four;
    }
}

/* y[row][channel] += sum over the first `live` columns of weights[col][row] t[at[col]][c0 +
 * channel]. The barrier at the start makes s.weights and `at` visible. EARLY: a step is loaded
 * while the one before is used, which takes registers to hold it. Tensor: gpu_tensor or
 * gpu_cache. */
template <class S, int W, bool EARLY, class Tensor>
GPU_DEVICE void gpu_mix(gpu_scratch<S> &s, const Tensor &t, const int64_t *at, int live, int c0,
                        float y[S::TM][W / GPU_TX])
{
    enum { STEP = gpu_mix_part<S, W>::STEP };
    gpu_mix_part<S, W> part;
    int stage = 0;
    gpu_sync();
    GPU_ROLLED
    for (int j0 = -STEP; j0 < live; j0 += STEP, stage ^= 1) {
        const bool more = j0 + STEP < live;
        if (EARLY && more) {
            gpu_mix_fetch(part, t, at + j0 + STEP, c0);
        }
        if (j0 >= 0) {
            gpu_mix_step<S, W>(s.step[stage ^ 1], s.weights, j0, y);
        }
        if (!EARLY && more) {
            gpu_mix_fetch(part, t, at + j0 + STEP, c0);
        }
        if (more) {
            gpu_mix_put(part, t, s.step[stage]);
            gpu_sync();
        }
    }
}

/* The sum, or the maximum, over the TX threads of a row. */
GPU_DEVICE float gpu_row_sum(float x)
{
    GPU_UNROLL
    for (int n = GPU_TX; n > 1; n /= 2) {
        x += gpu_shfl_xor(x, n);
    }
    return x;
}

GPU_DEVICE float gpu_row_max(float x)
{
    GPU_UNROLL
    for (int n = GPU_TX; n > 1; n /= 2) {
        x = gpu_max(x, gpu_shfl_xor(x, n));
    }
    return x;
}

#endif
