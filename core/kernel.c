/* SPDX-License-Identifier: Apache-2.0 */
#include "core/kernel.h"

#include <stdio.h>

#include "core/dtype.h"
#include "core/feature.h"
#include "core/integer.h"
#include "core/problem.h"
#include "core/tensors.h"

/* Appends the names of the missing features to "does not honour". */
static const char *name_missing(uint64_t missing, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "does not honour");
    for (int bit = 0; bit < FATTN_FEATURE_COUNT && used < size; bit++) {
        if (missing >> bit & 1) {
            used += (size_t)snprintf(text + used, size - used, " %s", fattn_feature_name(bit));
        }
    }
    return text;
}

/* The name of an input whose rows do not all begin at multiples of `align` bytes for certain, or
 * NULL. */
static const char *misaligned(const fattn_problem *p, int64_t align)
{
    fattn_tensor tensors[FATTN_TENSORS];
    fattn_tensors_of(p, tensors);
    tensors[FATTN_TENSOR_DOUT].dtype = p->dtype; /* the stricter case: f32 rows align better */
    for (int n = 0; align && n < FATTN_TENSORS; n++) {
        const bool input = n <= FATTN_TENSOR_V || n == FATTN_TENSOR_DOUT;
        if (input && tensors[n].used && !fattn_tensor_is_aligned(p, &tensors[n], align)) {
            return tensors[n].name;
        }
    }
    return NULL;
}

/* Whether an entry of dbias is a sum over an axis. */
static bool sums_dbias(const fattn_problem *p)
{
    const int64_t extent[4] = {p->batch, p->heads_q, p->seqlen_q, p->seqlen_k};
    bool sums = false;
    for (int axis = 0; axis < 4 && p->outputs & FATTN_OUT_DBIAS; axis++) {
        sums = sums || (p->dbias_stride[axis] == 0 && extent[axis] > 1);
    }
    return sums;
}

const char *fattn_kernel_declines(const fattn_kernel *kernel, const fattn_problem *p, char *text,
                                  size_t size)
{
    if (!(kernel->ops & FATTN_OP_BIT(p->op))) {
        return p->op == FATTN_FORWARD ? "computes no forward" : "computes no backward";
    }
    if (!(kernel->dtypes & FATTN_DTYPE_BIT(p->dtype))) {
        snprintf(text, size, "takes no %s", fattn_dtype_name(p->dtype));
        return text;
    }
    if (kernel->own_dtype_o && p->dtype_o != p->dtype) {
        snprintf(text, size, "takes no dtype_o %s with dtype %s", fattn_dtype_name(p->dtype_o),
                 fattn_dtype_name(p->dtype));
        return text;
    }
    if (p->features & ~kernel->features) {
        return name_missing(p->features & ~kernel->features, text, size);
    }
    const uint32_t own = kernel->caches_alone ? 0 : FATTN_DTYPE_BIT(p->dtype);
    const uint32_t dtypes_kv = kernel->dtypes_kv | own;
    if (!(dtypes_kv & FATTN_DTYPE_BIT(p->dtype_kv)) || !(dtypes_kv & FATTN_DTYPE_BIT(p->dtype_v))) {
        snprintf(text, size, "takes no q, k and v in %s, %s and %s", fattn_dtype_name(p->dtype),
                 fattn_dtype_name(p->dtype_kv), fattn_dtype_name(p->dtype_v));
        return text;
    }
    if (!kernel->any_bias && p->features & FATTN_BIAS && p->dtype_bias != p->dtype &&
        p->dtype_bias != fattn_statistics_dtype(p)) {
        snprintf(text, size, "takes no bias in %s with dtype %s", fattn_dtype_name(p->dtype_bias),
                 fattn_dtype_name(p->dtype));
        return text;
    }
    if (p->dim > kernel->dim_max || p->dim_v > kernel->dim_max) {
        snprintf(text, size, "takes head dimensions up to %lld, not dim %lld, dim_v %lld",
                 (long long)kernel->dim_max, (long long)p->dim, (long long)p->dim_v);
        return text;
    }
    if (kernel->dim_v_max && p->dim_v > kernel->dim_v_max) {
        snprintf(text, size, "takes values of at most %lld channels, not %lld",
                 (long long)kernel->dim_v_max, (long long)p->dim_v);
        return text;
    }
    if (kernel->adds_dbias && p->features & FATTN_DETERMINISTIC && sums_dbias(p)) {
        return "sums dbias over an axis in any order";
    }
    if (kernel->dropout_max && p->features & FATTN_DROPOUT && p->dropout_p > kernel->dropout_max) {
        snprintf(text, size, "takes dropout_p up to %g, not %g", kernel->dropout_max, p->dropout_p);
        return text;
    }
    const int64_t rows = fattn_problem_rows(p);
    if (kernel->rows_max && rows > kernel->rows_max) {
        snprintf(text, size, "takes at most %lld query rows per key/value head, not %lld",
                 (long long)kernel->rows_max, (long long)rows);
        return text;
    }
    if (rows < kernel->rows_min && !(p->features & FATTN_BATCH_INVARIANT)) {
        snprintf(text, size, "takes at least %lld query rows per key/value head, not %lld",
                 (long long)kernel->rows_min, (long long)rows);
        return text;
    }
    const char *const tensor = misaligned(p, kernel->align);
    if (tensor) {
        snprintf(text, size, "needs rows aligned to %lld bytes, which those of %s are not",
                 (long long)kernel->align, tensor);
        return text;
    }
    return kernel->cannot ? kernel->cannot(kernel, p) : NULL;
}

bool fattn_kernel_fits(const fattn_kernel *kernel, const fattn_problem *p, int64_t memory)
{
    bool fits = !kernel->must_fit;
    for (const fattn_tile *tile = kernel->tiles; !fits && tile->br; tile++) {
        const int64_t bytes = kernel->fast_bytes(kernel, p, *tile);
        fits = bytes >= 0 && bytes <= memory;
    }
    return fits;
}

int64_t fattn_kernel_rows(const fattn_kernel *kernel, const fattn_problem *p)
{
    return kernel->packs_groups ? fattn_problem_rows(p) : p->seqlen_q;
}

int64_t fattn_kernel_heads(const fattn_kernel *kernel, const fattn_problem *p)
{
    return kernel->packs_groups ? p->heads_k : p->heads_q;
}

int64_t fattn_kernel_blocks(const fattn_kernel *kernel, const fattn_problem *p)
{
    const int64_t rows = fattn_kernel_rows(kernel, p), br = kernel->tiles[0].br;
    int64_t blocks = fattn_ceil_div(rows, br);
    const bool overflow = __builtin_mul_overflow(blocks, fattn_kernel_heads(kernel, p), &blocks) ||
                          __builtin_mul_overflow(blocks, p->batch, &blocks);
    return overflow ? INT64_MAX : blocks;
}
