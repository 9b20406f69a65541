/* SPDX-License-Identifier: Apache-2.0 */
#include "core/region.h"

/* The axes of a box with more than one point, by ascending stride. */
typedef struct axes {
    int count;
    int64_t extent[4], stride[4];
    int64_t run;
} axes;

bool fattn_region_is_empty(const fattn_region *region)
{
    bool empty = region->run == 0;
    for (int a = 0; a < 4; a++) {
        empty = empty || region->extent[a] == 0;
    }
    return empty;
}

bool fattn_region_span(const fattn_region *region, int64_t *bytes)
{
    if (fattn_region_is_empty(region)) {
        *bytes = 0;
        return true;
    }
    int64_t span = region->run;
    for (int a = 0; a < 4; a++) {
        int64_t reach = 0;
        if (__builtin_mul_overflow(region->extent[a] - 1, region->stride[a], &reach) ||
            __builtin_add_overflow(span, reach, &span)) {
            return false;
        }
    }
    *bytes = span;
    return true;
}

static axes moving_axes(const fattn_region *region)
{
    axes sorted = {.run = region->run};
    for (int a = 0; a < 4; a++) {
        if (region->extent[a] < 2) {
            continue;
        }
        int at = sorted.count++;
        for (; at > 0 && sorted.stride[at - 1] > region->stride[a]; at--) {
            sorted.stride[at] = sorted.stride[at - 1];
            sorted.extent[at] = sorted.extent[at - 1];
        }
        sorted.stride[at] = region->stride[a];
        sorted.extent[at] = region->extent[a];
    }
    return sorted;
}

bool fattn_region_overlaps_itself(const fattn_region *region)
{
    if (fattn_region_is_empty(region)) {
        return false;
    }
    const axes box = moving_axes(region);
    int64_t span = box.run;
    for (int a = 0; a < box.count; a++) {
        if (box.stride[a] < span) {
            return true;
        }
        span += box.stride[a] * (box.extent[a] - 1);
    }
    return false;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b)
{
    while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The span of the box's `inner` innermost axes. *period becomes the greatest common divisor of
 * itself and the strides of the other axes. */
static int64_t fold(const axes *box, int inner, int64_t *period)
{
    int64_t span = box->run;
    for (int a = 0; a < inner; a++) {
        span += box->stride[a] * (box->extent[a] - 1);
    }
    for (int a = inner; a < box->count; a++) {
        *period = greatest_common_divisor(box->stride[a], *period);
    }
    return span;
}

/*
 * Treat the inner axes of each box as one contiguous run. The strides of all other axes are
 * multiples of a period, so the boxes can overlap only if their runs overlap modulo the period. If
 * for one choice of inner axes the runs do not, the boxes share no byte.
 */
bool fattn_regions_overlap(const fattn_region *a, const fattn_region *b)
{
    if (fattn_region_is_empty(a) || fattn_region_is_empty(b)) {
        return false;
    }
    if (a->base > b->base) {
        const fattn_region *const swap = a;
        a = b;
        b = swap;
    }
    const uintptr_t distance = b->base - a->base;
    const axes box_a = moving_axes(a);
    const axes box_b = moving_axes(b);
    for (int inner_a = box_a.count; inner_a >= 0; inner_a--) {
        for (int inner_b = box_b.count; inner_b >= 0; inner_b--) {
            int64_t period = 0;
            const uint64_t span_a = (uint64_t)fold(&box_a, inner_a, &period);
            const uint64_t span_b = (uint64_t)fold(&box_b, inner_b, &period);
            const uint64_t gap = period ? distance % (uint64_t)period : distance;
            if (gap >= span_a && (period == 0 || gap + span_b <= (uint64_t)period)) {
                return false;
            }
        }
    }
    return true;
}
