/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host half of backend "cuda" on a driver without a GPU (stub/): every driver call fails in
 * turn; contexts, streams and devices change; streams are captured; functions are missing from the
 * driver. Run it with the stub's folder in LD_LIBRARY_PATH.
 */
#define _GNU_SOURCE /* dladdr, setenv, mkdtemp */

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "core/backend.h"
#include "core/env.h"
#include "core/memory.h"
#include "core/operands.h"
#include "core/plan.h"
#include "fattn/distributed.h"
#include "tests/driver.h"
#include "tests/tap.h"
#include "tools/judge/random_case.h"

#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof *(list); i++)

static const driver *cuda;
static stub_cuda *stub;

/* -------------------------------------------------------------------------------------------------
 * Remarks
 * ---------------------------------------------------------------------------------------------- */

static const char *running = "";
static int wrong; /* failures of the running check */

#if defined(__GNUC__)
static bool expect(bool holds, const char *format, ...) __attribute__((format(printf, 2, 3)));
#endif

/* Part of a check: prints and counts a failure. Returns holds. */
static bool expect(bool holds, const char *format, ...)
{
    if (!holds) {
        va_list arguments;
        wrong++;
        printf("# %s: ", running);
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf("\n");
    }
    return holds;
}

static bool expect_ok(fattn_status status, const char *what)
{
    return expect(status == FATTN_OK, "%s: %s: %s", what, fattn_status_string(status),
                  fattn_last_reason());
}

static bool says(const char *words) { return strstr(fattn_last_reason(), words) != NULL; }

/* -------------------------------------------------------------------------------------------------
 * Scenes: a device, a plan and its operands
 * ---------------------------------------------------------------------------------------------- */

typedef enum work { FORWARD, BACKWARD, DECODE, WORKS } work;

static const char *const work_names[WORKS] = {"forward", "backward", "decode"};

enum { OPERAND = 1 << 17, OPERANDS = 10 }; /* bytes of room for each operand, and how many */

static _Alignas(256) char host_memory[OPERANDS * OPERAND];

typedef struct scene {
    const char *spec;
    fattn_device *device;
    fattn_problem problem;
    fattn_plan *plan;
    fattn_buffers buffers;
    void *operands, *workspace;
    int64_t workspace_bytes;
    fattn_stream stream;
    fattn_event *events[2];
    int64_t launches; /* of the stub before the act */
} scene;

/* Each takes several launches: a causal square with grouped heads, and one query with split
 * keys. */
static fattn_problem problem_of(work w)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = w == BACKWARD ? FATTN_BACKWARD : FATTN_FORWARD;
    p.dtype = FATTN_F16;
    p.features = FATTN_CAUSAL;
    p.batch = w == DECODE ? 1 : 2;
    p.heads_q = w == DECODE ? 1 : 4, p.heads_k = w == DECODE ? 1 : 2;
    p.seqlen_q = w == DECODE ? 1 : 65, p.seqlen_k = w == DECODE ? 2048 : 70;
    p.dim = p.dim_v = w == DECODE ? 16 : 64;
    return p;
}

static fattn_buffers buffers_at(char *memory)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    void *const places[OPERANDS - 1] = {memory,
                                        memory + OPERAND,
                                        memory + 2 * OPERAND,
                                        memory + 3 * OPERAND,
                                        memory + 4 * OPERAND,
                                        memory + 5 * OPERAND,
                                        memory + 6 * OPERAND,
                                        memory + 7 * OPERAND,
                                        memory + 8 * OPERAND};
    b.q = places[0], b.k = places[1], b.v = places[2], b.o = places[3], b.lse = places[4];
    b.dout = places[5], b.dq = places[6], b.dk = places[7], b.dv = places[8];
    return b;
}

static void open_device(scene *s) { expect_ok(fattn_device_open(s->spec, &s->device), "opening"); }

/* Memory for the operands of the scene's problem, a stream and a plan with its workspace. */
static void set_up_problem(scene *s)
{
    fattn_plan_info info = {.struct_size = sizeof info};
    expect_ok(fattn_device_malloc(s->device, OPERANDS * OPERAND, &s->operands), "memory");
    memset(s->operands, 0, OPERANDS * OPERAND);
    s->buffers = buffers_at(s->operands);
    if (s->problem.features & FATTN_SEQUSED_K) {
        s->buffers.seqused_k = (const void *)((char *)s->operands + (OPERANDS - 1) * OPERAND);
    }
    expect_ok(fattn_stream_create(s->device, &s->stream), "a stream");
    expect_ok(fattn_plan_create(s->device, &s->problem, &s->plan), "a plan");
    expect_ok(fattn_plan_get_info(s->plan, &info), "asking the plan");
    expect(s->problem.seqlen_q > 1 || info.splits > 1, "decoding does not split");
    s->workspace_bytes = info.workspace_bytes;
    expect_ok(fattn_device_malloc(s->device, (size_t)s->workspace_bytes, &s->workspace),
              "a workspace");
}

static void set_up(scene *s, work w, uint64_t features)
{
    s->problem = problem_of(w);
    s->problem.features |= features;
    if (!s->device) {
        open_device(s);
    }
    set_up_problem(s);
}

static void tear_down(scene *s)
{
    fattn_cache_clear();
    for (int n = 0; n < 2; n++) {
        fattn_event_destroy(s->events[n]);
    }
    fattn_plan_destroy(s->plan);
    if (s->device) {
        fattn_device_free(s->device, s->workspace);
        fattn_device_free(s->device, s->operands);
        fattn_stream_destroy(s->device, s->stream);
    }
    fattn_device_close(s->device);
}

/* -------------------------------------------------------------------------------------------------
 * Acts: what the n-th driver call fails in
 * ---------------------------------------------------------------------------------------------- */

static fattn_status act_open(scene *s)
{
    const fattn_status status = fattn_device_open(s->spec, &s->device);
    expect(!status == (s->device != NULL), "a device beside a failure, or none");
    return status;
}

static fattn_status plan_of(scene *s, work w)
{
    s->problem = problem_of(w);
    const fattn_status status = fattn_plan_create(s->device, &s->problem, &s->plan);
    expect(!status == (s->plan != NULL), "a plan beside a failure, or none");
    return status;
}

static fattn_status act_plan_forward(scene *s) { return plan_of(s, FORWARD); }
static fattn_status act_plan_backward(scene *s) { return plan_of(s, BACKWARD); }
static fattn_status act_plan_decode(scene *s) { return plan_of(s, DECODE); }

static void prepare_forward(scene *s) { set_up(s, FORWARD, 0); }
static void prepare_backward(scene *s) { set_up(s, BACKWARD, 0); }
static void prepare_decode(scene *s) { set_up(s, DECODE, 0); }
static void prepare_checked(scene *s) { set_up(s, FORWARD, FATTN_CHECKED | FATTN_SEQUSED_K); }

/* A run succeeds only if it launched something. */
static fattn_status launched(const scene *s, fattn_status status)
{
    expect(status || stub->launches > s->launches, "nothing was launched");
    return status;
}

static fattn_status act_run(scene *s)
{
    return launched(s, fattn_execute(s->plan, &s->buffers, s->workspace, s->stream));
}

static fattn_status act_run_allocating(scene *s)
{
    return launched(s, fattn_execute(s->plan, &s->buffers, NULL, s->stream));
}

static fattn_status act_one_shot(scene *s)
{
    return launched(s, fattn_attention(s->device, &s->problem, &s->buffers, NULL));
}

/* Host memory, on the device of FATTN_BACKEND. */
static fattn_status act_one_shot_staged(scene *s)
{
    const fattn_buffers buffers = buffers_at(host_memory);
    const fattn_problem problem = problem_of(BACKWARD);
    return launched(s, fattn_attention(NULL, &problem, &buffers, NULL));
}

/* The second of two calls on different streams; the first has created a workspace. */
static fattn_status act_one_shot_streams(scene *s)
{
    fattn_status status = fattn_attention(s->device, &s->problem, &s->buffers, s->stream);
    status = status ? status : fattn_attention(s->device, &s->problem, &s->buffers, s->stream);
    return launched(s, status);
}

static fattn_status act_events_wait(scene *s)
{
    fattn_status status = fattn_event_create(s->device, &s->events[0]);
    status = status ? status : fattn_event_record(s->events[0], NULL);
    status = status ? status : fattn_event_wait(s->events[0], s->stream);
    return status ? status : fattn_event_synchronize(s->events[0]);
}

static fattn_status act_merge(scene *s)
{
    float *const m = s->operands;
    const fattn_strides strides = {.batch = 64, .seq = 8, .head = 64};
    const fattn_merge_args args = {.struct_size = sizeof args,
                                   .batch = 1,
                                   .heads = 1,
                                   .seqlen = 8,
                                   .dim_v = 8,
                                   .o1 = m,
                                   .lse1 = m + 64,
                                   .o2 = m + 128,
                                   .lse2 = m + 192,
                                   .o = m + 256,
                                   .lse = m + 320,
                                   .o1_stride = strides,
                                   .o2_stride = strides,
                                   .o_stride = strides};
    return launched(s, fattn_merge(s->device, &args, s->stream));
}

static fattn_status act_dropout_mask(scene *s)
{
    const fattn_dropout_args args = {.struct_size = sizeof args,
                                     .batch = 1,
                                     .heads = 1,
                                     .seqlen_q = 8,
                                     .seqlen_k = 8,
                                     .p = 0.5,
                                     .keep = s->operands};
    return launched(s, fattn_dropout_mask(s->device, &args, s->stream));
}

static fattn_status act_memory(scene *s)
{
    fattn_status status = fattn_device_malloc(s->device, 1000, &s->operands);
    expect(!status == (s->operands != NULL), "memory beside a failure, or none");
    if (!status) {
        status = fattn_device_copy(s->device, s->operands, host_memory, 1000, NULL);
    }
    return status;
}

static fattn_status act_free(scene *s)
{
    const fattn_status status = fattn_device_free(s->device, s->operands);
    s->operands = NULL;
    return status;
}

static fattn_status act_stream(scene *s)
{
    fattn_status status = fattn_stream_create(s->device, &s->stream);
    expect(!status == (s->stream != NULL), "a stream beside a failure, or none");
    return status ? status : fattn_stream_synchronize(s->device, s->stream);
}

static fattn_status act_stream_destroy(scene *s)
{
    const fattn_status status = fattn_stream_destroy(s->device, s->stream);
    s->stream = NULL;
    return status;
}

static fattn_status act_events(scene *s)
{
    double milliseconds = 0;
    fattn_status status = FATTN_OK;
    for (int n = 0; n < 2 && !status; n++) {
        status = fattn_event_create(s->device, &s->events[n]);
        expect(!status == (s->events[n] != NULL), "an event beside a failure, or none");
        status = status ? status : fattn_event_record(s->events[n], NULL);
    }
    return status ? status : fattn_event_elapsed(s->events[0], s->events[1], &milliseconds);
}

static void prepare_event(scene *s)
{
    open_device(s);
    expect_ok(fattn_event_create(s->device, &s->events[0]), "an event");
}

static fattn_status act_event_destroy(scene *s)
{
    fattn_event_destroy(s->events[0]);
    s->events[0] = NULL;
    return FATTN_OK;
}

static fattn_status act_close(scene *s)
{
    fattn_device_close(s->device);
    s->device = NULL;
    return FATTN_OK;
}

typedef struct act {
    const char *name;
    void (*prepare)(scene *s); /* runs without failures; NULL: nothing */
    fattn_status (*act)(scene *s);
    bool silent; /* returns void, so failures are not reported */
} act;

static const act acts[] = {
    {"opening a device", NULL, act_open, false},
    {"planning a forward", open_device, act_plan_forward, false},
    {"planning a backward", open_device, act_plan_backward, false},
    {"planning a decoding", open_device, act_plan_decode, false},
    {"running a forward", prepare_forward, act_run, false},
    {"running a backward", prepare_backward, act_run, false},
    {"running a decoding", prepare_decode, act_run, false},
    {"running with FATTN_CHECKED", prepare_checked, act_run, false},
    {"running a backward without a workspace", prepare_backward, act_run_allocating, false},
    {"running a decoding without a workspace", prepare_decode, act_run_allocating, false},
    {"one shot", prepare_backward, act_one_shot, false},
    {"one shot from host memory", NULL, act_one_shot_staged, false},
    {"one shot on a stream, twice", prepare_backward, act_one_shot_streams, false},
    {"letting streams wait", prepare_forward, act_events_wait, false},
    {"merging", prepare_forward, act_merge, false},
    {"writing a dropout mask", prepare_forward, act_dropout_mask, false},
    {"allocating and copying", open_device, act_memory, false},
    {"freeing", prepare_forward, act_free, false},
    {"making a stream and waiting", open_device, act_stream, false},
    {"destroying a stream", prepare_forward, act_stream_destroy, false},
    {"timing", open_device, act_events, false},
    {"destroying an event", prepare_event, act_event_destroy, true},
    {"closing a device", open_device, act_close, true},
};

/* Of a row that copies by tensor maps, where the build has one. */
static const act map_acts[] = {
    {"planning tensor maps", open_device, act_plan_forward, false},
    {"running with tensor maps", prepare_forward, act_run, false},
};

