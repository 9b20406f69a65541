/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of a few 16-bit queries with keys and values that are stored in e4m3, for decoding, and
 * the conversions, which mma_widen.cuh uses too. Tiles in shared memory hold the stored bytes. They
 * become f16, exactly, when a fragment is loaded:
 *
 *     K   A dot product may have its channels in any order, as long as it is the same in both rows.
 *         So a lane reads 16 adjacent channels of its key, which are its B fragments of four steps
 *         of 16 channels, and the same channels of its two queries:
 *
 *             element 2 t + e, or 2 t + 8 + e, of step s is channel 16 t + 4 s + e, or + 2, of 64
 *
 *     V   ldmatrix transposes units of 16 bits, two channels here, so that a register has two
 *         channels of two keys. Its even bytes are a B fragment of the even channels, its odd bytes
 *         one of the odd channels. Of 16 channels, columns j of o's fragments 0 and 1 are channels
 *         2 j and 2 j + 1.
 *
 * Products are of f16 even if the queries are bf16, to which e4m3 takes twice the instructions to
 * convert: more than there is time for while memory delivers the keys. Such queries are scaled and
 * rounded to f16 once an item, see mma_e4m3_queries(). Weights in f16 are more precise than in
 * bf16.
 */
#ifndef FATTN_CUDA_MMA_E4M3_CUH
#define FATTN_CUDA_MMA_E4M3_CUH

#include "backends/cuda/mma_terms.cuh"

struct mma_e4m3 : mma_f16 {
    typedef uint8_t element; /* of k and v */
};

/* --- Conversion ------------------------------------------------------------------------------- */

/*
 * The numbers in the upper bytes of the halves of a word, as f16. The lower bytes do not matter.
 *
 * e4m3 is a sign, four bits of exponent and three of mantissa. Moved to the same place of f16's
 * exponent and mantissa, these bits are the number divided by 2^8, subnormal numbers too, and
 * multiplying by that is exact. NaN, of all ones, would become 480, the only magnitude above 448.
 * The factor 137 makes 480 infinite, but not 448; and infinity times 0 is NaN.
 */
GPU_DEVICE uint32_t mma_e4m3_upper(uint32_t word)
{
    const uint32_t small = (word >> 1 & 0x3f803f80) | (word & 0x80008000);
    const uint32_t x = mma_f16_fma(small, 0x5c005c00, 0x80008000);  /* small * 2^8 - 0 */
    const uint32_t beyond = mma_f16_fma(x, 0x58485848, 0x80008000); /* x * 137 - 0 */
    return mma_f16_fma(beyond, 0, x);
}

/* Two pairs from the four numbers of a word: of bytes 0 and 1, and 2 and 3, if they are BESIDE each
 * other; or else of bytes 0 and 2, and 1 and 3. */
template <bool BESIDE> GPU_DEVICE void mma_e4m3_widen(uint32_t word, uint32_t pair[2])
{
    if (MMA_CONVERTS_E4M3) {
        word = BESIDE ? word : __byte_perm(word, 0, 0x3120);
        pair[0] = mma_f16_from_e4m3((uint16_t)word);
        pair[1] = mma_f16_from_e4m3((uint16_t)(word >> 16));
    } else {
        word = BESIDE ? __byte_perm(word, 0, 0x3120) : word;
        pair[0] = mma_e4m3_upper(word << 8);
        pair[1] = mma_e4m3_upper(word);
    }
}

/*
 * Turns the item's queries in shared memory from bf16 to f16. A row is multiplied by a power of two
 * that brings its largest finite magnitude to 2^14 or a little more. Then elements are exact down
 * to 2^-31 of that, and smaller ones have an error of at most 2^-39 of it, far below the rounding
 * errors of the products' sums. unscale[r] = 1 / that power. All threads of the block must call it;
 * a barrier follows.
 */
