/* SPDX-License-Identifier: Apache-2.0 */
/*
 * f32 on the tensor cores of mma_sm80.cuh: an element is the sum of three bf16 numbers, its planes,
 *
 *     x = x0 + x1 + x2      x0 = x to the nearest, x1 = x - x0 to the nearest, x2 what is left
 *
 * which is exact (24 bits are in 8 + 8 + 8) and keeps the range of f32. A product of two is six
 * products of bf16, the smallest first; what is left out is below 2^-23 |x y|:
 *
 *     x y = x2 y0 + x0 y2 + x1 y1 + x1 y0 + x0 y1 + x0 y0
 *
 * (Three products of TF32, x = hi + lo, take the same time, lose a bit of x, need 8 bytes for it
 * instead of 6, and have no ldmatrix that transposes.) Tensor cores cut off what does not fit when
 * they add, always towards zero, which in a long sum adds up: here sixteen terms are summed there,
 * from 0, and sums join others by additions that round. docs/NUMERICS.md has the analysis.
 *
 * What bf16 cannot hold in three parts (infinities, NaN, bits below 2^-133, and what rounds to
 * infinity) leaves something in the lower half of the last part, which is 0 otherwise. Tiles that
 * have such an element are computed by plain multiply-adds of the floats themselves.
 */
#ifndef FATTN_CUDA_MMA_SPLIT_CUH
#define FATTN_CUDA_MMA_SPLIT_CUH

#include "backends/cuda/mma_sm80.cuh"

/* A score's weight rounds a difference, as fattn_softmax_weight() does. */
struct mma_f32 : mma_bf16 {
    typedef float element;
    enum { PLANES = 3 };
    GPU_DEVICE float weight(float x, float unit, float base) { return mma_exp2((x - base) * unit); }
    /* c = A B, the first of a sum. */
    GPU_DEVICE void begin(float c[4], const uint32_t a[4], const uint32_t b[2])
    {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
    }
};

/* Two floats, lo first, become a pair of each plane. The lower half of what is returned is 0 when
 * nothing is lost. */
GPU_DEVICE uint32_t mma_split(float lo, float hi, uint32_t pair[3])
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

/* The first `live` of them, and zeros. Rows begin at multiples of 16 bytes. */
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

