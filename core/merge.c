/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions fattn_merge() and fattn_dropout_mask(): they check their arguments and call
 * the backend. */
#include <string.h>

#include "core/abi.h"
#include "core/backend.h"
#include "core/philox.h"
#include "core/problem.h"
#include "core/region.h"
#include "core/status.h"

static fattn_status check_size(const char *name, int64_t value, int64_t low, int64_t high)
{
    return fattn_check_range(name, value, low, high, FATTN_INVALID_SHAPE);
}

/* --- Merge ------------------------------------------------------------------------------------ */

typedef struct state {
    const char *name, *lse_name;
    const float *o, *lse;
    const fattn_strides *strides;
} state;

static fattn_region region_of(const fattn_merge_args *a, const state *s)
{
    return (fattn_region){
        .base = (uintptr_t)s->o,
        .extent = {a->batch, a->seqlen, a->heads, 1},
        .stride = {s->strides->batch * 4, s->strides->seq * 4, s->strides->head * 4, 0},
        .run = a->dim_v * 4,
    };
}

static fattn_region lse_region_of(const fattn_merge_args *a, const state *s)
{
    return (fattn_region){
        .base = (uintptr_t)s->lse,
        .extent = {a->batch, a->heads, a->seqlen, 1},
        .stride = {a->heads * a->seqlen * 4, a->seqlen * 4, 4, 0},
        .run = 4,
    };
}

static fattn_status check_state(const fattn_merge_args *a, const state *s)
{
    static const char *const axes[] = {"batch", "seq", "head"};
    const int64_t strides[] = {s->strides->batch, s->strides->seq, s->strides->head};
    for (int i = 0; i < 3; i++) {
        if (strides[i] < 0 || strides[i] > INT64_MAX / 8) {
            return fattn_fail(FATTN_INVALID_STRIDE, "%s_stride.%s is %lld, %s", s->name, axes[i],
                              (long long)strides[i],
                              strides[i] < 0 ? "negative" : "so that bytes overflow 63 bits");
        }
    }
    const fattn_region regions[] = {region_of(a, s), lse_region_of(a, s)};
    for (int i = 0; i < 2; i++) {
        const char *const name = i ? s->lse_name : s->name;
        int64_t bytes = 0;
        if (!fattn_region_span(&regions[i], &bytes)) {
            return fattn_fail(FATTN_OVERFLOW, "%s spans 2^63 bytes or more", name);
        }
        if (bytes && !regions[i].base) {
            return fattn_fail(FATTN_NULL_POINTER, "%s is NULL", name);
        }
        if (regions[i].base % sizeof(float)) {
            return fattn_fail(FATTN_MISALIGNED, "%s is %p, not a multiple of 4", name,
                              (void *)regions[i].base);
        }
    }
    return FATTN_OK;
}

static bool same_strides(const fattn_strides *a, const fattn_strides *b)
{
    return a->batch == b->batch && a->seq == b->seq && a->head == b->head;
}

/* The output may be exactly one of the inputs, element on element; any other overlap is refused. */
static fattn_status check_overlap(const fattn_merge_args *a, const state *in, const state *out)
{
    const fattn_region o = region_of(a, out);
    const fattn_region lse = lse_region_of(a, out);
    const fattn_region inputs[] = {region_of(a, in), lse_region_of(a, in)};
    const bool in_place =
        in->o == out->o && in->lse == out->lse && same_strides(in->strides, out->strides);
    for (int i = 0; !in_place && i < 2; i++) {
        const bool by_o = fattn_regions_overlap(&o, &inputs[i]);
        if (by_o || fattn_regions_overlap(&lse, &inputs[i])) {
            return fattn_fail(FATTN_OVERLAP,
                              "%s overlaps %s: o and lse may only be exactly %s and %s, with the "
                              "same strides",
                              by_o ? out->name : out->lse_name, i ? in->lse_name : in->name,
                              in->name, in->lse_name);
        }
    }
    if (fattn_region_overlaps_itself(&o)) {
        return fattn_fail(FATTN_OVERLAP,
                          "o overlaps itself: its strides let two elements share an address");
    }
    return fattn_regions_overlap(&o, &lse) ? fattn_fail(FATTN_OVERLAP, "o overlaps lse") : FATTN_OK;
}

void fattn_merge_args_init(fattn_merge_args *args)
{
    memset(args, 0, sizeof *args);
    args->struct_size = sizeof *args;
}

static fattn_state state_of(const fattn_merge_args *a, const float *o, const float *lse,
                            const fattn_strides *strides)
{
    return (fattn_state){.o = (void *)o,
                         .lse = (float *)lse,
                         .strides = *strides,
                         .lse_batch = a->heads * a->seqlen,
                         .lse_head = a->seqlen};
}

