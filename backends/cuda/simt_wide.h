/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes of the kernels of simt_wide.cuh: what the host plans with and device code is made of. */
#ifndef FATTN_SIMT_WIDE_H
#define FATTN_SIMT_WIDE_H

#define WIDE_THREADS 128

/* X(channels to which rows are padded, rows, keys of a tile, lines of a step): a thread has 8 x 8
 * elements of rows by keys, and of rows by channels. */
#define WIDE_SHAPES(X) \
    X(64, 128, 64, 32) \
    X(128, 64, 128, 32)

/* Floats of lines of `rows` numbers, with 4 more after every fourth. */
#define WIDE_LINES(lines, rows) ((lines) * (rows) + (lines))

/* Bytes: queries, weights, two steps; rows; what a block does. */
#define WIDE_SHARED(channels, rows, keys, lines)                 \
    (4 * (WIDE_LINES(channels, rows) + WIDE_LINES(keys, rows)) + \
     4 * 2 * (lines) * ((channels) + 4) + 8 * (rows) + 512)

#endif
