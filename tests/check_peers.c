/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups over fattn_peers, whose ranks are threads of one process: drawn problems against the
 * undivided one, those whose messages are spans among them, and what becomes of the others when a
 * rank is silent, gives up or sends another length. That copies wait for what they have to is
 * tested by check_cuda_contexts.
 *
 *     check_peers [PROBLEMS]
 *
 * FATTN_BACKEND names a device with memory of its own, which ranks share.
 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "core/backend.h"
#include "core/status.h"
#include "tests/device.h"
#include "tests/divided.h"
#include "tests/tap.h"

static void must(fattn_status status)
{
    if (status) {
        tap_bail(fattn_last_reason());
    }
}

/* Each rank of a GPU has a stream, which unlike the default stream does not wait for others. */
static fattn_stream streams[DIVIDED_RANKS_MAX];

static fattn_status open_peer(void *peers, int rank, fattn_transport **transport)
{
    if (device_named() && !streams[rank]) {
        must(fattn_stream_create(NULL, &streams[rank]));
    }
    return fattn_peers_open(peers, rank, NULL, streams[rank], transport);
}

static bool problem_is_right(int64_t index, int ranks)
{
    fattn_peers *peers = NULL;
    if (fattn_peers_create(ranks, &peers)) {
        printf("# %s\n", fattn_last_reason());
        return false;
    }
    const divided_transport over = {open_peer, fattn_peers_close, peers};
    const bool good = divided_case_is_right(&over, 9, index, ranks);
    fattn_peers_destroy(peers);
    return good;
}

static void check_problems(int problems)
{
    static const int numbers[] = {2, 3, 4, 8};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const int ranks = numbers[i];
        int right = 0, tried = 0;
        while (tried < problems) {
            right += problem_is_right(tried++ * 8 + ranks, ranks);
        }
        tap_check(right == problems, "%d ranks: %d of %d drawn problems are right", ranks, right,
                  problems);
    }
}

/* --- Spans ------------------------------------------------------------------------------------ */

static atomic_int spans; /* in messages so far */

/* A transport that counts spans, and passes everything on. */
typedef struct counter {
    fattn_transport table, *of;
} counter;

static fattn_status counter_start(void *user, const fattn_message *messages, int count)
{
    const counter *const c = user;
    for (int n = 0; n < count; n++) {
        spans += messages[n].span_count;
    }
    return c->of->start(c->of->user, messages, count);
}

static fattn_status counter_wait(void *user, const fattn_message *messages, int count,
                                 double seconds)
{
    const counter *const c = user;
    return c->of->wait(c->of->user, messages, count, seconds);
}

static void counter_abort(void *user, const char *reason)
{
    const counter *const c = user;
    c->of->abort(c->of->user, reason);
}

static fattn_status open_counter(void *peers, int rank, fattn_transport **transport)
{
    counter *const c = calloc(1, sizeof *c);
    if (!c) {
        tap_bail("out of memory");
    }
    const fattn_status status = open_peer(peers, rank, &c->of);
    if (!status) {
        c->table = *c->of;
        c->table.user = c;
        c->table.start = counter_start, c->table.wait = counter_wait;
        c->table.abort = counter_abort;
    }
    *transport = &c->table;
    return status;
}

static void close_counter(fattn_transport *transport)
{
    counter *const c = (counter *)transport;
    fattn_peers_close(c->of);
    free(c);
}

/* Whether a problem of scheme heads can be sent as spans. (On a GPU it has one sequence, since
 * these are short.) */
static bool spans_suit(const divided *d)
{
    return d->scheme == FATTN_SCHEME_HEADS && d->split != FATTN_SPLIT_STRIPED &&
           d->problem.layout == FATTN_BSHD && d->problem.seqlen_q > 8 && d->problem.seqlen_k > 8 &&
           (!device_named() || d->problem.batch == 1);
}

/* With a limit of memory, however large, turns use two sets of packed rows; without, each has its
 * own. alike: if not, heads are not adjacent on the last rank, so no rank may send spans. */