static fattn_merge_job job_of(const fattn_merge_args *a)
{
    return (fattn_merge_job){.batch = a->batch,
                             .heads = a->heads,
                             .seqlen = a->seqlen,
                             .dim_v = a->dim_v,
                             .first = state_of(a, a->o1, a->lse1, &a->o1_stride),
                             .second = state_of(a, a->o2, a->lse2, &a->o2_stride),
                             .result = state_of(a, a->o, a->lse, &a->o_stride),
                             .dtype = FATTN_F32};
}

fattn_status fattn_merge(fattn_device *device, const fattn_merge_args *args, fattn_stream stream)
{
    fattn_merge_args a;
    fattn_status status = fattn_abi_read(&a, sizeof a, args, "fattn_merge_args");
    status = status ? status : check_size("batch", a.batch, 0, FATTN_SIZE_LIMIT);
    status = status ? status : check_size("heads", a.heads, 0, FATTN_SIZE_LIMIT);
    status = status ? status : check_size("seqlen", a.seqlen, 0, FATTN_SIZE_LIMIT);
    status = status ? status : check_size("dim_v", a.dim_v, 1, FATTN_SIZE_LIMIT);
    if (status) {
        return status;
    }
    if (a.heads == 0 || a.seqlen == 0) {
        a.batch = 0; /* nothing to walk */
    }
    if (a.heads && a.seqlen > INT64_MAX / 8 / a.heads) {
        return fattn_fail(FATTN_OVERFLOW, "heads x seqlen is %lld x %lld: lse overflows",
                          (long long)a.heads, (long long)a.seqlen);
    }
    const state first = {"o1", "lse1", a.o1, a.lse1, &a.o1_stride};
    const state second = {"o2", "lse2", a.o2, a.lse2, &a.o2_stride};
    const state result = {"o", "lse", a.o, a.lse, &a.o_stride};
    status = check_state(&a, &first);
    status = status ? status : check_state(&a, &second);
    status = status ? status : check_state(&a, &result);
    status = status ? status : check_overlap(&a, &first, &result);
    status = status ? status : check_overlap(&a, &second, &result);
    status = status ? status : fattn_device_acquire(&device);
    if (!status) {
        const fattn_merge_job job = job_of(&a);
        status = device->backend->merge(device->impl, &job, stream);
        fattn_device_drop(device);
    }
    return status;
}

/* --- Dropout mask ----------------------------------------------------------------------------- */

void fattn_dropout_args_init(fattn_dropout_args *args)
{
    memset(args, 0, sizeof *args);
    args->struct_size = sizeof *args;
}

fattn_status fattn_dropout_mask(fattn_device *device, const fattn_dropout_args *args,
                                fattn_stream stream)
{
    fattn_dropout_args a;
    fattn_status status = fattn_abi_read(&a, sizeof a, args, "fattn_dropout_args");
    status = status ? status : check_size("batch", a.batch, 0, FATTN_SIZE_LIMIT);
    status = status ? status : check_size("heads", a.heads, 0, FATTN_SIZE_LIMIT);
    status = status ? status : check_size("seqlen_q", a.seqlen_q, 0, FATTN_SIZE_LIMIT);
    status = status ? status : check_size("seqlen_k", a.seqlen_k, 0, FATTN_SIZE_LIMIT);
    status = status
                 ? status
                 : check_size("batch_offset", a.batch_offset, 0, FATTN_DROPOUT_BATCHES - a.batch);
    status = status ? status
                    : check_size("head_offset", a.head_offset, 0, FATTN_DROPOUT_HEADS - a.heads);
    status =
        status ? status : check_size("q_offset", a.q_offset, 0, FATTN_DROPOUT_QUERIES - a.seqlen_q);
    status =
        status ? status : check_size("k_offset", a.k_offset, 0, FATTN_DROPOUT_QUERIES - a.seqlen_k);
    if (status) {
        return status;
    }
    if (!(a.p >= 0 && a.p <= 1)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "p is %g, not in 0..1", a.p);
    }
    int64_t rows = 0;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(a.batch * a.heads, a.seqlen_q, &rows) ||
        __builtin_mul_overflow(rows, a.seqlen_k, &bytes)) {
        return fattn_fail(FATTN_OVERFLOW, "keep has 2^63 bytes or more");
    }
    if (bytes && !a.keep) {
        return fattn_fail(FATTN_NULL_POINTER, "keep is NULL");
    }
    if (bytes == 0) {
        a.batch = 0; /* nothing to walk */
    }
    status = fattn_device_acquire(&device);
    if (!status) {
        status = device->backend->dropout_mask(device->impl, &a, stream);
        fattn_device_drop(device);
    }
    return status;
}
