/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the warps of a block share in backward on Hopper (wgmma_backward.cuh): shared memory and its
 * barriers, the items that have been taken, and the order of their tiles.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_BLOCK_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_BLOCK_CUH

#include "backends/cuda/wgmma_backward_items.cuh"
#include "backends/cuda/wgmma_pair.cuh"
#include "backends/cuda/wgmma_terms.cuh"

/* A visited tile of queries, of one of the group's heads. */
typedef struct wgmma_visit {
    int tile, head;
    int mixed; /* a mask has to be read; or a block mask does not hide all of this block's keys */
} wgmma_visit;

/* For items that two blocks share: barriers of the other block's keys and dS, and the number of the
 * next item. */
typedef struct wgmma_peer_control {
    uint64_t k_full, ds_full[2];
    wgmma_sent_number item;
} wgmma_peer_control;

/* A block's shared memory beside the tiles. */
template <class S> struct wgmma_backward_control {
    uint64_t item_full[S::ITEM_RING], item_empty[S::ITEM_RING], item_wanted;
    uint64_t k_full[S::KEY_STAGES], k_empty[S::KEY_STAGES];
    uint64_t v_full[S::VALUE_STAGES];
    uint64_t q_full[S::STAGES], q_empty[S::STAGES], dout_full[2], dout_empty[2];
    uint64_t ds_full[2], ds_empty[2]; /* for kernels that defer dQ */
    union {
        struct {
            uint64_t term_full[2], term_empty[2]; /* of a staged bias or mask */
        };
        wgmma_peer_control peer; /* if two blocks share an item */
        uint64_t v_empty[2];     /* if items are chained; else values are released with the keys */
    };
    fattn_dropout dropout;
    wgmma_backward_item item[S::ITEM_RING];
    bool exists[S::ITEM_RING];                      /* false: there are no more items */
    wgmma_visit visit[S::SKIPS ? WGMMA_VISITS : 1]; /* of the tiles in flight */
    wgmma_scan_results scan;                        /* for kernels that may skip tiles */
};

/* What all roles share. */
template <class S> struct wgmma_backward_block {
    wgmma_backward_control<S> *control;
    uint32_t k, v, q, dout, ds, dq, p; /* addresses of tiles */
    uint32_t peer_k, peer_ds;          /* and of those of the other block of an item */
    uint32_t terms;                    /* and of those of a bias or mask */
    uint32_t lse, delta;               /* for each stage of q, and of dO */
    int rank;                          /* the block's number among those of an item */
    int group;                         /* query heads of a key/value head */
    bool staged;                       /* a bias or mask is staged in shared memory */
    bool chunks;                       /* or its rows may be read 16 bytes at a time */
    bool ordered;                      /* blocks add to dQ in turn */
};

/* In kernels that may skip tiles, the copier writes here which tile comes next, and the other roles
 * read it. n: each role counts the tiles of all items of the block. When a tile is copied, all
 * roles have read the entry that it replaces. */
template <class S>
GPU_DEVICE wgmma_visit *wgmma_visit_at(const wgmma_backward_block<S> &b, uint32_t n)
{
    return &b.control->visit[n % (S::SKIPS ? WGMMA_VISITS : 1)];
}

/* A position in a ring of barriers. The phase flips when the stage wraps around. */
template <int STAGES> struct wgmma_ring {
    int stage, phase;
};

template <int STAGES> GPU_DEVICE void wgmma_ring_advance(wgmma_ring<STAGES> &ring)
{
    ring.stage = ring.stage + 1 == STAGES ? 0 : ring.stage + 1;
    ring.phase ^= ring.stage == 0;
}

/* The tile of queries after this one. Tiles of a head wrap around; when `start` comes again, the
 * next head begins. */
GPU_DEVICE int wgmma_next_tile(const wgmma_backward_item &w, int tile)
{
    return tile + 1 == w.past ? w.first : tile + 1;
}

/* The same for an item that visits only tiles whose bits are set. */
GPU_DEVICE int wgmma_next_visit(const wgmma_backward_item &w, const uint32_t *visits, int tile)
{
    const int next = scan_next_kept(visits, tile + 1, w.past);
    return next < w.past ? next : w.start;
}

/* Item n of the block: its place, and the phase of its barriers. */
template <class S> GPU_DEVICE int wgmma_item_slot(int n) { return n % S::ITEM_RING; }
template <class S> GPU_DEVICE int wgmma_item_phase(int n) { return n / S::ITEM_RING % 2; }

/* Waits for item n of the block. NULL if there are no more. */
template <class S>
GPU_DEVICE const wgmma_backward_item *wgmma_item_await(const wgmma_backward_block<S> &b, int n)
{
    wgmma_backward_control<S> &control = *b.control;
    const int slot = wgmma_item_slot<S>(n);
    wgmma_await(&control.item_full[slot], wgmma_item_phase<S>(n));
    return control.exists[slot] ? &control.item[slot] : NULL;
}

/* Whether a warpgroup hands dK and dV of an item to its adder, which stores them by TMA while the
 * warpgroup goes on. Other items are stored by the threads that have the sums: in deterministic
 * runs, in which other blocks wait for the adder; and if there is less than a box, of 64 keys, at
 * the end of a packed sequence, since the next rows are another's. If items are chained, the
 * warpgroup hands over before dQ of the item's last tile, otherwise after it. */
template <class S>
GPU_DEVICE bool wgmma_hands_over(const fattn_gpu_args &g, const wgmma_backward_item &w, int group)
{
    const unsigned both = FATTN_GPU_QUADS_DK | FATTN_GPU_QUADS_DV;
    const bool packed = g.problem.features & FATTN_CU_SEQLENS_K;
    return !S::IS_PAIR && g.dtype_gradient != FATTN_F32 && (g.chunks & both) == both &&
           w.tiles > 0 && !wgmma_is_ordered(g.problem) && (!packed || w.owned >= 64 * (group + 1));
}

/* The warps of the producer warpgroup. */
enum {
    WGMMA_BACKWARD_COPIER = 0, /* its first thread alone */
    WGMMA_ADDER = 1,           /* .. 2 */
    WGMMA_TAKER = 3
};

/* The block's named barriers (wgmma_named_sync), and the threads that take part. */
enum {
    WGMMA_DS_MADE = 1,    /* both warpgroups */
    WGMMA_DQ_MADE = 2,    /* .. 3: a warpgroup and an adder */
    WGMMA_DQ_ADDED = 4,   /* .. 5: a warpgroup and the adder of its last sums */
    WGMMA_CLEARED = 6,    /* .. 7: a warpgroup */
    WGMMA_P_MADE = 8,     /* both warpgroups */
    WGMMA_NEXT_DUE = 9,   /* .. 10: both adders; the number tells which adder's tile is next */
    WGMMA_PING_PONG = 11, /* .. 12: both warpgroups; the number tells which may issue products */
    /* If two blocks share an item: both warpgroups and the adder of even, or of odd, tiles. */
    WGMMA_MAY_ADD = 2, /* .. 3 */
    WGMMA_ADDED = 4    /* .. 5 */
};
enum {
    WGMMA_BOTH = 2 * WGMMA_WARPGROUP,
    WGMMA_WITH_ADDER = WGMMA_WARPGROUP + GPU_WAVE,
    WGMMA_ALL_WITH_ADDER = WGMMA_BOTH + GPU_WAVE,
    WGMMA_ADDERS = 2 * GPU_WAVE
};

#endif
