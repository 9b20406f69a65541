/* SPDX-License-Identifier: Apache-2.0 */
/* In four parts: driver calls, the device, plans and runs, and the small verbs. */
#define _POSIX_C_SOURCE 200809L

#include "backends/gpu/gpu.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backends/gpu/args.h"
#include "core/integer.h"
#include "core/memory.h"
#include "core/operands.h"
#include "core/problem.h"
#include "core/status.h"

/* An open device: a context, and what has been loaded into it. */
typedef struct device {
    const fattn_gpu_vendor *vendor;
    const fattn_gpu_api *api;
    int number; /* the driver's handle */
    gpu_context context;
    bool retained; /* the primary context, to be released */
    int version;   /* 10 * major + minor */
    int isa;       /* of the vendor's numbers */
    int units;
    int64_t shared_memory, shared_cache;
    uint64_t mark; /* of fattn_gpu_args */
    pthread_mutex_t mutex;
    gpu_function merge, dropout, rows;
    gpu_module modules[]; /* of the vendor's images, under mutex; NULL: not loaded */
} device;

/* --- Driver calls ----------------------------------------------------------------------------- */

/* The status of a driver's result, with the driver's own words as the reason. */
static fattn_status check(const fattn_gpu_vendor *vendor, const fattn_gpu_api *api, int result,
                          const char *what)
{
    const char *name = NULL, *text = NULL;
    if (result == 0) {
        return FATTN_OK;
    }
    (void)api->error_name(result, &name);
    (void)api->error_string(result, &text);
    const fattn_status status = result == api->out_of_memory ? FATTN_OUT_OF_MEMORY
                                : result == api->no_device   ? FATTN_NO_DEVICE
                                : result == api->no_image    ? FATTN_UNSUPPORTED
                                                             : FATTN_DEVICE_ERROR;
    return fattn_fail(status, "%s: %s failed with %d, %s: %s", vendor->name, what, result,
                      name ? name : "no name", text ? text : "no text");
}

static fattn_status check_on(const device *d, int result, const char *what)
{
    return check(d->vendor, d->api, result, what);
}

/* Makes the device's context current; leave() restores the caller's. */
static fattn_status enter(const device *d)
{
    return check_on(d, d->api->context_push(d->context), "entering the context");
}

static fattn_status leave(const device *d)
{
    gpu_context own;
    return check_on(d, d->api->context_pop(&own), "leaving the context");
}

/* leave() after something that may have failed: the first failure counts. */
static fattn_status leave_with(const device *d, fattn_status status)
{
    if (status) {
        gpu_context own;
        (void)d->api->context_pop(&own); /* the reason stays that of the failure */
        return status;
    }
    return leave(d);
}

/* --- The device ------------------------------------------------------------------------------- */

int fattn_gpu_count(const fattn_gpu_vendor *vendor)
{
    const char *why = NULL;
    const fattn_gpu_api *const api = vendor->api(&why);
    int count = 0;
    return api && api->device_count(&count) == 0 && count > 0 ? count : 0;
}

/* Loads the image of a name once. Under the mutex, in the context. */
static fattn_status load_locked(device *d, const char *name, gpu_module *module)
{
    const fattn_gpu_image *const images = d->vendor->images;
    int n = 0;
    while (n < d->vendor->image_count && strcmp(images[n].name, name) != 0) {
        n++;
    }
    assert(n < d->vendor->image_count);
    if (!d->modules[n]) {
        const int result = d->api->module_load(&d->modules[n], images[n].bytes);
        if (result == d->api->no_image || result == d->api->bad_image) {
            return fattn_fail(FATTN_UNSUPPORTED,
                              "%s: this build has no code for a device of version %d.%d: it has %s",
                              d->vendor->name, d->version / 10, d->version % 10,
                              d->vendor->targets);
        }
        if (result) {
            d->modules[n] = NULL;
            return check_on(d, result, "loading a module");
        }
    }
    *module = d->modules[n];
    return FATTN_OK;
}

