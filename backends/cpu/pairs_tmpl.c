/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that multiply pairs of bf16, compiled once for each instruction set that can.
 * Problems that they decline, and all other types, go to the kernels of the base (isa_tmpl.c).
 * Parameters:
 *
 *     FATTN_ISA    its name, a word: the object's only global is fattn_cpu_<name>
 *     FATTN_VEC    the header with its vocabulary, in quotes, which extends that of the base
 *     FATTN_BASE   the base's name, a word
 */
#include "backends/cpu/backward_pairs.h"
#include "backends/cpu/forward_pairs.h"
#include "backends/cpu/peak_pairs.h"

static const fattn_cpu_kernel kernels[] = {
    {
        .row = {.name = KERNEL_NAME("forward_pairs"),
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = FATTN_DTYPE_BIT(FATTN_BF16),
                .any_bias = true,
                .dtypes_kv = FATTN_DTYPE_BIT(FATTN_E4M3),
                .features = FATTN_CPU_FEATURES,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .packs_groups = true,
                .leaves_few = DECODE_ROWS,
                .pays = forward_pairs_pay,
                .tiles = forward_pairs_tiles,
                .cost = forward_pairs_cost,
                .split = fattn_cpu_forward_split,
                .fast_bytes = forward_pairs_fast_bytes,
                .workspace = forward_pairs_workspace},
        .merges = true,
        .scratch = forward_pairs_scratch,
        .shared = forward_shared,
        .phases = {{forward_count, forward_pairs_work, FATTN_CPU_ONE},
                   {merge_count, merge_work, FATTN_CPU_SEVERAL}},
    },
    {
        .row = {.name = KERNEL_NAME("backward_pairs"),
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),
                .dtypes = FATTN_DTYPE_BIT(FATTN_BF16),
                .any_bias = true,
                .features = FATTN_CPU_FEATURES & ~FATTN_KERNEL_NOT_BACKWARD,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .own_dtype_o = true, /* dO is an operand of bf16 products, too */
                .packs_groups = true,
                .tiles = backward_pairs_tiles,
                .cost = PAIRS_BACKWARD_BLOCK_ROWS ? backward_pairs_cost : NULL,
                .fast_bytes = backward_pairs_fast_bytes,
                .workspace = backward_pairs_workspace},
        .scratch = backward_pairs_scratch,
        .shared = backward_shared,
        .phases = {{clear_count, clear_work, FATTN_CPU_SEVERAL},
                   {backward_count, backward_pairs_work, FATTN_CPU_NONE},
                   {finish_count, finish_work, FATTN_CPU_SEVERAL}},
    },
};

const fattn_cpu_isa PASTE(fattn_cpu_, FATTN_ISA) = {
    .name = STRING(FATTN_ISA),
    .base = STRING(FATTN_BASE),
    .kernels = kernels,
    .kernel_count = sizeof kernels / sizeof kernels[0],
    .peaks = peaks,
};
