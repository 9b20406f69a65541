/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding over caches in e4m3, compiled for instruction sets that look such numbers up faster than
 * their base converts them. Problems that it declines go to the kernels of the base (isa_tmpl.c).
 * Parameters:
 *
 *     FATTN_ISA    its name, a word: the object's only global is fattn_cpu_<name>
 *     FATTN_VEC    the header with its vocabulary, in quotes, which extends that of the base
 *     FATTN_BASE   the base's name, a word
 */
#define DECODE_E4M3_ALONE /* products with keys and values of no other type are compiled */
#pragma GCC diagnostic ignored "-Wunused-function" /* decoding uses a part of these headers */

#include "backends/cpu/brief.h"
#include "backends/cpu/cost.h"
#include "backends/cpu/peak.h"

static const fattn_cpu_kernel kernels[] = {
    {
        .row = {.name = KERNEL_NAME("decode"),
                .ops = FATTN_OP_BIT(FATTN_FORWARD),
                .dtypes = FATTN_CPU_DTYPES,
                .dtypes_kv = FATTN_DTYPE_BIT(FATTN_E4M3),
                .caches_alone = true,
                .any_bias = true,
                .features = FATTN_CPU_FEATURES & ~FATTN_BATCH_INVARIANT,
                .dim_max = FATTN_PROBLEM_DIM_MAX,
                .rows_max = DECODE_ROWS_MOST,
                .packs_groups = true,
                .pays = decode_pays,
                .tiles = decode_tiles,
                .split = fattn_cpu_decode_split,
                .fast_bytes = decode_fast_bytes,
                .workspace = decode_workspace},
        .scratch = brief_or_decode_scratch,
        .shared = decode_shared,
        .begin = begin_pieces,
        .phases = {{decode_count, decode_work, FATTN_CPU_SEVERAL}},
        .brief_plan = brief_plan,
        .brief_run = brief_run,
    },
};

static const fattn_cpu_peak no_peaks[] = {{.row = {.name = NULL}}};

const fattn_cpu_isa PASTE(fattn_cpu_, FATTN_ISA) = {
    .name = STRING(FATTN_ISA),
    .base = STRING(FATTN_BASE),
    .kernels = kernels,
    .kernel_count = sizeof kernels / sizeof kernels[0],
    .peaks = no_peaks,
};
