/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words of vendor-neutral device code, as AMD's GPUs need them; backends/cuda/vendor.h explains
 * the words. clang alone compiles this: the attributes and builtins are the compiler's own, so
 * neither ROCm's headers nor its device libraries are needed.
 */
#ifndef FATTN_HIP_VENDOR_H
#define FATTN_HIP_VENDOR_H

#include <stddef.h>
#include <stdint.h>

/* A block has exactly that many threads. The occupancy is left to the compiler, because one number
 * of blocks would not suit every chip. */
#define GPU_KERNEL(threads, blocks)    \
    extern "C" __attribute__((global)) \
    __attribute__((amdgpu_flat_work_group_size(threads, threads))) void
/* Before a kernel's name: at least `waves` waves should fit a SIMD. */
#define GPU_WAVES(waves) __attribute__((amdgpu_waves_per_eu(waves)))
#define GPU_PARAM
#define GPU_MEMBER inline __attribute__((device)) __attribute__((always_inline))
#define GPU_DEVICE static GPU_MEMBER
#define GPU_SHARED __attribute__((shared))
#define GPU_UNROLL _Pragma("unroll")
#define GPU_ROLLED _Pragma("unroll 1")

/* A wave has 64 threads on GCN and CDNA, and 32 on RDNA as it is compiled for here. */
#if defined(__GFX9__)
#define GPU_WAVE 64
#else
#define GPU_WAVE 32
#endif

/* Which matrix instructions a processor has: MFMA, or WMMA of gfx11 or of gfx12. gfx1250 has
 * others, for which there is no code. */
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define MATRIX_MFMA 1
#else
#define MATRIX_MFMA 0
#endif
#if defined(__GFX11__)
#define MATRIX_WMMA 11
#elif defined(__gfx1200__) || defined(__gfx1201__)
#define MATRIX_WMMA 12
#else
#define MATRIX_WMMA 0
#endif

#define GPU_EARLY(sums) ((sums) < 128)

/* Functions of the C library that the core's headers call. */
#define exp2f __builtin_exp2f
#define log2f __builtin_log2f
#define fmaf __builtin_fmaf

struct alignas(8) gpu_f2 {
    float x, y;
};
struct alignas(16) gpu_f4 {
    float x, y, z, w;
};
struct alignas(8) gpu_u2 {
    uint32_t x, y;
};
struct alignas(16) gpu_u4 {
    uint32_t x, y, z, w;
};

GPU_DEVICE int gpu_thread(void) { return (int)__builtin_amdgcn_workitem_id_x(); }

/* The compiler cannot see through the empty asm statement, so it computes values from its result
 * only after it. */
GPU_DEVICE int gpu_thread_anew(void)
{
    int x = gpu_thread();
    asm volatile("" : "+v"(x));
    return x;
}

/* The kernel's parameter, which is at the beginning of the kernarg segment. */
template <class T> GPU_DEVICE const T &gpu_anew(const T &)
{
    typedef __attribute__((address_space(4))) const T *constant;
    constant args = (constant)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(args));
    return *(const T *)args;
}

/* For a 64-bit number, which must be uniform and stays in scalar registers; and for a 32-bit number
 * or a float, which moves to a vector register, so that vectors of it take no scalar registers. */
GPU_DEVICE int64_t gpu_anew(int64_t x)
{
    asm volatile("" : "+s"(x));
    return x;
}
GPU_DEVICE int gpu_anew(int x)
{
    asm volatile("" : "+v"(x));
    return x;
}
GPU_DEVICE float gpu_anew(float x)
{
    asm volatile("" : "+v"(x));
    return x;
}

GPU_DEVICE int gpu_uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
GPU_DEVICE int64_t gpu_uniform(int64_t x)
{
    const int low = __builtin_amdgcn_readfirstlane((int)x);
    const int high = __builtin_amdgcn_readfirstlane((int)(x >> 32));
    return (int64_t)((uint64_t)(uint32_t)high << 32 | (uint32_t)low);
}

GPU_DEVICE int gpu_threads(void) { return (int)__builtin_amdgcn_workgroup_size_x(); }
GPU_DEVICE int64_t gpu_block(void) { return __builtin_amdgcn_workgroup_id_x(); }
GPU_DEVICE int64_t gpu_blocks(void)
{
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
}

/* The fences order shared memory alone. If they ordered global memory too, RDNA would invalidate
 * its caches at each barrier. */
GPU_DEVICE void gpu_sync(void)
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

/* Each thread releases to the whole device. For a release to the block alone, GFX9 does not wait
 * for the thread's stores, and the block could then be counted as finished while stores of other
 * waves are still in flight. */
GPU_DEVICE void gpu_sync_memory(void)
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

/* The first barrier: all threads have read the result of the call before, which is cleared next. */
GPU_DEVICE bool gpu_any(bool x)
{
    GPU_SHARED uint32_t seen;
    gpu_sync();
    if (gpu_thread() == 0) {
        seen = 0;
    }
    gpu_sync();
    if (x) {
        __hip_atomic_fetch_or(&seen, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    }
    gpu_sync();
    return seen != 0;
}

GPU_DEVICE float gpu_shfl_xor(float x, int n)
{
    const int from = (gpu_thread() % GPU_WAVE ^ n) * 4;
    return __builtin_bit_cast(float,
                              __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, x)));
}

GPU_DEVICE float gpu_shfl(float x, int n)
{
    const int from = (gpu_thread() % GPU_WAVE / 32 * 32 + n) * 4;
    return __builtin_bit_cast(float,
                              __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, x)));
}

/* Not needed: kernels of a stream do not overlap. */
GPU_DEVICE void gpu_await_earlier(void) {}
GPU_DEVICE void gpu_admit_later(void) {}

/* A single instruction that adds in L2. It has no effect on fine-grained memory, so it may be used
 * for the workspace alone. */
GPU_DEVICE void gpu_add(float *to, float x)
{
    [[clang::atomic(no_remote_memory, no_fine_grained_memory, ignore_denormal_mode)]]
    {
        (void)__hip_atomic_fetch_add(to, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    }
}

GPU_DEVICE uint64_t gpu_peek(const uint64_t *from)
{
    return __hip_atomic_load(from, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
GPU_DEVICE void gpu_poke(uint64_t *to, uint64_t x)
{
    __hip_atomic_store(to, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
GPU_DEVICE void gpu_compare_and_swap(uint64_t *at, uint64_t from, uint64_t to)
{
    (void)__hip_atomic_compare_exchange_strong(at, &from, to, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                               __HIP_MEMORY_SCOPE_AGENT);
}
GPU_DEVICE uint64_t gpu_count(uint64_t *at)
{
    return __hip_atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}

GPU_DEVICE uint64_t gpu_cycles(void) { return __builtin_readcyclecounter(); }
#if defined(__GFX11__)
#define GPU_CYCLES 0xfffff
#else
#define GPU_CYCLES UINT64_MAX
#endif

GPU_DEVICE float gpu_max(float a, float b) { return __builtin_fmaxf(a, b); }

GPU_DEVICE float gpu_f16_to_f32(uint16_t x) { return (float)__builtin_bit_cast(_Float16, x); }
GPU_DEVICE uint16_t gpu_f16_from_f32(float x) { return __builtin_bit_cast(uint16_t, (_Float16)x); }

/* The processor that this code was compiled for. The runtime picks one of the code objects, and has
 * no function that tells which. */
extern "C" __attribute__((device, used)) char fattn_target[16] = __amdgcn_processor__;

#endif
