/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group I: devices, streams, concurrency, dispatch. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/driver.h"
#include "tests/environment.h"
#include "tests/hazard.h"

/* -------------------------------------------------------------------------------------------------
 * I3: threads
 * ---------------------------------------------------------------------------------------------- */

enum { THREADS = 8 };

static int runs(void) { return hazard_sanitized() ? 6 : 25; }

/* One thread's work: its own case, through a shared plan on its own stream, or through the one-shot
 * call from host memory. */
typedef struct worker {
    draw_case c;
    twin t;                 /* of c, for the plan */
    const fattn_plan *plan; /* NULL: one-shot */
    fattn_device *device;
    fattn_stream stream;
    void *workspace;
    unsigned char *expected; /* NULL: no result to compare with yet */
    int wrong;
} worker;

static fattn_status run_plan(const worker *w)
{
    fattn_status status = twin_send(&w->t, w->stream);
    status = status ? status : fattn_execute(w->plan, &w->t.buffers, w->workspace, w->stream);
    return status ? status : twin_read(&w->t, w->stream);
}

static void *work(void *argument)
{
    worker *const w = argument;
    for (int run = 0; run < runs(); run++) {
        hazard_clear_outputs(&w->c);
        const fattn_status status =
            w->plan ? run_plan(w) : fattn_attention(w->device, &w->c.problem, &w->c.buffers, NULL);
        const draw_id out = w->c.problem.op == FATTN_FORWARD ? DRAW_O : DRAW_DK;
        w->wrong += status != FATTN_OK || !hazard_equals(&w->c, out, w->expected);
    }
    return NULL;
}

static void run_all(worker workers[], const char *what)
{
    pthread_t threads[THREADS];
    int started = 0;
    for (int n = 0; n < THREADS; n++) {
        started += pthread_create(&threads[n], NULL, work, &workers[n]) == 0;
    }
    hazard_check(started == THREADS, "%d threads", started);
    for (int n = 0; n < started; n++) {
        pthread_join(threads[n], NULL);
        hazard_check(workers[n].wrong == 0, "%s: thread %d: %d of %d runs are wrong", what, n,
                     workers[n].wrong, runs());
    }
}

/* Equal bits are promised only on request on some devices. */
static uint64_t repeatable(fattn_op op) { return op == FATTN_BACKWARD ? FATTN_DETERMINISTIC : 0; }

/* Cases of one shape and different values. */
static void check_threads(const place *at, fattn_op op)
{
    worker workers[THREADS];
    fattn_plan *plan = NULL;
    memset(workers, 0, sizeof workers);
    for (int n = 0; n < THREADS; n++) {
        worker *const w = &workers[n];
        w->c = hazard_case(op, FATTN_F32, 2, 4, 2, 30, 150, 16);
        w->c.problem.features = FATTN_CAUSAL | repeatable(op);
        w->c.index = n; /* other values */
        hazard_check(hazard_build(&w->c) && draw_save(&w->c) == FATTN_OK, "%s",
                     fattn_last_reason());
    }
    const bool taken = !hazard_spares(at, &workers[0].c) && hazard_takes(at, &workers[0].c);
    if (taken && hazard_check(!fattn_plan_create_with(at->device, &workers[0].c.problem,
                                                      at->kernel->name, NULL, &plan),
                              "%s: %s", at->kernel->name, fattn_last_reason())) {
        for (int n = 0; n < THREADS; n++) {
            worker *const w = &workers[n];
            w->plan = plan;
            hazard_check(fattn_device_malloc(at->device, (size_t)plan->tiling.workspace,
                                             &w->workspace) == FATTN_OK &&
                             fattn_stream_create(at->device, &w->stream) == FATTN_OK &&
                             twin_make(&w->t, at->device, &w->c) == FATTN_OK &&
                             run_plan(w) == FATTN_OK,
                         "%s", fattn_last_reason());
            w->expected = hazard_copy(&w->c, op == FATTN_FORWARD ? DRAW_O : DRAW_DK);
        }
        run_all(workers, at->kernel->name);
    }
    for (int n = 0; n < THREADS; n++) {
        free(workers[n].expected);
        twin_free(&workers[n].t);
        fattn_stream_destroy(at->device, workers[n].stream);
        fattn_device_free(at->device, workers[n].workspace);
        draw_free(&workers[n].c);
    }
    fattn_plan_destroy(plan);
}

