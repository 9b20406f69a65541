/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The work list of a tiling, as formulas: item n of tiling->items is a block of rows of one head
 * and one part of its keys. Nothing is stored, so planning takes the same time for any size.
 * Kernels of all backends use these formulas.
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

/* The type in which items are counted. 64-bit divisions and products are slow on a GPU, although
 * compilers try a 32-bit division first. A kernel whose numbers are all below 2^32 defines
 * FATTN_SMALL_QUOTIENTS. */
#ifdef FATTN_SMALL_QUOTIENTS
typedef uint32_t fattn_count;
#else
typedef uint64_t fattn_count;
#endif

/* a / b, b > 0. Most divisors are 1 (splits, together), and a division costs some 20 instructions
 * on a GPU. */
FATTN_HD fattn_count fattn_share(fattn_count a, fattn_count b) { return b == 1 ? a : a / b; }

/* The same for signed numbers that are not negative. */
FATTN_HD int64_t fattn_quotient(int64_t a, int64_t b)
{
    return (int64_t)fattn_share((fattn_count)a, (fattn_count)b);
}

/*
 * The items of a head follow one another, so that its keys and values stay in cache. Within a head
 * the last rows come first: under a causal mask they have the most work, and the items at the end
 * of the list should be small, so that all workers finish at about the same time. Under such a mask
 * the items of `together` heads alternate, as many heads as a cache holds. Two heads, a and b, with
 * three blocks of rows each are
 *
 *     a2 b2 a1 b1 a0 b0    with together 2: small items are last
 *     a2 a1 a0 b2 b1 b0    with together 1: a large one, b2, is in the second half
 *
 * In a ragged batch the last blocks do not exist in short sequences; their items return at once.
 */
FATTN_HD fattn_work fattn_schedule_item(const fattn_tiling *tiling, int64_t heads, int64_t item)
{
    const fattn_count number = (fattn_count)item, rows = (fattn_count)tiling->q_blocks;
    const fattn_count splits = (fattn_count)tiling->splits, most = (fattn_count)tiling->together;
    const fattn_count block = fattn_share(number, splits);
    const fattn_count first = fattn_share(block, rows * most) * most;
    const fattn_count left = (fattn_count)tiling->heads - first;
    const fattn_count together = left < most ? left : most;
    const fattn_count at = block - first * rows, row = fattn_share(at, together);
    const fattn_count head = first + at - row * together;
    const fattn_count batch = fattn_share(head, (fattn_count)heads);
    fattn_work work;
    work.batch = (int64_t)batch;
    work.head = (int64_t)(head - batch * (fattn_count)heads);
    work.block = (int64_t)(rows - 1 - row);
    work.split = (int64_t)(number - block * splits);
    return work;
}

/* The parts of the keys of a block of rows. */
typedef struct fattn_parts {
    int64_t first, past; /* key blocks to which some row attends */
    int64_t size;        /* key blocks per part; the last part may have fewer */
} fattn_parts;

/* The most parts into which this many key blocks are cut. More blocks never give fewer parts. */
FATTN_HD int64_t fattn_schedule_most(const fattn_tiling *tiling, int64_t blocks)
{
    if (tiling->splits == 1 || blocks <= tiling->whole_blocks) {
        return 1;
    }
    const int64_t worth = fattn_quotient(blocks, tiling->part_blocks);
    return worth < 1 ? 1 : worth < tiling->splits ? worth : tiling->splits;
}

/*
 * Cuts the key blocks first .. past - 1 into parts. A plan is made for the longest possible
 * sequence, while the actual lengths are data. So the plan only limits the number of parts, and a
 * block of rows with few keys gets fewer, down to one. The result depends on the block's own
 * sequence alone. Kernels, and the code that merges their parts, both call this function.
 */
FATTN_HD fattn_parts fattn_schedule_parts(const fattn_tiling *tiling, int64_t first, int64_t past)
{
    const int64_t blocks = past > first ? past - first : 0;
    fattn_parts parts;
    parts.first = first;
    parts.past = first + blocks;
    parts.size = tiling->split_blocks;
    if (blocks != tiling->k_blocks) { /* divisions are slow */
        const int64_t most = fattn_schedule_most(tiling, blocks);
        parts.size = fattn_quotient(blocks + most - 1, most);
    }
    return parts;
}

/* Cuts the key blocks first .. past - 1 into at most `most` parts. */
FATTN_HD fattn_parts fattn_schedule_cut(int64_t first, int64_t past, int64_t most)
{
    fattn_parts parts;
    parts.first = first;
    parts.past = past > first ? past : first;
    parts.size = fattn_quotient(parts.past - first + most - 1, most);
    return parts;
}

/* Whether there is only one part. */
FATTN_HD int fattn_parts_are_one(const fattn_parts *parts)
{
    return parts->past - parts->first <= parts->size;
}

FATTN_HD int64_t fattn_parts_count(const fattn_parts *parts)
{
    const int64_t blocks = parts->past - parts->first;
    return blocks <= parts->size ? 1 : fattn_quotient(blocks + parts->size - 1, parts->size);
}

/* The key blocks of part `split`: first .. past - 1. Returns whether the part exists. Part 0 always
 * does, even without keys. */
FATTN_HD int fattn_schedule_keys(const fattn_parts *parts, int64_t split, int64_t *first,
                                 int64_t *past)
{
    const int64_t begin = parts->first + split * parts->size, end = begin + parts->size;
    *first = begin < parts->past ? begin : parts->past;
    *past = end < parts->past ? end : parts->past;
    return split == 0 || begin < parts->past;
}

#endif
