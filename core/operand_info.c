/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions fattn_operand_*(), with which bindings allocate and check arrays: a view of
 * the list in operands.h. */
#include <string.h>

#include "core/abi.h"
#include "core/dtype.h"
#include "core/operands.h"
#include "core/problem.h"
#include "core/status.h"

void fattn_operand_info_init(fattn_operand_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
}

/* The width decides an integer's type; 8 bytes are i64, but u64 in seed_ptr and offset_ptr. */
static const char *type_of(const fattn_operand *operand, int64_t bytes)
{
    if (operand->dtype) {
        return fattn_dtype_name(operand->dtype);
    }
    const bool words = operand->offset == offsetof(fattn_buffers, seed_ptr) ||
                       operand->offset == offsetof(fattn_buffers, offset_ptr);
    return bytes == 1 ? "u8" : bytes == 4 ? "i32" : words ? "u64" : "i64";
}

static void write_shape(const fattn_problem *p, const fattn_operand *operand, int64_t bytes,
                        fattn_operand_info *info)
{
    const fattn_region *const r = &operand->region;
    for (int a = 0; a < 4; a++) {
        info->shape[a] = 1;
    }
    switch (operand->kind) {
    case FATTN_OPERAND_TENSOR:
        info->rank = 4;
        info->shape[3] = r->run / bytes, info->stride[3] = 1;
        break;
    case FATTN_OPERAND_SCORES: info->rank = 4; break;
    case FATTN_OPERAND_TABLE: info->rank = 2; break;
    case FATTN_OPERAND_VECTOR:
        info->rank = 1;
        info->shape[0] = r->extent[1], info->stride[0] = 1;
        return;
    case FATTN_OPERAND_LSE:
        info->rank = 3;
        info->shape[0] = p->features & FATTN_CU_SEQLENS_Q ? 1 : p->batch;
        info->shape[1] = p->heads_q, info->shape[2] = p->total_q;
        info->stride[0] = p->heads_q * p->total_q, info->stride[1] = p->total_q;
        info->stride[2] = 1;
        return;
    }
    const int axes = operand->kind == FATTN_OPERAND_TENSOR ? 3 : info->rank;
    for (int a = 0; a < axes; a++) {
        info->shape[a] = r->extent[a], info->stride[a] = r->stride[a] / bytes;
    }
}

static fattn_operand_info describe(const fattn_problem *p, const fattn_operand *operand)
{
    fattn_operand_info info;
    fattn_operand_info_init(&info);
    const int64_t bytes = operand->dtype ? fattn_dtype_size(operand->dtype) : operand->region.run;
    info.name = operand->name;
    info.type = type_of(operand, bytes);
    info.dtype = operand->dtype;
    info.offset = (int64_t)operand->offset;
    info.element_bytes = bytes;
    info.alignment = operand->alignment;
    info.written = operand->output;
    write_shape(p, operand, bytes, &info);
    (void)fattn_region_span(&operand->region, &info.bytes); /* fits: the problem was checked */
    info.required = !operand->optional && info.bytes > 0;
    return info;
}

/* The problem's operands. */
static fattn_status list(const fattn_problem *problem, fattn_problem *normal,
                         fattn_operand operands[FATTN_OPERANDS_MAX], int *count)
{
    const fattn_status status = fattn_problem_normalise(problem, normal);
    *count = status ? 0 : fattn_operands(normal, NULL, operands);
    return status;
}

fattn_status fattn_operand_count(const fattn_problem *problem, int *count)
{
    fattn_problem normal;
    fattn_operand operands[FATTN_OPERANDS_MAX];
    if (!count) {
        return fattn_fail(FATTN_NULL_POINTER, "count is NULL");
    }
    return list(problem, &normal, operands, count);
}

fattn_status fattn_operand_get_info(const fattn_problem *problem, int index,
                                    fattn_operand_info *info)
{
    fattn_problem normal;
    fattn_operand operands[FATTN_OPERANDS_MAX];
    int count = 0;
    const fattn_status status = list(problem, &normal, operands, &count);
    if (status) {
        return status;
    }
    if (index < 0 || index >= count) {
        return fattn_fail(FATTN_INVALID_ARGUMENT, "index is %d, not in 0..%d", index, count - 1);
    }
    const fattn_operand_info known = describe(&normal, &operands[index]);
    return fattn_abi_write(info, &known, sizeof known, "fattn_operand_info");
}

fattn_status fattn_operand_find(const fattn_problem *problem, const char *name,
                                fattn_operand_info *info)
{
    fattn_problem normal;
    fattn_operand operands[FATTN_OPERANDS_MAX];
    int count = 0;
    if (!name) {
        return fattn_fail(FATTN_NULL_POINTER, "name is NULL");
    }
    const fattn_status status = list(problem, &normal, operands, &count);
    if (status) {
        return status;
    }
    for (int i = 0; i < count; i++) {
        if (strcmp(operands[i].name, name) == 0) {
            const fattn_operand_info known = describe(&normal, &operands[i]);
            return fattn_abi_write(info, &known, sizeof known, "fattn_operand_info");
        }
    }
    return fattn_fail(FATTN_INVALID_ARGUMENT, "name is \"%.64s\": the problem has no such operand",
                      name);
}
