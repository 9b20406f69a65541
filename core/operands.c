/* SPDX-License-Identifier: Apache-2.0 */
#include "core/operands.h"

#include <string.h>

#include "core/dtype.h"
#include "core/problem.h"

/* The list under construction. */
typedef struct list {
    const fattn_problem *p;
    const fattn_buffers *buffers;
    fattn_operand *operands;
    int count;
} list;

static fattn_operand *append(list *l, const char *name, size_t offset, int64_t element_bytes)
{
    fattn_operand *const operand = &l->operands[l->count++];
    memset(operand, 0, sizeof *operand);
    operand->name = name;
    operand->offset = offset;
    operand->alignment = element_bytes;
    if (l->buffers) {
        const void *pointer = NULL;
        memcpy(&pointer, (const char *)l->buffers + offset, sizeof pointer);
        operand->region.base = (uintptr_t)pointer;
    }
    return operand;
}

/* A box (batch, sequence, head, channel). */
static fattn_operand *append_tensor(list *l, const char *name, size_t offset, fattn_dtype dtype,
                                    const int64_t extent[3], fattn_strides strides,
                                    int64_t channels)
{
    const int64_t bytes = fattn_dtype_size(dtype);
    fattn_operand *const operand = append(l, name, offset, bytes);
    operand->dtype = dtype;
    if (l->p->pointer_alignment > bytes) {
        operand->alignment = l->p->pointer_alignment;
    }
    const int64_t stride[3] = {strides.batch, strides.seq, strides.head};
    for (int a = 0; a < 3; a++) {
        operand->region.extent[a] = extent[a];
        operand->region.stride[a] = stride[a] * bytes;
    }
    operand->region.extent[3] = 1;
    operand->region.run = channels * bytes;
    return operand;
}

/* A box (batch, head, query, key) of single elements. */
static fattn_operand *append_scores(list *l, const char *name, size_t offset, fattn_dtype dtype,
                                    int64_t bytes, const int64_t stride[4], int64_t block_m,
                                    int64_t block_n)
{
    fattn_operand *const operand = append(l, name, offset, bytes);
    const int64_t extent[4] = {l->p->batch, l->p->heads_q, (l->p->seqlen_q + block_m - 1) / block_m,
                               (l->p->seqlen_k + block_n - 1) / block_n};
    operand->dtype = dtype;
    operand->kind = FATTN_OPERAND_SCORES;
    for (int a = 0; a < 4; a++) {
        operand->region.extent[a] = extent[a];
        operand->region.stride[a] = stride[a] * bytes;
    }
    operand->region.run = bytes;
    return operand;
}

/* rows x columns of elements, rows `pitch` elements apart. */
static fattn_operand *append_table(list *l, const char *name, size_t offset, fattn_dtype dtype,
                                   int64_t bytes, int64_t rows, int64_t pitch, int64_t columns)
{
    fattn_operand *const operand = append(l, name, offset, bytes);
    operand->dtype = dtype;
    operand->kind = FATTN_OPERAND_TABLE;
    operand->region = (fattn_region){
        .base = operand->region.base,
        .extent = {rows, columns, 1, 1},
        .stride = {pitch * bytes, bytes, 0, 0},
        .run = bytes,
    };
    return operand;
}

static fattn_operand *append_vector(list *l, const char *name, size_t offset, fattn_dtype dtype,
                                    int64_t bytes, int64_t entries)
{
    fattn_operand *const operand = append_table(l, name, offset, dtype, bytes, 1, 0, entries);
    operand->kind = FATTN_OPERAND_VECTOR;
    return operand;
}

/* k_descale or v_descale. */
static void append_descale(list *l, const char *name, size_t offset)
{
    const fattn_problem *const p = l->p;
    const fattn_dtype statistics = fattn_statistics_dtype(p);
    const int64_t bytes = fattn_dtype_size(statistics);
    fattn_operand *const operand = append_table(l, name, offset, statistics, bytes, p->batch,
                                                p->descale_stride[0], p->heads_k);
    operand->region.stride[1] = p->descale_stride[1] * bytes;
}

/* lse or dlse. */
static fattn_operand *append_lse(list *l, const char *name, size_t offset)
{
    const fattn_problem *const p = l->p;
    const fattn_dtype statistics = fattn_statistics_dtype(p);
    const int64_t rows = p->heads_q * (p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch);
    fattn_operand *const operand = append_table(
        l, name, offset, statistics, fattn_dtype_size(statistics), rows, p->total_q, p->total_q);
    operand->kind = FATTN_OPERAND_LSE;
    return operand;
}

#define AT(field) offsetof(fattn_buffers, field)

