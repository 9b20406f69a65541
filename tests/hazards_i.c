/* SPDX-License-Identifier: Apache-2.0 */
/* Hazards of group I: devices, streams, concurrency, dispatch. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/env.h"
#include "tests/hazard.h"

#define EACH(i, list) for (size_t i = 0; i < sizeof(list) / sizeof *(list); i++)

/* -------------------------------------------------------------------------------------------------
 * I3: threads
 * ---------------------------------------------------------------------------------------------- */

enum { THREADS = 8, RUNS = 25 };

/* One thread's work: a case of its own, through a plan of all or through the one-shot call. */
typedef struct worker {
    draw_case c;
    const fattn_plan *plan; /* NULL: one-shot */
    fattn_device *device;
    void *workspace;
    unsigned char *expected; /* NULL: nothing to compare with yet */
    int wrong;
} worker;

static void *work(void *argument)
{
    worker *const w = argument;
    for (int run = 0; run < RUNS; run++) {
        hazard_clear_outputs(&w->c);
        const fattn_status status =
            w->plan ? fattn_execute(w->plan, &w->c.buffers, w->workspace, NULL)
                    : fattn_attention(w->device, &w->c.problem, &w->c.buffers, NULL);
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
                     workers[n].wrong, RUNS);
    }
}

/* Cases of one shape and different values; half of the threads use the plan, half the one-shot
 * call. */
static void check_threads(const place *at, fattn_op op)
{
    worker workers[THREADS];
    fattn_plan *plan = NULL;
    memset(workers, 0, sizeof workers);
    for (int n = 0; n < THREADS; n++) {
        worker *const w = &workers[n];
        w->c = hazard_case(op, FATTN_F32, 2, 4, 2, 30, 150, 16);
        w->c.problem.features = FATTN_CAUSAL;
        w->c.index = n; /* other values */
        hazard_check(hazard_build(&w->c) && draw_save(&w->c) == FATTN_OK, "%s",
                     fattn_last_reason());
    }
    const bool taken = hazard_takes(at, &workers[0].c);
    if (taken && fattn_plan_create_with(at->device, &workers[0].c.problem, at->kernel->name, NULL,
                                        &plan) == FATTN_OK) {
        for (int n = 0; n < THREADS; n++) {
            worker *const w = &workers[n];
            w->plan = plan;
            hazard_check(fattn_device_malloc(at->device, (size_t)plan->tiling.workspace,
                                             &w->workspace) == FATTN_OK &&
                             fattn_execute(plan, &w->c.buffers, w->workspace, NULL) == FATTN_OK,
                         "%s", fattn_last_reason());
            w->expected = hazard_copy(&w->c, op == FATTN_FORWARD ? DRAW_O : DRAW_DK);
        }
        run_all(workers, at->kernel->name);
    }
    for (int n = 0; n < THREADS; n++) {
        free(workers[n].expected);
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

static void set(const char *name, const char *value)
{
    if (value) {
        setenv(name, value, 1);
    } else {
        unsetenv(name);
    }
    fattn_env_reload();
}

/* Names that nothing has are errors whose sentence says the name. */
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
        set(wrong[w].variable, wrong[w].spec);
        const fattn_status status = fattn_device_open(
            strcmp(wrong[w].variable, "FATTN_CPU_ISA") == 0 ? "cpu" : NULL, &device);
        hazard_check(status == wrong[w].status && device == NULL, "%s=%s: %s", wrong[w].variable,
                     wrong[w].spec, fattn_status_string(status));
        hazard_check(strstr(fattn_last_reason(), wrong[w].spec) != NULL, "\"%s\" does not say %s",
                     fattn_last_reason(), wrong[w].spec);
        fattn_device_close(device);
        set(wrong[w].variable, NULL);
    }
}

static void check_kernel_names(void)
{
    draw_case c = hazard_case(FATTN_FORWARD, FATTN_F32, 1, 1, 1, 4, 4, 8);
    fattn_plan *plan = NULL;
    set("FATTN_KERNEL", "nonsense");
    const fattn_status status = fattn_plan_create(hazard_places[0].device, &c.problem, &plan);
    hazard_check(status == FATTN_INVALID_ARGUMENT && plan == NULL, "FATTN_KERNEL=nonsense: %s",
                 fattn_status_string(status));
    hazard_check(strstr(fattn_last_reason(), "nonsense") != NULL, "%s", fattn_last_reason());
    set("FATTN_KERNEL", NULL);
    draw_free(&c);
}

/* A row that is named and declines is an error, and no other row runs; a row that is passed over in
 * favour of another is on the plan's list with its reason. */
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

static const hazard table[] = {
    {"hazard_I1", "the kernel ran on device 0", NULL, "needs two GPUs"},
    {"hazard_I2", "a stream that is not the default one crashed", NULL,
     "a CPU has no streams: any but NULL is an error, which the unit tests provoke"},
    {"hazard_I3", "a hidden workspace was shared by concurrent calls", i3, NULL},
    {"hazard_I4", "a counter was not zeroed when a graph was replayed", NULL, "graphs need a GPU"},
    {"hazard_I5", "a fallback recursed, or ran in silence", i5, NULL},
    {"hazard_I6", "a failed launch went unnoticed", NULL, "launches need a GPU"},
    {NULL, NULL, NULL, NULL},
};

int main(int argc, char **argv) { return hazard_main(table, argc, argv); }
