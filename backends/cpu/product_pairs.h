/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix products of product.h, of pairs of bf16. */
#ifndef FATTN_CPU_PRODUCT_PAIRS_H
#define FATTN_CPU_PRODUCT_PAIRS_H

#include "backends/cpu/product_tile.h"

#define PRODUCT(name) name##_pairs
#define WORD bf16_pair
#define ROW pv
#define ROW_LOAD(x) pv_load(x)
#define FACTORS pf
#define FACTORS_ONE(x) pf_set1(x)
#define FACTORS_LOAD(x) pf_load(x)
#define MULADD(a, n, b, c) pf_muladd(a, n, b, c)
#include "backends/cpu/product_tmpl.h"

#endif
