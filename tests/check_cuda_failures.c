/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every call of backend "cuda" to the driver fails in turn, and each failure is reported, leaves
 * nothing behind and restores the caller's context (a driver without a GPU, stub/).
 */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <string.h>

#include "core/backend.h"
#include "core/memory.h"
#include "core/peak.h"
#include "core/plan.h"
#include "tests/environment.h"
#include "tests/scene.h"

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
    s->problem = scene_problem(w);
    const fattn_status status = fattn_plan_create(s->device, &s->problem, &s->plan);
    expect(!status == (s->plan != NULL), "a plan beside a failure, or none");
    return status;
}

static fattn_status act_plan_forward(scene *s) { return plan_of(s, FORWARD); }
static fattn_status act_plan_backward(scene *s) { return plan_of(s, BACKWARD); }
static fattn_status act_plan_decode(scene *s) { return plan_of(s, DECODE); }

static void prepare_forward(scene *s) { scene_set_up(s, FORWARD, 0); }
static void prepare_backward(scene *s) { scene_set_up(s, BACKWARD, 0); }
static void prepare_decode(scene *s) { scene_set_up(s, DECODE, 0); }
static void prepare_checked(scene *s) { scene_set_up(s, FORWARD, FATTN_CHECKED | FATTN_SEQUSED_K); }

static fattn_status act_one_shot(scene *s)
{
    return scene_launched(s, fattn_attention(s->device, &s->problem, &s->buffers, NULL));
}

/* Host memory, on the device of FATTN_BACKEND. */
static fattn_status act_one_shot_staged(scene *s)
{
    const fattn_buffers buffers = scene_buffers(scene_memory);
    const fattn_problem problem = scene_problem(BACKWARD);
    return scene_launched(s, fattn_attention(NULL, &problem, &buffers, NULL));
}

/* The second of two calls on different streams; the first has created a workspace. */
static fattn_status act_one_shot_streams(scene *s)
{
    fattn_status status = fattn_attention(s->device, &s->problem, &s->buffers, s->stream);
    status = status ? status : fattn_attention(s->device, &s->problem, &s->buffers, s->stream);
    return scene_launched(s, status);
}

static fattn_status act_events_wait(scene *s)
{
    fattn_status status = fattn_event_create(s->device, &s->events[0]);
    status = status ? status : fattn_event_record(s->events[0], NULL);
    status = status ? status : fattn_event_wait(s->events[0], s->stream);
    return status ? status : fattn_event_synchronize(s->events[0]);
}

