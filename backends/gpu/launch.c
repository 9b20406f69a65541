/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel launches: those of a plan, its runs, and backend functions that are a single kernel. */
#include <assert.h>
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
    gpu_function function, onto; /* onto: launched instead if rows are merged, or NULL */
    unsigned blocks, threads, shared;
    bool early;
} launch;

unsigned fattn_gpu_grid(const fattn_gpu_api *api, int64_t blocks, int threads)
{
    const int64_t most = api->threads_max / threads;
    const int64_t limit = most < api->blocks_max ? most : api->blocks_max;
    return (unsigned)(blocks < limit ? blocks : limit);
}

/* Tensor maps in the driver's encoding, as kernels get them. */
typedef struct encoded_maps {
    _Alignas(64) unsigned char map[FATTN_GPU_MAPS][FATTN_GPU_MAP_BYTES];
} encoded_maps;

/* What a plan holds for its runs. */
typedef struct gpu_plan {
    fattn_gpu_args args; /* all but buffers and workspace */
    fattn_gpu_map maps[FATTN_GPU_MAPS];
    int map_count;
    /* An `encoded_maps` without the tensors' addresses. The heap does not align to 64. */
    unsigned char encoded[sizeof(encoded_maps)];
    launch launches[FATTN_GPU_PHASES];
    int count;
} gpu_plan;

/* Sets l->early if the kernel's machine code itself waits for earlier work in the stream. The
 * device does not tell: a driver that compiled it from PTX for an older architecture left the wait
 * out. */
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

/* Limits a resident grid to the blocks that the device holds at a time, in whole clusters; to one
 * per multiprocessor if the driver cannot tell. The launch's shared memory has been set. */
