/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares sources of threads. Problems run on one thread, on the library's threads, on OpenMP's
 * and on a caller's pool, in blocks that take turns. Then a prefill runs next to threads of another
 * runtime, as many as it has itself, which spin for 50 ms after their work; it is compared with the
 * same prefill in static shares.
 *
 * usage: threads [N]      N threads, 2 or more; as many as processors otherwise
 */
#define _GNU_SOURCE /* sched_getaffinity */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fattn/fattn.h>

#include "times.h"

/* Blocks of consecutive runs, and the runs before each that are not counted. A block has RUNS runs,
 * or fewer that take SECONDS. */
enum { THREADS_MAX = 256, TURNS = 40, BLOCKS = 7, RUNS = 200, WARM = 20 };
#define SECONDS 0.1

static void relax(void)
{
#if defined(__x86_64__)
    __asm__ volatile("pause");
#endif
}

static void demand(fattn_status status)
{
    if (status) {
        fprintf(stderr, "threads: %s\n", fattn_last_reason());
        exit(1);
    }
}

/* --- A caller's pool -------------------------------------------------------------------------- */

/* Threads that each call a function once per round, and poll for the next round for `spin` seconds
 * before they sleep. */
typedef struct pool {
    pthread_mutex_t mutex;
    pthread_cond_t round;
    atomic_int rounds, left, sleepers;
    int threads; /* including the caller if it takes part */
    bool caller; /* the caller takes part */
    double spin;
    void (*body)(void *context, int64_t i);
    void *context;
    int64_t count;
} pool;

typedef struct member {
    pool *of;
    int64_t number;
} member;

static void work_share(pool *p, int64_t number)
{
    for (int64_t i = number; i < p->count; i += p->threads) {
        p->body(p->context, i);
    }
}

static void *be_member(void *argument)
{
    member *const m = argument;
    pool *const p = m->of;
    for (int seen = 0;;) {
        const double until = times_now() + p->spin;
        while (atomic_load(&p->rounds) == seen && times_now() < until) {
            relax();
        }
        if (atomic_load(&p->rounds) == seen) {
            pthread_mutex_lock(&p->mutex);
            atomic_fetch_add(&p->sleepers, 1);
            while (atomic_load(&p->rounds) == seen) {
                pthread_cond_wait(&p->round, &p->mutex);
            }
            atomic_fetch_sub(&p->sleepers, 1);
            pthread_mutex_unlock(&p->mutex);
        }
        seen++;
        work_share(p, m->number);
        atomic_fetch_sub(&p->left, 1);
    }
    return NULL;
}

static void pool_make(pool *p, int threads, bool caller, double spin)
{
    static member members[4 * THREADS_MAX];
    static int used;
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->round, NULL);
    p->threads = threads;
    p->caller = caller;
    p->spin = spin;
    for (int n = caller; n < threads; n++) {
        pthread_t thread;
        member *const m = &members[used++];
        *m = (member){p, n};
        if (pthread_create(&thread, NULL, be_member, m) != 0) {
            exit(1);
        }
    }
}

static void pool_run(void *of, int64_t count, void (*body)(void *context, int64_t i), void *context)
{
    pool *const p = of;
    p->body = body;
    p->context = context;
    p->count = count;
    atomic_store(&p->left, p->threads - p->caller);
    atomic_fetch_add(&p->rounds, 1);
    if (atomic_load(&p->sleepers)) {
        pthread_mutex_lock(&p->mutex);
        pthread_mutex_unlock(&p->mutex);
        pthread_cond_broadcast(&p->round);
    }
    if (p->caller) {
        work_share(p, 0);
    }
    const double until = times_now() + 20e-6;
    while (atomic_load(&p->left)) {
        if (times_now() < until) {
            relax();
        } else {
            sched_yield();
        }
    }
}

/* --- Problems --------------------------------------------------------------------------------- */

typedef struct shape {
    const char *name;
    fattn_op op;
    int64_t heads, rows, keys;
    uint64_t features;
} shape;

static const shape shapes[] = {
    {"decode 16", FATTN_FORWARD, 8, 1, 16, 0},
    {"decode 64", FATTN_FORWARD, 8, 1, 64, 0},
    {"decode 256", FATTN_FORWARD, 8, 1, 256, 0},
    {"decode 1k", FATTN_FORWARD, 8, 1, 1024, 0},
    {"decode 4k", FATTN_FORWARD, 8, 1, 4096, 0},
    {"forward 16", FATTN_FORWARD, 8, 16, 16, 0},
    {"forward 32", FATTN_FORWARD, 8, 32, 32, 0},
    {"forward 64", FATTN_FORWARD, 8, 64, 64, 0},
    {"forward 128", FATTN_FORWARD, 8, 128, 128, 0},
    {"forward 512", FATTN_FORWARD, 8, 512, 512, 0},
    {"causal 1k", FATTN_FORWARD, 16, 1024, 1024, FATTN_CAUSAL},
    {"backward 32", FATTN_BACKWARD, 8, 32, 32, 0},
    {"backward 128", FATTN_BACKWARD, 8, 128, 128, 0},
    {"backward 512", FATTN_BACKWARD, 8, 512, 512, FATTN_CAUSAL},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0], DIM = 64 };