static void check_one_shot(fattn_device *device, const char *name, fattn_op op)
{
    worker workers[THREADS];
    memset(workers, 0, sizeof workers);
    for (int n = 0; n < THREADS; n++) {
        worker *const w = &workers[n];
        w->device = device;
        w->c = hazard_case(op, FATTN_F32, 1, 2, 1, 20 + n / 2, 90, 16);
        w->c.problem.features = repeatable(op);
        w->c.index = n;
        hazard_check(hazard_build(&w->c) && draw_save(&w->c) == FATTN_OK &&
                         fattn_attention(device, &w->c.problem, &w->c.buffers, NULL) == FATTN_OK,
                     "%s", fattn_last_reason());
        w->expected = hazard_copy(&w->c, op == FATTN_FORWARD ? DRAW_O : DRAW_DK);
    }
    run_all(workers, name);
    for (int n = 0; n < THREADS; n++) {
        free(workers[n].expected);
        draw_free(&workers[n].c);
    }
}

static void i3(void)
{
    static const fattn_op ops[] = {FATTN_FORWARD, FATTN_BACKWARD};
    EACH (o, ops) {
        for (int n = 0; n < hazard_place_count; n++) {
            check_threads(&hazard_places[n], ops[o]);
            if (n == 0 || hazard_places[n].device != hazard_places[n - 1].device) {
                check_one_shot(hazard_places[n].device, hazard_places[n].backend, ops[o]);
            }
        }
    }
    fattn_cache_clear();
}

/* -------------------------------------------------------------------------------------------------
 * I5: nothing falls back in silence
 * ---------------------------------------------------------------------------------------------- */

/* Unknown names are errors whose message contains the name. */
static void check_names(void)
{
    static const struct {
        const char *variable, *spec;
        fattn_status status;
    } wrong[] = {
        {"FATTN_BACKEND", "nonsense", FATTN_UNKNOWN_DEVICE},
        {"FATTN_BACKEND", "cpu:7", FATTN_NO_DEVICE},
        {"FATTN_CPU_ISA", "nonsense", FATTN_BAD_ENVIRONMENT},
    };
    EACH (w, wrong) {
        fattn_device *device = NULL;
        char *const before = getenv(wrong[w].variable) ? strdup(getenv(wrong[w].variable)) : NULL;
        set_environment(wrong[w].variable, wrong[w].spec);
        const fattn_status status = fattn_device_open(
            strcmp(wrong[w].variable, "FATTN_CPU_ISA") == 0 ? "cpu" : NULL, &device);
        hazard_check(status == wrong[w].status && device == NULL, "%s=%s: %s", wrong[w].variable,
                     wrong[w].spec, fattn_status_string(status));
        hazard_check(strstr(fattn_last_reason(), wrong[w].spec) != NULL, "\"%s\" does not say %s",
                     fattn_last_reason(), wrong[w].spec);
        fattn_device_close(device);
        set_environment(wrong[w].variable, before);
        free(before);
    }
}

static void check_kernel_names(void)
{
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 4, 4, 8);
    fattn_plan *plan = NULL;
    set_environment("FATTN_KERNEL", "nonsense");
    const fattn_status status = fattn_plan_create(hazard_places[0].device, &c.problem, &plan);
    hazard_check(status == FATTN_INVALID_ARGUMENT && plan == NULL, "FATTN_KERNEL=nonsense: %s",
                 fattn_status_string(status));
    hazard_check(strstr(fattn_last_reason(), "nonsense") != NULL, "%s", fattn_last_reason());
    set_environment("FATTN_KERNEL", NULL);
    draw_free(&c);
}

/* A row that is requested by name and declines is an error, and no other row runs. A row that
 * another one replaces is on the plan's list, with its reason. */