/* What a reason says of each driver function. */
static const struct {
    const char *function, *words;
} words[] = {
    {"cuDeviceGetCount", "counting devices"},
    {"cuDeviceGet", "finding a device"},
    {"cuDeviceGetAttribute", "asking for an attribute"},
    {"cuDevicePrimaryCtxRetain", "retaining the primary context"},
    {"cuCtxGetCurrent", "asking for the context"},
    {"cuCtxGetDevice", "asking for the context's device"},
    {"cuCtxPushCurrent_v2", "entering the context"},
    {"cuCtxPopCurrent_v2", "leaving the context"},
    {"cuModuleLoadData", "loading a module"},
    {"cuModuleGetFunction", "finding a function"},
    {"cuFuncGetAttribute", "loading a function"},
    {"cuFuncSetAttribute", "setting the shared memory"},
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", "how many blocks a unit holds"},
    {"cuLaunchKernel", "launching a kernel"},
    {"cuLaunchKernelEx", "launching a kernel"},
    {"cuMemAlloc_v2", "allocating memory"},
    {"cuMemFree_v2", "freeing memory"},
    {"cuMemcpyAsync", "copying"},
    {"cuStreamCreate", "creating a stream"},
    {"cuStreamDestroy_v2", "destroying a stream"},
    {"cuStreamSynchronize", "waiting for a stream"},
    {"cuStreamGetCtx", "asking for the stream's context"},
    {"cuStreamWaitEvent", "letting a stream wait"},
    {"cuStreamGetCaptureInfo", "asking whether a stream is captured"},
    {"cuThreadExchangeStreamCaptureMode", "setting the mode of captures"},
    {"cuEventCreate", "creating an event"},
    {"cuEventRecord", "recording an event"},
    {"cuEventSynchronize", "waiting for an event"},
    {"cuEventElapsedTime", "timing events"},
    {"cuTensorMapEncodeTiled", "describing a tensor"},
    {"cuTensorMapReplaceAddress", "saying where a tensor lies"},
};

static const char *words_for(const char *function)
{
    EACH (n, words) {
        if (strcmp(words[n].function, function) == 0) {
            return words[n].words;
        }
    }
    return "a call that has no words";
}

/* -------------------------------------------------------------------------------------------------
 * The n-th call fails
 * ---------------------------------------------------------------------------------------------- */

/* The calls of an act when nothing fails. */
typedef struct trace {
    const char *names[STUB_LOG + 2]; /* from 1; "" at both ends */
    int64_t count;
} trace;

static bool is(const trace *t, int64_t n, const char *name)
{
    return strcmp(t->names[n], name) == 0;
}

/* Queries whose failure is an answer: an unknown pointer is host memory and gets copied; a backend
 * without devices is asked again when one is opened. */
static bool is_question(const trace *t, int64_t n)
{
    return is(t, n, "cuPointerGetAttribute") ||
           (is(t, n, "cuCtxPushCurrent_v2") && is(t, n + 1, "cuPointerGetAttribute")) ||
           (is(t, n, "cuCtxPopCurrent_v2") && is(t, n - 1, "cuPointerGetAttribute")) ||
           (is(t, n, "cuDeviceGetCount") && is(t, n + 1, "cuDeviceGetCount"));
}

/* Resources cannot be freed in a context that cannot be entered. */
static bool loses(const trace *t, int64_t n)
{
    static const char *const releases[] = {"cuMemFree_v2", "cuModuleUnload", "cuStreamDestroy_v2",
                                           "cuEventDestroy_v2"};
    bool any = false;
    EACH (r, releases) {
        any = any || is(t, n + 1, releases[r]);
    }
    return any && is(t, n, "cuCtxPushCurrent_v2");
}

/* How calls fail: with which result, and whether all later calls fail too, as after a kernel
 * crash. */
typedef struct failure {
    int result;
    bool lasting;
} failure;

static void expect_reported(const trace *t, int64_t n, fattn_status status, failure f)
{
    const char *const name = t->names[n];
    if (!expect(status != FATTN_OK, "call %d, %s, failed without an error", (int)n, name)) {
        return;
    }
    if (f.result == STUB_OUT_OF_MEMORY) {
        expect(status == FATTN_OUT_OF_MEMORY, "call %d, %s: %s", (int)n, name,
               fattn_status_string(status));
        return;
    }
    expect(status == FATTN_DEVICE_ERROR, "call %d, %s: %s", (int)n, name,
           fattn_status_string(status));
    expect(is_question(t, n) ||
               (says(words_for(name)) && says("719") && says("CUDA_ERROR_LAUNCH_FAILED")),
           "call %d, %s: the reason is \"%s\"", (int)n, name, fattn_last_reason());
}

/* Makes call n of the act fail. 0: none fails, and *t is filled in. */
static void run_act(const act *a, const char *spec, int64_t n, failure f, trace *t)
{
    int64_t alive[STUB_KINDS];
    gpu_context before = NULL, after = NULL;
    const int64_t blocks = fattn_memory_alive();
    scene s = {.spec = spec};
    cuda->context_get(&before);
    memcpy(alive, stub->alive, sizeof alive);
    if (a->prepare) {
        a->prepare(&s);
    }
    s.launches = stub->launches;
    stub->calls = 0, stub->fired = false;
    stub->fail_at = n, stub->fail_with = f.result, stub->fail_on = f.lasting;
    const fattn_status status = a->act(&s);
    stub->fail_at = 0, stub->fail_on = false;
    if (n == 0) {
        expect_ok(status, "without a failure");
        t->count = stub->calls;
        expect(t->count > 0 && t->count <= STUB_LOG, "%d calls", (int)t->count);
        t->names[0] = t->names[t->count + 1] = "";
        memcpy(t->names + 1, stub->log, (size_t)t->count * sizeof *t->names);
    } else {
        expect(stub->fired, "call %d was not reached", (int)n);
        if (!a->silent && !(is_question(t, n) && status == FATTN_OK)) {
            expect_reported(t, n, status, f);
        }
    }
    cuda->context_get(&after);
    expect(after == before, "call %d, %s: another context is current than before", (int)n,
           t->names[n]);
    tear_down(&s);
    expect(fattn_memory_alive() == blocks, "call %d, %s: host memory leaks", (int)n, t->names[n]);
    for (int kind = 0; kind < STUB_KINDS; kind++) {
        expect(stub->alive[kind] == alive[kind] || f.lasting || loses(t, n),
               "call %d, %s: %d of kind %d more than before", (int)n, t->names[n],
               (int)(stub->alive[kind] - alive[kind]), kind);
    }
}

static void check_act(const act *a, const char *spec, failure f, const char *situation)
{
    static trace t;
    running = a->name;
    wrong = 0;
    setenv("FATTN_BACKEND", spec, 1);
    fattn_env_reload();
    run_act(a, spec, 0, f, &t);
    for (int64_t n = 1; n <= t.count; n++) {
        run_act(a, spec, n, f, &t);
    }
    unsetenv("FATTN_BACKEND");
    fattn_env_reload();
    tap_check(wrong == 0, "%s on %s, %s: each of %d calls fails with %d%s", a->name, spec,
              situation, (int)t.count, f.result, f.lasting ? ", and all after it" : "");
}

/* The caller's current context is restored, whatever it is. */
static void check_failures(void)
{
    gpu_context own = NULL, other = NULL, primary = NULL;
    cuda->context_create(&own, 0, 0);
    cuda->context_create(&other, 0, 1);
    cuda->primary_retain(&primary, 0);
    const struct {
        const char *name;
        gpu_context context;
    } situations[] = {{"no context", NULL},
                      {"a context of the device", own},
                      {"a context of another device", other},
                      {"the primary context", primary}};
    EACH (c, situations) {
        cuda->context_set(situations[c].context);
        EACH (a, acts) {
            check_act(&acts[a], "cuda:0", (failure){STUB_LAUNCH_FAILED, false}, situations[c].name);
        }
    }
    cuda->context_set(NULL);
    EACH (a, acts) {
        check_act(&acts[a], "cuda:1", (failure){STUB_OUT_OF_MEMORY, false}, "no context");
        check_act(&acts[a], "cuda:1", (failure){STUB_LAUNCH_FAILED, true}, "no context");
    }
    cuda->primary_release(0);
    cuda->context_destroy(other);
    cuda->context_destroy(own);
}

/* -------------------------------------------------------------------------------------------------
 * Devices
 * ---------------------------------------------------------------------------------------------- */

static void check_any_device(void)
{
    running = "device", wrong = 0;
    stub->devices = 4;
    for (int n = 0; n < stub->devices; n++) {
        char spec[16];
        snprintf(spec, sizeof spec, "cuda:%d", n);
        for (work w = FORWARD; w < WORKS; w++) {
            scene s = {.spec = spec};
            set_up(&s, w, 0);
            stub->launch_device = -1;
            expect_ok(act_run(&s), spec);
            expect(stub->launch_device == n, "%s: %s ran on device %d", spec, work_names[w],
                   stub->launch_device);
            tear_down(&s);
        }
    }
    fattn_device *device = NULL;
    expect(fattn_device_open("cuda:4", &device) == FATTN_NO_DEVICE && !device && says("cuda:4"),
           "cuda:4 of 4: %s", fattn_last_reason());
    stub->devices = 2;
    tap_check(wrong == 0, "work runs on the device that was named, whichever is current");
}

/* Images hold code for some architectures; an older device gets an error that says so. */
static void check_old_device(void)
{
    running = "an old device", wrong = 0;
    const int64_t modules = stub->alive[STUB_MODULE], contexts = stub->alive[STUB_CONTEXT];
    const int capability = stub->capability;
    fattn_device *device = NULL;
    stub->capability = 52;
    const fattn_status status = fattn_device_open("cuda", &device);
    stub->capability = capability;
    expect(status == FATTN_UNSUPPORTED && !device && says("5.2") && says("sm_"), "%s: %s",
           fattn_status_string(status), fattn_last_reason());
    expect(stub->alive[STUB_MODULE] == modules && stub->alive[STUB_CONTEXT] == contexts,
           "something leaks");
    tap_check(wrong == 0, "a device below the lowest architecture is refused with a reason");
}

static char logged[512]; /* lines of the log */

static void keep_line(void *user, const char *line)
{
    const size_t used = strlen(logged);
    (void)user;
    snprintf(logged + used, sizeof logged - used, "%s\n", line);
}

/* "auto" skips a device without code; opening it by name is an error. */
static void check_auto(int old, const char *backend, int ordinal)
{
    fattn_device *device = NULL;
    fattn_device_info info = {.struct_size = sizeof info};
    const int64_t modules = stub->alive[STUB_MODULE], contexts = stub->alive[STUB_CONTEXT];
    running = "auto", wrong = 0;
    stub->old = old, logged[0] = '\0';
    setenv("FATTN_VERBOSE", "1", 1);
    fattn_env_reload();
    fattn_set_log_callback(keep_line, NULL);
    const char *const specs[] = {"auto", NULL};
    EACH (n, specs) {
        expect_ok(fattn_device_open(specs[n], &device), "auto");
        expect_ok(fattn_device_get_info(device, &info), "auto");
        expect(strcmp(info.backend, backend) == 0 && info.ordinal == ordinal, "auto is %s:%d",
               info.backend, info.ordinal);
        fattn_device_close(device);
    }
    for (int n = 0; n < stub->devices; n++) {
        char spec[16], line[64];
        snprintf(spec, sizeof spec, "cuda:%d", n);
        snprintf(line, sizeof line, "%s over: cuda: this build has no code", spec);
        expect((strstr(logged, line) != NULL) == (n < old), "%s: the log is \"%s\"", spec, logged);
        const fattn_status status = fattn_device_open(spec, &device);
        expect(status == (n < old ? FATTN_UNSUPPORTED : FATTN_OK), "%s: %s", spec,
               fattn_status_string(status));
        fattn_device_close(device);
    }
    fattn_set_log_callback(NULL, NULL);
    unsetenv("FATTN_VERBOSE");
    fattn_env_reload();
    const fattn_problem problem = problem_of(FORWARD);
    const fattn_buffers buffers = buffers_at(host_memory);
    expect_ok(fattn_attention(NULL, &problem, &buffers, NULL), "one shot on the default device");
    fattn_cache_clear();
    stub->old = 0;
    expect(stub->alive[STUB_MODULE] == modules && stub->alive[STUB_CONTEXT] == contexts,
           "something leaks");
    tap_check(wrong == 0, "auto is %s:%d where %d of %d devices have no code", backend, ordinal,
              old, stub->devices);
}

/* The info of a device and its events matches the driver's answers. */
static void check_numbers(void)
{
    fattn_device *device = NULL;
    fattn_device_info info = {.struct_size = sizeof info};
    fattn_event *events[2] = {NULL};
    fattn_limits limits;
    double milliseconds = 0;
    char isa[32];
    running = "numbers", wrong = 0;
    expect_ok(fattn_device_open("cuda:1", &device), "opening");
    expect_ok(fattn_device_get_info(device, &info), "describing");
    device->backend->limits(device->impl, &limits);
    snprintf(isa, sizeof isa, "sm_%d", stub->capability);
    expect(strcmp(info.name, "stub 1") == 0 && strcmp(info.isa, isa) == 0 && info.ordinal == 1,
           "it is %s, %s, number %d", info.name, info.isa, info.ordinal);
    expect(info.units == 4 && info.host_memory == 0, "%d units", info.units);
    expect(info.total_memory == INT64_C(2) << 30, "%lld bytes", (long long)info.total_memory);
    expect(info.fast_memory == limits.fast_memory && info.fast_memory >= 64 << 10 &&
               info.fast_memory < 1 << 20,
           "%lld bytes a block", (long long)info.fast_memory);
    expect(limits.units == 4 && limits.shared_cache == 40 << 20, "limits of %d units",
           (int)limits.units);
    for (int n = 0; n < 2; n++) {
        expect_ok(fattn_event_create(device, &events[n]), "making an event");
        expect_ok(fattn_event_record(events[n], NULL), "recording it");
    }
    expect_ok(fattn_event_elapsed(events[0], events[1], &milliseconds), "timing");
    expect(milliseconds == 0.5, "%g milliseconds", milliseconds);
    fattn_event_destroy(events[0]);
    fattn_event_destroy(events[1]);
    fattn_device_close(device);
    tap_check(wrong == 0, "a device and its events say what the driver says");
}

/* The blocks of the row's kernel of keys, in backward, whose grid is resident, for so many items; 0
 * where the build or the device has no such row. */
