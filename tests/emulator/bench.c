/* SPDX-License-Identifier: Apache-2.0 */
/* See bench.h. */
#include <stdio.h>
#include <stdlib.h>

#include "tests/emulator/bench.h"
#include "tests/random.h"

static uint64_t random_state = 1;

uint32_t bench_random_bits(void) { return (uint32_t)(random_next(&random_state) >> 32); }

float bench_random_float(void) { return (float)(int32_t)bench_random_bits() * 0x1p-30f; }

void *bench_allocate(bench *b, size_t size, bool fresh)
{
    void *const p = calloc(1, size);
    if (p == NULL || !emu_memory_add(b->memory, p, size, fresh)) {
        printf("Bail out! no memory\n");
        exit(1);
    }
    return p;
}

void bench_release(bench *b, void *p)
{
    emu_memory_remove(b->memory, p);
    free(p);
}

bool bench_launch(bench *b, const char *name, uint32_t groups, uint32_t threads,
                  const void *kernarg, size_t size)
{
    emu_kernel *const kernel = emu_object_find(b->object, name);
    if (kernel == NULL) return false;
    const emu_launch l = {.grid = {groups, 1, 1},
                          .count_banks = true,
                          .block = {threads, 1, 1},
                          .dynamic_lds = b->dynamic_lds,
                          .kernarg = kernarg,
                          .kernarg_size = size,
                          .schedule = b->schedule,
                          .seed = bench_random_bits(),
                          .max_instructions = b->limit};
    return emu_launch_run(kernel, &l, b->memory, &b->report);
}

void *bench_file(const char *path, size_t *size)
{
    FILE *const file = fopen(path, "rb");
    if (file == NULL) return NULL;
    fseek(file, 0, SEEK_END);
    const long end = ftell(file);
    rewind(file);
    void *const bytes = malloc((size_t)end + 1);
    *size = bytes == NULL ? 0 : fread(bytes, 1, (size_t)end, file);
    fclose(file);
    return bytes;
}
