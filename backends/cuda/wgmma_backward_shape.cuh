/* SPDX-License-Identifier: Apache-2.0 */
/* The shape of a backward kernel on Hopper: its compile-time parameters, and the sizes that follow
 * from them. */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_SHAPE_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_SHAPE_CUH

#include "backends/cuda/wgmma.h"

/* T: mma_f16 or mma_bf16. W: channels, padded. N, BN: queries and keys of a tile. RING: pipeline
 * stages of queries. FEATURES: those of MMA_OF_PAIRS that the run has, 0 for lean kernels, or
 * MMA_ANY. DBIAS: the run may have dBias. TERM_STAGES: staged tiles of a bias or mask, if that is
 * the only feature. ORDERED: for deterministic runs, in kernels whose blocks share items. */
template <class T, int W, int N, int BN, int RING, uint64_t FEATURES = 0, bool DBIAS = false,
          int TERM_STAGES = 0, bool ORDERED = false>
struct wgmma_backward_shape {
    typedef T type;
    static constexpr uint64_t KNOWN = FEATURES;
    static constexpr bool IS_ORDERED = ORDERED;
    enum {
        BLOCKS = WGMMA_BACKWARD_BLOCKS(W), /* blocks that share an item */
        ITEM_KEYS = BN,
        KEYS = BN / BLOCKS,
        IS_PAIR = BLOCKS > 1, /* then warpgroups have the same keys, and different channels */
        WIDTH = W,
        PANELS = W / 64,
        QUERIES = N,
        WARPGROUPS = 2,
        WARPS = 4 * WARPGROUPS,
        THREADS = WGMMA_THREADS(WARPGROUPS),
        STAGES = RING,
        DOUT_STAGES = IS_PAIR ? 1 : 2,
        KEY_BYTES = 2 * W * KEYS,
        QUERY_BYTES = 2 * W * N,
        DS_BYTES = 2 * KEYS * N,
        /* The other block's keys, in this block's channels of dQ, and two tiles of its dS. */
        PEER_KEY_BYTES = IS_PAIR ? KEY_BYTES / 2 : 0,
        PEER_DS_BYTES = IS_PAIR ? 2 * DS_BYTES : 0,
        /* A warpgroup's queries of S^T and dP^T, and its channels of dV and dK. */
        OWN_QUERIES = IS_PAIR ? N / WARPGROUPS : N,
        OWN_CHANNELS = IS_PAIR ? W / WARPGROUPS : W,
        /* Groups of 8 queries whose lse and delta are read early, as registers allow. */
        LSE_EARLY = OWN_QUERIES <= 64 ? OWN_QUERIES / 8 : 4,
        DELTA_EARLY = OWN_QUERIES <= 64 ? 2 : 0,
        /* A warpgroup computes 64 channels of dQ, for PART queries. */
        PART = IS_PAIR ? N : N * PANELS / WARPGROUPS,
        PART_BYTES = 4 * 64 * PART,
        P_BYTES = IS_PAIR ? 2 * DS_BYTES : 0,
        IS_LEAN = FEATURES == 0,
        HAS_DBIAS = DBIAS,
        /* It may skip hidden tiles (wgmma_skips). */
        SKIPS = (FEATURES & WGMMA_HIDES) != 0 && (FEATURES == MMA_ANY || !DBIAS),
        /* It does not read the mask of tiles that are not mixed. (The same for a bias made random
         * biases 7 to 11 % slower, and biases of 0 and -inf 2 to 20 % faster.) */
        KNOWS_PLAIN = SKIPS && FEATURES == FATTN_MASK,
        /* A block mask may hide tiles of one of an item's blocks and not of the other. */
        KNOWS_HALVES = IS_PAIR && FEATURES == FATTN_BLOCK_MASK,
        /* The product for dQ of a tile needs dS of both warpgroups. If deferred, it is issued while
         * the next tile is computed, so that neither warpgroup waits for the other; in the kernels
         * in which that was measured to be faster. */
        DEFERS =
            !IS_PAIR &&
            (FEATURES == 0 || FEATURES == FATTN_BLOCK_MASK ? W == 64 : FEATURES == FATTN_SOFTCAP),
        /* Items follow one another without a break (wgmma_backward_chain.cuh). */
        CHAINS = IS_LEAN && WGMMA_BACKWARD_CHAINS(W),
        KEY_STAGES = CHAINS ? WGMMA_BACKWARD_KEY_STAGES(N) : 1,
        VALUE_STAGES = CHAINS ? WGMMA_BACKWARD_VALUE_STAGES(N) : 1,
        /* A warpgroup's room for its part of dQ, and for dK and dV. */
        DQ_ROOM = CHAINS ? WGMMA_BACKWARD_HANDED(W) : PART_BYTES,
        DQ_BYTES = IS_PAIR ? 0 : WARPGROUPS * DQ_ROOM,
        /* It has room for 64 rows of both, or of one after the other. */
        HAND_STEPS = 2 * 2 * 64 * W <= DQ_ROOM ? 1 : 2,
        DK_HANDED = HAND_STEPS == 1 ? 2 * 64 * W : 0, /* offset of dK */
        ITEM_RING = CHAINS ? 4 : 2, /* items of the block that have been taken and not finished */
        TERM_RING = TERM_STAGES,
        TERM_RING_STAGES = TERM_STAGES > 1 ? TERM_STAGES : 1,
        IS_STAGED = TERM_STAGES > 0,
        /* A bias or mask, if it is the only feature, is read from memory, with a row for each
         * lane. */
        READS_ROWS = IS_PAIR && (FEATURES == FATTN_BIAS || FEATURES == FATTN_MASK),
        TERM_BYTES = WGMMA_TERM_TILE(FEATURES, N, BN),
        BIAS_STEPS = FEATURES == FATTN_BIAS ? OWN_QUERIES / 16 : 1, /* steps read ahead */
        MASK_WORDS = OWN_QUERIES / 8,
        CALLS = OWN_QUERIES / 16, /* calls of dropout's generator per tile */
        /* Arguments of wgmma_shift_apart(): the number of tiles whose q, dO and dQ are 16 MB
         * together, and the least distance. */
        SPREAD = (16 << 20) / (QUERIES * WIDTH * (2 + 2 + 4)),
        LEAST_APART = IS_PAIR ? 1 : 2,
        EARLY_CALLS = W < 256 && FEATURES == FATTN_DROPOUT ? CALLS : CALLS / 2,
        OWN_REGISTERS = 240,
        COPY_REGISTERS = 24
    };
};

#endif
