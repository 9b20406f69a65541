/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The list of work of a tiling, as formulas: item n of tiling->items is a block of rows of one
 * head, and one part of its keys. Nothing is stored, so that planning costs the same for any size.
 * Kernels of every backend ask here.
 */
#ifndef FATTN_CORE_SCHEDULE_H
#define FATTN_CORE_SCHEDULE_H

#include "core/host_device.h"
#include "core/kernel.h"

typedef struct fattn_work {
    int64_t batch;
    int64_t head;  /* key/value head for a kernel that packs groups, else query head */
    int64_t block; /* of rows: block * br .. */
    int64_t split; /* part of the keys */
} fattn_work;

/* a / b for a >= 0, b > 0. Divisions are slow on a GPU, above all those of 64 bits, but compilers
 * try 32 bits first. */
FATTN_HD int64_t fattn_quotient(int64_t a, int64_t b)
{
    return b == 1 ? a : (int64_t)((uint64_t)a / (uint64_t)b);
}

/*
 * Items of a head follow one another, so that its keys and values stay in cache, and within a head
 * the last rows come first. Under a causal mask these are the heavy ones: what is handed out last,
 * when workers run out of work, is light. There as many heads as a cache holds take turns, all
 * their last rows first: what is left in the end is then light for all workers, and not for those
 * alone that have come to the end of a head. In a batch of ragged lengths the last rows are those
 * that a short sequence does not have, which are over at once and hold up nobody.
 */
FATTN_HD fattn_work fattn_schedule_item(const fattn_tiling *tiling, int64_t heads, int64_t item)
{
    const int64_t block = fattn_quotient(item, tiling->splits);
    const int64_t turn = fattn_quotient(block, tiling->q_blocks * tiling->together);
    const int64_t first = turn * tiling->together, left = tiling->heads - first;
    const int64_t together = left < tiling->together ? left : tiling->together;
    const int64_t at = block - first * tiling->q_blocks, row = fattn_quotient(at, together);
    const int64_t head = first + at - row * together;
    fattn_work work;
    work.batch = fattn_quotient(head, heads);
    work.head = head - work.batch * heads;
    work.block = tiling->q_blocks - 1 - row;
    work.split = item - block * tiling->splits;
    return work;
}

/* The key blocks of a part: first .. past - 1. */
FATTN_HD void fattn_schedule_keys(const fattn_tiling *tiling, int64_t split, int64_t *first,
                                  int64_t *past)
{
    const int64_t begin = split * tiling->split_blocks, end = begin + tiling->split_blocks;
    *first = begin < tiling->k_blocks ? begin : tiling->k_blocks;
    *past = end < tiling->k_blocks ? end : tiling->k_blocks;
}

#endif