/* Finds an entry of an image, or, where it has none of that name, `general`, unless that is "". */
static fattn_status find_entry(device *d, const char *image, const char *entry, const char *general,
                               bool *is_general, gpu_function *function)
{
    gpu_module module = NULL;
    pthread_mutex_lock(&d->mutex);
    const fattn_status status = load_locked(d, image, &module);
    pthread_mutex_unlock(&d->mutex);
    if (status) {
        return status;
    }
    int result = d->api->module_function(function, module, entry);
    *is_general = result == d->api->no_function && general[0];
    if (*is_general) {
        result = d->api->module_function(function, module, general);
    }
    if (result == d->api->no_function) {
        return fattn_fail(FATTN_UNSUPPORTED,
                          "%s: image %s has no function %s for a device of version %d.%d",
                          d->vendor->name, image, entry, d->version / 10, d->version % 10);
    }
    return check_on(d, result, "finding a function");
}

/* The same. Asking for its registers makes the driver load it now, not at the first launch. In the
 * context. */
static fattn_status resolve_either(device *d, const char *image, const char *entry,
                                   const char *general, bool *is_general, gpu_function *function)
{
    int registers = 0;
    const fattn_status status = find_entry(d, image, entry, general, is_general, function);
    return status ? status
                  : check_on(d, d->api->function_get(&registers, d->api->registers, *function),
                             "loading a function");
}

static fattn_status resolve(device *d, const char *image, const char *entry, gpu_function *function)
{
    bool is_general;
    return resolve_either(d, image, entry, "", &is_general, function);
}

/* The caller's current context when it belongs to this device, else the device's primary one. */
static fattn_status find_context(device *d)
{
    int number = -1;
    d->context = NULL;
    fattn_status status =
        check_on(d, d->api->context_current(&d->context), "asking for the context");
    if (!status && d->context) {
        status = check_on(d, d->api->context_device(&number), "asking for the context's device");
    }
    if (status || (d->context && number == d->number)) {
        return status;
    }
    status = check_on(d, d->api->primary_retain(&d->context, d->number),
                      "retaining the primary context");
    d->retained = status == FATTN_OK;
    return status;
}

static fattn_status find_attributes(device *d)
{
    const fattn_gpu_api *const api = d->api;
    int major = 0, minor = 0, shared = 0, cache = 0;
    const struct {
        int *value, attribute;
    } wanted[] = {{&major, api->major},
                  {&minor, api->minor},
                  {&d->units, api->units},
                  {&shared, api->shared_memory},
                  {&cache, api->shared_cache}};
    fattn_status status = FATTN_OK;
    for (size_t n = 0; !status && n < sizeof wanted / sizeof wanted[0]; n++) {
        status = check_on(d, api->device_attribute(wanted[n].value, wanted[n].attribute, d->number),
                          "asking for an attribute");
    }
    d->version = 10 * major + minor;
    d->shared_memory = shared;
    d->shared_cache = cache;
    return status;
}

/* What merge and dropout_mask launch, and what its being loaded says of the device. */
static fattn_status load_verbs(device *d)
{
    gpu_module module = NULL;
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    status = load_locked(d, "verbs", &module); /* nobody else has the device yet */
    status = status ? status
                    : check_on(d, d->vendor->isa(module, d->version, &d->isa),
                               "asking for the instruction set");
    status = status ? status : resolve(d, "verbs", "merge", &d->merge);
    status = status ? status : resolve(d, "verbs", "dropout_mask", &d->dropout);
    status = status ? status : resolve(d, "verbs", "rows", &d->rows);
    return leave_with(d, status);
}

/* A number that memory does not hold by chance, not even what another process has left there. */
static uint64_t draw_mark(const void *some)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t x = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    x ^= (uint64_t)(uintptr_t)some << 20 ^ (uint64_t)getpid() << 48;
    for (int n = 0; n < 3; n++) { /* a bijection that mixes: multiplications by odd numbers */
        x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
    }
    return x ^ x >> 32;
}

