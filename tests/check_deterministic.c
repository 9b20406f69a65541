/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deterministic backward on a GPU, at sizes where its blocks wait for one another all over the GPU:
 * every run ends, and all runs of a problem give equal bits. (check_shift plays one of the orders
 * in which they wait.)
 */
#define _POSIX_C_SOURCE 200809L

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/device.h"
#include "tests/device_memory.h"

enum { TOKENS = 16384, CHANNELS = 2048, BYTES = 2 * TOKENS * CHANNELS, RUNS = 4, SECONDS = 60 };

static fattn_device *device;
static fattn_buffers buffers;
static fattn_stream none;
static char running[160];

static void hangs(int signal)
{
    (void)signal;
    (void)!write(1, running, strlen(running));
    _exit(1);
}

static void *random_halves(uint32_t seed)
{
    void *const to = device_memory(device, BYTES);
    device_fill(device, to, BYTES / 2, seed);
    return to;
}

/* A fingerprint of all gradients (FNV-1a, of words). */
static uint64_t fingerprint(void)
{
    const void *const from[] = {buffers.dq, buffers.dk, buffers.dv};
    uint64_t *const host = malloc(BYTES);
    uint64_t print = UINT64_C(14695981039346656037);
    if (!host) {
        tap_bail("out of memory");
    }
    for (int n = 0; n < 3; n++) {
        device_copy(device, host, from[n], BYTES);
        for (size_t i = 0; i < BYTES / sizeof *host; i++) {
            print = (print ^ host[i]) * UINT64_C(1099511628211);
        }
    }
    free(host);
    return print;
}

/* So often, one right after the other: a run's blocks begin while the one before it ends. */
static bool run(fattn_problem *problem, fattn_op op, int times)
{
    fattn_plan *plan = NULL;
    problem->op = op;
    bool done = device_good(fattn_plan_create(device, problem, &plan), "a plan");
    for (int n = 0; n < times && done; n++) {
        done = device_good(fattn_execute(plan, &buffers, NULL, none), "a run");
    }
    done = done && device_good(fattn_stream_synchronize(device, none), "a run");
    fattn_plan_destroy(plan);
    return done;
}

static void check(int dim, int tokens, bool causal)
{
    fattn_problem problem;
    fattn_problem_init(&problem);
    problem.dtype = problem.dtype_o = FATTN_F16;
    problem.batch = TOKENS / tokens;
    problem.heads_q = problem.heads_k = CHANNELS / dim;
    problem.seqlen_q = problem.seqlen_k = tokens;
    problem.dim = problem.dim_v = dim;
    problem.features = FATTN_DETERMINISTIC | (causal ? FATTN_CAUSAL : 0);
    problem.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    snprintf(running, sizeof running, "not ok - %d channels, %d x %d tokens%s: hangs\n", dim,
             (int)problem.batch, tokens, causal ? ", causal" : "");
    uint64_t first = 0;
    int equal = 0;
    alarm(SECONDS);
    const bool ready = run(&problem, FATTN_FORWARD, 1);
    problem.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    for (int n = 0; ready && n < RUNS && run(&problem, FATTN_BACKWARD, 5); n++) {
        const uint64_t print = fingerprint();
        first = n == 0 ? print : first;
        equal += print == first;
    }
    alarm(0);
    tap_check(equal == RUNS, "%d channels, %d x %d tokens%s: %d of %d runs equal", dim,
              (int)problem.batch, tokens, causal ? ", causal" : "", equal, RUNS);
}

int main(void)
{
    if (device_absent(device_named())) {
        return 0;
    }
    signal(SIGALRM, hangs);
    if (!device_good(fattn_device_open(device_named(), &device), "a device")) {
        return tap_done();
    }
    fattn_buffers_init(&buffers);
    buffers.q = random_halves(1), buffers.k = random_halves(2), buffers.v = random_halves(3);
    buffers.dout = random_halves(4);
    buffers.o = device_memory(device, BYTES),
    buffers.lse = device_memory(device, sizeof(float) * TOKENS * CHANNELS / 64);
    buffers.dq = device_memory(device, BYTES), buffers.dk = device_memory(device, BYTES),
    buffers.dv = device_memory(device, BYTES);
    for (int dim = 64; dim <= 256; dim *= 2) {
        for (int tokens = 512; tokens <= TOKENS; tokens *= 2) {
            check(dim, tokens, false);
            check(dim, tokens, true);
        }
    }
    void *const made[] = {(void *)(uintptr_t)buffers.q,
                          (void *)(uintptr_t)buffers.k,
                          (void *)(uintptr_t)buffers.v,
                          (void *)(uintptr_t)buffers.dout,
                          buffers.o,
                          buffers.lse,
                          buffers.dq,
                          buffers.dk,
                          buffers.dv};
    for (size_t n = 0; n < sizeof made / sizeof *made; n++) {
        device_good(fattn_device_free(device, made[n]), "memory");
    }
    fattn_device_close(device);
    return tap_done();
}
