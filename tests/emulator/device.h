/* SPDX-License-Identifier: Apache-2.0 */
/* The words that the emulator's test kernels need, without any header of ROCm. */
#ifndef FATTN_TESTS_EMULATOR_DEVICE_H
#define FATTN_TESTS_EMULATOR_DEVICE_H

#define KERNEL extern "C" __attribute__((global)) void
#define DEVICE static inline __attribute__((device))
#define SHARED __attribute__((shared)) static

DEVICE int thread() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEVICE int group() { return (int)__builtin_amdgcn_workgroup_id_x(); }

DEVICE void barrier()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define GFX9 1
#define WAVE 64
#else
#define GFX9 0
#define WAVE 32
#endif
#if defined(__gfx1200__)
#define GFX12 1
#else
#define GFX12 0
#endif
#if defined(__gfx950__)
#define GFX950 1
#else
#define GFX950 0
#endif
#if defined(__gfx90a__)
#define GFX90A 1
#else
#define GFX90A 0
#endif

#endif
