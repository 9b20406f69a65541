/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The caller's streams, threads and graphs on NVIDIA's driver and a GPU. Kernels split keys, so two
 * calls that share a workspace give wrong numbers: one-shot calls from several streams and threads,
 * under capture and beside its replays; and consecutive decodes, each of which reads the output of
 * the previous one. (stub/ tests the rules; this program tests the races.)
 */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/backend.h"
#include "tests/device_memory.h"
#include "tests/driver.h"
#include "tests/tap.h"

enum { HEADS = 8, KEYS = 1 << 17, DIM = 128, ROW = HEADS * DIM, LANES = 8 };
enum { O_BYTES = ROW * 2, K_BYTES = KEYS * DIM * 2 };

static const driver *cuda;
static fattn_device *device;
static fattn_problem problem;
static fattn_buffers buffers[LANES];  /* one k and v; q and o of each lane */
static uint16_t expected[LANES][ROW]; /* expected o of each lane */
static fattn_stream none;

static void poison(void *to)
{
    uint16_t nans[ROW];
    memset(nans, 0xff, sizeof nans);
    device_copy(device, to, nans, sizeof nans);
}

static bool is_expected(int lane)
{
    uint16_t got[ROW];
    device_copy(device, got, buffers[lane].o, sizeof got);
    return memcmp(got, expected[lane], sizeof got) == 0;
}

static void set_up(void)
{
    void *const k = device_memory(device, K_BYTES), *const v = device_memory(device, K_BYTES);
    fattn_plan *plan = NULL;
    fattn_plan_info info = {.struct_size = sizeof info};
    fattn_problem_init(&problem);
    problem.dtype = problem.dtype_o = FATTN_F16;
    problem.batch = 1, problem.heads_q = HEADS, problem.heads_k = 1;
    problem.seqlen_q = 1, problem.seqlen_k = KEYS, problem.dim = problem.dim_v = DIM;
    device_fill(device, k, KEYS * DIM, 1), device_fill(device, v, KEYS * DIM, 2);
    device_good(fattn_plan_create(device, &problem, &plan), "a plan");
    device_good(fattn_plan_get_info(plan, &info), "a plan");
    tap_check(info.splits > 1 && info.workspace_bytes > 0, "%s, %d splits", info.kernel,
              (int)info.splits);
    for (int lane = 0; lane < LANES; lane++) {
        fattn_buffers_init(&buffers[lane]);
        buffers[lane].q = device_memory(device, O_BYTES),
        buffers[lane].o = device_memory(device, O_BYTES);
        buffers[lane].k = k, buffers[lane].v = v;
        device_fill(device, (void *)buffers[lane].q, ROW, 10 + (uint32_t)lane);
        device_good(fattn_execute(plan, &buffers[lane], NULL, none), "a run");
        device_copy(device, expected[lane], buffers[lane].o, O_BYTES);
    }
    tap_check(memcmp(expected[0], expected[1], O_BYTES) != 0, "lanes differ");
    fattn_plan_destroy(plan);
}

/* What functions say of the code that runs: PTX that they came from, machine code that they are. */
static void check_attributes(void)
{
    enum { PTX_VERSION = 5, BINARY_VERSION = 6 };
    extern const unsigned char fattn_cuda_image_simt_forward[];
    void *const library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*load)(gpu_module *, const void *) = NULL, (*unload)(gpu_module) = NULL;
    int (*find)(gpu_function *, gpu_module, const char *) = NULL;
    int (*get)(int *, int, gpu_function) = NULL;
    gpu_context context = NULL;
    gpu_module module = NULL;
    gpu_function function = NULL;
    int ptx = -1, binary = -1;
    *(void **)&load = dlsym(library, "cuModuleLoadData");
    *(void **)&unload = dlsym(library, "cuModuleUnload");
    *(void **)&find = dlsym(library, "cuModuleGetFunction");
    *(void **)&get = dlsym(library, "cuFuncGetAttribute");
    cuda->primary_retain(&context, 0);
    cuda->context_set(context);
    const int result = load(&module, fattn_cuda_image_simt_forward) ||
                       find(&function, module, "combine") || get(&ptx, PTX_VERSION, function) ||
                       get(&binary, BINARY_VERSION, function);
    tap_check(result == 0 && ptx > 0 && ptx <= binary, "combine: PTX version %d, binary %d", ptx,
              binary);
    unload(module);
    cuda->context_set(NULL);
    cuda->primary_release(0);
    dlclose(library);
}

