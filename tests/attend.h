/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A problem, its tensors and a checksum of its results, for tests of what computing does to the
 * process; and functions that read the process's state from Linux.
 */
#ifndef FATTN_TESTS_ATTEND_H
#define FATTN_TESTS_ATTEND_H

#include <dirent.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fattn/fattn.h"
#include "tests/random.h"
#include "tests/tap.h"

typedef struct attend {
    fattn_problem problem;
    fattn_buffers buffers;
    float *inputs;       /* q, k, v, then dout */
    float *outputs;      /* o, lse, then gradients */
    size_t output_count; /* floats */
} attend;

/* Self-attention in f32. Backward runs a forward of its own first (attend_with()). */
static inline void attend_make(attend *a, fattn_op op, int64_t heads, int64_t rows, int64_t keys,
                               int64_t dim)
{
    const size_t q = (size_t)(heads * rows * dim), k = (size_t)(heads * keys * dim);
    const size_t inputs = 2 * q + 2 * k;
    uint64_t state = 5;
    a->output_count = 2 * q + (size_t)(heads * rows) + 2 * k;
    a->inputs = malloc(inputs * sizeof(float));
    a->outputs = calloc(a->output_count, sizeof(float));
    if (!a->inputs || !a->outputs) {
        tap_bail("out of memory");
    }
    for (size_t i = 0; i < inputs; i++) {
        a->inputs[i] = (float)(random_next(&state) >> 40) * 0x1p-23f - 1;
    }
    fattn_problem_init(&a->problem);
    a->problem.op = op;
    a->problem.heads_q = a->problem.heads_k = heads;
    a->problem.seqlen_q = rows;
    a->problem.seqlen_k = keys;
    a->problem.dim = a->problem.dim_v = dim;
    fattn_buffers_init(&a->buffers);
    a->buffers.q = a->inputs;
    a->buffers.k = a->inputs + q;
    a->buffers.v = a->inputs + q + k;
    a->buffers.o = a->outputs;
    a->buffers.lse = a->outputs + q;
    if (op == FATTN_BACKWARD) {
        a->buffers.dout = a->inputs + q + 2 * k;
        a->buffers.dq = a->outputs + q + heads * rows;
        a->buffers.dk = a->outputs + 2 * q + heads * rows;
        a->buffers.dv = a->outputs + 2 * q + heads * rows + k;
    }
}

static inline void attend_free(attend *a)
{
    free(a->inputs);
    free(a->outputs);
}

/* FNV-1a over all outputs. */
static inline uint64_t attend_hash(const attend *a)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < a->output_count; i++) {
        uint32_t word;
        memcpy(&word, &a->outputs[i], sizeof word);
        hash = (hash ^ word) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* Computes by the one-shot call on a device (NULL: the default one); returns 0 on failure. */
static inline uint64_t attend_with(attend *a, fattn_device *device)
{
    memset(a->outputs, 0, a->output_count * sizeof(float));
    fattn_problem forward = a->problem;
    fattn_buffers of_forward = a->buffers;
    forward.op = FATTN_FORWARD;
    forward.outputs = FATTN_OUT_O | FATTN_OUT_LSE;
    fattn_status status = fattn_attention(device, &forward, &of_forward, NULL);
    if (!status && a->problem.op == FATTN_BACKWARD) {
        status = fattn_attention(device, &a->problem, &a->buffers, NULL);
    }
    if (status) {
        printf("# %s\n", fattn_last_reason());
    }
    return status ? 0 : attend_hash(a);
}

/* --- The process ------------------------------------------------------------------------------ */

/* A number from /proc/self/status, such as "Threads" or "VmRSS" (KiB); -1 if unavailable. */
static inline long process_status(const char *field)
{
    FILE *const file = fopen("/proc/self/status", "r");
    char line[256];
    long value = -1;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, field, strlen(field)) == 0 && line[strlen(field)] == ':') {
            value = atol(line + strlen(field) + 1);
        }
    }
    if (file) {
        fclose(file);
    }
    return value;
}

static inline void *process_idle(void *nothing) { return nothing; }

/* Threads of the process that neither we nor the calling program created: sanitizers start some
 * with the program's first thread. */
static inline long process_extra(void)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, process_idle, NULL) == 0) {
        pthread_join(thread, NULL);
    }
    long least = process_status("Threads");
    for (int n = 0; n < 100; n++) { /* the joined thread stays in /proc briefly */
        const struct timespec moment = {.tv_nsec = 1000000};
        nanosleep(&moment, NULL);
        const long threads = process_status("Threads");
        least = threads < least ? threads : least;
    }
    return least - 1;
}

/* Whether the process has this many threads, now or after a moment: a joined thread stays in /proc
 * briefly. True without /proc. */
static inline bool process_threads_are(long count)
{
    for (int n = 0; n < 10000; n++) {
        const long threads = process_status("Threads");
        if (threads == count || threads < 0) {
            return true;
        }
        const struct timespec moment = {.tv_nsec = 1000000};
        nanosleep(&moment, NULL);
    }
    printf("# %ld threads, not %ld\n", process_status("Threads"), count);
    return false;
}

/* A sum over the ids of the process's threads: it changes when threads end and others start. */
static inline long process_tasks(void)
{
    DIR *const folder = opendir("/proc/self/task");
    long sum = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;) {
        sum += atol(entry->d_name) * atol(entry->d_name);
    }
    if (folder) {
        closedir(folder);
    }
    return sum;
}

/* The number of threads of the process that used at least this many nanoseconds of CPU time. */
static inline int process_busy(long long nanoseconds)
{
    DIR *const folder = opendir("/proc/self/task");
    int busy = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;) {
        char path[64 + sizeof entry->d_name];
        long long ran = 0;
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", entry->d_name);
        FILE *const file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (file) {
            busy += fscanf(file, "%lld", &ran) == 1 && ran >= nanoseconds;
            fclose(file);
        }
    }
    if (folder) {
        closedir(folder);
    }
    return busy;
}

#endif
