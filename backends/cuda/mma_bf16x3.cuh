/* SPDX-License-Identifier: Apache-2.0 */
/*
 * f32 on the tensor cores of mma_sm80.cuh: an element is the sum of three bf16 numbers, its planes,
 *
 *     x = x0 + x1 + x2      x0 = x rounded, x1 = x - x0 rounded, x2 = the rest
 *
 * which is exact (24 bits are in 8 + 8 + 8) and keeps the range of f32. A product of two elements
 * is six products of bf16, the smallest first; the terms left out are below 2^-23 |x y|:
 *
 *     x y = x2 y0 + x0 y2 + x1 y1 + x1 y0 + x0 y1 + x0 y0
 *
 * (Three products of TF32, x = hi + lo, take the same time, lose a bit of x, need 8 bytes for it
 * instead of 6, and have no transposing ldmatrix.) Tensor cores truncate their sums towards zero,
 * an error that grows with the length of a sum. So they sum only sixteen terms here, starting from
 * 0, and these sums are added by additions that round. docs/NUMERICS.md has the analysis.
 *
 * Some values cannot be split into three bf16 numbers: infinities, NaN, values with bits below
 * 2^-133, and values that round to infinity. For these the lower half of the last part is not 0, as
 * it is otherwise. They are called inexact. Tiles that have such an element are computed by plain
 * multiply-adds of the floats themselves.
 */
#ifndef FATTN_CUDA_MMA_BF16X3_CUH
#define FATTN_CUDA_MMA_BF16X3_CUH

#include "backends/cuda/mma_sm80.cuh"

/* weight() rounds the difference x - base, as fattn_softmax_weight() does. */
struct mma_f32 : mma_bf16 {
    typedef float element;
    enum { PLANES = 3 };
    GPU_DEVICE float weight(float x, float unit, float base) { return mma_exp2((x - base) * unit); }
    /* c = A B, the first product of a sum. */
    GPU_DEVICE void begin(float c[4], const uint32_t a[4], const uint32_t b[2])
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
    }
};

/* Splits two floats, lo first, into a pair for each plane. The lower half of the result is 0 if the
 * split is exact. */
GPU_DEVICE uint32_t mma_bf16x3(float lo, float hi, uint32_t pair[3])
{
    pair[0] = mma_bf16::pack(lo, hi);
    lo -= fattn_f32_from_bits(pair[0] << 16);
    hi -= fattn_f32_from_bits(pair[0] & 0xffff0000u);
    pair[1] = mma_bf16::pack(lo, hi);
    lo -= fattn_f32_from_bits(pair[1] << 16);
    hi -= fattn_f32_from_bits(pair[1] & 0xffff0000u);
    const uint32_t low = fattn_f32_bits(lo), high = fattn_f32_bits(hi);
    pair[2] = __byte_perm(low, high, 0x7632);
    return low | high;
}

/* Eight channels of a row. */
typedef struct mma_eight {
    float x[8];
} mma_eight;

/* Loads the first `live` of eight channels, and zeros for the rest. Rows begin at multiples of 16
 * bytes. */
GPU_DEVICE mma_eight mma_fetch_eight(const float *from, int live)
{
    mma_eight e;
    if (live == 8) {
        const gpu_f4 a = __ldg((const gpu_f4 *)from), b = __ldg((const gpu_f4 *)from + 1);
        e = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
        return e;
    }
    GPU_UNROLL
    for (int n = 0; n < 8; n++) {
        e.x[n] = n < live ? __ldg(from + n) : 0;
    }
    return e;
}

/* Splits them and stores them at `to` in each plane of a tile; planes are plane_bytes apart. The
 * result is as that of mma_bf16x3(). */
GPU_DEVICE uint32_t mma_put_eight(uint32_t to, int plane_bytes, const mma_eight &e)
{
    uint32_t pair[4][3], lost = 0;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        lost |= mma_bf16x3(e.x[2 * n], e.x[2 * n + 1], pair[n]);
    }
    GPU_UNROLL
    for (int plane = 0; plane < 3; plane++) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + plane * plane_bytes),
                     "r"(pair[0][plane]), "r"(pair[1][plane]), "r"(pair[2][plane]),
                     "r"(pair[3][plane])
                     : "memory");
    }
    return lost;
}