fattn_status fattn_gpu_open(const fattn_gpu_vendor *vendor, int ordinal, void **impl)
{
    const char *why = NULL;
    const fattn_gpu_api *const api = vendor->api(&why);
    int count = 0;
    if (!api) {
        return fattn_fail(FATTN_NO_DEVICE, "%s: no device: %s", vendor->name, why);
    }
    fattn_status status = check(vendor, api, api->device_count(&count), "counting devices");
    if (status) {
        return status;
    }
    if (ordinal >= count) {
        return fattn_fail(FATTN_NO_DEVICE, "%s: device %d of %d", vendor->name, ordinal, count);
    }
    const size_t bytes = sizeof(device) + (size_t)vendor->image_count * sizeof(gpu_module);
    device *const d = fattn_memory_alloc(bytes);
    if (!d) {
        return fattn_fail_memory(bytes, "a GPU device");
    }
    memset(d, 0, bytes);
    d->vendor = vendor;
    d->api = api;
    d->mark = draw_mark(d);
    pthread_mutex_init(&d->mutex, NULL);
    status = check_on(d, api->device_get(&d->number, ordinal), "finding a device");
    status = status ? status : find_attributes(d);
    status = status ? status : find_context(d);
    status = status ? status : load_verbs(d);
    if (status) {
        fattn_gpu_close(d);
        return status;
    }
    *impl = d;
    return FATTN_OK;
}

void fattn_gpu_close(void *impl)
{
    device *const d = impl;
    gpu_context own;
    if (d->context && d->api->context_push(d->context) == 0) {
        for (int n = 0; n < d->vendor->image_count; n++) {
            if (d->modules[n]) {
                (void)d->api->module_unload(d->modules[n]);
            }
        }
        (void)d->api->context_pop(&own);
    }
    if (d->retained) {
        (void)d->api->primary_release(d->number);
    }
    pthread_mutex_destroy(&d->mutex);
    fattn_memory_free(d);
}

void fattn_gpu_describe(void *impl, fattn_device_info *info)
{
    const device *const d = impl;
    size_t memory = 0;
    (void)d->api->device_name(info->name, sizeof info->name, d->number);
    info->name[sizeof info->name - 1] = '\0';
    snprintf(info->isa, sizeof info->isa, d->vendor->isa_format, d->isa);
    info->units = d->units;
    info->fast_memory = d->shared_memory;
    if (d->api->device_memory(&memory, d->number) == 0) {
        info->total_memory = (int64_t)memory;
    }
}

/* Two blocks a unit hide each other's waits. */
void fattn_gpu_limits(void *impl, fattn_limits *limits)
{
    const device *const d = impl;
    *limits = (fattn_limits){.fast_memory = d->shared_memory,
                             .parallelism = 2 * (int64_t)d->units,
                             .shared_cache = d->shared_cache,
                             .units = d->units};
}

int64_t fattn_gpu_shared_bytes(const fattn_kernel *row, const fattn_problem *p, fattn_tile tile)
{
    (void)p, (void)tile;
    return fattn_gpu_kernel_of(row)->shared;
}

bool fattn_gpu_kernel_runs(const fattn_gpu_kernel *kernel, int isa)
{
    return isa >= kernel->isa && (!kernel->isa_past || isa < kernel->isa_past) &&
           (!kernel->runs || kernel->runs(isa));
}

const fattn_kernel *fattn_gpu_kernel_at(void *impl, int i, const char **missing)
{
    const device *const d = impl;
    for (const fattn_gpu_kernel *const *table = d->vendor->tables; *table; table++) {
        for (const fattn_gpu_kernel *kernel = *table; kernel->row.name; kernel++) {
            if (i-- == 0) {
                *missing = !fattn_gpu_kernel_runs(kernel, d->isa) ? kernel->needs
                           : kernel->maps && !d->api->map_encode  ? "a driver with tensor maps"
                                                                  : NULL;
                return &kernel->row;
            }
        }
    }
    return NULL;
}

/* --- Plans and runs --------------------------------------------------------------------------- */

typedef struct launch {
    gpu_function function, onto; /* onto: in its place where rows are merged, or NULL */
    unsigned blocks, threads, shared;
    bool early;
} launch;

unsigned fattn_gpu_grid(const fattn_gpu_api *api, int64_t blocks, int threads)
{
    const int64_t most = api->threads_max / threads;
    const int64_t limit = most < api->blocks_max ? most : api->blocks_max;
    return (unsigned)(blocks < limit ? blocks : limit);
}

/* Tensor maps as kernels are given them. */
typedef struct encoded {
    _Alignas(64) unsigned char map[FATTN_GPU_MAPS][FATTN_GPU_MAP_BYTES];
} encoded;

typedef struct made {
    fattn_gpu_args args; /* all but buffers and workspace */
    fattn_gpu_map maps[FATTN_GPU_MAPS];
    int map_count;
    /* Bytes of an `encoded`, all but its addresses: the heap does not align to 64. */
    unsigned char encoded[sizeof(encoded)];
    launch launches[FATTN_GPU_PHASES];
    int count;
} made;

