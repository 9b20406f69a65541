/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by the emulator's own tests: loading a code object, memory for its kernels, launches, and
 * random numbers.
 */
#ifndef FATTN_TESTS_EMULATOR_BENCH_H
#define FATTN_TESTS_EMULATOR_BENCH_H

#include <stdlib.h>

#include "tests/emulator/emulator.h"
#include "tests/tap.h"

/* What the checks of one code object share. */
typedef struct bench {
    emu_object *object;
    const char *arch;
    emu_memory *memory;
    emu_report report;
    emu_schedule schedule;
    uint32_t dynamic_lds;
    uint64_t limit;
} bench;

/* Zeroed memory that lanes may touch; ends the program without it. */
void *bench_allocate(bench *b, size_t size, bool fresh);
void bench_release(bench *b, void *p);

/* Launches `groups` work-groups of `threads`; the report is in b. */
bool bench_launch(bench *b, const char *name, uint32_t groups, uint32_t threads,
                  const void *kernarg, size_t size);

#define LAUNCH(b, name, groups, threads, arguments) \
    bench_launch(b, name, groups, threads, &(arguments), sizeof(arguments))

uint32_t bench_random_bits(void);
float bench_random_float(void); /* in [-2, 2) */

/* A file's bytes, to be freed; NULL when it cannot be read. */
void *bench_file(const char *path, size_t *size);

typedef void bench_checker(bench *b, const void *bytes, size_t size, const char *objdump);

static inline void bench_check(const char *objdump, const char *path, bench_checker *check)
{
    size_t size = 0;
    char why[512] = "";
    void *const bytes = bench_file(path, &size);
    bench b = {.object =
                   bytes == NULL ? NULL : emu_object_load(bytes, size, objdump, why, sizeof why),
               .memory = emu_memory_create()};
    const bool ready = b.object != NULL && b.memory != NULL;
    tap_check(ready, "%s is loaded %s", path, why);
    if (ready) {
        b.arch = emu_object_arch(b.object);
        check(&b, bytes, size, objdump);
    }
    emu_memory_destroy(b.memory);
    emu_object_unload(b.object);
    free(bytes);
}

/* Checks each code object of "PROGRAM OBJDUMP CODE_OBJECT ..."; skips with a reason if there are
 * none or this processor cannot run the emulator. Returns main's status. Defined in a header
 * because it uses the count of tap.h. */
static inline int bench_main(int argc, char **argv, bench_checker *check)
{
    const char *const reason =
        argc < 3 ? "no LLVM that compiles and disassembles for AMD GPUs" : emu_host_reason();
    if (reason != NULL)
        tap_skip("emulator", reason);
    else
        for (int n = 2; n < argc; n++) bench_check(argv[1], argv[n], check);
    return tap_done();
}

#endif
