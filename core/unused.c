/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fields whose feature bit is clear must be at their defaults. A mask without FATTN_MASK is
 * probably a forgotten bit, and computing without the mask would be silently wrong.
 *
 * The value that normalisation would fill in is accepted too (scale 1 / sqrt(D), window_right 0
 * with FATTN_CAUSAL, total_q Sq), so that a normalised problem can be normalised again.
 */
#include <math.h>
#include <string.h>

#include "core/feature.h"
#include "core/problem.h"
#include "core/status.h"
#include "core/tensors.h"

#define BIT(feature) feature, #feature

/* The value that normalisation puts into a field whose feature is off. */
static int64_t filled_integer(const fattn_problem *p, const fattn_feature_field *field)
{
    switch (field->offset) {
    case offsetof(fattn_problem, window_right): return p->features & FATTN_CAUSAL ? 0 : -1;
    case offsetof(fattn_problem, total_q): return p->seqlen_q;
    case offsetof(fattn_problem, total_k): return p->seqlen_k;
    default: return field->usual;
    }
}

static double filled_real(const fattn_problem *p, const fattn_feature_field *field)
{
    return field->offset == offsetof(fattn_problem, scale) ? 1 / sqrt((double)p->dim) : 0;
}

static fattn_status check_field(const fattn_problem *p, const fattn_feature *feature,
                                const fattn_feature_field *field)
{
    if (field->kind == FATTN_FIELD_REAL) {
        const double value = fattn_feature_real(p, field);
        if (!(value == 0 || value == filled_real(p, field))) { /* NaN is neither */
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %g and features lacks %s", field->name,
                              value, feature->constant);
        }
        return FATTN_OK;
    }
    const int64_t value = fattn_feature_integer(p, field);
    if (value != field->usual && value != filled_integer(p, field)) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %lld and features lacks %s", field->name,
                          (long long)value, feature->constant);
    }
    return FATTN_OK;
}

static fattn_status check_numbers(const fattn_problem *p)
{
    fattn_status status = FATTN_OK;
    for (int bit = 0; !status && bit < FATTN_FEATURE_COUNT; bit++) {
        const fattn_feature *const feature = fattn_feature_row(bit);
        const fattn_feature_field *field = feature->fields;
        for (; !status && !(p->features >> bit & 1) && field->name; field++) {
            status = check_field(p, feature, field);
        }
    }
    return status;
}

static fattn_status check_strides(const fattn_problem *p)
{
    const struct {
        uint64_t feature;
        const char *feature_name, *name;
        const int64_t *strides;
        int axes;
    } fields[] = {
        {BIT(FATTN_BIAS), "bias_stride", p->bias_stride, 4},
        {BIT(FATTN_BIAS), "dbias_stride", p->dbias_stride, 4},
        {BIT(FATTN_MASK), "mask_stride", p->mask_stride, 4},
        {BIT(FATTN_BLOCK_MASK), "block_mask_stride", p->block_mask_stride, 4},
        {BIT(FATTN_DESCALE), "descale_stride", p->descale_stride, 2},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        for (int a = 0; a < fields[i].axes && !(p->features & fields[i].feature); a++) {
            if (fields[i].strides[a]) {
                return fattn_fail(FATTN_INVALID_ARGUMENT, "%s[%d] is %lld and features lacks %s",
                                  fields[i].name, a, (long long)fields[i].strides[a],
                                  fields[i].feature_name);
            }
        }
    }
    return FATTN_OK;
}

/* The tensors' strides, which only layout FATTN_STRIDED reads. */
static fattn_status check_tensor_strides(const fattn_problem *p)
{
    fattn_tensor tensors[FATTN_TENSORS];
    fattn_tensors_of(p, tensors);
    for (int n = 0; p->layout != FATTN_STRIDED && n < FATTN_TENSORS; n++) {
        const fattn_strides *const s = &tensors[n].strides;
        if (s->batch || s->seq || s->head) {
            return fattn_fail(FATTN_INVALID_STRIDE,
                              "%s has strides (%lld, %lld, %lld), which %s does not read: layout "
                              "is not FATTN_STRIDED",
                              tensors[n].name, (long long)s->batch, (long long)s->seq,
                              (long long)s->head,
                              p->layout == FATTN_BSHD ? "FATTN_BSHD" : "FATTN_BHSD");
        }
    }
    return FATTN_OK;
}