/* Whether the code that will run waits by itself for what the stream holds before it. The device
 * does not tell: what its driver compiled from PTX of an older architecture has no such wait. */
static fattn_status find_early(const device *d, const fattn_gpu_shape *shape, launch *l)
{
    int compiled_for = 0;
    if (!shape->early || !d->api->launch_early) {
        return FATTN_OK;
    }
    const int result = d->api->function_get(&compiled_for, d->api->compiled_for, l->function);
    l->early = result == 0 && compiled_for >= d->api->early_isa;
    return check_on(d, result, "loading a function");
}

/* A resident grid has no more blocks than the device holds at a time, in whole clusters; one a unit
 * where the driver does not say. The launch's shared memory has been set. */
static fattn_status limit_blocks(const device *d, int cluster, launch *l)
{
    int held = 1;
    fattn_status status = FATTN_OK;
    if (d->api->function_blocks) {
        const int result = d->api->function_blocks(&held, l->function, (int)l->threads, l->shared);
        status = check_on(d, result, "asking how many blocks a unit holds");
    }
    if (!status && held < 1) {
        status = fattn_fail(FATTN_DEVICE_ERROR,
                            "%s: a unit holds no block of %u threads and %u bytes of shared memory",
                            d->vendor->name, l->threads, l->shared);
    }
    const int64_t of = fattn_max64(cluster, 1);
    const int64_t most = fattn_max64((int64_t)d->units * held / of, 1) * of;
    l->blocks = l->blocks > most ? (unsigned)most : l->blocks;
    return status;
}

static fattn_status set_shared(const device *d, gpu_function function, int bytes)
{
    return bytes ? check_on(d, d->api->function_set(function, d->api->dynamic_shared, bytes),
                            "setting the shared memory of a function")
                 : FATTN_OK;
}

static fattn_status make_launch(device *d, const char *image, const fattn_gpu_shape *shape,
                                launch *l)
{
    l->blocks = fattn_gpu_grid(d->api, shape->blocks, shape->threads);
    l->threads = (unsigned)shape->threads;
    bool is_general;
    fattn_status status =
        resolve_either(d, image, shape->entry, shape->general, &is_general, &l->function);
    status = status ? status : find_early(d, shape, l);
    if (status) {
        return status;
    }
    const int shared = is_general ? shape->general_shared : shape->shared;
    l->shared = (unsigned)shared;
    status = set_shared(d, l->function, shared);
    if (!status && shape->onto[0]) {
        status = resolve(d, image, shape->onto, &l->onto);
        status = status ? status : set_shared(d, l->onto, shared);
    }
    return status || !shape->resident ? status : limit_blocks(d, shape->cluster, l);
}

/* The maps of a plan, at an address of no tensor. */
static fattn_status make_maps(const device *d, const fattn_gpu_kernel *kernel,
                              const fattn_plan *plan, made *m)
{
    encoded e;
    fattn_status status = FATTN_OK;
    memset(&e, 0, sizeof e);
    m->map_count = kernel->maps ? kernel->maps(kernel, &plan->problem, &plan->tiling, m->maps) : 0;
    for (int n = 0; !status && n < m->map_count; n++) {
        status = check_on(d, d->api->map_encode(e.map[n], &m->maps[n], (void *)4096),
                          "describing a tensor");
    }
    memcpy(m->encoded, &e, sizeof e);
    return status;
}

/* The same where the tensors are. A tensor of no elements need not be anywhere. */
static fattn_status move_maps(const device *d, const made *m, const fattn_buffers *buffers,
                              encoded *e)
{
    fattn_status status = FATTN_OK;
    memcpy(e, m->encoded, sizeof *e);
    for (int n = 0; !status && n < m->map_count; n++) {
        void *address = NULL;
        memcpy(&address, (const char *)buffers + m->maps[n].buffer, sizeof address);
        if (address && !(m->maps[n].optional && (uintptr_t)address % 16)) {
            status =
                check_on(d, d->api->map_move(e->map[n], address), "saying where a tensor lies");
        }
    }
    return status;
}

