/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L

#include "tests/hazard.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/problem.h"
#include "tests/device.h"
#include "tests/row.h"

#ifdef __SANITIZE_ADDRESS__
#define SANITIZED true
#else
#define SANITIZED false
#endif

enum { PLACES_MAX = 256, WATCHDOG_SECONDS = 240, TOLD_MAX = 5 };

static unsigned watchdog_seconds = WATCHDOG_SECONDS;

place hazard_places[PLACES_MAX];
int hazard_place_count;

static const char *running = "no hazard";
static int64_t checks, failures;
static const char *skipped; /* why the running hazard was skipped */
static bool asked, taken;   /* a row was asked to take a case of it, and one did that is tested */

void hazard_skip(const char *why) { skipped = why; }

bool hazard_check(bool holds, const char *format, ...)
{
    checks++;
    if (holds) {
        return true;
    }
    if (failures++ < TOLD_MAX) {
        va_list arguments;
        va_start(arguments, format);
        printf("# %s: ", running);
        vprintf(format, arguments);
        putchar('\n');
        va_end(arguments);
    }
    return false;
}

/* -------------------------------------------------------------------------------------------------
 * Places
 * ---------------------------------------------------------------------------------------------- */

/* named NULL: the places of every backend in host memory. HAZARD_ROW leaves one of its rows. */
static void find_places(const char *named, fattn_device *devices[], int *device_count)
{
    const char *const only = getenv("HAZARD_ROW");
    const fattn_backend *backend;
    for (int i = 0; (backend = fattn_backend_at(i)) != NULL; i++) {
        fattn_device *device = NULL;
        const bool meant = named ? strcmp(named, backend->name) == 0 : backend->host_memory;
        if (!meant || backend->count() == 0 ||
            fattn_device_open(backend->name, &device) != FATTN_OK) {
            continue;
        }
        devices[(*device_count)++] = device;
        const fattn_kernel *row;
        for (int at = 0; (row = row_next(device, &at));) {
            if (!only || strcmp(only, row->name) == 0) {
                if (hazard_place_count == PLACES_MAX) {
                    tap_bail("more rows than PLACES_MAX");
                }
                hazard_places[hazard_place_count++] = (place){device, row, backend->name};
            }
        }
    }
}

bool hazard_on_host(const place *at) { return at->device->backend->host_memory; }

bool hazard_sanitized(void) { return SANITIZED; }

bool hazard_emulated(void)
{
    fattn_device_info info = {.struct_size = sizeof info};
    return fattn_device_get_info(hazard_places[0].device, &info) == FATTN_OK &&
           strncmp(info.name, "emulated ", strlen("emulated ")) == 0;
}

/* Notes that the place has taken a case, or not. The reference backend takes all, and is the judge;
 * it is tested only where no other backend is. */
static bool took(const place *at, bool takes)
{
    const char *const last = hazard_places[hazard_place_count - 1].backend;
    const bool alone = strcmp(hazard_places[0].backend, last) == 0;
    asked = true;
    taken = taken || (takes && (alone || strcmp(at->backend, "reference") != 0));
    return takes;
}

bool hazard_takes(const place *at, const draw_case *c)
{
    fattn_plan *plan = NULL;
    const fattn_status status =
        fattn_plan_create_with(at->device, &c->problem, at->kernel->name, NULL, &plan);
    fattn_plan_destroy(plan);
    if (status != FATTN_OK && status != FATTN_UNSUPPORTED) {
        hazard_check(false, "%s: %s: %s", at->kernel->name, fattn_status_string(status),
                     fattn_last_reason());
    }
    return took(at, status == FATTN_OK);
}

/* An earlier place runs the same code, compiled for a better instruction set. */
static bool is_repeated(const place *at)
{
    const char *const row = strchr(at->kernel->name, '_');
    for (const place *other = hazard_places; row != NULL && other < at; other++) {
        const char *const name = strchr(other->kernel->name, '_');
        if (other->device == at->device && name != NULL && strcmp(name, row) == 0) {
            return true;
        }
    }
    return false;
}

bool hazard_spares(const place *at, const draw_case *c)
{
    const fattn_problem *const p = &c->problem;
    const int64_t slices = p->batch * p->heads_q;
    const int64_t longest = p->seqlen_q > p->seqlen_k ? p->seqlen_q : p->seqlen_k;
    return SANITIZED && is_repeated(at) &&
           (slices * longest >= 15000 || slices * p->seqlen_q * p->seqlen_k >= 2000);
}

