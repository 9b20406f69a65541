/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations of Hopper's kernels on a tile: products, conversion of accumulators to operands,
 * bands, and zeroing rows.
 */
#ifndef FATTN_CUDA_WGMMA_TILE_CUH
#define FATTN_CUDA_WGMMA_TILE_CUH

#include "backends/cuda/wgmma_sm90.cuh"

/* The thread's number in its warpgroup. */
GPU_DEVICE int wgmma_thread(void) { return (int)threadIdx.x % WGMMA_WARPGROUP; }

/* One lane arrives at the barrier for its warp. */
GPU_DEVICE void wgmma_release(uint64_t *barrier)
{
    if (mma_lane() == 0) {
        wgmma_arrive(barrier);
    }
}

/* --- Products --------------------------------------------------------------------------------- */

/* Begins x = A B^T, summed over W channels. a, b: descriptors of 64 rows of a tile of ROWS_A, and
 * of N rows of a tile of ROWS_B. NEW: x need not be initialised, so its registers are free
 * before. */
template <class T, int W, int ROWS_A, int ROWS_B, int N, bool NEW>
GPU_DEVICE void wgmma_dots(uint64_t a, uint64_t b, float x[N / 8][4])
{
    wgmma_fence();
    GPU_UNROLL
    for (int i = 0; i < W / 16; i++) {
        const int panel = i / 4, step = i % 4 * WGMMA_CHANNELS;
        const uint64_t a_step = a + (panel * ROWS_A * 128 >> 4) + step;
        const uint64_t b_step = b + (panel * ROWS_B * 128 >> 4) + step;
        if (NEW && i == 0) {
            wgmma_product<T, N>::new_tiles(x, a_step, b_step);
        } else {
            wgmma_product<T, N>::tiles(x, a_step, b_step, i > 0);
        }
    }
    wgmma_commit();
}

/* Begins y += P B, with P in registers, and B with 16 * STEPS rows and N channels. PART: channels
 * of a product. */
template <class T, int STEPS, int N, int PART = N>
GPU_DEVICE void wgmma_mix(const uint32_t p[STEPS][4], uint64_t b, float y[N / 8][4])
{
    wgmma_fence();
    GPU_UNROLL
    for (int i = 0; i < STEPS; i++) {
        GPU_UNROLL
        for (int c = 0; c < N; c += PART) {
            const uint64_t panel = c / 64 * (16 * STEPS * 128 >> 4);
            wgmma_product<T, PART>::pairs(y + c / 8, p[i], b + panel + i * WGMMA_ROWS, true);
        }
    }
    wgmma_commit();
}

/* Rounds accumulators to the first operand of another product. No data moves between threads. */
template <class T, int N> GPU_DEVICE void wgmma_pack(const float x[N / 8][4], uint32_t p[N / 16][4])
{
    GPU_UNROLL
    for (int n = 0; n < N / 4; n++) {
        const float *const pair = x[n / 2] + n % 2 * 2;
        p[n / 4][n % 4] = T::pack(pair[0], pair[1]);
    }
}

/* --- Bands ------------------------------------------------------------------------------------ */

/* Sets scores to -inf, except in columns first .. past - 1 of each of the thread's two rows,
 * counted from the thread's first column. */
template <int N>
GPU_DEVICE void wgmma_hide_outside(const int first[2], const int past[2], float x[N / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < N / 2; n++) {
        const int j = n / 4 * 8 + n % 2, h = n % 4 / 2;
        float *const score = &x[n / 4][n % 4];
        *score = first[h] <= j && j < past[h] ? *score : -fattn_f32_infinity();
    }
}

/* The same with only an upper bound, or only a lower bound. Causal masks need no more. */
template <int N> GPU_DEVICE void wgmma_hide_from(const int past[2], float x[N / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < N / 2; n++) {
        const int j = n / 4 * 8 + n % 2, h = n % 4 / 2;
        float *const score = &x[n / 4][n % 4];
        *score = j < past[h] ? *score : -fattn_f32_infinity();
    }
}

template <int N> GPU_DEVICE void wgmma_hide_before(const int first[2], float x[N / 8][4])
{
    GPU_UNROLL
    for (int n = 0; n < N / 2; n++) {
        const int j = n / 4 * 8 + n % 2, h = n % 4 / 2;
        float *const score = &x[n / 4][n % 4];
        *score = first[h] <= j ? *score : -fattn_f32_infinity();
    }
}

/* --- Dropout ---------------------------------------------------------------------------------- */

#define WGMMA_SMALL_THRESHOLD 0x7f80 /* the bits of a bf16 of +inf */

/* Sets all bits in those halves of a generator's word that are not below the threshold; `threshold`
 * has it in both halves. SMALL: as a bf16, the threshold is a positive number, and so is the
 * minimum of it and a half, so that bf16 comparisons can be used. */
template <bool SMALL> GPU_DEVICE uint32_t wgmma_dropout_halves(uint32_t word, uint32_t threshold)
{
    return SMALL ? wgmma_not_less(wgmma_smaller_halves(word, threshold), threshold)
                 : __vcmpgeu2(word, threshold);
}

/* --- Rows of other sequences ------------------------------------------------------------------ */

/* Zeroes rows `live` and later of a tile, which hold data of another sequence or none. Their
 * weights are 0, but 0 times NaN or infinity would be NaN. Each warpgroup does this for itself; if
 * two write to the same place, both write 0. barrier: a named barrier of the warpgroup's
 * threads. */
template <int ROWS, int PANELS> GPU_DEVICE void wgmma_clear(uint32_t tile, int live, int barrier)
{
    GPU_ROLLED
    for (int n = live * 8 + wgmma_thread(); n < ROWS * 8; n += WGMMA_WARPGROUP) {
        GPU_UNROLL
        for (int c = 0; c < PANELS; c++) {
            const uint32_t at = tile + c * ROWS * 128 + n * 16;
            wgmma_zero(at);
        }
    }
    wgmma_publish();
    wgmma_named_sync(barrier, WGMMA_WARPGROUP);
}

#endif