static unsigned resident_blocks(const char *row, int64_t items)
{
    scene s = {.spec = "cuda:0", .problem = problem_of(BACKWARD)};
    unsigned blocks = 0;
    setenv("FATTN_KERNEL", row, 1);
    fattn_env_reload();
    open_device(&s);
    s.problem.batch = items, s.problem.heads_q = s.problem.heads_k = 1;
    s.problem.seqlen_q = s.problem.seqlen_k = 8;
    const fattn_status status = fattn_plan_create(s.device, &s.problem, &s.plan);
    fattn_plan_destroy(s.plan);
    s.plan = NULL;
    if (status == FATTN_OK) {
        set_up_problem(&s);
        expect_ok(act_run(&s), "a run");
        blocks = stub->blocks[(stub->launches - 2) % 8]; /* rows, keys, dq */
    } else {
        expect(status == (stub->held ? FATTN_UNSUPPORTED : FATTN_DEVICE_ERROR), "planning: %s",
               fattn_last_reason());
    }
    tear_down(&s);
    unsetenv("FATTN_KERNEL");
    fattn_env_reload();
    return blocks;
}

static const char mma[] = "mma_backward_64";

static bool has_resident_rows(void) { return resident_blocks(mma, 1) == 1; }

typedef struct resident_case {
    int units, held;
    int64_t items;
    unsigned blocks;
} resident_case;

static void check_resident_case(const char *row, resident_case c)
{
    stub->units = c.units, stub->held = c.held;
    const unsigned blocks = resident_blocks(row, c.items);
    expect(blocks == c.blocks, "%s, %d units, %d held, %d items: %u blocks, not %u", row, c.units,
           c.held, (int)c.items, blocks, c.blocks);
    stub->units = 4, stub->held = 1;
}

/* A grid that takes its work from a counter has no more blocks than the device holds, and no plan
 * is made for a kernel that does not fit. */
static void check_resident(void)
{
    static const resident_case cases[] = {
        {4, 1, 3, 3}, {4, 1, 4, 4}, {4, 1, 5, 4}, {4, 2, 5, 5}, {4, 2, 9, 8}};
    running = "resident grids", wrong = 0;
    if (!has_resident_rows()) {
        tap_skip("resident grids", fattn_last_reason());
        return;
    }
    EACH (n, cases) {
        check_resident_case(mma, cases[n]);
    }
    stub->held = 0;
    expect(resident_blocks(mma, 9) == 0 && says("holds no block"), "none held: %s",
           fattn_last_reason());
    stub->held = 1;
    tap_check(wrong == 0, "a resident grid has as many blocks as the device holds");
}

/* Where two blocks share an item it has whole clusters. */
static void check_resident_clusters(void)
{
    static const resident_case cases[] = {
        {4, 1, 1, 2}, {4, 1, 3, 4}, {5, 1, 3, 4}, {1, 1, 3, 2}, {3, 3, 9, 8}};
    running = "resident clusters", wrong = 0;
    EACH (n, cases) {
        check_resident_case("wgmma_backward_256", cases[n]);
    }
    tap_check(wrong == 0, "a resident grid has whole clusters");
}

/* AMD's launches count threads in 32 bits: fewer than 2^32. */
static void check_grids(void)
{
    const fattn_gpu_api amd = {.blocks_max = INT32_MAX, .threads_max = UINT32_MAX};
    const fattn_gpu_api nvidia = {.blocks_max = INT32_MAX, .threads_max = INT64_MAX};
    running = "grids", wrong = 0;
    for (int threads = 32; threads <= 1024; threads += 32) {
        const int64_t fits = (INT64_C(1) << 32) / threads - 1, most = INT64_C(1) << 62;
        expect(fattn_gpu_grid(&amd, fits, threads) == (fits < INT32_MAX ? fits : INT32_MAX),
               "%d blocks of %d", (int)fits, threads);
        expect((int64_t)fattn_gpu_grid(&amd, most, threads) * threads <= UINT32_MAX,
               "too many threads of blocks of %d", threads);
        expect(fattn_gpu_grid(&nvidia, most, threads) == INT32_MAX, "blocks of %d", threads);
        expect(fattn_gpu_grid(&amd, 7, threads) == 7, "7 blocks of %d", threads);
    }
    tap_check(wrong == 0, "a launch has as many blocks as a driver takes");
}

static void check_instruction_sets(void)
{
    const fattn_gpu_kernel any = {.isa = 0}, late = {.isa = 80},
                           hopper = {.isa = 90, .isa_past = 100};
    tap_check(fattn_gpu_kernel_runs(&any, 52) && !fattn_gpu_kernel_runs(&late, 75) &&
                  fattn_gpu_kernel_runs(&late, 80) && fattn_gpu_kernel_runs(&late, 120),
              "a kernel runs from its instruction set on");
    tap_check(!fattn_gpu_kernel_runs(&hopper, 89) && fattn_gpu_kernel_runs(&hopper, 90) &&
                  !fattn_gpu_kernel_runs(&hopper, 100) && !fattn_gpu_kernel_runs(&hopper, 120),
              "one that has an end does not run past it");
}

/* What is launched, with the number of threads that its code is written for. */
static void check_launched(void)
{
    static const struct {
        work of;
        const char *kernel;
        unsigned threads;
    } rows[] = {{FORWARD, "simt_forward", 256}, {DECODE, "simt_decode", 128}};
    running = "what is launched", wrong = 0;
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        scene s = {.spec = "cuda:0"};
        open_device(&s);
        s.problem = problem_of(rows[n].of);
        set_up_problem(&s);
        fattn_plan *plan = NULL;
        expect_ok(fattn_plan_create_with(s.device, &s.problem, rows[n].kernel, NULL, &plan),
                  "a plan");
        expect_ok(fattn_execute(plan, &s.buffers, NULL, NULL), "a run");
        expect(strncmp(stub->launch_name, rows[n].kernel, strlen(rows[n].kernel)) == 0 &&
                   stub->launch_threads == rows[n].threads,
               "%s: %s with %u threads", rows[n].kernel, stub->launch_name, stub->launch_threads);
        fattn_plan_destroy(plan);
        tear_down(&s);
    }
    scene s = {.spec = "cuda:0"};
    open_device(&s);
    expect_ok(fattn_device_malloc(s.device, 4096, &s.operands), "memory");
    expect_ok(act_dropout_mask(&s), "a dropout mask");
    expect(strcmp(stub->launch_name, "dropout_mask") == 0, "%s for it", stub->launch_name);
    expect_ok(act_merge(&s), "merging");
    expect(strcmp(stub->launch_name, "merge") == 0, "%s for it", stub->launch_name);
    tear_down(&s);
    tap_check(wrong == 0, "each verb and row launches its own function, with its threads");
}

/* Memory of the host that the device sees at another address is none that kernels can read. */
static void check_mapped_elsewhere(void)
{
    scene s = {.spec = "cuda:0"};
    open_device(&s);
    const fattn_backend *const backend = s.device->backend;
    void *own = NULL;
    running = "memory elsewhere", wrong = 0;
    expect_ok(fattn_device_malloc(s.device, 4096, &own), "memory");
    stub->elsewhere = host_memory;
    expect(backend->reads(s.device->impl, own), "the device's own is not read");
    expect(!backend->reads(s.device->impl, host_memory), "the host's is read where it is not");
    stub->elsewhere = NULL;
    expect_ok(fattn_device_free(s.device, own), "freeing");
    tear_down(&s);
    tap_check(wrong == 0, "memory that a device sees elsewhere is copied");
}

/* Decoding on a newer chip launches early if the running code was compiled for 9.0 or newer, which
 * code that the driver compiled from older PTX was not. */
static void check_early(int capability, bool only_ptx, int compiled_for)
{
    const int usual = stub->capability;
    scene s = {.spec = "cuda:0"};
    running = "early launches", wrong = 0;
    stub->capability = capability, stub->only_ptx = only_ptx, stub->compiled_for = compiled_for;
    stub->early = stub->unready = 0;
    if (fattn_device_open(s.spec, &s.device)) {
        tap_skip("a device of another capability decodes", fattn_last_reason());
        stub->capability = usual, stub->only_ptx = false, stub->compiled_for = 0;
        return;
    }
    set_up(&s, DECODE, 0);
    for (int turn = 0; turn < 3; turn++) {
        expect_ok(act_run(&s), "decoding");
    }
    expect(stub->unready == 0, "%d of %d early launches have no wait", (int)stub->unready,
           (int)stub->early);
    expect((stub->early > 0) == (stub->newest >= 90), "%d early launches of code for %d",
           (int)stub->early, stub->newest);
    tear_down(&s);
    stub->capability = usual, stub->only_ptx = false, stub->compiled_for = 0;
    tap_check(wrong == 0, "early launches on capability %d.%d%s, of code for %d: %d",
              capability / 10, capability % 10, only_ptx ? " by PTX" : "", stub->newest,
              (int)stub->early);
}

/* A run with one feature of pairs launches the entry for that one where it is machine code, and the
 * one for all features where the driver compiles PTX. */
static void check_general(work w, int capability, bool only_ptx)
{
    const int usual = stub->capability;
    scene s = {.spec = "cuda:0"};
    running = "one feature", wrong = 0;
    stub->capability = capability, stub->only_ptx = only_ptx;
    if (fattn_device_open(s.spec, &s.device)) {
        tap_skip("a run with one feature on a device of another capability", fattn_last_reason());
        stub->capability = usual, stub->only_ptx = false;
        return;
    }
    s.problem = problem_of(w);
    s.problem.features |= FATTN_SOFTCAP;
    s.problem.softcap = 5;
    set_up_problem(&s);
    memset(stub->launched, 0, sizeof stub->launched);
    expect_ok(act_run(&s), "a run");
    const char *const kind = w == BACKWARD ? "mma_backward_" : "mma_";
    const char *const found = strstr(stub->launched, kind);
    const char *const one = "softcap_f16_64_128x128 ", *const all = "full_f16_64_128x128 ";
    const char *const wanted = only_ptx ? all : one;
    expect(found && strncmp(found + strlen(kind), wanted, strlen(wanted)) == 0,
           "launched %s, not %s%s", stub->launched, kind, wanted);
    tear_down(&s);
    stub->capability = usual, stub->only_ptx = false;
    tap_check(wrong == 0, "%s with one feature on capability %d.%d%s",
              w == BACKWARD ? "backward" : "forward", capability / 10, capability % 10,
              only_ptx ? " by PTX" : "");
}

static fattn_gpu_args args_seen; /* of the last launch */

static void watch_args(void **parameters) { args_seen = *(const fattn_gpu_args *)parameters[0]; }

/* Decoding is one launch, which counts its parts behind them in the workspace; with rows enough
 * that one block would be long at merging them, there is a second. */
static void check_merging(void)
{
    uint64_t mark = 0;
    running = "merging", wrong = 0;
    for (int m = 0; m < 4; m++) {
        scene s = {.spec = "cuda:0"};
        const bool one = m < 2;
        open_device(&s);
        s.problem = problem_of(DECODE);
        s.problem.heads_q = one ? 1 : 16;
        s.problem.seqlen_k = one ? 2048 : 1024;
        s.problem.dim = s.problem.dim_v = one ? 16 : 64;
        set_up_problem(&s);
        s.launches = stub->launches;
        stub->watch = watch_args;
        expect_ok(act_run(&s), "decoding");
        stub->watch = NULL;
        const int64_t counted = stub->launches - s.launches, end = s.workspace_bytes;
        const int64_t parts =
            fattn_gpu_parts_workspace(NULL, &args_seen.problem, &args_seen.tiling);
        expect(counted == (one ? 1 : 2), "%d launches", (int)counted);
        expect(one ? args_seen.counters == parts && parts + 8 <= end : args_seen.counters == -1,
               "counters at %lld of %lld", (long long)args_seen.counters, (long long)end);
        expect(!one || (args_seen.mark != mark && args_seen.mark + 1 > 1), "mark %llx",
               (unsigned long long)args_seen.mark);
        mark = args_seen.mark;
        tear_down(&s);
    }
    tap_check(wrong == 0, "decoding merges its parts in one launch, or two");
}

static int64_t maps_seen; /* launches that were given tensor maps */

/* Checks that the maps of q, k and v have the operands' addresses, which the stub stores first. */
static void watch_maps(void **parameters)
{
    const fattn_gpu_args *const args = parameters[0];
    const void *const wanted[] = {args->buffers.q, args->buffers.k, args->buffers.v};
    EACH (n, wanted) {
        const void *address = NULL;
        memcpy(&address, (const char *)parameters[1] + n * FATTN_GPU_MAP_BYTES, sizeof address);
        expect(address == wanted[n], "map %d is of %p, not %p", (int)n, address, wanted[n]);
    }
    maps_seen++;
}

/* Whether the build has the row and the stub a device of capability 9.0; then both are set up. */
static bool begin_maps(void)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_problem problem = problem_of(FORWARD);
    stub->capability = 90;
    setenv("FATTN_KERNEL", "wgmma_64", 1);
    fattn_env_reload();
    const bool has = fattn_device_open("cuda:0", &device) == FATTN_OK &&
                     fattn_plan_create(device, &problem, &plan) == FATTN_OK;
    fattn_plan_destroy(plan);
    fattn_device_close(device);
    return has;
}

static void end_maps(int usual)
{
    stub->capability = usual;
    unsetenv("FATTN_KERNEL");
    fattn_env_reload();
}

