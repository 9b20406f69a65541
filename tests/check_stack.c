/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stack use of the library: everything runs in threads with painted stacks, on every instruction
 * set. At most 64 KiB of the paint may be overwritten, including the C library's own part of a
 * thread's stack.
 *
 *     check_stack CASES
 */
#define _GNU_SOURCE

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "examples/threads.h"
#include "tests/environment.h"
#include "tests/tap.h"
#include "tools/judge/random_case.h"

enum { STACK = 1 << 20, PROMISED = 64 << 10, PAINT = 0xa5 };

/* A thread's task and its outcome. */
typedef struct work {
    const char *backend;
    draw_case *cases;
    int count;
    int refused; /* cases that the device does not take */
    int divided; /* those that ranks could divide */
    char reason[256];
} work;

static void swallow(void *user, const char *line) { (void)user, (void)line; }

/* Scores of a small case. */
static fattn_status look(fattn_device *device, const draw_case *c)
{
    static double room[1 << 14]; /* or floats */
    const fattn_problem *const p = &c->problem;
    fattn_inspect_args args;
    fattn_inspect_args_init(&args);
    args.what = FATTN_SCORES;
    args.to = room;
    const int64_t pairs = p->batch * p->heads_q * p->seqlen_q * p->seqlen_k;
    const bool small = pairs <= (int64_t)(sizeof room / sizeof *room);
    return p->op == FATTN_FORWARD && small ? fattn_inspect(device, p, &c->buffers, &args)
                                           : FATTN_OK;
}

/* The case on one rank of one. */
static fattn_status divide(fattn_device *device, const draw_case *c)
{
    threads all;
    fattn_group group;
    fattn_group_plan *plan = NULL;
    threads_make(&all, 1);
    const fattn_transport transport = threads_transport(&all, 0);
    fattn_group_init(&group);
    group.transport = &transport;
    group.device = device;
    fattn_status status = fattn_group_plan_create(&group, &c->problem, NULL, NULL, &plan);
    status = status ? status : fattn_group_execute(plan, &c->buffers);
    fattn_group_plan_destroy(plan);
    threads_free(&all);
    return status;
}

/* Public functions that compute, plan or describe. */
static void *work_through(void *argument)
{
    work *const w = argument;
    fattn_device *device = NULL;
    fattn_device_info info;
    char text[64];
    fattn_device_info_init(&info);
    fattn_status status = fattn_device_open(w->backend, &device);
    status = status ? status : fattn_device_get_info(device, &info);
    for (int n = 0; n < w->count && status == FATTN_OK; n++) {
        const fattn_problem *const p = &w->cases[n].problem;
        const fattn_buffers *const b = &w->cases[n].buffers;
        fattn_plan *plan = NULL;
        fattn_operand_info operand;
        fattn_operand_info_init(&operand);
        fattn_status done = fattn_plan_create(device, p, &plan);
        done = done ? done : fattn_execute(plan, b, NULL, NULL);
        done = done ? done : fattn_attention(device, p, b, NULL);
        done = done ? done : fattn_operand_find(p, "k", &operand);
        done = done ? done : look(device, &w->cases[n]);
        w->divided += !done && divide(device, &w->cases[n]) == FATTN_OK;
        (void)fattn_plan_describe(plan, text, sizeof text);
        fattn_plan_destroy(plan);
        fattn_cache_clear();
        w->refused += done == FATTN_UNSUPPORTED;
        status = done == FATTN_UNSUPPORTED ? FATTN_OK : done;
    }
    fattn_dropout_args dropout;
    uint8_t keep[64];
    fattn_dropout_args_init(&dropout);
    dropout.batch = dropout.heads = 1, dropout.seqlen_q = dropout.seqlen_k = 8;
    dropout.p = 0.5, dropout.keep = keep;
    status = status ? status : fattn_dropout_mask(device, &dropout, NULL);
    float o[3][8] = {{0}}, lse[3] = {0};
    fattn_merge_args merge;
    fattn_merge_args_init(&merge);
    merge.batch = merge.heads = merge.seqlen = 1, merge.dim_v = 8;
    merge.o1 = o[0], merge.o2 = o[1], merge.o = o[2];
    merge.lse1 = &lse[0], merge.lse2 = &lse[1], merge.lse = &lse[2];
    status = status ? status : fattn_merge(device, &merge, NULL);
    fattn_device_close(device);
    if (status != FATTN_OK) {
        fattn_last_reason_copy(w->reason, sizeof w->reason);
    }
    return status == FATTN_OK ? argument : NULL;
}