template <class S> GPU_DEVICE void mma_e4m3_queries(uint16_t *q, float unscale[S::ROWS])
{
    constexpr int each = S::THREADS / S::ROWS, all = S::WIDTH / 8;
    enum { SHARE = each < all ? each : all, CHUNKS = all / SHARE }; /* threads of a row */
    static_assert(CHUNKS > 0 && CHUNKS * SHARE * 8 == S::WIDTH && SHARE <= GPU_WAVE, "whole rows");
    if (each > all && gpu_thread() >= S::ROWS * SHARE) { /* they have no chunk */
        return;
    }
    const int r = gpu_thread() / SHARE, part = gpu_thread() % SHARE;
    /* Eight threads access eight chunks at a time. If they have four or more rows, these begin with
     * chunks of different banks. */
    const int first = SHARE < 4 ? r * SHARE % 8 : 0;
    uint16_t *const row = q + r * S::WIDTH;
    gpu_u4 eight[CHUNKS];
    uint32_t largest = 0;
    GPU_UNROLL
    for (int n = 0; n < CHUNKS; n++) {
        eight[n] = *(const gpu_u4 *)(row + ((n * SHARE + part) ^ first) * 8);
        const uint32_t word[4] = {eight[n].x, eight[n].y, eight[n].z, eight[n].w};
        GPU_UNROLL
        for (int e = 0; e < 8; e++) {
            const uint32_t exponent = word[e / 2] >> (7 + e % 2 * 16) & 0xff;
            largest = max(largest, exponent == 255 ? 0 : exponent);
        }
    }
    GPU_UNROLL
    for (int n = SHARE / 2; n > 0; n /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, n));
    }
    const uint32_t exponent = min(127 + 127 + 14 - (int)largest, 253);
    const float scale = fattn_f32_from_bits(exponent << 23);
    GPU_UNROLL
    for (int n = 0; n < CHUNKS; n++) {
        uint32_t word[4] = {eight[n].x, eight[n].y, eight[n].z, eight[n].w};
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            word[e] = mma_f16::pack(fattn_f32_from_bits(word[e] << 16) * scale,
                                    fattn_f32_from_bits(word[e] & 0xffff0000u) * scale);
        }
        *(gpu_u4 *)(row + ((n * SHARE + part) ^ first) * 8) = {word[0], word[1], word[2], word[3]};
    }
    if (part == 0) {
        unscale[r] = fattn_f32_from_bits((254 - exponent) << 23);
    }
}

/* --- Tiles ------------------------------------------------------------------------------------ */

/*
 * Address of chunk c, of 16 channels, of key r in a tile. The eight keys that ldmatrix reads as one
 * matrix, OWN t + 2 n + e for all t and e, have four banks each, and so have the four chunks of two
 * adjacent keys, which eight lanes read at a time. Two keys of 64 channels share a line of 128
 * bytes.
 */
template <class S> GPU_DEVICE uint32_t mma_e4m3_place(uint32_t tile, int r, int c)
{
    if (S::WIDTH == 64) {
        return tile + r / 2 * 128 + (((r % 2 * 4 + c) ^ (r / S::OWN)) << 4);
    }
    return tile + S::WIDTH * r + ((c ^ (r % 2 * 4 + r / S::OWN)) << 4);
}

/* The address of the chunk 2 * `pairs` keys below the one at `at` and `chunks` chunks to its
 * right, both multiples of what the swizzle leaves alone: 2 n < OWN, and chunks are even. */
template <class S> GPU_DEVICE uint32_t mma_e4m3_step(uint32_t at, int pairs, int chunks)
{
    return (at ^ chunks % 8 << 4) + 2 * S::WIDTH * pairs + 128 * (chunks / 8);
}

/* --- Products --------------------------------------------------------------------------------- */

/* A fragments of 64 channels, from chunk 8 * block of the queries on: of four steps. */
template <class S> GPU_DEVICE void mma_e4m3_rows(const void *q, int block, uint32_t a[4][4])
{
    const int lane = mma_lane(), g = lane / 4, t = lane % 4;
    GPU_UNROLL
    for (int n = 0; n < 4; n++) {
        const int half = n / 2, below = n % 2;
        uint32_t x[4];
        mma_get<4>(mma_place<S::WIDTH>(mma_shared(q), g + 8 * below, 8 * block + 2 * t + half), x);
        GPU_UNROLL
        for (int e = 0; e < 4; e++) {
            a[2 * half + e / 2][e % 2 * 2 + below] = x[e];
        }
    }
}