/* A thread's part of ROWS rows of WIDTH channels: chunk c of rows r, r + STEP, ... */
template <int THREADS, int WIDTH, int ROWS> struct mma_bf16x3_part {
    enum { CHUNKS = WIDTH / 8, STEP = THREADS / CHUNKS, COUNT = ROWS / STEP };
    mma_eight eight[COUNT];

    /* Loads it to registers. From `tile` on, `live` rows of `dim` channels exist. */
    __device__ __forceinline__ void fetch(const float *tile, int64_t stride, int64_t dim, int live)
    {
        const int c = gpu_thread_anew() % CHUNKS, r0 = gpu_thread_anew() / CHUNKS;
        const int channels = (int)gpu_clamp(dim - 8 * c, 0, 8);
        const float *from = tile + r0 * stride + 8 * c;
        if (live >= ROWS && channels == 8) {
            GPU_UNROLL
            for (int n = 0; n < COUNT; n++, from += STEP * stride) {
                eight[n] = mma_fetch_eight(from, 8);
            }
            return;
        }
        GPU_UNROLL
        for (int n = 0; n < COUNT; n++, from += STEP * stride) {
            eight[n] = mma_fetch_eight(from, r0 + n * STEP < live ? channels : 0);
        }
    }

    /* Splits the chunks and stores them where place(r, c) says. Returns whether any is inexact. */
    template <class Place> __device__ __forceinline__ bool put(const Place &place) const
    {
        const int c = gpu_thread_anew() % CHUNKS, r0 = gpu_thread_anew() / CHUNKS;
        uint32_t lost = 0;
        GPU_UNROLL
        for (int n = 0; n < COUNT; n++) {
            lost |= mma_put_eight(place(r0 + n * STEP, c), 2 * ROWS * WIDTH, eight[n]);
        }
        return lost & 0xffffu;
    }
};

/*
 * A B for 16 * M rows of A and 16 columns of B, summed over 16 terms. A and B are fragments of the
 * three planes. If M is 1 the sum has two parts, so that enough products are independent.
 */
template <int M> struct mma_bf16x3_sum {
    enum { PARTS = 2 / M };
    float part[PARTS][M][2][4];
};

template <int M>
GPU_DEVICE void mma_bf16x3_products(const uint32_t a[M][3][4], const uint32_t b[3][4],
                                    mma_bf16x3_sum<M> &sum)
{
    enum { PARTS = mma_bf16x3_sum<M>::PARTS };
    const int left[6] = {2, 0, 1, 1, 0, 0}, right[6] = {0, 2, 1, 0, 1, 0}; /* small ones first */
    GPU_UNROLL
    for (int term = 0; term < 6 / PARTS; term++) {
        GPU_UNROLL
        for (int n = 0; n < 2 * M * PARTS; n++) {
            const int part = n % PARTS, h = n / PARTS % 2, m = n / PARTS / 2;
            const int product = part * 3 + term;
            float *const to = sum.part[part][m][h];
            const uint32_t *const rows = a[m][left[product]];
            const uint32_t *const columns = b[right[product]] + 2 * h;
            if (term == 0) {
                mma_f32::begin(to, rows, columns);
            } else {
                mma_f32::multiply(to, rows, columns);
            }
        }
    }
}

/* Adds the sum to columns 16 n .. of y. */
template <int M, int N>
GPU_DEVICE void mma_bf16x3_join(const mma_bf16x3_sum<M> &sum, int n, float y[M][2 * N][4])
{
    GPU_UNROLL
    for (int e = 0; e < 8 * M; e++) {
        const int m = e / 8, h = e / 4 % 2, r = e % 4;
        float x = sum.part[0][m][h][r];
        if (mma_bf16x3_sum<M>::PARTS == 2) {
            x += sum.part[mma_bf16x3_sum<M>::PARTS - 1][m][h][r];
        }
        y[m][2 * n + h][r] += x;
    }
}

