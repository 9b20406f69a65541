/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The words of vendor-neutral device code, as CUDA defines them. A kernel file includes its
 * vendor's header first.
 *
 *     GPU_KERNEL(threads, blocks)   begins a kernel: the most threads of a block, and the blocks
 *                                   that should fit a multiprocessor (AMD's compiler ignores these)
 *     GPU_WAVES(waves)              after GPU_KERNEL, AMD only: waves that should fit a SIMD
 *     GPU_CLUSTER(blocks)           after GPU_KERNEL, NVIDIA only: blocks of a cluster, which run
 *                                   at the same time and access each other's shared memory
 *     GPU_PARAM                     marks the kernel's parameter, which is read in constant memory
 *                                   and not copied to local memory
 *     GPU_DEVICE GPU_SHARED GPU_UNROLL
 *     GPU_ROLLED                    before a loop that must not be unrolled
 *     GPU_WAVE                      threads of a warp or wavefront
 *     gpu_thread gpu_threads gpu_block gpu_blocks    numbers along the one axis that is used
 *     gpu_thread_anew               gpu_thread, read again at each use, so that the compiler
 *                                   computes addresses from it where they are used, instead of
 *                                   keeping them all in registers from before the first loop
 *     gpu_anew(x)                   x, the kernel's arguments or a number: for the same reason, the
 *                                   compiler computes values from it where they are used
 *     gpu_uniform(x)                x, which the caller knows to be the same for all threads of a
 *                                   wave; the compiler may keep it in a scalar register
 *     GPU_EARLY(sums)               whether a thread that holds `sums` sums has registers left to
 *                                   prefetch operands, at the occupancy that its kernel declares
 *     gpu_sync                      barrier of the block; orders its accesses to shared memory
 *     gpu_sync_memory               the same, and orders its accesses to global memory
 *     gpu_any(x)                    gpu_sync, and returns whether any thread's x is not 0
 *     gpu_shfl_xor(x, n)            x of thread gpu_thread() ^ n, n < GPU_WAVE; all threads of a
 *                                   wave must call it, and gpu_shfl
 *     gpu_await_earlier             if launched early, waits for earlier work in the stream. Before
 *                                   it, a kernel reads nothing that this work may write, and writes
 *                                   nothing (griddepcontrol.wait)
 *     gpu_admit_later               allows the next kernel to start, if that is launched early
 *                                   (griddepcontrol.launch_dependents)
 *     gpu_shfl(x, n)                x of thread n of the 32 aligned threads that this one is in
 *     gpu_peek(from) gpu_poke(to, x)    relaxed atomic load and store of a 64-bit word that blocks
 *                                   share
 *     gpu_compare_and_swap(at, from, to)    atomically writes `to` if the word is `from`; relaxed
 *     gpu_count(at)                 atomically adds 1 and returns the old value, with acquire and
 *                                   release: what a block wrote before a barrier and its count is
 *                                   visible to blocks that count after it
 *     gpu_add(to, x)                AMD only: atomically adds to a float of the workspace
 *     gpu_cycles                    cycle counter of this thread's multiprocessor
 *     GPU_CYCLES                    mask of the bits that it counts in
 *     gpu_max                       the maximum; a NaN may be dropped
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
/* These do nothing here: instructions have kernel arguments as operands, and uniform values need no
 * special registers. */
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
