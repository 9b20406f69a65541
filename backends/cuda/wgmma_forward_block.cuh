/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the warps of a block share in forward on Hopper (wgmma_forward.cuh): the kernel's shape, the
 * description of an item, shared memory and its barriers, and the roles of the warps.
 */
#ifndef FATTN_CUDA_WGMMA_FORWARD_BLOCK_CUH
#define FATTN_CUDA_WGMMA_FORWARD_BLOCK_CUH

#include "backends/cuda/wgmma_pair.cuh"
#include "backends/cuda/wgmma_terms.cuh"
#include "backends/gpu/merge.cuh"

#define WGMMA_ITEMS 4 /* stages of the queue of items */

/* What becomes of an item's rows. */
typedef enum wgmma_result {
    WGMMA_WHOLE,  /* they are o and lse */
    WGMMA_PARTS,  /* keys may be split; then they are parts of rows */
    WGMMA_MERGED, /* they are merged with o and lse of other keys */
} wgmma_result;

/* T: mma_f16 or mma_bf16. W, WV: channels of q and k, and of v and o, padded. GROUPS: consumer
 * warpgroups. BN: keys of a tile. STAGES: pipeline stages of keys, and of values. FEATURES: those
 * of MMA_OF_PAIRS that the run has, 0 for lean kernels, or MMA_ANY. TERM_STAGES: staged panels of a
 * bias or mask, if that is the only feature. BLOCKS: how many a multiprocessor holds. STORED:
 * pipeline stages of panels in e4m3, if keys and values are stored in that type, and products are
 * of f16. OWN_TYPE: the type of q and o. */
template <class T, int W, int WV, int GROUPS, int BN, int STAGES, uint64_t FEATURES = 0,
          int TERM_STAGES = 0, wgmma_result RESULT = WGMMA_WHOLE, int BLOCKS = 1, int STORED = 0,
          class OWN_TYPE = T>
struct wgmma_shape {
    typedef T type;
    typedef OWN_TYPE own_type;
    static constexpr uint64_t KNOWN = FEATURES;
    enum {
        WIDTH = W,
        WIDTH_V = WV,
        PANELS = WGMMA_PANELS(W),
        PANELS_V = WGMMA_PANELS(WV),
        WARPGROUPS = GROUPS,
        WARPS = 4 * GROUPS,
        ROWS = 64 * GROUPS,
        THREADS = STORED > 0 ? WGMMA_E4M3_THREADS(GROUPS) : WGMMA_THREADS(GROUPS),
        KEYS = BN,
        RING = STAGES,
        QUERY_BYTES = 128 * PANELS * ROWS,
        KEY_BYTES = 128 * PANELS * BN,
        VALUE_BYTES = 128 * PANELS_V * BN,
        TERM_RING = TERM_STAGES,
        TERM_BYTES = WGMMA_TERM_PANEL(FEATURES, 64 * GROUPS), /* per panel */
        TERM_KEYS = 128 / (FEATURES == FATTN_BIAS ? 2 : 1),
        TERM_PANELS = (BN + TERM_KEYS - 1) / TERM_KEYS, /* per tile */
        STORED_RING = STORED,
        STORED_BYTES = WGMMA_STORED_PANEL(BN), /* per panel */
        IS_LEAN = FEATURES == 0,
        WIDENS = STORED > 0, /* keys and values are stored in e4m3 */
        WIDENERS = WGMMA_WIDENERS(GROUPS),
        HALVES = false, /* two warpgroups share rows (wgmma_halves.cuh) */
        CLUSTER = 1,    /* blocks that share items, each with a share of the rows */
        /* Channels of a product of weights and values: with the registers that each of 512 threads
         * is given at first, ptxas takes no 256. */
        PART_V = WIDENS && WV == 256 ? 128 : WV,
        FIRST_GROUP = WIDENS && WIDENERS == 4 ? 2 : 1, /* of the consumers */
        IS_STAGED = TERM_BYTES > 0,
        IS_SPLIT = RESULT == WGMMA_PARTS,
        MERGES = RESULT == WGMMA_MERGED,
        HAS_BLOCKS = FEATURES == FATTN_BLOCK_MASK,
        SKIPS = HAS_BLOCKS || IS_STAGED, /* it skips hidden tiles of keys anywhere in an item */
        MAY_LIST = !IS_SPLIT && !SKIPS,  /* items may follow the list of sequences */
        /* A warpgroup itself tests its last tiles, which may be hidden from all of its rows. */
        TESTS_TILES = IS_STAGED && (BN < 64 * GROUPS || GROUPS == 1),
        /* The bias is loaded to registers before the products, if there are enough of them. */
        READS_EARLY = FEATURES == FATTN_BIAS && GROUPS < 3,
        /* Fields that mma_terms.cuh needs. */
        TILES = 1,
        WARP_TILES = 1,
        FIRST_WARP = 4 * FIRST_GROUP,
        OWN = BN / 4,
        IN_ORDER = true,
        /* Registers per thread. A block is given EQUAL_REGISTERS for each of its threads. A
         * warpgroup that asks for more than are free waits forever. */
        EQUAL_REGISTERS = 65536 / (THREADS * BLOCKS) / 8 * 8,
        OWN_REGISTERS = GROUPS == 3                                           ? 160
                        : BLOCKS == 3                                         ? 128
                        : BLOCKS == 2 && FEATURES                             ? 208
                        : FEATURES == FATTN_BIAS || FEATURES == FATTN_SOFTCAP ? 232
                        : FEATURES & (FATTN_MASK | FATTN_SOFTCAP)             ? 224
                                                                              : 216,
        COPY_REGISTERS = ((GROUPS + FIRST_GROUP) * EQUAL_REGISTERS - GROUPS * OWN_REGISTERS) /
                         FIRST_GROUP / 8 * 8
    };
};

