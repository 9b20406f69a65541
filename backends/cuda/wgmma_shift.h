/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order in which blocks of a deterministic backward on Hopper add to tiles of dQ if every query
 * attends to every key. Plain C, so that a test on the host can simulate it (tests/check_shift.c).
 *
 * An item is a tile of keys; it visits all tiles of queries. If all items of a head began with the
 * same tile, each would wait for the one before it. So they are shifted: the items of a head are
 * divided into parts, and the items of a part begin `apart` tiles apart (wgmma_shift_apart). Item
 * n of a part begins with tile n * apart and, at the end of the queries, goes on with tile 0. So
 * items of a part that began together are never at the same tile, and they reach a given tile one
 * after another, `apart` tiles apart: first the last item that begins at or before this tile, then
 * those before it down to item 0, then the last item of the part and those before it down to the
 * first that begins behind the tile. The first parts of all heads come first. Within a part the
 * last items come first, because nobody waits for them until the end of a rotation.
 *
 * An item waits for others of its part, which may not have been taken yet. They will be, since
 *   - items are taken in order, and a part has at most as many items as there are blocks that
 *     surely run at the same time;
 *   - no block takes an item of a part while it works on another one of that part
 *     (wgmma_shift_may_take). So for the first unfinished part, each item either has a block of
 *     its own, or there is a free block to take it;
 *   - no item of that part waits for a later part.
 */
#ifndef FATTN_CUDA_WGMMA_SHIFT_H
#define FATTN_CUDA_WGMMA_SHIFT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/host_device.h"

/* A run: tiles of queries and of keys of a head, key/value heads of all sequences, blocks of the
 * grid, and how many of them surely run at the same time. */
typedef struct wgmma_shift_run {
    int q_blocks, k_blocks, heads, grid, side_by_side;
} wgmma_shift_run;

/* An item, and its place in the order. */
typedef struct wgmma_shift {
    int64_t item; /* head and tile of keys: head after head, each from its last tile on */
    int part;     /* its part, numbered over all heads; -1: items of this run are not shifted */
    int number;   /* its number in the part */
    int peers;    /* how many items the part has; 0 if items are not shifted */
} wgmma_shift;

/* Item `taken` of a run whose items are not shifted. */
FATTN_HD wgmma_shift wgmma_shift_none(int taken)
{
    const wgmma_shift to = {taken, -1, 0, 0};
    return to;
}

FATTN_HD int wgmma_shift_least(int a, int b) { return a < b ? a : b; }

/* The item that is taken as number `taken`. If the parts of few heads would leave blocks idle,
 * items are not shifted. */
FATTN_HD wgmma_shift wgmma_shift_of(wgmma_shift_run run, int taken)
{
    const int room = wgmma_shift_least(run.side_by_side, run.q_blocks / 2);
    const int most = room > 1 ? room : 1;
    const int parts = (run.k_blocks + most - 1) / most, size = (run.k_blocks + parts - 1) / parts;
    wgmma_shift to = wgmma_shift_none(taken);
    if (parts > 1 && run.heads * size < run.grid) {
        return to;
    }
    const int n = taken / (run.heads * size), rest = taken - n * run.heads * size;
    to.peers = wgmma_shift_least(size, run.k_blocks - n * size);
    const int head = rest / to.peers;
    to.part = n * run.heads + head;
    to.number = to.peers - 1 - (rest - head * to.peers);
    to.item = (int64_t)head * run.k_blocks + (run.k_blocks - 1 - n * size - to.number);
    return to;
}

/* Whether a block may take item `next` while it works on an item of part `part`. */
FATTN_HD bool wgmma_shift_may_take(int part, wgmma_shift next)
{
    return next.part < 0 || next.part != part;
}

/* How many tiles apart the items of a part begin. They are spread over all tiles, or over the first
 * `spread` if there are more, so that the tiles in use fit into L2. The distance is at least
 * `least`, 1 or 2, because giving a turn to the next item may take longer than a tile; a part has
 * few enough items for 2. */
FATTN_HD int wgmma_shift_apart(int q_blocks, int peers, int spread, int least)
{
    const int far = wgmma_shift_least(q_blocks, spread) / peers;
    return far > least ? far : least;
}

/* How many items of its part have added to a tile when it is this item's turn. */
FATTN_HD int wgmma_shift_turn(int number, int peers, int apart, int tile)
{
    const int begun = wgmma_shift_least(tile / apart, peers - 1);
    return (number <= begun ? 0 : peers) + begun - number;
}

#endif /* FATTN_CUDA_WGMMA_SHIFT_H */
