/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which bytes a tensor touches, as a box of strided runs, and whether two such boxes can overlap.
 * Tensors that interleave (q, k and v as slices of one packed array) touch the same address range
 * without sharing a byte, so comparing ranges would refuse a common case.
 */
#ifndef FATTN_CORE_REGION_H
#define FATTN_CORE_REGION_H

#include <stdbool.h>
#include <stdint.h>

typedef struct fattn_region {
    uintptr_t base;
    int64_t extent[4]; /* >= 0 */
    int64_t stride[4]; /* bytes, >= 0 */
    int64_t run;       /* contiguous bytes at every point of the box; 0: the region is empty */
} fattn_region;

bool fattn_region_is_empty(const fattn_region *region);

/* Bytes from the first to one past the last; false when that does not fit in 63 bits. */
bool fattn_region_span(const fattn_region *region, int64_t *bytes);

/* Whether two points of the box share a byte. May say yes of exotic boxes that do not: never no of
 * boxes that do. The span must fit in 63 bits. */
bool fattn_region_overlaps_itself(const fattn_region *region);

/* Whether two regions share a byte, with the same one-sided error. */
bool fattn_regions_overlap(const fattn_region *a, const fattn_region *b);

#endif
