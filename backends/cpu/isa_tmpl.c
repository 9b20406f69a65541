/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU kernels, compiled once for each instruction set. Parameters:
 *
 *     FATTN_ISA    its name, a word: the object's only global is fattn_cpu_<name>
 *     FATTN_VEC    the header with its vocabulary, in quotes; vec_scalar.h says what that is
 *
 * Nothing but standard C and that vocabulary is used below, so a new instruction set is a new
 * header.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "backends/cpu/cpu.h"
#include "core/band.h"
#include "core/problem.h"
#include "core/schedule.h"

#include FATTN_VEC

#ifndef FV_PAIRS
#define FV_PAIRS 0
#endif
#ifndef FV_TILES
#define FV_TILES 0
#endif
#define FV_PAIR_VECTORS (FV_PAIRS && !FV_TILES) /* vectors of pairs are multiplied */

#define FATTN_SUFFIX _fv
#include "core/philox.h"
#undef FATTN_SUFFIX
#include "core/online_softmax.h"
#include "core/philox.h"
#include "core/score.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __has_attribute
#if __has_attribute(noclone)
#define NOCLONE __attribute__((noclone))
#endif
#endif
#ifndef NOCLONE
#define NOCLONE
#endif
/* Apart from its callers, or their variables take the registers of its loops. */
#define APART static __attribute__((noinline))
#define PASTE_EXPANDED(a, b) a##b
#define PASTE(a, b) PASTE_EXPANDED(a, b)
#define STRING_EXPANDED(a) #a
#define STRING(a) STRING_EXPANDED(a)
#define KERNEL_NAME(kernel) STRING(FATTN_ISA) "_" kernel
#define CACHE_LINE 64 /* bytes */

_Static_assert(FV_ND % FV_NK == 0 && FV_ND % FV_LANES == 0, "tiles of keys hold whole steps");

/* Two neighbours along a sum. Memory of them has the alignment of one. */
typedef struct bf16_pair {
    uint16_t first, second;
} bf16_pair;

/* A worker's way through the items that it takes, one by one. */
INLINE void each_item(const fattn_cpu_run *run, void *scratch,
                      void (*work)(const fattn_cpu_run *run, int64_t item, void *scratch))
{
    for (int64_t item; fattn_cpu_take(run->items, &item);) {
        work(run, item, scratch);
    }
}

/* Vectors that hold n numbers. */
static int64_t vectors_of(int64_t n) { return (n + FV_LANES - 1) / FV_LANES; }

/* Of n numbers, those in whole vectors: a mask, because signed numbers are divided slowly. */
static int64_t in_whole_vectors(int64_t n) { return n & -(int64_t)FV_LANES; }

#include "backends/cpu/rows.inl"

#include "backends/cpu/product.inl"
#if FV_PAIR_VECTORS
#define FATTN_PAIRS
#include "backends/cpu/product.inl"
#undef FATTN_PAIRS
#endif

#include "backends/cpu/panel.inl"

#include "backends/cpu/terms.inl"

#include "backends/cpu/hidden.inl"

#include "backends/cpu/pairs.inl"

#include "backends/cpu/window.inl"

#include "backends/cpu/strip.inl"

#include "backends/cpu/soften.inl"

#include "backends/cpu/small.inl"

#include "backends/cpu/store.inl"

#include "backends/cpu/parts.inl"

#include "backends/cpu/ahead.inl"

#include "backends/cpu/forward.inl"

#include "backends/cpu/decode.inl"

#include "backends/cpu/brief.inl"

#include "backends/cpu/gradients.inl"

#include "backends/cpu/lone.inl"

#include "backends/cpu/backward.inl"

#include "backends/cpu/backward_pairs.inl"

#include "backends/cpu/backward_run.inl"

#include "backends/cpu/peak.inl"

#define CPU_DTYPES \
    (FATTN_DTYPE_BIT(FATTN_F32) | FATTN_DTYPE_BIT(FATTN_F16) | FATTN_DTYPE_BIT(FATTN_BF16))