static void check_declining(void)
{
    for (int n = 0; n < hazard_place_count; n++) {
        const place *const at = &hazard_places[n];
        const bool forward = (at->kernel->ops & FATTN_OP_BIT(FATTN_FORWARD)) != 0;
        const bool backward = (at->kernel->ops & FATTN_OP_BIT(FATTN_BACKWARD)) != 0;
        draw_case c =
            hazard_case(forward ? FATTN_BACKWARD : FATTN_FORWARD, FATTN_F32, 1, 1, 1, 4, 4, 8);
        if (forward != backward && hazard_build(&c)) {
            const fattn_status status = hazard_run(at, &c, NULL);
            hazard_check(status == FATTN_UNSUPPORTED, "%s: the other op: %s", at->kernel->name,
                         fattn_status_string(status));
            hazard_check(strstr(fattn_last_reason(), at->kernel->name) != NULL, "%s",
                         fattn_last_reason());
        }
        draw_free(&c);

        c = hazard_case(forward ? FATTN_FORWARD : FATTN_BACKWARD, FATTN_F32, 1, 1, 1, 300, 300, 8);
        fattn_plan *plan = NULL;
        if (hazard_check(fattn_plan_create(at->device, &c.problem, &plan) == FATTN_OK, "%s",
                         fattn_last_reason())) {
            char words[8192];
            fattn_plan_info info = {.struct_size = sizeof info};
            fattn_plan_describe(plan, words, sizeof words);
            fattn_plan_get_info(plan, &info);
            hazard_check(strstr(words, info.kernel) != NULL, "the plan does not name its kernel %s",
                         info.kernel);
            const char *missing = NULL;
            const fattn_kernel *row;
            for (int i = 0;
                 (row = at->device->backend->kernel(at->device->impl, i, &missing)) != NULL &&
                 row != plan->kernel;
                 i++) {
                hazard_check(strstr(words, row->name) != NULL, "%s was passed over in silence",
                             row->name);
            }
        }
        fattn_plan_destroy(plan);
        draw_free(&c);
    }
}

static void i5(void)
{
    check_names();
    check_kernel_names();
    check_declining();
    if (fattn_device_count("cuda") == 0) { /* absent hardware is an error, never the CPU */
        fattn_device *device = NULL;
        const fattn_status status = fattn_device_open("cuda", &device);
        hazard_check((status == FATTN_NO_DEVICE || status == FATTN_UNKNOWN_DEVICE) &&
                         device == NULL,
                     "cuda: %s", fattn_status_string(status));
    }
}

/* -------------------------------------------------------------------------------------------------
 * I1, I2, I4, H5: contexts, streams and graphs of a GPU
 * ---------------------------------------------------------------------------------------------- */

/* The driver, with the device's primary context current until close_driver. Without a driver
 * returns NULL and skips the hazard. */
static const driver *open_driver(void)
{
    gpu_context context = NULL;
    const bool is_cuda = strcmp(hazard_places[0].backend, "cuda") == 0;
    const driver *const cuda = is_cuda ? driver_open() : NULL;
    if (!cuda || !cuda->graph_launch) {
        hazard_skip("needs backend cuda and NVIDIA's driver");
        return NULL;
    }
    hazard_check(!cuda->primary_retain(&context, 0) && !cuda->context_set(context),
                 "no primary context");
    return cuda;
}

static void close_driver(const driver *cuda)
{
    cuda->context_set(NULL);
    cuda->primary_release(0);
}

/* Judges the planner's choice on a device while another context is current. */
static void check_from(const driver *cuda, gpu_context current, fattn_device *device, draw_case *c,
                       judge_truth *truth, const char *what)
{
    judge_verdict v;
    gpu_context after = NULL;
    cuda->context_set(current);
    judge_run(device, NULL, c, truth, &v);
    cuda->context_get(&after);
    hazard_check(v.outcome == JUDGE_PASSED, "%s: %s", what, v.reason);
    hazard_check(after == current, "%s: the current context was changed", what);
    cuda->context_set(NULL);
}