/* --- Items ------------------------------------------------------------------------------------ */

/* How many query heads share a key/value head. */
GPU_DEVICE int wgmma_group_of(const fattn_problem &p)
{
    return (int)(p.heads_q == p.heads_k ? 1 : fattn_quotient(p.heads_q, p.heads_k));
}

/* The description of an item. Keys, and so tiles of keys, are below 2^30 (wgmma_maps.c). */
typedef struct wgmma_item {
    bool exists;               /* false: there are no more items */
    int rows;                  /* rows that exist; heads of the group are adjacent */
    int keys;                  /* of the sequence */
    int first_key, past_key;   /* keys in the first query's band, clamped to MMA_LEFTMOST .. keys */
    int block, past;           /* tiles of keys block .. past - 1, to which some row attends */
    int own_past[3];           /* `past` of each warpgroup, for its own rows */
    int full[3], full_past[3]; /* tiles that are full for each warpgroup */
    int tail;                  /* keys of tile past - 1 whose values may be read; 0: all */
    int q_row, k_row;          /* first rows of copies */
    int batch, q_batch, k_batch, q_head, k_head;
    int64_t o, lse; /* element of o, and index in lse, of the first query's first head */
} wgmma_item;

/* The terms of items and of rows. */
template <class S, uint64_t FEATURES = S::KNOWN> struct wgmma_terms {
    mma_item terms[WGMMA_ITEMS];
};
template <class S> struct wgmma_terms<S, 0> {
};
template <class S> struct wgmma_terms<S, MMA_ANY> {
    mma_item terms[WGMMA_ITEMS];
    const char *bias[S::ROWS], *mask[S::ROWS]; /* at key 0 */
    gpu_f2 alibi[S::ROWS];                     /* slope, and distance from query i0 */
};
template <class S> struct wgmma_terms<S, FATTN_ALIBI> {
    mma_item terms[WGMMA_ITEMS];
    gpu_f2 alibi[S::ROWS];
};

/* In kernels for a bias, mask or block mask alone: the item's bytes from the scan, the number of
 * tiles of keys that are not hidden, and the tile in each stage of the ring, with WGMMA_MIXED if
 * the feature changes something in it. */
#define WGMMA_MIXED INT32_MIN
template <class S> struct wgmma_kept_tiles {
    const uint8_t *bytes[WGMMA_ITEMS]; /* NULL if there was no scan */
    int tiles[WGMMA_ITEMS], tile[S::RING];
};
template <class S> struct wgmma_staged_terms : wgmma_kept_tiles<S> {
    mma_item terms[WGMMA_ITEMS];
    uint64_t term_full[S::TERM_RING], term_empty[S::TERM_RING];
};
template <class S> struct wgmma_terms<S, FATTN_BIAS> : wgmma_staged_terms<S> {
};
template <class S> struct wgmma_terms<S, FATTN_MASK> : wgmma_staged_terms<S> {
};