static void check_spans(int count, int64_t memory, bool alike, const char *title)
{
    int right = 0, tried = 0, spanned = 0, turned = 0;
    for (int64_t index = 0; index < 100000 && tried < count; index++) {
        static const int numbers[] = {2, 3, 4, 10}; /* 10: not all messages fit into a group */
        const int ranks = numbers[index % 4];
        divided d, last;
        const divided *problems[DIVIDED_RANKS_MAX];
        divided_draw(&d, 31, index, ranks);
        if (!spans_suit(&d)) {
            continue;
        }
        d.padded = index % 3 == 0 && !d.ragged;
        fattn_peers *peers = NULL;
        must(fattn_peers_create(ranks, &peers));
        const divided_transport over = {open_counter, close_counter, peers};
        const int before = spans;
        d.memory = memory;
        const bool solved = divided_solve(&d, 31, index) == FATTN_OK;
        last = d;
        last.problem.layout = FATTN_BHSD;
        last.padded = false;
        for (int r = 0; r < ranks; r++) {
            problems[r] = r == ranks - 1 && !alike ? &last : &d;
        }
        right += solved && divided_over_is_right(&over, problems, index, ranks);
        spanned += spans > before;
        turned += d.turns > 1 && d.problem.heads_q > ranks;
        tried++;
        divided_free(&d);
        fattn_peers_destroy(peers);
    }
    const int least = count < 6 ? 0 : count < 20 ? 1 : count / 3; /* of each kind */
    tap_check(right == count && turned >= least && (alike ? spanned >= least : !spanned),
              "%s: %d of %d problems are right, %d with spans, %d in turns", title, right, tried,
              spanned, turned);
}

/* Without queries the gradients of keys are 0. */
static void check_no_queries(void)
{
    int right = 0, tried = 0;
    for (int64_t index = 0; index < 100000 && tried < 3; index++) {
        divided d;
        divided_draw(&d, 33, index, 2);
        const uint32_t keys = FATTN_OUT_DK | FATTN_OUT_DV;
        if (d.scheme != FATTN_SCHEME_HEADS || d.problem.op != FATTN_BACKWARD || d.ragged ||
            d.problem.seqlen_q > 0 || d.problem.seqlen_k == 0 || !(d.problem.outputs & keys)) {
            continue;
        }
        fattn_peers *peers = NULL;
        must(fattn_peers_create(2, &peers));
        const divided_transport over = {open_peer, fattn_peers_close, peers};
        right += divided_case_is_right(&over, 33, index, 2);
        tried++;
        fattn_peers_destroy(peers);
    }
    tap_check(right == 3, "%d of %d problems without queries are right", right, tried);
}

/* --- Faults ----------------------------------------------------------------------------------- */

enum { COUNT = 300 };

/* Two ranks on the default device, and memory of each. */
typedef struct two {
    fattn_peers *peers;
    fattn_transport *transport[2];
    char *memory[2];
} two;

static two open_two(void)
{
    two t;
    must(fattn_peers_create(2, &t.peers));
    for (int r = 0; r < 2; r++) {
        void *memory;
        must(fattn_peers_open(t.peers, r, NULL, NULL, &t.transport[r]));
        must(fattn_device_malloc(NULL, COUNT, &memory));
        t.memory[r] = memory;
    }
    return t;
}

static void close_two(two *t)
{
    for (int r = 0; r < 2; r++) {
        fattn_peers_close(t->transport[r]);
        must(fattn_device_free(NULL, t->memory[r]));
    }
    fattn_peers_destroy(t->peers);
}

static fattn_message message_of(const two *t, int rank, bool receive, int64_t bytes)
{
    return (fattn_message){
        .peer = !rank, .tag = 3, .receive = receive, .data = t->memory[rank], .bytes = bytes};
}

static fattn_status start(const two *t, int rank, const fattn_message *m)
{
    return t->transport[rank]->start(t->transport[rank]->user, m, 1);
}

static fattn_status wait(const two *t, int rank, const fattn_message *m, double seconds)
{
    return t->transport[rank]->wait(t->transport[rank]->user, m, 1, seconds);
}

static void check_silence(void)
{
    two t = open_two();
    const fattn_message m = message_of(&t, 0, true, COUNT);
    must(start(&t, 0, &m));
    tap_check(wait(&t, 0, &m, 0.1) == FATTN_RANK_TIMEOUT, "a rank that is silent: %s",
              fattn_last_reason());
    tap_check(start(&t, 0, &m) == FATTN_RANK_LOST, "and the transport is of no more use: %s",
              fattn_last_reason());
    close_two(&t);
}