/* Loads fragments of every plane; planes are `bytes` apart. */
GPU_DEVICE void mma_bf16x3_load(uint32_t x[3][4], uint32_t at, int bytes)
{
    GPU_UNROLL
    for (int plane = 0; plane < 3; plane++) {
        mma_load(x[plane], at + plane * bytes);
    }
}

GPU_DEVICE void mma_bf16x3_load_transposed(uint32_t x[3][4], uint32_t at, int bytes)
{
    GPU_UNROLL
    for (int plane = 0; plane < 3; plane++) {
        mma_load_transposed(x[plane], at + plane * bytes);
    }
}

/* mma_dots() of planes; a_bytes, b_bytes: the distance of planes. Fragments are loaded one product
 * ahead. At most two steps are unrolled: otherwise the compiler would delay additions and keep the
 * summands in registers. */
template <int PITCH, int M, int N, int STEPS, int NEXT = 16>
GPU_DEVICE void mma_bf16x3_dots(uint32_t a_at, int a_bytes, uint32_t b_at, int b_bytes,
                                float x[M][2 * N][4])
{
    enum { MORE = N % 2 + 1 }; /* steps at a time, an even number of products */
    uint32_t a[2][M][3][4], b[2][3][4];
    GPU_UNROLL
    for (int m = 0; m < M; m++) {
        mma_bf16x3_load(a[0][m], mma_step<PITCH>(a_at, m, 0), a_bytes);
    }
    mma_bf16x3_load(b[0], b_at, b_bytes);
    GPU_ROLLED
    for (int step = 0; step < STEPS; step += MORE) {
        GPU_UNROLL
        for (int i = 0; i < N * MORE; i++) {
            const int n = i % N, s = i / N;
            const int ahead = (step + s + (n + 1 == N)) % STEPS; /* at the end: not used */
            const uint32_t aside = ahead % 4 << 5, across = 128 * (ahead / 4);
            mma_bf16x3_load(b[(i + 1) % 2],
                            mma_step<PITCH, NEXT>((b_at ^ aside) + across, (n + 1) % N, 0),
                            b_bytes);
            GPU_UNROLL
            for (int m = 0; m < M && n + 1 == N; m++) {
                mma_bf16x3_load(a[(s + 1) % 2][m], mma_step<PITCH>((a_at ^ aside) + across, m, 0),
                                a_bytes);
            }
            mma_bf16x3_sum<M> sum;
            mma_bf16x3_products<M>(a[s % 2], b[i % 2], sum);
            mma_bf16x3_join<M, N>(sum, n, x);
        }
        GPU_UNROLL
        for (int e = 0; e < 12 * M && MORE == 1; e++) {
            a[0][e / 12][e / 4 % 3][e % 4] = a[1][e / 12][e / 4 % 3][e % 4];
        }
    }
}

/* mma_mix() of planes. */
template <int PITCH, int M, int N, int STEPS, int NEXT = 16>
GPU_DEVICE void mma_bf16x3_mix(const float p[M][2 * STEPS][4], uint32_t b_at, int b_bytes,
                               float y[M][2 * N][4])
{
    uint32_t a[M][3][4], b[2][3][4];
    mma_bf16x3_load_transposed(b[0], mma_step<PITCH, NEXT>(b_at, 0, 0), b_bytes);
    GPU_UNROLL
    for (int i = 0; i < N * STEPS; i++) {
        const int step = i / N, n = i % N, ahead = i + 1;
        GPU_UNROLL
        for (int e = 0; e < 4 * M && n == 0; e++) {
            const float *const from = p[e / 4][2 * step + e / 2 % 2] + 2 * (e % 2);
            uint32_t pair[3];
            mma_bf16x3(from[0], from[1], pair);
            GPU_UNROLL
            for (int plane = 0; plane < 3; plane++) {
                a[e / 4][plane][e % 4] = pair[plane];
            }
        }
        if (ahead < N * STEPS) {
            mma_bf16x3_load_transposed(b[ahead % 2],
                                       mma_step<PITCH, NEXT>(b_at, ahead / N, ahead % N), b_bytes);
        }
        mma_bf16x3_sum<M> sum;
        mma_bf16x3_products<M>(a, b[i % 2], sum);
        mma_bf16x3_join<M, N>(sum, n, y);
    }
}