static void append_tensors(list *l)
{
    const fattn_problem *const p = l->p;
    const bool forward = p->op == FATTN_FORWARD;
    const bool paged = p->features & FATTN_PAGED;
    const fattn_dtype statistics = fattn_statistics_dtype(p);
    const bool packed_q = p->features & FATTN_CU_SEQLENS_Q;
    const bool packed_k = p->features & FATTN_CU_SEQLENS_K;
    const int64_t queries[3] = {packed_q ? 1 : p->batch, p->total_q, p->heads_q};
    const int64_t keys[3] = {paged      ? p->num_pages
                             : packed_k ? 1
                                        : p->batch,
                             paged ? p->page_size : p->total_k, p->heads_k};

    append_tensor(l, "q", AT(q), p->dtype, queries, p->q, p->dim);
    append_tensor(l, "k", AT(k), p->dtype_kv, keys, p->k, p->dim);
    append_tensor(l, "v", AT(v), p->dtype_v, keys, p->v, p->dim_v);
    if (!forward || p->outputs & FATTN_OUT_O) {
        append_tensor(l, "o", AT(o), p->dtype_o, queries, p->o, p->dim_v)->output = forward;
    }
    if (!forward || p->outputs & FATTN_OUT_LSE) {
        append_lse(l, "lse", AT(lse))->output = forward;
    }
    if (forward) {
        return;
    }
    append_tensor(l, "dout", AT(dout), p->dtype_o, queries, p->dout, p->dim_v);
    if (p->features & FATTN_DLSE) {
        append_lse(l, "dlse", AT(dlse));
    }
    if (p->outputs & FATTN_OUT_DQ) {
        append_tensor(l, "dq", AT(dq), fattn_gradient_dtype(p, p->dtype), queries, p->dq, p->dim)
            ->output = true;
    }
    if (p->outputs & FATTN_OUT_DK) {
        append_tensor(l, "dk", AT(dk), fattn_gradient_dtype(p, p->dtype_kv), keys, p->dk, p->dim)
            ->output = true;
    }
    if (p->outputs & FATTN_OUT_DV) {
        append_tensor(l, "dv", AT(dv), fattn_gradient_dtype(p, p->dtype_v), keys, p->dv, p->dim_v)
            ->output = true;
    }
    if (p->outputs & FATTN_OUT_DBIAS) {
        fattn_operand *const dbias = append_scores(
            l, "dbias", AT(dbias), statistics, fattn_dtype_size(statistics), p->dbias_stride, 1, 1);
        dbias->output = true;
        for (int a = 0; a < 4; a++) { /* an axis that is summed over has length 1, even if the */
            if (p->dbias_stride[a] == 0) { /* problem has length 0 there: the sum is 0 then */
                dbias->region.extent[a] = 1;
            }
        }
    }
    if (p->outputs & FATTN_OUT_DSINK) {
        append_vector(l, "dsink", AT(dsink), statistics, fattn_dtype_size(statistics), p->heads_q)
            ->output = true;
    }
}

