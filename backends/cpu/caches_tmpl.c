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
    DECODE_KERNEL(.dtypes_kv = FATTN_DTYPE_BIT(FATTN_E4M3), .caches_alone = true),
};

static const fattn_cpu_peak no_peaks[] = {{.row = {.name = NULL}}};

const fattn_cpu_isa PASTE(fattn_cpu_, FATTN_ISA) = {
    .name = STRING(FATTN_ISA),
    .base = STRING(FATTN_BASE),
    .kernels = kernels,
    .kernel_count = sizeof kernels / sizeof kernels[0],
    .peaks = no_peaks,
};
