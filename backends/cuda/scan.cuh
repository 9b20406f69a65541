/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scan kernel, which runs before forward or backward if there is a bias or a mask. It finds the
 * tiles of keys that these hide from all rows of an item, and those in which they change nothing
 * (scan.h). The kernel after it skips the former, and does not read the bias or mask of the latter.
 */
#ifndef FATTN_CUDA_SCAN_CUH
#define FATTN_CUDA_SCAN_CUH

#include "backends/cuda/mma_terms.cuh"
#include "backends/cuda/scan.h"

/* The bias or mask of an item's rows. E: an unsigned integer of the size of its elements. */
template <class E> struct scan_term {
    const E *first; /* of the first row, at key 0 */
    int64_t head, row, key;
    int heads, rows, keys, tiles;
    uint32_t hidden, plain; /* the elements that hide a pair or do not change it, repeated */
    bool chunks;            /* may be read 16 bytes at a time */
};

/* Whether all elements of rows first .. past - 1 of a tile are `wanted`. All lanes of a warp call
 * it. */
template <int KEYS, class E>
GPU_DEVICE bool scan_rows_are(const scan_term<E> &term, int tile, int first, int past,
                              uint32_t wanted)
{
    enum { CHUNK = 16 / sizeof(E), CHUNKS = KEYS / CHUNK, STEP = GPU_WAVE / CHUNKS, READS = 8 };
    const int j0 = tile * KEYS, keys = min(term.keys - j0, (int)KEYS), rows = past - first;
    const bool chunks = term.chunks && keys == KEYS;
    const int steps = chunks ? (rows + STEP - 1) / STEP : (rows * keys + 31) / 32;
    const E *from = term.first + first * term.row + j0 * term.key;
    GPU_ROLLED
    for (int h = 0; h < term.heads; h++, from += term.head) {
        GPU_ROLLED
        for (int step = 0; step < steps; step += READS) {
            uint32_t bits = 0;
            if (chunks) {
                const E *const own = from + mma_lane() % CHUNKS * CHUNK;
                GPU_UNROLL
                for (int n = 0; n < READS; n++) {
                    const int r = min((step + n) * STEP + mma_lane() / CHUNKS, rows - 1);
                    const gpu_u4 x = *(const gpu_u4 *)(own + r * term.row);
                    bits |= (x.x ^ wanted) | (x.y ^ wanted) | (x.z ^ wanted) | (x.w ^ wanted);
                }
            } else {
                GPU_UNROLL
                for (int n = 0; n < READS; n++) {
                    const int e = min((step + n) * 32 + mma_lane(), rows * keys - 1);
                    bits |= (uint32_t)(from[e / keys * term.row + e % keys * term.key] ^ (E)wanted);
                }
            }
            if (__any_sync(0xffffffffu, bits != 0)) {
                return false;
            }
        }
    }
    return true;
}

/* Scans a tile and writes its byte, which is 0 past the last tile. Each warp reads two elements, at
 * opposite corners. If both hide their pairs, or both are plain, it reads its share of the rows. */
template <int KEYS, class E>
GPU_DEVICE void scan_tile(const scan_term<E> &term, int tile, uint8_t *bytes)
{
    GPU_SHARED uint32_t unhidden, uneven;
    const int share = gpu_thread() / 32;
    if (gpu_thread() == 0) {
        unhidden = uneven = 0;
    }
    gpu_sync();
    if (tile < term.tiles) {
        const int j0 = tile * KEYS, last = j0 + min(term.keys - j0, (int)KEYS) - 1;
        const E low = term.first[j0 * term.key];
        const E high =
            term.first[(term.heads - 1) * term.head + (term.rows - 1) * term.row + last * term.key];
        const bool hidden = low == high && low == (E)term.hidden;
        const bool plain = low == high && low == (E)term.plain;
        const int first = term.rows * share / SCAN_WARPS;
        const int past = term.rows * (share + 1) / SCAN_WARPS;
        bool alike = hidden || plain;
        if (alike && first < past) {
            alike = scan_rows_are<KEYS>(term, tile, first, past, hidden ? term.hidden : term.plain);
        }
        if (mma_lane() == 0) {
            atomicOr(&unhidden, (uint32_t) !(hidden && alike));
            atomicOr(&uneven, (uint32_t) !(plain && alike));
        }
    }
    gpu_sync();
    if (gpu_thread() == 0) {
        const bool mixed = unhidden && uneven;
        bytes[tile] = (uint8_t)(unhidden * SCAN_KEPT + mixed * SCAN_MIXED);
    }
    gpu_sync(); /* before another item */
}

