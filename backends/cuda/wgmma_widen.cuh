/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys and values that are stored in e4m3, in forward on Hopper (wgmma_forward.cuh). No instruction
 * multiplies operands of 16 and of 8 bits, so stored bytes are widened in shared memory, once for
 * all rows of an item:
 *
 *     the copier      copies panels of stored bytes, 128 of each key, to a ring of their own
 *     the wideners    convert each panel to f16, exactly, where the warpgroups' operands are. They
 *                     are a warpgroup of their own. Beside three consumer warpgroups there are no
 *                     registers for it, and two warps of the producer warpgroup do its work
 *
 * Products are of f16 even if the queries are bf16, to which e4m3 takes several instructions to
 * convert. Such queries are scaled and rounded to f16 once an item: see wgmma_own_queries().
 */
#ifndef FATTN_CUDA_WGMMA_WIDEN_CUH
#define FATTN_CUDA_WGMMA_WIDEN_CUH

#include "backends/cuda/mma_e4m3.cuh"
#include "backends/cuda/wgmma_forward_softmax.cuh"

/* --- Keys and values -------------------------------------------------------------------------- */

/* Widens a warp's share of a stored panel to PANELS panels of 64 channels. Rows of both have 128
 * bytes and are swizzled alike. The next chunks are loaded while some are converted. */
template <class S, int PANELS>
GPU_DEVICE void wgmma_widen_panel(uint32_t from, uint32_t to, int warp)
{
    enum { STEP = S::WIDENERS * WGMMA_WIDENED }; /* keys */
    enum { COUNT = S::KEYS / STEP * PANELS, BATCH = 2 };
    static_assert(S::KEYS % STEP == 0 && COUNT % BATCH == 0, "whole steps");
    const wgmma_widener own = wgmma_widener_of(warp, mma_lane());
    const uint32_t load = from + wgmma_chunk_offset(own.row, own.chunk);
    const uint32_t store = to + wgmma_chunk_offset(own.row, 2 * own.chunk);
    uint32_t stored[2][BATCH][4];
    /* Number n is panel n % PANELS of the keys of step n / PANELS. */
    const auto fetch = [&](int n) {
        mma_get<4>((load ^ n % PANELS * 64) + n / PANELS * STEP * 128,
                   stored[n / BATCH % 2][n % BATCH]);
    };
    GPU_UNROLL
    for (int n = 0; n < COUNT + BATCH; n++) {
        if (n < COUNT) {
            fetch(n);
        }
        if (n >= BATCH) {
            const int done = n - BATCH;
            const uint32_t *const four = stored[done / BATCH % 2][done % BATCH];
            const uint32_t at = store + done % PANELS * S::KEYS * 128 + done / PANELS * STEP * 128;
            uint32_t wide[4];
            mma_e4m3_widen<true>(four[0], wide);
            mma_e4m3_widen<true>(four[1], wide + 2);
            wgmma_put_four(at, wide);
            mma_e4m3_widen<true>(four[2], wide);
            mma_e4m3_widen<true>(four[3], wide + 2);
            wgmma_put_four(at ^ 16, wide);
        }
    }
}

/* Widens a tile of keys or values, number n of its ring. used: counts panels. */
template <class S, int WIDTH>
GPU_DEVICE void wgmma_widen_tile(const wgmma_block<S> &b, uint32_t ring, uint64_t *full,
                                 uint64_t *empty, int n, int &used, int warp)
{
    enum { PANELS = WGMMA_PANELS(WIDTH), BYTES = PANELS * S::KEYS * 128 };
    static_assert(PANELS == 1 || PANELS % 2 == 0, "whole stored panels");
    wgmma_control<S> &control = *b.control;
    const int to = n % S::RING;
    wgmma_await(&empty[to], n / S::RING % 2 ^ 1);
    GPU_UNROLL
    for (int c = 0; c < WGMMA_STORED_PANELS(WIDTH); c++, used++) {
        const int stage = used % S::STORED_RING;
        wgmma_await(&control.stored_full[stage], used / S::STORED_RING % 2);
        wgmma_widen_panel<S, (PANELS > 1 ? 2 : 1)>(b.stored + stage * S::STORED_BYTES,
                                                   ring + to * BYTES + 2 * c * S::KEYS * 128, warp);
        __syncwarp(); /* all lanes have read the panel */
        wgmma_release(&control.stored_empty[stage]);
    }
    wgmma_publish();
    __syncwarp(); /* all lanes have published their stores */
    wgmma_release(&full[to]);
}

