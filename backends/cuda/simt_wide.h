/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes of the kernels of simt_wide.cuh, for the host's plans and for device code. */
#ifndef FATTN_SIMT_WIDE_H
#define FATTN_SIMT_WIDE_H

#define WIDE_THREADS 128

/* X(channels to which rows are padded, rows, keys of a tile, lines of a step). A thread has 8 x 8
 * scores, and 8 x 8 elements of o. */
#define WIDE_SHAPES(X) \
    X(64, 128, 64, 32) \
    X(128, 64, 128, 32)

/* Floats that `lines` lines of `rows` floats take, with 4 floats of padding after every fourth
 * line. */
#define WIDE_LINES(lines, rows) ((lines) * (rows) + (lines))

/* Shared memory in bytes: queries, weights and two steps, a gpu_query for each row, the item. */
#define WIDE_SHARED(channels, rows, keys, lines)                 \
    (4 * (WIDE_LINES(channels, rows) + WIDE_LINES(keys, rows)) + \
     4 * 2 * (lines) * ((channels) + 4) + 8 * (rows) + 512)

#endif