template <class S> struct wgmma_terms<S, FATTN_BLOCK_MASK> : wgmma_kept_tiles<S> {
    mma_item terms[WGMMA_ITEMS];
};

/* An item's part of its keys. */
typedef struct wgmma_part {
    int number; /* of the item */
    int split;
    bool whole; /* it is the only part */
} wgmma_part;
template <class S, bool SPLITS = S::IS_SPLIT> struct wgmma_parts {
};
template <class S> struct wgmma_parts<S, true> {
    wgmma_part part[WGMMA_ITEMS];
    wgmma_cut cut; /* of the item that the planner sets: slot is that of its part */
};

/* For items that two blocks share. */
template <class S, bool SHARES = (S::CLUSTER > 1)> struct wgmma_shared_items {
};
template <class S> struct wgmma_shared_items<S, true> {
    wgmma_sent_number sent;
};

/* Barriers of stored panels. */
template <class S, bool WIDENS = S::WIDENS> struct wgmma_stored {
};
template <class S> struct wgmma_stored<S, true> {
    uint64_t stored_full[S::STORED_RING], stored_empty[S::STORED_RING];
};

/* A block's shared memory beside the tiles. */
template <class S>
struct wgmma_control : wgmma_terms<S>, wgmma_parts<S>, wgmma_shared_items<S>, wgmma_stored<S> {
    wgmma_item item[WGMMA_ITEMS];
    fattn_tiling tiling; /* this and seq are the planner's, which has few registers */
    fattn_sequence seq;
    bool listed; /* items follow the list of sequences */
    uint64_t item_full[WGMMA_ITEMS], item_empty[WGMMA_ITEMS], item_wanted;
    uint64_t q_full, q_empty;
    uint64_t k_full[S::RING], k_empty[S::RING], v_full[S::RING], v_empty[S::RING];
};

/* What all roles share. */
template <class S> struct wgmma_block {
    wgmma_control<S> *control;
    uint32_t q, k, v;            /* addresses of tiles */
    uint32_t terms;              /* and of staged panels of a bias or mask */
    uint32_t stored;             /* and of stored panels */
    uint32_t out;                /* staged rows of o, WGMMA_OUT_BYTES for each warp */
    int group;                   /* query heads of a key/value head */
    bool ping_pong;              /* warpgroups issue their products in turn */
    const fattn_merge_job *onto; /* a parameter of kernels that merge rows */
};

/* How many tiles a warpgroup has consumed from each ring. */
template <class S> struct wgmma_used {
    int k, v, terms;

    GPU_DEVICE int stage(int n) { return n % S::RING; }
    GPU_DEVICE int phase(int n) { return n / S::RING % 2; }
};

/* The warps of the producer warpgroup. */
enum {
    WGMMA_COPIER = 0, /* its first thread alone, unless keys are paged */
    WGMMA_PLANNER = 1,
    WGMMA_STAGER = 2,       /* its first thread alone */
    WGMMA_VALUE_COPIER = 3, /* with small pages: WGMMA_COPIES_APART */
    WGMMA_WIDENER = 2       /* and the next one, unless wideners have a warpgroup of their own */
};

/* The block's named barriers (wgmma_named_sync), by warpgroup. */
enum {
    WGMMA_FORWARD_PING_PONG = 1, /* .. 3: this warpgroup and the one before it */
    WGMMA_FORWARD_CLEARED = 4,   /* .. 6: this warpgroup */
    WGMMA_FORWARD_HIDDEN = 7     /* .. 9: this warpgroup */
};
enum { WGMMA_PING_PONG_THREADS = 2 * WGMMA_WARPGROUP };

/* The first channel of o that the thread's warpgroup has. */
template <class S> GPU_DEVICE int wgmma_first_channel(void)
{
    return S::HALVES ? (gpu_thread() / WGMMA_WARPGROUP - S::FIRST_GROUP) * S::WIDTH_V : 0;
}

/* The number of this block among those that share an item. */
template <class S> GPU_DEVICE int wgmma_share(void) { return S::CLUSTER > 1 ? wgmma_rank() : 0; }

/* How many rows of an item are used: it has all heads of a query, or none. */
template <class S> GPU_DEVICE int wgmma_tile_rows(int group)
{
    return group == 1 ? S::ROWS : S::ROWS / group * group;
}

#endif