static const fattn_cpu_kernel kernels[] = {
    {
        .row = {.name = KERNEL_NAME("decode"),
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = CPU_DTYPES,
                .features = FATTN_FEATURES_ALL & ~FATTN_BATCH_INVARIANT,
                .dim_max = 256,
                .rows_max = DECODE_ROWS,
                .packs_groups = true,
                .splits_keys = true,
                .pieces = 16, /* a part's sums are small, and items of several heads few */
                .pays = decode_pays,
                .tiles = decode_tiles,
                .fast_bytes = decode_fast_bytes,
                .workspace = decode_workspace},
        .scratch = brief_or_decode_scratch,
        .shared = forward_shared,
        .phases = {{decode_count, decode_work}, {merge_count, merge_work}},
    },
#if FV_PAIRS
    {
        .row = {.name = KERNEL_NAME("forward_pairs"),
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = FATTN_DTYPE_BIT(FATTN_BF16),
                .features = FATTN_FEATURES_ALL,
                .dim_max = 256,
                .packs_groups = true,
                .splits_keys = true,
                .split_keys = 2048,
                .pays = pairs_pay,
                .tiles = forward_tiles,
                .rounds = FORWARD_ROUNDS,
                .block_rows = pairs_block_rows,
                .fast_bytes = forward_fast_bytes,
                .workspace = forward_workspace},
        .scratch = forward_scratch,
        .shared = forward_shared,
        .phases = {{forward_count, pairs_work}, {merge_count, merge_work}},
    },
#endif
    {
        .row = {.name = KERNEL_NAME("forward"),
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = CPU_DTYPES,
                .features = FATTN_FEATURES_ALL,
                .dim_max = 256,
                .packs_groups = true,
                .splits_keys = true,
                .split_keys = 2048, /* a part sends a block's sums through memory */
                .tiles = forward_tiles,
                .rounds = FORWARD_ROUNDS,
                .block_rows = forward_block_rows,
                .fast_bytes = forward_fast_bytes,
                .workspace = forward_workspace},
        .scratch = forward_scratch,
        .shared = forward_shared,
        .phases = {{forward_count, forward_work}, {merge_count, merge_work}},
    },
#if FV_PAIRS
    {
        .row = {.name = KERNEL_NAME("backward_pairs"),
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),
                .dtypes = FATTN_DTYPE_BIT(FATTN_BF16),
                .features = FATTN_FEATURES_ALL & ~(FATTN_PAGED | FATTN_BATCH_INVARIANT),
                .dim_max = 256,
                .own_dtype_o = true, /* dO is an operand */
                .packs_groups = true,
                .tiles = backward_pairs_tiles,
                .fast_bytes = pairs_fast_bytes,
                .workspace = pairs_workspace},
        .scratch = pairs_scratch,
        .shared = backward_shared,
        .phases = {{clear_count, clear_work},
                   {backward_count, backward_work_pairs},
                   {finish_count, finish_work}},
    },
#endif
    {
        .row = {.name = KERNEL_NAME("backward"),
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),
                .dtypes = CPU_DTYPES,
                .features = FATTN_FEATURES_ALL & ~(FATTN_PAGED | FATTN_BATCH_INVARIANT),
                .dim_max = 256,
                .packs_groups = true,
                .tiles = backward_tiles,
                .in_order = true,
                .block_rows = backward_block_rows,
                .fast_bytes = backward_fast_bytes,
                .workspace = backward_workspace},
        .scratch = backward_scratch,
        .shared = backward_shared,
        .phases = {{clear_count, clear_work},
                   {backward_count, backward_work},
                   {finish_count, finish_work}},
    },
};

const fattn_cpu_isa PASTE(fattn_cpu_, FATTN_ISA) = {
    .name = STRING(FATTN_ISA),
    .kernels = kernels,
    .kernel_count = sizeof kernels / sizeof kernels[0],
    .peaks = peaks,
};
