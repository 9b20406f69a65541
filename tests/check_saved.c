/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training steps of groups whose forward saves rows for backward (fattn_group.saves): gradients are
 * bit for bit those of a group that exchanges all rows again, fewer bytes travel, and wrong uses
 * are errors. Ranks are threads over fattn_peers. Drawn problems that save are part of check_group,
 * check_peers and check_mpi.
 */
#include <stdalign.h>
#include <stdint.h>
#include <string.h>

#include <pthread.h>

#include "fattn/distributed.h"
#include "tests/tap.h"
#include "tools/judge/random.h"

enum {
    RANKS = 2,
    BATCH = 2,
    ROWS = 48, /* of a rank's share of a sequence */
    HEADS = 8,
    KEY_HEADS = 4,
    DIM = 16,
    DIM_V = 24,
    QUERIES = BATCH * ROWS * HEADS,
    KEYS = BATCH * ROWS * KEY_HEADS,
    MOST = QUERIES * DIM_V,
    SAVED_MOST = 1 << 20
};

/* f32, as BSHD. */
typedef struct tensors {
    alignas(64) float q[MOST], k[MOST], v[MOST], o[MOST], dout[MOST];
    float dq[MOST], dk[MOST], dv[MOST], lse[QUERIES];
} tensors;

/* What is wrong in the backward of a rank. */
typedef enum fault { NONE, NOT_SAVED, MISALIGNED, OVERLAPS } fault;

typedef struct rank {
    pthread_t thread;
    int number;
    fattn_peers *peers;
    fattn_group group; /* its split, scheme, turns and saves */
    fault fault;
    tensors *x;
    unsigned char *saved;
    fattn_transport counting, *inner; /* counts the bytes that it sends */
    int64_t sent, saved_bytes;
    fattn_status status;
    char reason[256];
} rank;

static fattn_status start(void *user, const fattn_message *messages, int count)
{
    rank *const r = user;
    for (int n = 0; n < count; n++) {
        r->sent += messages[n].receive ? 0 : messages[n].bytes;
    }
    return r->inner->start(r->inner->user, messages, count);
}

static fattn_status wait(void *user, const fattn_message *messages, int count, double seconds)
{
    const rank *const r = user;
    return r->inner->wait(r->inner->user, messages, count, seconds);
}

static void stop(void *user, const char *reason)
{
    const rank *const r = user;
    r->inner->abort(r->inner->user, reason);
}

static fattn_problem problem_of(fattn_op op)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.features = FATTN_CAUSAL;
    p.batch = BATCH, p.heads_q = HEADS, p.heads_k = KEY_HEADS, p.dim = DIM, p.dim_v = DIM_V;
    p.seqlen_q = p.seqlen_k = RANKS * ROWS;
    p.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE
                                    : FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
    return p;
}

static void fill(float *to, int count, int stream)
{
    draw_rng rng = draw_stream(5, stream, 0);
    for (int n = 0; n < count; n++) {
        to[n] = (float)draw_normal(&rng);
    }
}

static fattn_buffers buffers_of(tensors *x)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = x->q, b.k = x->k, b.v = x->v, b.o = x->o, b.lse = x->lse;
    b.dout = x->dout, b.dq = x->dq, b.dk = x->dk, b.dv = x->dv;
    return b;
}

/* Two backwards of one forward, the second of them with another dout. Without saved rows they take
 * the tensors, with saved rows none of these is there any more. */
