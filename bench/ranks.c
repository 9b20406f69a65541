/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares attention divided over the GPUs of one machine with attention on one of them, in turns:
 * bf16, d 128. Run by hand:
 *
 *     ranks [--nccl] [--gpus 2] [--heads 32] [--kv-heads 32] [--backward] [--parts] [--decode]
 *           [--exchange | --auto] [--turns N] [--saves] [--pair] [--cpu] [--repeat 5]
 *           [--memory GB] LENGTH ...
 *
 * Causal, zigzag, a ring; with --auto the schemes that the plans choose, whose names the line has;
 * with --exchange contiguous parts and an exchange of heads, in N turns; with --decode one query
 * against keys that are divided, and a reduction. With --saves backward uses what forward has
 * received (fattn_group.saves); memory then counts what is saved. A line for each length: median
 * milliseconds of one GPU and of all, and their efficiency, which is the time of one GPU over the
 * time of all times their number. First every GPU computes the undivided problem by itself, all at
 * the same time, so that all are equally warm; then they compute together, and so on. The slowest
 * GPU counts. Each line is checked: o, and in backward dq, dk and dv, against those of one GPU.
 * Messages are copies between the GPUs (fattn_peers), or NCCL's with --nccl. --parts adds the times
 * of what a step is made of, each alone. With --pair one GPU does nothing: for what is too long for
 * it. With --cpu ranks are threads that share the CPU, to try a command without GPUs; efficiency
 * then says nothing.
 */
#define _POSIX_C_SOURCE 200809L
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <fattn/distributed.h>
#include <fattn/nccl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "times.h"

enum { GPUS_MAX = 8, DIM = 128, TENSORS = 8, PERIOD = 251, REPEAT_MAX = 1000 };
enum { Q, K, V, O, DOUT, DQ, DK, DV };

static const char *const names[TENSORS] = {"q", "k", "v", "o", "dout", "dq", "dk", "dv"};

/* --- Options ---------------------------------------------------------------------------------- */

static int gpus = 2, repeat = 5;
static long heads = 32, kv_heads = 32;
static long turns;    /* of exchanged heads; 0: as many as the plan chooses */
static double memory; /* limit of a plan in GB, or 0: none; with --backward forward gets half */
static bool backward, parts, decode, exchange, automatic, saves, pair, cpu, by_nccl;

static void fail(const char *what)
{
    fprintf(stderr, "ranks: %s: %s\n", what, fattn_last_reason());
    exit(1);
}

static void must(fattn_status status, const char *what)
{
    if (status) {
        fail(what);
    }
}

