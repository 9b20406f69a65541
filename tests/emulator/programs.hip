/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small kernels as a compiler makes them, each around one part of the machine. check_emulator.c
 * computes the same on the host.
 */
#include "tests/emulator/device.h"

typedef _Float16 half;

KERNEL saxpy(float *y, const float *x, float a, long long n)
{
    const long long i = (long long)group() * 256 + thread();
    if (i < n) y[i] = __builtin_fmaf(a, x[i], y[i]);
}

/* Divisions, of floats and of integers, are long sequences. */
KERNEL divide(float *y, double *z, int *r, const float *x, const int *d, int n)
{
    const int i = group() * 256 + thread();
    if (i >= n) return;
    y[i] = y[i] / x[i];
    z[i] = z[i] / x[i];
    r[i] = r[i] % d[i] + (int)((unsigned long long)(unsigned)r[i] * (unsigned)d[i] >> 32);
}

/* 16-bit types, scalar and in pairs. */
KERNEL halves(half *h, __bf16 *b, const half *x, const __bf16 *y, int n)
{
    const int i = group() * 256 + thread();
    if (i >= n) return;
    h[i] = h[i] * x[i] + (half)(float)y[i];
    b[i] = (__bf16)((float)b[i] * (float)y[i] + (float)x[i]);
}

/* Sums of 256 numbers through LDS; BARRIER makes the mutation. */
template <bool with_barrier> DEVICE void sum(float *y, const float *x, float *room)
{
    const int t = thread();
    room[t] = x[group() * 256 + t];
    for (int width = 128; width > 0; width /= 2) {
        if (with_barrier || width != 64) barrier();
        if (t < width) room[t] += room[t + width];
    }
    if (t == 0) y[group()] = room[0];
}

KERNEL sum_whole(float *y, const float *x)
{
    SHARED float room[256];
    sum<true>(y, x, room);
}

KERNEL sum_without_a_barrier(float *y, const float *x)
{
    SHARED float room[256];
    sum<false>(y, x, room);
}

/* LDS whose size the launch gives: reverses a block of n. */
KERNEL reverse(int *y, const int *x, int n)
{
    extern __attribute__((shared)) int room[];
    const int t = thread();
    if (t < n) room[t] = x[group() * n + t];
    barrier();
    if (t < n) y[group() * n + t] = room[n - 1 - t];
}

/* Reads an undefined value: room[n - 1] if one lane too few writes. */
KERNEL forgets(int *y, const int *x, int written)
{
    SHARED int room[256];
    const int t = thread();
    if (t < written) room[t] = x[t];
    barrier();
    y[t] = room[t];
}

/* Two lanes write to one place: that is nothing only if they agree. */
KERNEL agrees(int *y, const int *x)
{
    SHARED int room[32];
    const int t = thread();
    room[t % 32 / 2] = x[t];
    barrier();
    y[t] = room[t % 16];
}

KERNEL counts(unsigned *histogram, float *total, unsigned *largest, const unsigned *x)
{
    SHARED unsigned room[16];
    const int t = thread();
    if (t < 16) room[t] = 0;
    barrier();
    const unsigned value = x[group() * 256 + t];
    __scoped_atomic_fetch_add(&room[value % 16], 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    barrier();
    if (t < 16)
        __scoped_atomic_fetch_add(&histogram[t], room[t], __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    __scoped_atomic_fetch_max(largest, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    __scoped_atomic_fetch_add(total, (float)(value % 16), __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

/* Lanes `stride` dwords apart: bank conflicts that can be counted by hand. */
KERNEL strided(int *y, int stride)
{
    SHARED int room[64 * 33];
    const int t = thread();
    room[t * stride] = t;
    barrier();
    y[t] = room[t * stride];
}

/* An array that registers cannot hold, in memory of each lane's own. */
KERNEL privates(int *y, const int *x)
{
    int room[40];
    const int t = thread();
    for (int n = 0; n < 40; n++) room[n] = x[t] + n * n;
    asm volatile("" ::"v"(room) : "memory");
    y[t] = room[x[t] % 40];
}

/* A pointer that is of LDS in odd lanes and of memory in even ones. */
KERNEL generic(int *y, int *x)
{
    SHARED int room[64];
    const int t = thread();
    room[t] = 1000 + t;
    barrier();
    int *const p = t % 2 ? room : x;
    asm volatile("" ::: "memory");
    y[t] = p[63 - t];
    p[63 - t] = -t;
    barrier();
    y[64 + t] = room[t];
}

/* Through a descriptor of n bytes: reads behind them give 0, writes vanish. */
KERNEL buffer(int *y, int *x, int n)
{
    const int t = thread();
    const __amdgpu_buffer_rsrc_t of_x = __builtin_amdgcn_make_buffer_rsrc(x, 0, n, 0x27000);
    const __amdgpu_buffer_rsrc_t of_y = __builtin_amdgcn_make_buffer_rsrc(y, 0, n, 0x27000);
    const int value = __builtin_amdgcn_raw_buffer_load_b32(of_x, 4 * t, 0, 0);
    __builtin_amdgcn_raw_buffer_store_b32(value + 1, of_y, 4 * t, 0, 0);
    y[256 + t] = value;
}

#if GFX9
/* From memory to LDS without a register between. */
KERNEL to_lds(int *y, int *x)
{
    SHARED int room[64 + 1];
    const int t = thread();
    typedef __attribute__((address_space(3))) int local;
    __builtin_amdgcn_global_load_lds((__attribute__((address_space(1))) int *)x + 63 - t,
                                     (local *)room + 1, 4, 0, 0);
    barrier();
    y[t] = room[1 + t];
}
#endif

KERNEL endless(int *y)
{
    while (__atomic_load_n(y, __ATOMIC_RELAXED) == 0)
        ;
}

/* A workspace of which only the first n elements are written. */
KERNEL reads_workspace(int *y, int *workspace, int n)
{
    const int t = thread();
    if (t < n) workspace[t] = t;
    barrier();
    y[t] = workspace[t];
}

__attribute__((device, used)) int a_variable = 42;
__attribute__((constant)) extern const int a_table[4] = {10, 20, 30, 40};

KERNEL tables(int *y) { y[thread()] = a_table[thread() & 3] + a_variable; }
