/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor core products of Ampere and later GPUs: a warp multiplies a 16 x 16 tile by a 16 x 8 tile
 * of 16-bit elements and accumulates in 16 x 8 floats (mma.sync.m16n8k16). Operands come from
 * shared memory, which asynchronous copies of 16 bytes fill (cp.async).
 *
 * Fragments, for lane 4 g + t of a warp:
 *
 *     A   a[0] (g, 2t)   a[1] (g + 8, 2t)   a[2] (g, 2t + 8)   a[3] (g + 8, 2t + 8)
 *     B   b[0] (2t, g)   b[1] (2t + 8, g)
 *     C   c[0] (g, 2t)   c[1] (g, 2t + 1)   c[2] (g + 8, 2t)   c[3] (g + 8, 2t + 1)
 *
 * where a and b hold that element and the next one along the summed dimension. So the accumulators
 * of two adjacent C tiles, rounded, are an A fragment: probabilities go from one product to the
 * next without leaving their registers.
 *
 * A tile in shared memory has rows of `pitch` elements, a multiple of 64, in chunks of 8. It is
 * swizzled: chunk c of row r is at c ^ (r % 8). Eight rows of one chunk then cover all 32 banks,
 * for copies and for ldmatrix, which reads eight rows of 16 bytes per phase. With a pitch of 32,
 * two rows are laid out as one of 64.
 */
#ifndef FATTN_CUDA_MMA_SM80_CUH
#define FATTN_CUDA_MMA_SM80_CUH

#include "backends/cuda/mma.h"
#include "backends/gpu/element.cuh"
#include "backends/gpu/sequence.cuh"

/* Whether kernels of the variant have no features of single pairs. */
GPU_DEVICE constexpr bool mma_is_lean(mma_variant v) { return v <= MMA_ORDERED; }

/* Whether the run has a feature of MMA_OF_PAIRS: a compile-time constant, unless the kernel is for
 * any. */
template <class S> GPU_DEVICE bool mma_has(const fattn_gpu_args &g, uint64_t feature)
{
    return ((S::KNOWN == MMA_ANY ? g.problem.features : S::KNOWN) & feature) != 0;
}

/* 2^x to 2 ulp. Subnormal results are 0. */
GPU_DEVICE float mma_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/*
 * A 16-bit type. pack(): rounds two floats to a pair, lo first in memory. weight(): the weight of a
 * score relative to a base, scaled by 2^LIFT so that small weights stay normal numbers. multiply():
 * the product. PLANES: how many 16-bit numbers an element is the sum of; mma_bf16x3.cuh has 3.
 */
#define MMA_TYPE(name, type, dtype, lift)                                                     \
    struct name {                                                                             \
        typedef uint16_t element;                                                             \
        enum { DTYPE = dtype, LIFT = lift, PLANES = 1 };                                      \
        GPU_DEVICE uint32_t pack(float lo, float hi)                                          \
        {                                                                                     \
            uint32_t pair;                                                                    \
            asm("cvt.rn." type "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));         \
            return pair;                                                                      \
        }                                                                                     \
        GPU_DEVICE float weight(float x, float unit, float base)                              \
        {                                                                                     \
            const float shift = base * unit - LIFT;                                           \
            return mma_exp2(fmaf(x, unit, -shift));                                           \
        }                                                                                     \
        GPU_DEVICE void multiply(float c[4], const uint32_t a[4], const uint32_t b[2])        \
        {                                                                                     \
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "       \
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
                         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                     \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
        }                                                                                     \
    }
MMA_TYPE(mma_f16, "f16", FATTN_F16, 7);
MMA_TYPE(mma_bf16, "bf16", FATTN_BF16, 0);

/* Read again at each use, so that values computed from them do not occupy registers in between. */
GPU_DEVICE int mma_lane(void) { return gpu_thread_anew() % GPU_WAVE; }
GPU_DEVICE int mma_warp(void) { return gpu_thread_anew() / GPU_WAVE; }

/* The shared-memory address of a pointer, for the instructions below. */
GPU_DEVICE uint32_t mma_shared(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Loads four 8 x 8 matrices (ldmatrix). Lanes 8 n .. 8 n + 7 give the addresses of the rows of
 * matrix n. */
GPU_DEVICE void mma_load(uint32_t x[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
}

/* The same, each transposed. */
GPU_DEVICE void mma_load_transposed(uint32_t x[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
}

GPU_DEVICE void mma_put(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/* Loads N words from shared memory; `from` is a multiple of 4 N. */
template <int N> GPU_DEVICE void mma_get(uint32_t from, uint32_t x[N])
{
    static_assert(N == 1 || N == 2 || N == 4, "what a load can bring");
    if constexpr (N == 1) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x[0]) : "r"(from) : "memory");
    } else if constexpr (N == 2) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(x[0]), "=r"(x[1])
                     : "r"(from)
                     : "memory");
    } else {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(from)
                     : "memory");
    }
}

