/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Problems with nothing to compute return at once, whatever their other sizes: 2^31 - 1 batches of
 * 2^31 - 1 heads without queries must not cost 2^62 steps. Each runs in a process of its own with
 * few seconds of processor time.
 */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "fattn/fattn.h"
#include "tests/child.h"
#include "tests/tap.h"

enum { SECONDS = 5 }; /* of a processor, so that a loaded machine has time enough */
enum { MOST = INT32_MAX };

typedef struct empty {
    const char *name;
    fattn_op op;
    int64_t batch, heads, seqlen_q, seqlen_k;
    uint64_t features;
    uint32_t outputs;
} empty;

#define GRADIENTS (FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV)

static const empty cases[] = {
    {"no queries and keys", FATTN_FORWARD, MOST, MOST, 0, 0, 0, FATTN_OUT_O | FATTN_OUT_LSE},
    {"no queries", FATTN_FORWARD, MOST, MOST, 0, MOST, 0, FATTN_OUT_O | FATTN_OUT_LSE},
    {"no batch", FATTN_FORWARD, 0, MOST, MOST, MOST, 0, FATTN_OUT_O | FATTN_OUT_LSE},
    {"no heads", FATTN_FORWARD, MOST, 0, MOST, MOST, 0, FATTN_OUT_O | FATTN_OUT_LSE},
    {"no queries, causal in a window", FATTN_FORWARD, MOST, MOST, 0, 9, FATTN_CAUSAL | FATTN_WINDOW,
     FATTN_OUT_O},
    {"no queries at positions, dropout", FATTN_FORWARD, MOST, MOST, 0, 0,
     FATTN_POSITIONS | FATTN_DROPOUT, FATTN_OUT_O},
    {"no heads at positions", FATTN_FORWARD, MOST, 0, 4, 4, FATTN_POSITIONS, FATTN_OUT_O},
    {"no queries, pages without keys", FATTN_FORWARD, MOST, MOST, 0, 0, FATTN_PAGED, FATTN_OUT_O},
    {"no queries, invariant", FATTN_FORWARD, MOST, MOST, 0, MOST, FATTN_BATCH_INVARIANT,
     FATTN_OUT_O},
    {"no gradients", FATTN_BACKWARD, MOST, MOST, 0, 0, 0, GRADIENTS},
    {"no gradients of a batch", FATTN_BACKWARD, 0, MOST, MOST, MOST, 0, GRADIENTS},
    {"no gradients of heads", FATTN_BACKWARD, MOST, 0, MOST, MOST, 0, GRADIENTS},
    {"no gradients, deterministic", FATTN_BACKWARD, MOST, MOST, 0, 0, FATTN_DETERMINISTIC,
     GRADIENTS},
    {"no gradients, accumulated", FATTN_BACKWARD, MOST, MOST, 0, 0, FATTN_ACCUMULATE, GRADIENTS},
    {"no dq", FATTN_BACKWARD, MOST, MOST, 0, MOST, 0, FATTN_OUT_DQ},
    {"one number of dbias", FATTN_BACKWARD, MOST, MOST, 0, MOST, FATTN_BIAS, FATTN_OUT_DBIAS},
    {"one number of dbias, no keys", FATTN_BACKWARD, MOST, MOST, 0, 0, FATTN_BIAS,
     FATTN_OUT_DBIAS | FATTN_OUT_DK},
    {"one dsink", FATTN_BACKWARD, MOST, 1, 0, MOST, FATTN_SINK, FATTN_OUT_DSINK},
    {"one dsink, accumulated", FATTN_BACKWARD, MOST, 1, 0, MOST, FATTN_SINK | FATTN_ACCUMULATE,
     FATTN_OUT_DSINK},
};

static fattn_problem problem_of(const empty *e)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = e->op;
    p.batch = e->batch, p.heads_q = p.heads_k = e->heads;
    p.seqlen_q = e->seqlen_q, p.seqlen_k = e->seqlen_k;
    p.dim = p.dim_v = 1;
    p.features = e->features;
    p.outputs = e->outputs;
    p.layout = FATTN_STRIDED; /* all keys are the same one */
    p.dropout_p = e->features & FATTN_DROPOUT ? 0.5 : 0;
    p.page_size = e->features & FATTN_PAGED ? 16 : 0;
    p.window_left = e->features & FATTN_WINDOW ? 3 : -1;
    return p;
}

