/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `fattn run` with too little memory: its n-th allocation fails, for n = 1, 2, ... until a run
 * needs fewer. Each run either reports an error, leaks nothing and leaves no output, or succeeds
 * without that memory and writes all outputs.
 */
#define _XOPEN_SOURCE 700 /* mkdtemp */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/memory.h"
#include "tests/folder.h"
#include "tests/tap.h"
#include "tools/commands.h"
#include "tools/npy/npy.h"
#include "tools/terminal/terminal.h"

enum { N_MAX = 1000 };

static const struct {
    const char *name;
    int rank;
    int64_t shape[4];
    npy_kind kind; /* f64 if the tool has to convert */
} inputs[] = {
    {"q.npy", 4, {1, 5, 2, 8}, NPY_F32}, {"k.npy", 4, {1, 9, 1, 8}, NPY_F32},
    {"v.npy", 4, {1, 9, 1, 4}, NPY_F64}, {"do.npy", 4, {1, 5, 2, 4}, NPY_F64},
    {"bias.npy", 2, {5, 9}, NPY_F64},    {"used.npy", 1, {1}, NPY_I64},
};
enum { INPUTS = sizeof inputs / sizeof inputs[0] };

static const char *const outputs[] = {"o.npy",  "lse.npy", "dq.npy",
                                      "dk.npy", "dv.npy",  "dbias.npy"};
enum { OUTPUTS = sizeof outputs / sizeof outputs[0] };

static int write_inputs(void)
{
    char why[256];
    for (int i = 0; i < INPUTS; i++) {
        npy_array a;
        if (npy_create(inputs[i].name, inputs[i].kind, inputs[i].rank, inputs[i].shape, &a, why,
                       sizeof why) != 0) {
            return -1;
        }
        for (int64_t n = 0; n < a.count; n++) {
            switch (a.kind) {
            case NPY_F32: ((float *)a.data)[n] = 0.1f * (float)(n % 13); break;
            case NPY_F64: ((double *)a.data)[n] = 0.1 * (double)(n % 11); break;
            default: ((int64_t *)a.data)[n] = 7; break;
            }
        }
        const int written = npy_write(inputs[i].name, &a, why, sizeof why);
        npy_free(&a);
        if (written != 0) {
            return -1;
        }
    }
    return 0;
}

/* Counts the outputs and removes them. */
static int take_outputs(void)
{
    int found = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        found += remove(outputs[i]) == 0;
    }
    return found;
}

/* Runs the tool with its errors hidden: a thousand are expected. */
static int run_tool(const char *device)
{
    const char *const line[] = {
        "run",      "--q",      "q.npy",       "--k",      "k.npy",      "--v",  "v.npy",  "--bias",
        "bias.npy", "--causal", "--seqused-k", "used.npy", "--backward", "--do", "do.npy", "--o",
        "o.npy",    "--lse",    "lse.npy",     "--dq",     "dq.npy",     "--dk", "dk.npy", "--dv",
        "dv.npy",   "--dbias",  "dbias.npy",   "--device", device};
    enum { WORDS = sizeof line / sizeof line[0] };
    char *argv[WORDS + 1] = {NULL};
    for (int i = 0; i < WORDS; i++) {
        argv[i] = (char *)(uintptr_t)line[i]; /* the parser reads argv and changes nothing */
    }
    return fattn_tool_run(WORDS, argv);
}

static void check_device(const char *device)
{
    int failed = 0, without = 0, wrong = 0, leaks = 0, left = 0, n = 1;
    const int64_t alive = fattn_memory_alive();
    for (; n < N_MAX; n++) {
        fattn_memory_fail_at(n);
        const int code = run_tool(device);
        const int fired = fattn_memory_fail_at(0);
        leaks += fattn_memory_alive() != alive;
        if (!fired) {
            tap_check(code == TOOL_OK, "%s: a run with all its memory succeeds", device);
            break;
        }
        failed++;
        const int outputs_there = take_outputs();
        if (code == TOOL_OK && outputs_there == OUTPUTS) {
            without++;
            continue;
        }
        wrong += code != TOOL_LIBRARY;
        left += outputs_there;
    }
    tap_check(failed > INPUTS + OUTPUTS && n < N_MAX, "%s: each of %d allocations failed once",
              device, failed);
    tap_check(wrong == 0, "%s: every failure is reported as one of memory", device);
    /* Where there is no memory for threads, the calling one computes alone. */
    tap_check(without <= 1, "%s: %d times it did without the memory", device, without);
    tap_check(left == 0, "%s: no output is left behind", device);
    tap_check(leaks == 0, "%s: nothing leaks", device);
    tap_check(take_outputs() == OUTPUTS, "%s: the last run wrote everything", device);
}

int main(void)
{
    char folder[FOLDER_PATH];
    if (!folder_make(folder, "check_run_memory") || chdir(folder) != 0 || write_inputs() != 0) {
        tap_check(false, "a temporary folder with the inputs is made");
        return tap_done();
    }
    const int quiet = open("/dev/null", O_WRONLY);
    if (quiet >= 0) {
        dup2(quiet, STDERR_FILENO);
        close(quiet);
    }
    check_device("reference");
    check_device("cpu");
    for (int i = 0; i < INPUTS; i++) {
        remove(inputs[i].name);
    }
    tap_check(chdir("/") == 0 && rmdir(folder) == 0, "no other file is left behind");
    return tap_done();
}
