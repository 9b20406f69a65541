/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An emulator of AMD GPUs for the code objects that we ship: gfx90a, gfx942 and gfx950 in waves of
 * 64 lanes, gfx1100 and gfx1200 in waves of 32. It exists because we have no such GPU for tests,
 * and it detects what a GPU hides: accesses out of bounds, undefined values, races in LDS.
 *
 * A device address is a host address. Lanes may touch only memory that the caller registers. One
 * object serves one thread at a time. docs/EMULATOR.md has the rest.
 */
#ifndef FATTN_TESTS_EMULATOR_H
#define FATTN_TESTS_EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct emu_object emu_object; /* a loaded code object */
typedef struct emu_kernel emu_kernel; /* a kernel of it, decoded when it is first launched */
typedef struct emu_memory emu_memory; /* what lanes may touch */

/* ---- memory ---------------------------------------------------------------------------------- */

/* Returns NULL if memory runs out. Destroying frees no region. */
emu_memory *emu_memory_create(void);
void emu_memory_destroy(emu_memory *memory);

/* Registers size bytes at base, which the caller owns. Lanes may read and write them. With `fresh`,
 * reads of bytes that neither a lane nor emu_memory_define has written are detected. False if
 * memory runs out or the region overlaps another. */
bool emu_memory_add(emu_memory *memory, void *base, size_t size, bool fresh);

/* False if no region begins at base. */
bool emu_memory_remove(emu_memory *memory, const void *base);

/* Declares the region at base fine-grained: atomic operations on floats are lost there, as on
 * gfx90a. False if no region begins there. */
bool emu_memory_refine(emu_memory *memory, const void *base);

/* Declares that the host has written size bytes at base, within a region. */
void emu_memory_define(emu_memory *memory, const void *base, size_t size);

/* Whether size bytes at base are within one region; the host's copies should check this. */
bool emu_memory_holds(const emu_memory *memory, const void *base, size_t size);

/* ---- code objects ---------------------------------------------------------------------------- */

/* NULL if this machine can run the emulator, else the reason (it lacks the vector instructions that
 * the emulator was compiled for). */
const char *emu_host_reason(void);

/* Loads a code object, an ELF file of one architecture, disassembling it with `objdump` (the path
 * of an llvm-objdump that knows AMDGPU). The bytes are copied. NULL with the reason in why. */
emu_object *emu_object_load(const void *bytes, size_t size, const char *objdump, char *why,
                            size_t why_size);
void emu_object_unload(emu_object *object);

const char *emu_object_arch(const emu_object *object); /* "gfx942" */
int emu_object_wave(const emu_object *object);         /* lanes of a wave: 32 or 64 */

/* The entry of an offload bundle ("__CLANG_OFFLOAD_BUNDLE__") for an architecture, and its size in
 * bytes; NULL if the bundle has none. Also takes a bare code object of that architecture. */
const void *emu_bundle_find(const void *bytes, size_t size, const char *arch, size_t *entry_size);

/* A variable of the object: its bytes in the loaded image and their number; NULL if unknown. */
void *emu_object_variable(emu_object *object, const char *name, size_t *size);

int emu_object_kernels(const emu_object *object);
emu_kernel *emu_object_kernel(emu_object *object, int index);
emu_kernel *emu_object_find(emu_object *object, const char *name); /* NULL if unknown */

typedef struct emu_argument {
    int offset, size; /* bytes within the kernel arguments */
    bool hidden;      /* filled in by the launch, not by the caller */
    char kind[32];    /* of the metadata: "by_value", "global_buffer", "hidden_block_count_x" */
} emu_argument;

/* Facts from the metadata and the kernel's descriptor. */
typedef struct emu_kernel_info {
    const char *name;
    int kernarg_size; /* bytes, hidden arguments included */
    int lds_size;     /* static bytes */
    int scratch_size; /* bytes per lane */
    int vgprs, agprs, sgprs;
    int vgpr_spills, sgpr_spills;
    int max_threads; /* of a work-group */
    int arguments;
    const emu_argument *argument;
} emu_kernel_info;

const emu_kernel_info *emu_kernel_describe(const emu_kernel *kernel);

/* Decodes the kernel now. False if it cannot run, with every unknown mnemonic or operand in why; a
 * launch would report the same. */
bool emu_kernel_decode(emu_kernel *kernel, char *why, size_t why_size);

/* ---- launches -------------------------------------------------------------------------------- */

typedef enum emu_schedule {
    EMU_FORWARD,  /* each wave to its next barrier, wave 0 first; work-groups in order */
    EMU_REVERSED, /* the same from the last wave and the last work-group */
    EMU_SHUFFLED, /* waves alternate after a few instructions; work-groups in random order */
} emu_schedule;

typedef struct emu_launch {
    uint32_t grid[3];     /* work-groups */
    uint32_t block[3];    /* work-items of one */
    uint32_t dynamic_lds; /* bytes after the static ones */
    const void *kernarg;  /* the explicit arguments, laid out as emu_kernel_info says */
    size_t kernarg_size;
    emu_schedule schedule;
    uint64_t seed;             /* of EMU_SHUFFLED */
    bool count_banks;          /* whether the report counts LDS cycles */
    uint64_t max_instructions; /* of one wave, against endless loops; 0: 2^40 */
    /* Called, unless NULL, with the address in the object of each instruction that the first wave
     * of work-group 0 runs, in order. */
    void (*trace)(void *to, uint32_t address);
    void *trace_to;
} emu_launch;

/* The class of an instruction. */
typedef enum emu_class {
    EMU_SALU,    /* scalar arithmetic */
    EMU_SMEM,    /* scalar loads */
    EMU_VALU,    /* vector arithmetic, DPP and permutations in registers included */
    EMU_TRANS,   /* exp, log, rcp, rsq, sqrt, sin, cos */
    EMU_MATRIX,  /* MFMA and WMMA */
    EMU_LDS,     /* ds_*: loads, stores, permutations through LDS */
    EMU_VMEM,    /* global, buffer, flat, scratch */
    EMU_ATOMIC,  /* those of them that are atomic */
    EMU_BARRIER, /* s_barrier */
    EMU_BRANCH,  /* s_branch, s_cbranch_*, s_endpgm */
    EMU_WAIT,    /* s_waitcnt, s_nop, hints */
    EMU_CLASSES,
} emu_class;

extern const char *const emu_class_names[EMU_CLASSES];

typedef struct emu_report {
    /* Of the launch: a fault ends it; the others are counted, and the first of each is
     * described. */
    bool fault;
    uint64_t undefined, race;
    char fault_text[512], undefined_text[512], race_text[512];

    uint64_t executed[EMU_CLASSES]; /* wave-instructions */
    uint64_t lds_cycles;            /* of LDS accesses, bank conflicts included; with count_banks */
    uint64_t lds_cycles_ideal;      /* without bank conflicts */
} emu_report;

/* Runs a grid to its end, in this thread. Returns false after a fault, an undefined value or a
 * race; the report, which may not be NULL, says which. */
bool emu_launch_run(emu_kernel *kernel, const emu_launch *launch, emu_memory *memory,
                    emu_report *report);

/* A line about a report, "" if nothing is wrong: the fault, else the first undefined value, else
 * the first race. */
const char *emu_report_text(const emu_report *report);

#endif
