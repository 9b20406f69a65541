/* SPDX-License-Identifier: Apache-2.0 */
/* For tests that set every option once and then choose features: resets the fields of clear bits to
 * their defaults, as the library demands. */
#ifndef FATTN_TESTS_STRIP_H
#define FATTN_TESTS_STRIP_H

#include <string.h>

#include "core/feature.h"

static inline void strip_problem(fattn_problem *p)
{
    const uint64_t f = p->features;
    for (int bit = 0; bit < FATTN_FEATURE_COUNT; bit++) {
        const fattn_feature_field *field = fattn_feature_row(bit)->fields;
        for (; !(f >> bit & 1) && field->name; field++) {
            char *const at = (char *)p + field->offset;
            const double real = (double)field->usual;
            const fattn_dtype dtype = (fattn_dtype)field->usual;
            switch (field->kind) {
            case FATTN_FIELD_INTEGER: memcpy(at, &field->usual, sizeof field->usual); break;
            case FATTN_FIELD_REAL: memcpy(at, &real, sizeof real); break;
            case FATTN_FIELD_DTYPE: memcpy(at, &dtype, sizeof dtype); break;
            }
        }
    }
    if (!(f & FATTN_BIAS)) {
        memset(p->bias_stride, 0, sizeof p->bias_stride);
        memset(p->dbias_stride, 0, sizeof p->dbias_stride);
    }
    if (!(f & FATTN_MASK)) memset(p->mask_stride, 0, sizeof p->mask_stride);
    if (!(f & FATTN_BLOCK_MASK)) memset(p->block_mask_stride, 0, sizeof p->block_mask_stride);
    if (!(f & FATTN_DESCALE)) memset(p->descale_stride, 0, sizeof p->descale_stride);
}

static inline void strip(fattn_problem *p, fattn_buffers *b)
{
    const uint64_t f = p->features;
    strip_problem(p);
    if (!(f & FATTN_DLSE)) b->dlse = NULL;
    if (!(f & FATTN_BIAS)) b->bias = NULL;
    if (!(f & FATTN_MASK)) b->mask = NULL;
    if (!(f & FATTN_BLOCK_MASK)) b->block_mask = NULL;
    if (!(f & FATTN_ALIBI)) b->alibi_slopes = NULL;
    if (!(f & FATTN_SINK)) b->sink = NULL;
    if (!(f & FATTN_CU_SEQLENS_Q)) b->cu_seqlens_q = NULL;
    if (!(f & FATTN_CU_SEQLENS_K)) b->cu_seqlens_k = NULL;
    if (!(f & FATTN_SEQUSED_Q)) b->seqused_q = NULL;
    if (!(f & FATTN_SEQUSED_K)) b->seqused_k = NULL;
    if (!(f & FATTN_PAGED)) b->block_table = NULL;
    if (!(f & FATTN_SEQSTART_K)) b->seqstart_k = NULL;
    if (!(f & FATTN_DESCALE)) b->k_descale = b->v_descale = NULL;
    if (!(f & FATTN_DROPOUT)) b->seed = b->offset = 0, b->seed_ptr = b->offset_ptr = NULL;
    if (!(f & FATTN_POSITIONS)) {
        b->q_offset = b->k_offset = 0, b->whole_q = b->whole_k = -1;
        b->q_offsets = b->k_offsets = b->wholes_q = b->wholes_k = NULL;
    }
}

#endif