typedef struct job {
    fattn_plan *plan;
    fattn_buffers buffers;
    void *workspace;
} job;

static float *memory; /* nine tensors of `tensor` floats */
static size_t tensor;

/* Heads first .. first + heads - 1 of a shape. */
static job job_make(fattn_device *device, const shape *s, int64_t first, int64_t heads)
{
    job j;
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = s->op;
    p.layout = FATTN_BHSD;
    p.heads_q = p.heads_k = heads;
    p.seqlen_q = s->rows;
    p.seqlen_k = s->keys;
    p.dim = p.dim_v = DIM;
    p.features = s->features;
    demand(fattn_plan_create(device, &p, &j.plan));
    fattn_plan_info info = {.struct_size = sizeof info};
    demand(fattn_plan_get_info(j.plan, &info));
    demand(fattn_device_malloc(device, (size_t)info.workspace_bytes, &j.workspace));
    float *const q = memory + first * s->rows * DIM, *const k = memory + first * s->keys * DIM;
    fattn_buffers_init(&j.buffers);
    j.buffers.q = q;
    j.buffers.k = k + tensor;
    j.buffers.v = k + 2 * tensor;
    j.buffers.o = q + 3 * tensor;
    if (s->op == FATTN_BACKWARD) {
        j.buffers.lse = memory + 4 * tensor + first * s->rows;
        j.buffers.dout = q + 5 * tensor;
        j.buffers.dq = q + 6 * tensor;
        j.buffers.dk = k + 7 * tensor;
        j.buffers.dv = k + 8 * tensor;
    }
    return j;
}

static void job_run(const job *j)
{
    demand(fattn_execute(j->plan, &j->buffers, j->workspace, NULL));
}

static void job_free(fattn_device *device, job *j)
{
    fattn_plan_destroy(j->plan);
    demand(fattn_device_free(device, j->workspace));
}

/* --- Engines in turn -------------------------------------------------------------------------- */

enum { ALONE, OWN, OPENMP, CALLERS, ENGINES };
static const char *const engine_names[] = {"1 thread", "own", "OpenMP", "caller's"};
static fattn_device *devices[ENGINES]; /* NULL: not in this build */

static void open_devices(int threads, pool *callers)
{
    for (int e = 0; e < ENGINES; e++) {
        fattn_device_options options;
        fattn_device_options_init(&options);
        options.threads = e == ALONE ? 1 : threads;
        options.engine = e == OPENMP ? FATTN_ENGINE_OPENMP : FATTN_ENGINE_DEFAULT;
        options.parallel_for = e == CALLERS ? pool_run : NULL;
        options.parallel_user = e == CALLERS ? callers : NULL;
        const fattn_status status = fattn_device_open_with("cpu", &options, &devices[e]);
        if (status != FATTN_UNSUPPORTED) {
            demand(status);
        }
    }
}

/* Waits until no thread of the process spins: OpenMP's do so for milliseconds after their work, and
 * would take a processor from the next engine. */
static void settle(void)
{
    double used;
    do {
        used = times_of(CLOCK_PROCESS_CPUTIME_ID);
        usleep(10000);
        used = times_of(CLOCK_PROCESS_CPUTIME_ID) - used;
    } while (used > 1e-3);
}

/* Median seconds of consecutive runs, as in a program's loop. */
static double time_block(const job *j, double *least)
{
    double times[RUNS];
    int runs = 0;
    settle();
    for (int run = 0; run < WARM; run++) {
        job_run(j);
    }
    for (double until = times_now() + SECONDS; runs < RUNS && (runs < 3 || times_now() < until);
         runs++) {
        const double start = times_now();
        job_run(j);
        times[runs] = times_now() - start;
    }
    const double middle = times_median(times, runs);
    *least = times[0] < *least ? times[0] : *least;
    return middle;
}

