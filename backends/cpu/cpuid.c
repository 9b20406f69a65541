/* SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* _SC_PHYS_PAGES */

#include "backends/cpu/cpuid.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *fattn_cpuid_scalar(void) { return NULL; }

/* --- x86 -------------------------------------------------------------------------------------- */

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

/* Register states that the system saves on a context switch (XCR0). Registers that it does not save
 * may not be used. */
#define STATE_AVX 0x6u     /* xmm, ymm */
#define STATE_AVX512 0xe6u /* and the masks, the upper halves, zmm16 to 31 */

#define STATE_AMX 0x600e6u /* and tiles, with their shapes */

#define LEAF_AMX_BF16 0x400000u  /* in leaf 7, edx */
#define LEAF_AMX_TILE 0x1000000u /* there too */
#define LEAF_AVX512_VBMI 0x2u    /* in leaf 7, ecx */
#define LEAF_AVX512_BF16 0x20u   /* in leaf 7, subleaf 1 */

typedef struct x86 {
    unsigned basic_ecx;     /* leaf 1 */
    unsigned ebx, ecx, edx; /* leaf 7 */
    unsigned more_eax;      /* leaf 7, subleaf 1 */
    unsigned states;        /* XCR0 */
} x86;

static x86 ask_x86(void)
{
    x86 cpu = {0};
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
        cpu.basic_ecx = ecx;
    }
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        cpu.ebx = ebx, cpu.ecx = ecx, cpu.edx = edx;
    }
    if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) {
        cpu.more_eax = eax;
    }
    if (cpu.basic_ecx & bit_OSXSAVE) {
        unsigned high = 0;
        __asm__ volatile("xgetbv" : "=a"(cpu.states), "=d"(high) : "c"(0));
    }
    return cpu;
}

static int has(unsigned have, unsigned need) { return (have & need) == need; }

const char *fattn_cpuid_avx2(void)
{
    const x86 cpu = ask_x86();
    if (!has(cpu.basic_ecx, bit_FMA | bit_F16C | bit_AVX) || !has(cpu.ebx, bit_AVX2)) {
        return "a processor with AVX2, FMA and F16C";
    }
    return has(cpu.states, STATE_AVX) ? NULL : "a system that saves the AVX registers";
}

const char *fattn_cpuid_avx512(void)
{
    const x86 cpu = ask_x86();
    const char *const lacks = fattn_cpuid_avx2();
    if (lacks) {
        return lacks;
    }
    if (!has(cpu.ebx, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL)) {
        return "a processor with AVX-512 F, DQ, BW and VL";
    }
    return has(cpu.states, STATE_AVX512) ? NULL : "a system that saves the AVX-512 registers";
}

const char *fattn_cpuid_avx512vbmi(void)
{
    const char *const lacks = fattn_cpuid_avx512();
    if (lacks) {
        return lacks;
    }
    return has(ask_x86().ecx, LEAF_AVX512_VBMI) ? NULL : "a processor with AVX-512 VBMI";
}

const char *fattn_cpuid_avx512bf16(void)
{
    const char *const lacks = fattn_cpuid_avx512();
    if (lacks) {
        return lacks;
    }
    return has(ask_x86().more_eax, LEAF_AVX512_BF16) ? NULL : "a processor with AVX-512 BF16";
}

/* The state of tiles is large, so Linux saves it only for processes that have asked for permission.
 * From then on it refuses alternate signal stacks that are too small for that state. */
static int may_use_tiles(void)
{
#if defined(__linux__) && defined(__x86_64__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return 0;
#endif
}

const char *fattn_cpuid_amx(void)
{
    const char *const lacks = fattn_cpuid_avx512bf16();
    if (lacks) {
        return lacks;
    }
    const x86 cpu = ask_x86();
    if (!has(cpu.edx, LEAF_AMX_BF16 | LEAF_AMX_TILE) || fattn_cpuid_avx512vbmi()) {
        return "a processor with AMX in bf16";
    }
    if (!has(cpu.states, STATE_AMX)) {
        return "a system that saves the AMX registers";
    }
    return may_use_tiles() ? NULL : "the system's permission to use AMX, which it refuses";
}