fattn_status fattn_gpu_plan(fattn_plan *plan)
{
    device *const d = plan->device->impl;
    const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(plan->kernel);
    made *const m = fattn_memory_alloc(sizeof *m);
    if (!m) {
        return fattn_fail_memory(sizeof *m, "a plan's launches");
    }
    memset(m, 0, sizeof *m);
    fattn_gpu_args_fill(&plan->problem, &plan->tiling, &m->args);

    fattn_status status = enter(d);
    if (!status) {
        for (int n = 0; !status && n < FATTN_GPU_PHASES && kernel->phases[n]; n++) {
            fattn_gpu_shape shape;
            memset(&shape, 0, sizeof shape);
            kernel->phases[n](kernel, &plan->problem, &plan->tiling, &shape);
            if (shape.blocks > 0) {
                status = make_launch(d, kernel->image, &shape, &m->launches[m->count++]);
            }
            if (shape.merges) {
                m->args.counters =
                    fattn_gpu_parts_workspace(&kernel->row, &plan->problem, &plan->tiling);
                m->args.mark = d->mark;
                break;
            }
        }
        status = status ? status : make_maps(d, kernel, plan, m);
        status = leave_with(d, status);
    }
    if (status) {
        fattn_memory_free(m);
        return status;
    }
    plan->impl = m;
    return FATTN_OK;
}

void fattn_gpu_release(fattn_plan *plan) { fattn_memory_free(plan->impl); }

/* A stream must belong to the device's context. The driver's own streams belong to whichever
 * context is current. */
static fattn_status check_stream(const device *d, fattn_stream stream)
{
    gpu_context context = NULL;
    if ((uintptr_t)stream <= FATTN_STREAM_PER_THREAD) {
        return FATTN_OK;
    }
    const fattn_status status = check_on(d, d->api->stream_context((gpu_stream)stream, &context),
                                         "asking for the stream's context");
    if (!status && context != d->context) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "stream is %p: it belongs to another context",
                          stream);
    }
    return status;
}

/* maps, onto: what an image with tensor maps, and one that merges, take besides, or NULL. */
static fattn_status launch_one(const device *d, const launch *l, void *args, encoded *maps,
                               fattn_merge_job *onto, fattn_stream stream)
{
    void *parameters[] = {args, maps, onto};
    const fattn_gpu_api *const api = d->api;
    const gpu_function function = onto && l->onto ? l->onto : l->function;
    const int result = (l->early ? api->launch_early
                                 : api->launch)(function, l->blocks, 1, 1, l->threads, 1, 1,
                                                l->shared, (gpu_stream)stream, parameters, NULL);
    return check_on(d, result, "launching a kernel");
}

/* What fattn_buffers_validate() looks at: lengths, tables, positions. */
static bool is_table(const fattn_operand *operand)
{
    return operand->dtype == 0 && operand->offset != offsetof(fattn_buffers, mask) &&
           operand->offset != offsetof(fattn_buffers, block_mask) && operand->region.base;
}

/* FATTN_CHECKED: copies lengths and tables to the host and validates them there. Waits, after a
 * failure too: copies may be on their way to memory that is then freed. */
static fattn_status validate(const fattn_plan *plan, const fattn_buffers *buffers,
                             fattn_stream stream)
{
    void *const impl = plan->device->impl;
    fattn_operand operands[FATTN_OPERANDS_MAX];
    void *copies[FATTN_OPERANDS_MAX] = {NULL};
    fattn_buffers host = *buffers;
    uint64_t capture = 0;
    fattn_status status = fattn_gpu_stream_capture(impl, stream, &capture);
    if (!status && capture) {
        status =
            fattn_fail(FATTN_INVALID_ARGUMENT, "FATTN_CHECKED waits for lengths and tables, and "
                                               "the stream is being captured");
    }
    if (status) {
        return status;
    }
    const int count = fattn_operands(&plan->problem, buffers, operands);
    for (int n = 0; !status && n < count; n++) {
        int64_t bytes = 0;
        if (!is_table(&operands[n]) || !fattn_region_span(&operands[n].region, &bytes) || !bytes) {
            continue;
        }
        copies[n] = fattn_memory_alloc((size_t)bytes);
        status = copies[n] ? fattn_gpu_copy(impl, copies[n], (const void *)operands[n].region.base,
                                            (size_t)bytes, stream)
                           : fattn_fail_memory(bytes, "a copy of lengths and tables");
        memcpy((char *)&host + operands[n].offset, &copies[n], sizeof copies[n]);
    }
    fattn_reason_hold(status);
    const fattn_status waited = fattn_gpu_stream_synchronize(impl, stream);
    fattn_reason_let();
    status = status ? status : waited;
    status = status ? status : fattn_buffers_validate(&plan->problem, &host);
    for (int n = 0; n < count; n++) {
        fattn_memory_free(copies[n]);
    }
    return status;
}