/* -------------------------------------------------------------------------------------------------
 * Cases
 * ---------------------------------------------------------------------------------------------- */

draw_case hazard_case(fattn_op op, fattn_dtype dtype, int64_t batch, int64_t heads_q,
                      int64_t heads_k, int64_t rows, int64_t keys, int64_t dim)
{
    draw_case c;
    draw_blank(&c, (uint64_t)(rows * 1000003 + keys * 1009 + dim));
    fattn_problem *const p = &c.problem;
    p->op = op, p->dtype = dtype;
    p->batch = batch, p->heads_q = heads_q, p->heads_k = heads_k;
    p->seqlen_q = rows, p->seqlen_k = keys, p->dim = p->dim_v = dim;
    p->outputs = op == FATTN_FORWARD ? FATTN_OUT_O | FATTN_OUT_LSE : 0;
    if (draw_sequences(&c) != 0) {
        tap_bail("out of memory");
    }
    return c;
}

bool hazard_build(draw_case *c)
{
    return draw_build(c) == 0 ||
           hazard_check(false, "a case of %lld x %lld cannot be allocated",
                        (long long)c->problem.seqlen_q, (long long)c->problem.seqlen_k);
}

static int menu_size(const fattn_kernel *kernel)
{
    int entries = 0;
    while (kernel->tiles[entries].br != 0) {
        entries++;
    }
    return entries;
}

static void judge_at(const place *at, draw_case *c, judge_truth *truth, int splits,
                     const char *words)
{
    const bool cuts = at->kernel->split && c->problem.op == FATTN_FORWARD &&
                      !(c->problem.features & FATTN_BATCH_INVARIANT);
    const int tiles = splits < 0 ? 0 : menu_size(at->kernel);
    for (c->tile = 0; c->tile <= tiles; c->tile++) {
        for (c->splits = 0; c->splits <= (cuts && splits > 0 ? splits : 0); c->splits++) {
            judge_verdict v;
            judge_run(at->device, at->kernel, c, truth, &v);
            if (!took(at, v.outcome != JUDGE_DECLINED)) {
                return;
            }
            hazard_check(v.outcome == JUDGE_PASSED, "%s, tile %lldx%lld, splits %lld: %s: %s",
                         at->kernel->name, (long long)v.br, (long long)v.bc, (long long)v.splits,
                         words, v.reason);
        }
    }
}

static void judge_everywhere(draw_case *c, int splits, const char *words)
{
    judge_truth truth = {0};
    const fattn_status status = draw_save(c);
    const bool before = taken;
    taken = false;
    if (hazard_check(status == FATTN_OK, "%s: the oracle: %s", words, fattn_last_reason())) {
        for (int n = 0; n < hazard_place_count; n++) {
            if (!hazard_spares(&hazard_places[n], c)) {
                judge_at(&hazard_places[n], c, &truth, splits, words);
            }
        }
        hazard_check(taken || getenv("HAZARD_ROW"), "%s: no row takes it: %s", words,
                     fattn_last_reason());
    }
    taken = taken || before;
    judge_truth_free(&truth);
    draw_free(c);
}

