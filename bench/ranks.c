/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention divided over the GPUs of one machine by NCCL, beside one of them: bf16, d 128,
 * zigzag, a ring. Run by hand:
 *
 *     ranks [--gpus 2] [--heads 32] [--kv-heads 32] [--backward] [--repeat 5] LENGTH ...
 *
 * A line for each length: milliseconds of one GPU and of all, and their efficiency, which is the
 * time of one GPU over the time of all times their number. Each line is checked first: o, and in
 * backward dq, dk and dv, against those of one GPU.
 */
#define _POSIX_C_SOURCE 200809L
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <fattn/nccl.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { GPUS_MAX = 8, DIM = 128, TENSORS = 8, PERIOD = 251 };
enum { Q, K, V, O, DOUT, DQ, DK, DV };

static const char *const names[TENSORS] = {"q", "k", "v", "o", "dout", "dq", "dk", "dv"};

/* --- What is asked for ------------------------------------------------------------------------ */

static int gpus = 2, repeat = 5;
static long heads = 32, kv_heads = 32;
static bool backward;

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

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* --- Tensors ---------------------------------------------------------------------------------- */

/* Of one GPU: (rows, heads, DIM), bf16. */
typedef struct tensors {
    fattn_device *device;
    fattn_stream stream;
    void *at[TENSORS];
    void *lse;
    long rows;
} tensors;

static bool has_keys(int t) { return t == K || t == V || t == DK || t == DV; }

static size_t row_bytes(int t) { return (size_t)(has_keys(t) ? kv_heads : heads) * DIM * 2; }

static void make_tensors(tensors *x, long rows)
{
    x->rows = rows;
    for (int t = 0; t < (backward ? TENSORS : DOUT); t++) {
        must(fattn_device_malloc(x->device, (size_t)rows * row_bytes(t), &x->at[t]), names[t]);
    }
    must(fattn_device_malloc(x->device, (size_t)(rows * heads) * 4, &x->lse), "lse");
}

static void free_tensors(tensors *x)
{
    for (int t = 0; t < TENSORS; t++) {
        fattn_device_free(x->device, x->at[t]);
        x->at[t] = NULL;
    }
    fattn_device_free(x->device, x->lse);
}

/* About normal numbers, the same on every GPU. */
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

/* Rows first .. first + count - 1 of the whole tensor, at row `at` of the GPU's. They repeat after
 * PERIOD, so that long tensors are filled soon; a prime, which divides no share. */
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
    p.features = FATTN_CAUSAL;
    p.heads_q = heads, p.heads_k = kv_heads;
    p.seqlen_q = p.seqlen_k = length;
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

/* --- One GPU ---------------------------------------------------------------------------------- */

/* Best milliseconds of a step; the results stay in x. */
static double run_one(tensors *x, long length)
{
    const fattn_buffers b = buffers_of(x);
    fattn_plan *plans[2] = {NULL, NULL};
    double best = INFINITY;
    for (int op = 0; op < 1 + backward; op++) {
        const fattn_problem p = problem_of(length, op ? FATTN_BACKWARD : FATTN_FORWARD);
        must(fattn_plan_create(x->device, &p, &plans[op]), "a plan");
    }
    for (int n = 0; n <= repeat; n++) {
        const double begin = now();
        for (int op = 0; op < 1 + backward; op++) {
            must(fattn_execute(plans[op], &b, NULL, x->stream), "a run");
        }
        must(fattn_stream_synchronize(x->device, x->stream), "a run");
        best = n && now() - begin < best ? now() - begin : best; /* the first warms up */
    }
    fattn_plan_destroy(plans[0]);
    fattn_plan_destroy(plans[1]);
    return best * 1e3;
}

/* --- All of them ------------------------------------------------------------------------------ */

typedef struct rank {
    pthread_t thread;
    int number;
    long length;
    ncclComm_t comm;
    tensors x;
    double best;
    int64_t bytes;
} rank;

static pthread_barrier_t barrier;

static void *run_rank(void *context)
{
    rank *const r = context;
    fattn_transport *transport;
    fattn_group group;
    fattn_group_plan *plans[2] = {NULL, NULL};
    must_cuda(cudaSetDevice(r->number), "cudaSetDevice");
    must(fattn_nccl_open(r->comm, r->x.stream, &transport), "a transport");
    fattn_group_init(&group);
    group.transport = transport;
    group.device = r->x.device;
    group.split = FATTN_SPLIT_ZIGZAG;
    for (int op = 0; op < 1 + backward; op++) {
        const fattn_problem p = problem_of(r->length, op ? FATTN_BACKWARD : FATTN_FORWARD);
        must(fattn_group_plan_create(&group, &p, NULL, NULL, &plans[op]), "a plan of a group");
        r->bytes += fattn_group_plan_bytes(plans[op]);
    }
    const fattn_buffers b = buffers_of(&r->x);
    r->best = INFINITY;
    for (int n = 0; n <= repeat; n++) {
        pthread_barrier_wait(&barrier);
        const double begin = now();
        for (int op = 0; op < 1 + backward; op++) {
            must(fattn_group_execute(plans[op], &b), "a run of a group");
        }
        must(fattn_stream_synchronize(r->x.device, r->x.stream), "a run of a group");
        pthread_barrier_wait(&barrier); /* the time of the slowest */
        r->best = n && now() - begin < r->best ? now() - begin : r->best;
    }
    fattn_group_plan_destroy(plans[0]);
    fattn_group_plan_destroy(plans[1]);
    fattn_nccl_close(transport);
    return NULL;
}

