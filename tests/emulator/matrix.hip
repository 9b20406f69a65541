/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every shape of matrix instruction, on operands as they lie in registers: lane l gets `values`
 * elements of A, of B and of C at l * values, and gives D likewise. Where elements of the matrices
 * lie is the business of check_matrix.c.
 */
#include "tests/emulator/device.h"

template <class T, int n> struct vector_of {
    typedef T type __attribute__((ext_vector_type(n)));
};

template <class T> struct vector_of<T, 1> {
    typedef T type;
};

/* kpl elements of A and B a lane, r of C. */
#define SHAPE(name, in, kpl, out, r, call)                                           \
    KERNEL name(out *d, const in *a, const in *b, const out *c)                      \
    {                                                                                \
        const int l = thread();                                                      \
        const vector_of<in, kpl>::type x = ((const vector_of<in, kpl>::type *)a)[l]; \
        const vector_of<in, kpl>::type y = ((const vector_of<in, kpl>::type *)b)[l]; \
        const vector_of<out, r>::type z = ((const vector_of<out, r>::type *)c)[l];   \
        ((vector_of<out, r>::type *)d)[l] = call;                                    \
    }

#define MFMA(f) f(x, y, z, 0, 0, 0)

#if GFX9
SHAPE(f16_16x16x16, _Float16, 4, float, 4, MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16))
SHAPE(f16_32x32x8, _Float16, 4, float, 16, MFMA(__builtin_amdgcn_mfma_f32_32x32x8f16))
SHAPE(bf16_16x16x16, short, 4, float, 4, MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k))
SHAPE(bf16_32x32x8, short, 4, float, 16, MFMA(__builtin_amdgcn_mfma_f32_32x32x8bf16_1k))
SHAPE(f32_16x16x4, float, 1, float, 4, MFMA(__builtin_amdgcn_mfma_f32_16x16x4f32))
SHAPE(f32_32x32x2, float, 1, float, 16, MFMA(__builtin_amdgcn_mfma_f32_32x32x2f32))
SHAPE(f64_16x16x4, double, 1, double, 4, MFMA(__builtin_amdgcn_mfma_f64_16x16x4f64))
#endif
#if GFX950
SHAPE(f16_16x16x32, _Float16, 8, float, 4, MFMA(__builtin_amdgcn_mfma_f32_16x16x32_f16))
SHAPE(f16_32x32x16, _Float16, 8, float, 16, MFMA(__builtin_amdgcn_mfma_f32_32x32x16_f16))
SHAPE(bf16_16x16x32, __bf16, 8, float, 4, MFMA(__builtin_amdgcn_mfma_f32_16x16x32_bf16))
SHAPE(bf16_32x32x16, __bf16, 8, float, 16, MFMA(__builtin_amdgcn_mfma_f32_32x32x16_bf16))

/* 16 lanes bring 4 rows of 16 elements and get 16 columns of 4. */
KERNEL transposes(unsigned long long *y, const unsigned long long *x)
{
    SHARED unsigned long long room[64];
    room[thread()] = x[thread()];
    barrier();
    const auto at = (__attribute__((address_space(3))) unsigned long long *)room + thread();
    unsigned long long d;
    asm volatile("ds_read_b64_tr_b16 %0, %1\ns_waitcnt lgkmcnt(0)" : "=v"(d) : "v"(at) : "memory");
    y[thread()] = d;
}
#endif
#if !GFX9 && !GFX12
SHAPE(f16_16x16x16, _Float16, 16, float, 8, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(x, y, z))
SHAPE(bf16_16x16x16, short, 16, float, 8, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, z))
#endif
#if GFX12
SHAPE(f16_16x16x16, _Float16, 8, float, 8,
      __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(x, y, z))
SHAPE(bf16_16x16x16, short, 8, float, 8, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(x, y, z))
#endif
