/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of a group fails, and each says what the library returned after how long: programs for
 * rank_faults.py, one a transport.
 *
 *     PROGRAM KIND GROUP SECONDS BACKWARD
 *
 * The last rank fails in its GROUP-th group of messages, those that compare plans included.
 */
#ifndef FATTN_TESTS_FAULTS_H
#define FATTN_TESTS_FAULTS_H

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fattn/distributed.h"
#include "tests/divided.h"

typedef enum fault_kind {
    FAULT_NONE,
    FAULT_DIE,     /* kill -9 */
    FAULT_STOP,    /* SIGSTOP; of a thread: it sleeps */
    FAULT_CUT,     /* nothing passes between this rank and the next one any more */
    FAULT_COMPUTE, /* it cannot compute: it gives up between start() and wait() */
    FAULT_OTHER,   /* another problem: nothing is wrong with messages */
    FAULT_KINDS
} fault_kind;

static const char *const fault_names[FAULT_KINDS] = {"none", "die",     "stop",
                                                     "cut",  "compute", "other"};

typedef struct faulty {
    fattn_transport real;
    fault_kind kind;
    int at;       /* the group of messages in which it happens, the plan's included */
    double sleep; /* of a stopped thread, in seconds; 0: the process stops */
    int groups;   /* so far */
} faulty;

static inline void fault_sleep(double seconds)
{
    const struct timespec time = {(time_t)seconds,
                                  (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

/* The messages that still pass. */
static inline int fault_filter(const faulty *f, const fattn_message *messages, int count,
                               fattn_message *left)
{
    int n = 0;
    const bool cut = f->kind == FAULT_CUT && f->groups > f->at;
    for (int i = 0; i < count; i++) {
        if (!cut || messages[i].peer != (f->real.rank + 1) % f->real.ranks) {
            left[n++] = messages[i];
        }
    }
    return n;
}

static inline fattn_status fault_start(void *user, const fattn_message *messages, int count)
{
    faulty *const f = user;
    static _Thread_local fattn_message left[FATTN_MESSAGES_MAX]; /* until wait() */
    if (f->groups++ == f->at && f->kind == FAULT_DIE) {
        kill(getpid(), SIGKILL);
    } else if (f->groups == f->at + 1 && f->kind == FAULT_STOP && f->sleep > 0) {
        fault_sleep(f->sleep);
        return fattn_transport_fail(FATTN_RANK_LOST, "it slept too long");
    } else if (f->groups == f->at + 1 && f->kind == FAULT_STOP) {
        kill(getpid(), SIGSTOP);
    }
    const int n = fault_filter(f, messages, count, left);
    const fattn_status status = n ? f->real.start(f->real.user, left, n) : FATTN_OK;
    if (!status && f->groups == f->at + 1 && f->kind == FAULT_COMPUTE) {
        f->real.abort(f->real.user, "it cannot compute");
    }
    return status;
}

static inline fattn_status fault_wait(void *user, const fattn_message *messages, int count,
                                      double seconds)
{
    faulty *const f = user;
    fattn_message left[FATTN_MESSAGES_MAX];
    const int n = fault_filter(f, messages, count, left);
    const fattn_status status = n ? f->real.wait(f->real.user, left, n, seconds) : FATTN_OK;
    if (!status && n < count) {
        char text[64];
        fault_sleep(seconds);
        snprintf(text, sizeof text, "rank %d did not answer", (f->real.rank + 1) % f->real.ranks);
        return fattn_transport_fail(FATTN_RANK_TIMEOUT, text);
    }
    return status;
}

static inline void fault_abort(void *user, const char *reason)
{
    const faulty *const f = user;
    f->real.abort(f->real.user, reason);
}

static inline fattn_transport fault_transport(faulty *f)
{
    fattn_transport transport = f->real;
    transport.user = f;
    transport.start = fault_start, transport.wait = fault_wait, transport.abort = fault_abort;
    return transport;
}

static inline double fault_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* A causal zigzag ring, solved. */
static inline void fault_problem(divided *d, bool backward)
{
    memset(d, 0, sizeof *d);
    fattn_problem *const p = &d->problem;
    fattn_problem_init(p);
    p->op = backward ? FATTN_BACKWARD : FATTN_FORWARD;
    p->features = FATTN_CAUSAL;
    p->heads_q = p->heads_k = 2;
    p->seqlen_q = p->seqlen_k = d->cu_q[1] = d->cu_k[1] = 60;
    p->dim = p->dim_v = 8;
    p->pointer_alignment = 2;
    p->outputs =
        backward ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV : FATTN_OUT_O | FATTN_OUT_LSE;
    d->split = FATTN_SPLIT_ZIGZAG, d->scheme = FATTN_SCHEME_RING;
    if (divided_solve(d, 1, 1)) {
        exit(2);
    }
}

/* Runs a rank and prints a line. Its memory stays: messages may still use it. */
static inline void fault_run(const divided *solved, const fattn_transport *real, char **argv,
                             double sleep)
{
    divided d = *solved;
    divided_share share;
    char text[256] = "";
    int kind = 0;
    while (kind < FAULT_KINDS - 1 && strcmp(fault_names[kind], argv[1]) != 0) {
        kind++;
    }
    const bool victim = real->rank == real->ranks - 1;
    faulty f = {.real = *real,
                .kind = victim ? (fault_kind)kind : FAULT_NONE,
                .at = atoi(argv[2]),
                .sleep = sleep};
    const fattn_transport transport = fault_transport(&f);
    if (f.kind == FAULT_OTHER) {
        d.problem.features |= FATTN_SCALE;
        d.problem.scale = 0.77;
    }
    const double begin = fault_now();
    const fattn_status status = divided_run(&d, &transport, atof(argv[3]), &share);
    const double seconds = fault_now() - begin;
    snprintf(text, sizeof text, "%.200s", status ? fattn_last_reason() : "");
    const bool right =
        status || divided_is_right(&d, real->ranks, real->rank, &share, text, sizeof text);
    printf("rank %d status %d after %.3f %s: %s\n", real->rank, (int)status, seconds,
           right ? "fine" : "WRONG", text);
}

#endif
