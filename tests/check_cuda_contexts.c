/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts, streams, captures and memory that callers of backend "cuda" bring with them: two
 * contexts, threads, graphs, operands in host memory, devices that exchange messages (a driver
 * without a GPU, stub/).
 */

#include <pthread.h>
#include <string.h>

#include "backends/gpu/args.h"
#include "core/operands.h"
#include "fattn/distributed.h"
#include "tests/scene.h"
#include "tools/judge/random_case.h"

/* -------------------------------------------------------------------------------------------------
 * Contexts and streams
 * ---------------------------------------------------------------------------------------------- */

/* Two devices of one GPU, each opened in its own context. The stub refuses a launch whose function,
 * stream and context do not match. Then the streams are exchanged. */
static void check_two_contexts(void)
{
    gpu_context contexts[2] = {NULL, NULL};
    scene scenes[2] = {{.spec = "cuda:0"}, {.spec = "cuda:0"}};
    expect_begin("two contexts");
    for (int n = 0; n < 2; n++) {
        cuda->context_create(&contexts[n], 0, 0);
        scene_set_up(&scenes[n], BACKWARD, 0);
        cuda->context_set(NULL);
    }
    for (int turn = 0; turn < 6; turn++) {
        gpu_context now = NULL;
        cuda->context_set(turn % 3 < 2 ? contexts[turn % 3] : NULL);
        expect_ok(scene_run(&scenes[turn % 2]), "a run in its context");
        cuda->context_get(&now);
        expect(now == (turn % 3 < 2 ? contexts[turn % 3] : NULL), "the context changed");
    }
    const int64_t launches = stub->launches;
    const fattn_status status =
        fattn_execute(scenes[0].plan, &scenes[0].buffers, scenes[0].workspace, scenes[1].stream);
    expect(status == FATTN_INVALID_ARGUMENT && expect_says("another context"),
           "a stream of another context: %s: %s", fattn_status_string(status), fattn_last_reason());
    expect(stub->launches == launches, "kernels were launched all the same");
    char bytes[16] = "";
    fattn_event *event = NULL;
    expect_ok(fattn_event_create(scenes[0].device, &event), "an event");
    expect(fattn_device_copy(scenes[0].device, scenes[0].workspace, bytes, sizeof bytes,
                             scenes[1].stream) == FATTN_INVALID_ARGUMENT &&
               expect_says("another context"),
           "a copy on it: %s", fattn_last_reason());
    expect(fattn_event_record(event, scenes[1].stream) == FATTN_INVALID_ARGUMENT &&
               expect_says("another context"),
           "an event in it: %s", fattn_last_reason());
    fattn_event_destroy(event);
    for (int n = 0; n < 2; n++) {
        scene_tear_down(&scenes[n]);
        cuda->context_destroy(contexts[n]);
    }
    tap_check(expect_held(), "hazard_I1: two contexts on one device do not mix");
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
    const fattn_buffers staged = scene_buffers(scene_memory);
    if (t->context) {
        cuda->context_set(t->context);
    }
    for (int turn = 0; turn < TURNS; turn++) {
        const fattn_problem problem = scene_problem((work)(turn % WORKS));
        fattn_plan *plan = NULL;
        fattn_stream stream = NULL;
        void *memory = NULL;
        gpu_context now = NULL;
        fattn_status status = fattn_plan_create(t->device, &problem, &plan);
        status = status ? status : fattn_stream_create(t->device, &stream);
        status = status ? status : fattn_device_malloc(t->device, OPERANDS * OPERAND, &memory);
        const fattn_buffers buffers = scene_buffers(memory);
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
    expect_begin("threads");
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
    tap_check(expect_held(), "threads share a device, whatever their contexts");
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
        {"a run", scene_run, true},
        {"a merge", scene_merge, true},
        {"a dropout mask", scene_dropout_mask, true},
        {"a run without a workspace", scene_run_allocating, false},
        {"a run on the default stream", run_default_stream, false},
    };
    expect_begin(scene_works[w]);
    EACH (r, rows) {
        const int64_t memory = stub->alive[STUB_MEMORY];
        fattn_status status = FATTN_OK;
        scene s = {.spec = "cuda:0"};
        scene_set_up(&s, w, 0);
        const bool made = capture(&s, rows[r].act, &status);
        if (rows[r].captured || (rows[r].act == scene_run_allocating && s.workspace_bytes == 0)) {
            expect_ok(status, rows[r].name);
            expect_capturable(rows[r].name);
            expect(made, "%s: no graph", rows[r].name);
        } else {
            expect(status != FATTN_OK && expect_says("CAPTURE"), "%s: %s: %s", rows[r].name,
                   fattn_status_string(status), fattn_last_reason());
        }
        scene_tear_down(&s);
        expect(stub->alive[STUB_MEMORY] == memory, "%s: memory leaks", rows[r].name);
    }
    scene s = {.spec = "cuda:0"};
    fattn_status status = FATTN_OK;
    scene_set_up(&s, w, FATTN_CHECKED | FATTN_SEQUSED_K);
    capture(&s, scene_run, &status);
    expect(status == FATTN_INVALID_ARGUMENT && expect_says("FATTN_CHECKED"),
           "FATTN_CHECKED waits, and was captured: %s", fattn_status_string(status));
    scene_tear_down(&s);
    tap_check(expect_held(), "%s is captured into a graph, or refuses", scene_works[w]);
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
    expect_begin("staging");
    watched = 0;
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
                expect(expect_says("q, k and v of one type") || expect_says("no bias in"), "types");
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
    tap_check(expect_held(),
              "every operand of %d problems is copied to a device of capability %d.%d", CASES,
              capability / 10, capability % 10);
}