/* A sender that did not wait for the receiver would use its event for another message. */
static void check_taking(void)
{
    two t = open_two();
    const fattn_message a = message_of(&t, 0, false, COUNT), b = message_of(&t, 1, true, COUNT);
    must(start(&t, 0, &a));
    must(start(&t, 1, &b));
    tap_check(wait(&t, 0, &a, 0.1) == FATTN_RANK_TIMEOUT, "a message that is not taken: %s",
              fattn_last_reason());
    close_two(&t);
}

/* A rank that waits, for ever. */
typedef struct waiting {
    const two *t;
    const fattn_message *m;
    fattn_status status;
    char reason[256];
} waiting;

static void *wait_for_ever(void *context)
{
    waiting *const w = context;
    w->status = wait(w->t, 1, w->m, INFINITY);
    fattn_last_reason_copy(w->reason, sizeof w->reason);
    return NULL;
}

/* waits: whether the other is in wait() by then, or comes to it later. */
static void check_giving_up(bool waits)
{
    static const struct timespec nap = {.tv_nsec = 50000000};
    two t = open_two();
    const fattn_message m = message_of(&t, 1, false, COUNT);
    waiting w = {.t = &t, .m = &m};
    pthread_t thread;
    must(start(&t, 1, &m));
    if (!waits) {
        t.transport[0]->abort(t.transport[0]->user, "no more paper");
    }
    if (pthread_create(&thread, NULL, wait_for_ever, &w)) {
        tap_bail("no thread");
    }
    if (waits) {
        nanosleep(&nap, NULL);
        t.transport[0]->abort(t.transport[0]->user, "no more paper");
    }
    pthread_join(thread, NULL);
    tap_check(w.status == FATTN_RANK_LOST && strstr(w.reason, "rank 0 gave up: no more paper"),
              "a rank gives up %s the other waits: %s", waits ? "while" : "before", w.reason);
    close_two(&t);
}

/* Of two messages one arrives, and the other does not. Neither rank uses the other's after that. */
static void check_half(void)
{
    two t = open_two();
    fattn_message out[2], in[2];
    for (int n = 0; n < 2; n++) {
        out[n] = message_of(&t, 0, false, COUNT), in[n] = message_of(&t, 1, true, COUNT);
        out[n].tag = in[n].tag = n;
    }
    const fattn_transport *const a = t.transport[0], *const b = t.transport[1];
    must(a->start(a->user, out, 1));
    must(b->start(b->user, in, 2));
    tap_check(b->wait(b->user, in, 2, 0.1) == FATTN_RANK_TIMEOUT, "half of the messages: %s",
              fattn_last_reason());
    tap_check(a->wait(a->user, out, 1, 0.1) == FATTN_OK, "the sender of that half is done: %s",
              fattn_last_reason());
    close_two(&t);
    t = open_two();
    out[0] = message_of(&t, 0, false, COUNT), in[0] = message_of(&t, 1, true, COUNT);
    must(start(&t, 0, out));
    must(start(&t, 1, in));
    tap_check(wait(&t, 0, out, 0.1) == FATTN_RANK_TIMEOUT, "a sender gives up waiting: %s",
              fattn_last_reason());
    fattn_peers_close(t.transport[0]);
    t.transport[0] = NULL;
    tap_check(wait(&t, 1, in, 0.1) == FATTN_RANK_LOST, "and closes before the other waits: %s",
              fattn_last_reason());
    close_two(&t);
}

static void check_tags(void)
{
    two t = open_two();
    const fattn_message same[2] = {message_of(&t, 0, false, COUNT),
                                   message_of(&t, 0, false, COUNT)};
    tap_check(t.transport[0]->start(t.transport[0]->user, same, 2) == FATTN_INVALID_ARGUMENT,
              "a tag twice: %s", fattn_last_reason());
    close_two(&t);
}

/* Messages that could not all be started are gone: the other side waits for one of them in vain. */
static void check_half_started(void)
{
    two t = open_two();
    fattn_message sent[2] = {message_of(&t, 0, false, COUNT), message_of(&t, 0, false, COUNT)};
    const fattn_message got = message_of(&t, 1, true, COUNT);
    const fattn_status refused = t.transport[0]->start(t.transport[0]->user, sent, 2);
    memset(sent, 0, sizeof sent);
    must(start(&t, 1, &got));
    const fattn_status status = wait(&t, 1, &got, 0.05);
    tap_check(refused && status == FATTN_RANK_TIMEOUT, "a group that was half started: %s",
              fattn_last_reason());
    close_two(&t);
}