static void must_cuda(cudaError_t error, const char *what)
{
    if (error) {
        fprintf(stderr, "ranks: %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

/* --- Tensors ---------------------------------------------------------------------------------- */

/* Of one GPU: (rows, heads, DIM), bf16. */
typedef struct tensors {
    fattn_device *device;
    fattn_stream stream;
    void *at[TENSORS];
    void *lse;
} tensors;

static bool has_keys(int t) { return t == K || t == V || t == DK || t == DV; }

static size_t row_bytes(int t) { return (size_t)(has_keys(t) ? kv_heads : heads) * DIM * 2; }

/* Rows of a tensor: a decoder has one query. */
static long rows_of(int t, long rows) { return decode && !has_keys(t) ? 1 : rows; }

static void make_tensors(tensors *x, long rows)
{
    for (int t = 0; t < (backward ? TENSORS : DOUT); t++) {
        must(fattn_device_malloc(x->device, (size_t)rows_of(t, rows) * row_bytes(t), &x->at[t]),
             names[t]);
    }
    must(fattn_device_malloc(x->device, (size_t)(rows_of(O, rows) * heads) * 4, &x->lse), "lse");
}

static void free_tensors(tensors *x)
{
    for (int t = 0; t < TENSORS; t++) {
        fattn_device_free(x->device, x->at[t]);
        x->at[t] = NULL;
    }
    fattn_device_free(x->device, x->lse);
}

/* Nearly normal random numbers, the same on every GPU. */
static void fill(uint16_t *narrow, int tensor, size_t count)
{
    for (size_t n = 0; n < count; n++) {
        uint64_t x = (n + 1) * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)tensor * 0xabcdef;
        x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
        float sum = -6;
        for (int part = 0; part < 12; part++) {
            sum += (float)(x >> 5 * part & 31) / 31;
        }
        uint32_t bits;
        memcpy(&bits, &sum, sizeof bits);
        narrow[n] = (uint16_t)(bits >> 16);
    }
}

/* Writes rows first .. first + count - 1 of the whole tensor to row `at` of the GPU's. Rows repeat
 * after PERIOD, so that long tensors are filled quickly; it is a prime, which divides no share. */
static void put_rows(const tensors *x, int t, long at, long first, long count)
{
    static uint16_t *chunks[TENSORS];
    const size_t bytes = row_bytes(t);
    if (!chunks[t]) {
        chunks[t] = malloc(PERIOD * bytes);
        if (!chunks[t]) {
            exit(1);
        }
        fill(chunks[t], t, PERIOD * bytes / 2);
    }
    while (count > 0) {
        const long from = first % PERIOD;
        const long rows = PERIOD - from < count ? PERIOD - from : count;
        must(fattn_device_copy(x->device, (char *)x->at[t] + (size_t)at * bytes,
                               (const char *)chunks[t] + (size_t)from * bytes, (size_t)rows * bytes,
                               x->stream),
             "copying");
        at += rows, first += rows, count -= rows;
    }
    must(fattn_stream_synchronize(x->device, x->stream), "copying");
}

static fattn_problem problem_of(long length, fattn_op op)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = op;
    p.dtype = FATTN_BF16;
    p.features = decode ? 0 : FATTN_CAUSAL;
    p.heads_q = heads, p.heads_k = kv_heads;
    p.seqlen_q = rows_of(Q, length);
    p.seqlen_k = length;
    p.dim = p.dim_v = DIM;
    p.outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    return p;
}

static fattn_buffers buffers_of(const tensors *x)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    b.q = x->at[Q], b.k = x->at[K], b.v = x->at[V], b.o = x->at[O], b.lse = x->lse;
    b.dout = x->at[DOUT], b.dq = x->at[DQ], b.dk = x->at[DK], b.dv = x->at[DV];
    return b;
}

static fattn_split split(void)
{
    return decode || exchange ? FATTN_SPLIT_CONTIGUOUS : FATTN_SPLIT_ZIGZAG;
}

static fattn_scheme scheme(void)
{
    return decode      ? FATTN_SCHEME_REDUCE
           : exchange  ? FATTN_SCHEME_HEADS
           : automatic ? FATTN_SCHEME_AUTO
                       : FATTN_SCHEME_RING;
}

/* --- One GPU ---------------------------------------------------------------------------------- */

/* A plan and its workspace, which is allocated once because allocation takes time. */
typedef struct planned {
    fattn_plan *plan;
    void *workspace;
} planned;

static planned plan_for(const tensors *x, const fattn_problem *p)
{
    planned made;
    fattn_plan_info info;
    fattn_plan_info_init(&info);
    must(fattn_plan_create(x->device, p, &made.plan), "a plan");
    must(fattn_plan_get_info(made.plan, &info), "a plan");
    must(fattn_device_malloc(x->device, (size_t)info.workspace_bytes + 1, &made.workspace),
         "a workspace");
    return made;
}

static void give_up(const tensors *x, const planned *made)
{
    fattn_plan_destroy(made->plan);
    fattn_device_free(x->device, made->workspace);
}

/* Plans of forward and, with --backward, backward on one GPU. */
static void plan_one(const tensors *x, long length, planned plans[2])
{
    for (int op = 0; op < 1 + backward; op++) {
        const fattn_problem p = problem_of(length, op ? FATTN_BACKWARD : FATTN_FORWARD);
        plans[op] = plan_for(x, &p);
    }
}

/* Seconds of a step; the results stay in x. */
static double run_one(const tensors *x, const planned plans[2])
{
    const fattn_buffers b = buffers_of(x);
    const double begin = times_now();
    for (int op = 0; op < 1 + backward; op++) {
        must(fattn_execute(plans[op].plan, &b, plans[op].workspace, x->stream), "a run");
    }
    must(fattn_stream_synchronize(x->device, x->stream), "a run");
    return times_now() - begin;
}

/* --- The parts of a step ---------------------------------------------------------------------- */