/* The loop of widener `warp`, in the order of wgmma_copy_all(). */
template <class S> GPU_DEVICE void wgmma_widen_all(const wgmma_block<S> &b, int warp)
{
    wgmma_control<S> &control = *b.control;
    int used = 0, stored = 0; /* tiles of keys, and panels, so far */
    for (int n = 0;; n++) {
        const int slot = n % WGMMA_ITEMS;
        wgmma_await(&control.item_full[slot], n / WGMMA_ITEMS % 2);
        const wgmma_item &w = control.item[slot];
        if (!w.exists) {
            return;
        }
        const int last = w.past - w.block - 1;
        __syncwarp(); /* all lanes have read the item */
        wgmma_release(&control.item_empty[slot]);
        GPU_ROLLED
        for (int left = last; left >= -1; left--) {
            if (left >= 0) {
                wgmma_widen_tile<S, S::WIDTH>(b, b.k, control.k_full, control.k_empty, used, stored,
                                              warp);
            }
            if (left < last) {
                wgmma_widen_tile<S, S::WIDTH_V>(b, b.v, control.v_full, control.v_empty, used - 1,
                                                stored, warp);
            }
            used += left >= 0;
        }
    }
}

/* --- Queries ---------------------------------------------------------------------------------- */

/* Two elements of a row of queries, times `scale`, as f16. */
template <class S> GPU_DEVICE uint32_t wgmma_query_pair(uint32_t pair, float scale)
{
    if constexpr ((int)S::own_type::DTYPE == (int)FATTN_BF16) {
        return mma_f16::pack(fattn_f32_from_bits(pair << 16) * scale,
                             fattn_f32_from_bits(pair & 0xffff0000u) * scale);
    }
    return pair ^ (scale < 0 ? 0x80008000u : 0);
}

/*
 * Makes the warp's 16 queries in shared memory operands of products with stored keys, and returns
 * what dot products are then to be multiplied by.
 *
 * In bf16 a row is multiplied by a power of two that brings its largest finite magnitude to 2^14 or
 * a little more, and rounded to f16, as in mma_e4m3_queries(): elements are exact down to 2^-31 of
 * that magnitude, and smaller ones have an error of at most 2^-39 of it. If k_descale is negative,
 * so is the multiplier, because the factor of dot products must not be. All threads of the
 * warpgroup must call it.
 */
template <class S>
GPU_DEVICE wgmma_factors wgmma_own_queries(const fattn_gpu_args &g, const wgmma_block<S> &b,
                                           const wgmma_item &w, int group, int row)
{
    enum { CHUNKS = S::PANELS * 8, SHARE = 4 }; /* of a row; lanes that share it */
    const fattn_problem &p = g.problem;
    const bool is_bf16 = (int)S::own_type::DTYPE == (int)FATTN_BF16;
    const int lane = mma_lane();
    wgmma_factors factor = {{1, 1}, 1};
    float k = 1;
    if (p.features & FATTN_DESCALE) {
        const int64_t at = w.batch * p.descale_stride[0] + w.k_head * p.descale_stride[1];
        k = ((const float *)g.buffers.k_descale)[at];
        factor.v = ((const float *)g.buffers.v_descale)[at];
    }
    const bool changes = is_bf16 || k < 0;
    GPU_UNROLL
    for (int h = 0; h < 2 && changes; h++) {
        const int r = row + 8 * h + lane % 8;
        const auto chunk = [&](int n) {
            const int c = lane / 8 + n * SHARE;
            return b.q + c / 8 * S::ROWS * 128 + wgmma_chunk_offset(r, c % 8);
        };
        uint32_t largest = 127 + 14; /* biased exponent: then the multiplier is 1 */
        if (is_bf16) {
            largest = 0;
            GPU_UNROLL
            for (int n = 0; n < CHUNKS / SHARE; n++) {
                uint32_t x[4];
                mma_get<4>(chunk(n), x);
                GPU_UNROLL
                for (int e = 0; e < 8; e++) {
                    const uint32_t exponent = x[e / 2] >> (7 + e % 2 * 16) & 0xff;
                    largest = max(largest, exponent == 255 ? 0 : exponent);
                }
            }
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 8));
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
        }
        const uint32_t exponent = min(127 + 127 + 14 - (int)largest, 253);
        const float scale = copysignf(fattn_f32_from_bits(exponent << 23), k);
        GPU_UNROLL
        for (int n = 0; n < CHUNKS / SHARE; n++) {
            uint32_t x[4];
            mma_get<4>(chunk(n), x);
            GPU_UNROLL
            for (int e = 0; e < 4; e++) {
                x[e] = wgmma_query_pair<S>(x[e], scale);
            }
            wgmma_put_four(chunk(n), x);
        }
        const float unscale = fattn_f32_from_bits((254 - exponent) << 23);
        factor.row[h] = gpu_shfl(unscale, lane / 4);
    }
    if (changes) {
        wgmma_publish();
        wgmma_named_sync(WGMMA_FORWARD_CLEARED + group, WGMMA_WARPGROUP);
    }
    factor.row[0] *= fabsf(k);
    factor.row[1] *= fabsf(k);
    return factor;
}

#endif
