/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What backend "cuda" says of devices, which of them are opened, and which functions are launched
 * on them with how many blocks (a driver without a GPU, stub/).
 */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <string.h>

#include "backends/gpu/args.h"
#include "backends/gpu/gpu.h"
#include "core/backend.h"
#include "core/plan.h"
#include "tests/environment.h"
#include "tests/scene.h"

static void check_any_device(void)
{
    expect_begin("device");
    stub->devices = 4;
    for (int n = 0; n < stub->devices; n++) {
        char spec[16];
        snprintf(spec, sizeof spec, "cuda:%d", n);
        for (work w = FORWARD; w < WORKS; w++) {
            scene s = {.spec = spec};
            scene_set_up(&s, w, 0);
            stub->launch_device = -1;
            expect_ok(scene_run(&s), spec);
            expect(stub->launch_device == n, "%s: %s ran on device %d", spec, scene_works[w],
                   stub->launch_device);
            scene_tear_down(&s);
        }
    }
    fattn_device *device = NULL;
    expect(fattn_device_open("cuda:4", &device) == FATTN_NO_DEVICE && !device &&
               expect_says("cuda:4"),
           "cuda:4 of 4: %s", fattn_last_reason());
    stub->devices = 2;
    tap_check(expect_held(), "work runs on the device that was named, whichever is current");
}

/* Images hold code for some architectures; an older device gets an error that says so. */
static void check_old_device(void)
{
    expect_begin("an old device");
    const int64_t modules = stub->alive[STUB_MODULE], contexts = stub->alive[STUB_CONTEXT];
    const int capability = stub->capability;
    fattn_device *device = NULL;
    stub->capability = 52;
    const fattn_status status = fattn_device_open("cuda", &device);
    stub->capability = capability;
    expect(status == FATTN_UNSUPPORTED && !device && expect_says("5.2") && expect_says("sm_"),
           "%s: %s", fattn_status_string(status), fattn_last_reason());
    expect(stub->alive[STUB_MODULE] == modules && stub->alive[STUB_CONTEXT] == contexts,
           "something leaks");
    tap_check(expect_held(), "a device below the lowest architecture is refused with a reason");
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
    expect_begin("auto");
    stub->old = old, logged[0] = '\0';
    set_environment("FATTN_VERBOSE", "1");
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
        snprintf(line, sizeof line, "skips %s: cuda: this build has no code", spec);
        expect((strstr(logged, line) != NULL) == (n < old), "%s: the log is \"%s\"", spec, logged);
        const fattn_status status = fattn_device_open(spec, &device);
        expect(status == (n < old ? FATTN_UNSUPPORTED : FATTN_OK), "%s: %s", spec,
               fattn_status_string(status));
        fattn_device_close(device);
    }
    fattn_set_log_callback(NULL, NULL);
    set_environment("FATTN_VERBOSE", NULL);
    const fattn_problem problem = scene_problem(FORWARD);
    const fattn_buffers buffers = scene_buffers(scene_memory);
    expect_ok(fattn_attention(NULL, &problem, &buffers, NULL), "one shot on the default device");
    fattn_cache_clear();
    stub->old = 0;
    expect(stub->alive[STUB_MODULE] == modules && stub->alive[STUB_CONTEXT] == contexts,
           "something leaks");
    tap_check(expect_held(), "auto is %s:%d where %d of %d devices have no code", backend, ordinal,
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
    expect_begin("numbers");
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
    tap_check(expect_held(), "a device and its events say what the driver says");
}

typedef struct resident_case {
    int units, held;
    int64_t items;
    unsigned blocks;
} resident_case;

static void check_resident_case(const char *row, resident_case c)
{
    stub->units = c.units, stub->held = c.held;
    const unsigned blocks = scene_resident_blocks(row, c.items);
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
    expect_begin("resident grids");
    if (scene_resident_blocks(scene_resident, 1) != 1) {
        tap_skip("resident grids", fattn_last_reason());
        return;
    }
    EACH (n, cases) {
        check_resident_case(scene_resident, cases[n]);
    }
    stub->held = 0;
    expect(scene_resident_blocks(scene_resident, 9) == 0 && expect_says("holds no block"),
           "none held: %s", fattn_last_reason());
    stub->held = 1;
    tap_check(expect_held(), "a resident grid has as many blocks as the device holds");
}

