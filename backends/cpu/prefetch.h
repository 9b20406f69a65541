/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of rows that products prefetch into the second-level cache while they multiply. */
#ifndef FATTN_CPU_PREFETCH_H
#define FATTN_CPU_PREFETCH_H

#include "backends/cpu/unit.h"

/* Bytes of a row, counted from the beginning of the cache line in which it begins: so many that one
 * address in each CACHE_LINE bytes from the row's first one on reaches all its lines. */
static inline int64_t bytes_in_lines(const void *row, int64_t bytes)
{
    return bytes + (int64_t)((uintptr_t)row % CACHE_LINE);
}

/* Rows to prefetch, from number `next` on. Each register tile prefetches `step` of them, one cache
 * line of each at a time: with more at once they would take the fill buffers that the tile itself
 * needs. If a product has fewer steps than a row has lines, the remaining lines are prefetched
 * before it. */
typedef struct prefetch_row {
    const char *from;
    int64_t bytes; /* bytes_in_lines() */
} prefetch_row;
typedef struct prefetch_list {
    const prefetch_row *rows;
    int64_t count, next, step;
    bool a_continues; /* the next product reads the rows of A that follow */
} prefetch_list;

static const prefetch_row no_rows[1];
#define NO_PREFETCH ((prefetch_list){.rows = no_rows})

/* A list that `tiles` register tiles prefetch in equal steps. */
static prefetch_list spread_rows(const prefetch_row *rows, int64_t count, int64_t tiles)
{
    return (prefetch_list){.rows = rows, .count = count, .step = (count + tiles - 1) / tiles};
}

/* Prefetches the cache line at offset `byte` of each row. */
static inline void prefetch_lines(const prefetch_row *row, const prefetch_row *past, int64_t byte)
{
    for (; row < past; row++) {
        if (byte < row->bytes) {
            __builtin_prefetch(row->from + byte, 0, 2);
        }
    }
}

/* Prefetches all lines of each row from offset `byte` on. */
static inline void prefetch_rest(const prefetch_row *row, const prefetch_row *past, int64_t byte)
{
    for (; row < past; row++) {
        for (int64_t at = byte; at < row->bytes; at += CACHE_LINE) {
            __builtin_prefetch(row->from + at, 0, 2);
        }
    }
}

#endif