static void check_lengths(void)
{
    two t = open_two();
    const fattn_message a = message_of(&t, 0, false, COUNT), b = message_of(&t, 1, true, COUNT - 1);
    must(start(&t, 0, &a));
    const fattn_status started = start(&t, 1, &b); /* on a GPU it queues the copy */
    tap_check((started ? started : wait(&t, 1, &b, 60)) == FATTN_RANKS_DISAGREE,
              "two lengths of a message: %s", fattn_last_reason());
    close_two(&t);
}

/* Spans of as many bytes, but of other rows. */
static void check_shapes(void)
{
    two t = open_two();
    const fattn_span out = {t.memory[0], 4, 10, 20}, in = {t.memory[1], 5, 8, 8};
    fattn_message a = message_of(&t, 0, false, 40), b = message_of(&t, 1, true, 40);
    a.spans = &out, b.spans = &in;
    a.span_count = b.span_count = 1;
    must(start(&t, 0, &a));
    const fattn_status started = start(&t, 1, &b);
    tap_check((started ? started : wait(&t, 1, &b, 60)) == FATTN_RANKS_DISAGREE, "other spans: %s",
              fattn_last_reason());
    close_two(&t);
}

/* Now from one, now from the other, in the same slots. */
static void check_turns(void)
{
    two t = open_two();
    int right = 0;
    for (int n = 0; n < 20; n++) {
        char sent[COUNT], got[COUNT];
        const fattn_message a = message_of(&t, n % 2, false, COUNT),
                            b = message_of(&t, !(n % 2), true, COUNT);
        memset(sent, n + 1, sizeof sent);
        must(fattn_device_copy(NULL, a.data, sent, COUNT, NULL));
        must(start(&t, n % 2, &a));
        must(start(&t, !(n % 2), &b));
        must(wait(&t, !(n % 2), &b, 60));
        must(wait(&t, n % 2, &a, 60));
        must(fattn_device_copy(NULL, got, b.data, COUNT, NULL));
        must(fattn_stream_synchronize(NULL, NULL));
        right += memcmp(got, sent, COUNT) == 0;
    }
    tap_check(right == 20, "%d of 20 messages between the same two arrive", right);
    close_two(&t);
}

static void check_arguments(void)
{
    fattn_peers *peers = NULL;
    fattn_transport *transport = NULL, *second = NULL;
    tap_check(fattn_peers_create(0, &peers) == FATTN_INVALID_ARGUMENT && !peers, "no ranks: %s",
              fattn_last_reason());
    tap_check(fattn_peers_create(65, &peers) == FATTN_INVALID_ARGUMENT, "too many ranks: %s",
              fattn_last_reason());
    tap_check(fattn_peers_create(2, NULL) == FATTN_NULL_POINTER, "nowhere to put it: %s",
              fattn_last_reason());
    must(fattn_peers_create(2, &peers));
    tap_check(fattn_peers_open(peers, 2, NULL, NULL, &transport) == FATTN_INVALID_ARGUMENT &&
                  !transport,
              "no such rank: %s", fattn_last_reason());
    must(fattn_peers_open(peers, 0, NULL, NULL, &transport));
    tap_check(fattn_peers_open(peers, 0, NULL, NULL, &second) == FATTN_INVALID_ARGUMENT && !second,
              "a rank twice: %s", fattn_last_reason());
    fattn_device *other = NULL;
    must(fattn_device_open("reference", &other));
    tap_check(fattn_peers_open(peers, 1, other, NULL, &second) == FATTN_INVALID_ARGUMENT,
              "devices of two backends: %s", fattn_last_reason());
    fattn_device_close(other);
    fattn_peers_close(transport);
    must(fattn_peers_open(peers, 0, NULL, NULL, &transport));
    fattn_peers_close(transport);
    fattn_peers_destroy(peers);
    fattn_peers_close(NULL);
    fattn_peers_destroy(NULL);
}

/* --- GPUs out of each other's reach ----------------------------------------------------------- */

