/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The .npy reader as a fuzz target. Any bytes must be read or refused with one line, without a
 * leak; what was read must come back from the writer bit by bit.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. -Iinclude \
 *         tests/fuzz_npy.c tools/npy/npy.c tools/npy/replacement.c \
 *         tools/npy/complaint.c core/memory.c -o fuzz_npy
 *     ./fuzz_npy -max_len=512 FINDINGS tests/npy_corpus
 *
 * With -DFATTN_FUZZ_REPLAY it is a plain TAP program that runs each file, or each file of each
 * folder, that it is given.
 */
#define _XOPEN_SOURCE 700

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/memory.h"
#include "tests/folder.h"
#include "tests/fuzz_replay.h"
#include "tools/npy/npy.h"

/* Files are not synced. */
int fsync(int file)
{
    (void)file;
    return 0;
}

static char folder[FOLDER_PATH];
static char in[sizeof folder + 8], out[sizeof folder + 8];

static void finish(void)
{
    unlink(in);
    unlink(out);
    rmdir(folder);
}

static void start(void)
{
    if (!folder_make(folder, "fuzz_npy")) abort();
    snprintf(in, sizeof in, "%s/in.npy", folder);
    snprintf(out, sizeof out, "%s/out.npy", folder);
    atexit(finish);
}

static void require(int holds, const char *law, const char *why)
{
    if (holds) return;
    fprintf(stderr, "broken: %s: %s\n", law, why);
    abort();
}

static void run(npy_kind as, size_t size)
{
    npy_array array, back;
    char why[256] = "";
    if (npy_read(in, as, &array, why, sizeof why)) {
        require(!strncmp(why, in, strlen(in)) && strlen(why) > strlen(in) + 2,
                "a reason names the file", why);
        require(!strpbrk(why, "\n\r\t"), "a reason is one line", why);
    } else {
        const size_t bytes = (size_t)array.count * array.item;
        require(bytes < size, "an array is smaller than its file", why);
        require(!npy_write(out, &array, why, sizeof why), "what was read can be written", why);
        require(!npy_read(out, as, &back, why, sizeof why), "and read again", why);
        require(back.kind == array.kind && back.rank == array.rank && back.count == array.count &&
                    !memcmp(back.shape, array.shape, sizeof back.shape),
                "its header is the same", why);
        require(!bytes || !memcmp(back.data, array.data, bytes), "its data are the same", why);
        npy_free(&array);
        npy_free(&back);
    }
    require(fattn_memory_alive() == 0, "no memory is left alive", why);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    if (!*in) start();
    FILE *const file = fopen(in, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file)) abort();
    run(0, size);
    run(NPY_BF16, size);
    run(NPY_E4M3, size);
    return 0;
}
