/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Workspaces of fattn_attention() on a GPU, which come back while the GPU still uses them: each
 * call follows the last use of what it is lent, within a graph or not (a driver without a GPU,
 * stub/).
 */

#include <pthread.h>
#include <string.h>

#include "backends/gpu/args.h"
#include "core/backend.h"
#include "tests/scene.h"

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
    scene_set_up(s, DECODE, 0);
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
    scene_tear_down(s);
    expect(stub->freed_in_use == 0, "%d workspaces were freed in use", (int)stub->freed_in_use);
    tap_check(expect_held(), "one shot: %s", what);
}

static void attend(const scene *s, fattn_stream stream)
{
    expect_ok(fattn_attention(s->device, &s->problem, &s->buffers, stream), "a call");
}

/* Each stream gets a workspace, up to four; after that nothing is allocated, waited for or
 * freed. */
static void check_streams(int count, const char *what)
{
    scene s = {.spec = "cuda:0"};
    fattn_stream streams[8];
    expect_begin(what);
    begin_watch(&s);
    for (int n = 0; n < count; n++) {
        expect_ok(fattn_stream_create(s.device, &streams[n]), "a stream");
    }
    for (int turn = 0; turn < 5 * count; turn++) {
        stub->calls = turn == count ? 0 : stub->calls;
        attend(&s, streams[turn % count]);
    }
    expect(scene_calls("cuMemAlloc_v2") + scene_calls("cuMemFree_v2") +
                   scene_calls("cuStreamSynchronize") + scene_calls("cuEventSynchronize") ==
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
    static const char what[] = "handles of destroyed streams";
    fattn_stream stream = NULL, before = NULL;
    expect_begin(what);
    begin_watch(&s);
    for (int turn = 0; turn < 5; turn++) {
        expect_ok(fattn_stream_create(s.device, &stream), "a stream");
        expect(!turn || stream == before, "the stub gives another handle");
        attend(&s, stream);
        before = stream;
        fattn_stream_destroy(s.device, stream);
    }
    end_watch(&s, 1, what);
}

static void *attend_aside(void *argument)
{
    attend(argument, (fattn_stream)(uintptr_t)FATTN_STREAM_PER_THREAD);
    return NULL;
}

/* One handle that denotes a different stream in each thread. */
static void check_thread_streams(void)
{
    static const char what[] = "the stream of each thread";
    scene s = {.spec = "cuda:0"};
    expect_begin(what);
    begin_watch(&s);
    for (int turn = 0; turn < 12; turn++) {
        pthread_t other;
        expect(!pthread_create(&other, NULL, attend_aside, &s), "no thread");
        pthread_join(other, NULL);
        attend_aside(&s);
        attend(&s, NULL);
        attend(&s, (fattn_stream)(uintptr_t)1);
    }
    end_watch(&s, 4, what);
}

/* An event of one stream delays another; the stub detects unordered work on one memory. */
static void check_event_order(void)
{
    scene s = {.spec = "cuda:0"};
    fattn_stream other = NULL;
    expect_begin("events");
    begin_watch(&s);
    expect_ok(fattn_stream_create(s.device, &other), "a stream");
    expect_ok(fattn_event_create(s.device, &s.events[0]), "an event");
    expect_ok(fattn_event_wait(s.events[0], other), "waiting for an event that was not recorded");
    expect_ok(scene_run(&s), "a run");
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
    scene_tear_down(&s);
    tap_check(expect_held() && seen.unordered == 0, "a stream waits for another's event");
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
    const char *const what = warm ? "a warm capture" : "a cold capture";
    fattn_stream side = NULL;
    fattn_event *fork = NULL;
    gpu_context context = NULL;
    fattn_cache_info before = {.struct_size = sizeof before}, after = before;
    expect_begin(what);
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
    const fattn_buffers staged = scene_buffers(scene_memory);
    expect(fattn_attention(s.device, &s.problem, &staged, s.stream) == FATTN_INVALID_ARGUMENT &&
               expect_says("captured"),
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
    end_watch(&s, WORKSPACES_SEEN, what);
}

/* The cache respects its limits on bytes and plans. */
static void check_limits(void)
{
    scene s = {.spec = "cuda:0"};
    fattn_cache_options options;
    fattn_cache_info info = {.struct_size = sizeof info}, start;
    expect_begin("limits");
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
    expect_begin("a shortage");
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
    expect(stub->fired && scene_calls("cuMemAlloc_v2") == 2 && scene_calls("cuMemFree_v2") == 1,
           "%d allocations, %d freed", scene_calls("cuMemAlloc_v2"), scene_calls("cuMemFree_v2"));
    stub->fail_at = 0;
    end_watch(&s, WORKSPACES_SEEN, "what is idle is given back when memory runs out");
}

/* The workspace is allocated once and kept; q, k, v and o are copied in each call. */
static void check_one_shot_memory(void)
{
    const fattn_problem problem = scene_problem(DECODE);
    const fattn_buffers buffers = scene_buffers(scene_memory);
    fattn_device *device = NULL;
    expect_begin("one shot");
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
    tap_check(expect_held(), "one shot from host memory keeps its workspace");
}

int main(void)
{
    if (scene_lacks_stub()) {
        return tap_done();
    }
    check_one_shot_memory();
    check_streams(2, "two streams take turns");
    check_streams(6, "six streams take turns");
    check_handles();
    check_thread_streams();
    check_event_order();
    check_limits();
    check_shortage();
    check_captured(true);
    check_captured(false);
    return tap_done();
}
