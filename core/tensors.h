/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a problem: what is asked of each of them walks this table. */
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
    size_t offset; /* of its strides in the problem ... */
    fattn_strides strides;
    fattn_dtype dtype;
    bool used;                     /* the operation has it */
    bool packed;                   /* sequences follow one another along the rows: no batch axis */
    int64_t rows, heads, channels; /* of a batch entry, or of a page */
} fattn_tensor;

/* In the order of the enumeration. Of a problem that is not normalised yet, types and rows that the
 * caller left out are 0. */
void fattn_tensors_of(const fattn_problem *problem, fattn_tensor tensors[FATTN_TENSORS]);

/* Whether rows of the tensor begin at multiples of so many bytes, a multiple of its element: by its
 * strides, and by what is promised of the pointer. */
bool fattn_tensor_is_aligned(const fattn_problem *problem, const fattn_tensor *tensor,
                             int64_t bytes);

#endif
