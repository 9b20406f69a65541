/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of tiles in shared memory, by the instructions of mma_sm80.cuh, which includes this
 * file.
 *
 * A tile in shared memory has rows of `pitch` elements, a multiple of 64, in chunks of 8. It is
 * swizzled: chunk c of row r is at c ^ (r % 8). Eight rows of one chunk then cover all 32 banks,
 * for copies and for ldmatrix, which reads eight rows of 16 bytes per phase. With a pitch of 32,
 * two rows are laid out as one of 64.
 */
#ifndef FATTN_CUDA_MMA_PRODUCTS_CUH
#define FATTN_CUDA_MMA_PRODUCTS_CUH

#include <stdint.h>

/* How many bytes of chunk c exist in a row of `dim` elements. */
GPU_DEVICE int mma_chunk_bytes(int c, int dim) { return min(max(2 * dim - 16 * c, 0), 16); }

/* Address of chunk c of row r in a tile. */
template <int PITCH> GPU_DEVICE uint32_t mma_place(uint32_t tile, int r, int c)
{
    if (PITCH == 32) {
        return mma_place<64>(tile, r / 2, r % 2 * 4 + c);
    }
    return tile + 2 * PITCH * r + ((c ^ (r & 7)) << 4);
}

/* The address of the chunk NEXT * `rows` rows below the one at `at`, and 2 * `chunks` chunks to its
 * right. Rows are aligned to 128 bytes, so that the swizzle and the step change different bits. */
template <int PITCH, int NEXT = 16> GPU_DEVICE uint32_t mma_step(uint32_t at, int rows, int chunks)
{
    return (at ^ chunks % 4 << 5) + 2 * PITCH * NEXT * rows + 128 * (chunks / 4);
}

/*
 * x[m][.] += A B^T for 16 * M rows of A and 16 * N rows of B, summed over 16 * STEPS channels, both
 * in tiles of that pitch. a_at and b_at: the lane's first addresses, from mma_rows_a and
 * mma_rows_b. Successive groups of 16 rows of B begin NEXT rows of the tile apart. Fragments of B
 * are loaded two products ahead.
 */
template <int PITCH> GPU_DEVICE uint32_t mma_rows_a(const void *tile, int row)
{
    const int lane = mma_lane();
    return mma_place<PITCH>(mma_shared(tile), row + lane % 16, lane / 16);
}