/* Exit status of the child. */
static int run(const char *backend, const empty *e)
{
    static float room[64], zero[2];
    fattn_problem p = problem_of(e);
    fattn_buffers b;
    fattn_device *device = NULL;
    fattn_buffers_init(&b);
    b.q = room, b.k = room, b.v = room, b.o = room + 16, b.lse = room + 20, b.dout = room + 24;
    b.bias = e->features & FATTN_BIAS ? room : NULL;
    b.sink = e->features & FATTN_SINK ? room : NULL;
    zero[0] = zero[1] = e->features & FATTN_ACCUMULATE ? 0 : NAN;
    b.dbias = &zero[0], b.dsink = &zero[1];
    fattn_status status = fattn_device_open(backend, &device);
    status = status ? status : fattn_attention(device, &p, &b, NULL);
    fattn_cache_clear();
    fattn_device_close(device);
    const bool written = (!(e->outputs & FATTN_OUT_DBIAS) || zero[0] == 0) &&
                         (!(e->outputs & FATTN_OUT_DSINK) || zero[1] == 0);
    if (status) {
        printf("# %s: %s\n", e->name, fattn_last_reason());
        fflush(stdout);
    }
    return status != FATTN_OK || !written;
}

static int mask(const char *backend, const empty *e)
{
    static uint8_t keep[1];
    fattn_device *device = NULL;
    fattn_dropout_args a;
    fattn_dropout_args_init(&a);
    a.batch = e->batch, a.heads = e->heads, a.seqlen_q = e->seqlen_q, a.seqlen_k = e->seqlen_k;
    a.p = 0.5, a.keep = keep;
    fattn_status status = fattn_device_open(backend, &device);
    status = status ? status : fattn_dropout_mask(device, &a, NULL);
    fattn_device_close(device);
    return status != FATTN_OK;
}

static int merge(const char *backend, const empty *e)
{
    static float room[8];
    fattn_device *device = NULL;
    fattn_merge_args a;
    fattn_merge_args_init(&a);
    a.batch = e->batch, a.heads = e->heads, a.seqlen = e->seqlen_q, a.dim_v = 1;
    a.o1 = a.lse1 = a.o2 = a.lse2 = room, a.o = a.lse = room;
    fattn_status status = fattn_device_open(backend, &device);
    status = status ? status : fattn_merge(device, &a, NULL);
    fattn_device_close(device);
    return status != FATTN_OK;
}

static void check(const char *backend, const char *what,
                  int (*act)(const char *backend, const empty *e), const empty *e)
{
    const struct rlimit few = {.rlim_cur = SECONDS, .rlim_max = SECONDS};
    const pid_t child = child_start(60);
    if (child == 0) {
        _exit(setrlimit(RLIMIT_CPU, &few) || act(backend, e));
    }
    tap_check(child_succeeds(child), "%s, %s: %s", backend, what, e->name);
}

int main(void)
{
    static const char *const backends[] = {"reference", "cpu"};
    static const empty rectangles[] = {
        {"no keys", FATTN_FORWARD, MOST, MOST, 1, 0, 0, 0},
        {"no queries", FATTN_FORWARD, MOST, MOST, 0, MOST, 0, 0},
        {"no heads", FATTN_FORWARD, MOST, 0, MOST, MOST, 0, 0},
        {"no batch", FATTN_FORWARD, 0, MOST, MOST, MOST, 0, 0},
    };
    for (int b = 0; b < 2; b++) {
        for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
            check(backends[b], "attention", run, &cases[n]);
        }
        for (size_t n = 0; n < sizeof rectangles / sizeof *rectangles; n++) {
            check(backends[b], "dropout mask", mask, &rectangles[n]);
        }
        for (size_t n = 1; n < sizeof rectangles / sizeof *rectangles; n++) {
            if (n != 3) { /* lse1 of heads x queries is refused */
                check(backends[b], "merge", merge, &rectangles[n]);
            }
        }
    }
    return tap_done();
}