/* Milliseconds of work that is queued on a stream, by events; the least of several. */
static double time_of(const tensors *x, fattn_status (*work)(const tensors *, const void *),
                      const void *context)
{
    fattn_event *start, *stop;
    double best = INFINITY;
    must(fattn_event_create(x->device, &start), "an event");
    must(fattn_event_create(x->device, &stop), "an event");
    for (int n = 0; n < 4; n++) {
        double milliseconds;
        must(fattn_event_record(start, x->stream), "an event");
        must(work(x, context), "a part of a step");
        must(fattn_event_record(stop, x->stream), "an event");
        must(fattn_stream_synchronize(x->device, x->stream), "a part of a step");
        must(fattn_event_elapsed(start, stop, &milliseconds), "an event");
        best = n && milliseconds < best ? milliseconds : best;
    }
    fattn_event_destroy(start);
    fattn_event_destroy(stop);
    return best;
}

/* A piece with f32 results, as in a step of the ring. */
typedef struct piece {
    planned of;
    fattn_buffers buffers;
} piece;

static fattn_status run_piece(const tensors *x, const void *context)
{
    const piece *const p = context;
    return fattn_execute(p->of.plan, &p->buffers, p->of.workspace, x->stream);
}

static fattn_status run_merge(const tensors *x, const void *context)
{
    return fattn_merge(x->device, context, x->stream);
}

static double time_piece(const tensors *x, long rows, long keys, bool causal, float *o, fattn_op op)
{
    fattn_problem p = problem_of(rows, op);
    piece part = {.buffers = buffers_of(x)};
    p.seqlen_k = keys;
    p.features = causal ? FATTN_CAUSAL : 0;
    p.anchor = FATTN_BOTTOM_RIGHT;
    if (op == FATTN_FORWARD) {
        p.dtype_o = FATTN_F32;
        part.buffers.o = o;
    } else { /* added to; o stands for dq, and is as large as dk and dv of a share */
        p.features |= FATTN_ACCUMULATE;
        part.buffers.dq = part.buffers.dk = part.buffers.dv = NULL;
        p.outputs = FATTN_OUT_DQ | FATTN_OUT_DK | FATTN_OUT_DV;
        part.buffers.dq = o;
        part.buffers.dk = o + rows * heads * DIM;
        part.buffers.dv = o + rows * heads * DIM + keys * kv_heads * DIM;
    }
    part.of = plan_for(x, &p);
    const double time = time_of(x, run_piece, &part);
    give_up(x, &part.of);
    return time;
}

/* The pieces of two ranks' steps, each alone on the first GPU, over the first rows of x. */
static void print_parts(const tensors *x, long length)
{
    const long half = length / 2, quarter = length / 4;
    const size_t sum = (size_t)half * (size_t)heads * DIM;
    void *sums;
    must(fattn_device_malloc(x->device, 3 * sum * 4, &sums), "sums");
    float *const a = sums, *const b = a + sum;
    printf("          alone, ms: own %.3f", time_piece(x, half, half, true, a, FATTN_FORWARD));
    printf("  other's %.3f and %.3f", time_piece(x, quarter, half, false, a, FATTN_FORWARD),
           time_piece(x, half, quarter, false, a, FATTN_FORWARD));
    const fattn_strides strides = {.seq = heads * DIM, .head = DIM};
    fattn_merge_args args;
    fattn_merge_args_init(&args);
    args.batch = 1, args.heads = heads, args.seqlen = half, args.dim_v = DIM;
    args.o1 = args.o = a, args.o2 = b;
    args.lse1 = args.lse = x->lse;
    args.lse2 = (float *)x->lse + half * heads;
    args.o1_stride = args.o2_stride = args.o_stride = strides;
    printf("  merge %.3f", time_of(x, run_merge, &args));
    if (backward) {
        printf("  backward: own %.3f and %.3f",
               time_piece(x, quarter, half, true, a, FATTN_BACKWARD),
               time_piece(x, quarter, quarter, true, a, FATTN_BACKWARD));
        printf("  other's %.3f and %.3f", time_piece(x, quarter, half, false, a, FATTN_BACKWARD),
               time_piece(x, half, quarter, false, a, FATTN_BACKWARD));
    }
    printf("\n");
    fattn_device_free(x->device, sums);
}

/* --- All GPUs --------------------------------------------------------------------------------- */

typedef struct rank {
    pthread_t thread;
    int number;
    long length;
    ncclComm_t comm;
    tensors one; /* of the undivided problem; empty with --pair */
    tensors x;
    double alone, together;  /* median seconds */
    int64_t bytes;           /* of its plans, and of what forward saves */
    fattn_scheme schemes[2]; /* of the plans: forward, backward */
} rank;

