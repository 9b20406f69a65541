/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measures how the time of decoding depends on the number of keys; prints tab-separated lines.
 *
 *     lengths plan [DEVICE]    runs of a plan for 131072 keys with fewer keys, compared with plans
 *                              for exactly that many
 *     lengths short            up to 256 keys, compared with a plain loop, on one CPU thread: warm,
 *                              and cold, with 16 MB read before each call
 *
 * One query token; 32 query heads on 8 key heads, or 8 on 2 for `short`. Contenders take turns, and
 * times are lower quartiles. On a CPU the clock is the thread's. On a GPU with CUDA's driver a
 * graph of runs is timed, so that no launch waits for the host; on others as many runs in a row.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fattn/fattn.h"
#include "plain_decode.h"
#include "times.h"

enum { LONGEST = 131072, TURNS = 301, WALK = 16 << 20 };

static void must(int failed)
{
    if (failed) {
        fprintf(stderr, "lengths: %s\n", fattn_last_reason());
        exit(1);
    }
}

/* --- CUDA graphs ------------------------------------------------------------------------------ */

static struct {
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*make)(void **exec, void *graph, unsigned long long flags);
    int (*launch)(void *exec, void *stream);
} cuda;

static void open_cuda(void)
{
    int (*init)(unsigned) = NULL, (*retain)(void **, int) = NULL, (*set)(void *) = NULL;
    void *context = NULL, *const library = dlopen("libcuda.so.1", RTLD_NOW);
    const struct {
        const char *name;
        void *at;
    } symbols[] = {{"cuStreamBeginCapture_v2", &cuda.begin},
                   {"cuStreamEndCapture", &cuda.end},
                   {"cuGraphInstantiateWithFlags", &cuda.make},
                   {"cuGraphLaunch", &cuda.launch},
                   {"cuInit", &init},
                   {"cuDevicePrimaryCtxRetain", &retain},
                   {"cuCtxSetCurrent", &set}};
    for (size_t n = 0; n < sizeof symbols / sizeof symbols[0]; n++) {
        void *const found = library ? dlsym(library, symbols[n].name) : NULL;
        if (!found) {
            cuda.begin = NULL;
            return;
        }
        memcpy(symbols[n].at, &found, sizeof found);
    }
    if (init(0) || retain(&context, 0) || set(context)) {
        cuda.begin = NULL;
    }
}

/* --- Runs ------------------------------------------------------------------------------------- */

typedef struct contender {
    fattn_plan *plan; /* NULL: the plain loop */
    fattn_plan_info info;
    fattn_buffers buffers;
    void *workspace, *graph;
    plain loop;
} contender;

static fattn_device *device;
static fattn_device_info machine;
static fattn_stream stream;

static void *put(const void *from, size_t bytes)
{
    void *memory = NULL;
    must(fattn_device_malloc(device, bytes, &memory));
    must(fattn_device_copy(device, memory, from, bytes, NULL));
    return memory;
}

static void run(const contender *c)
{
    if (c->plan) {
        must(fattn_execute(c->plan, &c->buffers, c->workspace, stream));
    } else {
        plain_decode(&c->loop);
    }
}

static void run_often(const contender *c, int runs)
{
    for (int n = 0; n < runs; n++) {
        run(c);
    }
}

static void record(contender *c, int runs)
{
    void *graph = NULL;
    run(c);
    must(fattn_stream_synchronize(device, stream));
    if (cuda.begin && cuda.begin(stream, 2) == 0) {
        run_often(c, runs);
        if (cuda.end(stream, &graph) || cuda.make(&c->graph, graph, 0)) {
            c->graph = NULL;
        }
    }
}

static char *walked;

/* Nanoseconds of a run. */
static double time_host(const contender *c, int runs, int cold)
{
    for (int n = 0; cold && n < WALK; n += 64) {
        walked[n]++;
    }
    const double begin = times_of(CLOCK_THREAD_CPUTIME_ID);
    run_often(c, runs);
    return 1e9 * (times_of(CLOCK_THREAD_CPUTIME_ID) - begin) / runs;
}

