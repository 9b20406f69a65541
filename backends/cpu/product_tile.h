/* SPDX-License-Identifier: Apache-2.0 */
/* What the matrix products of floats and of pairs share: the sizes of their register tiles. */
#ifndef FATTN_CPU_PRODUCT_TILE_H
#define FATTN_CPU_PRODUCT_TILE_H

#include "backends/cpu/prefetch.h"
#include "backends/cpu/round.h"
#include "core/band.h"

_Static_assert(FV_FACTORS <= 2 && FV_NK % FV_FACTORS == 0, "tiles hold whole groups of factors");

/* The number of vectors of the next register tile. Tiles of one vector are slow, so four vectors
 * are divided into two and two and not into three and one. */
static int64_t tile_vectors(int64_t columns)
{
    const int64_t vectors = vectors_of(columns);
    return vectors == FV_NQ + 1 ? (FV_NQ + 1) / 2 : fattn_min64(vectors, FV_NQ);
}

/* Expands call(nq) with a literal nq: FV_NQ for whole tiles, 1 .. FV_NQ - 1 for the tail. */
_Static_assert(FV_NQ >= 1 && FV_NQ <= 4, "PRODUCT_WIDTHS knows four widths");
#define PRODUCT_WIDTHS(vectors, call)        \
    switch (vectors) {                       \
    case 1: call(1); break;                  \
    case 2: call(2 <= FV_NQ ? 2 : 1); break; \
    case 3: call(3 <= FV_NQ ? 3 : 1); break; \
    default: call(FV_NQ); break;             \
    }

#endif
