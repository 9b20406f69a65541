/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CUDA's words for what device code says in neutral ones. A vendor's header is the first that a
 * kernel file includes.
 *
 *     GPU_KERNEL(threads, blocks)   opens a kernel: most threads of a block, and blocks that should
 *                                   fit a multiprocessor, which AMD's compiler is not told
 *     GPU_WAVES(waves)              AMD's alone, after that: waves that should fit a SIMD
 *     GPU_CLUSTER(blocks)           NVIDIA's alone, after that: blocks that run side by side and
 *                                   reach each other's shared memory
 *     GPU_PARAM                     marks its parameter, which is then read where it lies
 *     GPU_DEVICE GPU_SHARED GPU_UNROLL
 *     GPU_ROLLED                    before a loop that stays one
 *     GPU_WAVE                      threads that run together
 *     gpu_thread gpu_threads gpu_block gpu_blocks    numbers along the one axis that is used
 *     gpu_thread_anew               gpu_thread, read each time: the compiler computes addresses
 *                                   from it where they are used, not all of them before the first
 *                                   loop, where they would fill the registers
 *     gpu_anew(x)                   x, a kernel's arguments or a number: what is computed from it
 *                                   is computed where it is used, and does not wait in registers
 *     gpu_uniform(x)                an x that is the same for all threads of a wave, where the
 *                                   compiler cannot know it
 *     GPU_EARLY(sums)               whether beside so many sums a thread has registers for operands
 *                                   that are on their way, when it has a block's share of them
 *     gpu_sync                      all threads of the block, and what they wrote to shared memory
 *     gpu_sync_memory               the same, and what they wrote to memory
 *     gpu_any(x)                    gpu_sync, and whether any thread's x is not 0
 *     gpu_shfl_xor(x, n)            x of thread gpu_thread() ^ n, n < GPU_WAVE; all of a wave ask,
 *                                   as for gpu_shfl
 *     gpu_await_earlier             waits for what the stream holds before the kernel, where it was
 *                                   launched early; nothing that may be written there is read, and
 *                                   nothing written at all, before
 *     gpu_admit_later               lets the kernel after it start, where that is launched early
 *     gpu_shfl(x, n)                x of number n of the 32 threads that this one is of
 *     gpu_peek(from) gpu_poke(to, x)    64-bit words that blocks of a kernel share, each read and
 *                                   written whole
 *     gpu_compare_and_swap(at, from, to)    writes `to` if the word is `from`
 *     gpu_count(at)                 adds 1, and returns what was there; what a block did before its
 *                                   barrier and count is there for blocks that count after it
 *     gpu_add(to, x)                AMD's alone: adds to a float of the workspace
 *     gpu_cycles                    cycles of the unit that this thread runs on
 *     GPU_CYCLES                    the bits that are counted in
 *     gpu_max                       the larger; a NaN may be dropped
 *     gpu_f16_to_f32 gpu_f16_from_f32
 *     gpu_f2 gpu_f4 gpu_u2 gpu_u4   2 and 4 floats, 2 and 4 words, aligned to their size
 */
#ifndef FATTN_CUDA_VENDOR_H
#define FATTN_CUDA_VENDOR_H

#include <stdint.h>

#define GPU_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define GPU_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#define GPU_PARAM __grid_constant__
#define GPU_DEVICE static __device__ __forceinline__
#define GPU_SHARED __shared__
#define GPU_UNROLL _Pragma("unroll")
#define GPU_ROLLED _Pragma("unroll 1")
#define GPU_WAVE 32
#define GPU_EARLY(sums) ((sums) <= 128)

typedef float2 gpu_f2;
typedef float4 gpu_f4;
typedef uint2 gpu_u2;
typedef uint4 gpu_u4;

GPU_DEVICE int gpu_thread(void) { return (int)threadIdx.x; }
GPU_DEVICE int gpu_thread_anew(void)
{
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}
/* Arguments are operands of instructions here, and registers hold what is uniform like the rest. */
template <class T> GPU_DEVICE const T &gpu_anew(const T &x) { return x; }
GPU_DEVICE int gpu_uniform(int x) { return x; }
GPU_DEVICE int64_t gpu_uniform(int64_t x) { return x; }
GPU_DEVICE int gpu_threads(void) { return (int)blockDim.x; }
GPU_DEVICE int64_t gpu_block(void) { return blockIdx.x; }
GPU_DEVICE int64_t gpu_blocks(void) { return gridDim.x; }
GPU_DEVICE void gpu_sync(void) { __syncthreads(); }
GPU_DEVICE void gpu_sync_memory(void) { __syncthreads(); }
GPU_DEVICE bool gpu_any(bool x) { return __syncthreads_or(x) != 0; }
GPU_DEVICE float gpu_shfl_xor(float x, int n) { return __shfl_xor_sync(0xffffffffu, x, n); }
GPU_DEVICE void gpu_await_earlier(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
GPU_DEVICE void gpu_admit_later(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
GPU_DEVICE float gpu_shfl(float x, int n) { return __shfl_sync(0xffffffffu, x, n); }

GPU_DEVICE uint64_t gpu_peek(const uint64_t *from)
{
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}
GPU_DEVICE void gpu_poke(uint64_t *to, uint64_t x)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
GPU_DEVICE void gpu_compare_and_swap(uint64_t *at, uint64_t from, uint64_t to)
{
    asm volatile("{ .reg .b64 old; atom.relaxed.gpu.global.cas.b64 old, [%0], %1, %2; }" ::"l"(at),
                 "l"(from), "l"(to)
                 : "memory");
}
GPU_DEVICE uint64_t gpu_count(uint64_t *at)
{
    uint64_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(old) : "l"(at) : "memory");
    return old;
}

#define GPU_CYCLES UINT64_MAX
GPU_DEVICE uint64_t gpu_cycles(void) { return (uint64_t)clock64(); }
GPU_DEVICE float gpu_max(float a, float b) { return fmaxf(a, b); }

GPU_DEVICE float gpu_f16_to_f32(uint16_t x)
{
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

GPU_DEVICE uint16_t gpu_f16_from_f32(float x)
{
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

#endif