/* Decodes whose q is the o of the previous one, on one stream without waits in between. */
static void check_chain(void)
{
    enum { TURNS = 400 };
    void *const rows[2] = {device_memory(device, O_BYTES), device_memory(device, O_BYTES)};
    uint16_t results[3][ROW];
    fattn_stream stream = NULL;
    fattn_plan *plan = NULL;
    fattn_plan_info info = {.struct_size = sizeof info};
    problem.features |= FATTN_SCALE;
    problem.scale = 40; /* so that each differs from the next */
    device_good(fattn_stream_create(device, &stream), "a stream");
    device_good(fattn_plan_create(device, &problem, &plan), "a plan");
    device_good(fattn_plan_get_info(plan, &info), "a plan");
    void *const workspace = device_memory(device, (size_t)info.workspace_bytes);
    for (int round = 0; round < 3; round++) {
        poison(rows[1]);
        device_copy(device, rows[0], buffers[0].q, O_BYTES);
        fattn_buffers b = buffers[0];
        for (int turn = 0; turn < TURNS; turn++) {
            b.q = rows[turn % 2], b.o = rows[1 - turn % 2];
            device_good(fattn_execute(plan, &b, workspace, stream), "a decode");
            if (round == 0) {
                device_good(fattn_stream_synchronize(device, stream), "waiting");
            }
        }
        device_good(fattn_stream_synchronize(device, stream), "waiting");
        device_copy(device, results[round], rows[TURNS % 2], O_BYTES);
    }
    tap_check(memcmp(results[0], results[1], O_BYTES) == 0 &&
                  memcmp(results[0], results[2], O_BYTES) == 0,
              "%d decodes in a row, each of the one before", TURNS);
    problem.features &= ~(uint64_t)FATTN_SCALE;
    problem.scale = 0;
    fattn_plan_destroy(plan);
    fattn_stream_destroy(device, stream);
    fattn_device_free(device, workspace);
    fattn_device_free(device, rows[0]), fattn_device_free(device, rows[1]);
}

/* This many streams take turns; results are compared only at the end. */
static void check_streams(int count, bool afresh)
{
    enum { TURNS = 60 };
    fattn_stream streams[LANES] = {NULL};
    fattn_cache_info before = {.struct_size = sizeof before}, after = before;
    int wrong = 0;
    device_good(fattn_cache_get_info(&before), "the cache");
    for (int lane = 0; lane < count; lane++) {
        poison(buffers[lane].o);
        device_good(fattn_stream_create(device, &streams[lane]), "a stream");
    }
    for (int turn = 0; turn < TURNS; turn++) {
        for (int lane = 0; lane < count; lane++) {
            if (afresh) { /* the next stream reuses its handle */
                device_good(fattn_stream_destroy(device, streams[lane]), "a stream");
                device_good(fattn_stream_create(device, &streams[lane]), "a stream");
            }
            device_good(fattn_attention(device, &problem, &buffers[lane], streams[lane]), "a call");
        }
    }
    for (int lane = 0; lane < count; lane++) {
        device_good(fattn_stream_synchronize(device, streams[lane]), "waiting");
    }
    device_good(fattn_cache_get_info(&after), "the cache");
    for (int lane = 0; lane < count; lane++) {
        wrong += !is_expected(lane);
        device_good(fattn_stream_destroy(device, streams[lane]), "a stream");
    }
    tap_check(wrong == 0 && after.allocations - before.allocations <= (afresh ? 4 : count),
              "%d streams%s: %d wrong, %d workspaces made", count,
              afresh ? ", destroyed and made again at each call" : "", wrong,
              (int)(after.allocations - before.allocations));
}

/* Handle 2 is a stream of each thread. */
static void *attend_often(void *argument)
{
    const int lane = (int)(intptr_t)argument;
    const fattn_stream own = (fattn_stream)(uintptr_t)FATTN_STREAM_PER_THREAD;
    bool well = true;
    for (int turn = 0; turn < 100; turn++) {
        well = well && fattn_attention(device, &problem, &buffers[lane], own) == FATTN_OK;
    }
    return well && fattn_stream_synchronize(device, own) == FATTN_OK ? NULL : argument;
}

static void check_threads(void)
{
    enum { THREADS = 6 };
    pthread_t threads[THREADS];
    int wrong = 0;
    for (int n = 0; n < THREADS; n++) {
        poison(buffers[n].o);
    }
    for (int n = 0; n < THREADS; n++) {
        if (pthread_create(&threads[n], NULL, attend_often, (void *)(intptr_t)n)) {
            tap_bail("no thread");
        }
    }
    for (int n = 0; n < THREADS; n++) {
        void *failed = NULL;
        pthread_join(threads[n], &failed);
        wrong += failed != NULL;
    }
    for (int n = 0; n < THREADS; n++) {
        wrong += !is_expected(n);
    }
    tap_check(wrong == 0, "the stream of each of %d threads: %d wrong", THREADS, wrong);
}