/* dbias has memory even if a summed axis is empty. */
static void check_empty_axes(void)
{
    fattn_device *device = NULL;
    expect_begin("empty axes");
    expect_ok(fattn_device_open("cuda", &device), "opening");
    watched = 0;
    stub->watch = watch_dbias;
    for (int axis = 0; axis < 4; axis++) {
        fattn_problem p = scene_problem(BACKWARD);
        fattn_buffers buffers = scene_buffers(scene_memory);
        int64_t *const empty[] = {&p.batch, NULL, &p.seqlen_q, &p.seqlen_k};
        p.features = FATTN_BIAS;
        p.outputs = FATTN_OUT_DBIAS;
        if (empty[axis]) {
            *empty[axis] = 0;
        }
        buffers.bias = buffers.dq, buffers.dbias = buffers.dk;
        expect_ok(fattn_attention(device, &p, &buffers, NULL), "an empty axis");
        buffers.dbias = NULL;
        expect(fattn_attention(device, &p, &buffers, NULL) == FATTN_NULL_POINTER &&
                   expect_says("dbias"),
               "dbias NULL: %s", fattn_last_reason());
    }
    stub->watch = NULL;
    expect(watched >= 4, "dbias was not written");
    fattn_cache_clear();
    fattn_device_close(device);
    tap_check(expect_held(), "dbias is written where it is summed over nothing");
}

/* Memory between the rows of a result, in which another thread writes during the run. */
enum { GAP = 7 };
static char *gap;

static void write_in_gap(void **parameters)
{
    (void)parameters;
    *gap = GAP;
    watched++;
}

/* A call that leaves room for a head between its own, as threads do that share a result. */
static void check_gaps(void)
{
    fattn_device *device = NULL;
    fattn_problem p = scene_problem(FORWARD);
    fattn_buffers buffers = scene_buffers(scene_memory);
    const int64_t row = 2 * p.heads_q * p.dim_v;
    expect_begin("gaps");
    expect_ok(fattn_device_open("cuda", &device), "opening");
    p.layout = FATTN_STRIDED;
    p.q = (fattn_strides){p.seqlen_q * p.heads_q * p.dim, p.heads_q * p.dim, p.dim};
    p.k = p.v = (fattn_strides){p.seqlen_k * p.heads_k * p.dim, p.heads_k * p.dim, p.dim};
    p.o = (fattn_strides){p.seqlen_q * row, row, 2 * p.dim_v};
    watched = 0;
    gap = (char *)buffers.o + p.dim_v * (int64_t)sizeof(uint16_t);
    *gap = 0;
    stub->watch = write_in_gap;
    expect_ok(fattn_attention(device, &p, &buffers, NULL), "a call");
    stub->watch = NULL;
    expect(watched > 0 && *gap == GAP, "%d launches, and %d in the gap", (int)watched, *gap);
    fattn_cache_clear();
    fattn_device_close(device);
    tap_check(expect_held(), "what others write between the rows of a result stays");
}

/* -------------------------------------------------------------------------------------------------
 * Devices that exchange messages
 * ---------------------------------------------------------------------------------------------- */

