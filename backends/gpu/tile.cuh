/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Matrix products of tiles by plain multiply-adds: what the SIMT kernels are made of.
 *
 * A tile is ROWS x COLS; its threads form a grid of TY rows by TX = 16 columns, and thread (ty, tx)
 * owns the elements of rows ty * TM + m and columns tx * 4 + n, in registers. Two products are all
 * that attention needs:
 *
 *     gpu_dots   x[row][col] += sum over channels of a[row] b[col]            Q K^T, dO V^T, ...
 *     gpu_mix    y[row][c]   += sum over cols of weight[col][row] t[col][c]   P V, dS K, ...
 *
 * Both walk their sums in steps that fit shared memory, where operands lie as floats, the summed
 * index first. A thread reads four rows at a time; rows are exclusive-or'ed with bits of the summed
 * index, so that writing four channels of a row, which lie in four rows of the chunk, meets no bank
 * twice. Shared memory does not grow with the head dimension: queries too are read again for every
 * tile, which costs 1/TX of the time that the products take, and comes from the cache.
 */
#ifndef FATTN_GPU_TILE_CUH
#define FATTN_GPU_TILE_CUH

#include "backends/gpu/element.cuh"

enum {
    GPU_TX = 16,
    GPU_TN = 4,
    GPU_COLS = GPU_TX * GPU_TN,
    GPU_CHANNELS = 32,    /* of a step of gpu_dots */
    GPU_MIX_FLOATS = 4096 /* of a step of gpu_mix */
};

/* Column and row of a thread. Neighbours share a column, and threads two apart a row: shared memory
 * serves 16 bytes a thread in half the passes where each thread agrees with such a neighbour. */
GPU_DEVICE int gpu_tx(void) { return gpu_thread() % (2 * GPU_TX) / 2; }
GPU_DEVICE int gpu_ty(void) { return gpu_thread() / (2 * GPU_TX) * 2 + gpu_thread() % 2; }

template <int tm, int ty> struct gpu_shape {
    enum { TM = tm, TY = ty, ROWS = tm * ty, THREADS = GPU_TX * ty };
};

/* Shared memory of the products. Kernels add their own. */
template <class S> struct gpu_scratch {
    enum {
        DOT_FLOATS = (S::ROWS + GPU_COLS) * GPU_CHANNELS,
        STEP_FLOATS = DOT_FLOATS > GPU_MIX_FLOATS ? DOT_FLOATS : GPU_MIX_FLOATS
    };
    alignas(16) float step[STEP_FLOATS];
    alignas(16) float weights[GPU_COLS * S::ROWS]; /* [col][row], placed by gpu_place */
};

/* Index of `row` in line `inner` of an array of lines of ROWS floats. Four rows from a multiple of
 * 4 on stay together. */
template <int ROWS> GPU_DEVICE int gpu_place(int inner, int row)
{
    return inner * ROWS + (row ^ (inner & (ROWS - 4) & 28));
}

/* x = rows row .. row + N - 1 of line inner; row is a multiple of N, 1, 2 or a multiple of 4. */
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
    GPU_UNROLL
    for (int n = 0; n < GPU_TN; n++) {
        float column[S::TM];
        gpu_pick<S::ROWS, S::TM>(weights, gpu_tx() * GPU_TN + n, gpu_ty() * S::TM, column);
        GPU_UNROLL
        for (int m = 0; m < S::TM; m++) {
            x[m][n] = column[m];
        }
    }
}

/* lines[c][row] = channels c0 + c of rows at[row]. */
template <int ROWS, int THREADS>
GPU_DEVICE void gpu_fill_lines(float *lines, const gpu_tensor &t, const int64_t *at, int c0)
{
    for (int n = gpu_thread(); n < ROWS * GPU_CHANNELS / 4; n += THREADS) {
        const int row = n / (GPU_CHANNELS / 4), c = n % (GPU_CHANNELS / 4) * 4;
        float x[4];
        gpu_load_quad(t, at[row], c0 + c, x);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            lines[gpu_place<ROWS>(c + e, row)] = x[e];
        }
    }
}