/* The strides of what is scanned: the bias, or else the mask. */
GPU_DEVICE const int64_t *scan_stride(const fattn_problem &p)
{
    return p.features & FATTN_BIAS ? p.bias_stride : p.mask_stride;
}

/* Offset of an item's bytes. Sequences or heads that share the bias or mask, by a stride of 0, also
 * share its bytes. stride NULL: nothing is shared. */
GPU_DEVICE int64_t scan_at(const fattn_tiling &tiling, int64_t heads, const int64_t *stride,
                           const fattn_work &work)
{
    const bool own_batch = !stride || stride[0] != 0, own_head = !stride || stride[1] != 0;
    const int64_t head =
        (own_batch ? work.batch : 0) * (own_head ? heads : 1) + (own_head ? work.head : 0);
    return (head * tiling.q_blocks + work.block) * SCAN_BYTES(tiling.k_blocks);
}

/* Each tile has a bit. Returns the first tile from `tile` on whose bit is set, or `past`. No bit
 * from `past` on is set. */
GPU_DEVICE int scan_next_kept(const uint32_t *tiles, int tile, int past)
{
    uint32_t bits = 0;
    GPU_ROLLED
    while (tile < past && !(bits = tiles[tile / 32] >> tile % 32)) {
        tile = tile / 32 * 32 + 32;
    }
    return bits ? tile + __ffs((int)bits) - 1 : past;
}

/* The bytes of tiles 8 n .. 8 n + 7. */
GPU_DEVICE uint64_t scan_eight(const uint8_t *bytes, int n) { return ((const uint64_t *)bytes)[n]; }

/* The SCAN_KEPT bits of these eight bytes, for tiles below `past`. */
GPU_DEVICE uint64_t scan_kept(uint64_t eight, int n, int past)
{
    const int live = past - 8 * n;
    const uint64_t below = live >= 8 ? UINT64_MAX : (UINT64_C(1) << 8 * max(live, 0)) - 1;
    return eight & below & SCAN_KEPT * (UINT64_MAX / 255);
}

/* Scans the bias, or else the mask, in tiles of KEYS keys, and writes the bytes of all items from
 * `bytes` on. rows(block): the queries of a block of rows, which has all heads of the group. The
 * scan covers the planned lengths; sequences may have fewer queries and keys. */
template <int KEYS, class Rows>
GPU_DEVICE void scan_all(const fattn_gpu_args &g, const fattn_tiling &tiling, uint8_t *bytes,
                         const Rows &rows)
{
    const fattn_problem &p = g.problem;
    const bool bias = p.features & FATTN_BIAS;
    const int64_t *const stride = scan_stride(p);
    const int size = !bias ? 1 : p.dtype_bias == FATTN_F32 ? 4 : 2;
    const int64_t tiles = SCAN_BYTES(tiling.k_blocks);
    const int64_t heads = stride[1] ? p.heads_k : 1, batches = stride[0] ? p.batch : 1;
    for (int64_t n = gpu_block(); n < batches * heads * tiling.q_blocks * tiles;
         n += gpu_blocks()) {
        const int64_t item = fattn_quotient(n, tiles), head = fattn_quotient(item, tiling.q_blocks);
        fattn_work work;
        work.batch = fattn_quotient(head, heads);
        work.head = head - work.batch * heads;
        work.block = item - head * tiling.q_blocks;
        const fattn_range queries = rows(work.block);
        const int64_t at =
            work.batch * stride[0] + work.head * g.group * stride[1] + queries.first * stride[2];
        const auto scan = [&](auto element, const void *data, uint32_t hidden, uint32_t plain) {
            typedef decltype(element) E;
            scan_term<E> term;
            term.first = (const E *)data + at;
            term.head = stride[1], term.row = stride[2], term.key = stride[3];
            term.heads = stride[1] ? (int)g.group : 1;
            term.rows = stride[2] ? (int)(queries.past - queries.first) : 1;
            term.keys = (int)p.seqlen_k;
            term.tiles = (int)tiling.k_blocks;
            term.hidden = hidden;
            term.plain = plain;
            term.chunks = mma_are_rows(data, stride, (int)sizeof(E));
            scan_tile<KEYS>(term, (int)(n - item * tiles),
                            bytes + scan_at(tiling, p.heads_k, stride, work));
        };
        if (size == 1) { /* bytes of a mask other than 0 and 1 keep a pair too, but are not plain */
            scan((uint8_t)0, g.buffers.mask, 0, 0x01010101u);
        } else if (size == 2) {
            scan((uint16_t)0, g.buffers.bias, p.dtype_bias == FATTN_F16 ? 0xfc00fc00u : 0xff80ff80u,
                 0);
        } else {
            scan((uint32_t)0, g.buffers.bias, 0xff800000u, 0);
        }
    }
}

#endif
