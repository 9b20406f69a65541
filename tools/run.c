/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `fattn run`: attention on NumPy arrays. Reads .npy files, converts them to types that the library
 * takes, runs forward (and backward), and writes all of the outputs or none. The state of a run is
 * a `job` (tools/run/).
 */
#define _POSIX_C_SOURCE 200809L /* unsetenv */

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/commands.h"
#include "tools/run/job.h"
#include "tools/terminal/terminal.h"

static const uint32_t output_bits[OUTPUTS] = {
    [OUT_O] = FATTN_OUT_O,         [OUT_LSE] = FATTN_OUT_LSE, [OUT_DQ] = FATTN_OUT_DQ,
    [OUT_DK] = FATTN_OUT_DK,       [OUT_DV] = FATTN_OUT_DV,   [OUT_DBIAS] = FATTN_OUT_DBIAS,
    [OUT_DSINK] = FATTN_OUT_DSINK,
};

/* Writes scores and probabilities. Arrays are in host memory, so the reference computes them,
 * whatever device computes o. */
static fattn_status inspect(const job *j, const fattn_problem *forward)
{
    static const struct {
        int output;
        fattn_inspection what;
    } matrices[] = {{OUT_SCORES, FATTN_SCORES}, {OUT_PROBABILITIES, FATTN_PROBABILITIES}};
    fattn_device *device;
    fattn_status status = fattn_device_open("reference", &device);
    for (size_t n = 0; n < sizeof matrices / sizeof matrices[0]; n++) {
        if (status != FATTN_OK || !j->out_path[matrices[n].output]) {
            continue;
        }
        fattn_inspect_args args;
        fattn_inspect_args_init(&args);
        args.what = matrices[n].what;
        args.to = job_pointer(&j->out[matrices[n].output]);
        status = fattn_inspect(device, forward, &j->buffers, &args);
    }
    fattn_device_close(device);
    return status;
}

/* The buffers of a plan, in memory of its device. */
typedef struct placed {
    fattn_buffers buffers;
    fattn_operand_info info[INPUTS + OUTPUTS];
    void *memory[INPUTS + OUTPUTS];
    int count;
} placed;

/* The job's pointer to an operand. */
static void *pointer_at(const fattn_buffers *buffers, int64_t offset)
{
    void *at;
    memcpy(&at, (const char *)buffers + offset, sizeof at);
    return at;
}

/* Copies all operands to the device. Outputs too, because some are added to, and because not every
 * row is written. */
static fattn_status place(const job *j, fattn_device *device, const fattn_problem *problem,
                          placed *to)
{
    int count = 0;
    fattn_status status = fattn_operand_count(problem, &count);
    assert(count <= INPUTS + OUTPUTS);
    for (; status == FATTN_OK && to->count < count; to->count++) {
        fattn_operand_info *const info = &to->info[to->count];
        void **const memory = &to->memory[to->count];
        fattn_operand_info_init(info);
        status = fattn_operand_get_info(problem, to->count, info);
        const void *const from = status ? NULL : pointer_at(&j->buffers, info->offset);
        if (!from || info->bytes == 0) {
            continue;
        }
        const size_t bytes = (size_t)info->bytes;
        status = fattn_device_malloc(device, bytes, memory);
        status = status ? status : fattn_device_copy(device, *memory, from, bytes, NULL);
        memcpy((char *)&to->buffers + info->offset, memory, sizeof *memory);
    }
    return status;
}

static fattn_status take_outputs(const job *j, fattn_device *device, const placed *from)
{
    fattn_status status = FATTN_OK;
    for (int i = 0; status == FATTN_OK && i < from->count; i++) {
        const fattn_operand_info *const info = &from->info[i];
        if (info->written && from->memory[i]) {
            status = fattn_device_copy(device, pointer_at(&j->buffers, info->offset),
                                       from->memory[i], (size_t)info->bytes, NULL);
        }
    }
    return status ? status : fattn_stream_synchronize(device, NULL);
}

/* For --pointer-alignment: fattn_attention() would use the alignment of the pointers instead. */
static fattn_status run_plan(const job *j, fattn_device *device, const fattn_problem *problem)
{
    placed p = {.buffers = j->buffers};
    fattn_plan *plan = NULL;
    fattn_status status = fattn_plan_create(device, problem, &plan);
    status = status ? status : place(j, device, problem, &p);
    status = status ? status : fattn_execute(plan, &p.buffers, NULL, NULL);
    status = status ? status : take_outputs(j, device, &p);
    fattn_plan_destroy(plan);
    for (int i = 0; i < p.count; i++) {
        (void)fattn_device_free(device, p.memory[i]);
    }
    return status;
}

