/* SPDX-License-Identifier: Apache-2.0 */
#include "core/tensors.h"

#include <stddef.h>

#include "core/dtype.h"
#include "core/problem.h"

#define TENSOR(field) .name = #field, .offset = offsetof(fattn_problem, field), .strides = p->field
#define QUERIES .packed = packed_q, .rows = p->total_q, .heads = p->heads_q
#define KEYS .packed = packed_k, .rows = paged ? p->page_size : p->total_k, .heads = p->heads_k

void fattn_tensors_of(const fattn_problem *p, fattn_tensor tensors[FATTN_TENSORS])
{
    const bool paged = p->features & FATTN_PAGED;
    const bool packed_q = p->features & FATTN_CU_SEQLENS_Q;
    const bool packed_k = p->features & FATTN_CU_SEQLENS_K && !paged;
    const bool backward = p->op == FATTN_BACKWARD;
    const uint32_t gradients = backward ? p->outputs : 0;
    const int64_t dim = p->dim, dim_v = p->dim_v;
    const fattn_dtype dq = fattn_gradient_dtype(p, p->dtype);
    const fattn_dtype dk = fattn_gradient_dtype(p, p->dtype_kv);
    const fattn_dtype dv = fattn_gradient_dtype(p, p->dtype_v);
    const bool has_dq = gradients & FATTN_OUT_DQ, has_dk = gradients & FATTN_OUT_DK;
    const bool has_dv = gradients & FATTN_OUT_DV;
    const fattn_tensor all[FATTN_TENSORS] = {
        {TENSOR(q), QUERIES, .dtype = p->dtype, .used = true, .channels = dim},
        {TENSOR(k), KEYS, .dtype = p->dtype_kv, .used = true, .channels = dim},
        {TENSOR(v), KEYS, .dtype = p->dtype_v, .used = true, .channels = dim_v},
        {TENSOR(o), QUERIES, .dtype = p->dtype_o, .used = true, .channels = dim_v},
        {TENSOR(dout), QUERIES, .dtype = p->dtype_o, .used = backward, .channels = dim_v},
        {TENSOR(dq), QUERIES, .dtype = dq, .used = has_dq, .channels = dim},
        {TENSOR(dk), KEYS, .dtype = dk, .used = has_dk, .channels = dim},
        {TENSOR(dv), KEYS, .dtype = dv, .used = has_dv, .channels = dim_v},
    };
    for (int n = 0; n < FATTN_TENSORS; n++) {
        tensors[n] = all[n];
    }
}

bool fattn_tensor_is_aligned(const fattn_problem *p, const fattn_tensor *tensor, int64_t bytes)
{
    const int64_t elements = bytes / fattn_dtype_size(tensor->dtype);
    const fattn_strides *const s = &tensor->strides;
    return p->pointer_alignment >= bytes && s->batch % elements == 0 && s->seq % elements == 0 &&
           s->head % elements == 0;
}