/* Makes kernels write o where the job's result is. Its address may be a multiple of less than the
 * plan was promised. */
static void redirect(const fattn_plan *plan, const fattn_merge_job *job, fattn_gpu_args *args)
{
    const uintptr_t place = (uintptr_t)job->result.o | 16;
    fattn_problem p = plan->problem;
    p.o = job->result.strides;
    p.dtype_o = job->dtype;
    p.pointer_alignment = fattn_min64(p.pointer_alignment, (int64_t)(place & -place));
    fattn_gpu_args_fill(&p, &plan->tiling, args);
    args->buffers.o = job->result.o;
}

/* onto: what results are merged with, by a kernel that does so, or NULL. */
static fattn_status run(const fattn_plan *plan, const fattn_buffers *buffers,
                        const fattn_merge_job *onto, void *workspace, fattn_stream stream)
{
    const device *const d = plan->device->impl;
    const made *const m = plan->impl;
    fattn_merge_job job;
    fattn_status status = FATTN_OK;
    if (plan->problem.features & FATTN_CHECKED) {
        status = validate(plan, buffers, stream);
    }
    if (status) {
        return status;
    }

    fattn_gpu_args args = m->args;
    args.buffers = *buffers;
    args.workspace = workspace;
    if (onto) {
        job = *onto;
        redirect(plan, onto, &args);
    }
    status = enter(d);
    if (status) {
        return status;
    }
    encoded maps;
    status = check_stream(d, stream);
    status = status ? status : move_maps(d, m, buffers, &maps);
    for (int n = 0; !status && n < m->count; n++) {
        status = launch_one(d, &m->launches[n], &args, &maps, onto ? &job : NULL, stream);
    }
    return leave_with(d, status);
}

fattn_status fattn_gpu_run(const fattn_plan *plan, const fattn_buffers *buffers, void *workspace,
                           fattn_stream stream)
{
    return run(plan, buffers, NULL, workspace, stream);
}

/* Whether the plan has a kernel that merges rows where it finishes them: it reads two floats at a
 * time, and writes its own type or floats. */
static bool may_merge(const fattn_plan *plan, const fattn_merge_job *job)
{
    const made *const m = plan->impl;
    const fattn_strides *const s = &job->first.strides;
    bool merges = false;
    for (int n = 0; n < m->count; n++) {
        merges = merges || m->launches[n].onto;
    }
    return merges && (job->dtype == FATTN_F32 || job->dtype == plan->problem.dtype) &&
           ((job->dim_v | s->batch | s->seq | s->head) & 1) == 0 &&
           (uintptr_t)job->first.o % 8 == 0;
}

fattn_status fattn_gpu_run_onto(const fattn_plan *plan, const fattn_buffers *buffers,
                                const fattn_merge_job *job, void *workspace, fattn_stream stream)
{
    return may_merge(plan, job) ? run(plan, buffers, job, workspace, stream)
                                : fattn_plan_run_then_merge(plan, buffers, job, workspace, stream);
}

/* --- Small verbs ------------------------------------------------------------------------------ */

/* Launches a kernel of its own arguments over so many pieces of work. */
static fattn_status run_verb(const device *d, gpu_function function, void *args, int64_t pieces,
                             fattn_stream stream)
{
    const launch l = {
        .function = function, .blocks = fattn_gpu_grid(d->api, pieces, 128), .threads = 128};
    if (pieces == 0) {
        return FATTN_OK;
    }
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    status = check_stream(d, stream);
    status = status ? status : launch_one(d, &l, args, NULL, NULL, stream);
    return leave_with(d, status);
}