enum { BYTES = 64, HALF = BYTES / 2, ROW = 8 };

/* Messages between two devices of one process (fattn_peers). Before each message one side's stream
 * writes what is sent and the other's reads what was received last; after it both do so again.
 * first: the side that starts first, 0: the sender. spans: two, of every other ROW bytes, which
 * arrive without gaps, and of all bytes of the second half. */
static void exchange(fattn_device *const devices[2], const fattn_stream streams[2],
                     fattn_transport *const transports[2], char *const memory[2], int sender,
                     int first, bool spans)
{
    static char host[BYTES], received[BYTES], expected[BYTES];
    static int round;
    fattn_message m[2];
    fattn_span rows[2][2];
    round++;
    for (int n = 0; n < BYTES; n++) {
        host[n] = (char)(n + 7 * round);
    }
    memcpy(expected, host, sizeof host);
    for (int n = 0; n < HALF / 2 && spans; n++) {
        expected[n] = host[n / ROW * 2 * ROW + n % ROW];
    }
    for (int side = 0; side < 2; side++) {
        const int rank = side ? !sender : sender;
        char *const data = memory[rank];
        rows[side][0] = (fattn_span){data, HALF / ROW / 2, ROW, side ? ROW : 2 * ROW};
        rows[side][1] = (fattn_span){data + HALF, 2, HALF / 2, HALF / 2};
        m[side] = (fattn_message){.peer = !rank,
                                  .tag = 2,
                                  .receive = side,
                                  .span_count = spans ? 2 : 0,
                                  .data = spans ? NULL : data,
                                  .bytes = spans ? HALF + HALF / 2 : BYTES,
                                  .spans = spans ? rows[side] : NULL};
    }
    for (int after = 0; after < 2; after++) {
        expect_ok(fattn_device_copy(devices[sender], memory[sender], host, BYTES, streams[sender]),
                  "writing");
        expect_ok(
            fattn_device_copy(devices[!sender], received, memory[!sender], BYTES, streams[!sender]),
            "reading");
        for (int n = HALF / 2; n < HALF && spans && !after; n++) {
            expected[n] = received[n]; /* the message leaves it as it is */
        }
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
    expect(memcmp(received, expected, BYTES) == 0, "another message has arrived");
}

static void check_peers(void)
{
    fattn_device *devices[2] = {NULL, NULL};
    fattn_stream streams[2] = {NULL, NULL};
    fattn_transport *transports[2] = {NULL, NULL};
    fattn_peers *peers = NULL;
    void *memory[2] = {NULL, NULL};
    expect_begin("peers");
    expect_ok(fattn_peers_create(2, &peers), "peers");
    const int64_t reaches = stub->reaches, disordered = stub->disordered;
    for (int r = 0; r < 2; r++) {
        expect_ok(fattn_device_open(r ? "cuda:1" : "cuda:0", &devices[r]), "opening");
        expect_ok(fattn_stream_create(devices[r], &streams[r]), "a stream");
        expect_ok(fattn_device_malloc(devices[r], BYTES, &memory[r]), "memory");
        expect_ok(fattn_peers_open(peers, r, devices[r], streams[r], &transports[r]), "joining");
    }
    expect(stub->reaches - reaches == 2, "%d devices reach the other's memory",
           (int)(stub->reaches - reaches));
    for (int n = 0; n < 16 && expect_held(); n++) {
        exchange(devices, streams, transports, (char *const[2]){memory[0], memory[1]}, n & 1,
                 n >> 1 & 1, n >= 8);
    }
    const int64_t unordered = stub->disordered - disordered;
    for (int r = 0; r < 2; r++) {
        fattn_peers_close(transports[r]);
        expect_ok(fattn_device_free(devices[r], memory[r]), "freeing");
        expect_ok(fattn_stream_destroy(devices[r], streams[r]), "a stream");
        fattn_device_close(devices[r]);
    }
    fattn_peers_destroy(peers);
    tap_check(expect_held() && unordered == 0,
              "copies between devices wait for what both have queued, and both for the copies");
}

int main(void)
{
    if (scene_lacks_stub()) {
        return tap_done();
    }
    check_two_contexts();
    check_threads();
    check_staging(stub->capability);
    check_staging(86);
    check_empty_axes();
    check_gaps();
    check_peers();
    for (work w = FORWARD; w < WORKS; w++) {
        check_capture(w);
    }
    return tap_done();
}