/* A graph of calls of lanes 0 and 1, replayed while other lanes call on other streams. */
static void check_graph(bool warm)
{
    enum { REPLAYS = 40 };
    fattn_stream stream = NULL, others[2] = {NULL};
    driver_graph graph = NULL;
    driver_exec exec = NULL;
    gpu_context context = NULL;
    int wrong = 0;
    fattn_cache_clear();
    for (int lane = 0; lane < 4; lane++) {
        poison(buffers[lane].o);
    }
    for (int n = 0; n < 2; n++) {
        device_good(fattn_stream_create(device, &others[n]), "a stream");
    }
    cuda->primary_retain(&context, 0);
    cuda->context_set(context);
    wrong += cuda->stream_create((gpu_stream *)&stream, 1) != 0;
    if (warm) {
        device_good(fattn_attention(device, &problem, &buffers[0], stream), "a call");
        device_good(fattn_stream_synchronize(device, stream), "waiting");
        poison(buffers[0].o);
    }
    wrong += cuda->capture_begin((gpu_stream)stream, 0) != 0;
    device_good(fattn_attention(device, &problem, &buffers[0], stream), "a captured call");
    device_good(fattn_attention(device, &problem, &buffers[1], stream), "a captured call");
    device_good(fattn_attention(device, &problem, &buffers[2], others[0]),
                "a call beside the capture");
    wrong += cuda->capture_end((gpu_stream)stream, &graph) != 0;
    wrong += !graph || cuda->graph_make(&exec, graph, 0) != 0;
    tap_check(wrong == 0 && exec, "a %s capture makes a graph", warm ? "warm" : "cold");
    for (int turn = 0; exec && turn < REPLAYS; turn++) {
        wrong += cuda->graph_launch(exec, (gpu_stream)stream) != 0;
        for (int n = 0; n < 2; n++) {
            device_good(fattn_attention(device, &problem, &buffers[2 + n], others[n]), "a call");
        }
        if (turn == REPLAYS / 2) {
            fattn_cache_clear(); /* the graph's workspace stays */
        }
    }
    device_good(fattn_stream_synchronize(device, stream), "waiting");
    for (int n = 0; n < 2; n++) {
        device_good(fattn_stream_synchronize(device, others[n]), "waiting");
    }
    for (int lane = 0; lane < 4; lane++) {
        wrong += !is_expected(lane);
    }
    tap_check(wrong == 0, "%d replays beside calls on other streams: %d wrong", REPLAYS, wrong);
    if (exec) {
        cuda->graph_exec_destroy(exec);
        cuda->graph_destroy(graph);
    }
    cuda->stream_destroy((gpu_stream)stream);
    cuda->context_set(NULL);
    cuda->primary_release(0);
    for (int n = 0; n < 2; n++) {
        device_good(fattn_stream_destroy(device, others[n]), "a stream");
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

/* For information: the host time of a call, which the GPU does not hide. */
static void measure(void)
{
    enum { TURNS = 200, ROUNDS = 5 };
    fattn_stream stream = NULL;
    double best[2] = {INFINITY, INFINITY};
    problem.seqlen_k = 2048;
    device_good(fattn_stream_create(device, &stream), "a stream");
    for (int round = 0; round < 2 * ROUNDS; round++) {
        const fattn_stream at = round % 2 ? stream : none;
        const double start = now();
        for (int turn = 0; turn < TURNS; turn++) {
            device_good(fattn_attention(device, &problem, &buffers[0], at), "a call");
        }
        best[round % 2] = fmin(best[round % 2], (now() - start) / TURNS);
        device_good(fattn_stream_synchronize(device, at), "waiting");
    }
    printf("# a call on the default stream %.2f us, on another %.2f us\n", best[0], best[1]);
    device_good(fattn_stream_destroy(device, stream), "a stream");
    problem.seqlen_k = KEYS;
}

int main(void)
{
    cuda = driver_open();
    if (!cuda || cuda->stub || fattn_device_open("cuda", &device)) {
        tap_skip_all(cuda ? fattn_last_reason() : "there is no driver of NVIDIA's");
        return 0;
    }
    set_up();
    check_attributes();
    check_chain();
    check_streams(2, false);
    check_streams(7, false);
    check_streams(3, true);
    check_threads();
    check_graph(true);
    check_graph(false);
    check_streams(2, false);
    measure();
    fattn_cache_clear();
    fattn_device_close(device);
    return tap_done();
}