static fattn_status train(rank *r)
{
    fattn_group_plan *plans[2] = {NULL, NULL};
    fattn_buffers b = buffers_of(r->x);
    fattn_status status = FATTN_OK;
    for (int op = 0; !status && op < 2; op++) {
        const fattn_problem p = problem_of(op ? FATTN_BACKWARD : FATTN_FORWARD);
        status = fattn_group_plan_create(&r->group, &p, NULL, NULL, &plans[op]);
    }
    r->saved_bytes = fattn_group_plan_saved_bytes(plans[1]);
    if (!status && r->saved_bytes != fattn_group_plan_saved_bytes(plans[0])) {
        status = fattn_transport_fail(FATTN_INVALID_SHAPE, "plans save different bytes");
    }
    unsigned char *const saved = r->saved_bytes ? r->saved : NULL;
    status = status ? status : fattn_group_execute_saved(plans[0], &b, saved);
    if (saved) {
        b.q = b.k = b.v = NULL;
        b.o = NULL;
        b.lse = NULL;
    }
    void *const given = r->fault == NOT_SAVED    ? NULL
                        : r->fault == MISALIGNED ? saved + 16
                        : r->fault == OVERLAPS   ? (void *)r->x->dout
                                                 : saved;
    r->sent = 0;
    for (int n = 0; !status && n < 2; n++) {
        fill(r->x->dout, QUERIES * DIM_V, 100 * n + r->number);
        status = r->fault == NOT_SAVED ? fattn_group_execute(plans[1], &b)
                                       : fattn_group_execute_saved(plans[1], &b, given);
    }
    snprintf(r->reason, sizeof r->reason, "%s", status ? fattn_last_reason() : "");
    fattn_group_plan_destroy(plans[0]);
    fattn_group_plan_destroy(plans[1]);
    return status;
}

static void *run(void *context)
{
    rank *const r = context;
    r->status = fattn_peers_open(r->peers, r->number, NULL, NULL, &r->inner);
    if (r->status) {
        return NULL;
    }
    fattn_transport_init(&r->counting);
    r->counting = *r->inner;
    r->counting.start = start, r->counting.wait = wait, r->counting.abort = stop;
    r->counting.user = r;
    r->group.transport = &r->counting;
    fill(r->x->q, QUERIES * DIM, 1 + r->number);
    fill(r->x->k, KEYS * DIM, 11 + r->number);
    fill(r->x->v, KEYS * DIM_V, 21 + r->number);
    r->status = train(r);
    fattn_peers_close(r->inner);
    return NULL;
}

static tensors memory[2][RANKS];
static alignas(64) unsigned char saved_memory[RANKS][SAVED_MOST];

/* Runs all ranks; the last one may be wrong. */
static void run_ranks(rank *all, tensors *x, const fattn_group *group, fault wrong)
{
    fattn_peers *peers;
    if (fattn_peers_create(RANKS, &peers)) {
        tap_bail(fattn_last_reason());
    }
    for (int r = 0; r < RANKS; r++) {
        memset(&x[r], 0xff, sizeof x[r]); /* NaN */
        memset(saved_memory[r], 0xff, sizeof saved_memory[r]);
        all[r] = (rank){.number = r,
                        .peers = peers,
                        .group = *group,
                        .fault = r == RANKS - 1 ? wrong : NONE,
                        .x = &x[r],
                        .saved = saved_memory[r]};
        if (pthread_create(&all[r].thread, NULL, run, &all[r])) {
            tap_bail("no thread");
        }
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(all[r].thread, NULL);
    }
    fattn_peers_destroy(peers);
}

static fattn_group group_of(fattn_split split, fattn_scheme scheme, int64_t turns, int saves)
{
    fattn_group group;
    fattn_group_init(&group);
    group.split = split, group.scheme = scheme, group.turns = turns, group.saves = saves;
    return group;
}

static bool same_gradients(const tensors *a, const tensors *b)
{
    return memcmp(a->dq, b->dq, sizeof a->dq) == 0 && memcmp(a->dk, b->dk, sizeof a->dk) == 0 &&
           memcmp(a->dv, b->dv, sizeof a->dv) == 0;
}

/* Of one rank: half of its queries' rows go to the other one, and half of theirs come back. */
static int64_t half(int64_t of_queries, int64_t of_keys)
{
    return 4 * (QUERIES * of_queries + KEYS * of_keys) / 2;
}

