/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Running on tensors in host memory that the device cannot read: fattn_attention() copies them to
 * the device and back, so that a program needs no more than FATTN_BACKEND=cuda. Operands may
 * interleave (slices of one packed tensor), so what is copied to the device is not single operands
 * but the unions of address ranges that touch. Only outputs are copied back, and nothing between
 * their rows: other threads may be writing there.
 */
#include <string.h>

#include "core/memory.h"
#include "core/operands.h"
#include "core/plan.h"
#include "core/status.h"

/* An address range of the host and its copy on the device. */
typedef struct range {
    uintptr_t first, end;
    char *device;
} range;

typedef struct staging {
    const fattn_plan *plan;
    fattn_operand operands[FATTN_OPERANDS_MAX];
    range ranges[FATTN_OPERANDS_MAX];
    int operand_count, range_count;
    char *spread; /* host memory for the largest output with gaps between its rows */
} staging;

bool fattn_plan_reads(const fattn_plan *plan, const fattn_buffers *buffers)
{
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(&plan->problem, buffers, operands);
    bool reads = true;
    for (int i = 0; i < count; i++) {
        reads = reads && (!fattn_operand_is_present(&operands[i]) ||
                          plan->device->backend->reads(plan->device->impl,
                                                       (const void *)operands[i].region.base));
    }
    return reads;
}

/* Adds [first, end), merged with the ranges that it touches. */
static void add_range(staging *s, range added)
{
    int apart = 0;
    for (int i = 0; i < s->range_count; i++) {
        const range r = s->ranges[i];
        if (r.end < added.first || added.end < r.first) {
            s->ranges[apart++] = r;
            continue;
        }
        added.first = r.first < added.first ? r.first : added.first;
        added.end = r.end > added.end ? r.end : added.end;
    }
    s->ranges[apart] = added;
    s->range_count = apart + 1;
}

static void find_ranges(staging *s, const fattn_buffers *buffers)
{
    s->operand_count = fattn_operands(&s->plan->problem, buffers, s->operands);
    s->range_count = 0;
    for (int i = 0; i < s->operand_count; i++) {
        const fattn_operand *const operand = &s->operands[i];
        int64_t bytes = 0;
        if (fattn_operand_is_present(operand) && fattn_region_span(&operand->region, &bytes)) {
            add_range(s, (range){.first = operand->region.base,
                                 .end = operand->region.base + (uintptr_t)bytes});
        }
    }
}

/* Bytes from the first to one past the last of an output, 0 for other operands; and whether there
 * are gaps between its rows. */
static int64_t written_bytes(const fattn_operand *operand, bool *gaps)
{
    const fattn_region *const region = &operand->region;
    int64_t bytes = 0, rows = region->run;
    if (operand->output && fattn_operand_is_present(operand)) {
        (void)fattn_region_span(region, &bytes); /* was valid for the plan */
    }
    for (int a = 0; a < 4; a++) {
        rows *= region->extent[a];
    }
    *gaps = bytes > rows;
    return bytes;
}

static fattn_status reserve_spread(staging *s)
{
    int64_t most = 0;
    for (int i = 0; i < s->operand_count; i++) {
        bool gaps;
        const int64_t bytes = written_bytes(&s->operands[i], &gaps);
        most = gaps && bytes > most ? bytes : most;
    }
    s->spread = most ? fattn_memory_alloc((size_t)most) : NULL;
    return most && !s->spread ? fattn_fail_memory(most, "rows of an output") : FATTN_OK;
}

/* Copies the ranges to the device. Addresses stay the same modulo FATTN_MEMORY_ALIGNMENT, so that
 * every operand stays as aligned as it was. */
static fattn_status copy_in(staging *s, fattn_stream stream)
{
    const fattn_backend *const backend = s->plan->device->backend;
    void *const impl = s->plan->device->impl;
    for (int i = 0; i < s->range_count; i++) {
        range *const r = &s->ranges[i];
        const uintptr_t shift = r->first % FATTN_MEMORY_ALIGNMENT;
        const size_t bytes = r->end - r->first;
        void *memory = NULL;
        fattn_status status = fattn_device_take(s->plan->device, bytes + shift, stream, &memory);
        if (status) {
            return status;
        }
        r->device = (char *)memory + shift;
        status = backend->copy(impl, r->device, (const void *)r->first, bytes, stream);
        if (status) {
            return status;
        }
    }
    return FATTN_OK;
}

