/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fields whose feature bit is clear. They must be at their defaults: a mask without FATTN_MASK is a
 * bit forgotten, and computing without it would be wrong in silence.
 *
 * A value that says what the library fills in is accepted too (scale 1 / sqrt(D), window_right 0
 * under FATTN_CAUSAL, total_q Sq), so that a normal form is its own normal form.
 */
#include <math.h>
#include <string.h>

#include "core/problem.h"
#include "core/status.h"

#define BIT(feature) feature, #feature

static fattn_status check_integers(const fattn_problem *p)
{
    const int64_t right = p->features & FATTN_CAUSAL ? 0 : -1;
    const struct {
        uint64_t feature;
        const char *feature_name, *name;
        int64_t value, usual, filled;
    } fields[] = {
        {BIT(FATTN_WINDOW), "window_left", p->window_left, -1, -1},
        {BIT(FATTN_WINDOW), "window_right", p->window_right, -1, right},
        {BIT(FATTN_BIAS), "dtype_bias", (int64_t)p->dtype_bias, 0, 0},
        {BIT(FATTN_ALIBI), "alibi_batch_stride", p->alibi_batch_stride, 0, 0},
        {BIT(FATTN_BLOCK_MASK), "block_m", p->block_m, 0, 0},
        {BIT(FATTN_BLOCK_MASK), "block_n", p->block_n, 0, 0},
        {BIT(FATTN_DROPOUT), "batch_offset", p->batch_offset, 0, 0},
        {BIT(FATTN_DROPOUT), "head_offset", p->head_offset, 0, 0},
        {BIT(FATTN_CU_SEQLENS_Q), "total_q", p->total_q, 0, p->seqlen_q},
        {BIT(FATTN_CU_SEQLENS_K), "total_k", p->total_k, 0, p->seqlen_k},
        {BIT(FATTN_PAGED), "page_size", p->page_size, 0, 0},
        {BIT(FATTN_PAGED), "num_pages", p->num_pages, 0, 0},
        {BIT(FATTN_PAGED), "max_pages", p->max_pages, 0, 0},
        {BIT(FATTN_PAGED), "block_table_stride", p->block_table_stride, 0, 0},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (!(p->features & fields[i].feature) && fields[i].value != fields[i].usual &&
            fields[i].value != fields[i].filled) {
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %lld and features lacks %s",
                              fields[i].name, (long long)fields[i].value, fields[i].feature_name);
        }
    }
    return FATTN_OK;
}

static fattn_status check_reals(const fattn_problem *p)
{
    const struct {
        uint64_t feature;
        const char *feature_name, *name;
        double value, filled;
    } fields[] = {
        {BIT(FATTN_SCALE), "scale", p->scale, 1 / sqrt((double)p->dim)},
        {BIT(FATTN_SOFTCAP), "softcap", p->softcap, 0},
        {BIT(FATTN_DROPOUT), "dropout_p", p->dropout_p, 0},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (!(p->features & fields[i].feature) &&
            !(fields[i].value == 0 || fields[i].value == fields[i].filled)) { /* NaN is neither */
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %g and features lacks %s",
                              fields[i].name, fields[i].value, fields[i].feature_name);
        }
    }
    return FATTN_OK;
}

static fattn_status check_score_strides(const fattn_problem *p)
{
    const struct {
        uint64_t feature;
        const char *feature_name, *name;
        const int64_t *strides;
    } fields[] = {
        {BIT(FATTN_BIAS), "bias_stride", p->bias_stride},
        {BIT(FATTN_BIAS), "dbias_stride", p->dbias_stride},
        {BIT(FATTN_MASK), "mask_stride", p->mask_stride},
        {BIT(FATTN_BLOCK_MASK), "block_mask_stride", p->block_mask_stride},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        for (int a = 0; a < 4 && !(p->features & fields[i].feature); a++) {
            if (fields[i].strides[a]) {
                return fattn_fail(FATTN_INVALID_ARGUMENT, "%s[%d] is %lld and features lacks %s",
                                  fields[i].name, a, (long long)fields[i].strides[a],
                                  fields[i].feature_name);
            }
        }
    }
    return FATTN_OK;
}