/* Strides that callers use; the stub refuses those that a driver would refuse. */
static void check_map_strides(void)
{
    enum { ROWS = 97, D = 40 };
    static const struct {
        const char *what;
        int64_t batch, heads, group;
        fattn_strides k; /* of k and v, in elements */
    } layouts[] = {
        {"packed rows", 3, 2, 1, {2 * ROWS * D, 2 * D, D}},
        {"heads before rows", 3, 2, 3, {2 * ROWS * D, D, ROWS * D}},
        {"keys that heads share", 3, 2, 1, {ROWS * D, D, 0}},
        {"keys that sequences share", 3, 2, 7, {0, 2 * D, D}},
        {"one of each", 1, 1, 1, {0, D, 0}},
    };
    scene s = {.spec = "cuda:0"};
    running = "strides of tensor maps", wrong = 0, maps_seen = 0;
    open_device(&s);
    expect_ok(fattn_device_malloc(s.device, OPERANDS * OPERAND, &s.operands), "memory");
    stub->watch = watch_maps;
    EACH (n, layouts) {
        fattn_plan *plan = NULL;
        fattn_problem p = problem_of(FORWARD);
        p.layout = FATTN_STRIDED;
        p.batch = layouts[n].batch;
        p.heads_k = layouts[n].heads, p.heads_q = layouts[n].heads * layouts[n].group;
        p.seqlen_q = p.seqlen_k = ROWS;
        p.dim = p.dim_v = D;
        p.q = p.o = (fattn_strides){ROWS * p.heads_q * D, p.heads_q * D, D};
        p.k = p.v = layouts[n].k;
        s.buffers = buffers_at(s.operands);
        if (expect_ok(fattn_plan_create(s.device, &p, &plan), layouts[n].what)) {
            expect_ok(fattn_execute(plan, &s.buffers, NULL, NULL), layouts[n].what);
        }
        fattn_plan_destroy(plan);
    }
    stub->watch = NULL;
    expect(maps_seen >= (int64_t)(sizeof layouts / sizeof *layouts), "%d launches", (int)maps_seen);
    tear_down(&s);
    tap_check(wrong == 0, "tensor maps of %d layouts are what a driver takes",
              (int)(sizeof layouts / sizeof *layouts));
}

/* Problems that a row with tensor maps declines, with the reason. */
static void check_map_refusals(void)
{
    static const struct {
        const char *reason;
        fattn_strides q, k;
        int64_t group;
    } cases[] = {
        {"copies no rows of stride 0", {64, 64, 0}, {0, 0, 0}, 1},
        {"copies no queries that the heads of a group share", {64, 64, 0}, {64, 64, 0}, 2},
        {"takes 128 query heads of a key/value head at most", {64 * 129, 64, 64}, {64, 64, 0}, 129},
        {"needs rows aligned to 16 bytes, not those of k", {64, 64, 64}, {68, 68, 0}, 1},
        {"copies by strides below 2^40 bytes", {64, 64, 64}, {INT64_C(1) << 39, 64, 0}, 1},
    };
    fattn_device *device = NULL;
    running = "refusals of tensor maps", wrong = 0;
    expect_ok(fattn_device_open("cuda:0", &device), "opening");
    EACH (n, cases) {
        fattn_plan *plan = NULL;
        fattn_problem p = problem_of(FORWARD);
        p.layout = FATTN_STRIDED;
        p.batch = 1, p.heads_k = 1, p.heads_q = cases[n].group;
        p.seqlen_q = 1, p.seqlen_k = 80;
        p.q = cases[n].q, p.k = p.v = cases[n].k;
        p.o = (fattn_strides){64 * cases[n].group, 64 * cases[n].group, 64};
        const fattn_status status = fattn_plan_create(device, &p, &plan);
        expect(status == FATTN_UNSUPPORTED && says(cases[n].reason), "\"%s\": %s: %s",
               cases[n].reason, fattn_status_string(status), fattn_last_reason());
        fattn_plan_destroy(plan);
    }
    fattn_device_close(device);
    tap_check(wrong == 0, "%d problems are not for tensor maps, and the reason is said",
              (int)(sizeof cases / sizeof *cases));
}

/* A device of an H100's multiprocessors, whose planner is free to choose. */
static fattn_device *open_h100(const char *what)
{
    fattn_device *device = NULL;
    running = what, wrong = 0;
    stub->units = 132;
    unsetenv("FATTN_KERNEL");
    fattn_env_reload();
    expect_ok(fattn_device_open("cuda:0", &device), "opening");
    return device;
}

static void close_h100(fattn_device *device)
{
    fattn_device_close(device);
    stub->units = 4;
}

/* What the planner chooses for the problem. */
static fattn_plan_info plan_info(fattn_device *device, const fattn_problem *p, const char *what)
{
    fattn_plan *plan = NULL;
    fattn_plan_info info = {.struct_size = sizeof info};
    expect_ok(fattn_plan_create(device, p, &plan), what);
    expect_ok(fattn_plan_get_info(plan, &info), what);
    fattn_plan_destroy(plan);
    return info;
}

/* Problems without query heads, or without any, are planned by rows that do not divide by a group;
 * those that do say so when they are named. */
static void check_without_heads(void)
{
    static const uint64_t features[] = {0, FATTN_MASK, FATTN_BIAS, FATTN_ALIBI};
    fattn_device *device = open_h100("no query heads");
    fattn_problem p = problem_of(FORWARD);
    p.layout = FATTN_BHSD;
    EACH (n, features) {
        for (int heads_k = 0; heads_k <= 2; heads_k += 2) {
            p.features = features[n];
            p.heads_q = 0, p.heads_k = heads_k;
            p.dtype_bias = features[n] & FATTN_BIAS ? p.dtype : FATTN_DTYPE_DEFAULT;
            p.mask_stride[2] = features[n] & FATTN_MASK ? 80 : 0;
            p.bias_stride[2] = features[n] & FATTN_BIAS ? 80 : 0;
            p.mask_stride[3] = p.mask_stride[2] > 0, p.bias_stride[3] = p.bias_stride[2] > 0;
            const fattn_plan_info info = plan_info(device, &p, "a plan");
            expect(info.work_items == 0, "case %d: %lld items", (int)n, (long long)info.work_items);
        }
    }
    fattn_device_close(device);
    static const char *const rows[] = {"wgmma_64", "wgmma_short_64", "wgmma_split_64",
                                       "wgmma_full_64"};
    EACH (n, rows) {
        fattn_plan *plan = NULL;
        setenv("FATTN_KERNEL", rows[n], 1);
        fattn_env_reload();
        expect_ok(fattn_device_open("cuda:0", &device), "opening");
        p.features = 0;
        p.heads_q = 0, p.heads_k = 2;
        memset(p.bias_stride, 0, sizeof p.bias_stride);
        memset(p.mask_stride, 0, sizeof p.mask_stride);
        const fattn_status status = fattn_plan_create(device, &p, &plan);
        expect(status == FATTN_UNSUPPORTED && says("takes no problem without query heads"),
               "%s: %s: %s", rows[n], fattn_status_string(status), fattn_last_reason());
        fattn_plan_destroy(plan);
        fattn_device_close(device);
    }
    unsetenv("FATTN_KERNEL");
    fattn_env_reload();
    stub->units = 4;
    tap_check(wrong == 0, "no row of Hopper takes a problem without query heads");
}

/* The rows that the planner takes for 16-bit types on an H100. */
static void check_hopper_rows(void)
{
    static const struct {
        const char *row;
        int64_t batch, heads_q, heads_k, seqlen_q, seqlen_k, dim;
        uint64_t features;
        int64_t br; /* of the tile, where the row has several */
    } cases[] = {
        {"wgmma_128", 8, 16, 16, 2048, 2048, 128, FATTN_CAUSAL, 0},
        {"wgmma_64", 8, 16, 16, 2048, 2048, 64, 0, 0},
        {"wgmma_short_64", 128, 12, 12, 197, 197, 64, 0, 0},
        {"wgmma_short_64", 32, 16, 16, 512, 512, 64, FATTN_CAUSAL, 0},
        {"wgmma_64", 32, 16, 16, 512, 512, 64, 0, 0},
        {"wgmma_short_128", 1, 32, 8, 128, 128, 128, FATTN_CAUSAL, 0},
        {"wgmma_128", 128, 16, 16, 128, 128, 128, FATTN_CAUSAL, 0}, /* many blocks */
        {"wgmma_split_64", 64, 64, 8, 16, 512, 64, 0, 0},   /* many, but tiles have 192 rows */
        {"wgmma_short_128", 8, 32, 8, 8, 512, 128, 0, 0},   /* a block for every other unit */
        {"wgmma_split_128", 1, 32, 8, 8, 768, 128, 0, 0},   /* fewer */
        {"wgmma_split_128", 64, 32, 8, 8, 512, 128, 0, 0},  /* more, of few rows */
        {"wgmma_split_128", 512, 1, 1, 100, 512, 96, 0, 0}, /* half of the tile of wgmma_96 */
        {"wgmma_short_128", 64, 32, 8, 8, 256, 128, 0, 0},  /* and few keys */
        {"wgmma_short_128", 512, 16, 16, 17, 17, 128, 0, 0},
        {"wgmma_split_128", 1, 32, 8, 256, 32768, 128, FATTN_CAUSAL, 0},
        {"wgmma_128", 1, 32, 8, 512, 32768, 128, FATTN_CAUSAL,
         0}, /* 128 blocks fill the units once, */
        {"wgmma_split_128", 1, 32, 8, 640, 32768, 128, FATTN_CAUSAL, 0}, /* 160 once and a little */
        {"wgmma_64", 1, 32, 8, 640, 16384, 64, FATTN_CAUSAL, 0}, /* 112, for a tile has more rows */
        {"wgmma_96", 1, 32, 8, 1024, 32768, 80, FATTN_CAUSAL, 0},
        {"mma_decode_wide_128", 1, 32, 8, 1, 8192, 128, 0, 0},
        {"wgmma_full_64", 8, 16, 16, 2048, 2048, 64, FATTN_BIAS, 192},
        {"wgmma_full_64", 32, 16, 16, 512, 512, 64, FATTN_MASK, 64},
        {"wgmma_full_64", 8, 16, 16, 2048, 2048, 64, FATTN_BIAS | FATTN_MASK, 128},
        {"wgmma_full_64", 8, 16, 16, 2048, 2048, 64, FATTN_SOFTCAP, 128},
        {"wgmma_full_128", 1, 16, 16, 512, 512, 128, FATTN_BIAS, 64}, /* few blocks */
        {"wgmma_full_128", 32, 16, 16, 512, 512, 128, FATTN_BIAS, 128},
        {"wgmma_full_256", 8, 16, 16, 2048, 2048, 256, FATTN_MASK, 128},
        {"wgmma_full_256", 1, 8, 8, 512, 512, 256, FATTN_BIAS, 128}, /* 32 blocks, */
        {"wgmma_full_256", 64, 8, 8, 17, 17, 256, FATTN_ALIBI, 128}, /* half of them empty, */
        {"wgmma_full_128", 64, 32, 8, 16, 300, 128, FATTN_ALIBI, 128},
        {"mma_full_128", 64, 32, 8, 16, 128, 128, FATTN_ALIBI, 0}, /* of few keys, */
        {"mma_full_128", 8, 32, 8, 16, 300, 128, FATTN_ALIBI, 0},  /* and few of them */
        {"wgmma_full_128", 256, 16, 16, 32, 32, 128, FATTN_MASK, 64},
        {"wgmma_full_64", 1, 4, 4, 2048, 2048, 64, FATTN_SOFTCAP, 128},
        {"mma_full_64", 1, 1, 1, 2048, 2048, 64, FATTN_SOFTCAP, 0},      /* 16 of many keys */
        {"mma_full_64", 1, 12, 12, 128, 1024, 64, FATTN_ALIBI, 0},       /* 12 are too few at 64, */
        {"wgmma_full_128", 1, 12, 12, 128, 1024, 128, FATTN_ALIBI, 128}, /* enough at 128 */
    };
    fattn_device *const device = open_h100("Hopper's rows");
    EACH (n, cases) {
        fattn_problem p = problem_of(FORWARD);
        p.features = cases[n].features;
        p.softcap = cases[n].features & FATTN_SOFTCAP ? 20 : 0;
        p.batch = cases[n].batch;
        p.heads_q = cases[n].heads_q, p.heads_k = cases[n].heads_k;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = cases[n].seqlen_k;
        p.dim = p.dim_v = cases[n].dim;
        p.dtype_bias = cases[n].features & FATTN_BIAS ? p.dtype : FATTN_DTYPE_DEFAULT;
        int64_t *const stride = cases[n].features & FATTN_BIAS ? p.bias_stride : p.mask_stride;
        if (cases[n].features & (FATTN_BIAS | FATTN_MASK)) {
            stride[2] = p.seqlen_k, stride[3] = 1;
        }
        const fattn_plan_info info = plan_info(device, &p, cases[n].row);
        expect(strcmp(info.kernel, cases[n].row) == 0 && (!cases[n].br || info.br == cases[n].br),
               "case %d: %s by %d, expected %s by %d", (int)n, info.kernel, (int)info.br,
               cases[n].row, (int)cases[n].br);
    }
    close_h100(device);
    tap_check(wrong == 0, "the planner takes the row that is fastest for %d problems",
              (int)(sizeof cases / sizeof *cases));
}

/* The same with as many blocks, on a device of half as many multiprocessors: 40 leave few of them
 * idle. */
static void check_half_a_device(void)
{
    static const char *const rows[] = {"wgmma_split_128", "wgmma_128"};
    fattn_problem p = problem_of(FORWARD);
    p.features = 0;
    p.batch = 1, p.heads_q = p.heads_k = 5;
    p.seqlen_q = 1024, p.seqlen_k = 2048;
    p.dim = p.dim_v = 128;
    EACH (n, rows) {
        fattn_device *device = open_h100("half of an H100");
        fattn_device_close(device);
        stub->units /= (int)n + 1;
        expect_ok(fattn_device_open("cuda:0", &device), "opening");
        const fattn_plan_info info = plan_info(device, &p, rows[n]);
        expect(strcmp(info.kernel, rows[n]) == 0, "%d multiprocessors: %s", stub->units,
               info.kernel);
        close_h100(device);
        tap_check(wrong == 0, "how many blocks pay follows from the multiprocessors, here %d",
                  132 / ((int)n + 1));
    }
}

/* Of a causal problem without keys too, a kernel before clears the counter by which items are
 * taken, whatever hides pairs. */
