/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elements in global memory, as floats. The type is a number that is the same for all threads of a
 * kernel: reading takes a branch that costs nothing beside the access, and one kernel serves all
 * types.
 */
#ifndef FATTN_GPU_ELEMENT_CUH
#define FATTN_GPU_ELEMENT_CUH

#include "backends/gpu/args.h"

/* To nearest, ties to even; a NaN stays one. Infinity has no lower bits, so it stays too. */
GPU_DEVICE uint16_t gpu_bf16_from_f32(float x)
{
    const uint32_t bits = fattn_f32_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & INT32_MAX) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

GPU_DEVICE float gpu_widen(fattn_dtype dtype, uint16_t x)
{
    return dtype == FATTN_F16 ? gpu_f16_to_f32(x) : fattn_bf16_to_f32(x);
}

GPU_DEVICE uint16_t gpu_narrow(fattn_dtype dtype, float x)
{
    return dtype == FATTN_F16 ? gpu_f16_from_f32(x) : gpu_bf16_from_f32(x);
}

GPU_DEVICE float gpu_load(const void *array, fattn_dtype dtype, int64_t at)
{
    return dtype == FATTN_F32 ? ((const float *)array)[at]
                              : gpu_widen(dtype, ((const uint16_t *)array)[at]);
}

GPU_DEVICE void gpu_store(void *array, fattn_dtype dtype, int64_t at, float x)
{
    if (dtype == FATTN_F32) {
        ((float *)array)[at] = x;
    } else {
        ((uint16_t *)array)[at] = gpu_narrow(dtype, x);
    }
}

/* A tensor: rows of `dim` channels. quads: four channels may be read at once. */
typedef struct gpu_tensor {
    void *data;
    fattn_dtype dtype;
    bool quads;
    int dim;
} gpu_tensor;

GPU_DEVICE gpu_tensor gpu_tensor_of(const fattn_gpu_args &g, const void *data, fattn_dtype dtype,
                                    unsigned quads, int64_t dim)
{
    gpu_tensor t;
    t.data = (void *)data;
    t.dtype = dtype;
    t.quads = g.quads & quads;
    t.dim = (int)dim;
    return t;
}

/* Channels c .. c + 3 of the row that begins at element `at`: zeros past the last, and for at < 0.
 * c is a multiple of 4. */
GPU_DEVICE void gpu_load_quad(const gpu_tensor &t, int64_t at, int c, float x[4])
{
    x[0] = x[1] = x[2] = x[3] = 0;
    if (at < 0 || c >= t.dim) {
        return;
    }
    if (!t.quads || c + 4 > t.dim) {
        for (int e = 0; e < 4 && c + e < t.dim; e++) {
            x[e] = gpu_load(t.data, t.dtype, at + c + e);
        }
    } else if (t.dtype == FATTN_F32) {
        const gpu_f4 four = *(const gpu_f4 *)((const float *)t.data + at + c);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
        const gpu_u2 four = *(const gpu_u2 *)((const uint16_t *)t.data + at + c);
        x[0] = gpu_widen(t.dtype, (uint16_t)four.x);
        x[1] = gpu_widen(t.dtype, (uint16_t)(four.x >> 16));
        x[2] = gpu_widen(t.dtype, (uint16_t)four.y);
        x[3] = gpu_widen(t.dtype, (uint16_t)(four.y >> 16));
    }
}

/* The inverse, for the channels that exist. */
GPU_DEVICE void gpu_store_quad(const gpu_tensor &t, int64_t at, int c, const float x[4])
{
    if (!t.quads || c + 4 > t.dim) {
        for (int e = 0; e < 4 && c + e < t.dim; e++) {
            gpu_store(t.data, t.dtype, at + c + e, x[e]);
        }
    } else if (t.dtype == FATTN_F32) {
        gpu_f4 four;
        four.x = x[0], four.y = x[1], four.z = x[2], four.w = x[3];
        *(gpu_f4 *)((float *)t.data + at + c) = four;
    } else {
        gpu_u2 four;
        four.x = gpu_narrow(t.dtype, x[0]) | (uint32_t)gpu_narrow(t.dtype, x[1]) << 16;
        four.y = gpu_narrow(t.dtype, x[2]) | (uint32_t)gpu_narrow(t.dtype, x[3]) << 16;
        *(gpu_u2 *)((uint16_t *)t.data + at + c) = four;
    }
}

#endif