/* vdpbf16ps: Intel's processors execute one in two cycles (measured on Sapphire Rapids), half the
 * terms of their two FMAs a cycle. AMD's Zen 5 executes two a cycle, twice the terms of its
 * FMAs. */
int fattn_cpuid_pairs_are_slow(void)
{
    unsigned eax, ebx = 0, ecx, edx;
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_INTEL_ebx;
}
#else
int fattn_cpuid_pairs_are_slow(void) { return 0; }
#endif

/* --- Arithmetic ------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#define CONTROL_DEFAULT 0x1f80u /* of MXCSR: no exception traps */

void fattn_cpuid_arithmetic_begin(fattn_cpu_arithmetic *callers)
{
    const unsigned plain = CONTROL_DEFAULT;
    __asm__ volatile("stmxcsr %0" : "=m"(callers->control));
    __asm__ volatile("ldmxcsr %0" : : "m"(plain));
}

void fattn_cpuid_arithmetic_end(const fattn_cpu_arithmetic *callers)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(callers->control));
}
#else
void fattn_cpuid_arithmetic_begin(fattn_cpu_arithmetic *callers)
{
    fegetenv(&callers->environment);
    fesetenv(FE_DFL_ENV);
}

void fattn_cpuid_arithmetic_end(const fattn_cpu_arithmetic *callers)
{
    fesetenv(&callers->environment);
}
#endif

/* --- Arm -------------------------------------------------------------------------------------- */

#if defined(__aarch64__)
#ifdef __linux__
#include <sys/auxv.h>

const char *fattn_cpuid_neon(void)
{
    const unsigned long need = HWCAP_FP | HWCAP_ASIMD;
    return (getauxval(AT_HWCAP) & need) == need ? NULL : "a processor with Advanced SIMD";
}

#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1ul << 14)
#endif

const char *fattn_cpuid_neonbf16(void)
{
    return getauxval(AT_HWCAP2) & HWCAP2_BF16 ? NULL : "a processor with Advanced SIMD and BF16";
}
#else
/* AArch64 implies Advanced SIMD; whether there is BF16, other systems report each in its own
 * way. */
const char *fattn_cpuid_neon(void) { return NULL; }
const char *fattn_cpuid_neonbf16(void) { return "a system that tells whether there is BF16"; }
#endif
#endif

/* --- The machine ------------------------------------------------------------------------------ */

/* Reads the first line of a file in Linux's description of the caches of core 0. Returns 0 if there
 * is none. */
static int read_cache(int index, const char *field, char *line, int size)
{
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, field);
    FILE *const file = fopen(path, "r");
    if (!file) {
        return 0;
    }
    const int read = fgets(line, size, file) != NULL;
    fclose(file);
    return read;
}

int64_t fattn_cpuid_cache(int level)
{
    char line[32];
    for (int index = 0; read_cache(index, "level", line, sizeof line); index++) {
        int found = 0;
        long long size = 0;
        char unit = 'K';
        if (sscanf(line, "%d", &found) != 1 || found != level) {
            continue;
        }
        if (!read_cache(index, "type", line, sizeof line) || line[0] == 'I') {
            continue;
        }
        if (read_cache(index, "size", line, sizeof line) &&
            sscanf(line, "%lld%c", &size, &unit) >= 1 && size > 0 && size < 1 << 20) {
            return (int64_t)size << (unit == 'M' ? 20 : unit == 'K' ? 10 : 0);
        }
    }
    return 0;
}

int64_t fattn_cpuid_memory(void)
{
    const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (int64_t)pages * size : 0;
}

void fattn_cpuid_name(char *name, size_t size)
{
    char line[256];
    FILE *const file = fopen("/proc/cpuinfo", "r");
    snprintf(name, size, "CPU");
    while (file && fgets(line, sizeof line, file)) {
        const char *const colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(name, size, "%s", colon + 1 + strspn(colon + 1, " "));
            break;
        }
    }
    if (file) {
        fclose(file);
    }
}