void hazard_judge(draw_case *c, int splits, const char *format, ...)
{
    char words[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    judge_everywhere(c, splits, words);
}

void hazard_judge_drawn(draw_case *c, int splits, const char *format, ...)
{
    char words[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    if (hazard_build(c)) {
        judge_everywhere(c, splits, words);
    } else {
        draw_free(c);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Twins
 * ---------------------------------------------------------------------------------------------- */

static int64_t entries(const draw_tensor *t)
{
    return t->extent[0] * t->extent[1] * t->extent[2] * t->extent[3];
}

/* A nearly empty image: tensors with huge strides in a reserved range of addresses. Only the
 * elements of its tensors are copied. */
static bool is_hollow(const draw_case *c, int image)
{
    int64_t bytes = 0;
    for (int id = 0; id < DRAW_IDS; id++) {
        const draw_tensor *const t = &c->tensors[id];
        bytes += t->present && t->image == image ? entries(t) * t->size : 0;
    }
    return c->images[image].size / 64 > bytes + (1 << 20);
}

/* Copies a tensor of a hollow image, row by row, to the device or back. */
static fattn_status copy_rows(const twin *w, draw_id id, bool send, fattn_stream stream)
{
    const draw_tensor *const t = &w->c->tensors[id];
    const int64_t row = t->stride[3] == 1 ? t->extent[3] : 1;
    const int64_t *const e = t->extent;
    unsigned char *const there = w->bytes[t->image], *const here = w->c->images[t->image].bytes;
    fattn_status status = FATTN_OK;
    for (int64_t n = 0; !status && n < entries(t); n += row) {
        const int64_t at[4] = {n / (e[1] * e[2] * e[3]), n / (e[2] * e[3]) % e[1], n / e[3] % e[2],
                               n % e[3]};
        int64_t offset = 0;
        for (int axis = 0; axis < 4; axis++) {
            offset += at[axis] * t->stride[axis];
        }
        offset = t->offset + offset * t->size;
        status = fattn_device_copy(w->device, (send ? there : here) + offset,
                                   (send ? here : there) + offset, (size_t)(row * t->size), stream);
    }
    return status;
}

static fattn_status copy_image(const twin *w, int image, bool send, fattn_stream stream)
{
    unsigned char *const there = w->bytes[image], *const here = w->c->images[image].bytes;
    fattn_status status = FATTN_OK;
    if (!is_hollow(w->c, image)) {
        return fattn_device_copy(w->device, send ? there : here, send ? here : there,
                                 (size_t)w->c->images[image].size, stream);
    }
    for (int id = 0; !status && id < DRAW_IDS; id++) {
        const draw_tensor *const t = &w->c->tensors[id];
        if (t->present && t->image == image) {
            status = copy_rows(w, (draw_id)id, send, stream);
        }
    }
    return status;
}

fattn_status twin_send(const twin *t, fattn_stream stream)
{
    fattn_status status = FATTN_OK;
    for (int n = 0; !status && n < t->c->image_count; n++) {
        status = copy_image(t, n, true, stream);
    }
    return status ? status : fattn_stream_synchronize(t->device, stream);
}

fattn_status twin_make(twin *t, fattn_device *device, const draw_case *c)
{
    fattn_status status = FATTN_OK;
    *t = (twin){.device = device, .c = c, .buffers = c->buffers};
    for (int n = 0; !status && n < c->image_count; n++) {
        void *memory = NULL;
        status = fattn_device_malloc(device, (size_t)c->images[n].size, &memory);
        t->bytes[n] = memory;
    }
    for (int id = 0; !status && id < DRAW_IDS; id++) {
        const draw_tensor *const tensor = &c->tensors[id];
        if (tensor->present) {
            draw_point(&t->buffers, (draw_id)id, t->bytes[tensor->image] + tensor->offset);
        }
    }
    return status ? status : twin_send(t, NULL);
}

fattn_status twin_read(const twin *t, fattn_stream stream)
{
    fattn_status status = fattn_stream_synchronize(t->device, stream);
    for (int n = 0; !status && n < t->c->image_count; n++) {
        status = t->c->images[n].output ? copy_image(t, n, false, stream) : FATTN_OK;
    }
    return status ? status : fattn_stream_synchronize(t->device, stream);
}

void twin_free(twin *t)
{
    for (int n = 0; n < DRAW_IDS; n++) {
        fattn_device_free(t->device, t->bytes[n]);
    }
}

/* -------------------------------------------------------------------------------------------------
 * Runs whose outputs a hazard reads itself
 * ---------------------------------------------------------------------------------------------- */

fattn_status hazard_execute(const fattn_plan *plan, const fattn_buffers *buffers)
{
    if (plan->device->backend->host_memory) {
        return fattn_execute(plan, buffers, NULL, NULL);
    }
    fattn_buffers checked;
    const fattn_status status = fattn_buffers_normalise(&plan->problem, buffers, &checked);
    return status ? status : fattn_plan_run_staged(plan, &checked, NULL, NULL);
}

static fattn_status execute_twin(const fattn_plan *plan, const draw_case *c)
{
    twin t;
    fattn_status status = twin_make(&t, plan->device, c);
    status = status ? status : fattn_execute(plan, &t.buffers, NULL, NULL);
    status = status ? status : twin_read(&t, NULL);
    twin_free(&t);
    return status;
}

fattn_status hazard_run(const place *at, const draw_case *c, const fattn_wish *wish)
{
    fattn_plan *plan = NULL;
    fattn_status status =
        fattn_plan_create_with(at->device, &c->problem, at->kernel->name, wish, &plan);
    bool hollow = false;
    for (int n = 0; n < c->image_count; n++) {
        hollow = hollow || is_hollow(c, n);
    }
    if (status == FATTN_OK) {
        status = hollow && !hazard_on_host(at) ? execute_twin(plan, c)
                                               : hazard_execute(plan, &c->buffers);
    }
    fattn_plan_destroy(plan);
    return status;
}

void hazard_clear_outputs(draw_case *c)
{
    for (int n = 0; n < c->image_count; n++) {
        if (c->images[n].output) {
            memset(c->images[n].bytes, 0xff, (size_t)c->images[n].size);
        }
    }
}

unsigned char *hazard_copy(const draw_case *c, draw_id id)
{
    const draw_image *const image = &c->images[c->tensors[id].image];
    unsigned char *const bytes = malloc((size_t)image->size);
    if (bytes == NULL) {
        tap_bail("out of memory");
    }
    return memcpy(bytes, image->bytes, (size_t)image->size);
}

bool hazard_equals(const draw_case *c, draw_id id, const unsigned char *bytes)
{
    const draw_image *const image = &c->images[c->tensors[id].image];
    return memcmp(image->bytes, bytes, (size_t)image->size) == 0;
}

/* -------------------------------------------------------------------------------------------------
 * The act
 * ---------------------------------------------------------------------------------------------- */

static char late[128]; /* what to print then: a signal handler may not format */

static void end_late(int number)
{
    (void)number;
    _exit(write(STDOUT_FILENO, late, strlen(late)) < 0 ? 3 : 2);
}

static bool wanted(const char *id, int argc, char **argv)
{
    const bool rest = argc <= 1 || argv[1][0] == '-'; /* all but those named */
    for (int n = 1; n < argc; n++) {
        if (strcmp(argv[n] + rest, id) == 0) {
            return !rest;
        }
    }
    return rest;
}

/* A word that names no hazard of the table. */
static const char *unknown(const hazard *table, int argc, char **argv)
{
    for (int n = 1; n < argc; n++) {
        const hazard *h = table;
        while (h->id != NULL && strcmp(argv[n] + (argv[1][0] == '-'), h->id) != 0) {
            h++;
        }
        if (h->id == NULL) {
            return argv[n];
        }
    }
    return NULL;
}

static void run_one(const hazard *h)
{
    char title[256];
    snprintf(title, sizeof title, "%s: %s", h->id, h->broke);
    if (h->test == NULL) {
        tap_skip(title, h->skip);
        return;
    }
    running = h->id;
    checks = failures = 0;
    skipped = NULL;
    asked = taken = false;
    snprintf(late, sizeof late, "Bail out! %s took more than %u seconds\n", running,
             watchdog_seconds);
    alarm(watchdog_seconds);
    h->test();
    alarm(0);
    if (failures > TOLD_MAX) {
        printf("# %s: %lld failures more\n", h->id, (long long)(failures - TOLD_MAX));
    }
    if (skipped && failures == 0) {
        tap_skip(title, skipped);
        return;
    }
    const bool ran = checks > 0 && (taken || !asked);
    if (!ran && failures == 0 && getenv("HAZARD_ROW")) {
        tap_skip(title, "the row takes none of its cases");
        return;
    }
    tap_check(failures == 0 && ran, "%s (%lld checks%s)", title, (long long)checks,
              ran ? "" : ": no row takes a case of it");
}

int hazard_main(const hazard *table, int argc, char **argv)
{
    fattn_device *devices[PLACES_MAX];
    int device_count = 0;
    signal(SIGALRM, end_late);
    setenv("FATTN_NUM_THREADS", "1", 0); /* programs run in parallel; hazards_i sets more */
    const char *patience = getenv("HAZARD_SECONDS"); /* under valgrind a hazard takes longer */
    if (patience != NULL) {
        watchdog_seconds = (unsigned)strtoul(patience, NULL, 10);
    }
    const char *const named = device_named();
    if (device_absent(named)) {
        return 0;
    }
    find_places(named, devices, &device_count);
    tap_check(hazard_place_count > 0, "%d kernel rows to run on", hazard_place_count);
    if (unknown(table, argc, argv)) {
        tap_check(false, "%s is a hazard", unknown(table, argc, argv));
    }
    for (const hazard *h = table; hazard_place_count > 0 && h->id != NULL; h++) {
        if (wanted(h->id, argc, argv)) {
            run_one(h);
        }
    }
    for (int n = 0; n < device_count; n++) {
        fattn_device_close(devices[n]);
    }
    return tap_done();
}