template <int PITCH> GPU_DEVICE uint32_t mma_rows_b(const void *tile, int row)
{
    const int lane = mma_lane();
    return mma_place<PITCH>(mma_shared(tile), row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

template <class T, int PITCH, int M, int N, int STEPS, int NEXT = 16>
GPU_DEVICE void mma_dots(uint32_t a_at, uint32_t b_at, float x[M][2 * N][4])
{
    uint32_t a[2][M][4], b[3][4];
    GPU_UNROLL
    for (int m = 0; m < M; m++) {
        mma_load(a[0][m], mma_step<PITCH>(a_at, m, 0));
    }
    mma_load(b[0], mma_step<PITCH, NEXT>(b_at, 0, 0));
    mma_load(b[1], mma_step<PITCH, NEXT>(b_at, 1 % N, 1 / N));
    GPU_UNROLL
    for (int i = 0; i < N * STEPS; i++) {
        const int step = i / N, n = i % N, ahead = i + 2;
        if (ahead < N * STEPS) {
            mma_load(b[ahead % 3], mma_step<PITCH, NEXT>(b_at, ahead % N, ahead / N));
        }
        GPU_UNROLL
        for (int m = n; m < M && step + 1 < STEPS; m += N) {
            mma_load(a[(step + 1) % 2][m], mma_step<PITCH>(a_at, m, step + 1));
        }
        GPU_UNROLL
        for (int m = 0; m < M; m++) {
            T::multiply(x[m][2 * n], a[step % 2][m], b[i % 3]);
            T::multiply(x[m][2 * n + 1], a[step % 2][m], b[i % 3] + 2);
        }
    }
}

/*
 * y[m][.] += P B for 16 * M rows of P, which are accumulators and are rounded here, and 16 * STEPS
 * rows of B with 16 * N channels. b_at: the lane's first address, from mma_columns_b.
 */
template <int PITCH> GPU_DEVICE uint32_t mma_columns_b(const void *tile, int row, int chunk)
{
    const int lane = mma_lane();
    return mma_place<PITCH>(mma_shared(tile), row + lane % 16, chunk + lane / 16);
}

template <class T, int PITCH, int M, int N, int STEPS, int NEXT = 16>
GPU_DEVICE void mma_mix(const float p[M][2 * STEPS][4], uint32_t b_at, float y[M][2 * N][4])
{
    uint32_t a[M][4], b[3][4];
    mma_load_transposed(b[0], mma_step<PITCH, NEXT>(b_at, 0, 0));
    mma_load_transposed(b[1], mma_step<PITCH, NEXT>(b_at, 1 / N, 1 % N));
    GPU_UNROLL
    for (int i = 0; i < N * STEPS; i++) {
        const int step = i / N, n = i % N, ahead = i + 2;
        if (ahead < N * STEPS) {
            mma_load_transposed(b[ahead % 3], mma_step<PITCH, NEXT>(b_at, ahead / N, ahead % N));
        }
        GPU_UNROLL
        for (int m = 0; m < M; m++) {
            if (n == 0) {
                const float *const left = p[m][2 * step], *const right = p[m][2 * step + 1];
                a[m][0] = T::pack(left[0], left[1]);
                a[m][1] = T::pack(left[2], left[3]);
                a[m][2] = T::pack(right[0], right[1]);
                a[m][3] = T::pack(right[2], right[3]);
            }
            T::multiply(y[m][2 * n], a[m], b[i % 3]);
            T::multiply(y[m][2 * n + 1], a[m], b[i % 3] + 2);
        }
    }
}

/*
 * y[m][.] += A B with A in a tile too: 16 * M rows of it or, if TRANSPOSED, as many columns. a_at:
 * from mma_rows_a or mma_columns_a. After product i of N * STEPS it calls beside(i), where i is a
 * compile-time constant.
 */
template <int PITCH> GPU_DEVICE uint32_t mma_columns_a(const void *tile, int chunk)
{
    const int lane = mma_lane();
    return mma_place<PITCH>(mma_shared(tile), lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2);
}

template <int PITCH, int M, bool TRANSPOSED>
GPU_DEVICE void mma_load_a(uint32_t a[M][4], uint32_t a_at, int step, int first, int every)
{
    GPU_UNROLL
    for (int m = first; m < M; m += every) {
        if (TRANSPOSED) {
            mma_load_transposed(a[m], mma_step<PITCH>(a_at, step, m));
        } else {
            mma_load(a[m], mma_step<PITCH>(a_at, m, step));
        }
    }
}

template <class T, int PITCH_A, int PITCH_B, int M, int N, int STEPS, bool TRANSPOSED, class Beside>
GPU_DEVICE void mma_times(uint32_t a_at, uint32_t b_at, float y[M][2 * N][4], const Beside &beside)
{
    uint32_t a[2][M][4], b[3][4];
    mma_load_a<PITCH_A, M, TRANSPOSED>(a[0], a_at, 0, 0, 1);
    mma_load_transposed(b[0], mma_step<PITCH_B>(b_at, 0, 0));
    mma_load_transposed(b[1], mma_step<PITCH_B>(b_at, 1 / N, 1 % N));
    GPU_UNROLL
    for (int i = 0; i < N * STEPS; i++) {
        const int step = i / N, n = i % N, ahead = i + 2;
        if (ahead < N * STEPS) {
            mma_load_transposed(b[ahead % 3], mma_step<PITCH_B>(b_at, ahead / N, ahead % N));
        }
        if (step + 1 < STEPS) {
            mma_load_a<PITCH_A, M, TRANSPOSED>(a[(step + 1) % 2], a_at, step + 1, n, N);
        }
        GPU_UNROLL
        for (int m = 0; m < M; m++) {
            T::multiply(y[m][2 * n], a[step % 2][m], b[i % 3]);
            T::multiply(y[m][2 * n + 1], a[step % 2][m], b[i % 3] + 2);
        }
        beside(i);
    }
}

#endif