/* The door keeps batch * heads * rows below 2^62. */
fattn_status fattn_gpu_merge(void *impl, const fattn_merge_job *job, fattn_stream stream)
{
    const device *const d = impl;
    fattn_merge_job copy = *job;
    const int64_t rows = copy.batch * copy.heads * copy.seqlen;
    return run_verb(d, d->merge, &copy, fattn_ceil_div(rows, FATTN_GPU_MERGE_ROWS), stream);
}

fattn_status fattn_gpu_dropout_mask(void *impl, const fattn_dropout_args *args, fattn_stream stream)
{
    const device *const d = impl;
    fattn_gpu_dropout_args a = {.args = *args, .threshold = fattn_dropout_threshold(args->p)};
    const int64_t rows = args->batch * args->heads * args->seqlen_q;
    return run_verb(d, d->dropout, &a, args->seqlen_k ? rows : 0, stream);
}

fattn_status fattn_gpu_rows(void *impl, const fattn_rows_args *args, fattn_stream stream)
{
    const device *const d = impl;
    fattn_rows_args a = fattn_rows_joined(args);
    const int64_t channels = a.batch * a.rows * a.heads * a.channels;
    const int64_t pieces = fattn_rows_by_eights(&a) ? channels / 8 : channels;
    return run_verb(d, d->rows, &a, (pieces + 127) / 128, stream);
}

fattn_status fattn_gpu_launch(void *impl, const char *entry, void *args, int64_t blocks,
                              int threads)
{
    device *const d = impl;
    launch l = {.blocks = fattn_gpu_grid(d->api, blocks, threads), .threads = (unsigned)threads};
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    status = resolve(d, "verbs", entry, &l.function);
    status = status ? status : launch_one(d, &l, args, NULL, NULL, NULL);
    return leave_with(d, status);
}

/* Device memory, and host memory that the driver has made visible to the device. */
bool fattn_gpu_reads(void *impl, const void *pointer)
{
    const device *const d = impl;
    void *seen = NULL;
    gpu_context own;
    if (d->api->context_push(d->context) != 0) {
        return false;
    }
    const int result = d->api->pointer_attribute(&seen, d->api->device_pointer, pointer);
    (void)d->api->context_pop(&own);
    return result == 0 && seen == pointer;
}

/* The body of a verb: one driver call in the device's context. */
#define VERB(d, call, what)                                                          \
    do {                                                                             \
        const fattn_status entered = enter(d);                                       \
        return entered ? entered : leave_with(d, check_on(d, (d)->api->call, what)); \
    } while (0)

/* The same of a verb that queues something on a stream. Drivers wait for any stream, and destroy
 * it, whatever its context is. */
#define STREAM_VERB(d, stream, call, what)                            \
    do {                                                              \
        fattn_status status = enter(d);                               \
        if (status) {                                                 \
            return status;                                            \
        }                                                             \
        status = check_stream(d, stream);                             \
        status = status ? status : check_on(d, (d)->api->call, what); \
        return leave_with(d, status);                                 \
    } while (0)

/* Leaves the context, and returns the new thing in *result. When leaving fails the new thing is
 * undone, and *result stays as it is. */
static fattn_status keep_or_undo(void *impl, fattn_status status, void *thing, void **result,
                                 void (*undo)(void *impl, void *thing))
{
    const fattn_status left = leave_with(impl, status);
    if (!left) {
        *result = thing;
    } else if (!status) {
        fattn_reason_hold(left);
        undo(impl, thing);
        fattn_reason_let();
    }
    return left;
}

static void undo_alloc(void *impl, void *memory) { (void)fattn_gpu_free(impl, memory); }

static void undo_stream(void *impl, void *stream) { (void)fattn_gpu_stream_destroy(impl, stream); }

fattn_status fattn_gpu_alloc(void *impl, size_t bytes, void **memory)
{
    const device *const d = impl;
    void *made_memory = NULL;
    *memory = NULL;
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    const int result = d->api->memory_alloc(&made_memory, bytes);
    if (result == d->api->out_of_memory) {
        status = fattn_fail_memory((int64_t)bytes, "device memory");
    } else {
        status = check_on(d, result, "allocating memory");
    }
    return keep_or_undo(impl, status, made_memory, memory, undo_alloc);
}

fattn_status fattn_gpu_free(void *impl, void *memory)
{
    const device *const d = impl;
    VERB(d, memory_free(memory), "freeing memory");
}