static void compare_engines(void)
{
    printf("microseconds: the least of all runs, and the median of %d medians of up to %d\n%-14s",
           BLOCKS, RUNS, "");
    for (int e = 0; e < ENGINES; e++) {
        printf("%20s", engine_names[e]);
    }
    printf("\n");
    for (int s = 0; s < SHAPES; s++) {
        double medians[ENGINES][BLOCKS], least[ENGINES];
        job jobs[ENGINES];
        for (int e = 0; e < ENGINES; e++) {
            least[e] = 1e9;
            if (devices[e]) {
                jobs[e] = job_make(devices[e], &shapes[s], 0, shapes[s].heads);
            }
        }
        for (int block = 0; block < BLOCKS; block++) {
            for (int e = 0; e < ENGINES; e++) {
                if (devices[e]) {
                    medians[e][block] = time_block(&jobs[e], &least[e]);
                }
            }
        }
        printf("%-14s", shapes[s].name);
        for (int e = 0; e < ENGINES; e++) {
            if (devices[e]) {
                printf("%10.2f%10.2f", 1e6 * least[e], 1e6 * times_median(medians[e], BLOCKS));
                job_free(devices[e], &jobs[e]);
            } else {
                printf("%20s", "-");
            }
        }
        printf("\n");
        fflush(stdout);
    }
}

/* --- Next to other threads -------------------------------------------------------------------- */

static void work_a_little(void *context, int64_t i)
{
    (void)context, (void)i;
    for (double until = times_now() + 50e-6; times_now() < until;) {}
}

static void run_job(void *jobs, int64_t i) { job_run((const job *)jobs + i); }

/* Median seconds of a prefill by engine e, or in static shares if e is ENGINES. others: threads
 * that work just before it and then spin. */
static double time_prefill(int e, pool *others, pool *shares, const job *jobs)
{
    double times[TURNS];
    for (int turn = 0; turn < TURNS; turn++) {
        usleep(60000); /* all threads have stopped spinning */
        if (others) {
            pool_run(others, others->threads, work_a_little, NULL);
        }
        const double start = times_now();
        if (e == ENGINES) {
            pool_run(shares, shares->threads, run_job, (void *)(uintptr_t)jobs);
        } else {
            job_run(jobs);
        }
        times[turn] = times_now() - start;
    }
    return times_median(times, TURNS);
}

static void compare_beside(int threads)
{
    static pool others, shares;
    static job cut[THREADS_MAX];
    const shape s = {"causal 1k", FATTN_FORWARD, threads, 1024, 1024, FATTN_CAUSAL};
    pool_make(&others, threads, false, 50e-3);
    pool_make(&shares, threads, true, 30e-6);
    for (int n = 0; n < threads; n++) {
        cut[n] = job_make(devices[ALONE], &s, n, 1);
    }
    printf("\nprefill of 1k, %d heads: milliseconds alone, beside %d threads that spin, and the "
           "ratio\n",
           threads, threads);
    for (int e = OWN; e <= ENGINES; e++) {
        if (e < ENGINES && !devices[e]) {
            continue;
        }
        job whole = e < ENGINES ? job_make(devices[e], &s, 0, threads) : cut[0];
        const job *const jobs = e < ENGINES ? &whole : cut;
        const double alone = time_prefill(e, NULL, &shares, jobs);
        const double beside = time_prefill(e, &others, &shares, jobs);
        printf("%-14s%10.2f%10.2f%10.2f\n", e < ENGINES ? engine_names[e] : "static shares",
               1e3 * alone, 1e3 * beside, beside / alone);
        if (e < ENGINES) {
            job_free(devices[e], &whole);
        }
    }
    for (int n = 0; n < threads; n++) {
        job_free(devices[ALONE], &cut[n]);
    }
}

int main(int argc, char **argv)
{
    static pool callers;
    cpu_set_t set;
    const int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 2;
    const int threads = argc > 1 ? atoi(argv[1]) : processors < 2 ? 2 : processors;
    if (threads < 2 || threads > THREADS_MAX) {
        fprintf(stderr, "usage: threads [N], N from 2 to %d\n", THREADS_MAX);
        return 1;
    }
    const int64_t heads = threads > 16 ? threads : 16;
    tensor = (size_t)(heads * 4096 * DIM);
    memory = calloc(9 * tensor, sizeof *memory);
    if (!memory) {
        return 1;
    }
    for (size_t i = 0; i < 3 * tensor; i++) {
        memory[i] = (float)(i * 7919 % 1000) / 1000 - 0.5f;
    }
    pool_make(&callers, threads, true, 30e-6);
    open_devices(threads, &callers);
    compare_engines();
    compare_beside(threads);
    for (int e = 0; e < ENGINES; e++) {
        fattn_device_close(devices[e]);
    }
    free(memory);
    return 0;
}
