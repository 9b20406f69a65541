/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A scan kernel runs before forward or backward and reads the bias or the mask (scan.cuh). For each
 * tile of keys of an item it writes a byte to the workspace: whether some pair is kept, and whether
 * the tile is mixed, that is, some pair is dropped or has a bias other than 0. The kernel after it
 * skips tiles of which nothing is kept, and does not read the bias or mask of tiles that are not
 * mixed. This header has what these kernels and the rows that plan them must agree on.
 */
#ifndef FATTN_CUDA_SCAN_H
#define FATTN_CUDA_SCAN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/host_device.h"

#define SCAN_KEPT 1
#define SCAN_MIXED 2
#define SCAN_BYTES(k_blocks) (((k_blocks) + 7) / 8 * 8) /* per item */

/* A block scans a tile of an item. Its warps share the rows of the tile. */
#define SCAN_WARPS 8
#define SCAN_THREADS (32 * SCAN_WARPS)

/* Whether a bias or a mask is scanned. With at most `few` items, of which each block has one, and
 * few keys, the scan would take longer than it saves. */
#define SCAN_FEW 128
FATTN_HD bool scan_pays(int64_t items, int64_t few, int64_t keys)
{
    return items > few || keys > 512;
}

/* The same for rows that take any number of tiles, of at least 32 keys: they do not scan if 32 bits
 * cannot count the tiles. Items are below 2^32, keys below 2^31. */
FATTN_HD bool scan_runs(int64_t items, int64_t keys)
{
    return scan_pays(items, SCAN_FEW, keys) && items * (keys / 32 + 8) < INT64_C(1) << 32;
}

#endif