static fattn_status attend(const job *j, fattn_device *device, const fattn_problem *problem)
{
    if (!j->divided.wanted) {
        return job_given(j, PROBLEM_POINTER_ALIGNMENT)
                   ? run_plan(j, device, problem)
                   : fattn_attention(device, problem, &j->buffers, NULL);
    }
    fattn_group group;
    fattn_group_plan *plan;
    fattn_buffers b = j->buffers;
    fattn_group_init(&group);
    group.transport = j->divided.world.transport;
    group.device = device;
    group.split = (fattn_split)j->divided.split;
    group.scheme = job_scheme(j);
    group.timeout = j->divided.timeout;
    b.cu_seqlens_q = b.cu_seqlens_k = NULL;
    fattn_status status = fattn_group_plan_create(&group, problem, j->buffers.cu_seqlens_q,
                                                  j->buffers.cu_seqlens_k, &plan);
    if (!status) {
        status = fattn_group_execute(plan, &b);
        if (!status) { /* after a failure MPI may still use the plan's memory */
            fattn_group_plan_destroy(plan);
        }
    }
    return status;
}

static fattn_status open_device(const job *j, fattn_device **device)
{
    fattn_device_options options;
    fattn_device_options_init(&options);
    options.threads = j->threads;
    return fattn_device_open_with(j->device, &options, device);
}

static fattn_status compute(job *j)
{
    fattn_problem forward = problem_forward_of(&j->problem), backward = j->problem;
    uint32_t wanted = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        wanted |= j->out_path[i] ? output_bits[i] : 0;
    }
    const uint32_t state = FATTN_OUT_O | FATTN_OUT_LSE;
    forward.outputs = j->backward ? state : wanted | FATTN_OUT_O;
    backward.op = FATTN_BACKWARD;
    backward.outputs = wanted & ~state;

    fattn_device *device;
    fattn_status status = open_device(j, &device);
    if (status == FATTN_OK) {
        status = attend(j, device, &forward);
    }
    if (status == FATTN_OK && j->backward) {
        status = attend(j, device, &backward);
    }
    if (status == FATTN_OK) {
        status = fattn_stream_synchronize(device, NULL);
    }
    if (status == FATTN_OK) {
        status = inspect(j, &forward);
    }
    fattn_device_close(device);
    fattn_cache_clear();
    return status;
}

/* NumPy arrays are f64 by default, and most devices do not support f64. */
static int report(const job *j, fattn_status status)
{
    if (status != FATTN_UNSUPPORTED || job_given(j, PROBLEM_DTYPE) ||
        j->problem.dtype != FATTN_F64) {
        return tool_failure(status);
    }
    fprintf(stderr, "fattn: %s: %s (%s holds f64; --dtype f32 converts)\n",
            fattn_status_string(status), fattn_last_reason(), j->in_path[IN_Q]);
    return tool_exit_code(status);
}

static bool prepare(job *j)
{
    if (!job_read(j) || !job_convert(j) || !job_shape(j) ||
        (j->divided.wanted && !job_read_rows(j)) || !job_create_outputs(j)) {
        return false;
    }
    if (j->divided.wanted) {
        job_narrow(j);
    }
    job_point(j);
    return true;
}

static int run_alone(job *j)
{
    job_recover(j);
    if (!prepare(j)) {
        return job_exit_status();
    }
    const fattn_status status = compute(j);
    return status ? report(j, status) : job_write(j) ? TOOL_OK : job_exit_status();
}

static int run_divided(job *j)
{
    world *const w = &j->divided.world;
    fattn_status status = world_open(w, j->divided.timeout);
    if (status) {
        return tool_failure(status);
    }
    int code = TOOL_OK;
    if (w->transport->rank == 0) {
        job_recover(j);
    }
    bool fine = world_agree(w, true) && world_agree(w, prepare(j));
    if (fine) {
        status = compute(j);
        code = status ? report(j, status) : TOOL_OK;
        fine = status || job_write_rows(j);
    }
    world_close(w);
    return fine ? code : job_exit_status();
}

int fattn_tool_run(int argc, char **argv)
{
    job j;
    job_init(&j);
    const int parsed = job_parse(argc, argv, &j);
    if (parsed != 0) {
        return parsed > 0 ? TOOL_OK : TOOL_USAGE;
    }
    if (j.threads) {
        unsetenv("FATTN_NUM_THREADS"); /* it would override --threads; not read yet */
    }
    job_apply_options(&j);
    const int code = !job_check(&j)     ? TOOL_USAGE
                     : j.divided.wanted ? run_divided(&j)
                                        : run_alone(&j);
    job_free(&j);
    return code;
}
