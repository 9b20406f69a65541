/* SPDX-License-Identifier: Apache-2.0 */
/* What launches kernels: plans and their runs, and verbs that are one kernel. */
#include <string.h>

#include "backends/gpu/args.h"
#include "backends/gpu/device.h"
#include "core/integer.h"
#include "core/memory.h"
#include "core/operands.h"
#include "core/problem.h"
#include "core/status.h"

/* --- Plans ------------------------------------------------------------------------------------ */

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
static fattn_status find_early(const fattn_gpu_device *d, const fattn_gpu_shape *shape, launch *l)
{
    int compiled_for = 0;
    if (!shape->early || !d->api->launch_early) {
        return FATTN_OK;
    }
    const int result = d->api->function_get(&compiled_for, d->api->compiled_for, l->function);
    l->early = result == 0 && compiled_for >= d->api->early_isa;
    return fattn_gpu_check(d, result, "loading a function");
}

/* A resident grid has no more blocks than the device holds at a time, in whole clusters; one a unit
 * where the driver does not say. The launch's shared memory has been set. */
static fattn_status limit_blocks(const fattn_gpu_device *d, int cluster, launch *l)
{
    int held = 1;
    fattn_status status = FATTN_OK;
    if (d->api->function_blocks) {
        const int result = d->api->function_blocks(&held, l->function, (int)l->threads, l->shared);
        status = fattn_gpu_check(d, result, "asking how many blocks a unit holds");
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

static fattn_status set_shared(const fattn_gpu_device *d, gpu_function function, int bytes)
{
    return bytes ? fattn_gpu_check(d, d->api->function_set(function, d->api->dynamic_shared, bytes),
                                   "setting the shared memory of a function")
                 : FATTN_OK;
}

static fattn_status make_launch(fattn_gpu_device *d, const char *image,
                                const fattn_gpu_shape *shape, launch *l)
{
    l->blocks = fattn_gpu_grid(d->api, shape->blocks, shape->threads);
    l->threads = (unsigned)shape->threads;
    bool is_general;
    fattn_status status =
        fattn_gpu_resolve_either(d, image, shape->entry, shape->general, &is_general, &l->function);
    status = status ? status : find_early(d, shape, l);
    if (status) {
        return status;
    }
    const int shared = is_general ? shape->general_shared : shape->shared;
    l->shared = (unsigned)shared;
    status = set_shared(d, l->function, shared);
    if (!status && shape->onto[0]) {
        status = fattn_gpu_resolve(d, image, shape->onto, &l->onto);
        status = status ? status : set_shared(d, l->onto, shared);
    }
    return status || !shape->resident ? status : limit_blocks(d, shape->cluster, l);
}

/* The maps of a plan, at an address of no tensor. */
static fattn_status make_maps(const fattn_gpu_device *d, const fattn_gpu_kernel *kernel,
                              const fattn_plan *plan, made *m)
{
    encoded e;
    fattn_status status = FATTN_OK;
    memset(&e, 0, sizeof e);
    m->map_count = kernel->maps ? kernel->maps(kernel, &plan->problem, &plan->tiling, m->maps) : 0;
    for (int n = 0; !status && n < m->map_count; n++) {
        status = fattn_gpu_check(d, d->api->map_encode(e.map[n], &m->maps[n], (void *)4096),
                                 "describing a tensor");
    }
    memcpy(m->encoded, &e, sizeof e);
    return status;
}

/* The same where the tensors are. A tensor of no elements need not be anywhere. */
static fattn_status move_maps(const fattn_gpu_device *d, const made *m,
                              const fattn_buffers *buffers, encoded *e)
{
    fattn_status status = FATTN_OK;
    memcpy(e, m->encoded, sizeof *e);
    for (int n = 0; !status && n < m->map_count; n++) {
        void *address = NULL;
        memcpy(&address, (const char *)buffers + m->maps[n].buffer, sizeof address);
        if (address && !(m->maps[n].optional && (uintptr_t)address % 16)) {
            status = fattn_gpu_check(d, d->api->map_move(e->map[n], address),
                                     "saying where a tensor lies");
        }
    }
    return status;
}

fattn_status fattn_gpu_plan(fattn_plan *plan)
{
    fattn_gpu_device *const d = plan->device->impl;
    const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(plan->kernel);
    made *const m = fattn_memory_alloc(sizeof *m);
    if (!m) {
        return fattn_fail_memory(sizeof *m, "a plan's launches");
    }
    memset(m, 0, sizeof *m);
    fattn_gpu_args_fill(&plan->problem, &plan->tiling, &m->args);

    fattn_status status = fattn_gpu_enter(d);
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
        status = fattn_gpu_leave_with(d, status);
    }
    if (status) {
        fattn_memory_free(m);
        return status;
    }
    plan->impl = m;
    return FATTN_OK;
}

void fattn_gpu_release(fattn_plan *plan) { fattn_memory_free(plan->impl); }

/* --- Runs ------------------------------------------------------------------------------------- */

/* maps, onto: what an image with tensor maps, and one that merges, take besides, or NULL. */
static fattn_status launch_one(const fattn_gpu_device *d, const launch *l, void *args,
                               encoded *maps, fattn_merge_job *onto, fattn_stream stream)
{
    void *parameters[] = {args, maps, onto};
    const fattn_gpu_api *const api = d->api;
    const gpu_function function = onto && l->onto ? l->onto : l->function;
    const int result = (l->early ? api->launch_early
                                 : api->launch)(function, l->blocks, 1, 1, l->threads, 1, 1,
                                                l->shared, (gpu_stream)stream, parameters, NULL);
    return fattn_gpu_check(d, result, "launching a kernel");
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
        (void)fattn_region_span(&operands[n].region, &bytes); /* fits: the problem was checked */
        if (!is_table(&operands[n]) || !bytes) {
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
    const fattn_gpu_device *const d = plan->device->impl;
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
    status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    encoded maps;
    status = fattn_gpu_check_stream(d, stream);
    status = status ? status : move_maps(d, m, buffers, &maps);
    for (int n = 0; !status && n < m->count; n++) {
        status = launch_one(d, &m->launches[n], &args, &maps, onto ? &job : NULL, stream);
    }
    return fattn_gpu_leave_with(d, status);
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

/* --- Verbs that are one kernel ---------------------------------------------------------------- */

/* Launches a kernel of its own arguments over so many pieces of work. */
static fattn_status run_verb(const fattn_gpu_device *d, gpu_function function, void *args,
                             int64_t pieces, fattn_stream stream)
{
    const launch l = {
        .function = function, .blocks = fattn_gpu_grid(d->api, pieces, 128), .threads = 128};
    if (pieces == 0) {
        return FATTN_OK;
    }
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    status = fattn_gpu_check_stream(d, stream);
    status = status ? status : launch_one(d, &l, args, NULL, NULL, stream);
    return fattn_gpu_leave_with(d, status);
}

/* The door keeps batch * heads * rows below 2^62. */
fattn_status fattn_gpu_merge(void *impl, const fattn_merge_job *job, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    fattn_merge_job copy = *job;
    const int64_t rows = copy.batch * copy.heads * copy.seqlen;
    return run_verb(d, d->merge, &copy, fattn_ceil_div(rows, FATTN_GPU_MERGE_ROWS), stream);
}

fattn_status fattn_gpu_dropout_mask(void *impl, const fattn_dropout_args *args, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    fattn_gpu_dropout_args a = {.args = *args, .threshold = fattn_dropout_threshold(args->p)};
    const int64_t rows = args->batch * args->heads * args->seqlen_q;
    return run_verb(d, d->dropout, &a, args->seqlen_k ? rows : 0, stream);
}

fattn_status fattn_gpu_rows(void *impl, const fattn_rows_args *args, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    fattn_rows_args a = fattn_rows_joined(args);
    const int64_t channels = a.batch * a.rows * a.heads * a.channels;
    const int64_t pieces = fattn_rows_by_eights(&a) ? channels / 8 : channels;
    return run_verb(d, d->rows, &a, (pieces + 127) / 128, stream);
}

fattn_status fattn_gpu_launch(void *impl, const char *entry, void *args, int64_t blocks,
                              int threads)
{
    fattn_gpu_device *const d = impl;
    launch l = {.blocks = fattn_gpu_grid(d->api, blocks, threads), .threads = (unsigned)threads};
    fattn_status status = fattn_gpu_enter(d);
    if (status) {
        return status;
    }
    status = fattn_gpu_resolve(d, "verbs", entry, &l.function);
    status = status ? status : launch_one(d, &l, args, NULL, NULL, NULL);
    return fattn_gpu_leave_with(d, status);
}