fattn_status fattn_gpu_copy(void *impl, void *dst, const void *src, size_t bytes,
                            fattn_stream stream)
{
    const device *const d = impl;
    if (bytes == 0) {
        return FATTN_OK;
    }
    STREAM_VERB(d, stream, memory_copy(dst, src, bytes, (gpu_stream)stream), "copying");
}

fattn_status fattn_gpu_stream_create(void *impl, fattn_stream *stream)
{
    const device *const d = impl;
    gpu_stream made_stream = NULL;
    *stream = NULL;
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    status = check_on(d, d->api->stream_create(&made_stream, 0), "creating a stream");
    return keep_or_undo(impl, status, made_stream, stream, undo_stream);
}

fattn_status fattn_gpu_stream_destroy(void *impl, fattn_stream stream)
{
    const device *const d = impl;
    if (!stream) { /* the default stream is nobody's */
        return FATTN_OK;
    }
    VERB(d, stream_destroy((gpu_stream)stream), "destroying a stream");
}

fattn_status fattn_gpu_stream_synchronize(void *impl, fattn_stream stream)
{
    const device *const d = impl;
    VERB(d, stream_synchronize((gpu_stream)stream), "waiting for a stream");
}

fattn_status fattn_gpu_stream_wait(void *impl, fattn_stream stream, void *event)
{
    const device *const d = impl;
    STREAM_VERB(d, stream, stream_wait((gpu_stream)stream, event, 0),
                "letting a stream wait for an event");
}

/* The default stream cannot be captured, and asking about it while another is would be an error. */
fattn_status fattn_gpu_stream_capture(void *impl, fattn_stream stream, uint64_t *capture)
{
    const device *const d = impl;
    int capturing = 0;
    unsigned long long id = 0;
    *capture = 0;
    if ((uintptr_t)stream < FATTN_STREAM_PER_THREAD) {
        return FATTN_OK;
    }
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    status = check_stream(d, stream);
    status = status ? status
                    : check_on(d, d->api->stream_capture((gpu_stream)stream, &capturing, &id),
                               "asking whether a stream is captured");
    *capture = capturing ? id : 0;
    return leave_with(d, status);
}

/* Of the thread, in whatever context. */
fattn_status fattn_gpu_capture_mode(void *impl, int *mode)
{
    const device *const d = impl;
    return check_on(d, d->api->capture_mode(mode), "setting the mode of captures");
}

fattn_status fattn_gpu_event_create(void *impl, void **event)
{
    const device *const d = impl;
    gpu_event made_event = NULL;
    *event = NULL;
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    status = check_on(d, d->api->event_create(&made_event, 0), "creating an event");
    return keep_or_undo(impl, status, made_event, event, fattn_gpu_event_destroy);
}

void fattn_gpu_event_destroy(void *impl, void *event)
{
    const device *const d = impl;
    gpu_context own;
    if (d->api->context_push(d->context) == 0) {
        (void)d->api->event_destroy(event);
        (void)d->api->context_pop(&own);
    }
}

fattn_status fattn_gpu_event_record(void *impl, void *event, fattn_stream stream)
{
    const device *const d = impl;
    STREAM_VERB(d, stream, event_record(event, (gpu_stream)stream), "recording an event");
}

fattn_status fattn_gpu_event_synchronize(void *impl, void *event)
{
    const device *const d = impl;
    VERB(d, event_synchronize(event), "waiting for an event");
}

fattn_status fattn_gpu_event_elapsed(void *impl, void *start, void *stop, double *milliseconds)
{
    const device *const d = impl;
    float elapsed = 0;
    fattn_status status = enter(d);
    if (status) {
        return status;
    }
    status = check_on(d, d->api->event_synchronize(start), "waiting for an event");
    status = status ? status : check_on(d, d->api->event_synchronize(stop), "waiting for an event");
    status = status ? status
                    : check_on(d, d->api->event_elapsed(&elapsed, start, stop), "timing events");
    if (!status) {
        *milliseconds = (double)elapsed;
    }
    return leave_with(d, status);
}

/* Devices that cannot reach each other, or do already, are no error: the driver takes another
 * way. */
fattn_status fattn_gpu_reach(void *impl, void *other)
{
    const device *const d = impl, *const to = other;
    const fattn_status status = enter(d);
    if (status) {
        return status;
    }
    (void)d->api->context_reach(to->context, 0);
    return leave(d);
}