typedef struct apart {
    const two *t;
    int rank;
    fattn_status status;
    char reason[256];
} apart;

/* Plans a problem that takes more turns over a transport with spans. Rank 1 has one without. */
static void *plan_apart(void *context)
{
    apart *const a = context;
    fattn_transport transport = *a->t->transport[a->rank];
    fattn_group group;
    fattn_group_plan *plan = NULL;
    fattn_problem p;
    transport.spans = a->rank == 0;
    fattn_group_init(&group);
    group.transport = &transport;
    group.scheme = FATTN_SCHEME_HEADS;
    fattn_problem_init(&p);
    p.dtype = FATTN_BF16, p.features |= FATTN_CAUSAL;
    p.heads_q = 32, p.heads_k = 8, p.dim = p.dim_v = 64;
    p.seqlen_q = p.seqlen_k = 4096;
    a->status = fattn_group_plan_create(&group, &p, NULL, NULL, &plan);
    fattn_last_reason_copy(a->reason, sizeof a->reason);
    fattn_group_plan_destroy(plan);
    return NULL;
}

static void check_reach(void)
{
    two t = open_two();
    apart all[2] = {{.t = &t, .rank = 0}, {.t = &t, .rank = 1}};
    pthread_t thread[2];
    for (int r = 0; r < 2; r++) {
        if (pthread_create(&thread[r], NULL, plan_apart, &all[r])) {
            tap_bail("no thread");
        }
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(thread[r], NULL);
        tap_check(all[r].status == FATTN_OK, "rank %d of two of which one takes spans: %s", r,
                  all[r].status ? all[r].reason : "a plan");
    }
    close_two(&t);
}

/* --- A rank's device fails -------------------------------------------------------------------- */

enum { RANKS = 3, ROWS = 24, HEADS = 2, DIM = 8, ELEMENTS = ROWS * HEADS * DIM };

/* A backend whose functions for rows and results fail in a thread from some call on. */
static const fattn_backend *sound;
static fattn_backend broken;
static _Thread_local int calls_left = INT_MAX;

static fattn_status fail_late(void)
{
    return calls_left-- > 0 ? FATTN_OK : fattn_fail(FATTN_DEVICE_ERROR, "no more ink");
}

static fattn_status broken_rows(void *impl, const fattn_rows_args *jobs, int count,
                                fattn_stream stream)
{
    const fattn_status status = fail_late();
    return status ? status : sound->rows(impl, jobs, count, stream);
}

static fattn_status broken_merge(void *impl, const fattn_merge_job *job, fattn_stream stream)
{
    const fattn_status status = fail_late();
    return status ? status : sound->merge(impl, job, stream);
}

typedef struct worker {
    int rank;
    fattn_peers *peers;
    const fattn_group *group; /* its scheme and split */
    fattn_problem problem;
    fattn_device *device;
    pthread_barrier_t *planned;
    int calls; /* which succeed, once all ranks have planned */
    fattn_status status;
    char reason[256];
} worker;

static void *work(void *context)
{
    static float tensors[RANKS][8][RANKS * ELEMENTS], lse[RANKS][RANKS * HEADS * ROWS];
    worker *const w = context;
    float(*const x)[RANKS * ELEMENTS] = tensors[w->rank];
    fattn_group group = *w->group;
    fattn_transport *transport;
    fattn_group_plan *plan = NULL;
    fattn_buffers b;
    must(fattn_peers_open(w->peers, w->rank, w->device, NULL, &transport));
    group.transport = transport;
    group.device = w->device;
    must(fattn_group_plan_create(&group, &w->problem, NULL, NULL, &plan));
    fattn_buffers_init(&b);
    b.q = x[0], b.k = x[1], b.v = x[2], b.o = x[3], b.lse = lse[w->rank];
    b.dout = x[4], b.dq = x[5], b.dk = x[6], b.dv = x[7];
    pthread_barrier_wait(w->planned);
    calls_left = w->calls;
    w->status = fattn_group_execute(plan, &b);
    fattn_last_reason_copy(w->reason, sizeof w->reason);
    fattn_group_plan_destroy(plan);
    fattn_peers_close(transport);
    return NULL;
}

/* Runs a problem whose rank 1 fails at call `n` of the device. Returns whether it failed; *right:
 * whether the others were told, or did not need it any more. */