/* The copy of an operand. */
static char *device_at(const staging *s, const fattn_operand *operand)
{
    const uintptr_t base = operand->region.base;
    int j = 0;
    while (base < s->ranges[j].first || base >= s->ranges[j].end) {
        j++; /* ends: every operand is in a range */
    }
    return s->ranges[j].device + (base - s->ranges[j].first);
}

/* The caller's buffers with every pointer moved to its copy. */
static fattn_buffers moved_buffers(const staging *s, const fattn_buffers *buffers)
{
    fattn_buffers moved = *buffers;
    for (int i = 0; i < s->operand_count; i++) {
        if (fattn_operand_is_present(&s->operands[i])) {
            const void *const pointer = device_at(s, &s->operands[i]);
            memcpy((char *)&moved + s->operands[i].offset, &pointer, sizeof pointer);
        }
    }
    return moved;
}

/* Copies the rows of an output from memory laid out like it. */
static void copy_rows(const fattn_region *to, const char *from)
{
    const int64_t *const n = to->extent, *const stride = to->stride;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        const int64_t at = i / (n[3] * n[2] * n[1]) * stride[0] +
                           i / (n[3] * n[2]) % n[1] * stride[1] + i / n[3] % n[2] * stride[2] +
                           i % n[3] * stride[3];
        memcpy((char *)to->base + at, from + at, (size_t)to->run);
    }
}

static fattn_status copy_out(const staging *s, fattn_stream stream)
{
    const fattn_backend *const backend = s->plan->device->backend;
    void *const impl = s->plan->device->impl;
    fattn_status status = FATTN_OK;
    for (int i = 0; !status && i < s->operand_count; i++) {
        const fattn_operand *const operand = &s->operands[i];
        bool gaps;
        const int64_t bytes = written_bytes(operand, &gaps);
        if (bytes == 0) {
            continue;
        }
        void *const to = gaps ? s->spread : (void *)operand->region.base;
        status = backend->copy(impl, to, device_at(s, operand), (size_t)bytes, stream);
        if (!status && gaps) {
            status = backend->stream_synchronize(impl, stream);
        }
        if (!status && gaps) {
            copy_rows(&operand->region, s->spread);
        }
    }
    return status ? status : backend->stream_synchronize(impl, stream);
}

/* Frees the copies. After a failure it first waits until queued work no longer uses them. Returns
 * status, or else the first failure here. */
static fattn_status release(staging *s, fattn_stream stream, fattn_status status)
{
    if (status) {
        fattn_reason_hold(status);
        (void)s->plan->device->backend->stream_synchronize(s->plan->device->impl, stream);
        fattn_reason_let();
    }
    for (int i = 0; i < s->range_count; i++) {
        if (s->ranges[i].device) {
            char *const memory = s->ranges[i].device - s->ranges[i].first % FATTN_MEMORY_ALIGNMENT;
            fattn_reason_hold(status);
            const fattn_status freed = fattn_device_give(s->plan->device, memory);
            fattn_reason_let();
            status = status ? status : freed;
        }
    }
    fattn_memory_free(s->spread);
    return status;
}

fattn_status fattn_plan_run_staged(const fattn_plan *plan, const fattn_buffers *buffers,
                                   void *workspace, fattn_stream stream)
{
    staging s = {.plan = plan};
    find_ranges(&s, buffers);
    fattn_status status = reserve_spread(&s);
    status = status ? status : copy_in(&s, stream);
    if (!status) {
        const fattn_buffers moved = moved_buffers(&s, buffers);
        status = fattn_plan_run(plan, &moved, workspace, stream);
    }
    status = status ? status : copy_out(&s, stream);
    return release(&s, stream, status);
}