/* Two contexts on the first device, and the second device if there is one. */
static void i1(void)
{
    const driver *const cuda = open_driver();
    if (!cuda) {
        return;
    }
    enum { CONTEXTS = 2 };
    gpu_context contexts[CONTEXTS] = {NULL, NULL}, primary = NULL;
    fattn_device *devices[CONTEXTS + 1] = {NULL, NULL, NULL};
    fattn_stream stream = NULL;
    judge_truth truth = {0};
    cuda->context_get(&primary);
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 2, 4, 2, 50, 300, 40);
    hazard_build(&c);
    for (int n = 0; n < CONTEXTS; n++) {
        hazard_check(!cuda->context_create(&contexts[n], 0, 0), "no context %d", n);
        hazard_check(!fattn_device_open("cuda:0", &devices[n]), "%s", fattn_last_reason());
        cuda->context_set(NULL);
    }
    if (fattn_device_count("cuda") > 1) {
        hazard_check(!fattn_device_open("cuda:1", &devices[CONTEXTS]), "%s", fattn_last_reason());
    }
    const gpu_context callers[] = {NULL, primary, contexts[0], contexts[1]};
    for (int n = 0; n <= CONTEXTS; n++) {
        EACH (m, callers) {
            if (devices[n]) {
                check_from(cuda, callers[m], devices[n], &c, &truth,
                           n < CONTEXTS ? "a context of its own" : "the second device");
            }
        }
    }
    fattn_plan *plan = NULL;
    twin t = {.device = devices[0]};
    hazard_check(!fattn_stream_create(devices[1], &stream) &&
                     !fattn_plan_create(devices[0], &c.problem, &plan) &&
                     !twin_make(&t, devices[0], &c),
                 "%s", fattn_last_reason());
    const fattn_status status = fattn_execute(plan, &t.buffers, NULL, stream);
    hazard_check(status == FATTN_INVALID_ARGUMENT, "a stream of another context: %s",
                 fattn_status_string(status));
    twin_free(&t);
    fattn_plan_destroy(plan);
    fattn_stream_destroy(devices[1], stream);
    for (int n = 0; n <= CONTEXTS; n++) {
        fattn_device_close(devices[n]);
    }
    for (int n = 0; n < CONTEXTS; n++) {
        cuda->context_destroy(contexts[n]);
    }
    judge_truth_free(&truth);
    draw_free(&c);
    cuda->context_set(primary);
    close_driver(cuda);
}

/* Cases of one problem with different values, whose images share device memory in turn; their
 * results from a plain run; and the plan, on a stream. */
enum { TURNS = 2, REPLAYS = 100 };

typedef struct turns {
    draw_case cases[TURNS];
    unsigned char *expected[TURNS];
    draw_id out;
    twin t; /* for one case after the other */
    fattn_plan *plan;
    void *workspace;
} turns;

static bool turns_make(turns *s, const place *at, fattn_op op, uint64_t features)
{
    memset(s, 0, sizeof *s);
    s->out = op == FATTN_FORWARD ? DRAW_O : DRAW_DQ;
    s->t.device = at->device;
    bool good = true;
    for (int n = 0; n < TURNS; n++) {
        draw_case *const c = &s->cases[n];
        const bool f32 = at->kernel->dtypes & FATTN_DTYPE_BIT(FATTN_F32);
        const int64_t rows = at->kernel->rows_max ? 1 : 70;
        *c = hazard_case(op, f32 ? FATTN_F32 : FATTN_F16, 2, 4, 4, rows, 700, 64);
        c->problem.features = features | repeatable(op);
        c->problem.dropout_p = features & FATTN_DROPOUT ? 0.5 : 0;
        c->family = n ? DRAW_UNIFORM : DRAW_GAUSSIAN; /* other values in the same layout */
        c->seed_pointers = true;
        c->seed_value = 11 + (uint64_t)n;
        c->aligned_rows = true; /* as rows that copy in chunks require */
        good = good && hazard_build(c) && hazard_takes(at, c) && draw_save(c) == FATTN_OK;
        if (good) {
            hazard_check(hazard_run(at, c, NULL) == FATTN_OK, "%s", fattn_last_reason());
            s->expected[n] = hazard_copy(c, s->out);
        }
    }
    return good &&
           hazard_check(!fattn_plan_create_with(at->device, &s->cases[0].problem, at->kernel->name,
                                                NULL, &s->plan) &&
                            !fattn_device_malloc(at->device, (size_t)s->plan->tiling.workspace,
                                                 &s->workspace) &&
                            !twin_make(&s->t, at->device, &s->cases[0]),
                        "%s", fattn_last_reason());
}

