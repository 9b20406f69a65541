/* SPDX-License-Identifier: Apache-2.0 */
/* A table of a problem's tensors, for code that treats them all alike. */
#ifndef FATTN_CORE_TENSORS_H
#define FATTN_CORE_TENSORS_H

#include <stdbool.h>

#include "fattn/fattn.h"

enum {
    FATTN_TENSOR_Q,
    FATTN_TENSOR_K,
    FATTN_TENSOR_V,
    FATTN_TENSOR_O,
    FATTN_TENSOR_DOUT,
    FATTN_TENSOR_DQ,
    FATTN_TENSOR_DK,
    FATTN_TENSOR_DV,
    FATTN_TENSORS
};

typedef struct fattn_tensor {
    const char *name;
    size_t offset; /* of its strides in fattn_problem */
    fattn_strides strides;
    fattn_dtype dtype;
    bool used;                     /* the operation has it */
    bool packed;                   /* sequences follow one another along the rows: no batch axis */
    int64_t rows, heads, channels; /* of a batch entry, or of a page */
} fattn_tensor;

/* Fills the table in the order of the enumeration. If the problem is not normalised yet, dtypes and
 * totals that the caller left at their defaults are 0. */
void fattn_tensors_of(const fattn_problem *problem, fattn_tensor tensors[FATTN_TENSORS]);

/* Whether all rows of the tensor begin at multiples of `bytes`, which is a multiple of its element
 * size: by its strides, and by the problem's pointer_alignment. */
bool fattn_tensor_is_aligned(const fattn_problem *problem, const fattn_tensor *tensor,
                             int64_t bytes);

#endif
