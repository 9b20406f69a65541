/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of a tensor as a box of strided runs, and whether two such boxes overlap. Tensors that
 * interleave (q, k and v as slices of one packed array) have overlapping address ranges but share
 * no byte, so comparing ranges would refuse a common case.
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

/* Whether two points of the box share a byte. If they do, the answer is always true; it may also be
 * true for unusual boxes without such points. The span must fit in 63 bits. */
bool fattn_region_overlaps_itself(const fattn_region *region);

/* Whether two regions share a byte. If they do, the answer is always true; it may also be true for
 * unusual boxes that do not. */
bool fattn_regions_overlap(const fattn_region *a, const fattn_region *b);

#endif