static void check_steps(fattn_split split, int64_t turns)
{
    const fattn_group again = group_of(split, FATTN_SCHEME_HEADS, turns, 0);
    const fattn_group saves = group_of(split, FATTN_SCHEME_HEADS, turns, 1);
    rank plain[RANKS], saved[RANKS];
    run_ranks(plain, memory[0], &again, NONE);
    run_ranks(saved, memory[1], &saves, NONE);
    /* q, k, v, dout, o and lse, and then dq, dk and dv; without q, k, v, o and lse. */
    const int64_t all = 2 * half(2 * DIM + 2 * DIM_V + 1, 2 * DIM + 2 * DIM_V);
    const int64_t rest = 2 * half(DIM + DIM_V, DIM + DIM_V);
    const int64_t bytes = 4 * (QUERIES * (DIM + DIM_V + 1) + KEYS * (DIM + DIM_V));
    for (int r = 0; r < RANKS; r++) {
        tap_check(!plain[r].status && !saved[r].status &&
                      same_gradients(&memory[0][r], &memory[1][r]),
                  "split %d, %d turns, rank %d: gradients are the same bits: %s%s", (int)split,
                  (int)turns, r, plain[r].reason, saved[r].reason);
        tap_check(plain[r].sent == all && saved[r].sent == rest && plain[r].saved_bytes == 0 &&
                      saved[r].saved_bytes == bytes,
                  "and %lld bytes are sent instead of %lld, %lld being saved",
                  (long long)saved[r].sent, (long long)plain[r].sent,
                  (long long)saved[r].saved_bytes);
    }
}

/* Where nothing can be saved the same calls do without. */
static void check_others(void)
{
    static const struct {
        const char *what;
        fattn_scheme scheme;
        int64_t turns;
    } all[] = {{"a ring", FATTN_SCHEME_RING, 0},
               {"more turns than key/value heads", FATTN_SCHEME_HEADS, KEY_HEADS}};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++) {
        const fattn_group again = group_of(FATTN_SPLIT_CONTIGUOUS, all[n].scheme, all[n].turns, 0);
        const fattn_group saves = group_of(FATTN_SPLIT_CONTIGUOUS, all[n].scheme, all[n].turns, 1);
        rank plain[RANKS], saved[RANKS];
        run_ranks(plain, memory[0], &again, NONE);
        run_ranks(saved, memory[1], &saves, NONE);
        tap_check(!plain[0].status && !saved[0].status && saved[0].saved_bytes == 0 &&
                      same_gradients(&memory[0][0], &memory[1][0]),
                  "%s saves nothing, and is right: %s", all[n].what, saved[0].reason);
    }
}

static void check_faults(void)
{
    static const struct {
        fault fault;
        fattn_status status;
        const char *reason;
    } all[] = {
        {NOT_SAVED, FATTN_NULL_POINTER, "saved is NULL: a plan that saves "},
        {MISALIGNED, FATTN_MISALIGNED, ", not a multiple of 64 bytes"},
        {OVERLAPS, FATTN_OVERLAP, "dout overlaps saved"},
    };
    const fattn_group saves = group_of(FATTN_SPLIT_CONTIGUOUS, FATTN_SCHEME_HEADS, 0, 1);
    rank ranks[RANKS];
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++) {
        run_ranks(ranks, memory[0], &saves, all[n].fault);
        tap_check(ranks[1].status == all[n].status && strstr(ranks[1].reason, all[n].reason) &&
                      ranks[0].status == FATTN_RANK_LOST && strstr(ranks[0].reason, all[n].reason),
                  "%s", ranks[0].reason);
    }
    fattn_group wrong = saves;
    wrong.saves = 2;
    run_ranks(ranks, memory[0], &wrong, NONE);
    tap_check(ranks[0].status == FATTN_INVALID_ARGUMENT, "%s", ranks[0].reason);
    wrong = saves;
    wrong.memory = 1 << 30;
    run_ranks(ranks, memory[0], &wrong, NONE);
    tap_check(ranks[0].status == FATTN_INVALID_ARGUMENT &&
                  strstr(ranks[0].reason, "saves and memory are set"),
              "%s", ranks[0].reason);
    fattn_buffers b;
    fattn_buffers_init(&b);
    tap_check(fattn_group_plan_saved_bytes(NULL) == 0 &&
                  fattn_group_execute_saved(NULL, &b, saved_memory) == FATTN_NULL_POINTER,
              "no plan: %s", fattn_last_reason());
}

int main(void)
{
    for (int split = FATTN_SPLIT_CONTIGUOUS; split <= FATTN_SPLIT_STRIPED; split++) {
        for (int turns = 1; turns <= KEY_HEADS / RANKS; turns++) {
            check_steps((fattn_split)split, turns);
        }
    }
    check_others();
    check_faults();
    fattn_cache_clear();
    return tap_done();
}
