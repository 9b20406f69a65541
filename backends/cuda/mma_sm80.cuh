/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor core products of Ampere and later GPUs: a warp multiplies a 16 x 16 tile by a 16 x 8 tile
 * of 16-bit elements and accumulates in 16 x 8 floats (mma.sync.m16n8k16). Operands come from
 * shared memory, which asynchronous copies of 16 bytes fill (cp.async). This file has the
 * instructions, and mma_products.cuh the products of tiles.
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

/* a * b + c in each half, of f16, rounded once. Subnormal numbers are not flushed. */
GPU_DEVICE uint32_t mma_f16_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

/* Two numbers of e4m3, the first in the lower byte, as f16, on GPUs that have an instruction for
 * it: if MMA_CONVERTS_E4M3. */
#if __CUDA_ARCH__ >= 900
#define MMA_CONVERTS_E4M3 true
#else
#define MMA_CONVERTS_E4M3 false
#endif
GPU_DEVICE uint32_t mma_f16_from_e4m3(uint16_t two)
{
    uint32_t y = two;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(two));
#endif
    return y;
}

/* 1 / x to an ulp. */
GPU_DEVICE float mma_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#include "backends/cuda/mma_products.cuh"

#endif
