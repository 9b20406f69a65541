/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine is: instruction sets, caches, names. Asked once, when the device is opened. */
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
const char *fattn_cpuid_avx512bf16(void);
const char *fattn_cpuid_amx(void); /* asks the system for leave to use it, for the whole process */
const char *fattn_cpuid_neon(void);
const char *fattn_cpuid_neonbf16(void);

/* Whether products of bf16 pairs take so long here that floats multiply faster. */
int fattn_cpuid_pairs_are_slow(void);

/* Bytes of a core's data cache of the level, 1..3; 0 when the system does not say. */
int64_t fattn_cpuid_cache(int level);

/* Bytes of memory, 0 when unknown. */
int64_t fattn_cpuid_memory(void);

/* How a thread's arithmetic rounds, and whether it flushes: on x86-64, where all of it is in vector
 * registers, a word, since asking for the rest of the environment takes longer than a small problem
 * may. */
typedef struct fattn_cpu_arithmetic {
#if defined(__x86_64__)
    unsigned control;
#else
    fenv_t environment;
#endif
} fattn_cpu_arithmetic;

/* Rounding to nearest, with subnormal numbers; what the caller had comes back by the second. */
void fattn_cpuid_arithmetic_begin(fattn_cpu_arithmetic *callers);
void fattn_cpuid_arithmetic_end(const fattn_cpu_arithmetic *callers);

/* The processor's name for people. */
void fattn_cpuid_name(char *name, size_t size);

#endif
