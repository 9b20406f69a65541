/* SPDX-License-Identifier: Apache-2.0 */
/* Properties of this machine: instruction sets, caches, names. Queried once, when the device is
 * opened. */
#ifndef FATTN_CPU_CPUID_H
#define FATTN_CPU_CPUID_H

#include <fenv.h>
#include <stddef.h>
#include <stdint.h>

/* One function for each row of isa_table in meson.build: NULL when this machine runs the
 * instruction set, else what it lacks, to follow "needs". */
const char *fattn_cpuid_scalar(void);
const char *fattn_cpuid_avx2(void);
const char *fattn_cpuid_avx512(void);
const char *fattn_cpuid_avx512vbmi(void);
const char *fattn_cpuid_avx512bf16(void);
/* asks the system for permission to use AMX, for the whole process */
const char *fattn_cpuid_amx(void);
const char *fattn_cpuid_neon(void);
const char *fattn_cpuid_neonbf16(void);

/* Whether vector products of bf16 pairs are slower here than products of floats. */
int fattn_cpuid_pairs_are_slow(void);

/* Bytes of a core's data cache of the level, 1..3; 0 when the system does not say. */
int64_t fattn_cpuid_cache(int level);

/* Bytes of memory, 0 when unknown. */
int64_t fattn_cpuid_memory(void);

/* A thread's rounding mode, and whether it flushes subnormal numbers. On x86-64 all arithmetic is
 * in vector registers, so one word (MXCSR) is enough; saving the rest of the environment would take
 * too long for a small problem. */
typedef struct fattn_cpu_arithmetic {
#if defined(__x86_64__)
    unsigned control;
#else
    fenv_t environment;
#endif
} fattn_cpu_arithmetic;

/* begin() sets rounding to nearest with subnormal numbers, and saves the caller's setting; end()
 * restores it. */
void fattn_cpuid_arithmetic_begin(fattn_cpu_arithmetic *callers);
void fattn_cpuid_arithmetic_end(const fattn_cpu_arithmetic *callers);

/* The processor's name, for display. */
void fattn_cpuid_name(char *name, size_t size);

#endif