fattn_status fattn_problem_check_unused(const fattn_problem *p)
{
    fattn_status status = check_numbers(p);
    status = status ? status : check_strides(p);
    return status ? status : check_tensor_strides(p);
}

/* A field of fattn_buffers and the feature without which it must be at its default. */
typedef struct buffer_field {
    uint64_t feature;
    const char *feature_name, *name;
    size_t offset;
    enum { FIELD_POINTER, FIELD_SIGNED, FIELD_UNSIGNED } kind; /* integers have 64 bits */
    int64_t usual;
} buffer_field;

static const buffer_field buffer_fields[] = {
#define POINTER(feature, field)                                                     \
    {                                                                               \
        feature, #feature, #field, offsetof(fattn_buffers, field), FIELD_POINTER, 0 \
    }
#define SCALAR(feature, field, kind, usual)                                    \
    {                                                                          \
        feature, #feature, #field, offsetof(fattn_buffers, field), kind, usual \
    }
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
    POINTER(FATTN_DESCALE, k_descale),
    POINTER(FATTN_DESCALE, v_descale),
    SCALAR(FATTN_POSITIONS, q_offset, FIELD_SIGNED, 0),
    SCALAR(FATTN_POSITIONS, k_offset, FIELD_SIGNED, 0),
    SCALAR(FATTN_POSITIONS, whole_q, FIELD_SIGNED, -1),
    SCALAR(FATTN_POSITIONS, whole_k, FIELD_SIGNED, -1),
    SCALAR(FATTN_DROPOUT, seed, FIELD_UNSIGNED, 0),
    SCALAR(FATTN_DROPOUT, offset, FIELD_UNSIGNED, 0),
#undef POINTER
#undef SCALAR
};
#define FIELD_COUNT (sizeof buffer_fields / sizeof buffer_fields[0])

/* A forward may share its buffers with a backward, which reads dlse. */
static uint64_t legal_features(fattn_op op, uint64_t features)
{
    return features | (op == FATTN_FORWARD ? FATTN_DLSE : 0);
}

static uint64_t word_at(const fattn_buffers *b, size_t word)
{
    uint64_t value;
    memcpy(&value, (const char *)b + word * sizeof value, sizeof value);
    return value;
}

void fattn_unused_make(fattn_op op, uint64_t features, fattn_unused *unused)
{
    _Static_assert(sizeof(void *) == sizeof(uint64_t) && sizeof(fattn_buffers) <= 64 * 8,
                   "each field is a word, and a bit of fattn_unused");
    const uint64_t legal = legal_features(op, features);
    *unused = (fattn_unused){0, 0};
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        const buffer_field *const field = &buffer_fields[i];
        uint64_t *const words = field->usual ? &unused->minus_one : &unused->zero;
        const bool off = !(legal & field->feature);
        *words |= (uint64_t)off << field->offset / sizeof(uint64_t);
    }
}

bool fattn_unused_hold(const fattn_unused *unused, const fattn_buffers *b)
{
    uint64_t found = 0;
    for (uint64_t words = unused->zero; words; words &= words - 1) {
        found |= word_at(b, (size_t)__builtin_ctzll(words));
    }
    for (uint64_t words = unused->minus_one; words; words &= words - 1) {
        found |= ~word_at(b, (size_t)__builtin_ctzll(words));
    }
    return found == 0;
}

fattn_status fattn_buffers_check_unused(fattn_op op, uint64_t features, const fattn_buffers *b)
{
    const uint64_t legal = legal_features(op, features);
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        const buffer_field *const field = &buffer_fields[i];
        const uint64_t value = word_at(b, field->offset / sizeof value);
        if (value == (uint64_t)field->usual || legal & field->feature) {
            continue;
        }
        const char *const name = field->name, *const bit = field->feature_name;
        switch (field->kind) {
        case FIELD_POINTER:
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %p and features lacks %s", name,
                              (void *)(uintptr_t)value, bit);
        case FIELD_SIGNED:
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %lld and features lacks %s", name,
                              (long long)value, bit);
        case FIELD_UNSIGNED:
            return fattn_fail(FATTN_INVALID_ARGUMENT, "%s is %llu and features lacks %s", name,
                              (unsigned long long)value, bit);
        }
    }
    return FATTN_OK;
}