static fattn_status act_memory(scene *s)
{
    fattn_status status = fattn_device_malloc(s->device, 1000, &s->operands);
    expect(!status == (s->operands != NULL), "memory beside a failure, or none");
    if (!status) {
        status = fattn_device_copy(s->device, s->operands, scene_memory, 1000, NULL);
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
    scene_open(s);
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
    {"planning a forward", scene_open, act_plan_forward, false},
    {"planning a backward", scene_open, act_plan_backward, false},
    {"planning a decoding", scene_open, act_plan_decode, false},
    {"running a forward", prepare_forward, scene_run, false},
    {"running a backward", prepare_backward, scene_run, false},
    {"running a decoding", prepare_decode, scene_run, false},
    {"running with FATTN_CHECKED", prepare_checked, scene_run, false},
    {"running a backward without a workspace", prepare_backward, scene_run_allocating, false},
    {"running a decoding without a workspace", prepare_decode, scene_run_allocating, false},
    {"one shot", prepare_backward, act_one_shot, false},
    {"one shot from host memory", NULL, act_one_shot_staged, false},
    {"one shot on a stream, twice", prepare_backward, act_one_shot_streams, false},
    {"letting streams wait", prepare_forward, act_events_wait, false},
    {"merging", prepare_forward, scene_merge, false},
    {"writing a dropout mask", prepare_forward, scene_dropout_mask, false},
    {"allocating and copying", scene_open, act_memory, false},
    {"freeing", prepare_forward, act_free, false},
    {"making a stream and waiting", scene_open, act_stream, false},
    {"destroying a stream", prepare_forward, act_stream_destroy, false},
    {"timing", scene_open, act_events, false},
    {"destroying an event", prepare_event, act_event_destroy, true},
    {"closing a device", scene_open, act_close, true},
};

/* Of a row that copies by tensor maps, where the build has one. */
static const act map_acts[] = {
    {"planning tensor maps", scene_open, act_plan_forward, false},
    {"running with tensor maps", prepare_forward, scene_run, false},
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
    {"cuOccupancyMaxActiveBlocksPerMultiprocessor", "asking for the occupancy"},
    {"cuLaunchKernel", "launching a kernel"},
    {"cuLaunchKernelEx", "launching a kernel"},
    {"cuMemAlloc_v2", "allocating memory"},
    {"cuMemFree_v2", "freeing memory"},
    {"cuMemcpyAsync", "copying"},
    {"cuMemcpy2DAsync_v2", "copying rows"},
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
    {"cuTensorMapEncodeTiled", "encoding a tensor map"},
    {"cuTensorMapReplaceAddress", "setting the address of a tensor map"},
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
    expect(is_question(t, n) || (expect_says(words_for(name)) && expect_says("719") &&
                                 expect_says("CUDA_ERROR_LAUNCH_FAILED")),
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
    scene_tear_down(&s);
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
    expect_begin(a->name);
    set_environment("FATTN_BACKEND", spec);
    run_act(a, spec, 0, f, &t);
    for (int64_t n = 1; n <= t.count; n++) {
        run_act(a, spec, n, f, &t);
    }
    set_environment("FATTN_BACKEND", NULL);
    tap_check(expect_held(), "%s on %s, %s: each of %d calls fails with %d%s", a->name, spec,
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
 * Results
 * ---------------------------------------------------------------------------------------------- */

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
    expect_begin("statuses");
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
        expect(status == rows[r].status && !device && expect_says(rows[r].words), "%d gives %s: %s",
               rows[r].result, fattn_status_string(status), fattn_last_reason());
        fattn_device_close(device);
    }
    tap_check(expect_held(), "a driver's results become statuses");
}

/* A copy of lengths that is on its way when memory for another runs out is waited for. */
static void check_checked_shortage(void)
{
    scene s = {.spec = "cuda:0"};
    bool failed = true;
    int n = 0;
    expect_begin("FATTN_CHECKED and no memory");
    s.problem = scene_problem(FORWARD);
    s.problem.features |= FATTN_CHECKED | FATTN_SEQUSED_Q | FATTN_SEQUSED_K | FATTN_DROPOUT;
    s.problem.dropout_p = 0.5;
    scene_open(&s);
    scene_set_up_problem(&s);
    s.buffers.seqused_q = s.buffers.seqused_k;
    s.buffers.seed_ptr = s.buffers.offset_ptr = s.operands; /* not checked, so not copied */
    while (failed) {
        stub->calls = 0;
        (void)fattn_memory_fail_at(++n);
        const fattn_status status = fattn_execute(s.plan, &s.buffers, s.workspace, s.stream);
        failed = fattn_memory_fail_at(0);
        expect(status == (failed ? FATTN_OUT_OF_MEMORY : FATTN_OK) &&
                   scene_calls("cuMemcpyAsync") == n - 1 && scene_calls("cuStreamSynchronize") == 1,
               "allocation %d: %s, %d copies, waited %d times", n, fattn_status_string(status),
               scene_calls("cuMemcpyAsync"), scene_calls("cuStreamSynchronize"));
    }
    expect(n == 3, "%d allocations", n - 1);
    scene_tear_down(&s);
    tap_check(expect_held(), "copies are waited for before their memory is freed");
}

/* After a failed measurement, what it used cannot be freed either. Its reason stays. */
static void check_peak(void)
{
    scene s = {.spec = "cuda:0"};
    fattn_peak_reading reading;
    int failures = 0;
    expect_begin("measuring a peak");
    scene_open(&s);
    const fattn_peak *const peak = s.device->backend->peak(s.device->impl, 0);
    for (bool fired = true; fired;) {
        stub->calls = 0, stub->fired = false;
        stub->fail_at = failures + 1, stub->fail_with = STUB_LAUNCH_FAILED, stub->fail_on = true;
        const fattn_status status = peak->measure(s.device->impl, peak, NULL, 0, &reading);
        stub->fail_at = 0, stub->fail_on = false;
        fired = stub->fired;
        failures += fired;
        const char *const name = fired ? stub->log[failures - 1] : "";
        expect(!status || expect_says(words_for(name)), "call %d, %s: the reason is \"%s\"",
               failures, name, fattn_last_reason());
    }
    expect(failures > 10, "%d calls", failures);
    scene_tear_down(&s);
    tap_check(expect_held(), "measuring a peak: the first failure is reported");
}

int main(void)
{
    if (scene_lacks_stub()) {
        return tap_done();
    }
    check_failures();
    if (scene_begin_hopper()) {
        EACH (n, map_acts) {
            check_act(&map_acts[n], "cuda:0", (failure){STUB_LAUNCH_FAILED, false},
                      "capability 9.0");
        }
    } else {
        tap_skip("tensor maps", fattn_last_reason());
    }
    scene_end_hopper();
    check_statuses();
    check_checked_shortage();
    check_peak();
    return tap_done();
}