/* mma_times() of planes. */
template <int PITCH_A, int PITCH_B, int M, int N, int STEPS, bool TRANSPOSED, class Beside>
GPU_DEVICE void mma_bf16x3_times(uint32_t a_at, int a_bytes, uint32_t b_at, int b_bytes,
                                 float y[M][2 * N][4], const Beside &beside)
{
    uint32_t a[M][3][4], b[2][3][4];
    mma_bf16x3_load_transposed(b[0], mma_step<PITCH_B>(b_at, 0, 0), b_bytes);
    GPU_UNROLL
    for (int i = 0; i < N * STEPS; i++) {
        const int step = i / N, n = i % N, ahead = i + 1;
        GPU_UNROLL
        for (int m = 0; m < M && n == 0; m++) {
            if (TRANSPOSED) {
                mma_bf16x3_load_transposed(a[m], mma_step<PITCH_A>(a_at, step, m), a_bytes);
            } else {
                mma_bf16x3_load(a[m], mma_step<PITCH_A>(a_at, m, step), a_bytes);
            }
        }
        if (ahead < N * STEPS) {
            mma_bf16x3_load_transposed(b[ahead % 2], mma_step<PITCH_B>(b_at, ahead / N, ahead % N),
                                       b_bytes);
        }
        mma_bf16x3_sum<M> sum;
        mma_bf16x3_products<M>(a, b[i % 2], sum);
        mma_bf16x3_join<M, N>(sum, n, y);
        beside(i);
    }
}

/* --- By plain multiply-adds, in the same places ----------------------------------------------- */

/* x[m][.] += A B^T for the thread's rows of A and rows column(e) of B, e < 4 * N, of which the
 * first `live` from b on exist. row: the rows of A; NULL leaves a row of x as it is. */
template <int M, int N, class Column>
GPU_DEVICE void mma_plain_dots(const float *const row[M][2], const float *b, int64_t stride,
                               int live, int64_t dim, const Column &column, float x[M][2 * N][4])
{
    GPU_ROLLED
    for (int64_t c = 0; c < dim; c++) {
        float left[M][2];
        GPU_UNROLL
        for (int n = 0; n < 2 * M; n++) {
            left[n / 2][n % 2] = row[n / 2][n % 2] ? row[n / 2][n % 2][c] : 0;
        }
        GPU_UNROLL
        for (int e = 0; e < 4 * N; e++) {
            const int j = column(e);
            const float right = j < live ? b[j * stride + c] : 0;
            GPU_UNROLL
            for (int n = 0; n < 2 * M; n++) {
                float *const to = &x[n / 2][e / 2][2 * (n % 2) + e % 2];
                *to = row[n / 2][n % 2] ? fmaf(left[n / 2][n % 2], right, *to) : *to;
            }
        }
    }
}

/* y[m][.] += A B. Element (r, t) of A is a[r * down + t * along], where a is the thread's first
 * row. b: the row of the first term at the thread's first channel; `channels` exist from there
 * on. */
template <int M, int N>
GPU_DEVICE void mma_plain_times(const float *a, int down, int along, int terms, const float *b,
                                int64_t stride, int channels, float y[M][2 * N][4])
{
    GPU_ROLLED
    for (int t = 0; t < terms; t++, a += along, b += stride) {
        GPU_UNROLL
        for (int e = 0; e < 4 * N; e++) {
            const int c = e / 2 * 8 + e % 2;
            const float right = c < channels ? b[c] : 0;
            GPU_UNROLL
            for (int n = 0; n < 2 * M; n++) {
                float *const to = &y[n / 2][e / 2][2 * (n % 2) + e % 2];
                *to = fmaf(a[(n / 2 * 16 + n % 2 * 8) * down], right, *to);
            }
        }
    }
}

#endif