/* Puts them at `to` in each plane of a tile, planes that many bytes apart. Returns as mma_split. */
GPU_DEVICE uint32_t mma_put_eight(uint32_t to, int plane_bytes, const mma_eight &e)
{
    uint32_t pair[4][3], lost = 0;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        lost |= mma_split(e.x[2 * n], e.x[2 * n + 1], pair[n]);
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

/*
 * A B for 16 * M rows of A and 16 columns of B along 16 terms, fragments of planes. Where M is 1,
 * in two parts, so that there are enough products that do not wait for one another.
 */
template <int M> struct mma_split_sum {
    enum { PARTS = 2 / M };
    float part[PARTS][M][2][4];
};

template <int M>
GPU_DEVICE void mma_split_products(const uint32_t a[M][3][4], const uint32_t b[3][4],
                                   mma_split_sum<M> &sum)
{
    enum { PARTS = mma_split_sum<M>::PARTS };
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

/* Adds it to columns 16 n .. of y. */
template <int M, int N>
GPU_DEVICE void mma_split_join(const mma_split_sum<M> &sum, int n, float y[M][2 * N][4])
{
    GPU_UNROLL
    for (int e = 0; e < 8 * M; e++) {
        const int m = e / 8, h = e / 4 % 2, r = e % 4;
        float x = sum.part[0][m][h][r];
        if (mma_split_sum<M>::PARTS == 2) {
            x += sum.part[mma_split_sum<M>::PARTS - 1][m][h][r];
        }
        y[m][2 * n + h][r] += x;
    }
}

/* Fragments of every plane; planes `bytes` apart. */
GPU_DEVICE void mma_split_load(uint32_t x[3][4], uint32_t at, int bytes)
{
    GPU_UNROLL
    for (int plane = 0; plane < 3; plane++) {
        mma_load(x[plane], at + plane * bytes);
    }
}

GPU_DEVICE void mma_split_load_transposed(uint32_t x[3][4], uint32_t at, int bytes)
{
    GPU_UNROLL
    for (int plane = 0; plane < 3; plane++) {
        mma_load_transposed(x[plane], at + plane * bytes);
    }
}

/* mma_dots() of planes; a_bytes, b_bytes: from plane to plane. A step is not unrolled into the
 * next: the compiler would put off additions, and keep what is to be added in registers. */
template <int PITCH, int M, int N, int STEPS, int NEXT = 16>
GPU_DEVICE void mma_split_dots(uint32_t a_at, int a_bytes, uint32_t b_at, int b_bytes,
                               float x[M][2 * N][4])
{
    uint32_t a[M][3][4], b[2][3][4];
    GPU_UNROLL
    for (int m = 0; m < M; m++) {
        mma_split_load(a[m], mma_step<PITCH>(a_at, m, 0), a_bytes);
    }
    mma_split_load(b[0], b_at, b_bytes);
    GPU_ROLLED
    for (int step = 0; step < STEPS; step++) {
        const int next = (step + 1) % STEPS; /* the last loads what nobody uses */
        const uint32_t aside = next % 4 << 5, across = 128 * (next / 4);
        const uint32_t b_here = (b_at ^ step % 4 << 5) + 128 * (step / 4);
        uint32_t a_next[M][3][4];
        GPU_UNROLL
        for (int n = 0; n < N; n++) {
            if (n + 1 < N) {
                mma_split_load(b[(n + 1) % 2], mma_step<PITCH, NEXT>(b_here, n + 1, 0), b_bytes);
            } else {
                mma_split_load(b[(n + 1) % 2], (b_at ^ aside) + across, b_bytes);
                GPU_UNROLL
                for (int m = 0; m < M; m++) {
                    mma_split_load(a_next[m], mma_step<PITCH>((a_at ^ aside) + across, m, 0),
                                   a_bytes);
                }
            }
            mma_split_sum<M> sum;
            mma_split_products<M>(a, b[n % 2], sum);
            mma_split_join<M, N>(sum, n, x);
        }
        static_assert(N % 2 == 0, "the first of the next step is in b[0]");
        GPU_UNROLL
        for (int e = 0; e < 12 * M; e++) {
            a[e / 12][e / 4 % 3][e % 4] = a_next[e / 12][e / 4 % 3][e % 4];
        }
    }
}

/* mma_mix() of planes. */
template <int PITCH, int M, int N, int STEPS, int NEXT = 16>
GPU_DEVICE void mma_split_mix(const float p[M][2 * STEPS][4], uint32_t b_at, int b_bytes,
                              float y[M][2 * N][4])
{
    uint32_t a[M][3][4], b[2][3][4];
    mma_split_load_transposed(b[0], mma_step<PITCH>(b_at, 0, 0), b_bytes);
    GPU_UNROLL
    for (int i = 0; i < N * STEPS; i++) {
        const int step = i / N, n = i % N, ahead = i + 1;
        GPU_UNROLL
        for (int e = 0; e < 4 * M && n == 0; e++) {
            const float *const from = p[e / 4][2 * step + e / 2 % 2] + 2 * (e % 2);
            uint32_t pair[3];
            mma_split(from[0], from[1], pair);
            GPU_UNROLL
            for (int plane = 0; plane < 3; plane++) {
                a[e / 4][plane][e % 4] = pair[plane];
            }
        }
        if (ahead < N * STEPS) {
            mma_split_load_transposed(b[ahead % 2],
                                      mma_step<PITCH, NEXT>(b_at, ahead / N, ahead % N), b_bytes);
        }
        mma_split_sum<M> sum;
        mma_split_products<M>(a, b[i % 2], sum);
        mma_split_join<M, N>(sum, n, y);
    }
}

#endif