/* Where two blocks share an item it has whole clusters. */
static void check_resident_clusters(void)
{
    static const resident_case cases[] = {
        {4, 1, 1, 2}, {4, 1, 3, 4}, {5, 1, 3, 4}, {1, 1, 3, 2}, {3, 3, 9, 8}};
    expect_begin("resident clusters");
    if (!scene_begin_hopper()) {
        tap_skip("resident clusters", fattn_last_reason());
        scene_end_hopper();
        return;
    }
    EACH (n, cases) {
        check_resident_case("wgmma_backward_256", cases[n]);
    }
    scene_end_hopper();
    tap_check(expect_held(), "a resident grid has whole clusters");
}

/* AMD's launches count threads in 32 bits: fewer than 2^32. */
static void check_grids(void)
{
    const fattn_gpu_api amd = {.blocks_max = INT32_MAX, .threads_max = UINT32_MAX};
    const fattn_gpu_api nvidia = {.blocks_max = INT32_MAX, .threads_max = INT64_MAX};
    expect_begin("grids");
    for (int threads = 32; threads <= 1024; threads += 32) {
        const int64_t fits = (INT64_C(1) << 32) / threads - 1, most = INT64_C(1) << 62;
        expect(fattn_gpu_grid(&amd, fits, threads) == (fits < INT32_MAX ? fits : INT32_MAX),
               "%d blocks of %d", (int)fits, threads);
        expect((int64_t)fattn_gpu_grid(&amd, most, threads) * threads <= UINT32_MAX,
               "too many threads of blocks of %d", threads);
        expect(fattn_gpu_grid(&nvidia, most, threads) == INT32_MAX, "blocks of %d", threads);
        expect(fattn_gpu_grid(&amd, 7, threads) == 7, "7 blocks of %d", threads);
    }
    tap_check(expect_held(), "a launch has as many blocks as a driver takes");
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
    expect_begin("what is launched");
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        scene s = {.spec = "cuda:0"};
        scene_open(&s);
        s.problem = scene_problem(rows[n].of);
        scene_set_up_problem(&s);
        fattn_plan *plan = NULL;
        expect_ok(fattn_plan_create_with(s.device, &s.problem, rows[n].kernel, NULL, &plan),
                  "a plan");
        expect_ok(fattn_execute(plan, &s.buffers, NULL, NULL), "a run");
        expect(strncmp(stub->launch_name, rows[n].kernel, strlen(rows[n].kernel)) == 0 &&
                   stub->launch_threads == rows[n].threads,
               "%s: %s with %u threads", rows[n].kernel, stub->launch_name, stub->launch_threads);
        fattn_plan_destroy(plan);
        scene_tear_down(&s);
    }
    scene s = {.spec = "cuda:0"};
    scene_open(&s);
    expect_ok(fattn_device_malloc(s.device, 4096, &s.operands), "memory");
    expect_ok(scene_dropout_mask(&s), "a dropout mask");
    expect(strcmp(stub->launch_name, "dropout_mask") == 0, "%s for it", stub->launch_name);
    expect_ok(scene_merge(&s), "merging");
    expect(strcmp(stub->launch_name, "merge") == 0, "%s for it", stub->launch_name);
    scene_tear_down(&s);
    tap_check(expect_held(), "each verb and row launches its own function, with its threads");
}

/* Memory of the host that the device sees at another address is none that kernels can read. */
static void check_mapped_elsewhere(void)
{
    scene s = {.spec = "cuda:0"};
    scene_open(&s);
    const fattn_backend *const backend = s.device->backend;
    void *own = NULL;
    expect_begin("memory elsewhere");
    expect_ok(fattn_device_malloc(s.device, 4096, &own), "memory");
    stub->elsewhere = scene_memory;
    expect(backend->reads(s.device->impl, own), "the device's own is not read");
    expect(!backend->reads(s.device->impl, scene_memory), "the host's is read where it is not");
    stub->elsewhere = NULL;
    expect_ok(fattn_device_free(s.device, own), "freeing");
    scene_tear_down(&s);
    tap_check(expect_held(), "memory that a device sees elsewhere is copied");
}

/* Decoding on a newer chip launches early if the running code was compiled for 9.0 or newer, which
 * code that the driver compiled from older PTX was not. */
static void check_early(int capability, bool only_ptx, int compiled_for)
{
    const int usual = stub->capability;
    scene s = {.spec = "cuda:0"};
    expect_begin("early launches");
    stub->capability = capability, stub->only_ptx = only_ptx, stub->compiled_for = compiled_for;
    stub->early = stub->unready = 0;
    if (fattn_device_open(s.spec, &s.device)) {
        tap_skip("a device of another capability decodes", fattn_last_reason());
        stub->capability = usual, stub->only_ptx = false, stub->compiled_for = 0;
        return;
    }
    scene_set_up(&s, DECODE, 0);
    for (int turn = 0; turn < 3; turn++) {
        expect_ok(scene_run(&s), "decoding");
    }
    expect(stub->unready == 0, "%d of %d early launches have no wait", (int)stub->unready,
           (int)stub->early);
    expect((stub->early > 0) == (stub->newest >= 90), "%d early launches of code for %d",
           (int)stub->early, stub->newest);
    scene_tear_down(&s);
    stub->capability = usual, stub->only_ptx = false, stub->compiled_for = 0;
    tap_check(expect_held(), "early launches on capability %d.%d%s, of code for %d: %d",
              capability / 10, capability % 10, only_ptx ? " by PTX" : "", stub->newest,
              (int)stub->early);
}