/* Waits until all ranks are here. It spins, because threads that sleep do not wake together. */
static void meet(void)
{
    static atomic_int arrivals;
    const int number = atomic_fetch_add(&arrivals, 1), last = number / gpus * gpus + gpus;
    while (atomic_load(&arrivals) < last) {
        sched_yield();
    }
}

static double begun[GPUS_MAX], ended[GPUS_MAX]; /* when each rank's step began and ended */
static double by_itself[GPUS_MAX];              /* seconds of each rank alone */
static fattn_peers *peers;

static fattn_transport *open_transport(const rank *r)
{
    fattn_transport *transport;
    if (by_nccl) {
        must_cuda(cudaSetDevice(r->number), "cudaSetDevice");
        must(fattn_nccl_open(r->comm, r->x.stream, &transport), "a transport");
    } else {
        must(fattn_peers_open(peers, r->number, r->x.device, r->x.stream, &transport),
             "a transport");
    }
    return transport;
}

/* Seconds from the begin of the first rank to the end of the last one. */
static double step_time(void)
{
    double begin = begun[0], end = ended[0];
    for (int r = 1; r < gpus; r++) {
        begin = begun[r] < begin ? begun[r] : begin;
        end = ended[r] > end ? ended[r] : end;
    }
    return end - begin;
}

static double slowest(void)
{
    double most = 0;
    for (int r = 0; r < gpus; r++) {
        most = by_itself[r] > most ? by_itself[r] : most;
    }
    return most;
}

static void *run_rank(void *context)
{
    rank *const r = context;
    fattn_transport *const transport = open_transport(r);
    fattn_group group;
    fattn_group_plan *plans[2] = {NULL, NULL};
    planned single[2] = {{NULL, NULL}, {NULL, NULL}};
    double alone[REPEAT_MAX], together[REPEAT_MAX];
    fattn_group_init(&group);
    group.transport = transport;
    group.device = r->x.device;
    group.split = split();
    group.scheme = scheme();
    group.turns = turns;
    group.saves = saves;
    for (int op = 0; op < 1 + backward; op++) {
        const fattn_problem p = problem_of(r->length, op ? FATTN_BACKWARD : FATTN_FORWARD);
        group.memory = (int64_t)(1e9 * memory / (backward && !op ? 2 : 1));
        must(fattn_group_plan_create(&group, &p, NULL, NULL, &plans[op]), "a plan of a group");
        r->bytes += fattn_group_plan_bytes(plans[op]);
        r->schemes[op] = fattn_group_plan_scheme(plans[op]);
    }
    if (!pair) {
        plan_one(&r->one, r->length, single);
    }
    const fattn_buffers b = buffers_of(&r->x);
    void *saved = NULL;
    const int64_t saved_bytes = fattn_group_plan_saved_bytes(plans[0]);
    must(fattn_device_malloc(r->x.device, (size_t)saved_bytes, &saved), "saved rows");
    r->bytes += saved_bytes;
    for (int n = -1; n < repeat; n++) { /* the first warms up */
        meet();
        by_itself[r->number] = pair ? 0 : run_one(&r->one, single);
        meet();
        begun[r->number] = times_now();
        for (int op = 0; op < 1 + backward; op++) {
            must(fattn_group_execute_saved(plans[op], &b, saved), "a run of a group");
        }
        must(fattn_stream_synchronize(r->x.device, r->x.stream), "a run of a group");
        ended[r->number] = times_now();
        meet();
        if (n >= 0) {
            alone[n] = slowest();
            together[n] = step_time();
        }
    }
    r->alone = times_median(alone, repeat);
    r->together = times_median(together, repeat);
    for (int op = 0; !pair && op < 1 + backward; op++) {
        give_up(&r->one, &single[op]);
    }
    fattn_group_plan_destroy(plans[0]);
    fattn_group_plan_destroy(plans[1]);
    fattn_device_free(r->x.device, saved);
    if (by_nccl) {
        fattn_nccl_close(transport);
    } else {
        fattn_peers_close(transport);
    }
    return NULL;
}

static void run_ranks(rank *ranks, long length)
{
    must(fattn_peers_create(gpus, &peers), "peers");
    for (int r = 0; r < gpus; r++) {
        ranks[r].length = length;
        ranks[r].bytes = 0;
        if (pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r])) {
            exit(1);
        }
    }
    for (int r = 0; r < gpus; r++) {
        pthread_join(ranks[r].thread, NULL);
    }
    fattn_peers_destroy(peers);
}