static bool fails_at(int n, const fattn_group *group, const fattn_problem *problem, bool *right)
{
    pthread_t threads[RANKS];
    worker workers[RANKS];
    pthread_barrier_t planned;
    fattn_peers *peers;
    fattn_device *device;
    pthread_barrier_init(&planned, NULL, RANKS);
    must(fattn_device_open("cpu", &device));
    sound = device->backend;
    broken = *sound;
    broken.rows = broken_rows, broken.merge = broken_merge;
    device->backend = &broken;
    must(fattn_peers_create(RANKS, &peers));
    for (int r = 0; r < RANKS; r++) {
        workers[r] = (worker){.rank = r,
                              .peers = peers,
                              .group = group,
                              .problem = *problem,
                              .planned = &planned,
                              .calls = r == 1 ? n : INT_MAX,
                              .device = device};
        if (pthread_create(&threads[r], NULL, work, &workers[r])) {
            tap_bail("no thread");
        }
    }
    *right = true;
    for (int r = 0; r < RANKS; r++) {
        pthread_join(threads[r], NULL);
        const fattn_status status = workers[r].status;
        const bool told =
            status == FATTN_RANK_LOST && strstr(workers[r].reason, "rank 1 gave up: no more ink");
        if (r != 1 && status && !told) {
            printf("# call %d, rank %d: %s\n", n, r, workers[r].reason);
            *right = false;
        }
    }
    fattn_peers_destroy(peers);
    device->backend = sound;
    fattn_device_close(device);
    pthread_barrier_destroy(&planned);
    return workers[1].status == FATTN_DEVICE_ERROR;
}

/* Wherever a rank fails, the others are told, and by it: none waits until the time has passed. */
static void check_failures(void)
{
    static const struct {
        const char *name;
        fattn_scheme scheme;
        fattn_split split;
        fattn_op op;
    } cases[] = {{"ring, backward", FATTN_SCHEME_RING, FATTN_SPLIT_ZIGZAG, FATTN_BACKWARD},
                 {"heads, backward", FATTN_SCHEME_HEADS, FATTN_SPLIT_STRIPED, FATTN_BACKWARD},
                 {"reduction", FATTN_SCHEME_REDUCE, FATTN_SPLIT_CONTIGUOUS, FATTN_FORWARD}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        fattn_group group;
        fattn_problem p;
        fattn_group_init(&group);
        group.scheme = cases[c].scheme, group.split = cases[c].split, group.timeout = 20;
        fattn_problem_init(&p);
        p.op = cases[c].op, p.dtype = FATTN_F32, p.dim = p.dim_v = DIM;
        p.heads_q = p.heads_k = group.scheme == FATTN_SCHEME_HEADS ? RANKS * HEADS : HEADS;
        p.seqlen_k = RANKS * ROWS;
        p.seqlen_q = group.scheme == FATTN_SCHEME_REDUCE ? 2 : p.seqlen_k;
        p.outputs = p.op == FATTN_BACKWARD ? FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV
                                           : FATTN_OUT_O | FATTN_OUT_LSE;
        int calls = 0, right = 0;
        for (bool told; fails_at(calls, &group, &p, &told); calls++) {
            right += told;
        }
        tap_check(calls > 0 && right == calls, "%s: at %d of %d calls that fail others are told",
                  cases[c].name, right, calls);
    }
}

int main(int argc, char **argv)
{
    if (device_absent(device_named())) {
        return 0;
    }
    const int problems = argc > 1 ? atoi(argv[1]) : 60;
    check_problems(problems);
    check_spans(2 * problems, 0, true, "spans, a set of packed rows for each turn");
    check_spans(2 * problems, (int64_t)1 << 40, true, "spans, two sets of packed rows");
    check_spans(problems, 0, false, "spans on all ranks but one");
    check_no_queries();
    check_silence();
    check_taking();
    check_giving_up(false);
    check_giving_up(true);
    check_half();
    check_tags();
    check_half_started();
    check_lengths();
    check_shapes();
    check_turns();
    check_reach();
    if (!device_named()) {
        check_failures();
    }
    check_arguments();
    for (int r = 0; r < DIVIDED_RANKS_MAX; r++) {
        if (streams[r]) {
            must(fattn_stream_destroy(NULL, streams[r]));
        }
    }
    fattn_cache_clear();
    return tap_done();
}