static void check_cleared(void)
{
    static const struct {
        uint64_t features;
        const char *before;
    } cases[] = {{0, "clear"}, {FATTN_BLOCK_MASK, "wgmma_blocks_64"}, {FATTN_ALIBI, "clear"}};
    EACH (n, cases) {
        fattn_problem p = problem_of(FORWARD);
        fattn_plan *plan = NULL;
        fattn_device *const device = open_h100("no keys");
        fattn_buffers b = buffers_at(host_memory);
        p.features = FATTN_CAUSAL | cases[n].features;
        p.batch = 1, p.heads_q = p.heads_k = 4;
        p.seqlen_q = 128, p.seqlen_k = 0;
        p.block_m = p.block_n = cases[n].features & FATTN_BLOCK_MASK ? 128 : 0;
        b.block_mask = cases[n].features & FATTN_BLOCK_MASK ? b.dout : NULL;
        b.alibi_slopes = cases[n].features & FATTN_ALIBI ? b.dout : NULL;
        b.dout = b.dq = b.dk = b.dv = NULL;
        memset(stub->launched, 0, sizeof stub->launched);
        expect_ok(fattn_plan_create(device, &p, &plan), "a plan");
        expect_ok(fattn_execute(plan, &b, NULL, NULL), "a run");
        expect(strstr(stub->launched, cases[n].before), "case %d launched %s", (int)n,
               stub->launched);
        fattn_plan_destroy(plan);
        close_h100(device);
    }
    tap_check(wrong == 0, "a kernel before clears the counter of items, also without keys");
}

/* Which row takes a packed batch, and whether a kernel before lists its sequences: this depends on
 * the longest of them, their mean and their number. */
static void check_packed_rows(void)
{
    static const struct {
        const char *row;
        int64_t batch, longest, mean, dim;
        bool orders;
    } cases[] = {
        {"wgmma_128", 8, 4096, 2048, 128, true},
        {"wgmma_128", 8, 2048, 2040, 128, false},   /* alike */
        {"wgmma_128", 513, 2048, 1024, 128, false}, /* too many */
        {"wgmma_128", 2, 2048, 1024, 128, false},   /* few items */
        {"wgmma_64", 64, 2048, 300, 64, true},
        {"wgmma_short_64", 64, 2048, 150, 64, true},
        {"wgmma_short_128", 64, 2048, 150, 128, true},
    };
    fattn_device *const device = open_h100("packed batches");
    EACH (n, cases) {
        fattn_problem p = problem_of(FORWARD);
        p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = cases[n].batch;
        p.heads_q = p.heads_k = 16;
        p.seqlen_q = p.seqlen_k = cases[n].longest;
        p.total_q = p.total_k = cases[n].mean * cases[n].batch;
        p.dim = p.dim_v = cases[n].dim;
        fattn_plan *plan = NULL;
        expect_ok(fattn_plan_create(device, &p, &plan), cases[n].row);
        const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(plan->kernel);
        fattn_gpu_shape shape = {.blocks = 0};
        kernel->phases[0](kernel, &plan->problem, &plan->tiling, &shape);
        expect(strcmp(kernel->row.name, cases[n].row) == 0 &&
                   (shape.threads > 32) == cases[n].orders,
               "case %d: %s, %d threads before", (int)n, kernel->row.name, shape.threads);
        expect(plan->tiling.workspace >= 256 + (cases[n].orders ? 16 * p.batch : 0),
               "case %d: %lld bytes", (int)n, (long long)plan->tiling.workspace);
        fattn_plan_destroy(plan);
    }
    for (int alike = 0; alike < 2; alike++) {
        fattn_problem p = problem_of(BACKWARD);
        p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = 16;
        p.heads_q = p.heads_k = 16;
        p.seqlen_q = p.seqlen_k = 2048;
        p.total_q = p.total_k = alike ? 16 * 2048 : 16 * 700;
        p.dim = p.dim_v = 128;
        fattn_plan *plan = NULL;
        expect_ok(fattn_plan_create(device, &p, &plan), "packed backward");
        const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(plan->kernel);
        fattn_gpu_shape shapes[2] = {{.blocks = 0}, {.blocks = 0}};
        kernel->phases[0](kernel, &plan->problem, &plan->tiling, &shapes[0]);
        kernel->phases[1](kernel, &plan->problem, &plan->tiling, &shapes[1]);
        const int64_t rows = alike ? p.total_q : (p.total_q / 64 + p.batch) * 64;
        expect(strcmp(kernel->row.name, "wgmma_backward_128") == 0 && shapes[0].blocks == !alike &&
                   shapes[1].blocks == p.heads_q * rows / 16,
               "%s: %lld and %lld blocks before", kernel->row.name, (long long)shapes[0].blocks,
               (long long)shapes[1].blocks);
        fattn_plan_destroy(plan);
    }
    close_h100(device);
    tap_check(wrong == 0, "rows of packed batches, and when their sequences are put in order");
}

/* Groups of 33 heads, of whose tiles of 64 rows each has one query: 2^32 of them, or a few less. */
static void check_looked_tiles(void)
{
    fattn_device *const device = open_h100("tiles that are looked at");
    for (int many = 0; many < 2; many++) {
        fattn_problem p = problem_of(FORWARD);
        p.features = FATTN_MASK | FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = many ? 8192 : 8191;
        p.heads_k = 8, p.heads_q = 8 * 33;
        p.seqlen_q = 64, p.seqlen_k = 65536;
        p.total_q = 64 * p.batch, p.total_k = 200 * p.batch;
        p.mask_stride[2] = p.seqlen_k, p.mask_stride[3] = 1;
        const char *const row = many ? "mma_full_64" : "wgmma_full_64";
        const fattn_plan_info info = plan_info(device, &p, row);
        expect(strcmp(info.kernel, row) == 0, "%lld sequences: %s by %lld", (long long)p.batch,
               info.kernel, (long long)info.br);
    }
    close_h100(device);
    tap_check(wrong == 0, "a kernel that looks at a mask counts 2^32 - 1 tiles at most");
}

/* Which tile lean backward has on an H100: that of 64 queries where a larger one would be empty for
 * the most part, or sequences are short. */
static void check_backward_rows(void)
{
    static const struct {
        const char *row;
        int64_t seqlen_q, seqlen_k, dim, mean; /* mean: of a packed batch, or 0 */
        uint64_t features;
    } cases[] = {
        {"wgmma_backward_short_64", 17, 17, 64, 0, 0},
        {"wgmma_backward_short_64", 320, 320, 64, 0, 0},
        {"wgmma_backward_64", 321, 321, 64, 0, 0},
        {"wgmma_backward_short_64", 512, 512, 64, 0, FATTN_CAUSAL},
        {"wgmma_backward_64", 512, 512, 64, 0, 0},
        {"wgmma_backward_64", 256, 2048, 64, 0, 0}, /* no row is empty, and keys are many */
        {"wgmma_backward_short_64", 192, 2048, 64, 0, FATTN_DETERMINISTIC},
        {"wgmma_backward_short_64", 2048, 512, 64, 100, FATTN_CU_SEQLENS_Q},
        {"wgmma_backward_64", 2048, 512, 64, 500, FATTN_CU_SEQLENS_Q},
        {"wgmma_backward_128", 17, 17, 72, 0, 0},
        {"wgmma_backward_256", 17, 17, 136, 0, 0},
    };
    fattn_device *const device = open_h100("rows of backward");
    EACH (n, cases) {
        fattn_problem p = problem_of(BACKWARD);
        p.features = cases[n].features;
        p.batch = 64, p.heads_q = p.heads_k = 16;
        p.seqlen_q = cases[n].seqlen_q, p.seqlen_k = cases[n].seqlen_k;
        p.total_q = cases[n].mean * p.batch;
        p.dim = p.dim_v = cases[n].dim;
        const fattn_plan_info info = plan_info(device, &p, cases[n].row);
        expect(strcmp(info.kernel, cases[n].row) == 0, "case %d: %s, expected %s", (int)n,
               info.kernel, cases[n].row);
    }
    close_h100(device);
    tap_check(wrong == 0, "rows of lean backward, in %d problems",
              (int)(sizeof cases / sizeof *cases));
}

/* Which block masks Hopper's backward takes, and where the rest goes. */
static void check_block_mask_rows(void)
{
    static const struct {
        const char *row;
        int64_t heads_k, dim, block_m, block_n, head_stride;
        uint64_t others;
    } cases[] = {
        {"wgmma_backward_full_64", 16, 64, 64, 128, 0, 0},
        {"wgmma_backward_full_128", 16, 128, 128, 128, 256, FATTN_CAUSAL},
        {"wgmma_backward_full_128", 4, 128, 128, 128, 0, 0},
        {"wgmma_backward_full_256", 16, 256, 64, 64, 0, 0},  /* tiles of a block's keys */
        {"mma_backward_full_128", 4, 128, 128, 128, 256, 0}, /* heads of a group have their own */
        {"mma_backward_full_128", 16, 128, 128, 64, 0, 0},   /* tiles are hidden in part */
        {"mma_backward_full_128", 16, 128, 128, 128, 0, FATTN_DETERMINISTIC},
        {"mma_backward_full_128", 16, 128, 128, 128, 0, FATTN_DROPOUT},
    };
    fattn_device *const device = open_h100("block masks");
    EACH (n, cases) {
        fattn_problem p = problem_of(BACKWARD);
        const int64_t stride[4] = {0, cases[n].head_stride, 16, 1};
        p.features = FATTN_BLOCK_MASK | cases[n].others;
        p.dropout_p = cases[n].others & FATTN_DROPOUT ? 0.1 : 0;
        p.batch = 8, p.heads_q = 16, p.heads_k = cases[n].heads_k;
        p.seqlen_q = p.seqlen_k = 2048;
        p.dim = p.dim_v = cases[n].dim;
        p.block_m = cases[n].block_m, p.block_n = cases[n].block_n;
        memcpy(p.block_mask_stride, stride, sizeof stride);
        const fattn_plan_info info = plan_info(device, &p, cases[n].row);
        expect(strcmp(info.kernel, cases[n].row) == 0, "case %d: %s, expected %s", (int)n,
               info.kernel, cases[n].row);
    }
    close_h100(device);
    tap_check(wrong == 0, "block masks of %d problems go to the rows that take them",
              (int)(sizeof cases / sizeof *cases));
}

/* Whether keys are cut into parts, of f32 on an H100. */
static void check_f32_splits(void)
{
    static const struct {
        int64_t batch, heads, seqlen, dim;
        uint64_t features;
        bool splits;
    } cases[] = {
        {4, 16, 512, 64, 0, false},             /* 256 blocks of 128 rows, two a multiprocessor */
        {2, 16, 1024, 64, 0, false},            /* 256 */
        {1, 8, 2048, 128, 0, false},            /* 128, one a multiprocessor */
        {1, 8, 512, 64, 0, true},               /* 32 */
        {1, 4, 1024, 128, 0, true},             /* 32 */
        {4, 16, 512, 64, FATTN_SOFTCAP, false}, /* 512 of 64 rows, of simt_wide_64 */
        {1, 16, 512, 64, FATTN_SOFTCAP, true},  /* 128 */
    };
    fattn_device *const device = open_h100("parts of f32");
    EACH (n, cases) {
        fattn_problem p = problem_of(FORWARD);
        p.dtype = FATTN_F32;
        p.features = cases[n].features;
        p.softcap = cases[n].features & FATTN_SOFTCAP ? 20 : 0;
        p.batch = cases[n].batch;
        p.heads_q = p.heads_k = cases[n].heads;
        p.seqlen_q = p.seqlen_k = cases[n].seqlen;
        p.dim = p.dim_v = cases[n].dim;
        const fattn_plan_info info = plan_info(device, &p, "a case");
        expect((info.splits > 1) == cases[n].splits, "case %d: %s, %d parts", (int)n, info.kernel,
               (int)info.splits);
    }
    close_h100(device);
    tap_check(wrong == 0, "f32 cuts keys where blocks leave multiprocessors idle, and only there");
}

/* Returns whether the build has a row with tensor maps. */
static bool check_maps(void)
{
    const int usual = stub->capability;
    const failure f = {.result = STUB_LAUNCH_FAILED};
    const bool has = begin_maps();
    if (has) {
        EACH (n, map_acts) {
            check_act(&map_acts[n], "cuda:0", f, "capability 9.0");
        }
        check_map_strides();
        check_map_refusals();
        check_without_heads();
        check_hopper_rows();
        check_half_a_device();
        check_cleared();
        check_packed_rows();
        check_looked_tiles();
        check_backward_rows();
        check_block_mask_rows();
        check_resident_clusters();
        check_f32_splits();
    } else {
        tap_skip("tensor maps", fattn_last_reason());
    }
    end_maps(usual);
    return has;
}

