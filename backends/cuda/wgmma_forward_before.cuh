/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs before forward on Hopper (wgmma_forward.cuh): kernels that find out which keys of an
 * item a block mask, a bias or a mask hides.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_BEFORE_CUH
#define FATTN_CUDA_WGMMA_FORWARD_BEFORE_CUH

#include "backends/cuda/wgmma_forward_items.cuh"

/* --- Block masks ------------------------------------------------------------------------------ */

/* What a block mask leaves of each item's tiles of keys, in the workspace. Clears the counter,
 * too. */
template <class S> GPU_DEVICE void wgmma_blocks_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const int64_t bytes = WGMMA_TILE_BYTES(g.tiling.k_blocks);
    const int group = wgmma_group_of(p), queries = wgmma_places<S>(group) / group;
    fattn_tiling tiling = g.tiling; /* as wgmma_plan_begin() has it */
    tiling.q_blocks = fattn_quotient(p.seqlen_q + queries - 1, queries);
    gpu_admit_later();
    gpu_await_earlier();
    if (gpu_block() == 0 && gpu_thread() == 0) {
        *(unsigned *)g.workspace = 0;
    }
    for (int64_t n = gpu_block() * WGMMA_BLOCK_THREADS + gpu_thread();
         n < tiling.heads * tiling.q_blocks * bytes; n += gpu_blocks() * WGMMA_BLOCK_THREADS) {
        const int64_t item = fattn_quotient(n, bytes), j0 = (n - item * bytes) * S::KEYS;
        const fattn_work work = fattn_schedule_item(&tiling, p.heads_k, item);
        gpu_pairs t;
        t.b = work.batch;
        t.seq = gpu_sequence(g, work.batch);
        const int64_t i0 = work.block * queries, i1 = fattn_min64(i0 + queries, t.seq.sq);
        gpu_mask_blocks found = {false, false};
        if (i0 < i1 && j0 < t.seq.sk) {
            found = gpu_mask_blocks_of(g, t, i0, i1, work.head * group, group, j0,
                                       fattn_min64(j0 + S::KEYS, t.seq.sk), 0, 1);
        }
        wgmma_bytes_of<S>(g, tiling, work)[n - item * bytes] =
            found.kept * WGMMA_TILE_KEPT + found.dropped * WGMMA_TILE_MIXED;
    }
}

/* --- A bias or a mask ------------------------------------------------------------------------- */

/* The bias or mask of an item's rows; E is as many bytes as an element. */
template <class E> struct wgmma_looked_at {
    const E *first; /* of the first row, at key 0 */
    int64_t head, row, key;
    int heads, rows, keys;
    uint32_t hidden, plain; /* elements that say so, as often as a word has them */
    bool chunks;            /* 16 bytes may be read at once */
};