static void run_ranks(rank *ranks, long length)
{
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

/* The largest difference of results over the largest value, a sample of rows of each run. */
static double difference(const tensors *one, const rank *ranks, long length)
{
    double most = 0, worst = 0;
    for (int t = O; t < (backward ? TENSORS : O + 1); t++) {
        double error = 0, largest = 0;
        for (int r = 0; r < gpus && t != DOUT; r++) {
            long at = 0;
            for (int n = 0; n < 2; n++) {
                fattn_run run;
                must(fattn_split_get_run(FATTN_SPLIT_ZIGZAG, length, gpus, r, n, &run), "a share");
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

/* --- The act ---------------------------------------------------------------------------------- */

static void open_all(rank *ranks)
{
    void *const library = dlopen("libnccl.so.2", RTLD_NOW);
    ncclResult_t (*init)(ncclComm_t *, int, const int *) = NULL;
    void *const found = library ? dlsym(library, "ncclCommInitAll") : NULL;
    ncclComm_t comms[GPUS_MAX];
    if (!found) {
        fprintf(stderr, "ranks: %s\n", dlerror());
        exit(1);
    }
    memcpy(&init, &found, sizeof init);
    if (init(comms, gpus, NULL) != ncclSuccess) {
        fprintf(stderr, "ranks: ncclCommInitAll failed\n");
        exit(1);
    }
    for (int r = 0; r < gpus; r++) {
        char name[16];
        snprintf(name, sizeof name, "cuda:%d", r);
        ranks[r].number = r;
        ranks[r].comm = comms[r];
        must(fattn_device_open(name, &ranks[r].x.device), name);
        must(fattn_stream_create(ranks[r].x.device, &ranks[r].x.stream), "a stream");
    }
}

static void measure(rank *ranks, long length)
{
    tensors one = {.device = ranks[0].x.device, .stream = ranks[0].x.stream};
    make_tensors(&one, length);
    for (int t = 0; t < (backward ? DQ : O); t++) {
        if (t != O) {
            put_rows(&one, t, 0, 0, length);
        }
    }
    for (int r = 0; r < gpus; r++) {
        long rows = 0;
        fattn_run runs[2];
        for (int n = 0; n < 2; n++) {
            must(fattn_split_get_run(FATTN_SPLIT_ZIGZAG, length, gpus, r, n, &runs[n]), "a share");
            rows += (long)runs[n].count;
        }
        make_tensors(&ranks[r].x, rows);
        for (int t = 0; t < (backward ? DQ : O); t++) {
            if (t != O) {
                put_rows(&ranks[r].x, t, 0, (long)runs[0].first, (long)runs[0].count);
                put_rows(&ranks[r].x, t, (long)runs[0].count, (long)runs[1].first,
                         (long)runs[1].count);
            }
        }
    }
    const double alone = run_one(&one, length);
    run_ranks(ranks, length);
    const double off = difference(&one, ranks, length);
    printf("%8ld  one %10.3f ms  %d GPUs %10.3f ms  efficiency %.4f  off by %.2e  plan %.2f GB%s\n",
           length, alone, gpus, ranks[0].best * 1e3, alone / (gpus * ranks[0].best * 1e3), off,
           (double)ranks[0].bytes * 1e-9, off < 0.02 ? "" : "  WRONG");
    fflush(stdout);
    free_tensors(&one);
    for (int r = 0; r < gpus; r++) {
        free_tensors(&ranks[r].x);
    }
    fattn_cache_clear();
}

int main(int argc, char **argv)
{
    static rank ranks[GPUS_MAX];
    int n = 1;
    for (; n < argc && strncmp(argv[n], "--", 2) == 0; n++) {
        backward = backward || strcmp(argv[n], "--backward") == 0;
        if (strcmp(argv[n], "--backward") == 0 || n + 1 == argc) {
            continue;
        }
        const long value = atol(argv[n + 1]);
        gpus = strcmp(argv[n], "--gpus") == 0 ? (int)value : gpus;
        heads = strcmp(argv[n], "--heads") == 0 ? value : heads;
        kv_heads = strcmp(argv[n], "--kv-heads") == 0 ? value : kv_heads;
        repeat = strcmp(argv[n], "--repeat") == 0 ? (int)value : repeat;
        n++;
    }
    if (n == argc || gpus < 1 || gpus > GPUS_MAX) {
        fprintf(stderr, "usage: ranks [--gpus N] [--heads N] [--kv-heads N] [--backward] "
                        "[--repeat N] LENGTH ...\n");
        return 2;
    }
    pthread_barrier_init(&barrier, NULL, (unsigned)gpus);
    open_all(ranks);
    printf("%s, bf16, %ld heads, %ld of keys, d %d, causal\n",
           backward ? "forward and backward" : "forward", heads, kv_heads, DIM);
    for (; n < argc; n++) {
        measure(ranks, atol(argv[n]));
    }
    return 0;
}
