/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels that multiply floats, compiled once for each instruction set. Parameters:
 *
 *     FATTN_ISA    its name, a word: the object's only global is fattn_cpu_<name>
 *     FATTN_VEC    the header with its vocabulary, in quotes; vec_scalar.h defines the vocabulary
 *
 * The code below uses nothing but standard C and that vocabulary, so a new instruction set is a new
 * header. Instruction sets that also multiply pairs of bf16 are units of their own (pairs_tmpl.c).
 */
#include "backends/cpu/backward_floats.h"
#include "backends/cpu/brief.h"
#include "backends/cpu/forward_floats.h"
#include "backends/cpu/peak_loops.h"

static const fattn_cpu_kernel kernels[] = {
    DECODE_KERNEL(.dtypes_kv = FATTN_CPU_DTYPES | FATTN_DTYPE_BIT(FATTN_E4M3)),
    {
        .row = {.name = KERNEL_NAME("forward"),
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = FATTN_CPU_DTYPES,
                .dtypes_kv = FATTN_CPU_DTYPES | FATTN_DTYPE_BIT(FATTN_E4M3),
                .any_bias = true,
                .features = FATTN_CPU_FEATURES,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .packs_groups = true,
                .leaves_few = DECODE_ROWS,
                .tiles = forward_tiles,
                .cost = forward_cost,
                .split = fattn_cpu_forward_split,
                .fast_bytes = forward_fast_bytes,
                .workspace = forward_workspace},
        .merges = true,
        .scratch = forward_scratch,
        .shared = forward_shared,
        .phases = {{forward_count, forward_work, FATTN_CPU_ONE},
                   {merge_count, merge_work, FATTN_CPU_SEVERAL}},
    },
    {
        .row = {.name = KERNEL_NAME("backward"),
                .ops = FATTN_OP_BIT(FATTN_BACKWARD),
                .dtypes = FATTN_CPU_DTYPES,
                .any_bias = true,
                .features = FATTN_CPU_FEATURES & ~FATTN_KERNEL_NOT_BACKWARD,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .packs_groups = true,
                .tiles = backward_tiles,
                .cost = backward_cost,
                .fast_bytes = backward_fast_bytes,
                .workspace = backward_workspace},
        .scratch = backward_scratch,
        .shared = backward_shared,
        .phases = {{clear_count, clear_work, FATTN_CPU_SEVERAL},
                   {backward_count, backward_work, FATTN_CPU_NONE},
                   {finish_count, finish_work, FATTN_CPU_SEVERAL}},
    },
};

const fattn_cpu_isa PASTE(fattn_cpu_, FATTN_ISA) = {
    .name = STRING(FATTN_ISA),
    .kernels = kernels,
    .kernel_count = sizeof kernels / sizeof kernels[0],
    .peaks = peaks,
};