/* Only FATTN_STRIDED reads these. */
static fattn_status check_tensor_strides(const fattn_problem *p)
{
    const struct {
        const char *name;
        const fattn_strides *s;
    } tensors[] = {
        {"q", &p->q},       {"k", &p->k},   {"v", &p->v},   {"o", &p->o},
        {"dout", &p->dout}, {"dq", &p->dq}, {"dk", &p->dk}, {"dv", &p->dv},
    };
    for (size_t i = 0; p->layout != FATTN_STRIDED && i < sizeof tensors / sizeof tensors[0]; i++) {
        const fattn_strides *const s = tensors[i].s;
        if (s->batch || s->seq || s->head) {
            return fattn_fail(FATTN_INVALID_STRIDE,
                              "%s has strides (%lld, %lld, %lld), which %s does not read: layout "
                              "is not FATTN_STRIDED",
                              tensors[i].name, (long long)s->batch, (long long)s->seq,
                              (long long)s->head,
                              p->layout == FATTN_BSHD ? "FATTN_BSHD" : "FATTN_BHSD");
        }
    }
    return FATTN_OK;
}

fattn_status fattn_problem_check_unused(const fattn_problem *p)
{
    fattn_status status = check_integers(p);
    status = status ? status : check_reals(p);
    status = status ? status : check_score_strides(p);
    return status ? status : check_tensor_strides(p);
}

fattn_status fattn_buffers_check_unused(fattn_op op, uint64_t features, const fattn_buffers *b)
{
    static const struct {
        uint64_t feature;
        const char *feature_name, *name;
        size_t offset;
    } pointers[] = {
#define POINTER(feature, field) {feature, #feature, #field, offsetof(fattn_buffers, field)}
        POINTER(FATTN_DLSE, dlse),
        POINTER(FATTN_BIAS, bias),
        POINTER(FATTN_MASK, mask),
        POINTER(FATTN_BLOCK_MASK, block_mask),
        POINTER(FATTN_ALIBI, alibi_slopes),
        POINTER(FATTN_SINK, sink),
        POINTER(FATTN_CU_SEQLENS_Q, cu_seqlens_q),
        POINTER(FATTN_CU_SEQLENS_K, cu_seqlens_k),
        POINTER(FATTN_SEQUSED_Q, seqused_q),
        POINTER(FATTN_SEQUSED_K, seqused_k),
        POINTER(FATTN_PAGED, block_table),
        POINTER(FATTN_POSITIONS, q_offsets),
        POINTER(FATTN_POSITIONS, k_offsets),
        POINTER(FATTN_POSITIONS, wholes_q),
        POINTER(FATTN_POSITIONS, wholes_k),
        POINTER(FATTN_DROPOUT, seed_ptr),
        POINTER(FATTN_DROPOUT, offset_ptr),
        POINTER(FATTN_SEQSTART_K, seqstart_k),
#undef POINTER
    };
    /* A forward may share its buffers with the backward that reads dlse. */
    const uint64_t legal = features | (op == FATTN_FORWARD ? FATTN_DLSE : 0);
    for (size_t i = 0; i < sizeof pointers / sizeof pointers[0]; i++) {
        const void *pointer = NULL;
        memcpy(&pointer, (const char *)b + pointers[i].offset, sizeof pointer);
        if (pointer && !(legal & pointers[i].feature)) {
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %p and features lacks %s",
                              pointers[i].name, pointer, pointers[i].feature_name);
        }
    }
    const struct {
        uint64_t feature;
        const char *feature_name, *name;
        int64_t value, usual;
    } scalars[] = {
        {BIT(FATTN_POSITIONS), "q_offset", b->q_offset, 0},
        {BIT(FATTN_POSITIONS), "k_offset", b->k_offset, 0},
        {BIT(FATTN_POSITIONS), "whole_q", b->whole_q, -1},
        {BIT(FATTN_POSITIONS), "whole_k", b->whole_k, -1},
        {BIT(FATTN_DROPOUT), "seed", (int64_t)b->seed, 0},
        {BIT(FATTN_DROPOUT), "offset", (int64_t)b->offset, 0},
    };
    for (size_t i = 0; i < sizeof scalars / sizeof scalars[0]; i++) {
        if (scalars[i].value != scalars[i].usual && !(features & scalars[i].feature)) {
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %lld and features lacks %s",
                              scalars[i].name, (long long)scalars[i].value,
                              scalars[i].feature_name);
        }
    }
    return FATTN_OK;
}