/* --- Comparing -------------------------------------------------------------------------------- */

static float widen(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static uint16_t *fetch(const tensors *x, int t, long first, long rows)
{
    const size_t bytes = (size_t)rows * row_bytes(t);
    uint16_t *const host = malloc(bytes + 1);
    if (!host) {
        exit(1);
    }
    must(fattn_device_copy(x->device, host, (const char *)x->at[t] + (size_t)first * row_bytes(t),
                           bytes, x->stream),
         "copying");
    must(fattn_stream_synchronize(x->device, x->stream), "copying");
    return host;
}

/* The largest difference of results divided by the largest value, in some rows of each run. */
static double difference(const tensors *one, const rank *ranks, long length)
{
    double most = 0, worst = 0;
    for (int t = O; t < (backward ? TENSORS : O + 1); t++) {
        double error = 0, largest = 0;
        for (int r = 0; r < gpus && t != DOUT; r++) {
            long at = 0;
            for (int n = 0; n < fattn_split_runs(split()); n++) {
                fattn_run run = {0, 1, 1};
                if (!decode) {
                    must(fattn_split_get_run(split(), length, gpus, r, n, &run), "a share");
                }
                const long rows = run.count < 300 ? (long)run.count : 300;
                const long skip = (long)run.count - rows; /* the last ones */
                uint16_t *const a = fetch(one, t, (long)run.first + skip, rows);
                uint16_t *const b = fetch(&ranks[r].x, t, at + skip, rows);
                for (size_t i = 0; i < (size_t)rows * row_bytes(t) / 2; i++) {
                    const double x = (double)widen(a[i]), off = fabs(x - (double)widen(b[i]));
                    error = off <= error ? error : off; /* keeps NaN */
                    largest = fabs(x) > largest ? fabs(x) : largest;
                }
                free(a);
                free(b);
                at += (long)run.count;
            }
        }
        worst = largest > 0 ? error / largest : 0;
        most = worst <= most ? most : worst;
    }
    return most;
}

/* --- Main ------------------------------------------------------------------------------------- */

static void open_comms(ncclComm_t comms[GPUS_MAX])
{
    void *const library = dlopen("libnccl.so.2", RTLD_NOW);
    ncclResult_t (*init)(ncclComm_t *, int, const int *) = NULL;
    void *const found = library ? dlsym(library, "ncclCommInitAll") : NULL;
    if (!found) {
        fprintf(stderr, "ranks: %s\n", dlerror());
        exit(1);
    }
    memcpy(&init, &found, sizeof init);
    if (init(comms, gpus, NULL) != ncclSuccess) {
        fprintf(stderr, "ranks: ncclCommInitAll failed\n");
        exit(1);
    }
}

static void open_all(rank *ranks)
{
    ncclComm_t comms[GPUS_MAX] = {NULL};
    if (by_nccl) {
        open_comms(comms);
    }
    for (int r = 0; r < gpus; r++) {
        char name[16];
        snprintf(name, sizeof name, cpu ? "cpu" : "cuda:%d", r);
        ranks[r].number = r;
        ranks[r].comm = comms[r];
        must(fattn_device_open(name, &ranks[r].x.device), name);
        must(fattn_stream_create(ranks[r].x.device, &ranks[r].x.stream), "a stream");
    }
}

/* The undivided problem on the rank's GPU. */
static void make_one(rank *r, long length)
{
    r->one = (tensors){.device = r->x.device, .stream = r->x.stream};
    if (pair) {
        return;
    }
    make_tensors(&r->one, length);
    for (int t = 0; t < (backward ? DQ : O); t++) {
        if (t != O) {
            put_rows(&r->one, t, 0, 0, rows_of(t, length));
        }
    }
}

/* A rank's share of the inputs. */
static void make_share(rank *r, long length)
{
    fattn_run runs[2];
    long rows = 0;
    for (int n = 0; n < fattn_split_runs(split()); n++) {
        must(fattn_split_get_run(split(), length, gpus, r->number, n, &runs[n]), "a share");
        rows += (long)runs[n].count;
    }
    make_tensors(&r->x, rows);
    for (int t = 0; t < (backward ? DQ : O); t++) {
        long at = 0;
        for (int n = 0; t != O && n < fattn_split_runs(split()); n++) {
            const bool whole = rows_of(t, rows) < rows;
            put_rows(&r->x, t, at, whole ? 0 : (long)runs[n].first, rows_of(t, runs[n].count));
            at += (long)runs[n].count;
        }
    }
}

static double gigabytes(const rank *r, long length)
{
    double bytes = 0;
    for (int t = 0; t < (backward ? TENSORS : DOUT); t++) {
        bytes += (double)rows_of(t, length / gpus) * (double)row_bytes(t);
    }
    return 1e-9 * (r ? (double)r->bytes : bytes);
}

static void measure(rank *ranks, long length)
{
    for (int r = 0; r < gpus; r++) {
        make_one(&ranks[r], length);
        make_share(&ranks[r], length);
    }
    run_ranks(ranks, length);
    const double alone = ranks[0].alone, together = ranks[0].together;
    printf("%8ld  %d %s %10.3f ms", length, gpus, cpu ? "ranks" : "GPUs", together * 1e3);
    if (!pair) {
        const double off = difference(&ranks[0].one, ranks, length);
        printf("  one %10.3f ms  efficiency %.4f  off by %.2e%s", alone * 1e3,
               alone / (gpus * together), off, off < 0.02 ? "" : "  WRONG");
    }
    for (int op = 0; automatic && op < 1 + backward; op++) {
        static const char *const schemes[] = {"auto", "ring", "heads", "both", "reduce"};
        printf("  %s", schemes[ranks[0].schemes[op]]);
    }
    const double held = gigabytes(NULL, length), plans = gigabytes(&ranks[0], length);
    printf("  a rank: tensors %.3g GB, plans %.3g GB, together %.3f of its tensors\n", held, plans,
           (held + plans) / held);
    if (parts && !pair && !decode) {
        print_parts(&ranks[0].one, length);
    }
    fflush(stdout);
    for (int r = 0; r < gpus; r++) {
        free_tensors(&ranks[r].one);
        free_tensors(&ranks[r].x);
    }
    fattn_cache_clear();
}

int main(int argc, char **argv)
{
    static rank ranks[GPUS_MAX];
    int n = 1;
    const struct {
        const char *name;
        bool *is;
    } flags[] = {{"--backward", &backward}, {"--parts", &parts},    {"--decode", &decode},
                 {"--exchange", &exchange}, {"--auto", &automatic}, {"--pair", &pair},
                 {"--saves", &saves},       {"--cpu", &cpu},        {"--nccl", &by_nccl}};
    for (; n < argc && strncmp(argv[n], "--", 2) == 0; n++) {
        bool flag = false;
        for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
            const bool named = strcmp(argv[n], flags[f].name) == 0;
            *flags[f].is = *flags[f].is || named;
            flag = flag || named;
        }
        if (flag || n + 1 == argc) {
            continue;
        }
        const long value = atol(argv[n + 1]);
        gpus = strcmp(argv[n], "--gpus") == 0 ? (int)value : gpus;
        heads = strcmp(argv[n], "--heads") == 0 ? value : heads;
        kv_heads = strcmp(argv[n], "--kv-heads") == 0 ? value : kv_heads;
        turns = strcmp(argv[n], "--turns") == 0 ? value : turns;
        repeat = strcmp(argv[n], "--repeat") == 0 ? (int)value : repeat;
        memory = strcmp(argv[n], "--memory") == 0 ? atof(argv[n + 1]) : memory;
        n++;
    }
    if (n == argc || (cpu && by_nccl) || exchange + automatic + decode > 1 || gpus < 1 ||
        gpus > GPUS_MAX || repeat < 1 || repeat > REPEAT_MAX) {
        fprintf(
            stderr,
            "usage: ranks [--nccl] [--gpus N] [--heads N] [--kv-heads N] [--backward] [--parts] "
            "[--decode] [--exchange | --auto] [--turns N] [--saves] [--pair] [--cpu] [--repeat N] "
            "[--memory GB] LENGTH ...\n");
        return 2;
    }
    open_all(ranks);
    printf("%s, bf16, %ld heads, %ld of keys, d %d, %s\n",
           decode     ? "decoding"
           : backward ? "causal, forward and backward"
                      : "causal, forward",
           heads, kv_heads, DIM,
           decode      ? "a reduction"
           : exchange  ? "heads exchanged"
           : automatic ? "schemes chosen"
                       : "a ring");
    for (; n < argc; n++) {
        measure(ranks, atol(argv[n]));
    }
    return 0;
}