/* Driver results with their own status, and one that a driver older than the images returns. */
static void check_statuses(void)
{
    static const struct {
        int result;
        fattn_status status;
        const char *words;
    } rows[] = {
        {STUB_NO_DEVICE, FATTN_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {STUB_NO_IMAGE, FATTN_UNSUPPORTED, "no code for a device"},
        {STUB_OUT_OF_MEMORY, FATTN_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {STUB_OLD_DRIVER, FATTN_DEVICE_ERROR, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
        {12345, FATTN_DEVICE_ERROR, "12345"}, /* a number that the driver has no name for */
    };
    running = "statuses", wrong = 0;
    EACH (r, rows) {
        fattn_device *device = NULL;
        stub->calls = 0, stub->fail_at = 0;
        expect_ok(fattn_device_open("cuda", &device), "opening");
        int64_t load = 0;
        while (load < stub->calls && strcmp(stub->log[load], "cuModuleLoadData") != 0) {
            load++;
        }
        fattn_device_close(device);
        stub->fail_at = load + 1, stub->fail_with = rows[r].result;
        const fattn_status status = fattn_device_open("cuda", &device);
        stub->fail_at = 0;
        expect(status == rows[r].status && !device && says(rows[r].words), "%d gives %s: %s",
               rows[r].result, fattn_status_string(status), fattn_last_reason());
        fattn_device_close(device);
    }
    tap_check(wrong == 0, "a driver's results become statuses");
}

/* -------------------------------------------------------------------------------------------------
 * Contexts and streams
 * ---------------------------------------------------------------------------------------------- */

/* Two devices of one GPU, each opened in its own context. The stub refuses a launch whose function,
 * stream and context do not match. Then the streams are exchanged. */
static void check_two_contexts(void)
{
    gpu_context contexts[2] = {NULL, NULL};
    scene scenes[2] = {{.spec = "cuda:0"}, {.spec = "cuda:0"}};
    running = "two contexts", wrong = 0;
    for (int n = 0; n < 2; n++) {
        cuda->context_create(&contexts[n], 0, 0);
        set_up(&scenes[n], BACKWARD, 0);
        cuda->context_set(NULL);
    }
    for (int turn = 0; turn < 6; turn++) {
        gpu_context now = NULL;
        cuda->context_set(turn % 3 < 2 ? contexts[turn % 3] : NULL);
        expect_ok(act_run(&scenes[turn % 2]), "a run in its context");
        cuda->context_get(&now);
        expect(now == (turn % 3 < 2 ? contexts[turn % 3] : NULL), "the context changed");
    }
    const int64_t launches = stub->launches;
    const fattn_status status =
        fattn_execute(scenes[0].plan, &scenes[0].buffers, scenes[0].workspace, scenes[1].stream);
    expect(status == FATTN_INVALID_ARGUMENT && says("another context"),
           "a stream of another context: %s: %s", fattn_status_string(status), fattn_last_reason());
    expect(stub->launches == launches, "kernels were launched all the same");
    for (int n = 0; n < 2; n++) {
        tear_down(&scenes[n]);
        cuda->context_destroy(contexts[n]);
    }
    tap_check(wrong == 0, "hazard_I1: two contexts on one device do not mix");
}

/* Several threads plan for and run on one device, each in its own context. */
enum { THREADS = 4, TURNS = 20 };

typedef struct thread {
    fattn_device *device;
    gpu_context context; /* that the caller works in, or NULL */
    int wrong;
} thread;

static void *work_aside(void *argument)
{
    thread *const t = argument;
    const fattn_buffers staged = buffers_at(host_memory);
    if (t->context) {
        cuda->context_set(t->context);
    }
    for (int turn = 0; turn < TURNS; turn++) {
        const fattn_problem problem = problem_of((work)(turn % WORKS));
        fattn_plan *plan = NULL;
        fattn_stream stream = NULL;
        void *memory = NULL;
        gpu_context now = NULL;
        fattn_status status = fattn_plan_create(t->device, &problem, &plan);
        status = status ? status : fattn_stream_create(t->device, &stream);
        status = status ? status : fattn_device_malloc(t->device, OPERANDS * OPERAND, &memory);
        const fattn_buffers buffers = buffers_at(memory);
        status = status ? status : fattn_execute(plan, &buffers, NULL, stream);
        status = status ? status : fattn_attention(t->device, &problem, &staged, NULL);
        fattn_plan_destroy(plan);
        fattn_stream_destroy(t->device, stream);
        fattn_device_free(t->device, memory);
        cuda->context_get(&now);
        t->wrong += status != FATTN_OK || now != t->context;
    }
    return NULL;
}

static void check_threads(void)
{
    int64_t alive[STUB_KINDS];
    gpu_context other = NULL;
    fattn_device *device = NULL;
    pthread_t threads[THREADS];
    thread workers[THREADS];
    running = "threads", wrong = 0;
    memcpy(alive, stub->alive, sizeof alive);
    cuda->context_create(&other, 0, 1);
    cuda->context_set(NULL);
    expect_ok(fattn_device_open("cuda", &device), "opening");
    for (int n = 0; n < THREADS; n++) {
        workers[n] = (thread){.device = device, .context = n % 2 ? other : NULL};
        expect(!pthread_create(&threads[n], NULL, work_aside, &workers[n]), "no thread %d", n);
    }
    for (int n = 0; n < THREADS; n++) {
        pthread_join(threads[n], NULL);
        expect(workers[n].wrong == 0, "thread %d: %d of %d turns", n, workers[n].wrong, TURNS);
    }
    fattn_cache_clear();
    fattn_device_close(device);
    cuda->context_destroy(other);
    for (int kind = 0; kind < STUB_KINDS; kind++) {
        expect(stub->alive[kind] == alive[kind], "%lld of kind %d are alive, %lld were before",
               (long long)stub->alive[kind], kind, (long long)alive[kind]);
    }
    tap_check(wrong == 0, "threads share a device, whatever their contexts");
}

/* The only calls that are allowed while a caller captures a run. */
static void expect_capturable(const char *what)
{
    static const char *const allowed[] = {"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",
                                          "cuStreamGetCtx",      "cuLaunchKernel",
                                          "cuLaunchKernelEx",    "cuTensorMapReplaceAddress"};
    for (int64_t n = 0; n < stub->calls; n++) {
        bool good = false;
        EACH (a, allowed) {
            good = good || strcmp(stub->log[n], allowed[a]) == 0;
        }
        expect(good, "%s: %s", what, stub->log[n]);
    }
}

/* Captures the act on the scene's stream. Returns whether there is a graph. */
static bool capture(scene *s, fattn_status (*what)(scene *s), fattn_status *status)
{
    gpu_context context = NULL;
    driver_graph graph = NULL;
    cuda->primary_retain(&context, 0);
    cuda->context_set(context);
    s->launches = stub->launches;
    expect(cuda->capture_begin(s->stream, 0) == 0, "capturing did not begin");
    stub->calls = 0;
    *status = what(s);
    const int64_t calls = stub->calls;
    const bool made = cuda->capture_end(s->stream, &graph) == 0 && graph;
    cuda->context_set(NULL);
    cuda->primary_release(0);
    stub->calls = calls; /* the log of the act alone */
    return made;
}

static fattn_status run_default_stream(scene *s)
{
    return fattn_execute(s->plan, &s->buffers, s->workspace, NULL);
}

static void check_capture(work w)
{
    static const struct {
        const char *name;
        fattn_status (*act)(scene *s);
        bool captured; /* else an error */
    } rows[] = {
        {"a run", act_run, true},
        {"a merge", act_merge, true},
        {"a dropout mask", act_dropout_mask, true},
        {"a run without a workspace", act_run_allocating, false},
        {"a run on the default stream", run_default_stream, false},
    };
    running = work_names[w], wrong = 0;
    EACH (r, rows) {
        const int64_t memory = stub->alive[STUB_MEMORY];
        fattn_status status = FATTN_OK;
        scene s = {.spec = "cuda:0"};
        set_up(&s, w, 0);
        const bool made = capture(&s, rows[r].act, &status);
        if (rows[r].captured || (rows[r].act == act_run_allocating && s.workspace_bytes == 0)) {
            expect_ok(status, rows[r].name);
            expect_capturable(rows[r].name);
            expect(made, "%s: no graph", rows[r].name);
        } else {
            expect(status != FATTN_OK && says("CAPTURE"), "%s: %s: %s", rows[r].name,
                   fattn_status_string(status), fattn_last_reason());
        }
        tear_down(&s);
        expect(stub->alive[STUB_MEMORY] == memory, "%s: memory leaks", rows[r].name);
    }
    scene s = {.spec = "cuda:0"};
    fattn_status status = FATTN_OK;
    set_up(&s, w, FATTN_CHECKED | FATTN_SEQUSED_K);
    capture(&s, act_run, &status);
    expect(status == FATTN_INVALID_ARGUMENT && says("FATTN_CHECKED"),
           "FATTN_CHECKED waits, and was captured: %s", fattn_status_string(status));
    tear_down(&s);
    tap_check(wrong == 0, "%s is captured into a graph, or refuses", work_names[w]);
}

/* -------------------------------------------------------------------------------------------------
 * Operands from host memory
 * ---------------------------------------------------------------------------------------------- */

static int64_t watched; /* operands that kernels were given */

/* Checks that every non-empty operand of the problem is in device memory. */
static void watch_operands(void **parameters)
{
    const fattn_gpu_args *const args = parameters[0];
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(&args->problem, &args->buffers, operands);
    for (int n = 0; n < count; n++) {
        const void *const base = (const void *)operands[n].region.base;
        if (base && !fattn_region_is_empty(&operands[n].region)) {
            expect(cuda->stub_owns(base), "%s is host memory", operands[n].name);
            watched++;
        }
    }
}

static void watch_dbias(void **parameters)
{
    const fattn_gpu_args *const args = parameters[0];
    expect(cuda->stub_owns(args->buffers.dbias), "dbias is host memory");
    watched++;
}

/* Random problems run on a device of this compute capability, which has less shared memory per
 * block than others; features that no GPU kernel honours are refused. */
static void check_staging(int capability)
{
    enum { CASES = 300 };
    const int usual = stub->capability;
    fattn_device *device = NULL;
    running = "staging", wrong = 0, watched = 0;
    stub->capability = capability;
    if (fattn_device_open("cuda", &device)) {
        tap_skip("every operand is copied to a device of capability 8.6", fattn_last_reason());
        stub->capability = usual;
        return;
    }
    stub->watch = watch_operands;
    for (int64_t index = 0; index < CASES; index++) {
        draw_case c;
        if (expect(!draw_problem(&c, 5, index) && !draw_build(&c), "no memory") &&
            c.problem.dtype != FATTN_F64) { /* which is the reference's */
            const fattn_status status = fattn_attention(device, &c.problem, &c.buffers, NULL);
            const bool mixed = c.problem.dtype_kv || c.problem.dtype_v || c.problem.dtype_bias;
            if (c.problem.features & ~FATTN_KERNEL_LAST) {
                expect(status == FATTN_UNSUPPORTED, "a feature that no GPU kernel honours");
            } else if (mixed && status == FATTN_UNSUPPORTED) {
                expect(says("q, k and v of one type") || says("no bias in"), "types");
            } else {
                expect_ok(status, "a drawn problem");
            }
        }
        draw_free(&c);
    }
    stub->watch = NULL;
    fattn_cache_clear();
    fattn_device_close(device);
    stub->capability = usual;
    expect(watched > 10 * CASES, "%d operands in all", (int)watched);
    tap_check(wrong == 0, "every operand of %d problems is copied to a device of capability %d.%d",
              CASES, capability / 10, capability % 10);
}

/* dbias has memory even if a summed axis is empty. */
static void check_empty_axes(void)
{
    fattn_device *device = NULL;
    running = "empty axes";
    expect_ok(fattn_device_open("cuda", &device), "opening");
    wrong = 0, watched = 0;
    stub->watch = watch_dbias;
    for (int axis = 0; axis < 4; axis++) {
        fattn_problem p = problem_of(BACKWARD);
        fattn_buffers buffers = buffers_at(host_memory);
        int64_t *const empty[] = {&p.batch, NULL, &p.seqlen_q, &p.seqlen_k};
        p.features = FATTN_BIAS;
        p.outputs = FATTN_OUT_DBIAS;
        if (empty[axis]) {
            *empty[axis] = 0;
        }
        buffers.bias = buffers.dq, buffers.dbias = buffers.dk;
        expect_ok(fattn_attention(device, &p, &buffers, NULL), "an empty axis");
        buffers.dbias = NULL;
        expect(fattn_attention(device, &p, &buffers, NULL) == FATTN_NULL_POINTER && says("dbias"),
               "dbias NULL: %s", fattn_last_reason());
    }
    stub->watch = NULL;
    expect(watched >= 4, "dbias was not written");
    fattn_cache_clear();
    fattn_device_close(device);
    tap_check(wrong == 0, "dbias is written where it is summed over nothing");
}

/* The workspace is allocated once and kept; q, k, v and o are copied in each call. */
static void check_one_shot_memory(void)
{
    const fattn_problem problem = problem_of(DECODE);
    const fattn_buffers buffers = buffers_at(host_memory);
    fattn_device *device = NULL;
    running = "one shot", wrong = 0;
    expect_ok(fattn_device_open("cuda", &device), "opening");
    for (int turn = 0; turn < 3; turn++) {
        int made = 0;
        stub->calls = 0;
        expect_ok(fattn_attention(device, &problem, &buffers, NULL), "decoding");
        for (int64_t n = 0; n < stub->calls; n++) {
            made += strcmp(stub->log[n], "cuMemAlloc_v2") == 0;
        }
        expect(made == (turn ? 4 : 5), "call %d allocates %d times", turn, made);
    }
    fattn_cache_clear();
    fattn_device_close(device);
    tap_check(wrong == 0, "one shot from host memory keeps its workspace");
}

/* -------------------------------------------------------------------------------------------------
 * Workspaces of the one-shot call, which come back while a GPU still uses them
 * ---------------------------------------------------------------------------------------------- */

enum { WORKSPACES_SEEN = 64 };

/* The workspace of each launch. */
static struct {
    const void *workspaces[WORKSPACES_SEEN]; /* all that were seen */
    int count;
    const void *last;
    int64_t unordered; /* launches that do not follow what used their workspace before */
} seen;

/* Launches of one call are on one stream, so every launch is checked. */
static void watch_workspace(void **parameters)
{
    const fattn_gpu_args *const args = parameters[0];
    int n = 0;
    seen.last = args->workspace;
    seen.unordered += args->workspace && !cuda->stub_follows(args->workspace);
    while (n < seen.count && seen.workspaces[n] != args->workspace) {
        n++;
    }
    if (n == seen.count && n < WORKSPACES_SEEN) {
        seen.workspaces[seen.count++] = args->workspace;
    }
}

static void begin_watch(scene *s)
{
    memset(&seen, 0, sizeof seen);
    fattn_cache_clear();
    set_up(s, DECODE, 0);
    stub->watch = watch_workspace;
    stub->freed_in_use = 0;
}

/* most: workspaces that may have been made. */
static void end_watch(scene *s, int most, const char *what)
{
    stub->watch = NULL;
    expect(seen.count > 0 && seen.count <= most, "%d workspaces, at most %d", seen.count, most);
    expect(seen.unordered == 0, "%d launches do not follow the last use of their workspace",
           (int)seen.unordered);
    tear_down(s);
    expect(stub->freed_in_use == 0, "%d workspaces were freed in use", (int)stub->freed_in_use);
    tap_check(wrong == 0, "one shot: %s", what);
}

static void attend(const scene *s, fattn_stream stream)
{
    expect_ok(fattn_attention(s->device, &s->problem, &s->buffers, stream), "a call");
}

static int calls_of(const char *name)
{
    int count = 0;
    for (int64_t n = 0; n < stub->calls; n++) {
        count += strcmp(stub->log[n], name) == 0;
    }
    return count;
}

/* Each stream gets a workspace, up to four; after that nothing is allocated, waited for or
 * freed. */
static void check_streams(int count, const char *what)
{
    scene s = {.spec = "cuda:0"};
    fattn_stream streams[8];
    running = what, wrong = 0;
    begin_watch(&s);
    for (int n = 0; n < count; n++) {
        expect_ok(fattn_stream_create(s.device, &streams[n]), "a stream");
    }
    for (int turn = 0; turn < 5 * count; turn++) {
        stub->calls = turn == count ? 0 : stub->calls;
        attend(&s, streams[turn % count]);
    }
    expect(calls_of("cuMemAlloc_v2") + calls_of("cuMemFree_v2") + calls_of("cuStreamSynchronize") +
                   calls_of("cuEventSynchronize") ==
               0,
           "calls after the first round allocate, wait or free");
    for (int n = 0; n < count; n++) {
        fattn_stream_destroy(s.device, streams[n]);
    }
    expect(seen.count == (count < 4 ? count : 4), "%d workspaces", seen.count);
    end_watch(&s, WORKSPACES_SEEN, what);
}

/* A new stream reuses the handle of the destroyed one. */
static void check_handles(void)
{
    scene s = {.spec = "cuda:0"};
    fattn_stream stream = NULL, before = NULL;
    running = "handles of destroyed streams", wrong = 0;
    begin_watch(&s);
    for (int turn = 0; turn < 5; turn++) {
        expect_ok(fattn_stream_create(s.device, &stream), "a stream");
        expect(!turn || stream == before, "the stub gives another handle");
        attend(&s, stream);
        before = stream;
        fattn_stream_destroy(s.device, stream);
    }
    end_watch(&s, 1, running);
}

static void *attend_aside(void *argument)
{
    attend(argument, (fattn_stream)(uintptr_t)FATTN_STREAM_PER_THREAD);
    return NULL;
}

/* One handle that denotes a different stream in each thread. */
static void check_thread_streams(void)
{
    scene s = {.spec = "cuda:0"};
    running = "the stream of each thread", wrong = 0;
    begin_watch(&s);
    for (int turn = 0; turn < 12; turn++) {
        pthread_t other;
        expect(!pthread_create(&other, NULL, attend_aside, &s), "no thread");
        pthread_join(other, NULL);
        attend_aside(&s);
        attend(&s, NULL);
        attend(&s, (fattn_stream)(uintptr_t)1);
    }
    end_watch(&s, 4, running);
}

/* An event of one stream delays another; the stub detects unordered work on one memory. */
static void check_event_order(void)
{
    scene s = {.spec = "cuda:0"};
    fattn_stream other = NULL;
    running = "events", wrong = 0;
    begin_watch(&s);
    expect_ok(fattn_stream_create(s.device, &other), "a stream");
    expect_ok(fattn_event_create(s.device, &s.events[0]), "an event");
    expect_ok(fattn_event_wait(s.events[0], other), "waiting for an event that was not recorded");
    expect_ok(act_run(&s), "a run");
    expect_ok(fattn_event_record(s.events[0], s.stream), "recording");
    expect_ok(fattn_event_wait(s.events[0], other), "waiting");
    expect_ok(fattn_execute(s.plan, &s.buffers, s.workspace, other), "a run elsewhere");
    expect(seen.unordered == 0, "the second run does not follow the first");
    expect_ok(fattn_execute(s.plan, &s.buffers, s.workspace, s.stream), "a run without waiting");
    expect(seen.unordered > 0, "the stub does not see that the third does not follow the second");
    seen.unordered = 0;
    expect_ok(fattn_event_record(s.events[0], other), "recording");
    expect_ok(fattn_event_synchronize(s.events[0]), "waiting on the host");
    expect_ok(fattn_stream_synchronize(s.device, s.stream), "waiting on the host");
    expect_ok(fattn_execute(s.plan, &s.buffers, s.workspace, NULL), "a run after both");
    expect(fattn_event_wait(NULL, other) == FATTN_NULL_POINTER, "event NULL");
    expect(fattn_event_synchronize(NULL) == FATTN_NULL_POINTER, "event NULL");
    fattn_stream_destroy(s.device, other);
    stub->watch = NULL;
    tear_down(&s);
    tap_check(wrong == 0 && seen.unordered == 0, "a stream waits for another's event");
}

/* Messages between two devices of one process (fattn_peers). Before each message one side's stream
 * writes what is sent and the other's reads what was received last; after it both do so again.
 * first: the side that starts first, 0: the sender. */
static void exchange(fattn_device *const devices[2], const fattn_stream streams[2],
                     fattn_transport *const transports[2], char *const memory[2], int sender,
                     int first)
{
    enum { BYTES = 64 };
    static char host[BYTES], received[BYTES];
    fattn_message m[2];
    memset(host, 1 + sender + 2 * first + (host[0] & 64 ? 0 : 64), sizeof host);
    for (int side = 0; side < 2; side++) {
        const int rank = side ? !sender : sender;
        m[side] = (fattn_message){
            .peer = !rank, .tag = 2, .receive = side, .data = memory[rank], .bytes = BYTES};
    }
    for (int after = 0; after < 2; after++) {
        expect_ok(fattn_device_copy(devices[sender], m[0].data, host, BYTES, streams[sender]),
                  "writing");
        expect_ok(fattn_device_copy(devices[!sender], received, m[1].data, BYTES, streams[!sender]),
                  "reading");
        for (int n = 0; n < 2 && !after; n++) {
            const int side = n ? !first : first;
            const fattn_transport *const t = transports[side ? !sender : sender];
            expect_ok(t->start(t->user, &m[side], 1), "starting");
        }
        for (int side = 1; side >= 0 && !after; side--) { /* the receiver first */
            const fattn_transport *const t = transports[side ? !sender : sender];
            expect_ok(t->wait(t->user, &m[side], 1, 10), "waiting");
        }
    }
    expect(memcmp(received, host, BYTES) == 0, "another message has arrived");
}

static void check_peers(void)
{
    fattn_device *devices[2] = {NULL, NULL};
    fattn_stream streams[2] = {NULL, NULL};
    fattn_transport *transports[2] = {NULL, NULL};
    fattn_peers *peers = NULL;
    void *memory[2] = {NULL, NULL};
    running = "peers", wrong = 0;
    expect_ok(fattn_peers_create(2, &peers), "peers");
    const int64_t reaches = stub->reaches, disordered = stub->disordered;
    for (int r = 0; r < 2; r++) {
        expect_ok(fattn_device_open(r ? "cuda:1" : "cuda:0", &devices[r]), "opening");
        expect_ok(fattn_stream_create(devices[r], &streams[r]), "a stream");
        expect_ok(fattn_device_malloc(devices[r], 64, &memory[r]), "memory");
        expect_ok(fattn_peers_open(peers, r, devices[r], streams[r], &transports[r]), "joining");
    }
    expect(stub->reaches - reaches == 2, "%d devices reach the other's memory",
           (int)(stub->reaches - reaches));
    for (int n = 0; n < 8 && wrong == 0; n++) {
        exchange(devices, streams, transports, (char *const[2]){memory[0], memory[1]}, n & 1,
                 n >> 1 & 1);
    }
    const int64_t unordered = stub->disordered - disordered;
    for (int r = 0; r < 2; r++) {
        fattn_peers_close(transports[r]);
        expect_ok(fattn_device_free(devices[r], memory[r]), "freeing");
        expect_ok(fattn_stream_destroy(devices[r], streams[r]), "a stream");
        fattn_device_close(devices[r]);
    }
    fattn_peers_destroy(peers);
    tap_check(wrong == 0 && unordered == 0,
              "copies between devices wait for what both have queued, and both for the copies");
}

/* Begins a capture of the scene's stream, in which no thread may make an unsafe call. */
static void capture_begin(const scene *s, gpu_context *context)
{
    cuda->primary_retain(context, 0);
    cuda->context_set(*context);
    expect(cuda->capture_begin(s->stream, 0) == 0, "capturing did not begin");
}

static void capture_end(const scene *s)
{
    driver_graph graph = NULL;
    expect(cuda->capture_end(s->stream, &graph) == 0 && graph, "there is no graph");
    cuda->context_set(NULL);
    cuda->primary_release(0);
}

/* Calls of a capture share a workspace, and no other call gets it: not during the capture, not
 * later, not after the cache was emptied. warm: plan and workspace existed before. */
static void check_captured(bool warm)
{
    scene s = {.spec = "cuda:0"};
    fattn_stream side = NULL;
    fattn_event *fork = NULL;
    gpu_context context = NULL;
    fattn_cache_info before = {.struct_size = sizeof before}, after = before;
    running = warm ? "a warm capture" : "a cold capture", wrong = 0;
    begin_watch(&s);
    expect_ok(fattn_stream_create(s.device, &side), "a stream");
    expect_ok(fattn_event_create(s.device, &fork), "an event");
    fattn_cache_get_info(&before);
    if (warm) {
        attend(&s, NULL);
    }
    const void *const outside = seen.last;
    capture_begin(&s, &context);
    attend(&s, s.stream);
    const void *const owned = seen.last;
    attend(&s, s.stream);
    expect(seen.last == owned && owned != outside, "two calls of a capture have two workspaces");
    expect_ok(fattn_event_record(fork, s.stream), "recording");
    expect_ok(fattn_event_wait(fork, side), "the other stream joins the capture");
    attend(&s, side);
    expect(seen.last == owned, "a call on a stream that joined has another workspace");
    expect_ok(fattn_event_record(fork, side), "recording");
    expect_ok(fattn_event_wait(fork, s.stream), "the streams join again");
    fattn_stream third = NULL;
    expect_ok(fattn_stream_create(s.device, &third), "a stream");
    attend(&s, third);
    expect(seen.last != owned, "a call beside the capture has its workspace");
    const fattn_buffers staged = buffers_at(host_memory);
    expect(fattn_attention(s.device, &s.problem, &staged, s.stream) == FATTN_INVALID_ARGUMENT &&
               says("captured"),
           "host memory under a capture: %s", fattn_last_reason());
    capture_end(&s);
    const int64_t bytes = s.workspace_bytes;
    fattn_cache_get_info(&after);
    expect(after.graph_bytes == before.graph_bytes + bytes && after.bytes >= bytes,
           "graphs own %d bytes more", (int)(after.graph_bytes - before.graph_bytes));
    capture_begin(&s, &context);
    attend(&s, s.stream);
    expect(seen.last != owned, "a capture of the same plan has the workspace of the first");
    capture_end(&s);
    for (int turn = 0; turn < 3; turn++) {
        attend(&s, s.stream);
        expect(seen.last != owned, "a call after the capture has its workspace");
        attend(&s, side);
        expect(seen.last != owned, "a call after the capture has its workspace");
        if (turn == 1) {
            fattn_cache_clear();
            expect(cuda->stub_owns(owned), "the graph's workspace was freed");
        }
    }
    capture_begin(&s, &context);
    attend(&s, s.stream);
    expect(seen.last != owned, "a capture of a later plan has the workspace of the first");
    capture_end(&s);
    fattn_event_destroy(fork);
    fattn_stream_destroy(s.device, side);
    fattn_stream_destroy(s.device, third);
    end_watch(&s, WORKSPACES_SEEN, running);
}

/* The cache respects its limits on bytes and plans. */
static void check_limits(void)
{
    scene s = {.spec = "cuda:0"};
    fattn_cache_options options;
    fattn_cache_info info = {.struct_size = sizeof info}, start;
    running = "limits", wrong = 0;
    begin_watch(&s);
    fattn_cache_get_info(&info);
    start = info;
    fattn_cache_options_init(&options);
    options.bytes = s.workspace_bytes;
    expect_ok(fattn_cache_set_options(&options), "one workspace");
    attend(&s, NULL);
    attend(&s, s.stream); /* another workspace: the first is given up for it */
    fattn_cache_get_info(&info);
    expect(info.bytes == s.workspace_bytes && info.entries == 1, "%d bytes in %d entries",
           (int)info.bytes, (int)info.entries);
    expect(info.hits == start.hits + 1 && info.misses == start.misses + 1 &&
               info.allocations == start.allocations + 2,
           "hits %d, misses %d, allocations %d", (int)info.hits, (int)info.misses,
           (int)info.allocations);
    options.bytes = s.workspace_bytes - 1;
    expect_ok(fattn_cache_set_options(&options), "less than one");
    fattn_cache_get_info(&info);
    expect(info.bytes == 0, "%d bytes, 0 expected", (int)info.bytes);
    for (int turn = 0; turn < 3; turn++) {
        attend(&s, s.stream);
        fattn_cache_get_info(&info);
        expect(info.bytes == 0 && stub->freed_in_use == 0, "%d bytes", (int)info.bytes);
    }
    options.entries = 0;
    expect_ok(fattn_cache_set_options(&options), "nothing");
    attend(&s, s.stream);
    fattn_cache_get_info(&info);
    expect(info.bytes == 0 && info.entries == 0, "%d bytes in %d entries", (int)info.bytes,
           (int)info.entries);
    fattn_cache_options_init(&options);
    expect_ok(fattn_cache_set_options(&options), "the defaults");
    end_watch(&s, WORKSPACES_SEEN, "no more than is allowed is kept");
}

/* When memory runs out, idle workspaces are freed first. */
static void check_shortage(void)
{
    scene s = {.spec = "cuda:0"};
    running = "a shortage", wrong = 0;
    begin_watch(&s);
    attend(&s, NULL);
    stub->calls = 0, stub->fail_with = STUB_OUT_OF_MEMORY;
    attend(&s, s.stream);
    int64_t alloc = 1;
    while (alloc <= stub->calls && strcmp(stub->log[alloc - 1], "cuMemAlloc_v2") != 0) {
        alloc++;
    }
    fattn_cache_clear();
    attend(&s, NULL);
    stub->calls = 0, stub->fired = false, stub->fail_at = alloc;
    attend(&s, s.stream);
    expect(stub->fired && calls_of("cuMemAlloc_v2") == 2 && calls_of("cuMemFree_v2") == 1,
           "%d allocations, %d freed", calls_of("cuMemAlloc_v2"), calls_of("cuMemFree_v2"));
    stub->fail_at = 0;
    end_watch(&s, WORKSPACES_SEEN, "what is idle is given back when memory runs out");
}

/* A copy of lengths that is on its way when memory for another runs out is waited for. */
static void check_checked_shortage(void)
{
    scene s = {.spec = "cuda:0"};
    bool failed = true;
    int n = 0;
    running = "FATTN_CHECKED and no memory", wrong = 0;
    set_up(&s, FORWARD, FATTN_CHECKED | FATTN_SEQUSED_Q | FATTN_SEQUSED_K);
    s.buffers.seqused_q = s.buffers.seqused_k;
    while (failed) {
        stub->calls = 0;
        (void)fattn_memory_fail_at(++n);
        const fattn_status status = fattn_execute(s.plan, &s.buffers, s.workspace, s.stream);
        failed = fattn_memory_fail_at(0);
        expect(status == (failed ? FATTN_OUT_OF_MEMORY : FATTN_OK) &&
                   calls_of("cuMemcpyAsync") == n - 1 && calls_of("cuStreamSynchronize") == 1,
               "allocation %d: %s, %d copies, waited %d times", n, fattn_status_string(status),
               calls_of("cuMemcpyAsync"), calls_of("cuStreamSynchronize"));
    }
    expect(n == 3, "%d allocations", n - 1);
    tear_down(&s);
    tap_check(wrong == 0, "copies are waited for before their memory is freed");
}

/* A ragged batch may have more rows, counted as if all its sequences were as long as the longest
 * may be, than 63 bits can say. */
static void check_counts(void)
{
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_BF16};
    fattn_device *const device = open_h100("counts of rows");
    EACH (n, dtypes) {
        fattn_plan *plan = NULL;
        fattn_problem p = problem_of(BACKWARD);
        p.dtype = dtypes[n];
        p.features = FATTN_CU_SEQLENS_Q | FATTN_CU_SEQLENS_K;
        p.batch = INT64_C(1) << 29, p.heads_q = p.heads_k = 128;
        p.seqlen_q = p.total_q = p.total_k = INT32_MAX, p.seqlen_k = 1;
        const fattn_status status = fattn_plan_create(device, &p, &plan);
        expect(status == FATTN_OVERFLOW, "%d: %s, %s", (int)n, fattn_status_string(status),
               status ? fattn_last_reason() : plan->kernel->name);
        fattn_plan_destroy(plan);
    }
    close_h100(device);
    tap_check(wrong == 0, "rows that cannot be counted are refused");
}

/* -------------------------------------------------------------------------------------------------
 * Drivers that lack something: each in a process of its own, since a driver is opened once
 * ---------------------------------------------------------------------------------------------- */

/* Driver functions that backend "cuda" requires. */
static const char *const functions[] = {
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxEnablePeerAccess",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyAsync",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamGetCtx",
    "cuStreamWaitEvent",
    "cuStreamGetCaptureInfo",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventElapsedTime",
};

/* Without a usable driver: asking for it by name or by FATTN_BACKEND is an error that says why, the
 * device count is 0, and "auto" takes the next backend. */
static void expect_no_driver(const char *why)
{
    fattn_device *device = NULL;
    expect(fattn_device_count("cuda") == 0, "%d devices", fattn_device_count("cuda"));
    static const char *const specs[] = {"cuda", "cuda:1", NULL};
    setenv("FATTN_BACKEND", "cuda", 1);
    fattn_env_reload();
    EACH (n, specs) {
        const fattn_status status = fattn_device_open(specs[n], &device);
        expect(status == FATTN_NO_DEVICE && !device && says(why), "%s, expected \"%s\": %s",
               fattn_status_string(status), why, fattn_last_reason());
    }
    unsetenv("FATTN_BACKEND");
    fattn_env_reload();
    fattn_device_info info = {.struct_size = sizeof info};
    expect_ok(fattn_device_open("auto", &device), "auto");
    expect_ok(fattn_device_get_info(device, &info), "auto");
    expect(strcmp(info.backend, "cpu") == 0, "auto takes %s", info.backend);
    fattn_device_close(device);
}

/* Exit statuses of a child that finds the system's driver, and of one that this machine runs only
 * through the emulator of this program. */
enum { ANOTHER_DRIVER = 77, FOREIGN = 126 };

/* A row that needs tensor maps reports that the driver has none. */
static void expect_no_maps(const char *why)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_problem problem = problem_of(FORWARD);
    stub->capability = 90;
    setenv("FATTN_KERNEL", "wgmma_64", 1);
    fattn_env_reload();
    expect_ok(fattn_device_open("cuda:0", &device), "opening");
    const fattn_status status = fattn_plan_create(device, &problem, &plan);
    expect(status == FATTN_UNSUPPORTED && says(why), "%s, expected \"%s\": %s",
           fattn_status_string(status), why, fattn_last_reason());
    unsetenv("FATTN_KERNEL");
    fattn_env_reload();
    expect_ok(fattn_plan_create(device, &problem, &plan), "another row");
    fattn_plan_destroy(plan);
    fattn_device_close(device);
}

/* Where a driver does not say how many blocks it holds, a resident grid has one a unit. */
static void expect_one_a_unit(void)
{
    stub->held = 2;
    const unsigned blocks = resident_blocks(mma, 9);
    expect(blocks == 4, "%u blocks", blocks);
}

/* Runs the check that this process's second argument names. */
static int be_child(const char *what, const char *why)
{
    running = what;
    const driver *const library = driver_open();
    stub = library ? library->stub : NULL;
    if (strcmp(what, "no driver") == 0 && library) {
        return ANOTHER_DRIVER;
    }
    if (strcmp(what, "no devices") == 0 && expect(stub != NULL, "no stub")) {
        stub->devices = 0;
    } else if (strcmp(what, "no start") == 0 && expect(stub != NULL, "no stub")) {
        stub->fail_at = 1, stub->fail_with = STUB_OLD_DRIVER;
    }
    if (strcmp(what, "no maps") == 0 && expect(stub != NULL, "no stub")) {
        expect_no_maps(why);
    } else if (strcmp(what, "no count") == 0 && expect(stub != NULL, "no stub")) {
        expect_one_a_unit();
    } else {
        expect_no_driver(why);
    }
    return wrong;
}

/* Runs this program again, with a folder searched first for libcuda.so.1. Returns its exit status,
 * 0 for success. */
static int run_child(const char *program, const char *folder, const char *what, const char *why)
{
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        setenv("LD_LIBRARY_PATH", folder, 1);
        execl(program, program, what, why, (char *)NULL);
        _exit(errno == ENOEXEC ? FOREIGN : 127);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : -1;
}

/* The bytes of a file; the caller frees. */
static char *read_file(const char *path, size_t *size)
{
    enum { MOST = 1 << 22 };
    char *const bytes = malloc(MOST);
    FILE *const file = fopen(path, "rb");
    *size = bytes && file ? fread(bytes, 1, MOST, file) : 0;
    if (file) {
        fclose(file);
    }
    return bytes;
}

static bool write_file(const char *path, const char *bytes, size_t size)
{
    FILE *const file = fopen(path, "wb");
    const bool written = file && fwrite(bytes, 1, size, file) == size;
    return file && fclose(file) == 0 && written;
}

/* Renames a symbol throughout the file, so that it is not found. */
static int hide(char *bytes, size_t size, const char *name, char first)
{
    const size_t length = strlen(name);
    int found = 0;
    for (size_t at = 1; at + length < size; at++) {
        const bool here = bytes[at - 1] == '\0' && bytes[at + length] == '\0' &&
                          memcmp(bytes + at + 1, name + 1, length - 1) == 0;
        if (here) {
            bytes[at] = first;
            found++;
        }
    }
    return found;
}

/* maps: whether the build has a row that needs them. */
static void check_drivers(const char *program, const char *stub_path, bool maps)
{
    char folder[] = "/tmp/fattn-cuda-XXXXXX", path[64], home[4096];
    size_t size = 0;
    char *const bytes = read_file(stub_path, &size);
    if (!mkdtemp(folder) || !size) {
        tap_check(false, "a folder for drivers is made");
        free(bytes);
        return;
    }
    snprintf(path, sizeof path, "%s/libcuda.so.1", folder);
    if (run_child(program, folder, "no driver", "no driver") == FOREIGN) {
        tap_skip("drivers that lack something", "an emulated program starts no other");
        rmdir(folder);
        free(bytes);
        return;
    }
    EACH (n, functions) {
        const bool hidden = hide(bytes, size, functions[n], 'X') > 0;
        tap_check(hidden && write_file(path, bytes, size) &&
                      run_child(program, folder, "a missing function", functions[n]) == 0,
                  "a driver without %s is too old, and its name is said", functions[n]);
        hide(bytes, size, functions[n], 'c');
    }
    static const char *const map_functions[] = {"cuTensorMapEncodeTiled",
                                                "cuTensorMapReplaceAddress"};
    EACH (n, map_functions) {
        const bool hidden = hide(bytes, size, map_functions[n], 'X') > 0;
        if (maps) {
            tap_check(hidden && write_file(path, bytes, size) &&
                          run_child(program, folder, "no maps", "a driver with tensor maps") == 0,
                      "a driver without %s runs other rows", map_functions[n]);
        } else {
            tap_skip("a driver without tensor maps", "this build has no row that needs them");
        }
        hide(bytes, size, map_functions[n], 'c');
    }
    if (has_resident_rows()) {
        const char *const asked = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        const bool hidden = hide(bytes, size, asked, 'X') > 0;
        tap_check(hidden && write_file(path, bytes, size) &&
                      run_child(program, folder, "no count", "") == 0,
                  "a driver without %s has one block a multiprocessor", asked);
        hide(bytes, size, asked, 'c');
    } else {
        tap_skip("a driver that does not count blocks", "this build has no resident grid");
    }
    tap_check(write_file(path, bytes, 10) &&
                  run_child(program, folder, "no library", "no driver") == 0,
              "a file that is no library is no driver");
    free(bytes);
    remove(path);
    snprintf(home, sizeof home, "%s", stub_path);
    *strrchr(home, '/') = '\0';
    tap_check(run_child(program, home, "no devices", "cuInit failed with 100") == 0,
              "a driver without devices");
    tap_check(run_child(program, home, "no start", "cuInit failed with 222") == 0,
              "a driver that does not start");
    const int absent = run_child(program, folder, "no driver", "no driver");
    if (absent == ANOTHER_DRIVER) {
        tap_skip("no driver at all", "this system has one");
    } else {
        tap_check(absent == 0, "no driver at all");
    }
    tap_check(rmdir(folder) == 0, "no other file is left behind");
}

int main(int argc, char **argv)
{
    for (const char *const *name = (const char *const[]){"FATTN_BACKEND", "FATTN_KERNEL", NULL};
         *name; name++) {
        unsetenv(*name);
    }
    if (argc == 3) {
        return be_child(argv[1], argv[2]);
    }
    cuda = driver_open();
    stub = cuda ? cuda->stub : NULL;
    if (!stub) {
        tap_check(false, "libcuda.so.1 is the stub: LD_LIBRARY_PATH names its folder");
        return tap_done();
    }
    Dl_info self;
    const int located = dladdr((void *)(uintptr_t)stub, &self);
    if (fattn_device_count("cuda") != stub->devices) { /* the first call opens the driver */
        tap_check(false, "the stub has %d devices", stub->devices);
        return tap_done();
    }
    check_failures();
    check_any_device();
    check_old_device();
    check_numbers();
    check_grids();
    check_resident();
    check_instruction_sets();
    check_launched();
    check_mapped_elsewhere();
    check_auto(0, "cuda", 0);
    check_auto(1, "cuda", 1);
    check_auto(2, "cpu", 0);
    check_early(90, false, 0);
    check_early(90, false, 90); /* pretends that the build has code for it */
    check_early(90, true, 0);
    check_early(100, false, 0);
    check_early(120, true, 0);
    check_general(FORWARD, 80, false);
    check_general(FORWARD, 110, true);
    check_general(BACKWARD, 80, false);
    check_general(BACKWARD, 110, true);
    check_merging();
    const bool maps = check_maps();
    check_statuses();
    check_two_contexts();
    check_threads();
    check_staging(stub->capability);
    check_staging(86);
    check_empty_axes();
    check_one_shot_memory();
    check_streams(2, "two streams take turns");
    check_streams(6, "six streams take turns");
    check_handles();
    check_thread_streams();
    check_event_order();
    check_peers();
    check_limits();
    check_shortage();
    check_checked_shortage();
    check_counts();
    check_captured(true);
    check_captured(false);
    for (work w = FORWARD; w < WORKS; w++) {
        check_capture(w);
    }
    tap_check(located != 0, "the stub's file is known");
    if (located) {
        check_drivers(argv[0], self.dli_fname, maps);
    }
    return tap_done();
}