/* A run with one feature of pairs launches the entry for that one where it is machine code, and the
 * one for all features where the driver compiles PTX. */
static void check_general(work w, int capability, bool only_ptx)
{
    const int usual = stub->capability;
    scene s = {.spec = "cuda:0"};
    expect_begin("one feature");
    stub->capability = capability, stub->only_ptx = only_ptx;
    if (fattn_device_open(s.spec, &s.device)) {
        tap_skip("a run with one feature on a device of another capability", fattn_last_reason());
        stub->capability = usual, stub->only_ptx = false;
        return;
    }
    s.problem = scene_problem(w);
    s.problem.features |= FATTN_SOFTCAP;
    s.problem.softcap = 5;
    scene_set_up_problem(&s);
    memset(stub->launched, 0, sizeof stub->launched);
    expect_ok(scene_run(&s), "a run");
    const char *const kind = w == BACKWARD ? "mma_backward_" : "mma_";
    const char *const found = strstr(stub->launched, kind);
    const char *const one = "softcap_f16_64_128x128 ", *const all = "full_f16_64_128x128 ";
    const char *const wanted = only_ptx ? all : one;
    expect(found && strncmp(found + strlen(kind), wanted, strlen(wanted)) == 0,
           "launched %s, not %s%s", stub->launched, kind, wanted);
    scene_tear_down(&s);
    stub->capability = usual, stub->only_ptx = false;
    tap_check(expect_held(), "%s with one feature on capability %d.%d%s",
              w == BACKWARD ? "backward" : "forward", capability / 10, capability % 10,
              only_ptx ? " by PTX" : "");
}

/* An image without a function of a row's refuses the row, by name. */
static void check_missing_function(void)
{
    scene s = {.spec = "cuda:0"};
    expect_begin("a missing function");
    scene_set_up(&s, FORWARD, 0);
    fattn_plan *plan = NULL;
    int64_t found = 0;
    stub->calls = 0;
    expect_ok(fattn_plan_create(s.device, &s.problem, &plan), "a plan");
    fattn_plan_destroy(plan);
    for (int64_t n = stub->calls; n > 0; n--) {
        found = strcmp(stub->log[n - 1], "cuModuleGetFunction") == 0 ? n : found;
    }
    stub->calls = 0, stub->fail_at = found, stub->fail_with = STUB_NOT_FOUND;
    const fattn_status status = fattn_plan_create(s.device, &s.problem, &plan);
    stub->fail_at = 0;
    expect(found && status == FATTN_UNSUPPORTED && expect_says("has no function"), "%s: %s",
           fattn_status_string(status), fattn_last_reason());
    scene_tear_down(&s);
    tap_check(expect_held(), "an image that lacks a function: %s", fattn_last_reason());
}

static fattn_gpu_args args_seen; /* of the last launch */

static void watch_args(void **parameters) { args_seen = *(const fattn_gpu_args *)parameters[0]; }

/* Decoding is one launch, which counts its parts behind them in the workspace; with rows enough
 * that one block would be long at merging them, there is a second. */
static void check_merging(void)
{
    uint64_t mark = 0;
    expect_begin("merging");
    for (int m = 0; m < 4; m++) {
        scene s = {.spec = "cuda:0"};
        const bool one = m < 2;
        scene_open(&s);
        s.problem = scene_problem(DECODE);
        s.problem.heads_q = one ? 1 : 16;
        s.problem.seqlen_k = one ? 2048 : 1024;
        s.problem.dim = s.problem.dim_v = one ? 16 : 64;
        scene_set_up_problem(&s);
        s.launches = stub->launches;
        stub->watch = watch_args;
        expect_ok(scene_run(&s), "decoding");
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
        scene_tear_down(&s);
    }
    tap_check(expect_held(), "decoding merges its parts in one launch, or two");
}

int main(void)
{
    if (scene_lacks_stub()) {
        return tap_done();
    }
    check_any_device();
    check_old_device();
    check_numbers();
    check_grids();
    check_resident();
    check_resident_clusters();
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
    check_missing_function();
    check_merging();
    return tap_done();
}
