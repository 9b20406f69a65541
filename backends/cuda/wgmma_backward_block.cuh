/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the roles of a block share in backward on Hopper (wgmma_backward.cuh): shared memory and its
 * barriers, the items that have been taken, and the order of their tiles.
 */
#ifndef FATTN_CUDA_WGMMA_BACKWARD_BLOCK_CUH
#define FATTN_CUDA_WGMMA_BACKWARD_BLOCK_CUH

#include "backends/cuda/wgmma_backward_items.cuh"
#include "backends/cuda/wgmma_terms.cuh"
#include "backends/cuda/wgmma_tile.cuh"

/* A tile of queries, of one of the group's heads. */
typedef struct wgmma_visit {
    int tile, head;
    int mixed; /* the mask, if there is one, is to be read; or a block mask leaves something */
} wgmma_visit;

/* Of items that two blocks share: barriers of the other's keys and its dS, and the number of the
 * next item. */
typedef struct wgmma_peer_control {
    uint64_t k_full, ds_full[2], number_full, number_empty;
    int number;
} wgmma_peer_control;

/* A block's shared memory beside the tiles. */
template <class S> struct wgmma_backward_control {
    uint64_t item_full[2], item_empty[2], item_wanted;
    uint64_t k_full, v_full, keys_empty;
    uint64_t q_full[S::STAGES], q_empty[S::STAGES], dout_full[2], dout_empty[2];
    uint64_t ds_full[2], ds_empty[2]; /* where dQ is deferred */
    union {
        struct {
            uint64_t term_full[2], term_empty[2]; /* of a bias or mask in shared memory */
        };
        wgmma_peer_control peer; /* where two blocks share an item */
    };
    fattn_dropout dropout;
    wgmma_backward_item item[2];
    bool exists[2];                                 /* false: there are no more */
    wgmma_visit visit[S::SKIPS ? WGMMA_VISITS : 1]; /* of the tiles that are under way */
    wgmma_sight sight;                              /* where tiles may be left out */
};

/* What all roles know. */
template <class S> struct wgmma_backward_block {
    wgmma_backward_control<S> *control;
    uint32_t k, v, q, dout, ds, dq, p; /* tiles */
    uint32_t peer_k, peer_ds;          /* of the other block of an item */
    uint32_t terms;                    /* and those of a bias or mask */
    uint32_t lse, delta;               /* of each stage of q, of dO */
    int rank;                          /* of an item's blocks, from 0 */
    int group;                         /* query heads of a key/value head */
    bool waits;                        /* a bias or mask is copied to shared memory */
    bool chunks;                       /* or its rows may be read 16 bytes at a time */
    bool ordered;                      /* blocks add to dQ in turn */
};

/* Where tiles may be left out, the copier says here which come next, and the others read it; n:
 * counted by each of them, in all items of the block. When a tile is copied, all have read that of
 * so many before. */
template <class S>
GPU_DEVICE wgmma_visit *wgmma_visit_at(const wgmma_backward_block<S> &b, uint32_t n)
{
    return &b.control->visit[n % (S::SKIPS ? WGMMA_VISITS : 1)];
}

/* A place in a ring: phases change when it begins anew. */
template <int STAGES> struct wgmma_place {
    int stage, phase;
};

template <int STAGES> GPU_DEVICE void wgmma_step(wgmma_place<STAGES> &place)
{
    place.stage = place.stage + 1 == STAGES ? 0 : place.stage + 1;
    place.phase ^= place.stage == 0;
}

/* The tile of queries after this one: after all of a head's, the one that the item begins with. */
GPU_DEVICE int wgmma_next_tile(const wgmma_backward_item &w, int tile)
{
    return tile + 1 == w.past ? w.first : tile + 1;
}

/* The same of an item that visits only tiles whose bits are set. */
GPU_DEVICE int wgmma_next_visit(const wgmma_backward_item &w, const uint32_t *visits, int tile)
{
    const int next = seen_next(visits, tile + 1, w.past);
    return next < w.past ? next : w.start;
}

/* Waits for item n of the block; NULL where there are no more. */
template <class S>
GPU_DEVICE const wgmma_backward_item *wgmma_item_await(const wgmma_backward_block<S> &b, int n)
{
    wgmma_backward_control<S> &control = *b.control;
    wgmma_await(&control.item_full[n % 2], n / 2 % 2);
    return control.exists[n % 2] ? &control.item[n % 2] : NULL;
}

/* The block's barriers by number (wgmma_named_sync). */
enum {
    WGMMA_DS_MADE = 1,  /* of all that multiply */
    WGMMA_DQ_MADE = 2,  /* .. 3: of a warpgroup and an adder */
    WGMMA_DQ_ADDED = 4, /* .. 5: of a warpgroup and the adder of its last sums */
    WGMMA_CLEARED = 6,  /* .. 7: of a warpgroup */
    WGMMA_P_MADE = 8,   /* of all that multiply */
    WGMMA_NEXT_DUE = 9, /* .. 10: of both adders, by whose tile is next */
    WGMMA_TURN = 11,    /* .. 12: of both warpgroups, by whose turn it is */
    /* Where two blocks share an item, of all that multiply and the adder of even or odd tiles: */
    WGMMA_MAY_ADD = 2, /* .. 3 */
    WGMMA_ADDED = 4    /* .. 5 */
};
enum { WGMMA_WITH_ADDER = 128 + 32, WGMMA_ALL_WITH_ADDER = 256 + 32 };

#endif
