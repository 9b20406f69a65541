/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include "tests/scene.h"

#include <stdlib.h>
#include <string.h>

#include "tests/environment.h"

const driver *cuda;
stub_cuda *stub;

const char *const scene_works[WORKS] = {"forward", "backward", "decode"};

_Alignas(256) char scene_memory[OPERANDS * OPERAND];

bool scene_begin(void)
{
    unsetenv("FATTN_BACKEND");
    unsetenv("FATTN_KERNEL");
    cuda = driver_open();
    stub = cuda ? cuda->stub : NULL;
    return stub &&
           fattn_device_count("cuda") == stub->devices; /* the first call opens the driver */
}

fattn_problem scene_problem(work w)
{
    fattn_problem p;
    fattn_problem_init(&p);
    p.op = w == BACKWARD ? FATTN_BACKWARD : FATTN_FORWARD;
    p.dtype = FATTN_F16;
    p.features = FATTN_CAUSAL;
    p.batch = w == DECODE ? 1 : 2;
    p.heads_q = w == DECODE ? 1 : 4, p.heads_k = w == DECODE ? 1 : 2;
    p.seqlen_q = w == DECODE ? 1 : 65, p.seqlen_k = w == DECODE ? 2048 : 70;
    p.dim = p.dim_v = w == DECODE ? 16 : 64;
    return p;
}

fattn_buffers scene_buffers(char *memory)
{
    fattn_buffers b;
    fattn_buffers_init(&b);
    void *const places[OPERANDS - 1] = {memory,
                                        memory + OPERAND,
                                        memory + 2 * OPERAND,
                                        memory + 3 * OPERAND,
                                        memory + 4 * OPERAND,
                                        memory + 5 * OPERAND,
                                        memory + 6 * OPERAND,
                                        memory + 7 * OPERAND,
                                        memory + 8 * OPERAND};
    b.q = places[0], b.k = places[1], b.v = places[2], b.o = places[3], b.lse = places[4];
    b.dout = places[5], b.dq = places[6], b.dk = places[7], b.dv = places[8];
    return b;
}

void scene_open(scene *s) { expect_ok(fattn_device_open(s->spec, &s->device), "opening"); }

void scene_set_up_problem(scene *s)
{
    fattn_plan_info info = {.struct_size = sizeof info};
    expect_ok(fattn_device_malloc(s->device, OPERANDS * OPERAND, &s->operands), "memory");
    memset(s->operands, 0, OPERANDS * OPERAND);
    s->buffers = scene_buffers(s->operands);
    if (s->problem.features & FATTN_SEQUSED_K) {
        s->buffers.seqused_k = (const void *)((char *)s->operands + (OPERANDS - 1) * OPERAND);
    }
    expect_ok(fattn_stream_create(s->device, &s->stream), "a stream");
    expect_ok(fattn_plan_create(s->device, &s->problem, &s->plan), "a plan");
    expect_ok(fattn_plan_get_info(s->plan, &info), "asking the plan");
    expect(s->problem.seqlen_q > 1 || info.splits > 1, "decoding does not split");
    s->workspace_bytes = info.workspace_bytes;
    expect_ok(fattn_device_malloc(s->device, (size_t)s->workspace_bytes, &s->workspace),
              "a workspace");
}

void scene_set_up(scene *s, work w, uint64_t features)
{
    s->problem = scene_problem(w);
    s->problem.features |= features;
    if (!s->device) {
        scene_open(s);
    }
    scene_set_up_problem(s);
}

void scene_tear_down(scene *s)
{
    fattn_cache_clear();
    for (int n = 0; n < 2; n++) {
        fattn_event_destroy(s->events[n]);
    }
    fattn_plan_destroy(s->plan);
    if (s->device) {
        fattn_device_free(s->device, s->workspace);
        fattn_device_free(s->device, s->operands);
        fattn_stream_destroy(s->device, s->stream);
    }
    fattn_device_close(s->device);
}

fattn_status scene_launched(const scene *s, fattn_status status)
{
    expect(status || stub->launches > s->launches, "nothing was launched");
    return status;
}

fattn_status scene_run(scene *s)
{
    return scene_launched(s, fattn_execute(s->plan, &s->buffers, s->workspace, s->stream));
}

fattn_status scene_run_allocating(scene *s)
{
    return scene_launched(s, fattn_execute(s->plan, &s->buffers, NULL, s->stream));
}

fattn_status scene_merge(scene *s)
{
    float *const m = s->operands;
    const fattn_strides strides = {.batch = 64, .seq = 8, .head = 64};
    const fattn_merge_args args = {.struct_size = sizeof args,
                                   .batch = 1,
                                   .heads = 1,
                                   .seqlen = 8,
                                   .dim_v = 8,
                                   .o1 = m,
                                   .lse1 = m + 64,
                                   .o2 = m + 128,
                                   .lse2 = m + 192,
                                   .o = m + 256,
                                   .lse = m + 320,
                                   .o1_stride = strides,
                                   .o2_stride = strides,
                                   .o_stride = strides};
    return scene_launched(s, fattn_merge(s->device, &args, s->stream));
}

fattn_status scene_dropout_mask(scene *s)
{
    const fattn_dropout_args args = {.struct_size = sizeof args,
                                     .batch = 1,
                                     .heads = 1,
                                     .seqlen_q = 8,
                                     .seqlen_k = 8,
                                     .p = 0.5,
                                     .keep = s->operands};
    return scene_launched(s, fattn_dropout_mask(s->device, &args, s->stream));
}

const char scene_resident[] = "mma_backward_64";

unsigned scene_resident_blocks(const char *row, int64_t items)
{
    scene s = {.spec = "cuda:0", .problem = scene_problem(BACKWARD)};
    unsigned blocks = 0;
    set_environment("FATTN_KERNEL", row);
    scene_open(&s);
    s.problem.batch = items, s.problem.heads_q = s.problem.heads_k = 1;
    s.problem.seqlen_q = s.problem.seqlen_k = 8;
    const fattn_status status = fattn_plan_create(s.device, &s.problem, &s.plan);
    fattn_plan_destroy(s.plan);
    s.plan = NULL;
    if (status == FATTN_OK) {
        scene_set_up_problem(&s);
        expect_ok(scene_run(&s), "a run");
        blocks = stub->blocks[(stub->launches - 2) % 8]; /* rows, keys, dq */
    } else {
        expect(status == (stub->held ? FATTN_UNSUPPORTED : FATTN_DEVICE_ERROR), "planning: %s",
               fattn_last_reason());
    }
    scene_tear_down(&s);
    set_environment("FATTN_KERNEL", NULL);
    return blocks;
}

static int usual; /* capability of the stub */

bool scene_begin_hopper(void)
{
    fattn_device *device = NULL;
    fattn_plan *plan = NULL;
    fattn_problem problem = scene_problem(FORWARD);
    usual = stub->capability, stub->capability = 90;
    set_environment("FATTN_KERNEL", "wgmma_64");
    const bool has = fattn_device_open("cuda:0", &device) == FATTN_OK &&
                     fattn_plan_create(device, &problem, &plan) == FATTN_OK;
    fattn_plan_destroy(plan);
    fattn_device_close(device);
    return has;
}

void scene_end_hopper(void)
{
    stub->capability = usual;
    set_environment("FATTN_KERNEL", NULL);
}

int scene_calls(const char *name)
{
    int count = 0;
    for (int64_t n = 0; n < stub->calls; n++) {
        count += strcmp(stub->log[n], name) == 0;
    }
    return count;
}
