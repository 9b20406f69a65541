/* SPDX-License-Identifier: Apache-2.0 */
#include "core/feature.h"

#include <stdio.h>
#include <string.h>

#include "core/problem.h"

#define NAMES(feature, word) .bit = (feature), .constant = #feature, .name = word

/* Fields of fattn_problem. */
#define FIELD(field, type) .name = #field, .offset = offsetof(fattn_problem, field), .kind = type
#define INTEGER(field, default, least, most)                                            \
    {                                                                                   \
        FIELD(field, FATTN_FIELD_INTEGER), .usual = default, .low = least, .high = most \
    }
#define REAL(field)                    \
    {                                  \
        FIELD(field, FATTN_FIELD_REAL) \
    }
#define DTYPE(field)                    \
    {                                   \
        FIELD(field, FATTN_FIELD_DTYPE) \
    }

/* In the order of the bits. */
static const fattn_feature rows[] = {
    {NAMES(FATTN_CAUSAL, "causal"), .on_diagonal = true, .option = "causal",
     .help = "query i attends to keys up to i + off (see --anchor)"},
    {NAMES(FATTN_WINDOW, "window"), .on_diagonal = true, .option = "window L,R",
     .help = "keys attended left and right of the diagonal;\n-1: all", .values = 2,
     .fields = {INTEGER(window_left, -1, 0, 0), INTEGER(window_right, -1, 0, 0)}},
    {NAMES(FATTN_SCALE, "scale"), .option = "scale X", .help = "of the scores; default 1 / sqrt(D)",
     .values = 1, .fields = {REAL(scale)}},
    {NAMES(FATTN_SOFTCAP, "softcap"), .option = "softcap X",
     .help = "scores become X * tanh(score / X); 0: off", .zero_is_none = true, .values = 1,
     .fields = {REAL(softcap)}},
    {NAMES(FATTN_BIAS, "bias"), .fields = {DTYPE(dtype_bias)}},
    {NAMES(FATTN_ALIBI, "alibi"), .on_diagonal = true,
     .fields = {INTEGER(alibi_batch_stride, 0, 0, 0)}},
    {NAMES(FATTN_MASK, "mask")},
    {NAMES(FATTN_BLOCK_MASK, "block_mask"), .values = 2,
     .fields = {INTEGER(block_m, 0, 1, FATTN_SIZE_LIMIT),
                INTEGER(block_n, 0, 1, FATTN_SIZE_LIMIT)}},
    {NAMES(FATTN_SINK, "sink")},
    {NAMES(FATTN_DROPOUT, "dropout"), .option = "dropout P",
     .help = "probability of dropping a weight; 0: none", .zero_is_none = true, .values = 1,
     .fields = {REAL(dropout_p), INTEGER(batch_offset, 0, 0, 0), INTEGER(head_offset, 0, 0, 0)}},
    {NAMES(FATTN_CU_SEQLENS_Q, "cu_seqlens_q"),
     .fields = {INTEGER(total_q, 0, 0, FATTN_SIZE_LIMIT)}},
    {NAMES(FATTN_CU_SEQLENS_K, "cu_seqlens_k"), .fields = {INTEGER(total_k, 0, 0, 0)}},
    {NAMES(FATTN_SEQUSED_Q, "seqused_q")},
    {NAMES(FATTN_SEQUSED_K, "seqused_k")},
    {NAMES(FATTN_PAGED, "paged"), .values = 1,
     .fields = {INTEGER(page_size, 0, 1, FATTN_SIZE_LIMIT),
                INTEGER(num_pages, 0, 0, FATTN_SIZE_LIMIT),
                INTEGER(max_pages, 0, 0, FATTN_SIZE_LIMIT), INTEGER(block_table_stride, 0, 0, 0)}},
    {NAMES(FATTN_POSITIONS, "positions")},
    {NAMES(FATTN_DLSE, "dlse")},
    {NAMES(FATTN_ACCUMULATE, "accumulate"), .option = "accumulate",
     .help = "gradients, in f32, are added to existing ones"},
    {NAMES(FATTN_DETERMINISTIC, "deterministic"), .option = "deterministic",
     .help = "gradients are bitwise equal from run to run"},
    {NAMES(FATTN_BATCH_INVARIANT, "batch_invariant"), .option = "batch-invariant",
     .help = "a row's result depends only on its own inputs"},
    {NAMES(FATTN_CHECKED, "checked"), .option = "checked",
     .help = "runs validate lengths and tables on GPUs as well"},
    {NAMES(FATTN_SEQSTART_K, "seqstart_k")},
    {NAMES(FATTN_ALIBI_BIAS, "alibi_bias")},
    {NAMES(FATTN_CHUNK, "chunk"), .on_diagonal = true, .option = "chunk N",
     .help = "query i attends to keys of the chunk of N that\ni + off is in", .values = 1,
     .fields = {INTEGER(chunk, 0, 1, FATTN_SIZE_LIMIT)}},
    {NAMES(FATTN_DESCALE, "descale")},
};
_Static_assert(sizeof rows / sizeof rows[0] == FATTN_FEATURE_COUNT &&
                   FATTN_FEATURES_ALL == (UINT64_C(1) << FATTN_FEATURE_COUNT) - 1,
               "every feature needs a row");

const fattn_feature *fattn_feature_row(int bit) { return &rows[bit]; }

const char *fattn_feature_name(int bit)
{
    return bit >= 0 && bit < FATTN_FEATURE_COUNT ? rows[bit].name : NULL;
}

int64_t fattn_feature_integer(const fattn_problem *problem, const fattn_feature_field *field)
{
    const char *const at = (const char *)problem + field->offset;
    int64_t integer;
    fattn_dtype dtype;
    if (field->kind == FATTN_FIELD_DTYPE) {
        memcpy(&dtype, at, sizeof dtype);
        return (int64_t)dtype;
    }
    memcpy(&integer, at, sizeof integer);
    return integer;
}

double fattn_feature_real(const fattn_problem *problem, const fattn_feature_field *field)
{
    double real;
    memcpy(&real, (const char *)problem + field->offset, sizeof real);
    return real;
}

const char *fattn_feature_value(const fattn_problem *problem, int bit, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int n = 0; n < rows[bit].values && used < size; n++) {
        const fattn_feature_field *const field = &rows[bit].fields[n];
        const char *const before = n ? "," : "(";
        const char *const after = n + 1 == rows[bit].values ? ")" : "";
        used += (size_t)(field->kind == FATTN_FIELD_REAL
                             ? snprintf(text + used, size - used, "%s%g%s", before,
                                        fattn_feature_real(problem, field), after)
                             : snprintf(text + used, size - used, "%s%lld%s", before,
                                        (long long)fattn_feature_integer(problem, field), after));
    }
    return text;
}