static void append_options(list *l)
{
    const fattn_problem *const p = l->p;
    const fattn_dtype statistics = fattn_statistics_dtype(p);
    const int64_t float_bytes = fattn_dtype_size(statistics);
    if (p->features & FATTN_BIAS) {
        append_scores(l, "bias", AT(bias), p->dtype_bias, fattn_dtype_size(p->dtype_bias),
                      p->bias_stride, 1, 1);
    }
    if (p->features & FATTN_MASK) {
        append_scores(l, "mask", AT(mask), 0, 1, p->mask_stride, 1, 1);
    }
    if (p->features & FATTN_BLOCK_MASK) {
        append_scores(l, "block_mask", AT(block_mask), 0, 1, p->block_mask_stride, p->block_m,
                      p->block_n);
    }
    if (p->features & FATTN_ALIBI) {
        append_table(l, "alibi_slopes", AT(alibi_slopes), statistics, float_bytes,
                     p->alibi_batch_stride ? p->batch : 1, p->alibi_batch_stride, p->heads_q);
    }
    if (p->features & FATTN_DESCALE) {
        append_descale(l, "k_descale", AT(k_descale));
        append_descale(l, "v_descale", AT(v_descale));
    }
    if (p->features & FATTN_SINK) {
        append_vector(l, "sink", AT(sink), statistics, float_bytes, p->heads_q);
    }
    if (p->features & FATTN_PAGED) {
        append_table(l, "block_table", AT(block_table), 0, 4, p->batch, p->block_table_stride,
                     p->max_pages);
    }
    if (p->features & FATTN_DROPOUT) {
        append_vector(l, "seed_ptr", AT(seed_ptr), 0, 8, 1)->optional = true;
        append_vector(l, "offset_ptr", AT(offset_ptr), 0, 8, 1)->optional = true;
    }

    const struct {
        uint64_t feature;
        const char *name;
        size_t offset;
        int64_t bytes, entries;
        bool optional;
    } arrays[] = {
        {FATTN_CU_SEQLENS_Q, "cu_seqlens_q", AT(cu_seqlens_q), 4, p->batch ? p->batch + 1 : 0,
         false},
        {FATTN_CU_SEQLENS_K, "cu_seqlens_k", AT(cu_seqlens_k), 4, p->batch ? p->batch + 1 : 0,
         false},
        {FATTN_SEQUSED_Q, "seqused_q", AT(seqused_q), 4, p->batch, false},
        {FATTN_SEQUSED_K, "seqused_k", AT(seqused_k), 4, p->batch, false},
        {FATTN_SEQSTART_K, "seqstart_k", AT(seqstart_k), 4, p->batch, false},
        {FATTN_POSITIONS, "q_offsets", AT(q_offsets), 8, p->batch, true},
        {FATTN_POSITIONS, "k_offsets", AT(k_offsets), 8, p->batch, true},
        {FATTN_POSITIONS, "wholes_q", AT(wholes_q), 8, p->batch, true},
        {FATTN_POSITIONS, "wholes_k", AT(wholes_k), 8, p->batch, true},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if (p->features & arrays[i].feature) {
            append_vector(l, arrays[i].name, arrays[i].offset, 0, arrays[i].bytes,
                          arrays[i].entries)
                ->optional = arrays[i].optional;
        }
    }
}

int fattn_operands(const fattn_problem *problem, const fattn_buffers *buffers,
                   fattn_operand operands[FATTN_OPERANDS_MAX])
{
    list l = {problem, buffers, operands, 0};
    append_tensors(&l);
    append_options(&l);
    return l.count;
}

/* --- Pointers --------------------------------------------------------------------------------- */

void fattn_pointers_make(const fattn_problem *problem, fattn_pointers *pointers)
{
    fattn_operand operands[FATTN_OPERANDS_MAX];
    const int count = fattn_operands(problem, NULL, operands);
    pointers->count = pointers->outputs = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < count; i++) {
            const fattn_operand *const operand = &operands[i];
            int64_t bytes = 0;
            (void)fattn_region_span(&operand->region, &bytes); /* fits: the problem was checked */
            if (bytes == 0 || operand->output != (pass == 0)) {
                continue;
            }
            const int at = pointers->count++;
            pointers->outputs += operand->output;
            pointers->of[at].offset = operand->offset;
            pointers->of[at].bytes = (uintptr_t)bytes;
            pointers->of[at].rest = (uintptr_t)operand->alignment - 1;
            pointers->of[at].optional = operand->optional;
        }
    }
}

static uintptr_t base_of(const fattn_pointers *pointers, int i, const fattn_buffers *buffers)
{
    const void *pointer = NULL;
    memcpy(&pointer, (const char *)buffers + pointers->of[i].offset, sizeof pointer);
    return (uintptr_t)pointer;
}

/* Whether two spans share a byte. */
static bool spans_meet(uintptr_t a, uintptr_t a_bytes, uintptr_t b, uintptr_t b_bytes)
{
    return a < b + b_bytes && b < a + a_bytes;
}

bool fattn_pointers_are_valid(const fattn_pointers *pointers, const fattn_buffers *buffers)
{
    uintptr_t base[FATTN_OPERANDS_MAX];
    for (int i = 0; i < pointers->count; i++) {
        base[i] = base_of(pointers, i, buffers);
        if (base[i] == 0 && pointers->of[i].optional) {
            continue;
        }
        if (base[i] == 0 || base[i] & pointers->of[i].rest ||
            base[i] > UINTPTR_MAX - pointers->of[i].bytes) {
            return false;
        }
        for (int n = 0; n < i && n < pointers->outputs; n++) {
            if (spans_meet(base[n], pointers->of[n].bytes, base[i], pointers->of[i].bytes)) {
                return false;
            }
        }
    }
    return true;
}

bool fattn_pointers_avoid(const fattn_pointers *pointers, const fattn_buffers *buffers,
                          const void *memory, size_t bytes)
{
    for (int i = 0; i < pointers->count; i++) {
        const uintptr_t base = base_of(pointers, i, buffers);
        if (base && spans_meet(base, pointers->of[i].bytes, (uintptr_t)memory, bytes)) {
            return false;
        }
    }
    return true;
}