static void turns_free(turns *s)
{
    fattn_device_free(s->t.device, s->workspace);
    fattn_plan_destroy(s->plan);
    twin_free(&s->t);
    for (int n = 0; n < TURNS; n++) {
        free(s->expected[n]);
        draw_free(&s->cases[n]);
    }
}

/* Sends the n-th case, runs the graph, or the plan if there is none, and compares. */
static bool turn(turns *s, int n, const driver *cuda, driver_exec graph, gpu_stream stream)
{
    draw_case *const c = &s->cases[n % TURNS];
    hazard_clear_outputs(c);
    s->t.c = c;
    fattn_status status = twin_send(&s->t, stream);
    if (!status && !graph) {
        status = fattn_execute(s->plan, &s->t.buffers, s->workspace, stream);
    } else if (!status) {
        hazard_check(cuda->graph_launch(graph, stream) == 0, "the graph is not launched");
    }
    status = status ? status : twin_read(&s->t, stream);
    return hazard_check(status == FATTN_OK, "%s", fattn_last_reason()) &&
           hazard_check(hazard_equals(c, s->out, s->expected[n % TURNS]),
                        "%s: run %d gives other bits", s->plan->kernel->name, n);
}

/* A stream that does not wait for the default stream. */
static void i2(void)
{
    const driver *const cuda = open_driver();
    for (int n = 0; cuda && n < hazard_place_count; n++) {
        for (fattn_op op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
            turns s;
            gpu_stream stream = NULL;
            hazard_check(!cuda->stream_create(&stream, 1), "no stream");
            bool good = turns_make(&s, &hazard_places[n], op, FATTN_CAUSAL);
            for (int run = 0; good && run < 20; run++) {
                good = turn(&s, run, cuda, NULL, stream);
            }
            turns_free(&s);
            cuda->stream_destroy(stream);
        }
    }
    if (cuda) {
        close_driver(cuda);
    }
}

/* Captures a run once and replays it on changing inputs. */
static void check_replays(const driver *cuda, const place *at, fattn_op op, uint64_t features)
{
    turns s;
    gpu_stream stream = NULL;
    driver_graph graph = NULL;
    driver_exec exec = NULL;
    if (turns_make(&s, at, op, features)) {
        hazard_check(!cuda->stream_create(&stream, 1) && !cuda->capture_begin(stream, 0),
                     "capturing does not begin");
        const fattn_status status = fattn_execute(s.plan, &s.t.buffers, s.workspace, stream);
        hazard_check(status == FATTN_OK, "%s: %s", at->kernel->name, fattn_last_reason());
        bool good =
            hazard_check(!cuda->capture_end(stream, &graph) && !cuda->graph_make(&exec, graph, 0),
                         "%s: no graph", at->kernel->name);
        for (int run = 0; good && run < REPLAYS; run++) {
            good = turn(&s, run, cuda, exec, stream);
        }
        if (exec) {
            cuda->graph_exec_destroy(exec);
        }
        if (graph) {
            cuda->graph_destroy(graph);
        }
        cuda->stream_destroy(stream);
    }
    turns_free(&s);
}

static void replay_all(uint64_t features)
{
    const driver *const cuda = open_driver();
    for (int n = 0; cuda && n < hazard_place_count; n++) {
        for (fattn_op op = FATTN_FORWARD; op <= FATTN_BACKWARD; op++) {
            check_replays(cuda, &hazard_places[n], op, features);
        }
    }
    if (cuda) {
        close_driver(cuda);
    }
}

static void i4(void) { replay_all(FATTN_CAUSAL); }

/* The seed behind the pointer differs in every replay. */
static void h5(void) { replay_all(FATTN_DROPOUT); }

static const hazard table[] = {
    {"hazard_H5", "the seed was saved by the wrong block under graphs", h5, NULL},
    {"hazard_I1", "the kernel ran on device 0", i1, NULL},
    {"hazard_I2", "a stream that is not the default one crashed", i2, NULL},
    {"hazard_I3", "a hidden workspace was shared by concurrent calls", i3, NULL},
    {"hazard_I4", "a counter was not zeroed when a graph was replayed", i4, NULL},
    {"hazard_I5", "a fallback recursed, or ran in silence", i5, NULL},
    {"hazard_I6", "a failed launch went unnoticed", NULL,
     "check_cuda_failures makes every launch fail, on a driver that does so when told"},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