/* Whether rows first .. past - 1 of a tile are all `wanted`. A warp asks. */
template <class S, class E>
GPU_DEVICE bool wgmma_rows_are(const wgmma_looked_at<E> &term, int tile, int first, int past,
                               uint32_t wanted)
{
    enum { CHUNK = 16 / sizeof(E), CHUNKS = S::KEYS / CHUNK, STEP = GPU_WAVE / CHUNKS, READS = 8 };
    const int j0 = tile * S::KEYS, keys = min(term.keys - j0, (int)S::KEYS), rows = past - first;
    const bool chunks = term.chunks && keys == S::KEYS;
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

/* Looks at tiles WGMMA_SEEN_TILES n on, and writes their bytes. A warp looks at two elements of its
 * tile, at opposite corners, and where both are hidden, or plain, at its share of the rows. */
template <class S, class E>
GPU_DEVICE void wgmma_look(const wgmma_looked_at<E> &term, int n, uint8_t *bytes)
{
    GPU_SHARED uint32_t unhidden, uneven;
    const int own = gpu_thread() / 32 / WGMMA_SEEN_WARPS;
    const int share = gpu_thread() / 32 % WGMMA_SEEN_WARPS;
    const int tile = WGMMA_SEEN_TILES * n + own, j0 = tile * S::KEYS;
    if (gpu_thread() == 0) {
        unhidden = uneven = 0;
    }
    gpu_sync();
    if (j0 < term.keys) {
        const E low = term.first[j0 * term.key];
        const E high = term.first[(term.heads - 1) * term.head + (term.rows - 1) * term.row +
                                  (min(j0 + S::KEYS, term.keys) - 1) * term.key];
        const bool hidden = low == high && low == (E)term.hidden;
        const bool plain = low == high && low == (E)term.plain;
        const int first = term.rows * share / WGMMA_SEEN_WARPS;
        const int past = term.rows * (share + 1) / WGMMA_SEEN_WARPS;
        bool alike = hidden || plain;
        if (alike && first < past) {
            alike = wgmma_rows_are<S>(term, tile, first, past, hidden ? term.hidden : term.plain);
        }
        if (mma_lane() == 0) {
            atomicOr(&unhidden, (uint32_t) !(hidden && alike) << own);
            atomicOr(&uneven, (uint32_t) !(plain && alike) << own);
        }
    }
    gpu_sync();
    if (share == 0 && mma_lane() == 0) {
        const bool kept = unhidden >> own & 1, mixed = kept && uneven >> own & 1;
        bytes[tile] = (uint8_t)(kept * WGMMA_TILE_KEPT + mixed * WGMMA_TILE_MIXED);
    }
    gpu_sync(); /* before another item */
}

/* What a bias, or else a mask, does in tiles of keys, in the workspace, of the first head and
 * sequence that share it. Sequences may have fewer queries and keys than are looked at. Clears the
 * counter, too. */
template <class S> GPU_DEVICE void wgmma_seen_all(const fattn_gpu_args &g)
{
    const fattn_problem &p = g.problem;
    const bool bias = p.features & FATTN_BIAS;
    const int64_t *const stride = bias ? p.bias_stride : p.mask_stride;
    const int size = !bias ? 1 : p.dtype_bias == FATTN_F32 ? 4 : 2;
    const int group = wgmma_group_of(p), queries = (int)g.tiling.br / group;
    const int64_t turns = WGMMA_TILE_BYTES(g.tiling.k_blocks) / WGMMA_SEEN_TILES;
    const int64_t heads = stride[1] ? p.heads_k : 1, batches = stride[0] ? p.batch : 1;
    fattn_tiling tiling = g.tiling; /* as wgmma_plan_begin() has it */
    tiling.q_blocks = fattn_quotient(p.seqlen_q + queries - 1, queries);
    gpu_admit_later();
    gpu_await_earlier();
    if (gpu_block() == 0 && gpu_thread() == 0) {
        *(unsigned *)g.workspace = 0;
    }
    for (int64_t n = gpu_block(); n < batches * heads * tiling.q_blocks * turns;
         n += gpu_blocks()) {
        const int64_t item = fattn_quotient(n, turns), head = fattn_quotient(item, tiling.q_blocks);
        fattn_work work;
        work.batch = fattn_quotient(head, heads);
        work.head = head - work.batch * heads;
        work.block = item - head * tiling.q_blocks;
        const int64_t i0 = work.block * queries;
        const int64_t at = work.batch * stride[0] + work.head * group * stride[1] + i0 * stride[2];
        const auto look = [&](auto element, const void *data, uint32_t hidden, uint32_t plain) {
            typedef decltype(element) E;
            wgmma_looked_at<E> term;
            term.first = (const E *)data + at;
            term.head = stride[1], term.row = stride[2], term.key = stride[3];
            term.heads = stride[1] ? group : 1;
            term.rows = stride[2] ? (int)fattn_min64(queries, p.seqlen_q - i0) : 1;
            term.keys = (int)p.seqlen_k;
            term.hidden = hidden;
            term.plain = plain;
            term.chunks = mma_are_rows(data, stride, (int)sizeof(E));
            wgmma_look<S>(term, (int)(n - item * turns), wgmma_bytes_of<S>(g, tiling, work));
        };
        if (size == 1) { /* of a mask other numbers than 1 may keep a pair, too */
            look((uint8_t)0, g.buffers.mask, 0, 0x01010101u);
        } else if (size == 2) {
            look((uint16_t)0, g.buffers.bias, p.dtype_bias == FATTN_F16 ? 0xfc00fc00u : 0xff80ff80u,
                 0);
        } else {
            look((uint32_t)0, g.buffers.bias, 0xff800000u, 0);
        }
    }
}

#endif