/* How many bytes of chunk c exist in a row of `dim` elements. */
GPU_DEVICE int mma_chunk_bytes(int c, int dim) { return min(max(2 * dim - 16 * c, 0), 16); }

/* Begins to copy 16 bytes, of which all from `bytes` on become zeros. */
GPU_DEVICE void mma_copy(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

/* The L2 policy for bytes that are read once: evict first. */
GPU_DEVICE uint64_t mma_read_once(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* mma_copy() with an L2 policy. */
GPU_DEVICE void mma_copy_by(uint64_t policy, uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(bytes), "l"(policy)
                 : "memory");
}

GPU_DEVICE void mma_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* mma_copy() of 4 bytes: all of them, or zeros. */
GPU_DEVICE void mma_copy_word(uint32_t to, const void *from, bool exists)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 4 : 0)
                 : "memory");
}

/* mma_copy() of the first `bytes` of SIZE, 4, 8 or 16. */
template <int SIZE> GPU_DEVICE void mma_copy_small(uint32_t to, const void *from, int bytes)
{
    if constexpr (SIZE == 16) {
        mma_copy(to, from, bytes);
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
                     "n"(SIZE), "r"(bytes)
                     : "memory");
    }
}

/* Copies a chunk that may be unaligned, an element at a time. It is synchronous. */
template <class E> GPU_DEVICE void mma_copy_misaligned(uint32_t to, const E *from, int bytes)
{
    enum { SIZE = sizeof(E), EACH = 4 / SIZE };
    GPU_ROLLED
    for (int n = 0; n < 4; n++) {
        uint32_t word = 0;
        GPU_UNROLL
        for (int e = 0; e < EACH; e++) {
            const uint32_t element = 4 * n + e * SIZE < bytes ? from[EACH * n + e] : 0;
            word |= element << 8 * SIZE * e;
        }
        mma_put(to + 4 * n, word);
    }
}

/* Waits until at most N groups of this thread's copies are in flight. */
template <int N> GPU_DEVICE void mma_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Prefetches a 128-byte line of global memory to L2. */
GPU_DEVICE void mma_prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

/* Atomically adds to two adjacent floats in global memory, aligned to 8 bytes. */
GPU_DEVICE void mma_add_two(float *to, float x, float y)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 1), "f"(y) : "memory");
#endif
}

/* Atomically adds to a float in global memory, and to four that are aligned to 16 bytes. */
GPU_DEVICE void mma_add_one(float *to, float x)
{
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

GPU_DEVICE void mma_add_four(float *to, const float x[4])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        mma_add_one(to + e, x[e]);
    }
#endif
}

/* Relaxed atomic load and store of a word that blocks share. */
GPU_DEVICE int32_t mma_peek(const int32_t *from)
{
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

GPU_DEVICE void mma_poke(int32_t *to, int32_t x)
{
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

/* A fence of the device. Writes before it, by this thread and by threads that have passed a barrier
 * with it, are visible to whoever reads a word that this thread writes after it. */
GPU_DEVICE void mma_fence(void) { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/* In each half, the maximum of a, which has no sign, and |b|. */
GPU_DEVICE uint32_t mma_bf16_larger(uint32_t a, uint32_t b)
{
    uint32_t y;
    asm("{ .reg .b32 size; abs.bf16x2 size, %2; max.bf16x2 %0, %1, size; }"
        : "=r"(y)
        : "r"(a), "r"(b));
    return y;
}

/* The minimum in each half. */
template <int DTYPE> GPU_DEVICE uint32_t mma_smaller(uint32_t a, uint32_t b)
{
    uint32_t y;
    if constexpr (DTYPE == FATTN_F16) {
        asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    } else {
        asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    }
    return y;
}

/* 1 / x to an ulp. */
GPU_DEVICE float mma_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Address of chunk c of row r in a tile. */
template <int PITCH> GPU_DEVICE uint32_t mma_place(uint32_t tile, int r, int c)
{
    if (PITCH == 32) {
        return mma_place<64>(tile, r / 2, r % 2 * 4 + c);
    }
    return tile + 2 * PITCH * r + ((c ^ r & 7) << 4);
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