static double time_device(const contender *c, int runs)
{
    static fattn_event *begin, *end;
    double milliseconds = 0;
    if (!begin) {
        must(fattn_event_create(device, &begin) || fattn_event_create(device, &end));
    }
    must(fattn_event_record(begin, stream));
    if (!c->graph) {
        run_often(c, runs);
    } else if (cuda.launch(c->graph, stream)) {
        exit(1);
    }
    must(fattn_event_record(end, stream) || fattn_event_elapsed(begin, end, &milliseconds));
    return milliseconds * 1e6 / runs;
}

/* Times of two contenders in turn, in nanoseconds. */
static void compare(contender *two, int runs, int turns, int cold, double *times)
{
    static double all[2][TURNS];
    for (int c = 0; c < 2; c++) {
        if (!machine.host_memory) {
            record(&two[c], runs);
        }
    }
    for (int t = 0; t < turns; t++) {
        for (int c = 0; c < 2; c++) {
            all[c][t] =
                machine.host_memory ? time_host(&two[c], runs, cold) : time_device(&two[c], runs);
        }
    }
    for (int c = 0; c < 2; c++) {
        times_sort(all[c], turns);
        times[c] = all[c][turns / 4];
    }
}

/* --- Problems --------------------------------------------------------------------------------- */

static fattn_problem problem_of(int64_t hq, int64_t hk, int64_t keys, int64_t dim,
                                fattn_dtype dtype, fattn_strides k)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = FATTN_FORWARD;
    p.dtype = dtype;
    p.heads_q = hq, p.heads_k = hk;
    p.seqlen_q = 1, p.seqlen_k = keys;
    p.dim = p.dim_v = dim;
    p.layout = FATTN_STRIDED;
    p.q = p.o = (fattn_strides){hq * dim, hq * dim, dim};
    p.k = p.v = k;
    return p;
}

static void plan_for(contender *c, const fattn_problem *p)
{
    memset(&c->info, 0, sizeof c->info);
    c->info.struct_size = sizeof c->info;
    must(fattn_plan_create(device, p, &c->plan));
    must(fattn_plan_get_info(c->plan, &c->info));
    must(fattn_device_malloc(device, (size_t)c->info.workspace_bytes, &c->workspace));
}

static void drop(contender *c)
{
    fattn_plan_destroy(c->plan);
    must(fattn_device_free(device, c->workspace));
}

/* Random numbers of dtype in -1 .. 1; bf16 has the upper bits of f32. */
static void *draw(size_t count, fattn_dtype dtype)
{
    const size_t size = dtype == FATTN_F32 ? 4 : 2;
    char *const numbers = malloc(count * size);
    uint32_t state = 1;
    for (size_t n = 0; numbers && n < count; n++) {
        state = state * 1664525 + 1013904223;
        const float x = (float)(int32_t)state * 0x1p-31f;
        memcpy(numbers + n * size, (const char *)&x + 4 - size, size);
    }
    if (!numbers) {
        exit(1);
    }
    return numbers;
}