/* x[row][col] += sum over the channels of a and b. a, b: elements where rows begin, [ROWS], [COLS].
 * All threads must be through with s.step before they come here or be at one of its barriers; the
 * first barrier also shows them what was written to `at`. */
template <class S>
GPU_DEVICE void gpu_dots(gpu_scratch<S> &s, const gpu_tensor &a, const int64_t *a_at,
                         const gpu_tensor &b, const int64_t *b_at, float x[S::TM][GPU_TN])
{
    const int tx = gpu_tx(), ty = gpu_ty();
    float *const a_lines = s.step, *const b_lines = s.step + S::ROWS * GPU_CHANNELS;
    for (int c0 = 0; c0 < a.dim; c0 += GPU_CHANNELS) {
        gpu_sync();
        gpu_fill_lines<S::ROWS, S::THREADS>(a_lines, a, a_at, c0);
        gpu_fill_lines<GPU_COLS, S::THREADS>(b_lines, b, b_at, c0);
        gpu_sync();
        GPU_UNROLL
        for (int c = 0; c < GPU_CHANNELS; c++) {
            float ax[S::TM], bx[GPU_TN];
            gpu_pick<S::ROWS, S::TM>(a_lines, c, ty * S::TM, ax);
            gpu_pick<GPU_COLS, GPU_TN>(b_lines, c, tx * GPU_TN, bx);
            GPU_UNROLL
            for (int m = 0; m < S::TM; m++) {
                GPU_UNROLL
                for (int n = 0; n < GPU_TN; n++) {
                    x[m][n] = fmaf(ax[m], bx[n], x[m][n]);
                }
            }
        }
    }
}

/* Channels of a slab of W that a thread owns: c0 + gpu_channel(u) + 0 .. 3 for u < W / 64. */
GPU_DEVICE int gpu_channel(int u) { return u * GPU_COLS + gpu_tx() * 4; }

/* y[row][channel] += sum over the first `live` columns of weights[col][row] t[at[col]][c0 +
 * channel]. weights and at may just have been written. */
template <class S, int W>
GPU_DEVICE void gpu_mix(gpu_scratch<S> &s, const gpu_tensor &t, const int64_t *at, int live, int c0,
                        float y[S::TM][W / GPU_TX])
{
    enum { STEP = GPU_MIX_FLOATS / W };
    const int ty = gpu_ty();
    for (int j0 = 0; j0 < live; j0 += STEP) {
        gpu_sync();
        for (int n = gpu_thread(); n < GPU_MIX_FLOATS / 4; n += S::THREADS) {
            const int j = n / (W / 4), c = n % (W / 4) * 4;
            float x[4];
            gpu_load_quad(t, at[j0 + j], c0 + c, x);
            gpu_f4 four;
            four.x = x[0], four.y = x[1], four.z = x[2], four.w = x[3];
            *(gpu_f4 *)(s.step + j * W + c) = four;
        }
        gpu_sync();
#pragma unroll 8
        for (int j = 0; j < STEP; j++) {
            float weight[S::TM];
            gpu_pick<S::ROWS, S::TM>(s.weights, j0 + j, ty * S::TM, weight);
            GPU_UNROLL
            for (int u = 0; u < W / GPU_COLS; u++) {
                const gpu_f4 v = *(const gpu_f4 *)(s.step + j * W + gpu_channel(u));
                GPU_UNROLL
                for (int m = 0; m < S::TM; m++) {
                    y[m][u * 4] = fmaf(weight[m], v.x, y[m][u * 4]);
                    y[m][u * 4 + 1] = fmaf(weight[m], v.y, y[m][u * 4 + 1]);
                    y[m][u * 4 + 2] = fmaf(weight[m], v.z, y[m][u * 4 + 2]);
                    y[m][u * 4 + 3] = fmaf(weight[m], v.w, y[m][u * 4 + 3]);
                }
            }
        }
    }
}

/* The sum, or the largest, over the TX threads of a row. */
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
