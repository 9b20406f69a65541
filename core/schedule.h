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

/* a / b for a >= 0, b > 0. Divisions are slow on a GPU, above all those of 64 bits. */
FATTN_HD int64_t fattn_quotient(int64_t a, int64_t b)
{
    if (b == 1) {
        return a;
    }
    return (a | b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}

/*
 * Items of a head follow one another, so that its keys and values stay in cache, and within a head
 * the last rows come first. Under a causal mask these are the heavy ones: what is handed out last,
 * when workers run out of work, is light. In a batch of ragged lengths they are the rows that a
 * short sequence does not have, which are over at once and hold up nobody.
 */
FATTN_HD fattn_work fattn_schedule_item(const fattn_tiling *tiling, int64_t heads, int64_t item)
{
    const int64_t block = fattn_quotient(item, tiling->splits);
    const int64_t head = fattn_quotient(block, tiling->q_blocks);
    fattn_work work;
    work.batch = fattn_quotient(head, heads);
    work.head = head - work.batch * heads;
    work.block = tiling->q_blocks - 1 - (block - head * tiling->q_blocks);
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
