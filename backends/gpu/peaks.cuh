/* SPDX-License-Identifier: Apache-2.0 */
/* The peak loops of a GPU (core/peak.h): multiply-adds alone, and memory reads alone. One block per
 * multiprocessor. */
#ifndef FATTN_GPU_PEAKS_CUH
#define FATTN_GPU_PEAKS_CUH

#include "backends/gpu/args.h"

/* Each thread runs 16 independent chains of multiply-adds, enough to hide their latency. The
 * compiler cannot know the total, so it must compute it. The total never equals -1, so nothing is
 * written. */
GPU_KERNEL(FATTN_GPU_PEAK_THREADS, 1) peak_fma(const GPU_PARAM fattn_gpu_peak_args a)
{
    enum { CHAINS = 16 };
    float sum[CHAINS], total = 0;
    GPU_UNROLL
    for (int n = 0; n < CHAINS; n++) {
        sum[n] = (float)(gpu_thread() + n);
    }
    gpu_sync();
    const uint64_t start = gpu_cycles();
    GPU_ROLLED
    for (int round = (int)a.rounds; round > 0; round--) { /* 32 bits: a cheaper loop counter */
        GPU_UNROLL
        for (int step = 0; step < FATTN_GPU_PEAK_FMAS / CHAINS; step++) {
            GPU_UNROLL
            for (int n = 0; n < CHAINS; n++) {
                sum[n] = fmaf(a.factor, sum[n], a.summand);
            }
        }
    }
    GPU_UNROLL
    for (int n = 0; n < CHAINS; n++) {
        total += sum[n];
    }
    if (total == -1) {
        a.out[gpu_blocks()] = 1;
    }
    gpu_sync();
    if (gpu_thread() == 0) {
        a.out[gpu_block()] = (gpu_cycles() - start) & GPU_CYCLES;
    }
}

/* Reads `bytes`, a multiple of 16, `rounds` times, as integers: unlike floats, all of them add
 * equally fast. */
GPU_KERNEL(FATTN_GPU_PEAK_THREADS, 1) peak_read(const GPU_PARAM fattn_gpu_peak_args a)
{
    enum { AT_ONCE = 8 };
    const gpu_u4 *const data = (const gpu_u4 *)a.data;
    const int64_t count = a.bytes / 16, step = gpu_blocks() * gpu_threads();
    uint64_t sum = 0;
    GPU_ROLLED
    for (int64_t round = 0; round < a.rounds; round++) {
        int64_t n = gpu_block() * gpu_threads() + gpu_thread();
        GPU_ROLLED
        for (; n + (AT_ONCE - 1) * step < count; n += AT_ONCE * step) {
            GPU_UNROLL
            for (int e = 0; e < AT_ONCE; e++) {
                const gpu_u4 x = data[n + e * step];
                sum += x.x + x.y + x.z + x.w;
            }
        }
        for (; n < count; n += step) {
            sum += data[n].x;
        }
    }
    if (sum == UINT64_MAX) {
        a.out[gpu_blocks()] = sum;
    }
}

#endif