static fattn_status limit_blocks(const fattn_gpu_device *d, int cluster, launch *l)
{
    int held = 1;
    fattn_status status = FATTN_OK;
    if (d->api->function_blocks) {
        const int result = d->api->function_blocks(&held, l->function, (int)l->threads, l->shared);
        status = fattn_gpu_check(d, result, "asking for the occupancy of a function");
    }
    if (!status && held < 1) {
        status = fattn_fail(FATTN_DEVICE_ERROR,
                            "%s: a multiprocessor holds no block of %u threads and %u bytes of "
                            "shared memory",
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

/* Encodes the maps of a plan. Their address is a placeholder: the tensors come with the run. */
static fattn_status make_maps(const fattn_gpu_device *d, const fattn_gpu_kernel *kernel,
                              const fattn_plan *plan, gpu_plan *m)
{
    encoded_maps e;
    fattn_status status = FATTN_OK;
    memset(&e, 0, sizeof e);
    m->map_count = kernel->maps ? kernel->maps(kernel, &plan->problem, &plan->tiling, m->maps) : 0;
    for (int n = 0; !status && n < m->map_count; n++) {
        status = fattn_gpu_check(d, d->api->map_encode(e.map[n], &m->maps[n], (void *)4096),
                                 "encoding a tensor map");
    }
    memcpy(m->encoded, &e, sizeof e);
    return status;
}

/* Copies a plan's maps and gives them the addresses of the tensors. A tensor without elements may
 * have none. */
static fattn_status move_maps(const fattn_gpu_device *d, const gpu_plan *m,
                              const fattn_buffers *buffers, encoded_maps *e)
{
    fattn_status status = FATTN_OK;
    memcpy(e, m->encoded, sizeof *e);
    for (int n = 0; !status && n < m->map_count; n++) {
        void *address = NULL;
        memcpy(&address, (const char *)buffers + m->maps[n].buffer, sizeof address);
        if (address && !(m->maps[n].optional && (uintptr_t)address % 16)) {
            status = fattn_gpu_check(d, d->api->map_move(e->map[n], address),
                                     "setting the address of a tensor map");
        }
    }
    return status;
}

fattn_status fattn_gpu_plan(fattn_plan *plan)
{
    fattn_gpu_device *const d = plan->device->impl;
    const fattn_gpu_kernel *const kernel = fattn_gpu_kernel_of(plan->kernel);
    gpu_plan *const m = fattn_memory_alloc(sizeof *m);
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

/* args: the kernel's first parameter. maps and onto: the second parameter of kernels with tensor
 * maps and the third of those that merge rows, or NULL. */
static fattn_status launch_one(const fattn_gpu_device *d, const launch *l, void *args,
                               encoded_maps *maps, fattn_merge_job *onto, fattn_stream stream)
{
    void *parameters[] = {args, maps, onto};
    const fattn_gpu_api *const api = d->api;
    const gpu_function function = onto && l->onto ? l->onto : l->function;
    const int result = (l->early ? api->launch_early
                                 : api->launch)(function, l->blocks, 1, 1, l->threads, 1, 1,
                                                l->shared, (gpu_stream)stream, parameters, NULL);
    return fattn_gpu_check(d, result, "launching a kernel");
}

/* Whether fattn_buffers_validate() reads the operand: it is one of the lengths, tables or
 * positions, and so of integers, but no mask, seed or offset of one. */
static bool is_table(const fattn_operand *operand)
{
    return operand->dtype == 0 && operand->kind != FATTN_OPERAND_SCORES &&
           operand->offset != offsetof(fattn_buffers, seed_ptr) &&
           operand->offset != offsetof(fattn_buffers, offset_ptr) && operand->region.base;
}

/* FATTN_CHECKED: copies lengths and tables to the host and validates them there. It waits for the
 * stream after a failure too, because copies may still be writing to memory that it then frees. */
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

/* Makes kernels write o where the job's result is, which may be less aligned than the plan was
 * promised. */
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

/* onto: the state that kernels merge the results with, or NULL. */
static fattn_status run(const fattn_plan *plan, const fattn_buffers *buffers,
                        const fattn_merge_job *onto, void *workspace, fattn_stream stream)
{
    const fattn_gpu_device *const d = plan->device->impl;
    const gpu_plan *const m = plan->impl;
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
    encoded_maps maps;
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

/* Whether the plan has a kernel that merges rows as it finishes them. Such a kernel reads two
 * floats at a time, and writes floats or the problem's dtype. */
static bool may_merge(const fattn_plan *plan, const fattn_merge_job *job)
{
    const gpu_plan *const m = plan->impl;
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

/* --- Backend functions that are one kernel ---------------------------------------------------- */

/* Launches `blocks` blocks of a function of image "verbs", which has its own type of arguments. */
static fattn_status run_verb(const fattn_gpu_device *d, gpu_function function, void *args,
                             int64_t blocks, fattn_stream stream)
{
    const launch l = {.function = function,
                      .blocks = fattn_gpu_grid(d->api, blocks, FATTN_GPU_VERB_THREADS),
                      .threads = FATTN_GPU_VERB_THREADS};
    if (blocks == 0) {
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

/* fattn_merge() has checked that batch * heads * rows is below 2^62. */
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

fattn_status fattn_gpu_rows(void *impl, const fattn_rows_args *jobs, int count, fattn_stream stream)
{
    const fattn_gpu_device *const d = impl;
    fattn_rows_jobs a = {.count = count};
    int64_t blocks = 0;
    _Static_assert(sizeof a <= 4096, "parameters of a kernel");
    assert(count <= FATTN_ROWS_JOBS);
    for (int n = 0; n < count; n++) {
        const fattn_rows_args j = a.jobs[n] = fattn_rows_joined(&jobs[n]);
        const int64_t pieces = j.batch * j.rows * j.heads * j.channels / fattn_rows_width(&j);
        blocks += fattn_ceil_div(pieces, FATTN_GPU_VERB_THREADS);
        a.ends[n] = blocks;
    }
    return run_verb(d, d->rows, &a, blocks, stream);
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
