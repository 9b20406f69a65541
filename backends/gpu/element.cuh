/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads and stores of elements in global memory, which are floats in registers. The element type is
 * a run-time value that is the same for all threads. The branch on it costs nothing beside the
 * memory access, and so one kernel serves all types.
 */
#ifndef FATTN_GPU_ELEMENT_CUH
#define FATTN_GPU_ELEMENT_CUH

#include "backends/gpu/args.h"

/* Rounds to nearest, ties to even. A NaN stays a NaN, and infinity, whose lower bits are 0, stays
 * infinity. */
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

/* Four elements as raw bits: a word holds one float or two 16-bit elements. Code that only moves
 * them does not wait for a conversion. */
typedef struct gpu_quad {
    uint32_t word[4];
} gpu_quad;

/* Reads channels c .. c + 3 of the row that begins at element `at`; c is a multiple of 4. Channels
 * past the last are 0, and so are all if at < 0. */
GPU_DEVICE gpu_quad gpu_fetch_quad(const gpu_tensor &t, int64_t at, int c)
{
    gpu_quad quad = {{0, 0, 0, 0}};
    if (at < 0 || c >= t.dim) {
        return quad;
    }
    const bool whole = t.quads && c + 4 <= t.dim;
    if (t.dtype == FATTN_F32) {
        const float *const row = (const float *)t.data + at + c;
        if (whole) {
            const gpu_f4 four = *(const gpu_f4 *)row;
            quad.word[0] = fattn_f32_bits(four.x), quad.word[1] = fattn_f32_bits(four.y);
            quad.word[2] = fattn_f32_bits(four.z), quad.word[3] = fattn_f32_bits(four.w);
            return quad;
        }
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            quad.word[e] = c + e < t.dim ? fattn_f32_bits(row[e]) : 0;
        }
        return quad;
    }
    const uint16_t *const row = (const uint16_t *)t.data + at + c;
    if (whole) {
        const gpu_u2 four = *(const gpu_u2 *)row;
        quad.word[0] = four.x, quad.word[1] = four.y;
        return quad;
    }
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        quad.word[e / 2] |= c + e < t.dim ? (uint32_t)row[e] << e % 2 * 16 : 0;
    }
    return quad;
}

GPU_DEVICE void gpu_unpack_quad(const gpu_tensor &t, gpu_quad quad, float x[4])
{
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        x[e] = t.dtype == FATTN_F32
                   ? fattn_f32_from_bits(quad.word[e])
                   : gpu_widen(t.dtype, (uint16_t)(quad.word[e / 2] >> e % 2 * 16));
    }
}

GPU_DEVICE void gpu_load_quad(const gpu_tensor &t, int64_t at, int c, float x[4])
{
    gpu_unpack_quad(t, gpu_fetch_quad(t, at, c), x);
}

/* Keys or values of a forward: a tensor that may be of e4m3 too. It has a type of its own, and
 * loads of its own, so that kernels without such tensors have no code for them. */
typedef struct gpu_cache {
    gpu_tensor tensor;
} gpu_cache;

GPU_DEVICE gpu_cache gpu_cache_k(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    gpu_cache t;
    t.tensor = gpu_tensor_of(g, g.buffers.k, p.dtype_kv, FATTN_GPU_QUADS_K, p.dim);
    return t;
}

GPU_DEVICE gpu_cache gpu_cache_v(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    gpu_cache t;
    t.tensor = gpu_tensor_of(g, g.buffers.v, p.dtype_v, FATTN_GPU_QUADS_V, p.dim_v);
    return t;
}

/* The same for a cache. Four elements of e4m3 are one word. */
GPU_DEVICE gpu_quad gpu_fetch_quad(const gpu_cache &cache, int64_t at, int c)
{
    const gpu_tensor &t = cache.tensor;
    if (t.dtype != FATTN_E4M3) {
        return gpu_fetch_quad(t, at, c);
    }
    gpu_quad quad = {{0, 0, 0, 0}};
    if (at < 0 || c >= t.dim) {
        return quad;
    }
    const uint8_t *const row = (const uint8_t *)t.data + at + c;
    if (t.quads && c + 4 <= t.dim) {
        quad.word[0] = *(const uint32_t *)row;
        return quad;
    }
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        quad.word[0] |= c + e < t.dim ? (uint32_t)row[e] << e * 8 : 0;
    }
    return quad;
}

GPU_DEVICE void gpu_unpack_quad(const gpu_cache &cache, gpu_quad quad, float x[4])
{
    if (cache.tensor.dtype != FATTN_E4M3) {
        gpu_unpack_quad(cache.tensor, quad, x);
        return;
    }
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        x[e] = fattn_e4m3_to_f32((uint8_t)(quad.word[0] >> e * 8));
    }
}

/* Returns sum + a . b over channels c .. c + 3 of two rows. */
GPU_DEVICE float gpu_add_products(const gpu_tensor &a, int64_t a_at, const gpu_tensor &b,
                                  int64_t b_at, int c, float sum)
{
    float x[4], y[4];
    gpu_load_quad(a, a_at, c, x);
    gpu_load_quad(b, b_at, c, y);
    GPU_UNROLL
    for (int e = 0; e < 4; e++) {
        sum = fmaf(x[e], y[e], sum);
    }
    return sum;
}

/* Stores four channels, those of them that exist. */
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

/* Stores the first `live` of eight 16-bit elements. whole: all eight exist, and `to` is aligned to
 * 16 bytes. */
GPU_DEVICE void gpu_store_eight(uint16_t *to, gpu_u4 eight, int live, bool whole)
{
    if (whole) {
        *(gpu_u4 *)to = eight;
        return;
    }
    const uint32_t word[4] = {eight.x, eight.y, eight.z, eight.w};
    GPU_UNROLL
    for (int e = 0; e < 8; e++) {
        if (e < live) {
            to[e] = (uint16_t)(word[e / 2] >> e % 2 * 16);
        }
    }
}

#endif