/* x += Q K^T for 16 rows of Q and a tile of keys, two fragments of eight keys at a time. */
template <class S>
GPU_DEVICE void mma_e4m3_dots(const void *q, const void *tile, float x[S::KEYS / 8][4])
{
    enum { PAIRS = S::KEYS / 16, COUNT = S::WIDTH / 64 * PAIRS };
    const int lane = mma_lane(), g = lane / 4, t = lane % 4;
    const uint32_t at = mma_e4m3_place<S>(mma_shared(tile), g / 2 * S::OWN + g % 2, t);
    uint32_t a[4][4], words[2][2][4];
    const auto fetch = [&](int i) {
        GPU_UNROLL
        for (int n = 0; n < 2; n++) {
            mma_get<4>(mma_e4m3_step<S>(at, 2 * (i % PAIRS) + n, 4 * (i / PAIRS)), words[i % 2][n]);
        }
    };
    fetch(0);
    GPU_UNROLL
    for (int i = 0; i < COUNT; i++) {
        if (i % PAIRS == 0) {
            mma_e4m3_rows<S>(q, i / PAIRS, a);
        }
        if (i + 1 < COUNT) {
            fetch(i + 1);
        }
        GPU_UNROLL
        for (int step = 0; step < 4; step++) {
            GPU_UNROLL
            for (int n = 0; n < 2; n++) {
                uint32_t b[2];
                mma_e4m3_widen<true>(words[i % 2][n][step], b);
                S::type::multiply(x[2 * (i % PAIRS) + n], a[step], b);
            }
        }
    }
}

/* o += P V for 16 rows of P, which are accumulators and are rounded here. */
template <class S>
GPU_DEVICE void mma_e4m3_mix(const float p[S::KEYS / 8][4], const void *tile,
                             float o[S::WIDTH / 8][4])
{
    enum { CHUNKS = S::WIDTH / 16, COUNT = S::KEYS / 16 * CHUNKS / 2 };
    const int lane = mma_lane(), r = lane % 8, n = lane / 8 % 2;
    const uint32_t at =
        mma_e4m3_place<S>(mma_shared(tile), r / 2 * S::OWN + 2 * n + r % 2, lane / 16);
    uint32_t a[4], words[3][4];
    const auto fetch = [&](int i) {
        const int step = i / (CHUNKS / 2), chunk = i % (CHUNKS / 2) * 2;
        mma_load_transposed(words[i % 3], mma_e4m3_step<S>(at, 2 * step, chunk));
    };
    fetch(0);
    fetch(1);
    GPU_UNROLL
    for (int i = 0; i < COUNT; i++) {
        const int step = i / (CHUNKS / 2), chunk = i % (CHUNKS / 2) * 2;
        if (i + 2 < COUNT) {
            fetch(i + 2);
        }
        if (chunk == 0) {
            const float *const left = p[2 * step], *const right = p[2 * step + 1];
            a[0] = S::type::pack(left[0], left[1]);
            a[1] = S::type::pack(left[2], left[3]);
            a[2] = S::type::pack(right[0], right[1]);
            a[3] = S::type::pack(right[2], right[3]);
        }
        GPU_UNROLL
        for (int c = 0; c < 2; c++) {
            uint32_t upper[2], lower[2]; /* keys 0 .. 7 and 8 .. 15 of the step */
            mma_e4m3_widen<false>(words[i % 3][2 * c], upper);
            mma_e4m3_widen<false>(words[i % 3][2 * c + 1], lower);
            GPU_UNROLL
            for (int odd = 0; odd < 2; odd++) {
                const uint32_t b[2] = {upper[odd], lower[odd]};
                S::type::multiply(o[2 * (chunk + c) + odd], a, b);
            }
        }
    }
}

/* Writes half h of the lane's sums, times factor, to a row, where they are in the order of
 * channels. */
template <class S>
GPU_DEVICE void mma_e4m3_leave(float *row, const float o[S::WIDTH / 8][4], int h, float factor)
{
    float *const to = row + mma_lane() % 4 * 4;
    GPU_UNROLL
    for (int n = 0; n < S::WIDTH / 8; n += 2) {
        gpu_f4 four;
        four.x = o[n][2 * h] * factor;
        four.y = o[n + 1][2 * h] * factor;
        four.z = o[n][2 * h + 1] * factor;
        four.w = o[n + 1][2 * h + 1] * factor;
        *(gpu_f4 *)(to + 8 * n) = four;
    }
}

/* Where a kernel's tiles are of 16-bit elements: see mma_key_place(). */
template <class S> GPU_DEVICE uint32_t mma_stored_place(uint32_t tile, int r, int c)
{
    return sizeof(typename S::type::element) == 1 ? mma_e4m3_place<S>(tile, r, c)
                                                  : mma_key_place<S>(tile, r, c);
}

/* How many bytes of chunk c exist in a stored row of `dim` elements. */
template <class S> GPU_DEVICE int mma_stored_bytes(int c, int dim)
{
    return min(max((int)sizeof(typename S::type::element) * dim - 16 * c, 0), 16);
}

#endif
