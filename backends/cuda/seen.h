/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kernels that look at a bias or a mask before forward or backward (seen.cuh), the kernels
 * after them and the rows that plan both must agree on. Each tile of keys of an item has a byte in
 * the workspace: whether some pair is kept, and whether the tile is mixed, that is, some pair is
 * dropped, or has a bias that is not 0.
 */
#ifndef FATTN_CUDA_SEEN_H
#define FATTN_CUDA_SEEN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/host_device.h"

#define SEEN_KEPT 1
#define SEEN_MIXED 2
#define SEEN_BYTES(k_blocks) (((k_blocks) + 7) / 8 * 8) /* of an item */

/* A block looks at a tile of an item, by so many warps, which share its rows. */
#define SEEN_WARPS 8
#define SEEN_THREADS (32 * SEEN_WARPS)

/* Whether a bias or a mask is looked at. With no more than `few` items, of which each block has
 * one, and few keys, the kernel before would take longer than what it saves. */
#define SEEN_FEW 128
FATTN_HD bool seen_pays(int64_t items, int64_t few, int64_t keys)
{
    return items > few || keys > 512;
}

/* The same of rows that take any number of tiles, of at least 32 keys: they do not look where 32
 * bits do not count them. Items are below 2^32, keys below 2^31. */
FATTN_HD bool seen_counts(int64_t items, int64_t keys)
{
    return seen_pays(items, SEEN_FEW, keys) && items * (keys / 32 + 8) < INT64_C(1) << 32;
}

#endif