static void plans(fattn_dtype dtype)
{
    enum { HQ = 32, HK = 8, D = 128 };
    const size_t size = dtype == FATTN_F32 ? 4 : 2, count = (size_t)LONGEST * HK * D;
    void *const numbers = draw(count, dtype);
    const fattn_strides rows = {(int64_t)count, D, (int64_t)LONGEST * D};
    contender two[2] = {{0}};
    fattn_buffers b;
    fattn_buffers_init(&b);
    void *const o = put(numbers, HQ * D * size), *const k = put(numbers, count * size);
    void *const v = put(numbers, count * size), *const q = put(numbers, HQ * D * size);
    b.q = q, b.k = k, b.v = v, b.o = o;
    for (int32_t keys = 32; keys <= LONGEST; keys *= 2) {
        double times[2];
        int32_t *const used = put(&keys, sizeof keys);
        b.seqused_k = used;
        for (int c = 0; c < 2; c++) {
            fattn_problem p = problem_of(HQ, HK, c ? LONGEST : keys, D, dtype, rows);
            p.features = FATTN_SEQUSED_K;
            two[c] = (contender){.buffers = b};
            plan_for(&two[c], &p);
        }
        const int runs = machine.host_memory ? 4096 / keys + 1 : keys < 8192 ? 40 : 10;
        compare(two, runs, machine.host_memory ? 51 : 81, 0, times);
        printf("%s\t%d\t%s\t%lld\t%.2f\t%s\t%lld\t%.2f\t%.3f\n", size == 4 ? "f32" : "bf16",
               (int)keys, two[0].info.kernel, (long long)two[0].info.splits, times[0] / 1e3,
               two[1].info.kernel, (long long)two[1].info.splits, times[1] / 1e3,
               times[1] / times[0]);
        fflush(stdout);
        drop(&two[0]);
        drop(&two[1]);
        must(fattn_device_free(device, used));
    }
    void *const all[] = {q, k, v, o};
    for (int n = 0; n < 4; n++) {
        must(fattn_device_free(device, all[n]));
    }
    free(numbers);
}

static void short_contexts(int cold)
{
    enum { HQ = 8, HK = 2 };
    static const int lengths[] = {16, 32, 48, 64, 96, 128, 192, 256};
    float *const numbers = draw(3 * 256 * HK * 128, FATTN_F32), o[2][HQ * 128];
    walked = calloc(WALK, 1);
    for (int dim = 64; dim <= 128; dim *= 2) {
        for (size_t n = 0; walked && n < sizeof lengths / sizeof lengths[0]; n++) {
            const int keys = lengths[n];
            const int64_t head = (int64_t)keys * dim;
            contender two[2] = {{0}};
            double times[2];
            fattn_problem p =
                problem_of(HQ, HK, keys, dim, FATTN_F32, (fattn_strides){HK * head, dim, head});
            fattn_buffers *const b = &two[1].buffers;
            plan_for(&two[1], &p);
            fattn_buffers_init(b);
            b->q = numbers, b->k = numbers + 65536, b->v = numbers + 131072, b->o = o[1];
            two[0].loop = (plain){
                HQ, HK, keys, dim, b->q, b->k, b->v, head, dim, o[0], 1 / sqrtf((float)dim)};
            compare(two, cold ? 1 : 20, TURNS, cold, times);
            double error = 0;
            for (int c = 0; c < HQ * dim; c++) {
                error = fmax(error, fabs((double)o[0][c] - (double)o[1][c]));
            }
            printf("%s\t%d\t%d\t%s\t%.0f\t%.0f\t%.2f\t%.0e\n", cold ? "cold" : "warm", dim, keys,
                   two[1].info.kernel, times[0], times[1], times[1] / times[0], error);
            drop(&two[1]);
        }
    }
    free(walked);
    free(numbers);
}

int main(int argc, char **argv)
{
    const int few = argc > 1 && strcmp(argv[1], "short") == 0;
    machine.struct_size = sizeof machine;
    if (few) {
        must(setenv("FATTN_NUM_THREADS", "1", 1));
    }
    must(fattn_device_open(few ? "cpu" : argc > 2 ? argv[2] : NULL, &device));
    must(fattn_device_get_info(device, &machine));
    printf("# %s %s\n", machine.backend, machine.name);
    if (few) {
        printf("cache\tD\tkeys\tkernel\tplain ns\tns\tratio\tdifference\n");
        short_contexts(0);
        short_contexts(1);
    } else {
        must(fattn_stream_create(device, &stream));
        if (strcmp(machine.backend, "cuda") == 0) {
            open_cuda();
        }
        printf("dtype\tkeys\tkernel\tparts\tus\tkernel for %d\tparts\tus\tratio\n", (int)LONGEST);
        plans(FATTN_BF16);
        plans(FATTN_F32);
        must(fattn_stream_destroy(device, stream));
    }
    fattn_device_close(device);
    return 0;
}
