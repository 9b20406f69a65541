/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What wgmma.c, which plans them, and the Hopper kernels must agree on, and how Hopper's matrix
 * units lay out their operands. Plain C, so that a test on the host can check the layouts.
 */
#ifndef FATTN_CUDA_WGMMA_H
#define FATTN_CUDA_WGMMA_H

#include <stdint.h>

#include "core/host_device.h"

/*
 * The shapes that are compiled: X(name, width, width_v, warpgroups, keys, stages), with width and
 * width_v the padded channels of queries and keys and of values, 64 rows a warpgroup, and stages of
 * keys, and of values, in shared memory. docs/notes/hopper-forward.md has the measurements.
 */
#define WGMMA_SHAPES(X)             \
    X(64, 64, 64, 3, 128, 3)        \
    X(128, 128, 128, 2, 128, 2)     \
    X(192_128, 192, 128, 2, 128, 2) \
    X(192, 192, 192, 2, 112, 2)     \
    X(256, 256, 256, 2, 64, 2)

/* A warpgroup that copies and plans, and those that multiply. */
#define WGMMA_THREADS(warpgroups) (128 * ((warpgroups) + 1))

/* Bytes of shared memory: a tile of queries, `stages` of keys and of values, rows of o on their way
 * out, the barriers and the items (wgmma_control), and what aligns the tiles. */
#define WGMMA_SHARED(width, width_v, warpgroups, keys, stages)                                 \
    (2 * ((width) * (64 * (warpgroups) + (stages) * (keys)) + (width_v) * (stages) * (keys)) + \
     4 * (warpgroups)*WGMMA_OUT_BYTES + WGMMA_CONTROL + WGMMA_ALIGN)
#define WGMMA_OUT_BYTES 1024 /* a warp's: 64 channels of 8 rows */
#define WGMMA_CONTROL 1152
#define WGMMA_ALIGN 1024 /* where a pattern of swizzled rows begins */

/* Bytes of workspace: the counter that blocks take their items from where these have unlike numbers
 * of keys, by lengths or by a band. */
#define WGMMA_WORKSPACE 256

/*
 * A tile in shared memory is cut into panels of 64 channels. A panel has a row of 128 bytes for
 * each row of the tile, and chunk c of 16 bytes of row r lies at c ^ (r % 8): the swizzle of 128
 * bytes, which copies write and products read. Offset of channel c of row r in a tile of `rows`:
 */
FATTN_HD uint32_t wgmma_offset(uint32_t rows, uint32_t r, uint32_t c)
{
    const uint32_t chunk = c % 64 / 8;
    return c / 64 * rows * 128 + r * 128 + ((chunk ^ (r % 8)) << 4) + c % 8 * 2;
}

/*
 * Descriptor of an operand in such a tile that begins at address `at` of shared memory: eight rows
 * are 1024 bytes, and where the channels are summed over no other distance counts. Where the rows
 * are summed over, `panel` bytes lie between a panel and the next. 16 channels further it is
 * WGMMA_CHANNELS more, until a panel ends; 16 rows further, WGMMA_ROWS.
 */
FATTN_HD uint64_t wgmma_descriptor(uint32_t at, uint32_t panel)
{
    const uint64_t swizzled = UINT64_C(1) << 62, eight_rows = (uint64_t)(1024 >> 4) << 32;
    return swizzled | eight_rows | (uint64_t)(panel >> 4) << 16 | (at & 0x3ffff) >> 4;
}
#define WGMMA_CHANNELS (32 >> 4)
#define WGMMA_ROWS (2048 >> 4)

/* Element n of a product's 64 rows that thread t of a warpgroup holds: its row and its column. As
 * pairs of 16 bits, elements 8 s .. 8 s + 7 are the thread's part of columns 16 s .. 16 s + 15 as
 * the first operand of another product. */
FATTN_HD int wgmma_row(int t, int n) { return t / 32 * 16 + t % 32 / 4 + n % 4 / 2 * 8; }

FATTN_HD int wgmma_column(int t, int n) { return n / 4 * 8 + t % 4 * 2 + n % 2; }

#endif