/* Bytes of the painted stack that the thread used; -1 if its task failed. */
static int64_t used_by(work *w)
{
    unsigned char *const stack = aligned_alloc(4096, STACK);
    pthread_attr_t attributes;
    pthread_t thread;
    void *good = NULL;
    if (!stack || pthread_attr_init(&attributes)) {
        return -1;
    }
    memset(stack, PAINT, STACK);
    if (pthread_attr_setstack(&attributes, stack, STACK) ||
        pthread_create(&thread, &attributes, work_through, w) || pthread_join(thread, &good)) {
        good = NULL;
    }
    int64_t untouched = 0;
    while (untouched < STACK && stack[untouched] == PAINT) {
        untouched++;
    }
    pthread_attr_destroy(&attributes);
    free(stack);
    return good ? STACK - untouched : -1;
}

static void check(const char *backend, const char *name, draw_case *cases, int count)
{
    work w = {.backend = backend, .cases = cases, .count = count};
    const int64_t used = used_by(&w);
    tap_check(used > 0 && used <= PROMISED && w.refused < count && w.divided > 0,
              "%s: %lld bytes of stack, at most %d%s%s", name, (long long)used, PROMISED,
              w.reason[0] ? ": " : "", w.reason);
}

enum { ISAS = 16, NAME = 32 };

/* Instruction sets of this build and machine: the prefixes of kernel row names. */
static int list_isas(char names[ISAS][NAME])
{
    fattn_device *device = NULL;
    const char *missing = NULL;
    const fattn_kernel *row = NULL;
    int count = 0;
    if (fattn_device_open("cpu", &device) != FATTN_OK) {
        return 0;
    }
    for (int n = 0; (row = device->backend->kernel(device->impl, n, &missing)); n++) {
        char name[NAME] = "";
        snprintf(name, sizeof name, "%.*s", (int)strcspn(row->name, "_"), row->name);
        int known = 0;
        while (known < count && strcmp(names[known], name) != 0) {
            known++;
        }
        if (!missing && known == count && count < ISAS) {
            memcpy(names[count++], name, NAME);
        }
    }
    fattn_device_close(device);
    return count;
}

int main(int argc, char **argv)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
    (void)argc, (void)argv, (void)work_through, (void)check, (void)swallow, (void)list_isas;
    printf("1..0 # SKIP frames are larger under a sanitizer and without optimisation\n");
    return 0;
#else
    const int count = argc > 1 ? atoi(argv[1]) : 200;
    draw_case *const cases = calloc((size_t)count, sizeof *cases);
    for (int n = 0; n < count; n++) {
        if (!cases || draw_problem(&cases[n], 64, n) || draw_build(&cases[n]) ||
            draw_save(&cases[n])) {
            printf("Bail out! no case %d\n", n);
            return 1;
        }
    }
    fattn_set_log_callback(swallow, NULL);
    set_environment("FATTN_NUM_THREADS", "1"); /* otherwise other stacks would do the work */
    set_environment("FATTN_VERBOSE", "3");
    char isas[ISAS][NAME];
    const int isa_count = list_isas(isas);
    for (int n = 0; n < isa_count; n++) {
        set_environment("FATTN_CPU_ISA", isas[n]);
        check("cpu", isas[n], cases, count);
    }
    check("reference", "reference", cases, count);
    for (int n = 0; n < count; n++) {
        draw_free(&cases[n]);
    }
    free(cases);
    return tap_done();
#endif
}
