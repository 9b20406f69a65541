/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of rows that products fetch into the second-level cache while they multiply. */
#ifndef FATTN_CPU_PREFETCH_H
#define FATTN_CPU_PREFETCH_H

#include "backends/cpu/unit.h"

/* Rows to fetch into the second-level cache, from number `next` on. Each register tile fetches
 * `step` of them, a line of each at a time: more at once would take the fill buffers that the tile
 * needs itself. Lines that a product is too short for are fetched before it. */
typedef struct prefetch_row {
    const char *from;
    int64_t bytes;
} prefetch_row;
typedef struct prefetch_list {
    const prefetch_row *rows;
    int64_t count, next, step;
    bool goes_on; /* the rows of A after those of this product are those of the next one */
} prefetch_list;

static const prefetch_row no_rows[1];
#define NO_PREFETCH ((prefetch_list){.rows = no_rows})

/* Rows that `tiles` register tiles fetch. */
static prefetch_list spread_rows(const prefetch_row *rows, int64_t count, int64_t tiles)
{
    return (prefetch_list){.rows = rows, .count = count, .step = (count + tiles - 1) / tiles};
}

/* The line at `byte` of each row. */
static inline void prefetch_lines(const prefetch_row *row, const prefetch_row *past, int64_t byte)
{
    for (; row < past; row++) {
        if (byte < row->bytes) {
            __builtin_prefetch(row->from + byte, 0, 2);
        }
    }
}

/* The lines from `byte` on. */
static inline void prefetch_rest(const prefetch_row *row, const prefetch_row *past, int64_t byte)
{
    for (; row < past; row++) {
        for (int64_t at = byte; at < row->bytes; at += CACHE_LINE) {
            __builtin_prefetch(row->from + at, 0, 2);
        }
    }
}

#endif
